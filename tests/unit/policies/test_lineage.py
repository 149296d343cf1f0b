"""Lineage: where an archive leaves the history of its leader, and what is replaced then."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.unit.model.values import local_log, remote, stored
from tieringd.model.manifest_parts import Gap
from tieringd.model.partition import LogBounds
from tieringd.model.segment import CrossingTransaction
from tieringd.model.tail_cut import cut_back
from tieringd.policies.lineage import (
    ArchiveTruncation,
    Lineage,
    LineagePlan,
    archived_end,
    divergence_offset,
    knows_divergence,
    plan_replacement,
)
from tieringd.policies.upload_plan import MissingRange

if TYPE_CHECKING:
    from tieringd.model.manifest import PartitionManifest

OLD, NEW = 6, 8
"""The epochs of the leader that uploaded the archive, and of the one that observes it."""

ARCHIVED = ((5, 0), (OLD, 250))
"""Segments 0, 100 and 200 of a leader whose own epoch began inside the last of them."""


def archive(*entries, epochs=ARCHIVED, uploaded_under=OLD, start_offset=None) -> PartitionManifest:
    """Return a manifest of entries (base, last), each a segment or, as a third word says, a gap."""
    first = entries[0][0] if entries else 0
    manifest = stored([], start_offset=first if start_offset is None else start_offset)
    for base_offset, last_offset, *gap in entries:
        if gap:
            manifest = manifest.with_gap(Gap(base_offset, last_offset, "gone", 1))
        else:
            segment = remote(base_offset, last_offset, leader_epoch=uploaded_under)
            manifest = manifest.appended([segment])
    return replace(manifest.appended((), epochs), leader_epoch=uploaded_under)


THREE = archive((0, 99), (100, 199), (200, 299))


def plan(manifest, *, bases=(0, 100, 200), epochs=(), log_end_offset=400, leader_epoch=NEW) -> LineagePlan:
    log = replace(local_log(bases), epochs=tuple(epochs))
    bounds = LogBounds(log.first_offset or 0, log_end_offset, log_end_offset)
    return plan_replacement(manifest, log, bounds, leader_epoch=leader_epoch)


@pytest.mark.parametrize(
    ("local_epochs", "archived_next_offset", "expected"),
    [
        pytest.param(((0, 0), (1, 500)), 201, 201, id="the older of two epochs, in part"),
        pytest.param(((0, 0), (1, 150), (2, 300)), 201, 150, id="the epoch ended before the archive does"),
        pytest.param(((0, 0), (1, 201)), 201, 201, id="the epoch ended just there"),
        pytest.param(((0, 0),), 201, 201, id="the epoch goes on"),
        pytest.param(((0, 0),), 1201, 1000, id="the log ends before the archive"),
    ],
)
def test_divergence_is_one_past_the_highest_remote_offset(local_epochs, archived_next_offset, expected):
    """A new leader resumes copying at the offset at which Kafka's does."""
    found = divergence_offset(
        ((0, 0),), local_epochs, archived_next_offset=archived_next_offset, local_next_offset=1000
    )
    assert found == expected


LINEAGE = ((0, 0), (1, 10), (2, 20), (3, 30), (4, 40), (5, 50), (7, 70))
CUT_LINEAGE = ((7, 51), (9, 100))


@pytest.mark.parametrize(
    ("archived", "last_offset", "lineage", "log_end_offset", "within"),
    [
        pytest.param(((1, 15), (2, 20), (3, 30)), 35, LINEAGE, 90, True, id="several epochs"),
        pytest.param(((1, 15),), 19, LINEAGE, 90, True, id="one epoch"),
        pytest.param(((0, 0),), 5, LINEAGE, 90, True, id="from the first offset"),
        pytest.param(((1, 15), (2, 20)), 29, LINEAGE, 90, True, id="up to an epoch's end"),
        pytest.param(((1, 15), (2, 20)), 35, LINEAGE, 90, False, id="past its last epoch's end"),
        pytest.param(LINEAGE, 90, LINEAGE, 90, False, id="one past the end of the log"),
        pytest.param(((7, 15), (9, 100), (10, 200)), 250, CUT_LINEAGE, 210, False, id="newer than the log"),
        pytest.param(((8, 75),), 100, CUT_LINEAGE, 210, False, id="an epoch that the log skips"),
    ],
)
def test_a_stored_segment_is_within_the_lineage_where_kafka_says_so(
    archived, last_offset, lineage, log_end_offset, within
):
    """An archive of this one segment diverges exactly when Kafka finds it off the lineage."""
    found = divergence_offset(
        archived, lineage, archived_next_offset=last_offset + 1, local_next_offset=log_end_offset
    )
    assert (found == last_offset + 1) == within


