"""Prints the page of the methods: ``python docs/algorithms.py > docs/algorithms.md``."""

from __future__ import annotations

import re
import textwrap

from composition import own_parts

from fedjax_sim.algorithms import ALGORITHMS
from fedjax_sim.cli.catalogue import Method, describe_method

ASKED = {
    "ozdayi": "--server-fraction 0.05",
    "fltrust": "--server-fraction 0.05",
    "zeno": "--server-fraction 0.05",
    "feddf": "--server-fraction 0.05",
    "semifl": "--server-fraction 0.05 --labelled 0",
    "fedmd": "--server-fraction 0.05",
    "fedbn": "--model fashion_cnn",
    "fedcs": '--clock "simulated(tiers(1, 2, 10), deadline=60)"',
    "hybrid_fl": '--clock "simulated(tiers(1, 2, 10), deadline=60)" --server-fraction 0.01',
    "tifl": '--clock "tiers(1, 2, 10)"',
    "oort": '--clock "tiers(1, 2, 10)"',
}
"""Flags that the command requires for some methods."""

BIBLIOGRAPHY = "../fedjax_sim/round/references.bib"
HEAD = """\
# Methods

Generated from the docstrings by `python docs/algorithms.py > docs/algorithms.md`.

There are N clients. In each round, a cohort U of m clients (`--clients-per-round`) trains: client
k, with n_k samples of M classes, receives the server model w and trains it to w_k in T_k minibatch
steps, which are E epochs in batches of B at learning rate η. F_k is the client's mean loss, F_b the
mean loss of a minibatch.

Each method is one `compose(...)`. The tables show the parts that differ from FedAvg's, with the
method's defaults for 10 clients a round and 10 classes. `local` and `objective` are yours,
`<optax>` is an optax optimiser. A part that an option adds stands below the others, with that
option.
The [glossary](glossary.md) explains the roles.

On the command line, options are flags, which apply to every method of the run that has them, or
settings of one method: `--algo "fedprox(mu=0.1)"`. In Python,
`fs.algorithms.NAME(local, clients_per_round=10).replace(aggregator=...)` exchanges a part.

[Another page](papers.md) lists the methods of the five papers, with what is not included.

| method | what it does | paper |
| --- | --- | --- |"""


def page() -> str:
    """Returns the text of ``docs/algorithms.md``."""
    methods = [describe_method(name) for name in ALGORITHMS if name in ALGORITHMS.own]
    lines = [HEAD]
    lines += [
        _row(f"[`{m.name}`](#{_anchor(_title(m))})", _markdown(m.summary), m.paper) for m in methods
    ]
    for m in methods:
        lines += ["", f"## {_title(m)}", "", _markdown(f"{m.summary}\n\n{m.body}".rstrip())]
        lines += ["", *_parts_table(m.name)]
        lines += ["", "| option | default | description |", "| --- | --- | --- |"]
        lines += [
            _row(f"`{name}`", default or "all", text) for name, (default, text) in m.options.items()
        ]
        lines += ["", f"Traffic per round: {_markdown(m.traffic)}."]
        lines += ["", f"Source: {_markdown(m.source)}"]
        lines += ["", "```sh", command(m.name), "```"]
        lines += ["", "```python", *m.example.splitlines(), "```"] if m.example else []
        lines += ["", _markdown(m.note)] if m.note else []
    return "\n".join(lines) + "\n"


def _title(method: Method) -> str:
    """Returns the method's name in its paper."""
    return method.summary.partition(":")[0]


def _anchor(heading: str) -> str:
    """Returns what GitHub and the site link to a heading by."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def command(name: str) -> str:
    """Returns the command that runs a method.

    >>> command("fedbn")
    'python -m fedjax_sim.bench --algo fedbn --model fashion_cnn'
    """
    return f"python -m fedjax_sim.bench --algo {name} {ASKED.get(name, '')}".rstrip()


def _parts_table(name: str) -> list[str]:
    lines = ["| part | code | what it does |", "| --- | --- | --- |"]
    for role, parts in own_parts(name).items():
        for i, part in enumerate(parts):
            first = f"with `{part.option}`" if part.option else role if i == 0 else ""
            lines.append(_row(first, f"`{part.code}`", _markdown(part.meaning)))
    return lines


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _markdown(text: str) -> str:
    """Converts reStructuredText of docstrings to Markdown."""
    blocks = re.split(r"\n{2,}", text)
    out = []
    for block in blocks:
        if block.lstrip().startswith(".. math::"):
            block = "$$\n" + textwrap.dedent(block.split("::", 1)[1]).strip() + "\n$$"
        block = re.sub(r":math:`([^`]*)`", r"$\1$", block)
        block = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", block)
        block = re.sub(r"<(\w+)>", rf"([\1]({BIBLIOGRAPHY}))", block)  # a tag to Markdown
        out.append(block.replace("``", "`"))
    return "\n\n".join(out)


if __name__ == "__main__":
    print(page(), end="")
