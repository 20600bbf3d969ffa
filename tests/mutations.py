"""Checks that a test notices when a guard of the protocol is missing: removes each guard, in a copy of the
tree, and runs the tests that must fail.

`python -m tests.mutations` (`make mutations`) needs running servers. Exit 1: a mutant survived, or there was
no verdict, because the guard is not in its file, its tests do not exist, or they fail without the mutation
too. `tests/test_mutations.py` plays the mutations marked `always` in every run, and checks that every row can
be played.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import click

from tests.copies import copy_tree

PROJECT: Final = Path(__file__).resolve().parent.parent
#: How long the tests of a mutation may take; for those played in every run, less than the suite's limit for a
#: single test.
SECONDS_MAX: Final = 600
ALWAYS_SECONDS_MAX: Final = 200


class Mutation(NamedTuple):
    """A guard: its name, its file, the text that occurs once there and its replacement, and the ids of the
    tests that must fail.
    """

    guard: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    #: Whether every run of the tests plays it: only mutations whose verdict takes a few seconds.
    always: bool = False


class Verdict(NamedTuple):
    """The outcome of a mutation (`killed` is the expected one), and what pytest printed last."""

    outcome: str
    seconds: float
    output: str = ""


def _in(file: str, *tests: str) -> tuple[str, ...]:
    """The ids of tests in a file."""
    return tuple(f"{file}::{test}" for test in tests)


SCRIPTS: Final = "tests/lua/ownership/test_scripts.py"
JOURNAL: Final = "tests/models/test_journal.py"
RECOVERY: Final = "tests/streams/relaying/test_recovery.py"
LIBRARY: Final = "tests/lua/test_library.py"
_SURVIVES: Final = _in(LIBRARY, "test_a_call_leaves_nothing_to_the_next_one")
_PLAIN: Final = _in(
    LIBRARY, "test_the_owner_says_that_it_may_not_load_the_library[forbidden0-'function|load']"
)
_STRANGER: Final = _in(SCRIPTS, "test_owner_scripts_refuse_another_term_owner_or_server_epoch[server]")
_APPLIED: Final = _in(
    SCRIPTS, "test_events_are_applied_only_to_a_fenced_shard_directly_after_its_last_event[server]"
)
_LAYOUT: Final = _in(RECOVERY, "test_a_shard_of_a_newer_key_layout_is_left_to_the_newer_program")
_EFFECTS: Final = _in(
    "tests/gate/test_effects_that_held.py",
    "test_it_is_lost_only_if_its_event_is[redeemed, and changed]",
    "test_it_is_lost_if_only_an_earlier_event_is_recorded",
)
_ANOTHER: Final = _in(RECOVERY, "test_another_history_is_replaced_and_its_lost_decisions_are_reported")

IDENTITIES: Final = "tests/lua/commands/test_identities.py"
REBUILDS: Final = "tests/streams/relaying/test_rebuilds_of_shards.py"
COUNTERS: Final = "tests/lua/commands/test_counters.py"
CALLERS: Final = "tests/gateway/test_authentication.py"

MUTATIONS: Final = (
    Mutation(
        "id of a part",
        "grabstream/lua/includes/packed_values.lua",
        "  if its_id ~= id then return nil end\n",
        "",
        _in(IDENTITIES, "test_nobody_can_use_up_an_id_of_an_envelope[server]"),
    ),
    Mutation(
        "offer of an answer to a grab",
        "grabstream/lua/includes/packed_values.lua",
        "return offer .. '/' .. id\nend",
        "return id\nend",
        _in(IDENTITIES, "test_a_grab_of_pieces_has_its_id_alone_in_its_offer[server]"),
    ),
    Mutation(
        "user of a refusal",
        "grabstream/lua/includes/repeats.lua",
        "return offer .. '/' .. user .. '/' .. id",
        "return id",
        _in(IDENTITIES, "test_a_refusal_is_that_of_its_user_and_offer[server]"),
    ),
    Mutation(
        "a rebuild applies no part twice",
        "grabstream/streams/relaying/apply_arguments.py",
        "range(max(after + 1 - line.seq, 0), line.seqs, PARTS_MAX)",
        "range(0, line.seqs, PARTS_MAX)",
        _in(
            "tests/streams/relaying/test_apply_arguments.py",
            "test_columns_hold_what_follows_each_other_in_one_envelope",
        ),
    ),
    Mutation(
        "server of a checkpoint",
        "grabstream/streams/relaying/ownership.py",
        '        return await self.run("read", keys, ownership, command, len(arguments), *arguments)\n',
        "        return await self.redis.execute_command(command, *keys[key is None :][-1:], *arguments)\n",
        _in("tests/streams/relaying/test_two_servers.py", "test_a_takeover_reads_the_server_of_its_scripts"),
    ),
    Mutation(
        "server of what an owner reads",
        "grabstream/lua/ownership/read.lua",
        "if lost then return lost end\n",
        "",
        _STRANGER,
    ),
    Mutation(
        "counts that are damaged",
        "grabstream/streams/relaying/recovery.py",
        "if await self._has_sound_counts(ownership):",
        "if True:",
        _in(REBUILDS, "test_a_rebuild_keeps_sound_counts_of_refusals_only"),
    ),
    Mutation(
        "user of a story",
        "grabstream/ops/diagnosis/evidence.py",
        "named == user if named is not None else",
        "named == user or",
        _in(REBUILDS, "test_each_user_of_one_id_has_a_story_of_its_own"),
    ),
    Mutation(
        "term of an owner's script",
        "grabstream/lua/includes/shard.lua",
        "held[1] == term and held[2] == owner",
        "held[2] == owner",
        _STRANGER,
    ),
    Mutation(
        "owner of an owner's script",
        "grabstream/lua/includes/shard.lua",
        "held[1] == term and held[2] == owner",
        "held[1] == term",
        _STRANGER,
    ),
    Mutation(
        "server epoch of an owner's script",
        "grabstream/lua/includes/shard.lua",
        " and server_epoch() == epoch",
        "",
        _STRANGER,
    ),
    Mutation(
        "a caller's own time",
        "grabstream/lua/includes/decide.lua",
        "redis.call('HGET', KEYS[1], 'clock') ~= 'caller'",
        "false",
        _in(SCRIPTS, "test_a_caller_cannot_set_the_clock_of_a_shard[server]"),
    ),
    Mutation(
        "server epoch of a deciding script",
        "grabstream/lua/includes/decide.lua",
        "shard[3] ~= server_epoch()",
        "not shard[3]",
        _in(SCRIPTS, "test_a_shard_decides_nothing_in_another_server_epoch[server]"),
    ),
    Mutation(
        "key layout",
        "grabstream/lua/includes/decide.lua",
        "if layout ~= LAYOUT then",
        "if false then",
        _LAYOUT,
    ),
    Mutation(
        "key layout of a takeover",
        "grabstream/lua/ownership/raise_term.lua",
        "layout > LAYOUT",
        "false",
        _LAYOUT,
    ),
    Mutation(
        "seq of a recovery",
        "grabstream/lua/ownership/apply.lua",
        "(shard[2] or '0') ~= ARGV[4]",
        "false",
        _APPLIED,
        always=True,
    ),
    Mutation("a half-made shard", "grabstream/lua/ownership/apply.lua", "(shard[3] or ", "(", _APPLIED),
    Mutation(
        "a half-made shard decides",
        "grabstream/lua/ownership/reconcile.lua",
        "redis.call('HEXISTS', KEYS[1], 'partial') == 1",
        "false",
        _APPLIED,
    ),
    Mutation(
        "a fenced shard only",
        "grabstream/lua/ownership/apply.lua",
        "if shard[1] then",
        "if false then",
        _APPLIED,
    ),
    Mutation(
        "no hole between events of an offer",
        "grabstream/lua/ownership/apply.lua",
        "+ 1 ~= event.offer_seq then",
        "+ 1 == 0 then",
        _in(SCRIPTS, "test_events_with_a_gap_are_refused[server]"),
    ),
    Mutation(
        "a shard that moved",
        "grabstream/lua/ownership/reconcile.lua",
        "~= ARGV[4] then",
        "== '' then",
        _APPLIED,
    ),
    Mutation(
        "an entry that is half acknowledged",
        "grabstream/lua/ownership/trim.lua",
        "holds and open[1] or",
        "false or",
        _in(SCRIPTS, "test_a_full_outbox_is_busy_until_it_is_trimmed[server]"),
    ),
    Mutation(
        "writes end with their call",
        "grabstream/lua/includes/decide.lua",
        "--- @each_call\nlocal writes",
        "local writes",
        _SURVIVES,
    ),
    Mutation(
        "cost ends with its call",
        "grabstream/lua/includes/cost.lua",
        "--- @each_call\nlocal cost",
        "local cost",
        _SURVIVES,
    ),
    Mutation(
        "what is undone ends with its call",
        "grabstream/lua/includes/undo.lua",
        "--- @each_call\nlocal undo_log",
        "local undo_log",
        _SURVIVES,
    ),
    Mutation(
        "a gate without the function library is fenced",
        "grabstream/lua/running.py",
        'if not await redis.hexists(state, "plain"):',
        "if False:",
        _in(LIBRARY, "test_a_gate_without_the_library_is_fenced_until_a_takeover_loads_it"),
    ),
    Mutation(
        "a takeover loads the function library",
        "grabstream/lua/server.py",
        "plain = await provide(redis, state)",
        'plain = ""',
        _in(LIBRARY, "test_a_takeover_loads_it_and_an_earlier_call_does_not"),
    ),
    Mutation(
        "a wipe keeps why there are no functions",
        "grabstream/lua/ownership/wipe.lua",
        "if plain then",
        "if false then",
        _PLAIN,
    ),
    Mutation(
        "an owner with functions says so",
        "grabstream/lua/ownership/raise_term.lua",
        "  redis.call('HDEL', KEYS[1], 'plain')\n",
        "",
        _PLAIN,
    ),
    Mutation(
        "the function library has the release in its name",
        "grabstream/lua/library.py",
        "_{digest}",
        "",
        _in(LIBRARY, "test_two_releases_decide_the_same_shard_with_their_libraries"),
    ),
    Mutation(
        "staged parts are whole",
        "grabstream/lua/commands/open.lua",
        " and redis.call('STRLEN', key) == 6 * terms.units",
        "",
        _in(
            "tests/gate/test_staging.py",
            "test_parts_lost_before_the_call_are_staged_again[server]",
        ),
    ),
    Mutation(
        "staged parts of this server epoch",
        "grabstream/lua/commands/open.lua",
        "epoch == server_epoch() and ",
        "",
        _in(
            "tests/gate/test_staging.py",
            "test_parts_of_an_earlier_server_epoch_are_not_used",
        ),
    ),
    Mutation(
        "repeat of a grab",
        "grabstream/lua/commands/grab.lua",
        "if record or refusal then return repeated(",
        "if false then return repeated(",
        _in("tests/gate/test_gate.py", "test_a_grant_is_repeated_within_one_call[server]"),
    ),
    Mutation(
        "repeat of other commands",
        "grabstream/lua/includes/repeats.lua",
        "if not record and not refusal then return nil end",
        "if true then return nil end",
        ("tests/lua/commands/test_outcomes.py",),
    ),
    Mutation(
        "the outbox first",
        "grabstream/lua/includes/offers.lua",
        "  append_events(call)\n  write_all(call, offers, campaigns)\n",
        "  write_all(call, offers, campaigns)\n  append_events(call)\n",
        _in(SCRIPTS, "test_a_refused_write_of_the_outbox_changes_nothing[server-ahead]"),
        always=True,
    ),
    Mutation(
        "a call that breaks off fences its shard",
        "grabstream/lua/includes/decide.lua",
        "if done > 0 or string.find(words, 'equal or smaller', 1, true) then",
        "if false then",
        _in(
            "tests/lua/ownership/test_interrupted.py",
            "test_a_shard_whose_outbox_is_ahead_of_its_state_is_fenced",
        ),
    ),
    Mutation(
        "a write after another fences its shard",
        "grabstream/lua/includes/decide.lua",
        "if done > 0 or",
        "if",
        _in(
            "tests/lua/ownership/test_interrupted.py",
            "test_a_failed_write_after_another_write_fences_the_shard_until_a_rebuild",
        ),
    ),
    Mutation(
        "the chain",
        "grabstream/models/journal.py",
        "if hash_at_cursor != self.head:",
        "if False:",
        _in(JOURNAL, "test_another_history_raises_corrupt"),
    ),
    Mutation(
        "a gap",
        "grabstream/models/journal.py",
        "if self.seq < block.first_seq - 1:",
        "if False:",
        _in(JOURNAL, "test_missing_events_raise_gap"),
    ),
    Mutation(
        "blocks of an earlier term",
        "grabstream/models/journal.py",
        "if block.term < self.term or block.owner != self.owner:",
        "if False:",
        (JOURNAL,),
        always=True,
    ),
    Mutation(
        "markers of an earlier term",
        "grabstream/models/journal.py",
        "if block.term > self.term:\n                after",
        "if True:\n                after",
        (JOURNAL,),
    ),
    Mutation(
        "unsigned records after the first signed marker",
        "grabstream/models/journal.py",
        'block.authority == "unsigned" and is_signed_owner(self.owner)',
        "False",
        ("tests/models/test_signed_records.py",),
    ),
    Mutation(
        "records that claim to be signed",
        "grabstream/models/journal.py",
        'block.authority == "forged" or (',
        "False or (",
        ("tests/models/test_signed_records.py",),
    ),
    Mutation(
        "the partition of a signature",
        "grabstream/models/journal.py",
        '[SIGNATURE_PURPOSE, journal.encode(), b"%d" % shard,',
        "[SIGNATURE_PURPOSE, journal.encode(),",
        ("tests/models/test_signed_records.py",),
    ),
    Mutation(
        "a cursor that moved",
        "grabstream/projections/cursors.py",
        " AND c.seq = n.old_seq AND c.next_offset = n.old_offset ",
        " AND n.old_seq >= 0 AND n.old_offset >= 0 ",
        (
            "tests/streams/projecting/test_projections.py::test_two_projectors_of_a_shard_write_each_event_once",
        ),
    ),
    Mutation(
        "line bound",
        "grabstream/lua/includes/decide.lua",
        "if #lines[i] > line_bytes then",
        "if false then",
        _in(
            "tests/gate/test_undecidable.py",
            "test_a_line_above_its_bound_is_refused_before_any_write",
        ),
    ),
    Mutation(
        "order of a caller",
        "grabstream/lua/includes/decide.lua",
        "if history ~= '' and history ~= shard[4] then",
        "if false then",
        _in("tests/gate/test_order.py", "test_a_confirmation_never_overtakes_its_grab"),
        always=True,
    ),
    Mutation(
        "a caller has one call in flight",
        "grabstream/gate/gate.py",
        "if lane.in_flight or (",
        "if (",
        _in("tests/gate/test_order.py", "test_order_holds_however_often_the_tail_is_lost"),
    ),
    Mutation(
        "commands of a reader go in one call",
        "grabstream/gate/gate.py",
        "if is_divided and queue[0].lane is not queue[-1].lane:",
        "if is_divided:",
        _in(
            "tests/gate/test_gate.py",
            "test_calls_go_side_by_side_if_they_are_large_or_the_server_is_fast",
        ),
    ),
    Mutation(
        "what has retired counts as forgotten",
        "grabstream/lua/includes/decide.lua",
        "retired = redis.call('SISMEMBER', KEYS[10], name) == 1",
        "retired = false",
        ("tests/lua/sweeping/test_retirement.py",),
    ),
    Mutation(
        "user of a refund due",
        "grabstream/lua/commands/confirm.lua",
        "local user = body.user or grab and grab.user",
        "local user = body.user",
        _in(
            "tests/lua/commands/test_named_users.py",
            "test_a_refund_due_for_an_expired_hold_names_the_user_of_the_grab[server]",
        ),
    ),
    Mutation(
        "money that comes too late is known",
        "grabstream/lua/includes/settling.lua",
        "keep_payment(call, campaign, payment, name, grab, code, 0, amount, currency",
        "keep_payment(call, campaign, 'x' .. payment, name, grab, code, 0, amount, currency",
        _in(
            "tests/lua/sweeping/test_retirement.py",
            "test_a_payment_after_retirement_is_due_for_refund_once",
        ),
    ),
    Mutation(
        "a served payment is known after retirement",
        "grabstream/lua/includes/past.lua",
        "past and now < past.at + PAYMENTS_KNOWN_MS and past or nil",
        "nil",
        _in(
            "tests/lua/sweeping/test_retirement.py",
            "test_a_served_payment_is_never_refunded_after_its_offer_retired",
        ),
    ),
    Mutation(
        "exact integers",
        "grabstream/lua/includes/runs.lua",
        "if number < 1e14 and number >= 0 and number % 1 == 0 then",
        "if true then",
        _in(
            "tests/gate/test_undecidable.py",
            "test_a_number_that_would_be_rounded_is_refused_before_its_event",
        ),
    ),
    Mutation(
        "a run packs places as a grab does",
        "grabstream/lua/includes/packed_values.lua",
        "if place_low == 256 then place_low,",
        "if place_low == 255 then place_low,",
        _in("tests/lua/commands/test_runs_of_grabs.py", "test_a_run_leaves_what_single_decisions_leave"),
    ),
    Mutation(
        "a run takes no known id",
        "grabstream/lua/includes/taking.lua",
        "if kept[i] or refused[i] then return i - 1, fields end",
        "",
        _in("tests/lua/commands/test_runs_of_grabs.py", "test_a_run_leaves_what_single_decisions_leave"),
    ),
    Mutation(
        "a run keeps to limits",
        "grabstream/lua/includes/taking.lua",
        "if not counted[h].next[counted[h].texts[i]].is_left then return i - 1, fields end",
        "",
        _in("tests/lua/commands/test_runs_of_grabs.py", "test_a_run_leaves_what_single_decisions_leave"),
    ),
    Mutation(
        "a run counts units",
        "grabstream/lua/includes/limits.lua",
        "counter[2] or 0) + 1",
        "counter[2] or 0)",
        _in("tests/lua/commands/test_runs_of_grabs.py", "test_a_run_leaves_what_single_decisions_leave"),
    ),
    Mutation(
        "a run keeps the other counters of a user",
        "grabstream/lua/includes/limits.lua",
        "local counters = text and parse_counters(text, 'of a user') or {}",
        "local counters = {}",
        _in("tests/lua/commands/test_runs_of_grabs.py", "test_a_run_leaves_what_single_decisions_leave"),
    ),
    Mutation(
        "an amendment keeps the counters of limits that end",
        "grabstream/lua/includes/limits.lua",
        "    local by_period, by, _, value = {}, parts_of(name)",
        "    local by_period, by, period, value = {}, parts_of(name)\n"
        "    if true then return counters_text({[period] = counters.values[name]}) end",
        _in(COUNTERS, "test_limits_that_end_and_come_again_keep_their_counts[server-attributes1]"),
    ),
    Mutation(
        "counters of a grab are those of its user",
        "grabstream/lua/includes/packed_values.lua",
        "if entry[2] == 0 then entry[2] = under else add_user(entry[2], user) end",
        "if entry[2] == 0 then entry[2] = {} else add_user(entry[2], user) end",
        _in(COUNTERS, "test_a_release_gives_back_to_all_counters_of_a_grab[server-attributes1]"),
    ),
    Mutation(
        "a run of refusals ends before what is remembered",
        "grabstream/lua/includes/taking.lua",
        "if answers[i] or refusals[i] then",
        "if false then",
        _in("tests/lua/commands/test_runs_of_grabs.py", "test_a_run_leaves_what_single_decisions_leave"),
    ),
    Mutation(
        "a run of refusals is counted",
        "grabstream/lua/includes/taking.lua",
        "count_refusals(call, row.code, name, new)",
        "",
        _in("tests/lua/commands/test_runs_of_grabs.py", "test_a_run_leaves_what_single_decisions_leave"),
    ),
    Mutation(
        "a run of refusals needs no limit where nothing is left",
        "grabstream/lua/includes/taking.lua",
        "or #offer.rules.limits > 0 then\n      return refusal_of_all",
        "then\n      return refusal_of_all",
        _in("tests/lua/commands/test_runs_of_grabs.py", "test_a_run_leaves_what_single_decisions_leave"),
    ),
    Mutation(
        "grabs without an attribute are invalid in a run too",
        "grabstream/lua/includes/taking.lua",
        " or not counts_by_user(offer) then",
        " then",
        _in("tests/lua/commands/test_runs_of_grabs.py", "test_a_run_leaves_what_single_decisions_leave"),
    ),
    Mutation(
        "ids of a run are distinct",
        "grabstream/lua/includes/taking.lua",
        "if has_id[ids[i]] then return 0 end",
        "",
        _in("tests/lua/commands/test_runs_of_grabs.py", "test_a_run_leaves_what_single_decisions_leave"),
    ),
    Mutation(
        "a run that is cut has the texts of its grabs",
        "grabstream/lua/includes/runs.lua",
        "local is_whole = grabs == texts[3]",
        "local is_whole = true",
        _in("tests/lua/commands/test_runs_of_grabs.py", "test_a_run_leaves_what_single_decisions_leave"),
    ),
    Mutation(
        "an amended offer has its own rules",
        "grabstream/lua/includes/offers.lua",
        "do rules[name] = value end\n  offer.rules = rules\n",
        "do rules[name] = value end\n",
        _in(
            "tests/lua/commands/test_runs_of_grabs.py",
            "test_an_amendment_changes_one_of_two_equal_offers",
        ),
    ),
    Mutation(
        "keys are injective",
        "grabstream/lua/keys.py",
        'f"{key}/{name}" for name in OFFER_KEYS',
        'f"{key}:{name}" for name in OFFER_KEYS',
        _in("tests/lua/test_keys.py", "test_key_names_of_a_shard_are_distinct"),
    ),
    Mutation(
        "bodies that are kept whole are compared whole",
        "grabstream/lua/includes/repeats.lua",
        "if name and (full or sent.whole) then return full == sent.whole and name == sent.offer end",
        "",
        ("tests/gate/test_digests.py::test_entries_of_equal_digests_are_compared_whole",),
    ),
    Mutation(
        "the agents deliver",
        "grabstream/streams/projecting/agents.py",
        "await projector.put(record)",
        "del record",
        ("tests/streams/projecting/test_agents.py::test_the_agents_deliver_records",),
    ),
    Mutation(
        "history of a journaled answer",
        "grabstream/gate/journaled.py",
        "known_history == history and known_seq >= seq",
        "known_seq >= seq",
        _in(
            "tests/gate/test_journaled.py",
            "test_a_seq_journaled_in_one_history_ends_no_wait_of_another",
        ),
        always=True,
    ),
    Mutation(
        "a decided answer that was taken back",
        "grabstream/gate/decided.py",
        "in await self._recorded(shard, command, answer)",
        "in [(answer.seq, answer.at)]",
        _ANOTHER,
    ),
    Mutation(
        "a decided answer about an effect that already held",
        "grabstream/gate/decided.py",
        "answer.repeated and await self._has_effect(shard, command, answer, event)",
        "False",
        _EFFECTS,
    ),
    Mutation(
        "a decided answer about an effect that was taken back",
        "grabstream/gate/decided.py",
        "recorded == event or recorded[0] > event[0]",
        "True",
        _EFFECTS,
    ),
    Mutation(
        "a decided answer that a further recovery takes back",
        "grabstream/gate/decided.py",
        "left = [kept_call for kept_call in kept if kept_call.answers]",
        "left = []",
        _in(
            "tests/gate/test_journaled.py",
            "test_decided_answers_that_only_a_second_recovery_loses_are_reported",
        ),
    ),
    Mutation(
        "comparison by hash",
        "grabstream/streams/relaying/takeover.py",
        "and before < tail and truth.hashes.get(seq) != head:",
        "and False:",
        _ANOTHER,
    ),
    Mutation(
        "what is missing is applied",
        "grabstream/streams/relaying/takeover.py",
        "        if seq < tail:\n",
        "        if False:\n",
        _in(RECOVERY, "test_redis_recovers_after_a_loss_under_traffic[tail cut]"),
    ),
    Mutation(
        "a journal that lost events",
        "grabstream/streams/relaying/takeover.py",
        "        if truth.cursor.seq < base.seq:\n",
        "        if False:\n",
        _in(RECOVERY, "test_a_shard_stays_fenced_when_the_journal_lost_events"),
    ),
    Mutation(
        "callers: the key determines the algorithm of a token",
        "grabstream/gateway/tokens.py",
        "algorithms=[key.algorithm],",
        'algorithms=[header["alg"]],',
        _in(
            "tests/gateway/test_tokens.py",
            "test_forged_token_is_refused[another algorithm of the same key]",
        ),
    ),
    Mutation(
        "callers: a withdrawn key ends the tokens that it signed",
        "grabstream/gateway/tokens.py",
        " or self._keys.known(verified.key_id) is not verified.key:",
        ":",
        _in("tests/gateway/test_tokens.py", "test_new_key_is_known_when_it_is_first_used"),
    ),
    Mutation(
        "callers: a secret ends at its time",
        "grabstream/gateway/api_keys.py",
        "if is_same and time.time_ns() < kept.until_ms * 1_000_000 else",
        "if is_same else",
        _in("tests/gateway/test_admission.py", "test_key_is_valid_by_its_secrets_and_times"),
    ),
    Mutation(
        "callers: an address with failures is refused before any work",
        "grabstream/gateway/admission.py",
        "if credentials_hash not in self._recent:\n            self._failures.check",
        "if False:\n            self._failures.check",
        _in(
            "tests/gateway/test_admission.py",
            "test_address_with_too_many_failures_is_refused_before_any_work",
        ),
    ),
    Mutation(
        "callers: a key has scopes",
        "grabstream/gateway/callers.py",
        "if caller.scopes.isdisjoint(needed):",
        "if False:",
        _in(CALLERS, "test_route_lets_in_who_may_and_nobody_else[grab]"),
    ),
    Mutation(
        "callers: an end user names no other user",
        "grabstream/gateway/requests.py",
        "if request.user is not None and user != request.user:",
        "if False:",
        _in(CALLERS, "test_end_user_grabs_as_themselves_only"),
    ),
    Mutation(
        "callers: no name in a token is the id of another user",
        "grabstream/models/pseudonyms.py",
        " and not name.startswith(NAMED_USERS):",
        ":",
        _in("tests/models/test_pseudonyms.py", "test_nobody_gets_the_id_of_another_one_by_its_name"),
    ),
)


@click.command()
@click.argument("words", nargs=-1)
@click.option("--list", "only_list", is_flag=True, help="Print the guards and play none.")
def main(words: tuple[str, ...], only_list: bool) -> None:
    """Play all mutations, or those whose guard's name contains every word."""
    chosen = [mutation for mutation in MUTATIONS if all(word in mutation.guard for word in words)]
    if not chosen:
        raise click.BadParameter("no guard's name contains this: --list prints them", param_hint="WORDS")
    if only_list:
        for mutation in chosen:
            click.echo(f"{mutation.guard}  ({mutation.file})")
        return
    killed = 0
    without_mutation: dict[tuple[str, ...], Verdict] = {}
    for number, mutation in enumerate(chosen, 1):
        # A test that fails without a mutation too would kill every mutant.
        if mutation.tests not in without_mutation:
            without_mutation[mutation.tests] = run_unchanged(mutation.tests)
        before = without_mutation[mutation.tests]
        verdict = (
            play(mutation)
            if before.outcome == "passed"
            else before._replace(outcome=f"no verdict: unchanged, {before.outcome}")
        )
        killed += verdict.outcome == "killed"
        click.echo(
            f"{number:>3}/{len(chosen)} {verdict.outcome:<9} {mutation.guard:<44} {mutation.file} "
            f"({verdict.seconds:.0f} s)"
        )
        if verdict.outcome != "killed":
            click.echo(verdict.output, err=True)
    click.echo(f"{killed} of {len(chosen)} guards are checked by a test")
    sys.exit(0 if killed == len(chosen) else 1)


