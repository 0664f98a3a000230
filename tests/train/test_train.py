"""What a step's loss is a mean of, and the model that a run leaves."""

import json
import math
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from accelerate.utils import set_seed
from bare_run import accelerator_of, add_gradients, bare_run
from training import configured, start
from transformers import AutoModelForCausalLM, AutoTokenizer

from nalanda import testing
from nalanda.common.errors import InputError
from nalanda.config.load import load_config
from nalanda.data.text_bytes import text_bytes
from nalanda.data.tokenizer import build_tokenizer
from nalanda.model import chunk_forward
from nalanda.train import build, launch, loop, loss, memory
from nalanda.train.build import build_model, open_batches
from nalanda.train.checkpoint_dir import checkpoint_folders
from nalanda.train.log import read_metrics

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def gradients(run_dir: Path) -> dict[str, torch.Tensor]:
    """Of the first step, out of AdamW's first moment: exp_avg = (1 - 0.9) · gradient."""
    state = safetensors.torch.load_file(
        run_dir / "checkpoints" / "step-1" / "optimizer.safetensors"
    )
    return {k.removesuffix(".exp_avg"): v / 0.1 for k, v in state.items() if k.endswith(".exp_avg")}


ONE_STEP = (
    "train.steps=1",
    "optim.max_grad_norm=0",
    "schedule.name=constant",
    "schedule.warmup_steps=0",
    "validation.every=0",
    f"seed={2**32 - 1}",  # the largest: a second process has another
)


@pytest.fixture(scope="module")
def one_big_batch(recipe, tmp_path_factory) -> tuple[dict[str, torch.Tensor], float]:
    """Gradients and loss of the first step's 8 rows as one batch, without the loop."""
    config = configured(
        recipe, tmp_path_factory.mktemp("runs") / "reference", *ONE_STEP, "train.micro_batch_size=8"
    )
    tokenizer = build_tokenizer(
        config.tokenizer, config.data, Path(config.output_dir) / "tokenizer"
    )
    set_seed(config.seed)
    model = build_model(config, tokenizer)
    batch = next(open_batches(config, tokenizer)[0])
    counts = (batch["labels"][:, 1:] != -100).sum(1)
    assert counts.min() < 0.9 * counts.max()  # else a mean of means would pass
    loss = model(batch["input_ids"], labels=batch["labels"], cu_seqlens=batch["cu_seqlens"]).loss
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}, loss.item()


def check_gradients(run_dir: Path, one_big_batch: tuple) -> None:
    expected, loss = one_big_batch
    (line,) = read_metrics(run_dir / "metrics.jsonl")
    assert line["loss"] == pytest.approx(loss, rel=1e-6)
    found = gradients(run_dir)
    assert found.keys() == expected.keys()
    scale = max(g.abs().max() for g in expected.values())
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() < 1e-5 * scale, name


@pytest.mark.sampled
@pytest.mark.parametrize("rows", [8, 4, 2])
def test_the_loss_is_the_mean_over_all_tokens_of_the_step(recipe, tmp_path, one_big_batch, rows):
    loop.train(configured(recipe, tmp_path / "run", *ONE_STEP, f"train.micro_batch_size={rows}"))
    check_gradients(tmp_path / "run", one_big_batch)


def test_processes_share_the_mean_over_all_tokens():
    """With equal rows two processes have the loss of one, and DDP's mean of gradients is that of one."""
    rows = testing.ids(2, 9), testing.ids(2, 9, seed=2)
    results = []
    for processes in (1, 2):
        model = testing.build(dtype=torch.float32)
        run = bare_run(model, torch.optim.AdamW(model.parameters()), accelerator_of(processes))
        run.config.optim.max_grad_norm = 0.0
        step = add_gradients(run, [batch_of(tokens) for tokens in rows])
        results.append((step.loss, step.norm, {n: p.grad for n, p in model.named_parameters()}))

    (loss, norm, gradients), (loss_of_two, norm_of_two, gradients_of_two) = results
    assert loss_of_two == pytest.approx(loss, rel=1e-6)
    assert norm_of_two == pytest.approx(norm, rel=1e-5)
    both = torch.cat(rows)
    assert loss == pytest.approx(model(both, labels=both).loss.item(), rel=1e-5)
    for name, gradient in gradients.items():
        testing.close(gradients_of_two[name], gradient, 1e-6)


