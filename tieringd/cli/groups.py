"""`tieringd groups`: the consumer groups that archive-only endpoints keep in the bucket."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import typer

from tieringd.archive.group_store import GroupStore
from tieringd.cli.options import (
    ConfigFile,
    DryRun,
    Format,
    FromCluster,
    OutputFormat,
    loaded,
    print_document,
    print_fields,
    print_listing,
    print_rows,
    run_async,
)
from tieringd.config import Config
from tieringd.daemon.archive import Archive, opened_archive
from tieringd.daemon.archive_endpoint import cluster_of_groups
from tieringd.endpoint.newer_group_answers import state_name
from tieringd.endpoint.served_manifests import ServedTopics
from tieringd.errors import ConfigError, PreconditionFailed, StorageUnavailable
from tieringd.model.consumer_group import CommittedOffset, ConsumerGroup, GroupTopic
from tieringd.model.manifest import PartitionManifest
from tieringd.policies.group_membership import GroupError, GroupLimits, Step
from tieringd.policies.group_offsets import CommitRequest, commit, deleted
from tieringd.topics.topic_registry import TopicRegistry

groups_app = typer.Typer(
    help="List, describe, reset and delete the consumer groups of archive-only endpoints.",
    no_args_is_help=True,
)
Group = Annotated[str, typer.Argument(help="The group's name.")]
_TRIES: Final = 5
_EARLIEST, _LATEST = "earliest", "latest"
_LISTED: Final = ("group", "state", "protocol", "members", "offsets", "emptied_at")
_OFFSETS: Final = ("topic", "partition", "committed_offset", "archive_next_offset", "lag", "committed_at")
_MEMBERS: Final = ("member_id", "instance_id", "client_id", "client_host", "endpoint_id")


@groups_app.callback()
def _groups() -> None:
    """List, describe, reset and delete the consumer groups of archive-only endpoints."""


@groups_app.command("list")
def list_groups(
    config: ConfigFile, from_cluster: FromCluster = None, output: Format = OutputFormat.TABLE
) -> None:
    """List all groups, with their state and how many members and offsets they have."""
    print_listing(_LISTED, run_async(_listed(loaded(config, needs_broker=False), from_cluster)), output)


@groups_app.command()
def describe(
    group: Group, config: ConfigFile, from_cluster: FromCluster = None, output: Format = OutputFormat.TABLE
) -> None:
    """Show a group's members, its offsets, and how far they are behind the end of the archive."""
    document = run_async(_described(loaded(config, needs_broker=False), from_cluster, group))
    if output.is_data:
        print_document(document, output)
        return
    print_fields([(name, document[name]) for name in ("group", "state", "protocol", "generation")])
    for columns, name in ((_MEMBERS, "members"), (_OFFSETS, "offsets")):
        if document[name]:
            typer.echo()
            print_rows(columns, document[name])


@groups_app.command()
def reset(
    group: Group,
    config: ConfigFile,
    topics: Annotated[list[str], typer.Option("--topic", help="A topic; may be given several times.")],
    to: Annotated[str, typer.Option("--to", help="earliest, latest, or an offset for every partition.")],
    from_cluster: FromCluster = None,
    dry_run: DryRun = False,
    output: Format = OutputFormat.TABLE,
) -> None:
    """
    Set a group's offsets to the begin or end of the archive, or to an offset; it must have no members.

    The archive includes the older ones that a topic continues. For an offset outside of the archive the group
    gets the nearest one in it, and standard error says so.
    """
    rows = run_async(
        _reset(loaded(config, needs_broker=False), from_cluster, group, topics, _target(to), dry_run=dry_run)
    )
    print_listing(("topic", "partition", "before", "after"), rows, output)
    if not output.is_data:
        typer.echo("nothing was changed" if dry_run else f"{group} begins at these offsets from now on")


@groups_app.command()
def delete(
    group: Group, config: ConfigFile, from_cluster: FromCluster = None, dry_run: DryRun = False
) -> None:
    """Delete a group with its offsets; it must have no members."""
    count = run_async(_delete(loaded(config, needs_broker=False), from_cluster, group, dry_run=dry_run))
    if dry_run:
        typer.echo(f"{group} with {count} offsets would be deleted; nothing was changed")
    else:
        typer.echo(f"{group} with {count} offsets is deleted")


@dataclass(frozen=True, slots=True)
class _Groups:
    """The groups of one cluster."""

    archive: Archive
    topics: ServedTopics
    store: GroupStore

    async def existing(self, group_id: str) -> ConsumerGroup:
        """
        Return a group.

        Raises:
            ConfigError: There is no such group.
        """
        group = (await self.store.load(group_id)).group
        if not group.exists:
            raise ConfigError(
                f"the archive has no consumer group {group_id}",
                hint="`tieringd groups list` names those it has",
            )
        return group

    async def change(
        self, group_id: str, transition: Callable[[ConsumerGroup], Step[GroupError]]
    ) -> ConsumerGroup:
        """
        Write what *transition* makes of a group, and return the group before.

        Raises:
            ConfigError: The group has members.
            StorageUnavailable: Others changed it all the time.
        """
        for _ in range(_TRIES):
            found = await self.store.load(group_id)
            step = transition(found.group)
            if step.reply is not GroupError.NONE:
                raise ConfigError(
                    f"the group {group_id} has {len(found.group.members)} members; nothing was changed",
                    hint="Stop its consumers first. An endpoint removes one that was killed, after its "
                    "session timeout",
                )
            try:
                await self.store.commit(step.group, found.version)
            except PreconditionFailed:
                continue
            return found.group
        raise StorageUnavailable(f"the group {group_id} was changed by others {_TRIES} times")

    async def manifest(self, topic: GroupTopic, partition: int) -> PartitionManifest | None:
        """Return the manifest of a partition; None where it has none, or the topic is another one now."""
        served = self.topics.by_name(topic.name)
        known = None if served is None else served.partition(partition)
        if known is None or known.topic_id != topic.topic_id:
            return None
        return (await self.archive.manifests.load(known)).manifest

    async def bounds(self, topic: GroupTopic, partition: int) -> tuple[int, int]:
        """
        Return the first offset of a partition in the archive, and the one after the last.

        The first offset is that of the oldest archive which the partition continues, as an endpoint tells it.
        """
        manifest = await self.manifest(topic, partition)
        if manifest is None:
            return 0, 0
        parts = await self.archive.history.parts(
            manifest.partition, start_offset=manifest.start_offset, deleted_before=manifest.deleted_before
        )
        return (*parts, manifest)[0].start_offset, manifest.next_offset


