"""The table of public classes: a mark for each property, and no difference that nobody verified."""

import pytest
from nalanda_lab import field

from nalanda.common.errors import InputError
from nalanda.testing.properties import PROPERTIES

NAMES = [each.__name__.replace("_", " ") for each in PROPERTIES]
LISTED = {
    "classes": {"one": "", "two": ""},
    "explained": {"packed by positions": ["two"]},
    "findings": {
        1: {"classes": ["two"], "properties": ["token by token", "causal"]},
        2: {"classes": ["two"], "properties": ["order of rows"]},
    },
}


def record(**verdicts):
    rows = [
        {"name": name, "verdict": verdicts.get(name.replace(" ", "_"), "holds")} for name in NAMES
    ]
    return {"properties": rows, "versions": {"nalanda": "0", "torch": "2.13.0"}}


def test_the_table_shows_the_worst_of_a_column():
    wrong = {"packed_by_positions": "differs", "token_by_token": "fails", "causal": "differs"}
    wrong |= {"order_of_rows": "differs", "saved_cache": "refused", "beam_search": "not offered"}
    records = {"one": record(half_precision="rounding"), "two": record(**wrong)}
    _, _, one, two, _, versions = field.table_of(records, LISTED).splitlines()
    assert set(one.split(" | ")[1:]) == {"✓", "✓ |"}
    assert two.startswith("| `two` | 1, 2 | ✓ | e | ✓ | 1 | ✓ | r | ✓ | ✓ | ✓ | – |")
    assert versions == "Versions: torch 2.13.0."


def test_a_difference_that_nobody_verified_is_in_no_table():
    with pytest.raises(InputError, match="one, causal: differs; verify it by hand"):
        field.table_of({"one": record(causal="differs")}, LISTED)
    with pytest.raises(InputError, match="one: no answer within 30 minutes"):
        field.table_of({"one": {"problem": "no answer within 30 minutes"}}, LISTED)


def test_every_property_has_a_column():
    shown = [name for names in field.COLUMNS.values() for name in names]
    assert sorted([*shown, "packed by cu seqlens"]) == sorted(NAMES)


def test_a_class_that_is_not_listed_is_one_line(tmp_path):
    with pytest.raises(InputError, match="mambo: not a class of field"):
        field.make_table(["mambo"], str(tmp_path), 1, False)
