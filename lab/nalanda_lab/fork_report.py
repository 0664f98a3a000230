"""The estimator of the fork experiment, its verdicts, and the report. Nothing here sees a loss too early."""

import math
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from nalanda.report.figures import COLOURS, GREY, drawing
from nalanda_lab.estimate import Gap, document_variance, holm, paired_gap, signed
from nalanda_lab.fork import STUDY, chosen_rates, code_hashes, load_study, missing, read_records
from nalanda_lab.sweep import Record

Losses = dict[tuple[str, int, str], dict[int, float]]
"""Losses by (mixer, fork, arm), then by seed. A diverged run has none."""
Sentence = tuple[str, str]
"""The name of an outcome, and what is written."""

# ------------------------------ the estimator


def gap_between(losses: Losses, mixer: str, fork: int, first: str, second: str) -> Gap | None:
    """first − second over the seeds that have both; None for fewer than two."""

    def by_seed(arm: str) -> dict[int, float]:
        # The own arm has no fork: it is the trunk's own end.
        return losses.get((mixer, 80 if arm == "own" else fork, arm), {})

    a, b = by_seed(first), by_seed(second)
    seeds = sorted(a.keys() & b.keys())
    if len(seeds) < 2:
        return None
    return paired_gap(np.array([a[s] for s in seeds]), np.array([b[s] for s in seeds]))


def spread(gap: Gap | None) -> float:
    """The standard deviation over seeds of a gap's differences; inf without a gap."""
    from scipy import stats

    if gap is None:
        return math.inf
    return gap.half * math.sqrt(gap.seeds) / float(stats.t.ppf(0.975, gap.seeds - 1))


def signs(gaps: dict[str, Gap | None], level: float) -> dict[str, int]:
    """−1, 0 or 1 of each gap: on which side of 0 it is, by Holm's p over all of them."""
    adjusted = holm({name: gap.p if gap else 1.0 for name, gap in gaps.items()})
    sides = {}
    for name, gap in gaps.items():
        told = gap is not None and adjusted[name] < level
        sides[name] = int(math.copysign(1, gap.mean)) if told and gap else 0
    return sides


def judge(study: dict[str, Any], losses: Losses, fork: int) -> list[Sentence]:
    """The outcomes of a fork with their sentences, by the rule and readings of `fork.yaml`."""
    texts = study["outcomes"]
    control = gap_between(losses, "softmax", 80, "own", "held")
    passed, sentences = judge_control(texts, control)

    judged = [name for name, mixer in study["mixers"].items() if "margin" in mixer]
    own = {name: gap_between(losses, name, fork, "own", "blind") for name in judged}
    free = {name: gap_between(losses, name, fork, "free", "blind") for name in judged}
    own_signs, free_signs = signs(own, study["level"]), signs(free, study["level"])

    admitted = []
    for name in judged:
        noise = spread(gap_between(losses, name, fork, "noise", "own"))
        if fork == 80 or noise < study["noise_limit"]:
            admitted.append(name)
        else:
            facts = {"noise": f"{noise:.4f}", "limit": study["noise_limit"]}
            sentences.append(("too_noisy", texts["too_noisy"].format(mixer=name, **facts)))

    below = [name for name in admitted if own_signs[name] < 0]
    if len(below) == len(judged):
        gaps = ", ".join(f"{write_gap(own[name])} ({name})" for name in below)
        sentences.append(("below_both", texts["below_both"].format(gaps=gaps)))

    for name in admitted:
        outcomes = outcomes_of(
            own[name], own_signs[name], free_signs[name], study["mixers"][name]["margin"], passed
        )
        if len(below) == len(judged):
            outcomes.remove("below_one")  # one sentence names both
        facts = facts_of(own[name], free[name], study["mixers"][name]["margin"])
        sentences += [(each, texts[each].format(mixer=name, **facts)) for each in outcomes]
    return [*sentences, ("any", texts["any"])]


def judge_control(texts: dict[str, str], control: Gap | None) -> tuple[bool, list[Sentence]]:
    """Whether softmax uses ‖q‖ here, and the sentence that says so."""
    if control is None or control.low <= 0 <= control.high:
        outcome = "control_includes_0"
    elif control.low > 0:
        outcome = "control_above_0"
    else:
        outcome = "control_below_0"
    sentence = texts[outcome].format(gap=write_gap(control))
    return outcome == "control_below_0", [(outcome, sentence)]


