"""The configuration: TOML in and out, settings, and errors in our words."""

import dataclasses
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

from adp2sgd import config
from adp2sgd.config import Config, Optimizer, Privacy, Warmup
from adp2sgd.errors import ConfigError
from conftest import ROOT

FULL = """
task = "digits/mlp"
algorithm = "adpsgd"
learners = 8
epochs = 20
batch_size = 32
seed = 0
[options]
hidden = [32]
[topology]
graph = "ring"
partner = "neighbour"
[optimizer]
lr = 0.4
schedule = [[160, 0.04], [240, 0.004]]
momentum = 0.0
weight_decay = 5e-4
[data]
partition = "dirichlet"
alpha = 0.5
[privacy]
mode = "private"
epsilon = 3.0
delta = 1e-5
clip_norm = 1.0
[speeds]
kind = "one-slow"
factor = 10.0
[network]
latency_s = 0.0
bandwidth_bps = inf
"""
PRIVATE = '[privacy]\nmode = "private"\ndelta = 1e-5\nepsilon = 1\n'


def test_the_file_of_the_design_is_read() -> None:
    read = config.loads_config(FULL)
    assert read.optimizer.schedule == ((160.0, 0.04), (240.0, 0.004))
    assert read.privacy.epsilon == 3.0
    assert math.isinf(read.network.bandwidth_bps)
    assert read.options == {"hidden": [32]}


