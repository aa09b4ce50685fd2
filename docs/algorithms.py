"""Prints the page of the methods: ``python docs/algorithms.py > docs/algorithms.md``."""

from __future__ import annotations

from fedjax_sim.cli.catalogue import page

if __name__ == "__main__":
    print(page(), end="")
