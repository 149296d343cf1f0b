"""`tieringd archive scrub` and `archive quarantine`, on an archive in a directory."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import replace

import pytest
import xxhash

from tests.unit.cli.commands import TOPIC, invoked
from tieringd.clock import wall_clock_ms
from tieringd.errors import ConfigError, ObjectNotFound
from tieringd.formats.manifest_codec import decode_manifest, encode_manifest


@pytest.fixture
def archived(site, own_site):
    """Give an archive of two segments to be damaged: that of the site, which has the same log."""
    shutil.copytree(site.archive, own_site.archive)
    return own_site


def scrubbed(site, *options, exit_code: int = 0):
    done = invoked("archive", "scrub", *options, "-c", site.config, "--json")
    assert done.exit_code == exit_code, done.output + done.errors
    # Inside this process the log is on standard output as well, before the document.
    return json.loads(done.output[done.output.index("{\n") :])


def left_behind(site, *, days: int = 2):
    """Store what a crash left behind so many days ago, when the manifest was there; return its file."""
    for path in site.objects("manifest"):
        path.write_bytes(encode_manifest(replace(decode_manifest(path.read_bytes()), began_at_ms=0)))
    log = site.objects("*.log")[0]
    fields = log.name.split("-")
    fields[4] = "dead"
    path = "/".join([*log.relative_to(site.archive).parts[1:-1], "-".join(fields)])
    orphan = site.archive / f"{xxhash.xxh32_intdigest(path.encode()):08x}/{path}"
    orphan.parent.mkdir(parents=True)
    orphan.write_bytes(b"left behind")
    long_ago = time.time() - days * 86_400
    os.utime(orphan, (long_ago, long_ago))
    return orphan


def test_sound_archive_is_clean(archived):
    """Nothing is wrong: exit code 0, and the counts of what was scrubbed."""
    for options in ((), ("--deep",), (TOPIC,), ("--fix",)):
        document = scrubbed(archived, *options)
        assert (document["faults"], document["findings"], document["orphans"]) == (0, [], [])
        (row,) = document["partitions"]
        assert (row["topic"], row["segments"]) == (TOPIC, 2)
        assert row["records"] == (24 if "--deep" in options else None)


def test_table_tells_each_fault_and_what_to_do(archived):
    """The text names the object, its offsets and the action; the exit code is 1."""
    gone = archived.objects("*.log")[0]
    gone.unlink()
    done = invoked("archive", "scrub", "-c", archived.config)
    assert done.exit_code == 1
    assert (
        f"fault: data_missing: the object is missing (in {gone.relative_to(archived.archive)}" in done.output
    )
    assert "archive scrub --fix" in done.output
    assert "1 faults, 0 mended, 0 orphans" in done.output


@pytest.mark.parametrize("suffix", [".log", ".index"])
def test_fix_brings_back_what_the_log_still_holds(archived, suffix):
    """The object is there again, byte for byte, and nothing is wrong any more."""
    for gone in archived.objects(f"*{suffix}"):
        data = gone.read_bytes()
        gone.unlink()
        document = scrubbed(archived, "--fix")
        assert [row["mended"] for row in document["findings"]] == ["from this broker's log"]
        assert gone.read_bytes() == data
    assert scrubbed(archived, "--deep")["findings"] == []


def test_fault_that_cannot_be_mended_stays_a_fault(archived):
    """A fix without the local bytes changes nothing, and the exit code shows the fault that is left."""
    gone = archived.objects("*.log")[0]
    gone.unlink()
    for path in archived.partition_directory.glob("*.log"):
        path.unlink()
    (finding,) = scrubbed(archived, "--fix", exit_code=1)["findings"]
    assert (finding["mended"], finding["kind"]) == (None, "data_missing")
    assert finding["action"]
    assert not gone.exists()


def test_orphan_goes_into_quarantine_and_comes_back(archived):
    """An orphan is reported, moved by a fix only, listed, and put back by its key."""
    orphan = left_behind(archived)
    key = str(orphan.relative_to(archived.archive))
    (row,) = scrubbed(archived)["orphans"]
    assert (row["key"], row["in_quarantine"]) == (key, False)
    assert orphan.exists()

    (row,) = scrubbed(archived, "--fix")["orphans"]
    assert row["in_quarantine"]
    assert not orphan.exists()
    (listed,) = invoked("archive", "quarantine", "list", "-c", archived.config, "--json").json()
    assert (listed["key"], listed["size_bytes"]) == (key, len(b"left behind"))
    assert key in invoked("archive", "quarantine", "list", "-c", archived.config).output

    done = invoked("archive", "quarantine", "restore", key, "-c", archived.config)
    assert done.output.endswith("1 objects were put back in their original places\n")
    assert orphan.read_bytes() == b"left behind"
    assert invoked("archive", "quarantine", "list", "-c", archived.config, "--json").json() == []


def test_quarantine_is_emptied_for_good(archived):
    """A purge deletes by key or all; what is not there is an error."""
    for choice in ("key", "--all"):
        orphan = left_behind(archived)
        key = str(orphan.relative_to(archived.archive))
        scrubbed(archived, "--fix")
        done = invoked(
            "archive", "quarantine", "purge", key if choice == "key" else choice, "-c", archived.config
        )
        assert done.output.endswith("1 objects were deleted permanently\n")
        assert not archived.objects("*-dead-*")
    with pytest.raises(ObjectNotFound, match="is not in quarantine"):
        invoked("archive", "quarantine", "purge", key, "-c", archived.config)


def test_old_quarantine_goes_with_a_fix(archived):
    """Objects older than `archive_quarantine_ms` in quarantine are deleted."""
    orphan = left_behind(archived)
    scrubbed(archived, "--fix")
    (there,) = archived.objects("*-dead-*")
    long_ago = wall_clock_ms() / 1000 - 8 * 86_400
    os.utime(there, (long_ago, long_ago))
    document = scrubbed(archived, "--fix")
    assert document["deleted"] == [str(orphan.relative_to(archived.archive))]
    assert not there.exists()


def test_keys_or_all_must_be_said(archived):
    """A command that changes the quarantine guesses nothing."""
    for command in ("restore", "purge"):
        for arguments in ((), ("key", "--all")):
            with pytest.raises(ConfigError, match="no keys are given"):
                invoked("archive", "quarantine", command, *arguments, "-c", archived.config)


def test_unknown_topic_is_an_error(archived):
    """A mistyped name is not a clean archive."""
    with pytest.raises(ObjectNotFound, match="nothing of a topic named nowhere"):
        invoked("archive", "scrub", "nowhere", "-c", archived.config)
