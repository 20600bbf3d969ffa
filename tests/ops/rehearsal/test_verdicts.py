"""The verdicts of the rehearsals, over what small real runs left behind: each line agrees with it, and names
what is damaged.
"""

import copy
import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import pytest_asyncio

from grabstream.models.answers import Answer
from grabstream.models.commands import Confirm, Grab
from grabstream.models.events import AnyEvent
from grabstream.ops.connections.opening import key_space, open_gate, open_redis
from grabstream.ops.rehearsal.clock import HOUR_MS
from grabstream.ops.rehearsal.crowd import attempts, envelopes
from grabstream.ops.rehearsal.promotion import VALID_UNTIL_MS, Promotion
from grabstream.ops.rehearsal.run import Doors, Rehearsal, look, open_books
from grabstream.ops.rehearsal.stage import set_up
from grabstream.ops.rehearsal.story import Story
from grabstream.ops.rehearsal.tally import Tally
from grabstream.ops.rehearsal.verdict import all_answered, verdict
from grabstream.ops.rehearsal.week import Week
from grabstream.ops.settings import Settings
from grabstream.ops.verification.checks import Check
from grabstream.streams.journal import open_reader
from grabstream.streams.topics import Topics
from tests.conftest import until
from tests.support.projecting import open_tables

PEOPLE = 60
SEED = 7

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]


def own(servers: Settings) -> Settings:
    name = f"test{secrets.token_hex(5)}"
    return servers.model_copy(update={"prefix": name, "schema_": name, "shards": 2})


def wrong(checks: list[Check]) -> dict[str, list[str]]:
    return {check.name: check.problems for check in checks if not check.passed}


# -- stories -------------------------------------------------------------------------------------------------


async def told(kind: type[Story], servers: Settings, log: Path) -> AsyncIterator[Story]:
    settings = own(servers)
    redis = open_redis(settings)
    async with (
        set_up(settings, log, False, ("relay",)) as stage,
        open_reader(settings.kafka, Topics(settings.prefix).journal) as reader,
    ):  # fmt: skip
        story = kind(settings, redis, reader, stage, SEED, PEOPLE, True)
        await story.tell()
        yield story
    await redis.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def week(servers: Settings, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Story]:
    class Undisturbed(Week):
        async def take_stock(self) -> None:
            """What `verify` says has tests of its own."""

    async for story in told(Undisturbed, servers, tmp_path_factory.mktemp("week") / "log"):
        yield story


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def promotion(servers: Settings, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Story]:
    async for story in told(Promotion, servers, tmp_path_factory.mktemp("promotion") / "log"):
        yield story


def again(story: Story, events: list[AnyEvent] | None = None) -> Story:
    """The story as it was told, its tally folded anew from these events: its answers and lists may be
    changed, the first one's stay.
    """
    one = copy.copy(story)
    tally = Tally(story.clock)
    # What was looked at while it was told is no matter of the events.
    tally.checked.update({name: story.tally.checked[name] for name in ASKED})
    for name in ASKED:
        tally.problems[name] = list(story.tally.problems[name])
    one.tally = tally
    for event in story.tally.events.values() if events is None else events:
        tally.take(event)
    one.first, one.answers = dict(story.first), list(story.answers)
    if isinstance(story, Promotion):
        one.in_hand = list(story.in_hand)  # type: ignore[attr-defined]
    return one


#: Told while people are answered, and not by the events.
ASKED = ("everybody was answered, always the same", "the story goes as it is told")

Events = list[AnyEvent]


def _says(event: AnyEvent, name: str, value: Any) -> bool:
    found = getattr(event, name)
    return bool(found) == value if isinstance(value, bool) else found == value


def find(events: Events, tag: str, **fields: Any) -> int:
    """The place of the first event of a type that says this; of a field True or False: whether it has
    something.
    """
    for place, event in enumerate(events):
        if event.__struct_config__.tag == tag and all(
            _says(event, name, value) for name, value in fields.items()
        ):
            return place
    raise AssertionError(f"no {tag} with {fields}")


def with_(tag: str, change: Callable[[Any], Any], **fields: Any) -> Callable[[Events], Events]:
    """One event says something else."""

    def damage(events: Events) -> Events:
        place = find(events, tag, **fields)
        return [*events[:place], change(events[place]), *events[place + 1 :]]

    return damage


def without(tag: str, **fields: Any) -> Callable[[Events], Events]:
    """One event is missing, and nobody's number tells."""

    def damage(events: Events) -> Events:
        place = find(events, tag, **fields)
        gone = events[place]
        rest = [
            msgspec.structs.replace(event, offer_seq=event.offer_seq - 1)
            if event.offer == gone.offer
            else event
            for event in events[place + 1 :]
        ]
        return [*events[:place], *rest]

    return damage


