"""`make gpu-check`, `gpu-day` and `gpu-bundle`, and `nalanda bench kernels --tune`, without a GPU."""

import importlib.util
import json
import lzma
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import gpu_check
import pytest
import torch
from gpu import bench, bundle, correctness, standin, train
from gpu.card import Card, NotThere, OutOfTime, limited
from gpu.results import COLUMNS, Case, Results
from gpu.stream import read
from nalanda_kernels import tune
from nalanda_kernels.triton import common
from torch.autograd import DeviceType

ROOT = Path(__file__).parents[2]
RUN = {"card": "NVIDIA H200", "date": "2026-01-01", "triton": "3.7.1", "sources": "abc"}


@pytest.fixture
def cuda():
    with standin.cuda():
        yield


def dry(folder, **options):
    return Card("cpu", dry=True, output=folder, **options)


def results_of(folder, *rows, card="NVIDIA H200"):
    """Results of one run with (group, name, values) in it."""
    results = Results(folder)
    results.plan = gpu_check.plan
    results.begin(RUN | {"card": card})
    for group, name, values in rows:
        results.put("bench", Case(group, name), values)
    return results


def line_of(text, start):
    return next(line for line in text.splitlines() if line.startswith(f"| {start}"))


def test_says_in_one_line_that_there_is_no_gpu(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main(["bench", "--output", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not list(tmp_path.iterdir())
    assert tune.main(["--json", str(tmp_path / "blocks.json")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dry-run"], "another folder with --output"),
        (["speed"], "part 'speed': unknown; choose from kernels, bench, train, profile, tune"),
        (["bench", "day"], "day: it takes no other part"),
        (["bundle"], "bundle: name its folder with --bundle"),
        (
            ["--bundle", "nowhere", "bench"],
            "nowhere: no bundle; make one with `gpu_check.py bundle`",
        ),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit):
        gpu_check.main(arguments)
    assert message in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------- dry runs


def test_a_dry_run_takes_the_lines_of_a_card(tmp_path, capsys):
    arguments = ["bench", "--dry-run", "--output", str(tmp_path), "--minutes", "5", "--only"]
    for only in ("copy", "attention in blocks"):
        assert gpu_check.main([*arguments, only]) == 0
    found = {(x["group"], x["name"]): x["values"] for x in Results(tmp_path).figures}
    assert {group for group, _ in found} == {"Ceilings", "Other kernels"}
    blocks = found["Other kernels", "attention in blocks of 64 (peer: FlashAttention), T = 32"]
    assert blocks["difference"] < 1e-2
    assert min(blocks[key] for key in ("forward", "both", "ratio", "floor")) > 0
    assert "## a CPU, dry" in (tmp_path / "RESULTS.md").read_text()
    assert "error" not in capsys.readouterr().out.lower()


@pytest.mark.slow
def test_a_dry_day_runs_every_case_and_leaves_few_files(tmp_path):
    """With a bundle, call after call, each continued from what the earlier ones left in another folder."""
    made, before = fake_bundle(tmp_path / "bundle", bundle.triton_hash()), None
    for call in gpu_check.CALLS:
        output = tmp_path / str(call)
        command = [
            "kernels/gpu_check.py",
            "day",
            "--call",
            str(call),
            "--bundle",
            str(made),
            "--dry-run",
        ]
        command += ["--output", str(output), *(["--continue", str(before)] if before else [])]
        scratch = {"TMPDIR": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
        done = subprocess.run([sys.executable, *command], cwd=ROOT, env=os.environ | scratch)
        assert done.returncode == 0
        before = output
    found = {(x["group"], x["name"]): x["values"] for x in Results(before).figures}
    assert {x["group"] for x in Results(before).figures} == COLUMNS.keys()
    expected = {
        (c.group, c.name) for part in gpu_check.PARTS for c in gpu_check.PARTS[part](dry(tmp_path))
    }
    missing = {name for group, name in expected - found.keys() if group != correctness.GROUP}
    assert not missing
    assert not [name for name, x in found.items() if "all" in x.get("errors", {})]
    assert found["Decision", "how to go on"]["says"] == "green with Triton's own ptxas"
    for (group, name), x in found.items():
        if group in ("Recurrences", "Other kernels"):
            assert min(x[key] for key in ("forward", "both", "floor")) > 0, name
            assert x.get("difference", 0) < 1e-2, name
    trained = found["Training", "nala_gated_deltanet_340m, T = 32"]
    assert min(trained[key] for key in ("tokens_per_second", "mfu", "compiled_mfu")) > 0
    decoding = found["Decoding", "NaLa + Gated DeltaNet, batch 1"]
    assert min(decoding["share"], decoding["graphed_share"]) > 0
    assert "aten::" in (tmp_path / "3" / "profile.txt").read_text()
    assert (tmp_path / "triton" / "KEY" / "states.cubin").exists()
    for call in gpu_check.CALLS:
        files = [x for x in (tmp_path / str(call)).rglob("*") if x.is_file()]
        assert len(files) <= 8
        assert max(x.stat().st_size for x in files) < 2**24


def test_what_is_not_there_is_said_and_nothing_more(tmp_path, monkeypatch, cuda):
    card = dry(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(NotThere, match="fla is not there"):
            card.kernel("delta_rule", "fla")
    with pytest.raises(NotThere, match="no_such is not there"):
        card.kernel("delta_rule", "no_such")
    monkeypatch.setitem(sys.modules, "fla.ops.common.chunk_o", None)
    assert bench.lift_guard() == "no flash-linear-attention"
    monkeypatch.setitem(sys.modules, "fla.models", None)
    with pytest.raises(ImportError):
        train.build_peer(card, "gated_deltanet", 32)
    assert train.build_peer(card, "transformer", 32).config.num_hidden_layers == 1
    assert card.note(NotThere("x is not there")) == "NotThere: x is not there"
    assert not card.log.exists()  # no traceback for a peer that is merely absent


def test_the_peers_guard_is_lifted_and_said(monkeypatch):
    chunk_o = SimpleNamespace(IS_NVIDIA_HOPPER=True, TRITON_ABOVE_3_7_1=False)
    monkeypatch.setitem(sys.modules, "fla.ops.common.chunk_o", chunk_o)
    monkeypatch.setattr(importlib, "import_module", lambda name: chunk_o)
    assert "timed with that check lifted" in bench.lift_guard()
    assert chunk_o.TRITON_ABOVE_3_7_1
    assert bench.lift_guard() is None


# ---------------------------------------------------------------------------------------------- correctness


TESTS = """# kernel_device
import os, pytest
def test_device(): assert os.environ["NALANDA_TEST_DEVICE"] == "cpu"
def test_compiled(): assert "TRITON_INTERPRET" not in os.environ
@pytest.mark.parametrize("n", [1, 2])
def test_bad(n): assert n == 1
def test_skipped(): pytest.skip()
def test_poisoned(): raise RuntimeError("CUDA error: an illegal memory access")
def test_crash(): os._exit(9)
"""


def test_each_test_leaves_a_line_whatever_ends_its_process(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (tmp_path / "test_kernels_good.py").write_text(TESTS)
    (tmp_path / "test_kernels_interpreted.py").write_text("def test_nothing(): pass\n")
    (tmp_path / "test_kernels_broken.py").write_text("# kernel_device\nimport no_such_module\n")
    results, card = results_of(tmp_path, card=standin.NAME), dry(tmp_path, tests=tmp_path)
    correctness.run_tests(card, results, minutes=2)
    values = {figure["name"]: figure["values"] for figure in results.figures}
    good = values["good"]
    assert [good[key] for key in ("passed", "failed", "skipped", "left")] == [3, 3, 1, 0]
    assert "test_bad[2]" in good["names"]
    assert values["broken"]["failed"] == 1
    assert "import kernel_device" in values["interpreted"]["errors"]["all"]
    assert values["how to go on"]["says"] == (
        "red with Triton's own ptxas: broken, good; no test of chunk ended: no bench"
    )
    texts = "".join(line.get("text", "") for line in read(tmp_path / "tests.jsonl"))
    for reason in ("assert 2 == 1", "illegal memory access", "no_such_module", "crashed"):
        assert reason in texts
    with (tmp_path / "tests.jsonl").open("a") as file:
        file.write('{"id": "cut of')
    assert correctness.counts(card, results, "bundled")["good"]["passed"] == 3


def test_a_killed_run_keeps_what_it_tested_and_goes_on_with_the_rest(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # without pytest-xdist
    (tmp_path / "test_kernels_a.py").write_text(
        """# kernel_device
import os
def test_first(): pass
def test_second(): os._exit(9) if not os.path.exists("%s") else None
"""
        % (tmp_path / "again")
    )
    results, card = results_of(tmp_path, card=standin.NAME), dry(tmp_path, tests=tmp_path)
    correctness.run_tests(card, results, minutes=2)
    kept = results.values(correctness.GROUP, "a")
    assert (kept["passed"], kept["left"]) == (1, 1)
    assert results.values("Decision", "how to go on")["says"].endswith("; 1 tests were not reached")
    (tmp_path / "again").touch()
    correctness.run_tests(card, results, minutes=2)
    assert results.values(correctness.GROUP, "a")["passed"] == 2
    order = [
        line["id"].rpartition(":")[2] for line in read(tmp_path / "tests.jsonl") if "id" in line
    ]
    assert order == ["test_first", "test_second", "test_first"]
    with (tmp_path / "tests.jsonl").open("a") as file:
        line = {"assembler": "newer", "sources": results.runs[-1]["sources"]}
        file.write(json.dumps(line | {"collected": {"test_kernels_a.py": 2}}) + "\n")
        file.write(
            json.dumps(line | {"id": "test_kernels_a.py::test_first", "outcome": "passed"}) + "\n"
        )
    assert correctness.failing(card, results, "bundled").keys() == {"a"}
    assert not correctness.failing(card, results, "newer"), (
        "a test that is left may be the one that failed"
    )


def test_a_newer_ptxas_runs_what_is_doubtful_and_what_failed(tmp_path, monkeypatch):
    asked = []

    def pytest_of(card, results, chosen, assembler, end, ptxas=None):
        asked.append((assembler, [correctness.name(x) for x in chosen], ptxas))

    red = {
        "bundled": {"chunk": ["chunk::one"], "maps": ["maps::one"]},
        "newer": {"chunk": ["chunk::one"], "maps": []},
    }
    monkeypatch.setattr(correctness, "pytest", pytest_of)
    monkeypatch.setattr(correctness, "failing", lambda card, results, assembler: red[assembler])
    monkeypatch.setattr(correctness.shutil, "which", lambda name: "/bin/true")
    results, said = results_of(tmp_path, card=standin.NAME), []
    card = dry(tmp_path)
    monkeypatch.setattr(
        Card, "command", lambda self, *x, **variables: said.append((x[0], variables)) or (1, "red")
    )
    correctness.run_tests(card, results, minutes=1, newer="/new/ptxas")
    names = [correctness.name(x) for x in correctness.files(card)]
    assert (names[0], names[-1]) == ("model", "fla")
    assert asked[0] == ("bundled", names, None)
    assert asked[1] == ("newer", ["block_attention", "chunk", "maps", "readouts"], "/new/ptxas")
    found = results.values("Decision", "how to go on")
    assert (found["bench"], found["assembler"], found["alone"], found["sanitizer"]) == (
        False,
        "newer",
        "red",
        "red",
    )
    assert [x[1][correctness.PTXAS] for x in said] == ["/new/ptxas"] * 2
    assert said[1][0][0] == "/bin/true"
    assert said[1][1]["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"


@pytest.mark.parametrize(
    ("bundled", "newer", "assembler", "bench", "says"),
    [
        ({}, None, "bundled", False, "no test ran"),
        ({"chunk": []}, {"chunk": []}, "bundled", True, "green with Triton's own ptxas"),
        ({"chunk": ["a"]}, {"chunk": []}, "newer", True, "green with the newer one"),
        ({"chunk": ["a"]}, {"chunk": ["a"]}, "bundled", False, "chunk is wrong: no bench"),
        ({"chunk": ["a", "b"]}, {"chunk": ["b"]}, "newer", False, "newer is taken; chunk is wrong"),
        ({"chunk": ["a"]}, None, "bundled", False, "chunk is wrong: no bench"),
        (
            {"chunk": ["a"]},
            {},
            "bundled",
            False,
            "chunk is wrong: no bench",
        ),  # it was not reached again
        ({"model": []}, None, "bundled", False, "no test of chunk ended"),
        ({"model": ["a"]}, {"model": []}, "newer", False, "no test of chunk ended"),
        (
            {"chunk": [], "block_attention": ["a"]},
            {"block_attention": ["a"]},
            "bundled",
            True,
            "stays on torch",
        ),
        (
            {"chunk": [], "maps": ["a"]},
            {"maps": ["a"], "chunk": []},
            "bundled",
            True,
            "maps; bundled is taken",
        ),
    ],
)
def test_what_failing_tests_decide(bundled, newer, assembler, bench, says):
    found = correctness.decide(bundled, newer)
    assert (found["assembler"], found["bench"]) == (assembler, bench)
    assert says in found["says"]
    assert ("first" in found) == ("chunk is wrong" in says)


# --------------------------------------------------------------------------------------------------- results


def test_figures_add_up_and_the_newest_counts(tmp_path):
    name = "delta rule, K = V = 128, T = 2048"
    results_of(tmp_path, ("Recurrences", name, {"ratio": 1.0, "both": 2.0}))
    curve = ("Loss curves", "demo.yaml, bf16", {"steps": 100})
    results = results_of(tmp_path, ("Recurrences", name, {"both": 1.0}), curve)
    results.put(
        "bench", Case("Recurrences", name), {"ratio": 1.5, "both": 1.25}
    )  # replaces that of its run
    kept = json.loads((tmp_path / "results.json").read_text())
    assert sorted(x["values"].get("ratio", 0) for x in kept["figures"]) == [0, 1.0, 1.5]
    text = (tmp_path / "RESULTS.md").read_text()
    row = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
    assert row == [f"| {name} | 1.25 | 1.50× | 2 |"]
    assert line_of(text, "demo.yaml, bf16") == "| demo.yaml, bf16 | 100 | 2 |"


def test_an_empty_machine_continues_earlier_results(tmp_path):
    earlier = tmp_path / "earlier"
    results_of(earlier, ("Ceilings", "bf16 matrix product, TFLOP/s", {"value": 788.0}))
    for named in (earlier, earlier / "results.json"):
        assert len(Results(tmp_path / "new", named).figures) == 1
    results_of(tmp_path / "new")
    assert not Results(tmp_path / "nowhere", tmp_path / "nothing").figures
    results = results_of(
        tmp_path / "new", ("Ceilings", "copy, GB/s read and written", {"value": 4300.0})
    )
    assert len(Results(tmp_path / "new", earlier).figures) == len(results.figures) == 1, (
        "its own count first"
    )


def test_targets_are_hit_missed_or_not_measured(tmp_path):
    training, rule = "nala_gated_deltanet_340m, T = 2048", "gated delta rule, K = V = 128, T = 2048"
    results_of(
        tmp_path,
        ("Recurrences", rule, {"ratio": 1.2, "qla_ratio": 0.9}),
        ("Training", training, {"ratio": 0.949, "compiled_mfu": 0.5}),
        ("Decoding", "NaLa + Gated DeltaNet, batch 1", {"errors": {"all": "RuntimeError: a | b"}}),
    )
    text = (tmp_path / "RESULTS.md").read_text()
    for start, end in {
        f"{rule}: peer / ours": "| ≥ 1.20× | 1.20× | hit |",
        f"{rule}: FlashQLA": "| ≥ 1.00× | 0.90× | missed |",
        f"{training}: ours / fla's model": "| ≥ 0.95× | 0.95× | missed |",
        f"{training}: MFU, compiled": "| ≥ 40% | 50% | hit |",
        f"{training}: ours / fla's kernels": "| ≥ 1.25× | – | not measured |",
        "NaLa + Gated DeltaNet, batch 1: share": "| ≥ 60% | – | not measured |",
        "NaLa + Gated DeltaNet, batch 1 | all": "| RuntimeError: a / b |",
    }.items():
        assert line_of(text, start).endswith(end)


def test_the_committed_table_is_of_this_program(tmp_path):
    folder = Path(gpu_check.__file__).parent
    assert gpu_check.main(["table", "--output", str(tmp_path), "--continue", str(folder)]) == 0
    made = (tmp_path / "RESULTS.md").read_text()
    assert made == (folder / "RESULTS.md").read_text(), "run `python kernels/gpu_check.py table`"


def test_the_table_of_nothing_says_so(tmp_path):
    assert gpu_check.main(["table", "--output", str(tmp_path)]) == 0
    text = (tmp_path / "RESULTS.md").read_text()
    cases = gpu_check.plan("a card")
    for case in cases:
        assert f"| {case.name} | not measured |" in text
    assert {case.group for case in cases} == COLUMNS.keys()
    recipes = {recipe.stem[:-5] for recipe in (ROOT / "recipes").glob("*_340m.yaml")}
    channels = {
        "kda",
        "gated_deltanet2",
        "delta_product",
        "mamba2",
    }  # half an hour with a card has no time for these
    left_out = {"mamba", *channels, *(f"{name}_hybrid" for name in channels)}
    assert recipes - left_out == set(train.RECIPES)


# --------------------------------------------------------------------------------------------------- running


def test_a_part_ends_in_time_and_resumes_where_it_stopped(tmp_path, monkeypatch, capsys, cuda):
    done = []

    def run(name, card):
        done.append(name)
        if name == "b":
            card.keep({"value": 2.0})
            if done.count("b") == 1:
                time.sleep(30)
        if name == "c":
            raise RuntimeError("the reason\nand more")
        return {"value": 1.0}

    cases = [Case("Ceilings", name, lambda card, name=name: run(name, card)) for name in "abc"]
    monkeypatch.setitem(gpu_check.PARTS, "bench", lambda card: cases)
    results, card = results_of(tmp_path, card=standin.NAME), dry(tmp_path)
    gpu_check.run_part("bench", card, results, minutes=3 / 60)
    assert done == ["a", "b"]
    assert capsys.readouterr().out.endswith("not reached; run it again for b; c\n")
    assert results.values("Ceilings", "b") == {"value": 2.0, "partial": True}, (
        "what a cut case had is kept"
    )
    gpu_check.run_part("bench", card, results, minutes=1)
    assert done == ["a", "b", "b", "c", "a"]  # cases without a whole figure come first
    assert results.values("Ceilings", "c") == {"errors": {"all": "RuntimeError: the reason"}}
    assert "and more" in card.log.read_text(), "the whole traceback"
    gpu_check.run_part("bench", card, results, minutes=1, new=True)
    assert len(done) == 5
    cases[0].seconds = 0.1
    monkeypatch.setattr(cases[0], "run", lambda card: time.sleep(30))
    gpu_check.run_part("bench", card, results, minutes=1, only="a")
    assert results.values("Ceilings", "a")["errors"] == {"all": "more than 0 s"}


def test_a_process_without_its_gpu_ends_and_another_goes_on(tmp_path, monkeypatch, capsys, cuda):
    def gone():
        raise RuntimeError("CUDA error: unspecified launch failure")

    cases = [Case("Ceilings", name, lambda card: {"value": 1.0}) for name in "ab"]
    monkeypatch.setitem(gpu_check.PARTS, "bench", lambda card: cases)
    monkeypatch.setattr(torch.cuda, "synchronize", gone)
    results = results_of(tmp_path, card=standin.NAME)
    assert gpu_check.run_part("bench", dry(tmp_path), results, minutes=1) == gpu_check.LOST
    assert capsys.readouterr().out.endswith("run it again for b\n")
    program = tmp_path / "program.py"
    program.write_text(
        "import pathlib, sys\nmark = pathlib.Path(sys.argv[0] + '.mark')\n"
        "there = mark.exists()\nmark.touch()\nsys.exit(0 if there else 3)\n"
    )
    monkeypatch.setattr(gpu_check, "__file__", str(program))
    options = SimpleNamespace(dry_run=True, bundle=None, output=tmp_path)
    vars(options)["continue"] = None
    assert gpu_check.child("bench", options, 1.0, new=True) == 0
    program.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(gpu_check, "GRACE", 0.0)
    assert gpu_check.child("bench", options, 0.01, new=False) == gpu_check.LOST


def test_a_day_leaves_the_bench_out_if_the_chunks_are_wrong(tmp_path, monkeypatch, capsys):
    results_of(tmp_path, ("Decision", "how to go on", {"bench": False, "says": "chunk is wrong"}))
    ran = []
    monkeypatch.setattr(gpu_check, "child", lambda part, *_, **__: ran.append(part) or 0)
    options = ["day", "--dry-run", "--output", str(tmp_path), "--minutes", "1"]
    assert gpu_check.main(options) == 0
    assert ran == ["kernels", "train", "profile", "train", "tune"]
    assert "no bench: chunk is wrong" in capsys.readouterr().out
    monkeypatch.setattr(gpu_check, "child", lambda *_, **__: 2)
    assert gpu_check.main([*options, "--call", "3"]) == 2


def test_parts_follow_what_the_tests_decided_and_log_what_ends_them(tmp_path, monkeypatch):
    def failing(*_):
        raise RuntimeError(os.environ[correctness.PTXAS])

    ran = []
    unpacked = bundle.Unpacked(ptxas="/bin/true", notes=["a note"])
    (tmp_path / "manifest.json").touch()
    monkeypatch.setenv(correctness.PTXAS, "")
    monkeypatch.delenv(correctness.PTXAS)  # and restored as it was
    monkeypatch.setattr(bundle, "unpack", lambda folder, say: unpacked)
    monkeypatch.setattr(bundle, "make", lambda folder, minutes: ran.append(minutes) or 0)
    monkeypatch.setattr(correctness, "run_tests", lambda *x: ran.append(x[-1]))
    monkeypatch.setattr(gpu_check, "run_part", failing)
    results_of(tmp_path, ("Decision", "how to go on", {"assembler": "newer"}), card=standin.NAME)
    options = ["--dry-run", "--output", str(tmp_path), "--bundle", str(tmp_path)]
    with pytest.raises(RuntimeError, match="/bin/true"):
        gpu_check.main(["kernels", "bench", *options])
    assert "RuntimeError: /bin/true" in (tmp_path / "log.txt").read_text()
    assert gpu_check.main(["bundle", *options]) == 0
    assert ran == ["/bin/true", 30.0]


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path):
    card = dry(tmp_path, seconds=1.0)
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    with pytest.raises(subprocess.TimeoutExpired):
        card.python(["-c", program])
    assert card.python(["-c", "print('one'); print('two')"], A="1") == (0, "two")
    assert card.python(["-c", "raise SystemExit(3)"]) == (3, "")
    with pytest.raises(OutOfTime), limited(0.05):
        time.sleep(30)


# ------------------------------------------------------------------------------------------------ the bundle


def fake_bundle(folder, key):
    """A bundle with a peer of one module, a ptxas that says its version, and a cache of one kernel."""
    folder.mkdir()
    with zipfile.ZipFile(folder / "peer-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("nalanda_test_peer.py", "THERE = True\n")
    (folder / "ptxas.xz").write_bytes(lzma.compress(b"#!/bin/sh\necho release 13.4, V13.4.92\n"))
    entry = folder.parent / "entries" / "KEY"
    entry.mkdir(parents=True)
    for name in ("states.cubin", "states.json", "states.tmp"):
        (entry / name).write_text("{}")
    bundle.pack(entry.parent, folder / "cache.tar.xz")
    manifest = {"made": "today", "triton": "3.6.0", "key": key}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_a_bundle_unpacks_once_and_only_for_its_triton(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(bundle, "cache_folder", lambda: tmp_path / "cache")
    made = fake_bundle(tmp_path / "bundle", "another")
    found = bundle.unpack(made, lambda text: None)
    assert found.notes == ["compiled kernels left out: they are for Triton 3.6.0"]
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(bundle, "triton_hash", lambda: "another")
    for _ in range(2):
        found = bundle.unpack(made, lambda text: None)
        assert not found.notes
        assert sorted(x.name for x in (tmp_path / "cache" / "KEY").iterdir()) == [
            "states.cubin",
            "states.json",
        ]
    monkeypatch.setenv(correctness.PTXAS, found.ptxas)
    assert gpu_check.assembler() == "13.4.92"
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "there")
    found.add_peers()
    assert importlib.import_module("nalanda_test_peer").THERE
    assert os.environ["PYTHONPATH"] == f"there{os.pathsep}{found.peers}"
    (made / "ptxas.xz").write_bytes(lzma.compress(b"no program"))
    (tmp_path / "nalanda-today" / "ptxas").unlink()
    assert bundle.unpack(made, lambda text: None).notes == ["the bundle's ptxas does not run here"]


def test_a_bundle_is_made_in_steps(tmp_path, monkeypatch, capsys):
    asked = []

    def download(wheel, folder):
        asked.append(wheel)
        name = {
            "fla-core==0.6.0": "fla_core-0.6.0-py3",
            "flash-linear-attention==0.6.0": "flash_linear_attention-0.6.0-py3",
        }
        with zipfile.ZipFile(folder / f"{name.get(wheel, 'nvcc')}-none-any.whl", "w") as file:
            file.writestr("nvidia/cu13/bin/ptxas", "#!/bin/sh\n")

    monkeypatch.setattr(bundle, "download", download)
    monkeypatch.setattr(
        bundle, "finished", lambda name, program, environment, end: "newer" not in name
    )
    for _ in range(2):
        assert bundle.make(tmp_path / "made", minutes=1.0) == 0
    assert len(asked) == 3, "what is there is kept"
    manifest = json.loads((tmp_path / "made" / "manifest.json").read_text())
    assert manifest["key"] == bundle.triton_hash()
    assert len(manifest["left"]) == 3
    assert "the same command goes on" in capsys.readouterr().out
    monkeypatch.setattr(bundle, "LARGEST", 10)
    assert bundle.make(tmp_path / "made", minutes=0.0) == 1


def test_a_job_of_the_bundle_ends_in_time():
    environment = dict(os.environ)
    now = time.monotonic()
    assert bundle.finished("job", ["-c", "print(1)"], environment, now + 60)
    assert not bundle.finished("job", ["-c", "raise SystemExit(2)"], environment, now + 60)
    assert not bundle.finished("job", ["-c", "import time; time.sleep(60)"], environment, now + 1)
    assert not bundle.finished("job", ["-c", ""], environment, now)


@pytest.mark.slow
def test_kernels_are_compiled_for_an_absent_card(tmp_path):
    """What the bench launches lies in the cache, with its launchers where this Triton has them."""
    fake_bundle(tmp_path / "bundle", "")
    environment = bundle.unpack_for_compilation(tmp_path / "bundle", tmp_path)
    program = "import sys; from gpu import precompile, bench, standin; precompile.start()\n"
    program += "with standin.cuda(): print(bench.block_case(precompile.Compiling('cpu'), T=2048))"
    variables = environment | {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "errors" not in done.stdout
    kernels = {x.name for x in (tmp_path / "cache").rglob("*.cubin")}
    assert kernels == {"forward_kernel.cubin", "backward_kernel.cubin"}
    assert not list((tmp_path / "cache").rglob("*.ttir"))


# ----------------------------------------------------------------------------------------------- measurements


def test_one_side_that_fails_leaves_the_others(tmp_path, cuda):
    def wrong(x):
        raise RuntimeError("no kernel")

    def forward_only(x):
        return x.detach() * 2

    sides = {"ours": wrong, "peer": lambda x: 2 * x, "peer_fused": forward_only}
    values = bench.compare(dry(tmp_path), sides, [(torch.ones(3, requires_grad=True),)], 0.0)
    assert values["peer_both"] > 0
    assert values["both"] is None
    assert values["errors"]["ours"] == "RuntimeError: no kernel"
    assert "peer_fused, backward" in values["errors"]


def test_the_ratio_is_to_the_faster_peer_and_the_floor_to_the_bytes(monkeypatch, tmp_path):
    sides = dict.fromkeys(("ours", "peer", "peer_fused"), lambda x: 2 * x)
    monkeypatch.setattr(
        Card, "times", lambda *_: ({"ours": 2.0, "peer": 6.0, "peer_fused": 3.0}, {})
    )
    monkeypatch.setattr(Card, "bandwidth", 1e3)
    monkeypatch.setattr(Card, "rate", 1.0)
    x = torch.ones(
        5, requires_grad=True
    )  # forward: 20 bytes in, 20 out; backward: both again, and the gradient
    values = bench.compare(dry(tmp_path), sides, [(x,)], flops=0.0)
    assert values["ratio"] == 1.5
    assert values["floor"] == pytest.approx(100.0)
    assert values["of_floor"] == pytest.approx(50.0)
    assert values["difference"] == 0


def test_loss_curves():
    values = train.compare_curves([3.0, 2.0, 1.0], [3.0, 2.5, 1.25])
    assert (values["steps"], values["torch"], values["triton"], values["difference"]) == (
        3,
        1.0,
        1.25,
        0.5,
    )


def test_a_profile_counts_each_kernel_once():
    def row(key, microseconds, kind, annotation=False):
        return SimpleNamespace(
            key=key,
            self_device_time_total=microseconds,
            count=4,
            device_type=kind,
            is_user_annotation=annotation,
        )

    rows = [
        row("aten::mm", 900.0, DeviceType.CPU),
        row("gemm", 900.0, DeviceType.CUDA),
        row("states", 1100.0, DeviceType.CUDA),
        row("Optimizer.step", 5000.0, DeviceType.CUDA, annotation=True),
    ]
    assert train.of_a_step(rows, steps=2) == {
        "device": 1.0,
        "launches": 4,
        "top": "states 0.55, gemm 0.45",
    }


# ----------------------------------------------------------------------------------------------------- tuning


def rows():
    row = {"itemsize": 2, "features": 128, "BV": 64, "num_warps": 4}
    return {"states": [dict(row)], "chunk": [{"itemsize": 2, "features": 128, "BT": 64}]}


def jobs_on(kernels, *, wrong=(), broken=()):
    """Times of a machine that is fastest at BT = 32, BV = 32 and 8 warps."""

    def job():
        row, BT = kernels["states"][0], kernels["chunk"][0]["BT"]
        if row["BV"] in broken:
            raise RuntimeError("out of resource: shared memory")
        ms = 1 + abs(BT - 32) + abs(row["BV"] - 32) + abs(row["num_warps"] - 8)
        return float(ms), [torch.full((3,), 2.0 if row["num_warps"] in wrong else 1.0)]

    return lambda itemsize, features: [job] if (itemsize, features) == (2, 128) else []


def chosen(kernels):
    return kernels["chunk"][0]["BT"], kernels["states"][0]["BV"], kernels["states"][0]["num_warps"]


def test_tuning_takes_what_is_fastest_and_right():
    kernels = rows()
    said = list(tune.improve(kernels, jobs_on(kernels), lambda: False))
    assert chosen(kernels) == (32, 32, 8)
    assert said[0] == "128 features of 2 bytes: 69.000 ms"
    assert "  chunk BT=32: 37.000 ms" in said
    kernels = rows()
    list(tune.improve(kernels, jobs_on(kernels, wrong=(8,), broken=(32,)), lambda: False))
    assert chosen(kernels) == (32, 16, 4)


def test_tuning_stops_in_time():
    kernels, asked = rows(), []

    def late():
        asked.append(1)
        return len(asked) > 4

    said = list(tune.improve(kernels, jobs_on(kernels), late))
    assert chosen(kernels) == (32, 16, 4)  # three for BT and one for BV
    assert said[-1] == "out of time at states, 128 features of 2 bytes"


def test_the_written_table_is_read_as_the_shipped_one(tmp_path, monkeypatch):
    shipped = json.loads(Path(common.__file__).with_name("blocks.json").read_text())
    shipped["sm_90"] = {
        name: tune.spread(name, "sm_90", common.variants) for name in shipped["sm_80"]
    }
    sizes = {name: common.blocks(name, 2, 200, "sm_90") for name in shipped["sm_80"]}
    tune.write_blocks(shipped, tmp_path / "blocks.json")
    monkeypatch.setenv(common.BLOCKS, str(tmp_path / "blocks.json"))
    common._table.cache_clear()
    try:
        assert common._table() == shipped
        assert {name: common.blocks(name, 2, 200, "sm_90") for name in sizes} == sizes
    finally:
        monkeypatch.undo()
        common._table.cache_clear()
