"""The `nalanda-lab` command: what measures and studies. It needs a checkout, and imports only what it runs."""

import functools
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any

import typer
from typer import Argument, Option

from nalanda_typer import loading_torch, run_command

app = typer.Typer(
    help="Measure speed against peers, and what mixers can learn.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Device = Annotated[
    str | None, Option(help="cpu, cuda, cuda:1, …; by default a GPU if there is one")
]
Overrides = Annotated[
    list[str] | None, Argument(metavar="[SECTION.KEY=VALUE]...", help="settings to change")
]
Steps = Annotated[int | None, Option(min=1, help="training steps of each run")]
Quick = Annotated[bool, Option("--quick", help="few models on small tasks, in minutes")]
Workers = Annotated[int, Option(min=1, help="processes, of one thread each")]
Threads = Annotated[int, Option(min=1, help="CPU threads")]
Json = Annotated[str | None, Option(help="write the figures to this file as well")]


def several(text: str | None) -> list[str] | None:
    """The names of a list with commas."""
    return [name.strip() for name in text.split(",") if name.strip()] if text else None


def numbers(kind: type, text: str | None) -> list[Any]:
    try:
        return [kind(part) for part in several(text) or ()]
    except ValueError:
        raise typer.BadParameter("write numbers with commas between them") from None


def ints(text: str | None) -> list[Any]:
    return numbers(int, text)


def floats(text: str | None) -> list[Any]:
    return numbers(float, text)


def calls(place: str, group: typer.Typer = app) -> Callable[[Callable], Callable]:
    """Decorator of a command that calls `module:function` of this package with its options."""
    module, name = place.split(":")

    def register(declared: Callable) -> Callable:
        @functools.wraps(declared)
        def command(**options: Any) -> None:
            with loading_torch():
                function = getattr(import_module(f"nalanda_lab.{module}"), name)
            function(**options)

        return group.command()(command)

    return register


@calls("analysis:show_analysis")
def analyze(
    model: Annotated[str, Argument(metavar="MODEL_OR_RECIPE", help="checkpoint, hub id or recipe")],
    overrides: Overrides = None,
    text: Annotated[
        str | None, Option(help="text file; by default text from Python itself")
    ] = None,
    length: Annotated[int, Option(help="tokens per row")] = 256,
    rows: Annotated[int, Option(help="rows to average over")] = 4,
    output: Annotated[
        str | None,
        Option(
            help="directory for analysis.json and figures; by default in the run or by the model"
        ),
    ] = None,
    seed: Annotated[int, Option(help="seed of untrained weights and of the text's order")] = 0,
    device: Device = None,
    trust_remote_code: Annotated[
        bool, Option("--trust-remote-code", help="run code from the checkpoint")
    ] = False,
) -> None:
    """Analyze the weights of a model's token mixers on a text.

    \b
    nalanda-lab analyze runs/demo/final
    nalanda-lab analyze demo model.feature_map=elu --text book.txt

    Measures their entropy, sign, locality and rank, and the spread of gradients; writes figures and a JSON
    file. A recipe means the model that its run has trained, or an untrained one.
    """


@calls("speed.ops:bench_ops")
def ops(threads: Threads = 2, json: Json = None) -> None:
    """Time the recurrences against transformers' torch paths.

    \b
    nalanda-lab ops --threads 4

    Measures forward and backward of both in one run, after checking that they agree.
    """


@calls("speed.train:bench_train")
def train(
    against: Annotated[str, Argument(metavar="DIR", help="another checkout of Nalanda")],
    threads: Threads = 2,
    rounds: Annotated[int, Option(min=1, help="steps of each model")] = 15,
    json: Json = None,
) -> None:
    """Time training steps at the demo's shape beside another checkout's.

    \b
    nalanda-lab train ../nalanda-before --rounds 5
    """


@calls("speed.context:bench_context")
def context(
    length: Annotated[int, Option(min=1024, help="tokens of the row for memory and time")] = 65536,
    json: Json = None,
) -> None:
    """Measure memory and time of rows cut over processes, on this CPU.

    \b
    nalanda-lab context --length 16384
    """


@calls("speed.serve:bench_serve")
def serve(
    threads: Threads = 2,
    tokens: Annotated[int, Option(min=1, help="new tokens of a request")] = 64,
    rounds: Annotated[int, Option(min=1, help="measurements; the table has medians")] = 3,
    vllm: Annotated[
        str | None, Option(help="the Python of an environment with vLLM, which serves too")
    ] = None,
    json: Json = None,
) -> None:
    """Time `transformers serve`, and vLLM beside it, with 1, 8 and 32 clients.

    \b
    nalanda-lab serve --tokens 32

    Compares Gated DeltaNet, with and without the NaLa map, to transformers' Llama of the demo's size.
    """


