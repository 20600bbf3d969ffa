"""Producers and consumers that use none of this project's code: kcat and SQL only."""

import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from grabstream.settings import Settings
from grabstream.streams.topics import Topics
from grabstream.workshop.rehearsal.run import open_books
from tests.conftest import until
from tests.contract import check_topics
from tests.support.kcat import consume

TERMS = {
    "kind": "envelope",
    "issuer": "alice",
    "funding": "pay-1",
    "asset": "CNY",
    "total": 1000,
    "parts": 3,
    "title": 'a\\b "c" 你好',
}


async def operate(settings: Settings, *values: bytes, key: str = "e1") -> None:
    """Sends commands of operators, and returns when each has an answer: the order of commands holds within
    one topic.
    """
    topics = Topics(settings.prefix)
    produce(settings, *values, key=key, topic=topics.operations)
    sent = [json.loads(value) for value in values]
    count = sum(len(one) if isinstance(one, list) else 1 for one in sent)
    await until(lambda: len(consume(settings, topics.results)) >= count, 60, "answers to operators")


def produce(settings: Settings, *values: bytes, key: str = "e1", topic: str | None = None) -> None:
    # The separator is a byte that no JSON contains, so that each value is sent unchanged.
    command = [
        "kcat",
        "-P",
        "-b",
        settings.kafka,
        "-t",
        topic or Topics(settings.prefix).commands,
        "-k",
        key,
        "-D",
        "\x1e",
    ]
    subprocess.run(command, input=b"\x1e".join(values), check=True, timeout=30)


def encode(*commands: dict[str, Any]) -> bytes:
    return json.dumps(commands[0] if len(commands) == 1 else commands, ensure_ascii=False).encode()


def grab(id: str, user: str, **rest: Any) -> dict[str, Any]:
    return {"type": "grab", "id": id, "offer": "e1", "user": user, **rest}


@pytest.mark.long
async def test_kcat_and_sql_see_an_envelope_from_opening_to_close(
    system: Settings, worker: Callable[..., Any]
) -> None:
    worker(system)
    topics = Topics(system.prefix)
    nonsense = b"\xff\x00 this is no JSON"
    await operate(system, encode({"type": "open", "id": "o1", "offer": "e1", "terms": TERMS}))
    produce(
        system,
        encode(
            grab("g1", "u1"),
            grab("g1", "u1"),
            {"type": "grab", "id": "bad", "offer": "e1", "usr": "x"},
            17,
            grab("g2", "u2"),
        ),
        nonsense,
        encode(grab("g3", "u3")),
        encode(grab("g4", "u4")),
    )

    async def results() -> Any:
        received = [json.loads(line) for line in consume(system, topics.results)]
        return received if len(received) >= 7 else None

    answers = await until(results, 60, "seven answers")
    by_id = {answer["id"]: answer for answer in answers}
    assert {id: answer["outcome"] for id, answer in by_id.items()} == {
        "o1": "opened", "g1": "granted", "bad": "invalid", "g2": "granted", "g3": "granted", "g4": "sold_out",
    }  # fmt: skip
    assert "usr" in by_id["bad"]["message"]
    assert "left" not in by_id["g4"]
    assert sum(by_id[id]["amount"] for id in ("g1", "g2", "g3")) == 1000

    async def rejected() -> Any:
        received = consume(system, topics.rejected, "%s|%h\n")
        return received if len(received) >= 3 else None

    raws = await until(rejected, 30, "three rejected records")
    assert [raw.split("|")[0] for raw in raws] == [
        '{"type": "grab", "id": "bad", "offer": "e1", "usr": "x"}',
        "17",
        "\\xff\x00 this is no JSON",
    ]
    assert all(
        f"topic={topics.commands},partition=" in raw and "reason=" in raw and "index=" in raw for raw in raws
    )

    async def events() -> Any:
        received = consume(system, topics.events, "%k|%h|%s\n")
        return received if len(received) >= 5 else None

    lines = await until(events, 60, "five events")
    parsed = [(line.split("|", 2)[1], json.loads(line.split("|", 2)[2])) for line in lines]
    assert [event["type"] for _, event in parsed] == [
        "offer.opened",
        "grab.granted",
        "grab.granted",
        "grab.granted",
        "offer.closed",
    ]
    assert [event["offer_seq"] for _, event in parsed] == [1, 2, 3, 4, 5]
    for headers, event in parsed:
        for header in (
            "content-type=application/json", "ce_specversion=1.0", f"ce_id={event['shard']}-{event['seq']}",
            f"ce_type={event['type']}",
            "ce_source=", "ce_time=20", "ce_subject=e1",
        ):  # fmt: skip
            assert header in headers
    assert all(line.startswith("e1|") for line in lines)

    async with await open_books(system) as books:

        async def booked() -> bool:
            row = await (
                await books.execute("SELECT state, grabs, given, title FROM offers WHERE offer = 'e1'")
            ).fetchone()
            return row == ("closed", 3, 1000, TERMS["title"])

        await until(booked, 60, "the books")
        rows = await (await books.execute("SELECT body FROM events ORDER BY seq")).fetchall()
        assert [body for (body,) in rows] == [line.split("|", 2)[2] for line in lines]
        posted = dict(await (await books.execute("SELECT account, posted FROM accounts")).fetchall())
        assert posted.pop("external:pay-1") == -1000
        assert posted.pop("offer:e1") == 0
        assert sum(posted.values()) == 1000

        async def counted() -> bool:
            rows = await books.execute(
                "SELECT outcome, sum(refusals)::int FROM demand WHERE offer = 'e1' GROUP BY outcome"
            )
            return await rows.fetchall() == [("sold_out", 1)]

        await until(counted, 30, "the demand")

    # Every record of every topic is a message of the AsyncAPI document, except the two commands records that
    # were rejected completely or in part.
    counts = await check_topics(system)
    assert (counts["operations"], counts["commands"]) == ({"command": 1}, {"command": 2, "nothing": 2})
    assert counts["events"] == {"offer_opened": 1, "grab_granted": 3, "offer_closed": 1}
    assert counts["rejected"] == {"rejected": 3}
    assert set(counts["journal"]) == {"marker", "block"}
    assert counts["results"].keys() == {"answer"}


