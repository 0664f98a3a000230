"""Compiles the C++ sources of this folder once, for this processor, and loads them.

The library lies in `cache_folder`, under a hash of sources, compiler, flags and processor. So neither an older source
nor another machine's library is ever loaded.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import re
import shlex
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
NO_OPENMP = re.compile(r"openmp|omp\.h|(lib|-l)\w*omp")
"""What a compiler without OpenMP, its header or its library prints."""
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
        return f"calls here: {shlex.join(compiler)} failed with {lines[0]}"
    # Of a full or closed folder, a lock that is held too long, a compiler that hangs, a
    # library that does not load.
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        return f"calls here: {str(error).splitlines()[0]}"


def _find_compiler() -> list[str] | None:
    """The compiler's path, and the words behind it in CXX, such as those of `ccache g++`."""
    named = os.environ.get("CXX", "").strip()
    # First as one word: a path may have blanks.
    commands = [[named], named.split()] if named else [[name] for name in COMPILERS]
    for name, *words in commands:
        if path := shutil.which(name):
            return [path, *words]
    return None


def describe_library() -> str:
    """Whether there is a library for these sources. Compiles nothing."""
    compiler = _find_compiler()
    if compiler is None:
        return "no C++ compiler"
    try:
        built = (cache_folder() / f"{_hash(compiler)}.so").exists()
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return f"C++ not built: {str(error).splitlines()[0]}"
    name = shlex.join([Path(compiler[0]).name, *compiler[1:]])
    return f"C++ {'built' if built else 'to be built'} by {name}"


def cache_folder() -> Path:
    """NALANDA_CPU_CACHE or ~/.cache/nalanda/cpu; without a home to write to, a folder among the temporary files.

    Raises PermissionError if that one is another user's, and RuntimeError for `~name` without a home.
    """
    if named := os.environ.get("NALANDA_CPU_CACHE"):
        return Path(named).expanduser()
    with contextlib.suppress(OSError, RuntimeError):
        folder = Path("~/.cache/nalanda/cpu").expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        # A container may have libraries in a home that it only reads.
        if os.access(folder, os.W_OK) or any(folder.glob("*.so")):
            return folder

    folder = Path(tempfile.gettempdir(), f"nalanda-cpu-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    # Whoever owns the folder chooses what is loaded.
    if folder.lstat().st_uid != os.getuid():
        raise PermissionError(f"{folder}: another user's; set NALANDA_CPU_CACHE to another folder")
    return folder


def _build(compiler: list[str]) -> Path:
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


def _compile(compiler: list[str], output: str) -> None:
    """Compiles all sources into one library, with threads where the compiler has OpenMP."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "structures.h").write_text(header(), "utf-8")
        sources = map(str, sorted(SOURCES.glob("*.cpp")))
        command = [*compiler, *FLAGS, f"-I{folder}", *sources, "-o", output]
        with_threads, without = THREADS
        try:
            _run([*command, with_threads])
        except subprocess.CalledProcessError as error:
            # Another failure, such as too little memory, may pass. The library would stay without threads.
            if not NO_OPENMP.search(error.stderr):
                raise
            _run([*command, without])


def _run(command: list[str]) -> str:
    """Runs a program, and returns its output. Raises CalledProcessError where it fails."""
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=SECONDS
    ).stdout


def _hash(compiler: list[str]) -> str:
    """Of all that the library depends on."""
    version = _run([*compiler, "--version"])
    parts = [*compiler, version, *FLAGS, *THREADS, platform.machine(), processor(), header()]
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
