"""Attacks on a gateway that asks who is asking: forged tokens, other users, missing scopes, revoked keys, and
servers that are away.
"""

import asyncio
import contextlib
import json
import re
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from grabstream import AsyncClient
from grabstream.connections.opening import checked_database, key_space, open_redis
from grabstream.gateway.api_keys import digest_of, new_secret
from grabstream.gateway.bounds import QUESTIONS_USER_MAX, REVOCATION_SECONDS_MAX
from grabstream.gateway.operations import OPERATIONS, Operation
from grabstream.models.pseudonyms import user_of
from grabstream.models.vocabulary import StockTerms
from grabstream.projections.tables import api_keys
from grabstream.workshop.services import free_ports
from grabstream.workshop.services.servers import Redis
from tests.conftest import until
from tests.gateway.conftest import Door, Guarded
from tests.gateway.test_tokens import FORGED
from tests.support.command_line import env_of, grabstream
from tests.support.gateways import Caller, GatewayProcess, Got, Message, calling, new_key
from tests.support.issuer import AUDIENCE, ISSUER, token
from tests.support.projecting import rows

#: What the routes need, written by hand: the scopes of services, and whether an end user may use them.
ALLOWED: dict[str, tuple[set[str], bool]] = {
    "open": ({"operate"}, False),
    "amend": ({"operate"}, False),
    "load": ({"operate"}, False),
    "adjust": ({"operate"}, False),
    "pause": ({"operate"}, False),
    "resume": ({"operate"}, False),
    "close": ({"operate"}, False),
    "grab": ({"grab"}, True),
    "take_basket": ({"grab"}, True),
    "confirm": ({"settle"}, False),
    "release": ({"settle", "grab"}, True),
    "extend": ({"settle", "grab"}, True),
    "return": ({"settle"}, False),
    "redeem": ({"settle"}, False),
    "unredeem": ({"settle"}, False),
    "offers": ({"read"}, True),
    "offer": ({"read"}, True),
    "offer_grabs": ({"read"}, True),
    "user_balances": ({"read"}, True),
    "user_grabs": ({"read"}, True),
    "user_transfers": ({"read"}, True),
    "offer_events": ({"read"}, False),
    "user_events": ({"read"}, True),
    "demand": ({"read"}, False),
    "system": ({"read"}, False),
    "books": ({"read"}, False),
    "doctor": ({"operate"}, False),
    "user_why": ({"read"}, False),
    "offer_waiting": ({"read"}, False),
    "offer_film": ({"read"}, False),
    "offer_fairness": ({"read"}, False),
    "offer_demand": ({"read"}, False),
    "webhooks": ({"operate"}, False),
    "webhook_deliveries": ({"operate"}, False),
    "webhook_amend": ({"operate"}, False),
    "webhook_resend": ({"operate"}, False),
    "webhook_discard": ({"operate"}, False),
}


@pytest.fixture
async def anyone(guarded: Guarded) -> AsyncIterator[Caller]:
    """A client without credentials, behind the proxy, with an address that no other test has."""
    async with calling(guarded.gateway.port) as one:
        yield one.having(None, X_Forwarded_For=new_address())


def new_address() -> str:
    """An address that no other client has."""
    return ".".join(str(secrets.randbelow(254) + 1) for _ in range(4))


def service(anyone: Caller, guarded: Guarded, name: str = "all") -> Caller:
    return anyone.having(guarded.secrets[name], **anyone._always)


def user(anyone: Caller, name: str, **claims: Any) -> Caller:
    return anyone.having(token(name, "ed", **claims), **anyone._always)


def is_refused(got: Got, name: str, status: int, field: str | None = None) -> bool:
    assert (got.status, got.body["type"]) == (status, f"/problems/{name}"), got
    assert got.headers["content-type"] == "application/problem+json"
    assert got.headers["cache-control"] == "no-store"
    assert got.body.get("field") == field, got
    return True


async def use(caller: Caller, operation: Operation) -> Got:
    path = re.sub(r"\{user\}", "ann", operation.path)
    path = re.sub(r"\{\w+\}", "nothing", path)
    if operation.method == "GET":
        return await caller.send("GET", path)
    return await caller.send(operation.method, path, {}, new_key())


# -- scopes --------------------------------------------------------------------------------------------------


def test_table_has_every_route() -> None:
    assert set(ALLOWED) == {one.name for one in OPERATIONS if one.kind not in ("document", "receipt")}


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: one.name)
async def test_route_lets_in_who_may_and_nobody_else(
    anyone: Caller, guarded: Guarded, operation: Operation
) -> None:
    if operation.kind == "document":
        assert (await use(anyone, operation)).status in (200, 404)
        return
    if operation.kind == "receipt":
        # Its own signature is its authority, and no key is.
        for caller in (anyone, service(anyone, guarded, "settle")):
            got = await caller.send("POST", operation.path, {"receipt": "e30.e30.e30"})
            assert is_refused(got, "not_signed", 401, "receipt")
        return
    scopes, is_of_users = ALLOWED[operation.name]
    got = await use(anyone, operation)
    assert is_refused(got, "unauthenticated", 401, "Authorization")
    assert got.headers["www-authenticate"] == 'Bearer realm="grabstream"'
    for scope in ("grab", "settle", "read", "operate"):
        got = await use(service(anyone, guarded, scope), operation)
        if scope in scopes:
            assert got.status not in (401, 403, 429), (scope, got)
            continue
        assert is_refused(got, "insufficient_scope", 403, "Authorization"), scope
        needed = re.search(r'error="insufficient_scope", scope="(.*)"', got.headers["www-authenticate"])
        assert needed
        assert set(needed[1].split()) == scopes
        assert all(name in got.body["detail"] for name in scopes)
    got = await use(user(anyone, "ann"), operation)
    if is_of_users:
        assert got.status not in (401, 403, 429), got
    else:
        assert is_refused(got, "insufficient_scope", 403, "Authorization")
    head = await service(anyone, guarded, "operate").send("HEAD", "/v1/users/ann/balances")
    assert head.status == 403


