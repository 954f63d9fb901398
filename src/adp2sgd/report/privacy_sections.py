"""The sections of a privacy statement, after the elements of NIST SP 800-226, in plain text."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from adp2sgd.report.privacy_facts import PrivacyFacts

Facts = tuple[tuple[str, str], ...]
ADJACENT = {
    "add-remove": "Two data sets are neighbours if one {unit} contributes to one of them and not to the other. What is "
    "public stays the same: the declared number of {units}, the division among learners, the configuration.",
    "replace-one": "Two data sets are neighbours if one {unit} is replaced by another.",
}


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading with paragraphs of plain text below it, and a table of facts (name, value)."""

    title: str
    text: tuple[str, ...] = ()
    facts: Facts = ()


def units(known: PrivacyFacts) -> str:
    return "records" if known.per_record else f"{known.unit} units"


def parameters(known: PrivacyFacts) -> Section:
    own, plan, whose = known.guarantee, known.weakest, known.weakest_name
    facts = [
        ("ε, at most", f"{own.epsilon:.4g}"),
        ("δ", f"{own.delta:g}"),
        ("ε spent by the steps taken", f"{own.epsilon_spent:.4g} in {own.steps} of {own.max_steps} steps"),
        ("accountant", own.accountant),
        ("sampling", f"{own.sampler}: every {known.unit} joins a batch by an independent coin flip"),
    ]
    if own.epsilon_alone is not None:
        facts.append(("ε of this run alone, by PLD", f"{own.epsilon_alone:.4g}"))
    if plan is not None and known.by_pld is not None and not known.between_sites:
        facts += [
            (f"noise multiplier of {whose}", f"{plan.mechanism.noise_multiplier:.6g}"),
            ("its sampling rate", f"{plan.mechanism.sample_rate:.6g}"),
            ("its cap on steps", f"{plan.max_steps:,}"),
            ("its ε by PLD, certified", f"between {known.by_pld.epsilon_lower:.4g} and {known.by_pld.epsilon:.4g}"),
        ]
        if known.by_rdp is not None:
            facts.append(("its ε by RDP", f"{known.by_rdp.epsilon:.4g}"))
    told = {known.name_of(each): each.epsilon for each in known.run.learners if each.epsilon is not None}
    facts += [(f"ε of {name}", f"{value:.4g}") for name, value in told.items()]
    text = ["ε holds for the cap on steps, which was fixed before training. It is the largest ε of all learners."]
    if known.between_sites:
        text.append("Noise multiplier and sampling rate are known to the site and not stated here.")
    return Section(title="Privacy parameters", text=tuple(text), facts=tuple(facts))


def strength(known: PrivacyFacts) -> Section:
    own = known.guarantee
    power = math.exp(min(own.epsilon, 700.0))
    guess = min(1.0, (power + own.delta) / (1 + power))  # the best test, at equal odds
    words = "strong" if own.epsilon <= 1 else "moderate" if own.epsilon < 10 else "weak"
    return Section(
        title="Strength in words",
        text=(
            f"Suppose that a coin decides whether a given {known.unit} is used for training. An observer who sees all "
            f"that the run released guesses the coin with a probability of at most {guess:.1%}, instead of 50 %.",
            f"By the tiers of Ponomareva et al. (2023, “How to DP-fy ML”) a guarantee of ε = {own.epsilon:.3g} is "
            f"{words}: strong up to 1, moderate up to 10, weak above. The bound is for the worst case.",
        ),
    )


def unit_of_privacy(known: PrivacyFacts) -> Section:
    text: tuple[str, ...]
    if known.per_record:
        text = (
            "The unit is one record: one training example.",
            "A person with k records has at most k·ε, at a larger δ. Whether people have several records is a question "
            "to the owner.",
        )
    else:
        each = known.settings.privacy.records_per_unit
        text = (
            f"The unit is one {known.unit} with all of its records. At most {each} of them take part in a step, and "
            "their gradient is clipped as one.",
        )
    return Section(title="Unit of privacy", text=(*text, f"It is valid where {known.guarantee.valid_if}."))


def neighbours(known: PrivacyFacts) -> Section:
    words = ADJACENT[known.guarantee.adjacency].format(unit=known.unit, units=units(known))
    return Section(title="Neighbouring relation", text=(words,), facts=(("relation", known.guarantee.adjacency),))


def mechanism(known: PrivacyFacts) -> Section:
    privacy, norm = known.settings.privacy, "the clip norm C"
    text = [
        f"Sampled Gaussian mechanism, once per step: the gradient of each drawn {known.unit} is clipped to {norm} over "
        f"all parameters together, the clipped gradients are added up, and N(0, (zC)²) is added to the sum. The sum is "
        "divided by the expected batch, never by the size of the batch at hand.",
        f"Sensitivity: one {known.unit} moves the sum by at most C.",
    ]
    facts = [("C", f"{privacy.clip_norm:g}"), ("expected batch", f"{known.settings.batch_size} {units(known)}")]
    if privacy.clip_quantile is not None:
        text.append(
            f"C follows the {privacy.clip_quantile:g} quantile of the gradient norms by a noised count, which is "
            "accounted together with the sum as one Gaussian."
        )
        facts[0] = ("C at the start", f"{privacy.clip_norm:g}")
    if privacy.copies > 1:
        facts.append(("augmented copies of a record, clipped as one", str(privacy.copies)))
    return Section(
        title="Mechanism, sensitivity and clipping",
        text=tuple(text),
        facts=(*facts, ("noise", known.run.noise_source)),
    )


