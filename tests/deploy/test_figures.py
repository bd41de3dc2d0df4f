"""Figures for people: readable numbers, tables that are cut nowhere, and the report of a benchmark made of both."""

import re
from typing import Any

import pytest

from deploy.bench.report import report_text
from deploy.figures import short, table


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *((19423.7, "19424"), (123.4, "123"), (19.44, "19.4"), (1.944, "1.94"), (0.1944, "0.194")),
        *((0.00194, "0.0019"), (0.0, "0"), (-19.44, "-19.4"), (1e12, "1000000000000"), (float("inf"), "inf")),
    ],
)
def test_numbers_have_about_three_digits_and_no_exponent(value: float, shown: str) -> None:
    assert short(value) == shown


def test_words_to_the_left_numbers_to_the_right() -> None:
    rows = [("name", "count"), ("a long name", "1"), ("b", "123456")]
    assert table(iter(rows), words=1).splitlines() == [
        "name          count",
        "-----------  ------",
        "a long name       1",
        "b            123456",
    ]


def level(load: str, milliseconds: float | None, errors: dict[str, int], share: float | None) -> dict[str, Any]:
    names = ("mean", "p50", "p95", "p99")
    times = None if milliseconds is None else {name: milliseconds * n for n, name in enumerate(names, 1)}
    return {
        "load": load,
        "completed": 0 if milliseconds is None else 123_456,
        "errors": errors,
        "requests_per_s": 12.345,
        "output_tokens_per_s": 123456.7,
        "total_tokens_per_s": 1234567.8,
        "cached_tokens": 10_000_000,
        "server": {} if share is None else {"transfer_hidden_share": share},
        **dict.fromkeys(("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"), times),
    }


def test_a_report_fits_into_a_hundred_columns_and_is_whole() -> None:
    levels = [
        level("1 at once", 19400.0, {}, 0.97),
        level("1024 at once", 0.26, {"503 overloaded": 3, "ReadTimeout": 1}, None),
        level("0.5 a second", None, {}, 0.0),
    ]
    shown = report_text(levels)
    assert max(map(len, shown.splitlines())) <= 100
    assert "…" not in shown
    assert not re.search(r"\de[+-]\d", shown)
    for heading in ("errors", "output tok/s", "hidden transfer", "mean", "p50", "p95", "p99"):
        assert heading in shown
    rates = [line.split() for line in shown.splitlines() if "at once" in line]
    assert rates[0] == ["1", "at", "once", "123456", "0", "12.3", "123457", "1234568", "10000000", "97%"]
    assert rates[1][4] == "4"
    assert ["1", "at", "once", "TTFT", "19400", "38800", "58200", "77600"] in rates
    assert ["1024", "at", "once", "TTFT", "0.260", "0.520", "0.780", "1.04"] in rates
    assert shown.endswith("errors at 1024 at once: 3 x 503 overloaded\nerrors at 1024 at once: 1 x ReadTimeout")
    assert all(
        sum(line.split()[-5:-4] == [name] for line in shown.splitlines()) == 3 for name in ("ITL", "TPOT", "E2E")
    )
