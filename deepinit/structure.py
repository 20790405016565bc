"""Laws of a model as a whole at step 0, from one forward and one backward pass over a few tokens.

What a scheme promises beyond its weights: a stack that starts as the identity, the parameters that move first, bounded
growth of the stream, the bound on the first update, norms of RMS 1, the size of the embedding, the first loss. What
every scheme shares is derived from its recipe; `Recipe.invariants` names what a scheme declares besides.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from deepinit import roles, stacks
from deepinit.deviations import std_deviation
from deepinit.errors import unknown
from deepinit.geometry import UPS, Geometry, Role
from deepinit.interop import trees
from deepinit.laws import Constant
from deepinit.recipe import Recipe
from deepinit.verdict import Row, whole

TOKENS = 16
LIMIT = 6.4
"""Standard errors that pass: a false alarm in 10^9 draws."""
ALARM = 2.0
"""Nats above ln V from which on the first loss is called unsafe, if they are more than half of ln V."""
ATTENTION = (Role.ATTN_Q, Role.ATTN_K, Role.ATTN_V, Role.ATTN_OUT)
MLP = (Role.MLP_GATE, Role.MLP_UP, Role.MLP_DOWN)
ByLayer = dict[int | None, bool]
"""Layer -> a flag, of the layers that have the leaf; None -> the one flag of a leaf outside of the stack."""


@dataclass(frozen=True)
class Pass:
    """What one forward and backward pass gave, on the host."""

    recipe: Recipe
    model: Any
    moved: Mapping[str, ByLayer]
    """Canonical path -> whether a leaf has a gradient."""
    zero: Mapping[str, ByLayer]
    """Canonical path -> whether a leaf is all zero."""
    stats: Mapping[str, np.ndarray]
    """Canonical path -> (layers,), or () outside of the stack."""
    tokens: int
    """Distinct ones."""
    loss: float
    """Against random targets."""
    uniform: float
    """Against uniform targets."""
    logit_variance: float
    own_logit: float
    """Mean logit of the token itself."""
    rows: Mapping[str, bool]
    """What is true of the rows of the tables."""


def check(model: Any, recipe: Recipe, params: Any, *, strict: bool = False) -> tuple[Row, ...]:
    """A row for every law of the structure that holds, is broken, or is unsafe.

    Args:
      model: the Linen decoder; its rule and multipliers are what is run.
      recipe: what they should be.
      params: its parameters, sharded or not; under `jax.set_mesh` where they are.
      strict: warnings fail.
    """
    rows = list(declared_rule(model, recipe))
    if any(not r.ok for r in rows):
        return tuple(rows)
    seen = run(model, recipe, params)
    for law in (gradients, identity, norms, embedding, tables, first_loss):
        rows += law(seen)
    for name in recipe.invariants:
        if name not in DECLARED:
            raise unknown(f"scheme {recipe.name}: invariant", name, DECLARED)
        rows += DECLARED[name](seen) if name != "identity" else ()
    if strict:
        rows = [whole(r.role, r.test, r.reason.strip("()"), z=r.z, n=r.n) if r.unsafe else r for r in rows]
    return tuple(rows)


def holds(test: str, said: str, z: float = 0.0, n: int = 0) -> Row:
    """A law that holds, with its number."""
    return whole("", test, f"({said})", ok=True, z=z, n=n)


def declared_rule(model: Any, recipe: Recipe) -> Iterator[Row]:
    """The model runs the recipe's own residual rule and multipliers: DeepNorm's alpha is on the skip."""
    if model.residual != recipe.residual:
        yield whole("", "rule", f"the model runs {model.residual.formula}, the recipe says {recipe.residual.formula}")
    for name, factor in recipe.multipliers.items():
        if not math.isclose(model.multipliers.get(name, 1.0), factor):
            yield whole("", "rule", f"multiplier {name} is {model.multipliers.get(name, 1.0):g}, should be {factor:g}")


# --- the pass ----------------------------------------------------------------------------------------------------


def run(model: Any, recipe: Recipe, params: Any) -> Pass:
    """One forward and one backward pass; an unrolled stack is run scanned, so that nothing compiles layer by layer."""
    g = recipe.geometry
    mesh = jax.sharding.get_abstract_mesh()
    batch = math.prod(mesh.shape[a] for a in ("data", "fsdp") if a in mesh.shape) if not mesh.empty else 1
    time = min(TOKENS, g.max_seq_len)
    order = np.random.default_rng(0).permutation(g.vocab_size)
    tokens = np.resize(order, (batch, time)).astype(np.int32)
    targets = np.resize(order[::-1], (batch, time)).astype(np.int32)
    tree = nested(params)
    numbers = compiled(model.clone(scan=True, dropout=0.0), layout(tree, g))
    with jax.numpy_dtype_promotion("standard"):  # jax's own backward pass of attention mixes bfloat16 with float32
        got = jax.device_get(numbers(tree, tokens, targets))
    return Pass(
        recipe=recipe,
        model=model,
        moved=by_layer(got["moved"]),
        zero=by_layer(got["zero"]),
        stats={path: np.asarray(x) for path, x in stacks.layered(got["stats"]).items()},
        tokens=len(np.unique(tokens)),
        loss=float(got["loss"]),
        uniform=float(got["uniform"]),
        logit_variance=float(got["variance"]),
        own_logit=float(got["own"]),
        rows={k: bool(v) for k, v in got["rows"].items()},
    )


def nested(params: Any) -> Any:
    """A tree of any container as plain dicts."""
    out: dict[str, Any] = {}
    for path, x in trees.flat(params):
        *above, last = path.split("/")
        at = out
        for part in above:
            at = at.setdefault(part, {})
        at[last] = x
    return out


def layout(params: Any, g: Geometry) -> tuple[tuple[str, NamedSharding], ...]:
    """Path -> how a leaf of the scanned model lies on the mesh, as its layers do."""
    firsts = {f"{roles.STACK}_{layers[0]}": name for name, layers in stacks.named(g).items()}
    found = {}
    for path, x in trees.flat(params):
        first, _, rest = path.partition("/")
        if isinstance(own := getattr(x, "sharding", None), NamedSharding):
            if roles.locate(path).layer is None:
                found[path] = own
            elif first in firsts:
                found[f"{firsts[first]}/{rest}"] = NamedSharding(own.mesh, PartitionSpec(None, *own.spec))
    return tuple(found.items())


def by_layer(flags: Mapping[str, np.ndarray]) -> dict[str, ByLayer]:
    """Canonical path -> layer -> flag."""
    found: dict[str, ByLayer] = {}
    for path, flag in flags.items():
        leaf = roles.locate(path)
        found.setdefault(leaf.canonical, {}).update(zip(leaf.rows(np.shape(flag)), np.atleast_1d(flag).tolist()))
    return {path: dict(sorted(of.items(), key=lambda item: item[0] or 0)) for path, of in found.items()}


@functools.cache
def compiled(model: Any, layout: tuple[tuple[str, NamedSharding], ...] = ()) -> Any:
    """(params, tokens, targets) -> the numbers of a pass, all small."""
    g, shards = model.geometry, dict(layout)

    def held(path: Any, grad: jax.Array) -> jax.Array:
        """A gradient in the shards of its leaf: else every device would hold all of it."""
        own = shards.get(roles.joined(roles.names(path)))
        return grad if own is None else jax.lax.with_sharding_constraint(grad, own)

    def loss(params: Any, tokens: jax.Array, targets: jax.Array) -> Any:
        logits, kept = model.apply({"params": params}, tokens, mutable=["stats"])
        real = logits[..., : g.vocab_size]
        top = jax.nn.logsumexp(real, -1)
        picked = jnp.take_along_axis(real, targets[..., None], -1)[..., 0]
        own = jnp.take_along_axis(real, tokens[..., None], -1)[..., 0]
        others = jnp.where(jnp.arange(g.vocab_size) == tokens[..., None], real.mean(-1, keepdims=True), real)
        facts = {
            "stats": kept["stats"],
            "uniform": jnp.mean(top - real.mean(-1)),
            "variance": jnp.mean(jnp.square(others)),
            "own": own.mean(),
            "masked": jnp.all(logits[..., g.vocab_size :] == np.finfo(np.float32).min),
        }
        return jnp.mean(top - picked), facts

    def numbers(params: Any, tokens: jax.Array, targets: jax.Array) -> Any:
        params = stacks.scanned(params, g, jnp.stack)
        (value, facts), grads = jax.value_and_grad(loss, has_aux=True)(params, tokens, targets)
        grads = jax.tree.map_with_path(held, grads)
        used = jnp.zeros((model.vocab_padded,), bool).at[tokens].set(True)
        real = jnp.arange(model.vocab_padded) < g.vocab_size
        table = jnp.any(grads["token_embed"] != 0, 1)
        head = jnp.any(grads["lm_head"] != 0, 1) if "lm_head" in grads else table
        rows = {
            "pads are masked": facts.pop("masked"),
            "pads have no gradient": ~jnp.any((table | head) & ~real),
            "a token that is not there moves the head": jnp.any(head & real & ~used) | jnp.all(used | ~real),
            "a token that is not there moves the table": jnp.any(table & real & ~used),
        }
        return facts | {"loss": value, "rows": rows, "moved": flags(grads, True), "zero": flags(params, False)}

    return jax.jit(numbers)


def flags(tree: Any, moving: bool) -> dict[str, jax.Array]:
    """Path -> for each layer, whether any entry is not zero (`moving`), or all are."""
    out = {}
    for parts, x in roles.flat(tree):
        leaf = roles.locate(parts)
        some = jnp.any(x != 0, leaf.within(x.ndim))
        out[leaf.path] = some if moving else ~some
    return out


# --- laws --------------------------------------------------------------------------------------------------------


def branch_of(path: str) -> tuple[Role, ...]:
    """The matrices of the branch that a leaf belongs to; none for leaves that are not judged."""
    name = path.rpartition("/")[2]
    if name in (*ATTENTION, *MLP):
        return ATTENTION if name in ATTENTION else MLP
    if name in (Role.RESIDUAL_GATE, Role.BRANCH_SCALE):
        return ATTENTION if "attn_residual" in path else MLP if "mlp_residual" in path else (*ATTENTION, *MLP)
    return ()


def waits_for(path: str, zero: Mapping[str, bool]) -> list[str]:
    """The factors of a leaf's branch, other than itself, that are zero: while one is, the leaf has no gradient."""
    name, branch = path.rpartition("/")[2], branch_of(path)
    gates = {Role.RESIDUAL_GATE, Role.BRANCH_SCALE}
    if len(branch) > 4:  # a gate of the whole layer moves as soon as one of its branches does
        parts = [[str(r) for r in own if zero.get(r)] for own in ((Role.ATTN_V, Role.ATTN_OUT), MLP)]
        return parts[0] + parts[1] if all(parts) else []
    factors: set[str] = set(branch) - {Role.ATTN_Q, Role.ATTN_K} | gates
    if name in (Role.ATTN_Q, Role.ATTN_K):
        factors |= {Role.ATTN_K if name == Role.ATTN_Q else Role.ATTN_Q}
    return [f for f in sorted(factors - {name}) if zero.get(f)]


