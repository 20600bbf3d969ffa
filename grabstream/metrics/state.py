"""Whether a process is ready."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple


class State(NamedTuple):
    """Whether a process is ready: the roles that have not started, and whether each server answers."""

    missing: tuple[str, ...]
    servers: Mapping[str, bool]
    is_stopping: bool = False

    @property
    def is_ready(self) -> bool:
        """Whether all roles have started, all servers answer, and the process is not being stopped."""
        return not (self.missing or self.is_stopping) and all(self.servers.values())

    def document(self) -> dict[str, Any]:
        """The state as JSON."""
        return {
            "status": "ready" if self.is_ready else "stopping" if self.is_stopping else "not ready",
            "roles_not_started": list(self.missing),
            "servers": {name: "answers" if up else "does not answer" for name, up in self.servers.items()},
        }


Ask = Callable[[], Awaitable[State]]
