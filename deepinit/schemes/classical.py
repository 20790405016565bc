"""Schemes for a single matrix, made before there were residual streams; and the one that leaves all to the caller."""

from __future__ import annotations

from typing import Literal

from deepinit.geometry import EMBEDDINGS, Geometry, Role
from deepinit.laws import External, Uniform
from deepinit.recipe import Recipe
from deepinit.schemes.common import (
    MATRICES,
    Divisor,
    Draw,
    Laws,
    Std,
    divided,
    fan_in,
    fixed,
    roles_of,
    tied_logits,
    truncated,
    xavier,
)
from deepinit.schemes.registry import register

Embedding = Literal["matrix", "lookup"]
GLOROT = "Glorot & Bengio 2010, eq. 12 and 16"


def glorot(g: Geometry, draw: Draw, gain: float, embedding: Embedding) -> Laws:
    """Std gain sqrt(2 / (fan_in + fan_out)); the tables as (vocab, d) matrices, or as look-ups of std 1/sqrt(d)."""
    laws = xavier(g, gain=gain, draw=draw, name="" if gain == 1 else f"{gain:g}")
    if embedding == "lookup":
        return laws | fixed(g, "1/sqrt(d)", EMBEDDINGS, draw=draw)
    # Positions share the token table's law: the two are added, so they are of one size.
    return laws | {Role.POS_EMBED: laws[Role.TOKEN_EMBED]}


@register(
    "glorot_normal",
    aliases={
        "xavier": {"embedding": "lookup"},
        "xavier_normal": {"embedding": "lookup"},
        "glorot_normal_truncated_jax": {"cut": 2.0},
    },
    source=GLOROT,
)
def glorot_normal(
    g: Geometry, *, gain: float = 1.0, embedding: Embedding = "matrix", cut: float = 0.0, corrected: bool = True
) -> Recipe:
    """Normal with std sqrt(2/(fan_in+fan_out)): a compromise between Var(y) = Var(x) forward and backward.

    Equal only where fan_in = fan_out: from d to 4d it gives Var(y) = 0.4 Var(x). It knows nothing of residual
    additions, so the stream grows with depth. The formula makes the embedding far too small, as a look-up has a fan-in
    of 1: the alias `xavier` takes `embedding="lookup"`, std 1/sqrt(d) whatever the vocabulary.
    `glorot_normal_truncated_jax` is what jax.nn.initializers draws under this name (cut 2, corrected).
    """
    return Recipe(glorot(g, truncated(cut, corrected), gain, embedding))


@register("glorot_uniform", aliases={"xavier_uniform": {"embedding": "lookup"}}, source=GLOROT)
def glorot_uniform(g: Geometry, *, gain: float = 1.0, embedding: Embedding = "matrix") -> Recipe:
    """Uniform with the same std, so with the bound sqrt(6/(fan_in+fan_out)); see glorot_normal."""
    return Recipe(glorot(g, Uniform, gain, embedding))


@register("he_normal", aliases=("kaiming", "kaiming_normal", "he"), source="arXiv:1502.01852, eq. 10")
def he_normal(g: Geometry, *, cut: float = 0.0, corrected: bool = True) -> Recipe:
    """Normal with std sqrt(2/fan_in): E[relu(W x)^2] = E[x^2]. Embeddings 1/sqrt(d).

    The 2 makes up for a ReLU; matrices with no ReLU behind them gain a factor 2 in variance.
    """
    return Recipe(fan_in(g, scale=2.0, draw=truncated(cut, corrected)))


@register(
    "lecun_normal", aliases=("lecun_normal_jax", "flax_default"), source="LeCun et al. 1998, section 4.6; flax nn.Dense"
)
def lecun_normal(g: Geometry, *, cut: float = 2.0, corrected: bool = True, divisor: Divisor = "none") -> Recipe:
    """Std sqrt(1/fan_in): Var(y) = Var(x). Cut at 2 sigma, corrected, as a Flax kernel; embeddings 1/sqrt(d).

    With a `divisor` each output matrix is scaled from its own fan-in: d_model for attention, d_ff for the MLP.
    """
    laws = fan_in(g, draw=truncated(cut, corrected))
    return Recipe(laws | divided(g, laws, divisor))


@register("torch_linear_default", source="torch nn.Linear.reset_parameters: kaiming_uniform_(a=sqrt(5)), nn.Embedding")
def torch_linear_default(g: Geometry) -> Recipe:
    """Uniform on +-1/sqrt(fan_in), so std 1/sqrt(3 fan_in); embeddings N(0, 1). What an untouched torch model has.

    A tied head reads a table of unit std, so its logits are multiplied by 1/sqrt(d). torch draws biases too; here they
    are 0.
    """
    laws = {r: Uniform((3 * g.fan_in(r)) ** -0.5, "1/sqrt(3 fan_in)") for r in roles_of(g, MATRICES)}
    return Recipe(laws | fixed(g, 1.0, EMBEDDINGS), multipliers=tied_logits(g))


@register("fixed_normal", aliases=("bert", "hf_initializer_range"), source="arXiv:1810.04805, code modeling.py")
def fixed_normal(g: Geometry, *, std: Std = 0.02, cut: float = 0.0, corrected: bool = True) -> Recipe:
    """One std for every matrix, 0.02: neither width nor depth enters."""
    return Recipe(fixed(g, std, draw=truncated(cut, corrected)))


@register("external", source="the caller")
def external(g: Geometry) -> Recipe:
    """Every closure is given by the caller; nothing is known of the values, so nothing is checked but the constants."""
    return Recipe({r: External() for r in roles_of(g, MATRICES)})
