"""Generate over gRPC: `python examples/generate_grpc.py "The capital of France is"`."""

import sys

import grpc

from common.pb.tandem.v1 import inference_pb2, inference_pb2_grpc

prompt = sys.argv[1] if len(sys.argv) > 1 else "The capital of France is"
options = inference_pb2.GenerationOptions(max_tokens=32, temperature=0.0)

with grpc.insecure_channel("127.0.0.1:8001") as channel:
    stub = inference_pb2_grpc.InferenceStub(channel)
    for response in stub.Generate(inference_pb2.GenerateRequest(text=prompt, options=options)):
        print(response.delta.text, end="", flush=True)
    print(f"\n[{response.summary.completion_tokens} tokens]")
