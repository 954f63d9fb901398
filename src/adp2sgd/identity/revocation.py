"""Lists of revoked certificates: standard X.509 CRLs.

A list counts only if an authority of the roster has signed it. Of two lists of one authority the one with the higher
number counts. A list that is past its next update still counts, and is a warning: a site that cannot get a new one goes
on, and says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from adp2sgd.errors import IdentityError
from adp2sgd.identity.certificates import SKEW, Certificate, day, read_file

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey


@dataclass(frozen=True, eq=False)
class Revoked:
    """A list of revoked serial numbers."""

    parsed: x509.CertificateRevocationList

    @property
    def number(self) -> int:
        from cryptography import x509

        try:
            return self.parsed.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
        except x509.ExtensionNotFound:
            return 0

    @property
    def next_update(self) -> datetime | None:
        return self.parsed.next_update_utc

    @property
    def serials(self) -> tuple[int, ...]:
        return tuple(entry.serial_number for entry in self.parsed)

    @property
    def pem(self) -> str:
        from cryptography.hazmat.primitives.serialization import Encoding

        return self.parsed.public_bytes(Encoding.PEM).decode()

    def signed_by(self, authority: Certificate) -> bool:
        from cryptography.exceptions import InvalidSignature

        try:
            return self.parsed.is_signature_valid(authority.parsed.public_key())  # type: ignore[arg-type]
        except (TypeError, ValueError, InvalidSignature):
            return False

    def since(self, serial: int) -> datetime | None:
        """When the certificate with this number was revoked; None if it was not."""
        entry = self.parsed.get_revoked_certificate_by_serial_number(serial)
        return None if entry is None else entry.revocation_date_utc

    def warning(self, now: datetime | None = None) -> str | None:
        now = now or datetime.now(UTC)
        if self.next_update is not None and now > self.next_update:
            due = day(self.next_update)
            return f"the list of revoked certificates (number {self.number}) was due on {due}; get a newer one"
        return None


def make_list(
    authority: Certificate,
    key: EllipticCurvePrivateKey,
    *,
    number: int,
    serials: Iterable[int],
    since: Revoked | None,
    days: int,
) -> Revoked:
    """A signed list of `serials`; those of the list `since` are kept with their dates."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    now = datetime.now(UTC)
    builder = x509.CertificateRevocationListBuilder(
        issuer_name=authority.parsed.subject, last_update=now - SKEW, next_update=now + timedelta(days=days)
    ).add_extension(x509.CRLNumber(number), critical=False)
    earlier = [] if since is None else list(since.parsed)
    known = {entry.serial_number for entry in earlier}
    new = [
        x509.RevokedCertificateBuilder(serial_number=serial, revocation_date=now).build()
        for serial in dict.fromkeys(serials)
        if serial not in known
    ]
    for entry in [*earlier, *new]:
        builder = builder.add_revoked_certificate(entry)
    return Revoked(builder.sign(key, hashes.SHA256()))


def read_list(path: Path) -> Revoked:
    return parse_list(read_file(path, "list of revoked certificates"), str(path))


def parse_list(data: bytes, where: str = "list of revoked certificates") -> Revoked:
    from cryptography import x509

    try:
        load = x509.load_pem_x509_crl if b"-----BEGIN" in data else x509.load_der_x509_crl
        return Revoked(load(data))
    except ValueError:
        raise IdentityError(f"{where} is no list of revoked certificates; give a PEM or DER file") from None
