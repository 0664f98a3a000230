"""The choice among backends, and FlashQLA's behind it."""

import json
import os
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import nalanda_kernels
import pytest
import torch
import torch.nn.functional as F
from kernel_device import interpreted_only
from nalanda_kernels import KERNELS, Kernel, Unsupported, fla, flash_qla, tune
from nalanda_kernels.triton import common

from nalanda import ops
from nalanda.model.feature_maps import build_feature_map

ROW = {"op": "delta_rule", "gated": True, "mapped": False, "K": 128, "V": 128}


def inputs(T: int = 70, K: int = 128, gated: bool = True, dtype=torch.bfloat16):
    """q, k, v, β and g or None, of one row and two heads."""
    generator = torch.Generator().manual_seed(T)
    q, k, v = (torch.randn(1, T, 2, K, generator=generator) for _ in range(3))
    beta, g = (torch.randn(1, T, 2, generator=generator) for _ in range(2))
    return (
        q.to(dtype),
        k.to(dtype),
        v.to(dtype),
        beta.sigmoid(),
        F.logsigmoid(g + 3) if gated else None,
    )


@pytest.fixture
def blocks(tmp_path, monkeypatch):
    """Writes a file of NALANDA_BLOCKS; without a text it is not there."""

    def write(text: str | None) -> None:
        file = tmp_path / "blocks.json"
        if text is not None:
            file.write_text(text)
        monkeypatch.setenv(common.BLOCKS, str(file))
        common._table.cache_clear()

    yield write
    monkeypatch.undo()
    common._table.cache_clear()


@pytest.fixture
def chosen(blocks):
    """Sets the measured choices, as rows of such a file."""
    return lambda *rows: blocks(json.dumps({common.architecture(): {"backends": rows}}))


@pytest.fixture
def register(monkeypatch):
    """Replaces the table of kernels by functions for CPU tensors, as {op: {backend: function}}."""
    module = ModuleType("fake_kernels")
    monkeypatch.setitem(sys.modules, "fake_kernels", module)

    def replace(table: dict, devices=("cpu",)) -> None:
        rows: dict[str, dict[str, Kernel]] = {}
        for op, functions in table.items():
            for name, function in functions.items():
                setattr(module, f"{op}_{name}", function)
                kernel = Kernel(f"fake_kernels:{op}_{name}", devices, "torch")
                rows.setdefault(op, {})[name] = kernel
        monkeypatch.setattr(nalanda_kernels, "KERNELS", rows)

    return replace


@pytest.mark.parametrize(
    ("T", "bounds", "options", "served"),
    [
        (64, None, {}, "b"),
        (64, None, {"gated": False}, "a"),  # no row: the order of KERNELS
        (64, None, {"K": 64}, "a"),
        (300, None, {}, "a"),  # the row of 4096
        (9000, None, {}, "a"),  # longer than every row: the longest
        (300, (0, 100, 200, 300), {}, "b"),  # sequences of 100 on the average
        (64, None, {"dtype": torch.float32}, "a"),  # calls of these kinds are not measured
    ],
)
def test_measured_backend_is_tried_first(T, bounds, options, served, chosen, register):
    short, long = (ROW | {"length": n, "backend": name} for n, name in ((128, "b"), (4096, "a")))
    chosen(short, long)
    tried = []
    functions = {name: lambda *x, n=name, **o: tried.append(n) for name in ("a", "b")}
    register({"delta_rule": functions})
    bounds = None if bounds is None else torch.tensor(bounds)
    nalanda_kernels.serve("delta_rule", "auto", "cpu", *inputs(T, **options), cu_seqlens=bounds)
    assert tried == [served]
    tried.clear()
    with nalanda_kernels.use_backend("a"):  # a backend that the user names comes first
        nalanda_kernels.serve("delta_rule", "auto", "cpu", *inputs(T, **options), cu_seqlens=bounds)
    assert tried == ["a"]


