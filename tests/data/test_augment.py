"""Crops and mirrored images."""

from __future__ import annotations

import pytest
import torch

from adp2sgd.data.augment import crop_and_flip

pytestmark = pytest.mark.usefixtures("nothing_of_this_machine")


def outcomes(n: int, seed: int, padding: int = 4) -> list[tuple[int, int, bool]]:
    """(down, right, mirrored) of each image, read off one bright pixel pair far from the border."""
    size = 16
    inputs = torch.zeros(n, 1, size, size)
    inputs[:, 0, 7, 7], inputs[:, 0, 7, 8] = 1.0, 2.0
    moved = crop_and_flip(inputs, torch.Generator().manual_seed(seed), padding)
    one, two = (moved == 1).nonzero(), (moved == 2).nonzero()
    mirrored = (two[:, 3] < one[:, 3]).tolist()
    left = torch.minimum(one[:, 3], two[:, 3])
    return list(zip((7 - one[:, 2]).tolist(), (7 - left).tolist(), mirrored, strict=True))


def test_shifts_are_uniform_and_half_are_mirrored() -> None:
    n, kinds = 81 * 2 * 200, 81 * 2
    drawn = outcomes(n, seed=0)
    counts = {outcome: drawn.count(outcome) for outcome in set(drawn)}
    assert {abs(d) for d, _, _ in counts} == set(range(5))
    assert len(counts) == kinds
    # χ² with 161 degrees of freedom exceeds 240 with probability 5e-5: the false-alarm rate for a new seed.
    expected = n / kinds
    assert sum((c - expected) ** 2 / expected for c in counts.values()) < 240
    # The share of mirrored images is within 4 standard errors of ½: false-alarm rate 6e-5.
    share = sum(mirrored for _, _, mirrored in drawn) / n
    assert abs(share - 0.5) < 4 * 0.5 / n**0.5


@pytest.mark.parametrize(("shape", "padding"), [((64, 3, 32, 32), 4), ((40, 1, 7, 5), 2), ((3, 2, 4, 4), 0)])
def test_crop_and_flip_equals_a_loop_over_images(shape: tuple[int, ...], padding: int) -> None:
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    result = crop_and_flip(inputs, torch.Generator().manual_seed(2), padding)
    height, width = shape[2:]
    padded = torch.zeros(shape[0], shape[1], height + 2 * padding, width + 2 * padding)
    padded[:, :, padding : padding + height, padding : padding + width] = inputs
    for image, got in zip(padded, result, strict=True):
        crops = [
            image[:, top : top + height, left : left + width]
            for top in range(2 * padding + 1)
            for left in range(2 * padding + 1)
        ]
        assert any(torch.equal(got, crop) or torch.equal(got, crop.flip(2)) for crop in crops)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_augmentation_on_the_gpu_equals_the_cpu() -> None:
    inputs = torch.randn((64, 3, 32, 32), generator=torch.Generator().manual_seed(1))
    expected = crop_and_flip(inputs, torch.Generator().manual_seed(2))
    assert torch.equal(crop_and_flip(inputs.cuda(), torch.Generator().manual_seed(2)).cpu(), expected)
    moved = crop_and_flip(inputs.cuda(), torch.Generator("cuda").manual_seed(2))
    assert moved.is_cuda
    assert moved.shape == inputs.shape


def test_augmentation_follows_its_generator_alone() -> None:
    inputs = torch.arange(8 * 3 * 16 * 16).view(8, 3, 16, 16).to(torch.uint8)
    before = torch.get_rng_state()
    one, same, other = (crop_and_flip(inputs, torch.Generator().manual_seed(seed)) for seed in (5, 5, 6))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert one.dtype == torch.uint8  # raw images too; the border is then black
    assert torch.equal(torch.get_rng_state(), before)
    assert crop_and_flip(inputs[:0], torch.Generator()).shape == (0, 3, 16, 16)  # Poisson batches may be empty
