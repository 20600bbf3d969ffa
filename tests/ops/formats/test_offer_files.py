"""Files of offers: what people may write, what is refused and where, and that the three forms mean the
same.
"""

import csv
import io
import json
import time
import tracemalloc
from typing import Any, get_args

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from grabstream.models.bounds import REASON_BYTES_MAX
from grabstream.models.commands import Open
from grabstream.models.identifiers import is_id
from grabstream.models.offers import LINE_PATTERN, CouponTerms, EnvelopeTerms, Hours, Limit, StockTerms, Terms
from grabstream.ops.formats.offer_files import BadOfferFile, Form, form_of, read_offers
from grabstream.ops.formats.offer_plan import PLAN_COLUMNS, plan_rows
from tests.conftest import some_by_tier

FORMS = get_args(Form)
COUPON = {"kind": "coupon", "issuer": "shop", "total": 5}
ENVELOPE = {"kind": "envelope", "issuer": "i", "funding": "f", "asset": "CNY", "total": 10, "parts": 2}
#: 2026-11-27T10:00:00+08:00
FRIDAY = 1_795_744_800_000
HEADER = "offer,kind,issuer,total"


def one(**terms: Any) -> str:
    """A file with one coupon, as JSON."""
    return json.dumps([{"offer": "a", "terms": COUPON | terms}])


def read_one(**terms: Any) -> Any:
    [command] = read_offers(one(**terms), "json")
    return command.terms


def problems_of(text: str, form: Form) -> list[tuple[str, str]]:
    with pytest.raises(BadOfferFile) as caught:
        read_offers(text, form)
    assert str(caught.value) == "\n".join(f"{place}: {reason}" for place, reason in caught.value.problems)
    return caught.value.problems


def refused(text: str, form: Form, *expected: tuple[str, ...]) -> None:
    """The file has exactly these problems: for each its place, and words of its reason."""
    problems = problems_of(text, form)
    assert [place for place, _ in problems] == [place for place, *_ in expected], problems
    for (_, reason), (_, *words) in zip(problems, expected, strict=True):
        for word in words:
            assert word in reason, reason


# -- what may be written -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "chosen", "form"),
    [
        ("a.yaml", None, "yaml"), ("a.yml", None, "yaml"), ("a.JSON", None, "json"), ("b/a.csv", None, "csv"),
        ("-", None, "yaml"),
        ("/dev/fd/63", None, "yaml"), ("-", "csv", "csv"), ("a.yaml", "json", "json"),
        ("a.txt", "csv", "csv"),
    ],
)  # fmt: skip
def test_form_follows_from_the_suffix(file: str, chosen: Form | None, form: Form) -> None:
    assert form_of(file, chosen) == form


def test_unknown_suffix_is_refused() -> None:
    with pytest.raises(BadOfferFile, match=r"\.xlsx.*--format"):
        form_of("offers.xlsx")


