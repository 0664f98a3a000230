"""A model's call takes what transformers gives, refuses what does not fit, returns hidden states, and hooks see it."""

import collections
import contextlib

import pytest
import torch
import torch.nn.functional as F
from covering import slow_but_for
from tiny_models import VOCAB, build, close, ids, logits
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
)
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM

from nalanda import NalandaCache
from nalanda.model import MIXERS
from nalanda.model.comba import Correction
from nalanda.model.delta import Decay
from nalanda.model.feature_maps import FeatureMap
from nalanda.model.layers import PreviousToken, ShortConv
from nalanda.model.mamba3 import HeadNumbers
from nalanda.model.rwkv7 import Rates, TokenShift
from nalanda.model.transnormer import LRPE


def test_two_ways_to_say_the_same_are_refused(small):
    mask, restarting = torch.tensor([[1, 1, 1, 1, 0, 0]]), torch.tensor([[0, 1, 0, 1, 0, 1]])
    with pytest.raises(ValueError, match="restart"):
        small(ids(1, 6), attention_mask=mask, position_ids=restarting)
    with pytest.raises(ValueError, match="not both"):
        small(ids(1, 6), attention_mask=mask, cu_seqlens=torch.tensor([0, 2, 6]))
    positions = (mask.cumsum(1) - 1).clamp_min(0)  # as generate makes them
    close(
        small(ids(1, 6), attention_mask=mask, position_ids=positions).logits,
        small(ids(1, 6), attention_mask=mask).logits,
    )


@pytest.mark.sampled
@pytest.mark.parametrize("mixer", MIXERS)
def test_calls_without_rows_or_without_tokens(mixer):
    model, past = build(mixer=mixer), NalandaCache(2)
    loss = model.train()(none := torch.zeros(0, 5, dtype=torch.long), labels=none).loss
    loss.backward()
    assert loss == 0
    model.eval()
    assert model(none).logits.shape == (0, 5, VOCAB)
    expected = logits(model, ids(2, 9))[:, -1]
    logits(model, ids(2, 9)[:, :8], past_key_values=past)
    assert logits(model, ids(2, 0), past_key_values=past).shape == (2, 0, VOCAB)
    close(logits(model, ids(2, 9)[:, 8:], past_key_values=past)[:, -1], expected)


def test_misspelt_arguments_are_refused(small):
    for called in (small, small.model):
        with pytest.raises(TypeError, match="lables"):
            called(ids(1, 4), lables=ids(1, 4))
    assert isinstance(small(ids(1, 4), return_dict=False), tuple)


@pytest.mark.parametrize(
    "options",
    [
        {"return_flash_attn_kwargs": True},
        {"return_flash_attn_kwargs": True, "return_position_ids": False},
        {"return_seq_idx": True},
        {"return_seq_idx": True, "return_position_ids": False},
    ],
    ids=str,
)
def test_packed_batches_of_transformers(small, options):
    """Whatever of it says where documents begin; none sees another."""
    texts = [ids(5, seed=1), ids(9, seed=2), ids(3, seed=3)]
    batch = DataCollatorWithFlattening(**options)([{"input_ids": text.tolist()} for text in texts])
    packed, alone = small(**batch), [small(text[None], labels=text[None]) for text in texts]
    close(packed.logits, torch.cat([out.logits for out in alone], 1), 1e-5)
    close(
        packed.loss,
        sum(out.loss * (len(text) - 1) for out, text in zip(alone, texts, strict=True)) / 14,
        1e-5,
    )
    hidden = torch.cat([small.model(text[None]).last_hidden_state for text in texts], 1)
    del batch["labels"]
    close(small.model(**batch).last_hidden_state, hidden, 1e-5)


