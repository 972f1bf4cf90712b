"""Estimates: the guides' tables from measured speeds, by arithmetic one can do by hand."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from muralist.cli import main
from muralist.errors import UserError
from muralist.scale.communication import BUCKET, GPUS, REACHED, Links, ring_seconds, scale
from muralist.scale.estimate import bill, estimate, flops_per_token
from muralist.scale.measured import Measured, read_measured
from muralist.scale.memory import activation_bytes
from muralist.scale.scaling_picture import page, svg
from muralist.settings import EstimateSettings
from muralist.words import amount, duration, short
from tests.conftest import REPOSITORY
from tests.support.runs import train

RESULTS = REPOSITORY / "bench" / "results"
BENCH, STEPS = RESULTS / "jit_b4_64px_h200.json", RESULTS / "train_speed_h200.json"
ONE_GPU = Measured("test", "JiT-B/4", 64, 64, "NVIDIA H200", 1, (80e3, 100e3, 120e3))


def test_guide_1s_table_follows_from_its_speeds() -> None:
    for speed, trillion, ten_billion in ((240e3, 48, 11.6), (400e3, 29, 7), (640e3, 18, 4.3)):
        assert bill(1e12, speed, 8, None, None).seconds / 86400 == pytest.approx(trillion, abs=0.5)
        assert bill(10e9, speed, 8, None, None).seconds / 3600 == pytest.approx(ten_billion, abs=0.06)
    one = bill(3.6e9, 1e6, 8, price=2.5, watts=700)  # an hour on eight GPUs
    assert (one.gpu_hours, one.cost, one.kilowatt_hours) == pytest.approx((8, 20, 5.6))


def test_a_bench_of_steps_is_a_measurement_too() -> None:
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
def test_rows_of_another_kind_are_no_measurement(rows: object, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(json.dumps({"rows": rows}))
    with pytest.raises(UserError, match="says nothing of a training's tokens per second"):
        read_measured(tmp_path / "other.json", None)


def test_amounts_as_people_write_them() -> None:
    assert [amount(text) for text in ("10B", "1T", "1.5m", "5e9", "300")] == [10e9, 1e12, 1.5e6, 5e9, 300]
    assert [amount(text) for text in ("10,000", "1,000,000", "1,5M", "1_000")] == [10_000, 1e6, 1.5e6, 1000]
    assert [short(number) for number in (1e12, 10e9, 342_068, 999_999, 12)] == ["1T", "10B", "342K", "1M", "12"]
    for wrong in ("ten", "", "0", "-3B", "1Q"):
        with pytest.raises(UserError, match="is no amount"):
            amount(wrong)
    assert duration(4.3 * 3600) == "4 h 18 min"


def test_the_ring_and_what_the_backward_pass_hides() -> None:
    links = Links(inside=100e9, between=10e9)
    assert ring_seconds(1e9, 1, links) == 0
    assert ring_seconds(1e9, 2, links) == pytest.approx(1e9 / (REACHED * 100e9), rel=1e-2)  # 2 (n - 1) / n = 1
    assert ring_seconds(1e9, 8, links) == pytest.approx(1.75e9 / (REACHED * 100e9), rel=1e-2)
    assert ring_seconds(1e9, 16, links) == pytest.approx(1.875e9 / (REACHED * 10e9), rel=1e-2)  # the slower link counts
    hidden = scale(1.0, 1e9, 8, links)
    assert hidden.exchange < 2 / 3 and hidden.visible == ring_seconds(BUCKET, 8, links)
    shown = scale(0.1, 10e9, 16, links)
    assert shown.visible == pytest.approx(shown.exchange - 0.1 * 2 / 3)
    assert shown.efficiency == pytest.approx(0.1 / (0.1 + shown.visible + shown.waiting))
    rows = [scale(0.05, 0.5e9, gpus, Links(inside=400e9, between=50e9)) for gpus in GPUS]
    assert GPUS[0] == 1 and GPUS[-1] == 1024 and rows[0].efficiency == 1.0
    assert all(before.efficiency > after.efficiency for before, after in pairwise(rows))
    assert all(before.speedup < after.speedup for before, after in pairwise(rows))


def test_a_slow_link_costs_what_guide_2_expects() -> None:
    # The guide's figures (1.8-1.9, 3.5-3.8, 6.5-7.0) are about those of cards that have PCIe alone.
    links = Links(inside=25e9, between=12.5e9)
    two, four, eight = (scale(64 * 256 / 342e3, 0.52e9, gpus, links).speedup for gpus in (2, 4, 8))
    assert 1.8 < two < 2.0 and 3.3 < four < 3.8 and 5.9 < eight < 7.0


def test_low_middle_and_high_and_other_numbers_of_gpus() -> None:
    found = estimate(EstimateSettings(gpus=8, price=2.0), ONE_GPU, [1e12])
    assert ONE_GPU.per_gpu() == pytest.approx((84e3, 100e3, 116e3))
    low, middle, high = (scenario.tokens_per_second for scenario in found.scenarios)
    assert low < middle < high and 0.9 * 8 * 100e3 < middle < 8 * 100e3
    assert found.scenarios[1].bills[0].seconds == pytest.approx(1e12 / middle)
    assert found.scaling[0].compute == pytest.approx(64 * 256 / 100e3)
    assert found.card and found.memory == 141e9
    assert found.scenarios[1].bills[0].kilowatt_hours == pytest.approx(8 * 0.7 * 1e12 / middle / 3600)
    # Eight GPUs that were measured together already pay for their exchange.
    eight = Measured("test", "JiT-B/4", 64, 64, "NVIDIA H200", 8, (800e3,))
    assert estimate(EstimateSettings(gpus=8), eight, [1e12]).scenarios[1].tokens_per_second == pytest.approx(
        800e3, rel=2e-3
    )
    # A larger model does as many operations a second.
    large = estimate(EstimateSettings(gpus=1, model="JiT-L/4"), ONE_GPU, [1e12]).scenarios[1].tokens_per_second
    assert large * flops_per_token("JiT-L/4", 64) == pytest.approx(100e3 * flops_per_token("JiT-B/4", 64))


def test_a_benchmark_file_and_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = read_measured(BENCH, None)
    assert (measured.model, measured.img_size, measured.batch_size, measured.gpu) == ("JiT-B/4", 64, 64, "NVIDIA H200")
    assert measured.readings == (346899, 337068, 279254, 350743)
    assert read_measured(BENCH, 200).batch_size == 256
    words = ["estimate", "--from", str(BENCH), "--gpus", "8", "--tokens", "1T", "10B", "--price", "2.5"]
    assert main([*words, "--plot", str(tmp_path / "scaling.html")]) == 0
    said = capsys.readouterr().out
    for part in ("conservative", "medium", "optimistic", "1T tokens", "10B tokens", "kWh", "1024", "6.5-7.0x",
                 "A step on one GPU takes 47.9 ms", "the largest that fits is about"):  # fmt: skip
        assert part in said, said
    written = (tmp_path / "scaling.html").read_text()
    assert "<html>" in written and "Ethernet, 25 Gbit" in written
    assert 'src="http' not in written
    assert main(["estimate", "--from", str(tmp_path / "nothing")]) == 1
    assert "is no measurement" in capsys.readouterr().err
    assert main([*words, "--images", "1M"]) == 1
    assert "--tokens and --images cannot both be given" in capsys.readouterr().err


def test_a_run_is_a_measurement(photo_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train("--data_path", photo_folder, "--max_steps", "30", "--results_dir", tmp_path, "--run_name", "run",
          "--samples_per_gpu", "0", "--log_every", "5")  # fmt: skip
    measured = read_measured(tmp_path / "run", None)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert (measured.model, measured.img_size, measured.batch_size, measured.gpus) == ("JiT-T/8", 16, 4, 1)
    assert measured.gpu == "CPU"
    assert set(measured.readings) <= {line["train/tokens_per_second"] for line in lines}
    found = estimate(EstimateSettings(images=["1M"]), measured, [4e6])
    assert found.scenarios[0].bills[0].seconds > 0
    assert "as asked: 400 Gbit" in page(found)
    assert main(["estimate", "--from", str(tmp_path / "run"), "--images", "1M"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for part in ("One process without a GPU was measured", "0.2 MB for each image", "80.0 GB are a guess",
                 "Energy is left out"):  # fmt: skip
        assert part in said, said
    log = tmp_path / "run" / "logs" / "train.log"
    assert " device     CPU\n" in log.read_text()
    log.write_text(log.read_text().replace(" device     CPU", " device     NVIDIA H200"))
    found = estimate(EstimateSettings(images=["1M"]), read_measured(tmp_path / "run", None), [4e6])
    assert (found.memory, found.links.inside) == (141e9, 450e9) and found.scenarios[0].bills[0].kilowatt_hours


def test_memory_that_was_measured_holds_for_that_size_alone() -> None:
    measured = Measured("test", "JiT-B/4", 64, 64, "NVIDIA H200", 1, (100e3,), image_bytes=50e6)
    assert estimate(EstimateSettings(), measured, [1e12]).needs["ddp"].per_image == 50e6
    larger = estimate(EstimateSettings(img_size=256), measured, [1e12]).needs["ddp"].per_image
    assert larger == activation_bytes("JiT-B/4", 256, bf16=True, compiled=True) > 1e9


def test_the_picture_in_the_documents_is_the_programs(capsys: pytest.CaptureFixture[str]) -> None:
    drawn = svg(estimate(EstimateSettings(), read_measured(STEPS, None), [1e12]))
    assert drawn == (REPOSITORY / "docs" / "scaling.svg").read_text()
    assert drawn.count("<polyline") == 4 and drawn.count("1024") == 1
    assert main(["estimate", "--from", str(BENCH), "--plot", "curve.pdf"]) == 1
    assert "ends in .html or .svg" in capsys.readouterr().err


def test_a_probe_takes_real_steps() -> None:
    from muralist.scale.probe import probe

    now = [0.0]

    def clock() -> float:
        now[0] += 0.25  # every look at it
        return now[0]

    measured = probe("JiT-T/8", 16, 4, seconds=3.0, clock=clock)
    assert (measured.model, measured.gpus, measured.batch_size) == ("JiT-T/8", 1, 1)
    tokens = 4  # (16 / 8)^2 of the one image that such a slow machine bears
    assert len(measured.readings) >= 6 and measured.readings[0] == pytest.approx(tokens / 0.25)
