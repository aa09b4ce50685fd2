"""Shared style of all figures: colours, fonts and file formats."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from fedjax_sim.base.files import writing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Format = Literal["png", "pdf", "svg"]

# matplotlib's "petroff10": the ten-colour palette found by search to be most distinguishable with
# any colour blindness (Petroff 2021, arXiv:2107.02270). It has no green.
COLOURS = (
    "#3f90da",
    "#ffa90e",
    "#bd1f01",
    "#94a4a2",
    "#832db6",
    "#a96b59",
    "#e76300",
    "#b9ac70",
    "#717581",
    "#92dadd",
)
DASHES = ("-", "--", "-.", ":")
WIDTH = 7.2  # inches, the text width of a two-column page, so that 7 points print as 7
STYLE: Any = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.title_fontsize": 8,
    "legend.frameon": False,
    "figure.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.25,
    "pdf.fonttype": 42,  # TrueType, as publishers reject matplotlib's default, Type 3
    "svg.hashsalt": "fedjax_sim",  # for reproducible files
}


def line_style(number: int, variant: int = 0, variants: int = 1) -> dict[str, Any]:
    """Returns colour and dashes of a line, distinguishable in grey; variants are tints.

    >>> line_style(0), line_style(10)
    ({'color': '#3f90da', 'linestyle': '-'}, {'color': '#3f90da', 'linestyle': '-.'})
    >>> line_style(0, 1, 2)
    {'color': '#8cbce9', 'linestyle': '--'}
    """
    colour = COLOURS[number % len(COLOURS)]
    if variant:
        white = 0.8 * variant / variants  # the share of it in the tint
        parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
        colour = "#" + "".join(f"{round(part + white * (255 - part)):02x}" for part in parts)
    return {"color": colour, "linestyle": DASHES[(number + variant) % len(DASHES)]}


def literal(text: str) -> str:
    r"""Escapes a name for matplotlib: dollars are not formulas, and blanks are visible.

    >>> print(literal("cost in $"), literal(" "), literal("\n"), literal("_a"))
    cost in \$ ' ' '\n' '_a'
    """
    # Legends omit names that begin with "_".
    plain = text.isprintable() and text.strip() and not text.startswith("_")
    return (text if plain else repr(text)).replace("$", r"\$")


def picture_format(path: str | os.PathLike[str]) -> str:
    """Returns the format of a file by its suffix; raises ValueError if it is unsupported."""
    suffix = Path(path).suffix.removeprefix(".").lower()
    if suffix not in get_args(Format):
        allowed = ", ".join(f".{name}" for name in get_args(Format))
        raise ValueError(f"path must end in one of {allowed}, got {str(path)!r}")
    return suffix


@contextmanager
def picture(
    path: str | os.PathLike[str], width: float, height: float, title: str = ""
) -> "Iterator[Figure]":
    """Yields a figure of a size in inches, and saves it atomically when the block ends.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with picture(f"{folder}/p.svg", 2, 1) as figure:
    ...         _ = figure.subplots().plot([1, 2])
    ...     Path(folder, "p.svg").read_bytes()[:5]
    b'<?xml'
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    kind, place = picture_format(path), Path(path)
    date = {"png": None, "pdf": "CreationDate", "svg": "Date"}[kind]
    with rc_context(STYLE):
        figure = Figure(figsize=(width, height), dpi=200, layout="constrained")
        if title:
            figure.suptitle(literal(title))
        yield figure
        with writing(place) as file:
            figure.savefig(file, format=kind, metadata={date: None} if date else None)
