"""docs/what_the_numbers_say.md: claims on initialising transformers, with what was measured of each."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from deepinit.report.pages import table

RESULTS = Path(__file__).parent / "results"
MADE = "<!-- made by `python -m benchmarks.pages docs`; do not edit -->"
Laws = dict[tuple[str, str, str], tuple[float, float]]
"""(scheme, group, optimizer) -> (rule, measured)."""


@dataclass
class Claim:
    """One claim, the verdict on it, and whether the figures still bear that verdict out."""

    claim: str
    verdict: str
    text: str
    held: bool = True


@dataclass
class Figures:
    """Everything that was measured, by what it is."""

    claims: dict[str, Any]
    laws: Laws
    closed: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.closed = self.claims["closed_form"]

    @classmethod
    def read(cls, folder: Path = RESULTS) -> Figures:
        """From the results."""
        rows = json.loads((folder / "exponents.json").read_text())["rows"]
        laws = {(r["scheme"], r["group"], r["optimizer"]): (r["rule"], r["measured"]) for r in rows}
        return cls(json.loads((folder / "claims.json").read_text()), laws)

    def rows(self, scheme: str, depth: int, mlp: str = "swiglu") -> list[dict[str, Any]]:
        """The passes of one case, a row a seed."""
        found = [r for r in self.claims["passes"] if (r["scheme"], r["depth"], r["mlp"]) == (scheme, depth, mlp)]
        assert found, (scheme, depth, mlp)
        return found

    def mean(self, name: str, scheme: str, depth: int, mlp: str = "swiglu", at: int | None = None) -> float:
        """Over the seeds."""
        return float(np.mean([r[name] if at is None else r[name][at] for r in self.rows(scheme, depth, mlp)]))

    def losses(self, scheme: str) -> str:
        """Last losses of the seeds."""
        return ", ".join(f"{x[1]:.2f}" for x in self.claims["training"]["losses"][scheme])

    def worst(self, scheme: str) -> float:
        """The highest last loss."""
        return max(x[1] for x in self.claims["training"]["losses"][scheme])

    def law(self, scheme: str, group: str = "matrices") -> str:
        """Measured exponents."""
        sgd, adam = (self.laws[scheme, group, o][1] for o in ("sgd", "adam"))
        return f"{round(sgd, 2) + 0:+.2f} under SGD and {round(adam, 2) + 0:+.2f} under Adam"


def several(values: Sequence[float], digits: int = 3) -> str:
    """Numbers in a row."""
    return ", ".join(f"{v:.{digits}g}" for v in values)


def forward(f: Figures) -> list[Claim]:
    """Claims on the forward pass."""
    c = f.closed
    xavier = [f.mean("variance", "xavier", d, at=-1) for d in (12, 80, 200)]
    due = [f.mean("predicted", "xavier", d, at=-1) for d in (12, 80, 200)]
    first, last = f.mean("branch", "xavier", 200, at=0), f.mean("branch", "xavier", 200, at=-2)
    level = [f.mean("variance", "small_init_scaled", d, at=-1) for d in (12, 80, 200)]
    bare = f.rows("glorot_normal", 12, "relu")
    swiglu, relu, he = (c["without_norm"][k] for k in ("xavier, swiglu", "xavier, relu", "he_normal, relu"))
    layers = f.rows("xavier", 200)[0]["layers"]
    share = [f.mean("relative", "xavier", 200, at=layers.index(i) - 1) for i in (1, 16, 80, 200)]
    start, one, top = c["swamped"]["modern"]
    input_ratio, ratio = f.mean("input_ratio", "modern", 100), f.mean("ratio", "modern", 100)
    table_, code = c["branch"]["sqrt(2/d)"], c["branch"]["sqrt(2/(5d))"]
    low, high = c["relative"]["scaled"]
    return [
        Claim(
            "A residual sum without scaling has Var(x_l) = 1 + l sigma_F^2",
            "holds with a norm before each branch",
            f"Xavier, SwiGLU, 12 / 80 / 200 layers: {several(xavier)} measured, {several(due)} predicted. sigma_F^2 is "
            f"not one constant: attention adds {first:.2g} in the first layer and {last:.2g} in the last of 200, "
            "because its average over positions cancels less as positions align.",
            all(abs(a / b - 1) < 0.5 for a, b in zip(xavier, due)) and last > 2 * first,
        ),
        Claim(
            "With Xavier or He and a bare x + F(x) the variance grows as O(L)",
            "false: without a norm it explodes",
            f"Xavier with ReLU: {several([r['variance'][-1] for r in bare], 2)} after 12 layers in three draws "
            f"(x{relu['by layer'][3] / relu['by layer'][2]:.2g} a layer at first). He: predicted "
            f"{he['by layer'][3]:.2g} after three. With SwiGLU, whose branch is cubic in x, it is doubly exponential: "
            f"{several(swiglu['by layer'][1:6], 2)} after 1 to 5 layers, float32 overflows in layer "
            f"{swiglu['overflow']}.",
            min(r["variance"][-1] for r in bare) > 1e3 and swiglu["overflow"] is not None,
        ),
        Claim(
            "sigma_F^2 = 0.5, so 160 additions end at 81",
            "an illustration, no constant of transformers",
            f"The mean branch of a first layer adds {c['branch']['xavier, swiglu']:.2g} (Xavier, SwiGLU), "
            f"{c['branch']['xavier, relu']:.2g} (Xavier, ReLU), {code:.2g} (sqrt(2/(5d))), {table_:.2g} (sqrt(2/d)), "
            f"{c['branch']['he']:.2g} (He). After 80 layers: {f.mean('variance', 'xavier', 80, at=-1):.3g} for Xavier "
            f"and {f.mean('variance', 'small_init', 80, at=-1):.3g} for sqrt(2/(5d)) measured, "
            f"{c['top']['he']:.3g} for He and {c['top']['sqrt(2/d)']:.3g} for sqrt(2/d) predicted.",
        ),
        Claim(
            "Output matrices times 1/sqrt(2L) keep the variance at 1 + sigma_F^2",
            "holds",
            f"sqrt(2/(5d)) with it: {several(level, 4)} at 12, 80, 200 layers; {c['scaled']['1000']:.4g} predicted at "
            "1000. It bounds the forward pass only, not the update (below).",
            all(1.0 < v < 1.1 for v in level),
        ),
        Claim(
            "The stream starts at variance 1",
            "not with the embedding of the same recipe",
            f"An embedding of std 0.02 starts it at {start:.2g}. At 80 layers and d 4096 the first layer alone makes "
            f"that {one:.2g} (x{one / start:.0f}) and all of them {top:.2g}: what the embedding said is drowned, and "
            f"the gradient that reaches it is large: {input_ratio:,.0f} times that of the last layer (measured at 100 "
            f"layers, d 64; {ratio:.0f} times after the first layer). A multiplier on the embedding, or a norm after "
            "it, gives the stream a size.",
            input_ratio > 20,
        ),
        Claim(
            "The base std is sqrt(2/(5d)) in one place, sqrt(2/d) in another",
            "two schemes, not one",
            f"The stds differ by sqrt(5), the variance of a SwiGLU branch by a factor of {table_ / code:.0f}. Here "
            "they have two names, `modern_small` and `modern`.",
            table_ / code > 50,
        ),
        Claim(
            "Under pre-norm a layer's relative update falls as 1/sqrt(l); so does Megatron's",
            "holds without scaling, false with 1/sqrt(2L)",
            f"Xavier: {several(share, 2)} of the stream in layers 1, 16, 80, 200 (MLP, measured); exponent "
            f"{c['relative']['tail']:.2f} over layers 500 to 1000 (predicted). With outputs scaled by 1/sqrt(2L) every "
            f"one of 80 layers adds {low:.4f} to {high:.4f}: upper layers do not contribute less at step 0.",
            abs(c["relative"]["tail"] + 0.5) < 0.05 and high / low < 1.1 and share[0] > share[1] > share[2],
        ),
        Claim(
            "A fixed 0.02 is too large at d 8192",
            "holds",
            f"A branch adds {c['branch']['0.02 at 64']:.1g} at d 64, {c['branch']['0.02 at 4096']:.2g} at 4096, "
            f"{c['branch']['0.02 at 8192']:.3g} at 8192; sqrt(2/(5d)) adds {code:.2g} at any width, and is 0.02 at d "
            "1000. Norms hide it from the stream's direction, not from its size, the logits and the attention scores.",
            c["branch"]["0.02 at 8192"] > 100 * code,
        ),
        Claim(
            "Truncating a normal at 2 or 3 sigma keeps its std",
            "false unless corrected",
            f"It leaves {c['truncated'][0]:.4f} and {c['truncated'][1]:.4f} of it. Some libraries correct, some do "
            "not; in a recipe of this library `std` is that of the values drawn, and a scheme whose source does not "
            "correct has the smaller one.",
        ),
    ]  # fmt: skip


def backward(f: Figures) -> list[Claim]:
    """Claims on gradients."""
    ratios = {d: [r["ratio"] for r in f.rows("post_ln", d, "relu")] for d in (12, 48, 100)}
    everything = [x for some in ratios.values() for x in some]
    deep = f.rows("post_ln", 100, "relu")
    sums = [[1 + r["branch"][i] for r in deep] for i in (1, 3, 5)]
    down = {k: [f.mean("down_gradient", k, d, "relu", at=-1) for d in (12, 100)] for k in ("post_ln", "xavier")}
    drop = down["xavier"][0] / down["xavier"][1]
    queries = min(r["q_gradient"][0] for r in deep)
    pre = {k: f.mean("ratio", k, 100) for k in ("xavier", "peri_ln", "subln", "small_init_scaled", "deepnorm")}
    return [
        Claim(
            "Post-norm: before the norm the variance is large near the top",
            "false",
            f"After each norm it is 1, so the sum is 1 + sigma_F^2 at every height: "
            f"{several([float(np.mean(s)) for s in sums])} in the first, middle and last layer of 100.",
            max(float(np.mean(s)) for s in sums) < 4,
        ),
        Claim(
            "Post-norm: gradients vanish exponentially toward the input",
            "not as a law; true of queries and keys",
            "Gradient after the first layer over that after the last, six draws: median "
            f"{', '.join(f'{np.median(v):.2g} at {d} layers' for d, v in ratios.items())}, from {min(everything):.2g} "
            f"to {max(everything):.2g}: a wide scatter rather than a decay. What does vanish is the gradient of the "
            f"query and key matrices (down to {queries:.0e} at 100 layers), since all positions become one vector "
            f"(mean cosine {np.mean([r['correlation'] for r in deep]):.3f}).",
            float(np.median(ratios[100])) > 0.05 and queries < 1e-6,
        ),
        Claim(
            "Post-norm has large gradients near the output, pre-norm does not (Xiong et al. 2020)",
            "confirmed",
            f"The last down-projection's gradient at 12 and 100 layers: {several(down['post_ln'], 2)} under post-norm, "
            f"{several(down['xavier'], 2)} under pre-norm, a factor of {drop:.2f} where sqrt(100/12) is 2.89.",
            abs(math.log(drop / (100 / 12) ** 0.5)) < 0.5 and down["post_ln"][1] > 0.4 * down["post_ln"][0],
        ),
        Claim(
            "Pre-norm carries the gradient without attenuation",
            "it grows toward the input, unless branches are scaled",
            "A gradient goes as 1/|x|, so it is larger below. First over last layer of 100: "
            f"{pre['xavier']:.3g} (Xavier), {pre['peri_ln']:.3g} (Peri-LN), {pre['subln']:.3g} (Sub-LN), but "
            f"{pre['small_init_scaled']:.3g} with outputs scaled by 1/sqrt(2L), {pre['deepnorm']:.3g} for DeepNorm. "
            "A sum of gradients and Jacobians is not it: the one at x_0 is that at x_L times (1 + sum of dF_l/dx_0).",
            pre["xavier"] > 3 and pre["small_init_scaled"] < 1.5 and 0.8 < pre["deepnorm"] < 1.25,
        ),
    ]  # fmt: skip


PRINTED = {
    12: (2.213, 0.319, 0.204), 32: (2.828, 0.25, 0.125), 80: (3.557, 0.199, 0.079), 200: (4.472, 0.158, 0.05),
    1000: (6.687, 0.106, 0.022),
}  # fmt: skip
"""Depth -> alpha, beta, 1/sqrt(2L) of the text's table."""


