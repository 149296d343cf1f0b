"""Archive-only endpoints as processes, over a part of the tests' bucket."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from functools import partial

from tests.e2e.conftest import BUCKET
from tests.support.daemon import Daemon, s3_properties, write_config
from tests.support.processes import Server
from tests.support.warm_start import start_command


class Endpoint(Daemon):
    """One `tieringd gateway --archive-only`."""

    def __init__(self, config, output, *options):
        super().__init__(config, output)
        arguments = ("gateway", "--archive-only", "--config", str(config), *options)
        self.server = Server(
            ["tieringd", *arguments], output=output, start=partial(start_command, *arguments)
        )

    @property
    def bootstrap(self):
        """Return the `host:port` at which it listens."""
        (event,) = self.events("archive endpoint listens")
        return f"{event['host']}:{event['port']}"

    @property
    def port(self):
        """Return the port at which it listens."""
        return int(self.bootstrap.rpartition(":")[2])

    def stop(self):
        """End it as an operator does; it ends well."""
        self.send_signal(signal.SIGTERM)
        assert self.wait() == 0, self.tail()
        assert self.events("stopped")


@contextmanager
def serving(seaweedfs, directory, prefix, *options, **changes):
    """Run an endpoint of a part of the bucket, by a configuration that knows no broker."""
    config = {
        "state_directory": str(directory / "endpoint"),
        "cloud_storage_enabled": True,
        **s3_properties(seaweedfs, bucket=BUCKET, prefix=prefix),
        "storage_min_free_bytes": 0,
        "gateway": {"port": 0},
        "admin": {"port": 0},
    } | changes
    path = write_config(directory / "endpoint.yaml", config)
    endpoint = Endpoint(path, directory / "endpoint.log", *options)
    endpoint.launch()
    try:
        endpoint.until(lambda: endpoint.events("archive endpoint listens"), "it listens")
        endpoint.wait_until_listening()
        yield endpoint
        if endpoint.server.is_running:
            endpoint.stop()
    finally:
        endpoint.server.kill()
