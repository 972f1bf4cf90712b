"""`muralist COMMAND --help`: every setting with its default and description, from the typed settings."""

from __future__ import annotations

import inspect
from typing import Any

from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from muralist import settings as all_settings
from muralist.settings import DOCTOR_FLAT_NAMES, ESTIMATE_FLAT_NAMES, TRAIN_FLAT_NAMES
from muralist.settings.load import FlagTable, describe

FLAT_NAMES = {"train": TRAIN_FLAT_NAMES, "doctor": DOCTOR_FLAT_NAMES, "estimate": ESTIMATE_FLAT_NAMES}


def settings_help(command: str, settings_name: str, positional: tuple[str, ...]) -> str:
    """Return the help page of one command."""
    model = getattr(all_settings, settings_name)
    names = FlagTable(model, FLAT_NAMES.get(command, {}))
    console = Console(width=118 if not Console().is_terminal else None, highlight=False)
    with console.capture() as capture:
        console.print(f"[bold]{inspect.getdoc(model)}[/]")
        if command == "train":
            console.print("Flags override --config FILE.yaml. Flat and dotted names, - and _ are equivalent.\n")
        for title, prefix in _groups(model):
            table = Table(
                box=None, padding=(0, 2, 0, 0), title=title, title_justify="left", show_header=False, title_style="bold"
            )
            table.add_column(style="cyan", no_wrap=True)
            table.add_column(style="dim", no_wrap=True)
            table.add_column()
            for path, field in names.fields.items():
                if path.rpartition(".")[0] == prefix:
                    what = " ".join((field.description or describe(field)).split())
                    table.add_row(
                        path.upper() if path in positional else f"--{names.flags[path]}", _shown(field.default), what
                    )
            console.print(table)
            console.print()
    return capture.get().rstrip()


def _groups(model: type[BaseModel]) -> list[tuple[str, str]]:
    groups = [("", "")]
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            groups.append((f"{name}: {inspect.getdoc(field.annotation)}", name))
    return [*groups[1:], ("run", "")] if len(groups) > 1 else groups


def _shown(default: Any) -> str:
    if default is None:
        return "none"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, (list, tuple)):
        return " ".join(map(str, default)) or "-"
    return "" if type(default).__name__ == "PydanticUndefinedType" else str(default)
