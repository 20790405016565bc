"""Everything a run is made of, in six frozen sections, and every refusal that needs no jax.

`load` merges files and flags; `Config.check` says what cannot work. A name keeps its meaning: `std` is a std, `steps`
are optimizer steps, `batch_size` is sequences in one of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from deepinit import calibration, layout
from deepinit.errors import ConfigError, unknown
from deepinit.geometry import Geometry
from deepinit.recipe import FrozenMap, Recipe
from deepinit.train import loader, metrics, sources, tokenizers

Dtype = Literal["float32", "bfloat16"]
BITS = {"float32": 32, "bfloat16": 16}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes (`deepinit.Geometry`) and the options of `deepinit.nn.Decoder`."""

    num_layers: int = 4
    """Transformer layers."""
    d_model: int = 128
    """Width of the residual stream."""
    num_heads: int = 4
    """Query heads."""
    d_ff: int = 512
    """Width inside the MLP."""
    vocab_size: int = 256
    """Tokens; bytes need 256."""
    num_kv_heads: int = 0
    """Key and value heads; 0: as many as num_heads."""
    head_dim: int = 0
    """Width of a head; 0: d_model / num_heads."""
    max_seq_len: int = 1024
    """Longest sequence; rows of learned positions."""
    num_experts: int = 0
    """Experts of a mixture; 0: a dense MLP."""
    moe_every: int = 1
    """Of every so many layers the last is routed to experts, the others are dense; 1: all are routed."""
    first_dense: int = 0
    """So many layers at the beginning are dense in any case."""
    mlp: Literal["swiglu", "geglu", "gelu", "relu"] = "swiglu"
    """Gated (swiglu, geglu) or plain MLP."""
    tied_embeddings: bool = False
    """Whether the head is the token embedding."""
    parallel: bool = False
    """Attention and MLP in one residual addition."""
    stack: Literal["single", "encoder", "decoder"] = "single"
    """Which stack of an encoder-decoder the sizes are of."""
    encoder_layers: int = 0
    """Depth of the encoder, where stack is not single."""
    decoder_layers: int = 0
    """Depth of the decoder, where stack is not single."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Kind of norm."""
    norm_offset: bool = False
    """Norms scale by 1 + w, w starting at 0."""
    norm_placement: Literal["auto", "pre", "post", "none", "sandwich", "sub", "reordered"] = "auto"
    """Where norms stand in a block; auto: where the scheme wants them."""
    positions: Literal["rope", "learned", "none"] = "rope"
    """How a token knows its place."""
    bias: bool = False
    """Biases on matrices and layer norms."""
    norm_eps: float = 1e-6
    """Added to the mean square (or variance) under a norm's root."""
    norm_gain: bool = True
    """Whether norms have a learnable gain."""
    embed_norm: bool = False
    """A norm on the embedding."""
    rope_theta: float = 10_000.0
    """Base of the rotary wavelengths."""
    qk_norm: bool = False
    """Norms on queries and keys."""
    v_norm: bool = False
    """Norms on values."""
    value_embed: bool = False
    """Every other layer adds a row of a table of its own, by token, to its values."""
    logit_softcap: float = 0.0
    """Logits become cap tanh(logits / cap); 0: as they are."""
    experts_per_token: int = 2
    """Experts that a token goes to."""
    balance_loss: float = 0.0
    """Weight of the loss that evens out the load of the experts."""
    dispatch: Literal["sorted", "dense"] = "sorted"
    """Tokens sorted by expert into ragged products, or every token to every expert, unused results forgotten."""
    dropout: float = 0.0
    """Share of branch outputs dropped in training."""
    scan: bool = True
    """Layers in one scan (fast to compile), or unrolled."""
    remat: Literal["none", "full", "dots"] = "none"
    """What the backward pass computes again instead of keeping it."""
    attention: Literal["auto", "plain", "blocks", "cudnn", "splash"] = "auto"
    """How attention is computed; auto: in blocks on CPUs, by cuDNN on GPUs, by splash on TPUs, where they apply."""
    fused_qkv: bool = False
    """One matmul for q, k and v."""
    fused_gate_up: bool = False
    """One matmul for the MLP's gate and up."""
    vocab_multiple: int = 1
    """The embedding's rows are padded to a multiple of this."""
    loss_chunks: int = 1
    """Parts of a sequence whose logits the loss holds in turn; 1: all at once."""
    dtype: Dtype = "float32"
    """Type of activations and matmuls."""
    param_dtype: Dtype = "float32"
    """Type in which parameters are kept; 16 bits lose small updates."""


