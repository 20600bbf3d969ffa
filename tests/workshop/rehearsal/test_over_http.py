"""Rehearsals over HTTP: the files of shapes, the crowds that follow from them, and whole runs with their
verdict.
"""

import asyncio
import contextlib
import copy
import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from grabstream.models.answers import Answer
from grabstream.models.money import Invalid
from grabstream.ops.verification.checks import VerificationCheck
from grabstream.settings import Settings, load_settings
from grabstream.workshop.rehearsal.over_http.charts import nice
from grabstream.workshop.rehearsal.over_http.crowd import crowd_of, requests_of
from grabstream.workshop.rehearsal.over_http.door import open_door
from grabstream.workshop.rehearsal.over_http.measured import Answered, Measured, timeline
from grabstream.workshop.rehearsal.over_http.report import report_of
from grabstream.workshop.rehearsal.over_http.run import ShapedRehearsal
from grabstream.workshop.rehearsal.over_http.shape import FILE_BYTES_MAX, ArrivalPoint, Shape, read_shape
from grabstream.workshop.rehearsal.over_http.verdict import every_grant_booked, one_part, same_answer
from grabstream.workshop.rehearsal.phases import Phase
from grabstream.workshop.rehearsal.stage import CannotGoOn
from grabstream.workshop.services.servers import PROJECT
from tests.support.command_line import env_of, grabstream

SMALL = {
    "title": "Small <b>rush</b>", "offers": 2, "connections_max": 100,
    "arrivals": [{"at_seconds": 0, "per_second": 30}, {"at_seconds": 4, "per_second": 90}],
    "bots": {"share": 0.1, "attempts": 5, "pause_ms": 5}, "double_clicks": {"share": 0.3, "connections": 4},
    "slow": {"share": 0.1, "send_ms": 300}, "vanishing": {"share": 0.3, "back_after_ms": 50, "repeats": 3},
}  # fmt: skip


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "shape.json"
    path.write_text(json.dumps({**SMALL, **changes}))
    return path


# -- shapes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted((PROJECT / "examples/shapes").iterdir()), ids=lambda path: path.name)
def test_the_shapes_of_the_library_can_be_read(path: Path) -> None:
    shape = read_shape(path)
    assert shape.title != Shape().title
    assert 1 < shape.users_expected < shape.requests_expected


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"colour": "red"}, "unknown field `colour`"),
        ({"bots": {"share": 0.1, "speed": 1}}, r"unknown field `speed` - at `\$.bots`"),
        ({"title": ""}, "title: must have 1 to 80"),
        ({"title": "a\u001b[2J"}, "title: must have 1 to 80 printable"),
        ({"offers": 0}, "offers: must be 1 to 100, got 0"),
        ({"offers": "4"}, "Expected `int`, got `str`"),
        ({"parts": 100_001}, "parts: must be 1 to 100,000"),
        ({"connections_max": 2_001}, "connections_max: must be 10 to 2,000"),
        ({"arrivals": []}, "number of points: must be 2 to 100"),
        ({"arrivals": [[0, 1], [1, 1]]}, "Expected `object`, got `array`"),
        ({"arrivals": [{"at_seconds": 1, "per_second": 9}, {"at_seconds": 2, "per_second": 9}]}, "first"),
        ({"arrivals": [{"at_seconds": 0, "per_second": 9}, {"at_seconds": 0, "per_second": 9}]}, "must rise"),
        ({"arrivals": [{"at_seconds": 0, "per_second": 0}, {"at_seconds": 9, "per_second": 0}]}, "0 users"),
        ({"arrivals": [{"at_seconds": 0, "per_second": 5_001}, {"at_seconds": 9, "per_second": 1}]}, "5,000"),
        ({"arrivals": [{"at_seconds": 0, "per_second": 5_000}, {"at_seconds": 21, "per_second": 5_000}]},
         "are 105,000 users"),
        ({"arrivals": [{"at_seconds": 0, "per_second": 9}, {"at_seconds": 601, "per_second": 9}]}, "to 600"),
        ({"bots": {"share": 1.1}}, "bots.share: must be 0 to 1"),
        ({"bots": {"share": 0.7}}, "at most 1, got 1.4"),
        ({"bots": {"attempts": 0}}, "bots.attempts: must be 1 to 1,000"),
        ({"double_clicks": {"connections": 1}}, "double_clicks.connections: must be 2 to 10"),
        ({"slow": {"send_ms": 60_001}}, "slow.send_ms"),
        ({"vanishing": {"repeats": 6}}, "vanishing.repeats: must be 1 to 5"),
        ({"vanishing": {"back_after_ms": -1}}, "vanishing.back_after_ms"),
        ({"arrivals": [{"at_seconds": 0, "per_second": 900}, {"at_seconds": 9, "per_second": 900}],
          "bots": {"share": 0.3, "attempts": 1_000}}, "at most 200,000 are sent"),
    ],
)  # fmt: skip
def test_a_shape_out_of_bounds_is_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(Invalid, match=problem):
        read_shape(written(tmp_path, **changes))


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("shape.toml", b"bots = {share = nan}", "share: must be 0 to 1, got nan"),
        ("shape.toml", b"title = 'a'\ntitle = 'b'", "Cannot overwrite"),
        ("shape.toml", b"\xff", "codec can't decode"),
        ("shape.json", b"[" * 60_000, "shape.json: "),
        ("shape.json", b" " * (FILE_BYTES_MAX + 1), "more than 65536 bytes"),
        ("shape.yaml", b"", "a .toml or a .json"),
    ],
)
def test_a_file_that_is_no_shape_is_refused(tmp_path: Path, name: str, text: bytes, problem: str) -> None:
    path = tmp_path / name
    path.write_bytes(text)
    with pytest.raises(Invalid, match=problem):
        read_shape(path)


