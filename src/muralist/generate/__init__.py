"""Batch generation from a prompt table, on every GPU; the images do not depend on the number of GPUs."""

from muralist.core.callable_package import make_callable

make_callable(__name__)
