"""Tables and figures of papers beside ours: `python -m benchmarks.reproduce.NAME`."""
