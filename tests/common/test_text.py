"""Text of messages: URLs without their secrets, durations."""

import math

import pytest

from nalanda.common.text import duration, redact


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
