"""Which tool format a model uses, by the option `--tool-parser` or by its chat template. Knows no requests."""

from common.errors import ConfigError
from common.text.chat_template import ChatTemplate
from common.text.marks import ARGS, CALL_ID, PYTHON_TAG, TOOL_CALL, TOOL_CALLS
from gateway.chat.tools.format import ToolFormat
from gateway.chat.tools.hermes import HermesFormat
from gateway.chat.tools.llama3 import Llama3Format
from gateway.chat.tools.mistral import MistralFormat

#: What `--tool-parser` takes.
TOOL_PARSERS = ("auto", "hermes", "llama3", "mistral", "none")


def choose_tool_format(option: str, template: ChatTemplate) -> ToolFormat | None:
    """None: tools are switched off, or `auto` does not know the template's format. Raises ConfigError."""
    source = template.tool_source
    match option:
        case "auto":
            return _recognized(source) if template.knows("tools") else HermesFormat()
        case "hermes":
            return HermesFormat()
        case "llama3":
            return Llama3Format()
        case "mistral":
            return _mistral(source)
        case "none":
            return None
    raise ConfigError(f"the tool parser must be one of {', '.join(TOOL_PARSERS)}", field="tool_parser")


def _mistral(source: str) -> ToolFormat:
    return MistralFormat(named=ARGS in source, with_ids=CALL_ID in source)


def _recognized(source: str) -> ToolFormat | None:
    """By the marks that the template itself writes around earlier calls."""
    if TOOL_CALLS in source:
        return _mistral(source)
    if TOOL_CALL in source:
        return HermesFormat()
    if PYTHON_TAG in source or ("<|start_header_id|>" in source and '"parameters": ' in source):
        return Llama3Format()
    return None
