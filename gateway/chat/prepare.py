"""From a chat request to what the dispatcher gets and what reads the answer, the same for every API."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from common.sampling import GrammarKind, GrammarSpec
from common.text.chat_prompt import ChatPrompt
from common.text.marks import END_THINK, MARKS, THINK, special_mark_ids
from gateway.chat.fields import ChatFields
from gateway.chat.parts import AnswerParser
from gateway.chat.plain import PlainParser
from gateway.chat.reasoning import ReasoningParser, Thinking, behind_thoughts, thinking_of
from gateway.chat.request import ChatInput, Tool
from gateway.chat.structure import either, node_of, structural_tag
from gateway.chat.tools.check import ToolUse, check_tools
from gateway.chat.tools.format import ToolFormat
from gateway.chat.tools.schemas import held_tools
from gateway.generation import ServingLimits
from gateway.options import GenerationOptions
from gateway.prompts import render_chat
from gateway.serving import ServingModel
from gateway.validation import PreparedRequest, check_options, prepare


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A checked chat request."""

    prepared: PreparedRequest
    #: Makes the parser of one choice's text.
    new_parser: Callable[[], AnswerParser]


async def prepare_chat(
    model: ServingModel,
    chat: ChatInput,
    options: GenerationOptions,
    limits: ServingLimits,
    *,
    request_id: str,
    fields: ChatFields = ChatFields(),  # noqa: B008 - a frozen value
) -> PreparedChat:
    """Check, render and tokenize; the grammar that tools ask for is set, the parser chosen.

    Args:
        options: `grammar` is the structured output asked for, if any.
        fields: what the API calls things, for complaints.

    Raises InvalidRequest naming the field, or ContextTooLong.
    """
    check_options(options, limits.vocab_size)
    use = check_tools(chat, fields)
    prompt = await render_chat(model, chat, use, limits, fields)
    thinking = _thinking(chat, prompt) if model.reasoning else Thinking.CLOSED
    # Without tools the format is of no interest: text that looks like a call is text.
    format_ = model.tool_format if use.tools else None
    grammar = options.grammar
    if use.tools or grammar is not None:
        # Schemas of tools may take seconds to check.
        grammar = await asyncio.to_thread(_grammar, model, chat.tools, grammar, use, thinking, fields)
    prepared = prepare(
        request_id,
        prompt.ids,
        replace(options, grammar=grammar),
        model.defaults,
        limits,
        prompt_field=fields.messages,
        max_tokens_field=fields.max_tokens,
    )
    marks = _kept_marks(format_, prepared.generation.params.grammar, reasoning=model.reasoning)
    text = replace(prepared.text, kept_special_ids=special_mark_ids(model.tokenizer, marks))
    return PreparedChat(replace(prepared, text=text), lambda: _new_parser(chat, use, format_, thinking))


def _thinking(chat: ChatInput, prompt: ChatPrompt) -> Thinking:
    """What a client wrote is no evidence of thoughts, but for the message that is continued."""
    final = (chat.turns[-1].content or "") if chat.continue_final_message else ""
    if (thinking := thinking_of(final)) is not Thinking.FREE:
        return thinking
    if final.strip():
        return Thinking.CLOSED
    before = prompt.text[: len(prompt.text) - len(final)].rstrip()
    return thinking_of(before[-max(len(THINK), len(END_THINK)) :])


def _grammar(
    model: ServingModel,
    tools: Sequence[Tool],
    asked: GrammarSpec | None,
    use: ToolUse,
    thinking: Thinking,
    fields: ChatFields,
) -> GrammarSpec | None:
    """What holds the answer: calls where they are forced, else what was asked for, or calls instead of it."""
    format_ = model.tool_format if use.tools else None
    held = held_tools(tools, use, fields) if use.tools else []
    if asked is None and not use.required:
        strict = any(tool.strict for tool in held)
        if format_ is None or not strict:
            return None
        # Words and thoughts as the model likes; functions that are strict are held to their schemas.
        return structural_tag(format_.text_and_calls(held, parallel=use.parallel))
    nodes = [] if asked is None or use.required else [node_of(asked)]
    if format_ is not None:
        nodes.append(format_.calls(held, parallel=use.parallel))
    elif thinking is Thinking.CLOSED:
        return asked
    return structural_tag(behind_thoughts(nodes[0] if len(nodes) == 1 else either(*nodes), thinking))


def _kept_marks(format_: ToolFormat | None, grammar: GrammarSpec | None, *, reasoning: bool) -> Sequence[str]:
    """Marks whose text counts where they are special tokens: those that a parser looks for.

    In structural tags workers take every mark for its text, wherever it stands, so that here it must come out as well.
    """
    if grammar is not None and grammar.kind is GrammarKind.STRUCTURAL_TAG:
        return MARKS
    return [*(format_.marks if format_ else ()), *((THINK, END_THINK) if reasoning else ())]


def _new_parser(chat: ChatInput, use: ToolUse, format_: ToolFormat | None, thinking: Thinking) -> AnswerParser:
    parser: AnswerParser = PlainParser()
    if format_ is not None:
        parser = format_.new_parser([tool.name for tool in use.tools], parallel=use.parallel)
    if thinking is Thinking.CLOSED:
        return parser
    return ReasoningParser(parser, thinking, separate=chat.separate_reasoning)
