"""Requests that are made a few at once."""

from __future__ import annotations

import pytest

from tieringd.errors import StorageError
from tieringd.storage.at_once import at_once


async def test_results_come_in_the_order_of_the_parts():
    """Results come in the order of the parts, however many there are."""
    assert await at_once(range(20), _doubled) == [2 * number for number in range(20)]


async def test_failure_keeps_its_cause():
    """The server's answer is in it, which says more than the error's class."""
    answer = OSError("501")

    async def refused(_):
        raise StorageError("refused") from answer

    with pytest.raises(StorageError) as caught:
        await at_once([1, 2], refused)
    assert caught.value.__cause__ is answer


async def _doubled(number):
    return 2 * number
