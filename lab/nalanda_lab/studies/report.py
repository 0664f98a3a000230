"""What a study found, from its recorded runs: gaps with intervals, verdicts, tables and pictures."""

import itertools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from nalanda_eval.report import markdown_table
from rich.console import Console

from nalanda.common.errors import InputError
from nalanda.common.files import write_atomically
from nalanda.common.text import duration, si, signed
from nalanda.common.text import size as bytes_text
from nalanda.common.versions import list_versions
from nalanda.report.figures import REFERENCE, Look, drawing, files, in_panels, log_axis, look
from nalanda_lab import recall
from nalanda_lab.studies.estimate import Gap, document_variance, gap_of, holm, residual, slopes
from nalanda_lab.studies.plan import (
    BESIDE,
    CALIBRATION,
    RECALLED,
    System,
    best_recall_rate,
    bigram_settings,
    chosen_rate,
    equal_rates,
    final_loss,
    final_settings,
    recall_models,
    recall_run,
    steps_to,
    systems,
)
from nalanda_lab.studies.spec import Calibration, Study, load_study
from nalanda_lab.sweep import Record, key, records

SUPERSEDED = (
    "> **Superseded.** The rule's verdicts on norm-awareness and on the default are withdrawn; "
    "docs/study.md says what stands. The rule drops a rate after 100 K tokens of one seed, and a gap "
    "between two rates is no gap between two forms. It pools residuals of mixers whose spreads differ: "
    "paired over three seeds, intervals are up to three times as wide. `constant p` is 1.74, where NaLa's "
    "p starts; trained, its mean is 2.4 to 2.8. The calibration has no short convolutions; the published "
    "models have them. The text of our records is public-domain and system text in SlimPajama's layout, "
    "not SlimPajama."
)
BEGIN, END = "<!-- words: kept by `nalanda study report` -->", "<!-- end of words -->"
SAME = 0.02
"""Nats a token (2 % of perplexity) within which a form makes no difference."""
TELLING = 0.05
"""Largest half width of an interval, in nats, that says whether a published gap is reproduced."""


