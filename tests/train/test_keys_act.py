"""What the keys of a recipe do to a step, and what a run's figures are computed from."""

import itertools
import math
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from accelerate.utils import set_seed
from training import configured

from nalanda import NalandaConfig, NalandaForCausalLM
from nalanda.config.load import load_config
from nalanda.config.schema import OptimConfig
from nalanda.data.masking import Masking
from nalanda.data.prepare import prepare
from nalanda.data.tokenizer import build_tokenizer
from nalanda.train import checkpoint, loop, loss
from nalanda.train import step as training_step
from nalanda.train.build import build_model, open_batches
from nalanda.train.carried_states import CarriedStates
from nalanda.train.guards import SpikeDetector
from nalanda.train.log import describe_perplexity, read_facts, read_metrics
from nalanda.train.optim import build_optimizer

pytestmark = pytest.mark.usefixtures("fresh_accelerate")
ENCODER = (
    "model={mixer: mala, is_decoder: false, hidden_size: 32, num_hidden_layers: 1, num_heads: 2}",
    "tokenizer={train: bpe, vocab_size: 320, mask: true}",
)
ONE_STEP = (
    "train.steps=1",
    "schedule.name=constant",
    "schedule.warmup_steps=0",
    "validation.every=0",
)


def first_moments(run):
    state = safetensors.torch.load_file(run / "checkpoints/step-1/optimizer.safetensors")
    return {k.removesuffix(".exp_avg"): v / 0.1 for k, v in state.items() if k.endswith(".exp_avg")}


def test_the_z_loss_of_a_recipe_is_in_the_step(recipe, tmp_path):
    config = configured(
        recipe, tmp_path / "run", *ONE_STEP, "optim.max_grad_norm=1e9", "train.z_loss=0.5"
    )
    loop.train(config)
    tokenizer = build_tokenizer(config.tokenizer, config.data, tmp_path / "run" / "tokenizer")
    set_seed(config.seed)
    model = build_model(config, tokenizer)
    step = list(itertools.islice(open_batches(config, tokenizer)[0], 2))
    count = sum(map(loss.count_labels, step))
    (sum(loss.summed_loss(model, b, model.device, 0.5) for b in step) / count).backward()
    found, wanted = first_moments(tmp_path / "run")["lm_head.weight"], model.lm_head.weight.grad
    torch.testing.assert_close(found, wanted, atol=1e-5 * wanted.abs().max().item(), rtol=1e-4)


def test_gradients_are_scaled_to_the_norm_of_the_recipe(recipe, tmp_path):
    loop.train(configured(recipe, tmp_path / "run", *ONE_STEP, "optim.max_grad_norm=0.01"))
    norm = math.sqrt(sum(g.square().sum().item() for g in first_moments(tmp_path / "run").values()))
    assert norm == pytest.approx(0.01, rel=1e-3)


def test_adamw_has_the_settings_of_the_recipe():
    optimizer = build_optimizer(torch.nn.Linear(2, 2), OptimConfig(betas=(0.7, 0.8), eps=1e-3))
    assert {(g["betas"], g["eps"]) for g in optimizer.param_groups} == {((0.7, 0.8), 1e-3)}


