"""Every metric: its name, kind, labels, meaning, and the processes that have it. docs/metrics.md is generated
from this list, and a process can expose nothing else.

Labels have few values: names of commands, outcomes, functions, read models, operations, roles and servers,
and numbers of shards; never ids of users, offers or commands.
"""

from typing import Final, Literal, NamedTuple

Process = Literal["worker", "gateway"]
_BOTH: Final = ("worker", "gateway")
_WORKER: Final = ("worker",)
_GATEWAY: Final = ("gateway",)


class Metric(NamedTuple):
    """A metric. `scope`: of the process alone (`process`), or of the whole system, the same in every worker
    that has it (`system`).
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    labels: tuple[str, ...] = ()
    processes: tuple[Process, ...] = _WORKER
    scope: Literal["process", "system"] = "process"


METRICS: Final = (
    Metric("grabstream_build_info", "gauge", "1; the version of the program.", ("version",), _BOTH),
    Metric("grabstream_ready", "gauge", "1 if /health/ready answers 200, else 0.", (), _BOTH),
    Metric(
        "grabstream_server_up", "gauge", "1 if the server answers this process, else 0.", ("server",), _BOTH
    ),
    Metric(
        "grabstream_unread_parts_total",
        "counter",
        "Parts of these metrics that could not be read from a server when they were asked for.",
        ("part",),
        _BOTH,
    ),
    Metric(
        "grabstream_key_files_refused",
        "gauge",
        "Files of keys whose present content cannot be used; the previous keys stay in use.",
        (),
        _BOTH,
    ),
    # -- the gate
    Metric(
        "grabstream_answers_total",
        "counter",
        "Answers of the gate, repeats included.",
        ("command", "outcome"),
        _BOTH,
    ),
    Metric(
        "grabstream_answers_unknown_total",
        "counter",
        "Callers of the gate that got OutcomeUnknown: the call timed out, or the answer was lost.",
        (),
        _BOTH,
    ),
    Metric(
        "grabstream_lost_answers_total",
        "counter",
        "Answers that a gate gave as decided and that a recovery lost: `found`, then `written` to "
        "`lost_decisions`, or `dropped` (in the log only); `not_followed`: answers that the gate did not "
        "follow, since too many were not journaled yet.",
        ("state",),
        _BOTH,
    ),
    Metric(
        "grabstream_function_seconds",
        "histogram",
        "Time of a call of a function in Redis, until the reply or the error.",
        ("function",),
        _BOTH,
    ),
    Metric(
        "grabstream_calls_not_decided_total",
        "counter",
        "Calls of the gate without a decision: `refused` (fenced or busy), `history` (the shard was "
        "recovered), `undecidable`, `broken_off`, `trouble` (no reply).",
        ("reason",),
        _BOTH,
    ),
    Metric(
        "grabstream_refusals_dropped_total",
        "counter",
        "Refusals of the sample that were not written, since there were too many, or the server did not "
        "answer for too long: to the view `refusals` (`books`) or to the topic (`topic`).",
        ("place",),
        _BOTH,
    ),
    Metric("grabstream_gate_queued_commands", "gauge", "Commands that wait in the gate.", (), _BOTH),
    Metric("grabstream_gate_calls_in_flight", "gauge", "Calls of the gate without a reply.", (), _BOTH),
    # -- the worker: deciding, relaying, sweeping
    Metric(
        "grabstream_command_records_waiting",
        "gauge",
        "Records of the topics of commands that are not answered, in the partitions of this worker.",
    ),
    Metric(
        "grabstream_commands_rejected_total",
        "counter",
        "Bytes and commands written to the topic of rejected bytes.",
    ),
    Metric("grabstream_shards", "gauge", "Shards of the system.", (), _WORKER, "system"),
    Metric("grabstream_leases_held", "gauge", "Shards whose leases this worker holds."),
    Metric(
        "grabstream_shards_relayed",
        "gauge",
        "Shards that this worker has taken over and relays; fewer than leases while one is fenced.",
    ),
    Metric(
        "grabstream_shard_relayed",
        "gauge",
        "1 while this worker relays the shard, 0 while it has only its lease.",
        ("shard",),
    ),
    Metric("grabstream_relay_events_total", "counter", "Events that relays have copied to the journal."),
    Metric(
        "grabstream_relay_cycle_seconds",
        "histogram",
        "Time of one block: appended to the journal, and trimmed from the outbox.",
    ),
    Metric("grabstream_relay_takeovers_total", "counter", "Shards taken over."),
    Metric(
        "grabstream_relay_ended_total",
        "counter",
        "Tenures and takeovers that ended: `stepped_down`, `fenced`, or `trouble` with a server.",
        ("reason",),
    ),
    Metric("grabstream_recoveries_total", "counter", "Shards rebuilt from the journal.", ("kind",)),
    Metric(
        "grabstream_lost_decisions_total",
        "counter",
        "Decisions that a recovery took back, since the journal does not have them.",
    ),
    Metric(
        "grabstream_outbox_events",
        "gauge",
        "Events that are not in the journal, of shards relayed by this worker.",
        ("shard",),
    ),
    Metric(
        "grabstream_shard_seq",
        "gauge",
        "The last event decided, of shards relayed by this worker.",
        ("shard",),
    ),
    Metric(
        "grabstream_published_seq",
        "gauge",
        "The last event on the topic of events, as far as this worker knows; take the largest.",
        ("shard",),
    ),
    Metric(
        "grabstream_outbox_age_seconds",
        "gauge",
        "Age of the oldest event that is not in the journal, by the clock of this machine; 0 without any.",
        ("shard",),
    ),
    Metric("grabstream_outbox_events_max", "gauge", "Events an outbox may hold (GRAB_OUTBOX_EVENTS_MAX)."),
    Metric(
        "grabstream_overdue_seconds",
        "gauge",
        "How long ago the first hold or offer that is not ended should have ended; 0 if none.",
        ("shard",),
    ),
    Metric(
        "grabstream_swept_total",
        "counter",
        "Holds (`expire`) and offers (`sweep`, `forget`) handled in time.",
        ("function",),
    ),
    # -- the worker: the books
    Metric(
        "grabstream_projection_events_total",
        "counter",
        "Events written by a projection of this worker.",
        ("projection",),
    ),
    Metric(
        "grabstream_projection_transaction_seconds",
        "histogram",
        "Time of one transaction of a projection (`events`: of one write to the topic).",
        ("projection",),
    ),
    Metric(
        "grabstream_projection_ignored_records_total",
        "counter",
        "Records of the journal that do not count, since no known relay signed them.",
        ("projection",),
    ),
    Metric(
        "grabstream_projection_failures_total",
        "counter",
        "Attempts of a projection that failed and are repeated.",
        ("projection",),
    ),
    Metric(
        "grabstream_trouble_seconds",
        "gauge",
        "How long the longest-lasting failure of this worker has been retried; 0: no failure, or a single "
        "one. The success of other work does not end it. The log and `grabstream doctor` name it.",
    ),
    Metric("grabstream_role_restarts_total", "counter", "Restarts of roles that failed.", ("role",)),
    Metric(
        "grabstream_webhook_requests_total",
        "counter",
        "Requests of webhooks, by `delivered` and `failed`.",
        ("result",),
    ),
    # -- of the system, from the books
    Metric(
        "grabstream_read_model_lag_events",
        "gauge",
        "Events that are decided and not in the read model, of all shards.",
        ("read_model",),
        _WORKER,
        "system",
    ),
    Metric(
        "grabstream_read_model_lag_seconds",
        "gauge",
        "How long the read model has lacked the oldest of these events, measured from the first reading "
        "that saw it.",
        ("read_model",),
        _WORKER,
        "system",
    ),
    Metric(
        "grabstream_stopped_shards",
        "gauge",
        "Shards at which the read model has stopped.",
        ("read_model",),
        _WORKER,
        "system",
    ),
    Metric(
        "grabstream_verified_lag_events",
        "gauge",
        "Events in the audit trail that are not verified.",
        (),
        _WORKER,
        "system",
    ),
    Metric(
        "grabstream_verified_age_seconds",
        "gauge",
        "Time since the verifier last compared the shard that it compared longest ago.",
        (),
        _WORKER,
        "system",
    ),
    Metric("grabstream_findings", "gauge", "Open findings of the verifier.", (), _WORKER, "system"),
    Metric(
        "grabstream_set_aside_records", "gauge", "Records that operators set aside.", (), _WORKER, "system"
    ),
    Metric(
        "grabstream_webhook_events",
        "gauge",
        "Events that are not delivered: `waiting` and `parked`.",
        ("state",),
        _WORKER,
        "system",
    ),
    Metric(
        "grabstream_table_bytes",
        "gauge",
        "Size of a table in PostgreSQL with its indexes, all versions together.",
        ("table",),
        _WORKER,
        "system",
    ),
    # -- the gateway
    Metric(
        "grabstream_http_requests_total", "counter", "Requests answered.", ("operation", "status"), _GATEWAY
    ),
    Metric(
        "grabstream_http_request_seconds",
        "histogram",
        "Time from the head of a request to its answer.",
        ("operation",),
        _GATEWAY,
    ),
    Metric("grabstream_http_requests_in_work", "gauge", "Requests being processed.", (), _GATEWAY),
    Metric(
        "grabstream_http_requests_max",
        "gauge",
        "Maximum of requests processed at once (GRAB_GATEWAY_REQUESTS_MAX).",
        (),
        _GATEWAY,
    ),
    Metric("grabstream_http_commands_in_work", "gauge", "Commands being processed.", (), _GATEWAY),
    Metric(
        "grabstream_http_commands_max",
        "gauge",
        "Present maximum of commands processed at once: it falls while commands are slow, and rises while "
        "they are fast.",
        (),
        _GATEWAY,
    ),
    Metric("grabstream_http_connections", "gauge", "Connections of clients.", (), _GATEWAY),
    Metric("grabstream_http_connections_max", "gauge", "Connections of clients at most.", (), _GATEWAY),
    Metric(
        "grabstream_http_shed_total",
        "counter",
        "What was refused because there was no room: `requests`, `commands` (above "
        "`grabstream_http_commands_max`, or grabs that waited too long to be read), `questions`, "
        "`connections`, `connections_of_address`, `streams`.",
        ("what",),
        _GATEWAY,
    ),
    Metric("grabstream_http_streams", "gauge", "Streams of events that are open.", (), _GATEWAY),
    Metric("grabstream_http_streams_max", "gauge", "Streams of events at most.", (), _GATEWAY),
    Metric("grabstream_http_stream_events_total", "counter", "Events sent on streams.", (), _GATEWAY),
    Metric(
        "grabstream_http_streams_slow_total",
        "counter",
        "Streams whose clients did not read events in time: `behind` (events that had no room in memory "
        "are read again from PostgreSQL, or by the client), `ended` (the connection was cut).",
        ("result",),
        _GATEWAY,
    ),
    Metric("grabstream_http_cache_hits_total", "counter", "Questions answered from memory.", (), _GATEWAY),
    Metric(
        "grabstream_http_cache_misses_total", "counter", "Questions answered by PostgreSQL.", (), _GATEWAY
    ),
)

BY_NAME: Final = {metric.name: metric for metric in METRICS}


def metrics_of(process: Process) -> tuple[Metric, ...]:
    """The metrics that a process exposes."""
    return tuple(metric for metric in METRICS if process in metric.processes)
