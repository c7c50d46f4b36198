"""How strongly a model's attention maps react to their input, and whether the branches pull together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import polars as pl
import torch
from torch import Tensor, nn

from diffattn.checks import require, require_positive_integer
from diffattn.models.capture import attention_layers, record
from diffattn.sensitivity.directions import resolve_probes
from diffattn.sensitivity.evaluation import (
    LayerPoint,
    at_input,
    at_pixels,
    check_measurable,
    weight_readings,
)
from diffattn.sensitivity.jacobians import jacobian_products
from diffattn.sensitivity.loss_gradients import loss_products
from diffattn.sensitivity.table import layer_rows
from diffattn.validation import check_images, check_labels, check_logits

WRT = ("input", "pixels")
READINGS = ("jacobian", "loss")

DIRECTIONS_BESIDE = 8
"""Directions differentiated at once for a full batch of samples; more for a smaller one."""

Key = tuple[int, str, str, str]
"""(layer index, wrt, reading, lambda), the order of the table."""


@dataclass(frozen=True)
class _Request:
    """What was asked, checked."""

    model: nn.Module
    layers: dict[str, int]
    wrt: tuple[str, ...]
    readings: tuple[str, ...]
    probes: int | str
    seed: int
    batch_size: int


@dataclass(frozen=True)
class _Batch:
    """Some samples and every chosen layer at them."""

    images: Tensor
    labels: Tensor
    ids: list[int | str]
    points: dict[str, LayerPoint]


@dataclass
class _Run:
    """The lambda readings of each layer, the same in every batch; and the rows found so far."""

    kinds: dict[str, tuple[str, ...]] = field(default_factory=dict)
    frames: dict[Key, list[pl.DataFrame]] = field(default_factory=dict)

    def add(
        self,
        point: LayerPoint,
        drawn: Tensor,
        *,
        wrt: str,
        reading: str,
        kind: str,
        probes: int | None,
        ids: list[int | str],
    ) -> None:
        """Keep the rows of these products."""
        rows = layer_rows(point, drawn, wrt=wrt, reading=reading, kind=kind, probes=probes, sample_ids=ids)
        self.frames.setdefault((point.index, wrt, reading, kind), []).append(rows)


def measure_sensitivity(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    layers: Iterable[str] | None = None,
    wrt: Sequence[str] = WRT,
    readings: Sequence[str] = READINGS,
    probes: int | str = "auto",
    seed: int = 0,
    sample_ids: Sequence[int | str] | None = None,
    batch_size: int = 32,
) -> pl.DataFrame:
    """Gradient norms of each weighted branch and of the combined map, and their alignment, by layer and head.

    With the weighted branch gradients G_b = d(w_b A_b)/dx, for one sample,

        |sum_b G_b|^2 = sum_b |G_b|^2 + 2 sum_{b<c} <G_b, G_c>                                       (Lemma 1)

    which for A = A_1 - lambda A_2 reads |dA|^2 = |dA_1|^2 (1 + (lambda rho)^2 - 2 lambda rho cos theta).

    A *jacobian* reading takes G_b as the Jacobian of the map and |.| as the Frobenius norm. A *loss* reading takes
    G_b as the gradient of the loss through the branch: with the values held and c = dL/d(combined map), the
    gradient of <c, w_b A_b>. lambda *frozen* leaves out the weight's own derivative, w_b dA_b; *differentiated*
    is w_b dA_b + A_b dw_b, and appears only where a weight depends on the layer's input (V2).

    Args:
        model: [0, 1] pixels -> logits, made of attention layers with an adapter; in eval mode, or without dropout.
        images: float [n, channels, height, width] in [0, 1].
        labels: int64 [n].
        layers: names from `attention_layers`; all of them unless given.
        wrt: "input" (the tokens that the layer gets) and/or "pixels".
        readings: "jacobian" and/or "loss".
        probes: of the jacobian reading. "exact" differentiates along every input; a number K along that many
            random signs, keyed by (seed, sample); "auto" is exact up to 2048 inputs of a sample, 16 probes above.
        seed: keys the probes.
        sample_ids: [n]; 0..n-1 unless given.
        batch_size: samples in a pass; 8 directions are differentiated beside each other. Bounds the memory.

    Returns:
        One row a (sample, layer, head, wrt, reading, lambda); head is "0", "1", ... or "all": for *jacobian* the
        heads' Jacobians stacked, for *loss* the gradient of the layer's one scalar, the sum over heads.
        sample_id, layer, index (of the layer in the model, from 0), head, wrt, reading, lambda
        ("frozen" | "differentiated"); branches: how many the layer has; probes: K, null when exact; lambda_value:
        -w_2 / w_1 (the mean where it varies); norm_1, norm_2: |dA_1|, |dA_2| unweighted; weighted_1, weighted_2:
        |G_1|, |G_2|; norm_combined: of the derivative of the layer's *own combined map*, not of the parts' sum;
        rho = norm_2 / norm_1; lambda_rho = weighted_2 / weighted_1 with lambda's sign; cos_theta: of dA_1 and dA_2
        (where lambda varies over the map or is differentiated: -cos of G_1 and G_2); amplification =
        norm_combined / weighted_1; lemma1_rhs: the root of Lemma 1's right side. With random probes, `*_se` are
        delta-method standard errors (only squared norms and inner products are unbiased; a norm is low, and
        cos_theta too small in magnitude or not, by O(1/K)). Null: no such figure, as with one branch or a zero
        gradient. More than two branches: rho, lambda_rho and cos_theta speak of the first two, lemma1_rhs of all.

    Raises:
        ValueError: for bad images, labels or options, a model that drops at random, a non-finite gradient (naming
            the layer).

    Source: Lemma 1 of "Understanding Sensitivity of Differential Attention through the Lens of Adversarial
    Robustness" (arXiv 2510.00517), whose reductions are not known: both readings, the two lambda readings, and
    stating the lemma for weighted branches of a signed sum are ours.
    """
    check_images(images)
    check_labels(labels, batch=len(images))
    check_measurable(model)
    resolve_probes(probes, 1)
    require_positive_integer("batch_size", batch_size)
    require(isinstance(seed, int) and not isinstance(seed, bool), f"seed must be an integer; got {seed!r}")
    request = _Request(
        model=model,
        layers=_layer_places(model, layers),
        wrt=_chosen("wrt", wrt, WRT),
        readings=_chosen("readings", readings, READINGS),
        probes=probes,
        seed=seed,
        batch_size=batch_size,
    )
    ids: list[int | str] = [*range(len(images))] if sample_ids is None else list(sample_ids)
    require(
        len(ids) == len(images) and len(set(map(str, ids))) == len(ids),
        f"sample_ids must be {len(images)} different ids, one an image; got {len(ids)}, "
        f"{len(set(map(str, ids)))} different",
    )
    run = _Run()
    with torch.inference_mode(mode=False), torch.no_grad():
        images, labels = images.detach().clone(), labels.clone()
        for start in range(0, len(images), batch_size):
            part = slice(start, start + batch_size)
            _measure_batch(request, run, _batch(request, images[part], labels[part], ids[part]))
    return pl.concat([frame for key in sorted(run.frames, key=_order) for frame in run.frames[key]])


def _chosen(name: str, given: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    values = (given,) if isinstance(given, str) else tuple(given)
    require(
        bool(values) and set(values) <= set(known) and len(set(values)) == len(values),
        f"{name} must be one or more of {', '.join(known)}; got {given!r}",
    )
    return values


def _layer_places(model: nn.Module, layers: Iterable[str] | None) -> dict[str, int]:
    """Chosen layer -> its place among all attention layers."""
    chosen = None if layers is None else [layers] if isinstance(layers, str) else list(layers)
    with record(model, chosen):
        places = {name: index for index, name in enumerate(attention_layers(model))}
    return places if chosen is None else {name: index for name, index in places.items() if name in chosen}


def _batch(request: _Request, images: Tensor, labels: Tensor, ids: list[int | str]) -> _Batch:
    """Run the model once and look at every chosen layer."""
    modules = attention_layers(request.model)
    with record(request.model, list(request.layers)) as tape:
        logits = request.model(images)
    check_logits(logits, batch=len(images))
    check_labels(labels, batch=len(images), num_classes=logits.shape[1])
    missing = [name for name in request.layers if name not in tape.inputs]
    require(not missing, f"the model's forward pass never calls its attention layer {', '.join(missing)}")
    points = {
        name: LayerPoint(
            name=name,
            index=index,
            module=modules[name],
            tokens=tape.inputs[name],
            mask=tape.masks[name],
            branches=tape.branches[name].detach(),
        )
        for name, index in request.layers.items()
    }
    return _Batch(images, labels, ids, points)


def _measure_batch(request: _Request, run: _Run, batch: _Batch) -> None:
    """Measure one batch and add its rows to the run."""
    for name, point in batch.points.items():
        if name not in run.kinds:
            run.kinds[name] = weight_readings(point)
    if "jacobian" in request.readings:
        if "input" in request.wrt:
            for name in batch.points:
                _measure_jacobians(request, run, batch, "input", [name])
        if "pixels" in request.wrt:
            _measure_jacobians(request, run, batch, "pixels", list(batch.points))
    if "loss" in request.readings:
        points = list(batch.points.values())
        found = loss_products(request.model, batch.images, batch.labels, points, run.kinds, wrt=request.wrt)
        for (name, wrt, kind), drawn in found.items():
            run.add(batch.points[name], drawn, wrt=wrt, reading="loss", kind=kind, probes=None, ids=batch.ids)


def _measure_jacobians(request: _Request, run: _Run, batch: _Batch, wrt: str, names: list[str]) -> None:
    """The jacobian reading of some layers with respect to one input; its probes are keyed by what it is."""
    if wrt == "input":
        point = batch.points[names[0]]
        evaluate, inputs, place = at_input(point), point.tokens, point.index
    else:
        evaluate, inputs, place = at_pixels(request.model, names), batch.images, "model"
    found, count = jacobian_products(
        evaluate,
        inputs,
        {name: run.kinds[name] for name in names},
        probes=request.probes,
        per_pass=max(1, DIRECTIONS_BESIDE * request.batch_size // len(batch.ids)),
        sample_ids=batch.ids,
        key=(request.seed, wrt, place),
    )
    for (name, kind), drawn in found.items():
        run.add(batch.points[name], drawn, wrt=wrt, reading="jacobian", kind=kind, probes=count, ids=batch.ids)


def _order(key: Key) -> tuple[int, int, int, int]:
    index, wrt, reading, kind = key
    return index, WRT.index(wrt), READINGS.index(reading), ("frozen", "differentiated").index(kind)
