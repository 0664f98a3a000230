"""Puts faults into a copy of the product, one at a time, and runs the fast tests that reach them.

    python tests/mutants/run.py [--sample N] [--seed N] [--minutes M] [--work FOLDER]

The faults are those of faults.yaml, chosen by hand, and N of cosmic-ray's, drawn by statement over all rooms.
First each file of tests runs under coverage, once: a fault is tried by the tests that pass its line, the
quick ones of each file before the others. Called again it goes on, with the copy that it made first; without
the folder .mutants it begins anew. At the end it writes tests/MUTANTS.md.
"""

import argparse
import ast
import compileall
import contextlib
import datetime
import itertools
import json
import os
import platform
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from difflib import unified_diff
from functools import partial
from pathlib import Path
from py_compile import PycInvalidationMode

sys.path.append(str(Path(__file__).parents[1] / "helpers"))

import yaml
from training import ENVIRONMENT, ROOT

HERE = Path(__file__).parent
ROOMS = {
    "kernels": ["kernels/nalanda_kernels"],
    "common": ["src/nalanda/common"],
    "storage": ["src/nalanda/storage"],
    "model": ["src/nalanda/model"],
    "config": ["src/nalanda/config"],
    "data": ["src/nalanda/data"],
    "train": ["src/nalanda/train"],
    "inference": ["src/nalanda/inference"],
    "convert": ["src/nalanda/convert"],
    "report": ["src/nalanda/report"],
    "compare": ["src/nalanda/compare"],
    "check": ["src/nalanda/check", "src/nalanda/testing"],
    "eval": ["eval/nalanda_eval"],
    "cli": ["src/nalanda_cli.py", "src/nalanda_typer.py"],
}
APART = ("tests/docs", "tests/gpu", "tests/recipes", "tests/torture", "tests/vllm")
"""Folders of tests that run whole commands, or belong to no room."""
INTERPRETED = "kernels/nalanda_kernels/triton"
"""Its tests are slow: of its files come at most `FEW` faults of the sample."""
FEW = 4
FIRST, BUDGET = 25, 60.0
"""Tests of the first try of a fault; seconds of the second one's."""
UNFINISHED = 75  # exit code, EX_TEMPFAIL of sysexits.h
PATIENCE = 8
"""A try may take so many times the seconds that its tests took, and 60 more."""


@dataclass
class Fault:
    """One change of one file."""

    room: str
    file: str
    line: int
    new: str
    """The text of the whole file with the fault."""
    by_hand: bool
    title: str
    """Unique: the file, and the lines that go and come."""
    test: str | None = None
    """A test that must see it, tried before all others."""


# ------------------------------ the copy


def make_copy(folder: Path) -> Path:
    """A copy of the tracked files, as they are now; children import the product from there."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    shutil.rmtree(folder, ignore_errors=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)

    # Bytecode with the hash of its source: times of change are too coarse for faults.
    mode = PycInvalidationMode.CHECKED_HASH
    for part in ("src", "kernels", "eval"):
        compileall.compile_dir(folder / part, quiet=1, invalidation_mode=mode)
    return folder


def load_libraries() -> None:
    """Imports once what every child needs. Nothing of the product is loaded."""
    import kernel_device  # noqa: F401, I001  before anything imports Triton
    import accelerate  # noqa: F401
    import datasets  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import transformers  # noqa: F401
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, pipeline  # noqa: F401

    torch.set_num_threads(1)


def in_child(copy: Path, act: Callable[[], int], seconds: float, log: Path) -> int:
    """Runs `act` in a fork with the product of the copy; returns its exit code, -signal, or -9 after time."""
    child = os.fork()
    if child == 0:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(copy)
        # Seconds of the processor, so that a busy machine kills nothing.
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 5))
        paths = [str(copy / folder) for folder in ("src", "kernels", "eval", "lab")]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        sys.path[:0] = paths
        code = 70
        try:
            code = act()
        finally:
            sys.stdout.flush()
            os._exit(code)

    deadline, status = time.monotonic() + 20 * seconds, None
    try:
        while status is None and time.monotonic() < deadline:
            ended, code = os.waitpid(child, os.WNOHANG)
            status = code if ended else None
            time.sleep(0.05)
    finally:  # it, and what it started and left
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    if status is None:
        _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def run_tests(names: list[str]) -> int:
    import pytest

    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=line", "--no-header"]
    return int(pytest.main([*options, *names]))


# ------------------------------ which test passes which line


def trace(test_file: str, copy: Path, output: Path) -> int:
    """Runs a file's fast tests under coverage; writes the seconds of each and the lines that it passes."""
    import coverage
    import pytest

    tracer = coverage.Coverage(
        data_file=None, source=[str(copy / name) for name in ("src", "kernels", "eval")]
    )
    seconds, passed = {}, set()

    class Watch:
        @pytest.hookimpl(hookwrapper=True)
        def pytest_runtest_protocol(self, item):
            tracer.switch_context(item.nodeid)
            began = time.process_time()
            yield
            seconds[item.nodeid] = round(time.process_time() - began, 2)

        def pytest_runtest_logreport(self, report):
            if report.when == "call" and report.passed:
                passed.add(report.nodeid)

    tracer.start()
    options = ["-q", "--tb=short", "-m", "not slow or sampled"]
    options += ["-p", "no:cacheprovider", "-p", "no:xdist"]
    code = int(pytest.main([*options, test_file], plugins=[Watch()]))
    tracer.stop()

    data, names = tracer.get_data(), sorted(passed)
    number = {name: i for i, name in enumerate(names)}
    lines = {
        str(Path(file).relative_to(copy)): {
            line: [number[name] for name in contexts if name in number]
            for line, contexts in data.contexts_by_lineno(file).items()
        }
        for file in data.measured_files()
    }
    tests = [[name, seconds[name]] for name in names]
    output.write_text(json.dumps({"tests": tests, "lines": lines}))
    return 0 if code in (0, 5) else code


