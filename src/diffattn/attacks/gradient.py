"""FGSM and PGD: one loop of projected steepest ascent on the samples that still stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import torch
from torch import Tensor

from diffattn.attacks.base import ATTACKS, AttackResult, Model, Progress, guarded
from diffattn.attacks.ledger import Ledger
from diffattn.attacks.losses import LOSSES, Loss, choose_loss
from diffattn.checks import require, require_positive_integer
from diffattn.config import parse_eps
from diffattn.threat_model import Threat

Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class GradientAttack:
    """x_{k+1} = Pi(x_k + alpha d(grad_x loss(x_k))), from a start x_0 in the budget; made by `PGD` and `FGSM`.

    Pi is the threat model's projection and d its steepest ascent (the sign for Linf, g / ||g||_2 for L2). Every
    point x_0 .. x_steps is scored. A sample whose prediction meets the goal is recomputed at once, without
    autocast, and leaves the loop if that confirms it; only survivors are attacked further, by the next step and
    by the next restart. A survivor's adversarial image is the point of highest loss seen.
    """

    name: str
    steps: int
    restarts: int
    step_size: str | float | Fraction | None
    loss: str | Loss
    random_start: bool
    precision: Precision

    def __post_init__(self) -> None:
        """Check every option against its range."""
        require_positive_integer("steps", self.steps)
        require_positive_integer("restarts", self.restarts)
        if self.step_size is not None:
            size = parse_eps(self.step_size, name="step_size")
            require(size > 0, f"step_size must be above 0, in pixel units; got {self.step_size!r}")
        if isinstance(self.loss, str):
            LOSSES[self.loss]
        require(isinstance(self.random_start, bool), f"random_start must be a bool; got {self.random_start!r}")
        require(
            self.random_start or self.restarts == 1,
            f"restarts must be 1 without random_start, all of them being alike; got {self.restarts}",
        )
        require(
            self.precision in ("float32", "bfloat16"),
            f"precision must be 'float32' or 'bfloat16'; got {self.precision!r}",
        )

    def __call__(
        self,
        model: Model,
        images: Tensor,
        labels: Tensor,
        threat: Threat,
        *,
        targets: Tensor | None = None,
        seed: int = 0,
        sample_ids: Sequence[int | str] | None = None,
        batch_size: int = 128,
        progress: Progress | None = None,
    ) -> AttackResult:
        """Attack every clean-correct sample inside the budget.

        Args:
            model: any callable from [0, 1] images to logits [batch, classes], or to an object with `.logits`. It
                gets images of any device and is left as it was found; put it in eval mode first.
            images: [n, ...] float32 or float64 pixels in [0, 1].
            labels: [n] int64 true classes.
            threat: the budget, `Linf` or `L2`.
            targets: [n] int64 classes: a sample is broken when its prediction is its target. None: when its
                prediction is not its label.
            seed: with the sample's id, the attack's name and the restart, it keys the random start.
            sample_ids: [n] unique ints or strings; 0..n-1 by default.
            batch_size: most samples in one pass; memory and speed depend on it, verdicts do not.
            progress: called with (done, total) after every micro-batch, counted in samples times restarts.

        Raises:
            ValueError: for inputs out of range, targets that are labels, a model that gives no logits or no
                gradient, or one whose parameters are inference tensors.
        """
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ValueError(f"seed must be an integer; got {seed!r}")
        with guarded(model, seed, self.name):
            ledger = Ledger(
                model,
                images,
                labels,
                threat,
                targets=targets,
                sample_ids=sample_ids,
                batch_size=batch_size,
            )
            loss, flag = choose_loss(self.loss, num_classes=ledger.num_classes, targeted=targets is not None)
            ledger.flags.extend([flag] if flag else [])
            n = len(ledger.labels)
            for restart in range(self.restarts):
                remaining = ledger.to_attack()
                done = n * (restart + 1) - len(remaining)
                for index in ledger.micro_batches(remaining):
                    self._climb(ledger, index, loss, self._start(ledger, index, seed, restart))
                    done += len(index)
                    if progress is not None:
                        progress(done, n * self.restarts)
                if progress is not None and not len(remaining):
                    progress(done, n * self.restarts)
            if self.precision == "bfloat16":
                ledger.rescore()
            return ledger.result(self._options(threat, seed))

    def _start(self, ledger: Ledger, index: Tensor, seed: int, restart: int) -> Tensor:
        """Where a restart begins: a keyed random point of the budget, or the clean images."""
        clean = ledger.clean[index]
        if not self.random_start:
            return clean
        ids = [ledger.sample_ids[position] for position in index.tolist()]
        return ledger.threat.random_start(clean, ids, seed, self.name, restart)

    def _climb(self, ledger: Ledger, index: Tensor, loss: Loss, points: Tensor) -> None:
        """Ascend from the points until every sample is broken or the steps are used up.

        The loss is summed, never averaged: a sample's gradient does not depend on how many others there are.
        """
        threat, size = ledger.threat, self._step_size(ledger.threat)
        clean = ledger.clean[index]
        for step in range(self.steps + 1):
            last = step == self.steps
            points = points.detach().requires_grad_(not last)
            with torch.set_grad_enabled(not last):
                logits = ledger.forward(points, index, autocast=self.precision == "bfloat16")
                values = _checked_loss(loss(logits, *ledger.goals(index)), len(index))
            broken = ledger.observe(points.detach(), index, logits, values)
            if last or broken.all():
                return
            gradient = ledger.observe_gradient(points.detach(), index, _input_gradient(values, points))
            points = points.detach()
            if broken.any():
                stands = ~broken
                points, gradient = points[stands], gradient[stands]
                clean, index = clean[stands], index[stands]
            points = threat.project(points + size * threat.step(gradient), clean)

    def _step_size(self, threat: Threat) -> float:
        if self.step_size is not None:
            return float(parse_eps(self.step_size))
        return threat.eps if self.steps == 1 else 2.5 * threat.eps / self.steps

    def _options(self, threat: Threat, seed: int) -> dict[str, Any]:
        """The attack as a record writes it down, with the step size that was used."""
        return {
            "name": self.name,
            "steps": self.steps,
            "restarts": self.restarts,
            "step_size": self._step_size(threat),
            "loss": self.loss if isinstance(self.loss, str) else getattr(self.loss, "__name__", repr(self.loss)),
            "random_start": self.random_start,
            "precision": self.precision,
            "seed": seed,
        }


@ATTACKS.register("pgd")
def PGD(
    *,
    steps: int = 20,
    restarts: int = 1,
    step_size: str | float | Fraction | None = None,
    loss: str | Loss = "cross_entropy",
    random_start: bool = True,
    precision: Precision = "float32",
) -> GradientAttack:
    """Projected gradient descent.

    Args:
        steps: gradient steps of each restart.
        restarts: independent runs, each from its own random start; only survivors go on to the next.
        step_size: length of a step in the threat's norm, in pixel units, as text ("1/255") or a number;
            2.5 eps / steps by default, as in the source (eps where there is one step).
        loss: a name in `LOSSES`, or a function (logits, labels, targets) -> [batch] to be maximised.
        random_start: start every restart, the first too, at a random point of the budget; else at the image.
        precision: "bfloat16" searches under autocast; verdicts are recomputed without it all the same.
            "float32" means no autocast: a float64 model stays float64.

    Raises:
        ValueError: for an option out of its range.

    Source: Madry et al. (2018), "Towards deep learning models resistant to adversarial attacks".
    """
    return GradientAttack(
        name="pgd",
        steps=steps,
        restarts=restarts,
        step_size=step_size,
        loss=loss,
        random_start=random_start,
        precision=precision,
    )


@ATTACKS.register("fgsm")
def FGSM(*, loss: str | Loss = "cross_entropy", precision: Precision = "float32") -> GradientAttack:
    """The fast gradient sign method: the loop of `PGD` with one step of length eps from the clean image.

    Under `L2` it is the fast gradient method, x + eps g / ||g||_2.

    Args:
        loss: a name in `LOSSES`, or a function (logits, labels, targets) -> [batch] to be maximised.
        precision: "float32", or "bfloat16" to search under autocast.

    Raises:
        ValueError: for an option out of its range.

    Source: Goodfellow et al. (2015), "Explaining and harnessing adversarial examples".
    """
    return GradientAttack(
        name="fgsm",
        steps=1,
        restarts=1,
        step_size=None,
        loss=loss,
        random_start=False,
        precision=precision,
    )


def _checked_loss(values: Tensor, batch: int) -> Tensor:
    if not isinstance(values, Tensor) or tuple(values.shape) != (batch,):
        got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"loss must return one value for each of the {batch} samples; got {got}")
    return values


def _input_gradient(values: Tensor, points: Tensor) -> Tensor:
    """The gradient of the summed loss in the points; parameters get none."""
    wanted = "the model's logits must depend differentiably on the images"
    if not values.requires_grad:
        raise ValueError(f"{wanted}; got logits without a gradient (detached, or computed under no_grad?)")
    (gradient,) = torch.autograd.grad(values.sum(), points, allow_unused=True)
    if gradient is None:
        raise ValueError(f"{wanted}; got logits that do not depend on them")
    return gradient
