"""
What is fuzzed: each parser of bytes that come from a disk, a bucket or the network, and the configuration.

A parser returns a value or raises one of its documented errors, for any bytes. Documents with a checksum are
fuzzed twice: as they are, and below the checksum, where a program with a fault may have written anything.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import UUID

from crc32c import crc32c
from kio.schema.errors import ErrorCode

from tests.builders import batch, segment_bytes
from tests.redpanda_builders import base_index, ordinary_log
from tests.support.kafka_messages import (
    FETCH_VERSIONS,
    PRODUCE_VERSIONS,
    fetch_request,
    fetch_response,
    fields_of,
    milliseconds,
    produce_response,
    request_frame,
    request_module,
    response_frame,
    response_module,
)
from tieringd.compiled.loading import load, loaded_walk
from tieringd.compiled.walks import BatchWalk
from tieringd.config.load import parse_config
from tieringd.errors import ConfigError, CorruptDataError, ProtocolViolation
from tieringd.formats import manifest_codec, sidecar
from tieringd.formats.access_times import decode_access_times, encode_access_times
from tieringd.formats.batch_check import check_batches
from tieringd.formats.batch_offsets import ExpectedBatches
from tieringd.formats.cache_names import parse_cache_name
from tieringd.formats.checkpoints import (
    parse_epoch_checkpoint,
    parse_meta_properties,
    parse_offset_checkpoint,
    parse_partition_metadata,
)
from tieringd.formats.compression import Codec, compress, decompress
from tieringd.formats.disk_state import decode_disk_state, decode_quota_record
from tieringd.formats.envelope import ENVELOPE_BYTES, seal
from tieringd.formats.history_link import decode_history_link
from tieringd.formats.index_files import parse_offset_index, parse_time_index, parse_transaction_index
from tieringd.formats.job_records import decode_rewriting
from tieringd.formats.kafka_wire.cursor import MessageWalk
from tieringd.formats.kafka_wire.fetch import FetchResponseWalk, asked_of
from tieringd.formats.kafka_wire.messages import decode_request, decode_response
from tieringd.formats.kafka_wire.produce import ProduceRequestWalk, ProduceResponseWalk, acks_of
from tieringd.formats.kafka_wire.request_header import RequestHead, client_id_of
from tieringd.formats.kafka_wire.sasl import (
    BearerToken,
    PlainToken,
    ScramFinal,
    ScramFirst,
    is_accepted,
    mechanism_of,
    token_of,
)
from tieringd.formats.log_names import parse_directory_name, parse_file_name
from tieringd.formats.object_keys import (
    parse_data_key,
    parse_disk_state_key,
    parse_history_link_key,
    parse_joined_part_key,
    parse_quarantined_key,
    parse_topic_manifest_key,
)
from tieringd.formats.record_batch import HEADER_BYTES, parse_header
from tieringd.formats.records import iter_records
from tieringd.formats.recovery_mark import RecoveryMark, decode_mark, encode_mark
from tieringd.formats.redpanda_index import parse_base_index
from tieringd.formats.redpanda_names import parse_partition_directory, parse_raw_file_name
from tieringd.formats.redpanda_reframe import SegmentReframer
from tieringd.formats.restored_batches import restored_batch
from tieringd.formats.segment_scan import SegmentScanner
from tieringd.formats.sidecar import decode_sidecar
from tieringd.formats.topic_manifest import decode_topic_manifest
from tieringd.model.offset_translation import OffsetTranslation

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
_RECORDS_MAX = 100_000
_DECOMPRESSED_MAX = 16 << 20
_CRC_AT, _CRC_FROM = 17, 21
_LENGTH_AT = 8


@dataclass(frozen=True)
class Target:
    """One parser."""

    name: str
    parse: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    """Sound inputs."""
    errors: tuple[type[Exception], ...] = (CorruptDataError,)
    """What the parser documents."""


def _files(*patterns: str) -> tuple[bytes, ...]:
    found = [path.read_bytes() for pattern in patterns for path in sorted(GOLDEN.glob(pattern))]
    assert found, f"no golden file is called {patterns}"
    return tuple(found)


def _sealed(magic: bytes, version: int, decode: Callable[[bytes], object]) -> Callable[[bytes], object]:
    return lambda body: decode(seal(magic, version, body))


def _bodies(data: Iterable[bytes]) -> tuple[bytes, ...]:
    return tuple(one[ENVELOPE_BYTES:] for one in data)


def _inflated(data: Iterable[bytes]) -> tuple[bytes, ...]:
    return tuple(map(zlib.decompress, _bodies(data)))


def _deflated(decode: Callable[[bytes], object]) -> Callable[[bytes], object]:
    return lambda body: decode(zlib.compress(body, 1))


def _spillover(data: bytes) -> object:
    """Decode a spillover manifest as far as its bytes decide: the name and partition come from elsewhere."""
    return manifest_codec._part(*manifest_codec.unpack_body(data))


def _texts(parse: Callable[[str], object]) -> Callable[[bytes], object]:
    """Names come from directory listings, in which bytes that are no text are surrogates."""
    return lambda data: parse(data.decode(errors="surrogateescape"))


_LOGS = _files("codec-*/*.log", "transactions/*.log", "compacted/*.log")
_BATCHES = (
    batch(0, [b"a", b"b"]),
    *(log[: _LENGTH_AT + 4 + struct.unpack_from(">i", log, _LENGTH_AT)[0]] for log in _LOGS),
)


def _with_checksum(data: bytes) -> memoryview:
    """Return *data* as a batch that fills it, with the right length and checksum."""
    fixed = bytearray(data)
    if len(fixed) >= HEADER_BYTES:
        struct.pack_into(">i", fixed, _LENGTH_AT, len(fixed) - _LENGTH_AT - 4)
        struct.pack_into(">I", fixed, _CRC_AT, crc32c(memoryview(fixed)[_CRC_FROM:]))
    return memoryview(bytes(fixed))


def _records(data: bytes) -> object:
    view = _with_checksum(data)
    parse_header(view)
    return list(islice(iter_records(view, limit_bytes=_DECOMPRESSED_MAX), _RECORDS_MAX))


def _walk(in_machine_code: bool) -> BatchWalk | None:  # noqa: FBT001 - a helper
    return (loaded_walk() or load()) if in_machine_code else None


def _scanned(data: bytes, *, is_active: bool, in_machine_code: bool = False) -> object:
    next_offset = None if is_active else 1 << 40
    scanner = SegmentScanner(0, next_offset, index_interval_bytes=100, walk=_walk(in_machine_code))
    view = memoryview(data)
    while not scanner.is_done:
        consumed = scanner.feed(view)
        if not consumed:
            break
        view = view[consumed:]
    return scanner.finish(len(view))


def _reframed(data: bytes) -> object:
    reframer, out = SegmentReframer(OffsetTranslation(0, 0), None, leader_epoch=3), bytearray()
    view = memoryview(data)
    while not reframer.is_done:
        consumed = reframer.feed(view, out)
        if not consumed:
            break
        view = view[consumed:]
    return reframer.finish(view)


def _checked(data: bytes, *, in_machine_code: bool = False) -> object:
    check_batches(memoryview(data), ExpectedBatches(0, 1 << 40), walk=_walk(in_machine_code))
    return None


def _restored(data: bytes) -> object:
    view = _with_checksum(data)
    parse_header(view)
    return restored_batch(view)


def _decompressed(codec: Codec, data: bytes) -> object:
    return bytes(decompress(codec, memoryview(data), limit_bytes=_DECOMPRESSED_MAX))


_PRODUCE, _FETCH, _LIST_OFFSETS, _METADATA, _API_VERSIONS = 0, 1, 2, 3, 18
_RESPONSES: dict[int, range] = {_LIST_OFFSETS: range(1, 10), _METADATA: range(13)}
"""The versions of the responses that kio decodes for us."""


def _request(data: bytes) -> object:
    """Read a client's request as the gateway does."""
    view = memoryview(data)
    head = RequestHead.read(view)
    client_id_of(view)
    if not head.is_known:
        return None
    if head.api_key == _FETCH:
        return asked_of(view, head)
    if head.api_key == _PRODUCE:
        acks_of(view, head)
        return ProduceRequestWalk(head).feed(view)
    return decode_request(view, head)


