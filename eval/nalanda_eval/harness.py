"""lm-evaluation-harness in process, on our checkpoints and on any causal language model of the hub.

The tasks are the harness's own files with their prompts and metrics; local data replaces only the documents.
A data directory holds any of these files, as `.jsonl` or `.jsonl.gz`, with the fields of the hub's datasets
or, where two forms are listed, the compact form of published evaluation bundles:

    wikitext_test         page (a whole article)
    lambada_test          text, or context and continuation
    piqa_val              goal, sol1, sol2, label
    hellaswag_val         activity_label, ctx_a, ctx_b, endings, label
    winogrande_xl_val     sentence, option1, option2, answer
    arc_easy_test         question, choices {text, label}, answerKey, or query, choices [...], gold
    arc_challenge_test    the same
    boolq_val             passage, question, label, or answer (true or false)
    openbookqa_test       question_stem, choices {text, label}, answerKey, or query, choices [...], gold
    sciq_val              support, question, distractor1 to distractor3, correct_answer
    copa_val              premise, question (cause or effect), choice1, choice2, label
    social_iqa_val        context, question, answerA, answerB, answerC, label
    commonsense_qa_val    question, choices {text, label}, answerKey
    swde_val, fda_val, squad_completion_val               text, value
    based_triviaqa_val, based_nq_val, based_drop_val      context, question, answers [...]
    triviaqa_val          question, answer {aliases, …}
    nq_open_val           question, answer [...]
    drop_val              query_id, passage, question, answer, validated_answers
    haystack.txt          the text around needles, plain

(SciQ's file has the validation split; from the hub the harness takes the test split.)

With several processes (torchrun, accelerate) each scores its part of the requests, and all return the same
results; process 0 writes them.
"""

import contextlib
import csv
import datetime
import hashlib
import io
import json
import logging
import math
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoTokenizer

from nalanda.common.errors import DiskFull, InputError, first_line, no_room, output_folder
from nalanda.common.files import write_atomically
from nalanda.common.progress import Progress
from nalanda.common.versions import versions
from nalanda.inference.load import choose_device, load_model
from nalanda.train.resolve import resolve, resolve_all
from nalanda_eval import report
from nalanda_eval.cache import AnswerCache
from nalanda_eval.needles import SAMPLES
from nalanda_eval.perplexity import ratio
from nalanda_eval.task_data import TaskSource, find_tasks


