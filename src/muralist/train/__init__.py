"""Training: the trainer, one step, parallelism, checkpoints, samples, metrics, watchdog."""

from muralist.core.callable_package import make_callable

make_callable(__name__)
