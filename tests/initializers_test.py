"""Closures: drop-ins for jax.nn.initializers with the same laws, and the closures of a recipe's roles."""

import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from deepinit import initializers, laws
from deepinit.geometry import VECTORS, Geometry
from deepinit.laws import Constant, Normal, Orthogonal, Sign, TruncatedNormal, Uniform
from tests.models import SMALL, mesh_of, recipe_of, refused

STOCK = jax.nn.initializers
KEY = jax.random.key(3, impl="threefry2x32")
KURTOSIS = {"normal": 3.0, "truncated_normal": laws.truncated_moments(2.0)[1], "uniform": 1.8}


def drawn(init, shape, dtype=jnp.float32, key=KEY):
    """The values of a closure, as float64."""
    return np.asarray(jax.jit(init, static_argnums=(1, 2))(key, shape, dtype)).astype(np.float64)


def std_z(x, std, kurtosis=3.0):
    """Standard errors between the mean square of x and std^2."""
    return (np.mean(x**2) / std**2 - 1) / math.sqrt((kurtosis - 1) / x.size)


def has_std(x, std, kurtosis=3.0):
    """Whether mean and std of x are as they should be; a false alarm is rarer than 1e-6 (|z| > 5)."""
    return abs(std_z(x, std, kurtosis)) < 5 and abs(x.mean()) / std * math.sqrt(x.size) < 5


# --- drop-ins ----------------------------------------------------------------------------------------------------


AXES = [
    ((256, 192), {}, 256, 192),
    ((3, 3, 24, 64), {}, 9 * 24, 9 * 64),  # a convolution: the window counts
    ((128, 4, 32), {"in_axis": 0, "out_axis": (1, 2)}, 128, 128),
    ((4, 32, 128), {"in_axis": (0, 1), "out_axis": -1}, 128, 128),
    ((6, 64, 96), {"batch_axis": 0}, 64, 96),
    ((64, 5, 96), {"in_axis": -3, "out_axis": 2, "batch_axis": (1,)}, 64, 96),
]
MODES = {
    "fan_in": lambda i, o: i,
    "fan_out": lambda i, o: o,
    "fan_avg": lambda i, o: (i + o) / 2,
    "fan_geo_avg": lambda i, o: math.sqrt(i * o),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("shape", "axes", "fan_in", "fan_out"), AXES)
def test_variance_scaling_by_mode_and_axes(mode, shape, axes, fan_in, fan_out):
    std = math.sqrt(1.7 / MODES[mode](fan_in, fan_out))
    for module in (initializers, STOCK):
        assert has_std(drawn(module.variance_scaling(1.7, mode, "normal", **axes), shape), std)


@pytest.mark.parametrize("distribution", KURTOSIS)
def test_variance_scaling_by_distribution(distribution):
    std = math.sqrt(2 / 200)
    for module in (initializers, STOCK):
        x = drawn(module.variance_scaling(2.0, "fan_in", distribution), (200, 400))
        assert has_std(x, std, KURTOSIS[distribution])
        bound = {"normal": math.inf, "uniform": math.sqrt(3) * std, "truncated_normal": std * 2 / 0.87962566}
        assert np.abs(x).max() <= bound[distribution] * (1 + 1e-6)


@pytest.mark.parametrize(
    "name", ["glorot_normal", "glorot_uniform", "lecun_normal", "lecun_uniform", "he_normal", "he_uniform"]
)
def test_short_names(name):
    kurtosis = KURTOSIS["uniform" if "uniform" in name else "truncated_normal"]
    std = math.sqrt({"glorot": 2 / 500, "lecun": 1 / 300, "he": 2 / 300}[name.split("_")[0]])
    for module in (initializers, STOCK):
        assert has_std(drawn(getattr(module, name)(), (300, 200)), std, kurtosis)


