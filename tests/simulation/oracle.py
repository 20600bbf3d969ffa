"""What must be true, said without the code under test: after each record, after each call of a script, after
each answer, and when everything is at rest.
"""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from itertools import count
from typing import Any, Final

from grabstream.models.answers import Answer
from grabstream.models.commands import (
    CARRIED,
    AnyCommand,
    Confirm,
    Grab,
    GrabCommand,
    Load,
    Open,
    check,
    identity_of,
)
from grabstream.models.identifiers import campaign_of
from grabstream.models.journal import Corrupt, Cursor, Gap
from grabstream.models.money import Invalid
from grabstream.models.outcomes import Outcome
from grabstream.models.rules import ShardState
from grabstream.models.rules.grabbing import serve
from grabstream.streams.journal_keys import journal_keys
from tests.lua.histories.books import check_books
from tests.lua.histories.promises import check_promises
from tests.lua.histories.rows import Rows, differences
from tests.simulation.answers_reading import AnswersReading, Call
from tests.simulation.kafka_broker import Record
from tests.simulation.redis_server import Server, SimulatedScript
from tests.simulation.rules_reading import SWEEP, Difference, RulesReading, all_sent, is_of

LINE_BYTES_MAX: Final = 262_144
#: How far the clocks of Redis and a caller may differ.
CLOCK_SKEW_MS_MAX: Final = 5_000


class Violation(Exception):
    """An invariant is broken."""


class JournalReading:
    """A partition of the journal as docs/protocol.md says it is read."""

    def __init__(self, shard: int) -> None:
        self.shard = shard
        #: The lines, and after each of them the last seq and the head.
        self.raw: list[bytes] = []
        self.last_seqs: list[int] = []
        self.heads: list[bytes] = []
        #: For each seq: the text of its event as a separate line, its term, and the event.
        self.lines: list[bytes] = []
        self.terms: list[int] = []
        self.events: list[Any] = []
        self.head = bytes(32)
        #: The position of the product's own reader, which must always have read the same.
        self.cursor = Cursor()
        self.term = 0
        self.owner = b""
        #: The offset of the next record, if no relay writes it.
        self.forged: int | None = None

    def read(self, record: Record) -> None:
        """Reads a record; raises Violation when it counts and does not continue what there is, or when the
        product's reader reads it otherwise.
        """
        if record.offset != self.forged:
            self._read(record)
        block = journal_keys().block(record.topic, self.shard, record.headers, record.value)
        try:
            self.cursor, _ = self.cursor.feed(record.offset, block)
        except (Corrupt, Gap) as error:
            raise Violation(
                f"journal {self.shard}, offset {record.offset}: a reader stops: {error}"
            ) from None
        if (self.cursor.seq, self.cursor.head) != (len(self.lines), self.head):
            raise Violation(
                f"journal {self.shard}, offset {record.offset}: a reader is at seq {self.cursor.seq} of "
                f"{len(self.lines)}"
            )

    def _read(self, record: Record) -> None:
        named = dict(record.headers)
        where = f"journal {self.shard}, offset {record.offset}"
        term, owner, count = int(named["term"]), named["owner"], int(named["count"])
        if int(named["shard"]) != self.shard:
            raise Violation(f"{where}: a block of shard {named['shard'].decode()}")
        if count == 0:
            if term > self.term:
                self.term, self.owner = term, owner
            return
        if term > self.term:
            raise Violation(f"{where}: a block of term {term}, which no marker has announced")
        if (term, owner) != (self.term, self.owner):
            return
        first, seqs = int(named["first_seq"]), int(named.get("seqs", count))
        lines = (record.value or b"").split(b"\n")
        if len(lines) != count:
            raise Violation(f"{where}: {len(lines)} lines, {count} are announced")
        if first > len(self.lines) + 1:
            raise Violation(f"{where}: begins at seq {first}, the last one is {len(self.lines)}")
        if first > 1 and first - 1 not in self.last_seqs:
            raise Violation(f"{where}: begins at seq {first}, which is within a run")
        begins = self.last_seqs.index(first - 1) + 1 if first > 1 else 0
        known = self.raw[begins : begins + count]
        if known != lines[: len(known)]:
            raise Violation(f"{where}: another history from seq {first} on")
        for line in lines[len(known) :]:
            self._take(line, term)
            if len(line) > LINE_BYTES_MAX:
                raise Violation(f"{where}: an event of {len(line)} bytes")
        if self.last_seqs[begins + count - 1] != first + seqs - 1:
            raise Violation(f"{where}: its lines do not take the {seqs} seqs that it names")
        if self.heads[begins + count - 1].hex().encode() != named["head"]:
            raise Violation(f"{where}: the chain does not lead to the head that the record names")

    def _take(self, line: bytes, term: int) -> None:
        self.head = hashlib.sha256(self.head + line).digest()
        for event, text in one_by_one(line):
            self.lines.append(text)
            self.terms.append(term)
            self.events.append(event)
        self.raw.append(line)
        self.last_seqs.append(len(self.lines))
        self.heads.append(self.head)


