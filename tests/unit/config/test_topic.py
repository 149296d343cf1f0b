"""What holds for one topic."""

from itertools import product

import pytest

from tests.unit.config.texts import SMALLEST, TIERED, parsed
from tieringd.config import parse_config
from tieringd.formats.object_keys import TopicKey
from tieringd.formats.topic_manifest import OriginalRetention, TieringDefaults, TopicManifest
from tieringd.policies.local_retention import LocalRetentionTarget
from tieringd.policies.total_retention import RetentionPace

DAY_MS = 86_400_000


STRICT = TIERED + "retention_local_strict: true\nlog_retention_ms: -1\n"
"""Both families of local settings are enforced. Total retention lowers none of them."""


def topic(broker=None, *, file="", name="orders", base=STRICT):
    return parsed(base + file).topic(name, broker or {})


def recorded_topic(**fields):
    """Return a topic's manifest."""
    return TopicManifest(TopicKey("cluster", "orders", "id"), partition_count=1, created_at_ms=0, **fields)


def target(broker=None, **arguments):
    found = topic(broker, **arguments).local_retention_target
    return (found.target_ms, found.target_bytes)


@pytest.mark.parametrize(
    ("of_topic", "of_cluster", "expected"),
    [
        (True, None, True),
        (True, False, True),
        (True, True, True),
        (False, None, False),
        (False, False, False),
        (False, True, False),
        (None, True, True),
        (None, False, False),
        (None, None, False),
    ],
)
@pytest.mark.parametrize("which", ["write", "read"])
@pytest.mark.parametrize("place", ["file", "broker"])
def test_topic_value_overrides_the_cluster_both_ways(which, place, of_topic, of_cluster, expected):
    """The truth table of remote write and read holds wherever the topic's value is set."""
    base = (
        SMALLEST + "cloud_storage_enabled: true\ncloud_storage_backend: file\ncloud_storage_file_root: /a\n"
    )
    if of_cluster is not None:
        base += f"cloud_storage_enable_remote_{which}: {str(of_cluster).lower()}\n"
    name = f"redpanda.remote.{which}"
    word = str(of_topic).lower()
    file = f"topics: {{orders: {{{name}: {word}}}}}\n" if of_topic is not None and place == "file" else ""
    broker = {name: word} if of_topic is not None and place == "broker" else {}
    found = topic(broker, file=file, base=base)
    assert (found.remote_write if which == "write" else found.remote_read) is expected
    assert (found.remote_read if which == "write" else found.remote_write) is False


RESOLVED = {
    (None, None): False,
    (None, False): False,
    (None, True): True,
    (False, None): False,
    (False, False): False,
    (False, True): True,
    (True, None): True,
    (True, False): False,
    (True, True): True,
}
"""The truth table: by the cluster's value and the topic's."""
ANY = (None, False, True)


@pytest.mark.parametrize("cluster", list(product(ANY, ANY)), ids=str)
@pytest.mark.parametrize("of_topic", list(product(ANY, ANY)), ids=str)
@pytest.mark.parametrize("place", ["file", "pattern", "broker"])
def test_write_and_read_are_resolved_each_by_itself(cluster, of_topic, place):
    """All 81 cases of cluster by topic, for write and read together: neither has a say in the other."""
    names = ("write", "read")
    base = (
        SMALLEST + "cloud_storage_enabled: true\ncloud_storage_backend: file\ncloud_storage_file_root: /a\n"
    )
    for name, value in zip(names, cluster, strict=True):
        if value is not None:
            base += f"cloud_storage_enable_remote_{name}: {str(value).lower()}\n"
    values = {
        f"redpanda.remote.{name}": str(value).lower()
        for name, value in zip(names, of_topic, strict=True)
        if value is not None
    }
    entry = "'ord*'" if place == "pattern" else "orders"
    lines = "".join(f"    {name}: {value}\n" for name, value in values.items())
    in_file = f"topics:\n  {entry}:\n{lines}" if place != "broker" else ""
    found = topic(values if place == "broker" else {}, file=in_file, base=base)
    expected = tuple(RESOLVED[each] for each in zip(cluster, of_topic, strict=True))
    assert (found.remote_write, found.remote_read) == expected

    off = base.replace("cloud_storage_enabled: true", "cloud_storage_enabled: false")
    found = topic(values if place == "broker" else {}, file=in_file, base=off)
    assert (found.remote_write, found.remote_read) == (False, False)


