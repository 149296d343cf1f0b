"""What a daemon tells the commands, and that a daemon which does not answer is no error."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from tests.fakes.archive import tiered_config
from tests.support.daemon import directory_config, write_config
from tests.unit.cli.commands import TOPIC, invoked, tieringd
from tieringd.cli.daemon_status import asked, waiting, why_silent

STATUS = {
    "partitions": [
        {"topic": "orders", "partition": 0, "fault": None, "waits_because": "a transaction is open"},
        {"topic": "orders", "partition": 1, "fault": None, "waits_because": None},
        {"topic": "orders", "partition": 2, "fault": "batch CRC", "waits_because": "segment 3 is active"},
        {"topic": "payments", "partition": 0, "fault": None, "waits_because": "segment 9 is active"},
    ]
}


@asynccontextmanager
async def page(answer: web.Response, host: str = "127.0.0.1", path: str = "/status"):
    """Serve *answer* at *path*; give the port."""

    async def status(_request: web.Request) -> web.Response:
        return answer

    application = web.Application()
    application.add_routes([web.get(path, status)])
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, host, 0).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def config_with(tmp_path, **admin):
    config = tiered_config(tmp_path)
    return config.model_copy(update={"admin": config.admin.model_copy(update=admin)})


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_partitions_that_wait_say_why(tmp_path, host):
    """A fault goes before what an ordinary partition waits for; other topics are left out."""
    async with page(web.json_response(STATUS)) as port:
        found = await waiting(config_with(tmp_path, host=host, port=port), "orders")
    assert found == {0: "a transaction is open", 2: "batch CRC"}


@pytest.mark.parametrize(("cluster", "waits"), [("local", "an election"), ("another-cluster", None)])
async def test_daemon_is_asked_about_its_own_cluster_alone(site, tmp_path, cluster, waits):
    """A daemon of another cluster may have a topic of the same name, and knows nothing of this one."""
    told = {"topic": TOPIC, "partition": 0, "fault": None, "waits_because": "an election"}
    async with page(web.json_response({"partitions": [told]})) as port:
        config = directory_config([tmp_path / "logs"], site.archive, tmp_path / "state", cluster_id=cluster)
        path = write_config(tmp_path / "tieringd.yaml", config | {"admin": {"port": port}})
        done = await asyncio.to_thread(
            invoked, "archive", "describe", TOPIC, "--config", path, "--format", "json"
        )
    assert [row["waits_because"] for row in done.json()] == [waits]


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(lambda: web.Response(text="<html>"), id="another service"),
        pytest.param(lambda: web.json_response({"rounds": 1}), id="another service's JSON"),
        pytest.param(lambda: web.json_response([1]), id="a list"),
        pytest.param(lambda: web.Response(status=500), id="a failure"),
    ],
)
async def test_page_that_is_no_status_tells_nothing(tmp_path, answer):
    """The archive can be read, whatever answers at that address."""
    async with page(answer()) as port:
        assert await waiting(config_with(tmp_path, port=port), "orders") == {}


async def test_daemon_that_does_not_run_tells_nothing(tmp_path):
    """The port is closed, the page is off, or its port is not known."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        assert await waiting(config_with(tmp_path, port=unused.getsockname()[1]), "orders") == {}
    assert await waiting(config_with(tmp_path, port=0), "orders") == {}
    assert await waiting(config_with(tmp_path, enabled=False), "orders") == {}


@pytest.mark.parametrize(
    ("admin", "words"),
    [
        ({"enabled": False}, "admin.enabled is false"),
        ({"port": 0}, "give admin.port a number"),
        ({"port": 1}, "no daemon answers on 127.0.0.1:1: is it running"),
    ],
)
async def test_daemon_that_is_silent_has_a_reason(tmp_path, admin, words):
    """It says what to change where the configuration is the reason."""
    config = config_with(tmp_path, **admin)
    assert await asked(config, "/status/overview") is None
    assert words in why_silent(config)


@pytest.mark.parametrize("answer", [{}, [], {"reasons": {}}, {"reasons": {}, "tasks": [{}]}])
async def test_status_of_another_program_is_refused_in_words(tmp_path, answer):
    """Another program listens there, or a daemon of another version: the command says so."""
    async with page(web.json_response(answer), path="/status/overview") as port:
        config = directory_config([tmp_path / "logs"], tmp_path / "bucket", tmp_path / "state")
        path = write_config(tmp_path / "tieringd.yaml", config | {"admin": {"port": port}})
        done = await asyncio.to_thread(tieringd, "status", "--config", path)
    assert (done.exit_code, done.output) == (1, "")
    assert done.errors.startswith(
        f"what answers on 127.0.0.1:{port} is another program, or a daemon of another"
    )
