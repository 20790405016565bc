"""The verbs `predict`, `probe`, `coord` and `compare`. jax is imported once everything that can be refused has been."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from deepinit.errors import ConfigError
from deepinit.train.config import Config, load

LLAMA_70B = {
    "num-layers": 80, "d-model": 8192, "num-heads": 64, "num-kv-heads": 8, "d-ff": 28672, "vocab-size": 128256,
    "max-seq-len": 8192,
}  # fmt: skip
"""Sizes of a prediction where none are given (those of Llama 3 70B): nothing is allocated."""


def configs(options: argparse.Namespace, flags: Sequence[str], large: bool = False) -> list[tuple[str, Config]]:
    """(label, config) of every scheme that is asked for."""
    flags = list(flags)
    if large and not options.config and not any(f.startswith("--model.") for f in flags):
        flags = [x for name, size in LLAMA_70B.items() for x in (f"--model.{name}", str(size))] + flags
    names = [n.strip() for n in (getattr(options, "schemes", "") or "").split(",") if n.strip()]
    if not names:
        config = load(options.config, flags)
        return [(config.scheme.name, config)]
    return [(name, load(options.config, [*flags, "--scheme.name", name])) for name in names]


def emit(data: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(data, indent=1, allow_nan=False))


def predict(options: argparse.Namespace, flags: list[str]) -> int:
    """Predict one scheme, or several side by side."""
    from deepinit.signal.predict import predict as predicted

    wanted = configs(options, flags, large=True)
    found = []
    for label, config in wanted:
        found.append((label, predicted(
            config.recipe(), seq_len=options.seq_len, repetition=options.repetition, input_variance=options.x0 or None,
            **config.model_options(),
        )))  # fmt: skip
    if options.json:
        emit(found[0][1].to_json() if not options.schemes else {"schemes": [p.to_json() for _, p in found]})
    if options.report or not options.json:
        from deepinit.report.plots import Curve

        curves = [Curve(label, p) for label, p in found]
    if options.report:
        from deepinit.report import html

        unit = [Curve(label, predicted(
            config.recipe(), seq_len=options.seq_len, repetition=options.repetition, input_variance=1.0,
            exponents=False, **config.model_options(),
        )) for label, config in wanted]  # fmt: skip
        where = html.of_predictions(options.report, curves, unit)
    if not options.json:
        from deepinit.report import signals, tables

        out = tables.console()
        if options.schemes:
            g = found[0][1].recipe.geometry
            out.print(f"{g.num_layers} layers, d_model {g.d_model}, {g.mlp} {g.d_ff}, {found[0][1].seq_len} positions")
            out.print(signals.predictions(out, curves))
            for note in dict.fromkeys(f"{label}: {n}" for label, p in found for n in p.notes if "positions" not in n):
                out.print(f"  note: {note}")
        else:
            signals.prediction(out, found[0][1])
        if options.report:
            out.print(f"report: {where}")
    return 0


def probe(options: argparse.Namespace, flags: list[str]) -> int:
    """Measure one scheme beside its prediction; 1 where a verdict fails."""
    [(label, config)] = configs(options, flags)
    config.check()
    refuse_report(options)
    from deepinit.signal import study

    case = study.examine(label, config, options.tokens, effects=not options.quick)
    if options.json:
        emit(case.to_json())
    if options.report:
        from deepinit.report import html

        where = html.of_probes(options.report, [case.curve], [case.checks], f"{label} at step 0")
    if not options.json:
        from deepinit.report import signals, tables

        out = tables.console()
        signals.measured(out, case.predicted, case.measured, case.checks)
        out.print(f"probe {'ok' if case.ok else 'FAILS'}: {case.summary}")
        if options.report:
            out.print(f"report: {where}")
    return 0 if case.ok else 1


def compare(options: argparse.Namespace, flags: list[str]) -> int:
    """Measure several schemes beside their predictions; 1 where a verdict fails."""
    if not options.schemes:
        raise ConfigError("compare: --schemes A,B names the schemes to compare")
    wanted = configs(options, flags)
    for _, config in wanted:
        config.check()
    refuse_report(options)
    from deepinit.signal import study

    cases = [study.examine(label, config, options.tokens, effects=not options.quick) for label, config in wanted]
    if options.json:
        emit({"schemes": [case.to_json() for case in cases]})
    if options.report:
        from deepinit.report import html

        where = html.of_probes(options.report, [c.curve for c in cases], [c.checks for c in cases], "Schemes compared")
    if not options.json:
        from deepinit.report import signals, tables

        out = tables.console()
        out.print(signals.compared(out, cases))
        for case in cases:
            for c in case.checks:
                if c.ok is False:
                    out.print(f"  {case.label}: {c.name} FAILS, {c.note or f'{c.measured:.4g} for {c.predicted:.4g}'}")
        if options.report:
            out.print(f"report: {where}")
    return 0 if all(case.ok for case in cases) else 1


def coord(options: argparse.Namespace, flags: list[str]) -> int:
    """Coordinate check of one scheme or several; 1 where a quantity does not pass."""
    from deepinit.signal.grid import Grid, recipes

    wanted = configs(options, flags)
    o = wanted[0][1].optimizer
    grid = Grid(
        widths=sizes("--widths", options.widths), depths=sizes("--depths", options.depths), head_dim=options.head_dim,
        steps=options.steps, seeds=options.seeds, optimizer=options.optimizer, lr=o.lr, betas=o.betas, eps=o.eps,
    )  # fmt: skip
    made = [(label, recipes(config, grid), config.model_options()) for label, config in wanted]
    for _, at, _ in made:
        for size in grid.points:
            at(*size)
    refuse_report(options)
    from deepinit.signal.coord import check

    found = [check(label, at, grid, chosen) for label, at, chosen in made]
    if options.json:
        emit({"schemes": [f.to_json() for f in found]})
    if options.report:
        from deepinit.report import html

        where = html.of_coordinates(options.report, found)
    if not options.json:
        from deepinit.report import signals, tables

        out = tables.console()
        for f in found:
            signals.coordinates(out, f)
        if options.report:
            out.print(f"report: {where}")
    return 0 if all(f.ok(axis) is not False for f in found for axis in ("width", "depth")) else 1


def sizes(flag: str, text: str) -> tuple[int, ...]:
    """Whole numbers between commas."""
    try:
        return tuple(sorted(int(x) for x in text.split(",") if x.strip()))
    except ValueError:
        raise ConfigError(f"{flag}: {text!r} is not a list of whole numbers such as 32,64,128") from None


def refuse_report(options: argparse.Namespace) -> None:
    """A folder that cannot be written is told before the work."""
    if options.report:
        from pathlib import Path

        try:
            Path(options.report).mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise ConfigError(f"--report: {options.report!r} cannot be made: {e.strerror}") from None
