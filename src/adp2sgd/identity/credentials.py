"""What a site shows to others and whom it believes, from files that may be replaced while it runs.

Every file is read again when it has changed on disk. A new version that cannot be used is a warning, and the old one
stays in force. A roster or a list of revoked certificates that a peer passes on is taken over only if it is signed and
has a higher number; it is then written to the site's own file, so that a restart keeps it.
"""

from __future__ import annotations

import os
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from adp2sgd.errors import IdentityError, RefusedError
from adp2sgd.identity import roster as rosters
from adp2sgd.identity.authority import AUTHORITY, REVOKED, ROSTER, SITE, SITE_KEY
from adp2sgd.identity.certificates import Certificate, check_key_file, day, parse_certificate, read_certificate
from adp2sgd.identity.revocation import Revoked, parse_list, read_list
from adp2sgd.identity.roster import Roster

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Paths:
    """Where a site's own files lie."""

    certificate: Path = Path(SITE)
    key: Path = Path(SITE_KEY)
    authority: Path = Path(AUTHORITY)
    roster: Path = Path(ROSTER)
    revoked: Path = Path(REVOKED)


@dataclass
class Watched(Generic[T]):
    """A value made from files, and made anew when one of them changes. What fails then is told by `trouble`."""

    files: Callable[[], list[Path]]
    make: Callable[[], T]
    trouble: str | None = None
    _seen: list[tuple[int, ...]] | None = None
    _value: list[T] = field(default_factory=list)

    def get(self) -> T:
        now = [_stamp(path) for path in self.files()]
        if not self._value:
            self._value, self._seen = [self.make()], now
        elif now != self._seen:
            self._seen = now
            try:
                self._value, self.trouble = [self.make()], None
            except (IdentityError, OSError) as error:
                self.trouble = f"{error}; the version before it stays in force"
        return self._value[0]


