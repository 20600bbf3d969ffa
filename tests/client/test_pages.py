"""The programs of docs/clients.md do what the page says."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from grabstream.workshop.services.servers import PROJECT
from tests.gateway.conftest import Door
from tests.support.gateways import environment_of
from tests.support.nodejs import need_node

pytestmark = pytest.mark.long

PAGE: Final = (PROJECT / "docs" / "clients.md").read_text()


async def test_programs_of_the_page(plain_door: Door, tmp_path: Path) -> None:
    need_node("docs/clients.md")
    (tmp_path / "grabstream.mjs").symlink_to(
        PROJECT / "grabstream" / "client" / "javascript" / "grabstream.mjs"
    )
    blocks = re.findall(
        r"^```(python|js)\n(.*?)^```\n(?:\n```\n(.*?)^```\n)?", PAGE, re.MULTILINE | re.DOTALL
    )
    assert [language for language, *_ in blocks] == ["python"] * 4 + ["js"]
    printed = []
    for number, (language, program, _) in enumerate(blocks):
        name = f"program{number}" + {"python": ".py", "js": ".mjs"}[language]
        (tmp_path / name).write_text(program.replace(":18080", f":{plain_door.gateway.port}"))
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable if language == "python" else "node", name],
            cwd=tmp_path, env=environment_of(plain_door.settings), capture_output=True, text=True,
            timeout=240,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert printed[:2] == [block[2] for block in blocks[:2]]
    assert printed[2].startswith("sold_out Nothing") or printed[2].startswith("sold_out None")
    assert printed[3] == blocks[3][2]
    assert printed[4].startswith("sold_out Nothing is left of offer market:lamp")
    assert "\nmarket:lamp confirmed\n" in printed[4]
    assert printed[4].endswith(" grab.held request-17\n")
