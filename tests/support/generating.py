"""Arguments of `muralist generate` with a tiny model, and readers of its output folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from muralist.data.ledger_reader import read_lines

SCRIPT = "batch_generate_t2i_multigpu.py"
# Batches of three: on a CPU, with these sizes, the last place in them gives other bits than the first.
_TINY = ["--height", "32", "--width", "32", "--dtype", "fp32", "--batch_size", "3"]


def write_table(folder: Path, rows: int) -> Path:
    """A table of prompts that differ."""
    path = folder / "prompts.csv"
    path.write_text("prompt\n" + "".join(f"a red cube on table {row}\n" for row in range(rows)))
    return path


def generate_arguments(table: Path, model: Path, output: Path, *more: object, steps: int = 4) -> list[str]:
    """The arguments of the command."""
    paths = ["--prompts_csv", table, "--model_path", model, "--output_dir", output]
    return [str(argument) for argument in (*paths, *_TINY, "--num_inference_steps", steps, *more)]


def read_images(output: Path) -> dict[str, bytes]:
    """Every image's bytes, by name."""
    return {path.name: path.read_bytes() for path in output.glob("*.png")}


def makers(output: Path) -> dict[int, str]:
    """The worker of each row, from the ledger."""
    return {line["index"]: line["gpu"] for line in read_lines(output / "ledger.jsonl")}


def made_by(output: Path, label: object) -> int:
    """How many images a worker of a running command has made."""
    shard = output / ".ledger" / f"gpu{label}.jsonl"
    return shard.read_text().count('"status": "done"') if shard.exists() else 0


def other_files(output: Path) -> dict[str, Any]:
    """All files beside the images and the ledger, hidden ones too."""
    kept = [path for path in output.iterdir() if path.suffix != ".png" and path.name != "ledger.jsonl"]
    return {path.name: path.read_text() if path.is_file() else "a folder" for path in kept}
