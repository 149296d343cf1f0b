"""Which adjacent segments of the archive become one object."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel

from tieringd.config.fields import LIVE, Flag, size
from tieringd.config.topic_properties import STRICT
from tieringd.policies.segment_merge import FILE_BYTES_MAX, MergeSettings


class Merging(BaseModel):
    """Merging of adjacent small segments; compacted topics are left alone."""

    model_config = STRICT

    cloud_storage_enable_segment_merging: Annotated[bool, Flag(), LIVE] = True
    """Merge small neighbouring segments of the archive into one object, where the topic is not compacted."""
    cloud_storage_segment_size_target: Annotated[Annotated[int, size(1, FILE_BYTES_MAX)] | None, LIVE] = None
    """Merge up to this size; null is the size at which the broker closes the topic's segments."""
    cloud_storage_segment_size_min: Annotated[Annotated[int, size(0, FILE_BYTES_MAX)] | None, LIVE] = None
    """At the end of the archive wait for more than this; null is half of a segment, below the target."""

    @property
    def merge_settings(self) -> MergeSettings:
        """Return the same, for the policy."""
        return MergeSettings(
            is_enabled=self.cloud_storage_enable_segment_merging,
            target_bytes=self.cloud_storage_segment_size_target,
            min_bytes=self.cloud_storage_segment_size_min,
        )
