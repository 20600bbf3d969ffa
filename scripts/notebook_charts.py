"""Runs examples/notebook.ipynb as Jupyter does, on the system of the settings, and saves its charts:
`python -P scripts/notebook_charts.py FOLDER`. A chart has the name of its figure.
"""

import ast
import asyncio
import json
import sys
from pathlib import Path
from typing import Any, Final

import matplotlib
from matplotlib import pyplot as plt

NOTEBOOK: Final = Path(__file__).parents[1] / "examples" / "notebook.ipynb"
PREFIX: Final = "notebook-"
#: Texts stay texts, and the same charts give the same bytes.
SETTINGS: Final = {
    "svg.fonttype": "none",
    "svg.hashsalt": "grabstream",
    "font.size": 9,
    "font.family": "sans-serif",
}


def cells() -> list[str]:
    """The code of the notebook."""
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in found["cells"] if cell["cell_type"] == "code"]


async def run() -> None:
    """Runs the cells one after the other in one namespace, with `await` at the top."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells()):
        code = compile(cell, f"<cell {number}>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        waiting = eval(code, names)  # noqa: S307 - it is the notebook of this tree
        if waiting is not None:
            await waiting


def main() -> None:
    """Runs the notebook and saves its charts in a folder."""
    folder = Path(sys.argv[1])
    matplotlib.use("svg")
    plt.rcParams.update(SETTINGS)
    asyncio.run(run())
    for name in plt.get_figlabels():
        plt.figure(name).savefig(folder / f"{PREFIX}{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
