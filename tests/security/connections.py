"""Connections that this process, which is the router's too, holds as their server."""

import psutil


def is_served(client_port: int) -> bool:
    """Whether it holds its end of a client's connection."""
    connections = psutil.Process().net_connections(kind="tcp")
    return any(tuple(connection.raddr)[1:] == (client_port,) for connection in connections)


def num_served(server_port: int) -> int:
    """How many it holds at a port."""
    connections = psutil.Process().net_connections(kind="tcp")
    return sum(bool(each.raddr) and each.laddr.port == server_port for each in connections)
