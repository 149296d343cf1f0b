"""`tieringd endpoint user add|remove|list`: the users file of an archive-only endpoint."""

from __future__ import annotations

import os
import pty
import stat
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.support.daemon import command
from tests.unit.cli.commands import invoked
from tieringd.endpoint import users_file
from tieringd.endpoint.access import AccessRule, Operation
from tieringd.endpoint.users_file import Users, lock_users
from tieringd.errors import ConfigError, LocalFileError

SECRET = "a very secret word"
LOCKS = Path("/proc/locks")


@pytest.fixture
def path(tmp_path):
    """Give the place of a users file, which does not exist yet."""
    return tmp_path / "users.yaml"


def add(path, name="alice", *options, typed=f"{SECRET}\n"):
    return invoked("endpoint", "user", "add", name, "--file", path, *options, typed=typed)


def remove(path, name="alice", *options):
    return invoked("endpoint", "user", "remove", name, "--file", path, *options)


def listed(path):
    return invoked("endpoint", "user", "list", "--file", path).output.splitlines()


def test_users_are_added_listed_and_removed(path):
    """A new file is for its owner alone. The rules stay, and no command tells a password."""
    before = os.umask(0)
    try:
        with capture_logs() as lines:
            done = add(path, "bob")
            assert done.exit_code == 0
            assert path.stat().st_mode & 0o777 == 0o600
            assert "no rule lets it read anything yet" in done.output
            users = Users.read(path)
            rule = AccessRule("User:alice", frozenset({Operation.READ}), "orders")
            Users(users.credentials, (rule,)).write(path)
            second = add(path, typed=SECRET)
            assert "no rule" not in second.output
            assert listed(path) == ["alice", "bob"]
            third = remove(path, "bob")
            assert third.exit_code == 0
    finally:
        os.umask(before)
    assert listed(path) == ["alice"]
    users = Users.read(path)
    assert users.rules == (rule,)
    assert users.has_password("alice", SECRET)
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path]
    for said in (*(one.output + one.errors for one in (done, second, third)), path.read_text(), str(lines)):
        assert SECRET not in said


def test_password_is_no_argument(path):
    """A password in an argument would be in the list of processes for everyone on the host."""
    assert invoked("endpoint", "user", "add", "alice", SECRET, "--file", path).exit_code == 2
    assert not path.exists()


def test_same_password_changes_nothing_and_another_one_replaces_it(path):
    """A script may run twice, and connections of the user stay open."""
    add(path)
    before = path.read_bytes(), path.stat().st_ino
    done = add(path)
    assert (done.exit_code, path.read_bytes(), path.stat().st_ino) == (0, *before)
    assert "already" in done.output
    add(path, typed="another\n")
    assert Users.read(path).has_password("alice", "another")


def test_dry_run_changes_nothing(path):
    """A dry run prints what would change."""
    assert "would be added" in add(path, "alice", "--dry-run").output
    assert not path.exists()
    add(path)
    before = path.read_bytes()
    assert "another password" in add(path, "alice", "--dry-run", typed="another").output
    assert "would be removed" in remove(path, "alice", "--dry-run").output
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "typed", ["", "\n", "one\ntwo\n", "a\0b", "x" * 1025, b"\xff\xfe"], ids=lambda typed: repr(typed)[:12]
)
def test_input_that_is_not_one_password_is_refused(path, typed):
    """Nothing is stored, and the error does not quote it."""
    with pytest.raises(ConfigError, match="standard input") as error:
        add(path, typed=typed)
    assert "two" not in str(error.value)
    assert not path.exists()


@pytest.mark.parametrize("name", ["", "a,b", "a=b", "a\nb", " a", "a\x1b[2J", "x" * 121])
def test_name_that_no_client_or_log_can_have_is_refused(path, name):
    """The name is refused before a password is asked for."""
    with pytest.raises(ConfigError, match="user's name"):
        add(path, name)
    assert not path.exists()


def test_user_that_is_not_there_cannot_be_removed(path):
    """A wrong name would leave the right one with its access."""
    add(path)
    with pytest.raises(ConfigError, match=r"has no user bob; nothing is changed.*endpoint user list"):
        remove(path, "bob")
    with pytest.raises(ConfigError, match=r"cannot be read: No such file.*endpoint user add"):
        remove(path.parent / "missing.yaml")


@pytest.mark.parametrize("call", [add, remove, listed])
def test_bad_file_is_refused_with_its_line_and_stays(path, call):
    """A command never replaces a person's file by the part of it that could be read."""
    path.touch(0o600)
    path.write_text("users: {}\nrules:\n  - {principal: alice}\n")
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"users\.yaml:3: a rule must have principal"):
        call(path)
    assert path.read_bytes() == before


