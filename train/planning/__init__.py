"""What a training run costs on devices that are not at hand: memory, FLOPs, communication, and a bound on its time."""