def evaluate(
    models: list[str],
    tasks: list[str],
    *,
    data: str | None = None,
    limit: float | None = None,
    batch_size: int = 8,
    max_length: int | None = None,
    long: str = "window",
    share: bool = True,
    device: str | None = None,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    output: str | None = None,
) -> dict[str, Any]:
    """Score models with lm-evaluation-harness; `report.print_results` prints the result.

    Args:
        models: checkpoint directories or hub ids.
        tasks: `table4` (the literature's suite), `all` (it and the other tasks of the module's docstring, up
            to CommonsenseQA), `recall` (those after it), `needles` (RULER's; one kind is `niah_single_1`, one
            length of it `niah_single_1_4k`), `python_docs` (the demo's), names of the harness's tasks, task
            files (.yaml), or directories of them. A relative `data_files` in a task file refers to `data`,
            or else to the file's folder.
        data: a directory with local data (see the module's docstring); by default the hub.
        limit: at most so many documents a task, or that share of them if below 1.
        batch_size: texts read together; it affects only the speed.
        max_length: tokens that the model sees at once. By default the config's `max_position_embeddings`,
            else 2048.
        long: longer texts are read in disjoint windows (`window`, of a prompt only the last), as in the
            literature, or in one pass (`whole`, recurrent models only).
        share: read a context once for all its continuations; without it, once for each.
        device: as in `nalanda.inference.load.load_model`, and so dtype and trust_remote_code.
        output: a directory for results.json, .md and .csv, and the answer cache, from which an interrupted
            command resumes. Tasks that results.json has of the same models and settings are kept, and are in
            the results.

    Raises:
        InputError: no such model, task or file, a text that is too long, or an `output` with tasks that this
            command would neither repeat nor may stand beside.
    """
    if batch_size < 1:
        raise InputError(f"--batch-size {batch_size}: must be at least 1")
    if limit is not None and not (0 < limit < 1 or (limit >= 1 and float(limit).is_integer())):
        raise InputError(
            f"--limit {limit:g}: must be a whole number of documents, or a share below 1"
        )
    if long not in ("window", "whole"):
        raise InputError(f"--long {long}: use window or whole")
    if long == "whole" and max_length is not None:
        raise InputError("--max-length: is the length of windows; leave it out with --long whole")
    models = resolve_all(models)
    device = None if device is None else choose_device(device)
    sources, left_out = find_tasks(tasks, data)  # before the slow import
    if any(source.needle for source in sources):
        sources, needles_out = _fitting(sources, models, max_length, long, trust_remote_code)
        left_out |= needles_out
    directory = None if output is None else _directory(Path(output))

    processes = launched()
    main = processes is None or processes.is_main_process
    if processes is not None and device is None:
        device = str(processes.device)
    with Progress("loading lm-evaluation-harness and the tasks"), _quiet():
        from nalanda_eval.adapter import HarnessModel, characters, harness, load_tasks

        needles = any(source.needle for source in sources)
        tokens = most_tokens(models, trust_remote_code) if needles else len
        samples = min(SAMPLES, int(limit)) if limit and limit >= 1 else SAMPLES
        loaded = load_tasks(sources, tokens, samples)

    results: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions("lm_eval", "datasets"),
        "data": None if data is None else _place(data),
        "limit": limit,
        "batch_size": batch_size,
        "long": long,
        "processes": 1 if processes is None else processes.num_processes,
        "left_out": left_out,
        "models": [],
    }
    names = {*loaded["tasks"], *loaded["groups"]}
    earlier = None if directory is None else _earlier(directory, results, models, names)
    kept = {_place_of(model): model for model in (earlier or {"models": []})["models"]}
    with Progress("loading", 0, "%") as progress:

        def advance(count: float) -> None:
            # The harness builds the requests during its first run; they are the same for all models.
            requests = (request for task in loaded["tasks"].values() for request in task.instances)
            total = progress.total or len(models) * characters(requests)
            progress.to(progress.done + count, total=total)

        for i, name in enumerate(models):
            model, tokenizer = load_model(
                name, device=device, dtype=dtype, trust_remote_code=trust_remote_code
            )
            if long == "whole":
                _check_endless(model, name)
            start = time.perf_counter()
            title = name if len(name) <= 30 else f"…{name[-29:]}"
            progress.call(f"{title} ({i + 1} of {len(models)})" if models[1:] else title)
            with _quiet():
                scorer = HarnessModel(
                    model,
                    tokenizer,
                    batch_size=batch_size,
                    max_length=max_length,
                    whole=long == "whole",
                    share=share,
                    cache=None if directory is None else directory / "answers.sqlite",
                    processes=processes,
                    advance=advance,
                )
                place = _place(name)
                facts = {
                    "name": name,
                    "place": place,
                    "fingerprint": scorer.identity["weights"],
                    "parameters": sum(parameter.numel() for parameter in model.parameters()),
                    "dtype": str(model.dtype).removeprefix("torch."),
                    "device": str(model.device),
                    "max_length": None if long == "whole" else scorer.max_length,
                    "begins_with_bos": bool(scorer.bos),
                }
                if place in kept:
                    decisive = ("dtype", "max_length", "begins_with_bos", "fingerprint")
                    _check_same(directory, {key: kept[place][key] for key in decisive}, facts)
                for task in loaded["tasks"].values():  # the same examples for every model
                    task.set_fewshot_seed(seed=1234)
                raw = harness(scorer, loaded, limit=limit, bootstrap_iters=1000)
            counts = {
                "log_likelihoods": scorer.answered,
                "found": scorer.found,
                "prompts": scorer.prompts,
                "prompts_cut": scorer.cut,
                "seconds": round(time.perf_counter() - start, 1),
            }
            scores = {task: _scores(task, raw) for task in raw["results"]}
            if place in kept:  # the counts are those of all commands
                counts = {key: round(count + kept[place][key], 1) for key, count in counts.items()}
                scores = kept[place]["tasks"] | scores
            results["models"].append(facts | counts | {"tasks": scores})
    if earlier is not None:
        absent = {task: why for task, why in earlier["left_out"].items() if task not in names}
        results["left_out"] = absent | results["left_out"]
    if directory is not None and main:
        rows = io.StringIO(newline="")
        csv.writer(rows).writerows(report.result_rows(results))
        text = json.dumps(_finite(results), indent=2, ensure_ascii=False, allow_nan=False)
        with _writing(directory):
            write_atomically(directory / "results.csv", rows.getvalue())
            write_atomically(directory / "results.md", report.results_markdown(results))
            write_atomically(directory / "results.json", text + "\n")
    return results


