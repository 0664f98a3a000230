"""Scores of `nalanda eval`: read from results.json for a model's card and a run's page, and written for a person."""

import json
import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from nalanda.common.text import option_of

PERPLEXITIES = ("word_perplexity", "byte_perplexity", "perplexity", "bits_per_byte")
SHARES = ("acc", "contains", "em", "exact_match", "f1")
"""Metrics from 0 to 1, or their first letters; they are shown in percent."""
IN_PERCENT = {"squadv2": ("f1",), "scrolls": ("em", "f1")}
"""Tasks of the harness, or their first letters, that give these metrics in percent already."""

TASKS = {
    "arc_challenge": "ARC challenge",
    "arc_easy": "ARC easy",
    "boolq": "BoolQ",
    "commonsense_qa": "CommonsenseQA",
    "copa": "COPA",
    "hellaswag": "HellaSwag",
    "lambada_openai": "LAMBADA",
    "openbookqa": "OpenBookQA",
    "piqa": "PIQA",
    "python_docs_cloze": "Python cloze",
    "python_docs_perplexity": "Python text",
    "sciq": "SciQ",
    "social_iqa": "SIQA",
    "wikitext": "WikiText",
    "winogrande": "WinoGrande",
}
METRICS = {
    "acc": "accuracy",
    "acc_mutual_info": "accuracy by mutual information",
    "acc_norm": "normalised accuracy",
    "bits_per_byte": "bits a byte",
    "byte_perplexity": "perplexity a byte",
    "contains": "answers contained",
    "em": "exact match",
    "f1": "F1",
    "word_perplexity": "perplexity a word",
}
"""Names for a person; other tasks and metrics are called by their own, with blanks."""


HEADLINES = {
    "arc_challenge": ("acc_norm",),
    "hellaswag": ("acc_norm",),
    "python_docs_cloze": ("acc_mutual_info",),
    "wikitext": ("word_perplexity",),
}
"""The metric that stands for a task where there is room for one, as in the literature or on the zoo's page."""
USUAL = ("acc", "contains", "exact_match", "em", "f1", "bits_per_byte")
"""That of other tasks: the first that they have."""


class Score(NamedTuple):
    """One task's value of one metric."""

    task: str
    metric: str
    value: float
    error: float | None
    texts: str
    """How the model read the task's texts."""

    @property
    def name(self) -> str:
        """`ARC easy, accuracy`."""
        task = TASKS.get(self.task, self.task.replace("_", " "))
        return f"{task}, {METRICS.get(self.metric, self.metric.replace('_', ' '))}"

    @property
    def text(self) -> str:
        """`32.5 ± 3.3 %`, `1.715 ± 0.021`."""
        factor = percent_factor(self.task, self.metric, self.value)
        share = self.metric.startswith(SHARES)
        digits = 1 if share else _decimals(self.value)
        text = f"{factor * self.value:,.{digits}f}"
        if self.error is not None and math.isfinite(self.error):
            text += f" ± {factor * self.error:,.{digits}f}"
        return text + " %" * share


def headlines(scores: Iterable[Score]) -> list[Score]:
    """One score of each task."""
    tasks: dict[str, list[Score]] = {}
    for score in scores:
        tasks.setdefault(score.task, []).append(score)

    chosen = []
    for task, task_scores in tasks.items():
        metrics = [score.metric for score in task_scores]
        usual = [metric for metric in (*HEADLINES.get(task, ()), *USUAL) if metric in metrics]
        chosen.append(task_scores[metrics.index(usual[0]) if usual else 0])
    return chosen


def _decimals(value: float) -> int:
    """Decimals that show four digits of a value."""
    if not math.isfinite(value) or not value:
        return 0
    return max(0, 3 - math.floor(math.log10(abs(value))))


def percent_factor(task: str, metric: str, value: float) -> int:
    """100 for a share that is not in percent yet, else 1. value: the score, not its error, which may be below 1."""
    in_percent = not metric.startswith(SHARES) or value > 1  # no share is above 1
    for name, metrics in IN_PERCENT.items():
        in_percent |= task.startswith(name) and metric.startswith(metrics)
    return 1 if in_percent else 100


PROMPTS = {"num_fewshot": None, "apply_chat_template": False, "system_instruction": None}
"""Options that make other prompts than the zero-shot ones, and their defaults."""


def find_results(run_dir: Path) -> list[Path]:
    """Every results.json in a run or in a folder of it."""
    return [*run_dir.glob("results.json"), *run_dir.glob("*/results.json")]


def read_scores(files: Iterable[Path], is_of: Callable[[dict[str, Any]], bool]) -> list[Score]:
    """The scores of one model in some results.json, one for each task and metric. Newer ones replace older ones.

    Results of a part of the documents, or with other prompts than zero-shot ones, are left out, and a line on
    stderr says so.

    is_of: whether a record of a model is of this one.
    """
    tasks: dict[str, list[Score]] = {}
    for file in sorted(files, key=lambda file: file.stat().st_mtime):
        try:
            results = json.loads(file.read_text(encoding="utf-8"))
            records = [record for record in results["models"] if is_of(record)]
            others = [option for option in ("limit", *PROMPTS) if results.get(option)]
            if records and others:
                option = option_of(others[0])
                print(f"{file}: its scores are with {option}, and left out", file=sys.stderr)
                continue
            for record in records:
                window = record.get("max_length", "")
                texts = {None: "read whole", "": ""}.get(window, f"windows of {window} tokens")
                for task, scores in record["tasks"].items():
                    tasks[task] = _list_scores(task, scores, texts)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            print(f"{file}: unreadable, so its scores are left out: {error!r}", file=sys.stderr)
    return [score for scores in tasks.values() for score in scores]


def _list_scores(task: str, scores: dict[str, Any], texts: str) -> list[Score]:
    errors = scores.get("stderr", {})
    # Infinities are texts there: JSON has none.
    return [
        Score(task, metric, float(value), _number(errors.get(metric)), texts)
        for metric, value in scores["metrics"].items()
        if value is not None
    ]


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
