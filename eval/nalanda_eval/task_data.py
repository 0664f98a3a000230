"""Names of tasks and the files of their documents. Importing this is fast."""

import difflib
import gzip
import importlib.util
import json
import re
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from nalanda.common.errors import InputError
from nalanda.common.text import closest
from nalanda_eval.needles import NEEDLE_GROUPS, NEEDLES, NeedleTask
from nalanda_eval.report import RECALL, TABLE4

PACKAGED = Path(__file__).parent / "tasks"


@dataclass(frozen=True)
class LocalData:
    """Local documents for one of the harness's own task files, which expects the hub's field names."""

    official: str
    """Path of the task file in the harness's folder of tasks, or of ours."""
    file: str
    """Name in the data directory, without .jsonl or .jsonl.gz."""
    fields: tuple[str, ...]
    """Names of the hub's fields."""
    convert: Callable[[dict], dict] = dict
    """Function from a row of the file to one with the hub's fields."""

    @property
    def split(self) -> str:
        return "test" if self.file.endswith("_test") else "validation"

    @property
    def training_file(self) -> str:
        """Name of the file from which few-shot examples are drawn, such as piqa_train."""
        return f"{self.file.rpartition('_')[0]}_train"


def _lambada(row: dict) -> dict:
    if "text" in row:
        return row
    return {"text": f"{row['context'].rstrip()} {row['continuation'].strip()}"}


def _arc(row: dict, question: str = "question") -> dict:
    if question in row:
        return row
    labels = [str(i) for i in range(len(row["choices"]))]
    return {
        question: row["query"].removeprefix("Question: ").removesuffix("\nAnswer:"),
        "choices": {"text": row["choices"], "label": labels},
        "answerKey": row["gold"],
    }


def _boolq(row: dict) -> dict:
    return row if "label" in row else row | {"label": row["answer"]}


_ARC = ("question", "choices", "answerKey")
_OPENBOOKQA = ("question_stem", "choices", "answerKey")
_SCIQ = ("support", "question", "distractor1", "distractor2", "distractor3", "correct_answer")
_COPA = ("premise", "question", "choice1", "choice2", "label")
_SIQA = ("context", "question", "answerA", "answerB", "answerC", "label")
_HELLASWAG = ("activity_label", "ctx_a", "ctx_b", "endings", "label")
_WINOGRANDE = ("sentence", "option1", "option2", "answer")
_COMPLETION = ("text", "value")
_PASSAGE = ("context", "question", "answers")
_DROP = ("query_id", "passage", "question", "answer", "validated_answers")


LOCAL = {
    "wikitext": LocalData("wikitext/wikitext.yaml", "wikitext_test", ("page",)),
    "lambada_openai": LocalData("lambada/lambada_openai.yaml", "lambada_test", ("text",), _lambada),
    "piqa": LocalData("piqa/piqa.yaml", "piqa_val", ("goal", "sol1", "sol2", "label")),
    "hellaswag": LocalData("hellaswag/hellaswag.yaml", "hellaswag_val", _HELLASWAG),
    "winogrande": LocalData("winogrande/default.yaml", "winogrande_xl_val", _WINOGRANDE),
    "arc_easy": LocalData("arc/arc_easy.yaml", "arc_easy_test", _ARC, _arc),
    "arc_challenge": LocalData("arc/arc_challenge.yaml", "arc_challenge_test", _ARC, _arc),
    "boolq": LocalData(
        "super_glue/boolq/default.yaml", "boolq_val", ("passage", "question", "label"), _boolq
    ),
    "openbookqa": LocalData(
        "openbookqa/openbookqa.yaml",
        "openbookqa_test",
        _OPENBOOKQA,
        partial(_arc, question="question_stem"),
    ),
    "sciq": LocalData("sciq/sciq.yaml", "sciq_val", _SCIQ),
    "copa": LocalData("super_glue/copa/default.yaml", "copa_val", _COPA),
    "social_iqa": LocalData("siqa/siqa.yaml", "social_iqa_val", _SIQA),
    "commonsense_qa": LocalData("commonsense_qa/default.yaml", "commonsense_qa_val", _ARC),
}
_QA = {
    "triviaqa": LocalData("triviaqa/default.yaml", "triviaqa_val", ("question", "answer")),
    "nq_open": LocalData("nq_open/nq_open.yaml", "nq_open_val", ("question", "answer")),
    "drop": LocalData("drop/default.yaml", "drop_val", _DROP),
}


