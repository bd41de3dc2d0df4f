"""Grammars that take a compiler more than their size lets one think."""

import json
from typing import Any

from common.sampling import GrammarKind, GrammarSpec


def _nested(depth: int) -> dict[str, Any]:
    if depth == 0:
        return {"type": "string"}
    inner = _nested(depth - 1)
    return {
        "oneOf": [
            {"type": "object", "properties": {name: inner}, "required": [name], "additionalProperties": False}
            for name in "abc"
        ]
    }


def nested_choices(depth: int) -> str:
    """A schema with 3 ** depth ways through it."""
    return json.dumps(_nested(depth))


def shared_choices(depth: int) -> str:
    """The same ways in a few lines, by reference."""
    definitions: dict[str, Any] = {"f0": {"type": "string"}}
    for level in range(1, depth + 1):
        inner = {"$ref": f"#/$defs/f{level - 1}"}
        definitions[f"f{level}"] = {
            "oneOf": [
                {"type": "object", "properties": {name: inner}, "required": [name], "additionalProperties": False}
                for name in "abc"
            ]
        }
    return json.dumps({"$ref": f"#/$defs/f{depth}", "$defs": definitions})


def many_rules(count: int) -> str:
    names = " ".join(f"r{i}" for i in range(count))
    rules = (f'r{i} ::= "a{i}" | r{(i * 7 + 1) % count} "b"' for i in range(count))
    return f"root ::= {names}\n" + "\n".join(rules)


def deep_arrays(depth: int) -> str:
    return '{"type": "array", "items": ' * depth + "{}" + "}" * depth


def _spec(kind: str, source: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind(kind), source)


#: Each ends in a grammar or in an InvalidRequest.
HOSTILE = {
    "nested 6": _spec("json_schema", nested_choices(6)),
    "nested 10": _spec("json_schema", nested_choices(10)),
    "shared 14": _spec("json_schema", shared_choices(14)),
    "optional letters": _spec("ebnf", 'root ::= ("a"?){200} "a"{200}'),
    "repeated repetition": _spec("ebnf", 'root ::= (((("a"{1,100} "b"){1,100} "c"){1,100} "d"){1,100} "e"){1,100}'),
    "ambiguous": _spec("ebnf", "root ::=" + ' ("a" | "aa" | "aaa" | "b"*)*' * 50),
    "ambiguous rules": _spec("ebnf", 'root ::= s\ns ::= s s | "a" | "b"'),
    "ambiguous rules, nothing too": _spec("ebnf", 'root ::= s\ns ::= s s s | s s | "a" | ""'),
    "many rules": _spec("ebnf", many_rules(5000)),
    "deep groups": _spec("ebnf", "root ::= " + "(" * 100_000 + '"a"' + ")" * 100_000),
    "deep schema": _spec("json_schema", deep_arrays(10_000)),
    "deep value": _spec("json_schema", '{"enum": [' + "[" * 10_000 + "]" * 10_000 + "]}"),
    "deep tag": _spec("structural_tag", "[" * 100_000),
    "large enum": _spec("json_schema", json.dumps({"enum": [f"value {i} \u00e9" for i in range(20_000)]})),
    "loop of references": _spec(
        "json_schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}'
    ),
}

#: Source, and a piece of what is said of it.
WRONG = {
    "ebnf: open group": (_spec("ebnf", 'root ::= ("a"'), ""),
    "ebnf: half a character": (_spec("ebnf", 'root ::= "\ud800"'), "surrogates"),
    "ebnf: no root": (_spec("ebnf", 'x ::= "a"'), "root"),
    "ebnf: unknown rule": (_spec("ebnf", "root ::= foo"), "foo"),
    "ebnf: empty": (_spec("ebnf", ""), "root"),
    "ebnf: never ends": (_spec("ebnf", "root ::= root"), "no output of this model"),
    "schema: no JSON": (_spec("json_schema", "{"), "JSON"),
    "schema: nothing": (_spec("json_schema", "false"), "false"),
    "schema: no schema": (_spec("json_schema", "3"), ""),
    "tag: no JSON": (_spec("structural_tag", "["), "not JSON"),
    "tag: of another type": (_spec("structural_tag", '{"type": "x"}'), "structural_tag"),
}
