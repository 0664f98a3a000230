"""The loop: what its loss is a mean of, that nothing a run was told or did is lost, and what it refuses."""

import functools
import hashlib
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
import yaml
from accelerate.utils import set_seed
from nalanda_kernels import take_torch_path
from training import configured, outcome, start
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, MambaConfig, pipeline

from nalanda.common.errors import InputError
from nalanda.common.files import manifest_text, verify_manifest
from nalanda.common.versions import versions
from nalanda.config.load import load_config, read_sections
from nalanda.config.model import build_model_config
from nalanda.config.schema import RunConfig
from nalanda.data import corpus, hashes, loader, packing, token_set
from nalanda.data.text_bytes import text_bytes
from nalanda.data.tokenizer import build_tokenizer, tokenizer_fingerprint
from nalanda.model import FEATURE_MAPS, NalandaConfig
from nalanda.report.verify import verify
from nalanda.train import build, checkpoint, launch, loop, loss, tensor_files
from nalanda.train import step as training_step
from nalanda.train.build import build_model, open_batches
from nalanda.train.checkpoint_dir import (
    checkpoint_folders,
    latest_checkpoint,
    mark_unsound,
    step_of,
)
from nalanda.train.log import read_facts, read_metrics

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


# ----------------------------------------------------------------------------------------------- the loss


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


@pytest.mark.parametrize("rows", [8, 4, 2])
def test_the_loss_is_the_mean_over_all_tokens_of_the_step(recipe, tmp_path, one_big_batch, rows):
    loop.train(configured(recipe, tmp_path / "run", *ONE_STEP, f"train.micro_batch_size={rows}"))
    check_gradients(tmp_path / "run", one_big_batch)


@pytest.mark.slow
def test_the_loss_is_the_same_mean_on_two_processes_and_one_goes_on_from_two(
    recipe, tmp_path, one_big_batch
):
    torchrun = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
    )
    overrides = (*ONE_STEP, "train.micro_batch_size=2")
    process = start(
        recipe, tmp_path / "run", *overrides, launcher=torchrun, ACCELERATE_USE_CPU="true"
    )
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


# ----------------------------------------------------------------------------------------------- a whole run


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
    config = configured(
        recipe, tmp_path / "run", "train.steps=4", "validation.every=0", "schedule.name=linear"
    )
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
    said = f"perplexity {last['val_ppl']:.2f}, bits per byte {last['val_bpb']:.3f}"
    assert said in (whole / "final" / "README.md").read_text()


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


