"""What every attack shares: its signature, its result, and a call of the model that leaves no trace in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from diffattn.registry import Registry
from diffattn.seeding import seeded
from diffattn.threat_model import Threat
from diffattn.validation import check_logits

Model = Callable[[Tensor], Any]
Progress = Callable[[int, int], None]

STATUSES = ("clean_wrong", "broken", "survived", "error")


@dataclass(frozen=True, eq=False)
class AttackResult:
    """What became of each of n samples under one attack and one budget.

    Args:
        adversarial: [n, ...] images: the confirmed point of a broken sample, the clean image of a clean-wrong
            one, the point of highest loss of a survivor, the first non-finite point of an error.
        status: [n] of "clean_wrong", "broken", "survived", "error". An error met a non-finite logit or
            gradient and no other point broke it; it counts as neither broken nor robust.
        distance: [n] float64, from the clean image to `adversarial`, in the threat's norm.
        clean_prediction: [n] class of the clean image, -1 where its logits are not finite.
        prediction: [n] class of `adversarial`, -1 where its logits are not finite.
        labels: [n] true classes.
        targets: [n] target classes, or None for an untargeted attack.
        forwards: [n] forward passes that each sample took, scoring and confirmation included.
        backwards: [n] backward passes that each sample took.
        flags: reasons not to trust the figures, each "word: sentence".
        attack: the attack's name and options.
        norm: name of the threat model.
        eps: the budget as text, such as "4/255".
        eps_value: the budget as a float, in pixel units.
        sample_ids: [n] ids that key the noise.
    """

    adversarial: Tensor
    status: np.ndarray
    distance: np.ndarray
    clean_prediction: np.ndarray
    prediction: np.ndarray
    labels: np.ndarray
    targets: np.ndarray | None
    forwards: np.ndarray
    backwards: np.ndarray
    flags: tuple[str, ...]
    attack: dict[str, Any]
    norm: str
    eps: str
    eps_value: float
    sample_ids: tuple[int | str, ...]

    def __len__(self) -> int:
        return len(self.status)

    @property
    def n_clean_correct(self) -> int:
        """Samples that the model gets right when left alone: the denominator of `asr`."""
        return int((self.clean_prediction == self.labels).sum())

    @property
    def broken(self) -> int:
        """Clean-correct samples for which a confirmed adversarial image was found."""
        return int((self.status == "broken").sum())

    @property
    def survived(self) -> int:
        """Clean-correct samples that the attack did not break."""
        return int((self.status == "survived").sum())

    @property
    def errors(self) -> int:
        """Samples with non-finite values, clean or under attack, that no point broke."""
        return int((self.status == "error").sum())

    @property
    def asr(self) -> float:
        """Attack success rate, broken / clean-correct; NaN without clean-correct samples.

        With errors among the clean-correct it is the low end of a range.
        """
        return self.broken / self.n_clean_correct if self.n_clean_correct else float("nan")

    @property
    def robust_accuracy(self) -> float:
        """Survived / all samples."""
        return self.survived / len(self)


class Attack(Protocol):
    """An attack is configured once and called with a model, images and a threat model."""

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
        """Attack every clean-correct sample inside the budget."""
        ...


ATTACKS: Registry[Callable[..., Attack]] = Registry("attack")


@contextmanager
def guarded(model: Model, *key: int | str) -> Iterator[None]:
    """Differentiate through a model and leave no trace in it, whatever happens inside.

    Inside, gradients are on, inference mode and autocast are off, the parameters of an `nn.Module` are frozen
    and the global generators are seeded by the key. Afterwards `requires_grad`, every buffer (batch-norm
    statistics of a model in train mode), the generators and the modes are what they were; train and eval flags,
    and `.grad`, are never touched.

    Raises:
        ValueError: if the model's parameters or buffers were made under `torch.inference_mode()`.
    """
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    parameters = [(p, p.requires_grad) for module in modules for p in module.parameters(recurse=False)]
    slots = [(m, name, b) for m in modules for name, b in m._buffers.items() if b is not None]
    if any(tensor.is_inference() for tensor in [p for p, _ in parameters] + [b for _, _, b in slots]):
        raise ValueError(
            "the model's parameters must be normal tensors; got inference tensors: "
            "build or load the model outside torch.inference_mode()"
        )
    with torch.inference_mode(False), torch.enable_grad(), _no_autocast(), seeded(*key):
        before = [buffer.detach().clone() for _, _, buffer in slots]
        try:
            for parameter, _ in parameters:
                parameter.requires_grad_(False)
            yield
        finally:
            for parameter, required in parameters:
                parameter.requires_grad_(required)
            with torch.no_grad():
                for (module, name, buffer), value in zip(slots, before, strict=True):
                    buffer.copy_(value)
                    module._buffers[name] = buffer


@contextmanager
def _no_autocast() -> Iterator[None]:
    """Turn the caller's autocast off, on the CPU and on the accelerator; it would reach a backward pass too."""
    accelerator = torch.accelerator.current_accelerator()
    with ExitStack() as stack:
        for device_type in {"cpu", accelerator.type if accelerator else "cpu"}:
            stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


def logits_of(model: Model, points: Tensor) -> Tensor:
    """The model's logits [batch, classes] in float32 or wider, `.logits` of a Hugging Face output unwrapped.

    The model gets a copy, so that one that normalises in place does not write into the images.
    """
    output = model(points.clone())
    if not isinstance(output, Tensor) and isinstance(getattr(output, "logits", None), Tensor):
        output = output.logits
    check_logits(output, batch=len(points))
    return output.float() if torch.finfo(output.dtype).bits < 32 else output
