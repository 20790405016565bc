"""Tables are made from the data: every number in them is one of a recipe or a verdict."""

import dataclasses
import io
import json

import pytest

import deepinit
from deepinit.invariants import inspect
from deepinit.report import tables
from deepinit.schemes.registry import entry, schemes
from tests.models import SMALL, born, recipe_of


def printed(show, *arguments):
    """What a table function prints where the output is a file."""
    out = io.StringIO()
    show(tables.console(file=out), *arguments)
    return out.getvalue()


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.02, "0.02"), (1 / 3, "0.333333"), ((1.0, 0.5), "1 .. 0.5"), (None, "-"), (float("inf"), "none"), (0.0, "0")],
)
def test_number(value, shown):
    assert tables.number(value) == shown


@pytest.mark.parametrize("scheme", schemes(), ids=deepinit.scheme_names())
def test_facts_of_every_scheme(scheme):
    facts = tables.scheme_facts(scheme)
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    assert facts["name"] == scheme.name
    assert facts["source"]
    assert facts["summary"] == scheme.summary


def test_schemes_table():
    out = printed(lambda console: console.print(tables.schemes_table(schemes())))
    for s in schemes():
        assert s.name in out
    assert "(unverified)" in out


@pytest.mark.parametrize("name", ["gpt2", "deepnorm", "rezero", "fixup", "mup", "external", "layernorm_scaling"])
def test_explain(name):
    recipe = recipe_of(name)
    out = printed(tables.explain, recipe, entry(name))
    assert recipe.residual.formula in out
    for role, law in recipe.weights.items():
        if SMALL.count(role):
            assert role in out
            assert type(law).__name__ in out
            if law.formula:
                assert law.formula in out
    assert f"{SMALL.num_parameters:,} parameters, {SMALL.num_residuals} residuals" in out
    assert f"docs/schemes/{name}.md" in out
    if recipe.requires:
        assert "requires" in out


def test_law_rows_give_the_fans_of_the_role():
    rows = {r[0]: r for r in tables.law_rows(recipe_of("modern"))}
    assert rows["attn_k"][1] == "64 -> 32"
    assert rows["mlp_down"][1] == "160 -> 64"
    assert rows["norm_scale"][1] == ""
    assert rows["attn_q"][4] == f"{recipe_of('modern').weights['attn_q'].bound:.6g}"


def test_updates_of_a_transfer_scheme():
    recipe = recipe_of("mup", SMALL, base_width=32)
    rows = {r[0]: r for r in tables.law_rows(recipe)}
    assert float(rows["mlp_up"][6]) == pytest.approx(recipe.updates["mlp_up"].lr) == 0.5


def test_a_law_by_layer_shows_its_ends():
    rows = {r[0]: r for r in tables.law_rows(recipe_of("megatron", divisor="layer"))}
    assert rows["attn_out"][3] == "0.0141421 .. 0.00816497"


# --- verdicts ----------------------------------------------------------------------------------------------------


def test_verdict():
    _, recipe, params = born("megatron")
    verdict = inspect(params, recipe)
    out = printed(tables.verdict, verdict)
    for row in verdict.rows:
        assert row.path in out
    assert f"init ok: {verdict.summary()}" in out
    assert f"digest {verdict.digest}" in out
    assert "FAILS" not in out


def test_a_failing_verdict_names_leaf_and_reason():
    _, recipe, params = born("megatron")
    verdict = inspect(params | {"lm_head": 1.2 * params["lm_head"]}, recipe)
    [bad] = verdict.bad
    out = printed(tables.verdict, verdict)
    assert "init WRONG" in out
    assert any("lm_head" in line and "FAILS" in line for line in out.splitlines())
    assert any(bad.reason in line[-1] for line in tables.verdict_rows(verdict.rows))  # a narrow screen folds it


# Of a law by layer: its ends, and the layer that is furthest off.
def test_a_law_by_layer_is_three_lines():
    g = SMALL.replace(num_layers=9)
    _, recipe, params = born(recipe_of("megatron", g, divisor="layer"))
    rows = inspect(params, recipe).rows
    worst = next(r for r in rows if r.role == "attn_out" and r.layer == 4)
    rows = [dataclasses.replace(r, ok=r is not worst, reason="too large" if r is worst else "") for r in rows]
    lines = [line for line in tables.verdict_rows(rows) if line[1] == "attn_out"]
    assert [line[0].split("[")[1] for line in lines] == ["0]", "4]", "8]"]
    assert lines[1][-1] == "FAILS: too large"
    assert lines[0][-1] == "ok"


# Paths are never cut off, also where the output is no terminal.
def test_lines_are_whole():
    _, recipe, params = born("layerscale", bias=True, norm="layernorm")
    out = printed(tables.verdict, inspect(params, recipe))
    assert "layers/attn_residual/norm/norm_scale" in out
    assert "…" not in out
