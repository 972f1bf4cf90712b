"""Compare ways to distill a JiT at equal CPU time, on the driving scenes: `docs/decisions.md` says which one was taken.

    python bench/distill_methods.py NAME TEACHER --steps 2 --seconds 100 --methods path:2 path:4 segment:2 consistency

TEACHER is a conditional run on driving_world at 32 px. Methods, all for the same student (one Euler step a segment):

    path:N       regression to the states of the teacher's own path from noise, N Heun steps a segment
    segment:N    the same from noised images at the beginnings of the segments
    consistency  from noised images, the student's own prediction one teacher step ahead; the steps halve four times

Judged by a classifier of the scenes, whose features no method sees: KID to real scenes, within each class; and by the RMS
difference of pixels from the teacher's images of 25 Heun steps, for the same noise.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import time

import numpy as np
import torch
from bench.measure_training import RESULTS, hardware, versions
from tests.support.scene_classifier import kernel_distance, scenes, train_classifier
from torch import Tensor, nn

from muralist.core import rng
from muralist.core.images import to_uint8_array
from muralist.core.rng import Purpose, SampleKeys
from muralist.core.run_dir import atomic_write_json
from muralist.data.sources import open_source
from muralist.diffusion import flow, samplers
from muralist.models.jit import JiT
from muralist.models.jit_spec import infer_jit_config, jit_arguments
from muralist.models.weights import read_weights

SIZE, CLASSES, GUIDANCE, INTERVAL = 32, 8, 1.5, (0.1, 1.0)
BATCH, RATE, HALVINGS = 32, 1e-3, 4
JUDGED, COMPARED = 400, 200  # images; those compared with the teacher's, which are expensive


def load(path: str) -> nn.Module:
    """Load the first EMA's weights."""
    weights = read_weights(path, "ema1")
    network = JiT(**jit_arguments(infer_jit_config(weights)))
    network.load_state_dict(weights)
    return network.eval()


def expand(t: Tensor) -> Tensor:
    """Times [B] as [B, 1, 1, 1]."""
    return t.view(-1, 1, 1, 1)


class Method:
    """One way to train a student."""

    def __init__(self, name: str, teacher: nn.Module, steps: int) -> None:
        self.kind, _, count = name.partition(":")
        self.solver_steps, self.teacher, self.steps = int(count or 1), teacher, steps

    def velocity(self, z: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        """The teacher's guided velocity."""
        x, x_null = self.teacher(z, t, labels), self.teacher(z, t, torch.full_like(labels, CLASSES))
        scale = torch.where((t > INTERVAL[0]) & (t < INTERVAL[1]), GUIDANCE, 1.0)
        return (x_null + expand(scale) * (x - x_null) - z) / expand(1 - t).clamp_min(1e-6)

    @torch.no_grad()
    def solve(self, z: Tensor, t: Tensor, end: Tensor, labels: Tensor, count: int) -> Tensor:
        """Heun steps of the teacher; a step that ends in data is Euler's."""
        h = (end - t) / count
        for i in range(count):
            now, after = t + i * h, t + (i + 1) * h
            v = self.velocity(z, now, labels)
            euler = z + expand(h) * v
            is_last = (after >= 1 - 1e-6) & torch.tensor(i == count - 1)
            if is_last.all():
                return euler
            heun = z + expand(h) * 0.5 * (v + self.velocity(euler, torch.where(is_last, now, after), labels))
            z = torch.where(expand(is_last), euler, heun)
        return z

    def jump(self, student: nn.Module, z: Tensor, t: Tensor, end: Tensor, labels: Tensor) -> Tensor:
        """The student's Euler step to the end of the segment."""
        return z + expand((end - t) / (1 - t)) * (student(z, t, labels) - z)

    def loss(self, student: nn.Module, x: Tensor, labels: Tensor, keys: SampleKeys, progress: float) -> Tensor:
        """Mean squared error of a batch; `progress` is the fraction of the training time."""
        grid, count = torch.linspace(0, 1, self.steps + 1), len(x)
        e, chosen = keys.normal(Purpose.NOISE, (3, SIZE, SIZE)), keys.uniform(Purpose.TIME)
        if self.kind == "path":
            states = [e]
            for k in range(self.steps):
                times = grid[k].expand(count), grid[k + 1].expand(count)
                states.append(self.solve(states[-1], *times, labels, self.solver_steps))
            z, target = torch.cat(states[:-1]), torch.cat(states[1:])
            t, end, labels = (
                grid[:-1].repeat_interleave(count),
                grid[1:].repeat_interleave(count),
                labels.repeat(self.steps),
            )
            return (self.jump(student, z, t, end, labels) - target).square().mean()
        segment = (chosen * self.steps).long().clamp_max(self.steps - 1)
        t, end = grid[segment], grid[segment + 1]
        if self.kind == "segment":
            z = flow.interpolate(x, e, t)
            target = self.solve(z, t, end, labels, self.solver_steps)
            return (self.jump(student, z, t, end, labels) - target).square().mean()
        parts = 2 ** (1 + int(progress * HALVINGS))
        part = (rng.uniform(2, Purpose.TIME, keys.sample_indices) * parts).long().clamp_max(parts - 1)
        start = t
        t, after = start + part / parts / self.steps, start + (part + 1) / parts / self.steps
        z = flow.interpolate(x, e, t)
        ahead = self.solve(z, t, after, labels, 1)
        with torch.no_grad():
            before_one = after.clamp_max(0.999)
            own = self.jump(student, ahead, before_one, end, labels)
            target = torch.where(expand(part == parts - 1), ahead, own)
        return (self.jump(student, z, t, end, labels) - target).square().mean()

    def train(self, student: nn.Module, images: Tensor, labels: Tensor, seconds: float) -> int:
        """Train for so many CPU seconds and leave the EMA weights in the student; returns the number of steps."""
        weights = list(student.parameters())
        optimizer = torch.optim.AdamW(weights, RATE, betas=(0.9, 0.99), weight_decay=0)
        ema = [weight.detach().clone() for weight in weights]
        began, step = time.process_time(), 0
        while (progress := (time.process_time() - began) / seconds) < 1:
            rate = RATE * min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * progress))
            optimizer.param_groups[0]["lr"] = rate
            rows = torch.randint(0, len(images), (BATCH,), generator=torch.Generator().manual_seed(step))
            keys = SampleKeys(1, torch.arange(step * BATCH, (step + 1) * BATCH))
            x = images[rows].permute(0, 3, 1, 2).float() / 127.5 - 1
            loss = self.loss(student, x, labels[rows], keys, progress)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            with torch.no_grad():
                torch._foreach_lerp_(ema, weights, 1 - 0.5 ** (1 / (0.05 * step)))
        with torch.no_grad():
            torch._foreach_copy_(weights, ema)
        return step


