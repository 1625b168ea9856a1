"""A small server of HTTP/1.1 for the tests, also with TLS and as a proxy."""

from __future__ import annotations

import http.server
import socket
import ssl
import threading


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Listener

    def do_GET(self) -> None:
        body = f"{self.client_address[0]} {self.client_address[1]}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.server.ports.append(self.client_address[1])

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Listener(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024
    ports: list[int]

    def handle_error(self, request: object, client_address: object) -> None:
        pass


class Server:
    """A server on a thread of its own."""

    def __init__(self, tls: ssl.SSLContext | None = None, family: int = socket.AF_INET) -> None:
        kind = type("Listener", (_Listener,), {"address_family": family, "ports": []})
        host = "::1" if family == socket.AF_INET6 else "127.0.0.1"
        self._server: _Listener = kind((host, 8080), _Handler)
        self._scheme = "http"
        if tls is not None:
            self._scheme = "https"
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.address: tuple[str, int] = (host, 8080)
        self.ports = self._server.ports
        """The source port of each request that was answered."""
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    def url(self) -> str:
        """The page that contains the address of the client."""
        host, port = self.address
        return f"{self._scheme}://[{host}]:{port}/" if ":" in host else f"{self._scheme}://{host}:{port}/"

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
