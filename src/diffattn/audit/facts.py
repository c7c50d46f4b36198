"""What an audit found out about one model: the figures of `record.json` as dataclasses. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from diffattn.checks import require
from diffattn.statistics import Interval

FORMAT_VERSION = 1
STATUSES = ("clean_wrong", "broken", "survived", "error")
_SLACK = 1e-6

Status = Literal["clean_wrong", "broken", "survived", "error"]
Head = int | Literal["all"]


@dataclass(frozen=True)
class Measured:
    """A figure with the ends of its 95 % interval; None where there is nothing to report."""

    value: float | None
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        """Check that the interval is one and holds its value."""
        if self.low is not None and self.high is not None:
            require(self.low <= self.high, f"low must be at most high; got {self.low} and {self.high}")
        if self.value is not None:
            slack = _SLACK * max(1.0, abs(self.value))
            require(self.low is None or self.low <= self.value + slack, f"low must be at most value; got {self}")
            require(self.high is None or self.value <= self.high + slack, f"value must be at most high; got {self}")

    @classmethod
    def of(cls, interval: Interval) -> Measured:
        """From an `Interval`; what is not finite becomes None: this is the place where that is decided."""
        return cls(finite(interval.value), finite(interval.low), finite(interval.high))


@dataclass(frozen=True)
class ModelFacts:
    """Which model: its name, where it came from, its configuration, parameters and the weights' hash."""

    name: str
    path: str | None
    config: dict[str, Any]
    parameters: int
    sha256: str | None

    def __post_init__(self) -> None:
        """Check the count."""
        require(self.parameters >= 0, f"parameters must be at least 0; got {self.parameters}")


@dataclass(frozen=True)
class Skipped:
    """A sample left out, and why."""

    sample_id: str
    reason: str


@dataclass(frozen=True)
class DataFacts:
    """On which images: data set, split, how many, which were skipped, and the fingerprint of all of them."""

    name: str
    split: str
    n: int
    skipped: tuple[Skipped, ...]
    fingerprint: str
    class_names: tuple[str, ...]

    def __post_init__(self) -> None:
        """Check the count."""
        require(self.n >= 1, f"n must be at least 1; got {self.n}")


@dataclass(frozen=True)
class CleanFacts:
    """Accuracy without an attack: correct / n with its interval."""

    n: int
    correct: int
    accuracy: float
    low: float
    high: float

    def __post_init__(self) -> None:
        """Check that the counts and the shares agree."""
        require(0 <= self.correct <= self.n, f"correct must be in 0..n; got {self.correct} of {self.n}")
        _check_share("accuracy", self.accuracy, self.low, self.high, count=self.correct, n=self.n)


@dataclass(frozen=True)
class AttackFacts:
    """One attack under one budget: what it broke of the n clean-correct samples.

    Args:
        attack: its name under "name", and its options.
        norm: "Linf" or "L2".
        eps: the budget as text, such as "4/255".
        eps_value: the same in pixel units.
        n: clean-correct samples, the denominator of `asr`.
        broken: those of them that the attack broke.
        survived: those that it did not.
        error: those that met a value that is not finite and that nothing else broke.
        asr: broken / n, None without clean-correct samples.
        asr_low: lower end of its interval, with every error counted as not broken.
        asr_high: upper end, with every error counted as broken.
        robust_accuracy: survived / all samples.
        robust_low: lower end of its interval.
        robust_high: upper end.
        flags: reasons not to trust the figures, each "word: sentence".
        forwards: forward passes, over all samples.
        backwards: backward passes.
        seconds: wall time.
    """

    attack: dict[str, Any]
    norm: str
    eps: str
    eps_value: float
    n: int
    broken: int
    survived: int
    error: int
    asr: float | None
    asr_low: float | None
    asr_high: float | None
    robust_accuracy: float
    robust_low: float
    robust_high: float
    flags: tuple[str, ...] = ()
    forwards: int = 0
    backwards: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        """Check the name, and that the counts and the shares agree."""
        require(isinstance(self.attack.get("name"), str), "attack must have a text under 'name'")
        require(self.eps_value >= 0, f"eps_value must be at least 0; got {self.eps_value}")
        counts = (self.broken, self.survived, self.error)
        require(
            min(counts) >= 0 and sum(counts) == self.n,
            f"broken + survived + error must be n; got {self.broken} + {self.survived} + {self.error} and {self.n}",
        )
        if self.asr is None or self.asr_low is None or self.asr_high is None:
            require(self.n == 0, f"asr, asr_low and asr_high must be numbers where n is above 0; n is {self.n}")
        else:
            _check_share("asr", self.asr, self.asr_low, self.asr_high, count=self.broken, n=self.n)
        _check_share("robust_accuracy", self.robust_accuracy, self.robust_low, self.robust_high)

    @property
    def name(self) -> str:
        """The attack's registered name."""
        return self.attack["name"]


