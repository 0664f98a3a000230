"""A GPU that is not there. `install` gives this process one; import this before torch.

Tensors on "cuda" lie in the host's memory (card.cpp): torch's operators compute true values, and a CPU tensor
beside a CUDA one is an error. Triton's kernels are not run: their arguments are checked, and what they would write
stays zero. `events` counts launches, uploads and waits.
"""

import collections
import contextlib
import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

SOURCE = Path(__file__).with_name("card.cpp")
ROOT = Path(__file__).parents[2]


def find_compiler() -> str | None:
    return next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)


def build() -> Path:
    """Compiles card.cpp once for the installed torch, in about ten seconds."""
    spec = importlib.util.find_spec("torch")
    folder = Path(str(spec and spec.origin)).parent
    # The library finds torch's by their path.
    text = SOURCE.read_bytes() + f"{metadata.version('torch')} {folder}".encode()
    path = Path(tempfile.gettempdir(), f"nalanda-card-{hashlib.sha256(text).hexdigest()[:16]}.so")
    if path.exists():
        return path
    compiler = find_compiler()
    assert compiler is not None, "no C++ compiler"
    includes = [folder / "include", folder / "include/torch/csrc/api/include"]

    handle, draft = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    options = ["-std=c++20", "-O1", "-shared", "-fPIC", "-w", *(f"-I{x}" for x in includes)]
    libraries = [f"-L{folder / 'lib'}", f"-Wl,-rpath,{folder / 'lib'}", "-lc10", "-ltorch_cpu"]
    subprocess.run([compiler, *options, str(SOURCE), "-o", draft, *libraries], check=True)
    os.replace(draft, path)
    return path


# Before torch, which looks for hooks of a GPU once, and warns of each operator that gets another kernel.
assert "torch" not in sys.modules
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
library = ctypes.CDLL(str(build()), mode=ctypes.RTLD_GLOBAL)

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

events: collections.Counter[tuple[str, str, str]] = collections.Counter()
"""Of (phase, kind, name): how often. Kinds are launch, triton, replay, upload and wait."""
waits: collections.Counter[tuple[str, str]] = collections.Counter()
"""Of (phase, lines of ours): how often the host waited for a value there."""
_phase = ["set-up"]


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Events in this context count for `name`. Work that autograd does later counts for the phase of that time."""
    _phase.append(name)
    try:
        yield
    finally:
        _phase.pop()


def count(kinds: tuple[str, ...], name: str) -> int:
    """The events of these kinds in the phase `name`."""
    return sum(n for (of, kind, _), n in events.items() if of == name and kind in kinds)


def launches(name: str) -> int:
    return count(("launch", "triton", "replay"), name)


def note(kind: str, name: str) -> None:
    events[_phase[-1], kind, name] += 1
    if kind == "wait":
        waits[_phase[-1], lines_of_ours()] += 1


def lines_of_ours() -> str:
    """The innermost lines of the repository on the stack, the last call first."""
    frames = [x for x in traceback.extract_stack() if x.filename.startswith(str(ROOT))]
    ours = [x for x in frames if not x.filename.startswith(str(SOURCE.parent))]
    return " < ".join(f"{Path(x.filename).name}:{x.name}" for x in ours[:-4:-1])


# ------------------------------------------------------------------------------------------------- torch.cuda


class Stream:
    cuda_stream = 0
    device = torch.device("cuda", 0)

    def __init__(self, *args, **options):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def __eq__(self, other):
        return isinstance(other, Stream)

    def __hash__(self):
        return 0

    def wait_stream(self, other):
        pass

    def synchronize(self):
        note("wait", "stream")


class Event:
    def __init__(self, *args, **options):
        pass

    def record(self, stream=None):
        pass

    def synchronize(self):
        note("wait", "event")


class Graph:
    """A CUDA graph: what it captures runs once, and a replay counts as one launch."""

    def replay(self):
        note("replay", "CUDAGraph")


_capturing = [False]


@contextlib.contextmanager
def capture(graph, **options):
    _capturing[0] = True
    try:
        yield
    finally:
        _capturing[0] = False


def install(capability: tuple[int, int] = (9, 0), bf16: bool = True) -> None:
    """Puts one card into this process, of an H200's sizes. bf16: whether it has units for bf16."""
    # Only what is called here: a name that is missing says so.
    gigabyte = 2**30
    properties = SimpleNamespace(
        name="NVIDIA H200",
        major=capability[0],
        minor=capability[1],
        total_memory=141 * gigabyte,
        multi_processor_count=132,
        L2_cache_size=50 * 2**20,
        gcnArchName="",
        warp_size=32,
        max_threads_per_block=1024,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=48 * 2**10,
        shared_memory_per_block_optin=227 * 2**10,
        shared_memory_per_multiprocessor=228 * 2**10,
    )
    generator = torch.zeros(16, dtype=torch.uint8)
    functions: dict[str, Callable] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "get_device_capability": lambda device=None: capability,
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: properties.name,
        "is_bf16_supported": lambda including_emulation=True: bf16 or including_emulation,
        "mem_get_info": lambda device=None: (130 * gigabyte, properties.total_memory),
        "memory_allocated": lambda device=None: gigabyte,
        "max_memory_allocated": lambda device=None: gigabyte,
        "memory_reserved": lambda device=None: gigabyte,
        "max_memory_reserved": lambda device=None: gigabyte,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "synchronize": lambda device=None: note("wait", "cuda.synchronize"),
        "current_stream": lambda device=None: Stream(),
        "default_stream": lambda device=None: Stream(),
        "stream": lambda stream: contextlib.nullcontext(),
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": capture,
        "is_current_stream_capturing": lambda: _capturing[0],
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=None: generator.clone(),
        "set_rng_state": lambda state, device=None: None,
        "get_rng_state_all": lambda: [generator.clone()],
        "set_rng_state_all": lambda states: None,
        "_is_in_bad_fork": lambda: False,
    }
    for name, function in functions.items():
        if name in ("_exchange_device", "_maybe_exchange_device"):  # torch.compile knows them so
            function.__module__, function.__name__ = "torch.cuda", name
        setattr(torch.cuda, name, function)

    listener = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)
    _alive.append(listener(lambda kind, name: note(kind.decode(), name.decode())))
    library.listen(_alive[-1])
    record_kernels()


_alive: list = []  # a callback that Python frees would crash


# ----------------------------------------------------------------------------------------------------- Triton


def record_kernels() -> None:
    """Lets launches of Triton's kernels check their arguments and count, instead of compiling."""
    from triton.runtime.jit import JITFunction

    JITFunction.run = run_kernel


def run_kernel(kernel, *args, grid, warmup=False, **options):
    """A launch. Raises AssertionError for a tensor that is not on the card, or a grid that no card takes."""
    parameters = kernel.signature.parameters
    named = {name: x for name, x in options.items() if name in parameters}
    arguments = kernel.signature.bind(*args, **named).arguments
    name = f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"
    for argument, value in arguments.items():
        for x in value if isinstance(value, tuple) else (value,):
            if isinstance(x, Tensor):
                assert x.is_cuda, f"{name}: {argument} is on {x.device}"

    programs = grid(dict(arguments)) if callable(grid) else grid
    programs = (*programs, 1, 1)[:3]
    assert min(programs) >= 1, f"{name}: the grid {programs} has no program"
    fits = programs[0] < 2**31 and max(programs[1:]) < 2**16
    assert fits, f"{name}: the grid {programs} is too large"
    note("triton", name)
