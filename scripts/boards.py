"""Generates the Grafana boards in deploy/grafana/; `--check` compares them, `--write` writes them."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path("deploy/grafana")
#: Rates are taken over this range of Grafana, which suits the step of the board and the scrape interval.
RANGE = "$__rate_interval"
DATASOURCE = {"type": "prometheus", "uid": "$datasource"}


class Panel(NamedTuple):
    """A panel: its title, the unit of Grafana, and its queries with the legends of their series."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"


def rate(name: str, by: str = "", where: str = "") -> str:
    """The rate of a counter, added up by labels."""
    return f"sum {f'by ({by}) ' if by else ''}(rate({name}{where}[{RANGE}]))"


def quantiles(name: str, by: str = "", where: str = "") -> tuple[tuple[str, str], ...]:
    """Median and 99 % of a histogram, by a label."""
    labels = f"le, {by}" if by else "le"
    return tuple(
        (
            f"histogram_quantile({share}, sum by ({labels}) (rate({name}_bucket{where}[{RANGE}])))",
            f"{words}{f' {{{{{by}}}}}' if by else ''}",
        )
        for share, words in ((0.5, "median"), (0.99, "99 %"))
    )


def share(hits: str, misses: str, where: str = "") -> str:
    """The share of hits."""
    found, missed = rate(hits, "", where), rate(misses, "", where)
    return f"{found} / ({found} + {missed})"


def query(name: str, legend: str = "") -> tuple[tuple[str, str], ...]:
    """One query."""
    return ((name, legend),)


def redis_panels(which: str) -> tuple[Panel, ...]:
    """The panels of one of both Redis, by the names of redis_exporter."""
    of = f'{{redis="{which}"}}'
    panels = [
        Panel("Servers up", "short", query(f"sum(redis_up{of})", "up"), "stat"),
        Panel(
            "Memory", "bytes",
            (
                (f"redis_memory_used_bytes{of}", "used {{instance}}"),
                (f"redis_memory_max_bytes{of}", "maxmemory {{instance}}"),
            ),
        ),
        Panel("Evicted keys", "ops", query(rate("redis_evicted_keys_total", "instance", of), "{{instance}}")),
        Panel("Commands", "ops", query(rate("redis_commands_total", "cmd", of), "{{cmd}}")),
        Panel(
            "Time of commands, of each second", "percentunit",
            query(rate("redis_commands_duration_seconds_total", "cmd", of), "{{cmd}}"),
        ),
        Panel("Clients", "short", query(f"redis_connected_clients{of}", "{{instance}}")),
        Panel(
            "Processor", "percentunit",
            query(
                f"rate(redis_cpu_user_seconds_total{of}[{RANGE}]) + "
                f"rate(redis_cpu_sys_seconds_total{of}[{RANGE}])", "{{instance}}",
            ),
        ),
        Panel("Slow calls in SLOWLOG", "short", query(f"redis_slowlog_length{of}", "{{instance}}")),
    ]  # fmt: skip
    if which == "core":
        panels += [
            Panel("Append-only file", "bytes", query(f"redis_aof_current_size_bytes{of}", "{{instance}}")),
            Panel(
                "Last write of the append-only file", "short",
                query(f"redis_aof_last_write_status{of}", "1: written {{instance}}"),
            ),
            Panel("Replicas", "short", query(f"redis_connected_slaves{of}", "{{instance}}")),
            Panel(
                "Failed calls", "ops", query(rate("redis_commands_failed_calls_total", "cmd", of), "{{cmd}}")
            ),
        ]  # fmt: skip
    else:
        panels += [
            Panel(
                "Hits", "percentunit",
                query(share("redis_keyspace_hits_total", "redis_keyspace_misses_total", of), "hits"),
            ),
            Panel("Rejected connections", "ops", query(rate("redis_rejected_connections_total", "", of))),
        ]  # fmt: skip
    return tuple(panels)


