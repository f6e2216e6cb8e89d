"""Serve a bundle with Flask under gunicorn: `gunicorn 'app:create_app()'`; gunicorn.conf.py has the settings.

POST /generate answers JSON, POST /stream plain text as it is written. A client that leaves ends its generation.
"""

import os
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import flask
from werkzeug.exceptions import HTTPException

import ortgpt

OPTIONS = {"max_new_tokens", "temperature", "top_k", "top_p", "seed", "stop"}  # that a client may set
MAX_NEW_TOKENS = 20_000
TIMEOUT_S = 25.0  # of one generation; less than a proxy in front waits for an answer


def create_app() -> flask.Flask:
    """Load the bundle and return the application: gunicorn calls this in each worker, after the fork."""
    app = flask.Flask(__name__)
    threads = os.environ.get("ORTGPT_THREADS")
    # All threads of the worker use this one generator: it keeps no state between calls.
    generator = ortgpt.load(os.environ.get("BUNDLE", "austen"), threads=int(threads) if threads else None)

    def job() -> tuple[str, dict[str, Any]]:
        """Return prompt and options of the request. Names that clients may not set are an error."""
        body = flask.request.get_json()
        if not isinstance(body, dict) or not isinstance(body.get("prompt"), str):
            flask.abort(400, "the body must be a JSON object with a text as its prompt")
        options = {name: value for name, value in body.items() if name != "prompt"}
        if unknown := options.keys() - OPTIONS:
            flask.abort(400, f"unknown: {', '.join(sorted(unknown))} (accepted: {', '.join(sorted(OPTIONS))})")
        options.setdefault("max_new_tokens", 128)
        if isinstance(options["max_new_tokens"], int) and options["max_new_tokens"] > MAX_NEW_TOKENS:
            flask.abort(400, f"max_new_tokens = {options['max_new_tokens']} (accepted: up to {MAX_NEW_TOKENS})")
        return body["prompt"], options | {"context_overflow": "slide", "timeout_s": TIMEOUT_S}

    @app.post("/generate")
    def generate() -> dict[str, Any]:
        # Nobody tells this function that its client has left: TIMEOUT_S bounds what it then does for nothing.
        prompt, options = job()
        completion = generator.generate(prompt, **options)
        return {"text": completion.text, "finish_reason": completion.finish_reason}

    @app.post("/stream")
    def stream() -> flask.Response:
        prompt, options = job()
        pieces = generator.stream(prompt, **options)  # checks the options now, before the status 200 is sent

        def texts() -> Iterator[str]:
            # When gunicorn fails to send to a client that has left, it closes texts(), which closes the stream.
            with closing(pieces):
                for piece in pieces:
                    yield piece.text

        return flask.Response(texts(), mimetype="text/plain", headers={"X-Accel-Buffering": "no"})

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.errorhandler(ortgpt.OrtGptError)
    def runtime_error(error: ortgpt.OrtGptError) -> tuple[dict[str, Any], int]:
        # OptionError, PromptError and ContextLengthError are ValueErrors: what the client sent was wrong.
        status = 400 if isinstance(error, ValueError) else 500
        return {"error": {"type": type(error).__name__, "message": str(error)}}, status

    @app.errorhandler(HTTPException)
    def http_error(error: HTTPException) -> tuple[dict[str, Any], int]:
        return {"error": {"type": error.name, "message": error.description}}, error.code or 500

    return app
