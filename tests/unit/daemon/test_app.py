"""
The daemon's life in this process: signals, deadlines and single passes.

The bucket is an HTTP server that answers as S3 does, and holds back what a test wants held
back. The signals are real ones, to this process.
"""

from __future__ import annotations

import asyncio
import base64
import os
import signal
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
import yaml
from crc32c import crc32c

from tests.fakes.log_writer import LogWriter
from tests.support.raw_http import serving
from tieringd.config import parse_config
from tieringd.daemon.app import run_daemon, run_once
from tieringd.errors import BucketNotFound, ConfigError, StorageDenied
from tieringd.formats.archive_owners import ARCHIVE_OWNERS_KEY

_EMPTY_LISTING = (
    b'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>b</Name><Prefix></Prefix>'
    b"<KeyCount>0</KeyCount><MaxKeys>1</MaxKeys><IsTruncated>false</IsTruncated></ListBucketResult>"
)
_NO_SUCH_KEY = b"<Error><Code>NoSuchKey</Code><Message>There is no such key</Message></Error>"
_NO_SUCH_BUCKET = b"<Error><Code>NoSuchBucket</Code><Message>There is no such bucket</Message></Error>"
_LONG_MS = 3_600_000


class Bucket:
    """An empty bucket that takes every object with the right checksum, once `open`."""

    def __init__(self) -> None:
        self.exists = True
        self.refusal: str | None = None
        """The code of a 403 to each request; None without one."""
        self.open = asyncio.Event()
        self.held = asyncio.Event()
        """Set while the put of a segment is held back."""
        self.stored: list[str] = []
        self.owners: bytes | None = None
        """The record of the archive's owners; None without one."""

    async def handle(self, exchange) -> None:
        """Answer one request."""
        if not self.exists:
            await exchange.answer("404 Not Found", _NO_SUCH_BUCKET, Content_Type="application/xml")
        elif self.refusal is not None:
            await exchange.read_body()
            document = f"<Error><Code>{self.refusal}</Code><Message>no</Message></Error>".encode()
            date = format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)
            await exchange.answer("403 Forbidden", document, Content_Type="application/xml", Date=date)
        elif exchange.method == "PUT":
            body = await exchange.read_body()
            checksum = base64.b64encode(crc32c(body).to_bytes(4, "big")).decode()
            if exchange.headers["x-amz-checksum-crc32c"] != checksum:
                await exchange.answer("400 Bad Request", b"<Error><Code>BadDigest</Code></Error>")
                return
            if exchange.path.split("?")[0].endswith((".log", ".index")):
                self.held.set()
                await self.open.wait()
            self.stored.append(exchange.path.split("?")[0])
            await exchange.answer("200 OK", ETag='"1"')
        elif "list-type" in exchange.path:
            await exchange.answer("200 OK", _EMPTY_LISTING, Content_Type="application/xml")
        elif self.owners is not None and ARCHIVE_OWNERS_KEY in exchange.path:
            date = "Wed, 01 Jul 2026 12:00:00 GMT"
            await exchange.answer("200 OK", self.owners, ETag='"1"', Last_Modified=date)
        else:
            await exchange.answer("404 Not Found", _NO_SUCH_KEY, Content_Type="application/xml")


@pytest.fixture
def bucket():
    return Bucket()


@pytest.fixture
def writer(tmp_path):
    """Give a partition with a closed segment."""
    (tmp_path / "logs").mkdir()
    writer = LogWriter(tmp_path / "logs")
    writer.closed_segment()
    return writer


@pytest.fixture
async def config(tmp_path, bucket, writer):
    """Give a function that makes a configuration for the bucket."""
    async with serving(bucket.handle) as url:
        host, _, port = url.removeprefix("http://").partition(":")

        def make(without=(), **changes):
            properties = {
                "broker": {"kind": "none", "log_dirs": [str(tmp_path / "logs")]},
                "state_directory": str(tmp_path / "state"),
                "cloud_storage_enabled": True,
                "cloud_storage_enable_remote_write": True,
                "log_retention_ms": -1,
                "cloud_storage_backend": "aws",
                "cloud_storage_bucket": "archive",
                "cloud_storage_region": "us-east-1",
                "cloud_storage_api_endpoint": host,
                "cloud_storage_api_endpoint_port": int(port),
                "cloud_storage_disable_tls": True,
                "cloud_storage_access_key": "key",
                "cloud_storage_secret_key": "secret",
                # It takes every object, whatever the condition.
                "cloud_storage_single_writer": True,
                "cloud_storage_segment_upload_timeout_ms": _LONG_MS,
                "retention_local_target_ms_default": -1,
                "admin": {"port": 0},
                **changes,
            }
            for name in without:
                del properties[name]
            return parse_config(yaml.safe_dump(properties), source="test", environ={})

        yield make
        bucket.open.set()