BOARDS: dict[str, tuple[str, tuple[Panel, ...]]] = {
    "system": (
        "grabstream: the system",
        (
            Panel("Processes ready", "short", query("sum(grabstream_ready)", "ready"), "stat"),
            Panel(
                "Shards relayed, of all",
                "percentunit",
                query(
                    "sum(max by (shard) (grabstream_shard_relayed)) / max(grabstream_shards)",
                    "relayed",
                ),
                "stat",
            ),
            Panel("Open findings", "short", query("max(grabstream_findings)", "findings"), "stat"),
            Panel(
                "Stopped shards",
                "short",
                query("sum(max by (read_model) (grabstream_stopped_shards))"),
                "stat",
            ),
            Panel(
                "Answers",
                "ops",
                query(rate("grabstream_answers_total", "command, outcome"), "{{command}}: {{outcome}}"),
            ),
            Panel(
                "Callers without an answer", "ops", query(rate("grabstream_answers_unknown_total"), "unknown")
            ),
            Panel(
                "Refusals of the sample that are not written",
                "ops",
                query(rate("grabstream_refusals_dropped_total", "place"), "{{place}}"),
            ),
            Panel("Time of calls", "s", quantiles("grabstream_function_seconds", "function")),
            Panel(
                "Lag of read models",
                "short",
                query("max by (read_model) (grabstream_read_model_lag_events)", "{{read_model}}"),
            ),
            Panel(
                "Lag of read models in seconds",
                "s",
                query("max by (read_model) (grabstream_read_model_lag_seconds)", "{{read_model}}"),
            ),
            Panel(
                "Events that are not verified",
                "short",
                query("max(grabstream_verified_lag_events)", "events"),
            ),
            Panel("Since the last comparison", "s", query("max(grabstream_verified_age_seconds)", "seconds")),
            Panel("Records set aside", "short", query("max(grabstream_set_aside_records)", "records")),
            Panel(
                "Events of webhooks",
                "short",
                query("max by (state) (grabstream_webhook_events)", "{{state}}"),
            ),
            Panel("Size of tables", "bytes", query("max by (table) (grabstream_table_bytes)", "{{table}}")),
            Panel(
                "Servers that answer", "short", query("min by (server) (grabstream_server_up)", "{{server}}")
            ),
            Panel(
                "Recoveries and lost decisions",
                "short",
                (
                    (
                        f"sum by (kind) (increase(grabstream_recoveries_total[{RANGE}]))",
                        "recoveries: {{kind}}",
                    ),
                    (f"sum(increase(grabstream_lost_decisions_total[{RANGE}]))", "lost decisions"),
                    (
                        f"sum by (state) (increase(grabstream_lost_answers_total[{RANGE}]))",
                        "lost answers: {{state}}",
                    ),
                ),
            ),
        ),
    ),
    "worker": (
        "grabstream: workers",
        (
            Panel(
                "Shards",
                "short",
                (
                    ("grabstream_leases_held", "held {{instance}}"),
                    ("grabstream_shards_relayed", "relayed {{instance}}"),
                ),
            ),
            Panel("Commands in the gate", "short", query("grabstream_gate_queued_commands", "{{instance}}")),
            Panel("Calls in flight", "short", query("grabstream_gate_calls_in_flight", "{{instance}}")),
            Panel(
                "Calls that decided nothing",
                "ops",
                query(rate("grabstream_calls_not_decided_total", "reason"), "{{reason}}"),
            ),
            Panel(
                "Records of commands that wait",
                "short",
                query("grabstream_command_records_waiting", "{{instance}}"),
            ),
            Panel("Rejected commands", "ops", query(rate("grabstream_commands_rejected_total"), "rejected")),
            Panel(
                "Events copied to the journal",
                "ops",
                query(rate("grabstream_relay_events_total", "instance"), "{{instance}}"),
            ),
            Panel("Time of a block", "s", quantiles("grabstream_relay_cycle_seconds")),
            Panel(
                "Outboxes",
                "short",
                (
                    ("max by (shard) (grabstream_outbox_events)", "{{shard}}"),
                    ("max(grabstream_outbox_events_max)", "at most"),
                ),
            ),
            Panel(
                "Age of outboxes", "s", query("max by (shard) (grabstream_outbox_age_seconds)", "{{shard}}")
            ),
            Panel(
                "Overdue holds and offers",
                "s",
                query("max by (shard) (grabstream_overdue_seconds)", "{{shard}}"),
            ),
            Panel(
                "Holds and offers ended",
                "ops",
                query(rate("grabstream_swept_total", "function"), "{{function}}"),
            ),
            Panel(
                "Takeovers",
                "ops",
                (
                    (rate("grabstream_relay_takeovers_total"), "taken over"),
                    (rate("grabstream_relay_ended_total", "reason"), "ended: {{reason}}"),
                ),
            ),
            Panel(
                "Events in read models",
                "ops",
                query(rate("grabstream_projection_events_total", "projection"), "{{projection}}"),
            ),
            Panel(
                "Events that are not published",
                "short",
                query(
                    "max by (shard) (grabstream_shard_seq) - max by (shard) (grabstream_published_seq)",
                    "{{shard}}",
                ),
            ),
            Panel(
                "Time of transactions",
                "s",
                quantiles("grabstream_projection_transaction_seconds", "projection"),
            ),
            Panel(
                "Failed attempts",
                "ops",
                query(rate("grabstream_projection_failures_total", "projection"), "{{projection}}"),
            ),
            Panel(
                "Restarts of roles",
                "short",
                query(f"sum by (role) (increase(grabstream_role_restarts_total[{RANGE}]))", "{{role}}"),
            ),
            Panel(
                "Requests of webhooks",
                "ops",
                query(rate("grabstream_webhook_requests_total", "result"), "{{result}}"),
            ),
            Panel(
                "Memory", "bytes", query('process_resident_memory_bytes{job="grabstream"}', "{{instance}}")
            ),
            Panel(
                "Processor",
                "percentunit",
                query(f'rate(process_cpu_seconds_total{{job="grabstream"}}[{RANGE}])', "{{instance}}"),
            ),
            Panel("Files of keys refused", "short", query("grabstream_key_files_refused", "{{instance}}")),
            Panel("Open files", "short", query('process_open_fds{job="grabstream"}', "{{instance}}")),
            Panel(
                "Metrics that could not be read",
                "ops",
                query(rate("grabstream_unread_parts_total", "part"), "{{part}}"),
            ),
            Panel("Versions", "short", query("count by (version) (grabstream_build_info)", "{{version}}")),
        ),
    ),
    "gateway": (
        "grabstream: gateways",
        (
            Panel(
                "Requests", "ops", query(rate("grabstream_http_requests_total", "operation"), "{{operation}}")
            ),
            Panel("Statuses", "ops", query(rate("grabstream_http_requests_total", "status"), "{{status}}")),
            Panel("Time of requests", "s", quantiles("grabstream_http_request_seconds", "operation")),
            Panel(
                "Requests being processed",
                "short",
                (
                    ("grabstream_http_requests_in_work", "{{instance}}"),
                    ("max(grabstream_http_requests_max)", "at most"),
                ),
            ),
            Panel(
                "Commands being processed",
                "short",
                (
                    ("grabstream_http_commands_in_work", "{{instance}}"),
                    ("grabstream_http_commands_max", "{{instance}} at most"),
                ),
            ),
            Panel(
                "Connections",
                "short",
                (
                    ("grabstream_http_connections", "{{instance}}"),
                    ("max(grabstream_http_connections_max)", "at most"),
                ),
            ),
            Panel(
                "Refused, because there was no room",
                "ops",
                query(rate("grabstream_http_shed_total", "what"), "{{what}}"),
            ),
            Panel(
                "Streams of events",
                "short",
                (
                    ("grabstream_http_streams", "{{instance}}"),
                    ("max(grabstream_http_streams_max)", "at most"),
                ),
            ),
            Panel(
                "Events sent on streams", "ops", query(rate("grabstream_http_stream_events_total"), "events")
            ),
            Panel(
                "Streams that are too slow",
                "ops",
                query(rate("grabstream_http_streams_slow_total", "result"), "{{result}}"),
            ),
            Panel(
                "Questions answered from memory",
                "percentunit",
                query(
                    share("grabstream_http_cache_hits_total", "grabstream_http_cache_misses_total"),
                    "hits",
                ),
            ),
        ),
    ),
    "redis-core": ("grabstream: the Redis that decides", redis_panels("core")),
    "redis-cache": ("grabstream: the Redis of caches", redis_panels("cache")),
}


