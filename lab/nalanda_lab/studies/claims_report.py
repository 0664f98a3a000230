"""Judges the papers' claims from the records of `claims`, draws the figures and writes CLAIMS.md."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from nalanda_eval.report import markdown_table
from rich.console import Console

from nalanda.common.errors import InputError
from nalanda.common.files import write_atomically
from nalanda.common.text import signed
from nalanda.common.versions import list_versions
from nalanda.report.figures import COLOURS, GREY, REFERENCE, Look, drawing, files, log_axis, look
from nalanda_lab.studies.claims import BINS, FULL, QUICK, SCALES, TIMED, WINDOWS, claim_settings
from nalanda_lab.sweep import Record, key, records

# ------------------------------ the checks

VERDICTS = ("reproduces", "does not", "cannot be told")
RULE = (
    "The rule, set in the code before the runs: a check is a mean over units, taken as independent, with its "
    "95 % interval by Student's t. It reproduces if the interval lies on the claimed side of the bound, does "
    "not if it lies on the other side, and cannot be told otherwise. A page reproduces if all its checks do, "
    "does not if one does not, and cannot be told otherwise."
)

CARE = (
    "> **Read with care.** Layers, heads and rows of two seeds count as independent below. With the seed "
    "as the unit (n = 2, our records of 2026-11-23) TransNormer's gradients and PolaFormer's powers "
    "cannot be told either; MALA's page and TransNormer's locality keep their outcomes. The speeds are of "
    "one machine. The text of our records is public-domain and system text in SlimPajama's layout, not "
    "SlimPajama."
)


@dataclass(frozen=True)
class Check:
    """A statement of a paper as a number: the mean of `values` lies `side` `bound`, by `RULE`."""

    says: str
    values: Sequence[float]
    side: str = "below"
    bound: float = 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Mean and half width; the half width is infinite for a single value."""
        from scipy.stats import t

        n = len(self.values)
        half = float(t.ppf(0.975, n - 1)) * stdev(self.values) / n**0.5 if n > 1 else math.inf
        return fmean(self.values), half

    def outcome(self) -> str:
        mean, half = self.interval
        distance = (self.bound - mean) * (1 if self.side == "below" else -1)
        return VERDICTS[0 if distance > half else 1 if -distance > half else 2]

    def cells(self) -> list[str]:
        mean, half = self.interval
        shown = signed(mean, ".3g") + (f" ± {half:.2g}" if math.isfinite(half) else "")
        return [
            self.says,
            shown,
            str(len(self.values)),
            f"{self.side} {self.bound:g}".replace("-", "−"),
            self.outcome(),
        ]


def page_outcome(checks: Sequence[Check]) -> str:
    found = {check.outcome() for check in checks}
    return (
        VERDICTS[1]
        if VERDICTS[1] in found
        else VERDICTS[2]
        if VERDICTS[2] in found
        else VERDICTS[0]
    )


Runs = dict[str, list[Record]]
"""Records by system, in the order of their seeds; "speed" has the speed table's."""


def flat(nested: Any) -> list[float]:
    """All numbers of nested lists, in order."""
    return [x for part in nested for x in flat(part)] if isinstance(nested, list) else [nested]


def by_head(runs: Runs, system: str, name: str) -> list[float]:
    """An entry of `norms` for every seed, layer and head."""
    return flat([[layer[name] for layer in r["norms"]] for r in runs[system]])


def less(a: Sequence[float], b: Sequence[float]) -> list[float]:
    return [x - y for x, y in zip(a, b, strict=True)]


def by_layer(runs: Runs, system: str, name: str) -> list[float]:
    """Means over heads of an entry for every seed and layer."""
    return [fmean(layer) for r in runs[system] for layer in r[name]]


def check_norms(runs: Runs) -> list[Check]:
    each = "a seed, layer and head"
    nala, blind = by_head(runs, "NaLa", "correlation"), by_head(runs, "NaLa", "swapped")
    changed = less(
        flat([r["loss_swapped"] for r in runs["NaLa"]]), flat([r["loss_own"] for r in runs["NaLa"]])
    )
    return [
        Check(f"softmax: ρ(entropy, ‖q‖), {each}", by_head(runs, "softmax", "correlation")),
        Check(f"NaLa: ρ(entropy, ‖q‖), {each}", nala),
        Check(f"NaLa: ρ less ρ with p swapped, {each}", less(nala, blind)),
        Check("NaLa: loss with p swapped less its own, nats, a row and seed", changed, "above"),
        Check(
            f"linear attention, ReLU: ρ less ρ with ‖q‖ swapped, magnitude, {each}",
            [
                abs(x)
                for x in less(
                    by_head(runs, "ReLU", "correlation"), by_head(runs, "ReLU", "swapped")
                )
            ],
            "below",
            0.01,
        ),
    ]


