"""The `nalanda` command.

This module is outside the package, whose import takes seconds: each command imports only what it needs.
"""

import sys
from pathlib import Path
from typing import Any

try:
    import typer

    import nalanda_options as opt
    from nalanda_typer import (
        add_version_option,
        allow_options,
        command,
        group,
        loading_torch,
        print_json,
        print_next,
        resolve_models,
        resolve_runs,
        run_command,
        sample_texts,
        set_environment,
        under_way,
    )
except KeyboardInterrupt:  # before `main` can handle it
    sys.stderr.write("nalanda: interrupted\n")
    raise SystemExit(130) from None

app = group(
    """Pretrain linear-attention language models, evaluate them, and generate text.

    nalanda train demo                          train a first, small model
    nalanda generate runs/demo "def "           continue a text with it
    nalanda COMMAND --help                      examples and options of a command
    """,
    opt.PANELS,
    completion=True,
)
data = group("Tokenise a corpus before training, and check the result.")
app.add_typer(data, name="data")
add_version_option(app)


@command(app)
def train(
    recipe: opt.RecipeOrPattern = None,
    overrides: opt.Overrides = None,
    keys: opt.ListKeys = False,
    rehearse: opt.Rehearse = False,
) -> None:
    """Pretrain from a recipe.

    nalanda train demo
    nalanda train gated_deltanet_340m optim.lr=1e-3 output_dir=runs/lr
    nalanda train gated_deltanet_340m --rehearse
    nalanda train --keys lr

    Runs in one process. For several: `accelerate launch recipes/pretrain.py RECIPE`.
    """
    if keys:
        from nalanda.report.keys import print_keys

        print_keys(recipe or "")
        return
    from nalanda.common.errors import InputError
    from nalanda.config.load import load_config

    if recipe is None:
        raise InputError("give a recipe: a file, or a name that `nalanda recipes` lists")
    # Mistakes are reported before anything is opened.
    config = load_config(recipe, overrides or [], training=True)
    with loading_torch(sys.stdout):
        from nalanda.train.loop import train
    if rehearse:
        from nalanda.report import rehearse as rehearsal

        rehearsal.print_rehearsal(rehearsal.rehearse(config))
        return
    run = train(config)
    print_next("train", of=run, run=run)


@command(app)
def eval(
    models: opt.ModelsOrNone = None,
    tasks: opt.Tasks = "table4",
    fetch: opt.FetchTo = None,
    *,
    options: opt.EvalOptions,
    loading: opt.LoadOptions,
) -> None:
    """Evaluate models on tasks, zero-shot by default.

    nalanda eval runs/demo --tasks python_docs
    nalanda eval runs/demo runs/lr --output runs/demo
    nalanda eval chat-model --tasks arc_easy --num-fewshot 5 --apply-chat-template

    Runs lm-evaluation-harness, and prints the scores beside published ones. For several processes: torchrun
    --nproc-per-node 2 -m nalanda_cli eval …
    """
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if fetch is not None:
        from nalanda_eval.fetch import fetch_tasks

        fetch_tasks(names, fetch, training=bool(options.num_fewshot))
        return
    from nalanda_eval.task_data import find_tasks

    from nalanda.inference.options import check_loading

    # Mistakes are reported before torch is imported.
    resolved = resolve_models(models)
    check_loading(loading)
    find_tasks(names, options.data)
    with loading_torch():
        from nalanda_eval.harness import evaluate
        from nalanda_eval.report import print_results

    print_results(evaluate(resolved, names, options, loading))
    print_next("eval", of=resolved[0], models=models)