@pytest.mark.parametrize(
    ("archived", "last_offset", "lineage", "log_end_offset"),
    [
        pytest.param(((5, 55), (6, 60), (7, 70)), 85, LINEAGE, 90, id="an epoch more"),
        pytest.param(((1, 15), (2, 20), (4, 40)), 45, LINEAGE, 90, id="an epoch less"),
        pytest.param(((1, 5), (2, 20)), 25, LINEAGE, 90, id="begins before its first epoch"),
        pytest.param(((9, 99),), 150, CUT_LINEAGE, 210, id="begins before its only epoch"),
        pytest.param(((2, 5), (3, 6)), 7, CUT_LINEAGE, 210, id="below all that the log knows"),
    ],
)
def test_what_precedes_a_shared_epoch_or_the_log_itself_is_not_divergence(
    archived, last_offset, lineage, log_end_offset
):
    """Kafka keeps away from these segments; that they must go cannot be concluded."""
    found = divergence_offset(
        archived, lineage, archived_next_offset=last_offset + 1, local_next_offset=log_end_offset
    )
    assert found == last_offset + 1


@pytest.mark.parametrize(
    ("archived", "local", "expected"),
    [
        pytest.param((), ((5, 0),), 300, id="no archived history"),
        pytest.param(((5, 0),), (), 300, id="no local history"),
        pytest.param(((5, 0), (6, 250)), ((5, 0), (6, 250), (8, 350)), 300, id="the same"),
        pytest.param(((5, 0), (6, 250)), ((5, 0), (8, 280)), 250, id="the local epoch ran longer"),
        pytest.param(((5, 0), (6, 250)), ((5, 0), (8, 210)), 210, id="the archived epoch ran longer"),
        pytest.param(((5, 0), (6, 250)), ((5, 0), (7, 220), (8, 290)), 220, id="two epochs beside one"),
        pytest.param(((5, 0), (6, 250)), ((4, 0), (6, 250), (8, 290)), 290, id="the newest shared counts"),
        pytest.param(((5, 0), (6, 250)), ((6, 270), (8, 350)), 300, id="head lost, tail shared"),
        pytest.param(((5, 0), (6, 250)), ((6, 270), (8, 290)), 290, id="head lost, tail cut"),
        pytest.param(((5, 0), (6, 250)), ((5, 270), (8, 290)), 250, id="divergence inside the lost head"),
        pytest.param(((5, 0), (6, 250)), ((7, 270), (8, 290)), 270, id="nothing shared, head lost"),
        pytest.param(((5, 0), (6, 250)), ((7, 310), (8, 320)), 300, id="nothing shared, begins later"),
        pytest.param(((3, 0), (6, 250)), ((5, 270), (8, 290)), 250, id="older than the first local one"),
        pytest.param(((5, 0), (6, 250)), ((8, 0),), 0, id="an empty log was elected"),
        pytest.param(((5, 0), (6, 250)), ((5, 0), (6, 200), (8, 200)), 200, id="shared, without records"),
        pytest.param(((5, 0), (9, 340)), ((5, 0), (8, 320)), 300, id="told of epochs past its own end"),
    ],
)
def test_divergence_is_found_by_the_newest_epoch_that_both_logs_have(archived, local, expected):
    """Two logs are equal up to where the first of them ends their newest shared epoch."""
    found = divergence_offset(archived, local, archived_next_offset=300, local_next_offset=400)
    assert found == expected


