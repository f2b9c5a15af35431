"""Small weights, their changes, and the bytes of a directory of Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from random import Random

import torch
from safetensors import safe_open

Weights = dict[str, torch.Tensor]


def some_weights(seed: int = 0, *, size: int = 300) -> Weights:
    """Tensors of several dtypes, one without elements, one with NaNs and signed zeros, names of experts."""
    torch.manual_seed(seed)
    return {
        "model.embed_tokens.weight": torch.randn(size, 9).bfloat16(),
        "model.layers.0.mlp.experts.0.up_proj.weight": torch.randn(size, 7),
        "model.layers.0.mlp.experts.11.up_proj.weight": torch.randn(size, 7).half(),
        "model.norm.weight": torch.randn(size),
        "odd": torch.tensor([float("nan"), -0.0, 0.0, float("-inf")]),
        "nothing": torch.ones(0, 3),
        "count": torch.tensor(3),
        "flags": torch.tensor([True, False]),
    }


def changed(weights: Weights, random: Random, *, num: int = 2) -> Weights:
    """The same with a few bytes changed in a few tensors."""
    found = {name: tensor.clone() for name, tensor in weights.items()}
    for name in random.sample(sorted(name for name in found if found[name].numel() > 1), num):
        raw = found[name].view(-1).view(torch.uint8)
        if name != "flags":
            raw[random.randrange(len(raw))] ^= 1 + random.randrange(255)
    return found


def bytes_of(weights: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Everything that must be equal bit by bit."""
    return {
        name: (
            str(tensor.dtype),
            tuple(tensor.shape),
            tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
        for name, tensor in weights.items()
    }


def read_model(directory: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """The tensors of a directory, as Hugging Face libraries find them."""
    files = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    found: Weights = {}
    for name, file in files.items():
        with safe_open(directory / file, "pt") as opened:
            found[name] = opened.get_tensor(name)
    return bytes_of(found)
