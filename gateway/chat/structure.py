"""Builds structural tags (`GrammarKind.STRUCTURAL_TAG`): grammars for text in which calls follow their marks.

Nodes are the plain JSON that xgrammar reads. Nothing is compiled here; the workers do that. A mark in them
(`common/text/marks.py`) stands for its letters and, where the model has one, for the special token too.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from common.sampling import GrammarKind, GrammarSpec

Node = dict[str, Any]


def schema(json_schema: Mapping[str, Any] | None) -> Node:
    """JSON text that fits the schema; None: any object."""
    return {"type": "json_schema", "json_schema": {"type": "object"} if json_schema is None else json_schema}


def regex(pattern: str) -> Node:
    return {"type": "regex", "pattern": pattern}


def const_string(value: str) -> Node:
    return {"type": "const_string", "value": value}


def any_text() -> Node:
    """Whatever does not hold the end of the tag around it."""
    return {"type": "any_text"}


def tag(begin: str, content: Node, end: str) -> Node:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def tags(nodes: Sequence[Node], separator: str, *, one: bool) -> Node:
    """One tag at least (exactly one if `one`), and nothing but tags."""
    return {
        "type": "tags_with_separator",
        "tags": list(nodes),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": one,
    }


def triggered(triggers: Sequence[str], nodes: Sequence[Node], *, one: bool) -> Node:
    """Any text; where a trigger comes up, one of the tags that begin with it must follow. After `one` tag it ends."""
    return {"type": "triggered_tags", "triggers": list(triggers), "tags": list(nodes), "stop_after_first": one}


def sequence(*nodes: Node) -> Node:
    return {"type": "sequence", "elements": list(nodes)}


def either(*nodes: Node) -> Node:
    return {"type": "or", "elements": list(nodes)}


def optional(node: Node) -> Node:
    return {"type": "optional", "content": node}


def structural_tag(node: Node) -> GrammarSpec:
    return GrammarSpec(GrammarKind.STRUCTURAL_TAG, json.dumps({"type": "structural_tag", "format": node}))


def node_of(grammar: GrammarSpec) -> Node:
    """The same grammar as a part of a structural tag."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return {"type": "json_schema", "json_schema": json.loads(grammar.source)}
        case GrammarKind.EBNF:
            return {"type": "grammar", "grammar": grammar.source}
        case GrammarKind.STRUCTURAL_TAG:
            node: Node = json.loads(grammar.source)["format"]
            return node
