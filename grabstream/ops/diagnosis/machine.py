"""Checks of this machine: its settings, its clock against the servers' clocks, and its disks."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from grabstream.ops.diagnosis.findings import Finding
from grabstream.settings import Settings

#: A disk with less free space than this share, or these bytes, is nearly full.
FREE_SHARE_MIN: Final = 0.05
FREE_BYTES_MIN: Final = 1024**3
#: Clocks that differ by more than this share of GRAB_CLOCK_SKEW_MS_MAX are reported.
SKEW_SHARE: Final = 0.5


def seal_keys_missing(settings: Settings) -> list[Finding]:
    """No key to encrypt seeds and codes, or to decrypt those in the journal."""
    if settings.seal_keys.get_secret_value():
        return []
    return [
        Finding(
            "stuck", "GRAB_SEAL_KEYS is not set",
            "workers and gates refuse to start; without the keys used so far, a recovery cannot decrypt "
            "seeds and codes in the journal",
            "restore GRAB_SEAL_KEYS from the backup; only for a new system, make a key: grabstream config "
            "--new-seal-key",
        )
    ]  # fmt: skip


def clocks_apart(settings: Settings, ahead_ms: Mapping[str, int]) -> list[Finding]:
    """Servers whose clocks differ from this machine's."""
    findings = []
    skew_max = settings.clock_skew_ms_max
    for server, ahead in ahead_ms.items():
        if abs(ahead) <= SKEW_SHARE * skew_max:
            continue
        direction = "ahead of" if ahead > 0 else "behind"
        is_fenced = server == "Redis" and abs(ahead) > skew_max
        means = (
            "every command sent from this machine is answered fenced"
            if is_fenced
            else "opening times, deadlines and the times of this report may be wrong by as much"
        )
        what = (
            f"the clock of {server} is {abs(ahead):,} ms {direction} this machine's; at most {skew_max:,} ms "
            "are allowed"
        )
        findings.append(
            Finding(
                "stuck" if is_fenced else "risk",
                what,
                means,
                "chronyc tracking   # on both machines; then correct the clock that is wrong",
            )
        )
    return findings


def disks(settings: Settings, directories: Mapping[str, str | None]) -> list[Finding]:
    """Nearly full disks of the servers that run on this machine."""
    findings = []
    for server, directory in directories.items():
        if directory is None or not _is_here(settings, server) or not Path(directory).exists():
            continue
        usage = shutil.disk_usage(directory)
        if usage.free >= FREE_BYTES_MIN and usage.free >= FREE_SHARE_MIN * usage.total:
            continue
        what = (
            f"the disk of {server} ({directory}) has {usage.free / 2**30:,.1f} of "
            f"{usage.total / 2**30:,.1f} GiB free"
        )
        means = f"when it is full, {server} cannot write and stops"
        findings.append(Finding("risk", what, means, f"df -h {directory}   # free space there"))
    return findings


def _is_here(settings: Settings, server: str) -> bool:
    host = urlsplit(settings.redis_url if server == "Redis" else settings.postgres).hostname
    return host in (None, "localhost", "127.0.0.1", "::1")
