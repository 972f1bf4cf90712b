"""The three pictures of docs/inside.md: boxes on a grid and arrows between them, as SVG.

python scripts/draw_docs.py docs       writes docs/inside-*.svg (`make docs` does)
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN = 172, 92, 44, 58, 28
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
    """A step: what it is, the file it lives in, what it does."""

    column: float
    row: float
    title: str
    home: str
    does: tuple[str, ...]
    tone: str = "work"

    @property
    def left(self) -> float:
        """Its left edge in pixels."""
        return MARGIN + self.column * (WIDTH + GAP_X)

    @property
    def top(self) -> float:
        """Its upper edge in pixels."""
        return MARGIN + 34 + self.row * (HEIGHT + GAP_Y)

    @property
    def centre(self) -> tuple[float, float]:
        """Its middle in pixels."""
        return self.left + WIDTH / 2, self.top + HEIGHT / 2


@dataclass(frozen=True)
class Arrow:
    """From one box to another, by their titles."""

    start: str
    end: str
    label: str = ""
    dashed: bool = False


@dataclass(frozen=True)
class Picture:
    """A heading, boxes and arrows."""

    name: str
    heading: str
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]


TRAINING = Picture(
    "inside-training",
    "Data through training",
    (
        Box(0, 0, "source", "data/sources.py", ("folder, CSV, tars,", "Parquet, packed, ..."), "data"),
        Box(1, 0, "stream", "data/stream.py", ("sample n is a function", "of (seed, n)"), "data"),
        Box(2, 0, "loader", "data/loader.py", ("this rank's slice of", "every global batch"), "data"),
        Box(3, 0, "encode", "models/*_family.py", ("frozen parts: VAE, text;", "nothing for JiT")),
        Box(4, 0, "loss", "models/*_family.py", ("noise and time keyed", "by sample number")),
        Box(4, 1, "stepper", "train/stepper.py", ("gradients, AdamW,", "two averages")),
        Box(3, 1, "recorder", "train/recorder.py", ("reads the device in", "groups, never waits")),
        Box(2, 1, "monitors", "train/monitors.py", ("metrics.jsonl, TensorBoard,", "W&B, terminal"), "file"),
        Box(4, 2, "keeper", "train/keeper.py", ("held-out loss, then", "checkpoint, then samples")),
        Box(3, 2, "checkpoint", "train/checkpoint.py", ("written aside while", "training goes on"), "file"),
        Box(2, 2, "samples", "train/samples.py", ("a picture by every GPU,", "and the sheet"), "file"),
        Box(0, 1, "images seen", "train/schedule.py", ("the only clock: rate,", "averages, cadence, end"), "care"),
        Box(0, 2, "keyed random", "keyed_random.py", ("(seed, purpose, sample)", "-> the number"), "care"),
    ),
    (
        Arrow("source", "stream"),
        Arrow("stream", "loader"),
        Arrow("loader", "encode"),
        Arrow("encode", "loss"),
        Arrow("loss", "stepper"),
        Arrow("stepper", "recorder"),
        Arrow("recorder", "monitors"),
        Arrow("stepper", "keeper", "at checkpoints"),
        Arrow("keeper", "checkpoint"),
        Arrow("checkpoint", "samples"),
    ),
)
GENERATION = Picture(
    "inside-generation",
    "A row through generation",
    (
        Box(0, 0, "table", "data/prompts.py", ("a row: prompt, and if", "it likes id and seed"), "data"),
        Box(1, 0, "plan", "generate/plan.py", ("seed, file name, place in", "a batch: from the row"), "data"),
        Box(2, 0, "fleet", "generate/fleet.py", ("batches of one shape,", "round-robin")),
        Box(3, 0, "worker", "generate/worker.py", ("one per GPU, with", "a heartbeat")),
        Box(4, 0, "painter", "generate/*_painter.py", ("noise from the sample's", "own seed; the model")),
        Box(4, 1, "picture", "generate/store.py", ("written aside, renamed;", "says how it was made"), "file"),
        Box(3, 1, "ledger", "generate/ledger.py", ("a line per picture: hash,", "GPU, seconds, settings"), "file"),
        Box(2, 1, "lost worker", "generate/fleet.py", ("dead or silent: others", "take its rows"), "care"),
        Box(1, 1, "resume", "generate/folder.py", ("whole files are skipped,", "torn ones made again"), "care"),
        Box(
            3,
            2,
            "failing prompt",
            "generate/worker.py",
            ("tried alone, then named in", "failed_prompts_gpuN.txt"),
            "care",
        ),
    ),
    (
        Arrow("table", "plan"),
        Arrow("plan", "fleet"),
        Arrow("fleet", "worker"),
        Arrow("worker", "painter"),
        Arrow("painter", "picture"),
        Arrow("picture", "ledger"),
        Arrow("worker", "lost worker", dashed=True),
        Arrow("lost worker", "fleet", dashed=True),
        Arrow("resume", "plan", dashed=True),
        Arrow("failing prompt", "ledger", dashed=True),
    ),
)
CHECKPOINT = Picture(
    "inside-checkpoint",
    "A checkpoint's life",
    (
        Box(0, 0, "state", "train/stepper.py", ("network, optimizer,", "averages, images seen")),
        Box(1, 0, "copy", "train/writer.py", ("to host memory: the only", "time training waits")),
        Box(2, 0, "written aside", "train/checkpoint.py", ("a name nobody reads;", "every file flushed"), "file"),
        Box(3, 0, "manifest", "train/checkpoint.py", ("size and hash of every", "file; sealed last"), "file"),
        Box(4, 0, "renamed", "train/checkpoint.py", ("step_0001000 exists;", "then latest names it"), "file"),
        Box(4, 1, "checked", "train/checkpoint.py", ("before it is used:", "hashes against files")),
        Box(3, 1, "resumed", "train/start.py", ("on any number of ranks;", "the same bits follow")),
        Box(4, 2, "damaged", "train/checkpoint.py", ("named; the one before", "is taken instead"), "care"),
        Box(2, 1, "thinned out", "train/checkpoint.py", ("old ones go when a newer", "one is whole"), "care"),
        Box(1, 1, "exported", "models/export.py", ("safetensors that other", "programs read"), "file"),
    ),
    (
        Arrow("state", "copy"),
        Arrow("copy", "written aside"),
        Arrow("written aside", "manifest"),
        Arrow("manifest", "renamed"),
        Arrow("renamed", "checked"),
        Arrow("checked", "resumed"),
        Arrow("checked", "damaged", dashed=True),
    ),
)


def draw(picture: Picture) -> str:
    """The picture as SVG text."""
    boxes = {box.title: box for box in picture.boxes}
    width = max(box.left for box in picture.boxes) + WIDTH + MARGIN
    height = max(box.top for box in picture.boxes) + HEIGHT + MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img" aria-label="{escape(picture.heading)}">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{FAINT}"/></marker></defs>',
        f'<rect width="{width:g}" height="{height:g}" rx="10" fill="{PAPER}"/>',
        _text(MARGIN, MARGIN + 8, picture.heading, 17, INK, SANS, "start", 600),
    ]
    lines += [_arrow(boxes[arrow.start], boxes[arrow.end], arrow) for arrow in picture.arrows]
    lines += [_box(box) for box in picture.boxes]
    return "\n".join([*lines, "</svg>", ""])


def _box(box: Box) -> str:
    fill, edge = TONES[box.tone]
    middle = box.centre[0]
    parts = [
        f'<rect x="{box.left:g}" y="{box.top:g}" width="{WIDTH}" height="{HEIGHT}" rx="9" fill="{fill}" stroke="{edge}"/>',
        _text(middle, box.top + 24, box.title, 15, INK, SANS, "middle", 600),
        _text(middle, box.top + 41, box.home, 11, FAINT, MONO, "middle"),
    ]
    parts += [_text(middle, box.top + 61 + 16 * number, line, 12, INK, SANS) for number, line in enumerate(box.does)]
    return "\n".join(parts)


def _arrow(start: Box, end: Box, arrow: Arrow) -> str:
    """From edge to edge, straight: along the row, along the column, or slanting from one row to the next."""
    (x1, y1), (x2, y2) = start.centre, end.centre
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
    """Write every picture into a folder."""
    for picture in (TRAINING, GENERATION, CHECKPOINT):
        (folder / f"{picture.name}.svg").write_text(draw(picture), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
