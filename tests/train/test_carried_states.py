"""Documents that go on from row to row with their state: as if each had been read alone, for every mixer."""

import itertools

import kernel_device  # noqa: F401  before any kernel
import nalanda_kernels
import pytest
import torch
from covering import slow_but_for
from safetensors.torch import save_file
from tiny_models import SAME_STATES, VARIANTS, build, close, ids, main_rows
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_leaves

from nalanda import NalandaCache
from nalanda.common.errors import InputError
from nalanda.model import MIXERS, base
from nalanda.train.carried_states import CarriedStates, check_carries, slots_of

T = 16
# Documents of three slots, three rows each: over two borders, ended by one, of a token before or behind one,
# which is less than a convolution sees.
SLOTS = ([40, 1, 7], [16, 5, 1, 2, 24], [15, 18, 3, 12])
FIRST = [pytest.param({"mixer": m}, id=m) for m in MIXERS if m not in ("softmax", "forgetting")]
FIRST += [  # one of each kind
    pytest.param(options, id=name, marks=pytest.mark.slow if name in SAME_STATES else ())
    for name, options in VARIANTS.items()
]
FEW = [row for row in FIRST if row.id in ("gated_deltanet", "pola", "window", "transnormer")]
ROWS = [row for row in main_rows() if row.id not in ("softmax-None", "forgetting-None")]
WINDOWS = [
    pytest.param({"mixer": "softmax", "mixer_options": {"window": 1}}, id="window-1"),
    pytest.param({"mixer": "softmax", "mixer_options": {"window": 33}}, id="window-33"),
    pytest.param({"mixer": "diag_attention", "mixer_options": {"block_size": 16}}, id="block-16"),
    pytest.param({"mixer": "diag_attention", "mixer_options": {"block_size": 20}}, id="block-20"),
]


