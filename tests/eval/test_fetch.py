"""The data of evaluation tasks, downloaded for machines without a network."""

import pytest
from typer.testing import CliRunner

import nalanda_cli
from nalanda.common.errors import InputError


def test_tasks_are_fetched_in_the_form_that_eval_reads(tmp_path, monkeypatch):
    import datasets
    from nalanda_eval.task_data import find_official, read_rows

    arc = {
        "question": "?",
        "choices": {"text": ["a", "b"], "label": ["A", "B"]},
        "answerKey": "A",
        "id": "x",
    }
    rows = {
        ("EleutherAI/lambada_openai", "default", "test"): [{"text": "a b c é"}] * 2,
        ("allenai/ai2_arc", "ARC-Challenge", "test"): [arc],
        ("baber/piqa", None, "validation"): [{"goal": "g", "sol1": "1", "sol2": "2", "label": 1}],
    }
    fails = [ConnectionError("no route")]

    def load_dataset(path, name, split):
        if fails:
            raise fails.pop()
        return datasets.Dataset.from_list(rows[path, name, split])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    arguments = [
        "eval",
        "--fetch",
        str(tmp_path / "tasks"),
        "--tasks",
        "lambada_openai,arc_challenge,piqa",
    ]
    done = CliRunner().invoke(nalanda_cli.app, arguments)
    assert done.exit_code == 0, done.output
    names = ["arc_challenge_test", "lambada_test", "piqa_val"]
    files = sorted(path.name for path in (tmp_path / "tasks").iterdir())
    assert files == [f"{name}.jsonl.gz" for name in names]
    for name, expected in zip(
        ("arc_challenge", "lambada_openai", "piqa"), (arc, {}, {}), strict=True
    ):
        found = read_rows(find_official(name, tmp_path / "tasks"))
        assert (
            found[0] == {key: expected[key] for key in expected if key != "id"}
            or name != "arc_challenge"
        )
    assert (
        read_rows(find_official("lambada_openai", tmp_path / "tasks")) == [{"text": "a b c é"}] * 2
    )

    # With few-shot examples, the documents that they are drawn from too; LAMBADA has none.
    rows[("allenai/ai2_arc", "ARC-Challenge", "train")] = [arc] * 3
    rows[("baber/piqa", None, "train")] = [{"goal": "h", "sol1": "1", "sol2": "2", "label": 0}]
    done = CliRunner().invoke(nalanda_cli.app, [*arguments, "--num-fewshot", "2"])
    assert done.exit_code == 0, done.output
    names = ["arc_challenge_test", "arc_challenge_train", "lambada_test", "piqa_train", "piqa_val"]
    files = sorted(path.name for path in (tmp_path / "tasks").iterdir())
    assert files == [f"{name}.jsonl.gz" for name in names]
    assert len(read_rows(find_official("arc_challenge", tmp_path / "tasks"), training=True)) == 3

    monkeypatch.setattr(datasets, "load_dataset", None)
    assert "exists already" in CliRunner().invoke(nalanda_cli.app, arguments).output
    with pytest.raises(
        InputError, match="mmlu: no data to fetch; choose from table4, recall, all, wikitext"
    ):
        CliRunner().invoke(nalanda_cli.app, [*arguments[:-1], "mmlu"], catch_exceptions=False)


def test_two_commands_may_fetch_a_task_at_once(tmp_path, monkeypatch):
    from nalanda_eval import fetch

    row = {"goal": "g", "sol1": "1", "sol2": "2", "label": 1}

    class Rows(list):
        def __iter__(self):
            """The other command, while this one writes."""
            monkeypatch.setattr(fetch, "_download_dataset", lambda *task: [row])
            fetch.fetch_tasks(["piqa"], str(tmp_path))
            return super().__iter__()

    monkeypatch.setattr(fetch, "_download_dataset", lambda *task: Rows([row]))
    fetch.fetch_tasks(["piqa"], str(tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == ["piqa_val.jsonl.gz"]
