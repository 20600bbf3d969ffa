"""Bugs that once were, put back one at a time (`--without NAME`): some seed should fail then.

They were found by the kill matrix, the drills, the hostile reviews and the crash tests. Each is described by
what went wrong, and put back into today's code as replacements of its text.
"""

from typing import Final, NamedTuple

from tests.simulation.guards import Guard


class Bug(NamedTuple):
    """A bug: its name, what went wrong, and the texts that put it back: (file, before, after)."""

    name: str
    what: str
    texts: tuple[tuple[str, str, str], ...]

    @property
    def edits(self) -> tuple[Guard, ...]:
        """The texts, as guards that can be taken out."""
        return tuple(Guard(self.name, *text) for text in self.texts)


#: Of the deciding scripts.
OF_SCRIPTS: Final = (
    Bug(
        "keys of an offer are those of another",
        "offers named like a part of another one (x:users) shared its keys",
        (
            (
                "grabstream/lua/keys.py",
                'f"{key}/{name}" for name in OFFER_KEYS',
                'f"{key}:{name}" for name in OFFER_KEYS',
            ),
        ),
    ),
    Bug(
        "what has retired is remembered",
        "a repeat about an offer that had retired raised, or was refunded twice",
        (
            (
                "grabstream/lua/includes/decide.lua",
                "retired = redis.call('SISMEMBER', KEYS[10], name) == 1",
                "retired = false",
            ),
        ),
    ),
    Bug(
        "answers of an offer named as its campaign stay",
        "answers of offers without ':' were never forgotten",
        (
            (
                "grabstream/lua/includes/packed_values.lua",
                "if not first then return campaign end",
                "if not first then return '' end",
            ),
        ),
    ),
    Bug(
        "a payment is forgotten with its campaign",
        "a payment that was used again after its campaign had retired was served again",
        (
            (
                "grabstream/lua/includes/past.lua",
                "campaign.counters.key, campaign.tickets_key)",
                "campaign.counters.key, campaign.tickets_key, campaign.payments_key)",
            ),
        ),
    ),
    Bug(
        "a payment of another amount is a repeat",
        "a payment that came again with another amount was answered as before",
        (("grabstream/lua/commands/confirm.lua", "here and not is_another(here, body)", "here"),),
    ),
    Bug(
        "a sum that is no exact integer",
        "price times quantity left the exact range, and the event could not be read",
        (
            (
                "grabstream/lua/commands/grab.lua",
                "if quantities[i] * (offer.rules.price or 0) > AMOUNT_MAX then",
                "if false then",
            ),
            (
                "grabstream/lua/commands/amend.lua",
                "if (changes.price or rules.price or 0) * "
                "(changes.max_per_grab or rules.max_per_grab) > AMOUNT_MAX then",
                "if false then",
            ),
            (
                "grabstream/lua/includes/pieces.lua",
                "return wanted * (offer.rules.price or 0) <= AMOUNT_MAX and wanted or math.huge",
                "return wanted",
            ),
            (
                "grabstream/lua/includes/queue.lua",
                "return math.min(grab.quantity, offer.units_left, payable)",
                "return math.min(grab.quantity, offer.units_left)",
            ),
            (
                "grabstream/lua/includes/runs.lua",
                "if number < 1e14 and number >= 0 and number % 1 == 0 then",
                "if true then",
            ),
        ),
    ),
    Bug(
        "a campaign's limit counts in the zone of each offer",
        "limits of a campaign leaked when the zones of its offers shift differently",
        (
            (
                "grabstream/lua/includes/limits.lua",
                "return is_campaign_wide and offer.rules.campaign_offsets or offer.rules.offsets",
                "return offer.rules.offsets",
            ),
        ),
    ),
    Bug(
        "a campaign's ticket is used once in each offer",
        "a single-use ticket for a campaign was granted on several of its offers",
        (
            (
                "grabstream/lua/includes/offers.lua",
                "local function is_used(offer, once, ends_at, now)\n  if not ends_at then",
                "local function is_used(offer, once, ends_at, now)\n  if true then",
            ),
            (
                "grabstream/lua/includes/offers.lua",
                "local function use_ticket(offer, once, ends_at)\n  if not ends_at then",
                "local function use_ticket(offer, once, ends_at)\n  if true then",
            ),
        ),
    ),
    Bug(
        "who waits for many units keeps the free ones",
        "a grab that waits for many units kept free ones from everybody",
        (
            (
                "grabstream/lua/includes/pieces.lua",
                "return offer.units_left < offer.least_wanted and offer.units_left or 0",
                "return 0",
            ),
        ),
    ),
    Bug(
        "a quantity above the total waits without end",
        "a grab above the total was queued, and could never be served",
        (
            (
                "grabstream/lua/commands/grab.lua",
                "if offer.rules.take == 'all' and quantities[i] > offer.total then",
                "if false then",
            ),
        ),
    ),
    Bug(
        "a code is in two chunks of a list",
        "the same coupon code in two chunks of a list was handed out twice",
        (
            (
                "grabstream/lua/commands/load.lua",
                "local index = index_of_known(offer, names)",
                "local index = nil",
            ),
        ),
    ),
    Bug(
        "codes go with the close",
        "a coupon with codes that was held when its offer closed could not be confirmed",
        (
            (
                "grabstream/lua/includes/offers.lua",
                "if offer.held == 0 then write('UNLINK', KEYS[base + KEY.codes]) end",
                "write('UNLINK', KEYS[base + KEY.codes])",
            ),
        ),
    ),
    Bug(
        "a returned code is given again",
        "the code of a returned coupon, which its user had seen, was given to the next user",
        (
            (
                "grabstream/lua/includes/settling.lua",
                "    if not offer.closed then offer.amount_left = offer.amount_left + quantity end\n",
                "    for _, code in ipairs(details.voided_codes) do\n"
                "      if not offer.closed then offer.codes_new[#offer.codes_new + 1] = code end\n"
                "    end\n"
                "    return_to_offer(offer, quantity)\n",
            ),
        ),
    ),
    Bug(
        "who leaves the queue last lets the offer retire",
        "an offer that closed over its waiting list, whose last waiting user then left, was retired at once",
        (
            (
                "grabstream/lua/includes/queue.lua",
                "if offer.closed then offer.due = due_when_closed(offer, now) end",
                "if offer.closed then offer.due = now end",
            ),
        ),
    ),
    Bug(
        "who waits when an offer closes is left",
        "grabs that waited when their offer closed were not sent home",
        (
            (
                "grabstream/lua/sweeping/sweep.lua",
                "elseif offer.pieces and offer.queue_length > 0 then",
                "elseif false then",
            ),
        ),
    ),
    Bug(
        "who leaves the queue keeps the limit",
        "a waiting list kept the limits of who left it",
        (
            (
                "grabstream/lua/includes/queue.lua",
                "    give_back(offer, grab, grab.quantity)\n    grab.status, grab.carried = RELEASED, nil",
                "    grab.status, grab.carried = RELEASED, nil",
            ),
        ),
    ),
    Bug(
        "a coupon goes before it is used",
        "an offer retired while its coupons could still be redeemed",
        (
            (
                "grabstream/lua/includes/offers.lua",
                "return math.max(now + offer.rules.retire_after_ms, offer.rules.valid_until or 0)",
                "return now + offer.rules.retire_after_ms",
            ),
        ),
    ),
    Bug(
        "retaken units count in the old window",
        "units that a late payment took again were given back in the wrong day",
        (
            (
                "grabstream/lua/includes/settling.lua",
                "if newest and are_same_counters(newest[2], counted) then",
                "if newest then",
            ),
        ),
    ),
    Bug(
        "a refusal does not count in its call",
        "a refused command behind itself in one call was refused, counted and remembered twice",
        (
            ("grabstream/lua/commands/grab.lua", "refusals[field] = refuse(call", "local _ = refuse(call"),
            (
                "grabstream/lua/includes/command.lua",
                "refusals[field] = keep_refusal(",
                "local _ = keep_refusal(",
            ),
        ),
    ),
    Bug(
        "who is to be paid back is not told",
        "a payment that could not be served was not told that it is paid back",
        (
            (
                "grabstream/lua/includes/settling.lua",
                "details.message = (details.message and details.message .. '; ' or '') .. "
                "'the payment is to be paid back'",
                "",
            ),
        ),
    ),
)

