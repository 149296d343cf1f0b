"""The admin page over a real reconciler, asked through HTTP."""

from __future__ import annotations

import asyncio
import socket
import threading
from functools import partial

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from tests.fakes.archive import archive_in, archived, reconciler_of, tiered_config
from tests.fakes.broker import broker_unavailable
from tests.fakes.log_writer import LogWriter, leads_from
from tests.fakes.memory_store import MemoryStore
from tests.fakes.store import store_unavailable
from tests.fakes.uploads import settle
from tieringd.config.model import AdminConfig
from tieringd.daemon.admin import AdminControl, AdminPage, serving
from tieringd.errors import ConfigError, StoreFull
from tieringd.formats.object_keys import data_key, topic_key
from tieringd.model.partition import NO_TOPIC_ID, TopicIdPartition
from tieringd.policies.upload_control import UploadPace


class SilentStore(MemoryStore):
    """A store that answers no listing."""

    async def list_page(self, prefix, *, start_after=None, limit=1000):
        """Fail as a store that is away."""
        raise store_unavailable("list_page")


class FullStore(MemoryStore):
    """A store that has room for manifests, and none for segments."""

    async def put(self, key, body, *, crc32c, condition=None):
        """Store a manifest, or fail as a full store."""
        if key.endswith(".log"):
            raise StoreFull("the disk of the file store is full")
        return await super().put(key, body, crc32c=crc32c, condition=condition)


ELSEWHERE = TopicIdPartition("cluster", "elsewhere", NO_TOPIC_ID, 0)


@pytest.fixture
def writer(tmp_path):
    """Give a partition with a closed segment, and two records after it."""
    writer = LogWriter(tmp_path)
    writer.closed_segment()
    writer.append(b"d", b"e")
    return writer


@pytest.fixture
def archive(store):
    return archive_in(store)


@pytest.fixture
def reconciler(tmp_path, writer, broker, metrics, archive):
    return reconciler_of(tiered_config(tmp_path, interval_ms=86_400_000), archive, broker, metrics=metrics)


@pytest.fixture
async def client(metrics, reconciler):
    async with TestClient(TestServer(AdminPage(metrics, reconciler).application())) as client:
        yield client


@pytest.fixture
def one_round(reconciler, log):
    """Give a function that runs until the log says something, and lets the steps in hand end."""

    async def one_round(until: str = "segment durable") -> None:
        run = asyncio.create_task(reconciler.run())
        await log.said(until)
        reconciler.stop()
        await run

    return one_round


async def text_of(client, path: str) -> tuple[int, str]:
    async with client.get(path) as response:
        return response.status, await response.text()


async def test_healthz_answers_before_anything_is_known(client):
    """The process answers, whatever else is the matter."""
    assert await text_of(client, "/healthz") == (200, "ok\n")


async def test_readyz_waits_for_the_first_round(client):
    """A daemon is not ready before its first round has ended, and says so."""
    status, text = await text_of(client, "/readyz")

    assert (status, "first round" in text) == (503, True)


async def test_readyz_after_a_round(client, one_round):
    """A round that went well makes the daemon ready."""
    await one_round()

    assert await text_of(client, "/readyz") == (200, "ok\n")


async def test_readyz_says_why_the_last_round_failed(client, one_round, broker):
    """A failed round makes it not ready again, with the reason as text."""
    broker.fail_next("log_bounds", broker_unavailable("log_bounds"))
    await one_round("reconciliation round failed")

    status, text = await text_of(client, "/readyz")

    assert (status, text) == (503, f"{broker_unavailable('log_bounds')}\n")


def unready(metrics) -> dict[str, float]:
    """Return the series of `tieringd_ready` by their reasons."""
    families = text_string_to_metric_families(generate_latest(metrics.registry).decode())
    return {
        one.labels["reason"]: one.value
        for family in families
        for one in family.samples
        if one.name == "tieringd_ready"
    }


async def test_readiness_is_a_metric_with_its_reasons(metrics, reconciler, one_round, broker):
    """Every reason is there from the first scrape on, and the one that is in the way is 0."""
    async with serving(AdminConfig(port=0), metrics, reconciler):
        reasons = {"round", "store", "bookkeeping", "log_directory", "starting"}
        assert unready(metrics) == dict.fromkeys(reasons, 1) | {"starting": 0}
        assert metrics.registry.get_sample_value("tieringd_reconcile_last_success_timestamp_seconds") == 0
        await one_round()
        assert unready(metrics) == dict.fromkeys(reasons, 1)
        assert metrics.registry.get_sample_value("tieringd_reconcile_last_success_timestamp_seconds") > 0


