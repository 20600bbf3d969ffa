"""The three servers with TLS and logins, as in production: their certificates, users and passwords are made
once, under the directory of the set.

Redis serves TLS only; its user `default` is off. Kafka serves SASL over TLS (SCRAM-SHA-512), its controller
TLS with certificates of both sides; without an ACL only its administrator may do anything. PostgreSQL accepts
TLS and passwords only.
"""

import contextlib
import json
import secrets
import shutil
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from grabstream.workshop.services.local import ServerSet
from grabstream.workshop.services.servers import Kafka, Postgres, Redis, Say

if TYPE_CHECKING:
    from grabstream.workshop.services.certificates import Certificate, CertificateAuthority

HOST: Final = "127.0.0.1"
#: The user that may do everything, on each of the three servers.
ADMINISTRATOR: Final = "grabstream"


class Passwords:
    """The passwords of the administrators, made once, in a file that only its owner can read."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "passwords.json"

    def of(self, server: str) -> str:
        """The password of the administrator of a server."""
        made = json.loads(self._file.read_text()) if self._file.exists() else {}
        if server not in made:
            made[server] = secrets.token_hex(16)
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.touch(mode=0o600)
            self._file.write_text(json.dumps(made))
        return str(made[server])


class TokenIssuer(NamedTuple):
    """Whose tokens brokers admit: where the issuer has its keys (a JWK set), and what a token must name as
    its issuer and audience.
    """

    keys_url: str
    issuer: str
    audience: str


class SecureRedis(Redis):
    """Redis that serves TLS only, with users in a file. It accepts certificates of clients; with
    `requires_certificates`, of the same authority, it serves no client without one.
    """

    def __init__(
        self,
        directory: Path,
        port: int,
        authority: "CertificateAuthority",
        certificate: "Certificate",
        password: str,
        name: str | None = None,
        bus_port: int | None = None,
        requires_certificates: bool = False,
    ) -> None:
        super().__init__(directory, port, name, bus_port)
        self._requires_certificates = requires_certificates
        self._authority, self._certificate, self._password = authority, certificate, password

    @property
    def users(self) -> Path:
        """The file of the users, which `ACL SAVE` writes."""
        return self.directory / f"{self.name}.acl"

    def prepare(self, report: Say) -> None:
        """Also writes the file of users, once."""
        super().prepare(report)
        if not self.users.exists():
            self.users.touch(mode=0o600)
            self.users.write_text(self.users_text())
        # Replicas log in at their master. Users of the machine can read arguments, but not this file.
        self._login.touch(mode=0o600)
        self._login.write_text(f"masteruser {ADMINISTRATOR}\nmasterauth {self._password}\n")

    def users_text(self) -> str:
        """The users of a new server: its administrator alone."""
        return f"user default off\nuser {ADMINISTRATOR} on >{self._password} ~* &* +@all\n"

    @property
    def _login(self) -> Path:
        return self.directory / f"{self.name}.conf"

    def options(self) -> dict[str, object]:
        """With TLS on its port, and no other."""
        options = super().options() | {
            "port": 0,
            "tls-port": self.port,
            "tls-cert-file": self._certificate.certificate,
            "tls-key-file": self._certificate.key,
            "tls-ca-cert-file": self._authority.ca,
            "tls-auth-clients": "yes" if self._requires_certificates else "optional",
            "aclfile": self.users,
        }
        if self.bus_port is not None:
            options |= {"tls-cluster": "yes", "tls-replication": "yes"}
        return options

    def command(self) -> list[str]:
        """With its login at a master in a file."""
        program, *words = super().command()
        return [program, str(self._login), *words]

    def environment(self) -> dict[str, str]:
        """The settings (without GRAB_) of its administrator."""
        return {
            "redis_url": f"rediss://{ADMINISTRATOR}:{self._password}@{HOST}:{self.port}/0",
            "redis_ca": str(self._authority.ca),
        }

    def client(self) -> Any:
        """A client of its administrator, with the certificate of the server, in case one is required."""
        return redis.Redis(
            host=HOST, port=self.port, username=ADMINISTRATOR, password=self._password, ssl=True,
            ssl_ca_certs=str(self._authority.ca), ssl_certfile=str(self._certificate.certificate),
            ssl_keyfile=str(self._certificate.key), socket_timeout=5, retry=Retry(NoBackoff(), 0),
        )  # fmt: skip

    def ready(self) -> bool:
        """Whether the server answers its administrator."""
        with contextlib.suppress(redis.RedisError), self.client() as client:
            return bool(client.ping())
        return False


class SecureKafka(Kafka):
    """Kafka with SASL (SCRAM-SHA-512) over TLS, and ACLs. It accepts certificates of clients, and does not
    require them.

    With `tokens`, it also admits OAUTHBEARER. With a `certificates_port`, it listens there too, and admits
    every holder of a certificate of the authority, without SASL: the user is the common name of the
    certificate.
    """

    def __init__(
        self,
        directory: Path,
        port: int,
        controller_ports: Sequence[int],
        authority: "CertificateAuthority",
        certificate: "Certificate",
        password: str,
        heap_mb: int = 768,
        tokens: TokenIssuer | None = None,
        certificates_port: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(directory, port, controller_ports, heap_mb, **options)
        self._authority, self._certificate, self._password = authority, certificate, password
        self._tokens, self.certificates_port = tokens, certificates_port

    def tls(self) -> ssl.SSLContext:
        """As its clients."""
        return ssl.create_default_context(cafile=self._authority.ca)

    def format_options(self) -> list[str]:
        """The administrator, whom the storage has from the beginning."""
        return ["--add-scram", f"SCRAM-SHA-512=[name={ADMINISTRATOR},password={self._password}]"]

    def system_properties(self) -> list[str]:
        """From where a broker may read keys; it reads them from nowhere else."""
        if self._tokens is None:
            return []
        return [f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={self._tokens.keys_url}"]

    def properties(self) -> dict[str, object]:
        """With TLS, logins and ACLs."""
        properties = super().properties()
        controller_port = self.controller_ports[self.index]
        login = (
            "org.apache.kafka.common.security.scram.ScramLoginModule required "
            f'username="{ADMINISTRATOR}" password="{self._password}";'
        )
        properties |= {
            "listeners": f"SASL_SSL://{HOST}:{self.port},CONTROLLER://{HOST}:{controller_port}",
            "advertised.listeners": f"SASL_SSL://{HOST}:{self.port}",
            "listener.security.protocol.map": "SASL_SSL:SASL_SSL,SSL:SSL,CONTROLLER:SSL",
            "security.inter.broker.protocol": "SASL_SSL",
            "sasl.mechanism.inter.broker.protocol": "SCRAM-SHA-512",
            "sasl.enabled.mechanisms": "SCRAM-SHA-512",
            "listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config": login,
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": self._certificate.both,
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": self._authority.ca,
            "listener.name.sasl_ssl.ssl.client.auth": "requested",
            "listener.name.controller.ssl.client.auth": "required",
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": f"User:{ADMINISTRATOR};User:CN={self._certificate.certificate.stem}",
        }
        if self._tokens is not None:
            properties |= {
                "sasl.enabled.mechanisms": "SCRAM-SHA-512,OAUTHBEARER",
                "sasl.oauthbearer.jwks.endpoint.url": self._tokens.keys_url,
                # The default of Kafka 4.1.0 and 4.1.1 believes every token (CVE-2026-33557).
                "sasl.oauthbearer.jwt.validator.class": (
                    "org.apache.kafka.common.security.oauthbearer.BrokerJwtValidator"
                ),
                "sasl.oauthbearer.expected.issuer": self._tokens.issuer,
                "sasl.oauthbearer.expected.audience": self._tokens.audience,
                "listener.name.sasl_ssl.oauthbearer.sasl.jaas.config": (
                    "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required;"
                ),
                "listener.name.sasl_ssl.oauthbearer.sasl.server.callback.handler.class": (
                    "org.apache.kafka.common.security.oauthbearer.OAuthBearerValidatorCallbackHandler"
                ),
            }
        if self.certificates_port is not None:
            address = f",SSL://{HOST}:{self.certificates_port}"
            properties |= {
                "listeners": f"{properties['listeners']}{address}",
                "advertised.listeners": f"{properties['advertised.listeners']}{address}",
                "listener.name.ssl.ssl.client.auth": "required",
                "listener.name.ssl.ssl.principal.mapping.rules": "RULE:^CN=([A-Za-z0-9._-]+)$/$1/,DEFAULT",
            }
        return properties


class SecurePostgres(Postgres):
    """PostgreSQL that accepts TLS and passwords only. It accepts certificates of clients, and does not
    require them.
    """

    def __init__(
        self,
        directory: Path,
        port: int,
        authority: "CertificateAuthority",
        certificate: "Certificate",
        password: str,
    ) -> None:
        super().__init__(directory, port)
        self._authority, self._certificate, self._password = authority, certificate, password

    def initialization(self) -> list[str]:
        """The administrator's password, from a file that is deleted afterwards."""
        return ["-A", "scram-sha-256", "--pwfile", str(self._password_file)]

    @property
    def _password_file(self) -> Path:
        return self.data.with_suffix(".password")

    def prepare(self, report: Say) -> None:
        """Also copies the certificate, which PostgreSQL wants to own, and configures the allowed
        connections.
        """
        self._password_file.touch(mode=0o600)
        self._password_file.write_text(self._password)
        if (user := self.user()) is not None:
            shutil.chown(self._password_file, user=user)
        try:
            super().prepare(report)
        finally:
            self._password_file.unlink()
        for source, name in (
            (self._certificate.certificate, "server.crt"),
            (self._certificate.key, "server.key"),
            (self._authority.ca, "root.crt"),
        ):
            target = self.data / name
            target.unlink(missing_ok=True)
            target.touch(mode=0o600)
            target.write_bytes(source.read_bytes())
            if user is not None:
                shutil.chown(target, user=user)
        (self.data / "pg_hba.conf").write_text(f"hostssl all all {HOST}/32 scram-sha-256\n")

    def command(self) -> list[str]:
        """With TLS."""
        return [*super().command(), "-c", "ssl=on", "-c", "ssl_ca_file=root.crt"]

    def target(self) -> dict[str, Any]:
        """Where and how its administrator connects."""
        return super().target() | {
            "password": self._password,
            "sslmode": "verify-full",
            "sslrootcert": str(self._authority.ca),
        }