@calls("speed.decode:bench_decode")
def decode(
    threads: Threads = 2,
    rounds: Annotated[int, Option(min=1, help="measurements of each model")] = 40,
    read: Annotated[bool, Option("--read", help="read 64 k tokens, not only 1 k")] = False,
    json: Json = None,
    png: Annotated[
        str | None, Option(help="write a picture to this file, and a PDF beside it")
    ] = None,
) -> None:
    """Time decoding at contexts of 1 k to 64 k tokens.

    \b
    nalanda-lab decode --rounds 20 --png decode.png

    Compares Gated DeltaNet, with and without the NaLa map, to transformers' Qwen3-Next and our softmax.
    """


speed = typer.Typer(help="Compare this release's speed to its peers.", no_args_is_help=True)
app.add_typer(speed, name="speed")


@calls("speed.cpu:bench_cpu", speed)
def cpu(
    rows: Annotated[
        str | None, Option(callback=several, help="comma-separated rows; by default all")
    ] = None,
    repeats: Annotated[
        int | None, Option(min=1, help="rounds of each row; by default its own number")
    ] = None,
    threads: Threads = 2,
    output: Annotated[
        str, Option(help="directory for a JSON file a row; rows that are there are kept")
    ] = "runs/speed_cpu",
) -> None:
    """Print the whole table of speeds on a CPU.

    \b
    nalanda-lab speed cpu --rows train_512,token_30m

    Compares training, evaluation and generation to the release before and to peers, in 25 minutes. Resumes after
    an interruption.
    """


@calls("recall:recall")
def recall(
    overrides: Overrides = None,
    tasks: Annotated[
        str | None,
        Option(
            callback=several,
            help="comma-separated: mqar, needles, copying, parity, modular, s3, a5, s5, listops (default: all of "
            "these), or listops_lra, with the published length",
        ),
    ] = None,
    mixers: Annotated[
        str | None,
        Option(
            callback=several,
            help="comma-separated, with options as in deltanet:allow_neg_eigval=true; default all",
        ),
    ] = None,
    maps: Annotated[
        str | None,
        Option(
            callback=several,
            help="comma-separated feature maps, or own for each mixer's default; default all",
        ),
    ] = None,
    seeds: Annotated[
        int | None, Option(min=1, help="runs per model; by default 3, quick 1")
    ] = None,
    match: Annotated[
        str | None,
        Option(help="compare at equal parameters, state (and parameters), or both (default)"),
    ] = None,
    states: Annotated[
        str | None, Option(callback=ints, help="comma-separated sizes of state, in bytes")
    ] = None,
    lrs: Annotated[
        str | None, Option(callback=floats, help="comma-separated; validation chooses the best")
    ] = None,
    steps: Steps = None,
    quick: Quick = False,
    output: Annotated[
        str, Option(help="directory for runs, tables and pictures; finished runs in it are kept")
    ] = "runs/recall",
    workers: Workers = 2,
    device: Device = None,
) -> None:
    """Measure recall of token mixers on synthetic tasks.

    \b
    nalanda-lab recall --quick
    nalanda-lab recall --tasks mqar --mixers gla,deltanet --seeds 1

    Trains every mixer with every feature map, with several seeds, at equal parameters and equal state. Draws
    accuracy against state size and number of pairs. Resumes after an interruption.
    """


@calls("lra:lra")
def lra(
    tasks: Annotated[
        str | None,
        Option(
            callback=several, help="comma-separated: listops, text, retrieval, image, pathfinder"
        ),
    ] = None,
    mixers: Annotated[
        str | None,
        Option(
            callback=several,
            help="comma-separated, also transnormer_t1 and transnormer_t2; default all",
        ),
    ] = None,
    maps: Annotated[
        str | None,
        Option(callback=several, help="comma-separated; by default own, each mixer's own"),
    ] = None,
    data: Annotated[
        str | None,
        Option(help="folder with text, retrieval and image; lab/pages/lra.md describes the files"),
    ] = None,
    size: Annotated[
        str | None,
        Option(help="sizes: skyformer (default), transnormer_paper, or transnormer (its code)"),
    ] = None,
    seeds: Annotated[int, Option(min=1, help="runs per model")] = 1,
    steps: Steps = None,
    quick: Quick = False,
    speed: Annotated[
        bool, Option("--speed", help="only time and memory of a training step beside softmax")
    ] = False,
    output: Annotated[
        str, Option(help="directory for runs, tables and the picture; finished runs in it are kept")
    ] = "runs/lra",
    workers: Workers = 2,
    device: Device = None,
) -> None:
    """Measure encoders on Long Range Arena.

    \b
    nalanda-lab lra --quick
    nalanda-lab lra --speed

    Trains every mixer as an encoder on the five tasks, or on small ones, and prints published rows beside.
    Resumes after an interruption.
    """


@calls("imitate:imitate")
def imitate(
    steps: Annotated[int, Option(min=1, help="training steps of each head")] = 600,
    json: Json = None,
) -> None:
    """Test which feature maps let ‖q‖ set how sharp a head is.

    \b
    nalanda-lab imitate

    Each map imitates a softmax head of random keys, with 3 seeds, in two minutes on one core.
    """


