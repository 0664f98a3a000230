"""Bad input at the command line: what is typed, the one line that it gets, and the exit code."""

import builtins
import errno
import importlib.util
import json
import os
import re
import resource
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import huggingface_hub
import pytest
import torch
import yaml
from nalanda_kernels.triton import common
from training import PRETRAIN, configured, environment, of_rows, torchrun

from nalanda import NalandaConfig, NalandaForCausalLM
from nalanda.common.errors import DiskFull, OutOfMemory
from nalanda.config import model_folder
from nalanda.train import build, loop, memory, step
from nalanda.train.checkpoint_dir import latest_checkpoint
from nalanda_cli import main

LEADING = {
    "outside": "../model/model.safetensors",
    "absolute": "/etc/passwd",
    "linked": "link.safetensors",
}
LEADING |= {"lacking": "none.safetensors"}


@pytest.fixture(scope="session")
def place(recipe, tokenizer, tmp_path_factory) -> Path:
    """A folder with a recipe, a model, and what may be wrong with either."""
    place = tmp_path_factory.mktemp("bad")
    config = NalandaConfig(
        vocab_size=320,
        hidden_size=16,
        num_hidden_layers=1,
        num_heads=2,
        mixer="gla",
        intermediate_size=32,
    )
    for name in ("model", "torn", "garbled", *LEADING):
        NalandaForCausalLM(config).save_pretrained(place / name)
        tokenizer.save_pretrained(place / name)
    NalandaForCausalLM(config).save_pretrained(place / "bare")
    encoder = json.dumps({"architectures": ["NalandaForMaskedLM"]})
    (place / "encoder").mkdir()
    (place / "encoder" / "config.json").write_text(encoder)
    (place / "cut").mkdir()
    (place / "cut" / "config.json").write_text(encoder[:20])
    weights = (place / "model" / "model.safetensors").read_bytes()
    (place / "torn" / "model.safetensors").write_bytes(weights[:-100])
    (place / "linked" / "link.safetensors").symlink_to(place / "model" / "model.safetensors")
    for folder, file in LEADING.items():
        (place / folder / "model.safetensors").unlink()
        index = {"metadata": {}, "weight_map": {"lm_head.weight": file}}
        (place / folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (place / "garbled" / "model.safetensors").unlink()
    (place / "garbled" / "model.safetensors.index.json").write_text('{"weight_map": [')
    text = recipe.read_text()
    settings = yaml.safe_load(text) | {"output_dir": "run", "tokenizer": "model"}
    settings["data"]["max_validation_rows"] = 999  # all: a line would say that it is cut
    (place / "r.yaml").write_text(yaml.safe_dump(settings))
    (place / "latin.yaml").write_bytes(text.encode() + "# Größe\n".encode("latin-1"))
    (place / "deep.yaml").write_text("model: " + "{a: " * 5000)
    (place / "twice.yaml").write_text(text + "seed: 1\n")
    (place / "dangling").symlink_to(place / "nowhere")
    for name in ("file", "b.txt"):
        (place / name).write_text("x")
    (place / "runs" / "stopped" / "checkpoints" / "step-5").mkdir(parents=True)
    (place / "half.yaml").write_text("model: {mixer: gla}\n")
    (place / "tabs.yaml").write_text("model:\n\tmixer: gla\n")
    for name in ("thesis.docx", "binary"):
        (place / name).write_bytes(b"PK\x03\x04\xff\0")
    (place / "table.csv").write_text("a,b\n1,2\n")
    (place / "empty.txt").touch()
    (place / "headless" / "train").mkdir(parents=True)
    (place / "headless" / "train" / "00000.tokens").write_bytes(bytes(8))
    (place / "headless" / "index.json").write_text('{"format": ')
    for name in ("alpha", "beta"):
        (place / "several" / name).mkdir(parents=True)
        (place / "several" / name / "metrics.jsonl").write_text("")
    return place


RECIPES = {
    "latin.yaml": r"latin\.yaml: line \d+: not UTF-8: save it as UTF-8",
    "twice.yaml": r"twice\.yaml: line \d+: not YAML: 'seed' is a duplicate of line \d+",
    "none.yaml": r"none\.yaml: no such recipe or file.*",
}
READING = ("train {}", "info {}", "data prepare {} out", "perplexity model --text {}")
SEED = r"--seed: expected 0 to 4294967295, got -1"
MODELS = {
    "torn": r"model\.safetensors: damaged or cut short \(.*\); copy or download it again",
    "garbled": r"model\.safetensors\.index\.json: damaged, or not an index of weights",
    "lacking": r"no none\.safetensors there, which model\.safetensors\.index\.json names",
} | {
    name: rf"model\.safetensors\.index\.json: {re.escape(LEADING[name])} is outside the folder, .*"
    for name in ("outside", "absolute", "linked")
}
LOADING = (
    *("generate {} x", "eval model {} --tasks piqa", "perplexity model {} --output out"),
    *("convert {} out", "train r.yaml 'model={{init_from: {}}}'"),
)
NO_CONFIG = r"no config\.json there; name a model's folder, such as final/ of a run"
NOT_THERE = r"no such run: runs/none; there are stopped"
NO_HUB = r"there is no folder owner/none, and HF_HUB_OFFLINE is set, so the hub is not asked"
DANGLING = (
    r"dangling: a symbolic link to .*/nowhere, which does not exist; make it, or name another path"
)

TABLE = [
    *((command.format(name), line) for command in READING for name, line in RECIPES.items()),
    *((command.format(name), f".*{line}") for command in LOADING for name, line in MODELS.items()),
    # recipes and their settings
    ("train deep.yaml", r"deep\.yaml: nested too deeply for a recipe"),
    (f"train r.yaml 'log={'{a: ' * 5000}'", r"log=[{a: ]+…: nested too deeply for a recipe"),
    (
        "train r.yaml 'log={every: 1, every: 2}'",
        r"log=.*: line 1: not YAML: 'every' is a duplicate of line 1",
    ),
    (
        "train r.yaml 'model.mixer_options={num_v_heads:2}'",
        r"model\.mixer_options=.*: line 1: not YAML: num_v_heads:2 needs a blank after the colon; "
        r"write \{num_v_heads: 2\}",
    ),
    (
        "train r.yaml steps=10",
        r"steps: no such key; did you mean train\.steps or linearize\.steps\?",
    ),
    (
        "train r.yaml optim.learning_rate=1",
        r"optim\.learning_rate: no such key; did you mean optim\.lr\?",
    ),
    ("train r.yaml train.sequence_length=9", r".*: no such key; did you mean data\.seq_len\?"),
    (
        "train r.yaml model=gpt2",
        r"model: expected a section .*'gpt2'; did you mean model\.mixer=.*",
    ),
    ("info r.yaml --gpu h100", r"No such option: --gpu; .* --device NAME .*"),
    ("train r.yaml learning_rate=1", r"learning_rate: no such key; did you mean optim\.lr\?"),
    (
        "train r.yaml model.map=silu",
        r"model: unknown model key 'map', did you mean 'feature_map'\?",
    ),
    (
        "train r.yaml batch_size=8",
        r"batch_size: no such key; did you mean train\.micro_batch_size, .*",
    ),
    ("train half.yaml", r"output_dir: missing from the recipe; set output_dir=VALUE"),
    ("train tabs.yaml", r"tabs\.yaml: line 2: not YAML: indented with a tab; indent with blanks"),
    (
        "train thesis.docx",
        r"thesis\.docx: not a recipe; save its text as \.txt, then nalanda train demo data\.source=.*",
    ),
    ("train binary", r"binary: not a text file; recipes are YAML"),
    ("train table.csv", r"table\.csv: not a recipe; to train on it: .* data\.source=table\.csv .*"),
    ("train r.yaml data.source=empty.txt", r"data\.source: the corpus is empty .*; give it text"),
    ("train r.yaml plugins=cubed", r"plugins: expected a list, got 'cubed'; write \[cubed\]"),
    (
        "train r.yaml 'plugins=[cubed.py]'",
        r"plugins: cubed\.py: no such file; write its path from /.*",
    ),
    ("generate several/gamma x", r"no such run: several/gamma; there are alpha, beta"),
    (
        "plot several",
        r"several: a folder of runs; name some of them, such as several/alpha several/beta",
    ),
    (
        "report several",
        r"several: a folder of runs; name some of them, such as several/alpha several/beta",
    ),
    ("report nowhere/b", r"nowhere/b: no such directory; name the folder of a run"),
    ("train r.yaml step=10", r"step: no such key; did you mean train\.steps or linearize\.steps\?"),
    ("train r.yaml data.lr=1", r"data\.lr: no such key; did you mean optim\.lr or linearize\.lr\?"),
    ("train r.yaml data=book.txt", r"data: .*; write data\.source=book\.txt$"),
    (
        "train b.txt",
        r"b\.txt: not a recipe; to train on it: nalanda train demo data\.source=b\.txt output_dir=runs/b",
    ),
    (
        "train other.txt",
        r"other\.txt: no such file; to train on a text: nalanda train demo data\.source=FILE",
    ),
    (
        "info runs",
        r"runs: not a recipe; to train on it: nalanda train demo data\.source=runs output_dir=runs/runs",
    ),
    ("train ''", r"an empty name: no such recipe or file; nalanda recipes lists those that ship"),
    *(
        [("tune", r"tune: torch sees no GPU; tune on a machine with one")]
        if not torch.cuda.is_available()
        else []
    ),
    ("train r.yaml data.workers=1000000", r"data\.workers: expected 0 to 256, got 1000000"),
    ("train r.yaml train.cpu_threads=0", r"train\.cpu_threads: expected 1 to 4,096, got 0"),
    (
        "train r.yaml 'tokenizer={train: bpe, vocab_size: 1000000000000}'",
        r"tokenizer\.vocab_size: expected 4 to 10,000,000, got 1000000000000",
    ),
    *(
        (
            f"{command}=headless",
            r"data\.source: headless is a token set without a whole index\.json; .* again",
        )
        for command in ("train r.yaml data.source", "data prepare r.yaml out data.source")
    ),
    ("train nothing_like_it", r".*: no such recipe or file; nalanda recipes lists those that ship"),
    *(
        (
            f"train r.yaml model.mixer={name}",
            rf"model: unknown mixer '{name}', did you mean '{ours}'\? .*",
        )
        for name, ours in {
            "gdn": "gated_deltanet",
            "GDN": "gated_deltanet",
            "ssm": "mamba2",
            "gated-deltanet": "gated_deltanet",
            "GatedDeltaNet": "gated_deltanet",
            "deltanet2": "gated_deltanet2",
            "attention": "softmax",
        }.items()
    ),
    (
        "train r.yaml model.feature_map=nalaformer",
        r"model: unknown feature_map 'nalaformer', did you mean 'nala'\? .*",
    ),
    (
        "train r.yaml model.feature_map=softmax",
        r"model: unknown feature_map 'softmax', which is a mixer: set model\.mixer=softmax, or choose .*",
    ),
    ("train r.yaml mixer=gla", r"mixer: no such key; did you mean model\.mixer\?"),
    (
        "train r.yaml every=1",
        r"every: .* mean validation\.every or checkpoint\.every or log\.every\?",
    ),
    (
        "train r.yaml --steps 10",
        r"No such option: --steps.*; .* are written section\.key=value, .*train\.steps=10",
    ),
    ("info r.yaml --steps 10", r"No such option: --steps.*; .* are written section\.key=value, .*"),
    (
        "train r.yaml tokenizer=none/t.json",
        r"tokenizer: none/t\.json does not exist; give a folder, a file or a hub id",
    ),
    (
        "analyze runs",
        r"No such command 'analyze'\. Did you mean nalanda eval or .* See nalanda --help",
    ),
    ("export runs/demo", "Missing argument 'out'; write nalanda export RUN OUT"),
    ("runs a b", r"Got unexpected extra argument\(s\) \(b\); nalanda report RUN RUN compares .*"),
    ("verify a b c", r"Got unexpected extra argument\(s\) \(b c\); nalanda verify --help .*"),
    ("runs --josn", r"No such option: --josn \(Possible options: --json\)"),
    ("info --processes 8", r"Invalid value for --processes: needs a recipe"),
    ("export run out --private", r"Invalid value for --private: needs --push"),
    ("eval model --tasks piqa --max-length 0", r"Invalid value for '--max-length': Input .*"),
    ("evall model", r"No such command 'evall'.*"),
    ("plot run --x parsecs", r"--x parsecs: unknown; choose tokens, steps or hours"),
    # mixers, maps and their options
    (
        "train r.yaml model.mixer=gated_delta",
        r"model: unknown mixer .*, did you mean 'gated_deltanet'\? .*",
    ),
    (
        "train r.yaml model.feature_map=nahla",
        r"model: unknown feature_map .*, did you mean 'nala'\? .*",
    ),
    (
        "train r.yaml model.mixer_options.num_v_head=2",
        r"model: mixer 'gated_deltanet': no option 'num_v_head', did you mean 'num_v_heads'\?",
    ),
    (
        "train r.yaml 'model.mixer_options={gated_deltanet: {}, gated_delta: {}}'",
        r"model: mixer_options names 'gated_delta', which no layer has, did you mean 'gated_deltanet'\?",
    ),
    (
        "train r.yaml model.feature_map=nala model.feature_map_options.angel=rms",
        r"model: .*feature_map 'nala': no option 'angel', did you mean 'angle'\?",
    ),
    # sizes and seeds
    (
        "train r.yaml model.hidden_size=500000",
        r"model: .* parameters take .*, .* of memory is free: lower .*",
    ),
    (
        "train r.yaml model.hidden_size=1000000000",
        r"model: intermediate_size=.* must be at most .*",
    ),
    ("info r.yaml model.hidden_size=1000000000", r"model: intermediate_size=.* must be at most .*"),
    (
        "train r.yaml model.hidden_size=1000000000000",
        r"model: hidden_size=.* must be at most 2147483647",
    ),
    (
        "train r.yaml model.num_hidden_layers=1000000000",
        r"model: num_hidden_layers=.* must be at most 100000",
    ),
    ("train r.yaml seed=-1", r"seed: expected 0 to 4294967295, got -1"),
    *((f"{command} --seed -1", SEED) for command in ("generate model x",)),
    # what is not there
    *(
        (f"{command.format('runs/none')}", NOT_THERE)
        for command in ("generate {} x", "eval model {} --tasks piqa", "perplexity {}")
    ),
    ("convert runs/none out", NOT_THERE),
    ("generate runs/none/final x", r"no such run: runs/none/final; go to the folder in which .*"),
    ("generate owner/none x", f"no such model: {NO_HUB}"),
    ("generate bare x", r"bare has no tokenizer; copy its files there, or .*`nalanda export`"),
    ("train r.yaml 'model={auto: owner/none}'", f"model: {NO_HUB}"),
    ("train r.yaml tokenizer=owner/none", f"tokenizer: 'owner/none': {NO_HUB}"),
    (
        "export runs/none out",
        r"runs/none: neither a run's folder nor one of its checkpoints/step-N",
    ),
    ("train r.yaml 'model={init_from: runs/none}'", f"model: {NOT_THERE}"),
    ("train r.yaml 'model={auto: runs/none}'", f"model: {NOT_THERE}"),
    # a run, whose model lies in it
    ("train r.yaml 'model={init_from: runs/stopped}'", rf"model: runs/stopped: {NO_CONFIG}"),
    ("train r.yaml distill.teacher=runs/stopped", rf"distill\.teacher: runs/stopped: {NO_CONFIG}"),
    ("train r.yaml tokenizer=runs/none", f"tokenizer: 'runs/none': {NOT_THERE}"),
    ("train r.yaml data.source=none.jsonl", r".*none\.jsonl.*"),
    ("runs runs/none", r"runs/none: no such directory; .*"),
    ("plot runs/none", r"runs/none: no such directory; name the folder of a run"),
    ("plot run/none --output x.png", r"run/none: no such directory; .*"),
    ("data inspect runs/none", r"runs/none.* does not exist; .*"),
    ("eval model --tasks piqa --data runs/none", r"--data runs/none: no such directory"),
    (
        "generate model --file none",
        r"cannot read none: No such file or directory; name a text file",
    ),
    ("generate model --file latin.yaml", r"cannot read latin\.yaml: not UTF-8; save it as UTF-8"),
    ("generate alpa x", r"no such model: alpa \(a run, .*\)"),
    (
        "generate runs/stopped/checkpoints/step-9 x",
        r"no such model: runs/.*; did you mean step-5\?",
    ),
    ("verify runs/stoped", r"runs/stoped: no such run; did you mean stopped\?"),
    ("convert model out --to gguff", r"--to gguff: unknown; did you mean gguf\?"),
    ("linearize none r.yaml", r"none: no such folder; name a model's folder, or OWNER/NAME .*"),
    ("data prepare r.yaml file/x", r"output file/x: a file; name a folder"),
    ("perplexity model --data x", r"No such option: --data .*; the text is an option: --text FILE"),
    ("report", r"Missing argument 'RUN'; write nalanda report RUN"),
    ("generate model --state none", r".*none.*"),
    ("perplexity model --text none --output out", r".*none.*"),
    # servers
    ("serve runs/none", NOT_THERE),
    ("serve bare", r"bare has no tokenizer; copy its files there, or .*`nalanda export`"),
    ("serve cut", r"cut/config\.json: unreadable: .*"),
    ("serve encoder", r"encoder: NalandaForMaskedLM writes no text; serve a causal language model"),
    ("serve model --engine sglang", r"--engine sglang: is unknown; there are auto, vllm and .*"),
    (
        "serve model --host nowhere.invalid",
        r"--host nowhere\.invalid --port 8000: Name or service not known",
    ),
    ("serve model --port 0", r"Invalid value for '--port': .*"),
    # a chat
    ("generate model --chat", r"--chat: no question; give a prompt"),
    (
        "generate model x --chat --state s",
        r"--chat asks one question, without --state; examples/.*",
    ),
    (
        "generate model x --chat",
        r"model: has no chat template, as base models have none; .*examples/assistant, or .* --chat",
    ),
    # where nothing can be written
    (
        "train r.yaml output_dir=/proc/x",
        r"output_dir /proc/x: No such file or directory; name another folder",
    ),
    ("train r.yaml output_dir=dangling", rf"output_dir {DANGLING}"),
    ("train r.yaml output_dir=dangling/run", rf"output_dir dangling/run: {DANGLING}"),
    ("eval model --tasks piqa --output dangling", rf"--output {DANGLING}"),
    ("eval model --tasks piqa --output file", r"--output file: a file; name a folder"),
    ("eval --tasks piqa --fetch dangling", rf"--fetch {DANGLING}"),
    ("perplexity model --output dangling", rf"--output {DANGLING}"),
    ("generate model x --save-state dangling", rf"--save-state {DANGLING}"),
    ("convert model dangling", r"dangling exists; choose another folder"),
    ("data prepare r.yaml dangling", rf"output {DANGLING}"),
    # number formats
    (
        "generate model x --dtype fp12",
        r"--dtype fp12: unknown; choose auto, fp32, bf16, fp16, fp64",
    ),
    (
        "generate model x --state-dtype int4",
        r"--state-dtype int4: unknown; choose fp32, bf16, int8, fp8",
    ),
    ("convert model out.gguf --dtype q4", r"--dtype q4: unknown; choose fp32, bf16, fp16, q8_0"),
    (
        "train r.yaml train.precision=fp8",
        r"train\.precision: expected one of bf16, fp16, fp32, auto; got 'fp8'",
    ),
    # devices
    *(
        (
            f"{command} --device {device}",
            rf"--device {device}: not on this machine, which has cpu.*",
        )
        for device in (
            ["cuda", "meta", "gpu"] if not torch.cuda.is_available() else ["meta", "gpu"]
        )
        for command in (*("generate model x", "eval model --tasks piqa", "perplexity model"),)
    ),
]


def said(capsys, *arguments: str) -> tuple[int, str]:
    """The exit code of a command and what it said on stderr."""
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    return stop.value.code, capsys.readouterr().err


@pytest.mark.parametrize(("command", "line"), TABLE, ids=lambda text: text[:70])
def test_bad_input_gets_one_line_and_code_2(
    place, capsys, monkeypatch, fresh_accelerate, command, line
):
    monkeypatch.chdir(place)
    code, text = said(capsys, *shlex.split(command))
    assert re.fullmatch(rf"nalanda[a-z ]*: {line}\n", text), text
    assert code == 2


def test_a_server_without_its_packages_or_port_gets_one_line(place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, text = said(capsys, "serve", "model", "--port", port, "--engine", "transformers")
    assert (code, text) == (2, f"nalanda: --port {port}: in use; name another one\n")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for engine, line in (
        ("auto", r"fastapi: not installed; pip install 'nalanda\[serving\]'"),
        ("vllm", r"--engine vllm: not installed; pip install 'nalanda\[vllm\]' into .*"),
    ):
        code, text = said(capsys, "serve", "model", "--engine", engine)
        assert re.fullmatch(f"nalanda: {line}\n", text), text
        assert code == 2


def test_block_sizes_known_to_be_wrong_get_one_line(
    place, capsys, monkeypatch, fresh_accelerate, tmp_path
):
    row = {"itemsize": 2, "features": 256, "BV": 64, "num_warps": 4, "num_stages": 1}
    (tmp_path / "blocks.json").write_text(json.dumps({"sm_90": {"input_gradients": [row]}}))
    monkeypatch.chdir(place)
    monkeypatch.setenv(common.BLOCKS, str(tmp_path / "blocks.json"))
    common._table.cache_clear()
    code, text = said(capsys, "train", "r.yaml")
    common._table.cache_clear()
    line = r"NALANDA_BLOCKS=.*: sm_90, input_gradients: 4 warps give wrong gradients; .* to 8"
    assert re.fullmatch(rf"nalanda[a-z ]*: {line}\n", text), text
    assert code == 2


@pytest.mark.parametrize(
    "command",
    [
        *("generate owner/none x", "convert owner/none out", "train r.yaml tokenizer=owner/none"),
        "train r.yaml 'model={auto: owner/none}'",
        "train r.yaml 'model={init_from: owner/none, mixer: gla}'",
    ],
)
def test_a_hub_that_does_not_answer_is_asked_once(
    place, monkeypatch, capsys, fresh_accelerate, command
):
    """Its libraries would wait and try again, for a minute."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(
        huggingface_hub.utils._http.time, "sleep", lambda seconds: pytest.fail("waits")
    )
    model_folder.hub_problem.cache_clear()
    code, text = said(capsys, *shlex.split(command))
    model_folder.hub_problem.cache_clear()
    line = (
        r"nalanda: .*there is no folder owner/none, and the hub does not answer \(.*refused.*\)\n"
    )
    assert re.fullmatch(line, text), text
    assert code == 2


def test_weights_that_may_not_be_read_are_not_called_damaged(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    real = Path.open

    def locked(path, *arguments, **keywords):
        if path.name == "model.safetensors":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *arguments, **keywords)

    monkeypatch.setattr(Path, "open", locked)
    line = "nalanda: model/model.safetensors: Permission denied\n"
    assert said(capsys, "generate", "model", "x") == (2, line)


def test_a_terminal_may_say_little_of_itself(monkeypatch):
    """No columns, and an encoding without all of our characters."""
    command = [sys.executable, "-m", "nalanda_cli", "recipes"]
    for odd in ({"COLUMNS": "0"}, {"PYTHONIOENCODING": "ascii"}):
        run = subprocess.run(command, env=os.environ | odd, capture_output=True, check=True)
        assert b"demo" in run.stdout, run.stderr


# ------------------------------ ctrl-C

COMMANDS = (
    *(
        "train x",
        "eval x",
        "perplexity x",
        "generate x",
        "info",
        "export x y",
        "convert x y",
        "runs",
    ),
    *("plot x", "data prepare x y", "data inspect x"),
)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("hidden", [False, True])
def test_an_interrupt_while_loading_is_one_line(monkeypatch, capsys, command, hidden):
    """Also where a library that is being imported makes an error of its own of it."""
    real = builtins.__import__

    def load(name, *arguments, **keywords):
        ours = name.split(".")[0] in ("nalanda", "nalanda_eval")
        if not ours or name == "nalanda.common.errors":  # has the handler
            return real(name, *arguments, **keywords)
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            if not hidden:
                raise
            raise ImportError("initialization failed") from error

    monkeypatch.setattr(builtins, "__import__", load)
    try:
        found = said(capsys, *command.split())
    finally:
        monkeypatch.undo()
    assert found == (130, "nalanda: interrupted\n")


@pytest.mark.slow
def test_a_real_interrupt_while_torch_is_loading(recipe, tmp_path):
    process = subprocess.Popen(
        [sys.executable, PRETRAIN, recipe, f"output_dir={tmp_path / 'run'}"],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a launcher may ignore it
    )
    while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == "nalanda: interrupted\n"
    assert process.returncode == 130


# ------------------------------ memory


def asks_for_too_much(*_, **__):
    torch.empty(2**60, dtype=torch.uint8)


@pytest.mark.slow
def test_too_little_memory_while_training_says_what_would_fit(
    recipe, tmp_path, monkeypatch, fresh_accelerate
):
    """The error is torch's own; the checkpoints stay as they were; the run resumes with what is proposed."""
    run = tmp_path / "run"
    loop.train(configured(recipe, run, "train.steps=5"))
    before = latest_checkpoint(run / "checkpoints")
    real, held = memory.host, []

    def scarce() -> int:  # room for the model, and for fewer rows than the four that are asked for
        return held[0]

    def summed_loss(*arguments, **keywords):
        from nalanda.train.estimate import activation_bytes
        from nalanda.train.needs import held_bytes

        config, model = configured(recipe, run), arguments[0]
        kept = [activation_bytes(of_rows(rows, 32), model.config) for rows in (2, 4)]
        held[:] = [held_bytes(model, config, 1) + sum(kept) // 2]
        monkeypatch.setattr(memory, "host", scarce)
        asks_for_too_much()

    with monkeypatch.context() as patch:
        patch.setattr(step, "summed_loss", summed_loss)
        patch.setattr(build, "check_causal", lambda *_: None)
        with pytest.raises(OutOfMemory) as error:
            loop.train(configured(recipe, run))
    monkeypatch.setattr(memory, "host", real)
    assert re.fullmatch(
        r"out of memory: 1152921504606846976 bytes more were asked for; train\.micro_batch_size=2 needs "
        r"[\d.]+ MiB of [\d.]+ MiB free; the same command resumes from step-5",
        str(error.value),
    )
    assert error.value.exit_code == 71
    assert json.loads((run / "run.json").read_text())["reason"].startswith(
        "out of memory: 1152921504606846976"
    )
    assert latest_checkpoint(run / "checkpoints") == before
    with monkeypatch.context() as patch:
        patch.setattr(step, "summed_loss", asks_for_too_much)
        patch.setattr(build, "check_causal", lambda *_: None)
        with pytest.raises(OutOfMemory) as error:
            loop.train(configured(recipe, run, "validation.batch_size=512"))
    assert "or lower validation.batch_size, 512 now; " in str(error.value)
    loop.train(configured(recipe, run, "train.micro_batch_size=2", "train.steps=6"))


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            MemoryError(),
            "nalanda: out of memory; take a smaller model, fewer rows at a time or shorter ones",
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has"),
            "nalanda: out of memory: 20.00 MiB more were asked for; take a smaller model, .*",
        ),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), "nalanda: out of memory; take .*"),
        (
            RuntimeError("unable to mmap 9 bytes: Cannot allocate memory (12)"),
            "nalanda: out of memory; .*",
        ),
    ],
)
def test_too_little_memory_elsewhere_has_a_code(monkeypatch, capsys, error, line):
    import nalanda.report.runs

    def overview(*_):
        raise error

    monkeypatch.setattr(nalanda.report.runs, "overview", overview)
    code, text = said(capsys, "runs")
    assert re.fullmatch(line + "\n", text)
    assert code == 71


