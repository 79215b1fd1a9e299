"""What counts as the same output: by mode, what was expected, what a program printed."""

from __future__ import annotations

import pytest

from roll_lite.rewards.code.compare import Compare, same_output

SAME: list[tuple[Compare, str, str]] = [
    ("auto", "", ""),
    ("auto", "", "\n\n"),
    ("auto", "3", "3\n"),
    ("auto", "3\n", "3"),
    ("auto", "1 2\n3", "1 2   \n3\t\n\n\n"),
    ("auto", "a\r\nb", "a\nb\n"),
    ("auto", "YES\n0.5", "YES\n0.50000"),
    ("auto", "0.5", ".5"),
    ("auto", "0.5", "5e-1"),
    ("auto", "0.5", "+0.5"),
    ("auto", "3.0", "3"),
    ("auto", "1.5 2.5", "1.50  2.50"),
    ("auto", "0.333333333", "0.3333333333333333"),
    ("auto", "-0.0", "0.0"),
    ("auto", "1000000.0", "1000000.5"),
    ("auto", "Case 1: 2.50", "Case 1: 2.5"),
    ("auto", "nan.", "nan."),
    ("auto", "0.052337142857", "0.052337"),
    ("auto", "0.000123456789", "0.000123"),
    ("auto", "0.0", "0.0000001"),
    ("auto", "0.000000", "0"),
    ("auto", "0.000000001", "1e-9"),
    ("auto", "0.000000001", "0.000000001001"),
    ("numeric", "0.000000001", "0.000000002"),
    ("auto", "  indented", "  indented"),
    ("lines", "a b\n\nc", "a b\n\nc\n"),
    ("lines", "0.5 \n", "0.5"),
    ("numeric", "1 2 3", "1\n2\n3"),
    ("numeric", "7", "+7"),
    ("numeric", "7", "7.0"),
    ("numeric", "0", "0.0000001"),
    ("numeric", "2.0000001", "2.0"),
    ("numeric", "inf", "inf"),
    ("numeric", "nan", "NaN"),
    ("numeric", "yes 0.1", "yes 0.1000000001"),
    ("numeric", "100000000000000000000000", "100000000000000000000000"),
    ("exact", "a \n", "a \n"),
]

DIFFERENT: list[tuple[Compare, str, str]] = [
    ("auto", "3", ""),
    ("auto", "3", "4"),
    ("auto", "3", "3 3"),
    ("auto", "3", "3\n3"),
    ("auto", "3 4", "3\n4"),
    ("auto", "3", "3.0"),
    ("auto", "3", "03"),
    ("auto", "3", "three"),
    ("auto", "1 2", "1  2"),
    ("auto", "a\nb", "b\na"),
    ("auto", "a\n\nb", "a\nb"),
    ("auto", "YES", "yes"),
    ("auto", "YES", "YES."),
    ("auto", "0.5", "0.51"),
    ("auto", "0.000000001", "0.000000002"),
    ("auto", "0.000000001", "0.0"),
    ("auto", "0.0000012", "0.000001"),
    ("auto", "1.0e-9", "2.0e-9"),
    ("auto", "0.0", "0.00001"),
    ("auto", "0.5", "1/2"),
    ("auto", "0.5", "0,5"),
    ("auto", "0.5", "0.5 0.5"),
    ("auto", "0.5 a", "0.5 b"),
    ("auto", "0.5", "nan"),
    ("auto", "1e6", "1000000.0"),
    ("auto", "1.0", "inf"),
    ("auto", " indented", "indented"),
    ("auto", "500000500000", "500000500000.0"),
    ("auto", "v1.2.3", "v1.2.30"),
    ("auto", "192.168.0.1", "192.168.0.10"),
    ("lines", "0.5", "0.50"),
    ("lines", "a", "A"),
    ("lines", "a\n\nb", "a\nb"),
    ("numeric", "1 2 3", "1 2"),
    ("numeric", "1 2", "2 1"),
    ("numeric", "123456789", "123456790"),
    ("numeric", "500000500000", "500000000000.0"),
    ("numeric", "0.1", "0.2"),
    ("numeric", "-1", "1"),
    ("numeric", "inf", "-inf"),
    ("numeric", "yes 1", "no 1"),
    ("numeric", "0x10", "16"),
    ("exact", "a", "a\n"),
    ("exact", "a b", "a  b"),
    ("exact", "0.5", "0.50"),
]


@pytest.mark.parametrize(("compare", "expected", "printed"), SAME)
def test_same(compare: Compare, expected: str, printed: str) -> None:
    assert same_output(expected, printed, compare, 1e-6)


@pytest.mark.parametrize(("compare", "expected", "printed"), DIFFERENT)
def test_different(compare: Compare, expected: str, printed: str) -> None:
    assert not same_output(expected, printed, compare, 1e-6)
