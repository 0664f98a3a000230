"""Panels and options of the command line.

Each option is declared once: its type and help, and its default where options form an object.
Functions of the packages take the objects, such as `Sampling`. Imports neither torch nor `nalanda`, so that help
is fast.
"""

from dataclasses import dataclass
from typing import Annotated

from typer import Argument, Option

PANELS: dict[str, tuple[str, ...]] = {
    "Train a model": ("recipes", "info", "data", "train"),
    "Look at runs": ("runs", "report", "plot", "verify"),
    "Evaluate a model": ("eval", "perplexity"),
    "Use a model": ("generate",),
    "Convert a model": ("export", "convert", "linearize"),
    "Tune the kernels": ("tune",),
}
"""The commands by what a person wants to do, in the order of the help."""

# ------------------------------ of several commands


AsJson = Annotated[bool, Option("--json", help="print JSON")]
Device = Annotated[
    str | None, Option(help="cpu, cuda, cuda:1, …; by default a GPU if there is one")
]
Model = Annotated[str, Argument(help="the folder of a run, a checkpoint or a model, or a hub id")]
Models = Annotated[list[str], Argument(help="checkpoint directories or hub ids")]
ModelsOrNone = Annotated[list[str] | None, Argument(help="checkpoint directories or hub ids")]
Overrides = Annotated[
    list[str] | None, Argument(metavar="[SECTION.KEY=VALUE]...", help="settings to change")
]
RemoteCode = Annotated[bool, Option("--trust-remote-code", help="run code from the checkpoint")]


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded; see `nalanda.inference.load.load_model`."""

    device: Device = None
    dtype: Annotated[str, Option(help="auto (as saved), fp32, bf16, fp16 or fp64")] = "auto"
    trust_remote_code: RemoteCode = False


# ------------------------------ train, info

RecipeOrPattern = Annotated[str | None, Argument(help="recipe file, or the name of one that ships")]
ListKeys = Annotated[
    bool, Option("--keys", help="list the keys; RECIPE then filters them: nalanda train --keys lr")
]
Rehearse = Annotated[
    bool, Option("--rehearse", help="train three steps, measure memory and time, leave nothing")
]
RecipeOrTables = Annotated[str | None, Argument(help="recipe file or name; tables without one")]
Processes = Annotated[
    int | None, Option(min=1, help="GPUs, or processes on CPUs; by default train.context_parallel")
]
EstimatedDevice = Annotated[
    str, Option(help="device of each process, for the time: here, cpu, or a GPU such as H100")
]

# ------------------------------ runs, report, verify, plot

RunsFolder = Annotated[str, Argument(metavar="[DIR]", help="directory of the runs")]
Run = Annotated[str, Argument(help="a run's folder")]
Runs = Annotated[list[str], Argument(metavar="RUN...", help="folders of runs")]
Page = Annotated[
    str | None, Option(help="file of the page; default: report.html in the run, or beside several")
]
Samples = Annotated[
    int, Option(min=0, max=20, help="texts that each run's model continues for the page")
]
Picture = Annotated[
    str | None,
    Option(
        help="file of the picture, a PDF beside it; default: loss.png in the run, or here for several"
    ),
]
Axis = Annotated[str, Option(help="x axis: tokens, steps or hours (of training)")]

# ------------------------------ eval, perplexity

Tasks = Annotated[
    str,
    Option(
        help="comma-separated: table4 (the literature's suite), all (and six more), recall (SWDE, FDA, "
        "SQuAD, …), needles (RULER's), python_docs (of Python's text, without a network), tasks of "
        "lm-evaluation-harness, task files, directories of task files"
    ),
]
FetchTo = Annotated[str | None, Option(help="only write the tasks' data here, for --data")]
Text = Annotated[
    str,
    Option(
        help="text file, directory or glob of documents, python (the demo's validation part), or a "
        "recipe, for its validation part"
    ),
]


@dataclass(frozen=True)
class EvalOptions:
    """How tasks are scored; see `nalanda_eval.harness.evaluate`."""

    data: Annotated[str | None, Option(help="directory of the tasks' data; default: the hub")] = (
        None
    )
    limit: Annotated[float | None, Option(help="documents per task; below 1: share of them")] = None
    num_fewshot: Annotated[
        int | None,
        Option(
            min=0, help="examples before each question; by default as the task's file says, or 0"
        ),
    ] = None
    apply_chat_template: Annotated[
        bool, Option("--apply-chat-template", help="prompts as turns of a chat, examples too")
    ] = False
    system_instruction: Annotated[str | None, Option(help="text before all of a prompt")] = None
    batch_size: Annotated[
        int, Option(min=1, help="texts read together; does not change results")
    ] = 8
    max_length: Annotated[
        int | None, Option(min=1, help="context in tokens; by default as in training")
    ] = None
    long: Annotated[
        str, Option(help="how to read longer texts: window (in windows) or whole (in one pass)")
    ] = "window"
    no_share: Annotated[
        bool, Option("--no-share", help="read a shared context for each ending: slower")
    ] = False
    output: Annotated[
        str | None,
        Option(help="directory for results.json, .md, .csv, and for answers, to resume from"),
    ] = None
    log_samples: Annotated[
        bool, Option("--log-samples", help="also write each prompt, answer and score there")
    ] = False


@dataclass(frozen=True)
class PerplexityOptions:
    """How texts are cut and scored; see `nalanda_eval.perplexity.perplexity`."""

    overrides: Annotated[
        list[str] | None,
        Option(
            "--set",
            metavar="KEY=VALUE",
            help="a setting of that recipe, such as data.validation_split=test",
        ),
    ] = None
    joined: Annotated[bool, Option("--joined", help="join documents with eos between them")] = False
    length: Annotated[int | None, Option(help="tokens read in one pass; by default 16 windows")] = (
        None
    )
    window: Annotated[int | None, Option(help="tokens per window; by default as in training")] = (
        None
    )
    tokens: Annotated[int, Option(help="tokens to score; the last document is cut there")] = 2**18
    output: Annotated[str, Option(help="directory for the results and picture")] = "runs/perplexity"


# ------------------------------ generate

Prompt = Annotated[str | None, Argument(help="text to continue; - reads standard input")]


@dataclass(frozen=True)
class PromptFiles:
    """Files that a continuation reads and writes."""

    file: Annotated[str | None, Option(help="text file to continue; the prompt follows it")] = None
    states: Annotated[
        str | None, Option(help="folder that keeps the file's state, so that it is read once")
    ] = None
    state: Annotated[str | None, Option(help="continue a state that --save-state wrote")] = None
    force: Annotated[
        bool, Option("--force", help="continue it though another tokenizer read its text")
    ] = False
    save_state: Annotated[str | None, Option(help="write the prompt's state to this file")] = None
    state_dtype: Annotated[
        str | None,
        Option(help="keep states in fp32, bf16, int8 or fp8; by default as --state has them"),
    ] = None


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. top_p and top_k keep the likeliest tokens; 1 and 0 keep all."""

    max_new_tokens: Annotated[int, Option(help="length limit, unless the text ends earlier")] = 128
    temperature: Annotated[float, Option(help="sampling temperature; 0 is greedy")] = 0.8
    top_p: Annotated[
        float, Option(help="sample from the likeliest tokens with this total probability")
    ] = 1.0
    top_k: Annotated[int, Option(help="sample from at most this many tokens; 0: all")] = 0
    seed: Annotated[
        int | None, Option(help="seed of the sampling; by default every call differs")
    ] = None


