"""Reading and exporting weights of every kind bit for bit, and refusing files that are damaged or run code."""

from __future__ import annotations

import argparse
import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from muralist.cli import main
from muralist.core import run_dir
from muralist.core.errors import UserError
from muralist.diffusion import samplers
from muralist.models import jit, jit_spec, weights
from muralist.models.jit import JiT
from tests.support.disks import small_disk
from tests.support.runs import last_checkpoint, only_run, train

SIZES = {"hidden_size": 24, "depth": 2, "num_heads": 2, "num_classes": 3, "bottleneck_dim": 5, "in_context_len": 2}
State = dict[str, Tensor]


@pytest.fixture(scope="module")
def net() -> JiT:
    network = JiT(12, 4, **SIZES, in_context_start=1)
    network.init_weights(0)
    return network


@pytest.fixture(scope="module")
def config(net) -> dict:
    return jit_spec.infer_jit_config(net.state_dict(), in_context_start=1)


def scaled(net: nn.Module, factor: float) -> State:
    return {name: value * factor for name, value in net.state_dict().items()}


def equal(one: State, two: State) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def official_checkpoint(net: nn.Module, **more: object) -> dict:
    """A checkpoint as the official code saves it: wrapped names, EMAs as parameters, the optimizer and the flags."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    sets = {"model": scaled(net, 1), "model_ema1": scaled(net, 2), "model_ema2": scaled(net, 3)}
    wrapped = {
        key: {f"net.{n}": v if key == "model" else nn.Parameter(v, requires_grad=False) for n, v in state.items()}
        for key, state in sets.items()
    }
    flags = argparse.Namespace(model="JiT-B/16", lr=None, cfg=2.9, betas=(0.9, 0.95))
    return wrapped | {"optimizer": optimizer.state_dict(), "epoch": 7, "args": flags} | more


@pytest.fixture
def official_file(net, tmp_path) -> Path:
    torch.save(official_checkpoint(net), tmp_path / "checkpoint-last.pth")
    return tmp_path / "checkpoint-last.pth"


@pytest.mark.parametrize(("which", "factor"), [("model", 1), ("ema1", 2), ("ema2", 3)])
def test_official_checkpoint(net, official_file, which, factor):
    for path in (official_file, str(official_file), official_file.parent):
        state = weights.read_weights(path, which)
        assert equal(state, scaled(net, factor))
        assert not any(isinstance(value, nn.Parameter) for value in state.values())


def test_official_weights_outlive_their_file(net, official_file):
    state = weights.read_weights(official_file)  # the first EMA
    official_file.write_bytes(b"\0" * official_file.stat().st_size)
    assert equal(state, scaled(net, 2))


@pytest.mark.parametrize(("which", "factor"), [("model", 1), ("ema1", 2), ("ema2", 3)])
def test_checkpoint_folder_and_run(net, tmp_path, which, factor):
    folder = tmp_path / "checkpoints" / "step_0000500"
    folder.mkdir(parents=True)
    for name, scale in (("model", 1), ("ema1", 2), ("ema2", 3)):
        save_file(scaled(net, scale), folder / f"{name}.safetensors")
    (tmp_path / "checkpoints" / "latest").write_text("step_0000500\n")
    for path in (folder, tmp_path, folder / f"{which}.safetensors"):
        assert equal(weights.read_weights(path, which), scaled(net, factor))
    (folder / f"{which}.safetensors").unlink()
    for path in (folder, tmp_path):
        with pytest.raises(UserError, match=which):
            weights.read_weights(path, which)


def test_export_comes_back_bit_equal(net, config, tmp_path):
    folder = tmp_path / "new" / "export"
    more = {"label_names": ["car", "tree", "Straße"], "objective": {"prediction": "x", "noise_scale": 0.25}}
    jit_spec.write_jit_folder(folder, net.state_dict(), config | more)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "diffusion_pytorch_model.safetensors",
        "model_index.json",
        "pipeline.py",
    ]
    assert [path.name for path in folder.parent.iterdir()] == ["export"]
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1
    read, state = jit_spec.read_jit_folder(folder)
    assert {name: read[name] for name in more} == more
    assert read["_class_name"] == "JiTTransformer2DModel"
    assert equal(state, net.state_dict())
    assert equal(weights.read_weights(folder, "ema2"), net.state_dict())
    loaded = JiT(**jit_spec.jit_arguments(read))
    loaded.load_state_dict(state, strict=True)
    x, t, y = torch.ones(1, 3, 12, 12), torch.ones(1), torch.tensor([2])
    assert torch.equal(loaded(x, t, y), net(x, t, y))


def test_export_keeps_bfloat16_and_takes_transposed_tensors(net, config, tmp_path):
    state = {name: value.bfloat16() for name, value in net.state_dict().items()}
    state["t_embedder.mlp.2.weight"] = state["t_embedder.mlp.2.weight"].t().contiguous().t()
    jit_spec.write_jit_folder(tmp_path / "export", state, config)
    read = jit_spec.read_jit_folder(tmp_path / "export")[1]
    assert equal(read, state) and {value.dtype for value in read.values()} == {torch.bfloat16}


def test_export_replaces_an_export_and_nothing_else(net, config, tmp_path):
    folder = tmp_path / "export"
    folder.mkdir()
    for factor in (1, 2):
        jit_spec.write_jit_folder(folder, scaled(net, factor), config)
    assert equal(weights.read_weights(folder), scaled(net, 2))
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    precious = tmp_path / "photos"
    precious.mkdir()
    (precious / "holiday.png").write_bytes(b"sun")
    with pytest.raises(UserError, match="photos exists and is not an export"):
        jit_spec.write_jit_folder(precious, net.state_dict(), config)
    assert (precious / "holiday.png").read_bytes() == b"sun"


@pytest.mark.parametrize(
    ("owner", "step"),
    [(jit_spec, "save_file"), (jit_spec, "atomic_write_json"), (run_dir, "fsync"), (Path, "replace")],
)
def test_failed_export_leaves_the_old_one(net, config, tmp_path, monkeypatch, owner, step):
    jit_spec.write_jit_folder(tmp_path / "export", net.state_dict(), config)
    original = getattr(owner, step)

    def full(*arguments: Any, **_: object) -> object:
        if step == "replace" and not (arguments[0].suffix == ".tmp" and arguments[0].is_dir()):
            return original(*arguments)  # of files, and of the old export back to its place
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(owner, step, full)
        with pytest.raises(UserError, match="No space left"):
            jit_spec.write_jit_folder(tmp_path / "export", scaled(net, 2), config)
    assert equal(weights.read_weights(tmp_path / "export"), net.state_dict())
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json cannot be read"),
        (lambda folder: (folder / "config.json").write_text('{"_class_na'), "config.json cannot be read"),
        (lambda folder: (folder / "config.json").write_text("[]"), "does not describe a JiT"),
        (lambda folder: (folder / "config.json").write_text('{"_class_name": "UNet"}'), "does not describe a JiT"),
        (lambda folder: change_config(folder, depth=3), r"blocks\.2\."),
        (lambda folder: change_config(folder, depth=None), "No network has the sizes in .*depth is None"),
        (lambda folder: change_config(folder, depth="many"), "No network has the sizes in .*depth is 'many'"),
        (lambda folder: change_config(folder, num_heads=0), "No network has these sizes"),
        (lambda folder: (folder / weights.WEIGHTS_FILE).unlink(), weights.WEIGHTS_FILE),
        (lambda folder: os.truncate(folder / weights.WEIGHTS_FILE, 9000), f"{weights.WEIGHTS_FILE} cannot be read"),
    ],
)
def test_damaged_exports_are_refused(net, config, tmp_path, damage: Callable[[Path], None], message):
    jit_spec.write_jit_folder(tmp_path / "export", net.state_dict(), config)
    damage(tmp_path / "export")
    with pytest.raises(UserError, match=message):
        jit_spec.read_jit_folder(tmp_path / "export")


def change_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


@pytest.mark.parametrize("classes", ["null", "1.5", "true", '"3"', "[3]", "-1"])
def test_config_with_invalid_sizes_is_refused_before_weights_are_read(classes: str, config, tmp_path):
    """As `generate` reads it; found by `make fuzz`."""
    written = json.dumps({"_class_name": jit_spec.JIT_CLASS_NAME, **config, "num_classes": "here"})
    (tmp_path / "config.json").write_text(written.replace('"here"', classes))
    with pytest.raises(UserError, match=r"No network has the sizes in .*num_classes is"):
        jit_spec.read_jit_spec(tmp_path, {}, "ema1")


def test_export_of_weights_that_do_not_fit_is_refused(net, config, tmp_path):
    with pytest.raises(UserError, match="pos_embed"):
        jit_spec.write_jit_folder(tmp_path / "export", net.state_dict(), config | {"input_size": 16})
    assert not any(tmp_path.iterdir())


class Payload:
    """A pickle that runs a command when it is read without care."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable, tuple]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("place", ["args", "model", "in a namespace"])
