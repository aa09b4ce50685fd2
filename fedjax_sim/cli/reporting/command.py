"""``python -m fedjax_sim.report``: the command and its folder."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fedjax_sim.base.words import counted
from fedjax_sim.cli.commands import complain, plain
from fedjax_sim.cli.flags import Parser
from fedjax_sim.cli.machine import folder_name
from fedjax_sim.cli.reporting.compare import Group, grouped
from fedjax_sim.cli.reporting.contents import sections, summaries
from fedjax_sim.cli.reporting.formats import comma_separated, latex_of, measurements
from fedjax_sim.cli.reporting.page import html, text
from fedjax_sim.cli.reporting.read import Reading, no_score, read_folders
from fedjax_sim.cli.reporting.wide import Wide, wides

PROGRAM = "fedjax_sim.report"
OWN_FILE = re.compile(
    r"report\.(html|md)|(table|wide)\.(tex|csv)"
    r"|(curves|clients|ranks|partition)(_\d+|_all)*\.(svg|pdf|png)"
)
"""The names of a report's files; those of an earlier report are removed."""
SETTING = "partition"
"""The setting whose values are the columns of ``--wide``, if there is no other."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns:
        The exit status: 0, 2 for bad input, 130 for Ctrl-C.
    """
    try:
        given = _parser().parse_args(sys.argv[1:] if argv is None else argv)
        folders = [Path(text) for text in given.folders]
        reading = read_folders(folders)
        groups = grouped(reading.trials, given.baseline, reading.baseline)
        # Other runs may lack the setting of a study's columns, or have a method in one of them too.
        implied = reading.columns if len(folders) == 1 else None
        setting = implied if given.wide is None else given.wide or reading.columns or SETTING
        tables = [] if setting is None else wides(reading, setting, given.baseline)
        out = folders[0] / "report" if given.out is None else Path(given.out)
        try:
            write(reading, groups, tables, out)
        except OSError as error:
            raise ValueError(f"--out {out}: {error.strerror or error}") from error
    except (ValueError, OSError) as error:
        return complain(PROGRAM, f"error: {plain(error)}", 2)
    except KeyboardInterrupt:
        return complain(PROGRAM, "stopped; nothing was written", 130)
    print(f"{_title(reading)}: {out / 'report.html'}")
    if reading.unscored:
        print(no_score(reading.unscored))
    for what in reading.unfinished:
        print(f"not finished: {what}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=f"python -m {PROGRAM}",
        description="Compares runs: writes report.html, a self-contained page; report.md, "
        "table.tex and table.csv; and the pictures as .svg and .pdf. With --wide also the "
        "table of a paper.",
        epilog="Example: python -m fedjax_sim.report runs/a runs/b --baseline fedavg --out report",
    )
    parser.add_argument(
        "folders",
        nargs="+",
        metavar="DIR",
        type=folder_name,
        help="folder of a run of fedjax_sim.bench, or of a study for all of its finished cells",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=folder_name,
        help="folder of the report (default: report in the first DIR)",
    )
    parser.add_argument(
        "--baseline",
        metavar="NAME",
        help="the method with which the others are compared (default: the study's, or the first)",
    )
    parser.add_argument(
        "--wide",
        metavar="SETTING",
        nargs="?",
        const="",
        help="the table of a paper, wide.tex and wide.csv: methods by the values of a setting, "
        "with significant differences and average ranks (without SETTING: from the study's "
        f"[table], or {SETTING})",
    )
    return parser


def write(reading: Reading, groups: Sequence[Group], tables: Sequence[Wide], out: Path) -> None:
    """Writes the report over an earlier one, after everything has been made.

    Raises:
        ValueError: if the folder has other files and no report.
    """
    if out.is_dir() and any(out.iterdir()) and not (out / "report.html").exists():
        raise ValueError(f"--out {out} has other files, and no report: name a new folder")
    with tempfile.TemporaryDirectory() as aside:
        folder = Path(aside)
        title, found = _title(reading), sections(reading, groups, tables, folder)
        texts = {
            "report.html": html(title, found, folder),
            "report.md": text(title, found),
            "table.tex": latex_of(summaries(reading, groups)),
            "table.csv": comma_separated([row for group in groups for row in measurements(group)]),
        }
        if tables:
            texts["wide.tex"] = latex_of([(w.title, w.table(), w.note) for w in tables])
            texts["wide.csv"] = comma_separated([row for w in tables for row in w.numbers()])
        for name, content in texts.items():
            (folder / name).write_text(content, encoding="utf-8")
        out.mkdir(parents=True, exist_ok=True)
        for path in out.iterdir():
            if OWN_FILE.fullmatch(path.name):
                path.unlink()
        for path in folder.iterdir():
            shutil.copy(path, out)


def _title(reading: Reading) -> str:
    if len(reading.runs) == 1:
        return f"Report of {next(iter(reading.runs))}"
    methods = {t.method for t in reading.trials}
    settings = {(t.method, t.algorithm) for t in reading.trials}
    tried = f" with {len(settings)} settings" * (len(settings) > len(methods))
    return f"Report of {counted(len(methods), 'method')}{tried} in {len(reading.runs)} runs"