def twice(
    tag: str, change: Callable[[Any], Any] = lambda event: event, **fields: Any
) -> Callable[[Events], Events]:
    """One event happens a second time, right behind the first, and everybody's number agrees."""

    def damage(events: Events) -> Events:
        place = find(events, tag, **fields)
        one = events[place]
        more = change(msgspec.structs.replace(one, seq=one.seq + 10**6, offer_seq=one.offer_seq + 1))
        rest = [
            msgspec.structs.replace(event, offer_seq=event.offer_seq + 1)
            if event.offer == one.offer
            else event
            for event in events[place + 1 :]
        ]
        return [*events[: place + 1], more, *rest]

    return damage


def replaced(**fields: Any) -> Callable[[Any], Any]:
    return lambda event: msgspec.structs.replace(event, **{
        name: value(getattr(event, name)) if callable(value) else value for name, value in fields.items()
    })  # fmt: skip


def more(by: int) -> Callable[[int], int]:
    return lambda value: value + by


def raised(refunds: Any) -> Any:
    return tuple((payment, amount + 10**6) for payment, amount in refunds)


class Damage(NamedTuple):
    """Which events say what else, the line of the verdict that must name it, and how it begins to say so."""

    name: str
    says: str
    change: Callable[[Events], Events]


WEEK = [
    Damage("every offer's events without a gap", "event", with_("grab.held", replaced(offer_seq=more(1)))),
    Damage("never over-sold", "says", with_("grab.held", replaced(left=more(1)), waited=False)),
    Damage("never over-sold", "closed with", with_("offer.closed", replaced(left=more(1)))),
    Damage("left + held + taken = total", "≠", twice("grab.confirmed", retaken=False)),
    Damage("closed and retired in time", "due was", with_("offer.closed", replaced(at=more(9 * HOUR_MS)))),
    Damage("closed and retired in time", "due was", with_("offer.retired", replaced(at=more(-9 * HOUR_MS)))),
    Damage("what is due = price × units", "due for", with_("grab.held", replaced(due=more(1)))),
    Damage("expiry at its deadline", "due was", with_("grab.released", replaced(at=more(-HOUR_MS)),
    reason="expired")),
    Damage("no account below 0", "has -", twice("grab.released", reason="expired")),
    Damage("nobody above a limit", "", with_("grab.held", replaced(quantity=more(20)), waited=False)),
    Damage("each payment confirmed or refunded, once", "paid: []", without("grab.confirmed")),
    Damage("each payment confirmed or refunded, once", "paid: [", twice("grab.confirmed", retaken=False)),
    Damage("each payment confirmed or refunded, once", "nobody made",
    with_("grab.confirmed", replaced(payment="nobody"))),
    Damage("each payment confirmed or refunded, once", "paid: [",
    with_("grab.confirmed", replaced(paid=more(1)))),
    Damage("money confirmed = issuer's + refunds", "that the issuers have",
    with_("grab.confirmed", replaced(issuer="other"), paid=True)),
    Damage("money confirmed = issuer's + refunds", "waits",
    with_("grab.returned", replaced(refunds=raised), refunds=True)),
    Damage("every promise is in the journal", "told",
    with_("grab.held", replaced(quantity=more(1)), waited=False)),
    Damage("all holds have ended", "held", without("grab.released", reason="expired")),
    Damage("every offer closed and retired", "still there", without("offer.retired")),
    Damage("everything has happened", "nobody was served who waited",
           lambda events: [msgspec.structs.replace(one, waited=False) if getattr(one, "waited",
           False) else one for one in events]),
]  # fmt: skip


def named(checks: list[Check], name: str, says: str) -> None:
    found = wrong(checks)
    assert name in found, list(found)
    assert any(says in line for line in found[name]), found[name][:3]


async def test_the_week_adds_up(week: Story) -> None:
    assert wrong(await again(week).checks()) == {}


@pytest.mark.parametrize("damage", WEEK, ids=lambda one: f"{one.name}: {one.says}")
async def test_what_is_wrong_with_the_week_is_named(week: Story, damage: Damage) -> None:
    events = list(week.tally.events.values())
    named(await again(week, damage.change(events)).checks(), damage.name, damage.says)