class Map:
    """The fast tests that pass a line."""

    def __init__(self, folder: Path):
        self.seconds: dict[str, float] = {}
        self.passing: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for file in sorted(folder.glob("*.json")):
            entry = json.loads(file.read_text())
            self.seconds |= dict(entry["tests"])
            for source, lines in entry["lines"].items():
                for line, numbers in lines.items():
                    self.passing[source][int(line)] |= {entry["tests"][n][0] for n in numbers}

    def tests(self, file: str, lines: range) -> list[str]:
        """Those of the lines; else, as for lines that an import runs, those of the file.

        Tests of the file's own room come first; then quick ones, one of each file of tests in turn.
        """
        by_line = self.passing.get(file, {})
        names = set().union(*(by_line.get(line, ()) for line in lines))
        names = names or set().union(*by_line.values())
        queues = defaultdict(list)
        for name in sorted(names, key=lambda name: (self.seconds[name], name)):
            queues[name.split("::")[0]].append(name)
        first = sorted(queues.values(), key=lambda queue: self.seconds[queue[0]])
        rounds = itertools.zip_longest(*first)
        in_turn = [name for names in rounds for name in names if name is not None]
        rooms = Path(file).parts
        return sorted(in_turn, key=lambda name: Path(name).parts[1] not in rooms)

    def beside(self, file: str) -> list[str]:
        """The tests that pass a line of a Python file in the folder of `file`, quick ones first."""
        folder = str(Path(file).parent)
        near = [by_line for source, by_line in self.passing.items() if source.startswith(folder)]
        names = set().union(*(tests for by_line in near for tests in by_line.values()))
        return sorted(names, key=lambda name: (self.seconds[name], name))


# ------------------------------ the faults


def files_of(room: str, copy: Path) -> list[str]:
    files = []
    for name in ROOMS[room]:
        path = copy / name
        files += [path] if path.is_file() else sorted(path.rglob("*.py"))
    return [str(path.relative_to(copy)) for path in files]


def statements(text: str) -> list[range]:
    """The lines of each statement; of one with a body, those before the body. Docstrings are none."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.stmt) or isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        body = getattr(node, "body", None)
        last = body[0].lineno - 1 if body else node.end_lineno
        found.append(range(node.lineno, max(last, node.lineno) + 1))
    return sorted(found, key=lambda lines: lines.start)


def annotations(text: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where types stand: faults there change nothing."""
    spans = []
    for node in ast.walk(ast.parse(text)):
        for key in ("annotation", "returns"):
            kind = getattr(node, key, None)
            if kind is not None:
                spans.append(
                    ((kind.lineno, kind.col_offset), (kind.end_lineno, kind.end_col_offset))
                )
    return spans


def mutants(text: str) -> dict[int, list[tuple[str, int]]]:
    """cosmic-ray's mutants of a file, as (operator, occurrence), by line."""
    import cosmic_ray.plugins
    from cosmic_ray.ast import ast_nodes, get_ast

    tree, spans, by_line = get_ast(text), annotations(text), defaultdict(list)
    nodes = list(ast_nodes(tree))
    for name in cosmic_ray.plugins.operator_names():
        kind = cosmic_ray.plugins.get_operator(name)
        if kind.arguments():
            continue
        operator = kind()
        positions = (position for node in nodes for position in operator.mutation_positions(node))
        for occurrence, (start, _) in enumerate(positions):
            if not any(first <= start < last for first, last in spans):
                by_line[start[0]].append((name, occurrence))
    return by_line


