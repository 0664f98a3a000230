"""Tables of results: one row a model, for the literature's tasks below published rows."""

import csv
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from nalanda.common.progress import first_process
from nalanda.common.scores import PERPLEXITIES, SHARES, percent_factor
from nalanda.common.terminal import plain_console
from nalanda.common.text import beside_least, markdown_table, si, size
from nalanda_eval.needles import KINDS, LENGTHS, NEEDLES, short_length

# The zero-shot suite of NaLaFormer's table 4, and LAMBADA's accuracy: task, metric, column.
TABLE4 = (
    ("wikitext", "word_perplexity", "Wiki ppl"),
    ("lambada_openai", "perplexity", "LMB ppl"),
    ("lambada_openai", "acc", "LMB acc"),
    ("piqa", "acc", "PIQA"),
    ("hellaswag", "acc_norm", "Hella"),
    ("winogrande", "acc", "Wino"),
    ("arc_easy", "acc", "ARC-e"),
    ("arc_challenge", "acc_norm", "ARC-c"),
)
# Recall from the text that is read, as in Based's paper (arXiv 2402.18668) and later ones: the share of
# continuations that contain the right answer. Three of the tasks are the harness's, three in `tasks/recall`.
RECALL = (
    ("swde", "contains", "SWDE"),
    ("squad_completion", "contains", "SQuAD"),
    ("fda", "contains", "FDA"),
    ("based_triviaqa", "contains", "TriviaQA"),
    ("based_nq", "contains", "NQ"),
    ("based_drop", "contains", "DROP"),
)


@dataclass(frozen=True)
class Suite:
    """A table of tasks beside published rows."""

    tasks: tuple[tuple[str, str, str], ...]
    """Each task, its metric and its column."""
    note: str
    """What the published rows are; `{}` is their number."""
    apart: tuple[str, ...] = ()
    """Columns that the average leaves out."""


SUITES = {
    "table4": Suite(
        TABLE4,
        "The first {} rows are published: 340 M parameters, 15 B tokens of SlimPajama. By its numbers, "
        "DeltaNet is the variant without short convolutions; its own paper's row has them. LMB acc is from "
        "MALA's paper, and not in avg.",
        apart=("LMB acc",),
    ),
    "recall": Suite(
        RECALL,
        "The first {} rows of the recall tasks are published: 1.3 B parameters, 100 B tokens of FineWeb-Edu, "
        "texts cut to 2 k tokens around the answer. They are not comparable with other sizes, nor with texts "
        "that are not cut so.",
    ),
}


def read_published(name: str) -> dict[str, list[float | None]]:
    """The published rows of a suite, from its table in `published/`.

    table4.csv: NaLaFormer, table 4. The row of DeltaNet with convolutions is from DeltaNet's paper. MALA's row and all
    of LMB acc are from MALA's table 6, which has no perplexities, no ARC, and names Transformer++ Transformer.
    recall.csv: Gated DeltaNet's paper (arXiv 2412.06464), table 4.
    """
    text = Path(__file__).with_name("published").joinpath(f"{name}.csv").read_text(encoding="utf-8")
    _, *rows = csv.reader(text.splitlines())
    return {
        model: [float(figure) if figure else None for figure in figures] for model, *figures in rows
    }


def suite(
    results: dict[str, Any], name: str = "table4"
) -> tuple[list[str], list[list[str]], list[list[str]]] | None:
    """One of `SUITES` as text: header, published rows and two rows a model; None if none of its tasks ran.

    A model's second row has the size of its state, if that is known, and the standard errors. Shares are in
    percent. A dash marks what was not measured; `avg` is the mean of the shares but those apart, a dash if one
    is missing.
    """
    table = SUITES[name]
    asked_for = set(results["left_out"]).union(*(model["tasks"] for model in results["models"]))
    if not _task_names(table) & asked_for:
        return None

    header = ["model", *(title for _, _, title in table.tasks), "avg"]
    published = [_suite_row(table, *row) for row in read_published(name).items()]
    ours = []
    titles = zip(model_titles(results["models"]), _state_sizes(results), strict=True)
    for (name, state), model in zip(titles, results["models"], strict=True):
        # Without a name a row has standard errors.
        for kind, title in {"metrics": name, "stderr": ""}.items():
            figures = [_read_figure(model, task, metric, kind) for task, metric, _ in table.tasks]
            ours.append(_suite_row(table, title, figures))
        ours[-1][0] = state
    return header, published, ours