@pytest.mark.parametrize("text", ["", FULL, "[optimizer]\nwarmup = {epochs = 10, from = 0.1}\ndecay = 0.7071\nlr = 1"])
def test_what_is_written_reads_back_equal_and_is_complete(text: str) -> None:
    read = config.loads_config(text)
    written = read.to_dict()
    assert config.loads_config(read.to_toml()) == read
    for field in dataclasses.fields(Config):
        assert field.name in written or getattr(read, field.name) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("learnes = 4", ["learnes = 4", "unknown key", "learners"]),
        ("[optimizer]\nlearning_rate = 1", ["optimizer.learning_rate", "lr"]),
        ("learners = 0", ["learners = 0", "at least 1"]),
        ("learners = 2.5", ["learners = 2.5", "whole number"]),
        ("learners = true", ["learners = True", "whole number"]),
        ('epochs = "ten"', ['epochs = "ten"', "number"]),
        ("epochs = nan", ["epochs"]),
        ("epochs = inf", ["epochs = inf"]),
        ('algorithm = "magic"', ["magic", "adpsgd, sync"]),
        ("task = 3", ["task = 3", "quotes"]),
        ("optimizer = 3", ["optimizer = 3", "table"]),
        ("[optimizer]\nlr = -1", ["optimizer.lr = -1"]),
        ("[optimizer]\nmomentum = 1", ["optimizer.momentum = 1"]),
        ("[optimizer]\nschedule = [[20, 0.1], [10, 0.2]]", ["optimizer.schedule", "in order"]),
        ("[optimizer]\nschedule = [[20, 0.1, 3]]", ["optimizer.schedule[0]", "2 values"]),
        ("[optimizer]\nschedule = 3", ["optimizer.schedule = 3", "list"]),
        ('[speeds]\nkind = "one-slow"\nlearner = 8', ["speeds.learner = 8", "0 to 7"]),
        ('[speeds]\nkind = "list"\nvalues = [1, 2]', ["speeds.values", "8 numbers"]),
        ("[speeds]\nvalues = [1, 1, 1, 1, 1, 1, 1, 9]", ["speeds.values", 'kind = "list"', "constant"]),
        ("[speeds]\nstep_s = inf", ["speeds.step_s = inf"]),
        ("[network]\nlatency_s = inf", ["network.latency_s = inf"]),
        ('[topology]\ngraph = "complete"\nedges = [[0, 1]]', ["topology.edges", "complete"]),
        ("total_samples = 100", ["total_samples", "unknown key"]),
        ("[data]\nsizes = [1, 2]", ["data.sizes", "8 numbers"]),
        ('[data]\npartition = "site"\nsizes = [1]', ["data.sizes", "iid"]),
        ('[privacy]\nmode = "private"\nepsilon = 1', ["privacy.delta is missing"]),
        ('[privacy]\nmode = "private"\ndelta = 1e-5', ["privacy.epsilon or privacy.noise_multiplier"]),
        (
            '[privacy]\nmode = "private"\ndelta = 1e-5\nepsilon = 1\nnoise_multiplier = 0',
            ["privacy.noise_multiplier = 0"],
        ),
        ('[privacy]\nmode = "private"\ndelta = 1e-5\nepsilon = 1\nclip_norm = 0', ["privacy.clip_norm = 0"]),
        ('[privacy]\nmode = "private"\ndelta = 1.5\nepsilon = 1', ["privacy.delta = 1.5"]),
        (PRIVATE + "clip_quantile = 1", ["privacy.clip_quantile = 1", "between 0 and 1"]),
        (PRIVATE + "clip_quantile = 0.5\nclip_rate = 0", ["privacy.clip_rate = 0", "0.2"]),
        (PRIVATE + "clip_quantile = 0.5\ncount_noise = -1", ["privacy.count_noise = -1", "positive"]),
        (PRIVATE + "count_noise = 2", ["privacy.count_noise = 2.0", "privacy.clip_quantile"]),
        (PRIVATE + "copies = 0", ["privacy.copies = 0", "1 or more"]),
        (PRIVATE + "copies = 1.5", ["privacy.copies = 1.5", "whole number"]),
        ("[privacy]\nclip_quantile = 0.5", ["privacy.clip_quantile = 0.5", 'mode = "none"', "private"]),
        ('[privacy]\nmode = "paper"\nsigma = 1\ncopies = 4', ["privacy.copies = 4", 'mode = "paper"', "private"]),
        ('[privacy]\nmode = "private"\ndelta = 1e-5\nsigma = 1\nepsilon = 1', ["privacy.sigma", "noise_multiplier"]),
        ('[privacy]\nmode = "paper"', ["privacy.sigma"]),
        ('[privacy]\nmode = "paper"\nsigma = 1\nepsilon = 3', ["privacy.epsilon = 3.0", "no guarantee"]),
        ("[privacy]\nepsilon = 3", ["privacy.epsilon = 3.0", 'mode = "none"']),
        ("learners = ", ["not valid TOML"]),
    ],
)
def test_bad_input_is_one_line_that_names_the_key_the_value_and_the_fix(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        config.loads_config(text)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_settings_change_fields_as_toml_or_bare_words() -> None:
    changed = Config().with_settings(
        ["learners=4", "topology.graph=complete", "optimizer.lr=1e-2", "options.hidden=[8]"]
    )
    assert (changed.learners, changed.topology.graph, changed.optimizer.lr) == (4, "complete", 0.01)
    assert changed.options == {"hidden": [8]}
    short = Config().with_settings(["optimizer.lr=.5", "epochs=3.", "optimizer.weight_decay=.1e-2", "options.name=.x"])
    assert (short.optimizer.lr, short.epochs, short.optimizer.weight_decay) == (0.5, 3.0, 0.001)
    assert short.options == {"name": ".x"}


@pytest.mark.parametrize("setting", ["learners", "learners=many", "no.such=1", "learners.x=1"])
def test_bad_settings_are_refused(setting: str) -> None:
    with pytest.raises(ConfigError):
        Config().with_settings([setting])


def test_python_is_checked_like_a_file() -> None:
    """Else a run would leave a configuration behind that nobody can read."""
    for wrong, words in (
        ({"batch_size": 16.5}, r"batch_size = 16\.5 has the wrong type; it must be a whole number"),
        ({"seed": True}, "seed = True has the wrong type"),
        ({"seed": -1}, "seed = -1"),
        ({"learners": "4"}, 'learners = "4" has the wrong type'),
        ({"optimizer": {"lr": "fast"}}, r'optimizer\.lr = "fast" has the wrong type'),
        ({"optimizer": {"rate": 1}}, r"optimizer\.rate = 1 is an unknown key"),
        ({"optimizer": 3}, r"optimizer = 3 must be a table"),
        ({"task": None}, "task = None has the wrong type"),
    ):
        with pytest.raises(ConfigError, match=words):
            Config(**wrong)
    given = Config(learners=np.int64(2), epochs=np.float32(0.5), optimizer={"lr": 1, "schedule": [[1, 0.5]]})  # type: ignore[arg-type]
    assert (given.learners, given.epochs, given.optimizer) == (2, 0.5, Optimizer(lr=1.0, schedule=((1.0, 0.5),)))
    assert [type(each) for each in (given.learners, given.epochs, given.optimizer.lr)] == [int, float, float]
    assert config.loads_config(given.to_toml()) == given
    private = Privacy(mode="private", noise_multiplier=1.0, delta=1e-5, ledger=Path("kept"))  # type: ignore[arg-type]
    assert private.ledger == "kept"
    with pytest.raises(ConfigError, match=r"optimizer\.lr = 1000.* has the wrong type"):
        Optimizer(lr=10**400)


def test_a_missing_file_is_named(tmp_path: object) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        config.load_config(f"{tmp_path}/nowhere.toml")


def test_configurations_are_frozen_and_copies_are_checked() -> None:
    base = Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        base.learners = 3  # type: ignore[misc]
    assert base.replace(privacy=Privacy(mode="private", epsilon=3.0, delta=1e-5)).privacy.epsilon == 3.0
    with pytest.raises(ConfigError):
        base.replace(learners=-1)


def test_the_papers_schedules() -> None:
    cifar = Optimizer(lr=0.4, schedule=((160, 0.04), (240, 0.004)))
    assert [cifar.rate(e) for e in (0, 159.9, 160, 239.9, 240, 300)] == [0.4, 0.4, 0.04, 0.04, 0.004, 0.004]
    speech = Optimizer(lr=1.0, warmup=Warmup(epochs=10, from_=0.1), decay=2**-0.5)
    assert [round(speech.rate(e), 4) for e in (0, 5, 10, 11, 12, 20)] == [0.1, 0.55, 1.0, 0.7071, 0.5, 0.0313]


def test_the_document_has_every_field_with_its_default() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    example = text.split("```toml")[1].split("```")[0]
    assert config.loads_config(example).speeds.values == (1, 1, 1.5, 1, 8)
    sections = [part.splitlines() for part in text.split("\n## ")[1:]]
    rows = {
        (lines[0].partition("]")[0].strip("`[") if "[" in lines[0] else "", *line.split(" | ")[:2])
        for lines in sections
        for line in lines
        if line.startswith("| `")
    }
    expected = set()
    for section, name, value in fields_of(Config()):
        if value is None or isinstance(value, tuple):
            shown = "–" if value is None else f"`{json.dumps(value)}`"
        else:
            shown = f"`{tomli_w.dumps({'x': value}).partition('= ')[2].strip()}`"
        expected.add((section, f"| `{name}`", shown if value not in ((), {}) else "`[]`" if value == () else "`{}`"))
    assert rows == expected


def fields_of(part: Any, section: str = "", prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    for each in dataclasses.fields(part):
        value, name = getattr(part, each.name), each.name.rstrip("_")
        if not dataclasses.is_dataclass(value):
            yield section, prefix + name, value
        elif section:
            yield from fields_of(value, section, f"{name}.")
        else:
            yield from fields_of(value, name)


def test_another_privacy_mode_drops_the_fields_of_the_first_with_a_note() -> None:
    private = Config(
        privacy=Privacy(mode="private", epsilon=3.0, delta=1e-5, clip_norm=0.5, copies=2, ledger="ledgers")
    )
    plain, notes = private.changed(["privacy.mode=none"])
    assert plain.privacy == Privacy(clip_norm=0.5, ledger="ledgers")
    [note] = notes
    assert 'privacy.mode = "none" drops' in note
    assert all(f"privacy.{name}" in note for name in ("epsilon", "delta", "copies"))
    paper, _ = private.changed(["privacy.mode=paper", "privacy.sigma=2"])
    assert (paper.privacy.sigma, paper.privacy.epsilon) == (2.0, None)
    back, notes = paper.changed(["privacy.mode=private", "privacy.epsilon=1", "privacy.delta=1e-5"])
    assert (back.privacy.sigma, notes) == (None, ['privacy.mode = "private" drops privacy.sigma'])
    assert private.changed(["learners=3"])[1] == []
    with pytest.raises(ConfigError, match="means nothing"):  # what is asked for beside the mode is not dropped
        private.changed(["privacy.mode=none", "privacy.epsilon=2"])


def test_an_empty_setting_unsets_a_field() -> None:
    config = Config(
        seed=3, options={"limit": 5}, privacy=Privacy(mode="private", noise_multiplier=1.0, epsilon=2, delta=1e-5)
    )
    bare = config.with_settings(["seed=", "privacy.noise_multiplier=", "options.limit=", "learners="])
    assert (bare.seed, bare.privacy.noise_multiplier, bare.options, bare.learners) == (None, None, {}, 8)
    with pytest.raises(ConfigError, match=r'privacy.epsilom= .*did you mean "privacy.epsilon"'):
        config.with_settings(["privacy.epsilom="])


@pytest.mark.parametrize(
    ("setting", "meant"),
    [
        ("learnes=3", ' (did you mean "learners"?)'),
        ("optimizer.xyz=1", ""),
        ("privacy.epsilom=1", ' (did you mean "epsilon"?)'),
        ("data.partition=sites", ' (did you mean "site"?)'),
        ("algorithm=adpsdg", ' (did you mean "adpsgd"?)'),
    ],
)
def test_a_misspelt_key_or_name_is_met_with_the_right_one(setting: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config().with_settings([setting])
    assert re.search(rf"unknown( key)?{re.escape(meant)}; ", str(caught.value))