# ------------------------------ export, convert

RunOrCheckpoint = Annotated[
    str, Argument(metavar="RUN_OR_CHECKPOINT", help="folder of a run, or its step-N")
]
NewFolder = Annotated[str, Argument(help="the folder to make")]
Step = Annotated[int | None, Option(help="step of the checkpoint; by default the newest")]
HubRepository = Annotated[
    str | None, Option(metavar="OWNER/NAME", help="upload the folder to this repository on the hub")
]
Private = Annotated[bool, Option("--private", help="with --push: as a private repository")]
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

# ------------------------------ linearize

Transformer = Annotated[str, Argument(help="folder or hub id of a Llama, Qwen3 or SmolLM2 model")]
Recipe = Annotated[str, Argument(help="recipe file, or the name of one that ships")]

# ------------------------------ data prepare, data inspect

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


@dataclass(frozen=True)
class DocumentOptions:
    """Settings of `data` in place of a recipe's; None keeps the recipe's."""

    validation_share: Annotated[
        float | None,
        Option(help="share of documents to hold out if the source has no validation part"),
    ] = None
    text_field: Annotated[str | None, Option(help="field of a record with its text")] = None
    source_field: Annotated[
        str | None, Option(help="field of a record with its source, such as meta.source")
    ] = None
    name: Annotated[str | None, Option(help="hub: configuration of the dataset")] = None
    revision: Annotated[
        str | None, Option(help="hub: commit, tag or branch; a commit pins the files")
    ] = None
    bos: Annotated[bool | None, Option("--bos/--no-bos", help="put bos before every document")] = (
        None
    )
    eos: Annotated[bool | None, Option("--eos/--no-eos", help="put eos after every document")] = (
        None
    )


@dataclass(frozen=True)
class TokenizerOptions:
    """Settings of `tokenizer` in place of a recipe's; None keeps the recipe's."""

    path: Annotated[
        str | None,
        Option(
            "--tokenizer",
            help="directory, hub id or file of a tokenizer; by default one is trained",
        ),
    ] = None
    train: Annotated[
        str | None, Option(help="kind of tokenizer to train on the documents: bpe or words")
    ] = None
    vocab_size: Annotated[int | None, Option(help="size of the trained tokenizer")] = None


PreparedSet = Annotated[str, Argument(help="directory of a prepared set")]
Sums = Annotated[bool, Option("--verify", help="check SHA-256 sums, not only sizes")]
Show = Annotated[int, Option(min=0, help="number of documents to print the beginning of")]

# ------------------------------ tune

BlocksFile = Annotated[str, Option(metavar="FILE", help="the table to write")]
Minutes = Annotated[float, Option(help="time limit")]
