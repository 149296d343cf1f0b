"""Three brokers: retention that deletes while the store is away, with pins and without."""

# Long: three brokers, and retention that Kafka checks at an interval.

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.e2e.archives import archived_manifest, assert_whole, base_of_active, read_records
from tests.e2e.sample_topics import SEGMENTS
from tests.support.cluster import cluster_admin, restart_broker
from tests.support.daemon import run_command

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.daemon import Daemon

_LARGE = {"max_batch_size": 200_000}
_VALUE_BYTES = 100_000
_IMPATIENT = {
    # An outage is as good as any other once the first request has given up.
    "cloud_storage_segment_upload_timeout_ms": 2000,
    "cloud_storage_manifest_upload_timeout_ms": 2000,
}


def values(count: int) -> list[bytes]:
    return [bytes([number]) * _VALUE_BYTES for number in range(count)]


def first_base(directory: Path) -> int:
    return min(bases(directory))


def bases(directory: Path) -> list[int]:
    return sorted(int(path.stem) for path in directory.glob("*.log"))


def pins_of(tmp_path: Path, topic: str) -> list[int]:
    """Return the base offsets of the pins that the daemon of node 1 has made of a partition."""
    pins = (tmp_path / "state-1").rglob(f"{topic}-0_*/*-*.log")
    return sorted(int(path.stem.partition("-")[0]) for path in pins)


def names_of_others(log_dir: Path, topic: str) -> set[str]:
    """Return what lies in a log directory besides the partitions of *topic*, and what Kafka changes now."""
    return {
        path.name
        for path in log_dir.iterdir()
        if not path.name.startswith(topic) and not path.name.endswith(("-checkpoint.tmp", "-delete"))
    }


def upload_failures(daemon: Daemon, topic: str) -> float:
    return daemon.metric("tieringd_upload_failures_total", topic=topic) or 0


# Long: Kafka deletes by retention at an interval.
async def test_retention_during_an_outage_loses_nothing_with_pins(
    brokers, seaweedfs, daemons_of, objects, topic, *, tmp_path
):
    """
    Segments that the broker deletes while the store is away are archived later from pins.

    A daemon's restart changes nothing.
    """
    log_dir = brokers.log_dir(1)
    others = names_of_others(log_dir, topic)
    # After half of it the active segment is pinned as well.
    limits = {"retention.ms": "20000"}
    await brokers.create_topic(topic, replicas=[[1]], configs=SEGMENTS | limits)
    daemons = daemons_of(topic, **_IMPATIENT)
    daemons.launch()
    daemons[1].until_next_offset(topic, 0)
    directory = log_dir / f"{topic}-0"
    written = values(45)
    seaweedfs.pause()
    try:
        await brokers.produce(topic, written, **_LARGE)
        daemons[1].until(lambda: pins_of(tmp_path, topic) == bases(directory), "all segments are pinned")
        async with cluster_admin(brokers) as admin:
            await admin.configure(topic, {"retention.ms": "1000"})
        # The active segment too: when it expires it is closed and deleted in one go.
        daemons[1].until(lambda: first_base(directory) == len(written), "the broker has deleted everything")
        daemons[1].until(
            lambda: daemons[1].metric("tieringd_pinned_segments") >= 5, "only pins hold the segments"
        )
        pinned_bytes = daemons[1].metric("tieringd_pinned_bytes")
        daemons.kill(1)
        await restart_broker(brokers, 1)
        assert names_of_others(log_dir, topic) == others
    finally:
        seaweedfs.resume()
    daemons.launch(1)
    daemons[1].until_next_offset(topic, len(written))
    daemons[1].until(lambda: daemons[1].metric("tieringd_pinned_bytes") == 0, "the pins are released")

    manifest = archived_manifest(objects, topic)
    archived = read_records(daemons.config(), topic)
    assert pinned_bytes > len(written) * _VALUE_BYTES
    assert (manifest.start_offset, manifest.gaps, manifest.faults()) == (0, (), ())
    assert [(one.offset, one.value) for one in archived] == list(enumerate(written))
    assert not daemons.events("gap recorded in the archive")
    assert_whole(daemons.config())


async def test_retention_during_an_outage_leaves_recorded_gaps_without_pins(
    brokers, seaweedfs, daemons_of, objects, topic
):
    """Records that the broker deleted are a gap in the manifest, in the metrics and for each reader."""
    # By bytes, so that what follows the gap stays until it is archived.
    limits = {"retention.bytes": str(2 << 20)}
    await brokers.create_topic(topic, replicas=[[1]], configs=SEGMENTS)
    daemons = daemons_of(topic, pin_segments=False, **_IMPATIENT)
    daemons.launch()
    directory = brokers.log_dir(1) / f"{topic}-0"
    written = values(65)
    await brokers.produce(topic, written[:15], **_LARGE)
    archived_to = base_of_active(directory)
    daemons[1].until_next_offset(topic, archived_to)
    seaweedfs.pause()
    try:
        async with cluster_admin(brokers) as admin:
            await admin.configure(topic, limits)
        await brokers.produce(topic, written[15:], **_LARGE)
        # All that its limit does not keep: what goes later, while the archive catches up, is another gap.
        daemons[1].until(lambda: first_base(directory) == 40, "the broker has deleted what waited")
        # An upload that began before may have these files open, and would still succeed.
        failures = upload_failures(daemons[1], topic)
        daemons[1].until(lambda: upload_failures(daemons[1], topic) > failures, "such uploads have failed")
        daemons[1].until(lambda: daemons[1].partition(topic).get("fault"), "the store is seen to be away")
    finally:
        seaweedfs.resume()
    daemons[1].until(lambda: daemons[1].events("gap recorded in the archive"), "a gap is recorded")
    daemons[1].until_next_offset(topic, base_of_active(directory))

    manifest = archived_manifest(objects, topic)
    # One gap, or one on either side of a segment whose upload held its file open while the broker deleted it.
    lost_offsets = {offset for gap in manifest.gaps for offset in range(gap.base_offset, gap.next_offset)}
    lost = len(lost_offsets)
    assert manifest.faults() == ()
    assert lost > 0
    assert min(lost_offsets) >= archived_to
    assert max(lost_offsets) >= first_base(directory) - 21
    assert daemons[1].metric("tieringd_archive_gaps_total", topic=topic) == len(manifest.gaps)
    assert daemons[1].metric("tieringd_archive_gap_offsets", topic=topic) == lost
    archived = read_records(daemons.config(), topic)
    kept = [
        (offset, value)
        for offset, value in enumerate(written)
        if offset < manifest.next_offset and offset not in lost_offsets
    ]
    assert [(one.offset, one.value) for one in archived] == kept
    told = run_command("read", topic, "--partition", "0", "--config", str(daemons.config())).stderr.decode()
    for gap in manifest.gaps:
        assert (
            f"gap: offsets {gap.base_offset} to {gap.last_offset} are not archived: the broker removed"
            in told
        )
    assert assert_whole(daemons.config())["partitions"][0]["gap_offsets"] == lost
