"""Tiers of tests: which `make` target plays which test, how long each took, and how the processes of a
parallel run share them.

`make test` plays the tests without a mark of a tier, `make test-long` those marked `long`, `make nightly`
those marked `nightly`. The environment variable TIER says which of them a run plays.

`tests/durations.json` has, for each tier and file, the last three durations of its tests in seconds, the
newest last. `--record` adds one, on a quiet machine. `make tiers` prints the counts and minutes of the tiers.
"""

import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
import pytest
from rich.markup import escape

from grabstream.ops.console.output import console, table

PROJECT: Final = Path(__file__).resolve().parent.parent
DURATIONS: Final = PROJECT / "tests" / "durations.json"
#: Where a run of pytest leaves its failed tests, in the folder of its cache: with the end of what each said.
#: And their ids alone, one a line, as pytest reads them.
FAILED: Final = PROJECT / ".pytest_cache" / "d" / "failed" / "failed.json"
IDS: Final = "ids.txt"

TEST, LONG, NIGHTLY = "test", "long", "nightly"
#: All but those marked `nightly`, as `make test-cluster` plays them.
DAY: Final = "day"
#: The tests that draw cases, in a new order, as `make explore` plays them.
EXPLORE: Final = "explore"
TIER: Final = os.environ.get("TIER", TEST)
_TIERS: Final = (TEST, LONG, DAY, NIGHTLY, EXPLORE)
if TIER not in _TIERS:
    raise pytest.UsageError(f"TIER={TIER} is not one of {', '.join(_TIERS)}")

#: An unmarked test may take longer than this only with a reason: the mark `every_change`.
SECONDS_MAX: Final = 5.0
#: How many durations of a test are kept. A test is too long only if all of them are.
KEPT: Final = 3
#: Shorter tests are counted together with the fixtures of a file, as its rest.
SINGLE_SECONDS: Final = 0.5
REST: Final = "rest"
COUNT: Final = "count"
#: The load of a machine on which durations may be recorded.
LOAD_MAX: Final = 2.5
#: The expected duration of a file that was never recorded.
UNKNOWN_SECONDS: Final = 10.0
#: How much of a failure's end is kept.
LINES_KEPT: Final = 12


def tier_of(item: pytest.Item) -> str:
    """The tier that a test's marks name."""
    return next((tier for tier in (NIGHTLY, LONG) if item.get_closest_marker(tier)), TEST)


def is_played(item: pytest.Item, tier: str = TIER) -> bool:
    """Whether a run of a tier plays a test. The long tier also draws new cases for each property of `make
    test`. A step of `make nightly` selects its own tests.
    """
    of_item = tier_of(item)
    if tier == EXPLORE:
        return of_item != NIGHTLY and draws_cases(item)
    if tier in (DAY, NIGHTLY):
        return tier == NIGHTLY or of_item != NIGHTLY
    return of_item == tier or (tier == LONG and of_item == TEST and draws_cases(item))


def draws_cases(item: pytest.Item) -> bool:
    """Whether a test draws its cases: by Hypothesis, or by its own seed."""
    is_property = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
    return is_property or item.get_closest_marker("draws_cases") is not None


