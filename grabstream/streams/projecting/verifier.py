"""The verifier: follows the read models, compares all of them with the audit trail, and records the verified
positions.

A pass covers every shard, and then a page of accounts and offers:

1. The walk: chain the rows of the audit trail, compare each with the ledger's rows, and fold the events into
   the expected accounts and offers.
2. Where the walk has caught up, the next round: the same rows again, because verified rows may be changed
later.
3. Compare accounts and users' balances with the fold.
4. Compare offers, in the read model and in Redis, with the fold at the same event.
5. From time to time, compute the rows of grabs and payments of a few unchanged offers again from their
events, and compare them.

In parallel, at the same pace, each key of Redis is compared with its value by the journal, shard by shard.
Between passes the verifier pauses, so that it uses only its share of the time. Per system one verifier works;
the others wait for its lock.

It answers whether a stored number has diverged from its events, by its own sums (`checking/proof.py`) that it
keeps in SQL and continues from a cursor. `grabstream verify` answers whether every row and key now follows
from the journal, by the functions that make them, in one snapshot. Both compare rows of grabs and payments
with `checking/rebuilt.py`, whose comparison a rebuild makes before its switch, and keys of Redis with
`ops/verification/redis_keys.py`.
"""

import asyncio
import hashlib
import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import psycopg
from psycopg import AsyncConnection, IsolationLevel
from redis.exceptions import ResponseError

from grabstream.lua.keys import KeySpace
from grabstream.lua.server import server_epoch_of
from grabstream.models.bounds import shortened
from grabstream.models.journal import Cursor
from grabstream.models.runs import decode_line
from grabstream.models.transfers import transfers_of
from grabstream.projections import cursors
from grabstream.projections.checking import proof, trail, verified
from grabstream.projections.checking.proof import AuditedEvent, Gaps, OfferState, Walked, numbers_in_words
from grabstream.projections.checking.rebuilt import RebuiltModels
from grabstream.projections.checking.verified import ALL_SHARDS, RecordedProblem, VerifiedTo
from grabstream.projections.database import locks
from grabstream.projections.database.migrate import PROJECTIONS, use_schema
from grabstream.projections.database.sessions import bound_locks, connect
from grabstream.projections.tables import set_aside
from grabstream.projections.tables.set_aside import SetAsideRecord
from grabstream.runtime.ending import first_to_end, running
from grabstream.runtime.trouble import is_trouble
from grabstream.streams.clients import Trouble, error_text

log = logging.getLogger(__name__)

#: Hashing and decoding this many events takes some ms, in an event loop that other tasks may share.
EVENTS_A_STEP: Final = 250
#: Steps of a lagging shard before the next shard has its turn.
STEPS_A_PASS: Final = 16
ROWS_A_PAGE: Final = 500
#: Accounts are compared only while the ledger is at most this many events ahead of the walk, because its rows
#: after the walk are added up each time.
AHEAD_EVENTS_MAX: Final = 2_000
OBSERVATIONS_MAX: Final = 10_000
#: How often rows of grabs and payments are computed again from events, of how many offers, and from about how
#: many events each time.
ROWS_EVERY_SECONDS: Final = 10.0
ROWS_OFFERS_MAX: Final = 100
ROWS_EVENTS_MAX: Final = 5_000
REST_SECONDS_MIN: Final = 0.25
#: The time that a pass counts for at least when it has compared everything there is: 5 s of rest with the
#: default settings.
COMPLETE_SECONDS_MIN: Final = 0.125
#: The longest rest after a pass. A waiter for the verifier may wait this long, and a pass that took long
#: because the machine stood still is not followed by hours of rest.
REST_SECONDS_MAX: Final = 1_800.0
RETRY_SECONDS: Final = 2.0
#: How long Redis may take to answer about a shard.
ANSWER_SECONDS_MAX: Final = 2.0

T = TypeVar("T")


#: The fields of an offer in Redis with the numbers that are compared.
NUMBERS: Final = ("offer_seq", "amount_left", "units_left", "held", "places")


class Observation(NamedTuple):
    """The numbers that Redis had of an offer after its event `offer_seq`, in one history of the shard."""

    history: str
    offer_seq: int
    numbers: tuple[int, int, int, int]

    def in_words(self) -> str:
        """The numbers, for a finding."""
        return numbers_in_words(self.numbers)


