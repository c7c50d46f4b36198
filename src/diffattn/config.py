"""Every configuration of the project as a frozen dataclass, and budgets as exact fractions. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from diffattn.checks import (
    from_mapping,
    is_finite_number,
    require,
    require_flag,
    require_number,
    require_positive_integer,
    require_probability,
    shown,
)

_EPS_LENGTH, _EPS_EXPONENT = 64, 308
_LARGEST = {
    "image_size": 4096,
    "patch_size": 4096,
    "in_chans": 64,
    "num_classes": 1_000_000,
    "embed_dim": 65536,
    "depth": 1024,
    "num_heads": 65536,
}
_LARGEST_MLP_RATIO = 64.0


def parse_eps(eps: str | float | Fraction, *, name: str = "eps") -> Fraction:
    """Read a budget such as `"4/255"`, `"0.5"` or `0.5` as an exact fraction.

    Args:
        eps: a fraction as text of at most 64 characters (a decimal exponent within +-308), or a number; not
            negative, finite as a float.
        name: what the error message calls it.

    Raises:
        ValueError: if it is no number, too long, negative or not finite.
    """
    wanted = f"{name} must be a number or a fraction such as '4/255', at least 0"
    if isinstance(eps, bool) or not isinstance(eps, str | int | float | Fraction):
        raise ValueError(f"{wanted}; got {shown(eps)}")
    try:
        value = _fraction_of_text(eps) if isinstance(eps, str) else Fraction(eps)
        float(value)
    except (ValueError, ZeroDivisionError, OverflowError) as error:
        raise ValueError(f"{wanted}; got {shown(eps)}") from error
    if value < 0:
        raise ValueError(f"{wanted}; got {shown(eps)}")
    return value


def _fraction_of_text(text: str) -> Fraction:
    """The fraction that a text means; a length or exponent that no budget has is refused before the powers."""
    if len(text) > _EPS_LENGTH:
        raise ValueError(f"at most {_EPS_LENGTH} characters")
    text = text.replace(" ", "")
    exponent = text.lower().partition("e")[2]
    if exponent and abs(int(exponent)) > _EPS_EXPONENT:
        raise ValueError(f"an exponent within +-{_EPS_EXPONENT}")
    return Fraction(text)


def format_eps(eps: Fraction) -> str:
    """Write a budget as people do: `4/255` below 1 where 255 eps is within 1e-9 of an integer, else a decimal."""
    level = round(eps * 255)
    if 0 < level < 255 and abs(float(eps * 255 - level)) <= 1e-9:
        return f"{level}/255"
    return f"{float(eps):.6g}"


@dataclass(frozen=True)
class ViTConfig:
    """The shape of a vision transformer; the attention layer is named, its own options ride along.

    Args:
        image_size: height and width in pixels; a multiple of `patch_size`, at most 4096.
        patch_size: edge of a patch in pixels.
        in_chans: colour channels, such as 1 or 3; at most 64.
        num_classes: width of the logits, from 2 to 1000000.
        embed_dim: width C of the residual stream, at most 65536.
        depth: number of blocks D, at most 1024.
        num_heads: number of **output** heads of each attention layer, at most 65536.
        mlp_ratio: hidden width of the MLP over `embed_dim`, at most 64; the width must be at least 1.
        attention: registered name of the attention layer.
        attention_options: keyword arguments of that layer, such as `{"lambda_init": 0.8}`.
        qkv_bias: whether the query, key and value projections have biases.
        dropout: dropout after the attention's and the MLP's output projection, in [0, 1).
        drop_path: stochastic depth at the last block, growing linearly from 0, in [0, 1).
        pool: "cls" reads the class token, "mean" the mean of the patch tokens.
        mean: per-channel mean subtracted from the [0, 1] pixels.
        std: per-channel standard deviation that divides them, above 0.
        norm_eps: epsilon of the LayerNorms, above 0 and at most 1.

    Raises:
        ValueError: for a field of another type or out of its range.
    """

    image_size: int
    patch_size: int
    in_chans: int = 3
    num_classes: int = 10
    embed_dim: int = 192
    depth: int = 12
    num_heads: int = 3
    mlp_ratio: float = 4.0
    attention: str = "softmax"
    attention_options: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: bool = True
    dropout: float = 0.0
    drop_path: float = 0.0
    pool: str = "cls"
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        """Check every field against its range."""
        for name, largest in _LARGEST.items():
            require_positive_integer(name, getattr(self, name), high=largest)
        require(self.num_classes >= 2, f"num_classes must be at least 2; got {self.num_classes}")
        require(
            self.image_size % self.patch_size == 0,
            f"image_size must be a multiple of patch_size; got {self.image_size} and {self.patch_size}",
        )
        for name in ("dropout", "drop_path"):
            require_probability(name, getattr(self, name))
        require_number("mlp_ratio", self.mlp_ratio, high=_LARGEST_MLP_RATIO, open_low=True)
        require(
            int(self.embed_dim * self.mlp_ratio) >= 1,
            f"mlp_ratio must give the MLP a width of at least 1; got {self.mlp_ratio!r} of {self.embed_dim}",
        )
        require_number("norm_eps", self.norm_eps, high=1.0, open_low=True)
        require_flag("qkv_bias", self.qkv_bias)
        require(
            isinstance(self.attention, str) and bool(self.attention),
            f"attention must be the name of a layer; got {shown(self.attention)}",
        )
        require(
            isinstance(self.attention_options, Mapping)
            and all(isinstance(key, str) for key in self.attention_options),
            f"attention_options must be a mapping from option to value; got {shown(self.attention_options)}",
        )
        require(self.pool in ("cls", "mean"), f"pool must be 'cls' or 'mean'; got {shown(self.pool)}")
        for name in ("mean", "std"):
            values = getattr(self, name)
            require(
                isinstance(values, tuple | list)
                and len(values) in (1, self.in_chans)
                and all(is_finite_number(value) for value in values),
                f"{name} must be 1 or {self.in_chans} finite numbers; got {shown(values)}",
            )
            object.__setattr__(self, name, tuple(float(value) for value in values))
        require(min(self.std) > 0, f"std must be above 0; got {shown(self.std)}")
        object.__setattr__(self, "attention_options", dict(self.attention_options))


@dataclass(frozen=True)
class ModelConfig:
    """Which model is trained.

    Args:
        name: a name of the zoo, such as "diffvit_tiny_patch4_32".
        overrides: what differs from the name's own configuration, such as `{"depth": 1, "lambda_init": 0.8}`.
    """

    name: str = "vit_micro_patch2_8"
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the fields and copy the mapping."""
        require(isinstance(self.name, str) and bool(self.name), f"model.name must be a name; got {self.name!r}")
        require(
            isinstance(self.overrides, Mapping) and all(isinstance(key, str) for key in self.overrides),
            f"model.overrides must be a mapping from option to value; got {self.overrides!r}",
        )
        object.__setattr__(self, "overrides", dict(self.overrides))


