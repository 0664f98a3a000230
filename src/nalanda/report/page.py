"""Writes a page about runs, one HTML file: figures, curves, a sample, events, settings and versions."""

import json
import math
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from nalanda.common.errors import InputError, output_file
from nalanda.common.files import read_object, write_atomically
from nalanda.common.next_steps import choose_prompt
from nalanda.common.scores import headlines
from nalanda.common.text import duration, redact, si
from nalanda.config.load import find_recipe, parse_yaml, read_sections, section
from nalanda.config.schema import RunConfig
from nalanda.report.page_run import PageRun, flatten, last_value, read_page_run
from nalanda.report.panels import EVENTS, draw_panels
from nalanda.report.plot import TEXTS, count_seeds
from nalanda.report.runs import RunSummary, read_run
from nalanda.train.card import usage
from nalanda.train.log import FORKED

FOLLOW = 30
"""Seconds between two versions of a page that follows a run, and between two looks of the browser."""

WORDS = {
    "changes": "settings changed on the way",
    "context_parallel": "processes that share a row",
    "device": "kind of device",
    "documents_kept_apart": "packed documents kept apart",
    "flops": "how FLOPs are counted",
    "parallel": "sharing of the model",
    "parameters_without_embeddings": "parameters without embeddings",
    "peak": "source of the peak",
    "peak_flops": "peak, FLOPs a second",
    "products": "matrix products on a CPU",
    "training_flops_per_token": "training FLOPs a token",
}
"""Names of facts of run.json; others are called by their own, with blanks."""

UNSHOWN = ("host", "pid", "state", "step", "steps", "saved", "reason")
"""Facts that stand elsewhere on the page, or say nothing to its reader."""

Table = list[tuple[str, list[str]]]
"""Rows, as (name, a cell for each run)."""


@dataclass(frozen=True)
class Tile:
    """A large figure with what belongs to it."""

    title: str
    figure: str
    unit: str
    rows: list[tuple[str, str]]


def write_page(
    folders: Sequence[Path],
    output: str | Path | None = None,
    samples: Sequence[Sequence[tuple[str, str]]] = (),
    *,
    price: str | None = None,
    refresh: int | None = None,
) -> Path:
    """Writes the page of one or several runs, and returns its path.

    Args:
        output: the file; by default report.html in the run, or beside the first of several.
        samples: of each run, prompts and their continuations.
        price: of an hour of all devices together, such as `$2.49`.
        refresh: seconds after which a browser loads the page again; by default never.

    Raises:
        InputError: a folder is no run, or has unreadable files; or `price` has no number.
    """
    # Paths tell folders of one name apart.
    runs = [read_page_run(folder, number) for number, folder in enumerate(folders)]
    if len({run.name for run in runs}) < len(runs):
        for run, folder in zip(runs, folders, strict=True):
            run.name = str(folder)
    for run, texts in zip(runs, samples, strict=False):
        run.samples = texts
    if price is not None:
        for run in runs:
            run.cost = cost_of(price, run.hours)
    # A run's own page stays when runs are compared.
    folder = folders[0] if len(folders) == 1 else folders[0].parent
    file = output_file(output or folder / "report.html", "--output")

    lone = runs[0] if len(runs) == 1 else None
    panels = draw_panels(runs)
    loading = loading_code(lone) if lone else ""
    tiles = [tile(lone) for tile in (quality_tile, scores_tile, speed_tile)] if lone else []
    page = render(
        "page.html",
        {key: panel.figure for key, panel in panels.items()},
        runs=runs,
        lone=lone,
        seeds="" if lone else count_seeds([run.config for run in runs]),
        state=describe_state,
        subtitle=describe_run(lone) if lone else "",
        tiles=list(filter(None, tiles)),
        loading=loading,
        newest=generating_command(lone) if lone and not loading else "",
        curves=panels,
        signs={kind: sign for kind, (_, sign) in EVENTS.items()},
        tables=make_tables(runs),
        written=f"{datetime.now():%Y-%m-%d %H:%M}",
        refresh=refresh,
        redact=redact,
    )
    # A browser may load it at any time.
    write_atomically(file, page.encode("utf-8", "replace"))
    return file