@dataclass(frozen=True)
class LayerSensitivity:
    """Gradient norms and alignment of one layer's branches, of one head or all heads together, over n samples.

    `wrt` says what is differentiated by (the layer's input or the pixels), `reading` what is differentiated (the
    maps: Frobenius Jacobians; or the loss through each branch), `lambda_` whether λ was held fixed.
    The second branch's figures are None for a layer with one map.
    """

    layer: str
    index: int
    head: Head
    wrt: Literal["input", "pixels"]
    reading: Literal["jacobian", "loss"]
    lambda_: Literal["frozen", "differentiated"]
    n: int
    probes: int
    norm_1: Measured | None
    norm_2: Measured | None
    norm_combined: Measured | None
    rho: Measured | None
    lambda_rho: Measured | None
    cos_theta: Measured | None
    negative_share: Measured | None


@dataclass(frozen=True)
class LayerLipschitz:
    """A local Lipschitz estimate of one layer over n samples: a lower bound found by search.

    `of` says whether the layer's output or its combined map is measured; `radius` 0 is the Jacobian's largest
    singular value at the point, above 0 the largest ratio found in the ball.
    """

    layer: str
    index: int
    of: Literal["output", "map"]
    kind: Literal["estimate"]
    radius: float
    n: int
    median: float | None
    mean: Measured


@dataclass(frozen=True)
class ReferenceRow:
    """Theorems 2 and 3 for one layer over n samples, beside what was measured; None where there is no such figure.

    `more_sensitive_share` is the share of samples that Theorem 3 calls more sensitive than the reference.
    """

    layer: str
    index: int
    n: int
    gamma: Measured | None
    theorem2_rhs: Measured | None
    measured_ratio: Measured | None
    theorem3_threshold: Measured | None
    cos_theta: Measured | None
    more_sensitive_share: Measured | None


@dataclass(frozen=True)
class Reference:
    """The model that the theorems compare this one with, by name, and a row per layer."""

    model: str
    rows: tuple[ReferenceRow, ...]


@dataclass(frozen=True)
class Example:
    """One sample before and after an attack; its tensors begin with `key` in `examples.safetensors`.

    `layer` is None where no attention map was kept; `map_note` says what the maps are averaged over.
    """

    sample_id: str
    label: int
    clean_prediction: int
    attacked_prediction: int
    status: Status
    attack: str
    norm: str
    eps: str
    key: str
    layer: str | None = None
    map_note: str = ""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Everything in `record.json`; `created` is an ISO date and time, `command` what was typed."""

    created: str
    command: str
    seed: int
    environment: dict[str, Any]
    model: ModelFacts
    data: DataFacts
    clean: CleanFacts
    attacks: tuple[AttackFacts, ...] = ()
    sensitivity: tuple[LayerSensitivity, ...] = ()
    lipschitz: tuple[LayerLipschitz, ...] = ()
    reference: Reference | None = None
    examples: tuple[Example, ...] = ()
    format_version: int = FORMAT_VERSION


def finite(value: float) -> float | None:
    """The number, or None where it is NaN or infinite."""
    return float(value) if math.isfinite(value) else None


def _check_share(
    name: str, share: float, low: float, high: float, *, count: int | None = None, n: int | None = None
) -> None:
    require(
        -_SLACK <= low <= share + _SLACK and share - _SLACK <= high <= 1 + _SLACK,
        f"{name} and its interval must satisfy 0 <= low <= {name} <= high <= 1; got {low}, {share}, {high}",
    )
    if count is not None and n:
        require(abs(share - count / n) <= _SLACK, f"{name} must be {count} / {n}; got {share}")
