"""The compiled code by itself: it touches no byte that is not its own, and does without a cache."""

# Long: numba compiles the kernel, in processes without a cache.

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tieringd
from tests.builders import batch
from tests.support.decoding import by_formats, decode
from tests.support.examples import examples
from tieringd.errors import CorruptDataError
from tieringd.formats.record_batch import NewRecord, encode_batch, parse_header, sealed
from tieringd.spark.decoder.kernel import kernel
from tieringd.spark.decoder.record_tables import BATCH, CORRUPT, CURSOR, FULL, ROWS

PAGE_BYTES = mmap.PAGESIZE
SIZES = {"offsets": 8, "times": 8, "time_types": 4, "key_ends": 4, "value_ends": 4, "header_ends": 4}
SIZES |= {"name_ends": 4, "content_ends": 4}
UNTOUCHED = 0xA5
FUNCTIONS = 3
"""The functions of the kernel."""

RECORDS = [
    NewRecord(b"value" * number, key=b"k" * number, headers=[("name", b"x" * number)] * (number % 3))
    for number in range(8)
]


@pytest.fixture(scope="module")
def guarded():
    """Give a function that puts bytes right before a page that cannot be read."""
    room = mmap.mmap(-1, 3 * PAGE_BYTES)
    start = ctypes.addressof(ctypes.c_char.from_buffer(room))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert protect(start + 2 * PAGE_BYTES, PAGE_BYTES, 0) == 0, os.strerror(ctypes.get_errno())

    def put(data: bytes) -> memoryview:
        view = memoryview(room)[2 * PAGE_BYTES - len(data) : 2 * PAGE_BYTES]
        view[:] = data
        return view

    return put


def changed_body(draw: st.DrawFn) -> bytes:
    """Draw a body of records with some bytes changed and its end cut off."""
    body = bytearray(encode_batch(0, RECORDS)[61:])
    for _ in range(draw(st.integers(0, 4))):
        body[draw(st.integers(0, len(body) - 1))] = draw(st.integers(0, 255))
    return bytes(body[: draw(st.integers(0, len(body)))])


@settings(deadline=None, max_examples=examples(300))
@given(st.data())
def test_nothing_behind_a_run_is_read(guarded, data):
    """
    The decoder reads nothing behind a run, whatever sizes the records claim.

    An unreadable page follows the run.
    """
    body = changed_body(data.draw)
    header = parse_header(encode_batch(0, RECORDS))
    stored = guarded(sealed(header._replace(last_offset_delta=60_000), body))
    try:
        expected = by_formats(bytes(stored))
    except CorruptDataError:
        expected = []
    found = decode(stored, skip_corrupt=True)
    assert found.rows == expected
    for size in (1, 60, 61, 62):
        assert decode(guarded(bytes(stored[:size])), skip_corrupt=True).rows == []


@settings(deadline=None, max_examples=examples(300))
@given(st.data())
def test_nothing_behind_the_rows_is_written(data):
    """The compiled code writes nothing behind a buffer's room, however much the records hold."""
    rows_max, bytes_max = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 120))
    headers_max = data.draw(st.integers(0, 9))
    room = {"rows_max": rows_max, "bytes_max": bytes_max, "headers_max": headers_max}
    wanted = data.draw(st.sets(st.sampled_from(["key", "value", "header", "time_types"])))
    rows, buffers = np.zeros(1, ROWS), {}
    for name in ROWS.names:
        column = name if name == "time_types" else name.split("_")[0].replace("name", "header")
        if name in room:
            rows[name] = room[name]
        elif name in {"offsets", "times"} or column.replace("content", "header") in wanted:
            is_of_header = name.startswith(("name_", "content_"))
            elements = bytes_max if name.endswith("_bytes") else headers_max if is_of_header else rows_max
            own_bytes = (elements + name.endswith("_ends")) * SIZES.get(name, 1)
            buffers[name] = (np.full(own_bytes + 64, UNTOUCHED, np.uint8), own_bytes)
            if name.endswith("_ends"):
                buffers[name][0][:4] = 0
            rows[name] = pa.py_buffer(buffers[name][0]).address
    body = np.frombuffer(changed_body(data.draw) + b"x", np.uint8)
    start = pa.py_buffer(body).address
    batches, cursor = np.zeros(1, BATCH), np.zeros(1, CURSOR)
    batches["records"], batches["records_end"] = start, start + len(body) - 1
    batches["record_count"], batches["last_delta"] = len(RECORDS), 60_000
    cursor["from_offset"], cursor["next_offset"] = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 9))

    outcome = kernel().read_batches(batches, cursor, rows)

    assert all((buffer[own_bytes:] == UNTOUCHED).all() for buffer, own_bytes in buffers.values())
    assert cursor["row"][0] <= rows_max
    if outcome == FULL:
        assert cursor["at"][0] > 0
    elif outcome == CORRUPT:
        assert cursor["row"][0] == 0


