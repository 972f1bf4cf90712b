"""Data sets on disk, one module per format; `registry` picks the format of a path."""