def follow(
    folders: Sequence[Path],
    write: Callable[[int | None], Path],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Calls `write` every `FOLLOW` seconds while one of the runs goes on.

    write: writes a page, which a browser loads again after so many seconds. After Ctrl-C it is called once more,
        with None.
    """
    running = [folder for folder in folders if read_run(folder).state == "running"]
    if not running:
        return
    names, announced = ", ".join(map(str, running)), False
    try:
        while any(read_run(folder).state == "running" for folder in running):
            file = write(FOLLOW)
            if not announced:
                print(f"{file}: written every {FOLLOW} s while {names} goes on", file=sys.stderr)
            announced = True
            sleep(FOLLOW)
    except KeyboardInterrupt:
        write(None)
        raise


def render(template: str, figures: dict[str, Any], **values: Any) -> str:
    """A page of `template` with Bokeh's `figures` by name, in one file that needs no network.

    template: a file beside this one, or in a folder of this package, whose blocks fill base.html. It gets the
        figures as `panels`.
    """
    from bokeh.embed import components
    from bokeh.resources import Resources
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup

    # Bokeh's core alone, without widgets and tables, is a third of its scripts.
    library = Resources(mode="inline", components=["bokeh"], log_level="error").render_js()
    script, panels = components(figures) if figures else ("", {})

    # Names, recipes and samples are foreign text, which the template escapes. What Bokeh writes is HTML.
    folder = Path(__file__).parent
    loader = FileSystemLoader([folder, folder.parent], encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, loader=loader)
    return environment.get_template(template).render(
        panels={key: Markup(panel) for key, panel in panels.items()},
        scripts=Markup(library + script) if figures else "",
        **values,
    )


# ------------------------------ the first screen


def cost_of(price: str, hours: float) -> str:
    """The cost of some hours at `$2.49` or `2 €` an hour. Raises `InputError` for another text."""
    # A currency, not `/h` or `per hour`: these would stand behind the cost too.
    match = re.fullmatch(r"([^\d/-]{0,8})(\d+(?:\.\d+)?)([^\d/-]{0,8})", price.strip())
    if not match:
        raise InputError(
            f"--cost-per-hour {price}: not a price; write it as 2.49, $2.49 or '2.49 €'"
        )
    before, number, behind = match.groups()
    cost = float(number) * hours
    digits = 2 if cost >= 0.1 or not cost else 4
    return f"{before}{cost:,.{digits}f}{behind}, at {price.strip()} an hour"


def describe_run(run: PageRun) -> str:
    """Model, size, text and steps of a run, in a sentence."""
    summary = run.summary
    text = summary.model.replace("_", " ")
    if summary.parameters:
        text += f", {write_number(summary.parameters)} parameters"
    tokens = last_value(run, "tokens")
    if tokens:
        text += f", {write_number(tokens)} tokens"
        text += f" of {source}" if (source := describe_source(run.config)) else ""
    if summary.step:
        text += f" in {write_number(summary.step)} steps"
    return redact(f"{text}.")


def describe_source(config: dict[str, Any]) -> str:
    """The training text: a path or a name, or that it comes with Python."""
    source = config.get("data.source") or [
        component.get("source") for component in config.get("data.mixture") or []
    ]
    if source == "python":
        return "the text that comes with Python"
    names = [str(each) for each in (source if isinstance(source, list) else [source])]
    return ", ".join(names) if len(names) < 4 else f"{len(names)} sources"


def describe_state(run: PageRun) -> str:
    """`finished 2026-11-29 14:05`, `running, step 300 of 512`, with the reason of a failure."""
    summary = run.summary
    words = [str(summary.state)]
    if words == ["running"] and summary.step is not None:
        return f"running, {describe_steps(summary)}"
    ended = run.facts.get("ended")
    if ended or summary.changed:
        then = datetime.fromisoformat(ended) if ended else datetime.fromtimestamp(summary.changed)
        words.append(f"{then.astimezone():%Y-%m-%d %H:%M}")
    if summary.state != "finished" and summary.step:
        words.append(f"at {describe_steps(summary)}")
    text = " ".join(words)
    return redact(f"{text}: {summary.problem}" if summary.problem else text)


def describe_steps(summary: RunSummary) -> str:
    """`step 300 of 512`."""
    of = f" of {write_number(summary.steps)}" if summary.steps else ""
    return f"step {write_number(summary.step or 0)}{of}"


def quality_tile(run: PageRun) -> Tile | None:
    """Bits a byte beside the baselines; else the validation loss, or that of training."""
    names = {
        "val_bpb": ("Bits a byte", "in validation"),
        "val_loss": ("Validation loss", "nats a token"),
        "loss": ("Training loss", "nats a token"),
    }
    key = next((key for key in names if last_value(run, key) is not None), None)
    if key is None:
        return None
    title, unit = names[key]
    rows = []
    for name, values in run.baselines.items():
        if key in values:
            rows.append((name, write_number(values[key])))
    perplexity = last_value(run, "val_ppl")
    if perplexity is not None:
        rows.append(("perplexity", write_number(perplexity)))
    if key != "loss" and (loss := last_value(run, "loss")) is not None:
        rows.append(("training loss, nats a token", write_number(loss)))
    if tokens := last_value(run, "val_tokens"):
        # Of a masked model those with a label; of a large corpus fewer than are held out.
        rows.append(("tokens predicted", write_number(tokens)))
    return Tile(title, write_number(last_value(run, key)), unit, rows)


MOST_SCORES = 8
"""Scores of a tile; a table below has all."""


def scores_tile(run: PageRun) -> Tile | None:
    """One score of each task."""
    rows = [(score.name, score.text) for score in headlines(run.scores)[:MOST_SCORES]]
    return Tile("Scores", "", "zero-shot, ± standard error", rows) if rows else None


def speed_tile(run: PageRun) -> Tile | None:
    """Tokens a second over all steps, with time, MFU, device and cost."""
    rate, share = measure_speed(run)
    if rate is None:
        return None
    rows = [("time of all steps", duration(3600 * run.hours))]
    if share is not None:
        peak = run.facts.get("peak_flops")
        of = "" if peak is None else f" of {si(peak)}FLOP/s"
        rows.append(("MFU", f"{write_percent(share)}{of}"))
    rows += [(name, text) for name, text in device_rows(run) if text]
    if run.cost:
        rows.append(("cost", run.cost))
    return Tile("Speed", write_number(rate), "tokens a second", rows)


def measure_speed(run: PageRun) -> tuple[float | None, float | None]:
    """Tokens a second and MFU over all steps; None where no line of metrics has them."""
    lines = [line for line in run.lines if line.get("tokens_per_second")]
    if not lines:
        return None, None
    tokens = [run.facts.get(FORKED, 0), *(line["tokens"] for line in lines)]
    # The rate of a line holds since the line before.
    seconds = [
        (line["tokens"] - before) / line["tokens_per_second"]
        for before, line in zip(tokens, lines, strict=False)
    ]
    shares = [line["mfu"] for line in lines if "mfu" in line]
    share = fmean(shares, seconds) if len(shares) == len(lines) else None
    return (tokens[-1] - tokens[0]) / sum(seconds), share


def device_rows(run: PageRun) -> list[tuple[str, str]]:
    """The device and the precision of a run."""
    name = str(run.facts.get("hardware") or run.facts.get("device") or "")
    processes = run.facts.get("processes") or 1
    precision = str(run.facts.get("precision") or "")
    return [
        ("device", f"{processes} × {name}" if processes > 1 else name),
        ("precision", precision),
    ]


def generating_command(run: PageRun) -> str:
    """The command that continues a text; "" while the run has no model."""
    if not any(run.folder.glob("checkpoints/step-*")) and not _final_config(run):
        return ""
    return f'nalanda generate {shlex.quote(str(run.folder))} "{choose_prompt(run.folder)}"'


def loading_code(run: PageRun) -> str:
    """A command and Python that use the run's final model; "" while it has none."""
    config = _final_config(run)
    if not config:
        return ""
    ours = config.get("model_type") == "nalanda"
    masked = ours and not config.get("is_decoder", True)
    final = run.folder / "final"
    code = usage(str(final), masked, ours, (final / "tokenizer_config.json").is_file())
    code = re.sub("^```.*\n?", "", code, flags=re.MULTILINE)
    return code if masked else f"{generating_command(run)}\n\n{code}"


def _final_config(run: PageRun) -> dict[str, Any]:
    """The config of the final model; {} while there is none."""
    file = run.folder / "final" / "config.json"
    return read_object(file) if file.is_file() else {}


# ------------------------------ tables


def make_tables(runs: Sequence[PageRun]) -> dict[str, Any]:
    """Where several runs stand; settings that differ; all scores; data and versions."""
    configs = [run.config for run in runs]

    # The folder always differs, and changes nothing.
    settings = [key for config in configs for key in config if key != "output_dir"]
    rows = make_rows(configs, settings, write_setting)
    differing = [row for row in rows if len(set(row[1])) > 1]

    # Keys that say which texts these are; the others stand in the recipe.
    data = [f"data.{key}" for key in (*TEXTS, "seq_len")]
    tokenizer = [f"tokenizer.{key}" for key in ("path", "train", "vocab_size")]
    about = make_rows(configs, data + tokenizer)
    facts = [key for run in runs for key in run.facts if key.split(".")[0] not in UNSHOWN]
    about += [(name_fact(key), cells) for key, cells in make_rows([r.facts for r in runs], facts)]
    return {
        "state": state_table(runs),
        "differing": differing,
        "scores": score_table(runs),
        "own": settings_beside_recipe(runs[0]) if len(runs) == 1 else None,
        "about": about,
    }


def state_table(runs: Sequence[PageRun]) -> Table:
    """Where the runs stand, in words."""
    columns = []
    for run in runs:
        summary = run.summary
        rate, share = measure_speed(run)
        columns.append(
            {
                "state": describe_state(run),
                "model": summary.model.replace("_", " "),
                "parameters": summary.parameters,
                "tokens": last_value(run, "tokens"),
                "bits a byte": last_value(run, "val_bpb"),
                "validation perplexity": last_value(run, "val_ppl"),
                "training loss, nats a token": last_value(run, "loss"),
                "tokens a second": rate,
                "MFU": None if share is None else write_percent(share),
                "time of all steps": duration(3600 * run.hours) if run.hours else None,
                **dict(device_rows(run)),
                "cost": run.cost,
                **{score.name: score.text for score in run.scores},
            }
        )
    return make_rows(columns, [name for column in columns for name in column])


def score_table(runs: Sequence[PageRun]) -> Table:
    """All scores of a run, where the first screen has not room for them."""
    scores = runs[0].scores
    if len(runs) > 1 or len(scores) == len(headlines(scores)[:MOST_SCORES]):
        return []
    return [(score.name, [score.text]) for score in scores]


def settings_beside_recipe(run: PageRun) -> tuple[str, list[tuple[str, str, str]]] | None:
    """The recipe with which the run last started, and each setting that differs: its value there and in the run.

    None if the run's command names no recipe that can be read now.
    """
    words = shlex.split(str(run.facts.get("command", "")))
    name = next((word for word in words if not word.startswith("-") and _is_recipe(word)), None)
    if name is None:
        return None
    settings = [word.partition("=") for word in words if "=" in word]
    try:
        # By key, also those that were typed as a section: `model={conv_size: 3}`.
        typed = flatten({key: parse_yaml(value, key) for key, _, value in settings})
        # Unchecked: a check takes torch.
        recipe = section(RunConfig, read_sections(find_recipe(name)), "").to_dict()
    except InputError:  # of another version
        return None
    before, after = flatten(recipe), run.config
    # A run writes out its model's defaults: of those that the recipe leaves out, the command names the changed ones.
    keys = [key for key in after if key in before or key in typed or not key.startswith("model.")]
    rows = [
        (key, write_setting(before.get(key)), write_setting(after[key]))
        for key in keys
        if key != "output_dir" and before.get(key) != after[key]
    ]
    return Path(name).stem, rows


def _is_recipe(word: str) -> bool:
    if "=" in word or word.endswith(".py"):
        return False
    try:
        return find_recipe(word).suffix in (".yaml", ".yml")
    except InputError:
        return False


def name_fact(key: str) -> str:
    """`parameters without embeddings`; a version by its package."""
    key = key.removeprefix("versions.").replace("executors.", "backend of ")
    return WORDS.get(key, key.replace("_", " "))


def write_cell(value: Any) -> str:
    """A value as a person reads it, without the passwords of URLs."""
    if value in (None, "", []):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return write_number(value)
    return redact(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def write_setting(value: Any) -> str:
    """A setting, whose numbers have all their digits: 100,000 steps are not 100,400. 1.0 is 1."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value:,}".removesuffix(".0") if is_number else write_cell(value)


def make_rows(
    values: Sequence[dict[str, Any]], keys: Sequence[str], write: Callable[[Any], str] = write_cell
) -> Table:
    """A row for each of the keys that has a value in any run."""
    rows = [(key, [write(each.get(key)) for each in values]) for key in dict.fromkeys(keys)]
    return [(key, cells) for key, cells in rows if set(cells) != {"–"}]


def write_number(value: float) -> str:
    """The one form of numbers on the page: `0.006`, `1.717`, `74.68`, `6,958`, `2.37 M`."""
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1e18:  # no amount, but the perplexity of a model that diverged
        return f"{value:.4g}"
    if abs(value) >= 100_000:
        return si(value).strip()
    return f"{value:,.0f}" if abs(value) >= 1000 or isinstance(value, int) else f"{value:.4g}"


def write_percent(share: float) -> str:
    """`55.4 %`."""
    return f"{100 * share:.3g} %"
