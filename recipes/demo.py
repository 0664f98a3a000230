"""`make demo`: trains a small language model on the text that ships with Python, in minutes.

It runs the commands of a large run one after another, and compares the model's validation perplexity with two
baselines. It ends with a generated text and the commands to type next. Started again, it resumes. Arguments are
settings of the recipe:

    python recipes/demo.py train.steps=100 output_dir=runs/mine
"""

import itertools
import json
import math
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table

import nalanda_cli
from nalanda_typer import loading_torch, set_environment

RECIPES = Path(__file__).parent
PROMPT = 'def read_lines(path):\n    """Return'
console = Console(highlight=False)


def main(overrides: list[str]) -> None:
    set_environment()  # before torch, which reads it
    with loading_torch():
        from nalanda_eval.python_tasks import write_python_tasks

        from nalanda.common.errors import InputError, one_line_errors
        from nalanda.config.load import load_config
        from nalanda.train.run_dir import refuse_other_files, refuse_other_recipe

    recipe = os.path.relpath(RECIPES / "demo.yaml")
    with one_line_errors():
        config = load_config(recipe, overrides)
        run_dir = Path(config.output_dir)
        try:
            refuse_other_files(run_dir)
            refuse_other_recipe(run_dir, config)
        except InputError as error:
            # `make demo` takes no settings.
            command = "python recipes/demo.py output_dir=runs/mine"
            raise InputError(f"{error}, such as {command}") from None
        console.rule("train")
        run("train", recipe, *overrides)

        console.rule("evaluate")
        write_python_tasks(run_dir / "eval", config.data)
        tasks = ("--tasks", "python_docs", "--data", str(run_dir / "eval"))
        run("eval", str(run_dir / "final"), *tasks, "--output", str(run_dir / "eval"))

        console.rule("compare")
        with console.status("counting bigrams, zeroing the token mixers …"):
            panel = compare(run_dir)
        console.print(panel)

        # Behind the panel, so that the last screen shows text that the model wrote.
        console.rule("generate")
        options = ("--max-new-tokens", "120", "--seed", "0")
        run("generate", str(run_dir / "final"), PROMPT, *options)

        console.rule("type next")
        for command in next_commands(run_dir):
            console.print(command, markup=False, soft_wrap=True)


def run(*arguments: str) -> None:
    """Shows a command of `nalanda` and runs it. If it fails, the demo exits with its code.

    It runs in this process: to start one and import torch takes longer than to generate a text.
    """
    words = ["nalanda", *map(quote, arguments)]
    console.print(f"$ {' '.join(words)}", style="bold", markup=False, soft_wrap=True)
    os.environ["NALANDA_NEXT_STEPS"] = "0"  # the demo's own come at its end
    sys.argv = ["nalanda", *arguments]  # which run.json and messages name
    nalanda_cli.main()


def quote(argument: str) -> str:
    """The argument as it is typed in a shell; line ends as `\\n` in $'…', which bash and zsh read."""
    if argument.isprintable():
        return shlex.quote(argument)
    escaped = argument.replace("\\", r"\\").replace("'", r"\'")
    return "$'" + escaped.replace("\n", r"\n").replace("\t", r"\t") + "'"


def next_commands(run_dir: Path) -> list[str]:
    """The commands to type after the demo; the first activates its environment, unless it is active."""
    commands = []
    in_environment = sys.prefix != sys.base_prefix
    if in_environment and os.environ.get("VIRTUAL_ENV") != sys.prefix:
        activate = os.path.relpath(Path(sys.prefix, "bin", "activate"))
        commands.append(f". {shlex.quote(activate)}")

    folder = shlex.quote(str(run_dir))
    commands.append(f'nalanda generate {folder} "def main("')
    commands.append(f"nalanda report {folder}")
    return commands


