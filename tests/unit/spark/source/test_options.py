"""Options of users, the errors of wrong ones, and options that have no effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from tieringd.errors import ConfigError
from tieringd.model.partition import TopicPartition
from tieringd.spark.source.options import (
    KNOWN,
    REFRESH_MS,
    TRIGGER_DELAY_MS,
    SourceOptions,
    StreamLimits,
    Subscription,
    parse_options,
    read_columns,
)
from tieringd.spark.source.positions import AtOffsets, AtTime, AtTimes, Edge
from tieringd.spark.source.reader_settings import STORE_OPTIONS

PLACE = {"path": "s3://bucket"}
ORDERS_0, ORDERS_1 = TopicPartition("orders", 0), TopicPartition("orders", 1)


def parsed(*, is_streaming=False, **options):
    return parse_options(PLACE | {"subscribe": "orders"} | options, is_streaming=is_streaming)


def refused(match, *, is_streaming=False, **options):
    with pytest.raises(ConfigError, match=match):
        parse_options(PLACE | options, is_streaming=is_streaming)


def test_defaults_are_those_of_the_kafka_source():
    """A batch is the whole topic, everything counts, and missing records are an error."""
    assert parsed() == SourceOptions(Subscription(topics=("orders",)), Edge.EARLIEST, Edge.LATEST)


def test_stream_begins_at_the_end():
    """A stream begins at the end by default, like a consumer without a position."""
    assert parsed(is_streaming=True).start is Edge.LATEST
    assert parsed(is_streaming=True).limits == StreamLimits(None, None, TRIGGER_DELAY_MS, REFRESH_MS)


def test_every_option_is_read():
    """Names and words may be in any case, and numbers have units."""
    options = parsed(
        STARTINGOFFSETS="Earliest",
        endingTimestamp="1700000000000",
        startingOffsetsByTimestampStrategy="Latest",
        failOnDataLoss="False",
        minPartitions="8",
        maxRecordsPerPartition="1000",
        mode="PERMISSIVE",
        targetTaskBytes="256MiB",
        isolationLevel="read_committed",
        cluster="main",
        includeHeaders="true",
    )
    assert options == SourceOptions(
        Subscription(topics=("orders",), cluster="main"),
        Edge.EARLIEST,
        AtTime(1_700_000_000_000, ""),
        on_no_match="latest",
        fail_on_data_loss=False,
        read_committed=True,
        skip_corrupt=True,
        task_bytes=256 << 20,
        tasks_min=8,
        task_records_max=1000,
    )


def test_limits_of_a_stream_are_read():
    """Durations have units, too."""
    options = parsed(
        is_streaming=True,
        maxOffsetsPerTrigger="500",
        minOffsetsPerTrigger="100",
        maxTriggerDelay="2m",
        refreshInterval="500ms",
    )
    assert options.limits == StreamLimits(500, 100, 120_000, 500)


@pytest.mark.parametrize(
    ("value", "delay_ms"),
    [
        ("15m", 900_000),
        ("15min", 900_000),
        ("15 minutes", 900_000),
        ("1 minute", 60_000),
        ("2000us", 2),
        ("30s", 30_000),
        ("1 hour", 3_600_000),
        ("2 Days", 172_800_000),
        ("900000", 900_000),
    ],
)
def test_durations_are_those_of_spark(value, delay_ms):
    """A query of the Kafka source writes them so."""
    assert parsed(is_streaming=True, maxTriggerDelay=value).limits.max_delay_ms == delay_ms


def test_duration_under_a_millisecond_is_refused():
    """Such a duration would be none."""
    with pytest.raises(ConfigError, match="maxTriggerDelay: must be a duration of a millisecond or more"):
        parsed(is_streaming=True, maxTriggerDelay="5us")


@pytest.mark.parametrize(
    ("pattern", "taken", "left"),
    [
        (r"\Qa.b\E.*", "a.b-1", "axb-1"),
        (r"\Qa.b", "a.b", "axb"),
        (r"(?<kind>orders|returns)-\d+", "orders-7", "orders-x"),
        (r"(?<!x)orders(?<=s)", "orders", "order"),
        (r"(?i)ORD.*", "orders", "sales"),
        (r"[a-z]++", "orders", "Orders"),
    ],
)
def test_patterns_are_those_of_java(pattern, taken, left):
    """A pattern is a regular expression of Java, as Kafka's consumer takes it."""
    subscription = parse_options(PLACE | {"subscribePattern": pattern}, is_streaming=False).subscription
    assert subscription.accepts(taken)
    assert not subscription.accepts(left)


