"""The web application of the studio: what each address answers. The pages themselves are in ``static/``."""

from __future__ import annotations

import functools
import math
import mimetypes
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route

from sfumato.errors import UserError
from sfumato.serving.requests import RefusedRequestError, RequestGuard
from sfumato.studio.access import TokenGuard
from sfumato.studio.checkpoints import describe_checkpoints
from sfumato.studio.gallery import describe_cells, describe_frames, describe_gallery, describe_sample, describe_step
from sfumato.studio.live import Live
from sfumato.studio.overview import describe_files, describe_overview, describe_run, describe_status, read_log
from sfumato.studio.requests import (
    find_run,
    find_sample,
    json_response,
    number_list,
    number_parameter,
    refuse_request,
    text_parameter,
    text_parameters,
)
from sfumato.studio.runs import RunReader, RunsFolder
from sfumato.studio.series import reduce_curve
from sfumato.studio.spectrum import draw_spectrum
from sfumato.studio.stretches import describe_timeline
from sfumato.studio.thumbnails import WIDTHS, BrokenPictureError, Thumbnails
from sfumato.tracking.charts import theme_css

if TYPE_CHECKING:
    from starlette.types import ASGIApp

STATIC = Path(__file__).parent / "static"
MOST_COLUMNS = 64
"""Steps of the gallery that are sent at once."""
RUNS_AT_ONCE = 30
LIST_S = 0.7
"""How long the list of runs waits for runs to be read; the rest is read when the page asks again."""
NO_SEED = -(2**62)
FOR_EVER = "private, max-age=31536000, immutable"
MEDIA_TYPES = {
    ".png": "image/png",
    ".webp": "image/webp",
    ".wav": "audio/wav",
    ".flac": "audio/flac",
    ".mp4": "video/mp4",
}
"""Types of the files of a run that are sent as they are; others are not sent."""

Handler = Callable[[Request], Awaitable[Response]]