@pytest.mark.parametrize(
    ("text", "form", "id"),
    [
        (one(), "json", "open-a"),
        (one(), "yaml", "open-a"),
        (json.dumps({"offer": "a", "terms": COUPON}), "json", "open-a"),
        (json.dumps([{"type": "open", "id": "i", "offer": "a", "terms": COUPON}]), "json", "i"),
        ("- {offer: a, id: i, terms: {kind: coupon, issuer: shop, total: 5}}", "yaml", "i"),
        ("offer: a\nterms:\n  kind: coupon\n  issuer: shop\n  total: 5\n", "yaml", "open-a"),
        ("defaults: {kind: coupon, issuer: shop, total: 5}\noffers: [{offer: a}]", "yaml", "open-a"),
        ("defaults: {kind: coupon, issuer: shop, total: 9}\noffers: [{offer: a, terms: {total: 5}}]", "yaml",
        "open-a"),
        ("defaults:\noffers: [{offer: a, terms: {kind: coupon, issuer: shop, total: 5}}]", "yaml", "open-a"),
        ("- &x {offer: a, terms: &t {kind: coupon, issuer: shop, total: 5}}", "yaml", "open-a"),
        (f"{HEADER}\na,coupon,shop,5\n", "csv", "open-a"),
        (f"{HEADER},id,parts\r\na , coupon,shop,5,i,\r\n", "csv", "i"),
        (f"\n{HEADER},\n,,,,\na,coupon,shop,5,\n\n", "csv", "open-a"),
    ],
)  # fmt: skip
def test_different_spellings_are_the_same_command(text: str, form: Form, id: str) -> None:
    for beginning in ("", "\ufeff"):
        assert read_offers(beginning + text, form) == [
            Open(id=id, offer="a", terms=CouponTerms(issuer="shop", total=5))
        ]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("2026-11-27T10:00:00+08:00", FRIDAY), ("2026-11-27T02:00:00Z", FRIDAY),
        ("2026-11-27 10:00+08:00", FRIDAY),
        ("2026-11-27t02:00:00z", FRIDAY), ("2026-11-27 02:00:00.25 Z", FRIDAY + 250),
        ("2026-11-27T02:00:00.0015-00:00", FRIDAY + 1),
        ("2026-11-26T21:00:00-05:00", FRIDAY), (str(FRIDAY), FRIDAY),
    ],
)  # fmt: skip
def test_time_is_read_in_several_forms(text: str, wanted: int) -> None:
    """In each field: `test_every_field_in_milliseconds_accepts_times_and_durations`."""
    expected = [Open(id="open-a", offer="a", terms=CouponTerms(issuer="shop", total=5, closes_at=wanted))]
    assert read_offers(one(closes_at=text), "json") == expected
    assert read_offers(f"{HEADER},closes_at\na,coupon,shop,5,{text}", "csv") == expected
    # Without quotes, which the usual loader reads as a timestamp.
    terms = f"{{kind: coupon, issuer: shop, total: 5, closes_at: {text}}}"
    assert read_offers(f"- offer: a\n  terms: {terms}", "yaml") == expected


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("text", ["2026-11-27T10:00:00", "2026-11-27 10:00"])
def test_time_without_a_zone_is_refused_with_the_fix(form: Form, text: str) -> None:
    files = {
        "json": one(opens_at=text),
        "yaml": f"- offer: a\n  terms: {{kind: coupon, issuer: shop, total: 5, opens_at: {text}}}",
        "csv": f"{HEADER},opens_at\na,coupon,shop,5,{text}",
    }
    refused(
        files[form],
        form,
        ("line 2" if form == "csv" else "entry 1", "terms.opens_at", "has no zone; add one", f"{text}+08:00"),
    )


@pytest.mark.parametrize(
    "text",
    [
        "tomorrow",
        "2026-11-27",
        "2026-13-27T10:00:00Z",
        "2026-11-27T24:00:00Z",
        "2026-W48-5T10:00Z",
        "1e3",
        "",
        "٣",
    ],
)
def test_wrong_time_is_refused(text: str) -> None:
    refused(one(closes_at=text), "json", ("entry 1", "terms.closes_at", "2026-11-27T10:00:00+08:00"))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("250ms", 250),
        ("30s", 30_000),
        ("15m", 900_000),
        ("2h", 7_200_000),
        ("7d", 604_800_000),
        ("900000", 900_000),
    ],
)
def test_duration_is_read_in_several_units(text: str, wanted: int) -> None:
    terms = read_one(hold_ms=text, retire_after_ms=text, late="grace", grace_ms=text)
    assert (terms.hold_ms, terms.retire_after_ms, terms.grace_ms) == (wanted, wanted, wanted)


@pytest.mark.parametrize("text", ["15 min", "-1s", "1.5h", "h", "1h30m", ""])
def test_wrong_duration_is_refused(text: str) -> None:
    refused(one(hold_ms=text), "json", ("entry 1", "terms.hold_ms", "15m", repr(text)))


def test_every_field_in_milliseconds_accepts_times_and_durations() -> None:
    for struct in get_args(Terms):
        written = {
            field.name: "2026-11-27T10:00:00Z" if field.name.endswith(("_at", "_until")) else "1h"
            for field in msgspec.structs.fields(struct)
            if field.name.endswith(("_at", "_until", "_ms"))
        }
        for name, text in written.items():
            file = json.dumps([{"offer": "a", "terms": {"kind": struct.__struct_config__.tag, name: text}}])
            assert not [reason for _, reason in problems_of(file, "json") if f"terms.{name}" in reason]