def zeros_at(seen: Pass, path: str, layer: int | None) -> dict[str, bool]:
    """Role -> whether it is all zero, of the branch and the layer of a leaf."""
    found: dict[str, bool] = {}
    for other, flags in seen.zero.items():
        name, same = other.rpartition("/")[2], branch_of(other)
        at = None if None in flags else layer
        if same and set(same) & set(branch_of(path)) and at in flags:
            found[name] = found.get(name, False) or flags[at]
    return found


def gradients(seen: Pass) -> Iterator[Row]:
    """Which matrices and gates move at step 0: all but those that wait for one zero factor; two wait for ever."""
    blocked = head_is_zero(seen)
    waiting = count = 0
    for path, flags in seen.moved.items():
        if not branch_of(path):
            continue
        for layer, moves in flags.items():
            count += 1
            zero = zeros_at(seen, path, layer)
            others, name = waits_for(path, zero), path.rpartition("/")[2]
            where: dict[str, Any] = {"path": path, "layer": layer}
            if zero.get(name) and others and seen.zero[path][layer]:
                said = f"{name} and {' and '.join(others)} are zero in one branch: neither will ever have a gradient"
                yield whole(name, "gradient", said, **where)
            elif moves == bool(others or blocked):
                why = f"although {' and '.join(others) or 'lm_head'} is zero" if moves else "at step 0"
                yield whole(name, "gradient", f"has {'a' if moves else 'no'} gradient {why}", **where)
            waiting += not moves
    yield holds("gradient", f"{count - waiting} of {count} matrices and gates have a gradient at step 0", n=count)


