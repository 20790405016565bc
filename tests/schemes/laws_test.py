"""Laws that every registered scheme obeys, by itself, at geometries of every kind."""

import dataclasses
import functools
import inspect
import json
import math

import pytest

from deepinit import cli
from deepinit.errors import ConfigError
from deepinit.geometry import OUTPUTS, VECTORS, Geometry
from deepinit.laws import Constant, External, Factor
from deepinit.recipe import NORMS, Recipe
from deepinit.report import tables
from deepinit.schemes import FAMILIES
from deepinit.schemes.registry import entry, recipe, scheme_names, schemes

BASE = Geometry(num_layers=6, d_model=64, num_heads=8, d_ff=160, vocab_size=100, max_seq_len=32)
GEOMETRIES = {
    "gated": BASE,
    "plain": BASE.replace(mlp="gelu"),
    "tied": BASE.replace(tied_embeddings=True),
    "gqa": BASE.replace(num_kv_heads=2),
    "wide_heads": BASE.replace(head_dim=32),
    "experts": BASE.replace(num_experts=4),
    "parallel": BASE.replace(parallel=True),
    "one_layer": BASE.replace(num_layers=1),
    "deep": BASE.replace(num_layers=1000),
    "encoder": BASE.replace(stack="encoder", encoder_layers=6, decoder_layers=3),
    "decoder": BASE.replace(stack="decoder", encoder_layers=4, decoder_layers=6),
}
# What these sizes ask for: a base that is no wider than the model, as a user would give it.
ARGS = {"minicpm": {"base_width": 64}}
# Sizes that a scheme is not for: it says which option it needs.
REFUSED = {
    *((name, "tied") for name in ("fixup", "nanochat", "modded_nanogpt_medium", "completed_p")),
    *((name, "parallel") for name in ("umup", "hybridnorm", "normformer")),
    ("umup", "decoder"),
}
PAIRS = [
    pytest.param(name, kind, id=f"{name}-{kind}")
    for name in scheme_names()
    for kind in GEOMETRIES
    if (name, kind) not in REFUSED
]


@functools.cache
def made(name, kind):
    return recipe(name, GEOMETRIES[kind], **ARGS.get(name, {}))


@pytest.mark.parametrize(("name", "kind"), sorted(REFUSED))
def test_sizes_that_a_scheme_is_not_for(name, kind):
    with pytest.raises(ConfigError, match=f"scheme {name} needs model") as e:
        recipe(name, GEOMETRIES[kind])
    assert len(str(e.value).splitlines()) == 1


def numbers(law):
    return law.parameter if law.layered else (law.parameter,)


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_every_role_has_a_law_and_an_update(name, kind):
    r, g = made(name, kind), GEOMETRIES[kind]
    assert tuple(r.weights) == g.roles
    assert set(g.roles) <= set(r.updates)
    for role, law in r.weights.items():
        assert not law.layered or len(law.parameter) == g.num_layers
        assert law.formula or role in VECTORS or isinstance(law, External), f"{role}: no formula"


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_numbers_are_finite_and_positive(name, kind):
    r = made(name, kind)
    for law in (*r.weights.values(), *r.leaves.values()):
        if isinstance(law, External):
            continue
        assert all(map(math.isfinite, numbers(law)))
        if not isinstance(law, Constant):
            assert all(n > 0 for n in numbers(law))
            assert isinstance(law, Factor) or all(s > 0 for s in (law.std if law.layered else (law.std,)))
    for numbers_ in (r.residual.skip, r.residual.branch, r.residual.scale_in):
        assert all(math.isfinite(n) and n > 0 for n in (numbers_ if isinstance(numbers_, tuple) else (numbers_,)))
    assert all(math.isfinite(v) and v > 0 for v in r.multipliers.values())
    for update in r.updates.values():
        assert all(map(math.isfinite, dataclasses.astuple(update)))
        assert min(update.lr, update.eps) > 0
        assert update.weight_decay >= 0


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_plain_data(name, kind):
    r = made(name, kind)
    text = json.dumps(r.to_json(), allow_nan=False)
    back = Recipe.from_json(json.loads(text))
    assert back == r
    assert hash(back) == hash(r)
    assert json.dumps(back.to_json(), allow_nan=False) == text
    assert recipe(r.name, r.geometry, **r.args) == r  # evaluated again, it is the same


