"""What seven mixers and maps keep of a pretrained transformer, as hybrids: the records of `lab/pages/linearize.md`.

`linearize.yaml` fits the hybrids, and `linearize_study.yaml` distils them over seeds: `nalanda compare`. The records
have more: hybrids before and after the fit, last words, and a token's time and bytes.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from scipy import stats

from nalanda.common.text import markdown_table
from nalanda.compare.verdict import pair_gap
from nalanda.config.load import load_config
from nalanda.report.figures import COLOURS, REFERENCE, drawing, log_axis
from nalanda_lab.estimate import document_variance, half_width, signed

RECIPE = Path(__file__).with_name("linearize.yaml")
STAGES = ("before", "fitted", "distilled")
Records = dict[str, dict]
"""Summed nats and labels of each held-out batch, and each last word's hit, by `SEED-ARM-STAGE`."""


def print_report(folder: str) -> None:
    print(report(Path(folder)))


def report(out: Path) -> str:
    """The table of the records, in Markdown; beside it, linearize.png."""
    read = {f.stem: json.loads(f.read_text()) for f in (out / "records").glob("*.json")}
    decoding, teacher = read.pop("decoding", {}), read.pop("teacher")
    arms = load_config(RECIPE).linearize.arms
    first = next(iter(arms))
    titles = [f"{what} {stage}" for what in ("perplexity", "last words") for stage in STAGES]

    again = records_of(read, "teacher", "distilled")
    cells = [f"{perplexity(teacher):.1f}", "", cell(map(perplexity, again))]
    cells += [f"{accuracy(teacher):.1f} %", "", cell(map(accuracy, again), " %")]
    lines = [["teacher", *cells, *distance(read, "teacher", first)]]
    for arm in arms:
        stages = [records_of(read, arm, stage) for stage in STAGES]
        cells = [cell(map(perplexity, each)) for each in stages]
        cells += [cell(map(accuracy, each), " %") for each in stages]
        lines.append([arm, *cells, *distance(read, arm, first)])
    costs = [
        f"{name}: {cost['seconds'] * 1e3:.0f} ms a token, {cost['bytes'] / 2**20:.0f} MiB"
        for name, cost in decoding.items()
    ]
    draw(read, list(arms), perplexity(teacher), out / "linearize")
    table = markdown_table(["", *titles, "nats to the first", "over batches"], lines)
    return "\n\n".join([table, *costs])


def draw(read: Records, arms: list[str], teacher: float, file: Path) -> None:
    """Perplexities of the fitted and the distilled hybrids. teacher: its perplexity."""
    points = {
        stage: [interval(map(perplexity, records_of(read, arm, stage))) for arm in arms]
        for stage in STAGES[1:]
    }
    seeds = len(pairs_of(read, arms[0], arms[0]))
    caption = f"Means and 95 % intervals (Student's t) over {seeds} seeds of the data's order."
    (lowest, _), best = min(zip(points["distilled"], arms, strict=True), key=lambda x: x[0][0])
    title = f"{best} comes closest: perplexity {lowest:.0f}, the transformer has {teacher:.0f}"
    with drawing(file, title, caption, 1, height=2.5) as [axes]:
        for i, (stage, each) in enumerate(points.items(), 1):
            means, halves = zip(*each, strict=True)
            axes.errorbar(range(len(arms)), means, halves, fmt="o", color=COLOURS[i], label=stage)
        axes.axhline(teacher, **REFERENCE, label="teacher")
        axes.set_xticks(range(len(arms)), arms)
        axes.set(ylabel="perplexity of held-out text")
        log_axis(axes.yaxis, (40, 80, 160, 320, 640, 1280))


def records_of(read: Records, arm: str, stage: str) -> list[dict]:
    return [read[name] for name in read if name.endswith(f"-{arm}-{stage}")]


def cell(values: Iterable[float], unit: str = "") -> str:
    mean, half = interval(values)
    return f"{mean:.1f}{f' ± {half:.1f}' if half else ''}{unit}" if math.isfinite(mean) else ""


def distance(read: Records, arm: str, first: str) -> list[str]:
    """Two cells: nats a token to the first arm with the interval over orders, and that over held-out batches."""
    pairs = pairs_of(read, arm, first)
    if not pairs or arm == first:
        return ["", ""]
    mean, half = interval(math.log(perplexity(a) / perplexity(b)) for a, b in pairs)
    ours, theirs = (np.array([pair[i]["nats"] for pair in pairs]) for i in (0, 1))
    labels = np.array(pairs[0][0]["labels"])
    error = math.sqrt(document_variance(ours, theirs, labels))
    batches = float(stats.t.ppf(0.975, len(labels) - 1)) * error
    return [f"{signed(mean, '.3f')} ± {half:.3f}", f"± {batches:.3f}"]


def perplexity(record: dict) -> float:
    return math.exp(sum(record["nats"]) / sum(record["labels"]))


def accuracy(record: dict) -> float:
    return 100 * float(np.mean(record["hits"]))


def pairs_of(read: Records, arm: str, first: str) -> list[tuple[dict, dict]]:
    """The records of the distilled arm and of `first`, for each seed that has both."""
    names = sorted(name for name in read if name.endswith(f"-{arm}-distilled"))
    pairs = [(name, name.replace(f"-{arm}-", f"-{first}-")) for name in names]
    return [(read[a], read[b]) for a, b in pairs if b in read]


def interval(values: Iterable[float]) -> tuple[float, float]:
    """Mean, and the half width of its 95 % interval; infinite without values."""
    values = list(values)
    if len(values) < 2:
        return (values[0] if values else math.inf), 0.0
    gap = pair_gap("", "", values, [0.0] * len(values))
    return gap.mean, half_width(gap)