def _recall_data(name: str) -> LocalData:
    """The documents of a task of `RECALL`, whose file is ours or the harness's."""
    if name.startswith("based_"):
        file = str(PACKAGED / "recall" / f"{name}.yaml")
        return LocalData(file, f"{name}_val", _PASSAGE)
    return LocalData(f"{name}/{name}.yaml", f"{name}_val", _COMPLETION)


_IN_CONTEXT = {name: _recall_data(name) for name, _, _ in RECALL}


GROUPS = {
    "table4": list(dict.fromkeys(task for task, _, _ in TABLE4)),
    "recall": [*_IN_CONTEXT, *_QA],
    "all": list(LOCAL),
}
LOCAL |= _IN_CONTEXT | _QA


Rule = Callable[[dict, Any], Any]
"""Function from a row and one of its values to the hub's value. Raises ValueError for a wrong value."""


def _one_of(choices: Iterable | Callable[[dict], Iterable]) -> Rule:
    """The rule that a value is one of `choices`, which may depend on the row, or is written like one."""

    def rule(row: dict, value: Any) -> Any:
        allowed = choices(row) if callable(choices) else choices
        by_name = {str(choice): choice for choice in allowed}
        # JSON's true counts as 1, so a Boolean label fits the choices 0 and 1.
        name = str(int(value) if isinstance(value, bool) else value).strip()
        if name in by_name:
            return by_name[name]
        hint = ""
        if name in ("-1", "", "None"):
            hint = "; a test split without answers cannot be scored"
        raise ValueError(f"{value!r} is not one of {', '.join(by_name)}{hint}")

    return rule


UNANSWERED = "is empty; a test split without answers cannot be scored"


def _require_answers(row: dict, value: Any) -> Any:
    """The rule that there is an answer."""
    answers = value["aliases"] if isinstance(value, dict) else value
    if not answers or not any(answers):
        raise ValueError(UNANSWERED)
    if not all(isinstance(answer, str) for answer in answers):
        raise ValueError(f"{value!r} is not text")
    return value


def _require_text(row: dict, value: Any) -> Any:
    """The rule that the answer is a text, and not blank."""
    if value and not isinstance(value, str):
        raise ValueError(f"{value!r} is not text")
    if not value or not value.strip():
        raise ValueError(UNANSWERED)
    return value


def _require_drop_answer(row: dict, answer: Any) -> Any:
    """The rule that an answer, or a validated one, has a number, a span or a date."""
    validated = row["validated_answers"]
    if not answer:
        raise ValueError(UNANSWERED)
    values = [answer["number"], *answer["spans"], *validated["number"], *validated["spans"]]
    for date in (answer["date"], *validated["date"]):
        values += date.values()
    if not any(values):
        raise ValueError(UNANSWERED)
    return answer


def _require_context_and_word(row: dict, text: Any) -> Any:
    """The rule that a text has a word to predict, and words before it."""
    context, _, word = text.rpartition(" ") if isinstance(text, str) else ("", "", "")
    if not context.strip() or not word.strip():
        raise ValueError(f"{text!r} needs a context and, after a space, the word to predict")
    return text


def _require_gap(row: dict, sentence: Any) -> Any:
    """The rule that a sentence has a gap for its options."""
    if not isinstance(sentence, str):
        raise ValueError(f"{sentence!r} is not text")
    if "_" not in sentence:
        raise ValueError(f"{sentence!r} has no _ where its options belong")
    return sentence


