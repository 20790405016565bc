"""Rows on disk: appended, cut back on resuming, readable after a crash."""

import json
import sys

import pytest

from deepinit.errors import ConfigError
from deepinit.train import metrics
from deepinit.train.config import Config
from deepinit.train.metrics import Metrics


def test_rows_are_there_at_once(tmp_path):
    m = Metrics(tmp_path)
    m.write({"step": 1, "loss": 2.5})
    m.write({"step": 1, "eval_loss": float("nan")})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"step": 1, "loss": 2.5}, {"step": 1, "eval_loss": None}]
    m.close()


def test_rows_after_the_restored_step_are_dropped(tmp_path):
    m = Metrics(tmp_path)
    for step in (1, 2, 3, 4):
        m.write({"step": step})
    m.close()
    with (tmp_path / "metrics.jsonl").open("a") as f:
        f.write('{"step": 5, "lo')  # the process died while it wrote
    again = Metrics(tmp_path, after=2)
    again.write({"step": 3})
    again.close()
    assert [row["step"] for row in metrics.read(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_a_new_run_starts_empty(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 7}\n')
    Metrics(tmp_path).close()
    assert metrics.read(tmp_path / "metrics.jsonl") == []


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboardX")
    m = Metrics(tmp_path, tensorboard=True)
    m.write({"step": 1, "loss": 2.5})
    m.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"loss" in events.read_bytes()


def test_tensorboard_missing(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "tensorboardX", raising=False)
    config = Config().replace(train__tensorboard=True)
    with pytest.raises(ConfigError, match=r"pip install 'deepinit\[tensorboard\]'"):
        config.check()
