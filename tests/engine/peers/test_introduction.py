"""What two sites must agree on when they meet. What a peer says is checked, not believed."""

from __future__ import annotations

import json
import ssl
from pathlib import Path
from typing import Any

import pytest

from adp2sgd.config import Config, Consortium, Privacy
from adp2sgd.engine.peers.introduction import Introduction, stated_epsilon
from adp2sgd.engine.status import PublicStatus
from adp2sgd.errors import RefusedError
from adp2sgd.identity.authority import Authority
from adp2sgd.identity.credentials import Credentials, Paths
from adp2sgd.progress import Count, Progress

RUN = Config(
    learners=2,
    privacy=Privacy(mode="private", epsilon=3.0, delta=1e-5),
    consortium=Consortium(total_samples=100, init_seed=0, epsilon=3.0),
)
MODEL = {"shape": "a", "weights": "b"}


def introduction(authority: Authority, name: str, run: Config = RUN, **status: Any) -> Introduction:
    folder = authority.site_folder(name)
    files = {key: folder / getattr(Paths(), key) for key in Paths.__annotations__}
    told = PublicStatus(**{"site": name, "epsilon": 3.0, "delta": 1e-5, **status})
    return Introduction(Credentials(name, Paths(**files)), run, MODEL, Progress(0, limit=1000), lambda: told)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Introduction, Introduction, Authority]:
    authority = Authority.create(tmp_path / "consortium", "Two")
    for name in ("one", "two"):
        authority.issue(name, days=9, addresses=("127.0.0.1:1",))
    return introduction(authority, "one"), introduction(authority, "two"), authority


def over_the_wire(hello: dict[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(json.dumps(hello))
    return told


def test_equal_sites_agree_and_learn_of_steps(pair: tuple[Introduction, Introduction, Authority]) -> None:
    one, two, _ = pair
    two._progress.merge({(1, 0): Count(7)})
    one.check_hello(over_the_wire(two.hello()))
    assert one._progress.total == 7
    assert one.heard["two"] == PublicStatus(site="two", epsilon=3.0, delta=1e-5)


@pytest.mark.parametrize(
    ("epsilon", "accepted", "stated"),
    [(2.5137, None, 2.6), (2.6, None, 2.6), (0.03301, 1.0, 0.034), (12.01, None, 13.0), (9.97, None, 10.0),
     (2.5137, 2.55, 2.55), (2.5137, 2.5, 2.6)],
)  # fmt: skip
def test_a_stated_epsilon_is_rounded_up(epsilon: float, accepted: float | None, stated: float) -> None:
    """An exact ε and a public noise would tell the number of records."""
    assert stated_epsilon(epsilon, accepted) == pytest.approx(stated, rel=1e-12)
    assert stated_epsilon(epsilon, accepted) >= epsilon


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"protocol": 3}, "protocol version 3"),
        ({"run": RUN.replace(batch_size=8).to_toml()}, "run.toml differs in batch_size: 32 at one, 8"),
        ({"run": RUN.replace(options={"hidden": [3]}).to_toml()}, "run.toml differs in options.hidden"),
        ({"run": "no = = toml"}, "cannot be read"),
        ({"model": {**MODEL, "shape": "c"}}, "another shape"),
        ({"model": {**MODEL, "weights": "c"}}, "initial weights differ"),
        ({"status": {"site": "two", "stopped": False, "epsilon": 4.0, "delta": 1e-5}}, "states ε = 4.0"),
        ({"status": {"site": "two", "stopped": False, "epsilon": None, "delta": 1e-5}}, "states ε = None"),
        ({"status": {"site": "two", "stopped": False, "epsilon": float("nan"), "delta": 1e-5}}, "states ε = nan"),
        ({"status": {"site": "two"}}, "HELLO"),
        ({"status": "two"}, "HELLO"),
        ({"progress": [[1, 0, "9", 0]]}, "HELLO"),
        ({"progress": [[1, 0, -9, 0]]}, "HELLO"),
        ({"numbers": 5}, "HELLO"),
    ],
)
def test_what_differs_is_named(
    pair: tuple[Introduction, Introduction, Authority], change: dict[str, Any], words: str
) -> None:
    one, two, _ = pair
    with pytest.raises(RefusedError, match=words.replace(".", r"\.")):
        one.check_hello(over_the_wire({**two.hello(), **change}))
    assert one._progress.total == 0
    assert not one.heard


def test_a_site_cannot_speak_for_another(pair: tuple[Introduction, Introduction, Authority]) -> None:
    one, two, authority = pair
    certificate = ssl.PEM_cert_to_DER_cert((authority.site_folder("two") / "site.crt").read_text())
    assert one.verify(certificate) == "two"
    one.check_hello(over_the_wire(two.hello()))
    with pytest.raises(RefusedError, match="site two says that it is one"):
        one.check_hello(over_the_wire(one.hello()))


def test_nothing_but_public_figures_is_told(pair: tuple[Introduction, Introduction, Authority]) -> None:
    hello = pair[0].hello()
    assert set(hello) == {"protocol", "run", "model", "status", "progress", "numbers"}
    assert set(hello["status"]) == {"site", "stopped", "epsilon", "delta"}
    for word in ("noise_multiplier =", "ledger", "\\nrecords =", "sample_rate"):
        assert word not in json.dumps(hello)
