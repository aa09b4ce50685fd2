"""``python -m fedjax_sim``: which commands there are."""

from __future__ import annotations

from collections.abc import Sequence

from fedjax_sim.cli.commands import complain, enter
from fedjax_sim.cli.flags import Parser

PROGRAM = "fedjax_sim"
COMMANDS = """\
python -m fedjax_sim.bench        runs methods beside each other on the same clients
python -m fedjax_sim.partition    deals samples to clients, and measures and draws the skew
python -m fedjax_sim.study FILE   tunes and compares methods as a TOML file says
python -m fedjax_sim.report DIR   sets finished runs side by side on one page

Each has --help; bench has --list, of all methods. Without flags bench runs a small example."""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the commands.

    Args:
        argv: its arguments; None for those of this process.

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
