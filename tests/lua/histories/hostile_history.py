"""Hostile histories: legal but unlikely commands, in any order, at any time.

They have ids that look like keys, are prefixes of each other or are words of the system; numbers at and next
to every bound; time zones with offsets of half an hour, and openings months apart; sweeps that stop early;
repeats of every earlier command; offers that retire in the middle; amendments while users wait. Everything is
drawn from one `random.Random`: a seeded one makes long histories, the one of Hypothesis makes short
histories, which Hypothesis can shrink.
"""

import random
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from grabstream.crypto.tickets import sign
from grabstream.models.calendar import DAY_MS, HOUR_MS, offsets_of
from grabstream.models.commands import (
    Adjust,
    Amend,
    AnyCommand,
    Close,
    Confirm,
    Extend,
    Grab,
    GrabCommand,
    Load,
    Open,
    Pause,
    Redeem,
    Release,
    Resume,
    Return,
    Unredeem,
    check,
)
from grabstream.models.entries import Entry
from grabstream.models.identifiers import campaign_of
from grabstream.models.money import AMOUNT_MAX, Invalid
from grabstream.models.offers import (
    HOLD_MS_MAX,
    TIME_MS_MAX,
    WEEKDAYS,
    Changes,
    CouponTerms,
    EnvelopeTerms,
    Hours,
    Limit,
    StockTerms,
    Terms,
)
from grabstream.models.rules import Offer
from grabstream.models.rules.state import PieceGrab
from tests.lua.histories.strategies import TICKET_SECRET

#: Ids of offers, in few campaigns: parts of keys, prefixes of each other, separators only, ids of 64
#: characters.
OFFERS: Final = (
    *(
        "x",
        "x:users",
        "x:parts",
        "x:grabs",
        "x:codes",
        "x:audience",
        "x:seen",
        "x:queue",
        "x:y",
        "x:y:users",
        "x:answers",
        "x:state",
    ),
    *(
        "y",
        "y:codes",
        "y:counters",
        ":",
        "::",
        ":x",
        "shard",
        "state",
        "answers",
        "offer:x",
        "campaign:x:answers",
        "outbox",
    ),
    *("a" * 64, "a" * 63 + ":", "a" * 31 + ":" + "a" * 32, "-", ".", "0", "1e3", "0x10", "nan", "null", "X"),
)
#: Ids of everything else.
NAMES: Final = (
    *(
        "x",
        "x:y",
        "y",
        "state",
        "users",
        ":",
        "::",
        ".",
        "-",
        "1",
        "01",
        "0x1",
        "1e9",
        "nan",
        "inf",
        "null",
        "true",
        "p" * 64,
    ),
    *(
        "open",
        "grab",
        "command",
        "system",
        "none",
        "user",
        "offer",
        "sealed",
        "ticket:x",
        "codes:1",
        "partial",
        "seq",
    ),
)
USERS: Final = ("u", "u:1", "u1", "user", "x", "alice", ":", "0", "u" * 64, "1e3", "state")
ZONES: Final = (
    "UTC", "Australia/Lord_Howe", "Asia/Kathmandu", "America/St_Johns", "Africa/Casablanca",
    "Pacific/Chatham", "Europe/Berlin",
    "Pacific/Apia",
)  # fmt: skip
#: Names of issuers, operators and approvers.
PEOPLE: Final = ("alice", "x", "u", ":", "issuer", "p" * 64)
TITLES: Final = ("", 'a "b" \\ 你好', "\\u0000", "%s%d", "€" * 200, "]]>'--")
#: For grabs: texts that look like parts of an event, names in another order than theirs, the longest ones.
METADATA: Final[tuple[dict[str, str], ...]] = (
    {"form_id": "f-1"},
    {"b": '"},{"a":"', "a": 'a "b" \\ 你好'},
    {"user": "alice", "left": "0", "grab": "x", "waited": '","waited":true'},
    {"x": "\\u0000", ":": "🧧"},
    {f"{n:064d}": "" for n in range(14, 0, -1)},
    {"x": '"' * 500, "y": ""},
    {},
)
CODES: Final = ('"', "\\", "code 1", "%d", "Ⅲ", "-" * 200, "null", "x")
MONTH_MS: Final = 30 * DAY_MS
PASSES_MS: Final = (
    0,
    1,
    1,
    7,
    999,
    1_000,
    1_001,
    1_001,
    6_001,
    60_000,
    HOUR_MS // 2,
    HOUR_MS,
    DAY_MS // 3,
    -2_000,
    -1,
)
LONG_PASSES_MS: Final = (
    DAY_MS,
    DAY_MS,
    8 * DAY_MS,
    8 * DAY_MS,
    MONTH_MS,
    3 * MONTH_MS,
    5 * MONTH_MS,
    7 * MONTH_MS,
)


