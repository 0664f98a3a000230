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
from types import SimpleNamespace

import gpu_check
import pytest
import torch
from gpu import bench, bundle, correctness, curves, keep, results, small, train, tuned
from gpu.card import OUT_OF_TIME, STUBS, Card, Case, stop
from gpu.results import Results
from gpu.train import Trained, Training

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
        (["--former", "nowhere", "bench"], "--former nowhere: no folder"),
        (["bundle", "--text", "web=nowhere"], "--text web=nowhere: no token set"),
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
    outcomes = [
        x["values"]["outcome"] for x in Results(tmp_path, []).figures if x["group"] == "Parts"
    ]
    assert outcomes == ["out of time; the same command goes on with slow", "done"]

    # Without time no case runs: the part has a line that says so, and is an error.
    capsys.readouterr()
    assert gpu_check.main([*arguments, "--minutes", "-1"]) == gpu_check.NO_FIGURE
    said = "no figure; out of time; the same command goes on with slow; right; wrong"
    assert said in capsys.readouterr().out
    assert said in (tmp_path / "results.jsonl").read_text()


def test_another_call_goes_on_with_the_former_ones_files(tmp_path, monkeypatch):
    ran = []

    def run(card: Card, name: str) -> dict:
        ran.append(name)
        if ran == ["a", "b"]:
            raise subprocess.TimeoutExpired("x", 1)
        return {"value": 1.0}

    cases = [Case("Group", name, lambda card, name=name: run(card, name)) for name in "ab"]
    monkeypatch.setitem(gpu_check.PARTS, "bench", lambda card: cases)
    first, second = tmp_path / "first", tmp_path / "second"
    arguments = ["bench", "--dry-run", "--output"]
    assert gpu_check.main([*arguments, str(first)]) == 0
    for file in first.iterdir():
        file.chmod(0o444)  # as they come back
    assert gpu_check.main([*arguments, str(second), "--former", str(first)]) == 0
    assert ran == ["a", "b", "b", "a"]
    former = (first / "results.jsonl").read_text()
    assert (second / "results.jsonl").read_text().startswith(former)


def test_make_hands_its_variables_on():
    # Not as a part of the make that runs the tests, which would hand on its own flags.
    outside = {name: x for name, x in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}

    def command(*arguments: str) -> str:
        done = subprocess.run(
            ["make", "-n", *arguments],
            cwd=ROOT,
            env=outside,
            capture_output=True,
            text=True,
            check=True,
        )
        return " ".join(done.stdout.split()[2:])

    variables = ("BUNDLE=b", "OUTPUT=o", "FORMER=f", "MINUTES=4")
    said = command("gpu-day", "CALL=2", *variables)
    assert said == "day --bundle b --call 2 --output o --former f --minutes 4"
    said = command("gpu-check", "PART=bench", *variables)
    assert said == "bench --bundle b --output o --former f --minutes 4"
    said = command("gpu-bundle", "BUNDLE=b", "TEXT=web=x small=y")
    assert said == "bundle --bundle b --text web=x --text small=y"


def test_a_model_to_keep_takes_only_the_figures_of_a_former_call(tmp_path, monkeypatch):
    """Its own files fill the folder: with tests.jsonl and the others it would not come back whole."""
    former = dry(tmp_path / "former").output
    results_of(former).put(Case("Group", "a"), {"value": 1.0})
    for name in ("log.txt", "tests.jsonl", "profile.txt", tuned.NAME):
        (former / name).write_text("{}")
    monkeypatch.setattr(gpu_check, "run_day", lambda options: 0)
    for call, more in (("7", set()), ("2", {"tests.jsonl", "profile.txt", tuned.NAME})):
        out = tmp_path / call
        arguments = ["day", "--dry-run", "--call", call, "--former", str(former)]
        assert gpu_check.main([*arguments, "--output", str(out)]) == 0
        assert {x.name for x in out.iterdir()} == {*results.FIGURES} | more


