"""vLLM continues texts as transformers does: every mixer and map, alone and in hybrids."""

import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")

from vllm_engine import LENGTHS, NEW, ROWS, SIZES, Row, build, difference, serving

from nalanda import NalandaConfig, NalandaForCausalLM
from nalanda.model.feature_maps import FEATURE_MAPS
from nalanda.model.mixers import MIXERS
from nalanda.serve.vllm.architecture import page_bytes
from nalanda.serve.vllm.layers import check_blocks

ROOT = Path(__file__).parents[2]


def combinations():
    """Each mixer with constant states, and with each map that it takes."""
    rows = {}
    for mixer, row in MIXERS.items():
        if mixer not in ("softmax", "forgetting"):
            rows[mixer] = {"mixer": mixer}
        for name in FEATURE_MAPS if row.rule.map else ():
            options = {"mixer": mixer, "feature_map": name}
            if name != row.rule.map and takes(options):
                rows[f"{mixer} + {name}"] = options
    return rows


def takes(options):
    try:
        with torch.device("meta"):
            NalandaForCausalLM(NalandaConfig(**SIZES, num_hidden_layers=1, **options))
    except ValueError:
        return False
    return True


ALONE = combinations()
GROUPED = {"softmax": {"num_kv_heads": 1, "qk_norm": True, "gate": "head", "rotary_dim": 16}}
HYBRIDS = {
    "softmax": {"mixer": ["softmax", "softmax"]},
    "softmax with a window": {"mixer": "softmax", "mixer_options": {"window": 16}},
    "forgetting with a window": {"mixer": "forgetting", "mixer_options": {"window": 16}},
    "nala, softmax 1:1": {"mixer": ["nala", "softmax"] * 2},
    "kda, softmax 1:1, grouped": {"mixer": ["kda", "softmax"] * 2, "mixer_options": GROUPED},
    "gated_deltanet, softmax 2:1": {"mixer": ["gated_deltanet", "gated_deltanet", "softmax"] * 2},
    "mala, softmax 3:1": {"mixer": ["mala", "mala", "mala", "softmax"] * 2},
    "three mixers": {"mixer": ["mala", "gated_deltanet", "diag_attention"]},
    "sinusoidal positions": {"mixer": "deltanet", "position_embedding": "sinusoidal"},
    "130 tokens": {"mixer": "deltanet", "vocab_size": 130},
    "130 tokens, a tied head": {
        "mixer": "deltanet",
        "vocab_size": 130,
        "tie_word_embeddings": True,
    },
}


@pytest.mark.parametrize("name", ALONE)
def test_it_continues_as_transformers_does(tmp_path, serve, name):
    certify(tmp_path, serve, name, ALONE[name])


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_continue_as_in_transformers(tmp_path, serve, name):
    certify(tmp_path, serve, name, HYBRIDS[name])


def prompts_of(expected):
    return [continuation.prompt for continuation in expected]


def certify(tmp_path, serve, name, options, lengths=LENGTHS, **engine_options):
    folder, expected = build(tmp_path, lengths=lengths, **options)
    engine = serve(folder, **engine_options)
    answers = engine.greedy(prompts_of(expected))
    again = engine.greedy(prompts_of(expected))  # the prompts' blocks are in the cache now

    largest = difference(expected * 2, answers + again)
    assert sum(answer.cached for answer in again) > 0
    assert largest < 1e-4
    assert len(again[0].tokens) == NEW
    ROWS.append(Row(name, 2 * len(expected), largest))


LONG = (1, 17, 64, 131, 200, 300, 412, 523)
"""Tokens of prompts below, at and across the bounds of blocks of 16 to 256."""


@pytest.mark.parametrize("option", ["block_size", "mamba_block_size"])
@pytest.mark.parametrize("tokens", [32, 256])
def test_blocks_of_any_size_are_cached(tmp_path, serve, option, tokens):
    """A call of 96 tokens ends within the larger ones."""
    name = f"gated_deltanet, {option} {tokens}"
    settings = {option: tokens, "max_model_len": 640, "max_num_batched_tokens": 96}
    certify(tmp_path, serve, name, {"mixer": "gated_deltanet"}, LONG, **settings)