@dataclass(frozen=True)
class Results:
    """A study and its records. Systems count where all their seeds are recorded."""

    study: Study
    lm: dict[str, Any]
    found: dict[str, Record]
    fixed: dict[System, float] | None = None
    """The systems to regard, and the rate of each; None: all, at the rates that they chose."""

    @cached_property
    def planned(self) -> list[System]:
        return systems(self.study, self.lm) if self.fixed is None else list(self.fixed)

    @cached_property
    def rates(self) -> Mapping[System, float | None]:
        if self.fixed is not None:
            return self.fixed
        return {s: chosen_rate(s, self.study, self.lm, self.found)[0] for s in self.planned}

    @cached_property
    def complete(self) -> dict[System, list[Record]]:
        """The judging runs by seed, of the systems that have all of them."""
        found = {}
        for system, rate in self.rates.items():
            if rate is None:
                continue
            seeds = self.study.seeds
            asked = [key(final_settings(system, rate, seed, self.study, self.lm)) for seed in seeds]
            got = [self.found[name] for name in asked if name in self.found]
            if len(got) == len(asked):
                found[system] = got
        return found

    @cached_property
    def runs(self) -> dict[System, list[Record]]:
        """`complete`, of the systems none of whose runs diverged."""
        return {s: got for s, got in self.complete.items() if not any("failed" in r for r in got)}

    @cached_property
    def counts(self) -> np.ndarray:
        """Tokens of each validation document."""
        asked = bigram_settings(self.study.seeds[0], self.study.budgets[0], self.lm)
        return np.array(self.found[key(asked)]["documents"])

    def losses(self, system: System) -> np.ndarray:
        """`[seeds, budgets]`, nats a token."""
        return np.array(
            [[row["loss"] for row in record["budgets"]] for record in self.runs[system]]
        )

    def documents(self, system: System, budget: int) -> np.ndarray:
        """`[seeds, documents]`, sums of nats."""
        return np.array([record["budgets"][budget]["documents"] for record in self.runs[system]])

    def peers(self, size: str, *, calibration: bool = False) -> list[System]:
        """The systems of a size that gaps are measured between and the residual is pooled over."""
        kept = (CALIBRATION,) if calibration else tuple(self.study.mixers)
        return [s for s in self.runs if s.size == size and s.group in kept]

    def gap(
        self, a: System, b: System, value: Callable[[np.ndarray], np.ndarray], budget: int | None
    ) -> Gap:
        """a − b of `value`, a function of losses `[…, budgets]` to values `[…]`. budget: index of the budget
        whose documents add their variance; None: none do."""
        peers = self.peers(a.size, calibration=a.group == CALIBRATION)
        pool = residual(np.stack([value(self.losses(s)) for s in peers]))
        documents = 0.0
        if budget is not None:
            documents = document_variance(
                self.documents(a, budget), self.documents(b, budget), self.counts
            )
        return gap_of(value(self.losses(a)), value(self.losses(b)), pool, documents)

    def at(self, a: System, b: System, budget: int = -1) -> Gap:
        return self.gap(a, b, lambda losses: losses[..., budget], budget)

    def by_budget(self, a: System, b: System) -> list[Gap]:
        return [self.at(a, b, i) for i in range(len(self.study.budgets))]

    def slope(self, a: System, b: System) -> Gap:
        """Of the gap against the logarithm of the tokens."""
        return self.gap(a, b, lambda losses: slopes(losses, self.study.budgets), None)

    def system(self, size: str, group: str, form: str) -> System | None:
        """None if its runs are not complete."""
        return next(
            (s for s in self.runs if (s.size, s.group, s.form) == (size, group, form)), None
        )

    @property
    def reference(self) -> str:
        """The form that gaps are measured from; at equal rates the default, which the rule decides on."""
        if self.fixed is None or self.study.decision is None:
            return self.study.reference
        return self.study.decision.default

    def pairs(self) -> list[tuple[System, System]]:
        """Each system of the endpoint with its reference."""
        found = []
        for system in self.runs:
            reference = self.system(system.size, system.group, self.reference)
            if system.group in self.study.mixers and reference and reference != system:
                found.append((system, reference))
        return found

    @cached_property
    def adjusted(self) -> dict[System, float]:
        """Holm's p of the gaps at the last budget."""
        return holm({a: self.at(a, b).p for a, b in self.pairs()})

    def finished(self) -> bool:
        return len(self.complete) == len(self.planned)

    @cached_property
    def alike(self) -> "Results":
        """The same at equal rates."""
        return replace(self, fixed=equal_rates(self.planned, self.study))

    def diverged(self) -> list[str]:
        """The judging runs that did: `1 M, deltanet + NaLa, seed 2`."""
        return [
            f"{key_of(system)}, seed {seed}"
            for system, got in self.complete.items()
            for seed, record in zip(self.study.seeds, got, strict=True)
            if "failed" in record
        ]


def key_of(system: System) -> str:
    return f"{system.size}, {system.name}"


# ------------------------------ the rule


def published_gaps(calibration: Calibration) -> dict[str, float]:
    """In nats a token of the study's text."""
    return {name: gap / calibration.tokens_per_word for name, gap in calibration.published.items()}


def calibrated(results: Results) -> dict[int, bool] | None:
    """Whether each budget reproduces the published gaps; None: no calibration, or it is not finished."""
    calibration = results.study.calibration
    if calibration is None:
        return None
    first = next(iter(results.study.sizes))
    forms = {name: results.system(first, CALIBRATION, name) for name in calibration.forms}
    if None in forms.values():
        return None
    reference = forms[results.study.reference]
    return {
        budget: all(
            gap.low <= published <= gap.high and gap.half <= TELLING
            for name, published in published_gaps(calibration).items()
            for gap in [results.at(forms[name], reference, i)]  # type: ignore[arg-type]
        )
        for i, budget in enumerate(results.study.budgets)
    }


