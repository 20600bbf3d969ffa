"""The oracle tested by damage: a guard of the protocol is taken out, and some seed must fail.

Most guards are rows of `tests/mutations.py`; the others only histories with faults can miss. Call
`take_out` before the code under test is imported.
"""

import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.mutations import MUTATIONS, PROJECT


class Guard(NamedTuple):
    """A guard: where it stands in the source, and what stands there when it is taken out."""

    name: str
    file: str
    before: str
    after: str


def _in_mutations(name: str, mutation: str) -> Guard:
    """A guard that `make mutations` takes out, too, under its name there."""
    [row] = [row for row in MUTATIONS if row.guard == mutation]
    return Guard(name, row.file, row.before, row.after)


#: In the words of docs/protocol.md.
GUARDS: Final = (
    _in_mutations("a script of an owner checks the term", "term of an owner's script"),
    Guard(
        "a script of an owner checks term and owner", "grabstream/lua/includes/shard.lua",
        "held[1] == term and held[2] == owner", "true",
    ),
    _in_mutations("a script of an owner checks the owner", "owner of an owner's script"),
    Guard(
        "a script of an owner checks anything", "grabstream/lua/includes/shard.lua",
        "held[1] == term and held[2] == owner and server_epoch() == epoch", "true",
    ),
    Guard(
        "an owner is drawn for each takeover", "grabstream/streams/relaying/ownership.py",
        "owner = secrets.token_hex(8)", 'owner = f"{__import__(\'os\').getpid():016x}"',
    ),
    Guard(
        "the server epoch changes with the replication id", "grabstream/lua/includes/shard.lua",
        "  return run_id .. replication_id",
        "  local epoch = redis.pcall('HGET', KEYS[1], 'server_epoch')\n"
        "  if type(epoch) == 'string' and string.sub(epoch, 1, #run_id) == run_id then return epoch end\n"
        "  return run_id .. replication_id",
    ),
    _in_mutations("a script of an owner checks the server epoch", "server epoch of an owner's script"),
    _in_mutations("a deciding script checks the server epoch", "server epoch of a deciding script"),
    Guard(
        "a deciding script checks the clock", "grabstream/lua/includes/decide.lua",
        "if math.abs(skew) > tonumber(ARGV[4]) then", "if false then",
    ),
    _in_mutations("a caller's commands are decided in one history", "order of a caller"),
    Guard(
        "a server that lags behind a caller decides nothing for it", "grabstream/lua/includes/decide.lua",
        "if journaled ~= '' and tonumber(journaled) > seq then", "if false then",
    ),
    _in_mutations("a repeated grab gets its first answer", "repeat of a grab"),
    _in_mutations("an entry that is half acknowledged stays", "an entry that is half acknowledged"),
    _in_mutations("blocks of an earlier term do not count", "blocks of an earlier term"),
    _in_mutations("markers of an earlier term do not count", "markers of an earlier term"),
    Guard(
        "an offset that does not directly follow is looked at", "grabstream/streams/relaying/relay.py",
        "if after.next_offset != cursor.next_offset + 1:\n                    # Other",
        "if False:\n                    # Other",
    ),
    Guard(
        "an owner steps down at a newer marker", "grabstream/streams/relaying/relay.py",
        "if term > self._term:", "if False:",
    ),
    Guard(
        "readers ignore what no relay signed", "grabstream/models/journal.py",
        'block.authority == "unsigned" and is_signed_owner(self.owner)', "False",
    ),
    Guard(
        "a marker that does not count is raised again", "grabstream/streams/relaying/takeover.py",
        "if truth.cursor[3:] == raised.ownership[:2]:", "if True:",
    ),
    _in_mutations("Redis is compared with the journal by hash", "comparison by hash"),
    _in_mutations("what is missing is applied", "what is missing is applied"),
    Guard(
        "a rebuild deletes the outbox", "grabstream/streams/relaying/recovery.py",
        "for key in (keys.state, keys.lease, ", "for key in (keys.outbox, keys.state, keys.lease, ",
    ),
    Guard(
        "a cursor has term and owner", "grabstream/projections/cursors.py",
        "= Cursor(seq, bytes(head), offset, term, owner)", "= Cursor(seq, bytes(head), offset)",
    ),
    Guard(
        "a takeover under another server epoch is a recovery", "grabstream/streams/relaying/takeover.py",
        "if raised.alive and not (outdated or distrusted):", "if not (outdated or distrusted):",
    ),
    _in_mutations("a waiter trusts its own history only", "history of a journaled answer"),
    Guard(
        "a waiter is told of another history", "grabstream/gate/journaled.py",
        "others = [waiter for waiter in heap if waiter[2] != history]", "others: list[_Waiter] = []",
    ),
)  # fmt: skip


#: What is taken out of each module.
_in_python: dict[Path, list[Guard]] = {}

#: Guards without which nothing breaks, because of another one (docs/simulation.md), and what is found.
COVERED: Final = {
    "a script of an owner checks the term": "a script of an owner checks term and owner",
    "a script of an owner checks the owner": "a script of an owner checks term and owner",
}

#: Each rule of the model (tests/protocol/model.py), and the guards that are this rule in the code.
OF_THE_MODEL: Final = {
    "OWNER": ("an owner is drawn for each takeover",),
    "CMP": ("Redis is compared with the journal by hash",),
    "EPOCH": ("the server epoch changes with the replication id",),
    "BIND": ("a script of an owner checks anything",),
    "HIST": ("a waiter trusts its own history only", "a waiter is told of another history"),
    "CURSOR": ("a cursor has term and owner",),
    "TRIM": ("an entry that is half acknowledged stays",),
    "TAIL": ("an owner steps down at a newer marker",),
    "SIGN": ("readers ignore what no relay signed",),
    "XADD": ("a rebuild deletes the outbox",),
}


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
    module = guard.file.removesuffix(".py").replace("/", ".")
    assert module not in sys.modules, f"{module} is imported already"
    get_code = SourceFileLoader.get_code
    _in_python.setdefault(target, []).append(guard)

    def damaged(self: SourceFileLoader, name: str) -> Any:
        if Path(self.path).resolve() != target:
            return get_code(self, name)
        text = target.read_text()
        for one in _in_python[target]:
            text = text.replace(one.before, one.after)
        return compile(text, self.path, "exec")

    SourceFileLoader.get_code = damaged  # type: ignore[method-assign, assignment]
