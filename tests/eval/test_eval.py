"""Evaluation through lm-evaluation-harness on a tiny model and documents of our own making; generation."""

import csv
import dataclasses
import errno
import functools
import gzip
import io
import json
import math
import re
import shutil
import types

import nalanda_kernels
import pytest
import tiny_models
import torch
import transformers
from huggingface_hub import ModelCard
from nalanda_eval import fetch, report
from nalanda_eval import harness as harness_module
from nalanda_eval.cache import AnswerCache, model_identity
from nalanda_eval.harness import _read_earlier, evaluate
from nalanda_eval.options import EvalOptions, PerplexityOptions
from nalanda_eval.perplexity import perplexity, print_perplexity
from nalanda_eval.python_tasks import excerpts, python_tasks, write_python_tasks
from nalanda_eval.task_data import GROUPS, PACKAGED, TaskSource, find_tasks, read_rows
from tokenizers import Tokenizer, models, pre_tokenizers
from training import launched
from transformers import PreTrainedTokenizerFast

from nalanda import NalandaConfig, NalandaForCausalLM
from nalanda.common.errors import DiskFull, InputError
from nalanda.config.schema import DataConfig
from nalanda.inference.generate import generate
from nalanda.inference.load import load_model
from nalanda.inference.options import LoadOptions, Sampling, read_prompt
from nalanda.train.card import front_matter, scores_table

SENTENCE = "a river runs under the old stone bridge and the miller counts his sacks before dusk"
WORDS = SENTENCE.split()


@pytest.fixture(scope="module")
def adapter():
    """Imported only by the tests that need it: it takes seconds."""
    from nalanda_eval import adapter

    return adapter


save = functools.partial(tiny_models.save, max_position_embeddings=64)


@pytest.fixture(scope="module")
def checkpoint(tokenizer, tmp_path_factory):
    return save(tokenizer, tmp_path_factory.mktemp("model"))


def text(seed: int, words: int = 8) -> str:
    return " ".join(WORDS[(seed * 7 + i * i + i) % len(WORDS)] for i in range(words))


def short(path: str) -> str:
    return "/".join(path.split("/")[-2:])


def write(directory, name, rows):
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if name.endswith(".gz"):
        (directory / name).write_bytes(gzip.compress(lines.encode()))
    else:
        (directory / name).write_text(lines)


def arc(i):
    return {
        "query": f"Question: Why does {text(i)}?\nAnswer:",
        "choices": [text(i + j, 3) for j in range(4)],
        "gold": i % 4,
    }


def hub_arc(i, question="question"):
    return {
        question: f"Why does {text(i)}?",
        "choices": {"text": [text(i + j, 3) for j in range(4)], "label": list("ABCD")},
        "answerKey": "ABCD"[i % 4],
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The layout of local data, without WikiText; half of the files compressed."""
    directory = tmp_path_factory.mktemp("data")
    six = range(6)
    write(
        directory,
        "lambada_test.jsonl.gz",
        [{"context": text(i, 12), "continuation": f" {WORDS[i]}"} for i in six],
    )
    write(
        directory,
        "piqa_val.jsonl",
        [{"goal": text(i), "sol1": text(i + 1), "sol2": text(i + 2), "label": i % 2} for i in six],
    )
    write(
        directory,
        "hellaswag_val.jsonl.gz",
        [
            {
                "activity_label": "Milling",
                "ctx_a": text(i),
                "ctx_b": "the miller",
                "endings": [f"then [title] {text(j)}" for j in range(4)],
                "label": str(i % 4),
            }
            for i in six
        ],
    )
    write(
        directory,
        "winogrande_xl_val.jsonl",
        [
            {
                "sentence": f"{text(i)} because _ was late.",
                "option1": "Ann",
                "option2": "Bea",
                "answer": str(i % 2 + 1),
            }
            for i in six
        ],
    )
    write(directory, "arc_easy_test.jsonl.gz", [arc(i) for i in six])
    write(directory, "arc_challenge_test.jsonl", [arc(i) for i in six])
    return directory


def requests(adapter, tasks: list[str], data) -> dict[str, list[tuple]]:
    """What the harness asks a model: the arguments of the first document's requests, by task."""
    loaded = adapter.load_tasks(find_tasks(tasks, str(data))[0])["tasks"]
    for task in loaded.values():
        task.build_all_requests(limit=1, rank=0, world_size=1)
    return {name: [instance.args for instance in task.instances] for name, task in loaded.items()}


# ------------------------------ table 4 on local data


def test_local_prompts_are_the_harness_own(adapter, data, tmp_path):
    write(
        tmp_path,
        "wikitext_test.jsonl",
        [{"page": "= Mill =\n the miller 's sacks , 3 @,@ 000 of them \n"}],
    )
    assert requests(adapter, ["wikitext"], tmp_path) == {
        "wikitext": [("= Mill =\nthe miller's sacks, 3,000 of them\n",)]
    }
    asked = requests(adapter, ["table4"], data)
    assert list(asked) == GROUPS["table4"][1:]
    assert asked["lambada_openai"] == [(text(0, 12), f" {WORDS[0]}")]
    prompt = f"Question: {text(0)}\nAnswer:"
    assert asked["piqa"] == [(prompt, f" {text(1)}"), (prompt, f" {text(2)}")]
    prompt = f"Milling: {text(0)} The miller"
    assert asked["hellaswag"] == [(prompt, f" then. {text(j)}") for j in range(4)]
    assert asked["winogrande"] == [
        (f"{text(0)} because {name}", " was late.") for name in ("Ann", "Bea")
    ]
    prompt = f"Question: Why does {text(0)}?\nAnswer:"
    assert (
        asked["arc_easy"]
        == asked["arc_challenge"]
        == [(prompt, f" {text(j, 3)}") for j in range(4)]
    )


def test_the_hubs_own_fields_are_taken_too(adapter, data, tmp_path):
    write(tmp_path, "arc_easy_test.jsonl", [hub_arc(0)])
    write(tmp_path, "lambada_test.jsonl", [{"text": f"{text(0, 12)} {WORDS[0]}"}])
    tasks = ["arc_easy", "lambada_openai"]
    assert requests(adapter, tasks, tmp_path) == requests(adapter, tasks, data)


# task, its file, a compact row, the hub's row, what is asked, the right answer (for the harness)
MORE = [
    (
        "boolq",
        "boolq_val",
        {"passage": "Mills grind.", "question": "does a mill grind", "answer": True},
        {"passage": "Mills grind.", "question": "does a mill grind", "label": 1, "idx": 7},
        [
            ("Mills grind.\nQuestion: does a mill grind?\nAnswer:", f" {word}")
            for word in ("no", "yes")
        ],
        1,
    ),
    (
        "openbookqa",
        "openbookqa_test",
        arc(2),
        hub_arc(2, "question_stem"),
        [(f"Why does {text(2)}?", f" {text(2 + j, 3)}") for j in range(4)],
        2,
    ),
    (
        "sciq",
        "sciq_val",
        None,
        {
            "support": " Mills grind.",
            "question": "What grinds?",
            **{f"distractor{i}": WORDS[i] for i in (1, 2, 3)},
            "correct_answer": "mills",
        },
        [
            ("Mills grind.\nQuestion: What grinds?\nAnswer:", f" {word}")
            for word in (*WORDS[1:4], "mills")
        ],
        3,
    ),
    (
        "copa",
        "copa_val",
        None,
        {
            "premise": "The mill ran.",
            "question": "effect",
            "choice1": "It sang.",
            "choice2": "He ate.",
            "label": 1,
        },
        [("The mill ran therefore", "  it sang."), ("The mill ran therefore", "  he ate.")],
        " he ate.",
    ),
    (
        "social_iqa",
        "social_iqa_val",
        None,
        {
            "context": "Ann ran.",
            "question": "Why?",
            "answerA": "a",
            "answerB": "b",
            "answerC": "c",
            "label": "2",
        },
        [("Q: Ann ran. Why?\nA:", f" {letter}") for letter in "abc"],
        1,
    ),
    (
        "commonsense_qa",
        "commonsense_qa_val",
        None,
        {
            "question": "Where are sacks? ",
            "choices": {"label": list("ABCDE"), "text": WORDS[:5]},
            "answerKey": "D",
            "question_concept": "sack",
        },
        [
            (
                "Question: Where are sacks?\nA. a\nB. river\nC. runs\nD. under\nE. the\nAnswer:",
                f" {letter}",
            )
            for letter in "ABCDE"
        ],
        "D",
    ),
]


def test_all_further_tasks_are_the_harness_own(adapter, checkpoint, tmp_path):
    compact, hub = tmp_path / "compact", tmp_path / "hub"
    compact.mkdir()
    hub.mkdir()
    for _, file, short_row, row, _, _ in MORE:
        write(compact, f"{file}.jsonl.gz", [short_row or row])
        write(hub, f"{file}.jsonl", [row])
    assert requests(adapter, ["all"], compact) == requests(adapter, ["all"], hub)
    assert requests(adapter, ["all"], hub) == {task: asked for task, _, _, _, asked, _ in MORE}
    loaded = adapter.load_tasks(find_tasks(["all"], str(compact))[0])["tasks"]
    for task, *_, target in MORE:
        (document,) = loaded[task].eval_docs
        assert loaded[task].doc_to_target(document) == target, task
    results = evaluate([checkpoint], ["all"], EvalOptions(data=str(compact)))
    assert list(results["left_out"]) == GROUPS["table4"]
    metrics = {
        task: set(scores["metrics"]) for task, scores in results["models"][0]["tasks"].items()
    }
    both = {"acc", "acc_norm"}
    assert metrics == {
        task: both if task in ("openbookqa", "sciq") else {"acc"} for task, *_ in MORE
    }


def test_table4(adapter, checkpoint, data, tmp_path, capfd):
    results = evaluate([checkpoint], ["table4"], EvalOptions(data=str(data), output=str(tmp_path)))
    out, err = capfd.readouterr()
    assert out == ""
    assert not re.search("warn|INFO|it/s|fatal", err, re.IGNORECASE)

    assert list(results["left_out"]) == ["wikitext"]
    (model,) = results["models"]
    assert model["begins_with_bos"]
    assert model["max_length"] == 64
    assert model["tasks"]["piqa"]["documents"] == 6
    share = model["tasks"]["piqa"]["metrics"]["acc"]
    assert model["tasks"]["piqa"]["stderr"]["acc"] == pytest.approx(
        math.sqrt(share * (1 - share) / 5)
    )
    words = model["tasks"]["lambada_openai"]
    asked = [(text(i, 12), f" {WORDS[i]}") for i in range(6)]
    summed = sum(value for value, _ in score(adapter, checkpoint, asked))
    size = sum(len(target) for _, target in asked)
    assert words["metrics"]["perplexity"] == pytest.approx(math.exp(-summed / 6), rel=1e-5)
    assert words["metrics"]["bits_per_byte"] == pytest.approx(
        -summed / size / math.log(2), rel=1e-5
    )
    assert words["stderr"]["perplexity"] > words["stderr"]["bits_per_byte"] > 0
    assert (
        json.loads((tmp_path / "results.json").read_text())["models"][0]["tasks"] == model["tasks"]
    )

    lines = (tmp_path / "results.md").read_text().splitlines()
    assert (
        lines[0]
        == "| model | Wiki ppl | LMB ppl | LMB acc | PIQA | Hella | Wino | ARC-e | ARC-c | avg |"
    )
    assert (
        "| NaLa + Gated DeltaNet | 25.89 | 32.32 | — | 65.6 | 36.2 | 53.2 | 45.4 | 23.8 | 44.8 |"
        in lines
    )
    assert "| DeltaNet | 29.08 | 50.87 | — | 63.6 | 33.6 | 51.7 | 46.0 | 23.0 | 43.6 |" in lines
    assert "| GLA | 28.65 | 43.35 | 30.3 | 64.8 | 34.5 | 51.4 | 45.1 | 22.7 | 43.7 |" in lines
    assert any("DeltaNet is the variant without short convolutions" in line for line in lines)
    assert any("wikitext is left out" in line for line in lines)
    row = next(i for i, line in enumerate(lines) if line.startswith(f"| **{short(checkpoint)}** |"))
    ours = lines[row].strip("| ").split(" | ")
    accuracies = ("piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge")
    scores = [
        model["tasks"][task]["metrics"][metric]
        for task, metric, _ in report.TABLE4
        if task != "wikitext"
    ]
    assert ours[1] == "—"
    assert float(ours[2]) == pytest.approx(scores[0], rel=0.05)
    assert ours[3:] == [f"{100 * score:.1f}" for score in scores[1:]] + [
        f"{20 * sum(scores[2:]):.1f}"
    ]
    errors = [
        100 * model["tasks"][task]["stderr"][metric]
        for task, metric, _ in report.TABLE4
        if task in accuracies
    ]
    assert lines[row + 1].split(" | ")[4:9] == [f"±{error:.1f}" for error in errors]
    assert lines[row + 1].endswith(f" | ±{math.hypot(*errors) / 5:.1f} |")


# ------------------------------ log-likelihoods


def score(
    adapter, checkpoint, pairs, batch_size=8, max_length=None, padding_side="right", **options
):
    from lm_eval.api.instance import Instance

    model, tokenizer = load_model(checkpoint)
    tokenizer.padding_side = padding_side
    scorer = adapter.HarnessModel(
        model, tokenizer, batch_size=batch_size, max_length=max_length, **options
    )
    kind = "loglikelihood" if isinstance(pairs[0], tuple) else "loglikelihood_rolling"
    asked = [Instance(kind, {}, pair if isinstance(pair, tuple) else (pair,), 0) for pair in pairs]
    return getattr(scorer, kind)(asked)


def by_hand(checkpoint, ids: list[int], first: int) -> float:
    """log P of ids[first:] given what is before."""
    model, _ = load_model(checkpoint, dtype="float64")
    with torch.no_grad():
        logp = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return logp[range(first - 1, len(ids) - 1), ids[first:]].sum().item()


def test_loglikelihoods_do_not_depend_on_the_batch(adapter, checkpoint):
    pairs = [(text(i, 1 + i), f" {text(i + 3, 1 + i % 4)}") for i in range(8)] + [("", "alone")]
    one = [value for value, _ in score(adapter, checkpoint, pairs, batch_size=1)]
    done = []
    options = {"batch_size": 7, "padding_side": "left", "advance": done.append}
    seven = [value for value, _ in score(adapter, checkpoint, pairs, **options)]
    assert sum(done) == pytest.approx(sum(len(part) for pair in pairs for part in pair))
    assert one == pytest.approx(seven, abs=1e-5 * 20)  # summed over up to twenty-odd tokens
    tokenizer = load_model(checkpoint)[1]
    expected = []
    for context, continuation in pairs:
        ids = [0, *tokenizer(context + continuation, add_special_tokens=False).input_ids]
        expected.append(by_hand(checkpoint, ids, 1 + len(context)))
    assert one == pytest.approx(expected, abs=1e-4)


def test_rolling_begins_with_one_bos_and_goes_on_in_windows(adapter, checkpoint):
    long = text(3, 30)
    tokenizer = load_model(checkpoint)[1]
    ids = tokenizer(long, add_special_tokens=False).input_ids
    assert len(ids) > 100
    whole = by_hand(checkpoint, [0, *ids], 1)
    assert score(adapter, checkpoint, [long, "b"], max_length=1000)[0] == pytest.approx(
        whole, abs=1e-3
    )
    # Windows of 64 predictions; the last one reaches back, so as to be as long as the others.
    windows = by_hand(checkpoint, [0, *ids[:64]], 1)
    for start in range(64, len(ids), 64):
        end = min(start + 64, len(ids))
        windows += by_hand(checkpoint, ids[end - 65 : end], 65 - (end - start))
    assert score(adapter, checkpoint, ["b", long])[1] == pytest.approx(windows, abs=1e-3)


def test_a_model_without_bos_reads_texts_after_the_end_of_another(adapter, checkpoint):
    from lm_eval.api.instance import Instance

    model, tokenizer = load_model(checkpoint)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    model.config.bos_token_id = None
    scorer = adapter.HarnessModel(model, tokenizer, batch_size=2)
    ids = tokenizer("\nfoo", add_special_tokens=False).input_ids
    expected = pytest.approx(by_hand(checkpoint, [tokenizer.eos_token_id, *ids], 1), abs=1e-4)
    assert scorer.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("\nfoo",), 0)]) == [
        expected
    ]
    [(value, _)] = scorer.loglikelihood([Instance("loglikelihood", {}, ("\n", "foo"), 0)])
    assert value == expected


