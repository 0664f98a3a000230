"""Who may import whom, and what importing costs."""

import ast
import importlib.util
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml

from nalanda.common.errors import explained
from nalanda.inference.options import CARDS

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "nalanda": "src",
    "nalanda_cli": "src",
    "nalanda_typer": "src",
    "nalanda_pytest": "src",
    "nalanda_eval": "eval",
    "nalanda_kernels": "kernels",
}
# An import goes from a room to itself or to one with a smaller number.
ROOMS = {
    **{
        "nalanda_kernels": 0,
        "nalanda.common": 1,
        "nalanda.storage": 2,
        "nalanda.model": 3,
        "nalanda": 4,
        "nalanda.testing": 5,
        "nalanda.config": 6,
    },
    **{"nalanda.data": 7, "nalanda.train": 8},
    **{"nalanda.inference": 9, "nalanda.convert": 9, "nalanda.serve": 9},
    **{"nalanda.report": 10, "nalanda.compare": 11, "nalanda.check": 11, "nalanda_eval": 11},
    **{"nalanda_typer": 12, "nalanda_cli": 13, "nalanda_pytest": 13},
}
# Imports of ours that stand inside a function, and why.
DEFERRED = {
    (
        "nalanda.config.load",
        "nalanda.model.configuration",
    ): "imports torch; the rest of a recipe does not",
    ("nalanda.config.schema", "nalanda.model.configuration"): "as above",
    ("nalanda.data.workers", "nalanda.common.errors"): "the file also runs by itself",
    ("nalanda.report.recipes", "nalanda.report.info"): "imports torch",
    ("nalanda.report.runs", "nalanda.model.configuration"): "imports torch",
    ("nalanda.serve.vllm", "nalanda.serve.vllm.architecture"): "imports vLLM",
    ("nalanda_pytest", "nalanda.testing"): "imports torch, at every start of pytest",
    ("nalanda_eval.fetch", "nalanda_eval.adapter"): "imports lm-evaluation-harness",
    ("nalanda_eval.harness", "nalanda_eval.adapter"): "as above",
}


