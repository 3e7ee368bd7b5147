"""Stage 5: what the stages left behind becomes one report."""
