"""lm-evaluation-harness in process, on our checkpoints and on any causal language model of the hub.

The tasks are the harness's own files with their prompts and metrics; local data replaces only the documents.
A data directory holds any of these files, as `.jsonl` or `.jsonl.gz`, with the fields of the hub's datasets.
Where two forms are listed, the second is the compact form of published evaluation bundles:

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
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoTokenizer

from nalanda.common.errors import DiskFull, InputError, first_line, no_room, output_folder
from nalanda.common.files import alone, write_atomically
from nalanda.common.products import product_route
from nalanda.common.progress import Progress
from nalanda.common.scores import PERPLEXITIES, PROMPTS, find_results, read_scores
from nalanda.common.text import without_infinities
from nalanda.common.versions import versions
from nalanda.inference.load import (
    check_chat_template,
    choose_device,
    is_ours,
    load_model,
    number_format,
)
from nalanda.inference.options import LoadOptions
from nalanda.train.card import update_card
from nalanda.train.launch import on_main_process
from nalanda.train.log import read_facts
from nalanda.train.resolve import resolve, resolve_all
from nalanda_eval import report
from nalanda_eval.cache import AnswerCache
from nalanda_eval.needles import SAMPLES
from nalanda_eval.options import EvalOptions, check_least
from nalanda_eval.perplexity import context_length, ratio
from nalanda_eval.task_data import TaskSource, find_tasks

DECISIVE = ("dtype", "max_length", "begins_with_bos", "fingerprint", "chat_template")
"""Facts of a model that all its scores share."""
COUNTS = ("log_likelihoods", "found", "prompts", "prompts_cut", "seconds")
"""Figures of a model that are summed over commands."""


@dataclass(frozen=True)
class Session:
    """All that is the same for every model of a command."""

    options: EvalOptions
    loaded: dict[str, Any]
    """The harness's tasks and groups of tasks."""
    directory: Path | None
    processes: Any
    """accelerate's state."""
    advance: Callable[[float], None]


def evaluate(
    models: list[str],
    tasks: list[str],
    options: EvalOptions = EvalOptions(),
    loading: LoadOptions = LoadOptions(),
) -> dict[str, Any]:
    """Score models with lm-evaluation-harness; `report.print_results` prints the result.

    Args:
        models: checkpoint directories or hub ids.
        tasks: `table4` (the literature's suite), `all` (it and the other tasks of the module's docstring, up
            to CommonsenseQA), `recall` (those after it), `needles` (RULER's; one kind is `niah_single_1`, one
            length of it `niah_single_1_4k`), `python_docs` (the demo's), names of the harness's tasks, task
            files (.yaml), or directories of them. A relative `data_files` in a task file refers to `data`,
            or else to the file's folder.
        options: as of `nalanda eval`. `data` is a directory (see the module's docstring). `limit` is a number
            of documents a task, or their share if below 1. `batch_size` affects only the speed. `max_length`
            is by default the config's `max_position_embeddings`, else 2048. `long` is `window` (disjoint
            windows, of a prompt only the last), as in the literature, or `whole` (recurrent models only).
            `output` gets results.json, .md, .csv and the answer cache, from which an interrupted command
            resumes. Tasks that results.json has of the same models and settings stay in it. `num_fewshot`,
            `apply_chat_template` and `system_instruction` are lm_eval's, with its defaults: with a chat template,
            each example is a turn of the user and one of the model. `log_samples` writes lm_eval's file of
            samples for each model and task into `output`.
        loading: as in `nalanda.inference.load.load_model`.

    Raises:
        InputError: no such model, task or file, a text that is too long, or an `output` with tasks that this
            command would neither repeat nor may stand beside.
    """
    _check_options(options)
    models = resolve_all(models)
    if loading.device is not None:
        choose_device(loading.device)
    sources, left_out = find_tasks(tasks, options.data)  # before the slow import
    if options.apply_chat_template:
        _check_chat_templates(models, loading.trust_remote_code)
    sources, left_out_needles = _fitting_needles(sources, models, options, loading)
    left_out |= left_out_needles
    directory = None if options.output is None else _open_output(Path(options.output))

    processes = launched()
    if processes.num_processes > 1 and loading.device is None:
        loading = replace(loading, device=str(processes.device))
    loaded = _load_tasks(sources, models, options, loading)
    results = _begin_results(options, processes) | {"left_out": left_out, "models": []}
    task_names = {*loaded["tasks"], *loaded["groups"]}
    # Before any model is loaded: results that may not stand beside others stop the command.
    earlier = _read_earlier(directory, results, models, task_names)
    earlier_models = {model["place"]: model for model in earlier["models"]}

    with Progress("loading", 0, "%") as progress:
        advance = _advance_by_characters(progress, loaded, len(models))
        session = Session(options, loaded, directory, processes, advance)
        for number, name in enumerate(models, 1):
            network, tokenizer = load_model(name, **vars(loading))
            title = name if len(name) <= 30 else f"…{name[-29:]}"
            progress.call(f"{title} ({number} of {len(models)})" if models[1:] else title)
            before = earlier_models.get(_full_path(name))
            results["models"].append(_score_model(name, network, tokenizer, session, before))

    if directory is None:
        return results

    def write() -> dict[str, Any]:
        taken = f"--output: another command writes to {directory}; start again: answers are kept"
        with alone(directory / ".results.lock", taken, seconds=60):
            # Another command may have written its scores since.
            _add_earlier(results, _read_earlier(directory, results, models, task_names), directory)
            _write_results(directory, results)
            for record in results["models"]:
                _add_to_card(record, directory / "results.json")
        return results

    return on_main_process(processes.is_main_process, write)


