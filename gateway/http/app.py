"""Assembles the HTTP application: OpenAI routes, probes, metrics, middleware. All state comes in as `services`."""

from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.middleware.cors import CORSMiddleware

from common.errors import NoWorker
from gateway.http.auth import RequireKey
from gateway.http.errors import AnswerBugs, error_response, install_error_handlers
from gateway.http.observe import ObserveRequests
from gateway.http.responses.routes import responses_router
from gateway.http.routes import openai_router
from gateway.http.services import HttpServices
from gateway.http.tokenize import tokenize_router

__all__ = ["HttpServices", "create_app"]


def create_app(services: HttpServices) -> FastAPI:
    """An ASGI application; any number of them can live in one process."""
    app = FastAPI(
        title="Tandem",
        description="OpenAI-compatible inference with prefill and decode apart",
        # A path with a slash too many is an unknown one; a redirection would be an answer without the API's form.
        redirect_slashes=False,
    )
    app.include_router(openai_router(services))
    app.include_router(responses_router(services))
    app.include_router(tokenize_router(services))
    _add_probes(app, services)
    install_error_handlers(app)
    # From the innermost to the outermost: a refused key is seen by browsers, and everything has its id.
    app.add_middleware(RequireKey, keys=services.keys)
    app.add_middleware(AnswerBugs)
    if services.options.cors_origins:
        _allow_origins(app, services.options.cors_origins)
    app.add_middleware(ObserveRequests, metrics=services.metrics, tracer=services.tracer)
    return app


def _add_probes(app: FastAPI, services: HttpServices) -> None:
    @app.get("/health")
    async def health() -> dict[str, Any]:
        """The process is alive; says nothing about workers."""
        return {"status": "ok"}

    @app.get("/ready", response_model=None)
    async def ready() -> Response:
        """Requests can be served; 503 with the reason if not."""
        is_ready, reason = services.ready()
        return JSONResponse({"status": "ready"}) if is_ready else error_response(NoWorker(reason))

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        return Response(generate_latest(services.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _allow_origins(app: FastAPI, origins: tuple[str, ...]) -> None:
    """No credentials: keys travel in a header that scripts set themselves, never in cookies."""
    app.add_middleware(
        CORSMiddleware,
        allow_origins=list(origins),
        allow_methods=["GET", "POST", "DELETE", "OPTIONS"],
        allow_headers=["*"],
        expose_headers=["X-Request-Id", "Retry-After"],
    )
