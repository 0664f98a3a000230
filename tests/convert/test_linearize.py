"""From a pretrained transformer to a hybrid: the replacement, the fit of its layers, and the distillation."""

import json
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from training import contents, start
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from nalanda.common.errors import InputError
from nalanda.config.load import load_config
from nalanda.convert import fit as fitting
from nalanda.convert.fit import fit_layers
from nalanda.convert.linearize import (
    build_hybrid,
    hybrid_config,
    open_transformer,
    replaced_layers,
    write_hybrid,
)
from nalanda.convert.llama import LLAMA
from nalanda.model import MIXERS, NalandaConfig
from nalanda.report.info import info
from nalanda.report.runs import read_run
from nalanda.report.verify import verify
from nalanda.train.log import read_metrics
from nalanda.train.loop import train
from nalanda.train.resolve import resolve

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

SIZES = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
}
PATTERN = "model={mixer: {pattern: [linear_attention, softmax]}, use_gate: false}"


@pytest.fixture(scope="module")
def llama(tokenizer, tmp_path_factory):
    """A Llama of four layers with two groups of heads, and its tokenizer."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def opened(folder):
    teacher = open_transformer(folder)
    return teacher, teacher.load(torch.device("cpu"), torch.float32)


def settings(recipe, llama, run, *overrides):
    return load_config(
        recipe,
        [
            f"output_dir={run}",
            f"tokenizer={llama}",
            PATTERN,
            "data.seq_len=32",
            "data.bos=false",
            "linearize.steps=6",
            "checkpoint.every=2",
            "log.every=1",
            "log.tensorboard=false",
            "validation.every=0",
            *overrides,
        ],
    )


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_without_a_replaced_layer_the_hybrid_is_the_teacher(kind, llama, tmp_path):
    source = llama
    if kind == "qwen3":
        torch.manual_seed(0)
        source = tmp_path / "qwen3"
        Qwen3ForCausalLM(Qwen3Config(**SIZES)).save_pretrained(source)
    teacher, model = opened(source)
    hybrid = build_hybrid(hybrid_config(teacher.config, {"mixer": "softmax"}), model)

    tokens = torch.randint(257, (2, 40))
    original = AutoModelForCausalLM.from_pretrained(source)
    expected = original(tokens).logits
    torch.testing.assert_close(hybrid(tokens).logits, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(hybrid(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("mixer", sorted(MIXERS.keys() - {"softmax"}))
def test_a_replaced_layer_begins_with_the_projections(mixer, llama):
    teacher, model = opened(llama)
    config = hybrid_config(teacher.config, {"mixer": {"pattern": [mixer, "softmax"]}})
    hybrid = build_hybrid(config, model)
    ours, theirs = (m.model.layers[2].mixer for m in (hybrid, model))

    assert torch.equal(ours.q_proj.weight, theirs.q_proj.weight)
    assert torch.equal(ours.o_proj.weight, theirs.o_proj.weight)
    if mixer != "delta_product":  # a token has two values there
        # Heads 0 and 1 read the keys and values of group 0, heads 2 and 3 those of group 1.
        values = ours.v_proj.weight.unflatten(0, (4, 8))
        groups = theirs.v_proj.weight.unflatten(0, (2, 8))
        assert torch.equal(values, groups[[0, 0, 1, 1]])
    if ours.rule.conv:
        x = torch.randn(1, 5, len(ours.v_conv1d.weight))
        assert torch.equal(ours.v_conv1d(x, fitting.Sequences())[0], x)
    assert torch.equal(hybrid.lm_head.weight, model.lm_head.weight)
    assert hybrid.model.layers[1].mixer.num_v_heads == 2


def test_the_folder_is_a_model_like_any_other(llama, tmp_path):
    teacher, model = opened(llama)
    hybrid = build_hybrid(hybrid_config(teacher.config, {}), model)
    folder = write_hybrid(hybrid, teacher, tmp_path / "hybrid")

    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.config.layer_mixers == ["gated_deltanet"] * 3 + ["softmax"]
    prompt = AutoTokenizer.from_pretrained(folder)("abc", return_tensors="pt").input_ids
    assert torch.equal(loaded(prompt).logits, hybrid(prompt).logits)
    assert (
        loaded.generate(prompt, max_new_tokens=5, do_sample=False).shape[1] == prompt.shape[1] + 5
    )


@pytest.mark.parametrize(
    ("changes", "keys", "said"),
    [
        ({"model_type": "mistral"}, {}, "model_type 'mistral'"),
        ({"sliding_window": 64}, {}, "sliding_window=64"),
        ({"attention_bias": True}, {}, "attention_bias=True"),
        ({"num_key_value_heads": 3}, {}, "num_kv_heads=3"),
        ({"vocab_size": 300}, {}, "[257, 32], the config says [300, 32]"),
        ({}, {"hidden_size": 64}, "model.hidden_size: 64, but the teacher has 32"),
        ({}, {"mixer": "atention"}, "unknown mixer 'atention'"),
        ({}, {"mixer": ["gla", "softmax"]}, "mixer names 2 layers"),
        ({}, {"mixer_options": {"window": 3}}, "no option 'window'"),
        ({}, {"mixer_options": {"softmax": {"window": 3}}}, "softmax.window: 3"),
    ],
)
def test_a_model_that_cannot_be_replaced_is_refused_by_name(
    changes, keys, said, llama, tmp_path, monkeypatch
):
    """Before a tensor's values are read."""
    for name, content in contents(llama).items():
        (tmp_path / name).write_bytes(content)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    monkeypatch.setattr(fitting.Transformer, "load", None)
    with pytest.raises(InputError) as error:
        hybrid_config(open_transformer(tmp_path).config, keys)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_recipe_may_repeat_the_sizes_of_its_teacher(llama):
    config = open_transformer(llama).config
    assert (
        hybrid_config(config, {"hidden_size": 32, "norm_eps": 9.9999999e-7}).norm_eps
        == config.norm_eps
    )
    with pytest.raises(InputError, match=r"model\.norm_eps: 1e-05, but the teacher has 1e-06"):
        hybrid_config(config, {"norm_eps": 1e-5})


