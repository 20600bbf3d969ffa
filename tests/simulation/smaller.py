"""What is replaced in scripts and modules: bounds that are smaller than in earnest, so that short histories
meet them, and a write that fails.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

from grabstream.gate import encoding, sizes, staging
from grabstream.models.rules import grabbing, operating
from grabstream.streams.deciding import backlog, decider, sweeper
from grabstream.streams.relaying import apply_arguments, recovery
from tests.simulation.releases import RELEASES

#: Queued grabs that one command serves; the rules have the same bound.
SERVED_AT_ONCE_MAX: Final = 3
#: How many refusals a shard remembers.
REFUSALS_MAX: Final = 15
#: The cost of a call, in µs of the scripts' own count, of which each run draws one: in the usual runs, no
#: call is cut; in the others, calls end after one or two commands.
CALL_COSTS: Final = (2_500, 2_500, 2_500, 300, 100)

#: Texts of the scripts. Where the bound of a run is drawn, they read it where they read the clock.
IN_SCRIPTS: Final = {
    "call_max = 2500": "call_max = tonumber(redis.call('HGET', 'sim', 'call_max'))",
    "local SERVED_AT_ONCE_MAX = 25": f"local SERVED_AT_ONCE_MAX = {SERVED_AT_ONCE_MAX}",
    "local WRITE_VALUES_MAX = 4000": "local WRITE_VALUES_MAX = 6",
    "entry_lines = 1000": "entry_lines = 4",
    "refusals = 100000": f"refusals = {REFUSALS_MAX}",
    "  local done = 0\n": "  local done, broken = 0, tonumber(redis.call('HGET', 'sim', 'break_at'))\n",
    "      redis.call(unpack(writes[i]))\n": (
        "      if i == broken then error({err = 'it fails'}) end\n      redis.call(unpack(writes[i]))\n"
    ),
    "local LINES_MAX, BYTES_MAX = 1000, 131072": "local LINES_MAX, BYTES_MAX = 10, 131072",
}

_IN_MODULES: Final[tuple[tuple[Any, str, int], ...]] = (
    (grabbing, "SERVED_AT_ONCE_MAX", SERVED_AT_ONCE_MAX),
    (operating, "SERVED_AT_ONCE_MAX", SERVED_AT_ONCE_MAX),
    # An envelope of more than three parts is staged, in pieces of three.
    (encoding, "INLINE_BYTES_MAX", 18),
    (sizes, "INLINE_BYTES_MAX", 18),
    (apply_arguments, "INLINE_BYTES_MAX", 18),
    (apply_arguments, "PARTS_MAX", 3),
    (staging, "PIECE_BYTES", 18),
    (decider, "CALL_COMMANDS_MAX", 8),
    (decider, "CALLS_IN_FLIGHT_MAX", 2),
    (sweeper, "OFFERS_AT_ONCE_MAX", 2),
    (sweeper, "HOLDS_AT_ONCE_MAX", 2),
    (sweeper, "CLEAN_FIELDS_A_STEP", 3),
    (sweeper, "LEFT_OUT_SECONDS", 2.0),
    (recovery, "APPLY_EVENTS_MAX", 6),
    (recovery, "WIPE_KEYS_A_STEP", 8),
)
#: A decider that meets these reads no more records, and all shards wait for what it has not read.
_OF_BACKLOGS: Final[tuple[tuple[Any, str, int], ...]] = (
    (backlog, "HELD_COMMANDS_MAX", 12),
    (backlog, "OPEN_RECORDS_MAX", 6),
)


@contextmanager
def smaller_bounds(has_small_backlogs: bool = True) -> Iterator[None]:
    """Inside the block, modules have the smaller bounds; deciders' backlogs only if they are to have them."""
    bounds = _IN_MODULES + (_OF_BACKLOGS if has_small_backlogs else ())
    with ExitStack() as stack:
        for release in RELEASES:
            for module, name, value in bounds:
                of_release = release.module(module.__name__.partition(".")[2])
                stack.enter_context(mock.patch.object(of_release, name, value))
        yield
