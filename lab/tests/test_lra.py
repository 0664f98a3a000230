"""`nalanda-lab lra`: the tasks' labels, local files, two texts in one model, runs, tables, speed."""

import dataclasses
import io
import json
from math import isqrt

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from nalanda_lab import commands
from nalanda_lab import lra as lra_module
from nalanda_lab.lra import (
    PUBLISHED,
    SIZES,
    TRANSNORMER,
    ArenaNet,
    arena_config,
    arena_models,
    arena_table,
    lra,
    lra_speed,
    peak_bytes,
    run_lra,
)
from nalanda_lab.lra_data import (
    ARENA,
    ARENA_SPLITS,
    CIRCLE,
    QUICK_ARENA,
    generated,
    listops,
    pathfinder,
    prepare,
    split_documents,
)
from nalanda_lab.synthetic import LISTOPS_TOKENS, OPERATORS
from PIL import Image
from typer.testing import CliRunner

from nalanda.common.errors import InputError
from nalanda.model import MIXERS

FEW = {
    name: dataclasses.replace(task, rows=task.rows if name == "image" else (80, 20, 40))
    for name, task in QUICK_ARENA.items()
}


def joined(picture: np.ndarray) -> bool:
    """Whether the circles are connected by ink, over blanks of one pixel."""
    side = isqrt(len(picture))
    image = picture.reshape(side, side)
    start, *others = zip(*np.nonzero(image == CIRCLE), strict=True)
    reached, edge = {start}, [start]
    while edge:
        y, x = edge.pop()
        near = {(y + a, x + b) for a in range(-2, 3) for b in range(-2, 3)} - reached
        found = {p for p in near if min(p) >= 0 and max(p) < side and image[p] > 1}
        reached |= found
        edge += found
    return all(place in reached for place in others)


@pytest.mark.parametrize("length", [ARENA["pathfinder"].length, QUICK_ARENA["pathfinder"].length])
def test_pathfinder_label_is_connectivity(length):
    task = dataclasses.replace(ARENA["pathfinder"], length=length)
    pictures, labels = pathfinder(task, "test", 60)
    assert pictures.shape == (60, length)
    assert [joined(picture) for picture in pictures] == labels.astype(bool).tolist()
    assert {int((picture == CIRCLE).sum()) for picture in pictures} == {18}  # two circles, apart
    ink = [(pictures[labels == kind] > 1).sum() / 30 for kind in (0, 1)]
    assert ink[0] == pytest.approx(ink[1], rel=0.1)  # the amount of ink tells nothing


def test_listops_label_is_the_value():
    """At the published length."""
    ids, values = listops(ARENA["listops"], "test", 3)
    for row, value in zip(ids, values, strict=True):
        tokens = [LISTOPS_TOKENS[i - 1] for i in row[row > 0]]
        assert 500 < len(tokens) < 2000
        stack: list[list] = [[]]
        for token in tokens:
            if token in OPERATORS:
                stack.append([token])
            elif token == "]":
                operator, *arguments = stack.pop()
                stack[-1].append(OPERATORS[operator](arguments))
            else:
                stack[-1].append(int(token))
        assert stack == [[value]]


@pytest.mark.parametrize("name", QUICK_ARENA)
def test_small_tasks(name):
    """Seeded, balanced, disjoint."""
    task, arrays = FEW[name], generated(FEW[name])
    again = generated(task)
    assert all((again[part] == arrays[part]).all() for part in arrays)
    seen = []
    for split, n in zip(ARENA_SPLITS, task.rows, strict=True):
        ids, labels = arrays[f"{split}_ids"], arrays[f"{split}_labels"]
        assert ids.dtype == np.uint8
        assert len(ids) == len(labels) == n
        assert ids.shape[-1] <= task.length
        assert ids.max() < task.vocab_size
        assert labels.min() >= 0
        assert labels.max() < task.classes
        if name in ("text", "retrieval", "pathfinder"):
            assert len(set(np.bincount(labels, minlength=task.classes))) == 1
        seen += {row.tobytes().rstrip(b"\0") for row in ids}
    assert len(seen) == len(set(seen))