# -- tokens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", range(2))
async def test_forged_tokens_are_refused_alike(anyone: Caller, offer: str, group: int) -> None:
    """One after the other, so that an error tells which one got in; in two halves, because of the rate."""
    for name in list(FORGED)[group::2]:
        forged = anyone.having(FORGED[name](), **anyone._always)
        got = await forged.post(f"/v1/offers/{offer}/grabs", {})
        assert is_refused(got, "unauthenticated", 401, "Authorization"), name
        assert got.headers["www-authenticate"] == 'Bearer realm="grabstream", error="invalid_token"'


async def test_end_user_grabs_as_themselves_only(anyone: Caller, guarded: Guarded, offer: str) -> None:
    shop, ann, bob = service(anyone, guarded), user(anyone, "ann"), user(anyone, "bob")
    terms = {"price": 1, "currency": "CNY", "hold_ms": 600_000, "extensions": 3, "max_per_grab": 5}
    await shop.open(offer, kind="stock", total=10, **terms)
    path = f"/v1/offers/{offer}/grabs"
    got = await ann.post(path, {}, "g1")
    assert (got.status, got.body["user"], got.body["grab"]) == (201, "ann", "g1")
    got = await ann.post(path, {"user": "ann", "quantity": 2}, "g2")
    assert (got.status, got.body["user"]) == (201, "ann")
    for other in ("bob", "ANN", "ann.", "Ann", "anna"):
        got = await ann.post(path, {"user": other})
        assert is_refused(got, "other_user", 403, "user")
        assert "user: must be ann" in got.body["detail"]
    for wrong in ("аnn", "ann\u200b", "ａｎｎ", "", None, 7, ["ann"], {"ann": "ann"}, "ann\x00"):
        assert is_refused(await ann.post(path, {"user": wrong}), "invalid", 400, "user"), wrong
    # Twice in the body, in any order and writing: no reading of the body may take the other one.
    for body in (
        b'{"user":"ann","user":"bob"}', b'{"user":"bob","user":"ann"}', b'{"user":"ann","us\\u0065r":"bob"}',
        b'{"us\\u0065r":"bob","user":"ann"}',
    ):  # fmt: skip
        got = await ann.post(path, body)
        assert got.status in (400, 403), (body, got)
    got = await ann.post(path, b'{"us\\u0065r":"bob"}')
    assert is_refused(got, "other_user", 403, "user")
    got = await ann.post(path, {"attributes": {"card": "c1"}})
    assert is_refused(got, "insufficient_scope", 403, "attributes")

    # Grabs of another user are not theirs, and their ids and keys reveal nothing.
    for verb in ("release", "extend"):
        got = await bob.post(f"{path}/g1/{verb}", {})
        assert is_refused(got, "no_such_grab", 404), verb
        got = await bob.post(f"{path}/g1/{verb}", {"user": "ann"})
        assert is_refused(got, "other_user", 403, "user")
    assert (await ann.post(f"{path}/g1/extend", {})).status == 200
    first = await ann.post(f"{path}/g1/release", {}, "confirm-order-1")
    assert (first.status, first.body["user"]) == (200, "ann")
    again = await ann.post(f"{path}/g1/release", {"user": "ann"}, "confirm-order-1")
    assert again.body == {**first.body, "repeated": True}
    # The key of a service's command is not used up by a user who guessed it.
    got = await shop.post(
        f"{path}/g2/confirm",
        {"user": "ann", "payment": "p1", "paid": 2, "currency": "CNY"},
        "confirm-order-1",
    )
    assert got.status == 200, got
    assert (await shop.post(f"{path}/g2/return", {"user": "ann"})).status == 200


async def test_basket_of_an_end_user_is_theirs(anyone: Caller, guarded: Guarded, offer: str) -> None:
    shop, ann = service(anyone, guarded), user(anyone, "ann")
    names = [f"{offer}:a", f"{offer}:b"]
    for name in names:
        await shop.open(name, total=5)
    got = await ann.post("/v1/baskets", {"grabs": [{"offer": names[0]}, {"offer": names[1], "user": "ann"}]})
    assert got.status == 201, got
    assert {answer["user"] for answer in got.body["answers"]} == {"ann"}
    got = await ann.post("/v1/baskets", {"grabs": [{"offer": names[0]}, {"offer": names[1], "user": "bob"}]})
    assert is_refused(got, "other_user", 403, "grabs[1].user")
    got = await ann.post("/v1/baskets", {"grabs": [{"offer": names[0], "attributes": {"a": "b"}}]})
    assert is_refused(got, "insufficient_scope", 403, "grabs[0].attributes")


