"""A run of seconds, started in this process or in its own, and everything that it left."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from nalanda.config.load import load_config
from nalanda.config.schema import RunConfig
from nalanda.train.checkpoint_dir import latest_checkpoint
from nalanda.train.log import read_metrics

ROOT = Path(__file__).parents[2]
PRETRAIN = ROOT / "recipes" / "pretrain.py"


def configured(recipe: Path, output_dir: Path, *overrides: str) -> RunConfig:
    return load_config(recipe, [f"output_dir={output_dir}", *overrides])


def contents(folder: Path) -> dict[Path, bytes]:
    """The bytes of every file in a folder."""
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def start(
    recipe: Path, output_dir: Path, *overrides: str, launcher: tuple = (), **env: str
) -> subprocess.Popen:
    command = [
        *(launcher or (sys.executable,)),
        str(PRETRAIN),
        str(recipe),
        f"output_dir={output_dir}",
        *overrides,
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **env}
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def outcome(run_dir: Path) -> dict:
    """Everything that a resume could change: weights, moments, random states, data position, metrics."""
    last = latest_checkpoint(run_dir / "checkpoints")
    files = json.loads((last / "manifest.json").read_text())["files"]
    lines = [
        {k: v for k, v in line.items() if k not in ("tokens_per_second", "mfu")}
        for line in read_metrics(run_dir / "metrics.jsonl")
    ]
    own = torch.load(last / "rank-0.pt", weights_only=True)
    return {
        "files": {name: files[name]["sha256"] for name in files if not name.endswith(".pt")},
        "final": hashlib.sha256((run_dir / "final" / "model.safetensors").read_bytes()).hexdigest(),
        "random": str([own["random"][key] for key in ("python", "numpy")])
        + str(own["random"]["torch"].tolist()),
        "data": {
            key: value for key, value in own["data"].items() if key != "files"
        },  # hashed as time allows
        "metrics": lines,
    }
