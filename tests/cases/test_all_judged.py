"""No case is forgotten: each has a judgement in one of these files."""

import ast
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.cases.case_data import Case, load_cases

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def judgements() -> set[str]:
    """Names of all test functions."""
    modules = [ast.parse(file.read_text(encoding="utf-8")) for file in HERE.glob("test_*.py")]
    return {
        node.name
        for module in modules
        for node in module.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


@pytest.mark.parametrize("id_", load_cases())
def test_each_case_has_a_judgement(judgements: set[str], id_: str) -> None:
    prefix = f"test_{id_.lower().replace('-', '_')}_"
    assert any(name.startswith(prefix) for name in judgements), f"nobody judges {id_}"


def test_there_are_45() -> None:
    assert len(load_cases()) == 45


@pytest.mark.parametrize("id_", [id_ for id_, case in load_cases().items() if "variants" in case.request])
def test_every_variant_can_be_sent(cases: Mapping[str, Case], id_: str) -> None:
    for variant in cases[id_].variants.values():
        assert variant.path.startswith("/") and b"MODEL" not in (variant.content or b"")
        assert "$generate" not in str(variant.body) and "$each" not in str(variant.body)
