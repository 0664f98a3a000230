"""One folder with what a bare machine lacks: peers, a newer ptxas, and kernels compiled for its Triton.

*.whl: flash-linear-attention, pure Python. FlashQLA needs TileLang, whose wheels are too large for the limit
    of 40 MB; wheels that are put into the folder by hand are installed too.
ptxas.xz: the assembler of CUDA 13.4, which mends known errors of the one that Triton brings.
cache.tar.xz: Triton's cache for sm_90, of what bench, train and the tests launch, launchers included.
manifest.json: versions, and the hash of Triton's files: its cache fits no other Triton.
"""

import hashlib
import json
import lzma
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from gpu.card import PATHS, ROOT
from gpu.correctness import AGAIN, PTXAS
from gpu.results import first_line, sources, write

WHEELS = ("fla-core==0.6.0", "flash-linear-attention==0.6.0")
NVCC = "nvidia-cuda-nvcc==13.4.92"
LARGEST = 40e6  # bytes of the folder


@dataclass
class Unpacked:
    """What a bundle has brought. notes: what it could not, for readers of the figures."""

    ptxas: str | None = None
    peers: Path | None = None
    notes: list[str] = field(default_factory=list)

    def add_peers(self) -> None:
        """For this process and its children."""
        if self.peers and str(self.peers) not in sys.path:
            sys.path.append(str(self.peers))
            path = os.environ.get("PYTHONPATH")
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [path, str(self.peers)]))


def triton_hash() -> str:
    """Of all that Triton's cache depends on, but sources, options and ptxas; libtriton is most of it."""
    from triton.runtime.cache import triton_key

    return hashlib.sha256(triton_key().encode()).hexdigest()


def cache_folder() -> Path:
    from triton import knobs

    return Path(knobs.cache.dir)


# -------------------------------------------------------------------------------------------------- unpacking


