"""Cost of a training run on devices that this machine lacks: memory, FLOPs, communication, and a bound on its time."""
