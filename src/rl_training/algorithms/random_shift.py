"""Random shifts of images (DrQ: Yarats et al. 2021, arXiv:2004.13649)."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_training.algorithms.update_noise import uniform_of


def random_shift(images: Tensor, normal: Tensor, pixels: int) -> Tensor:
    """Return each image (rows, channels, height, width) moved by up to ``pixels`` each way.

    Equals padding with copies of the border and cutting out a random window of the old size. All
    channels of a row, the frames of a stack, move together. ``normal`` has two standard normal
    numbers per row, which select the window's top and left edge.
    """
    edges = (uniform_of(normal) * (2 * pixels + 1)).long().clamp(max=2 * pixels) - pixels
    height, width = images.shape[-2:]
    rows, columns = (
        (edges[:, axis, None] + torch.arange(size, device=images.device)).clamp(0, size - 1)
        for axis, size in enumerate((height, width))
    )
    batch, channels = (torch.arange(n, device=images.device) for n in images.shape[:2])
    return images[
        batch[:, None, None, None],
        channels[None, :, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    ]
