"""The HTTP routes of an endpoint."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, NoReturn

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from furlong.resources.serving.completion import MODEL, model_body, models_body
from furlong.resources.serving.endpoint import Endpoint
from furlong.resources.serving.errors import ApiError

GONE_DEADLINE = 10.0
"""Seconds for the server to say whether a client is still there."""


def make_app(endpoint: Endpoint) -> FastAPI:
    """Routes below /v1 draw replies that are kept nowhere, those below /sessions/<id>/v1 are turns of that session."""
    # one more than may be under way, so that the one too many is refused and does not wait
    pool = ThreadPoolExecutor(endpoint.most + 8, thread_name_prefix="reply")
    started = int(time.time())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        pool.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)

    async def complete(request: Request, trajectory_id: str | None) -> Response:
        endpoint.keys.check(request.headers.get("authorization"), trajectory_id)
        body = _read(await request.body())
        loop = asyncio.get_running_loop()

        def gone() -> bool:
            return asyncio.run_coroutine_threadsafe(request.is_disconnected(), loop).result(GONE_DEADLINE)

        ask, completion = await loop.run_in_executor(pool, endpoint.complete, trajectory_id, body, gone)
        if ask.stream:
            events = completion.events(endpoint.template, ask.usage)
            return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        return JSONResponse(completion.body(endpoint.template))

    @app.post("/v1/chat/completions")
    async def sample(request: Request) -> Response:
        return await complete(request, None)

    @app.post("/sessions/{trajectory_id:path}/v1/chat/completions")
    async def turn(request: Request, trajectory_id: str) -> Response:
        return await complete(request, trajectory_id)

    @app.get("/v1/models")
    @app.get("/sessions/{trajectory_id:path}/v1/models")
    async def models(request: Request, trajectory_id: str | None = None) -> Any:
        endpoint.keys.check(request.headers.get("authorization"), trajectory_id)
        return models_body(started)

    @app.get("/v1/models/{model}")
    @app.get("/sessions/{trajectory_id:path}/v1/models/{model}")
    async def one_model(request: Request, model: str) -> Any:
        endpoint.keys.check(request.headers.get("authorization"), None)
        if model != MODEL:
            raise ApiError(404, f"there is no model {model!r:.80}; the one served is {MODEL!r}", code="model_not_found")
        return model_body(started)

    _explain_errors(app)
    return app


def _read(data: bytes) -> Any:
    try:
        return json.loads(data, parse_constant=_no_number)
    except (ValueError, RecursionError) as err:
        raise ApiError(400, f"the body is not JSON ({err}); send a JSON object") from err


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")


def _explain_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def told(_: Request, err: ApiError) -> Response:
        return JSONResponse(err.body(), err.status, err.headers())

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, err: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {err.detail}; POST to <base URL>/chat/completions"
        return await told(request, ApiError(err.status_code, message))

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, err: Exception) -> Response:
        # the server logs it, with its traceback, after this answer
        return await told(request, ApiError(500, f"{type(err).__name__}: {err}"))
