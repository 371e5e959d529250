"""Row 0: kernels of our own for the few shapes that XLA's CPU backend handles badly."""
