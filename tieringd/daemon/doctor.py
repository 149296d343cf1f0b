"""
What the daemon will need, tried from this host: the store, the broker, pins, room, the clock, limits.

Nothing that is tried lasts. Objects are below `tieringd-probe/` and are deleted again; a link is removed
again; permissions on the broker are those that the broker lists, and no record is ever deleted to find out.

`examined` runs every check and returns a finding for each. A check that cannot be made because of another
one's fault is left out, or says so. Each request has a deadline, so that a store or a broker that is away
does not hold up the others.
"""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from crc32c import crc32c

from tieringd.broker.pins import pin_root
from tieringd.config import Config
from tieringd.daemon.assembly import pin_candidates
from tieringd.daemon.local_broker import kafka_settings, layout_of
from tieringd.errors import (
    BrokerDenied,
    BrokerUnavailable,
    ConfigError,
    ObjectNotFound,
    RetryableError,
    TieringError,
)
from tieringd.metrics import Metrics
from tieringd.storage.archive_clock import ArchiveClock
from tieringd.storage.checked_puts import PROBE_PREFIX, CheckedPuts
from tieringd.storage.file_root import marker_of
from tieringd.storage.known_roots import KnownRoots
from tieringd.storage.resilient import ResilientStore
from tieringd.storage.store_opening import StoreCheck, opened_store, place_of

if TYPE_CHECKING:
    # An ordinary import would load the protocol's schema where there is no broker.
    from tieringd.broker.kafka import KafkaBroker
    from tieringd.broker.kafka_permissions import Permissions

_CLOCK_ERROR_MAX_MS: Final = 60_000
"""From here on nothing is deleted by age (docs/operating.md, When a clock is wrong)."""
_DESCRIPTORS_BASE: Final = 1024
"""Files and connections of a daemon besides one connection for each gateway client and store request."""
_LISTED: Final = 3
"""How many topics a finding names."""
_TOPIC_OPERATIONS: Final = {
    "DESCRIBE": "its partitions cannot be found",
    "DESCRIBE_CONFIGS": "its settings cannot be read",
    "DELETE": "it is archived, but never trimmed",
}


class CheckOutcome(StrEnum):
    """What a check found."""

    OK = "ok"
    WARNING = "warning"
    """The daemon runs, with less than it could."""
    AWAY = "away"
    """No answer: nothing is known, and the daemon goes on trying."""
    FAULT = "fault"
    """The daemon cannot do its work until an operator mends this."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check, and how to mend what it found."""

    check: str
    """A stable name, such as `store_write`."""
    subject: str
    outcome: CheckOutcome
    message: str
    remedy: str = ""


async def examined(config: Config, *, timeout_seconds: float) -> list[CheckResult]:
    """Run all checks of *config*; no request waits longer than *timeout_seconds*."""
    timeout_ms = max(1, round(timeout_seconds * 1000))
    hurried = config.model_copy(
        update={
            "cloud_storage_manifest_upload_timeout_ms": timeout_ms,
            "cloud_storage_segment_upload_timeout_ms": timeout_ms,
        }
    )
    directories = asyncio.create_task(
        _within(_threaded(_directories, config), "directories", "log directories", timeout_seconds)
    )
    store, broker, *local = await asyncio.gather(
        _within(_store(hurried, after=directories), "store", place_of(config), timeout_seconds * 3),
        _within(_broker(config, timeout_seconds), "broker", _bootstrap(config), timeout_seconds * 3),
        directories,
        _within(_threaded(_limits, config), "limits", "this process", timeout_seconds),
    )
    return [*store, *broker, *(one for findings in local for one in findings)]


async def _within(
    findings: AsyncIterator[CheckResult], check: str, subject: str, seconds: float
) -> list[CheckResult]:
    """Return *findings*, and at the deadline those so far and one that says so."""
    found: list[CheckResult] = []
    try:
        async with asyncio.timeout(seconds):
            async for one in findings:
                found.append(one)  # noqa: PERF401 what was found before the deadline counts
    except TimeoutError:
        found.append(
            CheckResult(
                check, subject, CheckOutcome.AWAY, f"no answer within {seconds:g} s", "Look at this first"
            )
        )
    return found


