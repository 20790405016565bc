"""The sizes of a coordinate check, and the recipes at each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deepinit.errors import ConfigError
from deepinit.geometry import Geometry
from deepinit.recipe import Recipe
from deepinit.train.config import Config


@dataclass(frozen=True)
class Grid:
    """What is run."""

    widths: tuple[int, ...] = (32, 64, 128, 256)
    """At the smallest depth."""
    depths: tuple[int, ...] = (4, 16, 48)
    """At the smallest width."""
    head_dim: int = 16
    """Heads stay as wide and grow in number."""
    steps: int = 4
    seeds: int = 3
    batch: int = 8
    seq_len: int = 32
    vocab: int = 96
    optimizer: str = "adam"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if self.optimizer not in ("adam", "sgd"):
            raise ConfigError(f"--optimizer: {self.optimizer!r} is not 'adam' or 'sgd'")
        for name in ("widths", "depths"):
            sizes = getattr(self, name)
            if sizes and (len(set(sizes)) < 2 or min(sizes) < 1):
                raise ConfigError(f"--{name}: {sizes} are not two sizes or more; a slope needs them")
        if not self.widths and not self.depths:
            raise ConfigError("--widths and --depths: both are empty")
        if bad := [w for w in self.widths if w % self.head_dim]:
            raise ConfigError(f"--widths: {bad[0]} is not a multiple of --head-dim {self.head_dim}")
        if self.seeds < 2 or self.steps < 1:
            raise ConfigError("--seeds and --steps: at least 2 seeds, whose scatter gives the confidence, and 1 step")

    @property
    def narrow(self) -> int:
        """The width at which depths are compared."""
        return min(self.widths or (64,))

    @property
    def shallow(self) -> int:
        """The depth at which widths are compared."""
        return min(self.depths or (4,))

    @property
    def points(self) -> tuple[tuple[int, int], ...]:
        """Every (width, depth) that is run, once."""
        over_width = [(w, self.shallow) for w in self.widths]
        return tuple(dict.fromkeys([*over_width, *((self.narrow, d) for d in self.depths)]))


def recipes(config: Config, grid: Grid) -> Callable[[int, int], Recipe]:
    """(width, depth) -> the config's scheme at these sizes, the rest proportioned like the config's model.

    A scheme that asks for the width or depth at which its rates were found is given the smallest of the grid.
    """
    from deepinit.schemes import registry

    scheme, presets = registry.resolve(config.scheme.name)
    given = {**presets, **config.scheme.args}
    base = {"base_width": grid.narrow, "base_depth": grid.shallow}
    args = {k: v for k, v in base.items() if k in scheme.hyperparameters and not given.get(k)}

    def at(width: int, depth: int) -> Recipe:
        g = geometry(width, depth, grid, config.geometry())
        names = ("num_layers", "d_model", "num_heads", "num_kv_heads", "head_dim", "d_ff", "vocab_size", "max_seq_len")
        sized = config.replace(**{f"model__{k}": getattr(g, k) for k in names})
        return sized.replace(scheme__args={**config.scheme.args, **args}).recipe()

    return at


def geometry(width: int, depth: int, grid: Grid, like: Geometry) -> Geometry:
    """The sizes at one point of the grid, proportioned like a given model."""
    heads = width // grid.head_dim
    shared = max(1, like.num_heads // like.num_kv_heads)
    d_ff = max(8, round(width * like.d_ff / like.d_model / 8) * 8)
    return like.replace(
        num_layers=depth, d_model=width, num_heads=heads, num_kv_heads=max(1, heads // shared), head_dim=grid.head_dim,
        d_ff=d_ff, vocab_size=grid.vocab, max_seq_len=grid.seq_len,
    )  # fmt: skip
