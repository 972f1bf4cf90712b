"""Load settings from YAML and flags, and print the help of a command; errors name the closest valid setting.

Flags and YAML become {dotted path: value} with the origin of each value, flags over YAML; then pydantic validates
types. Flat names (`--batch_size`) and dotted names (`--data.batch_size`), dashes and underscores are equivalent.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import reprlib
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from rich.console import Console
from rich.table import Table
from rich.text import Text

from muralist import settings as all_settings
from muralist.core.errors import UserError, closest_match
from muralist.core.run_dir import sanitize_name
from muralist.settings import (
    DIFFUSERS_NAMES,
    DISTILL_FLAT_NAMES,
    DOCTOR_FLAT_NAMES,
    ESTIMATE_FLAT_NAMES,
    TRAIN_FLAT_NAMES,
    TRAIN_MEANINGS,
    FlatNames,
    NonIdentity,
    Repeatable,
    Section,
    TrainSettings,
)
from muralist.settings.section import refuse_url

S = TypeVar("S", bound=Section)
CONFIGS = Path(__file__).parent.parent / "configs"
CONFIG_NAMES = tuple(sorted(path.name for path in CONFIGS.glob("*.yaml")))
_MAX_BITS = 1000  # of an integer; larger ones do not convert to float
_TRUE_WORDS = {"true", "yes", "on", "1"}
_BOOL_WORDS = {*_TRUE_WORDS, "false", "no", "off", "0", "auto"}
_HELP_WIDTH = 120  # at most, and without a terminal
_BLANK = "\ue000"  # becomes a blank after rich has wrapped the lines; rich breaks them at non-breaking spaces too
_IN_RUN_CONFIGS = ("data.pin_memory", "optim.non_finite", "samples.official_last_step", "log.wandb_name", "use_amp")
"""Settings that every version writes into a run's config.yaml, and that no one writes all of by hand."""
_OVERRIDING = {
    "optim.blr": "blr is multiplied by total batch / 256 to give the learning rate; learning_rate, lr_rule and "
    "lr_base_batch have no effect beside it.",
    "precision": "precision says whether matmuls run in 16 bits or fewer, and use_amp says the opposite.",
}
"""Settings beside which others have no effect, and why."""
_TYPE_NAMES = {int: "an integer", float: "a number", str: "text", type(None): "none"}
_PLURALS = {int: "integers", float: "numbers", str: "values"}
_JOINED = re.compile(r"(?<=\w),(?=\w)|(?<=\d)x(?=\d)")  # between values: 16,24 or 16x24


@dataclass(frozen=True)
class SettingValue:
    """A value as the user wrote it, and its origin: a flag, or a line of YAML."""

    value: Any
    origin: str
    word: str | None = None
    """What was written for a name with values of its own, such as --report_to, which stands for this value."""


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield (dotted path, field) for every setting."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from leaves(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


