"""Whether a run can be resumed from its checkpoints, and why not."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from nalanda.common.errors import first_line
from nalanda.common.files import verify_manifest
from nalanda.config.load import load_config
from nalanda.config.schema import OptimConfig
from nalanda.train import checkpoint
from nalanda.train.checkpoint_dir import checkpoints_of, step_of, unsound_reason
from nalanda.train.export import load_model_config as model_config
from nalanda.train.optim import build_optimizer


@dataclass
class Verdict:
    """Of one checkpoint; each answer is "yes", or what is wrong."""

    step: int
    whole: str
    """Every file has the bytes that were written."""
    finite: str
    """No weight or moment is NaN, infinite or beyond `checkpoint.LARGEST`."""
    loadable: str
    """Weights and moments fit the model and the optimizer of the run, and nothing else is in the files."""
    marked: str | None
    """Why the run itself left it behind (`checkpoint.mark_unsound`)."""

    @property
    def good(self) -> bool:
        return self.whole == self.finite == self.loadable == "yes" and self.marked is None


def verify(run_dir: Path) -> Iterator[Verdict]:
    """A verdict on each checkpoint of a run, oldest first. Reads all of their bytes, one tensor at a time.

    Raises:
        InputError: the folder is no run, or has no checkpoints.
    """
    found = checkpoints_of(run_dir)
    recipe = run_dir / "config.yaml"
    optim = load_config(recipe).optim if recipe.is_file() else OptimConfig()
    for path in found:
        yield Verdict(
            step=step_of(path),
            whole=verify_manifest(path) or "yes",
            finite=_answer(_spoilt, path),
            loadable=_answer(_misfit, path, optim),
            marked=unsound_reason(path),
        )


def _answer(question, *arguments) -> str:
    try:
        return question(*arguments) or "yes"
    except (OSError, ValueError, KeyError) as error:
        return first_line(error)


def _spoilt(path: Path) -> str | None:
    for name in ("model", "optimizer"):
        for key, tensor in checkpoint.tensors(checkpoint.source_of(path, name)):
            if problem := checkpoint.find_unsound({key: tensor}):
                return problem
    return None


def _misfit(path: Path, optim: OptimConfig) -> str | None:
    """What loading would refuse; nothing is allocated for it."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(path), dtype=torch.float32)
    record = json.loads((path / "trainer.json").read_text())
    for name in ("model", "optimizer"):
        source = checkpoint.source_of(path, name)
        saved = checkpoint.shapes(source)
        if name == "model":
            checkpoint.check_weights(source, saved, model)
        else:
            optimizer = build_optimizer(model, optim)
            checkpoint.check_moments(source, saved, model, optimizer, record.get("without_moments"))
    for file in sorted(path.glob("rank-*.pt")):
        checkpoint.load_rank(file)
    return None


def print_verdict(verdict: Verdict) -> None:
    """A line for each checkpoint, and one for each thing that is wrong with it."""
    parts = {"whole": verdict.whole, "finite": verdict.finite, "loadable": verdict.loadable}
    said = ", ".join(name if answer == "yes" else f"not {name}" for name, answer in parts.items())
    print(f"step-{verdict.step}: {said}{', marked' * (verdict.marked is not None)}", flush=True)
    for name, answer in [*parts.items(), ("marked", verdict.marked or "yes")]:
        if answer != "yes":
            print(f"    {name}: {answer}", flush=True)


def verdicts_to_json(verdicts: list[Verdict]) -> str:
    return json.dumps([{**asdict(v), "good": v.good} for v in verdicts], indent=1)
