"""Training: the trainer, one step, parallelism, checkpoints, samples, metrics, watchdog."""
