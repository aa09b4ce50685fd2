"""Makes a virtual environment in .peers/ for each simulator that `speed.py` can compare with ours.

python -m benchmarks.peers            # all of them
python -m benchmarks.peers fedjax
"""

import argparse
import subprocess
import venv

from benchmarks.peers import FOLDER, PINS, python_of


def main() -> None:
    """Make those that are asked for anew."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PINS)}")
    names = parser.parse_args().names or list(PINS)
    if unknown := set(names) - set(PINS):
        parser.error(f"NAME must be one of {', '.join(PINS)}, got {min(unknown)}")
    for name in names:
        print(f"{name}: {' '.join(PINS[name])}", flush=True)
        venv.create(FOLDER / name, clear=True, with_pip=True)
        subprocess.run([python_of(name), "-m", "pip", "install", "-q", *PINS[name]], check=True)


if __name__ == "__main__":
    main()
