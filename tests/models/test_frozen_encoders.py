"""Pipelines on data that were encoded ahead of training: the same inputs and samples, and encoders that left."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from muralist.core.errors import UserError
from muralist.core.rng import SampleKeys
from muralist.data.loader import held_out_batches
from muralist.data.packed import LatentSource
from muralist.data.source import Source
from muralist.data.sources import open_source
from muralist.models.diffusers_model import DiffusersSpec
from muralist.models.spec import build_spec
from muralist.settings import PackSettings, SampleSettings, TrainSettings
from muralist.tools.encode import BATCH, encode
from tests.support.hunyuan import write_scenes

SIZE, COUNT = 64, 6  # a full batch of encoding, and an incomplete one
STEPS = SampleSettings(steps=2)
PROMPTS = ["A road", "Two cars in the rain on a wide street", "A road"]
# A U-Net; packed latents and a pooled text; a deterministic VAE and integer masks; texts of different lengths; lists;
# latents of one frame, and a Boolean mask.
CLASSES = [
    "flux",
    "sana",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("sdxl", "cogview4", "zimage", "ltx")),
]


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scenes(tmp_path_factory.mktemp("scenes") / "train", SIZE, COUNT)


def encoded(scenes: Path, place: Path, model: Path, **settings: Any) -> LatentSource:
    given = {"source": str(scenes), "destination": str(place), "encode": str(model), "img_size": SIZE} | settings
    encode(PackSettings(num_workers=1, **given), progress=False)
    return LatentSource(place, SIZE)


def spec_for(model: Path, latents: LatentSource | None, dtype: torch.dtype = torch.float32, **data: Any) -> Any:
    settings = TrainSettings(model={"path": str(model), "img_size": SIZE, "uncond_p": 0.4}, data=data)  # type: ignore[arg-type]
    spec = build_spec(settings, [], latents)
    spec.to_device(torch.device("cpu"), dtype)
    return spec


def inputs(spec: Any, source: Source) -> list[Any]:
    """Everything that the network is given but noise, for batches of the size of encoding."""
    numbers = np.arange(COUNT)
    batches = list(held_out_batches(source, numbers, numbers, BATCH))
    return tree_leaves([tuple(spec.encode(batch, SampleKeys(0, batch.sample_indices))) for batch in batches])


def calls_of(spec: DiffusersSpec) -> list[str]:
    """Names of the text encoders that run from now on, in order."""
    calls: list[str] = []
    for name, part in spec.pipe.components.items():
        if isinstance(part, nn.Module) and name.startswith("text_encoder"):
            part.register_forward_pre_hook(lambda *_, name=name: calls.append(name))  # type: ignore[misc]
    return calls


@pytest.mark.parametrize("name", CLASSES)
def test_encoded_data_give_the_same_bits(
    name: str, scenes: Path, tmp_path: Path, tiny_pipeline: Callable[[str], Path]
) -> None:
    model = tiny_pipeline(name)
    latents = encoded(scenes, tmp_path / "latents", model)
    pixels, ahead = spec_for(model, None), spec_for(model, latents)
    wanted = inputs(pixels, open_source(str(scenes), SIZE))
    calls = calls_of(ahead)
    found = inputs(ahead, latents)
    assert len(found) == len(wanted) and {value.dtype for value in found} == {value.dtype for value in wanted}
    # The last batch is padded here and is not there: a last bit may differ. The first is equal.
    half = len(wanted) // 2
    assert all(map(torch.equal, found[:half], wanted[:half]))
    for one, other in zip(found[half:], wanted[half:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert ahead.flops_per_image() == pixels.flops_per_image() and not calls

    ahead.prepare_prompts(PROMPTS, STEPS)
    assert calls and not list(ahead.pipe.vae.encoder.parameters())
    runs = {encoder: calls.count(encoder) for encoder in set(calls)}
    # Once per distinct prompt, and at most once for the negative prompt of each.
    assert set(runs.values()) <= {2, 3, 4}, runs
    network, calls[:] = ahead.network().eval(), []
    for _ in range(2):
        samples = ahead.sample(network, PROMPTS, [0, 1, 0], STEPS)
    assert not calls and torch.equal(samples, pixels.sample(network, PROMPTS, [0, 1, 0], STEPS))
    assert not torch.equal(samples[0], samples[1])
    torch.testing.assert_close(samples[0], samples[2])
    # A prompt that nobody announced still works.
    assert ahead.sample(network, ["Snow"], [0], STEPS).isfinite().all() and calls


def test_text_encoders_leave_the_device(
    scenes: Path, tmp_path: Path, tiny_pipeline: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_pipeline("flux")
    spec = spec_for(model, encoded(scenes, tmp_path / "latents", model))
    places: list[torch.device] = []
    move = spec.prompts.move_encoders
    monkeypatch.setattr(spec.prompts, "move_encoders", lambda *to: (places.append(to[0]), move(*to)))
    spec.to_device(torch.device("cpu", 0), torch.float32)  # with an index, as a GPU has one
    spec.prepare_prompts(PROMPTS, STEPS)
    assert places == [torch.device("cpu", 0), torch.device("cpu")] * 2
    assert spec.prompts.encoder_device == torch.device("cpu") and spec.device == torch.device("cpu", 0)


def test_half_precision_is_stored_at_half_size(
    scenes: Path, tmp_path: Path, tiny_pipeline: Callable[[str], Path]
) -> None:
    model = tiny_pipeline("zimage")
    half = encoded(scenes, tmp_path / "half", model, dtype="bf16", random_flip=False)
    assert {tensor.dtype for tensor in half.manifest.tensors.values()} == {"bfloat16"}
    assert half.manifest.tensors["latents"].shape[0] == 1 and half.manifest.tensors["cap_feats"].shape == [0, 32]
    pixels = inputs(spec_for(model, None, torch.bfloat16, random_flip=False), open_source(str(scenes), SIZE))
    ahead = inputs(spec_for(model, half, torch.bfloat16, random_flip=False), half)
    assert all(map(torch.equal, ahead[: len(ahead) // 2], pixels[: len(pixels) // 2]))


def test_latents_of_another_model_are_refused(
    scenes: Path, tmp_path: Path, tiny_pipeline: Callable[[str], Path]
) -> None:
    model = tiny_pipeline("sd")
    latents = encoded(scenes, tmp_path / "latents", model, random_flip=False)
    with pytest.raises(UserError, match="without mirror images"):
        spec_for(model, latents)
    with pytest.raises(UserError, match=r"by another model than .*differ in .*vae.*--encode"):
        spec_for(tiny_pipeline("lumina2"), latents, random_flip=False)
    shutil.copytree(latents.folder, tmp_path / "other")
    manifest = (tmp_path / "other" / "manifest.json").read_text()
    for old, new, sentence in (
        (
            '"family": "diffusers"',
            '"family": "hunyuandit"',
            "encoded for --model HunyuanDiT, and this run trains --model di",
        ),
        ("encoder_hidden_states", "context", "Another version of diffusers may have encoded it"),
    ):
        (tmp_path / "other" / "manifest.json").write_text(manifest.replace(old, new))
        with pytest.raises(UserError, match=sentence):
            spec_for(model, LatentSource(tmp_path / "other", SIZE), random_flip=False)