@pytest.mark.parametrize(
    ("manifest", "facts", "lineage", "reason"),
    [
        pytest.param(
            THREE,
            {"epochs": ((5, 0), (NEW, 210)), "leader_epoch": OLD},
            Lineage.UNDECIDED,
            "the local leader-epoch history ends with epoch 8, but this broker was last seen leading since "
            "epoch 6",
            id="own tail, under a log of a later epoch",
        ),
        pytest.param(
            archive((0, 99), (100, 299, "gap")),
            {"epochs": ((5, 0), (NEW, 150))},
            Lineage.HOLDS,
            "the local log has leader epoch 5 up to the end of the archive",
            id="ends with a gap",
        ),
        pytest.param(
            archive((0, 99, "gap")),
            {"epochs": ((NEW, 0),)},
            Lineage.HOLDS,
            "the archive holds no segment",
            id="nothing but a gap",
        ),
        pytest.param(
            THREE,
            {"epochs": ((5, 0), (OLD, 250), (NEW, 300))},
            Lineage.HOLDS,
            "the local log has leader epoch 6 up to the end of the archive",
            id="a clean election",
        ),
        pytest.param(
            THREE,
            {"epochs": ((7, 310), (NEW, 350)), "bases": (310,)},
            Lineage.HOLDS,
            "the archive ends before offset 310, the first offset of the local leader-epoch history",
            id="the log begins later",
        ),
        pytest.param(
            THREE,
            {"epochs": ()},
            Lineage.UNKNOWN,
            "the local log has no leader-epoch history",
            id="no history",
        ),
        pytest.param(
            archive((0, 99), epochs=()),
            {"epochs": ((NEW, 0),)},
            Lineage.UNKNOWN,
            "the archive has no leader-epoch history",
            id="archived from a log without history",
        ),
        pytest.param(
            THREE,
            {"epochs": ((5, 0), (NEW, 210)), "bases": ()},
            Lineage.UNDECIDED,
            "the local log has no segment yet",
            id="no segment",
        ),
        pytest.param(
            THREE,
            {"epochs": ((5, 0),)},
            Lineage.UNDECIDED,
            "the local leader-epoch history ends with epoch 5, but this broker was last seen leading since "
            "epoch 8",
            id="just elected",
        ),
        pytest.param(
            THREE,
            {"epochs": ((5, 0), (NEW, 210), (9, 220))},
            Lineage.UNDECIDED,
            "the local leader-epoch history ends with epoch 9, but this broker was last seen leading since "
            "epoch 8",
            id="another election since",
        ),
        pytest.param(
            archive((0, 99), (100, 199), (200, 299), uploaded_under=9),
            {"epochs": ((5, 0), (NEW, 210))},
            Lineage.UNDECIDED,
            "leader epoch 9 wrote the manifest, but this broker was last seen leading since epoch 8",
            id="a newer leader",
        ),
        pytest.param(
            archive((0, 99), (100, 299), epochs=((5, 0), (NEW, 210))),
            {"epochs": ((5, 0), (NEW, 210)), "log_end_offset": 280},
            Lineage.UNDECIDED,
            "the archive has leader epoch 8 up to offset 299, but the log that leads since epoch 8 is only "
            "known up to offset 279",
            id="the end of the log lags",
        ),
        pytest.param(
            archive((0, 99), (100, 299), epochs=((5, 0), (NEW, 210)), uploaded_under=NEW),
            {"epochs": ((5, 0), (NEW, 210)), "log_end_offset": 280},
            Lineage.UNDECIDED,
            "the archive has leader epoch 8 up to offset 299, but the log that leads since epoch 8 is only "
            "known up to offset 279",
            id="own tail, past the end of the log",
        ),
    ],
)
def test_nothing_is_replaced_without_proof(manifest, facts, lineage, reason):
    """An archive stays as it is if the histories agree or cannot be compared."""
    assert plan(manifest, **facts) == LineagePlan(lineage, reason, manifest.next_offset)


@pytest.mark.parametrize(
    ("lineage", "may_append"),
    [
        (Lineage.HOLDS, True),
        (Lineage.UNKNOWN, True),
        (Lineage.UNDECIDED, False),
        (Lineage.DIVERGES, False),
        (Lineage.REOPENED, False),
    ],
)
def test_segments_are_appended_only_where_the_tail_is_settled(lineage, may_append):
    """A tail that the next observation may find off the lineage gets no successor."""
    assert lineage.may_append is may_append


def test_the_end_of_the_log_alone_is_no_proof_after_an_election():
    """A leader whose high watermark is still behind the archive replaces nothing that it holds."""
    found = plan(THREE, epochs=((5, 0), (OLD, 250), (NEW, 300)), log_end_offset=120)
    assert found.lineage is Lineage.HOLDS


