"""Serves the policy by the chat protocol of OpenAI, on a port of this machine, for as long as agents run.

    POST /v1/chat/completions   also streamed, in one piece
    POST /v1/completions
    GET  /v1/models

Every route requires the key of a sample that is being drawn. The run's configuration says how tokens are drawn:
temperature, top_p and seed of a request are ignored. Fields that would change the meaning of an answer and are not
offered (n, stop, penalties, formats, options of the chat template) are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import TYPE_CHECKING

from sfumato.config.open_mappings import JsonObject
from sfumato.errors import MissingDependencyError
from sfumato.rollout.agents.recorded_calls import PolicyReply, RefusedCallError, Session
from sfumato.serving.bounded_json import load_json
from sfumato.serving.connections import trust_connection, uvicorn_config
from sfumato.serving.requests import RefusedRequestError, RequestGuard, check_media_type, read_body

if TYPE_CHECKING:
    import uvicorn
    from starlette.requests import Request
    from starlette.responses import Response

MODEL = "policy"
"""Name of the model."""

KEY_HEADER = "x-api-key"
"""Header that may hold the key in the place of ``Authorization: Bearer``."""

MAX_BODY_BYTES = 16 * 2**20
MAX_VALUES = 2**20
"""Values in the JSON of a body, such as token ids; brackets and commas in texts count, too."""
BODY_S = 60.0
"""How long a body may take to arrive, however fast."""

NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stop": ([], ""),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "suffix": ("",),
    "echo": (False,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "top_logprobs": (0,),
    "modalities": (["text"],),
    # of OpenAI's models, and what vLLM and SGLang take besides
    "reasoning_effort": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "stop_regex": ([], ""),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "truncate_prompt_tokens": (),
    "include_stop_str_in_output": (False,),
    "prompt_logprobs": (),
    "documents": ([],),
    "enable_thinking": (),
    "thinking_token_budget": (),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
}
"""Fields of a request that are not offered, and the values that they may have because these change nothing."""

INSTEAD: dict[str, str] = dict.fromkeys(
    ("chat_template_kwargs", "enable_thinking", "reasoning_effort"), "set data.chat_template_options for the run and "
)
"""What says the same for all of a run, of fields for which something does."""


def check_packages() -> None:
    """Raises MissingDependencyError when what serves is not installed."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            f"agents reach the policy over HTTP, for which a package is missing ({error}): pip install starlette "
            "uvicorn"
        ) from error


class Endpoint:
    """Serves the sessions of the samples that are being drawn in one event loop."""

    def __init__(self) -> None:
        self.base_url = ""
        self._sessions: dict[str, Session] = {}
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self.users = 0

    @contextlib.contextmanager
    def serving(self, session: Session) -> Iterator[None]:
        """Inside the block, answers calls with the key of a sample."""
        self._sessions[session.api_key] = session
        try:
            yield
        finally:
            del self._sessions[session.api_key]
            session.end()

    async def start(self) -> None:
        """Listens on a free port of the loopback interface, if it does not yet."""
        import uvicorn

        class QuietServer(uvicorn.Server):
            """A server that leaves the handlers of SIGINT and SIGTERM as the run has set them."""

            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield

        async with self._starting:  # agents of several samples may ask at the same time
            if self._serving is not None:
                return
            listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            listening.bind(("127.0.0.1", 0))
            self.base_url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
            self._server = QuietServer(uvicorn_config(self.app(), grace_s=1))
            self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))
            while not self._server.started:
                if self._serving.done():
                    self._serving.result()  # raises why it could not start
                await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """Closes the port and all connections."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving

    def app(self) -> RequestGuard:
        """The ASGI application."""
        from starlette.applications import Starlette
        from starlette.routing import Route

        routes = [
            Route("/v1/chat/completions", self._answer_chat, methods=["POST"]),
            Route("/v1/completions", self._answer_completion, methods=["POST"]),
            Route("/v1/models", self._list_models, methods=["GET"]),
        ]
        return RequestGuard(Starlette(routes=routes, exception_handlers={RefusedCallError: _refuse, 404: _refuse_path}))

    async def _list_models(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        self._session_of(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "sfumato"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _answer_chat(self, request: Request) -> Response:
        return await self._answer_request(request, is_chat=True)

    async def _answer_completion(self, request: Request) -> Response:
        return await self._answer_request(request, is_chat=False)

    async def _answer_request(self, request: Request, is_chat: bool) -> Response:
        from starlette.responses import JSONResponse, StreamingResponse

        session = self._session_of(request)
        body = await _read_body(request)
        reply = await _draw_answer(session, body, is_chat, request)
        content = _chat_answer(reply, body) if is_chat else _text_answer(reply, body)
        if not body.get("stream"):
            return JSONResponse(content)
        return StreamingResponse(_stream_events(content, body, is_chat), media_type="text/event-stream")

    def _session_of(self, request: Request) -> Session:
        """The session of a request's key. Raises RefusedCallError where there is none, as after the sample's end."""
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        key = request.headers.get(KEY_HEADER, bearer)
        session = self._sessions.get(key)
        if session is None:
            raise RefusedCallError("this key is of no sample that is being drawn", status=401, code="invalid_api_key")
        trust_connection(request.scope)
        return session


async def _refuse(request: Request, error: Exception) -> Response:
    """What is answered to a call that is refused."""
    from starlette.responses import JSONResponse

    del request
    assert isinstance(error, RefusedCallError)
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    about = {"message": str(error), "type": kind, "param": None, "code": error.code}
    return JSONResponse({"error": about}, error.status)


async def _refuse_path(request: Request, error: Exception) -> Response:
    """What is answered to other protocols, such as OpenAI's newer ``/v1/responses``, which clients take by default."""
    del error
    path = request.url.path[:100]
    refused = f"there is no {path}: ask /v1/chat/completions (of OpenAI's clients chat.completions), or /v1/completions"
    return await _refuse(request, RefusedCallError(refused, status=404))


