"""Fuzzing of every entry point: input from outside, as bytes, texts or objects, raises only documented
errors, is never lost, and costs time and memory in proportion to its length.

`GRAB_FUZZ_EXAMPLES=10000` tries more inputs than the usual run.
"""

import asyncio
import hmac
import json
import os
import time
import tracemalloc
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from typing import Any, Final, NamedTuple, get_args

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from grabstream.crypto.signing import NotSigned, Purpose, SigningKeys
from grabstream.crypto.tickets import Ticket, TicketKeys
from grabstream.models.answers import Answer, decode_answer, encode_answer
from grabstream.models.bounds import REASON_BYTES_MAX, REJECTED_OF_ARRAY_MAX, quoted, shortened
from grabstream.models.commands import (
    AnyCommand,
    Undecodable,
    basket_of,
    check,
    commands_of,
    decode_commands,
    encode_command,
)
from grabstream.models.events import EVENTS, AnyEvent
from grabstream.models.journal import Corrupt, Cursor, Gap, block_headers, chain, marker_headers, parse_block
from grabstream.models.money import Invalid
from grabstream.models.payments import (
    AskedHold,
    PaymentQuery,
    Receipt,
    command_of,
    decode_query,
    decode_receipt,
    decode_token,
    encode_claims,
)
from grabstream.models.payments import decode_answer as decode_payments
from grabstream.models.runs import LINES, AnyLine
from grabstream.models.upcasting import UpcastFailed
from grabstream.ops.formats.offer_files import BadOfferFile, Form, read_offers
from grabstream.settings import BadSettings, Settings, load_settings
from grabstream.streams.deciding.decoding import Pace, Rejected, TopicAuthority, decode_record
from grabstream.streams.topics import Topics
from tests.conftest import examples
from tests.support.odd_values import (
    ENVELOPE,
    ODD_TEXTS,
    ODD_VALUES,
    STOCK,
    damaged,
    encoded,
    of_command,
    of_python,
    structured,
)

#: A few seconds for each door.
FUZZED: Final = hypothesis_settings(
    max_examples=int(os.environ.get("GRAB_FUZZ_EXAMPLES") or examples(200)), deadline=None
)
#: What an input may cost, and an allowance for the start: for the slowest door, many times what it takes on a
#: busy machine.
SECONDS_A_MEBIBYTE: Final = 60.0
SECONDS_AT_FIRST: Final = 2.0
BYTES_A_BYTE: Final = 300
BYTES_AT_FIRST: Final = 4 * 1024 * 1024


def bounded(length: int, run: Callable[[], Any]) -> Any:
    """Runs code that reads an input of this length, and checks its time and memory."""
    tracemalloc.start()
    began = time.thread_time()
    try:
        return run()
    finally:
        took, (_, most) = time.thread_time() - began, tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert took <= SECONDS_AT_FIRST + SECONDS_A_MEBIBYTE * length / 2**20
        assert most <= BYTES_AT_FIRST + BYTES_A_BYTE * length


def attempted(run: Callable[[], Any], *documented: type[Exception]) -> Any:
    """The result, or the error if it is a documented one."""
    try:
        return run()
    except documented as error:
        return error


# -- bytes on the topic --------------------------------------------------------------------------------------

of_record = st.one_of(
    st.binary(max_size=300),
    ODD_VALUES.map(encoded),
    damaged(
        st.one_of(
            of_command.map(encoded),
            st.lists(of_command, max_size=5).map(encoded),
            st.just(b"["),
            st.just(b'{"id":"x"'),
        )
    ),
)

EVERY_COMMAND: Final = TopicAuthority(Topics("t"), operations_on_commands=True)


class Record(NamedTuple):
    value: bytes | None
    key: bytes | None
    topic: str = "t.commands"
    partition: int = 0
    offset: int = 5


def whole_of(rejected: list[Rejected]) -> list[bytes]:
    """The rejected record, joined from its pieces."""
    found: dict[tuple[bytes, bytes | None], bytes] = {}
    for one in rejected:
        headers = dict(one.headers)
        place = (headers["index"], headers.get("part"))
        found[place] = found.get(place, b"") + one.raw
    return [raw for (_, part), raw in found.items() if part is None]


TORN_BASKET: Final = (
    b'[{"type":"grab","id":"i","offer":"o","user":"u","basket":"b"},'
    b'{"id":"j","offer":"o","user":"u","basket":"b"}]'
)