def one_by_one(line: bytes) -> Iterator[tuple[Any, bytes]]:
    """The events of a line, each with its text as a separate line: for a run, those of its grabs."""
    run = json.loads(line)
    if run["type"] not in ("grab.granted", "grab.held"):
        yield run, line
        return
    grabs = run["grabs"]
    quantities = run.get("quantities", [1] * len(grabs))
    left = run["left"] + sum(quantities)
    # Those of the waiting list name the command that made units free, and were sent with another event.
    served_by = run.get("command")
    for number, (grab, quantity) in enumerate(zip(grabs, quantities, strict=True)):
        left -= quantity
        ticket, ends_at = _of_column(run, "tickets", number) or (None, None)
        event = {
            "type": run["type"], "v": 1, "shard": run["shard"], "seq": run["seq"] + number,
            "offer_seq": run["offer_seq"] + number, "offer": run["offer"], "at": run["at"],
            "command": served_by or grab, "grab": grab, "user": run["users"][number], "quantity": quantity,
            "amount": _of_column(run, "amounts", number, quantity), "asset": run["asset"],
            "place": run["place"] + number, "left": left, "asked": _of_column(run, "asked", number),
            "deadline_at": run.get("deadline_at"),
            "due": run.get("price", 0) * quantity if "currency" in run else None,
            "currency": run.get("currency"), "waited": run.get("waited"),
            "attributes": _of_column(run, "attributes", number),
            **{name: _of_column(run, name, number) for name in CARRIED},
            "ticket": ticket, "ticket_ends_at": ends_at, "basket": run.get("basket"),
            "codes": _of_column(run, "codes", number) or None,
            "digest": _of_column(run, "digests", number, None if served_by else "plain"),
        }  # fmt: skip
        there = {name: value for name, value in event.items() if value is not None}
        yield there, json.dumps(there, separators=(",", ":"), ensure_ascii=False).encode()


def _of_column(run: Any, name: str, number: int, otherwise: Any = None) -> Any:
    return run[name][number] if name in run else otherwise


#: What distinguishes a command from all others, as `identity_of` says it.
Identity = tuple[str, ...]
_MADE_BY_GRABS: Final = ("grab.granted", "grab.held", "grab.queued")


def identity_of_event(event: Any) -> Identity:
    """That of the command that an event names."""
    if event["type"] in _MADE_BY_GRABS and not event.get("waited"):
        return event["offer"], event["user"], event["command"]
    return campaign_of(event["offer"]), event["command"]


class Given:
    """An answer that a caller was given; `order` is the number of the call, and the place in its list.

    `is_only`: the command was sent once, by this call, so its event was made by it.
    """

    __slots__ = ("answer", "caller", "command", "gate", "is_only", "order", "promise")

    def __init__(
        self,
        caller: int,
        order: tuple[int, int],
        command: AnyCommand,
        answer: Answer,
        promise: str,
        gate: object,
        is_only: bool = False,
    ) -> None:
        self.caller = caller
        self.order = order
        self.command = command
        self.answer = answer
        self.promise = promise
        self.gate = gate
        self.is_only = is_only


