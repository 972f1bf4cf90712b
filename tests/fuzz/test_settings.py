"""Settings from YAML files and flags, of nonsense: taken as they are, or refused in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from muralist.core.errors import UserError
from muralist.core.slurm import first_host
from muralist.settings import (
    TRAIN_FLAT_NAMES,
    EvaluateSettings,
    GenerateSettings,
    LaunchSettings,
    PackSettings,
    TrainSettings,
)
from muralist.settings.load import load, read_yaml, run_name, to_yaml
from muralist.tools.hydit import translate_flags
from muralist.train.preflight import check_settings
from tests.conftest import REPOSITORY
from tests.fuzz.damage import NONSENSE, damaged, examples, nonsense, refused_or

CONFIGS = sorted((REPOSITORY / "configs").glob("*.yaml"))
WHOLE = yaml.safe_load(to_yaml(TrainSettings()))


def _settle(path: Path) -> TrainSettings | UserError:
    def settle() -> TrainSettings:
        settings = load(TrainSettings, ["--config", str(path)], TRAIN_FLAT_NAMES)
        run_name(settings, str(path))
        refused_or(lambda: check_settings(settings))
        return settings

    settings = refused_or(settle)
    if not isinstance(settings, UserError):
        path.write_text(to_yaml(settings), encoding="utf-8")
        assert read_yaml(TrainSettings, path) == settings
    return settings


@examples(27)
@given(data=st.data())
def test_damaged_yaml_is_read_or_refused(data: st.DataObject, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.yaml"
    path.write_bytes(data.draw(damaged(data.draw(st.sampled_from(CONFIGS)).read_bytes())))
    _settle(path)


@examples(44)
@given(tree=nonsense(WHOLE))
def test_settings_of_nonsense_are_taken_or_refused(tree: Any, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "nonsense.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    _settle(path)


_LAUGHS = "".join(f", &{chr(98 + n)} [{', '.join([f'*{chr(97 + n)}'] * 9)}]" for n in range(9))
_BILLION = f"[&a [x, x, x, x, x, x, x, x, x]{_LAUGHS}]"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\ufeff",
        "\0",
        "- a\n- b",
        "just text",
        "data: &a {path: *a}",
        "data: &a [*a]",
        "data: {path: &a [*a]}",
        "model: {name: &a [1, *a]}",
        "? [a, b]\n: c",
        "? {a: b}\n: c",
        "1: 2",
        "null: 3",
        "data: 5",
        "data: {path: 2026-99-99}",
        "data: {path: 2026-01-01}",
        "epochs: 0x" + "f" * 5000,
        "epochs: " + "9" * 5000,
        "epochs: 1_000:60:60",
        "seed: !!binary aGVsbG8=",
        "seed: !!set {a, b}",
        "!!python/object/apply:os.system ['touch ran']",
        "seed: !!python/name:os.system",
        "a: " + "[" * 5000,
        "a: " + "{a: " * 3000,
        f"data: {{path: {_BILLION}}}",
        f"seed: {_BILLION}",
        f"model: {{name: {_BILLION}}}",
        f"a: {_BILLION}",
        "&a : *a",
        "%YAML 9.9\n---\na: 1",
        "a: 1\n---\nb: 2",
        "epochs: 1\nepochs: 2",
        "data.batch_size: 5\ndata: {batch_size: 6}",
    ],
)
def test_yaml_traps_are_refused_or_taken(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trap.yaml").write_text(text, encoding="utf-8")
    _settle(tmp_path / "trap.yaml")
    assert [path.name for path in tmp_path.iterdir()] == ["trap.yaml"]


_WORDS = [f"--{name}" for name in TRAIN_FLAT_NAMES] + [
    f"--{name}" for name in ("data.path", "seed", "config", "no-x", "", "=", "a=b")
]
_VALUES = [str(value) for value in NONSENSE if "\0" not in str(value)] + [
    "64",
    "true",
    "auto",
    "none",
    "--",
    "-1",
    "JiT-B/4",
]


@pytest.mark.parametrize("model", [TrainSettings, GenerateSettings, EvaluateSettings, PackSettings, LaunchSettings])
@examples(33)
@given(data=st.data())
def test_flags_of_nonsense_are_taken_or_refused(model: Any, data: st.DataObject) -> None:
    own = [f"--{name}" for name in model.model_fields]
    words = data.draw(st.lists(st.sampled_from(_WORDS + own) | st.sampled_from(_VALUES), max_size=6))
    names = TRAIN_FLAT_NAMES if model is TrainSettings else {}
    positional = ("source", "destination") if model is PackSettings else ()
    refused_or(lambda: load(model, words, names, positional))


@examples(33)
@given(
    words=st.lists(
        st.sampled_from([*_VALUES, "--ckpt-every", "--lr", "--image-size", "--multireso", "--rank", "--results-dir"]),
        max_size=6,
    )
)
def test_official_flags_of_nonsense_are_taken_or_refused(words: list[str]) -> None:
    refused_or(lambda: translate_flags(words))


@examples(110)
@given(names=st.text("abgpu0123456789[],-", max_size=30) | st.text(max_size=10))
@example(names="gpu[07-09,12]")
@example(names="[" * 30)
def test_node_lists_of_nonsense_give_a_name(names: str) -> None:
    assert len(first_host(names)) <= len(names)


@given(
    prefix=st.text("abcz-", min_size=1, max_size=8),
    numbers=st.lists(st.integers(0, 999), min_size=1, max_size=5),
    width=st.integers(1, 4),
)
def test_the_first_host_of_a_list_is_its_first(prefix: str, numbers: list[int], width: int) -> None:
    prefix = prefix.strip("-") + "n"
    written = [f"{number:0{width}}" for number in numbers]
    assert first_host(f"{prefix}[{','.join(written)}]") == prefix + written[0]
    assert first_host(",".join(f"{prefix}{number}" for number in written)) == prefix + written[0]
