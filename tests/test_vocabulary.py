"""Test that code and prose use the standard terms of PyTorch, diffusers and the papers, not private ones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import REPOSITORY

# A private word (regular expression) and the standard term. Matching ignores case unless the pattern starts with (?-i:.
TERMS = {
    r"\w*(?<!in)paint(?:er|ers|s|ed|ing)?(?:_\w+)?": "generate, or pipeline",
    r"(?:\w+_)?pictures?(?:_\w+)?": "image",
    r"(?:\w+_)?fleets?(?:_\w+)?": "scheduler",
    r"(?:\w+_)?crews?(?:_\w+)?": "worker pool",
    r"_?obituar\w+": "exit report",
    r"cards?": "GPU",
    r"page-locked": "pinned",
    r"(?:is|are) no numbers?|\w+_no_numbers?_?\w*": "NaN/Inf, non-finite",
    r"foretold|foretells?": "linearly extrapolated",
    r"surroundings": "environment",
    r"is_hunyuan": "a property of the model family",
    r"guides? [1-4]|the guide's": "the name of the task",
    r"(?:in|to) 8 bits|8-bit products?|ops_8_bits": "FP8",
    r"turned_kernels|norm_and_turn\w*": "qk_norm_rope",
    r"one_pass": "fused_adamw_ema",
    r"keyed_random": "counter-based RNG (core.rng)",
    r"swiglu_product|matrix products?": "GEMM, matmul, gemm_epilogue",
    r"whole_masks|cut_short|one_frame": "forced attention mask, truncated, single-frame VAE decode",
    r"(?-i:Unhurried|Ease|CardRecords)": "asynchronous copies, CUDA graphs",
    r"recordings?": "CUDA graph",
    r"state_reader|loss_module|on_device\.py": "safe DCP reader, loss wrapper, GPU-resident dataset",
    r"half_lives alone": "ema_half_life",
    r"meetings?|_MEETING": "rendezvous, collective self-test",
    r"colours?|neighbours?|centres?|normalised?|recognised?|licence|behaviours?": "the American spelling",
}
PATTERN = re.compile(
    "|".join(rf"(?P<t{index}>(?<!\w)(?:{term})(?!\w))" for index, term in enumerate(TERMS)), re.IGNORECASE
)

# Names that are an interface: files of run folders, fields of records, files of other projects.
ALLOWED = re.compile(
    r"picture_shapes(?:\.npz)?"  # a file of a run folder
    r"|fleet_scaling\.json|pause_h200_page_locked\.json"  # records
    r"|\"(?:pictures|seconds_per_picture)\""  # fields of reports and of old records
    r"|psnr_of_mean_colour|inception_distance_of_two_pictures"  # fields of JSON files
    r"|\"colour\"|painted on a wall"  # in prompt tables
)
SUFFIXES = {".py", ".md", ".yaml", ".yml", ".toml", ".sh", ".txt"}  # a card is a standard term in CSS
FOLDERS = ("src", "docs", "tests", "bench", "scripts", "hydit")
SKIPPED = (
    "tests/fixtures",
    "src/muralist.egg-info",
    "tests/test_vocabulary.py",
    "bench/results",
    "src/muralist/data/assets",
)


def _files() -> Iterator[Path]:
    yield from (path for path in REPOSITORY.iterdir() if path.is_file() and path.suffix in SUFFIXES)
    for folder in FOLDERS:
        for path in sorted((REPOSITORY / folder).rglob("*")):
            name = path.relative_to(REPOSITORY).as_posix()
            if path.suffix in SUFFIXES and "__pycache__" not in name and not name.startswith(SKIPPED):
                yield path


def _findings(path: Path) -> Iterator[str]:
    terms = list(TERMS.values())
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        for found in PATTERN.finditer(ALLOWED.sub("", line)):
            hint = terms[int(found.lastgroup[1:])] if found.lastgroup else ""
            yield f"{path.relative_to(REPOSITORY)}:{number}: {found[0]!r}: use {hint}"


def test_standard_terms() -> None:
    findings = [finding for path in _files() for finding in _findings(path)]
    assert not findings, "\n".join([f"{len(findings)} private terms", *findings])
