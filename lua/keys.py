"""Redis key names: the only file that makes them.

All keys of a shard carry prefix and shard as hash tag, so that one call can touch them on Redis Cluster too.
A name is an injective function of what it names: an id may contain ':' but never '/', so '/' separates an id
from the part that follows it, and names of the shard itself contain neither. (`offer:x:users` is the offer
`x:users`, `offer:x/users` the users of `x`.)
"""

from typing import Final, NamedTuple

from grabstream.models.identifiers import campaign_of, shard_of

#: The form of keys and records that the scripts write (lua/includes/shard.lua says what each is).
LAYOUT: Final = 2
#: Fields of the shard hash that Python reads; Lua writes them.
SHARD_FIELDS: Final = (
    "seq",  # of the last event decided here
    "time",  # of the last event, ms: the shard's clock never goes below it
    "term",
    "owner",
    "life",  # run_id and master_replid under which the shard was last reconciled; another life is fenced
    "history",  # the term of that reconciliation; an answer names the history it was decided under
    "journaled_seq",  # checkpoint: the last event Kafka acknowledged …
    "journaled_head",  # … the chain's hash there, hex …
    "journaled_offset",  # … and the journal offset behind it
    "shards",  # how many there are: a caller who believes another number is fenced
    "layout",  # the form of keys and records; another program than ours may write another one
    "partial",  # there while the shard is incomplete, because it is being rebuilt
    "fault",  # why the shard is fenced, in words, when its relay could not reconcile it
)

#: An offer's keys: its state (hash) · users (hash: an envelope's parts by user, or counters of limits) ·
#: parts (string: drawn ahead)
#: · grabs (hash grab → record, of pieces) · codes (list, sealed) · audience (set of users) · seen (set:
#:   tickets used, chunks loaded)
#: · queue (sorted set: grabs that wait, by number) · orders (hash `<grab>/<order>` → units used for it, and
#:   the event that says so)
#: · names (set: what the codes begin with, while their list is loaded).
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
#: A campaign's keys: answers (hash command id → record) · payments (hash payment → record) · counters (hash,
#: limits across it) · state (hash; `zone`: the time zone its limits count in, as JSON; `retired/<offer>` →
#: `<last offer_seq>:<time ms>` of each offer that has retired and whose payments are still known) · tickets
#: (sorted set: single-use tickets of the campaign, by the time (ms) they end).
CAMPAIGN_KEYS: Final = ("answers", "payments", "counters", "state", "tickets")

#: How names of keys begin, behind their tag, that belong to no state: parts that are brought before an
#: envelope is opened.
STAGED: Final = "staged:"


class ShardKeys(NamedTuple):
    """The keys of one shard under one prefix. `database` is the number of Redis' database: channels are the
    whole server's.
    """

    prefix: str
    shard: int
    database: int = 0

    @property
    def tag(self) -> str:
        """Prefix and shard as hash tag: what puts all keys of a shard into one slot."""
        return f"{self.prefix}:{{{self.prefix}-s{self.shard}}}"

    @property
    def state(self) -> str:
        """Hash: SHARD_FIELDS."""
        return f"{self.tag}:shard"

    @property
    def outbox(self) -> str:
        """Stream: events not yet acknowledged by Kafka; entry id = first seq, a field `e` for every line."""
        return f"{self.tag}:outbox"

    @property
    def refusals(self) -> str:
        """Hash command id → record: refused commands that are remembered."""
        return f"{self.tag}:refusals"

    @property
    def refusal_order(self) -> str:
        """List of the ids in `refusals`, the oldest first."""
        return f"{self.tag}:refusal_order"

    @property
    def demand(self) -> str:
        """Hash `<second>:<code>:<offer>` → count: refusals not yet written to SQL."""
        return f"{self.tag}:demand"

    @property
    def due(self) -> str:
        """Sorted set offer → time (ms) at which the sweeper has to see to it: to close it, to serve on, or to
        retire it.
        """
        return f"{self.tag}:due"

    @property
    def offers(self) -> str:
        """Set of the offers that have keys here."""
        return f"{self.tag}:offers"

    @property
    def holds(self) -> str:
        """Sorted set `<offer>/<grab>` → time (ms) at which the hold is over."""
        return f"{self.tag}:holds"

    @property
    def campaigns(self) -> str:
        """Hash campaign → number of its offers that have keys here."""
        return f"{self.tag}:campaigns"

    @property
    def retired(self) -> str:
        """Set of offers that have left: an id is used once for ever."""
        return f"{self.tag}:retired"

    @property
    def past(self) -> str:
        """Sorted set offer → time (ms) at which it retired, as long as its payments are known."""
        return f"{self.tag}:past"

    @property
    def cleaning(self) -> str:
        """Hash campaign → how far the records of its retired offers are deleted, while some are left."""
        return f"{self.tag}:cleaning"

    def staged(self, token: str) -> str:
        """String with a time to live: parts that are brought for one attempt to open an envelope
        (lua/gate/staging.py); `token` is drawn.
        """
        return f"{self.tag}:{STAGED}{token}"

    @property
    def lease(self) -> str:
        """String: the worker that relays this shard."""
        return f"{self.tag}:lease"

    @property
    def channel(self) -> str:
        """Pub/sub channel: `<history> <seq>` whenever more is journaled."""
        return f"{self.tag}:journaled" + (f"@{self.database}" if self.database else "")

    def deciding(self) -> list[str]:
        """The keys every deciding script gets first, in order."""
        return [
            self.state, self.outbox, self.refusals, self.refusal_order, self.demand, self.due, self.offers,
            self.holds, self.campaigns, self.retired, self.past, self.cleaning,
        ]  # fmt: skip

    def offer(self, offer: str) -> str:
        """Hash: the state of one offer."""
        return f"{self.tag}:offer:{offer}"

    def parts(self, offer: str) -> str:
        """String: an envelope's parts drawn ahead, 6 bytes each."""
        return self.of_offer(offer)[OFFER_KEYS.index("parts")]

    def of_offer(self, offer: str) -> list[str]:
        """The keys of one offer as the scripts get them, see OFFER_KEYS."""
        key = self.offer(offer)
        return [key, *(f"{key}/{name}" for name in OFFER_KEYS[1:])]

    def of_campaign(self, campaign: str) -> list[str]:
        """The keys of one campaign as the scripts get them, see CAMPAIGN_KEYS."""
        return [f"{self.tag}:campaign:{campaign}/{name}" for name in CAMPAIGN_KEYS]

    def answers(self, campaign: str) -> str:
        """Hash command id → record: answers that made an event, one hash a campaign."""
        return self.of_campaign(campaign)[0]


class KeySpace(NamedTuple):
    """All shards of one system: where an offer's keys are."""

    prefix: str
    shards: int
    database: int = 0

    @property
    def system(self) -> str:
        """String: which schema, journal and number of shards the prefix belongs to, as JSON. Whoever finds it
        gone writes it again.
        """
        return f"{self.prefix}:system"

    def shard(self, shard: int) -> ShardKeys:
        """The keys of a shard by its number."""
        return ShardKeys(self.prefix, shard, self.database)

    def shard_of_offer(self, offer: str) -> int:
        """The shard that decides an offer."""
        return shard_of(campaign_of(offer), self.shards)
