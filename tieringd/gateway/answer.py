"""An answer to a client: bytes to be sent, and what they hold until they are."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tieringd.formats.kafka_wire.fetch_answer import readdressed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tieringd.formats.kafka_wire.pieces import Piece
    from tieringd.gateway.archive_answers import Onward, PartitionKey


@dataclass(frozen=True, slots=True)
class Answer:
    """What goes to the client in place of the broker's response."""

    pieces: tuple[Piece, ...]
    release: Callable[[], None]
    """To be called once, when the pieces were sent or given up."""
    archived: bool
    """False when they are the broker's own bytes."""
    onward: Mapping[PartitionKey, Onward] = field(default_factory=dict)
    """Of a Fetch: how all of its partitions go on, when all of them will be read from the archive again."""

    def addressed_to(self, correlation_id: int) -> Answer:
        """Return it as the answer to another request that asks the same."""
        return replace(self, pieces=readdressed(self.pieces, correlation_id))
