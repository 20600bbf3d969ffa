"""Redis key names: the only file that makes them.

All keys of a shard have prefix and shard as their hash tag, so that one call can use all of them on Redis
Cluster too. Different things never have the same key: an id may contain ':' but never '/', so '/' separates
an id from the part that follows it, and names of the shard itself contain neither. (`offer:x:users` is the
offer `x:users`, `offer:x/users` the users of `x`.)
"""

from functools import lru_cache
from typing import Final, NamedTuple

from grabstream.models.identifiers import campaign_of, is_id, shard_of

#: The layout of keys and records that the scripts write (also in lua/includes/shard.lua).
LAYOUT: Final = 1
#: Fields of the shard hash that Python reads; Lua writes them.
SHARD_FIELDS: Final = (
    "seq",  # of the last event decided here
    "time",  # of the last event, ms: the shard's clock never runs below it
    "term",
    "owner",
    "server_epoch",  # in which the shard was last reconciled; in another epoch the shard is fenced
    "history",  # the term of that reconciliation; an answer names the history it was decided in
    "journaled_seq",  # checkpoint: the last event that Kafka acknowledged …
    "journaled_head",  # … the chain's hash there, hex …
    "journaled_offset",  # … and the journal offset after it
    "shards",  # the number of shards: a caller that assumes another number is fenced
    "layout",  # the layout of keys and records; another release may write another one
    "partial",  # present while the shard is incomplete, because it is being rebuilt
    "fault",  # the reason, in words, why the relay could not reconcile the shard
    "clock",  # 'caller' where callers may name the time, as in tests and rehearsals; absent elsewhere
    "plain",  # the reason, in words, why its owner runs plain scripts; absent where it uses functions
)

#: An offer's keys: state (hash) · users (hash: an envelope's parts by user, or counters of limits) · parts
#: (string: parts drawn ahead) · grabs (hash grab → record, of pieces) · codes (list, sealed) · audience (set
#: of users) · seen (set: used tickets, loaded chunks) · queue (sorted set: queued grabs, by number) · orders
#: (hash `<grab>/<order>` → used units and the last event of the order) · names (set: names of sealed codes,
#: while their list is loaded).
OFFER_KEYS: Final = (
    "state",
    "users",
    "parts",
    "grabs",
    "codes",
    "audience",
    "seen",
    "queue",
    "orders",
    "names",
)
#: A campaign's keys: answers (hash id, of a grab of pieces `<offer>/<id>` → record) · payments (hash; its
#: fields are ids of payments, as the inside of a JSON text, and those of `payment_field` in
#: lua/includes/packed_values.lua) · counters (hash, limits of the whole campaign) · state (hash; `zone`: the
#: time zone its limits count in, as JSON; `large`: present once an answer had more than 1024 bytes, so that
#: answers are not read in bulk; `retired/<offer>` → `<last offer_seq>:<time ms>` of each retired offer whose
#: payments still count) · tickets (sorted set: used single-use tickets of the campaign, by the time (ms) at
#: which they end).
CAMPAIGN_KEYS: Final = ("answers", "payments", "counters", "state", "tickets")

#: The beginning, after the hash tag, of keys that do not belong to the state of a shard: parts that are
#: staged before an envelope is opened, and the workers that are present. Comparisons of keys leave them
#: out.
STAGED: Final = "staged:"


