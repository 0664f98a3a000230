"""`nalanda-lab serve`: it serves, asks and counts."""

import json

import pytest
from nalanda_lab.speed import serve
from rich.console import Console

from nalanda.common.errors import InputError


@pytest.mark.slow
def test_tokens_a_second_of_each_model_and_number_of_clients(tmp_path, monkeypatch, capsys):
    pytest.importorskip("uvicorn")
    monkeypatch.setattr(serve, "OURS", {"gated_deltanet": serve.OURS["gated_deltanet"]})
    monkeypatch.setattr(serve, "SIZES", serve.SIZES | {"hidden_size": 32, "vocab_size": 300})
    found = serve.bench_serve(clients=(1, 3), tokens=4, threads=1, json=tmp_path / "figures.json")
    speeds = found["tokens_per_second"]
    assert speeds.keys() == {"gated_deltanet", "Llama"}
    for servers in speeds.values():
        assert servers.keys() == {"transformers"}
        rows = servers["transformers"]
        assert rows.keys() == {1, 3}
        assert all(len(values) == 3 and min(values) > 0 for values in rows.values())
    assert json.loads((tmp_path / "figures.json").read_text())["tokens"] == 4
    assert "3 clients" in capsys.readouterr().out


def test_a_server_that_does_not_start_is_said_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(serve.sys, "executable", "false")  # a program that fails
    with pytest.raises(InputError, match=r"^transformers does not start: no output$"):
        serve.serving(tmp_path, 1).__enter__()


def test_ratios_are_those_of_one_round(capsys):
    speeds = {
        "model": {"transformers": {8: [100.0, 200.0, 50.0]}, "vllm": {8: [200.0, 800.0, 50.0]}}
    }
    Console(width=100).print(serve.speed_table(speeds, (8,)))
    assert "200  1.0–4.0×" in capsys.readouterr().out


def test_the_packages_are_asked_for(monkeypatch):
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'nalanda\[serving\]'"):
        serve.bench_serve()
