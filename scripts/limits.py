"""Generates docs/limits.md, all bounds of the system, from the code; `--check FILE` compares it,
`--write FILE` writes it.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple, get_args

from annotated_types import Ge, Gt, Le

from grabstream.gateway import bounds as http
from grabstream.lua import bounded_http, loader
from grabstream.lua.gate import decided, gate, personal, queue, refusals, sizes, staging, tickets
from grabstream.models import bounds, calendar, commands, identifiers, money, offers, payments, pseudonyms
from grabstream.models.rules import grabbing, settling, state
from grabstream.ops.formats import offer_files
from grabstream.ops.rehearsal import payment_provider
from grabstream.ops.settings import SECRETS, Settings
from grabstream.ops.verification import evidence
from grabstream.projections.records import api_keys, webhooks
from grabstream.streams import buckets, topics
from grabstream.streams.deciding import backlog, decider, payment_side, understanding
from grabstream.streams.deciding import payments as hold_queries
from grabstream.streams.history import archive, stores
from grabstream.streams.relaying import blocks, ownership
from grabstream.streams.webhooks import addresses, sending

DAY_MS = 24 * 3600 * 1000


class Row(NamedTuple):
    """A bound: what it limits, the value, the reason, and what happens above it."""

    what: str
    value: str
    why: str
    gets: str


def size(count: int) -> str:
    """A number of bytes as text, in MiB or KiB if it is a multiple of one."""
    for unit, name in ((1024 * 1024, "MiB"), (1024, "KiB")):
        if count >= unit and count % unit == 0:
            return f"{count // unit} {name}"
    return f"{count:,} bytes"


def days(ms: int) -> str:
    """A duration in ms as text, in days."""
    return f"{ms // DAY_MS:,} days"


INVALID = "`invalid`, names the bound"
REJECTED = "kept in `rejected` with all bytes; answered `invalid` if its id can be read"


def of_records() -> list[Row]:
    """Bounds of records and topics."""
    kept = topics.retention_ms(topics.Topics("…"))
    return [
        Row(
            "a record of any topic",
            size(bounds.RECORD_BYTES_MAX),
            "clients and brokers are configured for this size",
            "the broker refuses it",
        ),
        Row(
            "a compressed batch on `commands`, after decompression",
            size(bounds.RECORD_BYTES_MAX),
            "a reader decompresses it as a whole",
            "the broker refuses it",
        ),
        Row("a command as JSON", size(bounds.COMMAND_BYTES_MAX), "its event fits an event line", REJECTED),
        Row(
            "commands in an array",
            f"{bounds.ARRAY_COMMANDS_MAX:,}",
            "a record is decided as a whole",
            REJECTED,
        ),
        Row(
            "commas in an array",
            f"{bounds.ARRAY_COMMAS_MAX:,}",
            "each decoded value costs memory; commas are counted before decoding",
            REJECTED,
        ),
        Row(
            "undecodable elements of an array that are kept as single records",
            f"{bounds.REJECTED_OF_ARRAY_MAX:,}",
            "a short array could otherwise make many records",
            "the array is kept once instead; each readable id is answered",
        ),
        Row("nesting of a record", "Python's recursion limit (1,000)", "the stack of the process", REJECTED),
        Row(
            "occurrences of a name in a JSON object, also in signed claims and their headers",
            "1",
            "two readers could read two commands",
            "`invalid`; a token, ticket or signed text is not valid",
        ),
        Row(
            "the reason or message of a refusal",
            size(bounds.REASON_BYTES_MAX),
            "it may quote input",
            "cut, with `…`",
        ),
        Row(
            "a quotation of input in a message",
            f"{bounds.QUOTED_CHARACTERS_MAX} characters",
            "as above",
            "cut, with the length",
        ),
        Row(
            "a piece in `rejected`",
            size(bounds.REJECTED_PIECE_BYTES_MAX),
            "fits the default limit of Kafka",
            "split; the headers `piece` and `pieces` number the pieces",
        ),
        Row(
            "the key of a record in `rejected`",
            size(bounds.REJECTED_KEY_BYTES_MAX),
            "as above",
            "cut; the whole key is kept in records with the header `part` = `key`",
        ),
        Row(
            "commands that a decider reads at once",
            f"{decider.POLL_RECORDS_MAX:,} records, {size(decider.POLL_BYTES_MAX)}",
            "memory of a decider",
            "the rest is read next time",
        ),
        Row(
            "… of one partition",
            size(decider.PARTITION_BYTES_MAX),
            "as above",
            "a larger record is read alone",
        ),
        Row(
            "commands of one shard that are queued in a decider",
            f"{backlog.HELD_COMMANDS_MAX:,} or {size(backlog.HELD_BYTES_MAX)}, plus one read",
            "memory of a decider while a shard decides nothing",
            "partitions with more of them are not read until the queue is half empty; other "
            "partitions are read",
        ),
        Row(
            "records of a partition after the first incomplete record",
            f"{backlog.OPEN_RECORDS_MAX:,}, plus one read",
            "another decider may have to repeat them",
            "the partition is not read until half of them are complete",
        ),
        Row(
            "calls of one shard that a decider has in flight",
            f"{decider.CALLS_IN_FLIGHT_MAX}, each of {decider.CALL_COMMANDS_MAX} commands",
            "leaves room for other callers of the gate",
            "the rest waits; it is not refused as `busy`",
        ),
        Row(
            "time of decoding without a pause",
            f"{understanding.SLICE_SECONDS * 1000:.0f} ms, plus the splitting of one array",
            "other tasks of the process wait",
            "decoding continues after a pause",
        ),
        Row(
            "an event line",
            size(bounds.EVENT_LINE_BYTES_MAX),
            "well below a record",
            "`invalid`, before the first write; longer lines of older releases are still read",
        ),
        Row(
            "a journal block",
            f"{size(blocks.BLOCK_BYTES_MAX)} and `GRAB_BLOCK_EVENTS_MAX` events, or one entry of the outbox",
            f"the longest entry, {size(blocks.ENTRY_BYTES_MAX)}, still fits a record",
            "the entry goes into the next block",
        ),
        *(
            Row(
                f"retention of the topic `{name.removeprefix('….')}`",
                "for ever" if ms < 0 else days(ms),
                "",
                "",
            )
            for name, ms in kept.items()
        ),
    ]


def of_commands() -> list[Row]:
    """Bounds of commands and terms."""
    amounts = f"0 … {money.AMOUNT_MAX:,}"
    return [
        Row(
            "an id",
            f"1 … {identifiers.ID_LENGTH_MAX} characters of `A-Za-z0-9._:-`",
            "needs no escaping in JSON, Lua, SQL or keys; compared byte by byte: `ann`, `Ann` are two users",
            INVALID,
        ),
        Row(
            "the id of a payment",
            f"1 … {identifiers.PAYMENT_BYTES_MAX} bytes of UTF-8 without control characters",
            "the payment side chooses it; compared byte by byte, and escaped in JSON in one way",
            INVALID,
        ),
        Row(
            "an amount, a quantity, price × quantity",
            amounts,
            "exact as a number in Lua, and in its text",
            INVALID,
        ),
        Row(
            "`quantity` of a grab with `take: all`",
            "the offer's `total`",
            "more could never be granted",
            INVALID,
        ),
        Row("a time", f"until {offers.TIME_MS_MAX:,} ms (2100)", "as above", INVALID),
        Row("`hold_ms`, `grace_ms`", days(offers.HOLD_MS_MAX), "", INVALID),
        Row("`extensions`", f"{offers.EXTENSIONS_MAX:,}", "", INVALID),
        Row("`title`, `reason`", f"{offers.LINE_LENGTH_MAX} characters, one line", "", INVALID),
        Row(
            "one line: of a title, a reason, metadata, a code",
            "no control characters (U+0000 … U+001F, U+007F … U+009F), no line or paragraph separators "
            "(U+2028, U+2029), no embeddings, overrides or isolates of bidirectional text (U+202A … U+202E, "
            "U+2066 … U+2069)",
            "it would be shown as several lines, or in another order",
            INVALID,
        ),
        Row(
            "`timezone`",
            f"{calendar.TIMEZONE_LENGTH_MAX} characters; not `localtime`, `Factory`, `posixrules`, "
            "`posix/…`, `right/…`",
            "these depend on the machine, or count leap seconds",
            INVALID,
        ),
        Row(
            "the time for which an offer stores the offsets of its zone",
            days(calendar.HORIZON_MS),
            "its first event contains them",
            "the last offset continues to apply",
        ),
        Row("`limits`", f"{offers.LIMITS_MAX}", "each grab counts under each limit", INVALID),
        Row(
            "`hours`",
            f"{offers.HOURS_MAX} entries, {bounds.HOURS_SPANS_MAX} spans in a week",
            "each grab checks them",
            INVALID,
        ),
        Row("`parts`", f"{money.PARTS_MAX:,}", "6 bytes for each part in Redis", INVALID),
        Row("`seed`", "16 … 64 bytes", "", INVALID),
        Row(
            "`attributes`",
            f"{commands.ATTRIBUTES_MAX}; names and values are ids",
            "the event contains them",
            INVALID,
        ),
        Row(
            "`metadata`",
            f"{commands.METADATA_PAIRS_MAX} pairs, {size(commands.METADATA_BYTES_MAX)} as JSON without "
            f"spaces, {personal.SEALED_BYTES_MAX} bytes where it is sealed; names are ids, values one line",
            "the answer and the events contain it; a queued grab keeps it in Redis",
            INVALID,
        ),
        Row("`ticket`", f"{commands.TICKET_LENGTH_MAX:,} characters", "", INVALID),
        Row("`receipt` of a `confirm`", f"{commands.RECEIPT_LENGTH_MAX:,} characters", "", INVALID),
        Row(
            "`approvals` of a command of operators",
            f"{commands.APPROVALS_MAX} of {commands.APPROVAL_LENGTH_MAX:,} characters each",
            "",
            INVALID,
        ),
        Row("grabs in a basket", f"{bounds.BASKET_GRABS_MAX}", "one call decides them", INVALID),
        Row(
            "`max_per_grab` where grabs get codes",
            f"{bounds.CODES_PER_GRAB_MAX}",
            "the event contains the codes",
            "`open`, `amend` or `load` is `invalid`",
        ),
        Row(
            "codes that the grabs of a basket get, together",
            f"{bounds.CODES_PER_GRAB_MAX}",
            "one call decides them",
            INVALID,
        ),
        Row(
            "remembered answers of the grabs of a repeated basket, together",
            f"{size(basket_answers_bytes())}",
            "one call reads them",
            f"{INVALID}; each grab, repeated alone, gets its answer",
        ),
        Row(
            "a code",
            f"1 … {commands.CODE_LENGTH_MAX} characters, one line, no blank at its ends",
            "codes are compared byte by byte: `SAVE-10` and `save-10` are two",
            INVALID,
        ),
        Row(
            "occurrences of a code in a list",
            "1",
            "each code is handed out once; the offer keeps 12 characters of each code until its list is "
            "complete or it closes",
            "`invalid`, names the number in the chunk; `grabstream load` checks the whole file before the "
            "first chunk",
        ),
        Row(
            "items of a `load`",
            f"{commands.ITEMS_MAX:,}, {size(commands.ITEMS_BYTES_MAX)} in the event",
            "one event contains them, codes sealed",
            f"{INVALID}; `grabstream load` cuts a file into such chunks",
        ),
        Row("chunks of a list", f"{commands.CHUNKS_MAX:,}", "", INVALID),
        Row("`transfers` of an `adjust`", f"{commands.TRANSFERS_MAX}", "one event contains them", INVALID),
    ]


def in_scripts(name: str, pattern: str) -> int:
    """A number in the text of a script, by a pattern."""
    match = re.search(pattern, (loader.SCRIPTS / f"{name}.lua").read_text())
    assert match is not None
    return int(match.group(1))


def call_cost_max() -> int:
    """The cost (µs) at which a script ends a call."""
    return in_scripts("includes/cost", r"call_max = (\d+)")


def basket_answers_bytes() -> int:
    """The bytes of remembered answers that a script reads for a basket, at most."""
    return in_scripts("includes/decide", r"basket_answers_bytes = (\d+)")


def of_processes() -> list[Row]:
    """Bounds of gates, scripts, workers and files."""
    at_once = ", ".join(f"`{name}` {count}" for name, count in gate.AT_ONCE_MAX.items())
    return [
        Row(
            "answers of a gate that were given as `decided` and are not journaled yet",
            f"{decided.KEPT_ANSWERS_MAX:,}",
            "each takes about a kilobyte",
            "further ones are given, but not followed; they are counted",
        ),
        Row(
            "lost answers of a gate that wait until PostgreSQL has them",
            f"{decided.WAITING_REPORTS_MAX:,}",
            "as above",
            "further ones are in the log only, and counted",
        ),
        Row(
            "commands of one script call",
            f"`GRAB_BATCH_COMMANDS_MAX`; {at_once}",
            "a script blocks its server",
            "the rest goes into the next call",
        ),
        Row(
            "parts that are sent in the call that opens their offer",
            f"{staging.INLINE_BYTES_MAX // 6:,}",
            "as above",
            f"all are sent before, in calls of {size(staging.PIECE_BYTES)}",
        ),
        Row(
            "arguments of one script call",
            size(sizes.CALL_BYTES_MAX),
            "as above",
            "the rest goes into the next call; a command or basket with more is sent alone",
        ),
        Row(
            "offers that the commands of one script call name",
            f"{queue.OFFERS_IN_CALL_MAX}",
            "as above",
            "the rest goes into the next call",
        ),
        Row(
            "cost of one script call, in µs of the Redis thread as the script counts it",
            f"{call_cost_max():,}, plus one command",
            "as above",
            "the rest is decided by the next call, in order; holds and offers that are due: "
            "by the next sweep",
        ),
        Row(
            "what one script call reads from Redis",
            size(bounds.CALL_READ_BYTES_MAX),
            "as above",
            "cannot occur: large records are read one by one",
        ),
        Row(
            "queued grabs that are served or removed for one command",
            f"{grabbing.SERVED_AT_ONCE_MAX}",
            "as above",
            "the sweeper handles the rest",
        ),
        Row(
            "grabs at the front of a queue that are considered for the units left",
            f"{grabbing.CONSIDERED_MAX}",
            "as above",
            "a later grab waits until one of these leaves the queue; new grabs may take units that suffice "
            "for none of these",
        ),
        Row(
            "payments of one grab whose units were not returned",
            f"{settling.PAYMENTS_MAX}",
            "a grab is read and written as a whole, and the event of its return names them all",
            "`limit_reached`; the payment is to be paid back",
        ),
        Row(
            "windows in which late payments of one grab took units again",
            f"{settling.COUNTED_MAX}",
            "a grab is read and written as a whole",
            "`expired`; the payment is to be paid back",
        ),
        Row(
            "time for which a payment is known after its offer retired",
            days(offers.PAYMENTS_KNOWN_MS),
            "Redis stores nothing for ever",
            "`no_such_offer` with a message that says what to do; the view `payments` has it for ever",
        ),
        Row(
            "used tickets of a campaign that have ended and are deleted, for each new ticket",
            f"{grabbing.TICKETS_FORGOTTEN}",
            "a script blocks its server",
            "the next tickets delete the rest",
        ),
        Row(
            "refusals that a shard remembers",
            f"{state.REFUSALS_MAX:,}",
            "memory of Redis",
            "the oldest are forgotten; a repeat is decided again",
        ),
        Row(
            "names for offers that do not exist, in `demand`",
            "1: `*`",
            "invented names could otherwise fill it",
            "",
        ),
        Row(
            "an entry of the outbox, and a read of the outbox",
            f"{size(in_scripts('includes/outbox', r'BYTES_MAX = 1000, ([0-9]+)'))}, "
            "plus the last decision, or entry",
            "a script blocks its server",
            "the rest goes into the next entry, or the next read",
        ),
        Row(
            "outbox entries that a relay reads at once",
            f"{ownership.READ_ENTRIES_MAX}",
            "memory of a worker",
            "the rest is read next time",
        ),
        Row(
            "refusals of a gate that are not written yet: to SQL, and to the topic of refusals",
            f"{refusals.RefusalSample().waiting_max:,}",
            "memory of a gate",
            "the rest is only counted in `demand`",
        ),
        Row(
            "holds in a question to the payment side",
            f"{payments.QUERY_HOLDS_MAX}; {hold_queries.QUERIES_AT_ONCE_MAX} questions of a shard at a time",
            "the payment side answers each within the time limit",
            "the rest is in the next question",
        ),
        Row(
            "a signed question to the payment side; and its answer",
            f"{size(payments.QUERY_LENGTH_MAX)}; {size(payments.ANSWER_LENGTH_MAX)}",
            "memory of a worker",
            "it is not read further; these holds end as without an answer",
        ),
        Row(
            "the time of a question to the payment side",
            "`GRAB_PAYMENT_QUERY_TIMEOUT_MS`; it is asked twice this time and 1 s before a hold ends",
            "an answer after the end of the hold is of no use",
            f"no answer; after {payment_side.FAILURES_MAX} in a row nothing is asked for "
            f"{payment_side.OPEN_SECONDS:.0f} s",
        ),
        Row(
            "payments that the fake payment provider keeps",
            f"{payment_provider.PAYMENTS_MAX:,}",
            "it keeps them in memory",
            "503; start it again",
        ),
        Row(
            "tickets that a gate remembers as verified",
            f"{tickets.REMEMBERED_MAX:,}",
            "about 1 kB for each",
            "a forgotten ticket is verified again",
        ),
        Row(
            "time for which a closed offer stays in Redis",
            f"{days(offers.RETIRE_AFTER_MS)}, or `retire_after_ms` of its terms",
            "Redis stores nothing for ever",
            "SQL answers questions about it",
        ),
        Row(
            "a file of offers, codes or users",
            size(bounds.FILE_BYTES_MAX),
            "it is checked as a whole",
            "refused; no offer is opened",
        ),
        Row(
            "values in a file of offers",
            f"{bounds.FILE_VALUES_MAX:,}, with each repetition by an alias",
            "as above",
            "as above",
        ),
        Row(
            "problems of a file that one check reports",
            f"{offer_files.PROBLEMS_MAX:,}",
            "",
            "the next check reports the rest",
        ),
        Row(
            "the manifest of an archive, and a file of it",
            f"{size(stores.MANIFEST_BYTES_MAX)}, {size(archive.FILE_BYTES_MAX)}",
            "a reader takes it into memory",
            "refused",
        ),
        Row(
            "a checkpoint",
            size(evidence.FILE_BYTES_MAX),
            "as above; one of 4,096 shards fits",
            "refused",
        ),
        Row(
            "the key or prefix in an address of an object store",
            f"{buckets.KEY_BYTES_MAX} characters",
            "stores take 1,024 bytes, and an archive adds names",
            "wrong usage",
        ),
        Row(
            "attempts of a request to an object store",
            f"{buckets.ATTEMPTS_MAX}, each within `GRAB_S3_TIMEOUT_MS` of silence",
            "a store that is away must be said",
            "exit code 3",
        ),
    ]


def of_requests() -> list[Row]:
    """Bounds of HTTP requests to a gateway."""
    busy = "503 `busy`, with Retry-After"
    return [
        Row(
            "the request line and the headers",
            size(http.HEAD_BYTES_MAX),
            "memory of a gateway",
            "431 `head_too_large`; the connection ends",
        ),
        Row(
            "the headers of a request",
            f"{http.HEADERS_MAX}",
            "as above",
            "431 `head_too_large`; the connection ends",
        ),
        Row(
            "the body of a grab, and of a command about a grab",
            size(http.GRAB_BODY_BYTES_MAX),
            "a ticket, all attributes and metadata fit",
            "413 `content_too_large`, before it is read if its length is known",
        ),
        Row("the body of other commands", size(bounds.COMMAND_BYTES_MAX), "that of a command", "as above"),
        Row(
            "the whole of a request after its head, with the frames of its chunks",
            size(http.MESSAGE_BYTES_MAX),
            "what is refused is read and dropped, so that the connection can serve the next request",
            "the connection ends",
        ),
        Row(
            "the query, and its parameters",
            f"{size(http.QUERY_BYTES_MAX)}, {http.QUERY_PARAMETERS_MAX} parameters",
            "memory of a gateway",
            "414 `uri_too_long`, 400 `invalid`",
        ),
        Row(
            "an id in a path",
            "the pattern of ids, except `.` and `..`",
            "clients and proxies change such paths",
            "400 `invalid`",
        ),
        Row(
            "an Idempotency-Key of a basket",
            f"{http.BASKET_KEY_LENGTH_MAX} characters",
            "the ids of its grabs are made from it",
            "400 `invalid`",
        ),
        Row(
            "from the first byte of a request to its last one",
            f"{http.READ_SECONDS_MAX:.0f} s",
            "slow clients hold connections",
            "408 `request_timeout`; the connection ends",
        ),
        Row(
            "the time in which a client takes an answer",
            f"{http.WRITE_SECONDS_MAX:.0f} s",
            "as above",
            "the connection is aborted",
        ),
        Row(
            "the time between two requests of a connection",
            f"{http.IDLE_SECONDS_MAX} s",
            "as above",
            "the connection ends",
        ),
        Row(
            "requests of a connection that wait for their turn",
            f"{http.PIPELINE_MAX}",
            "memory of a gateway",
            f"{busy}; the connection ends",
        ),
        Row(
            "connections that a turn of the event loop reads",
            f"{http.READ_AT_ONCE}",
            "a command needs several turns: they stay short in a crowd",
            "the others wait for the next turn; a grab that has waited longer than "
            f"{http.COMMAND_SECONDS_TARGET:g} s is {busy}",
        ),
        Row("requests in work", "`GRAB_GATEWAY_REQUESTS_MAX`", "answers stay fast under overload", busy),
        Row(
            "… of these, commands",
            f"{http.COMMANDS_FIRST:,} at first; fewer, down to {http.COMMANDS_MIN}, while commands take "
            f"longer than {http.COMMAND_SECONDS_TARGET:g} s, more while they do not",
            "answers stay fast under overload",
            busy,
        ),
        Row(
            "… of these, questions",
            f"{http.QUESTIONS_MAX}; {http.QUESTIONS_USER_MAX} of one end user, {http.QUESTIONS_CALLER_MAX} "
            "of one API key or, without authentication, of one address",
            "commands keep their room, and callers theirs",
            busy,
        ),
        Row(
            "the time of a question in PostgreSQL",
            f"{http.QUESTION_MS_MAX / 1000:.0f} s, in one of `GRAB_GATEWAY_SESSIONS_MAX` sessions",
            "one question must not hold up the others",
            "503 `unavailable`",
        ),
        Row(
            "the time of a change of webhooks in PostgreSQL; offers whose events are listed for one webhook",
            f"{http.CHANGE_MS_MAX / 1000:.0f} s; {http.WEBHOOK_OFFERS_MAX}",
            "100,000 parked events may be sent again; a page for people",
            "503 `unavailable`, and nothing is changed; what is parked, then the oldest",
        ),
        Row(
            "the time that a question waits for a session",
            f"{http.SESSION_WAIT_SECONDS_MAX:.0f} s, {http.SESSION_WAITERS_MAX} questions at a time",
            "as above",
            "503 `unavailable`, `busy`",
        ),
        Row(
            "the time that a question waits for the read model (`after`)",
            f"{http.AFTER_SECONDS_MAX:.0f} s, {http.AFTER_WAITERS_MAX} questions at a time, "
            f"{http.AFTER_WAITERS_CALLER_MAX} of one caller",
            "as above",
            "503 `read_model_behind`, `busy`",
        ),
        Row(
            "the age of an answer about offers, an offer, or who got what",
            f"{http.CACHE_SECONDS:.0f} s, {size(http.CACHE_BYTES_MAX)} of such answers",
            "a crowd asks the same",
            "it is read again; the least recently used are dropped",
        ),
        Row(
            "… while another gateway makes the next one (`GRAB_CACHE_URL`)",
            f"{http.CACHE_SECONDS + http.CACHE_STALE_SECONDS_MAX:.0f} s",
            "gateways need not all ask the same",
            f"a gateway waits for the other one, at most {http.CACHE_WAIT_SECONDS_MAX * 1000:.0f} ms, then "
            "asks itself",
        ),
        Row(
            "offers in a random order that are read once for all visitors; names of offers, of more; such "
            "lists that are kept ready",
            f"{http.SHUFFLED_OFFERS_MAX:,}; {http.SHUFFLED_NAMES_MAX:,}; {http.SHUFFLED_LISTS_MAX}",
            "the gateway puts them into the order of each visitor",
            "the offers of a page are read for it; the order has the newest; the list is read again",
        ),
        Row(
            "an answer that gateways share",
            size(http.SHARED_ANSWER_BYTES_MAX),
            "memory of the cache Redis",
            "each gateway keeps its own",
        ),
        Row(
            "the time that the cache Redis has for a command",
            f"{http.CACHE_SERVER_SECONDS_MAX * 1000:.0f} ms, over {http.CACHE_SERVER_CONNECTIONS_MAX} "
            "connections",
            "a cache must not make answers slower",
            "it is not used until it answers again",
        ),
        Row(
            "a payment token, and a receipt",
            f"{payments.TOKEN_LENGTH_MAX:,} characters, checked before anything is decoded",
            "memory of a gateway",
            "400 `invalid`",
        ),
        Row(
            "an address for receipts, or for questions to the payment side",
            f"{payments.CALLBACK_LENGTH_MAX} characters",
            "it is a part of every payment token",
            "the process does not start, and names the setting",
        ),
        Row(
            "queries that a gateway remembers as parsed, and targets whose answers it keeps",
            f"{http.PARSED_MAX:,} of at most {http.PARSED_BYTES_MAX} bytes",
            "memory of a gateway",
            "a forgotten or longer one is parsed again, or answered a moment later",
        ),
        Row(
            "streams of events of a gateway",
            f"{http.STREAMS_MAX:,}, each for {http.STREAM_SECONDS_MAX / 60:.0f} min; "
            f"{http.STREAMS_USER_MAX} of one end user, {http.STREAMS_JOINING_MAX} that begin at once",
            "memory of a gateway",
            "503 `busy`, with Retry-After; the client connects again and resumes",
        ),
        Row(
            "what a stream of events has not sent yet",
            f"{size(http.STREAM_BYTES_MAX)}, {size(http.STREAMS_BYTES_MAX)} in all streams; "
            f"{http.WRITE_SECONDS_MAX:.0f} s for 64 KiB",
            "as above",
            "the stream ends; the client connects again and resumes",
        ),
        Row(
            "events that a stream reads when it resumes",
            f"{http.STREAM_MISSED_SEQS_MAX:,}: of its offer; in the stream of a user, of all offers",
            "work of PostgreSQL",
            "`event: reset`; the stream continues with what comes next",
        ),
        Row(
            "the window of `/v1/demand`",
            f"{http.DEMAND_SECONDS_MAX} s, {http.DEMAND_SECONDS} without `seconds`; at once, "
            f"{http.DEMAND_EVENTS_MAX:,} events of a shard are read",
            "its cost does not grow with the journal",
            "400 `invalid`; `since` says from when on the counts are complete",
        ),
        Row(
            "recoveries, differences and stopped shards in `/v1/system`; sums in `/v1/books`",
            f"{http.SYSTEM_ROWS_MAX} of each; {http.BOOK_SUMS_MAX:,}",
            "a page for people",
            "the newest are shown; the first by asset",
        ),
        Row(
            "frames and grabs of the film of an offer; places whose fairness is measured",
            f"{http.FILM_FRAMES}, {http.FILM_GRABS}; {http.FAIRNESS_GRABS_MAX:,}",
            "a page for people",
            "frames are longer; the newest grabs; the first places",
        ),
        Row(
            "positions of a waiting list that a user is told",
            f"{http.WAITING_POSITIONS_MAX:,}",
            "one list is read for all who wait",
            "the position is absent",
        ),
        Row(
            "grabs of a user whose positions a stream tells, and how often",
            f"{http.STREAM_WAITS_MAX}, those that joined first; once in {http.POSITIONS_SECONDS:.0f} s, or "
            f"in {http.POSITIONS_REST_TIMES} times what reading the list takes, up to "
            f"{http.POSITIONS_REST_SECONDS_MAX:.0f} s",
            "as above",
            "`GET /v1/users/{user}/grabs?offer=…` has the others",
        ),
        Row(
            "the pause after a list, or a user who waits, could not be read",
            f"{http.POSITIONS_SECONDS:.0f} s, twice as long each time, up to "
            f"{http.POSITIONS_FAILED_SECONDS_MAX:.0f} s",
            "as above",
            "–",
        ),
        Row(
            "`why` and `doctor` over HTTP",
            f"{http.EXAMINATIONS_MAX} at a time, {http.EXAMINATION_SECONDS_MAX:.0f} s each",
            "they connect to the servers themselves",
            "503 `busy`, `unavailable`",
        ),
        Row("rows of a page", f"{http.PAGE_ROWS_MAX}, {http.PAGE_ROWS} without `limit`", "", "400 `invalid`"),
        Row(
            "connections accepted in one turn of the event loop",
            f"{http.ACCEPTED_AT_ONCE}",
            "new clients do not wait behind those that are served",
            "the rest waits for the next turn",
        ),
        Row(
            "connections",
            "`GRAB_GATEWAY_CONNECTIONS_MAX`, and the open files of the process",
            "memory of a gateway",
            f"{busy}; the connection ends",
        ),
        Row(
            "connections of one address, of IPv6 those of a /64 together",
            "`GRAB_GATEWAY_ADDRESS_CONNECTIONS_MAX`; those of `GRAB_GATEWAY_PROXIES` are not counted",
            "one silent client must not take all connections",
            "429 `too_many_requests`, with Retry-After; the connection ends",
        ),
        Row(
            "a token of an end user",
            size(http.TOKEN_BYTES_MAX),
            "it is checked before it is decoded",
            "401 `unauthenticated`",
        ),
        Row(
            "the name of an end user in a token",
            f"{pseudonyms.USER_NAME_BYTES_MAX} bytes of UTF-8",
            "identity providers promise no more; one that is no id gives one, of 36 characters",
            "401 `unauthenticated`",
        ),
        Row(
            "tokens whose signature a gateway remembers as right",
            f"{http.TOKENS_REMEMBERED_MAX:,}",
            "memory of a gateway",
            "the oldest is forgotten, and verified again",
        ),
        Row(
            "the keys of the issuer of tokens",
            f"{size(http.KEY_SET_BYTES_MAX)}, {http.KEY_SET_KEYS_MAX} keys, read within "
            f"{http.KEY_SET_SECONDS_MAX:.0f} s",
            "a server that hangs or sends rubbish must not stop a gateway",
            "the last known keys are valid",
        ),
        Row(
            "what a server of keys or tokens, or the payment side, sends besides the body of an answer: "
            "interim responses, head, framing",
            size(bounded_http.HEAD_BYTES_MAX),
            "the client would take it without end",
            "the connection is closed; there is no answer",
        ),
        Row(
            "the time between two readings of these keys for an unknown key",
            f"at least {http.KEY_SET_UNKNOWN_SECONDS_MIN:.0f} s",
            "forged tokens must not send requests to the issuer",
            "401 `unauthenticated`",
        ),
        Row(
            "API keys of a system",
            f"{api_keys.API_KEYS_MAX:,}, also those that are revoked",
            "memory of a gateway",
            "`keys create` refuses",
        ),
        Row(
            "the time for which a gateway uses the last known keys while it cannot read them",
            f"{http.KEYS_STALE_SECONDS_MAX / 3600:.0f} h",
            "a revocation must hold in the end",
            "503 `unavailable`",
        ),
        Row(
            "callers that one gateway counts in its memory",
            f"{http.CALLERS_COUNTED_MAX:,}",
            "memory of a gateway",
            "the one who asked least recently is forgotten",
        ),
        Row(
            "the time for which a gateway that is stopped waits for requests in work",
            f"{http.DRAIN_SECONDS_MAX} s",
            "",
            "the connections end without an answer",
        ),
    ]


def of_webhooks() -> list[Row]:
    """Bounds of webhooks."""
    return [
        Row("webhooks of a system", f"{webhooks.WEBHOOKS_MAX}", "each reads and sends", "`add` is refused"),
        Row("the URL of a webhook", f"{addresses.URL_LENGTH_MAX:,} characters", "", "`add` is refused"),
        Row(
            "events that wait for one webhook",
            f"{webhooks.WAITING_MAX:,}, of which those of one offer count as {webhooks.OFFER_PLACES_MAX} at "
            f"most; {webhooks.WAITING_EVENTS_MAX:,} in all; plus one slice of the journal",
            "room in PostgreSQL; one offer must not hold up the others",
            "it reads the journal no further until there are fewer",
        ),
        Row(
            "events that are parked for one webhook",
            f"{webhooks.PARKED_MAX:,}, plus one slice of the journal",
            "as above",
            "it is paused",
        ),
        Row(
            "requests to one webhook at a time",
            f"{sending.PARALLEL_MAX}, one for each offer; 1 after {sending.FAILURES_MAX} failures in a row",
            "a receiver that fails gets time",
            "the other offers wait",
        ),
        Row("the time of a request", "`GRAB_WEBHOOK_TIMEOUT_MS`", "as above", "the attempt has failed"),
        Row("attempts to send an event", "`GRAB_WEBHOOK_ATTEMPTS_MAX`", "", "it is parked"),
        Row(
            "the pause that a receiver may ask for (Retry-After)",
            f"{sending.RETRY_AFTER_SECONDS_MAX / 3600:.0f} h",
            "",
            "it is sent again then",
        ),
        Row(
            "the part of a receiver's answer that is read: interim responses, head, framing, body",
            size(sending.ANSWER_BYTES_MAX),
            "it is not used",
            "the connection is closed; the status counts if it came",
        ),
    ]


def of_settings() -> list[Row]:
    """Numeric settings, with their ranges and defaults."""
    rows = []
    for name, field in Settings.model_fields.items():
        if name in SECRETS or isinstance(field.default, bool) or not _is_number(field.annotation):
            continue
        within = [
            f"{sign} {getattr(one, word):,}"
            for one in field.metadata
            for kind, word, sign in ((Ge, "ge", "≥"), (Gt, "gt", ">"), (Le, "le", "≤"))
            if isinstance(one, kind)
        ]
        default = "–" if field.default is None else f"{field.default:,}"
        rows.append(
            Row(
                f"`GRAB_{name.upper()}`",
                ", ".join(within),
                default,
                "the process does not start, and names the setting",
            )
        )
    return rows


def _is_number(annotation: Any) -> bool:
    return annotation in (int, float) or any(
        _is_number(one) for one in get_args(annotation) if one is not type(None)
    )


def document() -> str:
    """The page."""
    page = (
        "# Bounds\n\n"
        "This page lists every bound of the system. `python scripts/limits.py --write docs/limits.md`\n"
        "generates it from the code; `make lint` compares.\n\n"
        "Records are checked before they are decoded, commands before they reach a script, and event lines\n"
        "before the first write. So no accepted command makes an event that Kafka or PostgreSQL refuses. A\n"
        "command above a bound is answered, its bytes are kept (unless they may contain a secret), and\n"
        "other commands do not wait for it.\n"
    )
    head = ("what", "at most", "reason", "above it")
    tables = (
        ("Records and topics", head, of_records()),
        ("Commands and terms", head, of_commands()),
        ("Processes and files", head, of_processes()),
        ("Requests over HTTP", head, of_requests()),
        ("Webhooks", head, of_webhooks()),
        ("Settings", ("setting", "range", "default", "outside the range"), of_settings()),
    )
    for title, names, rows in tables:
        lines = [names, ("---",) * len(names), *rows]
        page += f"\n## {title}\n\n" + "".join(
            f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines
        )
    return page


def main() -> int:
    """Prints, checks or writes the page; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", metavar="FILE", type=Path, help="exit 1 unless FILE agrees with the code")
    action.add_argument("--write", metavar="FILE", type=Path, help="write FILE")
    asked = parser.parse_args()
    text = document()
    if asked.write:
        asked.write.write_text(text, encoding="utf-8")
    elif asked.check is None:
        sys.stdout.write(text)
    elif not asked.check.is_file() or asked.check.read_text(encoding="utf-8") != text:
        sys.stderr.write(
            f"limits: {asked.check} differs from the code; run `python scripts/limits.py "
            f"--write {asked.check}`\n"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
