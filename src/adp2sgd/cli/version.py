"""What runs here: the versions that a bug report needs. PyTorch, which takes seconds to load, is not imported."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from typing import Any


def versions() -> str:
    """The versions of adp2sgd, Python, torch and CUDA, one per line."""
    torch = _torch()
    lines = [f"adp2sgd {_version('adp2sgd')}", f"Python {platform.python_version()} ({platform.platform()})"]
    lines += [f"torch {torch.get('__version__') or _version('torch')}"]
    return "\n".join([*lines, f"CUDA {torch.get('cuda') or 'none (this build of torch has no CUDA)'}"])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


def _torch() -> dict[str, Any]:
    """What torch/version.py says: its version, and the CUDA that it was built for."""
    found = find_spec("torch")
    folders = [] if found is None else list(found.submodule_search_locations or [])
    path = next((Path(folder) / "version.py" for folder in folders), None)
    return run_path(str(path)) if path is not None and path.is_file() else {}