def test_an_archive_off_the_lineage_is_replaced_from_the_segment_that_leaves_it():
    """The plan names the segment with the divergence, what is good of it, and what an operator must know."""
    assert plan(THREE, epochs=((5, 0), (NEW, 210))) == LineagePlan(
        Lineage.DIVERGES,
        "offsets 210 to 299 were archived from a leader whose records are not in the log that leads since "
        "epoch 8",
        resume_offset=200,
        replacement=ArchiveTruncation(
            base_offset=200,
            last_offset=299,
            divergence_offset=210,
            segment_count=1,
            local_base_offset=200,
            missing=None,
            good=MissingRange(200, 209),
            only_archived=None,
        ),
    )


@pytest.mark.parametrize(
    ("manifest", "epochs", "base_offset", "last_offset", "segment_count"),
    [
        pytest.param(THREE, ((5, 0), (NEW, 299)), 200, 299, 1, id="where the archived epoch begins"),
        pytest.param(THREE, ((5, 0), (NEW, 201)), 200, 299, 1, id="one record into a segment"),
        pytest.param(THREE, ((5, 0), (NEW, 200)), 200, 299, 1, id="just between two segments"),
        pytest.param(THREE, ((5, 0), (NEW, 199)), 100, 299, 2, id="one record earlier"),
        pytest.param(THREE, ((NEW, 0),), 0, 299, 3, id="everything"),
        pytest.param(
            archive((100, 199), (200, 299), epochs=((OLD, 100),)),
            ((NEW, 0),),
            0,
            299,
            2,
            id="everything, and what is before an archive that begins later",
        ),
        pytest.param(
            archive((100, 199), (200, 299), epochs=((OLD, 100),)),
            ((NEW, 50),),
            50,
            299,
            2,
            id="everything, and a part of what is before it",
        ),
        pytest.param(
            archive((100, 199), (200, 299), epochs=((5, 0), (OLD, 100))),
            ((5, 0), (NEW, 100)),
            100,
            299,
            2,
            id="everything, from its very start",
        ),
        pytest.param(
            archive((0, 99), (100, 199, "gap"), (200, 299)),
            ((5, 0), (NEW, 210)),
            200,
            299,
            1,
            id="past a gap",
        ),
        pytest.param(
            archive((0, 99), (100, 199, "gap"), (200, 299)), ((5, 0), (NEW, 150)), 100, 299, 1, id="in a gap"
        ),
        pytest.param(
            archive((0, 99), (100, 199, "gap"), (200, 299)), ((5, 0), (NEW, 90)), 0, 299, 2, id="before a gap"
        ),
        pytest.param(
            archive((0, 99), (100, 199, "gap"), (200, 299)), ((5, 0), (NEW, 100)), 100, 299, 1, id="at a gap"
        ),
        pytest.param(
            archive((0, 99), (100, 149, "gap"), (150, 199, "gap"), (200, 299)),
            ((5, 0), (NEW, 150)),
            150,
            299,
            1,
            id="at the second of two gaps",
        ),
        pytest.param(
            archive((0, 99), (100, 199), (200, 299, "gap"), epochs=((5, 0), (OLD, 120))),
            ((5, 0), (NEW, 110)),
            100,
            299,
            1,
            id="with a gap at the end",
        ),
    ],
)
def test_a_replacement_begins_with_the_entry_that_holds_the_divergence(
    manifest, epochs, base_offset, last_offset, segment_count
):
    """Whole segments and gaps are replaced, from the one with the first wrong offset to the end."""
    found = plan(manifest, epochs=epochs)
    assert found.resume_offset == base_offset
    assert (
        found.replacement.base_offset,
        found.replacement.last_offset,
        found.replacement.segment_count,
    ) == (base_offset, last_offset, segment_count)


@pytest.mark.parametrize(
    ("bases", "local_base_offset", "missing", "only_archived"),
    [
        pytest.param((0, 200, 400), 200, None, None, id="cut alike"),
        pytest.param((0, 150, 400), 150, None, None, id="cut elsewhere"),
        pytest.param((0,), 0, None, None, id="one active segment"),
        pytest.param((200, 400), 200, None, None, id="the head is gone, just up to there"),
        pytest.param(
            (205, 400), None, MissingRange(200, 204), MissingRange(200, 204), id="begins below the divergence"
        ),
        pytest.param(
            (210, 400), None, MissingRange(200, 209), MissingRange(200, 209), id="begins at the divergence"
        ),
        pytest.param((230,), None, MissingRange(200, 229), MissingRange(200, 209), id="begins past it"),
        pytest.param(
            (350,), None, MissingRange(200, 349), MissingRange(200, 209), id="begins past the archive"
        ),
    ],
)
def test_a_replacement_says_what_the_local_log_can_no_longer_give(
    bases, local_base_offset, missing, only_archived
):
    """Offsets that left the disk are named, and of these the good ones, which only the archive has."""
    found = plan(THREE, bases=bases, epochs=((5, 0), (NEW, 210))).replacement
    assert found.divergence_offset == 210
    assert (found.local_base_offset, found.missing, found.only_archived) == (
        local_base_offset,
        missing,
        only_archived,
    )