async def test_end_user_reads_their_own_and_nothing_is_leaked_by_caches(
    anyone: Caller, guarded: Guarded, offer: str
) -> None:
    shop, ann, bob = service(anyone, guarded), user(anyone, "ann"), user(anyone, "bob")
    await shop.open(offer, total=5)
    taken = await ann.post(f"/v1/offers/{offer}/grabs", {})
    after = f"?after={taken.body['shard']}-{taken.body['seq']}"
    for what in ("balances", "grabs", "transfers"):
        path = f"/v1/users/ann/{what}"
        mine = await ann.send("GET", path + after)
        assert mine.status == 200, mine
        assert mine.headers["cache-control"] == "private, no-store"
        for conditions in ({}, {"If_None_Match": "*"}, {"If_None_Match": mine.headers["etag"]}):
            assert is_refused(await bob.send("GET", path, **conditions), "other_user", 403, "user")
            assert is_refused(
                await anyone.send("GET", path, **conditions), "unauthenticated", 401, "Authorization"
            )
        for odd in ("/v1/users/%61nn/balances", "/v1/users/ann/balances"):
            assert (await bob.send("GET", odd)).status == 403
            assert (await ann.send("GET", odd)).status == 200
        assert (await ann.send("GET", path, If_None_Match=mine.headers["etag"])).status == 304
    # Public documents are kept for all, but not for those who may not ask.
    path = f"/v1/offers/{offer}{after}"
    everybody = [await one.send("GET", path) for one in (shop, ann, bob)]
    assert len({got.raw for got in everybody}) == 1
    assert all("Authorization" in got.headers.getall("vary") for got in everybody)
    assert (await anyone.send("GET", path)).status == 401
    assert (await service(anyone, guarded, "grab").send("GET", path)).status == 403


async def test_documents_of_one_user_never_reach_another_beside_each_other(anyone: Caller) -> None:
    """Many users at once, on few connections."""
    names = [f"u{number}" for number in range(20)]
    callers = {name: user(anyone, name) for name in names}
    got = await asyncio.gather(
        *(callers[name].send("GET", f"/v1/users/{other}/grabs") for name in names for other in names)
    )
    statuses = [answer.status for answer in got]
    assert statuses == [200 if name == other else 403 for name in names for other in names]


# -- keys ----------------------------------------------------------------------------------------------------


@pytest.mark.long
async def test_revoked_rotated_and_expired_keys(anyone: Caller, guarded: Guarded) -> None:
    """A key that ended is refused within the stated time, in the same words as one that never existed."""
    names = {word: f"{word}-{secrets.token_hex(4)}" for word in ("revoked", "rotated", "given", "expiring")}
    found = {name: new_secret() for name in [*names, "new", "newer"]}

    def hashed(name: str) -> bytes:
        return digest_of(found[name].encode())

    async def status_of(name: str) -> int:
        there = anyone.having(found[name], X_Forwarded_For=new_address())
        return (await there.send("GET", "/v1/offers?limit=1")).status

    async def all_are(*expected: tuple[str, int]) -> bool:
        return [await status_of(name) for name, _ in expected] == [status for _, status in expected]

    async with checked_database(guarded.settings) as connection:
        for word, name in names.items():
            await api_keys.create(connection, name, ["read"], hashed(word), None)
        await until(lambda: all_are(*((name, 200) for name in names)), 20, "new keys")
        await api_keys.revoke(connection, names["revoked"])
        await api_keys.rotate(connection, names["rotated"], hashed("new"), 0, None)
        await api_keys.rotate(connection, names["given"], hashed("newer"), 60_000, None)
        await connection.execute(
            "UPDATE api_keys SET expires_at = now() WHERE name = %s", (names["expiring"],)
        )
        loop = asyncio.get_running_loop()
        began = loop.time()
        await until(
            lambda: all_are(("revoked", 401), ("rotated", 401), ("new", 200), ("given", 200), ("newer", 200),
                            ("expiring", 401)),
            20, "ended keys",
        )  # fmt: skip
        assert loop.time() - began < REVOCATION_SECONDS_MAX
        with pytest.raises(api_keys.ApiKeyRefused):
            await api_keys.rotate(connection, names["revoked"], hashed("new"), 0, None)
    answers = []
    for secret in (found["revoked"], found["expiring"], new_secret(), new_secret()[:-1], "grabkey_", "x.y.z"):
        got = await anyone.having(secret, **anyone._always).send("GET", "/v1/offers")
        answers.append((got.raw if "." not in secret else b"", sorted(got.headers.keys()), got.status))
    assert len(set(map(str, answers[:5]))) == 1
    assert answers[5][2] == 401


