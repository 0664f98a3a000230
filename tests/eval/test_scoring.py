"""Log-likelihoods do not depend on how requests are batched, ordered, cut into pieces or shared."""

import random

import pytest
import torch
import transformers
from covering import covering
from nalanda_eval import scoring
from nalanda_eval.scoring import process_share

from nalanda import NalandaConfig, NalandaForCausalLM

VOCABULARY = 64
OURS = ("gated_deltanet", "deltanet", "gla", "mala", "softmax")
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
}
ATTENTION = SHAPE | {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.3}
FOREIGN = {
    "llama": lambda: transformers.LlamaConfig(**ATTENTION),
    "mistral": lambda: transformers.MistralConfig(sliding_window=8, **ATTENTION),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, initializer_range=0.3
    ),
    "mamba": lambda: transformers.MambaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        state_size=4,
        initializer_range=0.3,
    ),
}


def build(name: str, dtype=torch.float32):
    torch.manual_seed(0)
    if name in FOREIGN:
        model = transformers.AutoModelForCausalLM.from_config(FOREIGN[name]())
    else:
        model = NalandaForCausalLM(
            NalandaConfig(mixer=name, num_heads=2, initializer_range=0.3, **SHAPE)
        )
    return model.to(dtype).eval()


def score(model, requests, **options) -> list[scoring.Answer]:
    """The answers to `requests`, in their order."""
    by_request = {}
    for batch in scoring.answers(model, requests, **options):
        by_request.update(batch)
    return [by_request[request] for request in requests]


def draw(contexts: int = 12, longest: int = 90) -> list[scoring.Request]:
    """Contexts of 1 to `longest` tokens, with 1 to 7 endings of 1 to 9; some requests come twice."""
    rng = random.Random(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCABULARY) for _ in range(count))

    requests = []
    for i in range(contexts):
        context = ids(1 if i == 0 else rng.randint(1, longest))
        endings = [ids(rng.choice((1, 2, 5, 9))) for _ in range(rng.randint(1, 7))]
        requests += [(context, ending) for ending in endings]
    return requests + requests[::5]


def alone(model, request: scoring.Request) -> scoring.Answer:
    context, continuation = request
    with torch.no_grad():
        logits = (
            model(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1].double()
        )
    ids = torch.tensor(continuation)
    logp = logits.log_softmax(-1).gather(1, ids[:, None]).sum().item()
    return logp, bool((logits.argmax(-1) == ids).all())


def differ(some: list[scoring.Answer], others: list[scoring.Answer], requests) -> float:
    """The largest difference, in nats a token."""
    return max(
        abs(a - b) / len(ids)
        for (a, _), (b, _), (_, ids) in zip(some, others, requests, strict=True)
    )


@pytest.mark.sampled
@covering(strength=1, share=(True, False), name=(*OURS, *FOREIGN))
def test_answers_are_those_of_each_request_alone(name, share):
    model, requests = build(name, torch.float64), draw()
    expected = [alone(model, request) for request in requests]
    found = score(model, requests, batch_size=1, share=share)
    rounding = 1e-5 if name == "mamba" else 1e-9  # its logits are fp32, whatever it is itself
    assert differ(found, expected, requests) < rounding
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    # What is far back matters to these weights, so that a state that was lost would show.
    other = [((context[0] ^ 1, *context[1:]), ending) for context, ending in requests]
    assert differ(score(model, other), expected, requests) > 0.1


class OlderLlama(transformers.LlamaForCausalLM):
    """Takes `logits_to_keep` only as a number, as older code of the hub does."""

    def forward(self, input_ids, logits_to_keep=0, **options):
        hidden = self.model(input_ids, **options).last_hidden_state
        return transformers.modeling_outputs.CausalLMOutput(
            logits=self.lm_head(hidden[:, -logits_to_keep:])
        )


@pytest.mark.parametrize("batch_size", [1, 4])
def test_models_that_keep_no_chosen_positions_are_scored_too(batch_size):
    torch.manual_seed(0)
    model, requests = OlderLlama(FOREIGN["llama"]()).double().eval(), draw()
    expected = [alone(model, request) for request in requests]
    assert (
        differ(score(model, requests, batch_size=batch_size, share=False), expected, requests)
        < 1e-9
    )