@pytest.mark.parametrize("pattern", [r"\p{Alpha}+", "[a-z&&[^b]]+", "[a[bc]]+"])
def test_pattern_that_python_reads_otherwise_is_refused(pattern):
    """The error says what to write instead."""
    with pytest.raises(ConfigError, match=r"subscribePattern: is not a regular.*Write out classes"):
        parse_options(PLACE | {"subscribePattern": pattern}, is_streaming=False)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        pytest.param({"subscribe": " a, b ,a"}, Subscription(topics=("a", "b")), id="names"),
        pytest.param({"subscribePattern": "or.*"}, Subscription(pattern="or.*"), id="pattern"),
        pytest.param(
            {"assign": '{"orders": [1, 0]}'}, Subscription(assigned=(ORDERS_1, ORDERS_0)), id="partitions"
        ),
    ],
)
def test_topics_are_named_in_three_ways(given, wanted):
    """A subscription gives topics by name, by a pattern for the whole name, or by partition."""
    assert parse_options(PLACE | given, is_streaming=False).subscription == wanted


def test_pattern_is_for_the_whole_name():
    """A pattern has to match the whole name, as in Kafka's own consumer."""
    subscription = Subscription(pattern="ord")
    assert subscription.accepts("ord")
    assert not subscription.accepts("orders")


@pytest.mark.parametrize("side", ["starting", "ending"])
def test_more_general_option_wins(side):
    """One time for all, then times, then offsets: whatever else is set has no effect."""
    name = "start" if side == "starting" else "end"
    offsets = {f"{side}Offsets": '{"orders": {"0": 23}}'}
    times = {f"{side}OffsetsByTimestamp": '{"orders": {"0": 1000}}'}
    time = {f"{side}Timestamp": "2000"}

    assert getattr(parsed(**offsets), name) == AtOffsets({ORDERS_0: 23}, "")
    assert getattr(parsed(**offsets, **times), name) == AtTimes({ORDERS_0: 1000}, "")
    assert getattr(parsed(**offsets, **times, **time), name) == AtTime(2000, "")


@pytest.mark.parametrize("name", ["isolationLevel", "isolation.level", "kafka.isolation.level"])
def test_isolation_has_three_names(name):
    """A query that was written for the Kafka source goes on as it is."""
    assert parsed(**{name: "read_committed"}).read_committed
    assert not parsed(**{name: "read_uncommitted"}).read_committed


@pytest.mark.parametrize(
    ("options", "match"),
    [
        pytest.param({}, "subscribe, subscribePattern, assign: none of them is set", id="no topic"),
        pytest.param({"subscribe": "a", "assign": "{}"}, "subscribe and assign contradict", id="two ways"),
        pytest.param({"subscribe": " , "}, "subscribe: names no topic", id="no name"),
        pytest.param({"subscribePattern": " "}, "subscribePattern: is empty", id="no pattern"),
        pytest.param({"subscribePattern": "a["}, "is not a regular expression", id="bad pattern"),
        pytest.param({"assign": "orders"}, "assign: is not JSON", id="assign no JSON"),
        pytest.param({"assign": '{"orders": 0}'}, "assign: must be JSON such as", id="assign no list"),
        pytest.param({"assign": '{"orders": ["0"]}'}, "'0' is not a partition of orders", id="assign text"),
        pytest.param({"assign": '["orders"]'}, "assign: must be JSON such as", id="assign a list"),
    ],
)
def test_topics_that_cannot_be_read(options, match):
    """The error names the option and says what it takes."""
    refused(match, **options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        pytest.param({"startingOffsets": "latest"}, "cannot begin at the latest", id="begin at the end"),
        pytest.param(
            {"startingOffsets": '{"orders": {"0": -1}}'}, "cannot begin at the latest", id="one begins there"
        ),
        pytest.param({"endingOffsets": "earliest"}, "cannot end at the earliest", id="end at the beginning"),
        pytest.param(
            {"endingOffsets": '{"orders": {"0": -2}}'}, "cannot end at the earliest", id="one ends there"
        ),
        pytest.param({"startingOffsets": "first"}, "must be earliest, latest, or JSON", id="no position"),
        pytest.param({"startingOffsets": '{"orders": {"0": -3}}'}, "orders-0: -3 is not an offset", id="-3"),
        pytest.param(
            {"startingOffsets": '{"orders": {"0": "1"}}'}, "'1' is not an offset", id="offset as text"
        ),
        pytest.param({"startingOffsets": '{"orders": {"x": 1}}'}, "'x' is not a partition", id="no number"),
        pytest.param({"startingOffsets": '{"orders": 1}'}, "'orders' has no partitions", id="no partitions"),
        pytest.param({"startingOffsets": '{"orders"'}, "startingOffsets: is not JSON", id="no JSON"),
        pytest.param({"startingOffsetsByTimestamp": "[]"}, "must be JSON such as", id="times no object"),
        pytest.param(
            {"startingOffsetsByTimestamp": '{"orders": {"0": -5}}'}, "is not milliseconds", id="negative time"
        ),
        pytest.param({"endingTimestamp": "yesterday"}, "must be milliseconds", id="a word for a time"),
        pytest.param({"failOnDataLoss": "yes"}, "failOnDataLoss: must be true or false", id="no flag"),
        pytest.param({"minPartitions": "0"}, "minPartitions: must be a whole number above 0", id="none"),
        pytest.param({"maxRecordsPerPartition": "1.5"}, "must be a whole number above 0", id="a half"),
        pytest.param({"mode": "dropmalformed"}, "mode: must be one of failfast, permissive", id="mode"),
        pytest.param({"targetTaskBytes": "64MBytes"}, "targetTaskBytes:", id="unit"),
        pytest.param({"targetTaskBytes": "0"}, "targetTaskBytes: must be a size above 0", id="no bytes"),
        pytest.param({"isolationLevel": "serializable"}, "must be one of read_uncommitted", id="isolation"),
        pytest.param(
            {"isolationLevel": "read_committed", "kafka.isolation.level": "read_uncommitted"},
            "isolationLevel and kafka.isolation.level: contradict",
            id="two isolations",
        ),
        pytest.param({"startOffsets": "earliest"}, "Did you mean startingOffsets", id="misspelled"),
        pytest.param({"cloud_storage_bukket": "b"}, "Did you mean cloud_storage_bucket", id="property"),
        pytest.param({"zzz": "1"}, "The options are subscribe, subscribePattern", id="nothing near"),
    ],
)
def test_wrong_option_is_named(options, match):
    """The error of a wrong option names the option, and its values or the option that may be meant."""
    refused(match, subscribe="orders", **options)