@pytest.mark.parametrize(
    ("change", "served"),
    [
        ({}, "flash_qla"),
        ({"B": 16}, "flash_qla"),
        ({"T": 8192}, "triton"),  # the rest has no fair record
        ({"T": 2049}, "triton"),
        ({"T": 1024}, "triton"),
        ({"B": 4}, "triton"),
        ({"B": 1, "T": 16384, "bounds": True}, "triton"),
        ({"K": 256}, "triton"),
        ({"V": 256}, "triton"),
        ({"gated": False}, "triton"),
        ({"mapped": True}, "triton"),
        ({"dtype": torch.float32}, "triton"),
        ({"allow_neg_eigval": True}, "triton"),
        ({"arch": "sm_100"}, "triton"),
        ({"installed": False}, "triton"),
    ],
    ids=str,
)
def test_flash_qla_is_taken_where_an_h200_found_it_faster(change, served, register, monkeypatch):
    call = {"B": 8, "T": 2048, "K": 128, "V": 128, "gated": True, "dtype": torch.bfloat16} | change
    tried: list[str] = []
    functions = {x: lambda *_, x=x, **__: tried.append(x) for x in ("triton", "flash_qla")}
    register({"delta_rule": functions}, devices=("cuda",))
    stub = nalanda_kernels.KERNELS["delta_rule"]["flash_qla"]
    needs = "torch" if call.get("installed", True) else "no_such_module"
    nalanda_kernels.KERNELS["delta_rule"]["flash_qla"] = replace(stub, needs=needs)
    monkeypatch.setattr(common, "architecture", lambda: call.get("arch", "sm_90"))

    heads = call["B"], call["T"], 8
    q, k = (torch.empty(*heads, call["K"], dtype=call["dtype"], device="meta") for _ in range(2))
    v = torch.empty(*heads, call["V"], dtype=call["dtype"], device="meta")
    beta, g = (torch.empty(*heads, device="meta") for _ in range(2))
    options = {"feature_map": SimpleNamespace(feature_dim=128)} if call.get("mapped") else {}
    options |= {"cu_seqlens": torch.arange(9) * 2048} if call.get("bounds") else {}
    options |= {"allow_neg_eigval": True} if call.get("allow_neg_eigval") else {}
    gate = g if call["gated"] else None
    nalanda_kernels.serve("delta_rule", "auto", "cuda", q, k, v, beta, gate, **options)
    assert tried == [served]


def test_calls_of_kinds_that_are_not_measured(chosen):
    chosen(ROW | {"length": 128, "backend": "b"})
    q, k, v, beta, g = inputs()
    assert nalanda_kernels.measured_backend("delta_rule", q, k, v, beta, g) == "b"
    assert (
        nalanda_kernels.measured_backend("delta_rule", q, k, v, beta, g, erase=None, write=None)
        == "b"
    )
    for name, x in (("erase", k), ("write", v)):
        assert nalanda_kernels.measured_backend("delta_rule", q, k, v, beta, g, **{name: x}) is None
    assert (
        nalanda_kernels.measured_backend("delta_rule", q, k, v, beta, g[..., None].expand(k.shape))
        is None
    )


def test_the_others_serve_what_a_named_backend_cannot(register):
    register({"delta_rule": {"a": print, "b": print}, "step": {"a": print}})

    def order(op: str, backend: str = "auto") -> list[str]:
        return nalanda_kernels.backends_for(op, backend, "cpu")

    assert order("delta_rule") == order("delta_rule", "a") == ["a", "b"]
    with nalanda_kernels.use_backend("b"):
        assert order("delta_rule") == ["b", "a"]
        assert order("step") == ["a"]  # it has none of its own
        assert order("delta_rule", "torch") == []


def test_the_interpreter_serves_only_calls_that_name_a_backend(register, monkeypatch):
    register({"step": {"a": print, "b": print}}, devices=("cuda",))
    monkeypatch.setattr(nalanda_kernels, "interpreting", lambda: True)
    assert nalanda_kernels.backends_for("step", "auto", "cpu") == []
    assert nalanda_kernels.backends_for("step", "b", "cpu") == ["b"]
    monkeypatch.setattr(nalanda_kernels, "interpreting", lambda: False)
    with pytest.raises(ValueError, match=r"no step for cpu; choose one of auto, torch$"):
        nalanda_kernels.backends_for("step", "b", "cpu")