def test_what_comes_back_is_few_files_of_a_limited_size(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "BYTES", 30)
    (tmp_path / "log.txt").write_text("".join(f"line {i}\n" for i in range(100)))
    assert results.fit(tmp_path) is None
    assert (tmp_path / "log.txt").read_text() == "line 97\nline 98\nline 99\n"
    (tmp_path / "blocks.json").write_text("x" * 31)
    (tmp_path / "runs").mkdir()
    problem = results.fit(tmp_path)
    assert problem is not None
    assert problem.endswith("3 entries, 8 come back; too large: blocks.json, runs")
    (tmp_path / "runs").rmdir()
    (tmp_path / "blocks.json").unlink()
    for i in range(8):
        (tmp_path / f"{i}.xml").touch()
    assert "9 entries, 8 come back" in str(results.fit(tmp_path))


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
        results_of(tmp_path).put(Case(gpu_check.PART, command[2]), {"outcome": "done"})
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(gpu_check.subprocess, "run", run)
    options = ["day", "--dry-run", "--output", str(tmp_path)]
    assert gpu_check.main(options) == 0
    assert ran == ["kernels", "train", "curves", "small", "tune", "keep"]
    assert '"outcome": "left out: chunk fails"' in (tmp_path / "results.jsonl").read_text()
    assert "no bench: chunk fails" in capsys.readouterr().out
    assert gpu_check.main([*options, "--call", "3"]) == 0
    assert ran[6:] == ["train"]


@pytest.mark.parametrize("killed", [False, True])
def test_a_part_that_leaves_no_line_is_an_error_of_the_day(tmp_path, monkeypatch, capsys, killed):
    def run(command: list[str], timeout: float):
        if killed:
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(gpu_check.subprocess, "run", run)
    options = ["day", "--dry-run", "--call", "3", "--output", str(tmp_path)]
    assert gpu_check.main(options) == (gpu_check.LOST if killed else gpu_check.NO_FIGURE)
    (figure,) = Results(tmp_path, []).figures
    assert (figure["group"], figure["name"]) == ("Parts", "train")
    assert figure["values"]["outcome"] in capsys.readouterr().err


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
    assert "assert 2 == 1" in (tmp_path / "tests.jsonl").read_text()

    # A second call tests what has no result, and decides as before.
    (tmp_path / "test_kernels_more.py").write_text("def test_nothing(): pass\n")
    again = results_of(tmp_path)
    correctness.run_tests(dry(tmp_path, tests=tmp_path), again, minutes=2)
    names = [x["name"] for x in again.figures[len(results.figures) :]]
    assert names == ["more", "how to go on"]
    assert again.figures[-1]["values"] == values["how to go on"]


SLOW = """
import pathlib, pytest, time
@pytest.mark.parametrize("n", [1, 2, 3])
def test_chunks(n):
    if n == 3 and not pathlib.Path({ready!r}).exists():
        time.sleep(600)
"""


def test_tests_that_ended_in_time_count_and_the_next_call_leaves_them_out(tmp_path, monkeypatch):
    """The first call's time ends when two of three tests have ended."""
    ready, file = tmp_path / "ready", tmp_path / "tests.jsonl"
    (tmp_path / "test_kernels_chunk.py").write_text(SLOW.format(ready=str(ready)))
    monkeypatch.setattr(correctness, "choose_options", lambda card: ["-q"])
    python = Card.python

    def in_time(card: Card, arguments: list[str], **variables: str) -> tuple[int, str]:
        process = card.start(arguments, **variables)
        while not file.exists() or len(file.read_text().splitlines()) < 2:
            assert process.poll() is None
        stop([process])
        raise subprocess.TimeoutExpired("x", 1)

    monkeypatch.setattr(Card, "python", in_time)
    first = results_of(tmp_path)
    correctness.run_tests(dry(tmp_path, tests=tmp_path), first, minutes=2)
    late = first.figures[0]["values"]
    assert late == {"outcome": OUT_OF_TIME, "tests": 2, "failing so far": ""}
    assert "chunk was not tested" in first.figures[-1]["values"]["decision"]

    monkeypatch.setattr(Card, "python", python)
    ready.touch()
    again = results_of(tmp_path)
    correctness.run_tests(dry(tmp_path, tests=tmp_path), again, minutes=2)
    assert again.figures[-2]["values"]["failing"] == ""
    assert len(file.read_text().splitlines()) == 3, "two tests did not run again"


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


STEPS = [
    {"step": step, "loss": 9.0 - step, "mfu": 0.3, "tokens_per_second": 100.0 * step}
    for step in range(1, 17)
]


def trained(monkeypatch, ended: Trained) -> None:
    monkeypatch.setattr(train, "text_of", lambda card, name: Path("text"))
    monkeypatch.setattr(train, "run_trainer", lambda *_, **__: ended)


