"""Jobs, as the gateway takes, lists and tells of them, and the bundles that go with them."""

from http import HTTPStatus
from typing import Annotated, Any, Final

import blake3
import msgspec
from litestar import Response, get, post, put, route
from litestar.datastructures import State
from litestar.params import FromPath, FromQuery, HeaderParameter, JSONBody, QueryParameter
from litestar.response import Stream

from reclaimnet.adapters.nats.bundles import MAX_BUNDLE_BYTES
from reclaimnet.apps.gateway_access import caller_of, while_known
from reclaimnet.apps.gateway_desk import CURSOR, MAX_NAME, MAX_PAGE, Page, Story, Submission
from reclaimnet.apps.gateway_http import Req, allowed, refuse_guesses
from reclaimnet.apps.gateway_schema import found, may_fail
from reclaimnet.errors import Unavailable
from reclaimnet.model.market import JobId
from reclaimnet.model.work import JobRecord

PAGE: Final = 100


class BundleStored(msgspec.Struct, frozen=True, kw_only=True):
    id: str


class Why(msgspec.Struct, frozen=True, kw_only=True):
    entries: list[dict[str, Any]]
    """From the journal, in time rank: what happened, what was considered, and why."""


@route("/jobs", http_method=["OPTIONS"], include_in_schema=False, opt={"public": True})
async def jobs_options() -> Response[None]:
    return allowed("GET, OPTIONS, POST")


@post("/jobs", responses={200: found(JobRecord), **may_fail(400, 403, 413)})
async def submit(
    state: State,
    request: Req,
    data: JSONBody[Submission],
    key: Annotated[str | None, HeaderParameter(name="Idempotency-Key")] = None,
) -> Response[JobRecord]:
    """With an `Idempotency-Key`, sending the same job again gives the same job."""
    await refuse_guesses(request, Submission)
    record, is_new = await state.desk.submit(data, key, caller_of(request))
    status = HTTPStatus.CREATED if is_new else HTTPStatus.OK
    return Response(record, status_code=status, headers={"Location": f"/api/v1/jobs/{record.id}"})


@get("/jobs", responses={200: found(Page), **may_fail(400)})
async def list_jobs(
    state: State,
    request: Req,
    all: FromQuery[bool] = False,
    limit: Annotated[int, QueryParameter(ge=1, le=MAX_PAGE)] = PAGE,
    cursor: Annotated[str | None, QueryParameter(pattern=CURSOR)] = None,
    named: Annotated[str, QueryParameter(max_length=MAX_NAME)] = "",
) -> Response[Any]:
    """Newest first; with `named`, those of this name or whose id begins so. With `If-None-Match`,
    an unchanged list is not sent again."""
    page: Page = state.desk.page(
        caller_of(request), ended_too=all, limit=limit, cursor=cursor, named=named
    )
    body = msgspec.json.encode(page)
    tag = f'"{blake3.blake3(body).hexdigest(12)}"'
    headers = {"ETag": tag, "Cache-Control": "no-cache"}
    known = request.headers.get("If-None-Match", "")
    if tag in [each.strip().removeprefix("W/") for each in known.split(",")]:
        return Response(None, status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    return Response(body, headers=headers, media_type="application/json")


@get("/jobs/{job:str}", responses=may_fail(404))
async def show_job(state: State, request: Req, job: FromPath[str]) -> JobRecord:
    """What it runs and was told is shown to its user and to operators only."""
    return caller_of(request).shown(await state.desk.record(JobId(job)))


async def _theirs(state: State, request: Req, job: str, to_do: str) -> JobRecord:
    record: JobRecord = await state.desk.record(JobId(job))
    caller_of(request).check_job(record, to_do)
    return record


@post("/jobs/{job:str}/cancel", status_code=200, responses=may_fail(403, 404))
async def cancel_job(state: State, request: Req, job: FromPath[str]) -> JobRecord:
    await _theirs(state, request, job, "cancel it")
    record: JobRecord = await state.desk.cancel(JobId(job))
    return record


@get("/jobs/{job:str}/logs", media_type="text/plain", responses=may_fail(400, 403, 404))
async def job_logs(
    state: State, request: Req, job: FromPath[str], follow: FromQuery[bool] = False
) -> Stream:
    record = await _theirs(state, request, job, "read what it writes")
    log = while_known(state.access, caller_of(request), state.desk.log(record.id, follow=follow))
    return Stream(log, media_type="text/plain; charset=utf-8")


@get("/jobs/{job:str}/output", media_type="application/x-tar", responses=may_fail(403, 404))
async def job_output(state: State, request: Req, job: FromPath[str]) -> Stream:
    """What a completed job left in its output directory, as a tar."""
    record = await _theirs(state, request, job, "fetch its output")
    if state.outputs is None:
        raise Unavailable("this gateway cannot fetch output; ask another one")
    return Stream(await state.outputs.fetch(record), media_type="application/x-tar")


@get("/jobs/{job:str}/why", responses=may_fail(403, 404))
async def job_why(state: State, request: Req, job: FromPath[str]) -> Why:
    record = await _theirs(state, request, job, "read its journal")
    return Why(entries=await state.campus.read_journal(record.id))


@get("/jobs/{job:str}/story", responses=may_fail(403, 404))
async def job_story(state: State, request: Req, job: FromPath[str]) -> Story:
    """The same in words, as `rn why` tells it, and the numbers that a plot of it needs."""
    await _theirs(state, request, job, "read its journal")
    story: Story = await state.desk.story(JobId(job))
    return story


@put("/bundles", request_max_body_size=MAX_BUNDLE_BYTES, responses=may_fail(403, 413))
async def put_bundle(state: State, request: Req) -> BundleStored:
    """The body is the tar itself."""
    stored = await state.desk.put_bundle(await request.body(), caller_of(request))
    return BundleStored(id=stored)


HANDLERS: Final = (
    jobs_options,
    submit,
    list_jobs,
    show_job,
    cancel_job,
    job_logs,
    job_why,
    job_story,
    job_output,
    put_bundle,
)