@pytest.mark.parametrize(("kind", "apart"), [(LlamaConfig, True), (MambaConfig, False)])
def test_any_causal_lm_trains_and_says_whether_it_keeps_documents_apart(
    recipe, tmp_path, capsys, kind, apart
):
    kind(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
    ).save_pretrained(tmp_path / "config")
    model = f"model={{auto: {tmp_path / 'config'}}}"
    loop.train(configured(recipe, tmp_path / "run", model, "train.steps=3", "validation.every=0"))
    assert (
        json.loads((tmp_path / "run" / "final" / "run.json").read_text())["documents_kept_apart"]
        is apart
    )
    assert ("packed documents see one another" in capsys.readouterr().out) is not apart
    losses = [line["loss"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert losses[0] == pytest.approx(5.77, abs=0.2)  # ln 320
    assert losses[2] < losses[0]


def test_the_exported_tokenizer_pads_and_the_runs_own_does_not(whole, recipe, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(whole / "final")
    texts = ["state gate", "state gate decay query key value head"]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    assert batch.attention_mask[:, -1].all()
    assert not batch.attention_mask[0, 0]
    alone = [tokenizer(text, return_tensors="pt").input_ids for text in texts]
    assert [mask.sum().item() for mask in batch.attention_mask] == [ids.shape[1] for ids in alone]
    generate = pipeline(
        "text-generation", model=str(whole / "final"), max_new_tokens=6, do_sample=False
    )
    together, apart = (
        [row[0]["generated_text"] for row in generate(texts, batch_size=n)] for n in (2, 1)
    )
    assert together == apart
    own = AutoTokenizer.from_pretrained(whole / "tokenizer")
    assert own.pad_token is None
    assert tokenizer_fingerprint(own) == tokenizer_fingerprint(tokenizer)
    # Trained on with the exported one: eos is a token like any other.
    config = configured(
        recipe, tmp_path / "run", f"tokenizer={whole / 'final'}", "model={auto: llama}"
    )
    assert build_model_config(config, tokenizer).pad_token_id is None
    assert build_model_config(config, tokenizer).eos_token_id == tokenizer.eos_token_id == 0


def test_a_checkpoint_without_its_run_is_exported_without_tokenizer_and_recipe(
    whole, tmp_path, capsys
):
    from nalanda_cli import app

    copied = shutil.copytree(whole / "checkpoints" / "step-24", tmp_path / "backup" / "step-24")
    for source, alone in ((whole, False), (copied, True)):
        with pytest.raises(SystemExit) as ended:
            app(["export", str(source), str(out := tmp_path / f"{source.name}-out")])
        assert not ended.value.code
        said, card = capsys.readouterr(), (out / "README.md").read_text()
        assert ("has no tokenizer and no config.yaml" in said.err) == alone
        for promised in ("config.yaml", "AutoTokenizer", "tokenizer ="):
            assert (promised in card) != alone
        assert ("nalanda generate" in said.err) != alone
        assert AutoModelForCausalLM.from_pretrained(out).config.model_type == "nalanda"


def test_a_model_that_would_take_kernels_of_a_gpu_is_given_torchs(recipe, tmp_path):
    """transformers takes those of flash-linear-attention where it is installed, on a CPU too."""
    model = "model={auto: qwen3_next, hidden_size: 32, num_hidden_layers: 1, num_experts: 0}"
    config = configured(recipe, tmp_path / "run", model)
    tokenizer = build_tokenizer(config.tokenizer, config.data, tmp_path / "tokenizer")
    module = sys.modules[type(build_model(config, tokenizer)).__module__]
    assert module.__name__.startswith("transformers.models.qwen3_next")
    assert not take_torch_path(module), "nothing is left to change"


def test_a_model_type_needs_no_path(recipe, tmp_path, capsys):
    model = "model={auto: mamba, hidden_size: 32, num_hidden_layers: 2, state_size: 16, expand: 2}"
    run_dir = loop.train(configured(recipe, tmp_path / "run", model, "train.steps=4"))
    config = json.loads((run_dir / "final" / "config.json").read_text())
    assert config["model_type"] == "mamba"
    assert config["vocab_size"] == 320
    assert config["bos_token_id"] == config["eos_token_id"] == 0
    assert config["pad_token_id"] is None
    assert json.loads((run_dir / "run.json").read_text())["documents_kept_apart"] is False
    assert "this model lets packed documents see one another" in capsys.readouterr().out
    losses = [line["loss"] for line in read_metrics(run_dir / "metrics.jsonl") if "loss" in line]
    assert losses[3] < losses[0] - 0.1
    weights = safetensors.torch.load_file(run_dir / "final" / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(run_dir / "final").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())


def test_models_that_look_ahead_are_refused(recipe, tmp_path):
    bert = "auto: bert, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 32"
    with pytest.raises(InputError, match="bert looks at later tokens"):
        loop.train(configured(recipe, tmp_path / "encoder", f"model={{{bert}}}"))
    loop.train(
        configured(
            recipe, tmp_path / "decoder", f"model={{{bert}, is_decoder: true}}", "train.steps=2"
        )
    )


def test_which_model_auto_means(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def config(model: str):
        return build_model_config(configured(recipe, tmp_path / "run", f"model={model}"))

    llama = config("{auto: llama, hidden_size: 64, num_attention_heads: 2}")
    assert (llama.model_type, llama.hidden_size, llama.max_position_embeddings) == ("llama", 64, 32)
    assert (
        config("{auto: gpt2, n_embd: 64, hidden_size: 64}").n_positions == 32
    )  # under either of its names
    assert config("{auto: nalanda, num_heads: 2, mixer: deltanet}").mixer == "deltanet"
    MambaConfig(hidden_size=96, model_type="mamba").save_pretrained(tmp_path / "llama")
    assert config("{auto: llama}").hidden_size == 96  # a path that exists is meant


def test_model_types_of_flash_linear_attention(recipe, tmp_path, monkeypatch):
    """A stand-in: importing it registers its types, and its configs take any key."""
    import importlib.util

    import transformers
    from transformers.models.auto import configuration_auto, modeling_auto

    class LaterConfig(transformers.PreTrainedConfig):
        model_type = "later"

        def __init__(self, hidden_size: int = 8, vocab_size: int = 16, **kwargs):
            super().__init__(**kwargs)
            self.hidden_size, self.vocab_size = hidden_size, vocab_size

    class Later(transformers.LlamaForCausalLM):
        config_class = LaterConfig

    load = importlib.import_module

    def register(name: str, *package: str):
        if name != "fla":  # transformers loads its own models so, on demand
            return load(name, *package)
        transformers.AutoConfig.register("later", LaterConfig)
        AutoModelForCausalLM.register(LaterConfig, Later)
        return None

    for mapping in (configuration_auto.CONFIG_MAPPING, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING):
        monkeypatch.setattr(mapping, "_extra_content", dict(mapping._extra_content))
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: name == "fla" or find(name, *rest)
    )
    monkeypatch.setattr(importlib, "import_module", register)

    def config(model: str):
        return build_model_config(configured(recipe, tmp_path / "run", f"model={model}"))

    assert config("{auto: mamba}").model_type == "mamba"  # what transformers has, it has
    assert "later" not in configuration_auto.CONFIG_MAPPING
    assert config("{auto: later, hidden_size: 24}").hidden_size == 24
    with pytest.raises(
        InputError, match=r"^model\.hiden_size: later has no such key; did you mean hidden_size"
    ):
        config("{auto: later, hiden_size: 24}")

    def broken(name: str, *package: str):
        if name != "fla":
            return load(name, *package)
        raise AttributeError("module 'transformers' has no attribute 'x'")

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(
        InputError, match=r"rwkv9: flash-linear-attention fails: .*no attribute 'x'"
    ):
        config("{auto: rwkv9}")


# ----------------------------------------------------------------------------------------------- resume


@pytest.mark.slow
def test_sigkill_changes_nothing(recipe, tmp_path, whole):
    """Killed twice from outside, once at any moment and once within a save; then finished in this process."""
    run_dir, slow = tmp_path / "run", ("checkpoint.every=3",)
    lines, saves = run_dir / "metrics.jsonl", run_dir / "checkpoints"
    some = random.randint(4, 12)

    def written() -> int:
        return lines.read_text().count("\n") if lines.exists() else 0

    moments = [
        lambda: written() >= some,
        lambda: (
            len(checkpoint_folders(saves)) >= 4
            and (any(saves.glob(".tmp-step-*")) or written() >= 21)
        ),
    ]
    for moment in moments:
        process = start(recipe, run_dir, *slow)
        deadline = time.monotonic() + 120
        while process.poll() is None and not moment() and time.monotonic() < deadline:
            time.sleep(0.001)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL, "finished before it was killed"
    assert not (run_dir / "final").exists()
    loop.train(configured(recipe, run_dir))
    assert outcome(run_dir) == outcome(whole)


def test_sigterm_saves_and_the_run_goes_on(recipe, tmp_path, whole, monkeypatch):
    def kick(step, *rest):
        if step == 7:
            signal.raise_signal(signal.SIGTERM)
        return learning_rate(step, *rest)

    learning_rate, before = training_step.learning_rate, signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(training_step, "learning_rate", kick)
    config = configured(recipe, tmp_path / "run")
    with pytest.raises(SystemExit) as stop:
        loop.train(config)
    assert stop.value.code == 143
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGTERM) is before
    last = latest_checkpoint(tmp_path / "run" / "checkpoints")
    assert step_of(last) in (7, 8)  # the step that it struck, or the one after
    assert json.loads((tmp_path / "run" / "run.json").read_text())["state"] == "interrupted"
    loop.train(config)
    assert outcome(tmp_path / "run") == outcome(whole)


def test_a_damaged_checkpoint_costs_its_steps_only(recipe, tmp_path, whole, capsys):
    config = configured(recipe, tmp_path / "run")
    loop.train(config)
    run_dir = tmp_path / "run"
    facts = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps({**facts, "state": "running"}))
    (run_dir / "checkpoints" / "step-24" / "optimizer.safetensors").write_bytes(b"short")
    capsys.readouterr()
    loop.train(config)
    out = capsys.readouterr().out
    assert "step-24: damaged, passed over: optimizer.safetensors" in out
    assert "resumes from step-20" in out
    assert outcome(run_dir) == outcome(whole)


def test_a_finished_run_says_so_and_goes_on_when_steps_are_raised(
    recipe, tmp_path, capsys, monkeypatch
):
    short = configured(recipe, tmp_path / "run", "train.steps=4", "validation.every=0")
    loop.train(short)
    model = (tmp_path / "run" / "final" / "model.safetensors").read_bytes()
    capsys.readouterr()
    loop.train(short)
    assert "is finished, 4 steps" in capsys.readouterr().out
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["versions"] == versions()
    facts["versions"]["torch"] = "2.0.1"
    (tmp_path / "run" / "run.json").write_text(json.dumps(facts))
    tokens_left, advance = [], loop.RunLog.advance

    def noted(log, step, seconds, left, **values):
        tokens_left.append(left * values["tokens_per_second"])
        advance(log, step, seconds, left, **values)

    monkeypatch.setattr(loop.RunLog, "advance", noted)
    other = ("validation.every=0", "optim.lr=1e-3", "train.tokens_per_step=512")
    loop.train(configured(recipe, tmp_path / "run", "train.steps=6", *other))
    out = capsys.readouterr().out
    assert f"steps      6 = {4 * 256 + 2 * 512:,} tokens" in out
    assert tokens_left == pytest.approx([512, 0])
    assert f"version of torch: 2.0.1 → {torch.__version__}" in out
    assert "train.steps: 4 → 6" in out
    assert "optim.lr: 0.003 → 0.001" in out
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["changes"][0]["step"] == 4
    assert facts["changes"][0]["optim.lr"] == [0.003, 0.001]
    assert (tmp_path / "run" / "final" / "model.safetensors").read_bytes() != model


def test_a_refused_start_leaves_no_trace(recipe, tmp_path, capsys):
    """Its settings never ran: the next start says what changed since those that did."""
    run, settings = tmp_path / "run", ("train.steps=4", "validation.every=0")
    loop.train(
        configured(recipe, run, "train.steps=2", "validation.every=0", "schedule.name=constant")
    )
    before = contents(run)
    with pytest.raises(
        InputError,
        match=r"moments of another optimizer, model or version: .*; set optim\.name back, or begin",
    ):
        loop.train(configured(recipe, run, *settings, "optim.name=muon"))
    with pytest.raises(InputError, match=r"no-such-folder"):
        loop.train(
            configured(recipe, run, *settings, "optim.lr=1e-3", "data.source=no-such-folder")
        )
    assert contents(run) == before
    assert [verdict.good for verdict in verify(run)] == [True]
    capsys.readouterr()
    loop.train(configured(recipe, run, *settings, "optim.lr=1e-3"))
    assert "optim.lr: 0.003 → 0.001" in capsys.readouterr().out
    assert load_config(run / "config.yaml").optim.lr == 1e-3
    assert read_facts(run)["changes"][0]["optim.lr"] == [0.003, 0.001]


def test_steps_that_are_lowered(stopped, recipe, capsys):
    """To the step that was reached: the model is validated and written. Below it: refused."""
    run, _ = stopped
    shutil.rmtree(run / "checkpoints" / "step-24")
    before = contents(run)
    with pytest.raises(
        InputError, match=r"train\.steps: 15, but .* goes on from step-20: set 20 or more"
    ):
        loop.train(configured(recipe, run, "train.steps=15"))
    assert contents(run) == before
    loop.train(configured(recipe, run, "train.resume=15", "train.steps=15"))
    said = capsys.readouterr().out
    assert (
        "24 → 15 (already at step 15: nothing is trained, the learning rate did not fall)" in said
    )
    assert "validation at step 15" in said
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl") if "val_loss" in line] == [
        10,
        15,
    ]
    assert "at step 15" in (run / "final" / "README.md").read_text()