def test_a_crowd_follows_from_its_shape_and_seed(tmp_path: Path) -> None:
    shape = msgspec.structs.replace(
        read_shape(written(tmp_path)),
        arrivals=(ArrivalPoint(0, 1_000), ArrivalPoint(5, 0), ArrivalPoint(10, 1_000)),
    )
    crowd = crowd_of(shape, 7)
    assert crowd == crowd_of(shape, 7) != crowd_of(shape, 8)
    times = [visitor.at_seconds for visitor in crowd.visitors]
    assert times == sorted(times)
    # 5,000 are expected, and their standard deviation is 71.
    assert 4_600 < len(times) < 5_400
    middle = sum(4 < at < 6 for at in times)
    assert 100 < middle < 300, "a triangle from 200 a second to 0, and back"
    kinds = Counter(visitor.kind for visitor in crowd.visitors)
    for kind, share in (("bots", 0.1), ("double_clicks", 0.3), ("slow", 0.1), ("vanishing", 0.3)):
        assert abs(kinds[kind] / len(times) - share) < 0.03  # type: ignore[index]
    assert sum(envelope.people for envelope in crowd.envelopes) == len(times)
    sent = kinds["ordinary"] + kinds["slow"] + 5 * kinds["bots"]
    assert requests_of(shape, crowd.visitors) == sent + 4 * kinds["double_clicks"] + 3 * kinds["vanishing"]
    ids = [grab.id for visitor in crowd.visitors for grab in visitor.grabs]
    assert len(ids) == len(set(ids))


# -- verdict -------------------------------------------------------------------------------------------------


def answer(id_: str, user: str, **changes: Any) -> Answer:
    fields = {"amount": 7, "place": 1, "shard": 0, "seq": 5, "grab": id_, **changes}
    return Answer(id_, "granted", 0, "rush", user, **fields)


BOOKED = {("rush", "a"): ("ann", 7, 1, 0, 5)}


def measured_of(*answers: tuple[Any, Answer]) -> Measured:
    measured = Measured()
    for kind, one in answers:
        measured.take(Answered(kind, 1.0, 0.01, one))
    return measured


def test_a_granted_answer_that_the_books_do_not_have_is_a_problem() -> None:
    good = measured_of(("ordinary", answer("a", "ann")))
    assert every_grant_booked(good, BOOKED) == ("every 2xx answer is in the books", 1, "answers", [], ())
    assert every_grant_booked(good, {}).problems == [
        "a was answered ('ann', 7, 1, 0, 5), the books have nothing"
    ]
    for place, wrong in enumerate(("bob", 8, 2, 1, 6)):
        booked = [*BOOKED["rush", "a"]]
        booked[place] = wrong
        assert len(every_grant_booked(good, {("rush", "a"): tuple(booked)}).problems) == 1