@pytest.mark.parametrize("of_cluster", ANY)
@pytest.mark.parametrize("in_file", ANY)
@pytest.mark.parametrize("on_broker", ANY)
@pytest.mark.parametrize("which", ["write", "read"])
def test_file_goes_before_the_broker_and_the_broker_before_the_cluster(of_cluster, in_file, on_broker, which):
    """The first place that says anything decides, and false is something to say."""
    base = (
        SMALLEST + "cloud_storage_enabled: true\ncloud_storage_backend: file\ncloud_storage_file_root: /a\n"
    )
    if of_cluster is not None:
        base += f"cloud_storage_enable_remote_{which}: {str(of_cluster).lower()}\n"
    name = f"redpanda.remote.{which}"
    file = f"topics: {{orders: {{{name}: {str(in_file).lower()}}}}}\n" if in_file is not None else ""
    broker = {name: str(on_broker).lower()} if on_broker is not None else {}
    found = topic(broker, file=file, base=base)
    said = [value for value in (in_file, on_broker, of_cluster) if value is not None]
    assert getattr(found, f"remote_{which}") is (said[0] if said else False)


@pytest.mark.parametrize(
    ("broker", "retention"),
    [
        pytest.param({}, (None, None), id="not known"),
        pytest.param({"retention.ms": "604800000", "retention.bytes": "-1"}, (604_800_000, None), id="time"),
        pytest.param({"retention.ms": "-1", "retention.bytes": "1000"}, (None, 1000), id="size"),
        pytest.param({"retention.ms": "0", "retention.bytes": "0"}, (0, 0), id="nothing stays"),
        pytest.param(
            {"cleanup.policy": "delete", "retention.ms": "5", "retention.bytes": "6"}, (5, 6), id="delete"
        ),
        pytest.param(
            {"cleanup.policy": "compact", "retention.ms": "5", "retention.bytes": "6"},
            (None, None),
            id="compact only",
        ),
        pytest.param(
            {"cleanup.policy": "", "retention.ms": "5", "retention.bytes": "6"}, (None, None), id="empty"
        ),
        pytest.param(
            {"cleanup.policy": "compact,delete", "retention.ms": "5", "retention.bytes": "6"},
            (5, 6),
            id="compact and delete",
        ),
        pytest.param({"retention.ms": "soon", "retention.bytes": ""}, (None, None), id="not numbers"),
    ],
)
def test_broker_retention_is_what_the_broker_deletes_by(broker, retention):
    """A retention of None is without limit, as for a compacted topic. No local target reaches past it."""
    found, (total_ms, total_bytes) = topic(broker), retention
    assert (found.broker_retention_ms, found.broker_retention_bytes) == retention
    target_ms = DAY_MS if total_ms is None else min(DAY_MS, total_ms)
    assert found.local_retention_target == LocalRetentionTarget(target_ms, total_bytes)


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        pytest.param("", False, id="not set"),
        pytest.param("topics: {orders: {tieringd.managed.retention: true}}\n", True, id="by name"),
        pytest.param("topics: {'ord*': {tieringd.managed.retention: true}}\n", True, id="by pattern"),
        pytest.param("topics: {clicks: {tieringd.managed.retention: true}}\n", False, id="of another"),
        pytest.param(
            "topics: {o*: {tieringd.managed.retention: true}, orders: {tieringd.managed.retention: false}}\n",
            False,
            id="name before pattern",
        ),
    ],
)
def test_retention_is_managed_where_the_file_says_so(file, expected):
    """
    Managed retention changes the broker's settings.

    Only the file can ask for it, and only with tiering.
    """
    assert topic(file=file).managed_retention is expected
    assert topic(file=file, base=SMALLEST).managed_retention is False
    assert topic({"tieringd.managed.retention": "true"}, file=file).managed_retention is expected


def test_disabled_tiering_overrides_every_topic():
    """cloud_storage_enabled is the switch for all."""
    file = "topics: {orders: {remote.storage.enable: true}}\n"
    found = topic({"redpanda.remote.write": "true"}, file=file, base=SMALLEST)
    assert (found.remote_write, found.remote_read) == (False, False)


