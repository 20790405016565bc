"""Run one benchmark by name, or list them; compare two runs."""

from __future__ import annotations

import argparse
import datetime
import importlib
import inspect
import sys

from benchmarks import compare
from benchmarks.harness import RESULTS

NAMES = {
    "init": "initial parameters of a 335 M decoder against stock draws, torch and a constant fill",
    "start": "CPU-seconds and memory from the command to the first step, against depth",
    "train": "a training step against torch's and nanodo's, and against its matrix products alone",
    "profile": "where the time of that step goes, operation by operation",
    "loss": "memory and time of the loss at a vocabulary of 128k, whole and in parts",
    "verify": "the proof of a tree of 335 M parameters against its init and one read",
    "probe": "what statistics and a probe add to a step of 80 layers",
    "shard": "compile time, step and collectives of each way to split a model over eight devices",
}


def main() -> int:
    """The exit status; of `compare`, 1 where something has become slower or larger."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", nargs="?", choices=[*NAMES, "compare"])
    parser.add_argument("files", nargs="*", help="of compare: two files or folders, the older first")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds, after one that warms up")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--save", action="store_true", help="write them to benchmarks/results/DATE/NAME.json")
    parser.add_argument("--torch", metavar="PYTHON", help="a Python that has torch: its draws and its step join")
    parser.add_argument("--nanodo", metavar="FOLDER", help="a copy of google-deepmind/nanodo: its model joins")
    options = parser.parse_args()
    if options.name is None:
        print("\n".join(f"{name:8} {what}" for name, what in NAMES.items()))
        return 0
    if options.name == "compare":
        if len(options.files) != 2:
            parser.error("compare needs two files or folders")
        return compare.main(*options.files)
    if options.files:
        parser.error(f"unrecognized arguments: {' '.join(options.files)}")
    run = importlib.import_module(f"benchmarks.{options.name}").run
    rivals = {k: v for k in ("torch", "nanodo") if (v := getattr(options, k))}
    if alien := [k for k in rivals if k not in inspect.signature(run).parameters]:
        parser.error(f"{options.name} has no case for --{alien[0]}")
    race = run(options.rounds, **rivals)
    print(race.table())
    path = RESULTS / datetime.date.today().isoformat() / f"{options.name}.json"
    for to in [options.json] * bool(options.json) + [path] * options.save:
        race.write(to)
    return 0


if __name__ == "__main__":
    sys.exit(main())
