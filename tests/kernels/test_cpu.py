"""The C++ kernels: every map against float64, and every way in which a library can fail to be there."""

import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import nalanda_kernels
import pytest
import torch
from drawn import with_gaps
from nalanda_kernels import Attempt, Unsupported, watch
from nalanda_kernels.cpu import build
from tiny_models import UNKNOWN_MAPS
from torch import Tensor

from nalanda.model.feature_maps import FEATURE_MAPS, build_feature_map
from nalanda.model.ops import map_features
from nalanda.model.projections import linear_rows

try:
    build.library()
except Unsupported as reason:
    pytest.skip(f"no C++ compiler: {reason}", allow_module_level=True)

SERVED = [name for name in FEATURE_MAPS if name not in UNKNOWN_MAPS]
# Readings of NaLa that no row of the table has.
READINGS = [
    {"angle": "raw"},
    {"angle": "direction", "power": 1.5},
    {"query_power": 3.0},
    {"angle": "relu_split"},
]


def cases():
    for name in SERVED:
        yield name, {}
    for options in READINGS:
        yield "nala", options


def make(name: str, H: int, K: int, **options):
    with warnings.catch_warnings(action="ignore"):  # of steep slopes
        feature_map = build_feature_map(name, num_heads=H, head_dim=K, **options)
    torch.manual_seed(1)
    if hasattr(feature_map, "initial"):
        for key, value in feature_map.initial().items():
            getattr(feature_map, key).data.copy_(value + 0.3 * torch.randn_like(value))
    return feature_map


def queries_and_keys(H: int, K: int, scale: float) -> list[Tensor]:
    torch.manual_seed(0)
    q, k = scale * torch.randn(2, 2, 7, H, K)
    # Zeros are where powers, norms and angles have their corners.
    q[0, 0, 0] = 0
    k[1, 2, 1, ::2] = 0
    return [q, k]


def results(feature_map, qk_norm, inputs, dtype, backend) -> list[Tensor]:
    """Features, then gradients of q, k and parameters."""
    feature_map = feature_map.to(dtype if dtype == torch.float64 else torch.float32)
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    features = map_features(*leaves, feature_map, qk_norm, backend=backend)
    torch.manual_seed(2)
    weights = [torch.randn(x.shape, dtype=torch.float64).to(x.dtype) for x in features]
    loss = sum((x * w).sum() for x, w in zip(features, weights, strict=True))
    return [*features, *torch.autograd.grad(loss, [*leaves, *feature_map.parameters()])]


def error(results: list[Tensor], reference: list[Tensor]) -> list[float]:
    return [
        float(
            (x.detach().double() - y.detach()).abs().max() / y.detach().abs().max().clamp_min(1e-30)
        )
        for x, y in zip(results, reference, strict=True)
    ]


@pytest.mark.parametrize(("K", "scale"), [(3, 3.0), (16, 0.3), (37, 1.0)])
@pytest.mark.parametrize("qk_norm", [None, "l2"])
@pytest.mark.parametrize(("name", "options"), list(cases()))
def test_maps_and_gradients(name, options, qk_norm, K, scale):
    """Nearly as exact as torch in fp32: a power by exp and log loses the exponent, up to 4.5, times a rounding."""
    feature_map, inputs = make(name, 3, K, **options), queries_and_keys(3, K, scale)
    reference = results(feature_map, qk_norm, inputs, torch.float64, "torch")
    torch_error = error(results(feature_map, qk_norm, inputs, torch.float32, "torch"), reference)
    with watch() as attempts:
        ours = error(results(feature_map, qk_norm, inputs, torch.float32, "cpu"), reference)
    assert [*attempts] == [Attempt("map_features", "cpu")]
    for own, other in zip(ours, torch_error, strict=True):
        assert own <= max(8 * other, 2e-6)


@pytest.mark.parametrize("name", SERVED)
def test_bf16_rounds_once(name):
    feature_map, inputs = make(name, 3, 37), queries_and_keys(3, 37, 1.0)
    inputs = [x.bfloat16() for x in inputs]
    exact = results(feature_map, "l2", [x.float() for x in inputs], torch.float32, "cpu")
    rounded = results(feature_map, "l2", inputs, torch.bfloat16, "cpu")
    for x, y in zip(rounded[:2], exact[:2], strict=True):
        # A sum in another order may take an entry over the border between two numbers of bf16.
        assert (x != y.bfloat16()).double().mean() < 2e-3
    # The gradients of a power read the rounded features.
    assert max(error(rounded[2:], exact[2:])) < 0.02


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(("name", "options"), list(cases()))
def test_a_bad_number_is_not_hidden(name, options, value):
    """Guards look for losses that are not finite: NaN and ∞ stay what they are wherever torch keeps them."""
    feature_map, inputs = make(name, 3, 16, **options), queries_and_keys(3, 16, 1.0)
    inputs[0][0, 0, 0, 3] = inputs[1][0, 0, 0, 3] = value
    for qk_norm in (None, "l2"):
        expected = map_features(*inputs, feature_map, qk_norm, backend="torch")
        for x, y in zip(
            map_features(*inputs, feature_map, qk_norm, backend="cpu"), expected, strict=True
        ):
            # The row of one head, as a whole: a split map may keep its other half.
            assert torch.isfinite(x[0, 0, 0]).all() == torch.isfinite(y[0, 0, 0]).all()
            assert torch.isfinite(x[1:]).all()