def needle_table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]] | None:
    """Accuracies on needles in percent: header, and one row a model and kind, by length; None without any."""
    lengths = [*map(short_length, LENGTHS)]
    rows = []
    for name, model in zip(model_titles(results["models"]), results["models"], strict=True):
        for kind in KINDS:
            tasks = [f"{kind}_{length}" for length in lengths]
            if model["tasks"].keys() & set(tasks):
                cells = [_format_cell("acc", _read_figure(model, task, "acc")) for task in tasks]
                rows.append([name, kind.removeprefix("niah_").replace("_", " "), *cells])
    return (["model", "needle", *lengths], rows) if rows else None


def others(results: dict[str, Any]) -> tuple[list[str], list[list[str]]] | None:
    """All other tasks: header, and one row a metric with its standard error; None if there are none."""
    in_tables = set(NEEDLES).union(*map(_task_names, SUITES.values()))
    metrics: dict[tuple[str, str], None] = {}  # a dict keeps the order of tasks and metrics
    for model in results["models"]:
        for task, scores in model["tasks"].items():
            if task not in in_tables:
                # A later model adds only what earlier ones lack.
                metrics |= dict.fromkeys((task, metric) for metric in scores["metrics"])
    if not metrics:
        return None

    rows = []
    for task, metric in metrics:
        row = [task, metric.replace("_", " ")]
        for model in results["models"]:
            cell = _format_cell(metric, _read_figure(model, task, metric))
            error = _read_figure(model, task, metric, "stderr")
            row.append(cell if error is None else f"{cell} ± {_format_cell(metric, error)}")
        rows.append(row)
    return ["task", "metric", *model_titles(results["models"])], rows


def notes(results: dict[str, Any]) -> list[str]:
    """Notes on the tables: sources of the rows, tasks left out, a limit, each model's cost."""
    lines = [
        table.note.format(len(read_published(name)))
        for name, table in SUITES.items()
        if suite(results, name)
    ]
    lines.append("±: standard errors.")
    if any(_state_sizes(results)):
        lines.append(
            "Under a name: the state of a sequence of 2,048 tokens. ×: over 2 % larger than the table's smallest, "
            "so a gain may be the state's."
        )
    lines += [f"{task} is left out: {reason}." for task, reason in results["left_out"].items()]
    if results["limit"] is not None:
        lines.append(
            f"Only {results['limit']:g} of each task's documents: not comparable with other tables."
        )
    lines += _prompt_notes(results)
    for name, model in zip(model_titles(results["models"]), results["models"], strict=True):
        bits = []
        for task, text in (("wikitext", "wikitext"), ("lambada_openai", "LAMBADA's last words")):
            # These have no column in the tables.
            value = _read_figure(model, task, "bits_per_byte")
            if value is not None:
                bits.append(f"{value:.3f} of {text}")
        if bits:
            lines.append(f"{name}: bits a byte {', '.join(bits)}.")
    for model in results["models"]:
        lines += _cost_notes(model)
    return lines


def _prompt_notes(results: dict[str, Any]) -> list[str]:
    """A note on prompts that are not the zero-shot ones of published rows."""
    shots = results.get("num_fewshot")
    parts = [f"{shots} examples"] if shots else []
    parts += ["the chat template"] if results.get("apply_chat_template") else []
    parts += ["a system instruction"] if results.get("system_instruction") else []
    lines = []
    if parts:
        lines.append(f"Prompts have {', '.join(parts)}; the published rows have none of these.")
    if shots:
        fixed_counts = {
            task: scores["num_fewshot"]
            for model in results["models"]
            for task, scores in model["tasks"].items()
            if scores.get("num_fewshot") not in (None, shots)
        }
        lines += [
            f"{task} has {count} examples, as its file says."
            for task, count in fixed_counts.items()
        ]
    return lines


def _cost_notes(model: dict[str, Any]) -> list[str]:
    """Notes on a model: prompts that were cut, its size, precision, windows and time."""
    lines = []
    name, length = model["name"], model["max_length"]
    if cut := model.get("prompts_cut"):
        lines.append(
            f"{name}: {cut} of {model['prompts']} prompts were cut on the left, to fit "
            f"{length} tokens with their answers."
        )
    reading = f"windows of {length} tokens" if length else "texts read whole"
    cached = f" ({model['found']} of them kept from before)" if model["found"] else ""
    lines.append(
        f"{name}: {si(model['parameters'])} parameters, {model['dtype']}, {reading}, "
        f"{model['log_likelihoods']} log-likelihoods{cached} in {model['seconds']:.0f} s."
    )
    return lines


