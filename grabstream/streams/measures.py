"""The counters of a worker (`runtime/measures.py`): one object for all roles of the process."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from grabstream.runtime.measures import WORK_SECONDS_BOUNDS, GateMeasures, Histogram


class RelayMeasures:
    """Counters of a worker's relays. A cycle is one block: appended to the journal, and trimmed from the
    outbox.
    """

    def __init__(self) -> None:
        self.cycle_seconds = Histogram(WORK_SECONDS_BOUNDS)
        self.events = 0
        self.takeovers = 0
        #: Attempts that ended, by the reason: the shard was taken over by another relay (`stepped_down`), it
        #: stays fenced (`fenced`), or a server did not answer (`trouble`).
        self.ended = {"stepped_down": 0, "fenced": 0, "trouble": 0}


class ProjectionMeasures:
    """Counters of one projection of a worker: written events, and the seconds of its transactions."""

    def __init__(self) -> None:
        self.events = 0
        #: The last event written, of each shard that this worker knows.
        self.seqs: dict[int, int] = {}
        self.transaction_seconds = Histogram(WORK_SECONDS_BOUNDS)
        #: Attempts that failed, and are repeated.
        self.failures = 0
        #: Records of the journal that do not count, since no known relay signed them.
        self.ignored = 0


class WorkerMeasures:
    """Counters of the roles of a worker."""

    def __init__(self) -> None:
        self.gate = GateMeasures()
        self.relay = RelayMeasures()
        self.projections: dict[str, ProjectionMeasures] = defaultdict(ProjectionMeasures)
        #: Work handled by sweepers, by function: holds (`expire`), offers (`sweep`, `forget`).
        self.swept: dict[str, int] = defaultdict(int)
        #: Recoveries of shards by kind, and the decisions that they found lost.
        self.recoveries = {"behind": 0, "other": 0}
        self.lost_decisions = 0
        #: Restarts of roles that failed or ended unasked, by role.
        self.restarts: dict[str, int] = defaultdict(int)
        #: Elements of the topics of commands that were set aside in the topic of rejected bytes.
        self.rejected = 0
        #: Requests of webhooks, by whether the receiver took the event.
        self.webhooks = {"delivered": 0, "failed": 0}
        #: The shards whose leases the worker holds.
        self.leases_held: Callable[[], Sequence[int]] = tuple
        #: For each of them, whether the worker has taken it over and relays it.
        self.shards_relayed: Callable[[], Mapping[int, bool]] = dict
        #: Commands in the queue of the decider's gate, and its script calls in flight.
        self.gate_load: Callable[[], tuple[int, int]] = lambda: (0, 0)
        #: Records that are not answered yet, in the partitions of this worker's deciders, by topic.
        self.records_waiting: dict[str, Callable[[], int]] = {}