@pytest.mark.parametrize(
    ("cell", "wanted"),
    [
        ("user/day/2", (Limit(by="user", per="day", max=2),)),
        (
            "user/day/2; device/offer/1",
            (Limit(by="user", per="day", max=2), Limit(by="device", per="offer", max=1)),
        ),
        ("user/week/3/campaign;", (Limit(by="user", per="week", max=3, scope="campaign"),)),
        ("user/day/2/offer", (Limit(by="user", per="day", max=2),)),
    ],
)
def test_limits_are_read_from_a_cell(cell: str, wanted: tuple[Limit, ...]) -> None:
    [command] = read_offers(f"{HEADER},limits\na,coupon,shop,5,{cell}", "csv")
    assert isinstance(command.terms, CouponTerms)
    assert command.terms.limits == wanted


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("user-day-2", ("terms.limits", "user/day/2")), ("user/day", ("terms.limits", "by/per/max")),
        ("user/day/two", ("terms.limits",)),
        ("user/fortnight/2", ("terms.limits[0].per", "offer, hour, day, week", "'fortnight'")),
        ("user/day/0", ("terms.limits[0].max", ">= 1")),
        ("user/day/2/shop", ("terms.limits[0].scope", "offer, campaign")),
        ("user/day/2; user/day/3", ("terms.limits", "keep the smaller")),
    ],
)  # fmt: skip
def test_wrong_limits_in_a_cell_are_refused(cell: str, words: tuple[str, ...]) -> None:
    refused(f"{HEADER},limits\na,coupon,shop,5,{cell}", "csv", ("line 2", *words))


def test_limits_and_hours_may_be_lists_of_texts() -> None:
    limits = ["user/day/2", "device/offer/3/campaign", {"by": "user", "per": "week", "max": 4}]
    [command] = read_offers(one(limits=limits, hours=["fri 10:00-12:00", "sat 09:00-18:00"]), "json")
    assert isinstance(command.terms, CouponTerms)
    assert command.terms.limits == (
        Limit(by="user", per="day", max=2), Limit(by="device", per="offer", max=3, scope="campaign"),
        Limit(by="user", per="week", max=4),
    )  # fmt: skip
    assert [hours.weekdays for hours in command.terms.hours] == [("fri",), ("sat",)]
    refused(one(limits=["user/day/2", "user-day"]), "json", ("entry 1", "terms.limits[1]", "by/per/max"))


@pytest.mark.parametrize(
    ("cell", "wanted"),
    [
        ("fri 10:00-12:00", (Hours(weekdays=("fri",), from_="10:00", until="12:00"),)),
        (
            "fri 10:00-12:00; Sat, sun 09:00 - 18:00",
            (
                Hours(weekdays=("fri",), from_="10:00", until="12:00"),
                Hours(weekdays=("sat", "sun"), from_="09:00", until="18:00"),
            ),
        ),
        ("22:00-24:00", (Hours(from_="22:00"),)),
    ],
)
def test_hours_are_read_from_a_cell(cell: str, wanted: tuple[Hours, ...]) -> None:
    [command] = read_offers(f'{HEADER},hours\na,coupon,shop,5,"{cell}"', "csv")
    assert command.terms.hours == wanted


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("friday", ("terms.hours", "fri 10:00-12:00")), ("mon-fri 09:00-18:00", ("terms.hours", "sat,sun")),
        ("fry 10:00-12:00", ("terms.hours[0].weekdays[0]", "mon, tue", "'fry'")),
        ("fri 12:00-10:00", ("terms.hours", "from must be before")),
        ("fri 9:00-10:00", ("terms.hours.from", "10:00")),
    ],
)  # fmt: skip
def test_wrong_hours_in_a_cell_are_refused(cell: str, words: tuple[str, ...]) -> None:
    refused(f"{HEADER},hours\na,coupon,shop,5,{cell}", "csv", ("line 2", *words))


def test_hours_in_yaml_need_no_quotes() -> None:
    """The usual loader reads `10:00` as 600."""
    text = (
        "- offer: a\n  terms: {kind: coupon, issuer: no, total: 1_000, hours: [{weekdays: [fri], from: "
        "10:00, until: 12:00}]}"
    )
    [command] = read_offers(text, "yaml")
    assert command.terms.hours == (Hours(weekdays=("fri",), from_="10:00", until="12:00"),)
    assert (command.terms.issuer, command.terms.total) == ("no", 1_000)


@pytest.mark.parametrize(("cell", "wanted"), [("true", True), ("FALSE", False)])
def test_booleans_are_read_from_a_cell(cell: str, wanted: bool) -> None:
    [command] = read_offers(f"{HEADER},return_restores\na,coupon,shop,5,{cell}", "csv")
    assert isinstance(command.terms, CouponTerms)
    assert command.terms.return_restores is wanted