def test_a_backend_that_is_registered_later_is_tried(register):
    register({"step": {"a": print}})
    assert nalanda_kernels.backends_for("step", "auto", "cpu") == ["a"]
    nalanda_kernels.KERNELS["step"]["b"] = nalanda_kernels.KERNELS["step"]["a"]
    assert nalanda_kernels.backends_for("step", "auto", "cpu") == ["a", "b"]


def test_a_backend_is_imported_when_its_turn_comes(register, monkeypatch):
    def first(x):
        return x

    register({"step": {"a": first}})
    nalanda_kernels.KERNELS["step"]["b"] = Kernel("no_such_module:step", ("cpu",), "torch")
    assert nalanda_kernels.serve("step", "auto", "cpu", 3) == 3
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        nalanda_kernels.serve("step", "b", "cpu", 3)


@pytest.mark.parametrize("backend", ["auto", "a"])
def test_kernels_that_do_not_fit_the_card_are_tried_once(register, monkeypatch, backend):
    from triton.runtime.errors import OutOfResources

    calls = []

    def too_large(x):
        calls.append(x)
        raise OutOfResources(200_000, 101_376, "shared memory")

    register({"step": {"a": too_large, "b": lambda x: x}})
    monkeypatch.setattr(nalanda_kernels, "_left_out", set())
    nalanda_kernels._warn_once.cache_clear()
    with pytest.warns(UserWarning, match=r"^step: a does not fit this card .*shared memory"):
        assert nalanda_kernels.serve("step", backend, "cpu", 3) == 3
    assert nalanda_kernels.serve("step", backend, "cpu", 4) == 4
    assert calls == [3]


@interpreted_only
def test_the_interpreter_sees_no_card():
    assert torch.cuda.device_count() == 0
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_cards_with_little_shared_memory_take_the_first_table():
    for arch in ("sm_86", "sm_89", "sm_120", "sm_121"):
        assert common.variants("states", 2, 256, arch) == common.variants("states", 2, 256, "sm_80")
    assert common.variants("states", 2, 256, "sm_103") == common.variants(
        "states", 2, 256, "sm_100"
    )


def test_features_count_not_keys(chosen):
    """NaLa's map gives 256 features to keys of 128."""
    chosen(ROW | {"mapped": True, "length": 128, "backend": "flash_qla"})
    for name, expected in (("nala", None), ("silu", "flash_qla")):
        phi = build_feature_map(name, num_heads=2, head_dim=128)
        assert (
            nalanda_kernels.measured_backend("delta_rule", *inputs(), feature_map=phi) == expected
        )


def test_tune_takes_no_size_that_changes_results():
    """A chunk's length may change them by rounding, and other sizes by a tenth of that."""
    chunk, states = ({"itemsize": 2, "features": 128} for _ in range(2))
    chunk["BT"], states["num_warps"], states["num_stages"] = 64, 8, 1

    def job():
        off = 1e-2 * (chunk["BT"] == 32) + 6e-3 * (states["num_warps"] == 4)
        ms = 100 + chunk["BT"] + 10 * states["num_warps"] - 5 * states["num_stages"]
        slow = chunk["BT"] == 16 or states["num_warps"] == 2
        return (1e3 if slow else ms), [torch.full((4,), 1 + off)]

    def jobs_of(itemsize, features):
        if (itemsize, features) != (2, 128):
            raise ValueError("no rows")
        return [job]

    lines = [*tune.improve({"chunk": [chunk], "states": [states]}, jobs_of, lambda: False)]
    assert (chunk["BT"], states["num_warps"], states["num_stages"]) == (32, 8, 4)
    assert "  states num_stages=4: 192.000 ms" in lines


def test_tune_keeps_the_one_stage_of_a_kernel_that_races_with_two():
    row = {"itemsize": 2, "features": 128, "num_warps": 8, "num_stages": 1}

    def job():
        return 100 / row["num_stages"] + row["num_warps"], [torch.ones(4)]

    [*tune.improve({"input_gradients": [row]}, lambda *_: [job], lambda: False)]
    assert (row["num_warps"], row["num_stages"]) == (2, 1)


def row(features: int = 256, itemsize: int = 2, **sizes: int) -> dict[str, int]:
    return {"itemsize": itemsize, "features": features, "num_warps": 8, "num_stages": 1} | sizes