async def _threaded(
    examine: Callable[[Config], Iterator[CheckResult]], config: Config
) -> AsyncIterator[CheckResult]:
    for one in await asyncio.to_thread(lambda: list(examine(config))):
        yield one


def _of_error(check: str, subject: str, error: TieringError) -> CheckResult:
    """Return the finding of an error: that of a peer which is away passes by itself."""
    is_away = isinstance(error, RetryableError)
    remedy = error.hint or ("It is tried again while the daemon runs" if is_away else "")
    return CheckResult(
        check, subject, CheckOutcome.AWAY if is_away else CheckOutcome.FAULT, error.message, remedy
    )


async def _store(config: Config, *, after: asyncio.Task[list[CheckResult]]) -> AsyncIterator[CheckResult]:
    place = place_of(config)
    # An empty state directory shows a first start, and a trial of pins makes a directory in it for a moment.
    await asyncio.wait({after})
    try:
        is_to_come = await asyncio.to_thread(_begins_at_first_start, config)
    except (OSError, TieringError) as error:
        remedy = "Mount the disk of the archive, and allow the daemon's user to use it"
        yield CheckResult("store_read", place, CheckOutcome.FAULT, str(error), remedy)
        return
    if is_to_come:
        message = "there is no archive yet; the first start of a daemon begins it"
        yield CheckResult("store_read", place, CheckOutcome.WARNING, message, "Or run: tieringd archive init")
        return
    try:
        async with opened_store(config, Metrics()) as store:
            clock = ArchiveClock()
            clock.listen_to(store.backend)
            async for one in _store_requests(config, store, place):
                yield one
                if one.check == "store_read" and one.outcome is not CheckOutcome.OK:
                    return
            yield _clock(clock)
    except TieringError as error:
        yield _of_error("store_open", place, error)


async def _store_requests(config: Config, store: ResilientStore, place: str) -> AsyncIterator[CheckResult]:
    try:
        await store.list_page("meta/", limit=1)
    except TieringError as error:
        yield _of_error("store_read", place, error)
        return
    yield CheckResult("store_read", place, CheckOutcome.OK, "objects can be listed")

    puts = CheckedPuts(store.backend)
    try:
        await puts.find_out()
    except TieringError as error:
        yield _of_error("store_write", place, error)
        return
    yield await _written(store, place)
    if puts.reads_back:
        yield CheckResult(
            "store_checksum",
            place,
            CheckOutcome.WARNING,
            "the store keeps an object whose checksum is wrong: each object is read back after it is stored",
            "Use a store that compares checksums, or expect twice the traffic",
        )
    else:
        yield CheckResult(
            "store_checksum", place, CheckOutcome.OK, "the store refuses an object with a wrong checksum"
        )

    if config.cloud_storage_single_writer:
        message = "not tried: cloud_storage_single_writer promises that no other daemon writes there"
        yield CheckResult("store_conditional_write", place, CheckOutcome.OK, message)
        return
    try:
        await StoreCheck(config, store)()
    except TieringError as error:
        yield _of_error("store_conditional_write", place, error)
    else:
        message = "the store refuses a write whose condition does not hold"
        yield CheckResult("store_conditional_write", place, CheckOutcome.OK, message)


def _begins_at_first_start(config: Config) -> bool:
    """Return whether a file store's directory is not an archive, and a daemon's first start makes it one."""
    root = config.cloud_storage_file_root
    if config.backend != "file" or root is None:
        return False
    is_first = KnownRoots(config.state_directory).begins_at_next_start()
    can_be_made = os.access(root if root.exists() else root.parent, os.W_OK | os.X_OK)
    return is_first and can_be_made and (not root.exists() or marker_of(root) is None)


