"""The running Python as a corpus: prose without copies, the same in every process."""

import itertools
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from nalanda.common.errors import InputError
from nalanda.config.schema import DataConfig
from nalanda.data import corpus, sources
from nalanda.data.python_docs import (
    PASSAGE,
    _find_passages,
    python_documents,
    split_families,
    without_copies,
)

FEW_MODULES = {
    "reference",
    "bisect",
    "_bisect",
    "heapq",
    "_heapq",
    "json",
    "_json",
    "abc",
    "gzip",
    "bz2",
    "_bz2",
    "lzma",
}


@pytest.fixture(scope="module")
def few_documents():
    return without_copies(python_documents(FEW_MODULES))


@pytest.mark.slow
def test_python_corpus_is_prose_without_tests_and_tables():
    names = python_documents().keys()
    assert {"json/decoder.py", "heapq.py", "itertools (C)", "reference/with"} <= names
    excluded = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "lib2to3"}
    assert not [name for name in names if excluded & set(name.split("/"))]
    assert "stringprep.py" not in names
    assert sum(map(len, python_documents().values())) > 5_000_000


def test_python_corpus_has_no_copies(few_documents):
    documents = python_documents(FEW_MODULES)
    assert "_heapq (C)" in documents
    assert "_heapq (C)" not in few_documents  # heapq.py holds the same docstrings
    assert "reference/with" not in few_documents  # a part of reference/compound
    passages = [set(_find_passages(text)) for text in few_documents.values()]
    for one, other in itertools.combinations(passages, 2):
        assert len(one & other) <= max(len(one), len(other)) / 2


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_no_docstring_of_training_is_in_validation(few_documents, share):
    import ast

    train, validation = split_families(few_documents, share)
    assert train.keys() | validation.keys() == few_documents.keys()
    assert not train.keys() & validation.keys()
    assert train
    assert validation
    sizes = [sum(map(len, part.values())) for part in (validation, few_documents)]
    assert share / 2 < sizes[0] / sizes[1] <= share
    held_out = " ".join(" ".join(validation.values()).split())
    for name, text in train.items():
        if not name.endswith(".py"):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                docstring = " ".join((ast.get_docstring(node) or "").split())
                assert len(docstring) < PASSAGE or docstring not in held_out, (name, docstring)
    shared = {b for t in train.values() for b in _find_passages(t)}
    assert not shared & {b for t in validation.values() for b in _find_passages(t)}


def test_python_corpus_does_not_depend_on_the_program(monkeypatch):
    """Command-line libraries replace sys.excepthook; a run must resume under any launcher."""
    before = python_documents({"sys"})
    monkeypatch.setattr(sys, "excepthook", lambda *error: None)
    assert python_documents({"sys"}) == before


@pytest.mark.slow
def test_python_corpus_is_the_same_in_every_process():
    code = textwrap.dedent("""
        import sys, types
        from hashlib import sha256
        package = types.ModuleType("nalanda"); package.__path__ = [sys.argv[1]]
        sys.modules["nalanda"] = package
        from nalanda.data.python_docs import python_splits
        parts = [list(part.items()) for part in python_splits(0.05).values()]
        print(sha256(repr(parts).encode()).hexdigest())
    """)
    package = str(Path(corpus.__file__).parents[1])
    sums = {
        subprocess.run(
            [sys.executable, "-c", code, package],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(sums) == 1


def test_python_corpus_does_not_depend_on_the_order_of_the_file_system(monkeypatch):
    names = list(python_documents({"json", "email"}))
    monkeypatch.setattr(Path, "rglob", lambda *args, rglob=Path.rglob: reversed(list(rglob(*args))))
    assert list(python_documents({"json", "email"})) == names


def test_a_python_without_its_language_reference(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(InputError, match=r"no pydoc_data\.topics"):
        python_documents()


@pytest.mark.slow
def test_documents_in_memory_need_no_buffer():
    """Each is a shard, so a permutation of the shards shuffles them all."""
    documents = sources.open_corpus(DataConfig(source="python"), "validation")
    orders = [
        [*corpus.DocumentStream(documents, seed=1, buffer_size=size, epochs=1).texts()]
        for size in (1, 1000)
    ]
    assert orders[0] == orders[1]
    assert len({*orders[0]}) == len(documents.shards) > 1
