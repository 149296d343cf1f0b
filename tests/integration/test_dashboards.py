"""Dashboards: every query of every panel, on a real Prometheus that scrapes real processes with traffic."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import confluent_kafka
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana_dashboards import BOARDS
from deploy.grafana_panels import rendered
from deploy.metrics_reference import labels_by_name
from tests.e2e.log_files import RECORDS, write_partition
from tests.support.daemon import Daemon, directory_config, running_daemon, write_config
from tests.support.prometheus import running_prometheus
from tests.support.promtool import require_promtool

DIRECTORY = Path(__file__).parents[2] / "deploy" / "grafana"
FILES = sorted(DIRECTORY.glob("*.json"))
SUFFIXES = ("_bucket", "_sum", "_count")
PANELS = [
    pytest.param(
        path.stem, panel["title"], target["expr"], id=f"{path.stem}-{panel['title']}-{target['refId']}"
    )
    for path in FILES
    for panel in json.loads(path.read_text())["panels"]
    for target in panel["targets"]
]
READER_RATE = 'rate(tieringd_gateway_reader_bytes_total{client_id="dashboards",source!="broker"}[1m]) > 0'
# A rate counts what was read at the beginning, however long the tests before take.
VARIABLES = {"$instance": ".+", "$topic": "orders", "$__rate_interval": "1h"}


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory):
    """
    Give a Prometheus that has seen a daemon upload, trim and tidy, and a gateway serve what it uploaded.

    The gateway has no broker behind it, so that no broker has to run.
    """
    root = tmp_path_factory.mktemp("traffic")
    write_partition(root / "logs", "orders-0", segments=6)
    config = directory_config(
        [root / "logs"],
        root / "archive",
        root / "state",
        # The archive is tidied at once.
        cloud_storage_idle_timeout_ms=100,
        cloud_storage_idle_threshold_rps=100_000,
        retention_local_trim_interval=200,
    )
    endpoint = config | {"state_directory": str(root / "endpoint"), "gateway": {"port": 0}}
    del endpoint["broker"]
    with running_daemon(write_config(root / "daemon.yaml", config)) as daemon:
        daemon.until_next_offset("orders", 6 * RECORDS)
        with running_daemon(write_config(root / "gateway.yaml", endpoint), start=Endpoint) as gateway:
            targets = [f"127.0.0.1:{one.admin_port}" for one in (daemon, gateway)]
            with running_prometheus(root / "prometheus", targets) as prometheus:
                prometheus.until(
                    lambda: len(prometheus.query("up == 1")) == 2 * len(targets), "both are scraped"
                )
                (listening,) = gateway.events("archive endpoint listens")
                # A reader has no series before its first fetch, so the second time it is seen to read.
                for rate in ("rate(tieringd_gateway_archived_answers_total[1m]) > 0", READER_RATE):
                    assert read_all(f"127.0.0.1:{listening['port']}") == 6 * RECORDS
                    prometheus.until(lambda rate=rate: prometheus.query(rate), "the answers are seen")
                prometheus.until(
                    lambda: len(prometheus.query("tieringd_housekeeping_turns_total")) == 4, "all had a turn"
                )
                yield prometheus


class Endpoint(Daemon):
    """One `tieringd gateway --archive-only`."""

    arguments = ("gateway", "--archive-only")


def read_all(bootstrap):
    """Read the topic with librdkafka, and return how many records it has."""
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": bootstrap,
            "client.id": "dashboards",
            "group.id": "unused",
            "enable.partition.eof": True,
        }
    )
    count = 0
    try:
        consumer.assign([confluent_kafka.TopicPartition("orders", 0, confluent_kafka.OFFSET_BEGINNING)])
        while (message := consumer.poll(60)) is not None:
            if message.error() is None:
                count += 1
            # The client tells of a connection that it opens anew, and goes on.
            elif message.error().code() == confluent_kafka.KafkaError._PARTITION_EOF:
                break
    finally:
        consumer.close()
    return count


def filled(expression):
    """Return the query as Grafana asks it, with its variables in their places."""
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


@pytest.mark.parametrize(("board", "title", "expression"), PANELS)
def test_query_of_a_panel_finds_something(prometheus, board, title, expression):
    """Each query asks for exported metrics by their own labels, does not fail, and is not empty."""
    known = {*labels_by_name(), "up"}
    asked = re.findall(r"\b((?:tieringd|process|vectorized)_[a-z_]+|up\b)", expression)
    assert asked
    for name in asked:
        plain = next((name.removesuffix(one) for one in SUFFIXES if name.endswith(one)), name)
        assert name in known or plain in known
    assert "$" not in filled(expression)
    # A scrape that was answered late leaves no values until the next one.
    prometheus.until(lambda: prometheus.query(filled(expression)), f"{board}: {title} finds something")


@pytest.mark.parametrize(
    ("board", "title", "series", "found"),
    [
        pytest.param(
            "overview",
            "Ready",
            {'tieringd_ready{instance="a",reason="store"}': 1, 'up{instance="a"}': 1, 'up{instance="b"}': 0},
            {"{}": 0},
            id="one-does-not-answer",
        ),
        pytest.param(
            "overview",
            "Ready",
            {'tieringd_ready{instance="a",reason="store"}': 1, 'up{instance="a"}': 1},
            {"{}": 1},
            id="all-answer",
        ),
        pytest.param(
            "overview",
            "Age of the last good round",
            {
                'tieringd_reconcile_last_success_timestamp_seconds{instance="a"}': 100,
                # An archive-only endpoint.
                'tieringd_reconcile_last_success_timestamp_seconds{instance="b"}': 0,
            },
            {'{instance="a",job="tieringd"}': 200},
            id="one-has-no-rounds",
        ),
        pytest.param(
            "disk",
            "Pins can be made",
            {
                'tieringd_pins_available{instance="a",log_dir="/logs"}': 1,
                'tieringd_led_partitions{instance="a"}': 3,
                'tieringd_led_partitions{instance="b"}': 3,
            },
            {
                'tieringd_pins_available{instance="a",job="tieringd",log_dir="/logs"}': 1,
                '{instance="b",job="tieringd"}': 0,
            },
            id="one-makes-no-pins",
        ),
    ],
)
def test_panel_shows_each_daemon_as_it_is(tmp_path, board, title, series, found):
    """
    A daemon that does not answer is not ready, and a daemon whose pins work has no line that says no.

    A process without rounds has no age of one: the time since 1970 would flatten all other lines.
    """
    panels = next(one for one in BOARDS if one.name == board).panels
    (panel,) = (one for one in panels if one.title == title)
    test = {
        "interval": "1m",
        "input_series": [
            {"series": name.replace("{", '{job="tieringd",'), "values": f"{value}x5"}
            for name, value in series.items()
        ],
        "promql_expr_test": [
            {
                "expr": filled(panel.queries[0].text),
                "eval_time": "5m",
                "exp_samples": [{"labels": labels, "value": value} for labels, value in found.items()],
            }
        ],
    }
    path = tmp_path / "panel_test.yml"
    path.write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": [test]}))
    done = subprocess.run(
        [require_promtool(), "test", "rules", str(path)], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_gateway_board_tells_who_reads_what(prometheus):
    """The panels by principal name the principal, the client, and the source of its records."""
    panels = next(one for one in BOARDS if one.name == "gateway").panels
    by_title = {one.title: filled(one.queries[0].text) for one in panels}
    who = {"principal": "User:ANONYMOUS"}
    for title in ("Fetched, the ten heaviest principals", "Fetched from the archive, by principal"):
        (row,) = (one for one in prometheus.query(by_title[title]) if one["metric"] == who)
        assert float(row["value"][1]) > 0
    clients = [one["metric"] for one in prometheus.query(by_title["Fetched, the ten heaviest clients"])]
    assert who | {"client_id": "dashboards"} in clients
    sources = [
        one["metric"]["source"] for one in prometheus.query(by_title["Fetches by principal and source"])
    ]
    assert set(sources) & {"cache", "store"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_variable_has_values(prometheus, path):
    """The lists that a person chooses from are not empty, and no query uses a variable that there is not."""
    document = json.loads(path.read_text())
    variables = {one["name"]: one for one in document["templating"]["list"]}
    for one in variables.values():
        if one["type"] == "query":
            metric, label = re.fullmatch(r"label_values\((.+), (\w+)\)", one["query"]).groups()
            assert prometheus.get(f"label/{label}/values", **{"match[]": metric})
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(document["panels"]))) - {"__rate_interval"}
    assert used <= variables.keys()


def test_files_are_what_the_definition_says():
    """The files are generated: `make dashboards` writes them."""
    assert {path.stem: path.read_text() for path in FILES} == {one.name: rendered(one) for one in BOARDS}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_dashboard_keeps_to_grafanas_schema(path):
    """The models made from Grafana's schema read all that the dashboard has."""
    document = json.loads(path.read_text())
    again = JSONEncoder(sort_keys=True, indent=2).encode(Dashboard.from_json(document))
    assert json.loads(again) == document


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_panels_do_not_overlap_and_lines_can_be_told_apart(path):
    """Each panel has a place of its own within the 24 columns, a unit, and a legend for each query."""
    taken = set()
    for panel in json.loads(path.read_text())["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells
        assert panel["fieldConfig"]["defaults"]["unit"]
        legends = [target["legendFormat"] for target in panel["targets"]]
        assert len(set(legends)) == len(legends)
