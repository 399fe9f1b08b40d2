"""An MCP server with one tool."""

from typing import Any

import mcp.server

server: Any
if hasattr(mcp.server, "MCPServer"):
    server = mcp.server.MCPServer("calculator")
else:  # mcp 1
    import mcp.server.fastmcp as old

    server = vars(old)["FastMCP"]("calculator")


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


if __name__ == "__main__":
    server.add_tool(add)
    server.run()
