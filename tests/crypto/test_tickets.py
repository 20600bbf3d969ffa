"""Tickets: valid only if signed with a known key, and only for their user and their offer or its campaign."""

import hashlib
import hmac
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from grabstream.connections.opening import ticket_keys
from grabstream.crypto.tickets import NOT_BEFORE_LEEWAY_SECONDS, REMEMBERED_MAX, Ticket, TicketKeys, sign
from grabstream.models.commands import TICKET_LENGTH_MAX
from grabstream.models.offers import TIME_MS_MAX
from grabstream.settings import BadSettings, Settings, load_settings
from tests.gate.ticket_secrets import OTHER_SECRET, SECRET, as_text

PRIVATE = Ed25519PrivateKey.from_private_bytes(bytes(range(2, 34)))
PUBLIC = PRIVATE.public_key()
PUBLIC_BYTES = PUBLIC.public_bytes_raw()
PUBLIC_PEM = PUBLIC.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
USER, OFFER, CAMPAIGN = "bob", "sale:1", "sale"
EXPIRES_AT = 1_795_236_663  # seconds
GOOD = Ticket(EXPIRES_AT * 1_000, "")
GOOD_IN_CAMPAIGN = Ticket(EXPIRES_AT * 1_000, "", is_campaign_wide=True)
CLAIMS = {"sub": USER, "aud": OFFER, "exp": EXPIRES_AT}


SETTING = f"h:HS256:{as_text(SECRET)},e:EdDSA:{as_text(PUBLIC_BYTES)}"
KEYS = TicketKeys.from_text(SETTING)


def token_of(claims: Any = CLAIMS, key: Any = SECRET, algorithm: str | None = "HS256", **header: Any) -> str:
    """A token made with the JWT library alone, which, unlike `sign`, makes invalid tickets too."""
    return jwt.encode(claims, key, algorithm, {"kid": "h", **header})


def but(*without: str, **claims: Any) -> dict[str, Any]:
    """The claims of a valid ticket, without the names in `without` and with `claims` changed."""
    return {name: value for name, value in {**CLAIMS, **claims}.items() if name not in without}


def segment(text: bytes) -> str:
    return urlsafe_b64encode(text).decode().rstrip("=")


def with_segment(token: str, index: int, text: bytes) -> str:
    """The token with segment `index` (0 header, 1 claims, 2 signature) replaced by `text`."""
    segments = token.split(".")
    segments[index] = segment(text)
    return ".".join(segments)


@pytest.mark.parametrize(("key_id", "key"), [("h", SECRET), ("e", PRIVATE)])
@pytest.mark.parametrize("audience", [OFFER, CAMPAIGN, [OFFER], ["other", CAMPAIGN], [CAMPAIGN, OFFER]])
@pytest.mark.parametrize("once_id", ["", "x" * 64])
def test_a_valid_ticket_is_read(
    key_id: str, key: bytes | Ed25519PrivateKey, audience: str | list[str], once_id: str
) -> None:
    token = sign(key_id, key, user=USER, offer=audience, expires_at_ms=EXPIRES_AT * 1_000, once_id=once_id)
    for _ in range(2):
        assert KEYS.read(token, USER, OFFER) == Ticket(
            EXPIRES_AT * 1_000, once_id, audience not in (OFFER, [OFFER])
        )


@given(expires_at_ms=st.integers(1_000, TIME_MS_MAX))
def test_expiry_keeps_its_milliseconds(expires_at_ms: int) -> None:
    token = sign("h", SECRET, user=USER, offer=OFFER, expires_at_ms=expires_at_ms)
    assert KEYS.read(token, USER, OFFER) == Ticket(expires_at_ms, "")


def test_an_offer_without_a_campaign_is_its_own_campaign() -> None:
    token = sign("h", SECRET, user=USER, offer="lunch", expires_at_ms=EXPIRES_AT * 1_000)
    assert KEYS.read(token, USER, "lunch") == GOOD_IN_CAMPAIGN


def test_an_expired_ticket_is_read_since_the_shard_checks_expiry() -> None:
    assert KEYS.read(token_of(but(exp=1)), USER, OFFER) == Ticket(1_000, "")


@pytest.mark.parametrize(
    ("user", "offer"),
    [
        ("carol", OFFER),
        ("BOB", OFFER),
        ("", OFFER),
        (USER, "sale:2"),
        (USER, CAMPAIGN),
        (USER, "sale:1:1"),
        (USER, ""),
        (CAMPAIGN, USER),
    ],
)
def test_a_ticket_for_another_user_or_offer_is_refused(user: str, offer: str) -> None:
    token = token_of()
    assert KEYS.read(token, USER, OFFER) == GOOD
    assert KEYS.read(token, user, offer) is None