PROBE = """
import sys
from tieringd.formats.record_batch import NewRecord, encode_batch
from tieringd.spark.decoder import SegmentDecoder, Selection
from tieringd.spark.decoder.kernel import kernel
decoder = SegmentDecoder(["offset"], topic="t", partition=0, selection=Selection(0, 100), source="s")
assert list(decoder.decode(memoryview(encode_batch(5, [NewRecord(b"a")] * 3)), 0)) == []
(found,) = decoder.finish()
assert found.column("offset").to_pylist() == [5, 6, 7]
stats = [function.stats for function in kernel()]
print(sum(sum(one.cache_hits.values()) for one in stats), sys.modules["tieringd"].__file__)
"""


def run_probe(place: Path, home: Path, **environment: str) -> int:
    """Decode in a process of its own, with the package at *place*; return how much it had from a cache."""
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA_", "XDG_"))}
    ended = subprocess.run(
        [sys.executable, "-B", "-c", PROBE],
        cwd="/",
        env=outer | {"PYTHONPATH": str(place), "HOME": str(home)} | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    hits, origin = ended.stdout.splitlines()[-1].split()
    assert origin.startswith(str(place))
    return int(hits)


@pytest.fixture
def no_directory(tmp_path):
    """Give a path at which no user can make a directory, root included: a file is in its way."""
    path = tmp_path / "file"
    path.write_bytes(b"")
    return path


def test_package_that_cannot_be_written_is_decoded_with(tmp_path, no_directory):
    """Decoding works if neither the package nor the home takes a cache, and leaves nothing behind."""
    place = tmp_path / "site-packages"
    package = Path(tieringd.__file__).parent
    shutil.copytree(package, place / "tieringd", ignore=shutil.ignore_patterns("__pycache__"))
    (place / "tieringd" / "spark" / "decoder" / "__pycache__").write_bytes(b"")
    assert run_probe(place, no_directory) == 0
    assert not [path for path in tmp_path.rglob("*") if path.suffix in {".nbi", ".nbc"}]


# Long: numba compiles, in processes of their own.
@pytest.mark.timeout(900)  # It compiles, in processes of their own.
def test_package_in_an_archive_is_decoded_with(tmp_path, no_directory):
    """A package that was sent to executors as one file works as well, with a cache or without one."""
    place = tmp_path / "tieringd.zip"
    package = Path(tieringd.__file__).parent
    with zipfile.ZipFile(place, "w") as archive:
        for path in package.rglob("*.py"):
            archive.write(path, path.relative_to(package.parent))
    assert run_probe(place, no_directory) == 0
    home = tmp_path / "home"
    home.mkdir()
    assert [run_probe(place, home) for _ in range(2)] == [0, FUNCTIONS]


def run_with_cache(home: Path, cache: Path) -> int:
    """Decode with this package in a process of its own; return how much it had from *cache*."""
    return run_probe(Path(tieringd.__file__).parents[1], home, NUMBA_CACHE_DIR=str(cache))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Give a cache that one process has filled. To compile takes seconds."""
    home = tmp_path_factory.mktemp("compiled")
    assert run_with_cache(home, home / "cache") == 0
    return home / "cache"


@pytest.mark.timeout(900)
def test_code_is_compiled_once_for_all_processes(tmp_path, compiled):
    """The second process takes what the first one has compiled, from where NUMBA_CACHE_DIR says."""
    assert run_with_cache(tmp_path, compiled) == FUNCTIONS
    assert list(compiled.rglob("*.nbi"))


def test_types_of_the_arguments_never_change():
    """The code is compiled for one set of types, however it is called: a second set would cost seconds."""
    decode(batch(0), columns=("value",))
    decode(bytearray(batch(0)), rows_max=1)
    assert [len(function.signatures) for function in kernel()] == [1] * FUNCTIONS


@pytest.mark.timeout(900)
def test_broken_cache_file_is_replaced(tmp_path, compiled):
    """
    A disk that was full, or lost power, does not fail every task of its machine from then on.

    The index of one function is empty, and the code of another one is cut.
    """
    cache = tmp_path / "cache"
    shutil.copytree(compiled, cache)
    (index,) = cache.rglob("*.place_batches-*.nbi")
    index.write_bytes(b"")
    (code,) = cache.rglob("*.find_batches-*.nbc")
    code.write_bytes(code.read_bytes()[: code.stat().st_size // 2])
    assert run_with_cache(tmp_path, cache) == FUNCTIONS - 2
    assert run_with_cache(tmp_path, cache) == FUNCTIONS