HEAD_OF_256 = {"hidden_size": 64, "num_heads": 1, "head_dim": 256}
LOADS = {
    "gated_deltanet, blocks of 16": (
        {"mixer": "gated_deltanet"},
        {"max-num-batched-tokens": 96, "num-gpu-blocks-override": 40},
    ),
    "three layers, blocks of 128": (
        {"mixer": ["nala", "gated_deltanet", "softmax"]},
        {"max-num-batched-tokens": 96, "num-gpu-blocks-override": 30},
    ),
    "three layers, blocks of 256": (
        {"mixer": ["nala", "gated_deltanet", "softmax"]} | HEAD_OF_256,
        {"max-num-batched-tokens": 512, "num-gpu-blocks-override": 20},
    ),
}
"""Models, and options of the server: fewer blocks than all requests need at once."""


@pytest.mark.parametrize("name", LOADS)
def test_the_server_continues_under_load(tmp_path, name):
    """Requests come and leave in any order; the prefix cache gives each the state of its own text."""
    model, options = LOADS[name]
    folder, expected = build(tmp_path, lengths=LONG, **model)
    flags = {"max-num-seqs": 8, "max-model-len": 640} | options
    shuffled = random.Random(0).sample(expected * 4, 4 * len(expected))

    largest, texts, tokens, aborts = 0.0, 0, 0, []
    flags = [f"--{name}={value}" for name, value in flags.items()]
    with serving(folder, "--skip-tokenizer-init", *flags) as server:
        # All at once; beside others that leave early; one after the other from the cache of both.
        for questions, clients in ((expected, 8), (shuffled, 8), (expected, 1)):
            with ThreadPoolExecutor(clients) as pool:
                asked = []
                for i, question in enumerate(questions):
                    if questions is shuffled and i % 4 == 0:
                        aborts.append(pool.submit(server.abort, question.prompt))
                    # Of different lengths, so that the next ones arrive amid others.
                    asked.append(pool.submit(server.greedy, question.prompt, NEW - i % 8))
            answers = [answer.result() for answer in asked]
            largest = max(largest, difference(questions, answers))
            texts += len(answers)
            tokens += sum(len(answer.tokens) for answer in answers)
        hits, generated = server.count("prefix_cache_hits"), server.count("generation_tokens")

    ROWS.append(Row(f"HTTP: {name}", texts, largest))
    assert largest < 1e-4
    assert hits > 0
    left_out = sum(abort.result() for abort in aborts) - (generated - tokens)
    assert left_out > 0, "no request left early"


