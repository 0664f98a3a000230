"""One folder with what a bare machine lacks: peers, a newer ptxas, compiled kernels, and text as tokens.

*.whl: flash-linear-attention, and wheels that are put into the folder by hand.
ptxas.xz: the assembler of CUDA 13.4, which mends known errors of the one that Triton brings.
cache.tar.xz: Triton's cache for sm_90, of what bench and the tests launch.
texts/NAME.tar.xz: token sets with their tokenizers. No tokenizer is trained on a card's time.
demo.jsonl: a CPU's losses on the set `demo`, in fp32.
tuned.json: the sizes that the peer's autotuner found on a card, if lab/records has any.
manifest.json: versions, and the hash of Triton's files: its cache fits no other Triton.
"""

import hashlib
import importlib.util
import json
import lzma
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpu import tuned
from gpu.card import ROOT, Card
from gpu.correctness import AGAIN, PTXAS
from gpu.curves import demo_settings
from gpu.results import hash_sources
from gpu.train import run_trainer

WHEELS = ["fla-core==0.6.0", "flash-linear-attention==0.6.0"]
NVCC = "nvidia-cuda-nvcc==13.4.92"
TARGET = 54e6  # bytes; a card's machine takes 64 MiB a call, with a working tree of 10 MB


def triton_hash() -> str:
    """Of all that Triton's cache depends on, but sources, options and ptxas; libtriton is most of it."""
    from triton.runtime.cache import triton_key

    return hashlib.sha256(triton_key().encode()).hexdigest()


def unpack(bundle: Path) -> Path:
    """The folder with `peers` and `ptxas`, beside the temporary files; a second call finds it there.

    The kernels go into Triton's cache, if they are for this Triton.
    """
    from triton import knobs

    manifest = json.loads((bundle / "manifest.json").read_text())
    folder = Path(tempfile.gettempdir(), f"nalanda-{manifest['made']}")
    if folder.exists():
        return folder
    part = Path(tempfile.mkdtemp(dir=folder.parent))
    unpack_files(bundle, part)
    if manifest["key"] == triton_hash():
        unpack_cache(bundle / "cache.tar.xz", Path(knobs.cache.dir))
    else:
        print(f"{bundle}: kernels are left out; they are for Triton {manifest['triton']}")
    return part.rename(folder)


def unpack_cache(archive: Path, cache: Path) -> None:
    """Unpacks kernels. Triton's cache names files by absolute paths, those of the machine that compiled them."""
    shutil.unpack_archive(archive, cache, filter="data")
    for group in cache.glob("*/__grp__*.json"):
        names = json.loads(group.read_text())["child_paths"]
        paths = {name: str(group.with_name(name)) for name in names}
        group.write_text(json.dumps({"child_paths": paths}))


def unpack_files(bundle: Path, folder: Path) -> None:
    """Unpacks the wheels into `peers`, and ptxas."""
    for wheel in bundle.glob("*.whl"):
        shutil.unpack_archive(wheel, folder / "peers", "zip")
    (folder / "ptxas").write_bytes(lzma.decompress((bundle / "ptxas.xz").read_bytes()))
    (folder / "ptxas").chmod(0o755)
    for archive in bundle.glob("texts/*.tar.xz"):
        name = archive.name.removesuffix(".tar.xz")
        shutil.unpack_archive(archive, folder / "texts" / name, filter="data")
    if (bundle / "demo.jsonl").exists():
        shutil.copyfile(bundle / "demo.jsonl", folder / "demo.jsonl")


def read_texts(named: list[str]) -> dict[str, Path]:
    """The token sets of NAME=FOLDER arguments. Raises ValueError for what is none."""
    texts = {}
    for text in named:
        name, _, folder = text.partition("=")
        if not name.isidentifier() or not (Path(folder) / "index.json").is_file():
            raise ValueError(f"--text {text}: no token set; make one with `nalanda data prepare`")
        if not (Path(folder) / "tokenizer").is_dir():
            raise ValueError(f"--text {text}: the set has no tokenizer")
        texts[name] = Path(folder)
    return texts


def pack_texts(bundle: Path, texts: dict[str, Path]) -> None:
    """Packs the token sets. `demo` and its curve on this CPU are made here, and `python` with web's tokenizer."""
    (bundle / "texts").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        web = texts.get("web")
        made = "python" in names_of(bundle) and web and is_packed(bundle, "web", web)
        if web and "python" not in texts and not made:
            options = ["--tokenizer", str(web / "tokenizer")]
            texts = {"python": prepare(Path(work), "python", *options)} | texts
        pack_sets(bundle, texts)
    if not (bundle / "demo.jsonl").exists():
        make_curve(bundle)


def names_of(bundle: Path) -> list[str]:
    return sorted(x.name.removesuffix(".tar.xz") for x in bundle.glob("texts/*.tar.xz"))


def prepare(work: Path, source: str, *options: str) -> Path:
    """Makes a token set of a source or a recipe in the folder."""
    card, folder = Card("cpu", output=work), work / "text"
    command = ["data", "prepare", source, str(folder), *options]
    code, last = card.python(["-m", "nalanda_cli", *command])
    if code:
        raise SystemExit(f"bundle: the text of {source}: {last}")
    return folder


def is_packed(bundle: Path, name: str, folder: Path) -> bool:
    """Whether an earlier call packed this set."""
    packed = bundle / "texts" / f"{name}.json"
    return packed.exists() and packed.read_bytes() == (folder / "index.json").read_bytes()


