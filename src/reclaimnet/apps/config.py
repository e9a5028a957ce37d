"""Configuration of the command line: one frozen object, read once, that knows its values' origins.

Flag > environment > the named state's own file > ./reclaimnet.toml > the user's file > the system's
file > default.
"""

import difflib
import os
import shlex
import tempfile
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from reclaimnet.errors import BadConfig
from reclaimnet.model.units import GIB

DEFAULT_GATEWAY_PORT: Final = 7460
DEFAULT_VAULT_QUOTA: Final = 64 * GIB
DEFAULT_GUEST_DISK: Final = 100 * GIB

KEYS: Final = (
    "gateway.url",
    "gateway.token",
    "gateway.ca",
    "nats.url",
    "nats.token",
    "notify.webhook",
    "notify.command",
    "notify.events",
    "state",
)
"""Every key there is. In a file `gateway.url` is `url` in the table `[gateway]`; in the environment
it is RECLAIMNET_GATEWAY__URL."""

ENV_PREFIX: Final = "RECLAIMNET_"
PROJECT_FILE: Final = Path("reclaimnet.toml")
SYSTEM_FILE: Final = Path("/etc/reclaimnet/config.toml")
FILE: Final = "config.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    gateway_url: str | None
    gateway_token: str | None
    gateway_ca: str | None = None
    """PEM: the authority by which a gateway with https proves to be the campus's, and no other."""
    nats_url: str | None
    nats_token: str | None
    state: Path
    """Where everything that is ours and lasts is kept: the server's store, agents, vaults."""
    file: Path
    """Where the address and token of a gateway are remembered."""
    notify_webhook: str | None = None
    """An address that is told of events by POST; it may carry a secret."""
    notify_command: str | None = None
    """A command that gets an event's text on its standard input, such as one that sends a mail."""
    notify_events: str | None = None
    """Which events, by name, with commas between them; all if it is not set."""
    origins: Mapping[str, str]
    """For each key that has a value, where it is from: a flag, a variable, a file, or default."""

    @property
    def agents(self) -> Path:
        """One directory for each agent of this machine, named like its node."""
        return self.state / "agents"

    @property
    def rn(self) -> str:
        """How commands begin that are to find what is kept here."""
        named = ["--state", str(self.state)] if self.origins.get("state") == "flag" else []
        return shlex.join(["rn", *named])


def load(
    *,
    flags: Mapping[str, str | None] | None = None,
    env: Mapping[str, str] = os.environ,
    project: Path = PROJECT_FILE,
    system: Path = SYSTEM_FILE,
) -> Config:
    """Raises BadConfig for unknown keys and for files that cannot be read."""
    user = user_file(env)
    flagged = [("flag", key, value) for key, value in (flags or {}).items() if value is not None]
    said = [*_from_environment(env)]
    filed = [*_from_file(project), *_from_file(user), *_from_file(system)]
    filed.append(("default", "state", str(_xdg(env, "XDG_STATE_HOME", ".local/state"))))
    own = _own_file(_state_in(flagged), _state_in([*said, *filed]))
    owned = [*_from_file(own)] if own is not None else []
    if any(key == "gateway.url" for _, key, _ in owned):
        # What is known of another campus's gateway is of no use with this one.
        filed = [each for each in filed if not each[1].startswith("gateway.")]
    values: dict[str, str] = {}
    origins: dict[str, str] = {}
    for origin, key, value in (*flagged, *said, *owned, *filed):
        if key not in values:
            values[key], origins[key] = value, origin
    mine = [file for file in (own, user, system) if file is not None]
    _refuse_borrowed_token(values, origins, project=project, mine=mine)
    return Config(
        gateway_url=values.get("gateway.url"),
        gateway_token=values.get("gateway.token"),
        gateway_ca=values.get("gateway.ca"),
        nats_url=values.get("nats.url"),
        nats_token=values.get("nats.token"),
        notify_webhook=values.get("notify.webhook"),
        notify_command=values.get("notify.command"),
        notify_events=values.get("notify.events"),
        state=_place(values["state"]),
        file=own or user,
        origins=origins,
    )


