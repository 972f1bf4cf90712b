"""Schedulers of diffusers: short names, options, and which of them fit a model.

`scheduler.compatibles` of diffusers is too narrow: it lists nothing for models of flow matching, and LCM and TCD for no
model. Here a scheduler fits if it integrates what the model predicts: diffusion (noise, velocity or sample, with betas)
or flow matching.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from muralist.core.errors import UserError, closest_match, first_line
from muralist.models.diffusers_source import ClassSource, Parameter, find_class
from muralist.settings.generate import scheduler_name


class _Names(NamedTuple):
    short: tuple[str, ...]
    diffusion: str
    flow: str = ""


SCHEDULERS = (
    _Names(("euler",), "EulerDiscrete", "FlowMatchEulerDiscrete"),
    _Names(("euler_a", "euler_ancestral"), "EulerAncestralDiscrete"),
    _Names(("heun",), "HeunDiscrete", "FlowMatchHeunDiscrete"),
    _Names(("dpm++", "dpmpp", "dpm++_2m", "dpmpp_2m"), "DPMSolverMultistep", "DPMSolverMultistep"),
    _Names(("dpm++_2s", "dpmpp_2s"), "DPMSolverSinglestep", "DPMSolverSinglestep"),
    _Names(("unipc",), "UniPCMultistep", "UniPCMultistep"),
    _Names(("deis",), "DEISMultistep", "DEISMultistep"),
    _Names(("sa_solver",), "SASolver", "SASolver"),
    _Names(("ddim",), "DDIM"),
    _Names(("ddpm",), "DDPM"),
    _Names(("pndm",), "PNDM"),
    _Names(("lms",), "LMSDiscrete"),
    _Names(("dpm2",), "KDPM2Discrete"),
    _Names(("dpm2_a",), "KDPM2AncestralDiscrete"),
    _Names(("lcm",), "LCM", "FlowMatchLCM"),
    _Names(("tcd",), "TCD"),
    _Names(("flow_euler",), "", "FlowMatchEulerDiscrete"),
    _Names(("flow_heun",), "", "FlowMatchHeunDiscrete"),
)
"""Short names, and the class that each means for models of diffusion and of flow matching."""
_ETA = "eta"  # an argument of the call, not of the scheduler; users look for it among the options
_READ_BY_PIPELINE = {"base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len"}
_KINDS = {True: "flow matching", False: "diffusion"}


@dataclass(frozen=True)
class SchedulerChoice:
    """A scheduler that fits a model."""

    class_name: str
    options: Mapping[str, Any]
    """Options of its config that differ from what it would have without them."""
    eta: float | None = None
    """The argument `eta` of the pipeline."""

    @property
    def words(self) -> list[str]:
        """The options as `--scheduler_options` takes them."""
        values = dict(sorted(self.options.items())) | ({} if self.eta is None else {_ETA: self.eta})
        return [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in values.items()]


def is_flow(config: Mapping[str, Any]) -> bool:
    """Whether a scheduler's config is one of flow matching."""
    by_class = "FlowMatch" in str(config.get("_class_name"))
    return by_class or bool(config.get("use_flow_sigmas")) or config.get("prediction_type") == "flow_prediction"


def choose_scheduler(config: Mapping[str, Any], wanted: str | None, words: Sequence[str]) -> SchedulerChoice:
    """Find the scheduler that a user means for a model whose own scheduler has this config, and check its options."""
    own = str(config.get("_class_name"))
    name = own if wanted is None else _class_name(wanted, config, own)
    source = find_class(name, "schedulers")
    if source is None:
        raise UserError(f"The installed diffusers has no scheduler {name}.", fix="Leave --scheduler_options out.")
    if name == "LMSDiscreteScheduler":
        _require_scipy("lms")
    given = [_split(word) for word in words]
    if repeated := [option for index, (option, _) in enumerate(given) if option in dict(given[:index])]:
        raise UserError(f"--scheduler_options gives {repeated[0]} twice.", fix="Give it once.")
    options: dict[str, Any] = {}
    eta = None
    for option, text in given:
        if option == _ETA and _ETA in source.parameters("step"):
            eta = _parse_eta(text)
        else:
            options[option] = _parse(name, source, option, text)
    known = source.parameters("__init__")
    options = {option: value for option, value in options.items() if value != config.get(option, known[option].default)}
    return SchedulerChoice(name, options, eta)