def pack_sets(bundle: Path, texts: dict[str, Path]) -> None:
    for name, folder in texts.items():
        if is_packed(bundle, name, folder):
            continue
        shutil.make_archive(str(bundle / "texts" / name), "xztar", folder)
        shutil.copyfile(folder / "index.json", bundle / "texts" / f"{name}.json")
        if name == "demo":
            (bundle / "demo.jsonl").unlink(missing_ok=True)  # it was of another text


def make_curve(bundle: Path) -> None:
    """Trains the demo on this CPU, on the bundle's set `demo`."""
    with tempfile.TemporaryDirectory() as folder:
        work, archive = Path(folder), bundle / "texts" / "demo.tar.xz"
        text = work / "text"
        if archive.exists():
            shutil.unpack_archive(archive, text, filter="data")
        else:
            prepare(work, "recipes/demo.yaml")
            shutil.make_archive(str(bundle / "texts" / "demo"), "xztar", text)
        card = Card("cpu", output=work)
        ended = run_trainer(card, "demo", work / "run", *demo_settings(text))
        if ended.problem:
            raise SystemExit(f"bundle: the demo's curve: {ended.problem}")
        shutil.copyfile(work / "run" / "metrics.jsonl", bundle / "demo.jsonl")
    print(f"{bundle}: the demo's curve has {len(ended.losses)} losses", flush=True)


def make_bundle(bundle: Path, minutes: float, texts: dict[str, Path]) -> None:
    """Fills the folder, with as many kernels as `minutes` allow; called again, it goes on. texts: sets by name."""
    import triton

    end = time.monotonic() + 60 * minutes
    bundle.mkdir(parents=True, exist_ok=True)
    if not any(bundle.glob("*.whl")):
        download(WHEELS, bundle)
    if not (bundle / "ptxas.xz").exists():
        with tempfile.TemporaryDirectory() as folder:
            download([NVCC], Path(folder))
            shutil.unpack_archive(next(Path(folder).glob("*.whl")), folder, "zip")
            ptxas = next(Path(folder).rglob("bin/ptxas"))
            (bundle / "ptxas.xz").write_bytes(lzma.compress(ptxas.read_bytes(), preset=9))

    pack_texts(bundle, texts)
    cache = bundle.with_name(f"{bundle.name}-cache-{triton_hash()[:8]}").resolve()
    left = compile_all(bundle, cache, end)
    tuned.join(sorted(ROOT.glob(f"lab/records/*/{tuned.NAME}")), bundle / tuned.NAME)
    shutil.make_archive(str(bundle / "cache"), "xztar", cache)
    kernels = len(list(cache.glob("*/*.cubin")))
    facts = {"triton": triton.__version__, "key": triton_hash()}
    names = names_of(bundle)
    manifest = facts | {"made": "-".join([hash_sources(), str(kernels), *names]), "texts": names}
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    files = [file for file in bundle.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    over = f", more than the {TARGET / 1e6:.0f} it should have" if size > TARGET else ""
    print(f"{bundle}: {kernels} kernels for Triton {triton.__version__} alone")
    for file in sorted(files, key=lambda file: -file.stat().st_size):
        print(f"{file.stat().st_size / 1e6:8.2f} MB  {file.relative_to(bundle)}")
    print(f"{bundle}: {size / 1e6:.1f} MB{over}; texts: {', '.join(names)}")
    if left:
        print(f"not finished: {', '.join(left)}; the same command goes on")


def download(packages: list[str], folder: Path) -> None:
    options = ["-q", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    options += ["--python-version", "3.12", "--platform", "manylinux2014_x86_64"]
    command = [sys.executable, "-m", "pip", "download", *options, "-d", str(folder), *packages]
    subprocess.run(command, check=True)


def compile_all(bundle: Path, cache: Path, end: float) -> list[str]:
    """Compiles what a card would launch, and returns the jobs that are not finished."""
    pytest = ["-m", "pytest", "-q", "--tb=no", "-p", "gpu.precompile", "-p", "no:cacheprovider"]
    if importlib.util.find_spec("xdist"):
        pytest += ["-n", "logical"]
    jobs = {"bench": ["-m", "gpu.precompile"]}
    for name in ("model", *AGAIN, "decode", "maps", "epilogues", "loss"):
        jobs[name] = [*pytest, f"tests/kernels/test_kernels_{name}.py"]
    jobs |= {f"{name}, newer ptxas": jobs[name] for name in AGAIN}

    left = []
    card = Card(output=cache, end=end)
    with tempfile.TemporaryDirectory() as folder:
        unpack_files(bundle, Path(folder))
        path = [str(ROOT / "tests" / "helpers"), f"{folder}/peers"]
        variables = {
            "NALANDA_TEST_DEVICE": "cpu:0",  # not "cpu": that is the interpreter
            "TRITON_CACHE_DIR": str(cache),
            "TRITON_STORE_BINARY_ONLY": "1",
        }
        for name, program in jobs.items():
            newer = {PTXAS: f"{folder}/ptxas"} if "newer" in name else {}
            try:
                code, last = card.python(program, path, **variables, **newer)
            except subprocess.TimeoutExpired:  # the kernels that it has compiled stay
                code, last = None, "out of time"
            print(f"{name}: {last}", flush=True)
            if code not in (0, 1):  # tests fail on garbage
                left.append(name)
    return left
