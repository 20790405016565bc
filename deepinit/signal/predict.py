"""What a scheme does to the stream at step 0, from its recipe alone: no weight is drawn, nothing is run.

The state is the token Gram matrix. Every sublayer maps the Gram of its input to the Gram of its output, averaged over
the weights of a wide network with Gaussian logits, and the residual rule adds the two. The cost knows no width.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinit.errors import ConfigError
from deepinit.geometry import LAYER_MATRICES
from deepinit.recipe import Recipe
from deepinit.signal import gaussian, growth, logits
from deepinit.signal.follow import States, first_grams, follow
from deepinit.signal.forward import Forward, centered
from deepinit.signal.gaussian import Array
from deepinit.signal.measured import plain

LARGEST = {"float32": 3.4028235e38, "bfloat16": 3.3895314e38, "float16": 65504.0}
SIGMAS = 6.0
"""How far out of a layer's numbers must still be finite: beyond this lies one in a thousand million."""


@dataclass(frozen=True, eq=False)
class Prediction:
    """The prediction for one recipe. N residual additions; variances are mean squares over tokens and features."""

    forward: Forward
    """The recipe and the model's options, as numbers."""
    seq_len: int
    repetition: float
    """Rate at which two positions of the batch hold one token, themselves included."""
    variance: Array
    """(N + 1,): of the stream, before the first addition and after each."""
    branch: Array
    """(N,): of what each addition adds, its factors included."""
    hidden: Array
    """(N,): of what meets the output matrix (of a parallel block, the MLP's)."""
    correlation: Array
    """(N + 1,): mean cosine of two different positions."""
    kept: Array
    """(N + 1,): coefficient of the stack's input in the stream."""
    relative_update: Array
    """(N,): RMS of what is added over that of the sum: 0 adds nothing, 1 leaves nothing of the stream."""
    scores: Array
    """(L,): variance of attention logits over the keys of a row."""
    logit_variance: float
    """Of a logit that is not the position's own token."""
    own_logit: float
    """Mean logit of the position's own token: 0 unless the head is tied."""
    loss: float
    """Expected cross-entropy at step 0, in nats."""
    amplification: float
    """d ln Var(x_N) / d ln Var(x_0) without norms; 1 with them."""
    overflow: Mapping[str, int | None]
    """First layer (1-based; 0: the embedding) whose numbers leave a format; None: none does."""
    exponents: Mapping[str, growth.Exponents]
    """Growth of the one-step update with depth, by group of parameters."""
    notes: tuple[str, ...]
    """What the theory leaves out here, and by how much it may be off."""

    @property
    def recipe(self) -> Recipe:
        """The recipe that was read."""
        return self.forward.recipe

    @property
    def layer_variance(self) -> Array:
        """(L + 1,): the stream's variance before the first layer and after each."""
        return self.variance[:: self.recipe.geometry.sublayers]

    @property
    def layer_correlation(self) -> Array:
        """(L + 1,): mean cosine of two positions, the same way."""
        return self.correlation[:: self.recipe.geometry.sublayers]

    def to_json(self) -> dict[str, Any]:
        """Plain data; what is not finite is null."""
        g = self.recipe.geometry
        return {
            "scheme": self.recipe.name,
            "args": {k: list(v) if isinstance(v, tuple) else v for k, v in self.recipe.args.items()},
            "geometry": dataclasses.asdict(g),
            "residual": self.recipe.residual.formula,
            "norm": self.recipe.residual.norm,
            "seq_len": self.seq_len,
            "additions": [a.kind for a in self.forward.additions],
            "variance": plain(self.variance),
            "branch_variance": plain(self.branch),
            "relative_update": plain(self.relative_update),
            "token_correlation": plain(self.correlation),
            "attention_logit_variance": plain(self.scores),
            "logit_variance": plain(self.logit_variance),
            "own_logit": plain(self.own_logit),
            "loss": plain(self.loss),
            "amplification": plain(self.amplification),
            "overflow": dict(self.overflow),
            "exponents": {k: {"sgd": plain(e.sgd), "adam": plain(e.adam)} for k, e in self.exponents.items()},
            "notes": list(self.notes),
        }


