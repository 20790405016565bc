"""The laws that weights are drawn from. `std` is the standard deviation of the values drawn, everywhere.

A law's number is one float, or a tuple with one entry per layer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from deepinit.errors import ConfigError

Numbers = float | tuple[float, ...]


def each(f: Callable[[float], float], numbers: Numbers) -> Numbers:
    """f of the number, or of every entry."""
    return tuple(map(f, numbers)) if isinstance(numbers, tuple) else f(numbers)


def show(numbers: Numbers) -> str:
    """A number to 4 digits; of one per layer, the first and the last."""
    if isinstance(numbers, tuple):
        return f"{numbers[0]:.4g}..{numbers[-1]:.4g}"
    return f"{numbers:.4g}"


def truncated_moments(cut: float) -> tuple[float, float]:
    """(std, kurtosis) of a unit normal cut off at +-cut; cut 0 means not cut.

    With phi and Z the density at the cut and the mass inside: E z^2 = 1 - 2 cut phi / Z,
    E z^4 = 3 E z^2 - 2 cut^3 phi / Z (integration by parts).
    """
    if not cut:
        return 1.0, 3.0
    tail = math.exp(-cut * cut / 2) / math.sqrt(2 * math.pi) / math.erf(cut / math.sqrt(2))
    second = 1 - 2 * cut * tail
    fourth = 3 * second - 2 * cut**3 * tail
    return math.sqrt(second), fourth / second**2


@dataclass(frozen=True)
class Distribution:
    """A law of independent entries. `formula` is the short text that reports print."""

    _parameter: ClassVar[str] = "std"

    if TYPE_CHECKING:  # every law has these two, as fields or as properties

        @property
        def std(self) -> Numbers: ...

        @property
        def formula(self) -> str: ...

    @property
    def parameter(self) -> Numbers:
        """The law's own number: its std, value or gain."""
        return getattr(self, self._parameter)

    @property
    def layered(self) -> bool:
        """Whether the law has one entry per layer."""
        return isinstance(self.parameter, tuple)

    def at(self, layer: int) -> Distribution:
        """The law of one layer (0-based)."""
        if not isinstance(self.parameter, tuple):
            return self
        return dataclasses.replace(self, **{self._parameter: self.parameter[layer]})

    def scaled(self, factor: Numbers, formula: str = "") -> Distribution:
        """The law of the values times a factor, or times one factor per layer."""
        own = self.parameter
        if isinstance(factor, tuple):
            new: Numbers = tuple(f * (own[i] if isinstance(own, tuple) else own) for i, f in enumerate(factor))
        else:
            new = each(lambda x: x * factor, own)
        return dataclasses.replace(self, **{self._parameter: new, "formula": formula})

    @property
    def mean(self) -> Numbers:
        """Mean of the values drawn."""
        return each(lambda _: 0.0, self.parameter)

    @property
    def bound(self) -> Numbers:
        """The largest |w| that can be drawn."""
        return each(lambda _: math.inf, self.parameter)

    @property
    def kurtosis(self) -> float:
        """E (w - mean)^4 / std^4."""
        return 3.0

    def to_json(self) -> dict[str, Any]:
        """Plain data with the law's name, its fields, and the std, mean and bound that follow from them."""
        facts = {"std": self.std, "mean": self.mean, "bound": self.bound}
        finite = {k: v for k, v in facts.items() if all(map(math.isfinite, v if isinstance(v, tuple) else (v,)))}
        # JSON has neither infinity nor nan
        return {"law": type(self).__name__, **dict.fromkeys(facts), **finite, **dataclasses.asdict(self)}


@dataclass(frozen=True)
class Normal(Distribution):
    """Gaussian, not cut."""

    std: Numbers
    formula: str = field(default="", compare=False)


