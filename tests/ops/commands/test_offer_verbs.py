"""Every verb that sends a command, with exit codes and JSON, on real servers."""

import asyncio
import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from grabstream.connections.opening import key_space, open_redis
from grabstream.crypto.sealing import new_seal_key
from grabstream.lua.keys import OFFER_KEYS
from grabstream.models.offers import Changes, Limit
from grabstream.ops import cli
from grabstream.ops.formats.offer_files import BadOfferFile, read_changes
from grabstream.settings import Settings, child_environment
from tests.conftest import wait_until
from tests.support.command_line import env_of, grabstream

HEADER = (
    "offer,kind,issuer,total,opens_at,limits,max_per_grab,hold_ms,extensions,price,currency,audience,"
    "waiting_list\n"
)
SECRET = base64.b64encode(bytes(range(32))).decode()
#: 2026-11-27T10:00:00+08:00
FRIDAY = 1_795_744_800_000


class Operator:
    """Runs verbs on one system."""

    def __init__(self, settings: Settings, **more: str) -> None:
        self.environment = {**env_of(settings), **more}

    def type(self, *words: str, code: int = 0, stdin: str = "") -> "subprocess.CompletedProcess[str]":
        done = grabstream(*words, folder=None, stdin=stdin, **self.environment)
        assert done.returncode == code, (words, done.returncode, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        return done

    def ask(self, *words: str, code: int = 0, stdin: str = "") -> Any:
        """The JSON output of a verb; for a command, its answer."""
        said = json.loads(self.type(*words, "--json", code=code, stdin=stdin).stdout)
        return said[0] if isinstance(said, list) and len(said) == 1 else said


@pytest.fixture
def operator(system: Settings, worker: Callable[..., Any]) -> Operator:
    ticket_keys = f"k:HS256:{SECRET}"
    worker(system, "relay,sweep")
    return Operator(system, ticket_keys=ticket_keys)


@pytest.fixture
def nobody(settings: Settings) -> Operator:
    """Runs verbs without servers, which must not be needed."""
    return Operator(
        settings.model_copy(update={"redis_url": "redis://127.0.0.1:1/0", "kafka": "127.0.0.1:1"})
    )


def written(path: Path, lines: list[str]) -> str:
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def in_an_hour() -> int:
    return time.time_ns() // 1_000_000 + 3_600_000


# -- without servers -----------------------------------------------------------------------------------------


def test_dry_run_shows_the_plan_and_opens_nothing(nobody: Operator, tmp_path: Path) -> None:
    file = tmp_path / "offers.csv"
    row = (
        "sale:fire:1,stock,shop,10,2026-11-27T10:00:00+08:00,user/day/2; card/offer/1,2,15m,1,500,CNY,,true\n"
    )
    file.write_text(HEADER + row)
    plan = nobody.type("open", str(file), "--dry-run").stdout
    assert "Would open 1 offer" in plan
    assert "sale:fire:1" in plan
    command = nobody.ask("open", str(file), "--dry-run", "--operator", "olga")
    assert (command["type"], command["id"], command["offer"]) == ("open", "open-sale:fire:1", "sale:fire:1")
    assert command["operator"] == "olga"
    assert (command["terms"]["opens_at"], command["terms"]["hold_ms"]) == (FRIDAY, 900_000)
    words = ("open", "-", "--format", "csv", "--dry-run", "--operator", "olga")
    assert nobody.ask(*words, stdin=HEADER + row) == command


def test_wrong_file_is_reported_with_all_its_problems(nobody: Operator, tmp_path: Path) -> None:
    """Before the first offer is opened, which is a good one."""
    rows = [HEADER + "good,stock,shop,1,,,,,,,,,", "a,stock,shop,ten,,,,,,,,,", "b,stock,shop,1,,user,,,,,,,"]
    done = nobody.type("open", written(tmp_path / "offers.csv", rows), code=2)
    assert "grabstream: line 3: terms.total" in done.stderr
    assert "grabstream: line 4: terms.limits" in done.stderr
    assert "--format" in nobody.type("open", written(tmp_path / "offers.xlsx", ["x"]), code=2).stderr
    (tmp_path / "latin.yaml").write_bytes("- offer: a\n  title: M\xfcnchen\n".encode("latin-1"))
    assert "line 2: is not UTF-8" in nobody.type("open", str(tmp_path / "latin.yaml"), code=2).stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("grab o", "USER"), ("grab o u --quantity 0", "quantity"),
        ("grab o u --attribute card", "NAME=VALUE"),
        ("grab o u --metadata form_id", "NAME=VALUE"), ("grab o u --metadata a=1 --metadata a=2", "twice"),
        (f"grab o u --metadata a={'x' * 1020}", "metadata: has at most 1024 bytes"),
        ("grab o u --attribute card=1 --attribute card=2", "twice"), ("grab o/p u", "offer"),
        (f"grab o u --quantity {10**30}", "quantity"),
        ("pause o --operator a/b", "operator"), ("confirm o g --paid 5", "payment"), ("return o", "GRAB"),
        ("redeem o g", "--order"),
        ("amend o", "--set"), ("amend o --set total", "NAME=VALUE"), (
        "amend o --set total=x --set "
        "kind=stock", "kind: cannot be amended"),
        ("adjust o --transfer 1:CNY:a:b --reason r --approved-by boss", "100 CNY issuer:alice wallet:bob"),
        ("load o", "--codes"), ("ticket o u --key-id k --key-file /dev/null", "32 bytes"),
        ("ticket o u --key-id k --key-file /dev/null --expires soon", "--expires"),
    ],
)  # fmt: skip
def test_exit_code_is_2_for_wrong_usage(words: str, said: str) -> None:
    # In this process: a process for each would take half of the time of all tests here.
    done = CliRunner().invoke(cli.grabstream, words.split())
    assert (done.exit_code, said in done.stderr) == (2, True), done.output


