"""The command line as a user meets it: help, settings, errors with the fix, exit codes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import redis
from click.testing import CliRunner
from psycopg import AsyncConnection
from rich.console import Console
from rich.progress import Task, TaskID

from grabstream.models.bounds import counted
from grabstream.models.commands import Open, Undecodable, decode_commands
from grabstream.ops import cli
from grabstream.ops.cli import VERBS
from grabstream.ops.commands.read import status
from grabstream.ops.console.progress import bar
from grabstream.settings import Settings, child_environment
from grabstream.workshop.services import free_ports
from grabstream.workshop.services.servers import Redis
from tests.conftest import until
from tests.support.command_line import README, env_of, grabstream, in_a_terminal


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb: str) -> None:
    """In this process; the next test starts the program."""
    done = CliRunner().invoke(cli.grabstream, [verb, "--help"])
    assert done.exit_code == 0, done.output
    assert done.output.startswith(f"Usage: grabstream {verb} ")


@pytest.mark.long
def test_the_program_that_is_started_prints_help_and_errors() -> None:
    def started(*words: str, **settings: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "grabstream.ops.cli", *words]
        environment = child_environment(**settings)
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)

    done = started("close", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert " close [OPTIONS] OFFER" in done.stdout
    done = started("status", redis_url="redis://127.0.0.1:1/0")
    assert done.returncode == 3
    assert "Redis cannot be reached" in done.stderr
    assert "Traceback" not in done.stderr


LIST_MODULES: Final = """
import sys
from grabstream.ops.cli import grabstream
grabstream(sys.argv[1:], standalone_mode=False)
print("modules:", *sys.modules)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "unneeded"),
    [
        ("--help", {"aiohttp", "aiokafka", "asyncio", "faust", "psycopg", "pydantic", "redis", "yaml"}),
        ("config --help", {"aiohttp", "aiokafka", "cryptography.x509", "faust", "psycopg", "redis", "yaml"}),
        ("show --help", {"aiohttp", "faust", "grabstream.streams.worker", "yaml"}),
    ],
)
def test_help_imports_no_libraries_that_it_does_not_need(words: str, unneeded: set[str]) -> None:
    """They take most of the time in which a verb starts."""
    done = subprocess.run(
        [sys.executable, "-c", LIST_MODULES, *words.split()], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    modules = done.stdout.rpartition("modules:")[2].split()
    assert "click" in modules
    assert unneeded.intersection(modules) == set()


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"shards": "0"}, "GRAB_SHARDS"), ({"schema": "a-b"}, "GRAB_SCHEMA"),
        ({"prefix": "a{b}"}, "GRAB_PREFIX"), ({"seal_keys": "k:short"}, "GRAB_SEAL_KEYS"),
    ],
)  # fmt: skip
def test_error_names_the_wrong_setting(settings: dict[str, str], word: str) -> None:
    done = grabstream("config", **settings)
    assert done.returncode == 2
    assert word in done.stderr
    assert "Traceback" not in done.stderr


def test_argument_that_is_not_a_number_is_refused(settings: Settings) -> None:
    done = grabstream("dismiss", "x", "--reason", "r", "--operator", "o", **env_of(settings))
    assert (done.returncode, "'x' is not a valid whole number" in done.stderr) == (2, True), done.stderr


def test_counted_uses_the_singular_for_one() -> None:
    assert [counted(number, "parts") for number in (0, 1, 2_000)] == ["0 parts", "1 part", "2,000 parts"]


def test_worker_without_seal_keys_is_refused_with_the_way_out(tmp_path: Path) -> None:
    done = grabstream("worker", folder=tmp_path, seal_keys="")
    assert done.returncode == 2
    assert "GRAB_SEAL_KEYS" in done.stderr
    assert "--new-seal-key" in done.stderr


# A worker that sweeps without relaying would have leases of shards that are then not relayed.
@pytest.mark.parametrize(
    ("roles", "words"), [("decide,dance", "dance"), ("decide,sweep", "needs the role relay")]
)
def test_roles_that_cannot_work_are_refused(roles: str, words: str) -> None:
    key = grabstream("config", "--new-seal-key").stdout.strip()
    done = grabstream("worker", "--roles", roles, seal_keys=key)
    assert (done.returncode, words in " ".join(done.stderr.split())) == (2, True), done.stderr


