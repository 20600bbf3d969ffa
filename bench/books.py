"""From blocks of the journal to committed books: processor time of Python and of PostgreSQL a grab, for runs
of 1, 4, 20 and 100 grabs. With another source tree, such as one of the last release, both are measured in
turn in one process.

`python -m bench.books [OTHER_TREE]`; needs PostgreSQL on this machine, whose processor time is read from
/proc. It prints a row for each kind and length of runs: microseconds a grab, the least of several rounds.
"""

import asyncio
import gc
import importlib
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

from psycopg import AsyncConnection, sql

GRABS: Final = 16_000
OFFERS: Final = 8
SIZES: Final = (1, 4, 20, 100)
ROUNDS: Final = 8
#: What a projector writes in one transaction, and the relay in one record.
GROUP_GRABS: Final = 4_000
RECORD_GRABS: Final = 1_000
MODELS: Final = ("ledger", "balances", "audit")
SERVER: Final = " in PostgreSQL"


class Tree(NamedTuple):
    """The functions of one source tree."""

    records: Callable[[list[bytes], int], list[Any]]
    facts: Callable[[Any], list[Any]]
    apply: dict[str, Callable[[AsyncConnection[Any], list[Any]], Awaitable[None]]]
    create: Callable[..., Awaitable[None]]
    tables: list[str]
    postgres: str


