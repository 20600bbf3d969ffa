"""API keys in the memory of a gateway, and addresses of clients, without servers."""

import hmac
import time
from ipaddress import ip_network
from typing import Any

import pytest

from grabstream.gateway import api_keys
from grabstream.gateway.admission import Admission, CallerRates
from grabstream.gateway.api_keys import KeyRing, digest_of, is_secret, new_secret
from grabstream.gateway.key_sets import KeySet
from grabstream.gateway.operations import OPERATIONS
from grabstream.gateway.origins import Origins
from grabstream.gateway.problems import Problem, Reply, retry_soon
from grabstream.gateway.rates import MemoryCounters, RequestCounters, read_rates
from grabstream.gateway.requests import Request
from grabstream.gateway.tokens import TokenVerifier
from tests.support.issuer import AUDIENCE, ISSUER, key_set, token

NOW_MS = time.time_ns() // 1_000_000


def row(secret: str, **more: Any) -> dict[str, Any]:
    return {"name": "shop", "scopes": ["read"], "sha256": digest_of(secret.encode()), **more}


async def ring_of(*rows: dict[str, Any], **options: Any) -> KeyRing:
    async def read() -> list[dict[str, Any]]:
        return list(rows)

    ring = KeyRing(read, **options)
    await ring.refresh()
    return ring


def test_secret_has_256_random_bits_and_a_form_that_scanners_find() -> None:
    found = {new_secret() for _ in range(100)}
    assert len(found) == 100
    assert all(is_secret(secret.encode()) and secret.startswith("grabkey_") for secret in found)
    assert all(len(bytes.fromhex(secret.removeprefix("grabkey_"))) * 8 == 256 for secret in found)


async def test_key_is_valid_by_its_secrets_and_times() -> None:
    names = ("now", "before", "over", "ended", "ends")
    now, before, over, ended, ends = (new_secret() for _ in names)
    ring = await ring_of(
        row(now, previous_sha256=digest_of(before.encode()), previous_until=NOW_MS + 3_600_000),
        row(new_secret(), previous_sha256=digest_of(over.encode()), previous_until=NOW_MS - 1),
        row(ended, expires_at=NOW_MS - 1),
        row(ends, expires_at=NOW_MS + 3_600_000),
    )
    valid = {name: ring.caller_of(secret.encode()) is not None for name, secret in
             zip(names, (now, before, over, ended, ends), strict=True)}  # fmt: skip
    assert valid == {"now": True, "before": True, "over": False, "ended": False, "ends": True}
    assert ring.caller_of(new_secret().encode()) is None
    # A rotated secret ends with its key.
    old = new_secret()
    ring = await ring_of(
        row(new_secret(), previous_sha256=digest_of(old.encode()), previous_until=NOW_MS + 3_600_000,
            expires_at=NOW_MS - 1)
    )  # fmt: skip
    assert ring.caller_of(old.encode()) is None


