"""The authority, its certificates, lists and roster, and what a site believes: with real files and real TLS."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import stat
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from adp2sgd.errors import IdentityError, RefusedError
from adp2sgd.identity import roster as rosters
from adp2sgd.identity.authority import Authority, own_authority
from adp2sgd.identity.certificates import new_key, read_certificate
from adp2sgd.identity.credentials import Credentials, Paths
from adp2sgd.identity.roster import Entry
from conftest import adp2sgd


@pytest.fixture
def consortium(tmp_path: Path) -> Authority:
    made = Authority.create(tmp_path / "heart", "Heart")
    for name, port in (("cleveland", 7001), ("va", 7002)):
        made.issue(name, days=365, addresses=(f"127.0.0.1:{port}",))
    return made


def credentials(authority: Authority, name: str) -> Credentials:
    folder = authority.site_folder(name)
    names = ("certificate", "key", "authority", "roster", "revoked")
    files = ("site.crt", "site.key", "authority.crt", "roster.toml", "revoked.crl")
    return Credentials(name, Paths(**{key: folder / file for key, file in zip(names, files, strict=True)}))


def der(authority: Authority, name: str) -> bytes:
    return ssl.PEM_cert_to_DER_cert((authority.site_folder(name) / "site.crt").read_text())


def meet(server: Credentials, client: Credentials, version: ssl.TLSVersion | None = None) -> tuple[str, str, str]:
    """Shake hands over a real socket: the protocol, and whom each side sees."""
    ours, theirs = socket.socketpair()
    found: dict[str, str] = {}
    context = client.client_context()
    if version is not None:
        context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1_2, version

    def answer() -> None:
        try:
            with server.server_context().wrap_socket(ours, server_side=True) as link:
                found["client"] = server.verify(link.getpeercert(binary_form=True) or b"")
                link.sendall(b"!")
        except (ssl.SSLError, OSError, RefusedError) as error:
            found["refused"] = str(error)
            ours.close()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        with context.wrap_socket(theirs) as link:
            seen = client.verify(link.getpeercert(binary_form=True) or b"")
            assert link.recv(1) == b"!"
            return str(link.version()), seen, found["client"]
    finally:
        thread.join(10)


def test_both_sides_are_known_by_name_over_tls_1_3_alone(consortium: Authority) -> None:
    one, two = credentials(consortium, "cleveland"), credentials(consortium, "va")
    assert meet(one, two) == ("TLSv1.3", "cleveland", "va")
    with pytest.raises(ssl.SSLError):
        meet(one, two, ssl.TLSVersion.TLSv1_2)


def test_keys_are_for_their_owner_alone(consortium: Authority) -> None:
    keys = list(consortium.folder.rglob("*.key"))
    assert len(keys) == 3
    assert {stat.S_IMODE(path.stat().st_mode) for path in keys} == {0o600}
    keys[0].chmod(0o640)
    (consortium.site_folder("va") / "site.key").chmod(0o644)
    with pytest.raises(IdentityError, match="chmod 600"):
        credentials(consortium, "va")


def test_an_expired_certificate_is_refused_with_its_date_by_both(consortium: Authority) -> None:
    one = credentials(consortium, "cleveland")
    later = datetime.now(UTC) + timedelta(days=400)
    assert "expired on" in str(one.certificate.trouble(later))
    assert "renew" in str(one.certificate.warning(datetime.now(UTC) + timedelta(days=350)))
    consortium._keep("va", expired(consortium, "va"))
    with pytest.raises(RefusedError, match="expired on"):
        one.verify(der(consortium, "va"))
    with pytest.raises(IdentityError, match="expired on"):
        credentials(consortium, "va")


def expired(authority: Authority, name: str):  # type: ignore[no-untyped-def]
    """A certificate for the site's own key whose time is over."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    from adp2sgd.identity.certificates import Certificate

    before = authority.issued(name)[-1].parsed
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(before.subject)
        .issuer_name(before.issuer)
        .public_key(before.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=2))
        .not_valid_after(now - timedelta(days=1))
    )
    return Certificate(builder.sign(authority.key, hashes.SHA256()))


def test_a_renewed_certificate_is_used_without_a_restart(consortium: Authority) -> None:
    one, two = credentials(consortium, "cleveland"), credentials(consortium, "va")
    before = two.certificate.serial
    consortium.renew("va", days=700)
    assert meet(one, two) == ("TLSv1.3", "cleveland", "va")
    assert two.certificate.serial != before
    (two.paths.certificate).write_text("half a certifica")  # a copy that was interrupted
    assert two.certificate.serial != before
    assert any("stays in force" in text for text in two.warnings())


def test_revoking_a_name_revokes_all_its_certificates(consortium: Authority) -> None:
    one = credentials(consortium, "cleveland")
    first = der(consortium, "va")
    consortium.renew("va", days=700)
    assert one.verify(first) == one.verify(der(consortium, "va")) == "va"
    made = consortium.revoke(["va"])
    assert (made.number, len(made.serials)) == (2, 2)
    for shown in (first, der(consortium, "va")):
        with pytest.raises(RefusedError, match="va was revoked on"):
            one.verify(shown)
    assert one.verify(der(consortium, "cleveland")) == "cleveland"
    assert consortium.revoke([]).number == 3
    with pytest.raises(RefusedError, match="revoked"):  # a renewed list keeps what the one before it held
        one.verify(first)


