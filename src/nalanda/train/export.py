"""Exports a checkpoint as a transformers model folder, and uploads it to the hub."""

import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, get_token
from nalanda_kernels import import_fla, keep_model_types
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from nalanda.common.errors import InputError, SourceUnavailable, first_line
from nalanda.common.files import copy_contents, new_folder, refuse_existing, update_json
from nalanda.common.scores import Score, find_results, read_scores
from nalanda.common.text import redact
from nalanda.config.load import load_config
from nalanda.config.model import in_one_line, is_encoder, language_model
from nalanda.data.hub import is_hub_id
from nalanda.model.state import fingerprint
from nalanda.storage.retry import transient
from nalanda.train import tensor_files
from nalanda.train.card import model_card
from nalanda.train.checkpoint_dir import find_checkpoint, step_of
from nalanda.train.log import read_facts, write_facts


def export(
    path: Path,
    out: Path,
    facts: dict[str, Any] | None = None,
    *,
    step: int | None = None,
    replace: bool = False,
    name: str | None = None,
    config: PreTrainedConfig | None = None,
    average: str | None = None,
) -> Path:
    """Writes a checkpoint as the transformers model folder `out`. path, step: of `find_checkpoint`.

    It has the weights in safetensors, config, generation config, the model's code, the tokenizer and a model
    card. From the run it gets the recipe, config.yaml, and run.json. `out` appears once it is complete.

    A checkpoint that was copied out of its run gets neither tokenizer nor recipe, and a line on stderr says
    so.

    facts: contents of run.json; default: the run's.
    name: of the model on the hub; without it the card takes the folder's, or the run's for "final".
    config: the model's, if it is at hand; by default the checkpoint's.
    average: `ema.name_of` the average of the weights to take in place of them.

    Raises:
        InputError: no such checkpoint; `out` exists and `replace` is False.
    """
    checkpoint = find_checkpoint(path, step)
    # `checkpoints` may be a link to another disk, and so may the checkpoint's own name.
    run_dir = Path(os.path.abspath(checkpoint)).parents[1]
    if not (run_dir / "config.yaml").is_file():
        run_dir = checkpoint.resolve().parents[1]
    if config is None:
        config = _config_of_run(checkpoint, run_dir)
    absent = [name for name in ("tokenizer", "config.yaml") if not (run_dir / name).exists()]
    if absent:
        print(
            f"{checkpoint}: {run_dir} has no {' and no '.join(absent)}, so the model is written without; "
            "export from the run's folder, or copy its tokenizer and config.yaml there",
            file=sys.stderr,
        )

    # Without values: for the files beside the weights, and tied names.
    with in_one_line(str(checkpoint)), torch.device("meta"):
        model = language_model(config).from_config(config, dtype=torch.float32)
    weights = tensor_files.read_weights(checkpoint)
    if average is not None:
        weights |= tensor_files.read_weights(checkpoint, average)
    with new_folder(out, replace) as folder:
        model.save_pretrained(folder, state_dict=weights)
        copy_tokenizer(run_dir / "tokenizer", folder, config)
        if (run_dir / "config.yaml").is_file():
            shutil.copyfile(run_dir / "config.yaml", folder / "config.yaml")

        facts = facts if facts is not None else read_facts(run_dir)
        private = ("host", "pid", "command")  # and of no use in a copy
        facts = {key: value for key, value in facts.items() if key not in private}
        facts["step"] = step_of(checkpoint)
        write_facts(folder, facts)

        # Of `final` and `final-ema-D`.
        title = name or re.sub("^final(?=$|-ema-)", run_dir.name, out.name)
        scores = find_scores(run_dir, folder)
        text = model_card(run_dir, checkpoint, facts, title, scores, name or ".", average)
        (folder / "README.md").write_text(text, encoding="utf-8")
    return out


def _config_of_run(checkpoint: Path, run_dir: Path) -> Any:
    """`load_model_config`, with the plugins of the run's recipe."""
    recipe = run_dir / "config.yaml"
    if recipe.is_file():
        with contextlib.suppress(InputError):  # a recipe of another version
            load_config(recipe)
    return load_model_config(checkpoint)


def copy_tokenizer(tokenizer: Path, folder: Path, config: Any) -> None:
    """Copies a run's tokenizer, if there is one, into the folder of a model with this config."""
    if not tokenizer.is_dir():
        return
    copy_contents(tokenizer, folder)
    ours = config.model_type == "nalanda"
    pad_batches(folder, "right" if is_encoder(config) else "left", token_types=not ours)


def pad_batches(folder: Path, side: str = "left", *, token_types: bool = True) -> None:
    """Makes the tokenizer of a model folder pad on this side, with eos if it has no pad token.

    Generation needs the left. The run's own tokenizer stays unchanged: training pads nothing.

    token_types: whether the model takes `token_type_ids`, if the tokenizer gives them.
    """
    file, older = folder / "tokenizer_config.json", folder / "special_tokens_map.json"
    if not file.is_file():
        return
    settings = json.loads(file.read_text(encoding="utf-8"))
    tokens = json.loads(older.read_text(encoding="utf-8")) if older.is_file() else {}
    # tokenizer_config.json overrules the older file.
    tokens |= {name: settings[name] for name in ("eos_token", "pad_token") if settings.get(name)}
    pad = tokens.get("pad_token") or tokens.get("eos_token")
    update_json(file, padding_side=side, pad_token=pad)
    if not token_types:
        update_json(file, model_input_names=["input_ids", "attention_mask"])


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
    """Exports, and uploads the folder to the hub repository `repo`, OWNER/NAME. Creates it if needed.

    Prints the uploaded files on stderr. Returns the URL of the commit.

    Raises:
        InputError: as `export`; no token, a token without write access, or `private` and a public repository.
        SourceUnavailable: the hub does not answer.
    """
    if not is_hub_id(repo):
        raise InputError(f"{repo!r} is not a repository of the hub: write OWNER/NAME")
    if get_token() is None:
        raise InputError("no token for the hub: set HF_TOKEN, or run `hf auth login`")

    # Refusals come first, so that they cost no work.
    find_checkpoint(path, step)
    refuse_existing(out)
    api = HfApi()
    with hub_errors(repo):
        api.create_repo(repo, private=private, exist_ok=True)
        if private and not api.model_info(repo).private:
            raise InputError(
                f"{repo} exists and is public; make it private first, or leave out --private"
            )

    export(path, out, step=step, name=repo)
    sizes = {file: file.stat().st_size for file in sorted(out.rglob("*")) if file.is_file()}
    for file, size in sizes.items():
        print(f"{size:>14,}  {file.relative_to(out)}", file=sys.stderr)
    total = f"{sum(sizes.values()):>14,}  bytes in {len(sizes)} files to {repo} …"
    print(total, file=sys.stderr, flush=True)
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


def find_scores(run_dir: Path, folder: Path) -> list[Score]:
    """Collects the results of `nalanda eval` in the run for the model in `folder`.

    A fingerprint of the weights, not a name, decides whether results belong to the model.
    """
    files = find_results(run_dir)
    if not files:
        return []
    model = language_model(load_model_config(folder)).from_pretrained(folder, dtype="auto")
    weights = fingerprint(model)
    return read_scores(files, lambda record: record["fingerprint"] == weights)
