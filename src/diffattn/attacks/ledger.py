"""The verdict on every sample: an attack proposes points, only the ledger decides what they mean.

It counts passes, takes note of non-finite values and zero gradients, keeps the point of highest loss, and calls
a sample broken only after recomputing the point, inside the budget, without autocast.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from diffattn.attacks.base import STATUSES, AttackResult, Model, logits_of
from diffattn.checks import require_positive_integer
from diffattn.threat_model import Threat
from diffattn.validation import check_images, check_labels

PROBE_SIZE = 4
PROBE_TOLERANCE = 1e-4
PROBABILITY_TOLERANCE = 1e-3


class Ledger:
    """What is known of each sample so far, and the only place where a sample's status is decided.

    It is made and used inside `guarded`. Indices are int64 tensors of sample numbers on the images' device;
    points and logits are rows of the samples that an index names.

    Args:
        model: any callable from images to logits.
        images: [n, ...] float32 or float64 pixels in [0, 1].
        labels: [n] int64 true classes.
        threat: the budget.
        targets: [n] int64 classes that the attacker wants, none of them the true class; None: any wrong class.
        sample_ids: [n] unique ints or strings; the sample numbers by default.
        batch_size: most samples in one pass.

    Raises:
        ValueError: for any of these that is not so, or a model whose output is no logits.
    """

    def __init__(
        self,
        model: Model,
        images: Tensor,
        labels: Tensor,
        threat: Threat,
        *,
        targets: Tensor | None = None,
        sample_ids: Sequence[int | str] | None = None,
        batch_size: int = 128,
    ) -> None:
        check_images(images)
        if images.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"images must be float32 or float64; got {images.dtype}, too coarse for a budget of 1/255 "
                "(for speed pass precision='bfloat16')"
            )
        check_labels(labels, batch=len(images))
        require_positive_integer("batch_size", batch_size)
        self.model, self.threat, self.batch_size = model, threat, batch_size
        self.clean = images.detach().clone()
        self.labels = labels.detach().clone().to(images.device)
        self.targets = _checked_targets(targets, self.labels)
        self.sample_ids = _checked_ids(sample_ids, len(images))
        self.kept = self.clean.clone()
        self.kept_loss = torch.full((len(images),), -torch.inf, dtype=torch.float64, device=images.device)
        self.prediction = torch.full_like(self.labels, -1)
        self.broken = torch.zeros_like(self.labels, dtype=torch.bool)
        self.non_finite = torch.zeros_like(self.broken)
        self.zero_gradient = torch.zeros_like(self.broken)
        self.forwards = np.zeros(len(images), dtype=np.int64)
        self.backwards = np.zeros(len(images), dtype=np.int64)
        self.flags: list[str] = []
        self.num_classes = self._score_clean()
        self.clean_prediction = self.prediction.clone()
        self.attackable = self.clean_prediction == self.labels

    def to_attack(self) -> Tensor:
        """Samples that are right on the clean image and not broken yet."""
        return (self.attackable & ~self.broken).nonzero()[:, 0]

    def micro_batches(self, index: Tensor) -> Iterator[Tensor]:
        """Split an index into pieces of at most `batch_size`."""
        if len(index):
            yield from index.split(self.batch_size)

    def goals(self, index: Tensor) -> tuple[Tensor, Tensor | None]:
        """Labels and targets of these samples, as a loss takes them."""
        return self.labels[index], None if self.targets is None else self.targets[index]

    def forward(self, points: Tensor, index: Tensor, *, autocast: bool = False) -> Tensor:
        """Logits at the points, counted; bfloat16 autocast is on or off as asked, whatever the caller's is."""
        self.forwards[index.cpu().numpy()] += 1
        with torch.autocast(points.device.type, dtype=torch.bfloat16, enabled=autocast):
            return logits_of(self.model, points)

    def observe(self, points: Tensor, index: Tensor, logits: Tensor, loss: Tensor) -> Tensor:
        """Take note of scored points; [batch], True where the sample is broken by now.

        A prediction that meets the goal is a claim and is recomputed at once. Of the points that break nothing,
        a sample's point of highest loss is kept.
        """
        prediction = predictions(logits)
        claims = self._meets_goal(prediction, index).nonzero()[:, 0]
        if len(claims):
            prediction[claims] = self._confirm(points[claims], index[claims])
        self.note_non_finite(points, index, prediction < 0)
        broken = self.broken[index]
        better = (loss.detach() > self.kept_loss[index]) & ~broken & ~self.non_finite[index]
        chosen = index[better]
        self.kept[chosen] = points[better]
        self.kept_loss[chosen] = loss.detach()[better].double()
        self.prediction[chosen] = prediction[better]
        return broken

    def observe_gradient(self, points: Tensor, index: Tensor, gradient: Tensor) -> Tensor:
        """Count a backward pass and return its gradient with every non-finite entry set to 0."""
        self.backwards[index.cpu().numpy()] += 1
        largest = gradient.flatten(1).abs().amax(dim=1)
        self.zero_gradient[index] |= largest == 0
        bad = ~largest.isfinite()
        self.note_non_finite(points, index, bad)
        return gradient.where(gradient.isfinite(), 0) if bad.any() else gradient

    def note_non_finite(self, points: Tensor, index: Tensor, bad: Tensor) -> None:
        """Take note of samples whose logits or gradient are not finite, and keep the first such point."""
        if not bad.any():
            return
        first = bad & ~self.non_finite[index] & ~self.broken[index]
        self.kept[index[first]] = points[first]
        self.prediction[index[first]] = -1
        self.non_finite[index[first]] = True

    def rescore(self) -> None:
        """Recompute the kept point of every survivor without autocast; one that breaks is broken."""
        for index in self.micro_batches((self.attackable & ~self.broken & ~self.non_finite).nonzero()[:, 0]):
            points = self.kept[index]
            self.prediction[index] = self._confirm(points, index)
            self.note_non_finite(points, index, self.prediction[index] < 0)

    def result(self, attack: dict[str, Any]) -> AttackResult:
        """The verdicts: broken goes before error, error before clean-wrong and survived."""
        clean_wrong, broken, survived, error = STATUSES
        status = np.where(_numpy(self.attackable), survived, clean_wrong)
        status[_numpy(self.non_finite)] = error
        status[_numpy(self.broken)] = broken
        return AttackResult(
            adversarial=self.kept,
            status=status,
            distance=_numpy(self.threat.distance(self.kept, self.clean)),
            clean_prediction=_numpy(self.clean_prediction),
            prediction=_numpy(self.prediction),
            labels=_numpy(self.labels),
            targets=None if self.targets is None else _numpy(self.targets),
            forwards=self.forwards,
            backwards=self.backwards,
            flags=(*self.flags, *self._counted_flags()),
            attack=attack,
            norm=self.threat.name,
            eps=self.threat.label,
            eps_value=self.threat.eps,
            sample_ids=self.sample_ids,
        )

    def _score_clean(self) -> int:
        """Predict every clean image, look for a model not worth attacking, and return the class count."""
        num_classes, probabilities = 0, True
        with torch.no_grad():
            for index in self.micro_batches(torch.arange(len(self.clean), device=self.clean.device)):
                logits = self.forward(self.clean[index], index)
                if not num_classes:
                    num_classes = logits.shape[1]
                    check_labels(self.labels, batch=len(self.labels), num_classes=num_classes)
                    if self.targets is not None:
                        check_labels(self.targets, batch=len(self.labels), num_classes=num_classes, name="targets")
                    self._probe(logits)
                self.prediction[index] = predictions(logits)
                probabilities &= _are_probabilities(logits)
        self.non_finite = self.prediction < 0
        if probabilities:
            self.flags.append(
                "probabilities: every row of the model's output is non-negative and sums to 1; "
                "attack the logits, before softmax"
            )
        return num_classes

    def _probe(self, logits: Tensor) -> None:
        """Run a few images again in one and the same batch: a model in train mode, or with its own dice, shows."""
        modules = list(self.model.modules()) if isinstance(self.model, nn.Module) else []
        training = sum(module.training for module in modules)
        if training:
            self.flags.append(
                f"randomised: {training} of {len(modules)} modules are in train mode "
                "(dropout, batch statistics); call model.eval()"
            )
            return
        index = torch.arange(min(PROBE_SIZE, len(logits)), device=self.clean.device)
        first = logits if len(index) == len(logits) else self.forward(self.clean[index], index)
        second = self.forward(self.clean[index], index)
        slack = PROBE_TOLERANCE * float(first.nan_to_num(0, 0, 0).abs().max())
        if not torch.allclose(first, second, rtol=0, atol=slack, equal_nan=True):
            self.flags.append("randomised: two forward passes of the same clean images gave different logits")

    def _meets_goal(self, prediction: Tensor, index: Tensor) -> Tensor:
        """Whether a prediction is what the attacker wants; a non-finite one (-1) never is."""
        labels, targets = self.goals(index)
        return prediction == targets if targets is not None else (prediction != labels) & (prediction >= 0)

    def _confirm(self, points: Tensor, index: Tensor) -> Tensor:
        """Recompute points without autocast, record those that break, and return the predictions."""
        with torch.no_grad():
            prediction = predictions(self.forward(points, index))
        clean = self.clean[index]
        in_box = (points >= clean.clamp(max=0)) & (points <= clean.clamp(min=1))
        in_ball = self.threat.distance(points, clean) <= self.threat.eps
        hit = self._meets_goal(prediction, index) & in_ball & in_box.flatten(1).all(dim=1)
        self.broken[index[hit]] = True
        self.kept[index[hit]] = points[hit]
        self.prediction[index[hit]] = prediction[hit]
        return prediction

    def _counted_flags(self) -> Iterator[str]:
        attacked = int(self.attackable.sum())
        zero, bad = int(self.zero_gradient.sum()), int(self.non_finite.sum())
        if zero:
            yield (
                f"zero_gradient: the input gradient was exactly 0 at some point for {zero} of {attacked} attacked "
                "samples; saturated or masked logits? try loss='dlr' or 'margin'"
            )
        if bad:
            yield f"non_finite: {bad} of {len(self.labels)} samples met non-finite logits or gradients"


