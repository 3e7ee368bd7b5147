"""Which operators of PyTorch run on a TPU: ``health operators`` (``docs/operators.md``)."""
