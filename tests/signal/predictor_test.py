"""The study of the prediction: what is published of it, and a small one on fresh seeds."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks import predictor
from deepinit.signal import checks
from deepinit.signal.predict import predict
from deepinit.train import data
from deepinit.train.config import DataConfig

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "predictor.json"


@pytest.fixture(scope="module")
def rows():
    return predictor.read(RESULTS)


def test_the_published_study_is_as_wide_as_it_says(rows):
    assert len({r["scheme"] for r in predictor.judged(rows)}) >= 25
    for key, values in (("depth", (12, 80, 200)), ("width", (64, 128)), ("mlp", ("gelu", "relu", "swiglu"))):
        assert {r[key] for r in rows} == set(values)
    assert {r["tokens"] for r in rows} == {"random", "text"}
    for some in ("tied", "qk_norm", "parallel", "experts"):
        assert any(r[some] for r in rows)
    assert any(r["kv"] < r["width"] // 16 for r in rows)


def test_the_published_scatter_is_the_predicted_one(rows):
    good = [r for r in predictor.judged(rows) if not r["normless"]]
    z = np.array([predictor.z_of(r) for r in good])
    assert len(z) > 500
    assert 0.8 < z.std() < 1.15
    assert (np.abs(z) > 4).mean() <= 0.01
    assert np.abs(z).max() < checks.LIMIT
    assert abs(z.mean()) < 0.15
    pairs = np.array([r["measured"] / r["variance"] - 1 for r in good]).reshape(-1, 2).mean(1)
    assert np.median(np.abs(pairs)) <= 0.04


def test_the_published_predictions_are_those_of_this_code(rows):
    mine = [r for r in rows if r["tokens"] == "random" and r["draw"] == 0 and r["depth"] <= 80]
    picked = np.random.default_rng(0).choice(len(mine), 12, replace=False)
    for r in (mine[i] for i in picked):
        recipe, options = predictor.setting(r)
        tokens = predictor.batches(r, None)["random"]
        p = predict(recipe, tokens[:, :-1], exponents=False, **options)
        assert p.variance[-1] == pytest.approx(r["variance"], rel=2e-3), r["scheme"]
        assert p.loss == pytest.approx(r["loss"], rel=2e-3), r["scheme"]


@pytest.mark.slow
def test_fresh_seeds_and_text():
    text = data.load(DataConfig(seq_len=predictor.POSITIONS), batch_size=4, eval_batch_size=1, eval_batches=1)
    configurations = [c for c in predictor.configurations(7) if c["depth"] == 12][:8]
    found = [r for c in configurations for r in predictor.examine(c, text)]
    judged = predictor.judged(found)
    assert len(judged) >= 14
    z = np.array([predictor.z_of(r) for r in judged])
    assert np.abs(z).max() < checks.LIMIT
    assert z.std() < 1.6
    for r in found:
        if r["amplification"] <= checks.AMPLIFIED and r["logits"] <= checks.WIDEST and r["loss_sd"] > 0:
            assert abs(r["measured_loss"] - r["loss"]) < checks.LIMIT * r["loss_sd"], r["scheme"]
