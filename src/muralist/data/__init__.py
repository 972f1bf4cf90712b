"""Data sets, decoding, the order of samples, loading, and prompt tables."""
