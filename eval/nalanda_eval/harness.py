"""lm-evaluation-harness in process, on our checkpoints and on any causal language model of the hub.

The tasks are the harness's own files with their prompts and metrics; local data only changes where documents
come from. A directory of it holds, as `.jsonl` or `.jsonl.gz`, any of these files, with the fields of the
hub's datasets or, where two forms are given, the compact one of published evaluation bundles:

    wikitext_test         page (a whole article)
    lambada_test          text, or context and continuation
    piqa_val              goal, sol1, sol2, label
    hellaswag_val         activity_label, ctx_a, ctx_b, endings, label
    winogrande_xl_val     sentence, option1, option2, answer
    arc_easy_test         question, choices {text, label}, answerKey, or query, choices [...], gold
    arc_challenge_test    the same
"""

import contextlib
import datetime
import importlib.metadata
import io
import json
import logging
import math
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from nalanda import generate
from nalanda.errors import InputError
from nalanda.model.state import fingerprint
from nalanda_eval import report
from nalanda_eval.sources import find


def evaluate(
    models: list[str],
    tasks: list[str],
    *,
    data: str | None = None,
    limit: float | None = None,
    batch_size: int = 8,
    max_length: int | None = None,
    device: str | None = None,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    output: str | None = None,
) -> dict[str, Any]:
    """Score models with lm-evaluation-harness; `report.show` prints what this returns.

    Args:
        models: checkpoint directories or hub ids.
        tasks: `table4` (the literature's suite), `python_docs` (the demo's), names of the harness's tasks,
            task files (.yaml), or directories of them. A relative `data_files` in a task file is looked up in
            `data`, else beside the file.
        data: a directory with local data (see the module's docstring); without it, the hub is asked.
        limit: at most so many documents a task, or that share of them if below 1.
        batch_size: requests scored together. It changes the speed and no result.
        max_length: tokens that the model sees at once; longer texts are read in windows. By default the
            config's `max_position_embeddings`, else 2048.
        device, dtype, trust_remote_code: as in `nalanda.generate.load`.
        output: a directory for results.json and results.md.

    Raises:
        InputError: no such model, task or file.
    """
    if not models:
        raise InputError("no model to evaluate: give a checkpoint directory or a hub id")
    if batch_size < 1:
        raise InputError(f"batch_size is {batch_size}: it must be at least 1")
    if limit is not None and limit <= 0:
        raise InputError(f"limit is {limit:g}: it must be a number of documents, or a share below 1")
    for model in models:
        generate.check_name(model)
    sources, left_out = find(tasks, data)  # before the import, which takes many seconds

    console = Console(file=sys.stderr)  # bound now: stderr itself is silenced while the harness works
    with console.status("importing lm-evaluation-harness …"), _quiet():
        from nalanda_eval.lm import Scorer, harness, load_tasks

        loaded = load_tasks(sources)

    results: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": _versions(),
        "data": data,
        "limit": limit,
        "batch_size": batch_size,
        "left_out": left_out,
        "models": [],
    }
    for name in models:
        model, tokenizer = generate.load(
            name, device=device, dtype=dtype, trust_remote_code=trust_remote_code
        )
        start = time.perf_counter()
        with _progress(console, name) as advance, _quiet():
            scorer = Scorer(model, tokenizer, batch_size=batch_size, max_length=max_length, advance=advance)
            raw = harness(scorer, loaded, limit=limit, bootstrap_iters=1000)
        results["models"].append(
            {
                "name": name,
                "fingerprint": fingerprint(model),
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "dtype": str(model.dtype).removeprefix("torch."),
                "device": str(model.device),
                "max_length": scorer.max_length,
                "begins_with_bos": bool(scorer.bos),
                "seconds": round(time.perf_counter() - start, 1),
                "tasks": {task: _scores(task, raw) for task in raw["results"]},
            }
        )
    if output is not None:
        directory = Path(output)
        directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps(_finite(results), indent=2, ensure_ascii=False, allow_nan=False)
        (directory / "results.json").write_text(text + "\n", encoding="utf-8")
        (directory / "results.md").write_text(report.markdown(results), encoding="utf-8")
    return results


def _scores(task: str, raw: dict[str, Any]) -> dict[str, Any]:
    """One task's metrics and their standard errors from what the harness returns."""
    metrics: dict[str, float] = {}
    stderr: dict[str, float | None] = {}
    for key, value in raw["results"][task].items():
        metric, _, filtered = key.partition(",")
        if not filtered:
            continue  # name, alias, sample_len
        error = metric.endswith("_stderr")
        metric = metric.removesuffix("_stderr") + ("" if filtered == "none" else f"@{filtered}")
        if not error:
            metrics[metric] = float(value)
        elif isinstance(value, (int, float)):
            stderr[metric] = float(value)
        else:
            stderr[metric] = None
    samples = raw["samples"].get(task, [])
    for metric in report.PERPLEXITIES:
        if metric in metrics and len(samples) > 1:
            stderr[metric] = _perplexity_stderr(
                metric, [sample[metric] for sample in samples], metrics[metric]
            )
    return {
        "metrics": metrics,
        "stderr": stderr,
        "documents": len(samples),
        "version": raw["versions"].get(task),
    }


def _perplexity_stderr(metric: str, items: list, value: float) -> float:
    """Standard error of exp(−Σℓ/Σw) over documents by the delta method; the harness has none where w varies.

    Σℓ/Σw is a ratio estimator: its error is that of the mean of ℓ − (Σℓ/Σw)·w, over the mean of w.
    """
    values, weights = np.array(
        [item if isinstance(item, tuple) else (item, 1) for item in items], dtype=float
    ).T
    ratio = values.sum() / weights.sum()
    error = (values - ratio * weights).std(ddof=1) / math.sqrt(len(values)) / weights.mean()
    return float(error / math.log(2) if metric == "bits_per_byte" else value * error)


def _versions() -> dict[str, str]:
    names = ("nalanda", "lm_eval", "transformers", "torch", "datasets")
    return {name: importlib.metadata.version(name) for name in names}


def _finite(value: Any) -> Any:
    """JSON has no infinities: they become text."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The harness logs, warns, prints and draws bars of its own: none of it reaches the terminal."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    silence = io.StringIO()
    try:
        with (
            contextlib.redirect_stdout(silence),
            contextlib.redirect_stderr(silence),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


@contextlib.contextmanager
def _progress(console: Console, name: str) -> Iterator[Any]:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, redirect_stdout=False, redirect_stderr=False) as progress:
        bar = progress.add_task(name, total=None)
        yield lambda done, total: progress.update(bar, completed=done, total=total)
