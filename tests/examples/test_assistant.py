"""examples/assistant/: the chat template, the conversations, packed rows, and a folder that answers."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from tiny_models import build
from typer.testing import CliRunner

from nalanda import NalandaForCausalLM
from nalanda.inference.load import load_model
from nalanda_cli import app

FOLDER = Path(__file__).parents[2] / "examples" / "assistant"
TEMPLATE = FOLDER / "chat_template.jinja"
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "four"},
]


@pytest.fixture(scope="module")
def script():
    pytest.importorskip("trl")
    spec = importlib.util.spec_from_file_location("assistant", FOLDER / "assistant.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def base(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    sizes = {"vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": 0}
    build("gated_deltanet", dtype=torch.float32, **sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_the_template_marks_the_answers_with_their_ends(tokenizer):
    template = TEMPLATE.read_text()
    rendered = tokenizer.apply_chat_template(TALK, chat_template=template, tokenize=False)
    end = tokenizer.eos_token
    said = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}{end}\n" for turn in TALK)
    assert rendered == tokenizer.bos_token + said

    options = {"return_dict": True, "return_assistant_tokens_mask": True}
    found = tokenizer.apply_chat_template(TALK, chat_template=template, **options)
    learnt = [
        i for i, kept in zip(found["input_ids"], found["assistant_masks"], strict=True) if kept
    ]
    assert tokenizer.decode(learnt) == f"two{end}four{end}"

    # The start of an answer is that of the whole text.
    options = {"add_generation_prompt": True, "tokenize": False}
    asked = tokenizer.apply_chat_template(TALK[:-1], chat_template=template, **options)
    assert rendered.startswith(asked)


@pytest.mark.slow
def test_conversations_are_the_same_every_time_and_none_is_in_both_files(script, tmp_path):
    for folder in ("a", "b"):
        script.write_chats(tmp_path / folder)
    train, test = ((tmp_path / "a" / name).read_text() for name in ("train.jsonl", "test.jsonl"))
    assert train == (tmp_path / "b" / "train.jsonl").read_text()
    train, test = (
        [json.loads(line)["messages"] for line in text.splitlines()] for text in (train, test)
    )
    assert len(train) > 400
    assert len(test) > 40
    assert not [chat for chat in test if chat in train]
    assert {turn["role"] for chat in train for turn in chat} == {"user", "assistant"}


@pytest.mark.slow
def test_packed_rows_have_the_loss_of_conversations_alone(script, base, tmp_path):
    """By TRL's own preparation, collator and loss, which is in fp32."""
    model, tokenizer = load_model(base, dtype="fp64")
    chats = [{"messages": TALK[a:b]} for a, b in ((0, 3), (1, 5), (1, 3), (3, 5), (0, 5))]
    data = script.Dataset.from_list(chats)

    def trainer(**options):
        training = script.SFTConfig(
            output_dir=str(tmp_path),
            assistant_only_loss=True,
            chat_template_path=str(TEMPLATE),
            per_device_train_batch_size=5,
            report_to="none",
            bf16=False,
            use_cpu=True,
            **options,
        )
        return script.SFTTrainer(
            model=model, args=training, train_dataset=data, processing_class=tokenizer
        )

    def loss_and_gradient(trainer, rows):
        batch = trainer.data_collator(rows)
        model.zero_grad()
        # The sum over the answers' tokens: a batch has another number of them.
        loss = trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(1))
        loss.backward()
        return loss.item(), model.lm_head.weight.grad.clone()

    packed = trainer(packing=True, max_length=180)
    rows = list(packed.train_dataset)
    assert 1 < len(rows) < len(chats)
    assert any(len(row["seq_lengths"]) > 1 for row in rows)
    loss, gradient = loss_and_gradient(packed, rows)

    alone = trainer(packing=False)
    each = [loss_and_gradient(alone, [row]) for row in alone.train_dataset]
    torch.testing.assert_close(loss, sum(loss for loss, _ in each), rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, sum(g for _, g in each), rtol=1e-5, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("use_peft", ["false", "true"])
def test_a_tuned_folder_answers_and_ends_its_turn(
    script, base, use_peft, tmp_path, monkeypatch, capsys
):
    chats, folder = tmp_path / "chats", tmp_path / "assistant"
    chats.mkdir()
    line = json.dumps({"messages": [{"role": "user", "content": "a"}, TALK[2]]}) + "\n"
    (chats / "train.jsonl").write_text(8 * line)
    given = {
        "config": FOLDER / "assistant.yaml",
        "chat_template_path": TEMPLATE,
        "model_name_or_path": base,
        "dataset_name": chats,
        "output_dir": folder,
        "use_peft": use_peft,
        "max_steps": 24,
        "learning_rate": 0.03,
        "warmup_steps": 0,
    }
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    monkeypatch.setattr("sys.argv", ["assistant.py", *words])
    script.main()
    assert f"nalanda generate {folder}" in capsys.readouterr().out

    answer = CliRunner().invoke(
        app, ["generate", str(folder), "a", "--chat", "--temperature", "0", "--max-new-tokens", "9"]
    )
    assert answer.stdout == "two\n"
    assert "4 tokens in" in answer.stderr  # the fourth is eos
    model = NalandaForCausalLM.from_pretrained(folder)
    assert not [name for name, _ in model.named_parameters() if "lora" in name]


@pytest.mark.slow
def test_bad_input_is_one_line(script, base, tmp_path, monkeypatch, capsys):
    (tmp_path / "train.jsonl").write_text('{"text": "no turns"}\n')
    config = ["--config", str(FOLDER / "assistant.yaml"), "--output_dir", str(tmp_path / "out")]
    for words, message in (
        (["--epochs", "3"], "--epochs"),
        (["--chat_template_path", "none.jinja"], "none.jinja: no such file"),
        (["--model_name_or_path", str(tmp_path / "none")], "no such model"),
        (["--model_name_or_path", base, "--dataset_name", str(tmp_path / "no")], "cannot be read"),
        (["--model_name_or_path", base, "--dataset_name", str(tmp_path)], "no conversations; give"),
    ):
        monkeypatch.setattr("sys.argv", ["assistant.py", *config, *words])
        with pytest.raises(SystemExit) as stop:
            script.main()
        assert stop.value.code == 2
        said = capsys.readouterr().err.strip().splitlines()[-1]
        assert said.startswith("nalanda: ")
        assert message in said
