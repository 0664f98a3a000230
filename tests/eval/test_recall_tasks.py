"""Recall from a text, and needles, through lm-evaluation-harness: tiny models, documents of our own."""

import copy
import functools
import gzip
import json
import re
from types import SimpleNamespace

import pytest
import torch
from nalanda_eval import needles, report
from nalanda_eval.fetch import fetch_tasks
from nalanda_eval.harness import evaluate, most_tokens
from nalanda_eval.needles import KINDS, NEEDLES, NeedleTask, haystack, needle_rows
from nalanda_eval.options import EvalOptions
from nalanda_eval.task_data import GROUPS, LOCAL, find_tasks, read_rows
from nalanda_kernels import Unsupported
from nalanda_kernels.cpu import build
from nalanda_kernels.cpu.token import Program
from tiny_models import save

from nalanda.common.errors import InputError
from nalanda.inference.load import load_model

COMPLETION = {"text": "Mill: stone. The mill is made of ", "value": "stone"}
PASSAGE = {
    "context": "[DOC] [TLE] The Mill. Ann owns it. It is owned by",
    "question": "It is owned by",
    "answers": ["Ann", "Ann Miller"],
}
ANSWER = {"number": "3", "date": {"day": "", "month": "", "year": ""}, "spans": []}
DROP = {
    "query_id": "q",
    "passage": "Ann has 3 sacks.",
    "question": "How many sacks?",
    "answer": ANSWER,
    "validated_answers": {key: [value] for key, value in ANSWER.items()},
}
ROWS = {
    **dict.fromkeys(("swde", "squad_completion", "fda"), COMPLETION),
    **dict.fromkeys(("based_triviaqa", "based_nq", "based_drop"), PASSAGE),
    "triviaqa": {"question": "Who grinds", "answer": {"aliases": ["Ann"], "value": "Ann"}},
    "nq_open": {"question": "who grinds", "answer": ["Ann"]},
    "drop": DROP,
}
# What the model is to continue, an answer that is right, and the metrics that then are 1.
LINE = "The Mill. Ann owns it. It is owned by"
ASKED = {
    **dict.fromkeys(
        ("swde", "squad_completion", "fda"),
        ("Mill: stone. The mill is made of", " STONE.", "contains"),
    ),
    **dict.fromkeys(
        ("based_triviaqa", "based_nq", "based_drop"), (LINE, " ann Miller of", "contains")
    ),
    "triviaqa": ("Question: Who grinds?\nAnswer:", " Ann", "exact_match"),
    "nq_open": ("Answer these questions:\n\nQ: who grinds?\nA:", " Ann", "exact_match"),
    "drop": ("Ann has 3 sacks. How many sacks?", "3", "em f1"),
}


