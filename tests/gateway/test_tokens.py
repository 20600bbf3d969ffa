"""Tokens of end users, and the keys that verify them: forged and wrong tokens, and a server of keys that
hangs, sends rubbish, or rotates its keys.
"""

import asyncio
import base64
import gzip
import hashlib
import hmac
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import jwt
import pytest
from aiohttp import web
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from grabstream.gateway import key_sets
from grabstream.gateway.bounds import KEY_SET_BYTES_MAX, TOKEN_BYTES_MAX, TOKENS_REMEMBERED_MAX
from grabstream.gateway.key_sets import BadKeySet, KeySet, keys_of, reader_of
from grabstream.gateway.problems import Problem
from grabstream.gateway.tokens import BadToken, TokenVerifier, UnusableToken, UserNames
from grabstream.models.identifiers import ID_PATTERN
from grabstream.models.pseudonyms import user_of
from tests.support.flooding import flooding
from tests.support.issuer import AUDIENCE, ISSUER, KEYS, KeyServer, key_set, public, serving_keys, token

USER_KEY: Final = bytes(range(32))


def encoded(value: Any) -> str:
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def parts(text: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    header, claims, signature = text.split(".")
    decoded = [json.loads(base64.urlsafe_b64decode(part + "==")) for part in (header, claims)]
    return decoded[0], decoded[1], signature


def with_header(**changes: Any) -> str:
    """A good token whose header is changed after it was signed."""
    header, claims, signature = parts(token("ann"))
    return f"{encoded(header | changes)}.{encoded(claims)}.{signature}"


def unsigned(name: str) -> str:
    header, claims, _ = parts(token("ann"))
    return f"{encoded(header | {'alg': name})}.{encoded(claims)}."


def signed_with_public_key(key_id: str) -> str:
    """HS256, with the public key of the issuer as the secret, in the forms in which programs have it."""
    header, claims, _ = parts(token("ann"))
    secret = (
        KEYS["rsa"][1]
        .public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    text = f"{encoded(header | {'alg': 'HS256', 'kid': key_id})}.{encoded(claims)}"
    return f"{text}.{encoded(hmac.new(secret, text.encode(), hashlib.sha256).digest())}"


def with_own_key() -> str:
    """A token with a key of the attacker in its header, which signed it."""
    mine = rsa.generate_private_key(65_537, 2_048)
    document = jwt.get_algorithm_by_name("RS256").to_jwk(mine.public_key(), as_dict=True)
    _, claims, _ = parts(token("ann"))
    return jwt.encode(
        claims, mine, "RS256", headers={"kid": "rsa", "jwk": document, "jku": "http://127.0.0.1/"}
    )


def now(seconds: int) -> int:
    return int(time.time()) + seconds


CLAIMING: Final = b'{"sub":"ann","iss":"%b","aud":"%b","exp":%d}'


def claiming(claims: bytes, header: bytes = b'{"alg":"RS256","kid":"rsa"}') -> str:
    """A signed token, as it is written."""
    filled = claims % (ISSUER.encode(), AUDIENCE.encode(), now(60))
    text = f"{encoded(header)}.{encoded(filled)}"
    algorithm: Any = jwt.get_algorithm_by_name("RS256")
    return f"{text}.{encoded(algorithm.sign(text.encode(), KEYS['rsa'][1]))}"


FORGED: dict[str, Callable[[], str]] = {
    "expired": lambda: token("ann", exp=now(-60)),
    "without an end": lambda: token("ann", exp=None),
    "end is a text": lambda: token("ann", exp="tomorrow"),
    "end is true": lambda: token("ann", exp=True),
    "end in milliseconds": lambda: token("ann", exp=now(60) * 1000),
    "end without end": lambda: token("ann", exp=float("inf")),
    "not yet valid": lambda: token("ann", nbf=now(60)),
    "issued later": lambda: token("ann", iat=now(60)),
    "other issuer": lambda: token("ann", iss="https://login.example.com.evil.example"),
    "without issuer": lambda: token("ann", iss=None),
    "list of issuers": lambda: token("ann", iss=[ISSUER]),
    "other audience": lambda: token("ann", aud="refunds"),
    "without audience": lambda: token("ann", aud=None),
    "part of the audience": lambda: token("ann", aud="grab"),
    "without user": lambda: token(None),
    "user is a number": lambda: token("ann", sub=7),
    "user is a list": lambda: token("ann", sub=["ann"]),
    "user is empty": lambda: token(""),
    "user with a look-alike letter": lambda: token("аnn"),
    "user with a line": lambda: token("ann\n"),
    "user with a zero": lambda: token("ann\x00"),
    "user with full-width letters": lambda: token("ａnn"),
    "user is a path": lambda: token(".."),
    "user is there twice": lambda: claiming(b'{"sub":"bob","iss":"%b","aud":"%b","exp":%d,"sub":"ann"}'),
    "key is there twice": lambda: claiming(CLAIMING, b'{"alg":"RS256","kid":"p256","kid":"rsa"}'),
    "user is too long": lambda: token("a" * 65),
    "user is far too long": lambda: token("a" * 256),
    "user is the id of another one": lambda: token(user_of("auth0|ann", USER_KEY)),
    "user is half of a character": lambda: token("\ud800"),
    "none": lambda: unsigned("none"),
    "None": lambda: unsigned("None"),
    "no algorithm": lambda: with_header(alg=""),
    "HS256 with the public key": lambda: signed_with_public_key("rsa"),
    "HS256 without a known key": lambda: signed_with_public_key("hmac"),
    "another algorithm of the same key": lambda: jwt.encode(
        parts(token("ann"))[1], KEYS["rsa"][1], "RS512", headers={"kid": "rsa"}
    ),
    "id of another key": lambda: token("ann", "rsa", {"kid": "other"}),
    "id of a key of another type": lambda: token("ann", "rsa", {"kid": "p256"}),
    "unknown key": lambda: token("ann", "rsa", {"kid": "unknown"}),
    "no key": lambda: with_header(kid=None),
    "key is a path": lambda: token("ann", "rsa", {"kid": "../../dev/null"}),
    "key is a list": lambda: with_header(kid=["rsa"]),
    "own key in the header": with_own_key,
    "critical header": lambda: token("ann", "rsa", {"crit": ["exp"]}),
    "detached payload": lambda: with_header(b64=False, crit=["b64"]),
    "signature of another token": lambda: token("ann").rpartition(".")[0] + "." + parts(token("bob"))[2],
    "claims of another token": lambda: ".".join(
        [token("ann").split(".")[0], token("bob").split(".")[1], token("ann").split(".")[2]]
    ),
    "without signature": lambda: token("ann").rpartition(".")[0] + ".AA",
    "header is a list": lambda: f"{encoded([])}.{encoded({})}.AA",
    "header is deep": lambda: f"{encoded(b'[' * 2_000)}.{encoded({})}.AA",
    "too large": lambda: token("ann", more="x" * TOKEN_BYTES_MAX),
}  # fmt: skip


NO_USER: Final = (
    "must be a string",
    "must be a string of 1 to 255 bytes of UTF-8",
    "has half of a surrogate pair, which is not a character",
    f"must match {ID_PATTERN}, and be neither . nor .. nor begin with sub:; with GRAB_JWT_USER_KEY, any text "
    "gives an id",
)
CLAIMS: Final = ("exp", "iss", "aud", "sub")
TOO_LARGE: Final = f"The token has more than {TOKEN_BYTES_MAX} bytes."
#: Those that their issuer signed: the error names the cause.
SIGNED: Final = [
    name
    for name in FORGED
    if re.match("expired|end is true|not yet|issued later|other |list of|part of|user|without (?!sig)", name)
]


@pytest.fixture
async def tokens(key_ring: KeySet) -> TokenVerifier:
    """Tokens of the issuer, whose keys are known."""
    return TokenVerifier(ISSUER, AUDIENCE, key_ring)


async def test_token_is_read_as_it_is_written(tokens: TokenVerifier) -> None:
    assert (await tokens.caller_of(claiming(CLAIMING).encode())).user == "ann"


@pytest.mark.parametrize("key_id", KEYS)
async def test_good_token_names_its_user(tokens: TokenVerifier, key_id: str) -> None:
    text = token("ann", key_id, aud=["other", AUDIENCE], nbf=now(-1)).encode()
    for _ in range(2):
        caller = await tokens.caller_of(text)
        assert (caller.user, caller.scopes) == ("ann", frozenset())


@pytest.fixture
async def key_ring() -> KeySet:
    """The keys of the issuer, which are known."""

    async def read() -> bytes:
        return key_set()

    keys = KeySet(read)
    await keys.refresh()
    return keys


@pytest.mark.parametrize("name", ["auth0|5f7c8ec7", "ann@example.org", "\u0430nn", "..", "a" * 255, "sub:x"])
async def test_a_name_that_is_no_id_gives_one_under_a_key(key_ring: KeySet, name: str) -> None:
    tokens = TokenVerifier(ISSUER, AUDIENCE, key_ring, UserNames(key=USER_KEY))
    for _ in range(2):
        caller = await tokens.caller_of(token(name).encode())
        assert caller.user == caller.name == user_of(name, USER_KEY)
    assert (await tokens.caller_of(token("ann").encode())).user == "ann"
    # A user with the id of another one as a name is a different user.
    other = (await tokens.caller_of(token(caller.name).encode())).user
    assert other not in (None, caller.user)
    with pytest.raises(UnusableToken, match="not a user id: it must be a string of 1 to 255 bytes"):
        await tokens.caller_of(token("ä" * 128).encode())


async def test_another_claim_names_the_user(key_ring: KeySet) -> None:
    """Whatever `sub` is, or if there is none."""
    tokens = TokenVerifier(ISSUER, AUDIENCE, key_ring, UserNames("https://login.example.com/user", USER_KEY))

    async def user_of_claim(sub: Any, claim: Any) -> str | None:
        text = token(sub, **{"https://login.example.com/user": claim})
        return (await tokens.caller_of(text.encode())).user

    for sub in ("bob", None, 7, "auth0|x"):
        assert await user_of_claim(sub, "ann") == "ann"
        assert await user_of_claim(sub, "ann@example.org") == user_of("ann@example.org", USER_KEY)
        for wrong in ("", 7, ["ann"], {"id": "ann"}, True):
            with pytest.raises(
                UnusableToken, match="The claim https://login.example.com/user of the token is"
            ):
                await user_of_claim(sub, wrong)
        with pytest.raises(UnusableToken, match="The token has no claim https://login.example.com/user"):
            await user_of_claim(sub, None)


@pytest.mark.parametrize("name", FORGED)
async def test_forged_token_is_refused(tokens: TokenVerifier, name: str) -> None:
    text = FORGED[name]().encode()
    for _ in range(2):
        with pytest.raises(BadToken) as refused:
            await tokens.caller_of(text)
        assert str(refused.value) in {
            "The token is not valid.", "The token has expired.", "The token is not valid yet.",
            TOO_LARGE, "The token names a claim twice.", "The token is for another audience (aud).",
            "The token is of another issuer (iss).", *(f"The token has no claim {one}." for one in CLAIMS),
            *(f"The claim sub of the token is not a user id: it {why}." for why in NO_USER),
        }  # fmt: skip
        is_signed = name in SIGNED
        assert isinstance(refused.value, UnusableToken) == is_signed
        assert is_signed or str(refused.value) in ("The token is not valid.", TOO_LARGE), "nothing about keys"
        assert refused.value.__cause__ is None
    assert not tokens._verified


async def test_size_is_checked_before_anything_is_decoded(
    tokens: TokenVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*words: Any, **options: Any) -> Any:
        raise AssertionError("decoded")

    monkeypatch.setattr(jwt, "get_unverified_header", never)
    monkeypatch.setattr(jwt, "decode", never)
    with pytest.raises(BadToken, match="more than"):
        await tokens.caller_of(b"a" * (TOKEN_BYTES_MAX - 3) + b".b.c")


async def test_signature_is_verified_once_and_times_always(
    tokens: TokenVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified = []
    decode = jwt.decode
    monkeypatch.setattr(
        jwt, "decode", lambda *words, **options: verified.append(1) or decode(*words, **options)
    )
    text = token("ann", exp=now(60)).encode()
    for _ in range(5):
        await tokens.caller_of(text)
    assert len(verified) == 1
    later = time.time() + 70
    monkeypatch.setattr(time, "time", lambda: later)
    with pytest.raises(BadToken, match="expired"):
        await tokens.caller_of(text)
    assert len(verified) == 1


async def test_remembered_tokens_are_bounded(tokens: TokenVerifier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grabstream.gateway.tokens.TOKENS_REMEMBERED_MAX", 3)
    for number in range(6):
        await tokens.caller_of(token(f"u{number}", "ed").encode())
    assert len(tokens._verified) == 3
    assert TOKENS_REMEMBERED_MAX > 1_000


# -- sets of keys --------------------------------------------------------------------------------------------

SMALL = rsa.generate_private_key(65_537, 1_024).public_key()


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ({"kty": "oct", "k": encoded(b"secret" * 8)}, "secret or private"),
        ({"kty": "oct"}, "not accepted"),
        ({**public("rsa"), "alg": "HS256"}, "not accepted"),
        ({**public("rsa"), "alg": "none"}, "not accepted"),
        ({**public("p256"), "alg": "RS256"}, "not accepted"),
        ({**public("p256"), "crv": "secp256k1"}, "not accepted"),
        ({**public("rsa"), "use": "enc"}, "not for signatures"),
        ({**public("rsa"), "key_ops": ["encrypt"]}, "not for signatures"),
        ({**public("rsa"), "key_ops": 5}, "not for signatures"),
        ({**public("rsa"), "key_ops": "verify"}, "not for signatures"),
        ({**public("rsa"), "d": "AQAB"}, "secret or private"),
        ({**public("rsa"), "kid": None}, "no id"),
        ({**public("rsa"), "kid": "k" * 300}, "no id"),
        ({**public("rsa"), "n": 7}, "cannot be read"),
        ({**public("rsa"), "n": ""}, "cannot be read|bits"),
        ({**public("p256"), "x": "AA"}, "cannot be read"),
        ({**public("ed"), "x": "AA"}, "cannot be read"),
        ({**jwt.get_algorithm_by_name("RS256").to_jwk(SMALL, as_dict=True), "kid": "k"}, "1024 bits"),
        ({}, "not accepted"),
    ],
)
def test_key_that_cannot_be_used_is_ignored(document: dict[str, Any], reason: str) -> None:
    whole = {"kid": "k", **document}
    with pytest.raises(BadKeySet, match=reason):
        keys_of(json.dumps({"keys": [whole]}).encode())
    good = {**public("ed"), "kid": "good"}
    assert set(keys_of(json.dumps({"keys": [whole, good]}).encode())) == {"good"}


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"<html>",
        b"[]",
        b"{}",
        b'{"keys":7}',
        b'{"keys":[]}',
        b"[" * 100_000,
        b"\xff\xfe",
        b'{"keys":[7]}',
    ],
)
def test_what_is_no_set_is_refused(raw: bytes) -> None:
    with pytest.raises(BadKeySet):
        keys_of(raw)


