"""The residual rule: identity stacks, constants in every precision, gates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinit.geometry import Role
from deepinit.laws import Constant
from deepinit.nn import Block, ResidualAdd, Stack
from deepinit.recipe import Gate, Residual
from deepinit.roles import unboxed
from tests.models import SMALL, born, flat, own_recipe, recipe_of, refused, stats_of, tokens

X = jax.random.normal(jax.random.key(0), (2, 5, SMALL.d_model))
L = SMALL.num_layers


def stack_of(recipe, **options):
    """(stack, its parameters)."""
    stack = Stack.from_recipe(recipe, **options)
    return stack, unboxed(jax.jit(stack.init)(jax.random.key(0), X)["params"])


# case B25: at step 0 the stack is exactly the identity; only what is zero has a gradient
@pytest.mark.parametrize(
    ("scheme", "options", "zero"),
    [
        ("rezero", {}, {"residual_gate"}),
        ("rezero", {"scan": False}, {"residual_gate"}),
        ("skipinit", {}, {"residual_gate"}),
        ("fixup", {}, {"attn_out", "mlp_down"}),
        ("zero_out", {}, {"attn_out", "mlp_down"}),
    ],
)
def test_identity_at_first(scheme, options, zero):
    stack, params = stack_of(recipe_of(scheme), **options)

    def loss(params):
        out = stack.apply({"params": params}, X)
        return jnp.square(out).sum(), out

    (_, out), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    assert (out == X).all()
    for path, g in flat(gradient).items():
        moves = path.split("/")[-1] in zero
        assert g.any() == moves, path


# Near the identity, but every matrix learns from the start.
def test_layerscale_is_near_the_identity():
    _, _, params = born("layerscale")
    assert (params["layers"]["attn_residual"]["residual_gate"] == np.float32(0.1)).all()
    assert params["layers"]["mlp_residual"]["residual_gate"].shape == (L, SMALL.d_model)


@pytest.mark.parametrize(
    ("gate", "shapes"),
    [
        (Gate(0.5), {"layers/attn_residual/residual_gate": (L,), "layers/mlp_residual/residual_gate": (L,)}),
        (Gate(0.5, share="layer"), {"layers/residual_gate": (L,)}),
        (Gate(0.5, "channel", "layer"), {"layers/residual_gate": (L, SMALL.d_model)}),
        (
            Gate((0.1, 0.2, 0.3), "channel", role=Role.BRANCH_SCALE),
            {f"layers/{b}_residual/branch_scale": (L, SMALL.d_model) for b in ("attn", "mlp")},
        ),
    ],
)
def test_gates(gate, shapes):
    recipe = own_recipe(residual=Residual(gate=gate))
    leaves = flat(born(recipe)[2])
    assert {path: x.shape for path, x in leaves.items() if path.endswith(gate.role)} == shapes
    for path in shapes:
        for layer in range(L):
            value = gate.value[layer] if isinstance(gate.value, tuple) else gate.value
            assert (leaves[path][layer] == np.float32(value)).all()
    assert recipe.weights[gate.role] == Constant(gate.value)


def test_shifts():
    leaves = flat(born("fixup")[2])
    shifts = {path.removeprefix("layers/") for path in leaves if path.endswith("branch_shift")}
    assert shifts == {f"{a}_branch_shift" for a in ("attention/in", "attention/out", "mlp/in", "mlp/act", "mlp/out")}
    assert not any(leaves[f"layers/{path}"].any() for path in shifts)


# A skip of 2.213 is 2.219 in bfloat16: over 24 additions the stream would be off by 6%.
def test_constants_are_not_rounded():
    rule = Residual("none", skip=2.2133638)
    add = ResidualAdd.from_recipe(own_recipe(residual=rule), dtype="bfloat16")
    x = X.astype(jnp.bfloat16)
    got = add.apply({"params": {}}, x, jnp.zeros_like)
    assert got.dtype == jnp.bfloat16
    assert (got == (2.2133638 * x.astype(jnp.float32)).astype(jnp.bfloat16)).all()


# case B20: constants by layer reach the layer that they are for, scanned or not
@pytest.mark.parametrize("scan", [True, False])
def test_each_layer_has_its_constant(scan):
    skip = (2.0, 3.0, 5.0)
    recipe = own_recipe(residual=Residual("none", skip=skip), attn_out=Constant(0.0), mlp_down=Constant(0.0))
    stack, params = stack_of(recipe, scan=scan)
    assert np.allclose(stack.apply({"params": params}, X), 4 * 9 * 25 * X, rtol=1e-6)


def test_each_addition_has_its_constant():
    skip = (2.0, 3.0, 5.0, 7.0, 11.0, 13.0)
    recipe = own_recipe(residual=Residual("none", skip=skip), attn_out=Constant(0.0), mlp_down=Constant(0.0))
    model, _, params = born(recipe)
    ms = stats_of(model)(params, tokens())
    assert np.allclose(np.ravel(ms["layers"]["stream_ms"]) / ms["embed_ms"], np.cumprod(skip) ** 2, rtol=1e-5)


def test_a_layer_must_be_named_where_layers_differ():
    block = Block.from_recipe(own_recipe(residual=Residual(skip=(1.0, 2.0, 3.0))))
    assert "say which layer" in refused(block.init, jax.random.key(0), X)
    assert jax.eval_shape(block.init, jax.random.key(0), X, 1)


# DeepNorm's skip carries alpha: the derivative of a zero branch's sum is the norm's of alpha x.
def test_post_norm_stands_on_the_sum():
    recipe = own_recipe(residual=Residual("post", skip=2.0), attn_out=Constant(0.0), mlp_down=Constant(0.0))
    stack, params = stack_of(recipe)
    unit = X / np.sqrt((np.asarray(X) ** 2).mean(-1, keepdims=True))
    assert np.allclose(stack.apply({"params": params}, X), unit, rtol=1e-5, atol=1e-6)


# case B55's kind: a gate shared by a layer is one leaf, whose gradient is the sum over both branches
def test_shared_gate():
    shared, params = stack_of(own_recipe(residual=Residual("none", gate=Gate(0.5, share="layer"))))
    apart, own_params = stack_of(own_recipe(residual=Residual("none", gate=Gate(0.5))))
    gates = params["layers"].pop("residual_gate")
    own = own_params["layers"]

    def loss(stack, layers):
        return jnp.square(stack.apply({"params": {"layers": layers}}, X)).mean()

    one = jax.jit(jax.grad(lambda g: loss(shared, params["layers"] | {"residual_gate": g})))(gates)
    two = jax.jit(jax.grad(lambda layers: loss(apart, layers)))(own)
    both = two["attn_residual"]["residual_gate"] + two["mlp_residual"]["residual_gate"]
    assert one.shape == (L,)
    assert np.allclose(one, both, rtol=1e-4, atol=1e-9)
