"""Which daemons may write to an archive: by the record, the bucket's content and the daemon's identity."""

from __future__ import annotations

import pytest

from tieringd.errors import ConfigError
from tieringd.formats.archive_owners import BROKER, ArchiveOwners
from tieringd.policies.archive_ownership import Claimant, admitted, claimed, moved_in

KAFKA, HOST, NEW_HOST = Claimant("q1", BROKER), Claimant("local", "a1"), Claimant("local", "b2", True)


def owners(**clusters: str | None) -> ArchiveOwners:
    return ArchiveOwners(clusters)


@pytest.mark.parametrize(
    ("recorded", "found", "claimant", "becomes"),
    [
        pytest.param(None, (), KAFKA, owners(q1=BROKER), id="empty bucket"),
        pytest.param(None, (), NEW_HOST, owners(local="b2"), id="empty bucket, first start"),
        pytest.param(None, ("q1",), KAFKA, owners(q1=BROKER), id="adopted"),
        pytest.param(None, ("q1", "old"), KAFKA, owners(q1=BROKER, old=None), id="adopted, shared before"),
        pytest.param(None, ("local",), HOST, owners(local="a1"), id="adopted by a host that ran before"),
        pytest.param(owners(q1=BROKER), (), KAFKA, owners(q1=BROKER), id="another broker of the cluster"),
        pytest.param(owners(local="a1"), (), HOST, owners(local="a1"), id="the same host"),
        pytest.param(
            owners(q1=None, local="a1"), (), KAFKA, owners(q1=BROKER, local="a1"), id="admitted before"
        ),
    ],
)
def test_archive_is_claimed_where_nothing_contradicts_it(recorded, found, claimant, becomes):
    """The record names the cluster afterwards, and keeps the others."""
    assert claimed(recorded, found, claimant, place="s3://b") == becomes


@pytest.mark.parametrize(
    ("recorded", "found", "claimant", "says"),
    [
        pytest.param(owners(old=BROKER), (), KAFKA, "that of the cluster old", id="second cluster"),
        pytest.param(None, ("old",), KAFKA, "that of the cluster old", id="copied bucket without a record"),
        pytest.param(None, ("local",), NEW_HOST, "has never archived", id="archive of some other host"),
        pytest.param(owners(local=None), (), NEW_HOST, "has never archived", id="the same, with a record"),
        pytest.param(owners(local="c3"), (), HOST, r"id c3\)", id="two hosts of one name"),
        pytest.param(owners(q1="c3"), (), KAFKA, r"id c3\)", id="a host has the name of a cluster"),
        pytest.param(owners(local=BROKER), (), HOST, "a broker's cluster", id="the other way round"),
    ],
)
def test_archive_of_another_is_refused(recorded, found, claimant, says):
    """The message names the place, and the command that is the way on."""
    with pytest.raises(
        ConfigError, match=f"s3://b .*{says}.*nothing was written|{says}.*Nothing was"
    ) as raised:
        claimed(recorded, found, claimant, place="s3://b")
    assert "tieringd archive claim" in str(raised.value)


@pytest.mark.parametrize("recorded", [owners(old=BROKER, local="c3"), None])
def test_operator_lets_a_cluster_in(recorded):
    """The cluster replaces another owner of its name, and the other clusters stay."""
    changed = admitted(recorded, ("old", "local"), NEW_HOST)
    assert changed.of_cluster == {"old": recorded and BROKER, "local": "b2"}
    assert claimed(changed, (), NEW_HOST, place="") == changed


def test_moved_topics_bring_their_owner_along():
    """A host that is not known in the source yet takes nothing away from the target's."""
    assert moved_in(None, ("q1",), {"local": "a1"}, place="") == owners(q1=None, local="a1")
    assert moved_in(owners(local="a1"), (), {"local": None}, place="") == owners(local="a1")
    with pytest.raises(ConfigError, match=r"s3://b is already that of .*c3.*nothing was copied"):
        moved_in(owners(local="c3"), (), {"local": "a1"}, place="s3://b")