def batches(slots=SLOTS, seed: int = 1) -> tuple[torch.Tensor, list[dict]]:
    """Every slot's tokens `[B, 3T]`, and the three batches as the trainer has them."""
    tokens, made = ids(len(slots), sum(slots[0]), seed=seed), []
    for step in range(sum(slots[0]) // T):
        starts, carried = [], []
        for row, lengths in enumerate(slots):
            ends = [0, *itertools.accumulate(lengths)]
            inside = [end - step * T for end in ends if step * T <= end < (step + 1) * T]
            carried.append(0 not in inside)
            starts += [row * T + start for start in sorted({0, *inside})]
        made.append(
            {
                "input_ids": tokens[:, step * T : (step + 1) * T],
                "cu_seqlens": torch.tensor([*starts, len(slots) * T], dtype=torch.int32),
                "carried": torch.tensor(carried),
                "slots": torch.arange(len(slots)),
            }
        )
    return tokens, made


def alone(model, tokens, slots=SLOTS) -> torch.Tensor:
    """The logits of every document as a row of its own, padded behind its end, where no token looks."""
    texts = [
        text for row, lengths in zip(tokens, slots, strict=True) for text in row.split(lengths)
    ]
    padded = model(pad_sequence(texts, batch_first=True), use_cache=False).logits
    logits = [row[: len(text)] for row, text in zip(padded, texts, strict=True)]
    return torch.cat(logits).view(*tokens.shape, -1)


def run(model, batch, states, **options):
    arguments = {
        "carried_cache": states,
        "carried": batch["carried"],
        "return_carried_cache": True,
        **options,
    }
    return model(batch["input_ids"], cu_seqlens=batch["cu_seqlens"], **arguments)


def poisoned(states: NalandaCache, carried: torch.Tensor) -> NalandaCache:
    """With NaN wherever no row goes on."""
    made = NalandaCache(len(states))
    made.states = [
        {
            name: x.clone().index_fill(0, (~carried).nonzero().squeeze(1), torch.nan)
            for name, x in state.items()
        }
        for state in states.states
    ]
    made.seen(0, states.lengths.masked_fill(~carried, -5))
    return made


@torch.no_grad()
def by_rows(model, made) -> torch.Tensor:
    states, out = None, []
    for batch in made:
        states = states and poisoned(states, batch["carried"])
        done = run(model, batch, states)
        out.append(done.logits)
        states = done.carried_cache
    return torch.cat(out, 1)


@pytest.mark.sampled
@pytest.mark.parametrize("row", [*ROWS, *WINDOWS])
def test_rows_are_documents_alone(row):
    """And rows that begin a document do not see what their slot holds, NaN here."""
    model = build(**row)
    tokens, made = batches()
    found = by_rows(model, made)
    with torch.no_grad():
        close(found, alone(model, tokens))
        # The premise: what was carried matters.
        assert not torch.allclose(
            found[0, T : 2 * T], run(model, made[1], None, carried=None).logits[0]
        ) or (row.get("mixer_options") in ({"window": 1}, {"block_size": 16}))


@pytest.mark.sampled
@pytest.mark.parametrize("row", FIRST)
def test_a_document_over_many_chunks(row):
    model = build(**row)
    tokens = ids(1, 3 * 70)
    states, out = None, []
    with torch.no_grad():
        for i, part in enumerate(tokens.split(70, 1)):
            done = model(part, carried_cache=states, carried=torch.tensor([i > 0]))
            states = done.carried_cache
            out.append(done.logits)
        close(torch.cat(out, 1), model(tokens, use_cache=False).logits)
    assert states.lengths.tolist() == [210]
    for layer, state in zip(model.model.layers, states.states, strict=True):
        spec = layer.mixer.state_spec(210)
        assert {name: tuple(x.shape[1:]) for name, x in state.items()} == {
            n: s for n, (s, _) in spec.items()
        }
    assert not any(x.requires_grad for x in tree_leaves(states.states))


@pytest.mark.sampled
@pytest.mark.parametrize("row", FIRST)
def test_empty_states_are_no_state(row):
    """Bit for bit, so that what else is in a batch changes no slot."""
    model = build(**row, dtype=torch.float32)
    batch = batches()[1][1]
    with torch.no_grad():
        plain = model(batch["input_ids"], cu_seqlens=batch["cu_seqlens"], use_cache=False)
        assert plain.carried_cache is None
        first = run(model, batch, None, carried=None)
        empty = NalandaCache(2)
        empty.states = [
            {n: torch.zeros_like(x) for n, x in s.items()} for s in first.carried_cache.states
        ]
        empty.seen(0, torch.zeros(3, dtype=torch.int64))
        again = run(model, batch, empty, carried=torch.ones(3, dtype=torch.bool))
    for out in (first, again):
        assert torch.equal(out.logits, plain.logits)
        assert out.past_key_values is None
    for a, b in zip(
        *(tree_leaves(out.carried_cache.states) for out in (first, again)), strict=True
    ):
        assert torch.equal(a, b)
    assert (
        first.carried_cache.lengths.tolist() == again.carried_cache.lengths.tolist() == [16, 8, 16]
    )


def gradients(model) -> list[torch.Tensor]:
    found = [x.grad.clone() for x in model.parameters()]
    model.zero_grad()
    return found


def losses(model, batch, states, labels, **options) -> torch.Tensor:
    return run(model, batch, states, labels=labels, num_items_in_batch=1, **options).loss


@pytest.mark.sampled
@pytest.mark.parametrize("row", FIRST)
def test_gradients_end_at_the_border(row):
    """Row by row they are those of its documents, the prefix of one that goes on read without a gradient."""
    model = build(**row).train()
    tokens, made = batches()
    with torch.no_grad():
        states = run(model, made[0], None).carried_cache
    labels = made[1]["input_ids"].clone()
    starts = made[1]["cu_seqlens"][:-1].long()
    labels.view(-1)[starts] = -100
    losses(model, made[1], poisoned(states, made[1]["carried"]), labels).backward()
    found = gradients(model)

    for slot, lengths in zip(tokens, SLOTS, strict=True):
        end = 0
        for text in slot.split(lengths):
            begin, end = end, end + len(text)
            before, inside = (
                text[: max(T - begin, 0)],
                text[max(T - begin, 0) : max(2 * T - begin, 0)],
            )
            if len(inside):
                cache = None
                if len(before):
                    cache = NalandaCache(2)
                    with torch.no_grad():
                        model(before[None], past_key_values=cache)
                model(
                    inside[None],
                    labels=inside[None],
                    num_items_in_batch=1,
                    past_key_values=cache,
                    use_cache=cache is not None,
                ).loss.backward()
    for a, b in zip(found, gradients(model), strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8 * max(1.0, float(b.abs().max())))


@pytest.mark.parametrize("row", FEW)
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(row, reentrant):
    model = build(**row).train()
    made = batches()[1]
    with torch.no_grad():
        states = run(model, made[0], None).carried_cache

    def results():
        out = run(model, made[1], states, labels=made[1]["input_ids"])
        out.loss.backward()
        return [out.loss.detach(), *tree_leaves(out.carried_cache.states), *gradients(model)]

    plain = results()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for a, b in zip(results(), plain, strict=True):
        close(a, b)


@pytest.mark.sampled
@pytest.mark.parametrize("row", FIRST)
def test_bf16_autocast(row):
    """States keep the precision that the mixer's spec gives them, and are carried in it."""
    model = build(**row, dtype=torch.float32)
    tokens, made = batches()
    with torch.no_grad():
        expected = alone(model, tokens)
        with torch.autocast("cpu", torch.bfloat16):
            found = by_rows(model, made)
            whole = alone(model, tokens)
            state = run(model, made[0], None).carried_cache.states
    for layer, own in zip(model.model.layers, state, strict=True):
        promised = {
            n: dtype or torch.bfloat16 for n, (_, dtype) in layer.mixer.state_spec(9).items()
        }
        assert {name: x.dtype for name, x in own.items()} == promised
    assert (found - expected).norm() < 1.2 * (whole - expected).norm()


@pytest.mark.sampled
@pytest.mark.parametrize("row", FIRST)
def test_the_device_is_not_waited_for(row):
    """On a device that has no data to wait for: only cu_seqlens, carried and counts are looked at."""
    model, batch = build(**row).to("meta").train(), batches()[1][1]
    states = NalandaCache(2)
    states.states = [
        {
            name: torch.empty(3, *shape, dtype=own or torch.float64, device="meta")
            for name, (shape, own) in layer.mixer.state_spec(T).items()
        }
        for layer in model.model.layers
    ]
    states.seen(T, torch.tensor([T, T, 1]))
    out = run(model.model, batch | {"input_ids": batch["input_ids"].to("meta")}, states)
    out.last_hidden_state.sum().backward()
    assert all(x.is_meta for x in tree_leaves(out.carried_cache.states))
    assert out.carried_cache.lengths.tolist() == [2 * T, 8, T + 1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*feature map Soft")
@pytest.mark.parametrize(
    "mixer", slow_but_for(["mala", "diag_attention"], ["deltanet", "kda", "mala", "diag_attention"])
)
def test_kernels_carry_as_torch_does(mixer):
    sizes = {"num_hidden_layers": 1, "num_heads": 1, "hidden_size": 8}
    model = build(mixer, dtype=torch.float32, **sizes).train()
    _, made = batches([[19, 13], [16, 15, 1]])

    def results():
        states, found = None, []
        for batch in made:
            states = states and poisoned(states, batch["carried"])
            out = run(model, batch, states, labels=batch["input_ids"])
            out.loss.backward()
            states = out.carried_cache
            found += [out.loss.detach(), *tree_leaves(states.states), *gradients(model)]
        return found

    expected = results()
    with nalanda_kernels.use_backend("triton"):
        found = results()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-5 * max(1.0, float(b.abs().max())))


def test_a_sharding_wrapper_does_not_round_the_state(tmp_path, monkeypatch):
    """FSDP2 casts what modules are called with to bf16; a state must not be among it."""
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = build("retention", dtype=torch.float32).train()
        half = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.bfloat16)
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=half)
        fully_shard(model, mp_policy=half)
        seen, original = [], base.by_sequence

        def by_sequence(mixer, state, seq):
            if mixer is model.model.layers[1].mixer:
                seen.append(state.tensors)
            return original(mixer, state, seq)

        monkeypatch.setattr(base, "by_sequence", by_sequence)
        first, second, _ = batches()[1]
        states = run(model, first, None).carried_cache
        run(model, second, states, labels=second["input_ids"]).loss.backward()
    finally:
        dist.destroy_process_group()
    given = states.states[1]["recurrent"]
    assert given.dtype == torch.float32
    assert seen[1]["recurrent"] is given


