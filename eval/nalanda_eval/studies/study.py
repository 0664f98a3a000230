"""A study: small models on a text and on recall, all of them with one seed, the finalists with several.

`study.yaml` of its folder has the questions, `lm.yaml` the recipe of the language models, `runs.jsonl` a line
for every run. `run_study` trains what has no line yet; `report` makes tables, pictures and decisions of
the lines.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import shutil
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from nalanda.bench.baselines import Bigram
from nalanda.common.errors import InputError, output_folder
from nalanda.common.text import suggest
from nalanda.config.load import load_config, read_yaml, recipe_folders, section
from nalanda.config.schema import DataConfig, RunConfig, TokenizerConfig
from nalanda.data.prepare import prepare
from nalanda.data.token_set import TokenSet, is_token_set, read_index
from nalanda.data.tokenizer import build_tokenizer
from nalanda.train.build import open_batches
from nalanda.train.log import read_facts, read_metrics, versions
from nalanda.train.loop import train
from nalanda_eval import recall
from nalanda_eval.analysis import gradient_spread
from nalanda_eval.sweep import Jobs, Record, follow, key, records
from nalanda_eval.synthetic import MQAR

TASKS = ("lm", "recall")


MATCHES = ("parameters", "state")

# ------------------------------ what study.yaml says


@dataclass
class Question:
    """Systems that one question is about: each combination of what `over` lists, and `systems` by name.

    A system is a mapping of model keys; a dot leads into a mapping, `rate` multiplies the learning rates.
    """

    ask: str
    over: dict[str, Any] = field(default_factory=dict)
    systems: dict[str, Any] = field(default_factory=dict)
    tasks: list[Literal["lm", "recall"]] = field(default_factory=lambda: list(TASKS))
    match: dict[str, Any] = field(default_factory=dict)
    """Of a task, what its models are equal in: parameters, state (and parameters) or both; default both."""

    def expand(self) -> dict[str, dict[str, Any]]:
        """All systems by name."""
        found = {}
        lists = [values if isinstance(values, list) else [values] for values in self.over.values()]
        for values in itertools.product(*lists) if lists else ():
            keys = nested(dict(zip(self.over, values, strict=True)))
            found[title(keys)] = keys
        return found | {name: nested(keys) for name, keys in self.systems.items()}


@dataclass
class Finals:
    seeds: list[int]
    """Other than the screening's: who was chosen by a seed is not judged by it."""
    systems: list[str]
    """That take part whatever the screening says."""
    lm: list[str] = field(default_factory=list)
    """That take part as language models alone."""
    best: list[str] = field(default_factory=list)
    """Questions of which the best form takes part as well, with all their mixers; `ranking` says which."""
    match: dict[str, Any] = field(default_factory=dict)
    """As a question's."""
    recall: dict[str, Any] = field(default_factory=dict)
    """Settings of recall's training that are other than the screening's."""


@dataclass
class Claim:
    """`a` is said to be better than `b`, or equal to it: names of finalists, in which `best:QUESTION` stands
    for the form that the screening chose."""

    claim: str
    a: str
    b: str
    says: Literal["better", "equal"] = "better"


@dataclass
class Decision:
    """Whether the form that the screening chose of a question takes the place of the default."""

    question: str
    default: str
    against: str
    """A form that both are compared with."""


@dataclass
class Study:
    recall: dict[str, Any]
    """`task`: MQAR's settings; `model`: keys over those of the bench; `training`; `state` in bytes."""
    questions: dict[str, Any]
    finals: Finals
    decision: Decision | None = None
    claims: list[Any] = field(default_factory=list)
    seed: int = 0


def matches(match: dict[str, Any], task: str) -> Sequence[str]:
    asked = match.get(task, "both")
    return MATCHES if asked == "both" else (asked,)


