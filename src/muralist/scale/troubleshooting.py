"""The page docs/troubleshooting.md, made of the doctor's checks, so that the two cannot drift apart.

python -m muralist.scale.troubleshooting > docs/troubleshooting.md
"""

from __future__ import annotations

from muralist.scale.checks.check import Check
from muralist.scale.checks.every import CHECKS

_HEAD = """# Troubleshooting

Something does not work, or should not be started before it is sure to work? Ask the doctor:

```bash
muralist doctor                                         # this machine
muralist doctor --config configs/base_config.yaml       # and a training: any flags of `muralist train` may follow
muralist doctor generate --prompts_csv prompts.csv --model_path MODEL --output_dir images      # and a generation
muralist launch --nproc 8 doctor train --config ...     # and the exchange between ranks; under torchrun and srun as well
```

It prints a line for each check: `ok`, `warning`, `failed` or `skipped`, what was seen, and for trouble why it matters
and what to do. `--json` prints the same for programs. The exit status is 1 if something failed. `--timeout 60` says how
long ranks that do not come are waited for. Checks marked *at every start* are made by `muralist train` and
`muralist generate` themselves, before anything is loaded.

This page is made of the checks (`make docs`); a test compares the two.
"""


def page() -> str:
    """The whole page."""
    rows = [f"| {check.trouble} | [{check.name}](#{_anchor(check.name)}) |" for check in CHECKS]
    table = "\n".join(["| trouble, as the guides name it | check |", "|---|---|", *rows])
    return "\n".join([_HEAD, table, "", *map(_section, CHECKS)])


def _section(check: Check) -> str:
    jobs = "every job" if "machine" in check.jobs else " and ".join(sorted(check.jobs, reverse=True))
    when = f"For {jobs}" + (", at every start." if check.quick else ".")
    where = " Each machine of a run has its own answer." if check.on_every_machine else ""
    return "\n".join(
        [
            f"## {check.name}",
            "",
            f"{check.what} {when}{where}",
            "",
            f"- **Otherwise:** {check.why}",
            f"- **What to do:** {check.remedy}",
            "",
        ]
    )


def _anchor(name: str) -> str:
    return name.lower().replace("&", "").replace(" ", "-")


if __name__ == "__main__":
    print(page(), end="")
