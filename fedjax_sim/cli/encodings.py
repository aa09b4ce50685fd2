"""Plain text in place of characters that an output's encoding lacks, such as ε under cp1252."""

from __future__ import annotations

import codecs
import io
import sys
import unicodedata

_LETTERS = [  # in Unicode's order, with the sigma that ends a word
    "alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa",
    "lambda", "mu", "nu", "xi", "omicron", "pi", "rho", "sigma", "sigma", "tau", "upsilon", "phi",
    "chi", "psi", "omega",
]  # fmt: skip
_PLAIN = {
    **{chr(0x3B1 + i): name for i, name in enumerate(_LETTERS)},
    **{chr(0x391 + i): name.capitalize() for i, name in enumerate(_LETTERS)},
    "±": "+-", "×": "x", "·": "*", "−": "-", "–": "-", "→": "->", "≤": "<=", "≥": ">=",
    "¹": "^1", "²": "^2", "³": "^3", "½": "1/2", "µ": "u",
    "⌈": "ceil(", "⌉": ")", "⌊": "floor(", "⌋": ")",
}  # fmt: skip


def write_plainly() -> None:
    """Lets stdout and stderr write any character, whatever their encoding."""
    codecs.register_error("fedjax_sim.plain", _replace)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="fedjax_sim.plain")


def _replace(error: UnicodeError) -> tuple[str, int]:
    """Replaces what could not be encoded; an error handler for ``codecs``."""
    assert isinstance(error, UnicodeEncodeError)
    return "".join(map(_plain, error.object[error.start : error.end])), error.end


def _plain(character: str) -> str:
    """Returns ASCII for a character; nothing for an accent alone.

    >>> [_plain(c) for c in ("ε", "Δ", "±", "é", "…", chr(0x303), "◆")]
    ['epsilon', 'Delta', '+-', 'e', '...', '', '?']
    """
    if character in _PLAIN:
        return _PLAIN[character]
    base = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return base or ("" if unicodedata.combining(character) else "?")