def nested(keys: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, value in keys.items():
        *parents, last = path.split(".")
        place = found
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return found


def title(keys: dict[str, Any]) -> str:
    """`deltanet + nala(angle=rms, power=2)`; what else is set comes behind."""

    def with_options(name: str, options: dict[str, Any]) -> str:
        return name + (f"({', '.join(f'{k}={v}' for k, v in options.items())})" if options else "")

    known = ("mixer", "mixer_options", "feature_map", "feature_map_options", "rate")
    name = with_options(str(keys.get("mixer", "")), keys.get("mixer_options", {}))
    if keys.get("feature_map"):
        name += " + " + with_options(keys["feature_map"], keys.get("feature_map_options", {}))
    rest = {k: v for k, v in keys.items() if k not in known}
    rate = f" at {keys['rate']:g}× the rate" if keys.get("rate", 1) != 1 else ""
    return with_options(name, rest) + rate


def load_study(directory: Path) -> tuple[Study, dict[str, Question], dict[str, Any]]:
    """(study.yaml, its questions, lm.yaml as a mapping). Raises `InputError`."""
    files = directory / "study.yaml", directory / "lm.yaml"
    for file in files:
        if not file.is_file():
            raise InputError(f"{file}: no such file; a study's folder has study.yaml and lm.yaml")
    values, lm = (read_yaml(file) for file in files)
    study: Study = section(Study, values, "")
    study.claims = [section(Claim, claim, f"claims[{i}].") for i, claim in enumerate(study.claims)]
    questions = {
        name: section(Question, asked, f"questions.{name}.") for name, asked in study.questions.items()
    }
    load_config(files[1])
    names = systems(questions)
    mqar(study.recall)
    for place, training in (
        ("recall.training", study.recall.get("training", {})),
        ("finals.recall", study.finals.recall),
    ):
        section(recall.Training, training, f"{place}.")
    for name, part in [*((f"questions.{n}", q) for n, q in questions.items()), ("finals", study.finals)]:
        for task, match in part.match.items():
            if task not in TASKS or match not in (*MATCHES, "both"):
                known = "lm or recall; parameters, state or both"
                raise InputError(f"{name}.match: {task}: {match}: expected {known}")
    decided = [study.decision.question] if study.decision else []
    for name in (*study.finals.best, *decided):
        if name not in questions:
            raise InputError(f"finals.best: no question {name!r}{suggest(name, questions)}")
    for name in (*study.finals.systems, *study.finals.lm):
        if name not in names:
            raise InputError(f"finals: no system {name!r}{suggest(name, names)}")
    if study.seed in study.finals.seeds:
        raise InputError(f"finals.seeds: {study.seed} chose the finalists and cannot judge them")
    return study, questions, lm


def systems(questions: dict[str, Question]) -> dict[str, dict[str, Any]]:
    """Every question's systems by name. Raises `InputError` where one name stands for two."""
    found: dict[str, dict[str, Any]] = {}
    for question in questions.values():
        for name, keys in question.expand().items():
            if found.setdefault(name, keys) != keys:
                raise InputError(f"questions: {name!r} is two systems: give one another name")
    return found


# ------------------------------ the plan


@dataclass(frozen=True)
class Trial:
    """A row of the tables: a system on a task, as it was matched, and the settings of its runs by seed."""

    question: str
    system: str
    task: str
    match: str
    settings: tuple[dict[str, Any], ...]


def plan_trials(
    question: str, asked: dict[str, dict[str, Any]], tasks: Iterable[str], match: dict[str, Any],
    seeds: Sequence[int], study: Study, lm: dict[str, Any],
) -> tuple[list[Trial], list[str]]:  # fmt: skip
    """The cells of systems on tasks, and a note on each that cannot be had: a state that no sizes give."""
    found, notes = [], []
    with warnings.catch_warnings(action="ignore"):  # a study may ask about what a map warns of
        for task, (name, keys) in itertools.product(tasks, asked.items()):
            for equal in matches(match, task):
                try:
                    model = sized(task, equal, keys, study, lm)
                except ValueError as error:
                    notes.append(f"{name} is left out of {task} at equal {equal}: {error}")
                    continue
                if recall.grows(recall.configured(model)):  # it has no state to match, and a row all the same
                    equal = "parameters"
                if (name, task, equal) in {(cell.system, cell.task, cell.match) for cell in found}:
                    continue
                runs = tuple(
                    trial_settings(task, model, keys.get("rate", 1), seed, study, lm) for seed in seeds
                )
                found.append(Trial(question, name, task, equal, runs))
    return found, notes


def sized(task: str, match: str, keys: dict[str, Any], study: Study, lm: dict[str, Any]) -> dict[str, Any]:
    """The model keys of a system on a task: all of a task have equal parameters, by the GLU's width, and
    those of `match` "state" equal bytes of state as well. Raises ValueError where that cannot be."""
    base = lm["model"] if task == "lm" else recall.MODEL | study.recall.get("model", {})
    own = {k: v for k, v in keys.items() if k != "rate"}
    if "mixer" in own:  # what the recipe's own mixer has is not the others'
        base = {k: v for k, v in base.items() if k not in MIXERS_OWN}
    model = base | own
    recall.configured(model)
    most = most_lm_parameters(key(base))
    if match == "state":
        if task == "recall":
            model = recall.with_state(model, study.recall["state"])
        else:
            wanted = recall.configured(lm["model"]).state_bytes(1, torch.float32)
            model = narrowed(model, wanted)
    return recall.with_parameters(model, most)


NEAR = 0.05  # of a state: what short convolutions keep shrinks with the keys, and sizes are multiples of 8


MIXERS_OWN = ("mixer", "mixer_options", "feature_map", "feature_map_options", "conv_size", "use_gate")


@cache
def most_lm_parameters(base: str) -> int:
    return recall.most_recall_parameters(json.loads(base))


def narrowed(model: dict[str, Any], wanted: int) -> dict[str, Any]:
    """The model with keys as wide as gives it `wanted` bytes of state; values keep their width, as in the
    recipes' `expand_k`. Where no key size does, keys and values alike change."""
    config = recall.configured(model)
    if recall.grows(config):
        return model

    def with_keys(K: int) -> dict[str, Any]:
        return model | {"expand_k": K / config.head_dim}

    def measured(K: int) -> int:
        return recall.configured(with_keys(K)).state_bytes(1, torch.float32)

    least = measured(8)
    by_k = (measured(16) - least) / 8  # affine in K, whatever the mixer

    def off(K: int) -> float:
        return abs((least + by_k * (K - 8)) / wanted - 1)

    if off(config.key_dim) <= recall.CLOSE:
        return model
    K = min(range(8, 4 * config.head_dim, 8), key=off)
    if off(K) <= NEAR:
        return with_keys(K)
    return recall.with_state(model, wanted)


def trial_settings(
    task: str, model: dict[str, Any], rate: float, seed: int, study: Study, lm: dict[str, Any]
) -> dict[str, Any]:
    """All that a run follows from, but the text: the key of its record."""
    if task == "recall":
        training = section(recall.Training, study.recall.get("training", {}), "recall.training.")
        training = dataclasses.replace(training, lr=training.lr * rate)
        return recall.recall_settings(model, mqar(study.recall), seed, training)
    recipe = {k: v for k, v in lm.items() if k not in ("output_dir", "log", "checkpoint", "data")}
    optim = lm.get("optim", {})
    lr = optim.get("lr", run_config(key(lm)).optim.lr)
    return recipe | {"model": model, "seed": seed, "data": rows_of(lm), "optim": optim | {"lr": lr * rate}}


def rows_of(lm: dict[str, Any]) -> dict[str, Any]:
    """What of the recipe's data decides the rows, but the text."""
    return {k: v for k, v in lm["data"].items() if k not in ("source", "workers")}


@cache
def run_config(recipe: str) -> RunConfig:
    return section(RunConfig, json.loads(recipe), "")


def mqar(values: dict[str, Any]) -> MQAR:
    try:
        return section(MQAR, values.get("task", {}), "recall.task.")
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"recall.task: {error}") from None


