"""
Consumer groups over the bucket: every change is decided by a policy, and is in the bucket before its answer.

Requests that change a group queue up while a write of it is under way. The next write takes all of them, so
many members that commit at once cost one request. When another endpoint was first, all of them are decided
anew from what it has written. What changes nothing is answered only from a state that the bucket has
confirmed.

Heartbeats cost no request: while this endpoint's lease is in force, other endpoints leave its members
alone, and it knows the group as of the last look, a few seconds ago. `GroupCoordinator.run` looks, and
removes members that are silent here or whose endpoint has died. Silence is measured on the awake clock: what
members sent while this process stood still lies in its sockets.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import structlog

from tieringd.archive.group_store import GroupStore, GroupVersion
from tieringd.endpoint.endpoint_nodes import EndpointLeases
from tieringd.errors import (
    CorruptDataError,
    ObjectTooLarge,
    PreconditionFailed,
    ProtocolViolation,
    StorageUnavailable,
    TieringError,
)
from tieringd.metrics.groups import GroupMetrics
from tieringd.model.consumer_group import ConsumerGroup, GroupState, GroupTopic, SubscribedTopic
from tieringd.pauses import AwakeClock
from tieringd.policies.consumer_protocol import (
    JOINS,
    ConsumerHeartbeat,
    HeartbeatReply,
    consumer_heartbeat,
)
from tieringd.policies.group_deadlines import Sightings, due_now
from tieringd.policies.group_membership import (
    GroupError,
    GroupLimits,
    JoinAnswer,
    JoinRequest,
    Step,
    SyncRequest,
    end_round,
    heartbeat,
    join,
    join_answer,
    sync,
    sync_answer,
    without_members,
)
from tieringd.policies.group_offsets import changed_offsets, without_expired
from tieringd.storage.at_once import cancelled

log = structlog.get_logger(__name__)

T = TypeVar("T")
Transition = Callable[[ConsumerGroup], Step[T]]

TICK_SECONDS: Final = 0.5
ROUND_LOOK_SECONDS: Final = 1.0
"""How often a group is looked at while its members join or wait for assignments."""
LOOK_SECONDS: Final = 3.0
"""How often a group is looked at while other endpoints are alive."""
LONE_LOOK_SECONDS: Final = 10.0
"""How often a group is looked at while there is no other endpoint. A tool may change it."""
_OPEN_MAX: Final = 4096
_KEPT_SECONDS: Final = 60.0
"""How long a group without members here is kept in memory."""
KEEPING_SECONDS: Final = 600.0
"""How often one endpoint goes over all groups, for old offsets and for members that no endpoint has."""
_TELL_SECONDS: Final = 60.0
_TRIES: Final = 20
"""Writes of one batch. Each that fails means that another endpoint has written."""


@dataclass(eq=False, slots=True)
class _OpenGroup:
    """A group that this endpoint works on."""

    group_id: str
    known: GroupVersion | None = None
    """None before the first read."""
    confirmed_at: float = -math.inf
    """When the request was begun that has last confirmed the state, in loop time."""
    asked_at: float = 0.0
    heard: dict[str, float] = field(default_factory=dict)
    """When each member that is connected here was last heard, on the awake clock."""
    waiting: dict[str, int] = field(default_factory=dict)
    """The members whose requests wait for others, and how many requests."""
    round_seen_at: float = 0.0
    """When the current generation and state was first seen, on the awake clock."""
    queue: list[tuple[Transition[Any], asyncio.Future[Any]]] = field(default_factory=list)
    work: asyncio.Task[None] | None = None
    has_failed: bool = False
    """Whether the last request failed, which is logged once."""
    too_large_told_at: float = -math.inf
    """When the log was told of a request that would make the group too large."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    overtaken: dict[tuple[GroupTopic, int], int] = field(default_factory=dict)
    """Partitions whose offset another endpoint has changed, with the number of the find."""

    @property
    def group(self) -> ConsumerGroup:
        """Return the last known state."""
        return ConsumerGroup(self.group_id) if self.known is None else self.known.group


@dataclass(frozen=True, slots=True)
class Joined:
    """The answer to a member that has joined."""

    answer: JoinAnswer
    is_replaced: bool = False
    """Whether a static member came back, and keeps its assignment."""
    old_member_id: str = ""
    """The id that the static member had before."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """The state of this endpoint when a request of a group arrived."""

    was_here: bool
    """Whether the member was connected here."""
    finds: int
    """The coordinator's number of finds of offsets that another endpoint has changed."""


