"""The web page as the gateway serves it: files of this package, and plotly's script from its own.

Everything is served from here, so that the page works without any other network.
"""

import asyncio
import functools
import gzip
import importlib.util
import mimetypes
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import blake3
from litestar import Request, Response, get
from litestar.datastructures import State
from litestar.params import FromPath
from litestar.types import ControllerRouterHandler

from reclaimnet.errors import NotFound

FOLDER: Final = Path(__file__).parent / "web"
PLOTLY: Final = "plotly.min.js"
WORTH_PACKING: Final = 1024
"""Bytes; smaller files gain nothing from being compressed."""

_HEADERS: Final = {
    # Plotly writes styles of its own; scripts come from here and nowhere else.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'self'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
}
Req = Request[Any, Any, State]


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    media_type: str
    plain: bytes
    packed: bytes | None
    tag: str


def handlers() -> list[ControllerRouterHandler]:
    return [page, asset]


@get("/", opt={"public": True}, include_in_schema=False)
async def page(request: Req) -> Response[bytes]:
    return _answer(request, await asyncio.to_thread(_file, "index.html"))


@get("/web/{name:path}", opt={"public": True}, include_in_schema=False)
async def asset(request: Req, name: FromPath[str]) -> Response[bytes]:
    return _answer(request, await asyncio.to_thread(_file, str(name).lstrip("/")))


def _answer(request: Req, file: _File) -> Response[bytes]:
    headers = {**_HEADERS, "ETag": file.tag}
    if file.tag in request.headers.get("If-None-Match", ""):
        return Response(b"", status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    content = file.plain
    if file.packed is not None and "gzip" in request.headers.get("Accept-Encoding", ""):
        content = file.packed
        headers["Content-Encoding"] = "gzip"
    return Response(content, headers=headers, media_type=file.media_type)


def _file(name: str) -> _File:
    path = _plotly() if name == PLOTLY else _places().get(name)
    if path is None:
        raise NotFound(f"the page has no file {name[:80]!r}")
    return _read(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _read(path: Path, _changed_at: int) -> _File:
    plain = path.read_bytes()
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    if path.suffix == ".js":
        kind = "text/javascript"
    return _File(
        media_type=kind,  # The framework adds the charset to text.
        plain=plain,
        packed=gzip.compress(plain, 6) if len(plain) > WORTH_PACKING else None,
        tag=f'"{blake3.blake3(plain).hexdigest(12)}"',
    )


@functools.cache
def _places() -> dict[str, Path]:
    """Only what is listed can be asked for, so a path cannot lead out of the folder."""
    return {
        path.relative_to(FOLDER).as_posix(): path for path in FOLDER.rglob("*") if path.is_file()
    }


def _plotly() -> Path | None:
    spec = importlib.util.find_spec("plotly")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "package_data" / PLOTLY
        if path.is_file():
            return path
    return None
