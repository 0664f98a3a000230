"""Every kernel test, compiled: all with the assembler that Triton brings, the doubtful ones with a newer one.

Triton 3.6 and 3.7 bring ptxas 12.8, which is known to compile some products wrongly for Hopper. The tests
compare each kernel with a float64 reference.
"""

import importlib.util
import os
import subprocess
import time
from pathlib import Path
from xml.etree import ElementTree

from gpu.card import Card, Case, Values
from gpu.results import Results

PTXAS = "TRITON_PTXAS_PATH"
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

    All files together: their processes start once. Those that do not end in time are left out. The JUnit file
    has the tracebacks.
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
    junit = (card.output / f"{left[0]}-{assembler}.xml").resolve()
    variables = {"NALANDA_TEST_DEVICE": card.device} | ({PTXAS: ptxas} if ptxas else {})
    files = [str(find_files(card)[name]) for name in left]
    command = ["-m", "pytest", *files, f"--junitxml={junit}", *choose_options(card)]
    try:
        last = card.python(command, **variables)[1]
    except subprocess.TimeoutExpired:
        last = "out of time"
    card.say(f"  {last}")

    tests = [*ElementTree.parse(junit).iter("testcase")] if junit.exists() else []
    for name in left:
        # A file that cannot be read is a test of its name.
        own = [x for x in tests if f"{x.get('classname') or x.get('name')}".endswith(f"_{name}")]
        values = {"outcome": last}
        if own and last != "out of time":
            failing[name] = sorted(
                x.get("name", "")
                for x in own
                if x.find("failure") is not None or x.find("error") is not None
            )
            values["failing"] = ", ".join(failing[name][:5])
        results.put(row(name, assembler), values)
    return failing


def choose_options(card: Card) -> list[str]:
    options = ["-q", "--tb=short", "-p", "no:cacheprovider"]
    if importlib.util.find_spec("xdist"):  # compilation takes most of the time
        workers = 2 if card.dry else min(12, max(1, (os.cpu_count() or 1) - 2))
        options += ["-n", str(workers)]
    if importlib.util.find_spec("pytest_timeout"):  # a kernel that hangs hears no signal
        options += ["--timeout=90", "--timeout-method=thread"]
    return [*options, "-k", DRY] if card.dry and card.tests == Card.tests else options
