"""Every kernel test, compiled: all with the assembler that Triton brings, the doubtful ones with a newer one.

Triton 3.6 and 3.7 bring ptxas 12.8, which is known to compile some products wrongly for Hopper.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from gpu.card import Card, Values
from gpu.results import Case, Results
from gpu.stream import read

GROUP = "Tests, compiled"
DECISION = Case("Decision", "how to go on")
FIRST, LAST = (
    "model",
    "fla",
)  # files: the whole in the first minute; the peer, which tunes itself, at the end
AGAIN = ("block_attention", "readouts", "chunk")  # where products may be assembled wrongly
PTXAS = "TRITON_PTXAS_PATH"
DRY = "test_every_mixer and softmax or test_no_tokens or test_zero_rows"  # of a dry run

Failing = dict[str, list[str]]  # file → failing tests


def name(file: str | Path) -> str:
    return Path(file).stem.removeprefix("test_kernels_")


def files(card: Card) -> list[Path]:
    found = sorted(card.tests.rglob("test_kernels_*.py"))
    return sorted(found, key=lambda x: (name(x) == LAST, name(x) != FIRST))


def row(file: str, assembler: str = "bundled") -> Case:
    return Case(GROUP, file if assembler == "bundled" else f"{file}, newer ptxas")


def test_cases(card: Card) -> list[Case]:
    return [DECISION, *(row(name(x)) for x in files(card)), *(row(x, "newer") for x in AGAIN)]


def run_tests(
    card: Card, results: Results, minutes: float, only: str = "", newer: str | None = None
) -> None:
    """Runs the tests and writes down what is to be done. newer: path of another ptxas."""
    start, compiled = time.monotonic(), []
    for file in files(card):
        if only not in name(file):
            continue
        if "kernel_device" in file.read_text():
            compiled.append(file)
        else:
            error = f"{file.name}: it runs only in the interpreter; import kernel_device"
            results.put("kernels", row(name(file)), {"errors": {"all": error}})
    end = start + 60 * minutes
    pytest(card, results, compiled, "bundled", start + (end - start) * (0.7 if newer else 1.0))
    bundled, again = failing(card, results, "bundled"), None
    if newer:
        chosen = [x for x in compiled if name(x) in AGAIN or bundled.get(name(x))]
        pytest(card, results, chosen, "newer", end, newer)
        again = failing(card, results, "newer")
    values = decide(bundled, again)
    if left := sum(x["left"] for x in counts(card, results, "bundled").values()):
        values["says"] += f"; {left} tests were not reached"
    results.put("kernels", DECISION, values)
    card.say(f"{DECISION.name}: {values['says']}")
    if "first" in values:
        variables = {PTXAS: newer} if newer and values["assembler"] == "newer" else {}
        card.seconds = end - time.monotonic()
        results.put("kernels", DECISION, values | alone(card, values["first"], **variables))


def decide(bundled: Failing, newer: Failing | None) -> Values:
    """What the failing tests mean. newer: of the files that ran again with a newer ptxas, if there is one.
    Files that `failing` leaves out were not tested.

    Returns assembler ("bundled" or "newer"), bench (whether its figures can mean anything) and says; if not
    bench, the `first` failing test.
    """
    if not bundled:
        return {
            "assembler": "bundled",
            "bench": False,
            "says": "no test ran: log.txt has the reason",
        }
    red, tested = sorted(x for x in bundled if bundled[x]), "chunk" in bundled
    note = "" if tested else "; no test of chunk ended: no bench"
    if not red:
        says = f"green with Triton's own ptxas{note}"
        return {"assembler": "bundled", "bench": tested, "says": says}
    says, assembler, left = f"red with Triton's own ptxas: {', '.join(red)}", "bundled", bundled
    if newer is not None and set(red) <= newer.keys():
        if not any(newer.values()):
            says += f"; green with the newer one: {PTXAS} is set in every later part{note}"
            return {"assembler": "newer", "bench": tested, "says": says}
        if sum(map(len, newer.values())) < sum(len(bundled[x]) for x in red):
            assembler, left = "newer", newer
        red = sorted(x for x in left if left[x])
        says += f"; with the newer one: {', '.join(x for x in sorted(newer) if newer[x])}; {assembler} is taken"
    if "chunk" in red:
        says += "; chunk is wrong: no bench"
        return {"assembler": assembler, "bench": False, "says": says, "first": left["chunk"][0]}
    if red == ["block_attention"]:
        says += "; diag_attention stays on torch (backend torch)"
    return {"assembler": assembler, "bench": tested, "says": says + note}


def pytest(
    card: Card,
    results: Results,
    chosen: list[Path],
    assembler: str,
    end: float,
    ptxas: str | None = None,
) -> None:
    """Runs test files in other processes: a process cannot leave the interpreter."""
    stream = card.output / "tests.jsonl"
    variables = {
        "NALANDA_TEST_DEVICE": card.device,
        "NALANDA_TESTS": str(stream.resolve()),
        "NALANDA_TESTS_READ": str(stream.stat().st_size if stream.exists() else 0),
        "NALANDA_ASSEMBLER": assembler,
        "NALANDA_SOURCES": results.runs[-1]["sources"],
    }
    card.seconds = end - time.monotonic()
    if chosen and card.seconds > 0:
        card.say(f"{', '.join(map(name, chosen))}: {assembler} ptxas …")
        command = [*map(str, chosen), *options(card)]
        try:
            said = card.python(
                ["-m", "pytest", *command],
                lambda: put_rows(card, results, assembler),
                **variables,
                **({PTXAS: ptxas} if ptxas else {}),
            )[1]
        except subprocess.TimeoutExpired:
            said = "out of time"
        card.say(f"  {said}")
    put_rows(card, results, assembler)


def options(card: Card) -> list[str]:
    found = ["--tb=no", "-p", "gpu.stream", "-p", "no:cacheprovider"]
    if importlib.util.find_spec("xdist"):  # compilation takes most of the time
        workers = 2 if card.dry else min(12, max(1, (os.cpu_count() or 1) - 2))
        found += ["-n", str(workers), "--maxschedchunk=1"]  # one by one: in the order of the files
    if importlib.util.find_spec("pytest_timeout"):  # a kernel that hangs hears no signal
        found += ["--timeout=90", "--timeout-method=thread"]
    return found + (["-k", DRY] if card.dry and card.tests == Card.tests else [])


def counts(card: Card, results: Results, assembler: str) -> dict[str, Values]:
    """By file: tests passed, failed, skipped, left, and the names of those that failed."""
    last: dict[str, str] = {}
    collected: Counter[str] = Counter()
    for line in read(card.output / "tests.jsonl"):
        if (line["assembler"], line["sources"]) == (assembler, results.runs[-1]["sources"]):
            if "collected" in line:
                collected |= Counter(line["collected"])
            else:
                last[line["id"]] = line["outcome"]
    found: dict[str, Values] = {}
    for file in {*collected, *(x.partition("::")[0] for x in last)}:
        here = {x: outcome for x, outcome in last.items() if x.partition("::")[0] == file}
        values: Values = {x: list(here.values()).count(x) for x in ("passed", "failed", "skipped")}
        bad = [x for x, outcome in here.items() if outcome == "failed"]
        names = ", ".join(x.partition("::")[2] or "collection" for x in bad[:5]) + (
            " …" if len(bad) > 5 else ""
        )
        left = max(0, collected[file] - len(here))
        found[name(file)] = values | {"left": left, "names": names or None, "failing": bad}
    return found


def failing(card: Card, results: Results, assembler: str) -> Failing:
    """The failing tests of each file of which something is known.

    That is a failure, or that a test passed; with the newer assembler, which repeats files to see whether
    their failures go, that none is left and none failed.
    """
    found = {}
    for file, values in counts(card, results, assembler).items():
        green = not values["left"] if assembler == "newer" else values["passed"]
        if values["failing"] or green:
            found[file] = values["failing"]
    return found


def put_rows(card: Card, results: Results, assembler: str) -> None:
    for file, values in counts(card, results, assembler).items():
        values = values | {"failing": values["failing"][:50]}
        if results.values(GROUP, row(file, assembler).name) != values:
            results.put("kernels", row(file, assembler), values)


def alone(card: Card, test: str, **variables: str) -> Values:
    """The failing test alone, then under compute-sanitizer, where that is; their output is in the log."""
    command = ["-m", "pytest", test, "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    variables |= {"NALANDA_TEST_DEVICE": card.device}
    found: Values = {}
    try:
        found["alone"] = card.python(command, **variables)[1]
        if sanitizer := shutil.which("compute-sanitizer"):
            variables["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
            found["sanitizer"] = card.command(
                [sanitizer, sys.executable, *command], list, **variables
            )[1]
    except subprocess.TimeoutExpired:
        card.say("  out of time")
    return found
