"""A model of the takeover protocol of one shard, checked with random histories (docs/protocol.md).

Actors are generators: an actor is atomic between two `yield`s, and at each `yield` any other actor may run.
Each rule of the protocol is a flag in `RULES`. With all rules, no invariant may break in any history; without
any one of them, some history breaks an invariant.

Not modelled: leases, holds and limits, slots of a cluster, PostgreSQL, snapshots. The search is random, not
exhaustive. Kafka never loses a record that it acknowledged.
"""

import hashlib
import itertools
import random
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

#: Each rule, and in parentheses what replaces it when it is left out.
RULES: Final = {
    "OWNER": "the owner is a fresh random id at every takeover (the name of the process)",
    "CMP": "every takeover compares Redis with the journal by hash, and rebuilds after a difference "
    "(applies missing events, only when the run id differs)",
    "EPOCH": "a script reads run id and replication id of its server (the run id that the connection saw)",
    "BIND": "reading the outbox, trimming, applying and finishing are bound to term, owner and server epoch "
    "(trimming checks term and run id, the outbox is read freely)",
    "HIST": "a waiter trusts `journaled` only in the history that decided (compares the seq only)",
    "CURSOR": "a cursor has offset, term and owner (seq and hash, and Kafka's committed offset as a hint)",
    "TRIM": "trims to the id of the entry with the first unacknowledged event (to the seq itself)",
    "TAIL": "an owner without work also reads its partition, and steps down at a newer term "
    "(reads only when it sends)",
    "SIGN": "after the first signed marker, only signed records count (a forger's records look signed)",
    "XADD": "a rebuild deletes the outbox, and XADD is the first write (it is the last, and the last id "
    "is kept)",
}
#: The faults of servers in each scenario.
SCENARIOS: Final = {
    "plain": ["restart", "failover", "demote"],
    "split": ["split", "split", "demote", "back"],
    "all": ["restart", "failover", "split", "demote", "demote", "back", "empty", "aba"],
    "aba": ["aba"],
    "solo": ["restart", "empty"],
    "own": ["restart"],
    "forged": ["restart", "failover", "split", "demote"],
}
RELAYS, DECIDERS, READERS = ("R0", "R1", "R2"), ("D0", "D1", "D2"), ("P", "Q")
STEPS: Final = 1_000
GENESIS: Final = "0" * 12
UNITS: Final = 24

Actor = Iterator[Any]


class ServerError(Exception):
    """The server is down, a replica, or refuses the script."""


class Fenced(ServerError):
    """The shard was reconciled in another server epoch."""


class SteppedDown(Exception):
    """The relay is no longer the owner."""


class Event(NamedTuple):
    """A unit was given to a command."""

    seq: int
    command: str
    unit: int
    at: int


class Record(NamedTuple):
    """A record of the journal; a marker has no events."""

    term: int
    owner: str
    previous: str = GENESIS
    events: tuple[Event, ...] = ()
    is_signed: bool = False

    @property
    def is_marker(self) -> bool:
        return not self.events


def chained(head: str, event: Event) -> str:
    """The hash after an event."""
    return hashlib.sha256((head + repr(tuple(event))).encode()).hexdigest()[:12]


class Data:
    """The data of the shard in Redis."""

    def __init__(self) -> None:
        self.seq = 0
        self.left: int | None = None
        self.given: dict[str, tuple[int, int]] = {}
        self.outbox: list[tuple[int, tuple[Event, ...]]] = []
        self.last_id = 0
        self.term = 0
        self.owner: str | None = None
        self.epoch: Any = None
        self.journaled, self.journaled_head = 0, GENESIS
        self.history: int | None = 0

    def copy(self) -> "Data":
        other = Data()
        other.__dict__.update(self.__dict__, given=dict(self.given), outbox=list(self.outbox))
        return other

    def signature(self) -> tuple[Any, ...]:
        """Changes with every write."""
        return (self.seq, self.term, self.journaled, self.epoch, self.history, len(self.outbox))


