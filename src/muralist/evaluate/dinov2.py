"""Features by DINOv2, as dgm-eval and EDM2 take them for FD-DINOv2: the class token after the last norm, at 224 x 224."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from muralist.data.images import decode
from muralist.errors import UserError
from muralist.evaluate.extractors import Loaded, look_at_checkpoint, read_checkpoint

SIDE = 224
RESIZING = (
    "bicubic to 224 x 224 with antialiasing, by Pillow, whatever the shape; ImageNet's mean and deviation; "
    "as dgm-eval does"
)
REPORTED = "ViT-L/14"
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_SIZES = {(384, 12): "S", (768, 12): "B", (1024, 24): "L", (1536, 40): "g"}
_FIX = "Give the folder of a DINOv2 model as transformers saves it, best a copy of facebook/dinov2-large."


@dataclass(frozen=True)
class Dinov2Features:
    """The class token of a DINOv2 of any size."""

    folder: Path
    digest: str
    width: int
    size: str
    """ViT-L/14, say: which one it is, as people call it."""
    name: str = "dinov2"
    tf32: bool = False

    @classmethod
    def of(cls, folder: Path) -> Dinov2Features:
        """Features by a checkpoint, after a look at what it says of itself."""
        from transformers import Dinov2Config

        config, digest = look_at_checkpoint(folder, Dinov2Config, "DINOv2", "--dinov2_path", _FIX)
        if SIDE % config.patch_size:
            raise UserError(
                f"The DINOv2 in {folder} has patches of {config.patch_size} pixels.",
                f"{SIDE} is no multiple of it.",
                _FIX,
            )
        layers, width, patch = config.num_hidden_layers, config.hidden_size, config.patch_size
        known = _SIZES.get((width, layers))
        size = f"ViT-{known}/{patch}" if known else f"ViT/{patch} of {layers} layers, {width} wide"
        return cls(folder, digest, width, size)

    @property
    def source(self) -> Path:
        """The file or folder of its weights."""
        return self.folder

    def load(self, device: torch.device) -> Loaded:
        """Read the weights."""
        from transformers import Dinov2Model

        model = read_checkpoint(self.folder, Dinov2Model, "DINOv2", _FIX)
        _place_patches(model)
        model.to(device)
        return Loaded(network_input, lambda batch: model(pixel_values=batch.to(device)).pooler_output)


def network_input(data: bytes) -> Tensor:
    """One picture as the network wants it."""
    picture = decode(data).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float().div(255)
    return (pixels - torch.tensor(_MEAN)[:, None, None]) / torch.tensor(_DEVIATION)[:, None, None]


def _place_patches(model: Any) -> None:
    """Resize the table of places, which was learnt at 518 x 518, as Meta's own code does.

    It says how much to scale, a tenth of a patch too much, where transformers says how large to become: all published
    numbers are of the former.
    """
    table = model.embeddings.position_embeddings
    side, wanted = round((table.shape[1] - 1) ** 0.5), SIDE // model.config.patch_size
    if side == wanted:
        return
    grid = table[:, 1:].reshape(1, side, side, -1).permute(0, 3, 1, 2)
    scale = (wanted + 0.1) / side
    resized = F.interpolate(grid, scale_factor=(scale, scale), mode="bicubic")
    places = resized.permute(0, 2, 3, 1).reshape(1, wanted * wanted, -1)
    model.embeddings.position_embeddings = torch.nn.Parameter(torch.cat((table[:, :1], places), 1), False)
