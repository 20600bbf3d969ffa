"""Ids, commands, answers, transfers: one line for each case."""

import json
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from grabstream.models.answers import Answer, encode_answer
from grabstream.models.commands import (
    Adjust,
    Amend,
    AnyCommand,
    Confirm,
    Grab,
    Load,
    Open,
    Return,
    Undecodable,
    check,
    decode_command,
    decode_commands,
    encode_command,
)  # fmt: skip
from grabstream.models.digests import Digests
from grabstream.models.events import AnyEvent, decode_event
from grabstream.models.identifiers import are_ids, campaign_of, is_id, shard_of
from grabstream.models.money import Invalid
from grabstream.models.offers import (
    Changes,
    CouponTerms,
    EnvelopeTerms,
    Hours,
    Limit,
    StockTerms,
    changes_of,
    terms_of,
)
from grabstream.models.outcomes import OUTCOME_NAMES, Outcome
from grabstream.models.transfers import transfers_of

ENVELOPE = {"kind": "envelope", "issuer": "a", "funding": "f", "asset": "CNY", "total": 100, "parts": 10}
STOCK_AT_0 = {"kind": "stock", "issuer": "a", "total": 1, "opens_at": 0, "closes_at": 0}


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("a", True), ("A.z_0:9-", True), ("x" * 64, True), ("", False), ("x" * 65, False), ("a b", False),
        ("a\n", False),
        ("é", False), ("a{b}", False), ("a/b", False), ("a\0", False), ('"', False),
    ],
)  # fmt: skip
def test_is_id_accepts_only_ids(text: str, good: bool) -> None:
    assert is_id(text) is good
    assert are_ids(["ok", text]) is good


# These values must not change: other programs compute the shard themselves.
@pytest.mark.parametrize(
    ("offer", "campaign", "shard"), [("e1", "e1", 7), ("spring:a", "spring", 1), ("spring:b", "spring", 1)]
)
def test_campaign_and_shard_of_an_offer(offer: str, campaign: str, shard: int) -> None:
    assert campaign_of(offer) == campaign
    assert shard_of(campaign, 8) == shard


def opening(**changes: object) -> dict[str, object]:
    return {"type": "open", "id": "i", "offer": "o", "terms": {**ENVELOPE, **changes}}


def grabbing(**changes: object) -> dict[str, object]:
    return {"type": "grab", "id": "i", "offer": "o", "user": "u", **changes}


