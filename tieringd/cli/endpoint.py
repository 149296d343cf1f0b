"""`tieringd endpoint`: the users of an archive-only endpoint, in the file that `gateway.users_file` names."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer

from tieringd.endpoint.users_file import Users, fault_of_name, lock_users
from tieringd.errors import ConfigError, LocalFileError

endpoint_app = typer.Typer(help="Handle the users of an archive-only endpoint.", no_args_is_help=True)
user_app = typer.Typer(help="Add, remove and list users.", no_args_is_help=True)
endpoint_app.add_typer(user_app, name="user")
UsersFile = Annotated[
    Path, typer.Option("--file", "-f", help="The users file (gateway.users_file); made if it is missing.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would change.")]
_PASSWORD_BYTES_MAX: Final = 1024
Name = Annotated[str, typer.Argument(help="The user's name, without User: before it.")]


@endpoint_app.callback()
def _group() -> None:
    """Handle the users of an archive-only endpoint."""


@user_app.callback()
def _users() -> None:
    """Add, remove and list users."""


@user_app.command()
def add(name: Name, file: UsersFile, *, dry_run: DryRun = False) -> None:
    """Add a user, or change a password; it is asked for, or read from standard input, and never stored."""
    fault = fault_of_name(name)
    if fault is not None:
        raise ConfigError(fault)
    _known(file)
    password = _password()
    with _changing(file):
        users = _known(file)
        if users.has_password(name, password):
            typer.echo(f"user {name} is in {file} with this password already")
        elif dry_run:
            typer.echo(
                f"user {name} would {'get another password' if name in users.credentials else 'be added'}"
            )
        else:
            users.with_user(name, password).write(file)
            typer.echo(f"user {name} is in {file}; a running endpoint takes it within seconds")
    if not any(one.principal in {f"User:{name}", "User:*"} for one in users.rules):
        rule = f'{{principal: "User:{name}", operations: [READ], topic: NAME}}'
        typer.echo(f"no rule lets it read anything yet; add one to the file, under rules:\n  - {rule}")


@user_app.command()
def remove(name: Name, file: UsersFile, *, dry_run: DryRun = False) -> None:
    """Remove a user; connections that use it are closed at their next request."""
    with _changing(file):
        users = Users.read(file)
        if name not in users.credentials:
            raise ConfigError(
                f"{file} has no user {name}; nothing is changed",
                hint="`tieringd endpoint user list` names those that it has",
            )
        if dry_run:
            typer.echo(f"user {name} would be removed from {file}")
            return
        users.without_user(name).write(file)
    typer.echo(f"user {name} is no longer in {file}")


@user_app.command("list")
def list_users(file: UsersFile) -> None:
    """Print the names of all users, one per line."""
    for name in sorted(Users.read(file).credentials):
        typer.echo(name)


def _known(file: Path) -> Users:
    """Return the users of a file; none if there is no file."""
    return Users.read(file) if file.exists() else Users()


def _password() -> str:
    """Ask twice at a terminal; otherwise take standard input, with or without a line break at its end."""
    if sys.stdin.isatty():
        return str(typer.prompt("Password", hide_input=True, confirmation_prompt=True, err=True))
    given = sys.stdin.buffer.read(_PASSWORD_BYTES_MAX + 1)
    if len(given) > _PASSWORD_BYTES_MAX:
        raise ConfigError(f"the password on standard input has more than {_PASSWORD_BYTES_MAX} bytes")
    try:
        password = given.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise ConfigError("the password on standard input is not UTF-8") from None
    if not password or any(one in password for one in "\0\n\r"):
        raise ConfigError("standard input must be one password, and nothing after its line")
    return password


@contextmanager
def _changing(file: Path) -> Iterator[None]:
    """Let no other command change the file meanwhile."""
    try:
        with lock_users(file):
            yield
    except OSError as error:
        raise LocalFileError(
            f"{file} cannot be written: {error.strerror}",
            path=str(file),
            hint="Check that its directory exists, its permissions and its free space",
        ) from error
