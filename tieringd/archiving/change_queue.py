"""
The changes of one partition's manifest that others prepared, and its archiver has yet to commit.

It decides nothing of a change and keeps none over a failure: whoever offered it hears how it ended, and
offers it again if it still makes sense then. So no offer waits longer than the archiver's next step.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from tieringd.storage.background import background

if TYPE_CHECKING:
    from tieringd.archive.manifest_store import StoredManifest
    from tieringd.archiving.claim import Claim
    from tieringd.archiving.manifest_change import ManifestChange
    from tieringd.errors import TieringError


class ChangeQueue:
    """
    Hold what was offered, in order. Owned by an archiver, and used on one event loop.

    It may be cancelled at any await: the change that was being committed is then as if its outcome were
    unknown, and whoever offered it is told of the end when the queue is closed.
    """

    def __init__(self, claim: Claim) -> None:
        self._claim = claim
        self._offers: deque[tuple[ManifestChange, asyncio.Future[None]]] = deque()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._offers)

    def offer(self, change: ManifestChange) -> asyncio.Future[None]:
        """Take *change*; the future ends as `Archiver.offer` says."""
        future = asyncio.get_running_loop().create_future()
        if self._is_closed:
            future.cancel()
        else:
            self._offers.append((change, future))
        return future

    async def commit_all(self, stored: StoredManifest) -> StoredManifest:
        """
        Commit one change after the other; return what is stored then.

        Raises:
            TieringError: A change failed; `fail` tells it, and those after it.
        """
        while self._offers:
            change, future = self._offers[0]
            if not future.done():  # Whoever offered it may have gone.
                with background():
                    stored = await change.commit(self._claim, stored)
            self._offers.popleft()
            if not future.done():
                future.set_result(None)
        return stored

    def fail(self, error: TieringError) -> None:
        """Give *error* to whoever waits: the step has ended, and did not commit their changes."""
        while self._offers:
            _, future = self._offers.popleft()
            if not future.done():
                future.set_exception(error)

    def close(self) -> None:
        """Cancel what was offered, and what will be."""
        self._is_closed = True
        while self._offers:
            self._offers.popleft()[1].cancel()


async def ended(future: asyncio.Future[None]) -> bool:
    """
    Wait until an offered change has ended; say whether the archiver still lives.

    A future that the archiver's end cancelled looks to `await` as if the waiting task were cancelled itself.

    Raises:
        TieringError: What the archiver's step ended with.
    """
    try:
        await asyncio.wait([future])
    finally:
        future.cancel()  # Where the waiting itself was cut off; else it has no effect.
    if future.cancelled():
        return False
    future.result()
    return True
