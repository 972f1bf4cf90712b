"""Every tiny pipeline beside a plain call of diffusers: how much the images differ, and the page of docs that says so."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.support.pipeline_calls import (
    CAR,
    NIGHT,
    SIZE,
    SNOW,
    STEPS,
    generate,
    generate_with_diffusers,
    load,
    max_difference,
)

PAGE = "equality.md"
_REQUESTS = (CAR, NIGHT, SNOW)


@dataclass(frozen=True)
class Case:
    """What makes a plain call of diffusers equal to `muralist generate`."""

    name: str
    guidance_scale: float = 7.5
    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments of diffusers beside prompt, negative prompt, size, steps, guidance scale and generator."""
    variant: str = ""
    empty_negative_prompt: str = ""
    """What diffusers is given where a row has no negative prompt."""


_UNCHANGED = {"use_resolution_binning": False, "clean_caption": False}
CASES = {
    case.name: case
    for case in (
        Case("hunyuan", arguments={"use_resolution_binning": False}, variant="v1.2"),
        Case("hunyuan11", arguments={"use_resolution_binning": False}, variant="v1.1"),
        Case("sd"),
        Case("sdxl"),
        Case("sd3"),
        Case("flux", variant="dev"),
        Case("schnell", guidance_scale=1.0, variant="schnell"),
        Case("pixart", arguments=_UNCHANGED),
        Case("pixart_alpha", arguments=_UNCHANGED),
        Case("sana", arguments=_UNCHANGED),
        Case("sana_sprint", arguments=_UNCHANGED | {"intermediate_timesteps": None}),
        Case("lcm"),
        Case("auraflow"),
        Case("lumina2"),
        Case("cogview3"),
        Case("cogview4"),
        Case("chroma"),
        Case("klein"),
        Case("zimage"),
        Case("qwenimage", arguments={"guidance_scale": None, "true_cfg_scale": 7.5}, empty_negative_prompt=" "),
        Case("wan21", arguments={"num_frames": 1}, variant="2.1"),
        Case("wan22", arguments={"num_frames": 1}, variant="2.2"),
        Case("ltx", arguments={"num_frames": 1}),
        Case("cogvideox", arguments={"num_frames": 1}),
        Case("hunyuanvideo", arguments={"num_frames": 1}),
    )
}


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    pipeline: str
    arguments: str
    alone: int
    """Maximum difference in gray levels, one image at a time on both sides."""
    batched: int | None
    """Maximum difference of images in a batch of three to diffusers' images alone; None without batches."""

    def __str__(self) -> str:
        # Which images differ by one level depends on the CPU.
        batched = "one at a time" if self.batched is None else f"at most {max(1, self.batched)}"
        return f"| {self.pipeline} | {self.arguments} | {self.alone} | {batched} |"


def measure(case: Case, folder: Path) -> Row:
    """Generate the same images with muralist, alone and in a batch, and with diffusers."""
    pipeline = load(folder, guidance_scale=case.guidance_scale)
    arguments = {"guidance_scale": case.guidance_scale} | case.arguments
    theirs = [
        generate_with_diffusers(
            folder, request._replace(negative_prompt=request.negative_prompt or case.empty_negative_prompt), **arguments
        )[0]
        for request in _REQUESTS
    ]
    alone = [generate(pipeline, request)[0] for request in _REQUESTS]
    batched = generate(pipeline, *_REQUESTS) if pipeline.supports_batching() else None
    if case.empty_negative_prompt:
        arguments["negative_prompt"] = case.empty_negative_prompt
    name = json.loads((folder / "model_index.json").read_text())["_class_name"]
    return Row(
        f"{name} ({case.variant})" if case.variant else name,
        ", ".join(f"`{name}={value!r}`" for name, value in arguments.items()),
        max(map(max_difference, alone, theirs)),
        None if batched is None else max(map(max_difference, batched, theirs)),
    )


def read_rows(page: str) -> list[str]:
    """Return the lines of the table, without its head."""
    return [line for line in page.splitlines() if line.startswith("| ") and "Pipeline" in line]


def equality_page(rows: list[Row]) -> str:
    """Return the page in Markdown."""
    classes = len({row.pipeline.partition(" ")[0] for row in rows})
    head = f"""# Equality with diffusers

`muralist generate` makes the images that a plain call of diffusers makes with the same prompt, negative prompt, size, steps,
guidance scale and `generator=torch.Generator("cpu").manual_seed(seed)`. The second column lists the arguments of
diffusers that have to be given for it; a negative prompt there takes the place of an empty one. The differences are the
maximum over all pixels of three images, in gray levels of 255. The table has {classes} pipeline classes.

| pipeline | arguments of diffusers | difference, one image at a time | difference, in batches of 3 |
|---|---|---|---|
"""
    versions = ", ".join(f"{name} {version(name).partition('+')[0]}" for name in ("torch", "diffusers", "transformers"))
    foot = f"""
*Tiny models with random weights, {SIZE[1]} x {SIZE[0]} pixels, {STEPS} steps, fp32 on a CPU, {versions}.
In batches, one image of muralist's batch is compared with diffusers' image alone. "One at a time": the shapes inside the
network depend on the lengths of all texts of a batch, so that an image would depend on its neighbors.*

Three rules make the difference to a call of diffusers with its defaults:

- Images have the size that was asked for: `use_resolution_binning=False`.
- Prompts are read as they are: `clean_caption=False`.
- Noise is drawn on the CPU in float32, in every precision and on every device. In bf16 and fp16, diffusers draws other noise
  from the same seed; give it `latents=` in the model's precision to compare.

`scripts/write_equality.py` writes this page; `tests/generate/test_equality.py` measures every line again.
"""
    return head + "".join(f"{row}\n" for row in rows) + foot
