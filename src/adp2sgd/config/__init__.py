"""A run as data: `run.py` holds `Config`, the other files its tables."""

from adp2sgd.config.optimizer import Optimizer, Warmup
from adp2sgd.config.privacy import Privacy
from adp2sgd.config.run import (
    ALGORITHMS,
    Config,
    FromFile,
    difference,
    from_dict,
    load_config,
    loads_config,
    naming,
)
from adp2sgd.config.sections import PARTNERS, Data, Network, Speeds, Topology

__all__ = [
    "ALGORITHMS",
    "PARTNERS",
    "Config",
    "Data",
    "FromFile",
    "Network",
    "Optimizer",
    "Privacy",
    "Speeds",
    "Topology",
    "Warmup",
    "difference",
    "from_dict",
    "load_config",
    "loads_config",
    "naming",
]
