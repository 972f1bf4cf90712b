"""The typed settings of every command, with their defaults.

The docstring of a field is its help. A field marked `NonIdentity` changes the location, speed or logging of a run, never
its result; all other fields together are the identity of the run (`muralist.settings.load.identity`).
"""

from muralist.settings.evaluate import EvaluateSettings, ReportSettings, StatsSettings, SweepSettings
from muralist.settings.generate import BatchScriptSettings, GenerateSettings
from muralist.settings.section import NonIdentity, Repeatable, Section
from muralist.settings.tools import (
    DOCTOR_FLAT_NAMES,
    ESTIMATE_FLAT_NAMES,
    BoardSettings,
    DemoSettings,
    DoctorSettings,
    EstimateSettings,
    ExportSettings,
    LaunchSettings,
    PackSettings,
    ShowSettings,
)
from muralist.settings.train import (
    DIFFUSERS_NAMES,
    DISTILL_FLAT_NAMES,
    TRAIN_FLAT_NAMES,
    TRAIN_MEANINGS,
    CheckpointSettings,
    DataSettings,
    DistBackend,
    DistillationSettings,
    DistillSettings,
    DistributedSettings,
    FlatNames,
    LogSettings,
    LrSchedule,
    ModelSettings,
    ObjectiveSettings,
    Optimizer,
    OptimSettings,
    Precision,
    SampleSettings,
    Strategy,
    TrainSettings,
    accelerate_strategy,
)