def test_foreign_code_is_named_and_not_run(net, tmp_path, place):
    payload = Payload(tmp_path / "ran")
    content = {"args": argparse.Namespace(x=payload)} if place == "in a namespace" else {place: payload}
    torch.save(official_checkpoint(net, **content), tmp_path / "evil.pth")
    with pytest.raises(UserError, match=r"evil\.pth was not read, because it asks to run \w+\.mkdir"):
        weights.read_weights(tmp_path / "evil.pth")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kept", [0, 1, 1000, 0.5, 0.999])
def test_truncated_files_are_named(net, official_file, tmp_path, kept):
    safetensors = tmp_path / "model.safetensors"
    save_file(net.state_dict(), safetensors)
    for file in (official_file, safetensors):
        size = file.stat().st_size
        os.truncate(file, kept if isinstance(kept, int) else int(size * kept))
        with pytest.raises(UserError, match=f"{file.name} cannot be read"):
            weights.read_weights(file)


def test_one_changed_byte_is_noticed_in_a_pth(official_file):
    content = official_file.read_bytes()
    for position in range(1000, len(content) - 2000, len(content) // 15):
        changed = bytearray(content)
        changed[position] ^= 0x10
        official_file.write_bytes(changed)
        try:
            state = weights.read_weights(official_file)
        except UserError as error:
            assert "checkpoint-last.pth cannot be read" in str(error)
        else:  # the byte lay in the padding between the tensors
            official_file.write_bytes(content)
            assert equal(state, weights.read_weights(official_file))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.pth", None, r"no weights at .*missing\.pth"),
        ("missing.safetensors", None, r"no weights at .*missing\.safetensors"),
        ("image.png", b"png", "not a weights file"),
        ("text.pth", b"hello" * 100, r"text\.pth cannot be read"),
        ("text.safetensors", b"hello" * 100, r"text\.safetensors cannot be read"),
    ],
)
def test_files_without_weights_are_named(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        weights.read_weights(tmp_path / name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"state_dict": {}, "epoch": 3}, "has no weights named model_ema1. It holds: state_dict, epoch"),
        ([1, 2], "has no weights named model_ema1. It holds: list"),
        ({"model_ema1": {"net.pos_embed": "three"}}, "other than a tensor under model_ema1: net.pos_embed"),
    ],
)
def test_pth_files_of_another_kind_say_what_they_hold(tmp_path, content, message):
    torch.save(content, tmp_path / "other.pth")
    with pytest.raises(UserError, match=message):
        weights.read_weights(tmp_path / "other.pth")