PROMOTION = [
    Damage("an order uses a coupon once", "used twice", twice("grab.redeemed")),
    Damage("an order uses a coupon once", "had used nothing", twice("grab.unredeemed")),
    Damage(
        "nothing used beyond what was taken", "used of", with_("grab.redeemed", replaced(quantity=more(9)))
    ),
    Damage("nothing used after it ran out", "used at", with_("grab.redeemed", replaced(at=VALID_UNTIL_MS))),
    Damage("nobody above a limit", "user/", with_("grab.granted", replaced(quantity=more(9)))),
]


async def test_the_promotion_adds_up(promotion: Story) -> None:
    assert wrong(await again(promotion).checks()) == {}


@pytest.mark.parametrize("damage", PROMOTION, ids=lambda one: f"{one.name}: {one.says}")
async def test_what_is_wrong_with_the_promotion_is_named(promotion: Story, damage: Damage) -> None:
    events = list(promotion.tally.events.values())
    named(await again(promotion, damage.change(events)).checks(), damage.name, damage.says)


async def test_codes_in_two_hands_and_codes_of_nobody_are_named(promotion: Story) -> None:
    for hand, says in ((("g", promotion.in_hand[0][1]), "in 2 hands"), (("g", "CODE-X"), "nobody loaded it")):  # type: ignore[attr-defined]
        one = again(promotion)
        one.in_hand.append(hand)  # type: ignore[attr-defined]
        found = wrong(await one.checks())
        assert list(found) == ["each code in one hand"]
        assert any(says in line for line in found["each code in one hand"])


async def test_a_code_that_nobody_got_is_named(promotion: Story) -> None:
    one = again(promotion)
    one.in_hand.pop()  # type: ignore[attr-defined]
    [line] = wrong(await one.checks())["each code in one hand"]
    assert "coupons taken" in line


async def test_a_limit_that_nobody_met_is_named(promotion: Story) -> None:
    one = again(promotion)
    one.answers = [answer for answer in one.answers if not (answer.limit and answer.limit.per == "day")]
    assert wrong(await one.checks()) == {"every limit was met": ["user/day: by nobody"]}


async def test_what_people_were_told_is_part_of_the_verdict(week: Story) -> None:
    """An answer that changes, one that the story does not allow, one that nobody counted, an outcome that
    nobody had.
    """
    command, answer = next(one for one in week.first.values() if one[1].outcome == "held")
    one = again(week)
    one._take(command, msgspec.structs.replace(answer, quantity=(answer.quantity or 0) + 1))
    [name] = wrong(await one.checks())
    assert name == "everybody was answered, always the same"

    one = again(week)
    early = Grab(id="early", offer=command.offer, user="u")
    one._take(
        one.expect(early, "not_open_yet"), msgspec.structs.replace(answer, id="early", seq=None, shard=None)
    )
    [name] = wrong(await one.checks())
    assert name == "the story goes as it is told"

    refused, over = next(one for one in week.first.values() if one[1].outcome == "over")
    one = again(week)
    one.first["once-more"] = (refused, over)
    found = wrong(await one.checks())
    assert list(found) == ["refusals counted = refusals told"]
    assert "counted" in found["refusals counted = refusals told"][0]

    one = again(week)
    one.first = {id_: pair for id_, pair in one.first.items() if pair[1].outcome != "extended"}
    assert wrong(await one.checks()) == {"everything has happened": ["nobody was answered extended"]}

    one = again(week)
    paid = next(
        pair
        for pair in week.first.values()
        if isinstance(pair[0], Confirm) and pair[1].outcome == "confirmed"
    )
    one.first["lost"] = (paid[0], msgspec.structs.replace(paid[1], seq=10**9))
    found = wrong(await one.checks())
    assert list(found) == ["every promise is in the journal"]


# -- the crowd -----------------------------------------------------------------------------------------------


class Crowd(NamedTuple):
    """A rehearsal that is over."""

    settings: Settings
    chosen: Any
    rehearsal: Rehearsal


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def crowd(servers: Settings, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Crowd]:
    settings = own(servers)
    chosen = [one for one in envelopes(11, 400, 3, 20, 1_000) if one.deadline_ms is None]
    redis = open_redis(settings)
    async with (
        set_up(settings, tmp_path_factory.mktemp("crowd") / "log", False, ("decide,relay,sweep,project",)),
        open_gate(settings) as gate,
    ):
        rehearsal = Rehearsal(settings, gate, chosen, attempts(11, chosen), 11)
        await rehearsal.open()
        await rehearsal.crowd()
        await rehearsal.close_leftovers()

        async def complete() -> bool:
            async with await open_books(settings) as books:
                return (await look(redis, key_space(settings), books)).complete

        await until(complete, 120, "the books' arrival")
        yield Crowd(settings, chosen, rehearsal)
    await redis.aclose()


