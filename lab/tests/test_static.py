"""Kernels compiled for absent GPUs, in processes without Triton's interpreter."""

import json
import os
import subprocess
import sys

import pytest
from nalanda_lab.kernels import hazards, static

TOYS = """
import json, sys
import torch, triton, triton.language as tl
from nalanda_lab.kernels import hazards, static

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

@triton.jit
def turned(x, y, N: tl.constexpr):
    i = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    a = tl.load(x + i)
    b = tl.trans(tl.dot(a, a).to(a.dtype))
    tl.store(y + i, tl.dot(b, a).to(y.dtype.element_ty))

@triton.jit
def widened(x, y, z, STEPS: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    sum = tl.zeros([N, N], tl.float32)
    for step in range(STEPS):
        a = tl.load(x + i[:, None] * STEPS * N + step * N + i[None, :]).to(y.dtype.element_ty)
        b = tl.load(y + (step * N + i[:, None]) * N + i[None, :])
        sum = tl.dot(a, b, sum)
    tl.store(z + i[:, None] * N + i[None, :], sum)

@triton.jit
def shared(x, y, z, STEPS: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    sum, rows = tl.zeros([N, N], tl.float32), tl.zeros([N], tl.float32)
    for step in range(STEPS):
        at = (step * N + i[:, None]) * N + i[None, :]
        a, b = tl.load(x + at), tl.load(y + at)
        sum = tl.dot(a, tl.trans(b), sum)
        rows += tl.sum(b.to(tl.float32), 1)
    tl.store(z + i[:, None] * N + i[None, :], sum + rows[:, None])

tuned = triton.autotune([triton.Config({}, num_warps=w) for w in (1, 8)], key=[])(crowded)

def call():
    x, y = torch.zeros(64, 64, dtype=torch.bfloat16), torch.ones(64, 64, dtype=torch.bfloat16)
    product[(1,)](x, y, N=64, num_warps=4)
    crowded[(1,)](x.float(), y.float(), N=8192, num_warps=1)
    turned[(1,)](x, y, N=64, num_warps=4)
    a, b = torch.zeros(128, 512, dtype=torch.int8), torch.zeros(512, 128, dtype=torch.bfloat16)
    widened[(1,)](a, b, torch.zeros(128, 128), STEPS=4, N=128, num_warps=8, num_stages=2)
    c = torch.zeros(4 * 64, 64, dtype=torch.bfloat16)
    shared[(1,)](c, c, torch.zeros(64, 64), STEPS=4, N=64, num_warps=4, num_stages=2)
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
        [sys.executable, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        **options,
    )


@pytest.mark.slow
def test_toys(tmp_path):
    file = tmp_path / "toys.py"
    file.write_text(TOYS)
    done = run(str(file), "sm_90")
    assert done.returncode == 0, done.stderr
    rows, second = json.loads(done.stdout)
    product, crowded, turned, widened, shared, tuned = rows
    assert [(x["job"], x["kernel"]) for x in rows] == [
        ("toys", "product"),
        ("toys", "crowded"),
        ("toys", "turned"),
        ("toys", "widened"),
        ("toys", "shared"),
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
    assert [product[x] for x in static.HAZARDS] == [0, 0, 0, 0]
    assert turned["transposed"] == 1
    assert turned["register_a"] > 0
    assert turned["overwritten"] == 0
    assert widened["register_a"] > 0
    assert widened["overwritten"] > 0, (
        "the pipeliner loads the next A while the last product reads it"
    )
    assert shared["refilled"] == 1, "a tile of a product that is summed, too"
    assert second == "arch='sm_80': this process compiles for sm_90; start another process"


@pytest.mark.slow
def test_flagship_within_its_limits():
    done = run(
        "-m", "nalanda_lab.kernels.static", "--arch", "sm_90", "--case", "flagship", "--check"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "flagship" in done.stdout


# ----------------------------------------------------------------------------------------------- hazards

WGMMA = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r1,%r2,%r3,%r4}, "


def test_products_with_a_in_registers_are_counted():
    ptx = f"{WGMMA}%rd1, %rd2, p, 1, 1;\n{WGMMA}{{%r5,%r6,%r7,%r8}}, %rd2, p, 1, 1;\nwgmma.commit_group;"
    assert hazards.register_a(ptx) == 1


PRODUCT = "HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR8].tnspB, R24{}"
WRITE, WAIT = "LDS.64 R90, [R9+0x100]", "WARPGROUP.DEPBAR.LE gsb0, 0x{}"
END, OTHER = ", gsb0", "HGMMA.64x64x16.F32.BF16 R56, gdesc[UR12], R56, gsb0"


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ([PRODUCT.format(END), WAIT.format(0), WRITE], 0),
        ([PRODUCT.format(END), WRITE, WAIT.format(0)], 1),
        ([PRODUCT.format(END), "IMAD.WIDE R92, R8, 0x4, R6", "STS [R88], R89", WAIT.format(0)], 0),
        ([PRODUCT.format(END), "IMAD.WIDE.U32 R86, P0, R8, R9, R6", "EXIT"], 0),
        ([PRODUCT.format(END), "ISETP.NE.AND P0, PT, R88, RZ, PT", "EXIT"], 0),
        ([PRODUCT.format(END), "SHFL.BFLY PT, R91, R3, 0x1, 0x1f", WAIT.format(0)], 1),
        ([PRODUCT.format(""), PRODUCT.format(END), WAIT.format(0), WRITE], 0),
        ([PRODUCT.format(END), WAIT.format(1), WRITE], 1),  # one group may still run: the product's
        (
            [PRODUCT.format(END), OTHER, WAIT.format(1), WRITE],
            0,
        ),  # one may run, and two were started
        (
            [
                ".L_x_0:",
                WRITE,
                PRODUCT.format(END),
                WAIT.format(1),
                "@P0 BRA `(.L_x_0)",
                WAIT.format(0),
            ],
            1,
        ),
        ([".L_x_0:", WRITE, PRODUCT.format(END), WAIT.format(0), "@P0 BRA `(.L_x_0)", "EXIT"], 0),
        ([PRODUCT.format(END), "BRA `(.L_x_1)", WRITE, ".L_x_1:", WAIT.format(0)], 0),
    ],
)
def test_registers_written_before_the_wait(code, count):
    lines = (
        x if x.endswith(":") else f"        /*{i:04x}*/                   {x} ;"
        for i, x in enumerate(code)
    )
    assert hazards.overwritten("\n".join(lines)) == count


LOAD = "%a = tt.load %p : tensor<64x64x!tt.ptr<bf16>>"
DOT = "%s = tt.dot %a, %a, %zero, inputPrecision = tf32 : tensor<64x64xbf16> * tensor<64x64xbf16> -> f32"
CAST = "%c = arith.truncf %s : tensor<64x64xf32> to tensor<64x64xbf16> loc(#loc1)"
TRANS = "%t = tt.trans {} {{order = array<i32: 1, 0>}} : tensor<64x64xbf16> -> tensor<64x64xbf16>"
LAST = "%o = tt.dot {}, {}, {} : tensor<64x64xbf16> * tensor<64x64xbf16> -> tensor<64x64xf32>"


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ([DOT, CAST, TRANS.format("%c"), LAST.format("%t", "%a", "%zero")], 1),
        ([DOT, CAST, TRANS.format("%c"), LAST.format("%a", "%t", "%zero")], 1),
        ([DOT, CAST, LAST.format("%c", "%a", "%zero")], 0),
        ([TRANS.format("%a"), LAST.format("%t", "%a", "%zero")], 0),
        ([DOT, CAST, TRANS.format("%c"), LAST.format("%a", "%a", "%t")], 0),  # a sum, no operand
        (
            [
                DOT,
                TRANS.format("%s"),
                "%u = arith.mulf %t, %b : f32",
                LAST.format("%u", "%a", "%zero"),
            ],
            1,
        ),
        ([DOT, TRANS.format("%s").replace("1, 0>", "0, 1>"), LAST.format("%t", "%a", "%zero")], 0),
        (
            [
                "%r:2 = scf.for %i = %c0 to %n step %c1 iter_args(%x = %a, %y = %zero) -> (f32, f32) : i32 {",
                DOT,
                "scf.yield %a, %s : f32, f32 loc(#loc2)",
                "}",
                TRANS.format("%r#1"),
                LAST.format("%t", "%a", "%zero"),
            ],
            1,
        ),
        (
            [
                "%r:2 = scf.for %i = %c0 to %n step %c1 iter_args(%x = %a, %y = %zero) -> (f32, f32) : i32 {",
                TRANS.format("%x"),
                LAST.format("%t", "%a", "%zero"),
                "scf.yield %o, %a : f32, f32",
                "}",
            ],
            1,
        ),
        (
            [
                "%r = scf.if %b -> (f32) {",
                "scf.yield %a : f32",
                "} else {",
                DOT,
                "scf.yield %s : f32",
                "}",
                TRANS.format("%r"),
                LAST.format("%t", "%a", "%zero"),
            ],
            1,
        ),
    ],
)
def test_products_of_a_products_transpose(code, count):
    assert hazards.transposed("\n".join(f"    {x}" for x in [LOAD, *code])) == count


# A loop that copies a later step's tile: in TTGIR the tile, its places and who reads it; in PTX what stands between.
TTGIR = """
    %none = arith.constant -1 : i32
    %first = arith.constant {first} : i32
    %tile = ttg.local_alloc : () -> !ttg.memdesc<{places}x64x64xbf16, #shared, #smem, mutable>
    %r = scf.for %i = %a to %b step %c iter_args(%fill = %first, %read = %none) -> (i32, i32) : i32 {{
      %read_1 = arith.addi %read, %one : i32
      %read_2 = arith.select %last, %zero, %read_1 : i32
      %fill_1 = arith.addi %fill, %one : i32
      %fill_2 = arith.select %end, %zero, %fill_1 : i32
      %x = ttg.memdesc_index %tile[%read_2] : !ttg.memdesc
      %v = ttg.memdesc_trans %x {{order = array<i32: 1, 0>}} : !ttg.memdesc
      {body}
      scf.yield %fill_2, %read_2 : i32, i32
    }}
