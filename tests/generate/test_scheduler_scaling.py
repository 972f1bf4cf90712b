"""Nobody waits for a slow GPU or for expensive rows: the real scheduler and workers on a simulated clock."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from bench.scheduler_simulation import Case, simulate

from muralist.data.ledger_reader import read_lines


@pytest.mark.parametrize(
    ("slow", "costs"), [(4.0, np.ones_like), (1.0, lambda row: 1 + row % 4), (1.0, lambda row: np.where(row < 200, 1, 5))],
    ids=["a slow GPU", "expensive rows in one share", "expensive rows last"],
)  # fmt: skip
def test_all_workers_are_busy_to_the_end(tmp_path: Path, slow: float, costs: object) -> None:
    case = Case(rows=240, batch=2, seconds_per_image=60.0, workers=4, costs=costs, slow=slow)  # type: ignore[arg-type]
    outcome = simulate(case, tmp_path)
    assert (outcome.generated, outcome.duplicates) == (240, 0)
    ideal = 240 * 60.0 / (3 + 1 / slow)
    most_expensive = costs(np.arange(240)).max() / costs(np.arange(240)).mean() * 2 * 60.0 * slow  # type: ignore[operator]
    assert ideal < outcome.generating < ideal + most_expensive  # at most one batch beyond what the GPUs can do
    assert outcome.batches <= 123  # 120 full ones: what was left of the round_robin filled batches together


def test_every_worker_begins_with_its_own_share(tmp_path: Path) -> None:
    simulate(Case(rows=160, batch=4, seconds_per_image=60.0, workers=4, slow=2.0), tmp_path)
    makers = {line["index"]: int(line["gpu"]) for line in read_lines(tmp_path / "images" / "ledger.jsonl")}
    assert all(makers[row] == row % 4 for row in range(48))
    own = sum(maker == row % 4 for row, maker in makers.items())
    assert own < 160  # the slow one's last rows were made by others
