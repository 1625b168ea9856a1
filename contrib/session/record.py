#!/usr/bin/env python3
"""Records how `fourtuple doctor` finds an exhausted host and how the command that it prints mends it.

    contrib/session/record.py FOURTUPLE DIRECTORY

Needs root. Writes DIRECTORY/doctor.cast (asciicast v2, for `asciinema play`) and DIRECTORY/doctor.svg. All of it happens in a network namespace
of its own, with the ports 32768-36863: a client opens and closes connections as fast as it can until the ports are in TIME_WAIT. With the 28,232
ports of the default a busy machine does not get there, because ports leave TIME_WAIT after a minute.
"""
import json
import os
import pty
import re
import select
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from fcntl import ioctl
from html import escape
from termios import TIOCSWINSZ

WIDTH, HEIGHT = 100, 40
# Longest pause between two pieces of output in the record, and the time of a typed character, in seconds.
PAUSE, KEY = 1.0, 0.04
SERVER = ("10.0.0.1", 5432)
COMMANDS = ["fourtuple doctor", None, "fourtuple doctor"]


def serve():
    listener = socket.socket()
    listener.bind(SERVER)
    listener.listen(4096)
    while True:
        connection, _ = listener.accept()
        connection.recv(1)
        connection.close()


def load():
    """Opens a connection, closes it first, and goes on after a failure. Prints a line when no port is left for the first time."""
    failed = False
    threading.Thread(target=serve, daemon=True).start()
    time.sleep(0.2)
    while True:
        with socket.socket() as client:
            try:
                client.connect(SERVER)
                client.shutdown(socket.SHUT_WR)
                client.recv(1)
                time.sleep(0.0001)
            except OSError:
                if not failed:
                    print("no port is left", flush=True)
                failed = True
                time.sleep(0.01)


def run(command, events, clock):
    """Runs a command in a terminal. Adds (time, text) for what it prints, and returns the clock and the text."""
    process, terminal = pty.fork()
    if process == 0:
        os.environ.update(TERM="xterm-256color", LC_ALL="C.UTF-8", COLUMNS=str(WIDTH))
        os.execvp("sh", ["sh", "-c", command])
    ioctl(terminal, TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    text, last = b"", time.monotonic()
    while True:
        select.select([terminal], [], [])
        try:
            piece = os.read(terminal, 65536)
        except OSError:
            break
        if not piece:
            break
        now = time.monotonic()
        clock += min(now - last, PAUSE)
        last = now
        text += piece
        events.append((clock, piece.decode(errors="replace")))
    os.waitpid(process, 0)
    return clock, text.decode(errors="replace")


def session():
    events, clock, printed = [], 0.5, ""
    for command in COMMANDS:
        # The cure is what doctor has just printed: the first command below "do now".
        command = command or re.search(r"do now\s+(sysctl -w \S+)", re.sub(r"\x1b\[[0-9;]*m", "", printed))[1]
        events.append((clock, "\x1b[1m# \x1b[0m"))
        for key in command:
            clock += KEY
            events.append((clock, f"\x1b[1m{key}\x1b[0m"))
        clock += 0.3
        events.append((clock, "\r\n"))
        clock, printed = run(command, events, clock)
        clock += 1.5
        if not command.startswith("fourtuple"):
            # The client takes ports again; doctor reads the ten seconds before.
            time.sleep(12)
    return events


def lines(events):
    """Returns lines of (time, [(style, text)]); what a program has overwritten is gone."""
    done, line, style = [], [], ""
    began = None
    for clock, text in events:
        for part in re.split(r"(\x1b\[[0-9;?]*[a-zA-Z]|\r\n|\n|\r)", text):
            if part in ("\r\n", "\n"):
                done.append((clock if began is None else began, line))
                line, began = [], None
            elif part == "\r" or re.fullmatch(r"\x1b\[[0-9]*[KJ]", part):
                line = [] if part != "\r" else line
            elif part.startswith("\x1b["):
                style = part[2:-1] if part.endswith("m") else style
            elif part:
                began = clock if began is None else began
                line.append((style, part))
    return done


COLORS = {"31": "#ff7b72", "32": "#7ee787", "33": "#e3b341", "36": "#79c0ff", "34": "#79c0ff"}


def style_of(codes):
    found = [f"fill:{COLORS[code]}" for code in codes.split(";") if code in COLORS]
    found += ["font-weight:bold"] * ("1" in codes.split(";")) + ["opacity:.7"] * ("2" in codes.split(";"))
    return ";".join(found)


def picture(events):
    rows = lines(events)
    step, left = 18, 12
    width, height = WIDTH * 8.0 + 2 * left, len(rows) * step + 2 * left
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img" '
        'aria-label="doctor names an exhausted port range, its command is pasted, and doctor finds no fault">',
        "<style>text{font:13px ui-monospace,Menlo,Consolas,monospace;fill:#e6edf3;white-space:pre}"
        "@media (prefers-reduced-motion:no-preference){text{opacity:0;animation:show .01s forwards}}"
        "@media print{text{opacity:1;animation:none}}@keyframes show{to{opacity:1}}</style>",
        f'<rect width="{width:.0f}" height="{height}" rx="8" fill="#0d1117"/>',
    ]
    for number, (clock, parts) in enumerate(rows):
        spans = "".join(f'<tspan style="{style_of(style)}">{escape(text)}</tspan>' for style, text in joined(parts))
        place = left + (number + 0.75) * step
        out.append(f'<text x="{left}" y="{place:.0f}" style="animation-delay:{clock:.2f}s" xml:space="preserve">{spans}</text>')
    return "\n".join(out) + "\n</svg>\n"


def joined(parts):
    """Joins neighbours of one style: a typed command has a piece for each key."""
    found = []
    for style, text in parts:
        style = "" if style == "0" else style
        if found and found[-1][0] == style:
            found[-1] = (style, found[-1][1] + text)
        else:
            found.append((style, text))
    return found


def main():
    program, directory = map(os.path.abspath, sys.argv[1:3])
    if len(sys.argv) == 3:
        # The name alone is what a user types who installed the package.
        with tempfile.TemporaryDirectory() as place:
            shutil.copy(program, os.path.join(place, "fourtuple"))
            again = ["unshare", "--net", "--mount", sys.executable, *sys.argv, place]
            sys.exit(subprocess.run(again).returncode)
    subprocess.run(["mount", "--bind", sys.argv[3], "/usr/local/bin"], check=True)
    for command in ("ip link set lo up", "ip addr add 10.0.0.1/32 dev lo", "sysctl -qw net.ipv4.tcp_rfc1337=1"):
        subprocess.run(command.split(), check=True)
    subprocess.run(["sysctl", "-qw", "net.ipv4.ip_local_port_range=32768 36863"], check=True)
    client = subprocess.Popen([sys.executable, "-c", f"import runpy; runpy.run_path({__file__!r})['load']()"], stdout=subprocess.PIPE)
    try:
        client.stdout.readline()
        events = session()
    finally:
        client.kill()
        client.wait()
    os.makedirs(directory, exist_ok=True)
    with open(os.path.join(directory, "doctor.cast"), "w", encoding="utf-8") as file:
        header = {"version": 2, "width": WIDTH, "height": HEIGHT, "env": {"TERM": "xterm-256color"}}
        file.write("\n".join([json.dumps(header)] + [json.dumps([round(at, 3), "o", text]) for at, text in events]) + "\n")
    with open(os.path.join(directory, "doctor.svg"), "w", encoding="utf-8") as file:
        file.write(picture(events))


if __name__ == "__main__":
    main()
