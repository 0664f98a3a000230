"""examples/chat/chat.py: the commands at the terminal, and a conversation that reads each token once."""

import contextlib
import copy
import importlib.util
import io
import json
import math
from pathlib import Path

import pytest
import torch
from tiny_models import build, close, ids, llama
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import nalanda.inference.generate
from nalanda import NalandaForCausalLM
from nalanda.common.errors import InputError
from nalanda.inference.generate import Printer
from nalanda.inference.load import end_tokens, load_model
from nalanda.inference.options import Sampling, sampling_options

SCRIPT = Path(__file__).parents[2] / "examples" / "chat" / "chat.py"
spec = importlib.util.spec_from_file_location("chat", SCRIPT)
assert spec is not None
assert spec.loader is not None
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
Conversation = script.Conversation


@pytest.fixture(scope="module")
def checkpoint(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    sizes = {"vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": 0}
    build(dtype=torch.float32, **sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_the_terminal(checkpoint, tmp_path, monkeypatch, capsys):
    saved = str(tmp_path / "talk")
    lines = [
        "hello",
        f"/save {tmp_path}",
        f"/save {saved}",
        "and you",
        "/reset",
        "/nonsense",
        f"/load {saved}",
        "and you",
        "/quit",
    ]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    script.main([checkpoint, "--temperature", "0", "--max-new-tokens", "8"])
    printed = capsys.readouterr()
    answers = [text for text in printed.out.split("> ")[1:] if text.strip()]
    assert len(answers) == 3
    assert answers[1] == answers[2]
    assert printed.err.count("tokens/s") == 3
    assert printed.err.count("/reset") == 2  # at the start, and after an unknown command
    assert f"/save {tmp_path}: a folder; name a file" in printed.err


def test_a_model_that_computes_no_numbers_ends_the_turn(checkpoint):
    model, tokenizer = load_model(checkpoint)
    model.lm_head.weight.data[7, 3] = math.nan
    conversation = Conversation(model, tokenizer, sampling_options(Sampling()))
    with pytest.raises(InputError, match="its log-probabilities are not numbers"):
        conversation.answer("hello")
    assert conversation.messages == []
    assert conversation.state is None


def test_bad_input_is_one_line(checkpoint, capsys):
    for options, message in (
        (["--seed", "-1"], "nalanda: --seed: expected 0 to 4294967295, got -1\n"),
        (["--top-k", "-1"], "nalanda: top_k is -1: it must be 0 (all tokens) or above\n"),
    ):
        with pytest.raises(SystemExit) as stop:
            script.main([checkpoint, *options])
        assert stop.value.code == 2
        assert capsys.readouterr().err == message


def test_chat_with_a_vocabulary_of_words(tmp_path, capsys):
    """transformers' stop strings fail with it."""
    words = {
        word: i for i, word in enumerate(["<unk>", "</s>", "User:", "Assistant:", "good", "day"])
    }
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", unk_token="<unk>"
    )
    talk = Conversation(
        build(vocab_size=len(words)), tokenizer, {"max_new_tokens": 4, "do_sample": False}
    )
    talk.answer("good day")
    assert [message["role"] for message in talk.messages] == ["user", "assistant"]


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def letters(tokenizer) -> dict:
    """Options that restrict a model to letters, because not all bytes survive decoding and encoding."""
    others = [
        i for token, i in tokenizer.get_vocab().items() if not (token.isascii() and token.isalpha())
    ]
    return {"suppress_tokens": others}


@pytest.mark.parametrize("template", [None, TEMPLATE], ids=["plain", "template"])
@pytest.mark.parametrize("network", ["nalanda", "llama"])
def test_a_conversation_reads_what_is_new(network, template, tokenizer, monkeypatch, capsys):
    """The answers equal those of a model that reads the whole conversation."""
    monkeypatch.setattr(tokenizer, "chat_template", template)
    if network == "nalanda":
        model = build(vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0)
    else:
        model = llama(len(tokenizer))
    options = (
        sampling_options(Sampling(temperature=0, max_new_tokens=9))
        | end_tokens(model, tokenizer)
        | letters(tokenizer)
    )
    talk, seen, embed = Conversation(model, tokenizer, options), [], model.get_input_embeddings()
    embed.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape[1]))
    talk.answer("one")
    seen.clear()
    talk.answer("two and three")
    assert sum(seen) < 9 + len("two and three") + 40
    said = capsys.readouterr().out
    text, prompt = talk.text, talk.text[: talk.text.rindex("ssistant") + len("ssistant") + 1]
    everything = tokenizer(
        prompt, return_tensors="pt", add_special_tokens=network == "nalanda"
    ).input_ids
    fresh = model.generate(everything, **{**options, "max_new_tokens": 9})
    answer = tokenizer.decode(fresh[0, everything.shape[1] :], skip_special_tokens=True)
    assert text[len(prompt) :] == answer.replace("<|endoftext|>", "")
    assert said.endswith(answer.split("\nUser:")[0] + "\n")


