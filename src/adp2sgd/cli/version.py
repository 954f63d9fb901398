"""What runs here: the versions that a bug report needs."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version


def versions() -> str:
    """The versions of adp2sgd, Python, torch and CUDA, one per line."""
    import torch

    cuda = torch.version.cuda or "none in this build of torch"
    if torch.version.cuda and torch.cuda.is_available():
        cuda += f", {torch.cuda.device_count()} × {torch.cuda.get_device_name()}"
    elif torch.version.cuda:
        cuda += ", no usable GPU"
    try:
        own = version("adp2sgd")
    except PackageNotFoundError:
        own = "(not installed)"
    lines = [f"adp2sgd {own}", f"Python {platform.python_version()} ({platform.platform()})"]
    return "\n".join([*lines, f"torch {torch.__version__}", f"CUDA {cuda}"])