def test_a_cache_is_a_row_state():
    """What a prompt left goes on in a packed batch, and back."""
    model, tokens = build("pola"), ids(2, 30)
    cache = NalandaCache(2)
    with torch.no_grad():
        whole = model(tokens, use_cache=False).logits
        model(tokens[:, :11], past_key_values=cache)
        middle = model(tokens[:, 11:20], carried_cache=cache, carried=torch.tensor([True, True]))
        last = model(tokens[:, 20:], past_key_values=middle.carried_cache).logits
    close(torch.cat([middle.logits, last], 1), whole[:, 11:])


def test_rows_without_tokens_between_them():
    """Empty documents at the borders of rows are nobody's first or last."""
    model, tokens = build(), ids(2, 8)
    padded = torch.tensor([0, 0, 5, 8, 8, 8, 16, 16])
    plain, more = torch.tensor([0, 5, 8, 16]), {"return_carried_cache": True}
    with torch.no_grad():
        a = model(tokens, cu_seqlens=plain, **more).carried_cache
        b = model(tokens, cu_seqlens=padded, **more).carried_cache
        going = {"carried": torch.tensor([True, True])}
        c = model(tokens, cu_seqlens=plain, carried_cache=a, **going)
        d = model(tokens, cu_seqlens=padded, carried_cache=b, **going)
    close(c.logits, d.logits)
    assert a.lengths.tolist() == b.lengths.tolist() == [3, 8]
    assert c.carried_cache.lengths.tolist() == d.carried_cache.lengths.tolist() == [3, 16]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"carried": [True, False]}, "give that of the previous call"),
        ({"carried_cache": "own"}, "needs carried"),
        ({"carried_cache": "own", "carried": [True]}, "bool \\[2\\]"),
        ({"carried_cache": "own", "carried": [1, 0]}, "bool \\[2\\]"),
        ({"carried_cache": "three", "carried": [True, False]}, "3 rows"),
        ({"carried_cache": [], "carried": [True, False]}, "earlier output"),
        (
            {"carried_cache": "own", "carried": [True, False], "past_key_values": NalandaCache(2)},
            "not both",
        ),
        ({"return_carried_cache": True, "cu_seqlens": [0, 3, 18]}, "begin a sequence"),
        ({"return_carried_cache": True, "attention_mask": [[0] + [1] * 8, [1] * 9]}, "padding"),
    ],
)
def test_what_does_not_fit_is_refused(options, says):
    model = build()
    given = {
        "own": model(ids(2, 9), return_carried_cache=True).carried_cache,
        "three": model(ids(3, 9), return_carried_cache=True).carried_cache,
    }
    made = {
        name: given[x]
        if isinstance(x, str)
        else torch.tensor(x)
        if isinstance(x, list) and x
        else x
        for name, x in options.items()
    }
    with pytest.raises(ValueError, match=says) as error:
        model(ids(2, 9), **made)
    assert "\n" not in str(error.value)