@pytest.mark.parametrize(
    "words",
    [
        "ticket o u --key-file /dev/null --key-id k:HS256:PEPPER", "reseal --retire k:PEPPER",
        "keys create grabkey_PEPPER --scope read", "keys rotate grabkey_PEPPER", "keys revoke grabkey_PEPPER",
        "config --new-journal-key k:PEPPER",
    ],
)  # fmt: skip
def test_secret_in_place_of_an_id_or_a_name_is_not_printed(words: str) -> None:
    done = CliRunner().invoke(cli.grabstream, words.split())
    assert (done.exit_code, "PEPPER" in done.output) == (2, False), done.output


@pytest.mark.long
def test_wrong_lines_are_reported_before_anything_is_sent(nobody: Operator, tmp_path: Path) -> None:
    file = written(tmp_path / "users.txt", ["anna", "", "two words", "  bob  ", *["é"] * 30])
    stderr = nobody.type("load", "o", "--audience", file, code=2).stderr
    assert "grabstream: line 3: must match" in stderr
    assert "grabstream: line 5:" in stderr
    assert "11 more lines are wrong" in stderr
    assert "line 4" not in stderr
    assert "has no codes" in nobody.type("load", "o", "--codes", "-", stdin="\n \n", code=2).stderr
    assert "line 2: " in nobody.type("load", "o", "--codes", "-", stdin=f"A\n{'B' * 201}\n", code=2).stderr
    good = "\ufeffA\r\n\r\n B 1 \r\n"
    assert nobody.ask("load", "o", "--codes", "-", "--dry-run", stdin=good) == {
        "offer": "o",
        "what": "codes",
        "items": 2,
        "chunks": 1,
    }


def test_amend_reads_changes_as_in_a_file_of_offers() -> None:
    pairs = [("closes_at", "2026-11-27T10:00:00+08:00"), ("hold_ms", "15m"), ("limits",
    "user/day/2; "
    "card/offer/1"),
             ("return_restores", "true"), ("total", "7"), ("title", ""), ("late", "retake")]  # fmt: skip
    limits = (Limit("user", "day", 2), Limit("card", "offer", 1))
    expected = Changes(
        closes_at=FRIDAY,
        hold_ms=900_000,
        limits=limits,
        return_restores=True,
        total=7,
        title="",
        late="retake",
    )
    assert read_changes(pairs) == expected
    assert read_changes([("limits", "")]) == Changes(limits=())
    pairs = [
        ("totle", "1"),
        ("late", "never"),
        ("total", "1e3"),
        ("hold_ms", ""),
        ("hold_ms", "1m"),
        ("closes_at", "2026-11-27T10:00:00"),
    ]
    with pytest.raises(BadOfferFile) as caught:
        read_changes(pairs)
    reasons = [reason for _, reason in caught.value.problems]
    for words in (
        "hold_ms: is given twice",
        "nearest is total",
        "late: must be one of",
        "total: must be a whole",
        "has no zone; add one",
    ):
        assert any(words in reason for reason in reasons), (words, reasons)