#: Called with a shard and a share of the time; returns the differences between the shard's keys in Redis and
#: its journal, in words, or None if they cannot be compared now.
CompareKeys = Callable[[int, float], Awaitable[list[str] | None]]


class Seen(NamedTuple):
    """The contents of one snapshot of PostgreSQL: the verified position of each shard, the cursors of the
    read models, and the records that they lack.
    """

    at: dict[int, VerifiedTo]
    cursors: dict[str, dict[int, Cursor]]
    aside: list[SetAsideRecord]


class Verifier:
    """Verifies until stopped. `share` is the part of the time that it may use, above 0 and at most 1. `redis`
    must not decode replies.

    With `compare_keys`, half of that time is spent on the keys of Redis, shard by shard.
    """

    def __init__(
        self, redis: Any, keys: KeySpace, postgres: str, schema: str, share: float,
        compare_keys: CompareKeys | None = None
    ) -> None:  # fmt: skip
        self._redis = redis
        self._keys = keys
        self._postgres = postgres
        self._schema = schema
        self._compare_keys = compare_keys
        self._share = share if compare_keys is None else share / 2
        self._troubles = [Trouble(log, f"verifier, shard {shard} in Redis") for shard in range(keys.shards)]
        self._observed: dict[str, Observation] = {}
        self._met: list[tuple[OfferState, Observation]] = []
        self._account = ("", "")
        self._offer = ""
        self._rows_offer = ""
        self._rows_at = 0.0
        #: Shards whose keys agreed when they were compared last, and whose findings were cleared then.
        self._keys_agree: set[int] = set()
        #: Whether there was a finding to clear when this pass began, or it has recorded one.
        self._has_findings = True
        #: Whether the last pass has compared every row there is.
        self._is_complete = False

    async def run(self, stop: asyncio.Event) -> None:
        """Verifies until `stop`; waits for servers that are down."""
        trouble = Trouble(log, "verifier")
        while not stop.is_set():
            try:
                await self._run(stop, trouble)
            except psycopg.errors.UndefinedTable as error:
                trouble.say(f"tables are missing ({error.diag.message_primary}): run `grabstream init`")
                await _pause(stop, RETRY_SECONDS)
            except BaseException as error:
                # Errors of PostgreSQL included: a wrong row in the verifier's tables stops only the verifier,
                # and `doctor` reports that.
                if not (is_trouble(error) or isinstance(error, psycopg.Error | LookupError)):
                    raise
                trouble.say(error_text(error))
                await _pause(stop, RETRY_SECONDS)

    async def _run(self, stop: asyncio.Event, trouble: Trouble) -> None:
        async with await connect(self._postgres, self._schema) as connection:
            await use_schema(connection, self._schema)
            await bound_locks(connection)
            await connection.execute("SET synchronous_commit = off")
            while not await locks.take(connection, verified.lock_of(self._schema)):
                if await _pause(stop, RETRY_SECONDS):
                    return
            await verified.begin(connection, self._keys.shards)
            # The previous holder of the lock may have recorded findings.
            self._keys_agree.clear()
            await connection.set_isolation_level(IsolationLevel.REPEATABLE_READ)
            work = [self._walk_on(connection, stop, trouble)]
            if self._compare_keys is not None:
                work.append(self._compare_all_keys(self._compare_keys, stop))
            async with running(*work) as tasks:
                await first_to_end(tasks)

    async def _walk_on(self, connection: AsyncConnection[Any], stop: asyncio.Event, trouble: Trouble) -> None:
        while not stop.is_set():
            began = time.monotonic()
            can_continue = await self.verify_once(connection)
            trouble.over()
            took = time.monotonic() - began
            if self._is_complete:
                took = max(took, COMPLETE_SECONDS_MIN)
            rest = min(took * (1 / self._share - 1), REST_SECONDS_MAX)
            await _pause(stop, max(rest, 0 if can_continue else REST_SECONDS_MIN))

    # -- every key of Redis ----------------------------------------------------------------------------------

    async def _compare_all_keys(self, compare: CompareKeys, stop: asyncio.Event) -> None:
        """Compares the keys of all shards repeatedly."""
        trouble, shard = Trouble(log, "verifier, keys of Redis"), 0
        while not await _pause(stop, REST_SECONDS_MIN / self._share):
            try:
                differences = await compare(shard, self._share)
                if differences is not None:
                    await self._judge_keys(shard, differences)
                trouble.over()
                shard = (shard + 1) % self._keys.shards
            except BaseException as error:
                if not (is_trouble(error) or isinstance(error, psycopg.Error)):
                    raise
                trouble.say(error_text(error))
                # A shard whose server hangs does not delay the others.
                shard = (shard + 1) % self._keys.shards

    async def _judge_keys(self, shard: int, differences: Sequence[str]) -> None:
        problems = [
            RecordedProblem(_subject(line), line)
            for line in (line.removeprefix(f"shard {shard}: ") for line in differences)
        ]
        # The numbers of an offer are compared in each pass, and reported there.
        problems = [problem for problem in problems if not _number_of_offer(problem.subject)]
        if not problems and shard in self._keys_agree:
            return
        self._keys_agree.discard(shard)
        async with await connect(self._postgres, self._schema) as connection:
            await use_schema(connection, self._schema)
            await bound_locks(connection)
            await self._judge(connection, "keys", shard, None, problems)
        if not problems:
            self._keys_agree.add(shard)

    async def verify_once(self, connection: AsyncConnection[Any]) -> bool:
        """One pass; returns whether the walk can continue at once."""
        can_continue, self._is_complete = False, True
        to_observe: list[OfferState] | None = None
        async with connection.transaction():
            self._has_findings = await verified.has_findings(connection)
            seen = await self._look(connection)
            gaps = {shard: Gaps(seen.aside, shard) for shard in range(self._keys.shards)}
            seen = await self._update_gaps(connection, gaps, seen)
            at_rest = self._at_rest(seen)
            if len(at_rest) == self._keys.shards:
                # Nothing moves before the comparison: it uses the same snapshot.
                await self._compare_accounts(connection, seen)
                to_observe = await self._compare_offers(connection, gaps, seen)
        for shard in range(self._keys.shards):
            if shard in at_rest:
                continue
            for _ in range(STEPS_A_PASS):
                async with connection.transaction():
                    after = await self._walk(connection, shard, gaps[shard])
                if not after:
                    break
            can_continue |= after
        if to_observe is None:
            async with connection.transaction():
                await self._compare_accounts(connection, await self._look(connection))
                await verified.clear_gone(connection)
            async with connection.transaction():
                to_observe = await self._compare_offers(connection, gaps, await self._look(connection))
        await self._judge_met(connection)
        await self._observe_all(connection, to_observe)
        if time.monotonic() >= self._rows_at:
            async with connection.transaction():
                await self._compare_rows(connection, gaps)
            self._rows_at = time.monotonic() + ROWS_EVERY_SECONDS
        await verified.record_pass(connection)
        return can_continue

    async def _look(self, connection: AsyncConnection[Any]) -> Seen:
        return Seen(
            await verified.progress(connection),
            await cursors.load_all(connection, PROJECTIONS),
            await set_aside.load(connection),
        )

    async def _update_gaps(self, connection: AsyncConnection[Any], gaps: dict[int, Gaps], seen: Seen) -> Seen:
        """Starts again from the first event if read models have events that they lacked, or lack verified
        ones: then another version is live.
        """
        at = seen.at
        changed = [
            shard
            for shard, shard_gaps in gaps.items()
            if shard in at and set(shard_gaps.ids) != set(at[shard].gaps)
        ]
        for shard in changed:
            known, firsts = set(at[shard].gaps), gaps[shard].ids
            if known - firsts.keys() or any(firsts[new] <= at[shard].seq for new in firsts.keys() - known):
                log.warning("verifier: a read model has other events than before: verifying everything again")
                await verified.reset_progress(connection)
                self._observed.clear()
                break
        for shard in changed:
            await verified.set_gaps(connection, shard, sorted(gaps[shard].ids))
        return await self._look(connection) if changed else seen

    # -- the walk --------------------------------------------------------------------------------------------

    def _at_rest(self, seen: Seen) -> set[int]:
        """The shards of which there is nothing to walk, and no finding to clear."""
        if self._has_findings:
            return set()
        at_rest = set()
        for shard, at in seen.at.items():
            positions = {name: by_shard.get(shard, Cursor()) for name, by_shard in seen.cursors.items()}
            end = min(positions[proof.AUDIT].seq, positions[proof.LEDGER].seq)
            is_walked = at.seq >= end and at.again_seq >= end
            if is_walked and all(
                cursor.head == at.head for cursor in positions.values() if cursor.seq == at.seq
            ):
                at_rest.add(shard)
        return at_rest

    async def _walk(self, connection: AsyncConnection[Any], shard: int, gaps: Gaps) -> bool:
        at = (await verified.progress(connection))[shard]
        loaded = await cursors.load_all(connection, PROJECTIONS)
        positions = {name: by_shard.get(shard, Cursor()) for name, by_shard in loaded.items()}
        end = min(positions[proof.AUDIT].seq, positions[proof.LEDGER].seq)
        if at.seq >= end:
            await self._compare_heads(connection, at, positions)
            await self._walk_again(connection, at, end, gaps)
            return False
        walked, full = await self._step(connection, shard, at.seq, at.head, end, gaps)
        await self._fold(connection, walked.facts)
        if walked.seq > at.seq:
            await verified.move(connection, shard, walked.seq, walked.head)
        return full and walked.wrong is None

    async def _walk_again(
        self, connection: AsyncConnection[Any], at: VerifiedTo, end: int, gaps: Gaps
    ) -> None:
        # A read model that has just become live may not have all these events yet.
        if at.again_seq >= end:
            return
        walked, _ = await self._step(connection, at.shard, at.again_seq, at.again_head, end, gaps)
        done = walked.seq >= at.seq
        self._is_complete &= done
        if done:
            what = f"the audit trail up to seq {at.seq} is not the one that was verified before"
            problems = [RecordedProblem("round", what, at.seq)] if walked.head != at.head else []
            await self._judge(connection, "heads", at.shard, ["round"], problems)
        await verified.move_again(connection, at.shard, walked.seq, walked.head, done)

    async def _step(
        self, connection: AsyncConnection[Any], shard: int, seq: int, head: bytes, end: int, gaps: Gaps
    ) -> tuple[Walked, bool]:  # fmt: skip
        rows = await trail.lines(connection, shard, seq, EVENTS_A_STEP, end)
        reach = rows[-1].last_seq if rows else seq
        full = reach - seq >= EVENTS_A_STEP
        if not full:
            reach = end
        lines = await verified.ledger_rows(connection, shard, seq, reach)
        walked = proof.walk(shard, seq, head, rows, lines, gaps, None if full else end)
        await verified.clear_range(connection, shard, seq, walked.seq)
        if (wrong := walked.wrong) is not None:
            problem = RecordedProblem(f"seq {wrong.seq}", wrong.what, wrong.seq)
            await self._judge(connection, wrong.kind, shard, [], [problem])
        return walked, full

    async def _compare_heads(
        self, connection: AsyncConnection[Any], at: VerifiedTo, positions: dict[str, Cursor]
    ) -> None:
        """If a projection is at exactly the verified seq, its hash must be the trail's."""
        compared = {name: cursor for name, cursor in positions.items() if cursor.seq == at.seq}
        problems = [
            RecordedProblem(
                name,
                f"{name}: the hash at seq {at.seq} is not that of the audit trail: it followed another "
                "history",
                at.seq,
            )
            for name, cursor in compared.items()
            if cursor.head != at.head
        ]
        await self._judge(connection, "heads", at.shard, list(compared), problems)

    async def _fold(self, connection: AsyncConnection[Any], facts: Sequence[AuditedEvent]) -> None:
        if not facts:
            return
        await verified.add_accounts(connection, proof.account_changes(facts))
        events = [fact.event for fact in facts if fact.event is not None]
        states: dict[str, OfferState] = await verified.offer_states(
            connection, sorted({event.offer for event in events})
        )
        for event in events:
            state = states[event.offer] = proof.after(states.get(event.offer), event)
            observed = self._observed.get(event.offer)
            if observed is not None and observed.offer_seq == state.offer_seq:
                self._met.append((state, self._observed.pop(event.offer)))
        await verified.save_offers(connection, states.values())

    # -- comparing -------------------------------------------------------------------------------------------

    async def _compare_accounts(self, connection: AsyncConnection[Any], seen: Seen) -> None:
        """Compares the next page of accounts, and the balances that users see, with the fold."""
        ledger, balances = seen.cursors["ledger"], seen.cursors["balances"]
        ahead = [_seq(ledger, shard) - position.seq for shard, position in seen.at.items()]
        if min(ahead) < 0 or sum(ahead) > AHEAD_EVENTS_MAX:
            return
        abreast = all(_seq(balances, shard) == cursor.seq for shard, cursor in ledger.items()) and not any(
            record.projection in ("balances", "ledger") and record.event_count for record in seen.aside
        )
        rows = await verified.accounts_after(connection, *self._account, ROWS_A_PAGE, abreast)
        self._account = (rows[-1].account, rows[-1].asset) if len(rows) == ROWS_A_PAGE else ("", "")
        self._is_complete &= len(rows) < ROWS_A_PAGE
        accounts, shown = [], []
        for row in rows:
            subject = f"{row.account} {row.asset}"
            if row.posted != row.expected:
                accounts.append(
                    RecordedProblem(
                        subject,
                        f"account {subject} has {row.posted}, its events lead to {row.expected}",
                    )
                )
            elif row.balance is not None and row.balance != row.posted:
                shown.append(
                    RecordedProblem(
                        subject, f"balances: {subject} has {row.balance}, the ledger has {row.posted}"
                    )
                )
        subjects = [f"{row.account} {row.asset}" for row in rows]
        await self._judge(connection, "accounts", ALL_SHARDS, subjects, accounts)
        if abreast:
            await self._judge(connection, "balances", ALL_SHARDS, subjects, shown)

    async def _compare_offers(
        self, connection: AsyncConnection[Any], gaps: dict[int, Gaps], seen: Seen
    ) -> list[OfferState]:
        """Compares the read model's rows of the next page of offers with the fold. Returns the offers to
        observe in Redis.
        """
        audit, balances = seen.cursors["audit"], seen.cursors["balances"]
        seqs = {
            shard: (position.seq, _seq(balances, shard), _seq(audit, shard))
            for shard, position in seen.at.items()
        }
        near = [shard for shard, (seq, _, audited) in seqs.items() if audited - seq <= AHEAD_EVENTS_MAX]
        rows = await verified.offers_after(connection, self._offer, ROWS_A_PAGE, near)
        self._offer = rows[-1][0].offer if len(rows) == ROWS_A_PAGE else ""
        self._is_complete &= len(rows) < ROWS_A_PAGE
        comparable = [
            row
            for row in rows
            if not gaps[row[0].shard].unreadable and row[0].offer not in gaps[row[0].shard].offers
        ]
        compared, problems = [], []
        for state, shown, moved in comparable:
            here, shown_to, audited = seqs[state.shard]
            if moved or not here <= shown_to <= audited:
                continue
            compared.append(state.offer)
            if shown != state.numbers:
                has = "no row" if shown is None else numbers_in_words(shown)
                problems.append(
                    RecordedProblem(
                        state.offer,
                        f"offers: {state.offer} has {has}; its events lead to {state.in_words()}",
                    )
                )
        await self._judge(connection, "balances", ALL_SHARDS, compared, problems)
        return [state for state, *_ in comparable if not state.retired]

    async def _observe_all(self, connection: AsyncConnection[Any], states: Sequence[OfferState]) -> None:
        """Compares the state of offers in Redis with the fold when the walk is at the same event, now or
        later.
        """
        by_shard: dict[int, list[OfferState]] = {}
        for state in states:
            by_shard.setdefault(state.shard, []).append(state)
        for shard, shard_states in by_shard.items():
            await self._observe(connection, shard, shard_states)

    async def _compare_rows(self, connection: AsyncConnection[Any], gaps: dict[int, Gaps]) -> None:
        """Compares the grabs and payments of the next offers without new events with the rows that their
        events make.
        """
        seen = await self._look(connection)
        audit, balances = seen.cursors["audit"], seen.cursors["balances"]
        near = [
            shard
            for shard, position in seen.at.items()
            if position.seq <= _seq(balances, shard) <= _seq(audit, shard) <= position.seq + AHEAD_EVENTS_MAX
        ]
        rows = await verified.offers_after(connection, self._rows_offer, ROWS_OFFERS_MAX, near)
        chosen: dict[str, OfferState] = {}
        events = 0
        self._rows_offer = ""
        for state, _, moved in rows:
            shard_gaps = gaps[state.shard]
            if not moved and not shard_gaps.unreadable and state.offer not in shard_gaps.offers:
                chosen[state.offer] = state
                events += state.offer_seq
            if events >= ROWS_EVENTS_MAX or (
                len(rows) == ROWS_OFFERS_MAX and state.offer == rows[-1][0].offer
            ):
                self._rows_offer = state.offer
                break
        if not chosen:
            return
        for offer, differences in (await self._differences(connection, chosen)).items():
            problems = [RecordedProblem(offer, f"balances: {'; '.join(differences)}")] if differences else []
            await self._judge(connection, "rows", chosen[offer].shard, [offer], problems)

    async def _differences(
        self, connection: AsyncConnection[Any], chosen: dict[str, OfferState]
    ) -> dict[str, list[str]]:
        """The differences by offer, in words, for offers whose events in the audit trail are intact.
        Everything written for it is rolled back.
        """
        known: dict[str, int] = dict.fromkeys(chosen, 0)
        async with connection.transaction(force_rollback=True):
            anew = RebuiltModels(connection, self._schema, ("balances",))
            await anew.begin()
            if anew.other_definition("balances") is not None:
                return {}
            for number, (_, _, body, hash_, before) in enumerate(
                await verified.events_of_offers(connection, list(chosen))
            ):
                fact = _fact(body.encode(), hash_, before or bytes(32))
                # The walk reports damaged events.
                if fact is not None and known.get(fact.event.offer) == fact.event.offer_seq - 1:
                    known[fact.event.offer] += fact.event.seqs
                    await anew.take("balances", fact)
                if number % EVENTS_A_STEP == 0:
                    await asyncio.sleep(0)
            await anew.finish()
            whole = [offer for offer, state in chosen.items() if known[offer] == state.offer_seq]
            return {} if anew.refused else {offer: await anew.offer_differences(offer) for offer in whole}

    async def _observe(
        self, connection: AsyncConnection[Any], shard: int, states: Sequence[OfferState]
    ) -> None:
        answer = await self._answered(shard, self._read(shard, states))
        if answer is None:
            return
        history, seq, offers = answer
        for state, values in zip(states, offers, strict=True):
            if damage := _damage_of(values):
                problem = RecordedProblem(state.offer, f"{state.offer} in Redis: {damage}")
                await self._judge(connection, "redis", shard, [state.offer], [problem])
                continue
            if values[0] is None:
                # Retired or lost: that is certain only if no more events are on their way.
                if seq == (await verified.progress(connection))[shard].seq:
                    problem = RecordedProblem(
                        state.offer, f"{state.offer} is not in Redis, though it has not retired"
                    )
                    await self._judge(connection, "redis", shard, [state.offer], [problem])
                continue
            offer_seq, left, units, held, places = (int(value or 0) for value in values)
            observed = Observation(history, offer_seq, (left, units, held, places))
            if offer_seq <= state.offer_seq:
                await self._judge_redis(connection, state, observed)
            elif len(self._observed) < OBSERVATIONS_MAX or state.offer in self._observed:
                before = self._observed.get(state.offer)
                # The older observation is kept, or the walk would never meet it. One of another history is
                # never met.
                if (
                    before is None
                    or before.history != observed.history
                    or before.offer_seq <= state.offer_seq
                ):
                    self._observed[state.offer] = observed

    async def _read(self, shard: int, states: Sequence[OfferState]) -> tuple[str, int, list[Any]] | None:
        """History and seq of a shard, and the numbers of offers, or the error of an offer's key; None while
        the shard is not reconciled, or its own fields are damaged, which its relay reports.
        """
        keys = self._keys.shard(shard)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hmget(keys.state, ["server_epoch", "history", "seq"])
            for state in states:
                pipe.hmget(keys.offer(state.offer), list(NUMBERS))
            of_shard, *offers = await pipe.execute(raise_on_error=False)
        if isinstance(of_shard, Exception):
            raise of_shard
        shard_epoch, history, seq = (value and value.decode(errors="replace") for value in of_shard)
        # Checked after reading: in another server epoch, what was read may be undone.
        if shard_epoch is None or shard_epoch != await server_epoch_of(self._redis, keys.state):
            return None
        if not history or (seq and not _is_number(seq)):
            return None
        return history, int(seq or 0), offers

    async def _answered(self, shard: int, asking: Awaitable[T]) -> T | None:
        """The answer of Redis about a shard; None while its server does not answer, which does not delay the
        verification of other shards.
        """
        try:
            async with asyncio.timeout(ANSWER_SECONDS_MAX):
                answer = await asking
        except BaseException as error:
            self._troubles[shard].met(error)
            return None
        self._troubles[shard].over()
        return answer

    async def _judge_met(self, connection: AsyncConnection[Any]) -> None:
        """Compares observations of Redis at events that the walk has since reached, unless the shard now has
        another history.
        """
        met, self._met = self._met, []
        for state, observed in met:
            history = await self._answered(
                state.shard, self._redis.hget(self._keys.shard(state.shard).state, "history")
            )
            if history is not None and history == observed.history.encode():
                await self._judge_redis(connection, state, observed)

    async def _judge_redis(
        self, connection: AsyncConnection[Any], state: OfferState, observed: Observation
    ) -> None:
        problems = []
        if observed.offer_seq < state.offer_seq:
            what = (
                f"{state.offer}: Redis is at its event {observed.offer_seq}, the books are at "
                f"{state.offer_seq}"
            )
            problems.append(RecordedProblem(state.offer, what, state.seq))
        elif observed.numbers != state.numbers:
            what = (
                f"{state.offer}, after its event {state.offer_seq}: Redis has {observed.in_words()}; its "
                f"events lead to {state.in_words()}"
            )
            problems.append(RecordedProblem(state.offer, what, state.seq))
        await self._judge(connection, "redis", state.shard, [state.offer], problems)

    # -- findings --------------------------------------------------------------------------------------------

    async def _judge(
        self, connection: AsyncConnection[Any], kind: str, shard: int, subjects: Sequence[str] | None,
        problems: Sequence[RecordedProblem]
    ) -> None:  # fmt: skip
        """Records problems, and clears the findings about the other subjects that were compared (None: all of
        this kind and shard).
        """
        if subjects is None or (subjects and self._has_findings):
            await verified.clear(connection, kind, shard, subjects, [problem.subject for problem in problems])
        for problem in problems:
            self._has_findings = True
            if await verified.record_finding(connection, kind, shard, problem):
                where = "" if shard == ALL_SHARDS else f", shard {shard}"
                log.critical("verification%s: %s", where, problem.what)


