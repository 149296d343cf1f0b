"""Fetch requests and responses of every version, made by kio from what Hypothesis draws."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tests.support.kafka_messages import FETCH_VERSIONS, fetch_response, response_frame

offsets = st.integers(-1, 2**63 - 1)
NAMES = ("t", "a.b_c-1", "x" * 249)
IDS = tuple(uuid.UUID(int=number) for number in (1, 2**127, 77))


@st.composite
def said_of_partitions(draw):
    """Draw what a broker says of one partition."""
    return {
        "error_code": draw(st.sampled_from([0, 0, 1, 6, 74])),
        "high_watermark": draw(offsets),
        "last_stable_offset": draw(offsets),
        "log_start_offset": draw(offsets),
        "aborted_transactions": draw(
            st.none() | st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2**40)), max_size=4)
        ),
        "preferred_read_replica": draw(st.sampled_from([-1, 5])),
        "records": draw(st.none() | st.binary(max_size=300)),
        **({"leader_epoch": 4} if draw(st.booleans()) else {}),
    }


@dataclass(frozen=True)
class Drawn:
    """A response in one version."""

    version: int
    topics: dict[Any, dict[int, dict[str, Any]]]
    frame: bytearray


@st.composite
def fetch_responses(draw):
    """Draw a response."""
    version = draw(st.sampled_from(FETCH_VERSIONS))
    names = IDS if version >= 13 else NAMES
    topics = draw(
        st.dictionaries(
            st.sampled_from(names),
            st.dictionaries(st.integers(0, 2**31 - 1), said_of_partitions(), max_size=4),
            max_size=3,
        )
    )
    return Drawn(version, topics, response_frame(fetch_response(version, topics, session_id=0)))
