"""``python -m fedjax_sim``: which commands there are."""

from __future__ import annotations

from collections.abc import Sequence

from fedjax_sim.cli.commands import complain, enter
from fedjax_sim.cli.flags import Parser

PROGRAM = "fedjax_sim"
COMMANDS = """\
python -m fedjax_sim.bench        compares methods on the same clients
python -m fedjax_sim.partition    partitions samples over clients and reports the skew
python -m fedjax_sim.study FILE   tunes and compares methods listed in a TOML file
python -m fedjax_sim.report DIR   compares finished runs on one page

All have --help; bench --list prints all methods. Without flags, bench runs a small example."""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the commands.

    Args:
        argv: its arguments; None: the arguments of this process.

    Returns:
        The exit status: 0, 2 for any argument but ``--help`` and ``--version``.
    """
    parser = Parser(prog=f"python -m {PROGRAM}", add_help=False)
    parser.add_argument("-h", "--help", action="store_true")
    try:
        parser.parse_args(argv)
    except ValueError as error:
        return complain(PROGRAM, f"error: {error}: name a command, such as fedjax_sim.bench", 2)
    print(COMMANDS)
    return 0


if __name__ == "__main__":
    enter(main)