@pytest.fixture
def stopped(recipe, whole, tmp_path) -> tuple[Path, RunConfig]:
    """A copy of the whole run, as if it had been killed behind its last checkpoint."""
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    shutil.rmtree(run / "final")
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**facts, "state": "running"}))
    return run, configured(recipe, run)


def contents(folder: Path) -> dict[Path, bytes]:
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("kept", ["run.json", "metrics.jsonl"])
def test_a_run_without_a_usable_checkpoint_is_refused_and_stays_as_it_is(stopped, kept):
    run, config = stopped
    for path in checkpoint_folders(run / "checkpoints"):
        (path / "trainer.json").write_text("{}")
    before = contents(run)
    with pytest.raises(
        InputError, match=r"step-5 is damaged: trainer\.json.*step-24 is damaged.* over"
    ) as error:
        loop.train(config)
    assert "\n" not in str(error.value)
    assert contents(run) == before
    # And where they are gone altogether, which run.json knows or the metrics tell.
    shutil.rmtree(run / "checkpoints")
    (run / "run.json").unlink() if kept == "metrics.jsonl" else (run / "metrics.jsonl").unlink()
    (run / "checkpoints").mkdir()
    before = contents(run)
    with pytest.raises(InputError, match="none is left"):
        loop.train(config)
    assert contents(run) == before


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(recipe, tmp_path, whole):
    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            checkpoint.Saver, "save", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            loop.train(configured(recipe, run))
    assert max(line["step"] for line in read_metrics(run / "metrics.jsonl")) == 5
    loop.train(configured(recipe, run))
    assert outcome(run) == outcome(whole)


