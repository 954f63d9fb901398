"""Tables as Markdown, curves as pictures, and the documents filled with both."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from adp2sgd.errors import ConfigError
from reproduction import paper
from reproduction.cells import Record, finished
from reproduction.claims import claims_table
from reproduction.studies import STUDIES, Study
from reproduction.tables import Table, failed, summary_table

FEW = 20  # evaluations: each is then marked
BEGIN, END = "<!-- reproduce {} -->", "<!-- end -->"
HOME = Path(__file__).parent
RESULTS = HOME / "results"
DOCUMENTS = (HOME / "README.md", HOME.parent / "docs" / "reproduction.md")


def markdown(table: Table) -> str:
    """A table under its title."""
    lines = [f"**{table.title}**", "", _row(table.columns), _row(["---"] * len(table.columns))]
    return "\n".join(lines + [_row(row) for row in table.rows])


def _row(texts: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


def section(name: str, out: Path, where: str) -> str:
    """All tables of a study, full form first, with the files that they were read off, and pictures (below `where`)."""
    parts, records = [], finished(out, name)
    for form, words in (("", ""), ("quick", "### Small form (`--quick`: handwritten digits, 4 learners)")):
        chosen = [record for record in records if record["cell"].get("form", "") == form]
        if chosen:
            files = ", ".join(f"`{record['name']}.json`" for record in chosen)
            parts += [words] if words else []
            parts += [markdown(table) for table in STUDIES[name].tables(chosen)]
            parts.append(
                f"<details><summary>{len(chosen)} files in <code>{name}/</code></summary>\n\n{files}\n\n</details>"
            )
    parts += [f"![{picture.stem}]({where}/{name}/{picture.name})" for picture in sorted((out / name).glob("*.png"))]
    return "\n\n".join(parts) or f"No cell is finished yet: `python -m reproduction {name}`."


def write_page(name: str, out: Path) -> Path:
    """OUT/STUDY.md: everything that is finished, with its pictures."""
    figures(STUDIES[name], finished(out, name), out / name)
    page = out / f"{name}.md"
    page.write_text(f"# {STUDIES[name].title}\n\n{section(name, out, '.')}\n", encoding="utf-8")
    return page


def filled(text: str, out: Path) -> str:
    """The document with what stands between its markers made anew from the files under `out`."""

    def fill(found: re.Match[str]) -> str:
        name = found[1]
        if name == "claims":
            content = markdown(claims_table(out))
        elif name == "summary":
            content = markdown(summary_table(finished(out, "table1")))
        elif name in STUDIES:
            content = section(name, out, RESULTS.name)
        else:
            raise ConfigError(f"the document asks for {name!r}; use claims, summary or one of: {', '.join(STUDIES)}")
        return f"{BEGIN.format(name)}\n{content}\n{END}"

    return re.sub(r"<!-- reproduce ([a-z0-9]+) -->\n.*?<!-- end -->", fill, text, flags=re.DOTALL)


def figures(study: Study, records: Sequence[Record], folder: Path) -> list[Path]:
    """One picture per form, model, engine, mode, momentum and epochs: quality against epochs or time."""
    groups: dict[tuple[str, ...], list[Record]] = {}
    for record in records if study.x else ():
        cell = record["cell"]
        mode = "" if "sigma" in cell else "private"
        momentum = f"momentum{cell['momentum']:g}" if cell.get("momentum") else ""
        key = (cell["form"], cell["model"], cell["engine"], mode, momentum, f"epochs{cell['epochs']:g}")
        groups.setdefault(key, []).append(record)
    return [
        _figure(study, group, folder / f"{'-'.join(filter(None, key))}.png")
        for key, group in groups.items()
        if any(record["curve"]["epoch"] for record in group)
    ]


def _figure(study: Study, records: Sequence[Record], path: Path) -> Path:
    """A colour for each noise (and, in the cases, variant); SYNC is dashed."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.add_subplot()
    by_loss, colours = paper.family(records[0]["cell"]["model"]) == "speech", dict[str, str]()
    seen: list[float] = []  # of runs that ended well: one that diverges leaves the picture
    for record in records:
        cell, curve = record["cell"], record["curve"]
        if cell["seed"] != records[0]["cell"]["seed"]:
            continue  # further seeds are in the tables
        values = curve["loss"] if by_loss else [100 * value for value in curve["accuracy"]]
        kind, noise = paper.noise_of(cell)
        what = " ".join(filter(None, (f"{paper.LETTERS[kind]} = {noise:g}", cell["variant"])))
        colour = colours.setdefault(what, f"C{len(colours)}")
        label = f"{paper.NAMES[cell['algorithm']]}, {what}{' (diverged)' if record.get('diverged') else ''}"
        style = "-" if cell["algorithm"] == "adpsgd" else "--"
        marker = "." if len(values) < FEW else ""
        seen += [] if failed(record) else values
        axes.plot(curve[study.x], values, style, label=label, color=colour, marker=marker, linewidth=1.3)
    if by_loss and seen:
        room = 0.05 * (max(seen) - min(seen)) or 1.0
        axes.set_ylim(min(seen) - room, max(seen) + room)
    axes.set_xlabel({"epoch": "epochs", "seconds": f"seconds ({_clock(records)})"}[study.x or "epoch"])
    if study.x == "seconds":
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("held-out loss" if by_loss else "accuracy of θ in %")
    axes.set_title(f"{study.title}, {_setting(records[0]['cell'])}", fontsize="medium")
    axes.legend(fontsize="small", ncols=2)
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80, metadata={"Software": None})
    return path


def _setting(cell: Record) -> str:
    momentum, private = cell.get("momentum"), "" if "sigma" in cell else "private mode"
    optimizer = f"momentum {momentum:g}" if momentum else "" if private else "plain SGD"
    form = "small form (digits)" if cell["form"] == "quick" else ""
    engine = "real processes" if cell["engine"] else ""
    parts = (cell["model"], optimizer, private, engine, form)
    return ", ".join(filter(None, parts))


def _clock(records: Sequence[Record]) -> str:
    return "real" if any("real_seconds" in record for record in records) else "virtual"
