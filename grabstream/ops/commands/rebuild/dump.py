"""`dump`: the records of the journal as JSON lines, with their headers."""

import os
import sys
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import click

from grabstream.connections.opening import check_system
from grabstream.models.bounds import counted
from grabstream.ops.commands.rebuild.replay import EXIT_BROKEN_PIPE
from grabstream.ops.console.output import WholeNumber, complain, json_option, print_json
from grabstream.ops.console.progress import ReadingBar
from grabstream.ops.console.stopping import run_until_stopped
from grabstream.ops.formats.replay_request import chosen_shards
from grabstream.settings import Settings, load_settings
from grabstream.streams.history.dump import dump_lines
from grabstream.streams.journal import open_reader
from grabstream.streams.topics import Topics


@click.command()
@click.option(
    "--shard", "shards", multiple=True, type=WholeNumber(min=0), help="Only this shard. Repeatable."
)
@click.option("--dry-run", is_flag=True, help="Show how many records there are, and write none.")
@json_option
def dump(shards: Sequence[int], dry_run: bool, as_json: bool) -> None:
    """Write the records of the journal to standard output, as Kafka has them: a JSON object a line, with
    topic, partition, offset, headers and payload, as `kcat -J` writes them. Nothing is verified: this is for
    readers in other languages that verify the records, such as examples/verify-journal.mjs.

    Shards come one after the other. Reading ends at the last record that existed when it began. A summary
    goes to standard error, also with --json.

    Exit code 2: wrong usage; 3: Kafka cannot be reached.
    """
    settings = load_settings()
    chosen = chosen_shards(settings, shards)
    try:
        report = run_until_stopped(_dump(settings, chosen, dry_run))
    except BrokenPipeError:
        # The reader of our lines has closed the pipe. Python's last write at exit goes to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_BROKEN_PIPE)
    if as_json:
        print_json(report, to_errors=not dry_run)
    elif dry_run:
        click.echo(f"Would write {counted(report['records'], 'records')} of {report['topic']}.")
    else:
        complain(f"{counted(report['records'], 'records')} of {report['topic']}")


async def _dump(settings: Settings, shards: Sequence[int], dry_run: bool) -> dict[str, Any]:
    await check_system(settings, journal=True)
    topic = Topics(settings.prefix).journal
    out = sys.stdout.buffer
    async with open_reader(settings.brokers, topic) as reader:
        ends = await reader.ends(shards)
        begins = {shard: await reader.beginning(shard) for shard in shards}
        records = sum(ends[shard] - begins[shard] for shard in shards)
        if not dry_run:
            with ReadingBar("dump", records) as show:
                records = 0
                for shard in shards:
                    parts = dump_lines(reader, topic, shard, begins[shard], ends[shard])
                    async with aclosing(parts):
                        async for count, lines in parts:
                            out.write(lines)
                            records += count
                            show(count, count)
            out.flush()
    return {
        "topic": topic,
        "dry_run": dry_run,
        "records": records,
        "shards": [
            {"shard": shard, "from_offset": begins[shard], "next_offset": ends[shard]} for shard in shards
        ],
    }
