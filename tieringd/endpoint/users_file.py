"""
The file with an archive endpoint's users and rules.

    users:
      alice:
        SCRAM-SHA-256: {iterations: 8192, salt: ..., stored_key: ..., server_key: ...}
    rules:
      - {principal: "User:alice", operations: [READ], topic: orders}
      - {principal: "User:*", operations: [DESCRIBE], prefix: public.}
      - {principal: "User:alice", operations: [READ], group: billing}
      - {principal: "User:alice", operations: [READ, DELETE], group_prefix: alice.}

No password is in it, only what SCRAM verifies one with (RFC 5802). With the file one can still try passwords,
so only its owner may read it. It is looked at every few seconds. A file that cannot be used changes nothing.
It is the same subset of YAML as the configuration: no name is read as another type, and none stands twice.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import fcntl
import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Final, TypeAlias

import structlog
import yaml

from tieringd.config.yaml_source import Document, Place, read_document
from tieringd.endpoint.access import EVERYTHING, Access, AccessRule, Resource
from tieringd.errors import ConfigError
from tieringd.storage.file_root import sync_directory
from tieringd.storage.threads import in_thread

log = structlog.get_logger(__name__)

MECHANISMS: Final[Mapping[str, str]] = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
"""The hash function of each mechanism of SCRAM."""
ITERATIONS_MIN: Final = 4096
ITERATIONS_MAX: Final = 65_536
"""More would let clients keep a processor busy by logging in."""
DEFAULT_ITERATIONS: Final = 8192
_SALT_BYTES: Final = 24
_CHECKS_MAX: Final = 2
_FILE_BYTES_MAX: Final = 16 << 20
_PRINCIPAL: Final = "User:"
_Version: TypeAlias = tuple[int, int, int, int]
"""Differs whenever a file has changed: its time, inode, size and mode."""
_NAME_MAX: Final = 120
_PLACES: Final[Mapping[str, tuple[Resource, bool]]] = {
    "topic": (Resource.TOPIC, False),
    "prefix": (Resource.TOPIC, True),
    "group": (Resource.GROUP, False),
    "group_prefix": (Resource.GROUP, True),
}
"""The fields of a rule that name topics or groups, and whether by what their names begin with."""


@dataclass(frozen=True, slots=True)
class ScramCredential:
    """The stored values that verify a password."""

    mechanism: str
    iterations: int
    salt: bytes
    stored_key: bytes = field(repr=False)
    server_key: bytes = field(repr=False)

    @classmethod
    def of_password(
        cls, mechanism: str, password: str, *, salt: bytes | None = None, iterations: int = DEFAULT_ITERATIONS
    ) -> ScramCredential:
        """Return the credential of *password*. It takes milliseconds."""
        salt, digest = salt or secrets.token_bytes(_SALT_BYTES), MECHANISMS[mechanism]
        salted = hashlib.pbkdf2_hmac(digest, password.encode(), salt, iterations)
        client_key = hmac.digest(salted, b"Client Key", digest)
        return cls(
            mechanism,
            iterations,
            salt,
            hashlib.new(digest, client_key).digest(),
            hmac.digest(salted, b"Server Key", digest),
        )

    def has_password(self, password: str) -> bool:
        """Say whether *password* is the credential's, in a time that tells nothing. It takes milliseconds."""
        given = self.of_password(self.mechanism, password, salt=self.salt, iterations=self.iterations)
        return hmac.compare_digest(given.stored_key, self.stored_key)

    def has_proof(self, proof: bytes, message: bytes) -> bool:
        """Say whether *proof* is a client's signature of *message*, in a time that tells nothing."""
        digest = MECHANISMS[self.mechanism]
        signature = hmac.digest(self.stored_key, message, digest)
        if len(proof) != len(signature):
            return False
        client_key = bytes(one ^ other for one, other in zip(proof, signature, strict=True))
        return hmac.compare_digest(hashlib.new(digest, client_key).digest(), self.stored_key)

    def signature(self, message: bytes) -> bytes:
        """Return the server's signature of *message*."""
        return hmac.digest(self.server_key, message, MECHANISMS[self.mechanism])


