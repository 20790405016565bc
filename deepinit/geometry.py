"""Sizes of a model, and what they answer: the fans of every role, counts of residuals, parameters and FLOPs.

Fans come from the role, never from an array's shape: a (d, H, h) kernel, an (E, d, f) expert kernel and a stacked
(L, d, f) leaf all hold matrices of the fans given here.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum

from deepinit.errors import ConfigError, unknown


class Role(StrEnum):
    """What a parameter is for. Declared once, by the module that owns the parameter."""

    TOKEN_EMBED = "token_embed"
    POS_EMBED = "pos_embed"
    ATTN_Q = "attn_q"
    ATTN_K = "attn_k"
    ATTN_V = "attn_v"
    ATTN_OUT = "attn_out"
    CROSS_Q = "cross_q"
    CROSS_K = "cross_k"
    CROSS_V = "cross_v"
    CROSS_OUT = "cross_out"
    MLP_GATE = "mlp_gate"
    MLP_UP = "mlp_up"
    MLP_DOWN = "mlp_down"
    ROUTER = "router"
    EXPERT_GATE = "expert_gate"
    EXPERT_UP = "expert_up"
    EXPERT_DOWN = "expert_down"
    LM_HEAD = "lm_head"
    NORM_SCALE = "norm_scale"
    BIAS = "bias"
    RESIDUAL_GATE = "residual_gate"
    BRANCH_SCALE = "branch_scale"
    BRANCH_SHIFT = "branch_shift"

    @classmethod
    def of(cls, name: str) -> Role:
        """The role of this name, or an error naming the nearest one."""
        try:
            return cls(name)
        except ValueError:
            raise unknown("role", name, cls) from None


EMBEDDINGS = (Role.TOKEN_EMBED, Role.POS_EMBED)
QUERIES_KEYS = (Role.ATTN_Q, Role.ATTN_K, Role.CROSS_Q, Role.CROSS_K)
VALUES = (Role.ATTN_V, Role.CROSS_V)
# The matrices that write into the residual stream.
OUTPUTS = (Role.ATTN_OUT, Role.CROSS_OUT, Role.MLP_DOWN, Role.EXPERT_DOWN)
GATES = (Role.MLP_GATE, Role.EXPERT_GATE)
UPS = (Role.MLP_UP, Role.EXPERT_UP)
CROSS = (Role.CROSS_Q, Role.CROSS_K, Role.CROSS_V, Role.CROSS_OUT)
EXPERTS = (Role.ROUTER, Role.EXPERT_GATE, Role.EXPERT_UP, Role.EXPERT_DOWN)
VECTORS = (Role.NORM_SCALE, Role.BIAS, Role.RESIDUAL_GATE, Role.BRANCH_SCALE, Role.BRANCH_SHIFT)
# The matrices inside a layer, in the order in which a token meets them.
LAYER_MATRICES = (
    Role.ATTN_Q, Role.ATTN_K, Role.ATTN_V, Role.ATTN_OUT, *CROSS,
    Role.MLP_GATE, Role.MLP_UP, Role.MLP_DOWN, *EXPERTS,
)  # fmt: skip
MLP_KINDS = ("swiglu", "geglu", "gelu", "relu")
STACKS = ("single", "encoder", "decoder")


@dataclass(frozen=True)
class Geometry:
    """The sizes of a transformer stack.

    `stack` says which stack of an encoder-decoder this is; then `encoder_layers` and `decoder_layers` give both depths.
    A `parallel` block adds attention and MLP in one residual addition. With `num_experts`, `routed` says which layers
    have a mixture of experts in the place of their MLP: all of them, unless `moe_every` or `first_dense` say otherwise.
    """

    num_layers: int
    d_model: int
    num_heads: int
    d_ff: int
    vocab_size: int
    num_kv_heads: int = 0
    """Key and value heads; 0 means as many as there are heads."""
    head_dim: int = 0
    """Width of a head; 0 means d_model / num_heads."""
    max_seq_len: int = 1024
    num_experts: int = 0
    moe_every: int = 1
    """With n, layer i (0-based) is routed where (i + 1) % n == 0: Qwen's decoder_sparse_step."""
    first_dense: int = 0
    """The first layers that are dense whatever `moe_every` says: DeepSeek's first_k_dense_replace."""
    mlp: str = "swiglu"
    tied_embeddings: bool = False
    parallel: bool = False
    stack: str = "single"
    encoder_layers: int = 0
    decoder_layers: int = 0

    def __post_init__(self) -> None:
        for name in ("num_layers", "d_model", "num_heads", "d_ff", "vocab_size", "max_seq_len"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"model.{name}: {value} is not a positive number")
        for name in ("num_kv_heads", "head_dim", "num_experts", "encoder_layers", "decoder_layers"):
            if (value := getattr(self, name)) < 0:
                raise ConfigError(f"model.{name}: {value} is negative")
        if self.mlp not in MLP_KINDS:
            raise unknown("model.mlp", self.mlp, MLP_KINDS)
        if self.stack not in STACKS:
            raise unknown("model.stack", self.stack, STACKS)
        if not self.head_dim:
            if self.d_model % self.num_heads:
                raise ConfigError(
                    f"model.num_heads: {self.num_heads} does not divide d_model {self.d_model}; "
                    f"nearest that does: {nearest_divisor(self.num_heads, self.d_model)} (or give head_dim)"
                )
            object.__setattr__(self, "head_dim", self.d_model // self.num_heads)
        if not self.num_kv_heads:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model.num_kv_heads: {self.num_kv_heads} does not divide num_heads {self.num_heads}; "
                f"nearest that does: {nearest_divisor(self.num_kv_heads, self.num_heads)}"
            )
        if self.stack != "single" and not (self.encoder_layers and self.decoder_layers):
            raise ConfigError(f"model.stack: {self.stack!r} needs encoder_layers and decoder_layers")
        self.check_routed()

    def check_routed(self) -> None:
        """Refuse a choice of routed layers that leaves none, or that chooses where there are no experts."""
        n, first, depth = self.moe_every, self.first_dense, self.num_layers
        for name, value, none in (("moe_every", n, 1), ("first_dense", first, 0)):
            if value < none:
                raise ConfigError(f"model.{name}: {value} is too small; nearest: {none}")
            if value != none and not self.num_experts:
                raise ConfigError(f"model.{name}: {value} needs model.num_experts; nearest: {none}")
        if n > depth:
            raise ConfigError(f"model.moe_every: {n} leaves no routed layer of num_layers {depth}; nearest: {depth}")
        if first > (last := depth // n * n - 1):
            beside = f" with moe_every {n}" if n > 1 else ""
            raise ConfigError(
                f"model.first_dense: {first} leaves no routed layer of num_layers {depth}{beside}; nearest: {last}"
            )

    def replace(self, **changes: object) -> Geometry:
        """The same geometry with other sizes."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate matrix."""
        return self.mlp in ("swiglu", "geglu")

    def routed(self, layer: int) -> bool:
        """Whether this layer (0-based) has a mixture of experts in the place of its MLP."""
        return self.num_experts > 0 and layer >= self.first_dense and (layer + 1) % self.moe_every == 0

    @property
    def routed_layers(self) -> tuple[int, ...]:
        """The layers that have a mixture of experts."""
        return tuple(layer for layer in range(self.num_layers) if self.routed(layer))

    @property
    def mixed(self) -> bool:
        """Whether some layers are routed and some are dense."""
        return 0 < len(self.routed_layers) < self.num_layers

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles that a model of these sizes may hold. A law is given for each of them."""
        return tuple(
            r for r in Role if (r not in EXPERTS or self.num_experts) and (r not in CROSS or self.stack == "decoder")
        )

    def matrix(self, role: str) -> tuple[int, int]:
        """(fan_in, fan_out) of the one matrix that this role holds; of an embedding, (rows, d_model)."""
        d, f = self.d_model, self.d_ff
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        match Role.of(role):
            case Role.TOKEN_EMBED:
                return self.vocab_size, d
            case Role.POS_EMBED:
                return self.max_seq_len, d
            case Role.ATTN_Q | Role.CROSS_Q:
                return d, q
            case Role.ATTN_K | Role.ATTN_V | Role.CROSS_K | Role.CROSS_V:
                return d, kv
            case Role.ATTN_OUT | Role.CROSS_OUT:
                return q, d
            case Role.MLP_GATE | Role.MLP_UP | Role.EXPERT_GATE | Role.EXPERT_UP:
                return d, f
            case Role.MLP_DOWN | Role.EXPERT_DOWN:
                return f, d
            case Role.ROUTER:
                return d, self.num_experts
            case Role.LM_HEAD:
                return d, self.vocab_size
        raise ConfigError(f"role {role!r} is a vector, not a matrix: it has no fan; give it a constant")

    def fan_in(self, role: str) -> int:
        """Inputs that one output of this role's matrix sums over."""
        return self.matrix(role)[0]

    def fan_out(self, role: str) -> int:
        """Outputs of this role's matrix."""
        return self.matrix(role)[1]

    @property
    def additions(self) -> tuple[str, ...]:
        """The residual additions of one layer, in order."""
        return ("block",) if self.parallel else ("attn", "cross", "mlp") if self.stack == "decoder" else ("attn", "mlp")

    @property
    def sublayers(self) -> int:
        """Residual additions in one layer."""
        return len(self.additions)

    @property
    def num_residuals(self) -> int:
        """Residual additions in this stack: 2L, L for a parallel block, 3L for a decoder with cross-attention."""
        return self.num_layers * self.sublayers

    @property
    def num_branches(self) -> int:
        """Matrices that write into the stream, counted with depth: a parallel block still has two a layer."""
        return self.num_layers * (3 if self.stack == "decoder" else 2)

    def count(self, role: str) -> int:
        """How many matrices of this role the model of these sizes holds, experts and depth included."""
        role = Role.of(role)
        if role in VECTORS or role is Role.POS_EMBED:
            return 0  # whether there are any is the module's choice
        if role is Role.LM_HEAD:
            return int(not self.tied_embeddings)
        if role is Role.TOKEN_EMBED:
            return 1
        if role not in self.roles or (role in GATES and not self.gated):
            return 0
        routed = len(self.routed_layers)
        if role in (Role.MLP_GATE, Role.MLP_UP, Role.MLP_DOWN):
            return self.num_layers - routed
        if role in EXPERTS:
            return routed if role is Role.ROUTER else routed * self.num_experts
        return self.num_layers

    @property
    def num_parameters(self) -> int:
        """Entries of all matrices and of the token embedding (vectors and learned positions not counted)."""
        return sum(self.count(r) * self.fan_in(r) * self.fan_out(r) for r in self.roles if r not in VECTORS)

    def flops_per_token(self, seq_len: int) -> int:
        """Training FLOPs a token: 6 per matmul parameter + 12 L H h T for attention (Chowdhery et al. 2022, app. B).

        The embedding look-up costs nothing, a tied head costs its matmul, and every expert is counted as used.
        """
        embed = self.vocab_size * self.d_model
        matmul = self.num_parameters - (0 if self.tied_embeddings else embed)
        return 6 * matmul + 12 * self.num_layers * self.num_heads * self.head_dim * seq_len


def nearest_divisor(value: int, whole: int) -> int:
    """The divisor of `whole` that is nearest to `value`, the smaller of two equally near."""
    return min((k for k in range(1, whole + 1) if whole % k == 0), key=lambda k: (abs(k - value), k))