@pytest.mark.parametrize("name", ["endingOffsets", "endingOffsetsByTimestamp", "endingTimestamp"])
def test_stream_has_no_end(name):
    """An end is refused for a stream, as with the Kafka source."""
    refused(f"{name}: a streaming query has no end", is_streaming=True, subscribe="orders", **{name: "1"})


def test_limits_of_a_stream_may_not_contradict_each_other():
    """A trigger that has to wait for more than it may take would wait for ever."""
    limits = {"maxOffsetsPerTrigger": "10", "minOffsetsPerTrigger": "11"}
    refused("minOffsetsPerTrigger: is 11, more than", is_streaming=True, subscribe="orders", **limits)


def test_options_of_a_client_have_no_effect(warnings):
    """
    Options of a Kafka client have no effect, and the warning names them.

    Some users change only the format.
    """
    parsed(
        **{"kafka.bootstrap.servers": "b:9092", "fetchOffset.numRetries": "3", "maxOffsetsPerTrigger": "1"}
    )
    (told,) = warnings.of("options without effect")
    assert told["options"] == "fetchOffset.numRetries, kafka.bootstrap.servers, maxOffsetsPerTrigger"


def test_option_that_is_read_is_not_warned_of(warnings):
    """Isolation is the one setting of a client that counts."""
    parsed(**{"kafka.isolation.level": "read_committed"})
    assert warnings.events() == []


@pytest.mark.parametrize(
    ("options", "columns"),
    [
        pytest.param({}, "key value topic partition offset timestamp timestampType", id="default"),
        pytest.param(
            {"includeHeaders": "TRUE"},
            "key value topic partition offset timestamp timestampType headers",
            id="headers",
        ),
        pytest.param({"columns": "Offset, key"}, "offset key", id="some"),
        pytest.param({"columns": "headers", "includeHeaders": "true"}, "headers", id="headers only"),
    ],
)
def test_columns_are_those_of_the_kafka_source(options, columns):
    """All of them, or some in the order in which they are named."""
    assert read_columns(options) == tuple(columns.split())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        pytest.param({"columns": "key,valeu"}, "no column 'valeu'", id="unknown"),
        pytest.param({"columns": "key,key"}, "must name each column once", id="twice"),
        pytest.param({"columns": ","}, "must name each column once", id="none"),
        pytest.param({"columns": "key", "includeHeaders": "true"}, "contradicts columns", id="headers"),
    ],
)
def test_wrong_columns_are_named(options, match):
    """The error says which columns there are."""
    with pytest.raises(ConfigError, match=match):
        read_columns(options)


def test_every_option_is_documented():
    """Each option is on the page for users, apart from two that are other spellings."""
    page = (Path(__file__).parents[4] / "docs" / "spark.md").read_text()
    names = {*KNOWN, *STORE_OPTIONS} - {"path", "isolation.level"}
    assert sorted(name for name in names if f"`{name}`" not in page) == []
