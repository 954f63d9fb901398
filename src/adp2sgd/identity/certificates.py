"""Certificates and keys as files: made, read, and described in words.

A site's name is the common name of its certificate, or one of its DNS names. Keys are P-256, which every TLS 1.3
library supports. A key file that others can read is refused.
"""

from __future__ import annotations

import re
import stat
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from adp2sgd.errors import IdentityError
from adp2sgd.files import replacing

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,62}")
SOON = timedelta(days=30)  # an expiry that is nearer is a warning
SKEW = timedelta(minutes=5)  # clocks of sites may differ by so much


def check_name(name: str) -> str:
    """Refuse a site name that cannot be a file's and a certificate's name."""
    if not NAME.fullmatch(name):
        raise IdentityError(f'site name "{name}" is not possible; use letters, digits, "-" and ".", 63 at most')
    return name


@dataclass(frozen=True, eq=False)
class Certificate:
    """A certificate and what people ask about it. `fingerprint` is the SHA-256 of its DER form, in hex."""

    parsed: x509.Certificate

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def names(self) -> tuple[str, ...]:
        """The common name, then the DNS names."""
        from cryptography import x509
        from cryptography.x509.oid import NameOID

        common = [str(part.value) for part in self.parsed.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        try:
            other = self.parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            dns = other.get_values_for_type(x509.DNSName)
        except x509.ExtensionNotFound:
            dns = []
        return tuple(dict.fromkeys([*common, *dns])) or ("(no name)",)

    @property
    def issuer(self) -> str:
        from cryptography.x509.oid import NameOID

        found = self.parsed.issuer.get_attributes_for_oid(NameOID.COMMON_NAME)
        return str(found[0].value) if found else "(no name)"

    @property
    def serial(self) -> int:
        return self.parsed.serial_number

    @property
    def starts(self) -> datetime:
        return self.parsed.not_valid_before_utc

    @property
    def expires(self) -> datetime:
        return self.parsed.not_valid_after_utc

    @property
    def fingerprint(self) -> str:
        from cryptography.hazmat.primitives import hashes

        return self.parsed.fingerprint(hashes.SHA256()).hex()

    @property
    def pem(self) -> str:
        from cryptography.hazmat.primitives.serialization import Encoding

        return self.parsed.public_bytes(Encoding.PEM).decode()

    def issued_by(self, authority: Certificate) -> bool:
        """Whether `authority` has signed this certificate."""
        from cryptography.exceptions import InvalidSignature

        try:
            self.parsed.verify_directly_issued_by(authority.parsed)
        except (ValueError, TypeError, InvalidSignature):
            return False
        return True

    def trouble(self, now: datetime | None = None) -> str | None:
        """Why the certificate cannot be used at this time; None if it can."""
        now = now or datetime.now(UTC)
        if now > self.expires:
            return f"the certificate of {self.name} expired on {day(self.expires)}"
        if now < self.starts:
            return f"the certificate of {self.name} is valid only from {day(self.starts)}; check this machine's clock"
        return None

    def warning(self, now: datetime | None = None) -> str | None:
        now = now or datetime.now(UTC)
        if now <= self.expires < now + SOON:
            return f"the certificate of {self.name} expires on {day(self.expires)}; renew it before"
        return None


def day(moment: datetime) -> str:
    """A time for people, in UTC."""
    return moment.strftime("%Y-%m-%d %H:%M UTC")


def read_certificate(path: Path) -> Certificate:
    """The first certificate of a PEM file, or that of a DER file."""
    data = read_file(path, "certificate")
    return parse_certificate(data, str(path))


def parse_certificate(data: bytes, where: str = "certificate") -> Certificate:
    from cryptography import x509

    try:
        load = x509.load_pem_x509_certificate if b"-----BEGIN" in data else x509.load_der_x509_certificate
        return Certificate(load(data))
    except ValueError:
        raise IdentityError(f"{where} is no certificate; give a PEM or DER file") from None


def read_file(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise IdentityError(f"cannot read the {what} {path}: {error.strerror}; give the path of one") from None


def new_key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def write_key(path: Path, key: EllipticCurvePrivateKey) -> None:
    """Its owner alone can read the file, from the first byte on."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    with replacing(path, private=True) as part:
        part.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def read_key(path: Path) -> EllipticCurvePrivateKey:
    """A key that this package made; refused if anybody but its owner can read it."""
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    check_key_file(path)
    try:
        key = load_pem_private_key(read_file(path, "key"), None)
    except (ValueError, TypeError):
        raise IdentityError(f"{path} is no private key without a password; give a PEM file") from None
    if not isinstance(key, EllipticCurvePrivateKey):
        raise IdentityError(f"{path} is not an elliptic-curve key; give one that adp2sgd certs made")
    return key


def check_key_file(path: Path) -> None:
    """Refuse a key that others can read."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise IdentityError(f"cannot read the key {path}: {error.strerror}; give the path of one") from None
    if stat.S_IMODE(mode) & 0o077:
        raise IdentityError(f"others can read the key {path} (mode {stat.S_IMODE(mode):o}); run: chmod 600 {path}")