def test_keywords_of_other_models_change_nothing_or_are_refused(small):
    tokens = ids(2, 6)
    empty = {
        "token_type_ids": torch.zeros_like(tokens),
        "cache_position": torch.arange(6),
        "head_mask": None,
    }
    assert torch.equal(small(tokens, **empty).logits, small(tokens).logits)
    types = empty["token_type_ids"]
    assert torch.equal(
        small.generate(tokens, token_type_ids=types, max_new_tokens=4, do_sample=False),
        small.generate(tokens, max_new_tokens=4, do_sample=False),
    )
    for call in (small, small.model, small.generate):
        with pytest.raises(ValueError, match=r"token_type_ids: .*give zeros"):
            call(tokens, token_type_ids=types + 1)
    with pytest.raises(ValueError, match="head_mask"):
        small(tokens, head_mask=torch.ones(2, 2))
    # Bounds may be given twice; another library's name for them alone says as much.
    bounds, other = torch.tensor([0, 4, 6, 12]), torch.tensor([0, 6, 12])
    packed = small(tokens, cu_seqlens=bounds).logits
    for described in (
        {"cu_seq_lens_k": bounds.int()},
        {"cu_seqlens": bounds, "cu_seq_lens_q": bounds},
        {"seq_idx": torch.tensor([[0, 0, 0, 0, 1, 1], [0] * 6]), "cu_seq_lens_q": bounds},
    ):
        assert torch.equal(small(tokens, **described).logits, packed)
    for described in (
        {"cu_seqlens": bounds, "cu_seq_lens_q": other},
        {"cu_seq_lens_q": bounds, "cu_seq_lens_k": other},
        {"seq_idx": torch.tensor([[0, 0, 1, 1, 1, 1], [0] * 6]), "cu_seqlens": bounds},
    ):
        with pytest.raises(ValueError, match="name different documents"):
            small(tokens, **described)
    # One document a row says nothing new, beside padding too.
    mask = F.pad(torch.ones(2, 4), (2, 0))
    described = {"attention_mask": mask, "seq_idx": torch.zeros_like(tokens)}
    assert torch.equal(small(tokens, **described).logits, small(tokens, attention_mask=mask).logits)
    for wrong in (torch.zeros(6), [[0] * 6] * 2):
        with pytest.raises(ValueError, match="seq_idx: give each token's document"):
            small(tokens, seq_idx=wrong)


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({"input_ids": ids(6)}, r"input_ids must be integers \[batch, length\], got int64 \[6\]"),
        ({"input_ids": ids(2, 6).float()}, r"input_ids must be integers .*, got float32 \[2, 6\]"),
        ({"labels": [[1] * 6] * 2}, "labels must be a tensor, got list"),
        ({"input_ids": [[1] * 6]}, "input_ids must be a tensor, got list"),
        ({"inputs_embeds": [[[0.0] * 24]]}, "inputs_embeds must be a tensor, got list"),
        ({"attention_mask": [[1] * 6] * 2}, "attention_mask must be a tensor, got list"),
        ({"position_ids": [[*range(6)]] * 2}, "position_ids must be a tensor, got list"),
        ({"logits_to_keep": -1}, "logits_to_keep=-1: give 0 for all, or the last n"),
        (
            {"inputs_embeds": torch.ones(6, 24)},
            r"inputs_embeds must be \[batch, length, 24\], got \[6, 24\]",
        ),
        ({"inputs_embeds": torch.ones(2, 6, 23)}, r"inputs_embeds must be .* got \[2, 6, 23\]"),
        ({"labels": ids(2, 5)}, r"labels must be integers .*\[2, 6\], got torch.int64 \[2, 5\]"),
        ({"labels": ids(6)}, r"labels must be .* got torch.int64 \[6\]"),
        ({"labels": torch.ones(2, 6)}, r"labels must be integers .* got torch.float32"),
        (
            {"labels": torch.full((2, 6), VOCAB)},
            f"label {VOCAB}: give token ids from 0 to {VOCAB - 1}, or -100",
        ),
        ({"labels": torch.full((2, 6), -1)}, "label -1: give token ids"),
        ({"shift_labels": ids(2, 5)}, "labels must be integers"),
        ({"cu_seqlens": [0, 12]}, "cu_seqlens must be an int32 or int64 tensor"),
        ({"cu_seqlens": torch.tensor([], dtype=torch.int64)}, "cu_seqlens must be"),
        ({"cu_seqlens": torch.tensor([0.0, 12.0])}, "cu_seqlens must be"),
        *(
            ({"position_ids": places}, r"position_ids must be \[batch, length\] or \[1, length\]")
            for places in (
                torch.tensor([0, 1, 2, 0, 1, 2]),
                torch.arange(6),
                torch.arange(5)[None],
                torch.tensor([[0, 1, 0, 1, 2]]),
                torch.arange(6).expand(3, 6),
                torch.arange(6).expand(3, 2, 6),
            )
        ),
    ],
    ids=str,
)
def test_inputs_of_a_wrong_shape_or_kind_are_refused(small, inputs, says):
    tokens = {} if "inputs_embeds" in inputs else {"input_ids": ids(2, 6)}
    with pytest.raises(ValueError, match=says) as error:
        small(**tokens | inputs)
    assert "\n" not in str(error.value)


