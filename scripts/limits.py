"""Writes docs/limits.md, every bound of the system in one place, from the code; `--check FILE` compares it,
`--write FILE` writes it.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple, get_args

from annotated_types import Ge, Gt, Le

from grabstream.lua import loader
from grabstream.lua.gate import door as gate
from grabstream.lua.gate import queue, refusals, sizes, staging, tickets
from grabstream.models import bounds, calendar, commands, identifiers, money, offers
from grabstream.models.rules import grabbing, settling, state
from grabstream.ops.formats import offer_files
from grabstream.ops.settings import SECRETS, Settings
from grabstream.streams import topics
from grabstream.streams.deciding import backlog, decider, understanding
from grabstream.streams.relaying import ownership, relay

DAY_MS = 24 * 3600 * 1000


class Row(NamedTuple):
    """A bound: of what, how much, why, and what one gets above it."""

    what: str
    value: str
    why: str
    gets: str


def size(count: int) -> str:
    """Bytes as people write them, with the exact number where it is not round."""
    for unit, name in ((1024 * 1024, "MiB"), (1024, "KiB")):
        if count >= unit and count % unit == 0:
            return f"{count // unit} {name}"
    return f"{count:,} bytes"


def days(ms: int) -> str:
    """A duration in days."""
    return f"{ms // DAY_MS:,} days"


INVALID = "`invalid`, names the bound"
REJECTED = "one record in `rejected` with all its bytes; `invalid` where an id can be read"


def of_records() -> list[Row]:
    """What stands in topics."""
    kept = topics.retention_ms(topics.Topics("…"))
    return [
        Row(
            "a record of any topic",
            size(bounds.RECORD_BYTES_MAX),
            "what every client and broker is configured for",
            "the broker refuses it",
        ),
        Row(
            "a compressed batch on `commands`, unpacked",
            size(bounds.RECORD_BYTES_MAX),
            "a reader unpacks it whole",
            "the broker refuses it",
        ),
        Row("a command as JSON", size(bounds.COMMAND_BYTES_MAX), "what it makes fits a line", REJECTED),
        Row(
            "commands in an array", f"{bounds.ARRAY_COMMANDS_MAX:,}", "one record is decided as one", REJECTED
        ),
        Row(
            "commas in an array",
            f"{bounds.ARRAY_COMMAS_MAX:,}",
            "counted before it is decoded: each value costs memory",
            REJECTED,
        ),
        Row(
            "elements of an array kept one by one",
            f"{bounds.REJECTED_OF_ARRAY_MAX:,}",
            "a short array of nonsense would make a long topic",
            "of more, the array is kept once; each readable id is answered",
        ),
        Row("nesting of a record", "Python's recursion limit (1,000)", "the stack", REJECTED),
        Row("a name in an object", "once", "two readers would see two commands", "`invalid`"),
        Row(
            "a reason, a message",
            size(bounds.REASON_BYTES_MAX),
            "it may quote what was sent",
            "cut, with `…`",
        ),
        Row(
            "what a message quotes",
            f"{bounds.QUOTED_CHARACTERS_MAX} characters",
            "as above",
            "cut, with the length",
        ),
        Row(
            "a piece in `rejected`",
            size(bounds.REJECTED_PIECE_BYTES_MAX),
            "fits a topic that nobody configured",
            "headers `piece`, `pieces`",
        ),
        Row(
            "a key in `rejected`",
            size(bounds.REJECTED_KEY_BYTES_MAX),
            "as above",
            "cut; the key is kept with `part` = `key`",
        ),
        Row(
            "a poll of commands",
            f"{decider.POLL_RECORDS_MAX:,} records, {size(decider.POLL_BYTES_MAX)}",
            "memory of a decider",
            "the rest comes with the next",
        ),
        Row(
            "… of one partition", size(decider.PARTITION_BYTES_MAX), "as above", "a larger record comes alone"
        ),
        Row(
            "commands of one shard that wait in a decider",
            f"{backlog.HELD_COMMANDS_MAX:,}, {size(backlog.HELD_BYTES_MAX)}, and a poll",
            "memory of a decider while a shard stands still",
            "partitions that bring more of them are not read until half of it is gone; others are",
        ),
        Row(
            "records of a partition after the first that is not complete",
            f"{backlog.OPEN_RECORDS_MAX:,}, and a poll",
            "what another decider would have to repeat",
            "the partition is not read until half of it is gone",
        ),
        Row(
            "calls of one shard that a decider has in flight",
            f"{decider.CALLS_IN_FLIGHT_MAX}, of {decider.CALL_COMMANDS_MAX} commands",
            "room for other callers of a gate",
            "the rest waits, it is never `busy`",
        ),
        Row(
            "decoding without a break",
            f"{understanding.SLICE_SECONDS * 1000:.0f} ms, and the splitting of one array",
            "others of the process wait",
            "it goes on after them",
        ),
        Row(
            "an event line",
            size(bounds.EVENT_LINE_BYTES_MAX),
            "well below a record",
            "`invalid`, before anything is written; older, longer lines are read",
        ),
        Row(
            "a journal block",
            size(relay.BLOCK_BYTES_MAX),
            "below a record, with a line more",
            "the next block",
        ),
        *(
            Row(f"how long `{name.removeprefix('….')}` is kept", "for ever" if ms < 0 else days(ms), "", "")
            for name, ms in kept.items()
        ),
    ]


def of_commands() -> list[Row]:
    """What stands in commands."""
    amounts = f"0 … {money.AMOUNT_MAX:,}"
    return [
        Row(
            "an id",
            f"1 … {identifiers.ID_LENGTH_MAX} of `A-Za-z0-9._:-`",
            "needs no escaping anywhere",
            INVALID,
        ),
        Row("an amount, a quantity, price × quantity", amounts, "exact in Lua and in every text", INVALID),
        Row(
            "`quantity` of a grab with `take: all`",
            "the offer's `total`",
            "it could never be served",
            INVALID,
        ),
        Row("a time", f"until {offers.TIME_MS_MAX:,} ms (2100)", "as above", INVALID),
        Row("`hold_ms`, `grace_ms`", days(offers.HOLD_MS_MAX), "", INVALID),
        Row("`extensions`", f"{offers.EXTENSIONS_MAX:,}", "", INVALID),
        Row("`title`, `reason`", f"{offers.LINE_LENGTH_MAX} characters, one line", "", INVALID),
        Row("`timezone`", f"{calendar.TIMEZONE_LENGTH_MAX} characters", "", INVALID),
        Row(
            "how long an offer knows its zone",
            days(calendar.HORIZON_MS),
            "its offsets stand in its first event",
            "the last offset holds on",
        ),
        Row("`limits`", f"{offers.LIMITS_MAX}", "each is counted at each grab", INVALID),
        Row(
            "`hours`",
            f"{offers.HOURS_MAX} entries, {bounds.HOURS_SPANS_MAX} spans in a week",
            "looked at at each grab",
            INVALID,
        ),
        Row("`parts`", f"{money.PARTS_MAX:,}", "6 bytes each in Redis", INVALID),
        Row("`seed`", "16 … 64 bytes", "", INVALID),
        Row("`attributes`", f"{commands.ATTRIBUTES_MAX}, ids", "they stand in the event", INVALID),
        Row("`ticket`", f"{commands.TICKET_LENGTH_MAX:,} characters", "", INVALID),
        Row("grabs in a basket", f"{bounds.BASKET_GRABS_MAX}", "decided in one call", INVALID),
        Row(
            "`max_per_grab` where grabs get codes",
            f"{bounds.CODES_PER_GRAB_MAX}",
            "the codes stand in the event",
            "`invalid`: `open`, `amend` or `load`",
        ),
        Row(
            "codes that a basket gets at once",
            f"{bounds.CODES_PER_GRAB_MAX}, together",
            "decided in one call",
            INVALID,
        ),
        Row(
            "answers known of the grabs that a basket names",
            f"{size(basket_answers_bytes())}, together",
            "read in one call",
            f"{INVALID}; each is answered when it is asked for by itself",
        ),
        Row("a code", f"1 … {commands.CODE_LENGTH_MAX} characters, one line", "", INVALID),
        Row(
            "a code in a list",
            "once",
            "each is given once; the offer keeps 12 characters a code until its list is complete or it "
            "closes",
            "`invalid`, names the place in the chunk; `grabstream load` looks through the whole file before "
            "the first chunk",
        ),
        Row(
            "items of a `load`",
            f"{commands.ITEMS_MAX:,}, {size(commands.ITEMS_BYTES_MAX)} as they stand in the event",
            "they stand in one event, codes sealed",
            f"{INVALID}; `grabstream load` cuts a file so",
        ),
        Row("chunks of a list", f"{commands.CHUNKS_MAX:,}", "", INVALID),
        Row("`transfers` of an `adjust`", f"{commands.TRANSFERS_MAX}", "they stand in one event", INVALID),
    ]


def in_scripts(name: str, pattern: str) -> int:
    """A number that stands in a script."""
    found = re.search(pattern, (loader.SCRIPTS / f"{name}.lua").read_text())
    assert found is not None
    return int(found.group(1))


def call_cost_max() -> int:
    """What a script allows itself in a call."""
    return in_scripts("includes/cost", r"call_max = (\d+)")


def basket_answers_bytes() -> int:
    """What answers known of a basket's grabs may have."""
    return in_scripts("includes/decide", r"basket_answers_bytes = (\d+)")