# case B59: factors on rates are there to be read, role by role
@pytest.mark.parametrize("name", scheme_names())
def test_explain_gives_the_numbers_of_the_recipe(name, capsys):
    r = made(name, "gqa")
    sizes = ("num_layers", "d_model", "num_heads", "num_kv_heads", "d_ff", "vocab_size", "max_seq_len")
    flags = [name, *(f"--model.{k.replace('_', '-')}={getattr(r.geometry, k)}" for k in sizes)]
    flags += [f"--scheme.args.{k}={v}" for k, v in ARGS.get(name, {}).items()]
    assert cli.main(["explain", *flags, "--json"]) == 0
    assert Recipe.from_json(json.loads(capsys.readouterr().out)) == r
    assert cli.main(["explain", *flags]) == 0
    text = capsys.readouterr().out
    for role, law in r.weights.items():
        if r.geometry.count(role) and not isinstance(law, External):
            shown = next(line for line in text.splitlines() if line.split()[:1] == [role])
            assert tables.number(law.std) in shown
            assert tables.factors(r.updates[role]) == tuple(shown.split()[-3:])


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_size_of_the_logits(name, kind):
    # case B30: a head of unit std under a normed stream of width d starts at loss d/2 instead of ln V
    r, g = made(name, kind), GEOMETRIES[kind]
    if name == "external" or r.residual.norm == "none":
        return
    head = r.weights["token_embed" if g.tied_embeddings else "lm_head"]
    assert math.sqrt(g.d_model) * head.std * r.multipliers["logits"] < 1.5


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_branches_are_alive(name, kind):
    r = made(name, kind)
    zero = {role for role, law in r.weights.items() if law == Constant(0.0)}
    gated = r.residual.gate is not None and r.residual.gate.value == 0
    for role in set(OUTPUTS) & zero:
        assert not gated, f"{role} and the gate are both zero"
    assert not zero & {"attn_v", "mlp_up", "mlp_gate", "expert_up", "expert_gate", "token_embed"}


@pytest.mark.parametrize("scheme", schemes(), ids=scheme_names())
def test_a_scheme_says_where_it_comes_from(scheme):
    assert scheme.source
    assert scheme.family in FAMILIES
    assert set(scheme.norms) <= set(NORMS)
    assert scheme.summary.endswith((".", ":"))
    assert len(scheme.summary) <= 120
    assert scheme.version >= 1
    signature = inspect.signature(scheme.make).parameters.values()
    assert all(p.kind is p.KEYWORD_ONLY for p in list(signature)[1:])
    assert set(scheme.choose) <= set(scheme.hyperparameters)


@pytest.mark.parametrize("name", scheme_names())
def test_the_default_norm_is_one_that_the_scheme_accepts(name):
    r = made(name, "gated")
    assert r.residual.norm == entry(name).norms[0]
    for norm in entry(name).norms:
        assert recipe(name, BASE, norm=norm).residual == dataclasses.replace(r.residual, norm=norm)
    for norm in set(NORMS) - set(entry(name).norms):
        with pytest.raises(ConfigError, match="needs norm"):
            recipe(name, BASE, norm=norm)


@pytest.mark.parametrize("name", scheme_names())
def test_fans_do_not_know_experts_layers_or_padding(name):
    # cases B02, B04: what stacks matrices is no part of their fan
    few, many = (recipe(name, BASE.replace(num_experts=e)).weights for e in (2, 64))
    for role in ("expert_up", "expert_down", "mlp_up"):
        if not isinstance(few[role], External):
            assert few[role] == many[role]


@pytest.mark.parametrize("name", scheme_names())
def test_every_hyperparameter_is_documented_by_its_type(name):
    scheme = entry(name)
    assert set(scheme.hyperparameters) <= set(scheme.hints)
    for key, default in scheme.hyperparameters.items():
        assert default is not inspect.Parameter.empty, f"{key} has no default"
        if default is not None:
            assert recipe(name, BASE, **({key: default} if key != "base_depth" else {})).name == name


def test_a_1000_layer_recipe_is_quick_to_make_and_holds_its_layers():
    deep = GEOMETRIES["deep"]
    for name in ("ds_init", "olmo_mitchell", "layernorm_scaling", "umup", "nanochat"):
        r = recipe(name, deep)
        rule = r.residual
        per_layer = [law for law in r.weights.values() if law.layered]
        per_layer += [
            n for n in (rule.skip, rule.scale_in, rule.skip_gate and rule.skip_gate.value) if isinstance(n, tuple)
        ]
        assert per_layer
