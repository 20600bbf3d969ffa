"""The story of a weekly flash sale: a week and a half in less than a minute.

Monday: eight offers are loaded from a file · Wednesday: the data department corrects prices · Thursday: the
list of users who may buy is loaded · Friday 10:00: the rush, then payments of every kind, refunds in the
afternoon, the close at 22:00 · a week later the offers are retired, and the result of the week is published.
"""

import csv
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, Final
from zoneinfo import ZoneInfo

import msgspec
import yaml

from grabstream.crypto.tickets import sign
from grabstream.models.answers import Answer
from grabstream.models.commands import Amend, AnyCommand, Confirm, Extend, Grab, Open, Release, Return
from grabstream.models.events import AnyEvent, GrabHeld
from grabstream.models.offers import Changes, PieceTerms
from grabstream.ops.formats.offer_files import BadOfferFile, read_offers
from grabstream.ops.formats.offer_plan import plan_rows
from grabstream.ops.verification.checks import VerificationCheck
from grabstream.workshop.rehearsal.clock import HOUR_MS, MINUTE_MS, TIMEZONE, moment
from grabstream.workshop.rehearsal.story import Story, chunks, refused_by_outcome

FRIDAY: Final = 4
OPENS_MS: Final = moment(FRIDAY, "10:00")
CLOSES_MS: Final = moment(FRIDAY, "22:00")
HOLD_MS: Final = 15 * MINUTE_MS
RUSH_SECONDS: Final = 30
RUSH_MEAN_SECONDS: Final = 4
SHARE_OF_DOUBLE_CLICKS: Final = 0.1
SHARE_INVITED: Final = 0.6
SHARE_REFUNDED: Final = 0.08

#: name, price in minor units, units per hundred people, weight in the users' choice, further terms
GOODS: Final[tuple[tuple[str, int, int, int, dict[str, Any]], ...]] = (
    ("phone", 199_900, 4, 30, {"waiting_list": True}),
    ("headset", 29_900, 10, 15, {"late": "grace", "grace_ms": "10m"}),
    ("watch", 99_900, 8, 15, {"late": "retake"}),
    ("lamp", 4_900, 15, 10, {"audience": "list"}),
    ("kettle", 8_900, 15, 10, {"audience": "ticket"}),
    ("bag", 12_900, 12, 8, {"take": "up_to", "late": "grace", "grace_ms": "5m"}),
    ("book", 1_900, 25, 7, {"late": "retake"}),
    ("toy", 3_900, 100, 5, {"opens_at": None, "hours": "fri 10:00-22:00", "return_restores": True}),
)
#: The prices that the data department corrects on Wednesday.
NEW_PRICES: Final = {"phone": 189_900, "book": 1_790, "toy": 3_500}
#: What a user does with a hold, with weights.
FATES: Final = {
    "pays": 50, "hears_back_twice": 7, "pays_twice": 5, "fails": 8, "abandons": 7, "is_late": 10,
    "pays_too_little": 5, "pays_in_part": 4,
    "extends": 4,
}  # fmt: skip


def as_in_file(at_ms: int) -> str:
    """A time in the form of a file of offers."""
    return datetime.fromtimestamp(at_ms / 1000, ZoneInfo(TIMEZONE)).isoformat()