@pytest.mark.parametrize(
    ("ours", "theirs", "mean", "std", "kurtosis"),
    [
        (initializers.normal(0.5), STOCK.normal(0.5), 0.0, 0.5, 3.0),
        (initializers.uniform(0.5), STOCK.uniform(0.5), 0.25, 0.5 / math.sqrt(12), 1.8),
        (initializers.constant(0.5), STOCK.constant(0.5), 0.5, 0.0, 3.0),
        (initializers.zeros, STOCK.zeros, 0.0, 0.0, 3.0),
        (initializers.ones, STOCK.ones, 1.0, 0.0, 3.0),
    ],
)
def test_the_others(ours, theirs, mean, std, kurtosis):
    for init in (ours, theirs):
        x = drawn(init, (400, 100)) - mean
        assert has_std(x, std, kurtosis) if std else not x.any()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("normal", ()),
        ("uniform", ()),
        ("constant", (0.5,)),
        ("truncated_normal", ()),
        ("variance_scaling", (2.0, "fan_in", "normal")),
        ("orthogonal", ()),
        ("glorot_normal", ()),
        ("he_uniform", ()),
    ],
)
def test_signatures_begin_like_those_of_jax(name, arguments):
    def parameters(f):
        return list(inspect.signature(f).parameters)

    ours, theirs = getattr(initializers, name), getattr(STOCK, name)
    if name not in ("glorot_normal", "he_uniform"):  # partials show their bound arguments here
        assert parameters(ours)[: len(parameters(theirs))] == parameters(theirs)
    assert parameters(ours(*arguments)) == parameters(theirs(*arguments)) == ["key", "shape", "dtype", "out_sharding"]


# case B38: one meaning of std, and what other libraries do on request
def test_truncation():
    for cut, factor in ((2.0, 0.879626), (3.0, 0.986578)):
        kurtosis = laws.truncated_moments(cut)[1]
        corrected = drawn(initializers.truncated_normal(0.02, lower=-cut, upper=cut), (1000, 1000))
        assert has_std(corrected, 0.02, kurtosis)
        assert np.abs(corrected).max() <= cut * 0.02 / factor * (1 + 1e-6)
        for init in (
            initializers.truncated_normal(0.02, lower=-cut, upper=cut, corrected=False),
            STOCK.truncated_normal(0.02, lower=-cut, upper=cut),
        ):
            x = drawn(init, (1000, 1000))
            assert has_std(x, 0.02 * factor, kurtosis)
            assert np.abs(x).max() <= cut * 0.02 * (1 + 1e-6)
    # variance scaling compensates in both
    for module in (initializers, STOCK):
        x = drawn(module.variance_scaling(1.0, "fan_in", "truncated_normal"), (1024, 512))
        assert has_std(x, 1 / 32, KURTOSIS["truncated_normal"])
        assert np.abs(x).max() * 32 == pytest.approx(2.2737, abs=1e-3)


# case B37: the cut is in sigmas, whatever the std
def test_cut_is_in_sigmas():
    x = drawn(initializers.truncated_normal(0.02, lower=-3.0, upper=3.0, corrected=False), (1000, 1000))
    assert 0.0599 < np.abs(x).max() <= 0.06
    for lower, upper in ((-2.0, 3.0), (0.0, 0.0), (2.0, -2.0)):
        assert "in sigmas" in refused(initializers.truncated_normal, 0.02, lower=lower, upper=upper)


# case B01: a head axis is no receptive field, if the axes are named
def test_attention_kernels():
    named = {"in_axis": 0, "out_axis": (1, 2)}, {"in_axis": (0, 1), "out_axis": 2}
    for axes, shape in zip(named, ((512, 8, 64), (8, 64, 512))):
        for scheme in (initializers.lecun_normal, initializers.glorot_normal):
            assert has_std(drawn(scheme(**axes), shape), 0.0441942, KURTOSIS["truncated_normal"])
    # what the unnamed call gives, here and in jax
    for module in (initializers, STOCK):
        assert drawn(module.lecun_normal(), (512, 8, 64)).std() == pytest.approx(0.0156, rel=0.01)
        assert drawn(module.glorot_normal(), (512, 8, 64)).std() == pytest.approx(0.00736, rel=0.01)


# case B04: layers stacked in one leaf are a batch axis; so are experts (case B02), each with a draw of its own
@pytest.mark.parametrize("stack", [1, 8, 32])
def test_stacked_kernels(stack):
    x = drawn(initializers.lecun_normal(batch_axis=0), (stack, 64, 64))
    assert has_std(x, 0.125, KURTOSIS["truncated_normal"])
    assert len(np.unique(x[:, 0, 0])) == stack
    naive = drawn(initializers.lecun_normal(), (stack, 64, 64))
    assert has_std(naive, 0.125 / math.sqrt(stack), KURTOSIS["truncated_normal"])


