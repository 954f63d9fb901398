"""The tasks that have names, and where a name leads."""

from adp2sgd.tasks.families import FAMILIES, IMAGE_MODELS
from adp2sgd.tasks.named import TASKS, named, resolve

__all__ = ["FAMILIES", "IMAGE_MODELS", "TASKS", "named", "resolve"]
