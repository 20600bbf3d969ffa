"""docs/bounds.md agrees with the constants that it names, and names those that it must."""

import pytest

from scripts.bounds import ROOT, problems

PAGE = (ROOT / "docs/bounds.md").read_text(encoding="utf-8")


def test_page_of_bounds_agrees_with_the_code() -> None:
    assert list(problems(PAGE)) == []


@pytest.mark.parametrize(
    ("text", "instead", "problem"),
    [
        (
            "128 KiB<!-- models.bounds.COMMAND_BYTES_MAX",
            "129 KiB<!-- models.bounds.COMMAND_BYTES_MAX",
            "models.bounds.COMMAND_BYTES_MAX is 131072, and the page says 129 KiB",
        ),
        (
            "10 s<!-- gateway.bounds.READ_SECONDS_MAX",
            "10 ms<!-- gateway.bounds.READ_SECONDS_MAX",
            "gateway.bounds.READ_SECONDS_MAX is 10.0, and the page says 10 ms",
        ),
        (
            "2,500<!-- lua/includes/cost.lua:call_max",
            "2,501<!-- lua/includes/cost.lua:call_max",
            "lua/includes/cost.lua:call_max is 2500, and the page says 2,501",
        ),
        (
            "permanent<!-- streams.topics.RETENTION_MS.journal",
            "7 days<!-- streams.topics.RETENTION_MS.journal",
            "streams.topics.RETENTION_MS.journal is -1, and the page says 7 days",
        ),
        (
            "<!-- models.offers.HOLD_MS_MAX -->",
            "",
            "models.offers.HOLD_MS_MAX is not in the page",
        ),
        (
            "streams.buckets.ATTEMPTS_MAX",
            "streams.buckets.TRIES_MAX",
            "streams.buckets.TRIES_MAX: no such constant",
        ),
        (
            "| `GRAB_LEASE_MS` | ≥ 1 | 3,000 |",
            "| `GRAB_LEASE_MS` | ≥ 1 | 3,001 |",
            "this row is missing: | `GRAB_LEASE_MS` | ≥ 1 | 3,000 |",
        ),
        (
            "| `GRAB_LEASE_MS` | ≥ 1 | 3,000 |",
            "| `GRAB_LEASE_MS` | ≥ 1 | 3,000 |\n| `GRAB_LEASES` | ≥ 1 | 3 |",
            "this row has no numeric setting: | `GRAB_LEASES` | ≥ 1 | 3 |",
        ),
    ],
)
def test_what_is_wrong_in_the_page_is_named(text: str, instead: str, problem: str) -> None:
    assert text in PAGE
    first, *_ = problems(PAGE.replace(text, instead))
    assert first.startswith(problem)
