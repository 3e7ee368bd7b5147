"""The health suite and the benchmarks that travel inside every image.

Nothing here imports the machinery that built the image: the suite runs in a bare image with only
Python, torch and pytest. Modules import only the standard library at import time, so that the
static tier judges an image in which torch cannot even be loaded.
"""
