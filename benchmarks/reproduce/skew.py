"""The skew tables and figures of two papers, compared with our samplers.

    python -m benchmarks.reproduce.skew --data-dir DATA

Table I of RADFed (Xue, Klabjan, Luo) for the data sets that are there; Figures 3.1 to 3.3 and
Tables 4.3 and 5.1 to 5.3 of Cornelis' thesis, which need no data. Prints tables in markdown; writes
skew.json and four pictures. The figures' curves have no printed numbers: the thesis' statements
about them stand next to our numbers in `benchmarks/results/skew.md`.
"""

import argparse
import sys
import time
from collections.abc import Sequence

from benchmarks.reproduce import skew_pictures, skew_radfed, skew_thesis
from benchmarks.reproduce.common import markdown, parser
from benchmarks.reproduce.times import announce
from benchmarks.script import write_record


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    made = parser(__doc__, "skew")
    made.add_argument(
        "--seeds", type=int, default=10, help="partitions of each kind; of Dirichlet ten times more"
    )
    return made.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Deal everything, print the tables, write the numbers and the pictures."""
    args = parse(argv)
    started = time.time()
    announce("everything", "skew/skew.json", seeds=args.seeds)
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
        "Tables 5.2 and 5.3": skew_thesis.tables_5_2_and_5_3(),
    }
    print(f"## RADFed, Table I\n\n{skew_radfed.markdown(rows)}")
    for title, records in found.items():
        print(f"\n## Thesis, {title}\n\n{markdown(records)}")
    stabilised = skew_thesis.stabilised()
    print("\nOf the limit:", ", ".join(f"{k} {100 * v:.0f} %" for k, v in stabilised.items()))
    record = {
        "seeds": args.seeds,
        "Table I": [
            {"name": r.name, "data": r.data, "paper": skew_radfed.PAPER[r.name],
             "columns": skew_radfed.STATISTICS, "by_seed": r.values.tolist()}
            for r in rows
        ],
        "stabilised": stabilised,
        **found,
    }  # fmt: skip
    write_record(args.out / "skew.json", started, **record)
    skew_pictures.draw_table_1(rows, args.out / "radfed_table_1.png")
    skew_pictures.draw_figure_3_1(draws, args.out / "thesis_figure_3_1.png")
    skew_pictures.draw_boxes(draws, args.out / "thesis_figures_3_2_3_3.png")
    skew_pictures.draw_limit_label(settings, shares, args.out / "thesis_tables_4_3_5_1.png")
    print(f"\nnumbers and pictures: {args.out}")


if __name__ == "__main__":
    main()
