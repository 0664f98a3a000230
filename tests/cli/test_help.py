"""What a person reads: help, examples, the commands after a command, mistyped names."""

import gc
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator

import pytest
import typer.main

import nalanda_cli
from nalanda.common.next_steps import NEXT, next_steps, print_next_steps
from nalanda.common.number_formats import LOADED, STATES
from nalanda_typer import loading_torch

ROOT = typer.main.get_command(nalanda_cli.app)


def commands(group=ROOT, *path: str) -> Iterator[tuple]:
    """Every command with its path, groups too."""
    yield path, group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, *path, name)


COMMANDS = dict(commands())


def parsed(line: str) -> tuple[str, ...]:
    """The path of the command in a line of a shell, whose arguments the command takes. Raises its errors."""
    program, *words = shlex.split(line)
    assert program == "nalanda"
    command, path = ROOT, ()
    while hasattr(command, "commands"):
        path += (words.pop(0),)
        command = command.commands[path[-1]]
    command.make_context("x", words)
    return path


@pytest.fixture(scope="module")
def helps() -> dict[tuple[str, ...], str]:
    """Every command's help as it is printed in 80 columns."""
    found = {}
    for path, command in COMMANDS.items():
        with command.make_context(
            " ".join(["nalanda", *path]), [], resilient_parsing=True
        ) as context:
            context.terminal_width, context.max_content_width = 80, 80
            found[path] = context.get_help()
    return found


def test_help_fits_80_columns_of_plain_text(helps):
    for path, text in helps.items():
        assert max(map(len, text.splitlines())) <= 80, path
        assert not re.search("[\x1b─│╭╰]", text), path


def test_every_argument_and_option_says_what_it_is():
    """Those of dataclasses too, whose help is the text below the field."""
    for path, command in COMMANDS.items():
        for parameter in command.params:
            assert parameter.help, (path, parameter.name)
            # The root has some of typer's, with its own words.
            assert not path or not parameter.help.endswith("."), (path, parameter.name)


@pytest.mark.parametrize(
    "path", [path for path, command in COMMANDS.items() if hasattr(command, "commands")]
)
def test_every_command_stands_once_in_a_panel_with_a_whole_sentence(helps, path):
    panels = {"Commands": ("prepare", "inspect")} if path else nalanda_cli.PANELS
    listed = [name for names in panels.values() for name in names]
    assert sorted(listed) == sorted(COMMANDS[path].commands)
    text = helps[path]
    places = [text.index(f"\n{title}:\n") for title in panels]
    assert places == sorted(places)
    rows = re.findall(r"^  (\w+) +(.*)$", text[places[0] :], re.MULTILINE)
    assert [name for name, _ in rows] == listed
    assert all(words.endswith(".") and not words.endswith("..") for _, words in rows)


def test_every_command_begins_with_an_example_that_it_takes(helps):
    for path, text in helps.items():
        if path and hasattr(COMMANDS[path], "commands"):
            continue
        _, first, second, *_ = re.split(r"\n\n", text)
        assert first.strip().endswith("."), path
        for line in second.splitlines():
            example = re.split(r" {3,}", line.strip())[0]
            assert example.startswith("nalanda "), path
            if "COMMAND" not in example:
                assert parsed(example)[: len(path)] == path


VALUES = {
    "run": "a run's folder",
    "models": ["a b", "c"],
    "model": "$x",
    "output": "o p",
    "set": "s&t",
    "recipe": "my recipe.yaml",
    "state": "s;t",
    "folder": "it's 1",
}


@pytest.mark.parametrize("done", NEXT)
def test_the_next_commands_parse_with_odd_names(done):
    lines = next_steps(done, **VALUES)
    assert 1 <= len(lines) <= 3
    for line in lines:
        words = shlex.split(line)
        if words[0] == "nalanda":
            parsed(line)
        elif words[0] == "python":
            compile(words[2], "-c", "exec")
            assert repr("it's 1") in words[2]
        assert not {"b", "1", "folder", "recipe.yaml"} & set(words)  # no name is torn


def test_a_next_command_is_as_one_would_type_it(capsys, monkeypatch):
    print_next_steps("train", run="runs/demo")
    assert capsys.readouterr().err == (
        "\nnext: nalanda report runs/demo\n"
        "      nalanda generate runs/demo 'Once upon a time'\n"
        "      nalanda eval runs/demo --output runs/demo\n"
    )
    assert next_steps("train", run="a b")[1] == "nalanda generate 'a b' 'Once upon a time'"
    assert next_steps("convert to fla", folder="m")[0] == (
        "python -c 'import fla; from transformers import AutoModelForCausalLM as Auto; "
        """print(Auto.from_pretrained("m"))'"""
    )
    assert "AutoModelForMaskedLM" in next_steps("write an encoder", folder="m")[0]
    monkeypatch.setenv("RANK", "1")
    print_next_steps("train", run="runs/demo")
    assert capsys.readouterr().err == ""


