"""A trained HunyuanDiT as a folder that diffusers' HunyuanDiTPipeline.from_pretrained loads."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffusers import HunyuanDiT2DModel
from safetensors import SafetensorError
from torch import Tensor

from muralist.errors import UserError
from muralist.models.fingerprint import fingerprint
from muralist.models.lora import Lora
from muralist.runfolder import disk_error, flush_folder, no_space

ADAPTER_FOLDER = "lora"


def write_pipeline(
    folder: Path, weights: Mapping[str, Tensor], base: Path, lora: Mapping[str, Any] | None = None
) -> None:
    """Write the trained transformer with the other parts of the model it came from; the folder appears whole.

    LoRA is added to the transformer's own weights, and is also there alone, as PEFT reads it; `lora` is what the checkpoint
    says of it.
    """
    final = folder.absolute()
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise UserError(f"{final} exists.", fix="Name a folder that does not exist yet.")
    check_base(base, lora)
    aside = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    try:
        shutil.copytree(base, aside, ignore=shutil.ignore_patterns("transformer", ADAPTER_FOLDER, ".*"))
        if lora:
            (aside / ADAPTER_FOLDER).mkdir()
        trained_transformer(weights, base, lora, aside / ADAPTER_FOLDER).save_pretrained(aside / "transformer")
        for file in aside.rglob("*.safetensors"):
            file.chmod(aside.stat().st_mode & 0o666)  # safetensors lets only the owner read
            with file.open("rb") as content:
                os.fsync(content.fileno())
        flush_folder(aside)
        if final.exists():
            final.rmdir()
        aside.replace(final)
        flush_folder(final.parent)
    except (OSError, SafetensorError) as error:
        raise no_space(disk_error(error), final) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def check_base(base: Path, lora: Mapping[str, Any] | None) -> None:
    """Refuse to go on without the model that a run fine-tuned."""
    if not (base / "transformer" / "config.json").is_file():
        raise UserError(
            f"The model that this run fine-tuned is not at {base} any more.",
            "Its VAE, text encoders and tokenizers are needed.",
            "Put it back where it was.",
        )
    if lora and fingerprint(base / "transformer") != lora["base"]:
        raise UserError(
            f"The transformer in {base} is not the one that LoRA was trained on.",
            "Together they would draw something else than in training.",
            "Put back the model that was there.",
        )


def trained_transformer(
    weights: Mapping[str, Tensor], base: Path, lora: Mapping[str, Any] | None, adapter: Path | None = None
) -> Any:
    """The transformer with trained weights, in float32; LoRA is added to the base's own, and also written to `adapter`."""
    if lora:
        network = HunyuanDiT2DModel.from_pretrained(base, subfolder="transformer", local_files_only=True).float()
        return Lora(lora["rank"], tuple(lora["targets"])).merge(network, weights, adapter)
    network = HunyuanDiT2DModel.from_config(HunyuanDiT2DModel.load_config(base, subfolder="transformer"))
    network.load_state_dict(weights)
    return network
