"""The cache directory: files that are whole or not there, and nothing that is not the cache's."""

from __future__ import annotations

import fcntl
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.archive import Clock
from tests.support.examples import examples
from tests.unit.cache.cached import a_chunk, an_index, data_in, files_in, put, segment_key, started
from tieringd.cache.cache_directory import PartFile, Tree, remove_leftovers
from tieringd.errors import LocalFileError
from tieringd.formats.access_times import encode_access_times

ROOT = Path(__file__).parents[3]


@pytest.fixture
def directory(tmp_path):
    return started(tmp_path / "cache")


def held(directory):
    use = directory.accounts.use()
    return use.objects, use.size_bytes


def test_file_is_there_once_it_is_published_and_not_before(directory):
    """A published file has its name, its bytes and its place in the accounts, and no trace of its writing."""
    directory.accounts.reserve(3)
    part = directory.part(a_chunk(), 3)
    part.write(0, b"ab")
    assert directory.open(a_chunk(), 3) is None
    assert not (directory.path / a_chunk()).exists()
    part.write(2, b"c")
    opened = directory.publish(part)
    directory.accounts.release(3)
    part.abandon()
    assert (opened.is_checked, opened.is_intact, os.pread(opened.fd, 9, 0)) == (True, True, b"abc")
    opened.close()
    assert files_in(directory.path) == {a_chunk(): b"abc"}
    use = directory.accounts.use()
    assert (use.size_bytes, use.objects, use.reserved_bytes, use.reserved_objects) == (3, 1, 0, 0)


def test_abandoned_part_leaves_nothing(directory):
    """A part that is abandoned, even twice, leaves no file and no bytes."""
    part = directory.part(a_chunk(), 3)
    part.write(0, b"abc")
    part.abandon()
    part.abandon()
    assert list(directory.path.iterdir()) == []
    assert held(directory) == (0, 0)


def test_file_that_is_put_again_replaces_the_old_one(directory):
    """A reader with the old file open reads it to the end; the accounts count one file."""
    put(directory, a_chunk(), b"old")
    old = directory.open(a_chunk(), 3)
    put(directory, a_chunk(), b"newer")
    assert os.pread(old.fd, 9, 0) == b"old"
    assert not old.is_intact
    old.close()
    assert data_in(directory, a_chunk(), 5) == b"newer"
    assert held(directory) == (1, 5)


@pytest.mark.parametrize("data", [b"", b"ab", b"abcd"])
def test_file_of_another_size_is_removed(directory, data):
    """A file of another size was cut or is of another layout, so it is removed and fetched again."""
    put(directory, a_chunk(), b"abc")
    (directory.path / a_chunk()).write_bytes(data)
    assert directory.open(a_chunk(), 3) is None
    assert files_in(directory.path) == {}
    assert held(directory) == (0, 0)


def test_file_that_vanished_is_counted_no_more(directory):
    """The file was deleted by another program, with its directories or without."""
    put(directory, a_chunk(0), b"abc")
    put(directory, a_chunk(1), b"abc")
    (directory.path / a_chunk(0)).unlink()
    subprocess.run(["rm", "-r", (directory.path / a_chunk(1)).parents[4]], check=True)
    assert directory.open(a_chunk(0), 3) is None
    assert directory.open(a_chunk(1), 3) is None
    assert held(directory) == (0, 0)


def test_file_that_was_touched_is_not_trusted(directory):
    """A file with other bytes or only other times is checked again."""
    put(directory, a_chunk(), b"abc")
    opened = directory.open(a_chunk(), 3)
    path = directory.path / a_chunk()
    before = path.stat()
    with path.open("r+b") as file:
        file.write(b"x")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert not opened.is_intact
    opened.close()
    again = directory.open(a_chunk(), 3)
    assert (again.is_checked, again.is_intact) == (False, True)
    directory.accounts.set_checked(a_chunk(), again.identity)
    again.close()
    third = directory.open(a_chunk(), 3)
    assert third.is_checked
    third.close()


def test_deleted_file_is_not_intact(directory):
    """The reader of a deleted file goes on, and no other reader begins."""
    put(directory, a_chunk(), b"abc")
    opened = directory.open(a_chunk(), 3)
    (directory.path / a_chunk()).unlink()
    assert (opened.is_intact, os.pread(opened.fd, 9, 0)) == (False, b"abc")
    opened.close()


