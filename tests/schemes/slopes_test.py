"""Sizes of activations in a model's first steps: level over width under muP, over depth under CompleteP."""

import functools

import pytest

from deepinit.signal.coord import FLAT_SIZE, check
from deepinit.signal.grid import Grid, recipes
from deepinit.train.config import load

pytestmark = pytest.mark.slow

PLACES, STEPS = ("first", "middle", "last"), range(5)
# Adam's first steps are lr in every entry: a tenth of the base's std of 0.02, so that four of them matter in every
# layer and leave it near its start, where the slopes of the theory are those of a limit in width and not in time.
LR = 0.002
WIDTH = Grid(widths=(64, 128, 256, 512), depths=(), seeds=3, steps=4, lr=LR)
DEPTH = Grid(widths=(), depths=(2, 4, 16, 64), seeds=3, steps=4, lr=LR)
# A layer's first values have random signs, so that under CompleteP their share of the stream falls as 1/L: over depth
# models are compared at width 32, where a base of std 0.02 makes them small beside the table. At 64 they make the slope
# of the last layer -0.08 at step 0, and -0.10 +- 0.03 after a step.
NARROW = 32


@functools.cache
def slopes(scheme, grid, *flags):
    """(quantity, step) -> slope, and those that the tool fails."""
    config = load((), ["--scheme.name", scheme, "--model.d-ff", "256", *flags])
    at = recipes(config, grid)
    over_width = bool(grid.widths)
    found = check(scheme, lambda width, depth: at(width if over_width else NARROW, depth), grid, config.model_options())
    return {(s.quantity, s.step): s.slope for s in found.slopes}, [s for s in found.slopes if s.ok is False]


def streams(found):
    return {(place, step): found[f"size of stream, {place} layer", step] for place in PLACES for step in STEPS}


def outside(found):
    return {k: v for k, v in streams(found).items() if abs(v) > FLAT_SIZE}


# case B60
def test_mup_is_level_over_width():
    found, failed = slopes("mup", WIDTH, "--scheme.args.base_head_dim", "16")
    assert not failed
    assert not outside(found)
    assert found["size of logits", 0] == pytest.approx(-0.5, abs=0.05)  # a readout that is not zero
    for step in STEPS:
        assert found["size of logits", step] < FLAT_SIZE
        assert abs(found["size of attention logits", step]) < FLAT_SIZE  # heads as wide as the base's: 1/sqrt(h)


def test_the_standard_scheme_is_not():
    found, failed = slopes("fixed_normal", WIDTH)
    assert failed
    assert len(outside(found)) == len(streams(found))
    assert min(streams(found).values()) > 5 * FLAT_SIZE
    assert min(found["size of logits", step] for step in STEPS) > 4 * FLAT_SIZE


def test_a_zero_readout_has_no_logits_at_first():
    grid = Grid(widths=(64, 128), depths=(), seeds=2, steps=1, lr=LR)
    found, failed = slopes("mup", grid, "--scheme.args", "{base_head_dim: 16, zero_readout: true}")
    assert not failed
    assert ("size of logits", 0) not in found  # exactly zero: no slope
    assert ("size of logits", 1) in found


# case B62
def test_completep_is_level_over_depth():
    found, failed = slopes("completep", DEPTH, "--scheme.args", "{base_width: 32, base_head_dim: 16}")
    assert not failed
    assert not outside(found)
    assert all(abs(found["size of logits", step]) < FLAT_SIZE for step in STEPS)


def test_the_standard_scheme_grows_with_depth():
    found, failed = slopes("fixed_normal", DEPTH)
    assert failed
    assert all(found["size of stream, last layer", step] > 2 * FLAT_SIZE for step in STEPS[1:])