def test_states_that_grow_are_refused():
    hybrid = build(["gated_deltanet", "softmax"], feature_map="nala")
    with pytest.raises(ValueError, match="'softmax': its state grows"):
        hybrid(ids(2, 9), return_carried_cache=True)
    with pytest.raises(InputError, match="carry: mixer 'softmax'"):
        check_carries(hybrid)
    check_carries(build())
    check_carries(build("softmax", mixer_options={"window": 3}))

    class Foreign:
        class config:
            model_type = "llama"

    with pytest.raises(InputError, match="not llama"):
        check_carries(Foreign())


# ------------------------------------------------------------------------------------ between training steps

FOUR = (*SLOTS, [20, 20, 8])


def step(model, kept: list[CarriedStates], batch, rows: int) -> torch.Tensor:
    """One step of so many processes as there are `kept`: the logits `[4, T]` of its slots."""
    world, logits = len(kept), torch.zeros(4, T, model.config.vocab_size, dtype=torch.float64)
    bounds, T_ = batch["cu_seqlens"].tolist(), T
    for rank, states in enumerate(kept):
        for i, slots in enumerate(slots_of(rank, world, 4 // (world * rows), rows)):
            starts = [
                place * T_ + start - slot * T_
                for place, slot in enumerate(slots)
                for start in bounds[:-1]
                if slot * T_ <= start < (slot + 1) * T_
            ]
            part = {
                "input_ids": batch["input_ids"][slots],
                "cu_seqlens": torch.tensor([*starts, rows * T_]),
                "carried": batch["carried"][slots],
                "slots": torch.tensor(slots),
            }
            with torch.no_grad():
                out = model(
                    part["input_ids"], cu_seqlens=part["cu_seqlens"], **states.before(i, part)
                )
            states.after(i, out, part)
            logits[slots] = out.logits
    return logits


@pytest.mark.parametrize("row", FEW)
def test_saved_by_two_ranks_loaded_by_one_and_by_two(row, tmp_path):
    model = build(**row)
    tokens, made = batches(FOUR)
    expected = alone(model, tokens, FOUR)
    kept, found = [CarriedStates(), CarriedStates()], []
    for number, (batch, (world, rows)) in enumerate(
        zip(made, [(2, 1), (1, 2), (2, 2)], strict=True)
    ):
        if number:
            folder = tmp_path / f"step-{number}"
            folder.mkdir()
            for rank, states in enumerate(kept):
                save_file(states.state_tensors(), folder / f"slots-{rank}.safetensors")
            kept = [CarriedStates() for _ in range(world)]
            for rank, states in enumerate(kept):
                slots = slots_of(rank, world, 4 // (world * rows), rows)
                states.load(folder, slots)
        found.append(step(model, kept, batch, rows))
    close(torch.cat(found, 1), expected)


def test_files_of_lanes_are_read(tmp_path):
    """As earlier checkpoints have them: `lanes-R.safetensors` with `lane.SLOT.…`."""
    _, made = batches()
    states = CarriedStates()
    states.after(0, run(build(), made[0], None), made[0])
    saved = states.state_tensors()
    lanes = {key.replace("slot.", "lane.", 1): x for key, x in saved.items()}
    save_file(lanes, tmp_path / "lanes-0.safetensors")

    loaded = CarriedStates()
    loaded.load(tmp_path, [[0, 1, 2]])

    assert loaded.state_tensors().keys() == saved.keys()
    assert all(torch.equal(x, saved[key]) for key, x in loaded.state_tensors().items())


def test_every_slot_is_one_ranks():
    for world, micro_batches, rows in [(1, 4, 2), (2, 2, 2), (4, 1, 2), (2, 4, 1), (8, 1, 1)]:
        slots = [slots_of(rank, world, micro_batches, rows) for rank in range(world)]
        assert sorted(x for rank in slots for some in rank for x in some) == list(range(8))
        for i in range(micro_batches):  # a micro-step's block of rows, every W-th a rank's
            block = list(range(i * rows * world, (i + 1) * rows * world))
            assert [rank[i] for rank in slots] == [block[r::world] for r in range(world)]


def test_states_that_are_not_there_are_missed(tmp_path):
    model, states = build(), CarriedStates()
    _, made = batches()
    with pytest.raises(ValueError, match="slot 0 continues"):
        states.before(0, made[1])
    states.after(0, run(model, made[0], None), made[0])
    with pytest.raises(ValueError, match=r"slot 0 continues .* micro-batch 1 holds no states"):
        states.before(1, made[1])
    with pytest.raises(ValueError, match=r"slot 5 continues .* holds slots"):
        states.before(0, made[1] | {"slots": torch.tensor([5, 6, 7])})
    none = CarriedStates()
    none.load(tmp_path, [[0, 1]])
    assert not none.state_tensors()
    save_file(states.state_tensors(), tmp_path / "slots-0.safetensors")
    for slots in ([[0, 1], [2, 3]], [[3]]):
        with pytest.raises(InputError, match="no state for slot 3, only for 3"):
            CarriedStates().load(tmp_path, slots)


def test_forgotten_slots_begin_empty():
    model, states = build(), CarriedStates()
    _, made = batches()
    with torch.no_grad():
        bad = run(model, made[0], None)
        bad.carried_cache = poisoned(bad.carried_cache, torch.zeros(3, dtype=torch.bool))
        states.after(0, bad, made[0])
        states.forget()
        cut = model(made[1]["input_ids"], cu_seqlens=made[1]["cu_seqlens"], use_cache=False).logits
        out = model(
            made[1]["input_ids"], cu_seqlens=made[1]["cu_seqlens"], **states.before(0, made[1])
        )
    assert torch.equal(out.logits, cut)
    states.after(0, out, made[1])
    assert out.carried_cache.lengths.tolist() == [16, 8, 16]