def test_text_field_keeps_a_text_that_looks_like_a_number() -> None:
    rows = f"offer,kind,issuer,title,total\n007,coupon,1e5,true,5\n{FRIDAY},coupon,null,2026-11-27,5"
    assert [(one.offer, one.terms.issuer, one.terms.title) for one in read_offers(rows, "csv")] == [
        ("007", "1e5", "true"), (str(FRIDAY), "null", "2026-11-27"),
    ]  # fmt: skip


def test_a_cell_may_have_commas_quotes_and_umlauts() -> None:
    [command] = read_offers(f'{HEADER},title\na,coupon,shop,5,"Schöne ""Schuhe"", rot"', "csv")
    assert command.terms.title == 'Schöne "Schuhe", rot'


def test_null_removes_a_default() -> None:
    text = (
        "defaults: {kind: coupon, issuer: shop, total: 5, hold_ms: 15m}\noffers: [{offer: a}, {offer: b, "
        "terms: {hold_ms: null}}]"
    )
    assert [getattr(command.terms, "hold_ms", 0) for command in read_offers(text, "yaml")] == [900_000, None]


def test_anchors_and_merges_are_read() -> None:
    text = (
        "- {offer: a, terms: &first {kind: coupon, issuer: shop, total: 5, title: t}}\n- {offer: b, terms: "
        "{total: 7, <<: *first}}\n"
        "- {offer: c, terms: {<<: [{total: 9}, *first], title: u}}\n"
    )
    assert [(one.terms.total, one.terms.title) for one in read_offers(text, "yaml")] == [
        (5, "t"),
        (7, "t"),
        (9, "u"),
    ]


def test_json_with_tabs_and_emoji_is_read_as_yaml() -> None:
    text = json.dumps([{"offer": "a", "terms": COUPON | {"title": "🧧"}}], indent="\t")
    assert "\\ud83e" in text
    assert read_offers(text, "yaml") == read_offers(text, "json")
    assert read_offers(text, "yaml")[0].terms.title == "🧧"