@dataclass(frozen=True)
class TruncatedNormal(Distribution):
    """Gaussian cut off at +-cut sigma, where sigma is that of the Gaussian before the cut; `std` is the real one."""

    std: Numbers
    cut: float
    formula: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not self.cut > 0:
            raise ConfigError(f"cut: {self.cut} is not a positive number of sigmas")

    @classmethod
    def from_sigma(cls, sigma: Numbers, cut: float, formula: str = "") -> TruncatedNormal:
        """For sources that truncate N(0, sigma^2) without correcting: the real std is 0.986578 sigma at cut 3."""
        unit, _ = truncated_moments(cut)
        return cls(each(lambda s: s * unit, sigma), cut, formula)

    @property
    def sigma(self) -> Numbers:
        """Std of the Gaussian before the cut."""
        unit, _ = truncated_moments(self.cut)
        return each(lambda s: s / unit, self.std)

    @property
    def bound(self) -> Numbers:
        return each(lambda s: s * self.cut, self.sigma)

    @property
    def kurtosis(self) -> float:
        return truncated_moments(self.cut)[1]


@dataclass(frozen=True)
class Uniform(Distribution):
    """Uniform on [-sqrt(3) std, sqrt(3) std]."""

    std: Numbers
    formula: str = field(default="", compare=False)

    @property
    def bound(self) -> Numbers:
        return each(lambda s: s * math.sqrt(3), self.std)

    @property
    def kurtosis(self) -> float:
        return 1.8


@dataclass(frozen=True)
class Constant(Distribution):
    """Every entry the same."""

    value: Numbers
    formula: str = field(default="", compare=False)
    _parameter: ClassVar[str] = "value"

    @property
    def std(self) -> Numbers:
        return each(lambda _: 0.0, self.value)

    @property
    def mean(self) -> Numbers:
        return self.value

    @property
    def bound(self) -> Numbers:
        return each(abs, self.value)


@dataclass(frozen=True)
class Orthogonal(Distribution):
    """gain * Q with Q semi-orthogonal: singular values all `gain`; `size` is the larger of the two fans."""

    gain: Numbers
    size: int
    formula: str = field(default="", compare=False)
    _parameter: ClassVar[str] = "gain"

    @property
    def std(self) -> Numbers:
        return each(lambda g: g / math.sqrt(self.size), self.gain)


@dataclass(frozen=True)
class Sign(Distribution):
    """+std or -std, with equal chances."""

    std: Numbers
    formula: str = field(default="", compare=False)

    @property
    def bound(self) -> Numbers:
        return self.std

    @property
    def kurtosis(self) -> float:
        return 1.0


@dataclass(frozen=True)
class Unit(Distribution):
    """Vectors of `size` entries and length 1, in directions of no preference."""

    size: int
    formula: str = field(default="1/sqrt(size)", compare=False)
    _parameter: ClassVar[str] = "size"

    @property
    def std(self) -> float:
        return 1 / math.sqrt(self.size)

    @property
    def bound(self) -> float:
        return 1.0

    @property
    def kurtosis(self) -> float:
        return 3 * self.size / (self.size + 2)


@dataclass(frozen=True)
class Factor(Distribution):
    """One of two matrices that are drawn together: their product is noise Z + identity I, cut to the rank they allow.

    Queries and keys have one product for each head, values and outputs one for all heads. Z has independent entries of
    std `z_std`. The factors are U sqrt(S) (`left`) and sqrt(S) V^T (`right`) of the product's singular value
    decomposition, so their own entries are not independent and have no std of their own.
    """

    noise: float
    identity: float
    z_std: float
    partner: str
    """The role of the other factor."""
    side: str = "left"
    """`left` or `right`."""
    formula: str = field(default="", compare=False)
    _parameter: ClassVar[str] = "noise"

    @property
    def std(self) -> float:
        return math.nan


@dataclass(frozen=True)
class External(Distribution):
    """A closure that the caller gives; nothing is known of its values."""

    formula: str = field(default="given by the caller", compare=False)
    _parameter: ClassVar[str] = "std"

    @property
    def std(self) -> float:
        return math.nan

    @property
    def mean(self) -> float:
        return math.nan


KINDS: dict[str, type[Distribution]] = {
    k.__name__: k for k in (Normal, TruncatedNormal, Uniform, Constant, Orthogonal, Sign, Unit, Factor, External)
}


def from_json(data: Mapping[str, Any]) -> Distribution:
    """The law that `to_json` wrote."""
    kind = KINDS[data["law"]]
    names = {f.name for f in dataclasses.fields(kind)}
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in data.items() if k in names})