@pytest.mark.long
async def test_kcat_sees_a_sale_without_secrets(system: Settings, worker: Callable[..., Any]) -> None:
    """Coupons and stock through the commands topic: a basket, a hold that is paid twice, a second payment of
    the same hold; and no topic contains a secret.
    """
    worker(system)
    topics = Topics(system.prefix)
    stock = {
        "kind": "stock", "issuer": "shop", "total": 3, "price": 5, "currency": "CNY", "hold_ms": 60_000,
        "limits": [{"by": "user", "per": "day", "max": 1}],
    }  # fmt: skip
    coupon = {"kind": "coupon", "issuer": "shop", "total": 2}

    def about(type_: str, id: str, offer: str, **rest: Any) -> dict[str, Any]:
        return {"type": type_, "id": id, "offer": offer, **rest}

    await operate(
        system,
        encode(
            about("open", "o1", "w:a", terms=stock),
            about("open", "o2", "w:b", terms=stock),
            about("open", "o3", "w:c", terms=coupon),
        ),
        encode(about("open", "seeded", "x", terms={**TERMS, "seed": "5eed" * 16})),
        encode(about("load", "codes", "w:c", what="codes", chunk=1, chunks=1, items=["SECRET1", "SECRET2"])),
        key="w",
    )
    produce(
        system,
        encode(*(about("grab", f"b1-{offer}", f"w:{offer}", user="ann", basket="b") for offer in "ab")),
        encode(
            *(
                about("grab", f"b2-{offer}", f"w:{offer}", user="ann" if offer == "b" else "bob", basket="b")
                for offer in "ab"
            )
        ),
        encode(about("grab", "g1", "w:c", user="ann")),
        encode(
            *(
                about("confirm", f"c{n}", "w:a", grab="b1-a", payment="p1", paid=5, currency="CNY")
                for n in (1, 2)
            )
        ),
        encode(about("confirm", "c3", "w:a", grab="b1-a", payment="p2", paid=5, currency="CNY")),
        key="w",
    )

    async def results() -> Any:
        received = [json.loads(line) for line in consume(system, topics.results)]
        return received if len(received) >= 13 else None

    answers = {answer["id"]: answer for answer in await until(results, 60, "the answers")}
    assert {id: answer["outcome"] for id, answer in answers.items()} == {
        "o1": "opened", "o2": "opened", "o3": "opened", "seeded": "invalid", "codes": "invalid",
        "b1-a": "held", "b1-b": "held",
        "b2-a": "limit_reached", "b2-b": "limit_reached", "g1": "granted", "c1": "confirmed",
        "c2": "confirmed", "c3": "not_held",
    }  # fmt: skip
    assert (answers["b1-a"]["due"], answers["b1-a"]["currency"]) == (5, "CNY")
    assert answers["b1-a"]["limits"][0]["left"] == 0
    assert answers["c2"]["repeated"]
    assert "coupon_code" not in answers["g1"]
    assert "gate" in answers["codes"]["message"]

    async def events() -> Any:
        received = [json.loads(line) for line in consume(system, topics.events)]
        return received if any(event["type"] == "payment.refund_due" for event in received) else None

    published = await until(events, 60, "the refund that is due")
    assert [event["payment"] for event in published if event["type"] == "payment.refund_due"] == ["p2"]
    assert [event["payment"] for event in published if event["type"] == "grab.confirmed"] == ["p1"]
    assert not any("SECRET" in json.dumps(event) for event in published)
    assert not any("SECRET" in json.dumps(answer) for answer in answers.values())
    assert not any("SECRET" in line or "5eed" in line for line in consume(system, topics.rejected))
    counts = await check_topics(system)
    assert counts["operations"] == {"command": 2, "commands": 1}
    assert counts["commands"] == {"command": 2, "commands": 3}
    assert counts["events"].keys() > {"grab_held", "grab_confirmed", "payment_refund_due"}
