"""Checks that model folders and hub ids have a model. Imports neither torch nor transformers."""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from nalanda.common.errors import InputError
from nalanda.common.text import suggest


def not_here(name: str) -> str:
    """A prefix for the hub's error about `name`, which may be a misspelt folder."""
    if Path(name).expanduser().exists():
        return ""
    return f"there is no folder {name}, and the hub says: "


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder; [] if its weights have another format.

    Raises:
        InputError: a file is missing or damaged, or the index names one outside the folder.
    """
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"] if (folder / "model.safetensors").is_file() else []
    if index.is_file():
        try:
            weights = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = sorted(set(weights.values()))
            # A downloaded index may name any path, and only files of the folder are read.
            inside = all(Path(name).name == name for name in names)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise InputError(f"{index.name}: damaged, or not an index of weights") from None
        # In the hub's cache, files in snapshots/REVISION link to blobs.
        root = folder.resolve()
        if root.parent.name == "snapshots":
            root = root.parents[1]
        for name in names:
            if not inside or not (folder / name).resolve().is_relative_to(root):
                raise InputError(f"{index.name}: {name} is outside the folder, and was not read")

    files = [folder / name for name in names]
    for file in files:
        if not file.is_file():
            raise InputError(f"no {file.name} there, which {index.name} names")
        file.open(
            "rb"
        ).close()  # safetensors says of a file that may not be read that it is not there
        try:
            # Opening it checks the header and the length of the file.
            with safe_open(file, "numpy"):
                pass
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"{file.name}: damaged or cut short ({error}); copy or download it again"
            ) from None
    return files


def check_name(name: str, *, hub: bool = True) -> None:
    """Raises `InputError` for a folder without a complete model, or an id without a model on the hub.

    hub: whether the hub is asked, which imports transformers; otherwise an id passes.
    """
    path = Path(name).expanduser()
    if (path / "config.json").is_file():
        try:
            weight_files(path)
        except InputError as error:
            raise InputError(f"cannot load {name}: {error}") from None
        return
    if path.exists():
        raise InputError(
            f"{name} holds no config.json: give the directory of a run or a checkpoint"
        )
    if name.startswith(("/", ".", "~")) or name.count("/") != 1:
        raise InputError(
            f"no such model: {name} (a run, a checkpoint directory, or OWNER/NAME on the hub)"
        )
    # A folder of runs is no owner on the hub, which a search without a network takes long to miss.
    if runs := sorted(file.parent.name for file in path.parent.glob("*/metrics.jsonl")):
        raise InputError(f"no such run: {name}{suggest(path.name, runs)}")
    if not hub:
        return
    from transformers.utils import cached_file  # takes seconds

    try:
        cached_file(name, "config.json")
    except Exception as error:  # huggingface_hub's and its transports' have no common one
        raise InputError(f"no such model: {not_here(name)}{str(error).splitlines()[0]}") from None