def interrupt(number: signal.Signals = signal.SIGTERM) -> None:
    """Send this process a signal, if it is handled: an unhandled one would end the tests."""
    assert signal.getsignal(number) not in (signal.SIG_DFL, signal.default_int_handler)
    os.kill(os.getpid(), number)


@asynccontextmanager
async def running(work):
    """Run the daemon, and see that nothing of it is left when it has returned."""
    before = asyncio.all_tasks()
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    left = [
        each for each in asyncio.all_tasks() - before if "/tieringd/" in each.get_coro().cr_code.co_filename
    ]
    assert left == []
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_lets_the_upload_in_hand_finish(config, bucket, log, number):
    """A stop waits for the upload in hand, which is committed, and then the daemon returns."""
    async with running(run_daemon(config(shutdown_timeout_ms=_LONG_MS))) as daemon:
        await bucket.held.wait()
        interrupt(number)
        await log.said("stopping: finishing the uploads in hand")
        assert not daemon.done()
        bucket.open.set()
        await daemon

    # The topic's manifest may follow, where no round has stored it yet.
    stored = [each.rpartition("/")[2] for each in bucket.stored]
    assert [each for each in stored if each != "topic_manifest.json"][-1] == "manifest"
    assert log.events[-1] == "stopped"
    assert "segment durable" in log.events


async def test_stop_has_a_deadline(config, bucket, log):
    """An upload that does not end in time is cut off; nothing of it is committed."""
    async with running(run_daemon(config(shutdown_timeout_ms=1))) as daemon:
        await bucket.held.wait()
        interrupt()
        await daemon

    assert any(each.startswith("stopping without finishing") for each in log.events)
    # The claim, and no other commit.
    assert len([each for each in bucket.stored if each.endswith("/manifest")]) == 1
    assert log.events[-1] == "stopped"


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_second_signal_does_not_wait(config, bucket, log, second):
    """A second signal ends the wait for the deadline."""
    async with running(run_daemon(config(shutdown_timeout_ms=_LONG_MS))) as daemon:
        await bucket.held.wait()
        interrupt()
        await log.said("stopping: finishing the uploads in hand")
        interrupt(second)
        await daemon

    assert any(each.startswith("stopping without finishing") for each in log.events)
    # The claim, and no other commit.
    assert len([each for each in bucket.stored if each.endswith("/manifest")]) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        pytest.param({}, "no broker tells the retention; the file has it", id="in-the-file"),
        pytest.param(
            {"without": ["log_retention_ms"]},
            "no broker tells the retention, nor does the file: records older than the default of "
            "log_retention_ms are deleted from both tiers; set it to -1 to keep everything",
            id="by-default",
        ),
        pytest.param(
            {"without": ["log_retention_ms"], "delete_retention_ms": "3d"},
            "no broker tells the retention; the file has it",
            id="by-another-name",
        ),
    ],
)
async def test_start_says_which_retention_is_in_force_without_a_broker(config, bucket, log, changes, said):
    """An operator learns of the default before anything is deleted by it."""
    bucket.open.set()
    await run_once(config(**changes))
    assert [one for one in log.events if one.startswith("no broker tells")] == [said]


async def test_idle_daemon_stops_at_once(config, bucket, log):
    """A daemon between two rounds stops at once, and cuts nothing off."""
    bucket.open.set()
    async with running(run_daemon(config(shutdown_timeout_ms=_LONG_MS))) as daemon:
        await log.said("segment durable")
        interrupt()
        await daemon

    assert not any(each.startswith("stopping without finishing") for each in log.events)


async def test_disks_are_managed_and_a_reload_reaches_them(config, bucket, log, tmp_path):
    """The ballast is made at the start, and let go when a reloaded threshold says that the disk is full."""
    bucket.open.set()
    ballast = {"tune_ballast_file": True, "ballast_file_size": 4096, "ballast_release_when_degraded": True}
    roomy = {"storage_min_free_bytes": 0, "storage_space_alert_free_threshold_percent": 0}
    path = tmp_path / "state" / "ballast"
    full = config(**ballast, storage_min_free_bytes=2**60)
    async with running(run_daemon(config(**ballast, **roomy), load=lambda: full)) as daemon:
        await log.said("ballast file is made")
        assert path.stat().st_size == 4096
        interrupt(signal.SIGHUP)
        await log.said("ballast file is let go: its disk is degraded")
        assert not path.exists()
        interrupt()
        await daemon


async def test_part_that_fails_by_a_defect_is_started_again(config, bucket, log):
    """The others go on. Here it is the one that reloads the configuration, and its next reload succeeds."""
    faults = [RuntimeError("a defect")]
    changed = config(shutdown_timeout_ms=_LONG_MS, cloud_storage_max_connections=7)

    def load():
        if faults:
            raise faults.pop()
        return changed

    bucket.open.set()
    async with running(run_daemon(config(shutdown_timeout_ms=_LONG_MS), load=load)) as daemon:
        await log.said("segment durable")
        interrupt(signal.SIGHUP)
        await log.said("a task failed by a defect; it is started again")
        interrupt(signal.SIGHUP)
        await log.said("configuration reloaded")
        interrupt()
        await daemon