@pytest.mark.parametrize(
    "claims",
    [
        but("sub"), but(sub=None), but(sub=7), but(sub=[USER]), but(sub=""),
        but("aud"), but(aud=None), but(aud=""), but(aud=[]), but(aud=7), but(aud=[OFFER, 7]),
        but(aud={OFFER: 1}), but(aud="sale:"),
        but(aud="sal"), but(aud=["other"]), but(aud=f"{OFFER} {CAMPAIGN}"),
        but("exp"), but(exp=None), but(exp=str(EXPIRES_AT)), but(exp="soon"), but(exp=True), but(exp=0),
        but(exp=-1), but(exp=[EXPIRES_AT]),
        but(exp=EXPIRES_AT * 1_000), but(exp=float("nan")), but(exp=float("inf")), but(exp=10**400),
        but(jti=""), but(jti=None), but(jti=7), but(jti="a b"), but(jti="x" * 65), but(jti="é"),
        but(jti="t\n"), but(jti=["t"]),
        but(nbf="soon"), but(nbf=None), but(nbf=time.time() + 3_600),
    ],
)  # fmt: skip
def test_wrong_claims_are_refused(claims: dict[str, Any]) -> None:
    assert KEYS.read(token_of(claims), USER, OFFER) is None


@pytest.mark.parametrize(
    ("header", "claims"),
    [
        (b'{"alg":"HS256","kid":"h"}', b'{"sub":"carol","aud":"sale:1","exp":%d,"sub":"bob"}'),
        (b'{"alg":"HS256","kid":"h"}', b'{"sub":"bob","aud":"sale:1","exp":%d,"x":{"a":1,"\\u0061":2}}'),
        (b'{"alg":"HS256","kid":"e","kid":"h"}', b'{"sub":"bob","aud":"sale:1","exp":%d}'),
    ],
)
def test_a_ticket_that_names_something_twice_is_refused(header: bytes, claims: bytes) -> None:
    def signed(header: bytes, claims: bytes) -> str:
        text = f"{segment(header)}.{segment(claims % EXPIRES_AT)}"
        return f"{text}.{segment(hmac.digest(SECRET, text.encode(), hashlib.sha256))}"

    once = signed(b'{"alg":"HS256","kid":"h"}', b'{"sub":"bob","aud":"sale:1","exp":%d}')
    assert KEYS.read(once, USER, OFFER) == GOOD
    assert KEYS.read(signed(header, claims), USER, OFFER) is None


@pytest.mark.parametrize(
    "claims",
    [
        but(iss="eligibility", iat=EXPIRES_AT, other=[1]), but(nbf=1), but(exp=EXPIRES_AT + 0.0),
        but(nbf=time.time() + NOT_BEFORE_LEEWAY_SECONDS - 1),
    ],
)  # fmt: skip
def test_other_valid_claims_are_accepted(claims: dict[str, Any]) -> None:
    assert KEYS.read(token_of(claims), USER, OFFER) == GOOD


@pytest.mark.long
def test_a_ticket_becomes_valid_at_its_not_before_time() -> None:
    good_from = int(time.time()) + 2
    token = token_of(but(nbf=good_from + NOT_BEFORE_LEEWAY_SECONDS))
    assert KEYS.read(token, USER, OFFER) is None
    time.sleep(good_from - time.time() + 0.05)
    assert KEYS.read(token, USER, OFFER) == GOOD


@pytest.mark.parametrize(
    ("why", "token"),
    [
        ("an unknown key id", token_of(kid="x")),
        ("the id of the EdDSA key", token_of(kid="e")),
        ("EdDSA with the id of the HS256 key", token_of(key=PRIVATE, algorithm="EdDSA", kid="h")),
        ("no key id", jwt.encode(CLAIMS, SECRET, "HS256")),
        ("an unknown secret", token_of(key=OTHER_SECRET)),
        ("an unknown private key", token_of(key=Ed25519PrivateKey.generate(), algorithm="EdDSA", kid="e")),
        ("no algorithm", token_of(key=None, algorithm=None)),
        ("no algorithm, with the id of the EdDSA key", token_of(key=None, algorithm=None, kid="e")),
        ("HS512 with a secret for HS256", token_of(key=SECRET * 2, algorithm="HS512")),
        ("the public key as secret", token_of(key=PUBLIC_BYTES, kid="e")),
        ("the public key's base64 as secret", token_of(key=as_text(PUBLIC_BYTES), kid="e")),
        ("an unknown critical extension", token_of(crit=["exp"], exp=1)),
    ],
)
def test_a_token_signed_with_a_wrong_key_is_refused(why: str, token: str) -> None:
    assert KEYS.read(token, USER, OFFER) is None, why


