"""
`tieringd archive resolve`: decide what becomes of an archive's tail, where only an operator can.

Without a decision the command changes nothing. It shows the case, as the daemon on this host tells it, and
what each decision would lose, by the batches in the bucket. The command reads no batch of an archive that
would go as a whole, because that may hold years of them. A decision is stored in the bucket for the
present version of the manifest. The daemon of the partition's leader carries it out.
"""

from __future__ import annotations

import getpass
import secrets
import socket
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from tieringd.cli.daemon_status import partition_status
from tieringd.cli.human import human_size, time_text
from tieringd.cli.options import ConfigFile, Format, OutputFormat, loaded, print_document, run_async
from tieringd.config import Config
from tieringd.daemon.archive import Archive, opened_archive
from tieringd.daemon.ownership_check import own_cluster
from tieringd.errors import ConfigError, StorageError, TieringError
from tieringd.formats.object_keys import data_key
from tieringd.model.manifest import PartitionManifest
from tieringd.model.operator_decision import ManifestVersion, OperatorDecision
from tieringd.policies.lineage import OperatorReason

_OUTCOMES = {"committed": False, "aborted": True}
_WITHOUT_DAEMON = (
    "No daemon answers with this configuration, so neither the reason nor the offsets are known here. A "
    "decision is stored all the same. The daemon of the partition's leader carries it out when it runs, "
    "if it finds a case that the decision fits. It refuses the decision if the manifest has another version "
    "by then, as after a change of leader"
)
_KEEP = {
    OperatorReason.DIVERGENCE_UNKNOWN: (
        "keeps the archived records as they are. If the leader's log had other records there, readers get "
        "records that no replica has"
    ),
    OperatorReason.TRANSACTIONS_FORGOTTEN: (
        "keeps the archived records, and says that no transaction that began in an earlier segment was open "
        "there. If one was, readers of committed records get it as the old leader ended it"
    ),
}


@dataclass(frozen=True, slots=True)
class WayOut:
    """An option of the command, and what it would lose."""

    option: str
    loses: str


