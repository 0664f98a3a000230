"""How functions become commands: options by typer, groups in panels, errors in one line, imports that wait."""

import contextlib
import gc
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from inspect import Parameter, getfile, signature
from pathlib import Path
from typing import Annotated, Any, TextIO, get_args, get_origin

import typer
import typer.core
import typer.main
from typer import Option

from nalanda.common.errors import InputError, one_line_errors, report_failure
from nalanda.common.fields import read_fields
from nalanda.common.next_steps import choose_prompt
from nalanda.common.progress import Progress
from nalanda.common.text import option_of, without_infinities
from nalanda.common.versions import kernel_packages, list_versions, versions
from nalanda.inference.options import Sampling

UsageError: Any = typer.BadParameter.__mro__[1]
"""typer's base of errors in a command line, which typer does not export."""


class Panels(typer.core.TyperGroup):
    """Lists commands by panel. Plain text, which is the same on a terminal and in a file."""

    panels: dict[str, tuple[str, ...]] | None
    """Names of commands by title; by default one panel with all."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, self.commands))
        panels = self.panels or {"Commands": tuple(self.commands)}
        for title, names in panels.items():
            rows = []
            for name in names:
                summary = self.commands[name].get_short_help_str(formatter.width)
                rows.append((name.ljust(width), summary))
            with formatter.section(title):
                formatter.write_dl(rows)


TRAIN_FURTHER = (
    "nalanda train RECIPE model.init_from=RUN/final tokenizer=RUN/final data.source=FILE, "
    "or nalanda linearize for a transformer"
)
INSTEAD_OF_COMMANDS = {
    "analyze": "nalanda eval or nalanda perplexity",
    "chat": "nalanda generate --chat or python examples/chat/chat.py",
    "download": "nalanda train RECIPE data.source=OWNER/DATASET, which streams it, or hf download",
    "finetune": TRAIN_FURTHER,
    "inspect": "nalanda data inspect",
    "list": "nalanda recipes or nalanda runs",
    "maps": "nalanda info",
    "mixers": "nalanda info",
    "models": "nalanda recipes",
    "prepare": "nalanda data prepare",
    "pretrain": "nalanda train",
    "sample": "nalanda generate",
    "sft": "python examples/assistant/assistant.py --config examples/assistant/assistant.yaml",
    "version": "nalanda --version",
}
"""Commands of other programs, with ours for the same end. They are only suggested."""

ON_DEVICES = (
    "nalanda info RECIPE --processes N estimates for N devices, "
    "accelerate launch --num_processes N recipes/pretrain.py RECIPE trains on them"
)
INSTEAD_OF_OPTIONS = {
    "--data": "write data.source=FILE",
    "--dataset": "write data.source=FILE",
    "--devices": ON_DEVICES,
    "--dry-run": "nalanda train RECIPE --rehearse tries a few steps, nalanda info RECIPE estimates",
    "--gpu": "nalanda info RECIPE --device NAME estimates for a GPU",
    "--gpus": ON_DEVICES,
}
"""Options of other programs that take a recipe, with what is typed here."""


def group(
    help: str, panels: dict[str, tuple[str, ...]] | None = None, completion: bool = False
) -> typer.Typer:
    """A group of commands, listed in panels as `Panels.panels` says.

    completion: whether it has `--install-completion`, of the shell.
    """
    return typer.Typer(
        cls=type("Panels", (Panels,), {"panels": panels}),
        help=keep_example_lines(help),
        no_args_is_help=True,
        add_completion=completion,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )


def command(group: typer.Typer) -> Callable[[Callable], Callable]:
    """Decorator of a command of `group`. Each field of a parameter that is a dataclass is an option.

    typer's options of some fields may stand beside the class: `Annotated[Sampling, {"seed": Option(min=0)}]`.
    """

    def register(function: Callable) -> Callable:
        group.command()(take_apart(function))
        return function

    return register


def take_apart(function: Callable) -> Callable:
    """`function` as typer reads it: with the fields of its dataclass parameters as keywords."""
    parameters: list[Parameter] = []
    objects: dict[str, type] = {}
    for parameter in signature(function).parameters.values():
        if parameter.name == "recipe":
            (argument,) = parameter.annotation.__metadata__
            argument.autocompletion = complete_recipe
        kind, options = parameter.annotation, {}
        if get_origin(kind) is Annotated:
            kind, options = get_args(kind)
        if is_dataclass(kind):
            objects[parameter.name] = kind
            parameters += options_of(kind, options)
        else:
            parameters.append(parameter)

    # Builds the dataclasses again, from the keywords that typer passes.
    def call(**values: Any) -> Any:
        for name, kind in objects.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
        return function(**values)

    call.__name__ = function.__name__
    call.__doc__ = keep_example_lines(function.__doc__ or "")
    # typer reads these too, and those of `call` say nothing.
    call.__annotations__ = {}
    call.__signature__ = signature(function).replace(parameters=parameters)  # type: ignore
    return call


def options_of(kind: Any, options: dict[str, Any]) -> list[Parameter]:
    """The fields of a dataclass as keywords. The text below a field is its help.

    options: typer's options of some fields, without help.
    """
    parameters = []
    texts = read_fields(Path(getfile(kind)))[kind.__name__]
    for field in fields(kind):
        # Without a name, typer would give each flag a second one that turns it off.
        flags = [option_of(field.name)] if field.type is bool else []
        option = options.get(field.name) or Option(*flags)

        _, text = texts[field.name]
        option.help = f"{text[:1].lower()}{text[1:].removesuffix('.')}"
        annotation = Annotated[field.type, option]  # type: ignore[not-a-type]
        parameters.append(
            Parameter(
                field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=annotation
            )
        )
    return parameters


def complete_recipe(incomplete: str) -> list[str]:
    """The recipes that begin so, for the shell's completion."""
    from nalanda.config.load import shipped_recipes

    return [name for name in shipped_recipes() if name.startswith(incomplete)]