def head_is_zero(seen: Pass) -> bool:
    """Whether an untied head is all zero, so that nothing below it has a gradient."""
    return seen.zero.get("lm_head", {None: False})[None]


def starts_as_identity(recipe: Recipe) -> bool:
    """Whether every branch is zero at first, by the recipe alone."""
    rule = recipe.residual
    if rule.skip != 1.0 or rule.norm == "post" or rule.skip_gate or rule.sphere:
        return False
    if rule.gate and rule.gate.role is Role.RESIDUAL_GATE and not any(np.atleast_1d(rule.gate.value)):
        return True
    return bool(recipe.outputs) and all(recipe.weights[r] == Constant(0.0) for r in recipe.outputs)


def identity(seen: Pass) -> Iterator[Row]:
    """x_L = x_0, exactly: every addition is of zeros."""
    if not starts_as_identity(seen.recipe):
        return
    added = {k: v for k, v in seen.stats.items() if k.endswith("branch_ms")}
    for path, ms in added.items():
        for layer in np.flatnonzero(np.atleast_1d(ms)):
            size = float(np.atleast_1d(ms)[layer])
            said = f"the stack should start as the identity: this addition has mean square {size:.3g}"
            yield whole("", "identity", said, path=path, layer=int(layer))
            return
    yield holds("identity", f"the stack is the identity, exactly: {sum(v.size for v in added.values())} additions of 0")


