"""The records of the first fork experiment in the tables of lab/pages/study.md.

    python -m nalanda_lab.fork_levels lab/records/fork.tar.xz --draw lab/pages/fork.png

It reads the losses and exponents alone, whatever hash of a rule the records name, and gives no verdict.
"""

import argparse
import json
import math
import tarfile
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from nalanda.compare.verdict import Gap
from nalanda.config.load import read_yaml
from nalanda.report.figures import COLOURS, GREY, drawing
from nalanda_lab.estimate import half_width, signed, write_gap
from nalanda_lab.fork import FIRST
from nalanda_lab.fork2_report import gap_of_pair, losses_of
from nalanda_lab.sweep import Record

MIXERS = {"deltanet": "DeltaNet", "gated_deltanet": "Gated DeltaNet", "nala": "NaLa's block"}
GAPS = [  # (fork, first arm, second arm); own of both forks is the trunk's own end
    (80, "own", "blind"),
    (80, "own", "free"),
    (80, "free", "blind"),
    (50, "own", "blind"),
    (50, "noise", "own"),
]
DRAWN = [
    *((80, "own", "blind"), (50, "own", "blind"), (80, "own", "free"), (80, "free", "blind")),
    *((80, "noise", "own"), (50, "noise", "own")),
]
CONTROL = [(80, "own", "held"), (50, "own", "held")]
MOST = 10
"""The documents whose share of a gap is told."""
DIGITS = 5
POWER = 2.0
"""λ of the map `nala`, whose p is λ(½ + tanh m)."""


def read_tar(file: Path) -> dict[str, Record]:
    """The records of a compressed folder by name."""
    records = {}
    with tarfile.open(file) as tar:
        for member in tar:
            if opened := member.name.endswith(".json") and tar.extractfile(member):
                records[Path(member.name).stem] = json.loads(opened.read())
    return records


def arm(records: dict[str, Record], mixer: str, name: str, fork: int) -> dict[int, Record]:
    """The records of an arm by seed."""
    place = (mixer, name, 80 if name == "own" else fork)
    runs = [record for record in records.values() if record["run"]["part"] == "trunks"]
    own = [r for r in runs if (r["run"]["mixer"], r["run"]["arm"], r["run"]["fork"]) == place]
    return {record["run"]["seed"]: record for record in own if "failed" not in record}


def gap(records: dict[str, Record], mixer: str, fork: int, first: str, second: str) -> Gap:
    trunks = {name: each for name, each in records.items() if each["run"]["part"] == "trunks"}
    between = gap_of_pair(losses_of(trunks), mixer, fork, [first, second])
    assert between is not None
    return between


def row(title: str, cells: list[str]) -> str:
    return f"| {title} | {' | '.join(cells)} |"


def gap_rows(records: dict[str, Record]) -> list[str]:
    """Every gap in nats a token with its 95 % interval, and p frozen or lengths swapped in the own arm."""
    rows = [
        row(
            f"{a} − {b}, {fork} %", [write_gap(gap(records, m, fork, a, b), DIGITS) for m in MIXERS]
        )
        for fork, a, b in GAPS
    ]
    for name, title in (("frozen", "p frozen at its mean"), ("swapped", "lengths swapped")):
        costs = []
        for mixer in MIXERS:
            runs = arm(records, mixer, "own", 80).values()
            costs.append(signed(fmean(r[name] - r["loss"] for r in runs), ".5f"))
        rows.append(row(f"own, {title}", costs))
    return rows


def level_rows(records: dict[str, Record], fork: int = 50) -> list[str]:
    """The mean p over heads and seeds at the fork and at the end, with blind's drift and its spread over seeds."""
    rows = []
    for mixer, title in MIXERS.items():
        blind, own = arm(records, mixer, "blind", fork), arm(records, mixer, "own", fork)
        seeds = sorted(blind.keys() & own.keys())
        at_fork = np.array([np.mean(blind[seed]["means_at_fork"]) for seed in seeds])
        learnt = np.array([learnt_level(blind[seed]) for seed in seeds])
        ends = np.array([np.mean(own[seed]["means_at_end"]) for seed in seeds])
        drift = learnt - at_fork
        cells = [f"{at_fork.mean():.2f}", f"{learnt.mean():.2f}", f"{ends.mean():.2f}"]
        cells.append(f"{signed(float(drift.mean()), '.2f')} ± {drift.std(ddof=1):.2f}")
        rows.append(row(title, cells))
    return rows


def learnt_level(record: Record) -> float:
    """The mean over heads of the p that blind has learnt."""
    return float(
        np.mean([POWER * (0.5 + math.tanh(m)) for layer in record["learnt"] for m in layer["m"]])
    )