@command(app)
def perplexity(
    models: opt.Models,
    text: opt.Text = "python",
    *,
    options: opt.PerplexityOptions,
    loading: opt.LoadOptions,
) -> None:
    """Measure perplexity by position, for texts of any length.

    nalanda perplexity runs/demo
    nalanda perplexity runs/demo --text book.txt --length 16384

    Reads the same tokens in one pass and in windows of the training length, to show whether the model uses
    context beyond its training length.
    """
    from nalanda.inference.options import check_loading

    resolved = resolve_models(models)
    check_loading(loading)
    with loading_torch():
        from nalanda_eval.perplexity import perplexity, print_perplexity

    result = perplexity(resolved, text, options, loading)
    if "directory" in result:  # of a launch's processes, the first
        print_perplexity(result)
        print_next("perplexity", of=resolved[0], models=models, output=options.output)


@command(app)
def generate(
    model: opt.Model,
    prompt: opt.Prompt = None,
    *,
    files: opt.PromptFiles,
    sampling: opt.Sampling,
    loading: opt.LoadOptions,
) -> None:
    """Stream a continuation of a prompt.

    nalanda generate runs/demo "def main(" --temperature 0.5
    nalanda generate runs/demo --file book.txt --save-state book.state
    """
    from nalanda.inference.options import check_files, check_loading, sampling_options

    # Mistakes are reported before torch is imported.
    sampling_options(sampling)
    check_loading(loading)
    check_files(files)
    resolved = resolve_models([model])[0]
    with loading_torch():
        from nalanda.inference.generate import generate

    generate(resolved, prompt, files, sampling, loading)
    if files.save_state is not None:
        print_next("save a state", of=resolved, model=model, state=files.save_state)


@command(app)
def recipes() -> None:
    """List the recipes that ship with Nalanda.

    nalanda recipes

    Shows mixer, feature map and parameters; on wide terminals the state, tokens and FLOPs too.
    """
    from nalanda.report.recipes import print_recipes, recipe_rows

    with under_way("counting parameters"):
        rows = recipe_rows()
    print_recipes(rows)


@command(app)
def info(
    recipe: opt.RecipeOrTables = None,
    overrides: opt.Overrides = None,
    processes: opt.Processes = None,
    device: opt.EstimatedDevice = "here",
    as_json: opt.AsJson = False,
) -> None:
    """Estimate a recipe's parameters, FLOPs, memory and time.

    nalanda info gated_deltanet_340m --device H100

    The model is not allocated. Without a recipe: tables of recipes, token mixers and feature maps.
    """
    from nalanda.config.load import load_config

    if recipe is not None:
        load_config(recipe, overrides or [])  # reports mistakes before anything is opened
    elif processes or device != "here":
        option = "--processes" if processes else "--device"
        raise typer.BadParameter("needs a recipe", param_hint=option)
    with loading_torch():
        from nalanda.report import tables
        from nalanda.report.info import info, print_info

    if recipe is None:
        figures, show = tables.all_rows(), tables.print_tables
    else:
        figures, show = info(recipe, overrides or [], processes, device=device), print_info
    print_json(figures) if as_json else show(figures)


@command(app)
def export(
    run: opt.RunOrCheckpoint,
    out: opt.NewFolder,
    step: opt.Step = None,
    push: opt.HubRepository = None,
    private: opt.Private = False,
) -> None:
    """Write a checkpoint, sharded or not, as a model folder.

    nalanda export runs/demo demo-model

    Safetensors, config, code, tokenizer, recipe and model card, in the form of transformers and the hub. The
    card has scores if `nalanda eval` wrote a results.json into the run's folder.
    """
    from nalanda.train.checkpoint_dir import find_checkpoint
    from nalanda.train.resolve import exported

    if private and push is None:
        raise typer.BadParameter("needs --push", param_hint="--private")
    source = exported(run)
    find_checkpoint(source, step, check=False)
    with loading_torch():
        from transformers.utils.logging import disable_progress_bar

        from nalanda.train import export as exporting

    folder = Path(out)
    disable_progress_bar()  # of writing a few files
    with under_way("writing the model"):
        if push is None:
            result: Any = exporting.export(source, folder, step=step)
        else:
            result = exporting.push(source, folder, push, step=step, private=private)
    print(result)

    # A checkpoint that was copied out of its run has no tokenizer.
    if (folder / "tokenizer_config.json").is_file():
        print_next("write a model", of=out, folder=out)


