"""The files of the secured servers of compose.yaml, used by the same servers as plain processes."""

import ssl
from pathlib import Path

import pytest

from grabstream.connections.opening import open_redis
from grabstream.settings import Settings, load_settings
from grabstream.streams.topic_ids import find_topic
from grabstream.workshop.services import free_ports
from grabstream.workshop.services.container_files import ContainerServer, Places, write
from grabstream.workshop.services.servers import Kafka, Redis

HOST = "127.0.0.1"


class WrittenRedis(Redis):
    """Redis with the file that was written for its container."""

    def command(self) -> list[str]:
        return ["redis-server", str(self.directory / "redis.conf")]

    def ready(self) -> bool:
        return "Ready to accept connections" in self.log_file.read_text()


class WrittenKafka(Kafka):
    """Kafka with the files that were written for its container."""

    def properties(self) -> dict[str, object]:
        lines = (self.directory / "kafka.properties").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines)

    def format_options(self) -> list[str]:
        return ["--add-scram", (self.directory / "kafka.scram").read_text()]

    def tls(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.directory / "ca.pem")


@pytest.fixture
def places(tmp_path: Path) -> Places:
    redis, kafka, controller, postgres = free_ports(4)
    for name in ("kafka", "redis-data"):
        (tmp_path / name).mkdir()
    return Places(
        ContainerServer(HOST, redis, tmp_path, tmp_path / "redis-data"),
        ContainerServer(HOST, kafka, tmp_path, tmp_path / "kafka"),
        ContainerServer(HOST, postgres, tmp_path, tmp_path / "postgres"),
        controller,
        tmp_path,
    )


@pytest.fixture
def written(places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """The settings that compose.yaml gives to grabstream."""
    write(tmp_path, places)
    for name in ("REDIS_URL", "KAFKA", "POSTGRES"):
        monkeypatch.delenv(f"GRAB_{name}", raising=False)
    for name, value in {
        "REDIS_URL_FILE": tmp_path / "redis.url",
        "REDIS_CA": tmp_path / "ca.pem",
        "KAFKA": f"{HOST}:{places.kafka.port}",
        "KAFKA_SECURITY_PROTOCOL": "SASL_SSL",
        "KAFKA_USERNAME": "grabstream",
        "KAFKA_PASSWORD_FILE": tmp_path / "kafka.password",
        "KAFKA_CA": tmp_path / "ca.pem",
        "POSTGRES_FILE": tmp_path / "postgres.dsn",
    }.items():
        monkeypatch.setenv(f"GRAB_{name}", str(value))
    # The .env of the project has addresses that the files would contradict.
    monkeypatch.chdir(tmp_path)
    return load_settings()


async def test_redis_admits_who_has_the_files(written: Settings, places: Places, tmp_path: Path) -> None:
    server = WrittenRedis(tmp_path, places.redis.port)
    server.start()
    client = open_redis(written)
    try:
        await client.set("key", "value")
        assert (await client.config_get("maxmemory-policy"))["maxmemory-policy"] == "noeviction"
    finally:
        await client.aclose()
        server.kill()
    assert list((tmp_path / "redis-data").iterdir()), "the data are where the volume is"
    assert "sslmode=verify-full" in written.postgres


@pytest.mark.nightly
async def test_kafka_admits_who_has_the_files(written: Settings, places: Places, tmp_path: Path) -> None:
    server = WrittenKafka(tmp_path, places.kafka.port, (places.controller_port,), heap_mb=320)
    server.start()
    try:
        assert await find_topic(written.brokers, "none") is None
    finally:
        server.kill()


def test_a_second_time_changes_nothing(places: Places, tmp_path: Path) -> None:
    names = write(tmp_path, places)
    before = {name: (tmp_path / name).read_bytes() for name in names if (tmp_path / name).is_file()}
    assert write(tmp_path, places) == names
    assert before == {name: (tmp_path / name).read_bytes() for name in before}
    readable = [name for name in before if (tmp_path / name).stat().st_mode & 0o077]
    assert readable == ["ca.pem"]
