"""Writes the data of evaluation tasks into a folder, for machines without a network."""

import gzip
import json
from pathlib import Path
from typing import Any

from nalanda.common.errors import InputError, first_line, output_folder
from nalanda.common.files import write_atomically
from nalanda.common.text import redact
from nalanda.storage.retry import persist
from nalanda_eval.python_tasks import write_python_tasks
from nalanda_eval.task_data import GROUPS, LOCAL, LocalData, find_official


def fetch_tasks(tasks: list[str], directory: str, *, training: bool = False) -> None:
    """Downloads the files that `find_tasks` looks for in `directory` from the Hub; existing files are kept.

    training: also the documents from which few-shot examples are drawn, where a task has any.

    Raises:
        InputError: a task that reads no such file, or data that cannot be downloaded.
        SourceUnavailable: the Hub failed too often in a row; the same command resumes.
    """
    names = list(dict.fromkeys(name for task in tasks for name in GROUPS.get(task, [task])))
    if unknown := [name for name in names if name not in (*LOCAL, "python_docs")]:
        choices = ", ".join([*GROUPS, *LOCAL, "python_docs"])
        raise InputError(f"{unknown[0]}: no data to fetch; choose from {choices}")
    root = output_folder(directory, "--fetch")
    for name in names:
        if name == "python_docs":
            write_python_tasks(root)
            continue
        local = LOCAL[name]
        source = find_official(name, root)
        _fetch_split(name, local, root, local.file, local.split, source.documents)
        if training and (split := _task_file(local).get("training_split")):
            _fetch_split(name, local, root, local.training_file, split, source.training)


def _fetch_split(
    name: str, local: LocalData, root: Path, file_name: str, split: str, existing: Path | None
) -> None:
    """Writes a split of a task's dataset into the folder `root`, unless its file exists."""
    if existing:
        print(f"{existing}: exists already")
        return

    rows = _download_dataset(name, local, split)
    documents = ({field: row[field] for field in local.fields} for row in rows)
    lines = [json.dumps(document, ensure_ascii=False) + "\n" for document in documents]
    file = root / f"{file_name}.jsonl.gz"
    # No time in it: the same rows give the same bytes.
    write_atomically(file, gzip.compress("".join(lines).encode(), mtime=0))
    print(f"{file}: {len(rows)} documents")


def _task_file(local: LocalData) -> dict[str, Any]:
    """The harness's task file, or ours."""
    from nalanda_eval.adapter import OFFICIAL, load_yaml

    return load_yaml(OFFICIAL / local.official)


def _download_dataset(name: str, local: LocalData, split: str) -> Any:
    """Downloads a split of the dataset that the harness's task file names."""
    import datasets

    task = _task_file(local)
    if python_task := task.get("class"):
        path, configuration = python_task.DATASET_PATH, python_task.DATASET_NAME
    else:
        path, configuration = task["dataset_path"], task.get("dataset_name")
    label = f"{name}: {path}, {split}"

    def load() -> Any:
        return datasets.load_dataset(path, configuration, split=split)

    try:
        return persist(load, label, retries=8)
    except InputError:
        raise
    except Exception as error:  # datasets, huggingface_hub and httpx share no base class
        why = redact(first_line(error))
        raise InputError(f"{label}: cannot be downloaded from the Hub ({why})") from None
