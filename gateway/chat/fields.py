"""What an API calls the parts of a chat request, so that complaints name what its client wrote."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFields:
    """Field names of one API; the default ones are those of chat completions."""

    messages: str = "messages"
    #: Names of the single turns, where they are not `messages[0]`, `messages[1]`, ...
    turns: tuple[str, ...] | None = None
    #: Between a tool or call and its name, arguments or parameters; "" where these are its own fields.
    function: str = ".function"
    #: Names of the single tools, where they are not `tools[0]`, `tools[1]`, ...
    tools: tuple[str, ...] | None = None
    #: What asks for structured output.
    grammar: str = "response_format"
    template_variables: str = "chat_template_kwargs"
    max_tokens: str = "max_tokens"

    def turn(self, index: int) -> str:
        return f"{self.messages}[{index}]" if self.turns is None else self.turns[index]

    def tool(self, index: int) -> str:
        return f"tools[{index}]" if self.tools is None else self.tools[index]
