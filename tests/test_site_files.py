"""run.toml and site.toml: what each may say, and what a site makes of both."""

from __future__ import annotations

from pathlib import Path

import pytest

from adp2sgd.config import at_site, difference, load_run, load_site, loads_config
from adp2sgd.errors import ConfigError

RUN = """
task = "heart/logistic"
learners = 4
batch_size = 16
[consortium]
total_samples = 700
init_seed = 1
"""
PRIVATE = RUN + '[privacy]\nmode = "private"\nepsilon = 3.0\ndelta = 1e-4\n'


def run_file(folder: Path, text: str) -> Path:
    (folder / "run.toml").write_text(text)
    return folder / "run.toml"


def site_file(folder: Path, text: str) -> Path:
    (folder / "site.toml").write_text(f'name = "va"\n{text}')
    return folder / "site.toml"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed = 3\n" + RUN, ["seed = 3", "publish the noise", "init_seed"]),
        (RUN.replace("total_samples = 700", ""), ["total_samples", "rounded"]),
        (RUN.replace("init_seed = 1", ""), ["initial weights", "init_seed"]),
        ('algorithm = "sync"\n' + RUN, ["sync", "adpsgd"]),
        (PRIVATE + 'ledger = "here"', ["privacy.ledger", "site.toml"]),
        (
            PRIVATE.replace("init_seed = 1", "init_seed = 1\nepsilon = 2.0"),
            ["privacy.epsilon = 3", "consortium.epsilon"],
        ),
        (RUN + 'weights = "w.safetensors"', ["weights_sha256", "both or neither"]),
        (RUN + "tolerance = 0", ["consortium.tolerance = 0", "positive"]),
        (RUN + "total_sample = 1", ["consortium.total_sample", "total_samples"]),
    ],
)
def test_what_cannot_hold_between_sites_is_refused_in_one_line(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run(run_file(tmp_path, text))
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[privacy]\nepsilon = 4.0", ["privacy.epsilon = 4", "looser", "sites only tighten"]),
        ("[privacy]\ndelta = 1e-3", ["privacy.delta = 0.001", "looser"]),
        ("[options]\nclasses = 3", ["options.classes", "run.toml"]),
        ('task = "digits/mlp"', ["digits/mlp", "run.toml"]),
        ("recods = 3", ["recods", "records"]),
    ],
)
def test_a_site_may_tighten_and_never_loosen(tmp_path: Path, text: str, words: list[str]) -> None:
    run = load_run(run_file(tmp_path, PRIVATE + "[options]\nclasses = 2"))
    with pytest.raises(ConfigError) as caught:
        at_site(run, load_site(site_file(tmp_path, text)))
    for word in words:
        assert word in str(caught.value)


def test_a_sites_run_has_its_own_data_budget_and_ledger(tmp_path: Path) -> None:
    run = load_run(run_file(tmp_path, PRIVATE))
    text = 'records = 200\n[options]\ndata_dir = "mine"\n[privacy]\nepsilon = 1.0'
    site = load_site(site_file(tmp_path, text))
    own = at_site(run, site)
    assert own.options == {"data_dir": str(tmp_path / "mine")}
    assert (own.privacy.epsilon, own.privacy.delta) == (1.0, 1e-4)
    assert own.privacy.ledger == str(tmp_path / "ledger")
    assert site.key == str(tmp_path / "site.key")
    assert run.privacy.ledger is None, "run.toml itself stays as it is"


def test_the_canonical_text_is_the_same_whatever_the_layout_and_names_the_key_that_differs(tmp_path: Path) -> None:
    run = load_run(run_file(tmp_path, RUN))
    again = loads_config("# another layout\n" + RUN.replace("learners = 4", "learners   = 4  # hospitals"))
    assert run.to_toml() == again.to_toml()
    other = loads_config(RUN.replace("batch_size = 16", "batch_size = 32"))
    assert difference(run, other) == ("batch_size", "16", "32")