def test_a_run_on_a_card(tmp_path, monkeypatch):
    trained(monkeypatch, Trained(STEPS, {"executors": {"delta_rule": "triton"}}))
    card = Card("cuda", output=tmp_path)
    card.newest = lambda group, name: {"tokens/s": 2700.0} if name == "other" else {}
    values = train.train_once(card, run=Training(train.FLAGSHIP, beside="other"))
    assert (values["tokens/s"], values["least"], values["most"]) == (1350, 1100, 1600)
    assert values["beside / this"] == 2
    assert values["loss at step 10"] == -1
    assert values["served by"] == "triton"


@pytest.mark.parametrize(
    ("backend", "served", "wrong"),
    [
        ("fla", {"delta_rule": "triton"}, "delta_rule: triton served, fla was asked"),
        ("auto", {"delta_rule": "torch"}, "delta_rule: torch served, triton was asked"),
        ("fla", None, "fla was asked, and run.json does not say what served"),
    ],
)
def test_what_another_backend_served_is_an_error(tmp_path, monkeypatch, backend, served, wrong):
    trained(monkeypatch, Trained(STEPS, {"executors": served}))
    run = Training(train.FLAGSHIP, backend=backend)
    values = train.train_once(Card("cuda", output=tmp_path), run=run)
    assert values == {"errors": {"backend": wrong}}


def test_a_run_that_is_cut_has_the_figures_of_its_steps(tmp_path, monkeypatch):
    facts = {"executors": {"delta_rule": "triton"}}
    trained(monkeypatch, Trained(STEPS[:12], facts, OUT_OF_TIME))
    values = train.train_once(Card("cuda", output=tmp_path), run=Training(train.FLAGSHIP))
    assert values["tokens/s"] == 1150
    assert values["errors"] == {"run": OUT_OF_TIME}
    trained(monkeypatch, Trained([], {}, OUT_OF_TIME))
    values = train.train_once(Card("cuda", output=tmp_path), run=Training(train.FLAGSHIP))
    assert values == {"errors": {"run": OUT_OF_TIME}}


def test_no_tokenizer_is_trained_on_a_card(tmp_path):
    with pytest.raises(RuntimeError, match="needs the text of a bundle: give --bundle"):
        train.text_of(Card("cuda", output=tmp_path), "web")
    (tmp_path / "texts" / "demo").mkdir(parents=True)
    card = Card("cuda", output=tmp_path, bundle=tmp_path)
    assert train.text_of(card, "small") == tmp_path / "texts" / "demo"
    (tmp_path / "texts" / "web").mkdir()
    assert train.text_of(card, "small") == tmp_path / "texts" / "web"


def test_recipes_of_runs_are_there():
    for name, run in train.RUNS.items():
        assert (ROOT / "recipes" / f"{run.recipe}.yaml").is_file()
        assert run.beside in ("", *train.RUNS), name
    assert {*train.REHEARSED, *train.TARGETS} <= train.RUNS.keys()


@pytest.mark.parametrize("lifted", [False, True])
def test_the_stub_refuses_as_fla_does(lifted):
    program = "import fla, torch; from gpu.bench import lift_guard; "
    program += "lift_guard(); " if lifted else ""
    program += "x = torch.ones(1, requires_grad=True); fla._Guarded.apply(x).sum().backward()"
    path = os.pathsep.join([str(STUBS), *sys.path])
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True)
    assert (done.returncode == 0) == lifted
    refusal = b"RuntimeError: Triton >= 3.4.0 and < 3.7.1 on Hopper GPUs produces incorrect results"
    assert lifted or refusal in done.stderr


@pytest.mark.parametrize(
    ("recipe", "backend", "guard", "lifted"),
    [
        ("fla/gated_deltanet_340m", "", "", True),
        ("gated_deltanet_340m", "fla", "", True),
        ("gated_deltanet_340m", "", "", False),
        ("fla/gated_deltanet_340m", "", "1", False),
    ],
)
def test_the_guard_is_lifted_in_the_process_that_trains(
    monkeypatch, recipe, backend, guard, lifted
):
    called = []
    monkeypatch.setitem(sys.modules, "nalanda_cli", SimpleNamespace(main=called.append))
    monkeypatch.setattr(train, "lift_guard", lambda: called.append("lifted"))
    monkeypatch.setenv("NALANDA_BACKEND", backend)
    monkeypatch.setenv("NALANDA_GUARD", guard)
    train.main([f"recipes/{recipe}.yaml", "train.steps=2"])
    assert called == ["lifted"] * lifted + [["train", f"recipes/{recipe}.yaml", "train.steps=2"]]


