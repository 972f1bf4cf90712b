"""`muralist export`: the exported folder of a run or an official checkpoint has equal weights and generates equal images."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from muralist.cli import main
from muralist.core.errors import UserError
from muralist.diffusion import samplers
from muralist.models import jit
from muralist.models.export import infer_jit_config, jit_arguments, read_jit_folder, write_jit_folder
from muralist.models.jit import JiT
from tests.support.disks import small_disk
from tests.support.runs import last_checkpoint, only_run, train


def image(network: nn.Module, null_label: int) -> Tensor:
    noise = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    settings = samplers.SamplerSettings(steps=3, guidance=2.0)
    return samplers.sample(network.eval(), noise, torch.tensor([0, 1]), null_label, settings)


def exported(folder: Path) -> tuple[dict, dict[str, Tensor], JiT]:
    config, state = read_jit_folder(folder)
    network = JiT(**jit_arguments(config))
    network.load_state_dict(state, strict=True)
    return config, state, network


def assert_same(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


@pytest.fixture(scope="module")
def run(photo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    results = tmp_path_factory.mktemp("results")
    train("--data_path", photo_folder, "--enable_condition", "--max_steps", "3", "--results_dir", results,
          "--samples_per_gpu", "0", "--prediction", "v")  # fmt: skip
    return only_run(results)


@pytest.mark.parametrize("which", ["model", "ema1", "ema2"])
def test_exported_run_has_equal_weights_and_generates_the_same_image(run: Path, tmp_path: Path, which: str) -> None:
    assert main(["export", str(run), str(tmp_path / "out"), "--weights", which]) == 0
    expected = load_file(last_checkpoint(run) / f"{which}.safetensors")
    config, state, network = exported(tmp_path / "out")
    assert_same(state, expected)
    assert config["label_names"] == ["meadow", "sunrise"]
    assert config["objective"]["prediction"] == "v"
    assert (config["input_size"], config["patch_size"], config["num_classes"]) == (16, 8, 2)
    original = jit.build("JiT-T/8", 16, 2)
    original.load_state_dict(expected)
    assert torch.equal(image(network, 2), image(original, 2))
    assert image(network, 2).std() > 0


def test_ema_is_the_default_and_a_checkpoint_folder_is_accepted(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(last_checkpoint(run)), str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'out'}: ema1 weights of {last_checkpoint(run)}, 16 px")
    config, state, _ = exported(tmp_path / "out")
    assert_same(state, load_file(last_checkpoint(run) / "ema1.safetensors"))
    assert config["label_names"] == ["meadow", "sunrise"]


def test_official_checkpoint_exports_equal_weights_and_generates_the_same_image(tmp_path: Path) -> None:
    network = jit.build("JiT-T/8", 16, 5)
    network.init_weights(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.01 * torch.sin(torch.arange(parameter.numel())).view_as(parameter))
    state = {f"net.{name}": value for name, value in network.state_dict().items()}
    averages = {
        f"model_ema{index}": {
            name: nn.Parameter(value * (1 + index), requires_grad=False) for name, value in state.items()
        }
        for index in (1, 2)
    }
    flags = argparse.Namespace(model="JiT-T/8", img_size=16)
    torch.save({"model": state, **averages, "epoch": 3, "args": flags}, tmp_path / "checkpoint-last.pth")

    assert main(["export", str(tmp_path / "checkpoint-last.pth"), str(tmp_path / "plain"), "--weights", "model"]) == 0
    config, read, loaded = exported(tmp_path / "plain")
    assert_same(read, network.state_dict())
    assert "label_names" not in config
    assert config["num_classes"] == 5
    assert torch.equal(image(loaded, 5), image(network, 5))
    assert image(loaded, 5).std() > 0

    assert main(["export", str(tmp_path), str(tmp_path / "average")]) == 0  # the folder that holds it, ema1
    assert_same(exported(tmp_path / "average")[1], {name: value * 2 for name, value in network.state_dict().items()})


def test_an_exported_run_can_be_fine_tuned(run: Path, photo_folder: Path, tmp_path: Path) -> None:
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    train("--data_path", photo_folder, "--enable_condition", "--max_steps", "1", "--learning_rate", "1e-30",
          "--init_from", tmp_path / "out", "--results_dir", tmp_path / "results", "--samples_per_gpu", "0")  # fmt: skip
    weights = load_file(last_checkpoint(only_run(tmp_path / "results")) / "model.safetensors")
    expected = load_file(last_checkpoint(run) / "ema1.safetensors")
    for name, value in weights.items():
        assert torch.equal(value, expected[name]) or name.startswith("y_embedder"), name


def test_user_errors_have_no_traceback(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    (tmp_path / "broken").mkdir()
    for name in ("manifest.json", "ema1.safetensors"):
        (tmp_path / "broken" / name).write_bytes((last_checkpoint(run) / name).read_bytes())
    (tmp_path / "broken" / "manifest.json").write_text(json.dumps({"step": 3}))
    cases = {
        ("nowhere", "out"): "There are no weights at nowhere",
        (str(run), str(tmp_path / "mine")): "exists and is not an export",
        (str(run),): "Missing argument DESTINATION",
        (str(run), "out", "--weights", "ema3"): "expected model, ema1 or ema2",
        (str(tmp_path / "broken"), str(tmp_path / "out")): "manifest.json is damaged",
    }
    for arguments, sentence in cases.items():
        assert main(["export", *arguments]) == 1
        said = capsys.readouterr()
        assert sentence in said.err
        assert "Traceback" not in said.err
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "x"
    assert not (tmp_path / "out").exists()


def test_full_disk_is_a_user_error_and_leaves_nothing(tmp_path: Path) -> None:
    network = jit.build("JiT-T/8", 16, 2)
    network.init_weights(0)
    state = network.state_dict()
    with small_disk(tmp_path / "disk") as disk:  # a megabyte, for weights of eight
        with pytest.raises(UserError, match="No space left on the disk"):
            write_jit_folder(disk / "export", state, infer_jit_config(state))
        assert not list(disk.iterdir())


@pytest.mark.parametrize("given", ["run", "checkpoint", "file"])
def test_a_damaged_checkpoint_is_not_exported(
    run: Path, tmp_path: Path, given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, tmp_path / "run")
    checkpoint = last_checkpoint(tmp_path / "run")
    source = {"run": tmp_path / "run", "checkpoint": checkpoint, "file": checkpoint / "ema1.safetensors"}[given]
    weights = checkpoint / "ema1.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1  # of the last weight: the file is as readable as before
    weights.write_bytes(data)
    assert main(["export", str(source), str(tmp_path / "out")]) == 1
    assert "is damaged: ema1.safetensors does not match its hash" in capsys.readouterr().err
    (checkpoint / "manifest.json").unlink()
    assert main(["export", str(source), str(tmp_path / "out")]) == 1
    assert "is not a complete checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