"""
FILL = """%y = ttg.memdesc_index %tile[%fill_2] : !ttg.memdesc
      %t = ttg.async_copy_global_to_local %p, %y mask %m
      %g = ttg.async_commit_group tokens %t"""
WARP_GROUP = "%s = ttng.warp_group_dot %q, %v, %sum {isAsync = true} : tensor"
OTHER_DOT = "%u = ttng.warp_group_dot %q, %q, %sum {isAsync = true} : tensor"
TCGEN05 = "ttng.tc_gen5_mma %q, %v, %s, %true, %true, %bar[%true] {is_async} : !ttg.memdesc"
COMMIT = "wgmma.commit_group.sync.aligned;"
COPY = "@%p3 cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10; cp.async.commit_group;"
AWAIT, BARRIER = "wgmma.wait_group.sync.aligned {};", "bar.sync 	0;"
SIGNAL = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r5];"
AWAIT_SIGNAL = "@!%p1 mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r5], %r6;"


def refilled(places: int, code: list[str], products: list[str], ahead: int | None = None) -> int:
    """ahead: how many steps before its reading a tile is copied, by default into the place of the step before."""
    first = (places - 1 if ahead is None else ahead) - 1
    order = [FILL, *products] if code[-1] == COMMIT else [*products, FILL]
    ttgir = TTGIR.format(places=places, first=first, body="\n".join(order))
    loop = ["$L__BB0_1:", *code, "@%p2 bra 	$L__BB0_1;", "ret;"]
    return hazards.refilled(ttgir, "\n".join(loop))


@pytest.mark.parametrize("places", [1, 2, 3])
@pytest.mark.parametrize(
    ("code", "count"),
    [
        ([COMMIT, AWAIT.format(0), BARRIER, COPY], 0),
        ([AWAIT.format(0), BARRIER, COPY, COMMIT], 0),  # it ends before the next step's copy
        ([AWAIT.format(0), COPY, BARRIER, COMMIT], 1),
        ([COMMIT, AWAIT.format(0), COPY], 1),
        ([COMMIT, BARRIER, COPY], 1),
    ],
)
def test_a_barrier_stands_between_the_wait_for_a_product_and_the_copy(places, code, count):
    assert refilled(places, code, [WARP_GROUP]) == count


@pytest.mark.parametrize(("places", "count"), [(1, 1), (2, 0), (3, 0)])
@pytest.mark.parametrize(
    "code", [[COMMIT, BARRIER, AWAIT.format(0), COPY], [COMMIT, AWAIT.format(0), COPY, BARRIER]]
)
def test_the_next_steps_barrier_is_early_enough_for_another_place(places, code, count):
    assert refilled(places, code, [WARP_GROUP]) == count


@pytest.mark.parametrize(
    ("places", "ahead", "count"), [(1, 1, 1), (2, 1, 0), (3, 2, 0), (2, 2, 1), (3, 1, 0)]
)
def test_a_product_may_run_on_while_another_place_is_filled(places, ahead, count):
    code = [COMMIT, AWAIT.format(1), BARRIER, COPY]
    assert refilled(places, code, [WARP_GROUP], ahead) == count


def test_only_products_that_read_the_tile_are_waited_for():
    code = [COMMIT, COMMIT, AWAIT.format(1), BARRIER, COPY]
    assert refilled(1, code, [WARP_GROUP, OTHER_DOT]) == 0
    assert refilled(1, code, [OTHER_DOT, WARP_GROUP]) == 1
    assert refilled(1, [COMMIT, AWAIT.format(0), COPY], [OTHER_DOT]) == 0


@pytest.mark.parametrize("places", [1, 2, 3])
@pytest.mark.parametrize(
    ("code", "waits", "count"),
    [
        ([SIGNAL, AWAIT_SIGNAL, BARRIER, COPY], "%bar", 0),
        ([SIGNAL, AWAIT_SIGNAL, COPY], "%bar", 1),
        ([SIGNAL, BARRIER, COPY], "%bar", 1),
    ],
)
def test_products_of_tcgen05(places, code, waits, count):
    wait = f"ttng.wait_barrier {waits}, %phase : !ttg.memdesc"
    assert refilled(places, code, [TCGEN05, wait]) == count


@pytest.mark.parametrize(("places", "count"), [(1, 1), (2, 0), (3, 0)])
def test_tcgen05_that_waits_for_the_step_before(places, count):
    wait = "ttng.wait_barrier %carried, %phase : !ttg.memdesc"
    assert refilled(places, [SIGNAL, AWAIT_SIGNAL, BARRIER, COPY], [TCGEN05, wait]) == count


def test_mma_sync_reads_registers():
    dot = "%s = tt.dot %q, %w, %sum : tensor<64x64xbf16> * tensor<64x64xbf16> -> tensor<64x64xf32>"
    mma = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1}, {%r1}, {%r2}, {%f1};"
    assert refilled(1, [mma, COPY], [dot]) == 0


def test_a_tile_counts_where_instructions_and_operations_differ():
    assert refilled(2, [COMMIT, COMMIT, AWAIT.format(0), BARRIER, COPY], [WARP_GROUP]) == 1


# ------------------------------------------------------------------------------------------------- loops

LOOPS = """
$L__BB0_1:
    add.f64 %fd1, %fd2, %fd3;
    @%p1 bra $L__BB0_1;