def compare(run_dir: Path) -> Panel:
    """The validation perplexity of a run, of bigrams of its training tokens, and of the run without mixers.

    All are on the same rows; without mixers means with their outputs zeroed. Beside them stand bits a byte,
    unless the tokenizer loses bytes.
    """
    from nalanda_eval.baselines import Bigram, measure_perplexity, zeroed_mixers

    from nalanda.config.load import load_config
    from nalanda.data.text_bytes import text_bytes
    from nalanda.inference.load import load_model
    from nalanda.train.build import open_batches
    from nalanda.train.log import last_metrics

    config = load_config(run_dir / "config.yaml")
    model, tokenizer = load_model(str(run_dir / "final"))
    batches, validation = open_batches(config, tokenizer)
    seen = itertools.islice(batches, config.train.steps * config.accumulation(processes=1))
    rows = list(itertools.chain(*validation.values()))
    tokens = config.train.steps * config.train.tokens_per_step
    # Training has measured it at its end, on the same rows.
    own_perplexity = next(
        x["val_ppl"] for x in last_metrics(run_dir / "metrics.jsonl") if "val_ppl" in x
    )
    bigrams = Bigram(seen, len(tokenizer)).perplexity(rows)
    with zeroed_mixers(model):
        zeroed = measure_perplexity(model, rows)

    tokens_per_byte = _tokens_per_byte(rows, text_bytes(tokenizer))
    _write_baselines(run_dir, {"bigrams": bigrams, "mixers zeroed": zeroed}, tokens_per_byte)
    figures = {
        f"the model, {model.num_parameters() / 1e6:.1f} M parameters": own_perplexity,
        f"bigrams of the {tokens:,} tokens it saw": bigrams,
        "the model, token mixers zeroed": zeroed,
    }
    return summary(run_dir, figures, tokens_per_byte)


def _write_baselines(
    run_dir: Path, perplexities: dict[str, float], tokens_per_byte: float | None
) -> None:
    """Writes the baselines to baselines.json, for the run's page; figures as in metrics.jsonl."""
    from nalanda.common.files import write_atomically

    baselines = {}
    for name, perplexity in perplexities.items():
        baselines[name] = {"val_ppl": perplexity, "val_loss": math.log(perplexity)}
        if tokens_per_byte:
            baselines[name]["val_bpb"] = math.log2(perplexity) * tokens_per_byte
    write_atomically(run_dir / "baselines.json", json.dumps(baselines, indent=1) + "\n")


def _tokens_per_byte(rows: list[dict], sizes: Any) -> float | None:
    """Predicted tokens per byte of the text behind them; None if the tokenizer loses bytes."""
    from nalanda.train.loss import count_bytes, count_labels

    if not sizes:
        return None
    return sum(map(count_labels, rows)) / sum(count_bytes(row, sizes) for row in rows)


def summary(run_dir: Path, figures: dict[str, float], tokens_per_byte: float | None) -> Panel:
    """The panel with the perplexities, and with the paths of the run."""
    from nalanda.report.plot import plot

    plain: Any = {"box": None, "header_style": "", "padding": (0, 2, 0, 0)}
    perplexities = Table("[bold]on the validation rows", **plain)
    perplexities.add_column("perplexity", justify="right")
    if tokens_per_byte:
        perplexities.add_column("bits a byte", justify="right")
    for name, value in figures.items():
        cells = [f"  {name}", f"{value:,.1f}"]
        if tokens_per_byte:
            cells.append(f"{math.log2(value) * tokens_per_byte:.3f}")
        perplexities.add_row(*cells)

    paths = Table("[bold]where it is", "", **plain)
    paths.add_row("  model", str(run_dir / "final"))
    paths.add_row("  loss curve", str(plot([run_dir], run_dir / "loss.png")))
    paths.add_row("  metrics", str(run_dir / "metrics.jsonl"))
    paths.add_row("  scores", str(run_dir / "eval" / "results.md"))
    # Two figures have one name, and are of different texts.
    texts = (
        "These bits a byte are of whole documents. Those of\n"
        "python_docs_perplexity, above, are of the first lines of each."
    )
    content = Group(perplexities, "", texts, "", paths)
    return Panel(content, title="NaLa + Gated DeltaNet, pretrained", expand=False, padding=(1, 2))


if __name__ == "__main__":
    main(sys.argv[1:])
