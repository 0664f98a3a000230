"""Exports a checkpoint as a transformers model folder, and uploads it to the hub."""

import contextlib
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import EvalResult, HfApi, ModelCardData, get_token
from nalanda_kernels import import_fla, keep_model_types
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from nalanda.common.errors import InputError, SourceUnavailable, first_line, output_folder
from nalanda.common.files import sync
from nalanda.common.retry import transient
from nalanda.common.text import duration, redact
from nalanda.common.versions import list_versions
from nalanda.config.load import load_config
from nalanda.config.model import in_one_line, is_encoder, language_model
from nalanda.data.hub import is_hub_id
from nalanda.model.state import fingerprint
from nalanda.train import tensor_files
from nalanda.train.checkpoint_dir import find_checkpoint, step_of
from nalanda.train.log import read_facts, read_metrics, with_hours, write_facts
from nalanda.train.loss import describe_perplexity


def export(
    path: Path,
    out: Path,
    facts: dict[str, Any] | None = None,
    *,
    step: int | None = None,
    replace: bool = False,
    name: str | None = None,
    config: PreTrainedConfig | None = None,
) -> Path:
    """Writes a checkpoint (`path` and `step` as for `find_checkpoint`) as the transformers model folder
    `out`.

    It has the weights in safetensors, config, the model's code, generation config, tokenizer, the recipe
    (config.yaml), run.json (`facts`, by default the run's) and a model card. `out` appears once it is
    complete. A checkpoint that was copied out of its run gets neither tokenizer nor recipe, which a line on
    stderr says.

    name: of the model on the hub; without it the card takes the folder's, or the run's for "final".
    config: the model's, if it is at hand; by default the checkpoint's.

    Raises:
        InputError: no such checkpoint; `out` exists and `replace` is False.
    """
    found = find_checkpoint(path, step)
    run_dir = found.resolve().parents[1]
    if config is None:
        config = _config_of_run(found, run_dir)
    if absent := [name for name in ("tokenizer", "config.yaml") if not (run_dir / name).exists()]:
        print(
            f"{found}: {run_dir} has no {' and no '.join(absent)}, so the model is written without; export "
            "from the run's folder, or copy its tokenizer and config.yaml there",
            file=sys.stderr,
        )
    with (
        in_one_line(str(found)),
        torch.device("meta"),
    ):  # for the files beside the weights, and tied names
        model = language_model(config).from_config(config, dtype=torch.float32)
    with new_folder(out, replace) as part:
        model.save_pretrained(part, state_dict=tensor_files.read_weights(found))
        if (run_dir / "tokenizer").is_dir():
            sums = shutil.ignore_patterns("manifest.json")  # holds for the run's folder only
            shutil.copytree(run_dir / "tokenizer", part, dirs_exist_ok=True, ignore=sums)
            ours = config.model_type == "nalanda"
            pad_batches(part, "right" if is_encoder(config) else "left", token_types=not ours)
        if (run_dir / "config.yaml").is_file():
            shutil.copy(run_dir / "config.yaml", part)
        facts = facts if facts is not None else read_facts(run_dir)
        here = ("host", "pid")  # private, and of no use in a copy
        facts = {k: v for k, v in facts.items() if k not in here} | {"step": step_of(found)}
        write_facts(part, facts)
        title = name or (run_dir.name if out.name == "final" else out.name)
        text = model_card(run_dir, found, facts, title, find_scores(run_dir, part), name or ".")
        (part / "README.md").write_text(text, encoding="utf-8")
    return out


def _config_of_run(checkpoint: Path, run_dir: Path) -> Any:
    """`load_model_config`, with the plugins of the run's recipe."""
    recipe = run_dir / "config.yaml"
    if recipe.is_file():
        with contextlib.suppress(InputError):  # a recipe of another version
            load_config(recipe)
    return load_model_config(checkpoint)


def pad_batches(folder: Path, side: str = "left", *, token_types: bool = True) -> None:
    """Makes the tokenizer of a model folder pad on this side, with eos if it has no pad token. Generation
    needs the left. The run's own tokenizer stays unchanged: training pads nothing.

    token_types: whether the model takes `token_type_ids`, if the tokenizer gives them."""
    file, older = folder / "tokenizer_config.json", folder / "special_tokens_map.json"
    if not file.is_file():
        return
    settings = json.loads(file.read_text(encoding="utf-8"))
    tokens = json.loads(older.read_text(encoding="utf-8")) if older.is_file() else {}
    tokens |= {name: settings[name] for name in ("eos_token", "pad_token") if settings.get(name)}
    settings |= {
        "padding_side": side,
        "pad_token": tokens.get("pad_token") or tokens.get("eos_token"),
    }
    if not token_types:
        settings["model_input_names"] = ["input_ids", "attention_mask"]
    file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextlib.contextmanager
