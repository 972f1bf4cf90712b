"""The settings of a distillation: what is not given is that of the teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from muralist.core.errors import UserError
from muralist.settings import DistillSettings, TrainSettings
from muralist.settings.load import read_yaml

_DATA = ("path", "weights", "caption", "cameras", "on_broken", "max_samples", "random_flip", "val_fraction")
"""Settings that say which images a run is trained on and which are held out."""


def student_settings(given: DistillSettings) -> TrainSettings:
    """Complete the settings by the teacher's model, classes, objective and data set; refuse a student of another shape."""
    from muralist.models.jit_distill import find_teacher, read_teacher_spec  # imports torch

    teacher = find_teacher(given.distill)
    spec = read_teacher_spec(teacher, given.distill.weights)
    own: dict[str, dict[str, Any]] = {
        "model": {"name": spec.name, "img_size": spec.img_size, "enable_condition": bool(spec.label_names)},
        "objective": spec.objective.model_dump(exclude=set() if spec.label_names else {"label_drop_prob"}),
    }
    values = given.model_dump(exclude_unset=True)
    if Path(given.distill.teacher or "").exists():  # not an id on the Hub
        values["distill"]["teacher"] = str(teacher)  # the checkpoint, also when the run has newer ones
    for section, facts in own.items():
        asked = values.setdefault(section, {})
        for name, value in facts.items():
            if name in asked and getattr(getattr(given, section), name) != value:
                raise UserError(
                    f"The student cannot have {section}.{name} {asked[name]!r}.",
                    f"It has the network and the objective of its teacher {teacher}, for which this is {value!r}.",
                    "Leave it out.",
                )
            asked[name] = value
    data = values.setdefault("data", {})
    if "path" not in data:
        values["data"] = _data_of(teacher) | data
    return TrainSettings.model_validate(values)


def _data_of(teacher: Path) -> dict[str, Any]:
    """Return the settings of the data set that a run was trained on."""
    run = teacher.parent.parent if teacher.parent.name == "checkpoints" else teacher
    config = run / "config.yaml"
    if not config.is_file():
        raise UserError(
            f"{teacher} does not say which data set it was trained on.",
            "Only a run and its checkpoints do; an export holds the model alone.",
            "Give --data_path.",
        )
    data = read_yaml(TrainSettings, config).data
    return {name: getattr(data, name) for name in _DATA}
