"""
The Grafana dashboards: the one definition of `deploy/grafana/*.json`.

`python -m deploy.grafana_dashboards` writes them. `tieringd generate grafana-dashboard` prints what was
written, so that neither the daemon nor its command line needs the builder library.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement, TooltipDisplayMode
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

_Built = TypeVar("_Built", timeseries.Panel, stat.Panel)

DIRECTORY: Final = Path(__file__).parent / "grafana"
_SOURCE: Final = DataSourceRef(type_val="prometheus", uid="${datasource}")
_ROW_WIDTH, _PANEL_HEIGHT, _STAT_HEIGHT = 24, 8, 4
_OF_TOPIC: Final = "{{topic}} {{partition}}"
_EVENTS: Final = "or vector(0)"
"""Behind a sum of counters that have no series before their first event: nothing is then 0, and not empty."""


@dataclass(frozen=True, slots=True)
class Query:
    """One line, or several with a label to tell them apart."""

    expression: str
    """`@`: the chosen instances; `#`: these and the chosen topic; `[~]`: the interval of a rate."""
    legend: str = "{{instance}}"

    @property
    def text(self) -> str:
        """Return the query as Grafana has it."""
        chosen = 'job="tieringd",instance=~"$instance"'
        of_topic = f'{chosen},topic="$topic"'
        text = self.expression.replace("@", f"{{{chosen}}}").replace("#", f"{{{of_topic}}}")
        return text.replace("[~]", "[$__rate_interval]")


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph, or one number."""

    title: str
    unit: str
    queries: Sequence[Query]
    meaning: str = ""
    """How to read the panel; Grafana shows it behind the title."""
    is_number: bool = False


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard."""

    name: str
    title: str
    panels: Sequence[Panel]
    has_topic: bool = False


def graph(title: str, unit: str, *queries: Query | str, meaning: str = "") -> Panel:
    """Return a graph; a query that is only text has a line for each instance."""
    return Panel(title, unit, [Query(one) if isinstance(one, str) else one for one in queries], meaning)


def number(title: str, unit: str, expression: str, meaning: str = "") -> Panel:
    """Return a single number."""
    return Panel(title, unit, [Query(expression, title)], meaning, is_number=True)


BOARDS: Final = (
    Board(
        "overview",
        "tieringd: overview",
        [
            number("Ready", "bool_yes_no", "min(tieringd_ready@)", "No: Readiness, below, has the reason."),
            number("Partitions led", "short", "sum(tieringd_led_partitions@)"),
            number(
                "Partitions in error",
                "short",
                "sum(tieringd_quarantined_partitions@) + sum(tieringd_fenced_partitions@)",
                "Corrupt local data, or archived by another daemon.",
            ),
            number("Topics paused", "short", "sum(tieringd_paused_topics@)"),
            number("Oldest wait", "s", "max(tieringd_daemon_upload_lag_seconds@)"),
            number(
                "Losses",
                "short",
                "sum(tieringd_daemon_archive_gaps_total@) + sum(tieringd_pins_given_up_total@)",
                "Gaps recorded, and pins given up, since the daemons' starts.",
            ),
            graph("Readiness", "short", Query("min by (reason) (tieringd_ready@)", "{{reason}}")),
            graph("Waiting to be uploaded", "bytes", "tieringd_daemon_upload_pending_bytes@"),
            graph(
                "Segments waiting",
                "short",
                Query("sum by (instance) (tieringd_upload_pending_segments@)"),
            ),
            graph("Oldest wait", "s", "tieringd_daemon_upload_lag_seconds@"),
            graph(
                "Seconds to loss",
                "s",
                "clamp_max(tieringd_daemon_seconds_to_loss@, 31536000)",
                meaning="Until the broker deletes what is not durable; a year where nothing is near.",
            ),
            graph("Held by pins only", "bytes", "tieringd_pinned_bytes@"),
            graph(
                "Uploads, the ten largest topics",
                "Bps",
                Query("topk(10, sum by (topic) (rate(tieringd_upload_bytes_total@[~])))", "{{topic}}"),
            ),
            graph("Failed store requests", "reqps", "rate(tieringd_daemon_store_failures_total@[~])"),
            graph(
                "Age of the last good round",
                "s",
                "time() - tieringd_reconcile_last_success_timestamp_seconds@",
            ),
            graph("Memory", "bytes", "process_resident_memory_bytes@"),
            graph("Processor", "percentunit", "rate(process_cpu_seconds_total@[~])"),
            graph("Descriptors", "short", "process_open_fds@"),
        ],
    ),
    Board(
        "uploads",
        "tieringd: uploads",
        [
            graph("Uploaded", "Bps", "sum by (instance) (rate(tieringd_upload_bytes_total@[~]))"),
            graph("Segments made durable", "ops", "sum by (instance) (rate(tieringd_uploads_total@[~]))"),
            graph("Manifests stored", "ops", "sum by (instance) (rate(tieringd_manifest_commits_total@[~]))"),
            graph("Steps that failed", "ops", "rate(tieringd_daemon_upload_failures_total@[~])"),
            graph("Oldest upload in flight", "s", "tieringd_oldest_upload_in_flight_seconds@"),
            graph("Backlog", "bytes", "tieringd_upload_backlog_bytes@"),
            graph("Shares", "short", "tieringd_upload_shares@", meaning="In thousandths; 1000 is no brake."),
            graph("Error of the controller", "short", "tieringd_upload_controller_error@"),
            graph(
                "Held back",
                "percentunit",
                Query(f"sum(rate(tieringd_upload_held_seconds_total@[~])) {_EVENTS}", "all causes"),
                meaning="The part of time in which closed segments waited for their turn.",
            ),
            graph("Partitions led, of all", "percentunit", "tieringd_upload_share_ratio@"),
            graph("Held by a transaction", "s", "tieringd_daemon_held_by_transaction_seconds@"),
            graph("Trimmed", "Bps", Query(f"sum(rate(tieringd_trimmed_bytes_total@[~])) {_EVENTS}", "all")),
            graph("Trims refused", "ops", "rate(tieringd_daemon_trims_denied_total@[~])"),
        ],
    ),
    Board(
        "archive",
        "tieringd: archive",
        [
            graph("Topics", "short", Query("max by (lifecycle) (tieringd_archive_topics@)", "{{lifecycle}}")),
            graph(
                "Past total retention",
                "Bps",
                Query(f"sum(rate(tieringd_archive_expired_bytes_total@[~])) {_EVENTS}", "all topics"),
            ),
            graph(
                "Segments deleted",
                "ops",
                Query(f"sum(rate(tieringd_archive_deleted_segments_total@[~])) {_EVENTS}", "all topics"),
            ),
            graph("Objects purged", "ops", "rate(tieringd_archive_purged_objects_total@[~])"),
            graph(
                "Merged",
                "Bps",
                Query(f"sum(rate(tieringd_archive_merged_bytes_total@[~])) {_EVENTS}", "all topics"),
            ),
            graph(
                "Compacted",
                "Bps",
                Query(f"sum(rate(tieringd_archive_compacted_bytes_before_total@[~])) {_EVENTS}", "before"),
                Query(f"sum(rate(tieringd_archive_compacted_bytes_after_total@[~])) {_EVENTS}", "after"),
            ),
            graph(
                "Housekeeping", "short", Query("sum by (state) (tieringd_housekeeping_state@)", "{{state}}")
            ),
            graph(
                "Turns",
                "ops",
                Query("sum by (task) (rate(tieringd_housekeeping_turns_total@[~]))", "{{task}}"),
            ),
            graph("Turns that failed", "ops", "rate(tieringd_daemon_housekeeping_failures_total@[~])"),
            graph(
                "Since a pass over all partitions",
                "s",
                Query(
                    "time() - min by (task) (tieringd_housekeeping_last_success_timestamp_seconds@)",
                    "{{task}}",
                ),
            ),
            graph("Faults found", "short", Query("sum by (kind) (tieringd_scrub_faults@)", "{{kind}}")),
            graph("Orphans", "bytes", "tieringd_scrub_orphan_bytes@"),
            graph("Scrubbed", "Bps", "rate(tieringd_scrub_bytes_total@[~])"),
        ],
    ),
    Board(
        "reads",
        "tieringd: reads and gateway",
        [
            graph("Clients", "short", "tieringd_gateway_connections@"),
            graph("Clients refused", "ops", "rate(tieringd_gateway_refused_connections_total@[~])"),
            graph("Connections broken", "ops", "rate(tieringd_gateway_broken_connections_total@[~])"),
            graph("From clients", "Bps", "rate(tieringd_gateway_from_client_bytes_total@[~])"),
            graph("From the broker", "Bps", "rate(tieringd_gateway_from_broker_bytes_total@[~])"),
            graph(
                "Answers from the archive",
                "ops",
                Query("sum(rate(tieringd_gateway_archived_answers_total@[~]))", "all"),
                Query("sum(rate(tieringd_gateway_prepared_answers_total@[~]))", "ready when asked for"),
                Query("sum(rate(tieringd_gateway_delayed_answers_total@[~]))", "followed by a wait"),
            ),
            graph("Memory of connections", "bytes", "tieringd_gateway_buffered_bytes@"),
            graph(
                "Requests to the cache",
                "ops",
                Query(f"sum(rate(tieringd_cache_hits_total@[~])) {_EVENTS}", "answered"),
                Query(f"sum(rate(tieringd_cache_misses_total@[~])) {_EVENTS}", "waited for the store"),
            ),
            graph(
                "Downloaded",
                "Bps",
                Query(f"sum(rate(tieringd_cache_hydrated_bytes_total@[~])) {_EVENTS}", "into the cache"),
                Query("sum(rate(tieringd_cache_streamed_bytes_total@[~]))", "past the cache"),
            ),
            graph(
                "Cache",
                "bytes",
                Query("tieringd_cache_bytes@", "{{instance}} holds"),
                Query("tieringd_cache_limit_bytes@", "{{instance}} may hold"),
            ),
            graph("Evicted", "Bps", "rate(tieringd_cache_evicted_bytes_total@[~])"),
            graph("Downloads under way", "short", "tieringd_cache_hydrations_in_progress@"),
            graph("Open chunks", "short", "tieringd_cache_open_chunks@"),
            graph("Faults of the cache", "ops", "rate(tieringd_daemon_cache_faults_total@[~])"),
        ],
    ),
    Board(
        "store",
        "tieringd: object store",
        [
            graph(
                "Requests",
                "reqps",
                Query("sum by (operation) (rate(tieringd_store_requests_total@[~]))", "{{operation}}"),
            ),
            graph(
                "Outcomes",
                "reqps",
                Query("sum by (outcome) (rate(tieringd_store_requests_total@[~]))", "{{outcome}}"),
            ),
            graph(
                "Part that fails",
                "percentunit",
                "rate(tieringd_daemon_store_failures_total@[~]) "
                "/ clamp_min(rate(tieringd_daemon_store_requests_total@[~]), 1e-9)",
            ),
            *(
                graph(
                    f"Duration, {share}",
                    "s",
                    Query(
                        f"histogram_quantile({quantile}, "
                        "sum by (le, operation) (rate(tieringd_store_request_seconds_bucket@[~])))",
                        "{{operation}}",
                    ),
                )
                for share, quantile in (("half", 0.5), ("99 of 100", 0.99))
            ),
            graph(
                "Bytes",
                "Bps",
                Query("sum by (operation) (rate(tieringd_store_bytes_total@[~]))", "{{operation}}"),
            ),
            graph(
                "Requests in a day",
                "short",
                Query("sum by (operation) (increase(tieringd_store_requests_total@[1d]))", "{{operation}}"),
                meaning="Each attempt counts, as it does on the bill.",
            ),
            graph("This host's clock, ahead of the store's", "s", "tieringd_host_clock_error_seconds@"),
        ],
    ),
    Board(
        "disk",
        "tieringd: local disk",
        [
            graph("Free", "bytes", Query("tieringd_disk_free_bytes@", "{{instance}} {{directory}}")),
            graph(
                "State",
                "short",
                Query("tieringd_disk_free_space_alert@", "{{instance}} {{directory}}"),
                meaning="0 ok, 1 low, 2 degraded.",
            ),
            graph(
                "Free in four hours, at this pace",
                "bytes",
                Query("predict_linear(tieringd_disk_free_bytes@[1h], 14400)", "{{instance}} {{directory}}"),
            ),
            graph(
                "Logs",
                "bytes",
                Query("tieringd_space_log_bytes@", "{{instance}} {{log_dir}} holds"),
                Query("tieringd_space_log_area_bytes@", "{{instance}} {{log_dir}} is meant to hold"),
            ),
            graph(
                "Over the area, with nothing to reclaim",
                "bytes",
                Query("tieringd_space_short_bytes@", "{{instance}} {{log_dir}}"),
            ),
            graph(
                "Asked for by the space manager",
                "Bps",
                Query(f"sum(rate(tieringd_space_planned_bytes_total@[~])) {_EVENTS}", "all phases"),
            ),
            graph(
                "Cache",
                "bytes",
                Query("tieringd_space_cache_bytes@", "{{instance}} holds"),
                Query("tieringd_space_cache_area_bytes@", "{{instance}} may hold"),
            ),
            graph(
                "Pins",
                "bytes",
                Query("tieringd_pinned_bytes@", "{{instance}}"),
                Query("tieringd_stray_pin_bytes@", "{{instance}} stray"),
            ),
            graph("Pins that failed", "ops", "rate(tieringd_pin_failures_total@[~])"),
            graph(
                "Ballast",
                "bytes",
                Query("tieringd_ballast_bytes@", "{{instance}}"),
                Query("tieringd_ballast_wanted_bytes@", "{{instance}} wanted"),
            ),
            graph("Producers held back", "short", "tieringd_producers_held_back@"),
            graph("Degraded brokers", "short", "tieringd_degraded_brokers@"),
            graph("Unreadable paths", "short", "tieringd_unreadable_paths@"),
        ],
    ),
    Board(
        "topic",
        "tieringd: one topic",
        [
            graph("Waiting to be uploaded", "bytes", Query("tieringd_upload_pending_bytes#", _OF_TOPIC)),
            graph("Segments waiting", "short", Query("tieringd_upload_pending_segments#", _OF_TOPIC)),
            graph("Oldest wait", "s", Query("tieringd_upload_lag_seconds#", _OF_TOPIC)),
            graph(
                "Held by a transaction", "s", Query("tieringd_upload_held_by_transaction_seconds#", _OF_TOPIC)
            ),
            graph("Seconds to loss", "s", Query("clamp_max(tieringd_seconds_to_loss#, 31536000)", _OF_TOPIC)),
            graph("Offsets not archived yet", "short", Query("vectorized_ntp_archiver_pending#", _OF_TOPIC)),
            graph("First archived offset", "none", Query("tieringd_archive_start_offset#", _OF_TOPIC)),
            graph("Archived up to", "none", Query("tieringd_archive_next_offset#", _OF_TOPIC)),
            graph("Offsets lost", "short", Query("tieringd_archive_gap_offsets#", _OF_TOPIC)),
            graph(
                "Uploaded", "Bps", Query("sum by (topic) (rate(tieringd_upload_bytes_total#[~]))", _OF_TOPIC)
            ),
            graph(
                "Segments made durable",
                "ops",
                Query("sum by (topic) (rate(tieringd_uploads_total#[~]))", _OF_TOPIC),
            ),
            graph(
                "Manifests stored",
                "ops",
                Query("sum by (topic) (rate(tieringd_manifest_commits_total#[~]))", _OF_TOPIC),
            ),
        ],
        has_topic=True,
    ),
)


def rendered(board: Board) -> str:
    """Return the dashboard as the JSON that Grafana imports."""
    built = (
        dashboard.Dashboard(board.title)
        .uid(f"tieringd-{board.name}")
        .tags(["tieringd", "kafka"])
        .editable()
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .time("now-6h", "now")
        .refresh("1m")
        .timezone("browser")
        .link(
            dashboard.DashboardLink("tieringd")
            .as_dropdown(True)
            .tags(["tieringd"])
            .keep_time(True)
            .include_vars(True)
        )
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(
            _variable("instance", "Broker", "tieringd_ready")
            .multi(True)
            .include_all(True)
            .current(VariableOption(selected=True, text="All", value="$__all"))
        )
    )
    if board.has_topic:
        built = built.with_variable(_variable("topic", "Topic", "tieringd_archive_next_offset"))
    for panel in board.panels:
        built = built.with_panel(_number(panel) if panel.is_number else _graph(panel))
    return JSONEncoder(sort_keys=True, indent=2).encode(built.build()) + "\n"


def _variable(label: str, title: str, metric: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(label)
        .label(title)
        .datasource(_SOURCE)
        .query(f'label_values({metric}{{job="tieringd"}}, {label})')
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
    )


def _graph(panel: Panel) -> timeseries.Panel:
    legend = (
        common.VizLegendOptions()
        .show_legend(True)
        .display_mode(LegendDisplayMode.LIST)
        .placement(LegendPlacement.BOTTOM)
        .calcs([])
    )
    built = (
        timeseries.Panel()
        .legend(legend)
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
        .axis_soft_min(0)
        .fill_opacity(10)
        .span(_ROW_WIDTH // 3)
        .height(_PANEL_HEIGHT)
    )
    return _filled(built, panel)


def _number(panel: Panel) -> stat.Panel:
    return _filled(stat.Panel().span(_ROW_WIDTH // 6).height(_STAT_HEIGHT), panel)


def _filled(built: _Built, panel: Panel) -> _Built:
    built = built.title(panel.title).description(panel.meaning).unit(panel.unit).datasource(_SOURCE)
    for number_of, query in enumerate(panel.queries):
        built = built.with_target(
            prometheus.Dataquery()
            .expr(query.text)
            .legend_format(query.legend)
            .ref_id(chr(ord("A") + number_of))
            .range()
        )
    return built


def main() -> None:
    """Write every dashboard, and remove files of those that are gone."""
    DIRECTORY.mkdir(exist_ok=True)
    for path in DIRECTORY.glob("*.json"):
        path.unlink()
    for board in BOARDS:
        path = DIRECTORY / f"{board.name}.json"
        path.write_text(rendered(board), encoding="utf-8")
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
