"""Where captions come from: the column called so, a column that the user names, or a template filled from columns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from muralist.data.fields import CAPTION_FIELDS, caption_text, pick
from muralist.errors import UserError, nearest

_FIELD = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True)
class Caption:
    """How the caption of an item is made from what is known about it."""

    pieces: tuple[str, ...]  # text, then the name of a column, then text, and so on
    rule: str | None = None  # what the user gave

    @classmethod
    def settle(cls, rule: str | None, columns: Iterable[str], where: str, default: str = "") -> Caption:
        """Check a rule against the columns there are.

        One word is the name of a column and several are a template such as `A photo of {label}`. None takes the column
        that is called caption or the like; where there is none, the template `default`.
        """
        columns = list(columns)
        if rule is None:
            found = pick(columns, CAPTION_FIELDS)
            return cls(("", found, "")) if found else cls(_split(default), default or None)
        if not rule.strip():
            raise UserError("The caption is empty.", fix="Give the name of a column or a template, or leave it out.")
        if rule in columns or not re.search(r"[{}\s]", rule):
            pieces: tuple[str, ...] = ("", rule, "")
        else:
            pieces = _split(rule)
        if unpaired := next((text for text in pieces[::2] if "{" in text or "}" in text), None):
            raise UserError(
                f"The caption template {rule!r} has a brace without its partner, near {unpaired.strip()!r}.",
                fix="Put the name of each column between { and }.",
            )
        names = {name: _match(name, columns, where, rule) for name in pieces[1::2]}
        return cls(tuple(names[piece] if place % 2 else piece for place, piece in enumerate(pieces)), rule)

    @classmethod
    def settle_own(cls, rule: str | None, label_names: list[str], where: str) -> Caption:
        """Check a rule for a source without columns: all that is known are an item's own caption and its class."""
        return cls.settle(rule, ["caption", *(["label"] if label_names else [])], where)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns it is made from."""
        return self.pieces[1::2]

    @property
    def hashed(self) -> tuple[str, ...]:
        """What a fingerprint takes in: nothing if the user gave no rule, so that those of old stay as they are."""
        return () if self.rule is None else ("caption", self.rule)

    def text(self, row: Mapping[str, object], where: str) -> str:
        """Make the caption of one item."""
        pieces = enumerate(self.pieces)
        return "".join([self.word(row.get(piece), where) if place % 2 else piece for place, piece in pieces])

    def own_text(self, caption: str, label_names: list[str], label: int, where: str) -> str:
        """Make the caption of one item of a source without columns."""
        if self.rule is None:
            return caption
        return self.text({"caption": caption, "label": label_names[label] if label_names else None}, where)

    def word(self, value: object, where: str) -> str:
        """Return the text of a cell: none if it is empty; numbers count as text only in columns that the user names."""
        if self.rule is not None and isinstance(value, int | float):
            return "" if value != value else str(value)  # pandas writes missing values as NaN
        return caption_text(value, where)


def _split(template: str) -> tuple[str, ...]:
    return tuple(_FIELD.split(template))


def _match(name: str, columns: list[str], where: str, rule: str) -> str:
    """Return the column of a name, written as it is or with other capitals."""
    if name in columns:
        return name
    alike = [column for column in columns if column.casefold() == name.strip().casefold()]
    if len(alike) == 1:
        return alike[0]
    what = f"a caption of one word, {rule!r}, names a column" if rule == name else f"the caption {rule!r} asks for it"
    raise UserError(
        f"There is no column {name!r} in {where}, and {what}.",
        f"Its columns are {', '.join(columns) or 'none'}. {nearest(name, columns)}".strip(),
        "Name one of them, or write a template such as 'A photo of {label}'.",
    )
