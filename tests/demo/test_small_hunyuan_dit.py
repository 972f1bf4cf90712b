"""The small HunyuanDiT: diffusers loads it, captions get different embeddings, the VAE is trained."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import HunyuanDiTPipeline
from torch import Tensor

from muralist.core.errors import UserError
from muralist.demo import small_hunyuan_dit
from muralist.demo.driving_world import KINDS, PROMPTS, caption, draw_scene
from muralist.demo.small_hunyuan_dit import build_small_hunyuan_dit, load_small_vae
from tests.support.disks import small_disk

# Numbers that neither training nor the script's own measurements draw.
HELD_OUT_FROM = 2_000_000
LEAST_PSNR = 23.4
VARIANTS = ("1.2", "1.1")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {variant: build_small_hunyuan_dit(root / variant, variant) for variant in VARIANTS}


@pytest.fixture(scope="module")
def pipelines(folders: dict[str, Path]) -> dict[str, HunyuanDiTPipeline]:
    pipelines = {variant: HunyuanDiTPipeline.from_pretrained(folder) for variant, folder in folders.items()}
    for pipeline in pipelines.values():
        pipeline.set_progress_bar_config(disable=True)
    return pipelines


def files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def draw(pipeline: HunyuanDiTPipeline, prompts: list[str]) -> np.ndarray:
    return pipeline(
        prompts,
        num_inference_steps=3,
        generator=[torch.Generator().manual_seed(0) for _ in prompts],
        use_resolution_binning=False,
        output_type="np",
    ).images


def embed(pipeline: HunyuanDiTPipeline, captions: list[str], encoder: int) -> Tensor:
    """What the transformer sees of captions: [B, tokens, width], nothing where there is no token."""
    with torch.no_grad():
        vectors, _, mask, _ = pipeline.encode_prompt(
            captions, device=torch.device("cpu"), do_classifier_free_guidance=False, text_encoder_index=encoder
        )
    return vectors * mask[..., None]


def scenes(size: int, count: int) -> Tensor:
    """Held-out scenes of all kinds in [-1, 1]."""
    drawn = [draw_scene(item % len(KINDS), HELD_OUT_FROM + item // len(KINDS), size) for item in range(count)]
    return torch.from_numpy(np.stack(drawn)).permute(0, 3, 1, 2) / 127.5 - 1.0


def mean_psnr(restored: Tensor, images: Tensor) -> float:
    error = (restored.clamp(-1, 1) - images).square().mean(dim=(1, 2, 3))
    return float((10 * torch.log10(4 / error)).mean())


@pytest.mark.parametrize("variant", VARIANTS)
def test_diffusers_loads_it_and_prompts_change_the_image(
    pipelines: dict[str, HunyuanDiTPipeline], variant: str
) -> None:
    pipeline = pipelines[variant]
    for name in ("vae", "text_encoder", "text_encoder_2", "transformer"):
        part = getattr(pipeline, name)
        assert not part.training
        assert {parameter.dtype for parameter in part.parameters()} == {torch.float32}
    one, other, again = draw(pipeline, [PROMPTS[2], PROMPTS[5], PROMPTS[2]])
    assert one.shape == (64, 64, 3)
    assert one.std() > 0.01
    np.testing.assert_allclose(one, again, atol=1e-5)
    assert np.abs(one - other).max() > 0.003


@pytest.mark.parametrize(("variant", "beta_end", "sizes"), [("1.2", 0.018, False), ("1.1", 0.03, True)])
def test_the_variants_are_those_of_the_real_model(
    pipelines: dict[str, HunyuanDiTPipeline], variant: str, beta_end: float, sizes: bool
) -> None:
    pipeline = pipelines[variant]
    assert pipeline.scheduler.betas[0] == pytest.approx(0.00085)
    assert pipeline.scheduler.betas[-1] == pytest.approx(beta_end)
    assert pipeline.scheduler.config.prediction_type == "v_prediction"
    assert pipeline.transformer.config.use_style_cond_and_image_meta_size == sizes
    assert pipeline.vae_scale_factor == 8
    assert sum(block.skip_linear is not None for block in pipeline.transformer.blocks) == 2
    assert 1.9e6 < pipeline.transformer.num_parameters() < 3e6


def test_builds_are_reproducible_and_leave_the_rng_alone(folders: dict[str, Path], tmp_path: Path) -> None:
    torch.manual_seed(1234)
    torch.randn(5)
    before = torch.get_rng_state()
    again = files(build_small_hunyuan_dit(tmp_path / "again", "1.2"))
    assert torch.equal(torch.get_rng_state(), before)
    assert again == files(folders["1.2"])
    other = files(build_small_hunyuan_dit(tmp_path / "other", "1.2", seed=1))
    changed = {name for name in again if again[name] != other[name]}
    assert changed == {
        "muralist.json",
        "text_encoder/model.safetensors",
        "text_encoder_2/model.safetensors",
        "transformer/diffusion_pytorch_model.safetensors",
    }


def test_a_folder_is_reused_and_other_content_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    weights = folders["1.2"] / "transformer" / "diffusion_pytorch_model.safetensors"
    before = weights.stat()
    assert build_small_hunyuan_dit(folders["1.2"], "1.2") == folders["1.2"]
    assert weights.stat() == before
    with pytest.raises(UserError, match="is not this small HunyuanDiT"):
        build_small_hunyuan_dit(folders["1.2"], "1.1")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(UserError, match="Remove it, or name a folder"):
        build_small_hunyuan_dit(tmp_path / "mine")
    assert files(tmp_path / "mine") == {"notes.txt": b"keep"}


def test_processes_that_build_the_same_folder_at_once_all_find_it(folders: dict[str, Path], tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(3) as pool:
        assert pool.map(build_small_hunyuan_dit, [tmp_path / "shared"] * 3, chunksize=1) == [tmp_path / "shared"] * 3
    assert files(tmp_path / "shared") == files(folders["1.2"])
    assert list(tmp_path.iterdir()) == [tmp_path / "shared"]


def test_full_disk_is_a_user_error_and_leaves_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        with pytest.raises(UserError, match="No space left on the disk"):
            build_small_hunyuan_dit(disk / "model")
        assert not list(disk.iterdir())


def test_caption_words_are_single_tokens_and_other_text_is_spelled(
    pipelines: dict[str, HunyuanDiTPipeline],
) -> None:
    tokenizers = (pipelines["1.2"].tokenizer, pipelines["1.2"].tokenizer_2)
    captions = [caption(kind, number) for kind in range(len(KINDS)) for number in range(40)]
    for tokenizer in tokenizers:
        for text in captions:
            words = text.replace(",", " ,").split()
            assert len(tokenizer.tokenize(text)) == len(words), text
        for text in (*captions, "A zebra, 42 km from Oslo!", small_hunyuan_dit.EMPTY_CAPTION):
            assert tokenizer.unk_token_id not in tokenizer(text).input_ids, text
        assert len(set(tokenizer.tokenize(small_hunyuan_dit.EMPTY_CAPTION)) - {"▁"}) == 8
    assert [tokenizer.model_max_length for tokenizer in tokenizers] == [77, 256]


@pytest.mark.parametrize("encoder", [0, 1], ids=["bert", "t5"])
def test_captions_that_differ_in_one_word_are_far_apart(pipelines: dict[str, HunyuanDiTPipeline], encoder: int) -> None:
    captions = sorted({caption(kind, number) for kind in range(len(KINDS)) for number in range(12)})
    assert len(captions) > 80
    vectors = embed(pipelines["1.2"], captions, encoder).flatten(1)
    distances = torch.cdist(vectors, vectors) / vectors.norm(dim=1).mean()
    assert distances.fill_diagonal_(torch.inf).min() > 0.15
    again = embed(pipelines["1.1"], captions[:8], encoder).flatten(1)
    torch.testing.assert_close(again, vectors[:8], atol=1e-4, rtol=0)


def test_the_vae_takes_less_than_a_megabyte() -> None:
    stored = [small_hunyuan_dit.VAE_WEIGHTS, small_hunyuan_dit.VAE_CONFIG]
    assert sorted(small_hunyuan_dit.ASSETS.iterdir()) == sorted(stored)
    assert sum(file.stat().st_size for file in stored) < 1_000_000


@pytest.mark.parametrize(("size", "count"), [(64, 64), (128, 16), (256, 8)])
def test_the_vae_reconstructs_unseen_scenes_from_latents_of_unit_variance(size: int, count: int) -> None:
    """Mean PSNR over images, and that of a constant image of the mean color."""
    vae, images = load_small_vae(), scenes(size, count)
    with torch.no_grad():
        posterior = vae.encode(images).latent_dist
        restored = vae.decode(posterior.mode()).sample
        latents = posterior.sample(torch.Generator().manual_seed(0)) * vae.config.scaling_factor
    reached = mean_psnr(restored, images)
    recorded = json.loads(small_hunyuan_dit.VAE_CONFIG.read_text())["measured"]["by_size"][str(size)]["psnr"]
    assert reached > LEAST_PSNR
    assert reached > mean_psnr(images.mean(dim=(2, 3), keepdim=True).expand_as(images), images) + 2.0
    assert reached == pytest.approx(recorded, abs=1.0)
    assert latents.std().item() == pytest.approx(1.0, abs=0.08)  # one factor serves all sizes