class Studio:
    """The answers of the studio about the runs below a folder.

    Args:
        root: the folder.
        thumbnails: the cache of small pictures.
    """

    def __init__(self, root: Path, thumbnails: Thumbnails | None = None) -> None:
        self.runs = RunsFolder(root)
        self.thumbnails = thumbnails or Thumbnails()
        self.live = Live(self.runs)
        self._static = _read_static()

    def routes(self) -> list[Route]:
        """Addresses and what answers them. Only POST changes anything."""
        return [
            Route("/", self.index),
            Route("/static/{path:path}", self.static),
            Route("/api/runs", _in_thread(self.list_runs)),
            Route("/api/names", _in_thread(self.list_names)),
            Route("/api/status", _in_thread(self.status)),
            Route("/api/overview", _in_thread(self.overview)),
            Route("/api/checkpoints", _in_thread(self.checkpoints)),
            Route("/api/metrics", _in_thread(self.metrics)),
            Route("/api/curves", _in_thread(self.curves)),
            Route("/api/gallery", _in_thread(self.gallery)),
            Route("/api/cells", _in_thread(self.cells)),
            Route("/api/step", _in_thread(self.step)),
            Route("/api/sample", _in_thread(self.sample)),
            Route("/api/frames", _in_thread(self.frames)),
            Route("/api/why", _in_thread(self.why)),
            Route("/api/compare", _in_thread(self.compare)),
            Route("/api/timeline", _in_thread(self.timeline)),
            Route("/api/files", _in_thread(self.files)),
            Route("/api/log", _in_thread(self.log)),
            Route("/thumbnail", _in_thread(self.thumbnail)),
            Route("/file", _in_thread(self.file)),
            Route("/spectrum", _in_thread(self.spectrum)),
            Route("/events", self.events),
        ]

    async def index(self, request: Request) -> Response:
        """The one page, which shows a view by what stands behind the # of its address."""
        return self._static["index.html"]()

    async def static(self, request: Request) -> Response:
        """A script or a style sheet of the studio's own: only what was read at its start is sent."""
        make = self._static.get(request.path_params["path"])
        return make() if make else refuse_request(404, "there is no such file")

    def list_runs(self, request: Request) -> Response:
        """Runs from one on, the newest first; with ``quick`` none is read that nobody has looked at yet."""
        first = number_parameter(request, "first", 0)
        search = request.query_params.get("search", "")[:200].lower()
        names = [name for name in self.runs.names() if search in name.lower()]
        is_quick = "quick" in request.query_params
        deadline = -math.inf if is_quick else time.monotonic() + LIST_S
        described: list[dict[str, object] | None] = []
        has_read = is_quick
        for name in names[first : first + RUNS_AT_ONCE]:
            line = self.runs.described(name, describe_run, may_read=False)
            if line is not None and "is_pending" in line and (not has_read or time.monotonic() < deadline):
                line = self.runs.described(name, describe_run)
                has_read = True  # one at least, so that a page that asks again comes to an end
            described.append(line)
        return json_response(
            {
                "runs": [line for line in described if line is not None],
                "total": len(names),
                "was_cut": self.runs.was_cut,
                "folder": self.runs.root.name,
                "problem": self.thumbnails.problem or self.runs.problem,
            }
        )

    def list_names(self, request: Request) -> Response:
        """Names of all runs, the newest first: without what is known of them, for which they would be read."""
        return json_response({"names": self.runs.names()})

    def status(self, request: Request) -> Response:
        """What the run is doing, and what a person should be told of."""
        return json_response(self._run(request).share(describe_status))

    def checkpoints(self, request: Request) -> Response:
        """The checkpoints of a run."""
        return json_response(describe_checkpoints(self._run(request)))

    def overview(self, request: Request) -> Response:
        """How a run is doing."""
        reader = self._run(request)
        return json_response({**reader.share(describe_overview), "cursor": str(reader.cursor())})

    def metrics(self, request: Request) -> Response:
        """Names of a run's metrics, with their newest values; flat ones are marked."""
        reader = self._run(request)
        listed = [
            {"name": name, "last": curve.last, "points": len(curve.steps), "is_flat": curve.is_flat}
            for name, curve in sorted(reader.curves.curves.items())
        ]
        return json_response({"metrics": listed, "last_step": reader.curves.last_step})

    def curves(self, request: Request) -> Response:
        """Curves of one or several runs, reduced to what a picture of some pixels can show."""
        width = number_parameter(request, "width", 600, least=50, most=4000)
        first = number_parameter(request, "first", 0)
        last = number_parameter(request, "last", 2**53 - 1)
        readers = [find_run(self.runs, name) for name in text_parameters(request, "run")]
        names = text_parameters(request, "name")
        curves = {
            reader.name: {
                name: reduce_curve(curve, width, first, last)
                for name in names
                if (curve := reader.curve(name)) is not None
            }
            for reader in readers
        }
        return json_response({"curves": curves})

    def gallery(self, request: Request) -> Response:
        """Rows and columns of the matrix of evaluations."""
        return json_response(describe_gallery(self._run(request)))

    def cells(self, request: Request) -> Response:
        """Cells of some columns of that matrix."""
        return json_response(describe_cells(self._run(request), number_list(request, "steps", MOST_COLUMNS)))

    def step(self, request: Request) -> Response:
        """Groups and samples of a step."""
        return json_response(describe_step(self._run(request), number_parameter(request, "step")))

    def sample(self, request: Request) -> Response:
        """One sample with everything that is known of it."""
        reader = self._run(request)
        step = number_parameter(request, "step")
        row = find_sample(reader, step, text_parameter(request, "kind"), number_parameter(request, "id"))
        return json_response(describe_sample(reader, step, row))

    def frames(self, request: Request) -> Response:
        """The samples of one prompt and seed over training."""
        seed = number_parameter(request, "seed", NO_SEED, least=NO_SEED)
        prompt_key = request.query_params.get("prompt_key")
        sample_id = number_parameter(request, "id")
        kind = request.query_params.get("kind", "eval")
        wanted_seed = None if seed == NO_SEED else seed
        return json_response(describe_frames(self._run(request), kind, sample_id, wanted_seed, prompt_key))

    def why(self, request: Request) -> Response:
        """What changed between two evaluations."""
        from sfumato.studio.comparison import explain_change  # imports torch, which takes seconds and memory

        reader = self._run(request)
        return json_response(
            explain_change(reader, number_parameter(request, "first"), number_parameter(request, "last"))
        )

    def compare(self, request: Request) -> Response:
        """Several runs beside each other."""
        from sfumato.studio.comparison import describe_comparison  # as above

        names = text_parameters(request, "run")
        if not 2 <= len(names) <= 8:
            raise RefusedRequestError(400, "give two to eight runs")
        step = number_parameter(request, "step", -1, least=-1)
        readers = [find_run(self.runs, name) for name in names]
        return json_response(describe_comparison(readers, None if step < 0 else step))

    def timeline(self, request: Request) -> Response:
        """What each process did in some steps."""
        return json_response(describe_timeline(self._run(request), number_parameter(request, "last", -1, least=-1)))

    def files(self, request: Request) -> Response:
        """Configuration and environment."""
        return json_response(describe_files(self._run(request)))

    def log(self, request: Request) -> Response:
        """A part of the log."""
        before = number_parameter(request, "before", -1, least=-1)
        after = number_parameter(request, "after", -1, least=-1)
        read = read_log(self._run(request), None if before < 0 else before, None if after < 0 else after)
        return json_response(read)

    def thumbnail(self, request: Request) -> Response:
        """A small copy of a picture. Its address holds the version of the file, so that browsers may keep it."""
        width = number_parameter(request, "width", 128)
        if width not in WIDTHS:
            raise RefusedRequestError(400, f"width must be one of {', '.join(map(str, WIDTHS))}")
        try:
            content = self.thumbnails.get(self._sample_path(request), width)
        except BrokenPictureError as error:
            return refuse_request(404, str(error))
        return Response(content, media_type="image/webp", headers={"cache-control": FOR_EVER})

    def spectrum(self, request: Request) -> Response:
        """A picture of the spectrum of a sound."""
        try:
            content = draw_spectrum(self._sample_path(request))
        except BrokenPictureError as error:
            return refuse_request(404, str(error))
        return Response(content, media_type="image/png", headers={"cache-control": FOR_EVER})

    def file(self, request: Request) -> Response:
        """A picture, an animation or a sound as the run has written it; a part of it where the browser asks for one."""
        path = self._sample_path(request)
        media_type = MEDIA_TYPES.get(path.suffix)
        if media_type is None:
            raise RefusedRequestError(404, "files of this kind are not sent")
        return FileResponse(path, media_type=media_type, headers={"cache-control": FOR_EVER})

    async def events(self, request: Request) -> Response:
        """The stream that says when there is something new."""
        run = request.query_params.get("run", "")
        if run and self.runs.reader(run) is None:
            raise RefusedRequestError(404, f"there is no run {run[:100]!r}")
        cursor = request.headers.get("last-event-id") or request.query_params.get("cursor", "")
        stream = await self.live.events(run, cursor[:1000])
        return StreamingResponse(stream, media_type="text/event-stream", headers={"cache-control": "no-store"})

    def _run(self, request: Request) -> RunReader:
        return find_run(self.runs, text_parameter(request, "run"))

    def _sample_path(self, request: Request) -> Path:
        """The file of a sample: one that the rows of its step name."""
        step = number_parameter(request, "step")
        name = text_parameter(request, "file")
        path = self._run(request).samples.path_of_file(step, name)
        if path is None or path.is_symlink() or not path.is_file():
            raise RefusedRequestError(404, f"step {step} has no file {name[:100]!r}")
        return path