# -- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "form", "expected"),
    [
        # the file as a whole
        ("", "yaml", [("file", "no offers")]), ("[]", "json", [("file", "no offers")]),
        ("", "csv", [("file", "no offers")]),
        (HEADER, "csv", [("file", "no offers")]), ("offers:", "yaml", [("file", "no offers")]),
        ("", "json", [("line 1", "not JSON")]), ("[{]", "json", [("line 1", "not JSON", "column 3")]),
        ("[NaN]", "json", [("file", "NaN")]),
        ("[" * 100_000, "json", [("file", "not JSON")]), ("[" * 5_000, "yaml", [("file", "not YAML")]),
        ("hello", "yaml", [("file", "must be a list", "'hello'")]),
        ("a: [\n  b", "yaml", [("line 3", "not YAML", "begins in line 1")]),
        ("- a\n---\n- b", "yaml", [("line 2", "second document")]),
        ("- !!python/object:os.system x", "yaml", [("line 1", "tag")]),
        ("- *x", "yaml", [("line 1", "*x")]), ("- &x [*x]", "yaml", [("line 1", "*x")]),
        ("a: \x07", "yaml", [("file", "not YAML")]),
        ("- {[a]: 1}", "yaml", [("line 1", "cannot be the name of a field")]),
        ("- {<<: 1}", "yaml", [("line 1", "<<")]),
        ("defaults: {}\noffres: []", "yaml", [("file", "offres", "the nearest is offers")]),
        ("offers: {offer: a}", "yaml", [("file", "must be a list")]),
        ("defaults: [1]\noffers: []", "yaml", [("file", "defaults: must be an object")]),
        # an entry
        ("- 5\n-\n- []", "yaml", [("entry 1", "object"), ("entry 2", "nothing"), ("entry 3", "object")]),
        ("- {}", "yaml", [("entry 1", "offer: is missing"), ("entry 1", "terms: is missing")]),
        ("- {offer: a, terms: x}", "yaml", [("entry 1", "terms: must be an object")]),
        ("- {offer: a, terms: {}}", "yaml", [("entry 1", "terms.kind: is missing",
        "envelope, coupon, stock")]),
        (one(kind="coupn"), "json", [("entry 1", "terms.kind", "'coupn'", "the nearest is coupon")]),
        (one(kind=1), "json", [("entry 1", "terms.kind: must be one of", "1")]),
        (one(totl=1), "json", [("entry 1", "terms.totl", "the nearest is total")]),
        (one(parts=3), "json", [("entry 1", "terms.parts", "kind coupon has no such field", "envelope")]),
        (one(asset="sku:x"), "json", [("entry 1", "terms.asset", "envelope and stock")]),
        (one(limits=[{"by": "user", "each": "day", "max": 1}]), "json",
        [("entry 1", "terms.limits[0].each", "nearest")]),
        ('[{"offer": "a", "term": {}}]', "json", [("entry 1", "term", "the nearest is terms"), ("entry 1",
        "terms: is missing")]),
        ("- {offer: a, type: close, terms: {kind: coupon, issuer: shop, total: 5}}", "yaml",
        [("entry 1", "type: must be open")]),
        ("- {offer: 12, terms: {kind: coupon, issuer: shop, total: 5}}", "yaml",
        [("entry 1", "offer", "put it in quotes")]),
        ("- {offer: a b, terms: {kind: coupon, issuer: shop, total: 5}}", "yaml",
        [("entry 1", "offer", "'a b'")]),
        (json.dumps([{"offer": "o" * 60, "terms": COUPON}]), "json", [("entry 1", "id", "64", "give an id")]),
        (one(issuer=None), "json", [("entry 1", "terms.issuer", "`str`")]),
        ('[{"offer": "a", "terms": {"kind": "coupon", "total": 5}}]', "json", [("entry 1",
        "terms.issuer: is "
        "missing",
        "who gives")]),
        (one(total="5"), "json", [("entry 1", "terms.total", "without quotes")]),
        (one(total=1.5), "json", [("entry 1", "whole number", "1.5")]),
        (one(total="many"), "json", [("entry 1", "terms.total: must be a whole number, got 'many'")]),
        (one(limits=[{"by": "user", "per": "day", "max": 1}, {"by": "user", "per": "day", "max": "2"}]),
        "json", [("entry 1", "terms.limits[", "a whole number without quotes, got '2'")]),
        (one(total=10**30), "json", [("entry 1", "terms.total")]),
        (one(total=-1), "json", [("entry 1", "terms.total", ">= 0")]),
        (one(late="never"), "json", [("entry 1", "terms.late", "refuse, grace, retake", "'never'")]),
        (one(late="never (the nearest is a)"), "json", [("entry 1", "got 'never (the nearest is a)'")]),
        (one(waiting_list="yes"), "json", [("entry 1", "terms.waiting_list", "true or false")]),
        (one(price=5), "json", [("entry 1", "price and currency belong together")]),
        (json.dumps([{"offer": "a", "terms": ENVELOPE | {"parts": 11}}]), "json",
        [("entry 1", "terms.total")]),
        (one(timezone="Mars"), "json", [("entry 1", "Asia/Shanghai")]),
        (one(title="\ud800"), "json", [("entry 1", "JSON")]),
        (one(opens_at=5, closes_at=4), "json", [("entry 1", "terms.closes_at")]),
        # twice
        ('[{"offer": "a", "terms": {"kind": "coupon", "total": 1, "total": 2}}]', "json",
        [("entry 1", "terms.total: is given twice")]),
        ("- offer: a\n  terms:\n    total: 1\n    kind: coupon\n    total: 2\n", "yaml",
        [("entry 1", "terms.total: is given twice")]),
        ("offers: []\noffers: []", "yaml", [("file", "offers: is given twice")]),
        (json.dumps([{"offer": "a", "terms": COUPON}] * 3), "json",
        [("entry 2", "offer", "entry 1"), ("entry 3", "offer", "entry 1")]),
        (json.dumps([{"offer": one, "id": "i", "terms": COUPON} for one in "ab"]), "json",
        [("entry 2", "id: i", "entry 1")]),
        (json.dumps([{"offer": "b", "terms": COUPON}, {"offer": "a", "id": "open-b", "terms": COUPON}]),
        "json", [
            ("entry 2", "id: open-b"),
        ]),
        # CSV
        (f"{HEADER}\na,coupon,shop,5\na,coupon,shop,5", "csv", [("line 3", "offer: a", "line 2")]),
        (f"{HEADER}\na,coupon,shop", "csv", [("line 2", "3 cells", "4")]),
        (f"{HEADER}\na,coupon,shop,5,6", "csv", [("line 2", "double quotes")]),
        ("offer;kind;issuer;total\na;coupon;shop;5", "csv",
        [("line 1", "offer", "commas"), ("line 1", "kind", "commas")]),
        ("ofer,kind\na,coupon", "csv", [("line 1", "offer: the header"), ("line 1", "ofer",
        "the nearest is "
        "offer")]),
        (f"{HEADER},colour\na,coupon,shop,5,red\nb,coupon,shop,x,red", "csv",
        [("line 1", "colour", "nearest"), ("line 3", "terms.total")]),
        (f"{HEADER},total\na,coupon,shop,5,6", "csv", [("line 1", "total", "two columns")]),
        (f"{HEADER},\na,coupon,shop,5,x", "csv", [("line 2", "'x'", "without a name")]),
        (f"{HEADER}\n\na,coupon,shop,1.2E+12\nb,coupon,shop,\"5", "csv",
        [("line 3", "terms.total", "digits"), ("line 4", "not CSV")]),
        (f"{HEADER},title\na,coupon,shop,5,\"two\nlines\"\nb,coupon,,5,", "csv",
        [("line 2", "terms.title"), ("line 4", "terms.issuer")]),
        (f"{HEADER},waiting_list\na,coupon,shop,5,yes", "csv",
        [("line 2", "terms.waiting_list", "true or false")]),
        (f"{HEADER},parts\na,coupon,shop,5,3\nb,,shop,5,", "csv",
        [("line 2", "terms.parts"), ("line 3", "terms.kind: is missing")]),
    ],
)  # fmt: skip
def test_wrong_file_is_refused_with_place_and_fix(
    text: str, form: Form, expected: list[tuple[str, ...]]
) -> None:
    refused(text, form, *expected)


