"""What a study's recorded runs say: tables, pictures, the claims' intervals and the decision."""

import itertools
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from nalanda.common.errors import InputError
from nalanda.common.files import write_atomically
from nalanda.common.text import duration, size
from nalanda.report.plot import COLOURS, GREY, LINES, MARKERS, STYLE, smoothed
from nalanda_eval.recall import configured
from nalanda_eval.report import markdown_table
from nalanda_eval.studies.study import (
    MATCHES,
    TASKS,
    Claim,
    Question,
    Study,
    Trial,
    bigram_settings,
    chosen,
    finalists,
    form,
    load_study,
    matches,
    mqar,
    ranking,
    screening,
)
from nalanda_eval.sweep import Record, key, records

EQUAL = {"lm": 0.02, "recall": 2.0}
"""Differences that count as none where equality is claimed: nats a token (2 % of perplexity), points."""


UNITS = {"lm": "nats", "recall": "points"}


TITLES = {"lm": "language model", "recall": "recall"}


BEGIN, END = "<!-- words: kept by `nalanda study report` -->", "<!-- end of words -->"


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and the half width of its 95 % interval by Student's t; None of a single seed."""

    mean: float
    half: float | None
    seeds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Interval":
        from scipy.stats import t

        n = len(values)
        half = None if n < 2 else float(t.ppf(0.975, n - 1)) * stdev(values) / n**0.5
        return cls(fmean(values), half, n)

    @property
    def sign(self) -> int:
        """−1 or 1 where the interval lies on one side of 0, else 0."""
        if self.half is None or not abs(self.mean) > self.half:
            return 0
        return 1 if self.mean > 0 else -1

    def text(self, digits: int, plus: bool = False) -> str:
        mean = f"{self.mean:{'+' if plus else ''}.{digits}f}"
        return mean if self.half is None else f"{mean} ± {self.half:.{digits}f}"


@dataclass(frozen=True)
class ReportRow:
    """A cell with the records of its runs, in the order of their seeds."""

    cell: Trial
    records: tuple[Record, ...]

    @property
    def values(self) -> list[float]:
        """By seed: nats a token, or % right; NaN of a run that diverged."""
        scale = 100 if self.cell.task == "recall" else 1
        return [scale * record.get("score", math.nan) for record in self.records]


Place = tuple[str, str, str]  # system, task, match


def report_rows(cells: Iterable[Trial], found: dict[str, Record]) -> dict[Place, ReportRow]:
    """The cells whose runs are all recorded."""
    places = {}
    for cell in cells:
        got = tuple(found[name] for name in map(key, cell.settings) if name in found)
        if len(got) == len(cell.settings):
            places[cell.system, cell.task, cell.match] = ReportRow(cell, got)
    return places


# ------------------------------ the claims


def paired_differences(a: ReportRow | None, b: ReportRow | None) -> list[float] | None:
    """a − b by seed; None where there is no such row or a run diverged."""
    if a is None or b is None:
        return None
    pairs = [x - y for x, y in zip(a.values, b.values, strict=True)]
    return None if any(map(math.isnan, pairs)) else pairs


def opponent(places: dict[Place, ReportRow], name: str, task: str, match: str) -> ReportRow | None:
    """A system's row; one whose state grows has no row at equal state and stands there with its own."""
    own = places.get((name, task, "parameters"))
    return places.get((name, task, match)) or (own if own and own.records[0].get("state_grows") else None)


def verdict(claim: Claim, task: str, found: Interval) -> str:
    better = found.sign * (1 if task == "recall" else -1)
    if claim.says == "better":
        return {1: "holds", -1: "the opposite holds", 0: "undecided"}[better]
    if found.half is not None and abs(found.mean) + found.half <= EQUAL[task]:
        return "holds"
    return {1: "better, not equal", -1: "worse, not equal", 0: "undecided"}[better]


Judged = tuple[Claim, str, str, Interval, str]  # claim, task, match, a − b, verdict


def judged(study: Study, best: dict[str, str], places: dict[Place, ReportRow]) -> list[Judged]:
    """Every claim on every task, at equal parameters and at equal state, where its runs are recorded."""
    found = []
    for claim in study.claims:
        a, b = (named(name, best) for name in (claim.a, claim.b))
        for task, match in itertools.product(TASKS, MATCHES):
            if (a, task, match) not in places:
                continue
            pairs = paired_differences(places[a, task, match], opponent(places, b, task, match))
            if pairs:
                gap = Interval.of(pairs)
                found.append((claim, task, match, gap, verdict(claim, task, gap)))
    return found


