"""One epoch: the steps, the validation, and the watch for a loss that is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from diffattn.seeding import seeded
from diffattn.statistics import wilson_interval
from diffattn.train.augment import Offsets, augment, epoch_offsets, epoch_order
from diffattn.train.objectives import cross_entropy
from diffattn.train.optim import learning_rate, set_learning_rate
from diffattn.train.setup import Run

CHECK_EVERY = 16
EVALUATION_BATCH = 256

Entry = dict[str, Any]

_HINT = "lower optim.lr, lengthen optim.warmup_epochs, or set optim.clip_norm"


def train_epoch(run: Run, epoch: int, advance: Callable[[Entry], None]) -> Entry:
    """One pass over the training images.

    Args:
        run: the run.
        epoch: counted from 1.
        advance: called after each step, with what is known.

    Returns:
        epoch, step (so far, over the whole run), lr of the last step, train_loss and train_accuracy: means over
        the epoch's images as they were trained on, augmented and with the weights of their step.
    """
    config, n = run.config, len(run.train)
    order = epoch_order(n, seed=config.seed, epoch=epoch)
    offsets = epoch_offsets(n, config.augment, seed=config.seed, epoch=epoch)
    totals = torch.zeros(2, device=run.fabric.device)
    recent: list[tuple[int, float, Tensor]] = []
    run.wrapped.train()
    random = has_randomness(run.model)
    step, lr = (epoch - 1) * run.steps_per_epoch, config.optim.lr
    for rows in order.split(config.optim.batch_size):
        lr = learning_rate(step, config.optim, steps_per_epoch=run.steps_per_epoch)
        set_learning_rate(run.optimizer, lr)
        with _seeded(random, run, step):
            loss, sums = _step(run, rows, offsets)
        totals += sums
        step += 1
        recent.append((step, lr, loss))
        if len(recent) == CHECK_EVERY:
            _check_finite(run, recent, epoch)
            recent.clear()
        advance({"epoch": epoch})
    _check_finite(run, recent, epoch)
    loss_sum, correct = _over_devices(run, totals)
    return {"epoch": epoch, "step": step, "lr": lr, "train_loss": loss_sum / n, "train_accuracy": correct / n}


def _step(run: Run, rows: Tensor, offsets: Offsets) -> tuple[Tensor, Tensor]:
    """One update from this device's share of a batch: its loss, and [sum of losses, number correct]."""
    config = run.config
    local, weight = shard(rows, rank=run.fabric.global_rank, devices=run.fabric.world_size)
    mine = Offsets(*(value[local] for value in offsets))
    images = augment(run.train.images[local], mine, crop_padding=config.augment.crop_padding)
    images = images.to(run.fabric.device, non_blocking=True).float().div_(255)
    labels = run.train.labels[local].to(run.fabric.device, non_blocking=True)
    logits = run.wrapped(images)
    loss = cross_entropy(logits, labels, label_smoothing=config.optim.label_smoothing)
    run.fabric.backward(loss * weight if weight != 1 else loss)
    if config.optim.clip_norm is not None:
        nn.utils.clip_grad_norm_(run.model.parameters(), config.optim.clip_norm)
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    loss = loss.detach()
    share = len(rows) * weight / run.fabric.world_size
    correct = (logits.detach().argmax(dim=1) == labels).sum() if weight else torch.zeros_like(loss)
    return loss, torch.stack([loss * share, correct.float()])


def shard(rows: Tensor, *, rank: int, devices: int) -> tuple[Tensor, float]:
    """A device's part of a batch, and the weight that makes the mean over devices the mean over the batch.

    A device for which a short batch has nothing takes the first row with weight 0, so that it takes part in the
    exchange of gradients.
    """
    local = rows[rank::devices]
    if len(local) == 0:
        return rows[:1], 0.0
    return local, len(local) * devices / len(rows)


@torch.no_grad()
def validate(run: Run, epoch: int) -> Entry:
    """Loss and accuracy on the validation images, in eval mode and float32, with the Wilson interval at 95 %."""
    totals = torch.zeros(2, device=run.fabric.device)
    run.wrapped.eval()
    mine = torch.arange(run.fabric.global_rank, len(run.val), run.fabric.world_size)
    for rows in mine.split(EVALUATION_BATCH):
        labels = run.val.labels[rows].to(run.fabric.device)
        logits = run.model(run.val.pixels(rows).to(run.fabric.device))
        totals[0] += cross_entropy(logits, labels, reduction="sum")
        totals[1] += (logits.argmax(dim=1) == labels).sum()
    run.wrapped.train()
    loss_sum, correct = _over_devices(run, totals)
    if not math.isfinite(loss_sum):
        raise ValueError(f"the validation loss must be finite; got {loss_sum} after epoch {epoch} ({_HINT})")
    share = wilson_interval(int(correct), len(run.val))
    return {
        "val_loss": loss_sum / len(run.val),
        "val_accuracy": share.value,
        "val_low": share.low,
        "val_high": share.high,
        "val_n": share.n,
    }


def has_randomness(model: nn.Module) -> bool:
    """Whether a training forward draws random numbers: dropout or stochastic depth above 0."""
    names = ("p", "drop_prob", "attn_dropout")
    return any((getattr(module, name, 0) or 0) > 0 for module in model.modules() for name in names)


def _check_finite(run: Run, recent: list[tuple[int, float, Tensor]], epoch: int) -> None:
    """Raise at the first loss that is not finite; looks at several steps at once, to wait for the device rarely."""
    if not recent:
        return
    losses = _over_devices(run, torch.stack([loss for _, _, loss in recent]))
    for (step, lr, _), loss in zip(recent, losses, strict=True):
        if not math.isfinite(loss):
            raise ValueError(
                f"the training loss must be finite; got {loss} in epoch {epoch}, step {step}, "
                f"at lr {lr:.3g} ({_HINT})"
            )


def _seeded(random: bool, run: Run, step: int) -> AbstractContextManager[None]:
    return seeded(run.config.seed, "step", step, run.fabric.global_rank) if random else nullcontext()


def _over_devices(run: Run, values: Tensor) -> list[float]:
    """The sum over all devices, as numbers."""
    total = run.fabric.all_reduce(values, reduce_op="sum")
    assert isinstance(total, Tensor)
    return total.tolist()