def predict(
    recipe: Recipe,
    tokens: Any = None,
    *,
    seq_len: int = 0,
    repetition: float = 0.0,
    input_variance: float | None = None,
    own_target_rate: float | None = None,
    exponents: bool = True,
    **options: Any,
) -> Prediction:
    """Variance, branch, token correlation, relative update and overflow by depth; loss and update growth at step 0.

    Args:
      recipe: of a decoder; nothing is allocated that depends on its width.
      tokens: (T,) or (B, T) whole numbers, whose repetitions are followed; None: all positions hold different tokens.
      seq_len: positions without `tokens`; by default the model's longest sequence, at most 256.
      repetition: without `tokens`, the rate at which two positions hold one token (sum of squared frequencies).
      input_variance: of the stream before the first layer; by default what the recipe's embedding gives.
      own_target_rate: how often a target is the position's own token, for a tied head; by default as in `tokens`.
      exponents: whether to predict the growth of the update, which asks for the recipe at other depths.
      options: of `deepinit.nn.Decoder` (norm, positions, qk_norm, ...), with its defaults.

    Raises:
      ConfigError: the recipe is not of a decoder, its weights are the caller's or joint, or an option is unknown.
    """
    forward = Forward.of(recipe, options)
    start, same = first_grams(forward, tokens, seq_len, repetition, input_variance)
    states = follow(forward, start, same)
    amplification = 1.0
    if forward.normless and not forward.identity:
        nudged = follow(forward, 1.01 * start, same).variance[-1]
        amplification = max(1.0, math.log(nudged / states.variance[-1]) / math.log(1.01))
    if own_target_rate is None:
        own_target_rate = own_targets(tokens, recipe.geometry.vocab_size)
    spread, own = logits.moments(forward, states.variance[-1], states.kept[-1])
    notes = remarks(forward, states, tokens is not None, start.shape[-1])
    laws: dict[str, growth.Exponents] = {}
    if exponents:
        try:
            laws = growth.exponents(growth.at_depths(recipe), options=options)
        except ConfigError as e:
            notes.append(f"no growth exponents: {e}")
    softcap = forward.options.logit_softcap
    return Prediction(
        forward=forward,
        seq_len=start.shape[-1],
        repetition=rate_of_repetition(tokens) if tokens is not None else max(repetition, 1 / start.shape[-1]),
        variance=np.array(states.variance),
        branch=np.array(states.branch),
        hidden=np.array(states.hidden),
        correlation=np.array(states.correlation),
        kept=np.array(states.kept),
        relative_update=np.sqrt(states.share),
        scores=np.array([v for v, a in zip(states.scores, forward.additions) if a.kind != "mlp"]),
        logit_variance=logits.capped_variance(spread, softcap),
        own_logit=own,
        loss=logits.expected_loss(spread, own, recipe.geometry.vocab_size, own_target_rate, softcap),
        amplification=amplification,
        overflow={k: first_overflow(forward, states, largest) for k, largest in LARGEST.items()},
        exponents=laws,
        notes=tuple(notes),
    )


def rate_of_repetition(tokens: Any) -> float:
    """Probability that two positions drawn from a batch hold the same token: 1/(B T) where all differ."""
    counts = np.unique(np.asarray(tokens), return_counts=True)[1] / np.size(tokens)
    return float(counts @ counts)


def own_targets(tokens: Any, vocab_size: int) -> float:
    """How often the next token is the same one."""
    if tokens is None or np.shape(tokens)[-1] < 2:
        return 1 / vocab_size
    tokens = np.asarray(tokens)
    return float((tokens[..., 1:] == tokens[..., :-1]).mean())


def first_overflow(forward: Forward, states: States, largest: float) -> int | None:
    """The first layer with a number above `largest`, in the stream or on the way through a branch."""
    if SIGMAS * math.sqrt(states.variance[0]) > largest:
        return 0
    for s, a in enumerate(forward.additions[: len(states.branch)]):
        worst = max(states.variance[s + 1], states.branch[s], states.hidden[s])
        if not SIGMAS * math.sqrt(worst) <= largest:
            return a.layer + 1
    return None


def remarks(forward: Forward, states: States, real_tokens: bool, length: int) -> list[str]:
    """What is left out, and by how much it may be off (measured against drawn models)."""
    g, recipe, longest = forward.recipe.geometry, forward.recipe, forward.recipe.geometry.max_seq_len
    norms = {a.norm for a in forward.additions}
    said = [f"{what}: not followed; the prediction is of the rule without it" for what in forward.not_followed]
    for role in LAYER_MATRICES:
        if g.count(role) and not centered(recipe.weights[role]):
            said.append(f"{role} has a mean: not followed, the stream may grow along one direction")
    if g.num_experts:
        said.append(
            "experts: a router's choice is taken to depend on nothing but its logits; branches may be off by 5%"
        )
    if float(np.max(np.abs(np.asarray(recipe.gains["smear"].value)))) if "smear" in recipe.gains else 0.0:
        said.append("smear: the share of the token before is not followed")
    if "backout" in recipe.gains and g.tied_embeddings:
        said.append("backout: not followed in the tied head's own logit")
    if not real_tokens and length < longest and not forward.identity:
        shrink = (math.log(longest) + 0.577) / longest / ((math.log(length) + 0.577) / length)
        said.append(
            f"predicted at {length} of {longest} positions: over different tokens attention's first branch "
            f"would have {shrink:.2g} times this variance at full length; MLP branches do not change"
        )
    if forward.normless and not forward.identity:
        said.append("no norm: compare ln Var; errors are amplified along with the stream")
    if "post" in norms and all(a.skip <= 1 for a in forward.additions):
        said.append("post-norm with skip 1: tokens align; a branch's variance may be off by 20%, the update has no law")
    if "reordered" in norms and not forward.options.qk_norm:
        said.append("no norm before q and k: their logits grow with the stream; token correlation may be off by 0.2")
    if max(states.scores) > gaussian.SIGMA_GRID[-1] ** 2:
        said.append("attention logits wider than sigma 14: taken as 14, a softmax that picks one key")
    if real_tokens and g.d_model >= 2048:
        said.append("repetitive text: a frequent token gets less attention than predicted, Var may be off by 5%")
    return said
