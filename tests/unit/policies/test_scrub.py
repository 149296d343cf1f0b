"""What is wrong with a segment's objects, from what was seen of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.model.values import PARTITION, remote, remote_segments, stored
from tieringd.formats.object_keys import data_key, index_key, manifest_key
from tieringd.model.segment import NO_CRC
from tieringd.model.spillover import Spillover, SpilloverName
from tieringd.policies.scrub import (
    FaultKind,
    Finding,
    ObjectFacts,
    manifest_findings,
    segment_findings,
    spillover_tally_finding,
)

SEGMENT = remote(10, 19, index_crc32c=0xABCDEF01)
SOUND_DATA = ObjectFacts(SEGMENT.size_bytes, SEGMENT.crc32c)
SOUND_INDEX = ObjectFacts(SEGMENT.index_size_bytes, SEGMENT.index_crc32c)
BROKEN = [
    (ObjectFacts(None), "missing", "is missing"),
    (ObjectFacts(1), "size", "has 1 bytes and the manifest says"),
    (ObjectFacts(-1, 7), "checksum", "has checksum 00000007 and the manifest says"),
    (ObjectFacts(-1, None, "a batch is wrong"), "content", "a batch is wrong"),
    (ObjectFacts(-1, 7, "a batch is wrong"), "content", "a batch is wrong"),
]
"""What is seen, its fault, and words of it; a size of -1 stands for the right one."""


@pytest.mark.parametrize(("seen", "fault", "words"), BROKEN)
@pytest.mark.parametrize("part", ["data", "index"])
def test_each_fault_of_an_object_has_its_kind(part, seen, fault, words):
    """One finding names the object, the segment, and says what is wrong."""
    sound = {"data": SOUND_DATA, "index": SOUND_INDEX}
    seen = replace(seen, size_bytes=sound[part].size_bytes) if seen.size_bytes == -1 else seen

    (finding,) = segment_findings(PARTITION, SEGMENT, **(sound | {part: seen}))

    key = {"data": data_key, "index": index_key}[part](PARTITION, SEGMENT)
    assert (finding.kind, finding.key) == (FaultKind(f"{part}_{fault}"), key)
    assert (finding.partition, finding.segment) == (PARTITION, SEGMENT)
    assert words in str(finding)
    assert finding.action


def test_both_objects_of_a_segment_can_be_wrong():
    """Data and index have a finding each."""
    found = segment_findings(PARTITION, SEGMENT, data=ObjectFacts(None), index=ObjectFacts(None))
    assert [one.kind for one in found] == [FaultKind.DATA_MISSING, FaultKind.INDEX_MISSING]


@given(remote_segments(5))
def test_right_facts_are_no_finding(segment):
    """An object as the manifest has it is sound, with and without a reported checksum."""
    for crc32c, index_crc32c in ((segment.crc32c, segment.index_crc32c), (None, None)):
        told = None if index_crc32c == NO_CRC else index_crc32c
        assert (
            segment_findings(
                PARTITION,
                segment,
                data=ObjectFacts(segment.size_bytes, crc32c),
                index=ObjectFacts(segment.index_size_bytes, told),
            )
            == ()
        )


@given(remote_segments(5), st.integers(0, 2**62), st.none() | st.integers(0, 2**32 - 1))
def test_other_facts_are_a_finding(segment, size_bytes, crc32c):
    """A data object of another size, or another known checksum, is never sound."""
    found = segment_findings(
        PARTITION, segment, data=ObjectFacts(size_bytes, crc32c), index=ObjectFacts(segment.index_size_bytes)
    )
    is_right = size_bytes == segment.size_bytes and crc32c in {None, segment.crc32c}
    assert bool(found) == (not is_right)


def test_index_without_a_noted_checksum_has_any():
    """A segment stored before index checksums were noted is accepted with any."""
    segment = replace(SEGMENT, index_crc32c=NO_CRC)
    assert segment_findings(PARTITION, segment, data=SOUND_DATA, index=ObjectFacts(300, 7)) == ()


def test_gaps_and_overlaps_are_findings_of_the_manifest():
    """Each broken rule of a manifest is one finding, of its key."""
    sound = stored([remote(0, 9), remote(10, 19)])
    assert manifest_findings(sound) == ()
    holed = replace(sound, segments=sound.segments.head(1).appended([remote(15, 19)]))
    overlapping = replace(sound, segments=sound.segments.head(1).appended([remote(5, 19)]))
    for wrong, words in ((holed, "offsets 10 to 14 are neither stored"), (overlapping, "overlaps")):
        (finding,) = manifest_findings(wrong)
        assert (finding.kind, finding.key) == (FaultKind.MANIFEST_RULES, manifest_key(PARTITION))
        assert words in finding.detail


def test_spilled_part_is_counted():
    """The counts of the live manifest are compared with those of the parts, both of them."""
    spillover = Spillover(0, SpilloverName(0, 9, 0, 0, 1), segments=2, size_bytes=20)
    assert spillover_tally_finding(PARTITION, spillover, segments=2, size_bytes=20) is None
    for segments, size_bytes in ((1, 20), (2, 19)):
        found = spillover_tally_finding(PARTITION, spillover, segments=segments, size_bytes=size_bytes)
        assert found is not None
        assert found.kind is FaultKind.SPILLOVER_DISAGREES


@pytest.mark.parametrize("kind", FaultKind)
def test_every_kind_tells_an_operator_what_to_do(kind):
    """There is no finding without an action."""
    assert Finding(kind, "key", "detail").action