class FlagTable:
    """Resolves flat and dotted names to the dotted paths of one settings class."""

    def __init__(self, model: type[Section], flat_names: FlatNames) -> None:
        self.model = model
        self.fields = dict(leaves(model))
        renamed = {name: path for name, path in flat_names.items() if isinstance(path, str)}
        self.values = {name: values for name, values in flat_names.items() if not isinstance(values, str)}
        self.meanings = TRAIN_MEANINGS if model is TrainSettings else {}
        own_names = [name for name in renamed if name not in DIFFUSERS_NAMES]
        self.flags: dict[str, str] = {renamed[name]: name for name in reversed(own_names)}
        lasts = [path.rpartition(".")[2] for path in self.fields]
        for path, last in zip(self.fields, lasts, strict=True):
            self.flags.setdefault(path, last if lasts.count(last) == 1 else path)
        own = {path: path for path in self.fields}
        self.paths = own | {flag: path for path, flag in self.flags.items()} | renamed

    def assign(self, written: str, value: Any, origin: str) -> dict[str, SettingValue]:
        """Return the settings, by dotted path, that a written name and its value stand for."""
        values = self.values.get(written.replace("-", "_"))
        if values is None:
            return {self.resolve(written, origin): SettingValue(value, origin)}
        word = str(value).lower()
        if word in _BOOL_WORDS - {"auto"} and word not in values:  # YAML reads `no` as false
            switch = "true" if word in _TRUE_WORDS else "false"
            word = switch if switch in values else "no" if switch == "false" else word
        if word not in values:
            raise UserError(f"{origin} is {_shown(value)}: expected {_join([*values])}.")
        return {path: SettingValue(item, origin, word) for path, item in values[word].items()}

    def resolve(self, written: str, origin: str) -> str:
        """Return the dotted path of a written name; raise with the closest valid name if there is none."""
        name = written.replace("-", "_")
        if name in self.paths:
            return self.paths[name]
        if name == "config":
            raise UserError(f"{origin}: --config takes the path of one YAML file.")
        # By meaning before spelling: --dry_run is spelled like --lr_rule.
        hint = self.meanings.get(name) or closest_match(name, [*self.paths, *self.values])
        raise UserError(f"Unknown setting {origin}.", hint, "`--help` lists every setting.")


def load(model: type[S], arguments: Sequence[str], flat_names: FlatNames, positional: Sequence[str] = ()) -> S:
    """Parse a command line into settings; flags override `--config FILE`."""
    names = FlagTable(model, flat_names)
    flags, config = _read_flags(names, arguments, positional)
    return _combine(model, names, flags, config)


def load_values(model: type[S], values: Mapping[str, Any], flat_names: FlatNames, config: str | None = None) -> S:
    """Turn keyword arguments into settings, by the names and rules of the flags; they override the file `config`."""
    names = FlagTable(model, flat_names)
    given: dict[str, SettingValue] = {}
    for name, value in values.items():
        _add(names, given, names.assign(name, _without_paths(value), name))
    return _combine(model, names, given, config)