class SecureServices(ServerSet):
    """One Redis, one Kafka and PostgreSQL, secured."""

    def __init__(
        self,
        directory: Path,
        redis_port: int,
        kafka_port: int,
        controller_port: int,
        postgres_port: int,
        kafka_heap_mb: int = 768,
        **kafka: Any,
    ) -> None:
        # Imported here: only this set needs it, and every verb that knows of servers imports this module.
        from grabstream.workshop.services.certificates import CertificateAuthority

        directory = directory.resolve()
        self.authority = CertificateAuthority(directory / "certificates")
        self.passwords = Passwords(directory)
        server = self.authority.certificate("server", (HOST, "localhost"))

        def secured(of: str) -> "tuple[CertificateAuthority, Certificate, str]":
            return self.authority, server, self.passwords.of(of)

        self.redis = SecureRedis(directory, redis_port, *secured("redis"))
        self.kafka = SecureKafka(
            directory, kafka_port, (controller_port,), *secured("kafka"), kafka_heap_mb, **kafka
        )
        postgres = SecurePostgres(directory, postgres_port, *secured("postgres"))
        super().__init__(directory, (self.redis, self.kafka), postgres)

    def environment(self) -> dict[str, str]:
        """The settings (without GRAB_) of the administrators."""
        ca, password = str(self.authority.ca), self.passwords.of
        return {
            **self.redis.environment(),
            "kafka": f"{HOST}:{self.kafka.port}",
            "kafka_security_protocol": "SASL_SSL",
            "kafka_username": ADMINISTRATOR,
            "kafka_password": password("kafka"),
            "kafka_ca": ca,
            "postgres": (
                f"postgresql://{ADMINISTRATOR}:{password('postgres')}@{HOST}:{self.postgres.port}/grabstream"
                f"?sslmode=verify-full&sslrootcert={ca}"
            ),
        }
