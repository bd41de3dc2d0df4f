"""Fields of the Responses API that change the answer and are not offered: refused by name, never silently ignored.

Whatever else is unknown is ignored.
"""

from collections.abc import Mapping

from common.errors import InvalidRequest
from gateway.http.responses.schemas import ResponseBody

#: Field and the values that mean "as if it were not there".
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "background": (False,),
    "truncation": ("disabled",),
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
    # Other APIs' words for what has another name here, or is not had here.
    "max_tokens": (),
    "max_completion_tokens": (),
    "messages": (),
    "logprobs": (False,),
    "response_format": (),
    "functions": ([],),
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": (),
    "prompt_logprobs": (),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "truncate_prompt_tokens": (),
}
_INCLUDABLE = frozenset(
    {
        "message.output_text.logprobs",
        # What these ask for is not there, or is there anyway.
        "reasoning.encrypted_content",
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "message.input_image.image_url",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    }
)
_MAX_METADATA = 16
_MAX_METADATA_KEY = 64
_MAX_METADATA_VALUE = 512


def check_fields(body: ResponseBody) -> None:
    """Raise InvalidRequest for the first field that is not offered, or not in that form."""
    given = {**(body.model_extra or {}), **{name: getattr(body, name) for name in body.model_fields_set}}
    for name, neutral in _NEUTRAL.items():
        value = given.get(name)
        if value is not None and value not in neutral:
            raise InvalidRequest(f"{name} is not supported", field=name, code="unsupported_parameter")
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        raise InvalidRequest("text.verbosity is not supported", field="text.verbosity", code="unsupported_parameter")
    for index, name in enumerate(body.include or ()):
        if name not in _INCLUDABLE:
            raise InvalidRequest(f"include[{index}] is not known", field=f"include[{index}]")
    _check_metadata(body.metadata or {})


def _check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > _MAX_METADATA:
        raise InvalidRequest(f"metadata: at most {_MAX_METADATA} pairs", field="metadata")
    if any(len(key) > _MAX_METADATA_KEY or len(value) > _MAX_METADATA_VALUE for key, value in metadata.items()):
        limits = f"{_MAX_METADATA_KEY} and {_MAX_METADATA_VALUE} characters"
        raise InvalidRequest(f"metadata: keys and values have at most {limits}", field="metadata")
