"""An operator decides what becomes of an archive's tail: `tieringd archive resolve`, seen by the archiver."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count

import pytest
from crc32c import crc32c
from structlog.testing import capture_logs

from tests.fakes.archive import (
    Clock,
    archive_in,
    archived,
    archiver_of,
    observed,
    values_in,
    written_below,
)
from tests.fakes.broker import FakeBroker
from tests.fakes.log_writer import LogWriter, leads_from
from tests.fakes.manifests import bounds_of, stored_manifest
from tests.fakes.metric_values import value_of
from tests.fakes.spilling import Crash, CrashingJoins
from tests.fakes.store import store_unavailable
from tieringd.archiving.operator_desk import SETTLED_AFTER_MS, LeftDecisions
from tieringd.errors import StorageUnavailable
from tieringd.formats.object_keys import DECISIONS_PREFIX, data_key, decision_key, decision_prefix
from tieringd.metrics import Metrics
from tieringd.model.operator_decision import (
    DecisionOutcome,
    DecisionState,
    ManifestVersion,
    OperatorDecision,
    shows,
)
from tieringd.model.partition import Leadership
from tieringd.policies.lineage import OperatorReason

PRODUCER = 2
CHANGES = 8
"""
How many changes of the bucket a decision takes in `CrashWorld`: data and index of a head and of a segment
with a new index, the record before the commit, the commit, the record after it, and the decision's deletion.
"""


async def decide(archive, manifest, decision_id="d1", *, at_ms=7, made_for=None, **what) -> OperatorDecision:
    """Store a decision for this version of *manifest*, as the command does."""
    decision = OperatorDecision(
        manifest.partition,
        decision_id,
        at_ms,
        "ann@host",
        made_for or ManifestVersion.of(manifest),
        **what,
    )
    await archive.manifests.decisions.add(decision)
    return decision


async def steps(archiver, writer, count=3):
    """Let *archiver* look *count* times, and return what the last look showed."""
    for _ in range(count):
        result = await archiver.step(observed(writer))
    return result


def outcomes(store) -> dict[str, str]:
    """Return the state of each decision's second record, by the decision's id."""
    return {
        key.split("-")[1]: json.loads(data)["outcome"]["state"]
        for key, (data, _) in sorted(store.objects.items())
        if key.startswith(DECISIONS_PREFIX) and key.endswith("-done.json")
    }


def left(store, writer) -> list[str]:
    """Return the keys of the decisions that nothing has ended."""
    return [key for key in store.objects if key.startswith(decision_prefix(writer.identified))]


def lost_outcome(writer, *, before: bool = False):
    """A transaction is open at the divergence, and the leader's log was trimmed past its marker."""
    if before:
        writer.append(b"early", producer_id=PRODUCER)
        writer.roll()
    writer.append(b"plain")
    writer.append(b"transacted", producer_id=PRODUCER)
    divergence = writer.append(b"lost")
    writer.commit(PRODUCER)
    writer.roll()
    return divergence


def then_trimmed(writer, divergence) -> None:
    leads_from(writer, divergence)
    writer.abort(PRODUCER)
    writer.roll()
    writer.drop_head()
    writer.closed_segment(b"another leader's")


async def waiting(writer, archive, broker, reason, **more):
    """Return an archiver that waits for an operator."""
    archiver = archiver_of(writer, archive, broker, **more)
    await steps(archiver, writer)
    assert archiver.operator_wait is not None
    assert archiver.operator_wait.reason is reason
    return archiver