def test_topic_without_settings_has_the_cluster_values():
    """One day stays local without any setting, if local retention is enforced. Else one day is advice."""
    found = topic()
    assert (found.remote_write, found.remote_read, found.problems) == (True, False, ())
    assert found.local_retention_target == LocalRetentionTarget(target_ms=DAY_MS, target_bytes=None)
    advised = topic(base=TIERED)
    assert advised.local_retention_target == LocalRetentionTarget(target_ms=7 * DAY_MS, target_bytes=None)
    assert advised.local_target.advised == found.local_retention_target


@pytest.mark.parametrize("cluster", ["", "log_retention_ms: 7", "delete_retention_ms: 7"])
def test_topic_that_a_broker_leaves_out_is_kept(cluster):
    """A broker has a value for every topic. Without it nothing is deleted by age."""
    kafka = TIERED.replace("kind: none", "kind: kafka\n  bootstrap: [h:1]")
    assert parsed(f"{kafka}{cluster}\n").topic("orders", {}).total.limit_ms is None
    assert parsed(f"{kafka}{cluster}\n").topic("orders", {"retention.ms": "8"}).total.limit_ms == 8


def test_file_without_a_broker_section_deletes_nothing_by_age():
    """A file without a broker section is for commands and jobs on the bucket."""
    text = TIERED.partition("state_directory")[2]
    config = parse_config(f"state_directory{text}", source="t.yaml", environ={}, needs_broker=False)
    assert config.topic("orders", {}).total.limit_ms is None


@pytest.mark.parametrize(
    ("recorded", "broker", "expected"),
    [
        pytest.param((None, None), {}, (DAY_MS, None), id="nothing"),
        pytest.param((5000, 700), {}, (5000, 700), id="both"),
        pytest.param((-1, None), {}, (None, None), id="no-limit"),
        pytest.param((5000, 700), {"retention.local.target.ms": "300"}, (300, 700), id="set-since-then"),
        pytest.param((5000, 700), {"local.retention.bytes": "-2"}, (5000, None), id="set-to-total"),
    ],
)
def test_recorded_local_target_stands_for_the_cluster_value(recorded, broker, expected):
    """The recorded values of a topic's creation hold if the topic sets nothing itself."""
    target_ms, target_bytes = recorded
    begins_with = TieringDefaults(
        remote_write=True, remote_read=True, local_target_ms=target_ms, local_target_bytes=target_bytes
    )
    found = parsed(STRICT).topic("orders", broker, recorded_topic(defaults=begins_with))
    assert found.local_retention_target == LocalRetentionTarget(*expected)


def test_kafka_name_stands_for_write_and_read():
    """remote.storage.enable switches both, in the file and on the broker."""
    for found in (
        topic({"remote.storage.enable": "true"}),
        topic(file="topics: {orders: {remote.storage.enable: true}}\n"),
    ):
        assert (found.remote_write, found.remote_read) == (True, True)
    both = topic({"remote.storage.enable": "false", "redpanda.remote.write": "true"})
    assert both.remote_write is False


def test_file_overrides_the_broker_setting_by_setting():
    """The file decides what it sets, and the broker the rest."""
    broker = {"local.retention.ms": "5000", "local.retention.bytes": "700", "redpanda.remote.write": "true"}
    file = "topics: {orders: {retention.local.target.ms: 1s, redpanda.remote.write: false}}\n"
    found = topic(broker, file=file)
    assert found.local_retention_target == LocalRetentionTarget(target_ms=1000, target_bytes=700)
    assert found.remote_write is False


@pytest.mark.parametrize("place", ["file", "broker"])
def test_kafka_local_retention_wins_over_redpanda(place):
    """Kafka's name decides if both names are set at one place."""
    both = {
        "local.retention.ms": "1000",
        "retention.local.target.ms": "2000",
        "local.retention.bytes": "3000",
        "retention.local.target.bytes": "4000",
    }
    file = "topics:\n  orders:\n" + "".join(f"    {name}: {value}\n" for name, value in both.items())
    assert (target(file=file) if place == "file" else target(both)) == (1000, 3000)