def batch_of(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Rows of one document each."""
    bounds = torch.arange(len(tokens) + 1) * tokens.shape[1]
    return {"input_ids": tokens, "labels": tokens, "cu_seqlens": bounds}


def test_groups_follow_rates_of_their_own(recipe, tmp_path, monkeypatch):
    """A group whose lr_scale is 0 keeps its initial weights to the bit; Muon's matrices follow muon_lr."""
    built = {}

    def recorded(model, config, build_optimizer=build.build_optimizer):
        built["before"] = {name: p.detach().clone() for name, p in model.named_parameters()}
        built["after"] = dict(model.named_parameters())
        built["optimizer"] = build_optimizer(model, config)
        return built["optimizer"]

    monkeypatch.setattr(build, "build_optimizer", recorded)
    optim = ("optim.name=muon", "optim.lr=0.004", "optim.muon_lr=0.02")
    group = "optim.groups=[{match: mlp, lr_scale: 0.0, weight_decay: 0.0}]"
    loop.train(configured(recipe, tmp_path / "run", *ONE_STEP, "train.steps=2", *optim, group))

    rates = {group["name"]: group["lr"] for group in built["optimizer"].param_groups}
    assert {name.split()[0]: rate for name, rate in rates.items()} == {
        "mlp": 0.0,
        "muon": 0.02,
        "matrices": 0.004,
        "vectors": 0.004,
    }
    for name, weight in built["after"].items():
        assert torch.equal(weight, built["before"][name]) == ("mlp" in name), name


def test_saved_chunks_change_no_bit_of_a_run(recipe, tmp_path, monkeypatch):
    """A run decides once by free memory whether the backward computes chunks again."""
    found = {}
    monkeypatch.setattr(
        chunk_forward, "SAVED_TOKENS", chunk_forward.SAVED_TOKENS
    )  # put back at the end
    monkeypatch.setattr(chunk_forward, "FEW_TOKENS", 0)
    for free in (0, 1 << 50):
        monkeypatch.setattr(build, "needs_of", with_free(free))
        loop.train(configured(recipe, tmp_path / str(free), *ONE_STEP))
        found[chunk_forward.SAVED_TOKENS] = gradients(tmp_path / str(free))
    again, saved = found[0], found[2**62]
    assert all(torch.equal(gradient, saved[name]) for name, gradient in again.items())


def with_free(free: int, needs_of=build.needs_of):
    """`needs_of` on a machine with so many bytes free; other checks of memory are as they are."""

    def on_such_a_machine(*inputs):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory, "host", lambda: free)
            return needs_of(*inputs)

    return on_such_a_machine


@pytest.mark.slow
def test_the_loss_is_the_same_mean_on_two_processes_and_one_goes_on_from_two(
    recipe, tmp_path, one_big_batch
):
    overrides = (*ONE_STEP, "train.micro_batch_size=2")
    process = start(recipe, tmp_path / "run", *overrides, processes=2)
    _, stderr = process.communicate(timeout=200)
    assert process.returncode == 0, stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["processes"] == 2
    assert len(list((tmp_path / "run" / "checkpoints" / "step-1").glob("rank-*.pt"))) == 2
    check_gradients(tmp_path / "run", one_big_batch)

    for name in ("run", "alone"):
        loop.train(
            configured(
                recipe, tmp_path / name, *ONE_STEP, "train.steps=2", "train.micro_batch_size=2"
            )
        )
    resumed, alone = (
        [line["loss"] for line in read_metrics(tmp_path / name / "metrics.jsonl")]
        for name in ("run", "alone")
    )
    assert len(resumed) == 2
    assert resumed == pytest.approx(alone, rel=1e-5)