@calls("exponents:exponents")
def exponents(
    output: Annotated[
        str, Option(help="directory for exponents.json and the picture")
    ] = "runs/exponents",
) -> None:
    """Measure NaLa's exponent in untrained models, and draw it over the length of a query.

    \b
    nalanda-lab exponents

    It builds three recipes of 340 M parameters and three models of 2 M, in a minute and 3 GB of memory.
    """


@calls("states:states")
def states(
    models: Annotated[
        str | None,
        Option(
            callback=several, help="comma-separated: deltanet, deltanet-relu, …; by default all"
        ),
    ] = None,
    length: Annotated[int, Option(min=2048, help="tokens that each model reads")] = 16384,
    output: Annotated[
        str, Option(help="directory for a record a model; measured models are kept")
    ] = "runs/states",
) -> None:
    """Measure the loss of states in bfloat16, int8 and fp8.

    \b
    nalanda-lab states --models deltanet,mala

    Trains a small model of each mixer and map, and reads a held-out stream token by token in each precision.
    """


@app.command()
def fork(
    text: Annotated[
        str | None,
        Option(help="token set, as nalanda data prepare CORPUS TEXT --vocab-size 2048 makes it"),
    ] = None,
    out: Annotated[
        str, Option(help="directory for records, states and the log; finished runs in it are kept")
    ] = "runs/fork",
    report: Annotated[
        bool, Option("--report", help="only print the verdicts, once all runs have ended")
    ] = False,
    study: Annotated[
        str, Option(help="fork2, or a file like lab/nalanda_lab/fork2.yaml")
    ] = "fork2",
) -> None:
    """Fork trained models to see whether query norms lower the loss.

    \b
    nalanda-lab fork --text TEXT --out runs/fork
    nalanda-lab fork --out runs/fork --report

    Trains NaLa's mixers and softmax, and forks them with and without ‖q‖ in the exponent and its level. One
    thread, for about a day. It resumes after an interruption, and a second process of the same command shares
    the runs.
    """
    from pathlib import Path

    with loading_torch():
        from nalanda_lab import fork2_report
        from nalanda_lab.fork import SECOND, Experiment

    file = SECOND if study == "fork2" else Path(study)
    if report:
        raise typer.Exit(0 if fork2_report.report(Path(out), file) else 1)
    if text is None:
        raise typer.BadParameter("give the token set of the runs", param_hint="--text")
    Experiment(Path(text), Path(out), file).run()


@calls("linearize:print_report")
def linearize(folder: Annotated[str, Argument(help="folder with the unpacked records")]) -> None:
    """Print and draw the records of hybrids in place of a transformer: lab/records/linearize.tar.xz.

    \b
    nalanda-lab linearize runs/linearize
    """


@calls("field:make_table")
def field(
    names: Annotated[
        list[str] | None, Argument(help="classes of field.yaml; by default all of them")
    ] = None,
    records: Annotated[
        str, Option(help="directory for a record a class; classes that have one are kept")
    ] = "lab/records/field",
    minutes: Annotated[int, Option(min=1, help="time for each class")] = 30,
    again: Annotated[bool, Option("--again", help="check classes that have a record")] = False,
) -> None:
    """Check public classes, and write the table of docs/field.md.

    \b
    nalanda-lab field mamba --again

    Each class in a process of its own, by `nalanda check`. A difference enters the table once it was verified
    by hand and is listed in lab/nalanda_lab/field.yaml.
    """


@calls("width:check_coordinates")
def coordinates(
    recipe: Annotated[str, Argument(help="recipe, whose model has the base width")],
    overrides: Overrides = None,
    widths: Annotated[
        str, Option(callback=ints, metavar="W,W,…", help="values of hidden_size")
    ] = "64,128,256,512",
    steps: Annotated[int, Option(min=1, help="optimizer steps")] = 4,
    output: Annotated[
        str, Option(help="directory for the picture and the table")
    ] = "runs/coordinates",
    json: Json = None,
) -> None:
    """Check that activations keep their size in wider models, with µP and without.

    \b
    nalanda-lab coordinates demo model.hidden_size=64 model.head_dim=32 model.intermediate_size=128

    Trains models of each width for some steps on text of Python itself. Prints how the size of each output grows
    with the width, and how its change does.
    """


@calls("width:transfer")
def transfer(
    folder: Annotated[str, Argument(help="folder of the study, or of lab/records/width.tar.xz")],
) -> None:
    """Print and draw the best rates at several widths, with µP and without.

    \b
    nalanda-lab transfer runs/width

    Reads what `nalanda compare lab/nalanda_lab/width.yaml` has left there.
    """


def main(arguments: list[str] | None = None) -> None:
    """The `nalanda-lab` command; by default with the process's own arguments."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch's profiler announces its start and end
    run_command(app, "nalanda-lab", sys.argv[1:] if arguments is None else arguments)
