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

from gpu import bench, bundle, correctness, train
from gpu.card import ROOT, Card, Case
from gpu.results import Results, facts, show

PARTS: dict[str, Callable[[Card], list[Case]]] = {
    "kernels": correctness.kernel_cases,
    "bench": bench.bench_cases,
    "train": train.train_cases,
    "tune": lambda card: [Case("Block sizes", "tune", train.tune)],
}
MINUTES = 8.75  # of a part of the day
LOST = 3  # exit code of a process whose GPU answers no more; the same command goes on


def run_part(part: str, options: argparse.Namespace) -> int:
    """Runs a part's cases: those never measured on this card first, then the oldest. Returns the exit code."""
    card = Card("cpu" if options.dry_run else "cuda", options.dry_run, options.output)
    results = Results(options.output, [case for make in PARTS.values() for case in make(card)])
    results.facts = facts(card)
    unpacked = bundle.unpack(options.bundle) if options.bundle else None
    minutes = options.minutes or 9.0
    if part == "kernels":
        correctness.run_tests(card, results, minutes, unpacked and str(unpacked / "ptxas"))
        return 0

    if unpacked:
        sys.path.append(str(unpacked / "peers"))
        path = [os.environ.get("PYTHONPATH"), str(unpacked / "peers")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        decision = results.newest(correctness.DECISION, results.facts["card"])
        if decision and decision["values"]["assembler"] == "newer":
            os.environ[correctness.PTXAS] = str(unpacked / "ptxas")
    results.facts["ptxas"] = os.environ.get(correctness.PTXAS, "bundled")
    bench.lift_guard()

    card.end = time.monotonic() + 60 * minutes
    name = results.facts["card"]
    cases = sorted(PARTS[part](card), key=lambda x: results.newest(x, name).get("date", ""))
    for i, case in enumerate(cases):
        if time.monotonic() > card.end - (0 if card.dry else 20):
            left = "; ".join(case.name for case in cases[i:])
            card.say(f"gpu-check {part}: out of time; the same command goes on with {left}")
            break
        card.say(f"{case.group}: {case.name} …")
        try:
            values = case.run(card) if case.run else {}
        except subprocess.TimeoutExpired:  # next time it comes first, and gets all of the time
            continue
        except Exception as error:
            values = {"errors": card.note(error)}
        results.put(case, values)
        card.say("  " + ", ".join(f"{name} {show(value)}" for name, value in values.items()))
        try:
            card.synchronize()
        except Exception as error:  # this process cannot measure any more
            card.say(f"  {card.note(error)}")
            return LOST
    return 0


def run_day(options: argparse.Namespace) -> int:
    """Runs each part in a process of its own, so that none can take the others' time or GPU with it."""
    worst = 0
    for part in [list(PARTS)[options.call - 1]] if options.call else PARTS:
        figures = Results(options.output, []).figures
        decisions = [x["values"] for x in figures if x["group"] == correctness.DECISION.group]
        if part == "bench" and decisions and decisions[-1]["bench"] == "no":
            print(f"no bench: {decisions[-1]['decision']}")
            continue

        minutes = min(MINUTES, options.minutes or MINUTES)
        command = [sys.executable, __file__, part, "--minutes", f"{minutes:.2f}"]
        command += ["--output", str(options.output), *["--dry-run"] * options.dry_run]
        command += ["--bundle", str(options.bundle)] if options.bundle else []
        try:
            done = subprocess.run(command, timeout=60 * minutes + 40)  # to end by itself
            worst = max(worst, done.returncode)
        except subprocess.TimeoutExpired:
            worst = LOST
    return worst


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu_check.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("part", nargs="?", default="day", choices=[*PARTS, "day", "bundle"])
    add("--minutes", type=float, help="limit of a part (9) or of a bundle (30)")
    add("--output", type=Path, default=Path("gpu-results"), help="folder of the results")
    add("--bundle", type=Path, help="folder made by `bundle`: peers, ptxas, compiled kernels")
    add("--call", type=int, choices=[1, 2, 3, 4], help="a part of the day; default: all")
    add("--dry-run", action="store_true", help="tiny shapes on a CPU")
    options = parser.parse_args(arguments)

    if options.part == "bundle":
        bundle.make_bundle(options.bundle or Path("gpu-bundle"), options.minutes or 30.0)
        return 0
    if options.bundle and not (options.bundle / "manifest.json").exists():
        parser.error(f"{options.bundle}: no bundle; make one with `gpu_check.py bundle`")
    if not options.dry_run and not torch.cuda.is_available():
        print("gpu-check: torch sees no GPU; run it on a machine with one", file=sys.stderr)
        return 2
    if options.part == "day":
        return run_day(options)
    if options.dry_run:
        sys.path.append(str(ROOT / "tests" / "helpers"))
        import interpreter  # noqa: F401  before any kernel
    return run_part(options.part, options)


if __name__ == "__main__":
    raise SystemExit(main())