def _walked(make: Callable[[int, int], MessageWalk], data: bytes) -> object:
    """Feed a response to a walk. The first byte is the version, the second says how it arrives in pieces."""
    if len(data) < _BEFORE_RESPONSE:
        return None
    version, step, body = data[0], 16 * (data[1] + 1), memoryview(data)[_BEFORE_RESPONSE:]
    walk, kept = make(version, max(0, len(body) - 4)), b""
    for begin in range(0, len(body), step):
        kept += body[begin : begin + step]
        kept = kept[walk.feed(memoryview(kept)) :]
    return walk.is_done


_BEFORE_RESPONSE = 2


def _fetch_walk(version: int, size: int) -> MessageWalk:
    return FetchResponseWalk(FETCH_VERSIONS[version % len(FETCH_VERSIONS)], size)


def _produce_walk(version: int, size: int) -> MessageWalk:
    return ProduceResponseWalk(PRODUCE_VERSIONS[version % len(PRODUCE_VERSIONS)], size)


def _response(api_key: int, data: bytes) -> object:
    """Decode a response. The first byte is the version."""
    if not data:
        return None
    versions = _RESPONSES[api_key]
    return decode_response(memoryview(data)[1:], api_key, versions[data[0] % len(versions)])


def _requests() -> tuple[bytes, ...]:
    topics = {"orders": {0: {"fetch_offset": 0}, 1: {"fetch_offset": 7}}}
    fetches = [fetch_request(version, topics) for version in FETCH_VERSIONS if version <= _LAST_BY_NAME]
    versions = request_module(_API_VERSIONS, 3).ApiVersionsRequest(
        client_software_name="fuzz", client_software_version="1"
    )
    return tuple(bytes(request_frame(one)) for one in (*fetches, versions))