@FUZZED
@example(value=TORN_BASKET, key=None)
@given(value=of_record, key=st.one_of(st.none(), st.binary(max_size=50)))
def test_record_of_the_topic_is_a_command_or_is_kept(value: bytes, key: bytes | None) -> None:
    found = bounded(len(value), lambda: list(commands_of(value)))
    understood = asyncio.run(decode_record(Record(value, key), Pace(), EVERY_COMMAND))
    bad = [one for one in found if isinstance(one, Undecodable)]
    for one in bad:
        assert 0 < len(one.reason.encode()) <= REASON_BYTES_MAX
    refused = [one for one in found if one not in understood.commands]
    # A grab whose basket is torn is answered, too.
    torn = [one for one in refused if not isinstance(one, Undecodable) and basket_of(one) is not None]
    assert {one.id for one in torn} <= {answer.id for answer in understood.refused}
    kept = whole_of(understood.rejected)
    assert len(understood.commands) + len(refused) == len(found)
    assert len(kept) == min(len(refused), REJECTED_OF_ARRAY_MAX)
    # A secret's command is rewritten; everything else is kept as it came.
    assert all(raw in value or raw == encode_command(decode_commands(raw)[0]) for raw in kept)  # type: ignore[arg-type]
    for command in understood.commands:
        assert decode_commands(encode_command(command)) == [command]
    for answer in understood.refused:
        assert decode_answer(encode_answer(answer)) == answer


@FUZZED
@given(text=ODD_TEXTS, bytes_max=st.sampled_from((16, 100, REASON_BYTES_MAX)))
def test_quoted_input_is_short_and_one_line(text: str, bytes_max: int) -> None:
    short = shortened(text, bytes_max)
    assert len(short.encode()) <= bytes_max
    assert "\0" not in short
    assert len(short.splitlines()) <= 1 or "\u2028" in short or "\u2029" in short
    assert len(shortened(quoted(text)).encode()) <= 400


# -- objects made in Python ----------------------------------------------------------------------------------


@FUZZED
@given(command=of_python)
def test_python_object_is_valid_or_invalid(command: AnyCommand) -> None:
    error = attempted(lambda: check(command), Invalid, TypeError)
    if error is not None:
        assert len(shortened(str(error)).encode()) <= REASON_BYTES_MAX
        assert isinstance(error, TypeError) or len(str(error)) <= 1_000, "it quotes more than it should"
        return
    # What is right can be written, and is the same when it is read.
    assert decode_commands(encode_command(command)) == [command]


# -- files of offers -----------------------------------------------------------------------------------------

of_file = st.one_of(
    st.text(max_size=200),
    st.sampled_from((ENVELOPE, STOCK))
    .flatmap(structured)
    .map(lambda one: json.dumps([{"offer": "a", "terms": one}])),
    st.sampled_from((ENVELOPE, STOCK))
    .flatmap(structured)
    .map(lambda one: json.dumps({"defaults": one, "offers": [{"offer": "a"}, {"offer": "b"}]})),
    st.lists(
        st.sampled_from(
            (
                "- ",
                "offer: a\n",
                "&a ",
                "*a",
                "<<: *a\n",
                "{",
                "}",
                "[",
                "]",
                ": ",
                "\n",
                "  ",
                "? ",
                "!!str ",
                "---\n",
                "x",
                "|",
                "'",
            )
        )
    ).map("".join),
    st.lists(
        st.sampled_from(
            (
                "offer",
                "kind",
                ",",
                "\n",
                '"',
                "coupon",
                "total",
                "limits",
                "user/day/2",
                ";",
                "1",
                "10:00-11:00",
                "\r",
            )
        )
    ).map("".join),
)


@FUZZED
@given(text=of_file, form=st.sampled_from(get_args(Form)))
def test_file_of_offers_is_read_or_refused(text: str, form: Form) -> None:
    opens = attempted(lambda: bounded(len(text), lambda: read_offers(text, form)), BadOfferFile)
    if isinstance(opens, BadOfferFile):
        assert opens.problems
        assert all(len(reason.encode()) <= REASON_BYTES_MAX for _, reason in opens.problems)
        return
    for command in opens:
        check(command)


# -- settings ------------------------------------------------------------------------------------------------

in_environment = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=60)