@command(app)
def convert(
    source: opt.ConvertedModel,
    destination: opt.NewFolderOrFile,
    to: opt.ModelFormat = None,
    check: opt.Check = True,
    dtype: opt.MatrixType = None,
) -> None:
    """Convert models to and from the formats of other libraries.

    nalanda convert runs/hybrid_30m/final hybrid.gguf --dtype q8_0
    nalanda convert runs/hybrid_30m/final published --to qwen3_5
    nalanda convert published ours

    Flash-linear-attention's DeltaNet, Gated DeltaNet, KDA, DeltaProduct, GLA, RetNet and Transformer++,
    transformers' Llama, Qwen3, Qwen3.5 and KimiLinear. What the other format cannot express is an error. Both
    models compute on a CPU, and no folder is made if they differ; the differences go into its README.md.
    llama.cpp and mlx-lm compute their own files.
    """
    resolved = resolve_models([source])[0]
    out = Path(destination)
    if to is None and out.suffix == ".gguf":
        to = "gguf"
    if to == "gguf" and out.suffix != ".gguf":
        out = out.with_name(f"{out.name}.gguf")
    if dtype is not None and to not in ("gguf", "mlx"):
        raise typer.BadParameter("--dtype is for --to gguf and mlx; elsewhere weights keep theirs")
    with loading_torch():
        from nalanda.convert.convert import convert, source_folder
        from nalanda.convert.gguf import write_gguf

    work = "converting and comparing" if check else "converting"
    with under_way(work), source_folder(resolved) as folder:
        if to == "gguf":
            result = write_gguf(folder, out, dtype or "fp32", check)
        else:
            result = convert(folder, destination, to, check, dtype)
    print(result)

    # What comes next depends on the library that reads the result.
    done = f"convert to {to}" if to in ("fla", "gguf", "mlx") else "convert"
    print_next(done, of=resolved, folder=result)


@command(app)
def linearize(model: opt.Transformer, recipe: opt.Recipe, overrides: opt.Overrides = None) -> None:
    """Put recurrent layers in place of a transformer's attention.

    nalanda linearize smollm2 linearize_smollm2_135m
    nalanda linearize smollm2 linearize_smollm2_135m model.feature_map=nala

    Each new layer learns the output of the attention that it replaces; the recipe's model.mixer says which
    layers. `nalanda train` then distils the hybrid, see the printed command.
    """
    from nalanda.config.load import load_config

    # Mistakes are reported before anything is opened.
    config = load_config(recipe, overrides or [], training=True)
    with loading_torch(sys.stdout):
        from nalanda.convert.fit import fit_layers

    folders = fit_layers(config, model)
    for folder in folders:
        print(folder)
    print_next("linearize", recipe=recipe, model=model, run=config.output_dir, folder=folders[0])


@command(app)
def runs(directory: opt.RunsFolder = "runs", as_json: opt.AsJson = False) -> None:
    """List the runs of a directory.

    nalanda runs
    nalanda runs runs/sweep --json

    Shows model, step, loss, speed and state, last changed first.
    """
    from nalanda.report.runs import overview, print_runs

    rows = overview(directory)
    print_json([vars(run) for run in rows]) if as_json else print_runs(rows)


@command(app)
def verify(run: opt.Run, as_json: opt.AsJson = False) -> None:
    """Check the checkpoints of a run.

    nalanda verify runs/demo

    Reads all of each to check that it is whole, finite and loadable. The exit code is 1 if one is not.
    """
    from nalanda.train.checkpoint_dir import checkpoints_of

    folder = resolve_runs([run])[0]
    checkpoints_of(folder)
    with loading_torch():
        from nalanda.report.verify import print_verdicts

    with under_way("reading the checkpoints"):
        good = print_verdicts(folder, as_json)
    if not good:
        raise SystemExit(1)