@pytest.mark.parametrize("is_aborted", [False, True], ids=["committed", "aborted"])
@pytest.mark.parametrize("before", [False, True], ids=["in the head", "a segment before as well"])
async def test_operator_tells_how_a_transaction_ended(writer, archive, broker, store, *, before, is_aborted):
    """Each kept segment with its records gets an index that says so, and the archive goes on."""
    divergence = lost_outcome(writer, before=before)
    before_cut = await archived(writer, archive)
    good = written_below(writer, divergence)
    then_trimmed(writer, divergence)
    metrics = Metrics()
    archiver = await waiting(writer, archive, broker, OperatorReason.OUTCOME_LOST, metrics=metrics)
    assert archiver.manifest.segments == before_cut.segments
    first_offset = 0 if before else 1
    assert archiver.operator_wait.transactions == ((PRODUCER, first_offset),)
    assert archiver.operator_wait.divergence_offset == divergence

    await decide(archive, archiver.manifest, is_aborted={PRODUCER: is_aborted})
    await steps(archiver, writer, 4)
    manifest = archiver.manifest
    assert archiver.operator_wait is None
    assert manifest.faults() == ()
    assert manifest.crossing == (), "no log has the marker, so no log decides it any more"
    assert manifest.next_offset == writer.bases[-1]
    found = await values_in(archive, manifest)
    assert {offset: found[offset] for offset in good} == good
    committed = await values_in(archive, manifest, read_committed=True)
    transacted = {b"early", b"transacted"} & set(committed.values())
    assert bool(transacted) == (not is_aborted)
    assert b"plain" in committed.values()
    assert b"another leader's" in committed.values()
    assert not (await archive.verifier.verify(manifest, deep=True)).faults
    assert outcomes(store) == {"d1": "carried_out"}
    assert left(store, writer) == []
    assert value_of(metrics.operator_decisions.labels("orders", "carried_out")) == 1


async def test_operator_gives_up_the_segment_of_a_lost_transaction(writer, archive, broker, store):
    """The segment becomes a gap that names the operator, and the leader's log follows."""
    writer.closed_segment(b"first")
    divergence = lost_outcome(writer)
    await archived(writer, archive)
    then_trimmed(writer, divergence)
    archiver = await waiting(writer, archive, broker, OperatorReason.OUTCOME_LOST)
    wait = archiver.operator_wait
    assert (wait.base_offset, wait.last_offset) == (1, 2)
    await decide(archive, archiver.manifest, give_up=(1, 2))
    await steps(archiver, writer, 4)
    manifest = archiver.manifest
    first = manifest.gaps[0]
    assert (first.base_offset, first.last_offset) == (1, 2)
    assert first.reason == "given up by ann@host (decision d1)"
    assert bounds_of(manifest)[0] == (0, 0, 0)
    assert manifest.next_offset == writer.bases[-1]
    assert manifest.faults() == ()
    assert set((await values_in(archive, manifest)).values()) == {b"first", b"another leader's"}
    assert outcomes(store) == {"d1": "carried_out"}


async def damage(store, archive, writer, segment) -> None:
    key = data_key(writer.identified, segment)
    data, _ = await store.get(key)
    damaged = data[:70] + bytes([data[70] ^ 1]) + data[71:]
    await store.put(key, damaged, crc32c=crc32c(damaged))


async def test_operator_gives_up_an_unreadable_segment(writer, archive, broker, store):
    """The archive's end; also where the archive holds nothing else."""
    writer.append(b"good")
    divergence = writer.append(b"lost")
    writer.roll()
    before = await archived(writer, archive)
    await damage(store, archive, writer, before.segments[0])
    leads_from(writer, divergence)
    writer.closed_segment(b"another leader's")
    archiver = await waiting(writer, archive, broker, OperatorReason.SEGMENT_UNREADABLE)
    await decide(archive, archiver.manifest, give_up=(0, 0))
    await steps(archiver, writer, 3)
    manifest = archiver.manifest
    assert [(one.base_offset, one.last_offset) for one in manifest.gaps] == [(0, 0)]
    assert bounds_of(manifest) == [(1, 1, 1)]
    assert manifest.faults() == ()
    assert await values_in(archive, manifest) == {1: b"another leader's"}


async def test_operator_gives_up_an_unreadable_segment_between_others(writer, archive, broker, store):
    """Good segments after the unreadable one stay, and all that stays has the new outcome."""
    writer.append(b"early", producer_id=PRODUCER)
    writer.roll()
    writer.append(b"damaged", producer_id=PRODUCER)
    writer.roll()
    writer.append(b"transacted", producer_id=PRODUCER)
    divergence = writer.append(b"lost")
    writer.commit(PRODUCER)
    writer.roll()
    before = await archived(writer, archive)
    await damage(store, archive, writer, before.segments[1])
    leads_from(writer, divergence)
    writer.abort(PRODUCER)
    writer.closed_segment(b"another leader's")
    archiver = await waiting(writer, archive, broker, OperatorReason.SEGMENT_UNREADABLE)
    await decide(archive, archiver.manifest, give_up=(1, 1))
    await steps(archiver, writer, 3)
    manifest = archiver.manifest
    assert [(one.base_offset, one.last_offset) for one in manifest.gaps] == [(1, 1)]
    assert bounds_of(manifest)[:2] == [(0, 0, 1), (2, 2, 1)]
    assert manifest.faults() == ()
    assert set((await values_in(archive, manifest)).values()) >= {b"early", b"transacted"}
    assert set((await values_in(archive, manifest, read_committed=True)).values()) == {b"another leader's"}
    assert not (await archive.verifier.verify(manifest, deep=True)).faults


