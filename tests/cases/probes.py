"""What anybody may ask a gateway about its readiness, by both doors."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.e2e.cluster import PATIENCE, Cluster

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def health_of(target: str) -> int:
    """What the standard gRPC health service says."""
    with grpc.insecure_channel(target) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
        return int(answer.status)


def ready_workers(cluster: Cluster) -> set[str]:
    """Ids of those to which the gateway may send work."""
    return {worker["id"] for worker in cluster.gateway_status()["workers"] if worker["state"] == "ready"}
