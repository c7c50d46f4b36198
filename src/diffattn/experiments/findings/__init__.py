"""Findings: one function each, that runs a study and writes its table."""

from diffattn.experiments.findings.base import FINDINGS
from diffattn.experiments.findings.first_light import first_light

__all__ = ["FINDINGS", "first_light"]
