"""Real processes that are killed, stopped, starved and interrupted: every row is made, to the same bit."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.disks import leave_free, small_disk
from tests.support.jit_models import checkpoint, family, network_of
from tests.support.pipelines import build_pipeline
from tests.support.runs import finish, start

pytestmark = pytest.mark.slow

ROWS = 42
MB = 2**20


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_pipeline("wan21", tmp_path_factory.mktemp("pipelines"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("table") / "prompts.csv"
    path.write_text("prompt\n" + "".join(f"car {row}{' in the rain' * (row % 5)}\n" for row in range(ROWS)))
    return path


def command(model: Path, prompts: Path, images: Path, *more: object) -> list[object]:
    return ["python", "batch_generate_t2i_multigpu.py", "--prompts_csv", prompts, "--output_dir", images,
            "--model_path", model, "--height", 32, "--width", 32, "--num_inference_steps", 4, "--dtype", "fp32",
            "--batch_size", 3, *more]  # fmt: skip


def files(images: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(images.glob("*.png"))}


def lines(path: Path) -> list[dict]:
    text = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in text if line.startswith('{"status"') and line.endswith("}")]


def made_by(images: Path, label: str) -> int:
    return len(lines(images / ".ledger" / f"gpu{label}.jsonl"))


def wait_until(
    happened: Callable[[], bool], process: subprocess.Popen[str] | None = None, seconds: float = 300
) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert process is None or process.poll() is None, finish(process, expect=None)
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


def workers(parent: int) -> list[int]:
    """The worker processes of a process, in the order of their start."""
    found = []
    for children in Path(f"/proc/{parent}/task").glob("*/children"):
        for pid in map(int, children.read_text().split()):
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return sorted(found)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module")
def undisturbed(wan: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    images = tmp_path_factory.mktemp("undisturbed")
    output = finish(start(*command(wan, prompts, images)))
    assert f"{ROWS} of {ROWS} images are in" in output and "images/s" in output and "Traceback" not in output
    assert "\r" not in output and "\x1b" not in output
    made = files(images)
    assert len(set(made.values())) == ROWS
    assert {path.name for path in images.iterdir()} - set(made) == {"failed_prompts_gpu0.txt", "ledger.jsonl"}
    return made


def test_one_worker_is_killed_and_one_hangs(
    wan: Path, prompts: Path, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    more = ["--gpu_ids", 2, 3, 5, "--worker_timeout", 10]
    process = start(*command(wan, prompts, tmp_path, *more))
    wait_until(lambda: len(workers(process.pid)) == 3, process)
    second, third, _ = workers(process.pid)  # of GPUs 2 and 3
    wait_until(lambda: made_by(tmp_path, "2") > 0, process)
    os.kill(second, signal.SIGKILL)
    # At a row of its own: a sample that kills two workers is skipped.
    own = tmp_path / ".ledger" / "gpu3.jsonl"
    wait_until(lambda: any(line["index"] % 3 == 1 for line in lines(own)), process)
    os.kill(third, signal.SIGSTOP)
    output = finish(process)
    assert "GPU 2: its process was killed by SIGKILL. The others take its" in output
    assert "GPU 3 sent no heartbeat for 10 s and was killed. The others take its" in output
    assert "Traceback" not in output
    assert files(tmp_path) == undisturbed
    by_row = {line["index"]: line["gpu"] for line in lines(tmp_path / "ledger.jsonl")}
    assert sorted(by_row) == list(range(ROWS))
    # A GPU with nothing left may take rows that GPU 5 was not sent yet; rows of the lost GPUs come to GPU 5 in any case.
    assert any(row % 3 != 2 for row, gpu in by_row.items() if gpu == "5")
    for label in ("2", "3", "5"):
        assert (tmp_path / f"failed_prompts_gpu{label}.txt").read_text() == ""
    assert not lives(third)


def test_interrupted_killed_and_damaged_it_goes_on(
    wan: Path, prompts: Path, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    # Ctrl+C, which a terminal sends to every process; and a second command meanwhile.
    process = start(*command(wan, prompts, tmp_path, "--gpu_ids", 0, 1), new_session=True)
    wait_until(lambda: made_by(tmp_path, "0") + made_by(tmp_path, "1") >= 1, process)
    mine = workers(process.pid)
    os.killpg(process.pid, signal.SIGSTOP)  # so that it is still at work when the second one comes
    refused = finish(start(*command(wan, prompts, tmp_path)), expect=1)
    assert f"is being filled by process {process.pid} on" in refused
    os.killpg(process.pid, signal.SIGCONT)
    interrupted_at = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    output = finish(process, expect=130)
    assert time.monotonic() - interrupted_at < 10
    assert "Interrupted." in output and "Run the same command again to resume." in output and "Traceback" not in output
    assert not any(map(lives, mine))
    there = files(tmp_path)
    assert 0 < len(there) < ROWS and there.items() <= undisturbed.items()
    assert {path.name for path in tmp_path.iterdir()} - set(there) == {
        "failed_prompts_gpu0.txt", "failed_prompts_gpu1.txt", "ledger.jsonl",
    }  # fmt: skip
    # A worker may end between an image and its line: at most one batch of three per worker, made again below.
    recorded = {line["file"] for line in lines(tmp_path / "ledger.jsonl")}
    assert recorded <= set(there) and len(there) - len(recorded) <= 2 * 3

    # Kill -9 of the command alone: its workers end by themselves.
    process = start(*command(wan, prompts, tmp_path, "--gpu_ids", 7))
    wait_until(lambda: made_by(tmp_path, "7") >= 2, process)
    mine = workers(process.pid)
    process.kill()
    finish(process, expect=-signal.SIGKILL)
    wait_until(lambda: not any(map(lives, mine)), seconds=20)
    assert (tmp_path / ".ledger" / "gpu7.jsonl").exists()

    # Damage: a cut file, another with one bit turned, a torn line, a file half written.
    names = sorted(files(tmp_path))
    cut, turned = tmp_path / names[0], tmp_path / names[1]
    cut.write_bytes(cut.read_bytes()[:-9])
    turned.write_bytes(turned.read_bytes()[:-30] + b"\0" + turned.read_bytes()[-29:])
    with (tmp_path / ".ledger" / "gpu7.jsonl").open("ab") as file:
        file.write(b'{"status": "done", "index": 4')
    (tmp_path / ".000009_seed50.png.1.tmp").write_bytes(b"half")
    kept = {name: (tmp_path / name).stat().st_mtime_ns for name in names[2:]}
    output = finish(start(*command(wan, prompts, tmp_path), NPROC="2"))
    assert files(tmp_path) == undisturbed
    assert f"of {ROWS} images exist already." in output
    there_already = int(output.partition(f" of {ROWS} images exist already")[0].split()[-1])
    # Images whose lines were not yet written when the commands ended are made again.
    assert len(kept) - 3 - 2 * 3 <= there_already <= len(kept)
    again = [name for name, changed in kept.items() if (tmp_path / name).stat().st_mtime_ns != changed]
    assert len(again) == len(kept) - there_already
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".") or path.name == "lock"]

    # And once more: nothing is made.
    times = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.png")}
    output = finish(start(*command(wan, prompts, tmp_path)))
    assert f"Nothing to do: {ROWS} of {ROWS} images" in output
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.png")} == times


def test_memory_that_really_runs_out(tmp_path: Path) -> None:
    """Its worker gets no more address space once it has begun: the large rows at the end cannot be."""
    small, large = 30, 3
    rows = ["small,,"] * small + ["large,768,768"] * large + ["impossible,33,32"]
    (tmp_path / "prompts.csv").write_text("prompt,height,width\n" + "\n".join(rows) + "\n")
    images = tmp_path / "images"
    words = command(build_pipeline("sd", tmp_path), tmp_path / "prompts.csv", images)
    process = start(*words)
    wait_until(lambda: made_by(images, "0") >= 1, process)
    (worker,) = workers(process.pid)
    status = Path(f"/proc/{worker}/status").read_text()
    size = int(status.partition("VmSize:")[2].split()[0]) * 1024
    resource.prlimit(worker, resource.RLIMIT_AS, (size + 20 * MB, size + 20 * MB))
    output = finish(process, expect=1)
    assert "GPU 0 ran out of memory at batch size 3." in output and "--allow_batch_change" in output
    assert "Traceback" not in output
    before = files(images)
    assert len(before) == small
    output = finish(start(*words), expect=1)  # with memory it goes on; one row cannot be made by anybody
    assert f"{small + large} of {small + large + 1} images are in" in output
    assert len(files(images)) == small + large and before.items() <= files(images).items()
    assert "cannot generate images of 32 x 33" in (images / "failed_prompts_gpu0.txt").read_text()
    assert not any("batch_size" in line for line in lines(images / "ledger.jsonl"))
    undisturbed = tmp_path / "undisturbed"
    finish(start(*command(tmp_path / "sd", tmp_path / "prompts.csv", undisturbed)), expect=1)
    assert files(images) == files(undisturbed)


MANY_CPUS = """
from muralist.cli import main
from muralist.generate import workers

