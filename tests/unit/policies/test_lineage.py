"""Lineage: where an archive leaves the history of its leader, and what is replaced then."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.model.values import local_log, remote, stored
from tieringd.model.manifest import Gap, PartitionManifest
from tieringd.model.partition import LogBounds
from tieringd.policies.lineage import (
    Lineage,
    LineagePlan,
    Replacement,
    divergence_offset,
    durable_end,
    plan_replacement,
)
from tieringd.policies.upload import MissingRange

OLD, NEW = 6, 8
"""The epochs of the leader that uploaded the archive, and of the one that looks at it."""

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
    ("manifest", "look", "lineage", "reason"),
    [
        pytest.param(
            THREE,
            {"epochs": ((5, 0), (NEW, 210)), "leader_epoch": OLD},
            Lineage.HOLDS,
            "leader epoch 6 itself uploaded the archive's tail",
            id="own tail",
        ),
        pytest.param(
            archive((0, 99), (100, 299, "gap")),
            {"epochs": ((5, 0), (NEW, 150))},
            Lineage.HOLDS,
            "the local log holds leader epoch 5 as far as the archive does",
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
            "the local log holds leader epoch 6 as far as the archive does",
            id="a clean election",
        ),
        pytest.param(
            THREE,
            {"epochs": ((7, 310), (NEW, 350)), "bases": (310,)},
            Lineage.HOLDS,
            "the archive ends before offset 310, the first that the local history knows",
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
            "the local leader-epoch history ends with epoch 5, and this broker was seen to lead "
            "since epoch 8",
            id="just elected",
        ),
        pytest.param(
            THREE,
            {"epochs": ((5, 0), (NEW, 210), (9, 220))},
            Lineage.UNDECIDED,
            "the local leader-epoch history ends with epoch 9, and this broker was seen to lead "
            "since epoch 8",
            id="another election since",
        ),
        pytest.param(
            archive((0, 99), (100, 199), (200, 299), uploaded_under=9),
            {"epochs": ((5, 0), (NEW, 210))},
            Lineage.UNDECIDED,
            "leader epoch 9 wrote the manifest, and this broker was seen to lead since epoch 8",
            id="a newer leader",
        ),
        pytest.param(
            archive((0, 99), (100, 299), epochs=((5, 0), (NEW, 210))),
            {"epochs": ((5, 0), (NEW, 210)), "log_end_offset": 280},
            Lineage.UNDECIDED,
            "the archive holds leader epoch 8 up to offset 299, and the log that leads since epoch 8 is "
            "known up to offset 279 only",
            id="the end of the log lags",
        ),
    ],
)
def test_nothing_is_replaced_without_proof(manifest, look, lineage, reason):
    """Where the histories agree, or cannot be compared, the archive stays as it is."""
    assert plan(manifest, **look) == LineagePlan(lineage, reason, manifest.next_offset)


@pytest.mark.parametrize(
    ("lineage", "may_append"),
    [
        (Lineage.HOLDS, True),
        (Lineage.UNKNOWN, True),
        (Lineage.UNDECIDED, False),
        (Lineage.DIVERGES, False),
    ],
)
def test_segments_are_appended_only_where_the_tail_is_settled(lineage, may_append):
    """A tail that the next look may find off the lineage gets no successor."""
    assert lineage.may_append is may_append


def test_the_end_of_the_log_alone_is_no_proof_after_an_election():
    """A leader whose high watermark is still behind the archive replaces nothing that it holds."""
    found = plan(THREE, epochs=((5, 0), (OLD, 250), (NEW, 300)), log_end_offset=120)
    assert found.lineage is Lineage.HOLDS


def test_an_archive_off_the_lineage_is_replaced_from_the_segment_that_leaves_it():
    """The segment with the divergence goes as a whole, and the plan says what an operator must know."""
    assert plan(THREE, epochs=((5, 0), (NEW, 210))) == LineagePlan(
        Lineage.DIVERGES,
        "offsets 210 to 299 were archived from a leader whose records the log that leads since epoch 8 "
        "does not hold",
        resume_offset=200,
        replacement=Replacement(
            base_offset=200,
            last_offset=299,
            divergence_offset=210,
            segment_count=1,
            local_base_offset=200,
            missing=None,
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
            100,
            299,
            2,
            id="everything, of an archive that begins later",
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
    """What precedes the divergence in a gap was never stored, so nothing is lost with it."""
    found = plan(archive(*entries), bases=(160,), epochs=epochs).replacement
    assert (found.missing, found.only_archived) == (missing, None)


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
    """An old copy of the manifest may tell of records that another leader's have replaced."""
    assert durable_end(manifest, replace(local_log((0, 100, 200)), epochs=epochs)) == expected


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
