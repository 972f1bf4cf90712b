"""`muralist doctor`: checks of the machine (hardware.py), of the job (job.py) and of the collectives."""