class Credentials:
    """One site's. All methods may be called from any thread."""

    def __init__(self, name: str, paths: Paths) -> None:
        """Raises IdentityError where the files cannot be used, or do not belong to the site `name`."""
        self.name, self.paths = name, paths
        self._mutex = threading.RLock()
        self.authority = read_certificate(paths.authority)
        self._roster = Watched(lambda: [paths.roster], lambda: rosters.read_roster(paths.roster, self.authority))
        self._lists = Watched(self._list_files, self._read_lists)
        self._own = Watched(lambda: [paths.certificate, paths.key], self._read_own)
        self._refuse_own()

    @property
    def roster(self) -> Roster:
        with self._mutex:
            return self._roster.get()

    @property
    def certificate(self) -> Certificate:
        with self._mutex:
            return self._own.get()

    @property
    def lists(self) -> dict[str, Revoked]:
        """The newest list of each authority, by the authority's SHA-256."""
        with self._mutex:
            return self._lists.get()

    @property
    def numbers(self) -> dict[str, int]:
        """Of the roster and of each authority's list: what two sites compare."""
        return {"roster": self.roster.number, **{key: each.number for key, each in sorted(self.lists.items())}}

    def warnings(self) -> list[str]:
        """What the site's people should know: files past or near their end, and new versions that cannot be used."""
        own = self.certificate
        found = [own.trouble(), own.warning(), *(each.warning() for each in self.lists.values())]
        found += [watched.trouble for watched in (self._roster, self._lists, self._own)]
        return [text for text in found if text is not None]

    def server_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0  # a resumed session would skip the look at the certificate
        return self._prepared(context)

    def client_context(self) -> ssl.SSLContext:
        """Raises RefusedError if the own certificate cannot be used: TLS 1.3 would hide that from a client."""
        why = self.certificate.trouble()
        if why is not None:
            raise RefusedError(f"{why}; renew it: adp2sgd certs renew")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False  # names are the roster's, and `verify` checks them
        return self._prepared(context)

    def verify(self, der: bytes) -> str:
        """The site that a certificate belongs to.

        Guarantee: it is on the roster, certified by the authority that the roster pins for its name, in date and not
        revoked. Else RefusedError says why.
        """
        try:
            certificate = parse_certificate(der)
            roster, lists = self.roster, self.lists
            authorities = roster.authorities(self.authority)
        except IdentityError as error:
            raise RefusedError(str(error)) from None
        why = certificate.trouble()
        if why is not None:
            raise RefusedError(why)
        name = next((name for name in certificate.names if name in roster.names), None)
        if name is None:
            raise RefusedError(f"site {certificate.name} is not in the roster (number {roster.number})")
        pinned = authorities.get(roster.entry(name).authority)
        if pinned is None or not certificate.issued_by(pinned):
            raise RefusedError(f"the certificate of {name} is by {certificate.issuer}, not by the authority that the "
                               f"roster (number {roster.number}) pins for that name")  # fmt: skip
        revoked = lists.get(pinned.fingerprint)
        since = None if revoked is None else revoked.since(certificate.serial)
        if since is not None:
            raise RefusedError(f"the certificate of {name} was revoked on {day(since)}")
        return name

    def take_roster(self, text: str) -> bool:
        """Take over a roster that a peer passes on, if it is signed and newer."""
        with suppress(IdentityError), self._mutex:
            offered = rosters.verified(text, self.authority, "the roster of a peer")
            if offered.consortium == self.roster.consortium and offered.number > self.roster.number:
                rosters.write_text(self.paths.roster, text)
                return True
        return False

    def take_list(self, text: str) -> bool:
        """Take over a list of revoked certificates that a peer passes on, if an authority of the roster has signed it
        and its number is higher."""
        with suppress(IdentityError), self._mutex:
            offered = parse_list(text.encode())
            for key, authority in self.roster.authorities(self.authority).items():
                known = self.lists.get(key)
                if offered.signed_by(authority) and (known is None or offered.number > known.number):
                    rosters.write_text(self._list_file(key), offered.pem)
                    return True
        return False

    def _prepared(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # a hospital's authority may itself be certified
        with self._mutex:
            known = self.roster.authorities(self.authority).values()
            context.load_verify_locations(cadata="".join(each.pem for each in known))
            try:
                context.load_cert_chain(self.paths.certificate, self.paths.key, password="")
            except (ssl.SSLError, OSError) as error:
                why = f"{self.paths.certificate} and {self.paths.key} cannot be used together ({error})"
                raise RefusedError(why) from None
        return context

    def _refuse_own(self) -> None:
        """A site finds out about its own files before it dials anybody."""
        own = self.certificate
        if self.name not in own.names:
            raise IdentityError(f"{self.paths.certificate} is the certificate of {own.name}, not of {self.name}")
        entry = self.roster.entry(self.name)
        pinned = self.roster.authorities(self.authority).get(entry.authority)
        if pinned is None or not own.issued_by(pinned):
            raise IdentityError(
                f"{self.paths.certificate} is by {own.issuer}, not by the authority that {self.paths.roster} pins for "
                f"{self.name}; ask the consortium for a new one"
            )
        if (why := own.trouble()) is not None:
            raise IdentityError(f"{why}; renew it: adp2sgd certs renew")

    def _read_own(self) -> Certificate:
        check_key_file(self.paths.key)
        own = read_certificate(self.paths.certificate)
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.paths.certificate, self.paths.key, "")
        except ssl.SSLError:
            raise IdentityError(f"the key {self.paths.key} is not that of {self.paths.certificate}") from None
        return own

    def _list_file(self, key: str) -> Path:
        revoked = self.paths.revoked
        own = key == self.authority.fingerprint
        return revoked if own else revoked.with_name(f"{revoked.stem}-{key[:16]}{revoked.suffix}")

    def _list_files(self) -> list[Path]:
        return [self._list_file(key) for key in self.roster.authorities(self.authority)]

    def _read_lists(self) -> dict[str, Revoked]:
        found = {}
        for key, authority in self.roster.authorities(self.authority).items():
            path = self._list_file(key)
            if not path.exists():
                continue
            made = read_list(path)
            if not made.signed_by(authority):
                raise IdentityError(f"{path} is not signed by the authority {authority.name}; take the signed one")
            found[key] = made
        return found


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return (found.st_ino, found.st_size, found.st_mtime_ns)
