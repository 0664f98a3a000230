"""metrics.jsonl after a resume, events, trackers, FLOPs and the estimate of a run."""

import errno
import importlib.util
import io
import json
import math
import sys
import types

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from nalanda import NalandaConfig, NalandaForCausalLM
from nalanda.common import progress
from nalanda.common.errors import InputError
from nalanda.common.text import duration
from nalanda.config.schema import LogConfig
from nalanda.train import log as module
from nalanda.train.flops import PEAK_FLOPS, flops_per_token, known_peak, peak_flops
from nalanda.train.log import RunLog, cut_metrics, last_metrics, read_metrics
from nalanda.train.loss import mixer_metrics


def line(step: int, **more) -> dict:
    values = {
        "tokens": step * 10,
        "loss": 3.0 / step,
        "grad_norm": 1.0,
        "lr": 0.1,
        "tokens_per_second": 5.0,
    }
    return {"step": step, **values, "mfu": 0.5, **more}


def facts(step: int = 1, **more) -> dict:
    return {
        key: value for key, value in line(step, **more).items() if key not in ("step", "tokens")
    }


def test_a_resume_repeats_no_line(tmp_path, capsys):
    log = RunLog(tmp_path, LogConfig(tensorboard=False), step=0, steps=5)
    for step in (1, 2, 3):
        log.write(**line(step))
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss"')  # killed here
    log = RunLog(tmp_path, LogConfig(tensorboard=False), step=2, steps=5)
    for step in (3, 4):
        log.write(**line(step, loss=0.0))
    log.close()
    assert [(m["step"], m["loss"]) for m in read_metrics(tmp_path / "metrics.jsonl")] == [
        (1, 3.0),
        (2, 1.5),
        (3, 0.0),
        (4, 0.0),
    ]