def test_an_asynchronous_checkpoint_is_whole_when_the_data_fail_behind_it(
    recipe, tmp_path, monkeypatch
):
    run, write, go = tmp_path / "run", checkpoint.write_file, threading.Event()
    monkeypatch.setattr(checkpoint, "write_file", lambda *args: go.wait(20) and write(*args))
    take, wait, taken = training_step.take_batches, checkpoint.Saver.wait, []

    def failing(batches, count):
        taken.append(take(batches, count))
        return taken[-1] if len(taken) <= 5 else (taken[-1][0], InputError("a shard is damaged"))

    def released(self):
        if self._thread is not None:
            go.set()
        wait(self)

    monkeypatch.setattr(training_step, "take_batches", failing)
    monkeypatch.setattr(checkpoint.Saver, "wait", released)
    settings = ("checkpoint.asynchronous=true", "checkpoint.every=5")
    with pytest.raises(InputError, match="a shard is damaged"):
        loop.train(configured(recipe, run, *settings))
    assert latest_checkpoint(run / "checkpoints") == run / "checkpoints" / "step-5"


def test_a_person_may_choose_the_checkpoint(stopped, recipe, whole, capsys):
    run, _ = stopped
    chosen = configured(recipe, run, "train.resume=step-10")
    mark_unsound(run / "checkpoints" / "step-10", "no step behind it was good")
    loop.train(configured(recipe, run, "train.resume=10", "train.steps=24"))
    out = capsys.readouterr().out
    assert "resumes from step-10" in out
    assert "step-24 is set aside as later-step-24" in out
    assert outcome(run) == outcome(whole)
    assert verify_manifest(run / "checkpoints" / "later-step-24") is None
    for again in range(2):  # the choice is made once, however often a scheduler repeats the command
        config = configured(
            recipe, run, "train.resume=10", f"train.steps={26 + again}", "validation.every=0"
        )
        loop.train(config)
        assert f"resumes from step-{(24, 26)[again]}" in capsys.readouterr().out
    loop.train(configured(recipe, run, "train.resume=20", "train.steps=24", "validation.every=0"))
    aside = sorted(p.name for p in (run / "checkpoints").glob("later-step-24*"))
    assert aside == ["later-step-24", "later-step-24.2"]  # what was set aside before is still there
    with pytest.raises(InputError, match=r"train\.resume: .* has no step-7; there are .*step-24"):
        loop.train(configured(recipe, run, "train.resume=step-7"))
    before = sorted(p.name for p in (run / "checkpoints").iterdir())
    with pytest.raises(InputError, match="optimizer"):  # a refused start changes nothing
        loop.train(
            configured(recipe, run, "train.resume=step-20", "train.steps=30", "optim.name=muon")
        )
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == before
    (run / "checkpoints" / "step-10" / "model.safetensors").write_bytes(b"short")
    with pytest.raises(
        InputError, match=r"train\.resume: .*step-10 is damaged: model\.safetensors"
    ):
        loop.train(chosen)


HARMS = {
    "cut": lambda file: os.truncate(file, file.stat().st_size // 2),
    "emptied": lambda file: os.truncate(file, 0),
    "flipped": lambda file: flip(file),
    "gone": Path.unlink,
}


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "manifest.json"])
def test_a_damaged_tokenizer_is_made_again(stopped, whole, harm, name, capsys):
    """From the same documents; the checkpoint knows whether it is the same."""
    run, config = stopped
    HARMS[harm](run / "tokenizer" / name)
    loop.train(config)
    assert outcome(run) == outcome(whole)
    assert contents(run / "tokenizer") == contents(whole / "tokenizer") or name == "manifest.json"
    if harm != "gone":
        assert f"tokenizer: damaged, made again: {name}" in capsys.readouterr().out


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_run_json_blocks_nothing(stopped, whole, harm):
    run, config = stopped
    HARMS[harm](run / "run.json")
    loop.train(config)
    assert outcome(run) == outcome(whole)
    assert read_facts(run)["state"] == "finished"


@pytest.mark.parametrize("harm", ["emptied", "cut", "gone"])
def test_a_damaged_record_of_the_recipe_is_named(stopped, recipe, whole, harm):
    run, config = stopped
    HARMS[harm](run / "config.yaml")
    before = contents(run)
    words = "is missing: restore it" if harm == "gone" else "the run.s recipe is damaged"
    with pytest.raises(InputError, match=rf"{run / 'config.yaml'}.* {words}") as error:
        loop.train(config)
    assert "\n" not in str(error.value)
    assert contents(run) == before
    shutil.copy(recipe, run / "config.yaml")  # as the message says
    loop.train(config)
    assert outcome(run) == outcome(whole)


def test_a_finished_run_whose_model_is_gone_or_cut_exports_it_again(recipe, tmp_path):
    config = configured(recipe, tmp_path / "run", "train.steps=2", "validation.every=0")
    final = loop.train(config) / "final"
    expected = (final / "model.safetensors").read_bytes()
    for harm in (
        lambda: shutil.rmtree(final),
        lambda: os.truncate(final / "model.safetensors", 999),
    ):
        harm()
        loop.train(config)
        assert (final / "model.safetensors").read_bytes() == expected


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_validation_loss_that_is_not_finite_loses_no_model(
    recipe, tmp_path, monkeypatch, capsys, value
):
    monkeypatch.setattr(loss, "loss_sums", lambda *_: (value, 100))
    run = loop.train(configured(recipe, tmp_path / "run", "train.steps=2"))
    assert AutoModelForCausalLM.from_pretrained(run / "final").config.model_type == "nalanda"
    assert read_facts(run)["state"] == "finished"
    card = (run / "final" / "README.md").read_text()
    assert re.search(rf"validation loss \| {value:g}, perplexity .* at step 2: NOT FINITE", card)
    assert "not finite" in capsys.readouterr().out


