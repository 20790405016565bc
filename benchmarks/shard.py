"""What does each way to split a model cost, and what does it move? 8 layers, d = 256, 16 sequences of 64 bytes on eight
devices (of a CPU: virtual ones, which share its cores, so that times tell of overhead alone).
"""

from __future__ import annotations

import math
import os
import time
from typing import Any

import jax

from benchmarks import steps
from benchmarks.harness import Costs, Race
from deepinit.collectives import listed, moved

MODES = {
    "one device": {},
    "data 8": {"mesh__data": 8},
    "fsdp 8": {"mesh__fsdp": 8},
    "tensor 8": {"mesh__tensor": 8},
    "data 2 x fsdp 2 x tensor 2": {"mesh__data": 2, "mesh__fsdp": 2, "mesh__tensor": 2},
}
SIZES = {"layers": 8, "d": 256, "heads": 8, "seq": 64, "batch": 16}


def run(rounds: int, sizes: dict[str, Any] = SIZES) -> Race:
    """Steps per CPU-second; CPU-seconds to the compiled step, and the largest array that is moved, in entries."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    if jax.device_count() < 8:
        raise SystemExit(f"eight devices are needed, there are {jax.device_count()}")
    runs: dict[str, Any] = {}
    compiles, largest, notes = {}, {}, ["Collectives of a step (kind, shape, how often; inside a layer once a layer):"]
    for name, mesh in MODES.items():
        began = time.process_time()
        runs[name] = steps.Running(steps.config(**sizes, **mesh))
        compiles[name] = time.process_time() - began
        found = moved(runs[name].compiled.as_text())
        rows = listed(found, least=sizes["d"] + 1)
        largest[name] = max((math.prod(shape) for _, shape in found), default=0)
        notes += [f"- {name}: " + ("; ".join(f"{kind} {shape}, {n}" for kind, shape, n in rows) or "none")]
    race = Race("a step on eight devices", "steps", 1, runs).run(rounds)
    for name in runs:
        race.add(name, Costs(start_cpu_s=compiles[name], largest_moved=largest[name]))
    race.notes += notes
    activation = sizes["batch"] * sizes["seq"] * 4 * sizes["d"]
    race.target("largest array moved, of an activation of B S 4d", max(largest.values()) / activation, at_most=0.99)
    return race