def predictions(logits: Tensor) -> Tensor:
    """The class of the largest logit, or -1 for a row with a non-finite value: [batch, classes] -> [batch]."""
    return logits.detach().argmax(dim=1).where(logits.detach().isfinite().all(dim=1), -1)


def _are_probabilities(logits: Tensor) -> bool:
    return bool((logits >= 0).all() and ((logits.sum(dim=1) - 1).abs() <= PROBABILITY_TOLERANCE).all())


def _checked_targets(targets: Tensor | None, labels: Tensor) -> Tensor | None:
    if targets is None:
        return None
    check_labels(targets, batch=len(labels), name="targets")
    targets = targets.detach().clone().to(labels.device)
    same = (targets == labels).nonzero()[:, 0]
    if len(same):
        raise ValueError(
            f"targets must differ from labels; got the true class as target of {len(same)} of {len(labels)} "
            f"samples, the first at index {int(same[0])}"
        )
    return targets


def _checked_ids(sample_ids: Sequence[int | str] | None, n: int) -> tuple[int | str, ...]:
    if sample_ids is None:
        return tuple(range(n))
    ids = tuple(item if isinstance(item, str) else operator.index(item) for item in sample_ids)
    if len(ids) != n:
        raise ValueError(f"sample_ids must hold one id for each of the {n} images; got {len(ids)}")
    if len(set(ids)) != n:
        twice = next(item for position, item in enumerate(ids) if item in ids[:position])
        raise ValueError(f"sample_ids must be unique; got {twice!r} more than once")
    return ids


def _numpy(tensor: Tensor) -> np.ndarray:
    return tensor.cpu().numpy()