def _check_options(options: EvalOptions) -> None:
    """Raises `InputError` for options out of range or against each other."""
    check_least(options, batch_size=1, max_length=1, num_fewshot=0)
    limit = options.limit
    if limit is not None and not (0 < limit < 1 or (limit >= 1 and float(limit).is_integer())):
        raise InputError(
            f"--limit {limit:g}: must be a whole number of documents, or a share below 1"
        )
    if options.long not in ("window", "whole"):
        raise InputError(f"--long {options.long}: use window or whole")
    if options.long == "whole" and options.max_length is not None:
        raise InputError("--max-length: is the length of windows; leave it out with --long whole")
    if options.log_samples and options.output is None:
        raise InputError("--log-samples: writes into the directory of results; give --output")


def _begin_results(options: EvalOptions, processes: Any) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions("lm_eval", "datasets"),
        "data": None if options.data is None else _full_path(options.data),
        **{key: getattr(options, key) for key in ("limit", *PROMPTS, "batch_size", "long")},
        "processes": processes.num_processes,
    }


def _load_tasks(
    sources: list[TaskSource], models: list[str], options: EvalOptions, loading: LoadOptions
) -> dict[str, Any]:
    """The harness's tasks and groups of `sources`. Imports the harness, which takes seconds."""
    with Progress("loading lm-evaluation-harness and the tasks"), _silence_harness():
        from nalanda_eval.adapter import load_tasks

        count_tokens: Callable[[str], int] = len
        if any(source.needle for source in sources):
            count_tokens = most_tokens(models, loading.trust_remote_code)
        limit = options.limit
        samples = min(SAMPLES, int(limit)) if limit and limit >= 1 else SAMPLES
        return load_tasks(sources, count_tokens, samples, options.num_fewshot)


def _advance_by_characters(
    progress: Progress, loaded: dict[str, Any], models: int
) -> Callable[[float], None]:
    """The function that the scorer calls with the characters that it has read."""
    from nalanda_eval.adapter import characters

    def advance(count: float) -> None:
        if not progress.total:
            # The harness builds the requests during its first run; they are the same for all models.
            tasks = loaded["tasks"].values()
            progress.total = models * characters(
                request for task in tasks for request in task.instances
            )
        progress.to(progress.done + count)

    return advance


