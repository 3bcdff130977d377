"""The application: OpenAI's endpoints in front of an engine."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping
from functools import lru_cache

from fastapi import FastAPI, Request
from pydantic import JsonValue
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from paceline.core.server.access import OwnAddress
from paceline.data.text.chats.message_parser import MessageParser
from paceline.inference.engine.answer_text import TokenSpelling
from paceline.inference.engine.engine import (
    AnswerEnd,
    AnswerPart,
    EncodedPrompt,
    Engine,
    GenerationRequest,
)
from paceline.inference.serving.access import ServerAccess
from paceline.inference.serving.prompts import (
    chat_tools,
    encode_chat,
    encode_text,
    generation_request,
)
from paceline.inference.serving.queue import GenerationJob, GenerationQueue, JobEvent
from paceline.inference.serving.refusals import (
    RequestRefused,
    add_handlers,
    error_body,
    error_response,
)
from paceline.inference.serving.requests import (
    ChatFields,
    CompletionFields,
    SamplingFields,
    read_body,
    validated,
)
from paceline.inference.serving.responses import (
    AnswerFormat,
    ChatFormat,
    TextFormat,
    event,
    model_entry,
    model_list,
)


class InferenceServer:
    """What the routes share.

    Args:
        engine: what generates the answers.
        max_waiting: number of requests that may wait.
    """

    def __init__(self, engine: Engine, max_waiting: int) -> None:
        self.engine, self.queue = engine, GenerationQueue(engine, max_waiting)
        self.created = int(time.time())
        self.spelling = lru_cache(maxsize=None)(
            lambda name: TokenSpelling(engine.encoder(name).tokenizer)
        )
        # Tokenizers change their settings while they encode.
        self._encoding = asyncio.Lock()

    def check_model(self, name: str) -> None:
        """Raise RequestRefused if there is no model of this name."""
        if name not in self.engine.models:
            raise RequestRefused(
                "there is no model `{name}`",
                http_status=404,
                code="model-not-found",
                allowed="{models}",
                param="model",
                name=name[:200],
                models=", ".join(f"`{model}`" for model in self.engine.models),
            )

    async def chat(self, request: Request) -> Response:
        """Answer ``/v1/chat/completions``."""
        fields = validated(ChatFields, await self._body(request))
        self.check_model(fields.model)
        async with self._encoding:
            prompt, parser = await run_in_threadpool(self._prepared_chat, fields)
        generation = generation_request(fields, prompt, parser.kept_tokens)
        spelling = self.spelling(fields.model) if fields.logprobs else None
        form = ChatFormat(
            fields.model, prompt.num_tokens, spelling, fields.has_usage, parser=parser
        )
        return await self._answer(request, fields, generation, form)

    def _prepared_chat(self, fields: ChatFields) -> tuple[EncodedPrompt, MessageParser]:
        prompt = encode_chat(self.engine, fields)
        encoder = self.engine.encoder(fields.model)
        text = str(encoder.tokenizer.decode(prompt.tokens))
        return prompt, encoder.parser(text, chat_tools(fields))

    async def completion(self, request: Request) -> Response:
        """Answer ``/v1/completions``."""
        fields = validated(CompletionFields, await self._body(request))
        self.check_model(fields.model)
        async with self._encoding:
            prompt = await run_in_threadpool(encode_text, self.engine, fields)
        spelling = None if fields.logprobs is None else self.spelling(fields.model)
        form = TextFormat(fields.model, prompt.num_tokens, spelling, fields.has_usage)
        return await self._answer(request, fields, generation_request(fields, prompt), form)

    async def _body(self, request: Request) -> Mapping[str, JsonValue]:
        self.queue.check_space()  # before anything large is received
        return await read_body(request)

    async def _answer(
        self,
        request: Request,
        fields: SamplingFields,
        generation: GenerationRequest,
        form: AnswerFormat,
    ) -> Response:
        job = self.queue.submit(generation)
        watch = asyncio.create_task(self._cancel_when_closed(request.receive, job))
        is_stream = False
        try:
            first = await job.events.get()
            if isinstance(first, Exception):
                return error_response(first)
            if fields.stream:
                is_stream = True
                return AnswerStream(self._stream(first, job, form), watch)
            parts, end = await _collect(first, job)
            return JSONResponse(form.whole(parts, end))
        finally:
            if not is_stream:
                watch.cancel()
                self.queue.cancel(job)

    async def _cancel_when_closed(self, receive: Receive, job: GenerationJob) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.queue.cancel(job)

    async def _stream(
        self, first: JobEvent, job: GenerationJob, form: AnswerFormat
    ) -> AsyncGenerator[bytes]:
        current = first
        try:
            yield form.start()
            while isinstance(current, AnswerPart):
                yield form.part(current)
                current = await job.events.get()
            if isinstance(current, AnswerEnd):
                yield form.end(current)
            else:
                yield event(error_body(current)[1])
        finally:
            self.queue.cancel(job)


async def _collect(first: JobEvent, job: GenerationJob) -> tuple[list[AnswerPart], AnswerEnd]:
    parts, current = [], first
    while isinstance(current, AnswerPart):
        parts.append(current)
        current = await job.events.get()
    if isinstance(current, Exception):
        raise current
    return parts, current


class AnswerStream(Response):
    """Server-sent events. While they are sent, ``watch`` waits for the client to close the
    connection, and then ends their source."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[bytes], watch: asyncio.Task[None]) -> None:
        self.status_code, self.background = 200, None
        self.init_headers({"Cache-Control": "no-store"})
        self._chunks, self._watch = chunks, watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with contextlib.aclosing(self._chunks) as chunks:
                async for chunk in chunks:
                    if chunk:
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._watch.cancel()


def create_app(engine: Engine, own: OwnAddress, token: str | None, max_waiting: int) -> FastAPI:
    """Return the application.

    Args:
        own: the address that the server listens on.
        token: the token of this server; None if none is needed.
        max_waiting: number of requests that may wait.
    """
    app = FastAPI(
        title="Paceline", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    server = InferenceServer(engine, max_waiting)
    add_handlers(app)

    async def models() -> JSONResponse:
        return JSONResponse(model_list(engine.models, server.created))

    async def model(name: str) -> JSONResponse:
        server.check_model(name)
        return JSONResponse(model_entry(name, server.created))

    app.add_api_route("/v1/models", models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", model, methods=["GET"])
    app.add_route("/v1/chat/completions", server.chat, methods=["POST"])
    app.add_route("/v1/completions", server.completion, methods=["POST"])
    app.add_middleware(ServerAccess, own=own, token=token)
    return app