@FUZZED
@given(
    name=st.sampled_from(sorted(Settings.model_fields)),
    text=st.one_of(
        in_environment,
        st.sampled_from(
            (
                "-1",
                "0",
                "1e9",
                "9" * 5_000,
                "redis-cluster://",
                "redis-cluster://a:b",
                "a:b",
                "a:HS256:x",
                "[",
                "{}",
            )
        ),
    ),
)
def test_setting_is_accepted_or_named_in_the_error(name: str, text: str) -> None:
    variable = f"GRAB_{name.strip('_').upper()}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(variable, text)
        found = attempted(load_settings, BadSettings)
    assert isinstance(found, Settings) or variable in str(found)


# -- the journal ---------------------------------------------------------------------------------------------

header_names = st.sampled_from(("shard", "term", "owner", "first_seq", "count", "prev", "head", "x"))
header_values = st.one_of(
    st.binary(max_size=20),
    st.integers(-5, 10**20).map(lambda n: b"%d" % n),
    st.binary(min_size=32, max_size=32).map(lambda raw: raw.hex().encode()),
    st.just(b"9" * 5_000),
    st.just("٣".encode()),
)
EVENT: Final = (
    b'{"type":"grab.granted","v":1,"shard":0,"seq":1,"offer_seq":2,"offer":"o","at":5,"command":"c",'
    b'"grab":"c","user":"u","quantity":1,'
    b'"amount":7,"asset":"CNY","place":1,"left":0,"digest":"abcd"}'
)
RUN: Final = (
    b'{"type":"grab.granted","v":2,"shard":0,"seq":1,"offer_seq":2,"offer":"o","at":5,"grabs":["c","d"],'
    b'"users":["u","v"],"amounts":[7,8],"asset":"CNY","place":1,"left":0,"digests":["abcd","plain"]}'
)
of_line = st.one_of(
    st.binary(max_size=200),
    damaged(st.sampled_from((EVENT, RUN))),
    structured(json.loads(EVENT)).map(encoded),
    structured(json.loads(RUN)).map(encoded),
    st.just(EVENT[:-1] + b',"x":' + b"[" * 5_000),
    st.just(b"[" * 5_000),
    st.just(b'{"type":' + b"9" * 5_000),
)


@st.composite
def blocks(draw: st.DrawFn) -> tuple[list[tuple[str, bytes]], bytes | None]:
    """Headers and value of a record: a valid block, a block with a changed header, or anything."""
    if draw(st.booleans()):
        return draw(st.lists(st.tuples(header_names, header_values), max_size=9)), draw(
            st.none() | st.binary(max_size=100)
        )
    lines = draw(st.lists(of_line.filter(lambda line: b"\n" not in line), min_size=1, max_size=3))
    prev = draw(st.sampled_from((bytes(32), b"x" * 32)))
    term, first = draw(st.integers(0, 3)), draw(st.integers(0, 5))
    headers = block_headers(
        0, term, draw(st.sampled_from(("a", "b"))), first, len(lines), prev, chain(prev, lines)[-1]
    )
    if draw(st.booleans()):
        headers = marker_headers(0, term, "a")
    if draw(st.integers(0, 2)) == 0:
        place = draw(st.integers(0, len(headers) - 1))
        headers[place] = (headers[place][0], draw(header_values))
    return headers, b"\n".join(lines)


@pytest.mark.long
@FUZZED
@given(records=st.lists(blocks(), max_size=5))
def test_journal_record_counts_is_ignored_or_is_corrupt(
    records: list[tuple[list[tuple[str, bytes]], bytes | None]],
) -> None:
    cursor = Cursor()
    for offset, (headers, value) in enumerate(records):
        before = cursor
        try:
            block = parse_block(headers, value)
            cursor, accepted = cursor.feed(offset, block)
        except (Corrupt, Gap):
            assert cursor == before
            continue
        assert cursor.seq - before.seq == len(accepted)
        assert [one.seq for one in accepted] == list(range(before.seq + 1, cursor.seq + 1))


@FUZZED
@given(lines=st.lists(of_line, min_size=1, max_size=3))
def test_line_is_an_event_or_refused(lines: list[bytes]) -> None:
    documented = (msgspec.DecodeError, UpcastFailed, UnicodeDecodeError)
    for decoder, form in ((EVENTS, AnyEvent), (LINES, AnyLine)):
        for line in lines:
            decode = partial(decoder.decode, line)
            found = bounded(len(line), lambda decode=decode: attempted(decode, *documented))
            assert isinstance(found, (*get_args(form), *documented))
        attempted(partial(decoder.decode_list, b"[" + b",".join(lines) + b"]"), *documented)


