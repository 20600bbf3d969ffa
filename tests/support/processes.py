"""What the system reports about a process."""

import os


def resident_bytes(pid: int) -> int:
    """The resident memory of a process; raises OSError when there is none."""
    with open(f"/proc/{pid}/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
