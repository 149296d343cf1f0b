"""Export to an Iceberg table: its layout, its offsets, and what becomes of runs that meet or die."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import BucketTransform, DayTransform
from pyiceberg.types import IntegerType, LongType, NestedField, StringType, StructType, TimestampType

from tests.fakes.dying_store import Killed
from tests.support.exports import ArchivedLogs, counted, exported, in_this_process
from tests.support.iceberg import rows_of_table, running_catalog
from tieringd.errors import ConfigError, CorruptDataError, StorageUnavailable
from tieringd.spark.jobs.export.iceberg_layout import SCHEMA, partition_spec
from tieringd.spark.jobs.export.iceberg_table import SEQUENCE_PROPERTY, STATE_PROPERTY
from tieringd.spark.jobs.export.iceberg_target import IcebergTarget, IcebergTopic
from tieringd.spark.jobs.export.state import parse_state

NAME = ("redpanda", "orders")


@pytest.fixture
def logs(tmp_path):
    logs = ArchivedLogs.made(tmp_path / "source", partitions=2)
    yield logs
    logs.bucket.close()


@pytest.fixture
def catalog(tmp_path):
    with running_catalog(tmp_path / "warehouse") as catalog:
        yield catalog


@pytest.fixture
def make_topic(catalog):
    """Give a function that makes the target, as each run makes its own."""

    def make(partition_by="hour", within=catalog):
        return IcebergTopic(within, NAME, partition_by=partition_by)

    return make


def seen(catalog):
    """Return what a reader of the table sees."""
    return counted(rows_of_table(catalog.load_table(NAME)))


def state_of(properties):
    return parse_state(properties[STATE_PROPERTY], source="test")


async def test_table_has_the_layout_of_a_redpanda_topic(logs, catalog, make_topic):
    """A table has Redpanda's columns, their order and types, and hours under the name that Redpanda gives."""
    await logs.fill()

    outcome = exported(logs, make_topic())

    table = catalog.load_table(NAME)
    assert table.schema().as_struct() == SCHEMA.as_struct()
    (field,) = table.spec().fields
    assert (str(field.transform), field.name) == ("hour", "redpanda.timestamp_hour")
    assert table.schema().find_column_name(field.source_id) == "redpanda.timestamp"
    assert seen(catalog) == logs.written()
    assert outcome.commits == 1
    file = min(task.file.file_path for task in table.scan().plan_files())
    (row, *_) = pq.read_table(file.removeprefix("file://")).to_pylist()
    assert row == {
        "redpanda": {
            "partition": 0,
            "offset": 0,
            "timestamp": datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC),
            "headers": None,
            "key": b"k0",
            "timestamp_type": 0,
        },
        "value": b"0-0",
    }


async def test_offsets_are_in_the_snapshot_and_in_the_table(logs, catalog, make_topic):
    """The snapshot that adds the files has the offsets, and the table's properties have the same."""
    await logs.fill()

    exported(logs, make_topic())

    table = catalog.load_table(NAME)
    state = state_of(table.current_snapshot().summary.additional_properties)
    assert state.offsets == {0: 18, 1: 18}
    assert state.topic == logs.topic().topic.key
    assert state == state_of(table.properties)


async def test_second_run_appends_only_what_is_new(logs, catalog, make_topic):
    """A snapshot for each round with something in it, and none for nothing."""
    await logs.fill()
    exported(logs, make_topic())
    await logs.fill(2)

    outcome = exported(logs, make_topic(), portion_bytes=200, round_bytes=500)

    assert seen(catalog) == logs.written()
    assert (outcome.begun_at, outcome.reached) == ({0: 18, 1: 18}, {0: 30, 1: 30})
    snapshots = len(catalog.load_table(NAME).snapshots())
    assert snapshots == 1 + outcome.commits
    exported(logs, make_topic())
    assert len(catalog.load_table(NAME).snapshots()) == snapshots


async def test_killed_run_leaves_the_table_as_it_was(logs, catalog, make_topic):
    """The killed run's files are named by nothing, and the next run writes its own."""
    await logs.fill()
    exported(logs, make_topic())
    before = seen(catalog)
    await logs.fill(2)

    def run(work, portions):
        in_this_process(work, portions)
        raise Killed

    with pytest.raises(Killed):
        exported(logs, make_topic(), run=run)
    assert seen(catalog) == before

    await logs.merge()
    exported(logs, make_topic(), portion_bytes=100)
    assert seen(catalog) == logs.written()