def _score_model(
    name: str, model: Any, tokenizer: Any, session: Session, before: dict[str, Any] | None
) -> dict[str, Any]:
    """Scores a model on all tasks: its entry in the results.

    before: its entry of an earlier command. Raises `InputError` if it is of other weights or settings.
    """
    from nalanda_eval.adapter import ENDLESS, HarnessModel, harness, seed_draws

    options, directory = session.options, session.directory
    in_one_pass = options.long == "whole"
    if in_one_pass:
        _check_endless(model, name)
    start = time.perf_counter()
    with _silence_harness():
        scorer = HarnessModel(
            model,
            tokenizer,
            batch_size=options.batch_size,
            max_length=ENDLESS if in_one_pass else options.max_length,
            share=not options.no_share,
            cache=None if directory is None else directory / "answers.sqlite",
            processes=session.processes,
            advance=session.advance,
        )
        # Stored beside the scores; some must agree with an earlier command's.
        facts = {
            "name": name,
            "place": _full_path(name),
            "fingerprint": scorer.identity["weights"],
            "step": _read_step(name),
            "parameters": model.num_parameters(),
            "state_bytes": _state_bytes(model),
            "dtype": number_format(model),
            "device": str(model.device),
            "products": product_route(),
            "max_length": None if in_one_pass else scorer.max_length,
            "begins_with_bos": bool(scorer.bos),
            "chat_template": _template_hash(tokenizer) if options.apply_chat_template else None,
        }

        # No table has scores of other weights or settings.
        if before is not None:
            _check_same(directory, {key: before.get(key) for key in DECISIVE}, facts)
        for task in session.loaded["tasks"].values():  # the same examples for every model
            task.set_fewshot_seed(seed=1234)
        seed_draws()
        raw = harness(
            scorer,
            session.loaded,
            limit=options.limit,
            bootstrap_iters=1000,
            system_instruction=options.system_instruction,
            apply_chat_template=options.apply_chat_template,
            fewshot_as_multiturn=options.apply_chat_template,
        )

    if directory is not None and options.log_samples and session.processes.is_main_process:
        for task, samples in raw["samples"].items():
            _write_samples(directory, name, task, samples)
    counts = {
        "log_likelihoods": scorer.answered,
        "found": scorer.found,
        "prompts": scorer.prompts,
        "prompts_cut": scorer.cut,
        "seconds": round(time.perf_counter() - start, 1),
    }
    scores = {task: _task_scores(task, raw) for task in raw["results"]}
    return facts | counts | {"tasks": scores}


def _template_hash(tokenizer: Any) -> str:
    """The first 16 hexadecimal digits of a SHA-256 over the tokenizer's chat template."""
    return hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()[:16]


def _write_samples(directory: Path, model: str, task: str, samples: list[dict[str, Any]]) -> None:
    """Writes a task's samples, one JSON object a line, as lm_eval's `--log_samples` has them."""
    from lm_eval.utils import handle_non_serializable, sanitize_list, sanitize_model_name

    lines = []
    for sample in samples:
        arguments = {
            f"gen_args_{i}": {f"arg_{j}": argument for j, argument in enumerate(request)}
            for i, request in enumerate(sample["arguments"])
        }
        texts = {name: sanitize_list(sample[name]) for name in ("resps", "filtered_resps")}
        line = sample | texts | {"arguments": arguments, "target": str(sample["target"])}
        content = without_infinities(line)
        lines.append(json.dumps(content, ensure_ascii=False, default=handle_non_serializable))

    # "." and ".." name a model too, but its samples belong below `directory`.
    name = model if model.strip("./") else _full_path(model)
    folder = directory / sanitize_model_name(name)
    with _explain_write_errors(directory):
        folder.mkdir(exist_ok=True)
        file = folder / f"samples_{task.replace('/', '_')}.jsonl"
        write_atomically(file, "\n".join([*lines, ""]))


