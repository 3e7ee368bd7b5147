"""The fixtures of tests on a real engine; what they are is told in ``tests/bake_support.py``."""

from bake_support import engine, image

__all__ = ["engine", "image"]
