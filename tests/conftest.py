"""Fixtures of all tests: the servers in the settings; for each test its own prefix, topics, schema and keys;
worker processes; and polling with a bound. Also which tests run together in a parallel run.
"""

import asyncio
import contextlib
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from psycopg import AsyncConnection
from psycopg.conninfo import conninfo_to_dict
from pydantic import SecretStr

from grabstream.connections.opening import open_redis
from grabstream.connections.redis_servers import masters
from grabstream.crypto.sealing import new_seal_key
from grabstream.settings import Settings, child_environment, load_settings
from grabstream.workshop.rehearsal.stage import take_down
from grabstream.workshop.services import LocalServices, free_ports, local
from grabstream.workshop.services.servers import PROJECT
from tests import tiers
from tests.support import forks
from tests.support.systems import make_system

# jsonschema imports it for a format that no schema here has, and it takes 3 s to compile its grammars.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]

#: Whether `make nightly` plays, which also lengthens some tests.
NIGHTLY = tiers.TIER == tiers.NIGHTLY


def examples(count: int) -> int:
    """How many random cases a property gets in the tier that is played, where the long tier draws `count`:
    every change plays a quarter of them, always the same ones; `make nightly` plays ten times as many.
    """
    if tiers.TIER == tiers.TEST:
        return max(1, count // 4)
    return 10 * count if NIGHTLY else count


hypothesis_settings.register_profile(
    "tests",
    max_examples=examples(100),
    # New cases are for the long tier: they must not block an unrelated change.
    derandomize=tiers.TIER == tiers.TEST,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
hypothesis_settings.load_profile("tests")

#: Tests run as the role that docs/operating.md describes, not as a superuser. The role is never dropped,
#: since several runs may share a server.
TEST_ROLE = "grabstream_test_system"

#: Tests that kill servers or processes, check time bounds, or start their own servers. In a parallel run,
#: one process runs all of them, one after the other.
ONE_BY_ONE = (
    "tests/drill/", "tests/gateway/test_faults.py", "tests/gateway/test_stopping.py",
    "tests/gate/test_burst.py", "tests/metrics/", "tests/ops/test_backup.py",
    "tests/ops/test_logging.py", "tests/ops/test_secured.py",
    "tests/ops/test_side_by_side.py", "tests/workshop/rehearsal/test_rehearsal.py",
    "tests/workshop/rehearsal/test_stories.py",
    "tests/streams/test_cluster.py", "tests/streams/test_hanging.py", "tests/streams/test_kill.py",
    "tests/streams/test_sale.py", "tests/streams/rebuilding/test_rebuild",
    "tests/streams/rebuilding/test_restore.py", "tests/streams/relaying/test_leases.py",
    "tests/streams/relaying/test_recovery.py", "tests/streams/relaying/test_spread.py",
    "tests/test_nightly.py",
)  # fmt: skip


#: How long gates of tests wait for answers.
GATE_TIMEOUT_MS = 20_000
#: Files of long tests that share nothing: in a parallel run, each test goes to any free process. The tests of
#: every other file stay in one process.
ANYWHERE = (
    "tests/lua/histories/test_state_machine.py",
    "tests/lua/histories/test_long_histories.py",
    "tests/test_mutations.py",
    "tests/ops/commands/test_offer_verbs.py",
)


def some_by_tier(cases: Iterable[Any], one_in: int) -> list[Any]:
    """Cases of a parametrized test of which the long tier plays one in `one_in`, `make test` a fifth of
    those, and `make nightly` all.
    """
    return [
        case if number % (5 * one_in) == 0
        else pytest.param(case, marks=pytest.mark.nightly if number % one_in else pytest.mark.long)
        for number, case in enumerate(cases)
    ]  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record", action="store_true", help="Add the durations of this whole run to tests/durations.json."
    )
    parser.addoption(
        "--stop-after", type=float, default=math.inf, metavar="SECONDS", help="Begin no test after this time."
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the tests of the tier. In a parallel run, the groups of tests that take longest begin first."""
    tiers.choose(config, items)
    if "PYTEST_XDIST_WORKER" in os.environ:
        tiers.longest_first(items, _group_of)


def pytest_configure(config: pytest.Config) -> None:
    """Gives each process of a parallel run its own range of ports, so that a server that a test has killed
    finds its port free when it starts again. And gives Ctrl-C its meaning again where it is ignored.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(tiers.Run(config))
    # A shell that is not interactive ignores SIGINT in what it runs in the background, and all processes that
    # tests start would inherit it.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    number, count = (
        int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]),
        int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")),
    )
    first, last = local.PORT_RANGE
    size = (last - first) // count
    local.PORT_RANGE = (first + number * size, first + (number + 1) * size - 1)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Groups the tests that one process of a parallel run must run. (With pytest 9, xdist 3.8 does not group
    by marks.)
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return _group_of(nodeid)

    # The groups keep the order of the collection.
    config.option.loadscopereorder = False
    return Scheduler(config, log)


def _group_of(nodeid: str) -> str:
    """The name of the group of tests that one process runs."""
    if nodeid.startswith(ONE_BY_ONE):
        return "one by one"
    return nodeid if nodeid.startswith(ANYWHERE) else nodeid.partition("::")[0]


