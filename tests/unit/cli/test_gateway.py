"""`tieringd gateway`: what it says before it listens."""

from __future__ import annotations

from tests.support.daemon import write_config
from tests.unit.cli.commands import tieringd


def config_in(path, **changes):
    (path / "archive").mkdir()
    return write_config(
        path / "tieringd.yaml",
        {
            "state_directory": str(path / "state"),
            "cloud_storage_enabled": True,
            "cloud_storage_backend": "file",
            "cloud_storage_file_root": str(path / "archive"),
            "gateway": {"port": 0},
            "admin": {"enabled": False},
        }
        | changes,
    )


def test_gateway_beside_a_broker_is_no_command(tmp_path):
    """A gateway beside a broker is a part of the daemon, and the error says so."""
    done = tieringd("gateway", "--config", str(config_in(tmp_path)))
    assert done.exit_code == 2
    assert "is part of `tieringd run`" in done.errors
    assert "--archive-only" in done.errors


def test_cluster_that_the_bucket_does_not_hold_ends_the_command(tmp_path):
    """An unknown cluster ends the command before it listens."""
    config = config_in(tmp_path)
    done = tieringd("gateway", "--archive-only", "--from-cluster", "east", "--config", str(config))
    assert done.exit_code == 2
    assert "the bucket holds nothing of cluster east" in done.errors


def test_address_that_clients_cannot_use_ends_the_command(tmp_path):
    """Clients would be sent to 0.0.0.0."""
    config = config_in(tmp_path, gateway={"port": 0, "host": "0.0.0.0", "archive_only_for_everyone": True})
    done = tieringd("gateway", "--archive-only", "--config", str(config))
    assert done.exit_code == 2
    assert "Set gateway.advertised" in done.errors


def test_missing_bucket_ends_the_command(tmp_path):
    """A missing bucket ends the command, as it ends every other command."""
    config = config_in(tmp_path, cloud_storage_file_root=str(tmp_path / "none" / "archive"))
    done = tieringd("gateway", "--archive-only", "--config", str(config))
    assert done.exit_code == 1
    assert "Traceback" not in done.errors


def test_admin_page_listens_where_the_container_says(tmp_path):
    """The image's variable is in place of admin.host, as for `run`; both are addresses of no host here."""
    config = config_in(tmp_path, admin={"host": "203.0.113.1", "port": 0})
    assert tieringd("archive", "init", "--config", str(config)).exit_code == 0
    done = tieringd("gateway", "--archive-only", "--config", str(config), TIERINGD_ADMIN_HOST="203.0.113.2")
    assert done.exit_code == 2
    assert "the admin page cannot listen on 203.0.113.2:0" in done.errors
