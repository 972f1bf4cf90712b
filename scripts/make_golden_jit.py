"""Write tests/models/golden_jit.safetensors: what the official JiT code computes, to which our network is compared.

git clone https://github.com/LTH14/JiT /tmp/jit-official && git -C /tmp/jit-official checkout cbc743a
python scripts/make_golden_jit.py --official /tmp/jit-official            compare the stored file with the official code
python scripts/make_golden_jit.py --official /tmp/jit-official --write    replace the stored file

Networks, losses, gradients and samples come from the official model_jit.py and denoiser.py, on the CPU in float32 and
without torch.compile. Weights and inputs follow from formulas, so the file holds no weights. The official code needs
einops, which is not a dependency of muralist.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import zlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from muralist.core import rng
from muralist.core.rng import Purpose
from muralist.core.run_dir import atomic_write

GOLDEN = Path(__file__).parent.parent / "tests" / "models" / "golden_jit.safetensors"
COMMIT = "cbc743a2ada5e9762697da2c83f8c4f8379e8c17"  # of LTH14/JiT, 2025-12-07
TOLERANCE = 1e-5  # relative to the largest value of a tensor
ABOUT = (
    "Inputs, outputs, losses, gradient norms and samples of the official JiT code (LTH14/JiT, model_jit.py and "
    "denoiser.py) on the CPU in float32, with the weights and inputs of scripts/make_golden_jit.py. Running it again "
    f"gives equal bits with the same torch on the same CPU, elsewhere values within {TOLERANCE:g}."
)
_INPUT_SEED, _IMAGE_STREAM, _NOISE_STREAM = 42, 30, 31
_CASES: dict[str, dict[str, Any]] = {
    "context": {
        "arguments": {
            "input_size": 16,
            "patch_size": 4,
            "in_channels": 3,
            "hidden_size": 48,
            "depth": 4,
            "num_heads": 3,
            "num_classes": 5,
            "bottleneck_dim": 8,
            "in_context_len": 3,
            "in_context_start": 1,
        },
        "times": [0.31, 0.97, 0.62, 0.05],
        "labels": [0, 3, 5, 1],
        "samples": {
            "heun": {"solver": "heun", "steps": 10, "guidance": 2.5, "interval": [0.1, 0.8]},
            "euler": {"solver": "euler", "steps": 30, "guidance": 1.5, "interval": [0.0, 1.0]},
        },
    },
    "plain": {
        "arguments": {
            "input_size": 24,
            "patch_size": 8,
            "in_channels": 3,
            "hidden_size": 80,
            "depth": 4,
            "num_heads": 1,
            "num_classes": 1,
            "bottleneck_dim": 16,
            "in_context_len": 0,
            "in_context_start": 2,
        },
        "times": [0.31, 0.97],
        "labels": [0, 1],
        "samples": {"heun": {"solver": "heun", "steps": 5, "guidance": 3.0, "interval": [0.2, 1.0]}},
    },
}


def weights_by_formula(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return weights that are all non-zero and the same on every machine, so that the golden file needs to hold none."""
    state = {}
    for name, shape in shapes.items():
        number = torch.tensor([zlib.crc32(name.encode())])
        spread = 2 * rng.uniform(0, Purpose.INIT, number, shape)[0] - 1
        scale = 0.2 if len(shape) == 1 else 1 / math.sqrt(math.prod(shape[1:]))
        state[name] = spread * scale + (1 if "norm" in name else 0)
    return state


def golden_inputs(case: str) -> dict[str, Tensor]:
    """Return images x in [-1, 1], noise e, times t and labels y of a case."""
    size, indices = _CASES[case]["arguments"]["input_size"], torch.arange(len(_CASES[case]["labels"]))
    return {
        "x": 2 * rng.uniform(_INPUT_SEED, _IMAGE_STREAM, indices, (3, size, size)) - 1,
        "e": rng.normal(_INPUT_SEED, _NOISE_STREAM, indices, (3, size, size)),
        "t": torch.tensor(_CASES[case]["times"]),
        "y": torch.tensor(_CASES[case]["labels"]),
    }