def _endings(row: dict) -> list[str]:
    return [str(i) for i in range(len(row["endings"]))]


def _letters(row: dict) -> list[str]:
    choices = row["choices"]
    # Only letters whose choice exists.
    return choices["label"][: len(choices["text"])]


FIELD_RULES: dict[str, Rule] = {
    "answerKey": _one_of(_letters),
    "answers": _require_answers,
    "correct_answer": _require_text,
    "value": _require_answers,
}
"""The rules of fields that say which answer is right, where tasks agree. All other fields hold text."""

TASK_RULES: dict[str, dict[str, Rule]] = {
    "lambada_openai": {"text": _require_context_and_word},
    "drop": {"answer": _require_drop_answer},
    "piqa": {"label": _one_of((0, 1))},
    "hellaswag": {"label": _one_of(_endings)},
    "winogrande": {"sentence": _require_gap, "answer": _one_of(("1", "2"))},
    "boolq": {"label": _one_of((0, 1))},
    "copa": {"label": _one_of((0, 1)), "question": _one_of(("cause", "effect"))},
    "social_iqa": {"label": _one_of(("1", "2", "3"))},
    "triviaqa": {"answer": _require_answers},
    "nq_open": {"answer": _require_answers},
}
"""The rules of single tasks' fields."""


@dataclass(frozen=True)
class TaskSource:
    """A task to run: one of the harness's names or a task file, with its local documents, if any."""

    name: str
    task_file: Path | None = None
    local: LocalData | None = None
    documents: Path | None = None
    """File to read, with `local`."""
    training: Path | None = None
    """File of few-shot examples, with `documents`."""
    data: Path | None = None
    """Folder of the relative data_files, with `task_file`; or of the text, with `needle`."""
    needle: NeedleTask | None = None


def find_tasks(tasks: list[str], data: str | None) -> tuple[list[TaskSource], dict[str, str]]:
    """The tasks named in `tasks`, and the members of groups that lack local data, with the reason.

    Raises:
        InputError: a missing file or directory, or a task for which `data` has no documents.
    """
    directory = None if data is None else Path(data).expanduser()
    if directory is not None and not directory.is_dir():
        raise InputError(f"--data {data}: no such directory")
    sources: dict[str, TaskSource] = {}
    left_out: dict[str, str] = {}
    for task in tasks:
        for source in _expand_task(task, directory):
            if source.local and directory and not source.documents:
                reason = f"{data} has no {source.local.file}.jsonl or .jsonl.gz"
                # A task that is named must have its data; a member of a group may lack it.
                if task not in GROUPS:
                    raise InputError(f"{task}: no data: {reason}")
                left_out[source.name] = reason
            else:
                sources[source.name] = source
    if not sources and left_out:
        names = ", ".join(f"{LOCAL[name].file}.jsonl.gz" for name in left_out)
        raise InputError(f"--data {data}: has data for none of the tasks, expected {names}")
    if not sources:
        raise InputError("no task; give a name, a task file or table4")
    return list(sources.values()), left_out


def _expand_task(task: str, data: Path | None) -> list[TaskSource]:
    if task in NEEDLE_GROUPS or task in NEEDLES:
        names = NEEDLE_GROUPS.get(task, [task])
        return [TaskSource(name, data=data, needle=NEEDLES[name]) for name in names]
    if task in GROUPS or task in LOCAL:
        return [find_official(name, data) for name in GROUPS.get(task, [task])]
    # Only a bare name is looked for among our folders: a path would lead out of them.
    path = PACKAGED / task
    if not (path.is_dir() and task.isidentifier()):
        path = Path(task).expanduser()

    if path.is_dir():
        files = sorted(path.glob("*.yaml"))
        if not files:
            raise InputError(f"{task}: the directory holds no task file (*.yaml)")
    elif path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise InputError(f"{task}: no such task file")
        files = [path]
    elif data is not None:
        near = closest(task, (*GROUPS, *NEEDLE_GROUPS, *LOCAL))
        advice = f"local data is for task files and for {', '.join(LOCAL)}"
        if near:
            advice = f"did you mean {near}?"
        raise InputError(f"--data {data}: cannot serve {task}; {advice}")
    else:
        check_harness_name(task)
        return [TaskSource(task)]
    return [TaskSource(str(file), task_file=file, data=data) for file in files]


