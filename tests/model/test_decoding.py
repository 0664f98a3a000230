"""A whole token in C++: the text of eager decoding, and states in place that nobody else sees change."""

import collections
import contextlib
import contextvars
import copy
import gc
import itertools
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import nalanda_kernels
import pytest
import torch
from decoded import check_beams, check_forks, check_threads
from nalanda_kernels import Unsupported
from nalanda_kernels.cpu import build as library
from nalanda_kernels.cpu.step import KINDS, PIECE
from nalanda_kernels.cpu.token import Program
from tiny_models import UNKNOWN_MAPS, VARIANTS, build, covered_rows, ids, logits, rows
from torch.nn.utils.parametrize import register_parametrization
from transformers.utils import ModelOutput

from nalanda import NalandaCache
from nalanda.model import MIXERS, choose_decoder, decoding, program

try:
    library.library()
except Unsupported as reason:
    pytest.skip(f"no C++ compiler: {reason}", allow_module_level=True)

NEW = 6
SIZES = (9, 5, 1, 2, 6, 4, 1, 5, 5, 2)
"""Of the pieces of a text."""
GREEDY = {"do_sample": False, "max_new_tokens": NEW}


@pytest.fixture(autouse=True)
def runs(monkeypatch):
    """The pieces of programs that ran."""
    runs = []

    def recorded(self, first, end, run=Program.run):
        runs.append((first, end))
        run(self, first, end)

    monkeypatch.setattr(Program, "run", recorded)
    return runs


def tiny(dtype=torch.float32, **options):
    return build(**{"mixer": "gated_deltanet", "eos_token_id": None} | options).float().to(dtype)


def eager(model, *args, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(program.ENVIRONMENT, "0")
        return model.generate(*args, **options)


def in_python(options) -> bool:
    """Whether mixers of these options run in Python."""
    mixer = options.get("mixer", "gated_deltanet")
    unstated = {"norm_write", "norm_read"} & options.get("mixer_options", {}).keys()
    norm = options.get("feature_map_options", {}).get("norm")
    unknown = options.get("feature_map") in UNKNOWN_MAPS or norm == "sum"
    own = ("soft", "comba", "rwkv7", "mamba3", "forgetting")
    return bool(unstated) or unknown or mixer in own


def near(a, b, dtype=None):
    """Within a share of b's largest entry. dtype: the model's, where its numbers were cast; default: a's."""
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    share = (a - b).abs().max() / b.abs().max().clamp_min(1e-30)
    assert share <= (3e-2 if (dtype or a.dtype) == torch.bfloat16 else 5e-5)


def every_row() -> list:
    """The variants in fp32. Of the other rows every mixer, map and precision three times: test_cpu_step.py has
    every pair of a mixer and a map."""
    options_of = {row.id: row.values[0] for row in rows()}
    dtypes = (torch.float32, torch.bfloat16)
    chosen = covered_rows(options_of, dtypes, strength=1, times=3)
    chosen |= {(name, torch.float32) for name in VARIANTS}
    return [
        pytest.param(options_of[name], dtype, id=f"{name}-{str(dtype)[6:]}")
        for name, dtype in itertools.product(options_of, dtypes)
        if (name, dtype) in chosen
    ]


@pytest.mark.sampled
@pytest.mark.parametrize(("options", "dtype"), every_row())
def test_text_is_that_of_eager_decoding(options, dtype, runs):
    batch = 1 if dtype == torch.bfloat16 else 3
    model, tokens = tiny(dtype, **options), ids(batch, 5)
    mask = torch.ones_like(tokens)
    mask[1:, :2] = 0
    options_of_call = GREEDY | {
        "attention_mask": mask,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    expected = eager(model, tokens, **options_of_call)
    assert not runs
    found = model.generate(tokens, **options_of_call)
    assert bool(found.past_key_values.decoder.in_python) == in_python(options)
    assert len(runs) >= NEW - 1
    assert torch.equal(found.sequences, expected.sequences)
    # transformers returns logits in fp32, of a model in bf16 too.
    near(torch.stack(found.logits), torch.stack(expected.logits), dtype)
    cache, other = found.past_key_values, expected.past_key_values
    assert (cache.nbytes, cache.get_seq_length()) == (other.nbytes, other.get_seq_length())
    assert torch.equal(cache.lengths, other.lengths)
    for state, other_state in zip(cache.states, other.states, strict=True):
        assert list(state) == list(other_state)
        for name, x in state.items():
            near(x, other_state[name])


@pytest.mark.sampled
@pytest.mark.parametrize(("options", "dtype"), every_row())
@torch.no_grad()
def test_pieces_of_a_text(options, dtype, runs, monkeypatch):
    """Several tokens at once after others, of two texts, in a program with less room than some pieces need."""
    monkeypatch.setitem(PIECE, dtype, 10)
    model, texts = tiny(dtype, **options), ids(2, 40)
    with decoding.choose_decoder(model):
        cache, found, start = NalandaCache(len(model.model.layers)), [], 0
        for size in SIZES:
            piece = texts[:, start : start + size]
            found.append(model(piece, past_key_values=cache, logits_to_keep=1).logits)
            start += size
            assert bool(runs) == (size <= (1 if in_python(options) else 5))
            runs.clear()
    whole = NalandaCache(len(model.model.layers))
    expected = model(texts, past_key_values=whole).logits
    ends = torch.tensor(SIZES).cumsum(0) - 1
    near(torch.cat(found, 1), expected[:, ends], dtype)
    assert torch.equal(cache.lengths, whole.lengths)
    for state, other_state in zip(cache.states, whole.states, strict=True):
        for name, x in state.items():
            near(x, other_state[name], dtype)


@pytest.mark.sampled
@pytest.mark.parametrize("batch", range(1, 10))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mixer", ["gated_deltanet", ["softmax", "pola"]])
def test_batches(mixer, batch, dtype, runs):
    model, tokens = tiny(dtype, mixer=mixer), ids(batch, 5)
    expected = eager(model, tokens, **GREEDY)
    assert torch.equal(model.generate(tokens, **GREEDY), expected)
    assert bool(runs) == (batch <= (8 if dtype == torch.float32 else 4))


@pytest.mark.parametrize("mixer", ["gated_deltanet", "softmax", "mamba2"])
def test_threads_do_not_change_a_token(mixer, monkeypatch):
    model, tokens, texts = tiny(mixer=mixer), ids(2, 5), []
    monkeypatch.setattr("nalanda_kernels.cpu.step.ENTRIES_A_THREAD", 1)
    for count in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        options = {"output_logits": True, "return_dict_in_generate": True}
        texts.append(torch.stack(model.generate(tokens, **GREEDY, **options).logits[1:]))
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])


