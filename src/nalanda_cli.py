"""The `nalanda` command.

It stands outside the package because importing that costs seconds: each command imports what it needs, and
`--help` nothing.
"""

import os
from typing import Annotated

import typer

app = typer.Typer(
    help="Pretrain linear-attention language models, score them, stream text from them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
bench = typer.Typer(help="Measure speed beside a peer's.", no_args_is_help=True)
app.add_typer(bench, name="bench", rich_help_panel=None)

Recipe = Annotated[str, typer.Argument(help="a recipe's file, or the name of one that ships with Nalanda")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="settings to change")
]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda, cuda:1, …; by default the GPU where there is one")
]
Dtype = Annotated[str, typer.Option(help="auto (as saved), float32, bfloat16 or float16")]
RemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="run code that comes with the checkpoint")
]


@app.command()
def train(recipe: Recipe, overrides: Overrides = None) -> None:
    """Pretrain from a recipe.

    In this process; for many, `accelerate launch recipes/pretrain.py RECIPE` does the same.
    """
    from nalanda.config import load_config
    from nalanda.train import train

    train(load_config(recipe, overrides or []))


@app.command()
def eval(
    models: Annotated[
        list[str], typer.Argument(help="checkpoint directories or hub ids; they make one table")
    ],
    tasks: Annotated[
        str,
        typer.Option(
            help="table4 (the literature's suite), python_docs (the demo's), or, comma-separated, tasks "
            "of lm-evaluation-harness, task files and directories of them"
        ),
    ] = "table4",
    data: Annotated[
        str | None, typer.Option(help="directory with the tasks' data, for use without the hub")
    ] = None,
    limit: Annotated[float | None, typer.Option(help="documents a task, or a share of them below 1")] = None,
    batch_size: Annotated[int, typer.Option(help="requests scored together; changes no result")] = 8,
    max_length: Annotated[
        int | None, typer.Option(help="tokens seen at once; by default the training length")
    ] = None,
    output: Annotated[str | None, typer.Option(help="directory for results.json and results.md")] = None,
    device: Device = None,
    dtype: Dtype = "auto",
    trust_remote_code: RemoteCode = False,
) -> None:
    """Score models zero-shot.

    With lm-evaluation-harness, and beside the literature's rows.
    """
    from nalanda_eval.harness import evaluate
    from nalanda_eval.report import show

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    show(
        evaluate(
            models,
            names,
            data=data,
            limit=limit,
            batch_size=batch_size,
            max_length=max_length,
            output=output,
            device=device,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
        )
    )


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="a checkpoint directory or hub id")],
    prompt: Annotated[str, typer.Argument(help="the text to continue; - reads it from standard input")],
    max_new_tokens: Annotated[
        int, typer.Option(help="stop after so many, or at the end-of-text token")
    ] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.8,
    top_p: Annotated[float, typer.Option(help="keep the likeliest tokens that make up this share")] = 1.0,
    top_k: Annotated[int, typer.Option(help="keep at most so many tokens; 0 keeps all")] = 0,
    seed: Annotated[int | None, typer.Option(help="of the sampling; by default every call differs")] = None,
    device: Device = None,
    dtype: Dtype = "auto",
    trust_remote_code: RemoteCode = False,
) -> None:
    """Stream a continuation of a prompt."""
    from nalanda.generate import generate

    generate(
        model,
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
    )


@app.command()
def info(
    recipe: Annotated[
        str | None, typer.Argument(help="a recipe's file or name; without one, tables of all")
    ] = None,
    overrides: Overrides = None,
    processes: Annotated[int, typer.Option(min=1, help="processes that share a step")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="print the figures as JSON")] = False,
) -> None:
    """What a recipe comes to.

    Parameters, FLOPs, state, memory, steps and tokens; nothing is allocated. Without a recipe: tables of the
    recipes that ship, the token mixers and the feature maps.
    """
    import json

    from nalanda import tables
    from nalanda.info import info, show

    if recipe is None:
        found = {"recipes": tables.recipes(), "mixers": tables.mixers(), "feature_maps": tables.maps()}
        print(json.dumps(found, indent=1, ensure_ascii=False)) if as_json else tables.show()
        return
    figures = info(recipe, overrides or [], processes)
    print(json.dumps(figures, indent=1)) if as_json else show(figures)


