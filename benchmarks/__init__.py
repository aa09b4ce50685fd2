"""Speed, robustness, and the tables and figures of papers: `python -m benchmarks.NAME`."""
