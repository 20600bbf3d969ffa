"""Numbers on pages, by Node.js: sums of users may have more digits than a number keeps."""

import shutil
import subprocess
from pathlib import Path
from typing import Final

from grabstream.workshop.services.servers import PROJECT
from tests.support.nodejs import need_node

PAGE: Final = PROJECT / "grabstream" / "gateway" / "page"
SHOWN: Final = r"""
import { parsedExactly } from './exact.mjs'
import { amount, count } from './format.mjs'
const read = parsedExactly('{"sum":9007199254740993,"\\"9007199254740993":-12345678901234567890,"few":12}')
console.log(amount(read.sum, 'CNY'), amount(read['"9007199254740993'], 'coupon:a'), count(read.few))
"""
SUMMED: Final = r"""
globalThis.document = new EventTarget()
globalThis.window = new EventTarget()
globalThis.location = { hash: '', pathname: '/' }
globalThis.sessionStorage = { getItem: () => null }
const { sumsByAsset } = await import('./overview.js')
const rows = [['offer', 9007199254740993n], ['offer', 4], ['unheard', -1], ['wallet', -9007199254740996n]]
const [of] = sumsByAsset(rows.map(([kind, sum]) => ({ asset: 'CNY', kind, sum, accounts: 2 })))
console.log(of.asset, of.sums.offer, of.sums.wallet, of.sums.other, of.accounts, of.all)
"""


def test_large_sums_are_shown_with_all_digits(tmp_path: Path) -> None:
    need_node("the pages")
    for name in ("exact", "format"):
        shutil.copy(PAGE / f"{name}.js", tmp_path / f"{name}.mjs")
    (tmp_path / "shown.mjs").write_text(SHOWN)
    done = subprocess.run(["node", str(tmp_path / "shown.mjs")], capture_output=True, text=True, timeout=60)
    assert done.stdout == "90,071,992,547,409.93 −12,345,678,901,234,567,890 12\n", done.stderr


def test_large_and_small_sums_are_added_exactly(tmp_path: Path) -> None:
    need_node("the pages")
    for script in PAGE.glob("*.js"):
        shutil.copy(script, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "summed.js").write_text(SUMMED)
    done = subprocess.run(["node", str(tmp_path / "summed.js")], capture_output=True, text=True, timeout=60)
    assert done.stdout == "CNY 9007199254740997n -9007199254740996n -1n 8 0n\n", done.stderr