@cache
def modules() -> dict[str, Path]:
    found = {}
    for package, folder in PACKAGES.items():
        base = ROOT / folder
        for file in [*(base / package).rglob("*.py"), *base.glob(f"{package}.py")]:
            parts = file.relative_to(base).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def targets(module: str, node: ast.AST) -> set[str]:
    """The modules of ours that a statement imports."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        package = (
            module.split(".") if modules()[module].name == "__init__.py" else module.split(".")[:-1]
        )
        base = [*package[: len(package) + 1 - node.level], *filter(None, [node.module])]
        base = ".".join(base) if node.level else node.module
        names = [f"{base}.{alias.name}" for alias in node.names]
    else:
        return set()
    found = set()
    for name in names:
        while name and name not in modules():
            name = name.rpartition(".")[0]
        found |= {name} - {"", module}
    return found


@cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(file.read_text()) for name, file in modules().items()}


@cache
def imports() -> dict[str, set[str]]:
    """Every import, in functions and under TYPE_CHECKING too."""
    return {
        name: {target for node in ast.walk(tree) for target in targets(name, node)}
        for name, tree in trees().items()
    }


def room(module: str) -> str:
    return next(
        name for name in sorted(ROOMS, key=len, reverse=True) if f"{module}.".startswith(f"{name}.")
    )


def test_nothing_of_the_product_names_the_lab():
    """Its code, recipes, examples, pages and tests; where things went is in CONTRIBUTING.md and CHANGELOG.md."""
    rooms = ("src", "kernels", "eval", "recipes", "examples", "docs", "tests")
    texts = [
        f
        for r in rooms
        for f in (ROOT / r).rglob("*")
        if f.suffix in (".py", ".yaml", ".md", ".sh") and "decisions" not in f.parts
    ]
    assert len(texts) > 300
    assert not [
        str(f.relative_to(ROOT))
        for f in texts
        if re.search(r"nalanda[_-]lab|\blab/", f.read_text())
    ]


def test_the_page_names_files_that_exist():
    page = (ROOT / "docs" / "code.md").read_text(encoding="utf-8")
    files = {file.name for file in ROOT.rglob("*.py") if ".venv" not in file.parts}
    names = set(re.findall(r"\b\w+\.py\b", page))
    assert len(names) > 100
    assert names <= files, f"docs/code.md: no such file: {', '.join(sorted(names - files))}"


def test_the_quick_tests_are_files_that_exist():
    command = ["make", "-n", "-o", ".venv/.ready", "test-quick"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = re.findall(r"\btests/\S+\.py", printed)
    assert len(paths) > 5
    assert not [path for path in paths if not (ROOT / path).is_file()]


def test_no_circle():
    left = {name: set(found) for name, found in imports().items()}
    while ready := [name for name, found in left.items() if not found & left.keys()]:
        for name in ready:
            del left[name]
    assert len(imports()) > 90
    assert not left, f"these import one another in a circle: {', '.join(sorted(left))}"


def test_every_package_has_a_room():
    """Without a row, a folder would pass as `nalanda` itself, which config and data may import."""
    folders = {file.relative_to(ROOT).parts[2] for file in (ROOT / "src/nalanda").glob("*/**/*.py")}
    assert {f"nalanda.{name}" for name in folders} == {name for name in ROOMS if "." in name}


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_down(package):
    bad = [
        f"{module} imports {target}"
        for module, found in imports().items()
        for target in found
        if module.split(".")[0] == package
        and room(module) != room(target)
        and ROOMS[room(target)] >= ROOMS[room(module)]
    ]
    assert not bad


def test_the_command_line_alone_knows_typer():
    found = {
        module
        for module, file in modules().items()
        if re.search(r"^\s*(from|import) typer\b", file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert found == {"nalanda_cli", "nalanda_typer"}


def test_model_and_kernels_travel():
    """`save_pretrained` copies the model's files. An import from outside breaks a checkpoint. A name of the standard
    library breaks every program that is started in its folder."""
    folder = modules()["nalanda.model"].parent
    # `chunk` reads AIFF files; torch does not import it, and Python 3.13 no longer has it.
    names = {path.stem for path in folder.glob("*.py")} - {"chunk"}
    assert not names & sys.stdlib_module_names
    assert not [path for path in folder.iterdir() if path.is_dir() and path.name != "__pycache__"]
    by_name, whole = set(), set()
    for module, found in imports().items():
        if room(module) == "nalanda.model":
            for node in ast.walk(trees()[module]):
                if isinstance(node, ast.ImportFrom) and node.level == 1:
                    by_name.add(node.module)
                    whole |= set() if node.module else {alias.name for alias in node.names}
            allowed = {"nalanda_kernels"} if module == "nalanda.model.kernels" else set()
            assert {room(target) for target in found} <= {"nalanda.model"} | allowed, module
            nodes = ast.walk(trees()[module])
            absolute = [n for n in nodes if isinstance(n, ast.ImportFrom) and not n.level]
            assert not [n.module for n in absolute if (n.module or "").startswith("nalanda.")], (
                module
            )
    # Exports follow `from .ops import`, and not `from . import ops`.
    assert whole <= by_name


@pytest.mark.parametrize("package", ["nalanda", "nalanda_eval"])
def test_a_public_name_means_one_thing(package):
    seen: dict[str, str] = {}
    for module, tree in trees().items():
        if module.split(".")[0] == package:
            for node in tree.body:
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith(
                    "_"
                ):
                    assert node.name not in seen, f"{node.name}: {seen[node.name]} and {module}"
                    seen[node.name] = module


def test_deferred_imports_have_a_reason():
    found = set()
    for module, tree in trees().items():
        if room(module) in ("nalanda_cli", "nalanda_typer", "nalanda_kernels"):
            continue  # each command and each backend imports what it needs
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        inner = {node for function in functions for node in ast.walk(function)}
        found |= {(module, target) for node in inner for target in targets(module, node)}
    assert found == set(DEFERRED)


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


REGISTERED = """
config = AutoConfig.for_model(
    "nalanda", hidden_size=32, num_heads=2, num_hidden_layers=1, vocab_size=64
)
model = AutoModelForCausalLM.from_config(config)
names = [type(found).__name__ for found in (model, AutoModel.from_config(config))]
assert names == ["NalandaForCausalLM", "Decoder"], names
"""
AUTO = "from transformers import AutoConfig, AutoModel, AutoModelForCausalLM\n"


@pytest.mark.slow
def test_import_registers_and_is_light():
    """It imports nothing of others; the Auto classes know us; transformers is not patched."""
    program = f"""