@pytest.fixture(scope="session")
def servers() -> Settings:
    """The settings of servers that answer. If they do not, tests are skipped, or fail if `CI` is set."""
    # Also of the processes that tests start: on a busy machine, an answer may take longer than the usual 2 s.
    os.environ.setdefault("GRAB_GATE_TIMEOUT_MS", str(GATE_TIMEOUT_MS))
    settings = load_settings()
    settings = settings.model_copy(update={"seal_keys": SecretStr(new_seal_key())})
    try:
        asyncio.run(_answers(settings))
        return settings.model_copy(
            update={"postgres": asyncio.run(as_role(settings.postgres, "role", TEST_ROLE))}
        )
    except redis.RedisError as error:
        if os.environ.get("CI"):
            pytest.fail(f"no servers: {error}", pytrace=False)
        pytest.skip(f"no servers ({error}): `make up` starts them")


async def as_role(postgres: str, block: str, role: str, schema: str = "") -> str:
    """Creates a role, if it does not exist, with exactly the rights that a block of docs/operating.md grants;
    returns the DSN of the role.
    """
    [statements] = re.findall(
        rf"^<!-- {block} -->\n```sql\n(.*?)^```",
        (PROJECT / "docs" / "operating.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    database = conninfo_to_dict(postgres)["dbname"]
    statements = statements.replace("DATABASE grabstream", f"DATABASE {database}").replace(
        "SCHEMA grabstream", f"SCHEMA {schema}"
    )
    async with await AsyncConnection.connect(postgres, autocommit=True) as connection:
        for statement in re.sub(r"grabstream_(system|reader)", role, statements).split(";"):
            with contextlib.suppress(
                psycopg.errors.DuplicateObject, psycopg.errors.UniqueViolation, psycopg.errors.InternalError
            ):
                await connection.execute(statement.encode())
    return re.sub(r"(?<=://)[^:@/]+(?=[:@])", role, postgres)


async def _answers(settings: Settings) -> None:
    client = open_redis(settings)
    try:
        for _, server in await masters(client):
            await server.ping()
    finally:
        await client.aclose()


@pytest.fixture
def prefix() -> str:
    """A name that no other test uses: the prefix of topics and keys, and the schema."""
    return f"test{secrets.token_hex(5)}"


@pytest.fixture
def settings(servers: Settings, prefix: str) -> Settings:
    """The settings of a system that belongs to this test; nothing of it exists yet."""
    return servers.model_copy(update={"prefix": prefix, "schema_": prefix})


@pytest.fixture
async def system(settings: Settings) -> AsyncIterator[Settings]:
    """The settings of a system with topics and tables; they are removed after the test."""
    await make_system(settings)
    yield settings
    await take_down(settings)


@pytest.fixture
async def redis_client(settings: Settings) -> AsyncIterator["redis.asyncio.Redis"]:
    """A Redis client; the keys of this test's prefix are deleted after the test."""
    client = open_redis(settings)
    yield client
    keys = [key async for key in client.scan_iter(match=f"{settings.prefix}:*", count=1_000)]
    if keys:
        await client.unlink(*keys)
    await client.aclose()


class Worker:
    """A `grabstream worker` process of a test."""

    def __init__(self, settings: Settings, roles: str, log: Path, **overrides: str) -> None:
        environment = child_environment(
            prefix=settings.prefix, schema=settings.schema_, redis_url=settings.redis_url,
            kafka=settings.kafka,
            postgres=settings.postgres, shards=str(settings.shards),
            seal_keys=settings.seal_keys.get_secret_value(), **overrides,
        )  # fmt: skip
        words = ("-v", "worker", "--roles", roles)
        self.log = log
        self._output = log.open("ab")
        self.process = forks.start(words, environment, None, self._output, self._output)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """kill -9."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        try:
            return self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the worker did not stop: {self.log.read_text()[-2000:]}") from None
        finally:
            self._output.close()


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    """Returns a function that starts workers; those still running after the test are killed."""
    started: list[Worker] = []

    def start(
        settings: Settings, roles: str = "decide,relay,sweep,project,publish", **overrides: str
    ) -> Worker:
        started.append(Worker(settings, roles, tmp_path / f"worker-{len(started)}.log", **overrides))
        return started[-1]

    yield start
    for process in started:
        if process.process.poll() is None:
            process.signal(signal.SIGCONT)
            process.kill()


@pytest.fixture(scope="module")
def private_services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServices]:
    """Servers that belong to one test module, which may kill them: on free ports, in a temporary
    directory.
    """
    ports = free_ports(4)
    services = LocalServices(tmp_path_factory.mktemp("services"), *ports, kafka_heap_mb=512)
    services.up()
    yield services
    services.remove()


#: Bounds of waits are written for a machine that does nothing else. They end what hangs, and judge no speed.
BUSY_MACHINE = 3


async def until(condition: Callable[[], object], seconds: float = 60.0, what: str = "it") -> object:
    """Polls a condition (sync or async) until its value is true, and returns that value. Raises
    AssertionError after `seconds` of an idle machine.
    """
    seconds *= BUSY_MACHINE
    deadline = asyncio.get_running_loop().time() + seconds
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError(f"{what} did not happen within {seconds} s")
        await asyncio.sleep(0.05)


def wait_until(condition: Callable[[], object], seconds: float = 60.0, what: str = "it") -> None:
    """`until` for fixtures without an event loop."""
    seconds *= BUSY_MACHINE
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not happen within {seconds} s")
        time.sleep(0.05)