def schemes(f: Figures) -> list[Claim]:
    """Claims on DeepNorm, ReZero, Fixup."""
    c, t = f.closed, f.claims["training"]
    same = all(abs(a - b) < 6e-4 for d, row in PRINTED.items() for a, b in zip(row, c["deepnorm"][str(d)]))
    (ea, eb), (da, db) = c["stacks"]["encoder"], c["stacks"]["decoder"]
    std, beta = c["beta"]
    rezero = f.rows("rezero", 100)[0]
    zero = {role for role, share in rezero["zero"].items() if share == 1}
    return [
        Claim(
            "DeepNorm: alpha = (2L)^(1/4), beta = (8L)^(-1/4), and a table of both",
            "right to the printed digit",
            "All fifteen entries at 12, 32, 80, 200 and 1000 layers are reproduced by the scheme.",
            same,
        ),
        Claim(
            "DeepNorm in an encoder-decoder: (2N)^(1/4) and (8N)^(-1/4), for each stack by itself",
            "not the paper's constants",
            f"Those of the paper couple the stacks. At 12 + 12 layers alpha and beta are {ea:.4g}, {eb:.3g} in the "
            f"encoder and {da:.4g}, {db:.3g} in the decoder, not 2.213, 0.319 in both.",
            abs(ea - 2.213) > 0.1,
        ),
        Claim(
            "DeepNorm draws weights from N(0, beta^2)",
            "false",
            "beta is a gain on Xavier's std, on values, attention output and the MLP alone; queries and keys keep gain "
            f"1. At d 768 and 12 layers the attention output has std {std:.4f}; taken literally it would have "
            f"{beta:.3f}, {beta / std:.0f} times as much.",
            beta / std > 20,
        ),
        Claim(
            "DeepNorm bounds the update at any depth",
            "of the matrices under SGD; not of the outer norms' gains, and not under Adam",
            f"One step's change of the logits, as a power of depth: matrices {f.law('DeepNorm')}; outer norm gains "
            f"{f.law('DeepNorm', 'norm_gains')}. The option `updates=depth` gives each role its rate; with it, "
            f"matrices {f.law('DeepNorm, rates by depth')}, gains {f.law('DeepNorm, rates by depth', 'norm_gains')}.",
            abs(f.laws["DeepNorm", "matrices", "sgd"][1]) < 0.15
            and f.laws["DeepNorm", "norm_gains", "adam"][1] > 0.85
            and abs(f.laws["DeepNorm, rates by depth", "matrices", "adam"][1]) < 0.15,
        ),
        Claim(
            "DeepNorm trains without warm-up where post-norm does not",
            "holds in this small test",
            f"48 layers, d 32, Adam at {t['rate']:g} throughout, {t['steps']} steps, three draws; mean of the last 20 "
            f"losses, where letter frequencies alone give {t['unigram']:.2f}: DeepNorm {f.losses('deepnorm')}; "
            f"post-norm {f.losses('post_ln')}, not even the letter frequencies, and no spike tells of it.",
            f.worst("deepnorm") < t["unigram"] - 0.1 and min(x[1] for x in t["losses"]["post_ln"]) > t["unigram"]
            and all(x[2] < x[0] + 0.1 for x in t["losses"]["post_ln"]),
        ),
        Claim(
            "Pre-norm does without warm-up",
            "with scaled branches; not seen of Xavier",
            f"The same run: outputs scaled by 1/sqrt(2L) {f.losses('small_init_scaled')}; unscaled Xavier "
            f"{f.losses('xavier')}, which after these steps is the letter frequencies and nothing more.",
            f.worst("small_init_scaled") < t["unigram"] - 0.1 < min(x[1] for x in t["losses"]["xavier"]),
        ),
        Claim(
            "ReZero starts as the identity, with equal gradients everywhere; early learning is slower",
            "exact at step 0; slower learning was not seen",
            f"Through 100 layers the variance does not change in any bit and the gradient ratio is "
            f"{rezero['ratio']:.6g}. All the matrices of the branches have a gradient of exactly 0, though: only the "
            f"gates move at first. Losses of the same run: {f.losses('rezero')}.",
            len(set(rezero["variance"])) == 1 and {"attn_q", "attn_out", "mlp_up", "mlp_down"} <= zero
            and f.worst("rezero") < f.worst("xavier"),
        ),
        Claim(
            "Fixup bounds the change of every layer",
            "of the MLP under SGD; not of attention, or under Adam",
            f"Depth to the power {f.law('Fixup', 'mlp')} for the MLP's matrices, {f.law('Fixup', 'attention')} for "
            "attention's, of which there are four. Scalars do not move at the first step: the branches end with 0.",
            abs(f.laws["Fixup", "mlp", "sgd"][1]) < 0.15
            and f.laws["Fixup", "attention", "sgd"][1] > 0.5
            and f.laws["Fixup", "mlp", "adam"][1] > 0.35,
        ),
        Claim(
            "Fixup scales weights by L^(-1/2) or L^(-1/4)",
            "incomplete",
            "The exponent is -1/(2m - 2) with m matrices in the branch and L the number of branches; besides, the last "
            "matrix of every branch and the head are 0, and branches have scalar shifts and a multiplier. All of it is "
            "`fixup`.",
        ),
        Claim(
            "Current open models share one recipe",
            "false by their own code",
            "They differ in base std, depth factor, truncation, embedding and norm gains: see "
            "[where the literature disagrees](where_the_literature_disagrees.md).",
        ),
        Claim(
            "The first loss is ln V",
            "only with a small head",
            f"It is ln V + Var(logit)/2. Xavier at 12 layers, d 64: {f.mean('loss', 'xavier', 12):.2f} measured, "
            f"{f.mean('predicted_loss', 'xavier', 12):.2f} predicted, ln V is {math.log(256):.2f}. A head of std 0.02 "
            f"adds {c['head']['64']:.2g} at d 64, {c['head']['4096']:.2g} at 4096, {c['head']['8192']:.2g} at 8192.",
        ),
    ]  # fmt: skip


