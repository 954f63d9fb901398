"""What the site has beyond the pages in this folder: reference pages made from the code, and links out of the folder.

mkdocs calls `on_files` and `on_page_markdown`. A line `<!-- fields: package.module:Class -->` in a page becomes the
table of that dataclass's fields, with their types, defaults and comments.
"""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
SECTIONS = ("Config", "Topology", "Data", "Optimizer", "Warmup", "Privacy", "Speeds", "Network")
OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)(?:#[^)]*)?\)")
FIELDS = re.compile(r"^<!-- fields: ([\w.]+):(\w+) -->$", re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    made = {"command-line": _command_line, "python": _python, "settings": _settings, "changes": _changes}
    for name, make in made.items():
        files.append(File.generated(config, f"reference/{name}.md", content=make()))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Tables of fields; and links to files outside this folder become their paths in the repository."""
    markdown = FIELDS.sub(lambda found: _table(getattr(import_module(found[1]), found[2])), markdown)
    return markdown if "/" in page.file.src_uri else OUTSIDE.sub(_path, markdown)


def _path(found: re.Match[str]) -> str:
    text, path = found[1], found[2]
    assert (ROOT / path).exists(), f"docs link to {path}, which does not exist"
    return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}` in the repository)"


def _table(kind: type) -> str:
    rows = [f"| `{name}` | `{type_}` | {default} | {comment} |" for name, type_, default, comment in fields_of(kind)]
    return "\n".join(["| field | type | default | meaning |", "|---|---|---|---|", *rows])


def fields_of(kind: type) -> list[tuple[str, str, str, str]]:
    """Name, type, default and comment of each field, as the source states them."""
    lines, _ = inspect.getsourcelines(kind)
    source = inspect.cleandoc("".join(lines)) if lines[0].startswith(" ") else "".join(lines)
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    rows = source.splitlines()
    found = []
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            type_ = ast.unparse(node.annotation)
            if "ClassVar" not in type_:
                default = "" if node.value is None else f"`{_default(node.value)}`"
                end = rows[(node.end_lineno or 1) - 1]
                comment = end.rpartition("  # ")[2] if "  # " in end else ""
                found.append((node.target.id, type_, default, _cell(comment)))
    return found


def _default(value: ast.expr) -> str:
    text = ast.unparse(value)
    made = re.fullmatch(r"field\(default_factory=(\w+|lambda: .*)\)", text)
    return {"dict": "{}", "list": "[]"}.get(made[1], f"{made[1]}()") if made else text


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _settings() -> str:
    config = import_module("adp2sgd.config")
    parts = [
        "# Settings",
        "Every field of a configuration, from the dataclasses that read it. A field of a table is set as "
        "`table.field` with `--set`, or under `[table]` in the file. [Configuration](../configuration.md) explains "
        "how they work together.",
    ]
    for name in SECTIONS:
        kind = getattr(config, name)
        where = getattr(kind, "WHERE", "").rstrip(".")
        title = f"`[{where}]`" if where else "The file's top level" if name == "Config" else f"`{name}`"
        parts += [f"## {title}", inspect.getdoc(kind) or "", _table(kind)]
    return "\n\n".join(parts)


def _python() -> str:
    package = import_module("adp2sgd")
    parts = ["# Python", "The public names of `adp2sgd`. Everything else may change without notice."]
    for name in package.__all__:
        found = getattr(package, name)
        parts.append(f"::: {getattr(found, '__module__', package.__name__)}.{name}")
    return "\n\n".join(parts)


def _command_line() -> str:
    import typer

    from adp2sgd.cli.main import app

    parts = ["# Command line"]
    _commands(typer.main.get_command(app), "adp2sgd", None, parts)
    return "\n\n".join(parts)


def _commands(command: Any, name: str, parent: Any, parts: list[str]) -> None:
    """The help of a command and of those below it."""
    context = command.make_context(name, [], parent=parent, resilient_parsing=True)
    context.terminal_width = 80
    parts += [f"## {context.command_path}", f"```\n{command.get_help(context)}\n```"]
    for each in getattr(command, "commands", {}).values():
        _commands(each, each.name, context, parts)


def _changes() -> str:
    return (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("(docs/", "(../")