def of_processes() -> list[Row]:
    """What gates, scripts and workers do at once."""
    at_once = ", ".join(f"`{name}` {count}" for name, count in gate.AT_ONCE_MAX.items())
    return [
        Row(
            "commands of one script call",
            f"`GRAB_BATCH_COMMANDS_MAX`; {at_once}",
            "a script blocks its server",
            "the next call",
        ),
        Row(
            "parts that go with the call that opens their offer",
            f"{staging.INLINE_BYTES_MAX // 6:,}",
            "as above",
            f"brought before, {size(staging.PIECE_BYTES)} a call",
        ),
        Row(
            "arguments of one script call",
            size(sizes.CALL_BYTES_MAX),
            "as above",
            "the next call; a command or basket that has more goes alone",
        ),
        Row(
            "offers that commands of one script call name",
            f"{queue.OFFERS_IN_CALL_MAX}",
            "as above",
            "the next call",
        ),
        Row(
            "work of one script call, by its own count of µs of Redis' thread",
            f"{call_cost_max():,}, and one command",
            "as above",
            "the next call, in order; holds and offers that are due: the next sweep",
        ),
        Row(
            "grabs of a queue served, or sent home, for one command",
            f"{grabbing.SERVED_AT_ONCE_MAX}",
            "as above",
            "the sweeper goes on",
        ),
        Row(
            "grabs at the front of a queue that units which are left are offered to",
            f"{grabbing.CONSIDERED_MAX}",
            "as above",
            "a grab behind them waits until one of these has left; newcomers take what suffices for none of "
            "them",
        ),
        Row(
            "payments of one grab whose units were not returned",
            f"{settling.PAYMENTS_MAX}",
            "a grab is read and written whole, and its return names them all",
            "`limit_reached`, and the payment is to be paid back",
        ),
        Row(
            "windows in which late payments of one grab took units again",
            f"{settling.COUNTED_MAX}",
            "a grab is read and written whole",
            "`expired`, and the payment is to be paid back",
        ),
        Row(
            "how long a payment is known after its offer has retired",
            days(offers.PAYMENTS_KNOWN_MS),
            "Redis keeps nothing for ever",
            "`no_such_offer` with a message that names the way; the view `payments` has it for ever",
        ),
        Row(
            "used tickets of a campaign that have ended and are forgotten",
            f"{grabbing.TICKETS_FORGOTTEN} a new one",
            "as above",
            "",
        ),
        Row(
            "refusals a shard remembers",
            f"{state.REFUSALS_MAX:,}",
            "memory of Redis",
            "the oldest are decided anew",
        ),
        Row(
            "names of offers that do not exist",
            "counted as one, `*`, in `demand`",
            "else anybody could fill it with invented names",
            "",
        ),
        Row(
            "an entry of the outbox, and what is read of it at once",
            f"{size(in_scripts('ownership/read_outbox', r'BYTES_MAX = 1000, ([0-9]+)'))}, "
            "and a line or entry",
            "a script blocks its server",
            "the next entry; the rest comes with the next read",
        ),
        Row(
            "outbox entries a relay reads at once",
            f"{ownership.READ_ENTRIES_MAX}",
            "memory of a worker",
            "the rest comes with the next",
        ),
        Row(
            "refusals that wait to be written",
            f"{refusals.RefusalSample().waiting_max:,}",
            "memory of a gate",
            "counted in `demand` only",
        ),
        Row(
            "tickets remembered as verified",
            f"{tickets.REMEMBERED_MAX:,}",
            "about 1 kB each",
            "verified again",
        ),
        Row(
            "an offer in Redis after its close",
            f"{days(offers.RETIRE_AFTER_MS)}, if its terms say nothing else",
            "Redis keeps nothing for ever",
            "answered from SQL",
        ),
        Row(
            "a file of offers, codes or users",
            size(bounds.FILE_BYTES_MAX),
            "it is checked as a whole",
            "refused, nothing is opened",
        ),
        Row(
            "values in a file of offers",
            f"{bounds.FILE_VALUES_MAX:,}, those that aliases repeat counted again",
            "as above",
            "as above",
        ),
        Row(
            "problems of a file that are told",
            f"{offer_files.PROBLEMS_MAX:,}",
            "",
            "the rest after those are mended",
        ),
    ]


