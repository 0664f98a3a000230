"""Text of messages: URLs without their secrets, durations, numbers."""

import math

import pytest

from nalanda.common.text import duration, redact, si


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("s3://k:s/ecret@b", "s3://***@b"),
        ("https://u:p@ss@host/a", "https://***@host/a"),
        ("https://t@ken@host/a@b", "https://***@host/a@b"),
        ("https://u:p@a,https://v:q/r@b", "https://***@a,https://***@b"),
        ("'s3://k:s/ecret@b' and 'x@y'", "'s3://***@b' and 'x@y'"),
        # The @ of a path, with or without a port before it, is no secret.
        ("https://host/@user/a", "https://host/@user/a"),
        ("https://host:8080/data@v1/a", "https://host:8080/data@v1/a"),
        ("s3://bucket/a:b@c", "s3://bucket/a:b@c"),
    ],
)
def test_secrets_of_urls_are_not_shown(text, plain):
    assert redact(text) == plain


@pytest.mark.parametrize("seconds", [math.inf, -math.inf, math.nan])
def test_a_duration_that_is_no_number_is_unknown(seconds):
    assert duration(seconds) == "unknown"


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999.4, "999"),
        (999.5, "1 K"),
        (340e6, "340 M"),
        (205.7e9, "205.7 G"),
        (999.97e9, "1 T"),
        (989e12, "989 T"),  # an H100's peak
        (8 * 989e12, "7.912 P"),
        (2e18, "2 E"),
    ],
)
def test_a_large_number_has_its_unit(number, text):
    assert si(number) == text