class Durations:
    """The recorded durations, in seconds, by tier, file and test."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or DURATIONS
        self._tiers: dict[str, dict[str, dict[str, Any]]] = (
            json.loads(self._path.read_text(encoding="utf-8")) if self._path.exists() else {}
        )

    def of_file(self, file: str, tier: str = TIER) -> float:
        """How long the tests of a file took when they were last recorded."""
        stored = self._tiers.get(tier, {}).get(file)
        if stored is None:
            return UNKNOWN_SECONDS
        return sum(seconds[-1] for name, seconds in stored.items() if name != COUNT)

    def of_test(self, nodeid: str, tier: str = TIER) -> list[float]:
        """The last durations of a test, or nothing if it is short or was never recorded."""
        file, _, name = nodeid.partition("::")
        return list(self._tiers.get(tier, {}).get(file, {}).get(name, ()))

    def is_too_long(self, nodeid: str) -> bool:
        """Whether a test of `make test` took longer than it may in each of its last recorded runs."""
        seconds = self.of_test(nodeid, TEST)
        return len(seconds) == KEPT and min(seconds) > SECONDS_MAX

    def files(self, tier: str) -> Iterator[tuple[str, int, float]]:
        """The files of a tier: (file, count of tests, seconds)."""
        for file, stored in self._tiers.get(tier, {}).items():
            yield file, stored[COUNT], self.of_file(file, tier)

    def slowest(self, tier: str, count: int) -> list[tuple[str, float]]:
        """The slowest tests of a tier: (id, seconds)."""
        every = [
            (f"{file}::{name}", seconds[-1])
            for file, stored in self._tiers.get(tier, {}).items()
            for name, seconds in stored.items()
            if name not in (COUNT, REST)
        ]
        return sorted(every, key=lambda one: -one[1])[:count]

    def record(self, tier: str, seconds: Mapping[str, float], fixtures: Mapping[str, float]) -> None:
        """Adds the durations of a whole run of a tier, of tests by id and of fixtures by file, and stores
        them. Tests that the run did not play are forgotten: they were moved or deleted.
        """
        before = self._tiers.get(tier, {})
        tests: dict[str, dict[str, float]] = {}
        for nodeid, took in seconds.items():
            file, _, name = nodeid.partition("::")
            tests.setdefault(file, {})[name] = took
        new: dict[str, dict[str, Any]] = {}
        for file, by_name in sorted(tests.items()):
            old = before.get(file, {})
            single = {name: took for name, took in by_name.items() if name in old or took >= SINGLE_SECONDS}
            rest = fixtures.get(file, 0.0) + sum(took for name, took in by_name.items() if name not in single)
            new[file] = {COUNT: len(by_name), REST: _added(old.get(REST), rest)} | {
                name: _added(old.get(name), took) for name, took in single.items()
            }
            # What was always short is no longer listed.
            for name in single:
                if max(new[file][name]) < SINGLE_SECONDS:
                    new[file][REST][-1] = round(new[file][REST][-1] + new[file].pop(name)[-1], 1)
        self._tiers[tier] = new
        self._path.write_text(_text_of(self._tiers), encoding="utf-8")


def _added(before: Sequence[float] | None, seconds: float) -> list[float]:
    return [*(before or ()), round(seconds, 1)][-KEPT:]


def _text_of(tiers: dict[str, dict[str, dict[str, Any]]]) -> str:
    """JSON with one test a line, so that changes can be read and merged."""

    def indented(value: object, depth: int) -> str:
        if not isinstance(value, dict):
            return json.dumps(value, ensure_ascii=False)
        inner = ",\n".join(
            f"{' ' * (depth + 1)}{json.dumps(name, ensure_ascii=False)}: {indented(one, depth + 1)}"
            for name, one in value.items()
        )
        return f"{{\n{inner}\n{' ' * depth}}}"

    return indented(tiers, 0) + "\n"


class Failure(NamedTuple):
    """A failed test, and the end of what it said."""

    nodeid: str
    assertion: str
    lines: list[str]


def failure_of(report: Any) -> Failure:
    """What a report of pytest says about a test that failed."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = report.longreprtext.splitlines()
    assertion = (crash.message if crash else text[-1] if text else "no report").partition("\n")[0]
    return Failure(report.nodeid, assertion, text[-LINES_KEPT:])


def read_failures(file: Path = FAILED) -> list[Failure]:
    """The failed tests of the last run."""
    return [Failure(*one) for one in json.loads(file.read_text(encoding="utf-8"))] if file.exists() else []