@pytest.mark.parametrize(
    ("command", "word"),
    [
        (grabbing(usr="x"), "usr"), (grabbing(user="a b"), "user"), (grabbing(user=5), "user"),
        (grabbing(id="x" * 65), "id"),
        (grabbing(offer="é"), "offer"), (grabbing(quantity=0), "quantity"),
        (grabbing(quantity=1.5), "quantity"), (grabbing(quantity=True), "quantity"),
        (grabbing(quantity="1e3"), "quantity"),
        (grabbing(quantity=10**13 + 1), "quantity"), (grabbing(attributes={"a b": "c"}), "attributes"),
        (grabbing(attributes={f"a{n}": "c" for n in range(9)}), "attributes"),
        ({"type": "grab", "id": "i", "offer": "o"}, "user"),
        ({"type": "steal", "id": "i", "offer": "o"}, "steal"), ({"id": "i"}, "type"),
        (opening(total=0), "total"), (opening(total=9), "total"), (opening(total=10**13 + 1), "total"),
        (opening(total=1.0e2), "total"),
        (opening(parts=0), "parts"), (opening(parts=2_000_000), "parts"), (opening(min=0), "min"),
        (opening(max=20), "max"),
        (opening(law="bounded", max=5), "total"), (opening(law="fair"), "law"),
        (opening(draw="later"), "draw"),
        (opening(asset="cny"), "asset"), (opening(issuer=""), "issuer"), (opening(funding="a b"), "funding"),
        (opening(seed="AB" * 16), "seed"), (opening(seed="ab" * 15), "seed"),
        (opening(kind="voucher"), "kind"),
        (opening(opens_at=10, closes_at=10), "closes_at"), (opening(title="x" * 201), "title"),
        # 0 is a time, and not absent: it must not reach a script, where it would be.
        (opening(closes_at=0), "terms.closes_at: must be after opens_at (at once), got 0"),
        (opening() | {"terms": STOCK_AT_0}, "terms.closes_at: must be after opens_at (at once), got 0"),
        (opening(colour="red"), "colour"),
        (opening(title="a\0b"), "title"), (opening(title="two\nlines"), "title"),
        (opening(title="\x85"), "title"),
        (grabbing(quantity=1e0), "quantity"),
        (grabbing(quantity=10**30), "quantity"),
        (grabbing(attributes={"a": 1}), "attributes"),
        (grabbing(metadata={f"n{n}": "" for n in range(17)}), "metadata: at most 16 pairs, got 17"),
        (grabbing(metadata={"a b": "c"}), "metadata: names must match"),
        (grabbing(metadata={"a": "\0"}), "metadata: a: must be one line"),
        *((grabbing(metadata={"a": f"x{chr(code)}y"}), "metadata: a: must be one line")
          for code in (0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))),
        (grabbing(metadata={"a": "x" * 1_025}), "metadata: a: at most 1024 characters, got 1025"),
        (grabbing(metadata={"a": "x" * 1_017}), "metadata: has at most 1024 bytes as JSON"),
        (grabbing(metadata={"a": "é" * 509}), "metadata: has at most 1024 bytes as JSON"),
        (grabbing(metadata={"a": '"' * 509}), "metadata: has at most 1024 bytes as JSON"),
        (grabbing(metadata={"a": 1}), "metadata"), (grabbing(metadata=["a"]), "metadata"),
    ],
)  # fmt: skip
def test_refusal_of_a_bad_command_names_the_field(command: object, word: str) -> None:
    [bad] = decode_commands(json.dumps(command).encode())
    assert isinstance(bad, Undecodable)
    assert word in bad.reason
    assert bad.raw == json.dumps(command).encode()


@pytest.mark.parametrize("title", ["", "春节红包 🧧", "👩‍👩‍👧 family", 'a "b" \\ </script>', "שלום\u200f!"])
def test_title_may_be_any_text_of_one_line(title: str) -> None:
    [command] = decode_commands(json.dumps(opening(title=title)).encode())
    assert isinstance(command, Open)
    assert command.terms.title == title


def test_offer_may_open_at_0_and_close_at_1() -> None:
    check(Open(id="i", offer="o", terms=StockTerms(issuer="a", total=1, opens_at=0, closes_at=1)))


def test_title_with_a_single_surrogate_is_refused_in_python() -> None:
    """A single surrogate cannot be encoded: the call would fail, with commands of other callers."""
    with pytest.raises(Invalid, match="title"):
        check(
            Open(
                id="i",
                offer="o",
                terms=EnvelopeTerms(issuer="a", funding="f", asset="CNY", total=9, parts=1, title="\ud800"),
            )
        )


PIECES: dict[str, Any] = {"issuer": "a", "total": 9, "hold_ms": 9}