def changed(file: str, old: str, new: str) -> str:
    """A fault's title: its file, and the lines that go and come."""
    lines = unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0)
    kept = [line for line in lines if line[:3] not in ("---", "+++") and line[0] in "+-"]
    return "\n".join([file, *(f"{line[0]} {line[1:].strip()}" for line in kept)])


def drawn(count: int, seed: int, copy: Path) -> Iterator[Fault]:
    """A sample: rooms by their statements, then a statement, then one of its mutants."""
    import cosmic_ray.plugins
    from cosmic_ray.mutating import mutate_code

    texts = {file: (copy / file).read_text() for room in ROOMS for file in files_of(room, copy)}
    places = {
        room: [(file, lines) for file in files_of(room, copy) for lines in statements(texts[file])]
        for room in ROOMS
    }
    total, found = sum(map(len, places.values())), {}
    for room in ROOMS:
        draw = random.Random(f"{seed} {room}")
        draw.shuffle(places[room])
        left, interpreted = max(3, round(count * len(places[room]) / total)), FEW
        for file, lines in places[room]:
            if not left:
                break
            if file.startswith(INTERPRETED) and not interpreted:
                continue
            if file not in found:
                found[file] = mutants(texts[file])
            choices = [choice for line in lines for choice in found[file].get(line, ())]
            if not choices:
                continue
            name, occurrence = draw.choice(choices)
            operator, text = cosmic_ray.plugins.get_operator(name)(), texts[file]
            new = mutate_code(text, operator, occurrence)
            if new is None or new == text:
                continue
            left, interpreted = left - 1, interpreted - file.startswith(INTERPRETED)
            yield Fault(room, file, lines.start, new, False, changed(file, text, new))


def chosen(copy: Path) -> Iterator[Fault]:
    """The faults of faults.yaml. One whose text has changed since is named and left out."""
    for entry in yaml.safe_load((HERE / "faults.yaml").read_text()):
        file, old = entry["file"], entry["old"]
        text = (copy / file).read_text()
        if (count := text.count(old)) != 1:
            print(f"faults.yaml: {file} has {count} times {old!r}; left out", flush=True)
            continue
        new = text.replace(old, entry["new"])
        line = text[: text.index(old)].count("\n") + 1
        room = next(r for r, names in ROOMS.items() if any(file.startswith(n) for n in names))
        yield Fault(room, file, line, new, True, changed(file, text, new), entry.get("test"))


# ------------------------------ a try


def lines_of(fault: Fault, original: str) -> range:
    """The lines of the statement that the fault changes."""
    old, new = original.splitlines(), fault.new.splitlines()
    pairs = itertools.zip_longest(old, new)
    first = next(number for number, (a, b) in enumerate(pairs, 1) if a != b)
    around = [lines for lines in statements(original) if first in lines]
    return min(around, key=len) if around else range(first, first + 1)


def tries(fault: Fault, original: str, reach: Map) -> Iterator[list[str]]:
    """The tests of each try: the named one, a few quick ones, more within the budget."""
    if fault.test:
        yield [fault.test]
    if fault.file.endswith(".py"):
        names = reach.tests(fault.file, lines_of(fault, original))
    else:  # C++: the tests of the Python beside it
        names = reach.beside(fault.file)
    yield names[:FIRST]

    more, seconds = [], 0.0
    for name in names[FIRST:]:
        seconds += reach.seconds[name]
        if seconds < BUDGET:
            more.append(name)
    yield more


def try_fault(fault: Fault, reach: Map, copy: Path, log: Path) -> dict:
    """Puts the fault in, runs tests until one fails, and takes it out."""
    file, began, outcome, run = copy / fault.file, time.monotonic(), "no test", 0
    original = file.read_text()
    log.write_text("")
    try:
        file.write_text(fault.new)
        for tests in filter(None, tries(fault, original, reach)):
            limit = 60 + PATIENCE * sum(reach.seconds.get(name, 20) for name in tests)
            code = in_child(copy, lambda tests=tests: run_tests(tests), limit, log)
            # pytest knows no such test: with a fault that a table of tests does not survive, it is none.
            if code == 4 and tests == [fault.test]:
                sys.exit(f"{fault.title}: {log.read_text()[-300:]}")
            run += len(tests)
            outcome = "killed" if code else "survived"
            if code:
                break
    finally:
        file.write_text(original)

    facts = {key: value for key, value in asdict(fault).items() if key != "new"}
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", log.read_text(errors="replace"), re.MULTILINE)
    seen_by = failed[0] if failed else ""
    seconds = round(time.monotonic() - began)
    return {**facts, "outcome": outcome, "tests": run, "seconds": seconds, "seen_by": seen_by}


# ------------------------------ the report


