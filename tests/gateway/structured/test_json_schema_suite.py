"""The JSON-Schema-Test-Suite against compiled grammars of the schemas that pass the strict check.

No invalid instance is ever let through. Valid ones are, but for those listed in `over_strict.json` with a reason.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.errors import InvalidRequest
from gateway.structured.json_schema import schema_grammar
from tests.gateway.structured.walking import Bench

FOLDER = Path(__file__).with_name("suite")
OVER_STRICT = json.loads(Path(__file__).with_name("over_strict.json").read_text("utf-8"))
#: Groups of the suite, and how many of their schemas can be enforced in full. A change is looked at, then written here.
GROUPS, ENFORCED = 409, 258


def groups() -> Iterator[tuple[str, dict[str, Any]]]:
    for file in sorted(FOLDER.rglob("*.json")):
        for group in json.loads(file.read_text("utf-8")):
            yield file.relative_to(FOLDER).as_posix(), group


def is_enforced(group: dict[str, Any]) -> bool:
    try:
        schema_grammar(group["schema"], field="schema", strict=True)
    except InvalidRequest:
        return False
    return True


EVERY = list(groups())
HELD = [entry for entry in EVERY if is_enforced(entry[1])]


def described(value: object) -> str:
    return str(value["description"]) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(("file", "group"), HELD, ids=described)
def test_only_valid_instances_are_let_through(bench: Bench, file: str, group: dict[str, Any]) -> None:
    grammar = bench.compile(schema_grammar(group["schema"], field="schema", strict=True))
    known = OVER_STRICT["tests"].get(file, {}).get(group["description"], {})
    for test in group["tests"]:
        accepted = bench.accepts(grammar, json.dumps(test["data"], ensure_ascii=False))
        expected = test["valid"] and test["description"] not in known
        assert accepted == expected, test["description"]


def test_as_many_schemas_as_ever_can_be_enforced() -> None:
    assert (len(EVERY), len(HELD)) == (GROUPS, ENFORCED)


def test_every_known_difference_has_a_reason() -> None:
    used = {why for groups_ in OVER_STRICT["tests"].values() for tests in groups_.values() for why in tests.values()}
    assert used == set(OVER_STRICT["reasons"])


@pytest.mark.parametrize(("file", "group"), EVERY, ids=described)
def test_what_is_not_strict_is_compiled_too(bench: Bench, file: str, group: dict[str, Any]) -> None:
    """What is refused then is wrong in any mode, or impossible."""
    words = ""
    try:
        bench.compile(schema_grammar(group["schema"], field="schema", strict=False))
    except InvalidRequest as error:
        words = error.message
    assert "cannot be enforced" not in words