@pytest.mark.parametrize("place", ["file", "broker"])
@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("local.retention.ms", -2, (None, 9)),
        ("local.retention.ms", -1, (None, 9)),
        ("local.retention.ms", 0, (0, 9)),
        ("local.retention.bytes", -2, (DAY_MS, None)),
        ("local.retention.bytes", -1, (DAY_MS, None)),
        ("local.retention.bytes", 0, (DAY_MS, 0)),
        ("retention.local.target.ms", -1, (None, 9)),
        ("retention.local.target.ms", 5, (5, 9)),
        ("retention.local.target.bytes", -1, (DAY_MS, None)),
        ("retention.local.target.bytes", 5, (DAY_MS, 5)),
    ],
)
def test_negative_numbers_lift_one_limit_and_no_default_replaces_it(place, name, value, expected):
    """-1 is no limit, and Kafka's -2 is no local limit: the cluster's default does not come back."""
    base = STRICT + "retention_local_target_bytes_default: 9\n"
    if place == "file":
        assert target(file=f"topics: {{orders: {{{name}: {value}}}}}\n", base=base) == expected
    else:
        assert target({name: str(value)}, base=base) == expected


def test_kafka_as_total_hides_the_redpanda_name():
    """An explicit -2 decides, although it is no limit."""
    assert target({"local.retention.ms": "-2", "retention.local.target.ms": "5"}) == (None, None)


def test_redpanda_zero_on_the_broker_is_no_limit():
    """Redpanda switches a limit off with zero, where Kafka would keep nothing."""
    assert target({"retention.local.target.ms": "0", "retention.local.target.bytes": "0"}) == (None, None)


def test_exact_name_wins_over_patterns_and_long_patterns_over_short():
    """The order of the entries in the file does not matter, except between patterns of one length."""
    file = """\
topics:
  "*": {retention.local.target.ms: 1, retention.local.target.bytes: 1, redpanda.remote.read: true}
  ord*: {retention.local.target.ms: 2, retention.local.target.bytes: 2}
  "*ers": {retention.local.target.bytes: 3}
  orders: {retention.local.target.ms: 4}
  order?*: {retention.local.target.bytes: 5}
"""
    assert target(file=file) == (4, 5)
    assert target(file=file, name="order") == (2, 2)
    assert target(file=file, name="ordinals-and-others") == (2, 2)
    assert target(file=file, name="others") == (1, 3)
    assert target(file=file, name="clicks") == (1, 1)
    assert topic(file=file).remote_read is True


def test_patterns_are_case_sensitive_and_may_hold_sets():
    """Kafka's topic names are case-sensitive."""
    file = "topics: {'orders-[0-9]': {retention.local.target.ms: 7}}\n"
    assert target(file=file, name="orders-5") == (7, None)
    assert target(file=file, name="Orders-5") == (DAY_MS, None)


def test_more_specific_entry_wins_whichever_name_it_uses():
    """Kafka's name in a pattern does not beat Redpanda's under the topic's own name."""
    file = """\
topics:
  "*": {remote.storage.enable: true, local.retention.ms: 1}
  orders: {redpanda.remote.write: false, retention.local.target.ms: 2}
"""
    found = topic(file=file)
    assert (found.remote_write, found.remote_read) == (False, True)
    assert found.local_retention_target.target_ms == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("redpanda.remote.write", "maybe"),
        ("redpanda.remote.read", "1"),
        ("remote.storage.enable", "yes"),
        ("local.retention.ms", "1d"),
        ("local.retention.ms", "-3"),
        ("local.retention.bytes", "9223372036854775808"),
        ("retention.local.target.ms", "1.5"),
        ("retention.local.target.ms", "-2"),
        ("retention.local.target.bytes", "\u0665"),
    ],
)
def test_broker_value_that_cannot_be_read_is_reported_and_ignored(name, value):
    """The broker's configuration is not ours, so a bad value in it stops nothing."""
    found = topic({name: value})
    assert found.local_retention_target == topic().local_retention_target
    assert (found.remote_write, found.remote_read) == (True, False)
    (problem,) = found.problems
    assert problem.startswith(f"topic orders: the broker has {name}={value}, which is not ")


def test_broker_values_in_other_spellings_are_read():
    """Case and blanks do not matter, an empty value is none, and unrelated names are left alone."""
    found = topic(
        {
            "redpanda.remote.read": " TRUE ",
            "local.retention.ms": "",
            "cleanup.policy": "x",
            "retention.ms": "?",
        }
    )
    assert found.remote_read is True
    assert found.problems == ("topic orders: the broker has retention.ms=?, which is not a limit",)
    assert found.local_retention_target.target_ms == DAY_MS