@pytest.mark.parametrize(
    ("bases", "begin", "good", "is_anew"),
    [
        pytest.param((100,), 100, None, True, id="at a segment"),
        pytest.param((50,), 50, MissingRange(0, 49), False, id="inside, and only the archive has the rest"),
        pytest.param((0,), 50, MissingRange(0, 49), True, id="inside, and the log has files before it"),
        pytest.param((300,), 300, None, False, id="behind the archive"),
    ],
)
def test_log_without_an_epoch_in_common_may_begin_later(bases, begin, good, is_anew):
    """An operator is asked about all that it would replace, or about what only the archive has."""
    found = plan(archive((0, 99), (100, 299)), bases=bases, epochs=((NEW, begin),), log_end_offset=400)
    assert (found.replacement and found.replacement.good, found.is_log_anew) == (good, is_anew)


@pytest.mark.parametrize("log_end_offset", [0, 1, 400], ids=["empty", "one record", "longer"])
@pytest.mark.parametrize("entries", [((0, 99), (100, 299)), ((100, 299),)], ids=["from 0", "later"])
def test_log_without_an_epoch_in_common_is_told_from_one_that_lags(entries, log_end_offset):
    """A log that began anew, as after a lost disk, is told from one with the archive's epochs."""
    found = plan(archive(*entries), bases=(0,), epochs=((NEW, 0),), log_end_offset=log_end_offset)
    assert (found.lineage, found.resume_offset, found.is_log_anew) == (Lineage.DIVERGES, 0, True)

    found = plan(archive(*entries), bases=(0,), epochs=((5, 0), (NEW, 0)), log_end_offset=log_end_offset)
    assert (found.lineage, found.resume_offset, found.is_log_anew) == (Lineage.DIVERGES, 0, False)


@pytest.mark.parametrize(
    ("entries", "epochs", "missing"),
    [
        pytest.param(
            ((0, 99), (100, 199, "gap"), (200, 299)),
            ((5, 160), (NEW, 180)),
            MissingRange(100, 159),
            id="from a gap on",
        ),
        pytest.param(
            ((0, 99), (100, 199), (200, 299)), ((5, 160), (NEW, 200)), None, id="from a segment's start on"
        ),
    ],
)
def test_a_replacement_that_drops_no_good_record_has_nothing_to_salvage(entries, epochs, missing):
    """Records of a gap before the divergence were never stored, so nothing is lost with them."""
    found = plan(archive(*entries), bases=(160,), epochs=epochs).replacement
    assert (found.missing, found.only_archived) == (missing, None)


@pytest.mark.parametrize(
    ("archived", "local", "is_known"),
    [
        pytest.param(((5, 0), (6, 9)), ((5, 0), (8, 7)), True, id="an epoch in common"),
        pytest.param(((5, 0), (6, 9)), ((8, 7),), False, id="none in common"),
        pytest.param(((0, 0),), ((1, 7),), False, id="epoch 1 may have begun before"),
        pytest.param(((0, 0),), ((2, 7),), False, id="epoch 1 may have come before"),
        pytest.param(((0, 0), (1, 3)), ((2, 7),), False, id="either epoch may have come before"),
    ],
)
def test_divergence_is_known_by_an_epoch_in_common(archived, local, is_known):
    """Each epoch has one leader, so logs that both have it agree up to where the first of them ends it."""
    log = replace(local_log((7,)), epochs=local)
    assert knows_divergence(archive((0, 9), epochs=archived), log) is is_known