def test_file_that_others_can_read_is_refused(path):
    """The error has the command that mends the permissions."""
    add(path)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        add(path, typed="another")


def test_directory_that_is_missing_is_named(path):
    """The error says what to look at."""
    with pytest.raises(LocalFileError, match=r"cannot be written.*its directory exists"):
        add(path.parent / "none" / "users.yaml")


class Calls:
    """Records the calls that make a file durable, and can fail at one of them."""

    def __init__(self, fails_at=None):
        self.names = []
        self._fails_at = fails_at

    def note(self, name):
        self.names.append(name)
        if name == self._fails_at:
            raise OSError(28, "No space left on device")


@pytest.fixture
def calls(monkeypatch):
    """Record calls of the system in their order."""
    found = Calls()
    fsync, replace = os.fsync, users_file.Path.replace

    def noted_fsync(fd):
        found.note("fsync of directory" if stat.S_ISDIR(os.fstat(fd).st_mode) else "fsync of file")
        fsync(fd)

    def noted_replace(self, target):
        found.note("replace")
        return replace(self, target)

    # Only calls of the system show that a file is durable before it gets its name.
    monkeypatch.setattr(users_file.os, "fsync", noted_fsync)
    monkeypatch.setattr(users_file.Path, "replace", noted_replace)
    return found


def test_file_is_durable_before_it_takes_its_place_and_so_is_its_name(path, calls):
    """A power cut leaves the old file or the new one."""
    add(path)
    assert calls.names == ["fsync of file", "replace", "fsync of directory"]


@pytest.mark.parametrize("call", ["fsync of file", "replace"])
def test_disk_that_is_full_leaves_the_file_as_it_was(path, calls, call):
    """No other file stays beside it."""
    add(path)
    before = path.read_bytes()
    calls._fails_at = call
    with pytest.raises(LocalFileError, match="No space left on device"):
        add(path, "bob")
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_link_stays_a_link(path):
    """The file behind it changes."""
    path.symlink_to(path.parent / "real.yaml")
    add(path)
    assert path.is_symlink()
    assert listed(path.parent / "real.yaml") == ["alice"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_owner_of_the_file_stays(path):
    """Root changes the file of the user that the daemon runs as, which has to read it."""
    add(path)
    os.chown(path, 12345, 54321)
    add(path, "bob")
    assert (path.stat().st_uid, path.stat().st_gid) == (12345, 54321)
    assert path.stat().st_mode & 0o777 == 0o600


def test_changes_at_the_same_time_are_all_kept(path):
    """One command waits for the other."""
    add(path)
    is_held, may_go = threading.Event(), threading.Event()

    def hold():
        with lock_users(path):
            users = Users.read(path)
            is_held.set()
            assert may_go.wait(240)
            users.with_user("held", "p").write(path)

    with ThreadPoolExecutor(2) as pool:
        holding = pool.submit(hold)
        assert is_held.wait(120)
        adding = pool.submit(
            subprocess.run,
            command("endpoint", "user", "add", "bob", "--file", path),
            input=b"p",
            check=True,
            capture_output=True,
        )
        until_waiting(path)
        may_go.set()
        holding.result(240)
        adding.result(240)
    assert listed(path) == ["alice", "bob", "held"]


def until_waiting(path):
    """Return when a process waits for the lock of *path*'s directory."""
    inode = path.parent.stat().st_ino
    deadline = time.monotonic() + 180
    while not any("->" in line and f":{inode} " in line for line in LOCKS.read_text().splitlines()):
        assert time.monotonic() < deadline, "no command waits"
        time.sleep(0.01)


def test_terminal_is_asked_twice_and_shows_nothing(path):
    """Two answers that differ are asked for again."""
    master, slave = pty.openpty()
    try:
        process = subprocess.Popen(
            command("endpoint", "user", "add", "alice", "--file", path),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        seen = b""
        for answer in (SECRET, "mistyped", SECRET, SECRET):
            prompts = seen.count(b"assword: ") + seen.count(b"confirmation: ")
            while seen.count(b"assword: ") + seen.count(b"confirmation: ") == prompts:
                seen += os.read(master, 1000)
            os.write(master, answer.encode() + b"\n")
        assert process.wait(240) == 0
        seen += os.read(master, 4000)
    finally:
        os.close(slave)
        os.close(master)
    assert SECRET.encode() not in seen
    assert Users.read(path).has_password("alice", SECRET)