def _write_results(directory: Path, results: dict[str, Any]) -> None:
    rows = io.StringIO(newline="")
    csv.writer(rows).writerows(report.result_rows(results))
    content = without_infinities(results)
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
    with _explain_write_errors(directory):
        write_atomically(directory / "results.csv", rows.getvalue())
        write_atomically(directory / "results.md", report.results_markdown(results))
        write_atomically(directory / "results.json", text + "\n")


def _add_to_card(record: dict[str, Any], file: Path) -> None:
    """Puts a model's scores, in `file` and in its run, into the card that lies in its folder.

    The card is of the weights as they are stored, so scores in another dtype are left out.
    """
    folder, run = Path(record["place"]), resolve(record["place"]).run
    config = folder / "config.json"
    if not (folder / "README.md").is_file() or not config.is_file():
        return
    if json.loads(config.read_bytes()).get("dtype") != record["dtype"]:
        return
    files = {each.resolve(): None for each in [*(find_results(run) if run else []), file]}
    scores = read_scores(files, lambda other: other["fingerprint"] == record["fingerprint"])
    try:
        update_card(folder, scores)
    except (OSError, UnicodeDecodeError) as error:  # the scores are in `file`
        print(f"{folder}: its card gets no scores: {first_line(error)}", file=sys.stderr)


def _read_step(name: str) -> int | None:
    """The step of a model folder that a run has written; None for any other model."""
    with contextlib.suppress(InputError):
        return read_facts(Path(name)).get("step")
    return None


def _open_output(path: Path) -> Path:
    """The directory of results, created and checked for writing before hours of scoring."""
    with _explain_write_errors(output_folder(path, "--output")):
        tempfile.TemporaryFile(dir=path).close()
    AnswerCache(path / "answers.sqlite", {}).close()
    return path


def _read_earlier(
    directory: Path | None, results: dict[str, Any], models: list[str], tasks: set[str]
) -> dict[str, Any]:
    """The results of an earlier command that stay beside those of `tasks`; empty if all are scored again.

    Raises:
        InputError: they are of other models or settings, or unreadable.
    """
    nothing = {"models": [], "left_out": {}}
    file = None if directory is None else directory / "results.json"
    if file is None or not file.is_file():
        return nothing
    try:
        earlier = json.loads(file.read_bytes())
        # Paths identify models: names may be relative to another folder.
        before = {model["place"]: model["name"] for model in earlier["models"]}
        now = {_full_path(name): name for name in models}
        others = sorted({task for model in earlier["models"] for task in model["tasks"]} - tasks)
        # Every model and task is scored again, so nothing of the file stays.
        if before.keys() <= now.keys() and not others:
            return nothing
        _text_to_infinities(earlier)
        settings = _shared_settings(earlier)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise InputError(
            f"--output: {file} is damaged, or of another version; remove it, or choose another directory"
        ) from None

    advice = "or choose another --output"
    if lacking := [name for path, name in before.items() if path not in now]:
        raise InputError(
            f"--output: {file} also has models {', '.join(lacking)}: name them too, {advice}"
        )
    if new := [name for path, name in now.items() if path not in before]:
        raise InputError(
            f"--output: {file} has no results of {', '.join(new)}: name its other tasks too "
            f"({', '.join(others)}), {advice}"
        )
    _check_same(directory, settings, _shared_settings(results))
    return earlier


def _add_earlier(results: dict[str, Any], earlier: dict[str, Any], directory: Path | None) -> None:
    """Adds an earlier command's other tasks to the results, its counts, and what it left out.

    Raises `InputError` if they are of other weights or settings.
    """
    before = {model["place"]: model for model in earlier["models"]}
    for record in results["models"]:
        if model := before.get(record["place"]):
            _check_same(directory, {key: model.get(key) for key in DECISIVE}, record)
            record |= {key: round(record[key] + model[key], 1) for key in COUNTS}
            record["tasks"] = model["tasks"] | record["tasks"]

    scored = {task for record in results["models"] for task in record["tasks"]}
    for task, reason in earlier["left_out"].items():
        if task not in scored:
            results["left_out"].setdefault(task, reason)