ONE_STAGE = r"8 warps with 1 stage and blocks of 32 columns are wrong; set num_stages to 2"
FOUR_WARPS = r"4 warps give wrong gradients; set num_warps to 8"


@pytest.mark.parametrize(
    ("arch", "kernel", "rows", "reason"),
    [
        ("sm_90", "states", [row(BV=32)], ONE_STAGE),
        ("sm_90", "states", [row(BV=64), row(BV=16)], ONE_STAGE.replace("32", "16")),
        ("sm_90", "state_gradients", [row(BV=32)], ONE_STAGE),
        ("sm_90", "input_gradients", [row(BV=64, num_warps=4)], FOUR_WARPS),
        # Heads of 16 to 512 features in 16 bits, too, take a row of fp32 where no other covers them.
        ("sm_90", "states", [row(64, BV=64), row(512, itemsize=4, BV=32)], ONE_STAGE),
        ("sm_90", "states", [row(512, BV=64), row(512, itemsize=4, BV=32)], None),
        ("sm_90", "states", [row(BV=32, num_stages=2)], None),
        ("sm_90", "states", [row(BV=32, num_warps=4)], None),
        ("sm_90", "states", [row(BV=64)], None),
        ("sm_90", "input_gradients", [row(BV=32)], None),
        ("sm_80", "state_gradients", [row(BV=32)], None),
    ],
)
def test_block_sizes_that_a_card_found_wrong_are_refused(arch, kernel, rows, reason, blocks):
    blocks(json.dumps({arch: {kernel: rows}}))
    if reason is None:
        nalanda_kernels.check_blocks()
        return
    where = rf"^NALANDA_BLOCKS=.*blocks\.json: {arch}, {kernel}: "
    with pytest.raises(ValueError, match=where + reason + "$"):
        nalanda_kernels.check_blocks()


@pytest.mark.parametrize("text", ["", "[]", '{"sm_90": 1}', '{"sm_90": {"states": [{"BV": 32}]}}'])
def test_a_file_that_is_no_table_is_one_line(text, blocks):
    blocks(text)
    with pytest.raises(
        ValueError, match=r": no table of block sizes; name a file that nalanda tune"
    ):
        nalanda_kernels.check_blocks()


def test_a_file_that_is_not_there_is_one_line(blocks):
    blocks(None)
    with pytest.raises(ValueError, match=r": No such file or directory; name a file that nalanda"):
        nalanda_kernels.check_blocks()


def test_shipped_block_sizes_are_not_known_to_be_wrong():
    assert not [*common._wrong_rows(common._shipped())]


def test_kernels_that_a_file_leaves_out_keep_their_cards_sizes(blocks):
    blocks(json.dumps({arch: {"backends": []} for arch in common._shipped()}))
    for arch, kernels in common._shipped().items():
        rows = kernels["states"]
        assert common.blocks("states", 2, 128, arch).items() <= rows[0].items()
    sizes = common.blocks("channel_gradients", 2, 128, "sm_90")  # it has none of its own
    assert sizes.items() <= common._shipped()["sm_80"]["channel_gradients"][0].items()


def test_tune_takes_no_size_that_is_known_to_be_wrong(monkeypatch):
    monkeypatch.setattr(common, "architecture", lambda: "sm_90")
    tried = []
    states, gradients = row(BV=64, num_stages=2), row(BV=64)
    kernels = {"states": [states], "input_gradients": [gradients]}

    def job():
        tried.append(
            (states["num_warps"], states["num_stages"], states["BV"], gradients["num_warps"])
        )
        return 100.0 / len(tried), [torch.ones(4)]  # the last one tried is the fastest

    def jobs_of(itemsize, features):
        if (itemsize, features) != (2, 256):
            raise ValueError("no rows")
        return [job]

    [*tune.improve(kernels, jobs_of, lambda: False)]
    assert {x[3] for x in tried} == {2, 8}
    assert any(x[1] == 1 for x in tried)
    assert not [x for x in tried if x[0] == 8 and x[1] == 1 and x[2] <= 32]


