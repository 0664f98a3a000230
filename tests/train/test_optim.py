"""The learning rate as a function of the step, what decays, Muon beside AdamW, and groups."""

import itertools
import math
import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, MambaConfig, MambaForCausalLM

from nalanda import NalandaConfig, NalandaForCausalLM
from nalanda.common.errors import InputError
from nalanda.config.bounds import check_bounds
from nalanda.config.schema import CheckpointConfig, GroupConfig, OptimConfig, ScheduleConfig
from nalanda.model import MIXERS
from nalanda.model.context import Context
from nalanda.model.linear import LinearAttention
from nalanda.testing import in_threads
from nalanda.train import checkpoint, optim
from nalanda.train.optim import (
    build_optimizer,
    describe_groups,
    learning_rate,
    parameter_groups,
    set_rates,
)


@pytest.mark.parametrize(
    ("name", "step", "expected"),
    [
        ("cosine", 1, 0.1),
        ("cosine", 10, 1.0),
        ("cosine", 60, 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 50 / 100))),
        ("cosine", 110, 0.1),
        ("cosine", 500, 0.1),
        ("linear", 60, 0.55),
        ("linear", 110, 0.1),
        ("wsd", 88, 1.0),
        ("wsd", 99, 0.1 + 0.9 * (1 - math.sqrt(0.5))),
        ("wsd", 110, 0.1),
        ("inverse_sqrt", 40, 0.5),
        ("constant", 110, 1.0),
    ],
)
def test_schedules(name, step, expected):
    schedule = ScheduleConfig(name=name, warmup_steps=10, min_lr_ratio=0.1, decay_share=0.2)
    assert learning_rate(step, 110, 2.0, schedule) == pytest.approx(2.0 * expected)


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "inverse_sqrt", "constant"])
@pytest.mark.parametrize("warmup", [0, 1, 20])
def test_schedules_stay_between_zero_and_the_peak(name, warmup):
    schedule = ScheduleConfig(name=name, warmup_steps=warmup, decay_share=0.5)
    rates = [learning_rate(step, 20, 1.0, schedule) for step in range(1, 21)]
    assert all(0 < rate <= 1 for rate in rates)
    assert max(rates) > 0.9


def test_only_matrices_decay():
    model = NalandaForCausalLM(
        NalandaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_heads=2)
    )
    model.model.layers[0].mlp_norm.weight._no_weight_decay = False
    model.lm_head.weight._no_weight_decay = True
    groups = {group["name"]: group for group in parameter_groups(model, OptimConfig())}
    names = {id(p): name for name, p in model.named_parameters()}
    spared = {names[id(p)] for p in groups["vectors"]["params"]}
    assert groups["vectors"]["weight_decay"] == 0
    assert groups["matrices"]["weight_decay"] == 0.1
    assert "lm_head.weight" in spared
    for part in ("A_log", "dt_bias", "norm"):
        assert any(part in name for name in spared)
    for name, p in model.named_parameters():
        assert (name in spared) == (p.ndim < 2 or name == "lm_head.weight"), name


def test_exponents_and_landmarks_do_not_decay(tmp_path):
    """Also where a checkpoint filled them, which replaces the parameters."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_heads": 2}
    for mixer, own in (
        ("pola", ["w", "s"]),
        ("soft", ["landmarks"]),
        ("gated_deltanet", ["A_log"]),
    ):
        NalandaForCausalLM(NalandaConfig(mixer=mixer, **sizes)).save_pretrained(tmp_path / mixer)
        model = NalandaForCausalLM.from_pretrained(tmp_path / mixer)
        matrices = {id(p) for p in parameter_groups(model, OptimConfig())[0]["params"]}
        parameters = dict(model.named_parameters())
        for name in own:
            assert not any(
                id(p) in matrices for n, p in parameters.items() if n.endswith(f".{name}")
            ), name
        assert id(parameters["lm_head.weight"]) in matrices
    mamba = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1))
    logs = [p for n, p in mamba.named_parameters() if n.endswith("A_log")]
    assert logs[0].ndim == 2
    assert id(logs[0]) not in {id(p) for p in parameter_groups(mamba, OptimConfig())[0]["params"]}


def test_the_decay_is_what_adamw_applies():
    model = torch.nn.Linear(4, 4)
    optimizer = build_optimizer(model, OptimConfig(lr=0.1, weight_decay=0.5))
    before = [p.detach().clone() for p in (model.weight, model.bias)]
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    torch.testing.assert_close(model.weight, before[0] * 0.95)
    torch.testing.assert_close(model.bias, before[1])


def small(**more) -> NalandaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_heads": 2}
    return NalandaForCausalLM(NalandaConfig(**sizes | more))


def labels(model: torch.nn.Module, groups: list[dict]) -> dict[str, str]:
    """Each parameter's group, by its name."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)]: group["name"] for group in groups for p in group["params"]}