def test_file_that_another_process_put_is_found(tmp_path, directory):
    """A file of another process is counted from then on, and not trusted before it was checked."""
    put(started(tmp_path / "cache"), a_chunk(), b"abc")
    assert held(directory) == (0, 0)
    opened = directory.open(a_chunk(), 3)
    assert not opened.is_checked
    opened.close()
    assert held(directory) == (1, 3)


def test_evicted_files_go_with_their_empty_directories(directory):
    """Directories that hold something else stay, and so does the cache itself."""
    for name in (a_chunk(0, 0), a_chunk(0, 9), an_index(0), a_chunk(1)):
        put(directory, name, b"abc")
    stranger = (directory.path / a_chunk(1)).parents[1] / "notes.txt"
    stranger.write_text("mine")
    assert directory.evict([a_chunk(0, 0), a_chunk(1), a_chunk(5)]) == 6
    assert held(directory) == (2, 6)
    assert (directory.path / a_chunk(0)).parent.exists()
    assert directory.evict([a_chunk(0, 9), an_index(0)]) == 6
    assert not (directory.path / segment_key(0)[:8]).exists()
    assert files_in(directory.path) == {str(stranger.relative_to(directory.path)): b"mine"}
    stranger.unlink()


@pytest.mark.parametrize("kind", ["link", "link-above", "directory", "pipe", "dangling"])
def test_what_stands_in_the_way_is_not_read_replaced_or_deleted(directory, tmp_path, kind):
    """No link leads out of the cache, in either direction; the put is refused and says where."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "0").write_bytes(b"abc")
    path = directory.path / a_chunk()
    path.parent.parent.mkdir(parents=True)
    if kind == "link-above":
        path.parent.symlink_to(outside)
    else:
        path.parent.mkdir()
        if kind == "directory":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to(outside / ("0" if kind == "link" else "nothing"))
    before = path.lstat().st_ino
    assert directory.open(a_chunk(), 3) is None
    with pytest.raises(LocalFileError, match="cannot be cached"):
        put(directory, a_chunk(), b"new")
    directory.evict([a_chunk()])
    assert started(directory.path).accounts.use().objects == 0
    assert path.lstat().st_ino == before
    assert files_in(outside) == {"0": b"abc"}
    assert list((directory.path / "incoming").glob("*")) == []


def test_foreign_files_are_reported_and_stay(tmp_path):
    """Files without a name of the cache's are not the cache's."""
    root = tmp_path / "cache"
    put(started(root), a_chunk(), b"abc")
    (root / "backup").mkdir()
    (root / "backup" / "0.part").write_text("x")
    (root / a_chunk()).with_name("0.bak").write_text("x")
    (root / "loop").symlink_to(root)
    (root / "backup" / "etc").symlink_to("/etc")
    directory = started(root)
    report = directory.compare()
    assert (len(report.files), report.foreign) == (1, 3)
    assert held(directory) == (1, 3)
    assert (root / "backup" / "0.part").read_text() == "x"


def test_root_may_be_a_link(tmp_path):
    """The cache's root may be a link: its place is the operator's choice."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "disk")
    directory = started(tmp_path / "cache")
    put(directory, a_chunk(), b"abc")
    assert files_in(tmp_path / "disk") == {a_chunk(): b"abc"}


def test_cache_that_was_deleted_whole_begins_anew(directory):
    """An operator may empty it while it is in use."""
    put(directory, a_chunk(0), b"abc")
    subprocess.run(["rm", "-r", directory.path], check=True)
    with pytest.raises(LocalFileError):
        put(directory, a_chunk(1), b"abc")
    directory.path.mkdir()
    put(directory, a_chunk(1), b"abc")
    assert directory.open(a_chunk(0), 3) is None
    assert held(directory) == (1, 3)


@pytest.mark.parametrize("threads", [1, 4])
def test_restart_counts_what_there_is_and_remembers_its_use(tmp_path, threads):
    """A file without a noted use counts as used when it was written; notes of files that are gone go."""
    clock = Clock()
    first = started(tmp_path / "cache", clock=clock)
    for number in range(20):
        put(first, a_chunk(number), b"x" * number)
    put(first, an_index(3), b"index")
    first.accounts.touch(a_chunk(3), accessed_ms=clock.now_ms + 77)
    first.evict([a_chunk(7)])
    first.save_access_times()
    (tmp_path / "cache" / a_chunk(8)).unlink()
    put(first, a_chunk(90), b"later")
    os.utime(tmp_path / "cache" / a_chunk(90), (5, 5))

    second = started(tmp_path / "cache", clock=clock, walk_concurrency=threads)
    times = second.accounts.access_times()
    assert set(times) == {a_chunk(number) for number in (*range(7), *range(9, 20), 90)} | {an_index(3)}
    assert times[a_chunk(3)] == clock.now_ms + 77
    assert times[a_chunk(4)] == clock.now_ms
    assert times[a_chunk(90)] == 5000
    assert held(second) == (20, sum(range(20)) - 15 + 10)
    assert not second.open(a_chunk(3), 3).is_checked


