"""The JavaScript client: every method against a real gateway, lost replies, and its types."""

import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from grabstream import CouponTerms, Grab, Open, open_gate
from grabstream.client.following import MESSAGE_BYTES_MAX
from grabstream.models.identifiers import id_of_end_user
from grabstream.workshop.services import free_ports
from grabstream.workshop.services.servers import PROJECT
from tests.client.scripted import DROP, HANG, losing_replies, reply, scripted
from tests.client.test_over_http import (
    BUSY,
    BUSY_BODY,
    BUSY_LONG,
    FUTURE,
    GRANTED,
    NO_KEY,
    OF_H,
    OF_OTHERS,
    SOLD_OUT,
)
from tests.client.test_streams import HEAD, message
from tests.conftest import some_by_tier
from tests.gateway.conftest import Door
from tests.support.nodejs import need_node
from tests.support.receipts import SECRET, as_text

FOLDER: Final = PROJECT / "grabstream" / "client" / "javascript"
HERE: Final = Path(__file__).parent


@pytest.fixture(autouse=True)
def _node() -> None:
    need_node("the JavaScript client")


async def run(*words: str) -> str:
    """What a program of Node.js prints."""
    done = await asyncio.to_thread(
        subprocess.run, ["node", *words], cwd=HERE, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


async def test_every_command_and_question(door: Door, offer: str) -> None:
    url = f"http://127.0.0.1:{door.gateway.port}"
    printed = await run("every_call.mjs", url, offer, as_text(SECRET))
    assert json.loads(printed) == [
        "opened", "opened", "opened", "amended", "paused", "resumed", "held", "extended", "confirmed",
        "returned", "held", "released", "granted", "granted", "redeemed", "unredeemed", "closed", "over",
        "over", "over",
    ]  # fmt: skip


@pytest.mark.long
async def test_lost_replies_are_asked_for_again(door: Door, offer: str) -> None:
    async with open_gate(door.settings) as gate:
        await gate.decide([Open(id="o", offer=offer, terms=CouponTerms(issuer="s", total=9))])
        async with losing_replies(door.gateway.port, 2) as url:
            assert await run("one_call.mjs", url, offer, "ann", "g-1", "20000") == "granted true"
        async with losing_replies(door.gateway.port, 10**6) as url:
            assert await run("one_call.mjs", url, offer, "bob", "g-2", "1000") == "OutcomeUnknown"
        [answer] = await gate.decide([Grab(id="g-2", offer=offer, user="bob")])
    assert (answer.outcome, answer.repeated, answer.left) == ("granted", True, 7)


CASES: list[tuple[list[bytes | str], str]] = [
    ([BUSY, GRANTED], "granted false"),
    ([SOLD_OUT], "sold_out false"),
    ([BUSY_LONG], "RequestProblem busy"),
    ([DROP], "OutcomeUnknown"),
    ([HANG], "OutcomeUnknown"),
    ([DROP, NO_KEY], "OutcomeUnknown"),
    ([DROP, SOLD_OUT], "sold_out false"),
    ([NO_KEY], "RequestProblem unauthorized"),
    ([reply(502, "<h1>")], "OutcomeUnknown"),
    ([reply(404, "<h1>")], "OutcomeUnknown"),
    ([reply(409, OF_OTHERS)], "OutcomeUnknown"),
    ([reply(409, OF_H)], "OutcomeUnknown"),
    ([GRANTED.replace(b'"id":"g"', b'"id":"h"')], "OutcomeUnknown"),
    ([reply(503, BUSY_BODY, f"retry-after: {FUTURE}")], "RequestProblem busy"),
    ([reply(503, BUSY_BODY, f"retry-after: {10**5}")], "RequestProblem busy"),
    ([reply(200, "<h1>")], "OutcomeUnknown"),
    ([reply(200, "{}")], "OutcomeUnknown"),
    ([reply(503, "upstream connect error")], "OutcomeUnknown"),
    ([reply(524, "<h1>"), GRANTED], "granted false"),
    ([reply(302, "", "location: http://127.0.0.1:1/")], "OutcomeUnknown"),
]


@pytest.mark.parametrize("case", some_by_tier(range(len(CASES)), 1))
async def test_replies(case: int) -> None:
    steps, expected = CASES[case]
    # Where no reply decides, the time must run out; elsewhere it must not, however busy the machine.
    timeout_ms = "700" if expected == "OutcomeUnknown" else "30000"
    async with scripted(steps) as (url, requests):
        assert await run("one_call.mjs", url, "o", "u", "g", timeout_ms) == expected
    assert all(b"idempotency-key: g\r\n" in request.lower() for request in requests)
    # A pause that would end too late is not begun.
    assert len(requests) == 1 or expected != "RequestProblem busy"


ODD_VALUES: Final = """
import { Client } from '%s'
const client = new Client(process.argv[1])
for (const id of [null, '', 7, 'a b', {}]) {
  await client.grab('o', 'u', { id }).catch((error) => console.log(error.name))
}
await client.offers({ limit: undefined, issuer: null, kind: 'coupon' })
"""


async def test_odd_values_are_not_sent_as_texts() -> None:
    """An id `null` would be the same key for all commands that have none."""
    code = ODD_VALUES % (FOLDER / "grabstream.mjs").as_uri()
    async with scripted([reply(200, '{"offers":[]}')]) as (url, requests):
        assert (await run("--input-type=module", "-e", code, url)).split() == ["TypeError"] * 5
    assert [request.split(b"\r\n")[0] for request in requests] == [b"GET /v1/offers?kind=coupon HTTP/1.1"]


SUMS: Final = """
import { Client } from '%s'
const shown = (value) => `${typeof value} ${value}`
for (const one of (await new Client(process.argv[1]).userBalances('u')).balances) {
  console.log([one.asset, one.available, one.held].map(shown).join(', '))
}
"""


async def test_sums_beyond_the_exact_numbers_are_exact() -> None:
    """A number would show 2^53 + 1 as 2^53. Texts stay texts, whatever they look like."""
    code = SUMS % (FOLDER / "grabstream.mjs").as_uri()
    text = r"""{"balances":[
        {"asset":"12345678901234567890","available":9007199254740993,"held":-9007199254740993},
        {"asset":"a\",\"held\":9007199254740993","available":9007199254740991,"held":12},
        {"asset":"\\","available":9007199254740992,"held":123456789012345678901234567890}]}"""
    async with scripted([reply(200, text)]) as (url, _):
        assert (await run("--input-type=module", "-e", code, url)).splitlines() == [
            "string 12345678901234567890, bigint 9007199254740993, bigint -9007199254740993",
            'string a","held":9007199254740993, number 9007199254740991, number 12',
            "string \\, bigint 9007199254740992, bigint 123456789012345678901234567890",
        ]


async def test_nothing_was_decided_when_nothing_listens() -> None:
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    assert await run("one_call.mjs", url, "o", "u", "g", "500") == "RequestProblem no_reply"


@pytest.mark.long
async def test_error_of_a_callback_ends_a_stream() -> None:
    """It is not a failure of the connection, after which the client would connect again."""
    position = b'event: position\ndata: {"offer":"o","grab":"g","position":3}\n\n'
    async with scripted([HEAD + message(2), HEAD + position + message(3)], closes=True) as (url, requests):
        assert await run("told_position.mjs", url) == "offer.paused | Error position 3"
    assert len(requests) == 2


RELEASE: Final = """
import { Client } from '%s'
const client = new Client(process.argv[1], { timeoutMs: 30_000 })
for (let n = 0; n < 3; n++) {
  await client.release('o', 'g', 'ann', { id: 'k' })
    .then((answer) => console.log(answer.id, answer.outcome))
    .catch((error) => console.log(error.name))
}
"""


async def test_answer_to_an_end_user_has_an_id_of_user_and_key() -> None:
    code = RELEASE % (FOLDER / "grabstream.mjs").as_uri()
    own, other = id_of_end_user("ann", "k"), id_of_end_user("bob", "k")[:-1]
    released = '{"id":"%s","outcome":"released","code":3,"offer":"o"}'
    not_held = (
        '{"type":"/problems/not_held","status":409,"detail":"d","id":"%s","outcome":"not_held","code":35}'
    )
    steps = [reply(200, released % own), reply(409, not_held % own), reply(200, released % other)]
    async with scripted(steps) as (url, _):
        assert (await run("--input-type=module", "-e", code, url)).splitlines() == [
            f"{own} released", f"{own} not_held", "OutcomeUnknown",
        ]  # fmt: skip


FOLLOWING: Final = """
import { Client } from '%s'
try {
  for await (const { event } of new Client(process.argv[1]).offerEvents('o', { after: 0 })) {
    console.log(event.title.length)
  }
} catch (error) {
  console.log(error.name, error.type, error.detail)
}
"""


async def test_message_that_does_not_end_is_refused() -> None:
    """A stream is bound as that of the Python clients: in bytes, and only a message at a time."""
    code = FOLLOWING % (FOLDER / "grabstream.mjs").as_uri()
    whole = [b'id: 1-%d\nevent: a\ndata: {"title":"%b"}\n\n' % (n, b"x" * 700_000) for n in (1, 2, 3)]
    # Fewer characters than bytes.
    endless = b'id: 1-4\nevent: a\ndata: {"title":"' + "é".encode() * (MESSAGE_BYTES_MAX // 2)
    async with scripted([HEAD + b"".join(whole) + endless]) as (url, requests):
        assert (await run("--input-type=module", "-e", code, url)).splitlines() == [
            "700000", "700000", "700000",
            "RequestProblem unexpected_reply GET /v1/offers/o/events got 200, not from a gateway: "
            f"a message has over {MESSAGE_BYTES_MAX} bytes",
        ]  # fmt: skip
    assert len(requests) == 1


@pytest.mark.long
def test_types(tmp_path: Path) -> None:
    """A strict compiler takes what a service writes, and refuses what is wrong in it."""
    for name in ("package.json", "package-lock.json"):
        shutil.copy(FOLDER / name, tmp_path)
    locked = json.loads((FOLDER / "package-lock.json").read_text())
    assert all("resolved" not in one for one in locked["packages"].values())
    words = ["npm", "ci", "--no-audit", "--no-fund"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    compiler = tmp_path / "node_modules" / ".bin" / "tsc"
    words = [
        str(compiler), "--noEmit", "--strict", "--target", "es2022", "--module", "nodenext", "--lib",
        "es2023,dom", str(HERE / "types.mts"),
    ]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "")
