"""Every check that needs a GPU, in parts; README.md beside this file says how to use it."""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu import bench, bundle, correctness, curves, keep, small, train, tuned
from gpu.card import OUT_OF_TIME, ROOT, STUBS, Card, Case, Values
from gpu.results import FIGURES, Results, facts, fit, show, take_former

PARTS: dict[str, Callable[[Card], list[Case]]] = {
    "kernels": correctness.kernel_cases,
    "bench": bench.bench_cases,
    "train": train.train_cases,
    "curves": curves.curve_cases,
    "small": small.small_cases,
    "tune": lambda card: [Case("Block sizes", "tune", train.tune)],
    "keep": keep.keep_cases,
}
KEEP = "keep"  # its cases each need the one before, and its files leave room for the figures alone
MINUTES = 8.75  # of a part of the day
LOST = 3  # exit code of a process whose GPU answers no more; the same command goes on
NO_FIGURE = 4  # exit code of a part that ended without one
TEXT_HELP = "bundle: a token set; the 340 M models read `web`"
PART = "Parts"  # the group of lines that say how a part ended


def run_part(part: str, options: argparse.Namespace) -> int:
    """Runs a part's cases: those never measured on this card first, then the oldest. Returns the exit code."""
    card = Card("cpu" if options.dry_run else "cuda", options.dry_run, options.output)
    results = Results(options.output, [case for make in PARTS.values() for case in make(card)])
    results.facts = facts(card)
    unpacked = bundle.unpack(options.bundle) if options.bundle else None
    card.bundle = unpacked
    name = results.facts["card"]
    for folder in filter(None, (options.bundle, card.output)):
        if count := tuned.unpack(folder / tuned.NAME, tuned.triton_cache(), name):
            card.say(f"{folder / tuned.NAME}: sizes of {count} kernels and shapes")
    card.newest = lambda group, case: results.newest(Case(group, case), name).get("values", {})
    minutes = options.minutes or 9.0
    before = len(results.figures)
    card.end = time.monotonic() + 60 * minutes
    if part == "kernels":
        correctness.run_tests(card, results, minutes, unpacked and str(unpacked / "ptxas"))
        return end_part(part, card, results, before, [])

    if unpacked:
        sys.path.append(str(unpacked / "peers"))
        path = [os.environ.get("PYTHONPATH"), str(unpacked / "peers")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        decision = results.newest(correctness.DECISION, name)
        if decision and decision["values"]["assembler"] == "newer":
            os.environ[correctness.PTXAS] = str(unpacked / "ptxas")
    results.facts["ptxas"] = os.environ.get(correctness.PTXAS, "bundled")
    bench.lift_guard()

    cases = PARTS[part](card)
    if part != KEEP:
        cases.sort(key=lambda case: turn(results.newest(case, name)))
    if part == "small":  # several runs at once
        return end_part(part, card, results, before, small.run_small(card, results))
    for i, case in enumerate(cases):
        if time.monotonic() > card.end - (0 if card.dry else 20):
            return end_part(part, card, results, before, [case.name for case in cases[i:]])
        card.say(f"{case.group}: {case.name} …")
        try:
            values = case.run(card) if case.run else {}
        except subprocess.TimeoutExpired:
            values = {"errors": {"run": OUT_OF_TIME}}
        except Exception as error:
            values = {"errors": card.note(error)}
        results.put(case, values)
        bring_tuned(part, results)
        card.say("  " + ", ".join(f"{name} {show(value)}" for name, value in values.items()))
        try:
            card.synchronize()
        except Exception as error:  # this process cannot measure any more
            card.say(f"  {card.note(error)}")
            return LOST
    return end_part(part, card, results, before, [])


def bring_tuned(part: str, results: Results) -> None:
    """Puts what the peer's autotuner found beside the results."""
    if part != KEEP:
        file = results.file.with_name(tuned.NAME)
        tuned.pack(tuned.triton_cache(), file, results.facts["card"])


def turn(figure: Values) -> str:
    """A case's place in the order: what was never measured, or not in time, comes first; then the oldest."""
    return "" if OUT_OF_TIME in str(figure.get("values")) else figure.get("date", "")


def end_part(part: str, card: Card, results: Results, before: int, left: list[str]) -> int:
    """Writes how a part ended. left: cases that the time did not reach. Returns the exit code."""
    figures = results.figures[before:]
    late = [x["name"] for x in figures if OUT_OF_TIME in str(x["values"])]
    left = [*dict.fromkeys([*late, *left])]
    outcome = f"{OUT_OF_TIME}; the same command goes on with {'; '.join(left)}" if left else "done"
    if not figures:
        outcome = f"no figure; {outcome}"
    results.put(Case(PART, part), {"outcome": outcome, "figures": len(figures)})
    bring_tuned(part, results)
    card.say(f"gpu-check {part}: {outcome}")
    problem = fit(card.output)
    if problem:
        card.say(f"gpu-check: {problem}")
    return NO_FIGURE if problem or not figures else 0


def run_day(options: argparse.Namespace) -> int:
    """Runs each part in a process of its own, so that none can take the others' time or GPU with it."""
    worst = 0
    for part in [list(PARTS)[options.call - 1]] if options.call else PARTS:
        results = Results(options.output, [])
        figures = results.figures
        decisions = [x["values"] for x in figures if x["group"] == correctness.DECISION.group]
        if part == "bench" and decisions and decisions[-1]["bench"] == "no":
            results.facts = figures[-1]["facts"]
            results.put(Case(PART, part), {"outcome": f"left out: {decisions[-1]['decision']}"})
            print(f"no bench: {decisions[-1]['decision']}")
            continue

        minutes = min(MINUTES, options.minutes or MINUTES)
        command = [sys.executable, __file__, part, "--minutes", f"{minutes:.2f}"]
        command += ["--output", str(options.output), *["--dry-run"] * options.dry_run]
        command += ["--bundle", str(options.bundle)] if options.bundle else []
        try:
            code = subprocess.run(command, timeout=60 * minutes + 40).returncode  # to end by itself
        except subprocess.TimeoutExpired:
            code = LOST
        worst = max(worst, check_part(part, code, options, len(figures)))
    return worst


def check_part(part: str, code: int, options: argparse.Namespace, before: int) -> int:
    """Writes the line of a part that ended without its own. Returns the exit code."""
    results = Results(options.output, [])
    figures = results.figures[before:]
    if any((x["group"], x["name"]) == (PART, part) for x in figures):
        return code
    results.facts = results.figures[-1]["facts"] if results.figures else {"card": "unknown"}
    outcome = f"ended by itself or by the day, exit code {code}"
    results.put(Case(PART, part), {"outcome": outcome, "figures": len(figures)})
    print(f"gpu-check {part}: {outcome}", file=sys.stderr)
    return code or NO_FIGURE


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu_check.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("part", nargs="?", default="day", choices=[*PARTS, "day", "bundle"])
    add("--minutes", type=float, help="limit of a part (9) or of a bundle (30)")
    add("--output", type=Path, default=Path("gpu-results"), help="folder of the results")
    add("--former", type=Path, help="results of a former call, to go on with")
    add("--bundle", type=Path, help="folder made by `bundle`: peers, ptxas, kernels, texts")
    add("--text", action="append", default=[], metavar="NAME=FOLDER", help=TEXT_HELP)
    add(
        "--call", type=int, choices=range(1, len(PARTS) + 1), help="a part of the day; default: all"
    )
    add("--dry-run", action="store_true", help="tiny shapes on a CPU")
    options = parser.parse_args(arguments)

    if options.part == "bundle":
        try:
            texts = bundle.read_texts(options.text)
        except ValueError as error:
            parser.error(str(error))
        bundle.make_bundle(options.bundle or Path("gpu-bundle"), options.minutes or 30.0, texts)
        return 0
    if options.bundle and not (options.bundle / "manifest.json").exists():
        parser.error(f"{options.bundle}: no bundle; make one with `gpu_check.py bundle`")
    if options.former and not options.former.is_dir():
        parser.error(f"--former {options.former}: no folder; give the files of a former call")
    if not options.dry_run and not torch.cuda.is_available():
        print("gpu-check: torch sees no GPU; run it on a machine with one", file=sys.stderr)
        return 2
    if options.former:
        part = list(PARTS)[options.call - 1] if options.call else options.part
        take_former(options.former, options.output, FIGURES if part == KEEP else None)
    if options.part == "day":
        return run_day(options)
    if options.dry_run:
        sys.path.insert(0, str(STUBS))
        sys.path.append(str(ROOT / "tests" / "helpers"))
        import interpreter  # noqa: F401  before any kernel
    return run_part(options.part, options)


if __name__ == "__main__":
    raise SystemExit(main())