def test_access_times_are_written_only_when_they_changed(directory):
    """A cache at rest does not write."""
    put(directory, a_chunk(), b"abc")
    directory.save_access_times()
    path = directory.path / "access_times"
    first = path.stat().st_ino
    directory.save_access_times()
    assert path.stat().st_ino == first
    directory.accounts.touch(a_chunk(), accessed_ms=1)
    directory.save_access_times()
    assert path.stat().st_ino != first


@pytest.mark.parametrize("damage", [b"", b"rubbish", encode_access_times({"a": 1})[:-1]])
def test_damaged_access_times_are_as_none(tmp_path, damage):
    """Access times are only advice, so damaged ones count as none."""
    put(started(tmp_path / "cache"), a_chunk(), b"abc")
    (tmp_path / "cache" / "access_times").write_bytes(damage)
    assert held(started(tmp_path / "cache")) == (1, 3)


def test_files_of_another_number_of_buckets_go_first(tmp_path):
    """Files of another number of buckets are never read, and are counted until they are evicted first."""
    put(started(tmp_path / "cache", buckets=16), a_chunk(0, buckets=16), b"abc")
    directory = started(tmp_path / "cache", buckets=7)
    put(directory, a_chunk(1, buckets=7), b"abc")
    times = directory.accounts.access_times()
    assert times[a_chunk(0, buckets=16)] == 0
    assert times[a_chunk(1, buckets=7)] > 0
    assert directory.evict([a_chunk(0, buckets=16)]) == 3


def test_part_that_is_being_written_is_no_leftover(tmp_path, directory):
    """A second process that starts removes only files that no process holds any more."""
    part = directory.part(a_chunk(0), 3)
    left = PartFile.create(Tree(str(directory.path)), a_chunk(1), 3)
    os.close(left.fd)
    left._fd = None
    (directory.path / "incoming" / "notes.txt").write_text("mine")
    started(tmp_path / "cache")
    assert len(list((directory.path / "incoming").glob("*.part"))) == 1
    part.write(0, b"abc")
    directory.publish(part).close()
    assert data_in(directory, a_chunk(0), 3) == b"abc"
    assert (directory.path / "incoming" / "notes.txt").exists()


class EagerTree(Tree):
    """A tree in which another process looks for leftovers before the lock of the first new part is taken."""

    def __init__(self, root, *, holds):
        super().__init__(root)
        self.holds = holds
        self.held_fd = None

    def create(self, name):
        """Create a file, and take the first one for a leftover: with *holds*, its removal is under way."""
        fd = super().create(name)
        if self.held_fd is None:
            self.held_fd = self.open(name)
            if self.holds:
                fcntl.flock(self.held_fd, fcntl.LOCK_EX)
            else:
                assert remove_leftovers(self) == 1
        return fd


@pytest.mark.parametrize("holds", [True, False], ids=["is removed", "was removed"])
def test_new_part_that_is_taken_for_a_leftover_is_created_again(directory, *, holds):
    """A part is without a lock for a moment. Its writer notices that it lost the part, and has another."""
    tree = EagerTree(str(directory.path), holds=holds)
    part = PartFile.create(tree, a_chunk(), 3)
    os.close(tree.held_fd)
    assert remove_leftovers(tree) == holds, "only the lost part is a leftover"
    part.write(0, b"abc")
    directory.publish(part).close()
    assert data_in(directory, a_chunk(), 3) == b"abc"


def test_comparison_removes_what_an_ended_process_left_unfinished(directory):
    """A comparison removes leftovers as a start does, and leaves parts that are being written."""
    part = directory.part(a_chunk(0), 3)
    os.close(PartFile.create(Tree(str(directory.path)), a_chunk(1), 3).detach())
    assert len(list(directory.path.glob("incoming/*.part"))) == 2
    directory.compare()
    assert len(list(directory.path.glob("incoming/*.part"))) == 1
    part.write(0, b"abc")
    directory.publish(part).close()
    assert data_in(directory, a_chunk(0), 3) == b"abc"


