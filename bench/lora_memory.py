"""Measure memory and speed of LoRA on a network of Wan-14B's shape with random weights: bench/results/lora_memory_h200.json.

python bench/lora_memory.py RECORD.json [--layers 40] [--rank 64] [--only NAME ...] [--tiny]

Every setting runs in a process of its own, by the code of `muralist train`: spec, optimizer step, EMA. VAE and text encoder
are small ones, because encoders leave the GPU when everything is encoded. `--tiny` is for a CPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from bench.measure_training import hardware, versions
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from safetensors.torch import save_file
from torch import Tensor
from transformers import UMT5Config, UMT5EncoderModel

from muralist.core.run_dir import atomic_write_json
from muralist.data.loader import Batch
from muralist.demo.small_hunyuan_dit import assemble_small_hunyuan
from muralist.models import frozen_weights
from muralist.models.spec import build_spec
from muralist.settings import TrainSettings
from muralist.train.distributed import World
from muralist.train.parallel import build_strategy
from muralist.train.schedule import BatchPlan, TrainingClock, learning_rate
from muralist.train.step import TrainState, autocast_dtype

_WAN: dict[str, Any] = {"num_attention_heads": 40, "attention_head_dim": 128, "ffn_dim": 13824, "text_dim": 4096}
_TINY: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 16, "ffn_dim": 64, "text_dim": 32}
_SIZE, _TINY_SIZE = (480, 832), (64, 64)
_WARM_UP, _STEPS, _SECONDS = 3, 10, 20.0
_TIMEOUT = 240

SETTINGS: dict[str, dict[str, Any]] = {
    "bf16": {"base_precision": "bf16"},
    "bf16, checkpointing": {"base_precision": "bf16", "gradient_checkpointing": True},
    "fp8, checkpointing": {"base_precision": "fp8", "gradient_checkpointing": True},
    "fp8, checkpointing, swap 20": {"base_precision": "fp8", "gradient_checkpointing": True, "swap_blocks": 20},
    "bf16, checkpointing, swap 36": {"base_precision": "bf16", "gradient_checkpointing": True, "swap_blocks": 36},
    "nf4, checkpointing": {"base_precision": "nf4", "gradient_checkpointing": True},
    "nf4, checkpointing, swap 36": {"base_precision": "nf4", "gradient_checkpointing": True, "swap_blocks": 36},
    "fp8, checkpointing, compiled": {"base_precision": "fp8", "gradient_checkpointing": True, "compile": True},
}


def build_folder(folder: Path, layers: int, tiny: bool) -> Path:
    """Write a Wan pipeline without the weights of its network."""
    torch.manual_seed(0)
    config = _TINY if tiny else _WAN
    tokenizer: Any = assemble_small_hunyuan().tokenizer_2  # the vocabulary does not matter here
    text = UMT5Config(
        vocab_size=len(tokenizer), d_model=config["text_dim"], d_kv=16, d_ff=64, num_layers=1, num_heads=2
    )
    with torch.device("meta"):
        network: Any = WanTransformer3DModel(num_layers=1, **config)
    network.register_to_config(num_layers=layers)
    pipeline: Any = WanPipeline(
        tokenizer=tokenizer,
        text_encoder=UMT5EncoderModel(text).eval(),
        vae=AutoencoderKLWan(base_dim=8),
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        transformer=None,
    )
    pipeline.register_modules(transformer=network)
    network.save_pretrained = network.save_config  # the folder has no weights
    pipeline.save_pretrained(folder)
    save_file({"none": torch.zeros(1)}, folder / "transformer" / "diffusion_pytorch_model.safetensors")
    return folder


def random_weights(network: Any, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield weights for the parameters of a network, on the device, in bf16 as published files have them."""
    torch.manual_seed(0)
    for name, parameter in network.named_parameters():
        value = torch.zeros(parameter.shape, dtype=torch.bfloat16, device=device)
        if parameter.ndim > 1:
            value.normal_(std=0.02)
        elif name.endswith("weight"):
            value.fill_(1.0)
        yield name, value