def test_all_problems_are_reported_at_once() -> None:
    entries = [
        {"offer": "a", "terms": COUPON | {"total": "x"}}, {"offer": "b", "terms": COUPON},
        {"offer": "b", "terms": COUPON | {"opens_at": "now", "hold": 5}},
        {"offer": "c", "terms": COUPON | {"price": 5}},
        {"offer": "b", "terms": COUPON | {"late": "never"}},
    ]  # fmt: skip
    refused(
        json.dumps(entries),
        "json",
        ("entry 1", "terms.total"),
        ("entry 3", "terms.hold", "hold_ms"),
        ("entry 3", "terms.opens_at"),
        ("entry 3", "offer: b", "entry 2"),
        ("entry 4", "terms.price"),
        ("entry 5", "offer: b", "entry 2"),
        ("entry 5", "terms.late"),
    )


def test_wrong_defaults_are_reported_once_and_entries_are_still_checked() -> None:
    file = {
        "defaults": {"kind": "coupon", "isuer": "shop", "hold_ms": "soon"},
        "offers": [{"offer": "a"}, {"offer": "a"}, {"ofer": "c"}],
    }
    refused(
        json.dumps(file),
        "json",
        ("file", "defaults.isuer", "issuer"),
        ("file", "defaults.hold_ms", "15m"),
        ("entry 2", "offer: a"),
        ("entry 3", "ofer", "the nearest is offer"),
        ("entry 3", "offer: is missing"),
    )


# -- the three forms mean the same ---------------------------------------------------------------------------