def _directory(path: Path) -> Path:
    """The directory of results, created and checked for writing before hours of scoring."""
    with _writing(output_folder(path, "--output")):
        tempfile.TemporaryFile(dir=path).close()
    AnswerCache(path / "answers.sqlite", {}).close()
    return path


def _earlier(
    directory: Path, results: dict[str, Any], models: list[str], tasks: set[str]
) -> dict[str, Any] | None:
    """The results of an earlier command that stay beside those of `tasks`; None if all are scored again.

    Raises:
        InputError: they are of other models or settings, or unreadable.
    """
    file = directory / "results.json"
    if not file.is_file():
        return None
    try:
        earlier = json.loads(file.read_text(encoding="utf-8"))
        before = {_place_of(model): model["name"] for model in earlier["models"]}
        now = {_place(name): name for name in models}
        others = sorted({task for model in earlier["models"] for task in model["tasks"]} - tasks)
        if before.keys() <= now.keys() and not others:
            return None
        for scores in (scores for model in earlier["models"] for scores in model["tasks"].values()):
            for kind in ("metrics", "stderr"):  # infinities are written as text
                scores[kind] = {
                    k: float(v) if isinstance(v, str) else v for k, v in scores[kind].items()
                }
        settings = _settings(earlier)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise InputError(
            f"--output: {file} is damaged, or of another version; remove it, or choose another directory"
        ) from None
    advice = "or choose another --output"
    if lacking := [name for place, name in before.items() if place not in now]:
        raise InputError(
            f"--output: {file} also has models {', '.join(lacking)}: name them too, {advice}"
        )
    if new := [name for place, name in now.items() if place not in before]:
        raise InputError(
            f"--output: {file} has no results of {', '.join(new)}: name its other tasks too "
            f"({', '.join(others)}), {advice}"
        )
    _check_same(directory, settings, _settings(results))
    return earlier


def _place(name: str) -> str:
    """The full path of a folder, however it is named; of anything else the name."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.is_dir() else name


def _place_of(model: dict[str, Any]) -> str:
    """The place of a model in results.json; older files have only its name."""
    return model.get("place") or _place(model["name"])


def _settings(results: dict[str, Any]) -> dict[str, Any]:
    """What must be the same for all scores of a table. Commits and Python's patch level may differ."""
    releases = {name: version.partition("+")[0] for name, version in results["versions"].items()}
    releases["python"] = ".".join(releases["python"].split(".")[:2])
    data = results["data"] and _place(results["data"])
    return {"data": data, "limit": results["limit"], "long": results["long"]} | releases


