"""The verdicts of the rehearsals, on the results of small real runs: no check finds a problem, and after each
damage the right check names it.
"""

import copy
import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import pytest_asyncio

from grabstream.connections.opening import key_space, open_gate, open_redis
from grabstream.models.answers import Answer
from grabstream.models.commands import Confirm, Grab
from grabstream.models.events import AnyEvent
from grabstream.ops.verification.checks import VerificationCheck
from grabstream.settings import Settings
from grabstream.streams.journal import open_reader
from grabstream.streams.topics import Topics
from grabstream.workshop.rehearsal.clock import HOUR_MS
from grabstream.workshop.rehearsal.crowd import attempts, envelopes
from grabstream.workshop.rehearsal.promotion import VALID_UNTIL_MS, Promotion
from grabstream.workshop.rehearsal.run import Doors, Rehearsal, open_books, read_progress
from grabstream.workshop.rehearsal.stage import set_up
from grabstream.workshop.rehearsal.story import Story
from grabstream.workshop.rehearsal.tally import Tally
from grabstream.workshop.rehearsal.verdict import all_answered, verdict
from grabstream.workshop.rehearsal.week import Week
from tests.conftest import until
from tests.support.projecting import open_tables

PEOPLE = 60
SEED = 7

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]


def new_system(servers: Settings) -> Settings:
    name = f"test{secrets.token_hex(5)}"
    return servers.model_copy(update={"prefix": name, "schema_": name, "shards": 2})


def problems_of(checks: list[VerificationCheck]) -> dict[str, list[str]]:
    return {check.name: check.problems for check in checks if not check.passed}


# -- stories -------------------------------------------------------------------------------------------------


async def played(kind: type[Story], servers: Settings, log: Path) -> AsyncIterator[Story]:
    settings = new_system(servers)
    redis = open_redis(settings)
    async with (
        set_up(settings, log, False, ("relay",)) as stage,
        open_reader(settings.kafka, Topics(settings.prefix).journal) as reader,
    ):  # fmt: skip
        story = kind(settings, redis, reader, stage, SEED, PEOPLE, True)
        await story.play_to_end()
        yield story
    await redis.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def week(servers: Settings, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Story]:
    class WithoutVerify(Week):
        async def verify_now(self) -> None:
            """Does nothing: `verify` has its own tests."""

    async for story in played(WithoutVerify, servers, tmp_path_factory.mktemp("week") / "log"):
        yield story


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def promotion(servers: Settings, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Story]:
    async for story in played(Promotion, servers, tmp_path_factory.mktemp("promotion") / "log"):
        yield story


def copied(story: Story, events: list[AnyEvent] | None = None) -> Story:
    """A copy of a story that was played, with a new tally of these events. Its answers and lists may be
    changed without changing the original.
    """
    copy_ = copy.copy(story)
    tally = Tally(story.clock)
    # The checks of answers do not follow from the events.
    tally.checked.update({name: story.tally.checked[name] for name in OF_ANSWERS})
    for name in OF_ANSWERS:
        tally.problems[name] = list(story.tally.problems[name])
    copy_.tally = tally
    for event in story.tally.events.values() if events is None else events:
        tally.take(event)
    copy_.first, copy_.answers = dict(story.first), list(story.answers)
    if isinstance(story, Promotion):
        copy_.coupons = list(story.coupons)  # type: ignore[attr-defined]
    return copy_


#: Checks that are made when an answer arrives.
OF_ANSWERS = ("every command was answered, repeats identically", "the story goes as planned")

Events = list[AnyEvent]


def _has(event: AnyEvent, name: str, value: Any) -> bool:
    actual = getattr(event, name)
    return bool(actual) == value if isinstance(value, bool) else actual == value


def index_of(events: Events, tag: str, **fields: Any) -> int:
    """The index of the first event of a type with these fields. True and False match any value that is true
    or false.
    """
    for index, event in enumerate(events):
        if event.__struct_config__.tag == tag and all(
            _has(event, name, value) for name, value in fields.items()
        ):
            return index
    raise AssertionError(f"no {tag} with {fields}")


def with_(tag: str, change: Callable[[Any], Any], **fields: Any) -> Callable[[Events], Events]:
    """Changes an event."""

    def damage(events: Events) -> Events:
        index = index_of(events, tag, **fields)
        return [*events[:index], change(events[index]), *events[index + 1 :]]

    return damage


