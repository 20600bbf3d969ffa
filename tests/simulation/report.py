"""What people read of runs: a failure with its timeline, and the table of what was met."""

from collections import Counter

from tests.simulation.world import Verdict

LINES_MAX = 400


def told(verdict: Verdict) -> str:
    """A run in words: what went wrong, what was planned, and what happened."""
    plan = verdict.plan
    lines = [f"seed {plan.seed}, digest {verdict.digest}, {verdict.seconds:.2f} virtual seconds"]
    lines += [f"  steps: {len(plan.steps)}, workers: {plan.workers}, busy every: {plan.busy_every} callbacks"]
    lines += [*(f"  fault: {fault}" for fault in plan.faults)]
    trace = list(verdict.trace)
    if len(trace) > LINES_MAX:
        lines.append(f"  … {len(trace) - LINES_MAX} earlier lines")
    lines += trace[-LINES_MAX:]
    lines += [f"BROKEN: {problem}" for problem in verdict.problems] or ["no invariant broken"]
    return "\n".join(lines)


def coverage(met: "Counter[tuple[str, str]]") -> str:
    """How often each fault was there at each step of the code."""
    steps = sorted({step for _, step in met})
    faults = sorted({fault for fault, _ in met})
    if not steps:
        return ""
    width = max(map(len, faults))
    head = " " * width + "".join(f"  {step:>20}" for step in steps)
    rows = [f"{fault:<{width}}" + "".join(f"  {met[fault, step]:>20,}" for step in steps) for fault in faults]
    return "\n".join([head, *rows])
