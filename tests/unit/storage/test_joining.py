"""How stores join objects: which parts are copied, in how many steps, and through which wrapper."""

from __future__ import annotations

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.memory_store import MemoryStore
from tieringd.errors import PreconditionFailed, StorageUnavailable
from tieringd.storage.base import IfAbsent, JoiningStore, JoinSource
from tieringd.storage.gcs.store import SOURCES_MAX, steps_to
from tieringd.storage.resilient import ResilientStore, StoreLimits
from tieringd.storage.s3.joining import PART_BYTES_MIN, Copy, Stream, parts_of

MIN = PART_BYTES_MIN
sizes = st.one_of(
    st.integers(1, 3 * MIN), st.integers(1, 1000), st.integers(-3, 3).map(lambda delta: MIN + delta)
)


def sources_of(of_sizes) -> list[JoinSource]:
    return [JoinSource(f"source-{number}", size, 0) for number, size in enumerate(of_sizes)]


def pieces_of(part):
    return part.pieces if isinstance(part, Stream) else (part.piece,)


@given(st.lists(sizes, min_size=1, max_size=30))
def test_parts_are_the_sources_in_order(of_sizes):
    """Every byte is in one part, in its place; every part but the last is as large as a part must be."""
    sources = sources_of(of_sizes)
    parts = parts_of(sources)
    expected = [(source.key, 0) for source in sources]
    ends: dict[str, int] = {}
    for part in parts:
        for piece in pieces_of(part):
            assert ends.get(piece.source.key, 0) == piece.position
            assert piece.size_bytes > 0
            ends[piece.source.key] = piece.position + piece.size_bytes
            if piece.position == 0:
                assert expected.pop(0) == (piece.source.key, 0)
    assert expected == []
    assert list(ends.values()) == of_sizes
    assert all(part.size_bytes >= MIN for part in parts[:-1])


def described(part) -> tuple[str, list[tuple[int, int]]]:
    """Return whether a part is copied, and each of its pieces' position and size."""
    kind = "stream" if isinstance(part, Stream) else "copy"
    return kind, [(piece.position, piece.size_bytes) for piece in pieces_of(part)]


@pytest.mark.parametrize(
    ("of_sizes", "expected"),
    [
        pytest.param([1], [("copy", [(0, 1)])], id="one"),
        pytest.param([1, 2], [("stream", [(0, 1), (0, 2)])], id="small"),
        pytest.param([MIN, 1], [("copy", [(0, MIN)]), ("copy", [(0, 1)])], id="large-then-small"),
        pytest.param(
            [1, 3 * MIN],
            [("stream", [(0, 1), (0, MIN - 1)]), ("copy", [(MIN - 1, 2 * MIN + 1)])],
            id="small-takes-of-the-next",
        ),
        pytest.param(
            [1, MIN + 7, MIN],
            [("stream", [(0, 1), (0, MIN + 7)]), ("copy", [(0, MIN)])],
            id="too-little-would-be-left",
        ),
        pytest.param(
            [1, MIN + 7],
            [("stream", [(0, 1), (0, MIN - 1)]), ("copy", [(MIN - 1, 8)])],
            id="last-may-be-little",
        ),
    ],
)
def test_what_is_too_small_to_be_a_part_is_streamed(of_sizes, expected):
    """A small source takes what is missing from the one after it; all else is copied."""
    assert [described(part) for part in parts_of(sources_of(of_sizes))] == expected


@given(st.lists(sizes, min_size=1, max_size=30))
def test_streamed_parts_are_small_and_few(of_sizes):
    """Memory is bounded by two smallest parts; of a source that can be copied little is streamed."""
    parts = parts_of(sources_of(of_sizes))
    streamed = [part for part in parts if isinstance(part, Stream)]
    assert all(part.size_bytes < 2 * MIN for part in streamed)
    for part in streamed:
        for piece in part.pieces:
            if piece.source.size_bytes >= 2 * MIN:
                assert piece.size_bytes < MIN
    small = [size for size in of_sizes if size < MIN]
    assert sum(part.size_bytes for part in streamed) <= sum(small) + 2 * MIN * len(small)


@given(st.lists(st.integers(MIN, 3 * MIN), min_size=1, max_size=10), st.integers(1, MIN))
def test_large_sources_are_copied_whole(of_sizes, last):
    """Nothing is streamed of sources that are large enough; the last one may have any size."""
    parts = parts_of(sources_of([*of_sizes, last]))
    assert all(isinstance(part, Copy) and part.piece.is_whole for part in parts)


@given(st.integers(1, 3000))
def test_steps_take_no_more_than_a_request_may(count):
    """Each object is made before it is used, used once, and holds its sources in order."""
    sources = [f"source-{number}" for number in range(count)]
    steps = steps_to("key", sources)
    made = {name: [name] for name in sources}
    for step in steps:
        assert 1 <= len(step.keys) <= SOURCES_MAX
        made[step.key] = [name for key in step.keys for name in made.pop(key)]
    assert made == {"key": sources}
    assert len(steps) <= 1 + count // 16


def filled(memory) -> list[JoinSource]:
    memory.add("one", b"one")
    memory.add("two", b"two")
    return [JoinSource("one", 3, crc32c(b"one")), JoinSource("two", 3, crc32c(b"two"))]


@pytest.mark.looptime
async def test_join_is_tried_again():
    """A store that fails once joins with the next attempt, whatever became of the first."""
    memory = MemoryStore()
    store = ResilientStore(memory)
    memory.fail_next("join", lambda: StorageUnavailable("503", outcome_unknown=True), after_effect=True)
    joined = await store.join("key", filled(memory), crc32c=crc32c(b"onetwo"))
    assert (await store.get("key"))[0] == b"onetwo"
    assert joined is not None
    assert [operation for operation, _ in memory.requests].count("join") == 2


@pytest.mark.looptime
async def test_conditional_join_of_unknown_outcome_is_not_repeated():
    """The first attempt may have won, and would be lost to by the second."""
    memory = MemoryStore()
    store = ResilientStore(memory)
    memory.fail_next("join", lambda: StorageUnavailable("503", outcome_unknown=True), after_effect=True)
    sources = filled(memory)
    with pytest.raises(StorageUnavailable) as caught:
        await store.join("key", sources, crc32c=crc32c(b"onetwo"), condition=IfAbsent())
    assert caught.value.outcome_unknown
    with pytest.raises(PreconditionFailed):
        await store.join("key", sources, crc32c=crc32c(b"onetwo"), condition=IfAbsent())


@pytest.mark.looptime
async def test_join_has_as_long_as_an_upload():
    """The server copies a segment's bytes, which takes longer than a manifest may."""
    memory = MemoryStore()
    store = ResilientStore(
        memory, StoreLimits(segment_upload_timeout_seconds=60, manifest_upload_timeout_seconds=1)
    )
    sources = filled(memory)
    memory.latency_seconds = 50
    assert await store.join("key", sources, crc32c=crc32c(b"onetwo")) is not None


async def test_store_that_cannot_join_says_so():
    """The wrapper of a store that cannot join returns None, and asks the store for nothing."""

    class Plain(MemoryStore):
        join = None

    plain = Plain()
    assert not isinstance(plain, JoiningStore)
    assert isinstance(MemoryStore(), JoiningStore)
    assert await ResilientStore(plain).join("key", filled(plain), crc32c=0) is None
    assert plain.requests == []
