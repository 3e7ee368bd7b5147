"""The simulated TPU: the wrapper's source, the programs that run on it, and its known limits."""
