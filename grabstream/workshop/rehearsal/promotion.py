"""The story of a coupon promotion: one coupon offer over five days, with a code for every coupon.

Each user gets at most 2 coupons a day and 5 in all. Users use coupons for orders, some orders are cancelled,
and no coupon is used after the last day.
"""

from collections import Counter
from typing import Any, Final

import msgspec

from grabstream.models.answers import Answer
from grabstream.models.commands import AnyCommand, Grab, Open, Redeem, Unredeem
from grabstream.models.events import GrabRedeemed
from grabstream.models.offers import CouponTerms, Limit
from grabstream.ops.verification.checks import VerificationCheck
from grabstream.workshop.rehearsal.clock import HOUR_MS, MINUTE_MS, TIMEZONE, moment, shown
from grabstream.workshop.rehearsal.story import Story, chunks, refused_by_outcome

DAYS: Final = 5
PER_DAY: Final = 2
PER_USER: Final = 5
COUPONS_A_PERSON: Final = 4
SHARE_COMING_A_DAY: Final = 0.6
SHARE_OF_DOUBLE_CLICKS: Final = 0.08
NIGHT_OWLS: Final = 10
#: A command that depends on another is planned a step after it, so the two are never sent together.
STEP_MS: Final = 20 * MINUTE_MS
OPENS_MS: Final = moment(0, "10:00")
CLOSES_MS: Final = moment(DAYS - 1, "22:00")
VALID_UNTIL_MS: Final = moment(DAYS, "00:00")


