"""Generation from a cache is generation without one: beams, padding, embeddings, states that do not grow."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from tiny_models import build, close, ids, logits
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import TextIteratorStreamer

from nalanda import NalandaCache
from nalanda.model import MIXERS
from nalanda.model.cache import cache_of


def test_generate_cached_equals_uncached(small):
    kwargs = {
        "max_new_tokens": 8,
        "attention_mask": torch.ones(2, 9, dtype=torch.long),
        "pad_token_id": 0,
    }
    for strategy in (
        {"do_sample": False},
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2},
    ):
        a = small.generate(ids(2, 9), **kwargs, **strategy)
        assert torch.equal(a, small.generate(ids(2, 9), use_cache=False, **kwargs, **strategy))
        assert torch.equal(a, small.generate(ids(2, 9), prefill_chunk_size=4, **kwargs, **strategy))
    torch.manual_seed(3)
    a = small.generate(ids(2, 9), do_sample=True, **kwargs)
    torch.manual_seed(3)
    assert torch.equal(a, small.generate(ids(2, 9), do_sample=True, use_cache=False, **kwargs))


def test_generate_continues_embeddings(small):
    embeddings = small.get_input_embeddings()(ids(1, 9))
    kwargs = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    for strategy in ({}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}):
        expected = small.generate(ids(1, 9), **kwargs, **strategy)[:, 9:]
        assert torch.equal(small.generate(inputs_embeds=embeddings, **kwargs, **strategy), expected)
    with pytest.raises(ValueError, match="input_ids, not inputs_embeds"):
        small.generate(inputs_embeds=embeddings, state=small.read(ids(1, 5)), **kwargs)


def test_generate_left_padded_rows_as_alone(small):
    prompts = [ids(1, n, seed=n) for n in (2, 5, 9)]
    kwargs = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    tokens = torch.cat([F.pad(p, (9 - p.shape[1], 0)) for p in prompts])
    mask = torch.cat([F.pad(torch.ones_like(p), (9 - p.shape[1], 0)) for p in prompts])
    together = small.generate(tokens, attention_mask=mask, **kwargs)
    for row, prompt in zip(together, prompts, strict=True):
        assert torch.equal(row[9:], small.generate(prompt, **kwargs)[0, prompt.shape[1] :])


def test_padding_that_is_read_token_by_token(small):
    prompts = [ids(1, n, seed=n) for n in (2, 5)]
    tokens = torch.cat([F.pad(p, (5 - p.shape[1], 0)) for p in prompts])
    mask = torch.cat([F.pad(torch.ones_like(p), (5 - p.shape[1], 0)) for p in prompts])
    kwargs = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    whole = small.generate(tokens, **kwargs)
    for size in (1, 2, 3):
        assert torch.equal(small.generate(tokens, prefill_chunk_size=size, **kwargs), whole)
    # A single column that is padding, after the text has begun.
    gap = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 1]])
    whole = logits(small, ids(2, 6), attention_mask=gap)[:, -1]
    for sizes in ([3, 3], [3, 2, 1], [3, 1, 1, 1]):
        cache, end = NalandaCache(2), 0
        for size in sizes:
            start, end = end, end + size
            options = {"attention_mask": gap[:, :end], "past_key_values": cache}
            last = logits(small, ids(2, 6)[:, start:end], **options)[:, -1]
        close(last, whole, 1e-4)
        assert cache.lengths.tolist() == [6, 4]


def test_decoding_does_not_look_at_the_mask(small):
    """On a device a look would wait for it, every token."""
    cache = NalandaCache(2)
    logits(small, ids(1, 5), past_key_values=cache)
    not_looked_at = torch.ones(1, 6, device="meta")
    assert (
        logits(small, ids(1, 1), attention_mask=not_looked_at, past_key_values=cache)
        .isfinite()
        .all()
    )


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_generate_goes_on_from_a_cache_by_either_name(small, name):
    kwargs = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    whole = small.generate(ids(1, 9), max_new_tokens=8, **kwargs)
    half = small.generate(ids(1, 9), max_new_tokens=4, return_dict_in_generate=True, **kwargs)
    rest = small.generate(
        half.sequences, max_new_tokens=4, **kwargs, **{name: cache_of(half).fork()}
    )
    assert torch.equal(rest, whole)

    last = half.sequences[:, -1:]
    expected = small(half.sequences, use_cache=False).logits[:, -1:]
    close(small(last, **{name: cache_of(half).fork()}).logits, expected, 1e-4)
    both = {"cache": cache_of(half), "past_key_values": cache_of(half)}
    for call in (small, small.model, partial(small.generate, max_new_tokens=1)):
        with pytest.raises(ValueError, match="give one of them"):
            call(last, **both)


@pytest.mark.parametrize("mixer", ["softmax", "mala"])
def test_reordered_rows_keep_their_length(mixer):
    """Rows of different lengths, as beams over a padded batch have them."""
    model, rows = build(mixer), [ids(1, n, seed=n) for n in (3, 9)]
    tokens = torch.cat([F.pad(row, (9 - row.shape[1], 0)) for row in rows])
    mask = torch.cat([F.pad(torch.ones_like(row), (9 - row.shape[1], 0)) for row in rows])
    for rearrange, order in (
        (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [1, 0]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
    ):
        cache = NalandaCache(2)
        logits(model, tokens, attention_mask=mask, past_key_values=cache)
        rearrange(cache)
        after = logits(model, ids(1, 4).repeat(len(order), 1), past_key_values=cache)
        for i, row in zip(order, after, strict=True):
            close(row, logits(model, torch.cat([rows[i], ids(1, 4)], 1))[0, -4:])


def test_state_does_not_grow(small):
    sizes = set()
    cache = NalandaCache(2)
    for piece in ids(1, 200).split([64, *[1] * 136], 1):
        logits(small, piece, past_key_values=cache)
        sizes.add(cache.nbytes)
        for state in cache.states:  # a view would keep the text that it was cut from
            sizes.add(sum(t.untyped_storage().nbytes() for t in state.values()) * 2)
    assert sizes == {small.config.state_bytes(1, torch.float32)}


class Made(TorchDispatchMode):
    """Entries of all tensors that operators make."""

    def __init__(self):
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.entries += sum(x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor))
        return result


@pytest.mark.sampled
@pytest.mark.parametrize(
    "mixer", [name for name in MIXERS if name not in ("softmax", "forgetting")]
)
def test_a_decoding_step_makes_nothing_that_grows_with_the_text(mixer):
    options = {"diag_attention": {"block_size": 4}}.get(mixer, {})
    model, entries = build(mixer, mixer_options=options), []
    tokens, cache = ids(1, 24), NalandaCache(2)
    with torch.no_grad():
        model(tokens[:, :4], past_key_values=cache)
        for t in range(4, 24):
            with Made() as made:
                model(tokens[:, t : t + 1], past_key_values=cache)
            entries.append(made.entries)
    assert entries[0] > 0
    assert entries[:4] * 5 == entries  # a block's steps differ from one another, blocks do not


def test_streamer(small):
    class Words:
        def decode(self, tokens, **_):
            return "".join(f" {int(t)}" for t in tokens)

    streamer = TextIteratorStreamer(Words(), skip_prompt=True)
    out = small.generate(
        ids(1, 5), max_new_tokens=6, do_sample=False, streamer=streamer, eos_token_id=None
    )
    assert "".join(streamer).split() == [str(int(t)) for t in out[0, 5:]]
    state, options = (
        small.read(ids(1, 5)),
        {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None},
    )
    for more in (
        ids(1, 2),
        None,
    ):  # behind a state it gets what `generate` returns, not the state's last token
        streamer = TextIteratorStreamer(Words())
        out = small.generate(more, state=state, streamer=streamer, **options)
        assert "".join(streamer).split() == [str(int(t)) for t in out[0]]


def test_other_caches_are_refused(small):
    from transformers import DynamicCache

    says = r"NalandaCache, got DynamicCache: leave it out, or give NalandaCache\(2\)"
    with pytest.raises(ValueError, match=says):
        small(ids(1, 3), past_key_values=DynamicCache())
    cache = NalandaCache(2)
    small(ids(2, 3), past_key_values=cache)
    with pytest.raises(ValueError, match="2 sequences"):
        small(ids(3, 1), past_key_values=cache)
    with pytest.raises(ValueError, match="packed"):
        small(ids(1, 4), past_key_values=NalandaCache(2), cu_seqlens=torch.tensor([0, 2, 4]))
    for layers in (1, 3):
        with pytest.raises(ValueError, match=f"{layers} layers, the model 2"):
            small(ids(2, 1), past_key_values=NalandaCache(layers))
    with pytest.raises(ValueError, match=r"not fit: .*holds conv_q, .*recurrent, the model's k, v"):
        build("softmax", dtype=torch.float32)(ids(2, 1), past_key_values=cache)


@torch.no_grad()
def test_a_cache_of_a_call_that_failed_is_refused(small):
    cache = small(ids(1, 5), use_cache=True).past_key_values

    def fails(*_):
        raise torch.OutOfMemoryError

    hook = small.model.layers[1].register_forward_pre_hook(fails)
    with pytest.raises(torch.OutOfMemoryError):
        small(ids(1, 3), past_key_values=cache)
    hook.remove()
    for tokens in (1, 3):
        with pytest.raises(ValueError, match="failed between two layers: begin with a new cache"):
            small(ids(1, tokens), past_key_values=cache)
    cache.reset()
    small(ids(1, 3), past_key_values=cache)


@pytest.mark.parametrize("chunk_size", [0, -1, 2.5, True])
def test_reading_in_pieces_of_nothing_is_refused(small, chunk_size):
    with pytest.raises(ValueError, match=f"chunk_size={chunk_size} must be an integer from 1 on"):
        small.read(ids(1, 9), chunk_size=chunk_size)
