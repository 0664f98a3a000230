"""`make gpu-check` and `nalanda bench kernels --tune` without a GPU: everything but measuring."""

import importlib.util
import json
import time
from pathlib import Path

import pytest
import torch
from nalanda_kernels import tune
from nalanda_kernels.triton import common

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "kernels" / "gpu_check.py")
assert _spec is not None
assert _spec.loader is not None
gpu_check = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(gpu_check)
Card, Case = gpu_check.Card, gpu_check.Case


def results_of(folder, *rows, card="NVIDIA H200"):
    """Results of one run with (group, name, values) in it."""
    results = gpu_check.Results(folder)
    results.begin({"card": card, "date": "2026-01-01", "triton": "3.7.1", "dry": False})
    for group, name, values in rows:
        results.add("bench", Case(group, name, lambda card: {}), values)
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


def test_a_dry_run_measures_every_kind_of_case_and_writes_no_table(tmp_path, capsys):
    arguments = ["bench", "train", "--dry-run", "--output", str(tmp_path)]
    assert gpu_check.main(arguments) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["runs"][0]["dry"]
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    values = {(figure["group"], figure["name"]): figure["values"] for figure in found["figures"]}
    card = Card("cpu", dry=True)
    assert set(values) == {(c.group, c.name) for p in ("bench", "train") for c in gpu_check.CASES[p](card)}
    assert not [name for name, x in values.items() if "errors" in x], "a case that fails even in torch"
    for (group, name), x in values.items():
        for key in {"Recurrences": ("forward", "both", "ratio", "floor"), "Decoding": ("share",)}.get(
            group, ()
        ):
            assert x[key] > 0, (name, key)
        if group in ("Recurrences", "Other kernels"):  # both sides compute the same
            assert x["difference"] < 1e-2, name
    trained = values["Training", "nala_gated_deltanet_340m, T = 32"]
    assert min(trained[key] for key in ("tokens_per_second", "mfu", "fed", "fed_ratio")) > 0
    assert "error" not in capsys.readouterr().out.lower()


def test_dry_figures_stay_out_of_the_repository(capsys):
    with pytest.raises(SystemExit):
        gpu_check.main(["--dry-run"])
    assert "another folder with --output" in capsys.readouterr().err


def test_kernel_tests_run_in_a_process_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (tmp_path / "test_kernels_good.py").write_text(
        """# kernel_device
import os, pytest
def test_device(): assert os.environ["NALANDA_TEST_DEVICE"] == "cpu"
def test_compiled(): assert "TRITON_INTERPRET" not in os.environ
@pytest.mark.parametrize("n", [1, 2])
def test_bad(n): assert n == 1
def test_skipped(): pytest.skip()
"""
    )
    (tmp_path / "test_kernels_interpreted.py").write_text("def test_nothing(): pass\n")
    results = results_of(tmp_path, card="a CPU, dry")
    results.runs[0]["dry"] = True
    gpu_check.run_part("kernels", Card("cpu", dry=True, tests=tmp_path), results, minutes=1)
    good, interpreted = (figure["values"] for figure in results.figures)
    assert good == {"passed": 3, "failed": 1, "skipped": 1, "names": "test_bad[2]"}
    assert "import kernel_device" in interpreted["errors"]["all"]


def test_figures_add_up_and_the_newest_counts(tmp_path):
    name = "delta rule, K = V = 128, T = 2048"
    results_of(tmp_path, ("Recurrences", name, {"ratio": 1.0, "both": 2.0}))
    results_of(
        tmp_path,
        ("Recurrences", name, {"ratio": 1.5, "both": 1.25}),
        ("Loss curves", "demo.yaml, bf16", {"steps": 100}),
    )
    kept = json.loads((tmp_path / "results.json").read_text())
    assert [figure["values"]["ratio"] for figure in kept["figures"][:2]] == [1.0, 1.5]
    text = (tmp_path / "RESULTS.md").read_text()
    row = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
    assert row == [f"| {name} | 1.25 | 1.50× | 2 |"]
    assert line_of(text, "demo.yaml, bf16") == "| demo.yaml, bf16 | 100 | 2 |"


def test_targets_are_hit_missed_or_not_measured(tmp_path):
    train = "nala_gated_deltanet_340m, T = 2048"
    results_of(
        tmp_path,
        ("Recurrences", "delta rule, K = V = 128, T = 2048", {"ratio": 1.2}),
        ("Training", train, {"ratio": 0.949, "mfu": 0.5}),
        ("Decoding", "NaLa + Gated DeltaNet, batch 1", {"errors": {"all": "RuntimeError: a | b"}}),
    )
    text = (tmp_path / "RESULTS.md").read_text()
    assert line_of(text, "delta rule, K = V = 128, T = 2048: peer / ours").endswith(
        "| ≥ 1.20× | 1.20× | hit |"
    )
    assert line_of(text, f"{train}: ours / fla's model").endswith("| ≥ 0.95× | 0.95× | missed |")
    assert line_of(text, f"{train}: MFU").endswith("| ≥ 45% | 50% | hit |")
    assert line_of(text, f"{train}: ours / fla's kernels").endswith("| ≥ 1.25× | – | not measured |")
    assert line_of(text, "NaLa + Gated DeltaNet, batch 1: share").endswith("| ≥ 60% | – | not measured |")
    assert line_of(text, "NaLa + Gated DeltaNet, batch 1 | all").endswith("| RuntimeError: a / b |")