def screening(
    study: Study, questions: dict[str, Question], lm: dict[str, Any]
) -> tuple[list[Trial], list[str]]:
    """The cells of all questions, with the first seed, and notes on what is left out."""
    found, notes = [], []
    for name, asked in questions.items():
        more, left_out = plan_trials(name, asked.expand(), asked.tasks, asked.match, [study.seed], study, lm)
        found += more
        notes += left_out
    return found, notes


# ------------------------------ the runs


def language(settings: dict[str, Any], lm: dict[str, Any], text: Path, work: Path) -> Record:
    """Trains a language model and returns its record; its folder in `work` is there while it trains.

    Returns:
        `trial_settings`; `score`, the validation loss in nats a token, and `scores`, perplexities by source;
        `curve`, [step, training loss]; `parameters`, `state_bytes` (fp32, after a row), `state_grows`,
        `flops_per_token` of a forward pass; `gradient_spread` by layer, see `analysis`; `tokens`, `seconds`,
        `device`, `versions`. A run that diverged has `failed`, why, and no scores.
    """
    start = time.perf_counter()
    place = work / sha256(key(settings).encode()).hexdigest()[:16]
    recipe = lm | settings | {"output_dir": str(place), "tokenizer": str(text / "tokenizer")}
    config = run_config(key(recipe | {"data": lm["data"] | {"source": str(text)}}))
    work.mkdir(parents=True, exist_ok=True)
    failed = None
    with place.with_suffix(".log").open("a") as log, contextlib.redirect_stdout(log):
        try:
            train(config)
        except InputError as error:
            failed = str(error)
            if not (place / "metrics.jsonl").is_file():  # bad input, not training that diverged
                raise
    facts, lines = read_facts(place), list(read_metrics(place / "metrics.jsonl"))
    length = config.data.seq_len
    shape = recall.configured(settings["model"], text_facts(text)["vocab_size"])
    record = {
        "settings": settings,
        "curve": [[line["step"], line["loss"]] for line in lines if "loss" in line],
        "parameters": facts["parameters"],
        "state_bytes": shape.state_bytes(length, torch.float32),
        "state_grows": recall.grows(shape),
        "flops_per_token": shape.flops_per_token(length),
        "tokens": config.train.steps * config.train.tokens_per_step,
        "text": text_facts(text),
        "seconds": time.perf_counter() - start,
        "device": facts["device"],
        "versions": facts["versions"],
    }
    if failed:
        record["failed"] = failed
    else:
        measured = next(line for line in reversed(lines) if "val_loss" in line)
        named = {k.removeprefix("val_ppl/"): v for k, v in measured.items() if k.startswith("val_ppl/")}
        model = AutoModelForCausalLM.from_pretrained(place / "final", dtype=torch.float32)
        tokens = torch.as_tensor(TokenSet(text, "validation").read(0, SPREAD_ROWS * length))
        record |= {
            "score": measured["val_loss"],
            "scores": named,
            "gradient_spread": gradient_spread(model, tokens.view(SPREAD_ROWS, length)),
        }
    shutil.rmtree(place)
    place.with_suffix(".log").unlink()
    return json.loads(json.dumps(record))


