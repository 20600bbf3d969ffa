"""Attacks on every route of the gateway: paths and ids that are read in two ways, pages of other origins, and
bodies that are cheap to send and dear to read. The routes come from `OPERATIONS`, so a new one is attacked
too.
"""

import asyncio
import contextlib
import gzip
import json
import re
import resource
import secrets
import socket
import time
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from grabstream.crypto import tickets
from grabstream.gateway.bounds import HEADERS_MAX, READ_SECONDS_MAX
from grabstream.gateway.operations import OPERATIONS, Operation
from tests.conftest import until
from tests.gateway.conftest import Door
from tests.gateway.test_connections import GRAB, connected
from tests.support.command_line import env_of, grabstream, in_a_terminal
from tests.support.gateways import Caller, GatewayProcess, Got, calling, new_key
from tests.support.processes import resident_bytes
from tests.support.receipts import SECRET, as_text, receipt_for, signed

WITH_BODIES = [one for one in OPERATIONS if one.body_bytes_max]
WITH_IDS = [one for one in OPERATIONS if "{" in one.path]
#: How long any refusal may take on a busy machine (s). Quadratic work on the largest body takes longer.
REFUSAL_SECONDS_MAX = 6.0


def path_of(operation: Operation, **ids: str) -> str:
    """The path of an operation; ids that are not given are `x`."""
    return re.sub(r"\{(\w+)\}", lambda found: ids.get(found[1], "x"), operation.path)


async def is_refused(answer: Any, what: object) -> Got:
    """Whether a request gets a refusal with a reason, in time."""
    began = time.monotonic()
    got: Got = await answer
    assert 400 <= got.status < 500, (what, got)
    assert got.headers["content-type"] == "application/problem+json", (what, got)
    assert got.body["detail"], (what, got)
    assert time.monotonic() - began < REFUSAL_SECONDS_MAX, what
    return got


# -- ids and paths -------------------------------------------------------------------------------------------

#: Parts of a path that a proxy may read as another part, or as none.
ODD_PARTS = {
    "slash": "a%2Fb",
    "slash twice": "a%252Fb",
    "backslash": "a%5Cb",
    "raw backslash": "a\\b",
    "zero": "a%00",
    "zero before a suffix": "a%00.json",
    "line": "a%0D%0AX:%20y",
    "overlong slash": "a%C0%AFb",
    "overlong zero": "a%C0%80",
    "overlong dot": "%C0%AE%C0%AE",
    "parent": "..",
    "parent, encoded": "%2e%2e",
    "parent, half": ".%2e",
    "here": "%2E",
    "here, raw": ".",
    "parameter": "a;b=c",
    "encoded question": "a%3Fb",
    "encoded fragment": "a%23b",
    "Cyrillic a": "%D0%B0nn",
    "full-width a": "%EF%BD%81nn",
    "zero width": "an%E2%80%8Bn",
    "ligature": "%EF%AC%81n",
    "combining": "e%CC%81",
    "not UTF-8": "%FF",
    "not hexadecimal": "%zz",
    "cut": "a%2",
    "space": "a%20b",
    "plus": "a+b",
    "too long": "a" * 65,
}


@pytest.mark.parametrize("operation", WITH_IDS, ids=lambda one: one.name)
async def test_part_of_a_path_that_is_no_id_reaches_no_command(caller: Caller, operation: Operation) -> None:
    for name in re.findall(r"\{(\w+)\}", operation.path):
        for odd, part in ODD_PARTS.items():
            path = path_of(operation, **{name: part})
            body = {"user": "ann"} if operation.body_bytes_max else None
            got = await is_refused(caller.send(operation.method, path, body, new_key()), (odd, path))
            # Another route, or a part that is not an id; never "no such offer", which looked for it.
            assert got.body["type"] in ("/problems/invalid", "/problems/not_found"), (odd, path, got)
            assert got.body.get("field", "path") == "path", (odd, got)