def test_the_table_of_nothing_says_so(tmp_path):
    assert gpu_check.main(["table", "--output", str(tmp_path)]) == 0
    text = (tmp_path / "RESULTS.md").read_text()
    cases = [case for part in gpu_check.PARTS for case in gpu_check.CASES[part](Card())]
    for case in cases:
        assert f"| {case.name} | not measured |" in text
    assert not (tmp_path / "results.json").exists()
    assert {case.group for case in cases} == gpu_check.COLUMNS.keys()
    assert {recipe.stem[:-5] for recipe in (ROOT / "recipes").glob("*_340m.yaml")} == set(gpu_check.RECIPES)


def test_a_part_ends_in_time_and_resumes_where_it_stopped(tmp_path, monkeypatch, capsys):
    done = []

    def run(name, card):
        done.append(name)
        if name == "b" and done.count("b") == 1:
            time.sleep(30)
        if name == "c":
            raise RuntimeError("the reason\nand more")
        return {"value": 1.0}

    cases = [Case("Ceilings", name, lambda card, name=name: run(name, card)) for name in "abc"]
    monkeypatch.setitem(gpu_check.CASES, "bench", lambda card: cases)
    results, card = results_of(tmp_path, card="a CPU, dry"), Card("cpu", dry=True)
    results.runs[0]["dry"] = True
    start = time.monotonic()
    gpu_check.run_part("bench", card, results, minutes=0.2 / 60)
    assert time.monotonic() - start < 10
    assert done == ["a", "b"]
    assert capsys.readouterr().out.endswith("not reached; run it again for b; c\n")
    gpu_check.run_part("bench", card, results, minutes=1)
    assert done == ["a", "b", "b", "c", "a"]  # cases without a figure come first
    assert results.figures[2]["values"] == {"errors": {"all": "RuntimeError: the reason"}}
    cases[0].seconds = 0.1
    monkeypatch.setattr(cases[0], "run", lambda card: time.sleep(30))
    gpu_check.run_part("bench", card, results, minutes=1, only="a")
    assert results.figures[-1]["values"] == {"errors": {"all": "more than 0 s"}}


def test_one_side_that_fails_leaves_the_others():
    def wrong(x):
        raise RuntimeError("no kernel")

    def forward_only(x):
        return x.detach() * 2

    sides = {"ours": wrong, "peer": lambda x: 2 * x, "peer_fused": forward_only}
    values = gpu_check.compare(Card("cpu", dry=True), sides, [(torch.ones(3, requires_grad=True),)], 0.0)
    assert values["peer_both"] > 0
    assert values["both"] is None
    assert values["errors"]["ours"] == "RuntimeError: no kernel"
    assert "peer_fused, backward" in values["errors"]


def test_the_ratio_is_to_the_faster_peer_and_the_floor_to_the_bytes(monkeypatch):
    sides = dict.fromkeys(("ours", "peer", "peer_fused"), lambda x: 2 * x)
    monkeypatch.setattr(Card, "times", lambda *_: ({"ours": 2.0, "peer": 6.0, "peer_fused": 3.0}, {}))
    monkeypatch.setattr(Card, "bandwidth", 1e3)
    monkeypatch.setattr(Card, "rate", 1.0)
    x = torch.ones(
        5, requires_grad=True
    )  # forward: 20 bytes in, 20 out; backward: both again, and the gradient
    values = gpu_check.compare(Card("cpu", dry=True), sides, [(x,)], flops=0.0)
    assert values["ratio"] == 1.5
    assert values["floor"] == pytest.approx(100.0)
    assert values["of_floor"] == pytest.approx(50.0)
    assert values["difference"] == 0


def test_loss_curves():
    values = gpu_check.compare_curves([3.0, 2.0, 1.0], [3.0, 2.5, 1.25])
    assert (values["steps"], values["torch"], values["triton"], values["difference"]) == (3, 1.0, 1.25, 0.5)


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
    shipped["sm_90"] = {name: tune.spread(name, "sm_90", common.variants) for name in shipped["sm_80"]}
    sizes = {name: common.variants(name, 2, 200, "sm_90") for name in shipped["sm_80"]}
    tune.write_blocks(shipped, tmp_path / "blocks.json")
    monkeypatch.setenv(common.BLOCKS, str(tmp_path / "blocks.json"))
    common._table.cache_clear()
    try:
        assert common._table() == shipped
        assert {name: common.variants(name, 2, 200, "sm_90") for name in sizes} == sizes
    finally:
        monkeypatch.undo()
        common._table.cache_clear()
