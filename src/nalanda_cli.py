"""The `nalanda` command.

This module is outside the package, whose import takes seconds: each command imports only what it needs.
"""

import contextlib
import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TextIO

try:
    import typer
    import typer.core
    import typer.main
    from typer import Argument, Option
except KeyboardInterrupt:  # before `main` can handle it
    sys.stderr.write("nalanda: interrupted\n")
    raise SystemExit(130) from None

UsageError: Any = typer.BadParameter.__mro__[1]
"""typer's base of errors in a command line, which typer does not export."""

PANELS = {
    "nalanda": {
        "Train a model": ("info", "data", "train"),
        "Look at runs": ("runs", "plot", "verify"),
        "Evaluate a model": ("eval", "perplexity"),
        "Use a model": ("generate",),
        "Convert a model": ("export", "convert"),
        "Tune the kernels": ("tune",),
    },
    "data": {"Commands": ("prepare", "inspect")},
}
"""The commands by what a person wants to do, in the order of the help."""


class Panels(typer.core.TyperGroup):
    """Lists commands as `PANELS` does. Plain text, which is the same on a terminal and in a file."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        panels = PANELS[self.name or "nalanda"]
        width = max(len(name) for names in panels.values() for name in names)
        for title, names in panels.items():
            rows = [
                (n.ljust(width), self.commands[n].get_short_help_str(formatter.width))
                for n in names
            ]
            with formatter.section(title):
                formatter.write_dl(rows)


def _group(help: str) -> typer.Typer:
    return typer.Typer(cls=Panels, help=help, no_args_is_help=True)


app = typer.Typer(
    cls=Panels,
    help="""Pretrain linear-attention language models, evaluate them, and generate text.

    \b
    nalanda train demo                          train a first, small model
    nalanda generate runs/demo/final "def "     continue a text with it
    nalanda COMMAND --help                      examples and options of a command
    """,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
data = _group("Tokenise a corpus before training, and check the result.")
app.add_typer(data, name="data")

Recipe = Annotated[str, Argument(help="recipe file, or the name of one that ships with Nalanda")]
Overrides = Annotated[
    list[str] | None, Argument(metavar="[SECTION.KEY=VALUE]...", help="settings to change")
]
Device = Annotated[
    str | None, Option(help="cpu, cuda, cuda:1, …; by default a GPU if there is one")
]
Dtype = Annotated[str, Option(help="auto (as saved), float32, bfloat16 or float16")]
RemoteCode = Annotated[bool, Option("--trust-remote-code", help="run code from the checkpoint")]
Temperature = Annotated[float, Option(help="sampling temperature; 0 is greedy")]
TopP = Annotated[float, Option(help="sample from the likeliest tokens with this total probability")]
TopK = Annotated[int, Option(help="sample from at most this many tokens; 0: all")]
Model = Annotated[str, Argument(help="a checkpoint directory or hub id")]
AsJson = Annotated[bool, Option("--json", help="print JSON")]
SamplingSeed = Annotated[
    int | None, Option(help="seed of the sampling; by default every call differs")
]


def _print_versions(asked: bool) -> None:
    if asked:
        from nalanda.common.versions import list_versions, versions

        found = versions()
        own = {"nalanda": found.pop("nalanda")}
        print(f"{list_versions([own])} ({list_versions([found])})")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, Option("--version", help="print versions", callback=_print_versions, is_eager=True)
    ] = False,
) -> None: ...


@app.command()
def train(
    recipe: Annotated[
        str | None, Argument(help="recipe file, or the name of one that ships")
    ] = None,
    overrides: Overrides = None,
    keys: Annotated[
        bool,
        Option("--keys", help="only list the keys of recipes; RECIPE is then a pattern to search"),
    ] = False,
) -> None:
    """Pretrain from a recipe.

    \b
    nalanda train demo
    nalanda train gated_deltanet_340m optim.lr=1e-3 output_dir=runs/lr
    nalanda train --keys lr

    Runs in one process. For several: `accelerate launch recipes/pretrain.py RECIPE`.
    """
    if keys:
        from nalanda.report.keys import print_keys

        print_keys(recipe or "")
        return
    from nalanda.common.errors import InputError
    from nalanda.config.load import load_config
    from nalanda.config.model_folder import architecture

    if recipe is None:
        raise InputError(
            "give a recipe: a file, or the name of one that ships; --keys lists its keys"
        )
    config = load_config(recipe, overrides or [])  # reports mistakes before the import of torch
    with _loading(sys.stdout):
        from nalanda.train.loop import train

    run = train(config)
    encoder = architecture(run / "final").endswith("MaskedLM")
    _next("train an encoder" if encoder else "train", of=run, run=run)


@app.command()
def eval(
    models: Annotated[list[str] | None, Argument(help="checkpoint directories or hub ids")] = None,
    tasks: Annotated[
        str,
        Option(
            help="comma-separated: table4 (the literature's suite), all (and six more), recall (SWDE, FDA, "
            "SQuAD, …), needles (RULER's), python_docs (of Python's text, without a network), tasks of "
            "lm-evaluation-harness, task files, directories of task files"
        ),
    ] = "table4",
    data: Annotated[
        str | None, Option(help="directory of the tasks' data; default: the hub")
    ] = None,
    fetch: Annotated[str | None, Option(help="only write the tasks' data here, for --data")] = None,
    limit: Annotated[
        float | None, Option(help="documents per task; below 1: share of them")
    ] = None,
    batch_size: Annotated[int, Option(help="texts read together; does not change results")] = 8,
    max_length: Annotated[
        int | None, Option(min=1, help="context in tokens; by default as in training")
    ] = None,
    long: Annotated[
        str, Option(help="how to read longer texts: window (in windows) or whole (in one pass)")
    ] = "window",
    no_share: Annotated[
        bool, Option("--no-share", help="read contexts once per continuation")
    ] = False,
    output: Annotated[
        str | None,
        Option(help="directory for results.json, .md, .csv, and for answers, to resume from"),
    ] = None,
    device: Device = None,
    dtype: Dtype = "auto",
    trust_remote_code: RemoteCode = False,
) -> None:
    """Evaluate models zero-shot.

    \b
    nalanda eval runs/demo/final --tasks python_docs
    nalanda eval runs/demo/final runs/lr/final --output runs/demo

    Runs lm-evaluation-harness, and prints the scores beside published ones. For several processes: torchrun
    --nproc-per-node 2 -m nalanda_cli eval …
    """
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if fetch is not None:
        from nalanda_eval.fetch import fetch_tasks

        fetch_tasks(names, fetch)
        return
    named, models = models, _resolved(models)
    with _loading():
        from nalanda_eval.harness import evaluate, launched
        from nalanda_eval.report import print_results

    results = evaluate(
        models,
        names,
        data=data,
        limit=limit,
        batch_size=batch_size,
        max_length=max_length,
        long=long,
        share=not no_share,
        output=output,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
    )
    state = launched()
    if state is None or state.is_main_process:
        print_results(results)
        _next("eval", of=models[0], models=named, model=(named or [""])[0])


@app.command()
def perplexity(
    models: Annotated[list[str], Argument(help="checkpoint directories or hub ids")],
    text: Annotated[
        str,
        Option(
            help="text file, directory or glob of documents, python (the demo's validation part), or a "
            "recipe, for its validation part"
        ),
    ] = "python",
    set: Annotated[
        list[str] | None,
        Option(
            metavar="KEY=VALUE", help="a setting of that recipe, such as data.validation_split=test"
        ),
    ] = None,
    joined: Annotated[
        bool, Option("--joined", help="join documents with eos between them")
    ] = False,
    length: Annotated[
        int | None, Option(help="tokens read in one pass; by default 16 windows")
    ] = None,
    window: Annotated[
        int | None, Option(help="tokens per window; by default as in training")
    ] = None,
    tokens: Annotated[int, Option(help="tokens to score; the last document is cut there")] = 2**18,
    output: Annotated[
        str, Option(help="directory for the results and picture")
    ] = "runs/perplexity",
    device: Device = None,
    dtype: Dtype = "auto",
    trust_remote_code: RemoteCode = False,
) -> None:
    """Measure perplexity by position, for texts of any length.

    \b
    nalanda perplexity runs/demo/final
    nalanda perplexity runs/demo/final --text book.txt --length 16384

    Reads the same tokens in one pass and in windows of the training length, to show whether the model uses
    context beyond its training length.
    """
    named, models = models, _resolved(models)
    with _loading():
        from nalanda_eval.perplexity import perplexity, print_perplexity

    result = perplexity(
        models,
        text,
        overrides=set,
        joined=joined,
        length=length,
        window=window,
        tokens=tokens,
        output=output,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
    )
    if "directory" in result:  # of a launch's processes, the first
        print_perplexity(result)
        _next("perplexity", of=models[0], models=named, model=named[0], output=output)


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str | None, Argument(help="text to continue; - reads standard input")] = None,
    file: Annotated[str | None, Option(help="text file to continue instead")] = None,
    state: Annotated[str | None, Option(help="continue a state that --save-state wrote")] = None,
    save_state: Annotated[str | None, Option(help="write the prompt's state to this file")] = None,
    max_new_tokens: Annotated[int, Option(help="length limit, unless the text ends earlier")] = 128,
    temperature: Temperature = 0.8,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: SamplingSeed = None,
    device: Device = None,
    dtype: Dtype = "auto",
    trust_remote_code: RemoteCode = False,
) -> None:
    """Stream a continuation of a prompt.

    \b
    nalanda generate runs/demo/final "def main(" --temperature 0.5
    nalanda generate runs/demo/final --file book.txt --save-state book.state
    """
    from nalanda.config.schema import check_seed
    from nalanda.inference.sampling import sampling_options

    sampling_options(
        max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k
    )
    check_seed(seed, "--seed")
    taken = _resolved([model])[0]
    with _loading():
        from nalanda.inference.generate import generate

    generate(
        taken,
        prompt,
        file=file,
        state=state,
        save_state=save_state,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
    )
    if save_state is not None:
        _next("save a state", of=taken, model=model, state=save_state)


@app.command()
def info(
    recipe: Annotated[str | None, Argument(help="recipe file or name; tables without one")] = None,
    overrides: Overrides = None,
    processes: Annotated[
        int | None,
        Option(min=1, help="processes that share a step; by default train.context_parallel"),
    ] = None,
    device: Annotated[
        str, Option(help="device of each process, for the time: here, cpu, or a GPU such as H100")
    ] = "here",
    as_json: AsJson = False,
) -> None:
    """Estimate a recipe's parameters, FLOPs, memory and time.

    \b
    nalanda info gated_deltanet_340m --device H100

    The model is not allocated. Without a recipe: tables of the recipes that ship with Nalanda, the token
    mixers and the feature maps.
    """
    import json

    from nalanda.config.load import load_config

    for given, option in ((processes, "--processes"), (device != "here", "--device")):
        if given and recipe is None:
            raise typer.BadParameter("needs a recipe", param_hint=option)
    if recipe is not None:
        load_config(recipe, overrides or [])  # reports mistakes before the import of torch
    with _loading():
        from nalanda.report import tables
        from nalanda.report.info import info, print_info

    if recipe is None:
        figures: Any = tables.all_rows()
        show = partial(tables.print_tables, figures)
    else:
        figures = info(recipe, overrides or [], processes, device=device)
        show = partial(print_info, figures)
    print(json.dumps(figures, indent=1, ensure_ascii=False)) if as_json else show()


@app.command()
def export(
    run: Annotated[
        str, Argument(metavar="RUN_OR_CHECKPOINT", help="folder of a run, or its step-N")
    ],
    out: Annotated[str, Argument(help="the folder to make")],
    step: Annotated[
        int | None, Option(help="step of the checkpoint; by default the newest")
    ] = None,
    push: Annotated[
        str | None,
        Option(metavar="OWNER/NAME", help="upload the folder to this repository on the hub"),
    ] = None,
    private: Annotated[
        bool, Option("--private", help="with --push: as a private repository")
    ] = False,
) -> None:
    """Write a checkpoint, sharded or not, as a model folder.

    \b
    nalanda export runs/demo demo-model

    Safetensors, config, code, tokenizer, recipe and model card, in the form of transformers and the hub. The
    card has scores if `nalanda eval` wrote a results.json into the run's folder.
    """
    from nalanda.config.model_folder import architecture
    from nalanda.train.checkpoint_dir import find_checkpoint
    from nalanda.train.resolve import exported

    if private and push is None:
        raise typer.BadParameter("needs --push", param_hint="--private")
    source = exported(run)
    find_checkpoint(source, step, check=False)
    with _loading():
        from transformers.utils.logging import disable_progress_bar

        from nalanda.train import export as work

    disable_progress_bar()  # of writing a few files
    with _doing("writing the model"):
        if push is None:
            made: Any = work.export(source, Path(out), step=step)
        else:
            made = work.push(source, Path(out), push, step=step, private=private)
    print(made)
    encoder = architecture(Path(out)).endswith("MaskedLM")
    if (
        Path(out) / "tokenizer_config.json"
    ).is_file():  # not of a checkpoint that was copied out of its run
        _next("write an encoder" if encoder else "write a model", of=out, folder=out)


@app.command()
def convert(
    source: Annotated[str, Argument(help="a model folder or hub id")],
    destination: Annotated[str, Argument(help="the folder to make, or the GGUF file")],
    to: Annotated[
        str | None,
        Option(
            help="nalanda, fla, llama, qwen3, qwen3_5, kimi_linear, mlx, gguf; required where more fit"
        ),
    ] = None,
    check: Annotated[bool, Option(help="compute with both models, one at a time in memory")] = True,
    dtype: Annotated[
        str | None,
        Option(
            help="of the matrices: gguf f32 (default), f16, bf16, q8_0; mlx as they are, f32, f16, bf16, q8"
        ),
    ] = None,
) -> None:
    """Convert models to and from the formats of other libraries.

    \b
    nalanda convert runs/hybrid_30m/final hybrid.gguf --to gguf --dtype q8_0
    nalanda convert runs/hybrid_30m/final published --to qwen3_5
    nalanda convert published ours

    Flash-linear-attention's DeltaNet, Gated DeltaNet, KDA, DeltaProduct, GLA, RetNet and Transformer++,
    transformers' Llama, Qwen3, Qwen3.5 and KimiLinear. What the other format cannot express is an error. Both
    models compute on a CPU, and no folder is made if they differ; the differences go into its README.md.
    llama.cpp and mlx-lm compute their own files.
    """
    from nalanda.config.model_folder import architecture

    taken = _resolved([source])[0]
    if dtype is not None and to not in ("gguf", "mlx"):
        raise typer.BadParameter("--dtype is for --to gguf and mlx; elsewhere weights keep theirs")
    with _loading():
        from nalanda.convert.convert import convert, source_folder
        from nalanda.convert.gguf import write_gguf

    with (
        _doing("converting and comparing" if check else "converting"),
        source_folder(taken) as folder,
    ):
        if to == "gguf":
            made = write_gguf(folder, destination, dtype or "f32", check)
        else:
            made = convert(folder, destination, to, check, dtype)
    print(made)
    if to in ("fla", "gguf", "mlx"):
        done = f"convert to {to}"
    else:
        ours = architecture(Path(destination)).startswith("Nalanda")
        done = "write a model" if ours else "convert"
    _next(done, of=taken, folder=destination)


@app.command()
def runs(
    directory: Annotated[str, Argument(metavar="[DIR]", help="directory of the runs")] = "runs",
    as_json: AsJson = False,
) -> None:
    """List the runs of a directory.

    \b
    nalanda runs
    nalanda runs runs/sweep --json

    Shows model, step, loss, speed and state, last changed first.
    """
    from nalanda.report.runs import overview, print_runs, runs_to_json

    found = overview(directory)
    print(runs_to_json(found)) if as_json else print_runs(found)


@app.command()
def verify(run: Annotated[str, Argument(help="a run's folder")], as_json: AsJson = False) -> None:
    """Check the checkpoints of a run.

    \b
    nalanda verify runs/demo

    Reads all of each to check that it is whole, finite and loadable. The exit code is 1 if one is not.
    """
    from nalanda.train.checkpoint_dir import checkpoints_of
    from nalanda.train.resolve import run_of

    folder = run_of(run)
    checkpoints_of(folder)
    with _loading():
        from nalanda.report.verify import print_verdict, verdicts_to_json, verify

    verdicts = []
    with _doing("reading the checkpoints"):
        for verdict in verify(folder):
            verdicts.append(verdict)
            if not as_json:
                print_verdict(verdict)
    if as_json:
        print(verdicts_to_json(verdicts))
    if not all(verdict.good for verdict in verdicts):
        raise SystemExit(1)


@app.command()
def plot(
    folders: Annotated[list[str], Argument(metavar="RUN...", help="folders of runs")],
    output: Annotated[
        str | None,
        Option(
            help="file of the picture, a PDF beside it; default: loss.png in the run, or here for several"
        ),
    ] = None,
    x: Annotated[str, Option(help="x axis: tokens, steps or hours (of training)")] = "tokens",
    smooth: Annotated[bool, Option(help="draw running means over the losses")] = True,
) -> None:
    """Draw the loss curves of runs into one picture.

    \b
    nalanda plot runs/demo
    nalanda plot runs/demo runs/lr --output losses.png --x hours

    Shows training and validation losses. The names at the lines' ends are the settings in which the runs
    differ.
    """
    from nalanda.report.plot import plot
    from nalanda.train.resolve import run_of

    if x not in ("tokens", "steps", "hours"):
        raise typer.BadParameter("choose tokens, steps or hours", param_hint="--x")
    found = [run_of(folder) for folder in folders]
    png = output or (found[0] / "loss.png" if len(found) == 1 else "loss.png")
    print(plot(found, png, x=x, smooth=smooth))


@data.command()
def prepare(
    context: typer.Context,
    source: Annotated[
        str,
        Argument(
            metavar="SOURCE_OR_RECIPE",
            help="directory, file, glob, hub dataset or python; a recipe, for its data and tokenizer; "
            "PREFIX.idx, of Megatron",
        ),
    ],
    output: Annotated[str, Argument(help="directory for the prepared set, to set as data.source")],
    tokenizer: Annotated[
        str | None,
        Option(help="directory, hub id or file of a tokenizer; by default one is trained"),
    ] = None,
    train: Annotated[
        str | None,
        Option("--train", help="kind of tokenizer to train on the documents: bpe or words"),
    ] = None,
    vocab_size: Annotated[int | None, Option(help="size of the trained tokenizer")] = None,
    workers: Annotated[int | None, Option(min=1, help="processes; by default one per core")] = None,
    shard_mb: Annotated[
        int | None,
        Option(min=1, help="MiB of input per shard; by default a 64th of the input, 1 to 256"),
    ] = None,
    validation_share: Annotated[
        float | None,
        Option(help="share of documents to hold out if the source has no validation part"),
    ] = None,
    text_field: Annotated[str | None, Option(help="field of a record with its text")] = None,
    source_field: Annotated[
        str | None, Option(help="field of a record with its source, such as meta.source")
    ] = None,
    name: Annotated[str | None, Option(help="hub: configuration of the dataset")] = None,
    revision: Annotated[
        str | None, Option(help="hub: commit, tag or branch; a commit pins the files")
    ] = None,
    bos: Annotated[
        bool | None, Option("--bos/--no-bos", help="put bos before every document")
    ] = None,
    eos: Annotated[
        bool | None, Option("--eos/--no-eos", help="put eos after every document")
    ] = None,
    format: Annotated[
        str, Option(help="nalanda, or megatron: a prepared set SOURCE as Megatron's .idx and .bin")
    ] = "nalanda",
) -> None:
    """Tokenise a corpus into token shards.

    \b
    nalanda data prepare python tokens/python --vocab-size 4096
    nalanda data prepare gated_deltanet_340m tokens/340m --workers 16

    Runs in parallel and resumes after an interruption. The number of workers does not change the bytes.
    """
    with _doing("loading"):
        from nalanda.common.errors import InputError
        from nalanda.config.load import is_recipe, load_config
        from nalanda.data.inspect import print_token_set
        from nalanda.data.make_set import make_token_set
        from nalanda.data.megatron import write_megatron

    if format not in ("nalanda", "megatron"):
        raise InputError(f"--format {format}: is unknown; there are nalanda and megatron")
    given = {
        parameter.name: parameter.opts[0]
        for parameter in context.command.params
        if (origin := context.get_parameter_source(parameter.name or ""))
        and origin.name == "COMMANDLINE"
    }
    if format == "megatron":
        for key, option in given.items():
            if key not in ("source", "output", "format"):
                raise InputError(f"{option}: a prepared set is written as it is; leave it out")
        for split, (documents, tokens) in write_megatron(source, output).items():
            made = f"{output}/{split}: {documents:,} documents, {tokens:,} tokens"
            print(made if documents else f"no {split}")
        return
    settings = {
        "validation_share": validation_share,
        "text_field": text_field,
        "source_field": source_field,
    }
    settings |= {"name": name, "revision": revision, "bos": bos, "eos": eos}
    index = make_token_set(
        source,
        output,
        data=settings,
        tokenizer={"path": tokenizer, "train": train, "vocab_size": vocab_size},
        workers=workers,
        shard_bytes=shard_mb and shard_mb << 20,
        say=print,
    )
    print_token_set(index, output)
    recipe = source if is_recipe(source) else "demo"
    asked = load_config(recipe).data
    made = {key: index["settings"][key] for key in ("bos", "eos")}
    needed = [
        f"data.{key}={str(value).lower()}"
        for key, value in made.items()
        if value != getattr(asked, key)
    ]
    needed += ["validation.every=0"] * (not index["validation"]["documents"])
    _next(
        "prepare", set=output, recipe=recipe, settings=needed, run=Path("runs", Path(output).name)
    )


@data.command()
def inspect(
    directory: Annotated[str, Argument(help="directory of a prepared set")],
    verify: Annotated[bool, Option("--verify", help="check SHA-256 sums, not only sizes")] = False,
    show: Annotated[int, Option(min=0, help="number of documents to print the beginning of")] = 0,
) -> None:
    """Summarize and check a prepared set.

    \b
    nalanda data inspect tokens/python --verify --show 3
    """
    from nalanda.data.inspect import inspect

    inspect(directory, verify=verify, samples=show)


@app.command()
def tune(
    json: Annotated[str, Option(metavar="FILE", help="the table to write")] = "blocks.json",
    minutes: Annotated[float, Option(help="time limit")] = 30.0,
) -> None:
    """Choose the kernels' block sizes and backends on this GPU.

    \b
    nalanda tune --json blocks.json

    NALANDA_BLOCKS names the table that a run reads.
    """
    from nalanda_kernels.tune import choose

    choose(json, minutes=minutes)


running = False
"""Whether this process is the `nalanda` command: importing `nalanda` then loads no model, see there."""


def several(text: str | None) -> list[str] | None:
    """The names of a list with commas."""
    return [part.strip() for part in text.split(",") if part.strip()] if text else None


def _doing(what: str, stream: TextIO | None = None) -> contextlib.AbstractContextManager:
    """Shows that this is under way."""
    from nalanda.common.progress import Progress

    return Progress(what, stream=stream)


_loading = partial(_doing, "loading torch and transformers")


def _next(done: str, **values: Any) -> None:
    """Prints what to do after `done`; see `next_steps`."""
    from nalanda.common.next_steps import print_next_steps

    print_next_steps(done, **values)


def _resolved(names: list[str] | None) -> list[str]:
    """The models that are named, before the import of torch; the hub is asked later, once."""
    from nalanda.train.resolve import resolve_all

    return resolve_all(names, hub=False)


def main(arguments: list[str] | None = None) -> None:
    """The `nalanda` command; by default with the process's own arguments."""
    global running
    running = True
    # Warnings of the libraries below are for their callers, not for who typed the command.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    # By default GNU's OpenMP threads spin for milliseconds while they wait for one another. Where another
    # program has a core, a step then takes up to ten times as long; on an idle machine nothing changes.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    run_command(app, "nalanda", sys.argv[1:] if arguments is None else arguments)


def run_command(app: typer.Typer, name: str, arguments: list[str]) -> None:
    """Runs a command of `app`. A wrong use of it is one line on stderr, and its exit code."""
    from nalanda.common.errors import one_line_errors

    with one_line_errors():
        command = typer.main.get_command(app)
        try:
            with command.make_context(name, arguments) as context:
                command.invoke(context)
        except typer.Exit as stop:
            raise SystemExit(stop.exit_code) from None
        except UsageError as error:
            print(describe_misuse(error, name), file=sys.stderr, flush=True)
            raise SystemExit(error.exit_code) from None


def describe_misuse(error: UsageError, name: str) -> str:
    """The line for a wrong use of a command, or the help of a command without arguments."""
    message = error.format_message()
    if "\n" in message:
        return message

    path = error.ctx.command_path if error.ctx else name
    takes_settings = error.ctx and any(p.name == "overrides" for p in error.ctx.command.params)
    if takes_settings and hasattr(error, "option_name"):  # an unknown option
        message += "; a recipe's settings are written section.key=value, such as train.steps=10"
    return f"{path}: {message}"


if __name__ == "__main__":  # python -m nalanda_cli: use the `running` of the imported module
    import nalanda_cli

    nalanda_cli.main()
