"""diffattn: build, train, attack and measure attention-based vision models.

The public names below are loaded on first use, so that importing the package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "ATTACKS": "diffattn.attacks",
    "AttackResult": "diffattn.attacks.base",
    "FGSM": "diffattn.attacks",
    "L2": "diffattn.threat_model",
    "Linf": "diffattn.threat_model",
    "PGD": "diffattn.attacks",
    "attention_layers": "diffattn.models.capture",
    "capture": "diffattn.models.capture",
    "compare_with_reference": "diffattn.sensitivity",
    "create_model": "diffattn.models.zoo",
    "lipschitz_estimate": "diffattn.sensitivity",
    "list_models": "diffattn.models.zoo",
    "load_data": "diffattn.data.images",
    "load_model": "diffattn.models.checkpoints",
    "measure_sensitivity": "diffattn.sensitivity",
    "read_record": "diffattn.audit.record",
    "record": "diffattn.models.capture",
    "run_audit": "diffattn.audit.run",
    "save_model": "diffattn.models.checkpoints",
    "train_model": "diffattn.train.loop",
    "write_report": "diffattn.report.html",
}

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'diffattn' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return ["__version__", *sorted(_PUBLIC)]