def without(tag: str, **fields: Any) -> Callable[[Events], Events]:
    """Removes an event, and renumbers the later events of its offer."""

    def damage(events: Events) -> Events:
        index = index_of(events, tag, **fields)
        removed = events[index]
        rest = [
            msgspec.structs.replace(event, offer_seq=event.offer_seq - 1)
            if event.offer == removed.offer
            else event
            for event in events[index + 1 :]
        ]
        return [*events[:index], *rest]

    return damage


def twice(
    tag: str, change: Callable[[Any], Any] = lambda event: event, **fields: Any
) -> Callable[[Events], Events]:
    """Repeats an event right after the first, and renumbers the later events of its offer."""

    def damage(events: Events) -> Events:
        index = index_of(events, tag, **fields)
        first = events[index]
        second = change(msgspec.structs.replace(first, seq=first.seq + 10**6, offer_seq=first.offer_seq + 1))
        rest = [
            msgspec.structs.replace(event, offer_seq=event.offer_seq + 1)
            if event.offer == first.offer
            else event
            for event in events[index + 1 :]
        ]
        return [*events[: index + 1], second, *rest]

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
    """A change of the events, the check that must report it, and what one of its problems must say."""

    name: str
    says: str
    change: Callable[[Events], Events]


WEEK = [
    Damage(
        "every offer's events without a gap",
        "its offer_seq is",
        with_("grab.held", replaced(offer_seq=more(1))),
    ),
    Damage("never over-sold", "says", with_("grab.held", replaced(left=more(1)), waited=False)),
    Damage("never over-sold", "closed with", with_("offer.closed", replaced(left=more(1)))),
    Damage("left + held + taken = total", "≠", twice("grab.confirmed", retaken=False)),
    Damage("closed and retired in time", "was due at", with_("offer.closed", replaced(at=more(9 * HOUR_MS)))),
    Damage(
        "closed and retired in time", "was due at", with_("offer.retired", replaced(at=more(-9 * HOUR_MS)))
    ),
    Damage("what is due = price × units", "due for", with_("grab.held", replaced(due=more(1)))),
    Damage(
        "expiry at its deadline",
        "was due at",
        with_("grab.released", replaced(at=more(-HOUR_MS)), reason="expired"),
    ),
    Damage("no account below 0", "has -", twice("grab.released", reason="expired")),
    Damage("no user above a limit", "", with_("grab.held", replaced(quantity=more(20)), waited=False)),
    Damage("each payment confirmed or refunded, once", "its events are []", without("grab.confirmed")),
    Damage(
        "each payment confirmed or refunded, once",
        "its events are [(",
        twice("grab.confirmed", retaken=False),
    ),
    Damage(
        "each payment confirmed or refunded, once",
        "no user made",
        with_("grab.confirmed", replaced(payment="nobody")),
    ),
    Damage(
        "each payment confirmed or refunded, once",
        "its events are [(",
        with_("grab.confirmed", replaced(paid=more(1))),
    ),
    Damage(
        "money confirmed = issuer's + refunds",
        "that the issuers have",
        with_("grab.confirmed", replaced(issuer="other"), paid=True),
    ),
    Damage(
        "money confirmed = issuer's + refunds",
        "on its refund account",
        with_("grab.returned", replaced(refunds=raised), refunds=True),
    ),
    Damage(
        "every promise is in the journal",
        "answered",
        with_("grab.held", replaced(quantity=more(1)), waited=False),
    ),
    Damage("all holds have ended", "held", without("grab.released", reason="expired")),
    Damage("every offer closed and retired", "not retired", without("offer.retired")),
    Damage(
        "every planned case has happened",
        "no user got units from the waiting list",
        lambda events: [
            msgspec.structs.replace(event, waited=False) if getattr(event, "waited", False) else event
            for event in events
        ],
    ),
]


def assert_problem(checks: list[VerificationCheck], name: str, says: str) -> None:
    problems = problems_of(checks)
    assert name in problems, list(problems)
    assert any(says in problem for problem in problems[name]), problems[name][:3]


@pytest.mark.long
async def test_the_week_has_no_problems(week: Story) -> None:
    assert problems_of(await copied(week).checks()) == {}