ids = st.text("abcXYZ019._:-", min_size=1, max_size=20) | st.sampled_from(
    ["no", "null", "true", "1e5", "007", "12", "0x1F", "1_000", "12:30", "-"]
)
titles = st.from_regex(LINE_PATTERN.replace("*", "{0,20}"), fullmatch=True).filter(
    lambda text: text == text.strip()
)
times = st.integers(0, 4_102_444_800_000)
limits = st.lists(
    st.builds(
        Limit,
        by=ids,
        per=st.sampled_from(["offer", "hour", "day", "week"]),
        max=st.integers(1, 99),
        scope=st.sampled_from(["offer", "campaign"]),
    ),
    max_size=3,
    unique_by=lambda limit: (limit.name, limit.scope),
).map(tuple)
hours = st.lists(
    st.builds(
        Hours,
        weekdays=st.lists(st.sampled_from(["mon", "wed", "sun"]), min_size=1, unique=True).map(tuple),
        from_=st.sampled_from(["00:00", "10:00"]),
        until=st.sampled_from(["12:30", "24:00"]),
    ),
    max_size=3,
).map(tuple)
common: dict[str, Any] = {
    "issuer": ids, "title": titles, "opens_at": st.none() | st.just(0),
    "closes_at": st.none() | times.filter(bool), "hours": hours,
    "timezone": st.sampled_from(["UTC", "Asia/Shanghai"]),
    "audience": st.sampled_from(["everyone", "list", "ticket"]),
}  # fmt: skip
pieces: dict[str, Any] = {
    **common, "total": st.integers(1, 10**13), "limits": limits, "hold_ms": st.integers(1, 10**9),
    "waiting_list": st.booleans(),
    "return_restores": st.booleans(), "valid_until": st.none() | times,
    "take": st.sampled_from(["all", "up_to"]),
}  # fmt: skip
terms_of_all_kinds = (
    st.builds(
        EnvelopeTerms,
        **common,
        funding=ids,
        asset=st.just("CNY"),
        total=st.integers(10, 10**9),
        parts=st.integers(1, 10),
    )
    | st.builds(CouponTerms, **pieces)
    | st.builds(StockTerms, **pieces, asset=st.none() | st.just("sku:x"))
)
opens_of_all_kinds = st.lists(
    st.builds(Open, id=ids, offer=ids, terms=terms_of_all_kinds),
    min_size=1,
    max_size=5,
    unique_by=(lambda one: one.id, lambda one: one.offer),
)


def cell_of(name: str, value: Any) -> Any:
    """The cell of a term in a spreadsheet."""
    if name == "limits":
        return "; ".join("/".join(str(part) for part in limit.values()) for limit in value)
    if name == "hours":
        return "; ".join(
            f"{','.join(one['weekdays'])} {one.get('from', '00:00')}-{one.get('until', '24:00')}"
            for one in value
        )
    return value


def written_as(form: Form, opens: list[Open]) -> str:
    """A file of this form with these offers."""
    entries = [
        {name: value for name, value in msgspec.to_builtins(command).items() if name != "type"}
        for command in opens
    ]
    if form == "json":
        return json.dumps(entries)
    if form == "yaml":
        return yaml.dump(entries, Dumper=yaml.CSafeDumper, allow_unicode=True)
    columns = ["offer", "id", *dict.fromkeys(name for entry in entries for name in entry["terms"])]
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    writer.writerow(columns)
    for entry in entries:
        cells = entry | {name: cell_of(name, value) for name, value in entry["terms"].items()}
        writer.writerow([cells.get(column, "") for column in columns])
    return file.getvalue()


@given(opens=opens_of_all_kinds)
def test_yaml_json_and_csv_of_the_same_offers_give_equal_commands(opens: list[Open]) -> None:
    assert all(is_id(command.id) for command in opens)
    for form in FORMS:
        assert read_offers(written_as(form, opens), form) == opens
    assert all(len(row) == len(PLAN_COLUMNS) for row in plan_rows(opens))


@given(
    text=st.text(max_size=60) | st.text("{}[]:,-&*<>!|'\"\n\t ab1", max_size=60), form=st.sampled_from(FORMS)
)
def test_any_text_is_read_or_refused(text: str, form: Form) -> None:
    for file in (text, f"{HEADER},{text}", f"- offer: a\n  terms: {{kind: coupon, issuer: {text}}}"):
        try:
            read_offers(file, form)
        except BadOfferFile as error:
            problems = error.problems
        else:
            continue
        assert problems
        assert all(place and reason for place, reason in problems)


@pytest.mark.long
@pytest.mark.parametrize("form", some_by_tier(FORMS, 3))
def test_five_times_as_many_offers_take_about_five_times_as_long(form: Form) -> None:
    terms = CouponTerms(
        issuer="shop", title="Half price", total=100, opens_at=FRIDAY, timezone="Asia/Shanghai",
        hold_ms=900_000,
        price=1999, currency="CNY", limits=(Limit(by="user", per="day", max=2),),
        hours=(Hours(weekdays=("fri",), from_="10:00"),),
    )  # fmt: skip
    seconds = {}
    for count in (1_000, 5_000):
        text = written_as(
            form, [Open(id=f"i{number}", offer=f"sale:{number}", terms=terms) for number in range(count)]
        )
        began = time.process_time()
        assert len(plan_rows(read_offers(text, form))) == count
        seconds[count] = time.process_time() - began
    assert seconds[5_000] < 15 * seconds[1_000]


