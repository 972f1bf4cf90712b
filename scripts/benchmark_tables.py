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
_WORK = {"train": "training step", "sample": "sampling", "generate": "`muralist generate`", "fid": "FID features",
         "lengths": "prompts of various lengths"}  # fmt: skip
_BASELINE = {"train": "official code", "sample": "official code", "generate": "plain diffusers", "fid": "pytorch-fid"}
_TOKENS = 256  # per image, of every JiT in the table
_SUMMARY = {
    "train-b4-256": "JiT-B/4 training, batch 256",
    "sample-b4-64": "JiT-B/4 sampling, batch 64",
    "fid-256": "FID features of 256 px PNGs",
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
        kind = name.partition("-")[0]
        if name in items:
            ours, baseline, ratio = _medians(items[name])
        else:
            _, _, reader, record, key = EARLIER[name]
            ours, baseline, ratio = reader(record, key)
        ours = ours.partition(" (")[0]  # the warm rate; the second table has both
        rows.append(f"| {label} | {ours} | {baseline}, {_BASELINE[kind]} | **{ratio}** |")
    return "\n".join(rows)


def table(record: Path = RESULTS / STANDARD) -> str:
    """Return the table of all items."""
    items = read_items(record)
    has_commands = any(_whole(item) for item in items.values())
    rows = ["| model | setting | ours | baseline | ratio |", "|---|---|---|---|---|"]
    if has_commands:
        rows = [rows[0] + " whole command |", rows[1] + "---|"]
    for item in items.values():
        height, width = item["size"]
        size = f"{width} x {height}" if height != width else f"{height} px"
        setting = f"{_WORK[item['kind']]}, batch {item['batch']}" if item["kind"] != "fid" else _WORK["fid"]
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


def _steps(record: str, case: str) -> tuple[str, str, str]:
    """Return the rates of a training step and their ratio, from a record of bench/train_speed.py."""
    rows = {row["variant"]: row for row in _read(record)["rows"] if row["case"] == case}
    theirs = rows.get("other") or rows.get("the official code's step")
    ours = rows["fused+graphs"]["K tokens/s"]
    assert theirs
    return f"{ours:.1f}K tokens/s", f"{theirs['K tokens/s']:.1f}K tokens/s", f"{ours / theirs['K tokens/s']:.2f}x"


def _fp8(record: str, case: str) -> tuple[str, str, str]:
    rows = [row for row in _read(record)["rows"] if (row["case"], row["variant"]) == (case, "fused+graphs+fp8")]
    return f"{rows[0]['K tokens/s']:.1f}K tokens/s", "", ""


def _samples(record: str, case: str) -> tuple[str, str, str]:
    rows = {row["variant"]: row["images/s"] for row in _read(record)["rows"] if row["case"] == case}
    return _compare(rows["muralist"], rows["other"])


def _generated(record: str, model: str) -> tuple[str, str, str]:
    found = _read(record)["models"][model]
    ours, theirs = (
        found["muralist generate"]["images/s"],
        found["plain diffusers loop, one prompt at a time"]["images/s"],
    )
    return _compare(ours, theirs)


def _features(record: str, size: str) -> tuple[str, str, str]:
    found = _read(record)["results"][size]
    ours = found["muralist, TF32"]
    rate, baseline, ratio = _compare(ours["images/s, warm"], found["pytorch-fid"]["images/s, warm"])
    whole = ours["images/s, with hashing, loading and reading back"]
    return f"{rate} ({whole:,.0f} images/s with hashing and loading, 5,000 files)", baseline, ratio


def _compare(ours: float, theirs: float) -> tuple[str, str, str]:
    return _rate("images", ours), _rate("images", theirs), f"{ours / theirs:.2f}x"


def _read(record: str) -> dict[str, Any]:
    return dict(json.loads((RESULTS / record).read_text()))


EARLIER = {
    "train-b4-256-fp8": ("JiT-B/4, 64 px", "training step, batch 256, `--precision fp8`", _fp8, "train_speed_h200.json",
                         "JiT-B/4@64x256"),
    "train-b16-128": ("JiT-B/16, 256 px", "training step, batch 128", _steps, "train_speed_b16_h200.json",
                      "JiT-B/16@256x128"),
    "train-l16-64": ("JiT-L/16, 256 px", "training step, batch 64", _steps, "train_speed_l16_official_h200.json",
                     "JiT-L/16@256x64"),
    "sample-b4-256": ("JiT-B/4, 64 px", "sampling, batch 256", _samples, "jit_generate_speed_h200.json",
                      "JiT-B/4@64x256"),
    "sample-b16-128": ("JiT-B/16, 256 px", "sampling, batch 128", _samples, "jit_generate_speed_h200.json",
                       "JiT-B/16@256x128"),
    "generate-wan": ("Wan-2.1-1.3B, 832 x 480", "`muralist generate`, batch 8", _generated,
                     "generate_wan_ahead_h200.json", "wan"),
    "generate-hunyuan": ("HunyuanDiT-1.5B, 1024 px", "`muralist generate`, batch 4", _generated,
                         "generate_recorded_h200.json", "hunyuan"),
    "generate-sdxl": ("SDXL, 1024 px", "`muralist generate`, batch 8", _generated, "generate_recorded_h200.json", "sdxl"),
    "fid-256": ("Inception-v3, 256 px", "FID features", _features, "fid_speed_h200.json", "256 px"),
    "fid-32": ("Inception-v3, 32 px", "FID features", _features, "fid_speed_h200.json", "32 px"),
}  # fmt: skip
"""Items that were measured before the rounds alternated: model, setting, reader, record and its key."""


def earlier() -> str:
    """Return the table of items that the standard record does not have yet."""
    rows = ["| model | setting | ours | baseline | ratio | record |", "|---|---|---|---|---|---|"]
    done = read_items()
    for name, (model, setting, reader, record, key) in EARLIER.items():
        if name not in done:
            ours, baseline, ratio = reader(record, key)
            link = f"[{record.removesuffix('_h200.json')}](bench/results/{record})"
            rows.append(f"| {model} | {setting} | {ours} | {baseline} | {ratio} | {link} |")
    return "\n".join(rows)


def conditions() -> str:
    """Return the footnote of the table: hardware, versions, what each side does, and the commands."""
    items = read_items()
    machines = sorted({item["machine"].split(",")[0] for item in items.values()})
    first = next(iter(items.values()))
    commits = {name: item[key] for item in items.values() for name, key in
               (("JiT", "commit of official"), ("pytorch-fid", "commit of pytorch_fid")) if key in item}  # fmt: skip
    rounds = " or ".join(map(str, sorted({_rounds(item) for item in items.values()})))
    versions = ", ".join(f"{name} {first['versions'][name]}" for name in ("torch", "diffusers"))
    named = ", ".join(f"{name} {commit[:7]}" for name, commit in commits.items())
    return (
        f"*One {' or '.join(machines)}, {first['cores']} virtual cores, {versions}, bf16; {named}. Medians of "
        f"{rounds} alternating rounds ([record](bench/results/{STANDARD}) with clocks, power and matmul rate of "
        "every round). Ours: training step and sampler compiled, with CUDA graphs. Baseline: the official JiT at the same "
        "batch, with its own compiled blocks and float32 attention scores; for generation plain diffusers, not compiled, "
        "one prompt at a time, which is bound by the host's CPU. Generation: 20 steps, guidance, random weights. "
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


BLOCKS = {"summary": summary, "table": table, "conditions": conditions, "commands": commands, "earlier": earlier}


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
