"""
A hint that something changed in the log directories, so that a rescan need not wait.

A hint is never more than that: the rescan decides. A hint may be missing (no inotify, no free watches,
an overflow) or needless; that only changes the time of the next scan. Only new and renamed names are
watched, because watching writes would cause an event per append.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import structlog
from asyncinotify import Event, Inotify, Mask, Watch

log = structlog.get_logger()

_NEW_NAMES: Final = Mask.CREATE | Mask.MOVED_TO | Mask.MOVE_SELF | Mask.ONLYDIR
_EVENTS_PER_TURN: Final = 256
"""The limit per iteration of the event loop, so that a storm of events leaves it time for other work."""
_MAX_CHANGED_PATHS: Final = 4096
"""With more paths than this the hint is "everything": a larger set would only cost memory."""


@dataclass(frozen=True, slots=True)
class Hint:
    """What to scan: *paths* changed, or with *rescan* anything may have."""

    paths: frozenset[str] = frozenset()
    """Partition directories in which a segment began or the leader epoch changed, and new ones."""
    rescan: bool = False


class DirectoryWatch:
    """
    Watches log directories for new partitions, and the partitions that `follow` names.

    It belongs to the event loop on which it is used, and starts no task. Memory is bounded: one small
    watch per followed directory, and a limited set of paths between two calls of `changes`.
    """

    def __init__(self, log_dirs: Sequence[str]) -> None:
        self._log_dirs = tuple(log_dirs)
        self._inotify: Inotify | None = None
        self._watches: dict[str, Watch] = {}
        self._followed: Iterable[str] | None = None
        """The argument of the last `follow`, while every one of these directories is watched."""
        self._changed: set[str] = set()
        self._rescan = False
        self._has_news = asyncio.Event()
        self._degraded = False
        self._closed = False

    def follow(self, partition_paths: Iterable[str]) -> bool:
        """
        Watch exactly these partition directories, and the log directories.

        Call it after every rescan; with the same tuple as the last time it costs nothing.

        Returns:
            Whether a directory is watched now that was not watched before. Changes before this call are
                in no hint, so the caller then scans once more, or leaves them to the next rescan.
        """
        if self._closed or not self._opened():
            return False
        if partition_paths is self._followed:
            return False
        wanted = {*self._log_dirs, *partition_paths}
        for path in self._watches.keys() - wanted:
            self._forget(path)
        before = len(self._watches)
        for path in sorted(wanted - self._watches.keys()):
            if not self._add(path):
                break
        # The owner of a set or list may change it, and a missing watch is tried again at each call.
        is_whole = isinstance(partition_paths, tuple) and len(self._watches) == len(wanted)
        self._followed = partition_paths if is_whole else None
        return len(self._watches) > before

    async def changes(self) -> Hint:
        """
        Wait for a change and return all changes since the last call.

        Without inotify this waits without end, so the caller must use the rescan interval as a timeout.
        Cancelling it loses nothing.
        """
        await self._has_news.wait()
        hint = Hint(frozenset() if self._rescan else frozenset(self._changed), self._rescan)
        self._changed.clear()
        self._rescan = False
        self._has_news.clear()
        return hint

    def close(self) -> None:
        """Remove the watches; closing twice is allowed."""
        self._closed = True
        self._watches.clear()
        if self._inotify is not None:
            asyncio.get_running_loop().remove_reader(self._inotify.fd)
            self._inotify.close()
            self._inotify = None

    def _opened(self) -> bool:
        if self._inotify is None and not self._degraded:
            try:
                # With a timeout of zero a read without events returns at once.
                self._inotify = Inotify(cache_size=_EVENTS_PER_TURN, sync_timeout=0)
            except OSError as error:
                self._degrade("inotify is not available", error)
                return False
            asyncio.get_running_loop().add_reader(self._inotify.fd, self._read)
        return self._inotify is not None

    def _add(self, path: str) -> bool:
        """Watch *path*; return whether there is room for more watches."""
        assert self._inotify is not None
        try:
            self._watches[path] = self._inotify.add_watch(path, _NEW_NAMES)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                self._degrade("the system has no inotify watches left", error)
                return False
            # The directory is gone, or may not be read: the next scan reports it.
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EACCES):
                self._degrade(f"{path} cannot be watched", error)
        return True

    def _forget(self, path: str) -> None:
        assert self._inotify is not None
        watch = self._watches.pop(path)
        self._followed = None
        try:
            self._inotify.rm_watch(watch)
        except OSError as error:
            # The kernel drops the watch of a deleted directory by itself.
            if error.errno != errno.EINVAL:
                raise

    def _degrade(self, reason: str, error: OSError) -> None:
        """Warn once that only the rescans may see changes from now on."""
        if not self._degraded:
            self._degraded = True
            log.warning(
                "directory changes may be noticed only at the next rescan",
                reason=reason,
                error=str(error),
                hint="Raise fs.inotify.max_user_watches or fs.inotify.max_user_instances",
            )

    def _read(self) -> None:
        """Process the waiting events; the event loop calls this when there are some."""
        if self._inotify is None:
            return
        for _ in range(_EVENTS_PER_TURN):
            event = self._inotify.sync_get()
            if event is None:
                break
            self._note(event)
        else:
            # Events that the library has already read do not make the descriptor readable again.
            asyncio.get_running_loop().call_soon(self._read)
        if self._changed or self._rescan:
            self._has_news.set()

    def _note(self, event: Event) -> None:
        if event.mask & Mask.Q_OVERFLOW:
            self._rescan = True
            return
        watch = event.watch
        if watch is None:
            return
        directory = str(watch.path)
        if event.mask & Mask.IGNORED:
            if self._watches.get(directory) is watch:
                del self._watches[directory]
                self._followed = None
        elif event.mask & Mask.MOVE_SELF:
            # A broker renames a partition's directory before it deletes it, and another directory may get
            # the same name later.
            if self._watches.get(directory) is watch:
                self._forget(directory)
            self._changed.add(directory)
        elif event.name is not None:
            self._note_name(directory, event.name.name, is_directory=bool(event.mask & Mask.ISDIR))
        if len(self._changed) > _MAX_CHANGED_PATHS:
            self._changed.clear()
            self._rescan = True

    def _note_name(self, directory: str, name: str, *, is_directory: bool) -> None:
        if directory in self._log_dirs:
            if is_directory:
                self._changed.add(f"{directory}/{name}")
        # A roll creates a `.log`; a new leader epoch renames its checkpoint into place.
        elif name.endswith(".log") or name == "leader-epoch-checkpoint":
            self._changed.add(directory)