def report(results: list[dict], seed: int) -> str:
    """The table of rooms, and each fault that no test saw when it was tried, with its verdict."""
    entries = yaml.safe_load((HERE / "verdicts.yaml").read_text()) or []
    verdicts = {entry["fault"].strip(): entry for entry in entries}
    counts: Counter = Counter()
    for entry in results:
        verdict = verdicts.get(entry["title"], {}).get("verdict", "open")
        outcome = "killed" if entry["outcome"] == "killed" else verdict
        for room in (entry["room"], "all"):
            counts[room, entry["by_hand"]] += 1
            counts[room, entry["by_hand"], outcome] += 1

    kinds = ("killed", "mended", "slow", "unseen", "equal", "open")
    machine = f"{platform.system()}, Python {platform.python_version()}"
    lines = [
        "# Mutants",
        "",
        f"{datetime.date.today()}, {machine}, seed {seed}. Written by `make mutants`: it puts faults into a copy",
        "of the product, one at a time, and runs the fast tests that pass their line. The chosen ones stand in",
        "tests/mutants/faults.yaml, the drawn ones are cosmic-ray's. What no test saw has a verdict, from",
        "tests/mutants/verdicts.yaml: *mended*, a test sees it now; *slow*, a slow test sees it; *unseen*, no user",
        "could see it; *equal*, it changes nothing.",
        "",
    ]
    for by_hand, name in ((True, "chosen"), (False, "drawn")):
        lines += [f"| {name} | faults | {' | '.join(kinds)} |", f"|---|{'---:|' * 7}"]
        for room in (*ROOMS, "all"):
            cells = [counts[room, by_hand], *(counts[room, by_hand, kind] for kind in kinds)]
            lines.append(f"| {room} | {' | '.join(map(str, cells))} |")
        lines.append("")

    lines += ["| fault that no test saw | verdict | why, or the test |", "|---|---|---|"]
    for entry in results:
        verdict = verdicts.get(entry["title"], {})
        if entry["outcome"] != "killed":
            title = "<br>".join(entry["title"].replace("|", "\\|").splitlines())
            lines.append(
                f"| {title} | {verdict.get('verdict', 'open')} | {verdict.get('why', '')} |"
            )
    return "\n".join([*lines, ""])


# ------------------------------ the campaign


def trace_all(copy: Path, work: Path, end: float) -> bool:
    """Traces the files of tests that were not traced yet. False: the time was up."""
    for path in sorted((copy / "tests").rglob("test_*.py")):
        test_file = str(path.relative_to(copy))
        output = work / "map" / f"{test_file.replace('/', '.')}.json"
        if output.exists() or test_file.startswith(APART):
            continue
        if time.monotonic() > end:
            return False
        act = partial(trace, test_file, copy, output)
        code = in_child(copy, act, 900, work / "logs" / f"{output.stem}.txt")
        print(f"{test_file}: {'traced' if code == 0 else f'exit code {code}'}", flush=True)
    return True


def parse() -> argparse.Namespace:
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--sample", type=int, default=160, help="faults of cosmic-ray")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e9, help="stop then; called again, go on")
    parser.add_argument(
        "--work", type=Path, default=ROOT / ".mutants", help="the copy, all results"
    )
    parser.add_argument("--report", type=Path, default=ROOT / "tests" / "MUTANTS.md")
    return parser.parse_args()


def main() -> int:
    options = parse()
    os.environ |= {**ENVIRONMENT, "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the child ends with this process
    end, work = time.monotonic() + 60 * options.minutes, options.work.resolve()
    for name in ("map", "logs"):
        (work / name).mkdir(parents=True, exist_ok=True)
    copy = work / "copy"
    if not copy.exists():
        make_copy(copy)
    load_libraries()
    if not trace_all(copy, work, end):
        return UNFINISHED

    file = work / "results.jsonl"
    done = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        entry = json.loads(line)
        done[entry["title"]] = entry
    reach = Map(work / "map")
    faults = [*chosen(copy), *drawn(options.sample, options.seed, copy)]
    for fault in faults:
        if fault.title in done:
            continue
        if time.monotonic() > end:
            break
        entry = done[fault.title] = try_fault(fault, reach, copy, work / "logs" / "fault.txt")
        with file.open("a") as stream:
            stream.write(json.dumps(entry) + "\n")
        print(
            f"{entry['outcome']}, {entry['seconds']} s: {fault.title!r} {entry['seen_by']}",
            flush=True,
        )

    results = [done[fault.title] for fault in faults if fault.title in done]
    options.report.write_text(report(results, options.seed))
    print(f"{len(results)} of {len(faults)} faults tried")
    return 0 if len(results) == len(faults) else UNFINISHED


if __name__ == "__main__":
    sys.exit(main())
