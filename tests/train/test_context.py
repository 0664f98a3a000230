"""Runs whose rows are cut over processes: the same losses as on one process, resumed from one to the other.

torchrun starts this file itself: `worker` trains there one run after another.
"""

import functools
import json
import os
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from training import launched, tiny_recipe, write_recipe, write_texts
from transformers import AutoModelForCausalLM

from nalanda import NalandaConfig
from nalanda.common.errors import InputError
from nalanda.config.load import load_config
from nalanda.data.prepare import prepare
from nalanda.model import context
from nalanda.model.context import Context, Parts
from nalanda.report.info import info
from nalanda.testing import in_threads
from nalanda.train import build, parallel
from nalanda.train.log import read_metrics
from nalanda.train.loop import train

KINDS = {
    "hybrid": ["model.mixer=[gated_deltanet, softmax]", "train.gradient_checkpointing=true"],
    "carried": [
        "model.mixer=[gla, deltanet]",
        "model.feature_map=nala",
        "data.long_documents=carry",
        "data.carry_rows=4",
    ],
}
"""A mixer whose state grows with the text, and documents whose states pass from step to step."""
TWO, FOUR = ["train.context_parallel=2"], ["train.context_parallel=2", "train.parallel=fsdp"]
FP32 = ["model.mixer=[gated_deltanet, nala]"]

# Inductor would compile C++ for minutes.
parallel.compile_blocks = functools.partial(parallel.compile_blocks, backend="aot_eager")


def job(name: str, start: str | None = None, *settings: str) -> list:
    """A run, from the beginning or from step 2 of the run `start`."""
    return [name, start, [*KINDS.get(name.split()[0], FP32), *settings]]


def perform(folder: Path, name: str, start: str | None, settings: list[str]) -> None:
    run = folder / name
    if start and int(os.environ.get("RANK", 0)) == 0:
        shutil.copytree(
            folder / start, run, ignore=shutil.ignore_patterns("step-4", "final", "run.json")
        )
    if dist.is_initialized():
        dist.barrier()
    AcceleratorState._reset_state(reset_partial_state=True)
    built = build.build_model
    try:
        if name.split()[0] in KINDS:
            torch.set_default_dtype(torch.float64)
            build.build_model = lambda *rest, **options: built(*rest, **options).double()
        train(load_config(folder / "recipe.yaml", [f"output_dir={run}", *settings]))
    finally:
        build.build_model = built
        torch.set_default_dtype(torch.float32)
        AcceleratorState._reset_state(reset_partial_state=True)


def worker(folder: Path, jobs: list) -> None:
    for each in jobs:
        perform(folder, *each)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    worker(Path(sys.argv[1]), json.loads(sys.argv[2]))
    sys.exit()


def launch(processes: int, folder: Path, *jobs: list, fails: bool = False) -> str:
    script = __file__, str(folder), json.dumps(jobs)
    return launched(*script, processes=processes, fails=fails)


class Threads(Context):
    """Parts of a row in threads, which hand one another tensors over a board."""

    def __init__(self, rank: int, board: list, barrier: threading.Barrier):
        self.rank, self.size, self.board, self.barrier = rank, len(board), board, barrier

    def shift(self, tensors: list[torch.Tensor], by: int) -> list[torch.Tensor]:
        self.board[self.rank] = tensors
        self.barrier.wait()
        source = self.rank - by
        received = (
            [x.clone() for x in self.board[source]]
            if 0 <= source < self.size
            else [torch.zeros_like(x) for x in tensors]
        )
        self.barrier.wait()  # no thread writes before all have read
        return received


