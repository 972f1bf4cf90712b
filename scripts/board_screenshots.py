"""Take the screenshots of docs/board.md and docs/evaluating.md: train small models, generate, evaluate, open Chromium.

python scripts/board_screenshots.py train results-for-docs       minutes; existing runs resume (then: generate, evaluate)
python scripts/board_screenshots.py capture results-for-docs     docs/board-*.webp from the current folders
python scripts/board_screenshots.py report EVALUATION [OTHER]    docs/report-page.webp of one, report-phone.webp of both
"""

from __future__ import annotations

import csv
import io
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from muralist.demo.driving_world import draw_scene

DOCS = Path(__file__).parent.parent / "docs"
_GENERATE = "--dtype fp32 --batch_size 4 --gpu_ids 0 1"
_COMMON = (
    "--data_path driving_world --img_size 64 --model JiT-T/8 --enable_condition --init_from none --max_samples 3360 "
    "--random_flip=false --num_workers 0 --beta2 0.99 --warmup_steps 60 --lr_schedule cosine --ckpt_every 60 "
    "--samples_per_gpu 8 --sample_steps 20 --log_every 20"
)
_RUNS = {
    "driving-fast": "--batch_size 16 --learning_rate 4e-3 --epochs 4",
    "driving-slow": "--batch_size 16 --learning_rate 5e-4 --epochs 4",
    "driving-wide": "--batch_size 32 --learning_rate 4e-3 --epochs 6",
}
_TOO_LARGE = (0, 9, 18)  # rows with a size that the model cannot generate: they fail, and the page shows the reason
_WIDE, _SMALL, _PHONE = (1440, 900), (1080, 320), (390, 844)
_VIEWS = {
    "curves": ("tab=curves&run=driving-slow&tick=driving-fast&tick=driving-slow&log=1", _WIDE, "light"),
    "samples": ("tab=samples&run=driving-fast&whole=1", _WIDE, "dark"),
    "settings": ("tab=settings&run=driving-fast&beside=driving-slow", _SMALL, "light"),
    "generation": ("tab=generation", _WIDE, "light"),
    "phone": ("tab=samples&run=driving-fast", _PHONE, "light"),
}


def train(results: Path) -> None:
    """Train all runs."""
    for name, flags in _RUNS.items():
        _muralist("train", *_COMMON.split(), *flags.split(), "--results_dir", results, "--run_name", name)


def generate(results: Path) -> None:
    """Generate images from a table in which some rows fail."""
    table = results.parent / "prompts.csv"
    prompts = sorted({path.read_text().strip() for path in results.glob("driving-fast/samples/*/*_prompt*.txt")})
    with table.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("id", "prompt", "height", "width"))
        for index in range(240):
            side = 128 if index in _TOO_LARGE else 64
            rows.writerow((f"scene-{index:03d}", prompts[index % len(prompts)], side, side))
    paths = ("--prompts_csv", table, "--output_dir", results / "scenes", "--model_path", results / "driving-fast")
    _muralist("generate", *paths, *_GENERATE.split(), may_fail=True)


def evaluate(results: Path) -> None:
    """Score generated images, and real scenes for comparison: few images give a high FID."""
    real, unseen = (_draw(results.parent / name, first) for name, first in (("real", 50_000), ("unseen", 60_000)))
    for name, images in (("scenes", results / "scenes"), ("real-scenes", unseen)):
        paths = ("--images", images, "--reference", real, "--output_dir", results / "evaluations" / name)
        _muralist("evaluate", *paths)


def _draw(folder: Path, first: int) -> Path:
    """Write real scenes as files."""
    folder.mkdir(exist_ok=True)
    for index in range(240):
        Image.fromarray(draw_scene(index % 8, first + index, 64)).save(folder / f"{index:03d}.png")
    return folder


def _muralist(*arguments: object, may_fail: bool = False) -> None:
    subprocess.run([sys.executable, "-m", "muralist", *map(str, arguments)], check=not may_fail)


def capture(results: Path) -> None:
    """Take the screenshots."""
    from playwright.sync_api import sync_playwright

    command = [sys.executable, "-m", "muralist", "board", str(results), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as board, sync_playwright() as playwright:
        assert board.stdout is not None
        address = re.match(r"\S+", board.stdout.readline())
        assert address is not None
        program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for name, (view, (width, height), scheme) in _VIEWS.items():
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
            page.goto(f"{address[0]}#{view}")
            page.wait_for_selector("#live.on", state="attached")
            page.wait_for_load_state("networkidle")
            page.wait_for_timeout(1500)
            _save_webp(page.screenshot(), DOCS / f"board-{name}.webp")
            page.close()
        browser.close()
        board.terminate()


def report(*evaluations: Path) -> None:
    """Take the screenshots of a report page: of one evaluation on a desktop, of several on a phone in the dark."""
    from playwright.sync_api import sync_playwright

    from muralist.evaluate.page import write_report

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for name, runs, (width, height), scheme in (
            ("page", evaluations[:1], (1400, 860), "light"),
            ("phone", evaluations, _PHONE, "dark"),
        ):
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
            page.goto(write_report(runs, Path(folder)).as_uri())
            page.wait_for_load_state("networkidle")
            _save_webp(page.screenshot(), DOCS / f"report-{name}.webp")
            page.close()
        browser.close()


def _save_webp(screenshot: bytes, path: Path) -> None:
    """Save as WebP, which needs a quarter of the size of PNG."""
    with Image.open(io.BytesIO(screenshot)) as image:
        image.save(path, quality=86, method=6)
    print(f"{path}: {path.stat().st_size // 1024} KB")


if __name__ == "__main__":
    actions: dict[str, Callable[..., None]] = {"train": train, "generate": generate, "evaluate": evaluate}
    (actions | {"capture": capture, "report": report})[sys.argv[1]](*map(Path, sys.argv[2:]))