@pytest.mark.slow
def test_a_layer_that_can_represent_the_attention_learns_it(recipe, llama, tmp_path, monkeypatch):
    """Queries and keys of 0 weigh all tokens alike, in both. The layers begin with half the
    values, and have no convolutions, whose SiLU would change them."""
    teacher = tmp_path / "uniform"
    teacher.mkdir()
    for name, content in contents(llama).items():
        (teacher / name).write_bytes(content)
    weights = load_file(teacher / "model.safetensors")
    for name in weights:
        if "q_proj" in name or "k_proj" in name:
            weights[name] = torch.zeros_like(weights[name])
    save_file(weights, teacher / "model.safetensors", metadata={"format": "pt"})

    def halved(*arguments):
        hybrid = build_hybrid(*arguments)
        for layer in hybrid.model.layers[::2]:
            layer.mixer.v_proj.weight.data *= 0.5
        return hybrid

    monkeypatch.setattr(fitting, "build_hybrid", halved)
    run = tmp_path / "run"
    steps = "linearize.steps=100", "linearize.lr=0.01", "schedule.min_lr_ratio=0.01"
    fit_layers(settings(recipe, teacher, run, "model.conv_size=0", *steps), str(teacher))
    errors = [line["error/hybrid"] for line in read_metrics(run / "metrics.jsonl")]
    assert 0.2 < errors[0] < 0.3
    assert errors[-1] < 1e-3
    hybrid = AutoModelForCausalLM.from_pretrained(run / "hybrid")
    text = "scan delta state decay head value"
    tokens = AutoTokenizer.from_pretrained(teacher)(text, return_tensors="pt").input_ids
    expected = AutoModelForCausalLM.from_pretrained(teacher)(tokens).logits
    assert (hybrid(tokens).logits - expected).abs().max() < 0.1 * expected.abs().max()


ARMS = "linearize.arms={plain: {}, delta: {mixer: {pattern: [softmax, gated_deltanet]}, feature_map: relu}}"


