"""The privacy statement: every element is there, weaknesses are said plainly, unknowns are questions."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adp2sgd.config import Config, Privacy
from adp2sgd.engine import simulate
from adp2sgd.errors import ConfigError
from adp2sgd.privacy.accountant import epsilon
from adp2sgd.privacy.mechanism import SampledGaussian
from adp2sgd.report.registry import ASK
from adp2sgd.report.statement import Statement, statement, write_statement
from conftest import adp2sgd

PRIVATE = Config(
    task="blobs",
    learners=2,
    epochs=1,
    batch_size=20,
    device="cpu",
    options={"records": 1000, "features": 8},
    privacy=Privacy(mode="private", noise_multiplier=2.0, delta=1e-6),
)
ELEMENTS = (
    "Privacy parameters",
    "Strength in words",
    "Unit of privacy",
    "Neighbouring relation",
    "Mechanism, sensitivity and clipping",
    "Composition and total budget",
    "Utility and its spread",
    "Trust model",
    "Side channels and other leaks",
    "Access to the raw data",
    "Other releases",
    "Library and tests",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("statement") / "run"
    simulate(PRIVATE, path)
    return path


def facts(made: Statement) -> dict[str, str]:
    return {name: value for section in made.sections for name, value in section.facts}


def test_every_element_of_the_guidelines_is_a_section(folder: Path) -> None:
    made = statement(folder)
    assert tuple(section.title for section in made.sections) == ELEMENTS
    assert all(section.text for section in made.sections)
    page = made.to_markdown()
    assert re.findall(r"^## (.*)", page, re.MULTILINE)[-len(ELEMENTS) - 1 : -1] == list(ELEMENTS)
    for word in ("None", "nan", "{", "TODO"):
        assert word not in page
    assert "\n\n\n" not in page


def test_the_parameters_are_the_accountants(folder: Path) -> None:
    result = json.loads((folder / "result.json").read_text())
    made = facts(statement(folder))
    own = epsilon(SampledGaussian(2.0, float(made["its sampling rate"])), result["learners"][0]["max_steps"], 1e-6)
    assert made["ε, at most"] == f"{result['guarantee']['epsilon']:.4g}" == f"{own.epsilon:.4g}"
    assert made["its ε by PLD, certified"] == f"between {own.epsilon_lower:.4g} and {own.epsilon:.4g}"
    assert float(made["its ε by RDP"]) > own.epsilon
    assert made["noise multiplier of learner 0"] == "2"


def test_a_sound_run_has_no_warnings_and_asks_the_owner(folder: Path) -> None:
    made = statement(folder)
    assert made.warnings == ()
    assert "No single record can be told apart from its absence" in made.summary
    asked = " ".join(made.questions)
    for word in ("one record at most", "trials on these data", "raw data", "released from these data", "other private"):
        assert word in asked, word


def test_what_weakens_a_guarantee_is_said_plainly(tmp_path: Path) -> None:
    weak = PRIVATE.replace(seed=0, privacy=Privacy(mode="private", noise_multiplier=0.3, delta=1e-4))
    simulate(weak, tmp_path / "run")
    said = " ".join(statement(tmp_path / "run").warnings)
    for words in ("seeded", "is 10 or more", "δ = 0.0001 is above 1e-5", "above 1/n²"):
        assert words in said, words
    assert "is weak" in statement(tmp_path / "run").to_markdown()


def test_records_that_may_belong_to_people_are_said_plainly(folder: Path, tmp_path: Path) -> None:
    result = json.loads((folder / "result.json").read_text())
    result["notes"].append('"patient_id" seems to tell whose a record is, and ε is per record: a person …')
    copied = tmp_path / "run"
    copied.mkdir()
    (copied / "config.toml").write_text((folder / "config.toml").read_text())
    (copied / "result.json").write_text(json.dumps(result))
    made = statement(copied)  # without the learners' own files, as a published folder is
    assert any("people may have several records" in line and "patient_id" in line for line in made.warnings)
    assert "its sampling rate" not in facts(made)


def test_a_site_does_not_tell_its_rate_and_noise(folder: Path, tmp_path: Path) -> None:
    for path in ("config.toml", "result.json", "learner-0/plan.json"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text((folder / path).read_text())
    settings = (tmp_path / "config.toml").read_text()
    (tmp_path / "config.toml").write_text(settings.replace("[consortium]", "[consortium]\ntotal_samples = 1000"))
    made = statement(tmp_path)
    assert not {"its sampling rate", "its cap on steps"} & facts(made).keys()
    assert not any(name.startswith("noise multiplier") for name in facts(made))
    assert "number_of_privacy_units" not in json.dumps(made.registry)


REQUIRED = {  # of opendp/deployments-registry-data, schemas/deployments-schema.yaml, commit 057e5d8
    "basic": {"name", "data_curators", "description", "intended_use", "data_product_type", "data_product_region",
              "publication_date"},
    "administrative": {"status", "registry_authors", "tier"},
}  # fmt: skip
ALLOWED = {
    "basic": REQUIRED["basic"] | {"data_product_sector"},
    "dp_variant": {"variant_name", "data_domain", "unprotected_quantities"},
    "privacy_loss": {"privacy_unit", "privacy_unit_details", "number_of_privacy_units", "privacy_parameters",
                     "privacy_parameters_details"},
    "deployment_model": {"model_name", "model_name_details", "trust_assumptions", "actors", "release_type",
                         "release_type_details", "data_source_type", "data_source_type_details", "access_type",
                         "access_type_details"},
    "implementation": {"preprocessing_and_hyperparameter_tuning", "mechanisms", "composition", "post_processing",
                       "justification", "utility", "additional_information"},
    "administrative": REQUIRED["administrative"] | {"evidence_sources"},
}  # fmt: skip
NAMES = {
    "data_product_type": {"Machine learning model"},
    "variant_name": {"Approximate DP"},
    "model_name": {"Federated"},
    "release_type": {"One release", "Many releases"},
    "access_type": {"Non-interactive"},
    "status": {"Draft"},
}


def test_the_registry_entry_keeps_to_the_schema(folder: Path) -> None:
    entry = json.loads(write_statement(folder, "registry"))
    assert set(entry) == {"url_slug", "deployment"}
    parts: dict[str, dict[str, Any]] = entry["deployment"]
    assert set(parts) == set(ALLOWED)
    for name, part in parts.items():
        assert set(part) <= ALLOWED[name], name
        assert REQUIRED.get(name, set()) <= set(part), name
        for key, value in part.items():
            assert value in NAMES.get(key, {value}) if isinstance(value, str) else True
    assert set(parts["privacy_loss"]["privacy_parameters"]) == {"epsilon", "delta"}
    assert parts["privacy_loss"]["number_of_privacy_units"] == 800  # of 1,000 records a fifth is held out
    assert parts["basic"]["intended_use"].startswith(ASK)
    assert parts["implementation"]["utility"].startswith(ASK)  # figures of held-out records are the owner's to publish


def test_a_private_runs_card_tells_metrics_on_request_only(folder: Path, tmp_path: Path) -> None:
    for words, told in (((), False), (("--with-metrics",), True)):
        done = adp2sgd("export", str(folder), "--out", str(tmp_path / "model.safetensors"), *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        card = (tmp_path / "MODEL_CARD.md").read_text(encoding="utf-8")
        assert ("| accuracy |" in card) is told
        assert ("Not published" in card) is not told
        assert " records)" not in card


def test_the_command_writes_markdown_and_json(folder: Path, tmp_path: Path) -> None:
    done = adp2sgd("privacy", "statement", str(folder), cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("# Privacy statement of run\n")
    done = adp2sgd("privacy", "statement", str(folder), "--format", "json", "-o", "s.json", cwd=tmp_path)
    assert done.stdout.strip() == "s.json"
    assert json.loads((tmp_path / "s.json").read_text())["registry"]["url_slug"] == "run"


def test_what_cannot_be_stated_is_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    simulate(PRIVATE.replace(privacy=Privacy(), epochs=0.1), tmp_path / "plain")
    for arguments in ([tmp_path / "plain"], [tmp_path / "nothing"], [folder, "--format", "pdf"]):
        done = adp2sgd("privacy", "statement", *map(str, arguments), cwd=tmp_path)
        assert done.returncode == 2
        assert len(done.stderr.strip().splitlines()) == 1
    with pytest.raises(ConfigError, match="the gradients carry no noise"):
        statement(tmp_path / "plain")


def test_a_statement_is_data(folder: Path) -> None:
    made = statement(folder)
    assert replace(made, title="x").to_dict()["title"] == "x"
    assert json.dumps(made.to_dict())