async def unknown_divergence(tmp_path, writer, archive):
    """Archive a tail; return the log of a leader whose history begins under an epoch that it never saw."""
    for value in (b"a", b"b", b"c"):
        writer.append(value)
    writer.roll()
    await archived(writer, archive)
    other = LogWriter(tmp_path / "other")
    for value in (b"a", b"x"):
        other.append(value)
    other.roll()
    other.epochs = []
    other.begin_epoch(2)
    other.closed_segment(b"another leader's")
    other.drop_head()
    return other


@pytest.mark.parametrize(
    ("what", "kept", "gaps"),
    [
        pytest.param({"keep": True}, [b"a", b"b"], [], id="all is kept"),
        pytest.param({"give_up": (1, 1)}, [b"a"], [(1, 1)], id="the logs part inside the segment"),
        pytest.param({"give_up": (0, 1)}, [], [(0, 1)], id="all is given up"),
    ],
)
async def test_operator_tells_where_the_logs_part(tmp_path, writer, archive, *, what, kept, gaps):
    """Records before that place are kept. Records after it that are in no log become a gap."""
    other = await unknown_divergence(tmp_path, writer, archive)
    archiver = await waiting(other, archive, FakeBroker(other), OperatorReason.DIVERGENCE_UNKNOWN)
    await decide(archive, archiver.manifest, **what)
    await steps(archiver, other, 3)
    manifest = archiver.manifest
    assert manifest.faults() == ()
    assert [(one.base_offset, one.last_offset) for one in manifest.gaps] == gaps
    assert list((await values_in(archive, manifest)).values()) == [*kept, b"another leader's"]
    assert not (await archive.verifier.verify(manifest, deep=True)).faults


async def test_transaction_that_is_open_where_the_logs_part_needs_an_outcome(
    tmp_path, writer, archive, store
):
    """The marker may be in what is given up, or in the part of the leader's log that was trimmed."""
    writer.closed_segment(b"first")
    writer.append(b"a", producer_id=PRODUCER)
    writer.append(b"b")
    writer.commit(PRODUCER)
    writer.append(b"c")
    writer.append(b"d")
    writer.roll()
    await archived(writer, archive)
    other = LogWriter(tmp_path / "other")
    for _ in range(5):
        other.append(b"x")
    other.roll()
    other.epochs = []
    other.begin_epoch(2)
    other.closed_segment(b"another leader's")
    other.drop_head()
    archiver = await waiting(other, archive, FakeBroker(other), OperatorReason.DIVERGENCE_UNKNOWN)
    await decide(archive, archiver.manifest, give_up=(2, 4))
    await steps(archiver, other, 1)
    assert "it leaves something open: the transaction of producer 2" in archiver.operator_wait.refused
    assert archiver.operator_wait.reason is OperatorReason.OUTCOME_LOST

    await decide(archive, archiver.manifest, "d2", give_up=(2, 4), is_aborted={PRODUCER: True})
    await steps(archiver, other, 3)
    manifest = archiver.manifest
    assert (manifest.faults(), outcomes(store)) == ((), {"d1": "refused", "d2": "carried_out"})
    assert [(one.base_offset, one.last_offset) for one in manifest.gaps] == [(2, 4)]
    found = await values_in(archive, manifest, read_committed=True)
    assert list(found.values()) == [b"first", b"another leader's"]
    assert not (await archive.verifier.verify(manifest, deep=True)).faults


