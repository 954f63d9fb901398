"""The roster: who may take part, at which addresses, certified by whom. Signed and numbered by the authority.

The signature covers the content, not the layout of the file. Of two rosters the one with the higher number counts, so
a replaced site changes nothing at the others. A site's place in the list is its number in the run's graph.
"""

from __future__ import annotations

import base64
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from adp2sgd.errors import ConfigError, IdentityError
from adp2sgd.files import replacing
from adp2sgd.identity.certificates import Certificate, check_name, parse_certificate, read_file
from adp2sgd.settings import Section, plain, require, section

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

CONTEXT = b"adp2sgd roster\n"  # a signature over it is a signature over nothing else
SHA256_DIGITS = 64


@dataclass(frozen=True, kw_only=True)
class Entry(Section):
    """One site of the roster."""

    WHERE: ClassVar[str] = "sites."

    name: str
    authority: str  # SHA-256 of the authority's certificate (DER) that may certify this name, in hex
    addresses: tuple[str, ...] = ()  # "host:port", where others reach it
    outward: bool = False  # it only connects outwards; nobody dials it
    certificate: str | None = None  # that authority's certificate (PEM), where it is not the consortium's

    def _check(self) -> None:
        check_name(self.name)
        fix = "use the SHA-256 of its authority's certificate, 64 hex digits"
        require(len(self.authority) == SHA256_DIGITS, "sites.authority", self.authority, fix)
        for address in self.addresses:
            split_address(address, "sites.addresses")
        fix = 'give "host:port", or set outward = true'
        require(self.outward or bool(self.addresses), "sites.addresses", list(self.addresses), fix)


@dataclass(frozen=True, kw_only=True)
class Roster(Section):
    """All sites of a consortium. `relays` lists where sites meet that only connect outwards."""

    WHERE: ClassVar[str] = "roster."

    consortium: str
    number: int
    sites: tuple[Entry, ...] = ()
    relays: tuple[str, ...] = ()

    def _check(self) -> None:
        require(self.number >= 1, "roster.number", self.number, "count from 1")
        names = self.names
        double = next((name for name in names if names.count(name) > 1), None)
        require(double is None, "roster.sites", double or "", "name each site once")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(entry.name for entry in self.sites)

    def number_of(self, name: str) -> int:
        """The site's place in the run's graph."""
        if name not in self.names:
            raise IdentityError(f"site {name} is not in the roster (number {self.number})")
        return self.names.index(name)

    def entry(self, name: str) -> Entry:
        return self.sites[self.number_of(name)]

    def authorities(self, consortium: Certificate) -> dict[str, Certificate]:
        """Every authority that the roster pins, by its SHA-256; the consortium's own included."""
        found = {consortium.fingerprint: consortium}
        for entry in self.sites:
            if entry.certificate is not None:
                own = parse_certificate(entry.certificate.encode(), f"the authority of {entry.name} in the roster")
                found[own.fingerprint] = own
        return found

    def to_toml(self, signature: str) -> str:
        import tomli_w

        return tomli_w.dumps({"signature": signature, **plain(self)})


def sign(roster: Roster, key: EllipticCurvePrivateKey) -> str:
    """The text of roster.toml."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    signature = key.sign(CONTEXT + _content(roster), ec.ECDSA(hashes.SHA256()))
    return roster.to_toml(base64.b64encode(signature).decode())


def verified(text: str, authority: Certificate, where: str = "roster") -> Roster:
    """The roster in `text`, if the authority has signed it."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        raw: dict[str, Any] = tomllib.loads(text)
        signature = base64.b64decode(raw.pop("signature"), validate=True)
    except (tomllib.TOMLDecodeError, KeyError, ValueError, TypeError):
        raise IdentityError(f"{where} is no signed roster; take the one that the consortium's authority made") from None
    try:
        roster = section(Roster, raw)
    except ConfigError as error:
        raise IdentityError(f"{where}: {error}") from None
    key = authority.parsed.public_key()
    try:
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise InvalidSignature
        key.verify(signature, CONTEXT + _content(roster), ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        raise IdentityError(
            f"{where} is not signed by the authority {authority.name}, or was changed since; take the signed one"
        ) from None
    return roster


def read_roster(path: Path, authority: Certificate) -> Roster:
    return verified(read_text(path), authority, str(path))


def read_text(path: Path) -> str:
    try:
        return read_file(path, "roster").decode()
    except UnicodeDecodeError:
        raise IdentityError(f"{path} is no text; give the signed roster") from None


def write_text(path: Path, text: str) -> None:
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def split_address(address: str, key: str = "address") -> tuple[str, int]:
    """ "host:port" or "[v6]:port" as host and port."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) >= 1 << 16:
        raise ConfigError(f'{key} = "{address}" is not possible; write "host:port"')
    return host, int(port)


def _content(roster: Roster) -> bytes:
    """The same bytes for the same roster, however its file is laid out."""
    return json.dumps(plain(roster), sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