def unpack(bundle: Path, say: Callable[[str], None]) -> Unpacked:
    """Unpacks a bundle beside the temporary files; a second call finds it there."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    there = Path(tempfile.gettempdir()) / f"nalanda-{manifest['made']}"
    there.mkdir(parents=True, exist_ok=True)
    found = Unpacked()
    if wheels := sorted(bundle.glob("*.whl")):
        found.peers = there / "peers"
        if not found.peers.exists():
            for wheel in wheels:
                with zipfile.ZipFile(wheel) as files:
                    files.extractall(there / "part")
            (there / "part").rename(found.peers)
    if (bundle / "ptxas.xz").exists():
        ptxas = there / "ptxas"
        if not ptxas.exists():
            ptxas.with_name("part.ptxas").write_bytes(
                lzma.decompress((bundle / "ptxas.xz").read_bytes())
            )
            ptxas.with_name("part.ptxas").chmod(0o755)
            ptxas.with_name("part.ptxas").rename(ptxas)
        if first_line(str(ptxas), "--version"):
            found.ptxas = str(ptxas)
        else:
            found.notes.append("the bundle's ptxas does not run here")
    if (bundle / "cache.tar.xz").exists():
        if manifest["key"] != triton_hash():
            found.notes.append(
                f"compiled kernels left out: they are for Triton {manifest['triton']}"
            )
        elif not (there / "cache").exists():
            with tarfile.open(bundle / "cache.tar.xz") as files:
                files.extractall(cache_folder(), filter="data")
            (there / "cache").touch()
    say(f"bundle of {manifest['made']}: {'; '.join(found.notes) or 'unpacked'}")
    return found


# ----------------------------------------------------------------------------------------------------- making


def make(bundle: Path, minutes: float) -> int:
    """Fills the folder; what is there already is kept. Compiles as many kernels as `minutes` allow, those of
    bench and train first; called again it goes on. Returns an exit code."""
    import triton

    end = time.monotonic() + 60 * minutes
    bundle.mkdir(parents=True, exist_ok=True)
    cache = bundle.with_name(f"{bundle.name}-cache-{triton_hash()[:8]}")
    for wheel in WHEELS:
        name, _, version = wheel.partition("==")
        if not any(bundle.glob(f"{name.replace('-', '_')}-{version}-*.whl")):
            download(wheel, bundle)
    if not (bundle / "ptxas.xz").exists():
        with tempfile.TemporaryDirectory() as folder:
            download(NVCC, Path(folder))
            with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as files:
                name = next(x for x in files.namelist() if x.endswith("bin/ptxas"))
                (bundle / "ptxas.xz").write_bytes(lzma.compress(files.read(name), preset=9))
    left = compile_all(bundle, cache, end)
    pack(cache, bundle / "cache.tar.xz")
    kernels = len(list(cache.glob("*/*.cubin")))
    manifest = {
        "made": f"{sources()}-{kernels}",
        "triton": triton.__version__,
        "key": triton_hash(),
        "python": platform.python_version(),
        "revision": first_line("git", "rev-parse", "--short", "HEAD"),
        "kernels": kernels,
        "launchers": len(list(cache.glob("*/*.so"))),
        "left": left,
        "left out": "flash-qla: TileLang's wheel alone has 50 MB",
    }
    write(bundle / "manifest.json", json.dumps(manifest, indent=1) + "\n")
    size = sum(x.stat().st_size for x in bundle.iterdir())
    print(f"{bundle}: {size / 1e6:.1f} MB, {kernels} kernels for Triton {triton.__version__} alone")
    if left:
        print(f"not finished: {', '.join(left)}; the same command goes on")
    if size > LARGEST:
        print(f"{bundle}: more than {LARGEST / 1e6:.0f} MB", file=sys.stderr)
    return int(size > LARGEST)


def download(wheel: str, folder: Path) -> None:
    command = [
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--only-binary=:all:",
        "--disable-pip-version-check",
    ]
    platforms = ["--python-version", "3.12", "--platform", "manylinux2014_x86_64"]
    subprocess.run([sys.executable, *command, *platforms, "-d", str(folder), wheel], check=True)


def compile_all(bundle: Path, cache: Path, end: float) -> list[str]:
    """Compiles what a card would launch, a process a core, and returns the jobs that are not finished."""
    tests = [f"tests/kernels/test_kernels_{x}.py" for x in ("model", *AGAIN, "decode", "maps")]
    plugin = [
        "-m",
        "pytest",
        "-q",
        "--tb=no",
        "-p",
        "gpu.precompile",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
    ]
    programs = {name: ["-m", "gpu.precompile", name] for name in ("bench", "train")}
    programs |= {x: [*plugin, x] for x in tests}
    newer = {f"{x}, newer ptxas": [*plugin, x] for x in tests[1:4]}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        environment = unpack_for_compilation(bundle, Path(folder)) | {
            "TRITON_CACHE_DIR": str(cache.resolve())
        }

        def job(name: str) -> bool:
            if name in newer:
                return finished(
                    name, newer[name], environment | {PTXAS: str(Path(folder, "ptxas"))}, end
                )
            return finished(name, programs[name], environment, end)

        names = [*programs, *newer]
        return [name for name, done in zip(names, pool.map(job, names), strict=True) if not done]


def unpack_for_compilation(bundle: Path, folder: Path) -> dict[str, str]:
    """The environment of processes that compile: peers, and a libcuda that launchers can be linked with."""
    for wheel in bundle.glob("*.whl"):
        with zipfile.ZipFile(wheel) as files:
            files.extractall(folder / "peers")
    ptxas = folder / "ptxas"
    ptxas.write_bytes(lzma.decompress((bundle / "ptxas.xz").read_bytes()))
    ptxas.chmod(0o755)
    if compiler := shutil.which("gcc"):
        (folder / "empty.c").touch()
        library = ["-shared", "-Wl,-soname,libcuda.so.1", "-o", str(folder / "libcuda.so.1")]
        subprocess.run([compiler, *library, str(folder / "empty.c")], check=True)
    kept = {
        k: v
        for k, v in os.environ.items()
        if k not in ("TRITON_INTERPRET", "NALANDA_BACKEND", PTXAS)
    }
    path = [
        *PATHS,
        str(ROOT / "tests" / "helpers"),
        *filter(None, [kept.get("PYTHONPATH")]),
        str(folder / "peers"),
    ]
    return kept | {
        "PYTHONPATH": os.pathsep.join(path),
        "NALANDA_TEST_DEVICE": "cpu:0",  # not "cpu": that is the interpreter
        "NALANDA_ARCH": "sm_90",
        "TRITON_STORE_BINARY_ONLY": "1",
        "TRITON_LIBCUDA_PATH": str(folder),
    }


def finished(name: str, program: list[str], environment: dict[str, str], end: float) -> bool:
    """Whether a job came to its end in time; a kernel that it has compiled stays in any case."""
    if time.monotonic() >= end:
        return False
    with subprocess.Popen(
        [sys.executable, *program],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            said = process.communicate(timeout=end - time.monotonic())[0].strip().splitlines()
        except subprocess.TimeoutExpired:
            process.kill()
            return False
    print(f"{name}: {said[-1] if said else process.returncode}", flush=True)
    return process.returncode in (0, 1)  # tests fail on garbage


def pack(cache: Path, file: Path) -> None:
    """Entries without temporary files, the same bytes for the same entries."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.mtime = entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        return entry

    beside = file.with_name("part.tar.xz")
    with tarfile.open(beside, "w:xz", preset=6) as files:
        for path in sorted(cache.glob("*/*")):
            if path.suffix in (".json", ".cubin", ".so"):
                files.add(path, f"{path.parent.name}/{path.name}", filter=plain)
    beside.replace(file)
