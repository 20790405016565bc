"""The command: `deepinit VERB --config configs/x.yaml --section.field value`.

jax is imported by the verbs that need it, after everything that can be refused has been: help and errors are quick.
Exit status: 0, 1 where a check fails, 2 for wrong input, told in one line on stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from deepinit.errors import ConfigError, nearest, unknown

VERBS = {
    "schemes": "list the schemes that --scheme.name takes",
    "explain": "the numbers of a scheme at a config's sizes, with formula and source; allocates nothing",
    "check": "initialize on the mesh and verify every parameter; no training",
    "predict": "variance, update and loss by depth from the recipe alone, at any size; allocates nothing",
    "probe": "the same measured on the real model and mesh beside the prediction, with a verdict",
    "compare": "several schemes side by side, predicted and measured",
    "coord": "coordinate check over width and depth: do the first steps move every size alike?",
    "train": "pre-train: init, verify, then steps",
    "data": "tokenize data.files into one .bin file of tokens; goes on where it was interrupted",
    "audit": "which scheme explains a checkpoint or a safetensors file, what does not fit, what is unsafe",
    "init": "write an initial state with its recipe, birth certificate and verdict; no training",
}

START: dict[str, tuple[Any, Any, str]] = {
    "cluster": (str, "auto", "who started the processes: auto, none, slurm, openmpi, gke or tpu-vm"),
    "coordinator": (str, "", "HOST:PORT of process 0 (or DEEPINIT_COORDINATOR)"),
    "processes": (int, 0, "how many there are (or DEEPINIT_PROCESSES); one connects to nobody"),
    "process": (int, -1, "which one this is, from 0 (or DEEPINIT_PROCESS)"),
    "start_timeout": (float, 300.0, "seconds since the command began in which all must come; who did not is named"),
    "stuck_timeout": (
        float,
        1800.0,
        "seconds without a step after which a process says where it stands and ends; 0: never",
    ),
}

SIGNAL: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "schemes": ({"metavar": "A,B", "help": "these schemes instead of the config's"}, ("predict", "compare", "coord")),
    "report": ({"metavar": "DIR", "help": "write report.html, PNG pictures and report.json there"},
               ("predict", "probe", "compare", "coord")),
    "seq-len": ({"type": int, "default": 0, "help": "positions; 0: max_seq_len, at most 256"}, ("predict",)),
    "repetition": ({"type": float, "default": 0.0, "help": "rate at which two positions hold one token"}, ("predict",)),
    "x0": ({"type": float, "default": 0.0, "help": "variance of the stack's input; 0: the embedding's"}, ("predict",)),
    "tokens": ({"choices": ("text", "random"), "default": "text", "help": "from data.files, or uniformly random"},
               ("probe", "compare")),
    "widths": ({"default": "32,64,128,256", "help": "at the smallest depth; empty: none"}, ("coord",)),
    "depths": ({"default": "4,16,48", "help": "at the smallest width; empty: none"}, ("coord",)),
    "head-dim": ({"type": int, "default": 16, "help": "heads stay as wide and grow in number"}, ("coord",)),
    "steps": ({"type": int, "default": 4, "help": "optimizer steps"}, ("coord",)),
    "seeds": ({"type": int, "default": 3, "help": "draws, whose scatter gives the confidence"}, ("coord",)),
    "optimizer": ({"choices": ("adam", "sgd"), "default": "adam", "help": "at optimizer.lr throughout"}, ("coord",)),
    "quick": ({"action": "store_true", "help": "without the effect of each role's step on the logits"},
              ("probe", "compare")),
}  # fmt: skip
"""Flag -> its argparse settings, and the verbs that have it."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> Any:
        raise ConfigError(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; the exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        return run(args)
    except ConfigError as e:
        print(f"deepinit: {e}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `deepinit schemes | head`
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:  # before a run has anything to save; the loop itself saves and says how to go on
        print("deepinit: interrupted", file=sys.stderr)
        return 130


def run(args: list[str]) -> int:
    """Find the verb and hand it its flags."""
    from deepinit import __version__

    began = time.monotonic()  # before jax is imported, which takes seconds
    if not args or args[0] in ("-h", "--help", "help"):
        print("usage: deepinit VERB [--config FILE] [--section.field VALUE ...]\n")
        print("\n".join(f"  {verb:9} {what}" for verb, what in VERBS.items()))
        print("\n`deepinit VERB --help` lists a verb's flags.")
        return 0
    if args[0] == "--version":
        print(f"deepinit {__version__}")
        return 0
    if args[0] not in VERBS:
        raise ConfigError(f"unknown command {args[0]!r}{nearest(args[0], VERBS)}")
    verb, *args = args
    # taken here: as argparse's positional it would swallow the value of the first flag that argparse does not know
    scheme = args.pop(0) if verb == "explain" and args and not args[0].startswith("-") else ""
    path = args.pop(0) if verb in ("audit", "init", "data") and args and not args[0].startswith("-") else ""
    name = f"deepinit {verb}" + {"explain": " [SCHEME]", "audit": " PATH", "data": " OUT.bin"}.get(verb, "")
    parser = Parser(prog=name, description=VERBS[verb], allow_abbrev=False, add_help=False)
    parser.add_argument("--help", "-h", action="store_true")
    if verb == "schemes":
        parser.add_argument("--names", action="store_true", help="names only, one a line")
    else:
        parser.add_argument("--config", action="append", default=[], metavar="FILE", help="read first; may be repeated")
    if verb in ("check", "train"):
        for name, (kind, default, what) in START.items():
            parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help=what)
    for name, (settings, verbs) in SIGNAL.items():
        if verb in verbs:
            parser.add_argument(f"--{name}", **settings)
    if verb in ("audit", "init"):
        from deepinit.proofs import FLAGS

        FLAGS[verb](parser)
    if verb == "check":
        parser.add_argument("--replay", default="sample", help="weights drawn again: sample, full or none")
        parser.add_argument("--strict", action="store_true", help="warnings and leaves without a role fail too")
    if verb != "train":
        parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options, flags = parser.parse_known_args(args, argparse.Namespace(scheme=scheme, path=path, began=began))
    if options.help:
        return show_help(parser, verb)
    if verb == "schemes" and flags:
        raise ConfigError(f"schemes: unknown flag {flags[0]!r}; known: --names, --json")
    return globals()[verb](options, flags)


def show_help(parser: argparse.ArgumentParser, verb: str) -> int:
    """The verb's own flags, then every field of the config."""
    print(parser.format_help())
    if verb != "schemes":
        from deepinit.train.config import describe

        for flag, kind, default, meaning in describe():
            print(f"  {flag:32} {meaning}  [{kind}; {default}]")
    return 0


def emit(data: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(data, indent=1, allow_nan=False))


def schemes(options: argparse.Namespace, flags: list[str]) -> int:
    """List the registry."""
    from deepinit.schemes import registry

    known = registry.schemes()
    if options.names:
        print("\n".join(s.name for s in known))
        return 0
    from deepinit.report import tables

    if options.json:
        emit([tables.scheme_facts(s) for s in known])
    else:
        tables.console().print(tables.schemes_table(known))
    return 0


def explain(options: argparse.Namespace, flags: list[str]) -> int:
    """Print the resolved numbers of a scheme."""
    from deepinit.schemes import registry
    from deepinit.train.config import load

    if options.scheme:
        flags = ["--scheme.name", options.scheme, *flags]
    r = load(options.config, flags).recipe()
    if options.json:
        emit(r.to_json())
    else:
        from deepinit.report import tables

        tables.explain(tables.console(), r, registry.entry(r.name))
    return 0


def check(options: argparse.Namespace, flags: list[str]) -> int:
    """Initialize on the mesh and verify."""
    from deepinit.train.config import load

    config = load(options.config, flags)
    config.check()
    if options.replay not in ("sample", "full", "none"):
        raise unknown("replay", options.replay, ("sample", "full", "none"))
    from deepinit.train import birth, distributed, folder

    replay = None if options.replay == "none" else options.replay

    def work(beat: Any) -> int:
        born = birth.born(config, replay, strict=options.strict)
        if distributed.first() and options.json:
            emit(folder.init_record(born.verdict, config))
        elif distributed.first():
            from deepinit.report import tables

            tables.verdict(tables.console(), born.verdict)
        return 0 if born.verdict.ok else 1

    return distributed.run(placed(options), config, work)


def train(options: argparse.Namespace, flags: list[str]) -> int:
    """Pre-train."""
    from deepinit.train.config import load

    config = load(options.config, flags)
    config.check()
    from deepinit.train import distributed
    from deepinit.train.loop import train as pretrain

    return distributed.run(placed(options), config, lambda beat: pretrain(config, beat))


def data(options: argparse.Namespace, flags: list[str]) -> int:
    """Tokenize."""
    from pathlib import Path

    from deepinit.train.config import load
    from deepinit.train.prepare import prepare

    if not options.path:
        raise ConfigError("data: needs the file to write, OUT.bin")
    out = Path(options.path)
    count = prepare(load(options.config, flags).data, out)
    record = json.loads(out.with_suffix(".json").read_text())
    if options.json:
        emit({"path": str(out), **record})
    else:
        skipped = f", {record['skipped']} damaged ones left out" if record["skipped"] else ""
        print(f"{out}: {count} tokens of {record['documents']} documents{skipped}")
    return 0


def placed(options: argparse.Namespace) -> Any:
    """How this process finds the others, from the verb's own flags."""
    from deepinit.train.distributed import Start

    return Start(**{name: getattr(options, name) for name in START}, began=options.began)


def predict(options: argparse.Namespace, flags: list[str]) -> int:
    """Predict the signal."""
    from deepinit.signal import commands

    return commands.predict(options, flags)


def probe(options: argparse.Namespace, flags: list[str]) -> int:
    """Measure the signal beside the prediction."""
    from deepinit.signal import commands

    return commands.probe(options, flags)


def compare(options: argparse.Namespace, flags: list[str]) -> int:
    """Several schemes side by side."""
    from deepinit.signal import commands

    return commands.compare(options, flags)


def audit(options: argparse.Namespace, flags: list[str]) -> int:
    """Audit a tree on disk."""
    from deepinit import proofs

    return proofs.audit(options.path, options, flags)


def init(options: argparse.Namespace, flags: list[str]) -> int:
    """Write an initial state."""
    from deepinit import proofs

    return proofs.init(options.path, options, flags)


if __name__ == "__main__":
    sys.exit(main())


def coord(options: argparse.Namespace, flags: list[str]) -> int:
    """Coordinate check."""
    from deepinit.signal import commands

    return commands.coord(options, flags)
