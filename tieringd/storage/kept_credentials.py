"""
Credentials are renewed in time, also while nothing else asks the store for anything.

Each cloud's credentials are renewed when a request is signed with them. An endpoint without clients sends
none, and its credentials would end: the alert for that would be a false one, and the first client would wait
for the renewal, or find out that there is none.
"""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from tieringd.clock import wall_clock_ms
from tieringd.errors import TieringError
from tieringd.storage.resilient import ResilientStore

log = structlog.get_logger(__name__)

LOOK_SECONDS: Final = 60.0
"""Seconds between two looks at the end of the credentials."""
RENEWED_WITHIN_SECONDS: Final = 600
"""Credentials that end within this time are renewed. Each cloud's own are by then, or in some minutes."""


async def keep_credentials(store: ResilientStore) -> None:
    """
    Send a small request to *store* each minute while its credentials end soon, until cancelled.

    Keys of the configuration do not end, and cost no request. A failure is logged once, until a request
    succeeds.
    """
    has_failed = False
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        end = store.credentials_end
        if end is None or end - wall_clock_ms() / 1000 >= RENEWED_WITHIN_SECONDS:
            continue
        try:
            await store.list_page("meta/", limit=1)
        except TieringError as error:
            if not has_failed:
                log.warning("credentials that end soon cannot be renewed yet", error=str(error))
            has_failed = True
        else:
            has_failed = False
