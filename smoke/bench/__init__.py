"""The benchmarks that travel inside every image: imports, steps and compiles, each apart."""
