"""Run one benchmark by name, or list them."""

from __future__ import annotations

import argparse
import importlib
import sys

NAMES = {
    "init": "initial parameters of GPT-2 124M against stock draws and a constant fill",
    "verify": "the proof of a tree of 335 M parameters against its init and one read",
}


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", nargs="?", choices=NAMES)
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds, after one that warms up")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    if options.name is None:
        print("\n".join(f"{name:8} {what}" for name, what in NAMES.items()))
        return 0
    race = importlib.import_module(f"benchmarks.{options.name}").run(options.rounds)
    print(race.table())
    if options.json:
        race.write(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
