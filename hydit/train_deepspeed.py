"""HunyuanDiT fine-tuning with the flags of the official script, or any of `muralist train`."""

try:
    from muralist.cli import script
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}. Run `make setup`, then `source .venv/bin/activate`.") from None

if __name__ == "__main__":
    script("hydit")
