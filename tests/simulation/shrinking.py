"""The shortest history that still fails: faults and steps are taken out of a plan as long as it does."""

from collections.abc import Callable, Sequence
from typing import Any, Final

from tests.simulation.plan import Plan
from tests.simulation.world import Verdict

ATTEMPTS_MAX: Final = 80


def shortened(failed: Verdict, play: Callable[[Plan], Verdict]) -> Verdict:
    """The verdict of the shortest plan that was found to fail; any failure counts."""
    attempts = 0

    def fails(plan: Plan) -> Verdict | None:
        nonlocal attempts
        attempts += 1
        verdict = play(plan)
        return verdict if verdict.problems else None

    for name in ("faults", "steps"):
        size = max(1, len(getattr(failed.plan, name)) // 2)
        while size:
            start = 0
            while start < len(getattr(failed.plan, name)) and attempts < ATTEMPTS_MAX:
                items: Sequence[Any] = getattr(failed.plan, name)
                rest: Any = {name: [*items[:start], *items[start + size :]]}
                shorter = failed.plan._replace(**rest)
                found = fails(shorter)
                if found is None:
                    start += size
                else:
                    failed = found
            size = size // 2 if attempts < ATTEMPTS_MAX else 0
    return failed