class Server:
    """A Redis server with its data, and the earlier data to which a fault may return it."""

    def __init__(self, world: "World", name: str) -> None:
        self.world, self.name = world, name
        self.alive = self.is_master = True
        self.data = Data()
        self.earlier: list[Data] = []
        self.run, self.replication = world.new_id("run"), world.new_id("repl")

    def epoch(self) -> Any:
        return (self.run, self.replication) if "EPOCH" in self.world.rules else self.run

    def call(self) -> Data:
        """The data for a script; raises ServerError."""
        if not self.alive:
            raise ServerError("dead")
        if not self.is_master:
            raise ServerError("READONLY")
        if not self.earlier or self.earlier[-1].signature() != self.data.signature():
            self.earlier.append(self.data.copy())
            del self.earlier[:-8]
        return self.data


class Send:
    """A record that is sent to Kafka. It may be appended long after its sender timed out."""

    def __init__(self, world: "World", record: Record) -> None:
        self.record = record
        self.offset: int | None = None
        self.is_lost = False
        world.sends.append(self)


class World:
    """One history: two Redis servers, the journal, and the source of random decisions."""

    def __init__(self, seed: int, rules: set[str]) -> None:
        self.random = random.Random(seed)
        self.rules = rules
        self.log: list[Record] = []
        self.sends: list[Send] = []
        #: (seq, command, unit) of every answer that promised `journaled`.
        self.promises: list[tuple[int, str, int]] = []
        self.trace: list[str] = []
        self.problems: list[str] = []
        self.readers: dict[str, Cursor] = {}
        self.ids = self.commands = self.clock = 0
        self.first, self.second = Server(self, "A"), Server(self, "B")
        self.second.is_master = False
        self.primary = self.first
        self.faults = True
        #: Whether relays sign from their next takeover on.
        self.signs = False
        #: client → the server that it still regards as the primary.
        self.views: dict[str, Server] = {}
        self.fault_chance = self.random.choice([0.01, 0.03, 0.08])
        self.timeout_chance = 0.03

    def new_id(self, kind: str) -> str:
        self.ids += 1
        return f"{kind}{self.ids}"

    def tell(self, *words: object) -> None:
        self.trace.append(" ".join(map(str, words)))

    def server_of(self, client: str) -> Server:
        return self.views.get(client, self.primary)


# -- the journal -------------------------------------------------------------------------------------------


class Cursor:
    """A reader of the journal. It accepts or ignores records in the order of offsets."""

    def __init__(self) -> None:
        self.term, self.owner = 0, None  # type: tuple[int, str | None]
        self.seq, self.head = 0, GENESIS
        self.events: list[Event] = []
        self.bad: str | None = None
        self.gap = False
        self.offset = 0
        #: Whether the owner in force signs.
        self.is_signed = False

    def copy(self) -> "Cursor":
        other = Cursor()
        other.__dict__.update(self.__dict__, events=list(self.events), gap=False)
        return other

    def feed(self, record: Record, offset: int) -> None:
        self.offset = offset + 1
        if self.is_signed and not record.is_signed:
            return
        if record.is_marker:
            if record.term > self.term:
                self.term, self.owner, self.is_signed = record.term, record.owner, record.is_signed
            return
        if self.owner is None and self.term == 0:  # it started in the middle of the journal
            self.term, self.owner, self.is_signed = record.term, record.owner, record.is_signed
        if record.term < self.term or (record.term == self.term and record.owner != self.owner):
            return
        if record.term > self.term:
            self.bad = f"block of a term without marker @{offset}"
            return
        first = record.events[0].seq
        if first > self.seq + 1:
            self.gap = True
            return
        head = record.previous
        if first == self.seq + 1 and head != self.head:
            self.bad = f"bad previous hash @{offset}"
            return
        for event in record.events:
            head = chained(head, event)
            if event.seq <= self.seq:
                if event.seq == self.seq and head != self.head:
                    self.bad = f"contradiction at seq {self.seq} @{offset}"
                    return
                continue
            self.seq, self.head = event.seq, head
            self.events.append(event)


def scan(log: Sequence[Record], until: int | None = None) -> tuple[Cursor, dict[int, str]]:
    """A cursor that has read the log from its beginning, and the hash at every seq."""
    cursor, heads = Cursor(), {0: GENESIS}
    for offset, record in enumerate(log[:until]):
        known = len(cursor.events)
        cursor.feed(record, offset)
        head = heads[known]
        for event in cursor.events[known:]:
            head = heads[event.seq] = chained(head, event)
        if cursor.bad:
            break
    return cursor, heads


