"""The local target of a topic: which setting decides, what is enforced, and what is only advice."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieringd.policies.local_retention import (
    ClusterLocalTarget,
    LocalLimit,
    LocalRetentionTarget,
    LocalSettings,
    LocalTarget,
    resolve_local_target,
)

DAY_MS = 86_400_000
WEEK_MS = 7 * DAY_MS
ADVICE = ClusterLocalTarget(target_ms=DAY_MS, target_bytes=None, is_strict=False)
STRICT = ClusterLocalTarget(target_ms=DAY_MS, target_bytes=None, is_strict=True)


def resolve(*places, cluster=ADVICE, total_ms=WEEK_MS, total_bytes=None) -> LocalTarget:
    return resolve_local_target(places, cluster=cluster, total_ms=total_ms, total_bytes=total_bytes)


def test_local_target_of_a_topic_without_settings_is_the_cluster_s_advice():
    """A day is advised and a week enforced, unless the cluster is strict."""
    assert resolve() == LocalTarget(
        ms=LocalLimit(WEEK_MS, DAY_MS, f"retention_local_target_ms_default={DAY_MS}", is_explicit=False),
        bytes=LocalLimit(None, None, "retention_local_target_bytes_default=null", is_explicit=False),
    )
    assert resolve(cluster=STRICT).enforced == LocalRetentionTarget(DAY_MS, None)
    assert resolve().advised == resolve(cluster=STRICT).advised == LocalRetentionTarget(DAY_MS, None)
    assert not resolve().is_explicit


@pytest.mark.parametrize("kind", ["ms", "bytes"])
@pytest.mark.parametrize(
    ("kafka", "redpanda", "default", "total", "relaxed", "strict", "advised"),
    [
        pytest.param(None, None, None, None, None, None, None, id="nothing at all"),
        pytest.param(None, None, None, 700, 700, 700, 700, id="only a total"),
        pytest.param(None, None, 500, 700, 700, 500, 500, id="the default"),
        pytest.param(None, None, 500, None, None, 500, 500, id="the default, no total"),
        pytest.param(None, None, 900, 700, 700, 700, 700, id="the default past the total"),
        pytest.param(None, 300, 500, 700, 700, 300, 300, id="redpanda's name"),
        pytest.param(None, 300, 200, 700, 700, 300, 300, id="redpanda's name above the default"),
        pytest.param(None, 900, 500, 700, 700, 700, 700, id="redpanda's name past the total"),
        pytest.param(None, 300, 500, None, None, 300, 300, id="redpanda's name, no total"),
        pytest.param(None, -1, 500, 700, 700, 700, 700, id="redpanda's name switched off"),
        pytest.param(None, 0, 500, 700, 700, 700, 700, id="redpanda's name switched off by 0"),
        pytest.param(None, -1, 500, None, None, None, None, id="redpanda's name switched off, no total"),
        pytest.param(300, None, 500, 700, 300, 300, 300, id="kafka's name"),
        pytest.param(300, None, None, None, 300, 300, 300, id="kafka's name, no total"),
        pytest.param(0, None, 500, 700, 0, 0, 0, id="kafka's name keeps nothing"),
        pytest.param(900, None, 500, 700, 700, 700, 700, id="kafka's name past the total"),
        pytest.param(-2, None, 500, 700, 700, 700, 700, id="kafka's name as total"),
        pytest.param(-2, None, 500, None, None, None, None, id="kafka's name as total, no total"),
        pytest.param(-1, None, 500, 700, 700, 700, 700, id="kafka's name without limit"),
        pytest.param(-1, None, 500, None, None, None, None, id="kafka's name without limit, no total"),
        pytest.param(300, 100, 500, 700, 300, 300, 300, id="both, kafka's wins"),
        pytest.param(-2, 100, 500, 700, 700, 700, 700, id="both, kafka's wins as total"),
        pytest.param(0, 100, 500, 700, 0, 0, 0, id="both, kafka's wins with nothing"),
    ],
)
def test_local_limit_follows_the_name_that_is_set(
    *, kind, kafka, redpanda, default, total, relaxed, strict, advised
):
    """Kafka's name is always enforced, Redpanda's and the default under the strict setting only."""
    settings = LocalSettings("the file", **{f"kafka_{kind}": kafka, f"redpanda_{kind}": redpanda})
    for is_strict, enforced in ((False, relaxed), (True, strict)):
        found = resolve_local_target(
            [settings],
            cluster=ClusterLocalTarget(
                **{f"target_{kind}": default, f"target_{_other(kind)}": None}, is_strict=is_strict
            ),
            **{f"total_{kind}": total, f"total_{_other(kind)}": None},
        )
        limit = getattr(found, kind)
        assert (limit.enforced, limit.advised) == (enforced, advised)
        assert (getattr(found.enforced, f"target_{kind}"), getattr(found.advised, f"target_{kind}")) == (
            enforced,
            advised,
        )
        other = getattr(found, _other(kind))
        assert (other.enforced, other.advised, other.is_explicit) == (None, None, False)


def _other(kind):
    return "bytes" if kind == "ms" else "ms"


@pytest.mark.parametrize(
    ("settings", "source", "is_explicit"),
    [
        pytest.param({}, f"retention_local_target_ms_default={DAY_MS}", False, id="default"),
        pytest.param({"redpanda_ms": 5}, "retention.local.target.ms=5 in the file", True, id="redpanda"),
        pytest.param(
            {"redpanda_ms": -1}, "retention.local.target.ms=-1 in the file", True, id="redpanda off"
        ),
        pytest.param({"kafka_ms": 5}, "local.retention.ms=5 in the file", True, id="kafka"),
        pytest.param({"kafka_ms": -1}, "local.retention.ms=-1 in the file", True, id="kafka without limit"),
        pytest.param({"kafka_ms": -2}, "local.retention.ms=-2 in the file", False, id="kafka's own default"),
        pytest.param({"kafka_ms": 5, "redpanda_ms": 6}, "local.retention.ms=5 in the file", True, id="both"),
    ],
)
def test_local_limit_names_the_setting_that_decides(settings, source, is_explicit):
    """An operator sees which line to change, and whether the topic has one of its own."""
    found = resolve(LocalSettings("the file", **settings))
    assert (found.ms.source, found.ms.is_explicit, found.is_explicit) == (source, is_explicit, is_explicit)


def test_local_target_is_explicit_when_either_limit_is():
    """One setting of its own is enough."""
    assert resolve(LocalSettings("the file", redpanda_bytes=5)).is_explicit
    assert resolve(LocalSettings("the file", kafka_ms=5)).is_explicit


def test_local_limits_are_looked_up_apart_and_the_first_place_decides():
    """Place goes before name: the file's Redpanda name decides before the broker's Kafka name."""
    file = LocalSettings("the file", redpanda_ms=300)
    broker = LocalSettings("the broker", kafka_ms=200, kafka_bytes=50)
    found = resolve(file, broker)
    assert found.ms == LocalLimit(WEEK_MS, 300, "retention.local.target.ms=300 in the file", is_explicit=True)
    assert found.bytes == LocalLimit(50, 50, "local.retention.bytes=50 in the broker", is_explicit=True)
    assert resolve(broker, file).ms.enforced == 200


@pytest.mark.parametrize(
    ("local_ms", "local_bytes", "total_bytes", "total_ms", "faults"),
    [
        pytest.param(2000, 2, 100, 1000, ["ms"], id="time past the total"),
        pytest.param(-1, 200, 100, 1000, ["ms", "bytes"], id="time without limit, bytes past the total"),
        pytest.param(2000, -1, 100, 1000, ["ms", "bytes"], id="bytes without limit, time past the total"),
        pytest.param(-2, -2, 100, 1000, [], id="as total"),
        pytest.param(500, 50, None, None, [], id="total without limit"),
        pytest.param(-1, -1, None, None, [], id="all without limit"),
        pytest.param(1000, 100, 100, 1000, [], id="equal"),
    ],
)
def test_local_target_remarks_on_what_kafka_refuses(local_ms, local_bytes, total_bytes, total_ms, faults):
    """A remark names what Kafka refuses in Kafka's own cases, and none names what Kafka accepts."""
    settings = LocalSettings("the file", kafka_ms=local_ms, kafka_bytes=local_bytes)
    found = resolve(settings, total_ms=total_ms, total_bytes=total_bytes)
    values = {"ms": (local_ms, total_ms), "bytes": (local_bytes, total_bytes)}
    assert found.remarks == tuple(
        f"local.retention.{kind}={values[kind][0]} in the file is more than "
        f"retention.{kind}={values[kind][1]}, which also applies"
        for kind in faults
    )