def test_interrupted_answers_are_kept(tokenizer, monkeypatch, capsys):
    model = build(vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=None)
    options = (
        sampling_options(Sampling(temperature=0, max_new_tokens=9))
        | end_tokens(model, tokenizer)
        | letters(tokenizer)
    )
    talk = Conversation(model, tokenizer, options)
    whole, put = model.read, Printer.put

    def breaking(self, value):
        put(self, value)
        if len(self.tokens) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(Printer, "put", breaking)
    talk.answer("one")
    monkeypatch.setattr(Printer, "put", put)
    everything = tokenizer(talk.text, return_tensors="pt").input_ids
    expected = whole(everything)
    assert len(talk.state) == len(expected)
    for a, b in zip(talk.state.cache.states, expected.cache.states, strict=True):
        close(a["recurrent"], b["recurrent"], 1e-6)
    talk.answer("two")
    assert [m["role"] for m in talk.messages] == ["user", "assistant"] * 2


def talker(
    tokenizer, template=TEMPLATE, ends=0, **fields
) -> tuple[NalandaForCausalLM, script.Conversation]:
    """A model whose every token is 0, `<|endoftext|>`, and a conversation with it; ends: of its answers."""
    tokenizer = copy.deepcopy(tokenizer)  # other tests share it
    tokenizer.chat_template = template
    model = build(vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=ends, **fields)
    model.lm_head.weight.data.zero_()
    return model, Conversation(
        model, tokenizer, sampling_options(Sampling(temperature=0, max_new_tokens=3))
    )


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("template", [None, TEMPLATE], ids=["plain", "template"])
def test_a_saved_conversation_goes_on(template, older, follows, tokenizer, tmp_path, capsys):
    """As the same session does, with the text before it; each token is read once. Older files say less."""
    model, talk = talker(tokenizer, template)
    before = model.read(ids(1, 50)) if follows else None
    talk.reset(before)
    talk.answer("one")
    talk.save(str(tmp_path / "talk"))
    if older:
        talk.state.save(tmp_path / "talk", messages=json.dumps(talk.messages), text=talk.text)
    talk.answer("two")
    again = Conversation(model, talk.tokenizer, talk.options)
    again.load(str(tmp_path / "talk"))
    again.answer("two")
    assert (len(again.state), again.text) == (len(talk.state), talk.text)
    if template:
        bos = [] if follows else [0]
        read = bos + tokenizer(talk.text + "<|endoftext|>", add_special_tokens=False).input_ids
        assert len(talk.state) == 50 * follows + len(read)
    assert "without" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "notes",
    [
        {"messages": "[]"},
        {"messages": "{", "text": ""},
        {"messages": "{}", "text": ""},
        {"messages": "[1]", "text": ""},
    ],
)
def test_notes_that_are_no_conversation_are_refused(notes, tokenizer, tmp_path):
    model, talk = talker(tokenizer)
    model.read(ids(1, 5)).save(tmp_path / "state", **notes)
    with pytest.raises(InputError, match=r"state: its notes hold no conversation; .* --state"):
        talk.load(str(tmp_path / "state"))
    assert talk.state is None


def test_text_before_a_saved_conversation_is_not_lost_silently(tokenizer, tmp_path, capsys):
    numbered = TEMPLATE.replace(
        "<{{ m.role }}>", "<{{ messages | length }}>"
    )  # as thoughts left out do
    model, talk = talker(tokenizer, numbered)
    talk.reset(model.read(ids(1, 50)))
    talk.answer("one")
    talk.save(str(tmp_path / "talk"))
    talk.answer("two")
    assert len(talk.state) > 50  # its state is still known
    assert "without" not in capsys.readouterr().err
    talk.load(str(tmp_path / "talk"))
    talk.answer("two")
    assert len(talk.state) < 50
    assert "without the text before the first turn" in capsys.readouterr().err


