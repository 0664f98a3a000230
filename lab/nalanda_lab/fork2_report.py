"""The estimator of the second fork experiment, its sentences, and the report. It prints no loss too early."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from nalanda.common.versions import list_versions
from nalanda.compare.verdict import Gap, holm, pair_gap
from nalanda_lab import estimate
from nalanda_lab.estimate import half_width, signed
from nalanda_lab.fork import SECOND, hash_files, load_study, missing, read_records
from nalanda_lab.sweep import Record

Losses = dict[tuple[str, int, str], dict[int, float]]
"""Losses by (mixer, fork, arm), then by seed. A diverged run has none."""
Sentence = tuple[str, str]
"""The name of an outcome, and what is written."""
Gaps = dict[str, Gap | None]
"""Contrasts of a mixer and fork by name; None for fewer than two seeds."""
DIGITS = 5

# ------------------------------ the estimator


def judged_mixers(study: dict[str, Any]) -> list[str]:
    """The mixers of the contrasts; the others stand apart."""
    return [name for name, mixer in study["mixers"].items() if "published" in mixer]


def judged_forks(study: dict[str, Any]) -> list[int]:
    return [fork for fork, arms in study["arms"].items() if "nala" in arms]


def losses_by_seed(losses: Losses, mixer: str, fork: int, arm: str) -> dict[int, float]:
    """The losses of an arm. own is the trunk's end, whichever fork its record names."""
    merged: dict[int, float] = {}
    for (its_mixer, its_fork, its_arm), by_seed in losses.items():
        if (its_mixer, its_arm) == (mixer, arm) and (arm == "own" or its_fork == fork):
            merged |= by_seed
    return merged


def gaps_of_pairs(losses: Losses, mixer: str, fork: int, pairs: dict[str, list[str]]) -> Gaps:
    """The first arm less the second of each pair, all over the seeds that have every arm named."""
    arms = {arm for pair in pairs.values() for arm in pair}
    by_arm = {arm: losses_by_seed(losses, mixer, fork, arm) for arm in arms}
    seeds = sorted(set.intersection(*map(set, by_arm.values())))
    if len(seeds) < 2:
        return dict.fromkeys(pairs)

    values = {arm: [by_seed[seed] for seed in seeds] for arm, by_seed in by_arm.items()}
    return {name: pair_gap(a, b, values[a], values[b]) for name, (a, b) in pairs.items()}


def gap_of_pair(losses: Losses, mixer: str, fork: int, pair: list[str]) -> Gap | None:
    return gaps_of_pairs(losses, mixer, fork, {"": pair})[""]


def norm_ps(study: dict[str, Any], gaps: dict[str, Gaps]) -> dict[tuple[str, str], float]:
    """Holm's p of the tests of the norm at a fork, by (mixer, contrast). gaps: by mixer."""
    tests = {
        (mixer, name): gap.p if (gap := by_name[name]) else 1.0
        for mixer, by_name in gaps.items()
        for name in study["norms"]
    }
    ordered = sorted(tests, key=tests.__getitem__)
    return dict(zip(ordered, holm([tests[test] for test in ordered]), strict=True))


# ------------------------------ sentences


def judge(study: dict[str, Any], losses: Losses, bits: float) -> list[Sentence]:
    """The sentences by the rule and readings of `fork2.yaml`. bits: bits a byte of one nat a token."""
    answers, control = judge_control(study, losses)
    if not answers:
        return [control]

    texts = study["outcomes"]
    sentences = [control]
    for fork in judged_forks(study):
        sentences += judge_fork(study, losses, fork, bits)
    sentences.append(judge_offer(study, losses))
    sentences += softmax_sentences(study, losses)
    for mixer in judged_mixers(study):
        facts = study["mixers"][mixer]["published"]
        sentences.append(("published", texts["published"].format(mixer=mixer, **facts)))
    return [*sentences, ("any", texts["any"])]


