"""muralist: train diffusion transformers, generate images from prompt tables, evaluate them."""

__version__ = "0.2.0"