@pytest.mark.parametrize(
    "text", ["аnn", "ａnn", "ann\u200b", "a\u0301nn", "ﬁnn", "ANN\u0130", "ann ", "\u202enna"]
)
async def test_look_alike_ids_are_refused_not_folded(caller: Caller, offer: str, text: str) -> None:
    """No id is normalised, so none can become that of another user."""
    await caller.open(offer, total=5, max_per_grab=5)
    await caller.post(f"/v1/offers/{offer}/grabs", {"user": "ann"}, f"{offer}-g")
    grabs = f"/v1/offers/{offer}/grabs"
    sent: list[tuple[str, dict[str, Any]]] = [
        (grabs, {"user": text}),
        (grabs, {"user": "bob", "attributes": {text: "a"}}),
        (grabs, {"user": "bob", "metadata": {text: "a"}}),
        (f"{grabs}/{offer}-g/return", {"user": text}),
        (f"{grabs}/{offer}-g/redeem", {"user": "ann", "order": text}),
        ("/v1/baskets", {"grabs": [{"offer": text, "user": "bob"}]}),
        ("/v1/offers", {"offer": text, "terms": {"kind": "coupon", "issuer": "shop", "total": 1}}),
        ("/v1/offers", {"terms": {"kind": "coupon", "issuer": text, "total": 1}}),
    ]
    for path, body in sent:
        got = await is_refused(caller.post(path, body), (path, body))
        assert got.body["type"] == "/problems/invalid", (path, body, got)
    async with connected(caller.port) as one:
        raw = b'{"user": "bob"}'
        await one.send(
            GRAB % offer.encode()
            + b"Idempotency-Key: %s\r\nContent-Length: %d\r\n\r\n" % (text.encode(), len(raw))
            + raw
        )
        answer = await one.answer()
    assert (answer.status, answer.body["field"]) == (400, "Idempotency-Key")


async def test_cases_of_ids_are_different_ids(caller: Caller, offer: str) -> None:
    await caller.open(offer, kind="envelope", funding="p", asset="CNY", total=100, parts=2)
    got = [await caller.post(f"/v1/offers/{offer}/grabs", {"user": user}, "one") for user in ("ann", "Ann")]
    assert [one.status for one in got] == [201, 201]
    assert (await caller.post(f"/v1/offers/{offer.upper()}/grabs", {"user": "ann"})).status == 404


# -- pages of other origins ----------------------------------------------------------------------------------

#: What a page may send without asking the gateway before.
SIMPLE = ("application/x-www-form-urlencoded", "multipart/form-data; boundary=b", "text/plain", None)


@pytest.mark.parametrize("operation", WITH_BODIES, ids=lambda one: one.name)
async def test_page_of_another_origin_cannot_send_commands(
    caller: Caller, offer: str, operation: Operation
) -> None:
    await caller.open(offer, total=5)
    path = path_of(operation, offer=offer)
    bodies = [b'{"user":"ann","x":"=&"}', b"user=ann", b"", json.dumps({"offer": f"{offer}-2"}).encode()]
    for kind in SIMPLE:
        for body in bodies:
            headers = {"Origin": "https://evil.example"} | ({} if kind is None else {"Content_Type": kind})
            if kind is None:
                # What has no type can have no body; fetch() without a body.
                answer = caller.send(operation.method, path, None, **headers)
            else:
                answer = caller.send(operation.method, path, body, **headers)
            got = await is_refused(answer, (kind, body))
            assert not [name for name in got.headers if name.lower().startswith("access-control-")]
    asked = await caller.send(
        "OPTIONS", path, Origin="https://evil.example", Access_Control_Request_Method=operation.method,
        Access_Control_Request_Headers="idempotency-key,content-type",
    )  # fmt: skip
    assert not [name for name in asked.headers if name.lower().startswith("access-control-")]
    left = await caller.post(f"/v1/offers/{offer}/grabs", {"user": "ann"})
    assert (left.status, left.body["left"]) == (201, 4), "nothing has changed"


# -- bodies that are cheap to send ---------------------------------------------------------------------------


