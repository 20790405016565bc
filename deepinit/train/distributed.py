"""Many processes as one run: the start, what they agree on before a number is drawn, and the end when one is lost.

The engine is `jax.distributed`: every process runs the same program over a mesh of all their devices. What is here is
the rest: a start that says who is missing, proofs that all are alike, decisions that all take together.
"""

from __future__ import annotations

import faulthandler
import hashlib
import os
import signal
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from deepinit import digests, roles
from deepinit.errors import ConfigError
from deepinit.train import cluster, folder, rollcall
from deepinit.train.cluster import Place
from deepinit.train.config import Config
from deepinit.train.watchdog import RETRY, Beat, Watchdog, leave, say

GOODBYE = 20  # seconds in which all must have come to the end
RNG_FLAGS = (
    "jax_threefry_partitionable",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_default_matmul_precision",
)


@dataclass(frozen=True)
class Start:
    """How a process finds the others, from the command's own flags."""

    cluster: str = "auto"
    coordinator: str = ""
    processes: int = 0
    process: int = -1
    start_timeout: float = 300.0
    """Seconds until everybody must have come, from `began` on; at least half of it is waited."""
    stuck_timeout: float = 1800.0
    """Seconds without a step after which a process ends itself; 0: never."""
    began: float | None = None
    """When the command began, by `time.monotonic()`; None: now."""


def facts(config: Config) -> dict[str, Any]:
    """What must be the same on every process before anything is drawn, by name."""
    settings = {f"{section}.{k}": v for section, fields in config.to_dict().items() for k, v in fields.items()}
    versions = {f"version of {k}": v for k, v in folder.versions().items()}
    flags = {name: getattr(jax.config, name) for name in RNG_FLAGS}
    return {**settings, **versions, "source code of deepinit": code(), **flags}


def code() -> str:
    """A hash of this package's sources."""
    root = Path(__file__).parents[1]
    files = sorted(root.rglob("*.py"))
    return hashlib.sha256(b"".join(f.relative_to(root).as_posix().encode() + f.read_bytes() for f in files)).hexdigest()


def run(start: Start, config: Config, work: Callable[[Beat], int]) -> int:
    """Join the other processes and do the work; its exit status. A process that is alone connects to nobody.

    In a job of several processes an error ends this one at once, since a quiet goodbye would wait for the others.

    Raises:
      ConfigError: the place is not clear, or a process was started otherwise.
    """
    place = cluster.find(start.cluster, start.coordinator, start.processes, start.process)
    if place is None:
        with Watchdog(start.stuck_timeout, "the process") as watchdog:
            return work(watchdog.beat)
    try:
        connect(place, facts(config), start.start_timeout, start.began)
    except rollcall.Absent as e:
        say(str(e))
        return RETRY
    try:
        with Watchdog(start.stuck_timeout, str(place)) as watchdog:
            status = work(watchdog.beat)
    except ConfigError as e:
        say(f"{place}: {e}" if place.index else str(e))
        leave(2)
    except jax.errors.JaxRuntimeError as e:
        say(f"{place}: another process was lost, or a device failed: {str(e).strip().partition(chr(10))[0]}")
        leave(RETRY)
    except BaseException:
        traceback.print_exc()
        leave(1)
    try:
        jax.distributed.shutdown()
    except jax.errors.JaxRuntimeError:  # the others did not come to their end
        leave(status or RETRY)
    return status


def connect(place: Place, facts: Mapping[str, Any], timeout: float, began: float | None = None) -> None:
    """Roll call, then jax's own start, which everybody enters within moments."""
    if hasattr(signal, "SIGUSR1"):  # where does it stand? kill -USR1 tells, and harms nothing
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    rollcall.call(place, facts, timeout, began)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    own = None if place.local is None or (visible and "," not in visible) else place.local
    try:
        jax.distributed.initialize(
            place.coordinator,
            num_processes=place.count,
            process_id=place.index,
            local_device_ids=own,
            initialization_timeout=max(int(timeout), 1),
            shutdown_timeout_seconds=GOODBYE,
        )
    except jax.errors.JaxRuntimeError as e:
        raise rollcall.Absent(f"{place} could not join at {place.coordinator}: {str(e).splitlines()[0]}") from None


