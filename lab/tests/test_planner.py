"""Predictions of steps on many devices: hand-computed costs, and what holds for all."""

import re
from dataclasses import replace

import pytest
from nalanda_lab.commands import main
from nalanda_lab.planner import (
    Cluster,
    Counts,
    Split,
    clusters,
    count,
    plan,
    predict,
    tensor_parallelism,
)

from nalanda.common.errors import InputError
from nalanda.model.ops import delta_rule_flops

COUNTS = Counts(
    seq_len=1000,
    steps=100,
    rows=64,
    micro=2,
    parameters=10**9,
    matrices=8 * 10**8,
    wire=2,
    layers=10,
    hidden_size=2048,
    flops=2e9,
    held=lambda processes, shards, more: (16 // shards + 4 * (more and shards > 1)) * 10**9,
    kept=lambda tokens, again: 1e6 * tokens,
    passing=3e8,
    transitions=10**6,
    states=2 * 10**6,
    halos=10**5,
    state_messages=10,
    halo_messages=10,
)
SIMPLE = Cluster(
    2, peak=1, mfu=0.5, memory=100, hbm=1000, nvlink=10, network=8, latency=0, overlap=0
)
ATTENTION = replace(COUNTS, attention=1e9, keys=100, key_messages=2, growing=2)
TINY = [
    *(
        "model.hidden_size=64",
        "model.num_heads=2",
        "model.vocab_size=128",
        "model.intermediate_size=128",
    ),
    *("data.seq_len=128", "train.tokens_per_step=1024", "train.micro_batch_size=1"),
]


def test_ddp_by_hand():
    """6·2e9/… FLOPs at 0.5e12 a second; 4e9 bytes of gradients as a ring of two at 10e9 bytes a second."""
    cost = predict(COUNTS, SIMPLE, Split(micro=2))
    compute, reduced, update = 3 * 2e9 * 32_000 / 0.5e12, 2 * 4e9 / 2 / 10e9, 28e9 / 1e12
    assert cost.compute == pytest.approx(compute)
    assert cost.step == pytest.approx(compute + reduced + update)
    assert (cost.sent, cost.crossing, cost.accumulation) == (4e9, 0, 16)
    assert cost.idle == pytest.approx(reduced / cost.step)
    assert cost.mfu == pytest.approx(0.5 * compute / cost.step)
    hidden = predict(
        COUNTS, replace(SIMPLE, overlap=1), Split(micro=2)
    )  # behind 2/3 of a micro-batch
    assert hidden.step == pytest.approx(cost.step - reduced)
    slow = predict(
        COUNTS, replace(SIMPLE, devices=16, network=0.8), Split(micro=2)
    )  # two nodes, 0.1 GB/s
    assert slow.sent == slow.crossing == pytest.approx(2 * 15 / 16 * 4e9)
    assert slow.step == pytest.approx(compute / 8 + slow.sent / 0.1e9 + update)


def test_fsdp_by_hand():
    cost = predict(COUNTS, SIMPLE, Split("fsdp", micro=2))
    root, blocks, reduced = (count / 2 for count in (4 * 2e8, 2 * 8e8, 4e9))
    assert cost.sent == pytest.approx(16 * (root + 2 * blocks) + reduced)
    compute, update = 3 * 2e9 * 32_000 / 0.5e12, 28e9 / 2 / 1e12
    assert cost.step == pytest.approx(compute + cost.sent / 10e9 + update)
    # Gradients stay whole until the last micro-batch.
    assert cost.memory == 16e9 / 2 + 1e6 * 2000 + 4e9
    hidden = predict(COUNTS, replace(SIMPLE, overlap=1), Split("fsdp", micro=2))
    assert hidden.step == pytest.approx(compute + 16 * (root + blocks / 10) / 10e9 + update)


def test_hybrid_crosses_nodes_with_gradients_only():
    cluster = replace(SIMPLE, devices=16)
    fsdp, hybrid = (predict(COUNTS, cluster, Split(kind)) for kind in ("fsdp", "hybrid"))
    assert hybrid.crossing == pytest.approx(
        8 * 2 * 4e9 / 8 / 2
    )  # each of 8 shards, among two nodes
    assert fsdp.crossing == pytest.approx(15 / 16 * (4 * (4 * 2e8 + 2 * 2 * 8e8) + 4e9))


def test_cut_rows_by_hand():
    none = replace(COUNTS, parameters=0, matrices=0)
    two = predict(none, SIMPLE, Split(context=2))
    update, micro = 0, 3 * 500 * 2e9 / 0.5e12  # no part has a second pass
    exchanged = 2 * (2e6 + 1e5)  # U and the halo, forward and backward
    assert two.sent == pytest.approx(64 * exchanged)
    assert two.step == pytest.approx(64 * (micro + exchanged / 10e9) + update)
    assert two.idle == pytest.approx(1 - 64 * micro / two.step)
    eight = replace(SIMPLE, devices=8)
    four = predict(none, replace(SIMPLE, devices=4), Split(context=4))
    assert four.sent == pytest.approx(64 * 2 * 3 * (1e6 + 2e6 + 1e5))  # an all-gather of M and U
    assert predict(none, eight, Split(context=4)).sent == pytest.approx(four.sent / 2)
    many = replace(none, seq_len=1600)
    scanned = predict(many, replace(SIMPLE, devices=16, node=16), Split(context=16))
    assert scanned.sent == pytest.approx(64 * 2 * (4 * 3e6 + 2e6 + 15 * 1e5))  # four rounds, then U
    # Of nodes of 4, one device sends to another node in the first round and in each ring, two in the second
    # round, all in the others.
    nodes = predict(many, replace(SIMPLE, devices=16, node=4), Split(context=16))
    assert nodes.crossing == pytest.approx(64 * 2 * ((1 + 2 + 4 + 4) * 3e6 + 2e6 + 15 * 1e5))


def test_softmax_over_parts_is_imbalanced():
    """Of two parts the last one attends with three quarters of the pairs."""
    whole = predict(ATTENTION, replace(SIMPLE, devices=1), Split())
    cut = predict(ATTENTION, SIMPLE, Split(context=2))
    share = (1e9 / 2 + 3 / 4 * 1e9) / 2e9
    assert cut.compute == pytest.approx(share * whole.compute)
    mean = (1e9 + (1 / 4 + 3 / 4) * 1e9) / 2 / 2e9  # a quarter of the pairs in the first part
    assert cut.step * (1 - cut.idle) == pytest.approx(mean * whole.compute + 28e9 / 1e12)
    assert cut.memory == 16e9 + 500e6 + 100 / 1 * 500  # the rest of a row's keys and values
    recomputed = predict(ATTENTION, SIMPLE, Split(context=2, recompute=True))
    assert recomputed.memory == 16e9 + 500e6 + 100 / 2 * 500  # of one layer
    assert recomputed.compute == pytest.approx(4 / 3 * cut.compute)
    keys = 100 * 1000 / 2
    assert recomputed.sent - cut.sent == pytest.approx(64 * (2e6 + 1e5 + keys))


@pytest.mark.parametrize("counts", [COUNTS, ATTENTION], ids=["recurrent", "hybrid"])
@pytest.mark.parametrize("devices", [8, 64])
def test_what_holds_for_all(counts, devices):
    base = Cluster(devices, overlap=0.9)
    splits = [
        Split(kind, context, 1, again)
        for kind in ("ddp", "fsdp", "hybrid")
        for context in (1, 4, 8)
        for again in (False, True)
    ]
    for split in splits:
        cost = predict(counts, base, split)
        assert 0 <= cost.idle < 1
        assert cost.compute < cost.step
        assert 0 < cost.mfu < base.mfu
        for name in ("nvlink", "network", "mfu", "overlap", "hbm"):
            better = predict(counts, replace(base, **{name: 1.1 * getattr(base, name)}), split)
            assert better.step <= cost.step, name
        assert predict(counts, replace(base, latency=0), split).step < cost.step
        if split.kind == "fsdp":
            assert cost.memory < predict(counts, base, replace(split, kind="ddp")).memory


def test_the_plan_has_the_fastest_that_fits():
    small = replace(COUNTS, kept=lambda tokens, recompute: (1e7 if recompute else 4e7) * tokens)
    found = plan(small, Cluster(8, memory=60))
    names = [str(cost.split) for cost in found]
    assert names[:2] == ["DDP", "FSDP2"]
    assert "× context" in names[2]
    assert found[0].split.recompute  # 40 GB of activations do not fit beside 16
    assert not plan(small, Cluster(8, memory=20))[0].fits
    # 64 rows do not fill 128 processes unless they are cut.
    assert [str(cost.split).split(" ×")[1] for cost in plan(small, Cluster(128))] == [" context 2"]


def test_tensor_parallelism_by_hand():
    found = tensor_parallelism(COUNTS, Cluster(8))
    assert found["tokens"] == pytest.approx(8 / 450e9 * 0.4 * 989e12 / 6)
    reduced = 10 * 4 * 2 * 7 / 8 * 2 * 2048 / 450e9
    assert found["activations"] == pytest.approx(reduced / (3 * 2e9 / 8 / (0.4 * 989e12)))
    assert tensor_parallelism(COUNTS, Cluster(64))["parameters"] > found["parameters"] > 1e10


def test_counts_of_a_recipe():
    """Gated DeltaNet in three layers of four: M is F × F, U is F × V, 4 bytes each; K and V of two bytes."""
    c = count("hybrid_340m", [])
    deltas, HV, F, V = 18, 12, 128, 128
    assert c.transitions == deltas * 4 * HV * F * F
    assert c.states == deltas * 4 * HV * F * V
    assert c.halos == deltas * 2 * 3 * (2 * 6 * F + HV * V)
    assert (c.keys, c.growing, c.key_messages) == (6 * 2 * 2 * (128 + 128), 6, 12)
    assert c.attention == 6 * 2 * 8 * (128 + 128) * 2048 / 2
    assert c.rows == 256
    assert c.held(1, 1, True) == 16 * c.parameters
    assert c.held(8, 8, True) - c.held(8, 8, False) == 4 * c.parameters  # FSDP2's whole gradients
    linear = count("gla_340m", [])
    assert linear.transitions == 24 * 4 * 4 * 128  # the decay
    assert linear.passing == 24 * 2 * 4 * 128 * 256
    read = 2 * 8 * F * V
    kda, steps = count("kda_340m", []), count("delta_product_340m", [])
    assert kda.passing == pytest.approx(24 * (read + delta_rule_flops(8, F, F, channels=True)))
    assert steps.passing == pytest.approx(
        24 * 2 * (read + delta_rule_flops(8, F, F))
    )  # two steps a token


def test_printed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    main(["plan", "demo", *TINY, "--devices", "2,16", "--cluster", "latency=0"])
    out = capsys.readouterr().out
    assert out.count("← best") == 2
    assert (
        len(
            re.findall(r"^\d+ devices: 512 steps take \d+ s; tensor parallelism", out, re.MULTILINE)
        )
        == 2
    )
    main(["plan", "demo", *TINY, "--devices", "2", "--json"])
    assert '"devices": 2' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("8,x", ""), "--devices: 'x' is no number"),
        (("0", ""), "--devices: '0' is no number"),
        (("12", ""), "--devices: 12 devices do not fill nodes of 8"),
        (("8", "mfo=0.3"), "--cluster: no setting 'mfo'; did you mean mfu"),
        (("8", "mfu=fast"), "--cluster: 'mfu=fast': expected a share from 0 to 1"),
        (("8", "mfu=40"), "--cluster: 'mfu=40': expected a share from 0 to 1"),
        (("8", "network=inf"), "--cluster: 'network=inf': expected a positive number"),
        (("8", "node=0"), "--cluster: 'node=0': expected"),
    ],
)
def test_bad_input(options, message, capsys):
    with pytest.raises(InputError, match=message):
        clusters(*options)
    with pytest.raises(SystemExit) as stop:
        main(["plan", "demo", *TINY, "--devices", options[0], "--cluster", options[1]])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_foreign_models_are_refused():
    with pytest.raises(InputError, match="--devices: counts Nalanda's own models only"):
        count("mamba_340m", [])
