"""Prompts that are longer than a text encoder reads: each pipeline counts those that it truncates, and no others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from muralist.generate.text_embeddings import TokenCounter
from tests.support import tiny_text
from tests.support.pipeline_calls import SampleRequest, generate, load

CLIP, T5 = 77, 256
LIMITS = {
    "hunyuan": {"text_encoder": 77, "text_encoder_2": T5},
    "hunyuan11": {"text_encoder": 77, "text_encoder_2": T5},
    "sd": {"text_encoder": CLIP},
    "sdxl": {"text_encoder": CLIP, "text_encoder_2": CLIP},
    "sd3": {"text_encoder": CLIP, "text_encoder_2": CLIP, "text_encoder_3": T5},
    "flux": {"text_encoder": CLIP, "text_encoder_2": 512},
    "schnell": {"text_encoder": CLIP, "text_encoder_2": 512},
    "pixart": {"text_encoder": 300},
    "sana": {"text_encoder": 300},
    "wan21": {"text_encoder": 512},
    "wan22": {"text_encoder": 512},
    "zimage": {"text_encoder": 512},
    "qwenimage": {"text_encoder": 512},  # without truncation=True: the embeddings are sliced
}


@pytest.mark.parametrize("name", LIMITS)
def test_truncated_prompts_and_no_others_are_counted(name: str, tiny_pipeline: Callable[[str], Path]) -> None:
    pipeline = load(tiny_pipeline(name), num_inference_steps=2)
    long = "many " * 150
    prompts = [long + "cars", long + "dogs", "a car", "a dog"]
    # The negative prompts are too long as well, but are not what is counted.
    images = [generate(pipeline, SampleRequest(prompt, long + "trees", 1))[0] for prompt in prompts]
    for prompt in prompts[:2]:
        found = pipeline.truncation(prompt)
        assert {encoder: counts["limit"] for encoder, counts in found.items()} == LIMITS[name]
        assert all(counts["tokens"] > counts["limit"] and counts["class"] != "NoneType" for counts in found.values())
    assert np.array_equal(images[0], images[1]), "what follows the limit has no effect"
    assert not pipeline.truncation(prompts[2]) and not pipeline.truncation(prompts[3])
    assert not np.array_equal(images[2], images[3])


@pytest.mark.parametrize("name", ["sd", "pixart", "sana", "wan21", "zimage", "qwenimage"])
def test_a_prompt_that_just_fits_is_not_counted(name: str, tiny_pipeline: Callable[[str], Path]) -> None:
    pipeline = load(tiny_pipeline(name), num_inference_steps=2)
    limit = LIMITS[name]["text_encoder"]
    texts = {length: ("x " * limit)[:length] + "y" for length in range(20, 2 * limit)}

    def truncated(length: int) -> bool:
        pipeline.prepare([SampleRequest(texts[length], "", 1)])
        return bool(pipeline.truncation(texts[length]))

    fits, cut = min(texts), max(texts)
    assert not truncated(fits) and truncated(cut)
    while cut - fits > 1:
        middle = (fits + cut) // 2
        fits, cut = (fits, middle) if truncated(middle) else (middle, cut)
    counts = pipeline.truncation(texts[cut])["text_encoder"]
    assert counts["limit"] == limit and 1 <= counts["tokens"] - limit <= 2


def test_texts_are_attributed_to_the_prompt_that_they_hold() -> None:
    tokenizer, encoder = tiny_text.t5()
    pipe = SimpleNamespace(components={"tokenizer_2": tokenizer}, text_encoder_2=encoder)
    counter = TokenCounter(pipe)
    kind = type(tokenizer).__name__
    long = "Many  cars " * 9
    options = {"truncation": True, "max_length": 30, "padding": "max_length"}
    tokenizer(long, **options)
    assert counter.truncated == {}, "nothing is generated"
    with counter.counting([long, "car", "cars"]):
        tokenizer([f"template: {' '.join(long.lower().split())} end", "car"], **options)
        tokenizer("car", **options)
        tokenizer(long, padding="longest")
    assert set(counter.truncated) == {long}
    counts = counter.truncated[long]["text_encoder_2"]
    assert counts["class"] == "T5EncoderModel" and counts["limit"] == 30 and counts["tokens"] > 90
    assert type(tokenizer).__name__ == kind and tokenizer.decode(tokenizer("a").input_ids)