def check_signs(runs: Runs) -> list[Check]:
    def shares(name: str) -> list[float]:
        return [layer["negative"][place(r)] for r in runs[name] for layer in r["signs"]]

    def place(r: Record) -> int:  # the last row within the training length
        return max(i for i, t in enumerate(r["rows"]) if t <= r["settings"]["data"]["seq_len"])

    def growth(name: str) -> list[float]:
        return [
            math.log(
                x["norm"][-1] / x["norm"][place(r) - 1], r["rows"][-1] / r["rows"][place(r) - 1]
            )
            for r in runs[name]
            for x in r["signs"]
        ]

    return [
        Check(
            "as printed: negative share of the last row within the training length, a seed and layer",
            shares("MALA, literal"),
            "below",
            0.001,
        ),
        Check("as released: the same share", shares("MALA"), "below", 0.001),
        Check(
            "as printed: exponent a of ‖w‖₁ ~ t^a beyond half the training length, magnitude",
            [abs(x) for x in growth("MALA, literal")],
            "below",
            0.1,
        ),
        Check("as released: the same exponent", [abs(x) for x in growth("MALA")], "below", 0.1),
    ]


def check_gradients(runs: Runs) -> list[Check]:
    def late(name: str) -> list[float]:  # the first quarter has the warm-up
        return [
            fmean(map(math.log, layer[len(layer) // 4 :]))
            for r in runs[name]
            for layer in r["gradients"]
        ]

    each = "log RSD, mean over training after its first quarter, a seed and layer"
    return [
        Check(f"1 + ELU less softmax: {each}", less(late("1+ELU"), late("softmax")), "above"),
        Check("NormAttention less 1 + ELU: the same", less(late("NormAttention"), late("1+ELU"))),
        Check("TransNormer T2 less 1 + ELU: the same", less(late("TransNormer T2"), late("1+ELU"))),
    ]


def local(runs: Runs, name: str, layer: int, point: int = -1) -> list[float]:
    """Local score at a tenth of the length, by seed."""
    return [r["checkpoints"][point]["local"][layer][WINDOWS.index(0.1)] for r in runs[name]]


def check_local(runs: Runs) -> list[Check]:
    def both(name: str) -> list[float]:
        return local(runs, name, 0) + local(runs, name, 1)

    return [
        Check(
            "1 + ELU less softmax: score within T/10, a seed and layer",
            less(both("1+ELU"), both("softmax")),
        ),
        Check(
            "TransNormer T2 less 1 + ELU: the same, first layer, a seed",
            less(local(runs, "TransNormer T2", 0), local(runs, "1+ELU", 0)),
            "above",
        ),
    ]


def speedups(runs: Runs, length: str, kind: str, name: str) -> list[float]:
    """CPU seconds of softmax over those of `name`, by round."""
    seconds = runs["speed"][0]["cpu_seconds"][length][kind]
    return [a / b for a, b in zip(seconds["softmax"], seconds[name], strict=True)]


def check_speed(runs: Runs) -> list[Check]:
    lengths = list(runs["speed"][0]["cpu_seconds"])
    within = [t for t in lengths if 1024 <= int(t) <= 5000] or lengths
    return [
        Check(
            f"T2 against softmax, {kind}, T = {t}: log of the speed ratio, a round",
            [math.log(x) for x in speedups(runs, t, kind, "TransNormer T2")],
            "above",
        )
        for kind in ("forward", "training")
        for t in within
    ]


def check_newton(runs: Runs) -> list[Check]:
    def worst(kind: str, measure: str) -> list[float]:
        return [
            math.log10(max(matrix))
            for r in runs["SOFT"]
            for layers in zip(*(point["newton"] for point in r["checkpoints"]), strict=True)
            for matrix in zip(*(layer[kind][measure] for layer in layers), strict=True)
        ]

    return [
        Check(
            f"{kind} landmarks: log₁₀ of {formula}, worst of training, a seed, layer and matrix",
            worst(kind, measure),
            "below",
            -2,
        )
        for kind in ("learnt", "pooled")
        for measure, formula in (("weighted", "‖AYA − A‖/‖A‖"), ("inverse", "‖I − YA‖₂"))
    ]


def check_pola(runs: Runs) -> list[Check]:
    pola = by_layer(runs, "PolaFormer", "below_uniform")
    flat_powers = by_layer(runs, "PolaFormer", "below_uniform_p1")
    each = "nats below log n, a seed and layer"
    return [
        Check(
            f"PolaFormer less linear attention with ReLU: {each}",
            less(pola, by_layer(runs, "ReLU", "below_uniform")),
            "above",
        ),
        Check(
            f"PolaFormer less linear attention with 1 + ELU: {each}",
            less(pola, by_layer(runs, "1+ELU", "below_uniform")),
            "above",
        ),
        Check(
            "PolaFormer less itself with all exponents 1: the same",
            less(pola, flat_powers),
            "above",
        ),
    ]


# ------------------------------ the figures

Draw = Callable[[Any, Runs], None]


# A system has the same colour in all figures; what only a dash and a marker tell apart are its variants.
LOOKS: dict[str, Look] = {
    "softmax": look(0),
    "1+ELU": look(1),
    "NaLa": look(2),
    "NaLa, ‖q‖ unscaled": look(9),
    "NaLa, p swapped": look(16),
    "MALA": look(3),
    "MALA, untrained": look(10),
    "MALA, literal": look(6),
    "MALA, literal, untrained": look(13),
    "NormAttention": look(4),
    "TransNormer T2": look(5),
}


def draw_line(
    axes: Any, x: Sequence[float], by_run: Sequence[Sequence[float]], label: str, of: Look
) -> None:
    """The mean over runs with a band over their range."""
    low, mean, high = (list(map(f, zip(*by_run, strict=True))) for f in (min, fmean, max))
    axes.plot(x, mean, label=label, **of)
    axes.fill_between(x, low, high, color=of["color"], alpha=0.12, lw=0)


def draw_norms(axes: Any, runs: Runs) -> None:
    def heads(record: Record, name: str) -> list[float]:  # means over layers and heads
        return [
            fmean(c)
            for c in zip(*(h for layer in record["norms"] for h in layer[name]), strict=True)
        ]

    curves = [
        (name, "bins", name) for name in ("softmax", "1+ELU", "NaLa", "NaLa, ‖q‖ unscaled", "MALA")
    ]
    for name, bins, label in [*curves, ("NaLa", "bins_swapped", "NaLa, p swapped")]:
        groups = [heads(r, bins) for r in runs[name]]
        draw_line(
            axes[0],
            range(1, BINS + 1),
            [[x - fmean(g) for x in g] for g in groups],
            label,
            LOOKS[label],
        )
        if bins == "bins":
            scaled = [
                [
                    fmean(x for layer in r["norms"] for x in layer["scaled"][j])
                    for j in range(len(SCALES))
                ]
                for r in runs[name]
            ]
            draw_line(
                axes[1],
                SCALES,
                [[x - s[SCALES.index(1.0)] for x in s] for s in scaled],
                label,
                LOOKS[label],
            )
    axes[0].set(title="as trained", xlabel="tokens of a row and head by rising ‖q‖ (eighths)")
    axes[0].set_ylabel("entropy less its mean (nats)")
    axes[1].set(title="directions and keys kept", xlabel="factor of all ‖q‖ (ratio)")
    axes[1].set_ylabel("entropy less that at factor 1 (nats)")
    ticks = [sign * tick for tick in (0.05, 0.1, 0.5, 1) for sign in (-1, 1)]
    axes[0].set_xticks(range(1, BINS + 1))
    for panel in axes:  # softmax moves ten times as far as the others
        panel.set_yscale("symlog", linthresh=0.1)
        panel.set_yticks([0, *ticks], [f"{tick:g}".replace("-", "−") for tick in (0, *ticks)])
        panel.minorticks_off()
    log_axis(axes[1].xaxis, SCALES)


def draw_signs(axes: Any, runs: Runs) -> None:
    form = {"MALA": "as released", "MALA, literal": "as printed"}
    names = [(name, when) for name in form for when in ("signs", "untrained")]
    for panel, what in zip(axes, ("negative", "norm"), strict=True):
        length = runs["MALA"][0]["settings"]["data"]["seq_len"]
        panel.axvline(length, **REFERENCE, lw=0.8, label="training length")
        for name, when in names:
            scale, untrained = (
                100 if what == "negative" else 1,
                ", untrained" if when == "untrained" else "",
            )
            rows = [
                [scale * fmean(x[what][j] for x in r[when]) for j in range(len(r["rows"]))]
                for r in runs[name]
            ]
            draw_line(
                panel, runs[name][0]["rows"], rows, form[name] + untrained, LOOKS[name + untrained]
            )
        panel.set(xlabel="position t of the row (tokens)")
        log_axis(panel.xaxis, runs["MALA"][0]["rows"][::2])
    axes[0].set(ylabel="negative weights of the row (%)", ylim=(0, None))
    log_axis(axes[1].yaxis)
    axes[1].set(ylabel="‖w‖₁ of the row (sum of magnitudes)")


def draw_gradients(axes: Any, runs: Runs) -> None:
    for layer, panel in enumerate(axes):
        for name in ("softmax", "1+ELU", "NormAttention", "TransNormer T2"):
            window = runs[name][0]["settings"]["window"]
            found = [r["gradients"][layer] for r in runs[name]]
            draw_line(
                panel, [window * (j + 0.5) for j in range(len(found[0]))], found, name, LOOKS[name]
            )
        panel.set(xlabel="training (steps)", title=f"layer {layer + 1}")
        panel.set_ylabel("RSD of gradient norms in windows (ratio)")
        log_axis(panel.yaxis)


def draw_local(axes: Any, runs: Runs) -> None:
    narrow = [w for w in WINDOWS if w <= 0.5]  # beyond, all scores near 1
    for name in ("softmax", "1+ELU", "NormAttention", "TransNormer T2"):
        scores = [r["checkpoints"][-1]["local"][0][: len(narrow)] for r in runs[name]]
        draw_line(axes[0], narrow, scores, name, LOOKS[name])
        steps = [point["step"] for point in runs[name][0]["checkpoints"]]
        by_run = list(zip(*(local(runs, name, 0, j) for j in range(len(steps))), strict=True))
        draw_line(axes[1], steps, by_run, name, LOOKS[name])
    T = runs["softmax"][0]["settings"]["data"]["seq_len"]
    even = [[min(t, math.floor(w * T + 1e-9) + 1) / t for t in range(1, T + 1)] for w in narrow]
    axes[0].plot(narrow, list(map(fmean, even)), **REFERENCE, label="equal weights")
    axes[0].set(xlabel="window (share of the length)", title="layer 1, trained")
    axes[1].set(xlabel="training (steps)", title="layer 1, window of a tenth")
    for panel in axes:
        panel.set(ylabel="accumulated score (share)", ylim=(0, 1.02))


def draw_speed(axes: Any, runs: Runs) -> None:
    lengths = list(runs["speed"][0]["cpu_seconds"])
    for panel, kind in zip(axes, ("forward", "training"), strict=True):
        panel.axhline(1, **LOOKS["softmax"] | {"marker": ""}, label="softmax")
        for name in TIMED[1:]:
            found = list(zip(*(speedups(runs, t, kind, name) for t in lengths), strict=True))
            draw_line(panel, list(map(int, lengths)), found, name, LOOKS[name])
        log_axis(panel.xaxis, map(int, lengths))
        log_axis(panel.yaxis)
        panel.set(
            xlabel="length T (tokens)",
            ylabel="speed (multiples of softmax's)",
            title="forward" if kind == "forward" else "forward + backward",
        )


def draw_newton(axes: Any, runs: Runs) -> None:
    for i, kind in enumerate(("learnt", "pooled")):
        points = [
            (p["step"], layer[kind])
            for r in runs["SOFT"]
            for p in r["checkpoints"]
            for layer in p["newton"]
        ]
        for j, measure in enumerate(("inverse", "weighted")):
            style = look(2 * j + i) | {"linestyle": "", "markersize": 3, "zorder": 4 - i}
            label = f"{('‖I − YA‖₂', '‖AYA − A‖/‖A‖')[j]}, {kind}"
            x, y = flat([p["ratio"] for _, p in points]), flat([p[measure] for _, p in points])
            axes[0].plot(x, y, **style)
            steps = sorted({step for step, _ in points})
            worst = [[max(p[measure]) for step, p in points if step == s] for s in steps]
            draw_line(axes[1], steps, list(zip(*worst, strict=True)), label, look(2 * j + i))
    ratio = [10 ** (k / 20) for k in range(20, 121)]
    theory = [max((1 - r**-2) ** (2**20), 1e-16) for r in ratio]
    shown = [(r, t) for r, t in zip(ratio, theory, strict=True) if t > 1e-7]
    axes[0].plot(*zip(*shown, strict=True), **REFERENCE, label="theory, ‖I − YA‖₂")
    for panel in axes:
        panel.axhline(1e-2, color=GREY, linewidth=0.8, linestyle=":", label="bound of the check")
        log_axis(panel.yaxis)
        panel.set_ylabel("residual after 20 iterations (ratio)")
    log_axis(axes[0].xaxis)
    axes[0].set(xlabel="‖A‖₁/σ_min (ratio)", title="every matrix")
    axes[1].set(xlabel="training (steps)", title="worst head, by layer and seed")


def draw_pola(axes: Any, runs: Runs) -> None:
    kinds = (
        ("softmax", "below_uniform"),
        ("1+ELU", "below_uniform"),
        ("ReLU", "below_uniform"),
        ("PolaFormer", "below_uniform_p1"),
        ("PolaFormer", "below_uniform"),
    )
    names = [name + (", exponents 1" if what.endswith("p1") else "") for name, what in kinds]
    for layer, panel in enumerate(axes):
        for i, (name, what) in enumerate(reversed(kinds)):  # the first is at the top
            heads = flat([r[what][layer] for r in runs[name]])
            panel.plot(heads, [i] * len(heads), "o", color=COLOURS[5])
            panel.plot(fmean(heads), i, "D", color=COLOURS[1], markersize=6)
        panel.set(
            xlabel="entropy below log n (nats; right: spikier)",
            title=f"layer {layer + 1}",
            xlim=(0, None),
        )
        panel.set_yticks(range(len(names)), names[::-1] if layer == 0 else [""] * len(names))
        panel.set_ylim(-0.5, len(names) - 0.5)


# ------------------------------ the pages

SEEDS = "Lines: means over n = {n} seeds ({seeds}). Bands: range over seeds."


@dataclass(frozen=True)
class Page:
    """A claim: what the paper says and what was measured, the checks, the figure and its caption."""

    title: str
    paper: str
    measured: str
    check: Callable[[Runs], list[Check]]
    draw: Draw
    needs: tuple[str, ...]
    shows: str = SEEDS


PAGES = {
    "nalaformer": Page(
        "NaLaFormer: entropy falls as the query's norm grows",
        "Softmax attention is spikier for longer queries, linear attention loses that because its "
        "denominator cancels ‖q‖, and NaLa's exponent p(‖q‖) restores it (arXiv 2506.21137, figures 2 and "
        "3).",
        "Spearman's ρ of a token's entropy (less log n, second half of each row) and its ‖q‖, in each "
        "head; the same with every norm swapped for that of the token at the same position of another row, "
        "direction and keys kept; the loss so; and the entropy with all norms multiplied. A negative ρ "
        "that survives the swap comes from directions, not from norms.",
        check_norms,
        draw_norms,
        ("softmax", "1+ELU", "ReLU", "NaLa", "NaLa, ‖q‖ unscaled", "MALA"),
        SEEDS + " Heights are linear between −0.1 and 0.1 and logarithmic beyond.",
    ),
    "mala": Page(
        "MALA: no negative weights, and a scale that does not depend on the length",
        "Weights β φ(q)·φ(k) − γ sum to 1; the paper saw no negative ones (arXiv 2507.00698). Its released "
        "code scales the similarity by K^-½/t, which the paper does not print.",
        "The share of negative weights and ‖w‖₁ by position on long rows, for the formula as printed and as "
        "released, each trained so, and untrained.",
        check_signs,
        draw_signs,
        ("MALA", "MALA, literal"),
    ),
    "transnormer_gradients": Page(
        "TransNormer: gradients of linear attention fluctuate, and NormAttention steadies them",
        "The denominator makes gradients unbounded: their relative standard deviation (RSD) over training is "
        "larger for 1 + ELU than for softmax attention, and lower for NormAttention than for 1 + ELU (arXiv "
        "2210.10340).",
        "The norm of the loss's gradient in each layer's mixer at every step, before clipping; its standard "
        "deviation over its mean in windows of {window} steps.",
        check_gradients,
        draw_gradients,
        ("softmax", "1+ELU", "NormAttention", "TransNormer T2"),
    ),
    "transnormer_local": Page(
        "TransNormer: linear attention dilutes, blocks in early layers concentrate",
        "Linear attention spreads its scores over the whole sequence even in early layers, softmax attention "
        "does not; DiagAttention brings locality back (arXiv 2210.10340, figure 2).",
        "The locally accumulated score, the share of a row's |weights| within a window of its token, at "
        "several points of training. The paper's models are bidirectional, these are causal.",
        check_local,
        draw_local,
        ("softmax", "1+ELU", "NormAttention", "TransNormer T2"),
    ),
    "transnormer_speed": Page(
        "TransNormer: faster than softmax attention, on a CPU",
        "Its speed table has it ahead of the vanilla transformer in inference and training at every length "
        "from 1 K to 5 K, on GPUs (arXiv 2210.10340).",
        "CPU seconds of one thread, forward and forward with backward, of one row through two layers; the "
        "systems take turns in one process. Softmax attention is torch's fused kernel, the others are torch "
        "operations.",
        check_speed,
        draw_speed,
        ("speed",),
        "Lines: means over n = {rounds} rounds. Bands: range over "
        "rounds. Weights as drawn with one seed.",
    ),
    "soft": Page(
        "SOFT: 20 Newton iterations invert the landmarks' matrix",
        "The Moore–Penrose inverse of A = κ(Z, Z) comes from 20 Newton–Raphson iterations, without a ridge "
        "(arXiv 2110.11945).",
        "A model that trains through this inverse (ρ = 0, 32 learnt landmarks, A₀ = A/‖A‖₁²). At several "
        "points of training: the residuals of the learnt landmarks, and of 64 landmarks pooled from the "
        "queries of a row by 4 tokens, as the paper pools them, against ‖A‖₁/σ_min. ‖AYA − A‖/‖A‖ forgives "
        "what is missing in A's smallest directions, ‖I − YA‖₂ does not.",
        check_newton,
        draw_newton,
        ("SOFT",),
        "Left: a marker for each layer, matrix, seed and checkpoint, as on the right. Right: lines: means, "
        "bands: range, over layers and n = {n} seeds ({seeds}).",
    ),
    "polaformer": Page(
        "PolaFormer: powers above 1 lower the entropy of linear attention",
        "Powers above 1 of the sign-split features make weights spikier than those of earlier linear "
        "attention (arXiv 2501.15061); its theorem says that such functions exist.",
        "Nats below log n, the entropy of equal weights, in the second half of each row, by head; PolaFormer "
        "also with its exponents set to 1 after training.",
        check_pola,
        draw_pola,
        ("softmax", "1+ELU", "ReLU", "PolaFormer"),
        "Dots: a head of one of n = {n} seeds ({seeds}); PolaFormer's have two streams. Diamonds: means.",
    ),
}


FOUND = dict(zip(VERDICTS, ("Reproduced", "Not reproduced", "Cannot be told"), strict=True))


def draw_page(name: str, page: Page, outcome: str, runs: Runs, directory: Path) -> list[Path]:
    asked = [r["settings"] for r in runs[page.needs[0]]]
    seeds = ", ".join(str(settings.get("seed")) for settings in asked)
    caption = page.shows.format(n=len(asked), rounds=asked[0].get("rounds"), seeds=seeds)
    file = directory / name
    with drawing(file, f"{FOUND[outcome]}. {page.title}", caption, 2, height=2.6) as axes:
        page.draw(axes, runs)
    return files(file)


def words_of(name: str, before: str) -> str:
    """A page's kept words, between its marks in an earlier CLAIMS.md."""
    begin, end = (
        f"<!-- words on {name}: kept by `nalanda study claims` -->",
        f"<!-- end of words on {name} -->",
    )
    kept = re.search(f"{re.escape(begin)}(.*){re.escape(end)}", before, re.DOTALL)
    return begin + (kept[1] if kept else "\n\n") + end


def speed_table(runs: Runs) -> str:
    seconds = runs["speed"][0]["cpu_seconds"]
    lines = []
    for kind in ("forward", "training"):
        for t in seconds:
            ratios = [
                f"{math.exp(fmean(map(math.log, speedups(runs, t, kind, n)))):.2f}×"
                for n in TIMED[1:]
            ]
            lines.append([kind, t, f"{1e3 * min(seconds[t][kind]['softmax']):.1f} ms", *ratios])
    return markdown_table(["", "T", "softmax, best", *TIMED[1:]], lines, left=1)


def report_claims(directory: Path, *, quick: bool = False) -> list[Path]:
    """Draws the figures and writes CLAIMS.md from claims.jsonl, keeping the words between the marks.

    Records with settings other than those of the size are not counted, and a page that lacks records is left
    out. Returns the files. Raises InputError without records.
    """
    runs: Runs = {}
    found = records(directory / "claims.jsonl")
    for settings in claim_settings(QUICK if quick else FULL):  # by rising seed
        if record := found.get(key(settings)):
            runs.setdefault(settings.get("system", "speed"), []).append(record)
    if not runs:
        raise InputError(
            f"{directory / 'claims.jsonl'}: no record of {'--quick' if quick else 'this size'}"
        )
    file = directory / "CLAIMS.md"
    before = file.read_text(encoding="utf-8") if file.is_file() else ""
    written, blocks, summary = [], [], []
    for name, page in PAGES.items():
        if (
            len({len(runs.get(system, ())) for system in page.needs}) > 1
            or page.needs[0] not in runs
        ):
            continue
        checks = page.check(runs)
        said = page_outcome(checks)
        summary.append([f"[{page.title}](#{name})", f"**{said}**"])
        written += draw_page(name, page, said, runs, directory)
        first = runs[page.needs[0]][0]["settings"]
        blocks += [
            f'<a id="{name}"></a>\n\n## {page.title}: {said}',
            f"**The paper.** {page.paper}",
            f"**Measured.** {page.measured.format(window=first.get('window'))}",
            f"![{page.title}]({name}.png)",
            markdown_table(
                ["check", "mean, 95 % interval", "n", "claimed", "outcome"],
                [c.cells() for c in checks],
                1,
            ),
            *([speed_table(runs)] if name == "transnormer_speed" else []),
            "**Why.** " + words_of(name, before),
        ]
    head = [
        CARE,
        "# The papers' other claims, on small trained models",
        markdown_table(["claim", "outcome"], summary, 2),
    ]
    text = "\n\n".join([*head, RULE, setting_of(runs), *blocks]) + "\n"
    write_atomically(file, text)
    Console(emoji=False).print(
        f"{file} and its figures", markup=False, highlight=False, soft_wrap=True
    )
    return [file, *written]


def setting_of(runs: Runs) -> str:
    """A paragraph on the models, the text and the machine."""
    trained = [r for name, rs in runs.items() if name != "speed" for r in rs]
    some = (trained or runs["speed"])[0]
    parts = [f"{sum(len(rs) for rs in runs.values())} records"]
    if trained:
        asked, text = some["settings"], some["text"]
        m, t = asked["model"], asked["train"]
        losses = ", ".join(
            f"{n} {fmean(r['training_loss'] for r in rs):.2f}"
            for n, rs in runs.items()
            if n != "speed"
        )
        parts = [
            f"Models of {m['num_hidden_layers']} layers of {m['hidden_size']}, {m['num_heads']} heads, "
            f"sinusoidal positions and no short convolutions, trained for {t['steps']} steps of "
            f"{t['tokens_per_step']} tokens (rows of {asked['data']['seq_len']}, vocabulary "
            f"{text['vocab_size']}) of {text['name']}, seeds "
            f"{', '.join(str(s) for s in sorted({r['settings']['seed'] for r in trained}))}; they stand at "
            f"the beginning of training. Training loss at the end, nats: {losses}. Weights are measured on "
            f"{asked['rows']} rows of held-out text"
        ]
    known = list_versions(r["versions"] for rs in runs.values() for r in rs)
    cpus = ", ".join(sorted({r["cpu"] for rs in runs.values() for r in rs}))
    return f"{parts[0]}. {cpus}, {some['threads']} thread; {known}."