@pytest.mark.long
async def test_user_whose_name_is_no_id_acts_under_the_id_that_it_gives(
    anyone: Caller, guarded: Guarded, offer: str, tmp_path: Path
) -> None:
    """A user with that id as a name is another user."""
    await service(anyone, guarded).open(offer, total=9)
    name, key = f"auth0|{offer}", "0f" * 32
    own = user_of(name, bytes.fromhex(key))
    with GatewayProcess(
        guarded.settings, tmp_path / "log", gateway_authentication="required", gate_timeout_ms="20000",
        jwt_issuer=ISSUER, jwt_audience=AUDIENCE, jwt_user_key=key,
        jwt_jwks=str(guarded.gateway.log.parent / "keys.json"),
    ) as gateway:  # fmt: skip
        async with calling(gateway.port) as naming:
            named, forger, ann = (naming.having(token(one, "ed")) for one in (name, own, "ann"))
            got = await named.post(f"/v1/offers/{offer}/grabs", {})
            assert (got.status, got.body["user"]) == (201, own)
            after = f"after={got.body['shard']}-{got.body['seq']}"
            found = await named.send("GET", f"/v1/users/{own}/grabs?{after}")
            assert [row["grab"] for row in found.body["grabs"]] == [got.body["grab"]]
            for other in (forger, ann):
                refused = await other.send("GET", f"/v1/users/{own}/grabs")
                assert is_refused(refused, "other_user", 403, "user")
            # The refusal tells users their id.
            told = await named.send("GET", "/v1/users/ann/grabs")
            assert is_refused(told, "other_user", 403, "user")
            assert f"must be {own}" in told.body["detail"]
            assert (await forger.post(f"/v1/offers/{offer}/grabs", {})).body["user"] not in (own, name)
    # Without the key, no user is admitted under it.
    assert (await user(anyone, name).post(f"/v1/offers/{offer}/grabs", {})).status == 401


@pytest.mark.long
async def test_stream_ends_with_its_key_or_token_and_no_other_does(anyone: Caller, guarded: Guarded) -> None:
    name, secret = f"streaming-{secrets.token_hex(4)}", new_secret()
    loop = asyncio.get_running_loop()
    async with checked_database(guarded.settings) as connection, contextlib.AsyncExitStack() as closing:
        await api_keys.create(connection, name, ["read"], digest_of(secret.encode()), None)
        keyed = anyone.having(secret, **anyone._always)

        async def is_known() -> bool:
            return (await keyed.send("GET", "/v1/offers?limit=1")).status == 200

        async def begun(caller: Caller, path: str) -> AsyncGenerator[Message, None]:
            stream = caller.follow(path)
            await closing.enter_async_context(contextlib.aclosing(stream))
            await anext(stream)
            return stream

        async def end_of(stream: AsyncGenerator[Message, None]) -> float:
            async for message in stream:
                assert not message.type, message
            return loop.time()

        await until(is_known, 20, "the new key")
        exp = int(time.time()) + 3
        revoked = [await begun(keyed, path) for path in ("/v1/offers/none/events", "/v1/users/ann/events")]
        expiring = await begun(user(anyone, "ann", exp=exp), "/v1/users/ann/events")
        lasting = [
            asyncio.create_task(end_of(await begun(caller, "/v1/users/ann/events")))
            for caller in (service(anyone, guarded, "read"), user(anyone, "ann"))
        ]
        ending = asyncio.gather(*map(end_of, revoked))
        await asyncio.sleep(0)
        assert not ending.done()
        began = loop.time()
        await api_keys.revoke(connection, name)
        async with asyncio.timeout(90):
            assert max(await ending) - began < 2 * REVOCATION_SECONDS_MAX
            await end_of(expiring)
        assert time.time() >= exp
        assert not any(task.done() for task in lasting)
        assert is_refused(
            await keyed.send("GET", "/v1/users/ann/events"), "unauthenticated", 401, "Authorization"
        )
        for task in lasting:
            task.cancel()
        await asyncio.gather(*lasting, return_exceptions=True)


async def test_credentials_elsewhere_are_ignored(anyone: Caller, guarded: Guarded) -> None:
    secret = guarded.secrets["all"]
    for path in (f"/v1/offers?access_token={secret}", f"/v1/offers?authorization=Bearer%20{secret}"):
        assert is_refused(await anyone.send("GET", path), "unauthenticated", 401, "Authorization")
        assert (await service(anyone, guarded).send("GET", path)).status == 400
    for name in ("Cookie", "X_Api_Key", "Proxy_Authorization", "X_Authorization"):
        got = await anyone.send("GET", "/v1/offers", **{name: f"Bearer {secret}"})
        assert is_refused(got, "unauthenticated", 401, "Authorization")
    body = {"access_token": secret, "user": "ann"}
    assert (await anyone.post("/v1/offers/x/grabs", body)).status == 401


async def test_two_headers_with_credentials_are_refused(guarded: Guarded) -> None:
    """Whatever a proxy before it takes, the first or the last."""
    good, wrong = guarded.secrets["all"], new_secret()
    for first, second in ((good, wrong), (wrong, good), (good, good)):
        reader, writer = await asyncio.open_connection("127.0.0.1", guarded.gateway.port)
        writer.write(
            b"GET /v1/offers HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            + f"Authorization: Bearer {first}\r\nauthorization: Bearer {second}\r\n\r\n".encode()
        )
        answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 400 "), answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["field"] == "authorization"