class Oracle:
    """Watches a run."""

    def __init__(self, shards: int, has_whole_entries: bool = False) -> None:
        #: Whether each record of the journal has whole entries of the outbox.
        self._has_whole_entries = has_whole_entries
        #: By shard, seqs after which no entry ends, as far as that is known.
        self._within_entries: list[set[int]] = [set() for _ in range(shards)]
        self.journal = [JournalReading(shard) for shard in range(shards)]
        self.given: list[Given] = []
        self.lost: set[Identity] = set()
        #: Commands that a script has decided with an event, at any server.
        self.made: set[Identity] = set()
        #: For a command, in the order in which it happened: each event that a script has made of it, at any
        #: server, and its refusals.
        self._moments: dict[Identity, dict[bytes, int]] = defaultdict(dict)
        self._refused: dict[Identity, list[int]] = defaultdict(list)
        self._count = count()
        #: Commands of which a caller was told that nothing was decided, and which it gave up.
        self.given_up: list[AnyCommand] = []
        self.violations: list[str] = []
        #: By shard, the state to which its journal leads by the rules.
        self.states: dict[int, ShardState] = {}
        #: The processes that live when everything is at rest: what they gave as decided, they report if it is
        #: lost.
        self.survivors: set[object] = set()
        #: Set when Redis loses what it has: then decisions may be lost. Refusals are also lost when shards of
        #: an older layout are rebuilt.
        self.loses = self.loses_refusals = False
        #: Each line that was decided until then.
        self._decided: dict[tuple[int, int], bytes] = {}
        #: By shard, all calls of deciding scripts, and the texts that they have made of a seq, at any server.
        self._calls: list[set[Call]] = [set() for _ in range(shards)]
        self._made: list[dict[int, set[bytes]]] = [defaultdict(set) for _ in range(shards)]

    # -- as it happens ---------------------------------------------------------------------------------------

    def appended(self, record: Record) -> None:
        """After each record of the journal. What was decided together is in one record: as long as Redis has
        lost nothing, none ends within an entry of the outbox.
        """
        reading = self.journal[record.partition]
        before = len(reading.lines)
        try:
            reading.read(record)
        except Violation as error:
            self.violations.append(str(error))
        seq = len(reading.lines)
        is_checked = self._has_whole_entries and not self.loses and seq > before
        if is_checked and seq in self._within_entries[record.partition]:
            self.violations.append(
                f"journal {record.partition}, offset {record.offset}: ends at seq {seq}, within an entry"
            )

    def called(
        self,
        server: Server,
        script: SimulatedScript,
        args: Sequence[Any],
        reply: Any,
        before: Any,
        after: Any,
    ) -> None:
        """After each call of a deciding script: no event is made while the shard is fenced, or by a clock
        that is wrong.
        """
        # The shard is rebuilt without what the call has made, perhaps without all that is not journaled.
        self.loses |= isinstance(reply, Exception) and "BROKEN OFF" in str(reply)
        (was_seq, was_life), (seq, _) = before[0], after[0]
        shard = int(args[3].rpartition("}")[0].rpartition("-s")[2])
        self._calls[shard].add(Call(server.time_ms(), int(was_seq or 0), int(seq or 0)))
        if int(seq or 0) <= int(was_seq or 0):
            return
        if (was_life or b"").decode() != server.epoch:
            self.violations.append(
                f"{server.name}: {script.name} decided seq {int(seq)} while the shard was fenced ({args[3]})"
            )
        # KEYS, then the shard, the caller's time, and a time to use in place of the server's.
        at_ms, instead = args[4 + int(args[2])], args[5 + int(args[2])]
        if not instead and abs(server.time_ms() - int(at_ms)) > CLOCK_SKEW_MS_MAX:
            self.violations.append(
                f"{server.name}: {script.name} decided seq {int(seq)} at {server.time_ms()}, by a clock that "
                f"is wrong: the caller says {at_ms}"
            )
        was, now = int(was_seq or 0), int(seq)
        made: list[tuple[Any, bytes]] = []
        for entry, fields in reversed(after[1]):
            first = int(entry.partition(b"-")[0])
            if first > was:
                of_entry = [one for line in fields[1::2] for one in one_by_one(line)]
                self._within_entries[shard].update(range(first, first + len(of_entry) - 1))
                made += of_entry
        if len(made) != now - was:
            self.violations.append(
                f"{server.name}: {script.name} took seqs {was + 1} to {now}, and wrote {len(made)} events"
            )
        for decided, (event, line) in enumerate(made, was + 1):
            name = identity_of_event(event)
            self.made.add(name)
            self._moments[name].setdefault(line, next(self._count))
            self._made[shard][decided].add(line)
            if not self.loses and self._decided.setdefault((shard, decided), line) != line:
                self.violations.append(
                    f"{server.name}: {script.name} decided seq {decided} again ({args[3]})"
                )

    def replied(self, command: AnyCommand, answer: Answer) -> None:
        """After each answer that a gate reads in the reply of a script."""
        if not answer.positive:
            self._refused[identity_of(command)].append(next(self._count))

    def answered(self, given: Given) -> None:
        """After each answer: what was promised as journaled is in the journal, unchanged."""
        self.given.append(given)
        if given.promise == "journaled" and (problem := self._missing(given)):
            self.violations.append(f"when it was answered: {problem}")

    def _missing(self, given: Given) -> str | None:
        answer, command = given.answer, given.command
        if not answer.positive or answer.seq is None or answer.shard is None:
            return None
        events = self.journal[answer.shard].events
        said = f"{command.id} of {command.offer}: {answer.outcome} as shard {answer.shard}, seq {answer.seq}"
        if answer.seq > len(events):
            return f"{said}, which the journal has not"
        event = events[answer.seq - 1]
        if event["offer"] != command.offer or (not answer.repeated and not is_of(event, command)):
            return f"{said}, where the journal has {event}"
        if isinstance(command, Grab) and (
            (not is_of(event, command) and answer.outcome != "already_taken")
            or (answer.outcome == "granted" and event.get("amount") != answer.amount)
        ):
            return f"{said}, amount {answer.amount}, where the journal has {event}"
        if isinstance(command, Confirm) and command.payment is not None:
            paid = event.get("payment"), event.get("paid", 0), event.get("currency")
            if paid != (command.payment, command.paid, command.currency):
                return f"{said}, for {command.paid} {command.currency}, where the journal has {event}"
        return None

    # -- in the end ------------------------------------------------------------------------------------------

    def check_journal(self) -> None:
        """The books and the promises of each shard."""
        for reading in self.journal:
            for check_lines in (check_books, check_promises):
                try:
                    check_lines(reading.lines)
                except Exception as error:
                    # A checker that meets what it does not know has found something, too.
                    said = str(error) if isinstance(error, AssertionError) else repr(error)
                    self.violations.append(f"shard {reading.shard}: {check_lines.__name__}: {said[:400]}")

    def check_decisions(
        self, lists: Iterable[Sequence[AnyCommand]], may_fail: Callable[[AnyCommand], bool]
    ) -> None:
        """Every event, and every answer, is what the rules decide; `lists` are what callers sent, `may_fail`
        says whether scripts fail for a command.
        """
        sent = all_sent(lists)
        for given in self.given:
            if given.answer.shard is None and (problem := _of_door(given, may_fail)):
                self.violations.append(problem)
        for reading in self.journal:
            rules = RulesReading(reading.shard, sent)
            answers = AnswersReading(
                rules, reading.lines, self._calls[reading.shard], self._made[reading.shard]
            )
            for given in self.given:
                if given.answer.shard == reading.shard:
                    answers.take(given.command, given.answer, given.caller < 0, given.promise == "decided")
            try:
                rules.read(reading.lines, answers.ask)
                answers.finish()
                self.states[reading.shard] = rules.state
            except Difference as error:
                self.violations.append(f"shard {reading.shard}: {str(error)[:900]}")
            self.violations += answers.problems[:3]

    def check_states(self, rows: tuple[Rows, Rows] | None) -> None:
        """No open offer has a waiter whom its free units would serve; and the rows of the views `offers` and
        `grabs`, in runs that have them, are the states to which the journals lead.
        """
        for shard, state in self.states.items():
            self.violations += [
                f"shard {shard}: {name} has free units, and waiters whom they would serve"
                for name, offer in state.offers.items()
                if offer.queue and offer.units_left and _are_served(state, name)
            ]
            if rows is not None:
                wrong = differences(state, self.journal[shard].lines, *rows)
                self.violations += [f"shard {shard}: {one}" for one in wrong]

    def check_decided(self) -> None:
        """As long as Redis loses nothing, everything decided is in the journal, as it was decided."""
        if self.loses:
            return
        if self.lost:
            self.violations.append(
                f"answers are reported as lost, although Redis has lost nothing: {self.lost}"
            )
        for (shard, seq), line in self._decided.items():
            if self.journal[shard].lines[seq - 1 : seq] != [line]:
                self.violations.append(
                    f"shard {shard}: seq {seq} is lost, although Redis has lost nothing: {line.decode()}"
                )
                return

    def check_answers(self) -> None:
        """Every answer given as journaled is there; every one given as decided is there or was reported."""
        for given in self.given:
            problem = self._missing(given)
            if problem and (given.promise == "journaled" or not self._is_reported(given)):
                self.violations.append(f"in the end ({given.promise}): {problem}")

    def _is_reported(self, given: Given) -> bool:
        gate_died = given.gate is not None and given.gate not in self.survivors
        return gate_died or identity_of(given.command) in self.lost

    def check_given_up(self) -> None:
        """Nothing came of commands that were not sent again after they were refused with a whole call."""
        made = {identity_of_event(event) for reading in self.journal for event in reading.events}
        self.violations += [
            f"{command.id} of {command.offer} was answered as not decided, and given up: it is in the journal"
            for command in self.given_up
            if identity_of(command) in made
        ]

    def check_order(self) -> None:
        """The events of commands that a caller sent in one call, or one after the other, stand in that
        order; what is lost of a call is the end of it.
        """
        firsts: dict[tuple[int, str], list[Given]] = defaultdict(list)
        for given in self.given:
            answer = given.answer
            if given.caller < 0 or not answer.positive or answer.seq is None:
                continue
            if given.is_only or not answer.repeated:
                firsts[given.caller, campaign_of(given.command.offer)].append(given)
        for (caller, campaign), found in firsts.items():
            where = f"caller {caller}, campaign {campaign}"
            earlier, lost = list[int](), -1
            for given in sorted(found, key=lambda one: one.order):
                call, answer = given.order[0], given.answer
                event = self._event_of(answer)
                if not is_of(event, given.command) or event["at"] != answer.at:
                    lost = call if given.promise == "decided" and not answer.repeated else lost
                    continue
                if call == lost:
                    self.violations.append(
                        f"{where}: {given.command.id} is there, an earlier one of its list is lost"
                    )
                self.violations += [
                    f"{where}: {given.command.id} at seq {answer.seq} stands before an earlier command, at "
                    f"seq {seq}"
                    for seq in earlier
                    if seq > answer.seq
                    and not self._may_have_been_refused(answer.shard or 0, seq, answer.seq)
                ]
                earlier.append(answer.seq)

    def check_topic_order(self, sent: Iterable[Identity]) -> None:
        """The events of commands of one partition stand in the order of their records and lists: `sent` has
        the commands.

        A record may be delivered again, and a refusal need not be known then. So a command may be granted
        after later ones. But once it has had an event, which Redis has lost, it is decided again before them.
        """
        first_events = {
            identity_of_event(event): (event["seq"], line)
            for reading in self.journal
            for event, line in zip(reversed(reading.events), reversed(reading.lines), strict=True)
        }
        latest: dict[str, tuple[int, Identity]] = {}
        for command in dict.fromkeys(sent):
            if command not in first_events:
                continue
            campaign = campaign_of(command[0])
            seq, line = first_events[command]
            before, earlier = latest.get(campaign, (0, ()))
            if seq > before:
                latest[campaign] = (seq, command)
                continue
            moments = self._moments[earlier]
            first, last = min(moments.values()), moments[first_events[earlier][1]]
            # Perhaps by another decider, which had it before, and continues with what came after it.
            has_been_refused = any(moment < last for moment in self._refused[earlier])
            if first < self._moments[command][line] and not has_been_refused:
                self.violations.append(
                    f"topic: {'/'.join(command)}, at seq {seq}, stands before the earlier "
                    f"{'/'.join(earlier)}, at seq {before}"
                )

    def _may_have_been_refused(self, shard: int, seq: int, before: int) -> bool:
        """Whether the command of an event may have been refused when an event at seq `before` was decided:
        Redis has lost such a refusal, and another owner has the shard since, and no event of the command was
        lost.
        """
        reading = self.journal[shard]
        is_later = reading.terms[seq - 1] > reading.terms[before - 1]
        times_decided = len(self._decided_at(shard, identity_of_event(reading.events[seq - 1])))
        # The owner that rebuilds a shard has journaled what was decided before.
        return (self.loses_refusals or (self.loses and is_later)) and times_decided == 1

    def _decided_at(self, shard: int, command: Identity) -> set[int]:
        """When scripts have decided a command with an event, at any server (ms since 1970 UTC)."""
        text = f'"command":"{command[-1]}"'.encode()
        lines = [line for of_seq in self._made[shard].values() for line in of_seq if text in line]
        return {event["at"] for event in map(json.loads, lines) if identity_of_event(event) == command}

    def check_lists(self) -> None:
        """In one list, the first command about a grab, or an offer, that an earlier one has made finds it."""
        retired = self.retired_offers()
        made: dict[tuple[tuple[int, int], str, str], tuple[str, str | None]] = {}
        for given in sorted(self.given, key=lambda one: (one.caller, one.order)):
            command, outcome, call = given.command, given.answer.outcome, (given.caller, given.order[0])
            if not given.is_only or command.offer in retired:
                continue
            # The outcome of a basket that is refused may be about another grab of it.
            if isinstance(command, Grab) and command.basket and not given.answer.positive:
                continue
            about = command.grab if isinstance(command, GrabCommand) else ""
            maker, user = made.pop((call, command.offer, about), (None, None))
            is_others = isinstance(command, GrabCommand) and command.user not in (None, user)
            if maker is not None and outcome in ("no_such_grab", "no_such_offer") and not is_others:
                self.violations.append(
                    f"caller {given.caller}: {command.id} got {outcome} after {maker} of the same list"
                )
            if isinstance(command, Open) and outcome == "opened":
                made[call, command.offer, ""] = (command.id, None)
            elif isinstance(command, Grab) and outcome in ("held", "waiting"):
                made[call, command.offer, command.id] = (command.id, command.user)

    def check_times(self) -> None:
        """Of a list, a command that has an event was not decided while an earlier one, whose event Redis had
        lost, still had to be decided again; by the times of their decisions.
        """
        earlier: dict[tuple[int, int, int], list[Given]] = defaultdict(list)
        for given in sorted(self.given, key=lambda one: (one.caller, one.order)):
            answer = given.answer
            if not given.is_only or answer.shard is None or answer.at is None:
                continue
            of_list = earlier[given.caller, given.order[0], answer.shard]
            if answer.seq is not None and is_of(self._event_of(answer), given.command):
                self.violations += [
                    f"caller {given.caller}: {given.command.id} was decided at {answer.at}, {one.command.id} "
                    f"of the same list was lost, and decided again at {one.answer.at}"
                    for one in of_list
                    if (one.answer.at or 0) > answer.at
                    and min(self._decided_at(answer.shard, identity_of(one.command)), default=answer.at)
                    < answer.at
                ]
            of_list.append(given)

    def refusals_counted(self) -> "Counter[tuple[int, int, int, str]]":
        """How many refusals callers were given, by (shard, second, code, offer): those that are counted. Not
        counted are repeats, what may be corrected under its id (`invalid`), what has an answer already
        (`conflict`), and payments that have an event.
        """
        refused = {
            (
                answer.shard,
                answer.at // 1_000,
                answer.code,
                answer.offer,
                identity_of(given.command),
                answer.at,
            )
            for given in self.given
            for answer in (given.answer,)
            if answer.shard is not None
            and answer.at is not None
            and not answer.repeated
            and answer.code > Outcome.conflict
            and (answer.seq is None or answer.outcome == "already_taken")
            # Offers that were never opened are counted together, and not for each grab of a basket.
            and answer.outcome != "no_such_offer"
        }
        return Counter((shard, second, code, offer or "") for shard, second, code, offer, *_ in refused)

    def refusals_remembered(self) -> list[set[Identity]]:
        """By shard, the commands whose refusals callers were given, and that are remembered: not what is
        not counted either, nor what concerns an offer that has retired, nor a payment without an offer.
        """
        retired = self.retired_offers()
        found: list[set[Identity]] = [set() for _ in self.journal]
        for given in self.given:
            answer, command = given.answer, given.command
            if answer.shard is None or answer.repeated or answer.code <= Outcome.conflict:
                continue
            if (answer.seq is None or answer.outcome == "already_taken") and not (
                command.offer in retired or (isinstance(command, Confirm) and answer.message)
            ):
                found[answer.shard].add(identity_of(command))
        return found

    def retired_offers(self) -> set[str]:
        """The offers that have retired, by the journal."""
        return {
            event["offer"] for one in self.journal for event in one.events if event["type"] == "offer.retired"
        }

    def of_retired(self, most: int) -> list[AnyCommand]:
        """Commands about grabs of retired offers, which are answered as if there had never been any."""
        retired = self.retired_offers()
        found = {
            identity_of(given.command): given.command
            for given in self.given
            if given.command.offer in retired
            and given.answer.positive
            and not isinstance(given.command, Confirm | Open)
            and getattr(given.command, "basket", None) is None
        }
        return list(found.values())[-most:]

    def repeatable(self, most: int) -> list[Given]:
        """Answers that must be given again: the first ones of commands whose offers are still there."""
        retired = self.retired_offers()
        found: dict[Identity, Given] = {}
        for given in self.given:
            command, answer = given.command, given.answer
            if command.offer in retired or not answer.positive or answer.seq is None or answer.repeated:
                continue
            if given.promise != "journaled" or getattr(command, "basket", None) is not None:
                continue
            if isinstance(command, GrabCommand) and self._event_of(answer)["command"] != command.id:
                continue
            found.setdefault(identity_of(command), given)
        return list(found.values())[-most:]

    def _event_of(self, answer: Answer) -> Any:
        assert answer.shard is not None
        assert answer.seq is not None
        events = self.journal[answer.shard].events
        return events[answer.seq - 1] if answer.seq <= len(events) else {"command": None, "at": None}


def _are_served(state: ShardState, name: str) -> bool:
    """Whether a sweep would serve users who wait for an offer."""
    state = deepcopy(state)
    return bool(serve(state, state.offers[name], SWEEP, state.time))


def _of_door(given: Given, may_fail: Callable[[AnyCommand], bool]) -> str | None:
    """What is wrong with an answer of no shard: such are `invalid`, since the command may reach no script, or
    only by a gate, or since scripts fail for it.
    """
    command, answer = given.command, given.answer
    try:
        check(command)
        is_legal = not (given.caller < 0 and isinstance(command, Load) and command.what == "codes")
    except Invalid:
        is_legal = False
    if answer.outcome == "invalid" and (not is_legal or may_fail(command)):
        return None
    return f"no shard has given this answer: {answer}, to {command}"