def test_a_turns_end_of_another_token_is_read_once(tokenizer, capsys):
    """The model's own ends are those of `generate` too."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(5)
    model, talk = talker(tokenizer, ends=[0, 1])
    assert talk.options["eos_token_id"] == [0, 1, 5]
    for said in ("one", "two"):
        talk.answer(said)
    read = tokenizer(talk.text + "<|endoftext|>", add_special_tokens=False).input_ids
    assert talk.state.last.item() == 0
    assert len(talk.state) == len(read) + (read[0] != tokenizer.bos_token_id)
    tokenizer.eos_token = tokenizer.pad_token = (
        None  # another test may have given the shared one a pad
    )
    model.generation_config.eos_token_id = None
    assert end_tokens(model, tokenizer) == {}


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_turns_are_cut_as_in_the_whole(scheme, capsys):
    """SentencePiece puts a blank before a text, or behind each special token too."""
    tokens = ["<|endoftext|>", "▁", *(f"<0x{i:02X}>" for i in range(256))]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    end = "<|endoftext|>"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=end, eos_token=end)
    _, talk = talker(tokenizer)
    for said in ("one", "two and three"):
        talk.answer(said)
    assert len(talk.state) == len([0, *tokenizer(talk.text + end).input_ids])


def test_what_was_interrupted_or_refused_was_not_said(tokenizer, monkeypatch, capsys):
    model, talk = talker(tokenizer)
    talk.answer("one")
    state, messages, read, sizes = talk.state, list(talk.messages), model.read, []

    def breaking(tokens, **options):
        sizes.append(tokens.shape[1])
        if len(sizes) == 2:
            raise KeyboardInterrupt
        return read(tokens, **options)

    monkeypatch.setattr(model, "read", breaking)
    monkeypatch.setattr(nalanda.inference.generate, "PIECE", 8)
    assert talk.answer("many words " * 9) == ""
    assert (talk.state, talk.messages, sizes) == (state, messages, [8, 8])
    with pytest.raises(InputError, match="not UTF-8"):
        talk.answer("caf\udce9")
    talk.tokenizer.chat_template = "{{ raise_exception('no system') }}"
    with pytest.raises(InputError, match="the chat template refuses: no system"):
        talk.answer("two")
    assert (talk.state, talk.messages) == (state, messages)


@pytest.mark.parametrize("error", [KeyboardInterrupt, InputError])
def test_a_turn_that_failed_leaves_nothing_in_a_cache(error, tokenizer, capsys):
    """Models of other libraries write into their cache, which the next turn continues."""
    model = llama(len(tokenizer))
    options = sampling_options(Sampling(temperature=0, max_new_tokens=9)) | letters(tokenizer)
    talks = [Conversation(model, tokenizer, options) for _ in range(2)]
    for talk in talks:
        talk.answer("one")

    def failing(*_):
        raise error("")

    with model.lm_head.register_forward_pre_hook(failing), contextlib.suppress(InputError):
        talks[0].answer("many words")
    for talk in talks:
        talk.answer("two")
    a, b = (talk.tokens for talk in talks)
    assert a == b
    a, b = (talk.cache.layers[-1].keys for talk in talks)
    close(a, b, 1e-6)


def test_ctrl_c_again_and_again_ends_no_conversation(checkpoint, tmp_path, monkeypatch, capsys):
    """While the part of an answer is read that was printed, and while a state is written."""
    put, reads = Printer.put, []

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    def read(*arguments, **options):
        reads.append(arguments)
        return interrupted() if len(reads) == 3 else whole(*arguments, **options)

    def breaking(self, value):
        put(self, value)
        if len(reads) == 2 and len(self.tokens) == 4:
            interrupted()

    whole = NalandaForCausalLM.read
    monkeypatch.setattr(NalandaForCausalLM, "read", read)
    monkeypatch.setattr(Printer, "put", breaking)
    monkeypatch.setattr(script.State, "save", interrupted)
    lines = ["one", "many words", f"/save {tmp_path / 'talk'}", "two", "/quit"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    script.main([checkpoint, "--temperature", "0", "--max-new-tokens", "8"])
    interrupted_talk = capsys.readouterr().out.split("> ")[-2]

    monkeypatch.undo()
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    script.main([checkpoint, "--temperature", "0", "--max-new-tokens", "8"])
    assert capsys.readouterr().out.split("> ")[-2] == interrupted_talk


def test_a_conversation_outlives_what_can_be_explained(checkpoint, monkeypatch, capsys):
    """A machine out of memory, and a path of nobody."""

    def read(self, *arguments, **options):
        if arguments[0].shape[1] > 60:
            raise RuntimeError("out of memory")
        return whole(self, *arguments, **options)

    whole = NalandaForCausalLM.read
    monkeypatch.setattr(NalandaForCausalLM, "read", read)
    answers = []
    for between in ([], ["many words " * 9, "/load ~nobody_of_that_name/talk"]):
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(["one", *between, "two"]) + "\n"))
        script.main([checkpoint, "--temperature", "0", "--max-new-tokens", "8"])
        printed = capsys.readouterr()
        answers.append(printed.out.split("> ")[-2])
    assert answers[0] == answers[1]
    assert "\nout of memory; take" in printed.err
    assert "\na path begins with ~ and the name of an unknown user" in printed.err