def compute(official: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of the golden file, from a checkout of the official code."""
    commit = subprocess.check_output(["git", "-C", official, "rev-parse", "HEAD"], text=True).strip()
    if commit != COMMIT:
        sys.exit(f"{official} is at commit {commit}, not {COMMIT}. Run `git -C {official} checkout {COMMIT}`.")
    sys.path.insert(0, str(official))
    tensors: dict[str, Tensor] = {}
    metadata = {"about": ABOUT, "commit": commit, "torch": torch.__version__}
    # The official code moves its tables to the GPU with .cuda() and compiles its blocks, with no option to do neither.
    with (
        patch.object(Tensor, "cuda", lambda tensor: tensor),
        patch.object(torch, "compile", lambda function: function),
    ):
        for case, facts in _CASES.items():
            computed, state = _compute_case(case)
            tensors |= {f"{case}.{name}": value.detach().contiguous() for name, value in computed.items()}
            stored = {"arguments": facts["arguments"], "state": state, "samples": facts["samples"]}
            metadata[case] = json.dumps(stored)
    return tensors, metadata


def _compute_case(case: str) -> tuple[dict[str, Tensor], list[Any]]:
    """Return inputs and results of a case, and names and shapes of the official state dict."""
    import denoiser as official_denoiser  # type: ignore[import-not-found]

    facts, inputs = _CASES[case], golden_inputs(case)
    arguments = facts["arguments"]
    sizes = {name: arguments[name] for name in arguments if name not in ("input_size", "in_channels", "num_classes")}
    official_denoiser.JiT_models[case] = partial(sys.modules["model_jit"].JiT, **sizes)
    settings = argparse.Namespace(
        model=case, img_size=arguments["input_size"], class_num=arguments["num_classes"], attn_dropout=0.0,
        proj_dropout=0.0, label_drop_prob=0.0, P_mean=-0.8, P_std=0.8, t_eps=0.05, noise_scale=1.0, ema_decay1=0.9999,
        ema_decay2=0.9996, sampling_method="heun", num_sampling_steps=1, cfg=1.0, interval_min=0.0, interval_max=1.0,
    )  # fmt: skip
    denoiser = official_denoiser.Denoiser(settings).eval()
    net = denoiser.net
    shapes = {name: tuple(value.shape) for name, value in net.state_dict().items()}
    net.load_state_dict(weights_by_formula(shapes) | {"pos_embed": net.pos_embed.clone()})

    def loss(samples: slice) -> Tensor:
        """Run the official training step with our times and noise instead of random ones."""
        with (
            patch.object(denoiser, "sample_t", lambda *_, **__: inputs["t"][samples]),
            patch.object(torch, "randn_like", lambda _: inputs["e"][samples]),
        ):
            return denoiser(inputs["x"][samples], inputs["y"][samples])

    with torch.no_grad():
        results = {"output": net(inputs["x"], inputs["t"], inputs["y"])}
        results["loss"] = torch.stack([loss(slice(i, i + 1)) for i in range(len(inputs["y"]))])
    loss(slice(None)).backward()
    results["gradient_norms"] = torch.stack([p.grad.norm() for p in net.parameters() if p.requires_grad])
    for name, run in facts["samples"].items():
        denoiser.method, denoiser.steps, denoiser.cfg_scale = run["solver"], run["steps"], run["guidance"]
        denoiser.cfg_interval = tuple(run["interval"])
        with patch.object(torch, "randn", lambda *_, **__: inputs["e"]):
            results[name] = denoiser.generate(inputs["y"])
    return inputs | results, [[name, list(shape)] for name, shape in shapes.items()]


def compare(tensors: Mapping[str, Tensor]) -> bool:
    """Print how far the stored file is from these tensors, and return whether it is near enough."""
    with safe_open(GOLDEN, "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    errors = {}
    for name, value in tensors.items():
        errors[name] = float((stored[name] - value).abs().max() / value.abs().max().clamp_min(1))
        print(f"{name:24} {'equal bits' if torch.equal(stored[name], value) else f'differs by {errors[name]:.1e}'}")
    return stored.keys() == tensors.keys() and max(errors.values()) <= TOLERANCE


def main() -> int:
    """Compare the stored file with the official code, or replace it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--official", type=Path, required=True, metavar="CHECKOUT", help="a clone of LTH14/JiT")
    parser.add_argument("--write", action="store_true", help="replace the stored file")
    options = parser.parse_args()
    tensors, metadata = compute(options.official.resolve())
    is_near = compare(tensors)
    if options.write:
        atomic_write(GOLDEN, save(tensors, metadata))
        return 0
    return 0 if is_near else 1


if __name__ == "__main__":
    sys.exit(main())
