"""The typed settings of every job: what can be set, what it means, what happens when nothing is said.

The text under a field is its help. A field marked `Apart` changes where a run goes, how fast it runs or what is shown of
it, but never the result; all other fields together are the run's identity (see `muralist.config.identity`).
"""

from muralist.settings.board import BoardSettings
from muralist.settings.doctor import DOCTOR_FLAT_NAMES, DoctorSettings
from muralist.settings.estimate import ESTIMATE_FLAT_NAMES, EstimateSettings
from muralist.settings.evaluate import EvaluateSettings, ReportSettings, StatsSettings
from muralist.settings.generate import GenerateSettings
from muralist.settings.section import Apart, Section
from muralist.settings.sweep import SweepSettings
from muralist.settings.tools import DemoSettings, ExportSettings, LaunchSettings, PackSettings, ShowSettings
from muralist.settings.train import (
    TRAIN_FLAT_NAMES,
    CheckpointSettings,
    DataSettings,
    DistributedSettings,
    LogSettings,
    ModelSettings,
    ObjectiveSettings,
    OptimSettings,
    Precision,
    SampleSettings,
    Strategy,
    TrainSettings,
)

__all__ = [
    "DOCTOR_FLAT_NAMES",
    "ESTIMATE_FLAT_NAMES",
    "TRAIN_FLAT_NAMES",
    "Apart",
    "BoardSettings",
    "CheckpointSettings",
    "DataSettings",
    "DemoSettings",
    "DistributedSettings",
    "DoctorSettings",
    "EstimateSettings",
    "EvaluateSettings",
    "ExportSettings",
    "GenerateSettings",
    "LaunchSettings",
    "LogSettings",
    "ModelSettings",
    "ObjectiveSettings",
    "OptimSettings",
    "PackSettings",
    "Precision",
    "ReportSettings",
    "SampleSettings",
    "Section",
    "ShowSettings",
    "StatsSettings",
    "Strategy",
    "SweepSettings",
    "TrainSettings",
]
