"""Checks whether a run can resume from its checkpoints."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from nalanda.common.errors import first_line
from nalanda.common.files import verify_manifest
from nalanda.config.load import load_config
from nalanda.config.model import language_model
from nalanda.config.schema import OptimConfig, RunConfig
from nalanda.convert.fit import empty_arms
from nalanda.train import checkpoint, tensor_files
from nalanda.train.checkpoint_dir import checkpoints_of, step_of, unsound_reason
from nalanda.train.ema import check_average
from nalanda.train.export import load_model_config
from nalanda.train.optim import build_optimizer


@dataclass
class Verdict:
    """Verdict on one checkpoint."""

    step: int
    whole: str
    """Answer to: does every file have the bytes that were written? "yes", or the problem."""
    finite: str
    """Answer to: is every weight and moment finite and at most `checkpoint.LARGEST`?"""
    loadable: str
    """Answer to: do weights and moments match the run's model and optimizer exactly?"""
    marked: str | None
    """Reason for which the run itself rejected it (`checkpoint.mark_unsound`); None: it did not."""

    @property
    def good(self) -> bool:
        return self.whole == self.finite == self.loadable == "yes" and self.marked is None


def verify(run_dir: Path) -> Iterator[Verdict]:
    """Yields a verdict on each checkpoint of a run, oldest first. Reads them completely, tensor by tensor.

    Raises:
        InputError: the folder is not a run, or has no checkpoints.
    """
    checkpoints = checkpoints_of(run_dir)
    recipe = run_dir / "config.yaml"
    config = load_config(recipe) if recipe.is_file() else None
    for path in checkpoints:
        yield Verdict(
            step=step_of(path),
            whole=verify_manifest(path) or "yes",
            finite=_answer_of(_find_unsound, path),
            loadable=_answer_of(_find_mismatch, path, config),
            marked=unsound_reason(path),
        )


def _answer_of(question: Callable[..., str | None], *arguments: Any) -> str:
    """The problem that `question` returns or raises; "yes" without one."""
    try:
        return question(*arguments) or "yes"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return first_line(error)


def _averages_of(path: Path) -> list[str]:
    """The names of the averages of the weights in a checkpoint."""
    return sorted({file.name.removesuffix(".safetensors") for file in path.glob("ema-*")})


def _find_unsound(path: Path) -> str | None:
    for name in ("model", "optimizer", *_averages_of(path)):
        for key, tensor in tensor_files.iterate_tensors(tensor_files.tensor_source(path, name)):
            # One tensor at a time: the memory is that of the largest.
            if problem := checkpoint.find_unsound({key: tensor}):
                return problem
    return None


def _build(path: Path, config: RunConfig | None) -> tuple[Any, Any]:
    """The model and optimizer that the checkpoint was saved from, on the meta device."""
    if config and config.distill.teacher and not (path / "config.json").exists():
        return empty_arms(config)  # of `nalanda linearize`, whose mixers have no config
    with torch.device("meta"):
        stored = load_model_config(path)
        model = language_model(stored).from_config(stored, dtype=torch.float32)
    return model, build_optimizer(model, config.optim if config else OptimConfig())


def _find_mismatch(path: Path, config: RunConfig | None) -> str | None:
    """The problem that would prevent loading; allocates no model."""
    model, optimizer = _build(path, config)
    record = json.loads((path / "trainer.json").read_bytes())
    for name in ("model", "optimizer", *_averages_of(path)):
        source = tensor_files.tensor_source(path, name)
        saved = tensor_files.shapes(source)
        if name == "model":
            checkpoint.check_weights(source, saved, model)
        elif name == "optimizer":
            checkpoint.check_moments(source, saved, model, optimizer, record.get("without_moments"))
        else:
            check_average(source, dict(model.named_parameters()))
    for file in sorted(path.glob("rank-*.pt")):
        checkpoint.load_rank(file)
    return None


def print_verdicts(run_dir: Path, as_json: bool) -> bool:
    """Prints the verdicts, each as soon as it is there or all as JSON. Returns whether all are good."""
    verdicts = []
    for verdict in verify(run_dir):
        verdicts.append(verdict)
        if not as_json:
            print_verdict(verdict)

    if as_json:
        records = [{**asdict(verdict), "good": verdict.good} for verdict in verdicts]
        print(json.dumps(records, indent=1))
    return all(verdict.good for verdict in verdicts)


def print_verdict(verdict: Verdict) -> None:
    """Prints a line for the checkpoint, and one for each problem."""
    parts = {"whole": verdict.whole, "finite": verdict.finite, "loadable": verdict.loadable}
    words = [name if answer == "yes" else f"not {name}" for name, answer in parts.items()]
    if verdict.marked is not None:
        words.append("marked")
    print(f"step-{verdict.step}: {', '.join(words)}", flush=True)
    for name, answer in [*parts.items(), ("marked", verdict.marked or "yes")]:
        if answer != "yes":
            print(f"    {name}: {answer}", flush=True)
