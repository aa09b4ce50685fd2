"""Reports of a partition's skew, for the terminal and as JSON."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_sim.base.brief import Text, brief
from fedjax_sim.partition.measures import (
    c_score,
    client_emds,
    client_jsds,
    client_kls,
    emd,
    jsd,
    kl,
    size_statistics,
)
from fedjax_sim.partition.samplers import expected_emd
from fedjax_sim.partition.table import Partition, label_table, partition_hash


@dataclass(frozen=True, eq=False)
class SkewReport:
    """Report of a partition's skew; only of sizes if there is one class, or no classes.

    :func:`fedjax_sim.partition.draw_partition` and :func:`fedjax_sim.partition.draw_skew` draw the
    tables of reports.

    Attributes:
        name: name of the partition.
        hash: hash of the partition, see :func:`fedjax_sim.partition.partition_hash`.
        table: ``int64[N, M]``, samples of each client and class.
        expected_emd: EMD by the sampler's formula, for balanced classes and many samples; None if
            there is no formula.
    """

    name: str
    hash: str
    table: NDArray[np.int64]
    expected_emd: float | None

    def __repr__(self) -> str:
        measured = Text(f"{emd(self.table):.3f}") if self.table.shape[1] > 1 else None
        table = Text(self.counted())
        entries = {"name": self.name, "table": table, "emd": measured, "hash": self.hash[:12]}
        return brief(self, entries)

    def text(self) -> str:
        """Returns a table of each measure, pooled (weighted by n_k) and over the clients."""
        sizes = size_statistics(self.table.sum(axis=1))
        classes = self.table.shape[1]
        total = int(self.table.sum())
        rows: list[Any] = [("samples", total, self.table.sum(axis=1), ",.0f")]
        if classes > 1:
            occurring = (self.table.sum(axis=0) > 0).sum()
            rows = [
                ("EMD", emd(self.table), client_emds(self.table), ",.3f"),
                ("KL [nats]", kl(self.table), client_kls(self.table), ",.3f"),
                ("JSD [nats]", jsd(self.table), client_jsds(self.table), ",.3f"),
                *rows,
                ("classes", occurring, (self.table > 0).sum(axis=1), ",.0f"),
            ]
        columns = ("mean", "std", "min", "median", "max")
        lines = [
            f"{self.name or 'partition'}: {self.counted()}, sha256 {self.hash[:12]}",
            f"{'':12}{'pooled':>9}" + "".join(f"{column:>9}" for column in columns),
        ]
        for name, pooled, values, form in rows:
            # Means and standard deviations of counts have a decimal.
            part = form.replace(".0f", ".1f")
            cells = [
                format(pooled, form),
                format(values.mean(), part),
                format(values.std(), part),
                *(format(f(values), form) for f in (np.min, np.median, np.max)),
            ]
            lines.append(f"{name:12}" + "".join(f"{cell:>9}" for cell in cells))
        score = f"C-score {c_score(self.table):.3f} (the mean EMD), " if classes > 1 else ""
        lines.append(f"{score}Gini of the sizes {sizes.gini:.3f}")
        if self.expected_emd is not None:
            lines.append(
                f"expected EMD {self.expected_emd:.3f} for balanced classes and many samples"
            )
        return "\n".join(lines)

    def counted(self) -> str:
        """Returns the numbers of samples, classes and clients as text."""
        clients, classes = self.table.shape
        of_classes = f" of {classes} classes" if classes > 1 else ""
        return f"{self.table.sum():,} samples{of_classes} at {clients:,} clients"

    def as_dict(self) -> dict[str, Any]:
        """Returns all numbers, ready for ``json.dumps``; only of sizes if there is one class."""
        clients, classes = self.table.shape
        numbers: dict[str, Any] = {
            "name": self.name,
            "hash": self.hash,
            "clients": clients,
            "samples": int(self.table.sum()),
            "sizes": size_statistics(self.table.sum(axis=1))._asdict(),
            "per_client": {"table": self.table.tolist()},
        }
        if classes == 1:
            return numbers
        skews = {"emd": client_emds, "kl": client_kls, "jsd": client_jsds}
        by_client = {name: of(self.table).tolist() for name, of in skews.items()}
        numbers["per_client"] = by_client | numbers["per_client"]
        return numbers | {
            "classes": classes,
            "expected_emd": self.expected_emd,
            "emd": emd(self.table),
            "c_score": c_score(self.table),
            "kl": kl(self.table),
            "jsd": jsd(self.table),
        }


def skew_report(labels: ArrayLike, partition: Partition, classes: int) -> SkewReport:
    """Measures the skew of a partition.

    Args:
        labels: ``int[n]``, labels of the pooled training arrays, in 0 … M - 1.
        partition: the partition; no client may be empty.
        classes: M.

    Returns:
        The report, with the expected EMD of the sampler in the partition's name.

    Raises:
        ValueError: if a label is not in 0 … M - 1, or a client has no samples with a label.

    Example:
        >>> from fedjax_sim.partition import parse_sampler
        >>> y = np.arange(4000) % 10
        >>> report = skew_report(y, parse_sampler("ll(2, 0.875)")[1](y, 20, 0), 10)
        >>> print(report.text())
        ll(2, 0.875): 4,000 samples of 10 classes at 20 clients, sha256 6ff9dfc679a1
                       pooled     mean      std      min   median      max
        EMD             1.401    1.401    0.008    1.380    1.400    1.410
        KL [nats]       1.150    1.150    0.014    1.112    1.148    1.166
        JSD [nats]      0.277    0.277    0.004    0.266    0.276    0.281
        samples         4,000    200.0      0.0      200      200      200
        classes            10     10.0      0.0       10       10       10
        C-score 1.401 (the mean EMD), Gini of the sizes 0.000
        expected EMD 1.400 for balanced classes and many samples
    """
    table = label_table(labels, partition, classes)
    empty = np.flatnonzero(~table.any(axis=1))
    if empty.size:
        hint = " with a label" if partition.sizes[empty].all() else ""
        raise ValueError(
            f"partition must give every client a sample{hint}, got none for {empty.tolist()}"
        )
    if classes == 1:
        return SkewReport(partition.name, partition_hash(partition), table, None)
    try:
        # "emd(1.4): ll(2, 0.875)" is a target and the setting that reached it.
        expected = expected_emd(
            partition.name.partition(":")[0], int(np.count_nonzero(table.any(axis=0))), len(table)
        )
    except ValueError:  # a partition may have any name
        expected = None
    return SkewReport(partition.name, partition_hash(partition), table, expected)
