"""Compare ways to distill a JiT at equal time: `docs/decisions.md` says which one was taken.

    python bench/distill_methods.py RECORD.json TEACHER --steps 2 --seconds 100 --methods path:2 path:4 segment:2 consistency
    python bench/distill_methods.py RECORD.json TEACHER --data cifar10.npz --reference STATISTICS.npz \\
        --inception_weights WEIGHTS --batch 512 --seconds 60                                          on a GPU

TEACHER is a conditional run, without --data on driving_world. Methods, all for the same student (one Euler step a segment):

    path:N       regression to the states of the teacher's own path from noise, N Heun steps a segment
    own:N        the same, but every segment begins at the student's own state instead of the teacher's
    segment:N    from noised images at the beginnings of the segments
    consistency:N  from noised images, the student's own prediction one teacher step ahead; N such steps from noise to data,
                 without N from 4 to 64 in the course of the training
    matching:N   distribution matching: the student's images move to where the teacher finds them likelier than a critic
                 does, a copy of it that is trained on the student's images, at N noise levels a step

`path:4+matching` trains by one after the other, each for half of the time. On a CPU the time is that of the process, on a
GPU that of the wall, without the first step, which compiles. --passes gives all methods equally many network passes
instead, a backward pass counting as two: then other programs may use the GPU. Scenes are judged by a classifier, whose
features no method sees: KID to the teacher's images of 25 Heun steps and other noise, within each class; images of --data
by FID against the statistics of the training images (`muralist stats`). The RMS difference is that of pixels from the
teacher's images of 25 Heun steps, for the same noise.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from bench.measure_training import hardware, versions
from tests.support.scene_classifier import kernel_distance, train_classifier
from torch import Tensor, nn

from muralist.core import rng
from muralist.core.images import to_uint8_array
from muralist.core.rng import Purpose, SampleKeys
from muralist.core.run_dir import atomic_write_json
from muralist.data.sources import open_source
from muralist.diffusion import flow, samplers
from muralist.evaluate import inception, metrics
from muralist.evaluate.encoders import GPU_BATCH, InceptionEncoder
from muralist.models.jit import JiT
from muralist.models.jit_spec import infer_jit_config, jit_arguments
from muralist.models.weights import latest_checkpoint, read_weights

SIDE, SCENES, INTERVAL = 32, 6400, (0.1, 1.0)  # pixels and number of the driving scenes
PARTS, SMOOTHING = (4, 64), 0.01  # first and last number of steps to data; RMS below which a distance counts squared
JUDGED, COMPARED = 400, 200  # scenes; images compared one by one with the teacher's, which are expensive
JUDGED_BY_FID, AT_ONCE = 10_000, 1000
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Teacher(NamedTuple):
    """A conditional JiT and its guidance."""

    network: nn.Module
    classes: int
    side: int
    guidance: float


def load(path: str) -> nn.Module:
    """Load the first EMA's weights."""
    return build(read_weights(latest_checkpoint(Path(path)), "ema1"))


def copy_network(network: nn.Module) -> nn.Module:
    """Return a network with the same weights."""
    return build({name: value.detach().clone() for name, value in network.state_dict().items()})


def build(weights: dict[str, Tensor]) -> nn.Module:
    """Build the network of these weights; on a GPU it is compiled."""
    network = JiT(**jit_arguments(infer_jit_config(weights)))
    network.load_state_dict(weights)
    if DEVICE != "cpu":
        network.compile(dynamic=False)
    return network.to(DEVICE).eval()


def autocast() -> torch.autocast:
    """Networks run in bf16 on a GPU."""
    return torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE != "cpu")


def clock() -> float:
    """Return CPU seconds, on a GPU those of the wall."""
    return time.process_time() if DEVICE == "cpu" else time.perf_counter()


def expand(t: Tensor) -> Tensor:
    """Times [B] as [B, 1, 1, 1]."""
    return t.view(-1, 1, 1, 1)