def contrasts(results: Results) -> list[tuple[System, System]]:
    """Each system in which norms act with its counterpart in which they do not, by size, pair and mixer."""
    study, found = results.study, []
    for size, (a, b), mixer in itertools.product(study.sizes, study.contrasts, study.mixers):
        pair = results.system(size, mixer, a), results.system(size, mixer, b)
        if pair[0] and pair[1]:
            found.append(pair)
    return found


def norm_matters(results: Results) -> str:
    """The third part of the rule."""
    gaps = {pair: results.at(*pair) for pair in contrasts(results)}
    groups: dict[tuple[str, str, str], list[Gap]] = {}
    for (a, b), gap in gaps.items():
        groups.setdefault((a.size, a.form, b.form), []).append(gap)
    if any(all(gap.high < 0 for gap in group) for group in groups.values()):
        return "matters"
    if all(gap.low >= -SAME and gap.high <= SAME for gap in gaps.values()):
        return "does not matter"
    return "cannot be told to matter"


def decided(results: Results) -> tuple[str, dict[str, Gap]] | None:
    """The default form by the fourth part of the rule, and each candidate's gap to the default of before."""
    rule, study = results.study.decision, results.study
    places = list(itertools.product(study.sizes, study.mixers))
    runs = {form: [results.system(*place, form) for place in places] for form in study.forms}
    runs = {form: found for form, found in runs.items() if None not in found}
    if rule is None or not runs.keys() >= {rule.default, *rule.candidates}:
        return None

    def mean(values: Callable[[System], np.ndarray], form: str) -> np.ndarray:
        """Over mixers and sizes."""
        return np.mean([values(system) for system in runs[form] if system], axis=0)

    losses = {form: mean(lambda s: results.losses(s)[:, -1], form) for form in runs}
    sums = {
        form: mean(lambda s: results.documents(s, -1), form)
        for form in (rule.default, *rule.candidates)
    }
    pool, default = residual(np.stack([*losses.values()])), rule.default
    gaps = {
        form: gap_of(
            losses[form],
            losses[default],
            pool,
            document_variance(sums[form], sums[default], results.counts),
        )
        for form in rule.candidates
    }
    best = min(gaps, key=lambda form: gaps[form].mean)
    return (best if gaps[best].high < 0 else rule.default), gaps


def verdicts(results: Results) -> list[str]:
    """The report's generated sentences."""
    lines = []
    if not results.finished():
        done, all_ = len(results.complete), len(results.planned)
        lines.append(
            f"**The study is not finished**: {done} of {all_} systems have all their runs."
        )
    if lost := results.diverged():
        lines.append(f"**Diverged**, and so in no table of means or gaps: {'; '.join(lost)}.")
    budgets = calibrated(results)
    if budgets is not None:
        good = [f"{tokens:,}" for tokens, reproduced in budgets.items() if reproduced]
        lines.append(
            f"Calibration: the published gaps are reproduced at {', '.join(good)} tokens."
            if good
            else "Calibration: no budget reproduces the published gaps. All gaps are of early training."
        )
    lowest = min(results.study.rates.values)
    if edge := [key_of(system) for system, rate in results.rates.items() if rate == lowest]:
        lines.append(
            f"{len(edge)} of {len(results.rates)} systems chose the lowest rate, {lowest:g}; a lower one may "
            "be better for them."
        )
    study, gone = results.study, "because a run that it needs diverged"
    places = len(study.sizes) * len(study.mixers)
    if results.finished() and len(contrasts(results)) < places * len(study.contrasts):
        lines.append(f"Whether norm-awareness matters cannot be judged, {gone}.")
    elif results.finished() and study.contrasts:
        early = ", early in training," if budgets is not None and not any(budgets.values()) else ""
        lines.append(
            f"Withdrawn. By the rule, norm-awareness {norm_matters(results)}{early} inside the delta rule: "
            f"{contrast_text(results)} nats."
        )
    if choice := decided(results):
        told = candidate_text(choice[1])
        lines.append(
            f"Withdrawn. By the rule, the default of `nala` is {choice[0]}: candidates less default, "
            f"{told} nats."
        )
    elif results.finished() and study.decision:
        lines.append(f"The default of `nala` stays: a change cannot be judged, {gone}.")
    return lines


