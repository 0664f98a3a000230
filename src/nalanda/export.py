"""A checkpoint as others load it: plain safetensors and all that goes with them."""

import contextlib
import importlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from nalanda import checkpoint, metrics
from nalanda.errors import InputError


def find_checkpoint(path: str | Path, step: int | None = None) -> Path:
    """The checkpoint at `path`, or of the run there: of `step`, or the newest that is whole.

    Raises:
        InputError: there is none, or what there is is damaged.
    """
    path = Path(path)
    folder = path / "checkpoints"
    if not folder.is_dir():
        if step is not None or not (path / "manifest.json").is_file():
            raise InputError(
                f"{path}: expected a run's folder, or one of its checkpoints/step-N without --step"
            )
        found = path
    elif step is None:
        found = checkpoint.latest(folder)
        if found is None:
            raise InputError(f"{folder}: there is no whole checkpoint")
        return found
    else:
        found = folder / f"step-{step}"
        if not found.is_dir():
            there = ", ".join(str(checkpoint.step_of(p)) for p in checkpoint.steps(folder)) or "none"
            raise InputError(f"{folder}: no step {step}; there are {there}")
    if problem := checkpoint.verify(found):
        raise InputError(f"{found}: damaged: {problem}")
    return found


def export(
    path: Path,
    out: Path,
    facts: dict[str, Any] | None = None,
    *,
    step: int | None = None,
    replace: bool = False,
) -> Path:
    """Writes a checkpoint as a model folder of transformers' kind; `path` and `step` as `find_checkpoint` has
    them.

    Weights in safetensors, config, the model's code, generation config, tokenizer, and how it was trained:
    the recipe (config.yaml), run.json (`facts`, by default the run's) and a model card. `out` is there when
    all of it is.

    Raises:
        InputError: no such checkpoint; `out` exists and `replace` is False.
    """
    found = find_checkpoint(path, step)
    run_dir = found.resolve().parents[1]
    if out.exists() and not replace:
        raise InputError(f"{out} exists; choose another folder")
    config = load_config(found)
    with torch.device("meta"):  # what to write beside the weights, and which of them are tied
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    part = out.with_name(f".tmp-{out.name}")
    shutil.rmtree(part, ignore_errors=True)
    part.parent.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(part, state_dict=checkpoint.weights(found))
    if (run_dir / "tokenizer").is_dir():
        shutil.copytree(run_dir / "tokenizer", part, dirs_exist_ok=True)
    if (run_dir / "config.yaml").is_file():
        shutil.copy(run_dir / "config.yaml", part)
    facts = facts if facts is not None else metrics.read_facts(run_dir)
    here = ("host", "pid")  # nobody's business where the model is copied to
    facts = {k: v for k, v in facts.items() if k not in here} | {"step": checkpoint.step_of(found)}
    metrics.write_facts(part, facts)
    (part / "README.md").write_text(card(run_dir, found, facts, out.name), encoding="utf-8")
    for file in part.rglob("*"):
        checkpoint.sync(file)
    checkpoint.sync(part)
    old = out.with_name(f".tmp-{out.name}-old")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        out.rename(old)
    part.rename(out)
    shutil.rmtree(old, ignore_errors=True)
    return out


def load_config(path: Path) -> Any:
    """A checkpoint's config; those of flash-linear-attention are known once that is imported."""
    kind = json.loads((path / "config.json").read_text()).get("model_type")
    if kind not in CONFIG_MAPPING:
        with contextlib.suppress(Exception):
            importlib.import_module("fla")
    try:
        return AutoConfig.from_pretrained(path)
    except (ValueError, KeyError, OSError):
        raise InputError(
            f"{path}: models of type {kind} need flash-linear-attention, or are not known"
        ) from None


def card(run_dir: Path, path: Path, facts: dict[str, Any], name: str) -> str:
    """The model card: what it is, what it was trained on and how it did, and how to load it."""
    recipe = {}
    if (run_dir / "config.yaml").is_file():
        recipe = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
    shape = json.loads((path / "config.json").read_text())
    state = json.loads((path / "trainer.json").read_text())
    lines = list(metrics.read(run_dir / "metrics.jsonl")) if (run_dir / "metrics.jsonl").is_file() else []
    last = {
        key: next((line for line in reversed(lines) if key in line and line["step"] <= facts["step"]), None)
        for key in ("loss", "val_loss")
    }
    keys = (
        "model_type",
        "mixer",
        "feature_map",
        "hidden_size",
        "num_hidden_layers",
        "num_heads",
        "vocab_size",
    )
    data, train = recipe.get("data", {}), recipe.get("train", {})
    corpus = data.get("source") or ", ".join(str(part.get("source")) for part in data.get("mixture") or [])
    rows = [
        ("parameters", f"{facts['parameters']:,}" if "parameters" in facts else None),
        *((key.replace("_", " "), shape.get(key)) for key in keys),
        ("data", corpus),
        ("context", data.get("seq_len") and f"{data['seq_len']} tokens"),
        ("tokens seen", f"{state['tokens']:,} in {facts['step']:,} steps" if "tokens" in state else None),
        ("precision", train.get("precision")),
        ("training loss", last["loss"] and f"{last['loss']['loss']:.4f} at step {last['loss']['step']}"),
        (
            "validation loss",
            last["val_loss"]
            and f"{last['val_loss']['val_loss']:.4f}, perplexity {last['val_loss']['val_ppl']:.2f}, "
            f"at step {last['val_loss']['step']}",
        ),
        ("written with", ", ".join(f"{k} {v}" for k, v in facts.get("versions", {}).items())),
    ]
    table = "\n".join(f"| {key} | {_cell(value)} |" for key, value in rows if value not in (None, "", []))
    ours = shape.get("model_type") == "nalanda"
    trust = ", trust_remote_code=True" if ours else ""
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---

# {name}

A causal language model, pretrained with Nalanda. `config.yaml` is the recipe that trained it.

| | |
|---|---|
{table}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}"{trust})
tokenizer = AutoTokenizer.from_pretrained("{name}")
```

It has been trained to continue text and nothing else: it follows no instructions, and repeats what its corpus
holds, errors and prejudice included.
"""


def _cell(value: Any) -> str:
    if isinstance(value, list):  # one mixer a layer
        names = dict.fromkeys(map(str, value))
        return ", ".join(f"{name} × {list(map(str, value)).count(name)}" for name in names)
    return str(value).replace("|", "\\|").replace(os.linesep, " ")
