"""Colours by name. Figures name them as "@1" or "@text"; what draws a figure looks them up for its theme.

Guarantee: text has a contrast of 4.5 : 1 on its background and everything else that carries meaning 3 : 1 (WCAG AA),
in both themes; a test computes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LIGHT = {
    "page": "#ffffff", "panel": "#f5f7f9", "text": "#1b2129", "muted": "#545e6a", "line": "#d3d9e0", "link": "#0b57b0",
    "1": "#0b62c4", "2": "#b1520a", "3": "#177a3c", "4": "#7a3fd0", "5": "#c3203c", "6": "#0c7378", "7": "#b3257e",
    "8": "#5f6670",
    "training": "#177a3c", "slow": "#b87503", "no steps": "#8a919b", "dead": "#c3203c", "averaging": "#0b62c4",
    "cap": "#848d98",
}  # fmt: skip
DARK = {
    "page": "#12161b", "panel": "#1b2128", "text": "#e8ecf1", "muted": "#a9b3bf", "line": "#37414c", "link": "#7fb8ff",
    "1": "#68adff", "2": "#f2a154", "3": "#5dcb86", "4": "#bb9dff", "5": "#ff8b95", "6": "#4fcfd0", "7": "#ff93ce",
    "8": "#b3bcc6",
    "training": "#3fae6a", "slow": "#f0b03f", "no steps": "#77818d", "dead": "#ff6b7a", "averaging": "#68adff",
    "cap": "#6d7885",
}  # fmt: skip
THEMES = {"light": LIGHT, "dark": DARK}
SERIES = 8
DASHES = ("solid", "dash", "dot", "dashdot")


def series(index: int) -> tuple[str, str]:
    """Colour and dash of a run's lines: runs differ in both, so that colour alone carries nothing."""
    return f"@{index % SERIES + 1}", DASHES[index % len(DASHES)]


def painted(value: Any, theme: Mapping[str, str]) -> Any:
    """The same figure with real colours."""
    if isinstance(value, dict):
        return {key: painted(item, theme) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [painted(item, theme) for item in value]
    return theme[value[1:]] if isinstance(value, str) and value.startswith("@") else value