@asynccontextmanager
async def _opened(config: Config, from_cluster: str | None) -> AsyncIterator[_Groups]:
    async with opened_archive(config) as archive:
        topics = ServedTopics(
            TopicRegistry(archive.store, archive.manifests), from_cluster=from_cluster, interval_seconds=3600
        )
        await topics.start()
        store = GroupStore(
            archive.store,
            cluster=cluster_of_groups(topics, from_cluster),
            writer_id=f"cli-{secrets.token_hex(8)}",
            max_bytes=GroupLimits().group_bytes,
        )
        try:
            yield _Groups(archive, topics, store)
        finally:
            await topics.close()


async def _listed(config: Config, from_cluster: str | None) -> list[dict[str, Any]]:
    async with _opened(config, from_cluster) as groups:
        rows = []
        for group_id in await groups.store.versions():
            group = (await groups.store.load(group_id)).group
            if group.exists:
                rows.append(
                    {
                        **_head(group),
                        "members": len(group.members),
                        "offsets": sum(map(len, group.offsets.values())),
                        "emptied_at": None if group.emptied_at_ms is None else _time(group.emptied_at_ms),
                    }
                )
        return sorted(rows, key=lambda one: str(one["group"]))


def _head(group: ConsumerGroup) -> dict[str, Any]:
    kind = "consumer" if group.is_newer else "classic"
    return {"group": group.group_id, "state": state_name(group), "protocol": kind if group.members else None}


async def _described(config: Config, from_cluster: str | None, group_id: str) -> dict[str, Any]:
    async with _opened(config, from_cluster) as groups:
        group = await groups.existing(group_id)
        offsets = []
        for topic, partitions in sorted(group.offsets.items(), key=lambda one: one[0].name):
            for number, one in sorted(partitions.items()):
                manifest = await groups.manifest(topic, number)
                end = 0 if manifest is None else manifest.next_offset
                offsets.append(
                    {
                        "topic": topic.name,
                        "partition": number,
                        "committed_offset": one.offset,
                        "archive_next_offset": end,
                        "lag": max(0, end - one.offset),
                        "committed_at": _time(one.committed_at_ms),
                    }
                )
        members = [{name: getattr(one, name) for name in _MEMBERS} for one in group.members.values()]
        return {**_head(group), "generation": group.generation, "members": members, "offsets": offsets}


async def _reset(
    config: Config,
    from_cluster: str | None,
    group_id: str,
    names: list[str],
    target: str | int,
    *,
    dry_run: bool,
) -> list[dict[str, Any]]:
    async with _opened(config, from_cluster) as groups:
        now_ms = groups.archive.clock()
        offsets: dict[GroupTopic, dict[int, CommittedOffset]] = {}
        for name in names:
            served = groups.topics.by_name(name)
            if served is None:
                raise ConfigError(
                    f"the archive has no topic {name}", hint="`tieringd archive topics` names those it has"
                )
            topic = GroupTopic(name, served.manifest.key.topic_id)
            for number in range(served.partition_count):
                start, end = await groups.bounds(topic, number)
                wanted = int({_EARLIEST: start, _LATEST: end}.get(str(target), target))
                offset = min(max(wanted, start), end)
                if offset != wanted:
                    typer.echo(
                        f"{name}-{number}: the archive has the offsets {start} to {end}, and not {wanted}: "
                        f"the group begins at {offset}",
                        err=True,
                    )
                offsets.setdefault(topic, {})[number] = CommittedOffset(offset, -1, "", now_ms)
        asked = CommitRequest("", None, -1, "", offsets)
        if dry_run:
            before = (await groups.store.load(group_id)).group
            if before.members:
                raise ConfigError(f"the group {group_id} has {len(before.members)} members")
        else:
            before = await groups.change(group_id, lambda group: commit(group, asked))
        return [
            {
                "topic": topic.name,
                "partition": number,
                "before": None
                if (known := before.offsets.get(topic, {}).get(number)) is None
                else known.offset,
                "after": one.offset,
            }
            for topic, partitions in offsets.items()
            for number, one in partitions.items()
        ]


def _target(text: str) -> str | int:
    if text in {_EARLIEST, _LATEST}:
        return text
    try:
        offset = int(text)
    except ValueError:
        raise typer.BadParameter(f"--to {text} is neither earliest, nor latest, nor an offset") from None
    if offset < 0:
        raise typer.BadParameter(f"--to {text} is negative")
    return offset


async def _delete(config: Config, from_cluster: str | None, group_id: str, *, dry_run: bool) -> int:
    async with _opened(config, from_cluster) as groups:
        group = await groups.existing(group_id)
        if dry_run and group.members:
            raise ConfigError(f"the group {group_id} has {len(group.members)} members")
        if not dry_run:
            group = await groups.change(group_id, deleted)
        return sum(map(len, group.offsets.values()))


def _time(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
