"""The product's fixtures, for the lab's tests."""

import importlib.util
from pathlib import Path
from types import ModuleType

TESTS = Path(__file__).parents[2] / "tests"


def fixtures_of(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"product_{file.parent.name}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


product, evaluation = fixtures_of(TESTS / "conftest.py"), fixtures_of(TESTS / "eval/conftest.py")
no_lines_by_time, tokenizer, recipe = product.no_lines_by_time, product.tokenizer, product.recipe
blank = evaluation.blank
