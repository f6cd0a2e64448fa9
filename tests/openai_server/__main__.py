"""`python -m tests.openai_server`: the server as a process; see `--help`."""

from __future__ import annotations

import argparse
import asyncio
import json

from tests.openai_server.script import Script
from tests.openai_server.server import App, ServerOptions, serve


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.openai_server", description="An OpenAI-style server for tests."
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument(
        "--port", type=int, default=0, help="0 takes a free one; the first line printed is the base URL"
    )
    parser.add_argument("--model", action="append", help="a name that is served; may be given several times")
    parser.add_argument("--capacity", type=int, help="calls in flight above this are refused with 429")
    parser.add_argument("--retry-after", help="Retry-After of these refusals")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="of each answer")
    parser.add_argument("--keepalive-s", type=float, default=75.0, help="idle connections are closed after this")
    parser.add_argument("--unready-s", type=float, default=0.0, help="answer 503 for so long after the first call")
    parser.add_argument("--api-key", help="demand this key")
    parser.add_argument("--script", default="[]", help="JSON list of steps, see tests/openai_server/script.py")
    args = parser.parse_args()
    options = ServerOptions(
        models=tuple(args.model or ["test-model"]),
        capacity=args.capacity,
        retry_after=args.retry_after,
        delay_ms=args.delay_ms,
        keepalive_s=args.keepalive_s,
        unready_s=args.unready_s,
        api_key=args.api_key,
    )
    asyncio.run(_serve_for_ever(App(options, Script(json.loads(args.script))), args.host, args.port))


async def _serve_for_ever(app: App, host: str, port: int) -> None:
    runner = await serve(app, host, port)
    print(f"http://{host}:{runner.addresses[0][1]}/v1", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    main()
