"""A family is one class and one registry line: a toy family trains, resumes and samples without any other change."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from muralist.core.errors import UserError
from muralist.core.rng import SampleKeys
from muralist.data.loader import Batch, to_unit_range
from muralist.models import spec
from muralist.models.spec import FAMILIES, ModelFamily, ModelSpec, families_with, find_family, find_family_by_key
from muralist.settings import SampleSettings, TrainSettings
from tests.support.runs import last_checkpoint, metrics, only_run, tensors, train


class ToyInputs(NamedTuple):
    """Images in [-1, 1]."""

    images: Tensor


class ToySpec(ModelSpec):
    """Predicts the mean color."""

    label_names: list[str] = []  # noqa: RUF012

    def __init__(self, side: int) -> None:
        self.side = side

    @classmethod
    def from_settings(cls, settings: TrainSettings, label_names: list[str], latents: object) -> ToySpec:
        return cls(settings.model.size[0])

    def network(self) -> nn.Module:
        network = nn.Linear(1, 3)
        nn.init.zeros_(network.weight)
        nn.init.zeros_(network.bias)
        return network

    def meta_model(self) -> nn.Module:
        with torch.device("meta"):
            return nn.Linear(1, 3)

    def encode(self, batch: Batch, keys: SampleKeys) -> ToyInputs:
        return ToyInputs(to_unit_range(batch.images_u8, None))

    def loss(self, network: nn.Module, encoded: ToyInputs, keys: SampleKeys) -> Tensor:
        color = network(torch.ones(len(encoded.images), 1))
        return (color[:, :, None, None] - encoded.images).square().mean(dim=(1, 2, 3))

    def default_prompts(self) -> list[str]:
        return ["a color"]

    def sample(self, network: nn.Module, prompts: Sequence[str], seeds: Sequence[int], _: SampleSettings) -> Tensor:
        color = network(torch.ones(len(seeds), 1)).clamp(-1, 1)
        return color[:, :, None, None].expand(-1, -1, self.side, self.side)

    def init_from(self, network: nn.Module, weights: dict[str, Tensor], origin: str) -> None:
        network.load_state_dict(weights)

    def flops_per_image(self) -> int:
        return 18

    def tokens_per_image(self) -> int:
        return 1

    def summary(self) -> str:
        return "a toy"

    def describe(self) -> dict[str, Any]:
        return {"family": "toy", "model": "Toy", "img_size": self.side, "label_names": []}

    @staticmethod
    def export(weights: Mapping[str, Tensor], description: Mapping[str, Any], folder: Path) -> str:
        return "nothing"


def test_a_registry_line_is_enough_to_train_resume_and_sample(
    photo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = ModelFamily(key="toy", name="Toy", name_pattern="Toy", spec=f"{__name__}:ToySpec")
    monkeypatch.setattr(spec, "FAMILIES", (*FAMILIES, toy))
    for name, lengths in (("through", (4,)), ("resumed", (2, 4))):
        for steps in lengths:
            train("--model", "Toy", "--data_path", photo_folder, "--results_dir", tmp_path / name, "--run_name", name,
                  "--max_steps", steps)  # fmt: skip
    through, resumed = (only_run(tmp_path / name) for name in ("through", "resumed"))
    one, two = tensors(last_checkpoint(through)), tensors(last_checkpoint(resumed))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert (through / "samples" / "sheet.png").is_file()
    assert metrics(through)[-1]["step"] == 4


def test_every_family_is_found_by_name_and_key_and_has_a_spec() -> None:
    for name, key in (
        ("JiT-B/4", "jit"),
        ("hunyuandit", "hunyuandit"),
        ("HunyuanDiT", "hunyuandit"),
        ("diffusers", "diffusers"),
    ):
        assert find_family(name).key == key and find_family_by_key(key) is find_family(name)
    for family in FAMILIES:
        assert callable(family.spec_class().from_settings) and callable(family.spec_class().export)
    assert families_with("supports_lora") == "HunyuanDiT, diffusers" and families_with("supports_fp8") == "JiT"


def test_unknown_names_are_refused_with_every_pattern() -> None:
    with pytest.raises(UserError) as caught:
        find_family("unet")
    assert all(family.name_pattern in caught.value.why for family in FAMILIES)
    with pytest.raises(ValueError, match="unknown model family 'gan'"):
        find_family_by_key("gan")


def test_needs_no_torch() -> None:
    code = (
        "import sys; from muralist.models.spec import find_family; find_family('JiT-B/4'); find_family('HunyuanDiT');"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