def test_a_token_signed_with_the_public_key_as_secret_is_refused() -> None:
    """The library refuses to sign with such a secret, but others can: this token is signed by hand."""
    signed = ".".join(token_of(kid="e").split(".")[:2])
    for secret in (PUBLIC_PEM, PUBLIC_BYTES):
        signature = hmac.new(secret, signed.encode(), hashlib.sha256).digest()
        assert KEYS.read(f"{signed}.{segment(signature)}", USER, OFFER) is None


@pytest.mark.parametrize("token", [token_of(), token_of(key=PRIVATE, algorithm="EdDSA", kid="e")])
def test_a_changed_token_is_refused(token: str) -> None:
    assert KEYS.read(token, USER, OFFER) == GOOD
    header, claims, signature = (urlsafe_b64decode(part + "==") for part in token.split("."))
    for changed in (
        with_segment(token, 1, claims.replace(b"bob", b"eve")),
        with_segment(token, 1, claims.replace(str(EXPIRES_AT).encode(), str(EXPIRES_AT + 1).encode())),
        with_segment(token, 1, claims + b" "),
        with_segment(token, 0, header + b" "),
        with_segment(token, 0, header.replace(b"HS256", b"none").replace(b"EdDSA", b"none")),
        with_segment(token, 2, b""),
        with_segment(token, 2, signature[:-1]),
        with_segment(token, 2, signature + b"\0"),
        with_segment(token, 2, bytes([signature[0] ^ 1]) + signature[1:]),
        with_segment(token, 2, bytes(len(signature))),
    ):
        assert changed != token
        for user in (USER, "eve"):
            assert KEYS.read(changed, user, OFFER) is None


@pytest.mark.parametrize(
    "token",
    [
        "", ".", "..", "...", "ticket", "a.b.c", "é.é.é", "\ud800", "\0", "x" * TICKET_LENGTH_MAX,
        " " + token_of(), token_of() + "\n", token_of() + ".", "." + token_of(), "Bearer " + token_of(),
        token_of().replace(".", ":"),
        f"{segment(b'[]')}.{segment(b'{}')}.", f"{segment(b'{}')}.{segment(b'{}')}.",
        f"{segment(b'[' * 3_000)}.{segment(b'{}')}.",
        with_segment(token_of(), 0, b'{"alg":"HS256","kid":["h"]}'),
        with_segment(token_of(), 0, b'{"alg":"HS256","kid":null}'),
        with_segment(token_of(), 0, b'{"alg":["HS256"],"kid":"h"}'),
        with_segment(token_of(), 0, b'{"kid":"h"}'),
        with_segment(token_of(), 0, b"\xff"),
    ],
)  # fmt: skip
def test_a_malformed_token_is_refused(token: str) -> None:
    assert KEYS.read(token, USER, OFFER) is None


@pytest.mark.parametrize("claims", [b"", b"[]", b"7", b'"text"', b"{", b"\xff", b"[" * 2_000])
def test_a_signed_token_without_a_claims_object_is_refused(claims: bytes) -> None:
    assert KEYS.read(jwt.PyJWS().encode(claims, SECRET, "HS256", {"kid": "h"}), USER, OFFER) is None


@given(st.text())
def test_random_text_is_refused(text: str) -> None:
    assert KEYS.read(text, USER, OFFER) is None


@pytest.mark.parametrize("setting", ["", " ", " , "])
def test_without_keys_every_ticket_is_refused(setting: str) -> None:
    assert TicketKeys.from_text(setting).read(token_of(), USER, OFFER) is None


@pytest.mark.long
def test_remembered_tickets_are_bounded_and_forged_ones_are_not_remembered() -> None:
    keys = TicketKeys({"h": SECRET})
    good, forged = token_of(), token_of(key=OTHER_SECRET)

    def remembered() -> int:
        return int(keys._verified.cache_info().currsize)  # type: ignore[attr-defined]

    for _ in range(10):
        assert keys.read(good, USER, OFFER) == GOOD
        assert keys.read(forged, USER, OFFER) is None
        assert keys.read(good, "carol", OFFER) is None
    assert remembered() == 1
    campaign = token_of(but(aud=CAMPAIGN))
    for number in range(REMEMBERED_MAX + 10):
        assert keys.read(campaign, USER, f"{CAMPAIGN}:{number}") == GOOD_IN_CAMPAIGN
    assert remembered() == REMEMBERED_MAX