@dataclass(frozen=True)
class DataConfig:
    """Which images are trained on, and which are only looked at after each epoch.

    Args:
        name: a registered data set, a `.parquet` file or a folder of them.
        split: the split trained on.
        val_name: the data set of the validation images; None takes `name`.
        val_split: the split that validation figures come from. No weights are chosen by them.
        limit: the first so many rows of `split`; None takes all.
        val_limit: the first so many rows of `val_split`; None takes all.
        image_size: edge in pixels that images are resized to; None keeps them.
        root: folder of the data sets; None reads the environment variable DIFFATTN_DATA.
    """

    name: str = "digits"
    split: str = "train"
    val_name: str | None = None
    val_split: str = "test"
    limit: int | None = None
    val_limit: int | None = None
    image_size: int | None = None
    root: str | None = None

    def __post_init__(self) -> None:
        """Check every field."""
        for name in ("name", "split", "val_split", "val_name", "root"):
            value = getattr(self, name)
            require(
                (isinstance(value, str) and bool(value)) or (value is None and name in ("val_name", "root")),
                f"data.{name} must be text; got {value!r}",
            )
        for name in ("limit", "val_limit", "image_size"):
            if getattr(self, name) is not None:
                require_positive_integer(f"data.{name}", getattr(self, name))


@dataclass(frozen=True)
class OptimConfig:
    """AdamW with linear warm-up and cosine decay, per step.

    Args:
        epochs: passes over the training images.
        batch_size: images in a step, over all devices; the last step of an epoch may have fewer.
        lr: learning rate at the end of the warm-up, above 0.
        min_lr: where the cosine ends, in [0, lr].
        warmup_epochs: length of the warm-up, in [0, epochs]; fractions count.
        weight_decay: decoupled decay of weight matrices only, at least 0.
        betas: decay of AdamW's two moments, each in [0, 1).
        label_smoothing: share of the target spread over all classes, in [0, 1).
        clip_norm: largest L2 norm of the whole gradient, above 0; None clips nothing.
    """

    epochs: int = 30
    batch_size: int = 128
    lr: float = 1e-3
    min_lr: float = 0.0
    warmup_epochs: float = 0.0
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.999)
    label_smoothing: float = 0.0
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        """Check every field against its range."""
        for name in ("epochs", "batch_size"):
            require_positive_integer(f"optim.{name}", getattr(self, name))
        require_number("optim.lr", self.lr, open_low=True)
        require_number("optim.min_lr", self.min_lr, high=self.lr)
        require_number("optim.warmup_epochs", self.warmup_epochs, high=self.epochs)
        require_number("optim.weight_decay", self.weight_decay)
        require_probability("optim.label_smoothing", self.label_smoothing)
        if self.clip_norm is not None:
            require_number("optim.clip_norm", self.clip_norm, open_low=True)
        require(
            isinstance(self.betas, tuple | list) and len(self.betas) == 2,
            f"optim.betas must be two numbers; got {self.betas!r}",
        )
        for beta in self.betas:
            require_probability("optim.betas", beta)
        object.__setattr__(self, "betas", tuple(self.betas))


