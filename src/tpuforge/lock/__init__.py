"""Stage 1: pins and inputs become hash-locked requirement sets."""