async def _written(store: ResilientStore, place: str) -> CheckResult:
    """Write, read and delete a small object."""
    key = PROBE_PREFIX + secrets.token_hex(8)
    data = b"tieringd doctor writes, reads and deletes this"
    try:
        await store.put(key, data, crc32c=crc32c(data))
        found, _ = await store.get(key)
    except TieringError as error:
        with suppress(TieringError):
            await store.delete_many([key])
        return _of_error("store_write", place, error)
    try:
        await store.delete_many([key])
        await store.head(key)
    except ObjectNotFound:
        pass
    except TieringError as error:
        return _of_error("store_delete", place, error)
    else:
        message = f"the store still has {key} after it was deleted"
        return CheckResult(
            "store_delete", place, CheckOutcome.FAULT, message, "Allow the deletion of objects"
        )
    if found != data:
        message = "the store returned other bytes than it was sent"
        return CheckResult(
            "store_write", place, CheckOutcome.FAULT, message, "Check the network and the store"
        )
    return CheckResult("store_write", place, CheckOutcome.OK, "an object was written, read and deleted")


def _clock(clock: ArchiveClock) -> CheckResult:
    status = clock.status()
    if abs(status.error_ms) > _CLOCK_ERROR_MAX_MS:
        message = f"this host's clock is {status.error_ms / 1000:+.0f} s off the store's"
        remedy = "Set the clock, with NTP; until then nothing is deleted by age"
        return CheckResult("clock", "this host", CheckOutcome.WARNING, message, remedy)
    if not status.is_confirmed:
        message = "the store has no clock of its own to compare with"
        return CheckResult("clock", "this host", CheckOutcome.OK, message)
    return CheckResult(
        "clock", "this host", CheckOutcome.OK, f"{status.error_ms / 1000:+.1f} s off the store's"
    )


def _bootstrap(config: Config) -> str:
    return ", ".join(config.broker.bootstrap) or "no broker"


async def _broker(config: Config, timeout_seconds: float) -> AsyncIterator[CheckResult]:
    if config.gateway.enabled:
        yield await _gateway_broker(config, timeout_seconds)
    if config.broker.kind == "none" or not config.broker.bootstrap:
        return
    # The protocol's schema takes a fifth of a second to import, and a directory without a broker needs none.
    from tieringd.broker.kafka import KafkaBroker  # noqa: PLC0415

    subject = _bootstrap(config)
    log_dirs = [str(path) for path in config.broker.log_dirs]
    scan = await asyncio.to_thread(layout_of(config).scan, log_dirs)
    topics = sorted({one.topic_partition.topic for one in scan.partitions})
    try:
        settings = kafka_settings(config, node_id=scan.node_id)
        broker = KafkaBroker(replace(settings, request_timeout_seconds=timeout_seconds))
    except ConfigError as error:
        yield _of_error("broker", subject, error)
        return
    try:
        found = await broker.permissions(topics)
        yield CheckResult("broker", subject, CheckOutcome.OK, f"cluster {found.cluster_id} answers")
        archived = await _archived(config, broker, topics, found)
        groups = await _share_groups(config, broker)
    except TieringError as error:
        yield _of_error("broker", subject, error)
        return
    finally:
        await broker.close()
    for one in (*_permissions(config, found, archived), groups):
        yield one


async def _share_groups(config: Config, broker: KafkaBroker) -> CheckResult:
    """Say whether the offsets of share groups are known. While they are not, trims wait."""
    check, subject = "share_groups", "cluster"
    if not config.share_group_trim_hold_ms:
        return CheckResult(
            check, subject, CheckOutcome.OK, "share_group_trim_hold_ms is 0: trims ignore share groups"
        )
    try:
        groups = await broker.share_group_starts()
    except (BrokerDenied, BrokerUnavailable) as error:
        user = config.broker.security.sasl_username or "ANONYMOUS"
        hint = acl_command(config, user, "DESCRIBE", group="*") if isinstance(error, BrokerDenied) else ""
        return CheckResult(check, subject, CheckOutcome.WARNING, f"trims wait: {error}", hint)
    return CheckResult(check, subject, CheckOutcome.OK, f"offsets of {len(groups)} share groups are known")


