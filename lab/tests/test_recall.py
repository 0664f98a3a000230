"""`nalanda-lab recall`: tasks and their splits, equal parameters and states, what a sweep leaves."""

import dataclasses
import itertools
import json
import random
import subprocess
import sys

import pytest
import torch
from nalanda_lab import commands
from nalanda_lab import recall as recall_module
from nalanda_lab.equal import (
    CLOSE,
    FAR,
    MODEL,
    configured,
    count,
    grows,
    models,
    most_parameters,
    parse,
    with_parameters,
    with_state,
)
from nalanda_lab.recall import (
    EVERY,
    QUICK,
    Training,
    describe_recall,
    fixed_batches,
    override,
    plan_recall,
    recall,
    recall_jobs,
    run_recall,
)
from nalanda_lab.sweep import follow
from nalanda_lab.synthetic import (
    IGNORED,
    LISTOPS_TOKENS,
    MQAR,
    SPLITS,
    TASKS,
    Copying,
    ListOps,
    Needles,
    StateTracking,
    cayley,
    generators,
    hash_rows,
)
from typer.testing import CliRunner

from nalanda.common.errors import InputError
from nalanda.model import MIXERS, NalandaForCausalLM

SMALL = [*QUICK.values()]
BY_NAME = pytest.mark.parametrize("task", SMALL, ids=lambda task: task.name)
TINY = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_heads": 1,
    "head_dim": 8,
    "intermediate_size": 16,
}
TINY_MQAR = MQAR(pairs=(2,), sequence=8, values=4)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def rows_of(task, split, case, n=40, seed=0):
    inputs, labels = task.batch(generator(seed), n, split, case)
    return inputs, labels, labels != IGNORED


# ------------------------------ tasks


@BY_NAME
def test_batches_have_their_shape_and_ask_something(task):
    for split, case in itertools.product(SPLITS, task.cases):
        inputs, labels, asked = rows_of(task, split, case)
        assert inputs.shape[:2] == labels.shape
        assert inputs.shape[1] <= task.length(case)
        assert bool(asked.any(1).all())
        assert inputs.dtype == labels.dtype == torch.int64
        assert 0 <= int(inputs.min()) <= int(inputs.max()) < task.vocab_size
        assert 0 <= int(labels[asked].min()) <= int(labels[asked].max()) < task.vocab_size


@BY_NAME
def test_data_follow_from_the_seed(task):
    def first(seed):
        return [
            tensor
            for batch in itertools.islice(task.batches(seed, 8, "train"), 3)
            for tensor in batch
        ]

    for a, b in zip(first(1), first(1), strict=True):
        assert torch.equal(a, b)
    assert not all(torch.equal(a, b) for a, b in zip(first(1)[::2], first(2)[::2], strict=True))


@pytest.mark.parametrize(
    "task",
    [
        StateTracking("parity", "Z2", trained_length=1),
        StateTracking("s3", "S3", trained_length=2),
        Copying(lengths=(1,), longer=(), symbols=4),
        ListOps(bands=((4, 5),)),
    ],
    ids=lambda task: task.name,
)
def test_a_split_that_cannot_be_filled_is_said(task):
    def fill():
        for split in SPLITS:
            rows_of(task, split, task.trained[0])

    with pytest.raises(
        InputError, match=f"{task.name}: too few different instances for a .* split; take la"
    ):
        fill()


def test_mqar_asks_each_key_once_and_its_value():
    task = MQAR(pairs=(3, 5), sequence=40, values=9)
    for case in task.pairs:
        inputs, labels, asked = rows_of(task, "train", case)
        assert bool((asked.sum(1) == case).all())
        for row, answers, where in zip(inputs.tolist(), labels.tolist(), asked, strict=True):
            told = dict(zip(row[: 2 * case : 2], row[1 : 2 * case : 2], strict=True))
            assert len(told) == len(set(told.values())) == case  # no key or value twice
            assert all(1 <= key <= 9 < value <= 18 for key, value in told.items())
            places = where.nonzero().flatten().tolist()
            assert {row[place]: answers[place] for place in places} == told
            assert all(place >= 2 * case for place in places)
            assert sum(map(bool, row[2 * case :])) == case  # all else is blank