async def test_secrets_are_compared_in_constant_time_and_unknown_ones_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[tuple[int, int]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return hmac.compare_digest(one, other)

    monkeypatch.setattr(api_keys, "compare_digest", compare)
    secret = new_secret()
    ring = await ring_of(row(secret))
    assert ring.caller_of(secret.encode()) is not None
    assert ring.caller_of(new_secret().encode()) is None
    assert compared == [(32, 32)] * 2


async def test_secret_with_the_same_start_of_its_hash_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The index is a part of the hash; the whole decides."""
    monkeypatch.setattr(api_keys, "_INDEX_BYTES", 0)
    secret = new_secret()
    ring = await ring_of(row(secret))
    assert ring.caller_of(secret.encode()) is not None
    assert ring.caller_of(new_secret().encode()) is None


async def test_known_keys_are_valid_without_postgresql_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    secret = new_secret()
    is_away = False

    async def read() -> list[dict[str, Any]]:
        if is_away:
            raise retry_soon("unavailable", "PostgreSQL cannot be reached now.")
        return [row(secret)]

    ring = KeyRing(read, 100)
    with pytest.raises(Problem) as refused:
        ring.caller_of(secret.encode())
    assert refused.value.name == "unavailable"
    assert await ring.refresh()
    is_away = True
    for _ in range(3):
        assert not await ring.refresh()
    assert ring.caller_of(secret.encode()) is not None
    assert len(caplog.records) == 1
    later = time.monotonic() + 101
    monkeypatch.setattr(time, "monotonic", lambda: later)
    with pytest.raises(Problem):
        ring.caller_of(secret.encode())
    is_away = False
    assert await ring.refresh()
    assert ring.caller_of(secret.encode()) is not None
    assert len(caplog.records) == 2


# -- failures ------------------------------------------------------------------------------------------------

[OFFERS] = [operation for operation in OPERATIONS if operation.name == "offers"]


def request(authorization: bytes | None, peer: str = "192.0.2.7", forwarded: bytes | None = None) -> Request:
    headers = [] if authorization is None else [(b"authorization", authorization)]
    if forwarded is not None:
        headers.append((b"x-forwarded-for", forwarded))

    async def receive() -> Any:
        raise AssertionError("the body is read")

    return Request({"client": (peer, 1), "headers": headers, "query_string": b""}, receive, {})


async def outcome(
    admission: Admission, authorization: bytes | None, peer: str = "192.0.2.7", forwarded: bytes | None = None
) -> str:
    try:
        await admission.admit(OFFERS, request(authorization, peer, forwarded))
    except Problem as problem:
        return problem.name
    return "admitted"


async def test_address_with_too_many_failures_is_refused_before_any_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secret, other = new_secret(), new_secret()
    ring = await ring_of(row(secret), row(other, name="other"))
    admission = Admission(ring, None, RequestCounters(), CallerRates(failures=read_rates("3/hour")))
    good, new = (b"Bearer " + one.encode() for one in (secret, other))
    assert await outcome(admission, good) == "admitted"
    found = [await outcome(admission, b"Bearer " + new_secret().encode()) for _ in range(5)]
    assert found == ["unauthenticated"] * 3 + ["too_many_requests"] * 2

    hashed: list[bytes] = []
    monkeypatch.setattr(api_keys, "sha256", lambda text: hashed.append(text) or pytest.fail("hashed"))
    for wrong in (new, None, b"Bearer a.b.c", b"Basic eDp5"):
        assert await outcome(admission, wrong) == "too_many_requests"
    monkeypatch.undo()
    # A caller admitted a moment ago stays admitted, and other addresses are not affected.
    assert await outcome(admission, good) == "admitted"
    assert await outcome(admission, new, "192.0.2.8") == "admitted"
    until = time.monotonic() + 8_000
    monkeypatch.setattr(time, "monotonic", lambda: until)
    assert await outcome(admission, b"Bearer nothing") in ("unauthenticated", "too_many_requests")


async def test_proxy_that_is_not_among_the_settings_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """Its address is refused for what one of its clients sends: all of them, except who was in."""
    ring = await ring_of()

    async def send(proxies: list[str], *forwarded: bytes | None) -> list[str]:
        rates = CallerRates(failures=read_rates("2/hour"))
        admission = Admission(ring, None, RequestCounters(), rates, [ip_network(one) for one in proxies])
        for one in forwarded:
            with pytest.raises(Problem):
                await admission.admit(OFFERS, request(b"Bearer wrong", "10.0.0.7", one))
        said, caplog.records[:] = [record.getMessage() for record in caplog.records], []
        return said

    [said] = await send([], *[b"203.0.113.%d" % number for number in range(6)])
    assert said.startswith("10.0.0.7 is refused: it sent more than 2 requests per 1 hour without valid")
    assert "GRAB_GATEWAY_PROXIES" in said
    assert await send([], *[None] * 6) == [], "a client of its own"
    assert await send(["10.0.0.0/8"], *[b"203.0.113.5"] * 6) == [], "a proxy that is believed"


async def tokens_of_issuer() -> TokenVerifier:
    async def read() -> bytes:
        return key_set()

    keys = KeySet(read)
    await keys.refresh()
    return TokenVerifier(ISSUER, AUDIENCE, keys)


@pytest.mark.requirement("F5")
async def test_end_users_of_one_address_are_counted_together(caplog: pytest.LogCaptureFixture) -> None:
    """A program with many accounts is one address. A service behind it is not counted."""
    secret = new_secret()
    rates = CallerRates(user=read_rates("2/hour"), address=read_rates("5/hour"))
    proxies = [ip_network("10.0.0.0/8")]
    admission = Admission(
        await ring_of(row(secret)), await tokens_of_issuer(), RequestCounters(), rates, proxies
    )

    async def outcomes(users: str, *where: Any) -> list[str]:
        texts = [f"Bearer {token(user)}".encode() for user in users]
        return [await outcome(admission, text, *where) for text in texts]

    assert await outcomes("aaabbcd") == [
        "admitted", "admitted", "too_many_requests", "admitted", "admitted", "admitted", "too_many_requests",
    ]  # fmt: skip
    assert await outcomes("e", "192.0.2.8") == ["admitted"]
    assert await outcome(admission, f"Bearer {secret}".encode()) == "admitted"
    # Behind a proxy that is believed, an address is that of its client.
    found = await outcomes("fghijk", "10.0.0.7", b"203.0.113.5")
    assert found == ["admitted"] * 5 + ["too_many_requests"]
    assert await outcomes("k", "10.0.0.7", b"203.0.113.6") == ["admitted"]
    assert not caplog.records


async def test_what_the_issuer_has_signed_is_no_failure_of_its_address() -> None:
    """Old tokens of some users, or users whose names are no ids, keep nobody out."""
    rates = CallerRates(failures=read_rates("3/hour"))
    admission = Admission(await ring_of(), await tokens_of_issuer(), RequestCounters(), rates)
    of_issuer = [token("ann", exp=int(time.time()) - 60), token("auth0|ann"), token("ann@example.com")]
    for text in 3 * of_issuer:
        assert await outcome(admission, f"Bearer {text}".encode()) == "unauthenticated"
    # It may read what every authenticated user may: the token counts.
    assert await outcome(admission, f"Bearer {token('bob')}".encode()) in ("admitted", "insufficient_scope")
    forged = f"Bearer {of_issuer[0].rpartition('.')[0]}.AA".encode()
    assert [await outcome(admission, forged) for _ in range(4)] == ["unauthenticated"] * 3 + [
        "too_many_requests"
    ]


async def test_memory_of_addresses_and_credentials_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grabstream.gateway.address_rates.CALLERS_COUNTED_MAX", 10)
    monkeypatch.setattr("grabstream.gateway.admission.TOKENS_REMEMBERED_MAX", 10)
    found = [new_secret() for _ in range(30)]
    ring = await ring_of(*(row(secret, name=f"k{number}") for number, secret in enumerate(found)))
    admission = Admission(ring, None, RequestCounters(), CallerRates(failures=read_rates("1/minute")))
    for number, secret in enumerate(found):
        assert await outcome(admission, b"Bearer " + secret.encode(), "198.51.100.1") == "admitted"
        for _ in range(2):
            await outcome(admission, None, f"192.0.2.{number}")
    assert len(admission._failures.blocked) <= 10
    assert len(admission._recent) <= 10


@pytest.mark.parametrize(
    "authorization",
    [
        b"",
        b"Bearer",
        b"Bearer ",
        b"Basic %s",
        b"%s",
        b"Bearer %s x",
        b"Bearer\t%s",
        b"Bearer %s, Bearer %s",
        b"Token %s",
    ],
)
async def test_header_of_another_form_is_no_credential(authorization: bytes) -> None:
    secret = new_secret()
    admission = Admission(await ring_of(row(secret)), None, RequestCounters(), CallerRates())
    assert await outcome(admission, authorization.replace(b"%s", secret.encode())) == "unauthenticated"
    for good in (b"Bearer %s", b"bearer  %s", b"BEARER %s "):
        assert await outcome(admission, good.replace(b"%s", secret.encode())) == "admitted"


# -- rates ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["0/second", "10", "ten/second", "-1/second", "1/fortnight", "", "1/second " * 50]
)
def test_wrong_rates_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="100/second"):
        read_rates(text)


@pytest.mark.requirement("F5")
def test_rates_in_memory_count_a_sliding_window() -> None:
    [rate] = read_rates("10/minute")
    counters = MemoryCounters()
    start = 6_000_000.0
    assert [counters.hit(rate, "a", start + 50) for _ in range(10)] == [0] * 10
    wait = counters.hit(rate, "a", start + 50)
    assert wait == 11
    assert counters.hit(rate, "b", start + 50) == 0
    # In the next window, what was counted before fades away.
    assert counters.hit(rate, "a", start + 60) > 0
    assert [counters.hit(rate, "a", start + 67) for _ in range(2)] == [0, 0]
    wait = counters.hit(rate, "a", start + 67)
    assert wait > 0
    assert counters.hit(rate, "a", start + 67 + wait) == 0
    # After two windows nothing is left.
    assert [counters.hit(rate, "a", start + 300) for _ in range(10)] == [0] * 10


def test_callers_in_memory_are_bounded_and_the_least_recent_go_first() -> None:
    [rate] = read_rates("1/minute")
    counters = MemoryCounters(callers_max=100)
    for number in range(1_000):
        counters.hit(rate, f"c{number}", 6_000_000.0)
        counters.hit(rate, "busy", 6_000_000.0)
    assert len(counters) == 100
    assert counters.hit(rate, "busy", 6_000_000.0) > 0
    assert counters.hit(rate, "c1", 6_000_000.0) == 0


# -- other origins -------------------------------------------------------------------------------------------

ORIGINS = Origins(frozenset({"https://shop.example.com"}))


def headers_for(*origins: bytes) -> dict[bytes, bytes]:
    given = [(b"origin", origin) for origin in origins]
    return dict(ORIGINS.headers({"method": "GET", "headers": given}, Reply(204, b"", ())))


def test_only_exact_origins_may_read() -> None:
    for wrong in (
        b"https://shop.example.com.evil.example", b"http://shop.example.com", b"https://shop.example.com:444",
        b"null", b"*", b"https://evil.example", b"https://SHOP.example.com",
    ):  # fmt: skip
        assert headers_for(wrong) == {b"vary": b"Origin"}
    assert headers_for() == {b"vary": b"Origin"}
    assert headers_for(b"https://shop.example.com", b"https://evil.example") == {b"vary": b"Origin"}
    found = headers_for(b"https://shop.example.com")
    assert found[b"access-control-allow-origin"] == b"https://shop.example.com"
    assert b"access-control-allow-credentials" not in found


GRAB = next(operation for operation in OPERATIONS if operation.name == "grab")
CALLBACK = next(operation for operation in OPERATIONS if operation.name == "payment_callback")


def grabbing(*credentials: str) -> Request:
    headers = [(b"authorization", f"Bearer {one}".encode()) for one in credentials]
    return Request({"headers": headers, "client": ("127.0.0.1", 1)}, Any, {"offer": "x"})


async def test_only_a_service_that_was_admitted_before_needs_no_waiting_for() -> None:
    """What is let in at once is what `admit` lets in; everything else is left to it."""
    shop, reader, ending = new_secret(), new_secret(), new_secret()
    rows = [
        row(shop, scopes=["grab"]),
        row(reader, name="reader", scopes=["read"]),
        row(ending, name="ending", scopes=["grab"]),
    ]
    ring = await ring_of(*rows)
    admission = Admission(ring, None, RequestCounters(), CallerRates())
    assert not admission.admits_now(GRAB, grabbing(shop))
    for secret in (shop, ending):
        await admission.admit(GRAB, grabbing(secret))
    with pytest.raises(Problem, match="scope"):
        await admission.admit(GRAB, grabbing(reader))
    request = grabbing(shop)
    assert admission.admits_now(GRAB, request)
    assert (request.service, request.user) == ("shop", None)
    assert admission.admits_now(CALLBACK, grabbing())
    # Without credentials, with wrong ones, with two, without the scope, and with a token.
    for others in ((), (new_secret(),), (shop, shop), (reader,), ("e30.e30.e30",)):
        assert not admission.admits_now(GRAB, grabbing(*others))
    # A key that is revoked is not let in any more, although it was valid a moment ago.
    del rows[2]
    ring._kept = (await ring_of(*rows))._kept
    assert not admission.admits_now(GRAB, grabbing(ending))
    assert admission.admits_now(GRAB, grabbing(shop))


async def test_request_is_counted_once_whichever_way_it_goes() -> None:
    shop = new_secret()
    rates = read_rates("3/hour; 10/day")
    counters = RequestCounters()
    ring = await ring_of(row(shop, scopes=["grab"]))
    admission = Admission(ring, None, counters, CallerRates(key=rates))
    await admission.admit(GRAB, grabbing(shop))
    assert [admission.admits_now(GRAB, grabbing(shop)) for _ in range(2)] == [True, True]
    for _ in range(4):
        request = grabbing(shop)
        assert not admission.admits_now(GRAB, request)
        with pytest.raises(Problem, match="3 requests per 1 hour"):
            await admission.admit(GRAB, request)
    # Those that were refused by the hour count for the day, once.
    [day] = [rate for rate in rates if rate.GRANULARITY.name == "day"]
    left = [await counters.hit([day], "key", "shop") == 0 for _ in range(4)]
    assert left == [True, True, True, False]