def _without_paths(value: Any) -> Any:
    """Return a value with texts instead of path objects."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return [_without_paths(item) for item in value] if isinstance(value, list | tuple) else value


def _combine(model: type[S], names: FlagTable, given: dict[str, SettingValue], config: str | None) -> S:
    """Validate settings, of which those of the file `config` have the lower priority."""
    from_file = {} if config is None else _read_yaml(names, find_config(refuse_url(config)))
    _refuse_overridden(names, given, from_file)
    return _validate(model, names, from_file | given)


def _refuse_overridden(names: FlagTable, flags: dict[str, SettingValue], from_file: dict[str, SettingValue]) -> None:
    """Refuse settings that have no effect beside another one: of the learning rate, and of the precision."""
    is_run_config = all(path in from_file for path in _IN_RUN_CONFIGS)
    for chosen, why in _OVERRIDING.items():
        base = (from_file | flags).get(chosen)
        if base is None or (value := _parse(names, chosen, base)) in (None, "auto"):
            continue
        if chosen == "precision":
            agreeing: dict[str, tuple[Any, ...]] = {"use_amp": (value != "fp32",)}
        else:  # a rule of none asks for nothing
            agreeing = {"optim.learning_rate": (), "optim.lr_rule": ("linear", "none"), "optim.lr_base_batch": (256,)}
        for path, values in agreeing.items():
            # A flag overrides what a file says, and a run's own config.yaml holds every setting, chosen or not.
            both_in_file = chosen not in flags and not is_run_config
            given = flags.get(path) or (from_file.get(path) if both_in_file else None)
            if given and _parse(names, path, given) not in values:
                raise UserError(
                    f"{given.origin} and {base.origin} cannot both be given.",
                    why,
                    "Leave one of them out; a run that was started with both resumes with --config RUN/config.yaml "
                    "--run_name RUN.",
                )


def find_config(config: str) -> Path:
    """Return the config file at a path or, for a bare name that is not in the working directory, in the package."""
    path, packaged = Path(config), CONFIGS / config
    if path.name != config or os.path.lexists(path) or not packaged.is_file():
        return path
    if os.environ.get("RANK", "0") == "0":  # the user may have meant a file of their own, in another folder
        print(f"--config {config}: no such file here, using the one of the package, {packaged}", file=sys.stderr)
    return packaged


def config_path(arguments: Sequence[str]) -> str | None:
    """Return the file given by --config, or None; the last one wins, as with every flag."""
    found = None
    for index, argument in enumerate(arguments):
        if argument == "--config" and index + 1 < len(arguments):
            found = arguments[index + 1]
        elif argument.startswith("--config="):
            found = argument.partition("=")[2]
    return found


def _add(names: FlagTable, given: dict[str, SettingValue], items: Mapping[str, SettingValue]) -> None:
    """Add settings to those given under other names; two names of one setting may agree, else they are refused."""
    for path, item in items.items():
        before = given.setdefault(path, item)
        if before is not item and _parse(names, path, before) != _parse(names, path, item):
            raise UserError(
                f"{_quote(names, path, before)}, and {_quote(names, path, item)}.",
                "" if before.word or item.word else f"Both are names of the setting {path}.",
                "Leave one of them out.",
            )


def _parse(names: FlagTable, path: str, item: SettingValue) -> Any:
    """Return a value as its section reads it: `yes` is true, and to resume from `latest` is auto."""
    *sections, last = path.split(".")
    section: Any = names.model
    for name in sections:
        section = section.model_fields[name].annotation
    try:
        return getattr(section.model_validate({last: _plain(names.fields[path], item)}), last)
    except ValidationError:
        raise _refused(item, names.fields[path]) from None


def _quote(names: FlagTable, path: str, item: SettingValue) -> str:
    """Say what was written and, for a name with values of its own, what it means."""
    if item.word is None:
        is_switch = isinstance(item.value, bool) and item.origin.startswith("--")
        return f"{item.origin} is {'given' if is_switch else _shown_value(item)}"
    flag = f"{'--' if item.origin.startswith('--') else ''}{names.flags[path]}"
    return f"{item.origin} is {item.word!r}, which means {flag} {str(item.value).lower()}"


def _read_flags(
    names: FlagTable, arguments: Sequence[str], positional: Sequence[str]
) -> tuple[dict[str, SettingValue], str | None]:
    written: dict[str, dict[str, SettingValue]] = {}  # by name: of a flag that is given twice, the last one counts
    config: str | None = None
    waiting, queue = list(positional), list(arguments)
    while queue:
        token = queue.pop(0)
        if not token.startswith("--"):
            if not waiting:
                raise _unexpected(names, token, arguments[: len(arguments) - len(queue) - 1])
            name = waiting[0]
            if _is_list(names.fields[name]):  # the last positional argument takes all remaining values
                before = written[name][name].value if name in written else []
                written[name] = {name: SettingValue([*before, token], _argument(name))}
            else:
                written[waiting.pop(0)] = {name: SettingValue(token, _argument(name))}
            continue
        spelled, equals, inline = token[2:].partition("=")
        if spelled == "config":
            config = inline if equals else _take(queue, token)
            continue
        name = spelled.replace("-", "_")
        negated = name.removeprefix("no_")
        if name not in names.paths and _is_bool(names.fields.get(names.paths.get(negated, ""))):
            if equals:
                raise UserError(f"{token} has a value, which --{spelled} does not take.", f"Did you mean --{negated}?")
            written[negated] = {names.paths[negated]: SettingValue(False, token)}
            continue
        if name in names.values:
            is_switch = "true" in names.values[name] and not (queue and queue[0].lower() in _BOOL_WORDS)
            word = inline if equals else "true" if is_switch else _take(queue, token)
            written[name] = names.assign(spelled, word, f"--{spelled}")
            continue
        path = names.resolve(spelled, f"--{spelled}")
        value = inline if equals else _take_values(names.fields[path], queue, token)
        if Repeatable in names.fields[path].metadata:
            before = written[name][path].value if name in written else []
            value = [*before, *(value if isinstance(value, list) else [value])]
        written[name] = {path: SettingValue(value, f"--{spelled}")}
    if waiting and waiting[0] not in written:
        raise UserError(f"Missing argument {_argument(waiting[0])}.", "`--help` shows how the command is used.")
    given: dict[str, SettingValue] = {}
    for items in written.values():
        _add(names, given, items)
    return given, config


def _unexpected(names: FlagTable, token: str, before: Sequence[str]) -> UserError:
    """Return the error for a word that no flag takes; after a flag, which is then a switch, it is the wrong value."""
    flag = before[-1] if before and before[-1].startswith("--") and "=" not in before[-1] else ""
    name = flag[2:].replace("-", "_")
    if name in names.paths:
        return UserError(f"{flag} is {token!r}: expected {describe(names.fields[names.paths[name]])}, or no value.")
    if name in names.values:
        return UserError(f"{flag} is {token!r}: expected {_join([*names.values[name]])}, or no value.")
    if flag:
        return UserError(f"{flag} takes no value, and {token!r} follows it.")
    return UserError(f"Unexpected argument {token!r}.", "Every setting is given as --name value.")


def _argument(path: str) -> str:
    """Return how messages and help write a positional argument."""
    return path.rpartition(".")[2].upper()


def _take_values(field: FieldInfo, queue: list[str], token: str) -> Any:
    if _is_bool(field):
        return queue.pop(0) if queue and queue[0].lower() in _BOOL_WORDS else True
    values = [_take(queue, token)]
    if _is_list(field) or _may_be_list(field):
        # After an optional list of numbers, a word that is not a number may be a positional argument.
        only_numbers = not _is_list(field) and _of_numbers(field)
        while queue and (queue[0].isdecimal() if only_numbers else not queue[0].startswith("--")):
            values.append(queue.pop(0))
    return values if _is_list(field) or len(values) > 1 else values[0]


def _take(queue: list[str], token: str) -> str:
    if not queue or queue[0].startswith("--"):
        raise UserError(f"{token} needs a value.")
    return queue.pop(0)


class _Loader(yaml.SafeLoader):
    """Refuses a key that appears twice, of which PyYAML drops the first value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping."""
        seen = set[str]()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                problem = f"the key `{key.value:.80}` appears twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_REMOVED = ("distill.solver_steps",)
"""Settings that the config.yaml of every older run holds, and that nothing reads any more."""


def _read_yaml(names: FlagTable, path: Path) -> dict[str, SettingValue]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        guess = "" if path.is_dir() else closest_match(str(path), map(str, path.parent.glob("*.y*ml")))
        trains = isinstance(error, FileNotFoundError) and "data.path" in names.fields
        fix = f"The package has {', '.join(CONFIG_NAMES)}: give such a name without a folder." if trains else ""
        raise UserError(f"Cannot read the config file {path}: {reason}.", guess, fix) from None
    try:
        tree = yaml.load(text, _Loader)
    except RecursionError:
        raise UserError(f"{path} is nested too deeply to be settings.") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an invalid date
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error) or "cannot be parsed"
        raise UserError(f"{path} is not valid YAML{where}: {problem}.") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"{path} must hold settings as `name: value` lines, not {type(tree).__name__}.")
    given: dict[str, SettingValue] = {}

    def walk(branch: Mapping[Any, Any], prefix: str) -> None:
        for key, value in branch.items():
            written = f"{prefix}{key}"
            is_section = any(known.startswith(f"{written}.") for known in names.fields)
            if written in _REMOVED:
                continue
            if is_section and (value is None or isinstance(value, dict)):
                walk(value or {}, f"{written}.")  # None: all lines of the section are commented out
                continue
            _add(names, given, names.assign(written, value, f"`{written}` in {path}"))

    walk(tree, "")
    return given


def _validate(model: type[S], names: FlagTable, given: Mapping[str, SettingValue]) -> S:
    tree: dict[str, Any] = {}
    for path, item in given.items():
        branch = tree
        *parents, last = path.split(".")
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[last] = _plain(names.fields[path], item)
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        location = ".".join(map(str, error.errors()[0]["loc"]))  # of a value, or of an element or a choice below it
        path = next(path for path in names.fields if f"{location}.".startswith(f"{path}."))
        if path not in given:
            what = " ".join((names.fields[path].description or "").split())
            raise UserError(f"--{names.flags[path]} is missing.", what, "`--help` lists every setting.") from None
        raise _refused(given[path], names.fields[path]) from None


def _plain(field: FieldInfo, item: SettingValue) -> Any:
    """Return a value for pydantic, without those that it would misread."""
    if isinstance(item.value, bool) and not _is_bool(field):
        raise _refused(item, field)  # pydantic would accept true as 1
    if isinstance(item.value, int) and item.value.bit_length() > _MAX_BITS:
        raise _refused(item, field)
    return _from_text(field, item.value)


def _refused(item: SettingValue, field: FieldInfo) -> UserError:
    text, fix = _shown_value(item), ""
    if item.origin.startswith("--") and (_is_list(field) or _may_be_list(field)) and _JOINED.search(text):
        fix = f"Put blanks between values: {item.origin} {_JOINED.sub(' ', text).strip(chr(39))}"
    return UserError(f"{item.origin} is {text}: expected {describe(field)}.", fix=fix)


def _words(item: SettingValue) -> list[Any]:
    """Return the values that follow the flag of a list."""
    return item.value if isinstance(item.value, list) and item.origin.startswith("--") else []


def _shown_value(item: SettingValue) -> str:
    return _shown(" ".join(map(str, words)) if (words := _words(item)) else item.value)


def _shown(value: Any) -> str:
    """Return a value for a message, truncated: YAML aliases can expand to gigabytes."""
    try:
        return f"{value!r:.200}" if isinstance(value, str) else reprlib.repr(value)
    except ValueError:  # Python refuses to print integers of thousands of digits
        return "a number of thousands of digits"


def _from_text(field: FieldInfo, value: Any) -> Any:
    if isinstance(value, str) and value.lower() in {"none", "null"} and type(None) in get_args(field.annotation):
        return None
    if _is_list(field) and isinstance(value, (str, int, float)):
        return [value]
    return value


def _is_list(field: FieldInfo | None) -> bool:
    return field is not None and get_origin(field.annotation) in (list, tuple)


def _may_be_list(field: FieldInfo) -> bool:
    return any(get_origin(part) in (list, tuple) for part in get_args(field.annotation))


def _of_numbers(field: FieldInfo) -> bool:
    return str not in [element for part in get_args(field.annotation) for element in get_args(part)]


def _is_bool(field: FieldInfo | None) -> bool:
    return field is not None and (field.annotation is bool or bool in get_args(field.annotation))


def describe(field: FieldInfo) -> str:
    """Describe the values that a setting accepts."""
    limits = _limits(field.metadata)

    def words(annotation: Any) -> list[str]:
        if get_origin(annotation) in (Union, types.UnionType):
            return [word for part in get_args(annotation) for word in words(part)]
        if get_origin(annotation) is Literal:
            return [str(choice) for choice in get_args(annotation)]
        if get_origin(annotation) in (list, tuple):
            elements = get_args(annotation)
            if get_origin(elements[0]) is Literal:
                return [f"one or more of {', '.join(words(elements[0]))}"]
            count = "one or more" if get_origin(annotation) is list else len(elements)
            limits = getattr(elements[0], "__metadata__", ())
            return [f"{count} {_PLURALS[getattr(elements[0], '__origin__', elements[0])]}{_limits(limits)}"]
        if get_origin(annotation) is Annotated:
            return [f"{words(get_args(annotation)[0])[0]}{_limits(annotation.__metadata__)}"]
        if annotation is bool:
            return ["true", "false"]
        return [_TYPE_NAMES.get(annotation, str(annotation))]

    return _join(words(field.annotation)) + limits


def _join(choices: Sequence[str]) -> str:
    return choices[0] if len(choices) == 1 else ", ".join(choices[:-1]) + " or " + choices[-1]


def _limits(metadata: Sequence[Any]) -> str:
    found = []
    for item in metadata:
        for part in getattr(item, "metadata", [item]):
            for attribute, word in (("gt", "above"), ("ge", "at least"), ("lt", "below"), ("le", "at most")):
                if getattr(part, attribute, None) is not None:
                    found.append(f"{word} {getattr(part, attribute)}")
    return " " + " and ".join(found) if found else ""


def flatten(settings: Section) -> dict[str, Any]:
    """Return all settings as {dotted path: plain value}."""
    plain = settings.model_dump(mode="json")
    return {path: reduce(getitem, path.split("."), plain) for path, _ in leaves(type(settings))}


def identity(settings: TrainSettings) -> dict[str, Any]:
    """Return the non-default settings that affect the result: runs with equal identities are the same run.

    Defaults are omitted so that a setting added in a later version does not change the identity of earlier runs.
    """
    values, defaults = flatten(settings), flatten(type(settings)())
    shaping = [path for path, field in leaves(type(settings)) if NonIdentity not in field.metadata]
    found = {path: values[path] for path in shaping if values[path] != defaults[path]}
    if settings.optim.lr_schedule != "constant" and settings.optim.lr_decay_steps is None:
        found["epochs"] = settings.epochs
        if settings.max_steps is not None:
            found["max_steps"] = settings.max_steps
    if settings.distill.teacher:  # also where they are defaults: no other run has them
        found |= {path: values[path] for path in shaping if path.startswith("distill.")}
    if paths := [os.path.normpath(path) for path in settings.data.paths]:
        found["data.path"] = paths if len(paths) > 1 else paths[0]
    return found


def run_name(settings: TrainSettings, config: str | None) -> str:
    """Return --run_name, or `<config stem or model-size[-cond]>-<6 hex digits of the identity>`.

    The model of a student is named after its teacher's folder: `<teacher>-2step`.
    """
    if settings.run_name:
        return settings.run_name
    condition = "-cond" if settings.model.enable_condition else ""
    height, width = settings.model.size
    size = height if height == width else f"{height}x{width}"
    name = settings.model.name
    if settings.model.path and name == "diffusers":
        name = sanitize_name(Path(settings.model.path).name)
    model = f"{name.replace('/', '-')}-{size}{condition}"
    if settings.distill.teacher:
        teacher = Path(settings.distill.teacher).absolute()
        folder = teacher.parent.parent if teacher.parent.name == "checkpoints" else teacher
        model = f"{sanitize_name(folder.stem if folder.is_file() else folder.name)}-{settings.distill.steps}step"
    return f"{sanitize_name(Path(config).stem) if config else model}-{identity_digest(settings)}"


def identity_digest(settings: TrainSettings) -> str:
    """Return six hex digits of the identity, the end of a default run name."""
    return hashlib.sha256(json.dumps(identity(settings), sort_keys=True).encode()).hexdigest()[:6]


def to_yaml(settings: Section) -> str:
    """Return settings as YAML that `--config` reads back to the same settings."""
    plain = settings.model_dump(mode="json")
    text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
    # PyYAML does not read back every Unicode line break it writes: such text is written with escapes.
    return text if yaml.safe_load(text) == plain else yaml.safe_dump(plain, sort_keys=False)


def read_yaml(model: type[S], path: Path) -> S:
    """Read a file written by `to_yaml`."""
    return load(model, ["--config", str(path)], {})


FLAT_NAMES = {
    "train": TRAIN_FLAT_NAMES,
    "distill": DISTILL_FLAT_NAMES,
    "doctor": DOCTOR_FLAT_NAMES,
    "estimate": ESTIMATE_FLAT_NAMES,
}


_NEEDED_FIRST = {
    "train": (
        *(
            "data.path",
            "model.name",
            "model.img_size",
            "model.enable_condition",
            "data.batch_size",
            "epochs",
            "max_steps",
        ),
        *("optim.learning_rate", "precision", "samples.prompts", "checkpoint.every", "checkpoint.resume"),
        *("results_dir", "run_name", "dry_run"),
    ),
    "distill": (
        *("distill.teacher", "distill.steps", "distill.guidance", "distill.interval", "distill.weights"),
        *("data.path", "data.batch_size", "epochs", "max_steps", "optim.learning_rate"),
        *(
            "precision",
            "samples.prompts",
            "checkpoint.every",
            "checkpoint.resume",
            "results_dir",
            "run_name",
            "dry_run",
        ),
    ),
    "generate": ("model_path", "prompts_csv", "prompt", "output_dir", "num_inference_steps", "guidance_scale"),
}
"""Settings that most command lines have: the first group of a help page."""


def settings_help(command: str, settings_name: str, positional: tuple[str, ...]) -> str:
    """Return the help page of one command."""
    model = getattr(all_settings, settings_name)
    names = FlagTable(model, FLAT_NAMES.get(command, {}))
    groups: dict[str, list[tuple[str, Text]]] = {}
    first = _NEEDED_FIRST.get(command, ())
    for path in (*first, *(path for path in names.fields if path not in first)):
        section = path.rpartition(".")[0]
        title = "other settings" if first else ""
        if path in first:
            title = "settings to begin with"
        elif section:
            title = f"{section}: {inspect.getdoc(model.model_fields[section].annotation)}"
        flag = _argument(path) if path in positional else f"--{names.flags[path]}"
        groups.setdefault(title, []).append((flag, _help_text(names.fields[path])))
    if command == "train":
        own = {name: f"--{names.flags[names.paths[name]]}" for name in DIFFUSERS_NAMES if name in names.paths}
        own |= {name: "|".join(values) for name, values in names.values.items()}
        title = "names of diffusers and Accelerate, and what they mean here"
        groups[title] = [(f"--{name}", Text(own[name])) for name in DIFFUSERS_NAMES]
    console = Console(highlight=False)
    console.width = min(console.width, _HELP_WIDTH) if console.is_terminal else _HELP_WIDTH
    with console.capture() as capture:
        console.print(f"[bold]{inspect.getdoc(model)}[/]")
        if command == "train":
            console.print(
                "Flags override --config FILE.yaml. Flat and dotted names, - and _ are equivalent. --no_NAME turns a "
                f"switch off. FILE.yaml is a path, or a config of the package: {', '.join(CONFIG_NAMES)}."
            )
        for title, rows in groups.items():
            console.print(f"\n[bold]{title}[/]" if title else "")
            table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
            table.add_column(style="cyan", no_wrap=True)
            table.add_column()
            for row in rows:
                table.add_row(*row)
            console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().replace(_BLANK, " ").rstrip().splitlines())


def _help_text(field: FieldInfo) -> Text:
    """Return the help of a setting, with the values of a choice and the default."""
    text = Text(" ".join((field.description or "").split()))
    choices, default = _choices(field.annotation), _format_default(field.default)
    facts = ["|".join(choices)] if len(choices) > 1 else []
    facts += [f"default{_BLANK}{default}"] if default not in ("", "default") else []
    return text.append(f" ({', '.join(facts)})", style="dim") if facts else text


def _choices(annotation: Any) -> list[str]:
    """Return the words that a setting accepts, if it accepts nothing else."""
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    if get_origin(annotation) is list:
        return _choices(get_args(annotation)[0])
    named = (part for part in get_args(annotation) if part is not type(None))
    parts = [["true", "false"] if part is bool else _choices(part) for part in named]
    return [word for part in parts for word in part] if all(parts) else []


def _format_default(default: Any) -> str:
    if isinstance(default, (list, tuple)):
        return " ".join(map(str, default))
    if isinstance(default, bool):
        return str(default).lower()
    return "" if default is None or default is PydanticUndefined else str(default)
