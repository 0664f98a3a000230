"""What to do after a command, as commands to copy."""

import os
import shlex
import sys

LOAD = "from transformers import AutoModelForCausalLM as Auto; print(Auto.from_pretrained({folder!r}))"
"""Python that loads a model; of ours after `import nalanda`."""

NEXT = {
    "train": (
        "nalanda plot {run}",
        "nalanda generate {run}/final {prompt}",
        "nalanda eval {run}/final --output {run}",
    ),
    "train on python": (  # whose validation part needs no download
        "nalanda plot {run}",
        "nalanda generate {run}/final {prompt}",
        "nalanda perplexity {run}/final --output {run}/perplexity",
    ),
    "train an encoder": ("nalanda plot {run}", "nalanda verify {run}", "nalanda export {run} {run}-model"),
    "eval": ("nalanda perplexity {models}", "nalanda analyze {model}", "nalanda generate {model} {prompt}"),
    "perplexity": ("nalanda eval {models} --output {output}", "nalanda analyze {model}"),
    "prepare": (
        "nalanda data inspect {set} --show 3",
        "nalanda info {recipe} data.source={set} tokenizer={set}/tokenizer",
        "nalanda train {recipe} data.source={set} tokenizer={set}/tokenizer output_dir={run}",
    ),
    "fetch": (
        "nalanda info {recipe} {overrides} offline={mirror}",
        "nalanda train {recipe} {overrides} offline={mirror}",
    ),
    "write a model": ("nalanda generate {folder} {prompt}", "nalanda eval {folder}", "python -c {load}"),
    "convert to gguf": ("llama-cli -m {folder} -p {prompt}",),
    "convert to mlx": ("mlx_lm.generate --model {folder} --prompt {prompt}",),
    "convert": ("python -c {load}", "nalanda convert {folder} {folder}-back"),
    "save a state": ("nalanda generate {model} {prompt} --state {state}",),
    "study": ("nalanda study report {folder}", "nalanda study run {folder}", "nalanda study claims"),
}
"""Commands by what was done."""


def next_steps(done: str, **values: object) -> list[str]:
    """The commands after `done`, with `values` in them, quoted for a shell. A list is several words."""
    values = {"prompt": "Once upon a time", **values}
    if "folder" in values:
        values["load"] = "import nalanda; " * (done != "convert") + LOAD.format(folder=str(values["folder"]))
    words = {
        key: shlex.join(map(str, value)) if isinstance(value, list) else shlex.quote(str(value))
        for key, value in values.items()
    }
    return [" ".join(command.format(**words).split()) for command in NEXT[done]]


def print_next_steps(done: str, **values: object) -> None:
    """Prints them to stderr, on the first process of a launch."""
    if os.environ.get("RANK", "0") == "0":
        for number, command in enumerate(next_steps(done, **values)):
            print("      " if number else "\nnext: ", command, sep="", file=sys.stderr, flush=True)
