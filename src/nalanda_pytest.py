"""A fixture for anybody's tests: `check_model`. pytest finds it where Nalanda is installed."""

from collections.abc import Callable

import pytest


@pytest.fixture(name="check_model")
def fixture() -> Callable:
    """`nalanda.testing.check_model`: raises AssertionError for a property that differs or fails."""
    from nalanda.testing import check_model

    return check_model
