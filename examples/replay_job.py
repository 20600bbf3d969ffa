"""A replay job: what users got on one day (UTC), read again from the history and written as a CSV file.

    python replay_job.py 2026-11-11 [--folder FOLDER] [--source audit]

The history of a past day never changes, so the job may run again at any time: it writes the same bytes. The
file gets its name when it is complete, so no reader sees an unfinished file.
"""

import argparse
import asyncio
import csv
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path
from typing import Literal

from grabstream import GrabConfirmed, GrabGranted, Settings, load_settings, read_events

COLUMNS = ("shard", "seq", "at", "offer", "user", "grab", "quantity", "amount", "asset")


async def export(settings: Settings, day: date, folder: Path, source: Literal["journal", "audit"]) -> Path:
    """Writes the file of a day; returns its path."""
    begin = datetime.combine(day, time(), UTC)
    end = begin + timedelta(days=1) - timedelta(milliseconds=1)
    target = folder / f"grabs-{day}.csv"
    part = target.with_suffix(".part")
    with part.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        async for event in read_events(settings, first=begin, until=end, source=source):
            if isinstance(event, GrabGranted | GrabConfirmed):
                rows.writerow(getattr(event, column) for column in COLUMNS)
    return part.replace(target)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("day", type=date.fromisoformat)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--source", choices=("journal", "audit"), default="journal")
    words = parser.parse_args()
    if words.day >= datetime.now(UTC).date():
        parser.error(f"{words.day} is not over in UTC: only a past day has a file that never changes")
    print(asyncio.run(export(load_settings(), words.day, words.folder, words.source)))


if __name__ == "__main__":
    main()