def result_rows(results: dict[str, Any]) -> list[list[Any]]:
    """A header, and one row a model, task and metric, without rounding."""
    # Keys by column: the model and the task both have a fingerprint.
    of_model = {
        "model_fingerprint": "fingerprint",
        "parameters": "parameters",
        "dtype": "dtype",
        "max_length": "max_length",
        "begins_with_bos": "begins_with_bos",
    }
    of_task = {
        "documents": "documents",
        "task_fingerprint": "fingerprint",
        "task_version": "version",
    }
    rows: list[list[Any]] = [["model", "task", "metric", "value", "stderr", *of_model, *of_task]]
    for model in results["models"]:
        for task, scores in model["tasks"].items():
            for metric, value in scores["metrics"].items():
                row = [model["name"], task, metric, value, scores["stderr"].get(metric)]
                row += [model[key] for key in of_model.values()]
                row += [scores[key] for key in of_task.values()]
                rows.append(row)
    return rows


def results_markdown(results: dict[str, Any]) -> str:
    """The tables in Markdown."""
    blocks = []
    for header, published, ours in filter(None, (suite(results, name) for name in SUITES)):
        bold = [[f"**{row[0]}**", *row[1:]] if i % 2 == 0 else row for i, row in enumerate(ours)]
        blocks.append(markdown_table(header, [*published, *bold], left=1))
    blocks += [
        markdown_table(*table, left=2)
        for table in (needle_table(results), others(results))
        if table
    ]
    return "\n\n".join([*blocks, *notes(results)]) + "\n"


def print_results(results: dict[str, Any]) -> None:
    """Print the tables, on the first process of a launch."""
    if not first_process():
        return
    console = plain_console()
    for header, published, ours in filter(None, (suite(results, name) for name in SUITES)):
        table = _make_table([title.replace(" ", "\n") for title in header], left=1)
        for row in published:
            table.add_row(*row, style="dim", end_section=row is published[-1])
        for i, row in enumerate(ours):
            table.add_row(*row, style="dim" if i % 2 else None)
        console.print(table)
        console.print()
    for header, rows in filter(None, (needle_table(results), others(results))):
        table = _make_table(header, left=2)
        for row in rows:
            table.add_row(*row)
        console.print(table)
        console.print()
    for note in notes(results):
        console.print(note, style="dim")


def model_titles(models: list[dict[str, Any]]) -> list[str]:
    """The models' names; of long paths only as many last parts as distinguish them, at least two."""
    paths = [Path(model["name"]).parts for model in models]
    for count in range(2, max(map(len, paths))):
        if len({path[-count:] for path in paths}) == len(set(paths)):
            return [str(Path(*path[-count:])) for path in paths]
    return [model["name"] for model in models]


def _state_sizes(results: dict[str, Any]) -> list[str]:
    """The size of each model's state, and how many times the smallest it is; "" if it is not known."""
    sizes = [model.get("state_bytes") for model in results["models"]]
    return [f"{size(x)}{beside_least(x, sizes)}" if x else "" for x in sizes]


def _make_table(header: list[str], left: int) -> Table:
    # Little padding, so that the suite fits into 80 columns.
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
    for i, title in enumerate(header):
        table.add_column(title, justify="left" if i < left else "right", overflow="fold")
    return table


def _task_names(table: Suite) -> set[str]:
    return {task for task, _, _ in table.tasks}


def _suite_row(table: Suite, name: str, figures: list[float | None]) -> list[str]:
    """A row of a model's figures, or without a name of their standard errors."""
    metrics = [metric for _, metric, _ in table.tasks]
    shares = [
        value
        for (_, metric, title), value in zip(table.tasks, figures, strict=True)
        if metric.startswith(SHARES) and title not in table.apart
    ]
    measured = [value for value in shares if value is not None]
    average = None
    if len(measured) == len(shares):
        # Errors of independent tasks add in squares.
        total = sum(measured) if name else math.hypot(*measured)
        average = total / len(shares)
    cells = zip([*metrics, "acc"], [*figures, average], strict=True)
    if name:
        return [name, *(_format_cell(metric, value) for metric, value in cells)]
    return [
        "",
        *("" if error is None else f"±{_format_cell(metric, error)}" for metric, error in cells),
    ]


def _read_figure(
    model: dict[str, Any], task: str, metric: str, kind: str = "metrics"
) -> float | None:
    """A metric of a task, or its standard error (kind `stderr`); shares in percent."""
    scores = model["tasks"].get(task, {"metrics": {}, kind: {}})
    figure = scores[kind].get(metric)
    score = scores["metrics"].get(metric)
    if figure is None or score is None:
        return figure
    return percent_factor(task, metric, score) * figure


def _format_cell(metric: str, value: float | None) -> str:
    if value is None:
        return "—"
    if not math.isfinite(value) or abs(value) >= 1e5:
        return f"{value:.1e}".replace("e+0", "e").replace("e+", "e")
    if metric in PERPLEXITIES:
        return f"{value:.2f}"
    return f"{value:.1f}" if metric.startswith(SHARES) else f"{value:.4g}"
