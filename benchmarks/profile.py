"""Where does a training step's time go? The step of `benchmarks.train`, unrolled, on one core without Eigen's threads,
so that a second of an operation is a CPU-second; from the profiler's trace, summed by what the operations are for.
"""

from __future__ import annotations

import os
import re
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from benchmarks import steps, train
from benchmarks.harness import Costs, Race, costs

PLACES = (
    ("attention scores and mixing", r"/attention/(bkrh|bkrs|slice|reduce_|exp|sub|div|select|concatenate|transpose$)"),
    ("attention projections", r"/attention/"),
    ("MLP", r"/mlp/"),
    ("norms", r"norm"),
    ("residual additions", r"residual"),
    ("embedding, head and loss", r"Decoder|cross_entropy|logsumexp|arange|jvp\("),
)
REST = "gradient norm, clipping and AdamW"
CALLERS = ("while", "call", "conditional")


def names(text: str) -> dict[str, tuple[str, str]]:
    """Instruction -> (opcode, what it was traced from), from a compiled program's text; a fusion of a dot is a dot."""
    bodies: dict[str, str] = {}
    found = {}
    body = ""
    for line in text.splitlines():
        if head := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            body = head[1]
        elif match := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = .*? ([\w\-]+)\(", line):
            source = re.search(r'op_name="([^"]*)"', line)
            called = re.search(r"(?:calls|to_apply)=%?([\w.\-]+)", line)
            opcode = match[2]
            if opcode == "dot":
                bodies[body] = "dot"
            if called and bodies.get(called[1]) == "dot":
                opcode, bodies[body] = "dot", "dot" if body.startswith("parallel") else bodies.get(body, "")
            found[match[1]] = opcode, source[1] if source else ""
    return found


def place(source: str) -> str:
    """What an operation is for."""
    return next((name for name, pattern in PLACES if re.search(pattern, source)), REST)


def traced(running: steps.Running, count: int) -> dict[str, float]:
    """Instruction -> seconds in a step, the median of so many: what was interrupted does not count."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(count):
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                running()
            (file,) = Path(folder).glob("**/*.xplane.pb")
            once: dict[str, float] = defaultdict(float)
            for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
                for line in plane.lines:
                    for event in line.events:
                        if op := dict(event.stats).get("hlo_op"):
                            once[op] += event.duration_ns / 1e9
        for op, s in once.items():
            seconds[op].append(s)
    return {op: statistics.median(kept) for op, kept in seconds.items()}


def summed(seconds: Mapping[str, float], known: Mapping[str, tuple[str, str]]) -> dict[str, Costs]:
    """By place: ms of matrix products and of all else."""
    rows: dict[str, Costs] = defaultdict(lambda: Costs(products_ms=0.0, rest_ms=0.0))
    for op, s in seconds.items():
        opcode, source = known.get(op, ("", ""))
        if opcode not in CALLERS:
            rows[place(source)]["products_ms" if opcode == "dot" else "rest_ms"] += 1e3 * s
    return dict(sorted(rows.items(), key=lambda row: -sum(row[1].values())))


def run(rounds: int, sizes: dict[str, Any] = train.SIZES) -> Race:
    """ms of one core in a step."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    config = steps.config(**sizes, model__scan="false")
    tokens = sizes["batch"] * sizes["seq"]
    flops = config.geometry().flops_per_token(sizes["seq"]) * tokens
    running, limit = steps.Running(config), train.products(flops, tokens, sizes["d"])
    known = names(running.compiled.as_text())
    race = Race("a step on one core, operation by operation", "", 0, {"step": running, train.LIMIT: limit}).run(rounds)
    share = race.ratio(train.LIMIT, "step")
    total = 1e3 * race.median("step")
    race.samples.clear()
    seconds = {op: s for op, s in traced(running, rounds).items() if known.get(op, ("",))[0] not in CALLERS}
    for name, row in summed(seconds, known).items():
        race.add(name, row)
    seen = sum(seconds.values())
    rate, gflop = statistics.median(costs(limit)["cpu_s"] for _ in range(rounds)), flops / 1e9
    race.notes = [
        f"A step takes {total:.0f} ms of CPU, of which the trace has {1e3 * seen:.0f}. As matrix products alone its "
        f"{gflop:.0f} GFLOP take {1e3 * rate:.0f} ms ({gflop / rate:.0f} GFLOP per CPU-second), {share:.0%} of it.",
        "",
        "The largest groups of operations, over all layers:",
        "",
        *(f"- {1e3 * s:.0f} ms, {n} of `{source}`" for source, (n, s) in largest(seconds, known, 14)),
    ]
    return race


def largest(
    seconds: Mapping[str, float], known: Mapping[str, tuple[str, str]], count: int
) -> list[tuple[str, tuple[int, float]]]:
    """Operations of all layers that were traced from one place: how many, and their seconds."""
    groups: dict[str, list[float]] = defaultdict(list)
    for op, s in seconds.items():
        opcode, source = known.get(op, ("", ""))
        short = re.sub(
            r"jit\(step\)/(while/body/closed_call/)?|layers_\d+/|(attn|mlp)_residual/(?=attention|mlp)", "", source
        )
        groups[f"{opcode}: {short}"].append(s)
    return sorted(((k, (len(v), sum(v))) for k, v in groups.items()), key=lambda x: -x[1][1])[:count]