# case B08: the bound is sqrt(3) std
def test_uniform_bound():
    x = drawn(initializers.variance_scaling(1.0, "fan_in", "uniform"), (1024, 512))
    assert has_std(x, 0.03125, 1.8)
    assert 0.0541 < np.abs(x).max() <= 0.05413


# case B17: a gain is a factor on the draw
def test_gain_and_factor():
    beta, std = 0.343, 0.343 * math.sqrt(2 / (4096 + 512))
    gained = drawn(initializers.variance_scaling(beta**2, "fan_avg", "normal"), (4096, 512))
    multiplied = beta * drawn(initializers.variance_scaling(1.0, "fan_avg", "normal"), (4096, 512))
    assert std == pytest.approx(0.00715, abs=5e-6)
    for x in (gained, multiplied):
        assert has_std(x, std)
    assert np.allclose(gained, multiplied, rtol=1e-6, atol=0)


# case B63: a base variance of 0.04 is a std of 0.2
def test_std_not_variance():
    assert has_std(drawn(initializers.normal(math.sqrt(0.04)), (1000, 100)), 0.2)
    assert has_std(drawn(initializers.of_law(Normal(0.2)), (1000, 100)), 0.2)


# case B07: a vector has no fan, and the error says so in one line
@pytest.mark.parametrize("init", [initializers.lecun_normal(), initializers.variance_scaling(1.0, "fan_avg", "normal")])
def test_a_vector_has_no_fan(init):
    for shape in ((5,), ()):
        message = refused(init, KEY, shape)
        assert message.startswith(f"shape {shape} has no fan")
    assert "has no fan" in refused(linen.Dense(5, bias_init=init).init, KEY, jnp.ones((1, 4)))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda: initializers.variance_scaling(1.0, "fan_inn", "normal"),
            "mode 'fan_inn' is unknown; did you mean 'fan_in'",
        ),
        (
            lambda: initializers.variance_scaling(1.0, "fan_in", "norml"),
            "distribution 'norml' is unknown; did you mean 'normal'",
        ),
        (lambda: initializers.variance_scaling(-1.0, "fan_in", "normal"), "scale -1.0 is negative"),
        (lambda: initializers.lecun_normal(0, 0)(KEY, (4, 4)), "in_axis 0, out_axis 0 and batch_axis () overlap"),
        (lambda: initializers.lecun_normal(batch_axis=-2)(KEY, (4, 4, 4)), "overlap"),
        (lambda: initializers.orthogonal()(KEY, (4,)), "shape (4,) is no matrix"),
        (lambda: initializers.residual_scaled(initializers.zeros, 0), "0 residual additions"),
        (lambda: initializers.of_law(laws.External()), "external"),
        (lambda: initializers.of_law(laws.Factor(0.7, 0.7, 0.1, "attn_k")), "drawn together with that of attn_k"),
        (lambda: initializers.of_law(Normal((0.1, 0.2))), "one std per layer"),
        (lambda: initializers.of_law(Normal((0.1, 0.2)), 2), "layer 2: the layers are 0 to 1"),
        (
            lambda: initializers.of_law(Normal(0.1), None, "portabel"),
            "sampler 'portabel' is unknown; did you mean 'portable'",
        ),
    ],
)
def test_refusals(call, says):
    assert says in refused(call)


# case B10: 1/sqrt(2L) on any closure, ours or not
def test_residual_scaled():
    for inner in (initializers.normal(0.02), STOCK.normal(0.02)):
        scaled = initializers.residual_scaled(inner, 24)
        x = drawn(scaled, (768, 768))
        assert has_std(x, 0.02 / math.sqrt(24))
        # compiled as one program or step by step: no compiler merges the two factors
        assert (x == drawn(inner, (768, 768)).astype(np.float32) * np.float32(1 / math.sqrt(24))).all()


@pytest.mark.parametrize(
    ("shape", "column_axis"), [((64, 32), -1), ((32, 64), -1), ((4, 16, 32), -1), ((32, 4, 16), 0), ((8, 8), -1)]
)
def test_orthogonal(shape, column_axis):
    x = np.moveaxis(drawn(initializers.orthogonal(1.5, column_axis), shape), column_axis, -1).reshape(
        -1, shape[column_axis]
    )
    assert np.allclose(np.linalg.svd(x, compute_uv=False), 1.5, atol=1e-5)
    theirs = drawn(STOCK.orthogonal(1.5, column_axis), shape)
    assert theirs.shape == shape
    assert x.std() == pytest.approx(theirs.std(), rel=0.02)