def contrast_text(results: Results) -> str:
    """The gaps, with the rates where a pair has two."""
    told = []
    for a, b in contrasts(results):
        rates = [results.rates[system] for system in (a, b)]
        apart = "" if rates[0] == rates[1] else f" (rates {rates[0]:g} and {rates[1]:g})"
        told.append(f"{key_of(a)} less {b.form} {results.at(a, b).text()}{apart}")
    return "; ".join(told)


def candidate_text(gaps: dict[str, Gap]) -> str:
    return "; ".join(f"{form} {gap.text()}" for form, gap in gaps.items())


def equal_rate_text(results: Results) -> str:
    """What the runs at equal rates are, and what they say about the rule's questions."""
    assert results.study.equal_rates is not None
    rates = ", ".join(f"{size}: {rate:g}" for size, rate in results.study.equal_rates.rates.items())
    alike = results.alike
    lines = [
        f"The same, with one rate for all systems of a size ({rates}); gap: less {alike.reference}. The rule "
        "does not use these runs."
    ]
    if not alike.finished():
        lines.append(f"{len(alike.complete)} of {len(alike.planned)} systems have all of them.")
    elif alike.diverged():
        lines.append(f"Diverged, and so in no mean: {'; '.join(alike.diverged())}.")
    elif contrasts(alike):
        lines.append(f"The rule's contrasts: {contrast_text(alike)} nats.")
    if choice := decided(alike):
        lines.append(f"Candidates less default: {candidate_text(choice[1])} nats.")
    return " ".join(lines)


# ------------------------------ tables


def table_of(header: list[str], lines: list[list[str]], left: int = 2) -> str:
    return markdown_table(header, lines, left=left) if lines else "Not measured yet."