def test_splits_share_no_document():
    train, test = ({text for _, text in split_documents(split)} for split in ("train", "test"))
    assert not train & test
    assert {kind for kind, _ in split_documents("test")} == set(range(4))


def write_files(folder):
    for name in ("text", "retrieval", "image"):
        (folder / name).mkdir()
    for split, n in (("train", 20), ("test", 4)):
        lines = [{"text": f"é{i}" + "x" * 5000 * (i % 2), "label": i % 2} for i in range(n)]
        (folder / "text" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, lines)))
        lines = [{"text1": f"a{i}", "text2": f"bb{i}", "label": i % 2} for i in range(n)]
        pa.parquet.write_table(
            pa.Table.from_pylist(lines), folder / "retrieval" / f"{split}-0.parquet"
        )
        images = []
        for i in range(n):
            Image.new("RGB", (32, 32), (0, 10 * i, 0)).save(stream := io.BytesIO(), "PNG")
            images.append({"img": {"bytes": stream.getvalue(), "path": None}, "label": i % 10})
        pa.parquet.write_table(
            pa.Table.from_pylist(images), folder / "image" / f"{split}-0.parquet"
        )


def test_local_files(tmp_path):
    write_files(tmp_path)
    found = {
        name: dict(np.load(prepare(ARENA[name], tmp_path, tmp_path / "data")))
        for name in ("text", "retrieval", "image")
    }
    text = found["text"]
    assert text["train_ids"].shape == (18, 4096)
    assert bytes(text["validation_ids"][1][:4]) == "é10".encode()
    assert text["validation_labels"].tolist() == [0, 0]
    assert bytes(text["test_ids"][0][:4]) == "é0\0".encode()  # padding
    assert (text["test_ids"][1] > 0).all()  # cut
    assert found["retrieval"]["test_ids"].shape == (4, 2, 4000)
    assert bytes(found["retrieval"]["test_ids"][2][1][:4]) == b"bb2\0"
    pixels = found["image"]["test_ids"]
    assert pixels.shape == (4, 1024)
    assert pixels[:, 0].tolist() == [1, 6, 12, 18]  # 0.587 of green; black is not padding


def test_rows_of_changed_files_are_made_again(tmp_path, monkeypatch):
    write_files(tmp_path)
    file = tmp_path / "text" / "test.jsonl"
    before = prepare(ARENA["text"], tmp_path, tmp_path / "data")
    assert prepare(ARENA["text"], tmp_path, tmp_path / "data") == before
    file.write_text(file.read_text().replace('"label": 1', '"label": 0'))  # of equal size
    after = prepare(ARENA["text"], tmp_path, tmp_path / "data")
    assert np.load(before)["test_labels"].tolist() == [0, 1, 0, 1]
    assert np.load(after)["test_labels"].tolist() == [0] * 4
    monkeypatch.setattr("nalanda_lab.lra_data.generated", lambda task: {})
    made = [
        prepare(QUICK_ARENA[name], None, tmp_path / "data").name for name in ("text", "listops")
    ]
    monkeypatch.setattr("platform.python_version", lambda: "3.99.0")
    again = [
        prepare(QUICK_ARENA[name], None, tmp_path / "data").name for name in ("text", "listops")
    ]
    assert [a == b for a, b in zip(made, again, strict=True)] == [False, True]


@pytest.mark.parametrize(
    ("file", "line", "message"),
    [
        ("train.jsonl", None, "no test*.jsonl or test*.parquet"),
        ("test.jsonl", '{"text": "a", "labels": 1}', "no column 'label'; it has text, labels"),
        ("test.jsonl", '{"text": "a", "label": -1}', "label -1: must be an integer from 0 to 1"),
        ("test.jsonl", '{"text": ', "test.jsonl: cannot be read"),
    ],
)
def test_bad_files(tmp_path, file, line, message):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "train.jsonl").write_text('{"text": "a", "label": 1}\n')
    if line:
        (tmp_path / "text" / file).write_text(line)
    with pytest.raises(InputError) as error:
        prepare(ARENA["text"], tmp_path, tmp_path / "data")
    assert message in str(error.value).replace("\n", " ")


