"""Pre-norm schemes that divide what writes into the stream by the root of the number of residual additions.

With N additions of variance s^2 / N each, Var(x_R) <= Var(x_0) + s^2 at any depth; undivided, it grows with N.
"""

from __future__ import annotations

from dataclasses import replace

from deepinit.geometry import OUTPUTS, Geometry, Role
from deepinit.recipe import Recipe
from deepinit.schemes.common import DepthUpdates, Divisor, Std, depth_updates, divided, fixed, truncated
from deepinit.schemes.registry import register

ANY = ("pre", "post", "sandwich", "sub", "reordered")


def scaled(
    g: Geometry,
    std: Std,
    *,
    token_std: Std | None = None,
    pos_std: Std | None = None,
    cut: float = 0.0,
    corrected: bool = True,
    divisor: Divisor = "total",
) -> Recipe:
    """`std` for all but the tables' own; output matrices over the root of the residual additions."""
    draw = truncated(cut, corrected)
    laws = fixed(g, std, draw=draw)
    for role, own in ((Role.TOKEN_EMBED, token_std), (Role.POS_EMBED, pos_std)):
        laws |= fixed(g, std if own is None else own, (role,), draw=draw)
    return Recipe(laws | divided(g, laws, divisor), invariants=("bounded_growth",) if divisor == "total" else ())


@register("gpt2", source="Radford et al. 2019, section 2.3; positions from the released code", norm=ANY)
def gpt2(
    g: Geometry,
    *,
    std: Std = 0.02,
    pos_std: Std = 0.01,
    divisor: Divisor = "total",
    cut: float = 0.0,
    corrected: bool = True,
) -> Recipe:
    """N(0, 0.02^2), positions N(0, 0.01^2); attention and MLP outputs 0.02/sqrt(2L).

    The paper's 1/sqrt(N) has N residual additions: 2L in a sequential block. The released code does not show it, and
    ports that match the output matrices by name have been seen to scale none.
    """
    return scaled(g, std, pos_std=pos_std, divisor=divisor, cut=cut, corrected=corrected)


@register("nanogpt", source="nanoGPT 3adf61e model.py:145,164,168", norm=ANY)
def nanogpt(
    g: Geometry, *, std: Std = 0.02, divisor: Divisor = "total", cut: float = 0.0, corrected: bool = True
) -> Recipe:
    """gpt2 with the token table's 0.02 for the positions too."""
    return scaled(g, std, divisor=divisor, cut=cut, corrected=corrected)


@register("megatron", source="arXiv:1909.08053; Megatron-LM d98e8a6 core/utils.py:862-871", norm=ANY)
def megatron(
    g: Geometry,
    *,
    std: Std = 0.02,
    embed_std: Std | None = None,
    divisor: Divisor = "total",
    cut: float = 0.0,
    corrected: bool = True,
    updates: DepthUpdates = "none",
    base_depth: int = 0,
) -> Recipe:
    """N(0, 0.02^2) throughout, attention, MLP and expert outputs 0.02/sqrt(2L); the std knows no width.

    Router and head take the plain std. `embed_std` about 1 is what the code suggests against loss spikes.
    `updates="depth"` multiplies the rate of the layers' matrices and gains by L0/L, L0 = `base_depth`.
    """
    tables = std if embed_std is None else embed_std
    made = scaled(g, std, token_std=tables, pos_std=tables, divisor=divisor, cut=cut, corrected=corrected)
    return replace(made, updates=depth_updates(g, updates, base_depth, power=1.0))


@register("opt", source="arXiv:2205.01068, section 2.2", norm=ANY)
def opt(g: Geometry, *, std: Std = 0.006, divisor: Divisor = "total") -> Recipe:
    """megatron with std 0.006: outputs 0.006/sqrt(2L)."""
    return scaled(g, std, divisor=divisor)


@register("deepseek", source="arXiv:2412.19437, section 4.2; arXiv:2401.06066", norm=ANY)
def deepseek(g: Geometry, *, std: Std = 0.006) -> Recipe:
    """Every matrix N(0, 0.006^2), experts and router too; no factor for depth is stated.

    The 0.02 in the released configuration files is a default for loading, not what was trained.
    """
    return scaled(g, std, divisor="none")


