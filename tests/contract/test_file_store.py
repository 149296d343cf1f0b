"""The contract, kept by the store in a directory."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from tests.contract.object_store_contract import (
    JoinContract,
    MissingBucketContract,
    ObjectStoreContract,
    TwoOpeningsContract,
    VanishedBucketContract,
    put,
)
from tieringd.storage.file import FileStore
from tieringd.storage.file_root import make_marker
from tieringd.storage.file_tree import ROOT_MARKER

if TYPE_CHECKING:
    from collections.abc import Callable
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


class VanishingRoot:
    """A root that is renamed away; what is in its place meanwhile is made by *make_instead*."""

    def __init__(self, root: Path, make_instead: Callable[[Path], None], *, is_known: bool) -> None:
        root.mkdir()
        root_id = make_marker(root)
        self._root, self._away, self._make_instead = root, root.with_name("away"), make_instead
        self.store = FileStore(root, root_id=root_id if is_known else None)

    def vanish(self) -> None:
        self._root.rename(self._away)
        self._make_instead(self._root)

    def come_back(self) -> None:
        if self._root.exists():
            shutil.rmtree(self._root)
        self._away.rename(self._root)

    def found_instead(self) -> list[str]:
        return sorted(str(path) for path in self._root.rglob("*"))


def nothing(root: Path) -> None:
    """Leave no directory: the root was one below a disk's."""


def empty_directory(root: Path) -> None:
    """Leave what a disk is mounted on."""
    root.mkdir()


def other_archive(root: Path) -> None:
    """Put another archive there, which holds an object of the same name."""
    root.mkdir()
    make_marker(root)
    (root / "kept").write_bytes(b"another")


def half_a_marker(root: Path) -> None:
    """Put an unreadable marker there."""
    root.mkdir()
    (root / ROOT_MARKER).write_bytes(b"{")


class TestVanishingFileStore(VanishedBucketContract):
    """A disk that is unmounted, or another one in its place, under an open store."""

    @pytest.fixture(params=[True, False], ids=["known", "seen"])
    def is_known(self, request):
        """Say whether the id was known from the start; else the store has seen it in its first operation."""
        return request.param

    @pytest.fixture(params=[nothing, empty_directory, other_archive, half_a_marker])
    async def vanishing(self, tmp_path, request, is_known):
        root = VanishingRoot(tmp_path / "archive", request.param, is_known=is_known)
        await put(root.store, "kept", b"kept")
        yield root
        await root.store.close()


class TestFileStore(ObjectStoreContract, JoinContract, MissingBucketContract, TwoOpeningsContract):
    """Files below a root, with a prefix."""

    copies_from_bytes = None

    @pytest.fixture
    def root(self, tmp_path):
        root = tmp_path / "archive"
        root.mkdir()
        make_marker(root)
        return root

    @pytest.fixture
    async def store(self, root):
        store = FileStore(root, prefix="/some/prefix/")
        yield store
        await store.close()

    @pytest.fixture
    async def other(self, root):
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
