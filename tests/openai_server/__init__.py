"""An OpenAI-style chat completions server that answers from a hash and misbehaves to order.

    python -m tests.openai_server --port 8000 --capacity 32 --delay-ms 200 --script '[{"do": "status", "status": 503, "times": 3}]'

Labels follow from a hash of the user's text, so that the same text has the same answer everywhere. What happened is in
`GET /stats`. Unit tests run it in a thread (`running_server`), Compose as a container of its own.
"""

from tests.openai_server.script import Script, Step
from tests.openai_server.server import ServerOptions, running_server, serve

__all__ = ["Script", "ServerOptions", "Step", "running_server", "serve"]