def norms(seen: Pass) -> Iterator[Row]:
    """The output of every norm has the RMS of its gain: 1, whether the gain is w or 1 + w."""
    count = 0
    for path in [k.removesuffix("/out_ms") for k in seen.stats if k.endswith("/out_ms")]:
        out, into = (np.atleast_1d(seen.stats[f"{path}/{k}"]) for k in ("out_ms", "in_ms"))
        law = seen.recipe.law_at(f"{path}/norm_scale", Role.NORM_SCALE)
        for layer, (o, i) in enumerate(zip(out, into)):
            wanted = (
                (float(np.mean(law.at(layer).parameter)) + (1.0 if seen.model.norm_offset else 0.0))
                if seen.model.norm_gain
                else 1.0
            )
            if i < 10 * seen.model.norm_eps:
                continue  # so small a stream is not brought to 1
            count += 1
            wanted *= math.sqrt(i / (i + seen.model.norm_eps))
            size, room = abs(wanted), 0.02 + 3 * seen.model.norm_eps / i  # tokens of other sizes lose more to eps
            if not size * (1 - room) - 1e-4 <= math.sqrt(o) <= size * 1.02 + 1e-4:
                said = f"the norm's output has RMS {math.sqrt(o):.4g}, should be {abs(wanted):.4g}"
                yield whole("norm_scale", "norm", said, path=path, layer=layer if out.size > 1 else None)
    if count:
        yield holds("norm", f"the outputs of {count} norms have the RMS of their gain", n=count)


