"""The lab's pages: every command can be typed, and every link leads somewhere. No command runs."""

import importlib.util
import shlex
import subprocess

import pages
import pytest
from links import broken_links
from nalanda_lab import commands
from pages import ROOT, read_page

import nalanda_cli
import nalanda_typer
from nalanda.common.errors import InputError
from nalanda.compare.study import load_arms, read_study
from nalanda.config.load import load_config

PROGRAMS = {"nalanda": nalanda_cli.app, "nalanda-lab": commands.app}
PAGES = {str(file.relative_to(ROOT)): file for file in sorted((ROOT / "lab").rglob("*.md"))}
COMMANDS = [name for name, file in PAGES.items() if file.parent.name == "pages"]


def mistake(words: list[str], named: bool = False) -> str:
    """The problem of a command, or "". named: it stands in the text, where it may lack its arguments."""
    program, *arguments = words
    if program == "make":
        dry = ["make", "-n", *arguments]
        return subprocess.run(dry, cwd=ROOT, capture_output=True, text=True).stderr
    if program == "accelerate":  # accelerate launch recipes/pretrain.py RECIPE
        program, arguments = "nalanda", ["train", *arguments[2:]]
    if program == "python" and arguments[0] == "-m":
        return "" if importlib.util.find_spec(arguments[1]) else f"{arguments[1]}: no such module"
    if program == "pip":
        return ""
    if program not in PROGRAMS:
        return f"{program} is unknown to this test"
    try:
        context = pages.read_arguments(PROGRAMS[program], program, arguments, named)
        recipe = context and context.params.get("recipe")
        if context and recipe and not recipe.isupper():  # RECIPE stands for any
            overrides = context.params["overrides"] or []
            if context.command.name == "compare":
                load_arms(read_study(recipe, overrides))
            else:
                load_config(recipe, overrides)
    except InputError as error:
        return str(error)
    except nalanda_typer.UsageError as error:
        return "" if named and error.__class__.__name__ == "MissingParameter" else str(error)
    return ""


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_can_be_typed(name):
    page = read_page(PAGES[name])
    wrong = {str(command): mistake(command.words) for command in page.commands}
    wrong |= {typed: mistake(shlex.split(typed), named=True) for typed in page.named}
    problems = [f"{typed}\n    {problem}" for typed, problem in wrong.items() if problem]
    assert not [*page.unknown, *problems]


def test_a_mistake_in_a_command_is_noticed():
    assert "No such command" in mistake(["nalanda-lab", "study"])
    assert "No such option" in mistake(["nalanda-lab", "lra", "--fast"])
    assert "unknown model key 'hidden'" in mistake(["nalanda", "train", "demo", "model.hidden=3"])
    study = ["nalanda", "compare", "lab/nalanda_lab/width.yaml", "model.hidden=3"]
    assert "unknown model key 'hidden'" in mistake(study)
    assert mistake(["make", "gpu-weeks"])
    assert not mistake(["nalanda-lab", "analyze"], named=True)
    assert mistake(["python", "-m", "nalanda_lab.kernels.cost"])


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_files_and_headings(name):
    assert broken_links(PAGES[name]) == []
