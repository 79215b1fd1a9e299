"""A small reward server for rewards of type `remote`, on the standard library: `python examples/reward_server.py --port 5000`.

It scores how much of the answer the response repeats. Put a model of your own into `rewards_of`; the request and the answer are those of
OpenRLHF's remote reward models (docs/rewards.md).
"""

from __future__ import annotations

import argparse
import json
import os
from difflib import SequenceMatcher
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

API_KEY = os.environ.get("REWARD_SERVER_KEY")
"""If set, requests must send `Authorization: Bearer KEY`."""


def rewards_of(prompts: list[str], responses: list[str], labels: list[Any]) -> dict[str, Any]:
    """`rewards` train; `scores` (0 to 1) count for accuracy; `extra_logs` are kept with the samples."""
    rewards = [SequenceMatcher(None, response, str(label)).ratio() for response, label in zip(responses, labels, strict=True)]
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"characters": [len(response) for response in responses]}}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections live on

    def do_GET(self) -> None:
        self.answer(200, {"status": "ok"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if API_KEY and self.headers.get("Authorization") != f"Bearer {API_KEY}":
            self.answer(401, {"error": "wrong or missing key"})
            return
        try:
            request = json.loads(body)
            prompts = [str(prompt) for prompt in request["prompts"]]
            responses = [str(query)[len(prompt) :] for query, prompt in zip(request["query"], prompts, strict=True)]
            self.answer(200, rewards_of(prompts, responses, request["labels"]))
        except (ValueError, KeyError, TypeError) as error:
            self.answer(400, {"error": f"{type(error).__name__}: {error}"})

    def answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Discard the log line per request."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=5000, help="0 takes a free one")
    arguments = parser.parse_args()
    server = ThreadingHTTPServer((arguments.host, arguments.port), Handler)
    print(f"listening on http://{arguments.host}:{server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