# -- with servers --------------------------------------------------------------------------------------------


@pytest.mark.long
def test_codes_are_loaded_once_and_given_out(operator: Operator, tmp_path: Path) -> None:
    codes = [f"CODE {number:04}" for number in range(2_500)]
    file = written(tmp_path / "codes.txt", codes)
    # What is refused is remembered under its id; neither it nor a wrong file must stand in the way when the
    # offer is there.
    wrong = written(tmp_path / "wrong.txt", codes[:7])
    assert (
        operator.ask("load", "coupons", "--codes", wrong, code=1)["refused"][0]["outcome"] == "no_such_offer"
    )
    twice = written(tmp_path / "twice.txt", [*codes, codes[3]])
    assert "more than once" in operator.type("load", "coupons", "--codes", twice, code=2).stderr
    assert (
        operator.ask("load", "coupons", "--codes", file, code=1)["refused"][0]["outcome"] == "no_such_offer"
    )
    offers = HEADER + f"coupons,coupon,shop,2500,{in_an_hour()},,2,,,,,,\n"
    assert operator.ask("open", "-", "--format", "csv", stdin=offers)["outcome"] == "opened"
    assert operator.ask("open", "-", "--format", "csv", stdin=offers)["repeated"]
    summary = {"offer": "coupons", "what": "codes", "items": 2_500, "chunks": 3, "refused": []}
    assert operator.ask("load", "coupons", "--codes", file) == {**summary, "loaded": 3, "repeated": 0}
    again = operator.type("load", "coupons", "--codes", file)
    assert "0 of 3 chunks loaded, 3 were loaded before" in again.stdout
    assert (
        "3 were loaded before"
        in operator.type("load", "coupons", "--codes", file, "--operator", "somebody").stdout
    )
    # A chunk's id follows from its codes by a key; after a rotation it is found under the old one.
    operator.environment["seal_keys"] = f"{new_seal_key()},{operator.environment['seal_keys']}"
    assert "`grabstream init`" in operator.type("grab", "coupons", "anna", code=2).stderr
    assert len(operator.ask("init")["seal_keys_recorded"]) == 1
    assert operator.ask("load", "coupons", "--codes", file) == {**summary, "loaded": 0, "repeated": 3}
    assert operator.ask("grab", "coupons", "anna", code=1)["outcome"] == "not_open_yet"
    assert operator.ask("amend", "coupons", "--set", "opens_at=1")["outcome"] == "amended"
    assert operator.ask("grab", "coupons", "anna", "--id", "g")["coupon_code"] == codes[0]
    granted = operator.type("grab", "coupons", "bob", "--quantity", "2")
    assert "granted" in granted.stdout
    assert "CODE 0002" in granted.stdout
    assert operator.ask("redeem", "coupons", "g", "--order", "o1")["outcome"] == "redeemed"
    assert operator.ask("redeem", "coupons", "g", "--order", "o2", code=1)["outcome"] == "not_redeemable"
    assert operator.ask("unredeem", "coupons", "g", "--order", "o1")["outcome"] == "unredeemed"