def _check_same(directory: Path | None, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises `InputError` if a value of `before` is another one now: no table may have scores of both."""
    for key, value in before.items():
        if now.get(key) != value:
            raise InputError(
                f"--output: {directory}: results.json has other tasks with {key} {value}, this command has "
                f"{now.get(key)}; choose another directory, or remove the file"
            )


@contextlib.contextmanager
def _writing(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if no_room(error):
            raise DiskFull(
                f"--output: {directory}: the disk is full; make room, and start again: answers are kept"
            ) from None
        raise InputError(
            f"--output: {directory}: {error.strerror}; choose another directory"
        ) from None


def launched() -> Any:
    """accelerate's state of this process; None if there is only one process."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    from accelerate import PartialState
    from accelerate.utils import parse_flag_from_env

    return PartialState(
        cpu=parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.cuda.is_available()
    )


def _fitting(
    sources: list[TaskSource],
    models: list[str],
    max_length: int | None,
    long: str,
    trust_remote_code: bool,
) -> tuple[list[TaskSource], dict[str, str]]:
    """The sources without needles longer than what every model sees at once, and why they are left out."""
    if long == "whole":
        return sources, {}
    sees = max_length or min(_sees(name, trust_remote_code) for name in models)
    fitting = [source for source in sources if not source.needle or source.needle.length <= sees]
    how = f"a model sees {sees} tokens at once; read them with --long whole, or with --max-length"
    if not fitting:
        raise InputError(f"--tasks: no needle fits: {how}")
    return fitting, {f"needles of more than {sees} tokens": how} if len(fitting) < len(
        sources
    ) else {}


def _sees(name: str, trust_remote_code: bool) -> int:
    """Tokens that a model sees at once, as the harness reads its config."""
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot load {name}: {str(error).splitlines()[0]}") from error
    known = (
        getattr(config, key, None) for key in ("n_positions", "max_position_embeddings", "n_ctx")
    )
    return next(filter(None, known), 2048)


def most_tokens(models: list[str], trust_remote_code: bool = False) -> Callable[[str], int]:
    """The function that counts a text's tokens, by whichever of the models' tokenizers makes most of it.

    So a prompt fits every model, and does not depend on their order.
    """
    different: dict[str, Any] = {}
    for name in models:
        try:
            place = resolve(name).tokenizer
            tokenizer: Any = AutoTokenizer.from_pretrained(
                place, trust_remote_code=trust_remote_code
            )
        except Exception as error:  # tokenizers and transformers share no exception class
            raise InputError(
                f"{name}: its tokenizer cannot be loaded ({first_line(error)})"
            ) from error
        different[tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else name] = tokenizer

    def count(text: str) -> int:
        return max(
            len(each(text, add_special_tokens=False).input_ids) for each in different.values()
        )

    return count


def _check_endless(model: Any, name: str) -> None:
    """Raises `InputError` for a model whose cache grows with the text or whose positions are limited."""
    try:
        if model.config.model_type == "nalanda":
            model.model.check_carries()
        elif any(
            getattr(model.config, key, None)
            for key in ("max_position_embeddings", "n_positions", "n_ctx")
        ):
            raise ValueError
    except ValueError:
        raise InputError(
            f"{name}: is not recurrent; leave out --long whole to read long texts in windows"
        ) from None


def _scores(task: str, raw: dict[str, Any]) -> dict[str, Any]:
    """One task's metrics and their standard errors from the harness's results."""
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
    if (
        "perplexity" in metrics and samples
    ):  # of an ending, as LAMBADA's; the harness has no bits for it
        sizes = [len(sample["arguments"][0][1].encode()) for sample in samples]
        metrics["bits_per_byte"] = (
            -sum(sample["perplexity"] for sample in samples) / sum(sizes) / math.log(2)
        )
        for sample, size in zip(samples, sizes, strict=True):
            sample["bits_per_byte"] = (sample["perplexity"], size)
    for metric in report.PERPLEXITIES:
        if metric in metrics and len(samples) > 1:
            stderr[metric] = _perplexity_stderr(
                metric, [sample[metric] for sample in samples], metrics[metric]
            )
    if (
        "contains" in metrics and len(samples) > 1
    ):  # averaged by numpy, of which the harness knows no error
        found = np.array([sample["contains"] for sample in samples], dtype=float)
        stderr["contains"] = float(found.std(ddof=1)) / math.sqrt(len(found))
    return {
        "metrics": metrics,
        "stderr": stderr,
        "documents": len({sample["doc_id"] for sample in samples}),  # a sample for each filter
        "fingerprint": _fingerprint(samples),
        "version": raw["versions"].get(task),
    }


def _perplexity_stderr(metric: str, items: list, value: float) -> float:
    """Standard error of exp(−Σℓ/Σw) over documents (delta method); the harness has none if w varies."""
    values, weights = np.array(
        [item if isinstance(item, tuple) else (item, 1) for item in items], dtype=float
    ).T
    error = ratio(values, weights)[1] or 0.0
    return error / math.log(2) if metric == "bits_per_byte" else value * error


def _fingerprint(samples: list[dict[str, Any]]) -> str:
    """The first 16 hexadecimal digits of a SHA-256 over the documents' prompts and targets, in order.

    Other fields are left out, because local files and the hub's differ in them.
    """
    asked = [[sample["doc_id"], sample["arguments"], sample["target"]] for sample in samples]
    return hashlib.sha256(json.dumps(asked, default=str).encode()).hexdigest()[:16]


def _finite(value: Any) -> Any:
    """The value with infinities as text, because JSON has none."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences the harness's logs, warnings, prints and progress bars."""
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
