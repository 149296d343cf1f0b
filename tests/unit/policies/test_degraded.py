"""Degraded mode: which daemon acts, and which quotas are lowered and put back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieringd.model.disk_state import EVERY_PRODUCER, DiskState, QuotaChange, QuotaEntity, quota_entity
from tieringd.policies.disk_alert import (
    degraded_nodes,
    plan_additions,
    plan_lowering,
    still_to_lower,
    still_to_restore,
)

RATE = 1000
ALICE = quota_entity(user="alice")

names = st.sampled_from([None, "a", "b"])
entities = st.dictionaries(st.sampled_from(["user", "client-id", "ip"]), names, min_size=1).map(
    lambda parts: QuotaEntity(tuple(sorted(parts.items())))
)
quotas = st.dictionaries(entities, st.sampled_from([1.0, 999.0, 1000.0, 1001.0, 1e9]), max_size=8)


def used_by(user: str, client_id: str, current) -> float | None:
    """Return the quota that Kafka takes for a client: its documented order, the most special first."""
    for parts in (
        {"user": user, "client_id": client_id},
        {"user": user, "client_id": None},
        {"user": user},
        {"user": None, "client_id": client_id},
        {"user": None, "client_id": None},
        {"user": None},
        {"client_id": client_id},
        {"client_id": None},
    ):
        if (value := current.get(quota_entity(**parts))) is not None:
            return value
    return None


@given(quotas, st.sampled_from(["a", "b", "other"]), st.sampled_from(["a", "b", "other"]))
def test_after_lowering_no_client_may_write_more(current, user, client_id):
    """The quota that counts for a client is at most the rate after lowering, with any settings."""
    changes = plan_lowering(current, RATE)
    lowered = current | still_to_lower(changes, current, RATE)
    found = used_by(user, client_id, lowered)
    assert found is not None
    assert found <= RATE
    assert plan_lowering(lowered, RATE) == ()


@given(quotas)
def test_what_was_lowered_goes_back_to_what_it_was(current):
    """Putting back what a lowering changed leaves nothing of it, and a second time does nothing."""
    changes = plan_lowering(current, RATE)
    lowered = current | still_to_lower(changes, current, RATE)
    orders = still_to_restore(changes, lowered, RATE)
    restored = {entity: value for entity, value in (lowered | orders).items() if value is not None}
    assert restored == current
    assert still_to_restore(changes, restored, RATE) == {}


@pytest.mark.parametrize(
    ("entity", "is_lowered"),
    [
        ({"user": "alice"}, True),
        ({"user": "alice", "client_id": None}, True),
        ({"user": None, "client_id": "app"}, True),
        ({"user": None, "client_id": None}, True),
        ({"user": None}, False),
        ({"client_id": "app"}, False),
        ({"client_id": None}, False),
        ({"ip": "10.0.0.1"}, False),
    ],
)
def test_only_quotas_that_go_before_the_default_are_lowered(entity, is_lowered):
    """Quotas that Kafka looks at after the default of every user and client need no change."""
    changes = plan_lowering({quota_entity(**entity): 5000.0}, RATE)
    assert any(change.previous == 5000.0 for change in changes) is is_lowered
    assert any(change.entity == EVERY_PRODUCER for change in changes)


def test_quota_that_allows_less_stays_as_it_is():
    """A lower quota is not raised, and one that is the rate already is not ours to put back."""
    assert plan_lowering({ALICE: 999.0, EVERY_PRODUCER: 1000.0}, RATE) == ()


def test_quota_that_came_later_is_lowered_as_well():
    """An operator's new quota would let its user write; those that are recorded are not recorded again."""
    changes = plan_lowering({}, RATE)
    current = {EVERY_PRODUCER: 1000.0, ALICE: 1e6}
    assert plan_additions(changes, current, RATE) == (QuotaChange(ALICE, 1e6),)
    assert plan_additions((*changes, QuotaChange(ALICE, 1e6)), current, RATE) == ()


def test_quota_that_an_operator_changed_meanwhile_is_neither_lowered_nor_put_back():
    """Only what is as it was before is lowered, and only what is as we made it is put back."""
    changes = (QuotaChange(ALICE, 1e6), QuotaChange(EVERY_PRODUCER, None))
    current = {ALICE: 7e6, EVERY_PRODUCER: 3.0}
    assert still_to_lower(changes, current, RATE) == {}
    assert still_to_restore(changes, current, RATE) == {}


def test_degraded_brokers_are_told_in_the_order_of_their_ids():
    """Low disks do not count, and the lowest id comes first."""
    states = {9: DiskState.DEGRADED, 1: DiskState.LOW, 4: DiskState.DEGRADED, 2: DiskState.OK}
    assert degraded_nodes(states) == (4, 9)
    assert degraded_nodes({1: DiskState.LOW}) == ()