def new_folder(out: Path, replace: bool = False) -> Iterator[Path]:
    """Yields a folder to fill. It becomes `out` when the block ends, and is removed if the block fails.

    Raises:
        InputError: `out` exists and `replace` is False.
    """
    if os.path.lexists(out) and not replace:
        raise InputError(f"{out} exists; choose another folder")
    output_folder(out.parent, "the folder to make:")
    part, old = out.with_name(f".tmp-{out.name}"), out.with_name(f".tmp-{out.name}-old")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    for file in part.rglob("*"):
        sync(file)
    sync(part)
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        out.rename(old)
    part.rename(out)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def hub_errors(what: str) -> Iterator[None]:
    """Converts the errors of calls to the Hugging Face hub.

    Raises:
        SourceUnavailable: the hub does not answer.
        InputError: the hub refuses, or has no such repository.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # the hub's libraries have no common base class
        reason = redact(first_line(error))
        if transient(error):
            raise SourceUnavailable(
                f"{what}: the hub does not answer, try again later ({reason})"
            ) from None
        status = getattr(getattr(error, "response", None), "status_code", None)
        hint = "; does the token of HF_TOKEN or `hf auth login` allow it?" * (status in (401, 403))
        raise InputError(f"{what}: the hub refuses ({reason}){hint}") from None


def push(
    path: Path, out: Path, repo: str, *, step: int | None = None, private: bool = False
) -> str:
    """Exports, and uploads the folder to the hub repository `repo`, OWNER/NAME, which is created if needed.

    Prints the uploaded files on stderr. Returns the URL of the commit.

    Raises:
        InputError: as `export`; no token, a token without write access, or `private` and a public repository.
        SourceUnavailable: the hub does not answer.
    """
    if not is_hub_id(repo):
        raise InputError(f"{repo!r} is not a repository of the hub: write OWNER/NAME")
    if get_token() is None:
        raise InputError("no token for the hub: set HF_TOKEN, or run `hf auth login`")
    find_checkpoint(path, step)
    if os.path.lexists(out):
        raise InputError(f"{out} exists; choose another folder")
    api = HfApi()
    with hub_errors(repo):  # first, so that a refusal costs no work
        api.create_repo(repo, private=private, exist_ok=True)
        if private and not api.model_info(repo).private:
            raise InputError(
                f"{repo} exists and is public; make it private first, or leave out --private"
            )
    export(path, out, step=step, name=repo)
    sizes = {
        file.relative_to(out): file.stat().st_size
        for file in sorted(out.rglob("*"))
        if file.is_file()
    }
    for file, size in sizes.items():
        print(f"{size:>14,}  {file}", file=sys.stderr)
    print(
        f"{sum(sizes.values()):>14,}  bytes in {len(sizes)} files to {repo} …",
        file=sys.stderr,
        flush=True,
    )
    with hub_errors(f"{repo}: {out} is whole, but not uploaded"):
        steps = json.loads((out / "run.json").read_text())["step"]
        commit = api.upload_folder(repo_id=repo, folder_path=out, commit_message=f"Step {steps}")
    return commit.commit_url


def load_model_config(path: Path) -> Any:
    """A checkpoint's config; imports flash-linear-attention for its model types."""
    kind = json.loads((path / "config.json").read_text()).get("model_type")
    keep_model_types()
    if kind not in CONFIG_MAPPING:
        with contextlib.suppress(Exception):
            import_fla()
    if kind not in CONFIG_MAPPING:
        raise InputError(f"{path}: unknown model type {kind}; it may need flash-linear-attention")
    with in_one_line(f"{path}/config.json"):
        return AutoConfig.from_pretrained(path)


def find_scores(run_dir: Path, folder: Path) -> dict[str, Any]:
    """Results of `nalanda eval` for the model in `folder`, by task, from every results.json in the run or a
    folder of it. A fingerprint of the weights, not a name, decides whether results belong to the model.

    `texts` says how the model read them. Results of a part of the documents are left out, which a line on
    stderr says."""
    found = [*run_dir.glob("results.json"), *run_dir.glob("*/results.json")]
    if not found:
        return {}
    mine = fingerprint(
        language_model(load_model_config(folder)).from_pretrained(folder, dtype="auto")
    )
    tasks: dict[str, Any] = {}
    for file in sorted(found, key=lambda file: file.stat().st_mtime):
        try:
            results = json.loads(file.read_text(encoding="utf-8"))
            models = [model for model in results["models"] if model["fingerprint"] == mine]
            if models and results.get("limit") is not None:
                print(
                    f"{file}: the card lacks its scores, which are of --limit documents",
                    file=sys.stderr,
                )
                continue
            for model in models:
                window = model.get("max_length", "")
                read = {None: "read whole", "": ""}.get(window, f"windows of {window} tokens")
                tasks |= {task: scores | {"texts": read} for task, scores in model["tasks"].items()}
        except (ValueError, KeyError, TypeError) as error:  # the model matters more than its scores
            print(f"{file}: unreadable; the card lacks its scores: {error!r}", file=sys.stderr)
    return tasks