def test_two_texts_meet_only_behind_the_encoder():
    """Swapping the texts swaps their features: the product stays, the difference turns."""
    task = QUICK_ARENA["retrieval"]
    net = ArenaNet(arena_config({"mixer": "softmax"}, "quick", task), pairs=True).double().eval()
    seen = []
    net.score[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    ids = torch.randint(1, 256, (3, 2, 12))
    ids[0, 1, 5:] = 0  # padding
    net(ids)
    net(ids.flip(1))
    net(ids[:1, :, :9])  # less padding
    a, b, product, difference = seen[0].chunk(4, -1)
    assert torch.equal(product, a * b)
    assert torch.equal(difference, a - b)
    torch.testing.assert_close(seen[1], torch.cat([b, a, product, -difference], -1))
    torch.testing.assert_close(seen[2].chunk(4, -1)[1], b[:1])


def test_every_mixer_is_an_encoder():
    found, notes = arena_models([*MIXERS, *TRANSNORMER], ["own"])
    assert {model["mixer"] for model in found} == {*MIXERS, *TRANSNORMER}
    assert not notes
    for size, task in (("skyformer", "text"), ("transnormer", "image")):
        layers = arena_config({"mixer": "transnormer_t1"}, size, ARENA[task]).mixer
        half = SIZES[size][task][0] // 2
        assert layers == ["diag_attention"] * half + ["norm_attention"] * half


def test_learns_digits(tmp_path):
    task = dataclasses.replace(QUICK_ARENA["image"], rows=(1500, 60, 120))
    model = {"mixer": "mala", "mixer_options": {}, "feature_map": "elu1"}
    run = (model, task, prepare(task, None, tmp_path), "quick", 0, 45)
    state = torch.get_rng_state()
    record = run_lra(*run)
    assert torch.equal(torch.get_rng_state(), state)
    assert record["accuracy"] > 0.2  # chance is 0.1
    assert json.loads(json.dumps(record)) == record
    assert [step for step, *_ in record["curve"]] == [*range(5, 50, 5)]


def test_command(tmp_path, monkeypatch):
    """A tiny sweep; the second start trains nothing."""
    monkeypatch.setattr(lra_module, "QUICK_ARENA", FEW)
    options = ["--quick", "--output", str(tmp_path), "--steps", "1", "--workers", "1"]
    options += ["--mixers", "softmax,transnormer_t2", "--tasks", "listops,retrieval"]
    done = CliRunner().invoke(commands.app, ["lra", *options])
    assert done.exit_code == 0, done.output
    text = (tmp_path / "results.md").read_text()
    levels = {}
    for file in (tmp_path / "data").glob("*.npz"):
        counts = np.bincount(np.load(file)["test_labels"])
        levels[file.stem.partition("-")[0]] = counts.max() / counts.sum()
    chance = [levels[name] for name in ("listops", "retrieval")]
    assert f"| chance | – | {100 * chance[0]:.1f} | {100 * chance[1]:.1f} |" in text
    assert chance[0] > 0.1  # values are not equally frequent
    assert "| transnormer_t2 | ours |" in text
    assert "| PolaFormer, α = 5 | published, not comparable | 38.8 | 80.4 | 59.6 |" in text
    assert (tmp_path / "lra.png").stat().st_size > 2000
    assert len(list((tmp_path / "runs").iterdir())) == 4
    monkeypatch.setattr(lra_module, "run_lra", pytest.fail)
    again = {"tasks": ["listops", "retrieval"], "mixers": ["softmax", "transnormer_t2"]}
    again |= {"steps": 1, "quick": True, "output": tmp_path, "workers": 1}
    assert [row["model"] for row in lra(**again)] == ["softmax", "transnormer_t2"]
    old = next((tmp_path / "runs").iterdir())
    old.write_text(old.read_text().replace(f'"torch": "{torch.__version__}"', '"torch": "2.0.1"'))
    lra(**again)
    kept = json.loads((tmp_path / "results.json").read_text())["versions"]
    assert "torch 2.0.1 and" in kept or f"{torch.__version__} and 2.0.1" in kept


def test_other_pictures_are_refused(tmp_path):
    write_files(tmp_path)
    with pytest.raises(InputError, match="a picture has other than 64 pixels"):
        prepare(dataclasses.replace(ARENA["image"], length=64), tmp_path, tmp_path / "data")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ["listop"]}, "--tasks: unknown name 'listop'; did you mean listops?"),
        ({"size": "small"}, "--size: unknown name 'small'"),
        ({"tasks": ["text"]}, "text: its files are local; name their folder with --data"),
        ({"mixers": ["soft", "attn"]}, "--mixers: unknown mixer 'attn'"),
    ],
)
def test_bad_options(tmp_path, options, message):
    with pytest.raises(InputError) as error:
        lra(output=tmp_path, **options)
    assert message in str(error.value)