# Q itself is uniform over the orthogonal group (Haar): its entries are those of a random unit vector.
def test_orthogonal_has_no_preferred_sign():
    make = jax.jit(jax.vmap(lambda key: initializers.orthogonal()(key, (8, 8))))
    x = np.asarray(make(jax.random.split(KEY, 500)), np.float64)
    for entry in (x[:, 0, 0], x[:, 3, 5], x[:, 7, 7]):
        assert abs(entry.mean()) * math.sqrt(500 * 8) < 5
        assert entry.var() * 8 == pytest.approx(1, abs=5 * math.sqrt(2 / 500))


# --- the protocol ------------------------------------------------------------------------------------------------

CLOSURES = {
    "normal": initializers.normal(0.02),
    "truncated": initializers.truncated_normal(0.02),
    "uniform": initializers.glorot_uniform(),
    "zeros": initializers.zeros,
    "orthogonal": initializers.orthogonal(),
    "scaled": initializers.residual_scaled(initializers.normal(1.0), 6),
    "role": recipe_of("modern").initializer("attn_q"),
    "head": recipe_of("modern").initializer("lm_head"),
    "stock": recipe_of("modern").initializer("attn_q", sampler="jax"),
}


def shape_for(name):
    return (SMALL.d_model, SMALL.vocab_size) if name == "head" else (64, 64)


@pytest.mark.parametrize("name", CLOSURES)
def test_dtype(name):
    init, shape = CLOSURES[name], shape_for(name)
    wide = init(KEY, shape)
    assert wide.dtype == init(KEY, shape, None).dtype == jnp.float32
    for dtype in (jnp.bfloat16, np.float16, "bfloat16"):
        narrow = init(KEY, shape, dtype)
        assert narrow.dtype == jnp.dtype(dtype)
        assert (narrow == wide.astype(dtype)).all()  # drawn in float32, cast last


def test_default_dtype_is_that_of_the_call_or_of_the_closure():
    for module in (initializers, STOCK):
        init = module.normal(1.0, jnp.bfloat16)
        assert init(KEY, (2, 2)).dtype == jnp.bfloat16
        assert init(KEY, (2, 2), None).dtype == jnp.float32
        assert module.variance_scaling(1.0, "fan_in", "normal", dtype=jnp.bfloat16)(KEY, (2, 2)).dtype == jnp.bfloat16


# A normal drawn in bfloat16 has 128 distinct magnitudes and a mean of -0.011 sigma.
def test_cast_last():
    ours = drawn(initializers.normal(1.0), (1000, 1000), jnp.bfloat16)
    assert len(np.unique(ours)) > 1500
    assert abs(ours.mean()) * 1000 < 5
    assert len(np.unique(drawn(STOCK.normal(1.0), (1000, 1000), jnp.bfloat16))) < 300


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("name", CLOSURES)
def test_out_sharding(name, kind):
    init, shape = CLOSURES[name], shape_for(name)
    mesh = mesh_of((1, 2, 4))
    if kind == "explicit":
        mesh = jax.make_mesh((2, 4), ("fsdp", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    expected = np.asarray(init(KEY, shape, jnp.float32))
    with jax.set_mesh(mesh):
        for layout in (PartitionSpec("fsdp", "tensor"), NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))):
            x = jax.jit(lambda k: init(k, shape, jnp.float32, out_sharding=layout))(KEY)  # noqa: B023
            assert x.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec("fsdp", "tensor")), 2)
            if name == "orthogonal":
                assert np.allclose(x, expected, atol=1e-5)
            elif name == "stock":  # its last bits depend on how XLA fuses the draw
                np.testing.assert_array_max_ulp(np.asarray(x), expected, 4)
            else:
                assert (np.asarray(x) == expected).all()


@pytest.mark.parametrize("name", ["truncated", "role", "stock"])
def test_as_kernel_init(name):
    init, x = CLOSURES[name], jnp.ones((2, 64))
    dense = linen.Dense(64, kernel_init=init).init(KEY, x)["params"]["kernel"]
    heads = linen.DenseGeneral((8, 8), kernel_init=init).init(KEY, x)["params"]["kernel"]
    linear = nnx.Linear(64, 64, kernel_init=init, rngs=nnx.Rngs(0)).kernel[...]
    law = recipe_of("modern").weights["attn_q"]
    for kernel in (dense, heads, linear):
        std = 0.02 if name == "truncated" else law.std
        assert has_std(
            np.asarray(kernel, np.float64), std, laws.truncated_moments(2.0 if name == "truncated" else 3.0)[1]
        )
    assert heads.shape == (64, 8, 8)