@dataclass(frozen=True)
class SchemeConfig:
    """The initialization."""

    name: str = "small_init_scaled"
    """A name of `deepinit schemes`."""
    args: FrozenMap[Any] = field(default_factory=FrozenMap)
    """The scheme's hyperparameters. Naming another scheme drops these, and all below but base and sampler."""
    base: FrozenMap[int] = field(default_factory=FrozenMap)
    """Width and depth of the model whose learning rates were tuned, for every scheme that asks for them."""
    residual: str = ""
    """A scheme whose residual rule takes the place of the scheme's own; empty: none."""
    residual_args: FrozenMap[Any] = field(default_factory=FrozenMap)
    """The hyperparameters of that one."""
    overrides: FrozenMap[FrozenMap[Any]] = field(default_factory=FrozenMap)
    """Other numbers by role: std, law, cut, value, lr, weight_decay, eps."""
    calibration: str = ""
    """A calibration.json of another run of this very model, for schemes that measure; empty: measure."""
    sampler: Literal["portable", "jax"] = "portable"
    """Draws that are the same bits everywhere, or the stock draws of jax.random."""


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis; the product is the number of devices used, -1 once means the rest."""

    data: int = 1
    """Splits the batch, repeats the parameters."""
    fsdp: int = 1
    """Splits the batch and d_model of every matrix."""
    expert: int = 1
    """Splits the batch and the experts of a mixture."""
    sequence: int = 1
    """Splits the tokens of each sequence; attention gathers keys and values."""
    tensor: int = 1
    """Splits heads, d_ff and vocabulary."""


@dataclass(frozen=True)
class DataConfig:
    """The text."""

    files: tuple[str, ...] = ()
    """Files, folders or globs of text, .jsonl, .arrayrecord or tokens (.bin); empty: Python's own documentation."""
    seq_len: int = 128
    """Tokens that the model sees at once."""
    seed: int = 0
    """Order of the samples."""
    eval_fraction: float = 0.05
    """Share of the text held out, in pieces from all over it."""
    mixture: FrozenMap[float] = field(default_factory=FrozenMap)
    """Instead of files: paths, folders or globs and their weights, the share of samples from each."""
    tokenizer: str = "bytes"
    """bytes, a tokenizer.json or a SentencePiece .model; for text, .bin files hold tokens already."""
    text_field: str = "text"
    """Field of a JSON line that is its text."""
    eos: int = -1
    """Token that ends a document of a .bin file that does not say so itself; -1: none."""
    document_mask: bool = False
    """Whether attention and loss stop at the ends of documents inside a window."""
    on_corrupt: Literal["error", "skip"] = "error"
    """What a damaged document is: an error with file and place, or skipped and counted."""
    log_samples: bool = False
    """Keep the ids of every step's samples in RUN/samples, a file for each process."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with a schedule; the scheme's factors by role multiply lr, weight_decay and eps."""

    lr: float = 1e-3
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decay of matrices; norms, biases, gates, branch scales and shifts never decay."""
    decay: Literal["decoupled", "independent", "coupled"] = "decoupled"
    """Times lr; times the schedule alone, not its peak; or added to the gradient, as L2 loss."""
    decay_embeddings: bool = True
    """Whether token and position embeddings decay, as in GPT-2's recipes."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After the warm-up: cosine to the end; warm-up, stable, linear decay; or constant."""
    warmup_steps: int = 20
    """Steps of linear warm-up: the first step has lr / warmup_steps, the last lr."""
    decay_steps: int = 0
    """Last steps of wsd, in which lr falls; 0: a tenth of train.steps."""
    min_lr_ratio: float = 0.1
    """Where the schedule ends, as a share of lr."""
    clip_norm: float = 1.0
    """Largest global norm of the gradient; 0: no clipping."""