def dear_bodies(size: int) -> Iterator[tuple[str, bytes]]:
    """Bodies of at most `size` bytes that take long to read, for some programs."""
    yield "lists in lists", b"[" * size
    yield "objects in objects", (b'{"a":' * size)[:size]
    yield "lists in a field", b'{"user":' + b"[" * (size - 8)
    yield "deep, closed", b'{"x":' + b"[" * ((size - 6) // 2) + b"]" * ((size - 6) // 2) + b"}"
    yield "a long number", b'{"quantity":' + b"9" * (size - 13) + b"}"
    yield "a long fraction", b'{"quantity":1.' + b"1" * (size - 15) + b"}"
    yield "a large exponent", b'{"quantity":1e999999999}'
    yield "a small exponent", b'{"quantity":1e-999999999}'
    yield "not a number", b'{"quantity":NaN}'
    yield "a long text", b'{"user":"' + b"a" * (size - 11) + b'"}'
    yield "escapes", b'{"user":"' + b"\\u0061" * ((size - 11) // 6) + b'"}'
    yield "half a pair", b'{"user":"\\ud800"}'
    yield "one name", (b"{" + b'"a":1,' * (size // 6))[: size - 1].rstrip(b',"a:1') + b"1}"
    names = b",".join(b'"%x":0' % number for number in range(size // 9))
    yield "names", b"{" + names[: size - 2].rpartition(b",")[0] + b"}"
    yield "attributes", b'{"user":"a","attributes":{' + names[: size - 30].rpartition(b",")[0] + b"}}"
    yield "metadata", b'{"user":"a","metadata":{' + names[: size - 30].rpartition(b",")[0] + b"}}"
    yield "grabs", b'{"grabs":[' + b",".join([b"{}"] * ((size - 12) // 3)) + b"]}"
    yield "escaped names", b'{"gr\\u0061bs":[],' + names[: size - 20].rpartition(b",")[0] + b"}"
    yield "spaces", b" " * (size - 2) + b"{}"
    yield "another encoding", '{"user":"a"}'.encode("utf-16")
    yield "a mark before", b"\xef\xbb\xbf{}"


@pytest.mark.parametrize("operation", WITH_BODIES, ids=lambda one: one.name)
async def test_dear_body_is_refused_in_time(caller: Caller, operation: Operation) -> None:
    path = path_of(operation, offer=f"o{secrets.token_hex(5)}")
    for name, body in dear_bodies(operation.body_bytes_max):
        assert len(body) <= operation.body_bytes_max
        await is_refused(caller.send(operation.method, path, body, new_key()), name)


@pytest.mark.parametrize("operation", WITH_BODIES, ids=lambda one: one.name)
async def test_nothing_is_decompressed(caller: Caller, operation: Operation) -> None:
    bomb = gzip.compress(b" " * 10_000_000)
    assert len(bomb) < operation.body_bytes_max
    for coding in ("gzip", "deflate", "br", "zstd", "x-gzip", "identity, gzip", "GZIP"):
        got = await caller.send(
            operation.method, path_of(operation), bomb, new_key(), Content_Encoding=coding
        )
        assert (got.status, got.body["type"]) == (415, "/problems/unsupported_media_type"), coding
    # Without the header, they are bytes that are not JSON.
    await is_refused(caller.send(operation.method, path_of(operation), bomb, new_key()), "bytes")


@pytest.mark.long
async def test_others_are_served_beside_dear_bodies(caller: Caller, offer: str) -> None:
    """Twenty at once, over and over: other callers wait only a moment."""
    bodies = [body for _, body in dear_bodies(16_384)]
    sending = True

    async def attack(number: int) -> None:
        for body in bodies * 3:
            if sending:
                await caller.send("POST", f"/v1/offers/{offer}/grabs", body, f"{offer}-{number}")

    attacks = [asyncio.create_task(attack(number)) for number in range(20)]
    slowest = 0.0
    while not all(task.done() for task in attacks):
        began = time.monotonic()
        assert (await caller.send("GET", "/health")).status == 200
        slowest = max(slowest, time.monotonic() - began)
    sending = False
    await asyncio.gather(*attacks)
    assert slowest < REFUSAL_SECONDS_MAX


# -- tickets -------------------------------------------------------------------------------------------------


@pytest.mark.long
async def test_ticket_is_of_one_user_one_offer_and_one_use(door: Door, offer: str, tmp_path: Path) -> None:
    keys = f"new:HS256:{as_text(SECRET)}"
    with GatewayProcess(door.settings, tmp_path / "log", ticket_keys=keys) as gateway:
        async with calling(gateway.port) as caller:
            for name in (offer, f"{offer}-2"):
                await caller.open(name, total=9, max_per_grab=2, audience="ticket")
            expires_at = (int(time.time()) + 600) * 1_000

            def ticket(user: str, where: str = offer, once: str = "", until: int = expires_at) -> str:
                return tickets.sign("new", SECRET, user=user, offer=where, expires_at_ms=until, once_id=once)

            async def grab(user: str, given: str | None, where: str = offer) -> Got:
                body = {"user": user} | ({} if given is None else {"ticket": given})
                return await caller.post(f"/v1/offers/{where}/grabs", body)

            once = ticket("ann", once="visit-1")
            assert (await grab("ann", once)).status == 201
            head, claims, signature = once.split(".")
            refused = {
                "none": None, "used": once, "of another user": ticket("ann"),
                "for another offer": ticket("bob", f"{offer}-2"),
                "over": ticket("bob", until=(int(time.time()) - 600) * 1_000),
                "altered": f"{head}.{ticket('bob').split('.')[1]}.{signature}",
                "without signature": f"{head}.{claims}.",
                "of another key": tickets.sign(
                    "new", b"x" * 32, user="bob", offer=offer, expires_at_ms=expires_at
                ),
                "of an unknown key": tickets.sign(
                    "old", SECRET, user="bob", offer=offer, expires_at_ms=expires_at
                ),
            }  # fmt: skip
            for name, given in refused.items():
                got = await grab("ann" if name == "used" else "bob", given)
                assert (got.status, got.body["outcome"]) == (403, "not_eligible"), (name, got)
            assert (await grab("bob", ticket("bob"))).status == 201


# -- texts of strangers --------------------------------------------------------------------------------------

MARKUP = "[/] [red]x[/red] :fire: [link=https://evil.example]y[/link] <script>"
#: What the payment side may choose as the id of a payment, and no text of one line may have.
DECEPTIVE = f"\u202egnp.exe\u2066 \u2028 {MARKUP}"
#: What no terminal may get: controls, and characters that reorder a line or end it.
HARMFUL = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI", "B"}


def harmful_in(text: str) -> list[str]:
    return [
        character
        for character in text
        if character != "\n"
        and (
            unicodedata.category(character) in ("Cc", "Zl", "Zp")
            or unicodedata.bidirectional(character) in HARMFUL
        )
    ]


@pytest.mark.long
async def test_title_deceives_neither_terminals_nor_browsers(caller: Caller, door: Door, offer: str) -> None:
    for control in (
        "\x1b[31m",
        "\x1b]8;;https://evil.example\x07",
        "\x9b31m",
        "a\nb",
        "\x00",
        "\x7f",
        "\x08",
        "\u202egnp.exe",
        "a\u2066b",
        "a\u2028b",
    ):
        terms = {"kind": "coupon", "issuer": "shop", "total": 1, "title": control}
        got = await caller.post("/v1/offers", {"offer": offer, "terms": terms})
        assert (got.status, got.body["field"]) == (400, "terms.title"), control
        assert not harmful_in(got.raw.decode()), "also in the refusal"
    priced = {"kind": "stock", "total": 5, "price": 100, "currency": "CNY", "hold_ms": 600_000}
    await caller.open(offer, **priced, title=MARKUP)
    for metadata, status in (({"form": DECEPTIVE}, 400), ({"form": MARKUP}, 201)):
        taken = await caller.post(f"/v1/offers/{offer}/grabs", {"user": "ann", "metadata": metadata})
        assert taken.status == status, taken
    receipt = signed(receipt_for(taken.body, DECEPTIVE))
    paid = await caller.send("POST", "/v1/payments/callback", {"receipt": receipt})
    assert paid.body["answer"]["outcome"] == "confirmed", paid
    path = f"/v1/offers/{offer}/grabs/{taken.body['grab']}/return"
    back = await caller.post(path, {"user": "ann", "reason": MARKUP})
    assert back.status == 200, back
    after = f"?after={back.body['shard']}-{back.body['seq']}"
    for where in (f"/v1/offers/{offer}{after}", f"/v1/users/ann/grabs{after}"):
        got = await caller.send("GET", where)
        # A browser shows it as text, whatever is in it.
        assert got.headers["content-type"] == "application/json", where
        assert got.headers["x-content-type-options"] == "nosniff", where
        assert MARKUP in json.dumps(got.body, ensure_ascii=False), where
    environment = env_of(door.settings) | {"shards": str(door.settings.shards)}
    # On a terminal, what deceives is escaped, and markup is there as it was written; a pipe gets the text.
    escaped = f"\\u202egnp.exe\\u2066 \\u2028 {MARKUP}"
    for words, seen, text in (
        (("show", offer), MARKUP, MARKUP),
        (("show", offer, "--json"), MARKUP, MARKUP),
        (("why", "ann", offer), escaped, DECEPTIVE),
        (("replay", "--offer", offer, "--into", "-"), escaped, DECEPTIVE),
    ):
        shown = await asyncio.to_thread(in_a_terminal, *words, columns=400, **environment)
        assert not harmful_in(shown.replace("\r\n", "\n")), words
        assert seen in shown, (words, shown)
        piped = await asyncio.to_thread(grabstream, *words, **environment)
        assert text in piped.stdout, words


# -- half-open connections -----------------------------------------------------------------------------------


#: How much a gateway may grow while as many connections as these send what they can, and read nothing.
ATTACKERS: Final = 150
GROWTH_BYTES_MAX: Final = 64 * 2**20


@pytest.mark.long
@pytest.mark.parametrize("headers", [3_200, HEADERS_MAX - 2])
async def test_memory_is_bounded_beside_connections_that_send_and_do_not_read(
    door: Door, tmp_path: Path, headers: int
) -> None:
    """Many requests with many short headers, without credentials."""
    path = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n" + b"a:b\r\n" * headers + b"\r\n"
    loop = asyncio.get_running_loop()
    with GatewayProcess(door.settings, tmp_path / "log") as gateway:
        async with calling(gateway.port) as caller:
            assert (await caller.send("GET", "/openapi.json")).status == 200
            before = resident_bytes(gateway.process.pid)
            held = [socket.create_connection(("127.0.0.1", gateway.port)) for _ in range(ATTACKERS)]

            async def attack(one: socket.socket) -> None:
                one.setblocking(False)
                with contextlib.suppress(OSError, TimeoutError):
                    await asyncio.wait_for(loop.sock_sendall(one, path * 64), 2)

            try:
                await asyncio.gather(*map(attack, held))
                # It has looked at all of it when it has answered a request that came afterwards.
                assert (await caller.send("GET", "/health")).status == 200
                grown = resident_bytes(gateway.process.pid) - before
            finally:
                for one in held:
                    one.close()
    assert grown < GROWTH_BYTES_MAX


@pytest.mark.long
@pytest.mark.parametrize("count", [2_000, pytest.param(19_000, marks=pytest.mark.nightly)])
async def test_gateway_serves_beside_half_open_connections(
    door: Door, offer: str, tmp_path: Path, count: int
) -> None:
    """Requests that began and do not end, as many as a process may have open files; after their time they
    are gone, and the gateway has not grown by more than what a connection needs.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < count + 1_000:
        pytest.skip(f"a process may have {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count + 1_000), hard))
    loop = asyncio.get_running_loop()
    held: list[socket.socket] = []
    most = str(count + 100)
    with GatewayProcess(
        door.settings, tmp_path / "log", gateway_connections_max=most,
        gateway_address_connections_max=most, gate_timeout_ms="20000",
    ) as gateway:  # fmt: skip
        try:
            async with calling(gateway.port) as caller:
                await caller.open(offer, total=50)
                before = resident_bytes(gateway.process.pid)
                for _ in range(count):
                    half = socket.socket()
                    half.setblocking(False)
                    held.append(half)
                    await loop.sock_connect(half, ("127.0.0.1", gateway.port))
                    await loop.sock_sendall(half, b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ")
                began = time.monotonic()
                grabs = [
                    caller.post(f"/v1/offers/{offer}/grabs", {"user": f"u{number}"}) for number in range(20)
                ]
                assert {got.status for got in await asyncio.gather(*grabs)} == {201}
                assert time.monotonic() - began < REFUSAL_SECONDS_MAX
                assert (resident_bytes(gateway.process.pid) - before) / count < 24 * 1_024
                # The first ones may be gone on a busy machine, the last one is there.
                with pytest.raises(BlockingIOError):
                    held[-1].recv(1)

                async def is_over() -> bool:
                    try:
                        return held[-1].recv(4_096).startswith(b"HTTP/1.1 408")
                    except BlockingIOError:
                        return False

                await until(is_over, READ_SECONDS_MAX + 20, "the end of the last one")
                for half in held[:-1]:
                    async with asyncio.timeout(90):
                        assert (await loop.sock_recv(half, 4_096)).startswith(b"HTTP/1.1 408")
                assert (await caller.post(f"/v1/offers/{offer}/grabs", {"user": "last"})).status == 201
        finally:
            for half in held:
                half.close()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