@pytest.mark.parametrize("kind", ["vanishing", "double_clicks"])
def test_two_answers_to_one_request_that_differ_are_a_problem(kind: Any) -> None:
    same = measured_of((kind, answer("a", "ann")), (kind, answer("a", "ann", repeated=True, left=3)))
    assert same_answer("same", same, kind) == ("same", 2, "answers", [], ())
    for changes in ({"seq": 6}, {"amount": 8}, {"place": 2}):
        other = measured_of((kind, answer("a", "ann")), (kind, answer("a", "ann", **changes)))
        [problem] = same_answer("same", other, kind).problems
        assert problem.startswith("a: ('granted', 'a', 7, 1, 0, 5) and then")
        assert same_answer("same", other, "ordinary").problems == []


def test_a_bot_with_two_parts_or_with_one_that_it_was_not_answered_is_a_problem() -> None:
    once = measured_of(("bots", answer("a", "ann")))
    assert one_part(once, BOOKED).problems == []
    two = measured_of(("bots", answer("a", "ann")), ("bots", answer("b", "ann", seq=6)))
    both = {**BOOKED, ("rush", "b"): ("ann", 7, 2, 0, 6)}
    assert one_part(two, both).problems == ["ann was granted ['a', 'b'], has ['a', 'b']"]
    assert one_part(once, {("rush", "b"): ("ann", 7, 2, 0, 6)}).problems == [
        "ann was granted ['a'], has ['b']"
    ]


def test_the_timeline_has_rates_and_latencies_of_each_slice() -> None:
    measured = measured_of(("ordinary", answer("a", "ann")))
    measured.arrivals += [0.1, 0.9, 1.4]
    measured.take(Answered("slow", 1.6, 9.0, answer("b", "bob")))
    assert timeline(measured) == {
        "slice_seconds": 0.5, "arrivals_per_second": [2.0, 2.0, 2.0, 0.0],
        "answers_per_second": {"granted": [0.0, 0.0, 2.0, 2.0]},
        "latency_ms": [{}, {}, {"p50": 10.0, "p90": 10.0, "p99": 10.0}, {}],
    }  # fmt: skip
    late = copy.copy(measured)
    late.arrivals = [119.0]
    assert timeline(late)["slice_seconds"] == 2.0
    assert len(timeline(late)["arrivals_per_second"]) == 60


