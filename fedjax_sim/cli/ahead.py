"""``--compile-for``: memory and operations of a command's programs on absent devices."""

from __future__ import annotations

from fedjax_sim.cli.build import Setup
from fedjax_sim.cli.config import Config
from fedjax_sim.cli.running import experiment_of, title
from fedjax_sim.engine.memory import MB
from fedjax_sim.engine.targets import ProgramReport

_COLUMNS = "{:<20}{:<9}{:>10}{:>14}{:>16}{:>10}{:>9}  {}"
_HEAD = ("algorithm", "program", "compile s", "arguments MB", "temporaries MB", "GFLOP", "GB", "")
NOTE = "of one device; GFLOP and GB read and written are of one pass through each loop, if XLA says"


def compile_all(config: Config, setup: Setup) -> None:
    """Compiles the programs of every algorithm; prints their memory and operations."""
    print(f"{title(config, setup)}, {setup.model_name}; {setup.execution.described}\n")
    print(_COLUMNS.format(*_HEAD).rstrip())
    for name in config.algorithms:
        programs = experiment_of(name, config, setup).runner().programs
        for program in programs.compiled_ahead():
            print(_row(name, program), flush=True)
    print(f"\n{NOTE}")


def _row(name: str, program: ProgramReport) -> str:
    """Formats a line of the table.

    >>> _row("fedavg", ProgramReport("start", 2.0, 10**6, 0, None, 2e9, {"all-gather": 2})).split()
    ['fedavg', 'start', '2.0', '1.0', '0.0', '-', '2.0', '2', 'all-gather']
    """
    collectives = ", ".join(f"{count} {kind}" for kind, count in program.collectives.items())
    giga = ("-" if v is None else f"{v / 1e9:.1f}" for v in (program.flops, program.accessed))
    sizes = (f"{size / MB:.1f}" for size in (program.arguments, program.temporaries))
    line = _COLUMNS.format(name, program.name, f"{program.seconds:.1f}", *sizes, *giga, collectives)
    return line.rstrip()
