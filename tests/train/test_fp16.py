"""fp16 under a loss scale: it learns as fp32 does, an overflow changes the scale alone, a resume keeps it.

torchrun starts this file itself as two processes over gloo.
"""

import json
import math
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from accelerate.state import AcceleratorState
from tiny_models import main_rows, rows
from torch import nn
from torch.distributed.tensor import DTensor
from training import configured, launched, outcome

from nalanda import NalandaConfig, NalandaForCausalLM
from nalanda.common.errors import InputError
from nalanda.config.load import load_config
from nalanda.config.schema import OptimConfig, TrainConfig
from nalanda.model.loss import linear_cross_entropy
from nalanda.train import build, launch, loop, parallel
from nalanda.train import step as training_step
from nalanda.train.checkpoint_dir import latest_checkpoint
from nalanda.train.flops import known_peak
from nalanda.train.log import read_facts, read_metrics
from nalanda.train.optim import build_optimizer, follow_gradients, loss_scale

CPU = torch.device("cpu")
FP16 = "train.precision=fp16"
SOME = [
    "gated_deltanet-nala",
    "deltanet-silu",
    "linear_attention-exp",
    "mala-elu1",
    "softmax-None",
    "norm_attention-relu",
    "kda-silu",
    "gated_deltanet-steps",
]


def made(**options) -> NalandaForCausalLM:
    torch.manual_seed(0)
    mixers = options.get("mixer")
    layers = len(mixers) if isinstance(mixers, list) else 1
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64} | options
    return NalandaForCausalLM(NalandaConfig(num_hidden_layers=layers, **sizes)).train()


def gradient(
    model: nn.Module, tokens: torch.Tensor, dtype: torch.dtype
) -> tuple[float, torch.Tensor]:
    """The loss and its gradient, under a scale that fits the gradient into fp16."""
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        loss = model(tokens, labels=tokens, use_cache=False, logits_to_keep=1).loss
    model.zero_grad()
    (2**12 * loss).backward()
    parts = [p.grad.flatten() / 2**12 for p in model.parameters() if p.grad is not None]
    return loss.item(), torch.cat(parts)


def overflows_nowhere(options: dict) -> None:
    model, tokens = (
        made(**options),
        torch.randint(64, (1, 1024), generator=torch.Generator().manual_seed(1)),
    )
    exact, exact_gradient = gradient(model, tokens, torch.float32)
    found, found_gradient = gradient(model, tokens, torch.float16)
    assert found == pytest.approx(exact, abs=5e-3)
    assert (found_gradient - exact_gradient).norm() <= 0.05 * exact_gradient.norm()


@pytest.mark.parametrize("options", [row for row in rows() if row.id in SOME])
def test_sums_over_many_tokens_do_not_overflow(options):
    overflows_nowhere(options)


@pytest.mark.slow
@pytest.mark.parametrize("options", main_rows())
def test_sums_over_many_tokens_overflow_in_no_mixer(options):
    overflows_nowhere(options)


def test_the_gradient_of_a_frequent_words_row_does_not_overflow():
    """Its sum over the rows, 6,000 · 40, is out of fp16's range, and no loss scale would help."""
    h, weight = torch.full((6000, 8), 40.0), torch.zeros(16, 8, requires_grad=True)
    labels = torch.zeros(6000, dtype=torch.int64)
    with torch.autocast("cpu", torch.float16):
        loss = linear_cross_entropy(h, weight, labels)
    (loss / 6000).backward()
    expected = torch.full((16, 8), 40 / 16)
    expected[0] *= -15
    torch.testing.assert_close(weight.grad, expected, rtol=2e-3, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["gated_deltanet", "softmax"])
def test_it_learns_to_repeat_a_pattern(mixer):
    """Nats a token after 50 updates: near those of fp32, far below the first."""

    def losses(dtype: torch.dtype) -> list[float]:
        model = made(mixer=[mixer, mixer], hidden_size=64, vocab_size=16, initializer_range=0.12)
        optimizer = build_optimizer(model, OptimConfig(lr=1e-2))
        scaler, found = loss_scale("fp16" if dtype == torch.float16 else "fp32", CPU), []
        while len(found) < 50:
            draw = torch.Generator().manual_seed(len(found))
            tokens = torch.randint(16, (24, 4), generator=draw).repeat(1, 5)
            with torch.autocast("cpu", dtype, enabled=scaler.is_enabled()):
                logits = model(tokens, use_cache=False).logits[:, 4:-1].float()
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 5:].flatten())
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if follow_gradients(scaler) is None:  # else the same rows come again
                optimizer.step()
                found.append(loss.item())
            optimizer.zero_grad()
        return found

    exact, found = losses(torch.float32), losses(torch.float16)
    assert found[-1] < 0.5 * found[0]
    assert found[-1] < exact[-1] + 0.25  # the curve is steep there; bf16 too is 0.3 away