def test_good_segments_after_a_gap_are_only_archived():
    """The first entry to go is a gap, but a segment between it and the divergence holds good records."""
    manifest = archive((0, 99, "gap"), (100, 199), (200, 299))
    log = replace(local_log((205, 400)), epochs=((5, 0), (NEW, 210)))
    bounds = LogBounds(205, 400, 400)
    found = plan_replacement(manifest, log, bounds, leader_epoch=NEW, undecided_from=50).replacement
    assert (found.base_offset, found.only_archived) == (0, MissingRange(100, 204))


@pytest.mark.parametrize(
    ("manifest", "epochs", "expected"),
    [
        pytest.param(None, ((5, 0),), None, id="no manifest"),
        pytest.param(THREE, (), 300, id="no local history"),
        pytest.param(archive((0, 99), epochs=()), ((5, 0),), 100, id="no archived history"),
        pytest.param(THREE, ARCHIVED, 300, id="the same leaders"),
        pytest.param(THREE, (*ARCHIVED, (NEW, 300)), 300, id="a new leader goes on where the archive ends"),
        pytest.param(THREE, (*ARCHIVED, (NEW, 280)), 280, id="a new leader took other records from 280 on"),
        pytest.param(THREE, ((5, 0), (NEW, 220)), 220, id="it never had the last leader's records"),
        pytest.param(THREE, ((5, 0),), 250, id="this replica never saw the last leader's records"),
        pytest.param(
            archive((0, 99), (100, 199, "gap")), ((5, 0), (OLD, 250)), 200, id="a gap at the end is not held"
        ),
    ],
)
def test_only_what_is_on_the_lineage_of_a_log_is_durable_of_it(manifest, epochs, expected):
    """An old copy of the manifest may have records that another leader's have replaced."""
    assert archived_end(manifest, replace(local_log((0, 100, 200)), epochs=epochs)) == expected


@pytest.mark.parametrize(
    ("undecided_from", "base_offset"),
    [
        pytest.param(None, 200, id="none is open"),
        pytest.param(260, 200, id="it began in the segment that is replaced anyway"),
        pytest.param(150, 100, id="it began in the segment before"),
        pytest.param(0, 0, id="it began with the log"),
        pytest.param(300, 200, id="past the divergence"),
    ],
)
def test_a_replacement_reaches_back_to_a_transaction_that_is_open_at_the_divergence(
    undecided_from, base_offset
):
    """The old leader's marker is gone, and the new one may end the transaction otherwise."""
    log = replace(local_log((0, 100, 200)), epochs=(*ARCHIVED, (NEW, 280)))
    bounds = LogBounds(0, 400, 400)
    found = plan_replacement(THREE, log, bounds, leader_epoch=NEW, undecided_from=undecided_from)
    assert (found.replacement.base_offset, found.resume_offset) == (base_offset, base_offset)
    assert found.replacement.divergence_offset == 280


def crossed(*transactions, entries=((0, 99), (100, 199), (200, 299))) -> PartitionManifest:
    """Return `THREE` with transactions (first offset, marker's offset, its epoch) over its end."""
    found = tuple(
        CrossingTransaction(producer_id, *one) for producer_id, one in enumerate(transactions, start=7)
    )
    return replace(archive(*entries), crossing=found)


CLEAN = (*ARCHIVED, (NEW, 330))
"""The history of a leader that took over at 330, with all that the leader before it had written."""
SHORT = (*ARCHIVED, (NEW, 305))
"""Of one that has all of the archive, and only five offsets of what came after it."""


@pytest.mark.parametrize(
    ("manifest", "epochs"),
    [
        pytest.param(crossed((150, 320, OLD)), CLEAN, id="a clean election"),
        pytest.param(crossed((150, 304, OLD)), SHORT, id="the last that it took over"),
        pytest.param(crossed((150, 310, NEW)), SHORT, id="its own marker"),
        pytest.param(crossed((150, 310, 7)), (*ARCHIVED, (7, 306), (NEW, 320)), id="of a leader in between"),
        pytest.param(crossed((150, 303, OLD)), ((7, 310), (NEW, 350)), id="the log begins later"),
        pytest.param(crossed((150, 320, OLD)), (), id="no history"),
        pytest.param(crossed(), SHORT, id="no transaction"),
    ],
)
def test_marker_that_the_leader_has_or_cannot_know_of_reopens_nothing(manifest, epochs):
    """Only a log that has another record in the marker's place speaks against it."""
    found = plan(manifest, epochs=epochs)
    assert (found.lineage.may_append, found.resume_offset, found.replacement) == (True, 300, None)
    assert archived_end(manifest, replace(local_log((0, 100, 200)), epochs=epochs)) == 300