def test_continuous_batching_is_refused(small):
    """`transformers serve` asks for the attribute, and then serves requests in turn."""
    assert not hasattr(small, "init_continuous_batching")
    for call in (
        lambda: small.generate_batch([[1, 2, 3]]),
        lambda: small.init_continuous_batching(),
        lambda: small.continuous_batching_context_manager().__enter__(),
    ):
        with pytest.raises(AttributeError, match="call generate with a padded batch, or serve"):
            call()


@pytest.mark.parametrize("bad", [[0, 3], [1, 4], [0, 5], [0, 3, 2, 4]])
def test_bad_packing_is_refused(small, bad):
    with pytest.raises(ValueError, match="cu_seqlens"):
        small(ids(1, 4), cu_seqlens=torch.tensor(bad))


def test_hidden_states(small):
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    out = small(ids(2, 9), attention_mask=mask, output_hidden_states=True)
    assert [tuple(h.shape) for h in out.hidden_states] == [(2, 9, 24)] * 3
    close(small.lm_head(out.hidden_states[-1]), out.logits, 1e-6)


@pytest.mark.parametrize("mask", [None, [1, 1, 1, 1, 0, 0]])
def test_hidden_states_have_gradients(small, mask):
    mask = None if mask is None else torch.tensor([mask, [1] * 6])
    out = small(ids(2, 6), attention_mask=mask, output_hidden_states=True)
    for hidden in out.hidden_states:
        hidden.retain_grad()
    out.logits[0, 3].square().sum().backward()
    for hidden in out.hidden_states:
        assert bool((hidden.grad[0, 3] != 0).all())
        assert bool((hidden.grad[0, 4:] == 0).all())  # nothing before sees them


# On the left, on the right and within.
PADDED = torch.tensor([[0] * 3 + [1] * 6, [1, 1, 0] + [1] * 4 + [0] * 2, [1] * 9])


def first(x):
    """The tensor among what a module takes or returns."""
    return x[0] if isinstance(x, tuple) else x


@contextlib.contextmanager
def watched(modules, backward=True):
    """Hooks of every kind on modules by name; yields the shapes that they see, by name and kind."""
    shapes = collections.defaultdict(list)

    def pre_hook(name):
        def see(module, args, kwargs):
            shapes[name, "input"].append(tuple((*args, *kwargs.values())[0].shape))

        return see

    def hook(name, kind):
        def see(module, args, result):
            shapes[name, kind].append(tuple(first(result).shape))

        return see

    with contextlib.ExitStack() as handles:
        for name, module in modules.items():
            handles.enter_context(
                module.register_forward_pre_hook(pre_hook(name), with_kwargs=True)
            )
            handles.enter_context(module.register_forward_hook(hook(name, "output")))
            if backward:
                handles.enter_context(module.register_full_backward_hook(hook(name, "gradient")))
        yield shapes


def trained(model, **inputs):
    """A loss, logits, and the gradients of all weights."""
    model.zero_grad()
    out = model(labels=inputs["input_ids"], **inputs)
    out.loss.backward()
    # In evaluation mode a call returns logits too.
    return [out.loss.detach(), out.logits.detach(), *(p.grad for p in model.parameters())]


def between_tokens(module):
    """Whether a module of a mixer works on the tokens themselves, behind the projections."""
    kinds = (ShortConv, FeatureMap, Correction, Decay, LRPE, PreviousToken, Rates, TokenShift)
    return isinstance(module, (*kinds, HeadNumbers))


@pytest.mark.parametrize(
    "mixer", slow_but_for(["gated_deltanet", "gla", "mamba2", "pola", "softmax"], MIXERS)
)
def test_hooks_see_the_rows_of_a_padded_batch(mixer):
    """On any layer; and they change no value."""
    model = build(mixer, mixer_options={"qk_norm": True} if mixer == "softmax" else None)
    batch = {"input_ids": ids(3, 9), "attention_mask": PADDED}
    expected = trained(model, **batch)
    modules = {name: x for name, x in model.model.layers.named_modules() if not between_tokens(x)}
    modules |= {"norm": model.model.norm, "lm_head": model.lm_head}
    with watched(modules) as shapes:
        for mine, right in zip(trained(model, **batch), expected, strict=True):
            close(mine, right)
    seen = {name for name, _ in shapes}
    assert seen >= {"0", "1.mixer", "1.mixer.q_proj", "0.mixer.o_proj", "0.mlp.down_proj", "norm"}
    assert {(name, kind) for name in seen for kind in ("input", "output", "gradient")} == {*shapes}
    assert {shape[:2] for each in shapes.values() for shape in each} == {(3, 9)}
    # Nothing stays behind.
    for mine, right in zip(trained(model, **batch), expected, strict=True):
        assert torch.equal(mine, right)


