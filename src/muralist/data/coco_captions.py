"""MS-COCO's captions as a table of prompts: one JSON file, in which every annotation is a row."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from muralist.data.prompt_records import Cells, Record
from muralist.data.recent import Recent
from muralist.errors import UserError

_USED = ("image_id", "caption")  # an annotation's own id would only name pictures that nobody can find again


class CaptionRecords:
    """The annotations of a file such as captions_val2014.json, in its order; places are their numbers.

    JSON has to be read as a whole, so captions are kept, some 50 MB for MS-COCO; a pickled copy reads the file again.
    """

    unit = "annotation"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: list[str] = []
        self._rows: Recent[list[Cells]] = Recent(1)

    def stream(self) -> Iterator[Record]:
        """Yield all annotations in order."""
        for number, cells in enumerate(self._all()):
            yield Record(number, number + 1, cells)

    def read(self, places: Iterable[int]) -> list[Cells]:
        """Return the annotations of some numbers."""
        rows = self._all()
        return [rows[place] for place in places]

    def _all(self) -> list[Cells]:
        return self._rows.get(0, self._load)

    def _load(self, _: int) -> list[Cells]:
        try:
            content = json.loads(self.path.read_text(encoding="utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{self.path} is not JSON: {error}.", fix="Was it copied completely?") from error
        annotations = content.get("annotations") if isinstance(content, dict) else None
        if not isinstance(annotations, list) or not all(isinstance(row, dict) for row in annotations):
            raise UserError(
                f"{self.path} is not a file of MS-COCO captions.",
                "Such a file is an object with a list of annotations, each with an image_id and a caption.",
                "Save other prompts as .jsonl, one object with a prompt per line.",
            )
        return [{name: row[name] for name in _USED if name in row} for row in annotations]
