"""The codes that muralist is measured against, each run as its own documentation runs it.

- Official JiT (LTH14/JiT): a step of `engine_jit.train_one_epoch` (bf16 autocast, `.item()` and a synchronization at every
  step, its AdamW, its EMA loop) without the DDP wrapper, and `Denoiser.generate` as in `evaluate`. Its blocks are compiled
  by their own decorators.
- diffusers: a loop over prompts that calls the pipeline and saves each image; bf16, not compiled. Fine-tuning: a loop with
  Accelerate as in its training scripts.
- pytorch-fid: `get_activations` with its default batch of 50 and 8 workers.

What differs in the work: the official JiT computes attention scores in float32, and evaluates 198 network passes per image
with 50 Heun steps, because it computes the unconditional pass outside the guidance interval too; muralist computes 187.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

CLASSES = 1000
GUIDANCE, INTERVAL, SOLVER_STEPS = 2.9, (0.1, 1.0), 50
FID_BATCH, FID_WORKERS = 50, 8  # defaults of pytorch-fid


def commit(checkout: Path) -> str:
    """Return the commit of a checkout: from git, or from a file COMMIT in a copy without history."""
    if (checkout / "COMMIT").is_file():
        return (checkout / "COMMIT").read_text().strip()
    found = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    )
    return found.stdout.strip()


def _official_denoiser(checkout: Path, model: str, img_size: int) -> tuple[Any, Any]:
    """Build the official Denoiser with the defaults of main_jit.py; returns it and its arguments."""
    sys.path.insert(0, str(checkout))
    import denoiser
    import model_jit

    # The paper's JiT-B with patches of 4, which the official table lacks.
    base = {"depth": 12, "hidden_size": 768, "num_heads": 12, "bottleneck_dim": 128}
    base |= {"in_context_len": 32, "in_context_start": 4, "patch_size": 4}
    denoiser.JiT_models["JiT-B/4"] = functools.partial(model_jit.JiT, **base)
    arguments = type("Arguments", (), {
        "model": model, "img_size": img_size, "class_num": CLASSES, "attn_dropout": 0.0, "proj_dropout": 0.0,
        "label_drop_prob": 0.1, "P_mean": -0.8, "P_std": 0.8, "t_eps": 5e-2, "noise_scale": 1.0, "ema_decay1": 0.9999,
        "ema_decay2": 0.9996, "sampling_method": "heun", "num_sampling_steps": SOLVER_STEPS, "cfg": GUIDANCE,
        "interval_min": INTERVAL[0], "interval_max": INTERVAL[1], "lr": 5e-5, "min_lr": 0.0, "lr_schedule": "constant",
        "warmup_epochs": 0, "weight_decay": 0.0, "epochs": 1,
    })  # fmt: skip
    torch.backends.cudnn.benchmark = True
    torch._dynamo.config.cache_size_limit = 128
    return denoiser.Denoiser(arguments).cuda(), arguments


def official_step(checkout: Path, model: str, img_size: int, batch: int) -> Callable[[], Any]:
    """Return one iteration of the official `train_one_epoch`, on images that are in GPU memory."""
    network, arguments = _official_denoiser(checkout, model, img_size)
    from util import lr_sched, misc

    network.ema_params1 = copy.deepcopy(list(network.parameters()))
    network.ema_params2 = copy.deepcopy(list(network.parameters()))
    optimizer = torch.optim.AdamW(misc.add_weight_decay(network, 0.0), lr=arguments.lr, betas=(0.9, 0.95))
    generator = torch.Generator("cuda").manual_seed(0)
    images = torch.randint(
        0, 256, (batch, 3, img_size, img_size), dtype=torch.uint8, device="cuda", generator=generator
    )
    labels = torch.randint(0, CLASSES, (batch,), device="cuda", generator=generator)
    network.train(True)

    def step() -> float:
        lr_sched.adjust_learning_rate(optimizer, 1.0, arguments)
        pixels = images.to(torch.float32).div_(255) * 2.0 - 1.0
        with torch.amp.autocast("cuda", dtype=torch.bfloat16):
            loss = network(pixels, labels)
        value = float(loss.item())
        if not math.isfinite(value):
            raise RuntimeError(f"The loss of the official code is {value}.")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.cuda.synchronize()
        network.update_ema()
        return value

    return step


def plain_finetune_step(
    folder: Path, size: tuple[int, int], batch: int, lora: int, device: torch.device
) -> Callable[[], Any]:
    """Return one step of a loop as diffusers' training scripts have it, on latents and text that are encoded already.

    Accelerate with bf16, gradient checkpointing, torch's AdamW, gradients clipped to 1, the loss read at every step, no EMA,
    not compiled. With LoRA the frozen weights are bf16 and those of LoRA float32.
    """
    import diffusers
    from accelerate import Accelerator
    from diffusers import DiffusionPipeline
    from diffusers.training_utils import cast_training_params

    accelerator = Accelerator(mixed_precision="bf16" if device.type == "cuda" else "no", cpu=device.type == "cpu")
    weights = torch.bfloat16 if lora and device.type == "cuda" else torch.float32
    pipe: Any = DiffusionPipeline.from_pretrained(folder, local_files_only=True, dtype=weights)
    network = pipe.unet if hasattr(pipe, "unet") else pipe.transformer
    network.requires_grad_(not lora).train().enable_gradient_checkpointing()
    if lora:
        from peft import LoraConfig

        targets = ["to_k", "to_q", "to_v", "to_out.0"]
        network.add_adapter(LoraConfig(r=lora, lora_alpha=lora, init_lora_weights="gaussian", target_modules=targets))
        cast_training_params([network], dtype=torch.float32)
    network.to(device)
    inputs = _network_inputs(pipe, network, size, batch, device, weights)
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    network, optimizer = accelerator.prepare(network, torch.optim.AdamW(trained, lr=1e-4, weight_decay=1e-2))
    alphas = None if isinstance(pipe.scheduler, diffusers.FlowMatchEulerDiscreteScheduler) else _alphas(pipe.scheduler)
    clean = inputs.pop("clean").to(device)

    def step() -> float:
        noise = torch.randn_like(clean)
        rows = [-1] + [1] * (clean.ndim - 1)
        if alphas is None:
            level = torch.sigmoid(torch.randn(batch, device=device))
            noisy = (1 - level.view(rows)) * clean + level.view(rows) * noise
            target, t = noise - clean, level * inputs["time scale"]
        else:
            t = torch.randint(0, 1000, (batch,), device=device)
            a = alphas.to(device)[t].view(rows)
            noisy, target = a.sqrt() * clean + (1 - a).sqrt() * noise, noise
        with accelerator.autocast():
            output = network(noisy.to(weights), timestep=t, **inputs["arguments"], return_dict=False)[0]
        loss = torch.nn.functional.mse_loss(output.float(), target.float())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach().item())

    return step


def _alphas(scheduler: Any) -> torch.Tensor | None:
    return None if scheduler.config.get("use_flow_sigmas") else scheduler.alphas_cumprod


def _network_inputs(
    pipe: Any, network: Any, size: tuple[int, int], batch: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Return clean latents and the other arguments of a network, as its training script makes them."""
    height, width = size[0] // 8, size[1] // 8
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(batch, *shape, generator=generator).to(device, dtype)

    config = network.config
    if type(pipe).__name__ == "WanPipeline":
        text = {"encoder_hidden_states": random(512, config.text_dim)}
        return {"clean": random(config.in_channels, 1, height, width), "arguments": text, "time scale": 1000.0}
    if type(pipe).__name__ == "StableDiffusionXLPipeline":
        times = torch.tensor([[*size, 0, 0, *size]], dtype=dtype, device=device).repeat(batch, 1)
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        added = {"text_embeds": random(pooled), "time_ids": times}
        text = {"encoder_hidden_states": random(77, config.cross_attention_dim), "added_cond_kwargs": added}
        return {"clean": random(4, height, width), "arguments": text}
    positions = pipe._prepare_latent_image_ids(batch, height // 2, width // 2, device, dtype)
    text = {
        "encoder_hidden_states": random(512, config.joint_attention_dim),
        "pooled_projections": random(config.pooled_projection_dim),
        "txt_ids": torch.zeros(512, 3, device=device, dtype=dtype),
        "img_ids": positions,
        "guidance": torch.ones(batch, device=device, dtype=dtype),
    }
    clean = random(height // 2 * (width // 2), config.in_channels)
    return {"clean": clean, "arguments": text, "time scale": 1.0}


def official_sampler(checkout: Path, model: str, img_size: int, batch: int) -> Callable[[], Any]:
    """Return one batch of the official `evaluate`: bf16 autocast, `generate`, pixels on the host."""
    network, _ = _official_denoiser(checkout, model, img_size)
    generator = torch.Generator("cuda").manual_seed(0)
    for parameter in network.parameters():  # zero-initialized layers too, so that images are not constant
        parameter.data += 0.02 * torch.randn(parameter.shape, device="cuda", generator=generator)
    network.eval()
    labels = torch.arange(batch, device="cuda") % CLASSES

    def sample() -> Any:
        with torch.no_grad(), torch.amp.autocast("cuda", dtype=torch.bfloat16):
            images = network.generate(labels)
        return ((images + 1) / 2).detach().cpu()

    return sample


def plain_diffusers(
    folder: Path, size: tuple[int, int], options: dict[str, Any], prompt: Callable[[int], str], device: str, dtype: str
) -> Callable[[], Any]:
    """Return the next image of a plain script: one prompt, one call of the pipeline, one PNG."""
    from diffusers import DiffusionPipeline

    kinds = {"bf16": torch.bfloat16, "fp32": torch.float32}
    pipe: Any = DiffusionPipeline.from_pretrained(folder, dtype=kinds[dtype], local_files_only=True).to(device)
    pipe.set_progress_bar_config(disable=True)
    accepted = inspect.signature(type(pipe).__call__).parameters
    extra = {"num_frames": 1, "use_resolution_binning": False}
    options = options | {name: value for name, value in extra.items() if name in accepted}
    target, count = Path(tempfile.mkdtemp()) / "image.png", 0

    def image() -> None:
        nonlocal count
        count += 1
        generator = torch.Generator("cpu").manual_seed(42 + count)
        output = pipe(prompt(count), height=size[0], width=size[1], generator=generator, output_type="pil", **options)
        (output.frames[0][0] if hasattr(output, "frames") else output.images[0]).save(target)

    return image


def import_pytorch_fid(package: Path, weights: Path) -> Any:
    """Import pytorch-fid, with Inception's weights from a file instead of a download."""
    from muralist.evaluate.inception import load_inception

    sys.path.insert(0, str(package))
    from pytorch_fid import fid_score, inception

    classifier = {"fc.weight": torch.zeros(1008, 2048), "fc.bias": torch.zeros(1008)}
    inception.load_state_dict_from_url = lambda *_, **__: {**load_inception(weights).state_dict(), **classifier}
    sqrtm = fid_score.linalg.sqrtm
    if (
        "disp" not in inspect.signature(sqrtm).parameters
    ):  # removed from SciPy; pytorch-fid asks for two results with it
        fid_score.linalg.sqrtm = lambda matrix, disp=True: (sqrtm(matrix), 0.0)
    return fid_score


def pytorch_fid(package: Path, weights: Path) -> Callable[[list[Path], Callable[[int, int], None]], Any]:
    """Return pytorch-fid's features of image files.

    The second argument is called after every batch, with the numbers of finished and of all images.
    """
    from muralist.core.hardware import available_cpus

    fid_score = import_pytorch_fid(package, weights)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network_class = fid_score.InceptionV3
    model = network_class([network_class.BLOCK_INDEX_BY_DIM[2048]]).to(device)
    workers = min(FID_WORKERS, available_cpus())

    def features(paths: list[Path], progress: Callable[[int, int], None]) -> Any:
        def observed(loader: Iterable[Any]) -> Iterator[Any]:
            for number, batch in enumerate(loader, start=1):
                yield batch
                progress(min(number * FID_BATCH, len(paths)), len(paths))

        fid_score.tqdm = observed  # its progress bar
        return fid_score.get_activations(paths, model, FID_BATCH, 2048, device, num_workers=workers)

    return features