class Judge:
    """Scores images of the same noise and labels."""

    def __init__(self, teacher: nn.Module) -> None:
        self.labels = torch.arange(JUDGED) % CLASSES
        self.noise = rng.normal(0, Purpose.SAMPLE_NOISE, torch.arange(1000, 1000 + JUDGED), (3, SIZE, SIZE))
        self.classify = train_classifier(SIZE, samples=2000, steps=200, seed=0)
        real, self.kinds = scenes(range(50_000, 50_000 + 2 * JUDGED), SIZE, seed=0)
        self.real = self.classify.features(real)
        self.goal = self.images(teacher, COMPARED, steps=25, guidance=GUIDANCE, interval=INTERVAL)

    def images(self, network: nn.Module, count: int = JUDGED, **settings: object) -> Tensor:
        """Sample."""
        sampler = samplers.SamplerSettings(**settings)  # type: ignore[arg-type]
        parts = zip(self.noise[:count].split(100), self.labels[:count].split(100), strict=True)
        return torch.cat([samplers.sample(network, z, y, CLASSES, sampler) for z, y in parts]).clamp(-1, 1)

    def scores(self, images: Tensor) -> dict[str, float]:
        """Return the scores of a row."""
        pixels, labels = torch.from_numpy(to_uint8_array(images)), self.labels[: len(images)]
        difference = (images[:COMPARED] - self.goal).square().mean().sqrt()
        return {
            "KID": round(kernel_distance(self.classify.features(pixels), labels, self.real, self.kinds), 4),
            "RMS difference": round(float(difference), 4),
            "recognized": round(float((self.classify(pixels) == labels).float().mean()), 3),
        }


def main() -> None:
    """Train, judge and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of bench/results/NAME.json")
    parser.add_argument("teacher")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--methods", nargs="*", default=["path:2", "path:4", "segment:2", "consistency"])
    given = parser.parse_args()
    torch.set_num_threads(1)
    teacher = load(given.teacher).requires_grad_(False)
    source = open_source("driving_world", SIZE, None, [])
    read = [source.read(index) for index in range(6400)]
    images, labels = torch.from_numpy(np.stack([one.image for one in read])), torch.tensor([one.label for one in read])
    judge, rows = Judge(teacher), []
    for name in given.methods:
        student = load(given.teacher).train()
        trained = Method(name, teacher, given.steps).train(student, images, labels, given.seconds)
        scores = judge.scores(judge.images(student.eval(), solver="euler", steps=given.steps))
        rows.append(
            {"method": name, "steps": given.steps, "CPU seconds": given.seconds, "optimizer steps": trained, **scores}
        )
        print(json.dumps(rows[-1]), flush=True)
    for solver, steps in (("euler", 1), ("euler", 2), ("euler", 4), ("heun", 2), ("heun", 4), ("heun", 8)):
        scores = judge.scores(judge.images(teacher, solver=solver, steps=steps, guidance=GUIDANCE, interval=INTERVAL))
        rows.append({"method": f"teacher, {solver}", "steps": steps, **scores})
        print(json.dumps(rows[-1]), flush=True)
    rows.append({"method": "teacher, heun", "steps": 25, "images": COMPARED, **judge.scores(judge.goal)})
    print(json.dumps(rows[-1]), flush=True)
    content = {"command": shlex.join(sys.argv), "hardware": hardware(), "versions": versions(), "rows": rows}
    atomic_write_json(RESULTS / f"{given.name}.json", content)


if __name__ == "__main__":
    main()
