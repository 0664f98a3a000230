"""How the benchmarks train, choose and score: no choice on test rows, errors by hand, answers by request."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from nalanda_eval import harness
from nalanda_eval.cache import AnswerCache
from nalanda_eval.options import EvalOptions
from nalanda_eval.perplexity import ratio

from nalanda.inference.options import LoadOptions, Sampling, sampling_options

TINY = {
    "mixer": "deltanet",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_heads": 1,
    "head_dim": 8,
}
TINY |= {"intermediate_size": 32}


def test_where_a_context_ends_is_part_of_a_request():
    cache = AnswerCache(None, {})
    cache.keep({((1,), (2, 3)): (-1.0, True)})
    assert cache.find([((1, 2), (3,))]) == {}
    assert cache.find([((1,), (2, 3))]) == {((1,), (2, 3)): (-1.0, True)}


def test_sampling_options_reach_generate():
    assert sampling_options(Sampling(max_new_tokens=3, temperature=0.5, top_p=0.9, top_k=7)) == {
        "max_new_tokens": 3,
        "do_sample": True,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
    }


def test_standard_errors_by_hand():
    items = [(-3.0, 2), (-8.0, 4), (-2.0, 2)]
    error = ratio(*np.array(items, dtype=float).T)[1]
    assert harness._perplexity_stderr("word_perplexity", items, 5.0) == pytest.approx(5 * error)
    assert harness._perplexity_stderr("bits_per_byte", items, 5.0) == pytest.approx(
        error / math.log(2)
    )
    samples = [
        {"doc_id": i, "arguments": [], "target": "", "contains": x}
        for i, x in enumerate((1, 0, 0, 1))
    ]
    raw = {
        "results": {"t": {"contains,none": 0.5}},
        "samples": {"t": samples},
        "versions": {},
        "n-shot": {},
    }
    assert harness._task_scores("t", raw)["stderr"]["contains"] == pytest.approx(
        math.sqrt(1 / 3) / 2
    )


def test_needles_fit_into_every_model(monkeypatch):
    monkeypatch.setattr(
        harness, "_read_context_length", lambda name, _: {"a": 1024, "b": 4096}[name]
    )
    sources = [SimpleNamespace(needle=SimpleNamespace(length=n)) for n in (1024, 2048)]
    fitting, left_out = harness._fitting_needles(sources, ["a", "b"], EvalOptions(), LoadOptions())
    assert [s.needle.length for s in fitting] == [1024]
    assert list(left_out) == ["needles of more than 1024 tokens"]