@pytest.mark.parametrize(
    ("command", "word"),
    [
        (Open(id="i", offer="o", terms=StockTerms(**PIECES, waiting_list="no")), "waiting_list"),
        (Open(id="i", offer="o", terms=StockTerms(**PIECES, return_restores=1)), "return_restores"),
        (Open(id="i", offer="o", terms=CouponTerms(**PIECES, codes="yes")), "codes"),
        (Open(id="i", offer="o", terms=StockTerms(**PIECES, opens_at="now")), "opens_at"),
        (Open(id="i", offer="o", terms=StockTerms(**PIECES, title=7)), "open"),
        (Open(id="i", offer="o", terms=StockTerms(**PIECES, hours=({"from": "10:00"},))), "open"),
        (Open(id="i", offer="o", terms=StockTerms(**PIECES, limits=("user",))), "open"),
        (Open(id="i", offer="o", terms={"kind": "stock"}), "open"),
        (Amend(id="i", offer="o", changes=Changes(return_restores="yes")), "return_restores"),
        (Amend(id="i", offer="o", changes=Changes(late="never")), "late"),
        (Amend(id="i", offer="o", changes=Changes(title=None)), "amend"),
        (Amend(id="i", offer="o", changes={"title": "t"}), "amend"),
        (Grab(id="i", offer="o", user="u", wait="no"), "wait"),
        (Grab(id="i", offer="o", user=7), "user"),
        (Grab(id="i", offer="o", user="u", attributes={"card": 7}), "attributes"),
        (Grab(id="i", offer="o", user="u", metadata={"card": 7}), "grab"),
        (Grab(id="i", offer="o", user="u", metadata={7: "card"}), "grab"),
        (Grab(id="i", offer="o", user="u", metadata="card"), "grab"),
        (Grab(id="i", offer="o", user="u", metadata={"a": "\ud800"}), "metadata"),
        (Grab(id="i", offer="o", user="u", ticket=7), "grab"),
        (Grab(id="i", offer=None, user="u"), "offer"),
        (Confirm(id="i", offer="o", grab="g", payment="p", paid="7", currency="CNY"), "paid"),
        (Confirm(id="i", offer="o", grab=7), "grab"),
        (Return(id="i", offer="o", grab="g", reason=7), "return"),
        (Adjust(id="i", offer="o", transfers=("all",), reason="r", approved_by="b"), "adjust"),
        (Load(id="i", offer="o", what="codes", chunk=1, chunks=1, items=(7,)), "load"),
    ],
)  # fmt: skip
def test_refusal_of_a_command_with_a_wrong_type_names_the_field(command: AnyCommand, word: str) -> None:
    """What no reader of its event would understand must not be decided."""
    with pytest.raises(Invalid, match=word):
        check(command)


@pytest.mark.parametrize("code", [" SAVE-10", "SAVE-10 ", "SAVE-10\N{NO-BREAK SPACE}"])
def test_code_with_a_blank_at_its_end_is_refused_and_not_repeated(code: str) -> None:
    load = Load(id="i", offer="o", what="codes", chunk=1, chunks=1, items=("SAVE 10", code))
    with pytest.raises(Invalid, match="items: a code begins or ends with a blank") as refused:
        check(load)
    assert "SAVE" not in str(refused.value)


def test_terms_and_changes_of_events_ignore_unknown_fields_and_bounds() -> None:
    """As the schemas promise: a newer program may add fields, and bounds may have been others."""
    limit = {"by": "user", "per": "day", "max": 10**15, "colour": "red"}
    terms = {"kind": "stock", "issuer": "a", "total": 9, "max_per_grab": 10**15, "limits": [limit],
        "colour": "red",
             "hours": [{"weekdays": ["mon"], "from": "10:00", "colour": "red"}]}  # fmt: skip
    hours = (Hours(weekdays=("mon",), from_="10:00"),)
    expected = StockTerms(
        issuer="a", total=9, max_per_grab=10**15, limits=(Limit("user", "day", 10**15),), hours=hours
    )
    assert terms_of(json.dumps(terms).encode()) == expected
    assert changes_of(json.dumps({"title": "t", "limits": [limit], "colour": "red"}).encode()) == Changes(
        title="t", limits=expected.limits
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7",
        "[]",
        "{}",
        '{"kind":"lottery"}',
        '{"kind":"stock"}',
        '{"kind":"stock","issuer":"a","total":9,"limits":7}',
    ],
)
def test_invalid_terms_of_an_event_raise_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="kind|JSON|StockTerms"):
        terms_of(text.encode())


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"nonsense",
        b"\x00\xff",
        b"[1,",
        b"[" * 5_000,
        b'{"a":' * 5_000,
        b"17",
        b"\xef\xbb\xbf{}",
    ],
)
def test_undecodable_input_keeps_its_bytes(raw: bytes) -> None:
    for bad in decode_commands(raw):
        assert isinstance(bad, Undecodable)
        assert bad.raw == raw
        assert bad.id is None


