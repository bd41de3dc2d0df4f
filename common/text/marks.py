"""The marks that model families write around thoughts and tool calls, all in one place. Knows no format.

Some models write a mark as a special token, others in letters. Its text means the same either way: parsers read it, and
grammars that lead through calls and thoughts let both through.
"""

from collections.abc import Iterable

from common.text.tokenizer import Tokenizer

THINK = "<think>"
END_THINK = "</think>"
#: Hermes, Qwen.
TOOL_CALL = "<tool_call>"
END_TOOL_CALL = "</tool_call>"
#: Mistral.
TOOL_CALLS = "[TOOL_CALLS]"
CALL_ID = "[CALL_ID]"
ARGS = "[ARGS]"
#: Llama 3.
PYTHON_TAG = "<|python_tag|>"

MARKS = (THINK, END_THINK, TOOL_CALL, END_TOOL_CALL, TOOL_CALLS, CALL_ID, ARGS, PYTHON_TAG)


def special_mark_ids(tokenizer: Tokenizer, marks: Iterable[str] = MARKS) -> frozenset[int]:
    """Ids of those marks that are special tokens of this tokenizer."""
    ids = (tokenizer.token_id(mark) for mark in marks)
    return frozenset(id_ for id_ in ids if id_ in tokenizer.special_ids)
