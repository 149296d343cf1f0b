"""The compiled walk gives what the loops in Python give, over right bytes and wrong ones."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from bisect import bisect_left
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from tests.builders import batch, golden_log
from tests.support.examples import examples
from tieringd.compiled import batch_walk, loading
from tieringd.compiled.loading import load
from tieringd.errors import CorruptDataError
from tieringd.formats import record_batch
from tieringd.formats.batch_check import BatchCheck
from tieringd.formats.batch_offsets import ExpectedBatches, places_in
from tieringd.formats.record_batch import DELETE_HORIZON_FLAG, parse_header, sealed
from tieringd.formats.segment_scan import SegmentScan, SegmentScanner

WALK = load()
assert WALK is not None, "numba is missing, or this processor has no SSE 4.2; run `make install-dev`"

SIZES = (1, 1, 1, 50, 50, 700, 2900, 3100, 9000)
"""Sizes of values: a checksum has three streams of 1 KiB each, so these are below, at and above them."""
CHANGES = {
    "base_offset": (-1, 1, 2, -(1 << 62), 1 << 62),
    "last_offset_delta": (-1, 1, 2, -100, 1 << 30),
    "record_count": (-1, 1, -100, 1 << 30),
    "leader_epoch": (-1, 1),
    "attributes": (0x08, 0x10, 0x30, 0x40, 0x48),
    "base_timestamp_ms": (-1, 1, 1 << 50, -(1 << 50)),
    "max_timestamp_ms": (-1, 1, -(1 << 50)),
    "length": (-1, 1, -100, 1 << 26, 1 << 30),
}
"""Changes of a field of a header, whose batch gets the right checksum again."""
SEEDS = st.integers(0, 1 << 32).map(Random)


def log_of(random: Random) -> list[bytes]:
    """Return batches of some leader epochs and all kinds of times, of which some logs have holes."""
    found: list[bytes] = []
    offset, epoch = random.choice([0, 5, 1 << 40]), random.randint(-1, 3)
    has_holes = random.random() < 0.5
    for _ in range(random.randint(1, 8)):
        count = random.randint(1, 3)
        one = batch(
            offset,
            [b"v" * random.choice(SIZES)] * count,
            timestamp_ms=random.choice([-1, 0, 7, 1_700_000_000_000]),
            leader_epoch=epoch,
        )
        if random.random() < 0.1:
            header = parse_header(one)
            horizon = header.max_timestamp_ms + random.choice([-1, 1])
            marked = header._replace(attributes=DELETE_HORIZON_FLAG, base_timestamp_ms=horizon)
            one = sealed(marked, one[61:])
        found.append(one)
        offset += count + (random.choice([0, 1, 5]) if has_holes else 0)
        epoch += random.random() < 0.1
    return found


def edited(one: bytes, field: str, change: int) -> bytes:
    """Return a batch with one field changed, and with its checksum right."""
    header = parse_header(one)
    value = getattr(header, field) + change
    if field == "length":
        # The checksum is that of the bytes there are.
        return one[:8] + value.to_bytes(4, "big", signed=True) + one[12:]
    return sealed(header._replace(**{field: value}), one[61:])


def damaged(batches: list[bytes], random: Random) -> bytes:
    """Return a log of which some headers may lie, one byte may be another one, and an end may be missing."""
    batches = list(batches)
    for _ in range(random.choice([0, 0, 1, 1, 2])):
        at, field = random.randrange(len(batches)), random.choice(list(CHANGES))
        with suppress(CorruptDataError, struct.error, OverflowError):
            batches[at] = edited(batches[at], field, random.choice(CHANGES[field]))
    data = bytearray(b"".join(batches))
    if random.random() < 0.2:
        data[random.randrange(len(data))] ^= random.randint(1, 255)
    if random.random() < 0.2:
        del data[random.randrange(len(data)) :]
    return bytes(data)


def scanned(data: bytes, *, base_offset, next_offset, window_bytes, walk) -> object:
    """Return what a scan finds, or its fault."""
    scanner = SegmentScanner(base_offset, next_offset, index_interval_bytes=4000, walk=walk)
    view, at = memoryview(data), 0
    try:
        while not scanner.is_done and at < len(data):
            window = view[at : at + max(window_bytes, scanner.wanted_bytes)]
            consumed = scanner.feed(window)
            if not consumed and scanner.wanted_bytes > len(data) - at:
                break
            at += consumed
        found = scanner.finish(len(data) - at)
    except CorruptDataError as error:
        return error.message, error.position, error.offset
    return {name: getattr(found, name) for name in SegmentScan.__slots__ if name != "tracker"}


@settings(max_examples=examples(1500))
@given(SEEDS)
def test_scan_finds_what_the_loop_finds(random):
    """Every fact and every fault is the same, wherever the bytes are cut, and with bounds that do not fit."""
    batches = log_of(random)
    data = damaged(batches, random)
    base_offset = max(0, parse_header(batches[0]).base_offset + random.choice([0, 0, 0, -2, 1]))
    next_offset = parse_header(batches[-1]).last_offset + 1 + random.choice([0, 0, -1, 1, 1 << 40])
    bounds = {
        "base_offset": base_offset,
        "next_offset": random.choice([max(base_offset, next_offset), None]),
        "window_bytes": random.choice([1, 300, 5000, 1 << 20]),
    }
    assert scanned(data, **bounds, walk=WALK) == scanned(data, **bounds, walk=None)


def checked(data: bytes, expected: ExpectedBatches, ends, walk) -> object:
    """Return what a check says after each piece of *data*, and the fault that ends it."""
    said = []
    check = BatchCheck(expected, walk=walk)
    begin = 0
    try:
        for end in [*ends, len(data)]:
            check.take(memoryview(data)[begin:end])
            said.append(check.passed)
            begin = end
        check.end()
    except CorruptDataError as error:
        said.append((error.message, error.position, error.offset))
    return said


@settings(max_examples=examples(1500))
@given(SEEDS)
def test_check_says_what_the_loop_says(random):
    """What has passed, and every fault, is the same, with any of the batches in the index."""
    batches = log_of(random)
    data = damaged(batches, random)
    share = random.choice([0, 0.5, 1])
    named = [one for one in places_in(memoryview(b"".join(batches)), 0) if random.random() < share]
    offsets = [one.base_offset for one in named]
    if offsets and random.random() < 0.2:
        offsets[random.randrange(len(offsets))] += random.choice([-1, 1, 4])
    first, last = parse_header(batches[0]), parse_header(batches[-1])
    expected = ExpectedBatches(
        first.base_offset + random.choice([0, 0, 0, -2, 1]),
        last.last_offset + 1 + random.choice([0, 0, -1, 1, 1 << 63]),
        [one.position for one in named],
        offsets,
        is_dense=random.random() < 0.5,
    )
    ends = sorted(random.randint(0, len(data)) for _ in range(random.choice([0, 0, 1, 3])))
    assert checked(data, expected, ends, WALK) == checked(data, expected, ends, None)


@pytest.mark.parametrize("next_offset", [1 << 63, None])
def test_highest_offset_of_all_ends_a_scan(next_offset):
    """No offset follows it, wherever the bytes are cut."""
    data = batch((1 << 63) - 1, [b"v"]) * 2
    bounds = {"base_offset": (1 << 63) - 1, "next_offset": next_offset, "window_bytes": 1}
    assert scanned(data, **bounds, walk=WALK) == scanned(data, **bounds, walk=None)


def test_negative_offset_is_wrong_though_the_index_has_it_too():
    """Machine code leaves such a batch to the loop, which names the fault."""
    wrong = edited(batch(0, [b"v"]), "base_offset", -1)
    data = wrong + batch(1, [b"v"])
    expected = ExpectedBatches(0, 2, [0, len(wrong)], [-1, 1])
    said = checked(data, expected, [], None)
    assert said != [(len(data), 2)]
    assert checked(data, expected, [], WALK) == said


@pytest.mark.parametrize("topic", ["codec-none", "codec-zstd", "transactions", "compacted"])
def test_segment_of_a_broker_is_scanned_alike(topic):
    """Transactions and holes are left to the loop."""
    data = golden_log(topic)
    plain, compiled = (
        scanned(data, base_offset=0, next_offset=24, window_bytes=1 << 20, walk=walk) for walk in (None, WALK)
    )
    assert compiled == plain


def test_walk_passes_over_plain_batches():
    """The loop has nothing left to do with them, so the tests above compare two different things."""
    data = b"".join(batch(3 * number, [b"v" * 4000] * 3, leader_epoch=1) for number in range(50))
    first = len(data) // 50
    scanner = SegmentScanner(0, 150, walk=WALK)
    scanner.feed(memoryview(data)[:first])
    passed = WALK.scan(
        memoryview(data)[first:],
        batch_walk.Scanned(3, 1, crc32c(data[:first]), None, -1, 0),
        limit_offset=150,
        interval_bytes=65536,
    )
    assert (passed.size_bytes, passed.batch_count) == (len(data) - first, 49)
    assert passed.checksum == crc32c(data)
    places = list(places_in(memoryview(data), 0))[::5]
    expected = ExpectedBatches(0, 150, [one.position for one in places], [one.base_offset for one in places])
    check = WALK.check_of(expected.positions, expected.offsets, is_dense=True)
    at = check.walk(memoryview(data), 0, batch_walk.Checked(0, False, -1, 150, 0))
    assert at.size_bytes == expected.positions[-1]
    assert at.row == bisect_left(expected.positions, at.size_bytes)


def test_constants_are_those_of_the_format():
    """Compiled code keeps its own copies, because numba's cache notices no change elsewhere."""
    for name in ("HEADER_BYTES", "LENGTH_STARTS_AT", "CRC_STARTS_AT", "MIN_LENGTH", "MAGIC"):
        assert getattr(batch_walk, name) == getattr(record_batch, name)
    for name in ("TRANSACTIONAL_FLAG", "LOG_APPEND_TIME_FLAG", "DELETE_HORIZON_FLAG"):
        assert getattr(batch_walk, name) == getattr(record_batch, name)
    assert record_batch.MAX_BATCH_BYTES - record_batch.LENGTH_STARTS_AT == batch_walk.MAX_LENGTH


