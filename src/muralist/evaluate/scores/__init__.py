"""Scores of single images: what each means, which weights it reads, and how all are computed and stored.

This module imports nothing heavy: the report and the board read `SCORES` from it. A score is an `ImageScore`, which
`open_scores` makes once its files are found; its values go through the feature cache, so that they are resumable and
the same on any number of processes.
"""

from __future__ import annotations

import hashlib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, NamedTuple

from muralist.core.errors import UserError, first_line
from muralist.core.run_dir import atomic_open, disk_write_error

if TYPE_CHECKING:
    import numpy as np

    from muralist.evaluate.decoders import FeatureItem
    from muralist.evaluate.encoders import Encoder
    from muralist.evaluate.features import Features
    from muralist.settings import EvaluateSettings

    ComputeFeatures = Callable[[Encoder, Sequence[FeatureItem], str], Features]
    """Returns the features of items, cached or computed on all devices; the text says what the items are."""

_SHARED_FLAGS = ("clip_path", "judge_weights")
SCORES_FILE = "scores.parquet"
"""One row per image that could be read: `image`, `prompt`, a column per score, and the columns of the prompt table."""


class Download(NamedTuple):
    """Files of a folder of weights, and where they come from."""

    files: tuple[str, ...]
    """Names, or patterns of which at least one file must match."""
    origin: str
    """A model's id on the Hugging Face Hub, or an address."""

    def command(self, folder: Path) -> str:
        """Return what copies the files into the folder."""
        if self.origin.startswith("https://"):
            return f"`curl -L --create-dirs --output-dir {quote(str(folder))} -O {self.origin}`"
        names = [] if any("*" in name for name in self.files) else self.files  # else the complete model
        return f"`{' '.join(('hf download', self.origin, *names, '--local-dir', quote(str(folder))))}`"


class ScoreInfo(NamedTuple):
    """What a score means and what it needs; a higher score is always better."""

    title: str
    meaning: str
    module: str
    """The module of this package that has it."""
    flags: tuple[str, ...]
    """The settings that it needs, the folder of its weights first."""
    needs_prompts: bool
    downloads: tuple[Download, ...]
    """The files in the folder of its weights."""


