"""Who may not get in does not, before any byte of a model is read, and both ends say why within 5 s."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hospitals import Hospitals, fixture_hospitals, fixture_made_data, until  # noqa: F401

from adp2sgd.identity.authority import Authority
from adp2sgd.identity.certificates import Certificate

pytestmark = pytest.mark.integration
WITHIN_S = 5.0
PAIR = ("cleveland", "va")
SLOW = {"step_s": 0.2, "pad": True}


def hours(authority: Authority, name: str, start: int, end: int) -> Certificate:
    """A certificate for the site's own key, valid from and until these hours from now."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    before, now = authority.issued(name)[-1].parsed, datetime.now(UTC)
    builder = x509.CertificateBuilder(
        before.issuer, before.subject, before.public_key(), x509.random_serial_number(),
        now + timedelta(hours=start), now + timedelta(hours=end), list(before.extensions),
    )  # fmt: skip
    return Certificate(builder.sign(authority.key, hashes.SHA256()))


def expired(made: Hospitals) -> None:
    """Its process began while the certificate was valid, so it finds out over the network."""
    certificate = hours(made.authority, "va", -48, -24)
    (made.authority.site_folder("va") / "site.crt").write_text(certificate.pem)


def revoked(made: Hospitals) -> None:
    """One site alone has the list."""
    kept = made.authority.site_folder("va") / "revoked.crl"
    before = kept.read_text()
    made.authority.revoke(["va"])
    kept.write_text(before)


def another_consortium(made: Hospitals) -> None:
    """The same names, another authority; each side's files are consistent."""
    other = Authority.create(made.root / "other", "Heart")
    for name in PAIR:
        other.issue(name, days=5, addresses=(f"127.0.0.1:{made.ports[name]}",))
    for file in ("site.crt", "site.key", "authority.crt", "roster.toml", "revoked.crl"):
        shutil.copy(other.site_folder("va") / file, made.authority.site_folder("va") / file)


def foreign(made: Hospitals) -> None:
    """A hospital's own authority that only its own roster pins."""
    from adp2sgd.identity.authority import own_authority
    from adp2sgd.identity.roster import Entry

    hospital = Authority.create(made.root / "hospital", "Hospital")
    hospital.issue("va", days=5, addresses=(f"127.0.0.1:{made.ports['va']}",))
    kept = (made.authority.site_folder("cleveland") / "roster.toml").read_text()
    entry = Entry(name="va", authority="0" * 64, addresses=(f"127.0.0.1:{made.ports['va']}",))
    made.authority.admit(own_authority(entry, (hospital.folder / "authority.crt").read_bytes()))
    (made.authority.site_folder("cleveland") / "roster.toml").write_text(kept)
    for file in ("site.crt", "site.key"):
        shutil.copy(hospital.site_folder("va") / file, made.authority.site_folder("va") / file)


def not_in_the_roster(made: Hospitals) -> None:
    """The other site has an older roster, with another second site."""
    old = Authority.open(made.authority.folder)
    entry = old.roster.entry("va").replace(name="basel")
    roster = old.roster.replace(number=1, sites=(old.roster.entry("cleveland"), entry))
    from adp2sgd.identity import roster as rosters

    text = rosters.sign(roster, old.key)
    (made.authority.site_folder("cleveland") / "roster.toml").write_text(text)


def another_run(made: Hospitals) -> None:
    text = made.run_file.read_text()
    (made.root / "va.toml").write_text(text.replace("batch_size = 16", "batch_size = 8"))


@pytest.mark.parametrize(
    ("wrong", "here", "there"),
    [
        (revoked, "va was revoked on", "va was revoked on"),
        (another_consortium, "certificate", "authority"),
        (foreign, "certificate", "authority"),
        (not_in_the_roster, "va is not in the roster", "va is not in the roster"),
        (another_run, "run.toml differs in batch_size: 16 at cleveland", "run.toml differs in batch_size"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_who_may_not_get_in_is_refused_and_both_ends_say_why(
    hospitals: Callable[..., Hospitals], wrong: Callable[[Hospitals], None], here: str, there: str
) -> None:
    made = hospitals(names=PAIR, speeds=SLOW)
    wrong(made)
    made.start("cleveland")
    until(lambda: made.status("cleveland") is not None, 30, made.told)
    if wrong is another_run:
        made.run_file = made.root / "va.toml"
    made.start("va")
    until(lambda: made.status("va") is not None, 30, made.told)
    took = until(lambda: here in made.notes("cleveland") and there in made.notes("va"), WITHIN_S + 2, made.told)
    assert took < WITHIN_S
    for name in PAIR:
        status = made.status(name)
        assert status is not None
        assert all(each.counters.exchanges == 0 for each in status.learners)
    assert not any(Path(made.folder(name) / "result.json").exists() for name in PAIR)


def test_an_expired_certificate_is_refused_at_the_start_with_its_date(hospitals: Callable[..., Hospitals]) -> None:
    made = hospitals(names=PAIR, speeds=SLOW)
    expired(made)
    made.start("va")
    until(lambda: "va" in made.codes(), 30, made.told)
    assert made.codes()["va"] == 2
    assert "the certificate of va expired on" in made.log("va")
    assert "certs renew" in made.log("va")
    assert not made.folder("va").exists(), "nothing is left behind"


def test_a_certificate_that_expires_while_the_run_goes_on_ends_the_link_and_a_renewed_one_mends_it(
    hospitals: Callable[..., Hospitals],
) -> None:
    made = hospitals(names=PAIR, speeds=SLOW, epochs=40)
    made.start()
    until(lambda: made.linked("cleveland", "va") and made.linked("va", "cleveland"), 60, made.told)
    expired(made)  # what is shown to peers from now on
    made.kill("cleveland")  # a new handshake
    until(lambda: "cleveland" in made.codes(), 10)
    made.start("cleveland")
    began = until(lambda: "expired" in made.notes("va") and not made.linked("va", "cleveland"), 30, made.told)
    until(lambda: "certificate has expired" in made.notes("cleveland"), WITHIN_S + 10 - began, made.told)
    assert not made.linked("cleveland", "va")
    made.authority.renew("va", days=5)
    until(lambda: made.linked("cleveland", "va") and made.linked("va", "cleveland"), 60, made.told)


def test_a_revocation_that_one_site_learns_of_spreads_to_all_and_ends_open_links(
    hospitals: Callable[..., Hospitals],
) -> None:
    names = ("cleveland", "hungarian", "va")
    made = hospitals(names=names, speeds=SLOW, epochs=60)
    made.start()
    until(lambda: all(made.notes(name).count(": up") >= 2 for name in names), 60, made.told)
    before = {name: (made.authority.site_folder(name) / "revoked.crl").read_text() for name in names}
    made.authority.revoke(["va"])
    for name in ("hungarian", "va"):
        (made.authority.site_folder(name) / "revoked.crl").write_text(before[name])
    until(lambda: all("va was revoked" in made.notes(name) for name in ("cleveland", "hungarian")), 15, made.told)
    until(lambda: "revoked" in made.notes("va"), WITHIN_S, made.told)
    newest = (made.authority.folder / "revoked.crl").read_text()
    assert (made.authority.site_folder("hungarian") / "revoked.crl").read_text() == newest
    steps = made.steps("cleveland")
    until(lambda: made.steps("cleveland") > steps + 3, 20, made.told)