# case B09: names of axes go around a closure without changing a value
def test_with_partition_names():
    init = recipe_of("modern").initializer("attn_q")
    boxed = linen.with_logical_partitioning(init, ("embed", "heads", "head_dim"))(KEY, (64, 8, 8), jnp.float32)
    assert boxed.names == ("embed", "heads", "head_dim")
    assert (boxed.unbox(apply_constraint=False) == init(KEY, (64, 8, 8))).all()


# --- laws --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", ["portable", "jax"])
@pytest.mark.parametrize(
    "law",
    [
        Normal(0.3),
        TruncatedNormal(0.3, 2.0),
        TruncatedNormal.from_sigma(0.3, 3.0),
        Uniform(0.3),
        Sign(0.3),
        Constant(-0.3),
    ],
)
def test_of_law(law, sampler):
    x = drawn(initializers.of_law(law, None, sampler), (300, 200))
    bound = float(law.bound) * (1 + 1e-6)
    assert np.abs(x).max() <= bound
    if isinstance(law, Constant | Sign):
        assert np.allclose(np.abs(x), 0.3, rtol=1e-7)
        assert len(np.unique(x)) == (2 if isinstance(law, Sign) else 1)
    if isinstance(law, Sign):
        assert abs(x.mean() / 0.3) * math.sqrt(x.size) < 5
    elif law.std:
        assert has_std(x, law.std, law.kurtosis)
    if sampler == "jax" and law == Normal(0.3):
        assert np.allclose(x, jax.random.normal(KEY, (300, 200)) * np.float32(0.3), rtol=1e-6, atol=0)


def test_orthogonal_law_stacks_matrices():
    x = drawn(initializers.of_law(Orthogonal(2.0, 16)), (3, 8, 16))
    for q in x:
        assert np.allclose(q @ q.T, 4 * np.eye(8), atol=1e-5)
    assert not np.allclose(x[0], x[1])


# --- roles -------------------------------------------------------------------------------------------------------

MODERN = recipe_of("modern")
HOLDS = [
    ("attn_q", (64, 8, 8)), ("attn_q", (64, 64)), ("attn_q", (3, 64, 8, 8)), ("attn_q", (8, 8, 64)),
    ("attn_k", (64, 4, 8)), ("attn_k", (64, 32)), ("attn_k", (32, 64)), ("attn_v", (3, 64, 4, 8)),
    ("attn_out", (8, 8, 64)), ("attn_out", (64, 64)), ("attn_out", (2, 3, 8, 8, 64)),
    ("mlp_up", (64, 160)), ("mlp_up", (160, 64)), ("mlp_up", (5, 64, 160)), ("mlp_down", (7, 160, 64)),
]  # fmt: skip
REFUSES = [
    ("attn_q", (64,)), ("attn_q", ()), ("attn_q", (64, 8, 4)), ("attn_q", (32, 8, 8)), ("attn_k", (64, 8, 8)),
    ("attn_k", (64, 64)), ("mlp_up", (64, 161)), ("mlp_up", (10240,)), ("mlp_up", (64, 160, 3)), ("mlp_down", (9, 9)),
    ("token_embed", (64,)), ("token_embed", (99, 64)), ("token_embed", (100, 63)), ("token_embed", (64, 100)),
    ("lm_head", (64,)), ("lm_head", (99, 64)), ("lm_head", (64, 99)), ("pos_embed", (64,)), ("pos_embed", (32, 63)),
]  # fmt: skip


@pytest.mark.parametrize(("role", "shape"), HOLDS)
def test_role_in_any_layout(role, shape):
    x = drawn(MODERN.initializer(role), shape)
    assert has_std(x, MODERN.weights[role].std, MODERN.weights[role].kurtosis)


@pytest.mark.parametrize(("role", "shape"), REFUSES)
def test_role_refuses_what_cannot_hold_it(role, shape):
    fan_in, fan_out = SMALL.matrix(role)
    message = refused(MODERN.initializer(role), KEY, shape)
    assert message == f"{role}: shape {shape} cannot hold its {fan_in} x {fan_out} matrix (fan_in x fan_out)"