def _state_in(said: Iterable[tuple[str, str, str]]) -> Path | None:
    return next((_place(value) for _, key, value in said if key == "state"), None)


def _own_file(named: Path | None, usual: Path | None) -> Path | None:
    """Who names another place than the usual one may have a campus in each: what is known of the
    one there is kept there."""
    return None if named is None or named == usual else named / FILE


def _place(text: str) -> Path:
    return Path(text).expanduser().absolute()


def user_file(env: Mapping[str, str] = os.environ) -> Path:
    return _xdg(env, "XDG_CONFIG_HOME", ".config") / FILE


def remember_gateway(path: Path, *, url: str, token: str, ca: str | None = None) -> None:
    """Write them into the file, readable by no one else; keys of other things stay."""
    values = {key: value for _, key, value in _from_file(path)}
    values.pop("gateway.ca", None)
    values |= {"gateway.url": url, "gateway.token": token} | ({"gateway.ca": ca} if ca else {})
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # mkstemp makes the file 0600, and the rename keeps a reader from ever seeing half of it.
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".config-")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(_to_toml(values))
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def did_you_mean(word: str, known: tuple[str, ...] | list[str]) -> str:
    """An ending for a sentence about an unknown word: a likely one, or all of them."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; there are: {', '.join(known)}" if known else ""


def _from_environment(env: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    known = {ENV_PREFIX + key.upper().replace(".", "__"): key for key in KEYS}
    for name in sorted(env):
        if not name.startswith(ENV_PREFIX):
            continue
        if name not in known:
            raise BadConfig(f"{name} is not a setting of ours{did_you_mean(name, list(known))}")
        if env[name]:
            yield name, known[name], env[name]


def _from_file(path: Path) -> Iterator[tuple[str, str, str]]:
    try:
        text = path.read_bytes().decode()
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfig(f"{path} cannot be read ({error}); mend or remove it") from error
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadConfig(f"{path} is not valid TOML: {error}") from error
    for key, value in _flatten(table):
        if key not in KEYS:
            raise BadConfig(f"{path}: unknown key {key}{did_you_mean(key, KEYS)}")
        if not isinstance(value, str):
            raise BadConfig(f'{path}: {key} must be a text in quotes, for example {key} = "..."')
        yield str(path), key, value


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _refuse_borrowed_token(
    values: Mapping[str, str],
    origins: Mapping[str, str],
    *,
    project: Path,
    mine: Collection[Path],
) -> None:
    """A directory someone else wrote must not have our token sent to a server of its choice."""
    if origins.get("gateway.ca") == str(project) != origins.get("gateway.url"):
        raise BadConfig(
            f"{project} says by which authority to know a gateway that is not its own; put "
            "gateway.url beside gateway.ca, or take it out"
        )
    files = [str(file) for file in mine]
    for service in ("gateway", "nats"):
        url, token = f"{service}.url", f"{service}.token"
        if origins.get(url) != str(project) or origins.get(token) not in files:
            continue
        own = {key: value for _, key, value in _from_file(Path(origins[token]))}
        if own.get(url) != values[url]:
            raise BadConfig(
                f"{project} names the {service} {values[url]}, but your token in {origins[token]} "
                f"is for another one; put {token} beside the url, or pass both yourself"
            )


def _xdg(env: Mapping[str, str], variable: str, fallback: str) -> Path:
    base = env.get(variable, "")
    # The XDG specification has relative paths ignored.
    if base.startswith("/"):
        return Path(base) / "reclaimnet"
    return Path(env.get("HOME") or Path.home()) / fallback / "reclaimnet"


def _to_toml(values: Mapping[str, str]) -> str:
    lines = [f"{key} = {_quoted(values[key])}" for key in KEYS if "." not in key and key in values]
    for service in ("gateway", "nats", "notify"):
        keys = [key for key in KEYS if key.startswith(f"{service}.") and key in values]
        if keys:
            lines += ["", f"[{service}]"]
            lines += [f"{key.partition('.')[2]} = {_quoted(values[key])}" for key in keys]
    return "\n".join(lines).lstrip("\n") + "\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c >= " " else f"\\u{ord(c):04x}" for c in escaped) + '"'