@pytest.mark.parametrize(
    ("verb", "setting", "value"),
    [
        ("status", "redis_url", "redis://127.0.0.1:1/0"),
        ("init", "kafka", "127.0.0.1:1"),
        ("show", "postgres", "postgresql://127.0.0.1:1/x"),
    ],
)
def test_exit_code_is_3_when_a_server_is_away(
    settings: Settings, verb: str, setting: str, value: str
) -> None:
    done = grabstream(verb, *(["offer"] if verb == "show" else []), **{**env_of(settings), setting: value})
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    # The error of Kafka is named once.
    assert done.stderr.count("KafkaConnectionError") == (setting == "kafka"), done.stderr


@pytest.mark.long
async def test_status_shows_unknown_values_as_unknown(system: Settings) -> None:
    """Without PostgreSQL, its values are unknown, not 0. A read model with more events than Redis is ahead of
    it.
    """
    own = {**env_of(system), "postgres": "postgresql://127.0.0.1:1/x"}
    done = grabstream("status", "--json", **own)
    assert done.returncode == 3
    found = json.loads(done.stdout)
    assert [found[name] for name in ("verified", "read_models", "stopped")] == [None] * 3
    assert len(found["shards"]) == 8
    assert all(one["calls"] > 0 and one["longest_ms_at_most"] > 0 for one in found["script_calls"])
    done = grabstream("status", **own)
    assert done.returncode == 3, done.stderr
    [row] = [line for line in done.stdout.splitlines() if re.match(r"│ +3 │", line)]
    assert "–" in row
    async with await AsyncConnection.connect(system.postgres, autocommit=True) as connection:
        await connection.execute(
            f"UPDATE {system.schema_}_ledger_1.projection_cursors SET seq = 10011 WHERE shard = 3".encode()
        )
    said = grabstream("status", **env_of(system)).stdout
    assert "10,011 ahead" in said
    assert "ahead of Redis: it has lost events" in said
    assert "-10,011" not in said


def test_status_prints_a_reason_that_looks_like_markup(capsys: pytest.CaptureFixture[str]) -> None:
    """The reason of a stop quotes text from outside, in which rich would find an unknown closing tag."""
    stop = {"projection": "ledger", "shard": 3, "seq": 7, "reason": "cannot read [/x]"}
    status._print_books(
        {"read_models": [stop], "stopped": [stop]}
        | {name: [] for name in ("versions", "findings", "set_aside")}
        | {"waiting": {}, "webhooks": {}}
    )
    assert "cannot read [/x]" in capsys.readouterr().out


def coupons(names: Sequence[str]) -> str:
    """A file of coupon offers."""
    terms = {"kind": "coupon", "issuer": "shop", "total": 5}
    return json.dumps([{"offer": name, "terms": terms} for name in names])


@pytest.mark.long
def test_table_in_a_narrow_terminal_shows_whole_ids() -> None:
    name = "friday:" + "p" * 52
    assert name in in_a_terminal("open", "-", "--dry-run", columns=80, stdin=coupons([name, "x"]))


def test_dry_run_of_many_offers_prints_a_summary_and_the_first_offers() -> None:
    names = [f"offer-{number}" for number in range(1_000)]
    done = grabstream("open", "-", "--dry-run", stdin=coupons(names))
    assert done.returncode == 0, done.stderr
    assert "1,000 offers" in done.stdout
    assert "1,000 coupon" in done.stdout
    assert "980 more" in done.stdout
    assert len(done.stdout.splitlines()) < 40
    as_json = grabstream("open", "-", "--dry-run", "--json", stdin=coupons(names)).stdout
    assert [one["offer"] for one in json.loads(as_json)] == names


def file_of_offers(form: str, count: int) -> str:
    """A file of stock offers of 50 campaigns."""
    names = [f"sale-{number % 50}:article-{number}" for number in range(count)]
    if form == "csv":
        rows = (f"{name},stock,shop,100,9900,CNY,15m,user/offer/2" for name in names)
        return "\n".join(["offer,kind,issuer,total,price,currency,hold_ms,limits", *rows])
    defaults = "{kind: stock, issuer: shop, price: 9900, currency: CNY, hold_ms: 15m, limits: user/offer/2}"
    entries = (f'  - {{offer: "{name}", terms: {{total: 100}}}}' for name in names)
    return "\n".join([f"defaults: {defaults}", "offers:", *entries])


