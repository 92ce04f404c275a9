"""Measurements of parts of miles, each a module to run: `python -m benchmarks.NAME`."""
