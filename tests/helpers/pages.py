"""The commands and the Python of the Markdown pages, and how tests type and run them."""

import os
import re
import runpy
import shlex
import signal
import sys
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from multiprocessing import get_context
from pathlib import Path
from string import Template

import typer

ROOT = Path(__file__).parents[2]
NEEDS = re.compile(r"# .*needs (a GPU|GPUs|a network)")
TAKES = re.compile(r"# .*(\b(minute|hour|day)s?\b|until ctrl-C)")
FILE = re.compile(r"# \w+\.py\n")
FENCE = re.compile(r"^( *)```(.*)\n((?:.*\n)*?) *```$", re.MULTILINE)
ASSIGNMENT = re.compile(r"(\w+)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class Command:
    """A command of a page. printed: what the page says it prints, if it does."""

    page: str
    line: int
    words: list[str]
    needs: str = ""
    takes: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    printed: str | None = None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {shlex.join(self.words)}"


@dataclass(frozen=True)
class Page:
    commands: list[Command]
    python: list[str]
    """Fences that need neither a GPU nor a network; they share their names. A fence that begins with the
    name of a file is not here: tests/model/test_plugins.py runs it."""
    named: list[str]
    """Commands in the text, as `nalanda runs`."""
    unknown: list[str]
    """Fences that the tests cannot read."""


def read_page(path: Path) -> Page:
    text, name = path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))
    page = Page([], [], [], [])
    for fence in FENCE.finditer(text):
        indent, language, body = fence.groups()
        first = text[: fence.start()].count("\n") + 2
        body = re.sub(f"^{indent}", "", body, flags=re.MULTILINE)
        if language in ("bash", "sh"):  # `sh` stays text in the notebook
            page.commands.extend(commands(name, first, body))
        elif language == "python":
            try:
                compile(body, name, "exec")
            except SyntaxError as error:
                page.unknown.append(f"{name}:{first}: {error}")
            page.python.extend([] if NEEDS.search(body) or FILE.match(body) else [body])
        elif language == "":
            typed, *rest = re.split(r"^\$ ((?:.*\\\n)*.*)\n", body, flags=re.MULTILINE)
            for line, printed in zip(rest[::2], rest[1::2], strict=True):
                at = first + body[: body.index(line)].count("\n")
                page.commands.extend(commands(name, at, line + "\n", printed))
            if re.search("^(nalanda|make|python3?|pip|accelerate|torchrun) ", typed, re.MULTILINE):
                page.unknown.append(f"{name}:{first}: commands belong in ```bash or behind $")
        elif language != "py":  # lines of a file; test_pages.py compares them with it
            page.unknown.append(f"{name}:{first}: ```{language}")
    page.named.extend(re.findall("`(nalanda[a-z-]* [a-z][^`…]+)`", FENCE.sub("", text)))
    return page


def commands(page: str, line: int, body: str, printed: str | None = None) -> list[Command]:
    found: list[Command] = []
    variables: dict[str, str] = {}
    for typed in re.findall(r"(?:.*\\\n)*.*\n", body):
        joined = Template(typed.replace("\\\n", " ")).safe_substitute(variables)
        words = shlex.split(joined, comments=True)
        environment = {}
        while words and (assigned := ASSIGNMENT.fullmatch(words[0])):
            environment[assigned[1]] = assigned[2]
            words = words[1:]
        if words and words[0] not in (".", "export"):
            needs, takes = NEEDS.search(typed), TAKES.search(typed)
            marks = needs[1] if needs else "", takes[0] if takes else ""
            found.append(Command(page, line, words, *marks, environment, printed))
        elif not words:
            variables |= environment
        line += typed.count("\n")
    return found


def read_arguments(
    app: typer.Typer, program: str, arguments: list[str], named: bool = False
) -> typer.Context | None:
    """The context of the command that the arguments name. It is not run.

    named: the command stands in the text, where it may be a group without a command: then None.
    Raises typer's usage errors.
    """
    context = typer.main.get_command(app).make_context(program, list(arguments))
    while hasattr(context.command, "resolve_command"):
        rest = [*context._protected_args, *context.args]
        if not rest and named:
            return None
        name, command, rest = context.command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)
    return context


# ------------------------------ running

SLOW = [
    "torch._dynamo",
    "torch.distributed.tensor",
    "transformers.modeling_utils",
    "transformers.generation.utils",
]
SLOW += ["accelerate", "datasets", "lm_eval.evaluator", "matplotlib.figure", "scipy.stats"]
"""Libraries whose import takes most of a command's time: they are imported once for all commands."""


def run(
    words: list[str], folder: Path, environment: dict[str, str], limit: float = 240
) -> tuple[int, str]:
    """The exit code of a command typed in `folder`, and what it printed. Its standard input is empty."""
    processes = get_context("forkserver")
    processes.set_forkserver_preload(SLOW)
    log = folder / ".printed"
    log.unlink(missing_ok=True)
    child = processes.Process(target=_run, args=(words, folder, environment, log))
    child.start()
    child.join(limit)
    if child.exitcode is None:
        os.killpg(child.pid or 0, signal.SIGKILL)  # and what it started
        child.join()
        return 124, f"not finished after {limit} s\n{log.read_text(errors='replace')}"
    return child.exitcode, log.read_text(encoding="utf-8", errors="replace")


def _run(words: list[str], folder: Path, environment: dict[str, str], log: Path) -> None:
    os.setsid()
    os.chdir(folder)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    os.environ |= {"COLUMNS": "110", "PATH": path, **environment}
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    start(words)


def start(words: list[str]) -> None:
    """What the shell would start, in this process."""
    program, *arguments = words
    if program not in ("python", "python3"):
        sys.argv = words
        (script,) = entry_points(group="console_scripts", name=program)
        sys.exit(script.load()())
    kind, *sys.argv = arguments
    if kind == "-c":
        code, sys.argv[0] = sys.argv[0], kind
        sys.path.insert(0, "")
        exec(compile(code, kind, "exec"), {"__name__": "__main__"})
    elif kind == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(kind).parent))
        runpy.run_path(kind, run_name="__main__")


DATA = "data.source=corpus data.seq_len=128 data.max_validation_rows=4 train.cpu_threads=1"
STEPS = "train.steps=8 train.tokens_per_step=512 train.micro_batch_size=2 schedule.warmup_steps=1"
TINY = f"{DATA} {STEPS} tokenizer.vocab_size=512 model.hidden_size=32 model.intermediate_size=64"
"""Settings of a run of seconds on what `write_corpus` writes."""


def write_corpus(folder: Path) -> str:
    """Writes 36 documents to train on and 4 to validate on. Returns their text."""
    text = "".join(file.read_text() for file in sorted((ROOT / "src/nalanda/model").glob("*.py")))
    for part, documents in ("train", range(4, 40)), ("validation", range(4)):
        (folder / part).mkdir(parents=True)
        for i in documents:
            (folder / part / f"{i}.txt").write_text(text[4000 * i : 4000 * (i + 1)])
    return text