async def _read_body(request: Request) -> dict[str, object]:
    """The JSON object of a request. Raises RefusedCallError for other bodies, and for fields that are not offered."""
    try:
        check_media_type(request, "application/json")
        too_large = f"the body is larger than {MAX_BODY_BYTES // 2**20} MiB"
        body = load_json(bytes(await read_body(request, MAX_BODY_BYTES, too_large, BODY_S)), max_values=MAX_VALUES)
    except RefusedRequestError as error:
        raise RefusedCallError(str(error), status=error.status) from error
    except ValueError as error:
        raise RefusedCallError(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise RefusedCallError("the body must be a JSON object")
    if not isinstance(body.get("stream_options") or {}, dict):
        raise RefusedCallError("stream_options must be an object")
    for name, neutral in NEUTRAL.items():
        value = body.get(name)
        if value is not None and value not in neutral:
            remedy = f"{INSTEAD.get(name, '')}leave it out"
            raise RefusedCallError(f"{name} {value!r:.100} is not offered: {remedy}", code="unsupported_value")
    return body


async def _draw_answer(session: Session, body: JsonObject, is_chat: bool, request: Request) -> PolicyReply:
    """The policy's answer to a request, which ends when its caller hangs up.

    Clients ask again after their time limit: what they no longer wait for is no part of the sample.

    Raises:
        RefusedCallError: for a request that is wrong, and in the place of any error in drawing, which the session
            keeps in ``error`` for the run.
    """
    limits = [body.get("max_completion_tokens"), body.get("max_tokens")]
    max_new_tokens = next((limit for limit in limits if limit is not None), None)
    if max_new_tokens is not None and (type(max_new_tokens) is not int or not 1 <= max_new_tokens < 2**31):
        raise RefusedCallError(f"max_tokens must be a positive integer below 2^31, not {max_new_tokens!r:.100}")
    if is_chat:
        messages = body.get("messages")
        tools = body.get("tools")
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise RefusedCallError("messages must be a list of objects with role and content")
        if tools is not None and (not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools)):
            raise RefusedCallError("tools must be a list of objects")
        call = session.chat(messages, (tools or None) if body.get("tool_choice") != "none" else None, max_new_tokens)
    else:
        prompt = body.get("prompt")
        is_ids = isinstance(prompt, list) and all(isinstance(token, int) and 0 <= token < 2**31 for token in prompt)
        if not isinstance(prompt, str) and not is_ids:
            raise RefusedCallError("prompt must be one text, or one list of token ids")
        assert prompt is not None
        call = session.complete(prompt, max_new_tokens)
    task = asyncio.create_task(call)
    session.tasks.add(task)
    hanging_up = asyncio.create_task(_wait_for_end(request))
    hanging_up.add_done_callback(lambda _: task.cancel())
    try:
        return await task
    except asyncio.CancelledError as error:
        # ``Session.end`` or the caller's end cancel the task; otherwise this handler itself is cancelled
        if session.is_over:
            raise RefusedCallError("the sample is over", status=410) from error
        if hanging_up.done():
            raise RefusedCallError("the caller has hung up", status=499) from error
        raise
    except RefusedCallError:
        raise
    except Exception as error:
        session.error = session.error or error  # the first one is the cause
        raise RefusedCallError(f"{type(error).__name__}: {error}", status=500) from error
    finally:
        session.tasks.discard(task)
        hanging_up.cancel()