PACKINGS = {
    "one document a row": [0, 24, 48],
    "packed": [0, 3, 4, 21, 24, 30, 48],  # some fill whole parts, one begins at an edge
    "short": [*range(0, 49, 2)],
}


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_softmax_attention_of_parts_is_that_of_whole_rows(parts, packing):
    """Outputs and gradients in float64. Values are wider than keys, and two query heads share each."""
    torch.manual_seed(0)
    options = {"mixer": "softmax", "mixer_options": {"num_kv_heads": 2}, "expand_v": 2.0}
    config = NalandaConfig(
        hidden_size=16,
        num_heads=4,
        num_hidden_layers=2,
        intermediate_size=16,
        vocab_size=32,
        **options,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    ids, bounds = torch.randint(32, (2, 24)), torch.tensor(PACKINGS[packing])
    weights = torch.randn(2, 24, 32, dtype=torch.float64)

    def run(context: Context | None) -> tuple[torch.Tensor, tuple]:
        logits = model(input_ids=ids, cu_seqlens=bounds, context=context).logits
        loss = (logits * (weights if context is None else context.part(weights))).sum()
        return logits.detach(), torch.autograd.grad(loss, [*model.parameters()])

    expected, gradients = run(None)
    results = in_threads(parts, run)
    torch.testing.assert_close(torch.cat([o for o, _ in results], 1), expected, rtol=0, atol=1e-12)
    for whole, *of_parts in zip(gradients, *(g for _, g in results), strict=True):
        torch.testing.assert_close(sum(of_parts), whole, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("size", "documents"),
    [(2, [4096]), (4, [4096]), (8, [4096]), (4, [1000, 96, 2000, 1000]), (8, [3000, 1096])],
)
def test_processes_attend_equally_many_pairs(size, documents):
    """Pairs of a query and a key that it sees, of documents in one row."""
    bounds, row = torch.tensor([0, *documents]).cumsum(0), sum(documents)

    def parts_of(rank: int) -> Parts:
        process = Context.__new__(Context)
        process.rank, process.size = rank, size
        return Parts(process, 1, row, bounds, None, None)

    work, contiguous = [], []
    pieces = parts_of(0).pieces()
    for rank in range(size):
        parts = parts_of(rank)
        fresh = parts.cu_seqlens.diff()[parts.past == 0]
        own = int((fresh * (fresh + 1) // 2).sum())
        work.append(own + sum(piece.pairs for piece in pieces[rank]))
        here = [piece.pairs for taken in pieces for piece in taken if piece.part == rank]
        contiguous.append(own + sum(here))
    total = sum(n * (n + 1) // 2 for n in documents)
    assert sum(work) == sum(contiguous) == total
    assert max(work) < (1.06 if len(documents) == 1 else 1.1) * total / size
    if len(documents) == 1:
        assert max(contiguous) > (2 - 1.01 / size) * total / size


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("width", [3, 1], ids=["full", "diagonal"])
def test_states_pass_through_many_parts(width, reverse):
    """From `SCAN_FROM` parts on the states double their way; 12 parts are no power of two."""
    parts = 12
    assert parts >= context.SCAN_FROM
    torch.manual_seed(0)
    M, U = 0.6 * torch.randn(parts, 3, width).double(), torch.randn(parts, 3, 2).double()
    board, barrier = [None] * parts, threading.Barrier(parts)

    def state(rank: int) -> torch.Tensor:
        return context.scan(Threads(rank, board, barrier), M[rank], U[rank], reverse)

    with ThreadPoolExecutor(parts) as pool:
        states = list(pool.map(state, range(parts)))
    expected = torch.zeros(3, 2).double()
    for rank in reversed(range(parts)) if reverse else range(parts):
        torch.testing.assert_close(states[rank], expected, rtol=1e-12, atol=1e-12)
        passed = M[rank] * expected if width == 1 else M[rank] @ expected
        expected = passed + U[rank]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """A folder with a recipe and its token set."""
    folder = tmp_path_factory.mktemp("context")
    write_texts(folder / "a.jsonl", 200, (1, 2, 9, 60))
    recipe = tiny_recipe(
        folder,
        model={},
        train={"steps": 4, "tokens_per_step": 256, "micro_batch_size": 2},
        tokenizer={"train": "words"},
        data={"source": str(folder / "a.jsonl"), "seq_len": 32, "max_validation_rows": 7},
        validation={"every": 2},
        checkpoint={"every": 2},
    )
    config = load_config(write_recipe(folder / "text.yaml", recipe))
    prepare(config.data, config.tokenizer, folder / "set")
    recipe["data"]["source"] = str(folder / "set")
    recipe["tokenizer"] = str(folder / "set" / "tokenizer")
    write_recipe(folder / "recipe.yaml", recipe)
    return folder


@pytest.fixture(scope="module")
def folder(prepared) -> Path:
    """Runs on one process, on two, and on two from step 2 of that on one."""
    folder = prepared
    for kind in KINDS:
        perform(folder, *job(f"{kind} one"))
    jobs = [(f"{kind} two", None) for kind in KINDS] + [
        (f"{kind} one two", f"{kind} one") for kind in KINDS
    ]
    launch(2, folder, *(job(name, start, *TWO) for name, start in jobs))
    return folder


def equal(folder: Path, names: list[str], error: float) -> None:
    """The runs have the losses, gradient norms and validation losses of the first, to a relative error."""

    def logged(name: str, key: str) -> list[float]:
        return [line[key] for line in read_metrics(folder / name / "metrics.jsonl") if key in line]

    for key, count in (("loss", 4), ("grad_norm", 4), ("val_loss", 2)):
        first, *others = (logged(name, key) for name in names)
        assert len(first) == count
        for other in others:
            assert other == pytest.approx(first, rel=error), key


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_train_as_one_and_go_on_for_one_another(folder, kind):
    perform(folder, *job(f"{kind} two one", f"{kind} two"))
    equal(folder, [f"{kind} {rest}" for rest in ("one", "two", "one two", "two one")], 1e-12)
    facts = json.loads((folder / f"{kind} two" / "run.json").read_text())
    assert (facts["processes"], facts["context_parallel"]) == (2, 2)
    changes = json.loads((folder / f"{kind} one two" / "run.json").read_text())["changes"]
    assert changes[0]["train.context_parallel"] == [1, 2]


@pytest.mark.slow
def test_states_are_saved_once(folder):
    last = folder / "carried two" / "checkpoints" / "step-4"
    assert [file.name for file in last.glob("slots-*")] == ["slots-0.safetensors"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["carried"])
def test_four_processes_as_two_contexts(folder, kind):
    launch(
        4, folder, job(f"{kind} four", None, *FOUR), job(f"{kind} two four", f"{kind} two", *FOUR)
    )
    perform(folder, *job(f"{kind} four one", f"{kind} four"))
    equal(folder, [f"{kind} {rest}" for rest in ("one", "four", "two four", "four one")], 1e-12)


@pytest.mark.slow
def test_fp32_and_compiled(folder):
    perform(folder, *job("fp32 one"))
    compiled = job("fp32 compiled", None, *TWO, "train.compile=true")
    launch(2, folder, job("fp32 two", None, *TWO), compiled)
    equal(folder, [f"fp32 {rest}" for rest in ("one", "two", "compiled")], 1e-5)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            ["train.context_parallel=3"],
            "data.seq_len: 32 is not a multiple of train.context_parallel 3",
        ),
        (["train.context_parallel=0"], "train.context_parallel: expected 1 or more, got 0"),
        (TWO, "train.context_parallel: 1 process"),
    ],
)
def test_what_cannot_be_cut_is_refused_in_a_line(prepared, settings, says):
    with pytest.raises(InputError, match=says):
        perform(prepared, "refused", None, settings)


@pytest.mark.slow
def test_other_models_are_refused(folder):
    with pytest.raises(
        InputError, match="context_parallel: needs one of Nalanda's own models, not llama"
    ):
        info(str(folder / "recipe.yaml"), [*TWO, "model={auto: llama, hidden_size: 32}"])