def test_an_untrained_model_has_infinite_perplexity(adapter, tokenizer, data, tmp_path):
    path = save(tokenizer, tmp_path / "wild")
    model = NalandaForCausalLM.from_pretrained(path)
    with torch.no_grad():
        model.lm_head.weight *= 1e4
    model.save_pretrained(path)
    results = evaluate(
        [path],
        ["lambada_openai", "piqa"],
        EvalOptions(data=str(data), output=str(tmp_path / "out")),
    )
    assert results["models"][0]["tasks"]["lambada_openai"]["metrics"]["perplexity"] == math.inf
    assert "piqa" in results["models"][0]["tasks"]
    assert "| inf |" in report.results_markdown(results)

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    json.loads((tmp_path / "out" / "results.json").read_text(), parse_constant=refuse)


@pytest.mark.parametrize("kind", ["nalanda", "llama"])
def test_a_model_that_computes_no_numbers_has_no_scores(adapter, tokenizer, kind):
    from lm_eval.api.instance import Instance

    if kind == "nalanda":
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_heads": 1}
        model = NalandaForCausalLM(
            NalandaConfig(vocab_size=320, bos_token_id=0, eos_token_id=0, **sizes)
        )
    else:
        sizes = {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
        }
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=320, **sizes))
    model.eval().get_output_embeddings().weight.data[7, 3] = math.nan
    scorer = adapter.HarnessModel(model, tokenizer, batch_size=2)
    options = {"until": ["."], "max_gen_toks": 4}
    for request, arguments in (("loglikelihood", ("a", " b")), ("generate_until", ("a", options))):
        with pytest.raises(
            InputError, match="its log-probabilities are not numbers; its weights may be"
        ):
            getattr(scorer, request)([Instance(request, {}, arguments, 0)])


def test_bits_per_byte_and_sizes_stand_below_the_table():
    facts = {
        "parameters": 27_000,
        "dtype": "float32",
        "max_length": None,
        "found": 0,
        "seconds": 1.0,
    }
    wiki = {"metrics": {"word_perplexity": 30.0, "bits_per_byte": 0.9171}, "stderr": {}}
    words = {"metrics": {"perplexity": 40.0, "bits_per_byte": 1.25}, "stderr": {}}
    models = [
        {"name": name, "tasks": tasks, "log_likelihoods": 1, **facts}
        for name, tasks in (("a", {"wikitext": wiki, "lambada_openai": words}), ("b", {}))
    ]
    lines = report.notes({"models": models, "left_out": {}, "limit": None})
    told = "a: bits a byte 0.917 of wikitext, 1.250 of LAMBADA's last words."
    assert [line for line in lines if "bits" in line] == [told]
    assert lines[-1].startswith("b: 27 K parameters, float32, ")


