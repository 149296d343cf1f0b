"""The commands that look into an archive: JSON that parses, tables that are whole, and exit codes."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess

import pytest
import yaml
from crc32c import crc32c

from tests.builders import DEFAULT_TIME_MS, segment_bytes
from tests.fakes.file_archive import FileArchive
from tests.support.daemon import command, write_config
from tests.unit.cli.commands import (
    BASES,
    TOPIC,
    TOPIC_ID,
    Site,
    from_the_start,
    invoked,
    tieringd,
    write_bucket_config,
)
from tieringd.formats.record_batch import parse_header


def segment_size(base_offset: int) -> int:
    return len(segment_bytes(base_offset))


TOTAL_BYTES = segment_size(0) + segment_size(12)
ARCHIVE_COMMANDS = {
    "topics": ("archive", "topics"),
    "describe": ("archive", "describe", TOPIC),
    "manifest": ("archive", "manifest", TOPIC, "0"),
    "verify": ("archive", "verify"),
}


def table(output: str) -> list[dict[str, str]]:
    """Return the rows of the last table that is printed, by column."""
    *_, part = output.rstrip().split("\n\n")
    head, *rows = [line.split() for line in part.splitlines()]
    return [dict(zip(head, row, strict=True)) for row in rows]


@pytest.mark.parametrize("name", ARCHIVE_COMMANDS)
def test_json_and_table_say_the_same(site, name):
    """Standard output holds one JSON document and nothing else, and the table has its values."""
    as_json = invoked(*ARCHIVE_COMMANDS[name], "--config", site.config, "--format", "json")
    as_text = invoked(*ARCHIVE_COMMANDS[name], "--config", site.config)
    document = as_json.json()
    rows = {"manifest": lambda: document["segments"], "verify": lambda: document["partitions"]}
    rows = rows.get(name, lambda: document)()

    assert (as_json.errors, as_text.errors, as_text.exit_code) == ("", "", 0)
    assert len(table(as_text.output)) == len(rows) > 0
    for line, row in zip(table(as_text.output), rows, strict=True):
        for column, text in line.items():
            value = len(row[column]) if column == "faults" else row[column]
            assert text == ("-" if value is None else str(value)), column


@pytest.mark.parametrize(
    "words",
    [
        *ARCHIVE_COMMANDS.values(),
        ("archive", "cat", TOPIC, "0"),
        ("read", TOPIC, "--partition", "0"),
        ("recover", "list"),
    ],
    ids=" ".join,
)
def test_bucket_is_all_that_a_command_about_it_needs(site, words):
    """A file that only opens the bucket is enough: it is what is left when the cluster is lost."""
    whole = yaml.safe_load(site.config.read_text())
    del whole["broker"], whole["log_retention_ms"]
    found = tieringd(*words, "--config", write_config(site.root / "bucket.yaml", whole))
    assert (found.exit_code, found.errors) == (0, "")
    assert found.output == tieringd(*words, "--config", site.config).output


def test_topics_gives_counts_and_sizes(site):
    """The bucket alone says what it holds of each topic."""
    assert invoked("archive", "topics", "-c", site.config, "-f", "json").json() == [
        {
            "cluster": "local",
            "topic": TOPIC,
            "topic_id": TOPIC_ID,
            "partitions": 1,
            "segments": 2,
            "size_bytes": TOTAL_BYTES,
            "lifecycle": "live",
            "remark": None,
        }
    ]


def test_manifest_gives_every_field(site):
    """Offsets, checksums, times and keys are those of the segments on disk."""
    document = invoked("archive", "manifest", TOPIC, "0", "-c", site.config, "-f", "json").json()
    assert (document["topic"], document["topic_id"], document["partition"]) == (TOPIC, TOPIC_ID, 0)
    assert (document["start_offset"], document["next_offset"]) == (0, 24)
    assert (document["epochs"], document["gaps"]) == ([{"epoch": 0, "start_offset": 0}], [])
    for base_offset, row in zip(BASES, document["segments"], strict=False):
        data = segment_bytes(base_offset)
        assert (row["base_offset"], row["last_offset"]) == (base_offset, base_offset + 11)
        assert (row["size_bytes"], row["crc32c"]) == (len(data), f"{crc32c(data):08x}")
        assert row["base_timestamp"] == "2023-11-14T22:13:20.000Z"
        assert row["max_timestamp"] == "2023-11-14T22:13:20.011Z"
        assert (site.archive / row["key"]).read_bytes() == data
    assert len(document["segments"]) == 2


def batch_offsets(data: bytes) -> list[int]:
    """Return the base offsets of all batches in *data*."""
    found, position = [], 0
    while position < len(data):
        header = parse_header(memoryview(data), position)
        found.append(header.base_offset)
        position += header.size_bytes
    return found


def test_cat_writes_spilled_segments_and_their_gaps(tmp_path):
    """The output is the same before and after the oldest segments leave the live manifest."""
    archive = FileArchive(tmp_path)
    writer = archive.filled(segments=1, batches=1)
    archive.lose(writer, b"x", b"y")
    for _ in range(3):
        writer.append()
        writer.roll()
    archive.add(writer)
    words = ("archive", "cat", "orders", "0", "--config", write_bucket_config(archive, tmp_path))
    before = tieringd(*words)
    archive.spill(writer, 2)
    after = tieringd(*words)
    assert batch_offsets(after.output.encode("utf-8", "surrogateescape")) == [0, 5, 8, 11]
    assert "gap: offsets 3 to 4 are not archived" in after.errors
    assert after == before


def test_read_prints_one_json_document_a_line(site):
    """Each line is a record with its key and value in base64, from the offset on, up to the count."""
    done = invoked("read", TOPIC, "-p", "0", "--offset", "11", "--count", "3", "-c", site.config)
    lines = [json.loads(line) for line in done.output.splitlines()]
    assert (done.exit_code, done.errors) == (0, "")
    assert [line["offset"] for line in lines] == [11, 12, 13]
    assert lines[0] == {
        "topic": TOPIC,
        "partition": 0,
        "offset": 11,
        "timestamp": DEFAULT_TIME_MS + 11,
        "timestamp_type": "CreateTime",
        "key": base64.b64encode(b"k2").decode(),
        "value": base64.b64encode(b"v").decode(),
        "headers": [],
    }


def test_read_prints_text_in_columns(site):
    """Offset, time, key and value are separated by tabs."""
    done = invoked("read", TOPIC, "-p", "0", "--count", "1", "--format", "text", "-c", site.config)
    assert (done.exit_code, done.output) == (0, f"0\t{DEFAULT_TIME_MS}\tk0\tv\n")


def test_read_prints_text_on_an_output_that_is_not_utf_8(tmp_path):
    """Characters that the output's encoding lacks are written as escapes, and reading goes on."""
    archive = FileArchive(tmp_path)
    writer = archive.writer()
    writer.append("日本 é".encode(), b"second")
    writer.roll()
    archive.add(writer)
    config = write_bucket_config(archive, tmp_path)
    words = ("read", "orders", "-p", "0", "-f", "text", "-c", config)
    done = from_the_start(*words, PYTHONIOENCODING="latin-1")
    assert (done.exit_code, done.errors) == (0, "")
    values = [line.split("\t")[3] for line in done.output.splitlines()]
    assert values == ["\\u65e5\\u672c \udce9", "second"]