def outcomes_of(
    own: Gap | None, own_sign: int, free_sign: int, margin: float, control_passed: bool
) -> list[str]:
    """The names of all outcomes that hold for a mixer; `unclear` if no other does."""
    outcomes = []
    if own_sign < 0:
        outcomes.append("below_one")
        if own is not None and own.high < -margin and control_passed:
            outcomes.append("as_published")
    if own_sign > 0:
        outcomes.append("above")

    if own is not None and -margin / 2 < own.low and own.high < margin / 2:
        outcomes.append("within" if control_passed else "within_without_control")
    if own_sign == 0 and free_sign < 0:
        outcomes.append("room")
    return outcomes or ["unclear"]


def facts_of(own: Gap | None, free: Gap | None, margin: float) -> dict[str, str]:
    return {
        "gap": write_gap(own),
        "free": write_gap(free),
        "size": f"{abs(own.mean):.4f}" if own else "",
        "high": signed(own.high, ".4f") if own else "",
        "margin": f"{margin}",
        "half": f"{margin / 2:.4f}",
    }


def write_gap(gap: Gap | None) -> str:
    if gap is None:
        return "without two pairs"
    return f"{signed(gap.mean, '.4f')} [{signed(gap.low, '.4f')}, {signed(gap.high, '.4f')}]"


# ------------------------------ the report


def losses_of(records: dict[str, Record]) -> Losses:
    losses: Losses = {}
    for record in records.values():
        run = record["run"]
        if run["part"] == "trunks" and "failed" not in record:
            by_seed = losses.setdefault((run["mixer"], run["fork"], run["arm"]), {})
            by_seed[run["seed"]] = record["loss"]
    return losses


def report(out: Path, study_file: Path = STUDY) -> bool:
    """Prints the verdicts and draws `fork.png`; False, and no estimate, while a record is missing."""
    study = load_study(study_file)
    records = read_records(out, {"rule": code_hashes(study_file)["rule"]})
    console = Console(width=max(120, Console().width))
    if lacking := missing(study, records):
        total = len(lacking) + len(records)
        print(f"{len(records)} of {total} known runs have a record. No estimate before all have.")
        print("Missing: " + ", ".join(lacking))
        return False

    losses = losses_of(records)
    any_record = next(iter(records.values()))
    facts = any_record["text"]
    print(f"Text: {study['text']} Fingerprint {facts['fingerprint']}.")
    rates = chosen_rates(study, records)
    print("Rates: " + ", ".join(f"{name} {rate:g}" for name, rate in rates.items()))
    for name, record in records.items():
        if "failed" in record:
            print(f"Left out: {name} {record['failed']}")

    console.print(gap_table(study, losses))
    console.print(beside_table(study, records))
    for fork in study["arms"]:
        print(f"\nFork at {fork} %:")
        for outcome, sentence in judge(study, losses, fork):
            print(f"  {outcome}: {sentence.strip()}")
    draw(study, losses, out / "fork.png")
    return True


def contrasts(study: dict[str, Any], mixer: str) -> list[tuple[int, str, str]]:
    """(fork, first arm, second arm) of each gap."""
    last = "held" if mixer == "softmax" else "blind"
    gaps = [(80, "own", last), (50, "own", last)]
    if mixer != "softmax":
        gaps += [(80, "own", "free"), (80, "free", "blind")]
        gaps += [(80, "noise", "own"), (50, "noise", "own")]
    return [gap for gap in gaps if gap[0] in study["arms"]]


