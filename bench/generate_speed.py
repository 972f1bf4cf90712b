"""How fast one GPU makes pictures, beside the floor of its operations, and whether each is the same in any batch.

python bench/generate_speed.py NAME [MODEL@HEIGHTxWIDTH@BATCH ...]     such as wan-1.3b@480x832@8 DiT-g/2@1024x1024@auto

Runs `muralist generate` as a user would. Then deletes every second picture and runs it again, so that pictures are made in
other batches at other places than before, and compares all files byte by byte.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from bench import full_hunyuan, full_wan
from bench.full_hunyuan import build_full_hunyuan
from bench.full_wan import build_full_wan
from bench.measure_training import RESULTS, hardware

from muralist import __version__
from muralist.runfolder import write_json
from muralist.scale.flops import matmul_rate

MODELS = {
    "wan-1.3b": (build_full_wan, full_wan.operations_of_a_pass),
    "DiT-g/2": (build_full_hunyuan, full_hunyuan.operations_of_a_pass),
}
STEPS = 20
ROWS = 32


def measure(model: Path, size: tuple[int, int], batch: str, folder: Path) -> dict[str, Any]:
    """Generate, delete half, generate again."""
    table = folder / "prompts.csv"
    words = "a quiet street with {} parked cars and {} trees in the rain"
    table.write_text("prompt\n" + "".join(f'"{words.format(i, i * i)}"\n' for i in range(ROWS)))
    output = folder / f"pictures-{batch}"
    command = [sys.executable, "-m", "muralist", "generate", "--prompts_csv", str(table), "--output_dir", str(output)]
    command += ["--model_path", str(model), "--height", str(size[0]), "--width", str(size[1]), "--batch_size", batch]
    started = time.perf_counter()
    subprocess.run(command, check=True)
    whole = time.perf_counter() - started
    lines = [json.loads(line) for line in (output / "ledger.jsonl").read_text().splitlines()]
    seconds = sorted(line["seconds"] for line in lines[1:])
    before = {file.name: file.read_bytes() for file in sorted(output.glob("*.png"))}
    for file in list(before)[1::2]:
        (output / file).unlink()
    subprocess.run(command, check=True)
    after = {file.name: file.read_bytes() for file in output.glob("*.png")}
    return {
        "batch": lines[0]["batch_size"],
        "images per second, median batch": round(1 / seconds[len(seconds) // 2], 3),
        "seconds with loading the model": round(whole, 1),
        "pictures that differ when made in other batches": sum(before[name] != after.get(name) for name in before),
        "pictures": len(before),
    }


def main(name: str, cases: list[str]) -> None:
    """Measure each case and write the result."""
    results: dict[str, Any] = {}
    matmul = matmul_rate(torch.device("cuda" if torch.cuda.is_available() else "cpu"), torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            model, size, batch = case.split("@")
            height, width = map(int, size.split("x"))
            path = Path(folder) / model.replace("/", "-")
            if not path.exists():
                MODELS[model][0](path)
            results[case] = measure(path, (height, width), batch, Path(tempfile.mkdtemp(dir=folder)))
            operations = 2 * STEPS * MODELS[model][1](height, width)  # guidance takes two passes a step
            rate = results[case]["images per second, median batch"] * operations
            results[case]["TFLOP of an image's denoising"] = round(operations / 1e12, 1)
            results[case]["part of the matmul rate"] = round(rate / matmul, 3)
            print(case, results[case], flush=True)
    content = {
        "command": f"python bench/generate_speed.py {name} {' '.join(cases)}",
        "settings": f"{STEPS} steps, guidance 7.5, bf16, random weights of the published sizes, {ROWS} prompts",
        "hardware": hardware() | {"matmul TFLOP/s": round(matmul / 1e12)},
        "versions": {"muralist": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "results": results,
    }
    write_json(RESULTS / f"{name}.json", content)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
