"""The commands to type after a command."""

import json
import math
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from nalanda.common.files import stored_recipe
from nalanda.common.progress import first_process

LOAD = "from transformers import AutoModelFor{head} as Auto; print(Auto.from_pretrained({folder}{trust}))"
"""Python that loads a model; ours and flash-linear-attention's after the import of their library."""

NEXT = {
    "train": ("nalanda report {run}", "nalanda generate {run} {prompt}", "nalanda {measure}"),
    "train an encoder": (
        "nalanda report {run}",
        "nalanda verify {run}",
        "nalanda export {run} {run}-model",
    ),
    "eval": ("nalanda perplexity {models} {text}", "nalanda generate {model} {prompt}"),
    "perplexity": ("nalanda {measure}", "nalanda generate {model} {prompt}"),
    "prepare": (
        "nalanda data inspect {set} --show 3",
        "nalanda info {recipe} data.source={set} tokenizer={set}/tokenizer {settings}",
        "nalanda train {recipe} data.source={set} tokenizer={set}/tokenizer {settings} output_dir={run}",
    ),
    "write a model": (
        "nalanda generate {folder} {prompt}",
        "nalanda {measure}",
        "python -c {load}",
    ),
    "write an encoder": ("python -c {load}",),
    "convert to gguf": ("llama-cli -m {folder} -p {prompt}",),
    "convert to mlx": ("mlx_lm.generate --model {folder} --prompt {prompt}",),
    "convert to fla": ("python -c {load}", "nalanda convert {folder} {folder}-back"),
    "convert": ("python -c {load}", "nalanda convert {folder} {folder}-back"),
    "linearize": (
        "nalanda train {recipe} model={init} tokenizer={folder} distill.teacher={model} output_dir={run}-distilled",
        "nalanda generate {folder} {prompt}",
    ),
    "save a state": ("nalanda generate {model} {prompt} --state {state}",),
}
"""Commands by what was done."""

LOADING = ("nalanda generate", "nalanda eval", "nalanda perplexity")
"""Those that load a model."""


def next_steps(done: str, of: object = None, **values: Any) -> list[str]:
    """The commands after `done`, with `values` in them, quoted for a shell. A list is several words.

    of: the folder of a run or model, whose data choose the prompt and the tasks.
    """
    done = _name_by_model(done, values)
    recipe = {} if of is None else stored_recipe(Path(str(of)))
    data = recipe.get("data") or {}
    kind = _kind_of_source(data)
    if kind == "text" and (recipe.get("validation") or {}).get("every") == 0:
        kind = "trained text"
    # A mixer or map of the user's own, which the model's folder carries.
    trust = bool(recipe.get("plugins"))

    values = {"settings": []} | values  # `settings`: keys that a recipe must set for a prepared set
    values["prompt"] = _prompt_like(data)
    values["text"] = _held_out_text(data, str(of)) if kind == "text" else []
    if models := values.get("models"):
        values["model"] = models[0]
    values["measure"] = _measuring_command(done, kind, values)
    if "folder" in values:
        values["init"] = _in_yaml(init_from=str(values["folder"]))
        values["load"] = _loading_code(done, str(values["folder"]), trust)

    commands = []
    for template in NEXT[done]:
        if "{measure}" in template and not values["measure"]:
            continue
        command = shlex.join(_fill_template(template, values))
        if trust and command.startswith(LOADING):
            command += " --trust-remote-code"
        commands.append(command)
    return commands


def choose_prompt(run: Path) -> str:
    """A prompt like the texts on which a run trains."""
    return _prompt_like(stored_recipe(run).get("data") or {})


def _prompt_like(data: dict[str, Any]) -> str:
    return "def read_lines(path):" if data.get("source") == "python" else "Once upon a time"


def _name_by_model(done: str, values: dict[str, Any]) -> str:
    """`done` as NEXT names it for the model that was written: an encoder, or one of ours that was converted."""
    folder = Path(values["run"], "final") if "run" in values else Path(values.get("folder", ""))
    file = folder / "config.json"
    if done not in ("train", "write a model", "convert") or not file.is_file():
        return done
    # The class of the model, such as NalandaForCausalLM.
    name = str((json.loads(file.read_text("utf-8")).get("architectures") or [""])[0])
    if done == "convert":
        return "write a model" if name.startswith("Nalanda") else done
    encoders = {"train": "train an encoder", "write a model": "write an encoder"}
    return encoders[done] if name.endswith("MaskedLM") else done


def _loading_code(done: str, folder: str, trust: bool) -> str:
    """Python that loads the model of `folder`."""
    library = {"convert": "", "convert to fla": "import fla; "}.get(done, "import nalanda; ")
    head = "MaskedLM" if done == "write an encoder" else "CausalLM"
    argument = ", trust_remote_code=True" if trust and done.startswith("write") else ""
    return library + LOAD.format(folder=json.dumps(folder), head=head, trust=argument)


def _in_yaml(**settings: str) -> str:
    """`{init_from: PATH}`, with quotes only around a path that needs them."""
    import yaml

    text = yaml.safe_dump(settings, default_flow_style=True, allow_unicode=True, width=math.inf)
    return text.strip()


def _fill_template(template: str, values: dict[str, Any]) -> list[str]:
    """The words of a command with `values` in them; a list stands for several words."""
    words: list[str] = []
    for word in template.split():
        value = values.get(word.strip("{}"))
        if isinstance(value, list) and word.startswith("{"):
            words += map(str, value)
        else:
            words.append(word.format(**values))
    return words


def _kind_of_source(data: dict[str, Any]) -> str:
    """The kind of the recipe's source: `python`, `text` or a token `set` on this machine, or else `remote`."""
    source = data.get("source")
    if source == "python":
        return "python"
    names = source if isinstance(source, list) else [source]
    paths = [Path(str(name)).expanduser() for name in names]
    if not source or not all(path.exists() for path in paths):
        return "remote"
    sets = [(path / "index.json").exists() or path.suffix in (".idx", ".bin") for path in paths]
    return "set" if any(sets) else "text"


def _held_out_text(data: dict[str, Any], folder: str) -> list[str]:
    """The option of `nalanda perplexity` that names the text of validation: its file, or the recipe."""
    source = data.get("validation_source")
    is_file = isinstance(source, str) and source.endswith(".txt")
    return ["--text", source if is_file else f"{folder}/config.yaml"]


def _measuring_command(done: str, kind: str, values: dict[str, Any]) -> list[str]:
    """The words after `nalanda` that measure a model on texts at hand; [] if there are none.

    The default tasks of `nalanda eval` need a network, as the data of a `remote` source do.
    """
    run, output = values.get("run"), values.get("output", values.get("run"))
    models = values.get("models", [run or values.get("folder")])
    if kind in ("python", "remote"):
        tasks = ["--tasks", "python_docs"] if kind == "python" else []
        return ["eval", *models, *tasks, *(["--output", output] if output else [])]
    if kind == "text" and done != "perplexity":
        return ["perplexity", *models, *values["text"]]
    return ["verify", run] if run else []


def print_next_steps(done: str, **values: Any) -> None:
    """Prints the next steps to stderr, on the first process of a launch.

    A script of several commands, such as the demo, sets NALANDA_NEXT_STEPS=0.
    """
    if first_process() and os.environ.get("NALANDA_NEXT_STEPS") != "0":
        for number, command in enumerate(next_steps(done, **values)):
            print("      " if number else "\nnext: ", command, sep="", file=sys.stderr, flush=True)
