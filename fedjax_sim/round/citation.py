"""BibTeX entries of an algorithm and its parts."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator
from importlib import resources

from fedjax_sim.base import Origin, origins
from fedjax_sim.round.algorithm import Algorithm


def cite(algorithm: Algorithm) -> str:
    """Returns BibTeX entries of the method and of every part that it uses.

    They are the links in the ``Source:`` of each docstring. A clause that ends in the name of a
    parameter in parentheses counts only if that parameter was set.

    Args:
        algorithm: the algorithm.

    Returns:
        The entries in the order of their use, without repetition.

    >>> import optax, fedjax_sim as fs
    >>> local = fs.local_sgd(fs.toy().objective, optax.sgd(0.1))
    >>> print(cite(fs.algorithms.scaffold(local, clients_per_round=5)).partition(",")[0])
    @inproceedings{karimireddy2020scaffold
    """
    found = [] if algorithm.origin is None else [Origin(algorithm.origin.factory, {})]
    for part in algorithm.parts.by_role().values():
        found += origins(part)
    keys = dict.fromkeys(key for origin in found for key in sources(origin))
    known = references()
    return "\n\n".join(dict.fromkeys(known[key] for key in keys if key in known))


def sources(origin: Origin) -> Iterator[str]:
    """Yields the links (or keys of works without one) of a call's sources."""
    text = inspect.getdoc(origin.factory) or ""
    section = re.search(r"^Source:(.*?)(?=\n\n|\n>>>|\Z)", text, re.M | re.S)
    options = set(inspect.signature(origin.factory).parameters)
    for clause in section[1].split(";") if section else ():
        limits = options.intersection(re.findall(r"\((\w+)\)", clause))
        if not limits or limits & origin.settings.keys():
            yield from re.findall(r"<([^<>\s]+)>", clause)


@functools.cache
def references() -> dict[str, str]:
    """Returns the entries of ``references.bib``, by link and by key."""
    text = resources.files("fedjax_sim.round").joinpath("references.bib").read_text("utf-8")
    entries: dict[str, str] = {}
    for entry in re.findall(r"^@.*?^}", text, re.M | re.S):
        key = re.match(r"@\w+\{([^,]+),", entry)
        link = re.search(r"^\s*url = \{([^}]*)\}", entry, re.M)
        assert key is not None
        entries[key[1]] = entry
        if link is not None:
            entries[link[1]] = entry
    return entries