def sent(world: World, send: Send) -> Generator[None, None, int | None]:
    """Waits for a record; returns its offset, or None if unknown. It may then still be appended later."""
    while True:
        yield
        if send.offset is not None:
            acknowledgement_lost = world.faults and world.random.random() < 0.08
            return None if acknowledgement_lost else send.offset
        if send.is_lost:
            return None
        if world.faults and world.random.random() < world.timeout_chance:
            return None


# -- scripts (each is atomic) ------------------------------------------------------------------------------


def guarded(world: World, server: Server, run: str) -> Data:
    """The data for a deciding script; raises Fenced in another server epoch."""
    data = server.call()
    if data.epoch != (server.epoch() if "EPOCH" in world.rules else run):
        raise Fenced
    return data


def bound(world: World, server: Server, term: int, epoch: Any, owner: str) -> Data:
    """The data for a script of an owner; raises SteppedDown if it is no longer the owner."""
    data = server.call()
    if "BIND" in world.rules and (data.term, data.owner, server.epoch()) != (term, owner, epoch):
        raise SteppedDown
    return data


Answers = list[tuple[str, int, int]]


def decide(world: World, server: Server, commands: Sequence[str]) -> tuple[Answers, int | None]:
    """Gives a unit to each command that has none; returns (command, unit, seq) of each, and the history."""
    data = guarded(world, server, server.run)
    if all(command in data.given for command in commands):
        return [(command, *data.given[command]) for command in commands], data.history
    if data.left is None:
        world.problems.append("I3 decides on a state that was not recovered")
        raise ServerError("half")
    new = [command for command in commands if command not in data.given][: max(0, data.left)]
    first = data.seq + 1
    if new:
        if "XADD" in world.rules and data.last_id >= first:
            raise ServerError("XADD")
        events = []
        for command in new:
            world.clock += 1
            data.seq += 1
            events.append(Event(data.seq, command, data.left, world.clock))
            data.given[command] = (data.left, data.seq)
            data.left -= 1
        if data.last_id >= first:
            raise ServerError("XADD")  # the state is written, the event is not
        data.outbox.append((first, tuple(events)))
        data.last_id = first
        world.tell(server.name, "decides", shown(events))
    return [(command, *data.given[command]) for command in commands if command in data.given], data.history


def raise_term(server: Server, above: int, owner: str) -> tuple[int, Any]:
    data = server.call()
    data.term = max(data.term, above) + 1
    data.owner = owner
    return data.term, server.epoch()


def trim(world: World, server: Server, term: int, epoch: Any, cursor: tuple[int, str], owner: str) -> None:
    """Removes journaled events from the outbox, and records the position of the journal."""
    seq, head = cursor
    if "BIND" in world.rules:
        data = bound(world, server, term, epoch, owner)
    else:
        data = guarded(world, server, server.run)
    if data.term != term:
        raise SteppedDown
    by_entry = "TRIM" in world.rules
    data.outbox = [entry for entry in data.outbox if (entry[1][-1].seq if by_entry else entry[0]) > seq]
    if seq > data.journaled:
        data.journaled, data.journaled_head = seq, head
    world.tell("trim on", server.name, "to", seq, "term", term)


def fold(events: Sequence[Event]) -> tuple[dict[str, tuple[int, int]], int]:
    """The state after events: the units given, and the number of units left."""
    return {event.command: (event.unit, event.seq) for event in events}, UNITS - len(events)


def position(data: Data, heads: dict[int, str], tail: int) -> str:
    """Redis compared with the journal: `ok` (equal or ahead), `lagging`, or `diverged`."""
    if data.left is None or data.journaled > tail or heads.get(data.journaled) != data.journaled_head:
        return "diverged"
    seq, head = data.journaled, data.journaled_head
    for event in itertools.chain.from_iterable(events for _, events in data.outbox):
        if event.seq <= seq:
            continue
        if event.seq != seq + 1:
            return "diverged"
        seq, head = event.seq, chained(head, event)
        if seq <= tail and heads[seq] != head:
            return "diverged"
    if seq != data.seq:
        return "diverged"
    return "ok" if data.seq >= tail else "lagging"


def apply(data: Data, event: Event) -> None:
    data.seq = event.seq
    data.given[event.command] = (event.unit, event.seq)
    data.left = UNITS - len(data.given)


# -- actors ------------------------------------------------------------------------------------------------


