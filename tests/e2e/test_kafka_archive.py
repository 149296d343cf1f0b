"""Closed segments of a real broker, byte for byte in a real bucket."""

from __future__ import annotations

import pytest

from tests.e2e.archives import archived_manifest, closed_segments, data_keys, segment_keys, stored_segments
from tests.e2e.sample_topics import CODECS, SAMPLE_TOPICS, TRANSACTIONS, codec_topic
from tieringd.formats.object_keys import index_key
from tieringd.formats.record_batch import parse_header
from tieringd.formats.sidecar import decode_sidecar


@pytest.mark.parametrize("topic", SAMPLE_TOPICS)
def test_closed_segments_are_stored_byte_for_byte(kafka, samples, sample_objects, topic):
    """Every closed segment is one object with the file's bytes, and nothing else is stored of the topic."""
    closed = closed_segments(kafka.log_dir() / f"{topic}-0")
    assert len(closed) >= 2

    manifest = archived_manifest(sample_objects, topic)

    assert stored_segments(sample_objects, manifest) == closed
    assert len([key for key in data_keys(sample_objects) if f"/{topic}/" in key]) == len(closed)
    assert (manifest.start_offset, manifest.gaps, manifest.faults()) == (0, (), ())


@pytest.mark.parametrize("topic", SAMPLE_TOPICS)
def test_each_segment_has_an_index_beside_it(kafka, samples, sample_objects, topic):
    """Each data object has an index of its own, which holds the broker's index files as they are."""
    manifest = archived_manifest(sample_objects, topic)

    for segment in manifest.segments:
        index = decode_sidecar(sample_objects.read(index_key(manifest.partition, segment)))
        stem = f"{segment.base_offset:020d}"
        directory = kafka.log_dir() / f"{topic}-0"
        assert index.broker.offset_index == (directory / f"{stem}.index").read_bytes()
        assert index.broker.time_index == (directory / f"{stem}.timeindex").read_bytes()
        assert (index.base_offset, index.last_offset) == (segment.base_offset, segment.last_offset)


@pytest.mark.parametrize("codec", CODECS)
def test_sample_of_a_codec_is_compressed_with_it(kafka, codec):
    """The samples hold what they are named for: the broker's files have batches of each codec."""
    found = set()
    for data in closed_segments(kafka.log_dir() / f"{codec_topic(codec)}-0").values():
        position = 0
        while position < len(data):
            header = parse_header(data, position)
            found.add(header.attributes & 7)
            position += header.size_bytes
    assert found == {CODECS.index(codec)}


def test_aborted_transactions_are_in_the_index(samples, sample_objects):
    """Transactions that abort in a later segment are in the index of the one that holds their data."""
    manifest = archived_manifest(sample_objects, TRANSACTIONS)
    indexes = [decode_sidecar(sample_objects.read(f"{key}.index")) for key in segment_keys(manifest)]
    crossing = [
        aborted for index in indexes for aborted in index.aborted if aborted.last_offset > index.last_offset
    ]
    assert crossing


def test_run_once_says_what_it_uploaded(samples, sample_objects):
    """One pass ends with a line that counts partitions and segments."""
    segments = len(data_keys(sample_objects))
    assert f"{len(SAMPLE_TOPICS)} partitions: {segments} segments uploaded, 0 trimmed, 0 partitions" in (
        samples.output
    )
