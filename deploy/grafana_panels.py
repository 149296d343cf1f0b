"""The parts of the Grafana dashboards: queries, panels and boards, and how they become Grafana's JSON."""

from __future__ import annotations

from dataclasses import dataclass
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

_SOURCE: Final = DataSourceRef(type_val="prometheus", uid="${datasource}")
_ROW_WIDTH, _PANEL_HEIGHT, _STAT_HEIGHT = 24, 8, 4


@dataclass(frozen=True, slots=True)
class Query:
    """One line, or several with a label to tell them apart."""

    expression: str
    """
    `@`: the chosen instances; `,$}`: the same behind a label; `#`: these and the chosen topic, of the metrics
    of partitions; `[~]`: the interval of a rate.
    """
    legend: str = "{{instance}}"

    @property
    def text(self) -> str:
        """Return the query as Grafana has it."""
        chosen = 'job="tieringd",instance=~"$instance"'
        of_topic = 'job="tieringd-partitions",instance=~"$instance",topic="$topic"'
        text = (
            self.expression.replace(",$}", f",{chosen}}}")
            .replace("@", f"{{{chosen}}}")
            .replace("#", f"{{{of_topic}}}")
        )
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
    meaning: str = ""
    """What the dashboard needs; Grafana shows it in the dashboard's list and settings."""


def graph(title: str, unit: str, *queries: Query | str, meaning: str = "") -> Panel:
    """Return a graph; a query that is only text has a line for each instance."""
    return Panel(title, unit, [Query(one) if isinstance(one, str) else one for one in queries], meaning)


def number(title: str, unit: str, expression: str, meaning: str = "") -> Panel:
    """Return a single number."""
    return Panel(title, unit, [Query(expression, title)], meaning, is_number=True)


def rendered(board: Board) -> str:
    """Return the dashboard as the JSON that Grafana imports."""
    built = (
        dashboard.Dashboard(board.title)
        .uid(f"tieringd-{board.name}")
        .tags(["tieringd", "kafka"])
        .description(board.meaning)
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
            # Those that do not answer, too.
            _variable("instance", "Broker", "up")
            .multi(True)
            .include_all(True)
            .current(VariableOption(selected=True, text="All", value="$__all"))
        )
    )
    if board.has_topic:
        built = built.with_variable(
            _variable("topic", "Topic", "tieringd_archive_next_offset", job="tieringd-partitions")
        )
    for panel in board.panels:
        built = built.with_panel(_number(panel) if panel.is_number else _graph(panel))
    return JSONEncoder(sort_keys=True, indent=2).encode(built.build()) + "\n"


def _variable(label: str, title: str, metric: str, *, job: str = "tieringd") -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(label)
        .label(title)
        .datasource(_SOURCE)
        .query(f'label_values({metric}{{job="{job}"}}, {label})')
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