@dataclass(frozen=True, slots=True)
class Users:
    """The content of a users file."""

    credentials: Mapping[str, Mapping[str, ScramCredential]] = field(default_factory=dict)
    """Credentials by user and mechanism."""
    rules: tuple[AccessRule, ...] = ()

    @classmethod
    def read(cls, path: Path) -> Users:
        """
        Read a file.

        Raises:
            ConfigError: It cannot be read, others than its owner can read it, or it is not a users file.
        """
        return cls.parsed(_text(path), source=str(path))

    @classmethod
    def parsed(cls, text: str, *, source: str) -> Users:
        """
        Parse the *text* of a file.

        Raises:
            ConfigError: It is not a users file. The error quotes no credential.
        """
        if not text.strip():
            # A copy that has just begun is empty: it must not send all users away.
            raise ConfigError(f"{source}: it is empty; without users, write users: {{}}")
        document = read_document(text, {})
        if document.problems:
            raise ConfigError(document.problems[0].located(source))
        return _Reading(source, document).users()

    def with_user(self, name: str, password: str) -> Users:
        """Return these users with a new one, or with a new password of one that is there."""
        added = {one: ScramCredential.of_password(one, password) for one in MECHANISMS}
        return Users({**self.credentials, name: added}, self.rules)

    def without_user(self, name: str) -> Users:
        """Return these users without one. The rules stay."""
        return Users({one: each for one, each in self.credentials.items() if one != name}, self.rules)

    def has_password(self, name: str, password: str) -> bool:
        """Say whether a user is there with *password*, for every mechanism. It takes milliseconds."""
        known = self.credentials.get(name, {})
        return known.keys() == MECHANISMS.keys() and all(one.has_password(password) for one in known.values())

    def write(self, path: Path) -> None:
        """
        Write a file that only its owner can read, whole or not at all. A file that is there keeps its owner.

        Raises:
            OSError: It cannot be written, or its owner cannot be kept.
        """
        # A symbolic link stays one.
        path = path.resolve()
        # A temporary file of this kind has mode 600 from its first moment.
        with NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            try:
                with suppress(FileNotFoundError):
                    before = path.stat()
                    if before.st_uid != os.geteuid():
                        # Otherwise the daemon could no longer read what root has changed.
                        os.fchown(file.fileno(), before.st_uid, before.st_gid)
                yaml.safe_dump(self._document(), file, sort_keys=False, allow_unicode=True)
                file.flush()
                os.fsync(file.fileno())
                Path(file.name).replace(path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
        sync_directory(path.parent)

    def _document(self) -> dict[str, Any]:
        return {
            "users": {
                name: {
                    one.mechanism: {
                        "iterations": one.iterations,
                        "salt": base64.b64encode(one.salt).decode(),
                        "stored_key": base64.b64encode(one.stored_key).decode(),
                        "server_key": base64.b64encode(one.server_key).decode(),
                    }
                    for one in by_mechanism.values()
                }
                for name, by_mechanism in self.credentials.items()
            },
            "rules": [
                {
                    "principal": one.principal,
                    "operations": sorted(operation.name for operation in one.operations),
                    _place_of(one): one.name,
                }
                for one in self.rules
            ],
        }


class UserDirectory:
    """The users and rules that are in force now."""

    def __init__(self, path: Path | None) -> None:
        """
        Read the file; without one, everyone may read everything.

        Raises:
            ConfigError: The file cannot be used.
        """
        self._path = path
        self._version = _version(path)
        self._decoy = secrets.token_bytes(32)
        self._refused: tuple[_Version | None, str] | None = None
        """The change that could not be used at the last look, and why."""
        self._checks = asyncio.Semaphore(_CHECKS_MAX)
        self._take(Users() if path is None else Users.read(path))

    @property
    def has_users(self) -> bool:
        """Say whether clients have to log in."""
        return self._path is not None

    def access_of(self, principal: str) -> Access:
        """Return what a client that has logged in may do now."""
        return Access.of(principal, self._users.rules) if self.has_users else EVERYTHING

    def credential(self, user: str, mechanism: str) -> ScramCredential | None:
        """Return a user's credential for a mechanism of SCRAM."""
        return self._users.credentials.get(user, {}).get(mechanism)

    def decoy(self, user: str, mechanism: str) -> ScramCredential:
        """
        Return a credential that no password fits, for a user that does not exist.

        It is the same for each try, and its iterations and the size of its salt are those of a user that
        exists, so that a client cannot tell which users there are.
        """
        digest = MECHANISMS[mechanism]
        made = hmac.digest(self._decoy, user.encode(), digest)
        forms = self._forms.get(mechanism) or ((DEFAULT_ITERATIONS, _SALT_BYTES),)
        iterations, salt_bytes = forms[int.from_bytes(made[-4:]) % len(forms)]
        salt = hashlib.shake_256(made).digest(salt_bytes)
        return ScramCredential(mechanism, iterations, salt, made, made)

    async def has_password(self, credential: ScramCredential, password: str) -> bool:
        """
        Say whether *password* is the credential's. Few are verified at the same time.

        Otherwise clients that try many passwords take all threads from those that read.
        """
        async with self._checks:
            return await in_thread(credential.has_password, password)

    def _take(self, users: Users) -> None:
        self._users = users
        self._forms = {
            mechanism: tuple(
                (one.iterations, len(one.salt))
                for by_mechanism in users.credentials.values()
                if (one := by_mechanism.get(mechanism)) is not None
            )
            for mechanism in MECHANISMS
        }

    def renew(self) -> None:
        """
        Read the file again if it has changed. A faulty one is logged once per change. Blocks.

        One that cannot be read now, or is gone, is tried again each time.
        """
        version = _version(self._path)
        if self._path is None or (version is not None and version == self._version):
            return
        try:
            text = _text(self._path)
            self._version = version
            self._take(Users.parsed(text, source=str(self._path)))
        except ConfigError as error:
            if self._refused != (version, str(error)):
                log.error(  # noqa: TRY400 its text is enough
                    "a changed users file cannot be used; the users and rules before it stay",
                    error=str(error),
                )
            self._refused = version, str(error)
            if version is None:
                self._version = None
        else:
            self._refused = None
            log.info(
                "users file read again", users=len(self._users.credentials), rules=len(self._users.rules)
            )


def _version(path: Path | None) -> _Version | None:
    try:
        found = None if path is None else path.stat()
    except OSError:
        return None
    return None if found is None else (found.st_mtime_ns, found.st_ino, found.st_size, found.st_mode)


def _text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            found = os.fstat(file.fileno())
            if stat.S_IMODE(found.st_mode) & (stat.S_IRWXG | stat.S_IRWXO):
                raise ConfigError(
                    f"{path}: others than its owner may read or change it",
                    hint=f"Run chmod 600 {path}, and make the user of tieringd its owner",
                )
            if found.st_size > _FILE_BYTES_MAX:
                raise ConfigError(f"{path}: it is larger than {_FILE_BYTES_MAX} bytes")
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        hint = "Make it with `tieringd endpoint user add NAME --file F`"
        if isinstance(error, PermissionError):
            hint = "Make the user of tieringd its owner, with chown"
        raise ConfigError(f"gateway.users_file {path} cannot be read: {reason}", hint=hint) from None


def _place_of(rule: AccessRule) -> str:
    return next(place for place, found in _PLACES.items() if found == (rule.resource, rule.is_prefix))


def fault_of_name(name: str) -> str | None:
    """Say what is wrong with a user's name, or None. Logs and metrics have names, and SCRAM escapes some."""
    if not name or len(name) > _NAME_MAX:
        return f"a user's name must have 1 to {_NAME_MAX} characters"
    if not name.isprintable() or name != name.strip() or "," in name or "=" in name:
        return (
            f"the user's name {name!r} must have no comma, equals sign, line break or control character, and "
            "no space at its ends"
        )
    return None


@contextmanager
def lock_users(path: Path) -> Iterator[None]:
    """
    Keep other commands from changing the file until the end: the change of one would be lost.

    Raises:
        OSError: The file's directory cannot be opened.
    """
    directory = os.open(path.resolve().parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


@dataclass(frozen=True, slots=True)
class _Reading:
    """The checks of a file's content. Each error has the line, and no error quotes a credential."""

    source: str
    document: Document

    def users(self) -> Users:
        document = self.document.data or {}
        unknown = sorted(document.keys() - {"users", "rules"})
        if unknown:
            raise self._fault((unknown[0],), "the file may have the sections users and rules, nothing else")
        users, rules = document.get("users"), document.get("rules")
        if not isinstance(users, dict | None):
            raise self._fault(("users",), "users must be a section")
        if not isinstance(rules, tuple | None):
            raise self._fault(("rules",), "rules must be a list")
        return Users(
            {name: self._credentials(name, one) for name, one in (users or {}).items()},
            tuple(self._rule(number, one) for number, one in enumerate(rules or ())),
        )

    def _fault(self, place: Place, message: str) -> ConfigError:
        return ConfigError(f"{self.source}:{self.document.line_of(place)}: {message}")

    def _credentials(self, name: str, document: Any) -> Mapping[str, ScramCredential]:
        place: Place = ("users", name)
        fault = fault_of_name(name)
        if fault is not None:
            raise self._fault(place, fault)
        if not isinstance(document, dict) or not document or not document.keys() <= MECHANISMS.keys():
            raise self._fault(place, f"user {name!r} must have a credential for {' or '.join(MECHANISMS)}")
        return {
            mechanism: self._credential((*place, mechanism), name, mechanism, one)
            for mechanism, one in document.items()
        }

    def _credential(self, place: Place, name: str, mechanism: str, document: Any) -> ScramCredential:
        what = f"user {name!r}: {mechanism}"
        names = ("salt", "stored_key", "server_key")
        if not isinstance(document, dict) or document.keys() != {"iterations", *names}:
            raise self._fault(place, f"{what} must have iterations, {', '.join(names)}")
        iterations = document["iterations"]
        if type(iterations) is not int or not ITERATIONS_MIN <= iterations <= ITERATIONS_MAX:
            limits = f"from {ITERATIONS_MIN} to {ITERATIONS_MAX}"
            raise self._fault((*place, "iterations"), f"{what}: iterations must be {limits}")
        try:
            salt, stored, server = (base64.b64decode(str(document[one]), validate=True) for one in names)
        except (binascii.Error, ValueError):
            raise self._fault(place, f"{what} has a value that is not base64") from None
        size = hashlib.new(MECHANISMS[mechanism]).digest_size
        if not salt or len(stored) != size or len(server) != size:
            raise self._fault(place, f"{what} needs a salt, and keys of {size} bytes")
        return ScramCredential(mechanism, iterations, salt, stored, server)

    def _rule(self, number: int, document: Any) -> AccessRule:
        at: Place = ("rules", number)
        fields = {"principal", "operations"}
        places = document.keys() - fields if isinstance(document, dict) else set()
        if not isinstance(document, dict) or len(places) != 1 or not places <= _PLACES.keys():
            names = ", ".join(_PLACES)
            raise self._fault(at, f"a rule must have principal, operations, and one of {names}")
        place = places.pop()
        resource, is_prefix = _PLACES[place]
        if not fields <= document.keys():
            raise self._fault(at, "a rule must have principal and operations")
        principal, operations, name = document["principal"], document["operations"], document[place]
        if not isinstance(principal, str) or not principal.startswith(_PRINCIPAL) or principal == _PRINCIPAL:
            raise self._fault((*at, "principal"), "principal must be User:NAME, or User:* for everyone")
        known = {one.name: one for one in sorted(resource.value)}
        if (
            not isinstance(operations, tuple)
            or not operations
            or not all(isinstance(one, str) and one in known for one in operations)
        ):
            raise self._fault((*at, "operations"), f"operations must be a list of {', '.join(known)}")
        if not isinstance(name, str) or not name:
            what = resource.name.lower()
            raise self._fault((*at, place), f"{place} must be the name of a {what}, or its begin")
        allowed = frozenset(known[one] for one in operations)
        return AccessRule(str(principal), allowed, str(name), is_prefix, resource)
