"""A pipeline's text encoders, such that they can be recorded and say the same to the bit whether they are or not."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_NAME = re.compile(r"text_encoder(_\d+)?")
_MAKERS_OF_MASKS = ("transformers.masking_utils", "transformers.modeling_attn_mask_utils")
_ASKED = "is_tracing"


def text_encoders(pipe: Any) -> list[nn.Module]:
    """Those of its parts that turn tokens into embeddings."""
    parts = pipe.components.items()
    return [part for name, part in parts if _NAME.fullmatch(name) and isinstance(part, nn.Module)]


def keep_no_cache(encoder: Any) -> None:
    """Leave out what a language model would need to go on writing: a recording cannot hand it out, and nobody asks."""
    config: Any = getattr(encoder, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    if getattr(config, "use_cache", False):
        config.use_cache = False


@contextmanager
def whole_masks(wanted: bool) -> Iterator[None]:
    """Let text encoders mask what is to be masked even where that is nothing, as they do while they are recorded.

    By itself transformers looks whether a prompt fills all its tokens, for which it waits for the GPU, and if so computes
    attention by other kernels. A recording cannot look. A prompt's last bits would depend on whether there is one.
    """
    loaded = (sys.modules.get(name) for name in _MAKERS_OF_MASKS)
    makers = [maker for maker in loaded if wanted and hasattr(maker, _ASKED)]
    original = [getattr(maker, _ASKED) for maker in makers]
    for maker in makers:
        setattr(maker, _ASKED, lambda tensor=None: True)
    try:
        yield
    finally:
        for maker, asked in zip(makers, original, strict=True):
            setattr(maker, _ASKED, asked)
