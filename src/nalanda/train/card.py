"""The model card of an exported checkpoint, README.md."""

import contextlib
import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from nalanda.common.files import stored_recipe, write_atomically
from nalanda.common.scores import Score
from nalanda.common.text import duration
from nalanda.common.versions import list_versions
from nalanda.train.log import describe_perplexity, with_hours

SHAPE_KEYS = (
    "model_type",
    "mixer",
    "feature_map",
    "hidden_size",
    "num_hidden_layers",
    "num_heads",
    "vocab_size",
)
"""Fields of a model's config that its card shows."""


SCORES = "<!-- `nalanda eval` writes the scores between these two lines. -->"
END = "<!-- end of the scores -->"


def model_card(
    run_dir: Path,
    path: Path,
    facts: dict[str, Any],
    title: str,
    scores: Sequence[Score],
    source: str,
    average: str | None,
) -> str:
    """Returns the model card of the checkpoint `path`, or of an average in it.

    It has sizes, training data, losses and scores, and says how to train the model again and how to
    load it from `source`. facts: of run.json. average: `ema.name_of` it.
    """
    recipe = stored_recipe(run_dir)
    shape = json.loads((path / "config.json").read_text())
    ours = shape.get("model_type") == "nalanda"
    masked = ours and not shape.get("is_decoder", True)

    state = json.loads((path / "trainer.json").read_text())
    rows = [
        *size_rows(shape, facts),
        *training_rows(recipe, state, facts, run_dir, average),
        ("written with", list_versions([facts.get("versions", {})])),
    ]
    sections = [
        front_matter(title, masked, scores),
        f"# {title}",
        introduction(masked, has_recipe=bool(recipe)),
        figures_table(rows),
        scores_table(scores),
        usage(source, masked, ours, has_tokenizer=(run_dir / "tokenizer").is_dir()),
        limits(masked),
    ]
    return "\n\n".join(filter(None, sections)) + "\n"


def update_card(folder: Path, scores: Sequence[Score]) -> bool:
    """Puts scores into the card of the model in `folder`, in the place of those there. Returns whether it has changed.

    Nothing else in the card changes. A README.md without the place for scores is the user's own, and stays.
    """
    file = folder / "README.md"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    pattern = re.compile(f"{re.escape(SCORES)}.*?{re.escape(END)}", re.DOTALL)
    if not pattern.search(text):
        return False
    changed = pattern.sub(lambda _: scores_table(scores), text, count=1)

    # The hub reads the same scores in the metadata.
    head = re.match(r"---\n(.*?\n)---\n", changed, re.DOTALL)
    index = head and re.search(r"^model-index:\n(?:[ -].*\n)*", head[1], re.MULTILINE)
    if head and index:
        with contextlib.suppress(yaml.YAMLError, LookupError, TypeError):  # edited by hand
            title = yaml.safe_load(index[0])["model-index"][0]["name"]
            begin = head.start(1) + index.start()
            end = begin + len(index[0])
            changed = changed[:begin] + model_index(title, scores) + changed[end:]

    if changed == text:
        return False
    write_atomically(file, changed)
    return True


def front_matter(title: str, masked: bool, scores: Sequence[Score]) -> str:
    """The card's metadata, which the hub reads."""
    task = "fill-mask" if masked else "text-generation"
    about = f"library_name: transformers\npipeline_tag: {task}\n"
    return f"---\n{about}{model_index(title, scores)}---"


def model_index(title: str, scores: Sequence[Score]) -> str:
    """The scores as the hub's metadata, which have no place for standard errors."""
    from huggingface_hub import EvalResult, ModelCardData

    results = [
        EvalResult("text-generation", score.task, score.task, score.metric, score.value)
        for score in scores
    ]
    return f"{ModelCardData(model_name=title, eval_results=results).to_yaml()}\n"


def introduction(masked: bool, has_recipe: bool) -> str:
    """Says what the model is, and how to train it again."""
    kind = "masked" if masked else "causal"
    text = f"A {kind} language model, pretrained with Nalanda."
    if has_recipe:
        text += " Its recipe is `config.yaml`; `nalanda train config.yaml\noutput_dir=RUN` trains it again."
    return text


def size_rows(shape: dict[str, Any], facts: dict[str, Any]) -> list[tuple[str, Any]]:
    """Rows of the table about the model. shape: its config."""
    parameters = f"{facts['parameters']:,}" if "parameters" in facts else None
    return [
        ("parameters", parameters),
        *((key.replace("_", " "), shape.get(key)) for key in SHAPE_KEYS),
    ]