def test_published_rows():
    """Their means, as printed in the papers; SOFT has none, as a task is missing."""
    printed = {
        "Transformer (PolaFormer)": 58.14,
        "PolaFormer, α = 3": 60.72,
        "PolaFormer, α = 5": 60.47,
    }
    printed |= {"PolaFormer, α = 7": 60.57, "Linear Transformer (LRA)": 50.55}
    printed |= {"TransNormer T1": 63.71, "TransNormer T2": 64.80}
    means = {name: np.mean(scores) for name, _, scores in PUBLISHED if None not in scores}
    assert means == pytest.approx(printed, abs=0.0051)
    rows = {line[0]: line[1:] for line in arena_table([], ARENA, "skyformer")[1]}
    assert rows["SOFT"][1:-2] == ["37.4", "63.5", "81.8", "46.9", "–", "–"]
    assert rows["TransNormer T1"][5] == "75.9"


@pytest.mark.parametrize(
    ("size", "same"),
    [
        ("skyformer", ["Transformer", *["PolaFormer,"] * 3, *["TransNormer"] * 2]),
        ("transnormer_paper", ["Transformer", *["PolaFormer,"] * 3, *["TransNormer"] * 2]),
        ("transnormer", []),
        ("quick", []),
    ],
)
def test_published_rows_of_the_same_size(size, same):
    _, lines = arena_table([], ARENA, size)
    assert [line[0].split(" ")[0] for line in lines if "same size" in line[1]] == same


@pytest.mark.parametrize("size", ["skyformer", "transnormer_paper"])
def test_the_feed_forward_has_the_published_weights(size):
    """Two matrices of 64 × 128, within 1 %: the GLU has three."""
    for task in ARENA.values():
        config = arena_config({"mixer": "softmax"}, size, task)
        weights = 3 * config.hidden_size * config.intermediate_size
        assert weights == pytest.approx(2 * 64 * 128, rel=0.01)


def test_speed():
    assert peak_bytes(lambda: torch.zeros(1 << 20).add_(1), "cpu") == pytest.approx(
        4 << 20, rel=1e-3
    )
    assert peak_bytes(
        lambda: [torch.zeros(1 << 20) for _ in range(3)].clear(), "cpu"
    ) == pytest.approx(12 << 20, rel=1e-3)
    windowed, _ = arena_models(["softmax:window=16"], ["own"])
    rows = lra_speed(windowed, (32,), "quick", "cpu", rounds=1)
    assert [row["model"] for row in rows] == ["softmax", "softmax(window=16)"]
    candidates, _ = arena_models(["softmax", "mala"], ["own"])
    rows = lra_speed(candidates, (32, 64), "quick", "cpu", rounds=1)
    assert [(row["model"], row["length"]) for row in rows] == [
        ("softmax", 32),
        ("mala + elu1", 32),
        ("softmax", 64),
        ("mala + elu1", 64),
    ]
    assert all(row["memory"] == row["speed"] == 1 for row in rows[::2])
    assert rows[2]["bytes"] > rows[0]["bytes"]
