"""Credentials of an archive that nothing asks for anything: renewed before they end."""

from __future__ import annotations

import asyncio
import sys
import time

import pytest
from structlog.testing import capture_logs

from tests.fakes.memory_store import MemoryStore
from tests.fakes.virtual_loop import virtually
from tests.unit.config.texts import ON, parsed
from tieringd.daemon.archive import opened_archive
from tieringd.errors import StorageDenied

HOUR_SECONDS = 3600


class RoleStore(MemoryStore):
    """Credentials that end in five minutes, and are renewed for an hour as a request is signed."""

    def __init__(self) -> None:
        super().__init__()
        self.credentials_end: float | None = time.time() + 300
        self.signed = 0
        self.refusals = 0

    async def list_page(self, *arguments, **options):
        """Renew the credentials, and list."""
        self.signed += 1
        if self.refusals:
            self.refusals -= 1
            raise StorageDenied("the role is gone", hint="attach it again")
        if self.credentials_end is not None:
            self.credentials_end = time.time() + HOUR_SECONDS
        return await super().list_page(*arguments, **options)


STORES: list[RoleStore] = []


async def open_role_store(_config) -> RoleStore:
    """Return the store of the test, as a plug-in does."""
    return STORES[-1]


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Give a store, and install a package that opens it."""
    info = tmp_path / "role_store-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: role-store\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[tieringd.object_stores]\nroles = {__name__}:open_role_store\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    STORES.append(RoleStore())
    yield STORES[-1]
    STORES.clear()


def opened():
    return opened_archive(parsed(ON + "cloud_storage_backend: plugin\ncloud_storage_plugin: roles\n"))


@virtually
async def test_credentials_of_an_idle_archive_are_renewed_before_they_end(store):
    """One request renews them. While they are good for longer, nothing is asked."""
    async with opened():
        await asyncio.sleep(HOUR_SECONDS / 2)
        assert store.credentials_end > time.time() + HOUR_SECONDS / 2
        assert store.signed == 1
    await asyncio.sleep(HOUR_SECONDS)
    assert store.signed == 1


@virtually
async def test_keys_without_an_end_cost_an_idle_archive_no_request(store):
    """Keys of the configuration do not end."""
    store.credentials_end = None
    async with opened():
        await asyncio.sleep(HOUR_SECONDS)
    assert store.signed == 0


@virtually
async def test_credentials_that_are_not_renewed_are_shown_and_logged_once(store):
    """The end that the alert goes by stays as it is, until the service issues new ones."""
    store.refusals, before = 4, store.credentials_end
    async with opened():
        with capture_logs() as logs:
            await asyncio.sleep(250)
            assert store.credentials_end == before
            await asyncio.sleep(60)
    assert store.credentials_end > before
    assert [one["error"] for one in logs] == ["the role is gone. attach it again"]
