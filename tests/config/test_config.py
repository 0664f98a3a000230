"""Recipes: what is refused, in which words, and that what was saved is what was read."""

import typing
from dataclasses import is_dataclass, replace
from pathlib import Path

import pytest

from nalanda.common.errors import InputError
from nalanda.config.bounds import annotations
from nalanda.config.load import differences, find_recipe, is_recipe, load_config
from nalanda.config.schema import Component, DataConfig, RunConfig, TokenizerConfig

RECIPE = """
output_dir: runs/x
model: {mixer: deltanet, hidden_size: 32, num_hidden_layers: 2, num_heads: 2}
tokenizer: some/path
data: {source: python, seq_len: 64}
optim: {lr: 3e-4}
train: {steps: 100, tokens_per_step: 512, micro_batch_size: 4}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return str(tmp_path / "recipe.yaml")


def refusal(recipe: str, *overrides: str) -> str:
    with pytest.raises(InputError) as error:
        load_config(recipe, overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_reads_numbers_that_yaml_takes_for_text(recipe):
    config = load_config(
        recipe,
        [
            "schedule.min_lr_ratio=1e-1",
            "optim.betas=[0.9, 99e-2]",
            "train.steps=2e2",
            "model.norm_eps=1e-5",
            "model.vocab_size=3.2e4",
            "stages.late.after_step=1e1",
            "stages.late.data.source=*.txt",
        ],
    )
    assert config.model["norm_eps"] == 1e-5
    assert config.model["vocab_size"] == 32000
    assert config.stages["late"].data == {"source": "*.txt"}
    assert config.optim.lr == 3e-4
    assert config.schedule.min_lr_ratio == 0.1
    assert config.optim.betas == (0.9, 0.99)
    assert config.train.steps == 200
    assert isinstance(config.train.steps, int)
    assert config.tokenizer.path == "some/path"


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("seed=008", 8),
        ("seed=010", 10),
        ("train.steps=0100", 100),
        ("train.steps=1_000", 1000),
        ("seed=0", 0),
        ("optim.lr=1.5e4", 1.5e4),
        ("optim.lr=.5e-3", 5e-4),
        ("train.resume=010", "010"),
        ("data.source=*.jsonl", "*.jsonl"),
        ("data.source=[ab]*.jsonl", "[ab]*.jsonl"),
        ("data.source=a #b.jsonl", "a #b.jsonl"),
        ("data.source='a' # a comment", "a"),
        ("data.source=[a, b]", ["a", "b"]),
        ("data.name=1:30", "1:30"),
        ("train.precision=bfloat16", "bf16"),
        ("train.precision=float16", "fp16"),
        ("distill.precision=float32", "fp32"),
    ],
)
def test_values_that_yaml_1_1_reads_otherwise(recipe, override, value):
    found = load_config(recipe, [override])
    for key in override.partition("=")[0].split("."):
        found = getattr(found, key)
    assert found == value
    assert type(found) is type(value)


def test_overrides_reach_every_depth(recipe):
    config = load_config(
        recipe,
        [
            "tokenizer.train=bpe",
            "tokenizer.path=null",
            "model.feature_map_options.power=3",
            "model.feature_map=nala",
        ],
    )
    assert (config.tokenizer.train, config.tokenizer.path) == ("bpe", None)
    assert config.model["feature_map_options"] == {"power": 3}
    assert config.model["mixer"] == "deltanet"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optim.learning_rat=1", "optim.learning_rat: no such key"),
        ("optim.weight_decai=1", "did you mean optim.weight_decay?"),
        ("trian.steps=1", "trian: no such key; did you mean train?"),
        ("model.hiden_size=1", "hidden_size"),
        ("model.feature_map_options.powr=1", "powr"),
        ("train.steps=many", "train.steps: expected an integer, got 'many'"),
        ("train.steps=1.5", "train.steps: expected an integer, got 1.5"),
        (f"train.steps={'9' * 400}", "train.steps: expected an integer, got 999"),
        (f"model.vocab_size={'9' * 400}", "model: int too large"),
        ("train.ema=0.9", "train.ema: expected a list, got 0.9; write [0.9]"),
        ("train.steps=true", "train.steps: expected an integer, got True"),
        ("train.compile=1", "train.compile: expected one of true, false, auto; got 1"),
        ("optim.lr=fast", "optim.lr: expected a number, got 'fast'"),
        ("optim.lr=nan", "optim.lr: expected a number"),
        ("optim.betas=[0.9]", "optim.betas: expected 2 values, got 1"),
        ("optim.betas=[0.9, x]", "optim.betas[1]: expected a number"),
        (
            "train.precision=fp8",
            "train.precision: expected one of bf16, fp16, fp32, auto; got 'fp8'",
        ),
        ("schedule.name=cos", "schedule.name: expected one of cosine"),
        ("output_dir=7", "output_dir: expected text, got 7"),
        ("train.steps=1:30", "train.steps: expected an integer, got '1:30'"),
        ("data.source=2024", "data.source: expected text or a list, got 2024; quote it"),
        ("data.source=null", "data.source: expected text or a list, got nothing"),
        ("data.source=[a, 1]", "data.source[1]: expected text, got 1; quote it"),
        ("train.resume=1.5", "train.resume: expected text or an integer, got 1.5"),
        ("optim=3", "optim: expected a section of keys, got 3"),
        ("train.steps", "expected section.key=value, such as train.steps=VALUE"),
        ("train.stepz", "expected section.key=value, such as train.steps=100"),
        (
            "data.validation=v.txt",
            "did you mean data.validation_source=FILE, or validation.every=0",
        ),
        ("validation=none", "or validation.every=0 for none?"),
        ("book.txt", "book.txt: expected section.key=value, such as data.source=book.txt"),
        ("train.steps=[1", "line 1: not YAML"),
        ("train.compile=!!bool x", "train.compile=!!bool x: not YAML"),
        ("seed=!!timestamp x", "seed=!!timestamp x: not YAML"),
        ("data.seq_len=0", "seq_len"),
        ("train.steps=0", "train.steps: expected 1 or more"),
        ("optim.eps=-1", "optim.eps: expected a positive number, got -1"),
        ("optim.eps=0", "optim.eps: expected a positive number, got 0"),
        (
            "optim.max_grad_norm=1e-30",
            "optim.max_grad_norm: expected 0, for none, or 1e-15 or more",
        ),
        ("output_dir=~no-such-user/x", "output_dir: ~no-such-user/x: there is no such user"),
        ("data.source=[~no-such-user/x]", "data.source: ~no-such-user/x: there is no such user"),
        (
            "stages={a: {after_step: 9, data: {source: ~no-such-user/x}}}",
            "stages.a.data.source: ~no-such-user/x: there is no such user",
        ),
        ("tokenizer=~no-such-user/x", "tokenizer.path: ~no-such-user/x: there is no such user"),
        ("schedule.warmup_steps=101", "schedule.warmup_steps: 101 is more than train.steps 100"),
        ("train.tokens_per_step=700", "take 512 or 768"),
        ("checkpoint.keep_last=0", "checkpoint.keep_last"),
        ("log.every=0", "log.every"),
        ("stages={1: {after_step: 9}}", "stages: the name 1 is no text; quote it"),
        ("stages={a b: {after_step: 9}}", "stages.a b: a name has letters, digits and _ - alone"),
        ("linearize.arms.Tokenizer={}", "linearize.arms.Tokenizer: the folder has tokenizer"),
        (
            "data.mixture=[{name: a, source: b}]",
            "data.mixture[0].weight: missing from the recipe; add weight to that item of data.mixture",
        ),
        ("model.num_heads=3", "num_heads"),
    ],
)
def test_bad_values_get_one_line(recipe, override, words):
    assert words in refusal(recipe, override)


@pytest.mark.parametrize(
    ("overrides", "warmup"),
    [
        ([], 40),
        (["train.steps=50"], 20),
        (["train.steps=10"], 4),  # fewer steps than the recipe's warm-up
        (["train.steps=1"], 1),
        (["train.steps=200"], 40),  # no run becomes slower to warm up
        (["train={steps: 50, tokens_per_step: 512, micro_batch_size: 4}"], 20),
        (["train.steps=50", "schedule.warmup_steps=30"], 30),
        (["train.steps=50", "schedule={warmup_steps: 31}"], 31),
        (["train.steps=50", "schedule.name=linear"], 20),
    ],
)
def test_the_warmup_follows_shortened_steps(recipe, overrides, warmup):
    with open(recipe, "a") as file:
        file.write("schedule: {warmup_steps: 40}\n")
    config = load_config(recipe, overrides)
    assert config.schedule.warmup_steps == warmup
    assert (
        config.to_dict()["schedule"].keys() == typing.get_type_hints(type(config.schedule)).keys()
    )


def test_a_recipe_whose_warmup_is_longer_than_its_training_is_refused(recipe):
    with open(recipe, "a") as file:
        file.write("schedule: {warmup_steps: 101}\n")
    message = "schedule.warmup_steps: 101 is more than train.steps {0}; set {0} or less"
    assert refusal(recipe) == message.format(100)
    assert refusal(recipe, "train.steps=50") == message.format(50)


def bounded_keys() -> dict[str, tuple[str, str]]:
    """Every key of a section with a bound: a value outside it, and the words of the bound."""
    keys = {}
    for name, kind in typing.get_type_hints(RunConfig).items():
        for field, hint in annotations(kind).items() if is_dataclass(kind) else ():
            for bound in getattr(hint, "__metadata__", ()):
                pair = "tuple" in str(hint)
                keys[f"{name}.{field}"] = ("[0.9, -1]" if pair else "-1", bound.words)
    return keys


@pytest.mark.parametrize(("key", "case"), bounded_keys().items())
def test_every_bound_is_checked_in_the_same_words(recipe, key, case):
    value, words = case
    recipe_of_words = ["tokenizer.train=words"] if key == "tokenizer.min_count" else []
    problem = refusal(recipe, *recipe_of_words, f"{key}={value}")
    assert problem.startswith(f"{key}: expected {words}, got ")


def test_there_are_many_bounds():
    assert len(bounded_keys()) >= 35


def test_the_home_is_written_out_once_wherever_a_path_may_stand(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    given = {
        "output_dir": "~/run",
        "tokenizer": "~/tokenizer",
        "model.init_from": "~/model",
        "data.source": '""',
        "data.mixture": "[{name: a, source: ~/a, weight: 1, validation_source: [~/b, ~/c]}]",
    }
    config = load_config(recipe, [f"{key}={value}" for key, value in given.items()])
    part = config.data.mixture[0]
    found = [config.output_dir, config.tokenizer.path, config.model["init_from"]]
    found += [part.source, *part.validation_source]
    names = ("run", "tokenizer", "model", "a", "b", "c")
    assert found == [str(tmp_path / name) for name in names]
    assert "~" not in config.to_yaml()
    assert replace(config) == config

    assert load_config(recipe, ["data.source=~/text"]).data.source == str(tmp_path / "text")
    assert load_config(recipe, ["data.source=https://a.b/~c/d.jsonl"]).data.source.endswith(
        "/~c/d.jsonl"
    )


def test_a_path_replaces_a_tokenizer_that_the_recipe_trains_and_the_other_way_round(recipe):
    trained = RECIPE.replace("some/path", "{train: words, min_count: 3, mask: true}")
    Path(recipe).write_text(trained)
    for override in ("tokenizer.path=x", "tokenizer=x"):
        assert load_config(recipe, [override]).tokenizer == TokenizerConfig(path="x")
    assert load_config(recipe, ["tokenizer.path=null"]).tokenizer.min_count == 3
    assert "give either path" in refusal(recipe, "tokenizer.path=x", "tokenizer.train=bpe")

    for loaded in ("some/path", "{path: some/path}"):
        Path(recipe).write_text(RECIPE.replace("some/path", loaded))
        assert load_config(recipe, ["tokenizer.train=bpe"]).tokenizer == TokenizerConfig(
            train="bpe"
        )


def test_joined_documents_have_no_bos_unless_it_is_asked_for(recipe):
    assert load_config(recipe).data.bos
    joined = "data.documents=joined"
    assert not load_config(recipe, [joined]).data.bos
    message = "data.bos: joined documents are the lines of one text; set data.bos=false"
    assert refusal(recipe, joined, "data.bos=true") == message


def test_missing_keys_and_files_get_one_line(tmp_path, recipe):
    for key in ("output_dir", "model", "train"):
        lines = [line for line in RECIPE.splitlines() if not line.startswith(key)]
        (tmp_path / "less.yaml").write_text("\n".join(lines))
        assert refusal(str(tmp_path / "less.yaml")).startswith(key)
    (tmp_path / "broken.yaml").write_text("model: {a: 1\ndata: 2\n")
    assert "line 2: not YAML" in refusal(str(tmp_path / "broken.yaml"))
    (tmp_path / "list.yaml").write_text("- 1\n")
    assert "expected sections" in refusal(str(tmp_path / "list.yaml"))
    assert "no such recipe or file" in refusal(str(tmp_path / "none.yaml"))


def test_what_is_saved_reads_back_equal(tmp_path, recipe):
    config = load_config(
        recipe, ["model.mixer_options={allow_neg_eigval: true}", "optim.betas=[0.8, 0.9]"]
    )
    config.output_dir, config.data.revision, config.data.name = "1e-3", "31e4567", "1.5e4"  # text
    assert isinstance(config, RunConfig)
    (tmp_path / "saved.yaml").write_text(config.to_yaml())
    assert load_config(tmp_path / "saved.yaml") == config


def test_differences_name_the_keys():
    old, new = (
        {"optim": {"lr": 1, "eps": 2}, "seed": 0},
        {"optim": {"lr": 3, "eps": 2}, "seed": 0, "x": 1},
    )
    assert differences(old, new) == {"optim.lr": (1, 3), "x": (None, 1)}


def test_recipes_are_found_by_name(tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text(RECIPE)
    assert find_recipe(str(tmp_path / "mine.yaml")) == tmp_path / "mine.yaml"
    monkeypatch.chdir(tmp_path)
    recipes = Path(__file__).parents[2] / "recipes"
    name = min(recipes.glob("*.yaml")).stem
    assert find_recipe(name).read_text() == (recipes / f"{name}.yaml").read_text()
    names = (name, "fla/deltanet_340m", "any.yml", "HuggingFaceFW/fineweb-edu", "python")
    assert [is_recipe(name) for name in names] == [True, True, True, False, False]


def test_a_component_of_a_mixture_has_what_it_does_not_set_from_data():
    parts = [Component("a", "o/a", 1), Component("b", "o/b", 1, config="own", text_field="body")]
    a, b = DataConfig(mixture=parts, name="shared", text_field="content").parts().values()
    assert (a.source, a.name, a.text_field, a.mixture) == ("o/a", "shared", "content", [])
    assert (b.source, b.name, b.text_field, b.mixture) == ("o/b", "own", "body", [])
