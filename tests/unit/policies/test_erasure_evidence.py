"""What records of erasures say of a partition: where it began, and who has not searched it."""

from __future__ import annotations

from tests.unit.model.values import PARTITION, remote
from tieringd.formats.job_records import PartitionGoneOver, RecordedErasure, RewrittenPartition
from tieringd.model.segment import Rewriting, RewritingKind
from tieringd.policies.erasure_evidence import ErasureEvidence
from tieringd.policies.valid_rewritings import RecordedRewriting

NEW = remote(0, 9, writer_id="rewritten-0e")
REWRITING = Rewriting.of(RewritingKind.REWRITTEN, (remote(0, 9),), (NEW,))


def erasure(at_ms, *, begins=None, expired=True, keys=("k",), rewritten=(), tells=True) -> RecordedErasure:
    """Return an erasure that began at a time; with *begins* it has gone over the partition from there on."""
    gone_over = () if begins is None else (PartitionGoneOver(PARTITION, begins, 100, expired),)
    return RecordedErasure(
        f"job-{at_ms}", at_ms, ("*",), frozenset(keys), rewritten, gone_over if tells else None
    )


def evidence_of(*erasures) -> ErasureEvidence:
    found = ErasureEvidence()
    for one in erasures:
        found.take(one, PARTITION)
    return found


def has_expired(found, last_offset, *, at) -> bool:
    segment = remote(max(0, last_offset - 9), last_offset, uploaded_at_ms=at)
    return any(begin.has_expired(segment) for begin in found.begins)


def test_begin_counts_for_what_was_there():
    """Later objects are of an archive that began anew, after an election before its start."""
    found = evidence_of(erasure(1000, begins=50), erasure(2000, begins=20))
    assert has_expired(found, 49, at=999)
    assert not has_expired(found, 50, at=999)
    assert not has_expired(found, 49, at=1000)
    assert has_expired(found, 19, at=1999)
    assert not has_expired(found, 19, at=2000)


def test_later_begin_takes_the_place_of_an_earlier_one():
    """A partition of a thousand erasures has one."""
    found = evidence_of(*(erasure(at, begins=at // 100) for at in range(1000, 2000, 100)))
    assert [(one.start_offset, one.at_ms) for one in found.begins] == [(19, 1900)]


def test_archive_that_began_without_an_expiry_has_no_known_begin():
    """An erasure of a manifest that began anew leaves no older object out: they have to be searched."""
    anew = erasure(1000, begins=50, expired=False)
    found = evidence_of(anew)
    assert found.begins == ()
    assert found.unsearched([remote(50, 59, uploaded_at_ms=5), remote(40, 49, uploaded_at_ms=1000)]) == []
    assert found.unsearched([remote(50, 59, uploaded_at_ms=5), remote(40, 49, uploaded_at_ms=5)]) == [anew]
    assert evidence_of(anew, erasure(2000, begins=0, expired=False)).unsearched([remote(0, 9)]) == []
    assert evidence_of(erasure(500, begins=20), anew).begins == evidence_of(erasure(500, begins=20)).begins


def test_erasure_of_the_same_keys_makes_good_for_one_that_missed_the_partition():
    """One of other keys does not, and neither does an earlier one."""
    old = [remote(0, 9, uploaded_at_ms=5)]
    missed = erasure(1000, keys=("a", "b"))
    assert evidence_of(missed).unsearched(old) == [missed]
    assert evidence_of(missed).unsearched([remote(0, 9, uploaded_at_ms=1000)]) == []
    assert evidence_of(missed, erasure(2000, begins=0, keys=("a",))).unsearched(old) == [missed]
    assert evidence_of(erasure(500, begins=0, keys=("a", "b")), missed).unsearched(old) == [missed]
    assert evidence_of(missed, erasure(2000, begins=0, keys=("a", "b", "c"))).unsearched(old) == []


def test_record_of_version_1_misses_nothing():
    """It does not say what it has gone over; what it replaced it says."""
    rewritten = (RewrittenPartition(PARTITION, REWRITING, 1500),)
    found = evidence_of(erasure(1000, rewritten=rewritten, tells=False))
    assert (found.begins, found.unsearched([remote(0, 9, uploaded_at_ms=5)])) == ((), [])
    assert found.unrecorded([]) == [RecordedRewriting(REWRITING, 1500)]


def test_rewriting_with_a_record_of_its_own_is_not_taken_twice():
    """The time of that record is the one that counts."""
    found = evidence_of(erasure(1000, begins=0, rewritten=(RewrittenPartition(PARTITION, REWRITING, 1500),)))
    assert found.unrecorded([RecordedRewriting(REWRITING, 1400)]) == []