@pytest.mark.nightly
@pytest.mark.parametrize("form", ["csv", "yaml"])
def test_dry_run_of_100_thousand_offers_takes_seconds(form: str, tmp_path: Path) -> None:
    """Every offer is checked; the first 20 are shown, and the others counted. It took 11 to 13 s of computing
    on a busy machine.
    """
    file = tmp_path / f"offers.{form}"
    file.write_text(file_of_offers(form, 100_000))
    words = [sys.executable, "-m", "grabstream.ops.cli", "open", str(file), "--dry-run"]
    with (tmp_path / "printed").open("w+") as printed:
        process = subprocess.Popen(words, stdout=printed, env=child_environment())
        _, code, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(code)
        printed.seek(0)
        lines = printed.read().splitlines()
    assert process.returncode == 0
    assert lines[0].strip() == "Would open 100,000 offers: 100,000 stock"
    shown = [line for line in lines if ":article-" in line]
    assert [f"sale-{number}:article-{number} " in line for number, line in enumerate(shown)] == [True] * 20
    assert lines[-1] == "… and 99,980 more; --json prints all of them"
    assert used.ru_utime + used.ru_stime < 60


def test_unfinished_bar_is_not_red() -> None:
    drawn = Console(force_terminal=True, color_system="truecolor", width=40)
    colors = [
        segment.style.color.get_truecolor()
        for segment in drawn.render(bar().render(Task(TaskID(1), "x", 10, 5, lambda: 0.0)))
        if segment.style and segment.style.color
    ]
    assert colors
    assert not [color for color in colors if color.red > 2 * max(color.green, color.blue)]


@pytest.mark.long
async def test_replay_of_an_unknown_offer_is_refused(system: Settings) -> None:
    for words in ([], ["--until", "2026-01-01T00:00:00Z"], ["--source", "audit"]):
        done = grabstream("replay", "--into", "-", "--offer", "nosuch", *words, **env_of(system))
        assert done.returncode == 1, done.stderr
        assert "offer nosuch does not exist" in done.stderr


async def test_exit_code_of_a_worker_depends_on_the_signal(
    system: Settings, worker: Callable[..., Any]
) -> None:
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 0)):
        running = worker(system, "relay")
        await until(lambda log=running.log: "owner of term" in log.read_text(), 30, "a relay")
        running.signal(number)
        assert running.process.wait(30) == code, running.log.read_text()


@pytest.mark.long
async def test_another_number_of_shards_is_refused(system: Settings) -> None:
    for verb, shards in (("init", "4"), ("worker", "4"), ("verify", "4"), ("verify", "16")):
        done = grabstream(verb, **env_of(system), shards=shards)
        assert done.returncode == 2, done.stderr
        assert "GRAB_SHARDS=8" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("worker",), ("verify",), ("why", "a", "b"), ("show", "x"), ("retry", "ledger", "3"),
        ("set-aside", "list"),
        ("set-aside", "ledger", "3", "--dry-run"), ("replay", "--into", "-"), ("rebuild", "ledger"),
        ("export", "archive", "--dry-run"),
        ("at", "2026-01-01"), ("doctor",),
        ("dismiss", "1", "--reason", "r", "--operator", "o"),
    ],
)  # fmt: skip
def test_verbs_before_init_name_the_verb_init(settings: Settings, words: tuple[str, ...]) -> None:
    done = grabstream(*words, **env_of(settings))
    assert done.returncode == (1 if words == ("doctor",) else 2), done.stderr
    assert "grabstream init" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_during_the_import_exits_with_130() -> None:
    """At the first import, and at the import of a verb's module: without a traceback."""
    for module in ("click", "psycopg", "grabstream.ops.commands.operate.verify"):
        program = f"""
import os, signal, sys
class Finder:
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
# The signal is ignored in tests that run in the background.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv = ["grabstream", "verify"]
from grabstream.ops import main
main()
"""
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=child_environment(),
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 130, (module, done.stderr)
        assert "Traceback" not in done.stderr


