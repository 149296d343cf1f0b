"""Which objects a topic's deletion takes with it, read replicas, and what acts at creation only."""

from itertools import product

import pytest

from tests.unit.config.texts import SMALLEST, TIERED, parsed, problems_of

ANY = (None, True, False)


def topic(broker=None, *, file="", base=TIERED):
    return parsed(base + file).topic("orders", broker or {})


@pytest.mark.parametrize(
    ("write", "read", "replica", "delete"), list(product((True, False), (True, False), (True, False), ANY))
)
@pytest.mark.parametrize("place", ["file", "broker"])
def test_remote_delete_takes_write_and_read_and_no_replica(write, read, replica, delete, place):
    """A topic's objects go with it unless it says otherwise, and only where it is written and read."""
    text = f"cloud_storage_enable_remote_write: {str(write).lower()}\n"
    text += f"cloud_storage_enable_remote_read: {str(read).lower()}\n"
    base = TIERED.replace("cloud_storage_enable_remote_write: true\n", text)
    said = {"redpanda.remote.readreplica": "other-bucket"} if replica else {}
    said |= {} if delete is None else {"redpanda.remote.delete": str(delete).lower()}
    lines = "".join(f"    {name}: {value}\n" for name, value in said.items())
    file = f"topics:\n  orders:\n{lines}" if place == "file" else ""
    found = topic({} if file else said, file=file, base=base)
    assert found.remote_delete is (write and read and not replica and delete is not False)
    assert found.remote_write is (write and not replica)
    assert found.remote_read is read


@pytest.mark.parametrize(
    ("entries", "stays"),
    [
        pytest.param("{}", False, id="nothing said"),
        pytest.param("{orders: {redpanda.remote.delete: false}}", True, id="by name"),
        pytest.param('{"*": {redpanda.remote.delete: false}}', True, id="for all"),
        pytest.param(
            '{"*": {redpanda.remote.delete: false}, orders: {redpanda.remote.delete: true}}',
            False,
            id="but one",
        ),
        pytest.param("{orders: {redpanda.remote.write: false}}", False, id="not written any more"),
    ],
)
def test_file_says_by_name_whether_a_deleted_topic_stays(entries, stays):
    """The file decides alone for topics that no broker has any more."""
    assert parsed(f"{TIERED}topics: {entries}\n").keeps_deleted("orders") is stays


def test_remote_delete_is_off_while_tiering_is():
    """cloud_storage_enabled is the switch for this as well."""
    assert topic({"redpanda.remote.delete": "true"}, base=SMALLEST).remote_delete is False


@pytest.mark.parametrize(
    ("properties", "words"),
    [
        pytest.param("{redpanda.remote.delete: true}", None, id="on"),
        pytest.param("{redpanda.remote.delete: false}", None, id="off"),
        pytest.param(
            "{redpanda.remote.delete: true, redpanda.remote.read: false}",
            "has no effect with redpanda.remote.read set to false: it needs redpanda.remote.write and "
            "redpanda.remote.read, and no read replica",
            id="no read",
        ),
        pytest.param(
            "{redpanda.remote.delete: true, remote.storage.enable: false}",
            "has no effect with redpanda.remote.write and redpanda.remote.read set to false",
            id="neither",
        ),
        pytest.param(
            "{redpanda.remote.delete: true, redpanda.remote.readreplica: other-bucket}",
            "has no effect with a read replica",
            id="replica",
        ),
    ],
)
def test_remote_delete_that_deletes_nothing_says_so(properties, words):
    """The warning says where nothing is deleted, and what a deletion takes."""
    warnings = parsed(TIERED + f"topics: {{orders: {properties}}}\n").warnings
    assert len(warnings) == (words is not None)
    if words is not None:
        assert warnings[0].startswith(f"t.yaml:9: topics[orders].redpanda.remote.delete: {words}")


