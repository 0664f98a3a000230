"""Golden vectors and state files, as numpy alone reads them. docs/golden.md and docs/state_file.md define both."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file
from tiny_models import build, ids

from nalanda.model import FEATURE_MAPS
from nalanda.testing.golden import RULES, golden_vectors


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    file = tmp_path_factory.mktemp("golden") / "golden.safetensors"
    save_file(golden_vectors(), file)
    assert file.stat().st_size < 500_000
    return file


@pytest.mark.slow
def test_one_command_writes_the_file(golden, tmp_path):
    file = tmp_path / "golden.safetensors"
    subprocess.run([sys.executable, "-m", "nalanda.testing.golden", file], check=True)
    written, expected = load_torch(file), load_torch(golden)
    assert all(torch.equal(written[name], expected[name]) for name in expected)


def run_rule(t):
    """Outputs and final state of a rule from the tensors `t` of a golden file: the reader of docs/golden.md."""
    q, k = (np.repeat(t[name], 2, axis=2) for name in ("q", "k"))  # [B, T, HV, K]
    v, S = t["v"], t["initial_state"]
    delta = "beta" in t
    beta = t["beta"][..., None] if delta else 1.0
    g = t.get("g", np.zeros(v.shape[:3]))
    g = g if g.ndim == 4 else g[..., None]
    erased = np.broadcast_to(delta * beta * t.get("erase", 1.0), k.shape)
    written = np.broadcast_to(beta * t.get("write", 1.0), v.shape)

    outputs = []
    for i in range(v.shape[1]):
        S = np.exp(g[:, i])[..., None] * S
        found = np.einsum("bhk,bhkv->bhv", erased[:, i] * k[:, i], S)
        S = S + k[:, i, :, :, None] * (written[:, i] * v[:, i] - found)[:, :, None]
        outputs.append(np.einsum("bhk,bhkv->bhv", q[:, i], S) / np.sqrt(k.shape[-1]))
    return np.stack(outputs, 1), S


@pytest.mark.parametrize("rule", RULES)
def test_numpy_computes_a_rule_from_the_file_and_the_page(golden, rule):
    start = f"rules/{rule}/"
    t = {k.removeprefix(start): x for k, x in load_file(golden).items() if k.startswith(start)}
    o, state = run_rule(t)
    np.testing.assert_allclose(o, t["o"], rtol=0, atol=1e-12)
    np.testing.assert_allclose(state, t["final_state"], rtol=0, atol=1e-12)


def test_the_file_has_all_gradients_of_all_rules_and_maps(golden):
    vectors = load_torch(golden)
    assert vectors.keys() == golden_vectors().keys()
    assert all(x.dtype == torch.float64 and bool(x.isfinite().all()) for x in vectors.values())
    for rule in RULES:
        names = {name.split("/")[2] for name in vectors if name.startswith(f"rules/{rule}/")}
        assert {f"grad.{name}" for name in names if not name.startswith("grad.")} <= names
    for name in FEATURE_MAPS:
        assert f"maps/{name}/grad.q" in vectors


def one_token(state, weights, layer, x):
    """The output of a Gated DeltaNet layer for a token x `[D]` behind the text of a state file, as the page says."""
    S = state[f"layers.{layer}.recurrent"][0]  # [H, K, V]
    H, K, V = S.shape

    def silu(y):
        return y / (1 + np.exp(-y))

    def convolved(name):
        window = np.vstack(
            [state[f"layers.{layer}.conv_{name}"][0], weights[f"{name}_proj.weight"] @ x]
        )
        return silu((window * weights[f"{name}_conv1d.weight"][:, 0].T).sum(0))  # [4, ·] to [·]

    q, k = convolved("q").reshape(H, K), convolved("k").reshape(H, K)
    v = convolved("v").reshape(H, V)
    q, k = (y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
    beta = 1 / (1 + np.exp(-weights["b_proj.weight"] @ x))  # [H]
    step = np.log1p(np.exp(weights["a_proj.weight"] @ x + weights["decay.dt_bias"]))
    S = np.exp(-np.exp(weights["decay.A_log"]) * step)[:, None, None] * S

    S = S + beta[:, None, None] * k[:, :, None] * (v - np.einsum("hk,hkv->hv", k, S))[:, None]
    o = np.einsum("hk,hkv->hv", q, S) / np.sqrt(K)
    o = o / np.sqrt((o * o).mean(-1, keepdims=True) + 1e-6) * weights["o_norm.weight"]
    return weights["o_proj.weight"] @ (o.reshape(-1) * silu(weights["g_proj.weight"] @ x))


def test_numpy_continues_a_saved_state_by_a_token(tmp_path):
    model = build("gated_deltanet", "silu", num_heads=2, dtype=torch.float32, hidden_size=32)
    tokens, seen = ids(1, 10), {}
    model.read(tokens[:, :9]).save(tmp_path / "text.safetensors")
    state = load_file(tmp_path / "text.safetensors")
    assert state["last"].tolist() == [[int(tokens[0, 8])]]
    assert state["lengths"].tolist() == [9]

    # What the second layer's mixer gets and returns for the token that the state has not read.
    mixer = model.model.layers[1].mixer
    mixer.register_forward_hook(lambda _, inputs, output: seen.update(x=inputs[0], y=output))
    with torch.no_grad():
        model(tokens[:, :9], use_cache=False)
    y = seen["y"][0] if isinstance(seen["y"], tuple) else seen["y"]
    weights = {name: x.numpy() for name, x in mixer.state_dict().items()}
    found = one_token(state, weights, 1, seen["x"][0, 8].numpy())
    np.testing.assert_allclose(found, y[0, 8].numpy(), rtol=0, atol=1e-4)
