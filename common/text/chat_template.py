"""Renders a conversation to text with the model's own Jinja template. Knows no tokens.

Semantics are those of Hugging Face's `apply_chat_template`. Templates come from strangers, so they run in Jinja's
immutable sandbox, see plain JSON values only, and are stopped when they write too much or for too long.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import InvalidRequest, ModelError
from common.text.tokenizer_files import DEFAULT_TEMPLATE, SpecialTokens, read_chat_templates, read_special_tokens

#: The name under which models keep a separate template for conversations with tools.
TOOL_TEMPLATE = "tool_use"
#: Variables that the server sets; a request may not.
RESERVED_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
#: A prompt of 128k tokens is about half a megabyte; anything near this is a template gone wrong.
MAX_CHARACTERS = 16 * 1024 * 1024
#: Ordinary conversations take well under a millisecond.
MAX_SECONDS = 5.0

Message = Mapping[str, Any]


class ChatTemplate:
    """The templates of one model. Stateless between calls."""

    def __init__(self, sources: Mapping[str, str], special: SpecialTokens) -> None:
        """Raises ModelError if a template does not compile."""
        environment = _environment()
        self._special = special.as_template_variables()
        self._sources = dict(sources)
        self._templates = {name: _compile(environment, name, source) for name, source in sources.items()}
        self._variables = _free_variables(environment, self.tool_source)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Templates of a model folder; a folder without any gives an object that refuses to render."""
        return cls(read_chat_templates(folder), read_special_tokens(folder))

    @property
    def available(self) -> bool:
        """Whether the model has a template for plain chats."""
        return DEFAULT_TEMPLATE in self._templates

    @property
    def tool_source(self) -> str:
        """Source of the template for conversations with tools; "" if there is none at all."""
        return self._sources.get(TOOL_TEMPLATE, self._sources.get(DEFAULT_TEMPLATE, ""))

    def knows(self, variable: str) -> bool:
        """Whether the template for conversations with tools makes anything of a variable (`tools`)."""
        return variable in self._variables

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text, with the begin token if the template writes one.

        Args:
            messages: at least `role` and `content` each, plain JSON values.
            add_generation_prompt: end with the opening of the assistant's turn.
            tools: function descriptions; None for none.
            variables: further variables for the template (`chat_template_kwargs`).

        Raises:
            InvalidRequest: the model has no template (field `messages`), the template refuses the conversation or
                fails on it (field `messages`), or a variable is reserved (field `chat_template_kwargs`).
        """
        if reserved := RESERVED_VARIABLES.intersection(variables or ()):
            raise InvalidRequest(f"{min(reserved)!r} cannot be set here", field="chat_template_kwargs")
        template = self._choose(with_tools=bool(tools) or any(map(_speaks_of_tools, messages)))
        values = {
            **self._special,
            **(variables or {}),
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return _bounded_join(template.generate(values))
        except InvalidRequest:
            raise
        except Exception as error:  # a template can fail in any way that Python can: the conversation does not fit it
            raise InvalidRequest(f"the chat template refuses the conversation: {error}", field="messages") from error

    def _choose(self, *, with_tools: bool) -> jinja2.Template:
        names = (TOOL_TEMPLATE, DEFAULT_TEMPLATE) if with_tools else (DEFAULT_TEMPLATE,)
        for name in names:
            if name in self._templates:
                return self._templates[name]
        raise InvalidRequest("the model has no chat template; use completions", field="messages", code="no_template")


def _speaks_of_tools(message: Message) -> bool:
    return bool(message.get("tool_calls")) or message.get("role") == "tool"


def _bounded_join(pieces: Iterable[str]) -> str:
    """Joins a rendering piece by piece. Raises InvalidRequest past MAX_CHARACTERS or MAX_SECONDS."""
    deadline = time.monotonic() + MAX_SECONDS
    parts: list[str] = []
    length = 0
    for piece in pieces:
        parts.append(piece)
        length += len(piece)
        if length > MAX_CHARACTERS:
            raise InvalidRequest(f"the chat template wrote more than {MAX_CHARACTERS} characters", field="messages")
        if time.monotonic() > deadline:
            raise InvalidRequest(f"the chat template took longer than {MAX_SECONDS:g} s", field="messages")
    return "".join(parts)


def _compile(environment: jinja2.Environment, name: str, source: str) -> jinja2.Template:
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ModelError(f"chat template {name!r} does not compile: {error}") from error


def _free_variables(environment: jinja2.Environment, source: str) -> frozenset[str]:
    """Variables that a template (which compiles) wants from outside."""
    return frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))


def _environment() -> jinja2.Environment:
    """An environment with what Hugging Face offers to templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which a model must not see."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format_: str) -> str:
    return datetime.now().strftime(format_)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - the attribute that Jinja reads

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_contents"), [], [], body).set_lineno(line)

    def _contents(self, caller: Callable[[], str]) -> str:
        return caller()
