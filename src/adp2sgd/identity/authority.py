"""The consortium's authority: a folder with its key. It certifies sites, revokes them and signs the roster.

FOLDER/authority.crt  FOLDER/authority.key          the key stays here, readable by its owner alone
FOLDER/roster.toml  FOLDER/revoked.crl              signed and numbered, for everybody
FOLDER/issued/NAME-SERIAL.crt                       every certificate ever issued: what a revocation looks up
FOLDER/sites/NAME/                                  what a site gets: its certificate, its key, the public files

No member needs this folder while a run goes on.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adp2sgd.errors import IdentityError
from adp2sgd.files import replacing
from adp2sgd.identity import roster as rosters
from adp2sgd.identity.certificates import (
    SKEW,
    Certificate,
    check_name,
    new_key,
    parse_certificate,
    read_certificate,
    read_file,
    read_key,
    write_key,
)
from adp2sgd.identity.revocation import Revoked, make_list, read_list
from adp2sgd.identity.roster import Entry, Roster

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

AUTHORITY, AUTHORITY_KEY = "authority.crt", "authority.key"
ROSTER, REVOKED = "roster.toml", "revoked.crl"
SITE, SITE_KEY = "site.crt", "site.key"
LIST_DAYS = 30  # until a list of revoked certificates must be renewed


@dataclass(frozen=True, eq=False)
class Authority:
    """An opened folder."""

    folder: Path
    certificate: Certificate
    key: EllipticCurvePrivateKey

    @classmethod
    def create(cls, folder: Path, name: str, *, days: int = 3650) -> Authority:
        """A new authority with an empty roster and an empty list of revoked certificates."""
        if (folder / AUTHORITY_KEY).exists():
            raise IdentityError(f"{folder} already holds an authority; choose another folder")
        key = new_key()
        certificate = _self_signed(name, key, days)
        made = cls(folder, certificate, key)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_key(folder / AUTHORITY_KEY, key)
            _write(folder / AUTHORITY, certificate.pem)
            made._write_roster(Roster(consortium=name, number=1))
            _write(folder / REVOKED, made._list(1, [], None, LIST_DAYS).pem)
        except OSError as error:
            raise IdentityError(f"cannot write to {folder}: {error.strerror}; choose another folder") from None
        return made

    @classmethod
    def open(cls, folder: Path) -> Authority:
        if not (folder / AUTHORITY_KEY).exists():
            raise IdentityError(f"{folder} holds no authority; make one: adp2sgd certs init {folder}")
        return cls(folder, read_certificate(folder / AUTHORITY), read_key(folder / AUTHORITY_KEY))

    @property
    def roster(self) -> Roster:
        return rosters.read_roster(self.folder / ROSTER, self.certificate)

    @property
    def revoked(self) -> Revoked:
        return read_list(self.folder / REVOKED)

    def site_folder(self, name: str) -> Path:
        """What is handed to the site."""
        return self.folder / "sites" / check_name(name)

    def issued(self, name: str | None = None) -> list[Certificate]:
        """Every certificate ever issued, or those of one site, the newest last."""
        found = [read_certificate(path) for path in sorted((self.folder / "issued").glob("*.crt"))]
        return sorted((each for each in found if name in (None, each.name)), key=lambda each: each.starts)

    def issue(self, name: str, *, days: int, csr: bytes | None = None, addresses: tuple[str, ...] = (),
              outward: bool = False) -> Certificate:  # fmt: skip
        """Certify a new site and put it on the roster. With `csr` the site keeps its own key; else one is made."""
        if name in self.roster.names:
            raise IdentityError(f"site {name} is on the roster already; use certs renew, or another name")
        entry = Entry(name=name, authority=self.certificate.fingerprint, addresses=addresses, outward=outward)
        certificate = self._certify(name, days, csr)
        self.admit(entry)
        return certificate

    def admit(self, entry: Entry) -> Roster:
        """Put a site on the roster, or replace its entry, and hand the new roster out."""
        before = self.roster
        others = list(before.sites)
        if entry.name in before.names:
            others[before.number_of(entry.name)] = entry
        else:
            others.append(entry)
        roster = before.replace(number=before.number + 1, sites=tuple(others))
        self._write_roster(roster)
        self.hand_out()
        return roster

    def renew(self, name: str, *, days: int, csr: bytes | None = None) -> Certificate:
        """A new certificate for a site on the roster: for the same key, unless a `csr` brings another."""
        entry = self.roster.entry(name)
        if entry.authority != self.certificate.fingerprint:
            raise IdentityError(f"site {name} is certified by its own authority; renew it there")
        earlier = self.issued(name)
        if csr is None and earlier:
            made = self._sign(name, earlier[-1].parsed.public_key(), days)
            self._keep(name, made)
            return made
        return self._certify(name, days, csr)

    def revoke(self, names: Iterable[str], *, days: int = LIST_DAYS) -> Revoked:
        """A new list, one number higher, with every certificate ever issued to these names. Without names it renews
        the list."""
        before, serials = self.revoked, list[int]()
        for name in names:
            found = self.issued(name)
            if not found:
                raise IdentityError(f"no certificate was ever issued to {name} here; adp2sgd certs show lists them")
            serials += [each.serial for each in found]
        made = self._list(before.number + 1, serials, before, days)
        _write(self.folder / REVOKED, made.pem)
        self.hand_out()
        return made

    def hand_out(self) -> None:
        """Put the newest public files into every site's folder."""
        for folder in (self.folder / "sites").glob("*/"):
            for name in (AUTHORITY, ROSTER, REVOKED):
                with replacing(folder / name) as part:
                    shutil.copyfile(self.folder / name, part)

    def _certify(self, name: str, days: int, csr: bytes | None) -> Certificate:
        if csr is not None:
            made = self._sign(name, _requested(csr), days)
        else:
            key = new_key()
            made = self._sign(name, key.public_key(), days)
            write_key(self.site_folder(name) / SITE_KEY, key)
        self._keep(name, made)
        return made

    def _keep(self, name: str, made: Certificate) -> None:
        _write(self.folder / "issued" / f"{name}-{made.serial:x}.crt", made.pem)
        _write(self.site_folder(name) / SITE, made.pem)

    def _list(self, number: int, serials: list[int], since: Revoked | None, days: int) -> Revoked:
        return make_list(self.certificate, self.key, number=number, serials=serials, since=since, days=days)

    def _write_roster(self, roster: Roster) -> None:
        rosters.write_text(self.folder / ROSTER, rosters.sign(roster, self.key))

    def _sign(self, name: str, public_key: Any, days: int) -> Certificate:
        """A certificate for both sides of TLS."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.x509.oid import ExtendedKeyUsageOID

        check_name(name)
        usage = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = (
            _builder(name, self.certificate.parsed.subject, public_key, days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(x509.ExtendedKeyUsage(usage), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
        )
        return Certificate(builder.sign(self.key, hashes.SHA256()))


def _self_signed(name: str, key: EllipticCurvePrivateKey, days: int) -> Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    own = _name(name)
    uses = {each: False for each in ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
                                     "encipher_only", "decipher_only")}  # fmt: skip
    usage = x509.KeyUsage(digital_signature=True, key_cert_sign=True, crl_sign=True, **uses)
    builder = (
        _builder(name, own, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return Certificate(builder.sign(key, hashes.SHA256()))


def _builder(name: str, issuer: Any, public_key: Any, days: int) -> Any:
    from cryptography import x509

    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + timedelta(days=days))
    )


def _name(common: str) -> Any:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    try:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])
    except ValueError:
        raise IdentityError(f'the name "{common}" is too long for a certificate; use 64 characters at most') from None


def _requested(csr: bytes) -> Any:
    """The public key of a certificate signing request, whose owner has proved to hold the private one."""
    from cryptography import x509

    try:
        load = x509.load_pem_x509_csr if b"-----BEGIN" in csr else x509.load_der_x509_csr
        request = load(csr)
        if not request.is_signature_valid:
            raise ValueError
    except ValueError:
        raise IdentityError("the signing request is damaged or not signed by its own key; make it anew") from None
    return request.public_key()


def _write(path: Path, text: str) -> None:
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def own_authority(entry: Entry, certificate: bytes) -> Entry:
    """The entry of a site that its own authority certifies: pinned by SHA-256, and known to all by the roster."""
    own = parse_certificate(certificate, f"the authority of {entry.name}")
    return replace(entry, authority=own.fingerprint, certificate=own.pem)


def read_request(path: Path) -> bytes:
    return read_file(path, "signing request")