def test_verify_says_of_every_checkpoint_what_it_is_worth(stopped, capsys):
    from nalanda_cli import app

    run, _ = stopped
    folder = run / "checkpoints"
    with pytest.raises(SystemExit) as ended:
        app(["verify", str(run)])
    assert not ended.value.code
    assert capsys.readouterr().out.splitlines()[0] == "step-5: whole, finite, loadable"
    flip(folder / "step-5" / "rank-0.pt")
    for step, file, harm in (
        (10, "model.safetensors", lambda t: t["lm_head.weight"].view(-1)[3].fill_(math.nan)),
        (
            15,
            "optimizer.safetensors",
            lambda t: t.update({"lm_head.weight.exp_avg": torch.zeros(7)}),
        ),
    ):
        tensors = safetensors.torch.load_file(folder / f"step-{step}" / file)
        harm(tensors)
        safetensors.torch.save_file(tensors, folder / f"step-{step}" / file)
        manifest = json.loads((folder / f"step-{step}" / "manifest.json").read_text())
        content = (folder / f"step-{step}" / file).read_bytes()
        manifest["files"][file] = {
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
        (folder / f"step-{step}" / "manifest.json").write_text(manifest_text(manifest))
    mark_unsound(folder / "step-20", "no step behind it was good")
    with pytest.raises(SystemExit) as ended:
        app(["verify", str(run), "--json"])
    assert ended.value.code == 1
    found = {v["step"]: v for v in json.loads(capsys.readouterr().out)}
    assert [step for step, v in found.items() if v["good"]] == [24]
    assert "rank-0.pt" in found[5]["whole"]
    assert found[10]["finite"] == "lm_head.weight has values of nan"
    assert "expected [320, 32]" in found[15]["loadable"]
    assert found[20]["marked"] == "no step behind it was good"
    for path in (p for p in (folder / "step-24").iterdir() if p.name != "config.json"):
        os.truncate(path, path.stat().st_size // 2)
    *_, last = verify(run)  # every answer is a line, whatever the file
    assert "manifest.json" in last.whole
    assert "model.safetensors" in last.finite
    assert last.loadable != "yes"
    with pytest.raises(InputError, match="no checkpoints here"):
        next(verify(run.parent))


# ----------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "override",
    [
        "seed=4",
        "data.seq_len=16",
        "data.bos=false",
        "tokenizer.vocab_size=300",
        "model.use_gate=false",
    ],
)
def test_a_folder_of_another_run_is_refused(recipe, whole, override):
    before = {p: p.stat().st_mtime_ns for p in whole.rglob("*")}
    key = override.split("=")[0]
    with pytest.raises(
        InputError, match=f"holds another run: {key} is .* choose another output_dir"
    ):
        loop.train(configured(recipe, whole, override))
    assert before == {p: p.stat().st_mtime_ns for p in whole.rglob("*")}


def test_a_runs_config_yaml_is_its_model_whatever_the_defaults_are(recipe, tmp_path, monkeypatch):
    """Under another default the run is not resumed as another model, and its config.yaml trains its own."""
    run, again = tmp_path / "run", tmp_path / "again"
    settings = ["model.feature_map=nala", "validation.every=0", "schedule.name=constant"]
    loop.train(configured(recipe, run, "train.steps=2", *settings))
    before = contents(run)

    monkeypatch.setitem(FEATURE_MAPS, "nala", functools.partial(FEATURE_MAPS["nala"], power=3.0))
    made = NalandaConfig.__init__
    other_defaults = functools.wraps(made)(
        lambda self, **keys: made(self, **{"norm_eps": 1e-5, **keys})
    )
    monkeypatch.setattr(NalandaConfig, "__init__", other_defaults)
    with pytest.raises(
        InputError, match=r"model\.feature_map_options\.power is 2\.0 there and 3\.0 here; set "
    ):
        loop.train(configured(recipe, run, "train.steps=4", *settings))
    assert contents(run) == before

    loop.train(load_config(run / "config.yaml", [f"output_dir={again}"]))
    models = [json.loads((folder / "final" / "config.json").read_text()) for folder in (run, again)]
    assert models[0] == models[1]
    settings += [
        "model.feature_map_options.power=2.0",
        "model.norm_eps=1e-06",
    ]  # as the messages say
    loop.train(configured(recipe, run, "train.steps=4", *settings))
    wider = load_config(
        run / "config.yaml", ["model.hidden_size=64"]
    )  # what is derived is derived again
    assert (
        build_model_config(wider).head_dim
        == 2 * build_model_config(load_config(run / "config.yaml")).head_dim
    )


def test_a_model_that_a_folder_describes_is_the_runs_own(recipe, tmp_path):
    """The folder may change; the run is not resumed as another model."""
    run, settings = tmp_path / "run", ["validation.every=0", "schedule.name=constant"]
    loop.train(configured(recipe, run, "train.steps=2", *settings))
    folder = tmp_path / "folder"
    shutil.copytree(run / "final", folder)
    begun = tmp_path / "begun"
    more = [*settings, f"model={{init_from: {folder}}}", f"tokenizer={folder}"]
    loop.train(configured(recipe, begun, "train.steps=2", *more))
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"norm_eps": 1e-3}))
    with pytest.raises(InputError, match=r"model\.norm_eps is 1e-06 there and 0\.001 here"):
        loop.train(configured(recipe, begun, "train.steps=4", *more))


