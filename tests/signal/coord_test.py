"""Coordinate checks: the fit and its verdict, and what passes on drawn models."""

import contextlib
import dataclasses
import io
import json
import math

import numpy as np
import pytest

from deepinit import cli
from deepinit.signal.coord import bounds, check, fits, verdict
from deepinit.signal.grid import Grid, recipes
from deepinit.train.config import load
from tests.models import refused

TINY = Grid(widths=(32, 64, 128), depths=(2, 8), seeds=2, steps=2, batch=4, seq_len=16, vocab=48)


def outcome(scheme, grid, *flags):
    config = load((), ["--scheme.name", scheme, "--model.mlp", "relu", *flags])
    return check(scheme, recipes(config, grid), grid, config.model_options())


def slope(found, axis, quantity, step):
    return next(s for s in found.slopes if (s.axis, s.quantity, s.step) == (axis, quantity, step))


# --- the fit -----------------------------------------------------------------------------------------------------


def test_a_power_law_has_its_exponent():
    widths = (32, 64, 128)
    runs = [{("change of logits", 1): 3 * w**0.4 * np.array([0.9, 1.0, 1.1])} for w in widths]
    [found] = fits("width", widths, runs)
    assert found.slope == pytest.approx(0.4)
    assert not found.ok
    assert found.confidence > 0.99
    assert found.half_width < 1e-6  # the seeds differ in size, not in slope


def test_scatter_between_seeds_lowers_the_confidence():
    close = verdict("width", "x", 1, np.ones(3), np.array([0.10, 0.12, 0.14]), -0.15, 0.15)
    far = verdict("width", "x", 1, np.ones(3), np.array([-0.2, 0.12, 0.44]), -0.15, 0.15)
    assert close.slope == pytest.approx(far.slope)
    assert close.ok
    assert far.ok
    assert close.confidence > 0.9 > 0.6 > far.confidence
    assert verdict("width", "x", 1, np.ones(2), np.array([0.10, 0.24]), -0.15, 0.15).ok is None
    assert verdict("width", "x", 1, np.ones(3), np.array([0.30, 0.31, 0.32]), -0.15, 0.15).ok is False
    assert far.half_width == pytest.approx(4.303 * 0.32 / math.sqrt(3), rel=1e-3)


def test_growth_alone_is_a_fault_over_depth_and_of_logits():
    assert bounds("width", "change of stream, last layer")[0] > -math.inf
    assert bounds("width", "size of stream, last layer") == (-0.10, 0.10)
    assert bounds("depth", "change of stream, last layer")[0] == -math.inf
    assert bounds("width", "size of logits")[0] == -math.inf


def test_quantities_that_are_zero_are_left_out_and_infinite_ones_fail():
    runs = [{("a", 1): np.zeros(2), ("b", 1): np.array([1.0, np.inf])} for _ in range(2)]
    [found] = fits("width", (32, 64), runs)
    assert found.quantity == "b"
    assert not found.ok


# --- the grid ----------------------------------------------------------------------------------------------------


def test_a_grid_runs_every_point_once():
    assert TINY.points == ((32, 2), (64, 2), (128, 2), (32, 8))
    assert Grid(depths=()).points == tuple((w, 4) for w in (32, 64, 128, 256))


def test_wrong_grids_are_refused():
    assert "two sizes" in refused(Grid, widths=(64,))
    assert "multiple" in refused(Grid, widths=(40, 80))
    assert "seeds" in refused(Grid, seeds=1)
    assert "optimizer" in refused(Grid, optimizer="lion")
    assert "empty" in refused(Grid, widths=(), depths=())


def test_schemes_get_the_smallest_sizes_as_their_base():
    at = recipes(load((), ["--scheme.name", "completep"]), TINY)
    assert at(32, 2).updates["mlp_up"].lr == 1
    assert at(128, 2).updates["mlp_up"].lr == 1 / 4
    assert at(32, 8).residual.branch == 1 / 4
    given = recipes(load((), ["--scheme.name", "completep", "--scheme.args", "{base_width: 16, base_depth: 1}"]), TINY)
    assert given(32, 2).updates["mlp_up"].lr == 1 / 2
    g = at(128, 8).geometry
    assert (g.num_heads, g.head_dim, g.d_ff, g.vocab_size) == (8, 16, 512, 48)


# --- drawn models ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """(exit status, what was printed, folder of the report) of a check of two schemes over width, one over depth."""
    folder, said = tmp_path_factory.mktemp("coord"), io.StringIO()
    flags = ["--widths", "32,128", "--depths", "2,8", "--seeds", "2", "--steps", "2", "--model.mlp", "relu"]
    with contextlib.redirect_stdout(said):
        status = cli.main(["coord", "--schemes", "mup,fixed_normal", *flags, "--report", str(folder)])
    return status, said.getvalue(), folder


def test_mup_is_level_over_width_and_the_standard_scheme_is_not(command):
    data = json.loads((command[2] / "report.json").read_text())["schemes"]
    assert [(s["scheme"], s["width_ok"], s["depth_ok"]) for s in data] == [
        ("mup", True, False),
        ("fixed_normal", False, False),
    ]
    mup, plain = ({(s["axis"], s["quantity"], s["step"]): s["slope"] for s in one["slopes"]} for one in data)
    for t in (1, 2):
        assert abs(mup["width", "change of stream, last layer", t]) < 0.15
        assert plain["width", "change of stream, last layer", t] > 0.5
    assert mup["width", "size of logits", 0] == pytest.approx(-0.5, abs=0.1)
    assert plain["width", "effect of mlp_up", 1] > 0.5


def test_the_command_prints_slopes_and_verdicts(command):
    status, said, folder = command
    assert status == 1
    assert "mup: width passes, depth FAILS" in said
    assert "fixed_normal: width FAILS" in said
    assert "sure" in said
    assert (folder / "width_stream.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_completep_passes_over_depth():
    grid = Grid(widths=(), depths=(2, 16), seeds=2, steps=2, batch=4, seq_len=16, vocab=48)
    found = outcome("completep", grid)
    assert found.ok("depth")
    assert found.ok("width") is None
    json.dumps(found.to_json(), allow_nan=False)


# case B58
@pytest.mark.slow
def test_the_output_shrinks_and_activations_are_level_from_64_to_512():
    grid = Grid(widths=(64, 128, 256, 512), depths=(), seeds=3, steps=4)
    found = outcome("mup", grid, "--model.num-layers", "2")
    for place in ("first", "middle", "last"):
        for t in range(5):
            assert abs(slope(found, "width", f"size of stream, {place} layer", t).slope) <= 0.1, (place, t)
    sizes = [slope(found, "width", "size of logits", t) for t in range(5)]
    assert sizes[0].slope == pytest.approx(-0.5, abs=0.05)  # a random readout, 1/sqrt(width)
    assert all(s.slope <= 0.1 for s in sizes)
    ends = dataclasses.replace(grid, widths=(64, 512))
    zero = outcome("mup", ends, "--scheme.args", "{zero_readout: true}")
    assert not any(s.quantity == "size of logits" and s.step == 0 for s in zero.slopes)  # exactly 0: no slope
    assert zero.ok("width")
    standard = outcome("fixed_normal", ends)
    assert not standard.ok("width")
    assert slope(standard, "width", "change of logits", 1).slope > 0.5
