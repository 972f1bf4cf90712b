"""The settings of scoring: `muralist evaluate`, `stats` and `report`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveInt

from muralist.settings.section import Section


class EvaluateSettings(Section):
    """muralist evaluate: how good the pictures of a folder are, in numbers, whoever made them."""

    images: str
    """Folder of pictures, searched with its sub-folders; a ledger.jsonl in it tells prompts and failures."""
    output_dir: str
    """Where report.json and the features go; the same command again goes on there."""
    reference: str | None = None
    """Folder of real pictures, or an .npz file by `muralist stats` or others (mu, sigma); none: only metrics that need
    no reference."""
    prompts_csv: str | None = None
    """Prompts, as `muralist generate` reads them; row ID has the files ID.* and ID_seedN.*; default: the ledger's."""
    inception_weights: str | None = None
    """Inception's weights of 2015-12-05, .pth or .pt; default: the file that MURALIST_INCEPTION names, or a cache's."""
    clip_path: str | None = None
    """Folder of a CLIP model as transformers saves it, for CLIP score and CMMD."""
    dinov2_path: str | None = None
    """Folder of a DINOv2 model as transformers saves it, for FD-DINOv2; ViT-L/14 (dinov2-large) is what is reported."""
    gpu_ids: list[Annotated[int, Field(ge=0)]] = []
    """Which GPUs; default: all visible. Without a GPU, one CPU process stands in for each, or NPROC processes."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Key of what is drawn: KID's subsets and the intervals."""


class StatsSettings(Section):
    """muralist stats SOURCE -o STATS.npz: what `evaluate` needs to know of a reference, computed once."""

    source: str
    """Folder of pictures, searched with its sub-folders; with --img_size any data set that train reads."""
    output: str
    """The .npz file to write (-o): mu and sigma, as everybody's, and the features."""
    img_size: PositiveInt | None = None
    """Take SOURCE as training does, cropped to squares of this side; default: a folder's pictures as they are."""
    max_samples: PositiveInt | None = None
    """With --img_size: only the first this many images, as in training."""
    inception_weights: str | None = None
    """As of evaluate."""
    dinov2_path: str | None = None
    """As of evaluate: keeps the features for FD-DINOv2 as well."""
    gpu_ids: list[Annotated[int, Field(ge=0)]] = []
    """As of evaluate."""


class ReportSettings(Section):
    """muralist report FOLDERS ...: the page of one evaluation, or of several side by side."""

    folders: list[str]
    """What evaluate wrote: one folder, or several to compare."""
    output_dir: str = "report"
    """Folder that index.html is written into."""