# -- report --------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """The elements and the text of a page; raises for an element that is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.elements[tag] += 1
        if tag != "meta":
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attributes: Any) -> None:
        self.elements[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def result_of(measured: Measured, *checks: VerificationCheck, title: str = "A rush") -> dict[str, Any]:
    http = {
        "shape": title, "arrivals": [{"at_seconds": 0, "per_second": 2}, {"at_seconds": 2, "per_second": 0}],
        "visitors": 3, "kinds": {"ordinary": 2, "slow": 1}, "own_delay_ms_max": 0.3,
        "attempts": {"201": 2, "no answer": 1}, "timeline": timeline(measured),
    }  # fmt: skip
    rush = Phase("rush", began=0.0, ended=2.0)
    rush.latencies["http"].append(0.01)
    for _ in range(1_234):
        rush.count(0.5)
    return {
        "http": http, "checks": checks, "attempts": 2, "seconds": 1.0, "seconds_to_books": 2.0,
        "phases": {"rush": rush.numbers()},
    }  # fmt: skip


def test_the_report_is_one_page_that_loads_and_runs_nothing() -> None:
    measured = measured_of(("ordinary", answer("a", "ann")), ("slow", answer("b", "bob")))
    measured.arrivals += [0.1, 0.2, 0.9]
    hostile = '<script>alert(1)</script> & "it\'s" ]]>'
    failed = VerificationCheck("sums <b>", 3, "<i>units</i>", [hostile] * 25, ["a note"])
    text = report_of(result_of(measured, failed, VerificationCheck("good", 1, "rows", []), title=hostile), 7)
    page = Page(text)
    assert page.elements["svg"] == 3
    assert page.elements["circle"] == 3, "three percentiles of the one slice that has some"
    assert not {"script", "b", "i", "img", "link", "iframe"} & page.elements.keys()
    assert page.text.count(hostile) == 2 + 20, "title, heading, and the problems that are shown"
    assert "and 5 more" in page.text
    assert "1 of 2 checks failed" in page.text
    assert "most answers a second1,234" in page.text
    assert "http://" not in text
    assert "url(" not in text


def test_the_report_of_a_crowd_without_answers_is_whole() -> None:
    page = Page(report_of(result_of(Measured()), 7))
    assert page.elements["svg"] == 3
    assert page.elements["circle"] == 0


@pytest.mark.parametrize(
    ("maximum", "axis"), [(0.0, 1), (0.7, 0.8), (1, 1), (7, 8), (598, 600), (1_005, 1_500)]
)
def test_an_axis_ends_at_a_round_number(maximum: float, axis: float) -> None:
    found, step = nice(maximum)
    assert found == pytest.approx(axis)
    assert 1 <= round(found / step) <= 5


def test_numbers_beside_an_axis_have_room() -> None:
    """Of a crowd that waits for minutes. 12 px is the size of the text, 0.64 of it the width of a digit."""
    measured = measured_of(("ordinary", answer("a", "ann")))
    measured.arrivals.append(0.1)
    result = result_of(measured)
    result["http"]["timeline"]["latency_ms"] = [{"p50": 9.0, "p90": 90.0, "p99": 900_000.0}]
    ticks = re.findall(r'class="tick" x="(\d+)" y="[^"]*" text-anchor="end">([\d,]+)<', report_of(result, 7))
    assert "1,000,000" in [text for _, text in ticks]
    assert [text for x, text in ticks if len(text) * 12 * 0.64 > int(x)] == []


# -- runs ----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_crowd_over_http_passes_its_verdict(settings: Settings, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    done = grabstream(
        "rehearse", "--door", "http", "--shape", str(written(tmp_path)), "--seed", "7", "--json",
        "--report", str(report), **env_of(settings),
    )  # fmt: skip
    assert done.stdout, done.stderr
    result = json.loads(done.stdout)
    assert [check for check in result["checks"] if not check["passed"]] == []
    assert (done.returncode, result["passed"]) == (0, True), done.stderr
    checked = {check["name"]: check["checked"] for check in result["checks"]}
    visitors = result["http"]["visitors"]
    assert 180 < visitors < 300
    assert checked["every command was answered, repeats identically"] == result["attempts"] > visitors
    assert checked["every 2xx answer is in the books"] == result["outcomes"]["granted"] > visitors / 2
    assert checked["a double click is one grab"] > visitors
    assert (
        checked["a request that got no answer, repeated, has one"]
        == 3 * result["http"]["attempts"]["abandoned"]
    )
    assert checked["a user who tries often gets one part"] > 10
    assert {"chain of every shard", "Redis = fold of the journal"} <= checked.keys()
    assert set(result["phases"]) == {"rush"}, "its shape says when users arrive"
    assert set(result["phases"]["rush"]["latency_ms"]) == {"http"}
    page = Page(report.read_text())
    assert "Small <b>rush</b>" in page.text
    assert page.elements["rect"] > 16
    assert len(result["http"]["timeline"]["arrivals_per_second"]) >= 8


async def test_a_reply_that_no_repeat_changes_ends_the_rehearsal(tmp_path: Path) -> None:
    """A gateway that knows none of the paths: a rehearsal must not wait for it without end."""
    server = await asyncio.start_server(_knows_nothing, "127.0.0.1", 0)
    async with server, open_door(server.sockets[0].getsockname()[1], 10) as door:
        shape = read_shape(written(tmp_path))
        crowd = crowd_of(shape, 7)
        bots = crowd._replace(visitors=tuple(one for one in crowd.visitors if one.kind == "bots"))
        for some in (crowd, bots):
            with pytest.raises(CannotGoOn, match="with status 404"):
                await ShapedRehearsal(load_settings(), None, door, shape, some, 7).crowd()  # type: ignore[arg-type]


async def _knows_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
    writer.close()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--shape", "examples/shapes/bots.toml"), "--shape has no effect with"),
        (("--people", "999"), "--people has no effect"),
        (("--story", "week", "--parts", "9"), "--parts has no effect"),
        (("--door", "http", "--parts", "9"), "--parts has no effect with --door http"),
        (("--door", "http", "--story", "week"), "--door has no effect with --story week"),
        (("--door", "http", "--shape", "README.md"), "a shape is a .toml or a .json file"),
    ],
)
def test_options_that_do_nothing_and_files_that_are_no_shapes_are_refused(
    words: tuple[str, ...], problem: str
) -> None:
    done = grabstream("rehearse", *words, folder=PROJECT)
    assert done.returncode == 2
    assert problem in done.stderr
