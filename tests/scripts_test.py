"""The launchers: clean, honest about what they would do, and really run where that can be done here."""

import os
import shlex
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "scripts").iterdir())
FLAGS = ["--config", "configs/tiny.yaml", "--data.files", "two words.txt", "--mesh.fsdp", "4"]


def run(*command, env=None, timeout=60):
    got = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=timeout, cwd=ROOT, env=env)
    return got


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing():
    got = run("shellcheck", *SCRIPTS)
    assert got.returncode == 0, got.stdout


def test_every_script_can_be_run():
    for script in SCRIPTS:
        assert script.stat().st_mode & stat.S_IXUSR, script


DRY = {
    "launch_local.sh": ["2"],
    "launch_slurm.sbatch": [],
    "launch_mpi.sh": ["2", "--hosts", "a,b"],
    "launch_tpu_vm.sh": ["v5", "--zone", "z", "--no-copy"],
    "launch_gke_xpk.sh": ["w", "--cluster", "c", "--image", "i", "--tpu-type", "v5litepod-16"],
}


@pytest.mark.parametrize("name", DRY)
def test_a_dry_run_shows_the_flags_and_runs_nothing(name, tmp_path):
    env = {"PATH": os.environ["PATH"], "DEEPINIT": str(tmp_path / "nothing-here")}
    got = run(ROOT / "scripts" / name, *DRY[name], "--dry-run", *FLAGS, env=env)
    assert got.returncode == 0, got.stderr
    words = shlex.split(got.stdout.splitlines()[0])  # what a shell makes of it
    words = shlex.split(words[-1]) if "two words.txt" not in words else words  # a command for another machine
    assert words[words.index("--config") :][: len(FLAGS)] == FLAGS
    assert "train" in words


@pytest.mark.parametrize("name", [n for n in DRY if n != "launch_slurm.sbatch"])
def test_without_arguments_they_say_how(name):
    got = run(ROOT / "scripts" / name)
    assert got.returncode == 2
    assert f"scripts/{name}" in got.stderr


def test_every_local_process_gets_its_number_and_devices():
    env = {"PATH": os.environ["PATH"]}
    lines = run(ROOT / "scripts/launch_local.sh", 2, "--dry-run", *FLAGS, env=env).stdout.splitlines()
    assert len(lines) == 2
    for i, line in enumerate(lines):
        assert f"--processes 2 --process {i} " in line
        assert "device_count=4" in line


# ---------------------------------------------------------------------------------------------- recorded commands


@pytest.fixture
def recorded(tmp_path):
    """A `gcloud` and an `xpk` that write down their arguments, since the real ones need a cloud."""
    stub = '#!/usr/bin/env bash\nprintf "%s\\0" "${0##*/}" "$@" >> "$RECORD"\nprintf "\\n" >> "$RECORD"\n'
    for name in ("gcloud", "xpk"):
        (tmp_path / name).write_text(stub)
        (tmp_path / name).chmod(0o755)
    record = tmp_path / "record"
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "RECORD": str(record)}

    def read():
        return [line.rstrip("\0").split("\0") for line in record.read_text().splitlines()]

    return env, read


def test_a_tpu_vm_is_copied_to_set_up_and_started(recorded):
    env, read = recorded
    got = run(ROOT / "scripts/launch_tpu_vm.sh", "v5", "--zone", "us-x", *FLAGS, env=env)
    assert got.returncode == 0, got.stderr
    scp, setup, work = read()
    assert scp[:5] == ["gcloud", "compute", "tpus", "tpu-vm", "scp"]
    assert scp[6:] == ["v5:", "--worker=all", "--zone", "us-x"]
    assert setup[4:9] == ["ssh", "v5", "--worker=all", "--zone", "us-x"]
    assert "make -C deepinit --silent setup" in setup[-1]
    assert r"deepinit train --cluster tpu-vm --config configs/tiny.yaml --data.files two\ words.txt" in work[-1]


def test_a_workload_of_xpk(recorded):
    env, read = recorded
    start = [*DRY["launch_gke_xpk.sh"], "--slices", "2", "--zone", "us-x"]
    assert run(ROOT / "scripts/launch_gke_xpk.sh", *start, *FLAGS, env=env).returncode == 0
    (call,) = read()
    assert call[:4] == ["xpk", "workload", "create", "--cluster"]
    for flag, value in (("--tpu-type", "v5litepod-16"), ("--num-slices", "2"), ("--max-restarts", "10")):
        assert call[call.index(flag) + 1] == value
    assert call[-1].startswith("deepinit train --cluster gke --config configs/tiny.yaml")


# ---------------------------------------------------------------------------------------------- attempts


@pytest.mark.parametrize(
    ("statuses", "retries", "wanted", "starts"),
    [
        ("75 0", 3, 0, 2),  # saved, and gone on
        ("137 75 0", 3, 0, 3),
        ("137 137", 1, 137, 2),
        ("1 0", 3, 1, 1),  # a failed check fails again
        ("2 0", 3, 2, 1),
    ],
)
def test_what_is_started_again(statuses, retries, wanted, starts, tmp_path):
    """A command that ends with the next status of a list, in place of the real one."""
    fake = tmp_path / "fake"
    fake.write_text(
        '#!/usr/bin/env bash\n[[ $7 == 0 ]] || exit 0\nread -r first rest < "$LIST"\n'
        'echo "$rest" > "$LIST"\necho start >> "$LIST.starts"\nexit "$first"\n'
    )
    fake.chmod(0o755)
    (tmp_path / "list").write_text(statuses + "\n")
    env = {**os.environ, "DEEPINIT": str(fake), "LIST": str(tmp_path / "list")}
    got = run(ROOT / "scripts/launch_local.sh", 2, "--retries", retries, env=env)
    assert got.returncode == wanted, got.stderr
    assert len((tmp_path / "list.starts").read_text().splitlines()) == starts