# ---------------------------------------------------------------------------------------------- what all agree on


def first() -> bool:
    """Whether this process is the one that writes what is written once."""
    return jax.process_index() == 0


def from_first(text: str) -> str:
    """The text that process 0 gives, on every process."""
    if jax.process_count() == 1:
        return text
    raw = text.encode()
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(raw))))
    buffer = np.frombuffer(raw[:size].ljust(size, b"\0"), np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(buffer))).decode()


def same(name: str, text: str) -> None:
    """Refuse to go on where a fact that each process found out by itself differs between them.

    Raises:
      ConfigError: names the first process that differs from process 0.
    """
    if jax.process_count() == 1:
        return
    mine = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    everyone = np.asarray(multihost_utils.process_allgather(mine))
    for i in range(1, len(everyone)):
        if (everyone[i] != everyone[0]).any():
            raise ConfigError(f"{name}: process {i} has something else than process 0")


def sync(name: str) -> None:
    """Wait until all processes have come to this point."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def everywhere(ok: bool) -> bool:
    """Whether it is so on all processes."""
    if jax.process_count() == 1:
        return ok
    return bool(np.asarray(multihost_utils.process_allgather(np.int32(ok))).all())


class Ballot:
    """Whether any process wants to stop. Votes are counted with the metrics of a step, so that all stop at the same."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.votes = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self.count = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def now(self, vote: int) -> int:
        """A vote that needs no count, since there is one process; else 0."""
        return vote if jax.process_count() == 1 else 0

    def cast(self, vote: int) -> Any:
        """The largest vote of all processes, to be read later; with one process, its own."""
        if jax.process_count() == 1:
            return vote
        mine = np.asarray([vote], np.int32)
        shape = (self.mesh.size,)
        return self.count(jax.make_array_from_callback(shape, self.votes, lambda _: mine))


# ---------------------------------------------------------------------------------------------- replicas


def check_replicas(params: Any, mesh: Mesh) -> None:
    """Refuse parameters whose copies differ between devices: drawn from a process's own randomness, or on a bad chip.

    Every device sums the bits of what it holds; devices that hold the same part of a leaf must have the same sums.

    Raises:
      RuntimeError: names the leaf, and the two devices with their processes.
    """
    if mesh.size == 1:
        return
    located = roles.leaves(params)
    leaves = [x for _, x in located]
    sums = replica_sums(leaves, mesh)
    devices = list(mesh.devices.flat)
    for i, (leaf, x) in enumerate(located):
        parts = x.sharding.devices_indices_map(x.shape)
        seen: dict[str, int] = {}
        for k, device in enumerate(devices):
            other = seen.setdefault(str(parts[device]), k)
            if (sums[k, i] != sums[other, i]).any():
                a, b = devices[other], device
                raise RuntimeError(
                    f"{leaf.path}: the copies on device {a.id} (process {a.process_index}) and device {b.id} "
                    f"(process {b.process_index}) differ before step 1"
                )


def replica_sums(leaves: list[jax.Array], mesh: Mesh) -> np.ndarray:
    """(devices, leaves, 4) uint32: what each device holds of each leaf, summed up."""
    specs = tuple(x.sharding.spec for x in leaves)  # type: ignore[attr-defined]

    def local(*blocks: jax.Array) -> jax.Array:
        return jnp.stack([digests.lanes(b, stacked=False)[0] for b in blocks])[None]

    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(mesh.axis_names), check_vma=False)
    gathered = jax.jit(mapped, out_shardings=NamedSharding(mesh, PartitionSpec()))(*leaves)
    return np.asarray(jax.device_get(gathered))
