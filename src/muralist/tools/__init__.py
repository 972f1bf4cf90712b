"""Tools around training and generation: launcher, doctor, estimate, pack, sweep, show."""