@pytest.mark.parametrize("switch", ["redpanda.remote.write", "remote.storage.enable"])
def test_read_replica_refuses_remote_write(switch):
    """
    A read replica with remote write is a fault in the file that names both properties.

    On the broker it is a problem, and nothing is uploaded.
    """
    (problem,) = problems_of(
        TIERED + f"topics: {{orders: {{{switch}: true, redpanda.remote.readreplica: other-bucket}}}}\n"
    )
    assert problem.startswith(f"t.yaml:9: topics[orders].{switch}: contradicts redpanda.remote.readreplica")
    found = topic({switch: "true", "redpanda.remote.readreplica": "other-bucket"})
    assert found.remote_write is False
    (problem,) = found.problems
    assert "redpanda.remote.readreplica=other-bucket refuses redpanda.remote.write" in problem


def test_read_replica_that_asks_for_no_write_is_no_problem():
    """The cluster's value for all topics is not a wish of this one."""
    replica = {"redpanda.remote.readreplica": "other-bucket"}
    for more in ({}, {"redpanda.remote.write": "false"}):
        found = topic({**replica, **more})
        assert (found.remote_write, found.problems) == (False, ())
    assert parsed(TIERED + "topics: {orders: {redpanda.remote.readreplica: other-bucket}}\n").warnings == ()


def test_read_replica_of_the_broker_refuses_the_write_of_the_file():
    """The two may be said in different places."""
    found = topic(
        {"redpanda.remote.readreplica": "other-bucket"},
        file="topics: {orders: {redpanda.remote.write: true}}\n",
    )
    assert (found.remote_write, len(found.problems)) == (False, 1)


@pytest.mark.parametrize("value", ["", " ", "false", "null"])
def test_topic_that_is_no_read_replica_is_written(value):
    """Redpanda shows the property on every topic."""
    found = topic({"redpanda.remote.readreplica": value})
    assert (found.remote_write, found.problems) == (True, ())


def test_recovery_acts_only_at_creation():
    """The broker may have it set, which is reported and changes nothing; so may the file."""
    found = topic({"redpanda.remote.recovery": "true"})
    (problem,) = found.problems
    assert "redpanda.remote.recovery=true, which only has an effect when a topic is created" in problem
    assert found.remote_write is topic().remote_write
    assert topic({"redpanda.remote.recovery": "false"}) == topic()
    (note,) = parsed(TIERED + "topics: {orders: {redpanda.remote.recovery: true}}\n").notes
    assert note.endswith("use the command `tieringd recover` instead")


@pytest.mark.parametrize("kind", ["ms", "bytes"])
def test_local_limit_beside_kafkas_name_is_a_doubt(kind):
    """Kafka's setting holds if both families are set, and a check names the line to remove."""
    both = f"{{local.retention.{kind}: 5000, retention.local.target.{kind}: 7000}}"
    (warning,) = parsed(TIERED + f"topics:\n  orders: {both}\n").warnings
    assert f"retention.local.target.{kind}" in warning
    assert f"has no effect, because local.retention.{kind} takes precedence; remove one of them" in warning


@pytest.mark.parametrize("name", ["local.retention.ms", "retention.local.target.ms"])
def test_one_family_of_local_limits_is_no_doubt(name):
    """Either name alone is what it says."""
    assert parsed(TIERED + f"topics:\n  orders: {{{name}: 5000}}\n").warnings == ()


@pytest.mark.parametrize(
    ("broker", "file", "is_followed"),
    [
        pytest.param({"cleanup.policy": "compact"}, "", True, id="compact"),
        pytest.param({"cleanup.policy": "compact,delete"}, "", True, id="compact and delete"),
        pytest.param({"cleanup.policy": "delete"}, "", False, id="delete"),
        pytest.param({}, "", False, id="says nothing"),
        pytest.param(
            {"cleanup.policy": "compact", "redpanda.remote.write": "false"}, "", False, id="no write"
        ),
        pytest.param(
            {"cleanup.policy": "compact"},
            "cloud_storage_enable_compacted_topic_reupload: false\n",
            False,
            id="switched off",
        ),
    ],
)
def test_archive_follows_compaction_of_compacted_topics(broker, file, is_followed):
    """Compacted segments are uploaded for topics that are compacted and written, unless that is off."""
    assert topic(broker, file=file).reuploads_compacted is is_followed
