"""`make gpu-check`, `gpu-day` and `gpu-bundle` without a GPU."""

import json
import lzma
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import gpu_check
import pytest
import torch
from gpu import bench, bundle, correctness, train
from gpu.card import Card, Case
from gpu.results import Results

ROOT = Path(__file__).parents[3]

FACTS = {"card": "NVIDIA H200", "sources": "abc"}


def dry(folder: Path, **options) -> Card:
    return Card("cpu", dry=True, output=folder, **options)


def results_of(folder: Path, plan: list[Case] | None = None) -> Results:
    results = Results(folder, plan or [])
    results.facts = dict(FACTS)
    return results


# ------------------------------ the command


def test_without_a_gpu_it_is_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main(["bench", "--output", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["speed"], "invalid choice: 'speed'"),
        (["--bundle", "nowhere", "bench"], "nowhere: no bundle; make one with"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit):
        gpu_check.main(arguments)
    assert message in capsys.readouterr().err


def test_a_part_goes_on_with_what_has_no_figure(tmp_path, monkeypatch, capsys):
    ran = []

    def run(card: Card, name: str) -> dict:
        ran.append(name)
        if name == "slow" and ran.count("slow") == 1:
            raise subprocess.TimeoutExpired("x", 1)
        if name == "wrong":
            raise RuntimeError("the reason\nand more")
        return {"value": 1.0}

    names = ("right", "slow", "wrong")
    cases = [Case("Group", name, lambda card, name=name: run(card, name)) for name in names]
    monkeypatch.setitem(gpu_check.PARTS, "bench", lambda card: cases)
    arguments = ["bench", "--dry-run", "--output", str(tmp_path)]
    assert gpu_check.main(arguments) == 0
    assert "wrong: RuntimeError" not in (text := (tmp_path / "RESULTS.md").read_text())
    assert "RuntimeError: the reason" in text
    assert "and more" in (tmp_path / "log.txt").read_text(), "the traceback"
    assert gpu_check.main(arguments) == 0
    assert ran == ["right", "slow", "wrong", "slow", "right", "wrong"]
    capsys.readouterr()
    assert gpu_check.main([*arguments, "--minutes", "-1"]) == 0
    assert "the same command goes on with slow; right; wrong" in capsys.readouterr().out


def test_a_process_without_its_gpu_ends(tmp_path, monkeypatch):
    def lose(card: Card) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    cases = [Case("Group", name, lambda card: {"value": 1.0}) for name in "ab"]
    monkeypatch.setitem(gpu_check.PARTS, "bench", lambda card: cases)
    monkeypatch.setattr(Card, "synchronize", lose)
    assert gpu_check.main(["bench", "--dry-run", "--output", str(tmp_path)]) == gpu_check.LOST
    assert [x["name"] for x in Results(tmp_path, []).figures] == ["a"]


def test_a_day_leaves_the_bench_out_if_the_chunks_are_wrong(tmp_path, monkeypatch, capsys):
    results_of(tmp_path).put(correctness.DECISION, {"bench": "no", "decision": "chunk fails"})
    ran = []

    def run(command: list[str], **options):
        ran.append(command[2])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(gpu_check.subprocess, "run", run)
    options = ["day", "--dry-run", "--output", str(tmp_path)]
    assert gpu_check.main(options) == 0
    assert ran == ["kernels", "train", "tune"]
    assert "no bench: chunk fails" in capsys.readouterr().out
    assert gpu_check.main([*options, "--call", "3"]) == 0
    assert ran[3:] == ["train"]


# ------------------------------ kernels


TESTS = """
import os, pytest
def test_device(): assert os.environ["NALANDA_TEST_DEVICE"] == "cpu"
def test_compiled(): assert "TRITON_INTERPRET" not in os.environ
@pytest.mark.parametrize("n", [1, 2])
def test_bad(n): assert n == 1
def test_error(absent): pass
"""


def test_what_fails_is_found_and_decides(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (tmp_path / "test_kernels_chunk.py").write_text(TESTS)
    (tmp_path / "test_kernels_maps.py").write_text("def test_nothing(): pass\n")
    (tmp_path / "test_kernels_crash.py").write_text("import os\ndef test(): os._exit(9)\n")
    (tmp_path / "test_kernels_unread.py").write_text("import no_such_module\n")
    results = results_of(tmp_path)
    correctness.run_tests(dry(tmp_path, tests=tmp_path), results, minutes=2)
    values = {x["name"]: x["values"] for x in results.figures}
    assert values["chunk"]["failing"] == "test_bad[2], test_error"
    assert values["maps"]["failing"] == ""
    assert values["crash"]["failing"] == "test"
    assert "unread" in values["unread"]["failing"]
    assert values["how to go on"]["bench"] == "no"
    assert "test_bad[2] fails" in values["how to go on"]["decision"]
    assert "assert 2 == 1" in (tmp_path / "chunk-bundled.xml").read_text()

    # A second call tests what has no result, and decides as before.
    (tmp_path / "test_kernels_more.py").write_text("def test_nothing(): pass\n")
    again = results_of(tmp_path)
    correctness.run_tests(dry(tmp_path, tests=tmp_path), again, minutes=2)
    names = [x["name"] for x in again.figures[len(results.figures) :]]
    assert names == ["more", "how to go on"]
    assert again.figures[-1]["values"] == values["how to go on"]


@pytest.mark.parametrize(
    ("bundled", "newer", "assembler", "bench", "words"),
    [
        ({}, None, "bundled", "no", "chunk was not tested"),
        ({"chunk": []}, {"chunk": []}, "bundled", "yes", "green"),
        ({"chunk": ["a"]}, {"chunk": []}, "newer", "yes", "red with the newer one: none"),
        ({"chunk": ["a"]}, {"chunk": ["a"]}, "bundled", "no", "no bench: a fails"),
        ({"chunk": ["a", "b"]}, {"chunk": ["b"]}, "newer", "no", "no bench: b fails"),
        ({"chunk": ["a"]}, None, "bundled", "no", "no bench: a fails"),
        ({"chunk": ["a"]}, {}, "bundled", "no", "no bench: a fails"),  # not reached again
        ({"chunk": [], "block_attention": ["a"]}, None, "bundled", "yes", "on torch"),
        ({"chunk": [], "maps": ["a"]}, {"maps": [], "chunk": []}, "newer", "yes", "red"),
    ],
)
def test_how_to_go_on(bundled, newer, assembler, bench, words):
    values = correctness.decide(bundled, newer)
    assert (values["assembler"], values["bench"]) == (assembler, bench)
    assert words in values["decision"]


# ------------------------------ results


def test_the_newest_figure_counts_and_targets_are_shown(tmp_path):
    case = Case("Recurrences", "delta rule", targets={"peer / ours": 1.2})
    other = Case("Recurrences", "retention")
    for ratio in (1.0, 1.5):
        results = results_of(tmp_path, [case, other])
        results.put(case, {"peer / ours": ratio, "errors": {"a|b": "x"}})
    lines = (tmp_path / "RESULTS.md").read_text().splitlines()
    assert "| delta rule | 1.5 | a/b: x | peer / ours ≥ 1.2 |" in lines
    assert "| retention | not measured | not measured |  |" in lines
    assert len(Results(tmp_path, []).figures) == 2


# ------------------------------ speed


def test_one_side_that_fails_leaves_the_others(tmp_path):
    def wrong(x):
        raise RuntimeError("no kernel")

    def forward_only(x):
        return x.detach() * 2

    sides = {"ours": wrong, "peer": lambda x: 2 * x, "FlashQLA": forward_only}
    x = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    values = bench.compare(dry(tmp_path), sides, [(x,)])
    assert values["peer, ms"] > 0
    assert "ours, ms" not in values
    assert values["errors"]["ours"] == "RuntimeError: no kernel"
    assert "FlashQLA, backward" in values["errors"]


def test_ratios_are_to_ours(tmp_path, monkeypatch):
    times = {"ours": 2.0, "peer": 6.0}
    monkeypatch.setattr(Card, "times", lambda *_: (times, {}))
    x = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    sides = {"ours": lambda x: 2 * x, "peer": lambda x: 3 * x}
    values = bench.compare(dry(tmp_path), sides, [(x,)])
    assert values["peer / ours"] == 3
    assert values["difference"] == pytest.approx(1 / 3)


def test_pairs_of_training(tmp_path, monkeypatch):
    asked = []

    def run_trainer(card, recipe, *settings, **variables):
        asked.append((recipe, variables.get("NALANDA_BACKEND")))
        if recipe.startswith("fla/"):
            raise RuntimeError("no fla")
        rate = 50.0 if variables else 100.0
        return [
            {"loss": 2.0, "mfu": 0.3, "tokens_per_second": speed} for speed in (1.0, rate, rate)
        ]

    monkeypatch.setattr(train, "run_trainer", run_trainer)
    monkeypatch.setattr(train, "prepare_text", lambda card, entries: tmp_path)
    values = train.train_pair(dry(tmp_path), recipe=train.FLAGSHIP, T=32)
    assert values["ours / fla"] == 2
    assert values["compiled, MFU"] == 0.3
    assert values["errors"] == {"peer": "no fla"}
    assert [backend for _, backend in asked] == [None, None, None, "fla", "torch"]


def test_recipes_of_pairs_are_there():
    for recipe, (peer, *_) in train.PEERS.items():
        for name in (recipe, peer):
            assert (ROOT / "recipes" / f"{name}.yaml").is_file()


@pytest.mark.slow
def test_a_dry_day_runs_every_part(tmp_path):
    """With a bundle. fla's models and kernels need a card, so they are only named."""
    made = make_fake_bundle(tmp_path / "bundle", bundle.triton_hash())
    command = ["tools/gpu/gpu_check.py", "day", "--dry-run", "--bundle", str(made)]
    scratch = {"TMPDIR": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    scratch |= {"OMP_NUM_THREADS": "1"}
    command += ["--output", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=os.environ | scratch)
    assert done.returncode == 0
    values = {(x["group"], x["name"]): x["values"] for x in Results(tmp_path / "out", []).figures}
    assert values["Decision", "how to go on"]["decision"] == "green"
    for (group, name), x in values.items():
        if group == "Recurrences":
            assert min(x["ours, forward ms"], x["ours, ms"]) > 0, name
            assert x.get("difference", 0) < 1e-2, name
    trained = values["Training", f"{train.FLAGSHIP}, T = 32"]
    assert trained["ours, tokens/s"] > 0
    assert trained["ours, loss"] == pytest.approx(trained["torch, loss"], abs=1e-3)
    assert ("Block sizes", "tune") in values
    decoded = values["Decoding", train.FLAGSHIP]
    assert min(decoded["eager, ms"], decoded["graph, ms"]) > 0
    assert values["Head loss", "beside torch"]["difference"] < 1e-2
    alone = values["Kernels alone, ms", train.FLAGSHIP]
    assert {"prepare", "states", "outputs", "state_gradients", "input_gradients"} <= alone.keys()
    assert min(alone.values()) > 0
    assert len(values["Profile, ms", train.FLAGSHIP]) == 8
    assert "aten::mm" in (tmp_path / "out" / "profile.txt").read_text()
    assert (tmp_path / "triton" / "KEY" / "states.cubin").exists()


# ------------------------------ the bundle


def make_fake_bundle(folder: Path, key: str) -> Path:
    """A bundle with a peer of one module, a ptxas that prints its version, and a cache of one kernel."""
    folder.mkdir()
    with zipfile.ZipFile(folder / "peer-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("nalanda_test_peer.py", "THERE = True\n")
    (folder / "ptxas.xz").write_bytes(lzma.compress(b"#!/bin/sh\necho release 13.4\n"))
    entry = folder.parent / "entries" / "KEY"
    entry.mkdir(parents=True)
    (entry / "states.cubin").write_text("{}")
    paths = {"states.cubin": "/another/machine/KEY/states.cubin"}
    (entry / "__grp__states.json").write_text(json.dumps({"child_paths": paths}))
    shutil.make_archive(str(folder / "cache"), "xztar", entry.parent)
    manifest = {"made": "today", "triton": "3.6.0", "key": key}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_a_bundle_unpacks_once_and_only_for_its_triton(tmp_path, monkeypatch, capsys):
    from triton import knobs

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "cache"))
    made = make_fake_bundle(tmp_path / "bundle", "another")
    folder = bundle.unpack(made)
    assert "kernels are left out; they are for Triton 3.6.0" in capsys.readouterr().out
    assert not (tmp_path / "cache").exists()
    assert (folder / "peers" / "nalanda_test_peer.py").exists()
    assert subprocess.check_output([folder / "ptxas"]) == b"release 13.4\n"

    shutil.rmtree(folder)
    monkeypatch.setattr(bundle, "triton_hash", lambda: "another")
    for _ in range(2):
        assert bundle.unpack(made) == folder
        entry = tmp_path / "cache" / "KEY"
        paths = json.loads((entry / "__grp__states.json").read_text())["child_paths"]
        assert Path(paths["states.cubin"]) == entry / "states.cubin"
        assert (entry / "states.cubin").exists()


def test_a_bundle_is_made_in_steps(tmp_path, monkeypatch, capsys):
    asked = []

    def download(packages: list[str], folder: Path) -> None:
        asked.extend(packages)
        with zipfile.ZipFile(folder / "some-none-any.whl", "w") as file:
            file.writestr("nvidia/cu13/bin/ptxas", "#!/bin/sh\n")

    def python(card, program, path, **variables):
        if "PTXAS" in str(variables):
            raise subprocess.TimeoutExpired("x", 1)
        return 0, "done"

    monkeypatch.setattr(bundle, "download", download)
    monkeypatch.setattr(Card, "python", python)
    for _ in range(2):
        bundle.make_bundle(tmp_path / "made", minutes=1.0)
    assert len(asked) == 3, "the second call downloads nothing"
    manifest = json.loads((tmp_path / "made" / "manifest.json").read_text())
    assert manifest["key"] == bundle.triton_hash()
    again = ", ".join(f"{name}, newer ptxas" for name in correctness.AGAIN)
    assert f"not finished: {again}; the same command goes on" in capsys.readouterr().out


@pytest.mark.slow
def test_kernels_are_compiled_for_an_absent_card(tmp_path):
    program = "from gpu import precompile, bench; from gpu.card import Card; precompile.start(); "
    program += "card = Card('cpu'); case = bench.bench_cases(card)[0]; print(case.run(card))"
    folders = [ROOT / "tools", ROOT / "src", ROOT / "kernels", ROOT / "lab"]
    variables = {
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "NALANDA_TEST_DEVICE": "cpu:0",
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "TRITON_STORE_BINARY_ONLY": "1",
        "OMP_NUM_THREADS": "1",
    }
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | variables
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr
    assert "'ours'" not in done.stdout.partition("errors")[2]
    kernels = {x.name for x in (tmp_path / "cache").rglob("*.cubin")}
    assert {"states.cubin", "outputs.cubin"} <= kernels
    assert not list((tmp_path / "cache").rglob("*.ttir"))
