"""Configurations that ship with the package, one YAML file a preset; a preset is data and names no code."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import yaml


def preset_names(*, studies: bool | None = None) -> list[str]:
    """The presets there are: training recipes such as "digits", and studies such as "demo".

    Args:
        studies: only the studies (which set `models` side by side), or only the recipes; None for all.
    """
    names = sorted(item.name.removesuffix(".yaml") for item in _folder().iterdir() if item.name.endswith(".yaml"))
    return [name for name in names if studies is None or ("models" in read_preset(name)) is studies]


def read_preset(name_or_path: str | Path) -> dict[str, Any]:
    """Read a preset by name, or a YAML file by path, as nested mappings.

    Raises:
        ValueError: if there is neither, or the file is no YAML mapping.
    """
    text = str(name_or_path)
    if text in preset_names():
        content = (_folder() / f"{text}.yaml").read_text(encoding="utf-8")
    elif Path(text).is_file():
        content = Path(text).read_text(encoding="utf-8")
    else:
        raise ValueError(f"{text!r} is neither a YAML file nor a preset; presets: {', '.join(preset_names())}")
    try:
        values = yaml.safe_load(content)
    except yaml.YAMLError as error:
        raise ValueError(f"{text} must be YAML; {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{text} must hold a YAML mapping; got {type(values).__name__}")
    return values


def _folder() -> Any:
    return resources.files("diffattn.presets")
