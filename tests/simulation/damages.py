"""Damages that the oracle must notice: each spoils one thing that the product promises. Put in one at a time,
as a bug is put back (`--without NAME`), they show what the verdict sees.
"""

from difflib import get_close_matches
from typing import Final

from tests.simulation.bugs import BUGS, Bug
from tests.simulation.guards import GUARDS, Guard

_WATCHED: Final = (
    "            elif seconds > "
    "(UNASSIGNED_SECONDS if assignment.is_elsewhere(shard) else STALLED_SECONDS):\n"
)
_SETS_ASIDE: Final = (
    "            decided.append(_DecidedCommands(held_commands, answers[start:end], aside))\n"
)

#: What callers are told.
OF_ANSWERS: Final = (
    Bug(
        "grabs of pieces are granted",
        "every grab of pieces was refused as sold out",
        (("grabstream/lua/commands/grab.lua", "if not offer.pieces then return nil end",
          "if not offer.pieces then return nil end\n"
          "    if true then return {code = CODE.sold_out, at = now} end"),),
    ),
    Bug(
        "a limit is named",
        "limit_reached was answered as over",
        (("grabstream/lua/commands/grab.lua",
          "return {code = CODE.limit_reached,", "return {code = CODE.over,"),),
    ),
    Bug(
        "a granted grab has an event",
        "sold_out was answered as granted, without an event",
        (("grabstream/gate/encoding.py", "    code = row.code\n    if not row.details",
          "    code = 0 if row.code == 32 else row.code\n    if not row.details"),),
    ),
    Bug(
        "a part that was taken is told",
        "already_taken named another amount",
        (("grabstream/gate/encoding.py",
          'fields |= {"amount": row.amount, "quantity": row.quantity, "place": row.place}\n',
          'fields |= {"amount": row.amount + 1, "quantity": row.quantity, "place": row.place}\n'),),
    ),
    Bug(
        "a coupon's code is its own",
        "answers had another code than the event",
        (("grabstream/gate/encoding.py", '{"coupon_code": codes[0],', '{"coupon_code": "WRONG",'),),
    ),
    Bug(
        "a repeated answer is the first",
        "a repeated answer had another quantity",
        (("grabstream/lua/includes/repeats.lua", "      row.repeated = true\n      return row",
          "      row.repeated, row.quantity = true, row.quantity + 7\n      return row"),),
    ),
    Bug(
        "refusals are remembered",
        "a refusal was not remembered, and a repeat was decided anew",
        (
            ("grabstream/lua/includes/decide.lua",
             "  write_in_pieces('HSET', KEYS[3], call.refused_fields)\n", ""),
            ("grabstream/lua/includes/decide.lua",
             "  local count = #call.refused_ids\n", "  local count = 0\n"),
        ),
    ),
    Bug(
        "answers are announced",
        "callers that wait for the journal were told of it only when they looked by themselves",
        (("grabstream/lua/ownership/trim.lua",
          "redis.call('PUBLISH', ARGV[7], history .. ' ' .. ARGV[4])\n", ""),),
    ),
)  # fmt: skip

#: What is done without a command.
OF_SWEEPERS: Final = (
    Bug(
        "holds expire",
        "holds never expired",
        (("grabstream/streams/deciding/sweeper.py",
          "tasks.create_task(self._repeat(self.expire_all, holds))", "pass"),),
    ),
    Bug(
        "offers close",
        "offers were never closed or retired by their time",
        (("grabstream/streams/deciding/sweeper.py",
          "tasks.create_task(self._repeat(self.handle_offers, offers))", "pass"),),
    ),
    Bug(
        "records of retired offers are deleted",
        "nothing was cleaned",
        (("grabstream/streams/deciding/sweeper.py",
          "tasks.create_task(self._repeat(self.clean, records))", "pass"),),
    ),
    Bug(
        "time passes in scripts",
        "time stood still in scripts",
        (("grabstream/lua/includes/shard.lua",
          "return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)",
          "return 1800000000000 + 0 * #time"),),
    ),
    Bug(
        "the outbox is trimmed",
        "nothing was removed from the outbox",
        (("grabstream/lua/ownership/trim.lua", "\nif open then\n", "\nif false then\n"),),
    ),
    Bug(
        "counts of refusals are written",
        "counts of refusals were deleted without being written",
        (("grabstream/streams/deciding/sweeper.py",
          "            await self._record_demand(self._keys.shard, rows)\n", ""),),
    ),
    Bug(
        "counts of refusals are copied",
        "copying the counts of refusals failed each time",
        (("grabstream/streams/deciding/sweeper.py",
          "        # A second is past when", "        raise OSError\n        # A second is past when"),),
    ),
    Bug(
        "what can be decided is not set aside",
        "a third of the commands of the topic were set aside, although they were decided",
        (("grabstream/streams/deciding/decider.py", _SETS_ASIDE,
          "            decided += [\n"
          "                _DecidedCommands(held_commands.slice(at, at + 1), [answer], {})\n"
          "                if answer.id[-1] not in '0369'\n"
          "                else _DecidedCommands(held_commands.slice(at, at + 1), (), {0: 'undecidable'})\n"
          "                for at, answer in enumerate(answers[start:end])\n"
          "            ]\n"),),
    ),
)  # fmt: skip