def test_processes_may_save_before_they_are_killed(tmp_path, monkeypatch):
    program = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); "
    program += "print('ready', flush=True); signal.pause()"
    card = dry(tmp_path)
    process = card.start(["-c", program])
    while "ready\n" not in card.log.read_text():
        assert process.poll() is None
    stop([process])
    assert process.returncode == 143
    monkeypatch.setattr("gpu.card.GRACE", 0)
    stop([stubborn := card.start(["-c", "import signal; signal.sigwait([signal.SIGINT])"])])
    assert stubborn.returncode in (-9, -15)


# ------------------------------ curves and small models


def test_a_curve_goes_on_from_its_checkpoint(tmp_path, monkeypatch):
    """The first launch ends by its time, the second 20 steps later; another recipe is compared at common steps."""
    lines = [{"step": i, "loss": 3.0 if i <= 100 else 2.5} for i in range(1, 121)]
    lines += [{"step": i, "val_loss": 4.0 - i / 100} for i in (25, 50, 75, 100, 120)]
    facts = {"executors": {"delta_rule": "triton"}, "saved": 100}
    launched = []

    def run_trainer(card, recipe, folder, *settings, **options):
        launched.append(settings[-1])
        if len(launched) == 1:
            return Trained(lines[:100], facts, OUT_OF_TIME)
        return Trained(lines, facts)

    monkeypatch.setattr(curves, "run_trainer", run_trainer)
    monkeypatch.setattr(curves, "text_of", lambda card, name: Path("text"))
    card = Card("cuda", output=tmp_path)
    values = curves.train_for(card, recipe=train.FLAGSHIP, minutes=5.0, resume=True)
    assert launched == ["train.steps=100000", "train.steps=120"]
    assert values["resumed from step"] == 100
    assert values["jump"] == -0.5
    assert "errors" not in values

    card.newest = lambda group, name: {"validation": [[25, 4.0], [50, 3.0]]}
    values = curves.train_for(card, recipe=train.GATED, minutes=2.0, resume=False)
    assert values["less the flagship's"] == 0.5


def test_a_curve_without_a_checkpoint_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(curves, "run_trainer", lambda *_, **__: Trained([], {}, OUT_OF_TIME))
    monkeypatch.setattr(curves, "text_of", lambda card, name: Path("text"))
    card = Card("cuda", output=tmp_path)
    values = curves.train_for(card, recipe=train.FLAGSHIP, minutes=5.0, resume=True)
    assert values["errors"] == {"run": OUT_OF_TIME, "resume": "no checkpoint was saved"}


def test_the_demo_is_beside_the_cpus_losses(tmp_path, monkeypatch):
    lines = [json.dumps({"step": i, "loss": 2.0}) for i in (10, 20)]
    (tmp_path / "demo.jsonl").write_text("\n".join(lines))
    ours = [{"step": 10, "loss": 2.02}, {"step": 20, "loss": 1.99}, {"step": 30, "loss": 9.0}]
    ended = Trained(ours, {"executors": {"delta_rule": "triton"}})
    monkeypatch.setattr(curves, "run_trainer", lambda *_, **__: ended)
    monkeypatch.setattr(curves, "text_of", lambda card, name: Path("text"))
    values = curves.compare_demo(Card("cuda", output=tmp_path, bundle=tmp_path))
    assert values["agreement"] == pytest.approx(0.99)
    assert values["steps"] == 2
    (tmp_path / "demo.jsonl").unlink()
    values = curves.compare_demo(Card("cuda", output=tmp_path, bundle=tmp_path))
    assert values == {"errors": {"CPU": "the bundle has no demo.jsonl; make it again"}}


