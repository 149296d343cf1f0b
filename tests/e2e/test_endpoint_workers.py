"""An archive-only endpoint with two workers serves what one process serves, to real clients."""

# Long: endpoints and their workers start as new interpreters.

from __future__ import annotations

import asyncio

import pytest

from tests.e2e.archives import archived_manifest
from tests.e2e.sample_topics import SAMPLE_TOPICS, consumed
from tests.e2e.test_archive_only import read_confluent, read_to, serving


@pytest.fixture
def endpoint(seaweedfs, samples, tmp_path):
    """Give an endpoint with two workers."""
    with serving(seaweedfs, tmp_path, samples.prefix, gateway={"port": 0, "workers": 2}) as endpoint:
        yield endpoint


async def test_workers_serve_what_one_process_serves(kafka, endpoint, sample_objects):
    """
    Every kind of topic, record by record, with two libraries.

    The figures of the workers are together on one page.
    """
    isolation = "read_committed"
    for topic in SAMPLE_TOPICS:
        end = archived_manifest(sample_objects, topic).next_offset
        expected = [one for one in await consumed(kafka, topic, isolation) if one.offset < end]
        assert await asyncio.to_thread(read_confluent, endpoint.bootstrap, topic, isolation) == expected
        last_offset = expected[-1].offset
        assert await read_to(endpoint.bootstrap, topic, isolation, last_offset) == expected
    assert endpoint.metric("tieringd_gateway_workers") == 2
    # A page leaves out a worker that tells late.
    for name, at_least in (
        ("tieringd_gateway_workers_resident_bytes", 20 << 20),
        ("tieringd_gateway_archived_answers_total", len(SAMPLE_TOPICS)),
    ):
        endpoint.until(
            lambda name=name, at_least=at_least: (endpoint.metric(name) or 0) > at_least, f"{name} is told"
        )
