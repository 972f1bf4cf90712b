"""How far every worker is, left in the folder while a command runs, for whoever looks from outside."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress

from muralist.generate.folder import OutputFolder
from muralist.generate.screen import Count, Screen
from muralist.runfolder import write_atomically

_SECONDS_BETWEEN = 1.0


class ToldScreen:
    """A screen whose counts also go into a file."""

    def __init__(self, screen: Screen, folder: OutputFolder) -> None:
        self._screen, self._folder = screen, folder
        self._told = -_SECONDS_BETWEEN

    def show(self, counts: Mapping[str, Count], unassigned: int) -> None:
        """Show it; write it down every second."""
        self._screen.show(counts, unassigned)
        if time.monotonic() - self._told >= _SECONDS_BETWEEN and self._folder.work.is_dir():
            self._told = time.monotonic()
            words = {"workers": {label: count[:3] for label, count in counts.items()}, "unassigned": unassigned}
            with suppress(OSError):  # a full disk is told by the first picture that does not fit
                write_atomically(self._folder.progress, json.dumps(words))

    def say(self, sentence: str) -> None:
        """Something worth a line."""
        self._screen.say(sentence)

    def close(self) -> None:
        """No more comes."""
        self._screen.close()
