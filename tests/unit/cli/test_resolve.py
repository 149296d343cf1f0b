"""`tieringd archive resolve`: what it shows, what it stores, and what it refuses."""

from __future__ import annotations

import asyncio
import json

import pytest
import yaml
from aiohttp import web

from tests.support.daemon import directory_config, write_config
from tests.unit.cli.commands import TOPIC, invoked, tieringd
from tests.unit.cli.test_daemon_status import page
from tieringd.errors import ConfigError, ObjectNotFound
from tieringd.formats.operator_decision import decode_decision

PARTITION = f"{TOPIC}-0"
CASE = {
    "reason": "transaction_outcome_lost",
    "since_ms": 1_700_000_000_000,
    "base_offset": 0,
    "last_offset": 9,
    "divergence_offset": 10,
    "transactions": [[7, 0]],
    "message": "the transaction of producer 7 ended in offsets that the log no longer has",
    "refused": "",
    "command": f"tieringd archive resolve {PARTITION}",
}


@pytest.fixture
def archived(own_site):
    """Return an archive of two segments of 12 records each."""
    assert tieringd("run", "--once", "--config", own_site.config).exit_code == 0
    return own_site


async def resolve(site, *arguments, case=CASE, topic=TOPIC):
    """Run the command beside a daemon that tells *case* of the partition."""
    told = {"topic": topic, "partition": 0, "fault": None, "waits_because": "", "waits_for_operator": case}
    async with page(web.json_response({"partitions": [told]})) as port:
        config = directory_config([site.root / "logs"], site.archive, site.root / "state")
        write_config(site.config, config | {"admin": {"port": port}})
        return await asyncio.to_thread(
            invoked, "archive", "resolve", PARTITION, "-c", site.config, *arguments
        )


def decisions(site) -> list:
    return [decode_decision(path.read_bytes()) for path in site.objects("decision.*")]


async def test_without_a_decision_the_command_shows_what_each_would_lose(archived):
    """The command counts the records in the bucket, and changes nothing."""
    before = archived.objects("*")
    done = await resolve(archived)
    assert done.exit_code == 0
    assert "waits for an operator since 2023-11-14" in done.output
    assert "transaction_outcome_lost" in done.output
    assert "--transaction 7=committed: every reader gets 0 records of producer 7" in done.output
    assert "--transaction 7=aborted: readers of committed records do not get 0 records" in done.output
    assert "--give-up 0-9: 12 records at offsets 0 to 9 can never be read" in done.output
    assert done.output.endswith("Nothing was changed.\n")
    assert archived.objects("*") == before


@pytest.mark.parametrize("reason", ["divergence_unknown", "transactions_forgotten"])
async def test_keeping_is_a_way_out_where_it_settles_the_case(archived, reason):
    """Keeping is offered only for a case that it settles. YAML says the same as JSON."""
    case = CASE | {"reason": reason, "transactions": []}
    shown = (await resolve(archived, "-f", "json", case=case)).json()
    assert yaml.safe_load((await resolve(archived, "-f", "yaml", case=case)).output) == shown
    assert [one["option"] for one in shown["ways_out"]] == ["--keep", "--give-up 0-9"]


async def test_decision_is_stored_for_the_present_version(archived):
    """A decision is stored beside the manifest, with a record that stays. A dry run stores nothing."""
    before = archived.objects("*")
    arguments = ("--transaction", "7=aborted", "--requested-by", "ann")
    done = await resolve(archived, *arguments, "--dry-run")
    assert done.output.endswith("Dry run: nothing was changed.\n")
    assert archived.objects("*") == before

    done = await resolve(archived, *arguments)
    assert "The decision is stored" in done.output
    (decision,) = decisions(archived)
    (record,) = archived.objects("*-begun.json")
    assert decode_decision(record.read_bytes()) == decision
    assert (decision.decided_by, decision.is_aborted, decision.give_up) == ("ann", {7: True}, None)
    manifest = tieringd("archive", "manifest", TOPIC, 0, "-c", archived.config, "-f", "json").json()
    version = decision.made_for
    assert (version.leader_epoch, version.writer_id, version.commit_number) == (
        manifest["leader_epoch"],
        manifest["writer_id"],
        manifest["commit_number"],
    )
    again = await resolve(archived)
    assert f"decision {decision.decision_id} of ann, " in again.output
    assert "waits for the daemon" in again.output


async def test_several_options_make_one_decision(archived):
    """A case may need more than one."""
    await resolve(archived, "--give-up", "0-9", "--keep", "--transaction", "7=committed")
    (decision,) = decisions(archived)
    assert (decision.give_up, decision.keep, decision.is_aborted) == ((0, 9), True, {7: False})