def test_bad_element_does_not_affect_the_others() -> None:
    good = grabbing()
    decoded = decode_commands(json.dumps([good, {"type": "grab", "id": "b", "offer": "o"}, 7, good]).encode())
    assert [type(command).__name__ for command in decoded] == ["Grab", "Undecodable", "Undecodable", "Grab"]
    assert (decoded[1].id, decoded[1].offer, decoded[2].raw) == ("b", "o", b"7")


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        (b'{"type":"grab","id":"i","offer":"o","user":"u","user":"v"}', "user"),
        (b'{"type":"grab","id":"i","offer":"o","user":"u","us\\u0065r":"v"}', "user"),
        (
            b'{ "type" : "grab", "id": "i", "offer": "o", "quantity": 1, "user": "u", "quantity": 2 }',
            "quantity",
        ),
        (b'{"type":"grab","id":"i","offer":"o","user":"u","attributes":{"card":"1","card":"2"}}', "card"),
        (b'{"type":"grab","id":"i","offer":"o","user":"u","metadata":{"a":"1","\\u0061":"1"}}', "a"),
        (b'{"type":"grab","id":"j","id":"i","offer":"o","user":"u"}', "id"),
        (
            json.dumps(opening(title='"""'))
            .replace('"parts"', '"title": "t", "parts"')
            .encode()
            .replace(b'\\"\\"\\"', b"\\u0022" * 3),
            "title",
        ),
    ],
)
def test_command_with_a_repeated_name_is_refused(raw: bytes, name: str) -> None:
    """The decoder uses the last value, other decoders the first: two readers of the topic would read two
    commands.
    """
    [bad] = decode_commands(raw)
    assert isinstance(bad, Undecodable)
    assert f"'{name}': is named twice" in bad.reason
    assert bad.id == "i"


remembered = Digests().remembered


def test_equal_commands_have_equal_digests() -> None:
    one = decode_command(b'{"type":"grab","id":"i","offer":"o","user":"u"}')
    same = decode_command(
        b'{ "quantity": 1, "user": "u", "offer": "o", "id": "i", "type": "grab", "attributes": {} }'
    )
    other = Grab(id="i", offer="o", user="v")
    assert remembered(one) == remembered(same) != remembered(other)
    assert decode_command(encode_command(one)) == one
    ordered: list[AnyCommand] = [
        Grab(id="i", offer="o", user="u", attributes=a) for a in ({"a": "1", "b": "2"}, {"b": "2", "a": "1"})
    ]
    assert remembered(ordered[0]) == remembered(ordered[1])


def test_answer_omits_fields_that_do_not_apply() -> None:
    assert json.loads(encode_answer(Answer("i", "sold_out", 32, "o"))) == {
        "id": "i",
        "outcome": "sold_out",
        "code": 32,
        "offer": "o",
    }


def test_outcomes_keep_their_numbers() -> None:
    assert OUTCOME_NAMES[0] == "granted"
    assert [OUTCOME_NAMES[code] for code in range(20, 37)] == [
        "invalid", "fenced", "busy", "conflict", "no_such_offer", "no_such_grab", "already_taken",
        "not_open_yet", "on_hold", "over",
        "not_eligible", "limit_reached", "sold_out", "not_enough_left", "expired", "not_held",
        "not_redeemable",
    ]  # fmt: skip
    assert not Outcome.invalid.positive
    assert Outcome.waiting.positive