SPREAD_ROWS = 16


def bigram_settings(seed: int, lm: dict[str, Any]) -> dict[str, Any]:
    """What bigrams follow from: which tokens the language models of a seed see."""
    same = {name: lm[name] for name in ("tokenizer", "train")}
    return {"bigrams": "Kneser-Ney", "seed": seed, "data": rows_of(lm), **same}


def measure_bigrams(settings: dict[str, Any], lm: dict[str, Any], text: Path) -> Record:
    """`baselines.Bigram` of the very tokens that every language model of the seed trains on, and its loss in
    nats a token on the rows that these are validated on; as `language`, what there is of that."""
    start = time.perf_counter()
    recipe = lm | {"seed": settings["seed"], "tokenizer": str(text / "tokenizer")}
    config = run_config(key(recipe | {"data": lm["data"] | {"source": str(text)}}))
    tokenizer = build_tokenizer(config.tokenizer, config.data, text / "tokenizer")
    batches, validation = open_batches(config, tokenizer)
    with contextlib.closing(batches):
        seen = itertools.islice(batches, config.train.steps * config.accumulation(processes=1))
        found = Bigram(seen, len(tokenizer)).perplexity(itertools.chain(*validation.values()))
    return {
        "settings": settings,
        "score": math.log(found),
        "tokens": config.train.steps * config.train.tokens_per_step,
        "text": text_facts(text),
        "seconds": time.perf_counter() - start,
        "device": "cpu",
        "versions": versions(),
    }