# -- the plan ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("terms", "row"),
    [
        (
            EnvelopeTerms(issuer="a", funding="p", asset="CNY", total=1000, parts=3),
            ("envelope", "1,000 minor units of CNY in 3 parts", "at once", "1d after opening", "1 a user",
            "–", "everyone"),
        ),
        (
            EnvelopeTerms(issuer="a", funding="p", asset="CNY", total=5, parts=1, opens_at=FRIDAY,
            timezone="Asia/Shanghai",
                audience="list"),
            ("envelope", "5 minor units of CNY in 1 part", "2026-11-27 10:00+08:00", "2026-11-28 10:00+08:00",
            "1 a user", "–", "list"),
        ),
        (
            CouponTerms(
                issuer="a", total=12_000, opens_at=FRIDAY, closes_at=FRIDAY + 1500, audience="ticket",
                limits=(Limit(by="user", per="day", max=2, scope="campaign"),
                Limit(by="device", per="offer", max=1)),
            ),
            (
                "coupon", "12,000 coupons", "2026-11-27 02:00+00:00", "2026-11-27 02:00:01.500+00:00",
                "2 a user a day over the campaign; 1 a device in all", "–", "ticket",
            ),
        ),
        (
            StockTerms(
                issuer="a", total=1, hold_ms=900_000, price=1999, currency="EUR",
                hours=(Hours(weekdays=("sat", "sun"), from_="09:00"), Hours()),
                limits=(Limit(by="user", per="hour", max=1),),
            ),
            (
                "stock", "1 sku:x, 1,999 minor units of EUR each",
                "at once; sat,sun 09:00-24:00; "
                "00:00-24:00", "never", "1 a user an hour",
                "15m", "everyone",
            ),
        ),
    ],
)  # fmt: skip
def test_plan_shows_terms_for_people(terms: Terms, row: tuple[str, ...]) -> None:
    assert plan_rows([Open(id="i", offer="x", terms=terms)]) == [("x", *row)]
    assert len(PLAN_COLUMNS) == len(row) + 1


# -- small files that would need much memory or time --------------------------------------------------------


def nested_aliases(levels: int) -> str:
    """Some 800 bytes that expand to 9 ** levels values."""
    lists = "".join(f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9) if n else 'x'}]\n" for n in range(levels))
    return f"defaults:\n{lists}offers:\n- offer: a\n  terms: {{title: *a{levels - 1}}}\n"


LARGE = {
    "aliases in aliases": (nested_aliases(12), "yaml", "values"),
    "one alias very often": ("- &a [" + "x," * 1_000 + "x]\n" + "- *a\n" * 3_000, "yaml", "values"),
    "merged again and again": (
        "defaults: {a: &a {" + ", ".join(f"n{n}: 1" for n
        in range(1_000)) + "}}\noffers:\n" + "- {<<: *a}\n" * 3_000, "yaml", "values",
    ),
    "many values of JSON": ("[" + "0," * 7_000_000 + "0]", "json", "values"),
    "a default as long as a file": (json.dumps({"defaults": {"title": "x" * 10**6},
    "offers": [{"offer": "a"}] * 1_000}), "json", "longer"),
    "many unknown names": (json.dumps([{f"n{n}": 1 for n in range(100_000)}]), "json",
    "there is no such "
    "field"),
    "a name as long as a file": (json.dumps([{"n" * 10**7: 1}]), "json", "there is no such field"),
    "many bad entries": (json.dumps([1] * 500_000), "json", "there are more problems"),
    "brackets": ("[" * 100_000, "yaml", "is not YAML"),
    "a long cell": ("offer,kind\n" + "x" * 10**7 + ",coupon\n", "csv", "is not CSV"),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", LARGE)
def test_a_file_takes_memory_and_time_in_proportion_to_its_length(name: str) -> None:
    text, form, word = LARGE[name]
    began = time.process_time()
    tracemalloc.start()
    try:
        problems = problems_of(text, form)  # type: ignore[arg-type]
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert any(word in reason for _, reason in problems), problems[-3:]
    assert all(len(reason.encode()) <= REASON_BYTES_MAX for _, reason in problems)
    # Generous: a value of Python takes some ninety bytes, and tracing slows it down.
    assert most < 400 * 1024 * 1024
    assert time.process_time() - began < 40