HEAD = '"v":1,"shard":1,"seq":2,"offer_seq":1,"offer":"o","at":5,"command":"c"'
OPENED = (
    f'{{"type":"offer.opened",{HEAD},"kind":"envelope","issuer":"a","funding":"f","asset":"CNY","total":100,'
    '"opens_at":1,'
    '"closes_at":9,"terms":{"parts":3},"digest":"d"}'
)
GRANTED = (
    f'{{"type":"grab.granted",{HEAD},"grab":"c","user":"u","quantity":1,"amount":40,"asset":"CNY",'
    f'"place":1,"left":2,"digest":"d","new":1}}'
)
DRAINED = (
    f'{{"type":"offer.closed",{HEAD},"reason":"drained","asset":"CNY","amount":0,"left":0,"refund_'
    f'to":"wallet:a"}}'
)
PAUSED = f'{{"type":"offer.paused",{HEAD},"digest":"d"}}'


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (OPENED, [("CNY", "external:f", "offer:o", 100)]),
        (GRANTED, [("CNY", "offer:o", "wallet:u", 40)]),
        (DRAINED, []),
        (PAUSED, []),
    ],
)
def test_transfers_of_events(line: str, expected: list[tuple[str, str, str, int]]) -> None:
    event: AnyEvent = decode_event(line.encode())
    assert list(transfers_of(event)) == expected


_NAMES = st.one_of(
    *[st.sampled_from(["a", "b:1", "x" * 64])] * 6,
    st.sampled_from(
        ["", "sweep", "x" * 65, "a/b", 'a"b', "é", "a\n", "\ud800", "\udc00\ud83d", "😀", "\\ud800"]
    ),
    st.text(),
)
_EXTRAS = st.sampled_from(
    [
        "", ',"quantity":1', ',"quantity":2', ',"quantity":true', ',"wait":true', ',"basket":"b"',
        ',"attributes":{}', ',"attributes":{"a":"b"}', ',"metadata":{}',
        ',"metadata":{"a":"b"}', ',"user":"twice"', ',"id":"twice"', ',"unknown":1',
        ',"quantity":1,"quantity":1', ',"us\\u0065r":"twice"', ',"type":"grab"',
    ]
)  # fmt: skip


@st.composite
def _element(draw: st.DrawFn) -> str:
    id_, offer, user = (json.dumps(draw(_NAMES)) for _ in range(3))
    kind = draw(st.sampled_from(["grab"] * 8 + ["pause", "gra\\u0062", "none"]))
    tag = draw(st.sampled_from([f'"type":"{kind}",'] * 9 + [""]))
    extras = draw(_EXTRAS) + draw(st.sampled_from([""] * 9 + [',"attributes":{},"wait":false']))
    text = f'{{{tag}"id":{id_},"offer":{offer},"user":{user}{extras}}}'
    return draw(st.sampled_from([text] * 20 + ["{}", "[]", "1", '"', text[:-1]]))


@given(
    st.lists(st.one_of(st.just('{"type":"grab","id":"i","offer":"o","user":"u"}'), _element()), max_size=6)
)
def test_commands_of_an_array_are_those_of_its_elements_alone(elements: list[str]) -> None:
    """Arrays of plain grabs are decoded together, with the same result."""
    value = f"[{','.join(elements)}]".encode(errors="surrogatepass")

    def said(command: Any) -> Any:
        return (
            (command.raw, command.id, command.offer, command.reason)
            if isinstance(command, Undecodable)
            else command
        )

    try:
        count = len(json.loads(value))
    except ValueError:
        assert [type(one) for one in decode_commands(value)] == [Undecodable]
        return
    # Two elements that are a quote each are one text in the array.
    assume(count == len(elements))
    alone = [decode_commands(element.encode(errors="surrogatepass")) for element in elements]
    if any(element.startswith("[") for element in elements):
        return
    assert [said(one) for one in decode_commands(value)] == [said(one) for [one] in alone]
