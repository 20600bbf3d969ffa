"""`grabstream whatif` on recorded systems: from every source, with its report, its file and its errors."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from grabstream.models.identifiers import campaign_of
from tests.streams.replaying.histories import RecordedSystem, tables
from tests.support.command_line import env_of, grabstream

#: Views that a run must not change.
READ_ONLY = ("offers", "grabs", "accounts", "transfers", "audit")


def whatif(
    system: RecordedSystem, text: str, *words: str, folder: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    return grabstream("whatif", "-", *words, stdin=text, folder=folder, **env_of(system.settings))


def report(system: RecordedSystem, text: str, *words: str, folder: Path | None = None) -> dict[str, Any]:
    done = whatif(system, text, "--json", *words, folder=folder)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


async def test_whatif_reads_the_history_of_a_system(recorded: RecordedSystem, tmp_path: Path) -> None:
    history = recorded.histories[2]
    before = await tables(recorded.settings, recorded.settings.schema_, READ_ONLY)
    campaign = campaign_of(history.names[0])
    for source in ("journal", "audit"):
        same = report(recorded, f"campaign: {campaign}\n", "--source", source)
        assert same["identical"]
        assert (same["differ"], same["outcomes"], same["users"]["more"]) == (0, [], 0)
        assert same["events"] == sum(campaign_of(event.offer) == campaign for event in history.events)
        assert same["seq"] == len(history.lines)
        # The numbers are those of the read models.
        views = {row[0]: row for row in before["offers"] if campaign_of(row[0]) == campaign}
        assert {one["offer"] for one in same["results"]} == set(views)
    # An envelope under another law: every part is known.
    equal = report(
        recorded, f"offer: {history.envelope}\nterms: {{law: equal}}\n", "--output", "differences",
        folder=tmp_path,
    )  # fmt: skip
    [result] = equal["results"]
    parts = [row[5] for row in before["grabs"] if row[0] == history.envelope]
    assert (result["recorded"]["grabs"], result["recorded"]["amount"]) == (len(parts), sum(parts))
    assert (result["recorded"]["smallest_part"], result["recorded"]["largest_part"]) == (
        min(parts),
        max(parts),
    )
    assert (result["changed"]["smallest_part"], result["changed"]["largest_part"]) in ((333, 333), (333, 334))
    assert result["changed"]["amount"] + result["changed"]["rest_amount"] == 9_999
    lines = [json.loads(line) for line in (tmp_path / "differences").read_text().splitlines()]
    assert len(lines) == equal["differ"] > 0
    assert equal["examples"] == lines[:10]
    assert [path.name for path in tmp_path.iterdir()] == ["differences"]
    assert equal["refused"] == {}
    assert await tables(recorded.settings, recorded.settings.schema_, READ_ONLY) == before


async def test_whatif_prints_a_report(recorded: RecordedSystem) -> None:
    history = recorded.histories[5]
    offer = history.names[1].partition(".")[0]  # without codes, so its total may change
    done = whatif(recorded, f"offer: {offer}\nterms: {{price: 11, total: 20, hold_ms: 5m}}\n")
    assert done.returncode == 0, done.stderr
    for words in (f"Offer {offer}", "Under their own terms, all as recorded.", "paid", "Decided otherwise",
                  "not_sent", "refused commands are not in the journal"):  # fmt: skip
        assert words in done.stdout
    done = whatif(recorded, f"offer: {offer}\nuntil: {recorded.at_ms}\n")
    assert (done.returncode, "no difference" in done.stdout) == (0, True), done


@pytest.mark.parametrize(
    ("code", "text", "words"),
    [
        (2, "offer: [a:b, c:d]\n", "all must be of one campaign"),
        (2, "terms: {total: x, issuer: i, law: funny}\n", "terms.law: must be one of"),
        (2, "offer: a\nfrom: yesterday\n", "from: 'yesterday' is not a time"),
        (2, "[1]\n", "must be an object"),
        (2, "offer: {\n", "is not YAML"),
        (1, "offer: nobody\n", "offer nobody was not opened yet"),
        (1, "campaign: nobody\n", "campaign nobody was not opened yet"),
        (1, "offer: ENVELOPE\nterms: {price: 5}\n", "kind envelope, which has no such term"),
        (1, "offer: ENVELOPE\nterms: {parts: 99999}\n", "99999 parts of at least 1 need 99999"),
        (1, "offer: ENVELOPE\nfrom: SOON\nterms: {law: equal}\n", "leave out `from`"),
        (1, "offer: ENVELOPE\nuntil: 2020-01-01\n", "was not opened by then"),
    ],
)
async def test_whatif_says_what_is_wrong(recorded: RecordedSystem, code: int, text: str, words: str) -> None:
    history = recorded.histories[2]
    soon = str(next(event.at for event in history.events if event.offer == history.envelope) + 1)
    text = text.replace("ENVELOPE", history.envelope).replace("SOON", soon)
    done = whatif(recorded, text)
    assert (done.returncode, done.stdout) == (code, ""), done
    assert words in done.stderr