def composition(known: PrivacyFacts) -> Section:
    own, privacy = known.guarantee, known.settings.privacy
    if own.composition == "pld":
        how = (
            "All steps are of one mechanism that was fixed before the first one. Their loss distributions are composed."
        )
    else:
        how = (
            f"Runs may be chosen after the results of earlier ones. A Rényi filter ({own.composition}) that was fixed "
            "before the first step bounds them together."
        )
    if privacy.ledger is None:
        scope = "The ledger covers this run alone. Other runs and releases on the same data are not counted in ε."
    else:
        scope = (
            f"The ledger lasts over runs on the same data. ε = {own.epsilon:.4g} is the total that all of them may "
            f"ever spend; other runs have spent {own.epsilon_others:.4g} so far."
        )
    adding = "Learners hold disjoint data, so ε does not add up over learners. Averaging models costs nothing."
    return Section(title="Composition and total budget", text=(how, scope, adding))


def utility(known: PrivacyFacts) -> Section:
    run = known.run
    facts = [
        (f"{name} of the average model", f"{value:.4g}") for name, value in run.metrics.items() if value is not None
    ]
    for name in run.metrics:
        own = [value for each in run.learners if (value := each.metrics.get(name)) is not None]
        if len(own) > 1:
            facts.append((f"{name} of single learners", f"{min(own):.4g} to {max(own):.4g}"))
    for site, figures in run.sites.items():
        shown = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{v} {k}" for k, v in figures.items())
        facts.append((f"held-out data of {site}", shown))
    text = (
        "Figures are of held-out data, which ε does not cover.",
        "This is one run. Noise makes results differ between runs; each repetition on the same data costs privacy.",
    )
    return Section(title="Utility and its spread", text=text, facts=tuple(facts))


def trust(known: PrivacyFacts) -> Section:
    return Section(
        title="Trust model",
        text=(
            f"Protected against: {known.guarantee.threat_model}.",
            "Trusted: the machine and the people at each learner that hold its data, the code of the task that runs "
            "there, and the operating system's source of randomness. No central server sees data or models.",
            "Gradients, models received from others, averaging, momentum and weight decay are adaptive choice or "
            "post-processing and cost nothing.",
        ),
    )


def side_channels(known: PrivacyFacts) -> Section:
    privacy = known.settings.privacy
    timing = (
        "Every step does the same work, so its time is covered."
        if privacy.fixed_work
        else "Not covered: the time of a step depends on the batch that was drawn (privacy.fixed_work = false)."
    )
    rounding = (
        "Gradients were taken record by record, so rounding couples no records."
        if privacy.clipper == "loop"
        else 'Not covered: weights that a malicious neighbour makes to amplify rounding (privacy.clipper = "loop" '
        "covers them)."
    )
    return Section(
        title="Side channels and other leaks",
        text=(
            f"Time: {timing}",
            f"Rounding: {rounding}",
            "Floating point: noise is drawn in float64 and the noisy sum is rounded to a grid that does not depend on "
            "the data. This is no proof against every attack on floating-point arithmetic.",
            "Tuning: the run's folder does not tell whether clip norm, model or learning rate were chosen by trying "
            "them on the same data. Such trials cost privacy that this ε does not contain (see the questions).",
            "Held-out figures: computed without noise on held-out data, which have no protection.",
        ),
    )


def access(known: PrivacyFacts) -> Section:
    return Section(
        title="Access to the raw data",
        text=(
            "The software sends no record, training loss, gradient norm or batch size. Events, ledgers, plans and "
            "checkpoints can be read by the user who ran it alone.",
            "It does not encrypt the data at rest, and does not control who else can read them (see the questions).",
        ),
    )


def releases(known: PrivacyFacts) -> Section:
    held = "Held-out figures are in result.json; publish them by choice only."
    sent = "Released to neighbours: every model that a learner sent, step counts, ε and δ. All of it is covered by ε."
    return Section(title="Other releases", text=(sent, held))


def software(known: PrivacyFacts) -> Section:
    return Section(
        title="Library and tests",
        text=(
            "The sensitivity of a step, the accountant (against 50 digits and dp-accounting), the noise, the ledger "
            "under kill −9 and whole runs (audits with canaries) are tested in the library's own test suite. It was "
            "not certified by a third party.",
        ),
        facts=tuple(known.run.versions.items()),
    )


SECTIONS: tuple[Callable[[PrivacyFacts], Section], ...] = (
    parameters, strength, unit_of_privacy, neighbours, mechanism, composition, utility, trust, side_channels, access,
    releases, software,
)  # fmt: skip
