"""What sites that join over a network agree on, beside the run itself. The table `[consortium]` of run.toml."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import ClassVar

from adp2sgd.errors import ConfigError
from adp2sgd.settings import Section, one_of, require

WIRES = ("float32", "bfloat16")
SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Consortium(Section):
    """Nothing here is secret, and nothing here tells about one site's records."""

    WHERE: ClassVar[str] = "consortium."

    total_samples: int | None = None  # training records of all sites together, rounded; `join` needs it
    init_seed: int | None = None  # makes the initial weights and the graph, and nothing else
    weights: str | None = None  # or a safetensors file with the initial weights, beside run.toml
    weights_sha256: str | None = None  # of that file
    epsilon: float | None = None  # the largest ε that members accept of one another
    wire: str = "float32"  # how weights travel; bfloat16 halves the bytes
    tolerance: float = 0.001  # at the end, sites average until neighbours differ by less, relative to the model's norm

    def _check(self) -> None:
        one_of("consortium.wire", self.wire, WIRES)
        require(self.total_samples is None or self.total_samples >= 1, "consortium.total_samples", self.total_samples,
                "use the number of training records of all sites together, rounded")  # fmt: skip
        seed = self.init_seed
        require(seed is None or 0 <= seed < 2**63, "consortium.init_seed", seed, "use 0 or more, below 2^63")
        require(0 < self.tolerance < math.inf, "consortium.tolerance", self.tolerance, "use a positive number")
        require(self.epsilon is None or self.epsilon > 0, "consortium.epsilon", self.epsilon, "use a positive number")
        if (self.weights is None) != (self.weights_sha256 is None):
            raise ConfigError("consortium.weights and consortium.weights_sha256 go together; set both or neither")
        if self.weights_sha256 is not None:
            fix = "use the 64 hex digits that sha256sum prints"
            require(bool(SHA256.fullmatch(self.weights_sha256)), "consortium.weights_sha256", self.weights_sha256, fix)
