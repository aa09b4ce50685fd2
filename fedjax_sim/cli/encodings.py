"""Plain text in place of characters that an output's encoding lacks, such as ε under cp1252."""

from __future__ import annotations

import codecs
import io
import re
import sys
import unicodedata

_PLAIN = {
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
    name = unicodedata.name(character, "")
    if letter := re.fullmatch(r"GREEK (SMALL|CAPITAL) LETTER (FINAL )?(\w+)", name):
        word = letter[3].replace("LAMDA", "LAMBDA")  # Unicode's spelling
        return word.lower() if letter[1] == "SMALL" else word.capitalize()
    base = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return base or ("" if unicodedata.combining(character) else "?")
