"""Kernels compiled for absent GPUs, in processes without Triton's interpreter."""

import json
import os
import subprocess
import sys

import pytest
from nalanda_kernels import static

TOYS = """
import json, sys
import torch, triton, triton.language as tl
from nalanda_kernels import static

@triton.jit
def product(x, y, N: tl.constexpr):
    i = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    a = tl.load(x + i)
    tl.store(y + i, tl.dot(a, a).to(y.dtype.element_ty))

@triton.jit
def crowded(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    tl.store(y + i, a - tl.sum(a, 0))

tuned = triton.autotune([triton.Config({}, num_warps=w) for w in (1, 8)], key=[])(crowded)

def call():
    x, y = torch.zeros(64, 64, dtype=torch.bfloat16), torch.ones(64, 64, dtype=torch.bfloat16)
    product[(1,)](x, y, N=64, num_warps=4)
    crowded[(1,)](x.float(), y.float(), N=8192, num_warps=1)
    assert y.eq(1).all(), "it was launched"

def tune():
    tuned[(1,)](torch.zeros(8192), torch.zeros(8192), N=8192)

rows = static.compile_calls(sys.argv[1], [("toys", call), ("tuned", tune)])
try:
    static.compile_calls("sm_80", [])
except ValueError as error:
    print(json.dumps([rows, str(error)]))
"""


def run(*arguments: str, **options) -> subprocess.CompletedProcess:
    environment = {x: y for x, y in os.environ.items() if x != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=600, **options
    )


@pytest.mark.slow
def test_toys(tmp_path):
    file = tmp_path / "toys.py"
    file.write_text(TOYS)
    done = run(str(file), "sm_90")
    assert done.returncode == 0, done.stderr
    rows, second = json.loads(done.stdout)
    product, crowded, tuned = rows
    assert [(x["job"], x["kernel"]) for x in rows] == [
        ("toys", "product"),
        ("toys", "crowded"),
        ("tuned", "crowded"),
    ]
    assert product["arch"] == "sm_90"
    assert product["tensor_cores"] == "wgmma"
    assert product["shared"] >= 64 * 64 * 2
    assert product["spilled"] == 0
    assert crowded["spilled"] > 0, "256 values a thread"
    assert crowded["registers"] == 255
    assert crowded["tensor_cores"] == ""
    assert (tuned["num_warps"], tuned["spilled"]) == (8, 0), "the configuration that spills less"
    assert second == "arch='sm_80': this process compiles for sm_90; start another process"


@pytest.mark.slow
def test_flagship_within_its_limits():
    done = run("-m", "nalanda_kernels.static", "--arch", "sm_90", "--case", "flagship", "--check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "flagship" in done.stdout


ROW = {"arch": "sm_90", "job": "deltanet", "kernel": "states", "registers": 200, "spilled": 8, "shared": 1000,
       "tensor_cores": "wgmma"}  # fmt: skip


def recorded() -> dict:
    return static.record([ROW], static.record([ROW | {"kernel": "other"}], {}, peer=True))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"registers": 201}, "sm_90 deltanet, states: 201 registers, recorded 200"),
        ({"shared": 1001}, "sm_90 deltanet, states: 1001 shared, recorded 1000"),
        ({"tensor_cores": "mma.sync"}, "sm_90 deltanet, states: mma.sync, recorded wgmma"),
        ({"tensor_cores": ""}, "sm_90 deltanet, states: no tensor cores, recorded wgmma"),
        ({"kernel": "new", "spilled": 0}, "sm_90 deltanet, new: no limit is recorded"),
    ],
)
def test_a_figure_above_its_limit_is_one_line(change, line):
    assert static.violations([ROW | change], recorded()) == [line]


def test_limits_themselves_and_better_figures_hold():
    assert static.violations([ROW], recorded()) == []
    better = {"registers": 100, "spilled": 0, "shared": 0, "tensor_cores": "tcgen05"}
    assert static.violations([ROW | better], recorded()) == []


def test_spills_are_held_to_the_peers():
    table = static.record([ROW | {"spilled": 9}], recorded())
    found = static.violations([ROW | {"spilled": 9}], table)
    assert found == ["sm_90 deltanet: 9 bytes spilled, the peer spills 8"]


def test_what_the_card_has_is_held_whatever_is_recorded():
    row = ROW | {"arch": "sm_80", "shared": 166_913, "spilled": 0}
    found = static.violations([row], static.record([row], {}))
    assert found == ["sm_80 deltanet, states: 166913 bytes of shared memory, the card has 166912"]


def test_registers_are_held_only_under_the_triton_that_recorded_them():
    table = recorded() | {"triton": "0.0"}
    assert static.violations([ROW | {"registers": 255}], table) == []
    assert static.violations([ROW | {"shared": 1001}], table) != []


def test_recording_replaces_a_job_and_keeps_the_others():
    table = static.record([ROW | {"job": "other"}], recorded())
    table = static.record([ROW | {"kernel": "renamed"}], table)
    assert set(table["limits"]["sm_90"]) == {"deltanet", "other"}
    assert set(table["limits"]["sm_90"]["deltanet"]) == {"renamed"}


def test_the_file_has_a_line_a_kernel(tmp_path, monkeypatch):
    monkeypatch.setattr(static, "LIMITS", tmp_path / "limits.json")
    static.write_limits(recorded())
    assert static.limits() == recorded()
    line = '"states": {"registers": 200, "shared": 1000, "spilled": 8, "tensor_cores": "wgmma"}'
    assert line in static.LIMITS.read_text()


def test_bad_calls_say_what_to_change(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="arch='sm_70': unknown; choose one of sm_80, sm_90, sm_100"):
        static.compile_calls("sm_70", [])
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match=r"TRITON_INTERPRET: .* unset it"):
        static.compile_calls("sm_90", [])
