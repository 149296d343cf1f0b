"""Raw offsets and Kafka offsets of one place."""

from __future__ import annotations

import pytest

from tieringd.model.offset_translation import LOG_BEGINNING, OffsetTranslation


def test_translation_gives_the_kafka_offset_of_its_place():
    """The delta is what lies between the two counts."""
    assert OffsetTranslation(10, 3).kafka_offset == 7
    assert OffsetTranslation.at(raw_offset=10, kafka_offset=7) == OffsetTranslation(10, 3)
    assert LOG_BEGINNING.kafka_offset == 0


@pytest.mark.parametrize(("raw_offset", "delta"), [(10, -1), (10, 11), (-1, 0)])
def test_impossible_translation_is_refused(raw_offset, delta):
    """No more offsets than there are can be Redpanda's own, and no fewer than none."""
    with pytest.raises(ValueError, match="cannot be Redpanda's"):
        OffsetTranslation(raw_offset, delta)


def test_all_offsets_before_a_place_may_be_redpanda_s_own():
    """A log may begin with nothing of Kafka's."""
    assert OffsetTranslation(10, 10).kafka_offset == 0
