"""Estimates: tables from measured speeds, compared with arithmetic by hand."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from muralist.cli import main
from muralist.core.errors import UserError
from muralist.core.formatting import format_count, format_duration, parse_count
from muralist.models.configs import activation_bytes
from muralist.settings import EstimateSettings, TrainSettings
from muralist.settings.load import to_yaml
from muralist.tools.estimate import (
    BUCKET_BYTES,
    GPUS,
    LINK_EFFICIENCY,
    Links,
    MeasuredSpeed,
    TrainingEstimate,
    flops_per_token,
    plot_svg,
    read_measured,
    ring_seconds,
    scale,
)
from tests.conftest import REPOSITORY
from tests.support.hunyuan import SMALL
from tests.support.runs import last_checkpoint, train

STEPS = REPOSITORY / "bench" / "results" / "train_speed_h200.json"
ONE_GPU = MeasuredSpeed("test", "JiT-B/4", 64, 64, "NVIDIA H200", 1, (80e3, 100e3, 120e3))


def estimate(measured: MeasuredSpeed = ONE_GPU, **settings: Any) -> TrainingEstimate:
    return TrainingEstimate(EstimateSettings(**settings), measured)


@pytest.mark.parametrize(
    ("speed", "trillion", "ten_billion"),
    [(240e3, "48 d 5 h", "11 h 34 min"), (400e3, "28 d 22 h", "6 h 56 min"), (640e3, "18 d 2 h", "4 h 20 min")],
)
def test_cost_of_a_token_budget(speed: float, trillion: str, ten_billion: str) -> None:
    found = estimate(price=2.5)  # eight H200 of 700 W
    assert [found.cost(tokens, speed).splitlines()[0] for tokens in (1e12, 10e9)] == [trillion, ten_billion]
    assert found.cost(3600 * speed, speed) == "1 h 00 min\n[dim]8 GPU hours, price 20, 6 kWh[/]"


def test_read_a_benchmark_of_steps() -> None:
    rows = {row["case"]: row for row in json.loads(STEPS.read_text())["rows"] if row["variant"] == "fused+graphs"}
    for batch, asked in ((64, None), (256, 200)):
        found = read_measured(STEPS, asked)
        assert (found.model, found.img_size, found.batch_size, found.gpu) == ("JiT-B/4", 64, batch, "NVIDIA H200")
        row = rows[f"JiT-B/4@64x{batch}"]
        expected = batch * 256 / row["ms a step, the other row"] * 1e3, batch * 256 / row["ms a step"] * 1e3
        assert found.readings == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    "rows", [3, [3], [{"case": 3}], [{"case": "JiT-B/4@64x64", "variant": "fused", "K tokens/s": 1}]]
)
def test_rows_of_another_benchmark_are_refused(rows: object, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(json.dumps({"rows": rows}))
    with pytest.raises(UserError, match="has no training speed"):
        read_measured(tmp_path / "other.json", None)


def test_parse_and_format_counts() -> None:
    assert [parse_count(text) for text in ("10B", "1T", "1.5m", "5e9", "300")] == [10e9, 1e12, 1.5e6, 5e9, 300]
    assert [parse_count(text) for text in ("10,000", "1,000,000", "1,5M", "1_000")] == [10_000, 1e6, 1.5e6, 1000]
    assert [format_count(number) for number in (1e12, 10e9, 342_068, 999_999, 12)] == ["1T", "10B", "342K", "1M", "12"]
    for wrong in ("ten", "", "0", "-3B", "1Q"):
        with pytest.raises(UserError, match="is not a number"):
            parse_count(wrong)
    assert format_duration(4.3 * 3600) == "4 h 18 min"
    assert format_duration(-3) == "0 s"


def test_ring_all_reduce_overlaps_with_the_backward_pass() -> None:
    links = Links(intra_node=100e9, inter_node=10e9)
    assert ring_seconds(1e9, 1, links) == 0
    assert ring_seconds(1e9, 2, links) == pytest.approx(1e9 / (LINK_EFFICIENCY * 100e9), rel=1e-2)  # 2 (n - 1) / n = 1
    assert ring_seconds(1e9, 8, links) == pytest.approx(1.75e9 / (LINK_EFFICIENCY * 100e9), rel=1e-2)
    slower_link = 1.875e9 / (LINK_EFFICIENCY * 10e9)
    assert ring_seconds(1e9, 16, links) == pytest.approx(slower_link, rel=1e-2)
    hidden = scale(1.0, 1e9, 8, links)
    assert hidden.all_reduce < 2 / 3 and hidden.exposed == ring_seconds(BUCKET_BYTES, 8, links)
    exposed = scale(0.1, 10e9, 16, links)
    assert exposed.exposed == pytest.approx(exposed.all_reduce - 0.1 * 2 / 3)
    assert exposed.efficiency == pytest.approx(0.1 / (0.1 + exposed.exposed + exposed.straggler))
    rows = [scale(0.05, 0.5e9, gpus, Links(intra_node=400e9, inter_node=50e9)) for gpus in GPUS]
    assert GPUS[0] == 1 and GPUS[-1] == 1024 and rows[0].efficiency == 1.0
    assert all(before.efficiency > after.efficiency for before, after in pairwise(rows))
    assert all(before.speedup < after.speedup for before, after in pairwise(rows))


def test_scaling_over_pcie() -> None:
    # Usual figures for GPUs without NVLink: 1.8-1.9, 3.5-3.8, 6.5-7.0.
    links = Links(intra_node=25e9, inter_node=12.5e9)
    two, four, eight = (scale(64 * 256 / 342e3, 0.52e9, gpus, links).speedup for gpus in (2, 4, 8))
    assert 1.8 < two < 2.0 and 3.3 < four < 3.8 and 5.9 < eight < 7.0


def test_scenarios_and_numbers_of_gpus() -> None:
    found = estimate()
    assert ONE_GPU.per_gpu() == pytest.approx((84e3, 100e3, 116e3))
    low, middle, high = found.speeds.values()
    assert low < middle < high and 0.9 * 8 * 100e3 < middle < 8 * 100e3
    assert found.scaling[0].compute == pytest.approx(64 * 256 / 100e3)
    assert (found.gpu_memory, found.watts) == (141e9, 700)
    # A measurement of eight GPUs already includes their communication.
    eight = MeasuredSpeed("test", "JiT-B/4", 64, 64, "NVIDIA H200", 8, (800e3,))
    assert estimate(eight).speeds["medium"] == pytest.approx(800e3, rel=2e-3)
    # A larger model reaches the same FLOPs per second.
    large = estimate(gpus=1, model="JiT-L/4").speeds["medium"]
    assert large * flops_per_token("JiT-L/4", 64) == pytest.approx(100e3 * flops_per_token("JiT-B/4", 64))


def test_tables_from_a_benchmark_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["estimate", "--from", str(STEPS), "--gpus", "8", "--tokens", "1T", "10B", "--price", "2.5"]
    assert main([*words, "--plot", str(tmp_path / "scaling.html")]) == 0
    output = capsys.readouterr().out
    for part in ("conservative", "medium", "optimistic", "1T tokens", "10B tokens", "kWh", "1024", "exposed",
                 "A step on one GPU takes 25.7 ms", "the largest batch that fits is about"):  # fmt: skip
        assert part in output, output
    written = (tmp_path / "scaling.html").read_text()
    assert "<html>" in written and "Ethernet, 25 Gbit" in written
    assert 'src="http' not in written and "8 GPUs: 9" in written
    for path, problem in ((tmp_path / "nothing", "was not found"), (tmp_path, "is not a measurement")):
        assert main(["estimate", "--from", str(path)]) == 1
        assert f"{path} {problem}." in capsys.readouterr().err
    assert main([*words, "--images", "1M"]) == 1
    assert "--tokens and --images cannot both be given" in capsys.readouterr().err


def test_read_a_run(photo_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train("--data_path", photo_folder, "--max_steps", "30", "--results_dir", tmp_path, "--run_name", "run",
          "--samples_per_gpu", "0", "--log_every", "5")  # fmt: skip
    measured = read_measured(tmp_path / "run", None)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert (measured.model, measured.img_size, measured.batch_size, measured.gpus) == ("JiT-T/8", 16, 4, 1)
    assert measured.gpu == "CPU"
    assert set(measured.readings) <= {line["train/tokens_per_second"] for line in lines}
    assert "requested: 400 Gbit" in plot_svg(estimate(measured))
    assert main(["estimate", "--from", str(tmp_path / "run"), "--images", "1M"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    for part in ("One process without a GPU was measured", "0.2 MB per image", "80.0 GB is a default",
                 "No energy estimate"):  # fmt: skip
        assert part in output, output
    # Resumed on two GPUs: the readings of one CPU process do not count.
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(lines[-1] | {"train/tokens_per_second": 1e6, "world_size": 2, "device": "NVIDIA H200"}))
    found = estimate(measured := read_measured(tmp_path / "run", None))
    assert (measured.gpus, measured.readings) == (2, (1e6,))
    assert (found.gpu_memory, found.links.intra_node, found.watts) == (141e9, 450e9, 700)


def test_read_a_run_of_a_model_without_formulas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    train(*SMALL, "--model", "HunyuanDiT", "--img_size", "32", "48", "--max_steps", "2", "--results_dir", tmp_path,
          "--run_name", "run", "--samples_per_gpu", "0", "--val_fraction", "0")  # fmt: skip
    measured = read_measured(run, None)
    assert measured.network is not None and measured.network.tokens_per_image == 2 * 3  # of 16 pixels
    count = sum(value.numel() for value in load_file(last_checkpoint(run) / "model.safetensors").values())
    assert measured.network.trained == pytest.approx(count, abs=5e4) and measured.network.frozen == 0
    found = estimate(measured, gpus=4)
    assert found.speeds["medium"] == pytest.approx(found.tokens_per_second(found.scaling[2]))
    assert found.memory["ddp"].state == pytest.approx(24 * measured.network.trained)
    capsys.readouterr()
    assert main(["estimate", "--from", str(run), "--images", "1M"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "Measured: HunyuanDiT at 32 x 48 px" in output and "6M tokens (1M images)" in output
    assert "plus frozen components and activations, for which HunyuanDiT has no formula" in output
    for words in (["--from", str(run), "--img_size", "64"], ["--from", "probe", "--model", "HunyuanDiT"]):
        assert main(["estimate", *words]) == 1
        assert "Formulas for FLOPs exist for JiT only; HunyuanDiT is estimated from a run" in capsys.readouterr().err


def test_pipeline_that_cannot_be_built_is_refused(tiny_pipeline: Callable[[str], Path], tmp_path: Path) -> None:
    """Kolors has a tokenizer of its own, of another package, where this folder has CLIP's."""
    from muralist.tools import estimate_pipeline

    folder = shutil.copytree(tiny_pipeline("sd"), tmp_path / "sd")
    index = folder / "model_index.json"
    index.write_text(index.read_text().replace("StableDiffusionPipeline", "KolorsPipeline"))
    with pytest.raises(UserError, match="The KolorsPipeline in .* cannot be loaded: "):
        estimate_pipeline.weightless_pipeline(folder, "unet")


