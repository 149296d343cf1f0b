"""
A hint that something changed in the log directories, so that a rescan need not wait.

A hint is never more than that: the rescan decides. A hint may be missing (no inotify, no free watches,
an overflow) or needless; that only changes the time of the next scan.

`since_last` says in which directories nothing has changed, so that a scan need not look at them. A scan looks
at each one now and then all the same (`log_dir.LogDirRescan`).

Names that come, go or are replaced are always reported. Reports of writes would be an event for each append.
So only the first write to a directory that was idle is reported, and the scan says which ones are idle.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import structlog
from asyncinotify import Event, Inotify, Mask, Watch

from tieringd.broker.log_dir import ReportedChanges

log = structlog.get_logger()

_NEW_NAMES: Final = Mask.CREATE | Mask.MOVED_TO
_NAMES: Final = _NEW_NAMES | Mask.DELETE | Mask.MOVED_FROM | Mask.MOVE_SELF | Mask.ONLYDIR
_WRITES: Final = Mask.MODIFY | Mask.ATTRIB
"""A write, a truncation, and a change of a file's time."""
_EVENTS_PER_TURN: Final = 256
"""The limit per iteration of the event loop, so that a storm of events leaves it time for other work."""
_EVENTS_PER_ANSWER: Final = 1024
"""
With more waiting events than this, `since_last` counts no directory as watched: to read them all would hold
up the event loop.
"""
_IDLE_PER_ANSWER: Final = 2000
"""An answer lets reports of writes begin in at most so many directories: ten ms of the event loop."""
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
        self._paths: frozenset[str] | None = None
        """The paths of `_watches`; None where they have changed since they were last asked for."""
        self._renamed: set[str] = set()
        """The directories in which a name changed since the last answer of `since_last`, and new ones."""
        self._unreported_writes: set[str] = set()
        """The watched directories whose writes are not reported."""
        self._has_lost_events = False
        """Whether the kernel lost events since the last answer of `since_last`."""
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

    def since_last(self, *, unwritten: Collection[str]) -> ReportedChanges:
        """
        Return what changed since the last call. All events count that the kernel has queued until now.

        From then on the first write to each of *unwritten*, or to a part of them, is reported. Where events
        were lost, or too many wait, no directory counts as watched.
        """
        is_read = self._read(_EVENTS_PER_ANSWER)
        is_whole = is_read and not self._has_lost_events
        renamed, self._renamed = frozenset(self._renamed), set()
        self._has_lost_events = False
        if not is_whole:
            return ReportedChanges()
        if self._paths is None:
            self._paths = frozenset(self._watches)
        for path in islice(unwritten, _IDLE_PER_ANSWER):
            if path in self._unreported_writes and self._set_mask(path, _NAMES | _WRITES):
                self._unreported_writes.discard(path)
        return ReportedChanges(self._paths, renamed, frozenset(self._unreported_writes))

    def close(self) -> None:
        """Remove the watches; closing twice is allowed."""
        self._closed = True
        self._remove_all()

    def _remove_all(self) -> None:
        """Remove the watches; the next `follow` begins anew."""
        self._watches.clear()
        self._renamed.clear()
        self._unreported_writes.clear()
        self._followed = self._paths = None
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
            watch = self._inotify.add_watch(path, _NAMES)
            if watch.path != Path(path):
                # The directory is watched under another name, which its events name. It is an earlier one of
                # which the end is yet to be read, or the same directory is mounted twice. Asking again has
                # ended the reports of its writes.
                self._unreported_writes |= {str(watch.path)} & self._watches.keys()
                return True
            self._watches[path] = watch
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                self._degrade("the system has no inotify watches left", error)
                return False
            # The directory is gone, or may not be read: the next scan reports it.
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EACCES):
                self._degrade(f"{path} cannot be watched", error)
        else:
            # No event tells of a change before this watch began, so the directory counts as changed.
            self._renamed.add(path)
            self._unreported_writes.add(path)
            self._paths = None
        return True

    def _set_mask(self, path: str, mask: Mask) -> bool:
        """Let the watch of *path* report other events; return whether it does."""
        assert self._inotify is not None
        watch = self._watches[path]
        try:
            found = self._inotify.add_watch(watch.path, mask)
            if found is watch:
                return True
            # Another directory has the name by now. The event that says so is yet to be read.
            self._inotify.rm_watch(found)
        except OSError as error:
            log.info("a watch could not be changed", path=path, error=str(error))
        return False

    def _forget(self, path: str) -> None:
        assert self._inotify is not None
        watch = self._watches[path]
        self._drop(path)
        try:
            self._inotify.rm_watch(watch)
        except OSError as error:
            # The kernel drops the watch of a deleted directory by itself.
            if error.errno != errno.EINVAL:
                raise

    def _drop(self, path: str) -> None:
        """Remove all that is kept of the watch of *path*, which has ended."""
        del self._watches[path]
        self._unreported_writes.discard(path)
        self._renamed.discard(path)
        self._followed = self._paths = None

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

    def _read(self, at_most: int = _EVENTS_PER_TURN) -> bool:
        """
        Process waiting events; the event loop calls this when there are some.

        Returns:
            Whether none is left.
        """
        is_empty = False
        for _ in range(at_most):
            event = None if self._inotify is None else self._inotify.sync_get()
            if event is None:
                is_empty = True
                break
            self._note(event)
        else:
            # Events that the library has already read do not make the descriptor readable again.
            asyncio.get_running_loop().call_soon(self._read)
        if self._changed or self._rescan:
            self._has_news.set()
        return is_empty

    def _note(self, event: Event) -> None:
        if event.mask & Mask.Q_OVERFLOW:
            # The end of a watch may be among what was lost, so no watch is known to be alive.
            self._rescan = self._has_lost_events = True
            self._remove_all()
            return
        watch = event.watch
        if watch is None:
            return
        directory = str(watch.path)
        if event.mask & _WRITES:
            self._note_write(directory, watch)
            return
        if self._watches.get(directory) is watch:
            self._renamed.add(directory)
        if event.mask & (Mask.IGNORED | Mask.MOVE_SELF):
            self._note_end(directory, watch, has_moved=not event.mask & Mask.IGNORED)
        elif event.name is not None:
            is_directory = bool(event.mask & Mask.ISDIR)
            if event.mask & _NEW_NAMES:
                self._note_name(directory, event.name.name, is_directory=is_directory)
            elif is_directory and (gone := f"{directory}/{event.name.name}") in self._watches:
                # A process that has it open keeps its watch alive, and another directory may get the name.
                self._forget(gone)
        if len(self._changed) > _MAX_CHANGED_PATHS:
            self._changed.clear()
            self._rescan = True

    def _note_end(self, directory: str, watch: Watch, *, has_moved: bool) -> None:
        """
        Forget a directory that is gone or has another name.

        A broker renames a partition's directory before it deletes it, and another directory may get the same
        name later. Where a log directory goes, the partitions of the one that gets its name are not watched.
        """
        if self._watches.get(directory) is watch:
            if has_moved:
                self._forget(directory)
            else:
                self._drop(directory)
            if directory in self._log_dirs:
                for path in [one for one in self._watches if one.startswith(f"{directory}/")]:
                    self._forget(path)
        if has_moved:
            self._changed.add(directory)

    def _note_write(self, directory: str, watch: Watch) -> None:
        """Note a write, and end the reports of writes in *directory* until the directory is idle again."""
        if self._watches.get(directory) is watch and directory not in self._unreported_writes:
            self._unreported_writes.add(directory)
            self._set_mask(directory, _NAMES)

    def _note_name(self, directory: str, name: str, *, is_directory: bool) -> None:
        if directory in self._log_dirs:
            if is_directory:
                self._changed.add(f"{directory}/{name}")
        # A roll creates a `.log`; a new leader epoch renames its checkpoint into place.
        elif name.endswith(".log") or name == "leader-epoch-checkpoint":
            self._changed.add(directory)