class NoWorkers:
    """A pool none of whose workers serves."""

    fault = "none of the 2 workers of the gateway serves clients"


async def test_workers_that_do_not_serve_are_a_reason_beside_those_of_archiving(
    metrics, reconciler, one_round
):
    """The reason is a series of its own, and rounds succeed meanwhile."""
    await one_round()
    async with serving(AdminConfig(port=0), metrics, reconciler, workers=NoWorkers()):
        assert unready(metrics)["gateway_workers"] == 0
        assert sum(unready(metrics).values()) == 5
        assert metrics.registry.get_sample_value("tieringd_reconcile_last_success_timestamp_seconds") > 0


async def test_failed_round_is_the_reason_and_no_success(metrics, reconciler, one_round, broker):
    """A round that fails is a reason of its own, and the time of the last success does not move."""
    broker.fail_next("log_bounds", broker_unavailable("log_bounds"))
    async with serving(AdminConfig(port=0), metrics, reconciler):
        await one_round("reconciliation round failed")
        assert unready(metrics)["round"] == 0
        assert metrics.registry.get_sample_value("tieringd_reconcile_last_success_timestamp_seconds") == 0


async def test_store_that_is_away_from_the_start_is_the_reason_and_no_success(tmp_path, broker, metrics, log):
    """A daemon with a silent store is not ready, and no round counts as a success."""
    archive = archive_in(SilentStore())
    reconciler = reconciler_of(tiered_config(tmp_path, interval_ms=1), archive, broker, metrics=metrics)
    async with serving(AdminConfig(port=0), metrics, reconciler):
        run = asyncio.create_task(reconciler.run())
        await log.said("topic manifests cannot be read")
        await reconciler.next_scan()
        reconciler.stop()
        await run
        assert unready(metrics)["store"] == 0
        assert metrics.registry.get_sample_value("tieringd_reconcile_last_success_timestamp_seconds") == 0


async def test_log_directory_that_is_not_there_is_not_ready(metrics, reconciler, client, writer):
    """An unmounted disk has no partitions, so without this a daemon with nothing to do would look well."""
    await reconciler.run_once()
    writer.path.parent.rename(writer.path.parent.with_name("away"))
    await reconciler.run_once()

    status, text = await text_of(client, "/readyz")

    assert (status, "cannot be read: No such file or directory" in text) == (503, True)
    assert reconciler.readiness()["log_directory"] in text


async def test_metrics_have_redpandas_pending_offsets(client, reconciler):
    """The metric that the data archiver's users know is there, under its own name and labels."""
    await reconciler.run_once()

    async with client.get("/metrics/partitions") as response:
        assert response.content_type == "text/plain"
        families = text_string_to_metric_families(await response.text())
        samples = [each for family in families for each in family.samples]

    (pending,) = [each for each in samples if each.name == "vectorized_ntp_archiver_pending"]
    assert pending.labels == {"namespace": "kafka", "topic": "orders", "partition": "0"}
    assert pending.value == 2
    (uploads,) = [each for each in samples if each.name == "tieringd_uploads_total"]
    assert uploads.value == 1


async def test_metrics_of_topics_are_on_their_own_page(client, reconciler):
    """The daemon's page has totals and the largest topics; each page is complete for its purpose."""
    await reconciler.run_once()
    _, brief = await text_of(client, "/metrics")
    _, detail = await text_of(client, "/metrics/partitions")
    assert 'tieringd_uploads_total{topic="orders"} 1.0' in detail
    assert "tieringd_uploads_total" not in brief
    assert "\ntieringd_daemon_uploads_total 1.0" in brief
    assert 'tieringd_topic_archive_segments{topic="orders"} 1.0' in brief
    assert not [line for line in brief.splitlines() if "partition=" in line]


@pytest.mark.parametrize("path", ["/metrics", "/metrics/partitions"])
async def test_metrics_are_compressed_for_clients_that_accept_it(client, reconciler, path):
    """Prometheus does; a person's curl gets text."""
    await reconciler.run_once()
    async with client.get(path, headers={"Accept-Encoding": "gzip"}) as response:
        assert response.headers["Content-Encoding"] == "gzip"
        compressed = await response.text()
    async with client.get(path, headers={"Accept-Encoding": "identity"}) as response:
        assert "Content-Encoding" not in response.headers
        plain = await response.text()
    names = [{line.split(" ")[0] for line in page.splitlines()} for page in (compressed, plain)]
    assert names[0] == names[1]


