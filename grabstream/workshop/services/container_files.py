"""`python -m grabstream.workshop.services.container_files DIRECTORY`: what the secured servers of
compose.yaml need, made once: an authority, certificates, passwords, the configuration of each server, and the
addresses with passwords for grabstream.

Only the user that runs this can read the files, apart from the certificate of the authority. Redis and
PostgreSQL run as other users, so their containers copy what they need to their own folder.
"""

import sys
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from grabstream.workshop.services.certificates import CertificateAuthority
from grabstream.workshop.services.secure import ADMINISTRATOR, Passwords, SecureKafka, SecureRedis


class ContainerServer(NamedTuple):
    """A server as its container sees it: its name in the network, its port, and the folders of its files and
    of its data.
    """

    host: str
    port: int
    files: Path
    data: Path


class Places(NamedTuple):
    """The three servers, the port of Kafka's controller, and the folder that grabstream sees."""

    redis: ContainerServer = ContainerServer("redis-secure", 6379, Path("/tls"), Path("/data"))
    kafka: ContainerServer = ContainerServer(
        "kafka-secure", 29092, Path("/certificates"), Path("/var/lib/kafka/data")
    )
    postgres: ContainerServer = ContainerServer(
        "postgres-secure", 5432, Path("/tls"), Path("/var/lib/postgresql/data")
    )
    controller_port: int = 9093
    files: Path = Path("/certificates")


def write(directory: Path, places: Places) -> list[str]:
    """Writes the files; a second time changes no certificate and no password. Returns their names; raises
    OSError when it cannot.
    """
    authority, passwords = CertificateAuthority(directory), Passwords(directory)
    texts = {
        **_redis_files(directory, authority, passwords, places.redis),
        **_kafka_files(directory, authority, passwords, places),
        **_postgres_files(authority, passwords, places.postgres),
        **_grabstream_files(passwords, places),
    }
    for name, text in texts.items():
        file = directory / name
        file.touch(mode=0o600)
        file.write_text(text)
    return sorted(path.name for path in directory.iterdir())


def _hosts(place: ContainerServer) -> tuple[str, ...]:
    """What a certificate names: also the container itself, for its health check."""
    return place.host, "localhost", "127.0.0.1"


def _redis_files(
    directory: Path, authority: CertificateAuthority, passwords: Passwords, place: ContainerServer
) -> dict[str, str]:
    certificate = authority.certificate(place.host, _hosts(place))
    password = passwords.of("redis")
    server = SecureRedis(directory, place.port, authority, certificate, password)
    options = server.options() | {
        "bind": "* -::*",
        "dir": place.data,
        "tls-cert-file": place.files / certificate.certificate.name,
        "tls-key-file": place.files / certificate.key.name,
        "tls-ca-cert-file": place.files / authority.ca.name,
        "aclfile": place.files / "redis.acl",
    }
    return {
        "redis.conf": "".join(f"{name} {_quoted(str(value))}\n" for name, value in options.items()),
        "redis.acl": server.users_text(),
        "redis.password": password,
    }


def _quoted(value: str) -> str:
    return value or '""'


def _kafka_files(
    directory: Path, authority: CertificateAuthority, passwords: Passwords, places: Places
) -> dict[str, str]:
    place = places.kafka
    certificate = authority.certificate(place.host, _hosts(place))
    server = SecureKafka(
        directory, place.port, (places.controller_port,), authority, certificate, passwords.of("kafka")
    )
    trusted = {"ssl.truststore.type": "PEM", "ssl.truststore.location": place.files / authority.ca.name}
    properties = server.properties() | trusted | {
        "controller.quorum.voters": f"1@{place.host}:{places.controller_port}",
        "listeners": f"SASL_SSL://:{place.port},CONTROLLER://:{places.controller_port}",
        "advertised.listeners": f"SASL_SSL://{place.host}:{place.port}",
        "log.dirs": place.data,
        "ssl.keystore.location": place.files / certificate.both.name,
    }  # fmt: skip
    client = trusted | {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.jaas.config": properties["listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config"],
    }
    return {
        "kafka.properties": _properties(properties),
        "kafka-client.properties": _properties(client),
        "kafka.scram": server.format_options()[1],
        "kafka.password": passwords.of("kafka"),
    }


def _properties(properties: dict[str, object]) -> str:
    return "".join(f"{name}={value}\n" for name, value in properties.items())


def _postgres_files(
    authority: CertificateAuthority, passwords: Passwords, place: ContainerServer
) -> dict[str, str]:
    authority.certificate(place.host, _hosts(place))
    return {
        # The first line is for the container itself, which creates the database.
        "pg_hba.conf": "local all all scram-sha-256\nhostssl all all all scram-sha-256\n",
        "postgres.password": passwords.of("postgres"),
    }


def _grabstream_files(passwords: Passwords, places: Places) -> dict[str, str]:
    redis, postgres = places.redis, places.postgres
    return {
        "redis.url": f"rediss://{ADMINISTRATOR}:{passwords.of('redis')}@{redis.host}:{redis.port}/0",
        "postgres.dsn": (
            f"postgresql://{ADMINISTRATOR}:{passwords.of('postgres')}@{postgres.host}:{postgres.port}"
            f"/grabstream?sslmode=verify-full&sslrootcert={quote(str(places.files / 'ca.pem'), safe='')}"
        ),
    }


def main() -> None:
    """Writes the files for the containers of compose.yaml."""
    [directory] = sys.argv[1:]
    write(Path(directory), Places())


if __name__ == "__main__":
    main()