def test_a_larger_state_is_marked_beside_its_row():
    """A model of an older table, or of another library, has no size."""
    piqa = {"piqa": {"metrics": {"acc": 0.5}, "stderr": {"acc": 0.1}}}
    sizes = {"small": {"state_bytes": 1 << 20}, "same": {"state_bytes": (1 << 20) + 999}}
    sizes |= {"large": {"state_bytes": 3 << 19}, "none": {"state_bytes": None}, "older": {}}
    models = [
        NAMED | {"name": name, "tasks": piqa, "log_likelihoods": 1} | state
        for name, state in sizes.items()
    ]
    results = {"models": models, "left_out": {}, "limit": None}
    rows = report.suite(results)[2]
    assert [row[0] for row in rows[::2]] == list(sizes)
    assert [row[0] for row in rows[1::2]] == ["1.0 MiB", "1.0 MiB", "1.5 MiB, 1.5 ×", "", ""]
    assert "| **large** |" in report.results_markdown(results)
    assert "| 1.5 MiB, 1.5 × |" in report.results_markdown(results)
    assert any(line.startswith("Under a name: the state") for line in report.notes(results))
    results["models"] = models[3:]
    assert not any("the state" in line for line in report.notes(results))


NAMED = {"parameters": 1e6, "dtype": "float32", "max_length": None, "found": 0, "seconds": 1.0}
TOTALS = {"perplexity": 9.0, "stderr": None, "word_perplexity": 99.0, "bits_per_byte": 1.0}