async def test_body_of_an_unknown_caller_is_not_read(guarded: Guarded, anyone: Caller) -> None:
    """The answer comes before the body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", guarded.gateway.port)
    writer.write(
        b"POST /v1/offers/x/grabs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10000\r\n"
        b"Content-Type: application/json\r\nX-Forwarded-For: "
        + anyone._always["X_Forwarded_For"].encode()
        + b"\r\n\r\n"
    )
    assert (await asyncio.wait_for(reader.readline(), 60)).startswith(b"HTTP/1.1 401 ")
    writer.close()


# -- hosts, pages and headers --------------------------------------------------------------------------------


async def test_hosts_are_those_of_the_settings(anyone: Caller, guarded: Guarded) -> None:
    shop = service(anyone, guarded)
    for host in ("api.example.com", "API.example.com:443", "127.0.0.1", "localhost:1", "0.0.0.0"):
        assert (await shop.send("GET", "/v1/offers", Host=host)).status == 200, host
    for host in ("example.com", "api.example.com.evil.example", "evil.example:80", ""):
        got = await shop.send("GET", "/v1/offers", Host=host)
        assert is_refused(got, "misdirected_request", 421, "Host"), host


async def test_pages_of_named_origins_may_read(anyone: Caller, guarded: Guarded, caller: Caller) -> None:
    path, origin = "/v1/offers/x/grabs", "https://shop.example.com"
    asked = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "authorization"}
    got = await anyone.send("OPTIONS", path, Origin=origin, **asked)
    assert (got.status, got.headers["access-control-allow-origin"]) == (204, origin)
    assert got.headers["access-control-allow-methods"] == got.headers["allow"]
    assert "POST" in got.headers["allow"]
    assert "access-control-allow-credentials" not in got.headers
    assert "Authorization" in got.headers["access-control-allow-headers"]
    for one in (anyone, service(anyone, guarded)):
        got = await one.send("GET", "/v1/offers", Origin=origin)
        assert got.headers["access-control-allow-origin"] == origin
        assert "Retry-After" in got.headers["access-control-expose-headers"]
        assert "Origin" in got.headers.getall("vary")
        assert "access-control-allow-credentials" not in got.headers
    for wrong in ("https://evil.example", "null", "https://shop.example.com.evil.example"):
        for method in ("OPTIONS", "GET"):
            got = await anyone.send(method, path, Origin=wrong, **asked)
            assert not [name for name in got.headers if name.lower().startswith("access-control")]
    # Without the setting, no page of another origin may read.
    got = await caller.send("OPTIONS", path, Origin=origin, **asked)
    assert (got.status, "access-control-allow-origin" in got.headers) == (204, False)


async def test_every_answer_has_the_headers_and_no_cookie(
    anyone: Caller, guarded: Guarded, offer: str
) -> None:
    shop = service(anyone, guarded)
    await shop.open(offer)
    for got in (
        await anyone.send("GET", "/health"), await anyone.send("GET", "/openapi.json"),
        await anyone.send("GET", "/v1/offers"), await shop.send("GET", "/v1/offers"),
        await shop.send("GET", "/nowhere"), await shop.post(f"/v1/offers/{offer}/grabs", {"user": "a"}),
        await shop.send("OPTIONS", "/v1/offers"), await shop.send("GET", "/v1/users/ann/grabs"),
        await shop.send("DELETE", "/v1/offers"), await shop.post("/v1/offers", b"{"),
    ):  # fmt: skip
        assert got.headers["x-content-type-options"] == "nosniff"
        assert got.headers["referrer-policy"] == "no-referrer"
        assert got.headers["content-security-policy"].startswith("default-src 'none'")
        assert "set-cookie" not in got.headers


# -- rates ---------------------------------------------------------------------------------------------------


async def test_address_with_wrong_credentials_is_refused_and_others_are_not(
    anyone: Caller, guarded: Guarded
) -> None:
    address = anyone._always["X_Forwarded_For"]
    shop, ann = service(anyone, guarded), user(anyone, "ann")
    assert (await ann.send("GET", "/v1/users/ann/grabs")).status == 200
    got = [await anyone.having(new_secret(), **anyone._always).send("GET", "/v1/offers") for _ in range(60)]
    statuses = [one.status for one in got]
    assert statuses == [401] * 40 + [429] * 20
    assert is_refused(got[-1], "too_many_requests", 429)
    assert 1 <= int(got[-1].headers["retry-after"]) <= 3_600
    # Also with a chosen address in front, as the sender of the header can write it.
    spoofed = anyone.having(None, X_Forwarded_For=f"203.0.113.1, {address}")
    assert (await spoofed.send("GET", "/v1/offers")).status == 429
    # Credentials not used lately are not checked, valid or not; an admitted user stays admitted.
    assert (await user(anyone, "new").send("GET", "/v1/users/new/grabs")).status == 429
    assert (await ann.send("GET", "/v1/users/ann/grabs")).status == 200
    elsewhere = shop.having(guarded.secrets["read"], X_Forwarded_For="198.51.100.200")
    assert (await elsewhere.send("GET", "/v1/offers")).status == 200
    assert (await anyone.send("GET", "/health")).status == 200


@pytest.mark.long
async def test_processes_of_a_gateway_count_requests_together(
    door: Door, guarded: Guarded, tmp_path: Path
) -> None:
    """In the cache Redis; without it, the gateway says that each process counts separately."""
    [port] = free_ports(1)
    cache = Redis(tmp_path / "cache", port, "cache")
    await asyncio.to_thread(cache.start)
    overrides = {"gateway_authentication": "required", "gateway_key_rate": "10/hour"}
    at_cache = {"cache_url": f"redis://127.0.0.1:{port}/0"}
    by_itself = "each of the 2 processes counts the requests of callers separately"
    try:
        words = ("--processes", "2")
        with GatewayProcess(door.settings, tmp_path / "log", *words, **overrides, **at_cache) as gateway:
            await until(lambda: gateway.text().count("listening on") == 2, 60, "both processes")
            statuses = []
            for _ in range(14):
                # A separate connection: the kernel chooses the process.
                async with calling(gateway.port) as caller:
                    got = await caller.having(guarded.secrets["read"]).send("GET", "/v1/offers")
                    statuses.append(got.status)
            assert statuses == [200] * 10 + [429] * 4
            assert by_itself not in gateway.text()
        with GatewayProcess(door.settings, tmp_path / "alone", *words, **overrides) as gateway:
            assert by_itself in gateway.text()
    finally:
        await asyncio.to_thread(cache.kill)


@pytest.mark.long
@pytest.mark.requirement("F5")
async def test_rates_hold_for_a_key_and_a_user_in_all_gateways(
    door: Door, guarded: Guarded, tmp_path: Path
) -> None:
    """Counted in the cache Redis by two gateways together; when it dies, each counts separately, and is not
    down. It is used again when it is back.
    """
    [port] = free_ports(1)
    cache = Redis(tmp_path / "cache", port, "cache")
    await asyncio.to_thread(cache.start)
    overrides = {
        "gateway_authentication": "required", "gateway_key_rate": "10/hour", "gateway_user_rate": "5/hour",
        "jwt_issuer": ISSUER, "jwt_audience": AUDIENCE,
        "jwt_jwks": str(guarded.gateway.log.parent / "keys.json"),
        "cache_url": f"redis://127.0.0.1:{port}/0", "gate_timeout_ms": "20000",
    }  # fmt: skip
    try:
        with (
            GatewayProcess(door.settings, tmp_path / "one", **overrides) as one,
            GatewayProcess(door.settings, tmp_path / "two", **overrides) as two,
        ):
            async with calling(one.port) as first, calling(two.port) as second:
                read, ann = guarded.secrets["read"], token("ann")
                gateways = (first, second)

                async def statuses(secret: str, path: str, count: int) -> list[int]:
                    asked = (gateways[number % 2].having(secret) for number in range(count))
                    return [(await caller.send("GET", path)).status for caller in asked]

                assert await statuses(read, "/v1/offers", 14) == [200] * 10 + [429] * 4
                assert await statuses(ann, "/v1/users/ann/grabs", 8) == [200] * 5 + [429] * 3
                # Other callers are counted apart, also a user with the name of a key.
                assert await statuses(token("read"), "/v1/users/read/grabs", 1) == [200]
                got = await first.having(read).send("GET", "/v1/offers")
                assert is_refused(got, "too_many_requests", 429)
                assert int(got.headers["retry-after"]) >= 1

                await asyncio.to_thread(cache.kill)
                assert await statuses(read, "/v1/offers", 22) == [200] * 20 + [429] * 2
                await asyncio.to_thread(cache.start)

                async def are_back() -> bool:
                    return all("can be used again" in gateway.text() for gateway in (one, two))

                await until(are_back, 20, "the cache")
                for gateway in (one, two):
                    lines = gateway.text().splitlines()
                    assert [("cannot be used" in line, "used again" in line) for line in lines[1:]] == [
                        (True, False), (False, True),
                    ], lines  # fmt: skip
                assert (await first.having(token("bob")).send("GET", "/v1/users/bob/grabs")).status == 200
    finally:
        await asyncio.to_thread(cache.kill)


@pytest.mark.long
async def test_one_end_user_leaves_room_for_the_questions_of_others(anyone: Caller, guarded: Guarded) -> None:
    """A question waits for an event that never comes for 5 s, and the gateway takes a bounded number of
    those. For a shard with a fault, it is unknown whether it has decided the event.
    """
    redis, state = open_redis(guarded.settings), key_space(guarded.settings).shard(0).state
    await redis.hset(state, "fault", "of a test")
    path = "/v1/users/{}/grabs?after=0-9999999999999999"
    ann, bob = user(anyone, "ann"), user(anyone, "bob")

    async def keep_waiting() -> None:
        while True:
            got = await ann.send("GET", path.format("ann"))
            assert is_refused(got, got.body["type"].rpartition("/")[2], 503, got.body.get("field"))
            await asyncio.sleep(0.2)

    async def is_full() -> bool:
        got = await ann.send("GET", "/v1/users/ann/balances")
        if got.status == 200:
            return False
        assert is_refused(got, "busy", 503)
        assert f"ann has {QUESTIONS_USER_MAX} queries being answered at this gateway" in got.body["detail"]
        assert got.headers["retry-after"] == "1"
        return True

    waiting = [asyncio.create_task(keep_waiting()) for _ in range(QUESTIONS_USER_MAX)]
    try:
        await until(is_full, 60, "the bound of a user")
        assert (await bob.send("GET", "/v1/users/bob/balances")).status == 200
        shop = service(anyone, guarded, "read")
        assert (await shop.send("GET", "/v1/users/ann/balances")).status == 200
    finally:
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await redis.hdel(state, "fault")
        await redis.aclose()
    assert not [one for one in waiting if not one.cancelled()]

    async def is_free() -> bool:
        return (await ann.send("GET", "/v1/users/ann/balances")).status == 200

    await until(is_free, 60, "the end of the questions")


@pytest.mark.requirement("E11", "F11")
async def test_server_that_decides_is_refused_as_cache(door: Door) -> None:
    """Under another name, and another number of the database."""
    same = door.settings.redis_url.replace("127.0.0.1", "localhost").replace("/0", "/5")
    assert same != door.settings.redis_url
    done = await asyncio.to_thread(
        grabstream, "gateway", "--port", "0", **env_of(door.settings), shards="2", cache_url=same,
        gateway_authentication="required",
    )  # fmt: skip
    assert (done.returncode, "GRAB_CACHE_URL" in done.stderr) == (2, True), done.stderr


# -- servers that are away -----------------------------------------------------------------------------------


@pytest.mark.long
async def test_without_any_known_keys_services_wait_and_users_do_not(
    door: Door, guarded: Guarded, offer: str, tmp_path: Path
) -> None:
    """PostgreSQL is away from the start."""
    [port] = free_ports(1)
    away = door.settings.model_copy(update={"postgres": f"postgresql://joe:secret@127.0.0.1:{port}/books"})
    with GatewayProcess(
        away, tmp_path / "log", gateway_authentication="required", jwt_issuer=ISSUER, jwt_audience=AUDIENCE,
        jwt_jwks=str(guarded.gateway.log.parent / "keys.json"), gate_timeout_ms="20000",
    ) as gateway:  # fmt: skip
        async with calling(gateway.port) as anyone:
            got = await anyone.having(guarded.secrets["all"]).post("/v1/offers", {"offer": offer})
            assert is_refused(got, "unavailable", 503)
            assert got.headers["retry-after"] == "1"
            assert "API keys" in got.body["detail"]
            got = await anyone.having(token("ann")).post(f"/v1/offers/{offer}/grabs", {})
            assert is_refused(got, "no_such_offer", 404)
            assert (await anyone.having("rubbish").send("GET", "/v1/offers")).status == 401
        assert gateway.text().count("API keys cannot be read") == 1
        assert "secret" not in gateway.text()


class Forwarder:
    """Forwards connections to a port, or refuses them."""

    def __init__(self, port: int) -> None:
        self.port = 0
        self.refused = 0
        self.is_open = True
        self._there = port
        self._writers: set[asyncio.StreamWriter] = set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.is_open:
            self.refused += 1
            writer.close()
            return
        beyond, onward = await asyncio.open_connection("127.0.0.1", self._there)
        self._writers |= {writer, onward}
        await asyncio.gather(self._copy(reader, onward), self._copy(beyond, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(65_536):
                writer.write(piece)
        writer.close()

    def close(self) -> None:
        """Ends all connections, and refuses further ones."""
        self.is_open = False
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def start(self) -> asyncio.Server:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server


@pytest.mark.long
async def test_without_postgresql_known_keys_are_valid_and_a_revocation_holds_soon_after_it_is_back(
    door: Door, offer: str, tmp_path: Path
) -> None:
    secret, name = new_secret(), f"shop-{secrets.token_hex(4)}"
    parts = conninfo_to_dict(door.settings.postgres)
    forwarder = Forwarder(int(parts["port"] or 0))
    async with checked_database(door.settings) as connection:
        await api_keys.create(connection, name, ["grab", "operate"], digest_of(secret.encode()), None)
        async with await forwarder.start():
            there = make_conninfo(door.settings.postgres, host="127.0.0.1", port=str(forwarder.port))
            settings = door.settings.model_copy(update={"postgres": there})
            gateway = GatewayProcess(
                settings, tmp_path / "log", gateway_authentication="required", gate_timeout_ms="20000"
            )
            try:
                await asyncio.to_thread(gateway.start)
                async with calling(gateway.port) as anyone:
                    shop = anyone.having(secret)
                    await shop.open(offer, total=100)
                    forwarder.close()
                    await api_keys.revoke(connection, name)
                    # After this many attempts, a pool with growing pauses would come much later.
                    await until(lambda: forwarder.refused >= 8, 60, "attempts to connect")
                    assert (await shop.post(f"/v1/offers/{offer}/grabs", {"user": "ann"})).status == 201
                    forwarder.is_open = True
                    loop = asyncio.get_running_loop()
                    began = loop.time()

                    async def is_revoked() -> bool:
                        got = await shop.post(f"/v1/offers/{offer}/grabs", {"user": "ann"})
                        return got.status == 401

                    await until(is_revoked, 30, "the revocation")
                    assert loop.time() - began < REVOCATION_SECONDS_MAX
            finally:
                gateway.kill()
        forwarder.close()


# -- starting ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"jwt_issuer": ISSUER}, "GRAB_JWT_AUDIENCE and GRAB_JWT_JWKS"),
        ({"jwt_issuer": ISSUER, "jwt_audience": AUDIENCE, "jwt_jwks": "/none"}, "GRAB_JWT_JWKS: .*none"),
        ({"jwt_jwks": "http://keys.example.com/keys"}, "GRAB_JWT_JWKS: must be"),
        ({"jwt_jwks": "ftp://127.0.0.1/keys"}, "GRAB_JWT_JWKS: must be"),
        ({"gateway_authentication": "none", "gateway_hosts": "a.example"}, "GRAB_GATEWAY_HOSTS: needs"),
        ({"gateway_hosts": "a.example:80"}, "GRAB_GATEWAY_HOSTS: must be"),
        ({"gateway_origins": "*"}, "GRAB_GATEWAY_ORIGINS: must be"),
        ({"gateway_origins": "https://a.example/"}, "GRAB_GATEWAY_ORIGINS: must be"),
        ({"gateway_proxies": "10.0.0.0/99"}, "GRAB_GATEWAY_PROXIES: must be"),
        ({"gateway_key_rate": "many"}, "GRAB_GATEWAY_KEY_RATE: must be rates"),
        ({"gateway_address_rate": "1/blink"}, "GRAB_GATEWAY_ADDRESS_RATE: must be rates"),
        ({"gateway_authentication": "sometimes"}, "GRAB_GATEWAY_AUTHENTICATION"),
        ({"cache_url": "redis-cluster://127.0.0.1:1"}, "GRAB_CACHE_URL: must be one server"),
    ],
)  # fmt: skip
def test_wrong_settings_are_named(door: Door, given: dict[str, str], words: str) -> None:
    environment = {**env_of(door.settings), "shards": "2", "gateway_authentication": "required", **given}
    done = grabstream("gateway", "--port", "0", **environment)
    assert done.returncode == 2, done.stderr
    assert re.search(words, done.stderr), done.stderr


async def test_clients_of_an_end_user_know_the_answers_to_their_commands(
    anyone: Caller, guarded: Guarded, offer: str
) -> None:
    """Their ids are made of user and key."""
    terms = StockTerms(issuer="shop", total=2, price=1, currency="CNY", hold_ms=600_000, extensions=1)
    url = f"http://127.0.0.1:{guarded.gateway.port}"
    async with (
        AsyncClient(url, key=guarded.secrets["all"]) as shop, AsyncClient(url, key=token("ann")) as ann
    ):  # fmt: skip
        await shop.open(terms, offer)
        held = await ann.grab(offer, "ann", id="held")
        assert (held.outcome, held.id) == ("held", "held")
        extended = await ann.extend(offer, "held", "ann", id="longer")
        assert (extended.outcome, extended.id[:5]) == ("extended", "user:")
        again = await ann.extend(offer, "held", "ann", id="longest")
        assert (again.outcome, again.id[:5]) == ("limit_reached", "user:")
        assert (await ann.release(offer, "held", "ann")).outcome == "released"


async def test_user_that_is_null_is_refused_also_where_it_may_be_absent(anyone: Caller, offer: str) -> None:
    ann = anyone.having(token("ann"))
    grabs = f"/v1/offers/{offer}/grabs"
    for path, body, field in (
        (grabs, {"user": None}, "user"), (f"{grabs}/g/release", {"user": None}, "user"),
        (f"{grabs}/g/extend", {"user": None}, "user"),
        ("/v1/baskets", {"grabs": [{"offer": offer, "user": None}]}, "grabs[0].user"),
    ):  # fmt: skip
        assert is_refused(await ann.post(path, body), "invalid", 400, field)


async def test_events_of_operators_say_which_key_did_it(anyone: Caller, guarded: Guarded, offer: str) -> None:
    """Where the body names an operator, it is that one, but not for lists and corrections."""
    shop = service(anyone, guarded)
    terms = {
        "kind": "coupon",
        "issuer": "shop",
        "total": 5,
        "audience": "list",
        "opens_at": 1_999_999_999_000,
    }
    # A field that is null counts as absent.
    await shop.post("/v1/offers", {"offer": offer, "terms": terms, "operator": None})
    load = {"what": "audience", "chunk": 1, "chunks": 1, "items": ["ann"]}
    entry = {"asset": "CNY", "debit": "external:bank", "credit": "wallet:ann", "amount": 1}
    fix = {"transfers": [entry], "reason": "a complaint"}
    for route, body, name in (("loads", load, "operator"), ("adjustments", fix, "operator"),
                              ("adjustments", fix, "approved_by")):  # fmt: skip
        for other in ("olga", "read", "", 7, ["all"]):
            got = await shop.post(f"/v1/offers/{offer}/{route}", {**body, name: other})
            assert is_refused(got, "invalid", 400, name)
    # The document says that this one is never null.
    got = await shop.post(f"/v1/offers/{offer}/adjustments", {**fix, "approved_by": None})
    assert is_refused(got, "invalid", 400, "approved_by")
    assert got.body["detail"].endswith(", or absent, got null")
    load_of_nobody = {**load, "operator": None}
    assert (await shop.post(f"/v1/offers/{offer}/loads", load_of_nobody)).body["outcome"] == "loaded"
    fix_of_nobody = {**fix, "operator": None}
    got = await shop.post(f"/v1/offers/{offer}/adjustments", fix_of_nobody)
    assert got.body["outcome"] == "adjusted"
    named = {**fix, "operator": "all", "approved_by": "all"}
    assert (await shop.post(f"/v1/offers/{offer}/adjustments", named)).body["outcome"] == "adjusted"
    operate = service(anyone, guarded, "operate")
    await operate.post(f"/v1/offers/{offer}/pause")
    await operate.post(f"/v1/offers/{offer}/resume", {"operator": "olga"})
    await operate.post(f"/v1/offers/{offer}/pause", b'{"op\\u0065rator": null}')
    last = await operate.post(f"/v1/offers/{offer}/close", b'{"op\\u0065rator": "otto"}')
    assert last.body["outcome"] == "closed"

    async def are_there() -> object:
        found = await rows(
            guarded.settings,
            "SELECT type, operator, body::jsonb->>'approved_by' FROM operations "
            f"WHERE offer = '{offer}' ORDER BY seq",
        )
        return found if len(found) == 8 else None

    assert await until(are_there, 30) == [
        ("offer.opened", "all", None), ("offer.loaded", "all", None), ("ledger.adjusted", "all", "all"),
        ("ledger.adjusted", "all", "all"), ("offer.paused", "operate", None),
        ("offer.resumed", "olga", None), ("offer.paused", "operate", None), ("offer.closed", "otto", None),
    ]  # fmt: skip