_CLIP_TOKENIZER = Download(("tokenizer.json",), "laion/CLIP-ViT-H-14-laion2B-s32B-b79K")
_JUDGE = (
    Download(
        ("config.json", "*.safetensors", "tokenizer.json", "*processor_config.json"),
        "Qwen/Qwen3-VL-8B-Instruct",
    ),
)
SCORES = {
    "pickscore": ScoreInfo(
        "PickScore", "Which image people would pick for the prompt, learned from Pick-a-Pic; 20 to 23 is usual.",
        "clip_based", ("pickscore_weights",), True,
        (
            Download(("config.json", "model.safetensors"), "yuvalkirstain/PickScore_v1"),
            Download(("preprocessor_config.json", "tokenizer.json"), _CLIP_TOKENIZER.origin),
        ),
    ),
    "hpsv2": ScoreInfo(
        "HPSv2.1", "Human preference for the image given its prompt, learned from HPD v2; 20 to 33 is usual.",
        "clip_based", ("hpsv2_weights",), True,
        (Download(("HPS_v2.1_compressed.pt",), "xswu/HPSv2"), _CLIP_TOKENIZER),
    ),
    "hpsv3": ScoreInfo(
        "HPSv3", "Human preference for the image given its prompt, learned from HPD v3, by Qwen2-VL; may be negative.",
        "hpsv3", ("hpsv3_weights",), True,
        (
            Download(("HPSv3.safetensors",), "MizzenAI/HPSv3"),
            Download(
                ("config.json", "tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"),
                "Qwen/Qwen2-VL-7B-Instruct",
            ),
            Download(
                ("data_collator_qwen.py",),
                "https://github.com/MizzenAI/HPSv3/raw/HEAD/hpsv3/dataset/data_collator_qwen.py",
            ),
        ),
    ),
    "imagereward": ScoreInfo(
        "ImageReward", "Human preference, of mean 0 and deviation 1 on its authors' data; ImageReward reads 35 tokens.",
        "imagereward", ("imagereward_weights",), True,
        (
            Download(("ImageReward.pt", "med_config.json"), "THUDM/ImageReward"),
            Download(("vocab.txt",), "google-bert/bert-base-uncased"),
        ),
    ),
    "vqascore": ScoreInfo(
        "VQAScore", "Probability that the image shows the prompt, by a vision-language model; from 0 to 1.",
        "vlm_judge", ("vqascore_weights",), True, _JUDGE,
    ),
    "geneval2": ScoreInfo(
        "GenEval 2", "Soft-TIFA, prompt level: objects, counts, attributes and relations that a judge sees; to 100.",
        "vlm_judge", ("judge_weights", "geneval2_questions"), True, _JUDGE,
    ),
    "geneval2_am": ScoreInfo(
        "GenEval 2 (atoms)", "Soft-TIFA, atom level: the same with the arithmetic mean, which forgives one wrong part.",
        "vlm_judge", ("judge_weights", "geneval2_questions"), True, _JUDGE,
    ),
    "dpg": ScoreInfo(
        "DPG-Bench", "Share of the details of a long prompt that a judge sees, to 100.",
        "vlm_judge", ("judge_weights", "dpg_questions"), True, _JUDGE,
    ),
    "aesthetic": ScoreInfo(
        "LAION aesthetic", "How much people like the look of the image, from 1 to 10; ignores the prompt.",
        "clip_based", ("aesthetic_weights", "clip_path"), False,
        (
            Download(
                ("sac+logos+ava1-l14-linearMSE.pth",),
                "https://github.com/christophschuhmann/improved-aesthetic-predictor/raw/main/"
                "sac+logos+ava1-l14-linearMSE.pth",
            ),
        ),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class ImageScore(ABC):
    """A score whose files have been found."""

    folder: Path
    """The folder of its weights."""
    sha256: str
    """SHA-256 of the files that it reads."""
    applies_to = "images with a known prompt"

    @property
    @abstractmethod
    def note(self) -> str:
        """How it is computed, for the report."""

    @abstractmethod
    def values(self, images: Sequence[FeatureItem], prompts: Sequence[str], compute: ComputeFeatures) -> np.ndarray:
        """Return the score of each image, float64 [N]; NaN for an image to which the score does not apply."""

    def breakdown(
        self, images: Sequence[FeatureItem], prompts: Sequence[str], values: np.ndarray, compute: ComputeFeatures
    ) -> dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]:
        """Return the parts of a benchmark that papers list, by heading and name: points and questions of each image.

        The score of a part is the sum of its points over that of its questions. `values` are those of `values`.
        """
        return {}

    def warnings(self, images: Sequence[FeatureItem], prompts: Sequence[str]) -> list[str]:
        """Return what a reader of the score has to know."""
        return []


def requested_scores(settings: EvaluateSettings) -> list[str]:
    """Return the scores of which a flag is given that no other score has."""
    if settings.judge_weights and not (settings.geneval2_questions or settings.dpg_questions):
        raise UserError(
            "--judge_weights is given, but no questions for the judge.",
            "GenEval 2 reads geneval2_data.jsonl of facebookresearch/GenEval2, DPG-Bench dpg_bench.csv of "
            "TencentQQGYLab/ELLA.",
            "Add --geneval2_questions or --dpg_questions. VQAScore has its own --vqascore_weights.",
        )
    given = {flag for flag, value in settings if value is not None}.difference(_SHARED_FLAGS)
    return [key for key, info in SCORES.items() if not given.isdisjoint(info.flags)]


def open_scores(settings: EvaluateSettings, keys: Sequence[str]) -> dict[str, ImageScore]:
    """Find the files of some scores; a missing one is an error that says where it comes from."""
    found = {}
    for key in keys:
        info = SCORES[key]
        for flag in info.flags:
            if getattr(settings, flag) is None:
                flags = " and ".join(f"--{name}" for name in info.flags)
                raise UserError(
                    f"{info.title} needs --{flag}, which is not given.", f"It reads {flags}.", f"Add --{flag}."
                )
        folder = Path(getattr(settings, info.flags[0])).expanduser()
        sha256 = _check_files(info, folder)
        module: Any = importlib.import_module(f"{__name__}.{info.module}")
        found[key] = module.OPENERS[key](folder, sha256, settings)
    return found


def needs(key: str) -> str:
    """Say which flags a score needs."""
    return f"it needs {' and '.join(f'--{flag}' for flag in SCORES[key].flags)}."


def _check_files(info: ScoreInfo, folder: Path) -> str:
    """Refuse a folder that lacks a file; return the SHA-256 of the files."""
    files = []
    for download in info.downloads:
        for name in download.files:
            matching = sorted(folder.glob(name)) if folder.is_dir() else []
            if not matching:
                raise UserError(
                    f"{info.title} needs {name}, and {folder}, which --{info.flags[0]} names, does not hold it.",
                    f"The file is published as {download.origin}; muralist downloads nothing by itself.",
                    f"Copy it: {download.command(folder)}",
                )
            files += matching
    settings = sorted(set(folder.glob("*.json")).difference(files))
    described = [(file, file.stat().st_size, file.stat().st_mtime_ns) for file in [*files, *settings]]
    return _hash_files(tuple(described))


@cache  # several scores read the gigabytes of one judge
def _hash_files(files: tuple[tuple[Path, int, int], ...]) -> str:
    from muralist.evaluate.encoders import file_sha256

    return hashlib.sha256("".join(file_sha256(file) for file, _, _ in files).encode()).hexdigest()


def unusable(key: str, folder: Path, error: Exception) -> UserError:
    """Say that the files of a score are there but are not what they should be."""
    info = SCORES[key]
    copies = " and ".join(download.command(folder) for download in info.downloads)
    what = f"{folder} does not hold the weights of {info.title}."
    return UserError(what, f"The reader reported: {first_line(error)}.", f"Copy them again: {copies}")


def load_checkpoint(key: str, folder: Path, model_class: Any, **options: Any) -> Any:
    """Load a transformers model from a folder for inference; one that lacks a tensor is refused."""
    try:
        return _load(model_class, folder, **options)
    except Exception as error:  # the readers of transformers raise nearly any exception on foreign files
        raise unusable(key, folder, error) from None


def build_model(model_class: Any, config: Any, tensors: Mapping[str, Any], **options: Any) -> Any:
    """Return a transformers model with these tensors, for inference; a missing one is an error."""
    return _load(model_class, None, config=config, state_dict=dict(tensors), **options)


def _load(model_class: Any, folder: Path | None, **options: Any) -> Any:
    from transformers.utils import logging

    logging.disable_progress_bar()
    model, found = model_class.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False, output_loading_info=True, **options
    )
    if lost := sorted([*found["missing_keys"], *(entry[0] for entry in found["mismatched_keys"])]):
        raise ValueError(f"the tensor {lost[0]} is missing or has another shape")  # transformers fills it with noise
    return model.eval().requires_grad_(False)


def write_scores(
    output: Path,
    images: Sequence[str],
    prompts: Sequence[str | None],
    scores: Mapping[str, Sequence[float | None]],
    others: Mapping[str, Sequence[Any]],
) -> None:
    """Write scores.parquet; columns of the prompt table that are called like a score are left out."""
    import pyarrow
    from pyarrow import parquet

    columns: dict[str, Any] = {"image": pyarrow.array(images, pyarrow.string())}
    columns["prompt"] = pyarrow.array(prompts, pyarrow.string())
    columns |= {key: pyarrow.array(values, pyarrow.float64()) for key, values in scores.items()}
    for name, cells in others.items():
        try:
            column = pyarrow.array(cells)
        except (pyarrow.ArrowException, OverflowError):  # of several types, or too large
            column = pyarrow.array([None if cell is None else str(cell) for cell in cells])
        if name not in (*columns, *SCORES, "clip_score"):
            columns[name] = column
    try:
        with atomic_open(output / SCORES_FILE) as file:
            parquet.write_table(pyarrow.table(columns), file)
    except OSError as error:
        raise disk_write_error(error, output / SCORES_FILE) from None
