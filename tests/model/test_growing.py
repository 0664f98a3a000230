"""Keys and values grow in their own memory: a state that others continue keeps its values."""

import copy
import itertools

import pytest
import torch
from tiny_models import build, ids

from nalanda import NalandaCache
from nalanda.model.growing import Memory, grown


def rows(start: int, stop: int, batch: int = 2):
    return torch.arange(start, stop).float().view(1, -1, 1, 1).expand(batch, -1, 2, 3).contiguous()


@torch.no_grad()
def test_rows_are_appended_where_they_lie():
    state = grown(rows(0, 5), rows(5, 6))
    place = state.data_ptr()
    for end in range(6, 50):
        state = grown(state, rows(end, end + 1))
        assert torch.equal(state, rows(0, end + 1))
        assert state.data_ptr() == place


@torch.no_grad()
def test_rows_of_a_head_are_neighbours():
    """The C++ reads them head by head."""
    state = grown(rows(0, 5), rows(5, 6))
    assert state[0, :, 1].is_contiguous()


@torch.no_grad()
def test_a_full_memory_is_left_for_a_larger_one():
    state = rows(0, 5)
    for end in range(5, 300):
        state = grown(state, rows(end, end + 1))
    assert torch.equal(state, rows(0, 300))


@torch.no_grad()
@pytest.mark.parametrize("order", list(itertools.permutations("aab", 3)))
def test_two_continuations_of_one_state(order):
    """Each writes behind its own rows, whichever comes first, and the shared state stays as it was."""
    shared = grown(rows(0, 5), rows(5, 6))
    states = {"a": shared, "b": shared}
    for name in order:
        step = -rows(0, 1) - (1 if name == "a" else 2)
        states[name] = grown(states[name], step)
    assert torch.equal(shared, rows(0, 6))
    for name, value in (("a", -1), ("b", -2)):
        count = order.count(name)
        expected = torch.cat([rows(0, 6), torch.full((2, count, 2, 3), value).float()], 1)
        assert torch.equal(states[name], expected)


def test_only_one_of_two_claims_a_row():
    memory = Memory(rows(0, 5), 1)
    assert memory.claim(5, 6)
    assert not memory.claim(5, 6)
    assert not memory.claim(6, memory.rows.shape[1] + 1)


def test_a_state_of_inference_mode_is_continued_outside():
    with torch.inference_mode():
        state = grown(rows(0, 5), rows(5, 6))
    with torch.no_grad():
        assert torch.equal(grown(state, rows(6, 7)), rows(0, 7))


@torch.no_grad()
def test_a_copy_has_memory_of_its_own():
    state = grown(rows(0, 5), rows(5, 6))
    other = copy.deepcopy(state)
    assert torch.equal(grown(other, -rows(1, 2)), torch.cat([rows(0, 6), -rows(1, 2)], 1))
    assert torch.equal(grown(state, rows(6, 7)), rows(0, 7))


@torch.no_grad()
def test_forks_of_a_softmax_layer():
    """Two texts that share a beginning, token by token in turn, as each alone."""
    model = build(mixer="softmax").eval()
    texts = [torch.cat([ids(2, 7), ids(2, 9, seed=seed)], 1) for seed in (1, 2)]
    cache = NalandaCache(2)
    for t in range(7):
        model(texts[0][:, t : t + 1], past_key_values=cache)
    forks = [cache, cache.fork()]
    for t in range(7, 16):
        for text, fork in zip(texts, forks, strict=True):
            logits = model(text[:, t : t + 1], past_key_values=fork).logits[:, -1]
            whole = model(text[:, : t + 1]).logits[:, -1]
            assert torch.allclose(logits, whole, atol=1e-5)


@torch.no_grad()
def test_a_saved_state_holds_its_rows_alone(tmp_path):
    model, text = build(mixer="softmax").eval(), ids(1, 9)
    model.read(text).save(tmp_path / "whole")

    state = model.read(text[:, :5])
    for t in range(5, 9):
        state = model.read(text[:, t : t + 1], state=state)
    state.save(tmp_path / "grown")
    whole, grown = ((tmp_path / name).stat().st_size for name in ("whole", "grown"))
    assert whole == grown