def test_tune_keeps_the_fastest_that_agrees():
    right, wrong = torch.ones(4), torch.full((4,), 1.1)

    def broken():
        raise Unsupported("no such call")

    jobs = {
        "triton": lambda: (2.0, [right]),
        "fla": lambda: (1.0, [wrong]),
        "flash_qla": lambda: (1.5, [right]),
        "other": broken,
    }
    found = list(tune.fastest_backends([(ROW | {"length": 64}, jobs)], lambda: False))
    assert found == [
        (
            ROW | {"length": 64, "backend": "flash_qla"},
            "gated delta_rule, 64 tokens: triton 2.000 ms, flash_qla 1.500 ms",
        )
    ]
    assert not list(tune.fastest_backends([(ROW, jobs)], lambda: True))  # late


def test_flas_gates_are_scaled_by_beta():
    beta, gate = torch.rand(1, 3, 2), torch.rand(1, 3, 2, 4)
    scaled = fla._scaled_gate(beta, gate, gate, torch.float32)
    torch.testing.assert_close(scaled, torch.einsum("bth,bthk->bthk", beta, gate))
    alone = fla._scaled_gate(beta, None, gate, torch.bfloat16)
    assert torch.equal(alone, beta[..., None].bfloat16().expand(1, 3, 2, 4))


@pytest.fixture
def stand_in(monkeypatch):
    """FlashQLA's function, in torch; returns the options of its calls."""
    calls = []

    def chunk_gated_delta_rule(q, k, v, g, beta, *, use_qk_l2norm_in_kernel=False, **options):
        calls.append(options | {"l2": use_qk_l2norm_in_kernel})
        norm = "l2" if use_qk_l2norm_in_kernel else None
        return ops.delta_rule(q, k, v, beta, g, qk_norm=norm, backend="torch", **options)

    module = SimpleNamespace(chunk_gated_delta_rule=chunk_gated_delta_rule)
    monkeypatch.setitem(sys.modules, "flash_qla", module)
    monkeypatch.setattr(flash_qla, "architecture", lambda: "sm_90")
    return calls


@pytest.mark.parametrize("name", [None, "silu"])
@pytest.mark.parametrize("bounds", [None, (0, 1, 33, 70)])
def test_flash_qla_keeps_the_contract(name, bounds, stand_in):
    phi = None if name is None else build_feature_map(name, num_heads=2, head_dim=128)
    N = 1 if bounds is None else len(bounds) - 1
    options = {"feature_map": phi, "qk_norm": "l2", "output_final_state": True}
    options["initial_state"] = torch.randn(N, 2, 128, 128)
    options["cu_seqlens"] = None if bounds is None else torch.tensor(bounds)
    o, state = flash_qla.delta_rule(*inputs(), **options)
    expected, last = ops.delta_rule(*inputs(), backend="torch", **options)
    torch.testing.assert_close(o, expected, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(state, last, atol=2e-2, rtol=2e-2)
    assert [call["l2"] for call in stand_in] == [name is None]  # the norm after a map is ours


@pytest.mark.parametrize(
    ("call", "options", "reason"),
    [
        ({"gated": False}, {}, "without a decay"),
        ({"dtype": torch.float32}, {}, "16 bits"),
        ({"K": 64}, {}, "K = 64"),
        ({"T": 0}, {}, "empty"),
        ({"T": 4}, {"cu_seqlens": torch.tensor([0, 4, 4])}, "empty"),
        ({}, {"erase": torch.ones(1)}, "gates by channel"),
        ({}, {"write": torch.ones(1)}, "gates by channel"),
        ({}, {"allow_neg_eigval": True}, "β above 1"),
    ],
)
def test_flash_qla_refuses(call, options, reason, stand_in):
    with pytest.raises(Unsupported, match=reason):
        flash_qla.delta_rule(*inputs(**call), **options)
    assert not stand_in


def test_flash_qla_refuses_a_decay_per_key_channel(stand_in):
    q, k, v, beta, g = inputs()
    with pytest.raises(Unsupported, match="channel"):
        flash_qla.delta_rule(q, k, v, beta, g[..., None].expand(*g.shape, q.shape[-1]))
    assert not stand_in


def test_flash_qla_refuses_other_cards(monkeypatch):
    monkeypatch.setattr(flash_qla, "architecture", lambda: "sm_80")
    with pytest.raises(Unsupported, match="sm_80: it needs one of"):
        flash_qla.delta_rule(*inputs())
    assert "flash_qla" in KERNELS["delta_rule"]
