"""Write the benchmark tables of README and docs from the records in bench/results.

python scripts/benchmark_tables.py                    rewrite the tables
python scripts/benchmark_tables.py --print RECORD     print the table of another record

A table is what stands between `<!-- benchmarks: NAME -->` and `<!-- end of benchmarks -->`. `tests/test_benchmarks.py` fails
if a table is not what this script writes, or if a figure elsewhere in README or docs is not in the record it names.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
STANDARD = "standard_h200.json"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"(<!-- benchmarks: (\w+) -->\n).*?(\n<!-- end of benchmarks -->)", re.DOTALL)
_WORK = {
    "train": "training step",
    "finetune": "fine-tuning step",
    "sample": "sampling",
    "generate": "`muralist generate`",
    "fid": "FID features",
    "lengths": "prompts of various lengths",
}
_BASELINE = {
    "train": "official code",
    "finetune": "diffusers + Accelerate",
    "sample": "official code",
    "generate": "plain diffusers",
    "fid": "pytorch-fid",
}
_TOKENS = 256  # per image, of every JiT in the table
_SUMMARY = {
    "train-b4-256": "JiT-B/4 training, batch 256",
    "sample-b4-64": "JiT-B/4 sampling, batch 64",
    "generate-wan": "Wan-2.1-1.3B, `muralist generate`",
}


def read_items(record: Path = RESULTS / STANDARD) -> dict[str, dict[str, Any]]:
    """Return the items of the standard benchmarks."""
    return dict(json.loads(record.read_text())["items"])


def _rate(kind: str, images: float) -> str:
    if kind == "train":
        return f"{images * _TOKENS / 1e3:.0f}K tokens/s"
    digits = 0 if images >= 1000 else 1 if images >= 10 else 2
    return f"{images:,.{digits}f} images/s"


def _medians(item: dict[str, Any]) -> tuple[str, str, str]:
    """Return our rate, the baseline's and their ratio; the last two are empty if there is no baseline."""
    rates = item["images/s, median"]
    ours = _rate(item["kind"], rates["muralist"])
    if "baseline" not in rates:
        return ours, "", ""
    return ours, _rate(item["kind"], rates["baseline"]), f"{item['ratio']['baseline']:.2f}x"


def summary() -> str:
    """Return the table at the top of README: three items."""
    rows = ["| one H200 | muralist | baseline | ratio |", "|---|---|---|---|"]
    items = read_items()
    for name, label in _SUMMARY.items():
        ours, baseline, ratio = _medians(items[name])
        rows.append(f"| {label} | {ours} | {baseline}, {_BASELINE[items[name]['kind']]} | **{ratio}** |")
    return "\n".join(rows)


def finetune() -> str:
    """Return the table of fine-tuning alone."""
    return _rows({name: item for name, item in read_items().items() if item["kind"] == "finetune"})


def table(record: Path = RESULTS / STANDARD) -> str:
    """Return the table of all items."""
    return _rows(read_items(record))


def _rows(items: dict[str, dict[str, Any]]) -> str:
    has_commands = any(_whole(item) for item in items.values())
    rows = ["| model | setting | ours | baseline | ratio |", "|---|---|---|---|---|"]
    if has_commands:
        rows = [rows[0] + " whole command |", rows[1] + "---|"]
    for item in items.values():
        height, width = item["size"]
        size = f"{width} x {height}" if height != width else f"{height} px"
        setting = f"{_WORK[item['kind']]}, batch {item['batch']}" if item["kind"] != "fid" else _WORK["fid"]
        setting += f", LoRA of rank {item['lora']}" if item.get("lora") else ""
        setting += ", `--precision fp8`" if item["precision"] == "fp8" else ""
        setting += f", `--preset {item['preset']}`" if item.get("preset", "exact") != "exact" else ""
        ours, baseline, ratio = _medians(item)
        row = f"| {item['model']}, {size} | {setting} | {ours} | {baseline} | {ratio} |"
        rows.append(row + (f" {_whole(item)} |" if has_commands else ""))
    return "\n".join(rows)


def _whole(item: dict[str, Any]) -> str:
    """Return how fast complete commands are, with start, loading and everything after the last image."""
    if item["kind"] == "generate":
        ours = [row for row in item["rounds"] if row["side"] == "muralist"]
        rate = sorted(row["images/s, whole command"] for row in ours)[len(ours) // 2]
        images = item["batch"] * len(ours[0]["seconds to the last file of each batch"])
        return f"{rate:.2f} images/s for {images} images"
    if "whole command" in item:
        whole = item["whole command"]
        theirs = f", baseline {whole['baseline']['seconds']:.1f} s" if "baseline" in whole else ""
        return f"{whole['images']:,} images in {whole['muralist']['seconds']:.1f} s{theirs}"
    return ""


def conditions() -> str:
    """Return the footnote of the table: hardware, versions, what each side does, and the commands."""
    items = read_items()
    machines = sorted({item["machine"].split(",")[0] for item in items.values()})
    first = next(iter(items.values()))
    commits = {name: item[key] for item in items.values() for name, key in
               (("JiT", "commit of official"), ("pytorch-fid", "commit of pytorch_fid")) if key in item}  # fmt: skip
    counts = [_rounds(item) for item in items.values()]
    rounds = f"{min(counts)} to {max(counts)}"
    versions = ", ".join(f"{name} {first['versions'][name]}" for name in ("torch", "diffusers"))
    named = ", ".join(f"{name} {commit[:7]}" for name, commit in commits.items())
    return (
        f"*One {' or '.join(machines)}, {first['cores']} virtual cores, {versions}, bf16; {named}. Medians of "
        f"{rounds} alternating rounds ([record](bench/results/{STANDARD}) with clocks, power and matmul rate of "
        "every round). Ours: training step and sampler compiled, with CUDA graphs "
        "(fine-tuning: blocks compiled, two EMAs). Baseline: the official JiT at the same "
        "batch, with its own compiled blocks and float32 attention scores; for generation plain diffusers, not compiled, "
        "one prompt at a time, which is bound by the host's CPU; for fine-tuning a loop with Accelerate, not "
        "compiled, no EMA. Generation: 20 steps, guidance, random weights. "
        "Prompts of various lengths: random weights, not compiled, Z-Image with 9 steps without guidance, Qwen-Image with "
        "10 steps and guidance. FID: Inception's weights rounded to 16 bits on both sides. "
        "Sampling: 50 Heun steps, guidance 2.9 on "
        "[0.1, 1], which is 198 network passes there and 187 here.*"
    )


def _rounds(item: dict[str, Any]) -> int:
    return sum(row["side"] == "muralist" for row in item["rounds"])


def commands() -> str:
    """Return the command that repeats the measurements."""
    return (
        "```bash\nmake bench OFFICIAL=path/to/JiT PYTORCH_FID=path/to/pytorch-fid     "
        "# on a GPU: the standard set, then this table\n```"
    )


BLOCKS = {"summary": summary, "table": table, "conditions": conditions, "commands": commands, "finetune": finetune}


def render(text: str) -> str:
    """Return a page with its tables rewritten."""
    return _BLOCK.sub(lambda found: found[1] + BLOCKS[found[2]]() + found[3], text)


def main() -> None:
    """Rewrite the tables of all pages."""
    if sys.argv[1:2] == ["--print"]:
        print(table(Path(sys.argv[2])))
        return
    for page in PAGES:
        text = page.read_text()
        if render(text) != text:
            page.write_text(render(text))
            print(f"{page.relative_to(ROOT)}: tables rewritten")


if __name__ == "__main__":
    main()
