"""Two daemons beside one broker, most of the time: an operator has started one too many."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.world import World

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.fakes.log_writer import LogWriter


class Pair(World):
    """Everything of one seed. Call `run` once, on a virtual loop."""

    def _chances(self) -> dict[Callable[[LogWriter], Awaitable[None] | None], int]:
        return {
            self._append: 20,
            self._roll: 24,
            self._replicate: 12,
            self._second_daemon: 12,
            self._crash: 1,
            self._outage: 1,
            self._corrupt_one: 4,
        }
