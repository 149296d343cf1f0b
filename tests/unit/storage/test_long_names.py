"""Keys with parts that are longer than a file's name may be, in a file store."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from tieringd.storage.file import FileStore
from tieringd.storage.file_root import make_marker
from tieringd.storage.listing import list_objects

LONGEST = 255
parts = st.builds(
    lambda length, end: "t" * length + end,
    st.sampled_from([1, 2, LONGEST - 2, LONGEST - 1, LONGEST, LONGEST + 1, 2 * LONGEST - 1, 3 * LONGEST]),
    st.sampled_from(["", "-", ".", "/", "0", "u", "~a", "t~a"]),
)
keys = st.lists(parts, min_size=1, max_size=3).map(lambda some: "/".join(one.strip("/") for one in some))


def is_free_of_nesting(some: set[str]) -> bool:
    """Say whether no key is a directory of another: a file store cannot hold both."""
    return not any(other.startswith(f"{one}/") for one in some for other in some)


@given(st.sets(keys, min_size=1, max_size=8).filter(is_free_of_nesting), st.data())
def test_long_keys_are_listed_as_any_other(some, data):
    """
    Long keys are listed in byte order, from any start and under any prefix.

    They can be read and deleted.
    """
    ordered = sorted(some, key=str.encode)
    start = data.draw(st.sampled_from(["", *ordered, *(one[:-1] for one in ordered)]))
    prefix = data.draw(st.sampled_from([one[:end] for one in ordered for end in (0, 2, 255, 256, 600)]))

    async def check():
        # In memory, where a flush takes no time.
        with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
            make_marker(Path(directory))
            store = FileStore(Path(directory))
            for key in some:
                await store.put(key, key.encode(), crc32c=crc32c(key.encode()))
            assert [one.key async for one in list_objects(store, "")] == ordered
            page = await store.list_page(prefix, start_after=start)
            expected = [one for one in ordered if one.startswith(prefix) and one.encode() > start.encode()]
            assert [one.key for one in page.objects] == expected
            for key in some:
                assert (await store.get(key))[0] == key.encode()
            await store.delete_many(ordered)
            assert [one.key async for one in list_objects(store, "")] == []
            await store.close()

    asyncio.run(check())


@pytest.mark.parametrize("length", [LONGEST - 1, 2 * LONGEST - 3])
async def test_part_that_looks_as_if_it_went_on_is_refused(tmp_path, length):
    """No topic has such a name; a listing could not tell it from a longer one."""
    make_marker(tmp_path)
    store = FileStore(tmp_path)
    with pytest.raises(ValueError, match="cannot be a name in a file store"):
        await store.put("t" * length + "~", b"", crc32c=0)
    await store.close()