def keep_example_lines(help: str) -> str:
    """Marks paragraphs of examples, which begin with `nalanda`: typer then keeps their lines apart."""
    return re.sub(r"\n\n( *)(?=nalanda )", r"\n\n\1\b\n\1", help)


def run_command(app: typer.Typer, name: str, arguments: list[str]) -> None:
    """Runs a command of `app`. A wrong use of it is one line on stderr, and its exit code.

    `help COMMAND` is `COMMAND --help`.
    """
    # An encoding may lack our characters. A caller's own stream has none.
    with contextlib.suppress(AttributeError):
        sys.stdout.reconfigure(errors="replace")  # pyrefly: ignore[missing-attribute]
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]

    with one_line_errors():
        command: Any = typer.main.get_command(app)
        # The shell asks by an environment variable, and ends here.
        command._main_shell_completion({}, name)
        try:
            with command.make_context(name, arguments) as context:
                command.invoke(context)
        except typer.Exit as stop:
            raise SystemExit(stop.exit_code) from None
        except UsageError as error:
            report_failure(describe_misuse(error, name), error.exit_code)
            raise SystemExit(error.exit_code) from None


def describe_misuse(error: UsageError, name: str) -> str:
    """The line for a wrong use of a command, or the help of a command without arguments."""
    message = error.format_message()
    if "\n" in message:
        return message

    path = error.ctx.command_path if error.ctx else name
    if unknown := re.match("No such command '(.*?)'", message):
        if instead := INSTEAD_OF_COMMANDS.get(unknown[1]):
            message = f"{unknown[0]}. Did you mean {instead}?"
        message = message.replace("Did you mean '", f"Did you mean '{path} ")
        return f"{path}: {message} See {path} --help"

    option = getattr(error, "option_name", None)  # of an unknown one
    parameters = (
        [(p.name, p.param_type_name) for p in error.ctx.command.params] if error.ctx else []
    )
    if option == "--prompt" and ("prompt", "argument") in parameters:
        message += """; the prompt is an argument: nalanda generate MODEL "TEXT\""""
    elif option == "--data" and ("text", "option") in parameters:
        message += "; the text is an option: --text FILE"
    elif option and ("overrides", "argument") in parameters:
        settings = "a recipe's settings are written section.key=value, such as train.steps=10"
        if option in INSTEAD_OF_OPTIONS:
            message = f"No such option: {option}"  # without those that are spelled like it
        message += f"; {INSTEAD_OF_OPTIONS.get(option, settings)}"
    elif "unexpected extra argument" in message:
        compares = "nalanda report RUN RUN compares runs, and " if path == "nalanda runs" else ""
        message += f"; {compares}{path} --help says what it takes"
    elif message.startswith("Missing argument"):
        names = [p.metavar or p.name.upper() for p in error.ctx.command.params if p.required]
        needed = [name.split("_OR_")[0] for name in names]
        message = f"{message.rstrip('.')}; write {' '.join([path, *needed])}"
    return f"{path}: {message}"


