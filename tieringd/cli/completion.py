"""
Completion of words without importing the commands: their outline is in `completion.json`.

`python -m tieringd.cli.completion` writes the file from the commands themselves, and a test keeps it true.
The outline has the names of subcommands and options, and the values of options with choices. For other values
a shell completes names of files.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, Final, get_args

import typer

OUTLINE: Final = Path(__file__).with_name("completion.json")


def outlined_command(name: str) -> Any:
    """Return a command that completes as the command *name* does, and cannot be run."""
    outline = json.loads(OUTLINE.read_text(encoding="utf-8"))[name]
    if "commands" in outline:
        found: Any = typer.main.get_group(_group(outline))
    else:
        alone = typer.Typer(add_completion=False)
        alone.command(help=outline["help"])(_function(outline))
        found = typer.main.get_command(alone)
    found.name = name
    return found


def outline_of(command: Any, *, choices: Callable[[Any], list[str]]) -> dict[str, Any]:
    """Return the outline of a command; *choices* gives those of an option."""
    options = [
        {
            "names": [*one.opts, *one.secondary_opts],
            "flag": bool(getattr(one, "is_flag", False)),
            "help": one.help or "",
            "choices": choices(one),
        }
        for one in command.params
        if one.param_type_name == "option" and one.name != "help"
    ]
    found: dict[str, Any] = {"help": (command.help or "").split("\n")[0], "options": options}
    inner = getattr(command, "commands", {})
    if inner:
        found["commands"] = {name: outline_of(one, choices=choices) for name, one in inner.items()}
    return found


def _group(outline: dict[str, Any]) -> typer.Typer:
    group = typer.Typer(add_completion=False, help=outline["help"])
    group.callback()(_function(outline))
    for name, inner in outline["commands"].items():
        if "commands" in inner:
            group.add_typer(_group(inner), name=name)
        else:
            group.command(name, help=inner["help"])(_function(inner))
    return group


def _function(outline: dict[str, Any]) -> Callable[..., None]:
    """Return a function with the parameters of the outline's options."""

    def stand_in(**_values: object) -> None:
        raise AssertionError("the outline of a command is for completion only")

    parameters = [
        inspect.Parameter(
            f"option_{number}",
            inspect.Parameter.KEYWORD_ONLY,
            default=_option(one),
            annotation=bool if one["flag"] else list[str],
        )
        for number, one in enumerate(outline["options"])
    ]
    # Options may follow a subcommand's arguments, whose number and kind do not matter here.
    words: Any = typer.Argument(default=None)
    if "commands" not in outline:
        parameters.append(
            inspect.Parameter("words", inspect.Parameter.KEYWORD_ONLY, default=words, annotation=list[str])
        )
    stand_in.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    stand_in.__annotations__ = {one.name: one.annotation for one in parameters}
    return stand_in


def _option(outline: dict[str, Any]) -> Any:
    choices = outline["choices"]

    def completed(incomplete: str) -> list[str]:
        return [one for one in choices if one.startswith(incomplete)]

    names = outline["names"]
    shown = [f"{names[0]}/{names[1]}"] if outline["flag"] and any("no-" in n for n in names[1:]) else names
    return typer.Option(
        False if outline["flag"] else None,
        *shown,
        help=outline["help"],
        autocompletion=completed if choices else None,
    )


def _write() -> None:
    from tieringd.cli.main import COMMANDS, loaded_command  # noqa: PLC0415 it imports this module

    outlines = {name: outline_of(loaded_command(name), choices=choices_of) for name in COMMANDS}
    OUTLINE.write_text(json.dumps(outlines, indent=1) + "\n", encoding="utf-8")


def choices_of(option: Any) -> list[str]:
    """Return the choices of an option; releases of typer name an option's type differently."""
    kind = getattr(option, "type", None)
    if kind is not None:
        return [str(getattr(one, "value", one)) for one in getattr(kind, "choices", ())]
    found = option.type_descriptor.annotation
    kinds = [found, *get_args(found)]
    return [one.value for each in kinds if isinstance(each, type) and issubclass(each, Enum) for one in each]


if __name__ == "__main__":
    _write()
