"""
The small text files that a Kafka broker keeps beside its logs.

The error for a fault names its line, so that an operator can find it in the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from tieringd.errors import CorruptDataError
from tieringd.formats.log_names import is_topic_name
from tieringd.model.partition import TopicPartition
from tieringd.model.segment import EpochStart

_INTEGER = re.compile(r"-?[0-9]{1,19}")
_TOPIC_ID = re.compile(r"[A-Za-z0-9_-]{22}")
_ESCAPED = re.compile(r"\\(.)")


@dataclass(frozen=True, slots=True)
class MetaProperties:
    """`meta.properties`: the broker and cluster that a log directory belongs to."""

    version: int
    cluster_id: str | None
    """None for a broker from before KRaft that wrote none."""
    node_id: int
    directory_id: str | None
    """None in version 0."""


def parse_epoch_checkpoint(data: bytes) -> tuple[EpochStart, ...]:
    """
    Return the leader epochs in `leader-epoch-checkpoint`.

    Raises:
        CorruptDataError: The file is damaged, or epochs or their offsets go back.
    """
    epochs: list[EpochStart] = []
    for line, fields in _rows(data, columns=2):
        epoch, start_offset = (_integer(field, line) for field in fields)
        if (
            epoch < 0
            or start_offset < 0
            or (epochs and (epoch <= epochs[-1][0] or start_offset < epochs[-1][1]))
        ):
            _fail(line, f"leader epoch {epoch} at offset {start_offset} is out of order")
        epochs.append((epoch, start_offset))
    return tuple(epochs)


def encode_epoch_checkpoint(epochs: Iterable[EpochStart]) -> bytes:
    """Return `leader-epoch-checkpoint` as a broker writes it."""
    rows = [f"{epoch} {start_offset}\n" for epoch, start_offset in epochs]
    return "".join(["0\n", f"{len(rows)}\n", *rows]).encode()


def parse_offset_checkpoint(data: bytes) -> dict[TopicPartition, int]:
    """
    Return the offsets in one of the `*-offset-checkpoint` files.

    Raises:
        CorruptDataError: The file is damaged, or names a partition twice.
    """
    offsets: dict[TopicPartition, int] = {}
    for line, (topic, partition, offset) in _rows(data, columns=3):
        name = TopicPartition(topic, _integer(partition, line))
        if not is_topic_name(topic) or name.partition < 0:
            _fail(line, f"{topic!r} {partition} is not a partition")
        if name in offsets:
            _fail(line, f"{name} appears twice")
        offsets[name] = _integer(offset, line)
        if offsets[name] < 0:
            _fail(line, f"{name} has offset {offset}")
    return offsets


def encode_offset_checkpoint(offsets: Mapping[TopicPartition, int]) -> bytes:
    """Return one of the `*-offset-checkpoint` files as a broker writes it."""
    rows = [f"{name.topic} {name.partition} {offset}\n" for name, offset in offsets.items()]
    return "".join(["0\n", f"{len(rows)}\n", *rows]).encode()


def parse_partition_metadata(data: bytes) -> str:
    """
    Return the topic id in `partition.metadata`.

    Raises:
        CorruptDataError: The file is damaged or of an unknown version.
    """
    values = {}
    for line, text in enumerate(_text(data).splitlines(), start=1):
        key, colon, value = text.partition(":")
        if not colon:
            _fail(line, f"{text!r} is not `key: value`")
        values[key.strip()] = (line, value.strip())
    line, version = values.get("version", (1, "missing"))
    if version != "0":
        _fail(line, f"version is {version}, not 0")
    line, topic_id = values.get("topic_id", (line, "missing"))
    if not _TOPIC_ID.fullmatch(topic_id):
        _fail(line, f"topic id is {topic_id!r}")
    return topic_id


def encode_partition_metadata(topic_id: str) -> bytes:
    """Return `partition.metadata` as a broker writes it."""
    return f"version: 0\ntopic_id: {topic_id}".encode()


def parse_meta_properties(data: bytes) -> MetaProperties:
    """
    Return the content of `meta.properties`, in version 0 (ZooKeeper) or 1 (KRaft).

    Raises:
        CorruptDataError: The file is damaged or of an unknown version.
    """
    values: dict[str, tuple[int, str]] = {}
    line = 1
    for line, raw in enumerate(_text(data).splitlines(), start=1):
        text = raw.strip()
        if not text or text.startswith(("#", "!")):
            continue
        key, equals, value = text.partition("=")
        if not equals:
            _fail(line, f"{text!r} is not `key=value`")
        values[key.strip()] = (line, _ESCAPED.sub(r"\1", value.strip()))
    version_line, version = values.get("version", (line, "missing"))
    if version not in {"0", "1"}:
        _fail(version_line, f"version is {version}, not 0 or 1")
    node_key = "broker.id" if version == "0" else "node.id"
    node_line, node_id = values.get(node_key, (line, "missing"))
    cluster_line, cluster_id = values.get("cluster.id", (line, None))
    if version == "1" and not cluster_id:
        _fail(cluster_line, "cluster.id is missing")
    return MetaProperties(
        version=int(version),
        cluster_id=cluster_id,
        node_id=_integer(node_id, node_line),
        directory_id=values.get("directory.id", (line, None))[1],
    )


def _rows(data: bytes, *, columns: int) -> list[tuple[int, list[str]]]:
    """Return the numbered rows of a checkpoint: a version, a count, then that many rows."""
    lines = _text(data).splitlines()
    if not lines or lines[0].strip() != "0":
        _fail(1, f"version is {lines[0].strip() if lines else 'missing'}, not 0")
    if len(lines) == 1:
        _fail(2, "the number of entries is missing")
    count = _integer(lines[1].strip(), 2)
    rows = [(number, text.split()) for number, text in enumerate(lines[2:], start=3)]
    if len(rows) != count:
        _fail(2, f"{count} entries are announced and {len(rows)} follow")
    for number, fields in rows:
        if len(fields) != columns:
            _fail(number, f"{columns} fields are expected and {len(fields)} found")
    return rows


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise CorruptDataError(f"line {line}: byte {error.start} is not text") from error


def _integer(text: str, line: int) -> int:
    if not _INTEGER.fullmatch(text):
        _fail(line, f"{text!r} is not a number")
    return int(text)


def _fail(line: int, fault: str) -> NoReturn:
    raise CorruptDataError(f"line {line}: {fault}")
