"""How long servers may take, and what is kept for them, by settings: each arrives at the client."""

from typing import Any

import psycopg
import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.admin import AIOKafkaAdminClient

from grabstream.client.over_kafka import KafkaClient
from grabstream.connections.opening import open_redis
from grabstream.projections.database.sessions import DEFAULTS, connect
from grabstream.settings import BadSettings, Settings, load_settings
from grabstream.streams import brokers
from grabstream.streams.projecting.agents import REQUEST_SECONDS, build_app
from grabstream.streams.projecting.publisher import make_producer


def times_of(client: Any) -> tuple[int, float, int]:
    """How long a request of a client of Kafka may take (ms), the pause before the next attempt (s), and how
    long a connection is kept (ms).
    """
    return client._request_timeout_ms, client._retry_backoff, client._connections_max_idle_ms


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings with non-default times."""
    monkeypatch.setenv("GRAB_KAFKA_REQUEST_TIMEOUT_MS", "120000")
    monkeypatch.setenv("GRAB_KAFKA_RETRY_BACKOFF_MS", "750")
    monkeypatch.setenv("GRAB_KAFKA_CONNECTIONS_MAX_IDLE_MS", "200000")
    monkeypatch.setenv("GRAB_REDIS_TIMEOUT_MS", "1250")
    monkeypatch.setenv("GRAB_REDIS_CONNECTIONS_MAX", "77")
    return load_settings()


async def test_times_of_kafka_arrive_at_its_clients(chosen: Settings) -> None:
    wanted = (120_000, 0.75, 200_000)
    assert times_of(make_producer(chosen.brokers).client) == wanted
    service = KafkaClient(chosen.kafka, chosen.prefix, **chosen.kafka_options())
    assert times_of(service._producer.client) == times_of(service._consumer._client) == wanted
    consumer = AIOKafkaConsumer(**brokers.at(chosen.brokers, timeout_ms=8_000))
    assert times_of(consumer._client) == wanted
    # A question whether the brokers answer keeps its bound.
    asking = AIOKafkaAdminClient(**brokers.at(chosen.brokers, timeout_ms_max=5_000))
    assert times_of(asking._client) == (5_000, *wanted[1:])
    app = build_app(chosen.brokers, chosen.prefix, chosen.shards, [])
    assert app.conf.broker_request_timeout == 120
    assert app.conf.consumer_connections_max_idle_ms == 200_000


async def test_times_of_kafka_are_those_of_each_client_without_settings(servers: Settings) -> None:
    wanted = (40_000, 0.1, 540_000)
    assert times_of(make_producer(servers.brokers).client) == wanted
    relay = AIOKafkaConsumer(**brokers.at(servers.brokers, timeout_ms=8_000))
    assert times_of(relay._client) == (8_000, *wanted[1:])
    app = build_app(servers.brokers, servers.prefix, servers.shards, [])
    assert app.conf.broker_request_timeout == REQUEST_SECONDS > app.conf.broker_rebalance_timeout


def test_brokers_keep_their_times_in_another_process(chosen: Settings) -> None:
    kind, parts = chosen.brokers.__reduce__()
    assert kind(*parts).times == (120_000, 750, 200_000)


@pytest.mark.requirement("F3")
async def test_times_of_redis_arrive_at_its_client(chosen: Settings) -> None:
    pool = open_redis(chosen).connection_pool
    assert pool.max_connections == 77
    options = pool.connection_kwargs
    assert (options["socket_timeout"], options["socket_connect_timeout"]) == (1.25, 1.25)


async def test_parameters_of_the_dsn_arrive_at_postgresql(servers: Settings) -> None:
    async with await connect(servers.postgres, "grabstream") as connection:
        used = connection.info.get_parameters()
        assert {name: used[name] for name in DEFAULTS} == {name: str(of) for name, of in DEFAULTS.items()}
    own = {"connect_timeout": "7", "tcp_user_timeout": "12000", "options": "-c statement_timeout=61s"}
    dsn = psycopg.conninfo.make_conninfo(servers.postgres, **own)
    async with await connect(dsn, "grabstream") as connection:
        used = connection.info.get_parameters()
        assert {name: used[name] for name in own} == own
        assert used["keepalives_idle"] == "30"
        [bound] = await (await connection.execute("SHOW statement_timeout")).fetchone()  # type: ignore[misc]
        assert bound == "61s"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("KAFKA_REQUEST_TIMEOUT_MS", "9999", "greater than or equal to 10000"),
        ("KAFKA_REQUEST_TIMEOUT_MS", "300001", "less than or equal to 300000"),
        ("KAFKA_RETRY_BACKOFF_MS", "0", "greater than or equal to 10"),
        ("KAFKA_CONNECTIONS_MAX_IDLE_MS", "9999", "greater than or equal to 10000"),
        ("POSTGRES", "postgresql://a@h/d?connect_timeout=0", "connect_timeout must be from 1 to 60 s"),
        ("POSTGRES", "host=h connect_timeout=61", "connect_timeout must be from 1 to 60 s"),
    ],
)
def test_times_beyond_their_bounds_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    monkeypatch.setenv(f"GRAB_{name}", value)
    with pytest.raises(BadSettings, match=f"GRAB_{name}: .*{words}"):
        load_settings()
