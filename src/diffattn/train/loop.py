"""The training loop, on Lightning Fabric: it keeps devices and precision, the steps are ours."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from diffattn.config import TrainConfig
from diffattn.files import write_atomic, write_json_atomic
from diffattn.models.checkpoints import CONFIG, WEIGHTS, load_model, save_model
from diffattn.models.vit import VisionTransformer
from diffattn.train.epoch import Entry, train_epoch, validate
from diffattn.train.setup import Run, set_up
from diffattn.train.state import (
    STATE,
    RunState,
    collect_tensors,
    comparable,
    differences,
    load_state,
    restore_tensors,
    save_state,
)

HISTORY = "history.jsonl"
TRAIN_CONFIG = "train.json"


def train_model(
    config: TrainConfig,
    out: str | Path,
    *,
    resume: bool = True,
    progress: bool = False,
    on_epoch: Callable[[Entry], None] | None = None,
) -> VisionTransformer:
    """Train a classifier, and leave its checkpoint and history in a directory.

    Every epoch ends with a validation, a line of `history.jsonl` and a resumable state in `state/`. A run that
    was interrupted goes on after its last whole epoch and ends, on the same machine, with the weights that it
    would have had without the interruption, bit for bit. The validation images choose nothing: the model is the
    one after the last epoch. Validation is in float32, whatever precision trains.

    Args:
        config: what to train, on what, how.
        out: directory of the run: config.json and model.safetensors (see `load_model`), train.json,
            history.jsonl, state/.
        resume: go on where the run in `out` stopped (a finished run is only loaded); False starts it over.
        progress: show a progress bar.
        on_epoch: called with the history entry after each epoch, when its state is on disk.

    Returns:
        the trained model, in eval mode, on the CPU.

    Raises:
        ValueError: if `out` holds a run with another configuration or other data (naming what differs), or a
            model without a run; if the data do not fit the model; if the loss is not finite.
    """
    out = Path(out)
    state = _previous(config, out) if resume else None
    if state is not None and state.epoch == config.optim.epochs and (out / CONFIG).is_file():
        return load_model(out)
    run = set_up(config)
    if run.fabric.is_global_zero:
        if not resume:
            _clear(out)
        write_json_atomic(out / TRAIN_CONFIG, dataclasses.asdict(config))
    history: list[Entry] = []
    if state is not None:
        if state.fingerprint != run.train.fingerprint:
            raise ValueError(
                f"{out} holds a run on other training images (data {config.data.name!r} has changed); "
                "start it over (resume=False, --restart) or give another out"
            )
        restore_tensors(state.tensors, run.model, run.optimizer)
        history = state.history
        _write_history(run, out, history)
    with _bar(progress and run.fabric.is_global_zero, run, done=len(history)) as advance:
        for epoch in range(len(history) + 1, config.optim.epochs + 1):
            start = time.perf_counter()
            trained = train_epoch(run, epoch, advance)
            entry = trained | validate(run, epoch) | {"seconds": round(time.perf_counter() - start, 3)}
            history.append(entry)
            _save(run, out, history)
            if on_epoch is not None:
                on_epoch(entry)
    if run.fabric.is_global_zero:
        save_model(run.model, out)
    run.fabric.barrier()
    return load_model(out)


def _previous(config: TrainConfig, out: Path) -> RunState | None:
    state = load_state(out)
    if state is None:
        if (out / WEIGHTS).exists():
            raise ValueError(
                f"{out} holds a model but no training state ({STATE}); start it over (resume=False, --restart), "
                "or give another out"
            )
        return None
    found = differences(state.config, comparable(config))
    if found:
        raise ValueError(
            f"{out} holds a run with another configuration: {'; '.join(found)}; "
            "start it over (resume=False, --restart) or give another out"
        )
    return state


def _clear(out: Path) -> None:
    for name in (STATE, HISTORY, WEIGHTS, CONFIG):
        (out / name).unlink(missing_ok=True)


def _save(run: Run, out: Path, history: list[Entry]) -> None:
    """Write the state, then the history that it holds; one process writes, all wait."""
    if run.fabric.is_global_zero:
        tensors = collect_tensors(run.model, run.optimizer)
        save_state(out, RunState(len(history), comparable(run.config), run.train.fingerprint, history, tensors))
    _write_history(run, out, history)
    run.fabric.barrier()


def _write_history(run: Run, out: Path, history: list[Entry]) -> None:
    if run.fabric.is_global_zero:
        write_atomic(out / HISTORY, "".join(json.dumps(entry, allow_nan=False) + "\n" for entry in history))


@contextmanager
def _bar(shown: bool, run: Run, *, done: int) -> Iterator[Callable[[Entry], None]]:
    """A function to call after each step, which moves a progress bar where one is shown."""
    if not shown:
        yield lambda entry: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    epochs = run.config.optim.epochs
    with Progress(*columns) as bar:
        total = epochs * run.steps_per_epoch
        task = bar.add_task(run.model.name, total=total, completed=done * run.steps_per_epoch)
        yield lambda entry: bar.update(
            task, advance=1, description=f"{run.model.name} epoch {entry['epoch']}/{epochs}"
        )
