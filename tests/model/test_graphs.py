"""Decoding by CUDA graphs, with a recording of torch's operators in place of a graph."""

import gc
import threading
import warnings
import weakref

import pytest
import torch
from covering import covering, slow_but_for
from decoded import check_beams, check_forks, check_threads
from tiny_models import SAME_STATES, VARIANTS, build, ids, logits
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nalanda import NalandaCache
from nalanda.model import FEATURE_MAPS, MIXERS, decoding

ROWS = {name: {"mixer": name} for name in MIXERS} | VARIANTS
SERVED = [name for name in ROWS if name not in ("softmax", "forgetting")]  # their states grow
SOME = ["gated_deltanet", "nala", "hybrid"]
NEW = 7
GREEDY = {"do_sample": False, "max_new_tokens": NEW}
SAMPLED = GREEDY | {"do_sample": True}


class Tape(TorchDispatchMode):
    """In the place of a CUDA graph: repeats the recorded operators on the same tensors, and runs no Python.

    As a capture launches nothing, what the recorded operators wrote is lost.
    """

    replays = 0

    def __init__(self, device):
        super().__init__()
        self.calls = []

    @staticmethod
    def serves(device):
        return True

    @staticmethod
    def replayer(device):
        return (threading.get_ident(),)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        aliases = [r.alias_info for r in func._schema.returns if r.alias_info is not None]
        if not aliases or any(alias.is_write for alias in aliases):  # no view
            self.calls.append((func, args, kwargs or {}, out))
        return out

    def capture(self, function):
        with self:
            result = function()
        for func, args, _, out in self.calls:
            for x in tree_leaves((out, args[0] if func._schema.is_mutable else None)):
                if isinstance(x, Tensor):
                    x.fill_(float("nan") if x.is_floating_point() else 77)
        return result

    def replay(self):
        Tape.replays += 1
        for func, args, kwargs, out in self.calls:
            for x, y in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(x, Tensor) and x is not y:
                    x.copy_(y)


@pytest.fixture(autouse=True)
def _tape(monkeypatch):
    """Decodes by tapes from the fourth token on: the prompt gives one, two are eager."""
    monkeypatch.setattr(decoding, "Graph", Tape)
    monkeypatch.setattr(decoding, "EAGER_TOKENS", 2)
    monkeypatch.setattr(Tape, "replays", 0)


def tiny(name="gated_deltanet"):
    return build(**ROWS[name], eos_token_id=None)


