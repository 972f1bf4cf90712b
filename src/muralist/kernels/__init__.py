"""Triton kernels and FP8 matmuls; kernels/ops.py has every fused operation of JiT in plain PyTorch as well."""
