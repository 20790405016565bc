"""Every number of tests/golden/schemes.json, to the six digits it has, through the public face."""

import functools
import json
import math
import pathlib

import pytest

import deepinit
from deepinit.geometry import LAYER_MATRICES, Geometry
from deepinit.laws import Constant, Normal, TruncatedNormal, Uniform
from deepinit.schemes.registry import resolve, scheme_names

TABLE = json.loads((pathlib.Path(__file__).parents[1] / "golden" / "schemes.json").read_text())
GEOMETRIES = {k: Geometry(**v) for k, v in TABLE["geometries"].items()}
KINDS = {"normal": Normal, "truncated": TruncatedNormal, "uniform": Uniform, "constant": Constant}
DIGITS = 6e-6  # half a unit in the sixth digit, at most
CELLS = [
    pytest.param(name, label, cell, id=f"{name}-{label}")
    for name, row in TABLE["schemes"].items()
    for label, cell in row.items()
]
WITHOUT_GOLDEN = {
    "external": "knows no number",
    "torchtitan_qwen3": "the numbers of fixed_normal, below",
    "nanodo": "the numbers of glorot_uniform and of N(0, 1/d), below",
}
# Roles that a source has and the sizes do not, or that its model has as a structure of its own.
STRUCTURE = {"value_embed"}
# The bound of the first layer's attention output holds for the later layers: see lingua's `late_cut`.
ONE_CUT = {"lingua_current_depth": ("attn_out",)}


@functools.cache
def made(name, label):
    return deepinit.recipe(name, GEOMETRIES[label])


def entries(golden):
    """(index, number) of a golden number: one, or one per layer or sublayer."""
    return [(int(i), v) for i, v in golden.items()] if isinstance(golden, dict) else [(0, golden)]


def at(numbers, index):
    return numbers[index] if isinstance(numbers, tuple) else numbers


def agrees(numbers, golden):
    return all(at(numbers, i) == pytest.approx(v, rel=DIGITS, abs=0) for i, v in entries(golden))


def test_every_scheme_has_golden_numbers():
    with_golden = {resolve(name)[0].name for name in TABLE["schemes"]}
    assert set(scheme_names()) - with_golden == set(WITHOUT_GOLDEN)
    assert len(scheme_names()) >= 65


@pytest.mark.parametrize(("name", "label", "cell"), CELLS)
def test_weights(name, label, cell):
    weights = made(name, label).weights
    for roles, (kind, number, *bound) in cell.get("roles", {}).items():
        for role in set(roles.split()) - STRUCTURE:
            law = weights[role]
            assert isinstance(law, KINDS[kind]), f"{role} is {law}"
            assert law.layered == isinstance(number, dict), f"{role}: one number, or one per layer?"
            assert agrees(law.parameter, number), f"{role}: {law.parameter} is not {number}"
            if bound and role in ONE_CUT.get(name, ()):
                assert at(law.bound, 0) == pytest.approx(bound[0]["0"], rel=DIGITS)
            elif bound:
                assert agrees(law.bound, bound[0]), f"{role}: bound {law.bound} is not {bound[0]}"


@pytest.mark.parametrize(("name", "label", "cell"), CELLS)
def test_residual(name, label, cell):
    residual = made(name, label).residual
    skip = residual.skip_gate.value if residual.skip_gate else residual.skip
    assert agrees(skip, cell.get("skip", 1.0)), f"skip: {skip}"
    assert agrees(residual.branch, cell.get("branch", 1.0)), f"branch: {residual.branch}"
    if "x0" in cell:
        assert agrees(residual.x0_gate.value, cell["x0"])
    if "branch_gate" in cell:
        assert agrees(residual.gate.value, cell["branch_gate"])


@pytest.mark.parametrize(("name", "label", "cell"), CELLS)
def test_multipliers(name, label, cell):
    r, g = made(name, label), GEOMETRIES[label]

    def xavier(role):
        return math.sqrt(2 / sum(g.matrix(role)))

    derived = {  # what a source names, and what of the recipe it is
        "attention_scale": lambda: r.multipliers["attention"],
        "attention_logits": lambda: r.multipliers["attention"],
        "logits_if_tied": lambda: deepinit.recipe(name, g.replace(tied_embeddings=True)).multipliers["logits"],
        "norm_output": lambda: r.residual.scale_in,
        "alpha": lambda: r.residual.skip,
        "beta": lambda: r.weights["attn_out"].std / xavier("attn_out"),
        "gamma": lambda: r.weights["attn_out"].std / xavier("attn_out"),
        "scale": lambda: r.weights["attn_out"].std / xavier("attn_out"),
        "embed_scale_factor": lambda: r.weights["token_embed"].std * math.sqrt(g.d_model),
        "attn_factor": lambda: r.weights["attn_q"].std / xavier("attn_q") * math.sqrt(2),
        "mlp_factor": lambda: r.weights["mlp_up"].std / xavier("mlp_up"),
        "R": lambda: g.num_residuals,
        "omega": lambda: r.residual.skip_gate.value,
        "width": lambda: g.d_model / 256,
        "depth": lambda: g.num_layers / 2,
        "skip_scalar_alternative": lambda: deepinit.recipe(name, g, start="1/sqrt(R)").residual.gate.value,
        "logit_softcap": lambda: r.requires["logit_softcap"],
        "backout": lambda: r.gains["backout"].value,
        "smear": lambda: r.gains["smear"].value,
        **{f"{s}_stored": lambda s=s: r.gains[s].value for s in ("s_qk", "s_z")},
        **{f"{s}_effective": lambda s=s: r.gains[s].value * r.gains[s].scale for s in ("s_qk", "s_z")},
        "s_uv": lambda: r.gains["s_uv"].value,
        "s_uv_forward": lambda: r.gains["s_uv"].value * r.gains["s_uv"].scale,
    }
    for key, value in cell.get("multipliers", {}).items():
        if key == "forward":
            tables = {"token_embed": "embed", "lm_head": "logits"}
            assert all(agrees(r.multipliers[tables.get(k, k)], v) for k, v in value.items())
        elif not isinstance(value, str):
            assert agrees(derived[key]() if key in derived else r.multipliers[key], value), key


