"""The stories through the command line, with few people: a week's flash sale and a promotion of five days."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from grabstream.settings import Settings
from tests.support.command_line import env_of, grabstream


def story(name: str, settings: Settings, folder: Path) -> dict[str, Any]:
    done = grabstream(
        "rehearse",
        "--story",
        name,
        "--people",
        "150",
        "--seed",
        "7",
        "--result",
        str(folder),
        "--json",
        **env_of(settings),
    )
    assert done.stdout, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert [check for check in report["checks"] if not check["passed"]] == []
    assert (done.returncode, report["passed"]) == (0, True), done.stderr
    return report


@pytest.mark.long
def test_the_week_of_a_flash_sale_passes_its_verdict(settings: Settings, tmp_path: Path) -> None:
    report = story("week", settings, tmp_path)
    checked = {check["name"] for check in report["checks"] if check["checked"]}
    assert checked >= {
        "never over-sold", "left + held + taken = total", "no user above a limit",
        "each payment confirmed or refunded, once",
        "money confirmed = issuer's + refunds", "all holds have ended", "expiry at its deadline",
        "late payments as the offer says",
        "Redis = fold of the journal, Fri 27 Nov 10:05", "chain of every shard",
    }  # fmt: skip
    as_json, as_csv = (Path(file) for file in report["files"])
    assert json.loads(as_json.read_text())["result"] == report["result"]
    rows = list(csv.DictReader(as_csv.read_text().splitlines()))
    assert [row["offer"].partition(":")[2] for row in rows] == [
        "phone",
        "headset",
        "watch",
        "lamp",
        "kettle",
        "bag",
        "book",
        "toy",
    ]
    assert sum(int(row["revenue"]) for row in rows) > sum(int(row["refunded"]) for row in rows) > 0
    assert all(int(row["kept"]) + int(row["back"]) == int(row["total"]) for row in rows)


@pytest.mark.nightly
def test_a_promotion_of_five_days_passes_its_verdict(settings: Settings, tmp_path: Path) -> None:
    report = story("promotion", settings, tmp_path)
    checked = {check["name"] for check in report["checks"] if check["checked"]}
    assert checked >= {
        "each code belongs to one user",
        "every limit was met",
        "an order uses a coupon once",
        "no coupon used after it expired",
    }
    [row] = report["result"]
    assert row["taken"] + row["back"] == row["total"]
    assert row["redeemed"] > row["unredeemed"] > 0