def outcome(run, arms):
    lines = list(read_metrics(run / "metrics.jsonl"))
    return {arm: (run / arm / "model.safetensors").read_bytes() for arm in arms}, lines


@pytest.mark.slow
def test_arms_share_a_pass_and_do_not_meet(recipe, llama, tmp_path, monkeypatch):
    # A fit takes one process, so it must not advise several.
    monkeypatch.setattr("nalanda.train.launch.advise_on_threads", None)
    folders = fit_layers(settings(recipe, llama, tmp_path / "both", ARMS), str(llama))
    assert [folder.name for folder in folders] == ["plain", "delta"]
    fit_layers(settings(recipe, llama, tmp_path / "alone"), str(llama))

    both, lines = outcome(tmp_path / "both", ["plain", "delta"])
    alone, of_one = outcome(tmp_path / "alone", ["hybrid"])
    assert both["plain"] == alone["hybrid"]
    assert [x["error/plain"] for x in lines] == [x["error/hybrid"] for x in of_one]
    assert lines[-1]["error/delta"] < lines[0]["error/delta"]


@pytest.mark.slow
def test_a_killed_fit_resumes_to_the_same_values(recipe, llama, tmp_path):
    config = settings(recipe, llama, tmp_path / "whole", ARMS)
    fit_layers(config, str(llama))

    run = tmp_path / "killed"
    config.output_dir = str(run)
    file = tmp_path / "recipe.yaml"
    file.write_text(config.to_yaml())
    # Slowed down, so that the signal comes before the end.
    code = (
        "import time; from nalanda.convert import fit; step = fit.fit_step;"
        "fit.fit_step = lambda *a: (time.sleep(0.5), step(*a))[1];"
        "from nalanda.config.load import load_config; import sys;"
        "fit.fit_layers(load_config(sys.argv[1]), sys.argv[2])"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(file), str(llama)])
    while not (run / "checkpoints" / "step-2").is_dir():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (run / "plain").exists()

    fit_layers(load_config(file), str(llama))
    assert outcome(run, ["plain", "delta"]) == outcome(tmp_path / "whole", ["plain", "delta"])


@pytest.fixture(scope="module")
def fitted(recipe, llama, tmp_path_factory):
    """The folder of a finished fit of two arms."""
    run = tmp_path_factory.mktemp("fitted") / "run"
    fit_layers(settings(recipe, llama, run, ARMS), str(llama))
    return run


@pytest.mark.slow
def test_commands_know_the_folder_of_a_fit(recipe, fitted, llama):
    summary = read_run(fitted)
    assert (summary.state, summary.model) == ("finished", "fit of plain, delta")
    assert (summary.step, summary.steps) == (6, 6)
    with pytest.raises(InputError, match=f"name a model in it, such as {fitted}/plain"):
        resolve(str(fitted))
    with pytest.raises(InputError, match="holds a fit of layers; choose another output_dir"):
        train(settings(recipe, llama, fitted, ARMS))


def test_the_checkpoints_of_a_fit_are_verified(fitted, tmp_path):
    run = shutil.copytree(fitted, tmp_path / "run")
    assert [verdict.good for verdict in verify(run)] == [True] * 3
    file = run / "checkpoints" / "step-4" / "model.safetensors"
    weights = load_file(file)
    first = min(name for name in weights if name.startswith("delta."))
    save_file(weights | {first: weights[first][:1]}, file)
    verdict = next(verdict for verdict in verify(run) if verdict.step == 4)
    assert verdict.whole != "yes"
    assert f"a checkpoint of another shape: {first} is" in verdict.loadable


def test_an_interrupted_fit_says_so(recipe, llama, tmp_path, monkeypatch):
    step = fitting.fit_step

    def interrupted(*inputs):
        signal.raise_signal(signal.SIGTERM)
        return step(*inputs)

    monkeypatch.setattr(fitting, "fit_step", interrupted)
    with pytest.raises(SystemExit) as stop:
        fit_layers(settings(recipe, llama, tmp_path / "run"), str(llama))
    assert stop.value.code == 128 + signal.SIGTERM
    summary = read_run(tmp_path / "run")
    assert (summary.state, summary.step) == ("interrupted", 1)


