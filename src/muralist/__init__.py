"""muralist: train diffusion transformers, watch them learn, mass-produce images from them and score the result."""

__version__ = "0.1.0"