class ShardKeys(NamedTuple):
    """The keys of one shard under one prefix. `database` is the number of the Redis database; channels need
    it, since they are common to all databases of a server.
    """

    prefix: str
    shard: int
    database: int = 0

    @property
    def tag(self) -> str:
        """Prefix and shard as hash tag, which puts all keys of a shard into one slot."""
        return f"{self.prefix}:{{{self.prefix}-s{self.shard}}}"

    @property
    def state(self) -> str:
        """Hash: SHARD_FIELDS."""
        return f"{self.tag}:shard"

    @property
    def outbox(self) -> str:
        """Stream: events that Kafka has not acknowledged; the entry id has the first seq, each field `e` has
        one line.
        """
        return f"{self.tag}:outbox"

    @property
    def refusals(self) -> str:
        """Hash `<campaign>/<id>`, of a grab `<offer>/<user>/<id>` → record: refusals that are remembered."""
        return f"{self.tag}:refusals"

    @property
    def refusal_order(self) -> str:
        """List of the ids in `refusals`, oldest first."""
        return f"{self.tag}:refusal_order"

    @property
    def demand(self) -> str:
        """Hash `<second>:<code>:<offer>` → count: refusals that are not in SQL yet."""
        return f"{self.tag}:demand"

    @property
    def due(self) -> str:
        """Sorted set offer → time (ms) at which the sweeper must close it, serve its queue, or retire it."""
        return f"{self.tag}:due"

    @property
    def offers(self) -> str:
        """Set of the offers that have keys here."""
        return f"{self.tag}:offers"

    @property
    def holds(self) -> str:
        """Sorted set `<offer>/<grab>` → time (ms) at which the hold expires."""
        return f"{self.tag}:holds"

    @property
    def campaigns(self) -> str:
        """Hash campaign → number of its offers that have keys here."""
        return f"{self.tag}:campaigns"

    @property
    def retired(self) -> str:
        """Set of the retired offers: an offer id is used only once."""
        return f"{self.tag}:retired"

    @property
    def past(self) -> str:
        """Sorted set offer → time (ms) at which it retired, while its payments count."""
        return f"{self.tag}:past"

    @property
    def cleaning(self) -> str:
        """Hash `<campaign>/<answers or payments>` → progress of the deletion of records of its retired
        offers, while records are left.
        """
        return f"{self.tag}:cleaning"

    def staged(self, token: str) -> str:
        """String with a time to live: parts that are staged for one attempt to open an envelope
        (gate/staging.py); `token` is random.
        """
        return f"{self.tag}:{STAGED}{token}"

    @property
    def lease(self) -> str:
        """String: the worker that relays this shard."""
        return f"{self.tag}:lease"

    @property
    def present(self) -> str:
        """Hash worker → `<time (ms) until which it counts as present> <what others read about it>`: the
        workers that this shard may be given to. No token of `staged` has this name.
        """
        return f"{self.tag}:{STAGED}/present"

    @property
    def channel(self) -> str:
        """Pub/sub channel: `<history> <seq>` whenever more events are journaled."""
        return f"{self.tag}:journaled" + (f"@{self.database}" if self.database else "")

    def deciding(self) -> tuple[str, ...]:
        """The first keys of every deciding script, in order."""
        return _deciding(self)

    def offer(self, offer: str) -> str:
        """Hash: the state of one offer."""
        return f"{self.tag}:offer:{offer}"

    def parts(self, offer: str) -> str:
        """String: the parts of an envelope that were drawn ahead, 6 bytes each."""
        return self.offer_keys(offer)[OFFER_KEYS.index("parts")]

    def users(self, offer: str) -> str:
        """Hash: the parts of an envelope by user, or the counters of an offer of pieces."""
        return self.offer_keys(offer)[OFFER_KEYS.index("users")]

    def grabs(self, offer: str) -> str:
        """Hash grab → record: the grabs of an offer of pieces."""
        return self.offer_keys(offer)[OFFER_KEYS.index("grabs")]

    def orders(self, offer: str) -> str:
        """Hash `<grab>/<order>` → record: the used units of grabs of pieces, by order."""
        return self.offer_keys(offer)[OFFER_KEYS.index("orders")]

    def offer_keys(self, offer: str) -> tuple[str, ...]:
        """The keys of one offer, in the order of OFFER_KEYS."""
        return _offer_keys(self, offer)

    def campaign_keys(self, campaign: str) -> tuple[str, ...]:
        """The keys of one campaign, in the order of CAMPAIGN_KEYS."""
        return _campaign_keys(self, campaign)

    def answers(self, campaign: str) -> str:
        """Hash id, of a grab of pieces `<offer>/<id>` → record: the answers of a campaign that have an event,
        but for those to grabs of envelopes.
        """
        return self.campaign_keys(campaign)[CAMPAIGN_KEYS.index("answers")]

    def payments(self, campaign: str) -> str:
        """Hash field of a payment → record, see CAMPAIGN_KEYS."""
        return self.campaign_keys(campaign)[CAMPAIGN_KEYS.index("payments")]


class KeySpace(NamedTuple):
    """The shards of one system, and the shard of an offer."""

    prefix: str
    shards: int
    database: int = 0

    @property
    def system(self) -> str:
        """String: the schema, journal and number of shards that the prefix belongs to, as JSON. A process
        that does not find it writes it again.
        """
        return f"{self.prefix}:system"

    @property
    def workers(self) -> str:
        """Hash worker → its report, as JSON: when, its roles, and where it has trouble. A worker renews it,
        and deletes it when it ends.
        """
        return f"{self.prefix}:workers"

    def shard(self, shard: int) -> ShardKeys:
        """The keys of a shard by its number."""
        return ShardKeys(self.prefix, shard, self.database)

    def shard_of_offer(self, offer: str) -> int:
        """The shard that decides an offer."""
        return shard_of(campaign_of(offer), self.shards)


#: Keys of an offer that hold what users must not know: its state, with the seed of an envelope, the parts
#: drawn ahead, and its codes, which are sealed.
_SECRET_KEYS: Final = ("state", "parts", "codes", "names")


def readable_patterns(prefix: str) -> list[str]:
    """Patterns (glob) of the keys of all shards that reveal nothing about future parts and codes. Ids have no
    braces and no `/`, so no key of an offer matches another pattern than its own.
    """
    tag = f"{prefix}:{{{prefix}-s*}}"
    shard_names = [key.rpartition(":")[2] for key in ShardKeys(prefix, 0).deciding()]
    offer_names = [f"offer:*/{name}" for name in OFFER_KEYS if name not in _SECRET_KEYS]
    names = (*shard_names, "lease", f"{STAGED}/present", "campaign:*", *offer_names)
    system_keys = KeySpace(prefix, 1)
    return [system_keys.system, system_keys.workers, *(f"{tag}:{name}" for name in names)]


def shard_key_from(key: str) -> str:
    """The key of the shard hash, from any key of the shard."""
    return f"{key[: key.index('}') + 1]}:shard"


def ids_in(member: bytes) -> list[str]:
    """The ids in a member or field that names an offer, or an offer and a grab; none if it is damaged."""
    ids = member.decode(errors="replace").split("/")
    return ids if all(map(is_id, ids)) else []


@lru_cache(maxsize=4096)
def _offer_keys(keys: ShardKeys, offer: str) -> tuple[str, ...]:
    key = keys.offer(offer)
    return (key, *(f"{key}/{name}" for name in OFFER_KEYS[1:]))


@lru_cache(maxsize=4096)
def _campaign_keys(keys: ShardKeys, campaign: str) -> tuple[str, ...]:
    return tuple([f"{keys.tag}:campaign:{campaign}/{name}" for name in CAMPAIGN_KEYS])


@lru_cache(maxsize=4096)
def _deciding(keys: ShardKeys) -> tuple[str, ...]:
    return (
        keys.state, keys.outbox, keys.refusals, keys.refusal_order, keys.demand, keys.due, keys.offers,
        keys.holds, keys.campaigns, keys.retired, keys.past, keys.cleaning,
    )  # fmt: skip
