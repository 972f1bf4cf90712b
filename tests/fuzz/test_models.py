"""Weights, checkpoints and model folders, damaged or malformed: read, or refused with a message."""

from __future__ import annotations

import hashlib
import json
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from muralist.core.errors import UserError
from muralist.evaluate.inception import load_inception
from muralist.generate.model_info import check_adapters, inspect_model
from muralist.models import weights
from muralist.models.jit import JiT
from muralist.models.jit_spec import infer_jit_config, read_jit_folder, write_jit_folder
from muralist.settings import GenerateSettings
from muralist.train import checkpoint
from tests.fuzz.damage import (
    BAD_JSON,
    damaged,
    damaged_json,
    examples,
    fresh_copy,
    json_bytes,
    nonsense,
    refused_or,
    untouched,
)

SIZES = {"hidden_size": 24, "depth": 1, "num_heads": 2, "num_classes": 3, "bottleneck_dim": 5, "in_context_len": 2}
FACTS = {"images": 12, "total_batch": 4, "loss_scale": {}, "epoch_loss": [0.1, 3]}
MODEL = {
    "family": "jit", "model": "JiT-T/4", "img_size": 12, "label_names": ["a", "b", "c"],
    "objective": {"prediction": "x", "loss": "v", "p_mean": -0.8, "p_std": 0.8, "noise_scale": 1.0, "t_eps": 0.05,
                  "label_drop_prob": 0.1},
}  # fmt: skip


def _network() -> dict[str, torch.Tensor]:
    network = JiT(12, 4, **SIZES, in_context_start=0)
    network.init_weights(0)
    return {name: value.contiguous() for name, value in network.state_dict().items()}


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    return _network()


def _generate(path: Path) -> Any:
    settings = GenerateSettings(prompts_csv="", output_dir="", model_path=str(path))
    return refused_or(lambda: inspect_model(settings))


@pytest.mark.parametrize("kind", ["safetensors", "pth"])
@examples(33)
@given(data=st.data())
def test_damaged_weights_are_read_or_refused(kind: str, data: st.DataObject, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.getbasetemp() / f"weights.{kind}"
    tensors = {"a": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}
    if kind == "safetensors":
        intact = save(tensors)
    else:
        torch.save({"model_ema1": tensors, "epoch": 3}, path)
        intact = path.read_bytes()
    path.unlink(missing_ok=True)
    path.write_bytes(data.draw(damaged(intact)))
    found = refused_or(lambda: weights.read_weights(path))
    assert isinstance(found, UserError) or all(isinstance(value, torch.Tensor) for value in found.values())
    refused_or(lambda: load_inception(path))


_ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HEADERS = [
    {"a": _ENTRY, "b": _ENTRY},
    {"a": _ENTRY | {"data_offsets": [0, 2**40]}},
    {"a": _ENTRY | {"data_offsets": [8, 0]}},
    {"a": _ENTRY | {"data_offsets": [-8, 0]}},
    {"a": _ENTRY | {"shape": [2**62, 4]}},
    {"a": _ENTRY | {"shape": [2**40, 0], "data_offsets": [0, 0]}},
    {"a": _ENTRY | {"shape": []}},
    {"a": _ENTRY | {"dtype": "F9000"}},
    {"a": {}},
    {"": _ENTRY},
    {"__metadata__": {"a": 5}},
    [],
]


@pytest.mark.parametrize("header", HEADERS, ids=repr)
@pytest.mark.parametrize("length", [None, 0, 1, 2**40, 2**64 - 1])
def test_safetensors_with_a_lying_header(header: Any, length: int | None, tmp_path: Path) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "a.safetensors").write_bytes(
        struct.pack("<Q", len(text) if length is None else length) + text + b"\0" * 8
    )
    refused_or(lambda: weights.read_weights(tmp_path / "a.safetensors"))
    _generate(tmp_path / "a.safetensors")


@examples(33)
@given(data=st.data())
def test_tensors_of_other_shapes_are_refused(data: st.DataObject, state: dict[str, torch.Tensor]) -> None:
    names = ["x_embedder.proj1.weight", "blocks.0.attn.q_norm.weight", "pos_embed", "y_embedder.embedding_table.weight"]
    name = data.draw(st.sampled_from(names))
    shape = data.draw(st.lists(st.sampled_from([0, 1, 2, 5, 1000]), max_size=5))
    changed = state | {name: torch.empty(shape, device="meta") if shape else torch.empty(())}
    refused_or(lambda: infer_jit_config(changed, in_context_start=0))


