"""oneDNN multiplies fp32 matrices where it is as exact as torch's default and clearly faster, and never else."""

import pytest
import torch

from nalanda.common import products
from nalanda.common.products import choose_product_route, product_route, set_product_route
from nalanda.model import chunk_channels
from nalanda.model.ops import delta_rule


@pytest.fixture(autouse=True)
def free_choice(monkeypatch, tmp_path):
    monkeypatch.delenv(products.ENVIRONMENT)
    monkeypatch.setenv("NALANDA_CPU_CACHE", str(tmp_path / "cache"))
    yield
    set_product_route("default")


def pretend(monkeypatch, *, linear: float = 1.0, chunk: float = 1.0, error: float = 0.0) -> None:
    """oneDNN takes so many seconds where the default takes one, and adds the error to one entry of each product."""

    def multiply(pairs):
        onednn = product_route() == "onednn"
        results = [a @ b for a, b in pairs]
        for x in results:
            x.view(-1)[0] += error if onednn else 0.0
        of_chunks = pairs[0][0].ndim == 3
        return results, (chunk if of_chunks else linear) if onednn else 1.0

    monkeypatch.setattr(products, "multiply", multiply)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("onednn", "route"),
    [
        pytest.param({"linear": 0.5, "chunk": 0.5}, "onednn", id="faster"),
        pytest.param({"linear": 0.5, "error": 0.1}, "default", id="faster and rounded to bf16"),
        pytest.param({"linear": 0.5, "error": float("nan")}, "default", id="faster and broken"),
        pytest.param({"linear": 0.96, "chunk": 0.96}, "default", id="hardly faster"),
        pytest.param({"linear": 2.0, "chunk": 2.0}, "default", id="slower"),
        pytest.param({"linear": 0.9, "chunk": 1.2}, "onednn", id="slower in few products"),
        pytest.param({"linear": 0.9, "chunk": 2.0}, "default", id="much slower in few products"),
        pytest.param({"linear": 1.0, "chunk": 0.6}, "default", id="faster in few products"),
    ],
)
def test_the_choice_is_by_value_and_time(monkeypatch, onednn, route):
    pretend(monkeypatch, **onednn)
    state = torch.get_rng_state()
    assert choose_product_route() == route
    assert product_route() == "default"  # measured, not set
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
def test_a_machine_measures_once(monkeypatch, tmp_path):
    """Else two runs of one recipe would round differently, by the clock alone."""
    pretend(monkeypatch, linear=0.5, chunk=0.5)
    assert choose_product_route() == "onednn"
    pretend(monkeypatch, linear=2.0, chunk=2.0)
    assert choose_product_route() == "onednn"

    # Another number of threads is another measurement.
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert choose_product_route() == "default"

    for file in (tmp_path / "cache").glob("products-*"):
        file.write_text("onedn")  # cut short
    assert choose_product_route() == "default"


def test_a_closed_folder_is_no_obstacle(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("NALANDA_CPU_CACHE", str(tmp_path / "file"))
    pretend(monkeypatch, linear=0.5, chunk=0.5)
    assert choose_product_route() == "onednn"


def test_a_late_round_does_not_decide(monkeypatch):
    """One round of seven in which oneDNN seems fast, because something else took the processor."""
    pretend(monkeypatch)
    multiply, calls = products.multiply, []

    def disturbed(pairs):
        calls.append(pairs)
        results, seconds = multiply(pairs)
        return results, seconds * (100 if len(calls) % (2 * products.ROUNDS) == 1 else 1)

    monkeypatch.setattr(products, "multiply", disturbed)
    assert choose_product_route() == "default"


def test_one_variable_turns_it_off(monkeypatch):
    pretend(monkeypatch, linear=0.5, chunk=0.5)
    monkeypatch.setenv(products.ENVIRONMENT, "0")
    assert choose_product_route() == "default"


def test_the_chosen_route_is_exact_here():
    a, b = torch.randn(256, 256), torch.randn(256, 256)
    exact = a.double() @ b.double()
    bound = products.ERROR_FACTOR * (a @ b - exact).abs().max()
    set_product_route(choose_product_route())
    assert (a @ b - exact).abs().max() <= bound


def test_products_of_few_rows_stay_with_the_default(monkeypatch):
    """A decay per key channel multiplies spans of 1, 2, 4, … tokens."""
    routes = []

    def view(x, size):
        routes.append(product_route())
        return below_diagonal(x, size)

    below_diagonal = chunk_channels.below_diagonal
    monkeypatch.setattr(chunk_channels, "below_diagonal", view)
    q, k, v = (torch.randn(1, 64, 1, 8, requires_grad=True) for _ in range(3))
    beta, g = torch.rand(1, 64, 1), -torch.rand(1, 64, 1, 8)

    set_product_route("onednn")
    delta_rule(q, k, v, beta, g, backend="torch")[0].sum().backward()
    assert len(routes) > 6
    assert set(routes) == {"default"}
    assert product_route() == "onednn"

    with pytest.raises(KeyError), chunk_channels.without_onednn():
        raise KeyError
    assert product_route() == "onednn"
