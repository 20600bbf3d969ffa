"""What a gateway counts while it works (`runtime/measures.py`)."""

from collections import defaultdict
from collections.abc import Callable
from typing import Final

from grabstream.runtime.measures import WORK_SECONDS_BOUNDS, Histogram

#: The operation of a request that no route takes, or that was refused before its route was known.
NO_OPERATION: Final = "none"


class OperationMeasures:
    """The requests of one operation: by status, and their seconds, from head to answer."""

    def __init__(self) -> None:
        #: 500 from the start, so that the first one is an increase of the metric.
        self.statuses: dict[int, int] = defaultdict(int, {500: 0})
        self.seconds = Histogram(WORK_SECONDS_BOUNDS)


class StreamMeasures:
    """Streams of events: the events sent on them, and the streams whose clients did not take events in time.
    `behind`: it reads from PostgreSQL what had no room in memory. `ended`: its client must reconnect.
    """

    def __init__(self) -> None:
        self.events = 0
        self.slow = {"behind": 0, "ended": 0}


class GatewayMeasures:
    """The requests of a gateway, by operation; and those refused for lack of room, by the bound that was
    reached. `commands` are those above their own bound (`command_bound.py`).
    """

    def __init__(self) -> None:
        self.operations: dict[str, OperationMeasures] = defaultdict(OperationMeasures)
        self.shed = {
            "requests": 0, "commands": 0, "questions": 0, "connections": 0, "connections_of_address": 0,
            "streams": 0,
        }  # fmt: skip
        #: Connections of clients now.
        self.connections: Callable[[], int] = int