async def test_files_are_found_by_hour_and_offset(logs, catalog, make_topic):
    """Partition values and bounds are right: a filter reads no more files than it has to, and finds all."""
    await logs.fill()
    exported(logs, make_topic())
    table = catalog.load_table(NAME)
    rows = rows_of_table(table)
    files = [task.file for task in table.scan().plan_files()]
    assert len(files) == 12  # each batch has an hour of its own

    for field, wanted in [
        ("redpanda.timestamp", rows[4]["timestamp"]),
        ("redpanda.offset", 7),
        ("redpanda.partition", 1),
    ]:
        name = field.removeprefix("redpanda.")
        text = wanted.isoformat() if isinstance(wanted, datetime) else wanted
        scan = table.scan(row_filter=f"{field} = {text!r}")
        expected = [row for row in rows if row[name] == wanted]
        assert scan.to_arrow().num_rows == len(expected) > 0
        assert len(list(scan.plan_files())) <= len(expected)


@pytest.mark.parametrize("partition_by", ["none", "day"])
async def test_new_table_is_partitioned_as_asked_for(logs, catalog, make_topic, partition_by):
    """A new table has no partitions or one for each day, as asked for."""
    await logs.fill()

    exported(logs, make_topic(partition_by))

    table = catalog.load_table(NAME)
    files = list(table.scan().plan_files())
    assert [str(field.transform) for field in table.spec().fields] == (
        ["day"] if partition_by == "day" else []
    )
    assert len(files) == (4 if partition_by == "day" else 2)
    assert seen(catalog) == logs.written()


async def test_table_that_exists_stays_partitioned_as_it_is(logs, catalog, make_topic):
    """The option is for tables that are made."""
    await logs.fill()
    catalog.create_namespace("redpanda")
    catalog.create_table(NAME, SCHEMA, partition_spec=partition_spec("day"))

    exported(logs, make_topic("hour"))

    assert isinstance(catalog.load_table(NAME).spec().fields[0].transform, DayTransform)
    assert seen(catalog) == logs.written()


async def test_table_with_more_columns_takes_rows_without_them(logs, catalog, make_topic):
    """A table may have more columns if they are nullable. Columns are known by their ids, in any order."""
    await logs.fill()
    redpanda, value = SCHEMA.fields
    fields = redpanda.field_type.fields
    reordered = StructType(fields[0], fields[2], fields[1], *fields[3:], NestedField(40, "data", LongType()))
    schema = Schema(
        NestedField(41, "extra", StringType()), value, NestedField(1, "redpanda", reordered, required=True)
    )
    catalog.create_namespace("redpanda")
    catalog.create_table(NAME, schema, partition_spec=partition_spec("hour"))

    exported(logs, make_topic())

    assert seen(catalog) == logs.written()
    assert set(catalog.load_table(NAME).scan().to_arrow().column("extra").to_pylist()) == {None}


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        pytest.param(Schema(SCHEMA.fields[0]), "there is no column value", id="missing"),
        pytest.param(
            Schema(SCHEMA.fields[0], NestedField(2, "value", StringType())),
            "column value is string, not binary",
            id="type",
        ),
        pytest.param(
            Schema(NestedField(1, "redpanda", StructType(NestedField(5, "timestamp", TimestampType())))),
            "column redpanda.timestamp is timestamp, not timestamptz",
            id="inner type",
        ),
        pytest.param(
            Schema(SCHEMA.fields[0], NestedField(2, "value", SCHEMA.fields[1].field_type, required=True)),
            "column value must not be null",
            id="required",
        ),
        pytest.param(
            Schema(*SCHEMA.fields, NestedField(3, "mine", IntegerType(), required=True)),
            "column mine must not be null, but it is not a column of an export",
            id="other's",
        ),
    ],
)
async def test_table_with_another_layout_is_refused_with_the_difference(
    logs, catalog, make_topic, schema, text
):
    """Nothing is appended to it."""
    await logs.fill(1)
    catalog.create_namespace("redpanda")
    catalog.create_table(NAME, schema)

    with pytest.raises(ConfigError, match=text):
        exported(logs, make_topic())
    assert catalog.load_table(NAME).snapshots() == []


