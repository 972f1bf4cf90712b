"""Evaluation of generated images: features, metrics against a reference, report.json and its page."""
