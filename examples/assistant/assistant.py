"""Makes an assistant of a base model: supervised fine-tuning on conversations, by TRL.

    python examples/assistant/assistant.py --config examples/assistant/assistant.yaml
    python examples/assistant/assistant.py --config examples/assistant/assistant.yaml \\
        --model_name_or_path runs/other --dataset_name FOLDER --output_dir runs/other_assistant

Options and keys of the YAML are those of TRL's ScriptArguments, SFTConfig and ModelConfig.
"""

import inspect
import itertools
import json
from importlib import import_module
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, load_dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nalanda.common.errors import InputError, first_line, one_line_errors
from nalanda.inference.load import load_model

with one_line_errors():  # without trl
    from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config

MODULES = (
    *("bisect", "copy", "functools", "glob", "heapq", "itertools", "json", "math", "operator"),
    *("os", "os.path", "random", "re", "shutil", "statistics", "string", "textwrap", "time"),
)
TYPES = (str, list, dict, set, int, float)
"""The standard library's functions and methods that conversations ask for."""

SUMS = range(13)
EVERY = 10
"""Of as many conversations one is held out."""

GREETINGS = (
    ("Hello", "Hello. Ask me about a function of Python, or for a sum."),
    ("Who are you?", "I am a small language model that answers questions about Python."),
    ("What can you do?", "I say what functions of Python do, and I add small numbers."),
    ("Thank you", "You are welcome."),
)

Chat = list[dict[str, str]]


def chats() -> list[Chat]:
    """Conversations of one to two questions: functions of the standard library, sums and greetings."""
    found = [turns(*pair) for pair in GREETINGS]
    found += [turns(f"What is {a} + {b}?", f"{a} + {b} is {a + b}.") for a in SUMS for b in SUMS]

    owners = {name: import_module(name) for name in MODULES} | {t.__name__: t for t in TYPES}
    for owner, place in owners.items():
        kind = "type" if inspect.isclass(place) else "module"
        # Without a module's imports, which others have too.
        for name in sorted(getattr(place, "__all__", vars(place))):
            if summary := _summary(name, getattr(place, name)):
                asked = (f"What does {owner}.{name} do?", summary)
                found.append(turns(*asked, f"Which {kind} has it?", f"The {kind} {owner} has it."))
    return found


def _summary(name: str, function: Any) -> str:
    """The first sentence of a public function's docstring; "" where there is none that fits a line."""
    text = inspect.getdoc(function) if callable(function) and not name.startswith("_") else None
    first = " ".join((text or "").split("\n\n")[0].split())
    sentence = first.split(". ")[0].rstrip(".") + "."
    readable = sentence.isascii() and sentence[0].isupper() and 16 <= len(sentence) <= 100
    return sentence if readable else ""


def turns(*said: str) -> Chat:
    """A conversation of a user, who begins, and an assistant."""
    roles = itertools.cycle(("user", "assistant"))
    return [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]


def write_chats(folder: Path) -> None:
    """Writes train.jsonl and test.jsonl, with {"messages": […]} in each line."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"messages": chat}) + "\n" for chat in chats()]
    held_out = lines[EVERY - 1 :: EVERY]
    kept = [line for i, line in enumerate(lines, 1) if i % EVERY]
    (folder / "train.jsonl").write_text("".join(kept), encoding="utf-8")
    (folder / "test.jsonl").write_text("".join(held_out), encoding="utf-8")


def read_chats(script: ScriptArguments, output: Path) -> DatasetDict:
    """The conversations of `dataset_name`, by default the script's own. Raises InputError."""
    name = script.dataset_name
    if name is None:
        name = str(output / "chats")
        write_chats(Path(name))
    try:
        data: Any = load_dataset(name, script.dataset_config)
    except (OSError, ValueError) as error:
        raise InputError(f"dataset_name {name}: cannot be read ({first_line(error)})") from error

    rows = data.get(script.dataset_train_split)
    if rows is None:
        raise InputError(f"{name}: has {', '.join(data)}; set dataset_train_split to one of them")
    if not {"messages", "conversations", "prompt"} & {*rows.column_names}:
        raise InputError(f'{name}: no conversations; give JSONL of {{"messages": [...]}}')
    return data


def fine_tune(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: dict[str, Dataset],
    script: ScriptArguments,
    training: SFTConfig,
    options: ModelConfig,
) -> None:
    """Trains and writes a model's folder, with its tokenizer and chat template."""
    test = data.get(script.dataset_test_split)
    if test is None:
        training.eval_strategy = "no"
    trainer = SFTTrainer(
        model=model,
        args=training,
        train_dataset=data[script.dataset_train_split],
        eval_dataset=None if training.eval_strategy == "no" else test,
        processing_class=tokenizer,
        peft_config=get_peft_config(options),
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)

    # A whole model in place of an adapter: every command reads it.
    if options.use_peft:
        trainer.model = trainer.model.merge_and_unload()
    trainer.save_model()


def main() -> None:
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
    with one_line_errors():
        try:
            script, training, options = parser.parse_args_and_config()
        except ValueError as error:  # an unknown key, or a value that does not fit
            raise InputError(first_line(error)) from error
        name = options.model_name_or_path
        if name is None:
            raise InputError("no model: give --config, or --model_name_or_path")
        template = training.chat_template_path or ""
        if template.endswith(".jinja") and not Path(template).exists():
            raise InputError(f"chat_template_path {template}: no such file; name it from here")

        # On the CPU; the trainer moves it.
        loading = {"dtype": options.dtype, "trust_remote_code": training.trust_remote_code}
        model, tokenizer = load_model(name, device="cpu", **loading)
        if tokenizer.eos_token is None:
            raise InputError(f"{name}: its tokenizer has no eos token, which ends a turn")

        with training.main_process_first():
            data = read_chats(script, Path(training.output_dir))
        fine_tune(model, tokenizer, data, script, training, options)

    if training.process_index == 0:
        folder = training.output_dir
        print(f'\nnalanda generate {folder} "What is 3 + 4?" --chat')
        print(f"python examples/chat/chat.py {folder}")


if __name__ == "__main__":
    main()
