"""Errors that are for people: what happened, the likely cause, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

STATUS_LOST_OTHERS = 75
"""Exit status of a process that ended because another one is missing (EX_TEMPFAIL: the same command again goes on)."""


_LONGEST = 2000  # characters of what happened, of why, and of what to do


class UserError(Exception):
    """Something the user can put right; shown without a traceback, and the program exits with a non-zero status."""

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what, self.why, self.fix = map(_one_screen, (what, why, fix))

    def __str__(self) -> str:
        return " ".join(part for part in (self.what, self.why, self.fix) if part)

    def __reduce__(self) -> tuple[type[UserError], tuple[str, str, str]]:
        # Data loader workers send exceptions to the main process by pickle; the default would drop why and fix.
        return type(self), (self.what, self.why, self.fix)


def _one_screen(text: str) -> str:
    """A sentence may quote what a damaged file holds, and that may be megabytes without a space."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"


def nearest(name: str, choices: Iterable[str]) -> str:
    """Say which valid name was probably meant, as a sentence, or nothing when none is near."""
    folded = {choice.casefold(): choice for choice in choices}
    close = difflib.get_close_matches(name.casefold(), list(folded), n=1, cutoff=0.5)
    return f"Did you mean {folded[close[0]]}?" if close else ""