# -- tickets and answers -------------------------------------------------------------------------------------

SECRET: Final = b"x" * 32
KEYS: Final = TicketKeys.from_text(f"k:HS256:{b64encode(SECRET).decode()}")
CLAIMS: Final = {"sub": "u", "aud": ["o"], "exp": 1_800_000_000, "nbf": 1, "jti": "j", "iat": 1}


def token(header: bytes, claims: bytes, secret: bytes = SECRET) -> str:
    signed = b".".join(urlsafe_b64encode(part).rstrip(b"=") for part in (header, claims))
    signature = urlsafe_b64encode(hmac.new(secret, signed, sha256).digest()).rstrip(b"=")
    return f"{signed.decode()}.{signature.decode()}"


of_token = st.one_of(
    ODD_TEXTS,
    st.builds(
        token,
        st.one_of(
            st.just(b'{"alg":"HS256","kid":"k"}'),
            structured({"alg": "HS256", "kid": "k"}).map(encoded),
            st.binary(max_size=50),
            st.just(b"[" * 3_000),
        ),
        st.one_of(
            structured(CLAIMS).map(encoded),
            st.binary(max_size=50),
            st.just(b"[" * 3_000),
            ODD_VALUES.map(encoded),
        ),
    ),
)


@FUZZED
@given(text=of_token)
def test_ticket_is_valid_or_refused(text: str) -> None:
    found = bounded(len(text), lambda: KEYS.read(text, "u", "o"))
    assert found is None or isinstance(found, Ticket)


@FUZZED
@given(
    raw=st.one_of(
        st.binary(max_size=100),
        structured({"id": "i", "outcome": "sold_out", "code": 32, "limits": [{"by": "user"}]}).map(encoded),
    )
)
def test_answer_is_decoded_or_refused(raw: bytes) -> None:
    found = attempted(lambda: decode_answer(raw), msgspec.DecodeError, UnicodeDecodeError)
    assert isinstance(found, Answer | msgspec.DecodeError | UnicodeDecodeError)


# -- receipts, and answers about holds -----------------------------------------------------------------------

PAYMENT_KEYS: Final = SigningKeys({"k": SECRET})
RECEIPT_HEADER: Final = {"alg": "HS256", "kid": "k", "typ": "grab-receipt+jwt"}
RECEIPT: Final = {
    "aud": "s@c",
    "payment": "p", "offer": "o", "grab": "g", "user": "u", "status": "paid", "paid": 1, "currency": "CNY",
    "at": 1,
}  # fmt: skip
STATE: Final = {**{name: value for name, value in RECEIPT.items() if name != "aud"}, "grab": "a"}
QUERY: Final = PaymentQuery(aud="s@c", id="q", at=1, holds=(AskedHold(offer="o", grab="a", ends_at=9),))
of_claims = st.one_of(
    structured(RECEIPT).map(encoded),
    structured({"aud": "s@c", "query": "q", "payments": [STATE]}).map(encoded),
    ODD_VALUES.map(encoded),
    damaged(st.just(encoded(RECEIPT))),
)


@FUZZED
@given(
    text=st.one_of(
        of_token,
        st.builds(token, structured(RECEIPT_HEADER).map(encoded), of_claims),
        damaged(st.just(PAYMENT_KEYS.sign(Purpose.receipt, encoded(RECEIPT)).encode())).map(
            lambda raw: raw.decode("latin-1")
        ),
    )
)
def test_signed_text_is_read_or_refused(text: str) -> None:
    found = bounded(
        len(text), lambda: attempted(lambda: PAYMENT_KEYS.read(Purpose.receipt, text, 4_096), NotSigned)
    )
    assert isinstance(found, bytes | NotSigned)


@FUZZED
@given(payload=of_claims)
def test_claims_are_read_or_refused(payload: bytes) -> None:
    receipt = bounded(len(payload), lambda: attempted(lambda: decode_receipt(payload), Invalid))
    if isinstance(receipt, Receipt) and receipt.status == "paid":
        command = command_of(receipt)
        check(command, from_system=True)
        assert command_of(decode_receipt(encode_claims(receipt))) == command
    for decode in (decode_token, decode_query, lambda raw: decode_payments(raw, QUERY)[0]):
        found = bounded(len(payload), lambda decode=decode: attempted(lambda: decode(payload), Invalid))
        assert not isinstance(found, list) or len(found) <= len(QUERY.holds)
