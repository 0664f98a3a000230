"""Writes the data of evaluation tasks into a folder, for machines without a network."""

import gzip
import json
from typing import Any

from nalanda.common.errors import InputError, output_folder
from nalanda.common.retry import persist
from nalanda.common.text import redact
from nalanda_eval.python_tasks import write_python_tasks
from nalanda_eval.task_data import GROUPS, LOCAL, LocalData, _official


def fetch_tasks(tasks: list[str], directory: str) -> None:
    """Downloads the files that `find_tasks` looks for in `directory` from the Hub; existing files are kept.

    Raises:
        InputError: a task that reads no such file, or data that cannot be downloaded.
        SourceUnavailable: the Hub failed too often in a row; the same command resumes.
    """
    names = list(dict.fromkeys(name for task in tasks for name in GROUPS.get(task, [task])))
    if unknown := [name for name in names if name not in (*LOCAL, "python_docs")]:
        known = ", ".join([*GROUPS, *LOCAL, "python_docs"])
        raise InputError(f"{unknown[0]}: no data to fetch; choose from {known}")
    root = output_folder(directory, "--fetch")
    for name in names:
        if name == "python_docs":
            write_python_tasks(root)
            continue
        file, local = _official(name, root).documents, LOCAL[name]
        if file:
            print(f"{file}: exists already")
            continue
        rows = _from_hub(name, local)
        half = root / f".{local.file}.partial.jsonl.gz"
        with half.open("wb") as stream, gzip.GzipFile("", "wb", fileobj=stream, mtime=0) as lines:
            for row in rows:
                kept = {field: row[field] for field in local.fields}
                lines.write((json.dumps(kept, ensure_ascii=False) + "\n").encode())
        file = half.replace(root / f"{local.file}.jsonl.gz")
        print(f"{file}: {len(rows)} documents")


def _from_hub(name: str, local: LocalData) -> Any:
    """The dataset that the harness's task file names."""
    import datasets

    from nalanda_eval.adapter import OFFICIAL, load_yaml

    task = load_yaml(OFFICIAL / local.official)
    if known := task.get("class"):  # a task in Python
        path, part = known.DATASET_PATH, known.DATASET_NAME
    else:
        path, part = task["dataset_path"], task.get("dataset_name")
    where = f"{name}: {path}, {local.split}"
    try:
        return persist(
            lambda: datasets.load_dataset(path, part, split=local.split), where, retries=8
        )
    except InputError:
        raise
    except Exception as error:  # datasets, huggingface_hub and httpx share no base class
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(f"{where}: cannot be downloaded from the Hub ({redact(reason)})") from None
