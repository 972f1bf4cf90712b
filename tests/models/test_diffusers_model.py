"""Training any diffusers pipeline: the loss of every class beside one written by hand, batches, gradients, LoRA."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    CogVideoXDPMScheduler,
    CogVideoXTransformer3DModel,
    DiffusionPipeline,
    StableDiffusionPipeline,
)
from torch import Tensor, nn

from muralist.core.errors import UserError
from muralist.core.rng import Purpose, SampleKeys
from muralist.data.loader import Batch
from muralist.models.diffusers_model import DiffusersSpec
from muralist.models.lora import DEFAULT_TARGETS, Lora, is_adapter
from muralist.models.spec import find_family
from muralist.settings import SampleSettings, TrainSettings
from tests.conftest import REPOSITORY
from tests.support.training_references import REFERENCES, SIZE, Reference, publish

SEED = 3
_IMAGE_VAES = ("AutoencoderKL", "AutoencoderDC", "AutoencoderKLFlux2", "AutoencoderKLHunyuanImage")  # the others: clips
CAPTIONS = ["a car", "two cars in the rain near a house with a red roof", "", "street at night"]
IMAGES = torch.randint(0, 256, (4, SIZE, SIZE, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def settings(folder: Path, **model: Any) -> TrainSettings:
    model = {"path": str(folder), "img_size": SIZE, "uncond_p": 0.0} | model
    return TrainSettings(model=model, data={"random_flip": False}, seed=SEED)


def build(folder: Path, **model: Any) -> DiffusersSpec:
    wanted = settings(folder, **model)
    find_family(wanted.model.name).check(wanted.model)
    spec = DiffusersSpec.from_settings(wanted, [])
    spec.to_device(torch.device("cpu"), torch.float32)
    return spec


def batch(*rows: int) -> tuple[Batch, SampleKeys]:
    indices = 7 + torch.tensor(rows)
    captions = [CAPTIONS[row] for row in rows]
    return Batch(IMAGES[list(rows)], torch.zeros(len(rows), dtype=torch.int64), captions, indices), SampleKeys(
        SEED, indices
    )


def losses(spec: DiffusersSpec, network: nn.Module, *rows: int) -> Tensor:
    images, keys = batch(*rows)
    return spec.loss(network, spec.encode(images, keys), keys)


@dataclass
class Case:
    """A pipeline class with its spec and its network; each is built once for all tests."""

    name: str
    folder: Path

    @property
    def reference(self) -> Reference:
        return REFERENCES[self.name]

    @cached_property
    def spec(self) -> DiffusersSpec:
        return build(self.folder)

    @cached_property
    def network(self) -> nn.Module:
        return self.spec.network()

    @cached_property
    def losses(self) -> Tensor:
        """Of a batch of four; the gradients stay in the network."""
        values = losses(self.spec, self.network, 0, 1, 2, 3)
        values.sum().backward()
        return values.detach()


@pytest.fixture(scope="module", params=REFERENCES)
def case(
    request: pytest.FixtureRequest, tiny_pipeline: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp("published") / request.param
    shutil.copytree(tiny_pipeline(request.param), folder)
    yield Case(request.param, publish(request.param, folder))
    shutil.rmtree(folder)


def alphas(config: Any) -> Tensor:
    """Cumulative products of a DDPM in float64."""
    if config.beta_schedule == "linear":
        betas = torch.linspace(config.beta_start, config.beta_end, 1000, dtype=torch.float64)
    else:
        assert config.beta_schedule == "scaled_linear"
        betas = torch.linspace(config.beta_start**0.5, config.beta_end**0.5, 1000, dtype=torch.float64) ** 2
    products = (1 - betas).cumprod(0)
    if shift := config.get("snr_shift_scale"):  # CogVideoX: a signal-to-noise ratio that is smaller by this factor
        products = products / (shift + (1 - shift) * products)
    if config.get("rescale_betas_zero_snr"):  # Lin et al. 2023, algorithm 1
        roots = products.sqrt()
        products = ((roots - roots[-1]) * roots[0] / (roots[0] - roots[-1])) ** 2
    return products


@torch.no_grad()
def reference_loss(pipe: Any, reference: Reference, row: int, caption: str) -> float:
    """The loss of one image as a training script of this class alone would compute it."""
    images, keys = batch(row)[0].images_u8, batch(row)[1]
    pixels = images.permute(0, 3, 1, 2).float() / 127.5 - 1
    if type(pipe.vae).__name__ not in _IMAGE_VAES:
        pixels = pixels.unsqueeze(2)
    encoded = pipe.vae.encode(pixels)
    if posterior := getattr(encoded, "latent_dist", None):
        z = posterior.mean + posterior.std * keys.normal(Purpose.LATENT, tuple(posterior.mean.shape[1:]))
    else:
        z = encoded.latent
    x = reference.latents(pipe.vae, z)
    e = keys.normal(Purpose.NOISE, tuple(x.shape[1:]))
    if reference.objective == "flow":
        s = torch.sigmoid(keys.normal(Purpose.TIME))
        s = reference.shift / (reference.shift + (1 / s - 1))  # as time_shift() of diffusers writes it
        s = reference.lowest + (1 - reference.lowest) * s
        t, noisy, target = 1000 * s, (1 - s) * x + s * e, e - x
    else:
        t = (1000 * keys.uniform(Purpose.TIME)).floor()
        a = alphas(pipe.scheduler.config)[int(t)].float()
        noisy = a.sqrt() * x + (1 - a).sqrt() * e
        target = e if reference.objective == "epsilon" else a.sqrt() * e - (1 - a).sqrt() * x
    output = reference.predict(pipe, noisy, t, caption)
    return float((output - target).square().mean())


def test_loss_equals_one_written_by_hand(case: Case) -> None:
    pipe = DiffusionPipeline.from_pretrained(case.folder)
    expected = [reference_loss(pipe, case.reference, row, caption) for row, caption in enumerate(CAPTIONS)]
    assert case.losses.tolist() == pytest.approx(expected, rel=1e-5)


ROWS = {  # of the table in docs/any-pipeline.md, by what its first column begins with
    "Stable Diffusion 1.5": ("sd",), "Stable Diffusion XL": ("sdxl",), "Latent Consistency": ("lcm",),
    "Stable Diffusion 3": ("sd3",), "FLUX.1": ("flux", "schnell"), "FLUX.2": ("flux2", "klein"), "Chroma": ("chroma",),
    "Wan 2.1": ("wan21", "wan22"), "HunyuanDiT": ("hunyuan", "hunyuan11"), "HunyuanVideo": ("hunyuanvideo",),
    "PixArt": ("pixart", "pixart_alpha"), "Sana": ("sana",), "Lumina 2": ("lumina2",), "Qwen-Image": ("qwenimage",),
    "Z-Image": ("zimage",), "AuraFlow": ("auraflow",), "CogView 3+": ("cogview3",), "CogView 4": ("cogview4",),
    "CogVideoX": ("cogvideox",), "LTX-Video": ("ltx", "ltx_condition"), "Latte": ("latte",), "Lumina-Next": ("lumina",),
    "Mochi": ("mochi",), "HunyuanImage": ("hunyuanimage", "hunyuanvideo15"), "Sana Video": ("sana_video",),
    "Ovis": ("ovis",), "LongCat": ("longcat",), "ERNIE": ("ernie",), "Kandinsky 5": ("kandinsky5",), "Krea 2": ("krea2",),
    "Stable Diffusion with PAG": ("sd_pag",),
}  # fmt: skip


def documented() -> dict[str, tuple[str, str]]:
    """Objective and text of each row of the table, by what its first column begins with."""
    page = (REPOSITORY / "docs" / "any-pipeline.md").read_text("utf-8")
    table = page.partition("| pipeline | objective | text |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    found: dict[str, tuple[str, str]] = {}
    for name, objective, text in rows:
        found[max((label for label in ROWS if name.startswith(label)), key=len)] = objective, text
    assert len(found) == len(rows)
    return found


def test_table_of_the_docs_names_every_tested_class() -> None:
    assert documented().keys() == ROWS.keys()
    assert sorted(name for names in ROWS.values() for name in names) == sorted(REFERENCES)


def test_table_of_the_docs_is_true(case: Case) -> None:
    objective, text = next(documented()[label] for label, names in ROWS.items() if case.name in names)
    prediction, call = case.spec.levels.prediction, case.spec._prepare_size((SIZE, SIZE))
    assert {"flow": "flow", "noise": "DDPM, noise", "velocity": "DDPM, "}[prediction] in objective
    assert ("velocity" in objective) == (prediction == "velocity") or case.name in ("sd", "cogvideox")
    assert text.startswith("varying length" if call.has_lists else "fixed length")
    assert ("masked" in text) == any("mask" in argument.name for argument in call.text)
    assert ("lists" in text) == any(argument.is_list for argument in call.text)


def test_image_does_not_depend_on_its_batch(case: Case) -> None:
    with torch.no_grad():
        alone = torch.cat([losses(case.spec, case.network, row) for row in range(4)])
    torch.testing.assert_close(alone, case.losses, rtol=1e-5, atol=0)


def test_every_trained_weight_has_a_gradient(case: Case) -> None:
    case.losses  # noqa: B018 - computes the gradients
    without = {name for name, weight in case.network.named_parameters() if weight.grad is None or not weight.grad.any()}
    expected = {
        name
        for name, _ in case.network.named_parameters()
        if any(re.match(pattern, name) for pattern in case.reference.unused)
    }
    assert without == expected


def test_lora_starts_without_effect_and_trains_all_its_weights(case: Case) -> None:
    spec = case.spec
    spec.lora = Lora(2, DEFAULT_TARGETS).for_network(case.network)
    try:
        network = spec.network()
        fresh = losses(spec, network, 0, 1, 2, 3)
        torch.testing.assert_close(fresh, case.losses, rtol=1e-6, atol=0)
        trained = {name: weight for name, weight in network.named_parameters() if weight.requires_grad}
        assert trained and all(map(is_adapter, trained)), "everything else is frozen"
        with torch.no_grad():  # at zero, B hides A from its gradient
            for name, weight in trained.items():
                if ".lora_B." in name:
                    weight.normal_(std=1.0, generator=torch.Generator().manual_seed(1))
        moved = losses(spec, network, 0, 1, 2, 3)
        moved.sum().backward()
    finally:
        spec.lora = None
    assert not torch.allclose(moved, fresh, rtol=1e-4)
    without = [name for name, weight in trained.items() if weight.grad is None or not weight.grad.any()]
    assert all(any(re.match(pattern, name) for pattern in case.reference.unused) for name in without), without


@pytest.mark.parametrize("case", ["sd", "chroma", "hunyuanimage", "qwenimage"], indirect=True)
def test_gradient_checkpointing_changes_nothing(case: Case) -> None:
    """diffusers' own loses the text's mask in Chroma's blocks, and names arguments in HunyuanImage's."""
    spec = case.spec
    case.losses  # noqa: B018 - computes the gradients
    spec.gradient_checkpointing = True
    try:
        network = spec.network()
        losses(spec, network, 0, 1, 2, 3).sum().backward()
    finally:
        spec.gradient_checkpointing = False
    for (name, weight), other in zip(case.network.named_parameters(), network.parameters(), strict=True):
        same = weight.grad is other.grad if weight.grad is None else torch.equal(weight.grad, other.grad)
        assert same, name


@pytest.mark.parametrize("case", ["flux", "wan22", "cogview4", "hunyuanvideo15"], indirect=True)
def test_sample_depends_on_its_prompt_and_seed_alone(case: Case) -> None:
    """CogView4 pads the texts of a batch to the longest, without a mask; HunyuanVideo 1.5 decodes one image at a time."""
    spec, network, steps = case.spec, case.network.eval(), SampleSettings(steps=2)
    both = spec.sample(network, CAPTIONS[:2], [3, 4], steps)
    alone = torch.cat([spec.sample(network, [CAPTIONS[row]], [3 + row], steps) for row in (0, 1)])
    assert both.shape == (2, 3, SIZE, SIZE) and both.isfinite().all() and float(both.std()) > 0.01
    torch.testing.assert_close(both, alone, rtol=0, atol=1e-4)
    assert not torch.allclose(both[0], both[1], atol=1e-2)


@pytest.mark.parametrize("name", ["sd", "qwenimage", "zimage"])  # rows, texts of varying length, lists
def test_dropped_captions_are_empty_ones(name: str, tiny_pipeline: Callable[[str], Path]) -> None:
    spec = build(tiny_pipeline(name), uncond_p=0.5)
    network = spec.network()
    images, keys = batch(0, 1, 2, 3)
    dropped = keys.uniform(Purpose.CAPTION_DROP) < 0.5
    assert 0 < int(dropped[[0, 1, 3]].sum()) < 3, "this seed drops some of the captions"
    empty = images._replace(captions=["" if gone else text for gone, text in zip(dropped, CAPTIONS, strict=True)])
    with torch.no_grad():
        own = spec.loss(network, spec.encode(images, keys), keys)
        spec.uncond_p = 0.0
        expected, kept = (spec.loss(network, spec.encode(each, keys), keys) for each in (empty, images))
    assert torch.equal(own, expected) and not torch.equal(own, kept)


def test_vae_with_an_opacity_is_given_opaque_images(tiny_pipeline: Callable[[str], Path], tmp_path: Path) -> None:
    """That of Qwen-Image 2.1 has four channels; samples have three."""
    pipe: Any = DiffusionPipeline.from_pretrained(tiny_pipeline("sd"))
    vae = AutoencoderKL.from_config({**pipe.vae.config, "in_channels": 4, "out_channels": 4}).eval()
    pipe.register_modules(vae=vae)
    pipe.save_pretrained(tmp_path)
    spec = build(tmp_path)
    images = IMAGES.permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.no_grad():
        expected = vae.encode(torch.nn.functional.pad(images, (0, 0, 0, 0, 0, 1), value=1.0)).latent_dist.mean
    torch.testing.assert_close(spec.vae_posterior(images, 3)[0], expected)
    assert spec.sample(spec.network().eval(), ["a car"], [0], SampleSettings(steps=2)).shape == (1, 3, SIZE, SIZE)


def test_scheduler_whose_step_takes_the_sample_late(tiny_pipeline: Callable[[str], Path], tmp_path: Path) -> None:
    """Published CogVideoX models have CogVideoXDPMScheduler: step(output, old output, t, previous t, sample)."""
    folder = shutil.copytree(tiny_pipeline("cogvideox"), tmp_path / "cogvideox")
    with torch.no_grad():
        spec = build(folder)
        expected = losses(spec, spec.network(), 0)
        CogVideoXDPMScheduler.from_config(spec.pipe.scheduler.config).save_pretrained(folder / "scheduler")
        index = folder / "model_index.json"
        index.write_text(index.read_text().replace("CogVideoXDDIMScheduler", "CogVideoXDPMScheduler"))
        changed = build(folder)
        assert torch.equal(losses(changed, changed.network(), 0), expected)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("sana_sprint", "A model with the scheduler SCMScheduler cannot be trained yet."),
        ("sd_inpaint", "cannot be trained yet: it takes an image beside the prompt."),
        ("kandinsky5_image", "makes images of another size than 64 x 64 pixels. It rounds the size that it is given."),
        ("allegro", "its VAE does not encode one to what the pipeline decodes (Encoding without tiling"),
        ("skyreels", "name 'ftfy' is not defined. It needs a package that is not installed."),
    ],
)
def test_what_is_missing_is_said_in_a_sentence(name: str, said: str, tiny_pipeline: Callable[[str], Path]) -> None:
    if name == "skyreels" and importlib.util.find_spec("ftfy"):
        assert build(tiny_pipeline(name)).tokens_per_image() == 16
        return
    with pytest.raises(UserError) as caught:
        build(tiny_pipeline(name))
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("renamed", "said"),
    [
        ("IFPipeline", "it has no VAE with one transformer or U-Net. Its components are"),
        ("KolorsPipeline", "cannot be loaded: "),  # without sentencepiece a stand-in of diffusers; with it, other parts
        ("StableDiffusionUpscalePipeline", "needs image inputs"),
        ("DiTPipeline", "It takes no prompt."),
    ],
)
def test_other_classes_are_refused(
    renamed: str, said: str, tiny_pipeline: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_pipeline("sd"), tmp_path / "sd")
    index = json.loads((folder / "model_index.json").read_text()) | {"_class_name": renamed}
    if renamed == "IFPipeline":
        index.pop("vae")
    (folder / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(UserError) as caught:
        build(folder)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("renamed", "part", "said"),
    [
        ("LTX2Pipeline", "audio_vae", "it makes sound beside the images."),
        ("Ideogram4Pipeline", "unconditional_transformer", "it guides its samples with a second network"),
        ("GlmImagePipeline", "vision_language_encoder", "tokens that a language model draws."),
        ("StableUnCLIPPipeline", "prior", "an image's embedding that a prior draws."),
    ],
)
def test_classes_that_need_another_training_are_refused_by_their_components(
    renamed: str, part: str, said: str, tiny_pipeline: Callable[[str], Path], tmp_path: Path
) -> None:
    assert part in inspect.signature(getattr(diffusers, renamed)).parameters
    folder = shutil.copytree(tiny_pipeline("flux"), tmp_path / "model")
    shutil.copytree(folder / "vae", folder / part)
    index = json.loads((folder / "model_index.json").read_text()) | {"_class_name": renamed}
    index |= {part: index["vae"], "tokenizer": [None, None], "tokenizer_2": [None, None]}
    (folder / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=f"{renamed} cannot be trained yet: .*{said}"):
        find_family("diffusers").check(settings(folder).model)


def test_latents_that_are_padded_are_refused(tiny_pipeline: Callable[[str], Path], tmp_path: Path) -> None:
    """CogVideoX 1.5 denoises frames in pairs, and drops the first of a single one."""
    pipe: Any = DiffusionPipeline.from_pretrained(tiny_pipeline("cogvideox"))
    config = dict(pipe.transformer.config) | {"patch_size_t": 2, "patch_bias": False}
    pipe.register_modules(transformer=CogVideoXTransformer3DModel.from_config(config))
    pipe.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="it denoises 512 numbers, of which the VAE decodes 256"):
        build(tmp_path)


def test_argument_that_some_captions_lack_is_refused(
    tiny_pipeline: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen with a short caption only, it would be left out for all."""
    encode = StableDiffusionPipeline.encode_prompt

    def encode_prompt(self: Any, prompt: list[str], *args: Any, **kwargs: Any) -> Any:
        self._cross_attention_kwargs = {"scale": 0.5} if len(prompt[0]) > 20 else None
        return encode(self, prompt, *args, **kwargs)

    monkeypatch.setattr(StableDiffusionPipeline, "encode_prompt", encode_prompt)
    with pytest.raises(UserError, match=r"is given the argument cross_attention_kwargs\S* in some calls only"):
        build(tiny_pipeline("sd"))


def test_samples_that_cannot_be_made_are_known_before_training(tiny_pipeline: Callable[[str], Path]) -> None:
    """An LCM's scheduler has 50 steps to choose from."""
    spec = build(tiny_pipeline("lcm"))
    spec.prepare_prompts(CAPTIONS, SampleSettings(steps=4))
    spec.prepare_prompts([], SampleSettings(steps=60))
    with pytest.raises(UserError, match="cannot make samples: .*smaller than `num_inference_steps`: 60"):
        spec.prepare_prompts(CAPTIONS, SampleSettings(steps=60))


def test_network_that_is_told_the_next_step_is_refused(tiny_pipeline: Callable[[str], Path], tmp_path: Path) -> None:
    """MeanFlow, to which HunyuanImage is distilled: the network predicts the mean velocity between two timesteps."""
    folder = shutil.copytree(tiny_pipeline("hunyuanimage"), tmp_path / "hunyuanimage")
    config = json.loads((folder / "transformer" / "config.json").read_text()) | {"use_meanflow": True}
    (folder / "transformer" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="argument timestep_r depends on the sampler's next step"):
        build(folder)
