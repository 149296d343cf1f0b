"""Options that several commands of `tieringd recover` share."""

from __future__ import annotations

import fnmatch
import re
from enum import StrEnum
from typing import Annotated

import typer

from tieringd.cli.options import amount
from tieringd.config.units import DURATION, SIZE


class Validation(StrEnum):
    """What is checked before anything is restored. The names are Redpanda's."""

    CHECK_MANIFEST_EXISTENCE = "check_manifest_existence"
    CHECK_MANIFEST_AND_SEGMENT_METADATA = "check_manifest_and_segment_metadata"
    NO_CHECK = "no_check"


def checked_pattern(text: str) -> str:
    """
    Return *text* unchanged if it is a valid regular expression.

    Raises:
        typer.BadParameter: It is not; the message says why.
    """
    try:
        re.compile(text)
    except re.error as error:
        raise typer.BadParameter(f"{text!r} is not a regular expression: {error}") from error
    return text


def chosen_topics(patterns: list[str] | None, expression: str | None) -> dict[str, str]:
    """
    Return the regular expressions of the chosen topics, by what was given: *patterns*, or *expression*.

    Raises:
        typer.BadParameter: Neither or both are given.
    """
    if bool(patterns) == (expression is not None):
        raise typer.BadParameter("name the topics, or give patterns such as 'orders-*' ('*' for all)")
    if expression is not None:
        return {expression: checked_pattern(expression)}
    return {one: fnmatch.translate(one) for one in patterns or ()}


Topics = Annotated[
    str | None,
    typer.Option(
        "--topics",
        "-t",
        help="The former way to choose: a regular expression that must match the whole name.",
        show_default=False,
    ),
]
FromCluster = Annotated[
    str | None, typer.Option("--from-cluster", help="Topics of this cluster only, if the bucket has several.")
]
TopicId = Annotated[
    str | None,
    typer.Option("--topic-id", help="The topic with this id only, if the topic was created more than once."),
]
LastBytes = Annotated[
    int | None,
    typer.Option(
        "--last-bytes",
        help="Only the newest data of each partition, up to this size, such as 10GiB.",
        parser=amount(SIZE),
        metavar="SIZE",
    ),
]
LastMs = Annotated[
    int | None,
    typer.Option(
        "--last-ms",
        help="Only the newest data of each partition, up to this age, such as 7d.",
        parser=amount(DURATION),
        metavar="DURATION",
    ),
]
Validate = Annotated[
    Validation,
    typer.Option(metavar="CHECK", help="What to check before the restore, see above.", show_default=False),
]
ValidationDepth = Annotated[
    int,
    typer.Option(
        metavar="COUNT",
        help="How many of each partition's newest segments have their metadata checked; 0 is all.",
        min=0,
    ),
]
DEFAULT_DEPTH = 10
"""The default of Redpanda's cloud_storage_recovery_topic_validation_depth, in segments."""
