"""The `nalanda` command.

This module is outside the package, whose import takes seconds: each command imports only what it needs.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
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

PANELS = {
    "nalanda": {
        "Train a model": ("info", "data", "train"),
        "Look at runs": ("runs", "plot", "verify"),
        "Evaluate a model": ("eval", "perplexity", "analyze"),
        "Use a model": ("generate", "chat"),
        "Convert a model": ("export", "convert"),
        "Measure and study": ("bench", "study"),
    },
    "data": {"Commands": ("fetch", "prepare", "inspect")},
    "bench": {
        "Speed on this CPU": ("ops", "train", "decode", "serve"),
        "Several processes": ("context", "scale"),
        "What mixers can learn": ("recall", "lra"),
        "GPU kernels": ("kernels",),
    },
    "study": {"Commands": ("run", "report", "claims")},
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
bench = _group("Measure speed against peers, and what mixers can learn.")
data = _group("Tokenise a corpus before training, and check the result.")
study = _group("Compare mixers and feature maps over many small runs.")
for group, name in ((bench, "bench"), (data, "data"), (study, "study")):
    app.add_typer(group, name=name)

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
Steps = Annotated[int | None, Option(min=1, help="training steps of each run")]
Quick = Annotated[bool, Option("--quick", help="few models on small tasks, in minutes")]
Workers = Annotated[int, Option(min=1, help="processes, of one thread each")]
Threads = Annotated[int, Option(min=1, help="CPU threads")]
Json = Annotated[str | None, Option(help="write the figures to this file as well")]
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
def chat(
    model: Model,
    system: Annotated[str, Option(help="system message")] = "",
    state: Annotated[str | None, Option(help="continue a saved state or conversation")] = None,
    max_new_tokens: Annotated[int, Option(help="length limit of an answer, in tokens")] = 512,
    temperature: Temperature = 0.8,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: SamplingSeed = None,
    device: Device = None,
    dtype: Dtype = "auto",
    trust_remote_code: RemoteCode = False,
) -> None:
    """Chat with a model.

    \b
    nalanda chat runs/demo/final

    Uses its chat template, or plain text. The state is kept between turns, so each turn reads only new text.
    """
    from nalanda.config.schema import check_seed
    from nalanda.inference.sampling import sampling_options

    sampling_options(
        max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k
    )
    check_seed(seed, "--seed")
    taken = _resolved([model])[0]
    with _loading():
        from nalanda.inference.chat import chat

    chat(
        taken,
        system=system,
        state=state,
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
    recipe: Annotated[str | None, Argument(help="recipe file or name; tables without one")] = None,
    overrides: Overrides = None,
    processes: Annotated[
        int | None,
        Option(min=1, help="processes that share a step; by default train.context_parallel"),
    ] = None,
    device: Annotated[
        str, Option(help="device of each process, for the time: here, cpu, or a GPU such as H100")
    ] = "here",
    devices: Annotated[
        str | None,
        Option(
            metavar="8,64,512",
            help="predict steps on so many devices by DDP, FSDP2, hybrid, context",
        ),
    ] = None,
    cluster: Annotated[
        str,
        Option(
            metavar="KEY=VALUE,…",
            help="with --devices: node (8 devices), peak (989 TFLOP/s), mfu (0.4), memory (80 GB), "
            "hbm (3350 GB/s), nvlink (450 GB/s), network (400 Gb/s a node), latency (5 µs), overlap (1)",
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Estimate a recipe's parameters, FLOPs, memory and time.

    \b
    nalanda info gated_deltanet_340m --device H100
    nalanda info gated_deltanet_340m --devices 8,64

    The model is not allocated. Without a recipe: tables of the recipes that ship with Nalanda, the token
    mixers and the feature maps.
    """
    import json

    from nalanda.config.load import load_config

    alone = recipe if devices is None else None
    for given, option, needed, message in (
        (devices, "--devices", recipe, "needs a recipe"),
        (cluster, "--cluster", devices, "needs --devices"),
        (processes, "--processes", alone, "needs a recipe, and no --devices"),
        (device != "here", "--device", alone, "needs a recipe, and no --devices"),
    ):
        if given and needed is None:
            raise typer.BadParameter(message, param_hint=option)
    if recipe is not None:
        load_config(recipe, overrides or [])  # reports mistakes before the import of torch
    with _loading():
        from nalanda.report import plan, tables
        from nalanda.report.info import info, print_info

    if recipe is None:
        figures: Any = tables.all_rows()
        show = partial(tables.print_tables, figures)
    elif devices is not None:
        wanted, counts = plan.clusters(devices, cluster), plan.count(recipe, overrides or [])
        plans = {each: plan.plan(counts, each) for each in wanted}
        figures, show = plan.plan_rows(plans), partial(plan.print_plan, counts, plans)
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


