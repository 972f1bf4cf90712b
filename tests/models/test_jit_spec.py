"""JiT's spec: the loss by its formula, prompts to labels, images that depend on prompt and seed alone."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from muralist.core.errors import UserError
from muralist.core.rng import Purpose, SampleKeys
from muralist.data.loader import Batch
from muralist.models import configs, jit
from muralist.models.jit_spec import (
    JiTInputs,
    JiTSpec,
    Objective,
    infer_jit_config,
    read_config,
    write_jit_folder,
)
from muralist.models.spec import build_spec
from muralist.settings import DataSettings, ModelSettings, ObjectiveSettings, SampleSettings, TrainSettings

PETS = ["cat", "Dog", "great horned owl", "7"]


def family(
    *label_names: str, img_size: int = 16, flip: bool = False, name: str = "JiT-T/8", seed: int = 0, **objective: object
) -> JiTSpec:
    settings = TrainSettings(
        data=DataSettings(random_flip=flip),
        model=ModelSettings(name=name, img_size=img_size, enable_condition=bool(label_names)),
        objective=ObjectiveSettings(**objective),  # type: ignore[arg-type]
        seed=seed,
    )
    built = build_spec(settings, list(label_names))
    assert isinstance(built, JiTSpec)
    return built


def awake(built: JiTSpec) -> nn.Module:
    """The family's network with no layer at zero, so that time, label and noise all show in its output."""
    network = built.network().eval()
    with torch.no_grad():
        for index, parameter in enumerate(p for p in network.parameters() if p.requires_grad):
            parameter.add_(0.05 * torch.sin(1.0 + index + torch.arange(parameter.numel())).view_as(parameter))
    return network


def batch(images: np.ndarray, labels: list[int] | None = None, first: int = 0) -> tuple[Batch, SampleKeys]:
    numbers = torch.arange(first, first + len(images))
    given = torch.tensor(labels if labels is not None else [0] * len(images))
    return Batch(torch.from_numpy(images), given, [""] * len(images), numbers), SampleKeys(3, numbers)


def pixels(built: JiTSpec, images: np.ndarray, first: int = 0) -> torch.Tensor:
    given, keys = batch(images, first=first)
    return built.pixels(built.encode(given, keys), keys)


def noise_images(count: int, size: int = 16) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, size, size, 3), dtype=np.uint8)


# Bytes


def test_bytes_become_minus_one_to_one_exactly() -> None:
    values = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1).repeat(3, axis=-1)
    values[0, 0, 0] = (0, 255, 51)
    images = pixels(family(), values)
    assert images.shape == (1, 3, 16, 16)
    assert images[0, :, 0, 0].tolist() == pytest.approx([-1.0, 1.0, -0.6], abs=1e-7)
    assert (images.min(), images.max()) == (-1.0, 1.0)
    assert torch.equal(((images + 1) * 127.5).round().to(torch.uint8)[0, 0], torch.from_numpy(values[0, :, :, 0]))


def test_flips_are_seeded_per_sample_and_half_of_the_time() -> None:
    images = noise_images(1).repeat(4000, axis=0)
    whole = pixels(family(flip=True), images)
    straight = pixels(family(), images)
    mirrored = (whole != straight).flatten(1).any(dim=1)
    assert torch.equal(whole[mirrored], straight[mirrored].flip(-1))
    assert mirrored.float().mean().item() == pytest.approx(0.5, abs=5 * 0.5 / math.sqrt(4000))
    later = pixels(family(flip=True), images[:100], first=1000)
    assert torch.equal(later, whole[1000:1100])


# The loss


class Stub(nn.Module):
    """Puts out a known function of its inputs and remembers them."""

    def forward(self, z: Tensor, t: Tensor, labels: Tensor, keys: SampleKeys) -> Tensor:
        self.z, self.t, self.labels, self.keys = z, t, labels, keys
        return torch.sin(3 * z) + t.view(-1, 1, 1, 1)