async def test_table_partitioned_by_something_else_is_refused(logs, catalog, make_topic):
    """Only the time of a record says in which file it is."""
    await logs.fill(1)
    catalog.create_namespace("redpanda")
    spec = PartitionSpec(PartitionField(7, 1000, BucketTransform(4), "key_bucket"))
    catalog.create_table(NAME, SCHEMA, partition_spec=spec)

    with pytest.raises(ConfigError, match=r"partitioned by bucket\[4\]\(redpanda.key\)"):
        exported(logs, make_topic())


async def test_table_with_rows_of_others_is_refused(logs, catalog, make_topic):
    """A broker's own Iceberg topic may have the same records already."""
    await logs.fill()
    exported(logs, make_topic())
    rows = catalog.load_table(NAME).scan().to_arrow()
    catalog.drop_table(NAME)
    catalog.create_table(NAME, SCHEMA).append(rows)

    with pytest.raises(ConfigError, match="no tieringd export wrote"):
        exported(logs, make_topic())


async def test_runs_at_once_count_each_record_once(logs, catalog, make_topic):
    """The slower one finds the table changed by another export, and goes on from there."""
    await logs.fill()
    inner = []

    def run(work, portions):
        written = in_this_process(work, portions)
        if not inner:
            inner.append(exported(logs, make_topic()))
        return written

    outer = exported(logs, make_topic(), run=run)

    assert (inner[0].commits, outer.commits) == (1, 0)
    assert outer.reached == {0: 18, 1: 18}
    assert seen(catalog) == logs.written()


class Between:
    """A catalogue that lets something happen right before its first commit, or right after it."""

    def __init__(self, catalog, happen, *, after=None):
        self._catalog = catalog
        self._happen = [happen]
        self._after = after

    def __getattr__(self, name):
        return getattr(self._catalog, name)

    def load_table(self, identifier):
        return self._through_this(self._catalog.load_table(identifier))

    def create_table(self, *arguments, **options):
        return self._through_this(self._catalog.create_table(*arguments, **options))

    def _through_this(self, table):
        table.catalog = self
        return table

    def commit_table(self, table, requirements, updates):
        if self._happen:
            self._happen.pop()()
        answer = self._catalog.commit_table(table, requirements, updates)
        if self._after is not None:
            error, self._after = self._after, None
            raise error
        return answer


async def test_run_that_another_overtakes_at_its_commit_appends_nothing_twice(logs, catalog, make_topic):
    """The same files are not appended on top, as pyiceberg would do by itself."""
    await logs.fill()
    meanwhile = []
    between = Between(catalog, lambda: meanwhile.append(exported(logs, make_topic())))

    outcome = exported(logs, make_topic(within=between))

    assert (meanwhile[0].commits, outcome.commits) == (1, 0)
    assert seen(catalog) == logs.written()


class Crowded:
    """A catalogue in which another run makes the namespace just before ours would."""

    def __init__(self, catalog, *, is_made):
        self._catalog = catalog
        self._is_made = is_made

    def __getattr__(self, name):
        return getattr(self._catalog, name)

    def create_namespace_if_not_exists(self, namespace):
        if self._is_made:
            self._catalog.create_namespace(namespace)
        raise RuntimeError("UNIQUE constraint failed")


async def test_runs_may_begin_at_once(logs, catalog, make_topic):
    """The namespace that another run makes is as good. Without one, the catalogue's error is raised."""
    await logs.fill()

    with pytest.raises(StorageUnavailable, match="UNIQUE constraint failed"):
        exported(logs, make_topic(within=Crowded(catalog, is_made=False)))
    exported(logs, make_topic(within=Crowded(catalog, is_made=True)))

    assert seen(catalog) == logs.written()


async def test_commit_is_repeated_after_someone_else_s(logs, catalog, make_topic):
    """A compaction, or a change of a property, exports nothing."""
    await logs.fill()
    exported(logs, make_topic())
    await logs.fill(1)

    def someone_else():
        with catalog.load_table(NAME).transaction() as transaction:
            transaction.set_properties({"owner": "someone"})
            with transaction.update_snapshot().fast_append():
                pass

    outcome = exported(logs, make_topic(within=Between(catalog, someone_else)))

    assert outcome.commits == 1
    assert seen(catalog) == logs.written()
    assert catalog.load_table(NAME).properties["owner"] == "someone"


