"""Augmentation of whole batches, on the device where they are."""

from __future__ import annotations

import torch
from torch import Generator, Tensor


def crop_and_flip(inputs: Tensor, generator: Generator, padding: int = 4) -> Tensor:
    """Shift each image by −padding … padding pixels in both directions, mirror half of them; [n, channels, h, w].

    Each of the 2·(2·padding + 1)² outcomes has the same probability, independently per image. What comes in from
    outside is zero in the inputs' own scale: the mean colour when they are normalized already, as in training.
    The generator may live on the CPU or on the inputs' device; the latter spares a transfer per batch.
    """
    n, channels, height, width = inputs.shape
    device, span = inputs.device, 2 * padding + 1
    draw = torch.randint(2 * span * span, (n, 1), generator=generator, device=generator.device)
    draw = draw.to(device, non_blocking=True)
    mirrored, down, right = draw % 2, draw // 2 % span, draw // 2 // span
    columns = torch.arange(width, device=device)
    columns = torch.where(mirrored.bool(), width - 1 - columns, columns) + right  # [n, width]
    rows = torch.arange(height, device=device) + down  # [n, height]
    # One gather per image plane: the same places in every channel, so the index is shared by broadcasting.
    padded = torch.nn.functional.pad(inputs, (padding,) * 4).flatten(2)
    places = (rows[:, :, None] * (width + 2 * padding) + columns[:, None, :]).flatten(1)
    return padded.gather(2, places[:, None].expand(n, channels, -1)).view(n, channels, height, width)
