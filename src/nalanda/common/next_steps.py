"""What to do after a command, as commands to copy."""

import json
import os
import re
import shlex
import sys
from pathlib import Path

from nalanda.common.progress import first_process

LOAD = "from transformers import AutoModelFor{head} as Auto; print(Auto.from_pretrained({folder}{trust}))"
"""Python that loads a model; ours and flash-linear-attention's after the import of their library."""

NEXT = {
    "train": ("nalanda plot {run}", "nalanda generate {run} {prompt}", "nalanda {measure}"),
    "train an encoder": (
        "nalanda plot {run}",
        "nalanda verify {run}",
        "nalanda export {run} {run}-model",
    ),
    "eval": ("nalanda perplexity {models}", "nalanda generate {model} {prompt}"),
    "perplexity": ("nalanda eval {models} {tasks} --output {output}",),
    "prepare": (
        "nalanda data inspect {set} --show 3",
        "nalanda info {recipe} data.source={set} tokenizer={set}/tokenizer {settings}",
        "nalanda train {recipe} data.source={set} tokenizer={set}/tokenizer {settings} output_dir={run}",
    ),
    "write a model": (
        "nalanda generate {folder} {prompt}",
        "nalanda eval {folder} {tasks}",
        "python -c {load}",
    ),
    "write an encoder": ("python -c {load}",),
    "convert to gguf": ("llama-cli -m {folder} -p {prompt}",),
    "convert to mlx": ("mlx_lm.generate --model {folder} --prompt {prompt}",),
    "convert to fla": ("python -c {load}", "nalanda convert {folder} {folder}-back"),
    "convert": ("python -c {load}", "nalanda convert {folder} {folder}-back"),
    "save a state": ("nalanda generate {model} {prompt} --state {state}",),
}
"""Commands by what was done."""

LOADING = ("nalanda generate", "nalanda eval", "nalanda perplexity")
"""Those that load a model."""


def next_steps(done: str, of: object = None, **values: object) -> list[str]:
    """The commands after `done`, with `values` in them, quoted for a shell. A list is several words.

    of: the folder of a run or model, whose data choose the prompt and the tasks.
    """
    recipe = Path(str(of)) / "config.yaml"
    text = recipe.read_text("utf-8", "replace") if of is not None and recipe.is_file() else ""
    python = re.search("^  source: python$", text, re.MULTILINE) is not None
    # A mixer or map of the user's own, which the model's folder carries.
    trust = re.search("^plugins:$", text, re.MULTILINE) is not None
    tasks = ["--tasks", "python_docs"] if python else []  # those of the default need a network
    values = {"settings": []} | values  # what a recipe must set for a prepared set
    values |= {"prompt": "def read_lines(path):" if python else "Once upon a time", "tasks": tasks}
    if "run" in values:
        values["measure"] = ["perplexity", values["run"], "--text", f"{values['run']}/config.yaml"]
        if python or not _is_text(text):
            values["measure"] = ["eval", values["run"], *tasks, "--output", values["run"]]
    if "folder" in values:
        library = {"convert": "", "convert to fla": "import fla; "}.get(done, "import nalanda; ")
        head = "MaskedLM" if done == "write an encoder" else "CausalLM"
        folder = json.dumps(str(values["folder"]))
        allowed = ", trust_remote_code=True" * (trust and done.startswith("write"))
        values["load"] = library + LOAD.format(folder=folder, head=head, trust=allowed)
    several = {
        f"{{{key}}}": [*map(str, value)] for key, value in values.items() if isinstance(value, list)
    }
    commands = [
        shlex.join(
            word for part in command.split() for word in several.get(part, [part.format(**values)])
        )
        for command in NEXT[done]
    ]
    return [c + " --trust-remote-code" * (trust and c.startswith(LOADING)) for c in commands]


def _is_text(recipe: str) -> bool:
    """Whether the recipe's source is text on this machine, of which `nalanda perplexity` reads the held-out
    part: the default tasks of `nalanda eval` need a network."""
    found = re.search("^  source: (.+)$", recipe, re.MULTILINE)
    source = Path(found[1].strip("'\"")) if found else Path()
    return found is not None and source.exists() and not (source / "index.json").exists()


def print_next_steps(done: str, **values: object) -> None:
    """Prints them to stderr, on the first process of a launch. A script of several commands, such as the
    demo, sets NALANDA_NEXT_STEPS=0."""
    if first_process() and os.environ.get("NALANDA_NEXT_STEPS") != "0":
        for number, command in enumerate(next_steps(done, **values)):
            print("      " if number else "\nnext: ", command, sep="", file=sys.stderr, flush=True)
