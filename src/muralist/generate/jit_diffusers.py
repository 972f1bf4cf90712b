"""An exported JiT as a diffusers pipeline: DiffusionPipeline.from_pretrained(FOLDER, trust_remote_code=True).

diffusers imports this module for the files that `muralist export` writes; no module of muralist does. Weights, classes
and sampler are those of `muralist generate`, and so are the pixels for the same seed, steps, guidance and precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import ModelMixin  # diffusers looks this name up here to find the loader
from diffusers.pipelines.pipeline_utils import DiffusionPipeline, ImagePipelineOutput
from PIL import Image

from muralist.core.images import to_uint8
from muralist.models.jit import JiT
from muralist.models.jit_spec import JiTSpec, jit_arguments, read_jit_folder, read_jit_spec
from muralist.settings import SampleSettings

_DEFAULT_SEED, _DEFAULT_STEPS = 42, 50  # of `muralist generate`


class JiTTransformer2DModel(JiT, ModelMixin):  # type: ignore[misc]  # both define forward and gradient_checkpointing
    """The network of an exported JiT."""

    spec: JiTSpec
    autocast_dtype: torch.dtype

    @classmethod
    def from_pretrained(cls, folder: str, torch_dtype: torch.dtype | None = None, **_: Any) -> JiTTransformer2DModel:
        """Load an export; with a 16-bit type, matmuls run in it and the weights stay in float32."""
        config, weights = read_jit_folder(folder)
        with torch.device("meta"):
            network = cls(**jit_arguments(config))
        network.to_empty(device="cpu").load_state_dict(weights)
        network.spec = read_jit_spec(Path(folder), {}, "ema1")
        network.autocast_dtype = torch_dtype or torch.float32
        return network.eval().requires_grad_(False)


class JiTPipeline(DiffusionPipeline):
    """Generates images of classes."""

    transformer: JiTTransformer2DModel

    def __init__(self, transformer: JiTTransformer2DModel) -> None:
        super().__init__()
        self.register_modules(transformer=transformer)

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | Sequence[str],
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
    ) -> Any:
        """Generate an image for each prompt, a class name or label.

        The defaults are 50 steps and a guidance of 2.9; a distilled model has its own and refuses others.
        The initial seed of each generator is the seed of `muralist generate`; one generator has seed, seed + 1, ...
        """
        network = self.transformer
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        if generator is None or isinstance(generator, torch.Generator):
            first = _DEFAULT_SEED if generator is None else generator.initial_seed()
            seeds = [first + index for index in range(len(prompts))]
        else:
            seeds = [one.initial_seed() for one in generator]
        if len(seeds) != len(prompts):
            raise ValueError(
                f"{len(seeds)} generators for {len(prompts)} prompts: give one per prompt, or a single one."
            )
        if output_type not in ("pil", "np", "pt"):
            raise ValueError(f"output_type is {output_type!r}: expected pil, np or pt.")
        distilled = network.spec.distilled
        default_steps = distilled.steps if distilled else _DEFAULT_STEPS
        settings = SampleSettings(
            steps=default_steps if num_inference_steps is None else num_inference_steps,
            guidance="auto" if guidance_scale is None else guidance_scale,
        )
        weight = next(network.parameters())
        dtype = network.autocast_dtype if weight.dtype == torch.float32 else weight.dtype  # after pipeline.to(dtype)
        with torch.autocast(weight.device.type, dtype, enabled=dtype != torch.float32):
            images = network.spec.sample(network, prompts, seeds, settings)  # [B, C, H, W] in [-1, 1]
        found: Any = (images.float() + 1) / 2
        if output_type == "np":
            found = found.permute(0, 2, 3, 1).cpu().numpy()
        elif output_type == "pil":
            found = [Image.fromarray(array) for array in to_uint8(images).cpu().numpy()]
        return ImagePipelineOutput(images=found) if return_dict else (found,)