@command(app)
def report(folders: opt.Runs, output: opt.Page = None, samples: opt.Samples = 0) -> None:
    """Write a page about runs: curves, events, recipes.

    nalanda report runs/demo --samples 3
    nalanda report runs/demo runs/lr --output compared.html

    One HTML file that needs no network. Several runs share its panels; a table has what differs.
    """
    from nalanda.report.page import write_page

    runs = resolve_runs(folders)
    print(write_page(runs, output, sample_texts(runs, samples)))


@command(app)
def plot(folders: opt.Runs, output: opt.Picture = None, x: opt.Axis = "tokens") -> None:
    """Draw the loss curves of runs into one picture, for a paper.

    nalanda plot runs/demo runs/lr --output losses.png --x hours
    """
    from nalanda.report.plot import plot

    print(plot(resolve_runs(folders), output, x=x))


@command(data)
def prepare(
    context: typer.Context,
    source: opt.CorpusOrRecipe,
    output: opt.NewSet,
    overrides: opt.Overrides = None,
    workers: opt.Workers = None,
    shard_mb: opt.ShardMb = None,
    format: opt.SetFormat = "nalanda",
    *,
    documents: opt.DocumentOptions,
    tokenizer: opt.TokenizerOptions,
) -> None:
    """Tokenise a corpus into token shards.

    nalanda data prepare python tokens/python --vocab-size 4096
    nalanda data prepare gated_deltanet_340m tokens/340m data.source=texts

    Runs in parallel and resumes after an interruption. The number of workers does not change the bytes.
    """
    with under_way("loading"):
        from nalanda.common.errors import InputError
        from nalanda.data.inspect import print_megatron, print_token_set
        from nalanda.data.make_set import make_token_set, settings_to_train
        from nalanda.data.megatron import write_megatron

    if format not in ("nalanda", "megatron"):
        raise InputError(f"--format {format}: is unknown; there are nalanda and megatron")
    if format == "megatron":
        allow_options(context, ("source", "output", "format"), "a prepared set is written as it is")
        print_megatron(write_megatron(source, output), output)
        return

    index = make_token_set(
        source,
        output,
        data=vars(documents),
        tokenizer=vars(tokenizer),
        overrides=overrides or [],
        workers=workers,
        shard_bytes=shard_mb and shard_mb << 20,
        say=print,
    )
    print_token_set(index, output)

    training = settings_to_train(source, index, overrides or [])
    run = Path("runs", Path(output).name)
    if run.resolve() == Path(output).resolve():
        run = run.with_name(f"{run.name}-model")
    print_next("prepare", set=output, run=run, **training)


@command(data)
def inspect(directory: opt.PreparedSet, verify: opt.Sums = False, show: opt.Show = 0) -> None:
    """Summarize and check a prepared set.

    nalanda data inspect tokens/python --verify --show 3
    """
    from nalanda.data.inspect import inspect

    inspect(directory, verify=verify, samples=show)


@command(app)
def tune(json: opt.BlocksFile = "blocks.json", minutes: opt.Minutes = 30.0) -> None:
    """Choose the kernels' block sizes and backends on this GPU.

    nalanda tune --json blocks.json

    NALANDA_BLOCKS names the table that a run reads.
    """
    with loading_torch():
        import torch
        from nalanda_kernels.tune import choose

        from nalanda.common.errors import InputError

    if not torch.cuda.is_available():
        raise InputError("tune: torch sees no GPU; tune on a machine with one")
    choose(json, minutes=minutes)


running = False
"""Whether this process is the `nalanda` command: importing `nalanda` then loads no model, see there."""


def main(arguments: list[str] | None = None) -> None:
    """The `nalanda` command; by default with the process's own arguments."""
    global running
    running = True
    set_environment()
    run_command(app, "nalanda", sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":  # python -m nalanda_cli: use the `running` of the imported module
    import nalanda_cli

    nalanda_cli.main()
