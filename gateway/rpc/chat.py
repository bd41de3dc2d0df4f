"""Between the chat messages of `inference.proto` and the gateway's own values. Judges nothing but what is no JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

from common.errors import InvalidRequest
from common.pb.tandem.v1 import generation_pb2, inference_pb2
from common.text.tokenizer import Tokenizer
from gateway.chat.answer import ChatDelta, ChatFinish
from gateway.chat.fields import ChatFields
from gateway.chat.parts import Part, ReasoningPart, TextPart, ToolCallArguments, ToolCallStart
from gateway.chat.request import ChatInput, Tool, ToolCall, ToolChoice, ToolMode, Turn
from gateway.json_text import json_object
from gateway.rpc.convert import stop_reason_to_proto, tokens_to_proto

#: Functions are not nested in tools and calls.
CHAT_FIELDS = ChatFields(function="", grammar="options.structured_output")

_MODES = {
    inference_pb2.ToolChoice.MODE_NONE: ToolMode.NONE,
    inference_pb2.ToolChoice.MODE_AUTO: ToolMode.AUTO,
    inference_pb2.ToolChoice.MODE_REQUIRED: ToolMode.REQUIRED,
}
_FINISH = {
    None: generation_pb2.FINISH_REASON_UNSPECIFIED,
    ChatFinish.STOP: generation_pb2.FINISH_REASON_STOP,
    ChatFinish.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
    ChatFinish.TOOL_CALLS: generation_pb2.FINISH_REASON_TOOL_CALLS,
}


def chat_from_proto(request: inference_pb2.ChatRequest) -> ChatInput:
    """Raises InvalidRequest naming the field that should hold a JSON object."""
    return ChatInput(
        turns=tuple(map(_turn, request.messages)),
        tools=tuple(_tool(index, tool) for index, tool in enumerate(request.tools)),
        tool_choice=_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls if request.HasField("parallel_tool_calls") else True,
        template_variables=_json_object("chat_template_kwargs", request.chat_template_kwargs) or {},
        add_generation_prompt=request.add_generation_prompt if request.HasField("add_generation_prompt") else None,
        continue_final_message=request.continue_final_message,
        separate_reasoning=request.separate_reasoning if request.HasField("separate_reasoning") else True,
    )


def _turn(message: inference_pb2.ChatMessage) -> Turn:
    """Content may be absent, which is not the same as empty; all else that is empty is absent."""
    return Turn(
        message.role,
        message.content if message.HasField("content") else None,
        message.name or None,
        tuple(ToolCall(call.id, call.name, call.arguments) for call in message.tool_calls),
        message.tool_call_id or None,
        message.reasoning_content or None,
    )


def _tool(index: int, tool: inference_pb2.Tool) -> Tool:
    parameters = _json_object(f"tools[{index}].parameters", tool.parameters)
    return Tool(tool.name, tool.description or None, parameters, tool.strict)


def _choice(choice: inference_pb2.ToolChoice) -> ToolChoice | None:
    kind = choice.WhichOneof("choice")
    if kind == "function":
        return ToolChoice(ToolMode.REQUIRED, choice.function)
    if kind is None or choice.mode == inference_pb2.ToolChoice.MODE_UNSPECIFIED:
        return None
    mode = _MODES.get(choice.mode)
    if mode is None:
        raise InvalidRequest("tool_choice.mode is not known", field="tool_choice.mode")
    return ToolChoice(mode)


def _json_object(field: str, text: str) -> Mapping[str, Any] | None:
    if not text:
        return None
    value = json_object(text)
    if value is None:
        raise InvalidRequest(f"{field} must be a JSON object", field=field)
    return value


def chat_delta_to_proto(tokenizer: Tokenizer, delta: ChatDelta) -> inference_pb2.TextDelta:
    """Words, thoughts and calls side by side; each in its own order."""
    return inference_pb2.TextDelta(
        choice=delta.choice,
        text="".join(part.text for part in delta.parts if isinstance(part, TextPart)),
        reasoning="".join(part.text for part in delta.parts if isinstance(part, ReasoningPart)),
        tool_calls=_calls(delta.parts),
        finish_reason=_FINISH[delta.finish],
        **tokens_to_proto(tokenizer, delta.tokens),
        **stop_reason_to_proto(delta.stop_reason),
    )


def _calls(parts: Sequence[Part]) -> list[inference_pb2.ToolCallDelta]:
    """One piece for each call that has got something."""
    pieces: list[inference_pb2.ToolCallDelta] = []
    for part in parts:
        match part:
            case ToolCallStart(index, id_, name):
                pieces.append(inference_pb2.ToolCallDelta(index=index, id=id_, name=name))
            case ToolCallArguments(index, text):
                if not pieces or pieces[-1].index != index:
                    pieces.append(inference_pb2.ToolCallDelta(index=index))
                pieces[-1].arguments += text
    return pieces
