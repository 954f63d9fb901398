"""`adp2sgd certs`: the consortium's authority, one certificate per site, the roster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from adp2sgd.cli.options import Json
from adp2sgd.errors import ConfigError

if TYPE_CHECKING:
    from adp2sgd.identity.authority import Authority
    from adp2sgd.identity.certificates import Certificate
    from adp2sgd.identity.revocation import Revoked

certs = typer.Typer(
    help="Make the consortium's authority, and certify sites.",
    epilog="Example: adp2sgd certs show heart",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Folder = Annotated[Path, typer.Argument(help="The authority's folder. Its key stays there.")]
Name = Annotated[str, typer.Argument(help="The site's name, as in the roster.")]
Days = Annotated[int, typer.Option(min=1, max=36500, help="How long it is valid.")]
Request = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--csr", help="The site's own signing request: its key never leaves it."),
]

STARTER = """# This file belongs to the site {name} and never leaves it. Paths are relative to this file.
name = "{name}"
listen = [{listen}]             # addresses to listen on; leave empty where only outgoing connections are allowed
# records = 200                 # declared, rounded number of training records (privacy.mode = "private")

[options]                       # where the data lie: options of the run's task that hold for this site alone
# data_dir = "data"

# [privacy]                     # tightens what run.toml allows, never loosens it
# ledger = "ledger"
# epsilon = 3.0
"""


@certs.command(epilog='Example: adp2sgd certs init heart --name "Heart consortium"')
def init(
    folder: Folder,
    name: Annotated[str, typer.Option(help="The consortium's name.")] = "adp2sgd consortium",
    days: Days = 3650,
) -> None:
    """Make a consortium's authority, with an empty roster."""
    from adp2sgd.identity.authority import Authority
    from adp2sgd.identity.certificates import day

    made = Authority.create(folder, name, days=days)
    print(f"{name}: authority in {folder}, valid until {day(made.certificate.expires)}")
    print(f"SHA-256 {made.certificate.fingerprint}")


@certs.command(epilog="Example: adp2sgd certs issue heart cleveland --address cleveland.example.org:7443")
def issue(
    folder: Folder,
    name: Name,
    address: Annotated[list[str], typer.Option(help='"host:port" where others reach the site.')] = [],  # noqa: B006
    outward: Annotated[bool, typer.Option("--outward", help="The site only connects outwards.")] = False,
    days: Days = 365,
    csr: Request = None,
    authority: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="The site's own authority (a certificate): nothing is issued, the roster pins it."),
    ] = None,
) -> None:
    """Put a site on the roster, with a certificate for it. Its folder is FOLDER/sites/NAME."""
    from adp2sgd.identity.authority import Authority, own_authority, read_request
    from adp2sgd.identity.certificates import read_file
    from adp2sgd.identity.roster import Entry

    if csr is not None and authority is not None:
        raise ConfigError("--csr and --authority exclude each other: one authority certifies a site; remove one")
    opened = Authority.open(folder)
    if authority is not None:
        entry = Entry(name=name, authority="0" * 64, addresses=tuple(address), outward=outward)
        opened.site_folder(name).mkdir(parents=True, exist_ok=True)
        roster = opened.admit(own_authority(entry, read_file(authority, "certificate")))
        _starter(opened, name, address)
        print(f"{name}: certified by its own authority, SHA-256 {roster.entry(name).authority}")
        return
    request = None if csr is None else read_request(csr)
    made = opened.issue(name, days=days, csr=request, addresses=tuple(address), outward=outward)
    _starter(opened, name, address)
    _told(made, opened.site_folder(name))


@certs.command(epilog="Example: adp2sgd certs renew heart cleveland --days 365")
def renew(folder: Folder, name: Name, days: Days = 365, csr: Request = None) -> None:
    """Give a site a new certificate for the same key. A running site loads it without a restart."""
    from adp2sgd.identity.authority import Authority, read_request

    opened = Authority.open(folder)
    made = opened.renew(name, days=days, csr=None if csr is None else read_request(csr))
    _told(made, opened.site_folder(name))


@certs.command(epilog="Example: adp2sgd certs revoke heart cleveland")
def revoke(
    folder: Folder,
    names: Annotated[Optional[list[str]], typer.Argument(help="Sites; without any, the list is renewed.")] = None,  # noqa: UP045
    days: Days = 30,
) -> None:
    """Revoke every certificate that was ever issued to a site. The new list spreads from any member to all."""
    from adp2sgd.identity.authority import REVOKED, Authority
    from adp2sgd.identity.certificates import day

    made = Authority.open(folder).revoke(names or [], days=days)
    due = "" if made.next_update is None else f", to be renewed by {day(made.next_update)}"
    print(f"{folder / REVOKED}: number {made.number}, {len(made.serials)} certificates revoked{due}")


@certs.command(epilog="Example: adp2sgd certs show heart --json")
def show(
    path: Annotated[Path, typer.Argument(help="An authority's folder, a site's folder, or a certificate.")],
    json: Json = False,
) -> None:
    """Names, expiry and state of certificates, in words."""
    from adp2sgd.cli import view

    rows = _rows(path)
    if json:
        view.print_json(rows)
        return
    columns = ["name", "state", "expires", "issued by", "serial", "SHA-256"]
    shown = [tuple(str(row[key]) for key in ("name", "state", "expires", "issuer", "serial", "sha256")) for row in rows]
    view.table(str(path), columns, [(*row[:5], f"{row[5][:16]}…") for row in shown])


def _rows(path: Path) -> list[dict[str, Any]]:
    from adp2sgd.identity.authority import AUTHORITY, AUTHORITY_KEY, REVOKED, SITE, Authority
    from adp2sgd.identity.certificates import read_certificate
    from adp2sgd.identity.revocation import read_list

    if (path / AUTHORITY_KEY).exists():
        opened = Authority.open(path)
        found = [opened.certificate, *opened.issued()]
        revoked: Revoked | None = opened.revoked
    else:
        found = [read_certificate(path / SITE if path.is_dir() else path)]
        beside = path if path.is_dir() else path.parent
        known = (beside / REVOKED).exists() and (beside / AUTHORITY).exists()
        revoked = read_list(beside / REVOKED) if known else None
    return [_row(each, revoked) for each in found]


def _row(certificate: Certificate, revoked: Any) -> dict[str, Any]:
    from adp2sgd.identity.certificates import day

    since = None if revoked is None else revoked.since(certificate.serial)
    state = f"revoked on {day(since)}" if since is not None else "expired" if certificate.trouble() else "valid"
    return {
        "name": certificate.name,
        "state": state,
        "expires": day(certificate.expires),
        "issuer": certificate.issuer,
        "serial": f"{certificate.serial:x}",
        "sha256": certificate.fingerprint,
    }


def _starter(authority: Authority, name: str, addresses: list[str]) -> None:
    """A site.toml to fill in, unless there is one."""
    from adp2sgd.identity.authority import SITE
    from adp2sgd.identity.roster import split_address

    target = authority.site_folder(name) / SITE.replace(".crt", ".toml")
    if not target.exists():
        ports = [f'"0.0.0.0:{split_address(each)[1]}"' for each in addresses]
        target.write_text(STARTER.format(name=name, listen=", ".join(ports)), encoding="utf-8")


def _told(made: Certificate, folder: Path) -> None:
    from adp2sgd.identity.certificates import day

    print(f"{made.name}: certificate in {folder}, valid until {day(made.expires)}")