@pytest.mark.parametrize("mixer", [["gated_deltanet", "softmax"], "forgetting"])
def test_the_default_device_may_be_another(mixer, runs):
    """As under `torch.set_default_device("cuda")`: numbers for the host stay there."""
    model, tokens = tiny(mixer=mixer), ids(2, 9)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    inputs = {"attention_mask": mask, "labels": tokens}
    loss, text = model(tokens, **inputs).loss, model.generate(tokens, **GREEDY)
    runs.clear()
    with torch.device("meta"):
        again = model(tokens, **inputs).loss
        again.backward()
        assert torch.equal(model.generate(tokens, **GREEDY), text)
    assert torch.equal(again, loss)
    assert runs


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"num_kv_heads": 1}, {"window": 7, "num_kv_heads": 1}, {"window": 5}]
)
def test_rows_move_to_larger_memory(options):
    """As often as their memory is full, behind a prompt whose second row is shorter."""
    model, tokens = tiny(mixer="softmax", mixer_options=options), ids(2, 5)
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    more = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 160}
    assert torch.equal(model.generate(tokens, **more), eager(model, tokens, **more))


@pytest.mark.parametrize(
    "mixer", ["gated_deltanet2", "kda", "nala", "delta_product", "gla", "retention", "mamba2"]
)
def test_operations_at_once_share_no_array(mixer):
    """Between two barriers no operation reads or writes what another one writes."""
    model = tiny(mixer=mixer)
    out = model.generate(ids(2, 5), return_dict_in_generate=True, **GREEDY)
    listed, at_once = list(out.past_key_values.decoder.program.listed), []
    for operation in listed:
        at_once.append(operation)
        if not operation.waits and operation is not listed[-1]:
            continue
        for a in at_once:
            touched = [(b.x, b.added, b.y) for b in at_once if b is not a]
            assert all(a.y not in addresses for addresses in touched)
            assert a.step is None or len(at_once) == 1  # it reads arrays of its own
        at_once = []


@pytest.mark.parametrize(
    "options", [{}, {"mixer": "nala"}, {"mixer": "mala"}, {"mixer": "softmax"}, VARIANTS["gated"]]
)
def test_states_continue_and_do_not_change(options, runs):
    check_forks(tiny(**options), NEW)
    assert runs