def test_rate_and_mfu_are_of_the_steps_since_the_last_line(recipe, tmp_path, monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(
        training_step, "time", SimpleNamespace(perf_counter=lambda: float(next(clock)))
    )  # 1 s a step
    loop.train(
        configured(recipe, tmp_path / "run", "train.steps=6", "log.every=2", "validation.every=0")
    )
    facts = read_facts(tmp_path / "run")
    for line in read_metrics(tmp_path / "run" / "metrics.jsonl"):
        assert line["tokens_per_second"] == 256
        assert line["mfu"] == 256 * facts["training_flops_per_token"] / facts["peak_flops"]


def test_every_row_of_a_run_is_masked_by_its_own_number(recipe, tmp_path, monkeypatch):
    seen, call = [], Masking.__call__

    def noted(self, batch, number, rows, rank=0, world_size=1, seed=None):
        if seed is None:
            seen.append((number, rows, rank, world_size))
        return call(self, batch, number, rows, rank, world_size, seed)

    monkeypatch.setattr(Masking, "__call__", noted)
    loop.train(
        configured(recipe, tmp_path / "run", *ENCODER, "train.steps=3", "validation.every=0")
    )
    assert seen == [(n, 4, 0, 1) for n in range(6)]  # two micro-batches a step


def test_validation_is_without_dropout_and_training_goes_on_with_it(recipe, tmp_path, monkeypatch):
    modes, summed = [], loss.summed_loss

    def noted(model, *rest, **more):
        modes.append((torch.is_grad_enabled(), getattr(model, "module", model).training))
        return summed(model, *rest, **more)

    monkeypatch.setattr(loss, "summed_loss", noted)
    monkeypatch.setattr(training_step, "summed_loss", noted)
    loop.train(
        configured(
            recipe, tmp_path / "run", "model.dropout=0.2", "train.steps=4", "validation.every=2"
        )
    )
    assert set(modes) == {(True, True), (False, False)}


def test_dropout_acts_in_training_alone():
    torch.manual_seed(0)
    model = NalandaForCausalLM(
        NalandaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_heads=2, dropout=0.5)
    )
    ids = torch.arange(12)[None]
    model.train()
    block, calls = model.model.layers[0], []
    for module in (model.model.dropout, block.dropout):
        module.register_forward_hook(lambda *_: calls.append(1))
    assert not torch.equal(*(model.model(ids, use_cache=False).last_hidden_state for _ in range(2)))
    assert len(calls) == 2 * 3  # embedding, mixer, GLU
    model.eval()
    assert torch.equal(*(model.model(ids, use_cache=False).last_hidden_state for _ in range(2)))


@pytest.mark.slow
@pytest.mark.parametrize("what", ["bad step", "unsound weights"])
def test_states_of_what_is_undone_are_forgotten(recipe, tmp_path, monkeypatch, what):
    config = load_config(recipe)
    prepare(config.data, config.tokenizer, tmp_path / "set")
    settings = [f"data.source={tmp_path / 'set'}", f"tokenizer={tmp_path / 'set' / 'tokenizer'}"]
    settings += [
        "data.long_documents=carry",
        "data.carry_rows=2",
        "train.steps=6",
        "validation.every=0",
        "checkpoint.every=2",
    ]
    forgotten, steps = [], itertools.count(1)
    now, judge, forget = [0], SpikeDetector.judge, CarriedStates.forget

    def noted(self):
        forgotten.append(now[0])
        forget(self)

    monkeypatch.setattr(CarriedStates, "forget", noted)

    def bad(self, value, norm):
        now[0] = next(steps)
        is_bad = what == "bad step" and now[0] == 4
        return judge(self, math.nan if is_bad else value, norm)

    saves = itertools.count(1)

    def unsound(*_):
        return "nan weights" if what == "unsound weights" and next(saves) == 2 else None

    monkeypatch.setattr(SpikeDetector, "judge", bad)
    monkeypatch.setattr(checkpoint.Saver, "unsound", unsound)
    loop.train(configured(recipe, tmp_path / "run", *settings))
    assert forgotten == [4]


def test_validation_has_the_figures_of_each_source(monkeypatch):
    sums = {"web": (20.0, 10), "code": (9.0, 3)}
    monkeypatch.setattr(loss, "loss_sums", lambda model, part, *rest: sums[part[0]])
    monkeypatch.setattr(loss, "count_bytes", lambda batch, *rest: {"web": 40, "code": 6}[batch])
    alone = SimpleNamespace(device="cpu", reduce=lambda table: table)
    model = torch.nn.Linear(1, 1).eval()
    found = loss.validate(
        alone, model, {"web": ["web"], "code": ["code"]}, text_bytes=lambda ids: ids
    )
    assert found == pytest.approx(
        {
            "val_loss": 29 / 13,
            "val_ppl": math.exp(29 / 13),
            "val_tokens": 13,
            "val_bpb": 29 / math.log(2) / 46,
            "val_ppl/web": math.exp(2),
            "val_bpb/web": 20 / math.log(2) / 40,
            "val_ppl/code": math.exp(3),
            "val_bpb/code": 9 / math.log(2) / 6,
        }
    )
    assert model.training
    assert describe_perplexity(found) == (
        "perplexity 9.31 (web 7.39, code 20.09), bits a byte 0.910 (web 0.721, code 2.164)"
    )