@pytest.mark.parametrize("path", ["/metrics", "/metrics/partitions"])
async def test_metrics_are_rendered_outside_the_event_loop(client, metrics, path):
    """The loop archives and serves clients; a page of ten thousand partitions must not hold it up."""
    threads = set()

    class Spy:
        def collect(self):
            threads.add(threading.current_thread())
            return []

    metrics.default_page.register(Spy())
    metrics.by_topic.register(Spy())
    await text_of(client, path)
    assert len(threads) == 1
    assert threading.current_thread() not in threads


async def test_partitions_are_counted_by_fault(metrics, reconciler, one_round, writer):
    """Every kind is there from the first scrape on, and what is wrong now is counted."""
    writer.flip_byte(0)
    async with serving(AdminConfig(port=0), metrics, reconciler):
        count = partial(metrics.registry.get_sample_value, "tieringd_partitions_in_fault")
        kinds = ("corrupt", "fenced", "operator", "store", "other")
        assert [count({"fault": one}) for one in kinds] == [0] * 5
        await one_round("segment is corrupt: the partition is neither uploaded nor trimmed from here on")
        assert [count({"fault": one}) for one in kinds] == [1, 0, 0, 0, 0]


async def test_status_and_metrics_agree_while_the_store_is_full(tmp_path, metrics, writer, broker, log):
    """The waiting segments are the same on both, and the fault counts as the store's."""
    archive = archive_in(FullStore())
    reconciler = reconciler_of(tiered_config(tmp_path, interval_ms=1), archive, broker, metrics=metrics)
    run = asyncio.create_task(reconciler.run())
    await log.said("archiver step failed")
    page = AdminPage(metrics, reconciler)
    async with TestClient(TestServer(page.application())) as client, client.get("/status") as response:
        (partition,) = (await response.json())["partitions"]
    pending = metrics.registry.get_sample_value(
        "tieringd_upload_pending_segments", {"topic": "orders", "partition": "0"}
    )
    assert "full" in partition["fault"]
    assert partition["pending_segments"] == pending == 1
    assert reconciler.faults()["store"] == 1
    reconciler.stop()
    await run


async def test_status_before_the_first_round_is_empty(client):
    """There is an answer even when there is nothing to tell."""
    async with client.get("/status") as response:
        assert await response.json() == {"rounds": 0, "problems": {}, "paused_topics": [], "partitions": []}


async def test_status_tells_each_partition(client, one_round, archive, writer):
    """The status has each archiver with what it did."""
    await archive.manifests.ensure_topic(topic_key(writer.identified), partition_count=1)
    await one_round()

    async with client.get("/status") as response:
        found = await response.json()
    partition = {
        "topic": "orders",
        "partition": 0,
        "leader_epoch": 0,
        "uploaded": 1,
        "trimmed": 0,
        "pending_segments": 0,
        "fault": None,
        "waits_because": "segment 3 is active",
        "waits_for_operator": None,
    }
    assert found == {"rounds": 2, "problems": {}, "paused_topics": [], "partitions": [partition]}


async def test_status_tells_what_holds_an_upload_back(metrics, archive, reconciler, log):
    """Which brake, and for how long: what `explain` shows as the daemon's own words."""
    archive.gate.set_pace(UploadPace(9, None, limit_bytes_per_second=1))
    async with archive.gate.upload(ELSEWHERE, 1000):
        run = asyncio.create_task(reconciler.run())
        await log.said("archiving")
        await settle()
    page = AdminPage(metrics, reconciler, archive.gate)
    async with TestClient(TestServer(page.application())) as client, client.get("/status") as response:
        (partition,) = (await response.json())["partitions"]
    assert partition["waits_because"].startswith(
        "the limit cloud_storage_upload_bytes_per_second is reached; the upload has waited for "
    )
    archive.gate.set_pace(UploadPace(9, None))
    await log.said("segment durable")
    reconciler.stop()
    await run


async def test_status_tells_a_partitions_fault(client, one_round, writer):
    """The status has the reason that holds a partition back."""
    writer.flip_byte(0)
    await one_round("segment is corrupt: the partition is neither uploaded nor trimmed from here on")

    async with client.get("/status") as response:
        (partition,) = (await response.json())["partitions"]
    assert str(writer.log_path(0)) in partition["fault"]
    assert (partition["uploaded"], partition["pending_segments"]) == (0, 1)