@given(st.binary(max_size=20_000), st.integers(0, 7))
def test_checksum_of_any_bytes(data, begin):
    """A batch of any size at any address has the checksum that the library computes."""
    whole = batch(0, [data])
    moved = memoryview(bytes(begin) + whole)[begin:]
    found = WALK.scan(
        moved,
        batch_walk.Scanned(0, -1, 0, None, -1, 0),
        limit_offset=1,
        interval_bytes=1,
    )
    assert (found.size_bytes, found.checksum) == (len(whole), crc32c(whole))


class TestLoading:
    """What a process does that has numba, has none, or has one that does not fit."""

    @pytest.fixture(autouse=True)
    def not_loaded(self, monkeypatch):
        monkeypatch.setattr(loading, "_is_begun", False)
        monkeypatch.setattr(loading, "_checked_bytes", 0)
        monkeypatch.setattr(loading, "_checked_batches", 0)
        monkeypatch.setattr(loading, "_walk", None)

    @pytest.fixture
    def begun(self, monkeypatch):
        """Give what was begun, instead of a load."""
        begun = []
        monkeypatch.setattr(loading, "load", lambda: begun.append(1))
        return begun

    def test_many_batches_load_it_once_in_the_background(self, begun):
        """Small segments count together. The caller does not wait, and later callers get it."""
        for _ in range(63):
            loading.note_checked(16 << 20, 1024)
        assert not loading._is_begun
        for _ in range(3):
            loading.note_checked(16 << 20, 1024)
        self.wait()
        assert begun == [1]

    def test_few_batches_or_few_bytes_do_not_load_it(self, begun):
        """A GiB of the largest batches costs hardly more in Python, and few bytes cost nothing."""
        for _ in range(64):
            loading.note_checked(16 << 20, 511)
        loading.expect_checks(1 << 30)
        assert not loading._is_begun
        loading.note_checked(16 << 20, 64)
        self.wait()
        assert begun == [1]

    def test_many_bytes_that_wait_load_it_before_one_is_checked(self, begun):
        """A backlog is known while the store is away: the walk is there when it returns."""
        loading.expect_checks(loading.WORTH_BYTES - 1)
        assert not loading._is_begun
        loading.expect_checks(loading.WORTH_BYTES)
        loading.expect_checks(loading.WORTH_BYTES)
        self.wait()
        assert begun == [1]

    def test_bytes_that_wait_count_as_the_batches_that_were_checked(self, begun):
        """A backlog in batches of 64 KiB is worth it from 32,768 of them on."""
        loading.note_checked(16 << 20, 256)
        loading.expect_checks((2 << 30) - 1)
        assert not loading._is_begun
        loading.expect_checks(2 << 30)
        self.wait()
        assert begun == [1]

    def test_without_numba_nothing_is_loaded(self, monkeypatch):
        """A plain installation has the loops in Python, and no warning."""
        monkeypatch.setattr(loading, "find_spec", lambda _name: None)
        monkeypatch.setattr(loading, "load", lambda: pytest.fail("there is nothing to load"))
        loading.note_checked(loading.WORTH_BYTES, loading.WORTH_BATCHES)
        assert loading.loaded_walk() is None

    @staticmethod
    def wait():
        """Return when the load that was begun has ended."""
        for thread in loading.threading.enumerate():
            if thread.name == "load the compiled walk":
                thread.join()

    def test_processor_without_the_instruction_has_none(self, monkeypatch):
        """Another processor than the code is for uses the loops in Python."""
        monkeypatch.setattr(batch_walk, "is_possible", lambda: False)
        assert load() is None

    @pytest.mark.parametrize(
        "environment",
        [{"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}, {"NUMBA_DISABLE_JIT": "1"}],
        ids=["no instruction", "no compiler"],
    )
    def test_process_goes_on_where_numba_cannot_compile_it(self, environment):
        """LLVM ends a process that compiles an unknown instruction, so numba's target is asked before."""
        program = "from tieringd.compiled.loading import load; print(load())"
        ended = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (ended.returncode, ended.stdout.splitlines()[-1:]) == (0, ["None"]), ended.stderr

    def test_damaged_code_that_was_kept_is_compiled_again(self, tmp_path):
        """Running it could end the process. Whole code is used as it is."""

        def kept_after_a_start() -> dict[Path, tuple[int, bytes]]:
            program = (
                "from tieringd.compiled.loading import keep_machine_code_in, load\n"
                f"keep_machine_code_in({str(tmp_path)!r})\n"
                "assert load()"
            )
            environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
            subprocess.run([sys.executable, "-c", program], env=environment, check=True)
            return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in tmp_path.rglob("*.nbc")}

        first = kept_after_a_start()
        assert len(first) == 2
        assert kept_after_a_start() == first
        damaged_path = min(first)
        with damaged_path.open("r+b") as file:
            file.seek(len(first[damaged_path][1]) // 2)
            file.write(bytes(512))
        wrong = damaged_path.read_bytes()
        assert kept_after_a_start()[damaged_path][1] != wrong

    def test_numba_that_does_not_fit_is_said_and_costs_nothing_else(self, monkeypatch):
        """An operator reads why uploads take more CPU."""

        def fail(_name):
            raise ImportError("numba needs NumPy 2.2 or less")

        monkeypatch.setattr(loading, "import_module", fail)
        with capture_logs() as logs:
            assert load() is None
        (event,) = logs
        assert event["event"] == "batches are checked without machine code"
        assert "NumPy 2.2" in event["error"]
