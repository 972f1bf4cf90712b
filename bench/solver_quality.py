"""Compare solvers of a trained JiT by network passes: bench/results/NAME.json, of which docs/generating.md has the table.

python bench/solver_quality.py RECORD.json --model RUN [--name NAME] [--guidance 1 1.5] [--interval 0.1 1] [--images 64]
    [--evaluations 5 7 10 14 20 40] [--variants] [--inception_weights W --reference DATA.npz --kid_images 256]

Each solver integrates the same noise with about as many evaluations of the velocity; guidance makes two network passes of
an evaluation in its interval. The error is that to the exact solution up to t = 0.98, followed by the official last step
onto the prediction. Beyond, JiT is not trained: the solution depends on where it ends. A model of driving scenes is also
judged by a classifier of real scenes, and with Inception's weights by KID. Models are added to the record. Runs on a GPU
where there is one.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench.measure_training import hardware, versions
from torch import Tensor

from muralist.core.images import to_uint8
from muralist.core.run_dir import atomic_write_json
from muralist.demo.driving_world import PROMPTS
from muralist.diffusion.samplers import SamplerSettings, Velocity, guided_velocity, sample, time_grid
from muralist.evaluate.inception import fold_batch_norms, load_inception, preprocess
from muralist.evaluate.metrics import kid
from muralist.models.jit import JiT
from muralist.models.jit_spec import infer_jit_config, jit_arguments, read_jit_spec
from muralist.models.weights import read_description, read_weights

FIRST_SEED = 1000
LEAST_TIME = 1e-3  # the noise at t = 0 has a log-SNR of minus infinity; diffusers begins at sigma 0.999
OFFICIAL = 50  # Heun steps
Method = Callable[[Velocity, Tensor, Sequence[float]], Tensor]


# Solvers to compare with, on any increasing times from 0 to 1. x = z + (1 - t) v is the predicted data.


def log_snr(t: float) -> float:
    """Half the log-SNR, log(t / (1 - t)): lambda of DPM-Solver and UniPC."""
    t = max(t, LEAST_TIME)
    return math.log(t / (1 - t))


def unipc2(velocity: Velocity, z: Tensor, times: Sequence[float], corrects: bool = True) -> Tensor:
    """UniPC of order 2 with B2 (Zhao et al. 2023), data prediction; without its corrector it is DPM-Solver++(2M).

    Alpha = t, sigma = 1 - t. Prediction: D = x + (x - x_before) / (2 r), r = h_before / h,
    z' = sigma' / sigma z - alpha' (e^-h - 1) D. Correction: the same from the start of the step, with D by the moment
    equations of x_before, x and x'.
    """
    lambdas = [log_snr(t) for t in times[:-1]]
    x: list[Tensor] = []
    start = z
    for i, (t, t_next) in enumerate(pairwise(times)):
        x.append(z + (1 - t) * velocity(z, t))
        if t_next == times[-1]:
            return x[-1]
        if corrects and i:
            h = lambdas[i] - lambdas[i - 1]
            change = x[i] - x[i - 1]
            if i == 1:
                slopes = 0.5 * change
            else:
                ratio = (lambdas[i - 2] - lambdas[i - 1]) / h  # negative: of the point before the step
                moments = _phi_moments(h)
                before, after = np.linalg.solve(np.array([[1.0, 1.0], [ratio, 1.0]]), moments)
                slopes = float(before) * (x[i - 2] - x[i - 1]) / ratio + float(after) * change
            z = _exponential_step(start, x[i - 1] + slopes, times[i - 1], t)
        h, start = log_snr(t_next) - lambdas[i], z
        line = 0.5 * h / (lambdas[i] - lambdas[i - 1]) * (x[i] - x[i - 1]) if i else torch.zeros_like(z)
        z = _exponential_step(z, x[i] + line, t, t_next)
    raise AssertionError("the last step returns")


def _exponential_step(z: Tensor, x: Tensor, t: float, t_next: float) -> Tensor:
    """The exact step for constant x; alpha' (e^-h - 1) is -(t' - t) / (1 - t)."""
    return (1 - t_next) / (1 - t) * z + (t_next - t) / (1 - t) * x


def _phi_moments(h: float) -> np.ndarray:
    """The right side of UniPC's equations of order 2: h phi_2(-h) 1! / B(h), h phi_3(-h) 2! / B(h), B(h) = e^-h - 1."""
    b = math.expm1(-h)
    second = b / -h - 1
    third = second / -h - 0.5
    return np.array([second / b, 2 * third / b])


