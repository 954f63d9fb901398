"""Verdicts on what the paper proves or implies; each judge reads computed records, and answers None while they are
missing. Where nothing can be measured, the computed figure itself is the counter-example."""

from __future__ import annotations

from collections.abc import Sequence

from reproduction.cells import Record
from reproduction.judges import FAILS, HOLDS, Finding, full

OPEN = "not testable"


def _rows(records: Sequence[Record], table: str) -> Record | None:
    return next((r for r in records if table in (r["cell"].get("table"), r["cell"].get("part"))), None)


def theorem_2(records: Sequence[Record]) -> Finding | None:
    found = _rows(records, "theorem-2")
    if found is None:
        return None
    rows = [row for row in found["rows"] if row["mu"] == "least σ"]
    text = ", ".join(
        f"claimed {row['claimed_epsilon']:g} is {row['neighbour_replace_one']:.1f} (K = {row['learners']})"
        for row in rows
    )
    larger = ", ".join(
        f"{row['claimed_epsilon']:g} is {row['neighbour_replace_one']:.1f} (μ = {row['mu']:g})"
        for row in found["rows"]
        if row not in rows and not row["failed"]
    )
    wrong = any(row["neighbour_replace_one"] > row["claimed_epsilon"] for row in rows)
    text = f"at the smallest σ that it admits: {text}; at larger ones: {larger}"
    return Finding(text, FAILS if wrong else HOLDS, [found])


def on_sum(records: Sequence[Record]) -> Finding | None:
    found = _rows(records, "theorem-2")
    if found is None:
        return None
    best = min(row["neighbour_noise_on_sum"] for row in found["rows"])
    wrong = any(row["neighbour_noise_on_sum"] > row["claimed_epsilon"] for row in found["rows"])
    return Finding(f"ε of at least {best:,.0f} at every worked point", FAILS if wrong else HOLDS, [found])


def remark(records: Sequence[Record]) -> Finding | None:
    found = _rows(records, "remark")
    if found is None:
        return None
    first = found["rows"][0]
    later = [row["step"] for row in found["rows"][1:] if row["neighbour_replace_one"] <= row["claimed_epsilon"]]
    text = f"first step: claimed {first['claimed_epsilon']:.3f}, truly {first['neighbour_replace_one']:.2f}"
    text += f"; it holds at t = {', '.join(map(str, later))}" if later else ""
    return Finding(text, FAILS if first["neighbour_replace_one"] > first["claimed_epsilon"] else HOLDS, [found])


def sigma(records: Sequence[Record]) -> Finding | None:
    found = _rows(records, "paper-scale")
    if found is None:
        return None
    text = ", ".join(f"{row['epsilon_pld']:.2f} at {row['noise_multiplier']:g}" for row in found["rows"])
    return Finding(
        f"with clipping to norm 1 and Poisson batches ε would be {text}; the paper's runs have neither", FAILS, [found]
    )


def even_shares(records: Sequence[Record]) -> Finding | None:
    found = _rows(records, "shares")
    if found is None:
        return None
    spent = {(row["case"].split()[-1], row["learner"]): row["epsilon"] for row in found["rows"]}
    planned = found["rows"][0]["epsilon_planned"]
    text = f"planned ε = {planned:.2f}; in Case II the slow learner spends {spent['slower', 'that one']:.2f} and each "
    text += (
        f"other {spent['slower', 'each other']:.2f}; a learner 10 times faster would {spent['faster', 'that one']:.1f}"
    )
    return Finding(text, FAILS if max(spent.values()) > planned else HOLDS, [found])


def proposition_steps(records: Sequence[Record]) -> Finding | None:
    found = _rows(records, "propositions")
    if found is None:
        return None
    row = next(r for r in found["rows"] if r["model"] == "resnet18" and r["epsilon"] == 9)
    asked, least = row["steps_proposition_2"], row["least_steps_proposition_1"]
    text = f"Proposition 2 asks for T = {asked:.0f}, Proposition 1 for at least {least:.2g}"
    return Finding(text, FAILS if asked < least else HOLDS, [found])


def third_constant(records: Sequence[Record]) -> Finding | None:
    found = _rows(records, "proposition-1")
    if found is None:
        return None
    row = max(found["rows"], key=lambda r: float(r["c3"]))
    text = f"up to {row['c3']:.3f} ({row['graph']}, {row['learners']} learners, τ = {row['staleness']})"
    return Finding(text, FAILS if row["c3"] > 1 else HOLDS, [found])


def theorem_1_covers(records: Sequence[Record]) -> Finding | None:
    found = _rows(records, "conditions")
    if found is None:
        return None
    row = found["rows"][-1]
    largest = row["largest_smoothness_theorem_1"]["0.4"]
    return Finding(f"would need a loss smoother than L = {largest:.1e} at lr 0.4; its L is not known", OPEN, [found])


def rate_bound(records: Sequence[Record]) -> Finding | None:
    rates = sorted(
        (r for r in full(records) if r["cell"].get("part") == "rate"), key=lambda r: float(r["global_steps"])
    )
    if len(rates) < 3:
        return None
    if any(r["bound"] is None for r in rates):
        return Finding("its conditions fail, so that there is no bound", FAILS, rates)
    below = all(r["measured"] <= r["bound"] for r in rates)
    text = ", ".join(f"{r['measured']:.2e} ≤ {r['bound']:.2e} at T = {r['global_steps']:,}" for r in rates)
    return Finding(text, HOLDS if below else FAILS, rates)


def consensus_bound(records: Sequence[Record]) -> Finding | None:
    found = [r for r in full(records) if r["cell"].get("part") == "consensus"]
    bounded = [r for r in found if r["bound"] is not None]
    if not bounded:
        return None
    below = all(r["measured"] <= r["bound"] for r in bounded)
    share = ", ".join(f"{r['bound'] / r['measured']:.0f}" for r in bounded)
    unbounded = len(found) - len(bounded)
    text = f"bound over measured: {share}; in {unbounded} of {len(found)} settings its condition C1 > 0 fails"
    return Finding(text, HOLDS if below else FAILS, found)