async def test_logs_may_part_in_an_earlier_segment(tmp_path, writer, archive):
    """The operator knows more than the histories of epochs tell."""
    for values in ((b"a", b"b"), (b"c", b"d")):
        for value in values:
            writer.append(value)
        writer.roll()
    await archived(writer, archive)
    other = LogWriter(tmp_path / "other")
    for _ in range(3):
        other.append(b"x")
    other.roll()
    other.epochs = []
    other.begin_epoch(2)
    other.closed_segment(b"another leader's")
    other.drop_head()
    archiver = await waiting(other, archive, FakeBroker(other), OperatorReason.DIVERGENCE_UNKNOWN)
    await decide(archive, archiver.manifest, give_up=(1, 2))
    await steps(archiver, other, 3)
    manifest = archiver.manifest
    assert manifest.faults() == ()
    assert await values_in(archive, manifest) == {0: b"a", 3: b"another leader's"}
    assert [(one.base_offset, one.last_offset) for one in manifest.gaps] == [(1, 2)]


def begun_anew(writer, *values: bytes) -> None:
    """The partition's new leader never had a record of the old log, and has *values* of its own."""
    writer.truncate(0)
    writer.epochs = []
    writer.begin_epoch(1)
    for value in values:
        writer.closed_segment(value)


@pytest.mark.parametrize("values", [(), (b"new", b"newer")], ids=["empty", "with records"])
async def test_operator_gives_up_an_archive_for_a_log_that_began_anew(writer, archive, broker, store, values):
    """Nothing less than all that is archived can be given up. Then the new log is archived from its start."""
    for value in (b"a", b"b"):
        writer.closed_segment(value)
    before = await archived(writer, archive)
    begun_anew(writer, *values)
    archiver = await waiting(writer, archive, broker, OperatorReason.LOG_BEGAN_ANEW)
    wait, last = archiver.operator_wait, before.next_offset - 1
    assert (wait.base_offset, wait.last_offset, wait.divergence_offset) == (0, last, 0)

    for number, unfit in enumerate(({"keep": True}, {"give_up": (0, last - 1)}, {"give_up": (1, last)})):
        await decide(archive, archiver.manifest, f"d{number}", **unfit)
        await steps(archiver, writer, 1)
        assert f"give up all of that, offsets 0 to {last}" in archiver.operator_wait.refused
        assert archiver.manifest.segments == before.segments
    await decide(archive, archiver.manifest, "d3", give_up=(0, last))
    await steps(archiver, writer, 4)

    manifest = archiver.manifest
    assert (archiver.operator_wait, manifest.faults(), manifest.gaps) == (None, (), ())
    assert outcomes(store) == {"d0": "refused", "d1": "refused", "d2": "refused", "d3": "carried_out"}
    assert left(store, writer) == []
    (replaced,) = manifest.replacements
    assert (replaced.base_offset, replaced.last_offset) == (0, last)
    writer.closed_segment(b"after")
    await steps(archiver, writer, 2)
    found = await values_in(archive, archiver.manifest, read_committed=True)
    assert [one for one in found.values() if one in {*values, b"a", b"b", b"after"}] == [*values, b"after"]


@pytest.mark.parametrize("what", [{"keep": True}, {"give_up": (0, 0)}], ids=["kept", "given up"])
async def test_operator_says_that_no_transaction_was_forgotten(writer, archive, broker, what):
    """The segment is split as usual then, or given up."""
    writer.append(b"good")
    divergence = writer.append(b"lost")
    writer.roll()
    for number in range(33):
        writer.closed_segment(b"%d" % number)
    await archived(writer, archive)
    leads_from(writer, divergence)
    writer.closed_segment(b"another leader's")
    archiver = await waiting(writer, archive, broker, OperatorReason.TRANSACTIONS_FORGOTTEN)
    await decide(archive, archiver.manifest, **what)
    await steps(archiver, writer, 3)
    found = await values_in(archive, archiver.manifest)
    expected = [b"another leader's"] if "give_up" in what else [b"good", b"another leader's"]
    assert list(found.values()) == expected
    assert archiver.manifest.faults() == ()


