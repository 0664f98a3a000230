"""Runs of seconds: their text, recipe and environment, their start in this or another process, their results.

Tests, `make smoke` and `make torture` train with these. Nothing here imports torch before it is needed, so
that a script can set `ENVIRONMENT` first.
"""

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from nalanda.config.schema import RunConfig

ROOT = Path(__file__).parents[2]
PRETRAIN = ROOT / "recipes" / "pretrain.py"
LAUNCH = ROOT / "recipes" / "launch.py"

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "NALANDA_ONEDNN": "0",  # one route in all processes, whatever the clock says
}
"""Of each process that trains: one thread, no network, the same products."""

WORDS = [
    "state",
    "gate",
    "decay",
    "query",
    "key",
    "value",
    "head",
    "norm",
    "chunk",
    "scan",
    "delta",
    "rule",
]
OF_RANKS = ("seconds", "seconds_min", "slowest_rank")
CLOCKED = (
    *("tokens_per_second", "mfu"),
    *(f"{span}_{name}" for span in ("data", "forward") for name in OF_RANKS),
)
"""The metrics that no second run repeats."""


# ------------------------------ text and recipe


def write_texts(
    file: Path, count: int, lengths: Sequence[int], words: Sequence[str] = WORDS
) -> None:
    """Writes `count` documents of random words, each of one of the `lengths`, to a .jsonl file."""
    draw = random.Random(0)
    texts = [" ".join(draw.choices(words, k=draw.choice(lengths))) for _ in range(count)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def tiny_recipe(folder: Path, model: dict, train: dict, **sections: Any) -> dict[str, Any]:
    """A recipe of a tiny model in fp32 on one thread, with a line of metrics for each step.

    folder: where a run goes that names no folder.
    model, train: join the values of their sections. `sections` replace others whole.
    """
    return {
        "output_dir": str(folder / "unset"),
        "model": {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, **model},
        "optim": {"lr": 3e-3},
        "train": {"precision": "fp32", "cpu_threads": 1, **train},
        "log": {"every": 1, "tensorboard": False},
        **sections,
    }


def write_recipe(file: Path, recipe: dict[str, Any]) -> Path:
    import yaml

    file.write_text(yaml.safe_dump(recipe))
    return file


def configured(recipe: Path, output_dir: Path, *overrides: str) -> "RunConfig":
    from nalanda.config.load import load_config

    return load_config(recipe, [f"output_dir={output_dir}", *overrides])


def of_rows(
    rows: int, seq_len: int, precision: str = "fp32", checkpointing: bool = False, parts: int = 1
) -> "RunConfig":
    """A recipe whose micro-batches have these rows, for estimates."""
    from nalanda.config.schema import DataConfig, RunConfig, TokenizerConfig, TrainConfig

    train = TrainConfig(
        steps=1,
        tokens_per_step=rows * seq_len,
        micro_batch_size=rows,
        precision=precision,
        gradient_checkpointing=checkpointing,
        context_parallel=parts,
    )
    return RunConfig("run", {}, TokenizerConfig(path="x"), DataConfig(seq_len=seq_len), train)


# ------------------------------ processes


def one_a_mixer(recipes: Iterable[Path]) -> list[Path]:
    """The first recipe of each mixer or pattern of mixers."""
    from nalanda.config.load import load_config

    first: dict[str, Path] = {}
    for recipe in recipes:
        first.setdefault(str(load_config(recipe).model.get("mixer")), recipe)
    return list(first.values())


def torchrun(processes: int, restarts: int = 0) -> list[str]:
    """The command before a script's path that starts it in several processes, and again after a crash."""
    launcher = [str(LAUNCH)] if restarts else ["-m", "torch.distributed.run"]
    options = ["--standalone", "--nproc_per_node", str(processes), "--max_restarts", str(restarts)]
    return [sys.executable, *launcher, *options]


def environment(processes: int = 1, **variables: str) -> dict[str, str]:
    """The variables of a child process, or of each of several that torchrun starts; it finds the helpers."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    child = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if processes > 1:
        child["ACCELERATE_USE_CPU"] = "true"
    return child | variables


def start(
    recipe: Path, output_dir: Path, *overrides: str, processes: int = 1, **variables: str
) -> subprocess.Popen:
    """Starts recipes/pretrain.py, as a user does."""
    launcher = torchrun(processes) if processes > 1 else [sys.executable]
    return subprocess.Popen(
        [*launcher, str(PRETRAIN), str(recipe), f"output_dir={output_dir}", *overrides],
        env=environment(processes, **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def launched(*command: str, processes: int = 2, fails: bool = False, seconds: float = 300) -> str:
    """Runs a script with its arguments in several processes to its end; returns all that they print."""
    done = subprocess.run(
        [*torchrun(processes), *command],
        env=environment(processes),
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert (done.returncode != 0) == fails, done.stdout + done.stderr[-4000:]
    return done.stdout + done.stderr


# ------------------------------ results


def contents(folder: Path) -> dict[Path, bytes]:
    """The bytes of every file in a folder."""
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def repeatable(lines: Iterable[dict]) -> list[dict]:
    """Lines of metrics without the metrics of time, and what follows from them."""
    lines = (line for line in lines if line.get("event") != "slow rank")
    return [{k: v for k, v in line.items() if k not in CLOCKED} for line in lines]


def hash_bits(tensors: "Iterable[Tensor]") -> str:
    """SHA-256 of the bits of tensors, in their order."""
    import torch

    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def outcome(run_dir: Path) -> dict:
    """Everything that a resume could change: weights, moments, random states, data position, metrics."""
    import torch

    from nalanda.train.checkpoint_dir import latest_checkpoint
    from nalanda.train.log import read_metrics

    last = latest_checkpoint(run_dir / "checkpoints")
    files = json.loads((last / "manifest.json").read_text())["files"]
    own = torch.load(last / "rank-0.pt", weights_only=True)
    return {
        "files": {name: files[name]["sha256"] for name in files if not name.endswith(".pt")},
        "final": hashlib.sha256((run_dir / "final" / "model.safetensors").read_bytes()).hexdigest(),
        "random": str([own["random"][key] for key in ("python", "numpy")])
        + str(own["random"]["torch"].tolist()),
        "data": {
            key: value for key, value in own["data"].items() if key != "files"
        },  # hashed as time allows
        "metrics": repeatable(read_metrics(run_dir / "metrics.jsonl")),
    }