def test_cost_of_an_image_of_a_pipeline(tiny_pipeline: Callable[[str], Path]) -> None:
    """Compared with the FLOPs of a run's spec, and with what autograd keeps of the real network on the CPU."""
    import torch

    from muralist.models.lora import Lora
    from muralist.models.spec import build_spec
    from muralist.tools import estimate_pipeline

    settings = TrainSettings(model={"path": str(tiny_pipeline("flux")), "img_size": 64})  # type: ignore[arg-type]
    spec: Any = build_spec(settings, [])
    spec.to_device(torch.device("cpu"), torch.float32)
    pipe, network = estimate_pipeline.weightless_pipeline(tiny_pipeline("flux"), "transformer")
    assert {part.device.type for part in (network, pipe.text_encoder_2, pipe.vae)} == {"meta"}
    lora = Lora(64, ("to_q", "to_k"))
    full, adapted = estimate_pipeline.image_costs(pipe, network, (64, 64), (0.0, 1.0), lora)
    assert 3 * full.flops == spec.flops_per_image()
    assert adapted.checkpointed < full.checkpointed < full.activations > adapted.activations

    real, kept = spec.network().bfloat16(), {}
    arguments = {
        name: value.bfloat16() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in spec.probe.network_arguments("a red car", (64, 64)).items()
    }
    weights = {weight.untyped_storage().data_ptr() for weight in real.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = real(**arguments)
    found = sum(size for place, size in kept.items() if place not in weights)
    assert output is not None and full.activations == pytest.approx(found, rel=0.1)


def test_memory_of_a_pipeline_from_its_files(
    tiny_pipeline: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    flux, lumina = tiny_pipeline("flux"), tiny_pipeline("lumina2")
    assert main(["estimate", "--model.path", str(flux), "--img_size", "64", "64", "--memory", "24", "--gpus", "4"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    count = sum(value.numel() for value in load_file(next((flux / "transformer").glob("*.safetensors"))).values())
    assert f"transformer of FluxPipeline in {flux} at 64 px: {format_count(count)} parameters" in said
    for part in (
        "of 24.0 GB",
        "│ full │ adamw8bit │ ddp │",
        "│ LoRA, rank 64 │ adamw │ fsdp2, 4 GPUs │",
        "│ LoRA, rank 64, nf4 base │ adamw │ ddp │",
        "│ LoRA, rank 64, fp8 base, --swap_blocks 2 │ adamw │ ddp │",
        "MB with gradient",
    ):
        assert part in said, said
    assert main(["estimate", "--model.path", str(flux), "--img_size", "64", "--memory", "1.2"]) == 0
    assert "does not fit" in capsys.readouterr().out
    # A network that reads values of its mask.
    assert main(["estimate", "--model.path", str(lumina), "--img_size", "64"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "of 80.0 GB (--memory)" in said and "The memory of an image is unknown" in said
    assert main(["estimate", "--model.path", str(flux)]) == 1
    assert "The image size is missing" in capsys.readouterr().err


def test_read_a_run_whose_metrics_do_not_name_the_hardware(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "config.yaml").write_text(to_yaml(TrainSettings()))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/tokens_per_second": 1000.0}\n')
    log = "12:00:00 Number of processes: {}\n12:00:00 Number of GPUs: {}\n12:00:00 device     NVIDIA H200\n"
    (tmp_path / "logs" / "train.log").write_text(log.format(8, 8) + log.format(4, 4))
    measured = read_measured(tmp_path, None)
    assert (measured.gpus, measured.gpu, measured.batch_size) == (4, "NVIDIA H200", 64)


def test_measured_memory_applies_to_its_image_size_only() -> None:
    measured = MeasuredSpeed("test", "JiT-B/4", 64, 64, "NVIDIA H200", 1, (100e3,), image_bytes=50e6)
    assert estimate(measured).memory["ddp"].per_image == 50e6
    larger = estimate(measured, img_size=256).memory["ddp"].per_image
    assert larger == activation_bytes("JiT-B/4", 256, bf16=True, compiled=True) > 1e9


def test_image_in_the_docs_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    drawn = plot_svg(estimate(read_measured(STEPS, None)))
    assert drawn == (REPOSITORY / "docs" / "scaling.svg").read_text()
    assert drawn.count("<polyline") == 4 and drawn.count(">1024<") == 1
    assert main(["estimate", "--from", str(STEPS), "--plot", "curve.pdf"]) == 1
    assert "ends in .html or .svg" in capsys.readouterr().err


def test_probe_runs_real_steps() -> None:
    from muralist.tools.probe import probe

    now = [0.0]

    def clock() -> float:
        now[0] += 0.25  # at every call
        return now[0]

    measured = probe("JiT-T/8", 16, 4, seconds=3.0, clock=clock)
    assert (measured.model, measured.gpus, measured.batch_size) == ("JiT-T/8", 1, 1)
    tokens = 4  # (16 / 8)^2 of the one image that so slow a machine can afford
    assert len(measured.readings) >= 6 and measured.readings[0] == pytest.approx(tokens / 0.25)