async def judged(crowd: Crowd, doors: Any = None) -> dict[str, list[str]]:
    async with await open_books(crowd.settings) as books:
        return wrong(await verdict(books, crowd.chosen, doors or crowd.rehearsal.doors))


async def test_the_crowd_adds_up(crowd: Crowd) -> None:
    assert await judged(crowd) == {}


async def test_what_the_crowd_was_told_is_held_against_the_books(crowd: Crowd) -> None:
    lost = copy.deepcopy(crowd.rehearsal.doors)
    lost.answered["gate"] -= 1 + sum(lost.answered.values()) - lost.total
    assert await judged(crowd, lost) == {"everybody was answered, always the same": ["1 without an answer"]}

    offer, grabs = next(iter(crowd.rehearsal.doors.granted.items()))
    grab, amount = next(iter(grabs.items()))
    promised = copy.deepcopy(crowd.rehearsal.doors)
    promised.granted[offer][grab] = amount + 1
    name = "every acknowledged grant is in the books"
    assert await judged(crowd, promised) == {name: [f"{grab} was told {amount + 1}, the books have {amount}"]}
    promised = copy.deepcopy(crowd.rehearsal.doors)
    promised.granted[offer]["nobody"] = 5
    assert await judged(crowd, promised) == {name: ["nobody was told 5, the books have None"]}


async def test_two_answers_that_differ_are_named(crowd: Crowd) -> None:
    doors = copy.deepcopy(crowd.rehearsal.doors)
    offer, grabs = next(iter(doors.granted.items()))
    grab, amount = next(iter(grabs.items()))
    doors.take("gate", Answer(grab, "granted", 0, offer, grab, amount=amount + 1))
    assert await judged(crowd, doors) == {
        "everybody was answered, always the same": [f"{grab}: {amount} and then {amount + 1}"]
    }


BOOKS = [
    ("offers_1", "UPDATE {t} SET state = 'open' WHERE offer = '{o}'", "granted = parts", "open with"),
    ("offers_1", "UPDATE {t} SET grabs = grabs + 1 WHERE offer = '{o}'", "granted = parts", "parts granted"),
    ("offers_1", "UPDATE {t} SET given = given - 1 WHERE offer = '{o}'", "sum paid + given back = sum put in",
    "paid and"),
    ("offers_1", "UPDATE {t} SET total = total + 1 WHERE offer = '{o}'", "sum paid + given back = sum put in",
    "paid and"),
    ("grabs_1", "UPDATE {t} AS t SET user_id = (SELECT user_id FROM {t} AS o WHERE o.grab > t.grab AND "
                "o.offer = t.offer "
     "ORDER BY offer, grab LIMIT 1) WHERE (offer, grab) = (SELECT offer, grab FROM {t} ORDER BY offer, grab "
     "LIMIT 1)",
     "nobody twice", "has 2 parts of"),
    ("grabs_1", "UPDATE {t} SET amount = amount + 1 WHERE (offer, grab) = (SELECT offer, grab FROM {t} ORDER "
                "BY offer, grab LIMIT 1)",
     "every acknowledged grant is in the books", "was told"),
    ("grabs_1", "DELETE FROM {t} WHERE (offer, grab) = (SELECT offer, grab FROM {t} ORDER BY offer, grab "
                "LIMIT 1)",
     "every acknowledged grant is in the books", "the books have None"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("table", "change", "name", "says"), BOOKS, ids=[f"{name}: {change[:40]}" for _, change, name, _ in BOOKS]
)
async def test_what_is_wrong_in_the_books_of_the_crowd_is_named(
    crowd: Crowd, table: str, change: str, name: str, says: str
) -> None:
    async with await open_tables(crowd.settings) as connection:
        await connection.execute(f"CREATE TABLE sound AS TABLE {table}".encode())
        try:
            done = await connection.execute(change.format(t=table, o=crowd.chosen[0].offer).encode())
            assert done.rowcount == 1
            found = await judged(crowd)
        finally:
            await connection.execute(f"DELETE FROM {table}".encode())
            await connection.execute(f"INSERT INTO {table} SELECT * FROM sound".encode())
            await connection.execute(b"DROP TABLE sound")
    assert list(found) == [name]
    assert says in found[name][0]


async def test_an_answer_that_comes_twice_stands_for_no_other() -> None:
    doors = Doors(total=2)
    doors.awaited.update(["a", "b"])
    for _ in range(2):
        doors.take("topic", Answer("a", "sold_out", 32, "o"))
    check = all_answered(doors)
    assert (check.checked, check.problems) == (1, ["1 without an answer"])
    doors.take("topic", Answer("b", "sold_out", 32, "o"))
    assert all_answered(doors).passed