@pytest.mark.parametrize("name", ["m[lr=1]", "odd[/b]", "a|b", ":smile:"])
def test_names_of_models_are_no_markup(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    tasks = {task: {"metrics": {"acc": 0.5}, "stderr": {"acc": 0.1}} for task in ("piqa", "mine")}
    scored = NAMED | {
        "name": name,
        "tasks": tasks,
        "log_likelihoods": 1,
        "prompts": 2,
        "prompts_cut": 1,
    }
    results = {"models": [scored], "left_out": {}, "limit": None}
    report.print_results(results)
    read = NAMED | {"name": name, "tokens": 8, "window": 8, "length": 8, "bytes": 8, "ranges": []}
    read |= {"one_pass": TOTALS, "windows": TOTALS}
    print_perplexity({"models": [read], "text": "t", "directory": "d", "figures": []})
    text = capsys.readouterr().out
    assert text.count(name) == 6
    cells = report.results_markdown(results).splitlines()[12].replace("\\|", "/").split("|")
    assert len(cells) == 12
    assert cells[1].strip() == f"**{name.replace('|', '/')}**"


# ------------------------------ long texts


def test_long_texts_are_read_whole_by_recurrent_models(
    adapter, checkpoint, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr("nalanda_eval.scoring.COLUMNS", 64)
    write(tmp_path, "python_docs.jsonl", [{"text": text(i, 40)} for i in range(3)])
    task = str(PACKAGED / "python_docs" / "python_docs_perplexity.yaml")
    bits = {}
    for long in ("window", "whole"):
        results = evaluate([checkpoint], [task], EvalOptions(data=str(tmp_path), long=long))
        (model,) = results["models"]
        assert model["max_length"] == (64 if long == "window" else None)
        bits[long] = model["tasks"]["python_docs_perplexity"]["metrics"]["bits_per_byte"]
    assert "texts read whole" in report.results_markdown(results)
    total = 0.0
    for i in range(3):
        ids = tokenizer(text(i, 40), add_special_tokens=False).input_ids
        total -= by_hand(checkpoint, [0, *ids], 1)
    assert bits["whole"] == pytest.approx(
        total / sum(len(text(i, 40)) for i in range(3)) / math.log(2), rel=1e-5
    )
    assert abs(bits["window"] - bits["whole"]) > 1e-3

    attention = save(tokenizer, tmp_path / "softmax", mixer="softmax")
    for message, (model, options) in {
        "softmax": (attention, {"long": "whole"}),
        "use window or whole": (checkpoint, {"long": "chunks"}),
        "length of windows": (checkpoint, {"long": "whole", "max_length": 32}),
    }.items():
        with pytest.raises(InputError, match=message):
            evaluate([model], [task], EvalOptions(data=str(tmp_path), **options))


def test_what_does_not_fit_is_said(adapter, checkpoint):
    with pytest.raises(InputError, match=r"12 tokens, the model sees 8 at once: raise max_length"):
        score(adapter, checkpoint, [("a", " miller runs")], max_length=8)
    long = text(1, 20)
    cut = score(adapter, checkpoint, [(long, " dusk")], max_length=16)[0][0]
    ids = load_model(checkpoint)[1](long + " dusk", add_special_tokens=False).input_ids
    assert cut == pytest.approx(by_hand(checkpoint, ids[-17:], 12), abs=1e-4)
    with pytest.raises(InputError, match="document None has an empty answer"):
        score(adapter, checkpoint, [("a", " b"), ("", "")])


# ------------------------------ the same numbers from the harness's own wrapper


def test_the_harness_own_wrapper_gives_the_same_numbers(adapter, checkpoint):
    """Its choices begin with the tokenizer's bos. Of whole texts it counts that twice, unless told not to."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model, tokenizer = load_model(checkpoint)
    pairs = [(text(i), f" {text(i + j, 3)}") for i in range(3) for j in range(2)]
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4)
    answers = theirs.loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in pairs], True)
    for (value, greedy), (expected, same) in zip(
        answers, score(adapter, checkpoint, pairs), strict=True
    ):
        assert (value, greedy) == (pytest.approx(expected, abs=1e-4), same)

    long = [text(3, 30), text(4, 3)]
    asked = [Instance("loglikelihood_rolling", {}, (one,), 0) for one in long]
    expected = pytest.approx(score(adapter, checkpoint, long), abs=1e-3)
    assert theirs.loglikelihood_rolling(asked, True) != expected
    theirs.add_bos_token = False
    assert theirs.loglikelihood_rolling(asked, True) == expected


CHAT = (
    "{{ bos_token }}{% for turn in messages %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""A chat template, which begins with bos as most do."""

OWN_TASKS = {
    "choose": "training_split: train\noutput_type: multiple_choice\ndescription: 'Of mills.'\n"
    "doc_to_text: context\ndoc_to_choice: choices\ndoc_to_target: label\n",
    "next": "fewshot_split: test\noutput_type: loglikelihood\ndoc_to_text: context\n"
    "doc_to_target: ' {{choices[0]}}'\nmetric_list: [{metric: perplexity}, {metric: acc}]\n",
    "write": "training_split: train\noutput_type: generate_until\ndoc_to_text: context\n"
    "doc_to_target: '{{choices[0]}}'\ngeneration_kwargs: {until: ['.'], max_gen_toks: 6}\n"
    "metric_list: [{metric: exact_match}]\n",
    "always_alone": "training_split: train\nnum_fewshot: 0\noutput_type: multiple_choice\n"
    "doc_to_text: context\ndoc_to_choice: choices\ndoc_to_target: label\n",
}


@pytest.fixture
def own_tasks(tmp_path, monkeypatch):
    """A folder of tasks of each kind, with documents for examples."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "tasks"
    folder.mkdir()
    for split, seeds in (("train", range(10, 16)), ("test", range(4))):
        rows = [
            {"context": text(i, 4), "choices": [text(i + j, 2) for j in range(3)], "label": i % 3}
            for i in seeds
        ]
        write(folder, f"{split}.jsonl", rows)
    files = f"{{train: {folder}/train.jsonl, test: {folder}/test.jsonl}}"
    for name, rest in OWN_TASKS.items():
        begin = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {files}}}\n"
        (folder / f"{name}.yaml").write_text(f"{begin}test_split: test\n{rest}")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "prompts",
    [
        {},
        {"num_fewshot": 2},
        {"num_fewshot": 1, "system_instruction": "Count."},
        {"apply_chat_template": True},
        {"num_fewshot": 2, "apply_chat_template": True, "system_instruction": "Count."},
    ],
    ids=lambda prompts: "-".join(prompts) or "default",
)
def test_prompts_and_samples_are_the_harness_own(checkpoint, own_tasks, tmp_path, prompts):
    from lm_eval import simple_evaluate
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    folder = str(tmp_path / "chat")
    shutil.copytree(checkpoint, folder)
    (tmp_path / "chat" / "chat_template.jinja").write_text(CHAT)
    scores, theirs = tmp_path / "scores", tmp_path / "theirs"
    options = EvalOptions(output=str(scores), log_samples=True, max_length=512, **prompts)
    ours = evaluate([folder], [str(own_tasks)], options)["models"][0]["tasks"]

    model, tokenizer = load_model(folder)
    results = simple_evaluate(
        HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4, max_length=512),
        tasks=list(OWN_TASKS),
        task_manager=TaskManager(include_path=str(own_tasks), include_defaults=False),
        fewshot_as_multiturn=prompts.get("apply_chat_template", False),
        **prompts,
    )
    tracker = EvaluationTracker(output_path=str(theirs))
    tracker.general_config_tracker.model_name_sanitized = "model"
    tracker.date_id = "now"

    for task in OWN_TASKS:
        for name, value in results["results"][task].items():
            metric, _, filtered = name.partition(",")
            if filtered == "none" and not metric.endswith("_stderr"):
                assert ours[task]["metrics"][metric] == pytest.approx(value, rel=1e-4), name
        assert ours[task]["num_fewshot"] == results["n-shot"][task]

        # Line by line: all fields but numbers are equal.
        tracker.save_results_samples(task, results["samples"][task])
        (own,) = scores.glob(f"*chat/samples_{task}.jsonl")
        (other,) = theirs.glob(f"model/samples_{task}_*.jsonl")
        lines = zip(own.read_text().splitlines(), other.read_text().splitlines(), strict=True)
        for line, expected in ((json.loads(a), json.loads(b)) for a, b in lines):
            numbers = {"resps", "filtered_resps", *expected["metrics"]}
            for field in expected.keys() - numbers:
                assert line[field] == expected[field], field
            for field in numbers:
                close_texts(line[field], expected[field])


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("unsafe_code: true", "write: runs what a model writes"),
        ("doc_to_image: x", "write: has pic"),
    ],
)
def test_tasks_that_the_harness_would_not_run_are_refused(adapter, own_tasks, key, says):
    file = own_tasks / "write.yaml"
    file.write_text(f"{file.read_text()}{key}\n")
    with pytest.raises(InputError, match=says):
        adapter.load_tasks([TaskSource(str(file), task_file=file)])


def test_what_a_task_draws_is_the_same_each_time(checkpoint, own_tasks, tmp_path):
    """A task that shuffles its documents as it reads them, and whose answers are drawn."""
    (own_tasks / "draws.py").write_text(
        "import random\ndef shuffled(rows):\n    return rows.select(random.sample(range(4), 4))\n"
    )
    task = (own_tasks / "write.yaml").read_text().replace("task: write", "task: draw")
    task = task.replace("max_gen_toks: 6", "max_gen_toks: 6, do_sample: true, temperature: 1.0")
    (own_tasks / "draw.yaml").write_text(f"{task}process_docs: !function draws.shuffled\n")
    samples = []
    for name in ("one", "two"):
        options = EvalOptions(output=str(tmp_path / name), log_samples=True)
        evaluate([checkpoint], [str(own_tasks / "draw.yaml")], options)
        samples += [file.read_text() for file in (tmp_path / name).rglob("samples_draw.jsonl")]
    assert samples[0] == samples[1]


def test_samples_of_a_model_named_by_dots_lie_in_the_output(
    checkpoint, own_tasks, tmp_path, monkeypatch
):
    shutil.copytree(checkpoint, tmp_path / "model")
    (tmp_path / "model" / "below").mkdir()
    monkeypatch.chdir(tmp_path / "model" / "below")
    options = EvalOptions(output="scores", log_samples=True, limit=1)
    evaluate([".."], [str(own_tasks / "write.yaml")], options)
    assert [file.parent.parent.name for file in tmp_path.rglob("samples_*.jsonl")] == ["scores"]


@pytest.mark.parametrize("task", ["arc_easy", "piqa"])
def test_local_examples_never_have_the_question(adapter, data, tmp_path, task):
    """They are other documents of the file, or all of the file of training documents."""
    [source] = find_tasks([task], str(data))[0]
    loaded = adapter.load_tasks([source], num_fewshot=5)["tasks"][task]
    field = "goal" if task == "piqa" else "question"
    asked = [f"Question: {document[field]}\n" for document in read_rows(source)]

    def prompts() -> list[str]:
        loaded.set_fewshot_seed(seed=1234)
        loaded.build_all_requests(limit=6, rank=0, world_size=1)
        return [instance.args[0] for instance in loaded.instances if instance.idx == 0]

    for prompt, question in zip(prompts(), asked, strict=True):
        assert [prompt.count(other) for other in asked] == [1] * 6
        assert prompt.rindex(question) == max(prompt.rindex(other) for other in asked)
    with pytest.raises(InputError, match=f"--num-fewshot 6: {task} has 6 documents .* needs 7"):
        adapter.load_tasks([source], num_fewshot=6)

    shutil.copytree(data, tmp_path / "data")
    training = [f"Where stands mill {i}?" for i in range(20, 28)]
    rows = [hub_arc(0) | {"question": question} for question in training]
    if task == "piqa":
        rows = [{"goal": goal, "sol1": "a", "sol2": "b", "label": 0} for goal in training]
    write(tmp_path / "data", f"{task}_train.jsonl.gz", rows)
    [source] = find_tasks([task], str(tmp_path / "data"))[0]
    loaded = adapter.load_tasks([source], num_fewshot=5)["tasks"][task]
    for prompt in prompts():
        assert sum(prompt.count(other) for other in training) == 5
        assert sum(prompt.count(other) for other in asked) == 1


def test_scores_of_other_prompts_stand_apart(checkpoint, data, tmp_path):
    out = str(tmp_path / "out")
    shots = EvalOptions(data=str(data), output=out, num_fewshot=2)
    results = evaluate([checkpoint], ["piqa"], shots)
    note = "Prompts have 2 examples; the published rows have none of these."
    assert note in report.results_markdown(results)
    assert results["models"][0]["tasks"]["piqa"]["num_fewshot"] == 2
    for change, told in (
        ({"num_fewshot": None}, "num_fewshot 2, this command has None"),
        ({"system_instruction": "Think."}, "system_instruction None, this command has Think."),
    ):
        with pytest.raises(InputError, match=f"has other tasks with {told}"):
            evaluate([checkpoint], ["winogrande"], dataclasses.replace(shots, **change))
    plain = EvalOptions(data=str(data))
    with pytest.raises(InputError, match=r"--log-samples: writes into .*; give --output"):
        evaluate([checkpoint], ["piqa"], dataclasses.replace(plain, log_samples=True))
    with pytest.raises(InputError, match=r"has no chat template, .* leave out --apply-chat"):
        evaluate([checkpoint], ["piqa"], dataclasses.replace(plain, apply_chat_template=True))


def close_texts(value, expected) -> None:
    """Asserts that two values of JSON are equal, or numbers or their texts close."""
    if isinstance(expected, list):
        for one, other in zip(value, expected, strict=True):
            close_texts(one, other)
        return
    try:
        assert float(value) == pytest.approx(float(expected), abs=2e-4)
    except ValueError:
        assert value == expected


# ------------------------------ answers that are kept


class Killed(Exception):
    pass


@pytest.fixture
def forwards(monkeypatch):
    """Counts batches that a model reads; at the number `die_at`, the process is as good as killed."""
    from nalanda_eval import scoring

    read, counter = scoring._read_rows, types.SimpleNamespace(calls=0, die_at=None)

    def counted(*args, **kwargs):
        counter.calls += 1
        if counter.calls == counter.die_at:
            raise Killed
        return read(*args, **kwargs)

    monkeypatch.setattr(scoring, "_read_rows", counted)
    return counter


@pytest.mark.slow
def test_a_killed_run_goes_on(adapter, checkpoint, data, tmp_path, forwards):
    def run(path=checkpoint):
        forwards.calls = 0
        return evaluate(
            [path],
            ["table4"],
            EvalOptions(data=str(data), output=str(tmp_path / "out"), batch_size=2),
        )

    whole = evaluate([checkpoint], ["table4"], EvalOptions(data=str(data), batch_size=2))["models"][
        0
    ]
    needed = forwards.calls
    forwards.die_at = needed // 2
    with pytest.raises(Killed):
        run()
    forwards.die_at = None
    assert not (tmp_path / "out" / "results.json").exists()
    (second,) = run()["models"]
    assert 0 < second["found"] < second["log_likelihoods"]
    assert (
        forwards.calls <= needed - needed // 2 + 2
    )  # the batch that was lost: a context's and its endings'
    assert second["tasks"] == whole["tasks"]
    text = (tmp_path / "out" / "results.md").read_text()
    assert (
        f"{second['log_likelihoods']} log-likelihoods ({second['found']} of them kept from before)"
        in text
    )

    (third,) = run()["models"]
    assert forwards.calls == 0
    assert third["found"] == third["log_likelihoods"]
    assert third["tasks"] == whole["tasks"]


@pytest.mark.parametrize("name", ["a.py", "b.cpp", "c.h"])
def test_a_changed_kernel_makes_answers_new(name, tmp_path, monkeypatch):
    """In Python or in C++."""
    monkeypatch.setattr(nalanda_kernels, "__file__", str(tmp_path / "__init__.py"))
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / name).write_text("1")
    model = tiny_models.build("nala")
    before = model_identity(model)
    assert model_identity(model) == before
    (tmp_path / "cpu" / name).write_text("2")
    assert model_identity(model)["code"] != before["code"]


def test_answers_are_the_weights_not_the_names(adapter, checkpoint, data, tmp_path, forwards):
    def run(path):
        (tmp_path / "out" / "results.json").unlink(missing_ok=True)  # of other weights
        results = evaluate(
            [str(path)], ["piqa"], EvalOptions(data=str(data), output=str(tmp_path / "out"))
        )
        return results["models"][0]

    first = run(checkpoint)
    shutil.copytree(checkpoint, tmp_path / "copy")
    assert run(tmp_path / "copy")["found"] == first["log_likelihoods"]
    model = NalandaForCausalLM.from_pretrained(checkpoint)
    with torch.no_grad():
        model.lm_head.weight[5, 5] += 1e-3
    model.save_pretrained(tmp_path / "copy")
    changed = run(tmp_path / "copy")
    assert changed["found"] == 0
    assert changed["fingerprint"] != first["fingerprint"]
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    (tmp_path / "copy" / "config.json").write_text(json.dumps(config | {"norm_eps": 1e-3}))
    assert run(tmp_path / "copy")["found"] == 0

    (tmp_path / "out" / "answers.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(InputError, match=r"answers\.sqlite: cannot keep answers"):
        run(checkpoint)


def test_a_task_that_is_asked_again_has_its_new_scores(checkpoint, data, tmp_path):
    shutil.copytree(data, tmp_path / "data")
    settings = EvalOptions(data=str(tmp_path / "data"), output=str(tmp_path / "out"))
    both = ["piqa", "lambada_openai"]  # the other one's scores stay
    before = evaluate([str(checkpoint)], both, settings, LoadOptions())
    lines = (tmp_path / "data" / "piqa_val.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "data" / "piqa_val.jsonl").write_text("".join(lines[:3]))
    after = evaluate([str(checkpoint)], ["piqa"], settings, LoadOptions())
    first, second = (results["models"][0]["tasks"]["piqa"] for results in (before, after))
    assert first != second
    fresh = EvalOptions(data=str(tmp_path / "data"))
    alone = evaluate([str(checkpoint)], ["piqa"], fresh, LoadOptions())
    assert second == alone["models"][0]["tasks"]["piqa"]


def test_two_commands_at_once_keep_both_scores(checkpoint, data, tmp_path, monkeypatch):
    settings = EvalOptions(data=str(data), output=str(tmp_path), limit=2)
    score = harness_module._score_model

    def score_beside_another(*args):
        record = score(*args)
        monkeypatch.setattr(harness_module, "_score_model", score)
        evaluate([str(checkpoint)], ["piqa"], settings, LoadOptions())
        return record

    monkeypatch.setattr(harness_module, "_score_model", score_beside_another)
    returned = evaluate([str(checkpoint)], ["arc_easy"], settings, LoadOptions())
    (written,) = json.loads((tmp_path / "results.json").read_text())["models"]
    assert set(written["tasks"]) == {"arc_easy", "piqa"}
    assert written["log_likelihoods"] == 2 * 4 + 2 * 2
    assert returned["models"][0]["tasks"] == written["tasks"]


@pytest.mark.slow
def test_results_of_several_commands_are_kept_and_never_mixed(checkpoint, data, tmp_path, forwards):
    mine, other, out = str(tmp_path / "mine"), str(tmp_path / "other"), tmp_path / "out"
    shutil.copytree(checkpoint, mine)
    shutil.copytree(checkpoint, other)

    def run(tasks, models=(mine,), dtype="auto", **options):
        settings = EvalOptions(data=str(data), output=str(out), **options)
        return evaluate([*models], tasks, settings, LoadOptions(dtype=dtype))

    run(["piqa"], limit=3)
    first = run(
        ["piqa", "lambada_openai"]
    )  # again all its tasks, so that none of the other limit is left
    second = run(["piqa", "arc_easy"])
    written = json.loads((out / "results.json").read_text())["models"]
    assert written[0]["tasks"] == second["models"][0]["tasks"]
    assert first["models"][0]["tasks"].items() < second["models"][0]["tasks"].items()
    counts = [results["models"][0]["log_likelihoods"] for results in (first, second)]
    assert counts[1] == counts[0] + 6 * 2 + 6 * 4
    [row] = re.findall(r"\*\*.*/mine\*\* \|.*", (out / "results.md").read_text())
    assert [cell == "—" for cell in row.split(" | ")[1:9]] == [
        True,
        *[False] * 3,
        True,
        True,
        False,
        True,
    ]

    forwards.calls = 0
    for said, options in {
        "limit None, this command has 3": {"limit": 3},
        "long window, this command has whole": {"long": "whole"},
        "max_length 64, this command has 32": {"max_length": 32},
        "dtype float32, this command has bfloat16": {"dtype": "bfloat16"},
    }.items():
        with pytest.raises(
            InputError, match=f"results.json has other tasks with {re.escape(said)}; choose"
        ):
            run(["arc_easy"], **options)
    for named, said in {
        (other,): f"also has models {mine}: name them too, or choose another --output",
        (
            mine,
            other,
        ): f"has no results of {other}: name its other tasks too (lambada_openai, piqa), or choose",
    }.items():
        with pytest.raises(InputError, match=re.escape(said)):
            run(["arc_easy"], models=named)
    model = NalandaForCausalLM.from_pretrained(mine)
    model.lm_head.weight.data[5, 5] += 1
    model.save_pretrained(mine)
    with pytest.raises(InputError, match="has other tasks with fingerprint"):
        run(["arc_easy"])
    assert forwards.calls == 0  # no work was lost
    assert json.loads((out / "results.json").read_text())["models"] == written
    (out / "results.json").write_text("{}")
    with pytest.raises(InputError, match=r"results\.json is damaged"):
        run(["piqa"])


def test_a_later_command_may_name_folders_otherwise(checkpoint, data, tmp_path, monkeypatch):
    shutil.copytree(checkpoint, tmp_path / "mine")
    (tmp_path / "data").symlink_to(data)
    monkeypatch.chdir(tmp_path)
    evaluate(["mine"], ["piqa"], EvalOptions(data="data", output="out"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    out = str(tmp_path / "out")
    later = evaluate(
        [str(tmp_path / "mine")], ["arc_easy"], EvalOptions(data=str(data), output=out)
    )
    assert [set(model["tasks"]) for model in later["models"]] == [{"piqa", "arc_easy"}]
    with pytest.raises(InputError, match="also has models"):
        evaluate([checkpoint], ["piqa", "arc_easy"], EvalOptions(data=str(data), output=out))


@pytest.mark.parametrize(
    ("package", "version", "same"),
    [
        ("nalanda", "0.1.0+g123456789", True),
        ("python", "3.11.99", True),
        ("python", "3.12.1", False),
        ("torch", "2.9.0+cpu", True),
        ("torch", "2.9.1", False),
    ],
)
def test_results_stand_beside_those_of_the_same_releases(tmp_path, package, version, same):
    releases = {"python": "3.11.2", "nalanda": "0.1.0+g987654321.dirty", "torch": "2.9.0"}
    now = {"data": None, "limit": None, "long": "window", "versions": releases}
    before = now | {"versions": releases | {package: version}}
    before |= {
        "models": [{"name": "m", "place": "m", "tasks": {"piqa": {"metrics": {}, "stderr": {}}}}]
    }
    (tmp_path / "results.json").write_text(json.dumps(before))
    if same:
        assert _read_earlier(tmp_path, now, ["m"], {"arc_easy"}) == before
    else:
        with pytest.raises(InputError, match=f"other tasks with {package} "):
            _read_earlier(tmp_path, now, ["m"], {"arc_easy"})


def test_a_damaged_answer_is_named_and_never_given(tmp_path):
    """A bit flipped anywhere, or an end cut off: what is found is right, or is asked again, or the file is
    refused by name."""
    answers = {((1, i), (2, 3 + i)): (-0.5 * i, i % 2 == 0) for i in range(30)}
    file, refused = tmp_path / "answers.sqlite", []
    cache = AnswerCache(file, {"weights": "w"})
    cache.keep(answers)
    cache.close()
    content = file.read_bytes()
    harms = [content[: len(content) * k // 9] for k in range(9)]
    for place in range(0, len(content), 29):
        harms.append(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
    for harmed in harms:
        file.write_bytes(harmed)
        try:
            cache = AnswerCache(file, {"weights": "w"})
            found = cache.find(answers)
            cache.close()
        except InputError as error:
            refused.append(str(error))
        else:
            assert found.items() <= answers.items()
    assert len(refused) > 12
    assert all(
        re.fullmatch(r".*sqlite: cannot keep answers \(.*\); .*use another directory", r)
        for r in refused
    )
    file.write_bytes(content)
    assert AnswerCache(file, {"weights": "w"}).find(answers) == answers


def test_an_output_that_cannot_be_written_is_said_first(checkpoint, data, tmp_path, monkeypatch):
    monkeypatch.setattr(harness_module, "load_model", None)  # nothing is loaded
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone" / "away")
    for name in ("file", "file/below", "dangling"):
        with pytest.raises(InputError, match=rf"--output .*{name}: ") as error:
            evaluate(
                [checkpoint], ["piqa"], EvalOptions(data=str(data), output=str(tmp_path / name))
            )
        assert "\n" not in str(error.value)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "answers.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(InputError, match=r"answers\.sqlite: cannot keep answers .*; remove it"):
        evaluate([checkpoint], ["piqa"], EvalOptions(data=str(data), output=str(tmp_path / "kept")))


def test_a_full_disk_costs_no_answer(adapter, checkpoint, data, tmp_path, monkeypatch):
    def full(file, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    def run():
        return evaluate([checkpoint], ["piqa"], EvalOptions(data=str(data), output=str(tmp_path)))[
            "models"
        ][0]

    with monkeypatch.context() as patch:
        patch.setattr(harness_module, "write_atomically", full)
        with pytest.raises(
            DiskFull, match="the disk is full; make room, and start again: answers are kept"
        ):
            run()
    assert not (tmp_path / "results.json").exists()
    again = run()
    assert again["found"] == again["log_likelihoods"]
    cache = AnswerCache(tmp_path / "answers.sqlite", {})
    [(pages,)] = cache.file.execute("PRAGMA page_count").fetchall()
    cache.file.execute(
        f"PRAGMA max_page_count = {pages}"
    )  # SQLite then says what it says of a full disk
    with pytest.raises(
        DiskFull, match=r"answers\.sqlite: the disk is full; the answers before are kept"
    ):
        cache.keep({((i,), (i,)): (0.0, True) for i in range(2000)})


def test_results_as_json_and_csv(checkpoint, data, tmp_path):
    results = evaluate(
        [checkpoint, checkpoint],
        ["piqa", "arc_easy"],
        EvalOptions(data=str(data), output=str(tmp_path)),
    )
    kept = json.loads((tmp_path / "results.json").read_text())
    assert kept == json.loads(json.dumps(results))
    assert {"nalanda", "lm_eval", "transformers", "torch"} <= set(kept["versions"])
    with (tmp_path / "results.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 2 * sum(
        len(task["metrics"]) for task in kept["models"][0]["tasks"].values()
    )
    for row in rows:
        model = kept["models"][0]
        task = model["tasks"][row["task"]]
        assert float(row["value"]) == task["metrics"][row["metric"]]
        assert float(row["stderr"]) == task["stderr"][row["metric"]]
        assert row["model_fingerprint"] == model["fingerprint"]
        assert row["task_fingerprint"] == task["fingerprint"]
    prints = [task["fingerprint"] for task in kept["models"][0]["tasks"].values()]
    assert len(set(prints)) == 2
    assert kept["models"][1]["found"] == kept["models"][1]["log_likelihoods"]


def test_scores_stand_in_the_card_of_their_model(checkpoint, data, tmp_path, capsys):
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    own = front_matter("mine", False, []).replace("pipeline_tag", "license: mit\npipeline_tag")
    parts = [own, "# My words", scores_table([]), "More of mine: `results: []`", ""]
    card = folder / "README.md"
    card.write_text("\n\n".join(parts))

    options = EvalOptions(data=str(data), output=str(tmp_path / "scores"))
    score = evaluate([str(folder)], ["piqa"], options)["models"][0]["tasks"]["piqa"]
    first = card.read_text()
    row = f"| piqa | acc | {score['metrics']['acc']:.4f} | {score['stderr']['acc']:.4f} |"
    assert row in first
    (named,) = ModelCard(first).data.eval_results[:1]
    assert (named.task_type, named.metric_value) == ("text-generation", score["metrics"]["acc"])
    # Nothing else has changed.
    assert [first.count(part) for part in parts[1::2]] == [1, 1]
    assert "license: mit\n" in first
    evaluate([str(folder)], ["arc_easy"], options)
    both = card.read_text()
    assert row in both
    assert "| arc_easy | acc | " in both
    evaluate([str(folder)], ["piqa", "arc_easy"], options)
    assert card.read_text() == both

    # Scores of rounded weights, and a card without the place.
    rounded = dataclasses.replace(options, output=str(tmp_path / "rounded"))
    evaluate([str(folder)], ["piqa"], rounded, LoadOptions(dtype="bf16"))
    assert card.read_text() == both
    card.write_text("# All mine")
    evaluate([str(folder)], ["piqa", "arc_easy"], options)
    assert card.read_text() == "# All mine"

    # One that cannot be read or written costs no scores.
    card.write_bytes("# Für mich".encode("latin-1"))
    evaluate([str(folder)], ["piqa", "arc_easy"], options)
    assert "model: its card gets no scores: 'utf-8' codec" in capsys.readouterr().err


def test_the_data_fingerprint_is_what_is_asked(checkpoint, data, tmp_path):
    def fingerprint(row):
        write(tmp_path, "arc_easy_test.jsonl", [row, arc(1)])
        results = evaluate([checkpoint], ["arc_easy"], EvalOptions(data=str(tmp_path)))
        return results["models"][0]["tasks"]["arc_easy"]["fingerprint"]

    first = fingerprint(arc(0))
    assert fingerprint(hub_arc(0)) == first
    assert fingerprint(arc(0) | {"gold": 1}) != first
    assert fingerprint(arc(0) | {"choices": arc(0)["choices"][::-1]}) != first


# ------------------------------ several processes


@pytest.mark.slow
def test_two_processes_give_the_results_of_one(checkpoint, data, tmp_path):
    arguments = [
        "eval",
        checkpoint,
        "--tasks",
        "table4",
        "--data",
        str(data),
        "--output",
        str(tmp_path),
    ]
    printed = launched("-m", "nalanda_cli", *arguments)
    assert printed.count("Transformer++") == 1
    (expected,) = evaluate([checkpoint], ["table4"], EvalOptions(data=str(data)))["models"]
    results = json.loads((tmp_path / "results.json").read_text())
    (model,) = results["models"]
    assert results["processes"] == 2
    assert model["log_likelihoods"] == expected["log_likelihoods"]
    for task, scores in expected["tasks"].items():
        assert model["tasks"][task]["fingerprint"] == scores["fingerprint"]
        for metric, value in scores["metrics"].items():
            exact = metric.startswith("acc")
            assert model["tasks"][task]["metrics"][metric] == (
                value if exact else pytest.approx(value, rel=1e-4)
            )


# ------------------------------ own tasks


def test_packaged_and_own_task_files(adapter, checkpoint, tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    texts = [{"text": text(i, 20)} for i in range(3)]
    write(tmp_path, "python_docs.jsonl", texts)
    questions = [
        {"context": text(i), "choices": [text(i + j) for j in range(4)], "label": i}
        for i in range(3)
    ]
    write(tmp_path, "python_cloze.jsonl", questions)
    own = tmp_path / "own"
    own.mkdir()
    (own / "mine.yaml").write_text(
        "task: mine\ndataset_path: json\ndataset_kwargs: {data_files: {test: mine.jsonl}}\ntest_split: test\n"
        "output_type: multiple_choice\ndoc_to_text: context\ndoc_to_choice: choices\ndoc_to_target: label\n"
    )
    write(own, "mine.jsonl", questions)

    packaged = evaluate([checkpoint], ["python_docs"], EvalOptions(data=str(tmp_path)))["models"][
        0
    ]["tasks"]
    assert list(packaged) == ["python_docs_cloze", "python_docs_perplexity"]
    total = sum(score(adapter, checkpoint, [row["text"] for row in texts]))
    size = sum(len(row["text"]) for row in texts)
    metrics = packaged["python_docs_perplexity"]["metrics"]
    assert metrics["bits_per_byte"] == pytest.approx(-total / size / math.log(2), rel=1e-5)
    assert packaged["python_docs_perplexity"]["stderr"]["word_perplexity"] > 0
    asked = [(row["context"], choice) for row in questions for choice in row["choices"]]
    given = torch.tensor([value for value, _ in score(adapter, checkpoint, asked)]).view(3, 4)
    alone = torch.tensor(
        [value for value, _ in score(adapter, checkpoint, [("", c) for _, c in asked])]
    ).view(3, 4)
    labels = torch.tensor([row["label"] for row in questions])
    for metric, values in {"acc": given, "acc_mutual_info": given - alone}.items():
        right = (values.argmax(1) == labels).float().mean().item()
        assert packaged["python_docs_cloze"]["metrics"][metric] == pytest.approx(right)

    for data in (None, str(tmp_path)):  # which lacks it: the task's own folder has it
        results = evaluate([checkpoint], [str(own)], EvalOptions(data=data))
        assert results["models"][0]["tasks"]["mine"]["documents"] == 3
    # Another file's task of that name would take its place.
    shutil.copytree(own, tmp_path / "other")
    with pytest.raises(InputError, match=r"other.mine\.yaml: another task is named mine too"):
        evaluate([checkpoint], [str(own), str(tmp_path / "other")])
    assert report.suite(results) is None
    header, rows = report.others(results)
    assert header == ["task", "metric", short(checkpoint)]
    metrics = results["models"][0]["tasks"]["mine"]["metrics"]
    assert [row[:2] for row in rows] == [["mine", "acc"], ["mine", "acc norm"]]
    assert rows[0][2].startswith(f"{100 * metrics['acc']:.1f} ± ")
    assert f"| mine | acc | {rows[0][2]} |" in report.results_markdown(results)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ('{"text": "a b"}\n{"text": 5}\n', "mine: document 1 is 5, not text; .*"),
        ('{"text": " "}\n{"text": ""}\n', "mine: its documents are blank; give it texts"),
        (
            '{"text": "a b"}\n{"text": 5',
            r"mine\.yaml: the task cannot be loaded: .*value at position 10",
        ),
    ],
)
def test_documents_of_an_own_task_that_are_no_text(checkpoint, tmp_path, monkeypatch, rows, says):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "mine.yaml").write_text(
        "task: mine\ndataset_path: json\ndataset_kwargs: {data_files: {test: mine.jsonl}}\ntest_split: test\n"
        "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: text\n"
        "metric_list: [{metric: bits_per_byte}]\n"
    )
    (tmp_path / "mine.jsonl").write_text(rows)
    with pytest.raises(InputError) as error:
        evaluate([checkpoint], [str(tmp_path / "mine.yaml")])
    assert re.fullmatch(says, str(error.value).removeprefix(f"{tmp_path}/"))


def test_few_shot_examples_are_the_same_for_every_model(checkpoint, tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"q": f"{i} plus {i}", "a": str(2 * i)} for i in range(8)]
    write(tmp_path, "sums.jsonl", rows)
    file = tmp_path / "sums.yaml"
    file.write_text(
        "task: sums\ndataset_path: json\ndataset_kwargs: {data_files: {test: sums.jsonl}}\n"
        "test_split: test\nfewshot_split: test\nnum_fewshot: 2\noutput_type: loglikelihood\n"
        "doc_to_text: '{{q}} is'\ndoc_to_target: ' {{a}}'\nmetric_list: [{metric: perplexity}]\n"
    )
    results = evaluate(
        [checkpoint, checkpoint],
        [str(file)],
        EvalOptions(data=str(tmp_path)),
        loading=LoadOptions(device="cpu"),
    )
    first, second = (model["tasks"]["sums"]["metrics"] for model in results["models"])
    assert first == second


def test_prompts_begin_as_training_texts_do(adapter):
    """A tokenizer that marks the first word of a text: bos as text before it would take the mark away."""
    vocabulary = {name: i for i, name in enumerate(["<unk>", "<s>", "</s>", "▁", "a", "▁a", "b"])}
    backend = Tokenizer(models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_heads": 1,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    model = NalandaForCausalLM(NalandaConfig(vocab_size=len(vocabulary), **sizes)).eval()
    scorer = adapter.HarnessModel(model, tokenizer, batch_size=2)
    ids, mask = scorer.tok_batch_encode(["a", "ab", ""])
    read = [row[there.bool()].tolist() for row, there in zip(ids, mask, strict=True)]
    assert read == [[1, 5], [1, 5, 6], [1]]
    assert mask.tolist() == [[0, 1, 1], [1, 1, 1], [0, 0, 1]]
    assert scorer._encode_pair("a", "b")[0] == [1, 5]
    ids, _ = scorer.tok_batch_encode(["ab"], left_truncate_len=2)
    assert ids.tolist() == [[5, 6]]

    # A prompt that spells bos, as chat templates do, begins with that one.
    assert scorer._encode_pair("<s>a", "b") == ([1, 4], [6])
    assert scorer.tok_batch_encode(["a", "<s>a"])[0].tolist() == [[1, 5], [1, 4]]

    # Without bos an empty prompt stands after the end of another text.
    model.config.bos_token_id = None
    scorer = adapter.HarnessModel(model, tokenizer, batch_size=2)
    assert scorer.tok_batch_encode(["a", ""])[0].tolist() == [[5], [2]]


@pytest.mark.parametrize("f1", [0.93, 93.0])
def test_percentages_stay_percentages(f1):
    scores = {"metrics": {"f1": f1, "acc": 0.5}, "stderr": {"f1": 0.7, "acc": 0.01}}
    model = {"tasks": {"squadv2": scores, "mine": scores}}
    assert report._read_figure(model, "squadv2", "f1") == f1
    assert report._read_figure(model, "squadv2", "f1", "stderr") == 0.7
    assert report._read_figure(model, "mine", "f1") == pytest.approx(93)
    assert report._read_figure(model, "mine", "acc") == 50
    assert report._read_figure(model, "mine", "acc", "stderr") == 1
    assert report._format_cell("brier_score", 0.123456) == "0.1235"


def test_documents_and_cut_prompts_are_counted_once(checkpoint, tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    own = tmp_path / "own"
    own.mkdir()
    rows = [{"context": "a river " * n, "choices": ["a", "b"], "label": 0} for n in (1, 20, 30)]
    write(own, "rows.jsonl", rows)
    common = (
        "dataset_path: json\ndataset_kwargs: {data_files: {test: rows.jsonl}}\ntest_split: test\n"
        "doc_to_text: '{{context}}'\ndoc_to_target: label\n"
    )
    (own / "choice.yaml").write_text(
        f"{common}task: choice\noutput_type: multiple_choice\ndoc_to_choice: choices\n"
    )
    (own / "twice.yaml").write_text(
        f"{common}task: twice\noutput_type: generate_until\n"
        "generation_kwargs: {until: ['.'], max_gen_toks: 8}\n"
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n"
        "filter_list:\n  - {name: one, filter: [{function: take_first}]}\n"
        "  - {name: other, filter: [{function: remove_whitespace}, {function: take_first}]}\n"
    )
    results = evaluate([checkpoint], [str(own)])
    [model] = results["models"]
    assert {name: task["documents"] for name, task in model["tasks"].items()} == {
        "choice": 3,
        "twice": 3,
    }
    assert (model["prompts"], model["prompts_cut"]) == (3 * 2 + 3, 2 * 2 + 2)
    assert "6 of 9 prompts were cut on the left, to fit 64 tokens" in report.results_markdown(
        results
    )
    [whole] = evaluate([checkpoint], [str(own)], EvalOptions(long="whole"))["models"]
    assert (whole["prompts"], whole["prompts_cut"]) == (9, 0)


def test_python_docs_have_data_of_their_own(adapter, tmp_path, monkeypatch):
    documents = tmp_path / "validation"
    documents.mkdir()
    texts = [
        "".join(f"line {i} of document {name} says nothing else than {i * i}\n" for i in range(60))
        for name in "abcde"
    ]
    for i, content in enumerate(texts):
        (documents / f"{i}.txt").write_text(content)
    data = DataConfig(source=str(tmp_path))
    rows = python_tasks(data)
    assert python_tasks(data) == rows
    assert (
        sorted(row["text"] for row in rows["python_docs.jsonl"]) == texts
    )  # short enough to be whole
    questions = rows["python_cloze.jsonl"]
    assert len(questions) > 10
    assert {row["label"] for row in questions} == {0, 1, 2, 3}
    for row in questions:
        home = [
            content for content in texts if row["context"] + row["choices"][row["label"]] in content
        ]
        assert len(home) == 1
        assert len(set(row["choices"])) == 4
        wrong = [choice for i, choice in enumerate(row["choices"]) if i != row["label"]]
        assert all(choice not in home[0] for choice in wrong)

    monkeypatch.setattr(adapter, "python_tasks", lambda: rows)
    made = adapter.load_tasks(find_tasks(["python_docs"], None)[0])["tasks"]
    for name, file in (("cloze", "python_cloze.jsonl"), ("perplexity", "python_docs.jsonl")):
        assert list(made[f"python_docs_{name}"].test_docs()) == rows[file]
    monkeypatch.setattr(
        fetch, "write_python_tasks", lambda folder: write_python_tasks(folder, data)
    )
    fetch.fetch_tasks(["python_docs"], str(tmp_path / "mine"))
    lines = (tmp_path / "mine" / "python_cloze.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == questions


def test_excerpts_end_with_a_line():
    assert excerpts(["ab\ncd\nef", "xy"], characters=8) == ["ab\ncd\n", "xy"]


# ------------------------------ bad input


@pytest.mark.parametrize(
    ("tasks", "found"),
    [
        (["wikitext"], "has no wikitext_test.jsonl"),
        (["boolq"], "has no boolq_val.jsonl"),
        (["mmlu"], "cannot serve mmlu; local data is for task files and for wikitext, "),
        (["lambadaa"], "cannot serve lambadaa; did you mean lambada_openai?"),
        (["nowhere.yaml"], "nowhere.yaml: no such task file"),
        (["python_docs"], "no such data file"),
        (["."], "holds no task file"),
        ([], "no task"),
    ],
)
def test_bad_tasks_are_one_line(checkpoint, data, tasks, found, monkeypatch):
    monkeypatch.chdir(data)
    with pytest.raises(InputError, match=re.escape(found)) as caught:
        evaluate([checkpoint], tasks, EvalOptions(data=str(data)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("limit", [0, -1, 1.5, math.nan, math.inf])
def test_a_limit_is_a_number_of_documents_or_a_share(limit):
    with pytest.raises(
        InputError, match=f"--limit {limit:g}: must be a whole number of documents, or a sh"
    ):
        evaluate(["any"], ["piqa"], EvalOptions(limit=limit))


@pytest.mark.parametrize(
    ("option", "least"), [("batch_size", 1), ("max_length", 1), ("num_fewshot", 0)]
)
def test_options_below_their_least_are_refused_from_python_too(option, least):
    with pytest.raises(
        InputError, match=f"--{option.replace('_', '-')} -1: must be at least {least}"
    ):
        evaluate(["any"], ["piqa"], EvalOptions(**{option: -1}))


def test_no_data_at_all(checkpoint, tmp_path):
    with pytest.raises(
        InputError, match=r"data for none of the tasks, expected wikitext_test\.jsonl\.gz, lambada"
    ):
        evaluate([checkpoint], ["table4"], EvalOptions(data=str(tmp_path)))
    with pytest.raises(InputError, match="no such directory"):
        evaluate([checkpoint], ["table4"], EvalOptions(data=str(tmp_path / "nothing")))


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b'{"goal": "a", "sol1": "b", "sol2": "c", "label": 0}\n{"goal": ', "line 2 is broken"),
        (b'{"goal": "a", "sol1": "b", "label": 0}\n', "line 1: the field 'sol2' is missing"),
        (b'["a", "b", "c", 0]\n', r'line 1 is broken: \["a", "b", "c", 0\] is no object of fields'),
        (b"7\n", "line 1 is broken: 7 is no object of fields"),
        (b"", "is empty"),
    ],
)
def test_broken_data_is_named_with_its_line(adapter, tmp_path, content, found):
    (tmp_path / "piqa_val.jsonl").write_bytes(content)
    with pytest.raises(InputError, match=found):
        adapter.load_tasks(find_tasks(["piqa"], str(tmp_path))[0])
    (tmp_path / "piqa_val.jsonl").unlink()
    (tmp_path / "piqa_val.jsonl.gz").write_bytes(gzip.compress(b"{}\n" * 1000)[:-20])
    with pytest.raises(InputError, match=r"piqa_val\.jsonl\.gz"):
        adapter.load_tasks(find_tasks(["piqa"], str(tmp_path))[0])


# task: a row of its file, and its field that says which answer is right
NO_DATE = dict.fromkeys(("day", "month", "year"), "")
LABELLED = {
    "lambada_openai": ({"text": "a b"}, "text"),
    "sciq": (MORE[2][3], "correct_answer"),
    "drop": (
        dict.fromkeys(("query_id", "passage", "question"), "a")
        | {"answer": {"number": "3", "date": NO_DATE, "spans": []}}
        | {"validated_answers": {"number": [""], "date": [NO_DATE], "spans": [[]]}},
        "answer",
    ),
    "piqa": ({"goal": "a", "sol1": "b", "sol2": "c", "label": 1}, "label"),
    "hellaswag": (
        {"activity_label": "a", "ctx_a": "b", "ctx_b": "c", "endings": list("defg"), "label": 1},
        "label",
    ),
    "winogrande": ({"sentence": "_ a", "option1": "b", "option2": "c", "answer": 1}, "answer"),
    "arc_easy": (arc(1), "gold"),
    "arc_challenge": (hub_arc(1), "answerKey"),
    "boolq": (MORE[0][2] | {"answer": 1}, "answer"),
    "openbookqa": (arc(1), "gold"),
    "copa": (MORE[3][3], "label"),
    "social_iqa": (MORE[4][3] | {"label": 1}, "label"),
    "commonsense_qa": (MORE[5][3], "answerKey"),
    "triviaqa": ({"question": "a", "answer": {"aliases": ["b"]}}, "answer"),
    "nq_open": ({"question": "a", "answer": ["b"]}, "answer"),
    **dict.fromkeys(("swde", "fda", "squad_completion"), ({"text": "a", "value": "b"}, "value")),
    **dict.fromkeys(
        ("based_triviaqa", "based_nq", "based_drop"),
        ({"context": "a", "question": "b", "answers": ["c"]}, "answers"),
    ),
}


def read(folder, task: str, rows: list[dict]) -> list[dict]:
    [source] = find_tasks([task], None)[0]
    file = folder / f"{source.local.file}.jsonl"
    write(folder, file.name, rows)
    return read_rows(dataclasses.replace(source, documents=file))


@pytest.mark.parametrize("task", LABELLED)
def test_only_labelled_rows_are_scored(tmp_path, task):
    row, field = LABELLED[task]
    texts = ("lambada_openai", "sciq", "swde", "fda", "squad_completion")
    free = not isinstance(row[field], (int, str)) or task in texts
    written = [row] if free else [row, row | {field: str(row[field])}]
    documents = read(tmp_path, task, written)
    assert documents == [documents[0]] * len(written)
    told = r"_(val|test)\.jsonl, line 2: \w+ .*(not one of|empty|needs a context)"
    wrong = (None, "", []) if free else (None, "", "-1", -1, 7, 1.0, "two")
    for value in wrong:
        with pytest.raises(InputError, match=told):
            read(tmp_path, task, [row, row | {field: value}])


def test_other_values_are_checked_too(tmp_path):
    row = MORE[3][3]
    with pytest.raises(InputError, match="line 1: question 'why' is not one of cause, effect"):
        read(tmp_path, "copa", [row | {"question": "why"}])
    with pytest.raises(InputError, match="line 2: premise is null"):
        read(tmp_path, "copa", [row, row | {"premise": None}])
    choices = {"text": list("abc"), "label": list("ABCD")}
    with pytest.raises(InputError, match="line 1: answerKey 'D' is not one of A, B, C"):
        read(tmp_path, "arc_easy", [{"question": "a", "choices": choices, "answerKey": "D"}])
    assert read(tmp_path, "copa", [row | {"label": True}]) == [row]


def test_blank_lines_and_byte_order_marks_are_no_rows(tmp_path):
    row = LABELLED["piqa"][0]
    [source] = find_tasks(["piqa"], None)[0]
    (tmp_path / "piqa.jsonl").write_text(
        f"\ufeff{json.dumps(row)}\n\n \n\ufeff{json.dumps(row)}\n\ufeff\n"
    )
    assert read_rows(dataclasses.replace(source, documents=tmp_path / "piqa.jsonl")) == [row, row]


@pytest.mark.parametrize(
    ("task", "change", "told"),
    [
        ("drop", {"answer": {"number": "", "date": NO_DATE, "spans": []}}, "answer is empty"),
        ("nq_open", {"answer": [""]}, "answer is empty"),
        ("lambada_openai", {"text": "alone"}, "text 'alone' needs a context"),
        ("lambada_openai", {"text": "a b "}, "text 'a b ' needs a context"),
        ("sciq", {"correct_answer": " "}, "correct_answer is empty"),
        ("sciq", {"correct_answer": ["a"]}, r"correct_answer \['a'\] is not text"),
        ("sciq", {"support": 7}, "support 7 is not text"),
        ("winogrande", {"sentence": "b c"}, "sentence 'b c' has no _ where its options belong"),
        ("winogrande", {"sentence": 7}, "sentence 7 is not text"),
        ("sciq", {"distractor1": ["a"]}, r"distractor1 \['a'\] is not text"),
        ("hellaswag", {"endings": ["d", 5, "f", "g"]}, "endings 5 is not text"),
        (
            "arc_challenge",
            {"choices": {"text": ["a", None], "label": ["A", "B"]}},
            "choices None is not text",
        ),
    ],
)
def test_fields_of_text_hold_text(tmp_path, task, change, told):
    row = LABELLED[task][0]
    with pytest.raises(InputError, match=f"line 2: {told}"):
        read(tmp_path, task, [row, row | change])


@pytest.mark.parametrize("blank", ["", " "])
def test_lambadas_two_parts_are_a_word_apart(tmp_path, blank):
    row = {"context": f"They all sat down next to{blank}", "continuation": f"{blank}signs"}
    assert read(tmp_path, "lambada_openai", [row]) == [{"text": "They all sat down next to signs"}]


def test_an_unknown_task_brings_the_nearest_name(adapter, tmp_path, monkeypatch):
    import lm_eval.tasks.manager

    (tmp_path / "piqa.yaml").write_text("task: piqa\n")  # indexing all of the harness's takes 17 s
    monkeypatch.setattr(lm_eval.tasks.manager, "__file__", str(tmp_path / "manager.py"))
    with pytest.raises(InputError, match=r"piqua: unknown task, did you mean piqa\?"):
        adapter.load_tasks([TaskSource("piqua")])


def test_bad_models_are_one_line(checkpoint, tmp_path):
    for name, found in {
        "no/such/model": "no such model",
        str(tmp_path / "nothing"): "no such model",
        str(tmp_path): "holds no config.json",
    }.items():
        with pytest.raises(InputError, match=found):
            evaluate([name], ["table4"])
    with pytest.raises(InputError, match="--dtype fp8: unknown"):
        load_model(checkpoint, dtype="fp8")


def test_a_model_needs_its_own_tokenizer(checkpoint, tokenizer, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "step-2", ignore=shutil.ignore_patterns("*token*"))
    with pytest.raises(
        InputError, match=r"step-2 has no tokenizer; copy its files there, or .*nalanda export"
    ):
        load_model(str(tmp_path / "step-2"))
    small = NalandaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_heads=1)
    NalandaForCausalLM(small).save_pretrained(tmp_path / "small")
    tokenizer.save_pretrained(tmp_path / "small")
    with pytest.raises(InputError, match="small: its tokenizer has 257 tokens, the model only 64"):
        load_model(str(tmp_path / "small"))


def test_added_tokens_that_the_model_cannot_read_are_one_line(adapter, tokenizer, tmp_path, capsys):
    path = save(tokenizer, tmp_path / "model")
    small = NalandaConfig(
        vocab_size=257, hidden_size=16, num_hidden_layers=1, num_heads=1, bos_token_id=0
    )
    NalandaForCausalLM(small).save_pretrained(path)
    own = transformers.AutoTokenizer.from_pretrained(path)
    own.add_tokens(["<mill>"])
    own.save_pretrained(path)
    (tmp_path / "text.txt").write_text("the <mill> grinds")
    write(tmp_path, "lambada_test.jsonl", [{"text": "the <mill> grinds"}])
    told = r"the text has token 257 \(<mill>\), the model reads only 257 tokens"
    with pytest.raises(InputError, match=told):
        generate(path, "the <mill>", sampling=Sampling(max_new_tokens=1))
    with pytest.raises(InputError, match=told):
        evaluate([path], ["lambada_openai"], EvalOptions(data=str(tmp_path)))
    with pytest.raises(InputError, match=told):
        perplexity(
            [path], str(tmp_path / "text.txt"), PerplexityOptions(output=str(tmp_path / "out"))
        )
    generate(
        path, "the", sampling=Sampling(max_new_tokens=1)
    )  # such tokens do no harm where no text has them


def test_a_checkpoint_that_lacks_tensors_is_refused(checkpoint, tokenizer, tmp_path):
    from safetensors.torch import load_file, save_file

    path = save(tokenizer, tmp_path / "torn")
    weights = load_file(f"{path}/model.safetensors")
    weights.pop("lm_head.weight")
    save_file(weights, f"{path}/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        InputError, match=r"lacks 1 of the model's tensors, such as lm_head\.weight"
    ):
        load_model(path)
    (tmp_path / "torn" / "model.safetensors").write_bytes(b"\0" * 64)
    with pytest.raises(InputError, match="cannot load"):
        load_model(path)


# ------------------------------ generation


def test_generation_is_greedy_from_bos_and_streams(checkpoint, capsys):
    network, tokenizer = load_model(checkpoint)
    ids = [0, *tokenizer("the miller", add_special_tokens=False).input_ids]
    start = len(ids)
    while len(ids) < start + 12 and (len(ids) == start or ids[-1] != 0):
        with torch.no_grad():
            ids.append(network(torch.tensor([ids])).logits[0, -1].argmax().item())
    expected = tokenizer.decode(ids[start:], skip_special_tokens=True)
    assert (
        generate(checkpoint, "the miller", sampling=Sampling(max_new_tokens=12, temperature=0))
        == expected
    )
    out, err = capsys.readouterr()
    assert out.rstrip("\n") == "the miller" + expected.rstrip("\n")
    assert re.fullmatch(
        r"\d+ tokens in [\d.]+ s, \d+ tokens/s; [\d.]+ [KM]iB of state, \d+ MiB resident at most\n",
        err,
    )


def test_generation_samples_by_seed_and_reads_stdin(checkpoint, capsys, monkeypatch):
    first, again, other = (
        generate(checkpoint, "dusk", sampling=Sampling(max_new_tokens=16, seed=seed), stream=False)
        for seed in (1, 1, 2)
    )
    assert first == again != other
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"dusk")))
    assert (
        generate(checkpoint, "-", sampling=Sampling(max_new_tokens=16, seed=1), stream=False)
        == first
    )
    assert (
        generate(checkpoint, "", sampling=Sampling(max_new_tokens=2, seed=1, top_k=1), stream=False)
        is not None
    )
    assert capsys.readouterr() == ("", "")


def test_a_prompt_on_standard_input_keeps_its_line_ends(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"dusk\r\ndawn\n")))
    assert read_prompt("-", None) == "dusk\r\ndawn\n"


@pytest.mark.parametrize(
    "option", [{"max_new_tokens": 0}, {"temperature": -1}, {"top_p": 0}, {"top_k": -1}]
)
def test_bad_sampling_is_one_line(option):
    with pytest.raises(InputError, match=next(iter(option))):
        generate("anything", "prompt", sampling=Sampling(**option))


def test_any_causal_model_generates_and_is_scored(adapter, tokenizer, data, tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert (
        generate(
            str(tmp_path), "dusk", sampling=Sampling(max_new_tokens=4, temperature=0), stream=False
        )
        is not None
    )
    results = evaluate([str(tmp_path)], ["arc_easy"], EvalOptions(data=str(data), limit=2))
    assert results["models"][0]["begins_with_bos"]
    assert results["models"][0]["tasks"]["arc_easy"]["documents"] == 2
    assert "Only 2 of each task" in report.results_markdown(results)
    row, _ = report.suite(results)[2]
    assert (row[1], row[-1]) == ("—", "—")  # no average of fewer than five