def relay(world: World, name: str) -> Actor:
    """A process that takes over the shard again and again. There are no leases, so every relay tries."""
    while True:
        yield
        if world.faults and world.random.random() > 0.06:
            continue
        if not world.faults and name != RELAYS[0]:
            return
        try:
            yield from own(world, name)
        except (ServerError, SteppedDown):
            if world.random.random() < 0.5 or not world.faults:
                world.views.pop(name, None)


def own(world: World, name: str) -> Actor:
    """Takes over the shard, and relays until it is no longer the owner."""
    above = 0
    while True:
        server = world.server_of(name)
        owner = world.new_id(name + "#") if "OWNER" in world.rules else name
        term, epoch = raise_term(server, above, owner)  # 1. raise the term
        world.tell(name, "raises term", term, "on", server.name)
        signs = world.signs
        yield
        marker = Record(term, owner, is_signed=signs)
        offset = yield from sent(world, Send(world, marker))  # 2. append a marker
        if offset is None:
            continue
        yield
        truth, heads = scan(world.log, offset + 1)  # 3. read the journal up to the marker
        if (truth.term, truth.owner) != (term, owner):
            above = max(above, truth.term)
            if world.faults and world.random.random() < 0.3:
                return
            continue
        world.tell(name, "is owner of term", term, "on", server.name, "tail", truth.seq)
        yield
        if "CMP" in world.rules:  # 4. make Redis equal to the journal, or ahead of it
            yield from reconcile(world, name, server, (term, epoch, owner), truth, heads)
        else:
            server = world.server_of(name)
            yield from apply_missing(world, name, server, (term, epoch, owner), truth)
        last, cursor = offset, (truth.seq, truth.head)
        yield
        # Records in Redis what earlier owners have journaled.
        trim(world, server if "BIND" in world.rules else world.server_of(name), term, epoch, cursor, owner)
        if (yield from carry(world, name, server, (term, epoch, owner), last, cursor, signs)):
            return


Owned = tuple[int, Any, str]


def reconcile(
    world: World, name: str, server: Server, owned: Owned, truth: Cursor, heads: dict[int, str]
) -> Actor:
    """Compares Redis with the journal by hash; applies missing events, or rebuilds."""
    term = owned[0]
    data = bound(world, server, *owned)
    if data.epoch == server.epoch() and position(data, heads, truth.seq) == "ok":
        return
    data.epoch = data.history = None
    yield
    data = bound(world, server, *owned)
    compared = position(data, heads, truth.seq)
    if compared == "diverged":
        yield
        data = bound(world, server, *owned)
        world.tell(name, "REBUILDS", server.name, "seq", data.seq, "->", truth.seq)
        data.given, data.left = fold(truth.events)
        data.seq, data.outbox = truth.seq, []
        data.journaled, data.journaled_head = truth.seq, truth.head
        data.last_id = 0 if "XADD" in world.rules else data.last_id
    elif compared == "lagging":
        for event in truth.events[data.seq :]:
            yield
            data = bound(world, server, *owned)
            if event.seq == data.seq + 1:
                apply(data, event)
        data.journaled, data.journaled_head, data.outbox = truth.seq, truth.head, []
    yield
    data = bound(world, server, *owned)
    data.epoch, data.history = server.epoch(), term
    world.tell(name, "reconciled", server.name, "seq", data.seq, "term", term)


def apply_missing(world: World, name: str, server: Server, owned: Owned, truth: Cursor) -> Actor:
    """Replaces `reconcile` when the rule CMP is left out."""
    term = owned[0]
    data = server.call()
    if data.left is not None and data.epoch == server.epoch():
        return
    epoch = server.epoch()
    yield
    while True:
        data = bound(world, server, *owned)
        if data.left is None:
            data.left = UNITS
        if data.seq >= truth.seq:
            break
        apply(data, truth.events[data.seq])
        yield
    data = bound(world, server, *owned)
    data.epoch, data.history = epoch, term
    world.tell(name, "reconciled", server.name, "seq", data.seq, "term", term)