@register("small_init", source="Nguyen & Salazar 2019 (arXiv:1910.05895)", norm=ANY)
def small_init(g: Geometry, *, cut: float = 0.0, corrected: bool = True) -> Recipe:
    """Every matrix and table sqrt(2/(5d)), the Xavier std of a (d, 4d) matrix; no factor for depth."""
    return scaled(g, "sqrt(2/(5d))", divisor="none", cut=cut, corrected=corrected)


@register("small_init_scaled", source="arXiv:1910.05895, with the 1/sqrt(2L) of arXiv:1909.08053", norm=ANY)
def small_init_scaled(
    g: Geometry, *, std: Std = "sqrt(2/(5d))", divisor: Divisor = "total", cut: float = 0.0, corrected: bool = True
) -> Recipe:
    """sqrt(2/(5d)), outputs over sqrt(2L): width and depth both enter. What this library recommends for pre-norm."""
    return scaled(g, std, divisor=divisor, cut=cut, corrected=corrected)


@register("wang_init", aliases=("gpt_neox_20b",), source="arXiv:2204.06745; gpt-neox ea7aefd", norm=ANY)
def wang_init(g: Geometry) -> Recipe:
    """small_init, with the output matrices 2/(L sqrt(d)) (Wang & Komatsuzaki 2021, GPT-J): 1/L, not 1/sqrt(L).

    L counts layers, whether the block is parallel or not.
    """
    return Recipe(
        fixed(g, "sqrt(2/(5d))") | fixed(g, 2 / (g.num_layers * g.d_model**0.5), OUTPUTS, formula="2/(L sqrt(d))")
    )


@register("spike_no_more", aliases=("spike_no_more_scaled_embed",), source="arXiv:2312.16903", norm=ANY)
def spike_no_more(g: Geometry) -> Recipe:
    """small_init_scaled with the token embedding multiplied by sqrt(d) after the look-up.

    The stream then starts at a size that no branch can swamp, which bounds the gradient of the first layers' norms.
    """
    return replace(scaled(g, "sqrt(2/(5d))"), multipliers={"embed": g.d_model**0.5})


@register("mt_nlg", source="arXiv:2201.11990, section 3.2", norm=ANY, verified=False)
def mt_nlg(g: Geometry) -> Recipe:
    """Every matrix N(0, 1/(3d)): 4e-3 at d = 20480. Whether depth enters is not stated; here it does not."""
    return Recipe(fixed(g, (3 * g.d_model) ** -0.5, formula="1/sqrt(3d)"))


@register(
    "modern", source="a recipe table often given for Llama-like models; no frontier model is known to use it", norm=ANY
)
def modern(
    g: Geometry,
    *,
    std: Std = "sqrt(2/d)",
    embed_std: Std = 0.02,
    divisor: Divisor = "total",
    cut: float = 3.0,
    corrected: bool = False,
) -> Recipe:
    """sqrt(2/d) cut at 3 sigma, outputs over sqrt(2L), embeddings 0.02.

    sqrt(2/d) is He's rule for ReLU, 2.236 times small_init. The cut is not corrected for: the real std is 0.986578 of
    the one stated. The down-projection takes d, not its own fan-in d_ff.
    """
    return scaled(g, std, token_std=embed_std, pos_std=embed_std, divisor=divisor, cut=cut, corrected=corrected)


@register("modern_small", source="the code that goes with the table of `modern`", norm=ANY)
def modern_small(
    g: Geometry,
    *,
    std: Std = "sqrt(2/(5d))",
    embed_std: Std = "sqrt(2/(5d))",
    divisor: Divisor = "total",
    cut: float = 3.0,
    corrected: bool = False,
) -> Recipe:
    """sqrt(2/(5d)) cut at 3 sigma for everything, the head and the embeddings too; outputs over sqrt(2L)."""
    return scaled(g, std, token_std=embed_std, pos_std=embed_std, divisor=divisor, cut=cut, corrected=corrected)