def own_exponents(records: dict[str, Record], mixer: str) -> list[float]:
    """The mean p of each head at the end of the own arms."""
    runs = arm(records, mixer, "own", 80).values()
    return [p for record in runs for layer in record["means_at_end"] for p in layer]


def softmax_rows(records: dict[str, Record]) -> list[str]:
    """Loss of softmax's own arm by seed, and own − held at both forks."""
    own, at_80, at_50 = (
        arm(records, "softmax", name, fork)
        for name, fork in (("own", 80), ("held", 80), ("held", 50))
    )
    rows = []
    for seed in sorted(own):
        loss = own[seed]["loss"]
        gaps = [signed(loss - held[seed]["loss"], ".4f") for held in (at_80, at_50)]
        rows.append(row(str(seed), [f"{loss:.3f}", *gaps]))
    return rows


def shares(records: dict[str, Record]) -> str:
    """Whether softmax's differences are those of few documents."""
    own, held = (arm(records, "softmax", name, 80) for name in ("own", "held"))
    sums = {seed: np.array(own[seed]["documents"]) for seed in own}
    gaps = np.mean([sums[seed] - np.array(held[seed]["documents"]) for seed in own], axis=0)
    best, worst = (pick(own, key=lambda s: own[s]["loss"]) for pick in (min, max))
    between = sums[worst] - sums[best]
    losses = [own[seed]["loss"] for seed in own]
    return (
        f"softmax: sd over seeds {np.std(losses, ddof=1):.3f}; {MOST} of "
        f"{int(np.sum(np.array(own[best]['document_tokens']) > 0))} documents have {share(gaps)} % of own − held "
        f"and {share(between)} % of seed {worst} less seed {best}"
    )


def share(sums: np.ndarray) -> int:
    return round(100 * float(np.sort(sums)[-MOST:].sum() / sums.sum()))


def report(records: dict[str, Record]) -> str:
    softmax = [write_gap(gap(records, "softmax", fork, "own", "held"), DIGITS) for fork in (80, 50)]
    parts: list[Any] = [
        gap_rows(records),
        level_rows(records),
        softmax_rows(records),
        [row("own − held, 80 %; 50 %", softmax), shares(records)],
    ]
    for mixer, title in MIXERS.items():
        ps = own_exponents(records, mixer)
        parts[-1].append(
            f"{title}: heads of the own arms end at a mean p of {min(ps):.2f} to {max(ps):.2f}"
        )
    return "\n\n".join("\n".join(part) for part in parts)


def draw(records: dict[str, Record], study: dict[str, Any], file: Path) -> None:
    """Every gap by seed, with its mean and interval; the published gain as a band."""
    caption = (
        "Below 0: the first arm has the lower loss. Pale dots: seeds. Dots and bars: mean and 95 % "
        f"interval. Band: ± half of the published gain; dashes: the whole. {study['text']}"
    )
    title = "Gaps between forks of one trunk that differ in the exponent of NaLa's map"
    with drawing(file, title, caption, len(study["mixers"]), height=2.4) as panels:
        for panel, (mixer, settings) in zip(panels, study["mixers"].items(), strict=True):
            drawn = CONTROL if mixer == "softmax" else DRAWN
            for place, contrast in enumerate(drawn):
                each = gap(records, mixer, *contrast)
                points, half = each.differences, half_width(each)
                panel.plot(
                    [place - 0.15] * len(points), points, "o", color=COLOURS[5], markersize=3
                )
                panel.errorbar(
                    place, each.mean, half, fmt="o", color=COLOURS[0], capsize=3, markersize=4
                )
            if margin := settings.get("margin"):
                panel.axhspan(-margin / 2, margin / 2, color=COLOURS[5], alpha=0.15, linewidth=0)
                panel.axhline(-margin, color=GREY, linestyle="--", linewidth=0.8)
            panel.axhline(0, color=GREY, linewidth=0.8)
            names = [f"{first} −\n{second}\n{fork} %" for fork, first, second in drawn]
            panel.set_xticks(range(len(drawn)), names)
            panel.set(title=mixer, ylabel="gap (nats a token)", xlim=(-0.5, len(drawn) - 0.5))


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the first fork's gaps, levels and control.")
    parser.add_argument("records", type=Path, help="lab/records/fork.tar.xz")
    parser.add_argument("--draw", type=Path, help="also draw every gap by seed")
    arguments = parser.parse_args()
    records = read_tar(arguments.records)
    print(report(records))
    if arguments.draw:
        draw(records, read_yaml(FIRST), arguments.draw)


if __name__ == "__main__":
    main()
