"""An archiver after an unclean election: what it replaces, and what reading the archive gives then."""

from __future__ import annotations

import pytest

from tests.fakes.archive import archived, archiver_of, observed, values_in, written_below


@pytest.mark.parametrize("ended_as", ["commit", "abort"])
async def test_transaction_that_ends_otherwise_on_the_new_lineage_is_archived_so(
    writer, archive, broker, ended_as
):
    """The index of a segment before the divergence told how the old leader had ended it."""
    writer.append(b"transacted", producer_id=2)
    writer.append(b"plain")
    writer.roll()
    divergence = writer.append(b"lost")
    (writer.abort if ended_as == "commit" else writer.commit)(2)
    writer.roll()
    before = await archived(writer, archive)
    assert before.next_offset == writer.bases[-1]

    writer.truncate(divergence)
    writer.begin_epoch(1)
    getattr(writer, ended_as)(2)
    writer.closed_segment()
    archiver = archiver_of(writer, archive, broker, leader_epoch=1)
    while (await archiver.step(observed(writer))).uploaded:
        pass

    manifest = archiver.manifest
    assert manifest is not None
    assert manifest.next_offset == writer.bases[-1]
    for read_committed in (False, True):
        found = await values_in(archive, manifest, read_committed=read_committed)
        assert found == written_below(writer, manifest.next_offset, read_committed=read_committed)
    assert (b"transacted" in found.values()) == (ended_as == "commit")
    assert not (await archive.verifier.verify(manifest, deep=True)).faults