_LAST_BY_NAME = 12
"""The last version of Fetch that names topics; later ones have their ids."""


def _login_frame(data: bytes) -> object:
    """Read a frame as each message of a login, as a listener does that does not know which one it is."""
    view = memoryview(data)
    head = RequestHead.read(view)
    answers = [partial(is_accepted, version=head.version, mechanism=one) for one in ("PLAIN", "OAUTHBEARER")]
    for read in (mechanism_of, partial(token_of, head=head), *answers):
        try:
            read(view)
        except ProtocolViolation:
            continue
    return token_of(view, head)


def _login_frames() -> tuple[bytes, ...]:
    handshake = request_module(17, 1).SaslHandshakeRequest(mechanism="PLAIN")
    tokens = (request_module(36, each).SaslAuthenticateRequest(auth_bytes=b"\0a\0b") for each in range(3))
    return tuple(bytes(request_frame(one)) for one in (handshake, *tokens))


def _fetch_responses() -> tuple[bytes, ...]:
    partition = {"high_watermark": 9, "records": _BATCHES[0], "aborted_transactions": [(1, 2), (3, 4)]}
    topics = {"orders": {0: partition, 1: {"error_code": 1}}}
    return tuple(
        bytes([number, number]) + bytes(response_frame(fetch_response(version, topics)))
        for number, version in enumerate(FETCH_VERSIONS)
        if version <= _LAST_BY_NAME
    )


def _produce_responses() -> tuple[bytes, ...]:
    topics = {"orders": {0: {}, 1: {"error_code": 3, "record_errors": [(0, "no")]}}}
    return tuple(
        bytes([number, number]) + bytes(response_frame(produce_response(version, topics)))
        for number, version in enumerate(PRODUCE_VERSIONS)
        if version <= _LAST_BY_NAME
    )


def _kio_responses(api_key: int) -> tuple[bytes, ...]:
    """Return a response of each version, with one topic, one partition and one broker."""
    found = []
    for number, version in enumerate(_RESPONSES[api_key]):
        module = response_module(api_key, version)
        made = _metadata(module) if api_key == _METADATA else _list_offsets(module)
        found.append(bytes([number]) + bytes(response_frame(made)))
    return tuple(found)