# case B02: an expert kernel has the law of the matrix that each expert holds
@pytest.mark.parametrize("experts", [1, 8, 64])
def test_experts(experts):
    g = Geometry(num_layers=2, d_model=128, num_heads=4, d_ff=64, vocab_size=16, num_experts=experts)
    x = drawn(recipe_of("lecun_normal", g).initializer("expert_up"), (experts, 128, 64))
    assert has_std(x, 1 / math.sqrt(128), KURTOSIS["truncated_normal"])
    assert len(np.unique(x[:, 0, 0])) == experts


@pytest.mark.parametrize("shape", [(64, 8, 8), (8, 8, 64), (3, 64, 64)])
def test_orthogonal_role_in_any_layout(shape):
    recipe = recipe_of("scion_spectral")
    x = drawn(recipe.initializer("attn_q"), shape).reshape(-1, 64, 64)
    for q in x:
        assert np.allclose(np.linalg.svd(q, compute_uv=False), recipe.weights["attn_q"].gain, atol=1e-5)
    k = drawn(recipe.initializer("attn_k"), (64, 4, 8)).reshape(64, 32)
    assert np.allclose(np.linalg.svd(k, compute_uv=False), recipe.weights["attn_k"].gain, atol=1e-5)


# case B34: rows that pad the vocabulary are zero, and no real row knows of them
@pytest.mark.parametrize("rows", [100, 128, 192])
def test_padded_vocabulary(rows):
    plain = MODERN.initializer("token_embed")(KEY, (100, 64))
    padded = MODERN.initializer("token_embed")(KEY, (rows, 64))
    assert (padded[:100] == plain).all()
    assert not padded[100:].any()
    head = MODERN.initializer("lm_head")
    assert (head(KEY, (rows, 64)) == head(KEY, (64, rows)).T).all()
    assert (head(KEY, (rows, 64))[:100] == head(KEY, (100, 64))).all()


def test_vectors_take_any_shape():
    for role in VECTORS:
        assert MODERN.initializer(role)(KEY, (3, 5)).shape == (3, 5)
    assert (MODERN.initializer("norm_scale")(KEY, (7,), jnp.bfloat16) == 1).all()


def test_unknown_roles():
    assert "did you mean 'attn_q'" in refused(MODERN.initializer, "attn_qq")
    assert refused(MODERN.initializer, "router").startswith("scheme modern: role 'router' is unknown")
    assert "is yours to give" in refused(recipe_of("external").initializer, "attn_q")


# case B03: std_l = s / sqrt(2 (l + 1)), the layer given or traced
def test_layer_may_be_traced():
    g = SMALL.replace(num_layers=8)
    recipe = recipe_of("megatron", g, divisor="layer")
    shape = (8, 8, 64)

    def make(key, layer):
        return recipe.initializer("attn_out", layer)(key, shape, jnp.float32)

    keys = jax.random.split(KEY, 8)
    given = np.stack([make(keys[i], i) for i in range(8)])
    by_vmap = jax.jit(jax.vmap(make))(keys, jnp.arange(8))
    by_scan = jax.lax.scan(lambda c, kl: (c, make(*kl)), None, (keys, jnp.arange(8)))[1]
    assert (np.asarray(by_vmap) == given).all()
    assert (np.asarray(by_scan) == given).all()
    for layer in range(8):
        assert has_std(given[layer].astype(np.float64), 0.02 / math.sqrt(2 * (layer + 1)))
    # one key for all: what is left is the ratio of the stds
    same = np.asarray(jax.vmap(functools.partial(make, KEY))(jnp.arange(8)))
    assert np.allclose(same[0] / same[7], math.sqrt(8), rtol=1e-6)
    for layer in (8, -1, np.int64(8)):
        assert "the layers are 0 to 7" in refused(recipe.initializer, "attn_out", layer)


@pytest.mark.parametrize("role", ["attn_q", "attn_out"])
def test_stock_sampler(role):
    recipe = recipe_of("modern")
    x = recipe.initializer(role, sampler="jax")(KEY, (64, 64), jnp.float32)
    sigma = np.float32(recipe.weights[role].sigma)
    assert (x == jax.random.truncated_normal(KEY, -3.0, 3.0, (64, 64)) * sigma).all()
    assert not (x == recipe.initializer(role)(KEY, (64, 64), jnp.float32)).any()
