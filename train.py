"""Guide 1 and 2's entry point: `python train.py ...` is `muralist train ...`."""

from muralist.cli import script

if __name__ == "__main__":
    script("train")
