"""Whole pipelines with recorded passes: the same bytes, from text encoders too; a stand-in records on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import _get_current_function_mode_stack
from transformers import BertConfig, masking_utils

from muralist.generate import diffusers_painter
from muralist.generate.card import Ease, Unhurried
from muralist.generate.painter import Order, Way
from muralist.generate.recorded import Record, Recorders, Work
from muralist.generate.text_encoders import text_encoders, whole_masks
from muralist.generate.tuned import Tuning
from tests.support.painting import CAR, FULL, NIGHT, SNOW, differ, paint, painter_of
from tests.support.pipelines import BUILDERS
from tests.support.recording import Tape, Taped

Build = Callable[[str], Path]
Make = Callable[[str, Record | None], Any]
UNEVEN = ("zimage", "qwenimage")  # whose embeddings are as long as the text


@pytest.fixture
def recording_painter(tiny_pipeline: Build, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes painters that believe to be compiled, record as told, and are at ease as on a GPU."""

    def make(name: str, record: Record | None) -> Any:
        monkeypatch.setattr(Tuning, "of", lambda *_: Tuning(compiled=True))
        monkeypatch.setattr(Recorders, "of", lambda *_: Taped(record))
        monkeypatch.setattr(diffusers_painter, "Ease", lambda _: Ease(torch.device("cuda")))
        return painter_of(tiny_pipeline(name))

    return make


@pytest.mark.parametrize("name", BUILDERS)
def test_recorded_passes_and_text_make_the_same_bytes(name: str, recording_painter: Make) -> None:
    tape = Tape()
    recorded, usual = recording_painter(name, tape), recording_painter(name, None)
    found = []
    with torch.compiler.set_stance("force_eager"):
        assert recorded.batches() is (name not in UNEVEN) and tape.recorded == 0
        for painter in (recorded, usual):
            painter.prepare([CAR, NIGHT])
            text = tape.recorded
            pictures = paint(painter, CAR, NIGHT) + paint(painter, FULL, CAR)
            if painter is recorded and painter.batches():
                encoders = text_encoders(painter._pipe)
                assert text >= len(encoders) and tape.recorded > text
                assert all(encoder.forward.__wrapped__.holds_memory for encoder in encoders)
            painter._recorders.give_up()  # as when memory is short: nobody sees it
            painter._forget_few_texts()
            found.append(pictures + paint(painter, FULL, SNOW))
    assert (tape.replayed > 2 * tape.recorded > 0) == recorded.batches()
    assert all(map(np.array_equal, *found)) and differ(found[0][0], found[0][1]) > 5
    assert np.array_equal(found[0][2], found[0][4])


@pytest.mark.parametrize("name", ["wan21", "sdxl"])
def test_at_ease_everywhere_but_in_the_large_parts(name: str, recording_painter: Make) -> None:
    seen: dict[str, list[bool]] = {}

    def noting(where: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*inputs: Any, **named: Any) -> Any:
            modes = _get_current_function_mode_stack()
            seen.setdefault(where, []).append(any(isinstance(mode, Unhurried) for mode in modes))
            return work(*inputs, **named)

        return run

    def record(work: Work) -> tuple[Any, Callable[[], None]]:
        return Tape()(noting("recorded", work))

    painter = recording_painter(name, record)
    pipe = painter._pipe
    pipe.vae.decoder.forward = noting("decoder", pipe.vae.decoder.forward)
    pipe.scheduler.step = noting("step", pipe.scheduler.step)
    pipe.check_inputs = noting("checks", pipe.check_inputs)
    with torch.compiler.set_stance("force_eager"):
        painter.prepare([CAR])
        assert not _get_current_function_mode_stack()
        paint(painter, CAR)
    assert not _get_current_function_mode_stack()
    assert {where: set(modes) for where, modes in seen.items()} == {
        "recorded": {False},
        "decoder": {False},
        "step": {True},
        "checks": {True},
    }


@pytest.mark.parametrize("compiled", [False, True])
def test_text_is_read_in_one_way_whatever_it_is_for(
    compiled: bool, tiny_pipeline: Build, recording_painter: Make
) -> None:
    painter: Any = recording_painter("wan21", None) if compiled else painter_of(tiny_pipeline("wan21"))
    asked: list[bool] = []
    for encoder in text_encoders(painter._pipe):
        encoder.register_forward_pre_hook(lambda *_: asked.append(masking_utils.is_tracing()))
    with torch.compiler.set_stance("force_eager"):
        painter.batches()  # reads this short text before it is known in which way
        assert asked
        asked.clear()
        painter.prepare([Order("a", "a", 0)])
        assert asked
        for order, way in ((CAR, Way.EXACT), (NIGHT, Way.TRIAL), (SNOW, Way.USUAL)):
            paint(painter, order, way=way)
    assert set(asked) == {compiled}


@pytest.mark.parametrize("wanted", [False, True])
def test_masks_do_not_depend_on_what_they_mask(wanted: bool) -> None:
    config = BertConfig(hidden_size=32, num_attention_heads=2, attn_implementation="sdpa")
    numbers, ones = torch.zeros(1, 4, 32), torch.ones(1, 4, dtype=torch.long)
    some = ones.clone()
    some[:, 2:] = 0
    with whole_masks(wanted):
        for make in (masking_utils.create_bidirectional_mask, masking_utils.create_causal_mask):
            assert (make(config, numbers, ones, past_key_values=None) is None) != wanted
            assert make(config, numbers, some, past_key_values=None) is not None
    assert masking_utils.create_bidirectional_mask(config, numbers, ones) is None
