"""The report of a rehearsal over HTTP: one page of HTML with its charts inside, which loads nothing and runs
nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Final

from grabstream.ops.verification.checks import VerificationCheck
from grabstream.workshop.rehearsal.over_http.charts import Time, bars, legend, lines
from grabstream.workshop.rehearsal.over_http.measured import PERCENTILES
from grabstream.workshop.rehearsal.phases import RUSH

PROBLEMS_SHOWN_MAX: Final = 20
#: `granted` always has the first colour, also where others are more.
_FIRST: Final = "granted"

_STYLE: Final = """
:root { color-scheme: light dark; --back: #fff; --text: #1c2024; --soft: #5a6570; --edge: #d9dee3;
  --card: #f6f8fa; --good: #0b7a46; --bad: #b3261e; --plan: #1c2024;
  --c0: #2563b8; --c1: #d9822b; --c2: #7a8793; --c3: #8e4ec6; --c4: #0e9384; --c5: #c2345b; --c6: #9a8400;
  --c7: #4f6d4a; }
@media (prefers-color-scheme: dark) { :root { --back: #14181c; --text: #e8ecef; --soft: #a3adb7;
  --edge: #343b42; --card: #1c2126; --good: #5fd39a; --bad: #ff8a80; --plan: #e8ecef;
  --c0: #6ba6f5; --c1: #f0a45a; --c2: #97a3ae; --c3: #c08cf0; --c4: #45c7b6; --c5: #f07a9c;
  --c6: #d3bf4d; --c7: #9cbf95; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 24px 16px 48px; max-width: 880px; background: var(--back); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 36px 0 4px; }
p { margin: 4px 0 12px; } .soft { color: var(--soft); }
.verdict { font-weight: 600; } .good { color: var(--good); } .bad { color: var(--bad); }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 8px;
  margin: 20px 0; }
.facts div { background: var(--card); border: 1px solid var(--edge); border-radius: 6px; padding: 8px 12px; }
.facts dt { color: var(--soft); font-size: .85rem; } .facts dd { margin: 0; font-size: 1.25rem; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; list-style: none; margin: 4px 0; padding: 0;
  font-size: .9rem; }
.swatch { display: inline-block; width: 12px; height: 12px; border-radius: 2px; margin-right: 6px; }
svg { display: block; width: 100%; height: auto; } .tick { fill: var(--soft); font-size: 12px; }
.grid { stroke: var(--edge); stroke-width: 1; } .line { fill: none !important; stroke-width: 1.8; }
.plan { fill: none; stroke: var(--plan); stroke-width: 1.5; stroke-dasharray: 5 4; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .95rem; }
th, td { text-align: left; padding: 5px 12px 5px 0; border-bottom: 1px solid var(--edge);
  vertical-align: top; }
th { color: var(--soft); font-weight: 500; } .number { text-align: right;
  font-variant-numeric: tabular-nums; }
td ul { margin: 4px 0; padding-left: 18px; overflow-wrap: anywhere; }
"""
_COLOURS: Final = "".join(
    f".c{number} {{ fill: var(--c{number}); stroke: none; background: var(--c{number}); }}"
    f".line.c{number} {{ stroke: var(--c{number}); }}"
    for number in range(8)
)
#: Nothing is loaded, and nothing runs, whatever a title may say.
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"


def report_of(result: Mapping[str, Any], seed: int) -> str:
    """The page of a result of `rehearse --door http`."""
    http, checks = result["http"], result["checks"]
    timeline = http["timeline"]
    time = Time(timeline["slice_seconds"], len(timeline["arrivals_per_second"]))
    answers = _ordered(timeline["answers_per_second"])
    latencies: dict[str, list[float | None]] = {
        f"p{percent}": [values.get(f"p{percent}") for values in timeline["latency_ms"]]
        for percent in PERCENTILES
    }
    title = escape(http["shape"])
    body = [
        f"<h1>{title}</h1>",
        f'<p class="soft">A rehearsal over HTTP, seed {seed}</p>',
        _verdict_line(checks),
        _facts(result),
        "<h2>Arrivals</h2>",
        '<p class="soft">Users a second; the dashed line is the shape.</p>',
        bars(
            time, {"arrivals": timeline["arrivals_per_second"]}, "Users who arrive, a second",
            [(point["at_seconds"], point["per_second"]) for point in http["arrivals"]],
        ),
        "<h2>Answers</h2>",
        '<p class="soft">Answers a second, by outcome. A bot gets many, a double click one for each.</p>',
        legend(list(answers)),
        bars(time, answers, "Answers a second, by outcome"),
        "<h2>Latency</h2>",
        '<p class="soft">Milliseconds from when a request was due to its answer, with all repeats; without '
        "slow clients. The scale is logarithmic.</p>",
        legend(list(latencies)),
        lines(time, latencies, "Latency in milliseconds: the median, and the slowest tenth and hundredth"),
        "<h2>Replies by status</h2>",
        '<p class="soft">Of each attempt. After 408, 429, 5xx and no answer, the same request is sent again.'
        "</p>",
        _table(
            ("status", "replies"), ((escape(name), f"{count:,}") for name, count in http["attempts"].items())
        ),
        "<h2>Users</h2>",
        _table(("kind", "users"), ((escape(name), f"{count:,}") for name, count in http["kinds"].items())),
        "<h2>Checks</h2>",
        _checks(checks),
    ]  # fmt: skip
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}: rehearsal</title><style>{_STYLE}{_COLOURS}</style></head>\n"
        f"<body><main>\n{chr(10).join(body)}\n</main></body></html>\n"
    )


def _ordered(answers: Mapping[str, Sequence[float]]) -> dict[str, Sequence[float]]:
    return dict(sorted(answers.items(), key=lambda one: one[0] != _FIRST))


def _verdict_line(checks: Sequence[VerificationCheck]) -> str:
    failed = sum(not check.passed for check in checks)
    if failed:
        return f'<p class="verdict bad">✗ {failed} of {len(checks)} checks failed: it does not add up.</p>'
    return f'<p class="verdict good">✓ All {len(checks)} checks passed: it all adds up.</p>'


def _facts(result: Mapping[str, Any]) -> str:
    http = result["http"]
    rush = result["phases"][RUSH]
    latency = rush["latency_ms"].get("http", {})
    facts = {
        "users": f"{http['visitors']:,}",
        "answers": f"{result['attempts']:,}",
        "most arrivals a second": f"{max(http['timeline']['arrivals_per_second']):,.0f}",
        "most answers a second": "–" if rush["best_second"] is None else f"{rush['best_second']:,}",
        "latency, p50": _milliseconds(latency.get("p50")),
        "latency, p99": _milliseconds(latency.get("p99")),
        "delay of the crowd itself": f"{http['own_delay_ms_max']:,.0f} ms",
        "all answered after": f"{result['seconds']:.1f} s",
        "all in the books after": f"{result['seconds_to_books']:.1f} s",
    }
    return (
        f'<dl class="facts">{"".join(f"<div><dt>{k}</dt><dd>{v}</dd></div>" for k, v in facts.items())}</dl>'
    )


def _milliseconds(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f} ms"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; all columns but the first have numbers."""

    def cells(tag: str, row: Sequence[str]) -> str:
        shown = (f"<{tag}{' class=number' if place else ''}>{cell}</{tag}>" for place, cell in enumerate(row))
        return f"<tr>{''.join(shown)}</tr>"

    body = "".join(cells("td", row) for row in rows)
    return (
        f'<div class="wide"><table><thead>{cells("th", columns)}</thead><tbody>{body}</tbody></table></div>'
    )


def _checks(checks: Sequence[VerificationCheck]) -> str:
    rows = []
    for check in checks:
        mark = "✓" if check.passed else "✗"
        shown = check.problems[:PROBLEMS_SHOWN_MAX]
        if more := len(check.problems) - len(shown):
            shown = [*shown, f"and {more:,} more"]
        lines_ = "".join(f"<li>{escape(line)}</li>" for line in (*shown, *check.notes))
        name = f'<span class="{"good" if check.passed else "bad"}">{mark}</span> {escape(check.name)}'
        rows.append(
            (f"{name}<ul>{lines_}</ul>" if lines_ else name, f"{check.checked:,} {escape(check.of_what)}")
        )
    return _table(("check", "checked"), rows)