def resolve(
    partition: Annotated[
        str, typer.Argument(help="The topic and the number of the partition, such as orders-3.")
    ],
    config: ConfigFile,
    transaction: Annotated[
        list[str] | None,
        typer.Option(
            help="How the transaction of a producer ended: PRODUCER=committed or PRODUCER=aborted. May be "
            "given several times."
        ),
    ] = None,
    give_up: Annotated[
        str | None,
        typer.Option(
            help="Give up the offsets FROM-TO, both inclusive, for good. A gap takes their place, or the "
            "leader's log if that began anew."
        ),
    ] = None,
    keep: Annotated[
        bool,
        typer.Option(
            "--keep",
            help="The archived records before the divergence are those of the leader's log, and no other "
            "transaction was open there.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what the decision would lose; store nothing.")
    ] = False,
    requested_by: Annotated[
        str | None, typer.Option("--requested-by", help="Who decides; by default this user and this host.")
    ] = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """
    Decide about a partition that waits for an operator after an unclean election.

    Without --transaction, --give-up or --keep nothing is changed: the command shows the reason, and what each
    way out would lose. Run it on the host of the partition's leader. A decision is for the present version of
    the manifest only; the daemon carries it out in its next step, and the bucket keeps a record of it.
    """
    topic, number = _parse_partition(partition)
    outcomes = _parse_outcomes(transaction or [])
    given_up = None if give_up is None else _parse_range(give_up)
    is_decision = bool(outcomes or given_up or keep)
    shown = run_async(
        _resolve(
            loaded(config),
            topic,
            number,
            OperatorDraft(
                outcomes, given_up, keep, requested_by or f"{getpass.getuser()}@{socket.gethostname()}"
            )
            if is_decision
            else None,
            dry_run=dry_run,
        )
    )
    if output.is_data:
        print_document(shown, output)
    else:
        _print(shown)


@dataclass(frozen=True, slots=True)
class OperatorDraft:
    """What the operator has given on the command line."""

    is_aborted: dict[int, bool]
    give_up: tuple[int, int] | None
    keep: bool
    decided_by: str


async def _resolve(
    config: Config, topic: str, number: int, draft: OperatorDraft | None, *, dry_run: bool
) -> dict[str, Any]:
    status = await partition_status(config, topic, number)
    case = _case_of(status, topic, number)
    decision_id = secrets.token_hex(8)
    async with opened_archive(config, writer_id=decision_id) as archive:
        found = await archive.catalog.partition(topic, number, cluster=await own_cluster(config))
        stored = (await archive.manifests.load(found.partition)).existing
        waiting, _ = await archive.manifests.decisions.of(found.partition)
        version = ManifestVersion.of(stored)
        if stored.is_closed:
            raise ConfigError(
                f"the archive of {topic}-{number} in this bucket is closed. Nothing was changed",
                hint="`tieringd archive topics` says why. After a move, name the new bucket in the "
                "configuration",
            )
        shown: dict[str, Any] = {
            "partition": f"{topic}-{number}",
            "manifest": str(version),
            "case": case,
            "without_daemon": _WITHOUT_DAEMON if case is None else None,
            "ways_out": [],
            "earlier_decisions": [
                f"{one.decision_id} of {one.decided_by}, {time_text(one.decided_at_ms)}: "
                + (
                    "waits for the daemon"
                    if one.made_for == version
                    else "was made for another version, and will be refused"
                )
                for one in waiting
            ],
            "decision": None,
            "record": None,
        }
        if draft is None:
            shown["ways_out"] = [
                {"option": one.option, "loses": one.loses} for one in await _ways_out(archive, stored, case)
            ]
            return shown
        decision = OperatorDecision(
            stored.partition,
            decision_id,
            archive.clock(),
            draft.decided_by,
            version,
            draft.is_aborted,
            draft.give_up,
            keep=draft.keep,
        )
        _require_fitting(decision, stored, case)
        shown["decision"] = await _consequences(archive, stored, decision, case)
        if not dry_run:
            shown["record"] = await archive.manifests.decisions.add(decision)
        return shown


def _case_of(status: dict[str, Any] | None, topic: str, number: int) -> dict[str, Any] | None:
    """
    Return the case as the daemon tells it; None where no daemon answers.

    Raises:
        ConfigError: The daemon does not archive the partition, or the partition does not wait.
    """
    if status is None:
        return None
    if not status:
        raise ConfigError(
            f"the daemon on this host does not archive {topic}-{number}. Nothing was changed",
            hint="Run the command on the host of the partition's leader, which the alert names",
        )
    case = status.get("waits_for_operator")
    if case is None:
        raise ConfigError(
            f"{topic}-{number} does not wait for an operator. Nothing was changed",
            hint="`tieringd archive describe` shows what a partition waits for",
        )
    return dict(case)


async def _ways_out(
    archive: Archive, manifest: PartitionManifest, case: dict[str, Any] | None
) -> list[WayOut]:
    """Return what may be decided about *case*, and what it would lose."""
    if case is None:
        return []
    first, last = case["base_offset"], case["last_offset"]
    found = [
        WayOut(
            f"--transaction {producer}={outcome}",
            await _transaction_loss(archive, manifest, producer, begun, case, is_aborted=is_aborted),
        )
        for producer, begun in case["transactions"]
        for outcome, is_aborted in _OUTCOMES.items()
    ]
    reason = OperatorReason(case["reason"])
    if reason in _KEEP:
        found.append(WayOut("--keep", _KEEP[reason]))
    found.append(WayOut(f"--give-up {first}-{last}", await _range_loss(archive, manifest, first, last, case)))
    return found


async def _consequences(
    archive: Archive, manifest: PartitionManifest, decision: OperatorDecision, case: dict[str, Any] | None
) -> dict[str, str]:
    """Return what *decision* would lose, by option."""
    begun = dict(case["transactions"]) if case else {}
    told = {
        f"--transaction {producer}={'aborted' if is_aborted else 'committed'}": (
            await _transaction_loss(archive, manifest, producer, begun[producer], case, is_aborted=is_aborted)
            if case and producer in begun
            else "what it would lose is not known here"
        )
        for producer, is_aborted in decision.is_aborted.items()
    }
    if decision.keep:
        told["--keep"] = _KEEP.get(OperatorReason(case["reason"]), "") if case else "see the documentation"
    if decision.give_up:
        first, last = decision.give_up
        told[f"--give-up {first}-{last}"] = await _range_loss(archive, manifest, first, last, case)
    return told


async def _transaction_loss(
    archive: Archive,
    manifest: PartitionManifest,
    producer: int,
    begun: int,
    case: dict[str, Any] | None,
    *,
    is_aborted: bool,
) -> str:
    last_offset = case["divergence_offset"] - 1 if case else manifest.next_offset - 1
    records = await _counted(archive, manifest, begun, last_offset, producer=producer)
    if is_aborted:
        return (
            f"readers of committed records do not get {records} of producer {producer} from offset {begun} "
            "on. If the transaction was committed, these are lost to them"
        )
    return (
        f"every reader gets {records} of producer {producer} from offset {begun} on. If the transaction was "
        "aborted, readers of committed records get what never was committed"
    )


async def _range_loss(
    archive: Archive, manifest: PartitionManifest, first: int, last: int, case: dict[str, Any] | None
) -> str:
    if _is_log_anew(case) or (first, last) == (manifest.start_offset, manifest.next_offset - 1):
        return await _segments_loss(archive, manifest, first)
    records = await _counted(archive, manifest, first, last)
    return f"{records} at offsets {first} to {last} can never be read from the archive again"


async def _segments_loss(archive: Archive, manifest: PartitionManifest, first: int) -> str:
    """Return what goes with all segments from offset *first* on, by the manifest."""
    what = f"all that is archived from offset {first} on"
    try:
        whole = await archive.manifests.spillovers.with_history(manifest, from_offset=first)
    except (StorageError, TieringError) as error:
        return f"{what}, which cannot be looked at ({error})"
    segments = whole.segments.overlapping(first, manifest.next_offset)
    size = human_size(sum(one.size_bytes for one in segments))
    newest = time_text(max((one.max_timestamp_ms for one in segments), default=-1))
    count = "1 segment" if len(segments) == 1 else f"{len(segments)} segments"
    return (
        f"{what}, {count} with {size} of records up to {newest}, can never be read from the archive again. "
        f"`tieringd recover cluster {manifest.partition.topic} --prefix old-` makes a copy of the topic "
        "before"
    )


def _is_log_anew(case: dict[str, Any] | None) -> bool:
    return case is not None and OperatorReason(case["reason"]) is OperatorReason.LOG_BEGAN_ANEW


async def _counted(
    archive: Archive, manifest: PartitionManifest, first: int, last: int, *, producer: int | None = None
) -> str:
    """Return how many records offsets *first* to *last* have, in words; all of the batches are read."""
    try:
        whole = await archive.manifests.spillovers.with_history(manifest, from_offset=first)
        records = 0
        for segment in whole.segments.overlapping(first, last + 1):
            index = await archive.remote_log.index_of(manifest.partition, segment)
            key = data_key(manifest.partition, segment)
            async for batch in archive.reader.batches(
                key, index, from_offset=max(first, segment.base_offset)
            ):
                header = batch.header
                if header.base_offset > last:
                    break
                is_its_own = producer is None or (header.producer_id == producer and header.is_transactional)
                if is_its_own and not header.is_control:
                    records += header.record_count
    except (StorageError, TieringError) as error:
        return f"records that cannot be counted ({error})"
    return "1 record" if records == 1 else f"{records} records"


def _require_fitting(
    decision: OperatorDecision, manifest: PartitionManifest, case: dict[str, Any] | None
) -> None:
    """
    Check what can be checked here; the daemon checks the rest.

    Raises:
        ConfigError: The decision cannot fit. Nothing is stored.
    """
    if case is not None and _is_log_anew(case):
        whole = (case["base_offset"], case["last_offset"])
        if decision.keep or decision.is_aborted or decision.give_up != whole:
            raise ConfigError(
                "the leader's log began anew, and continues nothing of what it contradicts. Nothing was "
                "changed",
                hint=f"--give-up {whole[0]}-{whole[1]} gives up all of that, and is the only decision. First "
                "see whether another replica, or the disk that is missing, has the old log",
            )
    if decision.give_up is not None:
        first, last = decision.give_up
        end = case["last_offset"] if case else manifest.next_offset - 1
        if not manifest.start_offset <= first <= last <= end:
            raise ConfigError(
                f"offsets {first} to {last} cannot be given up. Nothing was changed",
                hint=f"Give up offsets from {manifest.start_offset} to {end}, whole segments",
            )
    if case is not None:
        known = {producer for producer, _ in case["transactions"]}
        other = sorted(decision.is_aborted.keys() - known)
        if other and OperatorReason(case["reason"]) is OperatorReason.OUTCOME_LOST:
            raise ConfigError(
                f"the partition waits for no transaction of producer {other[0]}. Nothing was changed",
                hint=f"It waits for the outcomes of producers {sorted(known)}",
            )


def _print(shown: dict[str, Any]) -> None:
    case = shown["case"]
    if case is None:
        typer.echo(f"{shown['partition']}: {shown['without_daemon']}.")
    else:
        typer.echo(
            f"{shown['partition']} waits for an operator since {time_text(case['since_ms'])}: "
            f"{case['reason']}"
        )
        typer.echo(case["message"])
        offsets = "offsets" if _is_log_anew(case) else "good offsets"
        typer.echo(
            f"Only the archive has the {offsets} {case['base_offset']} to {case['last_offset']}. The "
            f"leader's log parts from the archive at offset {case['divergence_offset']}, as far as is known."
        )
        if case["refused"]:
            typer.echo(case["refused"])
    for one in shown["earlier_decisions"]:
        typer.echo(f"decision {one}")
    typer.echo(f"The manifest: {shown['manifest']}")
    if shown["decision"] is None:
        for way in shown["ways_out"]:
            typer.echo(f"  {way['option']}: {way['loses']}")
        typer.echo("Nothing was changed.")
        return
    for option, loses in shown["decision"].items():
        typer.echo(f"  {option}: {loses}")
    if shown["record"] is None:
        typer.echo("Dry run: nothing was changed.")
    else:
        typer.echo(
            "The decision is stored. The daemon carries it out in its next step, or refuses it: `/status` "
            f"and the log say which. The bucket's record: {shown['record']}"
        )


def _parse_partition(text: str) -> tuple[str, int]:
    topic, dash, number = text.rpartition("-")
    if not (topic and dash and number.isascii() and number.isdigit()):
        raise typer.BadParameter(f"{text} is no partition; write TOPIC-NUMBER, such as orders-3")
    return topic, int(number)


def _parse_outcomes(texts: list[str]) -> dict[int, bool]:
    found: dict[int, bool] = {}
    for text in texts:
        producer, _, outcome = text.partition("=")
        if not (producer.isascii() and producer.isdigit()) or outcome not in _OUTCOMES:
            raise typer.BadParameter(f"{text} is no outcome; write PRODUCER=committed or PRODUCER=aborted")
        if found.setdefault(int(producer), _OUTCOMES[outcome]) != _OUTCOMES[outcome]:
            raise typer.BadParameter(f"the transaction of producer {producer} has two outcomes")
    return found


def _parse_range(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    if not (dash and first.isascii() and first.isdigit() and last.isascii() and last.isdigit()):
        raise typer.BadParameter(f"{text} is no range of offsets; write FROM-TO, such as 120-179")
    return int(first), int(last)
