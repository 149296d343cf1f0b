"""
The status page: an `Overview` as one HTML document, without scripts and without anything from elsewhere.

The browser loads it again every ten seconds. Colours follow the reader's setting for light or dark.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from typing import Final

from tieringd.daemon.overview import MOST_PARTITIONS, Overview, PartitionLine
from tieringd.daemon.recent_errors import WINDOW_SECONDS
from tieringd.model.human_units import duration, size

CONTENT_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"
_REFRESH_SECONDS: Final = 10
_STYLE: Final = """
:root{color-scheme:light dark;--line:#8884;--bad:#c62828;--warn:#b26a00;--good:#2e7d32}
:root{--remote:#3f7fbf;--local:#6aa84f}
@media(prefers-color-scheme:dark){:root{--bad:#ff8a80;--warn:#ffcc80;--good:#a5d6a7}}
body{font:14px/1.45 system-ui,sans-serif;margin:0 auto;max-width:72rem;padding:1rem}
h1{font-size:1.3rem;margin:0}h2{font-size:1.05rem;margin:1.6rem 0 .4rem}
header{display:flex;flex-wrap:wrap;gap:.3rem 1.2rem;align-items:baseline}
.state{font-weight:700;padding:.1rem .6rem;border:2px solid;border-radius:.4rem}
.good{color:var(--good)}.bad{color:var(--bad)}.warn{color:var(--warn)}.faint{opacity:.7}
dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(10rem,1fr));gap:.4rem 1rem;margin:1rem 0}
dt{opacity:.7}dd{margin:0;font-size:1.15rem;font-weight:600}
table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:.25rem .6rem .25rem 0;border-bottom:1px solid var(--line);vertical-align:top}
th{font-weight:600;opacity:.7}td{overflow-wrap:anywhere;min-width:3.5rem}
td:last-child{min-width:12rem}.scroll{overflow-x:auto}.whole{white-space:nowrap}
.place{display:block;min-width:8rem}
code{font:12px ui-monospace,monospace;overflow-wrap:anywhere}
svg{display:block;width:14rem;height:22px}
@media(max-width:48rem){
#partitions thead,#errors thead{display:none}
#partitions td,#errors td{display:inline-block;border:0;min-width:0;padding:.1rem .8rem .1rem 0}
#partitions tr,#errors tr{display:block;border-bottom:1px solid var(--line);padding:.4rem 0}
#partitions td:nth-child(1),#partitions td:nth-child(n+5),#errors td{display:block}
#partitions td:nth-child(1){font-weight:600}
#partitions td:nth-child(2)::before{content:"lag "}
#partitions td:nth-child(3)::after{content:" waiting"}
#partitions td:nth-child(4)::before{content:"loss "}
svg{width:100%}}
.remote{fill:var(--remote)}.local{fill:var(--local)}.track{fill:var(--line)}
""".replace("\n", "")


def page(overview: Overview) -> str:
    """Return the document."""
    return "".join(_document(overview))


def _document(seen: Overview) -> Iterator[str]:
    state = (
        ("Not ready", "bad")
        if seen.reasons
        else ("Needs a person", "warn")
        if seen.tasks
        else ("Well", "good")
    )
    yield (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="refresh" content="{_REFRESH_SECONDS}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>tieringd: {state[0]}</title><style>{_STYLE}</style></head><body>"
        f'<header><h1>tieringd</h1><span id="state" class="state {state[1]}">{state[0]}</span>'
        f"<span>version {escape(seen.version)}</span><span>up {duration(seen.uptime_seconds)}</span>"
        f"<span>broker {escape(seen.broker)}</span><span>cluster {escape(seen.cluster) or 'unknown'}</span>"
        f"<span>store {escape(seen.store)}</span></header>"
    )
    for name, why in seen.reasons.items():
        yield f'<p class="bad"><b>{escape(name)}</b>: {escape(why)}</p>'
    yield _figures(seen)
    yield "<h2>What needs a person</h2>"
    yield _table(
        "tasks",
        ("what", "first command"),
        ((escape(one.what), f"<code>{escape(one.command)}</code>") for one in seen.tasks),
        nothing="Nothing.",
    )
    shown = min(len(seen.partitions), MOST_PARTITIONS)
    yield f"<h2>Partitions: the worst {shown} of {seen.led_partitions}</h2>"
    yield _table(
        "partitions",
        ("partition", "lag", "waiting", "to loss", "archive above, local log below", "because"),
        (_partition(one) for one in seen.partitions),
        nothing="None is archived yet.",
    )
    yield "<h2>Disks</h2>"
    yield _table(
        "disks",
        ("directories", "free", "state", "logs, of their area", "phase in force"),
        (
            (
                escape(one.directories),
                f"{size(one.free_bytes)} of {size(one.total_bytes)}",
                f'<span class="{"good" if one.state == "ok" else "bad"}">{escape(one.state)}</span>',
                "" if one.log_bytes is None else f"{size(one.log_bytes)} of {size(one.log_area_bytes or 0)}",
                escape(one.phase) or '<span class="faint">none: the logs are within their area</span>',
            )
            for one in seen.disks
        ),
        nothing="Not measured yet.",
    )
    yield f'<p class="faint">Chunk cache: {size(seen.cache_bytes)} of {size(seen.cache_limit_bytes)}.</p>'
    if seen.workers:
        yield "<h2>Workers of the gateway</h2>"
        yield _table(
            "workers",
            ("worker", "state", "connections", "since", "restarts", "last end"),
            (
                (
                    str(one.number),
                    '<span class="good">serves</span>'
                    if one.is_serving
                    else '<span class="bad">does not serve</span>',
                    str(one.connections),
                    duration(one.seconds),
                    str(one.restarts),
                    escape(one.last_end),
                )
                for one in seen.workers
            ),
            nothing="None.",
        )
    yield "<h2>Uploads in flight</h2>"
    yield _table(
        "uploads",
        ("object", "age", "attempts"),
        (
            (f"<code>{escape(one.key)}</code>", duration(one.seconds), str(one.attempts))
            for one in seen.uploads[:20]
        ),
        nothing="None.",
    )
    yield f"<h2>Warnings and errors of the last {WINDOW_SECONDS // 60} minutes</h2>"
    yield _table(
        "errors",
        ("what", "where", "how often", "what to do"),
        (
            (
                f'<span class="{"bad" if one.level == "error" else "warn"}">{escape(one.event)}</span>'
                + (f'<br><span class="faint">{escape(one.example)}</span>' if one.example else ""),
                f'<span class="place">{escape(one.where)}</span>',
                f"{times(one.times)}<br><span class='faint'>last {duration(one.seconds_ago)} ago</span>",
                escape(one.remedy),
            )
            for one in seen.errors
        ),
        nothing="None.",
    )
    yield (
        '<p class="faint">This page changes nothing. Details: /status (every partition, JSON), '
        "/status/overview (this page, JSON), /metrics, /metrics/partitions, /readyz.</p></body></html>"
    )


def at_least(text: str, seen: Overview) -> str:
    """Return *text* of what waits, marked as a part of it where not all is known."""
    return f"at least {text}" if seen.unknown_loss_partitions else text


def until_loss(seen: Overview) -> str:
    """Return the time until data is lost, with the number of partitions of which it is not known."""
    loss = "not near" if seen.seconds_to_loss is None else duration(seen.seconds_to_loss)
    if seen.unknown_loss_partitions:
        return f"unknown for {seen.unknown_loss_partitions} partitions, for the others {loss}"
    return loss


def _figures(seen: Overview) -> str:
    found = (
        ("partitions led", str(seen.led_partitions)),
        ("followed", str(seen.followed_partitions)),
        ("in error", str(sum(seen.faults.values()))),
        ("waiting to be uploaded", at_least(size(seen.pending_bytes), seen)),
        ("segments that wait", str(seen.pending_segments)),
        ("oldest wait", duration(seen.lag_seconds)),
        ("until loss", until_loss(seen)),
        ("in the archive", size(seen.archived_bytes)),
        ("on local disks", size(seen.local_bytes)),
    )
    shown = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in found)
    return f'<dl id="figures">{shown}</dl>'


def _partition(line: PartitionLine) -> tuple[str, ...]:
    fault = f'<span class="bad">{escape(line.fault)}</span>: ' if line.fault else ""
    loss = (
        '<span class="whole faint">not near</span>'
        if line.seconds_to_loss is None
        else duration(line.seconds_to_loss)
    )
    return (
        f"{escape(line.topic)}-{line.partition}",
        f'<span class="whole">{duration(line.lag_seconds)}</span>',
        f'<span class="whole">{size(line.pending_bytes)}</span>',
        loss,
        _ranges(line),
        fault + escape(line.because) if fault else f'<span class="faint">{escape(line.because)}</span>',
    )


def _ranges(line: PartitionLine) -> str:
    """Return both ranges of offsets, drawn to one scale, with their numbers as a title."""
    (archive_from, archive_to), (local_from, local_to) = line.remote, line.local
    text = f"archive {archive_from} to {archive_to}, local log {local_from} to {local_to}"
    bars = "".join(
        f'<rect class="{kind}" x="{100 * left:.2f}%" y="{top}" '
        f'width="{max(0.5, 100 * width):.2f}%" height="8"/>'
        for kind, top, (left, width) in zip(("remote", "local"), (1, 12), scaled(line), strict=True)
    )
    track = '<rect class="track" x="0" width="100%" y="10" height="1"/>'
    return f'<svg role="img" aria-label="{text}"><title>{text}</title>{track}{bars}</svg>'


def scaled(line: PartitionLine) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return where the archive and the local log begin, and their lengths, as parts of both together."""
    first = min(line.remote[0], line.local[0])
    whole = max(1, max(line.remote[1], line.local[1]) - first)
    (archive, local) = (
        ((start - first) / whole, max(0, end - start) / whole) for start, end in (line.remote, line.local)
    )
    return archive, local


def _table(name: str, heads: Iterable[str], rows: Iterable[Iterable[str]], *, nothing: str) -> str:
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    if not body:
        return f'<p id="{name}" class="faint">{nothing}</p>'
    head = "".join(f"<th>{one}</th>" for one in heads)
    table = f'<table id="{name}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="scroll">{table}</div>'


def times(count: int) -> str:
    """Return how often an event came."""
    return "once" if count == 1 else f"again, {count} times in {WINDOW_SECONDS // 60} min"