def play(mutation: Mutation) -> Verdict:
    """Removes a guard in a copy of the tree and runs its tests there."""
    text = (PROJECT / mutation.file).read_text()
    if text.count(mutation.before) != 1:
        return Verdict(f"no verdict: the guard occurs {text.count(mutation.before)} times in the file", 0.0)
    with copied_tree() as tree:
        (tree / mutation.file).write_text(text.replace(mutation.before, mutation.after))
        verdict = run_tests(tree, mutation.tests, ALWAYS_SECONDS_MAX if mutation.always else SECONDS_MAX)
    by_outcome = {"failed": "killed", "passed": "SURVIVED"}
    return verdict._replace(outcome=by_outcome.get(verdict.outcome, f"no verdict: {verdict.outcome}"))


def run_unchanged(tests: tuple[str, ...]) -> Verdict:
    """Runs tests in an unchanged copy of the tree."""
    with copied_tree() as tree:
        return run_tests(tree, tests, SECONDS_MAX)


@contextmanager
def copied_tree() -> Iterator[Path]:
    """A temporary copy of the project and of the local settings (`.env`)."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_tree(tree)
        if (PROJECT / ".env").is_file():
            shutil.copy(PROJECT / ".env", tree)
        yield tree


def run_tests(tree: Path, tests: tuple[str, ...], seconds_max: int) -> Verdict:
    """Runs tests in a tree; returns `passed`, `failed` (in a test itself, not only in its set-up), or why
    there is no verdict.
    """
    # Variables that xdist and coverage set for child processes would change how these tests run.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))
    }
    # In every tier: a guard may have a long test only.
    environment |= {"PYTHONPATH": str(tree), "CI": "1", "TIER": "day"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider", *tests]
    began = time.monotonic()
    # A new session, so that processes started by the tests are killed with them when they take too long.
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds_max)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return Verdict("the tests take too long", time.monotonic() - began, output[-2_000:])
    seconds = time.monotonic() - began
    if process.returncode == 0:
        return Verdict("passed", seconds, output[-2_000:])
    # A failed test may also make its teardown fail. An error in a test that did not fail is an error of its
    # set-up, which is not a verdict.
    failed, errors = (set(re.findall(rf"^{word} (tests/\S+)", output, re.M)) for word in ("FAILED", "ERROR"))
    if process.returncode == 1 and failed and errors <= failed:
        return Verdict("failed", seconds, output[-2_000:])
    return Verdict(f"pytest ended with {process.returncode}", seconds, output[-2_000:])


if __name__ == "__main__":
    main()
