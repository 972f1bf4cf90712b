"""Thousands of pictures from a table of prompts, on every GPU, each the same whatever the number of GPUs."""
