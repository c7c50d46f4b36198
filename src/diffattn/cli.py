"""The command line: one function a command; a command's own imports happen when it runs."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffattn import __version__
from diffattn.checks import require
from diffattn.registry import Registry

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

Command = Callable[[list[str]], None]

COMMANDS: Registry[Command] = Registry("command")
RESUMABLE = ("demo", "train", "finding")
SUMMARY = """usage: diffattn COMMAND [OPTIONS]

How sensitive is this model's attention, and what can be done about it?

  demo      train a ViT and a differential ViT on digits, audit both, write a page
  train     train a model from a preset or a YAML file
  attack    attack a model and keep the adversarial images
  audit     attack models, measure their attention, write records and a page
  report    write a page from records
  finding   run a study and write its tables
  list      list models, attacks, data, presets or findings

diffattn COMMAND --help says what a command takes.  diffattn --version"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0 when it did its work, 2 for a wrong word or value, 130 when interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(SUMMARY)
        return 0 if words else 2
    if words[0] == "--version":
        print(f"diffattn {__version__}")
        return 0
    # Third parties' deprecations are for their maintainers, not for who types a command.
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    try:
        COMMANDS[words[0]](words[1:])
    except KeyboardInterrupt:
        more = "; the same command goes on where it stopped" if words[0] in RESUMABLE else ""
        print(f"diffattn: interrupted{more}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output (head, less) has left; nothing is wrong, and nothing more can be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print(f"diffattn: {error}", file=sys.stderr)
        return 2
    return 0


def _parser(command: str, description: str) -> ArgumentParser:
    from jsonargparse import ArgumentParser

    return ArgumentParser(prog=f"diffattn {command}", description=description)


def _add_data(parser: ArgumentParser, *, default: str | None) -> None:
    parser.add_argument(
        "--data", type=str, required=default is None, default=default, help="a data set's name, or a Parquet file"
    )
    parser.add_argument("--split", type=str, default="test", help="which part of it")
    parser.add_argument("--limit", type=int | None, default=None, help="only the first so many images")
    parser.add_argument("--data-root", type=str | None, default=None, help="folder of data sets (DIFFATTN_DATA)")


def _add_attack(parser: ArgumentParser, *, default_eps: list[str]) -> None:
    parser.add_argument("--attack", type=str, default="pgd", help="pgd or fgsm")
    parser.add_argument("--eps", type=str, nargs="+", default=default_eps, help="budgets, such as 4/255")
    parser.add_argument("--norm", type=str, default="Linf", help="Linf or L2")
    parser.add_argument("--steps", type=int, default=20, help="gradient steps of pgd")
    parser.add_argument("--restarts", type=int, default=1, help="random restarts of pgd")
    parser.add_argument("--precision", type=str, default="float32", help="float32 or bfloat16 (the search only)")
    parser.add_argument("--batch-size", type=int, default=128, help="images at once")
    parser.add_argument("--seed", type=int, default=0, help="keys every random number")


def _load_data(options: Namespace, model: Any) -> Any:
    from diffattn.data.images import load_data

    return load_data(
        options.data,
        split=options.split,
        limit=options.limit,
        image_size=model.config.image_size,
        in_chans=model.config.in_chans,
        root=options.data_root,
    )


def _attack_of(options: Namespace) -> Any:
    from diffattn.experiments.study import make_attack

    chosen: dict[str, Any] = {"precision": options.precision}
    if options.attack != "fgsm":
        chosen |= {"steps": options.steps, "restarts": options.restarts}
    return make_attack(options.attack, **chosen)


def _writable(out: str | Path) -> Path:
    """The folder `out`, made and written to once, so that hours of work do not end at a closed door."""
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"--out must be a folder that can be written to; got {str(out)!r:.200}: {error.strerror}"
        ) from None
    return folder


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@COMMANDS.register("demo")
def demo(words: list[str]) -> None:
    """Train, audit and compare two models on digits."""
    parser = _parser(
        "demo", "Train a ViT and a differential ViT on scikit-learn's digits, audit both, write a page."
    )
    parser.add_argument("--out", type=str, default="runs/demo", help="folder of the runs and the page")
    options = parser.parse_args(words)
    from diffattn.experiments.demo import run_demo
    from diffattn.report.terminal import show_records

    _writable(options.out)
    records, page = run_demo(options.out, progress=sys.stderr.isatty(), report=_tell)
    show_records(records)
    print(f"\nPage: {page}")