async def test_status_names_the_command_that_decides(client, one_round, archive, writer, broker):
    """A partition that waits for an operator is shown with the case, and with the command for it."""
    writer.append(b"good")
    divergence = writer.append(b"lost")
    writer.roll()
    *_, newest = (await archived(writer, archive)).segments
    await archive.store.delete_many([data_key(writer.identified, newest)])
    leads_from(writer, divergence)
    writer.closed_segment(b"another leader's")
    broker.epochs[writer.name] = 1
    await one_round("the partition waits for an operator")
    async with client.get("/status") as response:
        (partition,) = (await response.json())["partitions"]
    case = partition["waits_for_operator"]
    assert (case["reason"], case["divergence_offset"]) == ("segment_unreadable", divergence)
    assert case["command"] == "tieringd archive resolve orders-0"


async def test_status_tells_the_problems(client, reconciler, writer):
    """The status names a partition that could not be scanned by its path."""
    (writer.path / "leader-epoch-checkpoint").write_text("nonsense")
    await reconciler.run_once()

    async with client.get("/status") as response:
        problems = (await response.json())["problems"]
    assert list(problems) == [str(writer.path)]


async def test_other_pages_are_not_found(client):
    """Nothing else is served, and nothing can be changed."""
    assert (await text_of(client, "/other"))[0] == 404
    async with client.post("/status") as response:
        assert response.status == 405


async def test_serving_listens_where_it_is_told(metrics, reconciler):
    """The page is there for the time of the context, on a port that the log tells."""
    with capture_logs() as logs:
        async with serving(AdminConfig(port=0), metrics, reconciler), aiohttp.ClientSession() as session:
            (place,) = [each for each in logs if each["event"] == "admin page listens"]
            url = f"http://{place['host']}:{place['port']}/healthz"
            async with session.get(url) as response:
                assert response.status == 200
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.get(url)


async def test_serving_on_a_taken_port_says_what_to_do(metrics, reconciler):
    """A port that another process has is a configuration error that names it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*admin.port"):
            async with serving(AdminConfig(port=port), metrics, reconciler):
                raise AssertionError


async def test_serving_can_be_turned_off(metrics, reconciler):
    """A disabled page listens nowhere."""
    with capture_logs() as logs:
        async with serving(AdminConfig(enabled=False), metrics, reconciler):
            pass
    assert logs == []


@pytest.fixture
def asked_to_reload():
    """Give the list that gets an entry for each reload."""
    return []


@pytest.fixture
def guarded_client(metrics, reconciler, asked_to_reload):
    """Give a function that serves the page with a token, or without one."""

    def served(token):
        control = AdminControl(token, lambda: asked_to_reload.append(1))
        return TestClient(TestServer(AdminPage(metrics, reconciler, control=control).application()))

    return served


@pytest.mark.parametrize(
    ("token", "headers", "expected"),
    [
        (None, {}, 403),
        (None, {"Authorization": "Bearer None"}, 403),
        ("open", {}, 401),
        ("open", {"Authorization": "Bearer shut"}, 401),
        ("open", {"Authorization": "open"}, 401),
        ("open", {"Authorization": "Bearer open\u00e9"}, 401),
        ("open", {"Authorization": "Bearer open"}, 202),
    ],
)
async def test_reload_takes_the_token_that_is_configured(
    guarded_client, asked_to_reload, token, headers, expected
):
    """A reload is always refused without a configured token, and else to requests that do not carry it."""
    async with guarded_client(token) as client:
        async with client.post("/reload", headers=headers) as response:
            assert response.status == expected
            assert "open" not in await response.text()
        assert asked_to_reload == [1] * (expected == 202)


async def test_every_other_request_only_reads(guarded_client, asked_to_reload, store):
    """Each route takes GET, and refuses each method that could change something, with the token as well."""
    async with guarded_client("open") as client:
        routes = client.server.app.router.routes()
        assert {route.method for route in routes if route.resource.canonical != "/reload"} == {"GET", "HEAD"}
        paths = {route.resource.canonical for route in routes}
        for path in paths:
            for method in ("POST", "PUT", "PATCH", "DELETE"):
                if (path, method) == ("/reload", "POST"):
                    continue
                headers = {"Authorization": "Bearer open"}
                async with client.request(method, path, headers=headers) as response:
                    assert response.status == 405, (method, path)
    assert asked_to_reload == []
    assert store.requests == []
