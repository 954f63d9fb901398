"""A run as data: `run.py` holds `Config`, the other files its tables."""

from adp2sgd.config.consortium import Consortium
from adp2sgd.config.optimizer import Optimizer, Warmup
from adp2sgd.config.privacy import Privacy
from adp2sgd.config.run import (
    ALGORITHMS,
    Config,
    FromFile,
    difference,
    differing,
    from_dict,
    keys,
    load_config,
    loads_config,
    naming,
)
from adp2sgd.config.sections import PARTNERS, Data, Network, Speeds, Topology
from adp2sgd.config.site import SiteFile, at_site, load_run, load_site

__all__ = [
    "ALGORITHMS",
    "PARTNERS",
    "Config",
    "Consortium",
    "Data",
    "FromFile",
    "Network",
    "Optimizer",
    "Privacy",
    "SiteFile",
    "Speeds",
    "Topology",
    "Warmup",
    "at_site",
    "difference",
    "differing",
    "from_dict",
    "keys",
    "load_config",
    "load_run",
    "load_site",
    "loads_config",
    "naming",
]
