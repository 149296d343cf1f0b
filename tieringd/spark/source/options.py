"""
The options of the data source. Options that Spark's own Kafka source has as well have its names.

The user's options become one `SourceOptions`, or an error that names the option. `reader_settings` parses the
options for the archive's place; this module only knows their names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Final, Literal, TypeAlias, cast
from warnings import catch_warnings

import structlog

from tieringd.model.partition import TopicPartition
from tieringd.spark.decoder import COLUMNS
from tieringd.spark.source.option_values import OptionValues, fault
from tieringd.spark.source.positions import Position, read_end, read_start
from tieringd.spark.source.reader_settings import PROPERTIES, STORE_OPTIONS

log = structlog.get_logger(__name__)

OnNoMatch: TypeAlias = Literal["error", "latest"]

HEADERS: Final = "headers"
TASK_BYTES: Final = 64 << 20
"""Each task costs Spark tens of milliseconds, which would be noticeable in smaller tasks."""
TRIGGER_DELAY_MS: Final = 15 * 60_000
REFRESH_MS: Final = 10_000
"""Archivers commit every few seconds at most, and each refresh costs a request for every partition."""

_STRATEGIES: Final = ("subscribe", "subscribePattern", "assign")
_ISOLATION: Final = ("isolationLevel", "isolation.level", "kafka.isolation.level")
_STREAMING_ONLY: Final = (
    "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "refreshInterval",
)
_BATCH_ONLY: Final = ("endingOffsets", "endingOffsetsByTimestamp", "endingTimestamp")
_OF_A_CONSUMER: Final = (
    "kafkaConsumer.pollTimeoutMs",
    "fetchOffset.numRetries",
    "fetchOffset.retryIntervalMs",
    "groupIdPrefix",
)
"""Options of the Kafka source for its Kafka clients. This source has no such clients, and ignores them."""
KNOWN: Final = (
    *_STRATEGIES,
    *_ISOLATION,
    *_STREAMING_ONLY,
    *_BATCH_ONLY,
    "startingOffsets",
    "startingOffsetsByTimestamp",
    "startingTimestamp",
    "startingOffsetsByTimestampStrategy",
    "failOnDataLoss",
    "minPartitions",
    "maxRecordsPerPartition",
    "includeHeaders",
    "columns",
    "mode",
    "cluster",
    "targetTaskBytes",
)


_QUOTED: Final = re.compile(r"\\Q(.*?)(?:\\E|\Z)", re.DOTALL)
"""Text that Java takes literally."""
_NESTED: Final = re.compile(r"(?<!\\)\[\^?\]?(?:[^\]\[\\]|\\.)*\[")
"""A class of characters in another one, which Python takes for a bracket in the class."""
_LOOKBEHIND: Final = re.compile(r"\(\?P<(?=[=!])")


# Without slots, so that `names` is computed once: each topic of the bucket is compared with it.
@dataclass(frozen=True)
class Subscription:
    """The topics or partitions to read. Exactly one of `topics`, `pattern` and `assigned` is set."""

    topics: tuple[str, ...] = ()
    pattern: str = ""
    """A regular expression for whole topic names."""
    assigned: tuple[TopicPartition, ...] = ()
    cluster: str | None = None
    """The cluster to read topics of; None if topic names alone are unambiguous."""

    def accepts(self, topic: str) -> bool:
        """Return whether a topic of this name, or some of its partitions, are read."""
        if self.pattern:
            return re.fullmatch(self.pattern, topic) is not None
        return topic in self.names

    @cached_property
    def names(self) -> frozenset[str]:
        """Return the topic names that the user gave; empty with a pattern."""
        return frozenset(self.topics) | {one.topic for one in self.assigned}


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """How many offsets a streaming batch takes, and how often the reader refreshes its manifests."""

    max_offsets: int | None = None
    min_offsets: int | None = None
    max_delay_ms: int = TRIGGER_DELAY_MS
    """Time after which even fewer than `min_offsets` are read."""
    refresh_ms: int = REFRESH_MS


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """What to read, and how."""

    subscription: Subscription
    start: Position
    end: Position
    """The end of a batch; a stream has none."""
    on_no_match: OnNoMatch = "error"
    """The reaction if no record is as late as the time to begin at."""
    fail_on_data_loss: bool = True
    read_committed: bool = False
    skip_corrupt: bool = False
    task_bytes: int = TASK_BYTES
    tasks_min: int | None = None
    task_records_max: int | None = None
    limits: StreamLimits = StreamLimits()


def parse_options(given: Mapping[str, str], *, is_streaming: bool) -> SourceOptions:
    """
    Parse the options of a reader. Options without effect are logged as a warning.

    Raises:
        ConfigError: An option is wrong, unknown or missing, or two options contradict each other.
    """
    values = OptionValues(given)
    _check_names(given, is_streaming=is_streaming)
    return SourceOptions(
        subscription=read_subscription(values),
        start=read_start(values, is_streaming=is_streaming),
        end=read_end(values),
        on_no_match=cast("OnNoMatch", values.choice("startingOffsetsByTimestampStrategy", "error", "latest")),
        fail_on_data_loss=values.flag("failOnDataLoss", default=True),
        read_committed=_reads_committed(values),
        skip_corrupt=values.choice("mode", "failfast", "permissive") == "permissive",
        task_bytes=values.size_bytes("targetTaskBytes", default=TASK_BYTES),
        tasks_min=values.count("minPartitions"),
        task_records_max=values.count("maxRecordsPerPartition"),
        limits=_limits(values) if is_streaming else StreamLimits(),
    )


def read_columns(given: Mapping[str, str]) -> tuple[str, ...]:
    """
    Return the columns that the options select, in their order; by default all but the headers.

    Raises:
        ConfigError: A column is unknown or named twice, or `includeHeaders` contradicts the columns.
    """
    values = OptionValues(given)
    with_headers = values.flag("includeHeaders", default=False)
    text = values.text("columns")
    if text is None:
        return COLUMNS if with_headers else tuple(name for name in COLUMNS if name != HEADERS)
    by_name = {name.lower(): name for name in COLUMNS}
    columns: list[str] = []
    for name in _listed(text):
        if name.lower() not in by_name:
            raise fault("columns", f"there is no column {name!r}; the columns are {', '.join(COLUMNS)}")
        columns.append(by_name[name.lower()])
    if not columns or len(set(columns)) < len(columns):
        raise fault("columns", f"must name each column once, such as key,value; not {text!r}")
    if with_headers and HEADERS not in columns:
        raise fault("includeHeaders", f"contradicts columns, which are {', '.join(columns)}")
    return tuple(columns)


def read_subscription(values: OptionValues) -> Subscription:
    """
    Return which topics or partitions to read.

    Raises:
        ConfigError: Not exactly one of the three options is set, or its value is wrong.
    """
    found = [name for name in _STRATEGIES if values.has(name)]
    if len(found) != 1:
        problem = f"{' and '.join(found)} contradict each other" if found else "none of them is set"
        raise fault(", ".join(_STRATEGIES), f"{problem}; set one of them", hint="subscribe takes topic names")
    cluster = values.text("cluster") or None
    text = values.text(found[0]) or ""
    match found[0]:
        case "subscribe":
            topics = tuple(dict.fromkeys(_listed(text)))
            if not topics:
                raise fault("subscribe", "names no topic")
            return Subscription(topics=topics, cluster=cluster)
        case "assign":
            return Subscription(assigned=_assigned(values), cluster=cluster)
        case _:
            if not text:
                raise fault("subscribePattern", "is empty")
            return Subscription(pattern=_pattern(text), cluster=cluster)


def _pattern(text: str) -> str:
    """
    Return a regular expression of Java's, which Spark's Kafka source takes, as Python's.

    Raises:
        ConfigError: It is not one, or Python's means something else by it.
    """
    pattern = _QUOTED.sub(lambda found: re.escape(found[1]), text).replace("(?<", "(?P<")
    pattern = _LOOKBEHIND.sub("(?<", pattern)
    hint = (
        "Patterns are read as Java's in what both languages have, and in \\Q...\\E and (?<name>...). Write "
        "out classes such as \\p{Alpha}, and unions and intersections of classes: [a-c] for [a-z&&[a-c]]"
    )
    if _NESTED.search(pattern):
        raise fault("subscribePattern", "is not a regular expression: a class is inside another", hint=hint)
    try:
        with catch_warnings(action="error", category=FutureWarning):
            re.compile(pattern)
    except (re.error, FutureWarning) as error:
        raise fault("subscribePattern", f"is not a regular expression: {error}", hint=hint) from error
    return pattern


def _assigned(values: OptionValues) -> tuple[TopicPartition, ...]:
    document = values.json("assign")
    example = 'must be JSON such as {"orders": [0, 1]}'
    if not isinstance(document, dict) or not document:
        raise fault("assign", example)
    found: list[TopicPartition] = []
    for topic, numbers in document.items():
        if not isinstance(numbers, list) or not numbers:
            raise fault("assign", f"{example}; {topic!r} has no list of partitions")
        for number in numbers:
            if type(number) is not int or number < 0:
                raise fault("assign", f"{number!r} is not a partition of {topic}")
            found.append(TopicPartition(topic, number))
    return tuple(dict.fromkeys(found))


def _limits(values: OptionValues) -> StreamLimits:
    limits = StreamLimits(
        max_offsets=values.count("maxOffsetsPerTrigger"),
        min_offsets=values.count("minOffsetsPerTrigger"),
        max_delay_ms=values.duration_ms("maxTriggerDelay", default=TRIGGER_DELAY_MS),
        refresh_ms=values.duration_ms("refreshInterval", default=REFRESH_MS),
    )
    if limits.max_offsets and limits.min_offsets and limits.min_offsets > limits.max_offsets:
        raise fault(
            "minOffsetsPerTrigger",
            f"is {limits.min_offsets}, more than the {limits.max_offsets} of maxOffsetsPerTrigger",
        )
    return limits


def _reads_committed(values: OptionValues) -> bool:
    found = {
        values.choice(name, "read_uncommitted", "read_committed") for name in _ISOLATION if values.has(name)
    }
    if len(found) > 1:
        raise fault(" and ".join(name for name in _ISOLATION if values.has(name)), "contradict each other")
    return found == {"read_committed"}


def _check_names(given: Mapping[str, str], *, is_streaming: bool) -> None:
    known = {name.lower(): name for name in (*KNOWN, *STORE_OPTIONS, *PROPERTIES)}
    of_a_consumer = {name.lower() for name in _OF_A_CONSUMER}
    idle: list[str] = []
    for name in given:
        lowered = name.lower()
        if lowered not in known:
            if not lowered.startswith("kafka.") and lowered not in of_a_consumer:
                raise _unknown(name, known.values())
            idle.append(name)
        elif is_streaming and known[lowered] in _BATCH_ONLY:
            raise fault(known[lowered], "a streaming query has no end; leave this option out")
        elif not is_streaming and known[lowered] in _STREAMING_ONLY:
            idle.append(known[lowered])
    if idle:
        why = "the option is for Kafka clients, or for streams, and has no effect here"
        log.warning("options without effect", options=", ".join(sorted(idle)), reason=why)


def _unknown(name: str, known: Iterable[str]) -> Exception:
    names = {one.lower(): one for one in known}
    near = get_close_matches(name.lower(), names, n=1)
    hint = f"Did you mean {names[near[0]]}?" if near else f"The options are {', '.join(KNOWN)}"
    return fault(name, "the data source tieringd has no such option", hint=hint)


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