def carry(
    world: World, name: str, server: Server, owned: Owned, last: int, cursor: tuple[int, str], signs: bool
) -> Generator[None, None, bool]:
    """Relays from the outbox to the journal, one record at a time. Returns True if it stops, False if it
    takes over again.
    """
    term, epoch, owner = owned
    seq, head = cursor
    while True:
        yield
        if not world.faults and name != RELAYS[0]:
            return True
        own_server = server if "BIND" in world.rules else world.server_of(name)
        data = bound(world, own_server, term, epoch, owner)
        events = [event for _, entry in data.outbox for event in entry if event.seq > seq]
        if not events:
            if "TAIL" in world.rules and owner_of(world.log) != (term, owner):
                raise SteppedDown
            if world.faults and world.random.random() < 0.02:
                return True
            if data.term != term:
                raise SteppedDown
            if ("EPOCH" in world.rules or not world.faults) and data.epoch != own_server.epoch():
                raise SteppedDown  # a takeover must recover the shard
            continue
        if [event.seq for event in events] != list(range(seq + 1, seq + 1 + len(events))):
            raise SteppedDown
        events = events[: world.random.randint(1, 4)]
        block = Record(term, owner, head, tuple(events), signs)
        offset = yield from sent(world, Send(world, block))
        if offset is None:
            return False
        if offset != last + 1:
            # There are other records in between; one may be the marker of another owner.
            yield
            if "OWNER" in world.rules:
                if owner_of(world.log, offset) != (term, owner):
                    raise SteppedDown
            elif any(record.is_marker and record.term > term for record in world.log[last + 1 : offset]):
                raise SteppedDown
        last, seq = offset, events[-1].seq
        for event in events:
            head = chained(head, event)
        yield
        own_server = server if "BIND" in world.rules else world.server_of(name)
        trim(world, own_server, term, epoch, (seq, head), owner)


def owner_of(log: Sequence[Record], until: int | None = None) -> tuple[int, str | None]:
    cursor, _ = scan(log, until)
    return cursor.term, cursor.owner


def decider(world: World, name: str) -> Actor:
    """Sends commands until they are decided and journaled. Sends them again after an unknown result."""
    while True:
        yield
        if not world.faults:
            return
        commands = []
        for _ in range(world.random.randint(1, 3)):
            world.commands += 1
            commands.append(f"c{world.commands}")
        for _ in range(40):
            yield
            try:
                answers, history = decide(world, world.server_of(name), commands)
            except ServerError:
                if world.random.random() < 0.4:
                    world.views.pop(name, None)
                continue
            if not answers:
                break
            if (yield from is_journaled(world, name, max(seq for _, _, seq in answers), history)):
                world.promises.extend((seq, command, unit) for command, unit, seq in answers)
                promised = [(seq, command, "unit", unit) for command, unit, seq in answers]
                world.tell(name, "ANSWERS JOURNALED", promised)
                break


def is_journaled(world: World, name: str, seq: int, history: int | None) -> Generator[None, None, bool]:
    for _ in range(world.random.randint(5, 60)):
        yield
        try:
            data = world.server_of(name).call()
        except ServerError:
            world.views.pop(name, None)
            continue
        if "HIST" in world.rules and data.history != history:
            return False
        if data.journaled >= seq:
            return True
    return False


def reader(world: World, name: str) -> Actor:
    """A read model: rows and cursor move together. After a crash, it reads again from its cursor, or from
    elsewhere without the rule CURSOR.
    """
    cursor = world.readers[name] = Cursor()
    while True:
        yield
        if cursor.bad:
            return
        if cursor.offset < len(world.log):
            offset = cursor.offset
            cursor.feed(world.log[offset], offset)
            if cursor.gap:  # it reads the journal again from the beginning
                full, _ = scan(world.log, offset + 1)
                cursor.gap = False
                if full.events[: len(cursor.events)] != cursor.events:
                    cursor.bad = "own reader contradicts"
                cursor.events, cursor.seq, cursor.head = full.events, full.seq, full.head
        if world.faults and world.random.random() < 0.06 and cursor.offset:
            cursor = cursor.copy()
            if "CURSOR" not in world.rules:
                cursor.term, cursor.owner = 0, None
                back = max(0, cursor.offset - world.random.randint(0, 6))
                cursor.offset = world.random.choice([cursor.offset, back])
            world.readers[name] = cursor