class TimePasses(NamedTuple):
    """`ms` pass; the number may be negative."""

    ms: int


class Sweep(NamedTuple):
    """Sweeps all due holds and offers (None), or at most a number of each, from the first or from the last.

    With `broken_off`, the sweeper stops before it sweeps the offers.
    """

    holds: int | None = None
    offers: int | None = None
    last_first: bool = False
    broken_off: bool = False


#: The next step of a history: commands, time, or a sweep.
Step = Sequence[AnyCommand] | TimePasses | Sweep


def _is_valid(command: AnyCommand) -> bool:
    try:
        check(command)
    except Invalid:
        return False  # the tests of `check` cover invalid commands
    return True


class HostileHistory:
    """Draws the next step of a history from `random`, given the present offers."""

    def __init__(self, draw: random.Random, now: int) -> None:
        self.random = draw
        self.now = now
        self.sent: list[Sequence[AnyCommand]] = []
        self.fresh = 0
        self.paid: list[str] = []
        #: Ids of offers in few campaigns, so that offers share campaigns; and a limit that many of them
        #: share.
        campaigns = draw.sample(sorted({campaign_of(name) for name in OFFERS}), 3)
        campaigns[0] = self.one_of("x", "x", "y", "", campaigns[0])
        self.names = [name for name in OFFERS if campaign_of(name) in campaigns]
        self.common = Limit(
            "user", self.one_of("hour", "day", "day", "week", "offer"), self.one_of(1, 2, 3), "campaign"
        )

    # -- drawing ---------------------------------------------------------------------------------------------

    def one_of(self, *possible: Any) -> Any:
        return self.random.choice(possible)

    def rarely(self, one_in: int = 8) -> bool:
        return self.random.randrange(one_in) == 0

    def near(self, *bounds: int, least: int = 0, most: int = AMOUNT_MAX) -> int:
        """A number at or next to one of the bounds, from `least` to `most`."""
        return min(max(self.random.choice(bounds) + self.random.choice((-1, 0, 0, 0, 1)), least), most)

    def id(self) -> str:
        """Sometimes one of a few names, else an id that was not used before; at most 64 characters."""
        if self.rarely(12):
            return str(self.one_of(*NAMES, *OFFERS))
        self.fresh += 1
        return str(
            self.one_of(
                f"n{self.fresh}", f"n{self.fresh}", f"x:{self.fresh}", f"{self.fresh:064d}", f"{self.fresh}"
            )
        )

    def offer(self, offers: Mapping[str, Offer]) -> str:
        """Mostly an offer that exists, sometimes any id."""
        return str(self.one_of(*offers)) if offers and not self.rarely(15) else str(self.one_of(*self.names))

    # -- steps -----------------------------------------------------------------------------------------------

    def next(self, offers: Mapping[str, Offer]) -> Step:
        """The next step, given the present offers."""
        kind = self.random.choices(
            (
                "grab",
                "grab_command",
                "repeat",
                "open",
                "offer_command",
                "amend",
                "basket",
                "load",
                "redemptions",
                "pass",
                "moment",
                "sweep",
            ),
            (34, 26, 12, 14 if len(offers) < 4 else 5 if len(offers) < 9 else 1, 3, 6, 5, 5, 1, 6, 5, 8),
        )[0]
        if kind == "pass":
            return TimePasses(self.one_of(*LONG_PASSES_MS) if self.rarely(7) else self.one_of(*PASSES_MS))
        if kind == "moment":
            return TimePasses(self.moment(offers) - self.now)
        if kind == "sweep":
            broken_off = self.rarely(3)
            partial = Sweep(
                self.one_of(0, 1, 2, None), self.one_of(0, 1, 2), self.one_of(False, True), broken_off
            )
            return Sweep() if self.rarely(2) else partial
        commands = [command for command in getattr(self, f"_{kind}")(offers) if _is_valid(command)]
        if commands and kind != "repeat":
            self.sent.append(commands)
        return commands

    def moment(self, offers: Mapping[str, Offer]) -> int:
        """A time from now on at which something ends, begins or shifts, or a millisecond earlier or later."""
        moments = [HOUR_MS * (self.now // HOUR_MS + 1), DAY_MS * (self.now // DAY_MS + 1)]
        for zone in ZONES[1:]:
            offsets = offsets_of(zone, self.now)
            moments += [at for at, _ in offsets[1:3]]
            moments += [DAY_MS * ((self.now + offsets[0][1]) // DAY_MS + 1) - offsets[0][1]]
        for offer in offers.values():
            moments += [
                offer.opens_at,
                offer.closes_at,
                offer.due,
                *(grab.lapses_at for grab in offer.grabs.values() if grab.held),
            ]
            if not isinstance(offer.terms, EnvelopeTerms) and offer.terms.valid_until is not None:
                moments.append(offer.terms.valid_until)
        ahead = sorted(at for at in moments if self.now <= at < self.now + 400 * DAY_MS)
        return int(self.random.choice(ahead[:6] or [self.now]) + self.one_of(-1, 0, 0, 1))

    def _repeat(self, offers: Mapping[str, Offer]) -> list[AnyCommand]:
        """The commands of an earlier list: unchanged, twice, by another user, to another offer of the
        campaign, or with another body.
        """
        if not self.sent:
            return []
        lists_ago = self.random.choice((1, 2, 3, 5, 8, 20, len(self.sent)))
        commands = list(self.sent[-min(lists_ago, len(self.sent))])
        if any(isinstance(command, Grab) and command.basket is not None for command in commands):
            return commands
        change = self.one_of("none", "none", "none", "twice", "user", "offer", "body")
        if change == "twice":
            return commands + commands
        if change == "user":
            return [
                msgspec.structs.replace(command, user=self.one_of(*USERS))
                if isinstance(command, Grab)
                else command
                for command in commands
            ]
        if change == "offer":
            sisters = [
                name for name in offers if campaign_of(name) == campaign_of(commands[0].offer)
            ] or self.names
            return [msgspec.structs.replace(command, offer=self.one_of(*sisters)) for command in commands]
        if change == "body":
            return [self._other_body(command) for command in commands]
        return commands

    def _other_body(self, command: AnyCommand) -> AnyCommand:
        """The same id with another body."""
        if isinstance(command, Grab):
            if zlib.crc32(command.id.encode()) % 2:
                return msgspec.structs.replace(command, metadata={"other": "body"})
            return (
                msgspec.structs.replace(command, wait=not command.wait) if command.basket is None else command
            )
        if isinstance(command, Return):
            return msgspec.structs.replace(
                command, reason=command.reason + "!" if len(command.reason) < 200 else ""
            )
        if isinstance(command, Redeem | Unredeem):
            return msgspec.structs.replace(command, order=self.one_of(*NAMES))
        if isinstance(command, GrabCommand):
            return msgspec.structs.replace(command, grab=self.one_of(*NAMES))
        return command

    # -- offers ----------------------------------------------------------------------------------------------

    def _open(self, offers: Mapping[str, Offer]) -> list[AnyCommand]:
        names = self.random.sample(self.names, min(self.random.randint(1, 3), len(self.names)))
        if gone := [name for name in self.names if name not in offers]:
            names[0] = self.one_of(*gone)
        if self.rarely(20):
            names.append(names[0])
        return [
            Open(id=self.id(), offer=name, terms=self.terms(name), operator=self.one_of(None, *PEOPLE))
            for name in names
        ]

    def terms(self, name: str) -> Terms:
        return self.envelope() if self.random.random() < 0.3 else self.pieces(name)

    def times(self) -> tuple[int | None, int | None]:
        """`opens_at` and `closes_at` of an offer; mostly it opens now and never closes."""
        opens_at = self.one_of(0, self.now + 1, self.now + 500, TIME_MS_MAX - 1) if self.rarely(6) else None
        closes_at = (
            self.one_of(self.now + 1, self.now + 9_000, self.now + 40 * HOUR_MS, TIME_MS_MAX)
            if self.rarely(4)
            else None
        )
        if opens_at is not None and closes_at is not None and closes_at <= opens_at:
            closes_at = None
        return opens_at, closes_at

    def envelope(self) -> EnvelopeTerms:
        parts = self.one_of(1, 1, 2, 3, 7, 20)
        least = self.one_of(1, 1, 2)
        law = self.one_of("double_mean", "bounded", "equal")
        most = (
            least + self.one_of(0, 1, 40, AMOUNT_MAX // 64) if law == "bounded" and self.rarely(2) else None
        )
        total = self.one_of(parts * least, parts * least + 1, parts * 100 + 1, AMOUNT_MAX - 1, AMOUNT_MAX)
        total = min(max(total, parts * least), parts * (most or AMOUNT_MAX), 2**52 // (2 * parts), AMOUNT_MAX)
        opens_at, closes_at = self.times()
        return EnvelopeTerms(
            issuer=self.one_of(*PEOPLE), funding=self.one_of(*NAMES), asset=self.one_of("CNY", "EUR"),
            total=total, parts=parts, min=least,
            max=most, law=law, draw=self.one_of("ahead", "at_grab"),
            seed=f"{self.random.getrandbits(128):032x}" * self.one_of(1, 4),
            opens_at=opens_at, closes_at=closes_at, title=self.one_of(*TITLES), timezone=self.one_of(*ZONES),
            hours=self.hours(),
            audience=self.one_of("list", "ticket") if self.rarely(4) else "everyone",
            retire_after_ms=self.one_of(1, 3_000, DAY_MS, TIME_MS_MAX) if self.rarely(3) else 7 * DAY_MS,
        )  # fmt: skip

    def hours(self) -> tuple[Hours, ...]:
        if not self.rarely(7):
            return ()
        hours = self.one_of(
            (("00:00", "12:00"), ("12:01", "24:00")),
            (("00:00", "00:01"), ("23:59", "24:00")),
            (("02:00", "03:00"),),
        )
        return tuple(
            Hours(("mon", "tue", "sun")[: self.one_of(1, 3)] if self.rarely(3) else WEEKDAYS, *from_until)
            for from_until in hours
        )

    def limits(self) -> tuple[Limit, ...]:
        limits: dict[tuple[str, str], Limit] = {}
        if self.rarely(2):
            return (self.common,)
        for _ in range(self.one_of(0, 0, 1, 1, 1, 2) if not self.rarely(10) else 8):
            limit = Limit(
                self.one_of("user", "user", "user", "card", "x", "state"),
                self.one_of("offer", "hour", "hour", "day", "day", "week"),
                self.one_of(1, 3, 6, 6, 9) if not self.rarely(8) else self.near(AMOUNT_MAX, least=1),
                self.one_of("offer", "campaign"),
            )  # fmt: skip
            limits[limit.name, limit.scope] = limit
        return tuple(limits.values())

    def pieces(self, name: str) -> CouponTerms | StockTerms:
        held = self.random.random() < 0.75
        late = self.one_of("refuse", "grace", "retake") if held else "refuse"
        most = self.one_of(1, 2, 3, 3, 3, 5) if not self.rarely(5) else self.one_of(10_000, AMOUNT_MAX)
        price = (
            self.one_of(None, 0, 7, 250)
            if not self.rarely(5)
            else self.near(AMOUNT_MAX // most, most=AMOUNT_MAX // most)
        )
        total = (
            self.one_of(1, 2, 3, 5, 5, 8, 12)
            if not self.rarely(10)
            else self.one_of(AMOUNT_MAX - 1, AMOUNT_MAX)
        )
        opens_at, closes_at = self.times()
        audience = self.one_of("list", "ticket", "ticket") if self.rarely(4) else "everyone"
        if audience == "list" and opens_at is None:
            opens_at, closes_at = self.now + 1, None
        common: dict[str, Any] = {
            "issuer": self.one_of(*PEOPLE), "title": self.one_of(*TITLES), "total": total,
            "limits": self.limits(), "max_per_grab": most,
            "take": self.one_of("all", "all", "up_to"), "late": late,
            "extensions": self.one_of(0, 1, 1_000) if held else 0,
            "hold_ms": self.one_of(1, 1_000, 6_000, 60_000, HOUR_MS, DAY_MS, HOLD_MS_MAX) if held else None,
            "grace_ms": self.one_of(1, 999, HOLD_MS_MAX) if late == "grace" else 0,
            "price": price if held else None,
            "currency": self.one_of("CNY", "EUR") if held and price is not None else None,
            "return_restores": self.one_of(False, True),
            "valid_until": self.one_of(self.now + 6_000, self.now + 48 * HOUR_MS) if self.rarely(6) else None,
            "waiting_list": held and self.random.random() < 0.7, "timezone": self.one_of(*ZONES),
            "hours": self.hours(),
            "audience": audience, "opens_at": opens_at, "closes_at": closes_at,
            "retire_after_ms": self.one_of(1, 1_000, DAY_MS) if self.rarely(3) else 7 * DAY_MS,
        }  # fmt: skip
        if self.rarely(3):
            return StockTerms(**common, asset=self.one_of(None, None, "sku:x", "sku::", f"sku:{name}"))
        return CouponTerms(**common, codes=total <= 12 and self.rarely(5))

    # -- grabs -----------------------------------------------------------------------------------------------

    def quantity(self, offer: Offer | None) -> int:
        """Mostly a quantity that the offer has; sometimes near what it has, or near the greatest quantity."""
        if offer is None or offer.is_envelope:
            return int(self.one_of(2, AMOUNT_MAX)) if self.rarely(20) else 1
        most, total, left = offer.pieces.max_per_grab, offer.pieces.total, offer.units_left
        if self.rarely(12):
            return self.near(most, total, left, AMOUNT_MAX, least=1)
        return max(
            min(
                most,
                int(
                    self.one_of(
                        1, 1, 2, 3, left, left + 1, total, total + 1 if self.rarely(6) else total, most
                    )
                ),
            ),
            1,
        )

    def attributes(self) -> dict[str, str]:
        attributes = {
            "card": self.one_of("c:1", "c:1", "c:2", "c"),
            "x": self.one_of("x", ":", "1"),
            "state": "open",
        }
        if self.rarely(9):
            attributes |= {"user": "somebody", "p" * 64: "p" * 64, ":": ":"}
        return attributes

    def ticket(self, user: str, offer: str) -> str | None:
        """A ticket for the offer, its campaign or several offers; often a single-use ticket."""
        if self.rarely(9):
            return None
        campaign = campaign_of(offer)
        audience = self.one_of(
            offer, campaign, campaign, [campaign, *self.names], "elsewhere" if self.rarely(4) else campaign
        )
        expires = self.now // 1000 * 1000 + self.one_of(1_000, 100_000, 100_000, 100_000, DAY_MS * 300)
        return sign(
            "t",
            TICKET_SECRET,
            user=user,
            offer=audience,
            expires_at_ms=expires,
            once_id=self.one_of("", "o", "o", "o2", ":", "x"),
        )

    def metadata(self, id: str, one_in: int = 3) -> dict[str, str] | None:
        """Metadata of few grabs. It follows from the id, so that the rest of a history is the same with and
        without it.
        """
        chance = zlib.crc32(id.encode())
        return None if chance % one_in else METADATA[chance // one_in % len(METADATA)]

    def a_grab(self, offers: Mapping[str, Offer], **rest: Any) -> Grab:
        name, user = rest.pop("offer", None) or self.offer(offers), str(self.one_of(*USERS))
        offer = offers.get(name)
        by_ticket = offer is not None and offer.terms.audience == "ticket"
        id = self.id()
        return Grab(
            id=id, metadata=self.metadata(id), offer=name, user=user, quantity=self.quantity(offer),
            attributes=self.attributes() if not self.rarely(30) else {},
            ticket=self.ticket(user, name) if by_ticket or self.rarely(25) else None,
            **({"wait": self.random.random() < 0.6} | rest),
        )  # fmt: skip

    def _grab(self, offers: Mapping[str, Offer]) -> list[AnyCommand]:
        name = self.offer(offers)
        # Plain grabs, which take another path through the script.
        if (name in offers and offers[name].is_envelope) or self.rarely(20):
            drawn = [
                Grab(id=self.id(), offer=name, user=self.one_of(*USERS))
                for _ in range(self.random.randint(1, 8))
            ]
            return [msgspec.structs.replace(grab, metadata=self.metadata(grab.id, 20)) for grab in drawn]
        return [
            self.a_grab(offers, **({"offer": name} if self.rarely(2) else {}))
            for _ in range(self.random.randint(1, 5))
        ]

    def _basket(self, offers: Mapping[str, Offer]) -> list[AnyCommand]:
        """A basket of grabs of one campaign; often its id was used before."""
        campaign = campaign_of(self.offer(offers))
        names = [name for name in (*offers, *offers, *self.names) if campaign_of(name) == campaign]
        basket = str(self.one_of(*NAMES))
        drawn = [
            self.a_grab(offers, offer=self.one_of(*names), basket=basket, wait=False)
            for _ in range(self.random.randint(1, 4))
        ]
        return list({grab.id: grab for grab in drawn}.values())

    # -- commands about grabs --------------------------------------------------------------------------------

    def known(self, offers: Mapping[str, Offer]) -> tuple[Offer, str] | None:
        """An offer and the id of one of its newest grabs, or None."""
        recent = [(offer, name) for offer in offers.values() for name in list(offer.grabs)[-6:]]
        if not self.rarely(3):  # only grabs about which commands can be executed
            recent = [
                (offer, name)
                for offer, name in recent
                if offer.grabs[name].held or offer.grabs[name].taken or offer.grabs[name].status == 3
            ] or recent
        return self.random.choice(recent) if recent else None

    def _grab_command(self, offers: Mapping[str, Offer]) -> list[AnyCommand]:
        return [self.a_grab_command(offers) for _ in range(self.random.randint(1, 4))]

    def a_grab_command(self, offers: Mapping[str, Offer]) -> AnyCommand:
        known = self.known(offers)
        if known is None or self.rarely(20):
            name, grab, taken = self.offer(offers), str(self.one_of(*NAMES)), None
        else:
            name, grab, taken = known[0].name, known[1], known[0].grabs[known[1]]
        of_held, of_taken = (
            (Confirm, Confirm, Confirm, Release, Release, Extend),
            (Return, Return, Redeem, Redeem, Redeem, Unredeem),
        )
        usual = of_held if taken is not None and not taken.taken else of_taken
        kind = self.one_of(*(usual if not self.rarely(5) else of_held + of_taken))
        id = self.id()
        about: dict[str, Any] = {"id": id, "offer": name, "grab": grab, "user": self._named_user(id, taken)}
        units = (taken.held or taken.lapsed or taken.taken) if taken else 1
        quantity = self.one_of(None, None, None, 1, max(units, 1), units + 1, AMOUNT_MAX)
        if kind is Confirm:
            due = (taken.price if taken else 7) * (quantity if quantity is not None else units)
            paid = due if not self.rarely(6) else self.near(due, 0, AMOUNT_MAX)
            payment = self.payment()
            if paid > AMOUNT_MAX or payment is None:
                paid = 0
            currency = (taken and known and getattr(known[0].terms, "currency", None)) or self.one_of(
                "CNY", "EUR"
            )
            return Confirm(
                **about, payment=payment, paid=paid, currency=currency if paid else None, quantity=quantity
            )
        if kind is Return:
            return Return(**about, quantity=quantity, reason=self.one_of(*TITLES))
        if kind is Redeem:
            return Redeem(
                **about,
                order=str(self.one_of("o", "o", *NAMES)),
                quantity=self.one_of(1, 1, 1, 2, max(units, 1), AMOUNT_MAX),
            )
        if kind is Unredeem:
            return Unredeem(**about, order=str(self.one_of("o", "o", *NAMES)))
        return kind(**about)  # type: ignore[no-any-return]

    def _named_user(self, id: str, taken: PieceGrab | None) -> str | None:
        """The user named by a command about a grab: mostly none, seldom another user. It follows from the id,
        so that the rest of a history is the same with and without it.
        """
        chance = zlib.crc32(id.encode()) % 16
        if chance > 4:
            return None
        return USERS[0] if taken is None or chance == 0 else taken.user

    def payment(self) -> str | None:
        """A payment id: mostly a new one, sometimes one used before, also for offers that have retired."""
        if self.rarely(12):
            return None
        if self.rarely(6):
            return str(self.one_of(*NAMES, *self.paid[-20:]))
        self.fresh += 1
        self.paid.append(f"p:{self.fresh}")
        return self.paid[-1]

    def _redemptions(self, offers: Mapping[str, Offer]) -> list[AnyCommand]:
        """Redeems and unredeems one grab for many orders."""
        taken = {
            name: offer for name, offer in offers.items() if any(grab.taken for grab in offer.grabs.values())
        }
        known = self.known(taken)
        if known is None:
            return []
        commands: list[AnyCommand] = []
        for number in range(self.one_of(3, 10, 30)):
            commands.append(
                (Redeem, Unredeem)[number % 2](
                    id=self.id(), offer=known[0].name, grab=known[1], order=f"o{number // 2}"
                )
            )
        return commands

    # -- operators -------------------------------------------------------------------------------------------

    def _offer_command(self, offers: Mapping[str, Offer]) -> list[AnyCommand]:
        about: dict[str, Any] = {
            "id": self.id(),
            "offer": self.offer(offers),
            "operator": self.one_of(None, *PEOPLE),
        }
        kind = self.one_of(Pause, Resume, Resume, Resume, Close, Adjust, Adjust)
        if kind is not Adjust:
            return [kind(**about)]
        wallet = f"wallet:{self.one_of(*USERS)}"
        entries = [
            Entry("CNY", f"issuer:{self.one_of(*PEOPLE)}", wallet, self.near(1, AMOUNT_MAX, least=1))
            for _ in range(self.one_of(1, 16))
        ]
        return [
            Adjust(
                **about,
                transfers=tuple(entries),
                reason=self.one_of(*TITLES[1:]),
                approved_by=self.one_of(*PEOPLE),
            )
        ]

    def _amend(self, offers: Mapping[str, Offer]) -> list[AnyCommand]:
        """An amendment, often in one list with grabs that wait and commands that free units for them."""
        name = self.offer(offers)
        commands: list[AnyCommand] = [Amend(id=self.id(), offer=name, changes=self.changes(offers.get(name)))]
        if self.rarely(2):
            commands = [
                self.a_grab(offers, offer=name, wait=True) for _ in range(self.random.randint(0, 3))
            ] + commands
            commands += [self.a_grab_command({name: offers[name]}) for _ in range(2) if name in offers]
        return commands

    def changes(self, offer: Offer | None) -> Changes:
        total = offer.terms.total if offer else 5
        possible: dict[str, Any] = {
            "title": self.one_of(*TITLES), "total": self.near(1, total, total + 3, total - 3, AMOUNT_MAX,
            least=1),
            "opens_at": self.now + self.one_of(1, 500),
            "closes_at": self.now + self.one_of(-1, 0, 1, 9_000, HOUR_MS),
            "limits": self.limits(), "max_per_grab": self.near(1, 2, 4, AMOUNT_MAX, least=1),
            "price": self.near(0, 7, AMOUNT_MAX),
            "hold_ms": self.one_of(1, 3_000, HOLD_MS_MAX), "extensions": self.one_of(0, 1, 1_000),
            "late": self.one_of("refuse", "retake", "grace"), "grace_ms": self.one_of(0, 1, HOLD_MS_MAX),
            "return_restores": self.one_of(False, True), "valid_until": self.now + self.one_of(0, 1, 5_000),
        }  # fmt: skip
        if offer is not None and offer.is_envelope and not self.rarely(4):
            possible = {name: possible[name] for name in ("title", "opens_at", "closes_at")}
        fields = self.random.sample(sorted(possible), self.random.randint(1, 3 if len(possible) > 3 else 1))
        if self.rarely(4):
            fields = [name for name in ("price", "max_per_grab") if name in possible] or fields
        return Changes(**{name: possible[name] for name in fields})

    def _load(self, offers: Mapping[str, Offer]) -> list[AnyCommand]:
        """The list that an offer needs, whole or in part; sometimes with double items, too many items, or the
        wrong list.
        """
        waiting = [
            offer
            for offer in offers.values()
            if offer.awaits_codes or (offer.terms.audience == "list" and self.now <= offer.opens_at)
        ]
        if not waiting and not self.rarely(4):
            return self._grab(offers)
        name = self.random.choice(waiting).name if waiting and not self.rarely(8) else self.offer(offers)
        offer = offers.get(name)
        what = "codes" if offer is not None and offer.awaits_codes else "audience"
        if self.rarely(8):
            what = self.one_of("codes", "audience")
        total = min(offer.terms.total, 20) if offer else 2
        if what == "audience":
            items: Sequence[str] = self.random.sample(USERS, self.random.randint(1, len(USERS)))
        else:
            items = [
                f"{self.one_of(*CODES)[:190]}{number}" for number in range(self.near(total, total, least=1))
            ]
        if self.rarely(3) and len(items) > 1:
            half = len(items) // 2
            first, second = items[:half], items[half:]
            if self.rarely(3):
                second = [first[0], *second[1:]]
            return [self._chunk(name, what, 1, 2, first), self._chunk(name, what, 2, 2, second)][
                : self.one_of(1, 2, 2)
            ]
        return [self._chunk(name, what, 1, 1, items)]

    def _chunk(self, offer: str, what: Any, chunk: int, chunks: int, items: Sequence[str]) -> Load:
        return Load(
            id=self.id(),
            offer=offer,
            what=what,
            chunk=chunk,
            chunks=chunks,
            items=tuple(items),
            operator=self.one_of(None, *PEOPLE),
        )
