"""Key names: no two things share a key, whatever their ids are.

The first tests draw legal ids and compare names only. The others use a real Redis and offers whose ids look
like subkeys of other offers; each scene ends with a comparison of its state with the rules and with a
recovery from its events.
"""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from grabstream.lua.keys import CAMPAIGN_KEYS, OFFER_KEYS, KeySpace, ShardKeys
from grabstream.models.commands import Close, Grab, Load
from grabstream.models.identifiers import campaign_of, is_id
from grabstream.models.offers import EnvelopeTerms
from tests.lua.histories.scene import DAY, HOUR, coupon, stock
from tests.support.shards import NOW

SHARD_NAMES = (
    "shard", "outbox", "refusals", "refusal_order", "demand", "due", "offers", "holds", "campaigns",
    "retired",
    "past", "cleaning", "lease", "journaled", "staged", "present",
)  # fmt: skip
WORDS = (*OFFER_KEYS, *CAMPAIGN_KEYS, *SHARD_NAMES, "offer", "campaign", "x", "y", "", ".", "-", "_")
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:-"

#: Ids that look like key names, ids that are prefixes of each other, ids of the greatest length, and random
#: ids.
ids = st.one_of(
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=5).map(":".join).filter(is_id),
    st.text(ALPHABET, min_size=1, max_size=64),
    st.text(":x", min_size=1, max_size=6),
    st.text(ALPHABET, min_size=64, max_size=64),
)


def names_of(keys: ShardKeys, offers: list[str]) -> list[str]:
    """All key names of a shard with these offers, including the keys of the shard itself."""
    of_shard = [
        *keys.deciding(),
        keys.lease,
        keys.present,
        keys.channel,
        *(keys.staged(token) for token in ("0", "00", "0" * 32)),
    ]
    of_its_offers = [name for offer in set(offers) for name in keys.offer_keys(offer)]
    campaigns = {campaign_of(offer) for offer in offers}
    of_its_campaigns = [name for campaign in campaigns for name in keys.campaign_keys(campaign)]
    return of_shard + of_its_offers + of_its_campaigns


@given(st.lists(ids, min_size=1, max_size=12), st.integers(0, 64))
def test_key_names_of_a_shard_are_distinct(offers: list[str], shard: int) -> None:
    related = [f"{offer}:{word}"[:64] for offer in offers[:3] for word in WORDS]
    names = names_of(ShardKeys("p", shard), offers + related)
    assert len(set(names)) == len(names)


@given(ids, ids, st.sampled_from(OFFER_KEYS), st.sampled_from(CAMPAIGN_KEYS))
def test_offer_and_part_can_be_read_from_a_key_name(
    offer: str, campaign: str, part: str, of_campaign: str
) -> None:
    """The id and the part can be read from the name, so two different pairs cannot have the same name."""
    keys, campaign = ShardKeys("p", 3), campaign_of(campaign)
    name = keys.offer_keys(offer)[OFFER_KEYS.index(part)].removeprefix(f"{keys.tag}:offer:")
    assert (name.partition("/")[0], name.partition("/")[2] or "state") == (offer, part)
    name = keys.campaign_keys(campaign)[CAMPAIGN_KEYS.index(of_campaign)].removeprefix(
        f"{keys.tag}:campaign:"
    )
    assert name.split("/") == [campaign, of_campaign]


@given(st.from_regex(r"[a-z0-9][a-z0-9._-]{0,47}", fullmatch=True), st.integers(0, 20), st.integers(0, 20))
def test_key_tags_of_shards_and_systems_are_distinct(prefix: str, shard: int, other_shard: int) -> None:
    longer = f"{prefix}-s{shard}"
    names = [
        KeySpace(system, 64).shard(number).tag
        for system in {prefix, longer}
        for number in {shard, other_shard}
    ]
    assert len(set(names)) == len(names)
    assert not any(name.startswith(f"{before}:") for name in names for before in names if name != before)


def envelope(parts: int = 10) -> EnvelopeTerms:
    return EnvelopeTerms(
        closes_at=NOW + 30 * DAY,
        issuer="alice",
        funding="pay",
        asset="CNY",
        total=parts * 100,
        parts=parts,
        seed="ab" * 16,
    )


async def test_offers_whose_ids_look_like_subkeys_do_not_share_keys(scene: Any) -> None:
    """For every part of the keys of `x` there is an offer `x:<part>`. All are used, two of them retire, and
    the other offers stay whole.
    """
    others = [f"x:{part}" for part in OFFER_KEYS]
    await scene.open(envelope(10), "x")
    for other in others:
        await scene.open(envelope(3) if other in ("x:parts", "x:users") else stock(hold_ms=HOUR), other)
    for user in ("state", "paused", "units_left"):
        for offer in ("x", *others):
            assert (await scene.do(Grab, offer=offer, user=user)).positive
    scene.now += 8 * DAY
    await scene.sweep_both()
    assert {offer for state in scene.states for offer in state.retired} == {"x:parts", "x:users"}
    assert (await scene.do(Grab, offer="x", user="state")).outcome == "already_taken"


async def test_closing_an_offer_keeps_the_parts_of_another_offer(scene: Any) -> None:
    await scene.open(envelope(10), "x:parts")
    await scene.open(envelope(10), "x")
    assert (await scene.do(Grab, offer="x", user="u")).outcome == "granted"
    assert (await scene.do(Close, offer="x")).outcome == "closed"
    answers = [await scene.do(Grab, offer="x:parts", user=f"u{number}") for number in range(10)]
    assert {answer.outcome for answer in answers} == {"granted"}
    assert sum(answer.amount or 0 for answer in answers) == 1_000


async def test_codes_do_not_share_keys_with_an_offer_named_like_them(scene: Any) -> None:
    await scene.open(stock(), "y:codes")
    await scene.open(coupon(2, codes=True), "y")
    loaded = await scene.do(Load, offer="y", what="codes", chunk=1, chunks=1, items=("A-1", "A-2"))
    assert loaded.outcome == "loaded"
    assert (await scene.do(Grab, offer="y", user="state")).coupon_code == "A-1"
    assert (await scene.do(Grab, offer="y:codes", user="state")).outcome == "granted"


async def test_offers_with_reserved_names_do_not_share_keys(scene: Any) -> None:
    for name in ("shard", "outbox", "answers", "campaign:answers", "offer:state", ":", ":x", "::"):
        await scene.open(stock(), name)
        assert (await scene.do(Grab, offer=name, user="offer")).outcome == "granted"
