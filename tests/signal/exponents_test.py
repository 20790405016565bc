"""Growth of the first update: what is published was measured, fits the rule of this code, and comes out again."""

import json

import numpy as np
import pytest

from benchmarks import exponents
from benchmarks.numbers import RESULTS
from deepinit.signal import growth

ROWS = json.loads((RESULTS / "exponents.json").read_text())["rows"]


def test_the_promised_schemes_are_there_by_group_under_both_optimizers():
    found = {(r["scheme"], r["group"], r["optimizer"]) for r in ROWS if exponents.held(r["scheme"], r["group"])}
    assert {scheme for scheme, _, _ in found} == set(exponents.PROMISED)
    for scheme in set(exponents.PROMISED) - {"ReZero", "Fixup"}:  # ReZero's matrices have no gradient at step 0
        assert {(scheme, "matrices", o) for o in ("sgd", "adam")} <= found
    others = (("ReZero", "gates"), ("Fixup", "attention"), ("Fixup", "mlp"), ("CompleteP", "norm_gains"))
    assert {(*other, o) for o in ("sgd", "adam") for other in others} <= found


def test_measured_slopes_are_those_of_the_rule():
    for r in ROWS:
        slope = np.polyfit(np.log(exponents.DEPTHS), np.log(r["sizes"]), 1)[0]
        assert slope == pytest.approx(r["measured"], abs=1e-9)
        if exponents.held(r["scheme"], r["group"]):
            assert r["measured"] == pytest.approx(r["rule"], abs=0.15), (r["scheme"], r["group"], r["optimizer"])


@pytest.mark.parametrize("label", ["DeepNorm", "Fixup", "CompleteP"])
def test_the_published_rule_is_that_of_this_code(label):
    name, args = exponents.SCHEMES[label]
    rule = growth.exponents(lambda depth: exponents.recipe_at(name, args, depth), exponents.DEPTHS, exponents.OPTIONS)
    for r in ROWS:
        if r["scheme"] == label:
            assert getattr(rule[r["group"]], r["optimizer"]) == pytest.approx(r["rule"], abs=1e-6)


@pytest.mark.slow
def test_a_scheme_measured_again():
    name, args = exponents.SCHEMES["SkipInit, 1/sqrt(R)"]
    sizes = [exponents.measured(name, args, depth)["matrices"] for depth in exponents.DEPTHS]
    sgd, adam = np.polyfit(np.log(exponents.DEPTHS), np.log(sizes), 1)[0]
    assert sgd == pytest.approx(0.0, abs=0.15)
    assert adam == pytest.approx(0.5, abs=0.15)
