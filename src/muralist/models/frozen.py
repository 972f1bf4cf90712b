"""Telling one model's frozen parts from another's: encoded data are good for those alone that made them."""

from __future__ import annotations

from pathlib import Path

from muralist.data.encoded import EncodedSource
from muralist.errors import UserError
from muralist.models.fingerprint import fingerprint

FROZEN_PARTS = ("vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")


def frozen_fingerprints(folder: Path) -> dict[str, str]:
    """A fingerprint of each part of a model folder that is not trained."""
    return {name: fingerprint(folder / name) for name in FROZEN_PARTS}


def check_encoded(source: EncodedSource, folder: Path, random_flip: bool) -> None:
    """Refuse encoded data that this model and these settings cannot be trained on."""
    made_by, manifest = source.manifest.frozen_parts, source.manifest
    if random_flip and not manifest.mirrored:
        raise UserError(
            f"{source.folder} was encoded without mirror images, so none can be mirrored in training.",
            fix="Train with --no_random_flip, or encode the data set again without it.",
        )
    if not folder.is_dir():
        return  # the small model, which is built when the run starts and looked at then
    differing = [name for name, mark in frozen_fingerprints(folder).items() if made_by.get(name) != mark]
    if differing:
        raise UserError(
            f"{source.folder} was encoded by another model than {folder}: by {manifest.model}.",
            f"They differ in {', '.join(differing)}.",
            f"Train with --model.path of the model it was encoded by, or encode the data set again with --encode {folder}.",
        )
