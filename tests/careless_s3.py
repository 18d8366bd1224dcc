"""An S3 server that ignores conditional creates, as some do: `python -m tests.careless_s3 PORT`."""

import sys
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple


class Careless:
    """The server behind, which never learns that a request had a condition."""

    def __init__(self) -> None:
        self._server = DomainDispatcherApplication(create_backend_app)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        environ.pop("HTTP_IF_NONE_MATCH", None)
        return self._server(environ, start_response)


if __name__ == "__main__":
    run_simple("127.0.0.1", int(sys.argv[1]), Careless(), threaded=True)
