"""The public gRPC API (`tandem.v1.Inference`): the same requests, checks and text as over HTTP."""

from gateway.rpc.servicer import InferenceServicer

__all__ = ["InferenceServicer"]