def trained(*settings) -> Path:
    """accelerate keeps the first precision of a process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    return loop.train(configured(*settings))


def scaled(monkeypatch, scale: float) -> None:
    """Runs begin at this loss scale."""
    monkeypatch.setattr(
        build,
        "loss_scale",
        lambda precision, device: torch.amp.GradScaler("cpu", scale, growth_interval=7),
    )


def logged(run: Path, event: str) -> list[dict]:
    return [line for line in read_metrics(run / "metrics.jsonl") if line.get("event") == event]


def trainer(run: Path, step: int) -> dict:
    return json.loads((run / "checkpoints" / f"step-{step}" / "trainer.json").read_text())


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(run / "checkpoints" / f"step-{step}" / "model.safetensors")


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize(
    ("steps", "more"),
    [
        (24, ()),
        pytest.param(
            12,
            (
                "train.steps=12",
                "optim.name=muon",
                "train.z_loss=1e-4",
                "train.gradient_checkpointing=true",
            ),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_in_fp16_follows_that_in_fp32(recipe, whole, tmp_path, steps, more):
    exact = whole
    if more:
        exact = trained(recipe, tmp_path / "fp32", *more)
    run = trained(recipe, tmp_path / "run", FP16, *more)
    expected, found = (
        [line["loss"] for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]
        for folder in (exact, run)
    )
    assert len(found) == len(expected) == steps
    assert found == pytest.approx(expected, rel=2e-3)
    assert read_facts(run)["precision"] == "fp16"
    assert weights(run, steps)["model.embed_tokens.weight"].dtype == torch.float32


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_accelerate")
def test_an_overflow_changes_the_scale_alone(recipe, tmp_path, monkeypatch):
    """At a scale of 2^40 the first steps overflow. Each is left out, and none is a bad step of the guard."""
    scaled(monkeypatch, 2.0**40)
    every = (
        "train.steps=30",
        "checkpoint.every=1",
        "checkpoint.keep_last=99",
        "guard.max_bad_steps=1",
    )
    run = loop.train(configured(recipe, tmp_path / "run", FP16, *every))
    lowered = logged(run, "loss scale")
    last = len(lowered)
    assert 3 < last < 30
    assert lowered[0]["reason"] == "1.09951e+12 → 5.49756e+11, gradients overflowed fp16"
    assert [line["step"] for line in lowered[:3]] == [1, 2, 3]
    assert not logged(run, "skipped")
    assert not logged(run, "rollback")
    assert trainer(run, 30)["overflows"] == last
    assert trainer(run, 30)["skipped"] == 0
    first = weights(run, 1)
    assert all(torch.equal(x, first[name]) for name, x in weights(run, 3).items())
    assert not safetensors.torch.load_file(run / "checkpoints" / "step-3" / "optimizer.safetensors")
    good = next(n for n in range(1, 31) if n not in {line["step"] for line in lowered})
    assert any(not torch.equal(x, first[name]) for name, x in weights(run, good).items())


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_accelerate")
def test_a_resume_keeps_the_scale_and_its_counter(recipe, tmp_path, monkeypatch):
    scaled(monkeypatch, 2.0**20)
    settings = (FP16, "train.steps=15")
    plain = loop.train(configured(recipe, tmp_path / "plain", *settings))

    class Stop(Exception):
        pass

    def stop(*_):
        raise Stop

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        real = loop.validate_if_due
        patch.setattr(
            loop, "validate_if_due", lambda r, *a: stop() if r.at.step == 13 else real(r, *a)
        )
        with pytest.raises(Stop):
            loop.train(configured(recipe, run, *settings))
    middle = trainer(run, 10)["loss_scale"]
    assert middle["scale"] != 2.0**20
    assert 0 < middle["_growth_tracker"] < 7
    scaled(monkeypatch, 3.0)  # what the checkpoint holds counts
    resumed = outcome(loop.train(configured(recipe, run, *settings)))
    expected = outcome(plain)
    assert resumed["final"] == expected["final"]
    assert resumed["files"]["trainer.json"] == expected["files"]["trainer.json"]


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_accelerate")
def test_precision_moves_on_resume(recipe, tmp_path):
    run = tmp_path / "run"
    for steps, precision in ((5, "bf16"), (10, "fp16"), (15, "fp32")):
        trained(recipe, run, f"train.precision={precision}", f"train.steps={steps}")
    assert [bool(trainer(run, n)["loss_scale"]) for n in (5, 10, 15)] == [False, True, False]
    assert trainer(run, 10)["loss_scale"]["scale"] == 2.0**16
    assert [change["train.precision"] for change in read_facts(run)["changes"]] == [
        ["bf16", "fp16"],
        ["fp16", "fp32"],
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_accelerate")
def test_auto_takes_what_the_processor_gains_by(recipe, tmp_path, monkeypatch, capsys):
    """The recipe keeps auto; the run, and a resume on another processor, say their own precision."""
    run = tmp_path / "run"
    for steps, gain in ((5, 2.0), (10, 1.1)):
        rates = {torch.bfloat16: gain, torch.float32: 1.0}
        monkeypatch.setattr(launch, "matmul_flops", lambda device, dtype, rates=rates: rates[dtype])
        trained(recipe, run, "train.precision=auto", f"train.steps={steps}")
        assert "precision: auto" in (run / "config.yaml").read_text()
        assert read_facts(run)["precision"] == ("bf16" if gain == 2.0 else "fp32")
    out = capsys.readouterr().out
    assert "cpu, bf16, eager" in out
    assert "cpu, fp32, eager" in out
    (change,) = read_facts(run)["changes"]
    assert change["train.precision"] == ["bf16", "fp32"]
    assert "| precision | fp32 |" in (run / "final" / "README.md").read_text()


def test_auto_is_bf16_on_a_card_that_has_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    for has, precision in ((True, "bf16"), (False, "fp16")):
        monkeypatch.setattr(launch, "has_bf16", lambda has=has: has)
        assert launch.choose_precision("auto") == precision
        assert launch.choose_precision("fp32") == "fp32"


@pytest.mark.usefixtures("fresh_accelerate")
def test_gradients_that_overflow_at_any_scale_are_bad_steps(recipe, tmp_path, monkeypatch, capsys):
    scaled(monkeypatch, 4.0)
    real = training_step.summed_loss
    monkeypatch.setattr(training_step, "summed_loss", lambda *a: real(*a) * math.inf)
    with pytest.raises(InputError, match="the loss is"):
        loop.train(configured(recipe, tmp_path / "run", FP16, "guard.max_bad_steps=3"))
    run = tmp_path / "run"
    assert [line["scale"] for line in logged(run, "loss scale")] == [2.0, 1.0]
    assert len(logged(run, "skipped")) == 3
    shown = capsys.readouterr().out
    assert shown.count("gradients overflow fp16 at loss scale 1: set train.precision=fp32") == 1


def test_a_card_without_bf16_is_told_of_fp16(monkeypatch, recipe, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation
    )
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    with pytest.raises(
        InputError, match=r"^train\.precision: this card has no bf16; set train\.precision=fp16$"
    ):
        launch.launch(configured(recipe, tmp_path / "run", "train.precision=bf16"))
    for precision in ("fp16", "fp32"):
        launch.choose_precision(precision)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    launch.choose_precision("bf16")


def test_the_peak_of_fp16_is_that_of_bf16():
    assert known_peak("NVIDIA A100-SXM4-80GB", "fp16") == known_peak(
        "NVIDIA A100-SXM4-80GB", "bf16"
    )


# ------------------------------------------------------------------------------------------ two processes


def worker(recipe: Path, folder: Path) -> None:
    """Trains under DDP, FSDP2 and a context, each from a scale that overflows at first. Then it lets the
    gradients of one process alone overflow."""
    build.loss_scale = lambda precision, device: torch.amp.GradScaler("cpu", 2.0**40)
    for kind, more in {
        "ddp": (),
        "fsdp": ("train.parallel=fsdp",),
        "context": ("train.context_parallel=2",),
    }.items():
        run = folder / kind
        loop.train(
            load_config(recipe, [f"output_dir={run}", FP16, "train.micro_batch_size=2", *more])
        )
    config = load_config(recipe, [f"output_dir={folder / 'unused'}", FP16])
    accelerator = launch.launch(config)
    sizes = {"steps": 1, "tokens_per_step": 1, "micro_batch_size": 1}
    chosen = TrainConfig(**sizes, precision="fp16", parallel="fsdp")
    model = made(mixer="gated_deltanet")
    sharing = parallel.Sharing(accelerator, chosen)
    wrapped, optimizer = parallel.parallelize(
        accelerator, model, sharing, chosen, lambda: build_optimizer(model, OptimConfig())
    )
    scaler, tokens = loss_scale("fp16", CPU), torch.randint(64, (2, 16))
    scaler.scale(wrapped(tokens, labels=tokens, use_cache=False).loss).backward()
    if accelerator.process_index == 1:
        gradient = model.lm_head.weight.grad
        assert isinstance(gradient, DTensor)
        gradient.to_local()[0, 0] = math.inf
    scaler.unscale_(optimizer)
    changed = follow_gradients(scaler)
    (folder / f"{accelerator.process_index}.json").write_text(json.dumps(changed))


@pytest.mark.slow
def test_two_processes_agree_on_the_scale(recipe, tmp_path):
    launched(__file__, str(recipe), str(tmp_path))
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)] == [
        [65536, 32768]
    ] * 2
    losses = {}
    for kind in ("ddp", "fsdp", "context"):
        run = tmp_path / kind
        assert latest_checkpoint(run / "checkpoints").name == "step-24"
        lines = [line for line in read_metrics(run / "metrics.jsonl") if "loss" in line]
        losses[kind] = [line["loss"] for line in lines]
        assert trainer(run, 24)["overflows"] == len(logged(run, "loss scale")) > 3
        assert not logged(run, "skipped")
    assert losses["fsdp"] == pytest.approx(losses["ddp"], rel=5e-3)
    assert losses["context"] == pytest.approx(losses["ddp"], rel=5e-3)


if __name__ == "__main__":
    worker(*map(Path, sys.argv[1:]))
