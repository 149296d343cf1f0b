"""The contract, kept by the store in memory."""

from __future__ import annotations

import pytest

from tests.contract.object_store_contract import JoinContract, NestedKeysContract, ObjectStoreContract
from tests.fakes.memory_store import MemoryStore
from tieringd.clock import wall_clock_ms


class MemoryBucket:
    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def read(self, key: str) -> bytes | None:
        found = self._store.objects.get(key)
        return found[0] if found else None

    def write(self, key: str, data: bytes) -> None:
        self._store.add(key, data)


class TestMemoryStore(ObjectStoreContract, JoinContract, NestedKeysContract):
    """The reference implementation."""

    @pytest.fixture
    def store(self):
        return MemoryStore(now_ms=wall_clock_ms)

    @pytest.fixture
    def bucket(self, store):
        return MemoryBucket(store)
