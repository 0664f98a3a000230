"""`make gpu-check`: every check that needs a GPU, in parts that can run on different days and machines.

    python kernels/gpu_check.py [kernels] [bench] [train] [profile] [tune]   (default: all, in this order)
    python kernels/gpu_check.py day [--call 1] --bundle DIR --output DIR        (the plan for half an hour)
    python kernels/gpu_check.py bundle --bundle DIR                             (before the day: needs no GPU)
    python kernels/gpu_check.py table                                           (only writes RESULTS.md again)

kernels: every kernel test, compiled instead of interpreted; the doubtful ones with a newer ptxas too.
bench: times of the ops, beside flash-linear-attention's kernels, FlashQLA, FlashAttention and the card's
    limits; times of decoding.
train: every 340 M recipe beside flash-linear-attention's model of its shape; Triton's losses beside torch's.
profile: two training steps of the flagship, by kernel.
tune: block sizes for this card.

A part stops within `--minutes`, lists the cases that it did not reach, and starts with them next time. What
is measured is written at once to `--output`: results.json, RESULTS.md, tests.jsonl (a line and the traceback
of each test), log.txt, profile.txt, blocks.json. Without a GPU the exit code is 2; it is 3 where an error
left the process without its GPU: the same command goes on with the next case.
"""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from gpu import bench, bundle, correctness, results, standin, train
from gpu.card import Card, OutOfTime, Values, limited, stacks_of_a_hang
from gpu.results import Case, Results

PARTS: dict[str, Callable[[Card], list[Case]]] = {
    "kernels": correctness.test_cases,
    "bench": bench.bench_cases,
    "train": train.train_cases,
    "profile": train.profile_cases,
    "tune": train.tune_cases,
}
CALLS = {  # of the day → parts and their minutes; the last one takes what is left of a call's
    1: (("kernels", 8.75),),
    2: (("bench", 8.75),),
    3: (("train", 7.0), ("profile", 8.75)),
    4: (("bench", 2.0), ("train", 3.0), ("tune", 8.75)),
}
CALL = 8.75  # minutes of a call, its start apart
GRACE = 40.0  # seconds for a part to end by itself
LOST = 3  # exit code of a process whose GPU answers no more


def run_part(
    part: str, card: Card, found: Results, minutes: float, only: str = "", new: bool = False
) -> int:
    """Runs a part's cases: first those never measured on this card, then the oldest figures.

    new: only those without a figure. Returns the exit code.
    """
    end = time.monotonic() + 60 * minutes - (0 if card.dry else 15)
    last = {
        key: "" if figure["values"].get("partial") else figure["date"]
        for key, figure in found.latest(found.card).items()
    }
    cases = [case for case in PARTS[part](card) if only in case.name]
    cases.sort(key=lambda c: last.get((c.group, c.name), ""))
    if new:
        cases = [case for case in cases if not last.get((case.group, case.name))]
    for i, case in enumerate(cases):
        card.seconds = end - time.monotonic()
        if card.seconds < (0 if card.dry else 20):
            return say_left(card, part, cases[i:])
        print(f"{case.name} …", end=" ", flush=True)
        card.write_log(f"--- {case.name}\n")
        card.keep = lambda values, case=case: found.put(part, case, values | {"partial": True})
        try:
            with limited(min(card.seconds, case.seconds)):
                values = case.run(card) if case.run else {}
        except (OutOfTime, subprocess.TimeoutExpired):
            if (
                card.seconds < case.seconds
            ):  # the part ends; next time the case gets all of its time
                print("out of time")
                return say_left(card, part, cases[i:])
            kept = {x: y for x, y in found.values(case.group, case.name).items() if x != "partial"}
            values = kept | {"errors": {"all": f"more than {case.seconds:.0f} s"}}
        except Exception as error:
            values = {"errors": {"all": card.note(error)}}
        found.put(part, case, values)
        shown = [
            f"{k} {results.shown(k, v)}"
            for k, v in values.items()
            if not isinstance(v, dict | None)
        ]
        card.say(
            ", ".join([*shown, *(f"{k}: {error}" for k, error in values.get("errors", {}).items())])
        )
        try:
            card.release()
        except Exception as error:  # this process cannot measure any more
            card.say(f"  {card.note(error)}")
            say_left(card, part, cases[i + 1 :])
            return LOST
    return 0


def say_left(card: Card, part: str, cases: list[Case]) -> int:
    names = "; ".join(case.name for case in cases)
    card.say(f"gpu-check {part}: cases not reached; run it again for {names}")
    return 0


def load(options: argparse.Namespace) -> Results:
    earlier = vars(options)["continue"] or (None if options.dry_run else Path(__file__).parent)
    found = Results(options.output, earlier)
    found.plan = plan
    return found


def plan(card: str) -> list[Case]:
    shapes = Card("cpu", dry=True) if card == standin.NAME else Card()
    return [case for make in PARTS.values() for case in make(shapes)]


# ---------------------------------------------------------------------------------------------------- the day