@pytest.mark.long
@pytest.mark.parametrize("damage", WEEK, ids=lambda one: f"{one.name}: {one.says}")
async def test_damage_to_the_week_is_reported(week: Story, damage: Damage) -> None:
    events = list(week.tally.events.values())
    assert_problem(await copied(week, damage.change(events)).checks(), damage.name, damage.says)


PROMOTION = [
    Damage("an order uses a coupon once", "used twice", twice("grab.redeemed")),
    Damage("an order uses a coupon once", "did not use it", twice("grab.unredeemed")),
    Damage(
        "nothing used beyond what was taken", "used of", with_("grab.redeemed", replaced(quantity=more(9)))
    ),
    Damage("no coupon used after it expired", "used at", with_("grab.redeemed", replaced(at=VALID_UNTIL_MS))),
    Damage("no user above a limit", "user/", with_("grab.granted", replaced(quantity=more(9)))),
]


@pytest.mark.long
async def test_the_promotion_has_no_problems(promotion: Story) -> None:
    assert problems_of(await copied(promotion).checks()) == {}


@pytest.mark.long
@pytest.mark.parametrize("damage", PROMOTION, ids=lambda one: f"{one.name}: {one.says}")
async def test_damage_to_the_promotion_is_reported(promotion: Story, damage: Damage) -> None:
    events = list(promotion.tally.events.values())
    assert_problem(await copied(promotion, damage.change(events)).checks(), damage.name, damage.says)


@pytest.mark.long
async def test_codes_of_two_users_and_unknown_codes_are_reported(promotion: Story) -> None:
    known = promotion.coupons[0][1]  # type: ignore[attr-defined]
    for coupon, says in ((("g", known), "2 users have it"), (("g", "CODE-X"), "was not loaded")):
        story = copied(promotion)
        story.coupons.append(coupon)  # type: ignore[attr-defined]
        problems = problems_of(await story.checks())
        assert list(problems) == ["each code belongs to one user"]
        assert any(says in problem for problem in problems["each code belongs to one user"])


@pytest.mark.long
async def test_a_code_that_no_user_got_is_reported(promotion: Story) -> None:
    story = copied(promotion)
    story.coupons.pop()  # type: ignore[attr-defined]
    [problem] = problems_of(await story.checks())["each code belongs to one user"]
    assert "coupons are taken" in problem


@pytest.mark.long
async def test_a_limit_that_no_user_reached_is_reported(promotion: Story) -> None:
    story = copied(promotion)
    story.answers = [answer for answer in story.answers if not (answer.limit and answer.limit.per == "day")]
    assert problems_of(await story.checks()) == {"every limit was met": ["user/day: no user reached it"]}


@pytest.mark.long
async def test_damaged_answers_are_reported(week: Story) -> None:
    """A second answer that differs, an outcome that the story does not expect, a refusal that Redis did not
    count, an outcome that no command had, an answer without its event.
    """
    command, answer = next(pair for pair in week.first.values() if pair[1].outcome == "held")
    story = copied(week)
    story._take(command, msgspec.structs.replace(answer, quantity=(answer.quantity or 0) + 1))
    [name] = problems_of(await story.checks())
    assert name == "every command was answered, repeats identically"

    story = copied(week)
    early = Grab(id="early", offer=command.offer, user="u")
    story._take(
        story.expect(early, "not_open_yet"),
        msgspec.structs.replace(answer, id="early", seq=None, shard=None),
    )
    [name] = problems_of(await story.checks())
    assert name == "the story goes as planned"

    refused, over = next(pair for pair in week.first.values() if pair[1].outcome == "over")
    story = copied(week)
    story.first["once-more"] = (refused, over)
    problems = problems_of(await story.checks())
    assert list(problems) == ["refusals counted = refusals answered"]
    assert "counted" in problems["refusals counted = refusals answered"][0]

    story = copied(week)
    story.first = {id_: pair for id_, pair in story.first.items() if pair[1].outcome != "extended"}
    assert problems_of(await story.checks()) == {
        "every planned case has happened": ["no command was answered extended"]
    }

    story = copied(week)
    paid = next(
        pair
        for pair in week.first.values()
        if isinstance(pair[0], Confirm) and pair[1].outcome == "confirmed"
    )
    story.first["lost"] = (paid[0], msgspec.structs.replace(paid[1], seq=10**9))
    assert list(problems_of(await story.checks())) == ["every promise is in the journal"]


# -- the crowd -----------------------------------------------------------------------------------------------