def test_folder_without_weights_is_named(tmp_path):
    with pytest.raises(UserError, match=f"no ema1 weights in the folder {tmp_path}"):
        weights.read_weights(tmp_path)


@pytest.mark.parametrize(
    ("name", "size", "classes"), [("JiT-T/4", 32, 10), ("JiT-B/16", 256, 1000), ("JiT-H/32", 512, 1)]
)
def test_config_is_inferred_from_shapes(name, size, classes):
    with torch.device("meta"):
        source = jit.build(name, size, classes)
        inferred = JiT(**jit_spec.infer_jit_config(source.state_dict()))
    shapes = [{n: v.shape for n, v in network.state_dict().items()} for network in (source, inferred)]
    assert shapes[0] == shapes[1]
    assert (inferred.in_context_start, inferred.grid, inferred.head_dim, inferred.num_classes) == (
        source.in_context_start,
        source.grid,
        source.head_dim,
        classes,
    )


def test_unknown_sizes_need_in_context_start(net):
    with pytest.raises(UserError, match="24 channels and 2 blocks"):
        jit_spec.infer_jit_config(net.state_dict())
    assert jit_spec.infer_jit_config(net.state_dict(), in_context_start=1)["in_context_start"] == 1
    plain = JiT(12, 4, **SIZES | {"in_context_len": 0})
    inferred = jit_spec.infer_jit_config(plain.state_dict())
    assert (inferred["in_context_len"], inferred["in_context_start"]) == (0, 0)


