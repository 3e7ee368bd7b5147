"""Stage 4: images are run and judged by the suite that travels in them."""