def test_a_model_of_python_is_asked_for_python(tmp_path):
    recipe = tmp_path / "config.yaml"
    for source, known in ("python", True), ("books", False):
        recipe.write_text(f"seed: 0\ndata:\n  source: {source}\n  seq_len: 8\nplugins: []\n")
        lines = next_steps("train", of=tmp_path, run="r")
        assert ("'def read_lines(path):'" in lines[1]) == known
        assert ("--tasks python_docs" in lines[2]) == known
        assert not any("trust" in line for line in lines)
    recipe.write_text("plugins:\n- my_mixer\n")
    plain, *loading = next_steps("train", of=tmp_path, run="r")
    assert "trust" not in plain
    assert all(line.endswith(" --trust-remote-code") for line in loading)
    for done in ("write a model", "write an encoder"):
        python = shlex.split(next_steps(done, of=tmp_path, folder=tmp_path)[-1])
        assert python[-1].endswith(
            f"from_pretrained({json.dumps(str(tmp_path))}, trust_remote_code=True))"
        )


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("trian demo", "No such command 'trian'. Did you mean 'nalanda train'? See nalanda --help"),
        ("list", "Did you mean nalanda recipes or nalanda runs? See nalanda --help"),
        ("models", "Did you mean nalanda recipes?"),
        ("chat runs/demo", "python examples/chat/chat.py"),
        ("sft runs/demo", "Did you mean python examples/assistant/assistant.py --config"),
        ("finetune runs/demo", "Did you mean nalanda train RECIPE model.init_from=RUN/final"),
        ("download x", "Did you mean nalanda train RECIPE data.source=OWNER/DATASET"),
        ("xyzzy", "No such command 'xyzzy'. See nalanda --help"),
        ("data xyzzy", "No such command 'xyzzy'. See nalanda data --help"),
        ("generate m --prompt x", "the prompt is an argument"),
        ("perplexity m --data x", "No such option: --data"),
        ("train demo --data book.txt", "write data.source=FILE"),
        ("info demo --gpus 8", "nalanda info RECIPE --processes N"),
        ("train demo --devices 8", "accelerate launch --num_processes N"),
        ("data prepair x y", "No such command 'prepair'. Did you mean 'nalanda data prepare'?"),
        ("generate m --max-new-token 3", "--max-new-tokens"),
        ("runs --jsn", "--json"),
        ("eval m --taks x", "--tasks"),
        ("train demo --step 3", "section.key=value"),
    ],
)
def test_the_nearest_name_is_suggested(capsys, line, answer):
    with pytest.raises(SystemExit) as stop:
        nalanda_cli.main(line.split())
    assert stop.value.code == 2
    assert re.fullmatch(f"nalanda.*{re.escape(answer)}.*\n", capsys.readouterr().err)


def test_help_names_the_number_formats_that_an_error_names():
    from nalanda.convert import gguf, mlx

    choices = {
        **{(name, "dtype"): LOADED for name in ("generate", "eval", "perplexity")},
        ("generate", "state_dtype"): STATES,
        ("convert", "dtype"): {*gguf.DTYPES, *mlx.DTYPES},
    }
    for (name, option), formats in choices.items():
        [help] = [p.help for p in COMMANDS[(name,)].params if p.name == option]
        assert set(re.findall(r"\b(?:auto|b?fp?\d+|int8|q8\w*)\b", help)) == set(formats), (
            name,
            help,
        )


def test_help_names_the_models_that_convert_takes():
    from nalanda.convert import fla

    help = re.sub(r"\W", "", COMMANDS[("convert",)].help)
    for form in fla.FORMATS.values():
        name = form.architecture.removesuffix("ForCausalLM")
        assert name.replace("GatedDeltaProduct", "DeltaProduct") in help


@pytest.mark.parametrize(
    ("line", "usage"),
    [
        ("-h", "nalanda"),
        ("help", "nalanda"),
        ("help train", "nalanda train"),
        *((f"{' '.join(path)} -h", " ".join(["nalanda", *path])) for path in COMMANDS if path),
    ],
)
def test_every_command_has_a_short_form_of_help(capsys, line, usage):
    with pytest.raises(SystemExit) as stop:
        nalanda_cli.main(line.split())
    assert not stop.value.code
    out = capsys.readouterr().out
    assert out.startswith(f"Usage: {usage} ")
    assert not re.search(r"\[\[|\.\.\.[]}]", out.split("\n\n")[0])


@pytest.mark.parametrize(
    ("typed", "answers"),
    [
        ("nalanda rec", ["recipes"]),
        ("nalanda train hybrid", ["hybrid_30m", "hybrid_340m"]),
        ("nalanda generate x --temp", ["--temperature"]),
    ],
)
def test_the_shell_completes(capsys, monkeypatch, typed, answers):
    monkeypatch.setenv("_NALANDA_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    with pytest.raises(SystemExit):
        nalanda_cli.main([])
    assert capsys.readouterr().out.split() == answers


def test_the_shell_is_told_how_to_complete(capsys, monkeypatch):
    monkeypatch.setenv("_NALANDA_COMPLETE", "source_bash")
    with pytest.raises(SystemExit):
        nalanda_cli.main([])
    assert "complete -o default" in capsys.readouterr().out


def test_help_imports_nothing_slow():
    """Of any command: one process prints them all, the first in under a second of CPU."""
    lines = [[*path, "--help"] for path in sorted(COMMANDS)]
    program = f"""
import contextlib, io, sys, time
import nalanda_cli
seconds = []
for line in {lines!r}:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        nalanda_cli.main(line)
    assert "Show this message and exit." in out.getvalue(), line
    seconds.append(time.process_time())
print(seconds[0], *sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert not done.returncode, done.stderr[-2000:]
    seconds, *modules = done.stdout.split()
    assert not {"rich", "torch", "transformers", "yaml", "numpy", "lm_eval"} & {*modules}
    assert float(seconds) < 1


def test_imports_of_torch_wait_for_no_garbage():
    """A search for garbage takes longer the more is imported, and finds nothing in it."""
    try:
        with loading_torch():
            assert not gc.isenabled()
        assert gc.isenabled()
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()
