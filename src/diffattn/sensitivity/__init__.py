"""Estimates of how attention reacts to its input: branch gradients and their alignment, Lipschitz constants."""

from diffattn.sensitivity.comparison import compare_with_reference, summarise, summarise_comparison
from diffattn.sensitivity.gradients import measure_sensitivity
from diffattn.sensitivity.lipschitz import LipschitzEstimate, lipschitz_estimate, lipschitz_estimate_details

__all__ = [
    "LipschitzEstimate",
    "compare_with_reference",
    "lipschitz_estimate",
    "lipschitz_estimate_details",
    "measure_sensitivity",
    "summarise",
    "summarise_comparison",
]
