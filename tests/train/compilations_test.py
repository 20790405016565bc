"""Compiled programs are kept, and found at the second start."""

import json
import os
import subprocess
import sys

from deepinit.train import compilations

START = """
import json, sys, jax
from deepinit.train import compilations
jax.jit(lambda x: x + 1)(1)  # compiled before the folder is named
compilations.SHORTEST = 0
compilations.keep(sys.argv[1])
seen = []
jax.monitoring.register_event_listener(lambda name, **_: seen.append(name))
jax.jit(lambda x: x * 2 + 1)(1).block_until_ready()
print(json.dumps([sum("cache_hits" in name for name in seen), str(jax.config.jax_compilation_cache_dir)]))
"""


def start(setting, **env):
    keep = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    run = subprocess.run([sys.executable, "-c", START, setting], capture_output=True, text=True, env={**keep, **env})
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


# case B80
def test_the_second_start_finds_what_the_first_has_compiled(tmp_path):
    env = {"XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    first, second = start("user", **env), start("user", **env)
    assert first[0] == 0
    assert second[0] > 0
    folder = compilations.user_folder().name
    assert second[1] == str(tmp_path / "deepinit" / folder)
    assert list((tmp_path / "deepinit" / folder).iterdir())


def test_an_empty_name_keeps_nothing_and_jax_s_own_setting_goes_before_the_users(tmp_path):
    env = {"XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    assert start("", **env) == [0, "None"]
    assert start("user", JAX_COMPILATION_CACHE_DIR=str(tmp_path / "own"), **env)[1] == str(tmp_path / "own")
    assert not (tmp_path / "deepinit").exists()


def test_machines_with_other_instructions_have_folders_of_their_own(monkeypatch):
    here = compilations.user_folder()
    monkeypatch.setattr(compilations, "instructions", lambda: "another machine")
    assert compilations.user_folder().parent == here.parent
    assert compilations.user_folder() != here
