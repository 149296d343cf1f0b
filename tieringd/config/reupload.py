"""Which archived segments follow the broker's compaction."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel

from tieringd.config.fields import LIVE, Flag
from tieringd.config.topic_properties import STRICT


class CompactedReuploads(BaseModel):
    """Compacted topics: what the broker's compaction leaves takes the place of what was archived before."""

    model_config = STRICT

    cloud_storage_enable_compacted_topic_reupload: Annotated[bool, Flag(), LIVE] = True
    """Upload segments of compacted topics once more when compaction has made them smaller."""
