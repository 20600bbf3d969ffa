"""Sealing: a sealed text opens only with its key, unchanged, and for the shard, offer and purpose it was
sealed for.
"""

from base64 import b64decode, b64encode, urlsafe_b64encode
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grabstream.crypto.sealing import NONCE_BYTES, CannotOpen, Sealer
from grabstream.gate.gate import Gate
from grabstream.lua.keys import KeySpace
from grabstream.models.commands import Close
from tests.lua.histories.recovered import contents, fold
from tests.support.shards import event_lines, grabs, opening, take_over

OLD, NEW = bytes(range(32)), bytes(range(1, 33))
SEED = "5eed" * 16


def as_text(key: bytes) -> str:
    return urlsafe_b64encode(key).decode()


def changed(sealed: str, index: int, bit: int) -> str:
    """The sealed text with one bit of its nonce, ciphertext or tag inverted."""
    key_id, _, body = sealed.partition(":")
    raw = bytearray(b64decode(body))
    raw[index % len(raw)] ^= 1 << bit
    return f"{key_id}:{b64encode(raw).decode()}"


@given(
    shard=st.integers(0, 1_000), offer=st.from_regex(r"[A-Za-z0-9._:-]{1,64}", fullmatch=True), text=st.text()
)
def test_a_sealed_text_opens(shard: int, offer: str, text: str) -> None:
    sealer = Sealer({"k": OLD})
    assert sealer.open(shard, offer, "seed", sealer.seal(shard, offer, "seed", text)) == text


def test_a_sealed_text_hides_the_text_and_is_different_each_time() -> None:
    sealer = Sealer({"k": OLD})
    sealed = {sealer.seal(0, "e", "seed", SEED) for _ in range(1_000)}
    nonces = {b64decode(text.partition(":")[2])[:NONCE_BYTES] for text in sealed}
    assert len(sealed) == len(nonces) == 1_000
    assert not any(SEED.encode() in b64decode(text.partition(":")[2]) for text in sealed)


def test_sealed_texts_need_no_escaping_in_json() -> None:
    sealed = Sealer({"2025-q1": OLD}).seal(0, "e", "seed", 'quote " backslash \\ newline \n')
    assert not set(sealed) & set('"\\\n')


@pytest.mark.parametrize(
    ("shard", "offer", "purpose"), [(1, "e", "seed"), (0, "f", "seed"), (0, "e", "code"), (0, "e|seed", "")]
)
def test_a_sealed_text_does_not_open_elsewhere(shard: int, offer: str, purpose: str) -> None:
    sealer = Sealer({"k": OLD})
    with pytest.raises(CannotOpen, match="sealed with another key, changed, or moved here"):
        sealer.open(shard, offer, purpose, sealer.seal(0, "e", "seed", SEED))


@given(index=st.integers(0, 200), bit=st.integers(0, 7))
def test_a_sealed_text_with_a_changed_bit_does_not_open(index: int, bit: int) -> None:
    sealer = Sealer({"k": OLD})
    with pytest.raises(CannotOpen):
        sealer.open(0, "e", "seed", changed(sealer.seal(0, "e", "seed", SEED), index, bit))


def test_the_first_key_seals_and_any_key_opens() -> None:
    """A key is rotated by writing the new key before the old key in the setting."""
    old = Sealer.from_text(f"old:{as_text(OLD)}")
    both = Sealer.from_text(f"new:{as_text(NEW)}, old:{as_text(OLD)}")
    assert both.open(0, "e", "seed", old.seal(0, "e", "seed", SEED)) == SEED
    assert both.seal(0, "e", "seed", SEED).startswith("new:")
    with pytest.raises(CannotOpen, match="no key 'new' in GRAB_SEAL_KEYS"):
        old.open(0, "e", "seed", both.seal(0, "e", "seed", SEED))


def test_another_key_under_the_same_id_does_not_open() -> None:
    with pytest.raises(CannotOpen, match="another key"):
        Sealer({"k": NEW}).open(0, "e", "seed", Sealer({"k": OLD}).seal(0, "e", "seed", SEED))


@pytest.mark.parametrize(
    "sealed", ["", "k", "k:", "k:AAAA", "k:====", "k:not base64", "k:é", "k:" + "A" * 16]
)
def test_a_malformed_sealed_text_does_not_open(sealed: str) -> None:
    with pytest.raises(CannotOpen):
        Sealer({"k": OLD}).open(0, "e", "seed", sealed)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "at least one"),
        (" , ", "at least one"),
        ("k:" + as_text(OLD[:31]), "must have 32 bytes, it has 31"),
        ("k:" + as_text(OLD + b"x"), "must have 32 bytes, it has 33"),
        (as_text(OLD), "write it as id:key"),
        ("k:a", "base64url"),
        ("k:é", "base64url"),
        ("k:" + as_text(OLD)[:-1] + "!", "base64url"),
        (":" + as_text(OLD), "the id before ':'"),
        ('q":' + as_text(OLD), "the id before ':'"),
        (f"k:{as_text(OLD)},k:{as_text(NEW)}", "key 2 has the id of another"),
        (f"a:{as_text(NEW)},{as_text(OLD)}:k", "key 2: the id before ':'"),
        (f"{as_text(OLD)[:-1]}:k", "key 1 is not base64url"),
        (f"a:{as_text(NEW)}," + 100_000 * "x" + ":k", "key 2: the id before ':'"),
    ],
)
def test_unreadable_keys_are_refused_with_the_name_of_the_setting(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as raised:
        Sealer.from_text(text)
    assert "GRAB_SEAL_KEYS" in str(raised.value)
    assert as_text(OLD)[:20] not in str(raised.value)
    assert len(str(raised.value)) < 200


def test_a_key_may_be_written_without_padding() -> None:
    sealed = Sealer({"k": OLD}).seal(0, "e", "seed", SEED)
    assert Sealer.from_text("k:" + as_text(OLD).rstrip("=")).open(0, "e", "seed", sealed) == SEED


# -- keys that were removed ----------------------------------------------------------------------------------


@pytest.mark.parametrize("draw", ["ahead", "at_grab"])
@pytest.mark.parametrize("end", ["drained", "closed", "open"])
async def test_a_shard_is_rebuilt_without_the_seal_key_of_closed_envelopes(
    client: Any, keys: KeySpace, draw: str, end: str
) -> None:
    """The journal has the seeds of closed envelopes in clear. For an open envelope the rebuild stops, and
    names the key.
    """
    await take_over(client, keys)
    both = Sealer({"old": OLD, "new": NEW})
    gate = Gate(client, keys, both)
    number = keys.shard_of_offer("e")
    await gate.decide([opening("e", 5, draw=draw), *grabs(5 if end == "drained" else 3)], "decided")
    if end == "closed":
        await gate.decide([Close(id="c", offer="e")], "decided")
    await gate.close()
    lines = await event_lines(client, keys, number)
    rebuilt = []
    for name, sealer in (("both", both), ("new", Sealer({"new": NEW}))):
        space = KeySpace(f"{keys.prefix}-{name}", keys.shards)
        shard = space.shard(number)
        try:
            if end == "open" and name == "new":
                with pytest.raises(CannotOpen, match="no key 'old' in GRAB_SEAL_KEYS"):
                    await fold(client, shard, lines, sealer, keys.shards)
                assert await client.hget(shard.state, "seq") == b"0"
            else:
                await fold(client, shard, lines, sealer, keys.shards)
                rebuilt.append(await contents(client, shard))
        finally:
            async for key in client.scan_iter(match=f"{space.prefix}:*"):
                await client.delete(key)
    assert rebuilt[0] == rebuilt[-1]
