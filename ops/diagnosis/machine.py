"""What this machine says: its settings, its clock against the servers', and its disks."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from grabstream.ops.diagnosis.findings import Finding
from grabstream.ops.settings import Settings

#: Below this share of a disk, or these bytes, servers are about to stop.
FREE_SHARE_MIN: Final = 0.05
FREE_BYTES_MIN: Final = 1024**3
#: Clocks may be apart by this share of GRAB_CLOCK_SKEW_MS_MAX before it is worth a word.
SKEW_SHARE: Final = 0.5


def seal_keys_missing(settings: Settings) -> list[Finding]:
    """No key to seal seeds and codes with, and to open what the journal has."""
    if settings.seal_keys.get_secret_value():
        return []
    return [
        Finding(
            "stuck", "GRAB_SEAL_KEYS is not set",
            "workers and gates refuse to start; without the keys of before, recovery cannot open seeds and "
            "codes in the journal",
            "restore GRAB_SEAL_KEYS from the backup; only a new system makes one: grabstream config "
            "--new-seal-key",
        )
    ]  # fmt: skip


def clocks_apart(settings: Settings, ahead_ms: Mapping[str, int]) -> list[Finding]:
    """Servers whose clocks differ from this machine's."""
    found = []
    most = settings.clock_skew_ms_max
    for server, ahead in ahead_ms.items():
        if abs(ahead) <= SKEW_SHARE * most:
            continue
        direction = "ahead of" if ahead > 0 else "behind"
        refused = server == "Redis" and abs(ahead) > most
        means = (
            "every command from here is answered fenced"
            if refused
            else "opening times, deadlines and this report may be off by that"
        )
        what = f"the clock of {server} is {abs(ahead):,} ms {direction} this machine's; {most:,} are allowed"
        found.append(
            Finding(
                "stuck" if refused else "risk",
                what,
                means,
                "chronyc tracking   # on both machines; set the clocks right",
            )
        )
    return found


def disks(settings: Settings, directories: Mapping[str, str | None]) -> list[Finding]:
    """Disks that are nearly full, of the servers that run on this machine."""
    found = []
    for server, directory in directories.items():
        if directory is None or not _is_here(settings, server) or not Path(directory).exists():
            continue
        usage = shutil.disk_usage(directory)
        if usage.free >= FREE_BYTES_MIN and usage.free >= FREE_SHARE_MIN * usage.total:
            continue
        what = (
            f"the disk of {server} ({directory}) has {usage.free / 2**30:,.1f} of "
            f"{usage.total / 2**30:,.1f} GiB left"
        )
        found.append(
            Finding("risk", what, "a server that cannot write stops", f"df -h {directory}   # make room")
        )
    return found


def _is_here(settings: Settings, server: str) -> bool:
    host = urlsplit(settings.redis_url if server == "Redis" else settings.postgres).hostname
    return host in (None, "localhost", "127.0.0.1", "::1")