async def test_commit_that_others_never_let_through_is_an_error_that_appends_nothing(
    logs, catalog, make_topic
):
    """A later run begins where this one did."""
    await logs.fill()
    exported(logs, make_topic())
    before = seen(catalog)
    with catalog.load_table(NAME).transaction() as transaction:
        transaction.set_properties({"commit.retry.num-retries": "2", "commit.retry.min-wait-ms": "1"})
    await logs.fill(1)

    class Refusing(Between):
        def commit_table(self, *_):
            raise CommitFailedException("someone was faster")

    with pytest.raises(StorageUnavailable, match="other writers keep changing table"):
        exported(logs, make_topic(within=Refusing(catalog, None)))
    assert seen(catalog) == before

    exported(logs, make_topic())
    assert seen(catalog) == logs.written()


@pytest.mark.parametrize(
    "error",
    [CommitStateUnknownException("no answer"), OSError("connection reset"), CommitFailedException("late")],
    ids=["unknown", "transport", "repeated by the transport"],
)
async def test_commit_whose_answer_is_lost_is_known_again(logs, catalog, make_topic, error):
    """The commit took effect, so nothing is appended another time, and the table can be read."""
    await logs.fill()

    outcome = exported(logs, make_topic(within=Between(catalog, lambda: None, after=error)))

    assert outcome.commits == 1
    assert len(catalog.load_table(NAME).snapshots()) == 1
    assert seen(catalog) == logs.written()


async def test_commit_without_an_answer_that_took_no_effect_is_an_error(logs, catalog, make_topic):
    """The commit may still take effect later. If it does not, the next run does the same again."""
    await logs.fill()

    def fail():
        raise OSError("connection reset")

    with pytest.raises(StorageUnavailable, match="connection reset") as caught:
        exported(logs, make_topic(within=Between(catalog, fail)))

    assert caught.value.outcome_unknown
    exported(logs, make_topic())
    assert seen(catalog) == logs.written()


async def test_offsets_survive_the_snapshots_that_had_them(logs, catalog, make_topic):
    """A compaction follows on the export, and what was before it expires."""
    await logs.fill()
    exported(logs, make_topic())
    compact(catalog)
    table = catalog.load_table(NAME)
    current = table.current_snapshot()
    assert STATE_PROPERTY not in current.summary.additional_properties
    table.maintenance.expire_snapshots().older_than(datetime.now(UTC) + timedelta(days=1)).commit()
    assert [one.snapshot_id for one in catalog.load_table(NAME).snapshots()] == [current.snapshot_id]
    await logs.fill(1)

    outcome = exported(logs, make_topic())

    assert outcome.begun_at == {0: 18, 1: 18}
    assert seen(catalog) == logs.written()


async def test_table_that_was_rolled_back_is_exported_to_from_where_it_was_then(logs, catalog, make_topic):
    """The table's properties are not rolled back, and would leave a hole."""
    await logs.fill()
    exported(logs, make_topic())
    first = catalog.load_table(NAME).current_snapshot()
    await logs.fill(2)
    exported(logs, make_topic())
    catalog.load_table(NAME).manage_snapshots().rollback_to_snapshot(first.snapshot_id).commit()

    outcome = exported(logs, make_topic())

    assert outcome.begun_at == {0: 18, 1: 18}
    assert seen(catalog) == logs.written()


@pytest.mark.parametrize("is_compacted_again", [False, True])
async def test_table_that_was_rolled_back_to_what_tells_no_offsets_is_refused(
    logs, catalog, make_topic, is_compacted_again
):
    """The table's property is of an export whose rows the table does not have any more."""
    await logs.fill()
    exported(logs, make_topic())
    compact(catalog)
    compacted = catalog.load_table(NAME).current_snapshot()
    await logs.fill(1)
    exported(logs, make_topic())
    catalog.load_table(NAME).manage_snapshots().rollback_to_snapshot(compacted.snapshot_id).commit()
    kept = [compacted.snapshot_id]
    if is_compacted_again:
        compact(catalog)
        kept.append(catalog.load_table(NAME).current_snapshot().snapshot_id)
    table = catalog.load_table(NAME)
    gone = [one.snapshot_id for one in table.snapshots() if one.snapshot_id not in kept]
    table.maintenance.expire_snapshots().by_ids(gone).commit()
    await logs.fill(1)

    with pytest.raises(ConfigError, match="rolled back to a snapshot before the last export"):
        exported(logs, make_topic())


