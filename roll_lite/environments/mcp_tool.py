from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from mcp import Client, MCPError, StdioServerParameters
from mcp.types import CONNECTION_CLOSED

from roll_lite.config.problems import did_you_mean
from roll_lite.config.schema.environments import McpToolConfig
from roll_lite.environments.base import Task
from roll_lite.environments.tools import Call, ToolError, ToolLost


class McpTools:
    def __init__(self, settings: McpToolConfig, start_timeout_s: float) -> None:
        """Ask the server for its tools, outside of any event loop. ToolLost if it is unreachable, ValueError if it is too slow or lacks a
        wanted tool."""
        self._settings = settings
        try:
            known = asyncio.run(asyncio.wait_for(self._known(), start_timeout_s))
        except TimeoutError:
            raise ValueError(f"was not ready within {start_timeout_s:g} s (start_timeout_s)") from None
        names = known if settings.tools is None else settings.tools
        for name in names:
            if name not in known:
                raise ValueError(f"tools: the server has no tool {name!r}; {did_you_mean(name, known)}")
        self.schemas = [{"type": "function", "function": known[name]} for name in names]

    async def _known(self) -> dict[str, dict[str, Any]]:
        found: list[Any] = []
        async with self._connected() as client:
            page = await client.list_tools()
            found += page.tools
            while page.next_cursor is not None:
                page = await client.list_tools(cursor=page.next_cursor)
                found += page.tools
        return {one.name: {"name": one.name, "description": one.description, "parameters": one.input_schema} for one in found}

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Client]:
        server: Any = self._settings.url
        if self._settings.command is not None:
            program, *arguments = self._settings.command
            server = StdioServerParameters(command=program, args=arguments, env=self._settings.env)
        try:
            async with Client(server) as client:
                yield client
        except Exception as error:  # a process edge: client and transports raise exceptions of many libraries, in groups
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> ToolLost:
        return ToolLost(f"MCP server {self._settings.command or self._settings.url}: {error!r}")

    @asynccontextmanager
    async def opened(self, task: Task) -> AsyncIterator[Call]:
        async with self._connected() as client:
            yield partial(self._call, client)

    async def _call(self, client: Client, name: str, arguments: dict[str, Any]) -> str:
        try:
            result = await client.call_tool(name, arguments)
        except MCPError as error:
            raise self._lost(error) if error.code == CONNECTION_CLOSED else ToolError(f"Error: {error}") from error
        text = "\n".join(getattr(block, "text", f"({block.type})") for block in result.content)
        if result.is_error:
            raise ToolError(text)
        return text
