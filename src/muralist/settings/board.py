"""The settings of looking: `muralist board`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from muralist.settings.section import Section


class BoardSettings(Section):
    """muralist board ROOT: a page that shows every run, generation folder and evaluation under a folder, live."""

    root: str
    """The folder to look into, with its sub-folders; nothing outside it is ever shown, nothing in it changed."""
    host: str = "127.0.0.1"
    """Address to listen on; with 0.0.0.0 everybody who reaches this machine can look."""
    port: Annotated[int, Field(ge=0, lt=65536)] = 8420
    """Port to listen on, or the next free one; 0: any free one."""
    open: bool = False
    """Open the page in this machine's browser."""