@pytest.mark.parametrize("cut", [False, True])
def test_a_model_to_keep_falls_behind_its_steady_part(tmp_path, monkeypatch, cut):
    """The second launch is a fifth of all steps. A call that was cut in it goes on with as many."""
    launched, brought = [], []
    lines = [
        {"step": i, "tokens": 100 * i, "loss": 3.0, "tokens_per_second": 9.0} for i in (10, 800)
    ]
    lines += [{"step": 800, "val_loss": 2.5}]

    def run_trainer(card, recipe, folder, *settings):
        launched.append((settings[-1], round((card.end - start) / 60, 1)))
        facts = {"executors": {"delta_rule": "triton"}, "saved": 800}
        return Trained(lines, facts, OUT_OF_TIME if len(launched) == 1 and not cut else "")

    monkeypatch.setattr(keep, "run_trainer", run_trainer)
    monkeypatch.setattr(keep, "bring_weights", brought.append)
    monkeypatch.setattr(keep, "text_of", lambda card, name: tmp_path / "web")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(keep.time, "monotonic", lambda: start)
    for name in ("web", "python"):
        (tmp_path / name).mkdir()
        index = {"train": {"tokens": 40_000}, "tokenizer": {"vocab_size": 99}}
        (tmp_path / name / "index.json").write_text(json.dumps(index))
    start = 1000.0
    card = Card("cuda", output=tmp_path / "out", end=start + 60 * 8 + keep.AFTER)
    if cut:
        run = keep.folder_of(card) / "run"
        run.mkdir(parents=True)
        (run / "run.json").write_text(json.dumps({"state": "stopped", "steps": 1000}))

    values = keep.train_model(card)
    second = ("train.steps=1000", 8.0)
    assert launched == ([second] if cut else [("train.steps=100000", 6.0), second])
    assert len(brought) == (not cut), "what is there before the rate falls"
    assert (values["steps"], values["epochs"], values["tokens/s"]) == (800, 1.0, 9.0)
    assert values["validation loss"] == 2.5
    assert "errors" not in values
    assert any(
        "{name: python, source: " in x and "weight: 40000" in x for x in keep.settings_of(card)
    )

    # Finished: nothing is launched any more.
    run = keep.folder_of(card) / "run"
    run.mkdir(parents=True, exist_ok=True)
    (run / "run.json").write_text(json.dumps({"state": "finished", "steps": 1000}))
    count = len(launched)
    assert keep.train_model(card) == {"errors": {"run": "no step"}}, "this folder has no metrics"
    assert len(launched) == count


def test_weights_come_back_whole_in_few_files(tmp_path, monkeypatch):
    """The model of 30 M at its size: with the figures and the log they are eight files."""
    from nalanda_kernels import keep_model_types
    from transformers import AutoModelForCausalLM

    from nalanda.config.load import load_config
    from nalanda.model import NalandaConfig, NalandaForCausalLM

    model = NalandaForCausalLM(NalandaConfig(**load_config(keep.RECIPE).model))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    card = Card("cuda", output=tmp_path / "out")

    def export(run: Path, folder: Path, replace: bool) -> None:
        model.save_pretrained(folder)
        (folder / "run.json").write_text('{"step": 7}')

    def load(folder: str, dtype: str = "auto"):
        keep_model_types()
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), None

    monkeypatch.setattr("nalanda.train.export.export", export)
    monkeypatch.setattr("nalanda.inference.load.load_model", load)
    with pytest.raises(RuntimeError, match="training must run first"):
        keep.bring_weights(card)
    (keep.folder_of(card) / "run" / "checkpoints").mkdir(parents=True)
    (keep.folder_of(card) / "run" / "metrics.jsonl").touch()
    (card.output / "model-00001-of-00009.safetensors").touch()  # of another checkpoint
    values = keep.bring_weights(card)
    assert (values["step"], values["files"]) == (7, 4)
    for name in results.FIGURES:
        (card.output / name).touch()
    assert results.fit(card.output) is None

    back = tmp_path / "back"
    shutil.unpack_archive(card.output / "model.tar.xz", back, filter="data")
    for file in card.output.glob("*.safetensors"):
        shutil.copy(file, back / keep.RECIPE)
    again = load(str(back / keep.RECIPE))[0].state_dict()
    for name, x in model.state_dict().items():  # a few stay in fp32
        assert torch.equal(again[name], x.to(again[name].dtype)), name
    assert again["lm_head.weight"].dtype == torch.bfloat16


class Ended:
    """A process that has ended at once."""

    def __init__(self, returncode: int = 0):
        self.returncode = returncode

    def poll(self) -> int:
        return self.returncode

    def terminate(self) -> None:
        pass

    def wait(self, timeout: float | None = None) -> int:
        return self.returncode


