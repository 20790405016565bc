"""Warnings of a run: each is given for its fault and for no healthy run."""

import dataclasses
import math

import numpy as np
import pytest

from deepinit.signal.measured import Measured, RoleSignal
from deepinit.signal.watch import WINDOW, Watch, row, spread, unigram_entropy

LAYERS = 4


def measured(variance=1.0, gradient=1.0, correlation=0.1, update=1e-3, gate=0.0):
    """A probe in which everything is well."""
    per_layer = np.full(LAYERS, 1.0)
    role = RoleSignal(per_layer, per_layer * gradient, per_layer * 0, per_layer * 1e-4, per_layer * update, 0.0, 0.0,
                      tuple(range(LAYERS)))  # fmt: skip
    return Measured(
        scheme="rezero", layers=LAYERS, batch=2, seq_len=8, variance=np.full(2 * LAYERS + 1, variance),
        branch=np.full(2 * LAYERS, 0.1), correlation=np.full(2 * LAYERS + 1, correlation), entropy=per_layer,
        scores=per_layer, gradient=np.full(LAYERS + 1, gradient), roles={"mlp_up": role},
        gates={"layers/residual_gate": per_layer * gate}, loss=2.0, logit_variance=1.0, own_logit=0.0, seconds=0.0,
    )  # fmt: skip


def changed(m, **arrays):
    return dataclasses.replace(m, **arrays)


def test_a_healthy_run_says_nothing():
    watch, rng = Watch(unigram=3.2, patience=20), np.random.default_rng(0)
    for step in range(1, 401):
        assert watch.loss(step, 5.5 * math.exp(-step / 150) + 1.5 + 0.05 * rng.standard_normal()) == []
        if step % 20 == 0:
            assert (
                watch.probe(step, measured(variance=1 + step / 50, gradient=1 + 0.1 * rng.random(), gate=step / 1e4))
                == []
            )


def test_a_stall_at_the_unigram_entropy_is_told_once():
    watch, rng = Watch(unigram=3.168, patience=50), np.random.default_rng(0)
    said = [
        w
        for step in range(1, 401)
        for w in watch.loss(step, 3.19 + 1.5 * math.exp(-step / 20) + 0.03 * rng.standard_normal())
    ]
    assert len(said) == 1
    assert "stalled" in said[0]
    assert "3.168" in said[0]


@pytest.mark.parametrize("floor", [2.9, 4.0])
def test_a_plateau_elsewhere_is_judged_by_where_it_is(floor):
    """Below the unigram entropy more than frequencies were learnt; above it, not even those."""
    watch = Watch(unigram=3.168)
    said = [w for step in range(300) for w in watch.loss(step, floor)]
    assert bool(said) is (floor > 3.168)


def test_a_falling_loss_is_no_stall():
    watch = Watch(unigram=3.168)
    assert [w for step in range(300) for w in watch.loss(step, 5.5 - 0.005 * step)] == []


def test_a_spike_names_the_layer_that_moved_first():
    watch = Watch()
    for step in range(1, 41):
        watch.loss(step, 2.0)
        if step % 5 == 0:
            m = measured()
            if step >= 30:  # layer 3 first, then everything
                m.gradient[3] *= 5
                m.gradient[2] *= 3.5
            if step >= 35:
                m.gradient[:] *= 20
            watch.probe(step, m)
    [said] = watch.loss(41, 4.0)
    assert "spike" in said
    assert "layer 3 moved first, at step 30" in said


def test_a_spike_without_probes_says_what_to_do():
    watch = Watch()
    for step in range(1, 31):
        watch.loss(step, 2.0)
    [said] = watch.loss(31, 3.5)
    assert "train.probe_every" in said


def test_noise_is_no_spike():
    watch, rng = Watch(), np.random.default_rng(0)
    assert [w for s in range(300) for w in watch.loss(s, 2.0 + 0.3 * rng.standard_normal())] == []


def test_variance_out_of_its_band_names_the_layer():
    watch = Watch()
    for step in (10, 20, 30):
        assert watch.probe(step, measured()) == []
    jumped = measured()
    jumped.variance[4:] *= 30  # after layer 2, and above
    jumped.variance[6] *= 3
    [said] = watch.probe(40, jumped)
    assert "first in layer 2" in said
    assert "layer 3 has 90" in said
    blown = measured()
    blown.variance[8] = np.inf
    assert any("layer 4 is not finite" in w for w in watch.probe(50, blown))


def test_a_variance_that_grows_slowly_keeps_its_band():
    watch = Watch()
    said = [w for step in range(0, 400, 10) for w in watch.probe(step, measured(variance=1.05**step, gate=step))]
    assert said == []


def test_dead_gates_are_named_after_a_while():
    watch = Watch()
    moving = measured()
    assert watch.probe(1, moving) == []
    assert watch.probe(50, moving) == []
    some = measured()
    some.gates["layers/residual_gate"][:] = [0.01, 0.0, 0.02, 0.0]
    [said] = watch.probe(120, some)
    assert "layer 2, 4" in said
    assert "layers/residual_gate" in said
    assert watch.probe(200, some) == []  # told once


def test_collapsed_tokens_are_named_by_layer():
    m = measured()
    m.correlation[4:] = 0.99
    watch = Watch()
    assert watch.probe(10, m) == []  # letter frequencies come first
    [said] = watch.probe(60, m)
    assert "from layer 2 on" in said


def test_updates_out_of_range_twice_in_a_row():
    watch = Watch()
    wild = measured()
    wild.roles["mlp_up"].update[2] = 0.9
    assert watch.probe(10, wild) == []
    [said] = watch.probe(20, wild)
    assert "mlp_up in layer 3" in said
    assert "0.9" in said
    calm = Watch()
    assert calm.probe(10, wild) == calm.probe(20, measured()) == calm.probe(30, wild) == []
    frozen = Watch()
    still = measured(update=1e-9)
    frozen.probe(1, still)
    assert "mlp_up" in frozen.probe(2, still)[0]
    unmoved = Watch()  # an exact zero is no step too small: the role has no gradient
    assert unmoved.probe(1, measured(update=0.0)) == unmoved.probe(2, measured(update=0.0)) == []


def test_unigram_entropy():
    assert unigram_entropy(np.array([1, 2, 3, 4] * 5)) == pytest.approx(math.log(4))
    assert unigram_entropy(np.zeros(10, np.uint8)) == 0


def test_a_row_is_plain():
    import json

    m = changed(measured(), gradient=np.array([1.0, np.inf, 1.0, 1.0, 1.0]))
    data = json.loads(json.dumps(row(7, m), allow_nan=False))
    assert data["step"] == 7
    assert data["stream_gradient"][1] is None
    assert len(data["variance"]) == LAYERS + 1
    assert WINDOW > 1


# case B25: most gates below 0.01 after a while, told once; ends and layers as the log has them
def test_gates_that_stay_near_zero():
    watch, path = Watch(), "layers/residual_gate"
    closed = {path: np.array([0.2, 0.001, 0.002, 0.0]), "layers/mlp/s_uv_branch_scale": np.zeros(4)}
    assert watch.near_zero(50, closed) == []
    [said] = watch.near_zero(100, closed)
    assert said.startswith(f"closed gates: {path} is below 0.01 in 3 of 4 layers after 100 steps")
    assert watch.near_zero(200, closed) == []
    assert Watch().near_zero(200, {path: np.array([0.2, 0.03, 0.002, 0.0])}) == []
    assert spread(closed[path]) == {"mean": 0.05075, "min": 0.0, "max": 0.2, "layers": [0.2, 0.001, 0.002, 0.0]}
