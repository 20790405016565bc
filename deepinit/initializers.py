"""Closures (key, shape, dtype=None, out_sharding=None) -> array: JAX's own protocol, on the portable sampler.

`std` is that of the values drawn. Every draw is made in float32, whatever jax_enable_x64 says, and cast last: drawn in
bfloat16 a normal has 128 distinct values and a mean of -0.011 sigma.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinit import joint, laws, sampler
from deepinit.errors import ConfigError, unknown
from deepinit.geometry import EMBEDDINGS, VECTORS, Role
from deepinit.roles import role_of

if TYPE_CHECKING:
    from deepinit.recipe import Recipe

Closure = Callable[..., jax.Array]
Axes = int | Sequence[int]


def closure(draw: Callable[[Any, tuple[int, ...]], jax.Array], dtype: Any = np.float32) -> Closure:
    """A closure of the protocol around draw(key, shape) -> float32."""

    def init(key: Any, shape: Sequence[int], dtype: Any = dtype, out_sharding: Any = None) -> jax.Array:
        target = jnp.dtype(np.float32 if dtype is None else dtype)

        def values(key: Any) -> jax.Array:
            return draw(key, tuple(shape)).astype(target)

        if out_sharding is None:
            return values(key)
        if jax.sharding.AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
            return jax.sharding.auto_axes(values, out_sharding=out_sharding)(key)
        return jax.lax.with_sharding_constraint(values(key), out_sharding)

    return init


# --- laws --------------------------------------------------------------------------------------------------------


def of_law(law: laws.Distribution, layer: Any = None, sampler_name: str = "portable") -> Closure:
    """The closure of a law, for an array of any shape. `layer` (it may be traced) picks from a law per layer."""
    if isinstance(law, laws.External):
        raise ConfigError("this law is external: give the closure yourself, (role, layer) -> closure")
    if isinstance(law, laws.Factor):
        raise ConfigError(f"this law is drawn together with that of {law.partner}: it has no closure of its own")
    if sampler_name not in ("portable", "jax"):
        raise unknown("sampler", sampler_name, ("portable", "jax"))
    numbers = law.sigma if isinstance(law, laws.TruncatedNormal) else law.parameter
    if isinstance(law, laws.Uniform):
        numbers = law.bound
    number: Any = np.asarray(numbers, np.float64).astype(np.float32)
    if isinstance(numbers, tuple):
        if layer is None:
            raise ConfigError(f"the law {law.formula or law!r} has one std per layer: say which layer")
        check_layer(layer, len(numbers))
        # from a float32 table made here in float64: computed from a traced index the last bit would differ
        number = jnp.asarray(number)[layer]
    cut = law.cut if isinstance(law, laws.TruncatedNormal) else 0.0
    match law:
        case laws.Constant():
            return closure(lambda key, shape: jnp.full(shape, number, np.float32))
        case laws.Orthogonal():
            return closure(lambda key, shape: semi_orthogonal(key, shape, number))
        case laws.Uniform():
            return closure(functools.partial(_draw[sampler_name], number=number, kind="uniform"))
        case laws.Sign():
            coin = functools.partial(_draw[sampler_name], number=np.float32(1.0), kind="uniform")
            return closure(lambda key, shape: jnp.copysign(number, coin(key, shape)))
    return closure(functools.partial(_draw[sampler_name], number=number, kind="normal", cut=cut))


def check_layer(layer: Any, num_layers: int) -> None:
    """Refuse a layer that is not there (jax would take the last one); a traced one cannot be checked."""
    if isinstance(layer, int | np.integer) and not 0 <= layer < num_layers:
        raise ConfigError(f"layer {layer}: the layers are 0 to {num_layers - 1}")


def _stock_draw(key: Any, shape: tuple[int, ...], number: Any, kind: str, cut: float = 0.0) -> jax.Array:
    """The draws of jax.random: their bits depend on jax's version and flags."""
    if kind == "uniform":
        return jax.random.uniform(key, shape, np.float32, -1.0, 1.0) * number
    if cut:
        return jax.random.truncated_normal(key, -cut, cut, shape, np.float32) * number
    return jax.random.normal(key, shape, np.float32) * number