def named(name: str, best: dict[str, str]) -> str:
    for question, won in best.items():
        name = name.replace(f"best:{question}", won)
    if "best:" in name:
        raise InputError(f"claims: {name!r}: its question is none of finals.best")
    return name


def pooled(
    places: dict[Place, ReportRow],
    mixers: Iterable[str],
    a: str,
    b: str,
    task: str,
    equal: Sequence[str] = MATCHES,
) -> Interval | None:
    """a − b of two forms: for each seed the mean over mixers and ways of matching, then over seeds; None
    where a run is missing."""
    gaps = []
    for mixer, match in itertools.product(mixers, equal):
        pairs = paired_differences(*(opponent(places, mixer + name, task, match) for name in (a, b)))
        if pairs is None:
            return None
        gaps.append(pairs)
    return Interval.of([fmean(column) for column in zip(*gaps, strict=True)])


def decided(
    study: Study, questions: dict[str, Question], first: list[Trial], found: dict[str, Record],
    places: dict[Place, ReportRow],
) -> list[str]:  # fmt: skip
    """The first lines: the question's best form beside `against`, and what becomes of the default."""
    rule = study.decision
    if rule is None:
        return []
    asked = questions[rule.question].expand()
    mixers = list(dict.fromkeys(name.removesuffix(form(name)) for name in asked))
    ranks = ranking((cell for cell in first if cell.question == rule.question), found)
    top, challenger = next(iter(ranks)), next(name for name in ranks if name != rule.default)

    def gaps(mixers: list[str], a: str, b: str) -> dict[str, Interval] | None:
        equal = {task: matches(study.finals.match, task) for task in TASKS}
        pair = {task: pooled(places, mixers, a, b, task, equal[task]) for task in TASKS}
        return None if None in pair.values() else pair  # type: ignore[return-value]

    beside = {mixer.removesuffix(" + "): gaps([mixer], top, rule.against) for mixer in mixers}
    change = gaps(mixers, challenger, rule.default)
    if change is None or None in beside.values():
        return ["The finals are not finished: nothing is decided."]
    words = {-1: "loses to", 0: "cannot be told from", 1: "beats"}
    told = [
        f"in {mixer} it {words[-pair['lm'].sign]} {rule.against} in language modelling "
        f"({measure_of('lm', pair)}) and {words[pair['recall'].sign]} it in recall "
        f"({measure_of('recall', pair)})"
        for mixer, pair in beside.items()
        if pair
    ]
    changes = change["lm"].sign < 0 and change["recall"].sign >= 0
    verb = f"changes to {challenger}" if changes else f"stays {rule.default}"
    gap = f"{measure_of('lm', change)}, {measure_of('recall', change)}"
    return [
        f"The best reading by the screening is {top}: {'; '.join(told)}",
        f"The default {verb}: {challenger} beside {rule.default}, in both mixers, {gap}.",
        f"Differences are means over {change['lm'].seeds} seeds that chose nothing, paired by seed, with "
        "95 % intervals; over equal parameters and equal state, where both were run.",
    ]


def measure_of(task: str, gaps: dict[str, Interval]) -> str:
    """`+0.012 ± 0.034 nats`."""
    return f"{gaps[task].text({'lm': 3, 'recall': 1}[task], plus=True)} {UNITS[task]}"


# ------------------------------ tables

COSTS = ("parameters", "state", "MFLOPs")


HEADER = ["system", "equal", "loss", "perplexity", "gradient spread", *COSTS, "recall, %", *COSTS]


def spread(record: Record) -> float:
    """Mean over layers of the relative standard deviation of the mixers' gradients over rows."""
    return fmean(layer["mixer_parameters"] for layer in record["gradient_spread"])


def costs(record: Record) -> list[str]:
    grows = ", grows" if record["state_grows"] else ""
    return [
        f"{record['parameters']:,}",
        size(record["state_bytes"]) + grows,
        f"{flops(record) / 1e6:.2f}",
    ]


def flops(record: Record) -> float:
    """Of a forward pass a token, by what the settings say: a record keeps the count of its own day."""
    asked = record["settings"]
    if "task" in asked:
        task = mqar(asked)
        vocab_size, length = task.vocab_size, max(map(task.length, task.trained))
    else:
        vocab_size, length = record["text"]["vocab_size"], asked["data"]["seq_len"]
    with warnings.catch_warnings(action="ignore"):  # a study may ask about what a map warns of
        return configured(asked["model"], vocab_size).flops_per_token(length)


