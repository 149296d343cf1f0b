"""All kinds of faults of a swarm, by name, and which of them a store can have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.swarm.faults import PROCESS_FAULTS
from tests.swarm.host_faults import HOST_FAULTS
from tests.swarm.network_faults import NETWORK_FAULTS
from tests.swarm.operators import OPERATIONS
from tests.swarm.store_faults import STORE_FAULTS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.swarm.faults import Fault

KINDS: dict[str, type[Fault]] = {
    **STORE_FAULTS,
    **PROCESS_FAULTS,
    **HOST_FAULTS,
    **NETWORK_FAULTS,
    **OPERATIONS,
}


def kinds_of(store: str) -> list[str]:
    """Return the kinds that can happen with a store."""
    return [name for name, kind in KINDS.items() if store in kind.stores]


def slow(kinds: Iterable[str]) -> frozenset[str]:
    """Return which of some kinds take much longer than others."""
    return frozenset(name for name in kinds if KINDS[name].is_slow)
