"""Small recipes, models and parameter trees that many tests share, each made once a process; and their strategies."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import deepinit
from deepinit import laws
from deepinit.errors import ConfigError
from deepinit.geometry import MLP_KINDS, STACKS, VECTORS, Geometry, Role
from deepinit.nn import Decoder
from deepinit.recipe import Recipe
from deepinit.roles import role_of, unboxed
from deepinit.sharded_init import abstract_params

# Grouped-query heads, and no two sizes equal.
SMALL = Geometry(num_layers=3, d_model=64, num_heads=8, num_kv_heads=4, d_ff=160, vocab_size=100, max_seq_len=32)
MESHES = ((1, 1, 1), (8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 4, 2))


def refused(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The one line with which a call is refused."""
    with pytest.raises(ConfigError) as e:
        call(*args, **kwargs)
    message = str(e.value)
    assert message
    assert len(message.splitlines()) == 1
    return message


@functools.cache
def recipe_of(name: str, geometry: Geometry = SMALL, norm: str | None = None, **args: Any) -> Recipe:
    """A scheme at a geometry."""
    return deepinit.recipe(name, geometry, norm=norm, **args)


def own_recipe(geometry: Geometry = SMALL, weights: Any = None, **parts: Any) -> Recipe:
    """A recipe that nobody registered: N(0, 0.02^2) for every matrix, save the laws given by role."""
    if weights is None:
        weights = {r: laws.Normal(0.02) for r in geometry.roles if r not in VECTORS}
    own = {role: parts.pop(role) for role in list(parts) if role in geometry.roles}
    return Recipe({**weights, **own}, **parts).completed(name="own", geometry=geometry, source="here")


@functools.cache
def mesh_of(sizes: tuple[int, int, int]) -> jax.sharding.Mesh:
    """A mesh over the first devices."""
    return deepinit.make_mesh(dict(zip(("data", "fsdp", "tensor"), sizes)))


@functools.cache
def born(
    scheme: str | Recipe = "megatron", *, mesh: tuple[int, int, int] | None = None, seed: int = 0, **options: Any
) -> tuple[Decoder, Recipe, Any]:
    """(model, recipe, params) of a scheme at SMALL, or of any recipe."""
    recipe = scheme if isinstance(scheme, Recipe) else recipe_of(scheme)
    model = Decoder.from_recipe(recipe, **options)
    return model, recipe, deepinit.init_sharded(model, recipe, mesh and mesh_of(mesh), seed)


@functools.cache
def forward(model: Decoder) -> Callable[..., Any]:
    """Logits, compiled: (params, tokens, mask or None)."""
    return jax.jit(lambda params, tokens, mask=None: model.apply({"params": params}, tokens, mask))


@functools.cache
def loss_of(model: Decoder) -> Callable[..., Any]:
    """(mean loss a token, gradient), compiled: (params, tokens); the last token is predicted only."""

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits = model.apply({"params": params}, tokens[:, :-1])
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)
        return -picked.mean()

    return jax.jit(jax.value_and_grad(loss))


@functools.cache
def stats_of(model: Decoder) -> Callable[..., Any]:
    """The mean squares of the stream, compiled: (params, tokens)."""
    return jax.jit(lambda params, tokens: model.apply({"params": params}, tokens, mutable=["stats"])[1]["stats"])


def tokens(batch: int = 2, time: int = 16, vocab: int = SMALL.vocab_size, seed: int = 0) -> jax.Array:
    """Random tokens (batch, time)."""
    return jnp.asarray(np.random.default_rng(seed).integers(0, vocab, (batch, time)), jnp.int32)


def noise(model: Decoder, size: float = 0.1, seed: int = 0) -> Any:
    """A tree of the model's shapes in which no value is special: noise, around 1 for gains and gates."""
    rng = np.random.default_rng(seed)
    factors = (Role.NORM_SCALE, Role.RESIDUAL_GATE, Role.BRANCH_SCALE)

    def fill(path: Any, x: Any) -> jax.Array:
        return jnp.asarray((role_of(path) in factors) + size * rng.standard_normal(x.shape), x.dtype)

    return jax.tree.map_with_path(fill, unboxed(abstract_params(model)))


def flat(tree: Any) -> dict[str, np.ndarray]:
    """Path -> array."""
    return {"/".join(str(k.key) for k in path): np.asarray(x) for path, x in jax.tree.leaves_with_path(tree)}


def assert_same(a: Any, b: Any) -> None:
    """Two trees hold the same leaves, bit for bit, of the same dtypes."""
    a, b = flat(a), flat(b)
    assert a.keys() == b.keys()
    for path, x in a.items():
        assert x.dtype == b[path].dtype, path
        assert x.shape == b[path].shape, path
        assert x.tobytes() == b[path].tobytes(), path


def stacked(params: Any) -> Any:
    """An unrolled tree with its layers stacked under `layers`."""
    layers = [params[f"layers_{i}"] for i in itertools.takewhile(lambda i: f"layers_{i}" in params, itertools.count())]
    rest = {k: v for k, v in params.items() if not k.startswith("layers_")}
    return rest | {"layers": jax.tree.map(lambda *xs: np.stack(xs), *layers)}


# --- strategies --------------------------------------------------------------------------------------------------

positive = st.floats(1e-6, 1e3)


@st.composite
def geometries(draw: Callable[..., Any], **fixed: Any) -> Geometry:
    """Any valid sizes, head width given or derived, dense or with experts."""
    kv, group, head = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 16))
    own_head = draw(st.booleans())
    stack = draw(st.sampled_from(STACKS))
    deep = st.integers(1, 12) if stack != "single" else st.just(0)
    sizes = {
        "num_layers": draw(st.integers(1, 100)),
        "d_model": draw(st.integers(1, 300)) if own_head else kv * group * head,
        "num_heads": kv * group,
        "num_kv_heads": draw(st.sampled_from([0, kv])),
        "head_dim": head if own_head else 0,
        "d_ff": draw(st.integers(1, 500)),
        "vocab_size": draw(st.integers(1, 10_000)),
        "max_seq_len": draw(st.integers(1, 4096)),
        "num_experts": draw(st.sampled_from([0, 0, 4, 7])),
        "mlp": draw(st.sampled_from(MLP_KINDS)),
        "tied_embeddings": draw(st.booleans()),
        "parallel": draw(st.booleans()) if stack == "single" else False,
        "stack": stack,
        "encoder_layers": draw(deep),
        "decoder_layers": draw(deep),
    }
    return Geometry(**(sizes | fixed))


def numbers(values: st.SearchStrategy[float] = positive) -> st.SearchStrategy[laws.Numbers]:
    """One number, or one per layer."""
    return values | st.lists(values, min_size=1, max_size=5).map(tuple)


def distributions() -> st.SearchStrategy[laws.Distribution]:
    """Any law."""
    cut, text = st.floats(0.1, 8), st.text(max_size=8)
    return st.one_of(
        st.builds(laws.Normal, numbers(), text),
        st.builds(laws.TruncatedNormal, numbers(), cut, text),
        st.builds(laws.TruncatedNormal.from_sigma, numbers(), cut, text),
        st.builds(laws.Uniform, numbers(), text),
        st.builds(laws.Constant, numbers(st.floats(-10, 10, allow_subnormal=False)), text),
        st.builds(laws.Orthogonal, numbers(), st.integers(1, 4096), text),
        st.builds(laws.Sign, numbers(), text),
        st.builds(laws.Factor, positive, st.floats(-1, 1), positive, st.just("attn_k"), st.just("left"), text),
        st.builds(laws.External),
    )
