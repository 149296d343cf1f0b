"""
One plan for the disks, on an operator's request: nothing is trimmed, and no daemon needs to run.

It is made by the same policies as the daemon's own, from the current state of the disks, the broker and
the bucket. Only the cursor (which partition gives first) is known to the running daemon alone.
"""

from __future__ import annotations

import asyncio

from tieringd.archiving.observer import BrokerSnapshot, Observer
from tieringd.archiving.pinner import Pinner
from tieringd.broker.disk_use import directory_uses
from tieringd.clock import wall_clock_ms
from tieringd.config import Config
from tieringd.daemon.archive import Archive, opened_archive
from tieringd.daemon.local_broker import opened_broker
from tieringd.errors import LocalFileError
from tieringd.metrics import Metrics
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import Leadership
from tieringd.policies.disk_areas import plan_spaces
from tieringd.space.space_manager import SpaceReport, area_settings, measured_cache, plan_for
from tieringd.storage.at_once import at_once
from tieringd.topics.topic_registry import TopicRegistry

_LOADS_AT_ONCE = 16


async def plan_space_once(config: Config) -> tuple[SpaceReport, ...]:
    """
    Return what each filesystem with a log directory would give up now.

    Raises:
        LocalFileError: A log directory cannot be measured.
        BrokerUnavailable: The broker does not answer.
        StorageUnavailable: The object store does not answer.
    """
    metrics, log_dirs = Metrics(), [str(path) for path in config.broker.log_dirs]
    async with opened_archive(config, metrics) as archive, opened_broker(config) as broker:
        registry = TopicRegistry(archive.store, archive.manifests)
        await registry.refresh(await broker.cluster_id())
        observer = Observer(
            config,
            broker=broker,
            metrics=metrics,
            pinner=Pinner({}, budget_bytes=0, metrics=metrics),
            registry=registry,
            manifests=archive.manifests,
            layout=archive.layout,
        )
        snapshot = await observer.scan()
        manifests = await _manifests(archive, snapshot)
    try:
        uses = await asyncio.to_thread(directory_uses, log_dirs)
        cache = await asyncio.to_thread(measured_cache, config)
    except OSError as error:
        path = str(error.filename)
        raise LocalFileError(f"the use of {path} cannot be measured: {error.strerror}", path=path) from error
    return tuple(
        SpaceReport(
            space,
            plan_for(
                snapshot,
                space,
                manifest_of=manifests.get,
                obstacle_of=lambda _: None,
                cursor=None,
                now_ms=wall_clock_ms(),
            ),
        )
        for space in plan_spaces(uses, cache, area_settings(config))
        if space.log_dirs
    )


async def _manifests(
    archive: Archive, snapshot: BrokerSnapshot
) -> dict[Leadership, PartitionManifest | None]:
    async def load(leadership: Leadership) -> PartitionManifest | None:
        return (await archive.manifests.load(leadership.partition)).manifest

    found = await at_once(list(snapshot.wanted), load, count=_LOADS_AT_ONCE)
    return dict(zip(snapshot.wanted, found, strict=True))
