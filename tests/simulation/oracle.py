"""What must be true, said without the code under test: after each record, after each call of a script, after
each answer, and when everything is at rest.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

from grabstream.models.answers import Answer
from grabstream.models.commands import AnyCommand, Grab, GrabCommand
from grabstream.models.identifiers import campaign_of
from tests.lua.histories.books import check_books
from tests.lua.histories.promises import check_promises
from tests.simulation.kafka_broker import Record
from tests.simulation.redis_server import Server, SimulatedScript

LINE_BYTES_MAX: Final = 262_144


class Violation(Exception):
    """An invariant is broken."""


class JournalReading:
    """A partition of the journal as docs/protocol.md says it is read."""

    def __init__(self, shard: int) -> None:
        self.shard = shard
        self.lines: list[bytes] = []
        self.terms: list[int] = []
        self.events: list[Any] = []
        self.head = bytes(32)
        self.term = 0
        self.owner = b""

    def read(self, record: Record) -> None:
        """Reads a record; raises Violation when it counts and does not continue what there is."""
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
        first = int(named["first_seq"])
        lines = (record.value or b"").split(b"\n")
        if len(lines) != count:
            raise Violation(f"{where}: {len(lines)} lines, {count} are announced")
        if first > len(self.lines) + 1:
            raise Violation(f"{where}: begins at seq {first}, the last one is {len(self.lines)}")
        known = self.lines[first - 1 : first - 1 + count]
        if known != lines[: len(known)]:
            raise Violation(f"{where}: another history from seq {first} on")
        for line in lines[len(known) :]:
            self.head = hashlib.sha256(self.head + line).digest()
            self.lines.append(line)
            self.terms.append(term)
            self.events.append(json.loads(line))
            if len(line) > LINE_BYTES_MAX:
                raise Violation(f"{where}: an event of {len(line)} bytes")
        if known == lines:
            return
        if first + count - 1 == len(self.lines) and self.head.hex().encode() != named["head"]:
            raise Violation(f"{where}: the chain does not lead to the head that the record names")


class Given:
    """An answer that a caller was given."""

    __slots__ = ("answer", "caller", "command", "gate", "order", "promise")

    def __init__(
        self, caller: int, order: int, command: AnyCommand, answer: Answer, promise: str, gate: object
    ) -> None:
        self.caller = caller
        self.order = order
        self.command = command
        self.answer = answer
        self.promise = promise
        self.gate = gate


class Oracle:
    """Watches a run."""

    def __init__(self, shards: int, limits_outbox: int) -> None:
        self.journal = [JournalReading(shard) for shard in range(shards)]
        self.given: list[Given] = []
        self.lost: set[tuple[str, str]] = set()
        self.violations: list[str] = []
        self._outbox_max = limits_outbox

    # -- as it happens ---------------------------------------------------------------------------------------

    def appended(self, record: Record) -> None:
        """After each record of the journal."""
        try:
            self.journal[record.partition].read(record)
        except Violation as error:
            self.violations.append(str(error))

    def called(
        self,
        server: Server,
        script: SimulatedScript,
        args: Sequence[Any],
        reply: Any,
        before: Any,
        after: Any,
    ) -> None:
        """After each call of a deciding script: no event is made while the shard is fenced."""
        (was_seq, was_life), (seq, _) = before[0], after[0]
        if int(seq or 0) > int(was_seq or 0) and (was_life or b"").decode() != server.epoch:
            self.violations.append(
                f"{server.name}: {script.name} decided seq {int(seq)} while the shard was fenced ({args[3]})"
            )

    def answered(self, given: Given) -> None:
        """After each answer: what was promised as journaled is in the journal, as it was said."""
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
        if event["offer"] != command.offer:
            return f"{said}, where the journal has {event}"
        if isinstance(command, Grab) and (
            (event["command"] != command.id and answer.outcome != "already_taken")
            or (answer.outcome == "granted" and event.get("amount") != answer.amount)
        ):
            return f"{said}, amount {answer.amount}, where the journal has {event}"
        return None

    # -- in the end ------------------------------------------------------------------------------------------

    def check_journal(self) -> None:
        """The books and the promises of each shard."""
        for reading in self.journal:
            for check in (check_books, check_promises):
                try:
                    check(reading.lines)
                except AssertionError as error:
                    self.violations.append(f"shard {reading.shard}: {check.__name__}: {str(error)[:400]}")

    def check_answers(self) -> None:
        """Every answer given as journaled is there; every one given as decided is there or was reported."""
        for given in self.given:
            problem = self._missing(given)
            if problem and (given.promise == "journaled" or not self._is_reported(given)):
                self.violations.append(f"in the end ({given.promise}): {problem}")

    def _is_reported(self, given: Given) -> bool:
        gate_died = not getattr(given.gate, "alive", True)
        known = (campaign_of(given.command.offer), given.command.id)
        return gate_died or given.answer.repeated or known in self.lost

    def check_order(self) -> None:
        """The events of commands that a caller sent in one call, or one after the other, stand in that
        order.
        """
        firsts: dict[tuple[int, str], list[tuple[int, int, str]]] = defaultdict(list)
        for given in self.given:
            answer, command = given.answer, given.command
            if given.promise != "journaled" or not answer.positive or answer.seq is None or answer.repeated:
                continue
            assert answer.shard is not None
            events = self.journal[answer.shard].events
            if answer.seq <= len(events) and events[answer.seq - 1]["command"] == command.id:
                key = given.caller, campaign_of(command.offer)
                firsts[key].append((given.order, answer.seq, command.id))
        for (caller, campaign), found in firsts.items():
            last = 0
            for _, seq, command_id in sorted(found):
                if seq < last:
                    self.violations.append(
                        f"caller {caller}, campaign {campaign}: {command_id} at seq {seq} stands before an "
                        f"earlier command, at seq {last}"
                    )
                last = max(last, seq)

    def repeatable(self, most: int) -> list[Given]:
        """Answers that must be given again: the first ones of commands whose offers are still there."""
        retired = {
            event["offer"]
            for reading in self.journal
            for event in reading.events
            if event["type"] == "offer.retired"
        }
        found: dict[tuple[str, str], Given] = {}
        for given in self.given:
            command, answer = given.command, given.answer
            if command.offer in retired or not answer.positive or answer.seq is None or answer.repeated:
                continue
            if given.promise != "journaled" or getattr(command, "basket", None) is not None:
                continue
            if isinstance(command, GrabCommand) and self._event_of(answer)["command"] != command.id:
                continue
            found.setdefault((campaign_of(command.offer), command.id), given)
        return list(found.values())[-most:]

    def _event_of(self, answer: Answer) -> Any:
        assert answer.shard is not None
        assert answer.seq is not None
        events = self.journal[answer.shard].events
        return events[answer.seq - 1] if answer.seq <= len(events) else {"command": None}