@COMMANDS.register("train")
def train(words: list[str]) -> None:
    """Train from a preset or a YAML file, with options changed one by one."""
    from diffattn.config import TrainConfig, train_config_from_mapping
    from diffattn.experiments.options import add_train_arguments, train_config_of
    from diffattn.presets import preset_names, read_preset

    parser = _parser("train", "Train a model from a preset or a YAML file; every option of it can be changed.")
    parser.usage = "diffattn train PRESET --out DIR [--restart] [--model.depth 4] [--optim.lr 1e-3] ..."
    recipes = ", ".join(preset_names(studies=False))
    named = bool(words) and not words[0].startswith("-")
    base = train_config_from_mapping(read_preset(words[0])) if named else TrainConfig()
    parser.add_argument("preset", type=str, help=f"{recipes}, or a YAML file; comes first")
    parser.add_argument("--out", type=str, required=True, help="directory of the run; one that stopped goes on")
    parser.add_argument("--restart", action="store_true", help="start over even if --out holds a run")
    add_train_arguments(parser, base)
    options = parser.parse_args(words)
    require(named, "the preset comes before the options: diffattn train PRESET --out DIR ...")
    from diffattn.train.loop import HISTORY, train_model

    _writable(options.out)
    shown = sys.stderr.isatty()
    train_model(
        train_config_of(options.as_dict(), base),
        options.out,
        resume=not options.restart,
        progress=shown,
        on_epoch=None if shown else lambda entry: _tell(_epoch_line(entry)),
    )
    last = (Path(options.out) / HISTORY).read_text(encoding="utf-8").splitlines()[-1]
    print(_epoch_line(json.loads(last)))
    print(f"Model: {options.out}")


def _epoch_line(entry: dict[str, Any]) -> str:
    return (
        f"epoch {entry['epoch']}: training loss {entry['train_loss']:.4f}, validation accuracy "
        f"{entry['val_accuracy']:.4f} [{entry['val_low']:.4f}, {entry['val_high']:.4f}] (n = {entry['val_n']}), "
        f"{entry['seconds']:.1f} s"
    )


@COMMANDS.register("attack")
def attack(words: list[str]) -> None:
    """Attack one model; keep every image and what became of it."""
    parser = _parser("attack", "Attack a model, print its robust accuracy, keep the adversarial images.")
    parser.add_argument("model", type=str, help="a checkpoint directory")
    _add_data(parser, default=None)
    _add_attack(parser, default_eps=["4/255"])
    parser.add_argument("--out", type=str | None, default=None, help="folder for the images, samples and summary")
    options = parser.parse_args(words)
    from diffattn.experiments.attacking import attack_and_keep
    from diffattn.models.checkpoints import load_model
    from diffattn.report.terminal import show_attacks
    from diffattn.threat_model import make_threat

    budgets = [make_threat(options.norm, eps) for eps in options.eps]
    chosen = _attack_of(options)
    model = load_model(options.model)
    data = _load_data(options, model)
    if options.out is not None:
        _writable(options.out)
    facts = attack_and_keep(
        model,
        data,
        chosen,
        budgets,
        out=options.out,
        seed=options.seed,
        batch_size=options.batch_size,
        report=_tell,
    )
    show_attacks({options.model: facts})


