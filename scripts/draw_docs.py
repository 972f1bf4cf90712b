"""Draw the diagrams of docs/architecture.md: boxes on a grid and arrows between them, as SVG.

python scripts/draw_docs.py docs       writes docs/architecture-*.svg (`make docs` does)
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN = 208, 92, 34, 58, 28
PAPER, INK, FAINT = "#faf8f4", "#20222a", "#6a6c74"
TONES = {
    "data": ("#eef4fb", "#9db9d9"),
    "work": ("#ffffff", "#cfcabd"),
    "file": ("#f1f7ee", "#a3c293"),
    "care": ("#fdf1e7", "#e0b48a"),
}
MONO, SANS = "ui-monospace, Menlo, monospace", "system-ui, sans-serif"


@dataclass(frozen=True)
class Box:
    """One stage: its title, its file, what it does."""

    column: float
    row: float
    title: str
    file: str
    does: tuple[str, ...]
    tone: str = "work"

    @property
    def left(self) -> float:
        """Return the left edge in pixels."""
        return MARGIN + self.column * (WIDTH + GAP_X)

    @property
    def top(self) -> float:
        """Return the top edge in pixels."""
        return MARGIN + 34 + self.row * (HEIGHT + GAP_Y)

    @property
    def center(self) -> tuple[float, float]:
        """Return the center in pixels."""
        return self.left + WIDTH / 2, self.top + HEIGHT / 2


@dataclass(frozen=True)
class Arrow:
    """An arrow from one box to another, by their titles."""

    start: str
    end: str
    label: str = ""
    dashed: bool = False


@dataclass(frozen=True)
class Diagram:
    """A heading, boxes and arrows."""

    name: str
    heading: str
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]


TRAINING = Diagram(
    "architecture-training",
    "One training step",
    (
        Box(0, 0, "order", "data/sampler.py", ("sample n is a function", "of (seed, n)"), "data"),
        Box(1, 0, "source", "data/sources/*.py", ("folder, table, tar,", "Parquet, packed, ..."), "data"),
        Box(2, 0, "decode", "data/decode.py", ("uint8 RGB, cropped", "to size"), "data"),
        Box(3, 0, "loader", "data/loader.py", ("this rank's slice of", "the global batch"), "data"),
        Box(4, 0, "loop", "train/trainer.py", ("next batch, requests,", "step, checkpoint")),
        Box(4, 1, "step", "train/step.py", ("forward, backward,", "optimizer, EMA")),
        Box(3, 1, "loss wrapper", "train/parallel.py", ("DDP, FSDP2 or", "DeepSpeed")),
        Box(2, 1, "model spec", "models/jit_spec.py", ("encode, then", "loss per sample")),
        Box(1, 1, "flow", "diffusion/flow.py", ("time, noise, x_t,", "velocity loss")),
        Box(0, 1, "network", "models/jit.py", ("transformer blocks", "on patches")),
        Box(0, 2, "kernels", "kernels/ops.py", ("plain PyTorch, or", "Triton on GPUs")),
        Box(1, 2, "RNG", "core/rng.py", ("Philox: (seed, purpose,", "sample index)"), "care"),
        Box(2, 2, "schedule", "train/schedule.py", ("learning rate and EMA", "from images seen"), "care"),
        Box(3, 2, "optimizer, EMA", "train/step.py", ("AdamW and", "two EMAs")),
        Box(4, 2, "metrics", "train/metrics.py", ("read from the GPU a few", "steps later, then logged"), "file"),
    ),
    (
        Arrow("order", "source"),
        Arrow("source", "decode"),
        Arrow("decode", "loader"),
        Arrow("loader", "loop"),
        Arrow("loop", "step"),
        Arrow("step", "loss wrapper"),
        Arrow("loss wrapper", "model spec"),
        Arrow("model spec", "flow"),
        Arrow("flow", "network"),
        Arrow("network", "kernels"),
        Arrow("RNG", "flow", dashed=True),
        Arrow("schedule", "optimizer, EMA", dashed=True),
        Arrow("step", "optimizer, EMA"),
        Arrow("step", "metrics"),
    ),
)
GENERATION = Diagram(
    "architecture-generation",
    "One generated image",
    (
        Box(0, 0, "command", "generate/command.py", ("settings, lock, plan,", "pool, summary")),
        Box(1, 0, "prompt table", "data/prompts.py", ("a row: prompt, and", "optional id and seed"), "data"),
        Box(2, 0, "plan", "generate/plan.py", ("seed, file name, size and", "batch slot of a row"), "data"),
        Box(3, 0, "scheduler", "generate/scheduler.py", ("batches of one shape,", "round-robin, then shared")),
        Box(4, 0, "worker pool", "core/worker_pool.py", ("one process per GPU,", "or a Ray actor")),
        Box(4, 1, "worker", "generate/worker.py", ("pads batches, waits", "for saved images")),
        Box(3, 1, "pipeline", "generate/diffusers_pipeline.py", ("diffusers; JiT has", "jit_pipeline.py")),
        Box(2, 1, "text", "generate/diffusers_pipeline.py", ("one prompt at a time,", "cached")),
        Box(1, 1, "denoising", "generate/denoising.py", ("guidance truncation,", "step caching")),
        Box(0, 1, "patches", "generate/diffusers_patches.py", ("private parts of", "diffusers"), "care"),
        Box(4, 2, "image file", "generate/image_files.py", ("PNG, WebP or mp4,", "in threads or processes"), "file"),
        Box(3, 2, "ledger", "generate/output_dir.py", ("a line per image: hash,", "GPU, seconds"), "file"),
        Box(2, 2, "output folder", "generate/output_dir.py", ("intact files are skipped", "when resuming"), "care"),
    ),
    (
        Arrow("command", "prompt table"),
        Arrow("prompt table", "plan"),
        Arrow("plan", "scheduler"),
        Arrow("scheduler", "worker pool"),
        Arrow("worker pool", "worker"),
        Arrow("worker", "pipeline"),
        Arrow("pipeline", "text"),
        Arrow("text", "denoising"),
        Arrow("patches", "denoising", dashed=True),
        Arrow("worker", "image file"),
        Arrow("image file", "ledger"),
        Arrow("ledger", "output folder"),
    ),
)
EVALUATION = Diagram(
    "architecture-evaluation",
    "One evaluated image",
    (
        Box(0, 0, "inputs", "evaluate/inputs.py", ("images, prompts,", "reference"), "data"),
        Box(1, 0, "feature cache", "evaluate/features.py", ("hash of the file;", "known features"), "file"),
        Box(2, 0, "features", "evaluate/features.py", ("missing items, on one", "process or several")),
        Box(3, 0, "workers", "evaluate/features.py", ("one process per device", "(worker pool)")),
        Box(4, 0, "extraction", "evaluate/features.py", ("decode ahead, compute,", "store")),
        Box(4, 1, "decoders", "evaluate/decoders.py", ("processes with", "shared memory"), "data"),
        Box(3, 1, "decode", "data/decode.py", ("ISA-L and libspng,", "or Pillow"), "data"),
        Box(2, 1, "encoder", "evaluate/encoders.py", ("Inception, CLIP,", "DINOv2")),
        Box(1, 1, "metrics", "evaluate/metrics.py", ("value and influence", "function, float64")),
        Box(0, 1, "report", "evaluate/command.py", ("report.json, then", "the page"), "file"),
    ),
    (
        Arrow("inputs", "feature cache"),
        Arrow("feature cache", "features"),
        Arrow("features", "workers"),
        Arrow("workers", "extraction"),
        Arrow("extraction", "decoders"),
        Arrow("decoders", "decode"),
        Arrow("decode", "encoder"),
        Arrow("encoder", "metrics"),
        Arrow("metrics", "report"),
    ),
)
CHECKPOINT = Diagram(
    "architecture-checkpoint",
    "The life of a checkpoint",
    (
        Box(0, 0, "state", "train/step.py", ("network, optimizer,", "EMA, images seen")),
        Box(1, 0, "copy", "train/checkpoint.py", ("to pinned memory: the", "only pause of training")),
        Box(2, 0, "write", "train/checkpoint.py", ("temporary name,", "every file flushed"), "file"),
        Box(3, 0, "manifest", "train/checkpoint.py", ("size and hash of every", "file, written last"), "file"),
        Box(4, 0, "rename", "train/checkpoint.py", ("step_0001000 exists,", "latest names it"), "file"),
        Box(4, 1, "verify", "train/checkpoint.py", ("hashes of all files", "before use")),
        Box(3, 1, "resume", "train/resume.py", ("on any number of", "ranks, same bits")),
        Box(4, 2, "damaged", "train/checkpoint.py", ("logged; the previous", "checkpoint is used"), "care"),
        Box(2, 1, "prune", "train/checkpoint.py", ("old ones, once a newer", "one is complete"), "care"),
        Box(1, 1, "export", "models/weights.py", ("safetensors for", "other programs"), "file"),
    ),
    (
        Arrow("state", "copy"),
        Arrow("copy", "write"),
        Arrow("write", "manifest"),
        Arrow("manifest", "rename"),
        Arrow("rename", "verify"),
        Arrow("verify", "resume"),
        Arrow("verify", "damaged", dashed=True),
    ),
)
DIAGRAMS = (TRAINING, GENERATION, EVALUATION, CHECKPOINT)


def draw(diagram: Diagram) -> str:
    """Return the diagram as SVG text."""
    boxes = {box.title: box for box in diagram.boxes}
    width = max(box.left for box in diagram.boxes) + WIDTH + MARGIN
    height = max(box.top for box in diagram.boxes) + HEIGHT + MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img" aria-label="{escape(diagram.heading)}">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{FAINT}"/></marker></defs>',
        f'<rect width="{width:g}" height="{height:g}" rx="10" fill="{PAPER}"/>',
        _text(MARGIN, MARGIN + 8, diagram.heading, 17, INK, SANS, "start", 600),
    ]
    lines += [_arrow(boxes[arrow.start], boxes[arrow.end], arrow) for arrow in diagram.arrows]
    lines += [_box(box) for box in diagram.boxes]
    return "\n".join([*lines, "</svg>", ""])


def _box(box: Box) -> str:
    fill, edge = TONES[box.tone]
    middle = box.center[0]
    parts = [
        f'<rect x="{box.left:g}" y="{box.top:g}" width="{WIDTH}" height="{HEIGHT}" rx="9" fill="{fill}" stroke="{edge}"/>',
        _text(middle, box.top + 24, box.title, 15, INK, SANS, "middle", 600),
        _text(middle, box.top + 41, box.file, 11, FAINT, MONO, "middle"),
    ]
    parts += [_text(middle, box.top + 61 + 16 * index, line, 12, INK, SANS) for index, line in enumerate(box.does)]
    return "\n".join(parts)


def _arrow(start: Box, end: Box, arrow: Arrow) -> str:
    """Return a straight line from edge to edge: along the row, along the column, or between rows."""
    (x1, y1), (x2, y2) = start.center, end.center
    if start.row == end.row:
        side = 1 if x2 > x1 else -1
        x1, x2 = x1 + side * WIDTH / 2, x2 - side * WIDTH / 2
    else:
        side = 1 if y2 > y1 else -1
        y1, y2 = y1 + side * HEIGHT / 2, y2 - side * HEIGHT / 2
    dash = ' stroke-dasharray="5 4"' if arrow.dashed else ""
    line = (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{FAINT}" stroke-width="1.5"{dash} '
        'marker-end="url(#tip)"/>'
    )
    if not arrow.label:
        return line
    return line + "\n" + _text((x1 + x2) / 2 - 10, (y1 + y2) / 2 + 4, arrow.label, 11, FAINT, SANS, "end")


def _text(
    x: float, y: float, text: str, size: int, fill: str, family: str, anchor: str = "middle", weight: int = 400
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" text-anchor="{anchor}" font-weight="{weight}" '
        f'font-family="{family}">{escape(text)}</text>'
    )


def main(folder: Path) -> None:
    """Write every diagram into a folder."""
    for diagram in DIAGRAMS:
        (folder / f"{diagram.name}.svg").write_text(draw(diagram), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
