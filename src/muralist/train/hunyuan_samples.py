"""Guide 3's own function: samples of HunyuanDiT from every GPU, by its parts as a training script of one's own has them."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from muralist.models.hunyuan_family import FrozenParts, HunyuanFamily
from muralist.settings import SampleSettings
from muralist.train.samples import write_samples


@torch.no_grad()
def sample_images_multi_gpu(
    model: Any,
    diffusion: Any,
    vae: nn.Module,
    text_encoder: nn.Module,
    tokenizer: Any,
    text_encoder_t5: nn.Module,
    tokenizer_t5: Any,
    rank: int,
    world_size: int,
    args: Namespace,
    logger: logging.Logger,
    train_steps: int,
) -> None:
    """Draw and store this GPU's samples of a step; nothing that goes wrong here stops training.

    `save_checkpoint()` calls this for HunyuanDiT on every rank. `model` is the network with the weights to draw with,
    `diffusion` its noise schedule (a diffusers scheduler, or its config). `args` has `samples_dir` and `image_size`, and may
    have `sample_prompts`, `sample_steps`, `sample_guidance`, `sample_seed`, `samples_per_gpu`, `sample_solver`, `autocast`
    (a dtype), `monitors` and `embedded_prompts` (a dict that is filled here, so that each prompt is embedded only once).
    """
    schedule = diffusion if isinstance(diffusion, Mapping) else diffusion.config
    network = getattr(model, "module", model)  # as DistributedDataParallel keeps it
    family = HunyuanFamily(
        FrozenParts(vae, text_encoder, tokenizer, text_encoder_t5, tokenizer_t5, getattr(args, "embedded_prompts", {})),
        dict(_config_of(network)),
        dict(schedule),
        (int(args.image_size[0]), int(args.image_size[1])),
    )
    given = {
        "steps": getattr(args, "sample_steps", None),
        "guidance": getattr(args, "sample_guidance", None),
        "seed": getattr(args, "sample_seed", None),
        "per_gpu": getattr(args, "samples_per_gpu", None),
        "solver": getattr(args, "sample_solver", None),
    }
    write_samples(
        Path(args.samples_dir),
        train_steps,
        rank,
        world_size,
        family,
        network,
        list(getattr(args, "sample_prompts", None) or family.default_prompts()),
        SampleSettings(**{name: value for name, value in given.items() if value is not None}),
        getattr(args, "autocast", None),
        getattr(args, "monitors", ()),
        logger,
    )


def _config_of(network: Any) -> Mapping[str, Any]:
    """The transformer's settings, also where it is seen through a wrapper with averaged weights."""
    while not hasattr(network, "config"):
        network = network.network
    return network.config
