"""`nalanda serve` on the server of transformers, and OpenAI's client."""

import asyncio
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from nalanda import NalandaConfig, NalandaForCausalLM
from nalanda.serve.options import ServeOptions
from nalanda.serve.server import print_introduction, question

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
DOCUMENT = EXAMPLES / "document.py"
TEMPLATE = (EXAMPLES / "assistant" / "chat_template.jinja").read_text()
TEMPLATE += "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
SPOKEN = [{"role": "user", "content": "state"}, {"role": "assistant", "content": "gate"}]
MESSAGES = [[SPOKEN[0]], [*SPOKEN, {"role": "user", "content": "decay"}]]


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    """A model that writes only letters, because incomplete characters would not be streamed one by one."""
    torch.manual_seed(0)
    config = NalandaConfig(
        **{"vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2},
        **{"mixer": ["gated_deltanet", "softmax"], "bos_token_id": 0, "eos_token_id": 0},
    )
    model = NalandaForCausalLM(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    letters = tokenizer("abcdefghijklmnopqrstuvwxyz", add_special_tokens=False).input_ids
    model.generation_config.suppress_tokens = [i for i in range(257) if i not in letters]
    folder = tmp_path_factory.mktemp("served")
    model.save_pretrained(folder)
    tokenizer.chat_template, before = TEMPLATE, tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    tokenizer.chat_template = before
    return folder


@pytest.fixture(scope="module")
def client(served):
    return served[0]


@pytest.fixture(scope="module")
def served(folder, tmp_path_factory):
    """A client, the server and its log. The server has no hub cache, and is asked for batching, which our states
    do not support."""
    openai = pytest.importorskip("openai")
    pytest.importorskip("uvicorn")
    home = tmp_path_factory.mktemp("home")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "nalanda_cli", "serve", str(folder), "--port", str(port)]
    command += ["--engine", "transformers", "--", "--device", "cpu", "--continuous-batching"]
    environment = {
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "NO_PROXY": "*",
    }
    log = home / "log"
    with log.open("w") as stream:
        server = subprocess.Popen(
            command,
            env=os.environ | environment,
            cwd=home,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                assert server.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.1)
        url = f"http://127.0.0.1:{port}/v1"
        yield openai.OpenAI(base_url=url, api_key="none", timeout=60, max_retries=0), server, log
    finally:
        server.kill()
        server.wait()


def greedy(folder, tokenizer, prompt, **options):
    ids = torch.tensor([tokenizer(prompt, add_special_tokens=False).input_ids])
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **options)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("messages", MESSAGES)
def test_chat_completions_are_streamed(client, folder, tokenizer, messages):
    asked = {"model": str(folder), "messages": messages, "max_tokens": 16, "temperature": 0}
    chunks = list(client.chat.completions.create(**asked, stream=True))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    prompt = tokenizer.apply_chat_template(
        messages, chat_template=TEMPLATE, tokenize=False, add_generation_prompt=True
    )
    expected = greedy(folder, tokenizer, prompt, max_new_tokens=16)
    assert "".join(pieces) == expected
    assert len(expected) == 16
    assert sum(map(bool, pieces)) > 4
    assert chunks[-1].choices[0].finish_reason == "length"
    assert chunks[-1].usage.prompt_tokens == len(
        tokenizer(prompt, add_special_tokens=False).input_ids
    )
    assert client.chat.completions.create(**asked).choices[0].message.content == expected


def test_plain_completions_need_no_template_and_stop_at_words(client, folder, tokenizer):
    expected = greedy(folder, tokenizer, "<|endoftext|>state", max_new_tokens=16)
    asked = {"model": str(folder), "prompt": "state", "max_tokens": 16, "temperature": 0}
    assert (
        "".join(c.choices[0].text for c in client.completions.create(**asked, stream=True))
        == expected
    )
    word = expected[6:8]
    stopped = client.completions.create(**asked, stop=[word]).choices[0].text
    assert stopped == expected[: expected.index(word) + 2]


@pytest.mark.parametrize("length", [0, -1])
def test_a_length_below_1_is_answered_400(client, folder, length):
    openai = pytest.importorskip("openai")
    asked = {"model": str(folder), "prompt": "state", "max_tokens": length}
    with pytest.raises(openai.BadRequestError, match=f"max_tokens={length}: take 1 or more"):
        client.completions.create(**asked)


def test_a_request_that_cannot_be_answered_gets_the_reason(client, folder):
    """transformers answers 500 without any."""
    openai = pytest.importorskip("openai")
    asked = {"model": str(folder), "max_tokens": 4}
    with pytest.raises(openai.BadRequestError, match="the chat template refuses: no tools"):
        client.chat.completions.create(**asked, messages=[{"role": "tool", "content": "x"}])
    with pytest.raises(openai.BadRequestError, match="could not convert string to float: 'warm'"):
        client.completions.create(**asked, prompt="state", temperature="warm")


