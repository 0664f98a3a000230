"""The harness's model wrapper and task loader, fitted to the house. Importing this imports lm-eval (slow)."""

import difflib
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import lm_eval.tasks
from lm_eval import evaluate as harness
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import perplexity, weighted_perplexity
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nalanda.errors import InputError
from nalanda.generate import bos_token
from nalanda_eval.sources import Source, read

__all__ = ["Scorer", "harness", "load_tasks"]
OFFICIAL = Path(lm_eval.tasks.__file__).parent


class Scorer(HFLM):
    """HFLM, with every text beginning as in training: with exactly one bos token, or with none.

    (The harness asks the tokenizer, which then counts twice in rolling perplexities and, for a tokenizer that
    never adds one, not at all.) `advance(done, total)` is called as requests are scored.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_size: int,
        max_length: int | None,
        advance: Callable[[int, int], None],
    ) -> None:
        super().__init__(
            pretrained=model,
            tokenizer=tokenizer,  # type: ignore[arg-type]
            backend="causal",
            batch_size=batch_size,
            max_length=max_length,
            add_bos_token=False,
            softmax_dtype="float64" if model.dtype.itemsize == 8 else "float32",
        )
        self.bos = bos_token(model, tokenizer)
        self.advance = advance
        self._done = 0

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        context_ids, continuation_ids = super()._encode_pair(context, continuation)
        return self.bos + context_ids, continuation_ids

    def tok_batch_encode(self, strings: list[str], *args: Any, **kwargs: Any) -> Any:
        begin = self.tokenizer.bos_token if self.bos else ""  # type: ignore[missing-attribute]
        return super().tok_batch_encode([begin + text for text in strings], *args, **kwargs)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts in disjoint windows; all of them are sorted and batched together."""
        windows, owners = [], []
        for owner, request in enumerate(requests):
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context_ids, continuation_ids in map(make_disjoint_window, rolling):
                windows.append((None, context_ids, continuation_ids))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (value, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += value
        return totals

    def _loglikelihood_tokens(
        self, requests: list, disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list:
        self._done, self._total = 0, len(requests)
        self.advance(0, self._total)
        answers = super()._loglikelihood_tokens(requests, disable_tqdm=True, override_bs=override_bs)
        # Endings of one token share a row, so the count may have fallen short.
        self.advance(self._total, self._total)
        return answers

    def _model_call(self, inps: Any, attn_mask: Any = None, labels: Any = None) -> Any:
        logits = super()._model_call(inps, attn_mask, labels)
        self._done += len(inps)
        self.advance(self._done, self._total)
        return logits


def load_tasks(sources: list[Source]) -> dict[str, dict]:
    """The harness's task objects, zero-shot unless their file says otherwise.

    Raises:
        InputError: an unknown name, a task file that does not load, or data that are not there.
    """
    # Indexing the harness's 14 000 tasks takes long: only for names whose file is not known.
    named = any(not (source.task_file or source.local) for source in sources)
    manager = TaskManager(include_defaults=named)
    tasks: dict[str, dict] = {"tasks": {}, "groups": {}, "group_map": {}}
    for source in sources:
        for kind, entries in _load(manager, source).items():
            tasks[kind].update(entries)
    for task in tasks["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config("num_fewshot", 0)
        task.set_fewshot_seed(seed=1234)
        aggregations = task.aggregation()
        for metric, aggregate in aggregations.items():
            if aggregate in (perplexity, weighted_perplexity):
                aggregations[metric] = _or_infinity(aggregate)
    return tasks


def _load(manager: TaskManager, source: Source) -> Any:
    hint = "" if source.task_file or source.documents else " (without the hub: --data DIR)"
    try:
        config = _config(source)
        if isinstance(config, str) and config not in manager.all_tasks:
            raise InputError(f"unknown task {config}{_nearest(config, manager.all_tasks)}")
        return manager.load([config])
    except InputError:
        raise
    except Exception as error:  # the harness, the hub's client and a task's functions raise what they like
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InputError(f"task {source.name} cannot be loaded{hint}: {reason}") from error


def _config(source: Source) -> str | dict[str, Any]:
    """What the harness's loader takes: a name, or a task's configuration with its data where they are."""
    if source.task_file:
        config = load_yaml(source.task_file)
        files = (config.get("dataset_kwargs") or {}).get("data_files")
        if files:
            base = source.data or source.task_file.parent
            config["dataset_kwargs"]["data_files"] = _resolve(files, base)
        return config
    if not source.local:
        return source.name
    config = load_yaml(OFFICIAL / source.local.official)
    if source.documents:
        split = source.local.split
        rows = read(source.documents, source.local)
        config |= {
            "custom_dataset": lambda **_: {split: datasets.Dataset.from_list(rows)},
            "training_split": None,
            "validation_split": "validation" if split == "validation" else None,
            "test_split": "test" if split == "test" else None,
        }
    return config


def _resolve(files: Any, base: Path) -> Any:
    if isinstance(files, dict):
        return {split: _resolve(entry, base) for split, entry in files.items()}
    if isinstance(files, list):
        return [_resolve(entry, base) for entry in files]
    if "://" in files or "*" in files:
        return files
    if not (base / files).is_file():
        raise InputError(f"no such data file: {base / files}")
    return str(base / files)


def _or_infinity(aggregate: Callable[[list], float]) -> Callable[[list], float]:
    """An untrained model's perplexity may not fit a float, which must not cost the run its other results."""

    @functools.wraps(aggregate)
    def aggregate_or_infinity(items: list) -> float:
        try:
            return aggregate(items)
        except OverflowError:
            return math.inf

    return aggregate_or_infinity


def _nearest(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=3)
    return (
        f", did you mean {', '.join(near)}?" if near else "; give table4, a task file or one of the harness's"
    )