async def test_without_a_daemon_the_decision_is_stored_all_the_same(archived):
    """The command says what is not known then, and when the decision is judged."""
    shown = await asyncio.to_thread(invoked, "archive", "resolve", PARTITION, "-c", archived.config)
    assert "No daemon answers" in shown.output
    assert "as after a change of leader" in shown.output
    assert decisions(archived) == []
    done = await asyncio.to_thread(
        invoked, "archive", "resolve", PARTITION, "-c", archived.config, "--give-up", "12-23", "-f", "json"
    )
    told = json.loads(done.output)
    assert told["decision"] == {
        "--give-up 12-23": "12 records at offsets 12 to 23 can never be read from the archive again"
    }
    (decision,) = decisions(archived)
    assert decision.give_up == (12, 23)


@pytest.mark.parametrize(
    ("arguments", "case", "why"),
    [
        pytest.param((), None, "does not wait for an operator", id="no case"),
        pytest.param(("--give-up", "0-10"), CASE, "offsets 0 to 10 cannot be given up", id="too far"),
        pytest.param(("--give-up", "9-0"), CASE, "cannot be given up", id="backwards"),
        pytest.param(("--transaction", "8=aborted"), CASE, "no transaction of producer 8", id="producer"),
    ],
)
async def test_what_cannot_fit_is_refused_at_once(archived, arguments, case, why):
    """Nothing is stored."""
    before = archived.objects("*")
    with pytest.raises(ConfigError, match=why):
        await resolve(archived, *arguments, case=case)
    assert archived.objects("*") == before


async def test_other_daemons_partition_is_refused(archived):
    """The command belongs on the leader's host."""
    with pytest.raises(ConfigError, match="does not archive"):
        await resolve(archived, "--give-up", "0-9", topic="other")


async def test_closed_archive_is_refused(archived, tmp_path):
    """A decision on a closed archive is refused: no daemon acts on this bucket after a move."""
    other = archived.root / "other.yaml"
    config = directory_config([archived.root / "logs"], archived.root / "elsewhere", archived.root / "state")
    write_config(other, config)
    assert tieringd("archive", "init", "-c", other).exit_code == 0
    moved = tieringd("archive", "move", "--to", other, "-c", archived.config)
    assert moved.exit_code == 0, moved.errors
    with pytest.raises(ConfigError, match="is closed"):
        await resolve(archived, "--give-up", "0-9")
    assert decisions(archived) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("orders",),
        ("orders-x",),
        (PARTITION, "--transaction", "7"),
        (PARTITION, "--transaction", "7=perhaps"),
        (PARTITION, "--transaction", "7=aborted", "--transaction", "7=committed"),
        (PARTITION, "--give-up", "5"),
        (PARTITION, "--give-up", "a-b"),
    ],
)
def test_malformed_argument_is_refused(site, arguments):
    """The error says how it is written."""
    done = invoked("archive", "resolve", "-c", site.config, *arguments)
    assert done.exit_code == 2


def test_partition_that_the_bucket_lacks_is_said(site):
    """The error names the partitions that it has."""
    with pytest.raises(ObjectNotFound, match="partitions archived: 0"):
        invoked("archive", "resolve", f"{TOPIC}-7", "-c", site.config)


async def test_whole_archive_is_given_up_by_its_manifest_and_as_a_whole(archived):
    """No batch is read for it. Less than all, or another decision, is refused with what to try first."""
    case = CASE | {"reason": "log_began_anew", "last_offset": 23, "divergence_offset": 0, "transactions": []}
    for path in archived.objects("*.log"):
        path.write_bytes(b"")
    shown = (await resolve(archived, "-f", "json", case=case)).json()
    (way,) = shown["ways_out"]
    assert way["option"] == "--give-up 0-23"
    assert way["loses"].startswith("all that is archived from offset 0 on, 2 segments with ")
    assert f"`tieringd recover cluster {TOPIC} --prefix old-`" in way["loses"]
    before = archived.objects("*")
    for arguments in (("--keep",), ("--give-up", "0-11"), ("--give-up", "0-23", "--keep")):
        with pytest.raises(ConfigError, match="continues nothing of what it contradicts"):
            await resolve(archived, *arguments, case=case)
    assert archived.objects("*") == before
    assert "2 segments with" in (await resolve(archived, "--give-up", "0-23", case=case)).output
    assert [one.give_up for one in decisions(archived)] == [(0, 23)]


async def test_whole_archive_is_not_read_without_a_daemon_either(archived):
    """Nothing is known of the case then. The range tells that no batch has to be counted."""
    for path in archived.objects("*.log"):
        path.write_bytes(b"")
    shown = await asyncio.to_thread(
        invoked, "archive", "resolve", PARTITION, "-c", archived.config, "--give-up", "0-23", "--dry-run"
    )
    assert "all that is archived from offset 0 on, 2 segments with " in shown.output