workers.available_cpus = lambda: 8
raise SystemExit(main())
"""


@pytest.mark.parametrize("ending", ["a process that saves", "the worker", "Ctrl+C"])
def test_processes_that_save_images_end_with_their_worker(ending: str, tmp_path: Path) -> None:
    spec = family("0", "1")
    model = checkpoint(tmp_path / "run", spec.describe(), network_of(spec).state_dict())
    table, rows = tmp_path / "prompts.csv", 3000
    table.write_text("prompt\n" + "0\n" * rows)

    def generate(images: Path) -> subprocess.Popen[str]:
        arguments = ("--model_path", model, "--prompts_csv", table, "--output_dir", images, "--batch_size", 250)
        words = (*arguments, "--num_inference_steps", 2, "--compile", "false")
        return start("python", "-c", MANY_CPUS, "generate", *words, new_session=True)

    process = generate(tmp_path / "images")
    wait_until(lambda: made_by(tmp_path / "images", "0") >= 250, process)
    (worker,) = workers(process.pid)
    saving = workers(worker)
    assert len(saving) == 4
    match ending:
        case "a process that saves":
            os.kill(saving[1], signal.SIGKILL)
            output = finish(process, expect=1)
            assert "A process that saves images was killed by SIGKILL." in output
            assert "Run the same command again to resume." in output and "Traceback" not in output
        case "the worker":
            os.kill(worker, signal.SIGKILL)
        case "Ctrl+C":
            os.killpg(process.pid, signal.SIGINT)
            assert "Traceback" not in finish(process, expect=130)
    wait_until(lambda: not any(map(lives, saving)), seconds=5)
    process.kill()
    finish(process, expect=None)
    assert 250 <= len(files(tmp_path / "images")) < rows
    assert f"{rows:,} of {rows:,} images are in" in finish(generate(tmp_path / "images"))
    finish(generate(tmp_path / "undisturbed"))
    assert files(tmp_path / "images") == files(tmp_path / "undisturbed")
    assert not list((tmp_path / "images").glob(".*"))


def test_a_disk_that_fills_up(wan: Path, prompts: Path, tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    with small_disk(tmp_path / "disk") as disk:
        leave_free(disk, 20 * 4096)
        output = finish(start(*command(wan, prompts, disk / "images")), expect=1)
        assert "No space left on the disk that holds" in output and "Traceback" not in output
        there = files(disk / "images")
        assert 0 < len(there) < ROWS and there.items() <= undisturbed.items()
        (disk / "filler").unlink()
        finish(start(*command(wan, prompts, disk / "images")))
        assert files(disk / "images") == undisturbed
