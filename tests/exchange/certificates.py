"""Certificates for tests, made on the spot, and an identity that uses them as a site would."""

from __future__ import annotations

import datetime
import ssl
import tempfile
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from adp2sgd.errors import RefusedError

DAY = datetime.timedelta(days=1)


class Authority:
    """Signs certificates for sites."""

    def __init__(self, name: str = "consortium") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(name)
        self.folder = Path(tempfile.mkdtemp(prefix="adp2sgd-test-"))
        self._serial = 1
        certificate = self._signed(self._name, self._key.public_key(), days=9, authority=True)
        self.path = self.folder / "authority.pem"
        self.path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *, days: float = 5) -> Path:
        """A file with a certificate for `name` and its key. Negative `days`: expired so long ago."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._signed(_named(name), key.public_key(), days=days)
        self._serial += 1
        path = self.folder / f"{name}-{self._serial}.pem"
        secret = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM) + secret)
        return path

    def _signed(self, name: x509.Name, key: Any, *, days: float, authority: bool = False) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(self._name).public_key(key)
        builder = builder.serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - 20 * DAY).not_valid_after(now + days * DAY)
        builder = builder.add_extension(x509.BasicConstraints(authority, None), critical=True)
        return builder.sign(self._key, hashes.SHA256())


class Certified:
    """An identity as `exchange/handshake.py` wants it: names in a roster, one authority, a HELLO to compare."""

    def __init__(
        self,
        name: str,
        authority: Authority,
        roster: Iterable[str],
        *,
        certificate: Path | None = None,
        hello: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.roster = set(roster)
        self.certificate = certificate or authority.issue(name)
        self._authority = authority
        self._hello = {"version": 1, "run": "digest", **(hello or {})}

    def server_context(self) -> ssl.SSLContext:
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def client_context(self) -> ssl.SSLContext:
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def verify(self, peer_certificate_der: bytes) -> str:
        subject = x509.load_der_x509_certificate(peer_certificate_der).subject
        name = str(subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)
        if name not in self.roster:
            raise RefusedError(f"site {name} is not in the roster")
        return name

    def hello(self) -> dict[str, Any]:
        return dict(self._hello)

    def check_hello(self, theirs: Mapping[str, Any]) -> None:
        for key, value in self._hello.items():
            if theirs.get(key) != value:
                raise RefusedError(f"{key} differs: {theirs.get(key)!r} there, {value!r} here")

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(self.certificate)
        context.load_verify_locations(self._authority.path)
        return context


@cache
def consortium() -> Authority:
    """One authority for all tests that need nothing special."""
    return Authority()


@cache
def member(name: str) -> Path:
    """A certificate of the common authority."""
    return consortium().issue(name)


def site(number: int) -> str:
    return f"site-{number}"


def identity(number: int, count: int = 3, **changes: Any) -> Certified:
    """Site `number` of `count` sites that trust each other."""
    names = [site(k) for k in range(count)]
    return Certified(site(number), consortium(), names, **{"certificate": member(site(number)), **changes})


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
