"""Evaluation of generated images: features, metrics against a reference, report.json and its page."""

from muralist.core.callable_package import make_callable

make_callable(__name__)
