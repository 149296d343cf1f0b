"""
Who reads on: whether a reader came to a place from the one before it.

A place is anything that can be told from others: the gateway's readers say nothing of themselves, so what
was read lately is all there is to go by.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

REMEMBERED = 4096


class ReadSequences:
    """The places that were read lately, of all readers together."""

    def __init__(self) -> None:
        self._recent: OrderedDict[Hashable, None] = OrderedDict()

    def note(self, place: Hashable) -> None:
        """Remember that *place* was read now."""
        self._recent[place] = None
        self._recent.move_to_end(place)
        if len(self._recent) > REMEMBERED:
            self._recent.popitem(last=False)

    def was_read(self, place: Hashable) -> bool:
        """Say whether *place* was read lately."""
        return place in self._recent