def kafka(world: World) -> Actor:
    """Appends records in any order, loses some unacknowledged records, and repeats some."""
    while True:
        yield
        waiting = [send for send in world.sends if send.offset is None and not send.is_lost]
        if waiting and world.random.random() < 0.6:
            send = waiting[0] if world.random.random() < 0.7 else world.random.choice(waiting)
            if world.faults and world.random.random() < 0.04:
                send.is_lost = True
                continue
            send.offset = len(world.log)
            record = send.record
            world.log.append(record)
            what = "marker" if record.is_marker else shown(record.events)
            world.tell("LOG", send.offset, what, "term", record.term, record.owner)
        elif world.faults and world.log and world.random.random() < 0.02:
            world.log.append(world.random.choice(world.log[-4:]))
            world.tell("LOG", len(world.log) - 1, "duplicate")


def forger(world: World) -> Actor:
    """Writes to the journal without a key, once signing has begun: markers of higher terms, and its own
    blocks after them or in the name of the present owner.
    """
    while True:
        yield
        if not world.faults:
            return
        world.signs = world.signs or world.random.random() < 0.02
        truth, _ = scan(world.log)
        if not truth.is_signed or world.random.random() > 0.05:
            continue
        term, owner = truth.term, truth.owner or ""
        looks_signed = "SIGN" not in world.rules
        if world.random.random() < 0.7:
            term, owner = term + world.random.randint(1, 5), world.new_id("forger")
            world.log.append(Record(term, owner, is_signed=looks_signed))
        world.clock += 1
        event = Event(truth.seq + 1, world.new_id("forged"), world.random.randint(1, UNITS), world.clock)
        world.log.append(Record(term, owner, truth.head, (event,), looks_signed))
        world.tell("FORGED", shown([event]), "term", term, owner)


def chaos(world: World, kinds: Sequence[str]) -> Actor:
    """Faults: restarts, failovers, two masters at once, and servers that return with older data."""
    while True:
        yield
        if not world.faults:
            return
        if world.random.random() > world.fault_chance:
            continue
        kind = world.random.choice(kinds)
        old = world.primary
        other = world.second if old is world.first else world.first
        FAULTS[kind](world, old, other)


def _loses(world: World, server: Server, most: int) -> int:
    return world.random.randint(0, min(most, len(server.earlier)))


def _restart(world: World, old: Server, other: Server) -> None:
    if not old.alive:
        return
    if lag := _loses(world, old, 8):
        old.data = old.earlier[-lag].copy()
    old.earlier = []
    old.run, old.replication = world.new_id("run"), world.new_id("repl")
    world.tell("*** restart of", old.name, "loses", lag, "writes; seq", old.data.seq)


def _promote(world: World, old: Server, other: Server, still_alive: bool) -> None:
    if not other.alive:
        other.alive = True
        other.run = world.new_id("run")
    if other.is_master:  # the old primary is not a replica yet
        return
    lag = _loses(world, old, 7)
    other.data = (old.earlier[-lag] if lag else old.data).copy()
    other.earlier, other.is_master = [], True
    other.replication = world.new_id("repl")
    world.primary = other
    world.tell("*** failover", old.name, "->", other.name, "loses", lag, "writes; seq", other.data.seq)
    if not still_alive:
        old.alive = False
        world.views.clear()
        return
    for client in (*RELAYS, *DECIDERS):
        if world.random.random() < 0.6:
            world.views[client] = old
        else:
            world.views.pop(client, None)


def _failover(world: World, old: Server, other: Server) -> None:
    _promote(world, old, other, still_alive=False)


def _split(world: World, old: Server, other: Server) -> None:
    _promote(world, old, other, still_alive=True)


def _demote(world: World, old: Server, other: Server) -> None:
    if other.alive and other.is_master:
        other.is_master = False
        other.data, other.earlier = old.data.copy(), []
        world.tell("***", other.name, "becomes replica of", old.name)


def _back(world: World, old: Server, other: Server) -> None:
    """Clients return to the other primary, which has other data."""
    if other.alive and other.is_master and other.data.left is not None:
        world.primary = other
        world.views.clear()
        world.tell("*** clients return to", other.name, "with its own data; seq", other.data.seq)


def _there_and_back(world: World, old: Server, other: Server) -> None:
    """A failover to the replica and back: the same process, with another replication id, and perhaps fewer
    writes.
    """
    if old.alive and old.is_master and not other.is_master:
        lag = _loses(world, old, 7)
        old.data = (old.earlier[-lag] if lag else old.data).copy()
        old.earlier, old.replication = [], world.new_id("repl")
        world.views.clear()
        world.tell("*** failover to", other.name, "and back, loses", lag, "writes; seq", old.data.seq)


