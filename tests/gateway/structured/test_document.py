"""The document says of keywords, formats and limits what the code does."""

from pathlib import Path

import pytest

from gateway.structured import limits
from gateway.structured.schema.formats import FORMATS
from gateway.structured.schema.keywords import KEYWORDS, Support

DOCUMENT = Path(__file__).parents[3].joinpath("docs", "structured-output.md").read_text("utf-8")


@pytest.mark.parametrize("name", KEYWORDS)
def test_keyword_is_documented_as_it_is(name: str) -> None:
    keyword = KEYWORDS[name]
    if keyword.support is Support.ANNOTATION:
        listed = next(line for line in DOCUMENT.splitlines() if line.startswith("These say nothing"))
        assert f"`{name}`" in listed
    else:
        assert f"| `{name}` | {keyword.support.value} | {keyword.remark} |" in DOCUMENT.splitlines()


@pytest.mark.parametrize("name", FORMATS)
def test_format_is_documented(name: str) -> None:
    listed = DOCUMENT[DOCUMENT.index("Formats that are enforced") :].partition("\n\n")[0]
    assert f"`{name}`" in listed


@pytest.mark.parametrize(
    "words",
    [
        f"{limits.MAX_SOURCE_BYTES >> 10} KiB",
        f"{limits.MAX_DEPTH}; {limits.MAX_GROUP_DEPTH}",
        f"{limits.MAX_PROPERTIES}; {limits.MAX_ENUM_VALUES}",
        f"| {limits.MAX_NODES} |",
        f"| {limits.MAX_ALTERNATIVES} |",
        f"| {limits.MAX_CHAIN} |",
        f"| {limits.MAX_REPEAT:,};",
        f"| {limits.MAX_REGEX_POSITIONS:,} |",
        f"| {limits.MAX_CHOICES}, not empty",
    ],
)
def test_limit_is_documented(words: str) -> None:
    assert words in DOCUMENT[DOCUMENT.index("## Limits") :]
