"""What to do after a command, as commands to copy."""

import json
import os
import re
import shlex
import sys
from pathlib import Path

LOAD = "from transformers import AutoModelFor{head} as Auto; print(Auto.from_pretrained({folder}))"
"""Python that loads a model; ours and flash-linear-attention's after the import of their library."""

NEXT = {
    "train": (
        "nalanda plot {run}",
        "nalanda generate {run}/final {prompt}",
        "nalanda eval {run}/final {tasks} --output {run}",
    ),
    "train an encoder": ("nalanda plot {run}", "nalanda verify {run}", "nalanda export {run} {run}-model"),
    "eval": ("nalanda perplexity {models}", "nalanda analyze {model}", "nalanda generate {model} {prompt}"),
    "perplexity": ("nalanda eval {models} {tasks} --output {output}", "nalanda analyze {model}"),
    "prepare": (
        "nalanda data inspect {set} --show 3",
        "nalanda info {recipe} data.source={set} tokenizer={set}/tokenizer",
        "nalanda train {recipe} data.source={set} tokenizer={set}/tokenizer output_dir={run}",
    ),
    "fetch": (
        "nalanda info {recipe} {overrides} offline={mirror}",
        "nalanda train {recipe} {overrides} offline={mirror}",
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
    "study": ("nalanda study report {folder}", "nalanda study run {folder}", "nalanda study claims"),
}
"""Commands by what was done."""


def next_steps(done: str, of: object = None, **values: object) -> list[str]:
    """The commands after `done`, with `values` in them, quoted for a shell. A list is several words.

    of: the folder of a run or model, whose data choose the prompt and the tasks.
    """
    python = of is not None and _of_python(Path(str(of)))
    values |= {
        "prompt": "def read_lines(path):" if python else "Once upon a time",
        "tasks": ["--tasks", "python_docs"] if python else [],  # those of the default need a network
    }
    if "folder" in values:
        library = {"convert": "", "convert to fla": "import fla; "}.get(done, "import nalanda; ")
        head = "MaskedLM" if done == "write an encoder" else "CausalLM"
        values["load"] = library + LOAD.format(folder=json.dumps(str(values["folder"])), head=head)
    several = {f"{{{key}}}": [*map(str, value)] for key, value in values.items() if isinstance(value, list)}
    return [
        shlex.join(word for part in command.split() for word in several.get(part, [part.format(**values)]))
        for command in NEXT[done]
    ]


def _of_python(folder: Path) -> bool:
    """Whether a run or model was trained on the text that comes with Python."""
    recipe = folder / "config.yaml"
    if not recipe.is_file():
        return False
    return re.search("^  source: python$", recipe.read_text("utf-8", "replace"), re.MULTILINE) is not None


def print_next_steps(done: str, **values: object) -> None:
    """Prints them to stderr, on the first process of a launch."""
    if os.environ.get("RANK", "0") == "0":
        for number, command in enumerate(next_steps(done, **values)):
            print("      " if number else "\nnext: ", command, sep="", file=sys.stderr, flush=True)
