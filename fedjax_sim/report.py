"""``python -m fedjax_sim.report``: compares runs, see :mod:`fedjax_sim.cli.reporting`."""

from fedjax_sim.cli.commands import enter
from fedjax_sim.cli.reporting.command import main

if __name__ == "__main__":
    enter(main)