@dataclass(frozen=True, slots=True)
class CommitSource:
    """The origin of a commit. It helps to tell whether a newer commit has overtaken this one."""

    is_connected: Callable[[], bool]
    """Says whether the client still has the connection that the commit came on."""
    memberless: Collection[tuple[GroupTopic, int]] = ()
    """The committed partitions, if the consumer is no member: no generation tells which commit is newer."""


class OvertakenRequest(ProtocolViolation):
    """
    A request may be older than what its client has done at another endpoint since.

    Its connection is closed, and with it what the client has sent behind it: a commit there would undo a
    newer one. A client that is still there connects again, and its next request counts.
    """


class GroupCoordinator:
    """The groups that clients of this endpoint use. Belongs to one event loop."""

    def __init__(
        self,
        store: GroupStore,
        leases: EndpointLeases,
        *,
        limits: GroupLimits,
        metrics: GroupMetrics,
        awake: AwakeClock,
        now_ms: Callable[[], int],
        ages_ms: Callable[[], int],
    ) -> None:
        """
        Keep the arguments.

        *now_ms* dates commits. *ages_ms* is the time from which the age of offsets is counted.
        """
        self._store = store
        self._leases = leases
        self.limits = limits
        self._metrics = metrics
        self._awake = awake
        self.now_ms = now_ms
        self._ages_ms = ages_ms
        self._open: dict[str, _OpenGroup] = {}
        self._catalog: dict[str, GroupVersion] = {}
        self._catalog_lock = asyncio.Lock()
        self._finds = 0
        self._is_ending = False

    @property
    def endpoint_id(self) -> str:
        """Return the id of this endpoint's lease."""
        return self._leases.endpoint_id

    # -- requests ---------------------------------------------------------------------------------

    async def apply(
        self,
        group_id: str,
        transition: Transition[T],
        *,
        member_id: str = "",
        arrived: Arrival | None = None,
        source: CommitSource | None = None,
    ) -> T:
        """
        Make a transition, and return its reply when the bucket has what it changed.

        A transition may be made several times, each time from a newer state. Only the last reply counts.
        *arrived* is what `arrival` said when the request arrived, if that was not now. *source* is of a
        commit.

        Raises:
            OvertakenRequest: The client has gone on at another endpoint since, as far as can be told.
            ObjectTooLarge: The group would have more bytes than it may have.
            CorruptDataError: The group's object cannot be read.
            StorageUnavailable: The store does not answer. The change may be there, or come later.
        """
        before = self.arrival(group_id, member_id) if arrived is None else arrived
        one = self._opened(group_id)
        self._hear(one, member_id)

        def unless_overtaken(group: ConsumerGroup) -> Step[tuple[T] | None]:
            member = group.members.get(member_id)
            if before.was_here and member is not None and member.endpoint_id != self.endpoint_id:
                # The request may be older than what the member has committed there.
                return Step(group, None)
            if source is not None and _is_overtaken(one, source, before):
                return Step(group, None)
            step = transition(group)
            return Step(step.group, (step.reply,))

        reply = await self._applied(one, unless_overtaken)
        if reply is None:
            raise OvertakenRequest("a client may have gone on at another endpoint since its request")
        self._hear(one, member_id)
        return reply[0]

    def arrival(self, group_id: str, member_id: str) -> Arrival:
        """Return what this endpoint knows now, for a request that has just arrived."""
        one = self._open.get(group_id)
        return Arrival(one is not None and member_id in one.heard, self._finds)

    async def _applied(self, one: _OpenGroup, transition: Transition[T]) -> T:
        if self._is_ending:
            raise StorageUnavailable("this endpoint ends")
        arrived: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        one.queue.append((transition, arrived))
        if one.work is None:
            one.work = asyncio.get_running_loop().create_task(self._work(one))
        return await arrived

    async def read(self, group_id: str) -> ConsumerGroup:
        """
        Return a group as the bucket has it now. Raises as `apply` does.

        Every commit that was acknowledged before is in it.
        """
        return await self.apply(group_id, lambda group: Step(group, group))

    async def join(self, group_id: str, request: JoinRequest) -> Joined:
        """Let a member join, and wait until its generation has begun. Raises as `apply` does."""
        member_id = request.member.member_id
        if request.is_new and await self.is_full(group_id):
            return Joined(JoinAnswer(GroupError.POLICY_VIOLATION))
        reply = await self.apply(
            group_id, lambda group: join(group, request, self.limits), member_id=member_id
        )
        if reply.error is not GroupError.NONE:
            return Joined(JoinAnswer(reply.error))
        instance_id = request.member.instance_id
        answer = await self._awaited(
            group_id, member_id, lambda group: join_answer(group, member_id, reply, instance_id=instance_id)
        )
        if answer is None:
            return Joined(JoinAnswer(GroupError.COORDINATOR_NOT_AVAILABLE))
        return Joined(answer, is_replaced=reply.is_replaced, old_member_id=reply.old_member_id)

    async def sync(self, group_id: str, request: SyncRequest) -> tuple[GroupError, bytes]:
        """Return a member's assignment, when the leader has brought it. Raises as `apply` does."""
        member_id = request.member_id
        error = await self.apply(
            group_id, lambda group: sync(group, request, self.limits), member_id=member_id
        )
        if error is not GroupError.NONE:
            return error, b""
        answer = await self._awaited(
            group_id,
            member_id,
            lambda group: sync_answer(group, member_id, request.generation, instance_id=request.instance_id),
        )
        return answer or (GroupError.COORDINATOR_NOT_AVAILABLE, b"")

    async def heartbeat(
        self, group_id: str, member_id: str, instance_id: str | None, generation: int
    ) -> GroupError:
        """Note that a member is alive, and say whether its generation is. Raises as `apply` does."""

        def transition(group: ConsumerGroup) -> Step[GroupError]:
            return heartbeat(group, member_id, instance_id, generation, self.endpoint_id)

        one = self._opened(group_id)
        if self._is_known(one):
            step = transition(one.group)
            is_quiet = step.reply in {GroupError.NONE, GroupError.REBALANCE_IN_PROGRESS}
            if is_quiet and step.group == one.group:
                self._hear(one, member_id)
                return step.reply
        return await self.apply(group_id, transition, member_id=member_id)

    async def consumer_heartbeat(
        self,
        group_id: str,
        request: ConsumerHeartbeat,
        topic_of: Callable[[str], SubscribedTopic | None],
        *,
        arrived: Arrival | None = None,
    ) -> HeartbeatReply:
        """Let a member of the newer protocol join, go on or leave. Arguments and errors are as of `apply`."""
        if request.epoch == JOINS and await self.is_full(group_id):
            return HeartbeatReply(GroupError.POLICY_VIOLATION)
        now_ms = self.now_ms()
        is_again = False

        def decided(group: ConsumerGroup) -> Step[HeartbeatReply]:
            return consumer_heartbeat(group, request, topic_of, self.limits, now_ms=now_ms, is_again=is_again)

        def transition(group: ConsumerGroup) -> Step[HeartbeatReply]:
            nonlocal is_again
            step = decided(group)
            # A write of this step may take effect although its answer is lost.
            is_again = True
            return step

        one, member_id = self._opened(group_id), request.member.member_id
        # A member that tells what it reads may have given up partitions at another endpoint.
        if request.owned is None and self._is_known(one):
            step = decided(one.group)
            if step.reply.error is GroupError.NONE and step.group == one.group:
                self._hear(one, member_id)
                return step.reply
        return await self.apply(group_id, transition, member_id=member_id, arrived=arrived)

    def _is_known(self, one: _OpenGroup) -> bool:
        """Say whether the last known state is so young that a heartbeat may be answered from it."""
        age = self._now() - one.confirmed_at
        return self._leases.is_in_force and age < 2 * self._look_seconds(one)

    async def _awaited(
        self, group_id: str, member_id: str, answer: Callable[[ConsumerGroup], T | None]
    ) -> T | None:
        """Return what *answer* makes of the group when it makes something; None if the endpoint ends."""
        one = self._opened(group_id)
        with self._waiting(one, member_id):
            while (found := answer(one.group)) is None and not self._is_ending:
                changed = one.changed
                await changed.wait()
            self._hear(one, member_id)
            return found

    @contextmanager
    def _waiting(self, one: _OpenGroup, member_id: str) -> Iterator[None]:
        one.waiting[member_id] = one.waiting.get(member_id, 0) + 1
        try:
            yield
        finally:
            one.waiting[member_id] -= 1
            if not one.waiting[member_id]:
                del one.waiting[member_id]

    async def is_full(self, group_id: str) -> bool:
        """
        Say whether a group would be one too many. Raises as `apply` does.

        Endpoints do not agree on the number, so a few more may come to be at the same time.
        """
        if self._opened(group_id).group.exists:
            return False
        versions = await self._store.versions()
        if len(versions) < self.limits.groups:
            return False
        # Objects of deleted groups stay, so what they hold counts. Only those that changed are read.
        existing = {one.group_id for one in await self.all_groups()}
        return group_id not in existing and len(existing) >= self.limits.groups

    async def all_groups(self) -> list[ConsumerGroup]:
        """
        Return every group that exists and can be read. Only those that changed are read.

        Raises:
            StorageUnavailable: The store does not answer.
        """
        async with self._catalog_lock:
            versions = await self._store.versions()
            for group_id in self._catalog.keys() - versions.keys():
                del self._catalog[group_id]
            for group_id, version in versions.items():
                found = self._catalog.get(group_id)
                if found is None or found.version != version:
                    self._catalog[group_id] = await self._loaded(group_id, version)
        return [one.group for one in self._catalog.values() if one.group.exists]

    async def _loaded(self, group_id: str, version: str) -> GroupVersion:
        """Return a group; one that does not exist where its object, of *version*, cannot be read."""
        try:
            return await self._store.load(group_id)
        except CorruptDataError as error:
            log.warning("a group is left out of lists: it is damaged", group=group_id, error=str(error))
            return GroupVersion(ConsumerGroup(group_id), version)

    # -- writes -----------------------------------------------------------------------------------

    async def _work(self, one: _OpenGroup) -> None:
        """Make what is queued, in as few writes as possible."""
        try:
            while one.queue:
                batch, one.queue = one.queue, []
                await self._make(one, batch)
        finally:
            one.work = None

    async def _make(
        self, one: _OpenGroup, batch: Sequence[tuple[Transition[Any], asyncio.Future[Any]]]
    ) -> None:
        try:
            replies = await self._committed(one, [transition for transition, _ in batch])
        except ObjectTooLarge as error:
            if len(batch) > 1:
                # One of them is too large, and the others are not to pay for it.
                for each in batch:
                    await self._make(one, [each])
            else:
                self._metrics.refusals.inc()
                self._tell_too_large(one, error)
                _fail(batch, error)
        except Exception as error:  # noqa: BLE001 the requests that wait get it, a defect too
            is_away = isinstance(error, StorageUnavailable)
            (self._metrics.failures if is_away else self._metrics.refusals).inc()
            _fail(batch, error)
            if not one.has_failed:
                one.has_failed = True
                log.warning("a group cannot be read or written", group=one.group_id, error=str(error))
        else:
            one.has_failed = False
            for (_, arrived), reply in zip(batch, replies, strict=True):
                if not arrived.done():
                    arrived.set_result(reply)

    def _tell_too_large(self, one: _OpenGroup, error: ObjectTooLarge) -> None:
        """Log it, now and then: other commits of the group succeed, and a client may try again and again."""
        if self._now() - one.too_large_told_at >= _TELL_SECONDS:
            one.too_large_told_at = self._now()
            log.warning("a group is too large to be stored", group=one.group_id, error=str(error))

    async def _committed(self, one: _OpenGroup, transitions: Sequence[Transition[Any]]) -> list[Any]:
        began = self._now()
        is_confirmed = False
        for _ in range(_TRIES):
            if one.known is None:
                await self._look(one)
                is_confirmed = True
            assert one.known is not None, "it was just read"
            before, version = one.known.group, one.known.version
            group, replies = _folded(before, transitions)
            if group == before:
                if is_confirmed:
                    return replies
                is_confirmed = True
                await self._look(one)
                if one.known.version == version:
                    return replies
                continue
            begun_at = self._now()
            try:
                written = await self._store.commit(group, version)
            except PreconditionFailed:
                self._metrics.conflicts.inc()
                await self._look(one)
                is_confirmed = True
                continue
            except StorageUnavailable:
                # What the bucket has now is not known.
                one.confirmed_at = -math.inf
                raise
            is_begun = group.state is GroupState.COMPLETING or group.is_newer
            if is_begun and group.generation != before.generation:
                self._metrics.rebalances.inc()
                log.info(
                    "a group's generation has begun",
                    group=one.group_id,
                    generation=group.generation,
                    members=len(group.members),
                )
            self._take(one, written, begun_at)
            self._metrics.write_seconds.observe(self._now() - began)
            return replies
        raise StorageUnavailable(f"the group {one.group_id} was changed by others {_TRIES} times")

    async def _look(self, one: _OpenGroup) -> None:
        """Read the group again if it has changed."""
        begun_at, before = self._now(), one.known
        found = await self._store.load(one.group_id, before)
        if before is not None and found.version != before.version:
            self._finds += 1
            one.overtaken |= dict.fromkeys(changed_offsets(before.group, found.group), self._finds)
        self._take(one, found, begun_at)

    def _take(self, one: _OpenGroup, found: GroupVersion, confirmed_at: float) -> None:
        before, is_first = one.group, one.known is None
        one.known, one.confirmed_at = found, confirmed_at
        group = found.group
        if is_first or (group.generation, group.state) != (before.generation, before.state):
            one.round_seen_at = self._awake.now()
        for member_id, member in group.members.items():
            if member.endpoint_id == self.endpoint_id:
                one.heard.setdefault(member_id, self._awake.now())
        for member_id in list(one.heard):
            known = group.members.get(member_id)
            if known is None or known.endpoint_id != self.endpoint_id:
                del one.heard[member_id]
        if is_first or group != before:
            one.changed.set()
            one.changed = asyncio.Event()

    # -- time -------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Look at the groups, and remove what is silent, until cancelled."""
        watches: dict[_OpenGroup, asyncio.Task[None]] = {}
        try:
            while True:
                await asyncio.sleep(TICK_SECONDS)
                for one in [one for one, watch in watches.items() if watch.done()]:
                    watches.pop(one).result()
                for one in self._open.values():
                    for member_id in one.waiting:
                        self._hear(one, member_id)
                    # A group whose object is slow holds up no other: its watch goes on beside the next ones.
                    if one not in watches:
                        watches[one] = asyncio.get_running_loop().create_task(self._watch(one))
                self._metrics.groups.set(len(self._open))
                self._metrics.members.set(sum(len(one.heard) for one in self._open.values()))
                self._metrics.endpoints.set(len(self._leases.all()))
        finally:
            await cancelled(watches.values())

    async def run_keeping(self) -> None:
        """Go over all groups from time to time, until cancelled."""
        while True:
            await asyncio.sleep(KEEPING_SECONDS)
            if self._keeps_all:
                await self.keep_all()

    @property
    def _keeps_all(self) -> bool:
        """Say whether it is this endpoint that goes over all groups: the first of those that are alive."""
        return self._leases.is_in_force and self._leases.all()[0] == self._leases.own

    async def keep_all(self) -> None:
        """Remove offsets that are too old, and open groups with members whose endpoint has died."""
        try:
            groups = await self.all_groups()
        except TieringError as error:
            log.warning("groups are not gone over", error=str(error))
            return
        for group in groups:
            with suppress(TieringError):
                await self._keep(group)

    async def _keep(self, group: ConsumerGroup) -> None:
        endpoints = {each.endpoint_id for each in group.members.values()}
        if any(self._leases.gone_since(endpoint_id) is not None for endpoint_id in endpoints):
            # It is watched from now on, until its members have come here or are removed.
            await self.read(group.group_id)
        now_ms, retention_ms = self._ages_ms(), self.limits.offsets_retention_ms
        if without_expired(group, now_ms=now_ms, retention_ms=retention_ms) != group:
            kept = await self.apply(group.group_id, lambda found: _expired(found, now_ms, retention_ms))
            log.info("offsets of a group without members have expired", group=group.group_id, kept=kept)

    async def _watch(self, one: _OpenGroup) -> None:
        now = self._now()
        is_used = bool(one.heard or one.waiting) or self._is_orphaned(one)
        if not is_used:
            # No request to the store for it: clients may name any group.
            is_open = self._open.get(one.group_id) is one
            # A request may have made room by closing it since it was listed.
            if is_open and now - one.asked_at >= _KEPT_SECONDS and self._may_close(one):
                del self._open[one.group_id]
            return
        if now - one.confirmed_at >= self._look_seconds(one) and one.work is None:
            try:
                await self._applied(one, lambda group: Step(group, None))
            except TieringError as error:
                log.debug("a group is not looked at", group=one.group_id, error=str(error))
                return
        if one.group.members and one.work is None:
            await self._remove_due(one)

    def _is_orphaned(self, one: _OpenGroup) -> bool:
        """Say whether a member's endpoint has died, and no other one has heard the member since."""
        endpoints = {each.endpoint_id for each in one.group.members.values()}
        return any(self._leases.gone_since(endpoint_id) is not None for endpoint_id in endpoints)

    def _may_close(self, one: _OpenGroup) -> bool:
        is_used = one.heard or one.waiting or one.queue or one.work is not None
        return not is_used and not self._is_orphaned(one)

    async def _remove_due(self, one: _OpenGroup) -> None:
        group = one.group
        seen = Sightings(
            self.endpoint_id,
            {name: _ms(heard_at) for name, heard_at in one.heard.items()},
            self._gone_since_ms,
            _ms(one.round_seen_at),
            _ms(self._awake.now()),
        )
        due = due_now(group, seen, self.limits)
        if not due:
            return
        watched = {name: group.members[name].endpoint_id for name in due.expired}
        heard = dict(one.heard)
        now_ms = self.now_ms()

        def removed(found: ConsumerGroup) -> Step[int]:
            # A member that this or another endpoint has heard meanwhile stays.
            gone = {
                name
                for name, endpoint_id in watched.items()
                if name in found.members
                and found.members[name].endpoint_id == endpoint_id
                and one.heard.get(name) == heard.get(name)
            }
            changed = without_members(found, gone, now_ms=now_ms)
            if due.is_round_over:
                changed = end_round(changed, generation=group.generation, state=group.state, now_ms=now_ms)
            return Step(changed, len(gone))

        try:
            count = await self._applied(one, removed)
        except TieringError as error:
            log.warning("silent members stay in their group for now", group=one.group_id, error=str(error))
            return
        if count:
            self._metrics.expired_members.inc(count)
            log.info("members of a group are removed: they have gone silent", group=one.group_id, count=count)

    def _gone_since_ms(self, endpoint_id: str) -> int | None:
        since = self._leases.gone_since(endpoint_id) if self._leases.is_judging else None
        return None if since is None else _ms(since)

    def _look_seconds(self, one: _OpenGroup) -> float:
        if one.group.state in {GroupState.PREPARING, GroupState.COMPLETING}:
            return ROUND_LOOK_SECONDS
        return LONE_LOOK_SECONDS if self._leases.is_alone else LOOK_SECONDS

    def _opened(self, group_id: str) -> _OpenGroup:
        one = self._open.get(group_id)
        if one is None:
            self._make_room()
            one = self._open[group_id] = _OpenGroup(group_id, round_seen_at=self._awake.now())
        one.asked_at = self._now()
        return one

    def _make_room(self) -> None:
        """Forget a group that is not used now, where too many are known. Clients choose the names."""
        if len(self._open) < _OPEN_MAX:
            return
        spare = next((one for one in self._open.values() if self._may_close(one)), None)
        if spare is None:
            raise StorageUnavailable(f"this endpoint works on {_OPEN_MAX} groups already")
        del self._open[spare.group_id]

    def _hear(self, one: _OpenGroup, member_id: str) -> None:
        member = one.group.members.get(member_id)
        if member is not None and member.endpoint_id == self.endpoint_id:
            one.heard[member_id] = self._awake.now()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    # -- the end ----------------------------------------------------------------------------------

    def end_waits(self) -> None:
        """Answer requests that wait, and take no further ones: their clients find another endpoint."""
        self._is_ending = True
        for one in self._open.values():
            one.changed.set()

    async def close(self) -> None:
        """Wait until the writes that are under way have ended."""
        works = [one.work for one in self._open.values() if one.work is not None]
        if works:
            await asyncio.wait(works)


def _is_overtaken(one: _OpenGroup, source: CommitSource, before: Arrival) -> bool:
    """
    Say whether a client may have committed newer offsets at another endpoint since this commit arrived.

    A client that gives up on an endpoint closes its connection, and the kernel knows that also while this
    process stands still. If the close does not arrive, a commit without a member finds its offsets changed.
    """
    if not source.is_connected():
        return True
    return any(one.overtaken.get(partition, 0) > before.finds for partition in source.memberless)


def _folded(group: ConsumerGroup, transitions: Sequence[Transition[Any]]) -> tuple[ConsumerGroup, list[Any]]:
    replies = []
    for transition in transitions:
        step = transition(group)
        group = step.group
        replies.append(step.reply)
    return group, replies


def _fail(batch: Sequence[tuple[Transition[Any], asyncio.Future[Any]]], error: Exception) -> None:
    for _, arrived in batch:
        if not arrived.done():
            arrived.set_exception(error)


def _expired(group: ConsumerGroup, now_ms: int, retention_ms: int) -> Step[int]:
    kept = without_expired(group, now_ms=now_ms, retention_ms=retention_ms)
    return Step(kept, sum(len(partitions) for partitions in kept.offsets.values()))


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
