"""Every number of the documents comes from a file."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from made_records import QUICK, resnet_row
from reproduction import render
from reproduction.cells import finished, run_all
from reproduction.claims import claims_table
from reproduction.render import RESULTS
from reproduction.studies import STUDIES


def test_the_table_shows_both_recomputed_figures() -> None:
    records = resnet_row([90.0] * 4, [91.0] * 4)[:4]
    records[0] |= {"accuracy_recomputed": 0.88, "accuracy_recomputed_augmented": 0.901}
    records[1] |= {"accuracy_recomputed": 0.87}
    [table] = STUDIES["table1"].tables(records)
    at = table.columns.index("SYNC, statistics recomputed")
    assert [row[at] for row in table.rows][:3] == ["88.00 (augmented 90.10)", "87.00", "–"]


def test_a_run_that_diverges_leaves_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    shown: list[tuple[float, float]] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: shown.append(self.axes[0].get_ylim()))
    records = [r for r in finished(RESULTS, "case3") if r["cell"]["model"] == "lstm" and r["cell"]["epochs"] == 10]
    assert max(max(r["curve"]["loss"]) for r in records if r.get("diverged")) > 1e6
    render.figures(STUDIES["case3"], records, tmp_path)
    assert shown[0][1] < 12


def test_every_number_of_the_documents_comes_from_a_file() -> None:
    marked = []
    for page in render.DOCUMENTS:
        text = page.read_text(encoding="utf-8")
        assert render.filled(text, RESULTS) == text, "run: python -m reproduction theory --write-docs"
        marked += re.findall(r"<!-- reproduce ([a-z0-9]+) -->", text)
    assert sorted(marked) == sorted(["claims", "summary", *STUDIES])
    prose = re.sub(r"<!-- reproduce .*?<!-- end -->", "", render.DOCUMENTS[0].read_text(), flags=re.DOTALL)
    after = prose.partition("## Claim by claim")[2].replace("momentum 0.9", "")  # a setting
    assert not re.findall(r"\d\.\d", after), "a measured number stands outside of the generated tables"


@pytest.mark.parametrize("name", list(STUDIES))
def test_the_pages_beside_the_results_are_up_to_date(name: str) -> None:
    page = (RESULTS / f"{name}.md").read_text(encoding="utf-8")
    assert page.endswith(f"\n\n{render.section(name, RESULTS, '.')}\n"), (
        f"run: python -m reproduction {name} --write-docs"
    )


def test_the_summary_is_one_page() -> None:
    assert len(render.DOCUMENTS[1].read_text(encoding="utf-8").splitlines()) <= 60


def test_the_document_changes_with_the_files(tmp_path: Path) -> None:
    text = "<!-- reproduce case2 -->\nold\n<!-- end -->"
    assert "No cell is finished yet" in render.filled(text, tmp_path)
    assert all("not tested yet" in row[3] for row in claims_table(tmp_path).rows)
    choice = replace(QUICK, epochs=1.0)
    run_all(STUDIES["case2"].cells(choice), tmp_path, quiet=True, say=lambda _: None)
    assert "10.000" in render.filled(text, tmp_path)
    small = next(row for row in claims_table(tmp_path).rows if row[2].startswith("SYNC ×"))
    assert "SYNC ×10.00" in small[2]
