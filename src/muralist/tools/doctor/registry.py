"""All checks in the order of the report, and the page docs/troubleshooting.md that is generated from them.

python -m muralist.tools.doctor.registry > docs/troubleshooting.md
"""

from __future__ import annotations

from muralist.tools.doctor import environment, hardware, inputs, resources
from muralist.tools.doctor.check import Check

CHECKS: list[Check] = [
    hardware.check_gpus,
    hardware.check_driver,
    hardware.check_gpus_answer,
    hardware.check_bf16,
    resources.check_memory,
    resources.check_disk_space,
    resources.check_writable,
    inputs.check_settings,
    inputs.check_run_folder,
    inputs.check_batch,
    inputs.check_learning_rate,
    inputs.check_rows,
    inputs.check_output_folder,
    inputs.check_packages,
    inputs.check_model,
    inputs.check_prompts,
    inputs.check_data,
    environment.check_port,
    environment.check_slurm,
    environment.check_wandb,
    environment.check_collectives,
    environment.check_clocks,
]

_HEAD = """# Troubleshooting

`muralist doctor` checks whether a job can run here, before it starts or after it failed:

```bash
muralist doctor                                         # this machine
muralist doctor --config configs/base_config.yaml       # and a training: takes the flags of `muralist train`
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
    rows = [f"| {check.symptom} | [{check.name}](#{_anchor(check.name)}) |" for check in CHECKS]
    return "\n".join([_HEAD, "| symptom | check |", "|---|---|", *rows, "", *map(_section, CHECKS)])


def _section(check: Check) -> str:
    jobs = "every job" if "machine" in check.jobs else " and ".join(sorted(check.jobs, reverse=True))
    when = f"For {jobs}" + (", at every start." if check.at_start else ".")
    where = " Each machine of a run has its own result." if check.per_machine else ""
    explanation = f"- **Otherwise:** {check.why}\n- **Fix:** {check.fix}\n"
    return f"## {check.name}\n\n{check.description} {when}{where}\n\n{explanation}"


def _anchor(name: str) -> str:
    return name.lower().replace("&", "").replace(" ", "-")


if __name__ == "__main__":
    print(troubleshooting_page(), end="")