def _list_offsets(module: Any) -> Any:
    partition = module.ListOffsetsPartitionResponse
    answer = partition(
        **fields_of(partition, partition_index=1, error_code=ErrorCode.none, offset=42, leader_epoch=3)
    )
    topic = module.ListOffsetsTopicResponse(name="orders", partitions=(answer,))
    schema = module.ListOffsetsResponse
    return schema(**fields_of(schema, throttle_time=milliseconds(0), topics=(topic,)))


def _metadata(module: Any) -> Any:
    part, topic = module.MetadataResponsePartition, module.MetadataResponseTopic
    partition = part(
        **fields_of(
            part,
            error_code=ErrorCode.none,
            partition_index=0,
            leader_id=1,
            leader_epoch=4,
            replica_nodes=(1, 2),
            isr_nodes=(1,),
            offline_replicas=(),
        )
    )
    named = topic(
        **fields_of(
            topic,
            error_code=ErrorCode.none,
            name="orders",
            topic_id=UUID(int=7),
            is_internal=False,
            partitions=(partition,),
        )
    )
    broker = module.MetadataResponseBroker
    schema = module.MetadataResponse
    return schema(
        **fields_of(
            schema,
            throttle_time=milliseconds(0),
            brokers=(broker(**fields_of(broker, node_id=1, host="localhost", port=9092, rack=None)),),
            cluster_id="cluster",
            controller_id=1,
            topics=(named,),
        )
    )


def _config(data: bytes) -> object:
    return parse_config(data.decode(errors="replace"), source="fuzzed.yaml", environ={})


_NAMES = (
    b"orders-0",
    b"pay.ments_eu-1-12",
    b"orders-0.0123456789abcdef0123456789abcdef-delete",
    b"00000000000000000000.log",
    b"00000000000000000042.timeindex.deleted",
    b"0-1-v1.log",
    b"12_34",
)
_KEYS = (
    b"0a1b2c3d/cluster/orders/0_id/0-9-100-1-0123456789abcdef0123456789abcdef.log",
    b"0a1b2c3d/cluster/orders/0_id/rewritten-0-9-100-1-0123456789abcdef0123456789abcdef.log",
    b"cluster/meta/topics/orders_id/topic_manifest.json",
    b"0a1b2c3d/cluster/meta/orders/0_id/manifest.0.9.1.2",
    b"quarantine/1700000000000/0a1b2c3d/cluster/orders/0_id/x.log",
    b"cluster/meta/disks/3.json",
)