#: Which worker does what.
OF_WORKERS: Final = (
    Bug(
        "surplus leases are passed on",
        "a worker kept all shards, however many workers there were",
        (("grabstream/streams/relaying/leases.py",
          "                await self._pass_on_surplus(shard)\n", ""),),
    ),
    Bug(
        "a stopped worker returns its leases",
        "the shards of a worker that was stopped waited until its leases expired",
        (
            ("grabstream/streams/relaying/leases.py",
             "        finally:\n            await self._return_lease(shard)",
             "        finally:\n            pass"),
            ("grabstream/streams/relaying/leases.py",
             "            await self._pass_on(shard)\n            held =", "            held ="),
        ),
    ),
    Bug(
        "a stalled Faust is started again",
        "the watchdog of Faust never acted",
        (("grabstream/streams/projecting/watchdog.py", _WATCHED, "            elif seconds > 1e9:\n"),),
    ),
    Bug(
        "a Faust that works is left alone",
        "Faust was started again every ten seconds",
        (("grabstream/streams/projecting/watchdog.py",
          "    lagging: dict[tuple[str, int], tuple[int, float]] = {}\n",
          "    lagging: dict[tuple[str, int], tuple[int, float]] = {}\n"
          "    await asyncio.sleep(10.0)\n    return 'ten seconds are over'\n"),),
    ),
)  # fmt: skip

#: What others read.
OF_BOOKS: Final = (
    Bug(
        "money comes from the payment",
        "the money of a confirmed grab went from the issuer to the payment",
        (("grabstream/models/transfers.py",
          '(event.currency, f"external:{event.payment}", "issuer:" + event.issuer,',
          '(event.currency, "issuer:" + event.issuer, f"external:{event.payment}",'),),
    ),
    Bug(
        "a published event has its type",
        "all events on grab.events had one type",
        (("grabstream/streams/projecting/publisher.py", '("ce_type", type_.encode()),',
          '("ce_type", b"event"),'),),
    ),
    Bug(
        "a published event has the key of its offer",
        "events on grab.events had another key",
        (("grabstream/streams/projecting/publisher.py", '"key": fact.event.offer.encode(),',
          '"key": fact.event.offer.encode() + b"+",'),),
    ),
    Bug(
        "a hold that is extended has its new deadline",
        "the view `grabs` had the first deadline",
        (("grabstream/projections/balances/grabs.py",
          "    elif isinstance(event, GrabExtended):\n        change.deadline_at = event.deadline_at\n",
          "    elif isinstance(event, GrabExtended):\n        pass\n"),),
    ),
    Bug(
        "an account that was changed is found",
        "the verifier compared no account",
        (("grabstream/streams/projecting/verifier.py", "            if row.posted != row.expected:\n",
          "            if False:\n"),),
    ),
)  # fmt: skip

DAMAGES: Final = (*OF_ANSWERS, *OF_SWEEPERS, *OF_WORKERS, *OF_BOOKS)


def damages_of(name: str) -> tuple[Guard, ...]:
    """What has to be replaced for a damage, a bug, or a guard that is taken out, by its name or a part of it
    that no other has; raises ValueError.
    """
    texts = {bug.name: bug.edits for bug in (*DAMAGES, *BUGS)} | {guard.name: (guard,) for guard in GUARDS}
    if name in texts:
        return texts[name]
    found = [one for one in texts if name in one]
    if len(found) == 1:
        return texts[found[0]]
    close = found or get_close_matches(name, texts, 3, 0.4)
    meant = f" (perhaps {', or '.join(map(repr, close[:3]))}?)" if close else ""
    raise ValueError(
        f"{len(found) or 'no'} guards, bugs or damages are called {name!r}{meant}; --guards, --bugs and "
        "--damages print all"
    )
