"""docs/data.md: its commands are ones that `nalanda` understands."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nalanda.config.schema import DataConfig
from nalanda_cli import app

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
COMMANDS = re.findall(r"^nalanda (data prepare .*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_page_has_a_command_for_every_corpus():
    corpora = re.findall(r"^\| [^|]+ \| `([^`]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(corpora) == 4
    for corpus in corpora:
        name = corpus.split("/")[1].split("-")[-1].lower()
        assert any(corpus in command or name in command for command in COMMANDS), corpus


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page(command, monkeypatch, tmp_path):
    asked = []

    def begin(settings, tokenizer, output, **_):
        settings.check()
        tokenizer.check()
        asked.append(settings)

    monkeypatch.setattr("nalanda.data.prepare.prepare", begin)
    monkeypatch.setattr("nalanda.data.megatron.read_megatron", begin)
    monkeypatch.setattr(
        "nalanda.data.megatron.write_megatron", lambda token_set, output: asked.append(DataConfig()) or {}
    )
    monkeypatch.setattr("nalanda.data.inspect.print_token_set", lambda index, output: None)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, shlex.split(command, comments=True))
    assert done.exit_code == 0, (done.output, done.exception)
    (settings,) = asked
    assert (settings.revision or "") in command
    assert (settings.name or "") in command
    assert bool(settings.revision) == ("--revision" in command)
