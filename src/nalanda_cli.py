"""The `nalanda` command: each command, below the arguments and options that only it takes.

Imports of torch take seconds: each command imports only what it needs.
"""

import sys
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from nalanda_eval.options import EvalOptions, PerplexityOptions
    from typer import Argument, Option

    from nalanda.check.options import CheckOptions
    from nalanda.common.errors import InputError, output_file
    from nalanda.common.next_steps import print_next_steps
    from nalanda.compare.options import Execution, StudyOptions
    from nalanda.data.options import DocumentOptions, TokenizerOptions
    from nalanda.inference.options import (
        LoadOptions,
        PromptFiles,
        Sampling,
        check_chat,
        check_files,
        check_loading,
        sampling_options,
    )
    from nalanda.serve.options import ServeOptions
    from nalanda_typer import (
        add_version_option,
        allow_options,
        command,
        group,
        loading_torch,
        page_sample,
        print_json,
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

PANELS: dict[str, tuple[str, ...]] = {
    "Train a model": ("recipes", "info", "data", "train"),
    "Look at runs": ("runs", "report", "plot", "verify"),
    "Compare settings": ("compare",),
    "Evaluate a model": ("eval", "perplexity"),
    "Use a model": ("generate", "serve", "check"),
    "Convert a model": ("export", "convert", "linearize"),
    "Tune the kernels": ("tune",),
}
"""The commands by what a person wants to do, in the order of the help."""

app = group(
    """Pretrain linear-attention language models, evaluate them, and generate text.

    nalanda train demo                          train a first, small model
    nalanda generate runs/demo "def "           continue a text with it
    nalanda COMMAND --help                      examples and options of a command
    """,
    PANELS,
    completion=True,
)
data = group("Tokenise a corpus before training, and check the result.")
app.add_typer(data, name="data")
add_version_option(app)

AsJson = Annotated[bool, Option("--json", help="print JSON")]
Overrides = Annotated[
    list[str] | None, Argument(metavar="SECTION.KEY=VALUE", help="settings to change")
]
Runs = Annotated[list[str], Argument(metavar="RUN", help="folders of runs")]

RecipeOrPattern = Annotated[str | None, Argument(help="recipe file, or the name of one that ships")]
ListKeys = Annotated[
    bool, Option("--keys", help="list the keys; RECIPE then filters them: nalanda train --keys lr")
]
Rehearse = Annotated[
    bool, Option("--rehearse", help="train three steps, measure memory and time, leave nothing")
]
Profile = Annotated[
    int,
    Option(min=0, help="trace N steps with torch's profiler, into the run's folder", metavar="N"),
]


@command(app)
def train(
    recipe: RecipeOrPattern = None,
    overrides: Overrides = None,
    keys: ListKeys = False,
    rehearse: Rehearse = False,
    profile: Profile = 0,
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
    from nalanda.config.load import load_config

    if recipe is None:
        raise InputError("give a recipe: a file, or a name that `nalanda recipes` lists")
    # Mistakes are reported before anything is opened.
    config = load_config(recipe, overrides or [], training=True)
    with loading_torch(sys.stdout):
        from accelerate import PartialState

        from nalanda.train.loop import train
    if rehearse:
        if profile:
            raise InputError("--profile: a rehearsal is too short for it; leave out one of the two")
        from nalanda.report import rehearse as rehearsal

        rehearsal.print_rehearsal(rehearsal.rehearse(config))
        return
    run = train(config, profile)
    PartialState().destroy_process_group()  # some ends without it abort
    print_next_steps("train", of=run, run=run)


ModelsOrNone = Annotated[list[str] | None, Argument(help="checkpoint directories or hub ids")]
Tasks = Annotated[
    str,
    Option(
        help="comma-separated: table4 (the literature's suite), all (and six more), recall (SWDE, FDA, "
        "SQuAD, …), needles (RULER's), python_docs (of Python's text, without a network), tasks of "
        "lm-evaluation-harness, task files, directories of task files"
    ),
]
FetchTo = Annotated[str | None, Option(help="only write the tasks' data here, for --data")]


@command(app)
def eval(
    models: ModelsOrNone = None,
    tasks: Tasks = "table4",
    fetch: FetchTo = None,
    *,
    options: Annotated[
        EvalOptions,
        {"num_fewshot": Option(min=0), "batch_size": Option(min=1), "max_length": Option(min=1)},
    ],
    loading: LoadOptions,
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

    # Mistakes are reported before torch is imported.
    resolved = resolve_models(models)
    check_loading(loading)
    find_tasks(names, options.data)
    with loading_torch():
        from nalanda_eval.harness import evaluate
        from nalanda_eval.report import print_results

    print_results(evaluate(resolved, names, options, loading))
    print_next_steps("eval", of=resolved[0], models=models)


Models = Annotated[list[str], Argument(help="checkpoint directories or hub ids")]
Text = Annotated[
    str,
    Option(
        help="text file, directory or glob of documents, python (the demo's validation part), or a "
        "recipe's .yaml, for its validation part"
    ),
]


@command(app)
def perplexity(
    models: Models,
    text: Text = "python",
    *,
    options: Annotated[PerplexityOptions, {"overrides": Option("--set", metavar="KEY=VALUE")}],
    loading: LoadOptions,
) -> None:
    """Measure perplexity by position, for texts of any length.

    nalanda perplexity runs/demo
    nalanda perplexity runs/demo --text book.txt --length 16384

    Reads the same tokens in one pass and in windows of the training length, to show whether the model uses
    context beyond its training length.
    """
    resolved = resolve_models(models)
    check_loading(loading)
    with loading_torch():
        from nalanda_eval.perplexity import perplexity, print_perplexity

    result = perplexity(resolved, text, options, loading)
    if "directory" in result:  # of a launch's processes, the first
        print_perplexity(result)
        print_next_steps("perplexity", of=resolved[0], models=models, output=options.output)


Model = Annotated[str, Argument(help="the folder of a run, a checkpoint or a model, or a hub id")]
Prompt = Annotated[str | None, Argument(help="text to continue; - reads standard input")]
Chat = Annotated[bool, Option("--chat", help="answer the prompt, by the model's chat template")]


@command(app)
def generate(
    model: Model,
    prompt: Prompt = None,
    chat: Chat = False,
    *,
    files: PromptFiles,
    sampling: Sampling,
    loading: LoadOptions,
) -> None:
    """Stream a continuation of a prompt, or the answer to it.

    nalanda generate runs/demo "def main(" --temperature 0.5
    nalanda generate runs/demo --file book.txt --save-state book.state
    nalanda generate runs/assistant "What is 3 + 4?" --chat
    """
    # Mistakes are reported before torch is imported.
    check_chat(chat, prompt, files)
    sampling_options(sampling)
    check_loading(loading)
    check_files(files)
    resolved = resolve_models([model])[0]
    with loading_torch():
        from nalanda.inference.generate import generate

    generate(resolved, prompt, files, sampling, loading, chat=chat)
    if files.save_state is not None:
        print_next_steps("save a state", of=resolved, model=model, state=files.save_state)


ModelFolder = Annotated[str, Argument(help="the folder of a run or a model")]
EngineOptions = Annotated[
    list[str] | None, Argument(metavar="-- OPTION", help="options of the server that is started")
]


@command(app)
def serve(
    model: ModelFolder,
    others: EngineOptions = None,
    *,
    options: Annotated[ServeOptions, {"port": Option(min=1, max=65535)}],
) -> None:
    """Serve a model by OpenAI's API, until ctrl-C.

    nalanda serve runs/demo
    nalanda serve runs/demo --port 9000 -- --device cpu

    Starts vLLM's server, or that of transformers, at an address of this machine. Prints a question in curl.
    """
    from nalanda.serve import server

    # Mistakes are reported before anything is loaded.
    folder = server.served_folder(model)
    engine = server.choose_engine(options.engine)
    server.check_address(options.host, options.port)

    server.print_introduction(engine, folder, options)
    if engine == "vllm":
        server.run_vllm(folder, options, others or [])
    with loading_torch():
        from nalanda.serve.transformers_server import run_transformers
    run_transformers(folder, options, others or [])


AnyModel = Annotated[
    str, Argument(help="a folder, a hub id, or a type of model that transformers knows")
]
ConfigFields = Annotated[
    list[str] | None, Argument(metavar="FIELD=VALUE", help="fields of its config to change")
]
PageFile = Annotated[Path | None, Option("--html", help="write a page to this file")]


@command(app)
def check(
    model: AnyModel,
    fields: ConfigFields = None,
    as_json: AsJson = False,
    html: PageFile = None,
    *,
    options: Annotated[CheckOptions, {"layers": Option(min=1), "width": Option(min=16)}],
) -> None:
    """Check that any model is exact in batches, packed rows and caches.

    nalanda check runs/demo
    nalanda check qwen3_next
    nalanda check HUB_ID --layers 4 --width 128

    Each property computes one thing in two ways, in float64 where the model can. A difference comes with the
    shortest program that shows it. Exits with 1 if a property differs or fails.
    """
    from nalanda.config.load import parse_yaml

    changes = dict(field.split("=", 1) for field in fields or [] if "=" in field)
    if len(changes) < len(fields or []):
        raise typer.BadParameter("each needs FIELD=VALUE", param_hint="FIELD=VALUE")
    values = {key: parse_yaml(value, f"{key}={value}") for key, value in changes.items()}
    file = html and output_file(html, "--html")
    with loading_torch():
        from nalanda.check import page
        from nalanda.check.command import check_named

    subject, rows = check_named(model, values, options)
    if file:
        file.write_text(page.findings_page(subject, rows), encoding="utf-8")
    print(page.findings_json(subject, rows)) if as_json else page.print_findings(subject, rows)
    if any(row.is_wrong for row in rows):
        raise typer.Exit(1)


@command(app)
def recipes() -> None:
    """List the recipes that ship with Nalanda.

    nalanda recipes

    Shows mixer, feature map and state; on wide terminals parameters, tokens and FLOPs too.
    """
    from nalanda.report.recipes import print_recipes, recipe_rows

    with under_way("counting parameters"):
        rows = recipe_rows()
    print_recipes(rows)


RecipeOrTables = Annotated[str | None, Argument(help="recipe file or name; tables without one")]
Processes = Annotated[
    int | None, Option(min=1, help="GPUs, or processes on CPUs; by default train.context_parallel")
]
EstimatedDevice = Annotated[
    str, Option(help="device of each process, for the time: here, cpu, or a GPU such as H100")
]
TensorParallel = Annotated[
    int | None, Option("--tp", min=1, help="processes that split the heads, for what each holds")
]


@command(app)
def info(
    recipe: RecipeOrTables = None,
    overrides: Overrides = None,
    processes: Processes = None,
    device: EstimatedDevice = "here",
    tp: TensorParallel = None,
    as_json: AsJson = False,
) -> None:
    """Estimate a recipe's parameters, FLOPs, memory and time.

    nalanda info gated_deltanet_340m --device H100

    The model is not allocated. Without a recipe: tables of recipes, token mixers and feature maps.
    """
    from nalanda.config.load import load_config

    if recipe is not None:
        load_config(recipe, overrides or [])  # reports mistakes before anything is opened
    elif processes or tp or device != "here":
        option = "--processes" if processes else "--tp" if tp else "--device"
        raise typer.BadParameter("needs a recipe", param_hint=option)
    with loading_torch():
        from nalanda.report import tables
        from nalanda.report.info import info, print_info

    if recipe is None:
        figures, show = tables.all_rows(), tables.print_tables
    else:
        figures, show = info(recipe, overrides or [], processes, device=device, tp=tp), print_info
    print_json(figures) if as_json else show(figures)


RunOrCheckpoint = Annotated[
    str, Argument(metavar="RUN_OR_CHECKPOINT", help="folder of a run, or its step-N")
]
NewFolder = Annotated[str, Argument(help="the folder to make")]
Step = Annotated[int | None, Option(help="step of the checkpoint; by default the newest")]
HubRepository = Annotated[
    str | None, Option(metavar="OWNER/NAME", help="upload the folder to this repository on the hub")
]
Private = Annotated[bool, Option("--private", help="with --push: as a private repository")]


@command(app)
def export(
    run: RunOrCheckpoint,
    out: NewFolder,
    step: Step = None,
    push: HubRepository = None,
    private: Private = False,
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
        print_next_steps("write a model", of=out, folder=out)


ConvertedModel = Annotated[str, Argument(help="a model folder or hub id")]
NewFolderOrFile = Annotated[str, Argument(help="the folder to make, or the GGUF file")]
ModelFormat = Annotated[
    str | None,
    Option(
        help="nalanda, fla, llama, qwen3, qwen3_5, kimi_linear, mlx, gguf (also by OUT.gguf); required where "
        "more fit"
    ),
]
Check = Annotated[bool, Option(help="compute with both models, one at a time in memory")]
MatrixType = Annotated[
    str | None,
    Option(
        help="of the matrices: gguf fp32 (default), bf16, fp16, q8_0; mlx as they are, fp32, bf16, fp16, q8"
    ),
]


@command(app)
def convert(
    source: ConvertedModel,
    destination: NewFolderOrFile,
    to: ModelFormat = None,
    check: Check = True,
    dtype: MatrixType = None,
) -> None:
    """Convert models to and from the formats of other libraries.

    nalanda convert runs/hybrid_30m/final hybrid.gguf --dtype q8_0
    nalanda convert runs/hybrid_30m/final published --to qwen3_5
    nalanda convert published ours

    Flash-linear-attention's DeltaNet, Gated DeltaNet, Comba, KDA, DeltaProduct, GLA, RetNet, Transformer++ and
    Forgetting Transformer, transformers' Llama, Qwen3, Qwen3.5 and KimiLinear. What the other format cannot
    express is an error. Both models compute on a CPU, and no folder is made if they differ; the differences go
    into its README.md. llama.cpp and mlx-lm compute their own files; flash-linear-attention's are not compared.
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
    print_next_steps(done, of=resolved, folder=result)


Transformer = Annotated[str, Argument(help="folder or hub id of a Llama, Qwen3 or SmolLM2 model")]
Recipe = Annotated[str, Argument(help="recipe file, or the name of one that ships")]


@command(app)
def linearize(model: Transformer, recipe: Recipe, overrides: Overrides = None) -> None:
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
    print_next_steps(
        "linearize", recipe=recipe, model=model, run=config.output_dir, folder=folders[0]
    )


RunsFolder = Annotated[str, Argument(metavar="DIR", help="directory of the runs")]


@command(app)
def runs(directory: RunsFolder = "runs", as_json: AsJson = False) -> None:
    """List the runs of a directory.

    nalanda runs
    nalanda runs runs/sweep --json

    Shows model, step, loss, speed and state, last changed first.
    """
    from nalanda.report.runs import overview, print_runs

    rows = overview(directory)
    print_json([vars(run) for run in rows]) if as_json else print_runs(rows)


Run = Annotated[str, Argument(help="a run's folder")]


@command(app)
def verify(run: Run, as_json: AsJson = False) -> None:
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


Page = Annotated[
    str | None, Option(help="file of the page; default: report.html in the run, or beside several")
]
Samples = Annotated[
    int, Option(min=0, max=20, help="texts that each run's model continues for the page")
]
SamplesOrOne = Annotated[
    int | None,
    Option(
        min=0,
        max=20,
        help="texts that each run's model continues for the page; by default one for a finished run "
        "that stands alone",
    ),
]
Follow = Annotated[
    bool, Option("--follow", help="write the page again every 30 s while a run goes on")
]
Price = Annotated[
    str | None, Option(help="price of an hour of all devices, such as $2.49, for the run's cost")
]


@command(app)
def report(
    folders: Runs,
    output: Page = None,
    samples: SamplesOrOne = None,
    follow: Follow = False,
    cost_per_hour: Price = None,
) -> None:
    """Write a page about runs: figures, scores, curves.

    nalanda report runs/demo
    nalanda report runs/demo --follow
    nalanda report runs/demo runs/lr --output compared.html

    One HTML file that needs no network. Several runs share its panels; a table has what differs.
    """
    from nalanda.report import page

    runs = resolve_runs(folders)

    def write(refresh: int | None, texts: Any = ()) -> Path:
        return page.write_page(runs, output, texts, price=cost_per_hour, refresh=refresh)

    # Mistakes are reported before anything is loaded.
    file = write(None)
    if follow:
        page.follow(runs, write)
    texts = sample_texts(runs, samples) if samples else page_sample(runs, samples)
    if follow or texts:
        file = write(None, texts)
    print(file)


Picture = Annotated[
    str | None,
    Option(
        help="file of the picture, a PDF beside it; default: loss.png in the run, or here for several"
    ),
]
Axis = Annotated[str, Option(help="x axis: tokens, steps or hours (of training)")]


@command(app)
def plot(folders: Runs, output: Picture = None, x: Axis = "tokens") -> None:
    """Draw the loss curves of runs into one picture, for a paper.

    nalanda plot runs/demo runs/lr --output losses.png --x hours
    """
    from nalanda.report.plot import plot

    print(plot(resolve_runs(folders), output, x=x))


RecipeOrStudy = Annotated[
    str, Argument(help="recipe of the arms; or a study file, or the folder of a study")
]
OF_STUDIES = {
    "arms": Option("--arm", metavar="NAME: SETTINGS"),
    "seeds": Option(min=1),
    "rate_seeds": Option(min=1),
    "fork_at": Option("--from"),
}


@command(app)
def compare(
    recipe: RecipeOrStudy,
    overrides: Overrides = None,
    samples: Samples = 0,
    *,
    options: Annotated[StudyOptions, OF_STUDIES],
    execution: Annotated[Execution, {"workers": Option(min=1)}],
) -> None:
    """Train arms over seeds, and say which is better, by how much.

    nalanda compare demo --arm "nala:" --arm "relu: model.feature_map=relu"
    nalanda compare study.yaml --workers 2

    Runs of a seed read the same rows in the same order. Each pair of arms gets its difference with a 95 %
    interval. The same command goes on after an interruption.
    """
    from nalanda.compare.study import load_arms, read_study

    # Mistakes are reported before anything is opened.
    study = read_study(recipe, overrides or [], options)
    execution.share()
    execution.launcher()
    load_arms(study)
    if study.tasks:
        from nalanda_eval.task_data import find_tasks

        find_tasks(study.tasks, None)
    with loading_torch():
        from nalanda_eval.harness import evaluate

        from nalanda.compare.command import run_study

    run_study(
        study,
        execution,
        lambda models, tasks, output: evaluate(models, tasks, EvalOptions(output=output)),
        (lambda run: sample_texts([run], samples)[0]) if samples else None,
    )


CorpusOrRecipe = Annotated[
    str,
    Argument(
        metavar="SOURCE_OR_RECIPE",
        help="directory, file, glob, hub dataset or python; a recipe, for its data and tokenizer; "
        "PREFIX.idx, of Megatron",
    ),
]
NewSet = Annotated[str, Argument(help="directory for the prepared set, to set as data.source")]
Workers = Annotated[int | None, Option(min=1, help="processes; by default one per core")]
ShardMb = Annotated[
    int | None,
    Option(min=1, help="MiB of input per shard; by default a 64th of the input, 1 to 256"),
]
SetFormat = Annotated[
    str, Option(help="nalanda, or megatron: a prepared set SOURCE as Megatron's .idx and .bin")
]


@command(data)
def prepare(
    context: typer.Context,
    source: CorpusOrRecipe,
    output: NewSet,
    overrides: Overrides = None,
    workers: Workers = None,
    shard_mb: ShardMb = None,
    format: SetFormat = "nalanda",
    *,
    documents: DocumentOptions,
    tokenizer: Annotated[TokenizerOptions, {"path": Option("--tokenizer")}],
) -> None:
    """Tokenise a corpus into token shards.

    nalanda data prepare python tokens/python --vocab-size 4096
    nalanda data prepare gated_deltanet_340m tokens/340m data.source=texts

    Runs in parallel and resumes after an interruption. The number of workers does not change the bytes.
    """
    with under_way("loading"):
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
        documents=documents,
        tokenizer=tokenizer,
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
    print_next_steps("prepare", set=output, run=run, **training)


PreparedSet = Annotated[str, Argument(help="directory of a prepared set")]
Sums = Annotated[bool, Option("--verify", help="check SHA-256 sums, not only sizes")]
Show = Annotated[int, Option(min=0, help="number of documents to print the beginning of")]


@command(data)
def inspect(directory: PreparedSet, verify: Sums = False, show: Show = 0) -> None:
    """Summarize and check a prepared set.

    nalanda data inspect tokens/python --verify --show 3
    """
    from nalanda.data.inspect import inspect

    inspect(directory, verify=verify, samples=show)


BlocksFile = Annotated[str, Option(metavar="FILE", help="the table to write")]
Minutes = Annotated[float, Option(help="time limit")]


@command(app)
def tune(json: BlocksFile = "blocks.json", minutes: Minutes = 30.0) -> None:
    """Choose the kernels' block sizes and backends on this GPU.

    nalanda tune --json blocks.json

    NALANDA_BLOCKS names the table that a run reads.
    """
    with loading_torch():
        import torch
        from nalanda_kernels.tune import choose

    if not torch.cuda.is_available():
        raise InputError("tune: torch sees no GPU; tune on a machine with one")
    choose(json, minutes=minutes)


def main(arguments: list[str] | None = None) -> None:
    """The `nalanda` command; by default with the process's own arguments."""
    set_environment()
    run_command(app, "nalanda", sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    main()