@cache
def check_harness_name(name: str) -> None:
    """Raises `InputError` for a name that stands in no task file of the harness.

    Reads the files, since the harness takes half a minute for an index of them.
    """
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or spec.origin is None:
        return  # its import says how to install it
    names = ["python_docs"]
    for file in Path(spec.origin).with_name("tasks").rglob("*"):
        if file.suffix not in (".yaml", ".yml"):
            continue
        text = file.read_text("utf-8", "replace")
        if name in text:
            return
        names += re.findall(r"^(?:task|group|tag): *([\w.-]+)", text, re.MULTILINE)
    raise InputError(f"{name}: unknown task{suggest_task(name, names)}")


def suggest_task(name: str, names: list[str]) -> str:
    """The nearest of the names that tasks have, as the end of a message."""
    near = difflib.get_close_matches(name, names, n=3)
    if near:
        return f", did you mean {', '.join(near)}?"
    return "; give table4, a task file or one of the harness's"


def find_official(name: str, data: Path | None) -> TaskSource:
    """A task of `LOCAL`, with its documents in the folder `data` if they are there."""
    local = LOCAL[name]
    files: list[Path | None] = []
    for file_name in (local.file, local.training_file):
        names = [f"{file_name}{suffix}" for suffix in (".jsonl", ".jsonl.gz")]
        paths = [data / name for name in names] if data is not None else []
        files.append(next((path for path in paths if path.is_file()), None))
    return TaskSource(name, local=local, documents=files[0], training=files[1])


def read_rows(source: TaskSource, *, training: bool = False) -> list[dict]:
    """The local documents of a task, each with the hub's fields. Blank lines are skipped.

    training: read the file of few-shot examples instead.

    Raises:
        InputError: a damaged line, a missing field or a wrong label, with its line number.
    """
    file: Any = source.training if training else source.documents
    rows: list[dict] = []
    try:
        with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if text := line.strip("\ufeff \t\r\n"):  # some editors write a byte order mark
                    rows.append(_read_row(source, text, f"{file}, line {number}"))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InputError(f"{file} is damaged: {error}") from error
    if not rows:
        raise InputError(f"{file} is empty")
    return rows


def _read_row(source: TaskSource, line: str, location: str) -> dict:
    """The document in a line, with the hub's fields. location: the file and line, for messages."""
    local: Any = source.local
    try:
        row = json.loads(line)
        if not isinstance(row, dict):
            raise ValueError(f"{line[:40]} is no object of fields")
        row = local.convert(row)
        document = {name: row[name] for name in local.fields}
    except KeyError as error:
        raise InputError(f"{location}: the field {error} is missing") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{location} is broken: {error}") from error

    rules = {name: rule for name, rule in FIELD_RULES.items() if name in document}
    rules |= TASK_RULES.get(source.name, {})
    for name, rule in rules.items():
        try:
            document[name] = rule(row, row[name])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"{location}: {name} {error}") from None

    # All other fields are text, or the harness fails far from the line.
    for name, value in document.items():
        if value is None:
            raise InputError(f"{location}: {name} is null")
        if name in rules or name in ("query_id", "validated_answers"):
            continue
        for text in _text_values(name, value):
            if not isinstance(text, str):
                raise InputError(f"{location}: {name} {text!r} is not text")
    return document


def _text_values(name: str, value: Any) -> list:
    """The values of a field that are to be text."""
    if name == "choices":
        return value["text"]
    return value if name == "endings" else [value]