@pytest.mark.parametrize(
    ("manifest", "epochs", "base_offset"),
    [
        pytest.param(crossed((250, 320, OLD)), SHORT, 200, id="in the last segment"),
        pytest.param(crossed((199, 320, OLD)), SHORT, 100, id="in the one before"),
        pytest.param(crossed((150, 305, OLD)), SHORT, 100, id="just where the leader's own begins"),
        pytest.param(crossed((150, 300, OLD)), (*ARCHIVED, (NEW, 300)), 100, id="just past the archive"),
        pytest.param(
            crossed((150, 310, 7)), (*ARCHIVED, (NEW, 310)), 100, id="of a leader that the log skips"
        ),
        pytest.param(crossed((250, 320, OLD), (120, 310, OLD)), SHORT, 100, id="the first of two"),
        pytest.param(crossed((250, 310, OLD), (50, 304, OLD)), SHORT, 200, id="the one that has no marker"),
        pytest.param(
            crossed((150, 320, OLD), entries=((0, 99), (100, 199), (200, 299, "gap"))),
            ((5, 0), (NEW, 260)),
            100,
            id="with a gap at the end",
        ),
    ],
)
def test_transaction_whose_marker_is_off_the_lineage_is_replaced(manifest, epochs, base_offset):
    """All that is archived is the leader's, and is uploaded again for what its indexes say."""
    found = plan(manifest, epochs=epochs)
    assert (found.lineage, found.resume_offset) == (Lineage.REOPENED, base_offset)
    assert (found.replacement.base_offset, found.replacement.last_offset) == (base_offset, 299)
    assert found.replacement.only_archived is None
    assert archived_end(manifest, replace(local_log((0, 100, 200)), epochs=epochs)) == base_offset


def test_a_replacement_leaves_a_transaction_whose_marker_is_before_the_divergence():
    """The leader has that marker: what the index of the segment before says is true."""
    manifest = crossed((150, 279, OLD))
    found = plan(manifest, epochs=(*ARCHIVED, (NEW, 280)))
    assert (found.lineage, found.resume_offset) == (Lineage.DIVERGES, 200)


def test_what_precedes_a_reopened_transaction_is_durable_only_up_to_the_divergence():
    """The log may leave the archive's lineage before the transaction begins."""
    log = replace(local_log((0, 100, 200)), epochs=((5, 0), (NEW, 150)))
    assert archived_end(crossed((250, 320, OLD)), log) == 150


def test_reopened_transaction_is_named_with_the_marker_that_is_gone():
    """An operator can look for it in both logs."""
    assert plan(crossed((150, 320, OLD)), epochs=SHORT) == LineagePlan(
        Lineage.REOPENED,
        "the transaction of producer 7 that began at offset 150 was archived with a marker of leader epoch "
        "6 at offset 320; the log that leads since epoch 8 lacks that marker",
        resume_offset=100,
        replacement=ArchiveTruncation(
            base_offset=100,
            last_offset=299,
            divergence_offset=300,
            segment_count=2,
            local_base_offset=100,
            missing=None,
            good=MissingRange(100, 299),
            only_archived=None,
        ),
    )


def test_reopened_transaction_whose_records_left_the_disk_is_only_archived():
    """The good records that would be cut off are nowhere else."""
    found = plan(crossed((150, 320, OLD)), epochs=SHORT, bases=(200,)).replacement
    assert (found.base_offset, found.missing, found.only_archived) == (
        100,
        MissingRange(100, 199),
        MissingRange(100, 199),
    )


