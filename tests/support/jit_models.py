"""Tiny JiT models with random weights, as runs that were never trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from muralist.models.jit_spec import JiTSpec
from muralist.settings import ModelSettings, TrainSettings

SIDE = 16


def checkpoint(folder: Path, description: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    """A run with one checkpoint, as far as readers of weights look at it."""
    step = folder / "checkpoints" / "step_0000001"
    step.mkdir(parents=True)
    (folder / "checkpoints" / "latest").write_text(step.name)
    (step / "manifest.json").write_text(json.dumps({"model": description}))
    save_file(weights, step / "ema1.safetensors")
    return folder


def family(*names: str) -> JiTSpec:
    model = ModelSettings(name="JiT-T/8", img_size=SIDE, enable_condition=bool(names))
    return JiTSpec.from_settings(TrainSettings(model=model), list(names))


def network_of(chosen: JiTSpec) -> torch.nn.Module:
    """With a head that is not zero, as it is before training."""
    network = chosen.network().eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    return network