def test_small_models_go_on_run_by_run(tmp_path, monkeypatch):
    """A run of the first call fails. The second call trains that one, and then the seeds at the best rate."""
    started: list[str] = []
    losses = {0.002: 3.0, 0.004: 2.0, 0.008: 4.0}

    def start(card, arguments, **variables):
        settings = dict(x.partition("=")[::2] for x in arguments if "=" in x)
        folder, rate = Path(settings["output_dir"]), float(settings["optim.lr"])
        started.append(f"{folder.name} {rate}")
        if len(started) == 1:
            return Ended(1)
        folder.mkdir(parents=True)
        lines = [
            {"step": 600, "loss": 1.0},
            {"step": 600, "val_loss": losses[rate] + len(started) / 100},
        ]
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
        facts = {"executors": {"delta_rule": "triton"}}
        (folder / "run.json").write_text(json.dumps(facts))
        return Ended()

    monkeypatch.setattr(Card, "start", start)
    monkeypatch.setattr(small, "text_of", lambda card, name: Path("text"))
    monkeypatch.setattr(small, "MIXERS", ("gated_deltanet",))
    monkeypatch.setattr(small, "SEEDS", (1, 2))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    card = Card("cuda", output=tmp_path / "out")
    first = results_of(card.output)
    assert small.run_small(card, first) == []
    assert len(started) == 9 + 6
    again = results_of(card.output)
    assert small.run_small(card, again) == []
    assert started[15:] == [started[0]], "one run had no figure"
    wide = [name for name in started if "width-512" in name]
    assert all(name.endswith(" 0.004") for name in wide if "SiLU" not in name)
    gaps = again.newest(Case(small.GROUP, small.gap_name("gated_deltanet")), FACTS["card"])[
        "values"
    ]
    assert gaps["seeds"] == 2
    assert gaps["NaLa"] == pytest.approx(0.01)
    assert gaps["NaLa, learnt level, deviation"] == pytest.approx(0)


def test_small_models_that_the_time_cuts_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(Card, "start", lambda *_, **__: Ended(143))
    monkeypatch.setattr(small, "text_of", lambda card, name: Path("text"))
    monkeypatch.setattr(small, "MIXERS", ("gated_deltanet",))
    card = Card("cuda", output=tmp_path, end=0.0)
    left = small.run_small(card, results_of(tmp_path))
    assert len(left) == 9 + 9
    assert OUT_OF_TIME in (tmp_path / "results.jsonl").read_text()


@pytest.mark.slow
def test_a_dry_day_runs_every_part(tmp_path):
    """With a bundle. Stubs stand for fla, and refuse what fla refuses on a card with Triton 3.6."""
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
            assert x["peer, training's forward ms"] > 0, name
            refused = x.get("errors", {})
            assert refused.keys() == ({"FlashQLA"} if bench.PACKED in name else set()), name
    toy = values["Toy, error of the initial state's gradient", "delta rule"]
    assert toy["ours"] < 0.005
    assert toy["same"] == 5
    training = {name: x for (group, name), x in values.items() if group == "Training"}
    for name in train.REHEARSED:
        assert training[name]["tokens/s"] > 0
        assert "errors" not in training[name], name
    assert training[f"{train.FLAGSHIP}, {train.FLA_ALONE}"]["served by"] == "fla"
    for name in train.REFUSED:
        assert "tokens/s" not in training[name], name
    theirs, ours = (training[name]["errors"] for name in train.REFUSED)
    assert "Triton >= 3.4.0 and < 3.7.1 on Hopper GPUs produces incorrect" in theirs["run"]
    assert ours == {"backend": "delta_rule: torch served, fla was asked"}
    curve = values["Curves", train.FLAGSHIP]
    assert (curve["resumed from step"], curve["steps"]) == (4, 6)
    assert "less the flagship's" in values["Curves", train.GATED]
    assert values["Curves", "demo.yaml in bf16"]["agreement"] > 0.99
    assert values[small.GROUP, small.gap_name("gated_deltanet")]["seeds"] == 1
    kept = values[keep.GROUP, "training"]
    assert (kept["steps"], kept["tokens"]) == (5, 640)
    assert values[keep.GROUP, "weights"]["step"] == 5
    scores = values[keep.GROUP, "scores"]
    assert scores["bits a byte, by source"].keys() == {"web", "python"}
    assert min(scores["bits a byte"], scores["bigrams"]) > 1
    assert values[keep.GROUP, "samples"].keys() == {*keep.PROMPTS}
    for part in gpu_check.PARTS:
        assert values["Parts", part]["figures"] > 0
    assert results.fit(tmp_path / "out") is None
    assert ("Block sizes", "tune") in values
    decoded = values["Decoding", train.FLAGSHIP]
    assert min(decoded["eager, ms"], decoded["graph, ms"]) > 0
    assert values["Head loss", "beside torch"]["difference"] < 1e-2
    alone = values["Kernels alone, ms", train.FLAGSHIP]
    assert {"prepare", "states", "outputs", "state_gradients", "input_gradients"} <= alone.keys()
    assert min(alone.values()) > 0
    assert len(values["Profile of a step, ms", train.FLAGSHIP]) == 11
    assert "aten::mm" in (tmp_path / "out" / "profile.txt").read_text()
    assert (tmp_path / "triton" / "KEY" / "states.cubin").exists()