def test_only_signed_lists_with_a_higher_number_are_taken_over(consortium: Authority, tmp_path: Path) -> None:
    one = credentials(consortium, "cleveland")
    old = one.paths.revoked.read_text()
    foreign = Authority.create(tmp_path / "foreign", "Heart")
    foreign.issue("va", days=1, addresses=("127.0.0.1:1",))
    assert not one.take_list(foreign.revoke(["va"]).pem)
    assert not one.take_list("no list")
    newer = consortium.revoke(["va"]).pem
    one.paths.revoked.write_text(old)
    assert one.verify(der(consortium, "va")) == "va"
    assert one.take_list(newer)
    assert not one.take_list(old), "an older list must not undo a revocation"
    with pytest.raises(RefusedError, match="revoked"):
        credentials(consortium, "cleveland").verify(der(consortium, "va"))  # also after a restart


def test_a_list_past_its_next_update_still_counts_and_is_a_warning(consortium: Authority) -> None:
    one = credentials(consortium, "cleveland")
    consortium.revoke(["va"], days=1)
    found = one.lists[consortium.certificate.fingerprint]
    assert found.warning() is None
    assert "was due" in str(found.warning(datetime.now(UTC) + timedelta(days=2)))


def test_a_name_that_is_not_on_the_roster_is_refused(consortium: Authority) -> None:
    one = credentials(consortium, "cleveland")
    certificate = consortium._certify("mallory", 10, None)
    with pytest.raises(RefusedError, match="mallory is not in the roster"):
        one.verify(ssl.PEM_cert_to_DER_cert(certificate.pem))


def test_another_consortiums_certificate_ends_the_handshake(consortium: Authority, tmp_path: Path) -> None:
    other = Authority.create(tmp_path / "other", "Heart")
    other.issue("va", days=10, addresses=("127.0.0.1:1",))
    one, foreign = credentials(consortium, "cleveland"), credentials(other, "va")
    with pytest.raises(ssl.SSLError):
        meet(one, foreign)
    with pytest.raises(RefusedError, match="not by the authority that the roster"):
        one.verify(der(other, "va"))


def test_the_roster_pins_which_authority_may_certify_which_name(consortium: Authority, tmp_path: Path) -> None:
    hospital = Authority.create(tmp_path / "hospital", "Zurich hospital")
    for name in ("zurich", "va"):
        hospital.issue(name, days=10, addresses=("127.0.0.1:7003",))
    entry = Entry(name="zurich", authority="0" * 64, addresses=("127.0.0.1:7003",))
    consortium.site_folder("zurich").mkdir()
    consortium.admit(own_authority(entry, (hospital.folder / "authority.crt").read_bytes()))
    for name in ("site.crt", "site.key"):
        shutil.copy(hospital.site_folder("zurich") / name, consortium.site_folder("zurich"))
    one, own = credentials(consortium, "cleveland"), credentials(consortium, "zurich")
    assert meet(one, own) == ("TLSv1.3", "cleveland", "zurich")
    with pytest.raises(RefusedError, match="va is by Zurich hospital"):
        one.verify(der(hospital, "va"))  # TLS accepts it, and the pin does not
    assert one.take_list(hospital.revoke(["zurich"]).pem)
    with pytest.raises(RefusedError, match="zurich was revoked"):
        one.verify(der(consortium, "zurich"))


def test_a_roster_that_was_changed_or_is_older_is_not_believed(consortium: Authority) -> None:
    one = credentials(consortium, "cleveland")
    text = (consortium.folder / "roster.toml").read_text()
    consortium.admit(Entry(name="basel", authority=consortium.certificate.fingerprint, outward=True))
    newer = (consortium.folder / "roster.toml").read_text()
    one.paths.roster.write_text(text)
    assert one.roster.names == ("cleveland", "va")
    assert not one.take_roster(newer.replace("basel", "mallory"))
    assert one.take_roster(newer)
    assert one.roster.names == ("cleveland", "va", "basel")
    assert not one.take_roster(text)
    assert rosters.verified("\n\n# a comment\n" + newer, consortium.certificate).number == one.roster.number
    with pytest.raises(IdentityError, match="not signed by the authority Heart"):
        rosters.verified(newer.replace("number = 4", "number = 9"), consortium.certificate)


def test_the_commands_make_a_consortium(tmp_path: Path) -> None:
    def certs(*arguments: str) -> str:
        done = adp2sgd("certs", *arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "valid until" in certs("init", "heart", "--name", "Heart")
    key = new_key()
    (tmp_path / "own.csr").write_bytes(request(key))
    certs("issue", "heart", "cleveland", "--address", "127.0.0.1:7001")
    certs("issue", "heart", "va", "--outward", "--csr", "own.csr")
    folder = tmp_path / "heart" / "sites"
    assert sorted(os.listdir(folder / "cleveland")) == [
        "authority.crt", "revoked.crl", "roster.toml", "site.crt", "site.key", "site.toml",
    ]  # fmt: skip
    assert not (folder / "va" / "site.key").exists(), "its key never leaves the site"
    assert read_certificate(folder / "va" / "site.crt").parsed.public_key() == key.public_key()
    assert (folder / "cleveland/roster.toml").read_text() == (folder / "va/roster.toml").read_text()
    assert "number 2" in certs("revoke", "heart", "va")
    shown = certs("show", "heart")
    assert "revoked on" in shown
    assert "valid" in certs("show", "heart/sites/cleveland")
    again = adp2sgd("certs", "issue", "heart", "va", "--outward", cwd=tmp_path)
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    assert "certs renew" in again.stderr


def request(key):  # type: ignore[no-untyped-def]
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.serialization import Encoding

    return (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([]))
        .sign(key, hashes.SHA256())
        .public_bytes(Encoding.PEM)
    )
