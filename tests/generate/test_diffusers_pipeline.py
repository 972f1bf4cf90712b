"""The contract of `Pipeline`, kept by every kind of diffusers pipeline, with CUDA graphs and LoRA too."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, EulerAncestralDiscreteScheduler, HunyuanDiT2DModel, StableDiffusionPipeline
from torch.overrides import _get_current_function_mode_stack
from transformers import masking_utils

from muralist.core.errors import UserError
from muralist.generate import diffusers_pipeline
from muralist.generate.optimizations import NonBlockingCopies, Optimizations
from muralist.generate.pipeline import (
    GenerationMode,
    GpuClock,
    Pipeline,
    PipelineError,
    SampleRequest,
    environment_info,
    make_deterministic,
)
from muralist.generate.text_embeddings import text_encoders
from tests.support.equality import CASES
from tests.support.graph_capture import FakeCudaGraphs
from tests.support.pipeline_calls import (
    CAR,
    CAT,
    CPU,
    DOGS,
    LONG,
    NIGHT,
    SIZE,
    SNOW,
    STEPS,
    generate,
    generate_with_diffusers,
    load,
    max_difference,
    no_callback,
)
from tests.support.pipelines import BUILDERS, REPRESENTATIVE, drop_last_tensor

UNEVEN = ("zimage", "qwenimage", "cogview4")  # embeddings as long as the prompt: those of one length share a batch
ALONE = ("lumina2",)  # the network computes other shapes for other texts
FIXED = tuple(name for name in BUILDERS if name not in (*UNEVEN, *ALONE))
Build = Callable[[str], Path]
Get = Callable[[str], Pipeline]
Load = Callable[[str, bool], Any]
GPU = torch.device("cuda")
LORA = {"r": 2, "lora_alpha": 2, "target_modules": ["to_q", "to_v"], "init_lora_weights": False}


@pytest.fixture(scope="module")
def pipelines(tiny_pipeline: Build) -> Get:
    known: dict[str, Pipeline] = {}

    def get(name: str) -> Pipeline:
        if name not in known:
            known[name] = load(tiny_pipeline(name), guidance_scale=CASES[name].guidance_scale)
        return known[name]

    return get


@contextmanager
def encoder_runs() -> Iterator[list[str]]:
    """The names of the text encoders that run meanwhile; one whose output is only predicted embeds no token."""
    seen: list[str] = []

    def note(module: Any, inputs: Any, output: Any) -> None:
        if isinstance(module, torch.nn.Embedding) and module.num_embeddings > 1:  # HunyuanDiT 1.1 has one style
            seen.append(type(module).__name__)

    handle = torch.nn.modules.module.register_module_forward_hook(note)
    try:
        yield seen
    finally:
        handle.remove()


@pytest.mark.parametrize("name", BUILDERS)
def test_an_image_depends_on_neither_its_neighbors_nor_its_index(name: str, pipelines: Get) -> None:
    pipeline = pipelines(name)
    first = generate(pipeline, CAR, NIGHT, SNOW)
    last = generate(pipeline, DOGS, CAT, CAR)
    copies = generate(pipeline, CAR, CAR, CAR)
    assert pipeline.supports_batching() is (name not in ALONE) and pipeline.groups_by_text() is (name in UNEVEN)
    assert all(image.shape == (*SIZE, 3) and image.dtype == np.uint8 for image in first)
    for image in (last[2], *copies):
        assert np.array_equal(first[0], image)
    assert min(max_difference(first[0], other) for other in (*first[1:], *last[:2])) > 5


@pytest.mark.parametrize("name", UNEVEN)
def test_prompts_of_one_text_group_share_a_batch_with_the_same_bytes(name: str, pipelines: Get) -> None:
    """Lengths within a multiple of 32 tokens (CogView4: 16) form a group; the others need a batch of their own."""
    pipeline = pipelines(name)
    a, b, c, longer = (
        SampleRequest(text, "", seed) for seed, text in enumerate(("a red car", "two", "snow", "x" * 70))
    )
    groups = pipeline.text_groups([a, b, c, longer, a._replace(negative_prompt="y" * 70)])
    assert groups[0] == groups[1] == groups[2] and len(set(groups)) == 3
    with encoder_runs() as runs:
        assert pipeline.text_groups([c, longer]) == [groups[2], groups[3]]
    assert runs == []  # no text encoder embeds a token for it
    with encoder_runs() as runs:
        together = pipeline.generate([a, b, c], SIZE, no_callback)
    assert runs  # nothing of it was stored as an embedding
    for request, slot in ((a, 0), (b, 1), (c, 2)):
        padded = pipeline.generate([request] * 3, SIZE, no_callback)
        assert np.array_equal(padded[slot], together[slot])
        alone = pipeline.generate([request], SIZE, no_callback)[0]
        assert max_difference(alone, together[slot]) <= 1
    assert max_difference(together[0], together[1]) > 5


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_an_image_does_not_depend_on_its_neighbors_in_bf16(name: str, tiny_pipeline: Build) -> None:
    pipeline = load(tiny_pipeline(name), dtype="bf16")
    first, last = generate(pipeline, CAR, NIGHT), generate(pipeline, SNOW, CAR)
    assert np.array_equal(first[0], last[1])
    assert max_difference(first[0], first[1]) > 5


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_prepared_prompts_are_not_encoded_again(name: str, pipelines: Get) -> None:
    pipeline = pipelines(name)
    pipeline.prepare([SNOW])
    unprepared = generate(pipeline, CAR, DOGS, CAT)
    with encoder_runs() as runs:
        pipeline.prepare([CAR, DOGS, CAT])
    assert len(runs) >= 3
    with encoder_runs() as runs:
        prepared = generate(pipeline, CAR, DOGS, CAT)
        assert generate(pipeline, CAT)[0].shape == (*SIZE, 3)
        pipeline.prepare([DOGS, CAT, CAR])
    assert runs == []
    assert all(map(np.array_equal, prepared, unprepared))
    pipeline.prepare([SNOW])  # drops the others
    with encoder_runs() as runs:
        generate(pipeline, CAR)
    assert runs


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_an_image_depends_on_prompt_and_seed(name: str, pipelines: Get) -> None:
    image, other_seed, other_prompt = (
        generate(pipelines(name), request)[0]
        for request in (CAR, CAR._replace(seed=6), CAR._replace(prompt=NIGHT.prompt))
    )
    assert max_difference(image, other_seed) > 10
    assert max_difference(image, other_prompt) > 3


@pytest.mark.parametrize("name", BUILDERS)
def test_negative_prompts_have_an_effect_or_the_pipeline_says_why_not(name: str, pipelines: Get) -> None:
    requests = [CAR._replace(negative_prompt=text) for text in ("", "rain at night")]
    changed = max_difference(*(generate(pipelines(name), request)[0] for request in requests)) > 0
    reason = pipelines(name).ignores_negative_prompts()
    assert changed is (reason == "")
    expected = {"flux": "without classifier-free guidance", "schnell": "without classifier-free guidance",
                "hunyuanvideo": "without classifier-free guidance", "lcm": "takes none", "klein": "takes none",
                "sana_sprint": "takes none"}  # fmt: skip
    assert expected.get(name, "") in reason and bool(reason) is (name in expected)


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_prompts_of_any_length_and_script(name: str, pipelines: Get) -> None:
    requests = [SampleRequest(prompt, "", 5) for prompt in ("", LONG.prompt, "一只红色的猫坐在桌子上 🎨", "a red car")]
    images = generate(pipelines(name), *requests)
    assert all(image.shape == (*SIZE, 3) and image.std() > 5 for image in images)
    assert len({image.tobytes() for image in images}) == len(images)


def test_every_dtype_has_the_same_noise(tiny_pipeline: Build) -> None:
    folder = tiny_pipeline("sd3")
    exact = generate(load(folder), CAR)[0].astype(int)
    rounded = generate(load(folder, dtype="bf16"), CAR)[0].astype(int)
    # Other noise would give another image, at a distance of 20 levels and more.
    assert np.abs(exact - rounded).mean() < 5


def test_stochastic_schedulers_draw_noise_per_sample(tiny_pipeline: Build) -> None:
    folder = tiny_pipeline("sd")
    pipeline = load(folder, scheduler="eulerancestraldiscrete")
    first, last = generate(pipeline, CAR, NIGHT, SNOW), generate(pipeline, DOGS, CAT, CAR)
    assert np.array_equal(first[0], last[2])
    plain = generate_with_diffusers(folder, CAR, scheduler=EulerAncestralDiscreteScheduler, guidance_scale=7.5)
    assert max_difference(first[0], plain[0]) <= 1


def test_an_incompatible_scheduler_is_refused_with_a_list_of_compatible_ones(tiny_pipeline: Build) -> None:
    with pytest.raises(UserError, match="These do: euler, .*dpm.*, .*Did you mean EulerDiscrete?"):
        load(tiny_pipeline("sd"), scheduler="EulerDiscret")


def test_every_step_calls_back_and_a_memory_probe_has_two(pipelines: Get) -> None:
    calls: list[int] = []
    pipelines("wan22").generate([CAR], SIZE, lambda: calls.append(1))
    assert len(calls) == STEPS
    pipelines("wan22").generate([CAR], SIZE, lambda: calls.append(1), GenerationMode.MEMORY_PROBE)
    assert len(calls) == STEPS + 2


@pytest.mark.parametrize(
    ("name", "wrong", "multiple"),
    [("hunyuan", (70, 64), 16), ("flux", (64, 72), 16), ("wan21", (64, 72), 16), ("sd", (60, 64), 8)],
)
def test_an_impossible_size_is_refused_with_a_possible_one(
    name: str, wrong: tuple[int, int], multiple: int, pipelines: Get
) -> None:
    with pytest.raises(UserError, match=f"{wrong[1]} x {wrong[0]}.*multiples of {multiple}: try (64|80) x 64"):
        pipelines(name).generate([CAR], wrong, no_callback)


def test_an_impossible_size_is_fatal_only_if_it_is_the_commands(tiny_pipeline: Build) -> None:
    pipeline = load(tiny_pipeline("sd"), height=60)
    with pytest.raises(PipelineError, match="64 x 60"):
        pipeline.generate([CAR], (60, 64), no_callback)
    with pytest.raises(UserError, match="64 x 52") as caught:
        pipeline.generate([CAR], (52, 64), no_callback)
    assert not isinstance(caught.value, PipelineError)


def test_clips(tiny_pipeline: Build) -> None:
    pipeline = load(tiny_pipeline("wan21"), num_frames=5)
    clips = [pipeline.generate(requests, (32, 32), no_callback) for requests in ((CAR, NIGHT), (SNOW, CAR))]
    assert clips[0][0].shape == (5, 32, 32, 3)
    assert np.array_equal(clips[0][0], clips[1][1])
    assert max_difference(clips[0][0][0], clips[0][0][4]) > 0
    halved = load(tiny_pipeline("wan21"), num_frames=9, enable_half_frame=True)
    assert np.array_equal(halved.generate([CAR, NIGHT], (32, 32), no_callback)[0], clips[0][0])
    with pytest.raises(UserError, match="StableDiffusionPipeline generates images, not clips of 5 frames"):
        load(tiny_pipeline("sd"), num_frames=5)


@pytest.mark.parametrize("part", ["text_encoder", "unet"])
def test_weights_without_some_tensor_are_refused(tiny_pipeline: Build, tmp_path: Path, part: str) -> None:
    """transformers would draw them at random, other numbers in each worker."""
    folder = shutil.copytree(tiny_pipeline("sd"), tmp_path / "sd")
    name = drop_last_tensor(folder / part)
    with pytest.raises(UserError, match=f"{part} are incomplete: {name} missing"):
        load(folder)


def test_non_finite_images_are_errors(tiny_pipeline: Build) -> None:
    pipeline: Any = load(tiny_pipeline("sd"))
    pipeline._pipe.vae.decoder.conv_out.weight.fill_(torch.inf)
    with pytest.raises(UserError, match="NaN or Inf.*overflowed in fp32"):
        generate(pipeline, CAR)


def test_images_that_the_safety_checker_blackened_are_errors(
    tiny_pipeline: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline: Any = load(tiny_pipeline("sd"))
    monkeypatch.setattr(pipeline._pipe, "run_safety_checker", lambda image, *_: (image * 0, [False, True]))
    with pytest.raises(UserError, match="safety checker flagged"):
        generate(pipeline, CAR, NIGHT)


def test_pipelines_that_are_not_text_to_image_are_refused(tiny_pipeline: Build, tmp_path: Path) -> None:
    copy = tmp_path / "another"
    shutil.copytree(tiny_pipeline("sd"), copy)
    index = json.loads((copy / "model_index.json").read_text())

    def names(**changes: Any) -> None:
        (copy / "model_index.json").write_text(json.dumps(index | changes))

    names(_class_name="NoSuchPipeline")
    with pytest.raises(UserError, match="cannot be loaded.*NoSuchPipeline"):
        load(copy)
    names(_class_name="DDPMPipeline", **{part: [None, None] for part in ("vae", "tokenizer", "text_encoder")})
    with pytest.raises(
        UserError, match="DDPMPipeline does not generate images from a table of prompts. It takes no prompt"
    ):
        load(copy)


def test_requests_are_not_changed(pipelines: Get) -> None:
    requests = [SampleRequest("a cat", "a dog", 3)]
    images = [pipelines("zimage").generate(requests, SIZE, no_callback)[0] for _ in range(2)]
    assert np.array_equal(*images)
    assert requests == [SampleRequest("a cat", "a dog", 3)]


def test_one_thread_and_deterministic_kernels() -> None:
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    try:
        make_deterministic(CPU)
        assert torch.get_num_threads() == 1
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.backends.cudnn.benchmark
        assert torch.backends.cudnn.deterministic
        assert environment_info(CPU)["torch"] == torch.__version__
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = benchmark, False


def test_the_clock_measures_nothing_on_a_cpu() -> None:
    clock = GpuClock(CPU)
    clock.enter()
    clock.leave()
    assert clock.batch() is None


def test_the_clock_measures_the_fraction_of_time_with_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """With CUDA events that are reached at these milliseconds, one after the other."""
    reached = iter([0.0, 0.5, 80.0, 90.0, 100.0, 130.0, 200.0])

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = next(reached)

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, later: Event) -> float:
            return later.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = GpuClock(GPU)
    clock.enter()
    clock.leave()  # at 0: the end of the first batch, which compiled
    assert clock.batch() is None
    clock.enter()  # 0.5
    clock.leave()  # 80
    clock.enter()  # 90: the host was late
    clock.leave()  # 100
    timing = clock.batch()
    assert timing is not None and timing() == pytest.approx(1 - 10.5 / 100)
    clock.enter()  # 130
    clock.leave()  # 200
    timing = clock.batch()
    assert timing is not None and timing() == pytest.approx(0.7)
    clock.reset()
    assert clock.batch() is None


@pytest.fixture
def load_with_graphs(tiny_pipeline: Build, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Loads pipelines that behave as if compiled on a GPU, with or without CUDA graphs."""

    def load_pipeline(name: str, graphs: bool) -> Any:
        monkeypatch.setattr(Optimizations, "choose", lambda *_: Optimizations(compiled=True))
        monkeypatch.setattr(diffusers_pipeline, "CudaGraphs", lambda _: FakeCudaGraphs(graphs))
        monkeypatch.setattr(diffusers_pipeline, "NonBlockingCopies", lambda _: NonBlockingCopies(torch.device("cuda")))
        return load(tiny_pipeline(name))

    return load_pipeline


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_graphs_of_denoisers_and_text_encoders_give_the_same_bytes(name: str, load_with_graphs: Load) -> None:
    graphed, plain = load_with_graphs(name, True), load_with_graphs(name, False)
    capture, found = graphed._graphs, []
    with torch.compiler.set_stance("force_eager"):
        assert graphed.groups_by_text() is (name in UNEVEN) and capture.captures == 0
        for pipeline in (graphed, plain):
            pipeline.prepare([CAR, NIGHT])
            of_text = capture.captures
            images = generate(pipeline, CAR, NIGHT) + generate(pipeline, LONG, CAR)
            if pipeline is graphed and name in FIXED:
                encoders = text_encoders(pipeline._pipe)
                assert of_text >= len(encoders) and capture.captures > of_text
                assert all(any(each.values()) for each in capture._graphs)  # of denoiser and text encoders
            pipeline._graphs.disable()  # as when memory runs out: no image shows it
            pipeline._reset_text_cache()
            found.append(images + generate(pipeline, LONG, SNOW))
    assert (capture.replays > 2 * capture.captures > 0) == (name in FIXED)
    assert all(map(np.array_equal, *found)) and max_difference(found[0][0], found[0][1]) > 5
    assert np.array_equal(found[0][2], found[0][4])