def twins():
    """Softmax attention, and transformers' Llama of the same sizes; and the names of modules in both."""
    model = build("softmax", dtype=torch.float32, mixer_options={"num_kv_heads": 1})
    sizes = {"hidden_size": 24, "intermediate_size": model.config.intermediate_size}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": model.config.head_dim}
    config = LlamaConfig(vocab_size=VOCAB, num_hidden_layers=2, **sizes, **heads)
    config.bos_token_id = config.eos_token_id = None
    renamed = {"mixer": "self_attn", "mixer_norm": "input_layernorm"}
    renamed |= {"mlp_norm": "post_attention_layernorm"}
    names = {"model": "model", "model.norm": "model.norm", "lm_head": "lm_head"}
    for name, _ in model.model.layers.named_modules():
        if name and "dropout" not in name:
            path = ".".join(["model.layers", *(renamed.get(x, x) for x in name.split("."))])
            names[f"model.layers.{name}"] = path
    del names["model"]
    return model, LlamaForCausalLM(config).eval(), names


@pytest.mark.parametrize("mask", [None, [[0, 0, 1, 1, 1, 1], [1] * 6]], ids=["whole", "padded"])
def test_hooks_see_what_they_see_in_llama(mask):
    model, llama, names = twins()
    batch = {"input_ids": ids(2, 6)}
    batch |= {} if mask is None else {"attention_mask": torch.tensor(mask)}
    seen = []
    for each, of_twin in ((model, names.keys()), (llama, names.values())):
        modules = {name: each.get_submodule(x) for name, x in zip(names, of_twin, strict=True)}
        for training in (True, False):
            with watched(modules) as shapes:
                each.train(training)(labels=batch["input_ids"], **batch).loss.backward()
            seen.append(dict(shapes))
        with watched(modules, backward=False) as shapes:
            each.generate(**batch, max_new_tokens=3, do_sample=False, pad_token_id=0)
        seen.append(dict(shapes))
    for mine, right in zip(seen[:3], seen[3:], strict=True):
        assert mine.keys() == right.keys()
        for key, shapes in right.items():
            assert mine[key] == shapes, key


def test_hooks_that_return_something_act_on_padded_rows():
    """A steering vector at each row's last token acts as on that row alone."""
    model, batch = build("gated_deltanet"), PADDED[[0, 2]]
    vector = torch.linspace(-2, 2, 24, dtype=torch.float64)

    def steer(module, args, result):
        x = result[0].clone()
        x[:, -1] += vector
        return x, *result[1:]

    def double(module, args):
        return (2 * args[0],)

    plain = logits(model, ids(2, 9), attention_mask=batch)
    layer = model.model.layers[0]
    with layer.register_forward_hook(steer), layer.mlp.up_proj.register_forward_pre_hook(double):
        steered = logits(model, ids(2, 9), attention_mask=batch)
        alone = [logits(model, ids(2, 9)[i : i + 1, 9 - n :]) for i, n in enumerate((6, 9))]
    assert not torch.allclose(steered[:, -1], plain[:, -1])
    close(steered[0, 3:], alone[0][0])
    close(steered[1], alone[1][0])


def test_hooks_see_rows_of_packed_documents():
    model = build(["gated_deltanet", "softmax"], mixer_options={"softmax": {"window": 4}})
    bounds = torch.tensor([0, 4, 9, 18, 20, 27])
    continuing = {"cu_seqlens": torch.tensor([0, 9, 18, 27])}
    restarting = torch.arange(9).repeat(3, 1)
    restarting[1, 5:] -= 5

    def calls():
        out = model(ids(3, 9), cu_seqlens=bounds, return_carried_cache=True)
        carried = {"carried_cache": out.carried_cache, "carried": torch.tensor([True, False, True])}
        results = [out.logits, logits(model, ids(3, 9), **continuing, **carried)]
        return [*results, logits(model, ids(3, 9), position_ids=restarting)]

    expected = calls()
    with watched({"mixer": model.model.layers[1].mixer, "layer": model.model.layers[0]}) as shapes:
        for mine, right in zip(calls(), expected, strict=True):
            close(mine, right)
    assert {shape for each in shapes.values() for shape in each} == {(3, 9, 24)}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