class Promotion(Story):
    """The promotion of coupons over five days."""

    name = "promotion"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.offer = f"{self.campaign}:coupon"
        self.total = max(COUPONS_A_PERSON * self.people, PER_USER * NIGHT_OWLS)
        self.codes = [f"CODE-{number:06d}-{self.random.randbytes(3).hex()}" for number in range(self.total)]
        #: the coupons of all users: (grab, code)
        self.coupons: list[tuple[str, str]] = []

    async def play(self) -> None:
        """Opens and loads the offer on Monday, lets users grab and use coupons for five days, and ends
        both.
        """
        await self._open()
        for day in range(DAYS):
            await self._day(day)
        await self._end()

    async def _open(self) -> None:
        self.display.stage("the offer is opened, its codes are loaded")
        terms = CouponTerms(
            issuer="shop",
            title="Ten off",
            total=self.total,
            opens_at=OPENS_MS,
            closes_at=CLOSES_MS,
            valid_until=VALID_UNTIL_MS,
            timezone=TIMEZONE,
            limits=(Limit(by="user", per="offer", max=PER_USER), Limit(by="user", per="day", max=PER_DAY)),
            max_per_grab=2,
        )
        await self.send(
            [self.expect(Open(id=f"open-{self.campaign}", offer=self.offer, terms=terms), "opened")]
        )
        loads = chunks(self.offer, "codes", self.codes, least=2)
        await self.send([self.expect(load, "loaded") for load in loads[:-1]])
        [early] = await self.send([self.expect(self._grab("early"), "not_open_yet")])
        self.require(early.retry_at == OPENS_MS, f"retry_at is {early.retry_at}, expected {OPENS_MS}")
        # The last chunk is sent twice, and once more under another id: the list stays the same.
        again = msgspec.structs.replace(loads[-1], id="load-again")
        await self.send([self.expect(loads[-1], "loaded")])
        await self.send([loads[-1], self.expect(again, "conflict")])

    async def _day(self, day: int) -> None:
        begins, ends = moment(day, "10:00"), moment(day, "22:00")
        await self.run_until(begins, STEP_MS)
        self.display.stage(f"day {day + 1}: users grab and use coupons", ends)
        for number in range(self.people):
            if self.random.random() < SHARE_COMING_A_DAY:
                self._visit(f"user-{number}", begins, ends)
        await self.run_until(ends, STEP_MS)
        self.require(
            not self._agenda or self._agenda[0][0] > ends, "a command planned for the day was not sent"
        )
        if day == 0:
            await self._midnight()

    def _visit(self, user: str, begins: int, ends: int) -> None:
        """Plans one to three grabs of a user, which may be more than the day's limit."""
        at = self.random.uniform(begins, ends - 2 * STEP_MS)
        for _ in range(self.random.randint(1, PER_DAY + 1)):
            grab = self._grab(user, self.random.choice((1, 1, 1, 2)))
            for _ in range(1 + (self.random.random() < SHARE_OF_DOUBLE_CLICKS)):
                self.plan(at, grab)
            at = min(at + self.random.expovariate(1 / HOUR_MS), ends - STEP_MS)

    def _grab(self, user: str, quantity: int = 1) -> Grab:
        return Grab(id=self.new_id("grab"), offer=self.offer, user=user, quantity=quantity)

    async def _midnight(self) -> None:
        """Checks that the day's limit starts again at midnight in the offer's zone, not before, and not by
        UTC.
        """
        owls = [f"owl-{number}" for number in range(NIGHT_OWLS)]
        await self.run_until(moment(1, "00:00") - 1, STEP_MS)
        self.display.stage("midnight: the day's limit starts again")
        await self.send([self.expect(self._grab(owl), "granted") for owl in owls for _ in range(PER_DAY)])
        for answer in await self.send([self.expect(self._grab(owl), "limit_reached") for owl in owls]):
            self.require(
                answer.retry_at == moment(1, "00:00"),
                f"{answer.limit}: retry_at is {answer.retry_at}, expected {moment(1, '00:00')}",
            )
        await self.step(moment(1, "00:00"))
        await self.send([self.expect(self._grab(owl), "granted") for owl in owls for _ in range(PER_DAY)])
        await self.send([self.expect(self._grab(owl), "limit_reached") for owl in owls])

    def on_answer(self, command: AnyCommand, answer: Answer) -> None:
        """Keeps the coupons of a granted grab, and plans the use of some of them."""
        if not isinstance(command, Grab) or answer.outcome != "granted":
            return
        codes = answer.coupon_codes or (answer.coupon_code or "",)
        self.coupons += [(command.id, code) for code in codes]
        self.require(
            len(codes) == answer.quantity and "" not in codes,
            f"{command.id}: {answer.quantity} coupons, codes {codes}",
        )
        chance, now = self.random.random(), self.clock.now_ms
        if chance < 0.5:
            self._use(command.id, len(codes), now + self.random.uniform(0, 2 * HOUR_MS), chance)

    def _use(self, grab: str, quantity: int, at: float, chance: float) -> None:
        order = self.new_id("order")
        redeem = Redeem(id=self.new_id("redeem"), offer=self.offer, grab=grab, order=order, quantity=quantity)
        self.plan(at, self.expect(redeem, "redeemed"))
        if at + 3 * STEP_MS >= VALID_UNTIL_MS:
            return
        # The shop sends the command again, the same order under another id, and the order with another
        # number.
        if chance < 0.1:
            again = msgspec.structs.replace(redeem, id=self.new_id("redeem"))
            other = msgspec.structs.replace(redeem, id=self.new_id("redeem"), quantity=quantity + 1)
            for repeat in (redeem, self.expect(again, "redeemed"), self.expect(other, "conflict")):
                self.plan(at + STEP_MS, repeat)
        elif chance < 0.2:  # another order wants the same coupons
            other = msgspec.structs.replace(redeem, id=self.new_id("redeem"), order=self.new_id("order"))
            self.plan(at + STEP_MS, self.expect(other, "not_redeemable"))
        elif chance < 0.3:  # the order is cancelled, twice; half of these coupons are used again
            for _ in range(2):
                cancel = Unredeem(id=self.new_id("unredeem"), offer=self.offer, grab=grab, order=order)
                self.plan(at + STEP_MS, self.expect(cancel, "unredeemed"))
            if chance < 0.25:
                other = msgspec.structs.replace(redeem, id=self.new_id("redeem"), order=self.new_id("order"))
                self.plan(at + 2 * STEP_MS, self.expect(other, "redeemed"))

    async def _end(self) -> None:
        """Checks that coupons can be used after the offer's close on Friday evening, up to the last
        millisecond before midnight.
        """
        self.require(self.clock.now_ms == CLOSES_MS, "the last day does not end with the close of the offer")
        self.display.stage("closed; coupons are still used", VALID_UNTIL_MS)
        await self.send([self.expect(self._grab("late"), "over")])
        await self.run_until(VALID_UNTIL_MS - 1, STEP_MS)
        await self.catch_up()
        unused = [
            name
            for name, grab in self.tally.grabs.items()
            if not grab.redeemed and not grab.orders and grab.taken
        ]
        unused = self.random.sample(unused, min(40, len(unused)))
        half = len(unused) // 2
        await self.send([self.expect(self._redeem(grab), "redeemed") for grab in unused[:half]])
        await self.step(VALID_UNTIL_MS)
        self.display.stage("coupons are no longer valid")
        await self.send([self.expect(self._redeem(grab), "expired") for grab in unused[half:]])
        self.require(not self._agenda, f"{len(self._agenda)} planned commands were not sent")

    def _redeem(self, grab: str) -> Redeem:
        return Redeem(id=self.new_id("redeem"), offer=self.offer, grab=grab, order=self.new_id("order"))

    def story_checks(self) -> list[VerificationCheck]:
        """Checks that each code has one user, that no coupon was used too late, and that each limit was
        reached.
        """
        codes = Counter(code for _, code in self.coupons)
        repeated = [f"{code}: {count} users have it" for code, count in codes.items() if count > 1]
        unknown = [f"{code}: was not loaded" for code in codes.keys() - set(self.codes)]
        uses = [event for event in self.tally.events.values() if isinstance(event, GrabRedeemed)]
        late = [f"{event.grab}: used at {shown(event.at)}" for event in uses if event.at >= VALID_UNTIL_MS]
        offer = self.tally.offers[self.offer]
        missing = (
            []
            if codes.total() == offer.taken
            else [f"users have {codes.total()} codes, but {offer.taken} coupons are taken"]
        )
        reached = {f"{answer.limit.by}/{answer.limit.per}" for answer in self.answers if answer.limit}
        return [
            VerificationCheck(
                "each code belongs to one user", len(codes), "codes", repeated + unknown + missing
            ),
            VerificationCheck("no coupon used after it expired", len(uses), "uses", late),
            VerificationCheck(
                "every limit was met",
                len(reached),
                "limits",
                [f"{name}: no user reached it" for name in sorted({"user/day", "user/offer"} - reached)],
            ),
        ]

    def result(self) -> list[dict[str, Any]]:
        """The coupons of the offer by what became of them."""
        offer = self.tally.offers[self.offer]
        return [
            {
                "offer": self.offer,
                "total": offer.total,
                "taken": offer.taken,
                "people": len({grab.user for grab in self.tally.grabs.values()}),
                "redeemed": offer.sums["redeemed"],
                "unredeemed": offer.sums["unredeemed"],
                "back": offer.given_back,
                "refused": refused_by_outcome(self, self.offer),
            }
        ]
