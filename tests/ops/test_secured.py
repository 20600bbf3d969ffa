"""Servers with TLS and logins, as `grabstream up --secure` starts them: the whole round trip, and one clear
error for each way in which a server may refuse.
"""

import asyncio
import contextlib
import hashlib
import json
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import GroupAuthorizationFailedError, KafkaError, TopicAuthorizationFailedError
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import (
    CompactArray,
    CompactBytes,
    CompactString,
    Int8,
    Int16,
    Int32,
    Schema,
    TaggedFields,
)
from psycopg import OperationalError
from psycopg.errors import InsufficientPrivilege, ObjectNotInPrerequisiteState
from pydantic import SecretStr
from redis.exceptions import NoPermissionError, RedisError

from grabstream.client.over_http import Client
from grabstream.client.over_kafka import KafkaClient
from grabstream.connections.logins import refusal
from grabstream.connections.opening import checked_database, open_redis
from grabstream.connections.redis_cluster import slot_of
from grabstream.crypto.sealing import new_seal_key
from grabstream.models.vocabulary import Grab
from grabstream.projections.database.sessions import connect
from grabstream.settings import BadSettings, Settings, child_environment, load_settings
from grabstream.streams import brokers
from grabstream.streams.clients import started
from grabstream.streams.topic_ids import find_topic
from grabstream.streams.topics import Topics
from grabstream.workshop.services import SecureServices, free_ports
from grabstream.workshop.services.certificates import Certificate, CertificateAuthority
from grabstream.workshop.services.cluster import join_redis
from grabstream.workshop.services.secure import ADMINISTRATOR, HOST, SecureRedis, TokenIssuer
from tests.conftest import until, wait_until
from tests.support import forks
from tests.support.command_line import grabstream
from tests.support.gateways import GatewayProcess
from tests.support.issuer import AUDIENCE, ISSUER
from tests.support.token_issuer import SECRET, Issuer, issuing


@pytest.fixture(scope="module")
def issuing_tokens() -> Iterator[Issuer]:
    """The issuer of tokens that the brokers trust."""
    with issuing() as running:
        yield running


@pytest.fixture
def issuer(issuing_tokens: Issuer) -> Iterator[Issuer]:
    """The same, which issues good tokens again after the test."""
    issuing_tokens.reset()
    yield issuing_tokens
    issuing_tokens.reset()


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory, issuing_tokens: Issuer) -> Iterator[SecureServices]:
    *ports, certificates_port = free_ports(5)
    services = SecureServices(
        tmp_path_factory.mktemp("secured"), *ports, kafka_heap_mb=320, certificates_port=certificates_port,
        tokens=TokenIssuer(issuing_tokens.keys_url, ISSUER, AUDIENCE),
    )  # fmt: skip
    try:
        services.up()
        yield services
    finally:
        services.remove()


@pytest.fixture(scope="module")
def environment(secured: SecureServices) -> dict[str, str]:
    """The settings of a system on the secured servers."""
    return secured.environment() | {"seal_keys": new_seal_key(), "shards": "2"}


def settings_of(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, **changed: str) -> Settings:
    for name, value in (environment | changed).items():
        monkeypatch.setenv(f"GRAB_{name.upper()}", value)
    return load_settings()


def run(environment: dict[str, str], *words: str) -> str:
    """Runs a verb that must succeed; returns what it printed."""
    done = grabstream(*words, **environment)
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout


@contextlib.contextmanager
def working(environment: dict[str, str], log: Path) -> Iterator[Any]:
    """A worker with all roles, once it is ready; killed at the end."""
    with log.open("ab") as output:
        process = forks.start(("worker",), child_environment(**environment), None, output, output)
        try:
            wait_until(
                lambda: "ready: roles" in log.read_text() or process.poll() is not None, 60, "a ready worker"
            )
            assert process.poll() is None, log.read_text()
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()


