"""Stage 3: wheels and OS packages become container images, the same bytes every time."""