#: Of the gate.
OF_GATE: Final = (
    Bug(
        "sent without a reply is refused",
        "commands that were sent, and got no reply, were answered as if nothing was decided",
        (
            (
                "grabstream/gate/queue.py",
                "            if entry.unsure:\n                entry.fail",
                "            if False:\n                entry.fail",
            ),
        ),
    ),
    Bug(
        "decided in a lost history is refused",
        "commands that were decided in a history that is lost were answered as if nothing was decided",
        (
            (
                "grabstream/gate/queue.py",
                "        self.unsure = True\n        self.is_done, self.error",
                "        self.is_done, self.error",
            ),
        ),
    ),
    Bug(
        "a confirmation passes a grab that was refused",
        "what followed a command that was answered busy or fenced was decided without it",
        (("grabstream/gate/queue.py", "            entry = entry.next\n", "            entry = None\n"),),
    ),
    Bug(
        "a list that is cut waits for its lost history",
        "a list whose answers were lost, and for which the next call had no room, was never answered",
        (("grabstream/gate/queue.py", "        self.answers, self.history = [], 0\n", ""),),
    ),
    Bug(
        "a reader of a topic is refused",
        "a backlog of arrays in the topic was answered busy",
        (
            (
                "grabstream/gate/gate.py",
                "patience = math.inf if topic_order else patience_ms / 1000",
                "patience = patience_ms / 1000",
            ),
        ),
    ),
    Bug(
        "decided answers that are lost are not told",
        "answers given as decided that a recovery took back were not reported",
        (
            (
                "grabstream/gate/decided.py",
                "in await self._recorded(shard, command, answer)",
                "in [(answer.seq, answer.at)]",
            ),
        ),
    ),
    Bug(
        "what a recovery keeps is taken as journaled",
        "answers given as decided that only a second recovery took back were not reported",
        (
            (
                "grabstream/gate/decided.py",
                "left = [kept_call for kept_call in kept if kept_call.answers]",
                "left = []",
            ),
        ),
    ),
    Bug(
        "a command that raises ends its worker",
        "an error that a script raised for one command of the topic ended the worker",
        (("grabstream/gate/calls.py", "raise Undecidable(text) from None", "raise"),),
    ),
    Bug(
        "the loss of a server in other words ends a worker",
        "a connection that was gone, in the words of uvloop, ended all roles of a worker",
        (
            (
                "grabstream/runtime/trouble.py",
                "isinstance(error, RuntimeError) and any(words in str(error) for words in _GONE)",
                "False",
            ),
        ),
    ),
)

