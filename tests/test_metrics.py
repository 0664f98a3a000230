"""metrics.jsonl after a resume, FLOPs, the picture."""

import io
import json
import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nalanda import NalandaConfig, NalandaForCausalLM, metrics
from nalanda.errors import InputError


def line(step: int, **more) -> dict:
    values = {"tokens": step * 10, "loss": 3.0 / step, "grad_norm": 1.0, "lr": 0.1, "tokens_per_second": 5.0}
    return {"step": step, **values, "mfu": 0.5, **more}


def test_a_resume_repeats_no_line(tmp_path, capsys):
    log = metrics.RunLog(tmp_path, metrics.LogConfig(tensorboard=False), step=0, steps=5)
    for step in (1, 2, 3):
        log.train(**line(step))
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss"')  # killed here
    log = metrics.RunLog(tmp_path, metrics.LogConfig(tensorboard=False), step=2, steps=5)
    for step in (3, 4):
        log.train(**line(step, loss=0.0))
    log.close()
    assert [(m["step"], m["loss"]) for m in metrics.read(tmp_path / "metrics.jsonl")] == [
        (1, 3.0),
        (2, 1.5),
        (3, 0.0),
        (4, 0.0),
    ]
    assert (
        capsys.readouterr()
        .out.splitlines()[0]
        .startswith("step 1/5  loss 3.0000  grad norm 1.00  lr 1.00e-01")
    )


def test_a_terminal_gets_a_bar(tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    log = metrics.RunLog(tmp_path, metrics.LogConfig(tensorboard=False), step=0, steps=3)
    log.step(1, 2.5, 12_345.0)
    log.say("a line [bold] above")
    log.close()
    text = terminal.getvalue()
    assert "a line [bold] above" in text
    assert "12.3 K tokens/s" in text
    assert "2.5000" in text
    assert "ETA" in text


def test_other_processes_write_nothing(tmp_path, capsys):
    log = metrics.RunLog(tmp_path, metrics.LogConfig(), step=0, steps=5, quiet=True)
    log.train(**line(1))
    log.close()
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().out == ""


def test_flops():
    ours = NalandaForCausalLM(NalandaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_heads=2))
    assert metrics.flops_per_token(ours, 16)[0] == 3 * ours.config.flops_per_token(16)
    shape = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    for tied in (False, True):
        llama = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=32, tie_word_embeddings=tied))
        layer = 4 * 8 * 8 + 3 * 8 * 16
        products = 2 * layer + 8 * 32
        norms = 5 * 8
        flops, source = metrics.flops_per_token(llama, 10)
        assert flops == 6 * (products + norms) + 6 * 2 * 8 * 10
        assert "estimated" in source


def test_peak_of_known_and_unknown_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 PCIe")
    assert metrics.peak_flops(torch.device("cuda"), "bf16")[0] == 756e12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert metrics.peak_flops(torch.device("cuda"), "bf16")[0] == 989e12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    assert metrics.peak_flops(torch.device("cuda"), "fp32")[0] == 19.5e12
    before = torch.get_rng_state()
    rate, source = metrics.peak_flops(torch.device("cpu"), "fp32")
    assert 1e8 < rate < 1e15
    assert "measured" in source
    assert torch.equal(before, torch.get_rng_state())


def test_the_curve_is_drawn(tmp_path):
    with pytest.raises(InputError, match="no training loss"):
        metrics.plot_losses(tmp_path, tmp_path / "loss.png")
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(1, 60):
            file.write(
                json.dumps({"step": step, "tokens": step * 512, "loss": 3 + 5 * math.exp(-step / 9)}) + "\n"
            )
        file.write(json.dumps({"step": 59, "tokens": 59 * 512, "val_loss": 3.1}) + "\n")
    png = metrics.plot_losses(tmp_path, tmp_path / "pictures" / "loss.png")
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert png.stat().st_size > 10_000


def test_share_of_negative_weights():
    sizes = {
        "vocab_size": 31,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_heads": 2,
        "intermediate_size": 8,
    }
    tokens = torch.arange(20)[None] % 31
    model = NalandaForCausalLM(NalandaConfig(mixer="mala", initializer_range=1.0, **sizes))
    inputs = []
    hooks = [
        layer.mixer.register_forward_pre_hook(lambda m, args: inputs.append(args[0]))
        for layer in model.model.layers
    ]
    model.eval()(tokens, use_cache=False)
    for hook in hooks:
        hook.remove()
    weights = torch.stack(
        [layer.mixer.weights(x) for layer, x in zip(model.model.layers, inputs, strict=True)]
    )
    share = (weights < 0).sum() / (2 * 2 * 20 * 21 / 2)  # the future's weights are 0
    model.train()
    assert 0 < share < 1
    assert metrics.negative_share(model, tokens) == {"negative_weights": pytest.approx(share.item())}
    assert model.training
    assert metrics.negative_share(NalandaForCausalLM(NalandaConfig(**sizes)), tokens) == {}
