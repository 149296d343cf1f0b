"""
The part of the retry table for stores that send a large object in parts.

Parts store nothing: only the last request, which joins them, makes the object, and only it can be
in doubt. A store's test class inherits this table together with `RetryTable`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from crc32c import crc32c

from tests.contract.retry_table import BROKEN_UPLOADS, LOST_ANSWERS, REFUSALS, SEGMENT
from tieringd.errors import BucketNotFound, StorageDenied, StorageUnavailable
from tieringd.storage.base import IfAbsent

if TYPE_CHECKING:
    from tests.support.fault_proxy import Answer, Fault, ProxiedExchange


class PartsTable:
    """The cases of a segment that is sent in three parts."""

    refusals: ClassVar[dict[str, Answer]]
    denial: ClassVar[Answer]
    no_bucket: ClassVar[Answer]
    parts: ClassVar[dict[str, Any]]
    """The settings of a store that sends the segment so."""

    def is_part(self, exchange: ProxiedExchange) -> bool:
        raise NotImplementedError

    def is_join(self, exchange: ProxiedExchange) -> bool:
        raise NotImplementedError

    async def _put(self, here, body, fault: Fault) -> None:
        store = await here.store(fault, **self.parts)
        await store.put("segment", body, crc32c=crc32c(SEGMENT), condition=IfAbsent())

    async def _put_twice(self, here, body, fault: Fault) -> None:
        await self._put(here, body, fault)
        assert here.proxy.faults_left == 0
        assert here.outcomes == ["StorageUnavailable", "ok"]
        assert here.bucket.keys() == ["segment"]
        assert here.bucket.read("segment") == SEGMENT

    @pytest.mark.parametrize("fault", [*BROKEN_UPLOADS, *LOST_ANSWERS])
    async def test_broken_part_is_retried(self, here, slice_of, fault):
        """All parts are sent again after any fault of one, with a condition as well."""
        here.proxy.spoil(fault, where=self.is_part)
        await self._put_twice(here, slice_of(SEGMENT), fault)

    @pytest.mark.parametrize("case", REFUSALS)
    async def test_refused_part_is_retried(self, here, slice_of, case):
        """A refusal of a part is never in doubt."""
        here.proxy.spoil(self.refusals[case], where=self.is_part)
        await self._put_twice(here, slice_of(SEGMENT), self.refusals[case])

    @pytest.mark.parametrize("fault", LOST_ANSWERS)
    async def test_join_whose_answer_is_lost_is_sent_once(self, here, slice_of, fault):
        """The last request makes the object: without its answer a conditional upload is in doubt."""
        here.proxy.spoil(fault, where=self.is_join)
        with pytest.raises(StorageUnavailable) as caught:
            await self._put(here, slice_of(SEGMENT), fault)
        assert caught.value.outcome_unknown
        assert here.outcomes == ["StorageUnavailable"]
        assert [each.fault for each in here.proxy.exchanges if self.is_join(each)] == [fault]
        assert here.bucket.read("segment") == SEGMENT

    @pytest.mark.parametrize(
        ("answer", "error"),
        [
            pytest.param("denial", StorageDenied, id="403"),
            pytest.param("no_bucket", BucketNotFound, id="404-bucket"),
        ],
    )
    async def test_final_answer_to_a_part_is_raised_at_once(self, here, slice_of, answer, error):
        """A part that is refused for good ends the upload after one attempt, and nothing is joined."""
        here.proxy.spoil(getattr(self, answer), where=self.is_part)
        with pytest.raises(error):
            await self._put(here, slice_of(SEGMENT), getattr(self, answer))
        assert here.outcomes == [error.__name__]
        assert not any(map(self.is_join, here.proxy.exchanges))
        assert here.bucket.keys() == []