@dataclass(frozen=True)
class TrainConfig:
    """The run."""

    steps: int = 1000
    """Optimizer steps: the horizon of the schedule."""
    stop_at: int = 0
    """End after this step with a checkpoint; 0: at steps."""
    batch_size: int = 16
    """Sequences in an optimizer step, over all devices."""
    accumulate: int = 1
    """Equal parts in which a batch is taken, to save memory."""
    seed: int = 0
    """Of initialization and dropout."""
    run_dir: str = ""
    """Folder of the run, from which it also resumes; empty: a new runs/SCHEME-TIME."""
    eval_every: int = 100
    """Steps between evaluations on held-out text; 0: only at the end."""
    eval_batches: int = 16
    """Batches of an evaluation."""
    checkpoint_every: int = 500
    """Steps between checkpoints; 0: only at the end."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept."""
    checkpoint_dir: str = ""
    """Where checkpoints go, gs:// too; empty: RUN/checkpoints."""
    load_from: str = ""
    """A run or a checkpoint from which a new run takes its first state; empty: none."""
    load: Literal["exact", "params", "list"] = "exact"
    """What it takes: all and the step; the parameters alone; or the leaves that load_paths names."""
    load_paths: tuple[str, ...] = ()
    """For load: list, globs over the leaves of a state, such as params/layers/*; the others stay initial."""
    log_every: int = 1
    """Steps between rows of metrics.jsonl."""
    probe_every: int = 0
    """Steps between probes of the signal (RUN/probe.jsonl, and warnings); 0: none. A probe costs about a step."""
    max_bad_steps: int = 5
    """Non-finite steps in a row after which the run stops."""
    profile: tuple[int, ...] = ()
    """First and last step of a profiler trace, in RUN/profile; empty: none."""
    compilation_cache: str = "user"
    """Folder in which compiled programs are kept for the next start; user: in the user's cache folder; empty: none."""
    tensorboard: bool = False
    """Also write the metrics for TensorBoard, in RUN/tensorboard."""


