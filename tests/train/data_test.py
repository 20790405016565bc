"""Windows, the held-out split, and batches that are a function of (seed, step) alone."""

import numpy as np
import pytest

from deepinit.errors import ConfigError
from deepinit.train import data
from deepinit.train.config import DataConfig

SIZES = {"batch_size": 4, "eval_batch_size": 4, "eval_batches": 3}


@pytest.fixture
def counting(tmp_path):
    """A file in which every window of 8 + 1 bytes begins with its own number."""
    width, count = 9, 200
    body = bytearray(b"." * (width * count))
    for i in range(count):
        body[i * width] = i
    (tmp_path / "a.txt").write_bytes(bytes(body))
    return DataConfig(files=(str(tmp_path / "*.txt"),), seq_len=8, eval_fraction=0.1)


def windows_of(batches):
    return [int(b["tokens"][j, 0]) for b in batches for j in range(len(b["tokens"]))]


def ids(batches):
    return [i for b in batches for i in b["id"].tolist()]


def test_batches_depend_on_seed_and_step_alone(counting):
    one, two = data.load(counting, **SIZES), data.load(counting, **SIZES)
    late = two.train[50]  # in any order, by another instance
    for step in (50, 3, 0):
        assert np.array_equal(one.train[step]["tokens"], two.train[step]["tokens"])
    assert np.array_equal(one.train[50]["tokens"], late["tokens"])
    other = data.load(DataConfig(counting.files, 8, seed=1, eval_fraction=0.1), **SIZES)
    assert not np.array_equal(one.train[0]["tokens"], other.train[0]["tokens"])


def test_every_window_once_an_epoch_each_epoch_anew(counting):
    d = data.load(counting, **SIZES)
    steps = d.num_train // 4
    assert d.num_train % 4 == 0
    first = windows_of(d.train[i] for i in range(steps))
    second = windows_of(d.train[i] for i in range(steps, 2 * steps))
    assert sorted(first) == sorted(second)
    assert len(set(first)) == d.num_train
    assert first != second


def test_a_batch_size_does_not_change_the_order(counting):
    whole = data.load(counting, batch_size=8, eval_batch_size=4, eval_batches=1)
    half = data.load(counting, batch_size=4, eval_batch_size=4, eval_batches=1)
    assert windows_of([whole.train[5]]) == windows_of([half.train[10], half.train[11]])


# case B75
def test_a_run_that_goes_on_sees_what_it_would_have_seen(counting):
    """Ten steps read by two processes; then ten more by one, and in batches of another size."""
    d = data.load(counting, **SIZES)
    whole = ids(d.train[step] for step in range(20))
    assert len(set(whole)) == 80
    assert ids(d.train.rows(step, rows) for step in range(10) for rows in ((0, 1), (2, 3))) == whole[:40]
    again = data.load(counting, **SIZES).train.after(40, 10)
    assert ids(again[step] for step in range(10, 20)) == whole[40:]
    wide = data.load(counting, **{**SIZES, "batch_size": 8}).train.after(40, 10)
    assert ids(wide[step] for step in range(10, 15)) == whole[40:]


def test_held_out_text_is_never_trained_on(counting):
    d = data.load(counting, **SIZES)
    trained = set(windows_of(d.train[i] for i in range(d.num_train // 4)))
    held = windows_of(d.eval_batches())
    assert not trained & set(held)
    assert len(held) == 12
    assert d.num_held_out == 16  # two chunks of eight


def test_held_out_text_is_spread_over_the_whole():
    _, held = data.split(10_000, 0.05)
    thirds = np.histogram(held, bins=3, range=(0, 10_000))[0]
    assert len(held) == pytest.approx(500, abs=8)
    assert thirds.max() - thirds.min() <= data.CHUNK


def test_evaluation_sees_the_same_batches_and_none_twice(counting):
    d = data.load(counting, batch_size=4, eval_batch_size=4, eval_batches=100)
    held = windows_of(d.eval_batches())
    assert held == windows_of(d.eval_batches())
    assert len(held) == len(set(held)) == 16


def test_the_tail_is_padded_with_weight_zero(tmp_path):
    text = bytes(range(9)) * 40 + b"tail"
    (tmp_path / "a.txt").write_bytes(text)
    config = DataConfig((str(tmp_path / "a.txt"),), seq_len=8, eval_fraction=0.1)
    d = data.load(config, batch_size=1, eval_batch_size=1, eval_batches=1)
    assert d.num_train + d.num_held_out == 41
    last = data.Windows(d.text, 8, np.array([40]))[0]
    assert last["tokens"].tolist() == [*b"tail", 0, 0, 0, 0, 0]
    assert last["weights"].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]  # 4 tokens have 3 targets


def test_shapes_and_types(counting):
    batch = data.load(counting, **SIZES).train[0]
    assert batch["tokens"].shape == (4, 9)
    assert batch["tokens"].dtype == np.int32
    assert batch["weights"].shape == (4, 8)
    assert batch["weights"].dtype == np.float32


def test_pythons_own_text():
    one, two = data.Text.of(data.python()), data.read(())
    assert one.sha256 == two.sha256
    assert 2e6 < len(one.tokens) < 1e7
    assert b"import argparse" in one.tokens.tobytes()


def test_files_in_the_order_given(tmp_path):
    for name in "ab":
        (tmp_path / name).write_bytes(name.encode() * 3)
    text = data.read((str(tmp_path / "b"), str(tmp_path / "a")))
    assert text.tokens.tobytes() == b"bbb\n\naaa"
    assert text.documents == 2


@pytest.mark.parametrize(
    ("files", "shown"),
    [(("nowhere.txt",), "there is no file 'nowhere.txt'"), (("no*.txt",), "there is no file 'no[*].txt'")],
)
def test_missing_files(files, shown):
    with pytest.raises(ConfigError, match=f"data.files: {shown}"):
        data.read(files)


def test_too_little_text(tmp_path):
    (tmp_path / "a").write_bytes(b"short")
    with pytest.raises(ConfigError, match=r"data.files: 5 bytes are too few .* at least 180"):
        data.load(DataConfig((str(tmp_path / "a"),), seq_len=8, eval_fraction=0.05), **SIZES)