def text_facts(text: Path) -> dict[str, Any]:
    """A prepared text's name, the fingerprint of its documents and tokens, and its vocabulary."""
    index = read_index(text)
    made = [index["settings"]["corpus"], index["tokenizer"]["fingerprint"]]
    source = index["settings"]["source"]
    return {
        "name": Path(source).name if isinstance(source, str) else ", ".join(source),
        "fingerprint": sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()[:16],
        "vocab_size": index["tokenizer"]["vocab_size"],
        "tokens": index["train"]["tokens"],
    }


def jobs(cells: Iterable[Trial], lm: dict[str, Any], text: Path, work: Path) -> Jobs:
    """What `grid` trains: each setting once, whichever cells have it."""
    found: dict[str, Any] = {}
    for cell in cells:
        for chosen in cell.settings:
            if cell.task == "lm":
                found[key(chosen)] = partial(language, chosen, lm, text, work)
            else:
                task, training = mqar(chosen), section(recall.Training, chosen["training"], "")
                found[key(chosen)] = partial(
                    recall.run_recall, chosen["model"], task, chosen["seed"], training
                )
    return found


# ------------------------------ who goes to the finals


def form(system: str) -> str:
    """`nala(power=2)` of `deltanet + nala(power=2)`."""
    return system.partition(" + ")[2] or system


def ranking(cells: Iterable[Trial], found: dict[str, Record]) -> dict[str, float]:
    """Mean ranks of forms, the best first, from 1: over mixers, tasks and ways of matching, by the score of
    the screening; one that diverged is last. Equals share their places' mean."""
    columns: dict[tuple, dict[str, float]] = {}
    for cell in cells:
        record, mixer = found[key(cell.settings[0])], cell.system.removesuffix(form(cell.system))
        worse = -record["score"] if cell.task == "recall" else record.get("score", math.inf)
        columns.setdefault((mixer, cell.task, cell.match), {})[form(cell.system)] = worse
    ranks: dict[str, list[float]] = {}
    for column in columns.values():
        values = sorted(column.values())
        for name, value in column.items():
            ranks.setdefault(name, []).append(1 + values.index(value) + (values.count(value) - 1) / 2)
    return dict(sorted(((name, fmean(r)) for name, r in ranks.items()), key=lambda item: item[1]))


def chosen(study: Study, first: Iterable[Trial], found: dict[str, Record]) -> dict[str, str]:
    """The best form of each question of `finals.best` that is not in the finals anyway."""
    there = {form(name) for name in study.finals.systems}
    best = {}
    for question in study.finals.best:
        ranks = ranking((cell for cell in first if cell.question == question), found)
        best[question] = next(name for name in ranks if name not in there)
    return best


def finalists(
    study: Study, questions: dict[str, Question], lm: dict[str, Any], best: dict[str, str]
) -> tuple[list[Trial], list[str]]:
    known = systems(questions)
    names = [*study.finals.systems]
    names += [name for q, won in best.items() for name in questions[q].expand() if form(name) == won]
    training = study.recall.get("training", {}) | study.finals.recall
    study = dataclasses.replace(study, recall=study.recall | {"training": training})
    final, found, notes = study.finals, [], []
    for some, tasks in ((dict.fromkeys(names), TASKS), (final.lm, ["lm"])):
        asked = {name: known[name] for name in some}
        more, left_out = plan_trials("finals", asked, tasks, final.match, final.seeds, study, lm)
        found += more
        notes += left_out
    return found, notes


# ------------------------------ the command


