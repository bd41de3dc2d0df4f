"""The parser of a model that writes nothing but words."""

from gateway.chat.parts import Part, TextPart


class PlainParser:
    """All text is for the user, at once."""

    called_tools = False

    def push(self, text: str) -> list[Part]:
        return [TextPart(text)] if text else []

    def finish(self) -> list[Part]:
        return []