def test_processes_that_would_train_alone_are_refused(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")  # accelerate launch --cpu --num_processes 2
    with pytest.raises(InputError, match="torchrun"):
        loop.train(configured(recipe, tmp_path / "run"))
    monkeypatch.setenv("RANK", "0")  # use_cpu: true with --multi_gpu
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(launch, "Accelerator", lambda **_: type("Alone", (), {"num_processes": 1}))
    with pytest.raises(InputError, match="torchrun"):
        loop.train(configured(recipe, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_an_environment_that_accelerate_refuses_is_no_fault_of_the_precision(
    monkeypatch, recipe, tmp_path
):
    def refuse(**_):
        raise ValueError("MASTER_ADDR is missing")

    monkeypatch.setattr(launch, "Accelerator", refuse)
    with pytest.raises(InputError, match="the launch cannot work: MASTER_ADDR is missing"):
        loop.train(configured(recipe, tmp_path / "run"))


def test_a_run_leaves_a_model(whole):
    lines = list(read_metrics(whole / "metrics.jsonl"))
    train = [line for line in lines if "loss" in line]
    assert [line["step"] for line in train] == list(range(1, 25))
    assert [line["step"] for line in lines if "val_loss" in line] == [10, 20, 24]
    assert train[-1]["tokens"] == 24 * 256
    assert train[-1]["loss"] < train[0]["loss"] - 0.5
    assert all(line["tokens_per_second"] > 0 and line["mfu"] > 0 for line in train)
    assert [p.name for p in checkpoint_folders(whole / "checkpoints")] == [
        f"step-{n}" for n in (5, 10, 15, 20, 24)
    ]
    facts = json.loads((whole / "final" / "run.json").read_text())
    assert facts["state"] == "finished"
    assert facts["documents_kept_apart"] is True


def test_the_schedule_reaches_the_optimizer(recipe, tmp_path, monkeypatch):
    rates = []

    def built(*arguments):
        optimizer = build_optimizer(*arguments)
        optimizer.register_step_pre_hook(
            lambda o, *_: rates.append({group["lr"] for group in o.param_groups})
        )
        return optimizer

    build_optimizer = build.build_optimizer
    monkeypatch.setattr(build, "build_optimizer", built)
    schedule = ["schedule.name=linear", "schedule.warmup_steps=2"]
    config = configured(recipe, tmp_path / "run", "train.steps=4", "validation.every=0", *schedule)
    loop.train(config)
    expected = [3e-3 / 2, 3e-3, 3e-3 * (0.1 + 0.9 / 2), 3e-4]
    assert [rate for (rate,) in rates] == pytest.approx(expected)
    assert [
        line["lr"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")
    ] == pytest.approx(expected)


def test_validation_is_the_mean_over_tokens_of_the_final_model(whole):
    config = load_config(whole / "config.yaml")
    model = AutoModelForCausalLM.from_pretrained(whole / "final").eval()
    tokenizer = AutoTokenizer.from_pretrained(whole / "final")
    assert model.config.vocab_size == 320
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    total = count = 0
    for batch in open_batches(config, tokenizer)[1][""]:
        logits = model(batch["input_ids"], cu_seqlens=batch["cu_seqlens"], use_cache=False).logits
        targets = batch["labels"][:, 1:]
        kept = targets != -100
        chosen = logits[:, :-1].log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        total, count = total - chosen[kept].sum().item(), count + int(kept.sum())
    last = [line for line in read_metrics(whole / "metrics.jsonl") if "val_loss" in line][-1]
    assert last["val_tokens"] == count
    assert last["val_loss"] == pytest.approx(total / count, rel=1e-5)
    size = sum(
        loss.count_bytes(batch, text_bytes(tokenizer))
        for batch in open_batches(config, tokenizer)[1][""]
    )
    assert last["val_bpb"] == pytest.approx(total / math.log(2) / size, rel=1e-5)
    said = f"perplexity {last['val_ppl']:.2f}, bits a byte {last['val_bpb']:.3f}"
    assert said in (whole / "final" / "README.md").read_text()


@pytest.mark.slow
def test_bf16_and_gradient_checkpointing_train_the_same_model(recipe, tmp_path, whole):
    config = configured(
        recipe, tmp_path / "run", "train.precision=bf16", "train.gradient_checkpointing=true"
    )
    loop.train(config)
    weights = safetensors.torch.load_file(tmp_path / "run" / "final" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    bf16, fp32 = (
        [m["loss"] for m in read_metrics(run / "metrics.jsonl") if "loss" in m]
        for run in (tmp_path / "run", whole)
    )
    assert bf16 == pytest.approx(fp32, rel=0.02)
    assert bf16 != fp32


def test_launch_on_a_cpu_flushes_denormals_and_names_the_faster_way(monkeypatch, capsys):
    """A decay of e^-90 over a chunk is a denormal number, with which products are several times as slow."""
    monkeypatch.setattr(launch, "processors", lambda: 2)
    config, threads = load_config("demo"), torch.get_num_threads()
    torch.set_flush_denormal(False)
    try:
        monkeypatch.setattr(
            sys,
            "argv",
            ["bin/nalanda", "train", "demo", "output_dir=a b", "data.source=https://x/y?key=k"],
        )
        launch.launch(config)
        launch.advise_on_threads(config, processes=1)
        assert (torch.tensor(1e-30) * torch.tensor(1e-9)).item() == 0
        command = (
            "--nproc_per_node 2 -m nalanda_cli train demo 'output_dir=a b' 'data.source=https://x/y?***' "
            "train.cpu_threads=1 train.micro_batch_size=2\n"
        )
        assert command in capsys.readouterr().out
    finally:
        torch.set_num_threads(threads)