def day(options: argparse.Namespace) -> int:
    """Each part in a process of its own, so that none can take the others' time or GPU with it."""
    worst = 0
    for call in [options.call] if options.call else CALLS:
        end = time.monotonic() + 60 * min(CALL, options.minutes or CALL)
        for part, minutes in CALLS[call]:
            minutes, decision = min(minutes, (end - time.monotonic()) / 60), decided(load(options))
            if part == "bench" and not decision.get("bench", True):
                print(f"call {call}: no bench: {decision['says']}")
                continue
            print(f"call {call}: {part}, {minutes:.1f} minutes", flush=True)
            code = child(part, options, minutes, new=call == 4 and part != "tune")
            worst = max(worst, 0 if code == LOST else code)
            if code == 2:  # no GPU, or bad arguments
                return code
    return worst


def decided(found: Results) -> Values:
    """What the tests say on the card of the last run."""
    return found.values(correctness.DECISION.group, correctness.DECISION.name) if found.runs else {}


def child(part: str, options: argparse.Namespace, minutes: float, new: bool) -> int:
    """Runs a part, and again if it lost its GPU. Returns the exit code."""
    end, code = time.monotonic() + 60 * minutes, LOST
    chosen = ["--dry-run"] * options.dry_run + ["--new"] * new
    for name in ("bundle", "output", "continue"):
        chosen += [f"--{name}", str(value)] if (value := vars(options)[name]) else []
    while code == LOST and (left := end - time.monotonic()) > 0:
        command = [sys.executable, __file__, part, "--minutes", f"{left / 60:.2f}", *chosen]
        with subprocess.Popen(command) as process:
            try:
                code = process.wait(left + GRACE)
            except subprocess.TimeoutExpired:
                process.terminate()  # it ends its own processes
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)
                process.kill()
                code = LOST
    return code


# ----------------------------------------------------------------------------------------------- command line


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="gpu_check.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}, table, day or bundle"
    )
    parser.add_argument(
        "--minutes", type=float, help="time limit of a part or a call (9), or of a bundle (30)"
    )
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--new", action="store_true", help="cases without a figure")
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent, help="folder of the results"
    )
    parser.add_argument(
        "--continue", type=Path, metavar="RESULTS", help="results.json, or its folder, to add to"
    )
    parser.add_argument(
        "--bundle", type=Path, help="folder made by `bundle`: peers, ptxas, compiled kernels"
    )
    parser.add_argument(
        "--call", type=int, choices=list(CALLS), help="a part of the day; default: all of it"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny shapes on a CPU; needs --output"
    )
    options = parser.parse_args(arguments)
    parts = options.parts or list(PARTS)
    if unknown := set(parts) - {*PARTS, "table", "day", "bundle"}:
        parser.error(f"part {sorted(unknown)[0]!r}: unknown; choose from {', '.join(PARTS)}")
    if alone := {"table", "day", "bundle"} & set(parts[: len(parts) > 1 and len(parts)]):
        parser.error(f"{alone.pop()}: it takes no other part")
    if options.bundle is None and parts == ["bundle"]:
        parser.error("bundle: name its folder with --bundle")
    if options.bundle and parts != ["bundle"] and not (options.bundle / "manifest.json").exists():
        parser.error(f"{options.bundle}: no bundle; make one with `gpu_check.py bundle`")
    if options.dry_run and options.output == parser.get_default("output"):
        parser.error(
            "--dry-run: its figures are no measurements; give another folder with --output"
        )
    if options.dry_run:
        import interpreter  # noqa: F401  before any kernel
    if parts == ["bundle"]:
        return bundle.make(options.bundle, options.minutes or 30.0)
    if parts == ["table"]:
        load(options).write_table()
        return 0
    if not options.dry_run and not torch.cuda.is_available():
        print("gpu-check: torch sees no GPU; run it on a machine with one", file=sys.stderr)
        return 2
    if parts == ["day"]:
        return day(options)
    with standin.cuda() if options.dry_run else contextlib.nullcontext():
        return run(parts, options, load(options))


def run(parts: list[str], options: argparse.Namespace, found: Results) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes of ours are ended
    card = Card("cpu", dry=True) if options.dry_run else Card()
    card = replace(card, output=options.output)
    unpacked = bundle.unpack(options.bundle, card.say) if options.bundle else bundle.Unpacked()
    found.begin(results.facts())
    minutes, code = options.minutes or 9.0, 0
    try:
        for part in parts:
            if part != "kernels":  # peers come after the tests, which need none
                unpacked.add_peers()
                if decided(found).get("assembler") == "newer" and unpacked.ptxas:
                    os.environ[correctness.PTXAS] = unpacked.ptxas
            guard = bench.lift_guard() if part in ("bench", "train") else None
            notes = "; ".join([*unpacked.notes, *([guard] if guard else [])])
            there = {"fla": results.version("fla-core"), "flash_qla": results.version("flash-qla")}
            found.runs[-1] |= there | {"note": notes, "assembler": assembler()}
            with stacks_of_a_hang(card, 60 * minutes + GRACE - 15):
                if part == "kernels":
                    correctness.run_tests(card, found, minutes, options.only, unpacked.ptxas)
                else:
                    code = run_part(part, card, found, minutes, options.only, options.new)
                if code:
                    break
    except Exception as error:
        card.note(error)
        raise
    return code


def assembler() -> str | None:
    """The version of the ptxas that Triton calls."""
    from triton import knobs

    path = os.environ.get(correctness.PTXAS) or knobs.nvidia.ptxas.path
    said = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    return next(iter(re.findall(r"V([\d.]+)", said)), None)


if __name__ == "__main__":
    raise SystemExit(main())
