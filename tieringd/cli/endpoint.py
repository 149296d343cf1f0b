"""`tieringd endpoint`: the users of an archive-only endpoint, in the file that `gateway.users_file` names."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tieringd.endpoint.users_file import Users
from tieringd.errors import ConfigError, LocalFileError

endpoint_app = typer.Typer(help="Handle the users of an archive-only endpoint.", no_args_is_help=True)
user_app = typer.Typer(help="Add, remove and list users.", no_args_is_help=True)
endpoint_app.add_typer(user_app, name="user")
UsersFile = Annotated[
    Path, typer.Option("--file", "-f", help="The users file (gateway.users_file); made if it is missing.")
]
Name = Annotated[str, typer.Argument(help="The user's name, without User: before it.")]


@endpoint_app.callback()
def _group() -> None:
    """Handle the users of an archive-only endpoint."""


@user_app.callback()
def _users() -> None:
    """Add, remove and list users."""


@user_app.command()
def add(name: Name, file: UsersFile) -> None:
    """Add a user, or change a password; it is asked for, or read from standard input, and never stored."""
    if not name or any(one in name for one in ",=\0\n"):
        raise ConfigError("a user's name must not be empty, nor have a comma, an equals sign or a line break")
    users = Users.read(file) if file.exists() else Users()
    password = typer.prompt("Password", hide_input=True, err=True)
    _write(users.with_user(name, password), file)
    typer.echo(f"user {name} is in {file}; a running endpoint takes it within seconds")
    if not any(one.principal in {f"User:{name}", "User:*"} for one in users.rules):
        rule = f'{{principal: "User:{name}", operations: [READ], topic: NAME}}'
        typer.echo(f"no rule lets it read anything yet; add one to the file, under rules:\n  - {rule}")


@user_app.command()
def remove(name: Name, file: UsersFile) -> None:
    """Remove a user; connections that use it are closed at their next request."""
    users = Users.read(file)
    if name not in users.credentials:
        raise ConfigError(f"{file} has no user {name}")
    _write(users.without_user(name), file)
    typer.echo(f"user {name} is no longer in {file}")


@user_app.command("list")
def list_users(file: UsersFile) -> None:
    """Print the names of all users, one per line."""
    for name in sorted(Users.read(file).credentials):
        typer.echo(name)


def _write(users: Users, file: Path) -> None:
    try:
        users.write(file)
    except OSError as error:
        raise LocalFileError(
            f"{file} cannot be written: {error.strerror}",
            path=str(file),
            hint="check the directory's permissions and free space",
        ) from error