def table(places: dict[Place, ReportRow]) -> list[list[str]]:
    """A line for each system and way of matching."""
    lines = []
    for name in dict.fromkeys(place[0] for place in places):
        for match in MATCHES:
            lm, recall = (places.get((name, task, match)) for task in TASKS)
            if lm is None and recall is None:
                continue
            cells = ["–"] * 6
            if lm:
                diverged = any(map(math.isnan, lm.values))
                loss = Interval.of(lm.values)
                cells = ["diverged", "–", "–"] if diverged else [
                    loss.text(3), f"{math.exp(loss.mean):.1f}", f"{fmean(map(spread, lm.records)):.2f}"
                ]  # fmt: skip
                cells += costs(lm.records[0])
            more = [Interval.of(recall.values).text(1), *costs(recall.records[0])] if recall else ["–"] * 4
            lines.append([name, match, *cells, *more])
    return lines


def bigram_rows(seeds: Sequence[int], lm: dict[str, Any], found: dict[str, Record]) -> str:
    """What the bigrams of these seeds have, as a sentence; "" where they are not recorded."""
    got = [found[name] for seed in seeds if (name := key(bigram_settings(seed, lm))) in found]
    if not got or len(got) < len(seeds):
        return ""
    loss = Interval.of([record["score"] for record in got]).text(3)
    return (
        f"Kneser–Ney bigrams of the {got[0]['tokens']:,} tokens that a language model sees have {loss} nats "
        "on the same rows."
    )


def by_source(places: dict[Place, ReportRow]) -> tuple[list[str], list[list[str]]]:
    """Perplexities of the language models by source, means over seeds."""
    mine = [(place, row) for place, row in places.items() if place[1] == "lm" and "scores" in row.records[0]]
    names = sorted(mine[0][1].records[0]["scores"]) if mine else []
    lines = [
        [name, match, *(f"{fmean(r['scores'][n] for r in row.records if 'scores' in r):.1f}" for n in names)]
        for (name, _, match), row in mine
    ]
    return ["system", "equal", *names], lines


def by_case(places: dict[Place, ReportRow]) -> tuple[list[str], list[list[str]]]:
    """Recall by the number of pairs, means over seeds."""
    mine = [(place, row) for place, row in places.items() if place[1] == "recall"]
    cases = mine[0][1].records[0]["cases"] if mine else []
    lines = [
        [name, match, *(f"{100 * fmean(r['scores'][i] for r in row.records):.1f}" for i in range(len(cases)))]
        for (name, _, match), row in mine
    ]
    return ["system", "equal", *(f"{case} pairs" for case in cases)], lines


def every_run(cells: Iterable[Trial], found: dict[str, Record]) -> list[list[str]]:
    """A line for each run: its seed, score, and the curve at five places."""
    lines: dict[str, list[str]] = {}
    for cell in cells:
        for asked in cell.settings:
            name = key(asked)
            if name in lines or name not in found:
                continue
            record = found[name]
            points = record["curve"]
            picked = [points[round(i * (len(points) - 1) / 4)] for i in range(5)] if points else []
            curve = " ".join(f"{point[0]}:{point[1]:.2f}" for point in picked)
            value = f"{record['score']:.4f}" if "score" in record else "diverged"
            lines[name] = [cell.task, cell.match, cell.system, str(asked["seed"]), value]
            lines[name] += [f"{record['seconds']:.0f}", curve]
    return list(lines.values())


def claim_lines(claims: list[Judged]) -> list[list[str]]:
    return [
        [claim.claim, TITLES[task], match, measure_of(task, {task: gap}), said]
        for claim, task, match, gap, said in claims
    ]


CLAIMS = ["claim", "task", "equal", "difference", "verdict"]


# ------------------------------ pictures


def draw_screening(question: str, asked: Question, places: dict[Place, ReportRow], directory: Path) -> Path:
    """A dot for each system, by form, mixer and way of matching; a panel a task."""
    import matplotlib
    from matplotlib.figure import Figure

    forms = list(dict.fromkeys(form(place[0]) for place in places))[::-1]
    kinds = list(dict.fromkeys((place[0].removesuffix(form(place[0])), place[2]) for place in places))
    tasks = [task for task in TASKS if any(place[1] == task for place in places)]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.2 + 3.2 * len(tasks), 1.6 + 0.24 * len(forms)), layout="constrained")
        axes = figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0]
        for a, task in zip(axes, tasks, strict=True):
            for i, (mixer, match) in enumerate(kinds):
                dots = [
                    (row.values[0], forms.index(form(name)))
                    for (name, t, m), row in places.items()
                    if (t, m) == (task, match) and name.removesuffix(form(name)) == mixer
                ]
                label = ", ".join(filter(None, [mixer.removesuffix(" + "), f"equal {match}"]))
                look = {"color": COLOURS[i % 7], "marker": MARKERS[i % 7], "linestyle": "", "label": label}
                if dots:
                    a.plot(*zip(*dots, strict=True), **look)
            a.set(xlabel="validation loss (nats a token)" if task == "lm" else "recall (% right)")
            a.set(title=TITLES[task], yticks=range(len(forms)))
            a.set_yticklabels(forms)
        handles = {}
        for a in axes:
            handles |= dict(zip(*reversed(a.get_legend_handles_labels()), strict=True))
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2)
        figure.suptitle(asked.ask, x=0.01, ha="left", fontsize=10)
        figure.savefig(directory / f"{question}.png")
    return directory / f"{question}.png"


