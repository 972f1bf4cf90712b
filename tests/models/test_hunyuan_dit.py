"""HunyuanDiT's spec: agrees with diffusers, seeded per sample, equal under gradient checkpointing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, HunyuanDiTPipeline
from diffusers.models.embeddings import get_2d_rotary_pos_embed
from diffusers.pipelines.hunyuandit.pipeline_hunyuandit import get_resize_crop_region_for_grid

from muralist.core import rng
from muralist.core.errors import UserError
from muralist.core.rng import Purpose, SampleKeys
from muralist.models.hunyuan_dit import HunyuanDiTSpec, rope_table
from muralist.settings import SampleSettings
from tests.support.hunyuan import scenes, small_family

PROMPTS = ["A highway scene with clear lane markings and distant cars", "A parking lot"]


@pytest.fixture(scope="module", params=["1.2", "1.1"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HunyuanDiTSpec:
    folder = tmp_path_factory.mktemp("model") / f"small-{request.param}"
    return small_family(folder, variant=request.param, uncond_p=0.5, uncond_p_t5=0.25)


def test_samples_equal_those_of_the_diffusers_pipeline(family: HunyuanDiTSpec) -> None:
    mine = family.sample(family.network().eval(), PROMPTS, [3, 8], SampleSettings(steps=4))
    pipeline = HunyuanDiTPipeline.from_pretrained(family.folder, safety_checker=None, requires_safety_checker=False)
    pipeline.scheduler = DPMSolverMultistepScheduler.from_config(pipeline.scheduler.config)
    pipeline.set_progress_bar_config(disable=True)
    noise = rng.normal(0, Purpose.SAMPLE_NOISE, torch.tensor([3, 8]), (4, 4, 4))
    theirs = pipeline(
        PROMPTS, height=32, width=32, original_size=(32, 32), num_inference_steps=4, guidance_scale=5.0, latents=noise,
        use_resolution_binning=False, output_type="pt",
    ).images  # fmt: skip
    torch.testing.assert_close(mine, theirs * 2 - 1, rtol=0, atol=2e-5)


def test_an_image_depends_on_its_prompt_and_seed_alone(family: HunyuanDiTSpec) -> None:
    network, settings = family.network().eval(), SampleSettings(steps=3)
    before = torch.get_rng_state()
    together = family.sample(network, PROMPTS, [5, 6], settings)
    alone = family.sample(network, PROMPTS[1:], [6], settings)
    torch.testing.assert_close(together[1:], alone, rtol=0, atol=2e-5)
    assert torch.equal(torch.get_rng_state(), before)
    other = family.sample(network, PROMPTS[1:], [7], settings)
    assert float((other - alone).abs().max()) > 0.05


def test_loss_of_another_image_size_equals_that_of_a_spec_of_that_size(family: HunyuanDiTSpec) -> None:
    square = scenes(64, 3)
    wide = square._replace(images_u8=square.images_u8[:, 8:40].contiguous())
    keys = SampleKeys(0, wide.sample_indices)
    network = family.network().eval()
    with torch.no_grad():
        mine, theirs = (
            each.loss(network, each.encode(wide, keys), keys) for each in (family, replace(family, size=(32, 64)))
        )
    assert torch.equal(mine, theirs) and float(mine.min()) > 0


def test_encoding_is_a_function_of_the_sample(family: HunyuanDiTSpec) -> None:
    batch = scenes(32, 6)
    full = family.encode(batch, SampleKeys(0, batch.sample_indices))
    part = family.encode(scenes(32, 2, first=3), SampleKeys(0, batch.sample_indices[3:5]))
    for ours, theirs in zip(part, full, strict=True):
        torch.testing.assert_close(ours, theirs[3:5], rtol=1e-4, atol=1e-4)
    other = family.encode(batch, SampleKeys(1, batch.sample_indices))
    assert not torch.allclose(other.latents, full.latents, atol=1e-3), "a sample of the posterior, not its mean"


def test_captions_are_dropped_independently_for_each_text_encoder(family: HunyuanDiTSpec) -> None:
    batch = scenes(32, 64)
    encoded = family.encode(batch, SampleKeys(0, batch.sample_indices))
    empty = family.encoders.encode_text([""])
    bert = torch.tensor([torch.equal(row, empty.bert_mask[0]) for row in encoded.bert_mask])
    t5 = torch.tensor([torch.equal(row, empty.t5_mask[0]) for row in encoded.t5_mask])
    assert 20 <= int(bert.sum()) <= 44 and 6 <= int(t5.sum()) <= 26
    assert (bert & ~t5).any() and (t5 & ~bert).any(), "independently"
    for dropped, embedded, mask in ((bert, encoded.bert, empty.bert), (t5, encoded.t5, empty.t5)):
        torch.testing.assert_close(embedded[dropped], mask.expand(int(dropped.sum()), -1, -1), rtol=1e-5, atol=1e-5)


def test_gradient_checkpointing_gives_equal_gradients(family: HunyuanDiTSpec) -> None:
    assert family.folder is not None
    batch = scenes(32, 3)
    gradients = []
    for recompute in (False, True):
        built = HunyuanDiTSpec.load(family.folder, (32, 32), gradient_checkpointing=recompute)
        network = built.network()
        keys = SampleKeys(0, batch.sample_indices)
        built.loss(network, built.encode(batch, keys), keys).sum().backward()
        gradients.append({name: p.grad for name, p in network.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient is not None and torch.equal(gradient, gradients[1][name]), name


def test_the_loss_falls_when_trained(family: HunyuanDiTSpec) -> None:
    batch = scenes(32, 8)
    network = family.network()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    losses = []
    for step in range(12):
        keys = SampleKeys(0, batch.sample_indices + 8 * step)
        loss = family.loss(network, family.encode(batch, keys), keys).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert np.mean(losses[-3:]) < 0.8 * np.mean(losses[:3])


def test_rope_equals_diffusers_for_squares_and_the_official_code_otherwise() -> None:
    cpu = torch.device("cpu")
    for size in ((512, 512), (1024, 1024), (256, 256)):
        grid = (size[0] // 16, size[1] // 16)
        theirs = get_2d_rotary_pos_embed(88, get_resize_crop_region_for_grid(grid, 32), grid, output_type="pt")
        for ours, other in zip(rope_table(88, size, cpu), theirs, strict=True):
            torch.testing.assert_close(ours, other, rtol=0, atol=1e-5)
    # The official code divides with numpy and without the end, here written out for the rows of 768 x 1280.
    (top, _), (bottom, _) = get_resize_crop_region_for_grid((48, 80), 32)
    rows = np.linspace(top, bottom, 48, endpoint=False, dtype=np.float32)
    frequencies = 1.0 / 10000.0 ** (np.arange(0, 44, 2)[:22] / 44)
    expected = np.cos(np.repeat(np.outer(rows, frequencies), 2, axis=1))
    cosines = rope_table(88, (768, 1280), cpu)[0].view(48, 80, 88)
    halves = (cosines[:, 0, :44].numpy(), cosines[:, 0, 44:].numpy())
    assert min(np.abs(half - expected).max() for half in halves) < 1e-4


def test_flops_grow_with_the_image_and_are_counted_on_the_meta_device(family: HunyuanDiTSpec) -> None:
    assert family.folder is not None
    larger = HunyuanDiTSpec.load(family.folder, (64, 32))
    assert larger.tokens_per_image() == 8 and family.tokens_per_image() == 4
    assert 0 < family.flops_per_image() < larger.flops_per_image()
    meta = family.meta_model()
    assert all(parameter.is_meta for parameter in meta.parameters())
    meta.load_state_dict(family.network().state_dict(), assign=True)
    torch.testing.assert_close(
        family.sample(meta.eval(), PROMPTS[:1], [0], SampleSettings(steps=2)),
        family.sample(family.network().eval(), PROMPTS[:1], [0], SampleSettings(steps=2)),
    )


def test_invalid_models_are_user_errors(tmp_path: Path, family: HunyuanDiTSpec) -> None:
    assert family.folder is not None
    with pytest.raises(UserError, match="not a HunyuanDiT in diffusers layout"):
        HunyuanDiTSpec.load(tmp_path, (64, 64))
    with pytest.raises(UserError, match="multiples of 16"):
        HunyuanDiTSpec.load(family.folder, (64, 40))
    for name in ("transformer", "scheduler"):
        (tmp_path / name).mkdir()
    (tmp_path / "transformer" / "config.json").write_text("{}")
    schedule = {"prediction_type": "epsilon", "beta_schedule": "linear"}
    (tmp_path / "scheduler" / "scheduler_config.json").write_text(json.dumps(schedule))
    with pytest.raises(UserError, match="another noise schedule"):
        HunyuanDiTSpec.load(tmp_path, (64, 64))
