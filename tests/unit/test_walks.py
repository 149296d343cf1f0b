"""The three walks of docs/architecture.md: what runs on each is listed there, and what is listed runs."""

from __future__ import annotations

import ast
import asyncio
import re

import pytest

from tests.fakes.archive import archiver_of, observed
from tests.fakes.daemons import Daemon
from tests.fakes.fixtures import archive, broker, clock, writer
from tests.fakes.gateway_peers import fetch, fetched, running
from tests.fakes.log_writer import LogWriter
from tests.fakes.memory_store import MemoryStore
from tests.fakes.scripted_broker import scripted_broker
from tests.support.executors import RecordingExecutor
from tests.support.kafka_messages import request_frame
from tests.support.raw_kafka import connected
from tests.support.traced_files import PACKAGE, TracedFiles
from tests.unit.gateway.test_remote_answers import serving
from tieringd.storage.resilient import ResilientStore

__all__ = ["archive", "broker", "clock", "writer"]

PAGE = PACKAGE.parent / "docs/architecture.md"
UPLOAD, FETCH, TRIM = (
    "From a closed segment to the committed manifest",
    "An archived Fetch",
    "A local trim",
)
MOST_FILES = {UPLOAD: 24, FETCH: 22, TRIM: 11}
TURNS_AT_REST = 50
WITHOUT_STEPS = (
    *("errors.py", "clock.py", "pauses.py", "timeouts.py"),
    *("compiled/", "metrics/", "config/", "cli/logging.py"),
)
REPLACED = {"storage/s3/store.py", "broker/kafka.py"}
"""A store in memory and a broker in this process stand for these here."""
ONLY_TYPES = {"gateway/archive_answers.py"}
BEHIND_INTERFACES = REPLACED | {"storage/resilient.py", "gateway/remote_answers.py"}
"""`daemon` puts these behind `ObjectStore`, `Broker` and `ArchiveAnswers`."""
OUT_OF_RANGE = {"orders": {0: {"error_code": 1}}}


def section(title: str) -> str:
    _, _, rest = PAGE.read_text().partition(f"### {title}\n")
    assert rest, title
    return re.split(r"^##", rest, maxsplit=1, flags=re.MULTILINE)[0]


def walk(title: str) -> list[str]:
    """Return the numbered files of one walk, in order."""
    return re.findall(r"^\d+\. `([\w/]+\.py)`:", section(title), re.MULTILINE)


def beside(title: str) -> set[str]:
    """Return the files that the page names as running beside one walk."""
    return set(re.findall(r"`([\w/]+\.py)`", section(title))) - set(walk(title))


def assert_walked(title: str, ran: set[str]) -> None:
    """Assert that the page lists exactly what ran."""
    ran = {one for one in ran if not one.startswith(WITHOUT_STEPS)}
    listed = set(walk(title))
    assert sorted(listed - ran - REPLACED - ONLY_TYPES) == [], "these are on the walk and did not run"
    assert sorted(ran - listed - beside(title)) == [], "these ran, and the page does not say so"
    assert sorted(beside(title) - ran) == [], "these are said to run beside the walk and did not"


def imported_by(file: str) -> set[str]:
    """Return the modules of tieringd that *file* imports from, as files."""
    tree = ast.parse((PACKAGE / file).read_text())
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return {one.removeprefix("tieringd.").replace(".", "/") + ".py" for one in modules}


async def until_at_rest(traced: TracedFiles, threads: RecordingExecutor) -> None:
    """Return when nothing of tieringd has run in many turns of the loop, and no thread is at work."""
    turns = 0
    traced.start()
    while turns < TURNS_AT_REST:
        traced.files.clear()
        await asyncio.sleep(0)
        turns = 0 if traced.files or not threads.is_idle() else turns + 1
    traced.stop()


@pytest.fixture
def store():
    """Return an empty bucket, which is asked as the daemon asks it."""
    return ResilientStore(MemoryStore())


@pytest.mark.parametrize("title", MOST_FILES)
def test_walk_is_short_enough_to_be_read(title):
    """Each file exists, is listed once, and is imported by an earlier one."""
    files = walk(title)
    assert 0 < len(files) <= MOST_FILES[title]
    assert len(set(files)) == len(files)
    assert [one for one in [*files, *beside(title)] if not (PACKAGE / one).exists()] == []
    found = {files[0], *BEHIND_INTERFACES}.union(*(imported_by(one) for one in beside(title)))
    for one in files:
        assert one in found, f"no earlier file of the walk imports {one}"
        found |= imported_by(one)


async def test_upload_runs_what_its_walk_lists(tmp_path, store):
    """One round of a daemon, in which one closed segment is new."""
    log = LogWriter(tmp_path, "orders", 0)
    log.closed_segment()
    with TracedFiles() as traced:
        daemon = Daemon(tmp_path, store, [log])
        await daemon.reconciler.run_once()
        log.closed_segment()
        traced.start()
        await daemon.reconciler.run_once()
        traced.stop()
    assert daemon.value("tieringd_uploads_total", topic="orders") == 2
    assert_walked(UPLOAD, traced.files)


async def test_archived_fetch_runs_what_its_walk_lists(tmp_path, store):
    """A client asks for an offset that the broker does not have any more."""
    log = LogWriter(tmp_path, "orders", 0)
    log.closed_segment()
    daemon = Daemon(tmp_path, store, [log])
    daemon.reconciler.interval_seconds = 3600  # A later round is no part of the walk.
    threads = RecordingExecutor()
    asyncio.get_running_loop().set_default_executor(threads)
    with TracedFiles() as traced:
        async with serving(tmp_path, store, daemon) as behind, scripted_broker() as broker:
            # The first rounds may take longer than a daemon is given to begin.
            await until_at_rest(traced, threads)
            traced.start()
            async with running(broker, behind.answers) as server, connected(server.port) as client:
                answer = b""
                while log.data_of(0) not in answer:
                    # A client asks again when the archive has nothing to give yet.
                    client.writer.write(request_frame(fetch(("orders",), offsets={0: 0}), correlation_id=5))
                    head, _, answers = await broker.next()
                    answers.write(fetched(head, OUT_OF_RANGE))
                    answer = await client.frame()
                traced.stop()
    assert_walked(FETCH, traced.files)


async def test_local_trim_runs_what_its_walk_lists(tmp_path, store, archive, writer, broker):
    """One step of an archiver, in which nothing is new and one segment may go."""
    for _ in range(2):
        writer.closed_segment()
    archiver = archiver_of(writer, archive, broker)
    while (await archiver.step(observed(writer))).uploaded:
        pass
    with TracedFiles() as traced:
        traced.start()
        result = await archiver.step(observed(writer, target_bytes=1))
        traced.stop()
    assert result.trimmed == 1
    assert_walked(TRIM, traced.files)
