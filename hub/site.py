"""A site's settings, read from site.toml and checked: a class must not find out about a typing error.

python -m hub.site           # is COURSE_HUB_SITE, or hub/site.toml, in order?
python -m hub.site teachers  # one of [hub]'s values, for a shell
"""

import os
import re
import sys
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from urllib.parse import urlsplit

from course_lib.config import UserError, run_main

ROOT = Path(__file__).resolve().parents[1]
LOOPBACK = ("127.0.0.1", "localhost", "::1")
ACCOUNT = r"[a-z_][a-z0-9_.-]*"


@dataclass(frozen=True)
class Hub:
    url: str
    tls_key: str
    tls_cert: str
    address: str
    authenticator: str
    teachers: list
    learners: list
    idle_minutes: int
    servers: int
    starting: int


@dataclass(frozen=True)
class Course:
    published: str
    exchange: str
    venv: str
    data: str


@dataclass(frozen=True)
class Slurm:
    partition: str
    account: str
    hours: list
    start_minutes: int


@dataclass(frozen=True)
class Profile:
    name: str
    title: str
    options: str


@dataclass(frozen=True)
class Site:
    hub: Hub
    course: Course
    slurm: Slurm
    profiles: list[Profile]

    def profile(self, name: str) -> Profile:
        return next(profile for profile in self.profiles if profile.name == name)


def read(path: Path | None = None) -> Site:
    """The settings of a file, or what is wrong with it."""
    path = Path(path or os.environ.get("COURSE_HUB_SITE") or ROOT / "hub" / "site.toml")
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:  # TOML's errors, and bytes that are no text
        raise UserError(f"{path}: {error}") from error
    parts = {name: _part(path, name, kind, content.pop(name, {})) for name, kind in PARTS.items()}
    profiles = content.pop("profile", [])
    if not isinstance(profiles, list):
        raise UserError(f"{path}: a profile is written [[profile]], with two brackets, for there may be several")
    profiles = [_part(path, "profile", Profile, profile) for profile in profiles]
    if content:
        raise UserError(f"{path}: nobody knows what {', '.join(content)} is; hub/site.toml has all the names")
    site = Site(**parts, profiles=profiles)
    for complaint in complaints(site):
        raise UserError(f"{path}: {complaint}")
    return site


PARTS = {"hub": Hub, "course": Course, "slurm": Slurm}


def _part(path: Path, name: str, kind: type, content: dict):
    if not isinstance(content, dict):
        raise UserError(f"{path}: {name} is written [{name}], and there is one")
    wanted = {field.name: field.type for field in fields(kind)}
    for word in wanted.keys() - content.keys():
        raise UserError(f"{path}: [{name}] has no {word}; hub/site.toml has one to copy")
    for word in content.keys() - wanted.keys():
        raise UserError(f"{path}: [{name}] has a {word}, which nobody reads; hub/site.toml has all the names")
    for word, value in content.items():
        if type(value) is not wanted[word]:
            raise UserError(f"{path}: [{name}] {word} = {value!r} must be a {wanted[word].__name__}")
    return kind(**content)


def complaints(site: Site):
    """What would go wrong later."""
    hub, course, slurm = site.hub, site.course, site.slurm
    try:
        url, port = urlsplit(hub.url), urlsplit(hub.url).port
    except ValueError:
        url, port = urlsplit(""), None
    secure = bool(hub.tls_key and hub.tls_cert)
    if url.scheme not in ("http", "https") or not url.hostname or port == 0:
        yield f"url = {hub.url!r} must look like https://hub.centre.org"
    if port and port > 65533:
        yield f"url = {hub.url!r}: the two ports above it are needed too"
    if not hub.address:
        yield "address is empty: nodes would not find the hub"
    if re.match(r"$|dummy|null|shared-?password", hub.authenticator.rpartition(".")[2].lower()):
        yield f'authenticator = "{hub.authenticator}" asks for no password, or all for the same; "demo" is for one machine'
    for host in (url.hostname, hub.address):  # the hub itself has the login page too, at address
        if hub.authenticator == "demo" and host not in LOOPBACK:
            yield f'authenticator = "demo" has one password for all, so it stays on 127.0.0.1 and not {host}; use "pam"'
    if url.hostname not in LOOPBACK and not secure:
        yield "tls_key and tls_cert are missing: passwords would cross the network in plain text"
    if secure != (url.scheme == "https"):
        yield "https and the two files tls_key and tls_cert belong together"
    for file in filter(None, (hub.tls_key, hub.tls_cert)):
        if not os.access(file, os.R_OK):
            yield f"{file} can't be read"
    for word in (*hub.learners, *hub.teachers):
        if not (isinstance(word, str) and re.fullmatch(ACCOUNT, word)):
            yield f"{word!r} is no name of an account"
    for word in ("servers", "starting", "idle_minutes"):
        if getattr(hub, word) < 0:
            yield f"{word} = {getattr(hub, word)}: 0 means no limit"
    if slurm.start_minutes < 1:
        yield f"start_minutes = {slurm.start_minutes}: then no server ever starts"
    for word, path in vars(course).items():
        if path and not re.fullmatch(r"(/[\w.@+-]+)+", path):
            yield f"{word} = {path!r} must be a path from the root, of letters, digits and . _ @ + -"
    for word, value in {"partition": slurm.partition, "account": slurm.account}.items():
        if not re.fullmatch(r"[\w.,-]*", value):
            yield f"{word} = {value!r} must be of letters, digits and . _ , -"
    if not slurm.hours or not all(type(hour) is int and hour > 0 for hour in slurm.hours):
        yield "hours must be whole numbers above 0"
    names = [profile.name for profile in site.profiles]
    if not names or len(set(names)) != len(names):
        yield "there must be a [[profile]], and no two of the same name"
    for profile in site.profiles:
        if not re.fullmatch(r"[a-z0-9_]+", profile.name):
            yield f"a profile's name is of small letters, digits and _, unlike {profile.name!r}"
        if not all(re.fullmatch(r"--[a-z-]+=[\w.,:@/\[\]-]+", word) for word in profile.options.split()):
            yield f"options of {profile.name} must be like --nodes=1 --mem=3000, not {profile.options!r}"


def main() -> int:
    site = read()
    for word in sys.argv[1:]:
        value = getattr(site.hub, word)
        print(*value if isinstance(value, list) else [value])
    if not sys.argv[1:]:
        print(f"in order: {site.hub.url}, {len(site.profiles)} profiles, logins by {site.hub.authenticator}")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
