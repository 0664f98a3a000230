"""What the pages tell readers to type: every command is one that its program understands, and those that need
neither a GPU nor a network run, in the order of their page. CONTRIBUTING.md, "Pages", has the marks."""

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib

import pages
import pytest
import typer.main
from huggingface_hub.cli.hf import app as hf
from pages import DATA, ROOT, STEPS, TINY, Command, read_page, write_corpus

import nalanda_cli
from nalanda.common.errors import InputError
from nalanda.compare.options import StudyOptions
from nalanda.compare.study import load_arms, read_study
from nalanda.config.load import find_recipe, load_config, read_sections
from nalanda.config.schema import DataConfig

FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "kernels" / "README.md"]
FILES += [*sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
FILES = [
    file for file in FILES if "zoo" not in file.parts
]  # the cards of runs, which speak of their folder
PAGES = {str(file.relative_to(ROOT)): read_page(file) for file in FILES}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

# ------------------------------ typed


@pytest.fixture(scope="session")
def checkout(tmp_path_factory):
    """What a reader has before the first command; commands may write there."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("examples", "kernels", "tests", "pyproject.toml", "constraints.txt", "Makefile"):
        (folder / name).symlink_to(ROOT / name)
    for name in ("recipes", "docs/zoo"):
        shutil.copytree(ROOT / name, folder / name)
    return folder


@pytest.mark.parametrize("name", PAGES)
def test_commands_can_be_typed(name, checkout, monkeypatch):
    monkeypatch.chdir(checkout)
    page = PAGES[name]
    wrong = {str(command): mistake(command.words, command.needs) for command in page.commands}
    wrong |= {typed: mistake(shlex.split(typed), named=True) for typed in page.named}
    found = [
        *page.unknown,
        *(f"{typed}\n    {problem}" for typed, problem in wrong.items() if problem),
    ]
    assert not found, "\n".join(found)


def mistake(words: list[str], needs: str = "", named: bool = False) -> str:
    """What is wrong with a command. named: in the text, where it may lack its arguments."""
    program, *arguments = words
    try:
        ours = re.compile("(recipes|examples|kernels|tests|docs)/")
        if absent := [
            word for word in words if ours.match(word) and not (named or (ROOT / word).exists())
        ]:
            return f"there is no {absent[0]}"
        if program == "nalanda":
            check_nalanda(arguments, named)
        elif program == "hf":
            check_hf(arguments)
        elif program == "git":
            known = ("clone", "tag", "push")
            return "" if arguments[0] in known else f"only git {', '.join(known)} are known here"
        elif program == "make":
            return subprocess.run(
                ["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True
            ).stderr
        elif program == "pip":
            unknown = {*re.findall(r"\[(\w+)\]", " ".join(words))} - EXTRAS.keys()
            return (
                f"no extra {unknown}" if unknown else "" if needs else "mark it: # needs a network"
            )
        elif program in ("accelerate", "torchrun"):
            found = parsed(words)
            module, no_python = found.module, getattr(found, "no_python", False)
            front = [] if no_python else ["python", "-m"] if module else ["python"]
            return mistake([*front, found.training_script, *found.training_script_args], needs)
        elif program in ("python", "python3"):
            return check_python(arguments, needs)
        elif program.startswith("dist/"):  # in an environment that the page makes
            return "" if needs else "mark it: # needs a network"
        elif program == "cd" or (ROOT / program).is_file():
            return ""
        elif program not in ("lm_eval", "pytest", "transformers"):
            return f"{program} is unknown to this test"
    except (InputError, ValueError, typer.BadParameter.__mro__[1]) as error:
        if not (named and type(error).__name__ == "MissingParameter"):
            return str(error) or error.format_message()
    return ""


def check_hf(arguments: list[str]) -> None:
    context = hf.make_context("hf", list(arguments))
    name, command, rest = hf.resolve_command(context, [*context._protected_args, *context.args])
    command.make_context(name, rest, parent=context)


def check_nalanda(arguments: list[str], named: bool = False) -> None:
    context = pages.read_arguments(nalanda_cli.app, "nalanda", arguments, named)
    if context is None:
        return
    given, name = context.params, context.info_name
    if name == "prepare":
        DataConfig(given["source"], name=given["name"], revision=given["revision"]).check()
    if name == "compare":
        options = StudyOptions(arms=given["arms"])
        load_arms(read_study(given["recipe"], given["overrides"] or [], options))
        return
    recipe = None if given.get("keys") else given.get("recipe")
    overrides = given.get("overrides") or []
    if name == "prepare" and overrides:  # the settings of a recipe
        recipe = given["source"]
    if not recipe or (named and recipe.isupper()):
        return
    if "plugins" not in read_sections(
        find_recipe(recipe), overrides
    ):  # which would stay registered
        load_config(recipe, overrides)


def test_pages_train_in_folders_of_their_own():
    """Pages run one after another in one checkout: a folder that holds another run is refused, or resumed."""
    trained: dict[str, dict[str, set[str]]] = {}
    for name, page in PAGES.items():
        for command in page.commands:
            words = trained_by(command.words)
            if command.needs or not words:
                continue
            recipe, *keys = words
            folder = next(
                (key.partition("=")[2] for key in keys if key.startswith("output_dir=")), ""
            )
            folder = folder or str(read_sections(find_recipe(recipe), [])["output_dir"])
            trained.setdefault(folder, {}).setdefault(name, set()).add(" ".join([recipe, *keys]))
    shared = {
        folder: {name: sorted(how) for name, how in pages.items()}
        for folder, pages in trained.items()
        if len({typed for how in pages.values() for typed in how}) > 1 and len(pages) > 1
    }
    assert "runs/demo" in trained
    assert not shared


def trained_by(words: list[str]) -> list[str]:
    """The recipe and the keys of a command that trains; else nothing."""
    for program in ("train", "recipes/pretrain.py"):
        if program in words:
            recipe = words[words.index(program) + 1 :]
            listing = not recipe or recipe[0].startswith("-")  # `nalanda train --keys lr`
            return [] if listing else [x for x in recipe if not x.startswith("-")]
    return []


def check_python(arguments: list[str], needs: str) -> str:
    kind, *rest = arguments
    if kind == "-c":
        compile(rest[0], kind, "exec")
    elif kind == "-m" and rest[0] == "nalanda_cli":
        check_nalanda(rest[1:])
    elif kind == "-m" and rest[0] == "venv":
        return ""
    elif kind == "recipes/pretrain.py":
        check_nalanda(["train", *rest])
    elif kind == "examples/images/images.py":
        read_sections(find_recipe(rest[0]), rest[1:])
    elif kind in ("-m", "examples/chat/chat.py"):
        parsed(["python", *arguments])
    elif not (ROOT / kind).exists() and needs != "a network":
        return f"{kind}: there is no such file"
    return ""


class Stop(Exception):
    pass


def parsed(words: list[str]) -> argparse.Namespace:
    """The options of a command, which is stopped when it has read them."""
    read = argparse.ArgumentParser.parse_args

    def stop(parser, args=None, namespace=None):
        raise Stop(read(parser, args, namespace))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        patch.setattr(sys, "argv", words)
        patch.setattr(sys, "path", [*sys.path])
        try:
            pages.start(words)
        except Stop as stopped:
            return stopped.args[0]
        except SystemExit:
            raise ValueError("its options are not understood") from None
    raise ValueError("it reads no options")


# ------------------------------ run

SMALL = {  # what a command that matches gets at its end, to be quick
    "(nalanda train|pretrain.py) (recipes/)?demo(?!.*tokenizer=)": TINY,
    "train demo .*tokenizer=": f"{STEPS} data.seq_len=128 data.max_validation_rows=4"
    " model.hidden_size=32 model.intermediate_size=64",
    "train hybrid_30m(.*runs/hybrid_400)?$": f"{TINY} model.vocab_size=512 model.num_hidden_layers=4",
    "train hybrid_30m .*init_from": f"{DATA} train.steps=1 train.tokens_per_step=128 train.micro_batch_size=1"
    " schedule.warmup_steps=1",
    "my_mixer/recipe.yaml": "data.source=corpus train.steps=4",
    "data prepare .*--tokenizer": "--workers 1",
    "data prepare demo ": "data.source=corpus --workers 1",
    "^nalanda export .*--step": "--step 8",
    "nalanda eval|nalanda_cli eval": "--limit 2",
    "eval .*(needles|niah)": "--tasks niah_multikey_1_1k",
    "nalanda perplexity": "--tokens 2000 --length 512",
    "assistant.py": "--max_steps 2 --max_length 128 --eval_strategy no",
    "images.py .*digits.yaml": "attention=mala seeds=[0] train.max_steps=2",
    "^pytest": "--collect-only -q",
}
BEFORE = """
nalanda train demo
nalanda eval --tasks python_docs --fetch runs/demo/eval
nalanda train hybrid_30m
"""
"""What made the models that pages take as there."""
LINKS = {"my_text": "corpus", "A": "runs/demo/final", "B": "runs/hybrid_30m/final"}
ROWS = {
    "lambada_test": {"text": "the miller sold the mill"},
    "boolq_val": {"passage": "Mills grind.", "question": "do mills grind", "label": 1},
    "swde_val": {"text": "Mill: stone. The mill is made of ", "value": "stone"},
    "arc_easy_test": {"query": "Question: who mills?\nAnswer:", "choices": ["a", "b"], "gold": 1},
    "arc_easy_train": {"query": "Question: who reads?\nAnswer:", "choices": ["a", "b"], "gold": 0},
}
CHAT = "{% for turn in messages %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}"


@pytest.fixture(scope="session")
def used(checkout, tmp_path_factory):
    """The checkout of someone who has trained the demo, with texts and other files that pages name."""
    from PIL import Image
    from sklearn.datasets import load_digits

    folder = tmp_path_factory.mktemp("used") / "checkout"
    shutil.copytree(checkout, folder, symlinks=True)
    text = write_corpus(folder / "corpus")
    for name in ("novel.txt", "book.txt", "long.txt"):
        (folder / name).write_text(text[:20000])
    for name in ("DIR", "LRA/retrieval"):
        (folder / name).mkdir(parents=True)
    for name, row in ROWS.items():
        (folder / "DIR" / f"{name}.jsonl").write_text(5 * (json.dumps(row) + "\n"))
    for name in ("train", "eval", "test"):
        (folder / f"new_aan_pairs.{name}.tsv").write_text(20 * "1.0\ta\tb\tone text\tanother\n")
    Image.fromarray(load_digits().images[7].astype("uint8") * 15).save(folder / "seven.png")
    failed = [attempt(command, folder) for command in pages.commands("before", 0, BEFORE)]
    assert not any(failed), failed
    for link, target in LINKS.items():
        (folder / link).symlink_to(target)
    shutil.copytree(folder / "runs/demo/final", folder / "C")
    (folder / "C" / "chat_template.jinja").write_text(CHAT)
    return folder


def attempt(command: Command, folder) -> str:
    """Runs a command. Returns what went wrong."""
    typed = shlex.join(command.words)
    extra = [more for pattern, more in SMALL.items() if re.search(pattern, typed)]
    if command.words[0] in ("cd", "git", "make") or (command.takes and not extra):
        return ""
    code, printed = pages.run(
        [*command.words, *shlex.split(" ".join(extra))], folder, command.environment
    )
    if code:
        return f"{command}\nexits with {code}:\n{printed[-3000:]}"
    if command.printed is not None and printed.split() != command.printed.split():
        return f"{command}\nprints\n{printed}\nnot\n{command.printed}"
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, page in PAGES.items() if page.commands or page.python]
)
def test_commands_run(name, used, tmp_path):
    page, folder = PAGES[name], tmp_path / "checkout"
    shutil.copytree(used, folder, symlinks=True)
    failed = [attempt(command, folder) for command in page.commands if not command.needs]
    if page.python:
        (folder / "page.py").write_text("\n".join(page.python))
        failed.append(attempt(Command(name, 0, ["python", "page.py"]), folder))
    assert not any(failed), "\n\n".join(filter(None, failed))