@pytest.mark.parametrize(
    ("first_offset", "marker_offset", "undecided_from", "base_offset"),
    [
        pytest.param(250, 320, None, 200, id="in the segment that is replaced anyway"),
        pytest.param(285, 320, None, 200, id="past the divergence"),
        pytest.param(150, 320, None, 100, id="in the one before"),
        pytest.param(150, 280, None, 100, id="whose marker is cut off"),
        pytest.param(150, 320, 50, 0, id="another began earlier"),
        pytest.param(50, 320, 150, 0, id="another began later"),
    ],
)
def test_a_replacement_reaches_back_to_a_reopened_transaction(
    first_offset, marker_offset, undecided_from, base_offset
):
    """The local log may have lost the records by which it would know of it."""
    log = replace(local_log((0, 100, 200)), epochs=(*ARCHIVED, (NEW, 280)))
    manifest = crossed((first_offset, marker_offset, OLD))
    found = plan_replacement(
        manifest, log, LogBounds(0, 400, 400), leader_epoch=NEW, undecided_from=undecided_from
    )
    assert (found.lineage, found.resume_offset) == (Lineage.DIVERGES, base_offset)
    assert found.replacement.divergence_offset == 280
    assert archived_end(manifest, log) == min(280, 100 * (first_offset // 100))


EMPTIED = replace(THREE.expired(3, now_ms=1), leader_epoch=OLD)
"""An archive that total retention has emptied: it ended at offset 300, under epoch 6."""


@pytest.mark.parametrize(
    ("epochs", "log_end_offset", "resume_offset"),
    [
        pytest.param(((5, 0), (OLD, 250), (NEW, 300)), 400, 300, id="the next leader goes on"),
        pytest.param(((5, 0), (OLD, 250), (NEW, 350)), 400, 300, id="after more of the old one"),
        pytest.param(((5, 0), (OLD, 250), (NEW, 280)), 400, 280, id="an earlier end"),
        pytest.param(((5, 0), (NEW, 250)), 260, 250, id="without the old leader"),
        pytest.param(((5, 0), (NEW, 120)), 400, 120, id="long before"),
    ],
)
def test_archive_that_retention_emptied_is_still_compared(epochs, log_end_offset, resume_offset):
    """Offsets that another leader wrote again were never archived, though the archive ended after them."""
    found = plan(EMPTIED, epochs=epochs, log_end_offset=log_end_offset)
    assert found.resume_offset == resume_offset
    if resume_offset == 300:
        assert (found.lineage, found.replacement) == (Lineage.HOLDS, None)
        return
    assert found.lineage is Lineage.DIVERGES
    assert (found.replacement.segment_count, found.replacement.only_archived) == (0, None)
    anew = cut_back(EMPTIED, resume_offset, leader_epoch=NEW, now_ms=2)
    assert (anew.start_offset, anew.next_offset, anew.faults()) == (resume_offset, resume_offset, ())
    again = replace(anew, leader_epoch=NEW)
    assert plan(again, epochs=epochs, log_end_offset=log_end_offset).lineage is Lineage.HOLDS


def test_emptied_archive_has_no_transaction_that_reopens():
    """No record of the transaction is left, so there is nothing to cut off and archive again."""
    manifest = replace(EMPTIED, crossing=(CrossingTransaction(7, 250, 320, OLD),))
    found = plan(manifest, epochs=(*ARCHIVED, (NEW, 300)))
    assert (found.lineage, found.replacement) == (Lineage.HOLDS, None)


@pytest.mark.parametrize(("next_offset", "left"), [(100, 1), (60, 0)], ids=["one segment", "none"])
def test_cut_that_leaves_no_segment_leaves_no_transaction(next_offset, left):
    """A transaction goes with the last segment, also where the archive begins inside that segment."""
    manifest = replace(crossed((50, 320, OLD), entries=((0, 99), (100, 199))), start_offset=60)
    cut = cut_back(manifest, next_offset, leader_epoch=NEW, now_ms=2)
    assert (len(cut.segments), len(cut.crossing)) == (left, left)


def test_emptied_archive_holds_for_the_leader_that_filled_it():
    """The log goes on as far as the archive did, under the same epoch."""
    same = replace(EMPTIED, leader_epoch=OLD)
    found = plan(same, epochs=((5, 0), (OLD, 250)), leader_epoch=OLD, log_end_offset=300)
    assert (found.lineage, found.resume_offset) == (Lineage.HOLDS, 300)


def test_archive_does_not_begin_anew_with_what_is_on_its_way_out():
    """Files below the log's start exist for a moment more, and must not be archived."""
    later = archive((100, 199), (200, 299), epochs=((OLD, 100),))
    log = replace(local_log((0, 50, 100, 200)), epochs=((NEW, 0),))
    found = plan_replacement(later, log, LogBounds(60, 400, 400), leader_epoch=NEW)
    assert found.resume_offset == 50
    trimmed = plan_replacement(later, log, LogBounds(100, 400, 400), leader_epoch=NEW)
    assert trimmed.resume_offset == 100