# ------------------------------ files that may not grow


@pytest.fixture
def small_files(monkeypatch):
    """Sets the size that files of this process may have; Python ignores the signal of it, as in any run."""
    # Python would keep bytecode that was cut short, and fail to import it from then on.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.slow
def test_a_limit_of_file_sizes_is_a_full_disk(recipe, tmp_path, fresh_accelerate, small_files):
    run = tmp_path / "run"
    loop.train(configured(recipe, run, "train.steps=5"))
    small_files(50_000)
    with pytest.raises(
        DiskFull, match=r"step-10: not saved, step-5 stays: a file may not grow further: .*"
    ):
        loop.train(configured(recipe, run, "train.steps=10"))
    assert latest_checkpoint(run / "checkpoints").name == "step-5"
    assert not list((run / "checkpoints").glob(".tmp*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        *("convert model out --to fla", "data prepare r.yaml out --workers 1"),
        *(
            "plot drawn",
            "generate model x --save-state state",
            "perplexity model --text file --output out",
        ),
    ],
)
def test_a_limit_of_file_sizes_from_other_commands(
    place, tmp_path, monkeypatch, capsys, small_files, command
):
    monkeypatch.chdir(tmp_path)
    for name in ("model", "r.yaml", "file"):
        (tmp_path / name).symlink_to(place / name)
    (tmp_path / "drawn").mkdir()
    lines = [{"step": step, "tokens": step, "loss": 2.0} for step in (1, 2)]
    (tmp_path / "drawn" / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    small_files(1000)
    code, text = said(capsys, *shlex.split(command))
    assert re.fullmatch(
        r"nalanda: .*(the file may not grow further|no space left).*", text.strip()
    ), text
    assert code == 74


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("nosuch", "nosuch: no such recipe or file"),
        pytest.param("--nosuch", "No such option: --nosuch", marks=pytest.mark.slow),
    ],
)
def test_the_report_of_a_launcher_ends_with_the_line(arguments, words):
    """Below torchrun's traceback, once, and not once a process."""
    done = subprocess.run(
        [*torchrun(3), PRETRAIN, arguments], capture_output=True, text=True, env=environment(3)
    )
    assert done.returncode == 1
    lines = done.stderr.rstrip().splitlines()
    assert re.fullmatch(rf"  traceback : nalanda.*: .*{re.escape(words)}.*", lines[-2])
    assert set(lines[-1]) == {"="}
    assert done.stderr.count(words) == 1


@pytest.mark.parametrize(
    ("script", "needed"),
    [("llama_cpp", "model, file, prompt"), ("random_qwen3_5", "out, tokenizer")],
)
def test_an_example_without_arguments_says_what_it_takes(monkeypatch, capsys, script, needed):
    if script == "llama_cpp":
        pytest.importorskip("xllamacpp")
    file = str(Path(__file__).parents[2] / "examples" / f"{script}.py")
    monkeypatch.setattr(sys, "argv", [file])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(file)
    assert stop.value.code == 2
    assert f"the following arguments are required: {needed}" in capsys.readouterr().err