def test_hooks_on_checkpointed_layers(reentrant):
    model = build("gated_deltanet").train()
    batch = {"input_ids": ids(3, 9), "attention_mask": PADDED}

    def gradients():
        model.zero_grad()
        model(labels=ids(3, 9), **batch).loss.backward()
        return [p.grad for p in model.parameters()]

    expected = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    modules = {"layer": model.model.layers[0], "mixer": model.model.layers[0].mixer}
    with watched(modules, backward=not reentrant) as shapes:
        for mine, right in zip(gradients(), expected, strict=True):
            close(mine, right)
    assert shapes["layer", "output"] == [(3, 9, 24)]
    assert shapes["mixer", "output"] == [(3, 9, 24)] * 2  # once more for the backward


@pytest.mark.slow
def test_hooks_in_a_compiled_graph():
    model = build(["gated_deltanet", "softmax"])
    batch = {"input_ids": ids(3, 9), "attention_mask": PADDED, "use_cache": False}
    expected = trained(model, **batch)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with watched({"layer": model.model.layers[1]}, backward=False) as shapes:
        for mine, right in zip(trained(compiled, **batch), expected, strict=True):
            close(mine, right)
    assert shapes["layer", "output"] == [(3, 9, 24)]
    torch._dynamo.reset()


def test_hooks_of_sharding_leave_batches_packed():
    """They move weights, and look at no row: packed tokens cost less."""
    model, shapes = build("gla", dtype=torch.float32), []

    def gather(module, args):
        shapes.append(tuple(args[0].shape))

    gather.__module__ = "torch.distributed.fsdp._fully_shard._fsdp_state"
    with model.model.layers[0].register_forward_pre_hook(gather):
        model(ids(3, 9), attention_mask=PADDED)
    assert shapes == [(1, int(PADDED.sum()), 24)]


@pytest.mark.filterwarnings("ignore:For backward hooks", "ignore:Full backward hook")
@pytest.mark.parametrize("mixer", ["gated_deltanet", "nala", "softmax"])
@pytest.mark.parametrize("mask", [None, [[0, 0, 1, 1, 1, 1], [1] * 6]], ids=["whole", "padded"])
def test_hooks_of_the_process_see_every_layer(mixer, mask):
    """In every call of training and generation, as in models without kernels of their own."""
    model = build(mixer, dtype=torch.float32)
    prompt = {"attention_mask": None if mask is None else torch.tensor(mask)}
    greedy = {"max_new_tokens": 4, "do_sample": False}
    expected = model.generate(ids(2, 6), **prompt, **greedy)
    calls, shapes = collections.Counter(), set()

    def see(module, args, result):
        calls[module] += 1
        if isinstance(module, nn.Linear):
            shapes.add(tuple(first(result).shape[:2]))

    def see_gradients(module, inputs, outputs):
        calls[module, "backward"] += 1

    handles = [
        register_module_forward_hook(see),
        register_module_forward_pre_hook(lambda module, args: None),
        register_module_full_backward_hook(see_gradients),
    ]
    linears = [x for x in model.modules() if isinstance(x, nn.Linear)]
    layers = [*model.model.layers, *(x.mixer for x in model.model.layers), model.model.norm]
    try:
        assert torch.equal(model.generate(ids(2, 6), **prompt, **greedy), expected)
        assert {calls[module] for module in [*linears, *layers]} == {4}
        assert shapes == {(2, 6), (2, 1)}
        calls.clear()
        model.train()(ids(2, 6), labels=ids(2, 6), **prompt).loss.backward()
        assert {calls[module] for module in linears} == {1}
        assert {calls[module, "backward"] for module in [*linears, *model.model.layers]} == {1}
    finally:
        for handle in handles:
            handle.remove()


def test_hooks_of_the_process_that_come_in_mid_generation(small):
    """C++ and graphs stand back from the next token on."""
    calls, handles = collections.Counter(), []

    def begin(tokens, scores):
        if tokens.shape[1] == 8 and not handles:
            see = lambda module, args, result: calls.update([module])  # noqa: E731
            handles.append(register_module_forward_hook(see))
        return scores

    greedy = {"max_new_tokens": 5, "do_sample": False}
    expected = small.generate(ids(2, 6), **greedy)
    try:
        found = small.generate(ids(2, 6), logits_processor=[begin], **greedy)
    finally:
        for handle in handles:
            handle.remove()
    assert torch.equal(found, expected)
    assert calls[small.model.layers[1].mlp.up_proj] == 2
