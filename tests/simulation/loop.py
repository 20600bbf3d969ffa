"""An asyncio loop with a virtual clock, in which processes can be killed and paused at any await.

Nothing waits: when no callback is ready, the clock jumps to the next timer. The callbacks of one process run
in the order that asyncio promises. What varies from seed to seed is the order of processes within a round,
how long each answer of a server takes, and when a process of a busy machine stands still for some ms, so that
answers and timers pile up before it continues.

A process is a value of `PROCESS` in the context of a callback. The callbacks of a killed process are dropped,
so none of its code runs any more, not even its clean-up. Those of a paused process wait until it wakes.
"""

import asyncio
import contextvars
import heapq
import random
from collections.abc import Callable, Coroutine
from typing import Any, Final

#: Callbacks in one run, before it counts as one that never ends.
CALLBACKS_MAX: Final = 3_000_000
#: For how long a process of a busy machine stands still, in virtual seconds.
BUSY_SECONDS: Final = (0.0005, 0.004, 0.03)


class Endless(Exception):
    """A run that does not end: nothing is left to happen, or too much happened."""


class Process:
    """A process of the simulated system, from its start until it is killed or ends."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.paused = False
        #: Whether it stands still for a moment, since the machine is busy.
        self.busy = False
        self.waiting: list[asyncio.Handle] = []
        #: Suspended coroutines run their clean-up when they are freed: a killed one must be kept until the
        #: end.
        self.tasks: list[asyncio.Task[Any]] = []

    def __repr__(self) -> str:
        return self.name


PROCESS: Final[contextvars.ContextVar[Process | None]] = contextvars.ContextVar("process", default=None)


class SimulatedTask(asyncio.Task[Any]):
    """A task whose hash is its number, so that sets of tasks have the same order in every run."""

    def __init__(self, number: int, work: Coroutine[Any, Any, Any], **options: Any) -> None:
        self.number = number
        super().__init__(work, **options)

    def __hash__(self) -> int:
        return self.number


class SimulatedFuture(asyncio.Future[Any]):
    """A future whose hash is its number."""

    number: int

    def __hash__(self) -> int:
        return self.number


class SimulatedLoop(asyncio.BaseEventLoop):
    """The loop of one run; `time` is virtual seconds from its beginning. `draw` decides on the order of
    processes; on average, one of `busy_every` callbacks of processes finds the machine busy (0: none does).
    """

    def __init__(self, draw: random.Random, busy_every: int = 0) -> None:
        super().__init__()
        self._draw = draw
        self._busy_every = busy_every
        self._until_busy = self._drawn_until_busy()
        self.now = 0.0
        self.callbacks = 0
        self._numbers = 0
        self._ready: Any
        #: Each with its time: so the heap compares numbers, and not handles in Python.
        self._scheduled: list[tuple[float, asyncio.TimerHandle]]
        self._stopping: bool
        #: The context of what belongs to no process; one callback runs at a time.
        self._of_world = contextvars.Context()
        self.failures: list[str] = []
        #: Called with each process that is killed.
        self.killed: Callable[[Process], None] = lambda process: None
        self.set_exception_handler(self._failed)

    def time(self) -> float:
        """Virtual seconds since the run began."""
        return self.now

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    #: Each future and task asks three times; nothing is quicker than a type that gives False.
    get_debug = bool  # type: ignore[assignment]

    def create_future(self) -> asyncio.Future[Any]:
        """A future whose hash is its number."""
        self._numbers = number = self._numbers + 1
        future = SimulatedFuture(loop=self)
        future.number = number
        return future

    def create_task(  # type: ignore[override]
        self,
        coro: Coroutine[Any, Any, Any],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[Any]:
        """A task whose hash is its number; a process keeps its tasks."""
        process = context.get(PROCESS) if context else PROCESS.get()
        number = self._next_number()
        task = SimulatedTask(number, coro, loop=self, name=name or f"task {number}", context=context)
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        if process is not None:
            process.tasks.append(task)
            if len(process.tasks) > 1_000:
                process.tasks = [one for one in process.tasks if not one.done()]
        return task

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> Any:
        """Runs it at once: no threads."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _check_closed(self) -> None:
        """After the end, clean-up code may still ask for callbacks: nothing comes of that."""

    def spawn(self, process: Process, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Runs a coroutine, and all that it starts, as code of a process."""
        context = contextvars.Context()
        context.run(PROCESS.set, process)
        return self.create_task(work, name=process.name, context=context)

    # The next three do what asyncio's do, in one step: most of a run is callbacks.

    def call_soon(
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """Calls back in the next round."""
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Calls back after virtual seconds."""
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Calls back at a virtual time."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._scheduled, (when, timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It stays in the heap until its time."""

    def call_at_world(self, delay: float, callback: Callable[..., Any], *args: Any) -> asyncio.TimerHandle:
        """Like `call_later`, for what belongs to no process: it happens although its sender has died."""
        return self.call_at(self.now + delay, callback, *args, context=self._of_world)

    def kill(self, process: Process) -> None:
        """From here on, no code of the process runs."""
        process.alive = False
        process.waiting.clear()
        self.killed(process)

    def wake(self, process: Process) -> None:
        """Continues a paused process."""
        process.paused = False
        self._continue(process)

    def _continue(self, process: Process) -> None:
        if not process.paused and not process.busy:
            self._ready.extend(process.waiting)
            process.waiting.clear()

    def _drawn_until_busy(self) -> float:
        """Callbacks until the next one that finds the machine busy."""
        return 1 + self._draw.expovariate(1 / self._busy_every) if self._busy_every else float("inf")

    def _stand_still(self, process: Process) -> None:
        process.busy = True
        seconds = self._draw.choice(BUSY_SECONDS) * self._draw.uniform(0.5, 1.5)
        self.call_at_world(seconds, self._stand_no_more, process)
        self._until_busy = self._drawn_until_busy()

    def _stand_no_more(self, process: Process) -> None:
        process.busy = False
        self._continue(process)

    def _mix(self) -> None:
        """Draws the order of the processes whose callbacks are ready."""
        ready = self._ready
        places: dict[Process | None, float] = {}
        keys = []
        for handle in ready:
            process = handle._context.get(PROCESS)
            if process not in places:
                places[process] = self._draw.random()
            keys.append(places[process])
        if len(places) > 1:
            numbers = sorted(range(len(keys)), key=keys.__getitem__)
            handles = [ready[number] for number in numbers]
            ready.clear()
            ready.extend(handles)

    def _run_once(self) -> None:
        """Runs until the loop is stopped."""
        scheduled, ready = self._scheduled, self._ready
        while not self._stopping:
            while scheduled and scheduled[0][1].cancelled():
                heapq.heappop(scheduled)
            if not ready:
                if not scheduled:
                    raise Endless(f"nothing is left to happen after {self.now:.3f} s")
                self.now = max(self.now, scheduled[0][0])
            while scheduled and scheduled[0][0] <= self.now:
                ready.append(heapq.heappop(scheduled)[1])
            if len(ready) > 1:
                self._mix()
            for _ in range(len(ready)):
                handle = ready.popleft()
                if handle.cancelled():
                    continue
                process = handle._context.get(PROCESS)
                if process is not None:
                    if not process.alive:
                        continue
                    self._until_busy -= 1
                    if self._until_busy < 0:
                        self._stand_still(process)
                    if process.paused or process.busy:
                        process.waiting.append(handle)
                        continue
                handle._run()
            self.callbacks += 1
            if self.callbacks > CALLBACKS_MAX:
                raise Endless(f"{CALLBACKS_MAX} rounds of callbacks after {self.now:.3f} s")

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Uncaught errors, and what a callback of the simulation raised."""
        if "never retrieved" in str(context.get("message")):
            return
        self.failures.append(f"{context.get('message')}: {context.get('exception')!r}")

    def _process_events(self, events: Any) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """There are no other threads to wake it."""