def test_another_fit_in_the_folder_is_refused(recipe, llama, tmp_path):
    fit_layers(settings(recipe, llama, tmp_path / "run"), str(llama))
    with pytest.raises(
        InputError, match=r"holds another fit: linearize.steps is 6 there and 7 here"
    ):
        fit_layers(settings(recipe, llama, tmp_path / "run", "linearize.steps=7"), str(llama))


@pytest.mark.parametrize("override", ["stages.late.after_step=2", "train.resume=2"])
def test_a_fit_refuses_what_it_does_not_read(override, recipe, llama, tmp_path):
    config = settings(recipe, llama, tmp_path / "run", override)
    with pytest.raises(InputError, match=r"^(stages|train\.resume): a fit"):
        fit_layers(config, str(llama))
    assert not (tmp_path / "run").exists()


def test_a_fit_that_cannot_start_leaves_no_folder(recipe, llama, tmp_path):
    config = settings(recipe, llama, tmp_path / "runs/fit", f"tokenizer={tmp_path}")
    with pytest.raises(InputError, match="tokenizer"):
        fit_layers(config, str(llama))
    assert not (tmp_path / "runs").exists()


DISTILLED = (
    "validation.every=0",
    "checkpoint.every=4",
    "train.steps=8",
    "schedule.warmup_steps=0",
    "data.bos=false",
)


@pytest.fixture(scope="module")
def hybrid(llama, tmp_path_factory):
    """The folder of a hybrid whose layers were not fitted."""
    teacher, model = opened(llama)
    config = hybrid_config(teacher.config, {"mixer": {"pattern": ["gated_deltanet", "softmax"]}})
    return write_hybrid(
        build_hybrid(config, model), teacher, tmp_path_factory.mktemp("h") / "hybrid"
    )


def distilled(recipe, hybrid, run, *overrides):
    init = f"model={{init_from: {hybrid}}}", f"tokenizer={hybrid}"
    return load_config(recipe, [f"output_dir={run}", *init, *DISTILLED, *overrides])


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_hybrid_learns_the_next_tokens_of_its_teacher(precision, recipe, llama, hybrid, tmp_path):
    teacher = f"distill.teacher={llama}", f"distill.precision={precision}", "distill.weight=1.0"
    train(distilled(recipe, hybrid, tmp_path / "run", *teacher))
    lines = list(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert lines[0]["kl"] > 0.1
    assert lines[-1]["kl"] < 0.8 * lines[0]["kl"]
    # The loss is the cross-entropy, as without a teacher.
    train(distilled(recipe, hybrid, tmp_path / "alone"))
    alone = next(read_metrics(tmp_path / "alone" / "metrics.jsonl"))
    assert lines[0]["loss"] == alone["loss"]
    assert "kl" not in alone


@pytest.mark.slow
def test_a_distillation_resumes_to_the_same_values(recipe, llama, hybrid, tmp_path):
    teacher = f"distill.teacher={llama}"
    train(distilled(recipe, hybrid, tmp_path / "whole", teacher))
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    # As if it had been killed behind its fourth step.
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-8")
    shutil.rmtree(tmp_path / "run" / "final")
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    (tmp_path / "run" / "run.json").write_text(json.dumps(facts | {"state": "running"}))
    train(distilled(recipe, hybrid, tmp_path / "run", teacher))

    whole, resumed = (
        load_file(tmp_path / name / "final" / "model.safetensors") for name in ("whole", "run")
    )
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    divergences = [
        [line["kl"] for line in read_metrics(tmp_path / name / "metrics.jsonl")]
        for name in ("whole", "run")
    ]
    assert divergences[0] == divergences[1]


@pytest.mark.slow
def test_the_divergence_is_the_mean_over_all_processes(recipe, llama, hybrid, tmp_path):
    keys = f"distill.teacher={llama}", "train.steps=1", "log.every=1", "train.micro_batch_size=2"
    train(distilled(recipe, hybrid, tmp_path / "one", *keys))
    file = tmp_path / "two.yaml"
    file.write_text(distilled(recipe, hybrid, tmp_path / "two", *keys).to_yaml())
    process = start(file, tmp_path / "two", processes=2)
    _, stderr = process.communicate(timeout=200)
    assert process.returncode == 0, stderr

    one, two = (next(read_metrics(tmp_path / x / "metrics.jsonl")) for x in ("one", "two"))
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-5)
    assert one["kl"] == pytest.approx(two["kl"], rel=1e-5)


