"""Entry point: `python batch_generate_t2i_multigpu.py ...` is `muralist generate ...` with this script's own defaults:
20 steps, guidance 7.5, 832 x 480 (`BatchScriptSettings` in muralist/settings/generate.py).
"""

try:
    from muralist.cli import batch_generate_script
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}. Run `make setup`, then `source .venv/bin/activate`.") from None

if __name__ == "__main__":
    batch_generate_script()
