"""`tieringd logdirs describe`: rpk's table, with the bucket as one more directory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.builders import segment_bytes
from tests.support.daemon import run_json
from tests.unit.cli.commands import BASES, TOPIC, invoked, tieringd
from tieringd.cli.logdirs import Aggregate, Row, aggregated, bucket_name, local_and_remote_rows, selected
from tieringd.model.local_log import LogDirSizes, ReplicaSize
from tieringd.model.partition import TopicPartition

A0, A1, B0 = TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0)
LOCAL_BYTES = sum(len(segment_bytes(base)) for base in BASES)
ARCHIVED_BYTES = sum(len(segment_bytes(base)) for base in BASES[:-1])
ROWS = [
    Row(1, "/d", "a", 0, 5),
    Row(1, "/d", "a", 1, 7),
    Row(1, "/d", "b", 0, 1),
    Row(1, "remote://x", "a", 0, 50),
    Row(2, None, None, None, 0, "no answer"),
    Row(3, "/d", "a", 0, 2),
]


def test_logdirs_lists_the_disk_and_the_bucket(site):
    """A log directory without a broker has rows too, and what is archived of it stands beside."""
    assert run_json("logdirs", "describe", "--config", str(site.config)) == [
        {
            "broker": None,
            "dir": str(site.root / "logs"),
            "topic": TOPIC,
            "partition": 0,
            "size": LOCAL_BYTES,
            "error": None,
        },
        {
            "broker": None,
            "dir": f"remote://{site.archive}",
            "topic": TOPIC,
            "partition": 0,
            "size": ARCHIVED_BYTES,
            "error": None,
        },
    ]


def test_bucket_is_not_listed_where_the_configuration_hides_it(site, tmp_path):
    """The property of the gateway's answers holds for the command as well."""
    hiding = tmp_path / "hiding.yaml"
    hiding.write_text(site.config.read_text() + "kafka_enable_describe_log_dirs_remote_storage: false\n")
    (row,) = run_json("logdirs", "describe", "--config", str(hiding))
    assert (row["dir"], row["size"]) == (str(site.root / "logs"), LOCAL_BYTES)


def test_logdirs_table_has_the_columns_of_rpk(site):
    """The columns are in capitals; a sum has only those that it sums into."""

    def lines(*options):
        return [
            line.split()
            for line in invoked("logdirs", "describe", "-c", site.config, *options).output.splitlines()
        ]

    assert lines()[0] == ["BROKER", "DIR", "TOPIC", "PARTITION", "SIZE", "ERROR"]
    assert lines("--aggregate-into", "topic")[0] == ["BROKER", "DIR", "TOPIC", "SIZE", "ERROR"]
    assert lines("--aggregate-into", "dir")[0] == ["BROKER", "DIR", "SIZE", "ERROR"]
    assert lines("--aggregate-into", "broker") == [
        ["BROKER", "SIZE", "ERROR"],
        ["-", str(LOCAL_BYTES + ARCHIVED_BYTES), "-"],
    ]
    assert lines("-H", "--aggregate-into", "broker")[1][1] == "1.82kB"
    assert [row[4] for row in lines("--sort-by-size")[1:]] == [str(ARCHIVED_BYTES), str(LOCAL_BYTES)]
    assert len(lines("--topics", f"other,{TOPIC}")) == 3
    assert len(lines("--topics", "other")) == 1
    assert len(lines("--topics", "other", "--topics", TOPIC)) == 3
    assert len(lines("--broker", "1")) == 1


def test_topic_that_no_broker_has_is_listed_without_one(own_site):
    """A topic that is gone from every disk is still listed with its bytes in the bucket."""
    tieringd("run", "--once", "-c", own_site.config)
    for path in own_site.partition_directory.iterdir():
        path.unlink()
    own_site.partition_directory.rmdir()
    (row,) = invoked("logdirs", "describe", "-c", own_site.config, "-f", "json").json()
    assert (row["broker"], row["dir"]) == (None, f"remote://{own_site.archive}")
    assert (row["topic"], row["size"]) == (TOPIC, ARCHIVED_BYTES)