@pytest.mark.parametrize(
    ("what", "why"),
    [
        pytest.param({"keep": True}, "it leaves something open: the transaction of producer 2", id="open"),
        pytest.param(
            {"is_aborted": {PRODUCER: True, 3: True}},
            "no transaction of producer 3 is open at offset 3",
            id="another producer",
        ),
        pytest.param({"give_up": (2, 2)}, "begins at 1: only whole segments can be given up", id="inside"),
        pytest.param(
            {"give_up": (1, 1)}, "the segment of offset 1 ends at 4: only whole", id="not to its end"
        ),
        pytest.param({"give_up": (1, 3)}, "offsets after 2 come from the leader's log", id="too far"),
        pytest.param({"give_up": (2, 1)}, "are not all in stored segments", id="backwards"),
    ],
)
async def test_decision_that_does_not_fit_is_refused(writer, archive, broker, store, *, what, why):
    """Nothing changes; the log, the record, the metric and the status tell why."""
    writer.closed_segment(b"first")
    divergence = lost_outcome(writer)
    before = await archived(writer, archive)
    then_trimmed(writer, divergence)
    metrics = Metrics()
    archiver = await waiting(writer, archive, broker, OperatorReason.OUTCOME_LOST, metrics=metrics)
    await decide(archive, archiver.manifest, **what)
    result = await steps(archiver, writer, 1)
    assert why in archiver.operator_wait.refused
    assert why in result.waits_because
    assert archiver.manifest.segments == before.segments
    assert stored_manifest(store, writer).segments == before.segments
    assert (outcomes(store), left(store, writer)) == ({"d1": "refused"}, [])
    assert value_of(metrics.operator_decisions.labels("orders", "refused")) == 1

    await decide(archive, archiver.manifest, "d2", is_aborted={PRODUCER: False})
    await steps(archiver, writer)
    assert archiver.operator_wait is None
    assert outcomes(store) == {"d1": "refused", "d2": "carried_out"}


async def test_outcome_that_the_log_tells_is_not_for_the_operator(writer, archive, broker, store):
    """Two transactions are open, and the marker of one is in the log."""
    writer.append(b"one", producer_id=PRODUCER)
    writer.append(b"two", producer_id=3)
    divergence = writer.append(b"lost")
    writer.commit(PRODUCER)
    writer.commit(3)
    writer.roll()
    before = await archived(writer, archive)
    await damage(store, archive, writer, before.segments[0])
    leads_from(writer, divergence)
    writer.abort(PRODUCER)
    writer.abort(3)
    writer.closed_segment(b"more")
    archiver = await waiting(writer, archive, broker, OperatorReason.SEGMENT_UNREADABLE)
    await decide(archive, archiver.manifest, give_up=(0, 1), is_aborted={PRODUCER: False})
    await steps(archiver, writer, 1)
    assert "no transaction of producer 2 is open" in archiver.operator_wait.refused


async def test_decision_for_an_earlier_version_is_refused(writer, archive, broker, store):
    """A decision for an earlier version of the manifest is refused, for example after a change of leader."""
    divergence = lost_outcome(writer)
    before = await archived(writer, archive)
    then_trimmed(writer, divergence)
    await decide(archive, before, is_aborted={PRODUCER: False})
    archiver = await waiting(writer, archive, broker, OperatorReason.OUTCOME_LOST)
    assert "was made for another version of the manifest" in archiver.operator_wait.refused
    assert archiver.manifest.segments == before.segments
    assert (outcomes(store), left(store, writer)) == ({"d1": "refused"}, [])


async def test_decision_whose_commit_was_never_made_is_refused(writer, archive, broker, store):
    """A process ended before its commit, and another one has changed the manifest since."""
    divergence = lost_outcome(writer)
    before = await archived(writer, archive)
    then_trimmed(writer, divergence)
    decision = await decide(archive, before, is_aborted={PRODUCER: False})
    outcome = DecisionOutcome(DecisionState.COMMITTING, at_ms=7, leader_epoch=1, writer_id="a1")
    await archive.manifests.decisions.note(decision, outcome)
    archiver = await waiting(writer, archive, broker, OperatorReason.OUTCOME_LOST)
    assert archiver.manifest.segments == before.segments
    assert (outcomes(store), left(store, writer)) == ({"d1": "refused"}, [])


