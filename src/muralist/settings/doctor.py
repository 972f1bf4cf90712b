"""The settings of `muralist doctor`."""

from __future__ import annotations

from pydantic import PositiveFloat

from muralist.settings.section import Section


class DoctorSettings(Section):
    """muralist doctor: what is wrong with this machine, or would be with a run on it?

    muralist doctor                       the machine
    muralist doctor train FLAGS           and a training, with the flags of train; --config FILE alone means this too
    muralist doctor generate FLAGS        and a generation, with the flags of generate
    muralist launch --nproc 8 doctor ...  the same with the collective test among the ranks (also under torchrun and srun)
    """

    as_json: bool = False
    """Print what was found as JSON instead of a list."""
    timeout: PositiveFloat = 60.0
    """Seconds for which ranks that do not come are waited for."""


DOCTOR_FLAT_NAMES = {"json": "as_json"}
"""`json` itself is a name that settings cannot have."""
