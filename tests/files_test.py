"""A file is the old one or the new one, whenever its writer is killed."""

import subprocess
import sys
import time

from etils import epath

from deepinit.files import write_whole

SIZE = 1 << 22
WRITER = f"""
import itertools, pathlib, sys
from deepinit.files import write_whole
for letter in itertools.cycle("ab"):
    write_whole(pathlib.Path(sys.argv[1]), letter * {SIZE})
"""


def test_a_killed_writer_leaves_a_whole_file(tmp_path):
    path = tmp_path / "file.json"
    seen = set()
    for _ in range(8):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(path)]) as writer:
            deadline = time.monotonic() + 60
            path.unlink(missing_ok=True)
            while not path.exists() and time.monotonic() < deadline:
                time.sleep(0.003)
            for _ in range(4):
                text = path.read_text()
                assert text == text[0] * SIZE
            writer.kill()
        text = path.read_text()
        assert text == text[0] * SIZE
        seen.add(text[0])
    assert seen <= {"a", "b"}


def test_paths_of_either_kind(tmp_path):
    for kind in (type(tmp_path), epath.Path):
        write_whole(kind(tmp_path / "x.json"), "{}\n")
        assert (tmp_path / "x.json").read_text() == "{}\n"
        assert [f.name for f in tmp_path.iterdir()] == ["x.json"]