async def test_process_that_is_behind_leaves_a_decision_alone(writer, archive, broker, store):
    """The decision is for a version that another leader made; this process has not seen that one yet."""
    divergence = lost_outcome(writer)
    await archived(writer, archive)
    then_trimmed(writer, divergence)
    archiver = await waiting(writer, archive, broker, OperatorReason.OUTCOME_LOST)
    stored_now = await archive.manifests.load(writer.identified)
    others = archive_in(store, writer_id="b1")
    newer = await others.manifests.commit(stored_now, stored_now.existing, leader_epoch=2)
    await decide(archive, newer.existing, is_aborted={PRODUCER: False})
    await archiver.step(observed(writer))
    assert len(left(store, writer)) == 1
    assert outcomes(store) == {}


async def test_newest_decision_counts(writer, archive, broker, store):
    """The operator may change their mind until the archiver has acted."""
    divergence = lost_outcome(writer)
    await archived(writer, archive)
    then_trimmed(writer, divergence)
    archiver = await waiting(writer, archive, broker, OperatorReason.OUTCOME_LOST)
    await decide(archive, archiver.manifest, "d2", at_ms=8, is_aborted={PRODUCER: True})
    await decide(archive, archiver.manifest, "d1", at_ms=7, give_up=(0, 1))
    await steps(archiver, writer)
    assert archiver.manifest.gaps[:1] == () or archiver.manifest.gaps[0].base_offset > 1
    assert outcomes(store) == {"d1": "refused", "d2": "carried_out"}


async def test_decision_waits_for_the_daemon(writer, archive, broker, store):
    """A decision is stored while no daemon runs, and a new process under the same epoch carries it out."""
    divergence = lost_outcome(writer)
    await archived(writer, archive)
    then_trimmed(writer, divergence)
    ended = await waiting(writer, archive, broker, OperatorReason.OUTCOME_LOST)
    await decide(archive, ended.manifest, is_aborted={PRODUCER: True})
    archiver = archiver_of(writer, archive_in(store, writer_id="b1"), broker)
    await steps(archiver, writer, 5)
    assert archiver.operator_wait is None
    assert outcomes(store) == {"d1": "carried_out"}


async def test_decision_is_refused_where_the_case_has_ended(writer, archive, broker, store):
    """A scrub has repaired the segment before the archiver saw the decision."""
    writer.append(b"good")
    divergence = writer.append(b"lost")
    writer.roll()
    before = await archived(writer, archive)
    key = data_key(writer.identified, before.segments[0])
    data, _ = await store.get(key)
    await damage(store, archive, writer, before.segments[0])
    leads_from(writer, divergence)
    writer.closed_segment(b"another leader's")
    clock = Clock()
    archiver = await waiting(writer, archive, broker, OperatorReason.SEGMENT_UNREADABLE, now_ms=clock)
    await archiver.step(observed(writer))
    await store.put(key, data, crc32c=crc32c(data))
    clock.now_ms += 10 * 60_000
    waiting_for = archiver.manifest
    await archiver.step(observed(writer))
    await decide(archive, waiting_for, give_up=(0, 0))
    await steps(archiver, writer)
    assert archiver.manifest.gaps == ()
    assert outcomes(store) == {"d1": "refused"}


async def test_decision_outlives_an_observation_that_decides_nothing(writer, archive, broker, store):
    """An observation that came too early does not end the case, so it does not end the decision."""
    divergence = lost_outcome(writer)
    await archived(writer, archive)
    then_trimmed(writer, divergence)
    archiver = await waiting(writer, archive, broker, OperatorReason.OUTCOME_LOST)
    await decide(archive, archiver.manifest, is_aborted={PRODUCER: True})
    seen = observed(writer)
    early = replace(seen, log=replace(seen.log, epochs=seen.log.epochs[:-1]))
    assert (await archiver.step(early)).waits_for_lineage
    assert archiver.trim_obstacle is not None
    assert len(left(store, writer)) == 1
    await steps(archiver, writer, 4)
    assert outcomes(store) == {"d1": "carried_out"}