def judge_control(study: dict[str, Any], losses: Losses) -> tuple[bool, Sentence]:
    """Whether the control answers in every mixer, and the sentence that says so."""
    control, texts = study["control"], study["outcomes"]
    gaps = {
        mixer: gap_of_pair(losses, mixer, control["fork"], control["gap"])
        for mixer in judged_mixers(study)
    }
    answers = all(gap and gap.mean > control["least"] and gap.low > 0 for gap in gaps.values())
    outcome = "control_answers" if answers else "control_fails"
    text = texts[outcome].format(gaps=list_gaps(gaps), least=control["least"])
    return answers, (outcome, text)


def judge_fork(study: dict[str, Any], losses: Losses, fork: int, bits: float) -> list[Sentence]:
    """The sentences of a fork: its contrasts, their sum, and whether norm and level matter."""
    texts, pairs = study["outcomes"], study["contrasts"]
    gaps = {mixer: gaps_of_pairs(losses, mixer, fork, pairs) for mixer in judged_mixers(study)}
    sentences = []
    for mixer, by_name in gaps.items():
        place = {"mixer": mixer, "fork": fork}
        for name, gap in by_name.items():
            first, second = pairs[name]
            outcome, facts = outcome_of(gap, bits)
            text = texts[outcome].format(first=first, second=second, **place, **facts)
            sentences.append((outcome, text))
        if all(by_name.values()):
            means = {name: signed(gap.mean, f".{DIGITS}f") for name, gap in by_name.items() if gap}
            sentences.append(("parts", texts["parts"].format(**place, **means)))

    told = {}
    for (mixer, name), p in norm_ps(study, gaps).items():
        gap = gaps[mixer][name]
        if gap and gap.mean < 0 and p < study["level"]:
            told[f"{mixer}, {' − '.join(pairs[name])}"] = gap
    outcome = "norm_matters" if told else "norm_not_shown"
    sentences.append((outcome, texts[outcome].format(fork=fork, tests=list_gaps(told))))

    levels = {mixer: gap for mixer, each in gaps.items() if (gap := each["level"]) and gap.high < 0}
    if levels:
        text = texts["level_matters"].format(fork=fork, tests=list_gaps(levels))
        sentences.append(("level_matters", text))
    return sentences


def outcome_of(gap: Gap | None, bits: float) -> tuple[str, dict[str, str]]:
    """The outcome of one contrast by its plain interval, and the figures of its sentence."""
    if gap is None:
        return "without_pairs", {}
    form = f".{DIGITS}f"
    if gap.low <= 0 <= gap.high:
        half = half_width(gap)
        return "same", {"half": f"{half:{form}}", "half_bits": f"{half * bits:{form}}"}
    return "lowers" if gap.mean < 0 else "raises", {
        "size": f"{abs(gap.mean):{form}}",
        "size_bits": f"{abs(gap.mean) * bits:{form}}",
        "low": signed(gap.low, form),
        "high": signed(gap.high, form),
    }


def judge_offer(study: dict[str, Any], losses: Losses) -> Sentence:
    """Whether the map with a learnt level and slope is offered."""
    offer, gaps = study["offer"], {}
    for mixer in judged_mixers(study):
        for fork in judged_forks(study):
            each = gaps_of_pairs(losses, mixer, fork, study["contrasts"])
            gaps[f"{mixer}, fork at {fork} %"] = each[offer["contrast"]]

    below = all(gap and gap.mean < offer["below"] and gap.high < 0 for gap in gaps.values())
    outcome = "offered" if below else "not_offered"
    return outcome, study["outcomes"][outcome].format(gaps=list_gaps(gaps))


def softmax_sentences(study: dict[str, Any], losses: Losses) -> list[Sentence]:
    sentences = []
    for mixer in study["mixers"]:
        if mixer in judged_mixers(study):
            continue
        for fork in softmax_forks(study):
            gap = write_gap(gap_of_pair(losses, mixer, fork, ["own", "held"]))
            text = study["outcomes"]["softmax"].format(mixer=mixer, fork=fork, gap=gap)
            sentences.append(("softmax", text))
    return sentences