class Method:
    """One way to train a student."""

    def __init__(self, name: str, teacher: Teacher, options: argparse.Namespace) -> None:
        self.kind, _, count = name.partition(":")
        self.count, self.teacher = int(count or 0), teacher
        self.steps = options.steps
        self.batch, self.rate, self.betas = options.batch, options.learning_rate, tuple(options.betas)
        self.critic_factor = options.critic_factor
        self.critic: nn.Module | None = None
        self.passes = 0  # of a network on an image; a backward pass counts as two

    def denoise(self, network: nn.Module, z: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        """One pass of a network."""
        trained = torch.is_grad_enabled() and any(weight.requires_grad for weight in network.parameters())
        self.passes += len(z) * (3 if trained else 1)
        return network(z, t, labels).float()

    def guided(self, z: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        """The teacher's prediction of the image, with guidance."""
        network, guidance = self.teacher.network, self.teacher.guidance
        x = self.denoise(network, z, t, labels)
        x_null = self.denoise(network, z, t, torch.full_like(labels, self.teacher.classes))
        scale = torch.where((t > INTERVAL[0]) & (t < INTERVAL[1]), guidance, 1.0)
        return x_null + expand(scale) * (x - x_null)

    def velocity(self, z: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        """The teacher's guided velocity."""
        return (self.guided(z, t, labels) - z) / expand(1 - t).clamp_min(1e-6)

    @torch.no_grad()
    def solve(self, z: Tensor, t: Tensor, end: Tensor, labels: Tensor, count: int) -> Tensor:
        """Heun steps of the teacher; a step that ends in data is Euler's."""
        h = (end - t) / count
        for i in range(count):
            now, after = t + i * h, t + (i + 1) * h
            v = self.velocity(z, now, labels)
            euler = z + expand(h) * v
            is_last = (after >= 1 - 1e-6) & (i == count - 1)
            if i == count - 1 and is_last.all():
                return euler
            heun = z + expand(h) * 0.5 * (v + self.velocity(euler, torch.where(is_last, now, after), labels))
            z = torch.where(expand(is_last), euler, heun)
        return z

    def jump(self, student: nn.Module, z: Tensor, t: Tensor, end: Tensor, labels: Tensor) -> Tensor:
        """The student's Euler step to the end of the segment."""
        return z + expand((end - t) / (1 - t)) * (self.denoise(student, z, t, labels) - z)

    def loss(self, student: nn.Module, x: Tensor, labels: Tensor, keys: SampleKeys, progress: float) -> Tensor:
        """The loss of a batch; `progress` is the fraction of the training that is over."""
        grid, count = torch.linspace(0, 1, self.steps + 1, device=DEVICE), len(x)
        e, chosen = keys.normal(Purpose.NOISE, tuple(x.shape[1:])), keys.uniform(Purpose.TIME)
        if self.kind == "path":
            states = [e]
            for k in range(self.steps):
                times = grid[k].expand(count), grid[k + 1].expand(count)
                states.append(self.solve(states[-1], *times, labels, self.count or 1))
            z, target = torch.cat(states[:-1]), torch.cat(states[1:])
            t, end, labels = (
                grid[:-1].repeat_interleave(count),
                grid[1:].repeat_interleave(count),
                labels.repeat(self.steps),
            )
            return (self.jump(student, z, t, end, labels) - target).square().mean()
        if self.kind == "own":
            z, losses = e, []
            for k in range(self.steps):
                times = grid[k].expand(count), grid[k + 1].expand(count)
                target = self.solve(z, *times, labels, self.count or 1)
                reached = self.jump(student, z, *times, labels)
                losses.append((reached - target).square().mean())
                z = reached.detach()
            return torch.stack(losses).mean()
        if self.kind == "segment":
            segment = (chosen * self.steps).long().clamp_max(self.steps - 1)
            t, end = grid[segment], grid[segment + 1]
            z = flow.interpolate(x, e, t)
            target = self.solve(z, t, end, labels, self.count or 1)
            return (self.jump(student, z, t, end, labels) - target).square().mean()
        if self.kind == "matching":
            return self.match(student, e, labels, keys)
        if self.kind != "consistency":
            raise SystemExit(f"There is no method {self.kind}.")
        return self.consistency(student, x, e, chosen, labels, progress)

    def consistency(
        self, student: nn.Module, x: Tensor, e: Tensor, chosen: Tensor, labels: Tensor, progress: float
    ) -> Tensor:
        """The distance of the student's prediction to its own, one step of the teacher ahead.

        The steps are equal in s, where 1 - t is (1 - s) squared: finer near the data. Some begin at noise itself.
        """
        parts = self.count or PARTS[0] * (PARTS[1] / PARTS[0]) ** progress
        s = (chosen * (1 + 1 / parts) - 1 / parts).clamp_min(0)
        t = (1 - (1 - s).square()).clamp_max(0.999)  # at 1, the way to data has no direction
        after = torch.maximum(t, 1 - (1 - s - 1 / parts).clamp_min(0).square())
        end = ((t * self.steps).floor() + 1) / self.steps
        after = torch.minimum(after, end)
        z = flow.interpolate(x, e, t)
        ahead = self.solve(z, t, after, labels, 1)
        with torch.no_grad():
            own = self.jump(student, ahead, after.clamp_max(0.9995), end, labels)
            target = torch.where(expand(after >= end - 1e-6), ahead, own)
        difference = (self.jump(student, z, t, end, labels) - target).square().flatten(1).mean(1)
        return ((difference + SMOOTHING**2).sqrt() - SMOOTHING).mean()

    def match(self, student: nn.Module, e: Tensor, labels: Tensor, keys: SampleKeys) -> Tensor:
        """Where teacher and critic disagree on the student's images, noised again; and the critic's own loss."""
        assert self.critic is not None
        z, made = e, []
        for k in range(self.steps):
            t = torch.full((len(e),), k / self.steps, device=DEVICE)
            made.append(self.denoise(student, z, t, labels))
            z = (z + (made[-1] - z) / (self.steps - k)).detach()
        x, labels = torch.cat(made), labels.repeat(self.steps)

        def noised(number: int) -> tuple[Tensor, Tensor]:
            of_level = torch.Generator(DEVICE).manual_seed(int(keys.sample_indices[0]) * 64 + number)
            t = 0.02 + 0.96 * torch.rand(len(x), generator=of_level, device=DEVICE)
            noise = torch.randn(x.shape, generator=of_level, device=DEVICE)
            return flow.interpolate(x.detach(), noise, t), t

        with torch.no_grad():
            z, t = noised(0)
            real, fake = self.guided(z, t, labels), self.denoise(self.critic, z, t, labels)
            size = (x - real).abs().flatten(1).mean(1).clamp_min(1e-3)
            target = x - (fake - real) / expand(size)
        levels = [noised(number) for number in range(1, 1 + (self.count or 1))]
        z, t = torch.cat([one[0] for one in levels]), torch.cat([one[1] for one in levels])
        error = self.denoise(self.critic, z, t, labels.repeat(len(levels))) - x.detach().repeat(len(levels), 1, 1, 1)
        weight = 1 / (1 - t).clamp_min(0.05).square()
        return 0.5 * (x - target).square().mean() + (weight * error.square().flatten(1).mean(1)).mean()

    def train(self, student: nn.Module, images: Tensor, labels: Tensor, budget: float, by_passes: bool) -> int:
        """Train for so many seconds or passes and leave the EMA weights in the student; returns the number of steps."""
        trained = nn.ModuleList([student])
        if self.kind == "matching":
            self.critic = copy_network(student).train()
            trained.append(self.critic)
        weights: list[Tensor] = list(student.parameters())
        groups = [{"params": list(module.parameters())} for module in trained]
        optimizer = torch.optim.AdamW(groups, self.rate, betas=self.betas, weight_decay=0)
        ema = [weight.detach().clone() for weight in weights]
        began, step = clock(), 0
        while (progress := (self.passes if by_passes else clock() - began) / budget) < 1:
            rate = self.rate * min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * progress))
            for group, factor in zip(optimizer.param_groups, (1.0, self.critic_factor), strict=False):
                group["lr"] = rate * factor
            rows = torch.randint(0, len(images), (self.batch,), generator=torch.Generator().manual_seed(step))
            keys = SampleKeys(1, torch.arange(step * self.batch, (step + 1) * self.batch, device=DEVICE))
            x = images[rows].to(DEVICE).permute(0, 3, 1, 2).float() / 127.5 - 1
            with autocast():
                loss = self.loss(student, x, labels[rows].to(DEVICE), keys, progress)
            optimizer.zero_grad()
            loss.backward()
            if not step and DEVICE != "cpu":  # compiling took most of the first step
                loss.item()
                began = clock()
            optimizer.step()
            step += 1
            with torch.no_grad():
                torch._foreach_lerp_(ema, weights, 1 - 0.5 ** (1 / (0.05 * step)))
            if step % 20 == 0:
                loss.item()  # or the host would be many steps ahead when the time is over
        with torch.no_grad():
            torch._foreach_copy_(weights, ema)
        self.seconds = clock() - began
        return step


class Judge(ABC):
    """Scores images of the same noise and labels."""

    def __init__(self, teacher: Teacher, count: int) -> None:
        self.teacher, self.labels = teacher, torch.arange(count) % teacher.classes
        self.noise = self.draw(first=1000)
        self.goal = self.teacher_images(COMPARED, "heun", 25)

    def draw(self, first: int) -> Tensor:
        """Draw the noise of one image per label, from a first seed on."""
        shape = (3, self.teacher.side, self.teacher.side)
        return rng.normal(0, Purpose.SAMPLE_NOISE, torch.arange(first, first + len(self.labels)), shape)

    @torch.no_grad()
    def images(self, network: nn.Module, count: int | None = None, **settings: Any) -> Tensor:
        """Sample; all calls of a network have one shape."""
        sampler, count = samplers.SamplerSettings(**settings), count or len(self.labels)
        at_once = min(len(self.labels), 100 if DEVICE == "cpu" else AT_ONCE)
        found = []
        for start in range(0, count, at_once):
            rows = slice(start, start + at_once)
            with autocast():
                noise, labels = self.noise[rows].to(DEVICE), self.labels[rows].to(DEVICE)
                found.append(samplers.sample(network, noise, labels, self.teacher.classes, sampler).float().cpu())
        return torch.cat(found)[:count].clamp(-1, 1)

    def teacher_images(self, count: int | None, solver: str, steps: int) -> Tensor:
        """Sample the teacher."""
        guided = {"guidance": self.teacher.guidance, "interval": INTERVAL}
        return self.images(self.teacher.network, count, solver=solver, steps=steps, **guided)

    def scores(self, images: Tensor) -> dict[str, float]:
        """Return the scores of a row."""
        difference = (images[:COMPARED] - self.goal).square().mean().sqrt()
        return {**self.judge(to_uint8_array(images)), "RMS difference": round(float(difference), 4)}

    @abstractmethod
    def judge(self, pixels: np.ndarray) -> dict[str, float]:
        """Score images [N, H, W, 3]."""


class SceneJudge(Judge):
    """A classifier of driving scenes."""

    def __init__(self, teacher: Teacher) -> None:
        super().__init__(teacher, JUDGED)
        self.classify = train_classifier(teacher.side, samples=2000, steps=200, seed=0)
        self.noise, own = self.draw(first=50_000), self.noise
        target = self.teacher_images(None, "heun", 25)
        self.noise, self.target = own, self.classify.features(torch.from_numpy(to_uint8_array(target)))

    def judge(self, pixels: np.ndarray) -> dict[str, float]:
        """Return KID, and the share of images that are of their class."""
        one, labels = torch.from_numpy(pixels), self.labels[: len(pixels)]
        return {
            "KID": round(kernel_distance(self.classify.features(one), labels, self.target, self.labels), 4),
            "recognized": round(float((self.classify(one) == labels).float().mean()), 3),
        }


class FidJudge(Judge):
    """FID against the statistics of the training images."""

    def __init__(self, teacher: Teacher, reference: Path, weights: Path) -> None:
        super().__init__(teacher, JUDGED_BY_FID)
        with np.load(reference) as stored:
            self.real = stored["features"]
        self.moments = metrics.compute_moments(self.real)
        self.compute = InceptionEncoder.from_file(weights).load(torch.device(DEVICE)).compute

    @torch.no_grad()
    def judge(self, pixels: np.ndarray) -> dict[str, float]:
        """Return FID, where there are enough images."""
        if len(pixels) < JUDGED_BY_FID:
            return {}
        images = torch.from_numpy(pixels).split(GPU_BATCH)
        if DEVICE == "cpu":
            batches = (inception.preprocess(batch) for batch in images)
        else:
            batches = (inception.preprocess_batch(list(batch), torch.device(DEVICE)) for batch in images)
        rows = torch.cat([self.compute(batch).cpu() for batch in batches]).numpy()
        fid = metrics.frechet_distance(metrics.compute_moments(rows), self.moments, rows, self.real).value
        return {"FID": round(fid, 2)}


def main() -> None:
    """Train, judge and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("teacher")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=100.0, help="of each method")
    parser.add_argument("--passes", type=float, help="of each method, in millions, instead of --seconds")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--betas", nargs=2, type=float, default=(0.9, 0.99), help="of AdamW")
    parser.add_argument("--critic_factor", type=float, default=8.0, help="its learning rate over the student's")
    parser.add_argument("--guidance", type=float, default=1.5)
    parser.add_argument("--methods", nargs="*", default=["path:2", "path:4", "segment:2", "consistency"])
    parser.add_argument("--no_teacher", action="store_true", help="do not score the teacher")
    parser.add_argument("--data", type=Path, help="an .npz as of bench/cifar10_data.py, instead of driving_world")
    parser.add_argument("--reference", type=Path, help="statistics of its training images")
    parser.add_argument("--inception_weights", type=Path)
    given = parser.parse_args()
    if DEVICE == "cpu":
        torch.set_num_threads(1)
    network = load(given.teacher).requires_grad_(False)
    if given.data:
        with np.load(given.data) as stored:
            images, labels = torch.from_numpy(stored["train_x"]), torch.from_numpy(stored["train_y"]).long()
    else:
        source = open_source("driving_world", SIDE, None, [])
        read = [source.read(index) for index in range(SCENES)]
        images, labels = (
            torch.from_numpy(np.stack([one.image for one in read])),
            torch.tensor([one.label for one in read]),
        )
    teacher = Teacher(network, int(labels.max()) + 1, images.shape[1], given.guidance)
    judge: Judge = FidJudge(teacher, given.reference, given.inception_weights) if given.data else SceneJudge(teacher)
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        content = {"command": shlex.join(sys.argv), "hardware": hardware(), "versions": versions(), "rows": rows}
        atomic_write_json(given.record, content)

    for name in given.methods:
        student = load(given.teacher).train()
        budget = given.passes * 1e6 if given.passes else given.seconds
        phases, taken, trained_for, passes = name.split("+"), 0, 0.0, 0
        for phase in phases:
            one = Method(phase, teacher, given)
            taken += one.train(student, images, labels, budget / len(phases), given.passes is not None)
            trained_for, passes = trained_for + one.seconds, passes + one.passes
        trained = {"steps": given.steps, "seconds": round(trained_for, 1), "passes": passes, "optimizer steps": taken}
        made = judge.images(student.eval(), solver="euler", steps=given.steps)
        add(
            {
                "method": name,
                "learning rate": given.learning_rate,
                "betas": list(given.betas),
                **trained,
                **judge.scores(made),
            }
        )
    if given.no_teacher:
        return
    for solver, steps in (("euler", 1), ("euler", 2), ("euler", 4), ("heun", 2), ("heun", 4), ("heun", 8)):
        add({"method": f"teacher, {solver}", "steps": steps, **judge.scores(judge.teacher_images(None, solver, steps))})
    if given.data:
        add({"method": "teacher, heun", "steps": 25, **judge.scores(judge.teacher_images(None, "heun", 25))})
    else:
        add({"method": "teacher, heun", "steps": 25, "images": COMPARED, **judge.scores(judge.goal)})


if __name__ == "__main__":
    main()