def test_second_key_of_an_id_does_not_replace_the_first() -> None:
    keys = keys_of(json.dumps({"keys": [public("rsa"), {**public("other"), "kid": "rsa"}]}).encode())
    assert keys["rsa"].document == public("rsa")


@pytest.fixture
async def server() -> AsyncIterator[KeyServer]:
    async with serving_keys() as one:
        yield one


def tokens_of(server: KeyServer) -> tuple[TokenVerifier, KeySet]:
    keys = KeySet(reader_of(server.url))
    return TokenVerifier(ISSUER, AUDIENCE, keys), keys


async def test_new_key_is_known_when_it_is_first_used(
    server: KeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a key that is withdrawn ends with the next reading, with the tokens that it signed."""
    found = ["rsa"]

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=key_set(*found))

    server.answer = answer
    monkeypatch.setattr(key_sets, "KEY_SET_UNKNOWN_SECONDS_MIN", 0.0)
    tokens, keys = tokens_of(server)
    await keys.refresh()
    old = token("ann").encode()
    assert (await tokens.caller_of(old)).user == "ann"
    found[:] = ["ed"]
    assert (await tokens.caller_of(token("ann", "ed").encode())).user == "ann"
    with pytest.raises(BadToken):
        await tokens.caller_of(old)


@pytest.mark.long
async def test_unknown_keys_are_asked_for_once_by_all_and_not_often(server: KeyServer) -> None:
    server.answer = server.hanging
    tokens, _ = tokens_of(server)
    asking = [asyncio.create_task(tokens.caller_of(token("ann").encode())) for _ in range(300)]
    while not server.requests:
        await asyncio.sleep(0)
    server.released.set()
    assert {caller.user for caller in await asyncio.gather(*asking)} == {"ann"}
    assert server.requests == 1
    for number in range(50):
        with pytest.raises(BadToken):
            await tokens.caller_of(token("ann", "rsa", {"kid": f"k{number}"}).encode())
    assert server.requests == 1


async def test_key_that_changes_under_its_id_does_not_keep_its_tokens(
    server: KeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, keys = tokens_of(server)
    await keys.refresh()
    before = keys.known("rsa")
    await keys.refresh()
    assert keys.known("rsa") is before
    text = token("ann").encode()
    await tokens.caller_of(text)

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response({"keys": [{**public("other"), "kid": "rsa"}]})

    server.answer = answer
    await keys.refresh()
    with pytest.raises(BadToken):
        await tokens.caller_of(text)


async def rubbish(request: web.Request) -> web.StreamResponse:
    return web.Response(body=b"<html>sign in</html>")


async def error(request: web.Request) -> web.StreamResponse:
    return web.Response(status=500)


async def elsewhere(request: web.Request) -> web.StreamResponse:
    raise web.HTTPFound("http://127.0.0.1:1/keys")


async def ten_megabytes(request: web.Request) -> web.StreamResponse:
    return web.Response(body=key_set() + b" " * 10_000_000)


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b" " * 65_536)


async def compressed(request: web.Request) -> web.StreamResponse:
    return web.Response(body=gzip.compress(key_set()), headers={"Content-Encoding": "gzip"})


@pytest.mark.long
@pytest.mark.parametrize(
    "answer",
    [rubbish, error, elsewhere, ten_megabytes, endless, compressed, "hanging"],
    ids=lambda one: getattr(one, "__name__", one),
)
async def test_server_that_fails_leaves_the_known_keys(
    server: KeyServer, answer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Tokens of known keys are verified meanwhile, without waiting; others are answered `unavailable`, since
    they may be good. One line is logged.
    """
    monkeypatch.setattr(key_sets, "KEY_SET_SECONDS_MAX", 2.0)
    monkeypatch.setattr(key_sets, "KEY_SET_UNKNOWN_SECONDS_MIN", 0.0)
    tokens, keys = tokens_of(server)
    await keys.refresh()
    server.answer = server.hanging if answer == "hanging" else answer
    unknown = asyncio.create_task(tokens.caller_of(token("ann", "rsa", {"kid": "new"}).encode()))
    while server.requests < 2:
        await asyncio.sleep(0)
    assert (await tokens.caller_of(token("ann").encode())).user == "ann"
    assert not unknown.done() or answer != "hanging"
    with pytest.raises(Problem) as refused:
        await unknown
    assert refused.value.name == "unavailable"
    with pytest.raises(Problem):
        await tokens.caller_of(token("ann", "rsa", {"kid": "new"}).encode())
    assert len([one for one in caplog.records if one.name.startswith("grabstream")]) == 1
    assert str(server.port) not in refused.value.detail
    server.answer = server.good
    await keys.refresh()
    assert keys.problem == ""


@pytest.mark.parametrize("kind", ["interim", "extensions"])
async def test_server_of_keys_that_never_ends_its_answer_is_cut(kind: str) -> None:
    """A token of an unknown key suffices to ask it, and nothing else is decided while bytes are parsed."""
    async with flooding(kind) as flood:
        read = reader_of(f"http://127.0.0.1:{flood.port}/keys")
        with pytest.raises(OSError, match="the answer has more than"):
            await read()
        assert flood.sent < 32 * 1024 * 1024


async def test_known_keys_end_when_they_are_too_old() -> None:
    async def read() -> bytes:
        return key_set()

    keys = KeySet(read, stale_seconds_max=-1.0)
    await keys.refresh()
    assert keys.known("rsa") is None


@pytest.mark.parametrize("withdrawn", [b'{"keys":[]}', b'{"keys":[{"kty":"oct","kid":"rsa","k":"AQAB"}]}'])
async def test_keys_that_are_withdrawn_end_at_once(
    withdrawn: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """A set without a usable key is not a set that could not be read."""
    current = key_set("rsa")

    async def read() -> bytes:
        return current

    keys = KeySet(read)
    await keys.refresh()
    assert keys.known("rsa") is not None
    current = withdrawn
    for _ in range(2):
        await keys.refresh()
    assert keys.known("rsa") is None
    assert await keys.key("rsa") is None, "and nobody is told to try again later"
    assert len([one for one in caplog.records if "no token of an end user is accepted" in one.message]) == 1
    current = key_set("rsa")
    await keys.refresh()
    assert keys.known("rsa") is not None


async def test_keys_come_from_a_file(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_sets, "KEY_SET_UNKNOWN_SECONDS_MIN", 0.0)
    file = tmp_path / "keys.json"
    file.write_bytes(key_set("rsa"))
    keys = KeySet(reader_of(str(file)))
    assert await keys.key("rsa") is not None
    file.write_bytes(key_set("ed"))
    assert await keys.key("ed") is not None
    assert keys.known("rsa") is None
    file.write_bytes(b" " * (KEY_SET_BYTES_MAX + 1))
    await keys.refresh()
    assert "more than" in keys.problem
    for path in (tmp_path, tmp_path / "none", "/dev/zero"):
        wrong = KeySet(reader_of(str(path)))
        await wrong.refresh()
        assert wrong.problem, path
