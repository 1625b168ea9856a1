"""Answers each request of the clients with a header, and holds the connection until the client closes it: server.py HOST:PORT..."""
import select
import socket
import sys

ANSWER = b"HTTP/1.1 200 OK\r\nServer: soak\r\n\r\nok"
poll, listeners, held = select.epoll(), {}, {}
for place in sys.argv[1:]:
    host, port = place.split(":")
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, int(port)))
    listener.listen(65535)
    listener.setblocking(False)
    listeners[listener.fileno()] = listener
    poll.register(listener, select.EPOLLIN)
while True:
    for number, _ in poll.poll(-1, 4096):
        if number in listeners:
            for _ in range(64):
                try:
                    client, _ = listeners[number].accept()
                except BlockingIOError:
                    break
                client.setblocking(False)
                held[client.fileno()] = client
                poll.register(client, select.EPOLLIN)
            continue
        client = held.get(number)
        try:
            if client and client.recv(4096):
                client.send(ANSWER)
                continue
        except BlockingIOError:
            continue
        except OSError:
            pass
        try:
            poll.unregister(number)
        except OSError:
            pass
        if held.pop(number, None):
            client.close()
