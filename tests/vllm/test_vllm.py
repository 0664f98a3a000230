"""vLLM continues texts as transformers does: every mixer and map, alone and in hybrids."""

import pytest
import torch

pytest.importorskip("vllm")

from vllm_engine import LENGTHS, NEW, ROWS, SIZES, build, difference

from nalanda import NalandaConfig, NalandaForCausalLM
from nalanda.model.feature_maps import FEATURE_MAPS
from nalanda.model.mixers import MIXERS
from nalanda.serve.vllm.architecture import page_bytes


def combinations():
    """Each mixer with constant states, and with each map that it takes."""
    rows = {}
    for mixer, row in MIXERS.items():
        if mixer != "softmax":
            rows[mixer] = {"mixer": mixer}
        for name in FEATURE_MAPS if row.map_name else ():
            options = {"mixer": mixer, "feature_map": name}
            if name != row.map_name and takes(options):
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
    "nala, softmax 1:1": {"mixer": ["nala", "softmax"] * 2},
    "kda, softmax 1:1, grouped": {"mixer": ["kda", "softmax"] * 2, "mixer_options": GROUPED},
    "gated_deltanet, softmax 2:1": {"mixer": ["gated_deltanet", "gated_deltanet", "softmax"] * 2},
    "mala, softmax 3:1": {"mixer": ["mala", "mala", "mala", "softmax"] * 2},
    "three mixers": {"mixer": ["mala", "gated_deltanet", "diag_attention"]},
    "sinusoidal positions": {"mixer": "deltanet", "position_embedding": "sinusoidal"},
}


@pytest.mark.parametrize("name", ALONE)
def test_it_continues_as_transformers_does(tmp_path, serve, name):
    certify(tmp_path, serve, name, ALONE[name])


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_continue_as_in_transformers(tmp_path, serve, name):
    certify(tmp_path, serve, name, HYBRIDS[name])


def certify(tmp_path, serve, name, options):
    folder, expected = build(tmp_path, **options)
    engine = serve(folder)
    first = difference(expected, engine.greedy(expected.prompts))
    again = engine.greedy(expected.prompts)  # the prompts' blocks are in the cache now
    cached = sum(output.num_cached_tokens or 0 for output in again)
    largest = max(first, difference(expected, again))
    ROWS.append((name, largest))  # texts are equal: `difference` fails where one is not
    assert cached > 0
    assert largest < 1e-4
    assert len(expected.tokens[0]) == NEW


@pytest.mark.parametrize("mixer", ["gated_deltanet", "mala", "diag_attention"])
def test_a_page_that_another_request_left_is_empty(tmp_path, serve, mixer):
    """A prompt of one token comes to the mixers like a token of decoding."""
    folder, expected = build(tmp_path, mixer=mixer)
    engine = serve(folder, max_num_seqs=2)
    first = [list(output.outputs[0].token_ids) for output in engine.greedy([[7]])]
    engine.greedy(expected.prompts)
    assert [list(output.outputs[0].token_ids) for output in engine.greedy([[7]])] == first


def test_many_requests_at_once(tmp_path, serve):
    folder, expected = build(tmp_path, mixer=["nala", "gated_deltanet", "softmax"])
    engine = serve(folder)
    outputs = engine.greedy(expected.prompts * 4)
    assert len(outputs) == 32
    for i in range(0, len(outputs), len(LENGTHS)):
        assert difference(expected, outputs[i : i + len(LENGTHS)]) < 1e-4


def test_a_text_may_be_longer_than_those_of_training(tmp_path, serve):
    folder, _ = build(tmp_path, mixer="gated_deltanet", max_position_embeddings=64)
    engine = serve(folder, max_model_len=256)
    (output,) = engine.greedy([[5] * 200])
    assert len(output.outputs[0].token_ids) == NEW


@pytest.mark.parametrize("state_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("mixer", ["deltanet", ["gated_deltanet", "softmax"]], ids=str)
def test_rounded_states_give_our_text(tmp_path, serve, mixer, state_dtype):
    """Whole prompts, so that both round after the same tokens."""
    folder, expected = build(tmp_path, state_dtype=state_dtype, mixer=mixer)
    rounding = {"additional_config": {"state_dtype": state_dtype}}
    engine = serve(folder, max_num_batched_tokens=2048, enable_prefix_caching=False, **rounding)
    assert difference(expected, engine.greedy(expected.prompts)) < 0.1


def test_pages_of_int8_are_small_and_cached(tmp_path, serve):
    folder, expected = build(tmp_path, mixer="gated_deltanet", conv_size=0)
    engine = serve(folder, additional_config={"state_dtype": "int8"})
    # Two matrices of F × 32: a byte and a half a number, four a channel.
    config = engine.llm.llm_engine.vllm_config
    numbers, channels = 2 * 32 * 32, 2 * 32
    assert page_bytes(config) == 1.5 * numbers + 4 * channels
    for _ in range(2):
        outputs = engine.greedy(expected.prompts)
        for exact, output in zip(expected.log_probabilities, outputs, strict=True):
            first = output.outputs[0].logprobs[0]
            assert abs(max(x.logprob for x in first.values()) - exact[0]) < 0.1
    assert sum(output.num_cached_tokens or 0 for output in outputs) > 0


def test_bf16_stays_near_fp32(tmp_path, serve):
    folder, expected = build(tmp_path, mixer=["nala", "softmax"])
    engine = serve(folder, dtype="bfloat16")
    outputs = engine.greedy(expected.prompts)
    for exact, output in zip(expected.log_probabilities, outputs, strict=True):
        first = output.outputs[0].logprobs[0]
        largest = max(value.logprob for value in first.values())
        assert abs(largest - exact[0]) < 0.5


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
        ({"enable_lora": True}, "--enable-lora: merge"),
        ({"quantization": "fp8"}, "--quantization"),
        ({"additional_config": {"state_dtype": "int4"}}, "state_dtype 'int4' is unknown"),
        ({"mamba_ssm_cache_dtype": "float16"}, "state_dtype 'float16' is unknown"),
    ],
)
def test_what_is_not_served_is_refused_by_name(tmp_path, serve, options, problem):
    folder, _ = build(tmp_path, mixer="gated_deltanet")
    with pytest.raises(ValueError, match=problem):
        serve(folder, **options)


def test_softmax_layers_with_convolutions_are_refused(tmp_path, serve):
    folder, _ = build(tmp_path, mixer="softmax", mixer_options={"conv_size": 4})
    with pytest.raises(ValueError, match="conv_size: softmax layers with it are not served"):
        serve(folder)