def test_the_loss_is_the_formula() -> None:
    """Of one pair of prediction and loss; tests/diffusion/test_flow.py has all nine."""
    given = {"prediction": "eps", "loss": "x", "p_mean": 0.4, "p_std": 1.7, "noise_scale": 1.5, "t_eps": 0.1}
    built = family(*PETS, **given, label_drop_prob=0.3)
    stored = torch.from_numpy(noise_images(400, 4))
    x = stored.permute(0, 3, 1, 2).float() / 127.5 - 1
    labels, keys = torch.arange(400) % 4, SampleKeys(11, torch.arange(1000, 1400))
    stub = Stub()
    loss = built.loss(stub, JiTInputs(stored, labels), keys)

    n = keys.normal(Purpose.TIME).double()
    t = (1 / (1 + torch.exp(-(0.4 + 1.7 * n)))).view(-1, 1, 1, 1)
    e = 1.5 * keys.normal(Purpose.NOISE, (3, 4, 4)).double()
    z = t * x + (1 - t) * e
    torch.testing.assert_close(stub.z.double(), z, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(stub.t.double(), t.flatten(), atol=1e-6, rtol=1e-6)
    assert stub.keys is keys
    dropped = keys.uniform(Purpose.LABEL_DROP) < 0.3
    assert stub.labels.tolist() == torch.where(dropped, 4, labels).tolist()
    assert 0.2 < dropped.float().mean() < 0.4

    output = torch.sin(3 * stub.z).double() + stub.t.double().view(-1, 1, 1, 1)
    error = (1 - t) / t.clamp_min(0.1) * (output - e)  # x = (z - (1 - t) e) / t
    assert loss.shape == (400,) and (t < 0.1).any() and (t > 0.9).any()
    torch.testing.assert_close(loss.double(), error.square().mean(dim=(1, 2, 3)), atol=1e-3, rtol=1e-4)


def test_loss_of_a_sample_does_not_depend_on_its_batch() -> None:
    built = family(*PETS, flip=True)
    network = awake(built)
    given, keys = batch(noise_images(6), [0, 1, 2, 3, 0, 1])
    whole = built.loss(network, built.encode(given, keys), keys)
    assert whole.std() > 0
    for index in range(6):
        one = Batch(given.images_u8[[index]], given.labels[[index]], [""], given.sample_indices[[index]])
        alone = SampleKeys(keys.seed, one.sample_indices)
        torch.testing.assert_close(
            built.loss(network, built.encode(one, alone), alone)[0], whole[index], rtol=1e-5, atol=1e-6
        )


def test_an_unconditional_model_never_sees_a_label() -> None:
    built, stub = family(label_drop_prob=0.9), Stub()
    given, keys = batch(noise_images(50), list(range(50)))
    built.loss(stub, built.encode(given, keys), keys)
    assert stub.labels.tolist() == [0] * 50
    assert family(*PETS).encode(given, keys).labels.tolist() == list(range(50))
    assert (built.num_classes, built.null_label, built.objective.label_drop_prob) == (1, 1, 0.0)


@pytest.mark.parametrize(("img_size", "scale"), [(16, 1.0), (256, 1.0), (512, 2.0)])
def test_noise_grows_with_large_images(img_size: int, scale: float) -> None:
    assert family(img_size=img_size).objective.noise_scale == scale
    assert family(img_size=img_size, noise_scale=0.7).objective.noise_scale == 0.7


# Prompts


def test_prompts_name_classes_by_name_or_number() -> None:
    pets = family(*PETS)
    expected = {"cat": 0, "CAT": 0, " dog\n": 1, "Great Horned Owl": 2, "0": 0, "2": 2, "7": 3, "3": 3}
    assert {prompt: pets.label_of(prompt) for prompt in expected} == expected
    assert pets.default_prompts() == PETS
    assert pets.num_classes == pets.null_label == 4


def test_names_that_differ_in_case_alone_are_different_classes() -> None:
    pets = family("cat", "Cat", "CAT")
    assert [pets.label_of(prompt) for prompt in ("cat", "Cat", "CAT", "cAt")] == [0, 1, 2, 0]


@pytest.mark.parametrize(
    ("prompt", "near"), [("great horned owls", "great horned owl"), ("dgo", "dog"), ("4", ""), ("-1", ""), ("", "")]
)
def test_an_unknown_prompt_names_the_nearest_class(prompt: str, near: str) -> None:
    with pytest.raises(UserError, match="does not name a class") as caught:
        family(*PETS).check_prompts(["cat", prompt])
    assert caught.value.why.casefold() == (f"Did you mean {near}?".casefold() if near else "")
    assert caught.value.fix == f"Prompts are class names or labels from 0 to 3. The names: {', '.join(PETS)}."


def test_indices_are_not_listed_as_names() -> None:
    with pytest.raises(UserError) as caught:
        family(*map(str, range(1000))).check_prompts(["cat"])
    assert caught.value.fix == "Prompts are class names or labels from 0 to 999."


def test_an_unconditional_model_takes_any_prompt() -> None:
    assert family().label_of("whatever") == 0
    assert family().default_prompts() == ["unconditional"]


# Sampling


def test_an_image_depends_on_its_prompt_and_seed_alone() -> None:
    pets = family(*PETS)
    network = awake(pets)
    settings = SampleSettings(steps=3)

    def images_of(*asked: tuple[str, int]) -> Tensor:
        return pets.sample(network, [prompt for prompt, _ in asked], [seed for _, seed in asked], settings)

    first = images_of(("cat", 5), ("Dog", 6), ("7", 5))
    assert first.shape == (3, 3, 16, 16)
    assert first.abs().max() <= 1
    second = images_of(("7", 8), ("cat", 5), ("Dog", 9))
    assert torch.equal(first[0], second[1])
    torch.testing.assert_close(images_of(("cat", 5))[0], first[0], atol=1e-4, rtol=1e-4)
    assert torch.equal(images_of(("cat", 5)), images_of(("0", 5)))
    assert (first[0] - first[2]).abs().max() > 1e-2  # another prompt
    assert (first[1] - second[2]).abs().max() > 1e-2  # another seed


def test_sampling_ignores_the_global_rng() -> None:
    pets = family(*PETS)
    network, settings = awake(pets), SampleSettings(steps=2)
    torch.manual_seed(1)
    first = pets.sample(network, ["cat"], [2**61], settings)
    torch.manual_seed(2)
    assert torch.equal(pets.sample(network, ["cat"], [2**61], settings), first)


def test_guidance_is_for_conditional_models() -> None:
    pets, wild = family(*PETS), family()
    for built, differs in ((pets, True), (wild, False)):
        network = awake(built)
        weak, strong = (
            built.sample(
                network, built.default_prompts()[:1], [1], SampleSettings(steps=3, guidance=guidance, interval=(0, 1))
            )
            for guidance in (1.0, 4.0)
        )
        assert torch.equal(weak, strong) != differs


def test_initial_noise_has_the_noise_scale_of_the_objective() -> None:
    class Quiet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))
            self.seen: list[Tensor] = []

        def forward(self, z: Tensor, t: Tensor, labels: Tensor) -> Tensor:
            self.seen.append(z.clone())
            return torch.zeros_like(z)

    for scale in (1.0, 2.5):
        quiet = Quiet()
        built = family(noise_scale=scale)
        assert torch.equal(built.sample(quiet, ["a"], [4], SampleSettings(steps=2)), torch.zeros(1, 3, 16, 16))
        expected = scale * SampleKeys(0, torch.tensor([4])).normal(Purpose.SAMPLE_NOISE, (3, 16, 16))
        assert torch.equal(quiet.seen[0], expected)


