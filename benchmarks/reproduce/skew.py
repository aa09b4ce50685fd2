"""The skew tables and figures of two papers, beside what our samplers give.

    python benchmarks/reproduce/skew.py --data-dir DATA

Table I of RADFed (Xue, Klabjan, Luo) for the data sets that are there; Figures 3.1 to 3.3 and
Tables 4.3 and 5.1 of Cornelis' thesis, which need no data. Prints tables in markdown; writes
skew.json and four pictures. The figures' curves have no printed numbers: what the thesis says of
them in words stands beside ours in `benchmarks/results/skew.md`.
"""

import argparse
import datetime
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import skew_pictures
import skew_radfed
import skew_thesis

from fedjax_sim.report import versions

BENCHMARKS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(BENCHMARKS))

from speed import machine  # noqa: E402


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data-dir", help="folder of the data (default: $FEDJAX_SIM_DATA_DIR, else TFDS's own)")
    add(
        "--seeds", type=int, default=10, help="partitions of each kind; of Dirichlet ten times more"
    )
    add("--out", type=Path, default=BENCHMARKS / "results" / "skew", help="folder of the results")
    return parser.parse_args(argv)


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Records as a table; numbers with up to three decimals."""

    def cell(value: Any) -> str:
        return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)

    lines = [list(rows[0]), ["---"] * len(rows[0]), *([cell(v) for v in r.values()] for r in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Deal everything, print the tables, write the numbers and the pictures."""
    args = parse(argv)
    started = time.time()
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    args.out.mkdir(parents=True, exist_ok=True)
    print("RADFed, Table I", file=sys.stderr)
    rows = skew_radfed.table_1(args.data_dir, args.seeds)
    print("thesis, Figures 3.1 to 3.3", file=sys.stderr)
    draws = skew_thesis.dirichlet_draws(10 * args.seeds)
    settings, shares = skew_thesis.table_4_3(args.seeds), skew_thesis.table_5_1(args.seeds)
    found = {
        "Figure 3.1": skew_thesis.printed(draws),
        "Figures 3.2 and 3.3": skew_thesis.clients_of_dirichlet(draws),
        "Table 4.3": settings,
        "Table 5.1": shares,
    }
    print(f"## RADFed, Table I\n\n{skew_radfed.markdown(rows)}")
    for title, records in found.items():
        print(f"\n## Thesis, {title}\n\n{markdown(records)}")
    stabilised = skew_thesis.stabilised()
    print("\nOf the limit:", ", ".join(f"{k} {100 * v:.0f} %" for k, v in stabilised.items()))
    record = {
        "date": date,
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "seconds": round(time.time() - started, 1),
        "machine": machine(),
        "versions": versions(),
        "seeds": args.seeds,
        "Table I": [
            {"name": r.name, "data": r.data, "paper": skew_radfed.PAPER[r.name],
             "columns": skew_radfed.STATISTICS, "by_seed": r.values.tolist()}
            for r in rows
        ],
        "stabilised": stabilised,
        **found,
    }  # fmt: skip
    (args.out / "skew.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    skew_pictures.draw_table_1(rows, args.out / "radfed_table_1.png")
    skew_pictures.draw_figure_3_1(draws, args.out / "thesis_figure_3_1.png")
    skew_pictures.draw_boxes(draws, args.out / "thesis_figures_3_2_3_3.png")
    skew_pictures.draw_limit_label(settings, shares, args.out / "thesis_tables_4_3_5_1.png")
    print(f"\nnumbers and pictures: {args.out}")


if __name__ == "__main__":
    main()