def test_the_memory_of_a_teacher_is_counted(recipe, llama, hybrid, tmp_path):
    def figures(*overrides):
        config = distilled(recipe, hybrid, tmp_path / "run", *overrides)
        file = tmp_path / "recipe.yaml"
        file.write_text(config.to_yaml())
        return info(str(file), [])

    teacher = f"distill.teacher={llama}"
    weights = sum(x.numel() for x in load_file(llama / "model.safetensors").values())
    alone, beside = figures(), figures(teacher)
    assert alone["teacher_bytes"] == 0
    assert beside["teacher_bytes"] == 4 * weights
    for name in ("weights_and_optimizer_bytes", "memory_bytes_per_device"):
        assert beside[name] - alone[name] == 4 * weights
    # On a device of its own, its head alone is here.
    apart = figures(teacher, "distill.precision=bf16", "distill.device=cuda:1")
    assert apart["teacher_bytes"] == 2 * 257 * 32


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("tokenizer", "its tokenizer is another than the run's; set tokenizer="),
        ("vocabulary", "its vocab_size is 300, the model's 257; set model.vocab_size=300"),
        ("carry", "it reads whole rows from their start; set data.long_documents=cut"),
        ("context", "it reads whole rows from their start; set train.context_parallel=1"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused_before_its_weights_are_read(
    change, said, recipe, llama, hybrid, tmp_path
):
    teacher, overrides = tmp_path / "teacher", []
    shutil.copytree(llama, teacher)
    (teacher / "model.safetensors").unlink()
    if change == "tokenizer":
        file = teacher / "tokenizer.json"
        file.write_text(file.read_text().replace('"a":', '"¤":'))
    elif change == "vocabulary":
        file = teacher / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": 300}))
    else:
        key = {"carry": "data.long_documents=carry", "context": "train.context_parallel=2"}
        overrides.append(key[change])
    with pytest.raises(InputError) as error:
        train(distilled(recipe, hybrid, tmp_path / "run", f"distill.teacher={teacher}", *overrides))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_recipe_that_replaces_nothing_is_refused(recipe, llama, tmp_path):
    with pytest.raises(InputError, match=r"model\.mixer: no layer of hybrid is replaced"):
        fit_layers(settings(recipe, llama, tmp_path / "run", "model={mixer: softmax}"), str(llama))


LLAMA_1B = {
    **{"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192},
    **{"num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8},
    **{"head_dim": 64, "max_position_embeddings": 131072},
    "rope_parameters": {
        **{"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0},
        **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 8192,
    },
}
SMOLLM2 = {
    **{"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536},
    **{"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3},
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
}


@pytest.mark.parametrize(
    ("name", "sizes", "replaced"),
    [("linearize_smollm2_135m", SMOLLM2, 23), ("linearize_llama32_1b", LLAMA_1B, 12)],
)
def test_the_recipes_have_the_sizes_of_their_transformers(name, sizes, replaced):
    config = LlamaConfig(**sizes, rms_norm_eps=1e-5, tie_word_embeddings=True)
    transformer = LLAMA["llama"].ours(config.to_dict())
    model = load_config(name).model
    hybrid = hybrid_config(transformer, model)
    assert len(replaced_layers(hybrid)) == replaced
    # The recipe alone describes the same model, as `nalanda info` and a resume read it.
    described = NalandaConfig(**model)
    for key in ("layer_mixers", "mixer_options", "feature_map", "intermediate_size"):
        assert getattr(described, key) == getattr(hybrid, key)