def dpmpp_2m(velocity: Velocity, z: Tensor, times: Sequence[float]) -> Tensor:
    """DPM-Solver++(2M)."""
    return unipc2(velocity, z, times, corrects=False)


def adams(order: int, corrector: int) -> Method:
    """Adams-Bashforth of an order on v, with an Adams-Moulton corrector of another, or none (0), on any times."""

    def integrate(velocity: Velocity, z: Tensor, times: Sequence[float]) -> Tensor:
        start, known = z, list[tuple[float, Tensor]]()
        for t, t_next in pairwise(times):
            v = velocity(z, t)
            if t_next == times[-1]:
                return z + (t_next - t) * v
            if corrector and known:
                z = start + _integral(known[0][0], t, [(t, v), *known[: corrector - 1]])
            known.insert(0, (t, v))
            start, z = z, z + _integral(t, t_next, known[:order])
        return z

    return integrate


def _integral(a: float, b: float, points: Sequence[tuple[float, Tensor]]) -> Tensor:
    """The integral from a to b of the polynomial through points."""
    total = torch.zeros_like(points[0][1])
    for t, v in points:
        basis = np.poly1d([1.0])
        for other, _ in points:
            if other != t:
                basis *= np.poly1d([1.0, -other]) / (t - other)
        primitive = basis.integ()
        total += float(primitive(b) - primitive(a)) * v
    return total


def heun(velocity: Velocity, z: Tensor, times: Sequence[float]) -> Tensor:
    """Heun on any times."""
    for t, t_next in pairwise(times[:-1]):
        v = velocity(z, t)
        z = z + (t_next - t) / 2 * (v + velocity(z + (t_next - t) * v, t_next))
    return z + (times[-1] - times[-2]) * velocity(z, times[-2])


def uniform(steps: int) -> list[float]:
    """The times of the official sampler."""
    return time_grid(steps)


def by_log_snr(steps: int) -> list[float]:
    """The times of abm2."""
    return time_grid(steps, "abm2")


def shifted(shift: float) -> Callable[[int], list[float]]:
    """Noise levels sigma = 1 - t shifted as for SD3: above 1, more steps at high noise."""
    return lambda steps: [1 - shift * (1 - t) / (1 + (shift - 1) * (1 - t)) for t in uniform(steps)]


def edm(steps: int, low: float = 0.02, high: float = 80.0, power: float = 7.0) -> list[float]:
    """The times of EDM: sigma / alpha equally spaced in its seventh root."""
    ends = high ** (1 / power), low ** (1 / power)
    return [0.0, *(1 / (1 + np.linspace(*ends, steps)[1:] ** power)).tolist(), 1.0]


Grid = Callable[[int], list[float]]
OWN = ("euler", "heun", "abm2")
OTHERS: dict[str, tuple[Method, Grid]] = {
    "heun, log-SNR": (heun, by_log_snr),
    "DPM-Solver++ 2M, log-SNR": (dpmpp_2m, by_log_snr),
    "UniPC-2, log-SNR": (unipc2, by_log_snr),
}
VARIANTS: dict[str, tuple[Method, Grid]] = {
    "DPM-Solver++ 2M, uniform": (dpmpp_2m, uniform),
    "UniPC-2, uniform": (unipc2, uniform),
    "abm2, uniform": (adams(2, 2), uniform),
    "abm2, EDM": (adams(2, 2), edm),
    "abm2, shift 0.5": (adams(2, 2), shifted(0.5)),
    "abm2, shift 2": (adams(2, 2), shifted(2.0)),
    "Adams-Bashforth 2, log-SNR": (adams(2, 0), by_log_snr),
    "Adams-Bashforth 3 with Moulton 3, log-SNR": (adams(3, 3), by_log_snr),
}
VARIED = (10, 20)  # evaluations at which --variants are measured


