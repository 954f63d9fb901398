"""The paper's figures, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NAMES = {"sync": "SYNC", "adpsgd": "async"}
ALGORITHMS = tuple(NAMES)
NOISE = {"cifar10": (0.0, 1.0, 2.0, 4.0), "speech": (0.0, 0.08, 0.16, 0.32)}  # none, small, medium, large
EPOCHS = {"cifar10": 300.0, "speech": 20.0}
SAMPLES = {"cifar10": 50_000, "speech": 4_200_000}
MOMENTUM = 0.9  # of paper mode; the paper states none (README.md, "Table 1")
LEARNERS, BATCH = 16, {"cifar10": 256, "speech": 128}
SETTING = {"learners": 16, "smallest_shard": 3125, "steps": 58_594, "batch_size": 256}  # CIFAR-10; n₁ and T follow


@dataclass(frozen=True)
class Model:
    """One row of the size table and of Table 1. `results`: (SYNC, asynchronous) per noise level; CNNs accuracy in %."""

    parameters: int
    mib: float
    hours: float  # all epochs on one V100
    results: tuple[tuple[float, float], ...]

    def result(self, noise: float, algorithm: str, family: str = "cifar10") -> float | None:
        """What Table 1 says, or nothing where it has no such column."""
        if noise not in NOISE[family]:
            return None
        return self.results[NOISE[family].index(noise)][ALGORITHMS.index(algorithm)]


MODELS = {
    "shufflenet": Model(
        1_263_854, 4.82, 4.16, ((92.74, 92.67), (91.23, 90.78), (89.39, 88.71), (85.08, 82.67))
    ),
    "mobilenet_v2": Model(
        2_296_922, 8.76, 4.63, ((94.29, 94.14), (92.61, 92.13), (90.93, 90.45), (86.52, 84.83))
    ),
    "efficientnet_b0": Model(
        2_912_089, 11.11, 5.53, ((90.41, 91.21), (90.26, 89.90), (88.13, 87.01), (82.99, 82.47))
    ),
    "mobilenet": Model(
        3_217_226, 12.27, 3.55, ((91.87, 92.80), (90.58, 90.59), (88.92, 88.13), (84.16, 83.11))
    ),
    "googlenet": Model(
        6_166_250, 23.53, 8.43, ((94.04, 94.65), (91.94, 92.26), (90.28, 90.05), (86.34, 85.51))
    ),
    "resnext29": Model(
        9_128_778, 34.82, 7.08, ((92.82, 94.17), (91.63, 91.52), (89.30, 88.61), (84.35, 82.20))
    ),
    "resnet18": Model(
        11_173_962, 42.63, 5.56, ((94.01, 94.97), (91.67, 91.64), (89.08, 88.43), (83.40, 81.01))
    ),
    "senet18": Model(
        11_260_354, 42.95, 5.80, ((94.19, 94.68), (91.99, 91.92), (89.99, 88.99), (10.00, 82.90))
    ),
    "vgg19": Model(
        20_040_522, 76.45, 7.42, ((92.95, 92.73), (91.21, 91.03), (88.27, 87.89), (82.80, 81.78))
    ),
    "lstm": Model(
        43_154_944, 164.62, 102.41, ((1.566, 1.585), (1.617, 1.627), (1.752, 1.732), (1.990, 2.010))
    ),
}  # fmt: skip
CNNS = tuple(name for name in MODELS if name != "lstm")
RECIPE = "wrn16_4"  # the model of the private recipe
BESIDE = ("cnn", "wrn16_4", "lstm_small")  # not in the paper: small ones for a CPU, and one that suits privacy

LETTERS = {"sigma": "σ", "z": "z", "epsilon": "ε"}  # a cell's noise: the paper's, a multiplier, or what a budget needs


def noise_of(cell: Mapping[str, Any]) -> tuple[str, float]:
    """What a training cell's noise is given as, and its value."""
    key = next(key for key in LETTERS if key in cell)
    return key, cell[key]


def family(model: str) -> str:
    """The data set for a model: "speech", measured by its held-out loss, or "cifar10"."""
    return "speech" if model.startswith("lstm") else "cifar10"