@dataclass(frozen=True)
class AugmentConfig:
    """What is done to a training image, keyed by (seed, epoch, index).

    Args:
        crop_padding: black pixels added on every side before a random crop back to the size; 0 crops nothing.
        flip: mirror half of the images left to right.
    """

    crop_padding: int = 0
    flip: bool = False

    def __post_init__(self) -> None:
        """Check both fields."""
        require(
            isinstance(self.crop_padding, int)
            and not isinstance(self.crop_padding, bool)
            and self.crop_padding >= 0,
            f"augment.crop_padding must be an integer of at least 0; got {self.crop_padding!r}",
        )
        require_flag("augment.flip", self.flip)


@dataclass(frozen=True)
class HardwareConfig:
    """Where training runs, in Lightning Fabric's words; a run may be resumed with another one.

    Args:
        accelerator: "auto", "cpu", "cuda", "mps", ...
        devices: how many.
        strategy: "auto" or "ddp" (the weights are whole on every device).
    """

    accelerator: str = "auto"
    devices: int = 1
    strategy: str = "auto"

    def __post_init__(self) -> None:
        """Check every field."""
        require(
            isinstance(self.accelerator, str) and bool(self.accelerator),
            f"hardware.accelerator must be a name; got {self.accelerator!r}",
        )
        require(
            self.strategy in ("auto", "ddp"), f"hardware.strategy must be 'auto' or 'ddp'; got {self.strategy!r}"
        )
        require_positive_integer("hardware.devices", self.devices)


PRECISIONS = ("float32", "bfloat16")


@dataclass(frozen=True)
class TrainConfig:
    """One training run: with the same machine it gives the same weights, bit for bit.

    Args:
        model: what is trained.
        data: on which images.
        optim: by which steps.
        augment: with which changes to the images.
        hardware: on which devices.
        precision: "float32", or "bfloat16" (forward and backward in mixed precision, weights in float32).
        seed: keys the initial weights, the order, the augmentation and dropout; at least 0.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    precision: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the fields that are not checked by their own class."""
        for item, cls in TRAIN_PARTS.items():
            value = getattr(self, item)
            require(isinstance(value, cls), f"{item} must be a {cls.__name__}; got {value!r}")
        require(self.precision in PRECISIONS, f"precision must be one of {PRECISIONS}; got {self.precision!r}")
        require(
            isinstance(self.seed, int) and not isinstance(self.seed, bool) and self.seed >= 0,
            f"seed must be an integer of at least 0; got {self.seed!r}",
        )


TRAIN_PARTS: dict[str, type] = {
    "model": ModelConfig,
    "data": DataConfig,
    "optim": OptimConfig,
    "augment": AugmentConfig,
    "hardware": HardwareConfig,
}


def train_config_from_mapping(values: Mapping[str, Any]) -> TrainConfig:
    """Make a `TrainConfig` from nested mappings, as YAML and JSON give them.

    Under `model`, every key but `name` and `overrides` is an override: `{"name": ..., "depth": 4}`; the zoo
    refuses the ones it does not know when the model is made.

    Raises:
        ValueError: for an unknown key, listing the known ones, or a value out of range.
    """
    require(isinstance(values, Mapping), f"a training configuration must be a mapping; got {values!r}")
    made = dict(values)
    for part, cls in TRAIN_PARTS.items():
        if part not in made:
            continue
        options = made[part]
        require(isinstance(options, Mapping), f"{part} must be a mapping; got {options!r}")
        if part == "model":
            overrides = options.get("overrides", {})
            require(isinstance(overrides, Mapping), f"model.overrides must be a mapping; got {overrides!r}")
            flat = {key: value for key, value in options.items() if key not in ("name", "overrides")}
            kept = {"name": options["name"]} if "name" in options else {}
            options = {**kept, "overrides": {**overrides, **flat}}
        made[part] = from_mapping(cls, options, what=part)
    return from_mapping(TrainConfig, made, what="a training configuration")