# ------------------------------ the peer's sizes


def tuned_cache(folder: Path, **contents: str) -> Path:
    for key, content in contents.items():
        (folder / key).mkdir(parents=True)
        (folder / key / "kernel.autotune.json").write_text(content)
        (folder / key / "kernel.cubin").touch()
    return folder


def test_tuned_sizes_are_a_cards_own(tmp_path):
    file = tmp_path / tuned.NAME
    tuned.pack(tuned_cache(tmp_path / "none"), file, "NVIDIA H200")
    assert not file.exists()
    tuned.pack(tuned_cache(tmp_path / "one", A="1"), file, "NVIDIA H200")
    tuned.pack(tuned_cache(tmp_path / "two", B="2"), file, "NVIDIA H200")
    tuned.pack(tuned_cache(tmp_path / "three", C="3"), file, "NVIDIA H100")

    cache = tuned_cache(tmp_path / "cache", A="its own")
    assert tuned.unpack(file, cache, "NVIDIA H200") == 2
    files = {x.relative_to(cache).as_posix(): x.read_text() for x in cache.rglob("*.json")}
    assert files == {"A/kernel.autotune.json": "its own", "B/kernel.autotune.json": "2"}
    assert tuned.unpack(tmp_path / "absent.json", cache, "NVIDIA H200") == 0

    other = tmp_path / "other.json"
    tuned.write(other, {"NVIDIA H200": {"D/kernel.autotune.json": "4"}})
    tuned.join([file, other], tmp_path / "all.json")
    joined = tuned.read(tmp_path / "all.json")
    assert {card: len(files) for card, files in joined.items()} == {
        "NVIDIA H200": 3,
        "NVIDIA H100": 1,
    }
    tuned.join([], tmp_path / "nothing.json")
    assert not (tmp_path / "nothing.json").exists()


def test_a_call_reads_the_sizes_of_the_former_one(tmp_path, monkeypatch, capsys):
    """Two machines, each with a cache of its own. The first tunes; it is cut behind the first case."""
    asked = []

    def tune(card: Card) -> dict:
        entry = tuned.triton_cache() / "KEY" / "kernel.autotune.json"
        asked.append(entry.exists())
        entry.parent.mkdir(parents=True, exist_ok=True)
        entry.write_text("times")
        return {"value": 1.0}

    def lose(card: Card) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setitem(gpu_check.PARTS, "bench", lambda card: [Case("Group", "a", tune)])
    arguments = ["bench", "--dry-run", "--output"]
    with monkeypatch.context() as patch:
        patch.setattr(tuned, "triton_cache", lambda: tmp_path / "first")
        patch.setattr(Card, "synchronize", lose)
        assert gpu_check.main([*arguments, str(tmp_path / "a")]) == gpu_check.LOST
    monkeypatch.setattr(tuned, "triton_cache", lambda: tmp_path / "second")
    former = ["--former", str(tmp_path / "a")]
    assert gpu_check.main([*arguments, str(tmp_path / "b"), *former]) == 0
    assert asked == [False, True]
    assert "tuned.json: sizes of 1 kernels and shapes" in capsys.readouterr().out


TUNED_PROGRAM = """
import torch, triton
import triton.language as tl
from gpu import precompile

precompile.start()

def configure(B):
    return triton.Config({"B": B}, num_warps=B // 8)

@triton.autotune([configure(B) for B in (16, 32)], key=["n"], cache_results=True)
@triton.jit
def kernel(x, n, B: tl.constexpr):
    tl.store(x + tl.arange(0, B), 0.0)

def bench(*arguments, config, **options):
    print("timed", config.kwargs["B"])
    return [1.0 / config.kwargs["B"]] * 3

kernel._bench = bench
kernel[(1,)](torch.zeros(32), 32)
print("chosen", kernel.best_config.kwargs["B"])
"""


