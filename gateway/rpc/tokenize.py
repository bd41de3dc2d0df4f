"""The Tokenize and Detokenize calls of `tandem.v1.Inference`: the same checks and ids as over HTTP."""

from common.errors import InvalidRequest
from common.pb.tandem.v1 import inference_pb2
from gateway.generation import ServingLimits
from gateway.prompts import chat_prompt
from gateway.rpc.chat import CHAT_FIELDS, chat_from_proto
from gateway.serving import ServingModel
from gateway.tokens import detokenize, tokenize, with_special_tokens


async def tokenize_call(
    request: inference_pb2.TokenizeRequest, model: ServingModel, limits: ServingLimits
) -> inference_pb2.TokenizeResponse:
    """Raises NotFound (model), InvalidRequest naming the field, or ContextTooLong."""
    model.check_name(request.model)
    given = request.add_special_tokens if request.HasField("add_special_tokens") else None
    match request.WhichOneof("input"):
        case "text":
            ids = await tokenize(model, request.text, limits, add_special_tokens=given is not False, field="text")
        case "chat":
            model.check_name(request.chat.model)
            prompt = await chat_prompt(model, chat_from_proto(request.chat), limits, CHAT_FIELDS)
            ids = with_special_tokens(model.tokenizer, prompt.ids) if given else prompt.ids
        case _:
            raise InvalidRequest("one of text and chat must be set", field="input")
    return inference_pb2.TokenizeResponse(token_ids=ids, max_model_len=limits.max_request_tokens)


async def detokenize_call(
    request: inference_pb2.DetokenizeRequest, model: ServingModel, limits: ServingLimits
) -> inference_pb2.DetokenizeResponse:
    """Raises NotFound (model), or InvalidRequest for an id outside of the vocabulary."""
    model.check_name(request.model)
    text = await detokenize(model, request.token_ids, limits, field="token_ids")
    return inference_pb2.DetokenizeResponse(text=text)
