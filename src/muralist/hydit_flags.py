"""What becomes of each flag of the official HunyuanDiT script; one that is not named here is one of `muralist train`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Renamed:
    """`muralist train` has it under another name, and maybe other words for its values."""

    to: str
    values: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Always:
    """It is always so here, or there is nothing to it: taken and left out, with this many values."""

    values: int = 0


@dataclass(frozen=True)
class Fixed:
    """It has one value here, or a few that mean the same."""

    values: tuple[str, ...]
    because: str = ""


@dataclass(frozen=True)
class OfModel:
    """The model's folder says it; a command line may only say the same."""


@dataclass(frozen=True)
class Refused:
    """It is not there; what to do instead."""

    instead: str


LAYERS = {
    "Wqkv": ("attn1.to_q", "attn1.to_k", "attn1.to_v"),
    "q_proj": ("attn2.to_q",),
    "kv_proj": ("attn2.to_k", "attn2.to_v"),
    "out_proj": ("to_out.0",),
}
"""Layers for LoRA as the official network names them; diffusers' has one for each of queries, keys and values."""

_HALF_LIFE = "averages of the weights have a half-life in images, --ema1_half_life N, and warm up by themselves"
_OFFICIAL_WEIGHTS = (
    "weights in the official layout are not read; turn them into a folder with convert_hunyuandit_to_diffusers.py of "
    "diffusers, and give it as --model.path"
)
_GOES_ON = "a run of muralist goes on by itself, and --resume PATH names a checkpoint"
_FOLDER = "the model's folder says it"

FLAGS: Mapping[str, Renamed | Always | Fixed | OfModel | Refused] = {
    # The model
    "use-fp16": Renamed("--use_amp"),
    "no-fp16": Renamed("--no_use_amp"),
    "extra-fp16": Always(),  # precision of the frozen parts follows the hardware, and so does attention
    "use-flash-attn": Always(),
    "qk-norm": Always(),
    "norm": Fixed(("layer",)),
    "rope-img": Fixed(("base512",)),
    "rope-real": Always(),
    "text-states-dim": Fixed(("1024",), _FOLDER),
    "text-states-dim-t5": Fixed(("2048",), _FOLDER),
    "text-len": Fixed(("77",)),
    "text-len-t5": Fixed(("256",)),
    "use-style-cond": OfModel(),
    "size-cond": OfModel(),
    # LoRA
    "rank": Renamed("--lora_rank"),
    "lora-ckpt": Renamed("--init_from"),
    "output-merge-path": Refused("LoRA is added to the model after training, by `muralist export RUN FOLDER`"),
    # Diffusion
    "learn-sigma": Always(),
    "predict-type": Fixed(("v_prediction",)),
    "noise-schedule": Fixed(("scaled_linear",)),
    "beta-start": OfModel(),
    "beta-end": OfModel(),
    "mse-loss-weight-type": Fixed(("constant",)),
    "noise-offset": Fixed(("0.0",)),
    # Training
    "max-training-steps": Renamed("--max_steps"),
    "lr": Renamed("--learning_rate"),
    "warmup-num-steps": Renamed("--warmup_steps"),
    "warmup-min-lr": Refused("warm-up starts at the learning rate divided by --warmup_steps + 1; leave it out"),
    "grad-accu-steps": Renamed("--gradient_accumulation_steps"),
    "global-seed": Renamed("--seed"),
    "task-flag": Renamed("--run_name"),
    "ckpt-every-n-epoch": Renamed("--at_epoch_end", {"0": "false", "1": "true"}),
    "gc-interval": Always(1),  # Python's garbage collector finds nothing to do in a step
    "gc-rate": Fixed(("1.0",), "--gradient-checkpointing is for all blocks"),
    "resume-module-root": Refused(f"{_OFFICIAL_WEIGHTS}; {_GOES_ON}"),
    "resume-ema-root": Refused(f"{_OFFICIAL_WEIGHTS}; {_GOES_ON}"),
    "resume-split": Refused(f"{_GOES_ON}; leave it out"),
    "no-strict": Refused("weights must fit the model whole; leave it out"),
    "save-optimizer-state": Always(),
    # Data
    "index-file": Renamed("--data_path"),
    "reset-loader": Refused("--init_from RUN with another --run_name starts from its weights and the first image"),
    "target-ratios": Refused("the shapes of --multireso follow from --reso-step; leave it out"),
    # Averages of the weights
    "use-ema": Always(),
    "ema-dtype": Fixed(("fp32", "none"), "averages are as precise as the weights"),
    "ema-decay": Refused(_HALF_LIFE),
    "ema-warmup": Refused(_HALF_LIFE),
    "ema-warmup-power": Refused(_HALF_LIFE),
    "ema-reset-decay": Refused(_HALF_LIFE),
    # Memory and processes
    "deepspeed": Always(),
    "local-rank": Always(1),  # DeepSpeed's launcher adds it; the environment says the same
    "cpu-offloading": Refused(
        "nothing is kept in host memory; --use-zero-stage 3 divides everything over the GPUs, and --gradient-checkpointing "
        "and --training-parts lora need less"
    ),
    # Samples
    "infer-steps": Renamed("--sample_steps"),
    "cfg-scale": Renamed("--sample_guidance"),
    "sampler": Renamed("--sample_solver", {"ddim": "ddim", "dpmms": "dpm++"}),
    "load-key": Fixed(("ema",), "samples are drawn with the averaged weights"),
    "dit-weight": Refused(_OFFICIAL_WEIGHTS),
}