@pytest.mark.parametrize(("name", "label", "cell"), [c for c in CELLS if "optimizer" in c.values[2]])
def test_optimizer(name, label, cell):
    r, golden = made(name, label), cell["optimizer"]
    hidden = [role for role in LAYER_MATRICES if role in r.updates]
    groups = {
        "hidden": [r.updates[role] for role in hidden],
        "hidden_when_not_decoupled": [r.updates[role] for role in hidden],
        "embed": [r.updates["token_embed"], r.updates["pos_embed"]],
        "head": [r.updates["lm_head"]],
        "bias": [r.updates["bias"]],
        "norm": [r.updates["norm_scale"]],
        "norm_block": [r.update_at("layers/attn_residual/norm/norm_scale", "norm_scale")],
        "norm_final": [r.update_at("final_norm/norm_scale", "norm_scale")],
        **{role: [r.updates[role]] for role in r.updates},
    }
    for key, field in (("lr", "lr"), ("lr_adam", "lr"), ("weight_decay", "weight_decay"), ("eps", "eps")):
        for group, value in (golden[key] if isinstance(golden.get(key), dict) else {}).items():
            assert groups[group], group
            assert all(agrees(getattr(u, field), value) for u in groups[group]), f"{field} of {group}"
    if golden.get("weight_decay") == "independent":  # of the rate: their product is the same everywhere
        assert all(u.lr * u.weight_decay == pytest.approx(1) for u in r.updates.values())
    if golden.get("weight_decay") == 0:
        assert all(r.updates[role].weight_decay == 0 for role in (*hidden, "token_embed", "lm_head"))
    if "adamw_lr_factor" in golden:
        assert agrees(r.updates["token_embed"].lr, golden["adamw_lr_factor"])
    if "eps_option_residual_blocks" in golden:
        scaled = deepinit.recipe(name, GEOMETRIES[label], scale_eps=True)
        assert agrees(scaled.updates["attn_q"].eps, golden["eps_option_residual_blocks"])


@pytest.mark.parametrize("label", GEOMETRIES)
def test_numbers_that_are_no_table(label):
    def cell(name):
        return TABLE["schemes"][name][label]

    hybrid = made("hybridnorm", label).weights
    assert agrees(hybrid["attn_q"].sigma, cell("hybridnorm")["base_sigma"])
    assert agrees(hybrid["mlp_down"].sigma, cell("hybridnorm")["out_sigma"])
    assert agrees(made("mt_nlg", label).weights["attn_out"].std, cell("mt_nlg")["std"])
    for role, rms in cell("scion_spectral")["rms"].items():
        assert agrees(made("scion_spectral", label).weights[role].std, rms)
    for c, golden in (cell("depth_scaled_sandwich")["post_norm_gain"]).items():
        r = deepinit.recipe("depth_scaled_sandwich", GEOMETRIES[label], c=float(c.removeprefix("c=")))
        gain = r.law_at("layers/mlp_residual/post_norm/norm_scale", "norm_scale")
        assert agrees(gain.value, golden)
        assert r.law_at("layers/mlp_residual/norm/norm_scale", "norm_scale").value == 1.0
    for pair, roles in (("qk", ("attn_q", "attn_k")), ("vo", ("attn_v", "attn_out"))):
        golden = cell("mimetic")["joint"][pair]
        for role in roles:
            law = made("mimetic", label).weights[role]
            assert (law.noise, abs(law.identity)) == (golden["a"], golden["b"])
            assert agrees(law.z_std, golden["Z_std"])
        assert law.identity > 0 if pair == "qk" else law.identity < 0
    gate = made("ngpt", label).residual.gate
    assert agrees(gate.value, cell("ngpt")["alpha_stored"])
    assert agrees(gate.value * gate.scale, cell("ngpt")["alpha_effective"])
    assert made("ngpt", label).project == "rows"


@pytest.mark.parametrize("label", GEOMETRIES)
def test_schemes_that_share_numbers(label):
    assert made("torchtitan_qwen3", label).weights == made("fixed_normal", label).weights
    nanodo, glorot, gemma = (made(name, label).weights for name in ("nanodo", "glorot_uniform", "gemma"))
    for role in nanodo:
        assert nanodo[role] == (gemma if role in ("token_embed", "pos_embed", "lm_head") else glorot)[role]


def test_realized_std_of_an_uncorrected_cut():
    # The std of the values drawn, not that of the normal before the cut.
    law = made("modern_small", "A").weights["attn_q"]
    assert law.std == pytest.approx(0.986578 * math.sqrt(2 / (5 * 768)), rel=1e-6)
    assert law.sigma == pytest.approx(math.sqrt(2 / (5 * 768)), rel=1e-12)
