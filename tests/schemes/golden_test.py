"""Every number of tests/golden/schemes.json, to the six digits it has, through the public face."""

import functools
import json
import math
import pathlib

import pytest

from deepinit.geometry import Geometry
from deepinit.laws import Constant, Normal, TruncatedNormal, Uniform
from deepinit.schemes.registry import recipe

TABLE = json.loads((pathlib.Path(__file__).parents[1] / "golden" / "schemes.json").read_text())
GEOMETRIES = {k: Geometry(**v) for k, v in TABLE["geometries"].items()}
KINDS = {"normal": Normal, "truncated": TruncatedNormal, "uniform": Uniform, "constant": Constant}
DIGITS = 6e-6  # half a unit in the sixth digit, at most


@functools.cache
def made(name, label):
    return recipe(name, GEOMETRIES[label])


CELLS = [
    pytest.param(name, label, cell, id=f"{name}-{label}")
    for name, row in TABLE["schemes"].items()
    for label, cell in row.items()
]


def entries(golden):
    """(index, number) of a golden number: one, or one per layer or sublayer."""
    return [(int(i), v) for i, v in golden.items()] if isinstance(golden, dict) else [(0, golden)]


def at(numbers, index):
    return numbers[index] if isinstance(numbers, tuple) else numbers


def agrees(numbers, golden):
    return all(at(numbers, i) == pytest.approx(v, rel=DIGITS, abs=0) for i, v in entries(golden))


@pytest.mark.parametrize(("name", "label", "cell"), CELLS)
def test_weights(name, label, cell):
    weights = made(name, label).weights
    for roles, (kind, number, *bound) in cell.get("roles", {}).items():
        for role in roles.split():
            if role not in weights:  # a structure of the source that these sizes do not have
                continue
            law = weights[role]
            assert isinstance(law, KINDS[kind]), f"{role} is {law}"
            assert law.layered == isinstance(number, dict), f"{role}: one number, or one per layer?"
            assert agrees(law.parameter, number), f"{role}: {law.parameter} is not {number}"
            if bound:
                assert agrees(law.bound, bound[0]), f"{role}: bound {law.bound} is not {bound[0]}"


@pytest.mark.parametrize(("name", "label", "cell"), CELLS)
def test_residual(name, label, cell):
    residual = made(name, label).residual
    for key in ("skip", "branch"):
        if key in cell:
            assert agrees(getattr(residual, key), cell[key]), f"{key}: {getattr(residual, key)} is not {cell[key]}"


@pytest.mark.parametrize(("name", "label", "cell"), CELLS)
def test_multipliers(name, label, cell):
    multipliers = made(name, label).multipliers
    for key, value in cell.get("multipliers", {}).items():
        if key in ("embed", "logits") and not isinstance(value, str):
            assert multipliers[key] == pytest.approx(value, rel=DIGITS), key


def test_realized_std_of_an_uncorrected_cut():
    # The std of the values drawn, not that of the normal before the cut.
    law = made("modern_small", "A").weights["attn_q"]
    assert law.std == pytest.approx(0.986578 * math.sqrt(2 / (5 * 768)), rel=1e-6)
    assert law.sigma == pytest.approx(math.sqrt(2 / (5 * 768)), rel=1e-12)
