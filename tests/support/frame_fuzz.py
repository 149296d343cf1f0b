"""
Frames of Kafka's protocol, mutated from valid ones by a seed, for every API that a listener reads.

`make fuzz MINUTES=60` runs the tests that use them for longer.
"""

from __future__ import annotations

import os
import time
from random import Random
from typing import TYPE_CHECKING, Any

from tests.fakes.gateway_peers import fetch, produce
from tests.support.kafka_messages import fields_of, milliseconds, request_frame, request_module

if TYPE_CHECKING:
    from collections.abc import Iterator

_FRAMES = 1500
"""How many frames a usual run sends to each listener."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def seed_frames() -> list[bytes]:
    """Return valid requests of many APIs and versions."""
    messages: list[Any] = [fetch(("old", "x"), version=version) for version in (4, 7, 11, 12)]
    messages += [_offsets(version) for version in (1, 2, 4, 6, 9)]
    messages += [_deletion(version) for version in (0, 2)]
    messages += [_epochs(version) for version in (3, 4)]
    messages += [_metadata(version) for version in (0, 9, 12)]
    messages += [request_module(35, version).DescribeLogDirsRequest(topics=None) for version in (1, 4)]
    messages += [one for name, *versions in _GROUP_REQUESTS for one in _of_groups(name, *versions)]
    frames = [bytes(request_frame(message)) for message in messages]
    frames += [_cut(bytes(request_frame(produce(version, acks=1)))) for version in (3, 9, 12)]
    return frames


_GROUP_REQUESTS: tuple[tuple[Any, ...], ...] = (
    ("FindCoordinatorRequest", 10, 0, 3, 6),
    ("JoinGroupRequest", 11, 2, 5, 9),
    ("HeartbeatRequest", 12, 0, 4),
    ("LeaveGroupRequest", 13, 0, 5),
    ("SyncGroupRequest", 14, 0, 5),
    ("DescribeGroupsRequest", 15, 0, 6),
    ("ListGroupsRequest", 16, 0, 5),
    ("OffsetCommitRequest", 8, 2, 9),
    ("OffsetFetchRequest", 9, 1, 7, 9),
    ("DeleteGroupsRequest", 42, 0, 2),
    ("OffsetDeleteRequest", 47, 0),
    ("ConsumerGroupHeartbeatRequest", 68, 0, 1),
    ("ConsumerGroupDescribeRequest", 69, 0, 1),
)


def _of_groups(name: str, api_key: int, *versions: int) -> Iterator[Any]:
    """Yield requests of consumer groups, each field with a value that is right for most."""
    for version in versions:
        module = request_module(api_key, version)

        def made(schema: str, module: Any = module, **values: Any) -> Any:
            found = getattr(module, schema, None)
            return None if found is None else found(**fields_of(found, **values))

        commit = made("OffsetCommitRequestPartition", partition_index=0, committed_offset=1,
                      committed_leader_epoch=1, committed_metadata="m")  # fmt: skip
        topic = (
            made("OffsetCommitRequestTopic", name="old", partitions=(commit,))
            or made("OffsetDeleteRequestTopic", name="old", partitions=(
                made("OffsetDeleteRequestPartition", partition_index=0),))
            or made("OffsetFetchRequestTopics", name="old", partition_indexes=(0, 1))
            or made("OffsetFetchRequestTopic", name="old", partition_indexes=(0, 1))
        )  # fmt: skip
        asked = made("OffsetFetchRequestGroup", group_id="g", topics=(topic,))
        values: dict[str, Any] = {
            "key": "g", "coordinator_keys": ("g",), "key_type": 0, "group_id": "g", "member_id": "",
            "session_timeout": milliseconds(9000), "rebalance_timeout": milliseconds(1),
            "group_instance_id": None, "protocol_type": "consumer", "reason": None, "generation_id": -1,
            "generation_id_or_member_epoch": -1, "protocol_name": "range", "groups_names": ("g",),
            "protocols": (made("JoinGroupRequestProtocol", name="range", metadata=b"m"),),
            "members": (made("MemberIdentity", member_id="m", group_instance_id=None, reason=None),),
            "assignments": (made("SyncGroupRequestAssignment", member_id="m", assignment=b"a"),),
            "groups": (asked or "g",), "include_authorized_operations": True, "states_filter": ("Stable",),
            "types_filter": (), "topics": (topic,), "require_stable": False, "member_epoch": 0,
            "instance_id": None, "rack_id": None, "subscribed_topic_names": ("old",),
            "subscribed_topic_regex": None, "server_assignor": None, "topic_partitions": (),
            "group_ids": ("g",), "retention_time": milliseconds(1),
        }  # fmt: skip
        schema = getattr(module, name)
        known = fields_of(schema, **values)
        if "retention_time" in known:
            del known["retention_time"]
        yield schema(**known)


def _cut(frame: bytes) -> bytes:
    return (900).to_bytes(4) + frame[4:904]


def _offsets(version: int) -> Any:
    module = request_module(2, version)
    partition = module.ListOffsetsPartition(partition_index=0, timestamp=-2)
    topic = module.ListOffsetsTopic(name="old", partitions=(partition,))
    fields = fields_of(module.ListOffsetsRequest, isolation_level=0)
    return module.ListOffsetsRequest(replica_id=-1, topics=(topic,), **fields)


def _deletion(version: int) -> Any:
    module = request_module(21, version)
    partition = module.DeleteRecordsPartition(partition_index=0, offset=5)
    topic = module.DeleteRecordsTopic(name="old", partitions=(partition,))
    return module.DeleteRecordsRequest(topics=(topic,), timeout=milliseconds(9))


def _epochs(version: int) -> Any:
    module = request_module(23, version)
    partition = module.OffsetForLeaderPartition(partition=0, leader_epoch=1)
    topic = module.OffsetForLeaderTopic(topic="old", partitions=(partition,))
    return module.OffsetForLeaderEpochRequest(topics=(topic,), replica_id=-1)


def _metadata(version: int) -> Any:
    module = request_module(3, version)
    fields = fields_of(
        module.MetadataRequest,
        allow_auto_topic_creation=False,
        include_cluster_authorized_operations=False,
        include_topic_authorized_operations=False,
    )
    ids = fields_of(module.MetadataRequestTopic, topic_id=None)
    return module.MetadataRequest(topics=(module.MetadataRequestTopic(name="old", **ids),), **fields)


USER, PASSWORD = "reader", "password"
_TOKENS = (
    f"\0{USER}\0{PASSWORD}",
    f"{USER}\0{USER}\0{PASSWORD}",
    f"\0{USER}\0wrong",
    "\0nobody\0wrong",
    f"n,,n={USER},r=abcdef",
    f"y,a={USER},n={USER},r=abcdef",
    "p=tls-unique,,n=a=2Cb=3Dc,r=abcdef",
    "c=biws,r=abcdef,p=QUJD",
)


def login_frames(random: Random) -> list[bytes]:
    """
    Return the requests of a login, of which half succeed as `USER`, and the others are mutated.

    A token follows in these, or two, or none.
    """
    handshake, authenticate = request_module(17, 1), request_module(36, random.randrange(3))
    if random.random() < 0.5:
        token = authenticate.SaslAuthenticateRequest(auth_bytes=_TOKENS[0].encode())
        return [
            bytes(request_frame(one)) for one in (handshake.SaslHandshakeRequest(mechanism="PLAIN"), token)
        ]
    mechanism = random.choice(["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "GSSAPI", "x" * 999])
    # Version 0 is refused at once.
    messages: list[Any] = [
        request_module(17, random.choice([1, 1, 1, 0])).SaslHandshakeRequest(mechanism=mechanism)
    ]
    for _ in range(random.randrange(3)):
        token = random.choice(_TOKENS).encode()
        messages.append(authenticate.SaslAuthenticateRequest(auth_bytes=token))
    frames = [bytes(request_frame(message)) for message in messages]
    return [mutated(random, one) if random.random() < 0.5 else one for one in frames]


def is_of_login(frame: bytes) -> bool:
    """Say whether a frame is one of SaslHandshake or SaslAuthenticate."""
    return int.from_bytes(frame[4:6]) in {17, 36}


def mutated(random: Random, frame: bytes) -> bytes:
    """Return *frame* with a few bytes changed after its API and version, or cut off; its size fits."""
    changed = bytearray(frame)
    if random.random() < 0.25:
        # The longest varint announces 30 billion entries.
        at = random.randrange(12, len(changed))
        changed[at : at + 1] = b"\xff\xff\xff\xff\x7f"
        changed[:4] = (len(changed) - 4).to_bytes(4)
        return bytes(changed)
    for _ in range(random.randint(1, 6)):
        changed[random.randrange(8, len(changed))] = random.choice(
            [0, 1, 127, 128, 255, random.randrange(256)]
        )
    if random.random() < 0.3:
        changed = changed[: random.randrange(12, len(changed))]
    if random.random() < 0.3:
        at = random.randrange(12, len(changed) + 1)
        changed[at : at + random.randint(0, 1)] = random.choice(
            [b"\xff\xff\xff\xff\x7f", b"\x7f\xff\xff\xff", random.randbytes(200)]
        )
    changed[:4] = (len(changed) - 4).to_bytes(4)
    return bytes(changed)


def fuzzed(seed: int) -> Iterator[list[bytes]]:
    """
    Yield the frames of one connection after another, with logins before and between mutated requests.

    There is a fixed number, or they go on for as many minutes as TIERINGD_FUZZ_MINUTES says.
    """
    random, frames = Random(seed), seed_frames()
    minutes = float(os.environ.get("TIERINGD_FUZZ_MINUTES", "0"))
    ends_at, sent = time.monotonic() + 60 * minutes, 0
    while sent < _FRAMES or time.monotonic() < ends_at:
        session = login_frames(random) if random.random() < 0.5 else []
        for _ in range(8):
            session.append(mutated(random, random.choice(frames)))
            if random.random() < 0.05:
                session += login_frames(random)
        sent += len(session)
        yield session


def resident_bytes() -> int:
    """Return how much memory of this process is in use."""
    with open("/proc/self/statm") as statm:  # noqa: PTH123  a file of the kernel
        return int(statm.read().split()[1]) * _PAGE_BYTES