_draw = {"portable": sampler.draw, "jax": _stock_draw}


def semi_orthogonal(key: Any, shape: tuple[int, ...], gain: Any) -> jax.Array:
    """gain * Q, Q from the QR of a Gaussian with the signs of R's diagonal (Saxe et al. 2013; Mezzadri 2007).

    The last two axes are the matrix, axes before them stack several, each with a Q of its own. LAPACK's bits differ
    between machines, so this law alone is not portable.
    """
    if len(shape) < 2:
        raise ConfigError(f"an orthogonal law needs a matrix, got shape {shape}")
    *stack, rows, cols = shape
    tall = (*stack, max(rows, cols), min(rows, cols))
    q, r = jnp.linalg.qr(sampler.draw(key, tall, np.float32(1.0), "normal"))
    q = q * jnp.sign(jnp.diagonal(r, axis1=-2, axis2=-1))[..., None, :]
    return (q if rows >= cols else q.mT) * gain


# --- roles -------------------------------------------------------------------------------------------------------


def of_role(recipe: Recipe, role: str, layer: Any = None, sampler_name: str = "portable") -> Closure:
    """The closure of one role of a recipe; refuses a shape that cannot hold the role's matrix.

    A leaf with a law of its own is named by the end of its path, as in `recipe.leaves`.
    """
    if role in recipe.leaves:
        draw = of_law(recipe.leaves[role], layer, sampler_name)
        if role_of(role) in EMBEDDINGS:  # a second table: its rows are those of the vocabulary
            return closure(lambda key, shape: padded(draw(key, shape), recipe.geometry.vocab_size, axis=0))
        return draw
    role = Role.of(role)
    if role not in recipe.weights:
        raise unknown(f"scheme {recipe.name}: role", str(role), recipe.weights)
    law = recipe.weights[role]
    if isinstance(law, laws.External):
        raise ConfigError(f"scheme {recipe.name}: {role} is yours to give: pass initializer=(role, layer) -> closure")
    if law.layered and layer is None:
        raise ConfigError(f"scheme {recipe.name}: the std of {role} differs from layer to layer; say which layer")
    if isinstance(law, laws.Factor):
        return joint.closure(recipe.geometry, role, law)
    draw = of_law(law, layer, sampler_name)
    if role in VECTORS:
        return draw
    if isinstance(layer, int):
        check_layer(layer, recipe.geometry.num_layers)
    fans = recipe.geometry.matrix(role)
    width, vocab = recipe.geometry.d_model, recipe.geometry.vocab_size

    def checked(key: Any, shape: tuple[int, ...]) -> jax.Array:
        if len(shape) >= 2 and (role in EMBEDDINGS or role is Role.LM_HEAD):
            if shape[-1] == width and (role is Role.POS_EMBED or shape[-2] >= vocab):
                return draw(key, shape) if role is Role.POS_EMBED else padded(draw(key, shape), vocab)
            if role is Role.LM_HEAD and len(shape) == 2 and shape[0] == width and shape[1] >= vocab:
                # drawn row by row, so that padding the vocabulary moves no value
                return padded(draw(key, shape[::-1]), vocab).T
        elif matrix := held(shape, *fans):
            if isinstance(law, laws.Orthogonal):  # each matrix as such, whatever axes it is stored in
                return draw(key, (math.prod(shape) // math.prod(matrix), *matrix)).reshape(shape)
            return draw(key, shape)
        raise ConfigError(f"{role}: shape {shape} cannot hold its {fans[0]} x {fans[1]} matrix (fan_in x fan_out)")

    return closure(checked)


def held(shape: tuple[int, ...], fan_in: int, fan_out: int) -> tuple[int, int] | None:
    """(rows, cols) of the fan_in x fan_out matrix, or its transpose, that the last axes hold; None if they do not.

    Axes before them stack several. Where both ways fit, (fan_in, fan_out) is taken.
    """
    n = len(shape)
    splits = {(math.prod(shape[i:j]), math.prod(shape[j:])) for i in range(n) for j in range(i + 1, n)}
    return next((m for m in ((fan_in, fan_out), (fan_out, fan_in)) if m in splits), None)


def padded(rows: jax.Array, vocab: int, axis: int = -2) -> jax.Array:
    """Rows beyond the vocabulary set to exact zero: they take part in nothing and decay to nothing."""
    if rows.shape[axis] == vocab:
        return rows
    row = jax.lax.broadcasted_iota(np.int32, rows.shape, axis % rows.ndim)
    return jnp.where(row < vocab, rows, jnp.zeros_like(rows))


# --- the field's own closures, drop-ins for jax.nn.initializers ---------------------------------------------------


def normal(stddev: float = 1e-2, dtype: Any = np.float32) -> Closure:
    """N(0, stddev^2)."""
    return closure(functools.partial(sampler.draw, number=np.float32(stddev), kind="normal"), dtype)


def truncated_normal(
    stddev: float = 1e-2, dtype: Any = np.float32, lower: float = -2.0, upper: float = 2.0, *, corrected: bool = True
) -> Closure:
    """A normal cut off at `lower` and `upper` sigmas, whose values have std `stddev`.

    `corrected=False` gives what `jax.nn.initializers.truncated_normal` and torch give: `stddev` before the cut, so a
    real std of 0.8796 stddev at 2 sigmas. The cut is in sigmas, never in units of the values.
    """
    if lower != -upper or not upper > 0:
        raise ConfigError(f"truncated_normal: the cut is symmetric, in sigmas; got lower {lower}, upper {upper}")
    law = (laws.TruncatedNormal if corrected else laws.TruncatedNormal.from_sigma)(stddev, upper)
    sigma = np.asarray(law.sigma, np.float32)
    return closure(functools.partial(sampler.draw, number=sigma, kind="normal", cut=upper), dtype)


def uniform(scale: float = 1e-2, dtype: Any = np.float32) -> Closure:
    """Uniform on [0, scale), as jax.nn.initializers has it: the mean is scale/2, the std scale/sqrt(12)."""
    return closure(functools.partial(sampler.draw, number=np.float32(scale), kind="unit"), dtype)


def constant(value: Any, dtype: Any = np.float32) -> Closure:
    """Every entry `value`."""
    return closure(lambda key, shape: jnp.full(shape, value, np.float32), dtype)


def zeros(key: Any, shape: Sequence[int], dtype: Any = None, out_sharding: Any = None) -> jax.Array:
    """All zeros."""
    return constant(0.0)(key, shape, dtype, out_sharding)


def ones(key: Any, shape: Sequence[int], dtype: Any = None, out_sharding: Any = None) -> jax.Array:
    """All ones."""
    return constant(1.0)(key, shape, dtype, out_sharding)


def orthogonal(scale: float = 1.0, column_axis: int = -1, dtype: Any = np.float32) -> Closure:
    """`scale` times a semi-orthogonal matrix whose columns run along `column_axis` (scale: every singular value)."""

    def draw(key: Any, shape: tuple[int, ...]) -> jax.Array:
        if len(shape) < 2:
            raise ConfigError(f"orthogonal: shape {shape} is no matrix")
        moved = (*np.delete(shape, column_axis).tolist(), shape[column_axis])
        matrix = semi_orthogonal(key, (math.prod(moved[:-1]), moved[-1]), np.float32(scale))
        return jnp.moveaxis(matrix.reshape(moved), -1, column_axis)

    return closure(draw, dtype)


def fans(shape: Sequence[int], in_axis: Axes, out_axis: Axes, batch_axis: Axes) -> tuple[int, int]:
    """(fan_in, fan_out) of a kernel: axes named neither in, out nor batch are a receptive field, as in jax."""
    rank = len(shape)
    if rank < 2:
        raise ConfigError(f"shape {tuple(shape)} has no fan: a law by fan cannot initialize a vector (give a constant)")

    def positions(axes: Axes) -> tuple[int, ...]:
        return tuple(a % rank for a in ((axes,) if isinstance(axes, int) else axes))

    ins, outs, batch = map(positions, (in_axis, out_axis, batch_axis))
    if len({*ins, *outs, *batch}) < len(ins) + len(outs) + len(batch):
        raise ConfigError(f"in_axis {in_axis}, out_axis {out_axis} and batch_axis {batch_axis} overlap")
    field = math.prod(shape[a] for a in range(rank) if a not in (*ins, *outs, *batch))
    return field * math.prod(shape[a] for a in ins), field * math.prod(shape[a] for a in outs)


def variance_scaling(
    scale: float,
    mode: str,
    distribution: str,
    in_axis: Axes = -2,
    out_axis: Axes = -1,
    batch_axis: Axes = (),
    dtype: Any = np.float32,
) -> Closure:
    """Variance scale / n, n = fan_in, fan_out, fan_avg or fan_geo_avg.

    `scale` is a variance's scale, not a std and not a bound: uniform draws lie within sqrt(3 scale / n).
    `truncated_normal` is cut at 2 sigmas and corrected, so the std is the same for every distribution. Axes that stack
    matrices (layers, experts) belong in `batch_axis`.
    """
    modes = {"fan_in": lambda i, o: i, "fan_out": lambda i, o: o, "fan_avg": lambda i, o: (i + o) / 2,
             "fan_geo_avg": lambda i, o: math.sqrt(i * o)}  # fmt: skip
    kinds: dict[str, Callable[[float], laws.Distribution]] = {
        "normal": laws.Normal, "uniform": laws.Uniform, "truncated_normal": lambda std: laws.TruncatedNormal(std, 2.0),
    }  # fmt: skip
    if not scale >= 0:
        raise ConfigError(f"variance_scaling: scale {scale} is negative")
    if mode not in modes:
        raise unknown("variance_scaling: mode", mode, modes)
    if distribution not in kinds:
        raise unknown("variance_scaling: distribution", distribution, kinds)

    def draw(key: Any, shape: tuple[int, ...]) -> jax.Array:
        n = modes[mode](*fans(shape, in_axis, out_axis, batch_axis))
        return of_law(kinds[distribution](math.sqrt(scale / max(1, n))))(key, shape)

    return closure(draw, dtype)


glorot_normal = functools.partial(variance_scaling, 1.0, "fan_avg", "truncated_normal")
glorot_uniform = functools.partial(variance_scaling, 1.0, "fan_avg", "uniform")
lecun_normal = functools.partial(variance_scaling, 1.0, "fan_in", "truncated_normal")
lecun_uniform = functools.partial(variance_scaling, 1.0, "fan_in", "uniform")
he_normal = functools.partial(variance_scaling, 2.0, "fan_in", "truncated_normal")
he_uniform = functools.partial(variance_scaling, 2.0, "fan_in", "uniform")


def residual_scaled(inner: Closure, num_residuals: int) -> Closure:
    """What `inner` draws, divided by sqrt(num_residuals): the rule of GPT-2 and Megatron, 2L additions in L layers."""
    if num_residuals < 1:
        raise ConfigError(f"residual_scaled: {num_residuals} residual additions; 2L in a sequential block")
    factor = np.float32(1 / math.sqrt(num_residuals))

    def draw(key: Any, shape: tuple[int, ...]) -> jax.Array:
        # the barrier keeps XLA from merging two factors into one, whose product rounds differently
        return jax.lax.optimization_barrier(inner(key, shape, np.float32)) * factor

    return closure(draw)
