"""Events of other versions: older ones are raised, newer ones are refused, and a program with a gap in its
upcasters does not start.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from grabstream.crypto.sealing import new_seal_key
from grabstream.models.events import (
    CURRENT_VERSIONS,
    EVENTS,
    EventDecoder,
    GrabGranted,
    OfferOpened,
    decode_event,
    encode_event,
)
from grabstream.models.runs import RUN_VERSION
from grabstream.models.upcasting import BrokenChain, NewerEvent, Upcaster, Upcasters, UpcastFailed
from tests.copies import copy_package
from tests.models.old_events import UPCASTERS, as_it_was

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "events"
LINES = [json.loads(path.read_text())["line"].encode() for path in sorted(GOLDEN.glob("*.v1.json"))]
OLD = [as_it_was(line) for line in LINES]


def line_of(type_: str, **changed: Any) -> bytes:
    said = json.loads(json.loads((GOLDEN / f"{type_}.v1.json").read_text())["line"])
    return json.dumps({**said, **changed}, separators=(",", ":")).encode()


def test_old_events_are_raised_to_current_events() -> None:
    """Covers renamed and split fields, and two versions; single events, and a block with current events."""
    decoder = EventDecoder(UPCASTERS)
    current = [decode_event(line) for line in LINES]
    assert [one != other for one, other in zip(LINES, OLD, strict=True)].count(True) == 2
    assert [decoder.decode(line) for line in OLD] == current
    assert decoder.decode_list(b"[" + b",".join(OLD) + b"]") == current
    assert [encode_event(event) for event in decoder.decode_list(b"[" + b",".join(OLD) + b"]")] == LINES


def test_old_events_are_unreadable_without_their_upcasters() -> None:
    for line in set(OLD) - set(LINES):
        with pytest.raises(UpcastFailed, match="there is no such version here"):
            decode_event(line)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            line_of("grab.granted", v=2),
            r"seq 41: grab\.granted v2 was written by a newer grabstream, this release knows up to v1",
        ),
        (line_of("offer.closed", v=99), r"offer\.closed v99 was written by a newer grabstream"),
        (line_of("grab.granted", type="grab.imagined"), r"seq 41: type 'grab\.imagined' is not known here"),
    ],
)
def test_newer_events_are_refused(line: bytes, reason: str) -> None:
    """Even if they could be decoded: the same fields may have another meaning."""
    for decode in (
        lambda: decode_event(line),
        lambda: EVENTS.decode_list(b"[" + LINES[0] + b"," + line + b"]"),
    ):
        with pytest.raises(NewerEvent, match=reason):
            decode()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (line_of("grab.granted", seq="x"), r"Expected `int`, got `str` - at `\$.seq`"),
        (line_of("grab.granted", v=True), r"Expected `int`, got `bool`"),
        (line_of("grab.granted", v="1"), r"Expected `int`, got `str`"),
        (b'{"type":"grab.granted"}', "missing required field `v`"),
        (b'{"v":1}', "missing required field `type`"),
        (b"[]", "Expected `object`"),
        (b"7", "Expected `object`"),
        (b"{", "truncated"),
        (line_of("grab.granted").replace(b'"user":"', b'"user":"\xff'), "not UTF-8"),
        (line_of("grab.granted").replace(b'"user":"', b'"user":"\xed\xa0\x80'), "not UTF-8"),
        # A field that is not known here is passed over.
        (line_of("grab.granted")[:-1] + b',"other":"\xff"}', "not UTF-8"),
        (b'{"type":"grab.granted","v":"\xff"}', "not UTF-8"),
    ],
)
def test_text_that_is_not_an_event_is_refused_with_a_reason(line: bytes, reason: str) -> None:
    with pytest.raises(msgspec.DecodeError, match=reason):
        decode_event(line)
    with pytest.raises(msgspec.DecodeError):
        EVENTS.decode_list(b"[" + line + b"]")


def _same(event: dict[str, Any]) -> dict[str, Any]:
    return event


@pytest.mark.parametrize(
    ("steps", "current", "reason"),
    [
        ((), {"a": 2}, "a: no upcaster from v1 to v2, although v2 is written now"),
        ((("a", 1),), {"a": 3}, "a: no upcaster from v2 to v3, although v3 is written now"),
        ((("a", 1), ("a", 3)), {"a": 4, "b": 1}, "a: no upcaster from v2 to v3, although v4 is written now"),
        ((("a", 2),), {"a": 3}, "a: no upcaster from v1 to v2, although v3 is written now"),
        ((("a", -2), ("a", 0)), {"a": 1}, "a: no upcaster from v-1 to v0, although v1 is written now"),
        ((("a", 1), ("a", 1)), {"a": 2}, "a: two upcasters from v1 to v2"),
        ((("a", 1),), {"a": 1}, "a: an upcaster from v1 to v2, but v1 is written now"),
        ((("b", 1),), {"a": 1}, "b: an upcaster from v1, but there is no such type"),
        ((("b", 1),), {"a": 2},
        "b: an upcaster from v1, but there is no such type; "
        "a: no upcaster from v1 to v2, although v2 is written now"),
    ],
)  # fmt: skip
def test_gap_in_upcasters_raises_broken_chain(
    steps: tuple[tuple[str, int], ...], current: dict[str, int], reason: str
) -> None:
    with pytest.raises(BrokenChain, match=f"^{re.escape(reason)}$"):
        Upcasters([Upcaster(type_, version, _same) for type_, version in steps], current)


@pytest.mark.long
@pytest.mark.parametrize(
    "command",
    [
        ("-c", "import grabstream.streams.projecting.projector"),
        ("-m", "grabstream.ops.cli", "verify"),
        ("-m", "grabstream.ops.cli", "worker"),
    ],
)
def test_program_with_a_gap_in_upcasters_does_not_start(tmp_path: Path, command: tuple[str, ...]) -> None:
    """The version of a type was raised without an upcaster: no process that reads events connects to a
    server.
    """
    copy_package(tmp_path)
    events = tmp_path / "grabstream" / "models" / "events.py"
    raised = events.read_text().replace(
        "class GrabHeld(_GrabEvent[V1]", "class GrabHeld(_GrabEvent[Literal[3]]"
    )
    assert raised != events.read_text()
    events.write_text(raised)
    environment = {"PYTHONPATH": str(tmp_path), "GRAB_SEAL_KEYS": new_seal_key()}
    ended = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=240, env=environment
    )
    assert ended.returncode != 0
    assert (
        "grab.held: no upcaster from v1 to v2, although v3 is written now; grab.held: no upcaster from v2 to "
        "v3" in ended.stderr
    )


def test_failing_upcaster_names_the_event() -> None:
    decoder = EventDecoder([Upcaster("grab.granted", 0, lambda event: {**event, "quantity": event["units"]})])
    with pytest.raises(
        UpcastFailed, match=r"seq 41: grab\.granted v0: the upcaster to v1 failed: KeyError\('units'\)"
    ):
        decoder.decode(line_of("grab.granted", v=0))
    decoder = EventDecoder([Upcaster("grab.granted", 0, lambda event: {**event, "quantity": "many"})])
    with pytest.raises(msgspec.ValidationError, match=r"Expected `int`, got `str` - at `\$.quantity`"):
        decoder.decode(line_of("grab.granted", v=0))


def test_lua_writes_current_versions() -> None:
    """The version is a literal in the scripts: for grab.confirmed, for runs, and for all other types."""
    written = set()
    for path in sorted((ROOT / "grabstream" / "lua").rglob("*.lua")):
        for type_, version in re.findall(r'"type":"(.*?)","v":(\d+)', path.read_text()):
            written.add((type_, int(version)))
    common = {version for type_, version in written if type_ == "%s"} - {RUN_VERSION}
    assert len(common) == 1
    assert written == {
        ("grab.confirmed", 1),
        ("%s", RUN_VERSION),
        ("%s", *common),
    }, "a script writes events in a place that this test does not know"
    assert set(CURRENT_VERSIONS.values()) == common
    assert {GrabGranted, OfferOpened} <= {type(decode_event(line)) for line in LINES}