@dataclass
class Model:
    """A trained JiT, its noise and labels, and the number of its passes."""

    network: JiT
    spec: Any
    noise: Tensor
    labels: Tensor
    passes: int = 0

    @classmethod
    def load(cls, path: Path, images: int, device: torch.device) -> Model:
        """Read the first EMA."""
        weights = read_weights(path, "ema1")
        network = JiT(**jit_arguments(infer_jit_config(weights)))
        network.load_state_dict(weights)
        spec = read_jit_spec(path, read_description(path), "ema1")
        noise = spec.sample_noise(range(FIRST_SEED, FIRST_SEED + images)).to(device) * spec.objective.noise_scale
        labels = torch.arange(images, device=device) % max(1, len(spec.label_names))
        return cls(network.to(device).eval().requires_grad_(False), spec, noise, labels)

    def __call__(self, z: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        """A network pass."""
        self.passes += 1
        return self.network(z, t, labels)

    @torch.no_grad()
    def run(self, settings: SamplerSettings, method: Method | None = None, times: Sequence[float] = ()) -> Tensor:
        """Sample with a solver of muralist, or with another method on its times."""
        objective = self.spec.objective
        if method is None:
            return sample(self, self.noise, self.labels, self.spec.null_label, settings, objective.prediction)
        return method(self.velocity(settings), self.noise, times)

    def velocity(self, settings: SamplerSettings) -> Velocity:
        """The guided velocity."""
        return guided_velocity(self, self.labels, self.spec.null_label, settings, self.spec.objective.prediction)

    @torch.no_grad()
    def exact(self, settings: SamplerSettings, steps: int) -> Tensor:
        """Runge-Kutta 4 to the last time of the official 50 steps, then that step, onto the prediction.

        The ends of the guidance interval are times of the grid, and guidance is on or off in each step as a whole.
        """
        low, high = settings.interval
        times = sorted({*by_log_snr(steps), low, high})
        z = self.noise
        for t, t_next in pairwise(times):
            inside = low <= t and t_next <= high
            v = self.velocity(replace(settings, guidance=settings.guidance if inside else 1.0, interval=(0.0, 1.0)))
            h = t_next - t
            k1 = v(z, t)
            if t_next == 1.0:
                return z + h * k1
            k2 = v(z + h / 2 * k1, t + h / 2)
            k3 = v(z + h / 2 * k2, t + h / 2)
            z = z + h / 6 * (k1 + 2 * k2 + 2 * k3 + v(z + h * k3, t_next))
        raise AssertionError("the last step returns")


def psnr(images: Tensor, exact: Tensor) -> float:
    """PSNR in dB of images in [-1, 1], from the mean over images of the root mean square error."""
    error = (images.clamp(-1, 1) - exact.clamp(-1, 1)).double().square().flatten(1).mean(1).sqrt().mean()
    return round(20 * math.log10(2 / float(error)), 2)


Judge = Callable[[Tensor], float]


def scene_judge(model: Model, side: int) -> Judge:
    """Return the share of images that a classifier of real driving scenes calls by their prompt."""
    from tests.support.scene_classifier import train_classifier

    classify = train_classifier(side, samples=2000, steps=200, seed=0)
    kinds = model.labels.cpu()
    return lambda images: round(float((classify(images) == kinds).float().mean()), 4)


def kid_judge(weights: Path, reference: Path, images: int, device: torch.device) -> Judge:
    """Return the KID to the first test images of a data set."""
    network = fold_batch_norms(load_inception(weights)).to(device)

    @torch.no_grad()
    def features(pixels: Tensor) -> np.ndarray:
        parts = [network(preprocess(part).to(device)) for part in pixels.split(16)]
        return torch.cat(parts).flatten(1).cpu().numpy()

    real = features(torch.from_numpy(np.load(reference)["test_x"][:images]))
    return lambda generated: round(kid(features(generated), real, seed=0).value, 5)


def measure(
    model: Model,
    settings: SamplerSettings,
    options: argparse.Namespace,
    judges: Mapping[str, Judge],
    save: Callable[[dict[str, Any]], None],
) -> None:
    """Measure every solver at every number of evaluations, and save after each."""
    exact = model.exact(settings, options.exact_steps)
    check = psnr(model.exact(settings, options.exact_steps // 2), exact)

    def judged(images: Tensor, with_kid: bool) -> dict[str, float]:
        pixels = to_uint8(images.clamp(-1, 1)).cpu()
        return {name: judge(pixels) for name, judge in judges.items() if with_kid or name != "kid"}

    found: list[dict[str, Any]] = []
    content = {
        "guidance": settings.guidance,
        "interval": list(settings.interval),
        "exact": {"Runge-Kutta steps": options.exact_steps, "psnr with half the steps": check} | judged(exact, True),
        "rows": found,
    }
    for evaluations in [*options.evaluations, 2 * OFFICIAL - 1]:
        names = [*OWN, *OTHERS, *(VARIANTS if options.variants and evaluations in VARIED else ())]
        for name in ["heun"] if evaluations == 2 * OFFICIAL - 1 else names:
            per_step = 2 if name.startswith("heun") else 1
            steps = (evaluations + 1) // per_step if per_step == 2 else evaluations
            model.passes, started = 0, time.perf_counter()
            if name in OWN:
                images = model.run(replace(settings, solver=name, steps=steps))  # type: ignore[arg-type]
            else:
                method, grid = (OTHERS | VARIANTS)[name]
                images = model.run(settings, method, grid(steps))
            row = {"solver": name, "evaluations": per_step * steps - (per_step - 1), "steps": steps}
            whole = evaluations in options.kid_evaluations or evaluations == 2 * OFFICIAL - 1
            row |= {"passes": model.passes, "psnr": psnr(images, exact), **judged(images, whole)}
            found.append(row)
            save(content)
            print(settings.guidance, row, f"{time.perf_counter() - started:.1f} s", flush=True)


def main() -> None:
    """Measure one model and add it to the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--name", help="key in the record; default: the name of the run")
    parser.add_argument("--training", help="how the model was trained, for the record")
    parser.add_argument("--guidance", type=float, nargs="+", default=[1.0, 2.0])
    parser.add_argument("--interval", type=float, nargs=2, default=[0.1, 1.0])
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--evaluations", type=int, nargs="+", default=[5, 7, 10, 14, 20, 40])
    parser.add_argument("--exact_steps", type=int, default=32)
    parser.add_argument("--variants", action="store_true", help="other orders and times too")
    parser.add_argument("--inception_weights", type=Path)
    parser.add_argument("--reference", type=Path, help=".npz with test_x, for KID")
    parser.add_argument("--kid_images", type=int, default=256, help="real images")
    parser.add_argument("--kid_evaluations", type=int, nargs="+", default=[10, 20])
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Model.load(options.model, options.images, device)
    judges: dict[str, Judge] = {}
    if model.spec.label_names == list(PROMPTS):
        judges["recognized"] = scene_judge(model, int(model.spec.img_size))
    if options.inception_weights:
        judges["kid"] = kid_judge(options.inception_weights, options.reference, options.kid_images, device)
    content = json.loads(options.record.read_text()) if options.record.is_file() else {"models": {}}
    content |= {"hardware": hardware() | {"cores": os.cpu_count()}, "versions": versions("numpy")}
    scales = options.guidance if model.spec.label_names else [1.0]
    measured: list[dict[str, Any]] = []
    content["models"][options.name or options.model.name] = {
        "command": " ".join(["python", "bench/solver_quality.py", *sys.argv[1:]]),
        "model": model.spec.summary(),
        "training": options.training,
        "images": options.images,
        "settings": measured,
    }

    def save(setting: dict[str, Any]) -> None:
        if setting not in measured:
            measured.append(setting)
        atomic_write_json(options.record, content)

    for scale in scales:
        settings = SamplerSettings(guidance=scale, interval=tuple(options.interval))
        measure(model, settings, options, judges, save)


if __name__ == "__main__":
    main()