@pytest.mark.parametrize("mixer", ["gated_deltanet", "softmax"])
def test_a_single_token_is_read_in_cpp(mixer, runs):
    """The last piece of a text, and the next token of a state, which does not change."""
    model, tokens = tiny(mixer=mixer), ids(2, 12)
    state = model.read(tokens[:, :6], chunk_size=4)
    assert len(runs) == 1
    once, *_, last = [model.read(tokens[:, i : i + 1], state=state) for i in (6, 7, 6)]
    assert len(runs) == 4
    whole = model.read(tokens[:, :7])
    assert len(runs) == 4
    for read in (once, last):
        assert torch.equal(read.lengths, whole.lengths)
        for a, b in zip(read.cache.states, whole.cache.states, strict=True):
            for name, x in a.items():
                near(x, b[name])


@pytest.mark.parametrize("mixer", ["gated_deltanet", "softmax"])
def test_two_caches_in_turns(mixer):
    """Each has its states in place for a token, and gets them back before the other's come."""
    model, prompts = tiny(mixer=mixer), [ids(1, 5, seed=i) for i in range(2)]
    expected = [eager(model, x, **GREEDY)[:, 5:] for x in prompts]
    with decoding.choose_decoder(model), torch.no_grad():
        caches = [NalandaCache(2) for _ in prompts]
        texts = [
            [logits(model, x, past_key_values=cache)[:, -1:].argmax(-1)]
            for x, cache in zip(prompts, caches, strict=True)
        ]
        for _ in range(NEW - 1):
            for text, cache in zip(texts, caches, strict=True):
                text.append(model(text[-1], past_key_values=cache).logits.argmax(-1))
        assert caches[0].decoder is caches[1].decoder
    assert all(torch.equal(torch.cat(x, 1), y) for x, y in zip(texts, expected, strict=True))


@pytest.mark.parametrize("options", [{}, {"window": 4}])
@torch.no_grad()
def test_the_longest_text_leaves_the_batch(options, runs):
    model, mask = tiny(mixer="softmax", mixer_options=options), torch.ones(2, 5)
    mask[1, :3] = 0
    states = []
    for context in (decoding.choose_decoder(model), contextlib.nullcontext()):
        cache = NalandaCache(2)
        model(ids(2, 5), attention_mask=mask, past_key_values=cache)
        cache.batch_select_indices(torch.tensor([1]))
        with context:
            for token in ids(1, 3).split(1, 1):
                model(token, past_key_values=cache)
        states.append(cache.states)
    assert len(runs) == 3
    for found, expected in zip(*states, strict=True):
        for name, x in found.items():
            near(x, expected[name])


@pytest.mark.parametrize("options", [{}, {"window": 4}])
@torch.no_grad()
def test_forks_in_turns(options):
    """Two texts that continue one state: neither writes where the other's keys and values are."""
    model = tiny(mixer="softmax", mixer_options=options)
    with decoding.choose_decoder(model):
        first = NalandaCache(2)
        model(ids(1, 5), past_key_values=first)
        model(
            ids(1, 1), past_key_values=first
        )  # in C++, so that the state lies in memory with room
        caches, texts = [first, first.fork()], [ids(1, NEW, seed=i) for i in (1, 2)]
        found = [[], []]
        for i in range(NEW):
            for cache, text, outputs in zip(caches, texts, found, strict=True):
                outputs.append(model(text[:, i : i + 1], past_key_values=cache).logits)
    for text, outputs in zip(texts, found, strict=True):
        expected = model(torch.cat([ids(1, 5), ids(1, 1), text], 1)).logits[:, -NEW:]
        torch.testing.assert_close(torch.cat(outputs, 1), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mixer", ["gated_deltanet", "pola", ["mamba2", "softmax"]])
@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}]
)
def test_beams_and_copies(options, mixer, runs):
    check_beams(tiny(mixer=mixer), eager, **GREEDY | options)
    assert len(runs) == NEW - 1


@pytest.mark.parametrize("mixer", ["gated_deltanet", "softmax"])
def test_threads_and_states_between_them(mixer, runs):
    check_threads(tiny(mixer=mixer), eager, **GREEDY)
    assert len(runs) == 13 * (NEW - 1) + 12  # the threads' prompts are short pieces


@torch.no_grad()
def test_a_thread_that_inherits_the_choice_of_a_decoder_runs_eagerly(runs):
    model, tokens = tiny(), ids(1, 5)
    begun = model(tokens, use_cache=True)

    @torch.no_grad()
    def one_token():
        return model(ids(1, 1), cache=begun.past_key_values).logits

    with choose_decoder(model) as choice:
        context = contextvars.copy_context()  # as that of asyncio.to_thread
        with ThreadPoolExecutor(1) as pool:
            pool.submit(context.run, one_token).result()
        assert not runs
        assert choice.reason is None
        one_token()
    assert len(runs) == 1