def embedding(seen: Pass) -> Iterator[Row]:
    """The stream begins with the size that the embedding's law and its multiplier give."""
    r, model = seen.recipe, seen.model
    if model.embed_norm or r.project:
        return
    table = r.weights[Role.TOKEN_EMBED]
    wanted = (float(np.mean(table.std)) * r.multipliers["embed"]) ** 2
    if model.positions == "learned":
        wanted += float(np.mean(r.weights[Role.POS_EMBED].std)) ** 2
    n, found = seen.tokens * r.geometry.d_model, float(seen.stats["embed_ms"])
    z = std_deviation(found / wanted, n, table.kurtosis) if wanted else math.inf
    said = f"the embedding's output has RMS {math.sqrt(found):.4g}, by its law {math.sqrt(wanted):.4g}"
    yield holds("embedding", said, z, n) if abs(z) <= LIMIT else whole("token_embed", "embedding", said, z=z, n=n)


def tables(seen: Pass) -> Iterator[Row]:
    """Padded rows are masked and still; a tied table is moved by both of its uses, an untied one by its own."""
    tied = seen.recipe.geometry.tied_embeddings
    blocked = head_is_zero(seen)
    wanted = {"pads are masked": True, "pads have no gradient": True}
    if not blocked:
        wanted["a token that is not there moves the head"] = True
    if not tied:
        wanted["a token that is not there moves the table"] = False
    for said, right in wanted.items():
        if seen.rows[said] != right:
            yield whole("token_embed", "tables", f"{said}: {seen.rows[said]}, should be {right}")


def first_loss(seen: Pass) -> Iterator[Row]:
    """The loss at step 0 is ln V + half the logits' variance, with a token's own logit where the head is tied."""
    from deepinit.audits import expected_loss

    r, g = seen.recipe, seen.recipe.geometry
    role = Role.TOKEN_EMBED if g.tied_embeddings else Role.LM_HEAD
    head = float(np.mean(r.weights[role].std))
    if r.project or r.gains or seen.model.logit_softcap:
        return
    normed = r.residual.final_norm(g.num_layers) or r.residual.norm == "post"
    stream = 1.0 if normed else float(np.atleast_2d(seen.stats["layers/stream_ms"])[-1, -1])
    wanted = stream * g.d_model * (head * r.multipliers["logits"]) ** 2
    own = seen.own_logit if g.tied_embeddings else 0.0
    log_v = math.log(g.vocab_size)
    expected = expected_loss(g.vocab_size, seen.logit_variance, own)
    facts = f"loss {seen.loss:.4g}; ln V {log_v:.4g}, logits of variance {seen.logit_variance:.3g}"
    if g.tied_embeddings:
        facts += f", a token's own logit {own:.3g}"
    if wanted:
        z = std_deviation(max(seen.logit_variance, 1e-30) / wanted, g.vocab_size - 1, 3.0)
        if abs(z) > LIMIT + 4 * seen.recipe.geometry.vocab_size**0.5 * 0.01:
            said = f"logits have variance {seen.logit_variance:.4g}; a head of std {head:.4g} gives {wanted:.4g}"
            yield whole("lm_head", "loss", said, z=z)
            return
    elif seen.logit_variance:
        yield whole("lm_head", "loss", f"a head of zeros gives logits of variance {seen.logit_variance:.3g}")
        return
    spread = 6 * math.sqrt(math.expm1(min(seen.logit_variance, 4.0)) / g.vocab_size) + 0.05
    if abs(seen.uniform - expected) > spread + 0.05 * abs(own):
        said = f"loss against uniform targets {seen.uniform:.4g}, expected {expected:.4g} ({facts})"
        yield whole("lm_head", "loss", said, z=(seen.uniform - expected) / spread)
        return
    above = expected - log_v
    if above > max(ALARM, log_v / 2):
        cause = (
            f"a tied head on a stack that starts near the identity gives each token's own logit {own:.3g}"
            if g.tied_embeddings and own > seen.logit_variance / 2
            else f"a head of std {head:.4g} on a stream of RMS {math.sqrt(stream):.3g}"
        )
        yield whole("lm_head", "loss", f"(unsafe: {cause}: expected loss {expected:.4g}, ln V {log_v:.4g})", ok=True,
                    z=0.0)  # fmt: skip
        return
    yield holds("loss", f"expected {expected:.4g}: {facts}")


