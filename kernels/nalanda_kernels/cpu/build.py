"""Compiles the C++ sources of this folder once, for this processor, and loads them.

The library lies in NALANDA_CPU_CACHE, by default ~/.cache/nalanda/cpu, under a hash of sources, compiler, flags and
processor. So neither an older source nor another machine's library is ever loaded.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from filelock import FileLock

from nalanda_kernels import Unsupported
from nalanda_kernels.cpu.structures import header

SOURCES = Path(__file__).parent
COMPILERS = ("g++", "clang++", "c++")
# Sums stay in their order but for `omp simd`; NaN and ∞ stay what they are.
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
)
THREADS = ("-fopenmp", "-fopenmp-simd")  # macOS' compiler has the second alone: one thread
SECONDS = 300  # of a compiler, and of waiting for another process's


def library() -> ctypes.CDLL:
    """The functions of all sources. Raises Unsupported, with the cause, where they cannot be built."""
    loaded = _load()
    if isinstance(loaded, str):
        raise Unsupported(loaded, "all ops")
    return loaded


@functools.cache
def _load() -> ctypes.CDLL | str:
    """The library, or why there is none; tried once a process."""
    compiler = _find_compiler()
    if compiler is None:
        return "calls without a C++ compiler (install g++ or clang++, or set CXX)"
    try:
        return ctypes.CDLL(str(_build(compiler)))
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"exit code {error.returncode}"]
        return f"calls here: {compiler} failed with {lines[0]}"
    # Of a full or closed folder, a user without a home, a lock that is held too long, a compiler that hangs, a
    # library that does not load.
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        return f"calls here: {str(error).splitlines()[0]}"


def _find_compiler() -> str | None:
    named = os.environ.get("CXX")
    candidates = (named,) if named else COMPILERS
    return next((path for name in candidates if (path := shutil.which(name))), None)


def describe_library() -> str:
    """Whether there is a library for these sources. Compiles nothing."""
    compiler = _find_compiler()
    if compiler is None:
        return "no C++ compiler"
    try:
        built = (cache_folder() / f"{_hash(compiler)}.so").exists()
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return f"C++ not built: {str(error).splitlines()[0]}"
    return f"C++ {'built' if built else 'to be built'} by {Path(compiler).name}"


def cache_folder() -> Path:
    """Raises RuntimeError for a user without a home."""
    return Path(os.environ.get("NALANDA_CPU_CACHE") or "~/.cache/nalanda/cpu").expanduser()


def _build(compiler: str) -> Path:
    """Compiles the library if it is missing, and returns its path."""
    folder = cache_folder()
    path = folder / f"{_hash(compiler)}.so"
    if path.exists():
        return path

    folder.mkdir(parents=True, exist_ok=True)
    # One process compiles; those that wait then see its result.
    with FileLock(folder / "lock", timeout=SECONDS):
        if path.exists():
            return path
        handle, draft = tempfile.mkstemp(suffix=".so", dir=folder)
        os.close(handle)
        try:
            _compile(compiler, draft)
            ctypes.CDLL(draft)  # what does not load is not kept
            os.replace(draft, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft)
    return path


def _compile(compiler: str, output: str) -> None:
    """Compiles all sources into one library, with threads where the compiler knows them."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "structures.h").write_text(header(), "utf-8")
        sources = map(str, sorted(SOURCES.glob("*.cpp")))
        command = [compiler, *FLAGS, f"-I{folder}", *sources, "-o", output]
        with_threads, without = THREADS
        try:
            _run([*command, with_threads])
        except subprocess.CalledProcessError:
            _run([*command, without])


def _run(command: list[str]) -> str:
    """Runs a program, and returns its output. Raises CalledProcessError where it fails."""
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=SECONDS
    ).stdout


def _hash(compiler: str) -> str:
    """Of all that the library depends on."""
    version = _run([compiler, "--version"])
    parts = [compiler, version, *FLAGS, *THREADS, platform.machine(), processor(), header()]
    for source in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]):
        parts += [source.name, source.read_text("utf-8")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def processor() -> str:
    """The processor's model and instructions, which -march=native compiles for."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = ("vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.split("\t")[0].strip() in names}))
