"""oneDNN multiplies fp32 matrices where it is as exact as torch's default and clearly faster, and never else."""

import pytest
import torch

from nalanda.common import products
from nalanda.common.products import choose_product_route, product_route, set_product_route


@pytest.fixture(autouse=True)
def free_choice(monkeypatch):
    monkeypatch.delenv(products.ENVIRONMENT)
    yield
    set_product_route("default")


def pretend(monkeypatch, seconds: float, error: float) -> None:
    """oneDNN takes so many seconds where the default takes one, and adds the error to one entry."""

    def multiply(a, b):
        onednn = product_route() == "onednn"
        product = a @ b
        product[0, 0] += error if onednn else 0.0
        return product, seconds if onednn else 1.0

    monkeypatch.setattr(products, "multiply", multiply)


@pytest.mark.parametrize(
    ("seconds", "error", "route"),
    [
        pytest.param(0.5, 0.0, "onednn", id="faster and as exact"),
        pytest.param(0.5, 0.1, "default", id="faster and rounded to bf16"),
        pytest.param(0.5, float("nan"), "default", id="faster and broken"),
        pytest.param(0.9, 0.0, "default", id="hardly faster"),
        pytest.param(2.0, 0.0, "default", id="slower"),
    ],
)
def test_the_choice_is_by_value_and_time(monkeypatch, seconds, error, route):
    pretend(monkeypatch, seconds, error)
    state = torch.get_rng_state()
    assert choose_product_route() == route
    assert product_route() == "default"  # measured, not set
    assert torch.equal(torch.get_rng_state(), state)


def test_one_variable_turns_it_off(monkeypatch):
    pretend(monkeypatch, seconds=0.5, error=0.0)
    monkeypatch.setenv(products.ENVIRONMENT, "0")
    assert choose_product_route() == "default"


def test_the_chosen_route_is_exact_here():
    a, b = torch.randn(256, 256), torch.randn(256, 256)
    exact = a.double() @ b.double()
    bound = products.ERROR_FACTOR * (a @ b - exact).abs().max()
    set_product_route(choose_product_route())
    assert (a @ b - exact).abs().max() <= bound