def test_read_of_no_records_prints_nothing(site):
    """A count of zero is zero, and not "all"."""
    done = invoked("read", TOPIC, "-p", "0", "--count", "0", "-c", site.config)
    assert (done.exit_code, done.output, done.errors) == (0, "", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["archive", "describe", "nope"], "the bucket holds no topic named nope", id="topic"),
        pytest.param(["archive", "cat", TOPIC, "5"], f"holds nothing of {TOPIC}-5", id="partition"),
    ],
)
def test_what_is_not_archived_exits_1_and_is_named(site, arguments, words):
    """The error is one line on standard error, and standard output stays empty."""
    done = tieringd(*arguments, "-c", site.config)
    assert (done.exit_code, done.output) == (1, "")
    assert done.errors.startswith("error: ")
    assert words in done.errors
    assert len(done.errors.splitlines()) == 1


def test_reader_that_goes_away_ends_the_command_quietly(site):
    """A command exits 1 without an error message if its output is closed."""
    reader = ["read", TOPIC, "-p", "0", "-c", str(site.config)]
    process = subprocess.Popen(command(*reader), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    errors = process.stderr.read().decode()
    process.stderr.close()
    assert (process.wait(240), errors) == (1, "")


@pytest.mark.parametrize("command", [("archive", "topics"), ("recover", "list")], ids=" ".join)
@pytest.mark.parametrize("right", [[TOPIC], []], ids=["beside a right one", "alone"])
def test_listing_names_what_matches_nothing(site, command, right):
    """A listing has what matches, and the exit code says that a name was mistyped."""
    done = tieringd(*command, *right, "paymnets", "y*", "-c", site.config, "-f", "json")
    assert [row["topic"] for row in json.loads(done.output)] == right
    assert (done.exit_code, len(done.errors.splitlines())) == (1, 1)
    assert " paymnets, y*" in done.errors


def test_verify_names_what_matches_nothing(site):
    """Nothing is verified: a report without the mistyped topic would look like a good one."""
    done = tieringd("archive", "verify", TOPIC, "paymnets", "-c", site.config, "-f", "json")
    assert (done.exit_code, done.output) == (1, "")
    assert "no topic named paymnets" in done.errors


@pytest.fixture
def damaged(site, tmp_path) -> Site:
    """Return a copy of the archive, to be damaged."""
    copy = Site(tmp_path)
    shutil.copytree(site.archive, copy.archive)
    copy.config.write_text(site.config.read_text().replace(str(site.root), str(copy.root)))
    return copy


def test_verify_exits_1_and_still_prints_its_report(damaged):
    """A segment that has gone is a fault in both formats, and the exit code says so."""
    (gone, _) = damaged.objects("*.log")
    gone.unlink()
    as_json = tieringd("archive", "verify", "-c", damaged.config, "--format", "json")
    as_text = invoked("archive", "verify", "-c", damaged.config)

    report = json.loads(as_json.output)
    (fault,) = report["partitions"][0]["faults"]
    assert (as_json.exit_code, as_text.exit_code, report["faults"]) == (1, 1, 1)
    assert gone.name in fault
    assert f"fault: {TOPIC}-0: {fault}\n" in as_text.output


def test_partition_without_a_manifest_fails_the_drill(own_site):
    """A counted partition without a manifest cannot be read: both checks name it, and exit 1."""
    shutil.copytree(own_site.partition_directory, own_site.partition_directory.with_name(f"{TOPIC}-1"))
    config = ("--config", own_site.config)
    assert tieringd("run", "--once", *config).exit_code == 0
    whole = invoked("archive", "verify", "--deep", *config)
    assert (whole.exit_code, invoked("recover", "list", *config).errors) == (0, "")
    (path,) = [one for one in own_site.objects("manifest*") if one.parent.name == f"1_{TOPIC_ID}"]
    path.unlink()
    done = invoked("archive", "verify", "--deep", *config, "--format", "json")
    document = json.loads(done.output)
    assert (done.exit_code, document["faults"]) == (1, 1)
    assert [(row["partition"], len(row["faults"])) for row in document["partitions"]] == [(0, 0), (1, 1)]
    assert "it has no manifest" in document["partitions"][1]["faults"][0]
    listed = invoked("recover", "list", *config, "--format", "json")
    assert (listed.exit_code, [row["topic"] for row in json.loads(listed.output)]) == (1, [TOPIC])
    assert listed.errors.startswith(f"{TOPIC}-1: it has no manifest")


def test_corrupt_manifest_exits_1_and_is_named(damaged):
    """A damaged manifest is an error that names the object, and not a trace."""
    (path,) = damaged.objects("manifest")
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    done = tieringd("archive", "describe", TOPIC, "-c", damaged.config)
    assert (done.exit_code, done.output) == (1, "")
    assert str(path.relative_to(damaged.archive)) in done.errors
    assert "checksum" in done.errors


def test_archive_that_does_not_exist_exits_1(damaged):
    """A command fails without its bucket, and does not make one."""
    shutil.rmtree(damaged.archive)
    damaged.config.write_text(damaged.config.read_text().replace("/archive", "/no/such/archive"))
    done = tieringd("archive", "topics", "-c", damaged.config)
    assert (done.exit_code, done.output) == (1, "")
    assert done.errors.startswith("error: ")
    assert "/no/such/archive" in done.errors
