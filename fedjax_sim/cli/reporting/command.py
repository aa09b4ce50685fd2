"""``python -m fedjax_sim.report``: the command, and the folder that it writes."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedjax_sim.base.words import counted
from fedjax_sim.cli.commands import complain, plain
from fedjax_sim.cli.flags import Parser
from fedjax_sim.cli.loading import SavedRun
from fedjax_sim.cli.machine import folder_name
from fedjax_sim.cli.reporting.compare import Group, grouped
from fedjax_sim.cli.reporting.contents import sections, summaries
from fedjax_sim.cli.reporting.folders import is_readable
from fedjax_sim.cli.reporting.formats import comma_separated, latex_of, measurements
from fedjax_sim.cli.reporting.page import html, text
from fedjax_sim.cli.reporting.read import Reading, no_score, read
from fedjax_sim.cli.reporting.wide import Wide, wides

PROGRAM = "fedjax_sim.report"
LEDGER = "report.json"
SETTING = "partition"
"""The setting whose values are the columns of ``--wide``, if there is no other."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns:
        The exit status: 0, 2 for bad input, 130 for Ctrl-C.
    """
    try:
        given = _parser().parse_args(sys.argv[1:] if argv is None else argv)
        if given.wide and is_readable(Path(given.wide)):  # it stands before the folders
            given.folders, given.wide = [given.wide, *given.folders], ""
        if not given.folders:
            raise ValueError("name a folder of a run or of a study: DIR")
        folders = [Path(text) for text in given.folders]
        reading = read(folders)
        _check_alike(reading.runs)
        groups = grouped(reading.trials, given.baseline, reading.baseline)
        setting = (
            reading.columns if given.wide is None else given.wide or reading.columns or SETTING
        )
        tables = [] if setting is None else wides(reading, setting, given.baseline)
        out = folders[0] / "report" if given.out is None else Path(given.out)
        if given.out is None and out.is_symlink():
            raise ValueError(f"{out} is a link: name the folder of the report by --out")
        earlier = own_files(out)
        try:
            write(reading, groups, tables, out, earlier)
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
        description="Sets runs side by side: report.html, one page that needs nothing else; "
        "report.md, table.tex, table.csv, and the pictures as .svg and .pdf. With --wide also the "
        "table of a paper.",
        epilog="Example: python -m fedjax_sim.report runs/a runs/b --baseline fedavg --out report",
    )
    parser.add_argument(
        "folders",
        nargs="*",
        metavar="DIR",
        type=folder_name,
        help="folder of a run of fedjax_sim.bench, or of a study: all its cells that are finished",
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
        help="the method that the others are compared with (default: the study's, or the first)",
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


def own_files(out: Path) -> dict[str, str]:
    """Returns the files of an earlier report in a folder, and their hashes.

    Raises:
        ValueError: if the path is not a folder.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; name a folder")
    try:
        found = json.loads((out / LEDGER).read_text(encoding="utf-8"))
        # Names alone: what is not of the next report is taken away.
        return {Path(name).name: str(sha) for name, sha in found["files"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"--out {out}: {LEDGER} is no list of a report's files") from error


def write(
    reading: Reading,
    groups: Sequence[Group],
    tables: Sequence[Wide],
    out: Path,
    earlier: dict[str, str],
) -> None:
    """Writes the report in place of an earlier one; nothing before all of it is made.

    Raises:
        ValueError: if the folder has a file of such a name that is another's, or was changed.
    """
    # On the same disk, so that files move there whole.
    near = next(path for path in out.absolute().parents if path.exists())
    with tempfile.TemporaryDirectory(dir=near, prefix=".") as aside:
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
        made = {path.name: _sha(path) for path in sorted(folder.iterdir())}
        for name in made.keys() | earlier.keys():
            there = out / name
            if there.exists() and earlier.get(name) != _sha(there):
                raise ValueError(
                    f"--out {out}: {name} is no file of an earlier report, or was changed since; "
                    "name another folder"
                )
        ledger = {"written by": PROGRAM, "files": made}
        (folder / LEDGER).write_text(json.dumps(ledger, indent=2) + "\n", encoding="utf-8")
        out.mkdir(parents=True, exist_ok=True)
        for name in earlier.keys() - made.keys():
            (out / name).unlink(missing_ok=True)
        for name in (*made, LEDGER):
            (folder / name).replace(out / name)


def _check_alike(runs: Mapping[str, SavedRun]) -> None:
    """Rejects tasks that cannot be compared; names the two runs."""
    (first, one), *others = runs.items()
    for name, other in others:
        ours, theirs = (saved.settings["task"].partition("(")[0] for saved in (one, other))
        if ours != theirs:
            raise ValueError(
                f"{first} is {ours}, and {name} is {theirs}: they must be of one task, each in a "
                "report of its own"
            )


def _sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _title(reading: Reading) -> str:
    if len(reading.runs) == 1:
        return f"Report of {next(iter(reading.runs))}"
    methods = {t.method for t in reading.trials}
    settings = {(t.method, t.algorithm) for t in reading.trials}
    tried = f" with {len(settings)} settings" * (len(settings) > len(methods))
    return f"Report of {counted(len(methods), 'method')}{tried} in {len(reading.runs)} runs"