def targets() -> tuple[Target, ...]:
    """Return all targets."""
    manifests, parts = _files("own/partition-manifest*"), _files("own/spillover-manifest*")
    indexes = _files("own/segment-index*")
    manifest_of = _sealed(manifest_codec.MAGIC, manifest_codec.VERSION, manifest_codec.decode_manifest)
    times = encode_access_times({"a/b": 1_700_000_000_000, "c": 1_700_000_000_001})
    redpanda = ordinary_log()
    mark = encode_mark(RecoveryMark(7, "id", "read_committed", 3, 0, 0, 2, 2, (6, 9, 1))).encode()
    at_fault = (ProtocolViolation,)
    return (
        Target("manifest", manifest_codec.decode_manifest, manifests),
        Target("manifest body", _deflated(manifest_of), _inflated(manifests)),
        Target("compressed manifest body", manifest_of, _bodies(manifests)),
        Target("spillover manifest body", _deflated(_spillover), _inflated(parts), manifest_codec.UNREADABLE),
        Target("segment index", decode_sidecar, indexes),
        Target(
            "segment index body", _sealed(sidecar.MAGIC, sidecar.VERSION, decode_sidecar), _bodies(indexes)
        ),
        Target("login frame", _login_frame, _login_frames(), (ProtocolViolation,)),
        Target("token of PLAIN", PlainToken.read, (b"\0alice\0secret", b"a\0a\0b"), (ProtocolViolation,)),
        Target(
            "token of OAUTHBEARER",
            BearerToken.read,
            (
                b"n,,\1auth=Bearer eyJhbGciOiJub25lIn0.eyJzdWIiOiJhbGljZSJ9.\1\1",
                b"n,,\1auth=bearer a.e30.c\1\1",
            ),
            (ProtocolViolation,),
        ),
        Target(
            "first message of SCRAM",
            ScramFirst.read,
            (b"n,,n=a=2Cb,r=c", b"y,a=a,n=a,r=c"),
            (ProtocolViolation,),
        ),
        Target("last message of SCRAM", ScramFinal.read, (b"c=biws,r=ab,p=eA==",), (ProtocolViolation,)),
        Target("topic manifest", decode_topic_manifest, _files("own/topic-manifest*")),
        Target("history link", decode_history_link, _files("own/history-link*")),
        Target("disk state", decode_disk_state, _files("own/disk-state*")),
        Target("quota record", decode_quota_record, _files("own/quota-record*")),
        Target("rewriting", partial(decode_rewriting, source="fuzzed"), _files("own/rewriting*")),
        Target("access times", decode_access_times, (times,)),
        Target("recovery mark", lambda data: decode_mark(7, data.decode(errors="replace")), (mark,)),
        Target("epoch checkpoint", parse_epoch_checkpoint, _files("*/leader-epoch-checkpoint")),
        Target("offset checkpoint", parse_offset_checkpoint, _files("*-offset-checkpoint")),
        Target("partition metadata", parse_partition_metadata, _files("*/partition.metadata")),
        Target("meta.properties", parse_meta_properties, _files("meta.properties")),
        Target("offset index", partial(parse_offset_index, base_offset=0), _files("*/*.index")),
        Target("time index", partial(parse_time_index, base_offset=0), _files("*/*.timeindex")),
        Target("transaction index", parse_transaction_index, _files("*/*.txnindex")),
        Target("directory name", _texts(parse_directory_name), _NAMES),
        Target("file name", _texts(parse_file_name), _NAMES),
        Target("Redpanda directory", _texts(parse_partition_directory), _NAMES),
        Target("Redpanda file name", _texts(parse_raw_file_name), _NAMES),
        Target("cache name", _texts(partial(parse_cache_name, buckets=16)), _KEYS),
        Target("data key", _texts(parse_data_key), _KEYS),
        Target("joined part key", _texts(parse_joined_part_key), _KEYS),
        Target("topic manifest key", _texts(parse_topic_manifest_key), _KEYS),
        Target("history link key", _texts(parse_history_link_key), _KEYS),
        Target("disk state key", _texts(parse_disk_state_key), _KEYS),
        Target("quarantined key", _texts(parse_quarantined_key), _KEYS),
        Target("batches", _checked, (segment_bytes(0), *_LOGS)),
        Target("closed segment", partial(_scanned, is_active=False), _LOGS),
        Target("active segment", partial(_scanned, is_active=True), _LOGS),
        Target(
            "batches, in machine code", partial(_checked, in_machine_code=True), (segment_bytes(0), *_LOGS)
        ),
        Target(
            "closed segment, in machine code", partial(_scanned, is_active=False, in_machine_code=True), _LOGS
        ),
        Target("records", _records, _BATCHES),
        Target("restored batch", _restored, _BATCHES),
        *(
            Target(
                f"{codec.name.lower()} stream", partial(_decompressed, codec), (compress(codec, b"ab" * 999),)
            )
            for codec in Codec
        ),
        Target("Redpanda segment", _reframed, tuple(one.data for one in redpanda.segments)),
        Target("Redpanda index", parse_base_index, _redpanda_indexes()),
        Target("Kafka request", _request, _requests(), at_fault),
        Target("Fetch response", partial(_walked, _fetch_walk), _fetch_responses(), at_fault),
        Target("Produce response", partial(_walked, _produce_walk), _produce_responses(), at_fault),
        Target(
            "ListOffsets response", partial(_response, _LIST_OFFSETS), _kio_responses(_LIST_OFFSETS), at_fault
        ),
        Target("Metadata response", partial(_response, _METADATA), _kio_responses(_METADATA), at_fault),
        Target("configuration", _config, _configurations(), (ConfigError,)),
    )


def _redpanda_indexes() -> tuple[bytes, ...]:
    return (
        base_index(base_offset=0, max_offset=9, broker_time_ms=None),
        base_index(base_offset=4, max_offset=99, broker_time_ms=1_700_000_000_000),
    )


def _configurations() -> tuple[bytes, ...]:
    return tuple(path.read_bytes() for path in sorted((ROOT / "config").glob("*.yaml")))