def test_32_clients_at_once_get_what_each_gets_alone(client, folder, tokenizer):
    """Some ask for streams and leave after the first words."""
    prompts = [
        " ".join(["state", "gate", "decay"][i % 3 :] * (1 + i % 7)) + str(i) for i in range(32)
    ]

    def ask(i: int) -> str:
        asked = {"model": str(folder), "prompt": prompts[i], "max_tokens": 12, "temperature": 0}
        if i % 4 == 1:
            with client.completions.create(**asked, stream=True) as stream:
                return next(iter(stream)).choices[0].text
        return client.completions.create(**asked).choices[0].text

    with ThreadPoolExecutor(32) as clients:
        answers = list(clients.map(ask, range(32)))
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        alone = greedy(folder, tokenizer, f"<|endoftext|>{prompt}", max_new_tokens=12)
        assert alone.startswith(answer) if i % 4 == 1 else answer == alone


def test_a_prompt_beyond_the_training_length_is_answered(client, folder, tokenizer):
    """The states do not limit the length, nor do rotary positions."""
    prompt = "gate " * 1200
    asked = {"model": str(folder), "prompt": prompt, "max_tokens": 4, "temperature": 0}
    expected = greedy(folder, tokenizer, f"<|endoftext|>{prompt}", max_new_tokens=4)
    assert client.completions.create(**asked).choices[0].text == expected


def test_questions_about_a_text_are_answered(served, folder, tokenizer, tmp_path):
    """By examples/document.py; how long each waited depends on the machine."""
    client, _, _ = served
    (tmp_path / "text").write_text("gate " * 40)
    command = [sys.executable, str(DOCUMENT), str(tmp_path / "text"), "state", "decay"]
    command += ["--max-tokens", "8", "--url", str(client.base_url)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    answers = re.findall(r"^ +\d+\.\d\d s  (\w+) → (.+)$", printed, re.MULTILINE)
    text = "<|endoftext|>" + ("gate " * 40).rstrip()
    expected = {
        word: greedy(folder, tokenizer, f"{text}\n\n{word}", max_new_tokens=8)
        for word in ("state", "decay")
    }
    assert dict(answers) == {word: repr(answer) for word, answer in expected.items()}
    assert "the server kept" in printed.splitlines()[-1]


def test_a_text_that_is_not_utf_8_is_said(tmp_path):
    pytest.importorskip("openai")
    (tmp_path / "text").write_bytes(b"caf\xe9")
    command = [sys.executable, str(DOCUMENT), str(tmp_path / "text"), "state"]
    said = subprocess.run(command, capture_output=True, text=True).stderr
    assert said.startswith("document.py: 'utf-8' codec can't decode")
    assert said.count("\n") == 1


def test_the_printed_question_fits_the_model_that_is_listed(served, folder):
    client, _, log = served
    assert [model.id for model in client.models.list()] == [str(folder)]
    (line,) = re.findall("^ask +(.+)$", log.read_text(), re.MULTILINE)
    _, url, *_, body = shlex.split(line)
    assert url == f"{client.base_url}chat/completions"  # the folder has a template
    asked = json.loads(body) | {"temperature": 0}
    answer = client.chat.completions.create(**asked)
    assert answer.usage.completion_tokens == asked["max_tokens"]


def test_a_model_without_a_template_is_asked_to_continue(tmp_path, capsys):
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": null}')
    _, url, *_, body = shlex.split(question("http://h/v1", str(tmp_path)))
    assert url == "http://h/v1/completions"
    assert {"model", "prompt"} < json.loads(body).keys()

    print_introduction("transformers", str(tmp_path), ServeOptions())
    assert "no chat template" in capsys.readouterr().out


def test_a_chat_without_a_template_is_answered_400(tmp_path, monkeypatch):
    """The server's own answer is a 500 without a reason."""
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.completion import CompletionHandler
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.response import ResponseHandler

    from nalanda.serve import transformers_server

    monkeypatch.setattr(ModelManager, "get_gen_models", None, raising=False)
    monkeypatch.setattr(transformers_server, "app", lambda *words, **options: None)
    (tmp_path / "config.json").write_text("{}")
    for handler in (CompletionHandler, ChatCompletionHandler, ResponseHandler):
        monkeypatch.setattr(handler, "handle_request", handler.handle_request)
    transformers_server.run_transformers(str(tmp_path), ServeOptions(), [])

    for handler in (ChatCompletionHandler, ResponseHandler):
        answer = asyncio.run(handler.handle_request(None, {"model": "base"}, "1"))
        assert answer.status_code == 400
        reason = json.loads(answer.body)["error"]["message"]
        assert reason.startswith("base: no chat template")


def test_ctrl_c_ends_the_server(served, folder):
    client, server, log = served
    asked = {"model": str(folder), "prompt": "state", "max_tokens": 8, "temperature": 0}
    client.completions.create(**asked)
    server.send_signal(signal.SIGINT)
    assert server.wait(timeout=30) == 130
    assert log.read_text().endswith("\nnalanda: interrupted\n")
    assert "Traceback" not in log.read_text()
    from openai import APIConnectionError

    with pytest.raises(APIConnectionError):
        client.completions.create(**asked)