@pytest.mark.slow
def test_tritons_autotuner_reads_what_came_back(tmp_path):
    """Triton's own: a process times each configuration, another with an empty cache and the file times none."""
    program = tmp_path / "tuned_kernel.py"
    program.write_text(TUNED_PROGRAM)
    file = tmp_path / tuned.NAME

    def run(name: str) -> str:
        cache = tmp_path / name
        tuned.unpack(file, cache, "NVIDIA H200")
        folders = [ROOT / "tools", ROOT / "src", ROOT / "kernels", ROOT / "lab"]
        variables = {
            "PYTHONPATH": os.pathsep.join(map(str, folders)),
            "TRITON_CACHE_DIR": str(cache),
        }
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | variables
        done = subprocess.run(
            [sys.executable, program], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        tuned.pack(cache, file, "NVIDIA H200")
        return done.stdout

    assert run("first") == "timed 16\ntimed 32\nchosen 32\n"
    assert run("second") == "chosen 32\n"


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
    asked, ran, tokenizers = [], [], []
    records = tmp_path / "lab" / "records" / "h200" / tuned.NAME
    records.parent.mkdir(parents=True)
    tuned.write(records, {"NVIDIA H200": {"KEY/kernel.autotune.json": "times"}})
    monkeypatch.setattr(bundle, "ROOT", tmp_path)

    def download(packages: list[str], folder: Path) -> None:
        asked.extend(packages)
        with zipfile.ZipFile(folder / "some-none-any.whl", "w") as file:
            file.writestr("nvidia/cu13/bin/ptxas", "#!/bin/sh\n")

    def python(card, program, path=(), **variables):
        if "PTXAS" in str(variables):
            raise subprocess.TimeoutExpired("x", 1)
        ran.append(program[1])
        if "prepare" in program:
            make_token_set(Path(program[5]))
            tokenizers.append(program[6:])
        if "gpu.train" in program:
            folder = Path(program[-1].removeprefix("output_dir="))
            folder.mkdir()
            (folder / "metrics.jsonl").write_text('{"step": 10, "loss": 7.5}\n')
        return 0, "done"

    monkeypatch.setattr(bundle, "download", download)
    monkeypatch.setattr(Card, "python", python)
    web = make_token_set(tmp_path / "web")
    for _ in range(2):
        texts = bundle.read_texts([f"web={web}"])
        bundle.make_bundle(tmp_path / "made", minutes=1.0, texts=texts)
    assert len(asked) == 3, "the second call downloads nothing"
    assert (ran.count("nalanda_cli"), ran.count("gpu.train")) == (2, 1)
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    bundle.unpack_files(tmp_path / "made", unpacked)
    card = Card("cuda", output=tmp_path / "out", bundle=unpacked)
    for name, source in (("web", "web"), ("small", "web"), ("demo", "text")):
        assert (train.text_of(card, name) / "index.json").read_text() == source
    assert tokenizers == [["--tokenizer", str(web / "tokenizer")], []], "python, then the demo"
    assert tuned.read(tmp_path / "made" / tuned.NAME) == tuned.read(records)
    assert train.read_lines(unpacked / "demo.jsonl") == [{"step": 10, "loss": 7.5}]
    said = capsys.readouterr().out
    assert "MB; texts: demo, python, web" in said
    manifest = json.loads((tmp_path / "made" / "manifest.json").read_text())
    assert manifest["key"] == bundle.triton_hash()
    again = ", ".join(f"{name}, newer ptxas" for name in correctness.AGAIN)
    assert f"not finished: {again}; the same command goes on" in said

    # Another text of the demo needs another curve; a large bundle says so.
    monkeypatch.setattr(bundle, "TARGET", 10)
    bundle.make_bundle(tmp_path / "made", 1.0, {"demo": web})
    assert (ran.count("nalanda_cli"), ran.count("gpu.train")) == (2, 2)
    assert "more than the 0 it should have" in capsys.readouterr().out


def make_token_set(folder: Path) -> Path:
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "tokenizer" / "tokenizer.json").touch()
    (folder / "index.json").write_text(folder.name)
    return folder


@pytest.mark.slow
def test_kernels_are_compiled_for_an_absent_card(tmp_path):
    program = "from gpu import precompile, bench; from gpu.card import Card; precompile.start(); "
    program += "card = Card('cpu'); cases = bench.bench_cases(card); "
    program += "print(next(x for x in cases if x.group == 'Recurrences').run(card))"
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
