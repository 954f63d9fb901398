"""Refuses settings of private mode that cannot give a guarantee, before a run starts."""

from __future__ import annotations

import math

from adp2sgd.errors import PrivacyError
from adp2sgd.privacy.mechanism import POISSON, RECORD

LEAST_CLIP_NORM = 1e-6  # squares of norms far below it would vanish in float32; adaptive clipping goes down by 1e6


def check_budget(
    *,
    records: int,
    delta: float | None,
    clip_norm: float,
    sample_rate: float,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    sampler: str = POISSON,
    fitted: str | None = None,
    unit: str = RECORD,
) -> list[str]:
    """Refuse settings that cannot give a learner with `records` records, or units, a guarantee; returns warnings.

    `noise_multiplier` is None where it is still to be calibrated for `epsilon`; `fitted` is the task's.
    """
    if fitted is not None:
        raise PrivacyError(f"{fitted} is fitted on private records, which noise does not cover; use public constants")
    if sampler != POISSON:
        raise PrivacyError(f'sampler = "{sampler}" has no private guarantee here; use "{POISSON}" batches')
    if not 0 < sample_rate <= 1:
        raise PrivacyError(
            f"sample_rate = {sample_rate:.4g} (batch_size over {records} records) is not in (0, 1]; "
            f"use a batch_size from 1 to {records}"
        )
    if not LEAST_CLIP_NORM <= clip_norm < math.inf:
        raise PrivacyError(
            f"clip_norm = {clip_norm:g} cannot bound a record's gradient; use {LEAST_CLIP_NORM:g} or more, such as 1.0"
        )
    if epsilon is None and noise_multiplier is None:
        raise PrivacyError("neither epsilon nor noise_multiplier is set; set privacy.epsilon, for example to 3.0")
    if epsilon is not None and not 0 < epsilon < math.inf:
        raise PrivacyError(f"epsilon = {epsilon} is no budget; use a positive, finite one such as 3.0")
    if noise_multiplier is not None and not 0 < noise_multiplier < math.inf:
        raise PrivacyError(
            f"noise_multiplier = {noise_multiplier} meets no budget; use a positive one such as 1.0, or leave it out"
        )
    return _check_delta(delta, records, "records" if unit == RECORD else f"units ({unit})")


def _check_delta(delta: float | None, records: int, noun: str) -> list[str]:
    limit = 1 / max(records, 1)
    if delta is None:
        raise PrivacyError(f"delta is missing; set privacy.delta well below 1/{records} {noun} = {limit:.1g}")
    if not 0 < delta < limit:
        raise PrivacyError(
            f"delta = {delta:g} must be above 0 and below 1/{records} {noun} = {limit:.2g}, else publishing a whole "
            f"{'record' if noun == 'records' else 'unit'} could meet it; use {limit / 10:.0e} or less"
        )
    if delta >= 0.1 * limit:
        return [
            f"delta = {delta:g} is close to 1/{records} {noun} = {limit:.2g}; {limit / 10:.0e} or less is customary"
        ]
    return []