CRASHING = """
import os, signal, sys
from pathlib import Path
from tests.unit.cache.cached import a_chunk, started
point = int(sys.argv[2])
def at(number):
    if number == point:
        os.kill(os.getpid(), signal.SIGKILL)
directory = started(Path(sys.argv[1]))
at(0)
part = directory.part(a_chunk(), 1 << 20)
at(1)
part.write(0, b"a" * (1 << 19))
at(2)
part.write(1 << 19, b"b" * (1 << 19))
at(3)
rename = os.rename
def crash_after(*arguments, **options):
    at(4)
    rename(*arguments, **options)
    at(5)
os.rename = crash_after
directory.publish(part)
at(6)
directory.save_access_times()
"""


@pytest.mark.parametrize("point", range(7))
def test_killed_process_leaves_a_whole_file_or_none(tmp_path, point):
    """A process leaves a whole file or none wherever it is killed, and the next start removes its parts."""
    done = subprocess.run(
        [sys.executable, "-c", CRASHING, tmp_path / "cache", str(point)],
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == -9
    assert len(list((tmp_path / "cache").glob("incoming/*.part"))) == (0 < point < 5)
    directory = started(tmp_path / "cache")
    whole = {a_chunk(): b"a" * (1 << 19) + b"b" * (1 << 19)}
    assert files_in(tmp_path / "cache") == (whole if point >= 5 else {})
    assert held(directory) == ((1, 1 << 20) if point >= 5 else (0, 0))


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["put", "open", "evict", "delete", "cut", "restart", "compare"]),
        st.integers(0, 3),
        st.integers(0, 9),
    ),
    max_size=25,
)


@settings(max_examples=examples(60), deadline=None)
@given(operations=OPERATIONS)
def test_any_history_ends_in_accounts_that_are_the_disk(tmp_path_factory, operations):
    """
    Readers have the bytes that were put last, whole.

    Files may be deleted and cut behind the cache's back. A comparison finds all of it.
    """
    root = tmp_path_factory.mktemp("cache")
    directory, model = started(root), {}
    for number, (operation, which, size_bytes) in enumerate(operations):
        name = a_chunk(which // 2, which)
        path = root / name
        if operation == "put":
            model[name] = bytes([number]) * size_bytes
            put(directory, name, model[name])
        elif operation == "open":
            wanted = model.get(name)
            if data_in(directory, name, len(wanted or b"")) is None:
                model.pop(name, None)
            else:
                assert path.read_bytes() == wanted
        elif operation == "evict":
            directory.evict([name])
            model.pop(name, None)
        elif operation == "delete":
            path.unlink(missing_ok=True)
            model.pop(name, None)
        elif operation == "cut" and path.exists() and size_bytes < len(model[name]):
            os.truncate(path, size_bytes)
            assert data_in(directory, name, len(model.pop(name))) is None
        elif operation == "restart":
            directory = started(root)
        elif operation == "compare":
            directory.compare()
    directory.compare()
    assert files_in(root) == model
    assert held(directory) == (len(model), sum(map(len, model.values())))
    assert {file.name for file in directory.accounts.files()} == set(model)


def test_threads_that_put_open_and_evict_the_same_files_agree(directory):
    """Names and accounts change together, also with other calls in between."""
    names = [a_chunk(number, position) for number in range(2) for position in range(3)]

    def work(seed):
        choice = random.Random(seed)
        for _ in range(150):
            name = choice.choice(names)
            action = choice.randrange(4)
            if action == 0:
                directory.evict([name])
            elif action == 1:
                opened = directory.open(name, 5)
                if opened is not None:
                    assert os.pread(opened.fd, 9, 0) == b"12345"
                    opened.close()
            else:
                put(directory, name, b"12345")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = files_in(directory.path)
    assert set(found.values()) <= {b"12345"}
    assert {file.name for file in directory.accounts.files()} == set(found)
    use = directory.accounts.use()
    assert (use.size_bytes, use.reserved_bytes, use.reserved_objects) == (5 * len(found), 0, 0)


def test_comparison_leaves_what_was_put_meanwhile(directory, monkeypatch):
    """A walk that began before a file was renamed does not find it, and does not forget it."""
    put(directory, a_chunk(0), b"abc")
    real = os.scandir

    def put_meanwhile(path):
        monkeypatch.setattr(os, "scandir", real)
        entries = real(path)
        put(directory, a_chunk(1), b"defg")
        return entries

    # The put has to come between the listing and its use; no part of the cache is called there.
    monkeypatch.setattr(os, "scandir", put_meanwhile)
    directory.compare()
    assert held(directory) == (2, 7)