async def test_unreadable_decision_is_reported_and_left(writer, archive, broker, store):
    """Nothing is decided by it."""
    divergence = lost_outcome(writer)
    before = await archived(writer, archive)
    then_trimmed(writer, divergence)
    archiver = await waiting(writer, archive, broker, OperatorReason.OUTCOME_LOST)
    key = decision_key(writer.identified, "d1")
    await store.put(key, b"{}", crc32c=crc32c(b"{}"))
    with capture_logs() as events:
        await steps(archiver, writer)
    assert archiver.manifest.segments == before.segments
    assert [one["event"] for one in events].count("an operator's decision cannot be read") == 1
    assert left(store, writer) == [key]


class CrashWorld:
    """One partition that waits for an operator, and archivers that crash over the decision."""

    def __init__(self, directory, *, crash_at: int | None = None, takes_effect: bool = False) -> None:
        self.writer = LogWriter(directory)
        self.store, self.clock = CrashingJoins(), Clock()
        self.store.now_ms = self.clock
        self.store.takes_effect = takes_effect
        self.crash_at = crash_at
        self.crashes = 0
        self.is_reopened = False
        """Whether only the marker of the transaction was lost, past the archive's end."""
        self.is_anew = False
        """Whether the new leader's log has nothing of the old one."""

    async def run(self, what) -> None:
        """Archive a tail, wait for an operator, and let processes carry the decision out."""
        writer = self.writer
        if self.is_reopened:
            writer.append(b"transacted", producer_id=PRODUCER)
            divergence = writer.roll()
            writer.commit(PRODUCER)
        else:
            divergence = lost_outcome(writer, before=True)
        await archived(writer, archive_in(self.store, now_ms=self.clock))
        self.good = written_below(writer, 0 if self.is_anew else divergence)
        if self.is_anew:
            begun_anew(writer, b"new")
        else:
            then_trimmed(writer, divergence)
        self.given_up = what.get("give_up")
        archiver = self.begun()
        for _ in range(3):
            await archiver.step(observed(writer))
        await decide(archive_in(self.store), archiver.manifest, at_ms=self.clock(), **what)
        self.store.changes, self.store.crash_at = 0, self.crash_at
        archiver = self.begun()
        for _ in range(10):
            self.clock.now_ms += 1000
            try:
                await archiver.step(observed(writer))
            except* Crash:
                self.crashes += 1
                archiver = self.begun()
            await self.check()

    def begun(self):
        archive = archive_in(self.store, writer_id=f"b{self.crashes}", now_ms=self.clock)
        return archiver_of(self.writer, archive, FakeBroker(self.writer), now_ms=self.clock)

    async def check(self) -> None:
        """See that the archive has no fault, and that only what was given up is missing."""
        manifest, archive = stored_manifest(self.store, self.writer), archive_in(self.store)
        assert (await archive.verifier.verify(manifest, deep=True)).faults == ()
        assert manifest.faults() == ()
        found = await values_in(archive, manifest)
        first, last = self.given_up or (0, -1)
        kept = {offset: value for offset, value in self.good.items() if not first <= offset <= last}
        assert {offset: found.get(offset) for offset in kept} == kept
        if outcomes(self.store).get("d1") == "carried_out":
            assert manifest.replacements or (self.is_reopened and not manifest.crossing)


@pytest.mark.parametrize("takes_effect", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    "what",
    [{"is_aborted": {PRODUCER: True}}, {"give_up": (0, 2)}],
    ids=["transaction", "given up"],
)
async def test_crash_at_any_change_ends_with_the_decision_carried_out_once(tmp_path, takes_effect, what):
    """A successor carries the decision out, or completes its record, after a crash at any change."""
    whole = CrashWorld(tmp_path / "whole")
    await whole.run(what)
    assert outcomes(whole.store) == {"d1": "carried_out"}
    for crash_at in count(1):
        world = CrashWorld(tmp_path / f"{crash_at}", crash_at=crash_at, takes_effect=takes_effect)
        await world.run(what)
        manifest = stored_manifest(world.store, world.writer)
        assert bounds_of(manifest) == bounds_of(stored_manifest(whole.store, whole.writer))
        assert len(manifest.replacements) == 1
        assert outcomes(world.store) == {"d1": "carried_out"}
        assert left(world.store, world.writer) == []
        if not world.crashes:
            assert crash_at > (5 if "give_up" in what else CHANGES)
            return