def test_sigterm_during_the_import_ends_the_first_process_of_a_container() -> None:
    own_namespace = ("unshare", "--pid", "--fork")
    if shutil.which("unshare") is None or subprocess.run([*own_namespace, "true"]).returncode:
        pytest.skip("no namespace of processes can be made here")
    program = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path, target=None):
        if name == "psycopg":
            os.kill(os.getpid(), signal.SIGTERM)
assert os.getpid() == 1
sys.meta_path.insert(0, Finder())
sys.argv = ["grabstream", "verify", "--no-such-option"]
from grabstream.ops import main
main()
"""
    done = subprocess.run(
        [*own_namespace, sys.executable, "-c", program],
        env=child_environment(), capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (143, "")


@pytest.mark.every_change("every verb about one offer")
async def test_verbs_from_open_to_verify_on_one_offer(system: Settings, worker: Callable[..., Any]) -> None:
    worker(system)
    own = env_of(system)
    terms = {"kind": "envelope", "issuer": "i", "funding": "f", "asset": "CNY", "total": 100, "parts": 3}
    done = grabstream("open", "-", "--json", stdin=json.dumps({"offer": "x", "terms": terms}), **own)
    assert (done.returncode, json.loads(done.stdout)[0]["outcome"]) == (0, "opened"), done.stderr
    granted = json.loads(grabstream("grab", "x", "u", "--id", "g", "--json", **own).stdout)[0]
    again = json.loads(grabstream("grab", "x", "u", "--id", "g", "--json", **own).stdout)[0]
    assert again == {**granted, "repeated": True}
    assert grabstream("pause", "x", **own).returncode == 0
    assert grabstream("grab", "x", "v", **own).returncode == 1
    assert grabstream("resume", "x", **own).returncode == 0
    assert grabstream("close", "x", **own).returncode == 0
    done = grabstream("verify", "--json", **own)
    assert done.returncode == 0, done.stdout
    assert {check["name"] for check in json.loads(done.stdout) if check["checked"]} >= {
        "Redis = fold of the journal",
        "chain of every shard",
    }
    name = "g-" + "n" * 55
    assert grabstream("open", "-", stdin=json.dumps({"offer": name, "terms": terms}), **own).returncode == 0
    assert grabstream("grab", name, name, "--id", name, **own).returncode == 0
    await until(
        lambda: grabstream("show", name, **own).stdout.count(name) == 4,
        30,
        "whole ids in the output without a terminal",
    )
    shown = json.loads(grabstream("show", "x", "--json", **own).stdout)
    assert (shown["offer"]["state"], shown["offer"]["reason"], shown["luckiest"]["user_id"]) == (
        "closed",
        "command",
        "u",
    )
    status = json.loads(grabstream("status", "--json", **own).stdout)
    assert status["stopped"] == []
    assert all(shard["relay"] for shard in status["shards"])
    assert grabstream("show", "nothing", **own).returncode == 1


def test_commands_of_the_readme_are_decoded() -> None:
    blocks = re.findall(r"<<'JSON'\n(.*?)\nJSON", README.read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    found = [command for line in lines for command in decode_commands(line.encode())]
    assert len(found) == 3
    assert not [command for command in found if isinstance(command, Undecodable)]
    assert isinstance(found[0], Open)


@pytest.mark.requirement("E11")
async def test_redis_that_may_evict_keys_is_refused(system: Settings, tmp_path: Path) -> None:
    server = Redis(tmp_path, free_ports(1)[0])
    server.start()
    try:
        redis.Redis(port=server.port).config_set("maxmemory-policy", "allkeys-lru")
        own = {**env_of(system), "redis_url": f"redis://127.0.0.1:{server.port}/0"}
        for words in (("worker",), ("grab", "x", "u")):
            done = grabstream(*words, **own)
            assert done.returncode == 2, done.stderr
            assert "noeviction" in done.stderr
    finally:
        server.kill()


def test_misspelt_verb_gets_a_suggestion() -> None:
    done = grabstream("statsu")
    assert (done.returncode, "Did you mean 'status'?" in done.stderr) == (2, True)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_of_the_shell(shell: str) -> None:
    done = grabstream("completion", shell)
    assert (done.returncode, "_GRABSTREAM_COMPLETE" in done.stdout) == (0, True)