def _full_path(name: str) -> str:
    """The full path of a folder, however it is named; of anything else the name."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.is_dir() else name


def _state_bytes(model: Any) -> int | None:
    """Bytes of the state of one sequence of 2,048 tokens; None for another library's model."""
    count = getattr(model.config, "state_bytes", None)
    return count and count(2048, model.dtype)


def _shared_settings(results: dict[str, Any]) -> dict[str, Any]:
    """Settings that all scores of a table share. Commits and Python's patch level may differ."""
    # What follows a +, such as a commit or a CUDA build, may differ.
    releases = {name: version.partition("+")[0] for name, version in results["versions"].items()}
    releases["python"] = ".".join(releases["python"].split(".")[:2])
    prompts = {key: results.get(key, default) for key, default in PROMPTS.items()}
    fixed = {key: results[key] for key in ("data", "limit", "long")}
    return fixed | prompts | releases


def _check_same(directory: Path | None, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises `InputError` if a value of `before` is another one now: no table may have scores of both."""
    for key, value in before.items():
        if now.get(key) != value:
            raise InputError(
                f"--output: {directory}: results.json has other tasks with {key} {value}, this command has "
                f"{now.get(key)}; choose another directory, or remove the file"
            )


@contextlib.contextmanager
def _explain_write_errors(directory: Path) -> Iterator[None]:
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
    """accelerate's state of this process."""
    from accelerate import PartialState
    from accelerate.utils import parse_flag_from_env

    return PartialState(
        cpu=parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.cuda.is_available()
    )


def _fitting_needles(
    sources: list[TaskSource], models: list[str], options: EvalOptions, loading: LoadOptions
) -> tuple[list[TaskSource], dict[str, str]]:
    """The sources without needles longer than every model's context, and why these are left out."""
    if options.long == "whole" or not any(source.needle for source in sources):
        return sources, {}
    length = options.max_length
    if length is None:
        # A needle must fit the shortest context, because all models share the tasks.
        length = min(_read_context_length(name, loading.trust_remote_code) for name in models)

    fitting = [source for source in sources if not source.needle or source.needle.length <= length]
    if len(fitting) == len(sources):
        return sources, {}
    reason = (
        f"a model sees {length} tokens at once; read them with --long whole, or with --max-length"
    )
    if not fitting:
        raise InputError(f"--tasks: no needle fits: {reason}")
    return fitting, {f"needles of more than {length} tokens": reason}


def _read_context_length(name: str, trust_remote_code: bool) -> int:
    """Tokens that a model sees at once, as the harness reads its config."""
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot load {name}: {first_line(error)}") from error
    return context_length(config) or 2048


def most_tokens(models: list[str], trust_remote_code: bool = False) -> Callable[[str], int]:
    """The function that counts a text's tokens by the models' tokenizers, and returns the largest count.

    So a prompt fits every model, and does not depend on their order.
    """
    tokenizers: dict[str, Any] = {}  # those that differ
    for name in models:
        tokenizer = _load_tokenizer(name, trust_remote_code)
        # Equal rules count equally, so each is asked once.
        rules = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else name
        tokenizers[rules] = tokenizer

    def count(text: str) -> int:
        lengths = [
            len(tokenizer(text, add_special_tokens=False).input_ids)
            for tokenizer in tokenizers.values()
        ]
        return max(lengths)

    return count


def _load_tokenizer(name: str, trust_remote_code: bool) -> Any:
    """A model's tokenizer. Raises `InputError` if it cannot be loaded."""
    try:
        return AutoTokenizer.from_pretrained(
            resolve(name).tokenizer, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # tokenizers and transformers share no exception class
        raise InputError(f"{name}: its tokenizer cannot be loaded ({first_line(error)})") from error


def _check_chat_templates(models: list[str], trust_remote_code: bool) -> None:
    """Raises `InputError` for a model without a chat template, before any other is scored."""
    for name in models:
        tokenizer = _load_tokenizer(name, trust_remote_code)
        check_chat_template(tokenizer, name, "--apply-chat-template")


def _check_endless(model: Any, name: str) -> None:
    """Raises `InputError` for a model whose cache grows with the text or whose positions are limited."""
    try:
        if is_ours(model):
            model.model.check_carries()
        elif context_length(model.config):
            raise ValueError
    except ValueError:
        raise InputError(
            f"{name}: is not recurrent; leave out --long whole to read long texts in windows"
        ) from None


def _task_scores(task: str, raw: dict[str, Any]) -> dict[str, Any]:
    """One task's metrics and their standard errors from the harness's results."""
    metrics: dict[str, float] = {}
    stderr: dict[str, float | None] = {}
    for key, value in raw["results"][task].items():
        metric, _, filtered = key.partition(",")
        if not filtered:
            continue  # name, alias, sample_len
        is_error = metric.endswith("_stderr")
        metric = metric.removesuffix("_stderr")
        if filtered != "none":
            metric = f"{metric}@{filtered}"
        if not is_error:
            metrics[metric] = float(value)
        else:
            stderr[metric] = float(value) if isinstance(value, int | float) else None
    samples = raw["samples"].get(task, [])
    if "perplexity" in metrics and samples:
        # The perplexity of an ending, as LAMBADA's: the harness has no bits for it.
        sizes = [len(sample["arguments"][0][1].encode()) for sample in samples]
        nats = -sum(sample["perplexity"] for sample in samples)
        metrics["bits_per_byte"] = nats / sum(sizes) / math.log(2)
        for sample, size in zip(samples, sizes, strict=True):
            sample["bits_per_byte"] = (sample["perplexity"], size)

    if len(samples) > 1:
        for metric in PERPLEXITIES:
            if metric in metrics:
                values = [sample[metric] for sample in samples]
                stderr[metric] = _perplexity_stderr(metric, values, metrics[metric])
        if "contains" in metrics:  # averaged by numpy, of which the harness knows no error
            contains = np.array([sample["contains"] for sample in samples], dtype=float)
            stderr["contains"] = float(contains.std(ddof=1)) / math.sqrt(len(contains))
    return {
        "metrics": metrics,
        "stderr": stderr,
        "documents": len({sample["doc_id"] for sample in samples}),  # a sample for each filter
        "fingerprint": _hash_requests(samples),
        "num_fewshot": raw["n-shot"].get(task),
        "version": raw["versions"].get(task),
    }


def _perplexity_stderr(metric: str, items: list, value: float) -> float:
    """Standard error of exp(−Σℓ/Σw) over documents (delta method); the harness has none if w varies."""
    values, weights = np.array(
        [item if isinstance(item, tuple) else (item, 1) for item in items], dtype=float
    ).T
    # The error of the exponent; exp multiplies it by the value.
    error = ratio(values, weights)[1] or 0.0
    return error / math.log(2) if metric == "bits_per_byte" else value * error


def _hash_requests(samples: list[dict[str, Any]]) -> str:
    """The first 16 hexadecimal digits of a SHA-256 over the documents' prompts and targets, in order.

    Other fields are left out, because local files and the hub's differ in them.
    """
    requests = [[sample["doc_id"], sample["arguments"], sample["target"]] for sample in samples]
    return hashlib.sha256(json.dumps(requests, default=str).encode()).hexdigest()[:16]


def _text_to_infinities(results: dict[str, Any]) -> None:
    """Turns the scores that `without_infinities` wrote as text into numbers again."""
    for model in results["models"]:
        for scores in model["tasks"].values():
            for values in (scores["metrics"], scores["stderr"]):
                for metric, value in values.items():
                    if isinstance(value, str):
                        values[metric] = float(value)


@contextlib.contextmanager
def _silence_harness() -> Iterator[None]:
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