@pytest.mark.parametrize("takes_effect", [False, True], ids=["before", "after"])
async def test_crash_over_an_archive_that_is_given_up_ends_with_the_new_log(tmp_path, takes_effect):
    """Records before and after the commit, the commit, the decision's deletion and the upload come once."""
    for crash_at in count(1):
        world = CrashWorld(tmp_path / f"{crash_at}", crash_at=crash_at, takes_effect=takes_effect)
        world.is_anew = True
        await world.run({"give_up": (0, 4)})
        manifest = stored_manifest(world.store, world.writer)
        assert (len(manifest.replacements), outcomes(world.store)) == (1, {"d1": "carried_out"})
        assert left(world.store, world.writer) == []
        assert b"new" in (await values_in(archive_in(world.store), manifest)).values()
        if not world.crashes:
            assert crash_at > 4
            return


async def test_crash_behind_a_commit_that_cuts_nothing_off(tmp_path):
    """Only the list of transactions shows it; what looks at all recent decisions ends this one."""
    world = CrashWorld(tmp_path)
    world.is_reopened = True
    archive = archive_in(world.store, now_ms=world.clock)
    # The record before the commit, and then the commit.
    world.crash_at, world.store.takes_effect = 2, True
    await world.run({"is_aborted": {PRODUCER: False}})
    assert world.crashes == 1
    assert outcomes(world.store) == {"d1": "committing"}
    manifest = stored_manifest(world.store, world.writer)
    assert (manifest.replacements, manifest.crossing) == ((), ())
    (decision,), _ = await archive.manifests.decisions.of(world.writer.identified)
    noted = await archive.manifests.decisions.outcome_of(decision)
    assert shows(manifest, noted)

    metrics, leadership = Metrics(), Leadership(world.writer.identified, 1)
    ending = LeftDecisions(archive.manifests, metrics=metrics, now_ms=world.clock)
    await ending.end([leadership])
    assert outcomes(world.store) == {"d1": "committing"}, "its process may be about to record the end"
    world.clock.now_ms += SETTLED_AFTER_MS
    await ending.end([])
    assert outcomes(world.store) == {"d1": "committing"}
    for _ in range(2):
        await ending.end([leadership])
        assert (outcomes(world.store), left(world.store, world.writer)) == ({"d1": "carried_out"}, [])
    assert value_of(metrics.operator_decisions.labels("orders", "carried_out")) == 1


async def test_decision_that_is_still_to_be_carried_out_is_left_to_the_archiver(
    writer, archive, broker, store, clock
):
    """A decision for the version in the bucket is left to the archiver, however old it is."""
    divergence = lost_outcome(writer)
    await archived(writer, archive)
    then_trimmed(writer, divergence)
    archiver = await waiting(writer, archive, broker, OperatorReason.OUTCOME_LOST)
    await decide(archive, archiver.manifest, at_ms=clock(), is_aborted={PRODUCER: False})
    clock.now_ms += SETTLED_AFTER_MS
    ending = LeftDecisions(archive.manifests, metrics=Metrics(), now_ms=clock)
    await ending.end([Leadership(writer.identified, 1)])
    assert (outcomes(store), len(left(store, writer))) == ({}, 1)
    await steps(archiver, writer)
    assert outcomes(store) == {"d1": "carried_out"}


@pytest.mark.parametrize("is_away", [False, True])
async def test_decision_for_a_version_that_is_not_known_yet_waits_for_the_store(
    writer, archive, broker, store, is_away
):
    """A right decision for a manifest that a job has edited is not refused while the store is away."""
    divergence = lost_outcome(writer)
    await archived(writer, archive)
    then_trimmed(writer, divergence)
    archiver = await waiting(writer, archive, broker, OperatorReason.OUTCOME_LOST)

    async def edited(manifest):
        return replace(manifest, allowed_local_start_offset=0)

    await archive.manifests.edit(writer.identified, edited)
    await decide(archive, stored_manifest(store, writer), is_aborted={PRODUCER: True})
    if is_away:
        store.fail_next("head", lambda: store_unavailable("head"))
        with pytest.raises(StorageUnavailable):
            await steps(archiver, writer, 1)
        assert outcomes(store) == {}
    for _ in range(3):
        await steps(archiver, writer, 1)
    assert outcomes(store) == {"d1": "carried_out"}