def page(f: Figures) -> str:
    """The page."""

    def listed(claims: list[Claim]) -> str:
        return "\n\n".join(f"**{c.claim}.** *{c.verdict[0].upper()}{c.verdict[1:]}.* {c.text}" for c in claims)

    moves = [(label, *(f"{f.laws[label, group, o][1]:+.2f}" for o in ("sgd", "adam"))) for label, group in (
        ("Megatron, sqrt(2/(5d))", "matrices"), ("SkipInit, 1/sqrt(R)", "matrices"), ("Depth-muP", "matrices"),
        ("CompleteP", "matrices"), ("DeepNorm", "matrices"), ("ReZero", "gates"),
    )]  # fmt: skip
    every = (*forward(f), *backward(f), *schemes(f))
    parts = [
        "# What the numbers say",
        MADE,
        "Claims of a widely read kind of text on initialising transformers, each with what was measured. Figures come "
        "from drawn models of this library on CPU (`python -m benchmarks.claims`, `python -m benchmarks.exponents`): d "
        "64, two heads of 32, 64 random tokens, an input of variance 1, no positional encoding, unless it says "
        "otherwise. \"Predicted\" is `deepinit.predict`, which draws nothing; "
        "[how far it may be off](prediction_study.md) is measured as well.",
        table(("claim", "verdict"), [(c.claim, c.verdict) for c in every]),
        "## The forward pass", listed(forward(f)),
        "## Gradients", listed(backward(f)),
        "## Schemes", listed(schemes(f)),
        "## What follows",
        "**Weights or branch: the same variance, another update.** 1/sqrt(2L) on the output matrices and 1/sqrt(2L) on "
        "the branch give the same stream at step 0. But a smaller matrix does not have a smaller gradient, while a "
        "smaller branch does. One step's change of the logits grows with depth to the power",
        table(("scheme", "SGD", "Adam"), moves),
        "so a rate found at 12 layers is too high at 96 where the exponent is positive. A multiplier on the branch "
        "(`depth_mup`, `completep`, `skipinit`) is the safer place for a depth factor.",
        "**DeepNorm under Adam wants rates by role.** `--scheme.name deepnorm --scheme.args.updates depth` lowers "
        "the rate of matrices as 1/sqrt(L) and of the outer norms' gains as 1/L, which makes the first update level. A "
        "level first update does not mean that the best rate stays where it is.",
        "**Say the base std, the place of the depth factor and the truncation.** A recipe that leaves one of them open "
        "describes models whose branches differ a hundredfold. `deepinit explain` prints all three.",
        "**Give the stream a size.** With an embedding of std 0.02 and nothing after it, the first layers make the "
        "stream. That may be wanted; it should be chosen.",
        "**Look at the size that will be trained.** A fixed std is small at d 64 and large at d 8192; "
        "`deepinit predict` answers for either in seconds.",
        "**Judge post-norm by gradients and token correlation.** Its variance is 1 whatever happens. `deepinit probe` "
        "fails a post-norm stack whose positions have become one vector.",
        "**Watch for a plateau, not for a spike.** Stacks that collapse settle at the entropy of the token frequencies "
        "without any jump; `train.probe_every` and the run itself warn of it.",
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"
