"""How soon does the first step come, and with how much memory? From the command on, part by part, against depth.

Every case is a process of its own: d = 64, 4 heads, 8 sequences of 64 bytes; scanned with remat, or unrolled.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

from benchmarks.harness import Costs, Race, child, peak_bytes

SIZES = {"d": 64, "heads": 4, "seq": 64, "batch": 8}
COMPILES = ("init_trace", "init_compile", "step_trace", "step_compile")


class Laps:
    """CPU-seconds of this process, part by part."""

    def __init__(self) -> None:
        self.parts, self.last = {"imports": time.process_time()}, time.process_time()

    def __call__(self, name: str) -> None:
        """What has passed since the last part is this one."""
        now = time.process_time()
        if name != "second_step":
            self.peak = peak_bytes()
        self.parts[name], self.last = now - self.last, now

    def through(self, init: Any, key: Any, ready: Any, step: Any) -> dict[str, float]:
        """Init, the first step and one more, nothing compiled before; the costs. `ready` makes (state, batch) of the
        parameters, `step()` the jitted step.
        """
        import jax

        lowered = init.lower(key)
        self("init_trace")
        init = lowered.compile()
        self("init_compile")
        params = jax.block_until_ready(init(key))
        self("init")
        state, batch = ready(params)
        self("optimizer")
        lowered = step().lower(state, batch)
        self("step_trace")
        compiled = lowered.compile()
        self("step_compile")
        state, _ = jax.block_until_ready(compiled(state, batch))
        self("first_step")
        jax.block_until_ready(compiled(state, batch))
        self("second_step")
        return self.costs()

    def costs(self) -> dict[str, float]:
        """In all, the compiler's share, and the peak of memory."""
        compiles = sum(self.parts[k] for k in COMPILES)
        first = sum(v for k, v in self.parts.items() if k != "second_step")
        return {"cpu_s": first, "trace_and_compile": compiles, **self.parts, "peak_GB": self.peak / 1e9}


def first_step(layers: int, scan: bool = True, stock: bool = False, cache: str = "") -> dict[str, float]:
    """To the first step in this process, and one more. `stock`: Flax's own jitted init."""
    import jax
    import jax.numpy as jnp
    import scipy.special  # noqa: F401  the sampler's table asks for it: an import, whenever it happens

    from benchmarks import steps
    from deepinit import roles
    from deepinit.train import compilations

    laps = Laps()
    compilations.keep(cache)
    more = {"model__scan": str(scan).lower(), "model__remat": "full" if scan else "none"}
    parts = steps.Parts(steps.config(layers, **SIZES, **more, scheme__sampler="jax" if stock else "portable"))
    laps("model")
    with jax.set_mesh(parts.mesh):
        if stock:
            key = jax.random.key(0)
            init = jax.jit(lambda key: roles.unboxed(parts.model.init(key, jnp.zeros((1, 1), jnp.int32))["params"]))
        else:
            init, key = parts.init()

        def ready(params: Any) -> Any:
            return parts.state(jax.device_put(params, parts.layout) if stock else params), parts.batch()

        return laps.through(init, key, ready, parts.step)


def command(layers: int, run_dir: str) -> dict[str, float]:
    """`deepinit train` itself for one step: proof, evaluation and checkpoint with it."""
    from deepinit.cli import main

    flags = f"""train --model.num-layers {layers} --model.d-model 64 --model.num-heads 4 --model.d-ff 256
        --model.remat full --model.mlp gelu --model.max-seq-len 64 --data.seq-len 64 --train.batch-size 8
        --train.eval-batches 1 --train.steps 2 --train.stop-at 1 --optimizer.warmup-steps 0 --train.run-dir {run_dir}"""
    status = main(flags.split())
    if status:
        raise SystemExit(status)
    return {"cpu_s": time.process_time(), "peak_GB": peak_bytes() / 1e9}


def started(**options: Any) -> Costs:
    """The costs of a start in a process of its own."""
    return Costs(child("-m", "benchmarks.start", json.dumps(options)))


def commands(layers: int) -> tuple[Any, Any]:
    """Two cases: the command where nothing has been compiled before, and once more."""
    second: list[Costs] = []

    def both() -> Costs:
        with tempfile.TemporaryDirectory() as folder:
            env = {"XDG_CACHE_HOME": folder}
            runs = [
                Costs(
                    child("-m", "benchmarks.start", json.dumps({"layers": layers, "run_dir": f"{folder}/{i}"}), env=env)
                )
                for i in range(2)
            ]
        second.append(runs[1])
        return runs[0]

    return both, lambda: second.pop()


def run(rounds: int, nanodo: str = "", depths: tuple[int, int, int] = (12, 48, 1000)) -> Race:
    """CPU-seconds of each part; the peak of the process's memory."""
    shallow, middle, deep = depths
    cases: dict[str, Any] = {f"L = {n}": lambda n=n: started(layers=n) for n in depths}
    unrolled, stock, other = f"L = {middle}, unrolled", f"L = {middle}, unrolled, Flax's init", f"L = {middle}, nanodo"
    cases[unrolled] = lambda: started(layers=middle, scan=False)
    cases[stock] = lambda: started(layers=middle, scan=False, stock=True)
    if nanodo:
        sizes = json.dumps({"layers": middle, **SIZES})
        cases[other] = lambda: Costs(child("-m", "benchmarks.with_nanodo", "start", sizes, env={"PYTHONPATH": nanodo}))
    first, again = commands(middle)
    cases |= {f"deepinit train, L = {middle}": first, "- the same, second start": again}
    race = Race("CPU-seconds to the first step, d = 64", "", 0, cases).run(rounds, warm=0)
    compiles = "trace_and_compile"
    race.target(
        f"init and step traced and compiled, L = {deep}, CPU-s", race.median(f"L = {deep}", compiles), at_most=6
    )
    race.target(f"the same against L = {shallow}", race.ratio(f"L = {deep}", f"L = {shallow}", compiles), at_most=1.3)
    race.target(f"peak memory at L = {deep}, GB", race.median(f"L = {deep}", "peak_GB"), at_most=1.5)
    for name, what in ((other, "nanodo"), (stock, "unrolled, Flax's jitted init"), (unrolled, "unrolled, our init")):
        if name in cases:
            race.target(f"{what} against scanned, trace and compile, L = {middle}",
                        race.ratio(name, f"L = {middle}", compiles), at_least=8)  # fmt: skip
    return race


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    print("\n" + json.dumps((command if "run_dir" in options else first_step)(**options)))
