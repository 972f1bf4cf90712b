"""What a job reads: the model, the prompts, the data."""

from __future__ import annotations

import time

import numpy as np

from muralist.errors import UserError
from muralist.models import variants
from muralist.scale.checks.check import Check, Circumstances, Finding, failed, ok, skipped, warning
from muralist.words import listed

LOOKED_AT = 100
_SEED = 0  # the same pictures every time: a finding can be looked at again


def look_at_model(around: Circumstances) -> Finding:
    """Look whether every weights file is there and long enough."""
    if around.train:
        from muralist.train.contract import check_model

        check_model(around.train.model)
        if not variants.is_hunyuan(around.train.model.name):
            return ok(f"{around.train.model.name} at {variants.square(around.train.model.img_size)} px is built here")
        return ok(
            f"{around.train.model.path} is whole" if around.train.model.path else "a small HunyuanDiT is built here"
        )
    assert around.generate
    return ok(f"{around.generate.model_path} is whole: {around.model.identity['model']}")


def look_at_prompts(around: Circumstances) -> Finding:
    """Open the table and read some of its rows."""
    from muralist.data.prompts import open_table

    assert around.generate
    table = open_table(around.generate.prompts_csv, around.generate.num_samples)
    rows = table.rows(_some(len(table)))
    told = f"{len(table):,} rows, {len(rows)} of them read, such as {rows[0].prompt[:60]!r}"
    if table.notes:
        return warning(
            f"{told}. {' '.join(table.notes)}", "The table may not be what you meant.", "Look at it once more."
        )
    return ok(told)


def look_at_data(around: Circumstances) -> Finding:
    """Open the data as training does, and decode a hundred pictures chosen at random."""
    from muralist.train.data import open_data

    assert around.train
    if not around.train.data.path:
        return skipped("no data was named")
    data = open_data(around.train)
    numbers = _some(data.split.source_size)
    broken: list[str] = []
    began = time.perf_counter()
    for number in numbers:
        try:
            if data.encoded:  # latents: there are no pictures to decode
                data.encoded.gather(np.array([number]))
            else:
                data.source.read(number)
        except UserError as error:
            broken.append(error.what)
    speed = len(numbers) / max(1e-9, time.perf_counter() - began)
    told = f"{data.split.source_size:,} images, {len(numbers)} decoded"
    if broken:
        return failed(f"{told}: {len(broken)} of them broken. {listed(broken, 2)}", facts={"broken": len(broken)})
    return ok(f"{told} at {speed:,.0f} images/s on one core", facts={"images per second": speed})


def _some(count: int) -> list[int]:
    """Numbers of a hundred out of so many."""
    chosen = np.random.default_rng(_SEED).choice(count, min(LOOKED_AT, count), replace=False)
    return [int(number) for number in np.sort(chosen)]


CHECKS = [
    Check(
        name="model folder",
        what="Whether the model is there with every part and weights file, none of them cut short.",
        trouble="Guide 3: error during sampling (the model was not loaded right); guide 4: a process that hangs "
        "(wrong model path)",
        why="Loading it would fail after minutes, on every GPU at once.",
        remedy="Check the path, or copy the model anew.",
        look=look_at_model,
        jobs=frozenset({"train", "generate"}),
    ),
    Check(
        name="prompts table",
        what="Whether the table can be read: its columns, every row once, and a hundred rows again.",
        trouble="Guide 4: `--prompts_csv` with a `prompt` or a `caption` column",
        why="Rows that cannot be read have no pictures.",
        remedy="Put the table right; the message names file and line.",
        look=look_at_prompts,
        jobs=frozenset({"generate"}),
    ),
    Check(
        name="data set",
        what=f"Whether the data can be opened as training opens it, and {LOOKED_AT} pictures chosen at random decoded.",
        trouble="Guide 1: data prepared ahead of time to cut I/O",
        why="A picture that cannot be decoded ends training when its turn comes, perhaps after days.",
        remedy="`muralist pack SRC DST` leaves broken images out and lists them in broken.txt; or delete them.",
        look=look_at_data,
        jobs=frozenset({"train"}),
    ),
]