def test_a_run_of_nala_without_exponents_goes_on_as_the_angle(recipe, tmp_path):
    """`nala` meant the angle alone under delta rules, in runs that do not write their model out."""
    run, settings = tmp_path / "run", ["validation.every=0", "schedule.name=constant"]
    loop.train(configured(recipe, run, "train.steps=2", "model.feature_map=angle", *settings))
    older = configured(recipe, run, "train.steps=2", "model.feature_map=nala", *settings)
    (run / "config.yaml").write_text(older.to_yaml())
    file = run / "checkpoints" / "step-2" / "config.json"
    model = json.loads(file.read_text()) | {
        "feature_map": "nala",
        "feature_map_options": {"power": None},
    }
    file.write_text(json.dumps(model))
    more = ["model.feature_map=nala", "model.feature_map_options={power: null}"]
    (run / "config.yaml").write_text(yaml.safe_dump(read_sections(run / "config.yaml", more)))
    manifest = json.loads((file.parent / "manifest.json").read_text())
    content = file.read_bytes()
    manifest["files"][file.name] = {
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    (file.parent / "manifest.json").write_text(manifest_text(manifest))
    with pytest.raises(
        InputError, match=r"is 'angle' there and 'nala' here; set model\.feature_map=angle to go"
    ):
        loop.train(configured(recipe, run, "train.steps=4", "model.feature_map=nala", *settings))
    loop.train(configured(recipe, run, "train.steps=4", "model.feature_map=angle", *settings))
    assert "feature_map: angle" in (run / "config.yaml").read_text()


def test_a_folder_that_is_no_run_is_refused(recipe, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    for folder in (tmp_path, tmp_path / "thesis.tex"):
        with pytest.raises(InputError, match="no run of Nalanda's"):
            loop.train(configured(recipe, folder))
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_bad_data_may_be_corrected_in_the_same_folder(recipe, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(InputError):
        loop.train(configured(recipe, tmp_path / "run", f"data.source={tmp_path / 'empty.txt'}"))
    loop.train(configured(recipe, tmp_path / "run", "train.steps=2"))
    assert (tmp_path / "run" / "final" / "config.json").exists()


@pytest.fixture(scope="module")
def prepared_set(recipe, tmp_path_factory) -> Path:
    from nalanda.data.prepare import prepare

    config, folder = load_config(recipe), tmp_path_factory.mktemp("prepared")
    prepare(config.data, config.tokenizer, folder / "set")
    return folder / "set"


def flipped(path: Path) -> bytes:
    """A bit in the middle is another; what it was before."""
    before = path.read_bytes()
    content = bytearray(before)
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return before


@pytest.mark.parametrize("verify", ["background", "sums", "sizes"])
@pytest.mark.parametrize("name", ["train/00000.tokens", "validation/00000.docs"])
def test_a_prepared_set_is_compared_with_its_sums(recipe, prepared_set, tmp_path, verify, name):
    settings = (
        f"data.source={prepared_set}",
        f"tokenizer={prepared_set / 'tokenizer'}",
        "train.steps=6",
    )
    run = configured(recipe, tmp_path / "run", *settings, f"data.verify={verify}")
    before = flipped(prepared_set / name)
    try:
        if verify == "sizes" and name.endswith("tokens"):
            loop.train(run)  # the id may be a wrong one; it is in the vocabulary
            return
        with pytest.raises(InputError, match=f"{name}: damaged, .*copy or prepare it again"):
            loop.train(run)
    finally:
        (prepared_set / name).write_bytes(before)
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))
    loop.train(run)
    before, saved = (
        flipped(prepared_set / name),
        latest_checkpoint(tmp_path / "run" / "checkpoints"),
    )
    try:
        with pytest.raises(InputError, match=f"{name}: damaged"):
            loop.train(configured(recipe, tmp_path / "run", *settings, "train.steps=8"))
    finally:
        (prepared_set / name).write_bytes(before)
    assert latest_checkpoint(tmp_path / "run" / "checkpoints") == saved
    loop.train(configured(recipe, tmp_path / "run", *settings, "train.steps=8"))


def on_set(recipe: Path, run: Path, folder: Path, *overrides: str) -> RunConfig:
    """A run on a prepared set."""
    return configured(
        recipe,
        run,
        f"data.source={folder}",
        f"tokenizer={folder / 'tokenizer'}",
        "validation.every=0",
        *overrides,
    )


def at_step(step: int, act):
    """A learning rate; behind `step`, `act` is called."""

    def rate(at, *rest, rate=training_step.learning_rate):
        if at == step:
            act()
        return rate(at, *rest)

    return rate


@pytest.mark.parametrize("kind", ["tokens", "docs"])
def test_a_shard_that_shrinks_under_a_run_saves_and_stops_it(
    recipe, prepared_set, tmp_path, monkeypatch, kind
):
    folder = shutil.copytree(prepared_set, tmp_path / "set")
    file = folder / "train" / f"00000.{kind}"
    content = file.read_bytes()
    loop.train(on_set(recipe, tmp_path / "whole", folder))
    config = on_set(recipe, tmp_path / "run", folder)
    with monkeypatch.context() as patch:
        patch.setattr(training_step, "learning_rate", at_step(7, lambda: os.truncate(file, 100)))
        with pytest.raises(InputError, match=rf"00000\.{kind}: ends before byte") as error:
            loop.train(config)
    assert error.value.exit_code == 2
    assert step_of(latest_checkpoint(tmp_path / "run" / "checkpoints")) >= 7
    file.write_bytes(content)
    loop.train(config)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_a_save_on_a_signal_does_not_wait_for_sums_and_the_next_start_goes_on_with_them(
    recipe, prepared_set, tmp_path, monkeypatch
):
    run, read, release = tmp_path / "run", [], threading.Event()
    sha256_of = token_set.sha256_of

    def slow(path: Path) -> str:
        if read:  # the first file is compared, the second takes its time
            release.wait(60)
        read.append(path.name)
        return sha256_of(path)

    with monkeypatch.context() as patch:
        patch.setattr(token_set, "sha256_of", slow)
        patch.setattr(
            training_step, "learning_rate", at_step(6, lambda: signal.raise_signal(signal.SIGTERM))
        )
        with pytest.raises(SystemExit):
            loop.train(on_set(recipe, run, prepared_set))
        assert read == ["00000.tokens"]
        release.set()
        for thread in threading.enumerate():
            if thread.name == "nalanda-sums":
                thread.join()
    assert [step_of(path) for path in checkpoint_folders(run / "checkpoints")] == [5, 7]
    last = run / "checkpoints" / "step-7"
    assert json.loads((last / "trainer.json").read_text())["sums_compared"] is False
    (run / "sums.jsonl").write_bytes(
        (run / "sums.jsonl").read_bytes().split(b"\n")[1] + b'\n["torn'
    )
    read.clear()
    monkeypatch.setattr(
        token_set, "sha256_of", lambda path: read.append(path.name) or sha256_of(path)
    )
    loop.train(on_set(recipe, run, prepared_set))
    assert read == ["00000.docs"]
    end = run / "checkpoints" / "step-24" / "trainer.json"
    assert json.loads(end.read_text())["sums_compared"] is True


def test_damage_that_is_found_after_a_save_names_what_may_have_learnt_from_it(
    recipe, prepared_set, tmp_path, monkeypatch
):
    folder, found = shutil.copytree(prepared_set, tmp_path / "set"), threading.Event()
    flipped(folder / "train" / "00000.tokens")
    sha256_of, config = token_set.sha256_of, on_set(recipe, tmp_path / "run", folder)
    with monkeypatch.context() as patch:
        patch.setattr(token_set, "sha256_of", lambda path: found.wait(60) and sha256_of(path))
        patch.setattr(training_step, "learning_rate", at_step(7, found.set))
        with pytest.raises(
            InputError, match=r"00000\.tokens: damaged, .*; step-5.* may have learnt from it"
        ):
            loop.train(config)
    with pytest.raises(InputError, match=r"00000\.tokens: damaged"):
        loop.train(config)  # a damaged file is never recorded as whole


def test_checkpoints_of_a_thread_are_those_of_the_loop(recipe, tmp_path):
    settings = (
        "train.steps=12",
        "checkpoint.every=1",
        "checkpoint.keep_last=99",
        "validation.every=0",
    )
    kinds = ("true", "false")
    for kind in kinds:
        loop.train(
            configured(recipe, tmp_path / kind, *settings, f"checkpoint.asynchronous={kind}")
        )
    a, b = (checkpoint_folders(tmp_path / kind / "checkpoints") for kind in kinds)
    assert len(a) == len(b) == 12
    for folder, other in zip(a, b, strict=True):
        for name in ("model", "optimizer"):
            found, expected = (
                dict(tensor_files.iterate_tensors(f / f"{name}.safetensors"))
                for f in (folder, other)
            )
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[key], expected[key]) for key in found)
        assert torch.load(folder / "rank-0.pt")["data"] == torch.load(other / "rank-0.pt")["data"]