def draw_claims(claims: list[Judged], directory: Path) -> Path:
    """The paired differences with their 95 % intervals, better to the right."""
    import matplotlib
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(claim.claim for claim, *_ in claims))[::-1]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10.6, 1.6 + 0.36 * len(names)), layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        for a, task in zip(axes, TASKS, strict=True):
            for i, match in enumerate(MATCHES):
                mine = [(c, gap) for c, t, m, gap, _ in claims if (t, m) == (task, match)]
                if mine:
                    y = [names.index(claim.claim) + 0.12 - 0.24 * i for claim, _ in mine]
                    x, half = ([getattr(gap, part) or 0.0 for _, gap in mine] for part in ("mean", "half"))
                    look = {"color": COLOURS[i], "marker": MARKERS[i], "linestyle": "", "capsize": 2}
                    a.errorbar(x, y, xerr=half, label=f"equal {match}", **look)
            a.axvline(0, color=GREY, linewidth=1)
            a.axvspan(-EQUAL[task], EQUAL[task], color="#f0f0f0", zorder=0)
            a.set(title=f"{TITLES[task]} ({UNITS[task]})", yticks=range(len(names)))
            a.set_yticklabels(names)
        axes[0].invert_xaxis()
        for a in axes:
            a.set_xlabel("worse ← → better")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
        figure.savefig(directory / "claims.png")
    return directory / "claims.png"