@pytest.mark.long
async def test_the_round_trip(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await round_trip(environment, tmp_path, monkeypatch)


async def round_trip(environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands by the command line, Kafka and HTTP; a takeover after kill -9; verify, and a rebuild."""
    settings = settings_of(environment, monkeypatch)
    run(environment, "init")
    offer = tmp_path / "offer.json"
    terms = {"kind": "stock", "issuer": "shop", "total": 5}
    offer.write_text(json.dumps({"id": "open", "offer": "tea", "terms": terms}))
    with working(environment, tmp_path / "first.log"):
        run(environment, "open", str(offer))
        async with KafkaClient(settings.kafka, settings.prefix, **settings.kafka_options()) as client:
            answer = await client.decide(Grab(id="by-kafka", offer="tea", user="ann"))
            assert answer.outcome == "granted"
    with working(environment, tmp_path / "second.log"):
        with (
            GatewayProcess(settings, tmp_path / "gateway.log") as gateway,
            Client(f"http://127.0.0.1:{gateway.port}") as http,
        ):
            assert http.decide(Grab(id="by-http", offer="tea", user="bob")).outcome == "granted"
        assert "granted" in run(environment, "grab", "tea", "eve")
        run(environment, "rebuild", "balances")
        checks = json.loads(run(environment, "verify", "--json"))
    assert checks
    shown = json.loads(run(environment, "show", "tea", "--json"))
    assert "password" not in json.dumps(shown)


@pytest.mark.long
def test_no_password_is_shown(environment: dict[str, str]) -> None:
    printed = run(environment, "config", "--json") + run(environment, "config")
    for name in ("redis_url", "postgres"):
        password = environment[name].split("@")[0].rpartition(":")[2]
        assert password not in printed
    assert environment["kafka_password"] not in printed


@pytest.mark.long
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"redis_ca": "OTHER"}, "GRAB_REDIS_CA"),
        ({"redis_url": "WRONG PASSWORD"}, "login of GRAB_REDIS_URL"),
        ({"redis_url": "PLAIN", "redis_ca": ""}, "rediss://"),
        ({"kafka_ca": "OTHER"}, "GRAB_KAFKA_CA"),
        ({"kafka_password": "guessed"}, "GRAB_KAFKA_PASSWORD"),
        ({"kafka_sasl_mechanism": "SCRAM-SHA-256"}, "GRAB_KAFKA_SASL_MECHANISM"),
        ({"kafka_security_protocol": "SSL", "kafka_username": "", "kafka_password": ""}, "SASL_SSL"),
        (
            {"kafka_security_protocol": "PLAINTEXT"}
            | dict.fromkeys(("kafka_username", "kafka_password", "kafka_ca"), ""),
            "GRAB_KAFKA_SECURITY_PROTOCOL",
        ),
        ({"postgres": "OTHER"}, "sslrootcert"),
        ({"postgres": "WRONG PASSWORD"}, "login of GRAB_POSTGRES"),
        ({"postgres": "PLAIN"}, "sslmode=verify-full"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_refusal_names_the_setting_and_the_fix(
    environment: dict[str, str],
    changed: dict[str, str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = CertificateAuthority(tmp_path)
    other.certificate("unused")
    [name, *_] = changed
    given = environment.get(name, "")
    ca = environment["redis_ca"]
    replacement = {
        "OTHER": given.replace(ca, str(other.ca)),
        "WRONG PASSWORD": given.replace(given.split("@")[0].rpartition(":")[2], "guessed"),
        "PLAIN": given.replace("rediss:", "redis:").split("?")[0]
        + ("?sslmode=disable" if name == "postgres" else ""),
    }.get(changed[name], changed[name])
    settings = settings_of(environment, monkeypatch, **changed | {name: replacement})
    reached: Exception | None = None
    try:
        if name.startswith("redis"):
            client = open_redis(settings)
            try:
                await client.ping()
            finally:
                await client.aclose()
        elif name.startswith("kafka"):
            await find_topic(settings.brokers, "none")
        else:
            async with checked_database(settings):
                pass
    except (RedisError, KafkaError, OperationalError) as error:
        reached = error
    assert reached is not None
    said = await refusal(settings, reached)
    assert words in said
    assert "guessed" not in said


async def test_certificates_that_ended_or_are_of_another_host_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = CertificateAuthority(tmp_path / "authority")
    for name, certificate, words in (
        ("ended", authority.certificate("ended", ("127.0.0.1",), days=-1), "has expired"),
        ("other", authority.certificate("other", ("redis.example.com",)), "for another host"),
    ):
        [port] = free_ports(1)
        server = SecureRedis(tmp_path / name, port, authority, certificate, "secret", name)
        monkeypatch.setattr(server, "ready", lambda port=port: _listens(port))
        server.start()
        try:
            for variable, value in (
                ("GRAB_REDIS_URL", f"rediss://grabstream:secret@127.0.0.1:{port}/0"),
                ("GRAB_REDIS_CA", str(authority.ca)),
            ):
                monkeypatch.setenv(variable, value)
            assert words in await refusal(load_settings(), RedisError())
        finally:
            server.stop()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


# -- tokens --------------------------------------------------------------------------------------------------


def by_token(environment: dict[str, str], issuer: Issuer, client: str = ADMINISTRATOR) -> dict[str, str]:
    """The settings of a client that logs in to Kafka with tokens."""
    return environment | {
        "kafka_sasl_mechanism": "OAUTHBEARER",
        "kafka_username": client,
        "kafka_password": SECRET,
        "kafka_token_url": issuer.token_url,
    }


async def sent_and_read(settings: Settings, topic: str) -> None:
    """A record goes to a new topic, and comes back."""
    async with started(AIOKafkaAdminClient(**brokers.at(settings.brokers))) as administrator:
        await administrator.create_topics([NewTopic(topic, 1, 1)])
    async with started(AIOKafkaProducer(**brokers.at(settings.brokers), acks="all")) as producer:
        await producer.send_and_wait(topic, b"sent")
    consumer = AIOKafkaConsumer(topic, **brokers.at(settings.brokers), auto_offset_reset="earliest")
    async with started(consumer), asyncio.timeout(60):
        assert (await consumer.getone()).value == b"sent"


async def refused(settings: Settings) -> str:
    """What a process of these settings says when Kafka does not serve it."""
    with pytest.raises((KafkaError, OSError)) as raised:
        await find_topic(settings.brokers, "none")
    return await refusal(settings, raised.value)


@pytest.mark.long
async def test_a_broker_admits_a_token(
    environment: dict[str, str], issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(by_token(environment, issuer), monkeypatch)
    await sent_and_read(settings, "by-token")
    issuer.key_id = "p256"
    assert await find_topic(settings.brokers, "by-token") is not None
    # The holder of a token has the rights of its subject, and no more.
    stranger = settings_of(by_token(environment, issuer, "stranger"), monkeypatch)
    async with started(AIOKafkaProducer(**brokers.at(stranger.brokers))) as producer:
        with pytest.raises(TopicAuthorizationFailedError):
            await producer.send_and_wait("by-token", b"forged")


@pytest.mark.long
@pytest.mark.parametrize(
    ("key_id", "changed"),
    [
        ("other", {}),
        ("rsa", {"aud": "another"}),
        ("rsa", {"iss": "https://another.example.com"}),
        ("rsa", {"exp": 1}),
    ],
    ids=["another key", "another audience", "another issuer", "ended"],
)
async def test_a_token_that_the_broker_refuses_is_named(
    environment: dict[str, str],
    issuer: Issuer,
    key_id: str,
    changed: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    issuer.key_id, issuer.changed = key_id, changed
    said = await refused(settings_of(by_token(environment, issuer), monkeypatch))
    assert "refuses the token" in said
    assert "GRAB_KAFKA_TOKEN_URL" in said


@pytest.mark.long
async def test_a_client_of_the_issuer_that_it_refuses_is_named(
    environment: dict[str, str], issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = by_token(environment, issuer) | {"kafka_password": "guessed"}
    said = await refused(settings_of(wrong, monkeypatch))
    assert "GRAB_KAFKA_PASSWORD" in said
    assert "guessed" not in said


@pytest.mark.long
async def test_a_refused_token_is_replaced(
    environment: dict[str, str], issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An issuer whose new key the brokers did not know: the same client logs in once it issues others."""
    of_client = settings_of(by_token(environment, issuer), monkeypatch).brokers
    issuer.key_id = "other"
    with pytest.raises(KafkaError):
        await find_topic(of_client, "none")
    issuer.key_id = "rsa"
    assert await find_topic(of_client, "none") is None
    issued = issuer.issued
    assert await find_topic(of_client, "none") is None
    assert issuer.issued == issued, "a good token is used again"


# -- certificates of clients ---------------------------------------------------------------------------------


def by_certificate(
    environment: dict[str, str], secured: SecureServices, certificate: Certificate | None
) -> dict[str, str]:
    """The settings of a client that Kafka knows by its certificate."""
    files = {"kafka_certificate": "", "kafka_key": ""}
    if certificate is not None:
        files = {"kafka_certificate": str(certificate.certificate), "kafka_key": str(certificate.key)}
    return environment | files | {
        "kafka": f"{HOST}:{secured.kafka.certificates_port}",
        "kafka_security_protocol": "SSL",
        "kafka_username": "",
        "kafka_password": "",
    }  # fmt: skip


@pytest.mark.long
async def test_a_broker_admits_a_certificate(
    environment: dict[str, str], secured: SecureServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = secured.authority.certificate(ADMINISTRATOR)
    settings = settings_of(by_certificate(environment, secured, own), monkeypatch)
    await sent_and_read(settings, "by-certificate")
    # The key may be in the file of the certificate.
    together = settings.model_copy(update={"kafka_certificate": str(own.both), "kafka_key": ""})
    assert await find_topic(together.brokers, "by-certificate") is not None
    of_stranger = secured.authority.certificate("stranger")
    stranger = settings_of(by_certificate(environment, secured, of_stranger), monkeypatch)
    async with started(AIOKafkaProducer(**brokers.at(stranger.brokers))) as producer:
        with pytest.raises(TopicAuthorizationFailedError):
            await producer.send_and_wait("by-certificate", b"forged")


@pytest.mark.long
@pytest.mark.parametrize(
    "which", ["none", "of another authority", "of an authority of the same name", "with another key"]
)
async def test_a_certificate_that_kafka_refuses_is_named(
    environment: dict[str, str],
    secured: SecureServices,
    which: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    certificate = wrong_certificates(secured, tmp_path)[which]
    said = await refused(settings_of(by_certificate(environment, secured, certificate), monkeypatch))
    assert "GRAB_KAFKA_CERTIFICATE" in said
    assert "GRAB_KAFKA_KEY" in said


def wrong_certificates(secured: SecureServices, folder: Path) -> dict[str, Certificate | None]:
    """What a client may have in place of its certificate."""
    other = CertificateAuthority(folder / "other", "another authority").certificate(ADMINISTRATOR)
    return {
        "none": None,
        "of another authority": other,
        "of an authority of the same name": CertificateAuthority(folder / "same").certificate(ADMINISTRATOR),
        "with another key": secured.authority.certificate(ADMINISTRATOR)._replace(key=other.key),
    }


@pytest.fixture(scope="module")
def certified_redis(secured: SecureServices) -> Iterator[tuple[SecureRedis, ...]]:
    """A Redis Cluster of three masters that want certificates of clients and of each other."""
    folder = secured.directory / "cluster"
    ports, buses = free_ports(3), free_ports(3)
    certificate = secured.authority.certificate("server", (HOST,))
    servers = tuple(
        SecureRedis(
            folder / str(port), port, secured.authority, certificate, "secret", f"redis-{port}", bus,
            requires_certificates=True,
        )
        for port, bus in zip(ports, buses, strict=True)
    )  # fmt: skip
    try:
        for server in servers:
            server.start()
        join_redis(servers, len(servers))
        yield servers
    finally:
        for server in servers:
            server.kill()


def on_cluster(
    environment: dict[str, str], servers: Sequence[SecureRedis], certificate: Certificate | None
) -> dict[str, str]:
    """The settings of a client of the cluster with this certificate."""
    nodes = ",".join(f"{HOST}:{server.port}" for server in servers)
    files = {"redis_certificate": "", "redis_key": ""}
    if certificate is not None:
        files = {"redis_certificate": str(certificate.certificate), "redis_key": str(certificate.key)}
    return environment | files | {"redis_url": f"rediss-cluster://{ADMINISTRATOR}:secret@{nodes}"}


@pytest.mark.nightly
async def test_a_redis_cluster_with_tls_and_certificates_of_clients(
    environment: dict[str, str],
    secured: SecureServices,
    certified_redis: tuple[SecureRedis, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keys on each master, calls of scripts, and messages."""
    own = secured.authority.certificate(ADMINISTRATOR)
    client = open_redis(settings_of(on_cluster(environment, certified_redis, own), monkeypatch))
    try:
        keys = [f"{{{number}}}:key" for number in range(30)]
        for key in keys:
            await client.set(key, key)
        assert [await client.eval("return redis.call('GET', KEYS[1])", 1, key) for key in keys] == [
            key.encode() for key in keys
        ]
        used = {client.server_of(slot_of(key)).name for key in keys}
        assert used == {f"{HOST}:{server.port}" for server in certified_redis}
        async with client.pubsub() as subscription:
            await subscription.subscribe(*keys)
            said: set[str] = set()
            async with asyncio.timeout(60):
                async for message in subscription.listen():
                    if message["type"] == "subscribe":
                        await client.execute_command("PUBLISH", message["channel"], "said")
                    elif message["type"] == "message":
                        said.add(message["channel"].decode())
                    if len(said) == len(keys):
                        break
    finally:
        await client.aclose()


@pytest.mark.long
@pytest.mark.parametrize(
    ("which", "words"),
    [
        ("none", "GRAB_REDIS_CERTIFICATE"),
        ("of another authority", "GRAB_REDIS_CERTIFICATE"),
        ("of an authority of the same name", "GRAB_REDIS_CERTIFICATE"),
        ("with another key", "GRAB_REDIS_KEY"),
        ("authority", "GRAB_REDIS_CA"),
        ("password", "login of GRAB_REDIS_URL"),
        ("plain", "rediss-cluster://"),
    ],
)
@pytest.mark.parametrize("shape", ["cluster", "one server"])
async def test_a_client_that_redis_refuses_is_told_why(
    environment: dict[str, str],
    secured: SecureServices,
    certified_redis: tuple[SecureRedis, ...],
    which: str,
    words: str,
    shape: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = secured.authority.certificate(ADMINISTRATOR)
    wrong = wrong_certificates(secured, tmp_path)
    named = on_cluster(environment, certified_redis, wrong.get(which, own))
    if which == "authority":
        other = CertificateAuthority(tmp_path / "another")
        other.certificate("unused")
        named["redis_ca"] = str(other.ca)
    elif which == "password":
        named["redis_url"] = named["redis_url"].replace(":secret@", ":guessed@")
    elif which == "plain":
        named["redis_url"] = named["redis_url"].replace("rediss", "redis")
        named |= dict.fromkeys(("redis_ca", "redis_certificate", "redis_key"), "")
    if shape == "one server":
        named["redis_url"] = named["redis_url"].replace("-cluster", "").split(",")[0] + "/0"
    settings = settings_of(named, monkeypatch)
    client = open_redis(settings)
    try:
        with pytest.raises(RedisError) as raised:
            await client.get("key")
    finally:
        await client.aclose()
    said = await refusal(settings, raised.value)
    assert words in said
    assert "guessed" not in said


@pytest.mark.long
async def test_postgresql_wants_a_certificate_of_this_client(
    environment: dict[str, str], secured: SecureServices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(environment, monkeypatch)
    entries = secured.postgres.data / "pg_hba.conf"
    before = entries.read_text()
    entries.write_text(f"hostssl all certified {HOST}/32 scram-sha-256 clientcert=verify-full\n{before}")
    wrong = wrong_certificates(secured, tmp_path)
    own = secured.authority.certificate("certified")
    login = settings.postgres.replace(settings.postgres.split("//")[1].split("@")[0], "certified:secret")
    try:
        async with await connect(settings.postgres, "public") as books:
            await books.execute("CREATE ROLE certified LOGIN PASSWORD 'secret'")
            loaded = await (await books.execute("SELECT pg_conf_load_time(), pg_reload_conf()")).fetchone()
            assert loaded is not None
            await until(lambda: _has_loaded(books, loaded[0]), 60, "the new entry")
        for certificate, words in (
            (wrong["none"], "add sslcert and sslkey"),
            (wrong["of another authority"], "correct sslcert and sslkey"),
            (wrong["of an authority of the same name"], "correct sslcert and sslkey"),
            # The server does not say that the certificate has another name than the user.
            (secured.authority.certificate("stranger"), "user or password"),
            (own, ""),
        ):
            dsn = login
            if certificate is not None:
                dsn += f"&sslcert={certificate.certificate}&sslkey={certificate.key}"
            said = ""
            try:
                async with await connect(dsn, "public") as books:
                    assert await (await books.execute("SELECT current_user")).fetchone() == ("certified",)
            except OperationalError as problem:
                said = await refusal(settings, problem) or f"not known: {problem}"
            assert words in said
            assert bool(words) is bool(said)
    finally:
        entries.write_text(before)


async def _has_loaded(books: Any, before: Any) -> bool:
    """Whether the server, and then this session, has read its files since."""
    return (await (await books.execute("SELECT pg_conf_load_time() > %s", (before,))).fetchone()) == (True,)


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["tokens", "certificates"])
async def test_the_round_trip_with(
    way: str,
    environment: dict[str, str],
    secured: SecureServices,
    issuer: Issuer,
    certified_redis: tuple[SecureRedis, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kafka by tokens; or Kafka and a Redis Cluster by certificates."""
    own = secured.authority.certificate(ADMINISTRATOR)
    named = (
        by_token(environment, issuer)
        if way == "tokens"
        else by_certificate(on_cluster(environment, certified_redis, own), secured, own)
    )
    await round_trip(named | {"prefix": way, "schema": way}, tmp_path, monkeypatch)
    if way == "tokens":
        assert issuer.issued


# -- verbs, settings, roles ----------------------------------------------------------------------------------


@pytest.mark.long
def test_a_verb_ends_with_the_refusal(environment: dict[str, str]) -> None:
    done = grabstream("worker", **environment | {"kafka_password": "guessed"})
    assert done.returncode == 3
    assert "correct GRAB_KAFKA_USERNAME or GRAB_KAFKA_PASSWORD" in done.stderr
    assert "guessed" not in done.stderr


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kafka_security_protocol": "SASL_SSL"}, "needs GRAB_KAFKA_USERNAME"),
        ({"kafka_username": "u"}, "GRAB_KAFKA_SECURITY_PROTOCOL=SASL_SSL"),
        ({"kafka_ca": "/none/ca.pem"}, "GRAB_KAFKA_CA: must be a file that can be read"),
        ({"redis_ca": __file__}, "begins with rediss://"),
        ({"kafka_token_url": "http://tokens.example.com/"}, "GRAB_KAFKA_TOKEN_URL: must be an https URL"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    given: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadSettings, match=words.replace("(", r"\(")):
        settings_of(given, monkeypatch)


@pytest.mark.long
async def test_each_role_may_do_its_work_and_nothing_else(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`grabstream grants --apply` twice; then a worker with the roles of a worker, and what must fail."""
    named = environment | {"prefix": "narrow", "schema": "narrow"}
    run(named, "init")
    settings = settings_of(named, monkeypatch)
    planned = json.loads(run(named, "grants", "--apply", "--dry-run", "--json"))
    assert planned["applied"] is False
    of_readers = ("--group", "narrow.reports")
    assert json.loads(run(named, "grants", "--apply", *of_readers, "--json"))["applied"] is True
    run(named, "grants", "--apply", *of_readers)
    administrator = open_redis(settings)
    for role in ("worker", "gate", "reader"):
        await administrator.execute_command("ACL", "SETUSER", f"narrow_{role}", ">secret")
    async with checked_database(settings) as books:
        for role in ("writer", "reader"):
            await books.execute(f"ALTER ROLE narrow_{role} PASSWORD 'secret'")
    await _add_kafka_users(settings)
    worker = named | _as_role(named, "worker", "writer") | _KAFKA_WORKER
    with working(worker, tmp_path / "worker.log"):
        offer = tmp_path / "offer.json"
        terms = {"kind": "stock", "issuer": "shop", "total": 5}
        offer.write_text(json.dumps({"id": "open", "offer": "tea", "terms": terms}))
        gate = named | _as_role(named, "gate", "writer")
        run(gate, "open", str(offer))
        assert "granted" in run(gate, "grab", "tea", "eve")
        await _kafka_allows_and_refuses(settings)
        await _kafka_narrows_groups(settings)
        assert json.loads(run(worker, "verify", "--json"))
        _doctor_tells_a_missing_right_from_a_loss(worker, gate)
        wait_until(lambda: _has_verified(worker), 60, "the verifier of the worker")
    assert "permission" not in (tmp_path / "worker.log").read_text()
    refused = [*_FOR_NOBODY, *_OF_A_WORKER]
    await _redis_refuses(settings_of(named, monkeypatch, **_as_role(named, "gate", "writer")), refused)
    await _redis_refuses(settings_of(named, monkeypatch, **_as_role(named, "worker", "writer")), _FOR_NOBODY)
    await _redis_refuses(
        settings_of(named, monkeypatch, **_as_role(named, "reader", "writer")),
        [
            *refused, ("HSET", "narrow:{narrow-s0}:shard", "seq", "1"), ("PUBLISH", "narrow:x", "1"),
            ("HGETALL", "narrow:{narrow-s0}:offer:tea"), ("HGET", "narrow:{narrow-s1}:offer:tea", "seed"),
        ],
    )  # fmt: skip
    for role, statements in _OF_ROLES.items():
        narrow = settings_of(named, monkeypatch, **_as_role(named, "gate", role))
        async with await connect(narrow.postgres, narrow.schema_, options="-c search_path=narrow") as books:
            for statement in statements:
                with pytest.raises((InsufficientPrivilege, ObjectNotInPrerequisiteState)):
                    await books.execute(statement)
            assert await (await books.execute("SELECT user_id FROM grabs")).fetchall() == [("eve",)]
    await administrator.aclose()


_FOR_NOBODY = [
    ("FLUSHALL",), ("FLUSHDB",), ("CONFIG", "SET", "maxmemory", "1"), ("ACL", "LIST"), ("KEYS", "*"),
    ("FUNCTION", "FLUSH"), ("SCRIPT", "FLUSH"), ("SHUTDOWN", "NOSAVE"),
    ("SET", "another:key", "1"), ("GET", "another:key"),
]  # fmt: skip
#: Only a worker may send these, though it does not need RANDOMKEY.
_OF_A_WORKER = [
    ("FUNCTION", "LOAD", "#!lua name=x\nredis.register_function('x', function() return 1 end)"),
    ("SCAN", "0"), ("RANDOMKEY",),
]  # fmt: skip
_OF_ROLES = {
    "writer": (
        *(f"DELETE FROM {name}" for name in ("system", "read_models", "api_keys")),
        "UPDATE api_keys SET sha256 = ''",
        "DROP TABLE findings",
        "CREATE TABLE narrow.more (n int)",
        "CREATE SCHEMA more",
        "UPDATE transfers SET amount = 1",
        "UPDATE audit SET body = ''",
    ),
    "reader": (
        "SELECT * FROM api_keys",
        "SELECT * FROM webhooks",
        "SELECT * FROM seal_keys",
        "UPDATE grabs SET user_id = 'mallory'",
        "DELETE FROM transfers",
        "INSERT INTO balances VALUES ('mallory', 'CNY', 1, 0)",
        "CREATE SCHEMA more",
    ),
}


def _as_role(environment: dict[str, str], of_redis: str, of_postgres: str) -> dict[str, str]:
    """The settings that log in as these roles."""

    def logged_in(url: str, user: str) -> str:
        scheme, _, rest = url.partition("://")
        return f"{scheme}://{user}:secret@{rest.rpartition('@')[2]}"

    return {
        "redis_url": logged_in(environment["redis_url"], f"narrow_{of_redis}"),
        "postgres": logged_in(environment["postgres"], f"narrow_{of_postgres}"),
    }


def _has_verified(environment: dict[str, str]) -> bool:
    """Whether a pass has compared all shards, Redis too."""
    shard_list = json.loads(run(environment, "status", "--json"))["verified"]
    return all(one["at"] is not None for one in shard_list)


def _doctor_tells_a_missing_right_from_a_loss(worker: dict[str, str], gate: dict[str, str]) -> None:
    """A topic that a login may not describe is not one that is lost: what fixes a loss would do harm."""
    allowed = json.loads(grabstream("doctor", "--json", **worker).stdout)
    assert allowed["servers"] == dict.fromkeys(("redis", "kafka", "postgres")), allowed
    done = grabstream("doctor", **(gate | {"kafka_username": "narrow_gate", "kafka_password": "secret"}))
    assert "Kafka cannot be examined" in done.stdout
    assert "this login may not ask: TopicAuthorizationFailedError" in done.stdout
    assert "missing" not in done.stdout
    assert "lost" not in done.stdout


_KAFKA_WORKER = {"kafka_username": "narrow_worker", "kafka_password": "secret"}
#: Topics that each user may not write, and not read.
_KAFKA_REFUSES = {
    "worker": ("commands operations", "results"),
    "gate": ("journal operations commands results events rejected",) * 2,
    "user": ("journal operations results events rejected", "journal operations commands events rejected"),
    "operator": ("journal commands results events rejected", "journal operations commands events rejected"),
    "reader": ("journal operations commands results events rejected", "journal operations commands results"),
}


class _AlterUsersResponse(Response):  # type: ignore[misc]
    API_KEY = 51
    API_VERSION = 0
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "results",
            CompactArray(
                ("user", CompactString("utf-8")),
                ("error_code", Int16),
                ("error_message", CompactString("utf-8")),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class _AlterUsersBody(RequestStruct):  # type: ignore[misc]
    """AlterUserScramCredentials (KIP-554), which aiokafka lacks."""

    API_KEY = 51
    API_VERSION = 0
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _AlterUsersResponse
    SCHEMA = Schema(
        (
            "deletions",
            CompactArray(("name", CompactString("utf-8")), ("mechanism", Int8), ("tags", TaggedFields)),
        ),
        (
            "upsertions",
            CompactArray(
                ("name", CompactString("utf-8")),
                ("mechanism", Int8),
                ("iterations", Int32),
                ("salt", CompactBytes),
                ("salted_password", CompactBytes),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class _AlterUsers(Request[_AlterUsersBody]):
    API_KEY = 51

    def __init__(self, names: Sequence[str], password: str) -> None:
        self._names, self._password = names, password

    def build(self, request_struct_class: type[_AlterUsersBody]) -> _AlterUsersBody:
        salt, iterations, sha512 = b"salt", 4_096, 2
        salted = hashlib.pbkdf2_hmac("sha512", self._password.encode(), salt, iterations)
        return request_struct_class(
            [], [(name, sha512, iterations, salt, salted, {}) for name in self._names], {}
        )


async def _add_kafka_users(settings: Settings) -> None:
    names = [f"narrow_{role}" for role in _KAFKA_REFUSES]
    async with started(AIOKafkaAdminClient(**brokers.at(settings.brokers))) as client:
        answer = await client._send_request(_AlterUsers(names, "secret"))
    assert [code for _, code, *_ in answer.results] == [0] * len(names), answer


async def _kafka_allows_and_refuses(settings: Settings) -> None:
    """A user and an operator send what they may, and each role is refused everything else."""
    topics = Topics(settings.prefix)
    for role, (unwritable, unreadable) in _KAFKA_REFUSES.items():
        password = SecretStr("secret")
        narrow = settings.model_copy(update={"kafka_username": f"narrow_{role}", "kafka_password": password})
        producer = AIOKafkaProducer(**brokers.at(narrow.brokers), acks="all")
        async with started(producer):
            if role in ("user", "operator"):
                own = topics.commands if role == "user" else topics.operations
                await producer.send_and_wait(own, b"[]", partition=0)
            for name in unwritable.split():
                with pytest.raises(TopicAuthorizationFailedError):
                    await producer.send_and_wait(getattr(topics, name), b"forged", partition=0)
        async with (
            started(AIOKafkaAdminClient(**brokers.at(narrow.brokers))) as client,
            started(AIOKafkaConsumer(**brokers.at(narrow.brokers), auto_offset_reset="earliest")) as consumer,
        ):
            for name in unreadable.split():
                topic = getattr(topics, name)
                [described] = await client.describe_topics([topic])
                if described["error_code"] == TopicAuthorizationFailedError.errno:
                    continue  # not even its partitions are listed, so nothing can be fetched
                consumer.assign([TopicPartition(topic, 0)])
                with pytest.raises(TopicAuthorizationFailedError):
                    async with asyncio.timeout(60):
                        await consumer.getone()


#: By role: groups in which it may read, and groups in which it may not: of deciders, and of the system with
#: the prefix `narrow.eu`.
_GROUPS = {
    "worker": ("narrow.decider narrow.decider.operations narrow.ledger:1-balances:1 narrow.events",
               "narrow.reports narrow.eu.decider narrow.eu.ledger:1-balances:1 narrow.events.decider"),
    "reader": ("narrow.reports",
               "narrow.decider narrow.ledger:1-balances:1 narrow.events narrow.reports2 narrow.eu.reports"),
}  # fmt: skip


async def _kafka_narrows_groups(settings: Settings) -> None:
    for role, (own, others) in _GROUPS.items():
        password = SecretStr("secret")
        narrow = settings.model_copy(update={"kafka_username": f"narrow_{role}", "kafka_password": password})
        async with started(AIOKafkaAdminClient(**brokers.at(narrow.brokers))) as client:
            for group in own.split():
                await client.find_coordinator(group)
            for group in others.split():
                with pytest.raises(GroupAuthorizationFailedError):
                    await client.find_coordinator(group)


async def _redis_refuses(settings: Settings, commands: list[tuple[str, ...]]) -> None:
    client = open_redis(settings)
    try:
        for words in commands:
            with pytest.raises(NoPermissionError):
                await client.execute_command(*words)
    finally:
        await client.aclose()
