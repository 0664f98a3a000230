"""The `nalanda` command.

It stands outside the package because importing that costs seconds: each command imports what it needs, and
`--help` nothing.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Annotated, Any

try:
    import typer
    import typer.main
except KeyboardInterrupt:  # before there is a `main` to say it
    sys.stderr.write("nalanda: interrupted\n")
    raise SystemExit(130) from None

app = typer.Typer(
    help="Pretrain linear-attention language models, score them, stream text from them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
bench = typer.Typer(help="Measure speed beside a peer's, and recall.", no_args_is_help=True)
app.add_typer(bench, name="bench", rich_help_panel=None)
data = typer.Typer(help="Tokenise a corpus once, and check what came of it.", no_args_is_help=True)
app.add_typer(data, name="data", rich_help_panel=None)
study = typer.Typer(help="Compare mixers and feature maps over many small runs.", no_args_is_help=True)
app.add_typer(study, name="study", rich_help_panel=None)

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
Temperature = Annotated[float, typer.Option(help="0 is greedy")]
TopP = Annotated[float, typer.Option(help="keep the likeliest tokens that make up this share")]
TopK = Annotated[int, typer.Option(help="keep at most so many tokens; 0 keeps all")]
SamplingSeed = Annotated[int | None, typer.Option(help="of the sampling; by default every call differs")]


@app.command()
def train(recipe: Recipe, overrides: Overrides = None) -> None:
    """Pretrain from a recipe.

    In this process; for many, `accelerate launch recipes/pretrain.py RECIPE` does the same.
    """
    from nalanda.config.load import load_config

    config = load_config(recipe, overrides or [])  # a mistake in it is said before torch is imported
    from nalanda.train.loop import train

    train(config)


@app.command()
def eval(
    models: Annotated[
        list[str] | None, typer.Argument(help="checkpoint directories or hub ids; they make one table")
    ] = None,
    tasks: Annotated[
        str,
        typer.Option(
            help="table4 (the literature's suite), all (it and six more), python_docs (the demo's), or, "
            "comma-separated, tasks of lm-evaluation-harness, task files and directories of them"
        ),
    ] = "table4",
    data: Annotated[
        str | None, typer.Option(help="directory with the tasks' data, for use without the hub")
    ] = None,
    fetch: Annotated[
        str | None, typer.Option(help="download the tasks' data into this directory, for --data; no scores")
    ] = None,
    limit: Annotated[float | None, typer.Option(help="documents a task, or a share of them below 1")] = None,
    batch_size: Annotated[int, typer.Option(help="texts read together; changes no result")] = 8,
    max_length: Annotated[
        int | None, typer.Option(help="tokens seen at once; by default the training length")
    ] = None,
    long: Annotated[
        str, typer.Option(help="longer texts are read in windows (window), or in one pass (whole)")
    ] = "window",
    no_share: Annotated[
        bool, typer.Option("--no-share", help="read a context again for each of its continuations")
    ] = False,
    output: Annotated[
        str | None,
        typer.Option(help="directory for results.json, .md, .csv, and for answers, so that a run can go on"),
    ] = None,
    device: Device = None,
    dtype: Dtype = "auto",
    trust_remote_code: RemoteCode = False,
) -> None:
    """Score models zero-shot.

    With lm-evaluation-harness, and beside the literature's rows. On several processes: torchrun
    --nproc-per-node 2 -m nalanda_cli eval …
    """
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if fetch is not None:
        from nalanda_eval.fetch import fetch_tasks

        fetch_tasks(names, fetch)
        return
    _check_models(models)
    from nalanda_eval.harness import evaluate, launched
    from nalanda_eval.report import print_results

    results = evaluate(
        models or [],
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


@app.command()
def perplexity(
    models: Annotated[
        list[str], typer.Argument(help="checkpoint directories or hub ids; they make one table and picture")
    ],
    text: Annotated[
        str,
        typer.Option(
            help="a text file, a directory or glob of documents, python (what the demo holds out), or a "
            "recipe: its validation part"
        ),
    ] = "python",
    set: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="changes that recipe: data.validation_split=test"),
    ] = None,
    joined: Annotated[
        bool, typer.Option("--joined", help="read the documents as one text, eos between them")
    ] = False,
    length: Annotated[
        int | None, typer.Option(help="tokens that are read in one pass; by default 16 windows")
    ] = None,
    window: Annotated[
        int | None, typer.Option(help="tokens of the windows beside; by default the training length")
    ] = None,
    tokens: Annotated[int, typer.Option(help="so many are scored; the last document is cut there")] = 2**18,
    output: Annotated[
        str, typer.Option(help="directory for perplexity.json, .csv and the picture")
    ] = "runs/perplexity",
    device: Device = None,
    dtype: Dtype = "auto",
    trust_remote_code: RemoteCode = False,
) -> None:
    """Perplexity of a text of any length, by position.

    In one pass through the state and in windows of the training length, over the same tokens: does the model
    gain from what lies further back than it was trained to read?
    """
    _check_models(models)
    from nalanda_eval.perplexity import perplexity, print_perplexity

    print_perplexity(
        perplexity(
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
    )


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="a checkpoint directory or hub id")],
    prompt: Annotated[
        str | None, typer.Argument(help="the text to continue; - reads it from standard input")
    ] = None,
    file: Annotated[str | None, typer.Option(help="a text file in its place, of any length")] = None,
    state: Annotated[str | None, typer.Option(help="go on from what --save-state wrote")] = None,
    save_state: Annotated[
        str | None, typer.Option(help="write what has been read to this file, before continuing it")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(help="stop after so many, or at the end-of-text token")
    ] = 128,
    temperature: Temperature = 0.8,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: SamplingSeed = None,
    device: Device = None,
    dtype: Dtype = "auto",
    trust_remote_code: RemoteCode = False,
) -> None:
    """Stream a continuation of a prompt."""
    from nalanda.inference.sampling import sampling_options

    sampling_options(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k)
    _check_models([model])
    from nalanda.inference.generate import generate

    generate(
        model,
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


@app.command()
def chat(
    model: Annotated[str, typer.Argument(help="a checkpoint directory or hub id")],
    system: Annotated[str, typer.Option(help="what the model is told first")] = "",
    state: Annotated[str | None, typer.Option(help="go on from a saved state or conversation")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="of an answer")] = 512,
    temperature: Temperature = 0.8,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: SamplingSeed = None,
    device: Device = None,
    dtype: Dtype = "auto",
    trust_remote_code: RemoteCode = False,
) -> None:
    """Talk with a model.

    By its chat template, or in plain text. The state is carried from turn to turn: only what is new is read.
    """
    from nalanda.inference.sampling import sampling_options

    sampling_options(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k)
    _check_models([model])
    from nalanda.inference.chat import chat

    chat(
        model,
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
    recipe: Annotated[
        str | None, typer.Argument(help="a recipe's file or name; without one, tables of all")
    ] = None,
    overrides: Overrides = None,
    processes: Annotated[int, typer.Option(min=1, help="processes that share a step")] = 1,
    device: Annotated[
        str, typer.Option(help="a process's, for the time: here, cpu, or a GPU such as H100")
    ] = "here",
    as_json: Annotated[bool, typer.Option("--json", help="print the figures as JSON")] = False,
) -> None:
    """What a recipe comes to.

    Parameters, FLOPs, state, memory, steps, tokens and time; nothing is allocated. Without a recipe: tables
    of the recipes that ship, the token mixers and the feature maps.
    """
    import json

    from nalanda.report import tables
    from nalanda.report.info import info, print_info

    if recipe is None:
        found = {
            "recipes": tables.recipe_rows(),
            "mixers": tables.mixer_rows(),
            "feature_maps": tables.map_rows(),
        }
        print(json.dumps(found, indent=1, ensure_ascii=False)) if as_json else tables.print_tables()
        return
    figures = info(recipe, overrides or [], processes, device=device)
    print(json.dumps(figures, indent=1)) if as_json else print_info(figures)


@app.command()
def export(
    run: Annotated[
        str, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="a run's folder, or a step-N in it")
    ],
    out: Annotated[str, typer.Argument(help="the folder to make")],
    step: Annotated[int | None, typer.Option(help="of the run; by default its newest checkpoint")] = None,
    push: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="upload the folder to this repository of the hub")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="with --push: for its owner's eyes")] = False,
) -> None:
    """Write a checkpoint as a model folder.

    Plain safetensors with config, code, tokenizer, recipe and model card, as transformers and the hub have
    them; of a sharded checkpoint as well. The card has the scores of a results.json of `nalanda eval` in the
    run's folder.
    """
    from pathlib import Path

    from nalanda.train.checkpoint_dir import find_checkpoint

    find_checkpoint(Path(run), step, check=False)
    from nalanda.train import export as work

    if push is None:
        print(work.export(Path(run), Path(out), step=step))
    else:
        print(work.push(Path(run), Path(out), push, step=step, private=private))


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="a model folder or hub id")],
    destination: Annotated[str, typer.Argument(help="the folder to make")],
    to: Annotated[
        str | None, typer.Option(help="nalanda, fla or llama; needed where the source leaves a choice")
    ] = None,
) -> None:
    """Convert models to and from other libraries' kinds.

    Between ours, flash-linear-attention's DeltaNet, Gated DeltaNet, GLA, RetNet and Transformer++, and
    transformers' Llama: equal logits, or an error that names what cannot be expressed.
    """
    _check_models([source])
    from nalanda.convert.convert import convert

    print(convert(source, destination, to))


@app.command()
def runs(
    directory: Annotated[str, typer.Argument(metavar="[DIR]", help="where the runs are")] = "runs",
    as_json: Annotated[bool, typer.Option("--json", help="print them as JSON")] = False,
) -> None:
    """List the runs of a directory.

    With model, step, loss, speed and state, what changed last first.
    """
    from nalanda.report.runs import overview, print_runs, runs_to_json

    found = overview(directory)
    print(runs_to_json(found)) if as_json else print_runs(found)


@app.command()
def verify(
    run: Annotated[str, typer.Argument(help="a run's folder")],
    as_json: Annotated[bool, typer.Option("--json", help="JSON, for other programs")] = False,
) -> None:
    """Check every checkpoint of a run: is it whole, finite, loadable?

    Exit code 1 where one is not. Reads all of their bytes.
    """
    from pathlib import Path

    from nalanda.train.checkpoint_dir import checkpoints_of

    checkpoints_of(Path(run))
    from nalanda.report.verify import print_verdict, verdicts_to_json, verify

    verdicts = []
    for verdict in verify(Path(run)):
        verdicts.append(verdict)
        if not as_json:
            print_verdict(verdict)
    if as_json:
        print(verdicts_to_json(verdicts))
    if not all(verdict.good for verdict in verdicts):
        raise SystemExit(1)


@app.command()
def plot(
    folders: Annotated[list[str], typer.Argument(metavar="RUN...", help="folders of runs")],
    output: Annotated[
        str | None, typer.Option(help="the picture; default: loss.png in the run, or here for several")
    ] = None,
    x: Annotated[str, typer.Option(help="tokens, steps or hours of training")] = "tokens",
    smooth: Annotated[bool, typer.Option(help="draw running means over the raw losses")] = True,
) -> None:
    """Draw runs' loss curves into one picture.

    Training and validation; the legend tells in what the runs differ.
    """
    from pathlib import Path

    from nalanda.report.plot import plot

    if x not in ("tokens", "steps", "hours"):
        raise typer.BadParameter("choose tokens, steps or hours", param_hint="--x")
    png = output or (Path(folders[0]) / "loss.png" if len(folders) == 1 else "loss.png")
    print(plot(folders, png, x=x, smooth=smooth))


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
    from nalanda_eval.plots import print_analysis
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
    print_analysis(*found)


@data.command()
def prepare(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE_OR_RECIPE",
            help="a directory, file, glob, hub dataset or python; or a recipe, for its data and tokenizer",
        ),
    ],
    output: Annotated[str, typer.Argument(help="directory of the prepared set; name it as data.source")],
    tokenizer: Annotated[
        str | None, typer.Option(help="a directory, hub id or file; by default one is trained")
    ] = None,
    train: Annotated[
        str | None, typer.Option("--train", help="the tokenizer to train on the documents: bpe or words")
    ] = None,
    vocab_size: Annotated[int | None, typer.Option(help="of the trained tokenizer")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="processes; by default one a core")] = None,
    shard_mb: Annotated[
        int | None, typer.Option(min=1, help="input of a shard in MiB; by default a 64th of it, 1 to 256")
    ] = None,
    validation_share: Annotated[
        float | None, typer.Option(help="documents held out where the source has no validation part")
    ] = None,
    text_field: Annotated[str | None, typer.Option(help="where a record has its text")] = None,
    source_field: Annotated[
        str | None, typer.Option(help="where a record names its source; a dot leads into a field")
    ] = None,
    bos: Annotated[bool | None, typer.Option("--bos/--no-bos", help="in front of every document")] = None,
    eos: Annotated[bool | None, typer.Option("--eos/--no-eos", help="behind every document")] = None,
    executor: Annotated[
        str | None, typer.Option(help="datatrove's: local, slurm or ray, in place of --workers")
    ] = None,
    tasks: Annotated[int, typer.Option(min=1, help="of the executor, each with its part of the shards")] = 1,
    logs: Annotated[str | None, typer.Option(help="the executor's; by default OUTPUT-logs")] = None,
    slurm_partition: Annotated[str | None, typer.Option(help="where the tasks run")] = None,
    slurm_time: Annotated[str, typer.Option(help="limit of a task")] = "24:00:00",
    slurm_arg: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE for sbatch; may be given many times")
    ] = None,
) -> None:
    """Tokenise a corpus into token shards.

    Once, in parallel, before training. Run it again after an interruption: what is finished stays. The bytes
    are the same whatever the number of workers, tasks or machines.
    """
    from dataclasses import replace
    from pathlib import Path

    from nalanda.config.load import load_config, shipped_recipes
    from nalanda.config.schema import DataConfig, TokenizerConfig
    from nalanda.data import inspect, token_set
    from nalanda.data.offline import use_mirror

    settings, its_tokenizer = DataConfig(source=source), TokenizerConfig(train="bpe")
    if source.endswith((".yaml", ".yml")) or (source in shipped_recipes() and not Path(source).exists()):
        recipe = use_mirror(load_config(source))
        settings, its_tokenizer = recipe.data, recipe.tokenizer
    asked: dict[str, Any] = {"path": tokenizer, "train": train, "vocab_size": vocab_size}
    if named := {key: value for key, value in asked.items() if value is not None}:
        its_tokenizer = TokenizerConfig(**(named if "path" in named else {"train": "bpe", **named}))
    chosen: dict[str, Any] = {
        "validation_share": validation_share,
        "text_field": text_field,
        "source_field": source_field,
        "bos": bos,
        "eos": eos,
    }
    settings = replace(settings, **{key: value for key, value in chosen.items() if value is not None})
    shard_bytes = shard_mb and shard_mb << 20
    if executor is None:
        from nalanda.data.prepare import prepare
        from nalanda.data.workers import processors

        index = prepare(
            settings,
            its_tokenizer,
            output,
            workers=workers or processors(),
            shard_bytes=shard_bytes,
            say=print,
        )
    else:
        from nalanda.data.datatrove import prepare_with

        prepare_with(
            executor,
            settings,
            its_tokenizer,
            output,
            tasks=tasks,
            workers=workers,
            shard_bytes=shard_bytes,
            logs=logs,
            slurm={"partition": slurm_partition, "time": slurm_time, "args": slurm_arg or []},
        )
        if not token_set.is_token_set(output):
            print(f"the tasks are in the queue; {output} is finished when it has an index.json")
            return
        index = token_set.read_index(output)
    inspect.print_token_set(index, output)


@data.command()
def inspect(
    directory: Annotated[str, typer.Argument(help="a prepared set")],
    verify: Annotated[bool, typer.Option("--verify", help="all SHA-256 sums, not the sizes alone")] = False,
    show: Annotated[int, typer.Option(min=0, help="print the beginning of so many documents")] = 0,
) -> None:
    """Print what a prepared set holds, and check it."""
    from nalanda.data.inspect import inspect

    inspect(directory, verify=verify, samples=show)


@data.command()
def fetch(
    recipe: Recipe,
    overrides: Overrides = None,
    to: Annotated[
        str, typer.Option("--to", help="the directory to fill; then set offline: DIR in the recipe")
    ] = "",
    max_shards: Annotated[
        int | None, typer.Option(min=1, help="files of each split, at most; for a part of a large dataset")
    ] = None,
) -> None:
    """Download what a recipe needs, for machines without a network.

    The tokenizer, the dataset's files, shards that have a URL, the model to start from. Run it again after an
    interruption: what is there stays.
    """
    from nalanda.config.load import load_config
    from nalanda.data.offline import fill_mirror

    if not to:
        raise typer.BadParameter("name the directory to fill: --to DIR")
    fill_mirror(load_config(recipe, overrides or []), to, max_shards=max_shards)


Folder = Annotated[
    str | None,
    typer.Argument(
        help="with study.yaml and lm.yaml; a new one gets Nalanda's own study", show_default=False
    ),
]


@study.command("run")
def study_run(
    directory: Folder = None,
    text: Annotated[
        str | None,
        typer.Option(
            help="the corpus: a directory in SlimPajama's layout, …; by default lm.yaml's data.source"
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="a small study, in minutes")] = False,
    workers: Annotated[int, typer.Option(min=1, help="processes, of one thread each")] = 2,
) -> None:
    """Train a study's models: all with one seed, the finalists with several; then report.

    Run it again after an interruption, or with more seeds in study.yaml: finished runs stay. By default the
    study is recipes/study of a checkout, elsewhere runs/study; with --quick it is runs/study-quick.
    """
    from nalanda_eval.studies.spec import begin_study, load_study, study_folder

    place = study_folder(directory, quick=quick)
    begin_study(place, quick=quick)
    load_study(place)  # reports most mistakes before torch is imported
    from nalanda_eval.studies.report import report
    from nalanda_eval.studies.run import run_study

    run_study(place, text=text, workers=workers)
    report(place)


@study.command("report")
def study_report(directory: Folder = None) -> None:
    """Remake a study's tables and pictures from its recorded runs.

    Writes RESULTS.md, whose words between the marks stay, and the pictures beside it.
    """
    from nalanda_eval.studies.spec import load_study, study_folder

    place = study_folder(directory)
    load_study(place)  # reports most mistakes before torch is imported
    from nalanda_eval.studies.report import report

    report(place)


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
    from nalanda.bench.ops import bench_ops

    bench_ops(threads=threads, json=json)


@bench.command()
def decode(
    threads: Annotated[int, typer.Option(min=1, help="CPU threads")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="measurements of each")] = 40,
    read: Annotated[
        bool, typer.Option("--read", help="read 64 k tokens, where states of 1 k and their count would do")
    ] = False,
    json: Annotated[str | None, typer.Option(help="write the figures to this file as well")] = None,
    png: Annotated[str | None, typer.Option(help="draw them into this file")] = None,
) -> None:
    """Milliseconds a token on this CPU behind 1 k to 64 k tokens.

    Gated DeltaNet, with and without the NaLa map, beside transformers' Qwen3-Next and our softmax.
    """
    from nalanda.bench.decode import bench_decode

    bench_decode(threads=threads, rounds=rounds, read=read, json=json, png=png)


@bench.command()
def recall(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SECTION.KEY=VALUE]...", help="settings to change: of a task, model or training"
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="comma-separated, of mqar, needle, copying, parity, modular, s5, regression, listops; by "
            "default all of these; also listops_lra, of the published length"
        ),
    ] = None,
    mixers: Annotated[
        str | None,
        typer.Option(help="comma-separated, with options as deltanet:allow_neg_eigval=true; default all"),
    ] = None,
    maps: Annotated[
        str | None, typer.Option(help="comma-separated feature maps, or own, each mixer's own; default all")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="runs of each; by default 3, quick 1")] = None,
    match: Annotated[
        str | None, typer.Option(help="at equal parameters, state (and parameters), or both, the default")
    ] = None,
    states: Annotated[str | None, typer.Option(help="comma-separated bytes of state to compare at")] = None,
    lrs: Annotated[
        str | None, typer.Option(help="comma-separated learning rates; the best by validation counts")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="of each run")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="a few models on small tasks, in minutes")] = False,
    output: Annotated[
        str, typer.Option(help="directory of runs, tables and pictures; finished runs in it are kept")
    ] = "runs/recall",
    workers: Annotated[int, typer.Option(min=1, help="processes, of one thread each")] = 2,
    device: Device = None,
) -> None:
    """What token mixers remember, on generated tasks.

    Trains every mixer with every feature map at equal parameters and equal state, several seeds, and draws
    accuracy against state size and number of pairs. Run it again after an interruption: finished runs stay.
    """
    from nalanda_eval.recall import recall

    def several(text: str | None) -> list[str] | None:
        return [part.strip() for part in text.split(",") if part.strip()] if text else None

    try:
        sizes, rates = [int(x) for x in several(states) or ()], [float(x) for x in several(lrs) or ()]
    except ValueError:
        raise typer.BadParameter(
            "write numbers with commas between them", param_hint="--states, --lrs"
        ) from None
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


running = False
"""Whether this process is the `nalanda` command: importing `nalanda` then loads no model, see there."""


def _check_models(names: list[str] | None) -> None:
    """Refuses a model that is not there before torch is imported."""
    from nalanda.config.model_folder import check_names

    check_names(names or [])


def main(arguments: list[str] | None = None) -> None:
    """The `nalanda` command; by default with the process's own arguments."""
    global running
    running = True
    # Warnings of the libraries below are for their callers, not for who typed the command.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
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
    """The line and the exit code for `error`; None where only a traceback tells what is wrong."""
    if _interrupted(error):
        return "nalanda: interrupted", 130
    if isinstance(error, typer.BadParameter.__mro__[1]):  # typer's: a wrong use of the command
        place = error.ctx.command_path if error.ctx else "nalanda"
        text = error.format_message()
        if "\n" in text:  # the help that a command without arguments gives
            return text, error.exit_code
        takes = error.ctx and any(p.name == "overrides" for p in error.ctx.command.params)
        how = "; a recipe's settings are written section.key=value, such as train.steps=10"
        return f"{place}: {text}{how if takes and hasattr(error, 'option_name') else ''}", error.exit_code
    from nalanda.common.errors import explained

    known = explained(error)
    return (f"nalanda: {known}", known.exit_code) if known else ("", None)


def _interrupted(error: BaseException | None) -> bool:
    """Whether it comes of ctrl-C; libraries that are being imported make other errors of that."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, KeyboardInterrupt):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


if __name__ == "__main__":  # python -m nalanda_cli: `running` is to be that of the module by its name
    import nalanda_cli

    nalanda_cli.main()