@pytest.mark.parametrize(
    "encoded",
    [as_text(b"\xfb\xff" * 16), segment(b"\xfb\xff" * 16), urlsafe_b64encode(b"\xfb\xff" * 16).decode()],
)
def test_keys_are_read_in_both_base64_alphabets_with_and_without_padding(encoded: str) -> None:
    keys = TicketKeys.from_text(f" h:HS256:{encoded} , ")
    assert keys.read(token_of(key=b"\xfb\xff" * 16), USER, OFFER) == GOOD


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        (as_text(SECRET), "key 1 has 1 fields; write it as id:algorithm:key"),
        (f"h:{as_text(SECRET)}", "key 1 has 2 fields; write it as id:algorithm:key"),
        (f"h:HS256:{as_text(SECRET)}:", "key 1 has 4 fields"),
        (f"{SETTING},x", "key 3 has 1 fields"),
        (f":HS256:{as_text(SECRET)}", "key 1: the id before"),
        (f"a b:HS256:{as_text(SECRET)}", "key 1: the id before"),
        (f"{'x' * 65}:HS256:{as_text(SECRET)}", "key 1: the id before"),
        (f"h:HS256:{as_text(SECRET)},h:HS256:{as_text(OTHER_SECRET)}", "key 2 has the id of another"),
        (f"h:{as_text(SECRET)}:HS256", "must be HS256 or EdDSA"),
        (f"h:none:{as_text(SECRET)}", "must be HS256 or EdDSA"),
        (f"h:RS256:{as_text(SECRET)}", "must be HS256 or EdDSA"),
        (f"h:hs256:{as_text(SECRET)}", "must be HS256 or EdDSA"),
        (f"h:HS256:{as_text(SECRET[:31])}", "at least 32 bytes, it has 31"),
        ("h:HS256:", "at least 32 bytes, it has 0"),
        (f"h:HS256:{as_text(SECRET)}!", "is not base64"),
        (f"h:HS256:é{as_text(SECRET)}", "is not base64"),
        ("h:HS256:a", "is not base64"),
        (f"h:HS256:{as_text(PUBLIC_PEM)}", "PEM, SSH or JWK"),
        (f"e:EdDSA:{as_text(PUBLIC_BYTES[:31])}", "has 32 bytes, this has 31"),
        (
            f"e:EdDSA:{as_text(PUBLIC.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))}",
            "this has 44; give it without its frame",
        ),
    ],
)
def test_unreadable_keys_are_refused_with_the_name_of_the_setting(setting: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as raised:
        TicketKeys.from_text(setting)
    assert "GRAB_TICKET_KEYS" in str(raised.value)
    assert as_text(SECRET)[:20] not in str(raised.value)


def test_signing_with_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 32 bytes, it has 31"):
        sign("h", SECRET[:31], user=USER, offer=OFFER, expires_at_ms=1_000)


def test_ticket_keys_are_read_from_the_setting_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRAB_TICKET_KEYS", raising=False)
    assert ticket_keys(Settings(_env_file=None)).read(token_of(), USER, OFFER) is None  # type: ignore[call-arg]
    monkeypatch.setenv("GRAB_TICKET_KEYS", SETTING)
    settings = load_settings()
    assert ticket_keys(settings).read(token_of(), USER, OFFER) == GOOD
    assert as_text(SECRET) not in f"{settings!r} {settings.model_dump()} {settings.model_dump_json()}"
    monkeypatch.setenv("GRAB_TICKET_KEYS", f"{SETTING},h:HS256:{as_text(OTHER_SECRET)}")
    with pytest.raises(BadSettings, match="GRAB_TICKET_KEYS: .*give the new key a different id") as raised:
        load_settings()
    assert as_text(SECRET) not in str(raised.value)


def test_keys_may_be_given_as_objects() -> None:
    keys: dict[str, bytes | Ed25519PublicKey] = {"h": SECRET, "e": PUBLIC}
    assert TicketKeys(keys).read(token_of(key=PRIVATE, algorithm="EdDSA", kid="e"), USER, OFFER) == GOOD