def gap_table(study: dict[str, Any], losses: Losses) -> Table:
    titles = ("mixer", "fork", "gap", "seeds", "nats [95 %]", "p", "Holm's p", "sd over seeds")
    table = Table(*titles, title="Gaps, paired by seed")
    judged = [name for name, mixer in study["mixers"].items() if "margin" in mixer]
    for mixer in study["mixers"]:
        for fork, first, second in contrasts(study, mixer):
            gap = gap_between(losses, mixer, fork, first, second)
            family = {name: gap_between(losses, name, fork, first, second) for name in judged}
            adjusted = holm({name: each.p if each else 1.0 for name, each in family.items()})
            in_family = mixer in judged and second == "blind"
            row = [mixer, f"{fork} %", f"{first} − {second}", str(gap.seeds if gap else 0)]
            row += [write_gap(gap), f"{gap.p:.4f}" if gap else ""]
            row += [f"{adjusted[mixer]:.4f}" if in_family else "", f"{spread(gap):.4f}"]
            table.add_row(*row)
    return table


def beside_table(study: dict[str, Any], records: dict[str, Record]) -> Table:
    """Figures without a verdict: spread over documents, and own with frozen p or swapped norms."""
    titles = ("mixer", "own − blind: sd over documents", "frozen − own", "swapped − own")
    table = Table(*titles, title="Beside, without a verdict (fork at 80 %)")
    for mixer in study["mixers"]:
        last = "held" if mixer == "softmax" else "blind"
        own, other = (by_seed(records, mixer, arm) for arm in ("own", last))
        seeds = sorted(own.keys() & other.keys())
        if len(seeds) < 2:
            table.add_row(mixer, "", "", "")
            continue
        a, b = (np.array([each[s]["documents"] for s in seeds]) for each in (own, other))
        tokens = np.array(own[seeds[0]]["document_tokens"])
        error = math.sqrt(document_variance(a, b, tokens))
        plain = np.array([own[s]["loss"] for s in seeds])
        changed = [
            paired_gap(np.array([own[s][name] for s in seeds]), plain).text(5)
            for name in ("frozen", "swapped")
        ]
        table.add_row(mixer, f"{error:.5f}", *changed)
    return table


def by_seed(records: dict[str, Record], mixer: str, arm: str) -> dict[int, Record]:
    """The records of an arm of the fork at 80 % by seed, without diverged ones."""
    found = {}
    for record in records.values():
        run = record["run"]
        wanted = run["part"] == "trunks" and (run["mixer"], run["arm"]) == (mixer, arm)
        if wanted and run["fork"] == 80 and "failed" not in record:
            found[run["seed"]] = record
    return found


def draw(study: dict[str, Any], losses: Losses, file: Path) -> None:
    """Every gap by seed, with its mean and interval; the published gain as a band."""
    caption = (
        "Below 0: the first arm has the lower loss. Pale dots: seeds. Dots and bars: mean and 95 % "
        f"interval. Band: ± half of the published gain; dashes: the whole. {study['text']}"
    )
    title = "Gaps between forks of one trunk that differ in the exponent of NaLa's map"
    with drawing(file, title, caption, len(study["mixers"]), height=2.4) as panels:
        for panel, (mixer, settings) in zip(panels, study["mixers"].items(), strict=True):
            gaps = contrasts(study, mixer)
            for place, (fork, first, second) in enumerate(gaps):
                draw_gap(panel, place, losses, mixer, fork, first, second)
            if margin := settings.get("margin"):
                panel.axhspan(-margin / 2, margin / 2, color=COLOURS[5], alpha=0.15, linewidth=0)
                panel.axhline(-margin, color=GREY, linestyle="--", linewidth=0.8)
            panel.axhline(0, color=GREY, linewidth=0.8)
            names = [f"{first} −\n{second}\n{fork} %" for fork, first, second in gaps]
            panel.set_xticks(range(len(gaps)), names)
            panel.set(title=mixer, ylabel="gap (nats a token)", xlim=(-0.5, len(gaps) - 0.5))


def draw_gap(
    panel: Any, place: int, losses: Losses, mixer: str, fork: int, first: str, second: str
) -> None:
    gap = gap_between(losses, mixer, fork, first, second)
    if gap is None:
        return
    arms = [losses[mixer, 80 if arm == "own" else fork, arm] for arm in (first, second)]
    points = [arms[0][seed] - arms[1][seed] for seed in arms[0].keys() & arms[1].keys()]
    panel.plot([place - 0.15] * len(points), points, "o", color=COLOURS[5], markersize=3)
    panel.errorbar(place, gap.mean, gap.half, fmt="o", color=COLOURS[0], capsize=3, markersize=4)