@pytest.mark.parametrize("name", ["wan21", "sdxl"])
def test_copies_are_non_blocking_everywhere_but_in_networks(name: str, load_with_graphs: Load) -> None:
    seen: dict[str, list[bool]] = {}

    def noting(where: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            modes = _get_current_function_mode_stack()
            seen.setdefault(where, []).append(any(isinstance(mode, NonBlockingCopies) for mode in modes))
            return work(*args, **kwargs)

        return run

    pipeline = load_with_graphs(name, True)
    pipe, graphs = pipeline._pipe, pipeline._graphs
    capture = graphs._capture
    graphs._capture = lambda work: capture(noting("graph", work))
    pipe.vae.decoder.forward = noting("decoder", pipe.vae.decoder.forward)
    pipe.scheduler.step = noting("step", pipe.scheduler.step)
    pipe.check_inputs = noting("checks", pipe.check_inputs)
    with torch.compiler.set_stance("force_eager"):
        pipeline.prepare([CAR])
        assert not _get_current_function_mode_stack()
        generate(pipeline, CAR)
    assert not _get_current_function_mode_stack()
    modes = {where: set(modes) for where, modes in seen.items()}
    assert modes == {"graph": {False}, "decoder": {False}, "step": {True}, "checks": {True}}


@pytest.mark.parametrize("compiled", [False, True])
def test_every_mode_encodes_prompts_with_the_same_mask(
    compiled: bool, tiny_pipeline: Build, load_with_graphs: Load
) -> None:
    pipeline: Any = load_with_graphs("wan21", False) if compiled else load(tiny_pipeline("wan21"))
    forced: list[bool] = []
    for encoder in text_encoders(pipeline._pipe):
        encoder.register_forward_pre_hook(lambda *_: forced.append(masking_utils.is_tracing()))
    with torch.compiler.set_stance("force_eager"):
        pipeline.supports_batching()  # encodes this short prompt before it is known whether masks are forced
        assert forced
        forced.clear()
        pipeline.prepare([SampleRequest("a", "a", 0)])
        assert forced
        for request, mode in zip((CAR, NIGHT, SNOW), GenerationMode, strict=True):
            generate(pipeline, request, mode=mode)
    assert set(forced) == {compiled}


@pytest.fixture(scope="module")
def diffusers_lora(tiny_pipeline: Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    peft = pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("lora")
    pipe: Any = DiffusionPipeline.from_pretrained(tiny_pipeline("sd"), local_files_only=True)
    torch.manual_seed(1)
    pipe.unet.add_adapter(peft.LoraConfig(**LORA))
    layers = peft.get_peft_model_state_dict(pipe.unet)
    StableDiffusionPipeline.save_lora_weights(folder, unet_lora_layers=layers)
    return folder


@pytest.fixture(scope="module")
def peft_lora(tiny_pipeline: Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    peft = pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("peft")
    network = HunyuanDiT2DModel.from_pretrained(tiny_pipeline("hunyuan"), subfolder="transformer")
    torch.manual_seed(1)
    peft.get_peft_model(network, peft.LoraConfig(**LORA)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("name", "kind"), [("sd", "diffusers_lora"), ("hunyuan", "peft_lora")])
def test_the_weight_scales_the_adapter(
    name: str, kind: str, tiny_pipeline: Build, request: pytest.FixtureRequest
) -> None:
    lora = request.getfixturevalue(kind)
    folder = tiny_pipeline(name)
    without, nothing, half, full = (
        generate(load(folder, lora=given), CAR)[0] for given in ([], [f"{lora}:0"], [f"{lora}:0.5"], [str(lora)])
    )
    assert np.array_equal(without, nothing)
    assert max_difference(without, half) > 0
    assert max_difference(half, full) > 0


def test_two_halves_of_an_adapter_are_the_adapter(tiny_pipeline: Build, peft_lora: Path) -> None:
    folder = tiny_pipeline("hunyuan")
    twice = generate(load(folder, lora=[f"{peft_lora}:0.5"] * 2), CAR)[0]
    assert max_difference(twice, generate(load(folder, lora=[str(peft_lora)]), CAR)[0]) <= 1


def test_adapters_that_do_not_fit_are_refused(tiny_pipeline: Build, diffusers_lora: Path, peft_lora: Path) -> None:
    with pytest.raises(UserError, match="does not fit HunyuanDiTPipeline: the model has no unet"):
        load(tiny_pipeline("hunyuan"), lora=[str(diffusers_lora)])
    with pytest.raises(UserError, match="does not fit StableDiffusionXLPipeline"):
        load(tiny_pipeline("sdxl"), lora=[str(peft_lora)])