async def test_part_that_needs_an_operator_ends_the_daemon(config, bucket, log):
    """A daemon of which a part is missing does not look alive."""

    def fail():
        raise BucketNotFound("a fault for an operator")

    bucket.open.set()
    async with running(run_daemon(config(shutdown_timeout_ms=_LONG_MS), load=fail)) as daemon:
        await log.said("segment durable")
        interrupt(signal.SIGHUP)
        with pytest.raises(BucketNotFound, match="a fault for an operator"):
            await daemon


async def test_missing_bucket_ends_the_daemon_at_its_start(config, bucket, log):
    """
    A missing bucket is reported at once, and nothing keeps running.

    It is a fault of the configuration: the unit does not start such a daemon again.
    """
    bucket.exists = False
    async with running(run_daemon(config())) as daemon:
        with pytest.raises(ConfigError, match="there is no bucket archive"):
            await daemon


async def test_wrong_clock_ends_no_daemon_at_its_start(config, bucket, log):
    """A daemon that starts before the clock of its host is set says so, and goes on when it is set."""
    bucket.refusal = "RequestTimeTooSkewed"
    bucket.open.set()
    changes = {"shutdown_timeout_ms": _LONG_MS, "cloud_storage_reconciliation_interval_ms": 10}
    async with running(run_daemon(config(**changes))) as daemon:
        said = asyncio.create_task(log.said("object store cannot be used yet"))
        await asyncio.wait({daemon, said}, return_when=asyncio.FIRST_COMPLETED)
        assert not daemon.done(), daemon.exception()
        (entry,) = (one for one in log.entries if one["event"] == "object store cannot be used yet")
        assert "set this machine's clock: it is" in entry["error"]
        assert bucket.stored == []
        bucket.refusal = None
        await log.said("segment durable")
        interrupt()
        await daemon


@pytest.mark.parametrize(
    ("code", "error"),
    [
        pytest.param("RequestTimeTooSkewed", StorageDenied, id="clock"),
        pytest.param("SignatureDoesNotMatch", ConfigError, id="keys"),
    ],
)
async def test_refusal_at_a_start_is_a_fault_of_the_configuration_unless_it_may_pass(
    config, bucket, log, code, error
):
    """A single pass with wrong keys is not to be tried again; one with a wrong clock is."""
    bucket.refusal = code
    async with running(run_once(config())) as work:
        with pytest.raises(error) as caught:
            await work
    assert type(caught.value) is error


async def test_unreadable_record_of_owners_ends_no_daemon(config, bucket, log):
    """
    The gateway serves on, and nothing is written; when the record is mended the archive goes on.

    An end would only be followed by the unit's next start, and would cut all clients off each time.
    """
    bucket.owners = b"[]"
    bucket.open.set()
    changes = {"shutdown_timeout_ms": _LONG_MS, "cloud_storage_reconciliation_interval_ms": 10}
    async with running(run_daemon(config(**changes))) as daemon:
        said = asyncio.create_task(log.said("topic manifests cannot be read"))
        await asyncio.wait({daemon, said}, return_when=asyncio.FIRST_COMPLETED)
        assert not daemon.done(), daemon.exception()
        assert bucket.stored == []
        bucket.owners = None
        await log.said("segment durable")
        interrupt()
        await daemon


async def test_second_daemon_on_one_state_directory_is_refused(config, bucket, log):
    """Two daemons of one configuration cannot run, and the first is not disturbed."""
    async with running(run_daemon(config(shutdown_timeout_ms=1))) as daemon:
        await bucket.held.wait()
        with pytest.raises(ConfigError, match="another tieringd runs"):
            await run_daemon(config())
        assert not daemon.done()
        interrupt()
        await daemon


async def test_single_pass_tells_how_each_partition_stands(config, bucket, log):
    """A pass uploads what is eligible, returns the sums, and leaves no signal handler."""
    bucket.open.set()
    async with running(run_once(config())) as work:
        done = await work

    (status,) = done.statuses.values()
    assert (status.uploaded, status.fault) == (1, "")


async def test_signal_ends_a_single_pass_after_the_segments_in_hand(config, bucket, log, writer):
    """A pass that is asked to stop commits what it has in hand and starts no more."""
    for _ in range(8):
        writer.closed_segment()
    async with running(run_once(config())) as work:
        await bucket.held.wait()
        interrupt()
        # The signal is handled by the loop before the answers are: they come through sockets.
        await asyncio.sleep(0)
        bucket.open.set()
        done = await work

    (status,) = done.statuses.values()
    assert 0 < status.uploaded < 9
    assert status.pending_segments == 9 - status.uploaded


async def test_single_pass_without_a_bucket_raises(config, bucket, log):
    """A pass on a bucket that does not exist is the caller's to report."""
    bucket.exists = False
    async with running(run_once(config())) as work:
        with pytest.raises(ConfigError, match="there is no bucket archive"):
            await work