def eager(model, *args, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(decoding.ENVIRONMENT, "0")
        return model.generate(*args, **options)


def replays(function):
    """Its result, and how many graphs it replayed."""
    Tape.replays = 0
    return function(), Tape.replays


@pytest.mark.sampled
@covering(strength=1, name=ROWS, sampled=(True, False))
def test_text_is_that_of_eager_decoding(name, sampled):
    batch, options = (1, SAMPLED) if sampled else (3, GREEDY)
    model, tokens = tiny(name), ids(batch, 5)
    mask = torch.ones_like(tokens)
    mask[1:, :2] = 0
    options = options | {
        "attention_mask": mask,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    torch.manual_seed(0)
    expected, none = replays(lambda: eager(model, tokens, **options))
    torch.manual_seed(0)
    found, count = replays(lambda: model.generate(tokens, **options))
    assert (none, count) == (0, NEW - 3 if name in SERVED else 0)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits))
    held, other = found.past_key_values, expected.past_key_values
    assert held.nbytes == other.nbytes
    assert held.get_seq_length() == other.get_seq_length()
    assert torch.equal(held.lengths, other.lengths)
    torch.testing.assert_close(held.states, other.states)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "options",
    [
        *slow_but_for(
            [options for name, options in ROWS.items() if name not in SAME_STATES],
            [ROWS[name] for name in SERVED],
        ),
        *({"feature_map": name} for name in FEATURE_MAPS),
    ],
)
@torch.no_grad()
def test_nothing_is_copied_from_the_host(options, monkeypatch):
    """On the meta device, which is another one than the host's."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # it knows no such device
    layers = 1 if isinstance(options.get("mixer", ""), str) else 2
    model = build(**options, num_hidden_layers=layers).to("meta")
    cache = NalandaCache(layers)
    for layer, state in zip(model.model.layers, cache.states, strict=True):
        for n, (shape, _) in layer.mixer.state_spec(5).items():
            state[n] = torch.empty(3, *shape, dtype=model.dtype, device="meta")
    cache.seen(5, torch.full((3,), 5))
    decoding.GraphDecoder(model, cache)


@pytest.mark.parametrize("name", SOME)
def test_states_continue_and_do_not_change(name):
    check_forks(tiny(name), NEW)
    assert Tape.replays == NEW - 2


def test_turns_of_a_conversation_capture_once(tmp_path, monkeypatch):
    model, captures = tiny(), []
    monkeypatch.setattr(Tape, "capture", lambda *a, f=Tape.capture: captures.append(a) or f(*a))
    state, other = (model.read(ids(1, 6, seed=i)) for i in range(2))
    expected = [eager(model, ids(1, 3), state=s, **GREEDY) for s in (state, other)]
    kept = []
    for s, text in zip((state, other), expected, strict=True):
        out, count = replays(
            lambda s=s: model.generate(ids(1, 3), state=s, return_dict_in_generate=True, **GREEDY)
        )
        assert torch.equal(out.sequences, text)
        kept.append(out.past_key_values)
        assert count == (NEW - 3 if len(kept) == 1 else NEW - 1)
    assert len(captures) == 2
    for cache, text, s in zip(
        kept, expected, (state, other), strict=True
    ):  # the first gave way to the second
        whole = NalandaCache(2)
        read = torch.cat([s.last, text[:, :-1]], 1)
        whole.states, whole.lengths = s.cache.states, s.cache.lengths
        logits(model, read, past_key_values=whole)
        torch.testing.assert_close(cache.states, whole.states)
    model.generate(ids(2, 3), state=state, **GREEDY)  # another batch size
    assert len(captures) == 4


@pytest.mark.slow
def test_threads_and_states_between_them():
    check_threads(tiny(), eager, **GREEDY)
    assert Tape.replays > 12 * (NEW - 4)


@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}]
)
def test_beams_and_copies(options):
    check_beams(tiny("nala"), eager, **GREEDY | options)
    assert Tape.replays == NEW - 3


def test_candidates_that_may_be_cropped_run_eagerly():
    model, tokens = tiny(), torch.cat([ids(1, 7)] * 3, 1)
    expected = eager(model, tokens, **GREEDY)
    assert torch.equal(model.generate(tokens, prompt_lookup_num_tokens=3, **GREEDY), expected)
    assert not Tape.replays


@torch.no_grad()
def test_weights_that_change():
    """In place nothing is captured again; with new tensors everything is."""
    model, tokens = tiny(), ids(1, 5)
    kept = model.generate(tokens, return_dict_in_generate=True, **GREEDY).past_key_values
    model.lm_head.weight.neg_()
    expected = eager(model, tokens, **GREEDY)
    found, count = replays(lambda: model.generate(tokens, **GREEDY))
    assert torch.equal(found, expected)
    assert count == NEW - 1
    weights = {
        name: -x if "lm_head" in name else x.clone() for name, x in model.state_dict().items()
    }
    model.load_state_dict(weights, assign=True)
    expected = eager(model, tokens, **GREEDY)
    found, count = replays(lambda: model.generate(tokens, **GREEDY))
    assert torch.equal(found, expected)
    assert count == NEW - 3
    assert kept.get_seq_length() == 5 + NEW - 1


def test_memory_lasts_as_long_as_the_cache():
    model = tiny()
    cache = model.generate(ids(1, 5), return_dict_in_generate=True, **GREEDY).past_key_values
    step = weakref.ref(cache.decoder)
    assert step() is not None
    fork = cache.fork()
    del cache
    gc.collect()
    assert step() is None
    assert fork.nbytes


class Hostile(torch.nn.Module):
    """Multiplies by a number that it reads from the device."""

    def forward(self, x):
        return x * float(x.new_ones(1)[0])


def test_what_cannot_be_captured_is_said_once():
    model = tiny()
    layer = model.model.layers[0]
    layer.mlp = torch.nn.Sequential(layer.mlp, Hostile())
    expected = eager(model, ids(1, 5), **GREEDY)
    with pytest.warns(
        UserWarning, match=r"decoding without CUDA graphs: aten._local_scalar_dense"
    ) as said:
        assert torch.equal(model.generate(ids(1, 5), **GREEDY), expected)
    assert len(said) == 1
    with warnings.catch_warnings(action="error"):
        assert torch.equal(model.generate(ids(1, 5), **GREEDY), expected)
    assert not Tape.replays


def test_where_graphs_do_not_serve(monkeypatch):
    model = tiny()
    seen = []
    handle = model.model.norm.register_forward_hook(lambda *_: seen.append(1))
    model.generate(ids(1, 5), **GREEDY)
    assert len(seen) == NEW
    handle.remove()
    with torch.autocast("cpu", torch.bfloat16):
        model.generate(ids(1, 5), **GREEDY)
    model.generate(ids(1, 5), output_hidden_states=True, return_dict_in_generate=True, **GREEDY)
    model.train()
    model.generate(ids(1, 5), **GREEDY)
    model.eval()
    assert not Tape.replays
    model.generate(ids(1, 5), **GREEDY)
    assert Tape.replays == NEW - 3