def measure(name: str, layers: int, rank: int, tiny: bool) -> dict[str, Any]:
    """Train a few steps with one setting."""
    world, chosen = World(), dict(SETTINGS[name])
    compiled, size = chosen.pop("compile", False), _TINY_SIZE if tiny else _SIZE
    if chosen.get("swap_blocks", 0) > layers:
        chosen["swap_blocks"] = layers // 2
    began = time.perf_counter()
    with TemporaryDirectory() as folder:
        path = str(build_folder(Path(folder) / "wan", layers, tiny))
        settings = TrainSettings(
            data={"path": "driving_world", "batch_size": 1},  # type: ignore[arg-type]
            model={"path": path, "img_size": size, "training_parts": "lora", "lora_rank": rank, **chosen},  # type: ignore[arg-type]
            optim={"warmup_steps": 0, "learning_rate": 1e-4},  # type: ignore[arg-type]
            use_amp=True,
        )
        spec: Any = build_spec(settings, [])
        autocast = autocast_dtype(settings, world.device)
        spec.to_device(world.device, autocast or torch.float32)
        with torch.device("meta"):
            full = spec.network_class.from_config(spec.network_config)
        frozen_weights.stored_tensors = lambda _: random_weights(full, world.device)
        network = spec.network()
    plan = BatchPlan(total=1, ranks=1, accumulation_steps=1, batch_size=1)
    rate = learning_rate(settings.optim, TrainingClock(samples=1, total_batch=1, epochs=1))
    state = TrainState(settings, spec, network, build_strategy(world), plan, rate, autocast, compiled)
    loading = time.perf_counter() - began
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (1, *size, 3), dtype=torch.uint8, generator=generator)
    batch = Batch(images, torch.zeros(1, dtype=torch.int64), ["a street with cars in the rain"], torch.zeros(1).long())
    losses: list[float] = []
    seconds: list[float] = []
    began = time.perf_counter()
    while len(losses) < _WARM_UP + 2 or (len(losses) < _WARM_UP + _STEPS and time.perf_counter() - began < _SECONDS):
        before = time.perf_counter()
        losses.append(float(state.step([batch]).loss))  # synchronizes
        seconds.append(time.perf_counter() - before)
    result = {
        "trained parameters": state.num_trained,
        "frozen parameters": state.num_frozen,
        "frozen GB on the GPU": round(state.frozen_bytes / 1e9, 3),
        "tokens": spec.tokens_per_image(),
        "seconds to load": round(loading, 1),
        "seconds per step": round(median(seconds[_WARM_UP:]), 4),
        "losses": losses[: _WARM_UP + 2],
    }
    if world.device.type == "cuda":
        result["peak GB"] = round(torch.cuda.max_memory_allocated() / 1e9, 3)
        result["peak GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
        result["reserved GB"] = round(torch.cuda.max_memory_reserved() / 1e9, 3)
    return result


def main() -> None:
    """Write the record as results come."""
    parser = argparse.ArgumentParser()
    parser.add_argument("record")
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--only", nargs="*", default=list(SETTINGS))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--child", action="store_true", help="measure the one setting of --only, and print it")
    given = parser.parse_args()
    layers = min(given.layers, 4) if given.tiny else given.layers
    if given.child:
        print(json.dumps(measure(given.only[0], layers, given.rank, given.tiny)))
        return
    shape = {"layers": layers, "LoRA rank": given.rank, "image": _TINY_SIZE if given.tiny else _SIZE, "batch": 1}
    rows: dict[str, Any] = {}
    for name in given.only:
        if "nf4" in name and importlib.util.find_spec("bitsandbytes") is None:
            rows[name] = {"skipped": "bitsandbytes is not installed"}
        else:
            rows[name] = _run_child(name)
        record = {
            "command": f"python {' '.join(sys.argv)}",
            "hardware": hardware(),
            "versions": versions("diffusers", "peft"),
        }
        atomic_write_json(Path(given.record), record | {"shape": shape, "settings": rows})
        print(name, rows[name], flush=True)


def _run_child(name: str) -> dict[str, Any]:
    """Measure a setting in a process of its own; an error is part of the record."""
    others = [word for word in sys.argv[1:] if word not in ("--only", *SETTINGS)]
    command = [sys.executable, __file__, *others, "--child", "--only", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no result within {_TIMEOUT} s"}
    if done.returncode:
        return {"error": done.stderr.strip()[-1500:]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