@COMMANDS.register("audit")
def audit(words: list[str]) -> None:
    """Audit models on the same images and compare them with the first."""
    parser = _parser("audit", "Attack models, measure their attention, write a record each and one page.")
    parser.add_argument("models", type=str, nargs="+", help="checkpoint directories; the first is the reference")
    _add_data(parser, default=None)
    _add_attack(parser, default_eps=["1/255", "4/255"])
    parser.add_argument("--out", type=str, required=True, help="folder of the records and the page")
    parser.add_argument("--sensitivity-samples", type=int, default=64, help="images for gradients, 0 for none")
    parser.add_argument(
        "--lipschitz-samples", type=int, default=32, help="images for Lipschitz estimates, 0 for none"
    )
    parser.add_argument("--radius", type=float, nargs="*", default=[], help="balls, as shares of the tokens' norm")
    parser.add_argument(
        "--probes", type=int | str, default="auto", help="auto, exact, or a number of random probes"
    )
    options = parser.parse_args(words)
    from diffattn.audit.run import run_audit
    from diffattn.models.checkpoints import CONFIG, load_model
    from diffattn.report.html import write_report
    from diffattn.report.terminal import show_records
    from diffattn.threat_model import make_threat

    names = _distinct_names(options.models)
    budgets = [make_threat(options.norm, eps) for eps in options.eps]
    chosen = _attack_of(options)
    loaded = [load_model(path) for path in options.models]
    shapes = {(model.config.in_chans, model.config.image_size) for model in loaded}
    require(len(shapes) == 1, f"models must take images of one shape; got (in_chans, image_size) {sorted(shapes)}")
    data = _load_data(options, loaded[0])
    out = _writable(options.out)
    held = [name for name in (*names, ".") if (out / name / CONFIG).exists()]
    require(not held, f"--out must be a folder of its own; {out / held[0] if held else out} holds a model")
    records: list[Any] = []
    for path, name in zip(options.models, names, strict=True):
        records.append(
            run_audit(
                path,
                data,
                attacks=[chosen],
                budgets=budgets,
                out=out / name,
                name=name,
                reference=records[0] if records else None,
                sensitivity_samples=options.sensitivity_samples,
                lipschitz_samples=options.lipschitz_samples,
                radii=options.radius,
                probes=options.probes,
                seed=options.seed,
                batch_size=options.batch_size,
                report=_tell,
            )
        )
    page = write_report(records, out / "report.html")
    show_records(records)
    print(f"\nRecords and page: {page}")


def _distinct_names(paths: Sequence[str]) -> list[str]:
    """A folder name a model; one that is taken gets the first number that is free."""
    wanted = [Path(path).resolve().name for path in paths]
    names: list[str] = []
    for name in wanted:
        free = (f"{name}-{place}" for place in range(2, len(paths) + len(wanted) + 2))
        taken = {*names, *wanted}
        names.append(name if name not in names else next(one for one in free if one not in taken))
    return names


@COMMANDS.register("report")
def report(words: list[str]) -> None:
    """One page from records."""
    parser = _parser("report", "Write one self-contained page that compares audit records.")
    parser.add_argument("records", type=str, nargs="+", help="record directories; the first is compared with")
    parser.add_argument("--out", type=str, default="report.html", help="the page")
    options = parser.parse_args(words)
    from diffattn.report.html import write_report

    print(write_report(options.records, options.out))


@COMMANDS.register("finding")
def finding(words: list[str]) -> None:
    """A study, run or resumed."""
    parser = _parser("finding", "Run a study (or resume it) and write its tables and page.")
    parser.add_argument("name", type=str, help="see diffattn list findings")
    parser.add_argument("--out", type=str, required=True, help="folder of the runs")
    parser.add_argument("--data-root", type=str | None, default=None, help="folder of data sets (DIFFATTN_DATA)")
    options = parser.parse_args(words)
    from diffattn.experiments.findings import FINDINGS

    run = FINDINGS[options.name]
    path = run(options.out, root=options.data_root, progress=sys.stderr.isatty(), report=_tell)
    print(path.read_text(encoding="utf-8"))
    print(f"Summary: {path}")


LISTS = ("models", "attacks", "data", "presets", "findings")


@COMMANDS.register("list")
def list_names(words: list[str]) -> None:
    """What there is to name."""
    parser = _parser("list", f"List {', '.join(LISTS)}.")
    parser.add_argument("what", type=str, help=" or ".join(LISTS))
    what = parser.parse_args(words).what
    require(what in LISTS, f"list shows {', '.join(LISTS)}; got {what!r}")
    if what == "models":
        from diffattn.models.zoo import list_models
        from diffattn.report.terminal import models_table, show

        show(models_table(list_models()))
        return
    from diffattn.attacks import ATTACKS
    from diffattn.data.images import DATA
    from diffattn.experiments.findings import FINDINGS
    from diffattn.presets import preset_names

    found = {"attacks": ATTACKS, "data": DATA, "findings": FINDINGS, "presets": preset_names(studies=False)}
    print("\n".join(found[what]))
