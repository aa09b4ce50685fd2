"""Tables and figures of papers compared with ours: `python -m benchmarks.reproduce.NAME`."""