# Weights of other runs


def test_initial_weights_depend_on_the_seed() -> None:
    one, same, other = (family(*PETS, seed=seed).network().state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_init_from_copies_everything_but_the_label_embedding() -> None:
    pets, wild = family(*PETS), family()
    network, given = pets.network(), awake(wild).state_dict()
    table = network.state_dict()["y_embedder.embedding_table.weight"].clone()
    pets.init_from(network, given, "elsewhere")
    for name, value in network.state_dict().items():
        assert torch.equal(value, table if name.startswith("y_embedder") else given[name]), name


@pytest.mark.parametrize("change", ["missing", "size", "variant"])
def test_weights_that_do_not_fit_are_refused(change: str) -> None:
    pets = family(*PETS)
    given = dict(family().network().state_dict())
    if change == "missing":
        del given["blocks.3.attn.qkv.weight"]
    elif change == "size":
        given = family(img_size=32).network().state_dict()
    else:
        given = {name: value[..., :1] for name, value in given.items()}
    with pytest.raises(UserError, match="The weights of elsewhere do not fit JiT-T/8 at 16 px") as caught:
        pets.init_from(pets.network(), given, "elsewhere")
    assert "nothing there" in caught.value.why if change == "missing" else "here and (" in caught.value.why
    wide, high = family(*PETS, img_size=(16, 32)), family(img_size=(32, 16)).network().state_dict()  # as many tokens
    with pytest.raises(UserError, match="do not fit JiT-T/8 at 16 x 32 px.*a model at 32 x 16 px"):
        wide.init_from(wide.network(), high, "elsewhere")


def test_description_for_checkpoints() -> None:
    described = family(*PETS, prediction="v", loss="x").describe()
    assert (described["model"], described["img_size"], described["label_names"]) == ("JiT-T/8", 16, PETS)
    assert (described["objective"]["prediction"], described["objective"]["loss"]) == ("v", "x")
    assert described["objective"]["noise_scale"] == 1.0


def test_tokens_and_flops() -> None:
    assert family(name="JiT-B/4", img_size=64).tokens_per_image() == 256
    base, double = (family(name="JiT-B/4", img_size=size).flops_per_image() for size in (64, 128))
    assert 4 * base < double < 8 * base


@pytest.mark.parametrize("size", [(16, 64), (64, 16), (24, 32), (32, 24)])
def test_rectangles(size: tuple[int, int], tmp_path: Path) -> None:
    """Rows and columns keep their meaning; an export tells 16 x 64 from a square of as many tokens."""
    height, width = size
    network = jit.build("JiT-T/8", size, 2)
    network.init_weights(0)
    square = jit.build("JiT-T/8", max(size), 2)
    square.init_weights(0)
    rows, columns = height // 8, width // 8
    table = square.pos_embed[0].unflatten(0, (max(size) // 8, max(size) // 8))[:rows, :columns]
    assert torch.equal(network.pos_embed[0].unflatten(0, (rows, columns)), table)
    cpu = torch.device("cpu")
    for mine, whole in zip(
        jit.rope_table((rows, columns), 32, 4, cpu), jit.rope_table(max(size) // 8, 32, 4, cpu), strict=True
    ):
        cut = whole[4:].unflatten(0, (max(size) // 8, max(size) // 8))[:rows, :columns].flatten(0, 1)
        assert torch.equal(mine[4:], cut) and torch.equal(mine[:4], whole[:4])
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        noisy = torch.randn(1, 3, height, width)
        out = network(noisy, torch.tensor([0.3]), torch.tensor([1]))
        assert out.shape == noisy.shape
        # The patch that is changed is the patch whose prediction changes most.
        noisy[:, :, -8:, :8] += 3.0
        moved = (network(noisy, torch.tensor([0.3]), torch.tensor([1])) - out).abs().mean(1)[0]
        patches = moved.unflatten(0, (rows, 8)).unflatten(2, (columns, 8)).mean((1, 3))
        assert divmod(int(patches.argmax()), columns) == (rows - 1, 0)
    config = infer_jit_config(network.state_dict())
    assert config["input_size"] == [height, width]
    write_jit_folder(tmp_path / "export", network.state_dict(), config)
    assert read_config(tmp_path / "export")["input_size"] == [height, width]
    assert configs.tokens_per_image(8, size) == rows * columns
    assert Objective.from_settings(ObjectiveSettings(), (512, 2048)).noise_scale == 4.0
