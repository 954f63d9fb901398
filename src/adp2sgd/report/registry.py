"""An entry for the Differential Privacy Deployments Registry (registry.opendp.org), as far as a run can fill it in.

The layout is that of `schemas/deployments-schema.yaml` in opendp/deployments-registry-data at commit 057e5d8; the
schema has no version number. A field that only the owner of the data can fill in holds a question.
"""

from __future__ import annotations

from typing import Any

from adp2sgd.report.privacy_facts import PrivacyFacts

SCHEMA = "opendp/deployments-registry-data, schemas/deployments-schema.yaml, commit 057e5d8"
ASK = "TO BE ANSWERED BY THE OWNER: "


def registry_entry(known: PrivacyFacts) -> dict[str, Any]:
    """As plain values, ready for JSON or YAML. `status` is Draft: the questions in it must be answered first."""
    own = known.guarantee
    return {
        "url_slug": known.name,
        "deployment": {
            "basic": _basic(known),
            "dp_variant": {
                "variant_name": "Approximate DP",
                "data_domain": f"{ASK}what data were trained on (task {known.settings.task})?",
                "unprotected_quantities": "The number of training records or units, names of sites, classes, and "
                "figures of held-out data.",
            },
            "privacy_loss": {
                "privacy_unit": "Record-level" if known.per_record else f"{known.unit}-level",
                "privacy_unit_details": f"Neighbouring relation {own.adjacency}; valid where {own.valid_if}.",
                **({} if known.population is None or known.between_sites
                   else {"number_of_privacy_units": known.total}),
                "privacy_parameters": {"epsilon": own.epsilon, "delta": own.delta},
                "privacy_parameters_details": f"{own}",
            },
            "deployment_model": {
                "model_name": "Federated",
                "model_name_details": "Decentralized: every learner privatizes its own gradients; no server.",
                "actors": f"Every learner holds its own data and trusts no other. It is protected against "
                f"{own.threat_model}.",
                "release_type": "One release" if known.settings.privacy.ledger is None else "Many releases",
                "access_type": "Non-interactive",
            },
            "implementation": _implementation(known),
            "administrative": {
                "status": "Draft",
                "registry_authors": [f"{ASK}who registers this?"],
                "tier": 3,
            },
        },
    }  # fmt: skip


def _basic(known: PrivacyFacts) -> dict[str, Any]:
    curator = {"data_curator_name": f"{ASK}who publishes the model?", "data_curator_type": f"{ASK}Government, Industry "
               "or Nonprofit?"}  # fmt: skip
    return {
        "name": known.name,
        "data_curators": [curator],
        "description": f"A model ({known.settings.task}) trained by {len(known.run.learners)} learners with "
        f"{known.settings.algorithm.upper()}.",
        "intended_use": f"{ASK}what is the model for?",
        "data_product_type": "Machine learning model",
        "data_product_region": f"{ASK}which region do the data describe?",
        "publication_date": f"{ASK}when was the model published (YYYY-MM-DD)?",
    }


def _implementation(known: PrivacyFacts) -> dict[str, Any]:
    privacy, version = known.settings.privacy, known.run.versions.get("adp2sgd", "unknown")
    time = "steps of fixed work" if privacy.fixed_work else "none: the time of a step depends on its batch"
    return {
        "preprocessing_and_hyperparameter_tuning": f"Inputs are scaled by public constants. {ASK}were hyperparameters "
        "chosen by trials on these data, and were those accounted for?",
        "mechanisms": f"Sampled Gaussian mechanism on clipped per-record or per-unit gradients (DP-SGD) by adp2sgd "
        f"{version}. Noise: {known.run.noise_source}. Floating point: noisy sums are rounded to a grid that does not "
        f"depend on the data. Against timing: {time}.",
        "composition": f"{known.guarantee.composition}, accountant {known.guarantee.accountant}.",
        "post_processing": "Averaging of models among learners, and the optimizer.",
        "justification": f"{ASK}why are ε and δ acceptable?",
        "utility": f"{ASK}how good is the model, if you publish figures of held-out records, which ε does not cover?",
        "additional_information": f"Written for the schema {SCHEMA}.",
    }