@app.command()
def analyze(
    model: Annotated[
        str, typer.Argument(metavar="MODEL_OR_RECIPE", help="a checkpoint directory, hub id, or recipe")
    ],
    overrides: Overrides = None,
    text: Annotated[
        str | None, typer.Option(help="a text file; by default documents that come with Python")
    ] = None,
    length: Annotated[int, typer.Option(help="tokens in a row")] = 256,
    rows: Annotated[int, typer.Option(help="rows that the weights are averaged over")] = 4,
    output: Annotated[
        str | None, typer.Option(help="directory for analysis.json and the figures; default: by the model")
    ] = None,
    seed: Annotated[int, typer.Option(help="of an untrained model's weights and of the text's order")] = 0,
    device: Device = None,
    trust_remote_code: RemoteCode = False,
) -> None:
    """Measure what a model's token mixers do with a text.

    Entropy, sign, locality and rank of their weights, spread of their gradients: figures and one JSON.
    A recipe stands for the model that its run has trained, or for an untrained one.
    """
    from nalanda_eval.analysis import analyze
    from nalanda_eval.figures import show
    from rich.console import Console

    with Console(stderr=True).status("loading, measuring, drawing …"):
        found = analyze(
            model,
            overrides,
            text=text,
            length=length,
            rows=rows,
            output=output,
            seed=seed,
            device=device,
            trust_remote_code=trust_remote_code,
        )
    show(*found)


@bench.callback()
def _bench() -> None:
    """Keeps `ops` a command of its own."""


@bench.command()
def ops(
    threads: Annotated[int, typer.Option(min=1, help="CPU threads")] = 2,
    json: Annotated[str | None, typer.Option(help="write the figures to this file as well")] = None,
) -> None:
    """The recurrences on this CPU, beside transformers' torch paths.

    Forward and backward, in one run, after a check that the two agree.
    """
    from nalanda.bench import bench_ops

    bench_ops(threads=threads, json=json)


@bench.command()
def kernels(
    static: Annotated[
        bool, typer.Option("--static", help="compile them for GPUs that are not there")
    ] = False,
    traffic: Annotated[bool, typer.Option("--traffic", help="count the bytes that they move")] = False,
    tune: Annotated[bool, typer.Option("--tune", help="choose block sizes on this GPU, into a file")] = False,
    arch: Annotated[
        list[str] | None, typer.Option(help="with --static: sm_80, sm_90, sm_100; default all")
    ] = None,
    case: Annotated[list[str] | None, typer.Option(help="only this job, by the table's name")] = None,
    peer: Annotated[bool, typer.Option("--peer", help="flash-linear-attention's, not as recorded")] = False,
    json: Annotated[str | None, typer.Option(help="write the figures to this file as well")] = None,
) -> None:
    """What the kernels take and move, beside the peer's.

    Registers, spills and shared memory by the compiler, bytes by the interpreter; both without a GPU.
    """
    import subprocess
    import sys

    chosen = [name for name, on in (("static", static), ("traffic", traffic), ("tune", tune)) if on]
    if len(chosen) != 1:
        raise typer.BadParameter("choose one of --static, --traffic and --tune")
    given = [("--arch", arch or []), ("--case", case or []), ("--json", [json] if json else [])]
    rest = [text for name, values in given for value in values for text in (name, value)]
    # A process of its own: whether Triton compiles or interprets is settled as kernels are imported.
    command = [sys.executable, "-m", f"nalanda_kernels.{chosen[0]}", *rest, *["--peer"] * peer]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    raise typer.Exit(subprocess.run(command, env=environment).returncode)


def main() -> None:
    # Warnings of the libraries below are for their callers, not for who typed the command.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        app()
    except ValueError as error:
        # The module that knows InputError costs an import of the package; by now whoever raised it has paid.
        if type(error).__name__ != "InputError":
            raise
        typer.echo(f"nalanda: {error}", err=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
