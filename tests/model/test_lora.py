"""Adapters of PEFT on our models: trained, saved, loaded, merged."""

import contextlib

import pytest
import torch
from covering import slow_but_for
from transformers import AutoModelForCausalLM

from nalanda import NalandaConfig
from nalanda.common.errors import InputError
from nalanda.config.model_folder import check_name
from nalanda.model import MIXERS

peft = pytest.importorskip("peft")

# Each layout of projections, and every kind of gate.
QUICK = (
    "gated_deltanet",
    "kda",
    "delta_product",
    "mamba2",
    "mala",
    "gla",
    "softmax",
    "diag_attention",
)
every_mixer = pytest.mark.parametrize("mixer", slow_but_for(QUICK, MIXERS))
IDS = torch.randint(40, (3, 24), generator=torch.Generator().manual_seed(0))


def build(mixer, **fields):
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 2}
    return AutoModelForCausalLM.from_config(
        NalandaConfig(**(sizes | {"intermediate_size": 24, "mixer": mixer} | fields))
    )


def adapted(model, **options):
    """The model with LoRA, whose second factor is not zero, so that every adapter changes the output."""
    chosen = {"r": 2, "lora_alpha": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(model, peft.LoraConfig(**(chosen | options)))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.2)
    return model


def train(model, steps=3):
    """Losses of SGD steps on one batch."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in trained)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=IDS).logits


@pytest.mark.sampled
@every_mixer
def test_adapters_train_save_load_and_merge(mixer, tmp_path):
    model = adapted(build(mixer))
    linears = {n for n, m in build(mixer).named_modules() if isinstance(m, torch.nn.Linear)}
    wrapped = {
        n.removeprefix("base_model.model.")
        for n, m in model.named_modules()
        if isinstance(m, peft.tuners.lora.Linear)
    }
    assert wrapped == linears - {"lm_head"}
    before = {n: p.clone() for n, p in model.named_parameters()}
    losses = train(model.train())
    assert losses[-1] < losses[0]
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) != ("lora_" in name), name
    expected = logits(model)
    model.save_pretrained(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    with pytest.raises(InputError, match="an adapter of PEFT; load it by AutoPeftModelForCausalLM"):
        check_name(str(tmp_path))
    again = peft.PeftModel.from_pretrained(build(mixer), tmp_path)
    assert torch.equal(logits(again), expected)
    with model.disable_adapter():  # layers with adapters are products of their own
        assert (logits(model) - logits(build(mixer))).abs().max() < 1e-6
    with torch.no_grad():  # one token: the decoding path must use the adapters too
        cache = model(input_ids=IDS[:, :-1], use_cache=True).past_key_values
        last = model(input_ids=IDS[:, -1:], past_key_values=cache).logits[:, 0]
    assert (last - expected[:, -1]).abs().max() < 1e-5
    tokens = model.generate(input_ids=IDS, max_new_tokens=6, do_sample=False)
    merged = model.merge_and_unload()
    assert type(merged) is type(build(mixer))
    assert (logits(merged) - expected).abs().max() < 1e-5
    assert torch.equal(merged.generate(IDS, max_new_tokens=6, do_sample=False), tokens)


def test_adapters_of_the_head_are_trained_too():
    """An adapter of the head: in training the loss reads its weight, and not all logits exist at once."""
    model = adapted(build("gla"), target_modules=["lm_head", "q_proj"])
    losses = train(model.train())
    assert losses[-1] < losses[0]
    with torch.no_grad():
        in_training = model.train()(input_ids=IDS, labels=IDS).loss
        assert (in_training - model.eval()(input_ids=IDS, labels=IDS).loss).abs() < 1e-6
        merged = model.merge_and_unload()
        assert (merged(input_ids=IDS, labels=IDS).loss - in_training).abs() < 1e-5


def test_the_loss_of_a_wrapped_head_has_the_same_gradients():
    def gradients(wrapped):
        model = build("gla").double().train()
        if wrapped:
            model.lm_head = torch.nn.Sequential(model.lm_head)
        loss = model(IDS, labels=IDS.masked_fill(IDS == 3, -100), z_loss=0.1).loss
        loss.backward()
        return [loss, *(p.grad for p in model.parameters())]

    for found, expected in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_the_head_as_a_whole_beside_adapters():
    model = adapted(build("gla"), target_modules=["q_proj"], modules_to_save=["lm_head"])
    base = model.base_model.model.lm_head.original_module.weight.clone()
    losses = train(model.train())
    assert losses[-1] < losses[0]
    assert torch.equal(model.base_model.model.lm_head.original_module.weight, base)
    expected = logits(model)
    assert (logits(model.merge_and_unload()) - expected).abs().max() < 1e-5


def test_checkpointing_changes_no_gradient():
    def gradients(checkpointing):
        model = adapted(build("gated_deltanet")).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        model(input_ids=IDS, labels=IDS).loss.backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    plain, again = gradients(False), gradients(True)
    assert plain.keys() == again.keys()
    assert all(
        "lora_" in name and torch.allclose(plain[name], again[name], atol=1e-7) for name in plain
    )


def test_half_precision_keeps_fp32_decays_and_adapters_apart():
    model = adapted(
        build("gated_deltanet").bfloat16(), target_modules=["q_proj", "v_proj", "a_proj"]
    )
    losses = train(model.train())
    assert losses[-1] < losses[0]
    assert {p.dtype for n, p in model.named_parameters() if ".decay." in n} == {torch.float32}
    assert logits(model.merge_and_unload()).dtype == torch.bfloat16


@pytest.mark.sampled
@every_mixer
def test_norms_are_tuned(mixer, tmp_path):
    """An adapter around a norm has neither its weight nor its epsilon."""
    model = build(mixer)
    norms = [n for n, m in model.named_modules() if type(m).__name__ in ("RMSNorm", "LayerNorm")]
    model = peft.get_peft_model(
        model, peft.LNTuningConfig(task_type="CAUSAL_LM", target_modules=norms)
    )
    losses = train(model.train())
    assert losses[-1] < losses[0]
    expected = logits(model)
    tokens = model.generate(input_ids=IDS, max_new_tokens=4, do_sample=False)
    merged = model.merge_and_unload()
    # A kernel forms the merged norms, torch those with an adapter.
    torch.testing.assert_close(logits(merged), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(merged.generate(IDS, max_new_tokens=4, do_sample=False), tokens)


def test_prefixes_of_keys_are_refused():
    options = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
    sizes = {"num_layers": 2, "token_dim": 16, "num_attention_heads": 2}
    model = peft.get_peft_model(build("gla"), peft.PrefixTuningConfig(**options, **sizes))
    with pytest.raises(ValueError, match="prefix tuning has no keys and values to train here"):
        model(input_ids=IDS, labels=IDS)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "targets", ["all-linear", ["q_proj", "o_proj", "up_proj", "down_proj", "lm_head"]], ids=str
)
@pytest.mark.parametrize("padding", [0, 5], ids=["whole", "padded"])
def test_rows_with_adapters_of_their_own(targets, padding):
    """`adapter_names`: each row of a batch as with its adapter alone, in calls and in generation."""
    model = adapted(build("gated_deltanet").double(), target_modules=targets)
    model.add_adapter("other", model.peft_config["default"])
    torch.manual_seed(1)
    for name, p in model.named_parameters():
        if "lora_B.other" in name:
            torch.nn.init.normal_(p, std=0.2)
    model.eval()
    mask = torch.ones_like(IDS)
    mask[0, :padding] = 0
    batch = {"input_ids": IDS, "attention_mask": mask}
    names, greedy = ["default", "other", "__base__"], {"max_new_tokens": 4, "do_sample": False}

    logits, tokens = [], []
    for i, name in enumerate(names):
        if name != "__base__":
            model.set_adapter(name)
        with model.disable_adapter() if name == "__base__" else contextlib.nullcontext():
            logits.append(model(**batch).logits[i])
            tokens.append(model.generate(**batch, **greedy)[i])
    out = model(**batch, labels=IDS, adapter_names=names)
    torch.testing.assert_close(out.logits, torch.stack(logits))
    assert torch.equal(model.generate(**batch, **greedy, adapter_names=names), torch.stack(tokens))
    out.loss.backward()
    trained = [p for n, p in model.named_parameters() if "lora_A" in n and p.grad is not None]
    assert all(p.grad.abs().sum() > 0 for p in trained)
    assert trained