def softmax_forks(study: dict[str, Any]) -> list[int]:
    return [fork for fork, arms in study["arms"].items() if "softmax" in arms]


def write_gap(gap: Gap | None, factor: float = 1.0) -> str:
    return estimate.write_gap(gap, DIGITS, factor)


def list_gaps(gaps: Mapping[str, Gap | None]) -> str:
    return "; ".join(f"{write_gap(gap)} nats a token ({name})" for name, gap in gaps.items())


# ------------------------------ the report


def losses_of(records: dict[str, Record]) -> Losses:
    losses: Losses = {}
    for record in records.values():
        run = record["run"]
        if "failed" not in record:
            by_seed = losses.setdefault((run["mixer"], run["fork"], run["arm"]), {})
            by_seed[run["seed"]] = record["loss"]
    return losses


def bits_of_a_nat(record: Record) -> float:
    """Bits a byte of the validation text of one nat a token."""
    return sum(record["document_tokens"]) / (record["bytes"] * math.log(2))


def report(out: Path, study_file: Path = SECOND) -> bool:
    """Prints table and sentences; while a record is missing, only which, and returns False."""
    study = load_study(study_file)
    records = read_records(out, {"rule": hash_files(study_file)})
    if lacking := missing(study, records):
        total = len(lacking) + len(records)
        print(f"{len(records)} of {total} runs have a record. No estimate before all have.")
        print("Missing: " + ", ".join(lacking))
        return False

    for name, record in records.items():
        if "failed" in record:
            print(f"Left out: {name} {record['failed']}")
    measured = [record for record in records.values() if "failed" not in record]
    if not measured:
        print("Every run has diverged.")
        return True
    facts, hashes = measured[0]["text"], measured[0]["hashes"]
    print(f"Text: {study['text']} Fingerprint {facts['fingerprint']}.")
    print(f"Code {hashes['model']}: {list_versions(record['versions'] for record in measured)}")

    losses, bits = losses_of(records), bits_of_a_nat(measured[0])
    answers, _ = judge_control(study, losses)
    if answers:
        Console(width=max(140, Console().width)).print(gap_table(study, losses, bits))
    for outcome, sentence in judge(study, losses, bits):
        print(f"  {outcome}: {sentence.strip()}")
    return True


def gap_table(study: dict[str, Any], losses: Losses, bits: float) -> Table:
    """Every contrast by mixer and fork, the control, the noise, and softmax."""
    titles = ("mixer", "fork", "gap", "seeds", "nats a token [95 %]", "bits a byte [95 %]")
    table = Table(*titles, "p", "Holm's p", "sd over seeds", title="Gaps, paired by seed")

    def add(mixer: str, fork: int, pair: list[str], gap: Gap | None, adjusted: str = "") -> None:
        row = [mixer, f"{fork} %", " − ".join(pair), str(len(gap.differences) if gap else 0)]
        row += [write_gap(gap), write_gap(gap, bits), f"{gap.p:.2g}" if gap else ""]
        table.add_row(*row, adjusted, f"{gap.deviation if gap else math.inf:.{DIGITS}f}")

    for fork in judged_forks(study):
        gaps = {
            mixer: gaps_of_pairs(losses, mixer, fork, study["contrasts"])
            for mixer in judged_mixers(study)
        }
        adjusted = norm_ps(study, gaps)
        for mixer, by_name in gaps.items():
            for name, gap in by_name.items():
                holm_p = f"{adjusted[mixer, name]:.2g}" if (mixer, name) in adjusted else ""
                add(mixer, fork, study["contrasts"][name], gap, holm_p)

            arms = study["arms"][fork]["nala"]
            for pair in (["noise", "own"], study["control"]["gap"]):
                if pair[0] in arms:
                    add(mixer, fork, pair, gap_of_pair(losses, mixer, fork, pair))

    for mixer in study["mixers"]:
        for fork in softmax_forks(study) if mixer not in judged_mixers(study) else []:
            pair = ["own", "held"]
            add(mixer, fork, pair, gap_of_pair(losses, mixer, fork, pair))
    return table