#: In decider, sweeper, relay, recovery and leases.
OF_STREAMS: Final = (
    Bug(
        "shards of the topic wait for each other",
        "answers left the decider in one order for all shards: one that stood still stopped all",
        (
            (
                "grabstream/streams/deciding/decider.py",
                "self._shards[shard].add(held)",
                "self._shards[0].add(held)",
            ),
        ),
    ),
    Bug(
        "offsets are committed before the answers",
        "offsets were committed of records that were not answered yet",
        (
            (
                "grabstream/streams/deciding/backlog.py",
                "while self._open and self._open[0].open == 0:",
                "while self._open:",
            ),
        ),
    ),
    Bug(
        "a checkpoint has the owner of its recovery",
        "after a recovery that was interrupted, the next one ignored events after its checkpoint",
        (
            (
                "grabstream/lua/ownership/trim.lua",
                "'journaled_term', ARGV[8], 'journaled_owner', ARGV[9])",
                "'journaled_term', ARGV[1], 'journaled_owner', ARGV[2])",
            ),
            (
                "grabstream/streams/relaying/takeover.py",
                "if is_checkpoint and not has_base_owner:",
                "if False:",
            ),
        ),
    ),
    Bug(
        "a record divides a decision",
        "of a decision whose first part Kafka had, the rest was lost with Redis",
        (
            (
                "grabstream/streams/relaying/blocks.py",
                "for lines in _fitting_a_record(entry):",
                "for lines in ([line] for line in entry):",
            ),
        ),
    ),
    Bug(
        "half of a call is left in Redis",
        "an error after a script's first write left half of it in Redis, and deciding went on",
        (
            (
                "grabstream/lua/includes/decide.lua",
                "if done > 0 or string.find(words, 'equal or smaller', 1, true) then",
                "if false then",
            ),
        ),
    ),
    Bug(
        "a shard that broke off is relayed on",
        "a shard that a script had left half written was not rebuilt",
        (
            (
                "grabstream/streams/relaying/relay.py",
                "if not entries and outbox.fault:",
                "if False:",
            ),
        ),
    ),
    Bug(
        "a hold that raises stops the sweeper",
        "a hold or an offer whose script raised kept all others of its shard",
        (
            (
                "grabstream/streams/deciding/sweeper.py",
                "            if not is_raised_by_script(error):\n                raise\n",
                "            raise\n",
            ),
        ),
    ),
    Bug(
        "a swallowed cancellation is permanent",
        "a worker that was told to stop went on, since a client had swallowed the cancellation of its task",
        (
            (
                "grabstream/runtime/ending.py",
                "    while pending and loop.time() < until:\n"
                "        for task in pending:\n            task.cancel()\n",
                "    for task in pending:\n        task.cancel()\n    while pending:\n",
            ),
            (
                "grabstream/runtime/ending.py",
                "_, pending = await asyncio.wait(pending, timeout=min(pause, max(0.0, until - loop.time())))",
                "_, pending = await asyncio.wait(pending)",
            ),
        ),
    ),
    Bug(
        "an acknowledgement without an offset is taken",
        "a record that Kafka had already was acknowledged without its offset, and taken as the next",
        (
            (
                "grabstream/streams/relaying/relay.py",
                "if metadata is None or metadata.offset < 0:",
                "if False:",
            ),
        ),
    ),
)