def _empty(world: World, old: Server, other: Server) -> None:
    old.data, old.earlier = Data(), []
    world.tell("*** FLUSHALL", old.name)


FAULTS: Final[dict[str, Callable[[World, Server, Server], None]]] = {
    "restart": _restart, "failover": _failover, "split": _split, "demote": _demote, "back": _back,
    "aba": _there_and_back, "empty": _empty,
}  # fmt: skip


def shown(events: Iterable[Event]) -> list[tuple[Any, ...]]:
    return [(event.seq, event.command, "unit", event.unit) for event in events]


# -- a history ---------------------------------------------------------------------------------------------


def play(seed: int, rules: set[str], scenario: str) -> tuple[list[str], World]:
    """Plays one history: random actors run, then the faults stop. Returns the broken invariants and the
    world.
    """
    world = World(seed, rules)
    kinds = SCENARIOS[scenario]
    actors: list[Actor] = [relay(world, name) for name in RELAYS]
    actors += [decider(world, name) for name in DECIDERS]
    actors += [reader(world, name) for name in READERS]
    actors += [kafka(world), kafka(world), kafka(world), chaos(world, kinds)]
    if scenario == "forged":
        actors.append(forger(world))
    alone = scenario == "own"
    if alone:  # one relay that often times out, and must recognize its own late records
        world.timeout_chance, world.fault_chance = 0.2, 0.15
    weights = [1.0] * len(actors)
    for step in range(STEPS):
        if step % 40 == 0:  # a relay may pause for a long time
            for index in range(len(RELAYS)):
                weights[index] = (3 if index == 0 else 0) if alone else world.random.choice([0, 0.3, 1, 3, 3])
        actor = world.random.choices(actors, weights)[0]
        try:
            next(actor)
        except StopIteration:
            actors[actors.index(actor)] = itertools.repeat(None)
    drained = _end(world, actors[:3] + actors[6:11])
    return _broken(world, drained), world


def _end(world: World, actors: list[Actor]) -> bool:
    """Stops the faults; returns whether all decided events are journaled in the end."""
    world.faults = False
    world.tell("--- faults stop; primary", world.primary.name)
    for server in (world.first, world.second):
        if server is not world.primary:
            server.alive = False
    world.views.clear()
    for step in range(3_000):
        actor = world.random.choice(actors)
        try:
            next(actor)
        except StopIteration:
            actors.remove(actor)
        if step % 25 == 0 and _is_drained(world):
            return True
    return False


def _is_drained(world: World) -> bool:
    cursor, _ = scan(world.log)
    data, server = world.primary.data, world.primary
    recovered = data.epoch == server.epoch() and data.left is not None
    return recovered and not cursor.bad and data.seq == cursor.seq == data.journaled


def _broken(world: World, drained: bool) -> list[str]:
    cursor, _ = scan(world.log)
    broken = sorted(set(world.problems))
    if cursor.bad:
        broken.append(f"I1 readers stop: {cursor.bad}")
    for name, reading in world.readers.items():
        for _ in range(400):
            if reading.offset >= len(world.log) or reading.bad:
                break
            reading.feed(world.log[reading.offset], reading.offset)
            if reading.gap:
                reading.bad = "gap"
        if reading.bad:
            broken.append(f"I1 reader {name} stops: {reading.bad}")
        elif reading.events != cursor.events[: len(reading.events)]:
            broken.append(f"I1 reader {name} contradicts")
    accepted = {(event.command, event.unit) for event in cursor.events}
    for seq, command, unit in world.promises:
        if (command, unit) not in accepted:
            broken.append(f"I2 journaled answer seq {seq} {command} unit {unit} is not in the journal")
            break
    units = Counter(event.unit for event in cursor.events)
    if any(count > 1 for count in units.values()):
        broken.append(f"I4 unit {units.most_common(1)[0][0]} given twice")
    if len({event.command for event in cursor.events}) != len(cursor.events):
        broken.append("I4 command granted twice")
    data = world.primary.data
    if drained and not cursor.bad and fold(cursor.events) != (data.given, data.left):
        broken.append("I3 Redis differs from the fold")
    if not drained and not cursor.bad:
        broken.append(f"I5 not drained: Redis at {data.seq}, journal at {cursor.seq}")
    return broken
