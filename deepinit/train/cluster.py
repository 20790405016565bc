"""Which process of how many this one is, and where the first is to be found: from flags, or from what a launcher set.

Read without jax, so that a wrong start is refused in no time. One process alone is never a cluster, whatever is set.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from deepinit.errors import ConfigError, unknown

Env = Mapping[str, str]
PORT = 8476
METADATA = "metadata.google.internal"


@dataclass(frozen=True)
class Place:
    """A process among `count`, numbered from 0; the one with number 0 listens at `coordinator` (host:port)."""

    coordinator: str
    count: int
    index: int
    local: int | None = None
    """The number among the processes of this machine, where each takes one accelerator."""

    def __str__(self) -> str:
        return f"process {self.index} of {self.count}"


def find(
    cluster: str = "auto",
    coordinator: str = "",
    processes: int = 0,
    process: int = -1,
    env: Env = os.environ,
) -> Place | None:
    """The place that flags, DEEPINIT_* variables or a launcher's variables give; None for a process that is alone.

    Flags win over variables, field by field: `coordinator` may be given to what Slurm or Open MPI say of the rest.

    Raises:
      ConfigError: fields that contradict each other, or one that is missing.
    """
    if cluster not in ("auto", "none", *LAUNCHERS):
        raise unknown("--cluster", cluster, ("auto", "none", *LAUNCHERS))
    if cluster == "none":
        return None
    coordinator = coordinator or env.get("DEEPINIT_COORDINATOR", "")
    processes = processes or number(env, "DEEPINIT_PROCESSES") or 0
    process = number(env, "DEEPINIT_PROCESS", -1) if process < 0 else process
    if processes == 1:
        return None
    if cluster == "auto" and processes:
        return checked(Place(coordinator, processes, process))
    for name in LAUNCHERS if cluster == "auto" else (cluster,):
        place = LAUNCHERS[name](env, cluster == name)
        if place is not None:
            return checked(Place(coordinator or place.coordinator, place.count, place.index, place.local))
    if cluster != "auto":
        raise ConfigError(f"--cluster: {cluster!r} was asked for, but its variables are not set here")
    if coordinator or process > 0:
        raise ConfigError("--processes: a coordinator or a process number needs the number of processes too")
    return None


def checked(place: Place) -> Place | None:
    """The place with a port; None where it is alone."""
    if place.count < 1 or not 0 <= place.index < place.count:
        raise ConfigError(f"--process: {place.index} is not a number from 0 to {place.count - 1}")
    if place.count == 1:
        return None
    host, colon, port = place.coordinator.rpartition(":")
    if not colon:
        host, port = place.coordinator, str(PORT)
    if not host or not port.isdigit():
        raise ConfigError(f"--coordinator: {place.coordinator!r} is not HOST:PORT of process 0")
    return Place(f"{host}:{port}", place.count, place.index, place.local)


def number(env: Env, name: str, default: int | None = None) -> int:
    """A variable as a whole number."""
    text = env.get(name, "").strip()
    if not text and default is None:
        return 0
    if not text:
        return int(default or 0)
    if not re.fullmatch(r"-?\d+", text):
        raise ConfigError(f"{name}: expected a whole number, got {text!r}")
    return int(text)


# ---------------------------------------------------------------------------------------------- launchers


def slurm(env: Env, asked: bool) -> Place | None:
    """A task of `srun`. A batch script itself has SLURM_NTASKS too, but is one process: only a step's tasks count."""
    if not env.get("SLURM_STEP_NUM_TASKS") or "SLURM_PROCID" not in env:
        return None
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
    port = 61_000 + number(env, "SLURM_JOB_ID") % 4000  # two jobs of one machine do not meet
    count = number(env, "SLURM_STEP_NUM_TASKS")
    local = number(env, "SLURM_LOCALID") if several_here(env.get("SLURM_STEP_TASKS_PER_NODE", "")) else None
    return Place(f"{first_host(hosts)}:{port}", count, number(env, "SLURM_PROCID"), local)