def draw_curves(places: dict[Place, ReportRow], directory: Path) -> Path:
    """Training loss, and recall by pairs, of the finalists: means over seeds; bands from least to most."""
    import matplotlib
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(place[0] for place in places))
    counts = Counter(place[1:] for place in places)  # one alone is there for what its state grows to
    panels = [panel for panel in itertools.product(TASKS, MATCHES) if counts[panel] > 1] or [*counts]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.4 * len(panels), 5), layout="constrained")
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        handles: dict[str, Any] = {}
        for a, (task, match) in zip(axes, panels, strict=True):
            for i, name in enumerate(names):
                row = opponent(places, name, task, match)
                if row is None:
                    continue
                if task == "lm":
                    steps = [[point[0] for point in record["curve"]] for record in row.records]
                    x = max(steps, key=len)
                    curves = [[point[1] for point in record["curve"]] for record in row.records]
                    lines = [
                        smoothed(curve, 3) for curve in curves if len(curve) == len(x)
                    ]  # not the diverged
                else:
                    x = list(range(len(row.records[0]["cases"])))
                    lines = [[100 * score for score in record["scores"]] for record in row.records]
                    a.set_xticks(x, map(str, row.records[0]["cases"]))
                columns = list(zip(*lines, strict=True))
                colour = COLOURS[i % 7]
                look = {"color": colour, "linestyle": LINES[(i + i // 7) % 7], "linewidth": 1.2}
                [handles[name]] = a.plot(x, [fmean(column) for column in columns], **look)
                if task == "recall":  # what parts the losses of seeds is the step's few tokens
                    between = (list(map(f, columns)) for f in (min, max))
                    a.fill_between(x, *between, alpha=0.1, color=colour, lw=0)
            a.set_title(f"{TITLES[task]}, equal {match}")
            if task == "lm":
                a.set(xlabel="step", ylabel="training loss (nats a token)")
            else:
                a.set(xlabel="key–value pairs", ylabel="% right")
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2)
        figure.savefig(directory / "finals.png")
    return directory / "finals.png"


# ------------------------------ the command


def report(directory: Path) -> list[Path]:
    """Remakes RESULTS.md and the pictures of a study from its runs.jsonl, and prints what they say.

    Words between the two marks of RESULTS.md are kept. Returns what was written.

    Raises:
        InputError: there is no study, or no run of it.
    """
    study, questions, lm = load_study(directory)
    found = records(directory / "runs.jsonl")
    if not found:
        raise InputError(f"{directory / 'runs.jsonl'}: no run is recorded; `nalanda study run` trains them")
    first, notes = screening(study, questions, lm)
    screened = all(key(asked) in found for cell in first for asked in cell.settings)
    everything, finals, claims, lines, best = list(first), {}, [], ["The screening is not finished."], {}
    if screened:
        best = chosen(study, first, found)
        last, more = finalists(study, questions, lm, best)
        notes += more
        finals = report_rows(last, found)
        everything += last
        claims = judged(study, best, finals)
        lines = decided(study, questions, first, found, finals) or ["What the runs say"]
    written, blocks = [], []
    if claims:
        written.append(draw_claims(claims, directory))
        seeds = ", ".join(map(str, study.finals.seeds))
        blocks += [
            "## Claims",
            f"Differences, the first system's score less the second's, paired by seed ({seeds}) and thereby "
            "by the order of the data, with 95 % intervals by Student's t. Losses are better lower, recall "
            f"higher. Equal means within {EQUAL['lm']} nats or {EQUAL['recall']:g} points.",
            "![paired differences](claims.png)",
            markdown_table(CLAIMS, claim_lines(claims), left=3),
        ]
    if finals:
        written.append(draw_curves(finals, directory))
        chose = [f"- best of {question}: {won}" for question, won in best.items()]
        blocks += [
            "## Finals",
            "\n".join(["Chosen by the screening:", "", *chose]),
            "![curves](finals.png)",
            markdown_table(HEADER, table(finals)),
            *filter(None, [bigram_rows(study.finals.seeds, lm, found)]),
            "Perplexity by source:",
            markdown_table(*by_source(finals)),
            "Recall by the number of pairs, %:",
            markdown_table(*by_case(finals)),
        ]
    blocks.append("## Screening")
    blocks.append(f"Seed {study.seed}, every system. {bigram_rows([study.seed], lm, found)}".rstrip())
    for name, asked in questions.items():
        mine = report_rows((c for c in first if c.question == name), found)
        if not mine:
            continue
        written.append(draw_screening(name, asked, mine, directory))
        blocks += [f"### {asked.ask}", f"![{name}]({name}.png)", markdown_table(HEADER, table(mine))]
    if notes:
        blocks.append("\n".join(f"- {note}" for note in dict.fromkeys(notes)))
    runs = every_run(everything, found)
    header = ["task", "equal", "system", "seed", "score", "s", "training loss by step"]
    blocks += ["## Every run", facts(runs, found), f"<details><summary>{len(runs)} runs</summary>"]
    blocks += [markdown_table(header, runs, left=3), "</details>"]
    file = directory / "RESULTS.md"
    text = "\n\n".join(["# " + lines[0], *lines[1:], words(file), *blocks]) + "\n"
    write_atomically(file, text)
    print_report(lines, claims, finals, Console())
    Console().print(f"tables and pictures in {directory}", markup=False, highlight=False, soft_wrap=True)
    return [file, *written]


def words(file: Path) -> str:
    """What somebody wrote into an earlier report, between its marks."""
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    kept = re.search(f"{re.escape(BEGIN)}(.*){re.escape(END)}", text, re.DOTALL)
    return BEGIN + (kept[1] if kept else "\n\n") + END


def facts(runs: list[list[str]], found: dict[str, Record]) -> str:
    """How many runs, of how long, with what."""
    seconds = sum(record["seconds"] for record in found.values() if "model" in record["settings"])
    some = next(iter(found.values()))
    text = next((record["text"] for record in found.values() if "text" in record), None)
    versions = ", ".join(f"{name} {version}" for name, version in some["versions"].items())
    of = (
        f" Text: {text['name']}, {text['tokens']:,} training tokens, fingerprint {text['fingerprint']}."
        if text
        else ""
    )
    return f"{len(runs)} runs, {duration(seconds)} of one thread, on {some['device']}; {versions}.{of}"


def print_report(
    lines: list[str], claims: list[Judged], finals: dict[Place, ReportRow], console: Console
) -> None:
    for line in lines:
        console.print(line, style="bold" if line is lines[0] else None, markup=False, highlight=False)
    for header, body in ((CLAIMS, claim_lines(claims)), (HEADER[:4] + HEADER[8:9], None)):
        if body is None:
            body = [line[:4] + line[8:9] for line in table(finals)]
        names = [line[0] for line in body]  # each once, in front of its first line
        body = [["" if i and names[i - 1] == line[0] else line[0], *line[1:]] for i, line in enumerate(body)]
        if not body:
            continue
        shown = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
        for name in header:
            numeric = name in ("loss", "perplexity", "recall, %", "difference")
            shown.add_column(name, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
        for line in body:
            shown.add_row(*line)
        console.print(shown)
