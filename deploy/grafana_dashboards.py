"""
The Grafana dashboards: the one definition of `deploy/grafana/*.json`.

`python -m deploy.grafana_dashboards` writes them. `tieringd generate grafana-dashboard` prints what was
written, so that neither the daemon nor its command line needs the builder library.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from deploy.grafana_panels import Board, Query, graph, number, rendered

DIRECTORY: Final = Path(__file__).parent / "grafana"
_OF_TOPIC: Final = "{{topic}} {{partition}}"
_EVENTS: Final = "or vector(0)"
"""Behind a sum of counters that have no series before their first event: nothing is then 0, and not empty."""


def _heaviest(labels: str, expression: str) -> str:
    """Return the query for the ten largest sums of *expression* by *labels*."""
    return f"topk(10, sum by ({labels}) ({expression}))"


BOARDS: Final = (
    Board(
        "overview",
        "tieringd: overview",
        [
            # A daemon that does not answer has no metrics of its own.
            number(
                "Ready",
                "bool_yes_no",
                "min(tieringd_ready@ or up@)",
                "No: Readiness, below, has the reason.",
            ),
            number("Partitions led", "short", "sum(tieringd_led_partitions@)"),
            number(
                "Partitions in error",
                "short",
                "sum(tieringd_partitions_in_fault@)",
                "Partitions in error, below, has the kinds of faults.",
            ),
            number("Topics paused", "short", "sum(tieringd_paused_topics@)"),
            number("Oldest wait", "s", "max(tieringd_daemon_upload_lag_seconds@)"),
            number(
                "Losses",
                "short",
                "sum(tieringd_daemon_archive_gaps_total@) + sum(tieringd_pins_given_up_total@)",
                "Gaps recorded, and pins given up, since the daemons' starts.",
            ),
            graph(
                "Readiness",
                "short",
                Query("min by (reason) (tieringd_ready@)", "{{reason}}"),
                Query("min(up@)", "answers"),
                meaning="0 while it keeps a daemon from being ready.",
            ),
            graph("Waiting to be uploaded", "bytes", "tieringd_daemon_upload_pending_bytes@"),
            graph(
                "Segments waiting",
                "short",
                "tieringd_daemon_upload_pending_segments@",
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
                "Partitions in error",
                "short",
                Query("sum by (fault) (tieringd_partitions_in_fault@)", "{{fault}}"),
            ),
            graph(
                "Archived, the ten largest topics",
                "bytes",
                Query("topk(10, sum by (topic) (tieringd_topic_archive_bytes@))", "{{topic}}"),
            ),
            graph(
                "Archived and local",
                "bytes",
                Query("sum(tieringd_daemon_archive_bytes@)", "in the archive"),
                Query("sum(tieringd_daemon_local_log_bytes@)", "on local disks"),
                meaning="Of partitions that a daemon leads.",
            ),
            graph("Uploaded", "Bps", "rate(tieringd_daemon_upload_bytes_total@[~])"),
            graph(
                "Steps that are tried again",
                "ops",
                "rate(tieringd_daemon_upload_failures_total@[~])",
            ),
            graph("Failed store requests", "reqps", "rate(tieringd_daemon_store_failures_total@[~])"),
            graph(
                "Age of the last good round",
                "s",
                # 0 before the first one, and in an archive-only endpoint.
                "time() - (tieringd_reconcile_last_success_timestamp_seconds@ > 0)",
            ),
            graph("Memory", "bytes", "process_resident_memory_bytes@"),
            graph("Processor", "percentunit", "rate(process_cpu_seconds_total@[~])"),
            graph("Descriptors", "short", "process_open_fds@"),
            graph(
                "Lag of the event loop, 99 of 100",
                "s",
                Query(
                    "histogram_quantile(0.99, "
                    "sum by (le, instance) (rate(tieringd_event_loop_lag_seconds_bucket@[~])))"
                ),
            ),
            graph(
                "Configurations",
                "short",
                Query("count by (hash) (tieringd_config_info@)", "{{hash}}"),
                meaning="Brokers that are configured alike have the same hash.",
            ),
            graph(
                "Versions",
                "short",
                Query("count by (version) (tieringd_build_info@)", "{{version}}"),
            ),
        ],
    ),
    Board(
        "uploads",
        "tieringd: uploads",
        [
            graph("Uploaded", "Bps", "sum by (instance) (rate(tieringd_daemon_upload_bytes_total@[~]))"),
            graph(
                "Segments made durable", "ops", "sum by (instance) (rate(tieringd_daemon_uploads_total@[~]))"
            ),
            graph(
                "Manifests stored",
                "ops",
                "sum by (instance) (rate(tieringd_daemon_manifest_commits_total@[~]))",
            ),
            graph("Steps that failed", "ops", "rate(tieringd_daemon_upload_failures_total@[~])"),
            graph("Oldest upload in flight", "s", "tieringd_oldest_upload_in_flight_seconds@"),
            *(
                graph(
                    f"From closed to durable, {share}",
                    "s",
                    Query(
                        f"histogram_quantile({quantile}, "
                        "sum by (le) (rate(tieringd_upload_durable_seconds_bucket@[~])))",
                        "all",
                    ),
                )
                for share, quantile in (("half", 0.5), ("99 of 100", 0.99))
            ),
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
        ],
    ),
    Board(
        "deletes",
        "tieringd: deletes",
        [
            graph("Trimmed from local logs", "Bps", "rate(tieringd_daemon_trimmed_bytes_total@[~])"),
            graph("Segments trimmed", "ops", "rate(tieringd_daemon_trimmed_segments_total@[~])"),
            graph("Trims refused", "ops", "rate(tieringd_daemon_trims_denied_total@[~])"),
            graph("Past total retention", "Bps", "rate(tieringd_daemon_archive_expired_bytes_total@[~])"),
            graph(
                "Segments past retention", "ops", "rate(tieringd_daemon_archive_expired_segments_total@[~])"
            ),
            graph(
                "Segments whose objects were deleted",
                "ops",
                "rate(tieringd_daemon_archive_deleted_segments_total@[~])",
                meaning="It follows the segments past retention after archive_delete_delay_ms.",
            ),
            graph("Topics purged", "ops", "rate(tieringd_archive_purged_topics_total@[~])"),
            graph("Objects purged", "ops", "rate(tieringd_archive_purged_objects_total@[~])"),
            graph(
                "Orphans",
                "ops",
                Query("sum(rate(tieringd_scrub_quarantined_objects_total@[~]))", "put into quarantine"),
                Query("sum(rate(tieringd_scrub_deleted_objects_total@[~]))", "deleted"),
            ),
            graph(
                "Losses",
                "short",
                Query("sum(tieringd_daemon_archive_gap_offsets@)", "offsets in gaps"),
                Query("sum(tieringd_pins_given_up_total@)", "pins given up"),
            ),
        ],
    ),
    Board(
        "archive",
        "tieringd: archive and scrub",
        [
            graph("Topics", "short", Query("max by (lifecycle) (tieringd_archive_topics@)", "{{lifecycle}}")),
            graph("Segments", "short", "tieringd_daemon_archive_segments@"),
            graph(
                "Merged",
                "Bps",
                Query(f"sum(rate(tieringd_daemon_archive_merged_bytes_total@[~])) {_EVENTS}", "all topics"),
            ),
            graph(
                "Compacted",
                "Bps",
                Query(
                    f"sum(rate(tieringd_daemon_archive_compacted_bytes_before_total@[~])) {_EVENTS}", "before"
                ),
                Query(
                    f"sum(rate(tieringd_daemon_archive_compacted_bytes_after_total@[~])) {_EVENTS}", "after"
                ),
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
        "gateway",
        "tieringd: gateway by principal",
        [
            graph("Clients", "short", "tieringd_gateway_connections@"),
            graph(
                "Clients refused",
                "ops",
                Query("sum by (reason) (rate(tieringd_gateway_refused_connections_total@[~]))", "{{reason}}"),
                Query("sum(rate(tieringd_gateway_unanswered_hosts_total@[~]))", "hosts not answered"),
            ),
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
            *(
                graph(
                    f"Answer of the archive, {share}",
                    "s",
                    Query(
                        f"histogram_quantile({quantile}, "
                        "sum by (le) (rate(tieringd_gateway_archived_answer_seconds_bucket@[~])))",
                        "all",
                    ),
                )
                for share, quantile in (("half", 0.5), ("99 of 100", 0.99))
            ),
            graph(
                "Fetched, the ten heaviest principals",
                "Bps",
                Query(
                    _heaviest("principal", "rate(tieringd_gateway_reader_bytes_total@[~])"), "{{principal}}"
                ),
                meaning="The 20 heaviest readers have series of their own; (other) is the rest together.",
            ),
            graph(
                "Fetched from the archive, by principal",
                "Bps",
                Query(
                    _heaviest(
                        "principal", 'rate(tieringd_gateway_reader_bytes_total{source!="broker",$}[~])'
                    ),
                    "{{principal}}",
                ),
                meaning="From the cache and from the store; the rest of what they fetch is the broker's.",
            ),
            graph(
                "Fetches by principal and source",
                "ops",
                Query(
                    _heaviest("principal, source", "rate(tieringd_gateway_reader_fetches_total@[~])"),
                    "{{principal}} from {{source}}",
                ),
            ),
            graph(
                "Fetched, the ten heaviest clients",
                "Bps",
                Query(
                    _heaviest("principal, client_id", "rate(tieringd_gateway_reader_bytes_total@[~])"),
                    "{{principal}} {{client_id}}",
                ),
            ),
            graph(
                "Told to wait, by principal",
                "percentunit",
                Query(
                    _heaviest("principal", "rate(tieringd_gateway_reader_throttled_seconds_total@[~])"),
                    "{{principal}}",
                ),
                meaning="The part of the time for which a limit makes the principal's clients wait. It is "
                "above 100% where several of them wait.",
            ),
            graph(
                "Money a day, by principal",
                "currencyUSD",
                Query(
                    _heaviest("principal", "increase(tieringd_gateway_reader_store_cost_dollars_total@[1d])")
                    + f" {_EVENTS}",
                    "{{principal}}",
                ),
                meaning="Requests to the store that the principal's reads have caused, by list prices.",
            ),
            graph(
                "Fetched, by source",
                "Bps",
                Query("sum by (source) (rate(tieringd_gateway_fetch_bytes_total@[~]))", "{{source}}"),
            ),
            graph(
                "Time of a Fetch, 99 of 100, by source",
                "s",
                Query(
                    "histogram_quantile(0.99, "
                    "sum by (le, source) (rate(tieringd_gateway_fetch_seconds_bucket@[~])))",
                    "{{source}}",
                ),
                meaning="Times of the broker include the wait for new records.",
            ),
        ],
    ),
    Board(
        "reads",
        "tieringd: reads and cache",
        [
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
                Query("sum(rate(tieringd_cache_in_place_bytes_total@[~]))", "read in place"),
            ),
            graph(
                "Cache",
                "bytes",
                Query("tieringd_cache_bytes@", "{{instance}} holds"),
                Query("tieringd_cache_limit_bytes@", "{{instance}} may hold"),
            ),
            *(
                graph(
                    f"Hydration, {share}",
                    "s",
                    Query(
                        f"histogram_quantile({quantile}, "
                        "sum by (le, kind) (rate(tieringd_cache_hydration_seconds_bucket@[~])))",
                        "{{kind}}",
                    ),
                )
                for share, quantile in (("half", 0.5), ("99 of 100", 0.99))
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
            graph(
                "Slowdowns",
                "reqps",
                Query(
                    f'sum(rate(tieringd_store_requests_total{{outcome="throttled",$}}[~])) {_EVENTS}',
                    "asked for by the store",
                ),
            ),
            graph(
                "Connections in use",
                "percentunit",
                "tieringd_store_requests_in_flight@ / tieringd_store_connections_limit@",
            ),
            graph(
                "Money a day",
                "currencyUSD",
                Query(
                    f"sum by (kind) (increase(tieringd_store_request_cost_dollars_total@[1d])) {_EVENTS}",
                    "requests, {{kind}}",
                ),
                Query(f"sum(tieringd_store_storage_cost_dollars_per_day@) {_EVENTS}", "storage"),
                meaning="By list prices, where the store has some; transfer is not included.",
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
                Query(
                    f"sum by (phase) (rate(tieringd_space_planned_bytes_total@[~])) {_EVENTS}", "{{phase}}"
                ),
                meaning="By phase. Phases after the second: the disks are too small for the local targets.",
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
            graph(
                "Pins can be made",
                "bool_yes_no",
                Query(
                    "tieringd_pins_available@ or on (instance) 0 * tieringd_led_partitions@",
                    "{{instance}} {{log_dir}}",
                ),
                meaning="No as well where a daemon makes none.",
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
            graph("Archived", "bytes", Query("tieringd_archive_bytes#", _OF_TOPIC)),
            graph("Archived segments", "short", Query("tieringd_archive_segments#", _OF_TOPIC)),
            graph("On the local disk", "bytes", Query("tieringd_local_log_bytes#", _OF_TOPIC)),
            graph("First local offset", "none", Query("tieringd_local_log_start_offset#", _OF_TOPIC)),
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
            graph(
                "Archived records sent to readers",
                "Bps",
                Query(
                    "sum by (topic, source) (rate(tieringd_gateway_topic_archived_bytes_total#[~]))",
                    "{{topic}} from {{source}}",
                ),
            ),
        ],
        has_topic=True,
        meaning="This dashboard needs the metrics of partitions: the job tieringd-partitions, which "
        "`tieringd generate scrape-config --partitions` prints.",
    ),
)


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
