"""Checkpoints of earlier versions: today's code loads them, and so does the code that they carry.

`data/checkpoint_aa58fb8.zip` is a folder that `save_pretrained` wrote at commit aa58fb8: four layers of random
weights, with its own copies of the model's files as they were laid out then.
"""

import importlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import nalanda_kernels
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from nalanda.model import NalandaForCausalLM, ops
from nalanda.model.cache import CACHE
from nalanda.testing import VOCAB, ids

OLD = Path(__file__).parent / "data" / "checkpoint_aa58fb8.zip"

# Code of then does not know the cache's name of transformers 5.24.
OF_OLD_CODE = {"use_cache": False} if CACHE == "cache" else {}

PROGRAM = f"""
import sys
for package in ("nalanda", "nalanda_kernels", "nalanda_eval"):
    sys.modules[package] = None  # only the folder's own code is left
import torch
from transformers import AutoModelForCausalLM

*folders, result = sys.argv[1:]
tokens = torch.randint(0, {VOCAB}, (2, 9), generator=torch.Generator().manual_seed(1))
results = []
for folder in folders:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    name = folder.rsplit("/", 1)[1]
    assert type(model).__module__.startswith(f"transformers_modules.{{name}}."), type(model)
    with torch.no_grad():
        logits = model(tokens).logits
        options = {OF_OLD_CODE} if name == "old" else {{}}
        continued = model.generate(
            tokens, max_new_tokens=4, do_sample=False, pad_token_id=0, **options
        )
    results.append((logits, continued))
torch.save(results, result)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "old"
    with zipfile.ZipFile(OLD) as archive:
        archive.extractall(folder)
    return folder


def by_todays_code(folder: Path) -> tuple[Tensor, Tensor]:
    return computed(NalandaForCausalLM, folder)


def computed(expected: type, folder: Path) -> tuple[Tensor, Tensor]:
    """Logits `[2, 9, VOCAB]` and greedily continued tokens `[2, 13]`."""
    ours = expected is NalandaForCausalLM
    auto = AutoModelForCausalLM if ours else expected
    options = {} if ours else OF_OLD_CODE
    model = auto.from_pretrained(folder).eval()
    assert type(model) is expected

    tokens = ids(2, 9)
    with torch.no_grad():
        logits = model(tokens).logits
        continued = model.generate(
            tokens, max_new_tokens=4, do_sample=False, pad_token_id=0, **options
        )
    return logits, continued


@pytest.fixture(scope="module")
def by_their_own_code(checkpoint) -> list[tuple[Tensor, Tensor]]:
    """The same of the old folder and of one saved again today.

    One process runs the folders' files and can import nothing of ours.
    """
    again = checkpoint.with_name("new")
    AutoModelForCausalLM.from_pretrained(checkpoint).save_pretrained(again)
    result = checkpoint.with_suffix(".pt")
    cache = {"HF_MODULES_CACHE": str(checkpoint.with_suffix(".modules")), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(checkpoint), str(again), str(result)],
        env=os.environ | cache,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return torch.load(result)


def check_equal(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(a[0], b[0], rtol=0, atol=1e-5)
    assert torch.equal(a[1], b[1])


@pytest.fixture
def old_package(checkpoint, monkeypatch) -> Iterator[str]:
    """The name of a package of the old folder's files, which this process may import."""
    name = "old_folder"
    package = ModuleType(name)
    package.__path__ = [str(checkpoint)]
    monkeypatch.setitem(sys.modules, name, package)
    yield name
    for module in [module for module in sys.modules if module.startswith(f"{name}.")]:
        del sys.modules[module]


def test_an_old_folder_has_the_same_logits_by_todays_and_by_its_own_code(checkpoint, old_package):
    assert json.loads((checkpoint / "config.json").read_text())["auto_map"]["AutoModel"] == (
        "modeling.Decoder"
    )
    old = importlib.import_module(f"{old_package}.modeling")
    check_equal(by_todays_code(checkpoint), computed(old.NalandaForCausalLM, checkpoint))


@pytest.mark.slow
def test_its_own_code_computes_it_where_nalanda_is_not(checkpoint, by_their_own_code):
    check_equal(by_todays_code(checkpoint), by_their_own_code[0])


@pytest.mark.slow
def test_an_old_folder_saved_again_carries_todays_code(checkpoint, by_their_own_code):
    assert (checkpoint.with_name("new") / "decoder.py").exists()
    check_equal(by_their_own_code[1], by_todays_code(checkpoint))


def test_an_old_folders_ops_are_served_by_todays_kernels(old_package, monkeypatch):
    """Its copy of ops.py asks for kernel API 3, whose entry takes an op's flat arguments."""
    seen = []

    def kernel(q, k, v, *gates, **options):
        seen.append((len(gates), sorted(options)))
        return v + 1, None

    class Served:
        devices = ("cpu",)

        def load(self):
            return kernel

        def serves(self, device):
            return True

    rows = {op: {"triton": Served()} for op in ("delta_rule", "linear_attention")}
    monkeypatch.setattr(nalanda_kernels, "KERNELS", rows)
    old_ops = importlib.import_module(f"{old_package}.ops")

    q, k, v = torch.rand(3, 1, 20, 2, 4).unbind()
    beta = torch.rand(1, 20, 2)
    for module in (old_ops, ops):
        assert torch.equal(module.delta_rule(q, k, v, beta, backend="triton")[0], v + 1)
        assert torch.equal(module.linear_attention(q, k, v, backend="triton")[0], v + 1)
    assert seen[:2] == seen[2:]
    assert "scale" in seen[0][1]
