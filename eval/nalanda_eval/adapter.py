"""Adapts lm-evaluation-harness: its model wrapper and task loader. Imports lm-eval, which takes seconds."""

import functools
import math
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import datasets
import lm_eval.tasks
import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from lm_eval import evaluate as harness
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import perplexity, weighted_perplexity
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.models.utils_hf import stop_sequences_criteria
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.tasks.ruler.common_utils import postprocess_pred, string_match_all
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nalanda.common.errors import InputError, explained, first_line
from nalanda.inference.load import (
    after_bos,
    bos_token,
    check_numbers,
    check_tokens,
    is_ours,
    number_check,
)
from nalanda_eval import scoring
from nalanda_eval.cache import AnswerCache, model_identity
from nalanda_eval.needles import SAMPLES, haystack, needle_rows
from nalanda_eval.python_tasks import python_tasks
from nalanda_eval.scoring import Answer, Request
from nalanda_eval.task_data import PACKAGED, TaskSource, read_rows, suggest_task

__all__ = ["ENDLESS", "HarnessModel", "characters", "harness", "load_tasks", "seed_draws"]

OFFICIAL = Path(lm_eval.tasks.__file__).parent
ENDLESS = sys.maxsize
"""Length of texts that a recurrent model reads at once."""


class HarnessModel(HFLM):
    """HFLM in which every text begins as in training: with exactly one bos token, or with none.

    The harness leaves bos to the tokenizer: rolling perplexities then have two, or none. Log-likelihoods come
    from the answer cache, otherwise from `scoring`. With several processes, each answers its share of the
    requests, and all get every answer.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_size: int,
        max_length: int | None = None,
        share: bool = True,
        cache: Path | None = None,
        processes: PartialState | None = None,
        advance: Callable[[float], None] = lambda characters: None,
    ) -> None:
        """
        Args:
            max_length: tokens that the model sees at once, or `ENDLESS`; by default its config's.
            share: read shared contexts once, see `scoring.answers`.
            cache: the file of the answer cache, see `cache.AnswerCache`.
            processes: accelerate's state; by default of this process.
            advance: called with the number of characters scored.
        """
        super().__init__(
            pretrained=model,
            tokenizer=tokenizer,  # type: ignore[arg-type]
            backend="causal",
            batch_size=batch_size,
            max_length=max_length,
            add_bos_token=False,
        )
        self.bos = bos_token(model, tokenizer)
        if is_ours(model) and not self.bos:
            # In training the end of another text came before the first token.
            self.custom_prefix_token_id = tokenizer.eos_token_id
        if self.prefix_token_id is None:
            raise InputError(
                "the tokenizer has neither bos nor eos, and one of them must stand before a text"
            )
        self.score = functools.partial(scoring.answers, model, batch_size=batch_size, share=share)
        self.identity = model_identity(model)
        self.cache = AnswerCache(cache, self.identity)
        self.processes = processes or PartialState(cpu=model.device.type == "cpu")
        self.advance = advance

        self.answered = 0  # log-likelihoods
        self.found = 0  # those of them that were cached
        self.prompts = 0  # contexts to go on from
        self.cut = 0  # those of them that were cut on the left

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        context_ids, continuation_ids = super()._encode_pair(context, continuation)
        # A context of white space alone has no token: it is the continuation's.
        return after_bos(context_ids, self.bos) or [self.prefix_token_id], continuation_ids

    def tok_batch_encode(
        self, strings: list[str], *args: Any, left_truncate_len: int | None = None, **kwargs: Any
    ) -> Any:
        rows = self.tokenizer(strings, add_special_tokens=False).input_ids  # type: ignore[not-callable]
        # bos as an id: as text it would change how some tokenizers begin the first word.
        begun = [after_bos(row, self.bos) or [self.prefix_token_id] for row in rows]
        padded = self.tokenizer.pad(  # type: ignore[missing-attribute]
            {"input_ids": begun}, return_tensors="pt", padding_side="left"
        )
        ids, mask = padded["input_ids"], padded["attention_mask"]  # [B, T]
        check_tokens([int(ids.max())], self.model, self.tokenizer)  # type: ignore[bad-argument-type]
        if left_truncate_len is None or ids.shape[1] <= left_truncate_len:
            return ids, mask
        # Padding is on the left, so real tokens are cut only in rows longer than that.
        self.cut += int((mask.sum(1) > left_truncate_len).sum())
        return ids[:, -left_truncate_len:], mask[:, -left_truncate_len:]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Answer]:
        for request in requests:
            if not request.args[-1]:
                raise InputError(
                    f"{request.task_name}: document {request.doc_id} has an empty answer; give each a text"
                )
        self.prompts += len(requests)
        self._characters = characters(requests)
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihoods of whole texts, in disjoint windows that are sorted and batched together."""
        texts = [request.args[0] for request in requests]
        for request, text in zip(requests, texts, strict=True):
            if not isinstance(text, str):
                raise InputError(
                    f"{request.task_name}: document {request.doc_id} is {text!r}, not text; "
                    "let doc_to_target name a field of texts"
                )
        if not any(map(str.strip, texts)):
            raise InputError(f"{requests[0].task_name}: its documents are blank; give it texts")

        self._characters = characters(requests)
        windows = []
        owners = []  # the request of each window
        for owner, text in enumerate(texts):
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            # Disjoint windows: each token is predicted once, from its window alone.
            for context_ids, continuation_ids in map(make_disjoint_window, rolling):
                windows.append((None, context_ids, continuation_ids))
                owners.append(owner)

        totals = [0.0] * len(requests)
        for owner, (value, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += value
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continuations of contexts, each up to a stop string. They are not kept in the answer cache."""
        options: Any = (request.args[-1] for request in requests)
        # By any of the names that the harness takes, such as max_new_tokens.
        longest = max(
            normalize_gen_kwargs(each, self.max_gen_toks)["max_gen_toks"] for each in options
        )
        if longest >= self.max_length:
            raise InputError(
                f"answers have up to {longest} tokens, the model sees {self.max_length} at once: "
                "raise --max-length, or read texts whole (--long whole)"
            )
        rank, count = self.processes.process_index, self.processes.num_processes
        # Every `count`-th request, so that lengths spread evenly.
        share = requests[rank::count]
        self.prompts += len(requests)
        self._characters = characters(requests) / max(len(share), 1)

        cut_before = self.cut
        # gather_object adds the processes' lists: one entry each, in order of rank.
        answers = gather_object([super().generate_until(share, disable_tqdm=True) if share else []])
        self.cut = cut_before + sum(gather_object([self.cut - cut_before]))
        # Request i was number i // count of process i % count.
        return [answers[i % count][i // count] for i in range(len(requests))]

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], **options: Any
    ) -> Tensor:
        """The tokens `[B, T + new]` of context `[B, T]` and continuation.

        Our models read the context in parts, and generate from its state: memory does not grow with T, unless
        layers keep every token.
        """
        model: Any = self.model
        tokenizer: Any = self.tokenizer
        options |= number_check(model)
        if not is_ours(model):
            out = super()._model_generate(context, max_length, stop, **options)
        else:
            state = model.read(context, attention_mask=options.pop("attention_mask"))
            if not options.get("temperature"):  # 0 is the harness's word for greedy
                options.pop("temperature", None)
                options["do_sample"] = False
            new = model.generate(
                state=state,
                max_new_tokens=max_length - context.shape[1],
                stopping_criteria=stop_sequences_criteria(tokenizer, stop, 1, len(context)),
                pad_token_id=tokenizer.pad_token_id,
                **options,
            )
            out = torch.cat([context, new], 1)
        self.advance(self._characters * len(context))
        return out

    def _loglikelihood_tokens(
        self, requests: list, disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[Answer]:
        cut_requests = [
            self._cut_context(tuple(context), tuple(continuation))
            for _, context, continuation in requests
        ]
        # Before any work: an id outside the vocabulary would fail in the middle of it.
        model: Any = self.model
        used = (token for request in cut_requests for tokens in request for token in tokens)
        check_tokens(used, model, self.tokenizer)  # type: ignore[bad-argument-type]

        rank, count = self.processes.process_index, self.processes.num_processes
        share = scoring.process_share(cut_requests, rank, count)
        answers = self.cache.find(share)
        cached = len(answers)

        # Each process reports its progress as that of all: the shares are similar.
        unit = self._characters / max(sum(map(_count_tokens, dict.fromkeys(share))), 1)
        self.advance(unit * sum(map(_count_tokens, answers)))
        # What the cache lacks is kept batch by batch, so a killed run loses one batch.
        missing = [request for request in share if request not in answers]
        for batch in self.score(missing):
            check_numbers(torch.tensor([value for value, _ in batch.values()]), model)
            self.cache.keep(batch)
            self.advance(unit * sum(map(_count_tokens, batch)))
            answers |= batch

        for of_process, cached_there in gather_object([(answers, cached)]):
            answers |= of_process
            self.found += cached_there
        self.answered += len(answers)
        # Equal requests have one answer, so each is looked up.
        return [answers[request] for request in cut_requests]

    def _cut_context(self, context: tuple[int, ...], continuation: tuple[int, ...]) -> Request:
        """The request with the left of its context cut so that at most `max_length` inputs remain."""
        if not continuation:
            raise InputError(
                "a continuation has no token of its own: the tokenizer merges it into the context"
            )
        if len(continuation) > self.max_length:
            raise InputError(
                f"a continuation has {len(continuation)} tokens, the model sees {self.max_length} at once: "
                "raise max_length, or read texts whole (--long whole)"
            )
        # The last token is predicted but never read.
        excess = len(context) + len(continuation) - 1 - self.max_length
        self.cut += excess > 0
        return context[max(excess, 0) :], continuation


def characters(requests: Iterable[Instance]) -> int:
    """Characters of the texts to read: the unit of the progress bar."""
    return sum(len(text) for request in requests for text in request.args if isinstance(text, str))


def _count_tokens(request: Request) -> int:
    context, continuation = request
    return len(context) + len(continuation)


def seed_draws() -> None:
    """Begins the random numbers as `lm_eval` does: of tasks that shuffle, and of answers that are drawn."""
    random.seed(0)
    np.random.seed(1234)
    torch.manual_seed(1234)


def load_tasks(
    sources: list[TaskSource],
    count_tokens: Callable[[str], int] = len,
    samples: int = SAMPLES,
    num_fewshot: int | None = None,
) -> dict[str, dict]:
    """The harness's task objects, zero-shot unless their file says otherwise.

    Args:
        count_tokens: gives the number of tokens of a text, by which needles' prompts are sized.
        samples: prompts of each kind and length of needle.
        num_fewshot: examples in a prompt, unless a task's file says 0; None: as each file says.

    Raises:
        InputError: an unknown name, a task file that does not load, missing data, or too few examples.
    """
    seed_draws()
    # Indexing the harness's 14 000 tasks is slow: only for names whose file is unknown.
    named = any(not (source.task_file or source.local or source.needle) for source in sources)
    manager = TaskManager(include_defaults=named)
    tasks: dict[str, dict] = {"tasks": {}, "groups": {}, "group_map": {}}
    of_files: set[str] = set()
    for source in sources:
        loaded = _load_source(manager, source, count_tokens, samples)
        # Groups of the harness may share a task; that of a file is another one.
        names = loaded["tasks"].keys()
        for name in sorted(names & (tasks["tasks"].keys() if source.task_file else of_files)):
            raise InputError(f"{source.name}: another task is named {name} too; rename one")
        of_files |= names if source.task_file else set()
        for kind, entries in loaded.items():
            tasks[kind].update(entries)

    for name, task in tasks["tasks"].items():
        if task.get_config("num_fewshot") != 0:
            shots = task.get_config("num_fewshot") if num_fewshot is None else num_fewshot
            task.set_config("num_fewshot", shots or 0)
        _check_task(name, task)
        aggregations = task.aggregation()
        for metric, aggregate in aggregations.items():
            if aggregate in (perplexity, weighted_perplexity):
                aggregations[metric] = _allow_infinity(aggregate)
    return tasks


def _check_task(name: str, task: Any) -> None:
    """Raises `InputError` for a task that cannot be scored here, or lacks documents for its few-shot examples."""
    if getattr(task, "UNSAFE_CODE", False):
        raise InputError(
            f"{name}: runs what a model writes; take lm_eval, with --confirm_run_unsafe_code"
        )
    if getattr(task, "MULTIMODAL", False):
        raise InputError(f"{name}: has pictures or sound; name tasks of text")

    shots = task.get_config("num_fewshot")
    sampler = getattr(task, "sampler", None)
    if not shots or sampler is None:
        return
    # The harness draws one more, where it leaves out the document that is asked.
    needed = shots + (task.fewshot_cfg.split == task.get_config("test_split"))
    if len(sampler.df) < needed:
        raise InputError(
            f"--num-fewshot {shots}: {name} has {len(sampler.df)} documents for examples, and needs {needed}; "
            "take fewer examples"
        )


def _load_source(
    manager: TaskManager, source: TaskSource, count_tokens: Callable[[str], int], samples: int
) -> Any:
    is_local = source.task_file or source.documents or source.needle
    fetch = f"nalanda eval --tasks {source.name} --fetch DIR"
    hint = (
        ""
        if is_local
        else f" (without the hub: --tasks python_docs, or --data DIR, which `{fetch}` fills elsewhere)"
    )
    try:
        if source.needle:
            rows = needle_rows(source.needle, samples, count_tokens, haystack(source.data))
            config: Any = _needle_config(source.name, rows)
        else:
            config = _task_config(source)
        if isinstance(config, str) and config not in manager.all_tasks:
            raise InputError(
                f"{config}: unknown task{suggest_task(config, [*manager.all_tasks, 'python_docs'])}"
            )
        return manager.load([config])
    except InputError:
        raise
    except Exception as error:  # the harness, the hub's client and tasks share no error class
        if isinstance(error, ModuleNotFoundError) and (missing := explained(error)):
            raise missing from None

        why = first_line(error.__cause__ or error)  # of rows that cannot be read, the cause
        raise InputError(f"{source.name}: the task cannot be loaded{hint}: {why}") from error


def _task_config(source: TaskSource) -> str | dict[str, Any]:
    """The argument of the harness's loader: a name, or a task's configuration with paths to its data."""
    if source.task_file:
        return _file_config(source, source.task_file)
    if not source.local:
        return source.name

    # The harness's own prompt and metric; only the documents are replaced.
    config = load_yaml(OFFICIAL / source.local.official)
    if not source.documents:
        return config
    split = source.local.split
    rows = {split: read_rows(source)}
    if "class" in config:
        # A task in Python loads its data itself, by `download`.
        config["class"] = _on_rows(config["class"], split, rows[split])
        return config
    if source.training:
        rows["train"] = read_rows(source, training=True)
    return config | {
        "custom_dataset": lambda **_: {
            name: datasets.Dataset.from_list(documents) for name, documents in rows.items()
        },
        "training_split": "train" if source.training else None,
        "validation_split": "validation" if split == "validation" else None,
        "test_split": "test" if split == "test" else None,
        # The harness leaves the question out of its own examples only where it knows their split.
        "fewshot_split": "test" if split == "test" and not source.training else None,
    }


def _file_config(source: TaskSource, file: Path) -> dict[str, Any]:
    """A task file's configuration; `data_files` are looked for in `source.data` and beside the file."""
    config = load_yaml(file)
    data_files = (config.get("dataset_kwargs") or {}).get("data_files")
    if not data_files:
        return config
    if not source.data and file.parent == PACKAGED / "python_docs":
        # The demo's data need no file.
        rows = python_tasks()[data_files["test"]]
        config["custom_dataset"] = lambda **_: {"test": datasets.Dataset.from_list(rows)}
        return config
    folders = [file.parent] if source.data is None else [source.data, file.parent]
    config["dataset_kwargs"]["data_files"] = _find_files(data_files, folders)
    return config


def _on_rows(task: type, split: str, rows: list[dict]) -> type:
    """A task in Python, on `rows` in place of the hub's."""

    class OnRows(task):
        def download(self, *args: Any, **kwargs: Any) -> None:
            self.dataset = {split: datasets.Dataset.from_list(rows)}

    return OnRows


def _needle_config(name: str, rows: list[dict]) -> dict[str, Any]:
    """The harness's needle task on prompts of ours: its own needs the network for text and sentences."""

    def score(row: dict, answers: list[str]) -> dict[str, float]:
        return {"acc": string_match_all(postprocess_pred(answers), [row["outputs"]])}

    return load_yaml(OFFICIAL / "ruler" / "niah_single_1.yaml", resolve_func=False) | {
        "task": name,
        "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(rows)},
        "process_results": score,
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }


def _find_files(files: Any, folders: list[Path]) -> Any:
    """The files of a task, each from the first folder that has it."""
    if isinstance(files, dict):
        return {split: _find_files(entry, folders) for split, entry in files.items()}
    if isinstance(files, list):
        return [_find_files(entry, folders) for entry in files]
    if "://" in files or "*" in files:
        return files
    for folder in folders:
        if (folder / files).is_file():
            return str(folder / files)
    raise InputError(f"{folders[0] / files}: no such data file; --data names its folder")


def _allow_infinity(aggregate: Callable[[list], float]) -> Callable[[list], float]:
    """Gives infinity where the perplexity of an untrained model overflows, so that other results survive."""

    @functools.wraps(aggregate)
    def aggregate_or_infinity(items: list) -> float:
        try:
            return aggregate(items)
        except OverflowError:
            return math.inf

    return aggregate_or_infinity