def several_here(tasks_per_node: str) -> bool:
    """Whether Slurm's "2(x3),1" has a machine with more than one task."""
    return any(int(n) > 1 for n in re.findall(r"(?:^|,)(\d+)", tasks_per_node))


def first_host(hosts: str) -> str:
    """The first of Slurm's list: `node[007-012,20],other` -> node007."""
    match = re.match(r"([^,\[]+)(?:\[([^\]]+)\])?([^,]*)", hosts)
    if not match:
        raise ConfigError("--coordinator: Slurm named no machine; give HOST:PORT of process 0")
    name, numbers, rest = match.groups()
    return name if not numbers else name + re.split("[-,]", numbers)[0] + rest


def openmpi(env: Env, asked: bool) -> Place | None:
    """A process of `mpirun`."""
    if "OMPI_COMM_WORLD_SIZE" not in env:
        return None
    count, index = number(env, "OMPI_COMM_WORLD_SIZE"), number(env, "OMPI_COMM_WORLD_RANK")
    here, local = number(env, "OMPI_COMM_WORLD_LOCAL_SIZE"), number(env, "OMPI_COMM_WORLD_LOCAL_RANK")
    if here == count:
        host = "127.0.0.1"
    else:  # mpirun's own address; it runs beside the first process unless a host file says otherwise
        match = re.search(r"tcp://([\d.]+)", env.get("OMPI_MCA_orte_hnp_uri", ""))
        host = match[1] if match else ""
    job = re.match(r"(\d+)", env.get("OMPI_MCA_orte_hnp_uri", "") or env.get("OMPI_MCA_ess_base_jobid", ""))
    port = 61_000 + (int(job[1]) if job else 0) % 4000
    return Place(f"{host}:{port}" if host else "", count, index, local if here > 1 else None)


def gke(env: Env, asked: bool) -> Place | None:
    """A pod of a JobSet, by the variables of GKE's TPU webhook, or those that XPK gives to GPU pods."""
    if "TPU_WORKER_HOSTNAMES" in env and "TPU_WORKER_ID" in env:
        hosts = [h for h in env["TPU_WORKER_HOSTNAMES"].split(",") if h]
        slices, this = number(env, "MEGASCALE_NUM_SLICES", 1), number(env, "MEGASCALE_SLICE_ID", 0)
        first = env.get("MEGASCALE_COORDINATOR_ADDRESS", "").partition(":")[0] or hosts[0]
        worker = number(env, "TPU_WORKER_ID")
        return Place(f"{first}:{PORT}", len(hosts) * slices, this * len(hosts) + worker)
    if "JAX_COORDINATOR_IP" in env and "NNODES" in env:
        first = f"{env['JAX_COORDINATOR_IP']}:{env.get('JAX_COORDINATOR_PORT', PORT)}"
        return Place(first, number(env, "NNODES"), number(env, "NODE_RANK"))
    return None


def tpu_vm(env: Env, asked: bool) -> Place | None:
    """A machine of a TPU slice, which its metadata server describes; asked only where there is a TPU, or by name."""
    if not asked and not (
        importlib.util.find_spec("libtpu") and (glob.glob("/dev/accel*") or glob.glob("/dev/vfio/*"))
    ):
        return None
    workers = metadata(env, "worker-network-endpoints")
    hosts = [worker.split(":")[2] for worker in workers.split(",") if worker.count(":") >= 2]
    if not hosts:
        raise ConfigError(f"--cluster: the metadata server names no workers: {workers!r}")
    return Place(f"{hosts[0]}:{PORT}", len(hosts), int(metadata(env, "agent-worker-number")))


def metadata(env: Env, key: str) -> str:
    """An attribute of this machine."""
    host = env.get("GCE_METADATA_HOST", METADATA)
    url = f"http://{host}/computeMetadata/v1/instance/attributes/{key}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return str(answer.read().decode())
    except (urllib.error.URLError, OSError) as e:
        raise ConfigError(f"--cluster: the metadata server at {host} has no {key}: {e}") from None


LAUNCHERS: dict[str, Callable[[Env, bool], Place | None]] = {
    "slurm": slurm,
    "openmpi": openmpi,
    "gke": gke,
    "tpu-vm": tpu_vm,
}
