"""Checks of decoding with states in place, by CUDA graphs or C++. `eager` is `generate` without either."""

import copy
from concurrent.futures import ThreadPoolExecutor

import torch
from tiny_models import ids, logits

from nalanda import NalandaCache, State
from nalanda.model import decoding


@torch.no_grad()
def check_forks(model, tokens: int) -> None:
    """Forks and copies in the middle of a text are tensors of their own."""
    with decoding.choose_decoder(model):
        cache = NalandaCache(2)
        said = [logits(model, ids(1, 5), past_key_values=cache)[:, -1:].argmax(-1)]
        forks, found = [], []
        for i in range(tokens):
            if i % 3 == 0:
                forks.append((i, copy.deepcopy(cache), cache.fork()))
            found.append(model(said[-1], past_key_values=cache).logits)
            said.append(found[-1].argmax(-1))

    text = torch.cat(said, 1)
    # Later tokens do not overwrite logits.
    assert torch.equal(text[:, 1:], torch.cat(found, 1).argmax(-1))
    for i, *both in forks:
        for fork in both:
            assert fork.get_seq_length() == 5 + i
            again = [
                logits(model, x, past_key_values=fork).argmax(-1) for x in text[:, i:-1].split(1, 1)
            ]
            assert torch.equal(torch.cat(again, 1), text[:, i + 1 :])


def check_threads(model, eager, **options) -> None:
    """Twelve texts from one state, by two threads."""
    out = model.generate(ids(1, 5), return_dict_in_generate=True, **options)
    state = State(model, out.past_key_values, out.sequences[:, -1:])
    prompts = [ids(1, 3, seed=i) for i in range(4)]
    expected = [eager(model, x, state=state, **options) for x in prompts]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda x: model.generate(x, state=state, **options), prompts * 3))
    assert all(torch.equal(a, b) for a, b in zip(found, expected * 3, strict=True))


def check_beams(model, eager, **options) -> None:
    """The text of beams, or of several samples of a prompt."""
    tokens = ids(2, 5)
    torch.manual_seed(0)
    expected = eager(model, tokens, **options)
    torch.manual_seed(0)
    assert torch.equal(model.generate(tokens, **options), expected)