@pytest.fixture(scope="module")
def checkpoint(tokenizer, tmp_path_factory):
    return save(tokenizer, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    for name, row in ROWS.items():
        lines = 2 * (json.dumps(row) + "\n")
        (directory / f"{LOCAL[name].file}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    return directory


# ------------------------------ recall from a text


def test_recall_tasks_ask_and_score_as_the_harness_does(data):
    from nalanda_eval import adapter

    assert list(ROWS) == GROUPS["recall"]
    loaded = adapter.load_tasks(find_tasks(["recall"], str(data))[0])["tasks"]
    for name, task in loaded.items():
        prompt, right, metrics = ASKED[name]
        task.build_all_requests(limit=1, rank=0, world_size=1)
        (instance,) = task.instances
        assert instance.request_type == "generate_until"
        assert instance.args[0] == prompt
        for answer, expected in ((right, 1), (" sacks of corn", 0)):
            scores = task.process_results(instance.doc, [answer.strip()])
            assert {scores[metric] for metric in metrics.split()} == {expected}


def test_answers_are_generated_from_the_state_whatever_the_batch(checkpoint, monkeypatch):
    from lm_eval.api.instance import Instance
    from nalanda_eval.adapter import ENDLESS, HarnessModel

    model, tokenizer = load_model(checkpoint)
    monkeypatch.setattr(model, "read", functools.partial(model.read, chunk_size=16))
    contexts = ["the mill " * n + "grinds" for n in (1, 2, 5, 9)]
    expected = []
    for context in contexts:
        ids = [0, *tokenizer(context, add_special_tokens=False).input_ids]
        start = len(ids)
        while len(ids) < start + 12 and (len(ids) == start or ids[-1] != 0):
            with torch.no_grad():
                ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
        expected.append(tokenizer.decode(ids[start:], skip_special_tokens=True))
    assert len(set(expected)) > 1
    for size in (1, 3):
        done = []
        scorer = HarnessModel(
            model, tokenizer, batch_size=size, max_length=ENDLESS, advance=done.append
        )
        options = {"until": [], "max_gen_toks": 12}
        asked = [Instance("generate_until", {}, (context, options), 0) for context in contexts]
        assert scorer.generate_until(asked) == expected
        assert sum(done) == pytest.approx(sum(map(len, contexts)))
    stop = expected[0][3:5]
    asked = [
        Instance("generate_until", {}, (contexts[0], {"until": [stop], "max_gen_toks": 12}), 0)
    ]
    assert scorer.generate_until(asked) == [expected[0].split(stop)[0]]
    # A task may call the number of tokens as transformers does.
    scorer = HarnessModel(model, tokenizer, batch_size=1, max_length=200)
    options = {"until": [], "max_new_tokens": 12}
    assert scorer.generate_until([Instance("generate_until", {}, (contexts[0], options), 0)]) == [
        expected[0]
    ]
    scorer = HarnessModel(model, tokenizer, batch_size=1, max_length=12)
    with pytest.raises(
        InputError, match=r"up to 12 tokens, the model sees 12 at once: raise --max-length"
    ):
        scorer.generate_until(asked)


def test_answers_are_decoded_in_cpp(checkpoint, monkeypatch):
    from lm_eval.api.instance import Instance
    from nalanda_eval.adapter import ENDLESS, HarnessModel

    try:
        build.library()
    except Unsupported as reason:
        pytest.skip(f"no C++ compiler: {reason}")
    runs = []

    def recorded(self, first, end, run=Program.run):
        runs.append(self.batch)
        run(self, first, end)

    monkeypatch.setattr(Program, "run", recorded)
    model, tokenizer = load_model(checkpoint)
    scorer = HarnessModel(model, tokenizer, batch_size=3, max_length=ENDLESS)
    options = {"until": [], "max_gen_toks": 12, "eos_token_id": None}
    contexts = ["the mill " * n + "grinds" for n in (1, 2, 5, 9)]
    scorer.generate_until(
        [Instance("generate_until", {}, (context, options), 0) for context in contexts]
    )
    assert runs == [3] * 12 + [1] * 12


def test_processes_answer_every_other_prompt(checkpoint, monkeypatch):
    from lm_eval.api.instance import Instance
    from nalanda_eval import adapter
    from nalanda_eval.adapter import ENDLESS, HarnessModel

    scorer = HarnessModel(*load_model(checkpoint), batch_size=2, max_length=ENDLESS)
    options = {"until": [], "max_gen_toks": 5}
    contexts = ["the mill " * n + "grinds" for n in (1, 2, 5, 9)]
    asked = [Instance("generate_until", {}, (context, options), 0) for context in contexts]
    expected = scorer.generate_until(asked)
    assert len({*expected}) > 1

    said: list[list] = []  # what process 1 hands to the others
    for rank in (1, 0):

        def gather(own: list, rank=rank) -> list:
            if rank:
                said.append(own)
            return own + (own if rank else said.pop(0))

        monkeypatch.setattr(adapter, "gather_object", gather)
        scorer.processes = SimpleNamespace(process_index=rank, num_processes=2)
        answers = scorer.generate_until(asked)
    assert answers == expected


@pytest.mark.slow
def test_recall_stands_below_the_published_rows(checkpoint, data):
    results = evaluate([checkpoint], ["recall"], EvalOptions(data=str(data), long="whole"))
    scores = results["models"][0]["tasks"]
    assert {name: set(task["metrics"]) for name, task in scores.items()} == {
        name: {"exact_match@remove_whitespace"}
        if "exact" in ASKED[name][2]
        else set(ASKED[name][2].split())
        for name in ROWS
    }
    assert scores["swde"]["stderr"] == scores["based_nq"]["stderr"] == {"contains": 0.0}
    text = report.results_markdown(results)
    assert "| Gated DeltaNet | 25.4 | 34.8 | 23.7 | 60.0 | 20.0 | 19.8 | 30.6 |" in text
    assert "| Transformer++ | 29.5 | 38.0 | 52.2 | 58.3 | 22.5 | 21.6 | 37.0 |" in text
    assert "| model | SWDE | SQuAD | FDA | TriviaQA | NQ | DROP | avg |" in text
    assert "1.3 B parameters, 100 B tokens" in text
    assert "not comparable" in text
    assert "15 B tokens" not in text  # the other suite did not run
    assert all(f"| {task} |" in text for task in ("triviaqa", "nq_open", "drop"))


def test_the_published_averages_are_those_of_the_rows():
    """Gated DeltaNet's paper, table 4, last column (Samba's, 37.35, is rounded down there)."""
    expected = [22.9, 20.1, 21.0, 29.8, 26.2, 30.6, 37.0, 37.3, 39.0, 40.1]
    for row, average in zip(report.read_published("recall").values(), expected, strict=True):
        assert sum(row) / 6 == pytest.approx(average, abs=0.0501)


def test_recall_tasks_are_fetched_from_the_sets_that_they_name(tmp_path, monkeypatch):
    import datasets

    asked = {}

    def load_dataset(path, name, split):
        asked[path] = (name, split)
        row = next(ROWS[task] for task in ROWS if task in names[path])
        return datasets.Dataset.from_list([row | {"more": 1}])

    names = {
        "hazyresearch/based-swde-v2": "swde",
        "hazyresearch/based-squad": "squad_completion",
        "hazyresearch/based-fda": "fda",
        "hazyresearch/based_triviaqa": "based_triviaqa",
        "hazyresearch/based_nq_2048": "based_nq",
        "hazyresearch/based_drop": "based_drop",
        "mandarjoshi/trivia_qa": ["triviaqa"],
        "google-research-datasets/nq_open": "nq_open",
        "EleutherAI/drop": ["drop"],
    }
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    fetch_tasks(["recall"], str(tmp_path))
    assert asked.keys() == names.keys()
    assert {split for _, split in asked.values()} == {"validation"}
    assert asked["mandarjoshi/trivia_qa"][0] == "rc.nocontext"
    for name, row in ROWS.items():
        [source] = find_tasks([name], str(tmp_path))[0]
        assert source.documents == tmp_path / f"{LOCAL[name].file}.jsonl.gz"
        assert read_rows(source) == [row]


# ------------------------------ needles


@pytest.fixture
def words(monkeypatch):
    """A vocabulary that needs no package."""
    fake = tuple(f"dry{i}" for i in range(40)), tuple(f"mill{i}" for i in range(40))
    monkeypatch.setattr(needles, "needle_words", lambda: fake)


def size(text: str) -> int:
    return len(re.findall(r"\w+|\S", text))


@pytest.mark.parametrize("kind", KINDS)
def test_a_needle_is_asked_that_lies_in_the_hay(kind, words):
    task = NeedleTask(kind, 700, *KINDS[kind])
    sentences = tuple(f"Stone number {i} lies {'very ' * (i % 5)}still." for i in range(50))
    rows = needle_rows(task, 12, size, sentences)
    assert rows == needle_rows(task, 12, size, sentences)
    deep = set()
    for row in rows:
        (value,) = row["outputs"]
        hay, question = row["input"].split("afterwards.\n")[1].rsplit("\n", 1)
        key = re.search(r"for (\S+) mentioned", question)[1]
        assert (
            row["gen_prefix"]
            == f"The special magic {task.value} for {key} mentioned in the provided text is"
        )
        needle = f"One of the special magic {task.value}s for {key} is: {value}."
        assert hay.count(needle) == 1
        assert hay.count(f"for {key} is") == 1  # no other value of the same key
        told = hay.count("One of the special magic")
        assert told > 8 if task.hay == "needles" else told == task.keys
        assert 700 - 128 - 60 < size(row["input"] + row["gen_prefix"]) < 700 - 128
        assert re.fullmatch(r"\d{7}" if task.value == "number" else r"[0-9a-f-]{36}", value)
        deep.add(round(4 * hay.index(needle) / len(hay)))
    assert len(deep) > 2
    assert len({row["outputs"][0] for row in rows}) == 12
    with pytest.raises(InputError, match=rf"{kind}: its needles alone need more than 140 tokens"):
        needle_rows(NeedleTask(kind, 140, *KINDS[kind]), 1, size, sentences)


def test_the_hay_is_a_text_file_or_pythons_reference(tmp_path):
    (tmp_path / "haystack.txt").write_text("One two. Three!  Four\nfive " + 50 * "six ")
    assert haystack(tmp_path)[:2] == ("One two.", "Three!")
    assert [len(part.split()) for part in haystack(tmp_path)] == [2, 1, 40, 12]
    assert len(haystack(None)) > 1000
    for content, found in ((b" \n", "is empty"), (b"\xff\xfe\xff", "utf-8")):
        other = tmp_path / found
        other.mkdir()
        (other / "haystack.txt").write_bytes(content)
        with pytest.raises(InputError, match=rf"haystack\.txt: .*{found}"):
            haystack(other)


@pytest.mark.slow
def test_needles_are_read_whole_and_shown_by_length(checkpoint, tmp_path, words, monkeypatch):
    (tmp_path / "haystack.txt").write_text("Stones lie still. " * 20)
    results = evaluate(
        [checkpoint],
        ["niah_single_2_1k", "niah_single_2_2k"],
        EvalOptions(data=str(tmp_path), limit=2, long="whole"),
    )
    scores = results["models"][0]["tasks"]
    assert {name: (task["documents"], task["metrics"]["acc"]) for name, task in scores.items()} == {
        "niah_single_2_1k": (2, 0.0),
        "niah_single_2_2k": (2, 0.0),
    }
    header, (row,) = report.needle_table(results)
    assert header == ["model", "needle", "1k", "2k", "4k", "8k", "16k", "32k", "64k"]
    assert row[1:] == ["single 2", "0.0", "0.0", *"—————"]
    assert report.others(results) is None
    assert report.suite(results) is report.suite(results, "recall") is None

    short = save(load_model(checkpoint)[1], tmp_path / "short", max_position_embeddings=1024)
    results = evaluate([short], ["niah_single_1"], EvalOptions(limit=1))
    assert list(results["models"][0]["tasks"]) == ["niah_single_1_1k"]
    (how,) = results["left_out"].items()
    assert how[0] == "needles of more than 1024 tokens"
    assert "--long whole" in how[1]
    with pytest.raises(InputError, match="no needle fits: a model sees 512 tokens"):
        evaluate([short], ["needles"], EvalOptions(max_length=512))


def test_needles_fit_every_model_in_any_order(checkpoint, tokenizer, tmp_path):
    with_words = copy.deepcopy(tokenizer)
    with_words.add_tokens(["Stones", "lie", "still"])
    other = save(with_words, tmp_path / "other")
    text = "Stones lie still"
    assert (
        most_tokens([checkpoint, other])(text)
        == most_tokens([other, checkpoint])(text)
        == len(text)
    )
    assert most_tokens([other])(text) == 5
    (tmp_path / "other" / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="other: its tokenizer cannot be loaded"):
        most_tokens([checkpoint, other])


def test_a_right_answer_is_found_in_what_is_generated(words):
    from nalanda_eval import adapter

    sources, _ = find_tasks(["niah_multikey_3_1k"], None)
    (task,) = adapter.load_tasks(sources, size, 2)["tasks"].values()
    row = task.eval_docs[1]
    task.build_all_requests(limit=1, rank=0, world_size=1)
    prompt, options = task.instances[0].args
    assert prompt == f"{task.eval_docs[0]['input']} {task.eval_docs[0]['gen_prefix']}"
    assert options["max_gen_toks"] == 128
    assert task.process_results(row, [f" thought to be {row['outputs'][0].upper()}, as said"]) == {
        "acc": 1
    }
    assert task.process_results(row, [" thought to be 7"]) == {"acc": 0}


def test_every_kind_has_every_length():
    assert len(NEEDLES) == 6 * 7
    assert NEEDLES["niah_multikey_1_64k"] == NeedleTask(
        "niah_multikey_1", 65536, "text", "words", "number", 4
    )
