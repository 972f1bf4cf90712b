"""Write docs/troubleshooting.md from the checks of `muralist doctor`: python scripts/write_troubleshooting.py docs."""

from __future__ import annotations

import sys
from pathlib import Path

from muralist.tools.doctor.command import CHECKS

_HEAD = """# Troubleshooting

`muralist doctor` checks whether a job can run here, before it starts or after it failed:

```bash
muralist doctor                                         # this machine
muralist doctor --config base_config.yaml       # and a training: takes the flags of `muralist train`
muralist doctor generate --prompts_csv prompts.csv --model_path MODEL --output_dir images      # and a generation
muralist launch --nproc 8 doctor train --config ...     # and the collectives of all ranks; also under torchrun and srun
```

The doctor prints one line per check: `ok`, `warning`, `failed` or `skipped`, and the result. Problems come with the
reason and a fix. `--json` prints the same for programs. The exit status is 1 if a check failed. `--timeout 60` sets how
many seconds to wait for missing ranks. `muralist train` and `muralist generate` run the checks marked *at every start*
themselves, before they load anything.

This page is generated from the checks (`make docs`); a test compares the two.
"""


def troubleshooting_page() -> str:
    """Return the page in Markdown."""
    rows, sections = [], []
    for check in CHECKS:
        anchor = check.name.lower().replace("&", "").replace(" ", "-")
        rows.append(f"| {check.symptom} | [{check.name}](#{anchor}) |")
        jobs = "every job" if "machine" in check.jobs else " and ".join(check.jobs)
        when = f"For {jobs}" + (", at every start." if check.at_start else ".")
        where = " Each machine of a run has its own result." if check.per_machine else ""
        explanation = f"- **Otherwise:** {check.why}\n- **Fix:** {check.fix}\n"
        sections.append(f"## {check.name}\n\n{check.description} {when}{where}\n\n{explanation}")
    return "\n".join([_HEAD, "| symptom | check |", "|---|---|", *rows, "", *sections])


if __name__ == "__main__":
    Path(sys.argv[1], "troubleshooting.md").write_text(troubleshooting_page())
