"""What libraries do not document is used in one file for each, and with the version that was tested."""

import ast
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Final

import pytest
from packaging.requirements import Requirement

from tests.copies import PACKAGE

ROOT: Final = Path(__file__).parents[1]
#: The file that uses what a library does not document.
FILES: Final = {
    "aiohttp": "grabstream/runtime/bounded_http.py",
    "aiokafka": "grabstream/streams/kafka_internals.py",
    "redis": "grabstream/lua/script_client.py",
    "uvicorn": "grabstream/gateway/protocol.py",
}
#: Not aiohttp: services have it, too, in a version of theirs. tests/runtime/test_bounded_http.py tests it.
PINNED: Final = ("aiokafka", "redis", "uvicorn")
#: Modules of the libraries that are not for their users, each with a dot at its end.
INTERNAL: Final = (
    "aiohttp.client_proto.", "aiohttp.helpers.", "aiokafka.conn.", "aiokafka.consumer.", "aiokafka.protocol.",
    "aiokafka.record.", "redis._parsers.", "redis.commands.core.", "uvicorn.protocols.", "uvicorn.server.",
)  # fmt: skip
#: Classes that the libraries offer to be derived from, as their errors are.
OFFERED: Final = {"AbstractTokenProvider", "AsyncCoreCommands", "ConsumerRebalanceListener"}
#: Private by their names alone: they are documented.
DOCUMENTED: Final = {"_asdict", "_exit", "_fields", "_make", "_replace"}


@pytest.mark.parametrize("library", PINNED)
def test_library_whose_internals_are_used_has_the_tested_version(library: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = map(Requirement, [*project["dependencies"], *project["optional-dependencies"]["server"]])
    [[pin]] = [one.specifier for one in listed if one.name == library]
    assert pin.operator == "==", f"{FILES[library]} uses internals of {library}: pin it in pyproject.toml"
    installed, tested = version(library), pin.version
    assert installed == tested, (
        f"{library} {installed} is installed, and {FILES[library]}, which uses its internals, was tested "
        f"with {tested}: install that, or read what has changed, run all tests, and change the pin"
    )
    for lock in ("requirements.lock", "requirements-runtime.lock", "requirements-archives.lock"):
        assert f"\n{library}=={tested} " in (ROOT / lock).read_text(), f"{lock}: another {library}"


class Module:
    """The private names that a module defines, and its uses of internals: modules that are not for users,
    classes derived from those of a library, and private attributes, wherever they are defined.
    """

    def __init__(self, text: str) -> None:
        self.defined: set[str] = set()
        self.attributes: dict[str, str] = {}
        self.uses: list[str] = []
        imported: list[str] = []
        origins: dict[str, str] = {}
        classes: list[ast.ClassDef] = []
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.ImportFrom(module=str(module), level=0, names=names):
                    imported += [f"{module}.{one.name}" for one in names]
                    origins |= {one.asname or one.name: f"{module}.{one.name}" for one in names}
                case ast.Import(names=names):
                    imported += [one.name for one in names]
                    origins |= {one.asname or one.name.split(".")[0]: one.name for one in names}
                case ast.ClassDef():
                    classes.append(node)
                    self.defined.add(node.name)
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    self.defined.add(name)
                case ast.Name(id=name, ctx=ast.Store()):
                    self.defined.add(name)
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    self.defined.add(name)
                case ast.Attribute(attr=name) if name.startswith("_") and not name.startswith("__"):
                    self.attributes[name] = ast.unparse(node)
        self.uses += [origin for origin in imported if f"{origin}.".startswith(INTERNAL)]
        for derived in classes:
            for base in map(ast.unparse, derived.bases):
                library = origins.get(base.split(".")[0], "").split(".")[0]
                if library in FILES and base.split(".")[-1] not in OFFERED and not base.endswith("Error"):
                    self.uses.append(f"class {derived.name}({base})")

    def internals(self, own: set[str]) -> list[str]:
        """The uses of internals, where `own` are the private names that the tree defines."""
        return self.uses + [text for name, text in self.attributes.items() if name not in own | DOCUMENTED]


def test_internals_of_libraries_are_used_in_one_file_each() -> None:
    modules = {
        str(path.relative_to(ROOT)): Module(path.read_text(encoding="utf-8"))
        for path in PACKAGE.rglob("*.py")
    }
    own = {name for module in modules.values() for name in module.defined}
    used = {path: module.internals(own) for path, module in modules.items()}
    assert {path: bool(used[path]) for path in FILES.values()} == dict.fromkeys(FILES.values(), True)
    elsewhere = {path: found for path, found in used.items() if found and path not in FILES.values()}
    assert elsewhere == {}, "move these into the file of the library (FILES)"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import aiokafka.conn", ["aiokafka.conn"]),
        ("from aiokafka import conn", ["aiokafka.conn"]),
        ("import redis._parsers\nimport redis", ["redis._parsers"]),
        ("from aiokafka.protocol import api", ["aiokafka.protocol.api"]),
        ("import redis.asyncio\nclass Mine(redis.asyncio.Redis): ...", ["class Mine(redis.asyncio.Redis)"]),
        ("from uvicorn import Server\nclass Mine(Server): ...", ["class Mine(Server)"]),
        ("from redis.exceptions import ConnectionError\nclass Mine(ConnectionError): ...", []),
        ("client._client.ready", ["client._client"]),
        ("self._own._replace(one=1)", []),
    ],
)
def test_each_kind_of_use_is_found(text: str, found: list[str]) -> None:
    assert Module(text).internals({"_own"}) == found