def update_bound(seen: Pass) -> Iterator[Row]:
    """R (v^2 + w^2) / alpha^2 = 1, v and w gains on Xavier: 4 L beta^2 / alpha^2 in one stack (arXiv:2203.00555)."""
    r, g = seen.recipe, seen.recipe.geometry
    alpha = float(np.mean(np.atleast_1d(seen.model.residual.skip)))
    gains = []
    for role in (Role.ATTN_V, Role.ATTN_OUT, UPS[0], Role.MLP_DOWN):
        gains.append((float(np.mean(r.weights[role].std)) / math.sqrt(2 / sum(g.matrix(role)))) ** 2)
    for name, (v, w) in (("attention", gains[:2]), ("MLP", gains[2:])):
        bound = g.num_residuals * (v + w) / alpha**2
        if abs(bound - 1) > 1e-6:
            said = f"{name}: R (v^2 + w^2) / alpha^2 is {bound:.6g}, should be 1"
            changed = bool(r.changes)  # by the user, who may
            yield whole("", "update_bound", f"(unsafe: {said})" if changed else said, ok=changed, z=bound - 1)
            return
    yield holds("update_bound", f"R (v^2 + w^2) / alpha^2 = 1 with alpha {alpha:.6g} on the skip")


def bounded_growth(seen: Pass) -> Iterator[Row]:
    """Var(x_R) <= Var(x_0) + s^2, s^2 from the laws alone and the same at every depth."""
    r, g, model = seen.recipe, seen.recipe.geometry, seen.model
    if r.residual.norm != "pre" or g.num_experts or model.value_embed or model.bias:
        return
    d = g.d_model
    std = {role: float(np.mean(r.weights[role].std)) for role in (*ATTENTION, *MLP)}
    attention = d * std[Role.ATTN_V] ** 2 * g.fan_in(Role.ATTN_OUT) * std[Role.ATTN_OUT] ** 2
    up = d * std[Role.MLP_UP] ** 2
    hidden = up * activated(g.mlp, d * std[Role.MLP_GATE] ** 2) if g.gated else activated(g.mlp, up)
    bound = g.num_layers * (attention + g.d_ff * std[Role.MLP_DOWN] ** 2 * hidden)
    start = float(seen.stats["embed_ms"])
    grown = float(np.atleast_2d(seen.stats["layers/stream_ms"])[-1, -1]) - start
    room = LIMIT * (bound * math.sqrt(2 / d) + 2 * math.sqrt(start * bound / d))
    said = f"the stream's variance grows by {grown:.4g}, the bound is {bound:.4g} at any depth"
    yield holds("growth", said) if grown <= bound + room else whole("", "growth", said)


def activated(kind: str, variance: float) -> float:
    """E act(x)^2 of x ~ N(0, variance), by quadrature."""
    z, weights = np.polynomial.hermite_e.hermegauss(96)
    x = z * math.sqrt(variance)
    gelu = x * np.vectorize(lambda v: 0.5 * (1 + math.erf(v / math.sqrt(2))))(x)
    act = {"swiglu": x / (1 + np.exp(-x)), "geglu": gelu, "gelu": gelu, "relu": np.maximum(x, 0)}[kind]
    return float(weights @ act**2 / weights.sum())


DECLARED = {"update_bound": update_bound, "bounded_growth": bounded_growth, "identity": identity}
"""The laws that a recipe names; `identity` is derived anyway, and declaring it says that it is meant."""
