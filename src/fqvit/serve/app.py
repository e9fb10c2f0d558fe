"""The endpoints of the server.

A request is checked in this order: host, API key, size of the body, model, images, queue. Every rejection is JSON in the shape
that OpenAI clients know, with one line that says what to change. See also: run.py (starts the server), limits.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.security import HTTPBearer
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from swagger_ui_bundle import swagger_ui_path

from fqvit.serve import answers
from fqvit.serve.bodies import Input, images_of
from fqvit.serve.gate import OPEN, Gate, error_answer
from fqvit.serve.hosted import Hosted, Shared
from fqvit.serve.limits import BODIES_AT_ONCE, Budget, Rejected
from fqvit.serve.metrics import Metrics
from fqvit.serve.schemas import (
    Classification,
    Detections,
    EmbeddingList,
    ErrorAnswer,
    ModelInfo,
    ModelList,
)

ANSWERS: dict[str, tuple[type[BaseModel], Callable[[Any, Input], Awaitable[BaseModel]], str]] = {
    "classify": (Classification, answers.classify, "Return the best classes of each image."),
    "embeddings": (EmbeddingList, answers.embed, "Return the embedding of each image."),
    "detect": (Detections, answers.detect, "Return boxes, classes, scores and masks of each image."),
}
IMAGE = {"type": "string", "format": "binary"}
BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "image/*": {"schema": IMAGE},
            "multipart/form-data": {"schema": {"type": "object", "properties": {"image": {"type": "array", "items": IMAGE}}}},
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["input"],
                    "properties": {
                        "input": {
                            "oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
                            "description": "image files in base64, with or without a prefix like `data:image/png;base64,`",
                        },
                        "model": {"type": "string", "description": "default: the first model that has this task"},
                    },
                }
            },
        },
    }
}


def make_app(models: Mapping[str, Hosted], shared: Shared, metrics: Metrics, key: bytes | None, loopback: bool) -> FastAPI:
    """Return the application.

    key: the API key; None: no key is required   loopback: accept only requests whose Host header names this machine
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        for hosted in models.values():
            await asyncio.to_thread(hosted.close)
        shared.decoders.shutdown()

    app = FastAPI(
        title="fqvit",
        version=_version(),
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses=_errors(),
        dependencies=[] if key is None else [Depends(HTTPBearer(auto_error=False))],  # for /docs; Gate checks the key
    )
    app.openapi_version = "3.0.3"  # a version that the bundled Swagger UI can show
    memory = Budget(BODIES_AT_ONCE * shared.limits.body, 503, "the server is busy: too many uploads. Try again in a second.")
    metrics.waiting.set_function(lambda: shared.queue.used)

    def endpoint(task: str, kind: type[BaseModel], answer: Callable[[Any, Input], Awaitable[BaseModel]], text: str) -> None:
        async def handle(request: Request) -> Response:
            try:
                async with asyncio.timeout(shared.limits.seconds), images_of(request, shared.limits, memory) as images:
                    hosted = _chosen(models, task, images)
                    result = await answer(hosted, images)
            except TimeoutError:
                raise Rejected(503, f"not finished within {shared.limits.seconds:g} seconds. Try again later.") from None
            return Response(result.model_dump_json(by_alias=True), media_type="application/json")

        app.post(f"/v1/{task}", response_model=kind, summary=text, openapi_extra=BODY, name=task)(handle)

    for task, (kind, answer, text) in ANSWERS.items():
        endpoint(task, kind, answer, text)

    @app.get("/v1/models", summary="List the models of this server.")
    async def list_models() -> ModelList:
        return ModelList(data=[_info(hosted) for hosted in models.values()])

    @app.get("/healthz", summary="Return 200 while the server accepts requests.")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics", summary="Return the server's metrics in Prometheus' format.", response_class=Response)
    async def show_metrics() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    page = (files("fqvit.serve") / "page.html").read_text(encoding="utf-8")

    @app.get("/", include_in_schema=False)
    async def upload_page() -> Response:
        return Response(page, media_type="text/html; charset=utf-8", headers={"X-Content-Type-Options": "nosniff"})

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return get_swagger_ui_html(
            openapi_url="/openapi.json",
            title="fqvit",
            swagger_js_url="/static/swagger-ui-bundle.js",
            swagger_css_url="/static/swagger-ui.css",
            swagger_favicon_url="/static/favicon-32x32.png",
        )

    app.mount("/static", StaticFiles(directory=str(swagger_ui_path)))
    known = {*OPEN, "/metrics", "/v1/models", *(f"/v1/{task}" for task in ANSWERS)}
    app.add_middleware(Gate, metrics=metrics, key=key, loopback=loopback, known=known)

    @app.exception_handler(Rejected)
    async def rejected(_: Request, error: Rejected) -> Response:
        return error_answer(error.status, error.message)

    @app.exception_handler(HTTPException)
    async def not_found(_: Request, error: HTTPException) -> Response:
        return error_answer(error.status_code, f"{error.detail}. GET /docs lists the endpoints.")

    @app.exception_handler(MemoryError)
    async def no_memory(_: Request, __: MemoryError) -> Response:
        return error_answer(503, "not enough memory for this image. Send a smaller one.")

    return app


def _chosen(models: Mapping[str, Hosted], task: str, request: Input) -> Hosted:
    """Return the model that a request names, or the first one that has the task."""
    name = request.fields.get("model")
    fitting = [hosted for hosted in models.values() if task in hosted.tasks]
    if name is None and fitting:
        return fitting[0]
    if name is None:
        served = ", ".join(f"{hosted.name} ({', '.join(hosted.tasks) or 'no task'})" for hosted in models.values())
        raise Rejected(400, f"{task}: no model on this server has this task. It serves {served}.")
    for hosted in fitting:
        if hosted.name == name:
            return hosted
    names = ", ".join(hosted.name for hosted in fitting) or "none"
    raise Rejected(404, f"model: {str(name)[:80]!r}, expected one of: {names}.")


def _info(hosted: Hosted) -> ModelInfo:
    model = hosted.model
    return ModelInfo(id=hosted.name, architecture=model.name, tasks=list(hosted.tasks), fingerprint=model.fingerprint)


def _errors() -> dict[int | str, dict[str, Any]]:
    said = {400: "Bad request.", 401: "Missing or wrong API key.", 413: "Too large.", 429: "Queue full.", 503: "Too busy."}
    return {status: {"model": ErrorAnswer, "description": text} for status, text in said.items()}


def _version() -> str:
    from importlib.metadata import version

    return version("fqvit")
