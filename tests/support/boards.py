"""A board on a free port of this machine, and folders for it to show that cost little to make."""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import uvicorn
from PIL import Image

from muralist.board.app import create
from muralist.core.images import encode_png

PROMPTS = ["a red car", "a blue house", 'a sign <script>document.title = "owned"</script>', "a rainy street"]


class Answer(NamedTuple):
    """What the board said."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        assert self.status == 200, self.body
        return json.loads(self.body)


class Board:
    """A board that runs; paths are sent as they are written, without any tidying."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.address = f"http://127.0.0.1:{port}"

    def get(self, path: str, method: str = "GET", **headers: str) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.putrequest(method, path, skip_host="host" in headers, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        told = Answer(answer.status, {key.lower(): value for key, value in answer.getheaders()}, answer.read())
        connection.close()
        return told


@contextmanager
def running_board(root: Path, cache: Path) -> Iterator[Board]:
    """Serve a folder from a thread of this process."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(create(root, cache=cache), log_level="error", access_log=False, timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield Board(listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(10)


def line(step: int, loss: float | None = None, **more: float) -> str:
    """One line of metrics.jsonl."""
    values = {
        "step": step,
        "images": step * 4,
        "epoch": step / 100,
        "time": 1e9 + step,
        "train/loss": 1 / step if loss is None else loss,
        "train/learning_rate": 1e-3,
        "train/grad_norm": 0.5,
        "train/samples_per_second": 100.0,
        "train/tokens_per_second": 6400.0,
        "train/mfu": 0.4,
        "train/data_wait_fraction": 0.01,
    }
    return json.dumps(values | more) + "\n"


def write_run(folder: Path, steps: int = 100, checkpoints: int = 3) -> Path:
    """A run as training leaves it: numbers, samples, a log."""
    (folder / "logs").mkdir(parents=True)
    (folder / "config.yaml").write_text("epochs: 1\n")
    (folder / "metrics.jsonl").write_text("".join(line(step) for step in range(1, steps + 1)))
    (folder / "logs" / "train.log").write_text(f"step {steps}/{steps}  loss 0\nFinished at step {steps}.\n")
    for number in range(1, checkpoints + 1):
        at = folder / "samples" / f"step_{number * 10:07d}"
        at.mkdir(parents=True)
        for place, prompt in enumerate(PROMPTS):
            further = f"_{place + 1}" if place else ""
            image = np.full((24, 24, 3), (60 * number % 256, 50 * place, 90), np.uint8)
            facts = {"prompt": prompt, "seed": str(42 + place), "step": str(number * 10)}
            (at / f"gpu_0_sample{further}.png").write_bytes(encode_png(image, facts))
            (at / f"gpu_0_prompt{further}.txt").write_text(prompt + "\n")
    return folder


def ledger_line(row: int, gpu: str = "0", error: str | None = None, **more: Any) -> str:
    """One line of a ledger."""
    about: dict[str, Any] = {"status": "failed" if error else "done", "index": row, "copy": 0, "id": f"row-{row}"}
    about |= {"seed": 42 + row, "prompt": f"image {row}", "negative_prompt": "", "height": 32, "width": 32}
    about |= {"file": f"row-{row}.png", "gpu": gpu, "seconds": 0.5, "settings": "0", "key": "0"}
    about |= {"error": error} if error else {"bytes": 1, "sha256": "0", "changed": 1_000_000_000 * (1000 + row)}
    return json.dumps(about | more) + "\n"


def write_generation(folder: Path, rows: int = 6, failed: tuple[int, ...] = (2,)) -> Path:
    """A generation folder as a finished command leaves it."""
    folder.mkdir(parents=True)
    header = json.dumps({"format": "muralist ledger", "version": 1, "settings": {"steps": 20}, "batch_size": 4}) + "\n"
    lines = [ledger_line(row, str(row % 2), "out of memory" if row in failed else None) for row in range(rows)]
    (folder / "ledger.jsonl").write_text(header + "".join(lines))
    first = folder / "row-0.png"
    for row in range(rows):
        if row == 0:
            Image.fromarray(np.full((300, 400, 3), (20, 120, 200), np.uint8)).save(first)
        elif row not in failed:
            os.link(first, folder / f"row-{row}.png")
    return folder
