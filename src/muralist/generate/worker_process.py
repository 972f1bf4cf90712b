"""The main function of a worker's process: orders come and reports go through a pipe.

Nothing that might look for GPUs is imported before the environment says which one there is: a context on every GPU costs
memory on each. torch by itself looks for none.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import queue
import signal
import threading
from contextlib import suppress
from multiprocessing.connection import Connection

from muralist.compiled_code import keep_bytecode
from muralist.generate.messages import Begin, Report
from muralist.lasting_imports import lasting_imports


def main(pipe: Connection) -> None:
    """Serve a fleet until it says stop or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C reaches every process of a terminal; the fleet decides
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    keep_bytecode()
    with lasting_imports():
        import torch
        from tqdm import tqdm

        tqdm.set_lock(threading.RLock())  # its own is shared by processes, and a killed worker would leave it behind

        from muralist.generate.worker import work

    inbox: queue.Queue = queue.Queue()
    lock = threading.Lock()

    def listen() -> None:
        while True:
            try:
                inbox.put(pipe.recv())
            except (EOFError, OSError):
                os._exit(1)  # the fleet is gone: nobody waits for what is being painted

    def send(report: Report) -> None:
        with lock:
            pipe.send(report)

    threading.Thread(target=listen, daemon=True).start()
    begin: Begin = inbox.get()
    multiprocessing.current_process().name = f"muralist-gpu{begin.label}"
    device = torch.device(_alone(begin.device))
    if device.type == "cuda":
        from muralist.generate.pipelines import settle_environment

        settle_environment()
        os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # older drivers would load every kernel there is
        # From here on nothing is added to the environment until the driver has read it.
        threading.Thread(target=_wake_gpu, daemon=True).start()
    work(begin.job, begin.label, device, inbox, send)


def _alone(device: str) -> str:
    """The device's name once it is the only one that this process sees."""
    if not device.startswith("cuda:"):
        return device
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    number = int(device.removeprefix("cuda:"))
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[number] if visible else str(number)
    return "cuda:0"


def _wake_gpu() -> None:
    """Have the driver make the context that torch will use: other threads go on importing meanwhile."""
    with suppress(OSError, AttributeError):  # what is wrong with a driver torch finds out, and tells
        driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        if driver.cuInit(0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
