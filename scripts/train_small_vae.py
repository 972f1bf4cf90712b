"""Train the VAE of the small HunyuanDiT on driving_world and write it into the package.

python scripts/train_small_vae.py                    on a GPU; --minutes 3 limits the time on any GPU
python scripts/train_small_vae.py --steps 1200 --batch_images 16 --scenes 512     on a CPU, twelve minutes

Scenes are drawn first, in several processes; training reads them from memory. The results are the weights (half precision,
under 1 MB) and a JSON file: the configuration of the VAE, the measured scaling factor, the reconstruction quality on
held-out scenes, and the training settings.
"""

from __future__ import annotations

import argparse
import copy
import math
import multiprocessing
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional as F

from muralist.core.run_dir import atomic_write, atomic_write_json
from muralist.demo.driving_world import DRAWING_VERSION, KINDS, draw_scene

ASSETS = Path(__file__).parent.parent / "src" / "muralist" / "demo" / "assets"
# No attention, unlike large VAEs: six 3 x 3 convolutions already cover an 8 x 8 latent, and the bytes are better spent on
# channels. Channels are multiples of 16, for which convolutions on a CPU are fast.
ARCHITECTURE: dict[str, Any] = {
    "in_channels": 3,
    "out_channels": 3,
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [16, 32, 32, 48],
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 8,
    "sample_size": 64,
    "mid_block_add_attention": False,
}
SIZES = (64, 128, 256)
CYCLE = (64, 128, 64, 256)  # the size of each step in turn; the smallest twice, because CPUs train at it
HELD_OUT_FROM, HELD_OUT_SCENES = 1_000_000, 256  # sample indices beyond every training set of driving_world
GRADIENT_WEIGHT = 1.0
# Large enough to keep latents smooth and near unit variance, which makes them easy to model.
KL_WEIGHT = 1e-3
WARMUP_STEPS = 100
EMA_DECAY = 0.999


