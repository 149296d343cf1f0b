"""The contract, kept by the store in a directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.contract.object_store_contract import JoinContract, MissingBucketContract, ObjectStoreContract
from tieringd.storage.file import FileStore

if TYPE_CHECKING:
    from pathlib import Path


class DirectoryBucket:
    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, key: str) -> bytes | None:
        path = self._root / key
        return path.read_bytes() if path.is_file() else None

    def write(self, key: str, data: bytes) -> None:
        path = self._root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


class TestFileStore(ObjectStoreContract, JoinContract, MissingBucketContract):
    """Files below a root, with a prefix."""

    copies_from_bytes = None

    @pytest.fixture
    def root(self, tmp_path):
        root = tmp_path / "archive"
        root.mkdir()
        return root

    @pytest.fixture
    async def store(self, root):
        store = FileStore(root, prefix="/some/prefix/")
        yield store
        await store.close()

    @pytest.fixture
    def bucket(self, root):
        return DirectoryBucket(root / "some" / "prefix")

    @pytest.fixture
    async def missing_store(self, tmp_path):
        store = FileStore(tmp_path / "not-there")
        yield store
        await store.close()
        assert not (tmp_path / "not-there").exists()
