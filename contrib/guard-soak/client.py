"""Holds as many connections as the last line of stdin says, and renews some of them; closes first.

    client.py RECORD inet HOST PORT | client.py RECORD unix PATH

One thread, blocking connect(). RECORD gets a line of JSON each second: the times of connect() in us, the failures by errno, the connections held.
client.js and Client.java do the same with the means of their language.
"""
import errno
import json
import os
import select
import socket
import sys
import time

TICK, BURST, RENEWED = 0.05, 25, 0.01
record = open(sys.argv[1], "a", buffering=1)
family, address = (socket.AF_UNIX, sys.argv[3]) if sys.argv[2] == "unix" else (socket.AF_INET, (sys.argv[3], int(sys.argv[4])))
held, answered, times, failures = {}, set(), [], {}
poll = select.epoll()
os.set_blocking(0, False)
target, said, owed = 0, time.monotonic(), 0.0


def fail(kind):
    failures[kind] = failures.get(kind, 0) + 1


def close(number):
    held.pop(number).close()
    answered.discard(number)


def open_one():
    client = socket.socket(family)
    began = time.perf_counter_ns()
    try:
        client.connect(address)
    except BlockingIOError:
        # The queue of the unix socket of a proxy is full: no connect of the proxy.
        return client.close()
    except OSError as error:
        client.close()
        return fail(errno.errorcode.get(error.errno, str(error)))
    times.append((time.perf_counter_ns() - began) // 1000)
    client.setblocking(False)
    try:
        client.send(b"GET / HTTP/1.1\r\nHost: soak\r\n\r\n")
    except OSError:
        # A proxy has closed already. The end of the stream is counted.
        pass
    held[client.fileno()] = client
    poll.register(client, select.EPOLLIN)


while True:
    try:
        line = os.read(0, 65536)
        if not line:
            break
        target = int(line.split()[-1])
    except BlockingIOError:
        pass
    for number, _ in poll.poll(TICK, 4096):
        if number not in held:
            continue
        try:
            answer = held[number].recv(4096)
        except OSError as error:
            answer = b""
            fail(errno.errorcode[error.errno])
        else:
            if not answer:
                fail("closed by the server")
        if answer.startswith(b"HTTP/1.1 200") or answer and number in answered:
            answered.add(number)
            continue
        if answer:
            fail(answer[9:12].decode())
        close(number)
    owed = min(owed + len(held) * RENEWED * TICK, BURST)
    surplus = max(len(held) - target, 0) + int(owed)
    owed -= int(owed)
    for number in [number for number in list(held)[:surplus + BURST] if number in answered][:surplus]:
        close(number)
    for _ in range(min(target - len(held), BURST)):
        open_one()
    if time.monotonic() >= said + 1:
        said += 1
        record.write(json.dumps({"us": times, "fail": failures, "held": len(held)}) + "\n")
        times, failures = [], {}
    time.sleep(TICK / 2)