def fill_gradients(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


def test_muon_takes_the_matrices_between_embedding_and_head():
    for model in (small(), small(tie_word_embeddings=True), small(mixer="soft")):
        for name, kind in labels(model, parameter_groups(model, OptimConfig(name="muon"))).items():
            p = model.get_parameter(name)
            if any(
                layer in name for layer in ("embed_tokens", "lm_head", "conv", "b_proj", "a_proj")
            ):
                assert kind == "matrices", name
            elif p.ndim < 2 or "landmarks" in name:
                assert kind == "vectors", name
            else:
                assert kind.startswith("muon"), name
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=8))
    found = labels(gpt2, parameter_groups(gpt2, OptimConfig(name="muon")))
    assert found["transformer.wpe.weight"] == "matrices"
    assert found["transformer.h.0.attn.c_attn.weight"] == "muon"


@pytest.mark.parametrize(
    ("mixer", "options"),
    [
        *((name, {}) for name in MIXERS),
        ("softmax", {"gate": "head"}),
        ("softmax", {"gate": "channel"}),
    ],
    ids=lambda x: x if isinstance(x, str) else ",".join(x.values()) or "default",
)
def test_muon_leaves_gates_of_the_state_to_adamw(mixer, options):
    model = small(mixer=mixer, mixer_options=options)
    kinds = labels(model, parameter_groups(model, OptimConfig(name="muon")))
    ours = {name.partition(".mixer.")[2]: kind for name, kind in kinds.items() if ".mixer." in name}
    wide = {f"{name}_proj.weight" for name in ("q", "k", "v", "o", "g", "g_up")}
    if "head" in options.values():
        wide.remove("g_proj.weight")
    assert {name for name, kind in ours.items() if kind.startswith("muon")} == wide & ours.keys()


class Gated(LinearAttention):
    """A mixer of one's own, which says nothing of gates."""

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.f_proj = torch.nn.Linear(config.hidden_size, config.num_heads)
        self.wide_proj = torch.nn.Linear(config.hidden_size, config.hidden_size)


def test_muon_leaves_one_row_a_head_to_adamw():
    model = torch.nn.Sequential(Gated(small().config, 0))
    found = labels(model, parameter_groups(model, OptimConfig(name="muon")))
    assert found["0.f_proj.weight"] == "matrices"
    assert found["0.wide_proj.weight"] == "muon"


@pytest.mark.parametrize("mixer", MIXERS)
def test_heads_and_steps_have_orthogonal_updates_of_their_own(mixer):
    """The gradient of all but the first is 10,000 times smaller, and their updates are as large."""
    model = small(mixer=mixer)
    optimizer = build_optimizer(model, OptimConfig(name="muon", lr=1.0, weight_decay=0.0))
    fill_gradients(model, 0)
    layer = model.model.layers[0].mixer
    rows = {"q_proj": layer.K, "k_proj": layer.K, "v_proj": layer.V}
    matrices = {
        name: getattr(layer, name).weight for name in rows if getattr(layer, name, None) is not None
    }
    before = {name: p.detach().clone() for name, p in matrices.items()}
    for name, p in matrices.items():
        p.grad[rows[name] :] *= 1e-4
    optimizer.step()

    for name, p in matrices.items():
        updates = (p.detach() - before[name]).split(rows[name])
        assert len(updates) == len(p) // rows[name] > 1
        for update in updates:
            sizes = torch.linalg.svdvals(update) / (0.2 * max(update.shape) ** 0.5)
            assert 0.7 < sizes.mean() < 1.1
            assert sizes.max() < 1.5