@pytest.mark.parametrize("options", [{}, {"scale": False}])
def test_parameters_with_gaps(options):
    feature_map, inputs = make("pola", 3, 16, **options), queries_and_keys(3, 16, 1.0)
    expected = results(feature_map, "l2", inputs, torch.float32, "cpu")
    for x, y in zip(
        results(with_gaps(feature_map), "l2", inputs, torch.float32, "cpu"), expected, strict=True
    ):
        assert torch.equal(x, y)


def test_memory_beyond_a_row_is_not_read():
    feature_map, (q, k) = make("nala", 3, 37), queries_and_keys(3, 37, 1.0)
    expected = map_features(q, k, feature_map, "l2", backend="cpu")
    poisoned = [torch.full((*x.shape[:-1], 64), float("nan")) for x in (q, k)]
    for x, y in zip(poisoned, (q, k), strict=True):
        x[..., :37] = y
    views = [x[..., :37] for x in poisoned]
    for x, y in zip(map_features(*views, feature_map, "l2", backend="cpu"), expected, strict=True):
        assert torch.equal(x, y)


def test_threads_do_not_change_features():
    feature_map = make("pola", 3, 16)
    inputs = list(torch.randn(2, 2, 300, 3, 16, generator=torch.Generator().manual_seed(0)))
    threads, outcomes = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            outcomes.append(results(feature_map, "l2", inputs, torch.float32, "cpu"))
    finally:
        torch.set_num_threads(threads)
    for x, y in zip(*outcomes, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["soft", "nala_learned", "silu_shifted"])
def test_other_maps_are_left_to_torch_without_a_word(name, recwarn):
    feature_map, inputs = make(name, 3, 16), queries_and_keys(3, 16, 1.0)
    expected = map_features(*inputs, feature_map, "l2", backend="torch")
    for x, y in zip(map_features(*inputs, feature_map, "l2"), expected, strict=True):
        assert torch.equal(x, y)
    assert not [w for w in recwarn if "map_features" in str(w.message)]


# --------------------------------------------------------------------------------------- libraries that fail


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """No library yet in this process, an empty folder for it, and no warning given so far."""
    monkeypatch.setenv("NALANDA_CPU_CACHE", str(tmp_path / "libraries"))
    monkeypatch.setattr(nalanda_kernels, "_left_out", set())
    for cached in (build._load, nalanda_kernels._warn_once):
        cached.cache_clear()
    yield tmp_path
    build._load.cache_clear()


