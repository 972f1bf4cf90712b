"""Scores of generated pictures, and a page to look at them."""
