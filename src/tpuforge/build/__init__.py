"""Stage 2: locks become wheels, fetched by digest or built from source."""
