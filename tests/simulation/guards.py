"""The oracle tested by damage: a guard of the protocol is taken out, and some seed must fail.

The guards are those of `tests/mutations.py`, and a few more that only histories with faults can miss. Call
`take_out` before the code under test is imported.
"""

import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, Final, NamedTuple

PROJECT: Final = Path(__file__).parents[2]


class Guard(NamedTuple):
    """A guard: where it stands in the source, and what stands there when it is taken out."""

    name: str
    file: str
    before: str
    after: str


#: In the words of docs/protocol.md.
GUARDS: Final = (
    Guard(
        "a script of an owner checks the term", "lua/includes/shard.lua",
        "held[1] == term and held[2] == owner", "held[2] == owner",
    ),
    Guard(
        "a script of an owner checks term and owner", "lua/includes/shard.lua",
        "held[1] == term and held[2] == owner", "true",
    ),
    Guard(
        "a script of an owner checks the server epoch", "lua/includes/shard.lua",
        " and server_epoch() == epoch", "",
    ),
    Guard(
        "a deciding script checks the server epoch", "lua/includes/decide.lua",
        "shard[3] ~= server_epoch()", "not shard[3]",
    ),
    Guard(
        "a caller's commands are decided in one history", "lua/includes/decide.lua",
        "if history ~= '' and history ~= shard[4] then", "if false then",
    ),
    Guard(
        "a repeated grab gets its first answer", "lua/commands/grab.lua",
        "if record or refusal then return repeated(", "if false then return repeated(",
    ),
    Guard(
        "an entry that is half acknowledged stays", "lua/ownership/trim.lua",
        "holds and open[1] or", "false or",
    ),
    Guard(
        "blocks of an earlier term do not count", "models/journal.py",
        "if block.term < self.term or block.owner != self.owner:", "if False:",
    ),
    Guard(
        "markers of an earlier term do not count", "models/journal.py",
        "if block.term > self.term:\n                after", "if True:\n                after",
    ),
    Guard(
        "an offset that does not directly follow is looked at", "streams/relaying/relay.py",
        "if after.next_offset != cursor.next_offset + 1:\n                    # Other",
        "if False:\n                    # Other",
    ),
    Guard(
        "an owner steps down at a newer marker", "streams/relaying/relay.py",
        'if headers.get("count") == b"0" and int(headers["term"]) > self._term:', "if False:",
    ),
    Guard(
        "a marker that does not count is raised again", "streams/relaying/takeover.py",
        "if truth.cursor[3:] == raised.ownership[:2]:", "if True:",
    ),
    Guard(
        "Redis is compared with the journal by hash", "streams/relaying/takeover.py",
        "and seq <= tail and truth.hashes.get(seq) != head:", "and False:",
    ),
    Guard(
        "what is missing is applied", "streams/relaying/takeover.py",
        "        if seq < tail:\n", "        if False:\n",
    ),
    Guard(
        "a takeover under another server epoch is a recovery", "streams/relaying/takeover.py",
        "            raised.alive\n            and not (outdated",
        "            True\n            and not (outdated",
    ),
    Guard(
        "a waiter trusts its own history only", "lua/gate/journaled.py",
        "known_history == history and known_seq >= seq", "known_seq >= seq",
    ),
    Guard(
        "a waiter is told of another history", "lua/gate/journaled.py",
        "if waiting_history != history and not future.done():", "if False:",
    ),
)  # fmt: skip


def guard_of(name: str) -> Guard:
    """The guard of a name, or whose name contains it; raises ValueError."""
    found = [one for one in GUARDS if one.name == name] or [one for one in GUARDS if name in one.name]
    if len(found) != 1:
        raise ValueError(f"{len(found)} guards are called {name!r}")
    return found[0]


def stands_once(guard: Guard) -> bool:
    """Whether the source has what is to be taken out, once."""
    return (PROJECT / guard.file).read_text().count(guard.before) == 1


def take_out(guard: Guard) -> None:
    """From now on the code is imported, or the scripts are loaded, without the guard."""
    assert stands_once(guard), f"{guard.file} has not once: {guard.before}"
    if guard.file.endswith(".lua"):
        _without_in_lua(guard)
    else:
        _without_in_python(guard)


def _without_in_lua(guard: Guard) -> None:
    from grabstream.lua import loader

    assemble = loader.assemble

    def damaged(name: str, folder: Path = loader.SCRIPTS) -> str:
        return assemble(name, folder).replace(guard.before, guard.after)

    loader.assemble = damaged


def _without_in_python(guard: Guard) -> None:
    target = (PROJECT / guard.file).resolve()
    module = f"grabstream.{guard.file.removesuffix('.py').replace('/', '.')}"
    assert module not in sys.modules, f"{module} is imported already"
    get_code = SourceFileLoader.get_code

    def damaged(self: SourceFileLoader, name: str) -> Any:
        if Path(self.path).resolve() != target:
            return get_code(self, name)
        return compile(target.read_text().replace(guard.before, guard.after), self.path, "exec")

    SourceFileLoader.get_code = damaged  # type: ignore[method-assign, assignment]