@pytest.mark.every_change("every verb about one grab")
def test_grab_is_held_confirmed_and_returned(operator: Operator) -> None:
    row = "phones,stock,shop,2,,user/offer/2; card/offer/2,2,1m,1,500,CNY,,true\n"
    operator.type("open", "-", "--format", "csv", stdin=HEADER + row)
    card = ("--attribute", "card=c1")
    form = ("--metadata", "form_id=a=b 你好", "--metadata", "app=1")
    held = operator.ask("grab", "phones", "anna", "--id", "g", "--quantity", "2", *card, *form)
    assert held["metadata"] == {"app": "1", "form_id": "a=b 你好"}
    assert (held["outcome"], held["due"], held["currency"]) == ("held", 1_000, "CNY")
    assert (
        operator.ask("grab", "phones", "bob", "--id", "waits", "--wait", "--attribute", "card=c2")["outcome"]
        == "waiting"
    )
    assert operator.ask("extend", "phones", "g")["deadline_at"] == held["deadline_at"] + 60_000
    assert operator.ask("extend", "phones", "g", code=1)["outcome"] == "limit_reached"
    paid = ("--payment", "p1", "--paid", "500", "--currency", "CNY", "--quantity", "1")
    assert operator.ask("confirm", "phones", "g", *paid)["outcome"] == "confirmed"
    assert operator.ask("confirm", "phones", "g", *paid)["repeated"]
    assert (
        operator.ask("return", "phones", "g", "--quantity", "1", "--reason", "broken “glass”")["outcome"]
        == "returned"
    )
    # It went to who waits.
    assert operator.ask("release", "phones", "waits")["outcome"] == "released"
    assert operator.ask("release", "phones", "none", code=1)["outcome"] == "no_such_grab"
    # The card has one unit held and one taken for good; both limits count what was returned.
    assert operator.ask("grab", "phones", "carl", *card, code=1)["limit"]["by"] == "card"
    changes = ("--set", "limits=user/offer/2", "--set", "total=5", "--set", "title=Phones: a [b] :fire:")
    assert operator.ask("amend", "phones", *changes, "--operator", "olga")["outcome"] == "amended"
    assert operator.ask("grab", "phones", "carl")["outcome"] == "held"
    assert operator.ask("amend", "phones", "--set", "total=1", code=1)["outcome"] == "not_enough_left"
    entry = ("--transfer", "100 CNY issuer:shop wallet:anna", "--transfer", "1 CNY external:x refund:p1")
    assert (
        operator.ask("adjust", "phones", *entry, "--reason", "goodwill", "--approved-by", "boss")["outcome"]
        == "adjusted"
    )
    assert operator.ask("pause", "phones", "--operator", "olga")["outcome"] == "paused"
    assert operator.ask("grab", "phones", "dora", code=1)["outcome"] == "on_hold"
    said = operator.type("grab", "phones", "dora", code=1).stdout
    assert said.startswith("on_hold  Offer phones is paused until an operator resumes it"), said
    assert operator.ask("resume", "phones")["outcome"] == "resumed"
    assert operator.ask("close", "phones")["outcome"] == "closed"
    assert "over" in operator.type("grab", "phones", "dora", code=1).stdout


@pytest.mark.long
def test_audience_is_admitted_by_ticket_or_list(operator: Operator, tmp_path: Path) -> None:
    """A ticket is signed with a secret, or with a key pair."""
    private, pem = Ed25519PrivateKey.generate(), tmp_path / "key.pem"
    pem.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public = base64.b64encode(private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)).decode()
    operator.environment["ticket_keys"] += f",e:EdDSA:{public}"
    rows = f"vip:a,coupon,shop,9,,,1,,,,,ticket,\nvip:b,coupon,shop,9,{in_an_hour()},,1,,,,,list,\n"
    assert [
        answer["outcome"] for answer in operator.ask("open", "-", "--format", "csv", stdin=HEADER + rows)
    ] == ["opened"] * 2
    key = written(tmp_path / "key", [SECRET])
    signed = ("--key-id", "k", "--key-file", key)
    token = operator.type("ticket", "vip", "anna", *signed, "--once", "t1").stdout.strip()
    assert operator.ask("grab", "vip:a", "anna", code=1)["outcome"] == "not_eligible"
    assert operator.ask("grab", "vip:a", "bob", "--ticket", token, code=1)["outcome"] == "not_eligible"
    assert operator.ask("grab", "vip:a", "anna", "--ticket", token)["outcome"] == "granted"
    assert operator.ask("grab", "vip:a", "anna", "--ticket", token, code=1)["outcome"] == "not_eligible"
    late = operator.ask("ticket", "vip:a", "anna", *signed, "--expires", "2020-01-01T00:00:00Z")["ticket"]
    assert operator.ask("grab", "vip:a", "anna", "--ticket", late, code=1)["outcome"] == "not_eligible"
    paired = ("--key-id", "e", "--key-file", str(pem), "--expires", "1h")
    token = operator.type("ticket", "vip", "carl", *paired).stdout.strip()
    assert operator.ask("grab", "vip:a", "carl", "--ticket", token)["outcome"] == "granted"
    # More than one gate call, and users with the longest ids.
    users = [f"user{number:060}" for number in range(20_500)]
    loaded = operator.ask("load", "vip:b", "--audience", written(tmp_path / "users.txt", users))
    assert (loaded["loaded"], loaded["items"]) == (21, 20_500)