def number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def chance(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def endpoint_table(results: Results) -> str:
    budgets, references = results.study.budgets, dict(results.pairs())
    header = [
        "size",
        "mixer",
        "form",
        "rate",
        *(f"{b:,}" for b in budgets),
        "gap",
        "p (Holm)",
        "slope",
    ]
    lines = []
    for system in results.runs:
        if system.group == CALIBRATION:
            continue
        losses = results.losses(system).mean(0)
        cells = ["", "", ""]
        if reference := references.get(system):
            gap, slope = results.at(system, reference), results.slope(system, reference)
            # Holm's family is all gaps: until they are there, p would be too small.
            p = chance(results.adjusted[system]) if results.finished() else "–"
            cells = [gap.text(), p, slope.text()]
        mixer = "–" if system.group == BESIDE else system.group
        rate = f"{results.rates[system]:g}"
        lines.append([system.size, mixer, system.form, rate, *map(number, losses), *cells])
    return table_of(header, lines, left=3)


def calibration_table(results: Results) -> str:
    calibration, first = results.study.calibration, next(iter(results.study.sizes))
    assert calibration is not None
    reference, lines = results.system(first, CALIBRATION, results.study.reference), []
    for name in calibration.forms:
        system = results.system(first, CALIBRATION, name)
        if system is None or reference is None:
            continue
        losses = map(number, results.losses(system).mean(0))
        gaps = results.by_budget(system, reference)
        published = published_gaps(calibration).get(name)
        cells = [gap.text() if system != reference else "" for gap in gaps]
        lines.append(
            [
                name,
                f"{results.rates[system]:g}",
                *losses,
                *cells,
                "" if published is None else signed(published, ".3f"),
            ]
        )
    budgets = [f"{b:,}" for b in results.study.budgets]
    return table_of(
        ["form", "rate", *budgets, *(f"gap, {b}" for b in budgets), "published"], lines, left=1
    )


def rate_table(results: Results) -> str:
    """The losses that choose each system's rate: of the last rung that a rate took part in."""
    study, lines = results.study, []
    for system, chosen in results.rates.items():
        losses: dict[float, Record] = {}
        for settings in chosen_rate(system, study, results.lm, results.found)[1]:
            if (record := results.found.get(key(settings))) is not None:
                losses[settings["rate"]] = record
        if losses:
            cells = [
                f"{final_loss(losses[rate]):.3f}, {losses[rate]['settings']['budgets'][-1] // 1000} K"
                if rate in losses
                else "–"
                for rate in study.rates.values
            ]
            edge = (
                ", an edge" if chosen in (min(study.rates.values), max(study.rates.values)) else ""
            )
            shown = "–" if chosen is None else f"{chosen:g}{edge}"
            lines.append([system.size, system.name, *cells, shown])
    return table_of(
        ["size", "system", *(f"{rate:g}" for rate in study.rates.values), "chosen"], lines
    )


def bigram_table(results: Results) -> str:
    lines = []
    for i, budget in enumerate(results.study.budgets):
        asked = [key(bigram_settings(seed, budget, results.lm)) for seed in results.study.seeds]
        if any(name not in results.found for name in asked):
            continue
        loss = fmean(results.found[name]["loss"] for name in asked)
        ranked = sorted((results.losses(s)[:, i].mean(), key_of(s)) for s in results.runs)
        ahead = sum(value < loss for value, _ in ranked)
        best = f"{ranked[0][1]}, {ranked[0][0]:.3f}" if ranked else "–"
        lines.append([f"{budget:,}", number(loss), best, f"{ahead} of {len(ranked)}"])
    return table_of(
        ["tokens", "bigrams", "best system", "systems ahead of the bigrams"], lines, left=1
    )


def position_table(results: Results) -> str:
    lines, ends = [], []
    for system, got in results.runs.items():
        if "lengths" not in got[0] or system.group == CALIBRATION:
            continue
        ends = [end for end, _ in got[0]["lengths"]]
        means = np.mean([[loss for _, loss in record["lengths"]] for record in got], axis=0)
        lines.append([system.size, system.name, *map(number, means)])
    spans = [f"{a}–{b - 1}" for a, b in itertools.pairwise([0, *ends])]
    return table_of(["size", "system", *spans], lines)


def recall_table(results: Results) -> str:
    lines, study = [], results.study
    assert study.recall is not None
    for name, model in recall_models(study).items():
        rate = best_recall_rate(model, study, results.found)
        if rate is None:
            continue
        asked = [
            recall.recall_settings(*recall_run(model, study, rate, s)) for s in study.recall.seeds
        ]
        got = [results.found[k] for k in map(key, asked) if k in results.found]
        if len(got) < len(asked):
            continue
        steps = sorted(steps_to(RECALLED, record) for record in got)
        shown = [
            "never" if math.isinf(x) else f"{x:g}" for x in (median(steps), steps[0], steps[-1])
        ]
        accuracy = fmean(record["score"] for record in got)
        lines.append([name, f"{rate:g}", *shown, f"{100 * accuracy:.1f}"])
    header = [
        "system",
        "rate",
        f"steps to {RECALLED:.0%}, median",
        "fewest",
        "most",
        "% right at the end",
    ]
    return table_of(header, lines, left=1)


def run_table(results: Results) -> str:
    """The judging runs that are recorded, also of systems that lack some."""
    lines = []
    pairs = dict.fromkeys([*results.rates.items(), *results.alike.rates.items()])
    for (system, rate), seed in itertools.product(pairs, results.study.seeds):
        if rate is not None:
            settings = final_settings(system, rate, seed, results.study, results.lm)
            if (record := results.found.get(key(settings))) is None:
                continue
            losses = " ".join(f"{row['loss']:.4f}" for row in record["budgets"])
            shown = [system.size, system.name, f"{rate:g}", str(seed), record.get("failed", losses)]
            shown += [f"{record['parameters']:,}", bytes_text(record["state_bytes"])]
            lines.append([*shown, f"{record['seconds']:.0f}"])
    header = [
        "size",
        "system",
        "rate",
        "seed",
        "nats a token by budget",
        "parameters",
        "state",
        "s",
    ]
    return table_of(header, lines)


def facts(found: dict[str, Record]) -> str:
    """A line on the runs: their number, time, machines, versions and text."""
    trained = [record for record in found.values() if "bigrams" not in record["settings"]]
    machines = sorted({record["machine"] for record in trained if "machine" in record})
    threads = sorted({record["threads"] for record in trained if "threads" in record})
    text = next((record["text"] for record in found.values() if "text" in record), None)
    told = [
        f"{len(trained)} runs, {duration(sum(record['seconds'] for record in trained))}",
        f"on {', '.join(machines)}, {', '.join(map(str, threads))} thread(s) each",
        list_versions(record["versions"] for record in found.values()),
    ]
    if text:
        told.append(
            f"text {text['name']}, {text['tokens']:,} training tokens, fingerprint {text['fingerprint']}"
        )
    return "; ".join(told) + "."


# ------------------------------ pictures


def looks(study: Study) -> dict[str, Look]:
    """How each form is drawn in all figures, but the reference, which is at 0."""
    names = [*study.forms, *(study.calibration.forms if study.calibration else ())]
    return {
        name: look(i)
        for i, name in enumerate(n for n in dict.fromkeys(names) if n != study.reference)
    }


def draw_gaps(results: Results, file: Path) -> list[Path]:
    """Gaps to the reference against tokens: a panel for each size, mixer and six forms."""
    study, pairs = results.study, results.pairs()
    if not pairs:
        return []
    groups, styles = in_panels([name for name in study.forms if name != study.reference])
    places = [
        (size, mixer, mine)
        for size, (_, mine), mixer in itertools.product(study.sizes, groups, study.mixers)
        if any((a.size, a.group) == (size, mixer) and a.form in mine for a, _ in pairs)
    ]
    title = f"Gaps to {study.reference} up to {si(study.budgets[-1])} tokens"
    if results.finished():
        lowest, reference = min(pairs, key=lambda pair: results.at(*pair).mean)
        gap, p = results.at(lowest, reference).text(), chance(results.adjusted[lowest])
        title += f"; lowest: {key_of(lowest)}, {gap} nats, p {p} by Holm"
    with drawing(
        file, title, explained(study), len(places), columns=len(study.mixers), sharey="row"
    ) as panels:
        for axes, (size, mixer, mine) in zip(panels, places, strict=True):
            gaps = {
                a.form: results.by_budget(a, b)
                for form in mine
                for a, b in pairs
                if (a.size, a.group, a.form) == (size, mixer, form)
            }
            gap_lines(axes, study, gaps, styles if len(groups) > 1 else looks(study))
            axes.set_title(f"{mixer}, {size} parameters")
    return files(file)


def gap_lines(axes: Any, study: Study, gaps: dict[str, list[Gap]], styles: dict[str, Look]) -> None:
    """Gaps by budget with bars for their intervals, the systems a little beside one another."""
    axes.axhline(0, **REFERENCE, lw=0.8, label=study.reference)
    for i, (name, mine) in enumerate(gaps.items()):
        beside = [budget * 1.03 ** (i - (len(gaps) - 1) / 2) for budget in study.budgets]
        axes.errorbar(
            beside, [g.mean for g in mine], [g.half for g in mine], **styles[name], label=name
        )
    log_axis(axes.xaxis, study.budgets, si)
    axes.set(
        xlabel="training (tokens)", ylabel=f"loss less that of {study.reference} (nats a token)"
    )


def explained(study: Study) -> str:
    seeds = ", ".join(map(str, study.seeds))
    return (
        f"Lines: means over n = {len(study.seeds)} seeds ({seeds}) of validation losses, each less that of "
        f"{study.reference} with the same seed; each form at its own rate. Below 0: better. "
        "Bars: 95 % intervals."
    )


def draw_calibration(results: Results, file: Path) -> list[Path]:
    """Gaps of the calibration against tokens, and the published ones as lines."""
    study, first = results.study, next(iter(results.study.sizes))
    reference, budgets = results.system(first, CALIBRATION, study.reference), calibrated(results)
    if study.calibration is None or reference is None or budgets is None:
        return []
    styles, published = looks(study), published_gaps(study.calibration)
    systems = {name: results.system(first, CALIBRATION, name) for name in published}
    good = [si(tokens) for tokens, reproduced in budgets.items() if reproduced]
    at = f"at {', '.join(good)} tokens" if good else "at no budget"
    title = f"The published gaps to {study.reference} are reproduced {at}"
    caption = f"{explained(study)} Horizontal lines: published gaps. {study.calibration.source}."
    with drawing(file, title, caption, height=2.8) as [axes]:
        gaps = {
            name: results.by_budget(system, reference) for name, system in systems.items() if system
        }
        gap_lines(axes, study, gaps, styles)
        for name in gaps:
            plain = {"marker": "", "lw": 1, "label": f"{name}, published"}
            axes.axhline(published[name], **styles[name] | plain)
    return files(file)


# ------------------------------ the command


def report(directory: Path) -> list[Path]:
    """Rewrites RESULTS.md and the pictures of a study from its runs.jsonl, and prints the verdicts.

    Text between the two marks of RESULTS.md is kept. Returns the files written.

    Raises:
        InputError: there is no study, or it has no recorded run.
    """
    study, lm = load_study(directory)
    found = records(directory / "runs.jsonl")
    if not found:
        raise InputError(
            f"{directory / 'runs.jsonl'}: no run is recorded; start them with `nalanda study run`"
        )
    results, pictures = Results(study, lm, found), []
    for name, draw in (("gaps", draw_gaps), ("calibration", draw_calibration)):
        for old in files(directory / name):
            old.unlink(missing_ok=True)
        pictures += draw(results, directory / name)
    drawn = {
        file.stem: f"![{file.stem}]({file.name})" for file in pictures if file.suffix == ".png"
    }
    file = directory / "RESULTS.md"
    lines = verdicts(results)
    blocks = [
        SUPERSEDED,
        "# Does norm-awareness matter inside the delta rule?",
        words(file),
        "\n".join(f"- {line}" for line in lines),
        "## The endpoint",
        "Validation losses in nats a token after each budget of tokens, means over the seeds "
        f"{', '.join(map(str, study.seeds))}. gap: the last loss less that of {study.reference} there. "
        "slope: that of the gap, per e-fold of tokens. Intervals are of 95 %. study.yaml has the rule.",
        *([drawn["gaps"]] if "gaps" in drawn else []),
        endpoint_table(results),
    ]
    if study.calibration:
        picture = [drawn["calibration"]] if "calibration" in drawn else []
        told = f"{study.calibration.source}."
        if (words_of := study.calibration.tokens_per_word) != 1:
            told += f" These are perplexities a word; their gaps are divided by {words_of:g} tokens a word here."
        blocks += ["## Calibration", told, *picture, calibration_table(results)]
    told = f"Nats a token, and the tokens, of the last rung that a rate took part in; seed {study.rates.seed}."
    blocks += ["## Rates", told, rate_table(results)]
    if study.equal_rates:
        blocks += ["## At equal rates", equal_rate_text(results), endpoint_table(results.alike)]
    blocks += ["## Bigrams of as many tokens", bigram_table(results)]
    if study.lengths:
        told = (
            f"Nats a token by position, on rows of {study.lengths['tokens']:,} tokens; training rows have "
            f"{lm['data']['seq_len']}."
        )
        blocks += ["## Losses by position", told, position_table(results)]
    if study.recall:
        told = (
            f"Multi-query recall at {bytes_text(study.recall.state)} of state, each system at the best of "
            f"{len(study.recall.rates)} rates, {len(study.recall.seeds)} seeds."
        )
        blocks += ["## Recall", told, recall_table(results)]
    blocks += ["## Every run", facts(found), "<details><summary>runs that judge</summary>"]
    blocks += [run_table(results), "</details>"]
    write_atomically(file, "\n\n".join(block for block in blocks if block) + "\n")
    console = Console(emoji=False)
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"tables and pictures in {directory}", markup=False, highlight=False, soft_wrap=True
    )
    return [file, *pictures]


def words(file: Path) -> str:
    """The text between the marks of an earlier report."""
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    kept = re.search(f"{re.escape(BEGIN)}(.*){re.escape(END)}", text, re.DOTALL)
    return BEGIN + (kept[1] if kept else "\n\n") + END
