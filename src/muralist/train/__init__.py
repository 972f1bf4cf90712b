"""The training loop and its parts: schedule, EMA, checkpoints, samples, monitors."""
