"""Distilled models: what the user is told before training, and how they are called so that they keep working."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from muralist.cli import main
from muralist.core.errors import UserError
from muralist.core.rng import SampleKeys
from muralist.models.native_settings import ModelFiles, distillation_warning
from muralist.models.spec import build_spec
from muralist.settings import TrainSettings
from tests.support.hunyuan import scenes

SHIFTED = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}
SPACED = {"_class_name": "EulerAncestralDiscreteScheduler", "timestep_spacing": "trailing"}
DISTILLED = [
    ("ZImagePipeline", {"scheduler": SHIFTED}, "", "Z-Image-Turbo was distilled to 8 steps", "train Z-Image and"),
    ("FluxPipeline", {"transformer": {"guidance_embeds": False}}, "", "FLUX.1-schnell .* 4 steps", "train FLUX.1-dev and"),
    ("Flux2KleinPipeline", {"": {"is_distilled": True}}, "", "FLUX.2-klein .* 4 steps", "train FLUX.2-klein-base and"),
    ("Krea2Pipeline", {"": {"is_distilled": True}}, "", "Krea 2 distilled .* 8 steps", "train the base Krea 2 and"),
    ("StableDiffusionXLPipeline", {"scheduler": SPACED}, "", "SDXL-Turbo .* 4 steps", "train SDXL 1.0 and"),
    ("StableDiffusionXLPipeline", {}, "sdxl-lightning", "SDXL-Lightning .* 4 steps", "train SDXL 1.0 and"),
    ("HiDreamImagePipeline", {}, "hidream-i1-fast", "HiDream-I1-Fast .* 16 steps", "train HiDream-I1-Full and"),
    ("LatentConsistencyModelPipeline", {"scheduler": {"_class_name": "LCMScheduler"}}, "",
     "this latent consistency model was distilled to 4 steps", "train the model it comes from and"),
    ("FluxPipeline", {"transformer": {"guidance_embeds": True}}, "", "embedded guidance of 1", "keeps all captions"),
]  # fmt: skip


@pytest.mark.parametrize(("pipeline", "configs", "names", "what", "advice"), DISTILLED)
def test_distilled_models_are_trained_with_a_warning(
    pipeline: str, configs: dict[str, Any], names: str, what: str, advice: str
) -> None:
    said = distillation_warning(ModelFiles(pipeline, {"": {}} | configs, names))
    assert re.search(what, said) and advice in said and "\n" not in said
    assert (
        distillation_warning(ModelFiles("StableDiffusion3Pipeline", {"": {}, "transformer": {"num_layers": 38}})) == ""
    )


def test_training_of_distilled_models(
    tiny_pipeline: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The warning is a line of the run summary; Flux is called with guidance 1, a scheduler of sCM is refused."""
    words = ["--img_size", "64", "--data_path", "driving_world", "--results_dir", str(tmp_path), "--dry_run"]
    assert main(["train", "--model.path", str(tiny_pipeline("schnell")), *words]) == 0
    assert "\nwarning    FLUX.1-schnell was distilled to 4 steps" in capsys.readouterr().out
    settings = TrainSettings.model_validate({"model": {"path": str(tiny_pipeline("sana_sprint")), "img_size": 64}})
    with pytest.raises(UserError, match="A model with the scheduler SCMScheduler cannot be trained yet."):
        build_spec(settings, [])
    settings = TrainSettings.model_validate(
        {"model": {"path": str(tiny_pipeline("flux")), "img_size": 64, "uncond_p": 0.9}}
    )
    spec = build_spec(settings, [])
    spec.to_device(torch.device("cpu"), torch.float32)
    network, calls = spec.network(), []
    network.register_forward_pre_hook(lambda _, __, named: calls.append(named), with_kwargs=True)
    batch = scenes(64, 3)
    keys = SampleKeys(0, batch.sample_indices)
    encoded = spec.encode(batch, keys)
    spec.loss(network, encoded, keys)
    assert torch.equal(calls[0]["guidance"], torch.ones(3))
    kept = calls[0]["encoder_hidden_states"]
    assert not any(torch.equal(kept[0], kept[row]) for row in (1, 2)), "no caption was dropped to the empty one"
