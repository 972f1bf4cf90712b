"""`muralist export`: weights of a run, a checkpoint or an official file as a diffusers-style folder."""

from __future__ import annotations

from pathlib import Path

from muralist.models.weights import infer_jit_config, read_description, read_weights, write_jit_folder
from muralist.settings import ExportSettings


def export(settings: ExportSettings) -> str:
    """Write the folder and say what is in it."""
    source = Path(settings.source)
    weights = read_weights(source, settings.weights)
    description = read_description(source)
    if description.get("family") == "hunyuandit":
        from muralist.models.hunyuan_export import ADAPTER_FOLDER, write_pipeline

        write_pipeline(Path(settings.destination), weights, Path(description["folder"]), description.get("lora"))
        alone = f"; its LoRA alone, for PEFT, in {ADAPTER_FOLDER}/" if description.get("lora") else ""
        return (
            f"{settings.destination}: {settings.weights} weights of {source}, for HunyuanDiTPipeline.from_pretrained"
            + alone
        )
    config = infer_jit_config(weights)
    config |= {key: description[key] for key in ("label_names", "objective") if key in description}
    write_jit_folder(settings.destination, weights, config)
    return (
        f"{settings.destination}: {settings.weights} weights of {source}, {config['input_size']} px, "
        f"patch {config['patch_size']}, {config['num_classes']} classes"
    )
