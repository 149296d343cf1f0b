"""`tieringd archive delete` and `undelete`: an operator's word on the archive of a topic that is gone."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from tieringd.cli.human import time_text
from tieringd.cli.options import ConfigFile, loaded, run_async
from tieringd.daemon.archive import opened_archive
from tieringd.metrics import Metrics
from tieringd.policies.topic_lifecycle import ordered_to_go, taken_back

if TYPE_CHECKING:
    from collections.abc import Callable

    from tieringd.config import Config
    from tieringd.formats.topic_manifest import TopicManifest

Topic = Annotated[str, typer.Argument(help="The topic's name.")]
TopicId = Annotated[
    str, typer.Option("--id", help="The topic's id, as `archive topics` shows it: a name can have several.")
]


def delete(topic: Topic, topic_id: TopicId, config: ConfigFile) -> None:
    """
    Delete the archive of a topic that is gone, after the grace.

    A daemon of the topic's cluster does it. It finds out first whether the cluster has the topic: then
    nothing is deleted.
    """
    settings = loaded(config)
    run_async(_change(settings, topic, topic_id, ordered_to_go))
    grace = settings.cloud_storage_topic_purge_grace_period_ms / 1000
    typer.echo(
        f"the archive of {topic} ({topic_id}) is deleted in {grace:g} s or later, by the next daemon that "
        "does housekeeping; until then `tieringd archive undelete` takes it back"
    )


def undelete(topic: Topic, topic_id: TopicId, config: ConfigFile) -> None:
    """Keep the archive of a deleted topic after all, while its grace runs."""
    run_async(_change(loaded(config), topic, topic_id, taken_back))
    typer.echo(f"the archive of {topic} ({topic_id}) is kept until `tieringd archive delete`")


def lifecycle_remark(topic: TopicManifest) -> str | None:
    """Return what there is to say of a topic's state; None for one that is simply live."""
    remarks = [f"moved to {topic.moved_to}"] if topic.moved_to else []
    if topic.deletion is not None:
        ended_ms = topic.deletion.purged_at_ms
        remarks.append(f"since {time_text(topic.deletion.noted_at_ms)}: {topic.deletion.reason}")
        if ended_ms is not None:
            remarks.append(
                f"purged {time_text(ended_ms)}: {topic.deletion.segments} segments, "
                f"{topic.deletion.size_bytes} bytes"
            )
    return "; ".join(remarks) or None


async def _change(config: Config, topic: str, topic_id: str, change: Callable[..., TopicManifest]) -> None:
    """Change a topic's manifest; *change* gets *now_ms*, by the store's clock where this host's is wrong."""
    async with opened_archive(config, Metrics()) as archive:
        found = await archive.catalog.incarnation(topic, topic_id)
        await archive.manifests.change_topic(found.key, partial(change, now_ms=archive.clock()))