@torch.no_grad()
def test_buffers_do_not_change_owners_while_a_state_is_copied(monkeypatch):
    """Two caches of one thread's decoder: another thread continues the first one as the second one moves in."""
    model = tiny()
    first, second = (model(ids(1, 5) + i, use_cache=True).past_key_values for i in range(2))
    with choose_decoder(model):
        model(ids(1, 1), cache=first)
        buffers = first.decoder
        expected = buffers.copied()

        def copied_slowly():
            mover.start()
            mover.join(0.2)  # it waits for this copy
            return copied()

        copied = buffers.copied
        monkeypatch.setattr(buffers, "copied", copied_slowly)
        mover = threading.Thread(target=buffers.take, args=(second,))
        states = first.states
        mover.join()
    assert second.live
    torch.testing.assert_close(states, expected, rtol=0, atol=0)


@torch.no_grad()
def test_weights_that_change():
    """Written in place, or replaced between calls, and with other memory for joined ones."""
    model, tokens = tiny(), ids(1, 5)
    out = model.generate(tokens, return_dict_in_generate=True, **GREEDY)
    step = weakref.ref(out.past_key_values.decoder)
    square = next(
        x.weight
        for x in model.modules()
        if isinstance(x, torch.nn.Linear) and len({*x.weight.shape}) == 1
    )
    for change in (
        lambda: model.lm_head.weight.neg_(),
        lambda: setattr(square, "data", square.data.t()),  # at the same address
        lambda: model.load_state_dict(
            {name: x.clone().neg_() for name, x in model.state_dict().items()}, assign=True
        ),
        lambda: model.train().eval(),
    ):
        change()
        assert torch.equal(model.generate(tokens, **GREEDY), eager(model, tokens, **GREEDY))
    del out
    gc.collect()
    assert step() is None  # memory lasts as long as the cache


@pytest.mark.parametrize("joined", [True, False])
def test_what_changes_no_weight_moves_none_while_a_decoder_reads(joined):
    model, addresses = tiny(), []
    if not joined:
        model = copy.deepcopy(model)

    class Streamer:
        def put(self, tokens):
            # After the prompt and two tokens, a decoder is at work.
            if len(addresses) > 3:
                model.eval().to("cpu").float()
            addresses.append([weight.data_ptr() for weight in model.parameters()])

        def end(self):
            pass

    model.generate(ids(1, 5), streamer=Streamer(), **GREEDY)
    assert len(addresses) == NEW + 1
    assert addresses[3] == addresses[-1]


def halved(out):
    """Half of an output, or of the first of several."""
    if isinstance(out, ModelOutput):
        first = next(iter(out))
        out[first] = 0.5 * out[first]
        return out
    return (0.5 * out[0], *out[1:]) if isinstance(out, tuple) else 0.5 * out


def hook(layer):
    layer.register_forward_hook(lambda layer, inputs, out: halved(out))


def new_forward(layer):
    own = layer.forward
    layer.forward = lambda *args: halved(own(*args))


def parametrised(layer):
    for name, _ in list(layer.named_parameters(recurse=False)):
        register_parametrization(layer, name, torch.nn.Softplus())


def subclassed(layer):
    kind = type(layer)
    own = {"forward": lambda self, *args, **named: halved(kind.forward(self, *args, **named))}
    layer.__class__ = type("Own", (kind,), own)


def check_decoded(model):
    """Decoded tokens have the logits of a pass over the text."""
    tokens = ids(1, 5)
    out = model.generate(tokens, output_logits=True, return_dict_in_generate=True, **GREEDY)
    whole = logits(model, out.sequences)
    near(torch.stack(out.logits, 1), whole[:, 4:-1])


@pytest.mark.sampled
@pytest.mark.parametrize("mixer", MIXERS)
def test_a_hook_in_a_mixer_acts_on_every_token(mixer):
    for name, _ in tiny(mixer=mixer).model.layers[0].mixer.named_children():
        model = tiny(mixer=mixer)
        hook(model.model.layers[0].mixer.get_submodule(name))
        check_decoded(model)


@pytest.mark.sampled
@pytest.mark.parametrize("mixer", MIXERS)
def test_a_hook_on_any_module_runs_for_every_token(mixer):
    model, calls = tiny(mixer=mixer), collections.Counter()
    named = model.named_modules()
    called = {name: x for name, x in named if not isinstance(x, torch.nn.ModuleList)}
    for name, module in called.items():
        module.register_forward_hook(lambda *_, name=name: calls.update([name]))
    model.generate(ids(1, 5), **GREEDY)
    assert not {name for name in called if calls[name] < NEW}