def test_a_terminal_gets_a_bar(tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    log = RunLog(tmp_path, LogConfig(tensorboard=False), step=0, steps=3)
    log.advance(1, 0.1, 8.0, **facts(loss=2.5, tokens_per_second=12_345.0, mfu=0.25))
    log.say("a line [bold] above")
    log.doing("validating")
    log.close()
    text = terminal.getvalue()
    for part in (
        "a line [bold] above",
        "2.5000",
        "12.3 K tok/s",
        "MFU 25.0%",
        "ETA 8 s",
        "validating",
    ):
        assert part in text


def test_a_log_file_gets_a_line_now_and_then_and_at_the_end(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    monkeypatch.setattr(progress, "FIRST", 10.0)
    monkeypatch.setattr(progress, "LAST", 60.0)
    now = 0.0
    log = RunLog(tmp_path, LogConfig(tensorboard=False), step=0, steps=1000)
    for step in range(1, 1001):
        now += 20.0 if step == 400 else 0.0625
        log.advance(step, 0.05, (1000 - step) / 20, **facts(loss=2.5, tokens_per_second=200.0))
    log.close()
    end = "MFU 50.0%  grad norm 1.00  lr 1.00e-01"
    assert capsys.readouterr().out.splitlines() == [
        *(
            f"step {n:>5}/1,000  loss 2.5000  200 tok/s  {end}  ETA {50 - n / 20:.0f} s"
            for n in (160, 320, 400, 640, 960)
        ),
        f"step 1,000/1,000  loss 2.5000  200 tok/s  {end}",
    ]


def test_other_processes_write_nothing(tmp_path, capsys):
    log = RunLog(tmp_path, LogConfig(), step=0, steps=5, quiet=True)
    log.write(**line(1))
    log.close()
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().out == ""


def test_events_are_lines_and_no_scalars(tmp_path, capsys):
    log = RunLog(tmp_path, LogConfig(), step=0, steps=5)
    added = []
    log.board.add_scalar = lambda *values: added.append(values)
    log.write(**line(1))
    log.event(2, "skipped", reason="the gradient norm is nan", loss=math.nan, count=3)
    log.event(2, "interrupted")
    log.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert "NaN" not in lines[1]
    assert [json.loads(text) for text in lines[1:]] == [
        {
            "step": 2,
            "event": "skipped",
            "reason": "the gradient norm is nan",
            "loss": "nan",
            "count": 3,
        },
        {"step": 2, "event": "interrupted"},
    ]
    assert {key for key, _, _ in added} == set(line(1)) - {"step"}
    out = capsys.readouterr().out
    assert "step 2: skipped: the gradient norm is nan\nstep 2: interrupted\n" in out
    cut_metrics(tmp_path / "metrics.jsonl", 1)
    assert len(list(read_metrics(tmp_path / "metrics.jsonl"))) == 1


def test_steps_that_a_rollback_passed_over_stay_recorded(tmp_path):
    file = tmp_path / "metrics.jsonl"
    rows = [{"step": step} for step in (90, 100, 110)]
    rows += [{"step": step, "event": "skipped"} for step in (111, 112)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cut_metrics(file, 100, keep_events=True)
    late = [{"step": 101, "event": "rollback"}, {"step": 110}, {"step": 120, "event": "skipped"}]
    file.write_text(file.read_text() + "".join(json.dumps(row) + "\n" for row in late))
    cut_metrics(file, 110)
    assert list(read_metrics(file)) == [*rows[:2], *rows[3:], *late[:2]]
    cut_metrics(file, 100)  # before the rollback: what follows is made again
    assert list(read_metrics(file)) == rows[:2]


def test_lines_that_cannot_be_read_are_passed_over_and_stay(tmp_path, capsys):
    """One flipped byte costs its own line, not all behind it."""
    file = tmp_path / "metrics.jsonl"
    bad = (b'{"step": 2, "lo\xffss": 1.5\n', b"17\n", b'{"step": "x"}\n', b'{"stfp": 2}\n')
    good = [json.dumps(line(step)).encode() + b"\n" for step in (1, 3, 4, 5)]
    file.write_bytes(good[0] + b"".join(bad) + b"".join(good[1:]) + b'{"step": 6, "lo')
    assert [m["step"] for m in read_metrics(file)] == [1, 3, 4, 5]
    log = RunLog(tmp_path, LogConfig(tensorboard=False), step=4, steps=9)
    log.write(**line(5))
    log.close()
    assert file.read_bytes().startswith(good[0] + b"".join(bad) + good[1] + good[2])
    assert [m["step"] for m in read_metrics(file)] == [1, 3, 4, 5]
    assert "4 line(s) cannot be read" in capsys.readouterr().out


def test_a_rollback_keeps_the_events(tmp_path):
    log = RunLog(tmp_path, LogConfig(tensorboard=False), step=0, steps=9)
    log.write(**line(1))
    for step in (2, 3):
        log.event(step, "skipped", reason="the loss is nan")
        log.write(**line(step))
    log.close()
    log = RunLog(tmp_path, LogConfig(tensorboard=False), step=1, steps=9, keep_events=True)
    log.event(2, "rollback")
    log.close()
    found = [(m["step"], m.get("event")) for m in read_metrics(tmp_path / "metrics.jsonl")]
    assert found == [(1, None), (2, "skipped"), (3, "skipped"), (2, "rollback")]


def test_numbers_that_are_not_finite_come_back_as_numbers(tmp_path):
    log = RunLog(tmp_path, LogConfig(tensorboard=False), step=0, steps=9)
    log.write(step=1, val_loss=math.nan, val_ppl=math.inf, low=-math.inf, name="nan nan")
    log.close()
    (found,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(found["val_loss"])
    assert (found["val_ppl"], found["low"], found["name"]) == (math.inf, -math.inf, "nan nan")


def tracked(monkeypatch, name: str) -> list[tuple]:
    """A wandb or trackio that notes what it is called with."""
    calls, module = [], types.ModuleType(name)
    module.init = lambda **options: calls.append(("init", options))
    module.log = lambda numbers, step: calls.append(("log", numbers, step))
    module.finish = lambda: calls.append(("finish",))
    monkeypatch.setitem(sys.modules, name, module)
    return calls


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_every_step_once(tmp_path, monkeypatch, name):
    calls = tracked(monkeypatch, name)
    monkeypatch.setenv("WANDB_API_KEY", secret := "0123456789abcdef")
    (tmp_path / "config.yaml").write_text("seed: 7\n")
    config = LogConfig(tensorboard=False, tracker=name, project="mine")

    def go(start: int, *steps: int) -> None:
        log = RunLog(tmp_path, config, step=start, steps=9)
        for step in steps:
            log.write(**line(step))
        log.event(steps[-1], "interrupted", count=1)
        log.close()

    go(0, 1, 2, 3, 4)
    go(2, 3)  # killed early, so that the file no longer tells of step 4
    go(2, 3, 4, 5)
    logged = [call for call in calls if call[0] == "log"]
    assert [step for _, _, step in logged] == [1, 2, 3, 4, 5]
    assert logged[0][1] == {key: value for key, value in line(1).items() if key != "step"}
    starts = [call[1] for call in calls if call[0] == "init"]
    assert len(starts) == 3
    assert starts[0] == starts[1] == starts[2]
    assert starts[0]["project"] == "mine"
    assert starts[0]["config"] == {"seed": 7}
    assert starts[0]["resume"] == "allow"
    assert "mode" not in starts[0]  # the tracker's own environment says whether it is offline
    assert starts[0]["name"].startswith(f"{tmp_path.name}-")
    assert ("id" in starts[0]) == (name == "wandb")
    assert calls[-1] == ("finish",)
    # metrics.jsonl is what it is without a tracker.
    steps = [m["step"] for m in read_metrics(tmp_path / "metrics.jsonl") if "loss" in m]
    assert steps == [1, 2, 3, 4, 5]
    for file in tmp_path.rglob("*"):
        assert file.is_dir() or secret not in file.read_text()
    other = tracked(monkeypatch, other_name := {"wandb": "trackio", "trackio": "wandb"}[name])
    log = RunLog(tmp_path, LogConfig(tracker=other_name, tensorboard=False), step=5, steps=9)
    log.write(**line(6))
    log.close()
    assert [call[2] for call in other if call[0] == "log"] == [6]
    assert other[0][1]["name"] != starts[0]["name"]


def test_trackers_that_are_not_there_or_fail(tmp_path, monkeypatch, capsys):
    config = LogConfig(tensorboard=False, tracker="wandb")
    with monkeypatch.context() as without:
        without.delitem(sys.modules, "wandb", raising=False)
        without.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(
            InputError, match=r"^log\.tracker: wandb is not installed: pip install wandb"
        ):
            config.check_packages()
    RunLog(tmp_path, config, step=0, steps=5, quiet=True).close()

    def fail(*arguments, **options):
        raise RuntimeError("no network\nand much more")

    calls = tracked(monkeypatch, "wandb")
    monkeypatch.setattr(sys.modules["wandb"], "log", fail)
    (tmp_path / "tracker.json").write_text('{"tracker"')  # cut short
    log = RunLog(tmp_path, config, step=0, steps=5)
    for step in (1, 2):
        log.write(**line(step))
    log.close()
    assert [m["step"] for m in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
    message = "wandb gets no more metrics; metrics.jsonl still does: no network\n"
    assert capsys.readouterr().out.count(message) == 1
    assert [call[0] for call in calls] == ["init"]
    monkeypatch.setattr(sys.modules["wandb"], "init", fail)
    with pytest.raises(InputError, match=r"^log\.tracker: wandb: no network$"):
        RunLog(tmp_path, config, step=2, steps=5)


def test_a_board_is_written_where_tensorboard_is_installed(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "tensorboard", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    RunLog(tmp_path, LogConfig(), step=0, steps=5).close()
    assert not (tmp_path / "tensorboard").exists()
    LogConfig().check_packages()
    with pytest.raises(InputError, match=r"^log\.tensorboard: not installed: pip install 'nalanda"):
        LogConfig(tensorboard=True).check_packages()


def test_a_full_disk_ends_tensorboard_and_not_the_training(tmp_path, monkeypatch, capsys):
    from torch.utils import tensorboard

    def full(*arguments, **options):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(tensorboard.SummaryWriter, "add_scalar", full)
    log = RunLog(tmp_path, LogConfig(), step=0, steps=5)
    for step in (1, 2):
        log.write(**line(step))
    log.close()
    assert [m["step"] for m in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
    said = "TensorBoard gets no more metrics; metrics.jsonl still does: [Errno 122] Disk quota exceeded\n"
    assert capsys.readouterr().out.count(said) == 1

    monkeypatch.setattr(tensorboard, "SummaryWriter", full)  # as after a rollback
    RunLog(tmp_path, LogConfig(), step=2, steps=5).close()
    assert said in capsys.readouterr().out


def test_durations():
    seconds = (45, 12 * 60, 3 * 3600 + 300, 71 * 3600, 110 * 3600, 6.06e9)
    assert [duration(s) for s in seconds] == [
        "45 s",
        "12 min",
        "3 h 05 min",
        "71 h 00 min",
        "4 d 14 h",
        "192 years",
    ]


def test_no_time_is_foretold_before_it_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "FIRST", 0.0)
    monkeypatch.setattr(progress, "LAST", 0.0)
    log = RunLog(tmp_path, LogConfig(tensorboard=False), step=0, steps=1000)
    log.expect(1000, 60.0, 0.06)
    for step in range(1, 15):
        log.advance(step, 0.1, 9.0, **facts(step))
    log.close()
    lines = capsys.readouterr().out.splitlines()
    said = [line.startswith("time ") for line in lines].index(True)
    assert said == 11
    assert ["ETA" in line for line in lines] == [False] * 12 + [True] * 3


def test_the_first_steps_tell_the_time_once(tmp_path, capsys):
    def said(shortest, seconds: list[float], begun: int = 0, first: float = 0.0) -> list[str]:
        log = RunLog(tmp_path, LogConfig(tensorboard=False), step=begun, steps=1000)
        if shortest:
            log.expect(1000 - begun, shortest, first or shortest / (1000 - begun))
        for step, took in enumerate(seconds, begun + 1):
            log.advance(step, took, 0.0, **facts(step))
        log.close()
        return capsys.readouterr().out.splitlines()

    slow_first = [9.0] + [0.1] * 9 + [3.0] + [0.1] * 20  # one step beside other work, too
    assert said(4.0, slow_first) == [
        "time       2 min for 1,000 steps, by steps 2 to 11: 1.6 % of the peak, "
        "where nalanda info assumes 10 to 40 %"
    ]
    assert said(60.0, slow_first) == [
        "time       2 min for 1,000 steps, by steps 2 to 11: 24.0 % of the peak"
    ]
    assert said(400.0, slow_first, begun=500) == [
        "time       50 s for 500 steps, by steps 502 to 511: 320.0 % of the peak, "
        "where nalanda info assumes 10 to 40 %"
    ]
    assert said(4.0, slow_first[:10]) == []
    assert said(None, slow_first) == []  # after a rollback
    # The steps of a later stage cost a hundred times as much.
    assert said(60.0, slow_first, first=0.0006) == [
        "time       2 h 47 min for 1,000 steps, by steps 2 to 11: 0.2 % of the peak, "
        "where nalanda info assumes 10 to 40 %"
    ]


def test_flops():
    ours = NalandaForCausalLM(
        NalandaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_heads=2)
    )
    assert flops_per_token(ours, 16)[0] == 3 * ours.config.flops_per_token(16)
    shape = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    for tied in (False, True):
        llama = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=32, tie_word_embeddings=tied))
        layer = 4 * 8 * 8 + 3 * 8 * 16
        products = 2 * layer + 8 * 32  # norms are none
        flops, source = flops_per_token(llama, 10)
        assert flops == 6 * products + 6 * 2 * 8 * 10
        assert "estimated" in source


def test_flops_of_what_a_token_meets():
    """Two of eight experts, and attention in its own layers, behind its window."""
    shape = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    mixtral = MixtralForCausalLM(MixtralConfig(**shape, **experts))
    layer = 4 * 8 * 8 + 2 * 3 * 8 * 16 + 8 * 8
    assert flops_per_token(mixtral, 10)[0] == 6 * (2 * layer + 8 * 32) + 6 * 2 * 8 * 10
    layer = 4 * 8 * 8 + 3 * 8 * 16
    types = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    windowed = Qwen3ForCausalLM(Qwen3Config(**shape, **types, head_dim=4, use_sliding_window=True))
    keys = 10 / 2 + 4 - 4**2 / (2 * 10)
    assert flops_per_token(windowed, 10)[0] == 6 * (2 * layer + 8 * 32) + 12 * 8 * keys
    assert flops_per_token(windowed, 4)[0] == 6 * (2 * layer + 8 * 32) + 6 * 2 * 8 * 4
    windowed.config.layer_types = ["linear_attention", "full_attention"]
    assert flops_per_token(windowed, 10)[0] == 6 * (2 * layer + 8 * 32) + 6 * 8 * 10


@pytest.mark.parametrize("T", [2048, 8192])
@pytest.mark.parametrize(
    "fields", [{}, {"num_key_value_heads": 2}, {"head_dim": 96}], ids=["", "gqa", "wide"]
)
def test_softmax_costs_the_same_whoever_built_it(T, fields):
    """The network of transformer_340m: ours, and transformers' Llama as `model.auto` makes it."""
    shape = {
        "vocab_size": 32000,
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "intermediate_size": 2816,
    }
    heads, options = {"num_attention_heads": 8}, {"num_kv_heads": fields.get("num_key_value_heads")}
    own = {"head_dim": fields["head_dim"]} if "head_dim" in fields else {}
    ours = NalandaConfig(**shape, **heads, **own, mixer="softmax", mixer_options=options)
    with torch.device("meta"):
        models = NalandaForCausalLM(ours), LlamaForCausalLM(LlamaConfig(**shape, **heads, **fields))
    assert models[0].num_parameters() == models[1].num_parameters()
    counts = [flops_per_token(model, T) for model in models]
    assert counts[0][0] == counts[1][0]
    assert all("causal attention is half of T × T" in source for _, source in counts)
    if not fields:
        assert counts[0][0] / 1e9 == pytest.approx({2048: 2.348, 8192: 3.254}[T], abs=1e-3)


def test_peak_of_known_and_unknown_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 PCIe")
    assert peak_flops(torch.device("cuda"), "bf16")[0] == 756e12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert peak_flops(torch.device("cuda"), "bf16")[0] == 989e12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    assert peak_flops(torch.device("cuda"), "fp32")[0] == 19.5e12
    names = {
        "A100": ["Tesla A100", "NVIDIA A100 80GB PCIe"],
        "H100": ["NVIDIA H100 80GB HBM3", "h100"],
        "GH200": ["NVIDIA GH200 480GB"],
        "RTX 4090": ["NVIDIA GeForce RTX 4090"],
        "MI300X": ["AMD Instinct MI300X OAM"],
        "L40S": ["NVIDIA L40S"],
    }
    for key, known in names.items():
        assert [known_peak(name, "bf16")[0] for name in known] == [PEAK_FLOPS[key][0]] * len(known)
    other = (
        "L40",
        "RTX A1000",
        "A10G",
        "H100 NVL",
        "H200 NVL",
        "GeForce RTX 4090 Laptop GPU",
        "GeForce RTX 3090 Ti",
    )
    for name in (*other, "GeForce RTX 4090 D", "A100-SXM4-40GB MIG 1g.5gb"):
        assert known_peak(f"NVIDIA {name}", "bf16") is None, name
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    rate, source = peak_flops(torch.device("cpu"), "fp32")
    assert torch.get_num_threads() == threads
    assert 1e8 < rate < 1e15
    assert "measured" in source
    assert torch.equal(before, torch.get_rng_state())


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
    assert mixer_metrics(model, tokens) == {"negative_weights": pytest.approx(share.item())}
    assert model.training
    assert mixer_metrics(NalandaForCausalLM(NalandaConfig(**sizes)), tokens) == {}


def test_the_last_metrics_come_first_and_only_the_end_is_read(tmp_path, monkeypatch):
    """Whatever the blocks; unreadable and torn lines are passed over."""
    file = tmp_path / "metrics.jsonl"
    lines = [json.dumps(line(step, val_loss=math.nan)) + "\n" for step in range(1, 40)]
    file.write_text(
        "".join([*lines[:20], "17\n", '{"step": "x"}\n', *lines[20:], '{"step": 40, "lo'])
    )
    expected = [str(values) for values in read_metrics(file)][::-1]
    assert len(expected) == 39
    for block in (1, 7, 100, 130, 1 << 16):
        monkeypatch.setattr(module, "BLOCK", block)
        assert [str(values) for values in last_metrics(file)] == expected
    monkeypatch.setattr(module, "BLOCK", 200)
    with file.open("r+b") as stream:
        stream.write(b"\xff" * 1000)  # what is not read cannot matter
    assert next(last_metrics(file))["step"] == 39
    file.write_bytes(b"")
    assert list(last_metrics(file)) == []