@pytest.fixture(scope="module")
def export(state: dict[str, torch.Tensor], tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("export") / "jit"
    config = infer_jit_config(state, in_context_start=0)
    write_jit_folder(folder, state, config | {"label_names": ["a", "b", "c"], "objective": MODEL["objective"]})
    assert not isinstance(_generate(folder), UserError)
    return folder


@examples(44)
@given(data=st.data())
def test_damaged_exports_are_read_or_refused(export: Path, data: st.DataObject) -> None:
    copy = fresh_copy(export)
    (copy / "config.json").write_bytes(data.draw(damaged_json(json.loads((export / "config.json").read_text()))))
    with untouched(export.parent):
        _generate(copy)
        refused_or(lambda: read_jit_folder(copy))


@pytest.fixture(scope="module")
def run(state: dict[str, torch.Tensor], tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    tensors = {"a.exp_avg": torch.ones(3), "a.step": torch.tensor(1.0)}
    checkpoint.write(folder / "checkpoints", 3, {"model": state, "ema1": state}, tensors, FACTS | {"model": MODEL})
    assert not isinstance(_generate(folder), UserError)
    return folder


def _use(run: Path) -> None:
    folder = run / "checkpoints" / "step_0000003"
    with untouched(run):
        refused_or(lambda: checkpoint.read_manifest(folder))
        refused_or(lambda: checkpoint.newest_intact(run / "checkpoints"))
        refused_or(lambda: weights.read_weights(run))
        _generate(run)


@examples(44)
@given(data=st.data())
def test_damaged_checkpoint_manifests_are_read_or_refused(run: Path, data: st.DataObject) -> None:
    copy = fresh_copy(run)
    path = copy / "checkpoints" / "step_0000003" / "manifest.json"
    path.write_bytes(data.draw(damaged_json(json.loads(path.read_text()))))
    _use(copy)


@examples(44)
@given(data=st.data())
def test_malformed_manifests_with_a_valid_checksum_are_read_or_refused(run: Path, data: st.DataObject) -> None:
    """The checksum detects damage, not malice: anybody can compute one."""
    copy = fresh_copy(run)
    path = copy / "checkpoints" / "step_0000003" / "manifest.json"
    intact = json.loads(path.read_text())
    del intact["sha256"]
    manifest = data.draw(nonsense(intact))
    if isinstance(manifest, dict):
        manifest["sha256"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    path.write_bytes(json_bytes(manifest))
    _use(copy)


@examples(16)
@given(data=damaged(b"step_0000003\n"))
def test_damaged_names_of_the_latest_checkpoint(run: Path, data: bytes) -> None:
    copy = fresh_copy(run)
    (copy / "checkpoints" / "latest").write_bytes(data)
    _use(copy)


@examples(44)
@given(data=st.data())
def test_a_damaged_state_is_read_or_refused(run: Path, data: st.DataObject) -> None:
    copy = fresh_copy(run) / "checkpoints" / "step_0000003"
    name = data.draw(st.sampled_from([".metadata", ".metadata", "__0_0.distcp"]))
    path = copy / "state" / name
    path.write_bytes(data.draw(damaged(path.read_bytes())))
    refused_or(lambda: checkpoint.read_state(copy, {"a.exp_avg": torch.zeros(3), "a.step": torch.tensor(0.0)}))


@pytest.mark.parametrize("content", [None, 5, {}, "text", OSError, {"a": torch.float32}, b"x" * 100])
def test_malformed_tables_of_contents_are_refused(content: Any, run: Path) -> None:
    copy = fresh_copy(run) / "checkpoints" / "step_0000003"
    (copy / "state" / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(UserError, match="cannot be read"):
        checkpoint.read_state(copy, {"a.exp_avg": torch.zeros(3)})


INDEX = {
    "_class_name": "StableDiffusionPipeline", "_diffusers_version": "0.42.1",
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"], "feature_extractor": [None, None], "requires_safety_checker": False,
}  # fmt: skip


@pytest.mark.parametrize("file", ["model_index.json", "vae/config.json", "transformer/config.json"])
@examples(27)
@given(data=st.data())
def test_damaged_pipelines_are_read_or_refused(file: str, data: st.DataObject, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("pipeline")
    documents = {
        "model_index.json": INDEX,
        "vae/config.json": {"scale_factor_temporal": 4},
        "transformer/config.json": {"guidance_embeds": True},
    }
    for name, document in documents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(document))
    (folder / "unet").mkdir()
    (folder / file).write_bytes(data.draw(damaged_json(documents[file])))
    with untouched(folder):
        _generate(folder)


@pytest.mark.parametrize("text", ["", ":", ":1", "a:nan", "a:inf", "x" * 5000, "a:1:2", "a\0b", "/:", "..:0.5"])
def test_malformed_adapters_are_refused(text: str) -> None:
    found = refused_or(lambda: check_adapters([text]))
    assert isinstance(found, UserError) or found[0].path.exists()


@examples(27)
@given(data=damaged_json({"r": 2, "lora_alpha": 2, "use_rslora": False}))
def test_damaged_adapters_are_read_or_refused(data: bytes, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("adapter")
    (folder / "adapter_config.json").write_bytes(data)
    pair = {"base_model.model.blocks.0.attn1.to_q.lora_A.weight": torch.ones(2, 4)}
    (folder / "adapter_model.safetensors").write_bytes(save(pair))
    refused_or(lambda: weights.read_weights(folder))


@pytest.mark.parametrize("data", BAD_JSON)
def test_configs_that_are_not_json_are_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(data)
    assert isinstance(_generate(tmp_path), UserError)