def test_questions_about_a_text_find_its_state(tmp_path):
    """As examples/document.py asks them."""
    folder, _ = build(tmp_path, mixer="gated_deltanet")
    text, questions = tmp_path / "text", ["5 6 7", "9", " ".join(["11"] * 40)]
    text.write_text(" ".join(str(3 + i % 125) for i in range(500)))
    command = [sys.executable, str(ROOT / "examples/document.py"), str(text), *questions]
    with serving(folder, "--max-model-len=4096") as server:
        url = f"http://127.0.0.1:{server.port}/v1"
        done = subprocess.run([*command, "--url", url], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        hits = server.count("prefix_cache_hits")
    assert len(done.stdout.splitlines()) == 1 + len(questions) + 1
    assert hits >= len(questions) * (500 - 16)


def test_a_step_that_leaves_a_block_unfilled_stops_the_engine():
    """The block's state would be found by later texts."""
    past, lengths = torch.tensor([0, 5, 15, 32, 64]), torch.tensor([48, 16, 16, 75, 90])
    check_blocks(past, lengths, 16)
    with pytest.raises(RuntimeError, match="leaves a block of 16 tokens after 11"):
        check_blocks(torch.tensor([0, 75]), torch.tensor([20, 81]), 16)


@pytest.mark.parametrize("mixer", ["gated_deltanet", "mala", "diag_attention"])
def test_a_page_that_another_request_left_is_empty(tmp_path, serve, mixer):
    """A prompt of one token comes to the mixers like a token of decoding."""
    folder, expected = build(tmp_path, mixer=mixer)
    engine = serve(folder, max_num_seqs=2)
    first = engine.greedy([[7]])
    engine.greedy(prompts_of(expected))
    assert engine.greedy([[7]])[0].tokens == first[0].tokens


def test_many_requests_at_once(tmp_path, serve):
    folder, expected = build(tmp_path, mixer=["nala", "gated_deltanet", "softmax"])
    engine = serve(folder)
    assert difference(expected * 4, engine.greedy(prompts_of(expected) * 4)) < 1e-4


def test_a_text_may_be_longer_than_those_of_training(tmp_path, serve):
    folder, _ = build(tmp_path, mixer="gated_deltanet", max_position_embeddings=64)
    engine = serve(folder, max_model_len=256)
    (answer,) = engine.greedy([[5] * 200])
    assert len(answer.tokens) == NEW


@pytest.mark.parametrize("state_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("mixer", ["deltanet", ["gated_deltanet", "softmax"]], ids=str)
def test_rounded_states_give_our_text(tmp_path, serve, mixer, state_dtype):
    """Whole prompts, so that both round after the same tokens."""
    folder, expected = build(tmp_path, state_dtype=state_dtype, mixer=mixer)
    rounding = {"additional_config": {"state_dtype": state_dtype}}
    engine = serve(folder, max_num_batched_tokens=2048, enable_prefix_caching=False, **rounding)
    assert difference(expected, engine.greedy(prompts_of(expected))) < 0.1


def test_pages_of_int8_are_small_and_cached(tmp_path, serve):
    folder, expected = build(tmp_path, mixer="gated_deltanet", conv_size=0)
    engine = serve(folder, additional_config={"state_dtype": "int8"})
    # Two matrices of F × 32: a byte and a half a number, four a channel.
    config = engine.llm.llm_engine.vllm_config
    numbers, channels = 2 * 32 * 32, 2 * 32
    assert page_bytes(config) == 1.5 * numbers + 4 * channels
    for _ in range(2):
        answers = engine.greedy(prompts_of(expected))
        for exact, answer in zip(expected, answers, strict=True):
            assert abs(answer.log_probabilities[0] - exact.log_probabilities[0]) < 0.1
    assert sum(answer.cached for answer in answers) > 0


WIDE = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
FP8 = pytest.mark.skipif(not WIDE, reason="vLLM's fp8 cache on a CPU needs AVX-512")


@pytest.mark.parametrize(
    "option", [{"dtype": "bfloat16"}, pytest.param({"kv_cache_dtype": "fp8"}, marks=FP8)], ids=str
)
def test_rounded_activations_and_keys_stay_near_fp32(tmp_path, serve, option):
    folder, expected = build(tmp_path, mixer=["nala", "softmax"])
    engine = serve(folder, **option)
    answers = engine.greedy(prompts_of(expected))
    for exact, answer in zip(expected, answers, strict=True):
        assert abs(answer.log_probabilities[0] - exact.log_probabilities[0]) < 0.5


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
        ({"enable_lora": True}, "--enable-lora: merge"),
        ({"quantization": "fp8"}, "--quantization"),
        ({"additional_config": {"state_dtype": "int4"}}, "state_dtype 'int4' is unknown"),
        ({"mamba_ssm_cache_dtype": "float16"}, "state_dtype 'float16' is unknown"),
        (
            {"additional_config": {"state_dtyp": "int8"}},
            "--additional-config: unknown: state_dtyp; its one key is state_dtype",
        ),
        ({"runner": "pooling"}, "--runner pooling: embeddings are not served"),
    ],
)
def test_what_is_not_served_is_refused_by_name(tmp_path, serve, options, problem):
    folder, _ = build(tmp_path, mixer="gated_deltanet")
    with pytest.raises(ValueError, match=problem):
        serve(folder, **options)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"mixer": "softmax", "mixer_options": {"conv_size": 4}},
            "conv_size: softmax layers with it are not served",
        ),
        ({"mixer": "forgetting"}, "mixer forgetting: its gate is served with a window alone"),
    ],
)
def test_attention_that_is_not_served_is_refused(tmp_path, serve, options, problem):
    folder, _ = build(tmp_path, **options)
    with pytest.raises(ValueError, match=problem):
        serve(folder)
