"""Loads a vision encoder alone and compares its embeddings."""

from __future__ import annotations

import json
from dataclasses import replace

import torch

from quire.worker.layers.linear import Linear
from quire.worker.transformer.vision.tower import VisionTower
from quire.worker.weights.checkpoint import Checkpoint, Placement


def load_tower(tower_cls: type[VisionTower], folder: str, place: str = "") -> VisionTower:
    """Load a tower; `place` is the prefix of its names in the files."""
    with open(f"{folder}/config.json", encoding="utf-8") as file:
        tower = tower_cls(json.load(file)).eval()
    with Checkpoint(folder) as checkpoint:
        for parameter in tower.parameters():
            parameter.parts = [replace(part, name=place + part.name) for part in parameter.parts]
            assert checkpoint.holds(parameter.parts), parameter.parts
            for part in parameter.parts:
                checkpoint.fill(Placement(part, parameter), False)
        used = {part.name for parameter in tower.parameters() for part in parameter.parts}
        own = {name for name in checkpoint.position if name.removeprefix(place).startswith(tower.prefixes)}
        assert used <= own and not {name for name in own - used if "layers.0" in name}
    for module in tower.modules():
        if isinstance(module, Linear):
            module.finalize()
    return tower


def close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for image, reference in zip(found, expected):
        torch.testing.assert_close(image, reference, rtol=1e-4, atol=1e-4)