def of_settings() -> list[Row]:
    """Numbers that an operator chooses, and within what."""
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
        rows.append(Row(f"`GRAB_{name.upper()}`", ", ".join(within), default, "no start, names the setting"))
    return rows


def _is_number(annotation: Any) -> bool:
    return annotation in (int, float) or any(
        _is_number(one) for one in get_args(annotation) if one is not type(None)
    )


def document() -> str:
    """The page."""
    said = (
        "# Bounds\n\n"
        "Every bound of the system. `python scripts/limits.py --write docs/limits.md` writes this page from\n"
        "the code; `make lint` compares.\n\n"
        "Fields, lists and whole commands are checked at the door, records before they are decoded, event\n"
        "lines before the first write. So no accepted command leads to an event that Kafka or PostgreSQL\n"
        "refuses. A command above a bound is answered, its bytes are kept, and no other command waits for\n"
        "it.\n"
    )
    head = ("what", "at most", "why", "above it")
    tables = (
        ("Records and topics", head, of_records()),
        ("Commands and terms", head, of_commands()),
        ("Processes and files", head, of_processes()),
        ("Settings", ("setting", "must be", "default", "else"), of_settings()),
    )
    for title, names, rows in tables:
        lines = [names, ("---",) * len(names), *rows]
        said += f"\n## {title}\n\n" + "".join(
            f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines
        )
    return said


def main() -> int:
    """Prints, checks or writes; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", metavar="FILE", type=Path, help="exit 1 unless FILE is what the code says")
    action.add_argument("--write", metavar="FILE", type=Path, help="write FILE")
    asked = parser.parse_args()
    text = document()
    if asked.write:
        asked.write.write_text(text, encoding="utf-8")
    elif asked.check is None:
        sys.stdout.write(text)
    elif not asked.check.is_file() or asked.check.read_text(encoding="utf-8") != text:
        sys.stderr.write(
            f"limits: {asked.check} is not what the code says; `python scripts/limits.py --write "
            f"{asked.check}` mends it\n"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