async def _archived(config: Config, broker: KafkaBroker, topics: list[str], found: Permissions) -> list[str]:
    """
    Return which of *topics* are archived.

    A topic whose settings this user may not read counts: they may switch archiving on. A topic that the
    broker does not show this user at all counts only if the configuration names it: the daemon leaves all
    others alone.
    """
    granted = {name: found.topics.get(name, frozenset()) for name in topics}
    readable = [name for name in topics if "DESCRIBE_CONFIGS" in granted[name]]
    told = await broker.topic_configs(readable)
    configs = {name: found for name, found in told.items() if not isinstance(found, BrokerDenied)}
    return [
        name
        for name in topics
        if config.topic(name, configs.get(name, {})).remote_write or (granted[name] and name not in configs)
    ]


def _permissions(config: Config, found: Permissions, archived: list[str]) -> Iterator[CheckResult]:
    user = config.broker.security.sasl_username or "ANONYMOUS"
    wanted = {"DESCRIBE": CheckOutcome.FAULT}
    if config.storage_degraded_action != "alert":
        wanted |= {"DESCRIBE_CONFIGS": CheckOutcome.WARNING, "ALTER_CONFIGS": CheckOutcome.WARNING}
    for operation, otherwise in wanted.items():
        granted = operation in found.cluster
        yield CheckResult(
            f"acl_cluster_{operation.lower()}",
            "cluster",
            CheckOutcome.OK if granted else otherwise,
            f"{operation} is {'granted' if granted else 'not granted'}",
            "" if granted else acl_command(config, user, operation),
        )
    for operation, loss in _TOPIC_OPERATIONS.items():
        without = [name for name in archived if operation not in found.topics.get(name, ())]
        check = f"acl_topic_{operation.lower()}"
        if not without:
            yield CheckResult(
                check, f"{len(archived)} archived topics", CheckOutcome.OK, f"{operation} is granted"
            )
        else:
            more = f" and {len(without) - _LISTED} more" if len(without) > _LISTED else ""
            yield CheckResult(
                check,
                ", ".join(without[:_LISTED]) + more,
                CheckOutcome.WARNING if operation == "DELETE" else CheckOutcome.FAULT,
                f"{operation} is not granted: {loss}",
                acl_command(config, user, operation, topic=without[0] if len(without) == 1 else "*"),
            )


def acl_command(
    config: Config, user: str, *operations: str, topic: str | None = None, group: str | None = None
) -> str:
    """Return the command that grants *user* some operations on *topic*, on *group*, or on the cluster."""
    server = config.broker.bootstrap[0] if config.broker.bootstrap else "localhost:9092"
    names = " ".join(f"--operation {''.join(w.title() for w in one.split('_'))}" for one in operations)
    on = "--cluster" if topic is None else f"--topic '{topic}'"
    if group is not None:
        on = f"--group '{group}'"
    return f"kafka-acls --bootstrap-server {server} --add --allow-principal User:{user} {names} {on}"


async def _gateway_broker(config: Config, timeout_seconds: float) -> CheckResult:
    address = config.gateway.broker
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(timeout_seconds):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError) as error:
        message = f"gateway.broker does not answer: {error or 'no answer in time'}"
        remedy = "Start the broker, or correct gateway.broker; the gateway listens all the same"
        return CheckResult("gateway_broker", address, CheckOutcome.AWAY, message, remedy)
    writer.close()
    return CheckResult(
        "gateway_broker", address, CheckOutcome.OK, "the broker's listener for the gateway answers"
    )


def _directories(config: Config) -> Iterator[CheckResult]:
    """Yield what the log directories and our own directories give: reading, pins, room."""
    for log_dir in config.broker.log_dirs:
        subject = str(log_dir)
        try:
            os.listdir(log_dir)  # noqa: PTH208 - only whether it can be read
        except OSError as error:
            message = f"cannot be read: {error.strerror}"
            remedy = "Run tieringd as the broker's user, and correct broker.log_dirs"
            yield CheckResult("log_directory", subject, CheckOutcome.FAULT, message, remedy)
            continue
        yield CheckResult("log_directory", subject, CheckOutcome.OK, "can be read")
        yield _pins(config, log_dir)
        yield _room(config, log_dir)
    yield _state(config)