def compiler(folder: Path, body: str) -> str:
    """A program in place of a compiler: `body`, in sh, with its output in $out, and -I of headers in $headers."""
    path = folder / "compiler"
    version = 'case "$1" in --version) echo compiler 1; exit 0;; esac\n'
    version += 'while [ "$1" != -o ]; do case "$1" in -I*) headers=$1;; esac; shift; done\n'
    version += "out=$2; threads=$3\n"
    path.write_text(f"#!/bin/sh\n{version}{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def served_by_torch(match: str) -> None:
    """One warning for all ops says why, then torch computes the map."""
    feature_map, inputs = make("nala", 3, 16), queries_and_keys(3, 16, 1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        features = map_features(*inputs, feature_map, "l2")
        map_features(*inputs, feature_map, "l2")
        linear_rows(torch.ones(1, 8), torch.ones(3, 8))
    said = [str(w.message) for w in caught if "cpu cannot serve" in str(w.message)]
    assert len(said) == 1
    assert re.search(match, said[0])
    # Later calls do not try: an exception for each product would slow every token.
    assert not nalanda_kernels.backends_for("linear_rows", "auto", "cpu")
    expected = map_features(*inputs, feature_map, "l2", backend="torch")
    assert all(torch.equal(x, y) for x, y in zip(features, expected, strict=True))


def test_without_a_compiler(fresh, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(fresh))
    served_by_torch(r"without a C\+\+ compiler \(install g\+\+ or clang\+\+, or set CXX\)")


def test_a_compiler_that_fails(fresh, monkeypatch):
    monkeypatch.setenv("CXX", compiler(fresh, "echo no space in my head >&2; exit 4"))
    served_by_torch("failed with no space in my head")
    assert not list((fresh / "libraries").glob("*.so"))


@pytest.mark.slow
def test_a_compiler_without_threads(fresh, monkeypatch):
    """As on macOS: the library is built for one thread."""
    body = '[ "$threads" = -fopenmp ] && { echo unsupported option -fopenmp >&2; exit 1; }\n'
    body += (
        f"exec c++ -std=c++17 -O1 -shared -fPIC $headers {build.SOURCES}/feature_maps.cpp -o $out"
    )
    monkeypatch.setenv("CXX", compiler(fresh, body))
    feature_map, inputs = make("nala", 3, 16), queries_and_keys(3, 16, 1.0)
    features = map_features(*inputs, feature_map, "l2", backend="cpu")
    expected = map_features(*inputs, feature_map, "l2", backend="torch")
    assert list((fresh / "libraries").glob("*.so"))
    for x, y in zip(features, expected, strict=True):
        torch.testing.assert_close(x, y)


def test_a_failure_for_another_reason_leaves_no_library_without_threads(fresh, monkeypatch):
    body = '[ "$threads" = -fopenmp ] && { echo compilation terminated, no memory >&2; exit 1; }\n'
    body += "exec c++ -x c++ -shared -fPIC /dev/null -o $out"
    monkeypatch.setenv("CXX", compiler(fresh, body))
    served_by_torch("failed with compilation terminated, no memory")
    assert not list((fresh / "libraries").glob("*.so"))


@pytest.mark.parametrize("folder", ["plain", "with blanks"])
def test_a_compiler_behind_other_words(fresh, monkeypatch, folder):
    """As `ccache g++`, and a compiler in a folder whose name has blanks."""
    (fresh / folder).mkdir()
    path = compiler(fresh / folder, "exec c++ -x c++ -shared -fPIC /dev/null -o $out")
    launcher = fresh / "launcher"
    launcher.write_text('#!/bin/sh\nexec "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setenv("CXX", path if " " in folder else f"{launcher} {path}")
    build.library()
    assert list((fresh / "libraries").glob("*.so"))
    assert re.fullmatch(r"C\+\+ built by (launcher \S+/)?compiler", build.describe_library())


def test_a_compiler_that_writes_nonsense(fresh, monkeypatch):
    monkeypatch.setenv("CXX", compiler(fresh, "echo nonsense > $out"))
    served_by_torch("cpu cannot serve calls here")
    assert not list((fresh / "libraries").glob("*.so"))


def test_a_folder_that_cannot_be_written(fresh, monkeypatch):
    (fresh / "file").touch()
    monkeypatch.setenv("NALANDA_CPU_CACHE", str(fresh / "file" / "libraries"))
    served_by_torch("Not a directory")


@pytest.fixture
def homeless(fresh, monkeypatch):
    """A home in which nothing can be made, as in many containers, and an empty folder of temporary files."""
    (fresh / "file").touch()
    monkeypatch.delenv("NALANDA_CPU_CACHE")
    monkeypatch.setenv("HOME", str(fresh / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(fresh))
    return fresh / f"nalanda-cpu-{os.getuid()}"


def test_without_a_home_to_write_to_the_library_lies_among_temporary_files(homeless, monkeypatch):
    body = "exec c++ -x c++ -shared -fPIC /dev/null -o $out"
    monkeypatch.setenv("CXX", compiler(homeless.parent, body))
    build.library()
    assert list(homeless.glob("*.so"))
    assert stat.S_IMODE(homeless.stat().st_mode) == 0o700


def test_a_temporary_folder_of_another_user_is_not_trusted(homeless, monkeypatch):
    homeless.mkdir()
    user = os.getuid()
    homeless.rename(homeless.with_name(f"nalanda-cpu-{user + 1}"))
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    served_by_torch("another user's; set NALANDA_CPU_CACHE")


def test_libraries_in_a_home_that_is_only_read_are_taken(fresh, monkeypatch):
    home = fresh / ".cache" / "nalanda" / "cpu"
    home.mkdir(parents=True)
    monkeypatch.delenv("NALANDA_CPU_CACHE")
    monkeypatch.setenv("HOME", str(fresh))
    monkeypatch.setattr(tempfile, "tempdir", str(fresh))
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert build.cache_folder() != home
    (home / "a.so").touch()
    assert build.cache_folder() == home


def test_a_damaged_library(fresh):
    path = fresh / "libraries" / f"{build._hash(build._find_compiler())}.so"
    path.parent.mkdir()
    path.write_bytes(b"")
    served_by_torch("file too short")


def test_another_source_or_processor_has_a_library_of_its_own(fresh, monkeypatch):
    sources = shutil.copytree(build.SOURCES, fresh / "sources")
    monkeypatch.setattr(build, "SOURCES", sources)
    hashes = [build._hash(build._find_compiler())]
    for name in ("feature_maps.cpp", "elementary.h"):
        (sources / name).write_text((sources / name).read_text() + "\n// changed\n")
        hashes.append(build._hash(build._find_compiler()))
    monkeypatch.setattr(build, "processor", lambda: "another")
    hashes.append(build._hash(build._find_compiler()))
    assert len({*hashes}) == 4


def test_two_processes_build_once(fresh):
    log = fresh / "log"
    body = f"echo built >> {log}; sleep 0.3; exec c++ -x c++ -shared -fPIC /dev/null -o $out"
    environment = os.environ | {"CXX": compiler(fresh, body)}
    program = "from nalanda_kernels.cpu.build import library; library()"
    processes = [
        subprocess.Popen([sys.executable, "-c", program], env=environment) for _ in range(2)
    ]
    assert [process.wait() for process in processes] == [0, 0]
    assert log.read_text() == "built\n"