def build_app(studio: Studio, token: str, names: tuple[str, ...] = (), more: tuple[Route, ...] = ()) -> ASGIApp:
    """The whole application with its guards.

    Args:
        studio: the answers.
        token: without which nothing is answered.
        names: hosts by which the studio may be called, besides those of this machine.
        more: routes of parts that are not always there, such as control.
    """

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, RefusedRequestError)
        return refuse_request(error.status, str(error))

    async def explain(request: Request, error: Exception) -> Response:
        return refuse_request(422, str(error))

    async def refuse_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return refuse_request(error.status_code, error.detail)

    app = Starlette(
        routes=[*studio.routes(), *more],
        exception_handlers={RefusedRequestError: refuse, UserError: explain, HTTPException: refuse_http},
    )
    remedy = ": start the studio with --name NAME to call it by that name"
    return RequestGuard(TokenGuard(app, token), names, remedy, has_pages=True)


def _in_thread(answer: Callable[[Request], Response]) -> Handler:
    """A handler that reads files in a thread, so that streams and other pages go on meanwhile."""

    @functools.wraps(answer)
    async def handle(request: Request) -> Response:
        return await run_in_threadpool(answer, request)

    return handle


def _read_static() -> dict[str, Callable[[], Response]]:
    """Makers of answers with the studio's own files, by their names."""
    files: dict[str, tuple[bytes, str]] = {"theme.css": (theme_css().encode(), "text/css")}
    for path in STATIC.rglob("*"):
        if path.is_file():
            media_type = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
            # systems differ in what they call a script, and browsers run a module of no other type
            media_type = "text/javascript" if path.suffix == ".js" else media_type
            files[path.relative_to(STATIC).as_posix()] = (path.read_bytes(), media_type)
    headers = {"cache-control": "no-cache"}
    return {
        name: functools.partial(Response, content, media_type=media_type, headers=headers)
        for name, (content, media_type) in files.items()
    }