@app.command()
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
    trust_remote_code: RemoteCode = False,
) -> None:
    """Analyze the weights of a model's token mixers on a text.

    \b
    nalanda analyze runs/demo/final
    nalanda analyze demo model.feature_map=elu --text book.txt

    Measures their entropy, sign, locality and rank, and the spread of gradients; writes figures and a JSON
    file. A recipe means the model that its run has trained, or an untrained one.
    """
    from nalanda.train.resolve import is_model

    if is_model(model):
        model = _resolved([model])[0]
    with _loading():
        from nalanda_eval.analysis import analyze
        from nalanda_eval.plots import print_analysis

    with _doing("measuring"):
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
    print_analysis(*found)


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
    executor: Annotated[str | None, Option(help="run by datatrove: local, slurm or ray")] = None,
    tasks: Annotated[int, Option(min=1, help="tasks of the executor, which share the shards")] = 1,
    logs: Annotated[
        str | None, Option(help="directory for its logs; by default OUTPUT-logs")
    ] = None,
    slurm_partition: Annotated[str | None, Option(help="Slurm partition of the tasks")] = None,
    slurm_time: Annotated[str, Option(help="time limit of a task")] = "24:00:00",
    slurm_arg: Annotated[list[str] | None, Option(help="NAME=VALUE for sbatch; repeatable")] = None,
) -> None:
    """Tokenise a corpus into token shards.

    \b
    nalanda data prepare python tokens/python --vocab-size 4096
    nalanda data prepare gated_deltanet_340m tokens/340m --workers 16

    Runs in parallel and resumes after an interruption. The number of workers, tasks and machines does not
    change the bytes.
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
    for needs_executor in ("tasks", "logs", "slurm_partition", "slurm_time", "slurm_arg"):
        if executor is None and needs_executor in given:
            raise typer.BadParameter("needs --executor", param_hint=given[needs_executor])
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
        executor=executor,
        tasks=tasks,
        logs=logs,
        slurm={"partition": slurm_partition, "time": slurm_time, "args": slurm_arg or []},
    )
    if index is None:
        print(f"the tasks are queued; {output} is complete when it has an index.json")
        return
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


@data.command()
def fetch(
    recipe: Recipe,
    overrides: Overrides = None,
    to: Annotated[str, Option("--to", help="directory to fill, for offline: DIR in a recipe")] = "",
    max_shards: Annotated[
        int | None,
        Option(min=1, help="limit on the files of each split, for part of a large dataset"),
    ] = None,
) -> None:
    """Download all that a recipe needs, for machines without a network.

    \b
    nalanda data fetch gated_deltanet_340m --to mirror --max-shards 2

    Downloads the tokenizer, the dataset's files, shards with a URL and the initial model. Resumes after an
    interruption.
    """
    from nalanda.config.load import load_config
    from nalanda.data.offline import fill_mirror

    if not to:
        raise typer.BadParameter("name the directory to fill: --to DIR")
    fill_mirror(load_config(recipe, overrides or []), to, max_shards=max_shards)
    _next("fetch", recipe=recipe, overrides=overrides or [], mirror=to)


Folder = Annotated[
    str | None,
    Argument(
        help="folder with study.yaml and lm.yaml; a new one gets Nalanda's study",
        show_default=False,
    ),
]


@study.command("run")
def study_run(
    directory: Folder = None,
    text: Annotated[
        str | None,
        Option(
            help="corpus, such as a directory in SlimPajama's layout; by default that of before, or lm.yaml's"
        ),
    ] = None,
    quick: Annotated[bool, Option("--quick", help="run a small study, in minutes")] = False,
    workers: Workers = 2,
) -> None:
    """Train a study's models, each at its best rate, and report.

    \b
    nalanda study run --quick
    nalanda study run runs/mine --text ~/books --workers 8

    Every model has several seeds. Run it again after an interruption, or with more seeds in study.yaml:
    finished runs are kept. The default folder is recipes/study in a checkout, otherwise runs/study; with
    --quick it is runs/study-quick.
    """
    from nalanda_eval.studies.spec import begin_study, load_study, study_folder

    place = study_folder(directory, quick=quick)
    begin_study(place, quick=quick)
    load_study(place)  # reports most mistakes before torch is imported
    with _loading():
        from nalanda_eval.studies.report import report
        from nalanda_eval.studies.run import run_study

    run_study(place, text=text, workers=workers)
    report(place)
    _next("study", folder=place)


@study.command("report")
def study_report(directory: Folder = None) -> None:
    """Rewrite a study's tables and pictures from its recorded runs.

    \b
    nalanda study report runs/study-quick

    Writes RESULTS.md, keeping the text between its marks, and the pictures beside it.
    """
    from nalanda_eval.studies.spec import load_study, study_folder

    place = study_folder(directory)
    load_study(place)  # reports most mistakes before torch is imported
    from nalanda_eval.studies.report import report

    report(place)


@study.command("claims")
def study_claims(
    directory: Annotated[
        str | None, Argument(metavar="[DIR]", help="folder of the records", show_default=False)
    ] = None,
    text: Annotated[str | None, Option(help="corpus; by default Python's documentation")] = None,
    quick: Annotated[bool, Option("--quick", help="run tiny models, in 2 minutes")] = False,
) -> None:
    """Test the papers' other claims on small trained models.

    \b
    nalanda study claims --quick

    Trains what claims.jsonl has no record of, then writes CLAIMS.md and its figures from the records. The
    default folder is recipes/study/claims in a checkout, otherwise runs/claims; with --quick it is
    runs/claims-quick.
    """
    with _loading():
        from nalanda_eval.studies.claims import claims_folder, measure_claims
        from nalanda_eval.studies.claims_report import report_claims

    place = claims_folder(directory, quick=quick)
    measure_claims(place, text=text, quick=quick)
    report_claims(place, quick=quick)


@bench.command()
def ops(threads: Threads = 2, json: Json = None) -> None:
    """Time the recurrences against transformers' torch paths.

    \b
    nalanda bench ops --threads 4

    Measures forward and backward of both in one run, after checking that they agree.
    """
    with _loading():
        from nalanda.bench.ops import bench_ops

    bench_ops(threads=threads, json=json)


@bench.command("train")
def bench_training(
    threads: Threads = 2,
    rounds: Annotated[int, Option(min=1, help="steps of each model")] = 15,
    against: Annotated[
        str | None, Option(metavar="DIR", help="another checkout of Nalanda to compare with")
    ] = None,
    json: Json = None,
) -> None:
    """Time training steps at the demo's shape.

    \b
    nalanda bench train --rounds 5

    Compares Gated DeltaNet, with and without the NaLa map, to transformers' Qwen3.5 and Llama.
    """
    with _loading():
        from nalanda.bench.train import bench_train

    bench_train(threads=threads, rounds=rounds, against=against, json=json)


@bench.command("context")
def bench_parts(
    length: Annotated[int, Option(min=1024, help="tokens of the row for memory and time")] = 65536,
    json: Json = None,
) -> None:
    """Compare rows cut over processes to whole rows.

    \b
    nalanda bench context --length 16384

    On this CPU: errors, memory and time.
    """
    with _loading():
        from nalanda.bench.context import bench_context

    bench_context(length=length, json=json)


@bench.command("scale")
def bench_scaling(
    rounds: Annotated[int, Option(min=1, help="steps of each split")] = 10, json: Json = None
) -> None:
    """Hold predicted steps against those of two processes.

    \b
    nalanda bench scale

    The predictions are those of `nalanda info --devices`, from rates measured on this CPU: DDP, FSDP2 and
    rows cut over both, at the demo's shape over gloo.
    """
    with _loading():
        from nalanda.bench.scale import bench_scale

    bench_scale(rounds=rounds, json=json)


@bench.command("serve")
def bench_serving(
    threads: Annotated[int, Option(min=1, help="CPU threads of the server")] = 2,
    tokens: Annotated[int, Option(min=1, help="new tokens of a request")] = 64,
    json: Json = None,
) -> None:
    """Time `transformers serve` with 1, 8 and 32 clients.

    \b
    nalanda bench serve --tokens 32

    Compares Gated DeltaNet, with and without the NaLa map, to transformers' Llama of the demo's size.
    """
    with _loading():
        from nalanda.bench.serve import bench_serve

    bench_serve(threads=threads, tokens=tokens, json=json)


@bench.command()
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
    nalanda bench decode --rounds 20 --png decode.png

    Compares Gated DeltaNet, with and without the NaLa map, to transformers' Qwen3-Next and our softmax.
    """
    with _loading():
        from nalanda.bench.decode import bench_decode

    bench_decode(threads=threads, rounds=rounds, read=read, json=json, png=png)