def _class_name(wanted: str, config: Mapping[str, Any], own: str) -> str:
    """Return the class that a short or a class name means for this model."""
    flow, written = is_flow(config), scheduler_name(wanted).replace("-", "_").replace(" ", "_")
    if written == scheduler_name(own):
        return own
    if not flow and "beta_start" not in config and "beta_schedule" not in config:
        raise UserError(
            f"The scheduler of this model cannot be replaced by {wanted}.",
            f"{own} belongs to its kind of model alone.",
            "Leave --scheduler out.",
        )
    for names in SCHEDULERS:
        kind = names.flow if flow else names.diffusion
        if kind and written in (*names.short, scheduler_name(kind)):
            return f"{kind}Scheduler"
    fitting = [names.short[0] for names in SCHEDULERS if (names.flow if flow else names.diffusion)]
    every = {name for names in SCHEDULERS for name in (*names.short, *map(scheduler_name, names[1:]))}
    why = f"It is for {_KINDS[not flow]}, and this is a model of {_KINDS[flow]}. " if written in every else ""
    classes = [names.flow if flow else names.diffusion for names in SCHEDULERS]
    guess = closest_match(written, [*fitting, *filter(None, classes)])
    raise UserError(f"The scheduler {wanted} does not fit this model.", f"{why}These do: {', '.join(fitting)}.", guess)


def _require_scipy(what: str) -> None:
    if importlib.util.find_spec("scipy") is None:
        raise UserError(f"{what} needs scipy, which is not installed.", fix="pip install scipy")


def _split(word: str) -> tuple[str, str]:
    name, equals, text = word.partition("=")
    if not equals or not name:
        raise UserError(
            f"--scheduler_options has {word!r}, which is not name=value.",
            fix="For example: --scheduler_options use_karras_sigmas=true,solver_order=3",
        )
    return name.strip(), text.strip()


def _parse(scheduler: str, source: ClassSource, name: str, text: str) -> Any:
    known = {option: each for option, each in source.parameters("__init__").items() if _types(each)}
    if name == "use_flow_sigmas":
        raise UserError("use_flow_sigmas cannot be given.", "Whether a model is one of flow matching is in its files.")
    if name not in known:
        options = sorted([*known.keys() - {"use_flow_sigmas"}, *({_ETA} & source.parameters("step").keys())])
        raise UserError(
            f"{scheduler} has no option {name}.", f"It has {', '.join(options)}.", closest_match(name, options)
        )
    if name == "use_beta_sigmas" and text == "true":
        _require_scipy(name)
    choices = _choices(known[name])
    for kind in _types(known[name]):
        value = _convert(kind, text)
        if value is not None and (not choices or value in choices):
            return value
    expected = " or ".join(map(str, choices)) if choices else " or ".join(_types(known[name]))
    guess = closest_match(text, [str(choice) for choice in choices])
    raise UserError(f"The option {name} of {scheduler} is {text!r}: expected {expected}.", guess)


def _types(parameter: Parameter) -> list[str]:
    """Return which of bool, int, float and str a parameter takes, from its annotation; empty for other types."""
    if _choices(parameter):
        return ["str"]
    return [kind for kind in ("bool", "int", "float", "str") if kind in parameter.annotation.split(" | ")]


def _choices(parameter: Parameter) -> list[Any]:
    for node in ast.walk(ast.parse(parameter.annotation)):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
            values = ast.literal_eval(node.slice)
            return list(values) if isinstance(values, tuple) else [values]
    return []


def _convert(kind: str, text: str) -> Any:
    if kind == "str":
        return text
    if kind == "bool":
        return {"true": True, "false": False}.get(text.lower())
    try:
        return int(text) if kind == "int" else float(text)
    except ValueError:
        return None


def _parse_eta(text: str) -> float:
    value = _convert("float", text)
    if value is None or not 0 <= value <= 1:
        raise UserError(f"The option eta is {text!r}: expected a number from 0 to 1.")
    return float(value)


def eta_argument(words: Sequence[str]) -> dict[str, float]:
    """Return the pipeline's argument `eta`, if it is among checked options."""
    return {name: float(text) for name, text in map(_split, words) if name == _ETA}


