"""ResNet-18 for small images, and the digits it is trained on: 1,797 handwritten ones of 8x8 pixels, from scikit-learn.

The network has a 3x3 stem without pooling, because the images are small; torchvision is not needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from ckptstore.tools.demo.digits import read_digits

NUM_CLASSES = 10
STAGES = ((1, 1), (2, 2), (4, 2), (8, 2))
"""(channels as a multiple of the width, stride of the first block); every stage has two blocks."""


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a way around them."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, images: Tensor) -> Tensor:
        hidden = functional.relu(self.norm1(self.conv1(images)))
        return functional.relu(self.norm2(self.conv2(hidden)) + self.shortcut(images))


class ResNet18(nn.Module):
    """17 convolutions and a linear layer. Images come as (batch, 1, 8, 8), logits go as (batch, 10)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        blocks: list[nn.Module] = []
        channels = width
        for multiple, stride in STAGES:
            blocks += [
                BasicBlock(channels, width * multiple, stride),
                BasicBlock(width * multiple, width * multiple, 1),
            ]
            channels = width * multiple
        self.blocks = nn.ModuleList(blocks)
        self.classify = nn.Linear(channels, NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.stem(images)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.classify(hidden.mean(dim=(2, 3)))
        return logits


@dataclass(frozen=True, slots=True)
class Digits:
    """Images of shape (n, 1, 8, 8) from -1 to 1, and the digit in each."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


def load_digits(path: Path | None = None) -> tuple[Digits, Digits]:
    """Return the digits to train on, and every fifth one to evaluate with; `path` as for `read_digits`."""
    digits = read_digits(path)
    images = torch.from_numpy(digits["images"]).float().unsqueeze(1) / 8 - 1
    labels = torch.from_numpy(digits["labels"]).long()
    held_out = torch.arange(len(labels)) % 5 == 0
    return Digits(images[~held_out], labels[~held_out]), Digits(images[held_out], labels[held_out])
