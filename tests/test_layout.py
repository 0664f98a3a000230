"""Who may import whom, and what importing costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = {"nalanda", "nalanda_kernels", "nalanda_eval", "nalanda_cli"}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or ""))
    return found


def ours(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)} & OURS


@pytest.mark.parametrize(
    "path", sorted((ROOT / "kernels/nalanda_kernels").rglob("*.py")), ids=lambda p: p.name
)
def test_kernels_import_nothing_of_ours(path):
    assert ours(path) <= {"nalanda_kernels"}


@pytest.mark.parametrize("path", sorted((ROOT / "src/nalanda/model").glob("*.py")), ids=lambda p: p.name)
def test_model_is_flat_and_imports_siblings_only(path):
    """`save_pretrained` copies these files: an import that leaves the folder breaks a checkpoint."""
    assert ours(path) <= ({"nalanda_kernels"} if path.name == "ops.py" else set())
    siblings = {f".{p.stem}" for p in path.parent.glob("*.py")}
    relative = {name for name in imports(path) if name.startswith(".")}
    assert relative <= siblings
    guarded = {
        id(n) for t in ast.walk(ast.parse(path.read_text())) if isinstance(t, ast.Try) for n in ast.walk(t)
    }
    del guarded
    assert not [p for p in path.parent.iterdir() if p.is_dir() and p.name != "__pycache__"]


@pytest.mark.parametrize("path", sorted((ROOT / "src/nalanda").glob("*.py")), ids=lambda p: p.name)
def test_training_does_not_need_evaluation(path):
    assert "nalanda_eval" not in ours(path)


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_import_is_light():
    """No kernels, no peer, no data or evaluation stack, and the Auto classes know us."""
    program = """
import sys, nalanda
from transformers import AutoConfig
assert AutoConfig.for_model("nalanda").model_type == "nalanda"
heavy = ("nalanda_kernels.triton", "fla", "datasets", "lm_eval", "matplotlib", "tensorboard")
print([name for name in heavy if name in sys.modules])
"""
    assert run(program).strip() == "[]"


def test_help_imports_nothing_heavy():
    program = """
import sys
from nalanda_cli import main
sys.argv = ["nalanda", "--help"]
try:
    main()
except SystemExit as stop:
    assert not stop.code
print([name for name in ("torch", "transformers", "numpy", "nalanda") if name in sys.modules])
"""
    out = run(program)
    assert out.strip().splitlines()[-1] == "[]"
    for command in ("train", "eval", "generate", "info", "bench"):
        assert command in out