def draw_range(size: int, items: range) -> np.ndarray:
    """Draw scenes of all kinds in turn: uint8 [N, size, size, 3]."""
    return np.stack([draw_scene(item % len(KINDS), item // len(KINDS), size) for item in items])


def draw_all(size: int, first: int, count: int, workers: int) -> Tensor:
    """Draw scenes in several processes."""
    shares = [range(start, min(start + 32, first + count)) for start in range(first, first + count, 32)]
    # Forked, and therefore before CUDA starts: a fresh interpreter per worker would take longer than the drawing.
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        return torch.from_numpy(np.concatenate(pool.map(partial(draw_range, size), shares)))


def to_pixels(images_u8: Tensor) -> Tensor:
    """Convert uint8 [N, H, W, 3] to [N, 3, H, W] in [-1, 1]."""
    return images_u8.permute(0, 3, 1, 2).float() / 127.5 - 1.0


def edges(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the differences of adjacent pixels, vertical and horizontal."""
    return images.diff(dim=2), images.diff(dim=3)


def vae_loss(vae: Any, images: Tensor, generator: torch.Generator) -> Tensor:
    """Return the L1 error of pixels and of edges, plus a small KL term."""
    with torch.autocast(images.device.type, torch.bfloat16, enabled=images.is_cuda):
        mean, logvar = vae.quant_conv(vae.encoder(images)).float().chunk(2, dim=1)
        logvar = logvar.clamp(-30.0, 20.0)  # the bounds diffusers decodes with
        noise = torch.randn(mean.shape, generator=generator, device=mean.device)
        restored = vae.decode(mean + (0.5 * logvar).exp() * noise, return_dict=False)[0].float()
    sharpness = sum(F.l1_loss(ours, theirs) for ours, theirs in zip(edges(restored), edges(images), strict=True))
    kl = 0.5 * (mean.square() + logvar.exp() - 1.0 - logvar).mean()
    return F.l1_loss(restored, images) + GRADIENT_WEIGHT * sharpness + KL_WEIGHT * kl


def psnr(restored: Tensor, images: Tensor) -> Tensor:
    """Return the PSNR of each image in dB, for values in [-1, 1]."""
    error = (restored.clamp(-1.0, 1.0) - images).square().mean(dim=(1, 2, 3))
    return 10.0 * torch.log10(4.0 / error)


@torch.no_grad()
def measure(vae: Any, images_u8: Tensor, device: str) -> dict[str, float]:
    """Return the reconstruction PSNR, the PSNR of the mean color alone, and the spread of the latents."""
    generator = torch.Generator(device).manual_seed(0)
    ours, mean_color, latents, spreads = [], [], [], []
    for part in images_u8.split(16):
        images = to_pixels(part.to(device))
        posterior = vae.encode(images).latent_dist
        ours.append(psnr(vae.decode(posterior.mode(), return_dict=False)[0], images))
        mean_color.append(psnr(images.mean(dim=(2, 3), keepdim=True).expand_as(images), images))
        latents.append(posterior.sample(generator))
        spreads.append(posterior.std.mean())
    return {
        "psnr": round(torch.cat(ours).mean().item(), 2),
        "psnr_of_mean_colour": round(torch.cat(mean_color).mean().item(), 2),
        "latent_std": round(torch.cat(latents).std().item(), 4),
        "posterior_std": round(torch.stack(spreads).mean().item(), 4),
    }


def train(pools: dict[int, Tensor], held_out: Tensor, arguments: argparse.Namespace) -> tuple[Any, int]:
    """Train; return the EMA model and the number of steps."""
    device = arguments.device
    generator = torch.Generator(device).manual_seed(arguments.seed)
    torch.manual_seed(arguments.seed)
    network: Any = AutoencoderKL  # imported lazily, so mypy does not know its type
    vae = network(**ARCHITECTURE).to(device).train()
    ema = copy.deepcopy(vae).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(vae.parameters(), betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    pools = {size: pool.to(device) for size, pool in pools.items()}
    started, step, done, reported = time.monotonic(), 0, 0.0, 0.0
    while done < 1.0:
        size = CYCLE[step % len(CYCLE)]
        count = max(1, arguments.batch_images * min(SIZES) ** 2 // size**2)
        chosen = torch.randint(len(pools[size]), (count,), generator=generator, device=device)
        images = to_pixels(pools[size][chosen])
        images = images.flip(-1) if step // len(CYCLE) % 2 else images
        rate = arguments.learning_rate * min(1.0, (step + 1) / WARMUP_STEPS) * 0.5 * (1.0 + math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss = vae_loss(vae, images, generator)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        step += 1
        # Ramped, so that the EMA of a short run forgets the random initialization.
        keep = min(EMA_DECAY, step / (step + 20))
        with torch.no_grad():
            torch._foreach_lerp_(list(ema.parameters()), list(vae.parameters()), 1.0 - keep)
        seconds = time.monotonic() - started
        done = max(step / arguments.steps, seconds / (60.0 * arguments.minutes))
        if done - reported >= 0.05 or done >= 1.0:
            reported = done
            restored = measure(ema, held_out[:64], device)["psnr"]
            print(f"{done:4.0%}  step {step}  {step / seconds:.1f} steps/s  loss {loss.item():.4f} at {size} px  "
                  f"held-out PSNR at {min(SIZES)} px {restored:.2f} dB", flush=True)  # fmt: skip
    return ema, step


def main() -> None:
    """Draw, train, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8000, help="optimizer steps")
    parser.add_argument("--minutes", type=float, default=math.inf, help="end earlier; the schedule shrinks to fit")
    parser.add_argument("--batch_images", type=int, default=256, help="images per step at 64 px; fewer at larger sizes")
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--scenes", type=int, default=8192, help="different scenes of each size")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes that draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=ASSETS)
    arguments = parser.parse_args()

    started = time.monotonic()
    pools = {size: draw_all(size, 0, arguments.scenes, arguments.workers) for size in SIZES}
    first = HELD_OUT_FROM * len(KINDS)
    held_out = {size: draw_all(size, first, HELD_OUT_SCENES, arguments.workers) for size in SIZES}
    print(f"drew {arguments.scenes} scenes of each size in {time.monotonic() - started:.0f} s", flush=True)

    vae, steps = train(pools, held_out[min(SIZES)], arguments)
    vae.half().float()  # measured at the stored precision
    measured = {str(size): measure(vae, images, arguments.device) for size, images in held_out.items()}
    spread = math.sqrt(sum(of_size["latent_std"] ** 2 for of_size in measured.values()) / len(measured))
    content = {
        "config": {**ARCHITECTURE, "scaling_factor": round(1.0 / spread, 5)},
        "measured": {"held_out_scenes": HELD_OUT_SCENES, "by_size": measured},
        "training": {
            "data": f"driving_world, drawing version {DRAWING_VERSION}, {arguments.scenes} scenes of each size",
            **{name: vars(arguments)[name] for name in ("batch_images", "learning_rate", "seed")},
            "steps": steps,
            "parameters": sum(parameter.numel() for parameter in vae.parameters()),
            "device": torch.cuda.get_device_name() if arguments.device == "cuda" else arguments.device,
            "torch": torch.__version__,
        },
    }
    weights = {name: value.half().cpu().contiguous() for name, value in vae.state_dict().items()}
    atomic_write(arguments.output / "driving_world_vae.safetensors", save(weights, metadata={"format": "pt"}))
    atomic_write_json(arguments.output / "driving_world_vae.json", content)
    for size, of_size in measured.items():
        print(f"{size} px: PSNR {of_size['psnr']:.2f} dB (mean color {of_size['psnr_of_mean_colour']:.2f} dB), "
              f"latents have std {of_size['latent_std']:.3f}, posteriors {of_size['posterior_std']:.3f}")  # fmt: skip
    print(f"scaling factor {content['config']['scaling_factor']}, {steps} steps, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