def _pins(config: Config, log_dir: Path) -> CheckResult:
    subject = str(log_dir)
    candidates = pin_candidates(config, log_dir)
    if not candidates:
        why = "pin_segments is false" if config.broker.kind == "kafka" else "this kind of broker has no pins"
        return CheckResult("pins", subject, CheckOutcome.OK, f"not used: {why}")
    # Deepest first, and only what does not exist yet: the trial makes it, and so it is removed again.
    made = [path for one in candidates for path in (Path(one), *Path(one).parents[:1]) if not path.exists()]
    try:
        root = pin_root(str(log_dir), candidates)
    except ConfigError as error:
        return CheckResult("pins", subject, CheckOutcome.WARNING, error.message, error.hint or "")
    finally:
        for path in made:
            with suppress(OSError):
                path.rmdir()
    return CheckResult("pins", subject, CheckOutcome.OK, f"a hard link was made in {root} and removed again")


def _room(config: Config, log_dir: Path) -> CheckResult:
    found = os.statvfs(log_dir)
    free_bytes = found.f_bavail * found.f_frsize
    percent = config.storage_space_alert_free_threshold_percent
    low_bytes = max(
        config.storage_space_alert_free_threshold_bytes, found.f_blocks * found.f_frsize * percent / 100
    )
    message = f"{free_bytes / 2**30:.1f} GiB free"
    if free_bytes <= config.storage_min_free_bytes:
        remedy = "Make room: producers are held back at this state (docs/operating.md, Disk space)"
        return CheckResult("free_space", str(log_dir), CheckOutcome.WARNING, f"{message}: degraded", remedy)
    if free_bytes <= low_bytes:
        remedy = "Make room, or lower local.retention.ms of large topics"
        return CheckResult("free_space", str(log_dir), CheckOutcome.WARNING, f"{message}: low", remedy)
    return CheckResult("free_space", str(log_dir), CheckOutcome.OK, message)


def _state(config: Config) -> CheckResult:
    """Return whether the state directory can be written to; one that is missing is made by the daemon."""
    directory = config.state_directory
    existing = next(one for one in (directory, *directory.parents) if one.exists())
    if os.access(existing, os.W_OK | os.X_OK):
        made = "" if existing == directory else "; the daemon makes it"
        return CheckResult("state_directory", str(directory), CheckOutcome.OK, f"can be written to{made}")
    remedy = "Allow the daemon's user to create it and write in it"
    message = f"{existing} cannot be written to"
    return CheckResult("state_directory", str(directory), CheckOutcome.FAULT, message, remedy)


def _limits(config: Config) -> Iterator[CheckResult]:
    """Yield whether descriptors and watches suffice."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    clients = 2 * config.gateway.max_connections if config.gateway.enabled else 0
    wanted = _DESCRIPTORS_BASE + clients
    is_enough = soft == resource.RLIM_INFINITY or soft >= wanted
    yield CheckResult(
        "descriptors",
        "this process",
        CheckOutcome.OK if is_enough else CheckOutcome.WARNING,
        f"{soft} may be open; {wanted} are needed",
        "" if is_enough else f"Set LimitNOFILE={wanted} in the unit, or lower gateway.max_connections",
    )
    scan = layout_of(config).scan([str(path) for path in config.broker.log_dirs])
    watches = len(scan.partitions) + len(config.broker.log_dirs)
    for name, needed in (("max_user_watches", watches), ("max_user_instances", 1)):
        try:
            allowed = int(Path(f"/proc/sys/fs/inotify/{name}").read_text(encoding="ascii"))
        except OSError:
            continue
        is_enough = allowed >= needed
        yield CheckResult(
            f"inotify_{name}",
            "this host",
            CheckOutcome.OK if is_enough else CheckOutcome.WARNING,
            f"{allowed} allowed; {needed} needed here",
            ""
            if is_enough
            else f"sysctl fs.inotify.{name}={2 * needed}; until then segments are found later",
        )
