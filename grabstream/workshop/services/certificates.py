"""A private authority and its certificates, for servers on this machine."""

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Final, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAYS: Final = 825
#: A clock that is behind may read a certificate that was just made.
EARLIER: Final = timedelta(hours=1)


class Certificate(NamedTuple):
    """Files, in PEM: a certificate, its private key (PKCS #8), and both in one file."""

    certificate: Path
    key: Path
    both: Path


class CertificateAuthority:
    """Signs certificates; its own is in the file `ca`. Every file is made once. Only its owner can read it,
    apart from `ca`.
    """

    def __init__(self, directory: Path, name: str = "grabstream local authority") -> None:
        self.directory = directory
        self._name = name
        self.ca = directory / "ca.pem"
        self._key_file = directory / "ca.key"

    def certificate(self, name: str, hosts: tuple[str, ...] = (), days: float = DAYS) -> Certificate:
        """The certificate of this name, for a server at `hosts` (names, addresses) or, without any, for a
        client. With negative `days` it has ended.
        """
        made = Certificate(*(self.directory / f"{name}.{end}" for end in ("pem", "key", "both.pem")))
        if made.both.exists():
            return made
        authority_key, authority = self._authority()
        key = ec.generate_private_key(ec.SECP256R1())
        usage = ExtendedKeyUsageOID.SERVER_AUTH if hosts else ExtendedKeyUsageOID.CLIENT_AUTH
        # A broker is the client of other brokers, too.
        usages = [usage, ExtendedKeyUsageOID.CLIENT_AUTH] if hosts else [usage]
        builder = _builder(name, authority.subject, key, days).add_extension(
            x509.ExtendedKeyUsage(usages), critical=False
        )
        if hosts:
            names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
            builder = builder.add_extension(names, critical=False)
        signed = builder.sign(authority_key, hashes.SHA256()).public_bytes(Encoding.PEM)
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        _write(made.certificate, signed)
        _write(made.key, private)
        _write(made.both, private + signed)
        return made

    def _authority(self) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
        if self.ca.exists():
            key = load_pem_private_key(self._key_file.read_bytes(), None)
            assert isinstance(key, ec.EllipticCurvePrivateKey)
            return key, x509.load_pem_x509_certificate(self.ca.read_bytes())
        self.directory.mkdir(parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        authority = (
            _builder(self._name, _name(self._name), key, DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(key, hashes.SHA256())
        )
        _write(self._key_file, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        self.ca.write_bytes(authority.public_bytes(Encoding.PEM))
        return key, authority


def _builder(
    name: str, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    ends = now + timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, ends) - EARLIER)
        .not_valid_after(ends)
    )


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write(path: Path, content: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(content)
