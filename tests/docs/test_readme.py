"""The README as a reader types it: its blocks, in order, in one fresh shell without an environment."""

import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pages import FENCE, NEEDS, ROOT, write_corpus

README = (ROOT / "README.md").read_text(encoding="utf-8")
FENCES = [(fence[2], fence[3]) for fence in FENCE.finditer(README)]


def script() -> str:
    """The bash and Python of the README. Commands that need a GPU or a network are left out."""
    blocks = []
    for language, body in FENCES:
        if language == "bash":
            typed = re.findall(r"(?:.*\\\n)*.+\n", body)
            blocks.append("".join(command for command in typed if not NEEDS.search(command)))
        elif language == "python":
            blocks.append(f"python - <<'END'\n{body}END\n")
    return "".join(blocks)


@pytest.fixture
def machine(recipe: Path, tmp_path: Path) -> Path:
    """A folder in which `git` and `make` are stand-ins: a checkout with a recipe of seconds, a small environment."""
    settings = yaml.safe_load(recipe.read_text()) | {"output_dir": "runs/demo"}
    (tmp_path / "demo").write_text(yaml.safe_dump(settings))
    text = write_corpus(tmp_path / "corpus")
    (tmp_path / "book.txt").write_text(text[:200_000])

    programs = Path(sys.executable).parent
    activate = f"""\
export PATH={shlex.quote(str(programs))}:$PATH PYTHONPATH={shlex.quote(os.pathsep.join(sys.path))}
"""
    (tmp_path / "activate").write_text(activate)
    write_program(
        tmp_path / "bin/git",
        """
        [ "$1 $2 $3" = "clone URL nalanda" ] || exit 2
        mkdir nalanda && cp demo book.txt activate nalanda
        """,
    )
    write_program(
        tmp_path / "bin/make",
        """
        [ "$*" = test ] && exit
        [ "$*" = demo ] && [ -f demo ] || exit 2
        mkdir -p .venv/bin && cp activate .venv/bin && . .venv/bin/activate && nalanda train demo
        """,
    )
    return tmp_path


def write_program(file: Path, body: str) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text("#!/bin/bash\n" + re.sub("^ +", "", body, flags=re.MULTILINE))
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


@pytest.mark.slow
def test_the_blocks_run_in_one_fresh_shell(machine):
    environment = {
        "PATH": f"{machine / 'bin'}:/usr/bin:/bin",
        "HOME": str(machine),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    shell = subprocess.run(
        ["bash", "-ex", "-c", script()],
        cwd=machine,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert shell.returncode == 0, shell.stdout[-3000:]

    checkout = machine / "nalanda"
    for folder in ("runs/demo", "runs/book"):
        assert (checkout / folder / "final" / "model.safetensors").is_file()
    assert (checkout / "runs/demo/report.html").is_file()

    (tree,) = (body for language, body in FENCES if body.startswith("runs/demo/"))
    files = re.findall(r"^  (\S+(?: {2}\S+)*)", tree, re.MULTILINE)
    names = " ".join(files).split()
    assert len(names) > 5
    for name in names:
        assert list((checkout / "runs/demo").glob(name.replace("-N", "-*"))), name


def test_the_tree_of_the_repository_is_there():
    (tree,) = (body for language, body in FENCES if body.startswith("kernels/"))
    for line in tree.splitlines():
        named, meaning = re.split(r" {3,}", line)
        for name in named.split():
            assert (ROOT / name).exists(), name
        if named == "examples/":
            folders = {file.name for file in (ROOT / named).iterdir() if file.is_dir()}
            assert set(meaning.split(", ")) <= folders


def test_the_readme_is_short():
    assert len(README.split()) <= 800