_subject_of = re.compile(r": | is (?:not )?in Redis")
_number_of_offer = re.compile(rf"offer:[^/]+, (?:{'|'.join(NUMBERS)})\Z").match
_is_number = re.compile("-?[0-9]{1,18}").fullmatch


def _damage_of(values: list[bytes | None] | Exception) -> str:
    """Why the numbers of an offer cannot be compared, in words; '' if they can."""
    if isinstance(values, ResponseError):
        return f"its key cannot be read: {values}"
    if isinstance(values, Exception):
        raise values
    for name, value in zip(NUMBERS, values, strict=True):
        if value and not _is_number(value.decode(errors="replace")):
            return f"{name} is {shortened(ascii(value))}, not a number"
    return ""


def _subject(line: str) -> str:
    """The subject of a difference: the key, and the field if there is one."""
    return _subject_of.split(line, maxsplit=1)[0]


def _fact(line: bytes, hash_: bytes, before: bytes) -> cursors.Fact | None:
    """An event of the audit trail; None if its text does not match its hash, or is of a newer program."""
    if hashlib.sha256(before + line).digest() != hash_:
        return None
    try:
        event = decode_line(line)
    except msgspec.DecodeError:
        return None
    return cursors.Fact(line, hash_, event, transfers_of(event))


def _seq(positions: dict[int, Cursor], shard: int) -> int:
    return positions.get(shard, Cursor()).seq


async def _pause(stop: asyncio.Event, seconds: float) -> bool:
    """Waits `seconds`, or until `stop`; returns whether it was stopped."""
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return False
    return True