import sys, nalanda
assert not {{"torch", "transformers", "numpy", "rich"}} & sys.modules.keys()
{AUTO}
assert "transformers.modeling_utils" not in sys.modules
{REGISTERED}
import transformers.models.llama
assert not hasattr(transformers.models.llama, "NalandaForCausalLM")
heavy = ("nalanda_kernels.triton", "fla", "datasets", "lm_eval", "matplotlib", "tensorboard")
print([name for name in heavy if name in sys.modules])
"""
    assert run(program).strip() == "[]"


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports",
    [
        AUTO + "import nalanda",
        "import nalanda, transformers.modeling_utils, transformers.generation.utils\n" + AUTO,
        "from nalanda.model import Int8Config, NalandaForCausalLM, ops\n" + AUTO,
    ],
    ids=["after the Auto classes", "before transformers' models", "by a class"],
)
def test_import_registers_in_any_order(imports, tmp_path):
    """A config in another process is unpickled, not made. A saved model has its code beside it."""
    folder = tmp_path / "model"
    program = f"""
{imports}
{REGISTERED}
import pickle
from pathlib import Path
model.save_pretrained({str(folder)!r})
Path({str(tmp_path / "config")!r}).write_bytes(pickle.dumps(config))
"""
    run(program)
    assert (folder / "language.py").exists()
    program = f"""
{imports}
import pickle
from pathlib import Path
config = pickle.loads(Path({str(tmp_path / "config")!r}).read_bytes())
assert type(AutoModel.from_config(config)).__name__ == "Decoder"
found = AutoModelForCausalLM.from_pretrained({str(folder)!r})
assert type(found).__name__ == "NalandaForCausalLM"
"""
    run(program)


LIGHT = {
    "--help": 0,
    "--version": 0,
    "runs {folder}": 0,
    "runs {folder}/none": 2,
    "plot {folder}/run --output {folder}/loss.png": 0,
    "report {folder}/run": 0,
    "report {folder}": 2,
    "train nosuch": 2,
    "train demo train.stepz=3": 2,
    "train demo train.steps=-3": 2,
    "info demo train.stepz=3": 2,
    "generate {folder} hello --seed -1": 2,
    "eval": 2,
    "eval /no/such": 2,
    "generate /no/such hello": 2,
    "generate {folder} hello --temperature -1": 2,
    "export {folder} {folder}/out": 2,
    "verify {folder}": 2,
    "convert /no/such {folder}/out": 2,
    "convert /no/such out.gguf": 2,
    "data inspect {folder}": 2,
    "generate {folder}/model x --file {folder}/none": 2,
    "generate {folder}/model x --state {folder}/none": 2,
    "generate {folder}/model x --state-dtype int4": 2,
    "generate {folder}/model x --dtype fp12": 2,
    "eval {folder}/model --tasks helaswag": 2,
    **{
        f"{command} --device cuda:0": 2
        for command in (
            "generate {folder}/model x",
            "eval {folder}/model",
            "perplexity {folder}/model",
        )
        if not any(any(Path("/dev").glob(files)) for files in CARDS)
    },
    **{
        f"train demo log.tracker={name}": 2
        for name in ("wandb", "trackio")
        if importlib.util.find_spec(name) is None
    },
    "data prepare": 2,
    "recipes": 0,
    "serve /no/such": 2,
    "serve {folder}/model": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run as its folder shows it, without a model."""
    folder = tmp_path_factory.mktemp("light")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "run").mkdir()
    (folder / "run" / "config.yaml").write_text("model: {mixer: gla}\ntrain: {steps: 2}\n")
    lines = [
        f'{{"step": {n}, "tokens": {n}, "loss": {3 - n}, "tokens_per_second": 9}}\n' for n in (1, 2)
    ]
    (folder / "run" / "metrics.jsonl").write_text("".join(lines))
    return folder


@pytest.mark.slow
def test_commands_that_need_no_torch_do_not_import_it(folder):
    """One process for all of them: it fails at the first that imports torch or transformers."""
    program = f"""
import contextlib, io, sys
import nalanda_cli
for line, code in {LIGHT!r}.items():
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            nalanda_cli.main(line.format(folder={str(folder)!r}).split())
        found = 0
    except SystemExit as stop:
        found = stop.code or 0
    assert found == code, (line, found, out.getvalue())
    heavy = [name for name in ("torch", "transformers", "lm_eval") if name in sys.modules]
    assert not heavy, (line, heavy)
"""
    run(program)


def test_a_package_of_an_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not there
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    with pytest.raises(ImportError) as missing:
        import matplotlib.pyplot  # noqa: F401
    assert str(explained(missing.value)) == "matplotlib: not installed; pip install 'nalanda[eval]'"


# Names that torch's objects have, but no public page of torch.
TORCH_FIELDS = {
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_modules",
    "_parameters",
    "_buffers",
    "_apply",
    "_compiled_call_impl",
    "_torchdynamo_orig_callable",
    "_dynamo_marked_constant",
    "_version",
    "_cdata",
    "_init_group",
    "_flatten",
    "_unflatten",
    "_concatenate",
    "_local_tensor",
    "_spec",
}


def private_names(tree: ast.Module) -> set[str]:
    """The names of torch in a file that begin with an underscore, up to that part."""
    found = set()
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
            found |= {node.attr} & TORCH_FIELDS
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value} & TORCH_FIELDS
        for name in names:
            if private := re.match(r"torch\.(?:[a-zA-Z]\w*\.)*_[a-zA-Z]\w*", name):
                found.add(private[0])
    return found


def test_private_names_of_torch_are_listed():
    used: dict[str, set[str]] = {}
    for module, tree in trees().items():
        for name in private_names(tree):
            used.setdefault(name, set()).add("/".join(modules()[module].parts[-2:]))

    page = (ROOT / "docs" / "code.md").read_text(encoding="utf-8")
    listed: dict[str, set[str]] = {}
    for row in page.partition("not public")[2].splitlines():
        cells = row.split(" | ")
        if cells[0].startswith("| `"):
            names, files = (re.findall(r"`([^`]+)`", cell) for cell in cells[:2])
            listed |= {key: set(files) for key in names}
    assert used == listed


def test_the_faults_of_the_mutants_fit_the_code():
    """`make mutants` leaves out a fault whose text has changed."""
    faults = yaml.safe_load((ROOT / "tests/mutants/faults.yaml").read_text(encoding="utf-8"))
    texts = {fault["file"]: (ROOT / fault["file"]).read_text(encoding="utf-8") for fault in faults}
    stale = [fault for fault in faults if texts[fault["file"]].count(fault["old"]) != 1]
    assert not stale
