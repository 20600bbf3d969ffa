"""Processes of the command line that begin with its modules imported. A server imports them once and forks a
process for each call. Otherwise each of the several hundred processes of a run of all tests would import them
again, which takes longer than most of what they do.

A process has its own arguments, environment, folder and files, as one that is started. Some tests of
`tests/ops/commands/test_cli.py` and `tests/test_package.py` start the program itself.
"""

import atexit
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

#: The largest request: arguments and environment.
REQUEST_BYTES_MAX: Final = 150_000
MODULES: Final = (
    "grabstream.streams.worker", "grabstream.streams.projecting.agents", "grabstream.ops.console.endings",
)  # fmt: skip


class Forked:
    """A process of the command line, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, connection: socket.socket, args: Sequence[str]) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self.args = args
        self.returncode: int | None = None
        self.pid = self._receive(None)

    def _receive(self, timeout: float | None) -> int:
        """The next number from the server: the process id, then the exit code; raises TimeoutExpired."""
        ready, _, _ = select.select([self._connection], [], [], timeout)
        if not ready:
            raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
        number = self._connection.recv(8)
        if not number:
            raise RuntimeError(f"the server of forks has ended: {self.args}")
        return int.from_bytes(number, "big", signed=True)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end of the process; returns its exit code, or minus the signal that ended it."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._lock.acquire(timeout=-1 if timeout is None else timeout):
            raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
        try:
            if self.returncode is None:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                self.returncode = self._receive(left)
                self._connection.close()
            return self.returncode
        finally:
            self._lock.release()

    def poll(self) -> int | None:
        """The exit code; None while the process runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        """Sends a signal, if the process has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


class _Server:
    """The connection to the server, which is started at the first call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control: socket.socket | None = None

    def fork(self, request: Mapping[str, Any], files: Sequence[int]) -> socket.socket:
        """Asks for a process; returns the connection on which its id and its exit code come."""
        ours, theirs = socket.socketpair()
        with self._lock, theirs:
            control = self._control = self._control or self._started()
            text = json.dumps(request).encode()
            assert len(text) <= REQUEST_BYTES_MAX
            socket.send_fds(control, [text], [*files, theirs.fileno()])
        return ours

    def _started(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            server = subprocess.Popen(
                [sys.executable, "-m", "tests.support.forks", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=Path(__file__).parent.parent.parent,
                stdin=subprocess.DEVNULL,
            )

        def end() -> None:
            ours.close()
            server.wait()

        atexit.register(end)
        return ours


_server: Final = _Server()


def start(
    words: Sequence[str],
    environment: Mapping[str, str],
    stdin: int | IO[Any] | None,
    stdout: int | IO[Any],
    stderr: int | IO[Any],
    folder: Path | None = None,
) -> Forked:
    """Starts `grabstream` with these arguments, environment and folder. Without `stdin` it reads nothing."""
    with open(os.devnull, "rb") as nothing:
        files = [
            file if isinstance(file, int) else file.fileno() for file in (stdin or nothing, stdout, stderr)
        ]
        request = {
            "words": list(words),
            "environment": dict(environment),
            "folder": str(folder or Path.cwd()),
        }
        return Forked(_server.fork(request, files), words)


# -- the server ----------------------------------------------------------------------------------------------


def _import_all() -> None:
    from grabstream.ops.cli import VERBS, module_of

    for module in (*map(module_of, VERBS), *MODULES):
        importlib.import_module(module)


def _serve(control: socket.socket) -> Mapping[str, Any]:
    """Forks processes until its client is gone; returns only in a forked process, with its request."""
    children: dict[int, tuple[int, socket.socket]] = {}
    while True:
        ready, _, _ = select.select([control, *children], [], [])
        for pidfd in ready:
            if isinstance(pidfd, int):
                pid, connection = children.pop(pidfd)
                _, status = os.waitpid(pid, 0)
                os.close(pidfd)
                _send(connection, os.waitstatus_to_exitcode(status))
                connection.close()
        if control not in ready:
            continue
        text, files, _, _ = socket.recv_fds(control, REQUEST_BYTES_MAX, 4)
        if not text:
            sys.exit(0)
        connection = socket.socket(fileno=files.pop())
        if (pid := os.fork()) == 0:
            control.close()
            connection.close()
            for pidfd, (_, other) in children.items():
                os.close(pidfd)
                other.close()
            for number, file in enumerate(files):
                os.dup2(file, number)
                os.close(file)
            return dict(json.loads(text))
        for file in files:
            os.close(file)
        _send(connection, pid)
        children[os.pidfd_open(pid)] = pid, connection


def _send(connection: socket.socket, number: int) -> None:
    try:
        connection.sendall(number.to_bytes(8, "big", signed=True))
    except OSError:
        # It is no longer awaited.
        return


def main() -> None:
    """The server; in a process that it has forked, the command line."""
    # Ctrl-C goes to every process of a terminal: the client ends, and with it the server.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _import_all()
    assert threading.active_count() == 1
    gc.collect()
    gc.freeze()
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["environment"])
    time.tzset()
    os.chdir(request["folder"])
    # Click names a program by these two.
    sys.modules["__main__"].__package__ = ""
    sys.argv = ["grabstream", *request["words"]]
    from grabstream.ops.cli import main as run

    run()


if __name__ == "__main__":
    main()
