"""The models that a run takes, exports and refuses."""

import json
import shutil
import sys

import pytest
import safetensors.torch
import torch
from nalanda_kernels import keep_fla_off_cpus
from training import configured
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, MambaConfig, pipeline

from nalanda.common.errors import InputError
from nalanda.config.model import build_model_config
from nalanda.data.tokenizer import build_tokenizer, tokenizer_fingerprint
from nalanda.train import loop
from nalanda.train.build import build_model
from nalanda.train.export import export
from nalanda.train.log import read_metrics

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


@pytest.mark.parametrize(("kind", "apart"), [(LlamaConfig, True), (MambaConfig, False)])
def test_any_causal_lm_trains_and_says_whether_it_keeps_documents_apart(
    recipe, tmp_path, capsys, kind, apart
):
    kind(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
    ).save_pretrained(tmp_path / "config")
    model = f"model={{auto: {tmp_path / 'config'}}}"
    loop.train(configured(recipe, tmp_path / "run", model, "train.steps=3", "validation.every=0"))
    assert (
        json.loads((tmp_path / "run" / "final" / "run.json").read_text())["documents_kept_apart"]
        is apart
    )
    assert ("packed documents see one another" in capsys.readouterr().out) is not apart
    losses = [line["loss"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert losses[0] == pytest.approx(5.77, abs=0.2)  # ln 320
    assert losses[2] < losses[0]


def test_the_exported_tokenizer_pads_and_the_runs_own_does_not(whole, recipe, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(whole / "final")
    texts = ["state gate", "state gate decay query key value head"]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    assert batch.attention_mask[:, -1].all()
    assert not batch.attention_mask[0, 0]
    alone = [tokenizer(text, return_tensors="pt").input_ids for text in texts]
    assert [mask.sum().item() for mask in batch.attention_mask] == [ids.shape[1] for ids in alone]
    generate = pipeline(
        "text-generation", model=str(whole / "final"), max_new_tokens=6, do_sample=False
    )
    together, apart = (
        [row[0]["generated_text"] for row in generate(texts, batch_size=n)] for n in (2, 1)
    )
    assert together == apart
    own = AutoTokenizer.from_pretrained(whole / "tokenizer")
    assert own.pad_token is None
    assert tokenizer_fingerprint(own) == tokenizer_fingerprint(tokenizer)
    # Trained on with the exported one: eos is a token like any other.
    config = configured(
        recipe, tmp_path / "run", f"tokenizer={whole / 'final'}", "model={auto: llama}"
    )
    assert build_model_config(config, tokenizer).pad_token_id is None
    assert build_model_config(config, tokenizer).eos_token_id == tokenizer.eos_token_id == 0


def test_a_checkpoint_without_its_run_is_exported_without_tokenizer_and_recipe(
    whole, tmp_path, capsys
):
    from nalanda_cli import app

    copied = shutil.copytree(whole / "checkpoints" / "step-24", tmp_path / "backup" / "step-24")
    for source, alone in ((whole, False), (copied, True)):
        with pytest.raises(SystemExit) as ended:
            app(["export", str(source), str(out := tmp_path / f"{source.name}-out")])
        assert not ended.value.code
        said, card = capsys.readouterr(), (out / "README.md").read_text()
        assert ("has no tokenizer and no config.yaml" in said.err) == alone
        for promised in ("config.yaml", "AutoTokenizer", "tokenizer ="):
            assert (promised in card) != alone
        assert ("nalanda generate" in said.err) != alone
        assert AutoModelForCausalLM.from_pretrained(out).config.model_type == "nalanda"


def test_a_run_that_may_only_be_read_is_exported(whole, tmp_path):
    run = shutil.copytree(whole, tmp_path / "run")
    paths = [run, *run.rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    out = export(run, tmp_path / "out")
    for path in paths:
        path.chmod(0o755)
    assert (out / "tokenizer_config.json").is_file()
    assert (out / "config.yaml").is_file()
    # Of each the owner may write: a run as root exports in any case.
    assert all(path.stat().st_mode & 0o200 for path in [out, *out.rglob("*")])


def test_a_model_that_would_take_kernels_of_a_gpu_is_given_torchs(recipe, tmp_path):
    """transformers takes those of flash-linear-attention where it is installed, on a CPU too."""
    model = "model={auto: qwen3_next, hidden_size: 32, num_hidden_layers: 1, num_experts: 0}"
    config = configured(recipe, tmp_path / "run", model)
    tokenizer = build_tokenizer(config.tokenizer, config.data, tmp_path / "tokenizer")
    model = build_model(config, tokenizer)
    module = sys.modules[type(model).__module__]
    assert module.__name__.startswith("transformers.models.qwen3_next")
    assert not keep_fla_off_cpus(module), "nothing is left to change"
    document = torch.tensor([[0, 0, 0, 1, 1]], dtype=torch.int32)
    with pytest.raises(ValueError, match="packed"):  # torch's functions ignore it
        model(torch.tensor([[5, 6, 7, 8, 9]]), seq_idx=document, use_cache=False)


def test_a_model_type_needs_no_path(recipe, tmp_path, capsys):
    model = "model={auto: mamba, hidden_size: 32, num_hidden_layers: 2, state_size: 16, expand: 2}"
    run_dir = loop.train(configured(recipe, tmp_path / "run", model, "train.steps=4"))
    config = json.loads((run_dir / "final" / "config.json").read_text())
    assert config["model_type"] == "mamba"
    assert config["vocab_size"] == 320
    assert config["bos_token_id"] == config["eos_token_id"] == 0
    assert config["pad_token_id"] is None
    assert json.loads((run_dir / "run.json").read_text())["documents_kept_apart"] is False
    assert "this model lets packed documents see one another" in capsys.readouterr().out
    losses = [line["loss"] for line in read_metrics(run_dir / "metrics.jsonl") if "loss" in line]
    assert losses[3] < losses[0] - 0.1
    weights = safetensors.torch.load_file(run_dir / "final" / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(run_dir / "final").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())


def test_models_that_look_ahead_are_refused(recipe, tmp_path):
    bert = "auto: bert, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 32"
    with pytest.raises(InputError, match="bert looks at later tokens"):
        loop.train(configured(recipe, tmp_path / "encoder", f"model={{{bert}}}"))
    loop.train(
        configured(
            recipe, tmp_path / "decoder", f"model={{{bert}, is_decoder: true}}", "train.steps=2"
        )
    )


def test_which_model_auto_means(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def config(model: str):
        return build_model_config(configured(recipe, tmp_path / "run", f"model={model}"))

    llama = config("{auto: llama, hidden_size: 64, num_attention_heads: 2}")
    assert (llama.model_type, llama.hidden_size, llama.max_position_embeddings) == ("llama", 64, 32)
    assert (
        config("{auto: gpt2, n_embd: 64, hidden_size: 64}").n_positions == 32
    )  # under either of its names
    assert config("{auto: nalanda, num_heads: 2, mixer: deltanet}").mixer == "deltanet"
    MambaConfig(hidden_size=96, model_type="mamba").save_pretrained(tmp_path / "llama")
    assert config("{auto: llama}").hidden_size == 96  # a path that exists is meant


def test_model_types_of_flash_linear_attention(recipe, tmp_path, monkeypatch):
    """A stand-in: importing it registers its types, and its configs take any key."""
    import importlib.util

    import transformers
    from transformers.models.auto import configuration_auto, modeling_auto

    class LaterConfig(transformers.PreTrainedConfig):
        model_type = "later"

        def __init__(self, hidden_size: int = 8, vocab_size: int = 16, **kwargs):
            super().__init__(**kwargs)
            self.hidden_size, self.vocab_size = hidden_size, vocab_size

    class Later(transformers.LlamaForCausalLM):
        config_class = LaterConfig

    load = importlib.import_module

    def register(name: str, *package: str):
        if name != "fla":  # transformers loads its own models so, on demand
            return load(name, *package)
        transformers.AutoConfig.register("later", LaterConfig)
        AutoModelForCausalLM.register(LaterConfig, Later)
        return None

    for mapping in (configuration_auto.CONFIG_MAPPING, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING):
        monkeypatch.setattr(mapping, "_extra_content", dict(mapping._extra_content))
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: name == "fla" or find(name, *rest)
    )
    monkeypatch.setattr(importlib, "import_module", register)

    def config(model: str):
        return build_model_config(configured(recipe, tmp_path / "run", f"model={model}"))

    assert config("{auto: mamba}").model_type == "mamba"  # what transformers has, it has
    assert "later" not in configuration_auto.CONFIG_MAPPING
    assert config("{auto: later, hidden_size: 24}").hidden_size == 24
    with pytest.raises(
        InputError, match=r"^model\.hiden_size: later has no such key; did you mean hidden_size"
    ):
        config("{auto: later, hiden_size: 24}")

    def broken(name: str, *package: str):
        if name != "fla":
            return load(name, *package)
        raise AttributeError("module 'transformers' has no attribute 'x'")

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(
        InputError, match=r"rwkv9: flash-linear-attention fails: .*no attribute 'x'"
    ):
        config("{auto: rwkv9}")


def test_init_from_takes_weights_and_nothing_else(recipe, tmp_path, whole):
    tokenizer = AutoTokenizer.from_pretrained(whole / "tokenizer")
    with pytest.raises(InputError, match="take its own: tokenizer="):
        configured(recipe, tmp_path / "run", f"model.init_from={whole / 'final'}")
    theirs = f"tokenizer={whole / 'tokenizer'}"
    expected = safetensors.torch.load_file(whole / "final" / "model.safetensors")
    for source in (whole / "final", whole / "checkpoints" / "step-24"):
        for keys in (f"model.init_from={source}", f"model={{init_from: {source}}}"):
            model = build_model(configured(recipe, tmp_path / "run", theirs, keys), tokenizer)
            for name, tensor in model.state_dict().items():
                assert torch.equal(tensor, expected[name]), name
    for change in ("model.hidden_size=64", "model.num_hidden_layers=2", "model.use_gate=false"):
        config = configured(
            recipe, tmp_path / "run", theirs, f"model.init_from={whole / 'final'}", change
        )
        with pytest.raises(InputError, match="another shape"):
            build_model(config, tokenizer)
    with pytest.raises(InputError, match=r"model\.init_from"):
        build_model(
            configured(recipe, tmp_path, theirs, f"model.init_from={tmp_path / 'none'}"), tokenizer
        )


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("vocab_size: 64", "vocab_size"),
        ("auto: {path}/none", "model: "),
        ("auto: {path}, hiden_size: 3", "model.hiden_size"),
        (
            "auto: mamba, hiden_size: 3",
            "model.hiden_size: mamba has no such key; did you mean hidden_size?",
        ),
        ("auto: mamba, num_heads: 4", "model.num_heads: mamba has no such key"),
        ("auto: mamba, vocab_size: 64", "the model's vocab_size is 64"),
        ("auto: llama, hidden_size: 65", "hidden size (65) is not a multiple"),
        ("auto: llama, hidden_size: wide", "expected int, got str"),
        ("auto: vit", "model.auto: vit is not a causal language model"),
        (
            "auto: {path}, max_position_embeddings: 16",
            "data.seq_len: 32 is more than the model's 16",
        ),
    ],
)
def test_models_that_cannot_be_built(recipe, tmp_path, whole, model, words):
    LlamaConfig(vocab_size=320, hidden_size=32, num_attention_heads=2).save_pretrained(tmp_path)
    keys = "{" + model.format(path=tmp_path) + "}"
    config = configured(recipe, tmp_path / "run", f"model={keys}")
    with pytest.raises(InputError) as error:
        build_model(config, AutoTokenizer.from_pretrained(whole / "tokenizer"))
    assert words in str(error.value)
    assert "\n" not in str(error.value)
