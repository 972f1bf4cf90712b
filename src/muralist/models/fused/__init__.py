"""Triton kernels for what lies between a JiT's matrix products; models/jit_ops.py says in plain PyTorch what they are."""