class HashedAtOnce:
    """`Hashing` without its thread, so that the first save has all hashes."""

    def __init__(self, jobs):
        for files, number in jobs:
            files.find(number)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("part", ["train", "validation"])
def test_data_that_was_edited_at_equal_size_is_not_resumed_on(recipe, tmp_path, monkeypatch, part):
    monkeypatch.setattr(loader, "Hashing", HashedAtOnce)
    text = (recipe.parent / "a.jsonl").read_bytes()
    for name in ("train", "validation"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "a.jsonl").write_bytes(text)
    settings = [f"data.source={tmp_path / 'data'}", "train.steps=6"]
    loop.train(configured(recipe, tmp_path / "run", *settings))
    file, saved = (
        tmp_path / "data" / part / "a.jsonl",
        latest_checkpoint(tmp_path / "run" / "checkpoints"),
    )
    file.write_bytes(text.replace(b"state", b"estat", 1))
    settings[1] = "train.steps=8"
    with pytest.raises(
        InputError, match=f"{part}/a.jsonl: other content than when the checkpoint was"
    ):
        loop.train(configured(recipe, tmp_path / "run", *settings))
    assert latest_checkpoint(tmp_path / "run" / "checkpoints") == saved
    file.write_bytes(text)
    loop.train(configured(recipe, tmp_path / "run", *settings))


def test_files_that_come_later_may_change(recipe, tmp_path, capsys, monkeypatch):
    """The run goes on and says so. Rows of validation may change as well."""
    monkeypatch.setattr(packing, "STREAM_GROUP", 1000)
    texts = (recipe.parent / "a.jsonl").read_text().splitlines(keepends=True)
    source, run = tmp_path / "data", tmp_path / "run"
    source.mkdir()
    for i in range(15):
        (source / f"{i:02}.jsonl").write_text("".join(texts[i * 100 : (i + 1) * 100]))
    settings = [f"data.source={source}", "data.shuffle_buffer=0", "train.steps=6"]
    loop.train(configured(recipe, run, *settings))
    assert (run / "hashes.jsonl").exists()
    state = torch.load(run / "checkpoints" / "step-6" / "rank-0.pt", weights_only=True)["data"]
    reached = state["documents"]["end"][0]
    assert 0 <= reached < 14

    (source / "new.jsonl").write_text(texts[0] * 100)
    capsys.readouterr()
    settings[2] = "train.steps=8"
    loop.train(configured(recipe, run, *settings, "data.max_validation_rows=5"))
    said = capsys.readouterr().out
    assert "changed    data: 1 file added ahead of where the run stopped" in said
    assert "changed    data.max_validation_rows: 7 → 5" in said
    assert "resumes from step-6" in said


def test_no_file_is_hashed_before_the_first_step(recipe, tmp_path, monkeypatch):
    """At a resume those are that were read, if the record has them not."""
    seen, make = [], hashes.hash_file

    def hash_file(path: Path, *rest) -> str:
        seen.append(threading.current_thread().name)
        return make(path, *rest)

    monkeypatch.setattr(hashes, "hash_file", hash_file)
    run = tmp_path / "run"
    loop.train(configured(recipe, run, "train.steps=2"))
    assert {*seen} <= {"nalanda-hashes"}
    hashes.FileHashes(run / "hashes.jsonl").of(recipe.parent / "a.jsonl", hashes.WHOLE)
    seen.clear()
    loop.train(configured(recipe, run, "train.steps=4"))
    assert seen == []
    (run / "hashes.jsonl").unlink()
    loop.train(configured(recipe, run, "train.steps=6"))
    assert len(seen) == 1


def test_a_start_lists_the_files_once(recipe, tmp_path, monkeypatch):
    listed, find = [], corpus._find_files
    monkeypatch.setattr(corpus, "_find_files", lambda *args: listed.append(args) or find(*args))
    run = tmp_path / "run"
    shutil.copytree(recipe.parent, tmp_path / "data")
    settings = [f"data.source={tmp_path / 'data' / '*.jsonl'}", "validation.every=1"]
    loop.train(configured(recipe, run, *settings, "train.steps=2"))
    listed.clear()
    loop.train(configured(recipe, run, *settings, "train.steps=3"))
    assert len(listed) == 1