#: In projectors, publisher, verifier, rebuilds.
OF_BOOKS: Final = (
    Bug(
        "a cursor is moved wherever it is",
        "two projectors of a shard wrote its events twice",
        (
            (
                "grabstream/projections/cursors.py",
                " AND c.seq = n.old_seq AND c.next_offset = n.old_offset ",
                " AND n.old_seq >= 0 AND n.old_offset >= 0 ",
            ),
        ),
    ),
    Bug(
        "batches of events do not wait for each other",
        "a batch of events that expired on its way left a gap before the cursor in the next one",
        (
            (
                "grabstream/streams/projecting/publisher.py",
                "            await sent\n",
                '            left = [*locals().get("left", ()), sent]\n'
                '        for sent in locals().get("left", ()):\n            await sent\n',
            ),
        ),
    ),
    Bug(
        "read models switched at once hide each other",
        "views over all read models showed a version that the other rebuild had replaced, and went with it",
        (
            (
                "grabstream/projections/versions.py",
                '    await connection.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", (name,))\n',
                "",
            ),
        ),
    ),
    Bug(
        "a worker ends when its read model is rebuilt",
        "a worker that was idle while its read model was rebuilt ended at the next event",
        (
            (
                "grabstream/streams/projecting/projector.py",
                "                if not await self._version_dropped():\n                    raise\n",
                "                raise\n",
            ),
            (
                "grabstream/streams/projecting/projector.py",
                "                    else:\n                        await self._failed()\n",
                "                    else:\n                        raise\n",
            ),
        ),
    ),
    Bug(
        "nobody ends a session that hangs",
        "who took a read model over waited for the locks of a process that hung in a statement",
        (
            (
                "grabstream/streams/projecting/projector.py",
                "                    await self._end_hanging(),\n",
                "                    0,\n",
            ),
        ),
    ),
    Bug(
        "Redis is judged in a history that is lost",
        "the verifier compared what Redis had had before a recovery with the events after it",
        (
            (
                "grabstream/streams/projecting/verifier.py",
                "if history is not None and history == observed.history.encode():",
                "if True:",
            ),
            (
                "grabstream/streams/projecting/verifier.py",
                "                    or before.history != observed.history\n",
                "",
            ),
        ),
    ),
    Bug(
        "a snapshot that does not go on ends a recovery",
        "a shard whose snapshot the journal did not go on from was not rebuilt",
        (
            (
                "grabstream/streams/relaying/recovery.py",
                "            if base == Cursor():\n                raise\n"
                "            log.warning(\n"
                '                "shard %d: the journal does not continue',
                "            raise\n            log.warning(\n"
                '                "shard %d: the journal does not continue',
            ),
        ),
    ),
)

BUGS: Final = (*OF_SCRIPTS, *OF_GATE, *OF_STREAMS, *OF_BOOKS)

#: Bugs that are not found, and why.
NOT_FOUND: Final = {
    "a snapshot that does not go on ends a recovery": (
        "the journal of the simulation loses no record, so each snapshot is of this journal; "
        "test_a_recovery_ignores_an_audit_trail_of_another_history"
    ),
    "nobody ends a session that hangs": (
        "a statement is carried out at once, so no process hangs in one; hanging sessions are ended by the "
        "clock of PostgreSQL, which is not the simulation's; test_rows_locked_by_a_hanging_process_are_freed"
    ),
    "a swallowed cancellation is permanent": (
        "a worker has a second net: it ends all roles after STOP_SECONDS, so the bug costs these seconds, "
        "and breaks no promise; tests/runtime/test_ending.py"
    ),
}