@pytest.mark.parametrize(
    ("file", "broker", "cluster", "expected"),
    [
        pytest.param("", {}, "", (7 * DAY_MS, None), id="not-set"),
        pytest.param("", {}, "log_retention_ms: null", (None, None), id="cluster-says-none"),
        pytest.param("", {}, "delete_retention_ms: null", (7 * DAY_MS, None), id="the-alias-says-none"),
        pytest.param(
            "", {}, "delete_retention_ms: 5\nlog_retention_ms: 7d", (5, None), id="the-alias-and-the-default"
        ),
        pytest.param("", {}, "log_retention_ms: 7d\nretention_bytes: 9", (7 * DAY_MS, 9), id="cluster"),
        pytest.param("", {}, "log.retention.ms: 5\nlog.retention.bytes: 9", (5, 9), id="kafka-names"),
        pytest.param("", {}, "delete_retention_ms: 5", (5, None), id="the-alias"),
        pytest.param("", {}, "log_retention_ms: -1", (None, None), id="cluster-without-limit"),
        pytest.param("", {"retention.ms": "8", "retention.bytes": "-1"}, "", (8, None), id="broker"),
        pytest.param(
            "", {"retention.ms": "-1"}, "log_retention_ms: 7", (None, None), id="broker-before-cluster"
        ),
        pytest.param(
            "retention.ms: 3, retention.bytes: 4", {"retention.ms": "8"}, "", (3, 4), id="file-before-broker"
        ),
        pytest.param("retention.ms: -1", {"retention.ms": "8"}, "", (None, None), id="file-lifts-a-limit"),
        pytest.param(
            "remote.log.retention.minutes: 2, remote.log.retention.bytes: 5",
            {},
            "",
            (120_000, 5),
            id="first-names",
        ),
        pytest.param(
            "remote.log.retention.minutes: 2, retention.ms: 5", {}, "", (5, None), id="later-name-wins"
        ),
    ],
)
def test_total_retention_is_the_first_that_is_set(file, broker, cluster, expected):
    """The topic in the file, then the broker, then the cluster; each limit by itself."""
    found = topic(broker, file=f"{cluster}\ntopics: {{orders: {{{file}}}}}\n", base=TIERED)
    assert (found.total.limit_ms, found.total.limit_bytes) == expected
    assert found.total.deletes


@pytest.mark.parametrize(
    ("file", "broker", "deletes", "is_compacted"),
    [
        ("", None, True, False),
        ("", "compact", False, True),
        ("", "compact,delete", True, True),
        ("cleanup.policy: compact", None, False, True),
        ("cleanup.policy: delete", "compact", True, False),
        ("cleanup.policy: 'compact,delete'", "delete", True, True),
        ("", "", False, False),
        ("cleanup.policy: ''", "delete", False, False),
        ("cleanup.policy: delete", "", True, False),
    ],
)
def test_cleanup_policy_says_whether_retention_deletes(file, broker, deletes, is_compacted):
    """A topic without `delete` in its policy keeps its records however old they are, as does an empty one."""
    on_broker = {"retention.ms": "5"} | ({} if broker is None else {"cleanup.policy": broker})
    found = topic(on_broker, file=f"topics: {{orders: {{{file}}}}}\n")
    assert (found.total.deletes, found.is_compacted) == (deletes, is_compacted)
    assert found.is_compact_only is (is_compacted and not deletes)
    assert found.local_retention_target.target_ms == (5 if deletes else DAY_MS)


@pytest.mark.parametrize(
    ("on_broker", "effective", "expected"),
    [
        pytest.param(("-1", "-1"), (86_400_000, -1), (86_400_000, None), id="what-was-before"),
        pytest.param(("-1", "-1"), (None, None), (None, None), id="not-noted"),
        pytest.param(("7000", "-1"), (86_400_000, 5), (7000, 5), id="changed-since-and-not-taken-over-yet"),
    ],
)
def test_total_retention_of_a_managed_topic_is_what_the_broker_had(on_broker, effective, expected):
    """The broker's own is without limit then because we said so."""
    original = OriginalRetention("86400000", None, *effective)
    broker = dict(zip(("retention.ms", "retention.bytes"), on_broker, strict=True))
    found = parsed(STRICT).topic("orders", broker, recorded_topic(original_retention=original))
    assert (found.total.limit_ms, found.total.limit_bytes) == expected