def test_logits_are_computed_only_where_they_are_wanted(monkeypatch):
    model, sizes = build("llama"), []
    model.lm_head.register_forward_hook(
        lambda module, inputs, logits: sizes.append(logits.shape[1])
    )
    score(model, [(tuple(range(40)), (1, 2))], share=False)
    assert sizes[-1] == 2


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["gated_deltanet", "deltanet", "mala", "llama"])
def test_batch_size_and_order_change_nothing(name):
    model, requests = build(name), draw()
    first = score(model, requests)
    for batch_size in (1, 2, 7, 64):
        order = random.Random(batch_size).sample(range(len(requests)), len(requests))
        shuffled = score(model, [requests[i] for i in order], batch_size=batch_size)
        back = [shuffled[order.index(i)] for i in range(len(requests))]
        assert differ(back, first, requests) < 1e-5
        assert [greedy for _, greedy in back] == [greedy for _, greedy in first]
        # Equal requests tie exactly, whichever batch they would have been in.
        assert [back[requests.index(request)] for request in requests] == back


def test_the_order_of_requests_does_not_reach_the_batches():
    model, requests = build("gated_deltanet"), draw()
    order = random.Random(1).sample(range(len(requests)), len(requests))
    first = score(model, requests)
    assert score(model, [requests[i] for i in order]) == [first[i] for i in order]


@pytest.mark.parametrize("share", [True, False])
def test_greedy_is_what_greedy_decoding_gives(share):
    model, (context, _) = build("gated_deltanet", torch.float64), draw()[-1]

    def decoded(ids: tuple[int, ...], length: int) -> tuple[int, ...]:
        for _ in range(length):
            with torch.no_grad():
                ids += (model(torch.tensor([ids])).logits[0, -1].argmax().item(),)
        return ids

    ending = decoded(context, 6)[len(context) :]
    late = (*ending[:-1], (ending[-1] + 1) % VOCABULARY)
    early = decoded((*context, (ending[0] + 1) % VOCABULARY), 3)[len(context) :]
    asked = [(context, ids) for ids in (ending, ending[:1], late, early, early[:1])]
    assert [greedy for _, greedy in score(model, asked, share=share)] == [
        True,
        True,
        False,
        False,
        False,
    ]


def count_tokens(model) -> list[int]:
    counts = []
    model.get_input_embeddings().register_forward_hook(
        lambda module, args, out: counts.append(args[0].numel())
    )
    return counts


@pytest.mark.parametrize("name", ["gated_deltanet", "llama"])
def test_a_shared_context_is_read_once(name):
    model = build(name)
    counts = count_tokens(model)
    asked = [(tuple(range(40)), (i, i, i)) for i in range(4)]
    score(model, asked)
    of_cache, of_logits = (1, 2 * 3) if name == "llama" else (0, 0)  # probes
    assert sum(counts) == of_cache + of_logits + 40 + 4 * 2
    counts.clear()
    score(model, asked, share=False)
    assert sum(counts) == of_logits + 4 * 42
    counts.clear()
    score(model, [(context, ids[:1]) for context, ids in asked])
    assert sum(counts) == of_cache + of_logits + 40


def test_caches_that_may_not_resume_exactly_are_not_shared():
    for name, shared in {"llama": True, "gpt2": True, "mistral": False, "mamba": False}.items():
        assert scoring._resumes_exactly(build(name)) == shared, name


@pytest.mark.parametrize("name", ["gated_deltanet", "gla", "softmax"])
def test_long_rows_are_read_in_pieces(name, monkeypatch):
    model, requests = build(name, torch.float64), draw(6, 300)
    requests.append((requests[0][0], tuple(i % VOCABULARY for i in range(200))))
    expected = score(model, requests)
    monkeypatch.setattr(scoring, "COLUMNS", 64)
    monkeypatch.setattr(scoring, "POSITIONS", 7)
    counts = []
    model.model.layers[0].register_forward_pre_hook(
        lambda module, args: counts.append(args[0].shape[1])
    )
    assert differ(score(model, requests), expected, requests) < 1e-9
    assert max(counts) <= 64 * 8  # rows of a batch lie in one


def test_processes_share_whole_contexts():
    requests = draw()
    parts = [process_share(requests, rank, 3) for rank in range(3)]
    assert sorted(request for own in parts for request in own) == sorted(requests)
    contexts = [{context for context, _ in own} for own in parts]
    assert sum(map(len, contexts)) == len(set.union(*contexts))
    assert process_share(requests[::-1], 1, 3) == parts[1][::-1]
