"""The properties of the chunk cache: what they become, what contradicts and what has no effect."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.unit.config.texts import SMALLEST, TIERED, parsed, problems_of
from tieringd.config.properties import Cache
from tieringd.policies.cache_trim import ChunkEvictionLimits, EvictionStrategy


def warnings_of(text):
    return [warning.partition(": ")[2] for warning in parsed(text).warnings]


def test_cache_lies_in_the_state_directory_unless_it_is_put_elsewhere():
    """The cache is in the state directory by default, never in a log directory."""
    assert parsed(TIERED).cache_directory == Path("/srv/state/cloud_storage_cache")
    text = "cloud_storage_cache_directory: /mnt/fast/cache/\n"
    assert parsed(TIERED + text).cache_directory == Path("/mnt/fast/cache")


def test_chunk_eviction_is_made_of_its_three_properties():
    """The three properties have the defaults of the documents."""
    assert parsed(TIERED).chunk_eviction == ChunkEvictionLimits(EvictionStrategy.EAGER, 0.7, 5)
    text = (
        "cloud_storage_chunk_eviction_strategy: predictive\n"
        "cloud_storage_hydrated_chunks_per_segment_ratio: 0.25\n"
        "cloud_storage_min_chunks_per_segment_threshold: 9\n"
    )
    assert parsed(TIERED + text).chunk_eviction == ChunkEvictionLimits(EvictionStrategy.PREDICTIVE, 0.25, 9)
    assert parsed(TIERED + text).warnings == ()


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("/srv/logs", "is inside the log directory /srv/logs"),
        ("/srv/logs/cache", "is inside the log directory /srv/logs"),
        ("/srv/state", "is state_directory as well; give the cache its own directory"),
        ("/srv/ballast", "is ballast_file_path as well"),
    ],
)
def test_cache_in_the_place_of_something_else_is_refused(path, part):
    """Kafka would not start any more, or the two would be in each other's way."""
    text = (
        f"cloud_storage_cache_directory: {path}\ntune_ballast_file: true\nballast_file_path: /srv/ballast\n"
    )
    (problem,) = problems_of(TIERED + text)
    assert problem.startswith(f"t.yaml:9: cloud_storage_cache_directory: {path} {part}")


def test_cache_inside_the_archive_is_refused():
    """The directory of a file store holds nothing but the archive."""
    (problem,) = problems_of(TIERED + "cloud_storage_cache_directory: /srv/archive/cache\n")
    assert "/srv/archive holds /srv/archive/cache" in problem


def test_cache_without_room_for_one_chunk_is_refused():
    """
    A cache has to have room for one chunk, except in whole-segment mode.

    The size of a segment is not known beforehand.
    """
    text = "cloud_storage_cache_size: 8MiB\n"
    (problem,) = problems_of(TIERED + text)
    assert problem == (
        "t.yaml:9: cloud_storage_cache_size: is 8388608 bytes, which is too small for one chunk of "
        "cloud_storage_cache_chunk_size, 16777216 bytes"
    )
    assert parsed(TIERED + text + "cloud_storage_disable_chunk_reads: true\n").warnings == ()
    assert parsed(TIERED + text + "cloud_storage_cache_chunk_size: 8MiB\n").warnings == ()


def test_no_cache_at_all_is_allowed_and_said():
    """A cache of nothing takes two zeros."""
    (warning,) = warnings_of(TIERED + "cloud_storage_cache_size_percent: 0\n")
    assert warning == (
        "cloud_storage_cache_size_percent: is 0, and cloud_storage_cache_size is 0: nothing is cached, "
        "every read is a download"
    )
    text = "cloud_storage_cache_size_percent: 0\ncloud_storage_cache_size: 1GiB\n"
    assert warnings_of(TIERED + text) == []


def test_log_area_that_leaves_the_cache_less_is_said():
    """The log's area is filled first; a cache that has a directory of its own may be on another disk."""
    text = "retention_local_target_capacity_percent: 65\n"
    (warning,) = warnings_of(TIERED + text)
    assert warning == (
        "cloud_storage_cache_size_percent: is 20, but on a disk with logs, "
        "retention_local_target_capacity_percent 65 and disk_reservation_percent 20 leave only 15"
    )
    assert warnings_of(TIERED + text + "cloud_storage_cache_directory: /mnt/fast\n") == []
    assert warnings_of(TIERED + "retention_local_target_capacity_percent: 60\n") == []


@pytest.mark.parametrize(
    "line",
    [
        "cloud_storage_hydrated_chunks_per_segment_ratio: 0.5",
        "cloud_storage_min_chunks_per_segment_threshold: 3",
    ],
)
def test_share_of_a_segment_has_no_effect_with_the_eager_strategy(line):
    """The eager strategy keeps no chunk open anyway."""
    assert warnings_of(f"{TIERED}{line}\n") == [
        f"{line.partition(':')[0]}: has no effect while cloud_storage_chunk_eviction_strategy is eager"
    ]


def test_cache_has_no_effect_while_tiering_is_off():
    """Nothing is read from an archive then."""
    assert warnings_of(SMALLEST + "cloud_storage_cache_max_objects: 5\n") == [
        "cloud_storage_cache_max_objects: has no effect while cloud_storage_enabled is false"
    ]


def test_defaults_say_nothing_when_written_out():
    """A file that holds every default is as good as one that holds none."""
    document = {name: field.default for name, field in Cache.model_fields.items()}
    for base in (SMALLEST, TIERED):
        assert parsed(base + yaml.safe_dump(document)).warnings == parsed(base).warnings
