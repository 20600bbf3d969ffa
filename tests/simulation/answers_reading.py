"""Every answer compared with that of the rules, in a state that its shard was in.

An answer with its own event must be what the rules answered when they made this event. A refusal has none,
and was given by a call at its time: the simulator knows of each call how many events its shard had, so the
rules are asked in these states. Nothing is left to the sweeper: what it had not done yet, the state has.
"""

import json
import pickle
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from grabstream.models.answers import Answer
from grabstream.models.commands import AnyCommand, Grab, basket_of
from grabstream.models.identifiers import campaign_of
from grabstream.models.outcomes import Outcome
from grabstream.models.rules import decide, decide_basket
from grabstream.models.rules.state import as_remembered
from tests.simulation.rules_reading import RulesReading, claims_of, is_of


class Call(NamedTuple):
    """A call of a deciding script: the server's time (ms since 1970 UTC), and the shard's seq before it and
    after it.
    """

    clock_ms: int
    first: int
    last: int


class _Asked(NamedTuple):
    """An answer, and the time (ms since 1970 UTC) at which the rules are asked for it."""

    command: AnyCommand
    answer: Answer
    at: int
    by_topic: bool
    #: In how many states.
    states: int = 1


class AnswersReading:
    """Compares the answers of one shard while the rules read its journal.

    `decided` has the texts that scripts have made of a seq, at any server. A call proves nothing if it began
    with events that Redis has lost since, or made some.
    """

    def __init__(
        self,
        rules: RulesReading,
        lines: Sequence[bytes],
        calls: Iterable[Call],
        decided: Mapping[int, set[bytes]],
    ) -> None:
        self.problems: list[str] = []
        self._rules = rules
        self._events = [json.loads(line) for line in lines]
        self._retired = {event["offer"] for event in self._events if event["type"] == "offer.retired"}
        lost = {seq: texts for seq, texts in decided.items() if texts != set(lines[seq - 1 : seq])}
        #: Time → the seqs before and after each call at this time; None: it proves nothing.
        self._spans: dict[int, set[tuple[int, int] | None]] = defaultdict(set)
        for call in calls:
            span = None if {call.first, call.last} & lost.keys() else (call.first, call.last)
            # The clock of a shard never goes back behind its last event, whichever of these it had.
            befores = [json.loads(text)["at"] for text in lost.get(call.first, ())]
            befores += [event["at"] for event in self._events[max(call.first - 1, 0) : call.first]]
            for before in befores or [0]:
                self._spans[max(call.clock_ms, before)].add(span)
        #: What is asked at each number of events read; what no state has answered so yet.
        self._asked: dict[int, list[_Asked]] = defaultdict(list)
        self._open: dict[int, _Asked] = {}
        self._read = 0

    # -- before the journal is read --------------------------------------------------------------------------

    def take(self, command: AnyCommand, answer: Answer, by_topic: bool, may_be_lost: bool) -> None:
        """An answer of this shard; `may_be_lost`: it was given as decided."""
        if answer.at is None:
            self._say(command, answer, "it has no time")
        elif answer.code >= Outcome.invalid:
            self._take_refusal(command, answer, answer.at, by_topic)
        elif answer.seq is None:
            self._say(command, answer, "it names no event")
        elif not self._has_event(answer.seq, answer.at, command.id if may_be_lost else None):
            # Redis may have lost what it had decided, and have decided it again with the same seq.
            if not may_be_lost:
                self._say(command, answer, "there is no such event")
        else:
            # It does not say when it was found that the effect held: in any state from this event on.
            is_own = is_of(self._events[answer.seq - 1], command)
            asked = _Asked(command, answer, answer.at, by_topic, 1 if is_own else 2)
            self._asked[answer.seq].append(asked)

    def _take_refusal(self, command: AnyCommand, answer: Answer, at: int, by_topic: bool) -> None:
        spans = self._spans.get(at, set())
        # The rules here remember no refusals: another command under the id of one is a conflict, too.
        is_of_id = answer.code == Outcome.conflict and self._rules.has_other_bodies(command)
        if None in spans or (spans and is_of_id):
            return
        seqs = {seq for span in spans if span for seq in range(span[0], span[1] + 1)}
        asked = _Asked(command, answer, at, by_topic, len(seqs))
        self._open[id(asked)] = asked
        for seq in seqs:
            self._asked[seq].append(asked)

    def _has_event(self, seq: int, at: int, command: str | None) -> bool:
        if seq > len(self._events):
            return False
        event = self._events[seq - 1]
        # After a loss, another command may have this seq, and the same time when the clock went back.
        return event["at"] == at and command in (None, event["command"])

    def _say(self, command: AnyCommand, answer: Answer, what: str) -> None:
        self.problems.append(f"{what}: {answer}, to {command}")

    # -- while the journal is read ---------------------------------------------------------------------------

    def ask(self, seq: int) -> None:
        """Asks the rules, which have read `seq` events."""
        found = [
            asked
            for read in range(self._read, seq + 1)
            for asked in self._asked.get(read, ())
            # Within a decision there is no state; what names one of its events is asked after it.
            if read == seq or asked.answer.positive
        ]
        self._read = seq + 1
        if not found:
            return
        state = self._rules.state
        # A copy takes as long as ten decisions. One is needed where the rules may make an event: in a state
        # that may be another than that of the answer.
        saved = pickle.dumps(state) if any(asked.states > 1 for asked in found) else b""
        for asked in found:
            if asked.answer.positive:
                self._ask_for_event(asked, seq)
            elif id(asked) in self._open and any(
                _is_same_refusal(asked.answer, expected) for expected in self._by_rules(asked)
            ):
                del self._open[id(asked)]
            if state.seq != seq:
                if not saved:
                    self._say(asked.command, asked.answer, "the rules make an event")
                    self._open.pop(id(asked), None)
                    return
                vars(state).update(vars(pickle.loads(saved)))
            # No event may depend on what is asked here.
            state.refusals.clear()
            state.demand.clear()

    def _by_rules(self, asked: _Asked) -> Iterable[Answer]:
        """What the rules answer now; to a grab of a basket, in each list that had it."""
        command, state = asked.command, self._rules.state
        if not isinstance(command, Grab) or basket_of(command) is None:
            yield decide(state, command, asked.at, claims_of(command)).answer
            return
        for grabs in self._rules.baskets_of(command):
            saved = pickle.dumps(state)
            decided = decide_basket(state, grabs, asked.at, [claims_of(one) for one in grabs])
            yield decided[grabs.index(command)].answer
            vars(state).update(vars(pickle.loads(saved)))

    def _ask_for_event(self, asked: _Asked, seq: int) -> None:
        """An answer that names an event: its own, or one that already had its effect."""
        if asked.states > 1:
            asked = asked._replace(at=max(asked.at, self._rules.state.time))
        command, answer, by_topic = asked.command, asked.answer, asked.by_topic
        expected = self._rules.answers.get((campaign_of(command.offer), command.id, answer.seq or 0))
        if expected is None or expected.offer != command.offer:
            expected = replace(next(iter(self._by_rules(asked))), repeated=False)
        if by_topic:
            # Codes are secrets, and the topic has many readers.
            expected = replace(expected, coupon_code=None, coupon_codes=(), voided_codes=())
        if answer.repeated and command.offer in self._retired:
            # Its payments are known without details.
            is_same = (answer.outcome, answer.at) == (expected.outcome, expected.at)
        else:
            is_same = replace(answer, repeated=False) == expected
        if is_same:
            return
        if asked.states > 1 and seq < len(self._events):
            self._asked[seq + 1].append(asked)
        else:
            self._say(command, answer, f"the rules answer {expected}")

    def finish(self) -> None:
        """Refusals that no state has given."""
        for asked in self._open.values():
            self._say(asked.command, asked.answer, "the rules answer so in no state that the shard was in")


def _is_same_refusal(answer: Answer, expected: Answer) -> bool:
    """Whether the rules answer so. A refusal is remembered by its outcome and time; a repeat looks the rest
    up again, in a later state.
    """
    if answer.repeated:
        return replace(as_remembered(answer), repeated=False) == as_remembered(expected)
    return answer == expected