@dataclass(frozen=True)
class Config:
    """Sections of a config file."""

    model: ModelConfig = ModelConfig()
    scheme: SchemeConfig = SchemeConfig()
    mesh: MeshConfig = MeshConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()

    def geometry(self) -> Geometry:
        """The sizes."""
        return Geometry(**{f.name: getattr(self.model, f.name) for f in dataclasses.fields(Geometry)})

    def recipe(self) -> Recipe:
        """What the scheme says at these sizes, changed as `scheme` says."""
        from deepinit.schemes import mixing, registry

        placement = None if self.model.norm_placement == "auto" else self.model.norm_placement
        s = self.scheme
        if s.residual:
            recipe = mixing.mixed(
                s.name, s.residual, self.geometry(), norm=placement, weights_args=self.scheme_args,
                residual_args=s.residual_args,
            )  # fmt: skip
        elif s.residual_args:
            given = dict(s.residual_args)
            raise ConfigError(f"scheme.residual_args: {given} without a scheme.residual that takes them")
        else:
            recipe = registry.recipe(s.name, self.geometry(), norm=placement, **self.scheme_args)
        recipe = mixing.overridden(recipe, s.overrides) if s.overrides else recipe
        return recipe.with_norm_offset() if self.model.norm_offset else recipe

    @property
    def scheme_args(self) -> dict[str, Any]:
        """The scheme's hyperparameters: those given, and the base sizes that it asks for."""
        from deepinit.schemes import registry

        s = self.scheme
        if wrong := [k for k in s.base if f"base_{k}" not in MODEL_SIZE]:
            raise unknown("scheme.base", wrong[0], [k.removeprefix("base_") for k in MODEL_SIZE])
        base = {f"base_{k}": v for k, v in s.base.items()}
        return {k: base[k] for k in registry.undecided(s.name, s.args) if k in base} | dict(s.args)

    def model_options(self) -> dict[str, Any]:
        """Keyword arguments of `deepinit.nn.Decoder.from_recipe`."""
        sizes = {f.name for f in dataclasses.fields(Geometry)}
        options = {k: v for k, v in loader.plain(self.model).items() if k not in sizes and k != "norm_placement"}
        return {"sampler": self.scheme.sampler, **options}

    @property
    def vocab_padded(self) -> int:
        """Rows of the embedding."""
        return layout.padded(self.model.vocab_size, self.model.vocab_multiple)

    @property
    def last_step(self) -> int:
        """The step after which the run ends."""
        return self.train.stop_at or self.train.steps

    @property
    def decay_steps(self) -> int:
        """Steps in which the wsd schedule falls."""
        return self.optimizer.decay_steps or max(1, self.train.steps // 10)

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts and lists."""
        return loader.plain(self)

    @classmethod
    def from_dict(cls, data: Any) -> Config:
        """The config that `to_dict` wrote; whatever is left out has its default."""
        return loader.build(cls, data)

    def to_yaml(self) -> str:
        """The text of a config file that loads to an equal config."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True, width=120)

    def replace(self, **values: Any) -> Config:
        """The config with other values, given as `section__field=value`."""
        data = self.to_dict()
        for name, value in values.items():
            section, key = name.split("__")
            data = overlaid(data, {section: {key: value}})
        return Config.from_dict(data)

    def check(self) -> Recipe:
        """Refuse everything that can be refused before jax is imported; the recipe, since it is made on the way."""
        self.check_ranges()
        self.check_model()
        self.check_run()
        from deepinit.schemes import registry

        recipe = self.recipe()
        if recipe.name == "external":
            raise ConfigError("scheme.name: 'external' leaves the weights to a Python caller; a run needs a scheme")
        if missing := registry.undecided(self.scheme.name, self.scheme_args):
            own = getattr(self.model, MODEL_SIZE[missing[0]])
            raise ConfigError(
                f"scheme.args.{missing[0]}: scheme {recipe.name} needs that of the model whose rates were tuned; "
                f"nearest: {own}, this model's own, which makes it the standard scheme"
            )
        if self.scheme.calibration:
            calibration.read(self.scheme.calibration).check(recipe, self.scheme.calibration)
        for option, wanted in recipe.requires.items():
            values = accepted(wanted)
            needs = f"scheme {recipe.name} needs model.{option} {' or '.join(_yaml(v) for v in values)}"
            if not hasattr(self.model, option):
                raise ConfigError(f"{needs}, which the decoder does not offer")
            if (given := getattr(self.model, option)) not in values:
                raise ConfigError(f"model.{option}: {_yaml(given)}, but {needs}")
        t, mesh = self.train, dataclasses.asdict(self.mesh)
        layout.check_divisible(recipe.geometry, mesh, t.batch_size, self.vocab_padded, t.accumulate, self.data.seq_len)
        return recipe

    def check_ranges(self) -> None:
        """Refuse numbers outside RANGES."""
        for section, key, low, high in RANGES:
            value = getattr(getattr(self, section), key)
            for v in value if isinstance(value, tuple) else (value,):
                if not low <= v <= high:
                    bounds = f"at least {low}" if high == INF else f"between {low} and {high}"
                    raise ConfigError(f"{section}.{key}: {v} is out of range; {bounds}")

    def check_model(self) -> None:
        """Refuse sizes and options that the decoder cannot have."""
        m, g = self.model, self.geometry()
        if m.stack != "single":
            raise ConfigError(f"model.stack: {m.stack!r} can be explained, not trained; to train, 'single'")
        if m.positions == "rope" and g.head_dim % 2:
            raise ConfigError(f"model.head_dim: {g.head_dim} is odd and rope turns pairs; nearest: {g.head_dim + 1}")
        if 0 < m.num_experts < m.experts_per_token:
            raise ConfigError(
                f"model.experts_per_token: {m.experts_per_token} is over model.num_experts {m.num_experts}; "
                f"nearest: {m.num_experts}"
            )
        if m.num_experts and m.fused_gate_up:
            raise ConfigError("model.fused_gate_up: true, but experts have no fused product; false, or num_experts 0")
        if self.data.seq_len > m.max_seq_len:
            raise ConfigError(f"data.seq_len: {self.data.seq_len} is over model.max_seq_len {m.max_seq_len}")
        if self.data.seq_len % m.loss_chunks:
            best = min(
                (n for n in range(1, self.data.seq_len + 1) if self.data.seq_len % n == 0),
                key=lambda n: abs(n - m.loss_chunks),
            )
            raise ConfigError(
                f"model.loss_chunks: {m.loss_chunks} does not divide data.seq_len {self.data.seq_len}; nearest: {best}"
            )
        self.check_tokens()
        if BITS[m.dtype] > BITS[m.param_dtype]:
            raise ConfigError(
                f"model.param_dtype: {m.param_dtype} is narrower than model.dtype {m.dtype}; "
                f"param_dtype {m.dtype}, or dtype {m.param_dtype} too"
            )

    def check_tokens(self) -> None:
        """Refuse a vocabulary too small for the tokens, and files that are not there."""
        d = self.data
        if d.mixture and d.files:
            raise ConfigError("data.mixture: names its own files; leave data.files empty")
        for name, weight in d.mixture.items():
            if not isinstance(weight, int | float) or not 0 < weight < INF:
                raise ConfigError(f"data.mixture.{name}: {weight!r} is not a weight above 0")
        paths = sources.find(tuple(d.mixture), "data.mixture") if d.mixture else sources.find(d.files)
        if paths and all(sources.holds_tokens(path) for path in paths):
            return  # every window is looked at when it is read
        need = tokenizers.load(d.tokenizer).vocab_size
        if self.model.vocab_size < need:
            what = "bytes" if d.tokenizer == "bytes" else f"data.tokenizer {d.tokenizer}"
            raise ConfigError(f"model.vocab_size: {self.model.vocab_size} is too small for {what}; at least {need}")

    def check_run(self) -> None:
        """Refuse steps, batches and places that do not fit together."""
        o, t = self.optimizer, self.train
        if t.stop_at > t.steps:
            raise ConfigError(f"train.stop_at: {t.stop_at} is after the last of train.steps {t.steps}")
        if o.warmup_steps > t.steps:
            raise ConfigError(f"optimizer.warmup_steps: {o.warmup_steps} is over train.steps {t.steps}")
        if o.schedule == "wsd" and o.warmup_steps + self.decay_steps > t.steps:
            raise ConfigError(
                f"optimizer.decay_steps: {self.decay_steps} and warmup_steps {o.warmup_steps} "
                f"are over train.steps {t.steps}; nearest: {t.steps - o.warmup_steps}"
            )
        if t.batch_size % t.accumulate:
            raise ConfigError(
                f"train.batch_size: {t.batch_size} is not a multiple of train.accumulate {t.accumulate}; "
                f"nearest: {layout.multiples(t.batch_size, t.accumulate)}"
            )
        if bool(t.load_paths) != (t.load == "list"):
            raise ConfigError(f"train.load_paths: {list(t.load_paths)} with train.load {t.load}; list needs paths")
        if t.load != "exact" and not t.load_from:
            raise ConfigError(f"train.load: {t.load} needs train.load_from, a run or a checkpoint")
        if len(t.profile) not in (0, 2) or tuple(sorted(t.profile)) != t.profile:
            raise ConfigError(f"train.profile: {list(t.profile)} is not a first and a last step")
        if t.run_dir and Path(t.run_dir).exists() and not Path(t.run_dir).is_dir():
            raise ConfigError(f"train.run_dir: {t.run_dir!r} is a file, not a folder")
        if t.tensorboard:
            metrics.require_tensorboard()


INF = float("inf")
# Which of a model's sizes a base is a base of.
MODEL_SIZE = {"base_width": "d_model", "base_depth": "num_layers"}
RANGES: tuple[tuple[str, str, float, float], ...] = (
    ("model", "dropout", 0, 0.99),
    ("model", "norm_eps", 0, INF),
    ("model", "rope_theta", 1, INF),
    ("model", "logit_softcap", 0, INF),
    ("model", "experts_per_token", 1, INF),
    ("model", "balance_loss", 0, INF),
    ("model", "vocab_multiple", 1, INF),
    ("model", "loss_chunks", 1, INF),
    ("data", "seq_len", 1, INF),
    ("data", "seed", 0, 2**31 - 1),
    ("data", "eval_fraction", 0.001, 0.5),
    ("data", "eos", -1, INF),
    ("optimizer", "lr", 0, INF),
    ("optimizer", "betas", 0, 0.999999),
    ("optimizer", "eps", 0, INF),
    ("optimizer", "weight_decay", 0, INF),
    ("optimizer", "warmup_steps", 0, INF),
    ("optimizer", "decay_steps", 0, INF),
    ("optimizer", "min_lr_ratio", 0, 1),
    ("optimizer", "clip_norm", 0, INF),
    ("train", "steps", 1, INF),
    ("train", "stop_at", 0, INF),
    ("train", "batch_size", 1, INF),
    ("train", "accumulate", 1, INF),
    ("train", "seed", 0, 2**63 - 1),
    ("train", "eval_every", 0, INF),
    ("train", "eval_batches", 1, INF),
    ("train", "checkpoint_every", 0, INF),
    ("train", "keep_checkpoints", 1, INF),
    ("train", "log_every", 1, INF),
    ("train", "probe_every", 0, INF),
    ("train", "max_bad_steps", 1, INF),
    ("train", "profile", 1, INF),
)


def load(files: Iterable[str] = (), overrides: Iterable[str] = ()) -> Config:
    """The config of some files, later ones over earlier ones, and of flags (`--section.field value`) over them all.

    A model option that nobody set and that the scheme presupposes is as the scheme wants it.
    """
    data: dict[str, Any] = {}
    for path in files:
        try:
            layer = loader.read(path)
            loader.build(Config, layer)
        except ConfigError as e:
            raise ConfigError(f"{path}: {e}") from None
        data = overlaid(data, layer)
    for layer in loader.flags(Config, overrides):
        loader.build(Config, layer)
        data = overlaid(data, layer)
    config = loader.build(Config, data)
    for option, wanted in config.recipe().requires.items():
        free = option in loader.types_of(ModelConfig) and option not in data.get("model", {})
        if free and getattr(config.model, option) not in accepted(wanted):
            config = config.replace(**{f"model__{option}": accepted(wanted)[0]})
    return config


def accepted(wanted: Any) -> tuple[Any, ...]:
    """The values of a model option that a scheme's `requires` names: one, or any of several."""
    return tuple(wanted) if isinstance(wanted, tuple | list) else (wanted,)


def overlaid(low: dict[str, Any], high: dict[str, Any]) -> dict[str, Any]:
    """`high` over `low`, field by field. A scheme's hyperparameters are its own: they fall with its name."""
    out = {section: dict(fields) for section, fields in low.items()}
    for section, fields in high.items():
        old, new = out.setdefault(section, {}), dict(fields)
        if section == "scheme":
            if new.get("name", old.get("name")) != old.get("name"):
                old = out[section] = {k: v for k, v in old.items() if k in ("sampler", "base")}
            new |= {k: {**old.get(k, {}), **new.get(k, {})} for k in ("args", "residual_args") if k in (*old, *new)}
            roles = {**old.get("overrides", {}), **new.get("overrides", {})}
            new["overrides"] = {r: {**old.get("overrides", {}).get(r, {}), **of} for r, of in roles.items()}
        old.update(new)
    return out


def describe() -> list[tuple[str, str, str, str]]:
    """(flag, type, default, meaning) of every field, in the order of the sections."""
    rows = []
    for section, kind in loader.types_of(Config).items():
        meanings = loader.docs(kind)
        for key, value in loader.plain(kind()).items():
            shown = loader.show_type(loader.types_of(kind)[key])
            rows.append((f"--{section}.{key.replace('_', '-')}", shown, _yaml(value), meanings[key]))
    return rows


def _yaml(value: Any) -> str:
    """A value as one would write it in a file."""
    text = yaml.safe_dump(value, default_flow_style=True, width=1000)
    return text.removesuffix("...\n").strip()
