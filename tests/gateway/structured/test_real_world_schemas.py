"""Whatever the compiled grammar of a schema lets through is valid under the schema that the client wrote."""

import json
import random
from pathlib import Path

import jsonschema
import pytest

from gateway.structured.json_schema import schema_grammar
from tests.gateway.structured.walking import Bench

SCHEMAS = json.loads(Path(__file__).with_name("schemas.json").read_text("utf-8"))
WALKS = 40
PATIENCE = 60


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("strict", [True, False])
def test_random_output_is_valid(bench: Bench, name: str, strict: bool) -> None:
    schema = SCHEMAS[name]
    validator = jsonschema.validators.validator_for(schema)(schema)
    grammar = bench.compile(schema_grammar(schema, field="schema", strict=strict))
    ended = 0
    for seed in range(WALKS):
        text = bench.walk(grammar, random.Random(seed), PATIENCE)
        if text is not None:
            ended += 1
            validator.validate(json.loads(text))
    assert ended > WALKS // 4