def test_mqar_gaps_follow_the_power_law():
    """With one pair the gap's density is that of the law itself: ∝ 1/gap for a power of 0."""
    task = MQAR(pairs=(1,), sequence=14, values=500, power=0.0)
    where = rows_of(task, "train", 1, n=4000)[2].double().argmax(1)
    shares = torch.bincount((where - 2) // 2, minlength=6) / len(where)
    law = 1 / torch.arange(1.0, 7)
    torch.testing.assert_close(shares, law / law.sum(), atol=0.03, rtol=0)


def test_needles_are_scattered_in_noise_and_all_are_asked():
    task = Needles(keys=(1, 5), sequence=30, values=7)
    for case in task.keys:
        inputs, labels, asked = rows_of(task, "train", case)
        assert torch.equal(asked, torch.arange(30).expand(40, -1) >= 30 - case)
        for row, answers in zip(inputs.tolist(), labels.tolist(), strict=True):
            hay = row[: 30 - case]
            told = {key: value for key, value in itertools.pairwise(hay) if key < 7}
            assert len(told) == len(set(told.values())) == case
            assert all(7 <= value < 14 for value in told.values())
            assert sum(symbol >= 14 for symbol in hay) == 30 - 3 * case  # all else is noise
            assert dict(zip(row[30 - case :], answers[30 - case :], strict=True)) == told
    places = {row.index(min(row)) for row in rows_of(task, "train", 1, n=900)[0][:, :-1].tolist()}
    assert places == set(range(0, 28, 2))


def test_copying_repeats_what_stood_before_the_separator():
    inputs, labels, asked = rows_of(Copying(symbols=5), "train", 8)
    assert torch.equal(asked, torch.arange(16).expand(40, -1) >= 8)
    assert torch.equal(labels[:, 8:], inputs[:, :8])
    assert bool((inputs[:, 8] == 5).all())
    assert torch.equal(inputs[:, 9:], inputs[:, :7])  # the answer itself is no input


@pytest.mark.parametrize("name", ["parity", "modular", "s3", "a5", "s5"])
def test_states_are_the_running_products(name):
    task = TASKS[name]
    inputs, labels, asked = rows_of(task, "train", task.trained_length)
    assert bool(asked.all())
    for row, answers in zip(inputs.tolist(), labels.tolist(), strict=True):
        if name in ("s3", "a5", "s5"):
            things = int(name[1])
            permutations = list(itertools.permutations(range(things)))
            if name == "a5":  # even: the determinants of their matrices are 1
                permutations = [p for p in permutations if torch.eye(5)[list(p)].det() > 0]
            arranged = list(
                range(things)
            )  # what each permutation does, one after another, to the things
            for element, answer in zip(row, answers, strict=True):
                arranged = [permutations[element][thing] for thing in arranged]
                assert permutations[answer] == tuple(arranged)
        else:
            modulus = {"parity": 2, "modular": 5}[name]
            assert answers == [total % modulus for total in itertools.accumulate(row)]
    for case in task.cases:  # tests ask behind what decides the split only
        _, _, asked = rows_of(task, "test", case)
        assert torch.equal(asked.any(0), torch.arange(case) >= max(case, task.trained_length) // 2)


def test_the_cayley_table_is_a_group():
    for group, order in (("Z7", 7), ("S3", 6), ("A5", 60), ("S5", 120)):
        table = cayley(group)
        assert table.shape == (order, order)
        everything = torch.arange(order)
        assert torch.equal(table.sort(0).values, everything[:, None].expand(-1, order))
        assert torch.equal(table.sort(1).values, everything.expand(order, -1))
        assert torch.equal(table[table], table[:, table])  # (a·b)·c = a·(b·c)
    assert not torch.equal(cayley("S3"), cayley("S3").T)


@pytest.mark.parametrize("group", ["Z5", "S3", "S5", "A4", "A5"])
def test_generators_make_the_group_and_are_most_elements_of_shorter_words_alone(group):
    few, table = generators(group), cayley(group)
    made = {0}
    while len(more := made | {int(table[a, b]) for a in made for b in few}) > len(made):
        made = more
    assert len(made) == len(table)
    assert len(few) < len(table) - 1

    task = StateTracking("mixed", group, trained_length=32, shorter=(16,))
    for split, case in (("test", 64), ("validation", 32), ("train", 32)):
        plain = dataclasses.replace(task, shorter=())
        assert all(map(torch.equal, rows_of(task, split, case), rows_of(plain, split, case)))
    inputs, labels, _ = rows_of(task, "train", 16, n=400)
    running = itertools.accumulate(inputs.unbind(1), lambda a, b: table[a, b])
    assert torch.equal(labels, torch.stack([*running], 1))
    share = torch.isin(inputs, torch.tensor(few)).double()
    expected = 1 - (1 - len(few) / len(table)) / 3  # the mean of a square on [0, 1]
    assert share.mean().item() == pytest.approx(expected, abs=0.05)
    assert share.mean(1).std() > 1.5 * (expected * (1 - expected) / 16) ** 0.5  # words differ


def test_a_curriculum_takes_the_trained_cases_in_turn():
    task = StateTracking("s3", "S3", trained_length=16, shorter=(4, 8))
    found = [*itertools.islice(task.batches(0, 8, "train", curriculum=6), 7)]
    assert [tuple(inputs.shape) for inputs, _ in found] == 2 * [(8, 4)] + 2 * [(4, 8)] + 3 * [
        (2, 16)
    ]
    table = cayley("S3")
    for inputs, labels in found:
        assert torch.equal(table[labels[:, :-1], inputs[:, 1:]], labels[:, 1:])
    mixed = {inputs.shape for inputs, _ in itertools.islice(task.batches(0, 8, "train"), 12)}
    assert mixed == {(8, 4), (8, 8), (8, 16)}

    record = run_recall(
        TINY | parse("deltanet", "silu"),
        task,
        0,
        Training(steps=3, batch_size=4, rows=4, curriculum=True),
    )
    assert record["cases"] == [16, 32, 64]


def test_models_of_one_seed_share_the_weights_that_both_have():
    def weights(mixer, seed=3):
        config = configured(TINY | parse(mixer, "identity"), 120)
        return dict(recall_module.seeded_model(config, seed).named_parameters())

    one, two = weights("delta_product:num_householder=4"), weights("deltanet:allow_neg_eigval=true")
    shared = {name for name in one.keys() & two.keys() if one[name].shape == two[name].shape}
    assert (
        len(one.keys() - shared) == 6
    )  # of four steps: k and v, their convolutions, β; and the gate
    assert all(torch.equal(one[name], two[name]) for name in shared)
    other = weights("deltanet", seed=4)
    assert not any(torch.equal(two[name], other[name]) for name in shared if two[name].ndim > 1)
    assert not torch.equal(one["lm_head.weight"], one["model.embed_tokens.weight"])


def value_of(tokens):
    """By rewriting: the last operator's arguments are digits."""
    tokens = list(tokens)
    while len(tokens) > 1:
        start = max(i for i, token in enumerate(tokens) if token.startswith("["))
        end = tokens.index("]", start)
        digits = sorted(int(token) for token in tokens[start + 1 : end])
        n = len(digits)
        assert 2 <= n <= 10
        value = {
            "[MIN": digits[0],
            "[MAX": digits[-1],
            "[SM": sum(digits) % 10,
            "[MED": int((digits[n // 2] + digits[~(n // 2)]) / 2),
        }[tokens[start]]
        tokens[start : end + 1] = [str(value)]
    return int(tokens[0])


@pytest.mark.parametrize(
    "task", [TASKS["listops"], TASKS["listops_lra"]], ids=lambda task: task.name
)
def test_listops_are_as_published_and_their_values_right(task):
    deepest = 0
    for low, high in task.bands:
        inputs, labels, asked = rows_of(task, "train", (low, high), n=12)
        for row, answers, where in zip(inputs.tolist(), labels.tolist(), asked, strict=True):
            tokens = [LISTOPS_TOKENS[i] for i in row]
            length = tokens.index("pad") if "pad" in tokens else len(tokens)
            assert low < length < high
            assert set(tokens[length:]) <= {"pad"}
            assert where.nonzero().flatten().tolist() == [length - 1]  # padding is not asked
            assert answers[length - 1] == value_of(tokens[:length])
            steps = [(t[0] == "[") - (t == "]") for t in tokens[:length]]
            deepest = max(deepest, *itertools.accumulate(steps))
    assert deepest <= task.max_depth - 1  # the deepest nodes are digits
    if task.name == "listops_lra":
        assert task.bands == ((500, 2000),)
        assert deepest == 9


def test_listops_nodes_are_operators_with_the_published_probability():
    task, draw = ListOps(), random.Random(0)
    nodes = [task.expression(draw, 1, 10**6)[0] for _ in range(2000)]
    assert sum(len(node) > 1 for node in nodes) / 2000 == pytest.approx(0.25, abs=0.03)


def told(task, inputs):
    """The part of an instance that its answers come from, as the docstrings of the tasks name it."""
    rows = inputs.flatten(1).tolist()
    if isinstance(task, MQAR):
        blank = [row.index(0) if 0 in row else len(row) for row in rows]
        return [tuple(row[: end - end % 2]) for row, end in zip(rows, blank, strict=True)]
    if isinstance(task, Needles):
        return [tuple(symbol for symbol in row[:-2] if symbol < 8) for row in rows]
    if isinstance(task, Copying):
        return [tuple(row[: len(row) // 2]) for row in rows]
    if isinstance(task, StateTracking):
        return [tuple(row[: task.trained_length // 2]) for row in rows]
    return [tuple(row) for row in rows]


@pytest.mark.parametrize(
    "task",
    [
        MQAR(pairs=(2,), sequence=8, values=4),
        Needles(keys=(2,), sequence=8, values=4),
        Copying(lengths=(3,), longer=(), symbols=6),
        StateTracking("parity", "Z2", trained_length=12, times=(1, 2)),
        ListOps(bands=((3, 5),)),
    ],
    ids=lambda task: task.name,
)
def test_no_instance_is_in_two_splits(task):
    """These are so small that every instance comes up: each belongs to one split, and none is without."""
    n = 100 if isinstance(task, ListOps) else 1500
    found = {split: {*told(task, rows_of(task, split, task.cases[-1], n)[0])} for split in SPLITS}
    assert not found["train"] & found["test"]
    assert not found["validation"] & (found["train"] | found["test"])
    everything = set().union(*found.values())
    share = {split: len(found[split]) / len(everything) for split in SPLITS}
    assert share["train"] > share["test"] > 0.02
    assert share["validation"] > 0.02
    expected = {"mqar": 144, "needles": 144, "copying": 216, "parity": 64}
    assert len(everything) == expected.get(task.name, len(everything))


def test_hashes_spread_evenly():
    for rows in (torch.arange(8000)[:, None], torch.randint(2, (8000, 24), generator=generator())):
        shares = torch.bincount(hash_rows(rows), minlength=8) / 8000
        torch.testing.assert_close(shares, torch.full((8,), 1 / 8), atol=0.02, rtol=0)


# ------------------------------ one run


def test_a_trivial_task_is_learnt_and_nothing_is_without_labels_or_mixer(monkeypatch):
    """Two pairs of four: a linear state holds them. Labels that are shuffled, or a mixer that gives nothing,
    leave no more than chance, so that the answer cannot come from anywhere else."""
    model = {**MODEL, **parse("deltanet", "silu"), "hidden_size": 32, "num_hidden_layers": 1}
    training = Training(steps=150, batch_size=32, lr=1e-2, rows=128, points=2)
    assert run_recall(model, TINY_MQAR, 0, training)["score"] > 0.9

    batch = MQAR.batch

    def shuffled(self, draw, n, split, case):
        inputs, labels = batch(self, draw, n, split, case)
        asked = labels != IGNORED
        values = torch.randint(
            1 + self.values, 1 + 2 * self.values, (int(asked.sum()),), generator=draw
        )
        return inputs, labels.masked_scatter(asked, values)

    short = dataclasses.replace(training, steps=60)
    with monkeypatch.context() as patch:
        patch.setattr(MQAR, "batch", shuffled)
        assert run_recall(model, TINY_MQAR, 0, short)["score"] < 0.4
    with monkeypatch.context() as patch:
        patch.setattr(MIXERS["deltanet"], "read_out", lambda self, o, heads, x: torch.zeros_like(x))
        assert run_recall(model, TINY_MQAR, 0, short)["score"] < 0.4


@BY_NAME
def test_every_task_trains_and_its_record_is_json(task):
    training = Training(steps=2, batch_size=4, rows=4, points=1)
    before = torch.random.get_rng_state()
    record = run_recall(TINY | parse("deltanet", "silu"), task, 0, training)
    assert torch.equal(before, torch.random.get_rng_state())
    assert json.loads(json.dumps(record)) == record
    assert len(record["scores"]) == len(record["cases"]) == len(task.cases)
    assert record["curve"][-1][0] == 2
    assert record["settings"]["task"]["name"] == task.name
    again = run_recall(TINY | parse("deltanet", "silu"), task, 0, training)
    assert again | {"seconds": 0} == record | {"seconds": 0}
    assert record["curve"][-1][2] == record["validation"]  # never of the test, which is to judge
    answers = [labels[labels != IGNORED].tolist() for _, labels in fixed_batches(task, 4, "test")]
    assert record["chance"] == [max(map(a.count, a)) / len(a) for a in answers]


def test_dropout_follows_from_the_seed():
    training, before = (
        Training(steps=4, batch_size=4, rows=4, points=1),
        torch.random.get_rng_state(),
    )
    model = TINY | parse("deltanet", "silu") | {"dropout": 0.3}
    first, again = (run_recall(model, TINY_MQAR, 0, training) for _ in range(2))
    assert first["curve"] == again["curve"]
    assert run_recall(model | {"dropout": 0.0}, TINY_MQAR, 0, training)["curve"] != first["curve"]
    assert torch.equal(before, torch.random.get_rng_state())


# ------------------------------ equal parameters, equal state


def test_parameters_are_equal_and_states_as_nearly_as_head_sizes_allow():
    candidates, refused = models(
        [*MIXERS, "deltanet:allow_neg_eigval=true"], ["own", "nala"], MODEL
    )
    trials, notes = plan_recall([QUICK["mqar"]], candidates, MODEL, "both", [3000, 16384])
    most = most_parameters(MODEL)
    for trial in trials:
        config = configured(trial.model, trial.task.vocab_size)
        assert abs(count(trial.model) / most - 1) < CLOSE
        if trial.match.startswith("state") and not grows(config):
            wanted = {"state 2.9 KiB": 3000, "state 16.0 KiB": 16384}[trial.match]
            assert abs(config.state_bytes(1, torch.float32) / wanted - 1) <= FAR
    names = {trial.name for trial in trials}
    assert {"deltanet(allow_neg_eigval) + silu", "deltanet + nala", "softmax", "retention"} <= names
    assert any("pola is left out with nala" in line for line in refused)
    assert any(
        "left out at equal state 2.9 KiB" in line and "diag_attention" in line for line in notes
    )
    assert any(trial.name == "diag_attention" for trial in trials)
    with pytest.raises(InputError, match="more parameters"):
        with_parameters(MODEL | parse("gla", None), 1000)


def test_the_record_counts_the_model_that_was_matched():
    task = Copying(lengths=(2,), longer=(), symbols=4)
    model = with_state(MODEL | TINY | parse("retention", None), 2048)
    record = run_recall(model, task, 0, Training(steps=1, batch_size=2, rows=2, points=1))
    net = NalandaForCausalLM(configured(model, task.vocab_size))
    assert record["parameters"] == sum(p.numel() for p in net.parameters())
    assert record["state_bytes"] == model["head_dim"] ** 2 * model["expand_v"] * 4
    assert not record["state_grows"]
    softmax = run_recall(
        TINY | parse("softmax", None), task, 0, Training(steps=1, batch_size=2, rows=2, points=1)
    )
    assert softmax["state_bytes"] == 4 * 2 * 8 * 4  # four tokens' keys and values
    assert softmax["state_grows"]


# ------------------------------ the sweep

SWEEP = [
    (
        TINY | parse("deltanet", "silu"),
        TINY_MQAR,
        seed,
        Training(steps=3, batch_size=4, rows=4, points=1),
    )
    for seed in range(3)
]


def run_sweep(folder, jobs=SWEEP, workers=1):
    return follow(recall_jobs(jobs, "cpu"), folder, workers, describe_recall)


def timeless(records):
    return [record | {"seconds": 0} for record in records]


def test_finished_runs_are_kept_and_a_killed_sweep_resumes(tmp_path, monkeypatch):
    whole = run_sweep(tmp_path / "whole")
    trained = []

    def noted(*job, device):
        trained.append(job[2])
        if len(trained) == 3:
            raise KeyboardInterrupt
        return run_recall(*job, device=device)

    monkeypatch.setattr(recall_module, "run_recall", noted)
    assert run_sweep(tmp_path / "whole") == whole
    assert trained == []
    with pytest.raises(KeyboardInterrupt):
        run_sweep(tmp_path / "killed")
    assert len(list((tmp_path / "killed").iterdir())) == 2
    assert timeless(run_sweep(tmp_path / "killed")) == timeless(whole)
    assert trained == [0, 1, 2, 2]


WAITING = """
import functools, os, pathlib, threading
from nalanda_lab.sweep import follow

def job(name):
    print(name, flush=True)
    threading.Event().wait()

if __name__ == "__main__":
    follow({name: functools.partial(job, name) for name in "ab"}, pathlib.Path("runs"), 2, str)
"""


@pytest.mark.slow
def test_the_workers_of_a_killed_sweep_end_with_it(tmp_path):
    (tmp_path / "waiting.py").write_text(WAITING)
    process = subprocess.Popen(
        [sys.executable, "waiting.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert {process.stdout.readline().strip() for _ in range(2)} == {"a", "b"}
    process.kill()
    process.communicate(timeout=60)  # ends when no worker holds the pipe


@pytest.mark.slow
def test_two_processes_give_the_records_of_one(tmp_path):
    one, two = (run_sweep(tmp_path / str(n), SWEEP[:2], n) for n in (1, 2))
    assert timeless(one) == timeless(two)


def test_rates_are_chosen_by_validation_and_spreads_are_over_seeds():
    task, model = TINY_MQAR, SWEEP[0][0]
    trainings = [Training(lr=lr) for lr in (1e-3, 1e-2)]

    def record(seed, training, validation, score):
        shared = {
            "cases": [2],
            "parameters": 1,
            "state_bytes": 2,
            "state_grows": False,
            "chance": [0],
        }
        return {
            "settings": recall_module.recall_settings(model, task, seed, training),
            "scores": [score],
            "score": score,
            "validation": validation,
            "flops_per_token": 3.0,
            **shared,
        }

    found = [
        record(0, trainings[0], 0.5, 0.9),
        record(1, trainings[0], 0.5, 0.9),
        record(0, trainings[1], 0.4, 0.2),
        record(1, trainings[1], 0.8, 0.4),
    ]
    trial = recall_module.RecallTrial(task, "parameters", "x", model)
    [row] = recall_module.summary([trial], found, 2, trainings)
    assert row["lr"] == 1e-2
    assert row["score"] == pytest.approx(0.3)
    assert row["spread"] == pytest.approx(0.02**0.5)


def test_the_command_leaves_tables_and_pictures(tmp_path):
    options = ["--tasks", "mqar,copying", "--mixers", "retention,softmax", "--states", "512,1024"]
    options += [
        "--steps",
        "2",
        "--seeds",
        "2",
        "--workers",
        "1",
        "--output",
        str(tmp_path),
        "--device",
        "cpu",
    ]
    small = [
        "mqar.pairs=[1, 2]",
        "mqar.sequence=8",
        "mqar.values=4",
        "copying.lengths=[1, 2]",
        "copying.longer=[]",
    ]
    small += ["training.rows=4", "training.batch_size=4", "training.points=1"]
    small += [f"model.{name}={value}" for name, value in TINY.items()]
    done = CliRunner().invoke(commands.app, ["recall", *options, *small])
    assert done.exit_code == 0, done.output
    assert "left out" not in done.output
    # Of two tasks and seeds: three sizes of retention; softmax has no other state.
    assert len(list((tmp_path / "runs").iterdir())) == 2 * 2 * (3 + 1)
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results["rows"]) == 2 * 3 * 2
    for name in results["figures"]:
        assert (tmp_path / name).stat().st_size > 1000
    assert {"mqar_cases.png", "mqar_state.png", "copying_cases.png"} <= set(results["figures"])
    text = (tmp_path / "results.md").read_text()
    assert text.strip() in done.output
    assert "| retention | state 512 B |" in text
    assert "grows" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"tasks": ["mqr"]}, "did you mean mqar"),
        ({"mixers": ["deltanets"]}, "did you mean deltanet"),
        ({"mixers": ["deltanet:negative"]}, "deltanet:option=value"),
        ({"maps": ["sillu"]}, "did you mean silu"),
        ({"match": "speed"}, "use parameters, state or both"),
        ({"overrides": ["mqar.pair=3"]}, "did you mean pairs"),
        ({"overrides": ["training.steps=x"]}, "must be int"),
        ({"overrides": ["mqar.pairs=[200]"]}, "need a sequence"),
        ({"overrides": ["needles.keys=[50]"]}, "need a sequence"),
        ({"overrides": ["steps=3"]}, "write SECTION.KEY=VALUE"),
    ],
)
def test_bad_input_is_refused_in_a_line(arguments, says, tmp_path):
    with pytest.raises(InputError, match=says):
        recall(output=tmp_path, **arguments)


def test_overrides_reach_task_model_and_training():
    tasks, base, training = override(
        TASKS, ["listops.bands=[[500, 2000]]", "model.hidden_size=8", "training.lr=1e-2"]
    )
    assert tasks["listops"].bands == ((500, 2000),)
    assert base == MODEL | {"hidden_size": 8}
    assert training.lr == 0.01
    assert set(EVERY) == set(QUICK) == set(TASKS) - {"listops_lra"}
