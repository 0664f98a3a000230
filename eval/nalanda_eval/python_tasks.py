"""Data of the tasks `python_docs`: texts to predict and questions to answer, from held-out documents."""

import json
import random
from pathlib import Path

from nalanda.common.files import write_atomically
from nalanda.config.schema import DataConfig
from nalanda.data.sources import open_corpus

CONTEXT, ENDING = 400, 100
"""Characters of context and ending in a question of the cloze task."""
PYTHON = DataConfig(source="python")


def python_tasks(data: DataConfig = PYTHON) -> dict[str, list[dict]]:
    """The rows of the files that the tasks read, by file name, from the validation documents of `data`."""
    documents = list(open_corpus(data, "validation").once().texts())
    return {
        "python_docs.jsonl": [{"text": text} for text in excerpts(documents, characters=50_000)],
        "python_cloze.jsonl": cloze(documents, questions=200),
    }


def write_python_tasks(directory: Path, data: DataConfig = PYTHON) -> None:
    """Writes the files of `python_tasks`, into a folder that it makes."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, rows in python_tasks(data).items():
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_atomically(directory / name, "".join(lines))


def excerpts(documents: list[str], characters: int) -> list[str]:
    """The beginning of every document, about `characters` in all."""
    share = characters // len(documents)
    return [text[: text.find("\n", share) + 1 or None] for text in documents]


def cloze(documents: list[str], questions: int) -> list[dict]:
    """Questions: a passage, the text that follows it, and three wrong endings from other documents."""
    draw = random.Random(0)
    passages = []
    for source, text in enumerate(documents):
        for start in range(CONTEXT, len(text) - ENDING, CONTEXT + ENDING):
            # At the next line's start, so that no line is split.
            cut = text.find("\n", start) + 1
            ending = text[cut : cut + ENDING]
            if cut and len(ending) == ENDING and len(ending.split()) > 5:
                passages.append((source, text[cut - CONTEXT : cut], ending))
    rows = []
    for source, context, ending in draw.sample(passages, min(questions, len(passages))):
        # Wrong endings are of other documents, and differ from the right one.
        others = [
            other for document, _, other in passages if document != source and other != ending
        ]
        choices = draw.sample(others, 3)
        label = draw.randrange(4)
        choices.insert(label, ending)
        rows.append({"context": context, "choices": choices, "label": label})
    return rows
