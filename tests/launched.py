"""Runs of several real processes for tests: started by our launchers, in folders of their own."""

import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

from deepinit.train import metrics
from deepinit.train.config import load
from tests.xla import FLAGS as XLA_FLAGS

ROOT = Path(__file__).parents[1]
FLAGS = """--model.num-layers 2 --model.d-model 16 --model.num-heads 2 --model.d-ff 32 --data.seq-len 16
    --scheme.name megatron --optimizer.warmup-steps 4 --optimizer.lr 1e-2 --train.steps 20 --train.batch-size 8
    --train.eval-every 0 --train.eval-batches 2 --train.checkpoint-every 5 --train.keep-checkpoints 4
    --data.log-samples true --mesh.data 2 --mesh.fsdp 4"""
TEXT = b"".join(b"%d times %d is %d. " % (i, j, i * j) for i in range(30) for j in range(30))


def flags(home, run, more=""):
    """The flags of a run in `home`, whose text is made if it is not there."""
    text = home / "text.txt"
    if not text.exists():
        text.write_bytes(TEXT)
    own = f"--data.files {text} --train.run-dir {home / run} --train.compilation-cache {home / 'cache'}"
    return [*f"{FLAGS} {own}".split(), *more.split()]


def config(home, run, more=""):
    """The same as a config."""
    return load([], flags(home, run, more))


def environment(devices=4):
    """Of a child: its own number of devices, compiled for as in the tests themselves, and none of pytest's own."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "SLURM_", "PYTEST_", "JAX_"))}
    xla = re.sub(r"device_count=\d+", f"device_count={devices}", XLA_FLAGS)
    return {**env, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla}


def start(command, devices=4):
    """A process whose whole group can be ended, with what it says in one text."""
    return subprocess.Popen(
        list(map(str, command)),
        env=environment(devices),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        cwd=ROOT,
    )


def local(home, run, more="", launch="", devices=4):
    """`launch_local.sh 2` with these flags."""
    return start([ROOT / "scripts/launch_local.sh", 2, *launch.split(), *flags(home, run, more)], devices)


def one_of_two(index, address, home, run, *more, devices=4):
    """Process `index` of two that are started by hand, with the coordinator at this address."""
    place = ["--coordinator", address, "--processes", 2, "--process", index]
    return start([ROOT / ".venv/bin/deepinit", "train", *place, *flags(home, run), *more], devices)


def address():
    """A free one, for a coordinator."""
    return f"127.0.0.1:{free_port()}"


def finish(process, timeout=1200):
    """(exit status, what was said)."""
    try:
        out, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, _ = process.communicate()
        raise AssertionError(f"not finished after {timeout} s: {out[-3000:]}") from None
    return process.returncode, out


def steps(folder):
    """step -> loss of a run."""
    return {row["step"]: row["loss"] for row in metrics.read(folder / "metrics.jsonl") if "loss" in row}


def samples(folder):
    """step -> sorted ids over all processes, each counted once."""
    seen = {}
    for path in sorted((folder / "samples").glob("*.jsonl")):
        for row in metrics.read(path):
            seen.setdefault(row["step"], set()).update(row["ids"])
    return {step: sorted(ids) for step, ids in sorted(seen.items())}


def wait_for(process, folder, step):
    """Until the metrics of a run hold a step."""
    deadline = time.monotonic() + 1200
    while time.monotonic() < deadline and process.poll() is None:
        if any(row["step"] >= step for row in metrics.read(folder / "metrics.jsonl")):
            return
        time.sleep(0.01)
    raise AssertionError(f"no step {step}: {finish(process, 10)}")


def children(process):
    """The process ids of a launcher's trainers, in the order of their numbers."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
            group = os.getpgid(int(path.parent.name))
        except OSError:
            continue
        if group == process.pid and b"--process" in words and b"train" in words:
            found[int(words[words.index(b"--process") + 1])] = int(path.parent.name)
    return [found[i] for i in sorted(found)]


SLURM_CONF = """ClusterName=deepinit
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={home}/munge/socket
CredType=cred/munge
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd.pid
SlurmctldPort={port}
SlurmdPort={other}
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def free_port():
    """A port of this machine that nobody uses."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def why_no_slurm():
    """Why no cluster can be made here; empty where one can."""
    if missing := [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]:
        return f"{', '.join(missing)} not installed (Debian: slurm-wlm, munge)"
    return "" if os.geteuid() == 0 else "a cluster of our own needs root"


@contextmanager
def slurm():
    """The environment of a one-node cluster of our own, which ends with the block."""
    # short, since a socket's path is limited; munged may still be taking its files away when the folder goes
    with tempfile.TemporaryDirectory(prefix="slurm", dir="/tmp", ignore_cleanup_errors=True) as folder:
        home, host = Path(folder), socket.gethostname().partition(".")[0]
        for name in ("state", "spool", "munge"):
            (home / name).mkdir(mode=0o700)
        (home / "munge/key").write_bytes(os.urandom(128))
        (home / "munge/key").chmod(0o400)
        facts = {"home": home, "host": host, "port": free_port(), "other": free_port(), "cpus": max(2, os.cpu_count())}
        conf = home / "slurm.conf"
        conf.write_text(SLURM_CONF.format(**facts))
        env = {**environment(), "SLURM_CONF": str(conf)}
        munge = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        munged = ["munged", "--force", *(f"--{flag}={home}/munge/{name}" for flag, name in munge.items())]
        daemons = []
        try:
            subprocess.run(munged, check=True, env=env)
            for name in ("slurmctld", "slurmd"):
                daemons.append(subprocess.Popen([name, "-D"], env=env, stderr=subprocess.DEVNULL))
            deadline = time.monotonic() + 60
            while "idle" not in (said := subprocess.run(["sinfo"], env=env, capture_output=True, text=True).stdout):
                if time.monotonic() > deadline:
                    raise AssertionError(f"no Slurm: {said} {(home / 'slurmctld.log').read_text()[-2000:]}")
                time.sleep(0.5)
            yield env
        finally:
            for daemon in reversed(daemons):
                daemon.terminate()
                daemon.wait(30)
            if (home / "munge/pid").exists():
                os.kill(int((home / "munge/pid").read_text()), signal.SIGTERM)