@bench.command()
def recall(
    overrides: Annotated[
        list[str] | None,
        Argument(
            metavar="[SECTION.KEY=VALUE]...", help="settings of a task, model or training to change"
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        Option(
            help="comma-separated: mqar, needle, needles, copying, parity, modular, s3, a5, s5, regression, "
            "listops (default: all of these), or listops_lra, with the published length"
        ),
    ] = None,
    mixers: Annotated[
        str | None,
        Option(
            help="comma-separated, with options as in deltanet:allow_neg_eigval=true; default all"
        ),
    ] = None,
    maps: Annotated[
        str | None,
        Option(help="comma-separated feature maps, or own for each mixer's default; default all"),
    ] = None,
    seeds: Annotated[
        int | None, Option(min=1, help="runs per model; by default 3, quick 1")
    ] = None,
    match: Annotated[
        str | None,
        Option(help="compare at equal parameters, state (and parameters), or both (default)"),
    ] = None,
    states: Annotated[str | None, Option(help="comma-separated sizes of state, in bytes")] = None,
    lrs: Annotated[str | None, Option(help="comma-separated; validation chooses the best")] = None,
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
    nalanda bench recall --quick
    nalanda bench recall --tasks mqar --mixers gla,deltanet --seeds 1

    Trains every mixer with every feature map, with several seeds, at equal parameters and equal state. Draws
    accuracy against state size and number of pairs. Resumes after an interruption.
    """
    try:
        sizes, rates = (
            [int(x) for x in several(states) or ()],
            [float(x) for x in several(lrs) or ()],
        )
    except ValueError:
        raise typer.BadParameter(
            "write numbers with commas between them", param_hint="--states, --lrs"
        ) from None
    with _loading():
        from nalanda_eval.recall import recall

    recall(
        tasks=several(tasks),
        mixers=several(mixers),
        maps=several(maps),
        seeds=seeds,
        match=match,
        states=sizes,
        lrs=rates,
        steps=steps,
        overrides=overrides,
        output=output,
        workers=workers,
        device=device,
        quick=quick,
    )


@bench.command()
def lra(
    tasks: Annotated[
        str | None, Option(help="comma-separated: listops, text, retrieval, image, pathfinder")
    ] = None,
    mixers: Annotated[
        str | None,
        Option(help="comma-separated, also transnormer_t1 and transnormer_t2; default all"),
    ] = None,
    maps: Annotated[
        str | None, Option(help="comma-separated; by default own, each mixer's own")
    ] = None,
    data: Annotated[
        str | None,
        Option(help="folder with text, retrieval and image; docs/lra.md describes the files"),
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
    nalanda bench lra --quick
    nalanda bench lra --speed

    Trains every mixer as an encoder on the five tasks, or on small ones, and prints published rows beside.
    Resumes after an interruption.
    """
    with _loading():
        from nalanda_eval.lra import lra

    lra(
        tasks=several(tasks),
        mixers=several(mixers),
        maps=several(maps),
        data=data,
        size=size,
        seeds=seeds,
        steps=steps,
        output=output,
        workers=workers,
        device=device,
        quick=quick,
        speed=speed,
    )


@bench.command()
def kernels(
    static: Annotated[bool, Option("--static", help="compile them, without a GPU")] = False,
    traffic: Annotated[bool, Option("--traffic", help="count bytes moved, without a GPU")] = False,
    tune: Annotated[
        bool, Option("--tune", help="choose and save block sizes and backends on this GPU")
    ] = False,
    arch: Annotated[list[str] | None, Option(help="for --static: sm_80, sm_90, sm_100")] = None,
    case: Annotated[list[str] | None, Option(help="run only this case of the table")] = None,
    peer: Annotated[
        bool,
        Option("--peer", help="measure flash-linear-attention's kernels instead of using records"),
    ] = False,
    json: Json = None,
) -> None:
    """Measure the kernels' registers, memory and traffic.

    \b
    nalanda bench kernels --static --arch sm_90
    nalanda bench kernels --traffic

    Beside those of a peer. The compiler reports registers, spills and shared memory, the interpreter counts
    bytes.
    """
    import subprocess

    chosen = [name for name, on in (("static", static), ("traffic", traffic), ("tune", tune)) if on]
    if len(chosen) != 1:
        raise typer.BadParameter("choose one of --static, --traffic and --tune")
    given = [("--arch", arch or []), ("--case", case or []), ("--json", [json] if json else [])]
    rest = [text for name, values in given for value in values for text in (name, value)]
    # In a new process, because Triton chooses to compile or to interpret when kernels are imported.
    command = [sys.executable, "-m", f"nalanda_kernels.{chosen[0]}", *rest, *["--peer"] * peer]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    raise typer.Exit(subprocess.run(command, env=environment).returncode)


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
    with one_line_errors():
        command = typer.main.get_command(app)
        given = sys.argv[1:] if arguments is None else arguments
        with command.make_context("nalanda", list(given)) as context:
            command.invoke(context)


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """At a command line: what a person can mend is one line on stderr and an exit code, never a traceback."""
    try:
        yield
    except typer.Exit as stop:
        raise SystemExit(stop.exit_code) from None
    except BrokenPipeError:  # the reader, `head` for one, has what it wants
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except (Exception, KeyboardInterrupt) as error:
        line, code = _said(error)
        if code is None:
            raise
        print(line, file=sys.stderr, flush=True)
        raise SystemExit(code) from None


def _said(error: BaseException) -> tuple[str, int | None]:
    """The line and exit code for `error`; code None if it needs a traceback."""
    if _interrupted(error):
        return "nalanda: interrupted", 130
    if isinstance(error, typer.BadParameter.__mro__[1]):  # a wrong use of the command
        place = error.ctx.command_path if error.ctx else "nalanda"
        text = error.format_message()
        if "\n" in text:  # help of a command without arguments
            return text, error.exit_code
        takes = error.ctx and any(p.name == "overrides" for p in error.ctx.command.params)
        how = "; a recipe's settings are written section.key=value, such as train.steps=10"
        return (
            f"{place}: {text}{how if takes and hasattr(error, 'option_name') else ''}",
            error.exit_code,
        )
    from nalanda.common.errors import explained

    known = explained(error)
    return (f"nalanda: {known}", known.exit_code) if known else ("", None)


def _interrupted(error: BaseException | None) -> bool:
    """Whether ctrl-C caused `error`; libraries raise other errors if it interrupts their import."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, KeyboardInterrupt):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


if __name__ == "__main__":  # python -m nalanda_cli: use the `running` of the imported module
    import nalanda_cli

    nalanda_cli.main()