class Crowd(NamedTuple):
    """A rehearsal that has ended."""

    settings: Settings
    chosen: Any
    rehearsal: Rehearsal


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def crowd(servers: Settings, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Crowd]:
    settings = new_system(servers)
    chosen = [envelope for envelope in envelopes(11, 400, 3, 20, 1_000) if envelope.deadline_ms is None]
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
                return (await read_progress(redis, key_space(settings), books)).complete

        await until(complete, 120, "the read models")
        yield Crowd(settings, chosen, rehearsal)
    await redis.aclose()


async def judged(crowd: Crowd, doors: Any = None) -> dict[str, list[str]]:
    async with await open_books(crowd.settings) as books:
        return problems_of(await verdict(books, crowd.chosen, doors or crowd.rehearsal.doors))


async def test_the_crowd_has_no_problems(crowd: Crowd) -> None:
    assert await judged(crowd) == {}


async def test_answers_to_the_crowd_are_compared_with_the_read_models(crowd: Crowd) -> None:
    lost = copy.deepcopy(crowd.rehearsal.doors)
    lost.answered["gate"] -= 1 + sum(lost.answered.values()) - lost.total
    assert await judged(crowd, lost) == {
        "every command was answered, repeats identically": ["1 attempt without an answer"]
    }

    offer, grabs = next(iter(crowd.rehearsal.doors.granted.items()))
    grab, amount = next(iter(grabs.items()))
    promised = copy.deepcopy(crowd.rehearsal.doors)
    promised.granted[offer][grab] = amount + 1
    name = "every acknowledged grant is in the books"
    assert await judged(crowd, promised) == {
        name: [f"{grab} was answered {amount + 1}, the read models have {amount}"]
    }
    promised = copy.deepcopy(crowd.rehearsal.doors)
    promised.granted[offer]["unknown"] = 5
    assert await judged(crowd, promised) == {name: ["unknown was answered 5, the read models have nothing"]}


async def test_two_answers_that_differ_are_reported(crowd: Crowd) -> None:
    doors = copy.deepcopy(crowd.rehearsal.doors)
    offer, grabs = next(iter(doors.granted.items()))
    grab, amount = next(iter(grabs.items()))
    doors.take("gate", Answer(grab, "granted", 0, offer, grab=grab, amount=amount + 1))
    assert await judged(crowd, doors) == {
        "every command was answered, repeats identically": [f"{grab}: {amount} and then {amount + 1}"]
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
     "no user twice", "has 2 parts of"),
    ("grabs_1", "UPDATE {t} SET amount = amount + 1 WHERE (offer, grab) = (SELECT offer, grab FROM {t} ORDER "
                "BY offer, grab LIMIT 1)",
     "every acknowledged grant is in the books", "was answered"),
    ("grabs_1", "DELETE FROM {t} WHERE (offer, grab) = (SELECT offer, grab FROM {t} ORDER BY offer, grab "
                "LIMIT 1)",
     "every acknowledged grant is in the books", "the read models have nothing"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("table", "change", "name", "says"), BOOKS, ids=[f"{name}: {change[:40]}" for _, change, name, _ in BOOKS]
)
async def test_damaged_read_models_of_the_crowd_are_reported(
    crowd: Crowd, table: str, change: str, name: str, says: str
) -> None:
    async with await open_tables(crowd.settings) as connection:
        await connection.execute(f"CREATE TABLE sound AS TABLE {table}".encode())
        try:
            done = await connection.execute(change.format(t=table, o=crowd.chosen[0].offer).encode())
            assert done.rowcount == 1
            problems = await judged(crowd)
        finally:
            await connection.execute(f"DELETE FROM {table}".encode())
            await connection.execute(f"INSERT INTO {table} SELECT * FROM sound".encode())
            await connection.execute(b"DROP TABLE sound")
    assert list(problems) == [name]
    assert says in problems[name][0]


async def test_a_repeated_answer_is_counted_once() -> None:
    doors = Doors(total=2)
    doors.begin("rush")
    doors.awaited.update(["a", "b"])
    for _ in range(2):
        doors.take("topic", Answer("a", "sold_out", 32, "o"))
    check = all_answered(doors)
    assert (check.checked, check.problems) == (1, ["1 attempt without an answer"])
    doors.take("topic", Answer("b", "sold_out", 32, "o"))
    assert all_answered(doors).passed