def test_muon_and_adamw_as_one_are_torchs_two():
    config = OptimConfig(name="muon", lr=0.01, muon_lr=0.02, weight_decay=0.1, momentum=0.9)
    ours, theirs = small(num_heads=1), small(num_heads=1)  # whose matrices are not cut by head
    optimizer = build_optimizer(ours, config)
    kinds = labels(theirs, parameter_groups(theirs, config))
    parts = {
        kind: [p for n, p in theirs.named_parameters() if kinds[n] == kind]
        for kind in kinds.values()
    }
    muon = torch.optim.Muon(
        parts["muon"], lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(
        [
            {"params": parts["matrices"], "weight_decay": 0.1},
            {"params": parts["vectors"], "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=config.betas,
        fused=True,
    )
    for step in range(3):
        for model in (ours, theirs):
            fill_gradients(model, step)
        set_rates(optimizer, 0.01)
        for one in (optimizer, muon, adamw):
            one.step()
        optimizer.zero_grad()
        assert all(p.grad is None for p in ours.parameters())
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert ("momentum_buffer" in optimizer.state[a]) == (kinds[name] == "muon")


def test_a_joined_optimizer_is_saved_and_goes_on(tmp_path):
    """By its own state dict, as accelerate does when it wraps one, and by name, as checkpoints do."""
    config = OptimConfig(name="muon", lr=0.01)

    def stepped(model, optimizer, steps):
        for step in steps:
            fill_gradients(model, step)
            optimizer.step()

    whole = small()
    stepped(whole, build_optimizer(whole, config), range(4))
    for way in ("state_dict", "checkpoint"):
        first = small()
        optimizer = build_optimizer(first, config)
        optimizer.load_state_dict(optimizer.state_dict())
        stepped(first, optimizer, range(2))
        second = small()
        resumed = build_optimizer(second, config)
        if way == "checkpoint":
            parts = {"model": first, "optimizer": optimizer, "data_state": {}, "trainer_state": {}}
            path = checkpoint.Saver(tmp_path, CheckpointConfig(asynchronous=False)).save(2, **parts)
            resumed.load_state_dict(resumed.state_dict())
            checkpoint.load(path, model=second, optimizer=resumed)
        else:
            second.load_state_dict(first.state_dict())
            resumed.load_state_dict(optimizer.state_dict())
        stepped(second, resumed, range(2, 4))
        for (name, a), b in zip(whole.named_parameters(), second.named_parameters(), strict=True):
            assert torch.equal(a, b[1]), (way, name)


@pytest.mark.parametrize("processes", [2, 3])
def test_owners_take_the_step_of_one_process(processes, monkeypatch):
    """Of rows cut as FSDP2 cuts them: some do not divide, some are fewer than the processes."""
    torch.manual_seed(0)
    newton = {"ns_coefficients": (3.4445, -4.775, 2.0315), "eps": 1e-7, "ns_steps": 5}
    groups = [newton | {"lr": lr, "weight_decay": 10 * lr} for lr in (0.01, 0.03)]
    whole = [
        (torch.randn(shape), torch.randn(shape).bfloat16(), groups[i % 2])
        for i, shape in enumerate([(7, 13), (2, 24), (24, 12), (12, 24), (1, 5)])
    ]
    collectives = SimpleNamespace(
        get_world_size=lambda context: context.size,
        get_rank=lambda context: context.rank,
        all_to_all_single=lambda out, x, received, sent, group: out.copy_(
            group.exchange(x, sent, received)
        ),
    )
    monkeypatch.setattr(optim, "dist", collectives)

    def run(context: Context) -> list[torch.Tensor]:
        parts = []
        for weight, update, group in whole:
            rows, each = len(weight), -(-len(weight) // processes)
            edges = [min(r * each, rows) for r in range(processes + 1)]
            own = slice(*edges[context.rank : context.rank + 2])
            counts = [end - begin for begin, end in itertools.pairwise(edges)]
            parts.append(optim.Matrix(weight[own].clone(), update[own], counts, group))
        optim.update_by_owner(parts, context)
        return [part.weight for part in parts]

    for (weight, update, group), *rows in zip(whole, *in_threads(processes, run), strict=True):
        step = optim.rms_factor(weight.shape) * optim.orthogonal(update, group).float()
        expected = (1 - group["lr"] * group["weight_decay"]) * weight - group["lr"] * step
        torch.testing.assert_close(torch.cat(rows), expected, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_muon_on_shards_is_muon_in_one_process(tmp_path):
    """FSDP2: each process does its share of the work, and the weights are those of one process to the bit.

    Four processes: all of them share a model, and then two and two do.
    """
    processes = 4
    script = tmp_path / "sharded.py"
    script.write_text(
        textwrap.dedent("""
        import sys
        import torch, torch.distributed as dist
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import DTensor, distribute_tensor
        from torch.utils.flop_counter import FlopCounterMode
        from nalanda.train.optim import Muon

        path, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
        dist.init_process_group(
            "gloo", store=dist.FileStore(path, size), rank=rank, world_size=size
        )

        # Rows that do not divide by the processes, fewer rows than processes, 6 heads, one without gradient.
        SHAPES = [(7, 13), (3, 64), (96, 32), (96, 32), (64, 64), (64, 64), (5, 5)]
        LARGE = [(128, 128)] * 7 + [(128, 384)] * 4 + [(64, 128)] * 3

        def build(shapes):
            torch.manual_seed(0)
            return nn.ParameterList(torch.randn(shape) for shape in shapes)

        def optimizer(model):
            heads = [p for p in model if p.shape == (96, 32)]
            others = [p for p in model if p.shape != (96, 32)]
            groups = [{"params": others}, {"params": heads, "blocks": 6, "lr": 0.02}]
            return Muon([group for group in groups if group["params"]], lr=0.01, weight_decay=0.1)

        def stepped(model, optimizer, step):
            torch.manual_seed(1 + step)
            for i, p in enumerate(model):
                grad = torch.randn(p.shape)
                if i == 6:
                    continue
                p.grad = grad if not isinstance(p, DTensor) else distribute_tensor(
                    grad, p.device_mesh, p.placements, src_data_rank=None)
            with FlopCounterMode(display=False) as counter:
                optimizer.step()
            return counter.get_total_flops()

        meshes = {
            "shards": init_device_mesh("cpu", (size,)),
            "hybrid": init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")),
        }
        for name, mesh in meshes.items():
            for shapes in (SHAPES, LARGE):
                whole, sharded = build(shapes), build(shapes)
                fully_shard(sharded, mesh=mesh)
                alone, together = optimizer(whole), optimizer(sharded)
                for step in range(3):
                    work = stepped(whole, alone, step)
                    share = stepped(sharded, together, step)
                for i, (a, b) in enumerate(zip(whole, sharded)):
                    assert torch.equal(a, b.full_tensor()), (name, i)
                    for key, value in together.state[b].items():
                        assert isinstance(value, DTensor), key
                        assert torch.equal(alone.state[a][key], value.full_tensor()), (name, i)
                even = work / mesh.size(mesh.ndim - 1)
                if shapes is LARGE:
                    assert 0.8 * even < share < 1.2 * even, (name, share / even)
        dist.destroy_process_group()
        """)
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(script), str(tmp_path / "store")]
    options = {"env": environment, "stderr": subprocess.PIPE, "text": True}
    running = [
        subprocess.Popen([*command, str(rank), str(processes)], **options)
        for rank in range(processes)
    ]
    for process in running:
        errors = process.communicate(timeout=600)[1]
        assert process.returncode == 0, errors[-3000:]


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_owners_of_muons_matrices_have_equal_work(processes):
    """24 layers of width 1024 with 16 heads."""
    heads, mlp = [(64, 1024)] * 48, [(1024, 1024)] * 2 + [(2816, 1024)] * 2 + [(1024, 2816)]

    def block(shape, first):
        rows, columns = shape
        if rows == 64:  # within one process's rows of [1024, 1024]
            counts = [64 * (r == first * processes // 16) for r in range(processes)]
        else:
            counts = [rows // processes] * processes
        return optim.Matrix(torch.empty(0, columns), torch.empty(0, columns), counts, {})

    blocks = [block(shape, i % 16) for _ in range(24) for i, shape in enumerate(heads + mlp)]
    owned = optim.share_out(blocks, processes)
    assert sorted(id(b) for part in owned for b in part) == sorted(map(id, blocks))
    work = [
        sum(min(b.shape) ** 2 * (2 * max(b.shape) + min(b.shape)) for b in part) for part in owned
    ]
    assert max(work) < 1.05 * sum(work) / processes
    # A head stays where its rows are.
    assert all(b.counts[r] == 64 for r, part in enumerate(owned) for b in part if b.shape[0] == 64)


def test_groups_scale_the_rate_and_set_the_decay():
    model = small()
    config = OptimConfig(
        name="muon",
        groups=[
            GroupConfig("embed_tokens", lr_scale=0.5, weight_decay=0.0),
            GroupConfig(r"mlp|embed", lr_scale=2.0),
            GroupConfig("A_log|dt_bias", lr_scale=0.1, weight_decay=0.3),
        ],
    )
    groups = parameter_groups(model, config)
    values = {g["name"]: (g["lr_scale"], g["weight_decay"]) for g in groups}
    found = {name: values[label] for name, label in labels(model, groups).items()}
    assert found["model.embed_tokens.weight"] == (0.5, 0.0)  # the first that fits
    assert found["model.layers.0.mlp.up_proj.weight"] == (2.0, 0.1)
    assert found["model.layers.0.mlp_norm.weight"] == (2.0, 0.0)
    assert next(value for name, value in found.items() if name.endswith("A_log")) == (0.1, 0.3)
    assert found["lm_head.weight"] == (1.0, 0.1)
    assert len(found) == sum(len(g["params"]) for g in groups)
    text = describe_groups(build_optimizer(model, config).param_groups)
    assert "embed_tokens matrices 2,048 decay 0 lr × 0.5" in text
    assert "lr × 1" not in text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"groups": [GroupConfig("embed_token5")]},
            r"matches no parameter; did you mean embed_tokens\?",
        ),
        (
            {"groups": [GroupConfig("mlp"), GroupConfig("up_proj")]},
            "'up_proj' matches no parameter; earlier patterns",
        ),
    ],
)
def test_patterns_without_parameters_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        parameter_groups(small(), OptimConfig(**settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"groups": [GroupConfig("mlp"), GroupConfig("(")]},
            r"optim.groups\[1\].match: '\(' is not a regular",
        ),
        (
            {"groups": [GroupConfig("mlp", lr_scale=-1)]},
            r"optim.groups\[0\].lr_scale: expected 0 or more",
        ),
        (
            {"groups": [GroupConfig("mlp", weight_decay=-1)]},
            r"optim.groups\[0\].weight_decay: expected 0",
        ),
        ({"momentum": 1.0}, r"optim.momentum: expected a number in \[0, 1\)"),
        ({"muon_lr": 0.1}, "optim.muon_lr: only Muon has it"),
        ({"name": "muon", "muon_lr": 0.0}, "optim.muon_lr: expected a positive number"),
    ],
)
def test_settings_are_checked(settings, message):
    config = OptimConfig(**settings)

    def check() -> None:
        check_bounds(config, "optim")
        config.check()

    with pytest.raises(InputError, match=message) as caught:
        check()
    assert "\n" not in str(caught.value)