def offers_file(campaign: str, people: int) -> str:
    """The file of offers of the week, as a shop would write it."""
    defaults = {
        "kind": "stock", "issuer": "shop", "currency": "CNY", "hold_ms": "15m", "extensions": 1,
        "max_per_grab": 2,
        "timezone": TIMEZONE, "opens_at": as_in_file(OPENS_MS), "closes_at": as_in_file(CLOSES_MS),
        "limits": "user/offer/2; user/week/3/campaign",
    }  # fmt: skip
    offers = [
        {
            "offer": f"{campaign}:{name}",
            "terms": {"title": name.title(), "total": max(people * units // 100, 4), "price": price, **more},
        }
        for name, price, units, _, more in GOODS
    ]
    return yaml.safe_dump({"defaults": defaults, "offers": offers}, sort_keys=False)


class Week(Story):
    """The flash sale."""

    name = "week"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.opens: list[Open] = []
        self.terms: dict[str, PieceTerms] = {}
        self._waiting = 0
        #: late payments: command → (offer, deadline)
        self._late: dict[str, tuple[str, int]] = {}
        self._unused_fates = list(FATES)
        self._after_close: set[str] = set()
        self._returned: set[str] = set()
        self._ineligible: set[str] = set()
        self._fates: dict[str, Callable[[Grab, int, int, int], None]] = {
            "pays": self._pays, "hears_back_twice": self._hears_back_twice, "pays_twice": self._pays_twice,
            "fails": self._fails,
            "abandons": lambda *_: None, "is_late": self._is_late, "pays_too_little": self._pays_too_little,
            "pays_in_part": self._pays_in_part, "extends": self._extends,
        }  # fmt: skip

    async def play(self) -> None:
        """Plays the week from Monday to Friday of the next week."""
        await self._monday()
        await self._wednesday()
        await self._thursday()
        await self._rush()
        await self._day_of_sale()
        await self._close()
        await self._retire()

    # -- before the sale -------------------------------------------------------------------------------------

    async def _monday(self) -> None:
        self.display.stage("Monday: the file of offers is checked, the offers are opened")
        text = offers_file(self.campaign, self.people)
        try:
            read_offers(text.replace("late: grace", "late: never", 1), "yaml")
            self.require(False, "a file with an error was accepted")
        except BadOfferFile as error:
            self.require("late" in str(error), f"the message does not name the error in the file: {error}")
        self.opens = read_offers(text, "yaml")
        for row in plan_rows(self.opens):
            self.display.note(" · ".join(row))
        await self.send([self.expect(command, "opened") for command in self.opens])
        self.terms = {command.offer: command.terms for command in self.opens}  # type: ignore[misc]
        # The file is loaded a second time: no offer is opened twice.
        await self.send(self.opens)

    async def _wednesday(self) -> None:
        await self.run_until(moment(2, "14:00"), HOUR_MS)
        self.display.stage("Wednesday: prices are corrected")
        changes = {f"{self.campaign}:{name}": Changes(price=price) for name, price in NEW_PRICES.items()}
        commands = [
            Amend(id=self.new_id("amend"), offer=offer, changes=change, operator="data")
            for offer, change in changes.items()
        ]
        await self.send([self.expect(command, "amended") for command in commands])
        wrong = Amend(
            id=self.new_id("amend"), offer=next(iter(changes)), changes=Changes(closes_at=OPENS_MS - HOUR_MS)
        )
        await self.send([self.expect(wrong, "invalid")])
        for offer, change in changes.items():
            self.terms[offer] = msgspec.structs.replace(self.terms[offer], price=change.price)

    async def _thursday(self) -> None:
        await self.run_until(moment(3, "10:00"), HOUR_MS)
        self.display.stage("Thursday: the list of users who may buy is loaded")
        invited = [f"user-{number}" for number in range(int(self.people * SHARE_INVITED))]
        loads = chunks(self._offer("lamp"), "audience", invited, least=2)
        await self.send([self.expect(load, "loaded") for load in loads])
        await self.send(
            [loads[0], self.expect(msgspec.structs.replace(loads[1], id="load-again"), "conflict")]
        )

    def _offer(self, name: str) -> str:
        return f"{self.campaign}:{name}"

    # -- the rush --------------------------------------------------------------------------------------------

    async def _rush(self) -> None:
        await self.run_until(OPENS_MS - 1, HOUR_MS)
        self.display.stage("Friday: a millisecond too early")
        early = [
            self.expect(self._grab(f"user-{number}", name), "not_open_yet")
            for number in range(20)
            for name, *_ in GOODS
        ]
        for answer in await self.send(early):
            self.require(
                answer.retry_at == OPENS_MS,
                f"{answer.offer}: retry_at is {answer.retry_at}, expected {OPENS_MS}",
            )
        self.display.stage("10:00: the rush", OPENS_MS + RUSH_SECONDS * 1000)
        for number in range(self.people):
            self._wish(
                f"user-{number}", OPENS_MS, OPENS_MS + (RUSH_SECONDS - 1) * 1000, 1000 * RUSH_MEAN_SECONDS
            )
        await self.step(OPENS_MS)
        await self.run_until(OPENS_MS + RUSH_SECONDS * 1000, 1000)
        await self._read_events()

    def _wish(self, user: str, begins: int, ends: int, mean_ms: float) -> None:
        """Plans a user's grabs of some of the goods soon after a time, some with a double click."""
        wanted = self.random.choices(
            [name for name, *_ in GOODS], [weight for *_, weight, _ in GOODS], k=self.random.randint(1, 4)
        )
        for name in dict.fromkeys(wanted):
            at = min(begins + self.random.expovariate(1 / mean_ms), ends)
            # Some users click exactly at the opening.
            at = begins if self.random.random() < 0.1 else at
            grab = self._grab(user, name)
            for _ in range(1 + (self.random.random() < SHARE_OF_DOUBLE_CLICKS)):
                self.plan(at, grab)

    def _grab(self, user: str, name: str, quantity: int | None = None) -> Grab:
        quantity = quantity or self.random.choice((1, 1, 1, 2))
        wait = name == "phone" and self.random.random() < 0.5
        grab = Grab(id=self.new_id("grab"), offer=self._offer(name), user=user, quantity=quantity, wait=wait)
        chance = self.random.random()
        if name != "kettle":
            return grab
        if chance <= 0.3:
            self._ineligible.add(grab.id)
        if chance < 0.1:
            return grab
        # Most users have a valid ticket; some have a forged ticket, one of another user, or an expired one.
        key = self._ticket_key if chance > 0.2 else bytes(32)
        owner = user if chance > 0.25 else "somebody"
        expires = CLOSES_MS if chance > 0.3 else OPENS_MS
        ticket = sign(
            "story",
            key,
            user=owner,
            offer=self.campaign,
            expires_at_ms=expires,
            once_id=f"t-{user}" if chance > 0.6 else "",
        )
        return msgspec.structs.replace(grab, ticket=ticket)

    # -- holds and payments ----------------------------------------------------------------------------------

    def on_answer(self, command: AnyCommand, answer: Answer) -> None:
        """Chooses what the user does with a hold, and checks the answer to a late payment."""
        if isinstance(command, Grab):
            if answer.outcome == "held":
                self._choose(command, answer.quantity or 0, answer.due or 0, answer.deadline_at or 0)
            self._waiting += answer.outcome == "waiting"
            self.require(
                not (answer.positive and command.id in self._ineligible),
                f"{command.id}: {answer.outcome} without a valid ticket",
            )
        elif command.id in self._late:
            self._check_late(command, answer)

    def on_event(self, event: AnyEvent) -> None:
        """Chooses what a user does who got units from the waiting list."""
        if isinstance(event, GrabHeld) and event.waited:
            command, _ = self.first[event.grab]
            assert isinstance(command, Grab)
            self._waiting -= 1
            self._choose(command, event.quantity, event.due or 0, event.deadline_at)

    async def _read_events(self) -> None:
        if self._waiting:
            await self.catch_up()

    def _choose(self, grab: Grab, quantity: int, due: int, deadline: int) -> None:
        if deadline > CLOSES_MS and self.clock.now_ms < CLOSES_MS:
            # Held shortly before the close: the payment arrives after the close, but before its deadline.
            self._after_close.add(grab.id)
            if self.random.random() < 0.8:
                self.plan(
                    deadline - self.random.uniform(1.5, 2.5) * MINUTE_MS, self._pay(grab, due, "confirmed")
                )
            return
        # Each fate is used once before they are chosen at random, so that a small crowd has all of them.
        if self._unused_fates:
            fate = self._unused_fates.pop()
        else:
            [fate] = self.random.choices(list(FATES), list(FATES.values()))
        self._fates[fate](grab, quantity, due, deadline)

    def _pay(self, grab: Grab, paid: int, *outcomes: str, quantity: int | None = None) -> Confirm:
        payment = self.new_id("payment")
        confirm = Confirm(
            id=f"confirm-{payment}",
            offer=grab.offer,
            grab=grab.id,
            payment=payment,
            paid=paid,
            currency="CNY",
            quantity=quantity,
        )
        self.expect(confirm, *outcomes)
        return confirm

    def _soon(self, deadline: int, most: float = 12) -> float:
        """A time between 0.2 and `most` minutes after a hold began, before its deadline."""
        return deadline - HOLD_MS + self.random.uniform(0.2, most) * MINUTE_MS

    def _pays(self, grab: Grab, quantity: int, due: int, deadline: int) -> None:
        self.plan(self._soon(deadline), self._pay(grab, due, "confirmed"))

    def _hears_back_twice(self, grab: Grab, quantity: int, due: int, deadline: int) -> None:
        """The payment service calls back several times, with the same id and with another."""
        at, pay = self._soon(deadline), self._pay(grab, due, "confirmed")
        other = msgspec.structs.replace(pay, id=self.new_id("callback"))
        self.expect(other, "confirmed")
        for command, later in ((pay, 0), (pay, 0), (other, 0), (pay, HOUR_MS), (other, 2 * HOUR_MS)):
            self.plan(at + later, command)

    def _pays_twice(self, grab: Grab, quantity: int, due: int, deadline: int) -> None:
        """Two payments for one hold: the second is to be refunded."""
        at = self._soon(deadline, most=9)
        self.plan(at, self._pay(grab, due, "confirmed"))
        self.plan(at + 2 * MINUTE_MS, self._pay(grab, due, "not_held"))

    def _fails(self, grab: Grab, quantity: int, due: int, deadline: int) -> None:
        """The payment fails: two releases return the units once."""
        at = self._soon(deadline)
        for _ in range(2):
            release = Release(id=self.new_id("release"), offer=grab.offer, grab=grab.id)
            self.plan(at, self.expect(release, "released"))
        if self.random.random() < 0.3:
            self.plan(at + 2 * MINUTE_MS, self._pay(grab, due, "not_held"))

    def _is_late(self, grab: Grab, quantity: int, due: int, deadline: int) -> None:
        at = deadline + self.random.uniform(0, 20) * MINUTE_MS
        pay = self._pay(grab, due, "confirmed", "expired")
        self._late[pay.id] = (grab.offer, deadline)
        self.plan(at, pay)

    def _check_late(self, command: AnyCommand, answer: Answer) -> None:
        """Checks that the answer to a late payment follows from the offer's policy."""
        offer, deadline = self._late[command.id]
        terms, now = self.terms[offer], self.clock.now_ms
        allowed = {"confirmed"} if terms.late == "grace" and now < deadline + terms.grace_ms else {"expired"}
        if terms.late == "retake":
            allowed.add("confirmed")
        problem = f"{command.id}: {now - deadline} ms late, with `late: {terms.late}`: {answer.outcome}"
        self.tally.check("late payments as the offer says", answer.outcome in allowed, problem)

    def _pays_too_little(self, grab: Grab, quantity: int, due: int, deadline: int) -> None:
        at = self._soon(deadline, most=9)
        self.plan(at, self._pay(grab, due - 1, "invalid"))
        if self.random.random() < 0.5:
            self.plan(at + 2 * MINUTE_MS, self._pay(grab, due, "confirmed"))

    def _pays_in_part(self, grab: Grab, quantity: int, due: int, deadline: int) -> None:
        at, price = self._soon(deadline, most=9), due // quantity
        self.plan(at, self._pay(grab, price, "confirmed", quantity=1))
        if quantity > 1 and self.random.random() < 0.5:
            self.plan(at + 2 * MINUTE_MS, self._pay(grab, due - price, "confirmed"))

    def _extends(self, grab: Grab, quantity: int, due: int, deadline: int) -> None:
        """The user gets one extension, is refused a second one, and mostly pays."""
        for minutes, outcome in ((8, "extended"), (10, "limit_reached")):
            extend = Extend(id=self.new_id("extend"), offer=grab.offer, grab=grab.id)
            self.plan(deadline - HOLD_MS + minutes * MINUTE_MS, self.expect(extend, outcome))
        if self.random.random() < 0.8:
            self.plan(deadline + self.random.uniform(1, 12) * MINUTE_MS, self._pay(grab, due, "confirmed"))

    # -- the day of the sale ---------------------------------------------------------------------------------

    async def _day_of_sale(self) -> None:
        await self._minutes("payments: in time, late, twice, wrong, not at all", moment(FRIDAY, "10:05"))
        self.display.stage("the system is verified while most units are held")
        await self.verify_now()
        await self._minutes("the other payments, and holds that expire", moment(FRIDAY, "14:00"))
        self._plan_refunds(moment(FRIDAY, "14:00"), moment(FRIDAY, "17:00"), SHARE_REFUNDED)
        for number in range(self.people // 4):
            self._wish(f"afternoon-{number}", moment(FRIDAY, "14:30"), moment(FRIDAY, "18:00"), HOUR_MS)
        await self._minutes(
            "afternoon: refunds, and returned units are grabbed again", moment(FRIDAY, "21:50")
        )
        for number in range(max(self.people // 20, 8)):
            self.plan(
                moment(FRIDAY, "21:50") + number % 8 * MINUTE_MS, self._grab(f"evening-{number}", "toy", 1)
            )
        await self._minutes("the last minutes", CLOSES_MS)

    async def _minutes(self, stage: str, until_ms: int) -> None:
        self.display.stage(stage, until_ms)
        while self.clock.now_ms < until_ms:
            await self.step(min(self.clock.now_ms + MINUTE_MS, until_ms))
            await self._read_events()

    def _plan_refunds(self, begins: int, ends: int, share: float) -> None:
        """Plans returns of some bought units, of one unit or all. The shop sends each return twice."""
        bought = {
            answer.grab
            for command, answer in self.first.values()
            if isinstance(command, Confirm) and answer.outcome == "confirmed"
        }
        for name in sorted(set(filter(None, bought)) - self._returned):
            if self.random.random() >= share:
                continue
            self._returned.add(name)
            grab = self.first[name][0]
            quantity = self.random.choice((None, 1))
            give_back = Return(
                id=self.new_id("return"),
                offer=grab.offer,
                grab=name,
                quantity=quantity,
                reason="does not fit",
            )
            at = self.random.uniform(begins, ends)
            for _ in range(2):
                self.plan(at, self.expect(give_back, "returned"))
            if quantity is None:  # all units are returned, so another return is refused
                again = msgspec.structs.replace(give_back, id=self.new_id("return"))
                self.plan(at + 5 * MINUTE_MS, self.expect(again, "not_held"))

    # -- after the sale --------------------------------------------------------------------------------------

    async def _close(self) -> None:
        self.require(bool(self._after_close), "no user had a hold at the close")
        over = [
            self.expect(self._grab(f"user-{number}", name, 1), "over", "not_eligible")
            for number in range(5)
            for name, *_ in GOODS
        ]
        await self.send(over)
        self._plan_refunds(CLOSES_MS, CLOSES_MS + HOUR_MS, SHARE_REFUNDED / 8)
        await self._minutes("closed; payments before their deadline still count", CLOSES_MS + 70 * MINUTE_MS)
        self.require(not self._agenda, f"{len(self._agenda)} planned commands were not sent")

    async def _retire(self) -> None:
        self.display.stage("the week after", CLOSES_MS + 7 * 24 * HOUR_MS)
        await self.run_until(CLOSES_MS + 7 * 24 * HOUR_MS + 2 * MINUTE_MS, HOUR_MS)
        await self.send([self.expect(self._grab("user-1", name, 1), "no_such_offer") for name, *_ in GOODS])

    # -- verdict and result ----------------------------------------------------------------------------------

    def story_checks(self) -> list[VerificationCheck]:
        """Checks that all offers are retired, and that every outcome of the story has occurred."""
        offers = self.tally.offers
        not_retired = [name for name, offer in offers.items() if offer.retired_at is None]
        outcomes = {answer.outcome for _, answer in self.first.values()}
        expected = {
            "held", "waiting", "confirmed", "released", "extended", "returned", "not_open_yet",
            "not_eligible", "limit_reached",
            "sold_out", "over", "no_such_offer", "invalid", "expired", "not_held",
        }  # fmt: skip
        from_queue = [
            event for event in self.tally.events.values() if isinstance(event, GrabHeld) and event.waited
        ]
        missing = [f"no command was answered {outcome}" for outcome in sorted(expected - outcomes)] + (
            [] if from_queue else ["no user got units from the waiting list"]
        )
        return [
            VerificationCheck(
                "every offer closed and retired",
                len(offers),
                "offers",
                [f"{name}: not retired" for name in not_retired],
            ),
            VerificationCheck("every planned case has happened", len(expected), "outcomes", missing),
        ]

    def result(self) -> list[dict[str, Any]]:
        """The result of each offer: units, and money in minor units."""
        return [
            {
                "offer": name,
                "total": offer.total,
                "sold": offer.sums["sold"],
                "returned": offer.sums["returned"],
                "kept": offer.taken,
                "revenue": offer.sums["revenue"],
                "refunded": offer.sums["refunded"],
                "refund_due": offer.sums["refund due"],
                "expired": offer.sums["expired"],
                "released": offer.sums["released"],
                "waited": offer.sums["waited"],
                "back": offer.given_back,
                "refused": refused_by_outcome(self, name),
            }
            for name, offer in self.tally.offers.items()
        ]


def publish(result: dict[str, Any], folder: Path) -> list[str]:
    """Writes the result of a story as JSON, and its offers as CSV with a column per outcome of refusals;
    returns the paths.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = result["result"]
    refusals = sorted({outcome for row in rows for outcome in row["refused"]})
    numbers = [name for name in rows[0] if name != "refused"]
    as_json, as_csv = (folder / f"{result['story']}-{result['seed']}.{form}" for form in ("json", "csv"))
    about = {name: result[name] for name in ("story", "seed", "people", "from", "until", "result")}
    as_json.write_text(json.dumps(about, indent=2) + "\n")
    with as_csv.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*numbers, *(f"refused_{outcome}" for outcome in refusals)])
        writer.writerows(
            [*(row[name] for name in numbers), *(row["refused"].get(outcome, 0) for outcome in refusals)]
            for row in rows
        )
    return [str(as_json), str(as_csv)]
