"""A small MCP server: `python mcp_server.py stdio`, or with a port."""

from __future__ import annotations

import os
import sys
import time

from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("counter")
total = 0


@server.tool()
def add(number: int) -> str:
    """Add to the total.

    Args:
        number: Summand.
    """
    global total
    total += number
    return f"total {total}, {os.environ.get('UNIT', '')}"


@server.tool()
def divide(number: int) -> str:
    """Divide the total."""
    return str(total // number)


@server.tool()
def picture() -> list[str | Image]:
    """Draw the total."""
    return ["as drawn:", Image(data=b"x", format="png")]


@server.tool()
def wait() -> str:
    """Wait for long."""
    time.sleep(100)
    return "late"


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(1)


if sys.argv[1] == "stdio":
    server.run("stdio")
else:
    server.run("streamable-http", port=int(sys.argv[1]))