def check_arguments(choice: SchedulerChoice, timesteps: Sequence[int], pipeline: str) -> None:
    """Refuse eta and time steps that the pipeline does not pass on, or that the scheduler does not take."""
    source = find_class(pipeline, "pipelines")
    call = source.parameters("__call__") if source else {}
    if choice.eta is not None and _ETA not in call:
        raise UserError(f"{pipeline} does not pass eta to its scheduler.", fix="Leave eta out.")
    if not timesteps:
        return
    if any(later >= earlier for earlier, later in itertools.pairwise(timesteps)):
        raise UserError(f"--timesteps {' '.join(map(str, timesteps))} must fall from the first to the last.")
    scheduler = find_class(choice.class_name, "schedulers")
    taken = scheduler.parameters("set_timesteps") if scheduler else {}
    for name, parameters in ((pipeline, call), (choice.class_name, taken)):
        if "timesteps" not in parameters:
            raise UserError(
                f"{name} takes no time steps.", fix="Leave --timesteps out, or choose another --scheduler: lcm, euler."
            )


def build_scheduler(scheduler: Any, choice: SchedulerChoice) -> Any:
    """Return a scheduler of the chosen class with the noise schedule of a pipeline's own one."""
    import diffusers

    kind = getattr(diffusers, choice.class_name)
    config, translated = scheduler.config, {}
    if is_flow({"_class_name": type(scheduler).__name__, **config}) and kind is not type(scheduler):
        shift = config.get("shift", config.get("flow_shift", 1.0))
        source = find_class(choice.class_name, "schedulers")
        takes_flow = source is not None and "use_flow_sigmas" in source.parameters("__init__")
        flow = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": shift}
        translated = flow if takes_flow else {"shift": shift}
    try:
        return kind.from_config(config, **{**translated, **choice.options})
    except (ValueError, NotImplementedError, ImportError, AssertionError) as error:
        words = ",".join(choice.words)
        raise UserError(f"{choice.class_name} cannot be made with {words}.", f"{first_line(error)}.") from None


def check_effect(scheduler: Any, choice: SchedulerChoice, steps: int, timesteps: Sequence[int]) -> None:
    """Refuse an option that changes nothing: run the scheduler with and without it, on a small made-up denoiser."""
    expected = _trajectory(build_scheduler(scheduler, choice), choice.eta, steps, timesteps)
    for name in (*choice.options, *((_ETA,) if choice.eta is not None else ())):
        if name in _READ_BY_PIPELINE and scheduler.config.get("use_dynamic_shifting"):
            continue
        others = {option: value for option, value in choice.options.items() if option != name}
        without = replace(choice, options=others, eta=None if name == _ETA else choice.eta)
        try:
            same = _trajectory(build_scheduler(scheduler, without), without.eta, steps, timesteps) == expected
        except UserError:  # an option that another one needs
            continue
        if same:
            raise UserError(
                f"The option {name} has no effect.",
                f"{choice.class_name} gives the same images in {steps} steps without it.",
                "Leave it out, or give the option that turns it on.",
            )


def _trajectory(scheduler: Any, eta: float | None, steps: int, timesteps: Sequence[int]) -> list[float]:
    import torch

    from muralist.generate.diffusers_patches import per_sample_noise

    arguments: dict[str, Any] = {"timesteps": list(timesteps)} if timesteps else {"num_inference_steps": steps}
    if scheduler.config.get("use_dynamic_shifting"):
        arguments["mu"] = 1.0
    generator = torch.Generator().manual_seed(0)
    taken = inspect.signature(scheduler.step).parameters
    # Without it, pipelines pass an eta of 0, whatever the scheduler's default.
    extra = {name: value for name, value in ((_ETA, eta or 0.0), ("generator", [generator])) if name in taken}
    try:
        with per_sample_noise([generator]):
            scheduler.set_timesteps(**arguments)
            x = 3 * torch.randn((1, 4, 8, 8), generator=generator)
            for time in scheduler.timesteps:
                scaled = scheduler.scale_model_input(x, time) if hasattr(scheduler, "scale_model_input") else x
                x = scheduler.step(torch.sin(scaled) + 0.5 * scaled, time, x, **extra).prev_sample
    except (ValueError, NotImplementedError, ImportError, AssertionError, IndexError, TypeError) as error:
        name = type(scheduler).__name__
        raise UserError(f"{name} cannot run with these options in {steps} steps.", f"{first_line(error)}.") from None
    return [*map(float, scheduler.timesteps), *x.flatten().tolist()]
