"""``python -m fedjax_sim.partition``, see :mod:`fedjax_sim.cli.partitioning`."""

from fedjax_sim.cli.commands import enter
from fedjax_sim.cli.partitioning import command

if __name__ == "__main__":
    enter(command)