def board(name: str) -> dict[str, Any]:
    """A board as Grafana imports it: three panels a row, small numbers first."""
    title, panels = BOARDS[name]
    drawn, x, y = [], 0, 0
    for number, panel in enumerate(panels, 1):
        width, height = (6, 4) if panel.kind == "stat" else (8, 8)
        if x + width > 24:
            x, y = 0, y + drawn[-1]["gridPos"]["h"]
        drawn.append(_panel(number, panel, {"x": x, "y": y, "w": width, "h": height}))
        x += width
    return {
        "uid": f"grabstream-{name}",
        "title": title,
        "tags": ["grabstream"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
            ]
        },
        "panels": drawn,
    }


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": DATASOURCE,
                "expr": expression,
                **({"legendFormat": legend} if legend else {}),
            }
            for index, (expression, legend) in enumerate(panel.queries)
        ],
    }


def main() -> int:
    """Checks or writes the files; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true")
    action.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    files = {FOLDER / f"{name}.json": json.dumps(board(name), indent=1) + "\n" for name in BOARDS}
    if asked.write:
        for file, text in files.items():
            file.write_text(text, encoding="utf-8")
        return 0
    found = {file: file.read_text(encoding="utf-8") for file in sorted(FOLDER.glob("*.json"))}
    wrong = sorted(str(file) for file in files.keys() | found.keys() if files.get(file) != found.get(file))
    if wrong:
        sys.stderr.write(
            f"{', '.join(wrong)}: differs from scripts/boards.py; "
            "`python scripts/boards.py --write` writes the boards\n"
        )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