def folder(directory: str | None = None, *, quick: bool = False) -> Path:
    """The study's place: recipes/study of a checkout, elsewhere runs/study; if `quick`, runs/study-quick."""
    usual = Path("recipes/study") if Path("recipes/study/study.yaml").is_file() else Path("runs/study")
    return Path(directory) if directory else Path("runs/study-quick") if quick else usual


def begin_study(place: Path, *, quick: bool = False) -> None:
    """Puts the study.yaml and lm.yaml that ship with Nalanda into a new folder. Raises `InputError`."""
    if (place / "study.yaml").is_file():
        return
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise InputError(f"{place} holds files and no study.yaml; choose another folder")
    shipped = next(recipes / "study" for recipes in recipe_folders() if (recipes / "study").is_dir())
    output_folder(place, "the study's folder")
    for name in ("study.yaml", "lm.yaml"):
        shutil.copy(shipped / ("quick" if quick else "") / name, place / name)


def run_study(directory: Path, *, text: str | None = None, workers: int = 2) -> None:
    """Trains what the study lacks: first one seed of every system, then the finalists. Counts the bigrams of
    the tokens that each seed's language models see.

    Args:
        directory: with study.yaml and lm.yaml; `runs.jsonl` in it has a line for each finished run, `work`
            the tokenised text and what is under way.
        text: a corpus, as `data.source` of a recipe; by default lm.yaml's.
        workers: processes, of a thread each.

    Raises:
        InputError: settings that cannot work, or a text other than that of the recorded runs.
    """
    console = Console()
    study, questions, lm = load_study(directory)
    first, notes = screening(study, questions, lm)
    file, work = directory / "runs.jsonl", directory / "work"
    prepared = prepare_text(lm, text, work, workers)
    mine = text_facts(prepared)
    for record in records(file).values():
        if (other := record.get("text", mine))["fingerprint"] != mine["fingerprint"]:
            raise InputError(
                f"{file} has runs on another text, {other['name']}, than {mine['name']}: give that one with "
                "--text, or another folder"
            )
    for note in notes:
        console.print(note, style="dim", markup=False, highlight=False, soft_wrap=True)
    follow(jobs(first, lm, prepared, work), file, workers, console, describe_trial)
    best = chosen(study, first, records(file))
    for question, won in best.items():
        console.print(f"best of {question}: {won}", markup=False, highlight=False)
    last, _ = finalists(study, questions, lm, best)
    asked = [bigram_settings(seed, lm) for seed in (study.seed, *study.finals.seeds)]
    baselines = {key(settings): partial(measure_bigrams, settings, lm, prepared) for settings in asked}
    follow({**baselines, **jobs(last, lm, prepared, work)}, file, workers, console, describe_trial)


def prepare_text(lm: dict[str, Any], text: str | None, work: Path, workers: int) -> Path:
    """The text as token shards, from an earlier call where there was one."""
    place = work / "text"
    source = text or lm["data"]["source"]
    if is_token_set(place):
        held = read_index(place)["settings"]["source"]
        if text is not None and held != source:
            raise InputError(f"{place} holds {held}: remove it, or give another folder for {source}")
        return place
    data = section(DataConfig, lm["data"] | {"source": source}, "data.")
    tokenizer = section(TokenizerConfig, lm["tokenizer"], "tokenizer.")
    prepare(data, tokenizer, place, workers=workers, say=lambda line: print(line, flush=True))
    return place


def describe_trial(record: Record) -> str:
    asked = record["settings"]
    if "bigrams" in asked:
        return f"lm, seed {asked['seed']}: bigrams {record['score']:.3f}"
    model, task = asked["model"], "recall" if "task" in asked else "lm"
    mixer = model["mixer"] if isinstance(model["mixer"], str) else " ".join(model["mixer"])
    name = title({k: model[k] for k in MIXERS_OWN if k in model} | {"mixer": mixer})
    result = f"{record['score']:.3f}" if "score" in record else "diverged"
    return f"{task}, seed {asked['seed']}: {name} {result}"
