"""Passes that are recorded and replayed say what the network says; a stand-in for the card's recorder runs on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling

from muralist.generate.recorded import Recorder, Recorders, Work
from tests.support.recording import Tape


def network(sample: Tensor, time: Tensor, text: dict[str, Tensor], scale: float = 1.0) -> tuple[Tensor]:
    return (sample * time[:, None] + scale * text["rows"],)


def inputs(rows: int, seed: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(3, rows, 4, generator=generator)
    return numbers[0], numbers[1, :, 0], {"rows": numbers[2]}


def test_every_pass_has_its_own_inputs_and_keeps_its_result() -> None:
    tape = Tape()
    recorder = Recorder(network, tape)
    recorder.on = True
    said = [recorder(*inputs(2, seed))[0] for seed in range(4)]
    for seed, output in enumerate(said):  # later replays have not written over it
        assert torch.equal(output, network(*inputs(2, seed))[0])
    assert (tape.recorded, tape.replayed) == (1, 4)  # the first is a replay as well


def test_what_differs_in_shape_type_or_number_is_another_recording() -> None:
    tape = Tape()
    recorder = Recorder(network, tape)
    recorder.on = True
    for rows, scale in ((2, 1.0), (3, 1.0), (2, 0.5), (2, 1.0)):
        sample, time, text = inputs(rows, rows)
        assert torch.equal(recorder(sample, time, text, scale=scale)[0], network(sample, time, text, scale)[0])
    sample, time, text = inputs(2, 0)
    assert recorder(sample.double(), time, text)[0].dtype == torch.float64
    assert tape.recorded == 4


def test_only_while_it_is_wanted_and_only_what_can_be() -> None:
    tape = Tape()
    recorders = Recorders(tape)
    stand_in = recorders.before(network)
    stand_in(*inputs(2, 0))
    assert tape.recorded == 0
    with recorders.on(True):
        stand_in(*inputs(2, 0))
        assert tape.recorded == 1
    with pytest.raises(torch.OutOfMemoryError), recorders.on(True):
        raise torch.OutOfMemoryError
    with recorders.on(True):  # memory was short: never again
        assert torch.equal(stand_in(*inputs(2, 5))[0], network(*inputs(2, 5))[0])
    assert (tape.recorded, tape.replayed) == (1, 1)


def test_a_batch_that_is_tried_and_too_large_ends_no_recording_before_there_is_one() -> None:
    tape = Tape()
    recorders = Recorders(tape)
    stand_in = recorders.before(network)
    with pytest.raises(torch.OutOfMemoryError), recorders.on(False):
        raise torch.OutOfMemoryError
    with recorders.on(True):
        stand_in(*inputs(2, 0))
    assert tape.recorded == 1
    with pytest.raises(RuntimeError), recorders.on(False):  # now recordings may be why
        raise RuntimeError("CUDNN_STATUS_ALLOC_FAILED")
    with recorders.on(True):
        stand_in(*inputs(2, 0))
    assert tape.replayed == 1


def test_numbers_on_the_host_are_not_recorded() -> None:
    recorder = Recorder(lambda sample, scale: (sample * scale.item(),), Tape())
    recorder.on = True
    sample = torch.ones(2, device="meta")
    for scale in (2.0, 3.0):
        assert recorder(sample, torch.tensor(scale))[0].device.type == "meta"
    assert not recorder.holds_memory


def test_a_network_that_cannot_be_recorded_is_run_as_it_is() -> None:
    def refuse(work: Work) -> tuple[Any, Callable[[], None]]:
        raise RuntimeError("operation not permitted when stream is capturing")

    recorder = Recorder(network, refuse)
    recorder.on = True
    for seed in range(2):
        assert torch.equal(recorder(*inputs(2, seed))[0], network(*inputs(2, seed))[0])


def test_what_would_hand_out_the_memory_of_a_replay_is_not_recorded() -> None:
    """A language model's cache holds tensors out of sight."""

    class Cache:
        def __init__(self, keys: Tensor) -> None:
            self.keys = keys

    recorder = Recorder(lambda tokens: {"hidden": tokens + 1, "cache": Cache(tokens * 2)}, Tape())
    recorder.on = True
    said = [recorder(torch.full((2,), number)) for number in range(3)]
    assert [each["cache"].keys.tolist() for each in said] == [[0, 0], [2, 2], [4, 4]]
    assert not recorder.holds_memory


@pytest.mark.parametrize("hidden", [None, (torch.ones(2), torch.zeros(3))])
def test_what_a_text_encoder_says_comes_back_whole(hidden: tuple[Tensor, ...] | None) -> None:
    def encode(tokens: Tensor) -> BaseModelOutputWithPooling:
        layers = hidden and tuple(layer + tokens.sum() for layer in hidden)
        return BaseModelOutputWithPooling(last_hidden_state=tokens + 1, hidden_states=layers)

    recorder = Recorder(encode, Tape())
    recorder.on = True
    said = [recorder(torch.full((2,), number)) for number in range(3)]
    for number, output in enumerate(said):
        expected = encode(torch.full((2,), number))
        assert type(output) is type(expected) and output.keys() == expected.keys()
        assert torch.equal(output[0], expected.last_hidden_state) and output.pooler_output is None
        assert (output.hidden_states is None) == (hidden is None)
        assert all(map(torch.equal, output.hidden_states or (), expected.hidden_states or ()))
    assert recorder.holds_memory