def test_former_topic_of_the_same_name_is_told_from_the_brokers_own(own_site):
    """A re-created topic has the broker's id, its former self has none; other clusters are not listed."""
    meta = own_site.partition_directory.parent / "meta.properties"
    for cluster, node_id in (("other", 9), ("ours", 4)):
        meta.write_text(f"version=1\ncluster.id={cluster}\nnode.id={node_id}\n")
        if cluster == "ours":
            invoked("archive", "claim", "-c", own_site.config)
        tieringd("run", "--once", "-c", own_site.config)
    metadata = own_site.partition_directory / "partition.metadata"
    metadata.write_text("version: 0\ntopic_id: W1xNUlUlTfigw_K-dvdxsA")
    (own_site.partition_directory / f"{BASES[-1]:020d}.log").unlink()
    tieringd("run", "--once", "-c", own_site.config)

    rows = invoked("logdirs", "describe", "-c", own_site.config, "-f", "json").json()
    first, second, _ = (len(segment_bytes(base)) for base in BASES)
    assert [(row["broker"], row["dir"], row["size"]) for row in rows] == [
        (4, str(own_site.root / "logs"), first + second),
        (4, f"remote://{own_site.archive}", first),
        (None, f"remote://{own_site.archive}", ARCHIVED_BYTES),
    ]


def test_each_broker_with_a_replica_shows_what_is_stored():
    """
    A stored partition counts once for each broker with a replica, as with Redpanda.

    A replica that moves between two directories of a broker still counts once.
    """
    directories = [
        LogDirSizes(1, "/d", (ReplicaSize(A0, 5), ReplicaSize(B0, 1))),
        LogDirSizes(1, "/e", (ReplicaSize(A0, 3),)),
        LogDirSizes(2, "/d", (ReplicaSize(A0, 4), ReplicaSize(A1, 9))),
        LogDirSizes(3, "", error="no answer"),
        LogDirSizes(4, "/bad", error="KAFKA_STORAGE_ERROR"),
    ]
    rows = local_and_remote_rows(directories, {A0: 50, TopicPartition("c", 0): 8}, bucket="remote://x")
    assert rows[:5] == [
        Row(1, "/d", "a", 0, 5),
        Row(1, "/d", "b", 0, 1),
        Row(1, "/e", "a", 0, 3),
        Row(2, "/d", "a", 0, 4),
        Row(2, "/d", "a", 1, 9),
    ]
    assert set(rows[5:]) == {
        Row(3, None, None, None, 0, "no answer"),
        Row(4, "/bad", None, None, 0, "KAFKA_STORAGE_ERROR"),
        Row(1, "remote://x", "a", 0, 50),
        Row(2, "remote://x", "a", 0, 50),
    }
    assert len(rows) == 9


@pytest.mark.parametrize(
    ("into", "expected"),
    [
        pytest.param(None, ROWS, id="nothing"),
        pytest.param(
            Aggregate.TOPIC,
            [
                Row(1, "/d", "a", None, 12),
                Row(1, "/d", "b", None, 1),
                Row(1, "remote://x", "a", None, 50),
                Row(2, None, None, None, 0, "no answer"),
                Row(3, "/d", "a", None, 2),
            ],
            id="topic",
        ),
        pytest.param(
            Aggregate.DIR,
            [
                Row(1, "/d", None, None, 13),
                Row(1, "remote://x", None, None, 50),
                Row(2, None, None, None, 0, "no answer"),
                Row(3, "/d", None, None, 2),
            ],
            id="dir",
        ),
        pytest.param(
            Aggregate.BROKER,
            [
                Row(1, None, None, None, 63),
                Row(2, None, None, None, 0, "no answer"),
                Row(3, None, None, None, 2),
            ],
            id="broker",
        ),
    ],
)
def test_sums_keep_errors_apart(into, expected):
    """Sizes add up in what they are summed into, and an error is never lost in a sum."""
    assert aggregated(ROWS, into) == expected


def test_selection_keeps_errors_of_the_brokers_asked_for():
    """A broker that did not answer may have the topic that was asked for."""
    assert selected(ROWS, broker=None, topics=frozenset("b")) == [ROWS[2], ROWS[4]]
    assert selected(ROWS, broker=2, topics=frozenset("b")) == [ROWS[4]]
    assert selected(ROWS, broker=3, topics=frozenset()) == [ROWS[5]]


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        ("aws", "a-bucket"),
        ("google", "a-bucket"),
        ("azure", "a-container"),
        ("file", "/root"),
        ("plugin", "a-bucket"),
    ],
)
def test_bucket_has_the_name_of_its_kind(backend, name):
    """A container and a directory stand for a bucket where the store has those."""
    config = SimpleNamespace(
        backend=backend,
        cloud_storage_bucket="a-bucket",
        cloud_storage_azure_container="a-container",
        cloud_storage_file_root="/root",
        cloud_storage_plugin="a-plugin",
    )
    assert bucket_name(config) == name
    without_bucket = SimpleNamespace(**{**vars(config), "cloud_storage_bucket": None})
    assert backend != "plugin" or bucket_name(without_bucket) == "a-plugin"
