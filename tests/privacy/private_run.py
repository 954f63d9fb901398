"""The private run that several test files vary."""

from __future__ import annotations

from adp2sgd.config import Config, Optimizer, Privacy

PRIVATE = Config(
    task="blobs",
    learners=4,
    epochs=4,
    batch_size=20,
    seed=0,
    device="cpu",
    checkpoint_every=0.5,
    options={"records": 1000, "features": 8},
    optimizer=Optimizer(lr=0.5, momentum=0.5, weight_decay=1e-3),
    privacy=Privacy(mode="private", noise_multiplier=2.0, delta=1e-4),
)