@pytest.mark.requirement("F7")
def test_a_week_of_a_plan_is_opened_once(operator: Operator, tmp_path: Path) -> None:
    plan = tmp_path / "weekly.yaml"
    plan.write_text(
        "defaults: {kind: stock, issuer: shop, total: 2, opens_at: fri 10:00}\n"
        'offers: [{offer: "deal-{week}:a"}, {offer: "deal-{week}:b"}]\n'
    )
    call = ("open", str(plan), "--week", "2032-W49")
    assert "Would open 2 offers of 2032-W49: 2 stock" in operator.type(*call, "--dry-run").stdout
    assert (
        operator.type(*call).stdout.splitlines()[-1]
        == "2032-W49: 2 offers opened, 0 opened before, 0 refused"
    )
    nothing = "2032-W49: nothing changed, all 2 offers were opened before"
    assert operator.type(*call, "--operator", "olga").stdout.splitlines()[-1] == nothing
    assert [(answer["offer"], answer["repeated"]) for answer in operator.ask(*call)] == [
        ("deal-2032-W49:a", True), ("deal-2032-W49:b", True),
    ]  # fmt: skip
    # A new offer of the same week is opened; other terms of an open one are not.
    plan.write_text(plan.read_text().replace("]\n", ', {offer: "deal-{week}:c"}]\n'))
    assert (
        operator.type(*call).stdout.splitlines()[-1] == "2032-W49: 1 offer opened, 2 opened before, 0 refused"
    )
    plan.write_text(plan.read_text() + 'weeks: {2032-W49: {"deal-{week}:a": {total: 3}}}\n')
    done = operator.type(*call, code=1)
    assert done.stdout.splitlines()[-1] == "2032-W49: 0 offers opened, 2 opened before, 1 refused"
    assert "conflict" in done.stdout
    done = operator.type("open", str(plan), "--week", "2032-W54", code=2)
    assert "--week '2032-W54' is not a week" in done.stderr


@pytest.mark.long
def test_many_offers_are_opened_in_several_calls(operator: Operator) -> None:
    rows = "".join(f"many:{number},coupon,shop,1,,,1,,,,,,\n" for number in range(501))
    done = operator.type("open", "-", "--format", "csv", stdin=HEADER + rows)
    assert done.stdout.strip() == "501 opened"
    # Other terms under the id of one that is open.
    done = operator.type(
        "open",
        "-",
        "--format",
        "csv",
        stdin=HEADER + rows.replace("many:7,coupon,shop", "many:7,coupon,other"),
        code=1,
    )
    assert done.stdout.splitlines()[-1] == "500 opened, 1 conflict"
    assert "many:7" in done.stdout


@pytest.mark.long
def test_stopped_load_continues_when_repeated(operator: Operator, system: Settings, tmp_path: Path) -> None:
    operator.type(
        "open", "-", "--format", "csv", stdin=HEADER + f"crowd,coupon,shop,9,{in_an_hour()},,1,,,,,list,\n"
    )
    file = written(tmp_path / "users.txt", [f"u{number}" for number in range(400_000)])
    command = [sys.executable, "-m", "grabstream.ops.cli", "load", "crowd", "--audience", file, "--json"]
    environment = child_environment(**operator.environment)
    # A shell lets what it runs in the background ignore Ctrl-C, and so may whatever runs these tests.
    heard = signal.signal(signal.SIGINT, signal.SIG_DFL)
    running = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    signal.signal(signal.SIGINT, heard)
    keys = key_space(system)
    audience = keys.shard(keys.shard_of_offer("crowd")).offer_keys("crowd")[OFFER_KEYS.index("audience")]

    async def loaded() -> int:
        client = open_redis(system)
        try:
            return int(await client.scard(audience))
        finally:
            await client.aclose()

    wait_until(lambda: asyncio.run(loaded()) > 20_000, what="loading")
    os.kill(running.pid, signal.SIGINT)
    stdout, stderr = running.communicate(timeout=30)
    assert running.returncode == 1, stderr
    assert "continue where this one ended" in stderr
    stopped = json.loads(stdout)
    assert 0 < stopped["loaded"] < 400
    done = operator.ask("load", "crowd", "--audience", file)
    assert done["loaded"] + done["repeated"] == 400
    assert done["repeated"] >= stopped["loaded"]
