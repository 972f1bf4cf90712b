"""Write docs/equality.md from measured differences to diffusers: python scripts/write_equality.py docs."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # for tests/

from tests.support.equality import CASES, PAGE, equality_page, measure
from tests.support.pipelines import build_pipeline


def main(docs: Path) -> None:
    """Measure every pipeline and write the page."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(case, build_pipeline(name, Path(folder))) for name, case in CASES.items()]
    (docs / PAGE).write_text(equality_page(rows), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