async def test_number_that_someone_has_changed_is_told_with_a_way_out(logs, catalog, make_topic):
    """
    The error of a changed sequence number says which property to remove. Then the export goes on.

    Only the table's properties tell how far the export is here: the snapshots are gone.
    """
    await logs.fill()
    exported(logs, make_topic())
    compact(catalog)
    table = catalog.load_table(NAME)
    with table.transaction() as transaction:
        transaction.set_properties({SEQUENCE_PROPERTY: "seven"})
    table.maintenance.expire_snapshots().older_than(datetime.now(UTC) + timedelta(days=1)).commit()
    await logs.fill(1)

    with pytest.raises(
        ConfigError, match=f"'seven' for its property {SEQUENCE_PROPERTY}.*remove the property"
    ):
        exported(logs, make_topic())

    with catalog.load_table(NAME).transaction() as transaction:
        transaction.remove_properties(SEQUENCE_PROPERTY)
    exported(logs, make_topic())
    assert seen(catalog) == logs.written()
    assert catalog.load_table(NAME).properties[SEQUENCE_PROPERTY].isdecimal()


def compact(catalog):
    """Commit as another program that replaces the table's files."""
    table = catalog.load_table(NAME)
    table.append(table.scan().to_arrow().slice(0, 0))


async def test_offsets_that_cannot_be_read_stop_the_export(logs, catalog, make_topic):
    """An operator has to say what is in the table after such a change."""
    await logs.fill(1)
    make_topic().checkpoint()
    table = catalog.load_table(NAME)
    with (
        table.transaction() as transaction,
        transaction.update_snapshot({STATE_PROPERTY: "{}"}).fast_append(),
    ):
        pass

    with pytest.raises(CorruptDataError, match="table redpanda"):
        exported(logs, make_topic())


async def test_times_that_no_calendar_names_are_the_nearest_that_one_does(tmp_path, catalog, make_topic):
    """A client that sent microseconds must not make a table unreadable; the report counts such records."""
    logs = ArchivedLogs.made(tmp_path / "garbage")
    (writer,) = logs.writers
    writer.append(b"none", timestamp_ms=-1)
    writer.append(b"microseconds", b"again", timestamp_ms=1_700_000_000_000_000)
    writer.append(b"nanoseconds", timestamp_ms=1_700_000_000_000_000_000)
    writer.roll()
    await logs.archive()

    outcome = exported(logs, make_topic())

    rows = rows_of_table(catalog.load_table(NAME))
    assert [row["timestamp"] for row in rows] == [
        datetime(1969, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC),
        *[datetime.max.replace(tzinfo=UTC)] * 2,
        None,
    ]
    assert [one.clipped_times for one in outcome.written] == [2]
    hours = {task.file.partition[0] for task in catalog.load_table(NAME).scan().plan_files()}
    assert hours == {-1, 253402300799 // 3600, None}
    logs.bucket.close()


async def test_rows_are_what_spark_and_others_expect_of_types(logs, catalog, make_topic):
    """Timestamps are of UTC in microseconds, and values are bytes."""
    await logs.fill(1)

    exported(logs, make_topic())

    arrow = catalog.load_table(NAME).scan().to_arrow()
    assert arrow.schema.field("redpanda").type.field("timestamp").type == pa.timestamp("us", "UTC")
    assert arrow.schema.field("value").type in (pa.binary(), pa.large_binary())


def test_catalogue_that_cannot_be_opened_is_a_matter_of_configuration(logs):
    """The error for such a catalogue comes before anything is read or written."""
    target = IcebergTarget("test", {"type": "sql"})

    with (
        pytest.raises(ConfigError, match="the Iceberg catalogue test cannot be opened"),
        target.opened(logs.config),
    ):
        pass


def test_dots_of_a_topic_s_name_may_be_replaced(logs, tmp_path):
    """
    Dots stay by default, as with Redpanda.

    They may be replaced for engines that take them for separators.
    """
    properties = {"type": "sql", "uri": f"sqlite:///{tmp_path}/c.db", "warehouse": f"file://{tmp_path}"}

    for replacement, name in [(None, "table lake.raw.a.b"), ("_", "table lake.raw.a_b")]:
        target = IcebergTarget("test", properties, namespace="lake.raw", dot_replacement=replacement)
        with target.opened(logs.config) as place_of:
            assert place_of("a.b").place == name
