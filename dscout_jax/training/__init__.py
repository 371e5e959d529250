"""Training of drafters: optimiser, train step, checkpoints, metrics and the loop."""
