"""Every kernel test, compiled: all with the assembler that Triton brings, the doubtful ones with a newer one.

Triton 3.6 and 3.7 bring ptxas 12.8, which is known to compile some products wrongly for Hopper. The tests
compare each kernel with a float64 reference.

As a plugin of pytest (-p gpu.correctness) it writes each test's outcome to tests.jsonl when the test ends.
"""

import importlib.util
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from gpu.card import OUT_OF_TIME, Card, Case, Values
from gpu.results import Results

PTXAS = "TRITON_PTXAS_PATH"
RECORD = "NALANDA_TEST_RECORD"  # the file of outcomes, the key of this run, and a file of tests to leave out
LAST = "fla"  # the peer, which tunes itself
AGAIN = ("block_attention", "readouts", "chunk")  # whose products may be assembled wrongly
DRY = "test_every_mixer and softmax or test_no_tokens or zero_rows"

Failing = dict[str, list[str]]
"""Failing tests by file."""


def find_files(card: Card) -> dict[str, Path]:
    files = {x.stem.removeprefix("test_kernels_"): x for x in card.tests.glob("test_kernels_*.py")}
    return {name: files[name] for name in sorted(files, key=lambda name: (name == LAST, name))}


def row(name: str, assembler: str = "bundled") -> Case:
    return Case("Tests, compiled", name if assembler == "bundled" else f"{name}, newer ptxas")


DECISION = Case("Decision", "how to go on")


def kernel_cases(card: Card) -> list[Case]:
    return [DECISION, *map(row, find_files(card)), *(row(name, "newer") for name in AGAIN)]


def run_tests(card: Card, results: Results, minutes: float, newer: str | None = None) -> None:
    """Runs the tests and writes down how to go on. newer: the path of another ptxas."""
    end = time.monotonic() + 60 * minutes
    card.end = end - (0.3 * 60 * minutes if newer else 0)
    names = [*find_files(card)]
    bundled = run_files(card, results, [name for name in names if name != LAST])
    bundled |= run_files(card, results, [name for name in names if name == LAST])

    card.end, again = end, None
    if newer:
        doubtful = [name for name in names if name in AGAIN or bundled.get(name)]
        again = run_files(card, results, doubtful, newer)

    values = decide(bundled, again)
    results.put(DECISION, values)
    card.say(f"{DECISION.name}: {values['decision']}")


def decide(bundled: Failing, newer: Failing | None) -> Values:
    """The meaning of the failing tests. newer: files that ran again with the newer ptxas, if there is one.

    A file that did not end in time is left out. Returns `assembler` ("bundled" or "newer"), `bench` ("yes",
    or "no" where its figures would mean nothing), and `decision` in words.
    """
    assembler, failing = "bundled", bundled
    red = sorted(name for name in bundled if bundled[name])
    words = [f"red with Triton's own ptxas: {', '.join(red)}" if red else "green"]
    if red and newer is not None and set(red) <= newer.keys():
        still_red = sorted(name for name in newer if newer[name])
        words.append(f"red with the newer one: {', '.join(still_red) or 'none'}")
        if sum(map(len, newer.values())) < sum(len(bundled[name]) for name in red):
            assembler, failing = "newer", newer
            words.append(f"later parts set {PTXAS}")

    if failing.get("block_attention"):
        words.append("keep diag_attention on torch (backend torch)")
    bench = "yes"
    if "chunk" not in bundled or failing.get("chunk"):
        bench = "no"
        wrong = f"{failing['chunk'][0]} fails" if failing.get("chunk") else "chunk was not tested"
        words.append(f"no bench: {wrong}")
    return {"assembler": assembler, "bench": bench, "decision": "; ".join(words)}


def run_files(card: Card, results: Results, names: list[str], ptxas: str | None = None) -> Failing:
    """Runs test files in another process, which can leave the interpreter. Returns the failing tests.

    All files together: their processes start once. Files that do not end in time are left out; their row has
    what ended, and the next call leaves out the tests that passed. tests.jsonl has the tracebacks.
    """
    assembler = "newer" if ptxas else "bundled"
    failing: Failing = {}
    for name in names:
        earlier = results.newest(row(name, assembler), results.facts["card"])
        # A call that was cut short goes on: the same files on the same software were tested.
        if "failing" in earlier.get("values", {}) and earlier["facts"] == results.facts:
            failing[name] = list(filter(None, earlier["values"]["failing"].split(", ")))
    left = [name for name in names if name not in failing]
    if not left:
        return failing

    card.say(f"{', '.join(left)}, {assembler} ptxas …")
    file, key = card.output / "tests.jsonl", json.dumps([results.facts, assembler])
    card.work.mkdir(parents=True, exist_ok=True)
    passed = card.work / "passed.json"
    before = read_outcomes(file, key)
    passed.write_text(json.dumps([name for name, outcome in before.items() if outcome != "failed"]))
    record = json.dumps([str(file.resolve()), key, str(passed)])
    variables = {"NALANDA_TEST_DEVICE": card.device, RECORD: record}
    variables |= {PTXAS: ptxas} if ptxas else {}
    files = [str(find_files(card)[name]) for name in left]
    command = ["-m", "pytest", "-p", "gpu.correctness", *files, *choose_options(card)]
    ended = True
    try:
        last = card.python(command, **variables)[1]
    except subprocess.TimeoutExpired:
        last, ended = OUT_OF_TIME, False
    card.say(f"  {last}")

    outcomes = read_outcomes(file, key)
    for name in left:
        # A file that cannot be read is a test of its name.
        own = {
            x: y for x, y in outcomes.items() if Path(x.split("::")[0]).stem.endswith(f"_{name}")
        }
        red = sorted(x.rpartition("::")[2] for x, outcome in own.items() if outcome == "failed")
        values: Values = {"outcome": last, "tests": len(own)}
        if own and ended:
            failing[name] = red
        values["failing" if own and ended else "failing so far"] = ", ".join(red[:5])
        results.put(row(name, assembler), values)
    return failing


def read_outcomes(file: Path, key: str) -> dict[str, str]:
    """The newest outcome of each test that ran under the key."""
    lines = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    return {line["test"]: line["outcome"] for line in lines if line["key"] == key}


def choose_options(card: Card) -> list[str]:
    options = ["-q", "--tb=short", "-p", "no:cacheprovider"]
    # Of a rehearsal, so few that each worker would import for longer than they take.
    few = card.dry and card.tests == Card.tests
    if importlib.util.find_spec("xdist") and not few:  # compilation takes most of the time
        workers = 2 if card.dry else min(12, max(1, (os.cpu_count() or 1) - 2))
        options += ["-n", str(workers)]
    if importlib.util.find_spec("pytest_timeout"):  # a kernel that hangs hears no signal
        options += ["--timeout=90", "--timeout-method=thread"]
    return [*options, "-k", DRY] if few else options


# ------------------------------ the plugin


def pytest_collection_modifyitems(items: list[Any]) -> None:
    if record := os.environ.get(RECORD):
        passed = set(json.loads(Path(json.loads(record)[2]).read_text()))
        items[:] = [item for item in items if item.nodeid not in passed]


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or report.outcome != "passed":
        write_outcome(report)


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        write_outcome(report)


def write_outcome(report: Any) -> None:
    """Appends a line. Workers of xdist hand their reports to the process that started them."""
    if "PYTEST_XDIST_WORKER" in os.environ or not (record := os.environ.get(RECORD)):
        return
    file, key, _ = json.loads(record)
    line = {"test": report.nodeid, "outcome": report.outcome, "key": key}
    line |= {"text": str(report.longrepr)[-2000:]} if report.failed else {}
    with open(file, "a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")