@pytest.mark.parametrize("change", [new_forward, parametrised, subclassed])
def test_what_replaces_a_layer_acts_on_every_token(change):
    for name in ("q_conv1d", "o_norm", "decay"):
        model = tiny()
        before = logits(model, ids(1, 5))
        change(model.model.layers[0].mixer.get_submodule(name))
        assert not torch.allclose(logits(model, ids(1, 5)), before)
        check_decoded(model)


@pytest.mark.parametrize(
    "name", ["", "model", "model.embed_tokens", "model.norm", "model.layers.1", "lm_head"]
    + [f"model.layers.0.{name}" for name in ("mixer", "mixer.o_proj", "mixer_norm", "mlp")]
)  # fmt: skip
def test_a_class_of_ones_own_acts_on_every_token(name):
    model = tiny()
    before = logits(model, ids(1, 5))
    # Its cache keeps a decoder of the classes before.
    _kept = model.generate(ids(1, 5), return_dict_in_generate=True, **GREEDY)
    subclassed(model.get_submodule(name))
    assert not torch.allclose(logits(model, ids(1, 5)), before)
    check_decoded(model)


def test_dropout_acts_where_it_alone_is_in_training_mode():
    model, tokens = tiny(dropout=0.5), ids(1, 5)
    options = GREEDY | {"output_logits": True, "return_dict_in_generate": True}
    plain = model.generate(tokens, **options)
    model.model.layers[0].dropout.train()
    dropped = model.generate(tokens, **options)
    for one, other in zip(plain.logits, dropped.logits, strict=True):
        assert not torch.allclose(one, other)


def test_where_a_token_runs_eagerly(runs, monkeypatch):
    model, tokens = tiny(), ids(2, 5)
    seen = []
    handle = model.model.norm.register_forward_hook(lambda *_: seen.append(1))
    model.generate(tokens, **GREEDY)
    assert len(seen) == NEW
    handle.remove()
    with torch.autocast("cpu", torch.bfloat16):
        model.generate(tokens, **GREEDY)
    model.generate(tokens, output_hidden_states=True, return_dict_in_generate=True, **GREEDY)
    model.train()
    model.generate(tokens, **GREEDY)
    model.eval()
    model.generate(tokens[:1, [0, 1] * 4], prompt_lookup_num_tokens=3, **GREEDY)
    with nalanda_kernels.use_backend("torch"):
        model.generate(tokens, **GREEDY)
    tiny(torch.float64).generate(tokens, **GREEDY)
    cache = model.generate(tokens[:, :4], max_new_tokens=1, return_dict_in_generate=True)
    with decoding.choose_decoder(model):
        model(tokens[:, :1], past_key_values=cache.past_key_values)  # with gradients
        with torch.no_grad():
            mask = torch.tensor([[1] * 6, [1] * 5 + [0]])
            padded = model(
                tokens[:, :1], attention_mask=mask, past_key_values=cache.past_key_values
            )
            assert not runs
            assert padded.past_key_values.lengths.tolist() == [6, 5]
            with pytest.raises(IndexError):
                model(torch.full((2, 1), 10**6), past_key_values=cache.past_key_values)
    monkeypatch.setenv(program.ENVIRONMENT, "0")
    model.generate(tokens, **GREEDY)
    assert not runs


def test_an_adapted_layer_runs_by_itself(runs):
    """A module that a program does not know is never skipped."""
    model, tokens = tiny(), ids(1, 5)
    plain = model.generate(tokens, **GREEDY)
    layer = model.model.layers[0].mixer

    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return -2 * super().forward(x)

    layer.o_proj.__class__ = Doubled
    runs.clear()
    found, expected = model.generate(tokens, **GREEDY), eager(model, tokens, **GREEDY)
    assert torch.equal(found, expected)
    assert not torch.equal(found, plain)
    assert len(runs) == 2 * (NEW - 1)  # before that mixer and behind it

    class Skipped(torch.nn.Module):
        def forward(self, x, seq, state=None):
            return x, state

    model.model.layers[1].mlp = torch.nn.Sequential(model.model.layers[1].mlp)
    for _ in range(2):
        runs.clear()
        assert torch.equal(model.generate(tokens, **GREEDY), eager(model, tokens, **GREEDY))
        assert not runs
        model.model.layers[1] = Skipped()


def test_the_kinds_are_those_of_the_source():
    """Both sides name the kinds of operations in one order."""
    source = (library.SOURCES / "token.cpp").read_text()
    kinds = source.split("enum Action {")[1].split("}")[0]
    assert [x.strip().lower() for x in kinds.split(",")] == list(KINDS)