def training_rows(
    recipe: dict[str, Any],
    state: dict[str, Any],
    facts: dict[str, Any],
    run_dir: Path,
    average: str | None,
) -> list[tuple[str, Any]]:
    """Rows of the table about the training. state: the checkpoint's trainer.json. average: of `model_card`."""
    data, train = data_of_stages(recipe, facts["step"]), recipe.get("train", {})
    context = over_stages([each["seq_len"] for each in data if each.get("seq_len")])
    tokens = f"{state['tokens']:,} in {facts['step']:,} steps" if "tokens" in state else None

    # The hours of training, up to the exported step.
    timed = list(with_hours(run_dir))
    lines = [line for line, _ in timed]
    hours = max((hours for line, hours in timed if line["step"] <= facts["step"]), default=0.0)
    device = None
    if hours:
        machine = f"{facts.get('device')}, {facts.get('processes')} process(es)"
        device = f"{machine}, {duration(3600 * hours)} of steps"

    # Training measures the weights alone, not their averages.
    decay = average and average.removeprefix("ema-")
    of_weights = " of the weights before averaging" if average else ""

    return [
        ("weights", average and f"moving average of the run's weights, decay {decay}"),
        ("data", over_stages(map(describe_corpus, data))),
        ("context", context and f"{context} tokens"),
        ("tokens seen", tokens),
        ("precision", facts.get("precision", train.get("precision"))),
        ("trained on", device),
        (f"training loss{of_weights}", describe_training_loss(lines, facts["step"])),
        (f"validation loss{of_weights}", describe_validation_loss(lines, facts["step"])),
    ]


def data_of_stages(recipe: dict[str, Any], step: int) -> list[dict[str, Any]]:
    """The `data` of each stage that had begun by `step`, the recipe's own first."""
    data = [recipe.get("data", {})]
    for stage in (recipe.get("stages") or {}).values():
        if stage["after_step"] < step:
            changes = stage.get("data", {})
            # A source replaces a mixture, and a mixture a source.
            other = {"source": "", "mixture": []} if changes.keys() & {"source", "mixture"} else {}
            data.append(data[-1] | other | changes)
    return data


def describe_corpus(data: dict[str, Any]) -> str:
    """The source of `data`, or those of its mixture."""
    parts = (str(component.get("source")) for component in data.get("mixture") or [])
    corpus = data.get("source") or ", ".join(parts)
    return "the text that comes with Python" if corpus == "python" else corpus


def over_stages(values: Iterable[Any]) -> str:
    """`32, then 64`: values of stages, with equal neighbours once."""
    return ", then ".join(str(value) for value, _ in groupby(values))


def last_line(lines: list[dict], key: str, step: int) -> dict | None:
    """The last line of metrics with `key`, up to `step`."""
    for line in reversed(lines):
        if key in line and line["step"] <= step:
            return line
    return None


def describe_training_loss(lines: list[dict], step: int) -> str | None:
    """The last loss up to `step`, or None without one."""
    line = last_line(lines, "loss", step)
    return f"{line['loss']:.4f} at step {line['step']}" if line else None


def describe_validation_loss(lines: list[dict], step: int) -> str | None:
    """The last validation up to `step`, or None without one."""
    line = last_line(lines, "val_loss", step)
    if line is None:
        return None
    loss = line["val_loss"]
    text = f"{loss:.4f}, {describe_perplexity(line)}, at step {line['step']}"
    return text if math.isfinite(loss) else f"{text}: NOT FINITE, this model is of no use"


def figures_table(rows: list[tuple[str, Any]]) -> str:
    """The table of the model's figures, without rows that have no value."""
    lines = [f"| {key} | {_cell(value)} |" for key, value in rows if value not in (None, "", [])]
    return "\n".join(["| | |", "|---|---|", *lines])


def scores_table(scores: Sequence[Score]) -> str:
    """The table of zero-shot scores, between the lines that mark its place."""
    lines = [SCORES]
    if scores:
        lines += ["", "| zero-shot | | | standard error | texts |", "|---|---|---:|---:|---|"]
    for task, metric, value, error, texts in scores:
        shown_error = "" if error is None else f"{error:.4f}"
        lines.append(f"| {task} | {metric} | {value:.4f} | {shown_error} | {texts} |")
    return "\n".join([*lines, *[""] * bool(scores), END])


def usage(source: str, masked: bool, ours: bool, has_tokenizer: bool) -> str:
    """Python code that loads the model and its tokenizer from `source`."""
    loader = f"AutoModelFor{'MaskedLM' if masked else 'CausalLM'}"
    names = f"{loader}, AutoTokenizer" if has_tokenizer else loader
    trust = ", trust_remote_code=True" if ours else ""
    lines = [
        "```python",
        f"from transformers import {names}",
        "",
        f'model = {loader}.from_pretrained("{source}"{trust})',
    ]
    if has_tokenizer:
        lines.append(
            f'tokenizer = AutoTokenizer.from_pretrained("{source}", trust_remote_code=True)'
        )
    return "\n".join([*lines, "```"])


def limits(masked: bool) -> str:
    """Says what the model was not trained for."""
    purpose = "fill in masked tokens" if masked else "continue text"
    return (
        f"It was only trained to {purpose}: it follows no instructions, and repeats the errors and "
        "prejudices of its\ncorpus."
    )


def _cell(value: Any) -> str:
    """A value as a cell of a Markdown table."""
    if isinstance(value, list):  # one mixer per layer
        names = list(map(str, value))
        return ", ".join(f"{name} × {names.count(name)}" for name in dict.fromkeys(names))
    return str(value).replace("|", "\\|").replace(os.linesep, " ")
