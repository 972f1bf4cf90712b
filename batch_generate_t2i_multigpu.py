"""python batch_generate_t2i_multigpu.py --prompts_csv ... --output_dir ... --model_path ... is `muralist generate`."""

from muralist.cli import script

if __name__ == "__main__":
    script("generate")
