"""What people read of runs: a failure with its timeline, and the tables of what was met."""

import re
from collections import Counter
from textwrap import wrap

from tests.simulation.world import Verdict

#: How many lines of a trace are printed by default; a third of them are from its beginning.
LINES_MAX = 400
#: Plans with more steps are not printed.
STEPS_MAX = 12
#: Lines of the trace that every run has by the hundred.
ROUTINE = re.compile(
    r" redis  .*: (FCALL \S+ -> server:ResponseError|.* -> server:NoScriptError|(lease|time|due) .* -> \[)"
)
LINE_CHARACTERS = 110
#: If this many faults have waited for a step, and none has begun, the step is never reached.
WAITED_MIN = 30


def told(verdict: Verdict, lines_max: int = LINES_MAX) -> str:
    """A run in words: what went wrong, what was planned, and what happened."""
    plan = verdict.plan
    lines = [f"seed {plan.seed}, digest {verdict.digest}, {verdict.seconds:.2f} virtual seconds"]
    lines += [f"  steps: {len(plan.steps)}, workers: {plan.workers}, busy every: {plan.busy_every} callbacks"]
    if len(plan.steps) <= STEPS_MAX:
        lines += [f"  {step}" for step in plan.steps]
    lines += [*(f"  fault: {fault}" for fault in plan.faults)]
    trace = [line for line in verdict.trace if not ROUTINE.search(line)]
    if routine := len(verdict.trace) - len(trace):
        lines.append(
            f"  not shown: {routine} calls about leases, times, and scripts that a server must get first"
        )
    if len(trace) > lines_max:
        left_out = f"  … {len(trace) - lines_max} lines are left out here (--lines shows more)"
        first = lines_max // 3
        trace[first : first + len(trace) - lines_max] = [left_out]
    lines += trace
    lines += [f"BROKEN: {problem}" for problem in verdict.problems] or ["no invariant broken"]
    return "\n".join(lines)


def coverage(met: "Counter[tuple[str, str]]") -> str:
    """How often each fault was there at each step of the code."""
    steps = sorted({step for _, step in met})
    faults = sorted({fault for fault, _ in met})
    if not steps:
        return ""
    width = max(map(len, faults))
    # Steps by number, so that a line fits a terminal.
    numbered = "  ".join(f"({number})\u00a0{step}" for number, step in enumerate(steps, 1))
    columns = " " * width + "".join(f"{f'({number})':>8}" for number in range(1, len(steps) + 1))
    rows = [f"{fault:<{width}}" + "".join(f"{met[fault, step]:>8,}" for step in steps) for fault in faults]
    head = "how often each fault was there at each step"
    return "\n".join(["", head, *wrap(numbered, LINE_CHARACTERS), columns, *rows])


def awaited_steps(awaited: "Counter[str]", begun: "Counter[str]") -> str:
    """How many faults waited for a step of the code, and how many have begun at it."""
    if not awaited:
        return ""
    width = max(map(len, awaited))
    head = f"{'faults that wait for a step':<{width}}  {'waited':>7}  {'began':>7}"
    rows = [f"{step:<{width}}  {awaited[step]:>7,}  {begun[step]:>7,}" for step in sorted(awaited)]
    return "\n".join(["", head, *rows])


def never_reached(awaited: "Counter[str]", begun: "Counter[str]") -> list[str]:
    """Steps at which no fault begins, although many wait: a hole in the simulator. Their name is wrong, or no
    history gets there.
    """
    return [step for step in sorted(awaited) if awaited[step] >= WAITED_MIN and not begun[step]]