async def _wait_for_end(request: Request) -> None:
    """Returns when the caller of a request whose body was read closes the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _count_usage(reply: PolicyReply) -> dict[str, int]:
    """Numbers of tokens, as the protocol names them."""
    num_drawn = len(reply.token_ids)
    total = reply.num_prompt_tokens + num_drawn
    return {"prompt_tokens": reply.num_prompt_tokens, "completion_tokens": num_drawn, "total_tokens": total}


def _describe_reply(kind: str, reply: PolicyReply) -> dict[str, object]:
    """The fields that an answer of either kind has besides its choices."""
    number = abs(hash((tuple(reply.token_ids), reply.num_prompt_tokens)))
    return {
        "id": f"{kind.split('.', 1)[0]}-{number:x}",
        "object": kind,
        "created": int(time.time()),
        "model": MODEL,
        "usage": _count_usage(reply),
    }


def _chat_answer(reply: PolicyReply, body: Mapping[str, object]) -> dict[str, object]:
    """A ``chat.completion`` of the protocol."""
    message = reply.message
    finish = "tool_calls" if message.get("tool_calls") else reply.finish_reason
    logprobs = None
    if body.get("logprobs"):
        pairs = zip(reply.token_ids, reply.log_probs, strict=True)
        content = [
            {"token": f"token_id:{token}", "logprob": log_prob, "bytes": None, "top_logprobs": []}
            for token, log_prob in pairs
        ]
        logprobs = {"content": content, "refusal": None}
    choice = {"index": 0, "message": {"refusal": None, **message}, "finish_reason": finish, "logprobs": logprobs}
    return _describe_reply("chat.completion", reply) | {"choices": [choice]}


def _text_answer(reply: PolicyReply, body: Mapping[str, object]) -> dict[str, object]:
    """A ``text_completion`` of the protocol."""
    logprobs = None
    if body.get("logprobs"):
        tokens = [f"token_id:{token}" for token in reply.token_ids]
        logprobs = {"tokens": tokens, "token_logprobs": reply.log_probs, "top_logprobs": None, "text_offset": None}
    choice = {"index": 0, "text": reply.text, "finish_reason": reply.finish_reason, "logprobs": logprobs}
    return _describe_reply("text_completion", reply) | {"choices": [choice]}


async def _stream_events(content: JsonObject, body: JsonObject, is_chat: bool) -> AsyncIterator[str]:
    """A streamed answer as server-sent events: one chunk with all of it, one that ends it, the usage if it is asked
    for, and ``[DONE]``."""
    about = {name: value for name, value in content.items() if name not in ("choices", "usage")}
    (choice,) = content["choices"]
    if is_chat:
        about["object"] = "chat.completion.chunk"
        delta = {name: value for name, value in choice["message"].items() if name != "refusal"}
        if delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(delta["tool_calls"])]
        pieces = [{"delta": delta, "finish_reason": None}, {"delta": {}, "finish_reason": choice["finish_reason"]}]
        pieces[0]["logprobs"] = choice["logprobs"]
    else:
        pieces = [choice]
    for piece in pieces:
        yield f"data: {json.dumps(about | {'choices': [{'index': 0, **piece}]})}\n\n"
    if (body.get("stream_options") or {}).get("include_usage"):
        yield f"data: {json.dumps(about | {'choices': [], 'usage': content['usage']})}\n\n"
    yield "data: [DONE]\n\n"


_OPEN: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Endpoint] = weakref.WeakKeyDictionary()


@contextlib.asynccontextmanager
async def open_endpoint() -> AsyncIterator[Endpoint]:
    """The endpoint of this event loop, which all samples share. It listens while any of them is inside the block."""
    loop = asyncio.get_running_loop()
    endpoint = _OPEN.setdefault(loop, Endpoint())
    endpoint.users += 1
    try:
        await endpoint.start()
        yield endpoint
    finally:
        endpoint.users -= 1
        if endpoint.users == 0:
            # Before the wait: whoever comes meanwhile gets an endpoint that stays.
            del _OPEN[loop]
            await endpoint.stop()