def allow_options(context: typer.Context, names: tuple[str, ...], why: str) -> None:
    """Raises `InputError` for a parameter that was typed on the command line and is not one of `names`."""
    for parameter in context.command.params:
        name = parameter.name or ""
        origin = context.get_parameter_source(name)
        if origin and origin.name == "COMMANDLINE" and name not in names:
            raise InputError(f"{parameter.opts[0]}: {why}; leave it out")


def print_json(figures: Any) -> None:
    """Prints figures as JSON; infinities and NaN, which it lacks, as texts as in metrics.jsonl."""
    finite = without_infinities(figures)
    print(json.dumps(finite, indent=1, ensure_ascii=False, allow_nan=False))


def under_way(what: str, stream: TextIO | None = None) -> contextlib.AbstractContextManager:
    """Shows that `what` is under way."""
    return Progress(what, stream=stream)


@contextlib.contextmanager
def loading_torch(stream: TextIO | None = None) -> Iterator[None]:
    """Shows that torch and transformers are being imported.

    Python would look for garbage among their millions of objects again and again, a fifth of the time. They stay
    until the end, so neither this nor a later search looks at them.
    """
    gc.disable()
    try:
        with under_way("loading torch and transformers", stream):
            yield
    finally:
        gc.freeze()
        gc.enable()


def resolve_models(names: list[str] | None) -> list[str]:
    """The models that are named, before the import of torch."""
    from nalanda.train.resolve import resolve_all

    return resolve_all(names)


def resolve_runs(names: list[str]) -> list[Path]:
    """The folders of the runs that are named."""
    from nalanda.train.resolve import run_of

    return [run_of(name) for name in names]


def sample_texts(runs: list[Path], count: int) -> list[list[tuple[str, str]]]:
    """`count` samples (prompt, continuation) of each run's model, the same ones each time."""
    if not count:
        return []
    with loading_torch():
        from nalanda.inference.generate import generate
        from nalanda.train.resolve import resolve

    samples = []
    for run in runs:
        model, prompt = resolve(str(run)).model, choose_prompt(run)
        draws = [Sampling(max_new_tokens=64, seed=seed) for seed in range(count)]
        with under_way("generating"):
            texts = [generate(model, prompt, sampling=draw, stream=False) for draw in draws]
        samples.append([(prompt, text) for text in texts])
    return samples


def page_sample(runs: list[Path], count: int | None) -> list[list[tuple[str, str]]]:
    """One sample of a finished run that stands alone, if nobody asked for another `count`; else none.

    A model that cannot continue a text, such as an encoder, loses the page no more than its sample.
    """
    if count is not None or len(runs) > 1 or not (runs[0] / "final" / "config.json").is_file():
        return []
    try:
        return sample_texts(runs, 1)
    except InputError as error:
        print(f"the page has no sample: {error}", file=sys.stderr)
        return []


def print_versions(wanted: bool) -> None:
    if not wanted:
        return
    from nalanda_kernels import API
    from nalanda_kernels.cpu.build import describe_library

    libraries = versions()
    ours = {"nalanda": libraries.pop("nalanda")}
    print(f"{list_versions([ours])} ({list_versions([libraries])})")
    print(f"kernels API {API}: {describe_library()}, {list_versions([kernel_packages()])}")
    raise typer.Exit


def add_version_option(app: typer.Typer) -> None:
    option = Option("--version", help="print versions", callback=print_versions, is_eager=True)

    @app.callback()
    def show_version(version: Annotated[bool, option] = False) -> None: ...


def set_environment() -> None:
    """Sets what the libraries below read, where the user has not."""
    # Their warnings are for their callers, not for who typed the command.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    # Some pseudo-terminals say so, and tables would be empty.
    if os.environ.get("COLUMNS") == "0":
        del os.environ["COLUMNS"]
    # By default GNU's OpenMP threads spin for milliseconds while they wait for one another. Where another
    # program has a core, a step then takes up to ten times as long; on an idle machine nothing changes.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