def model_card(
    run_dir: Path,
    path: Path,
    facts: dict[str, Any],
    title: str,
    tasks: dict[str, Any] | None = None,
    source: str = ".",
) -> str:
    """The model card: sizes, training data, losses, task scores, how to train the model again, and how to
    load it from `source`."""
    recipe = {}
    if (run_dir / "config.yaml").is_file():
        recipe = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
    shape = json.loads((path / "config.json").read_text())
    state = json.loads((path / "trainer.json").read_text())
    lines = (
        list(read_metrics(run_dir / "metrics.jsonl"))
        if (run_dir / "metrics.jsonl").is_file()
        else []
    )
    last = {
        key: next(
            (line for line in reversed(lines) if key in line and line["step"] <= facts["step"]),
            None,
        )
        for key in ("loss", "val_loss")
    }
    hours = max(
        (hours for line, hours in with_hours(lines) if line["step"] <= facts["step"]), default=0.0
    )
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
    corpus = data.get("source") or ", ".join(
        str(part.get("source")) for part in data.get("mixture") or []
    )
    corpus = "the text that comes with Python" if corpus == "python" else corpus
    place = f"{facts.get('device')}, {facts.get('processes')} process(es), {duration(3600 * hours)} of steps"
    rows = [
        ("parameters", f"{facts['parameters']:,}" if "parameters" in facts else None),
        *((key.replace("_", " "), shape.get(key)) for key in keys),
        ("data", corpus),
        ("context", data.get("seq_len") and f"{data['seq_len']} tokens"),
        (
            "tokens seen",
            f"{state['tokens']:,} in {facts['step']:,} steps" if "tokens" in state else None,
        ),
        ("precision", train.get("precision")),
        ("trained on", place if hours else None),
        (
            "training loss",
            last["loss"] and f"{last['loss']['loss']:.4f} at step {last['loss']['step']}",
        ),
        (
            "validation loss",
            last["val_loss"]
            and f"{last['val_loss']['val_loss']:.4f}, {describe_perplexity(last['val_loss'])}, "
            f"at step {last['val_loss']['step']}"
            + (
                ""
                if math.isfinite(last["val_loss"]["val_loss"])
                else ": NOT FINITE, this model is of no use"
            ),
        ),
        ("written with", list_versions([facts.get("versions", {})])),
    ]
    table = "\n".join(
        f"| {key} | {_cell(value)} |" for key, value in rows if value not in (None, "", [])
    )
    ours = shape.get("model_type") == "nalanda"
    masked = ours and not shape.get("is_decoder", True)
    auto, kind = (
        f"AutoModelFor{'MaskedLM' if masked else 'CausalLM'}",
        "masked" if masked else "causal",
    )
    purpose = "fill in masked tokens" if masked else "continue text"
    trust = ", trust_remote_code=True" if ours else ""
    scores = [
        (task, metric, float(value), found.get("stderr", {}).get(metric), found["texts"])
        for task, found in (tasks or {}).items()
        for metric, value in found["metrics"].items()
        if value is not None
    ]
    about = ModelCardData(
        library_name="transformers",
        pipeline_tag="fill-mask" if masked else "text-generation",
        model_name=title,
        eval_results=[EvalResult("text-generation", t, t, m, value) for t, m, value, *_ in scores],
    )
    zero_shot = "".join(
        f"| {task} | {metric} | {value:.4f} | {'' if error is None else f'{float(error):.4f}'} | {texts} |\n"
        for task, metric, value, error, texts in scores
    )
    again = tokens = ""
    if recipe:
        again = " Its recipe is `config.yaml`; `nalanda train config.yaml\noutput_dir=RUN` trains it again."
    if (run_dir / "tokenizer").is_dir():
        tokens = f'tokenizer = AutoTokenizer.from_pretrained("{source}", trust_remote_code=True)\n'
    if zero_shot:
        zero_shot = (
            "\n| zero-shot | | | standard error | texts |\n|---|---|---:|---:|---|\n" + zero_shot
        )
    return f"""---
{about.to_yaml()}
---

# {title}

A {kind} language model, pretrained with Nalanda.{again}

| | |
|---|---|
{table}
{zero_shot}
```python
from transformers import {auto}{", AutoTokenizer" if tokens else ""}

model = {auto}.from_pretrained("{source}"{trust})
{tokens}```

It was only trained to {purpose}: it follows no instructions, and repeats the errors and prejudices of its
corpus.
"""


def _cell(value: Any) -> str:
    if isinstance(value, list):  # one mixer per layer
        names = dict.fromkeys(map(str, value))
        return ", ".join(f"{name} × {list(map(str, value)).count(name)}" for name in names)
    return str(value).replace("|", "\\|").replace(os.linesep, " ")
