"""Shared by every package: errors, run folders, random numbers, progress, formatting."""