class Run:
    """The plugin of one run of pytest, in the process that prints: stores its failures, and with `--record`
    the durations of its tests.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._is_recorded = bool(config.option.record)
        if self._is_recorded:
            if config.option.keyword or config.option.markexpr or config.args != ["tests"]:
                raise pytest.UsageError("--record needs a whole run: without -k, -m, files and tests")
            if os.getloadavg()[0] > LOAD_MAX:
                raise pytest.UsageError(
                    f"--record needs a quiet machine: the load is {os.getloadavg()[0]:.1f}"
                )
        self._until = time.monotonic() + config.option.stop_after
        self._failures: dict[str, Failure] = {}
        self._seconds: dict[str, float] = {}
        self._fixtures: Counter[str] = Counter()
        # A run without a cache, such as that of a mutation, leaves nothing.
        cache = getattr(config, "cache", None)
        self._failed: Path | None = cache.mkdir("failed") / FAILED.name if cache else None
        if self._failed:
            self._failed.unlink(missing_ok=True)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call":
            self._seconds[report.nodeid] = report.duration
        else:
            self._fixtures[report.nodeid.partition("::")[0]] += report.duration
        if report.failed:
            self._failures.setdefault(report.nodeid, failure_of(report))

    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        if time.monotonic() > self._until:
            pytest.exit("the time is up", returncode=1 if self._failures else 0)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if self._failures and self._failed:
            ids = "".join(f"{nodeid}\n" for nodeid in self._failures)
            self._failed.with_name(IDS).write_text(ids, encoding="utf-8")
            self._failed.write_text(json.dumps(list(self._failures.values())), encoding="utf-8")
        if self._is_recorded and exitstatus == 0:
            Durations().record(TIER, self._seconds, self._fixtures)


def choose(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the tests that the tier plays, and those that were named one by one."""
    if not any("::" in word for word in config.args):
        config.hook.pytest_deselected(items=[item for item in items if not is_played(item)])
        items[:] = [item for item in items if is_played(item)]
    if TIER == EXPLORE:
        random.shuffle(items)


def longest_first(items: list[pytest.Item], group_of: Callable[[str], str], tier: str = TIER) -> None:
    """Sorts tests so that the groups that take longest in a run of the tier begin first: then no process ends
    long after the others. `group_of` has the group of a test's id.
    """
    durations = Durations()
    grouped = {item.nodeid: group_of(item.nodeid) for item in items}
    seconds: Counter[str] = Counter()
    for group, file in {(grouped[item.nodeid], item.nodeid.partition("::")[0]) for item in items}:
        # A group that is one test is named by its id.
        if recorded := durations.of_test(group, tier):
            seconds[group] += recorded[-1]
        else:
            seconds[group] += SINGLE_SECONDS if "::" in group else durations.of_file(file, tier)
    items.sort(key=lambda item: (-seconds[grouped[item.nodeid]], grouped[item.nodeid]))


@click.command()
@click.option("--slowest", default=10, help="How many of the slowest tests of each tier are listed.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(slowest: int, as_json: bool) -> None:
    """Print the counts and minutes of the tiers, by folder, and their slowest tests."""
    durations = Durations()
    rows = []
    for tier in (TEST, LONG, NIGHTLY):
        folders: dict[str, tuple[int, float]] = {}
        for file, count, seconds in durations.files(tier):
            folder = "/".join(file.split("/")[:-1][:2])
            tests, total = folders.get(folder, (0, 0.0))
            folders[folder] = tests + count, total + seconds
        rows += [(tier, folder, count, round(total / 60, 1)) for folder, (count, total) in folders.items()]
        if folders:
            counts, totals = zip(*folders.values(), strict=True)
            rows.append((tier, "all", sum(counts), round(sum(totals) / 60, 1)))
    listed = {tier: durations.slowest(tier, slowest) for tier in (TEST, LONG, NIGHTLY)}
    if as_json:
        names = ("tier", "folder", "tests", "process_minutes")
        tiers = [dict(zip(names, row, strict=True)) for row in rows]
        click.echo(json.dumps({"tiers": tiers, "slowest": listed}, indent=2))
        return
    console.print(table("Tiers", ("tier", "folder", "tests", "minutes of one process"), rows))
    for tier, slow in listed.items():
        if slow:
            shown = [(escape(nodeid), seconds) for nodeid, seconds in slow]
            console.print(table(f"Slowest of {tier}", ("test", "seconds"), shown))


if __name__ == "__main__":
    sys.exit(main())