def tree(folder: Path) -> Tree:
    """Imports a source tree next to those imported before."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "grabstream"]:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    try:
        journal, records, projector, read_models, definitions, versions, settings = map(
            importlib.import_module,
            (
                "grabstream.models.journal", "grabstream.streams.journal",
                "grabstream.streams.projecting.projector", "grabstream.projections.read_models",
                "grabstream.projections.definitions", "grabstream.projections.versions",
                "grabstream.settings",
            ),
        )  # fmt: skip
    finally:
        sys.path.remove(str(folder))

    def blocks(lines: list[bytes], size: int) -> list[Any]:
        head, seq, found = journal.GENESIS, 1, []
        for block in [lines[:OFFERS], *_cut(lines[OFFERS:], max(RECORD_GRABS // size, 1))]:
            seqs = len(block) if block[0].startswith(b'{"type":"offer') else len(block) * size
            after = journal.chain(head, block)[-1]
            headers = journal.block_headers(0, 1, "bench", seq, len(block), head, after, seqs)
            found.append(records.JournalRecord(0, len(found) + 1, tuple(headers), b"\n".join(block)))
            head, seq = after, seq + seqs
        return found

    return Tree(
        blocks,
        lambda record: projector.Decoder(0).decode("bench", record).facts,  # type: ignore[no-any-return]
        {name: read_models.READ_MODELS[name].apply for name in MODELS},
        versions.create_flat,
        [table for name in MODELS for table in definitions.definition_of(name).tables],
        settings.load_settings().postgres,
    )


def _cut(lines: list[bytes], size: int) -> Iterator[list[bytes]]:
    return (lines[at : at + size] for at in range(0, len(lines), size))


def run_lines(kind: str, size: int) -> list[bytes]:
    """Offers, and runs of their grabs in turn, with ids of 32 characters. Every grab is another user's."""
    asset = '"CNY"' if kind == "envelope" else '"sku:{0}"'
    opened = (
        '{{"type":"offer.opened","v":1,"shard":0,"seq":{1},"offer_seq":1,"offer":"{0}","at":1800000000000,'
        '"command":"open","kind":"{2}","issuer":"bench","funding":"bench","asset":' + asset + ',"total":{3},'
        '"opens_at":1,"closes_at":9,"terms":{{"kind":"{2}"{4}}},"digest":"0123456789abcdef"}}'
    )
    total, parts = (GRABS * 100, f',"parts":{GRABS}') if kind == "envelope" else (GRABS, "")
    names = [f"e{number}" for number in range(OFFERS)]
    lines = [
        opened.format(offer, 1 + number, kind, total, parts).encode() for number, offer in enumerate(names)
    ]
    type_, column, rest = (
        ("grab.granted", f',"amounts":[{",".join(["100"] * size)}]', "")
        if kind == "envelope"
        else ("grab.held", "", ',"deadline_at":1800000060000,"price":500,"currency":"CNY"')
    )
    for number in range(GRABS // size):
        offer, first = names[number % OFFERS], number // OFFERS * size
        left = GRABS - first - size
        grabs = ",".join(f'"g{index:031d}"' for index in range(number * size, (number + 1) * size))
        users = grabs.replace("g", "u")
        lines.append(
            f'{{"type":"{type_}","v":2,"shard":0,"seq":{OFFERS + 1 + number * size},"offer_seq":{first + 2},'
            f'"offer":"{offer}","at":1800000000000,"grabs":[{grabs}],"users":[{users}]{column},'
            f'"asset":{asset.format(offer)},"place":{first + 1},"left":{left}{rest}}}'.encode()
        )
    return lines


async def measure(connection: AsyncConnection[Any], tree: Tree, records: list[Any]) -> dict[str, float]:
    """Microseconds a grab: of Python and PostgreSQL, to decode and to write each read model."""
    await connection.execute(
        sql.SQL("TRUNCATE {}").format(sql.SQL(", ").join(map(sql.Identifier, tree.tables)))
    )
    gc.collect()
    began = time.process_time()
    decoded = list(map(tree.facts, records))
    spent = {"decode": time.process_time() - began}
    together = GROUP_GRABS // RECORD_GRABS
    groups = [list(chain(*decoded[at : at + together])) for at in range(0, len(decoded), together)]
    for name, apply in tree.apply.items():
        began, server_began = time.process_time(), _server_seconds(connection)
        for group in groups:
            async with connection.transaction():
                await apply(connection, group)
        spent[name] = time.process_time() - began
        spent[name + SERVER] = _server_seconds(connection) - server_began
    return {name: seconds / GRABS * 1e6 for name, seconds in spent.items()}


def _server_seconds(connection: AsyncConnection[Any]) -> float:
    return int(Path(f"/proc/{connection.info.backend_pid}/schedstat").read_text().split()[0]) / 1e9


async def main(folders: dict[str, Path]) -> None:
    """Prints a row for each tree."""
    trees = {name: tree(folder) for name, folder in folders.items()}
    newest = trees["this tree"]
    schema = f"bench_books_{secrets.token_hex(4)}"
    async with await AsyncConnection.connect(newest.postgres, autocommit=True) as connection:
        try:
            await newest.create(connection, schema, 1)
            await connection.execute("SET synchronous_commit = off")
            for kind in ("envelope", "stock"):
                for size in SIZES:
                    lines = run_lines(kind, size)
                    records = {name: tree.records(lines, size) for name, tree in trees.items()}
                    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
                    for number in range(ROUNDS):
                        # Each is the first as often as the other.
                        for name in list(trees)[:: 1 if number % 2 else -1]:
                            rounds[name].append(await measure(connection, trees[name], records[name]))
                    for name, tree_rounds in rounds.items():
                        _print(f"{kind}, runs of {size:>3}, {name}", tree_rounds)
        finally:
            await connection.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(schema)))


def _print(what: str, rounds: list[dict[str, float]]) -> None:
    least = {name: min(costs[name] for costs in rounds) for name in rounds[0]}
    server = sum(value for name, value in least.items() if name.endswith(SERVER))
    parts = ", ".join(f"{name} {value:.2f}" for name, value in least.items())
    python = sum(least.values()) - server
    print(f"{what}: Python {python:.2f}, PostgreSQL {server:.2f} µs a grab ({parts})", flush=True)


if __name__ == "__main__":
    others = {argument: Path(argument).resolve() for argument in sys.argv[1:]}
    asyncio.run(main({**others, "this tree": Path(__file__).resolve().parent.parent}))
