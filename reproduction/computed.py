"""Tables of what is computed or timed and not trained: sizes, theory and privacy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reproduction import paper
from reproduction.cells import Record
from reproduction.tables import Table


def size_table(records: Sequence[Record]) -> list[Table]:
    rows, order = [], list(paper.MODELS)
    for record in sorted(records, key=lambda each: order.index(each["cell"]["model"])):
        known = paper.MODELS[record["cell"]["model"]]
        rows.append([
            record["cell"]["model"], f"{record['parameters']:,}", f"{known.mib:.2f}",
            f"{record['mib']:.2f}", f"{known.hours:.2f}", f"{record['hours_extrapolated']:.2f}",
            f"{record['epoch_s_extrapolated']:.1f}", str(record["batch_size"]),
            f"{record['batch_size'] / record['step_s']:,.0f}", record["device"],
        ])  # fmt: skip
    columns = ["model", "parameters", "MiB (paper)", "MiB", "hours (paper, V100)"]
    columns += ["hours, extrapolated", "s per epoch, extrapolated", "batch", "records per s", "device"]
    return [Table(title="Models: sizes, and time with norms and noise", columns=columns, rows=rows)]


def _rows_table(title: str, rows: Sequence[Record], columns: dict[str, str]) -> Table:
    """Rows of figures by name, under the columns' headings."""
    shown = [[_any(row[key]) for key in columns] for row in rows]
    return Table(title=title, columns=list(columns.values()), rows=shown)


def _any(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if value == round(value) and abs(value) < 1e9 else f"{value:.4g}"
    if isinstance(value, int) and abs(value) >= 10**9:
        return f"{value:.3g}"
    if isinstance(value, list):
        return "; ".join(value) or "none"
    return "none" if value is None else str(value)


def theory_tables(records: Sequence[Record]) -> list[Table]:
    parts: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        found = record.get("rows") or [record]
        parts.setdefault(record["cell"]["part"], []).extend({**record["cell"], **row} for row in found)
    for row in parts.get("conditions", []):
        row |= {f"at {lr}": value for lr, value in row["largest_smoothness_theorem_1"].items()}
    for row in parts.get("consensus", []):
        row["ratio"] = row["measured"] / row["predicted"]
    headings: dict[str, tuple[str, dict[str, str]]] = {
        "contraction": ("Contraction by one exchange, 16 learners", {
            "graph": "partners", "rho_closed_form": "ρ, closed form", "rho": "ρ, eigenvalues",
            "rho_measured": "measured", "standard_error": "standard error", "rho_bar": "ρ̄"}),
        "consensus": ("Consensus (1/K) Σ‖w_k − θ‖² in the steady state, quadratic, lr 0.01, σ = 1", {
            "graph": "partners", "learners": "learners", "global_steps": "steps", "staleness_max": "largest staleness",
            "measured": "measured", "predicted": "predicted", "ratio": "measured / predicted",
            "bound": "bound of the paper's lemma", "c1": "C1"}),
        "rate": ("Mean ‖∇F(θ)‖² over a run at Proposition 1's learning rate, quadratic, 2 learners", {
            "global_steps": "steps", "least_steps": "least T", "lr": "lr", "staleness_max": "largest staleness",
            "measured": "measured", "bound": "bound", "failed": "conditions that fail"}),
        "conditions": ("The largest smoothness L that the statements allow in the paper's CIFAR-10 run", {
            "graph": "partners", "rho_bar": "ρ̄", "staleness": "τ", "at 0.4": "Theorem 1 at lr 0.4",
            "at 0.04": "at 0.04", "at 0.004": "at 0.004",
            "largest_smoothness_proposition_1": "Proposition 1 at T = 58,594"}),
        "proposition-1": ("C₃ at Proposition 1's least T, which its proof takes to be 1 at most (L = ς² = υ² = 1)", {
            "graph": "partners", "learners": "learners", "staleness": "τ", "least_steps": "least T", "c3": "C₃"}),
        "propositions": ("The T that Propositions 1 and 2 ask for (L = ς² = υ² = G = 1)", {
            "model": "model", "epsilon": "ε", "steps_proposition_2": "T of Proposition 2",
            "least_steps_proposition_1": "least T of Proposition 1", "failed": "conditions that fail"}),
    }  # fmt: skip
    return [_rows_table(headings[part][0], parts[part], headings[part][1]) for part in headings if part in parts]


def privacy_tables(records: Sequence[Record]) -> list[Table]:
    headings: dict[str, tuple[str, dict[str, str]]] = {
        "paper-scale": ("σ read as a noise multiplier, at the paper's scale (rate 0.08192, 3,662 steps, δ = 1e-5)", {
            "noise_multiplier": "noise multiplier", "epsilon_pld": "ε by PLD", "epsilon_rdp": "ε by RDP",
            "epsilon_with_the_wrong_rate": "ε that γ = B/(K·n) would print",
            "epsilon_if_shuffled": "ε of shuffled batches", "steps_within_epsilon_8": "steps within ε = 8"}),
        "theorem-2": ("Theorem 2 at worked points, and ε of a neighbour who sees whose model it receives", {
            "claimed_epsilon": "claimed ε", "mu": "μ", "learners": "K", "steps": "T", "alpha": "α",
            "alpha_bound": "bound on α", "sigma": "σ", "failed": "conditions that fail",
            "neighbour_noise_on_sum": "true ε (add-remove), noise on the sum",
            "neighbour_noise_on_mean": "on the mean",
            "neighbour_replace_one": "on the mean, replace-one as the theorem has it"}),
        "shares": ("Unequal learners: what each spends (noise multiplier 2, T = 58,594, K = 16)", {
            "case": "case", "learner": "learner", "simulated_steps": "steps (simulated)", "steps": "steps (exact)",
            "epsilon": "ε", "epsilon_planned": "ε if p_k were 1/K"}),
        "remark": ("The Remark's ε√(t/T) against a neighbour (ε = 9, least σ, replace-one)", {
            "own_steps": "the learner's own steps", "step": "t", "claimed_epsilon": "claimed ε",
            "neighbour_replace_one": "true ε"}),
        "traps": ("Common ways to get a wrong ε, at the paper's scale", {
            "trap": "trap", "printed": "ε printed", "true": "true ε"}),
    }  # fmt: skip
    rows = {record["cell"]["table"]: record["rows"] for record in records}
    return [_rows_table(headings[name][0], rows[name], headings[name][1]) for name in headings if name in rows]
