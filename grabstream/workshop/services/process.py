"""One server process: started once, found again by its pid file, and never confused with another process."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from grabstream.settings import ServerFailed, child_environment

STOP_SECONDS = 20.0
#: A broker needs more than a minute on a machine with a load of 20 a core; one that has ended is noticed at
#: once.
START_SECONDS = 180.0
POLL_SECONDS = 0.05


class ServiceError(ServerFailed):
    """A server cannot be started or stopped; the text says why, and what to do."""


class Process:
    """A server process under `directory`. Subclasses define how it is prepared and started, and when it is
    ready.
    """

    #: `redis`, `kafka` or `postgres`; `name` distinguishes servers of one kind.
    kind = "server"

    def __init__(self, directory: Path, port: int, name: str | None = None) -> None:
        self.directory = directory
        self.port = port
        self.name = name or self.kind

    # -- defined by subclasses -------------------------------------------------------------------------------

    def prepare(self, report: Callable[[str], None]) -> None:
        """Installs and initializes what is missing."""

    def command(self) -> list[str]:
        """The command that runs the server in the foreground."""
        raise NotImplementedError

    def ready(self) -> bool:
        """Whether the server serves its clients."""
        raise NotImplementedError

    def user(self) -> str | None:
        """The system user that runs the server; None for the current user."""
        return None

    # -- start and stop --------------------------------------------------------------------------------------

    @property
    def pid_file(self) -> Path:
        """The file with the process id and start time."""
        return self.directory / f"{self.name}.pid"

    @property
    def log_file(self) -> Path:
        """The file with the server's output."""
        return self.directory / f"{self.name}.log"

    @property
    def pid(self) -> int | None:
        """The id of the running process, or None. A process with the same id and another start time is
        another process.
        """
        try:
            pid, started = self.pid_file.read_text().split()
        except (FileNotFoundError, ValueError):
            return None
        return int(pid) if _start_time(int(pid)) == started else None

    def start(self, report: Callable[[str], None] = lambda line: None) -> bool:
        """Starts the server unless it runs, and waits until it is ready. Returns whether it started it;
        raises ServiceError.
        """
        if self.pid is not None:
            self._wait_until_ready()
            return False
        self.directory.mkdir(parents=True, exist_ok=True)
        self.prepare(report)
        self._refuse_taken_port()
        with self.log_file.open("ab") as output:
            process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                user=self.user(),
                cwd="/",
            )
        self.pid_file.write_text(f"{process.pid} {_start_time(process.pid)}")
        self._wait_until_ready(process)
        report(f"{self.name} listens on 127.0.0.1:{self.port}")
        return True

    def stop(self) -> bool:
        """Stops the server with SIGTERM, after STOP_SECONDS with SIGKILL; returns whether it ran."""
        return self._end(signal.SIGTERM)

    def kill(self) -> bool:
        """Kills the server with SIGKILL, for crash tests; returns whether it ran."""
        return self._end(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal, such as SIGSTOP; raises ServiceError when the server does not run."""
        pid = self.pid
        if pid is None:
            raise ServiceError(f"{self.name} does not run")
        os.kill(pid, number)

    def _end(self, first_signal: signal.Signals) -> bool:
        pid = self.pid
        if pid is None:
            self.pid_file.unlink(missing_ok=True)
            return False
        os.kill(pid, first_signal)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)  # a suspended process does not handle SIGTERM
        deadline = time.monotonic() + STOP_SECONDS
        while self._is_running(pid):
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_SECONDS)
        self.pid_file.unlink(missing_ok=True)
        return True

    def _is_running(self, pid: int) -> bool:
        """Whether any thread of the process runs: a zombie whose other threads still hold the port counts as
        running.
        """
        try:
            return os.waitpid(pid, os.WNOHANG)[0] == 0
        except ChildProcessError:  # not started by this process
            tasks = Path(f"/proc/{pid}/task")
            return self.pid is not None or (tasks.exists() and len(list(tasks.iterdir())) > 1)

    def _wait_until_ready(self, process: "subprocess.Popen[bytes] | None" = None) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self.ready():
            if process is not None and process.poll() is not None:
                self.pid_file.unlink(missing_ok=True)
                raise ServiceError(f"{self.name} ended with code {process.returncode}: {self._end_of_log()}")
            if time.monotonic() > deadline:
                raise ServiceError(f"{self.name} does not answer on port {self.port}: {self._end_of_log()}")
            time.sleep(POLL_SECONDS)

    def _end_of_log(self) -> str:
        lines = self.log_file.read_text(errors="replace").splitlines() if self.log_file.exists() else []
        return f"see {self.log_file}, which ends with: " + " / ".join(lines[-3:])

    def _refuse_taken_port(self) -> None:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", self.port))
            except OSError:
                raise ServiceError(
                    f"port {self.port} for {self.name} is taken by another process: end that process "
                    f"(`ss -ltnp 'sport = :{self.port}'` shows it), or set another port in {self.setting()}"
                ) from None

    def setting(self) -> str:
        """The setting that points at this kind of server."""
        return {"redis": "GRAB_REDIS_URL", "kafka": "GRAB_KAFKA", "postgres": "GRAB_POSTGRES"}[self.kind]


def _start_time(pid: int) -> str | None:
    """When a process started, in clock ticks since boot; None when it does not exist or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else fields[19]


def install(report: Callable[[str], None], what: str, packages: list[str]) -> None:
    """Installs Debian packages. Raises ServiceError with the command to run when the user is not root, or
    when apt-get fails.
    """
    command = f"apt-get install -y --no-install-recommends {' '.join(packages)}"
    if shutil.which("apt-get") is None:
        raise ServiceError(f"{what} is missing: install it with the package manager of your system")
    if os.geteuid() != 0:
        raise ServiceError(
            f"{what} is missing, and only root may install it: run `sudo {command}`, then try again"
        )
    report(f"installing {' '.join(packages)}")
    # Debian starts a server right after it is installed, unless policy-rc.d forbids it.
    policy = Path("/usr/sbin/policy-rc.d")
    is_new = not policy.exists()
    if is_new:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    try:
        environment = child_environment() | {"DEBIAN_FRONTEND": "noninteractive"}
        for step in ("apt-get update -qq", command):
            done = subprocess.run(step.split(), capture_output=True, text=True, env=environment)
            if done.returncode != 0:
                raise ServiceError(f"`{step}` failed: {done.stderr.strip()[-500:]}")
    finally:
        if is_new:
            policy.unlink()