def test_weights_of_another_network_are_refused(net):
    with pytest.raises(UserError, match="not the weights of a JiT network"):
        jit_spec.infer_jit_config({"conv.weight": torch.ones(1)})
    broken = net.state_dict()
    del broken["blocks.1.mlp.w3.bias"]
    with pytest.raises(UserError, match=r"blocks\.1\.mlp\.w3\.bias"):
        jit_spec.infer_jit_config(broken, in_context_start=1)


def image(network: nn.Module, null_label: int) -> Tensor:
    noise = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    settings = samplers.SamplerSettings(steps=3, guidance=2.0)
    return samplers.sample(network.eval(), noise, torch.tensor([0, 1]), null_label, settings)


def exported(folder: Path) -> tuple[dict, State, JiT]:
    config, state = jit_spec.read_jit_folder(folder)
    network = JiT(**jit_spec.jit_arguments(config))
    network.load_state_dict(state, strict=True)
    return config, state, network


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
    assert equal(state, expected)
    assert config["label_names"] == ["meadow", "sunrise"]
    assert config["objective"]["prediction"] == "v"
    assert (config["input_size"], config["patch_size"], config["num_classes"]) == (16, 8, 2)
    original = jit.build("JiT-T/8", 16, 2)
    original.load_state_dict(expected)
    assert torch.equal(image(network, 2), image(original, 2))
    assert image(network, 2).std() > 0


def test_official_checkpoint_exports_equal_weights_and_generates_the_same_image(tmp_path: Path) -> None:
    network = jit.build("JiT-T/8", 16, 5)
    network.init_weights(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.01 * torch.sin(torch.arange(parameter.numel())).view_as(parameter))
    torch.save(official_checkpoint(network), tmp_path / "checkpoint-last.pth")
    assert main(["export", str(tmp_path / "checkpoint-last.pth"), str(tmp_path / "plain"), "--weights", "model"]) == 0
    config, read, loaded = exported(tmp_path / "plain")
    assert equal(read, network.state_dict())
    assert "label_names" not in config
    assert config["num_classes"] == 5
    assert torch.equal(image(loaded, 5), image(network, 5))
    assert image(loaded, 5).std() > 0

    assert main(["export", str(tmp_path), str(tmp_path / "average")]) == 0  # the folder that holds it, ema1
    assert equal(exported(tmp_path / "average")[1], scaled(network, 2))


def test_a_checkpoint_is_exported_and_fine_tuned(
    run: Path, photo_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(last_checkpoint(run)), str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'out'}: ema1 weights of {last_checkpoint(run)}, 16 px")
    expected = load_file(last_checkpoint(run) / "ema1.safetensors")
    assert equal(exported(tmp_path / "out")[1], expected)
    train("--data_path", photo_folder, "--enable_condition", "--max_steps", "1", "--learning_rate", "1e-30",
          "--init_from", tmp_path / "out", "--results_dir", tmp_path / "results", "--samples_per_gpu", "0")  # fmt: skip
    weights = load_file(last_checkpoint(only_run(tmp_path / "results")) / "model.safetensors")
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
        ("nowhere", "out"): "The model nowhere was not found.",
        ("org/name", "out"): "on this machine; a model of the Hugging Face Hub needs no export.",
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
            jit_spec.write_jit_folder(disk / "export", state, jit_spec.infer_jit_config(state))
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
