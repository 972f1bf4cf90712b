"""Entry point: `python batch_generate_t2i_multigpu.py ...` is `muralist generate ...`."""

try:
    from muralist.cli import script
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}. Run `make setup`, then `source .venv/bin/activate`.") from None

if __name__ == "__main__":
    script("generate")
