"""
Moto's S3, a request at a time.

Moto closes an object's buffer when the object is replaced, also while another thread reads it, and answers
that read with 500. S3 gives one of the two objects.
"""

from __future__ import annotations

import sys
import threading

from moto.server import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import run_simple


def main() -> None:
    """Serve on 127.0.0.1, at the port that the command line names, until a signal."""
    application = DomainDispatcherApplication(create_backend_app)
    turn = threading.Lock()

    def one_by_one(environ, start_response):
        with turn:
            return [b"".join(application(environ, start_response))]

    # A thread for each connection: a client that keeps its connection does not hold the others up.
    run_simple("127.0.0.1", int(sys.argv[1]), one_by_one, threaded=True, request_handler=MotoRequestHandler)


if __name__ == "__main__":
    main()