$L__BB0_2:
    cvt.f64.f32 %fd1, %f1;
    bar.sync 0;
    wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%f1}, %rd1, %rd2;
    barrier.cta.sync 1;
    @%p2 bra $L__BB0_2;
    bar.sync 0;
"""


def test_the_loop_with_products_is_counted():
    assert static._loop(LOOPS) == {"loop": 4, "fp64": 1, "barriers": 2}
    assert static._loop("bar.sync 0;") == {"loop": 0, "fp64": 0, "barriers": 0}


# ------------------------------------------------------------------------------------------------- limits

ROW = {
    "arch": "sm_90",
    "job": "deltanet",
    "kernel": "states",
    "registers": 200,
    "spilled": 8,
    "shared": 1000,
    "loop": 500,
    "fp64": 0,
    "barriers": 11,
    "register_a": 16,
    "overwritten": 0,
    "transposed": 0,
    "refilled": 0,
    "tensor_cores": "wgmma",
}


def recorded() -> dict:
    return static.record([ROW], static.record([ROW | {"kernel": "other"}], {}, peer=True))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"registers": 201}, "sm_90 deltanet, states: 201 registers, recorded 200"),
        ({"shared": 1001}, "sm_90 deltanet, states: 1001 shared, recorded 1000"),
        ({"loop": 501}, "sm_90 deltanet, states: 501 loop, recorded 500"),
        ({"fp64": 1}, "sm_90 deltanet, states: 1 fp64, recorded 0"),
        ({"barriers": 12}, "sm_90 deltanet, states: 12 barriers, recorded 11"),
        ({"register_a": 17}, "sm_90 deltanet, states: 17 register_a, recorded 16"),
        ({"overwritten": 1}, "sm_90 deltanet, states: 1 overwritten, recorded 0"),
        ({"transposed": 1}, "sm_90 deltanet, states: 1 transposed, recorded 0"),
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


@pytest.fixture
def triton_is(monkeypatch):
    return lambda version: monkeypatch.setattr(static, "triton_version", lambda: version)


def test_each_triton_has_limits_of_its_own(triton_is):
    table = recorded()
    triton_is("3.99")
    static.record([ROW | {"registers": 100, "spilled": 0}], table)
    assert static.violations([ROW], table) != []
    triton_is("3.100")  # unknown: held to the newest with limits, but for registers
    assert static.held_to(table) == "3.99"
    assert static.violations([ROW | {"spilled": 0}], table) == []
    assert static.violations([ROW], table) == ["sm_90 deltanet, states: 8 spilled, recorded 0"]
    assert static.held_to({}) is None


def test_limits_stand_for_both_tritons_and_allow_no_error():
    table = static.limits()["limits"]
    assert set(table) == {"3.6", "3.7"}
    text = static.LIMITS.read_text()
    assert "overwritten" not in text
    assert "transposed" not in text
    for figures in (*table.values(), static.limits()["peer"]):
        assert all(job in static.CASES for jobs in figures.values() for job in jobs)


def test_recording_replaces_a_job_and_keeps_the_others(triton_is):
    triton_is("3.7")
    table = static.record([ROW | {"job": "other"}], recorded())
    table = static.record([ROW | {"kernel": "renamed"}], table)
    assert set(table["limits"]["3.7"]["sm_90"]) == {"deltanet", "other"}
    assert set(table["limits"]["3.7"]["sm_90"]["deltanet"]) == {"renamed"}


def test_the_file_has_a_line_a_kernel(tmp_path, monkeypatch):
    monkeypatch.setattr(static, "LIMITS", tmp_path / "limits.json")
    static.write_limits(recorded())
    assert static.limits() == recorded()
    line = '"barriers": 11, "loop": 500, "register_a": 16, "registers": 200, "shared": 1000, "spilled": 8'
    assert f'"states": {{{line}' in static.LIMITS.read_text()


def test_bad_calls_say_what_to_change(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(
        ValueError,
        match="arch='sm_70': unknown; choose one of sm_75, sm_80, sm_89, sm_90, sm_100, sm_120",
    ):
        static.compile_calls("sm_70", [])
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match=r"TRITON_INTERPRET: .* unset it"):
        static.compile_calls("sm_90", [])
