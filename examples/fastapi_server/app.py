"""Serve a bundle with FastAPI: `python app.py`. POST /generate answers JSON, POST /stream server-sent events.

A client that leaves ends its generation, a bounded number of generations run at a time, a bad option is answered with
JSON that says what is accepted, and a shutdown ends what is running.
"""

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from http import HTTPStatus
from types import FrameType
from typing import Annotated, Any

import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException  # FastAPI's own, and that of unknown paths

import ortgpt

MAX_RUNNING = 2  # generations at a time; they share the CPU, so more of them are not faster
MAX_WAIT_S = 5.0  # how long a client waits for one of them to end, before it is told to come back
TIMEOUT_S = 60.0  # of one generation


class Job(BaseModel):
    """What a client may ask for: a choice of ortgpt's options. Their ranges are checked by ortgpt."""

    model_config = ConfigDict(extra="forbid")  # a misspelt option is an error, not ignored

    prompt: str
    max_new_tokens: int = Field(128, ge=1, le=20_000)
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: list[str] | None = None


class Answer(BaseModel):
    text: str
    finish_reason: str | None


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    with ortgpt.load(os.environ.get("BUNDLE", "austen")) as app.state.generator:
        yield


app = FastAPI(title="ortgpt", lifespan=lifespan)
app.state.slots = asyncio.Semaphore(MAX_RUNNING)
app.state.stopping = threading.Event()


async def start(job: Job, request: Request) -> AsyncGenerator[tuple[ortgpt.Piece, AsyncIterator[ortgpt.Piece]]]:
    """Wait for a slot, begin the generation, and give its first piece and the others.

    FastAPI leaves a dependency when the response is over, however that came about: the client left (even before the
    first event), the server shuts down, or the text is complete. So this is where the generation and its slot end.
    """
    state = request.app.state
    try:
        async with asyncio.timeout(MAX_WAIT_S):
            await state.slots.acquire()
    except TimeoutError:
        raise HTTPException(429, "too many generations are running", headers={"Retry-After": "1"}) from None
    try:
        options = job.model_dump(exclude={"prompt"}, exclude_none=True)
        pieces = state.generator.astream(
            job.prompt, **options, context_overflow="slide", timeout_s=TIMEOUT_S, cancel=state.stopping
        )
        async with aclosing(pieces):
            # astream() has checked prompt and options. What fails in the computation of the prompt fails here, while
            # the answer can still become an error.
            yield await anext(pieces), pieces
    finally:
        state.slots.release()


Started = Annotated[tuple[ortgpt.Piece, AsyncIterator[ortgpt.Piece]], Depends(start)]


@app.post("/stream", response_class=EventSourceResponse)
async def stream(started: Started) -> AsyncIterator[ServerSentEvent]:
    piece, others = started
    yield ServerSentEvent(data={"text": piece.text, "finish_reason": piece.finish_reason})
    try:
        async for piece in others:
            yield ServerSentEvent(data={"text": piece.text, "finish_reason": piece.finish_reason})
    except ortgpt.OrtGptError as error:  # the status 200 has been sent: an event has to say it
        yield ServerSentEvent(event="error", data=described(type(error).__name__, str(error)))


@app.post("/generate")
async def generate(started: Started, request: Request) -> Answer:
    piece, others = started
    text = piece.text
    async for piece in others:
        text += piece.text
        # The server cancels a stream whose client has left, but not a handler that has sent nothing yet.
        if await request.is_disconnected():
            break
    return Answer(text=text, finish_reason=piece.finish_reason)


@app.get("/health")
async def health() -> dict[str, str]:
    return {"status": "ok"}


def described(kind: str, message: str) -> dict[str, Any]:
    return {"error": {"type": kind, "message": message}}


@app.exception_handler(ortgpt.OrtGptError)
async def runtime_error(request: Request, error: ortgpt.OrtGptError) -> JSONResponse:
    # OptionError, PromptError and ContextLengthError are ValueErrors: what the client sent was wrong.
    status = 400 if isinstance(error, ValueError) else 500
    return JSONResponse(described(type(error).__name__, str(error)), status)


@app.exception_handler(RequestValidationError)
async def malformed(request: Request, error: RequestValidationError) -> JSONResponse:
    faults = "; ".join(f"{'.'.join(map(str, fault['loc'][1:]))}: {fault['msg']}" for fault in error.errors())
    return JSONResponse(described("RequestError", faults), 422)


@app.exception_handler(HTTPException)
async def http_error(request: Request, error: HTTPException) -> JSONResponse:
    kind = HTTPStatus(error.status_code).phrase
    return JSONResponse(described(kind, str(error.detail)), error.status_code, error.headers)


class Server(uvicorn.Server):
    """Uvicorn waits for open responses before it shuts down: end them when the signal comes."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Each running generation ends after its current step, and its client gets the finish_reason "cancelled".
        app.state.stopping.set()
        super().handle_exit(sig, frame)


if __name__ == "__main__":
    port = int(os.environ.get("PORT", "8000"))
    # After this many seconds uvicorn cancels a response that nobody reads.
    Server(uvicorn.Config(app, host="127.0.0.1", port=port, timeout_graceful_shutdown=5)).run()