@pytest.mark.parametrize(
    ("settings", "is_recorded", "on_broker", "said"),
    [
        pytest.param({}, True, "-1", "", id="managed"),
        pytest.param({"tieringd.managed.retention": "false"}, False, "-1", "", id="never managed"),
        pytest.param(
            {"tieringd.managed.retention": "false"}, True, "-1", "release orders", id="not any more"
        ),
        pytest.param({"tieringd.managed.retention": "false"}, True, "7000", "", id="set on the broker since"),
        pytest.param(
            {"redpanda.remote.write": "false"}, True, "-1", "remote write is off", id="not archived"
        ),
        pytest.param({"redpanda.remote.read": "false"}, True, "-1", "release orders", id="not read"),
        pytest.param({"redpanda.remote.read": "false"}, False, "7000", "has no effect", id="never read"),
    ],
)
def test_topic_that_nothing_deletes_from_any_more_is_told(settings, is_recorded, on_broker, said):
    """The broker's retention is unlimited because we said so. What manages it was switched off since."""
    wanted = {
        "tieringd.managed.retention": "true",
        "redpanda.remote.write": "true",
        "redpanda.remote.read": "true",
    } | settings
    file = "topics: {orders: {" + ", ".join(f"{name}: {value}" for name, value in wanted.items()) + "}}\n"
    original = OriginalRetention("86400000", None, 86_400_000, -1) if is_recorded else None
    found = parsed(STRICT + file).topic(
        "orders", {"retention.ms": on_broker}, recorded_topic(original_retention=original)
    )
    assert len(found.problems) == bool(said)
    assert said in " ".join(found.problems)


def test_total_retention_says_whether_clients_read_the_archive():
    """The broker's own retention comes first for a topic that is only written to the archive."""
    assert not topic().total.is_read_remotely
    assert topic({"redpanda.remote.read": "true"}).total.is_read_remotely


@pytest.mark.parametrize(
    ("file", "broker", "expected"),
    [
        pytest.param("", {}, (1 << 30, 1 << 29), id="a-gibibyte"),
        pytest.param("", {"segment.bytes": "1048576"}, (1 << 20, 1 << 19), id="topic's-segments"),
        pytest.param(
            "cloud_storage_segment_size_target: 64MiB\n", {}, (64 << 20, (64 << 20) * 4 // 5), id="target"
        ),
        pytest.param(
            "cloud_storage_segment_size_target: 64MiB\ncloud_storage_segment_size_min: 1MiB\n",
            {"segment.bytes": "1048576"},
            (64 << 20, 1 << 20),
            id="both",
        ),
    ],
)
def test_sizes_of_merged_segments_follow_from_the_topic_s(file, broker, expected):
    """The cluster's target and minimum, or what the topic's own segment size gives."""
    limits = topic({"redpanda.remote.write": "true", **broker}, file=file).merge_limits
    assert (limits.target_bytes, limits.min_bytes) == expected


@pytest.mark.parametrize(
    ("file", "broker"),
    [
        pytest.param("cloud_storage_enable_segment_merging: false\n", {}, id="turned-off"),
        pytest.param("", {"cleanup.policy": "compact"}, id="compacted"),
        pytest.param("", {"cleanup.policy": "compact,delete"}, id="compacted-and-deleted"),
        pytest.param("", {"redpanda.remote.write": "false"}, id="not-written"),
    ],
)
def test_segments_of_some_topics_are_not_merged(file, broker):
    """Segments are not merged if merging is off, if keys are compacted, or if nothing is archived."""
    assert topic({"redpanda.remote.write": "true", **broker}, file=file).merge_limits is None


def test_retention_pace_is_the_cluster_s():
    """The pace of retention is the same for all topics, and follows a reload."""
    found = topic(file="cloud_storage_housekeeping_interval_ms: 1m\narchive_delete_delay_ms: 0\n")
    assert found.retention_pace == RetentionPace(interval_ms=60_000, delete_delay_ms=0)
    assert topic().retention_pace == RetentionPace(interval_ms=300_000, delete_delay_ms=3_600_000)
