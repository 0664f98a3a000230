"""Checks that model folders and hub ids have a model. Imports neither torch nor transformers."""

import json
from functools import cache
from pathlib import Path

from safetensors import SafetensorError, safe_open

from nalanda.common.errors import InputError, first_line
from nalanda.common.text import closest, suggest

ANSWER = 3.0
"""Seconds that the hub has for an answer."""

NO_TOKENIZER = (
    "has no tokenizer; copy its files there, or make a model of a run's step with `nalanda export`"
)
"""What a command says of a model folder without one."""


def not_here(name: str) -> str:
    """A prefix for the hub's error about `name`, which may be a misspelt folder."""
    if Path(name).expanduser().exists():
        return ""
    return f"there is no folder {name}, and the hub says: "


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of a model folder that are a tokenizer's by their names."""
    return [
        path
        for pattern in ("*token*", "vocab*", "*.model")
        for path in folder.glob(pattern)
        if path.suffix != ".py"  # the code of an exported model has a one_token.py
    ]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder; [] if its weights have another format.

    Raises:
        InputError: a file is missing or damaged, or the index names one outside the folder.
    """
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"] if (folder / "model.safetensors").is_file() else []
    # transformers reads the single file where both are: an index stays when shards are saved anew as one file.
    if not names and index.is_file():
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
        # safetensors says of a file that may not be read that it is not there.
        file.open("rb").close()
        try:
            # Opening it checks the header and the length of the file.
            with safe_open(file, "numpy"):
                pass
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"{file.name}: damaged or cut short ({error}); copy or download it again"
            ) from None
    return files


def check_name(name: str) -> None:
    """Raises `InputError` for a folder without a complete model, or an id without a model on the hub."""
    path = Path(name).expanduser()
    if (path / "config.json").is_file():
        try:
            weight_files(path)
        except InputError as error:
            raise InputError(f"cannot load {name}: {error}") from None
        return
    if (path / "adapter_config.json").is_file():
        raise InputError(
            f"{name}: an adapter of PEFT; load it by AutoPeftModelForCausalLM and save what its "
            "merge_and_unload() returns"
        )
    if path.exists():
        raise InputError(
            f"{name} holds no config.json: give the directory of a run or a checkpoint"
        )
    check_run(name)
    if name.startswith(("/", ".", "~")) or name.count("/") != 1:
        near = closest(name, runs_in("runs"))
        hint = f"; did you mean {near}?" if near else ""
        kinds = "a run, a checkpoint directory, or OWNER/NAME on the hub"
        raise InputError(f"no such model: {name} ({kinds}){hint}")

    from huggingface_hub import hf_hub_download  # takes half a second

    try:
        check_hub(name)
        hf_hub_download(name, "config.json")
    except InputError as error:
        raise InputError(f"no such model: {error}") from None
    except Exception as error:  # huggingface_hub's and its transports' have no common one
        raise InputError(f"no such model: {not_here(name)}{first_line(error)}") from None


def check_config(name: str) -> None:
    """Raises `InputError` for a folder without a config.json, such as that of a run."""
    path = Path(name).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        raise InputError("no config.json there; name a model's folder, such as final/ of a run")


def check_run(name: str) -> None:
    """Raises `InputError` for a missing run: a name in a folder of runs, which is no owner on the hub."""
    folder, slash, last = name.rpartition("/")
    if slash and (runs := runs_in(folder)):
        raise InputError(f"no such run: {name}{suggest(last, runs)}")
    if name.startswith("runs/"):
        # Such as a checkpoint that the run has not.
        if beside := [path.name for path in Path(folder).glob("*") if path.is_dir()]:
            kind = "run" if folder == "runs" else "model"
            raise InputError(f"no such {kind}: {name}{suggest(last, beside)}")
        raise InputError(
            f"no such run: {name}; go to the folder in which it was trained, or write its whole path"
        )


def runs_in(folder: str) -> list[str]:
    """The names of the runs in a folder."""
    return sorted(file.parent.name for file in Path(folder).glob("*/metrics.jsonl"))


def check_hub(name: str) -> None:
    """Raises `InputError` for a name that is no path here, no id in the hub's cache, and cannot be asked for.

    The hub's libraries would try for a minute.
    """
    if Path(name).expanduser().exists():
        return
    check_run(name)
    is_path = name.startswith(("/", ".", "~")) or name.count("/") > 1
    if not is_path and not in_hub_cache(name) and (problem := hub_problem()):
        raise InputError(f"there is no folder {name}, and {problem}")


def in_hub_cache(name: str) -> bool:
    """Whether the hub's cache has files of the model or tokenizer `name`."""
    from huggingface_hub import constants

    folder = f"models--{name.replace('/', '--')}"
    return Path(constants.HF_HUB_CACHE, folder, "snapshots").is_dir()


@cache
def hub_problem() -> str:
    """Why the hub cannot be asked; "" if it answers."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, so the hub is not asked"
    try:
        get_session().head(constants.ENDPOINT, timeout=ANSWER)
    except Exception as error:  # of its transport
        return f"the hub does not answer ({first_line(error)})"
    return ""
