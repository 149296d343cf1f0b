"""
Readiness: what keeps this process from its work, one answer for the page, the metric and the status.

The archiving has its reasons, and workers of the gateway have one: none of them serves clients. Where some
serve, clients are served, and the process is ready.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tieringd.archiving.reconciler import Reconciler
from tieringd.daemon.workers.worker_pool import WorkerPool

GATEWAY_WORKERS: Final = "gateway_workers"
"""The reason that no worker of the gateway serves clients."""


@dataclass(frozen=True, slots=True)
class Readiness:
    """The parts of a process whose faults keep it from being ready."""

    reconciler: Reconciler | None = None
    """None in an archive endpoint without a broker: it listens only when it is ready."""
    workers: WorkerPool | None = None
    """None where this process serves the gateway's clients itself."""

    def readiness(self) -> dict[str, str]:
        """
        Return what keeps the process from being ready, by a reason's name; empty text where nothing does.

        The same reasons are there at all times, for metrics.
        """
        found = {"starting": ""} if self.reconciler is None else self.reconciler.readiness()
        if self.workers is not None:
            found[GATEWAY_WORKERS] = self.workers.fault
        return found

    def faults(self) -> tuple[str, ...]:
        """Return the first reason of the archiving and that of the workers, as far as there are any."""
        found = (
            self.reconciler.fault if self.reconciler is not None else "",
            self.workers.fault if self.workers is not None else "",
        )
        return tuple(filter(None, found))
