"""Batch generation from a prompt table, on every GPU; the images do not depend on the number of GPUs."""