def test_documents_that_are_left_out_are_in_the_log(recipe, tmp_path, capsys):
    file = tmp_path / "data" / "a.jsonl"
    file.parent.mkdir()
    large = json.dumps({"text": "rule " * 5000}) + "\n"
    file.write_text(large + (recipe.parent / "a.jsonl").read_text() + large)
    settings = [f"data.source={file.parent}", "data.max_document_bytes=10000", "train.steps=4"]
    run = tmp_path / "run"
    with pytest.raises(InputError, match=r"a\.jsonl, line 1: a document of more than 10,000 bytes"):
        loop.train(configured(recipe, run, *settings))
    loop.train(configured(recipe, run, *settings, "data.oversized=skip"))
    said = capsys.readouterr()
    assert "2 documents above data.max_document_bytes were left out" in said.out
    assert (
        "2 documents above data.max_document_bytes were left out among those read for val"
        in said.err
    )
    events = [
        line for line in read_metrics(run / "metrics.jsonl") if line.get("event") == "oversized"
    ]
    assert [event["documents"] for event in events] == [2]


def test_the_log_says_when_the_data_begin_again(recipe, tmp_path, capsys):
    settings = ["train.steps=8", "log.every=100", "checkpoint.every=3", "data.shuffle_buffer=1"]
    loop.train(configured(recipe, tmp_path / "run", *settings))
    assert "begins again" not in capsys.readouterr().out
    file = tmp_path / "data" / "a.jsonl"
    file.parent.mkdir()
    file.write_text("".join((recipe.parent / "a.jsonl").read_text().splitlines(True)[:40]))
    settings += [f"data.source={file.parent}", "data.validation_share=1e-9", "validation.every=0"]
    run = tmp_path / "again"
    loop.train(configured(recipe, run, *settings))
    events = [line for line in read_metrics(run / "metrics.jsonl") if "event" in line]
    assert [line["event"] for line in events] == ["epoch"] * len(events)
    counts = [line["epochs"] for line in events]
    assert counts[0] == 1
    assert [count.bit_length() for count in counts] == [*range(1, len(counts) + 1)]
    assert "the corpus was read once and begins again" in capsys.readouterr().out
    # Killed behind step 3: the events after it come again, and those before it do not.
    assert {line["step"] > 3 for line in events} == {False, True}
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**facts, "state": "running"}))
    for folder in (run / "final", run / "checkpoints" / "step-6", run / "checkpoints" / "step-8"):
        shutil.rmtree(folder)
    loop.train(configured(recipe, run, *settings))
    assert [line for line in read_metrics(run / "metrics.jsonl") if "event" in line] == events


def test_init_from_takes_weights_and_nothing_else(recipe, tmp_path, whole):
    tokenizer = AutoTokenizer.from_pretrained(whole / "tokenizer")
    with pytest.raises(InputError, match="take its own: tokenizer="):
        configured(recipe, tmp_path / "run", f"model.init_from={whole / 'final'}")
    theirs = f"tokenizer={whole / 'tokenizer'}"
    expected = safetensors.torch.load_file(whole / "final" / "model.safetensors")
    for source in (whole / "final", whole / "checkpoints" / "step-24"):
        for keys in (f"model.init_from={source}", f"model={{init_from: {source}}}"):
            model = build_model(configured(recipe, tmp_path / "run", theirs, keys), tokenizer)
            for name, tensor in model.state_dict().items():
                assert torch.equal(tensor, expected[name]), name
    for change in ("model.hidden_size=64", "model.num_hidden_layers=2", "model.use_gate=false"):
        config = configured(
            recipe, tmp_path / "run", theirs, f"model.init_from={whole / 'final'}", change
        )
        with pytest.raises(InputError, match="another shape"):
            build_model(config, tokenizer)
    with pytest.raises(InputError, match=r"model\.init_from"):
        build_model(
            configured(recipe, tmp_path, theirs, f"model.init_from={tmp_path / 'none'}"), tokenizer
        )


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("vocab_size: 64", "vocab_size"),
        ("auto: {path}/none", "model: "),
        ("auto: {path}, hiden_size: 3", "model.hiden_size"),
        (
            "auto: mamba, hiden_size: 3",
            "model.hiden_size: mamba has no such key; did you mean hidden_size?",
        ),
        ("auto: mamba, num_heads: 4", "model.num_heads: mamba has no such key"),
        ("auto: mamba, vocab_size: 64", "the model's vocab_size is 64"),
        ("auto: llama, hidden_size: 65", "hidden size (65) is not a multiple"),
        ("auto: llama, hidden_size: wide", "expected int, got str"),
        ("auto: vit", "model.auto: vit is not a causal language model"),
        (
            "auto: {path}, max_position_embeddings: 16",
            "data.seq_len: 32 is more than the model's 16",
        ),
    ],
)
def test_models_that_cannot_be_built(recipe, tmp_path, whole, model, words):
    LlamaConfig(vocab_size=320, hidden_size=32, num_attention_heads=2).save_pretrained(tmp_path)
    keys = "{" + model.format(path=tmp_path) + "}"
    config = configured(recipe, tmp_path / "run", f"model={keys}")
    with pytest.raises(InputError) as error:
        build_model(config, AutoTokenizer.from_pretrained(whole / "tokenizer"))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_the_command_line_gives_bad_input_one_line_and_code_2(recipe, tmp_path):
    process = start(recipe, tmp_path / "run", "optim.learnin_rate=1")
    stdout, stderr = process.communicate(timeout=100)
    assert process.returncode == 2
    assert stderr.strip().splitlines()[-1].startswith("nalanda: optim.learnin_rate: no such key")
    assert "Traceback" not in stderr
    assert stdout == ""


def test_launch_on_a_cpu_flushes_denormals_and_names_the_faster_way(monkeypatch, capsys):
    """A decay of e^-90 over a chunk is a denormal number, with which products are several times as slow."""
    monkeypatch.setattr(launch, "processors", lambda: 2)
    config, threads = load_config("demo"), torch.get_num_threads()
    torch.set_flush_denormal(False)
    try:
        monkeypatch.setattr(sys, "argv", ["bin/nalanda", "train", "demo", "output_dir=a b"])
        launch.launch(config)
        assert (torch.tensor(1e-30) * torch.tensor(1e-9)).item() == 0
        command = (
            "--nproc_per_node 2 -m nalanda_cli train demo 'output_dir=a b' train.cpu_threads=1"
        )
        assert command in capsys.readouterr().out
    finally:
        torch.set_num_threads(threads)