@pytest.mark.parametrize("shadowed", [5, 0, -1])
@pytest.mark.parametrize("kind", ["ms", "bytes"])
def test_local_target_remarks_on_two_names_for_one_limit(kind, shadowed):
    """The remark names the setting that takes precedence, and the line to remove, if both names are set."""
    both = LocalSettings("the broker", **{f"kafka_{kind}": -2, f"redpanda_{kind}": shadowed})
    (remark,) = resolve(both).remarks
    assert remark == (
        f"local.retention.{kind} and retention.local.target.{kind} are both set in the broker: "
        f"local.retention.{kind} takes precedence; remove retention.local.target.{kind}"
    )
    apart = LocalSettings("the broker", **{f"kafka_{kind}": -2, f"redpanda_{_other(kind)}": 5})
    assert resolve(apart).remarks == ()
    decides = LocalSettings("the file", **{f"redpanda_{kind}": 7})
    assert resolve(decides, both).remarks == (), "another place decides"


limits = st.none() | st.integers(-2, 9)
places = st.builds(
    LocalSettings, st.just("somewhere"), limits, limits, limits.filter(lambda one: one != -2), limits
)
totals = st.none() | st.integers(0, 9)


@given(st.lists(places, max_size=3), totals, totals, totals, totals)
def test_local_target_is_never_past_the_total_nor_short_of_the_advice(
    some, default_ms, default_bytes, total_ms, total_bytes
):
    """Advice <= enforced <= total; under the strict setting, and for Kafka's names, advice is enforced."""

    def number(limit):
        return math.inf if limit is None else limit

    found = {
        is_strict: resolve_local_target(
            some,
            cluster=ClusterLocalTarget(default_ms, default_bytes, is_strict),
            total_ms=total_ms,
            total_bytes=total_bytes,
        )
        for is_strict in (False, True)
    }
    for is_strict, target in found.items():
        for limit, total in ((target.ms, total_ms), (target.bytes, total_bytes)):
            assert number(limit.advised) <= number(limit.enforced) <= number(total)
            if is_strict or limit.source.startswith("local.retention"):
                assert limit.enforced == limit.advised
            else:
                assert limit.enforced == total
    assert found[False].advised == found[True].advised
    assert found[False].remarks == found[True].remarks
